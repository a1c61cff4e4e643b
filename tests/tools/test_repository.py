"""What stands around the program: workflow, templates, pre-commit, files that start it at login."""

import configparser
import os
import plistlib
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = re.compile(r"(?<![\w./-])((?:\.ci|\.github|scripts|tests)/[\w./-]+)")


def read_yaml(name):
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


def workflow_commands():
    jobs = read_yaml(".github/workflows/checks.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_workflow_and_hooks_name_files_that_exist():
    hooks = read_yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    commands = [*workflow_commands(), *(hook["entry"] for hook in hooks)]
    named = [name for command in commands for name in PROGRAM.findall(command)]
    named = [name for name in named if name != "tests/unit"]
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []
    for name in (".ci/run", ".github/one_reply.sh"):
        assert os.access(ROOT / name, os.X_OK), name


def test_project_has_one_version_and_names_its_files():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"## {project['version']}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert (ROOT / project["readme"]).exists()
    assert all((ROOT / name).exists() for name in project["license-files"])


def test_launchd_starts_the_server_again_after_a_failure():
    text = (ROOT / "examples" / "start-llm.plist").read_bytes()
    job = plistlib.loads(text)
    assert job["ProgramArguments"][1].endswith("/install_and_run.py")
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["RunAtLoad"] is True


def test_systemd_starts_the_server_again_but_not_after_a_wrong_setting():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(ROOT / "examples" / "start-llm.service")
    service = unit["Service"]
    assert service["ExecStart"].endswith("/install_and_run.py")
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"
