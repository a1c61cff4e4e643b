"""scripts/inspect_mlx_cache.py shows what a server and a session log say, and nothing it cannot."""

import json
import subprocess
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from server_fixture import SYSTEM, Served, Talk, user
from tiny_models import DENSE, WORDS, tiny_model

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_mlx_cache.py"


def shown(*args):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    return run.returncode, run.stdout, run.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    folder = tiny_model(DENSE, root)
    with closing(
        Served(folder, log_root=str(root / "inspected"), api_key="key")
    ) as running:
        running._sdk.api_key = "key"
        talk = Talk(running, 1, [SYSTEM, user(" ".join(WORDS[:50] * 8))])
        talk.step(extra_body={"session_id": "[bold]main"})
        talk.branch(2, seed=2).step(extra_body={"session_id": "other"})
        yield running


def test_the_cache_of_a_server_is_a_tree(served):
    url = f"http://127.0.0.1:{served.state.config.mlx_port}"
    status, out, _ = shown("--url", url, "--key", "key")
    assert status == 0 and "[bold]main" in out and "other" in out
    assert "memory: limit" in out and "counters above zero" in out
    status, out, _ = shown("--url", url, "--key", "key", "--json")
    assert status == 0 and json.loads(out)["status"] == "ok"
    status, _, err = shown("--url", url, "--key", "wrong")
    assert status == 2 and "401" in err


def test_a_session_log_is_a_table(served):
    (log,) = Path(served.state.config.log_root).glob("*/cache-session-other.log")
    status, out, _ = shown(log)
    assert status == 0 and "match" in out
    assert "content" not in log.read_text()  # what was sent is not in it unasked


def test_nobody_there_is_a_sentence(tmp_path):
    assert shown("--url", "http://127.0.0.1:9")[0] == 2
    assert shown(tmp_path / "none.log")[0] == 2


def test_lines_without_a_parent_any_more_are_shown(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import inspect_mlx_cache

    line = {"tokens": 5, "shared": 2, "bytes": 7, "idle_seconds": 1.0, "running": False}
    lines = [{**line, "id": n, "parent": n + 1, "session": f"s{n}"} for n in range(3)]
    console = Console(record=True, width=200, file=StringIO())
    console.print(inspect_mlx_cache.tree_of(lines))
    text = console.export_text()
    assert all(f"s{n}" in text for n in range(3))
