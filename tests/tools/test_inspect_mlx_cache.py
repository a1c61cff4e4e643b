"""scripts/inspect_mlx_cache.py shows the cache of a server and the requests of a session log."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import inspect_mlx_cache
import pytest
from rich.console import Console
from server_fixture import SYSTEM, Served, Talk, user
from tiny_models import WORDS

SCRIPT = Path(__file__).parents[2] / "scripts" / "inspect_mlx_cache.py"


def run(*arguments):
    """The program, run to its end."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    logs = str(tmp_path_factory.mktemp("inspected"))
    with Served(folder, log_root=logs, api_key="key") as running:
        running._sdk.api_key = "key"
        question = " ".join(WORDS[:50] * 8)
        talk = Talk(running, 1, [SYSTEM, user(question)])
        talk.step(extra_body={"session_id": "[bold]main"})
        talk.branch(2, seed=2).step(extra_body={"session_id": "other"})
        yield running


def test_the_cache_of_a_server_is_a_tree(served):
    url = f"http://127.0.0.1:{served.state.config.mlx_port}"

    result = run("--url", url, "--key", "key")
    assert result.returncode == 0
    assert "[bold]main" in result.stdout and "other" in result.stdout
    assert "memory: limit" in result.stdout
    assert "counters above zero" in result.stdout
    assert "layers: 0-1 attention" in result.stdout

    result = run("--url", url, "--key", "key", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["status"] == "ok"

    result = run("--url", url, "--key", "wrong")
    assert result.returncode == 2 and "401" in result.stderr


def test_a_session_log_is_a_table(served):
    (log,) = Path(served.state.config.log_root).glob("*/cache-session-other.log")

    result = run(log)

    assert result.returncode == 0
    first_rows = result.stdout.splitlines()[:4]
    for name in inspect_mlx_cache.COLUMNS:  # none is cut
        assert any(name in row for row in first_rows), name
    assert "content" not in log.read_text()  # prompts are in it only where asked for


def test_nobody_there_is_a_sentence(tmp_path):
    assert run("--url", "http://127.0.0.1:9").returncode == 2
    assert run(tmp_path / "none.log").returncode == 2


def test_lines_without_a_parent_any_more_are_shown():
    figures = {
        "tokens": 5,
        "shared": 2,
        "bytes": 7,
        "idle_seconds": 1.0,
        "running": False,
    }
    entries = [
        {**figures, "id": n, "parent": n + 1, "session": f"s{n}"} for n in range(3)
    ]
    console = Console(record=True, width=200, file=StringIO())

    console.print(inspect_mlx_cache.tree_of(entries))

    text = console.export_text()
    assert all(f"s{n}" in text for n in range(3))
