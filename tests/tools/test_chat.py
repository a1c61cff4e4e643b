"""scripts/chat.py: a turn with its calls and its numbers, and the errors it shows."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import agent_steps
import chat
import launch
import pytest
from rich.console import Console
from server_fixture import free_port

SCRIPT = Path(chat.__file__)


def url_of(served):
    return f"http://127.0.0.1:{served.state.config.mlx_port}"


def chat_with(url, folder):
    console = Console(file=StringIO(), width=200)
    server = chat.Server(url, model="any")
    return chat.Chat(server, console, folder, chat.TOOLS), console.file


def test_turns_say_what_was_cached(served, tmp_path):
    talk, output = chat_with(url_of(served), tmp_path)

    talk.ask("Which files are here?")
    talk.ask("And now?")

    lines = output.getvalue().splitlines()
    costs = [line for line in lines if line.startswith("prompt ")]
    assert len(costs) >= 2 and "cached 0 " in costs[0] and "TTFT" in costs[0]
    assert all("cached 0 " not in cost for cost in costs[1:])


def test_a_conversation_typed_into_the_program(served, tmp_path):
    command = [sys.executable, str(SCRIPT), "--url", url_of(served), "--no-tools"]
    result = subprocess.run(
        command, input="Hello\n/new\nHello\n/quit\n", capture_output=True, text=True,
        cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert result.stdout.count("TTFT") >= 2


def test_a_missing_server_is_one_clear_sentence(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    talk, output = chat_with(url, tmp_path)

    talk.ask("Hello")

    assert talk.messages == []
    shown = output.getvalue()
    assert f"{url} does not answer: " in shown
    assert "Start one with: python3.12 install_and_run.py" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("settings", "url", "key"),
    [
        ({}, "http://127.0.0.1:8080", ""),
        ({"MLX_PORT": "9000", "API_KEY": " , one,two"}, "http://127.0.0.1:9000", "one"),
        ({"MLX_HOST": "0.0.0.0", "MLX_PORT": ""}, "http://127.0.0.1:8080", ""),
        ({"MLX_HOST": "::"}, "http://127.0.0.1:8080", ""),
        ({"MLX_HOST": "::1", "API_KEY": None}, "http://[::1]:8080", ""),
        ({"MLX_HOST": "10.0.0.7"}, "http://10.0.0.7:8080", ""),
    ],
)
def test_the_server_is_where_its_settings_say(settings, url, key, tmp_path):
    settings = launch.read_settings(tmp_path / ".env", settings)
    assert chat.place_of(settings) == launch.Place(url, key)


def test_half_an_answer_is_none(tmp_path, monkeypatch):
    def events(self, path, body):
        choice = {"delta": {"content": "Half an ans"}, "finish_reason": None}
        yield 0.1, {"choices": [choice]}

    monkeypatch.setattr(chat.Server, "events", events)
    output = StringIO()
    server = chat.Server("http://here", model="any")
    talk = chat.Chat(server, Console(file=output), tmp_path, [])

    talk.ask("hello")

    assert talk.messages == [] and "went away in mid-answer" in output.getvalue()


def test_a_refusal_is_told_in_the_servers_words():
    body = '{"error": {"message": "loading"}}'
    assert agent_steps.words_of(body) == "loading"
    assert agent_steps.words_of("<html>") == "<html>"


def test_the_tools_look_and_never_leave_the_folder(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "notes.txt").write_text("The code word is falcon.")

    def use(name, path):
        return chat.use_tool(name, json.dumps({"path": path}), tmp_path)

    assert use("list_files", ".") == "below/\nnotes.txt"
    assert use("read_file", "notes.txt") == "The code word is falcon."
    assert use("list_files", "below") == "(empty)"
    for path in ("..", "/etc/passwd", "below/../../x"):
        assert "outside" in use("read_file", path)
    for arguments in ("not json", "{}", "[]", '{"path": "nothing.txt"}'):
        assert chat.use_tool("read_file", arguments, tmp_path).startswith("Error: ")
    assert "no tool" in use("delete", "notes.txt")
