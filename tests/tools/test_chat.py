"""scripts/chat.py: a turn with its calls and its numbers, and what it says when that fails."""

import subprocess
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import chat
import pytest
from rich.console import Console
from server_fixture import Served, free_port
from tiny_models import DENSE, tiny_model

SCRIPT = Path(chat.__file__)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with closing(Served(tiny_model(DENSE, tmp_path_factory.getbasetemp()))) as running:
        yield running


def url_of(served):
    return f"http://127.0.0.1:{served.state.config.mlx_port}"


def chat_with(url, folder):
    console = Console(file=StringIO(), width=200)
    return chat.Chat(chat.Server(url), console, folder, chat.TOOLS), console.file


def test_turns_say_what_was_cached(served, tmp_path):
    talk, out = chat_with(url_of(served), tmp_path)
    talk.ask("Which files are here?")
    talk.ask("And now?")
    costs = [line for line in out.getvalue().splitlines() if line.startswith("prompt ")]
    assert len(costs) >= 2 and "cached 0 " in costs[0] and "TTFT" in costs[0]
    assert all("cached 0 " not in cost for cost in costs[1:])


def test_a_conversation_typed_into_the_program(served, tmp_path):
    command = [sys.executable, str(SCRIPT), "--url", url_of(served), "--no-tools"]
    said = subprocess.run(
        command, input="Hello\n/new\nHello\n/quit\n", capture_output=True, text=True,
        cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("TTFT") >= 2


@pytest.mark.parametrize("how", ["program", "turn"])
def test_a_missing_server_is_one_clear_sentence(how, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    if how == "program":
        command = [sys.executable, str(SCRIPT), "--url", url]
        run = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60
        )
        assert run.returncode == 1
        said = run.stderr
    else:
        talk, out = chat_with(url, tmp_path)
        talk.ask("Hello")
        assert talk.messages == []
        said = out.getvalue()
    assert (
        f"No server answers at {url}. Start one with: python3.12 install_and_run.py"
        in said
    )
    assert "Traceback" not in said


def test_an_address_that_is_none_is_one_clear_sentence(tmp_path):
    command = [sys.executable, str(SCRIPT), "--url", "http://127.0.0.1:80x"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 1 and "80x" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("settings", "url", "key"),
    [
        ({}, "http://127.0.0.1:8080", ""),
        ({"MLX_PORT": "9000", "API_KEY": " , one,two"}, "http://127.0.0.1:9000", "one"),
        ({"MLX_HOST": "0.0.0.0", "MLX_PORT": ""}, "http://127.0.0.1:8080", ""),
        ({"MLX_HOST": "::1", "API_KEY": None}, "http://[::1]:8080", ""),
        ({"MLX_HOST": "10.0.0.7"}, "http://10.0.0.7:8080", ""),
    ],
)
def test_the_server_is_where_its_settings_say(settings, url, key):
    assert chat.server_of(settings) == chat.Server(url, key)


def test_the_settings_are_those_of_the_server(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text(f"MLX_PORT={free_port()}\nAPI_KEY=written\n")
    monkeypatch.setattr(chat, "SETTINGS", tmp_path / ".env")
    monkeypatch.setattr("sys.argv", ["chat.py", "--no-tools"])
    monkeypatch.setenv(
        "MLX_PORT", port := str(free_port())
    )  # goes before the file, as there
    with pytest.raises(SystemExit, match=f"127.0.0.1:{port}"):
        chat.main()
    monkeypatch.setattr(chat.Server, "model", lambda self: sys.exit(f"key {self.key}"))
    with pytest.raises(SystemExit, match="key written"):
        chat.main()


def test_half_an_answer_is_none(tmp_path, monkeypatch):
    def stream(self, body):
        yield {
            "choices": [{"delta": {"content": "Half an ans"}, "finish_reason": None}]
        }

    monkeypatch.setattr(chat.Server, "stream", stream)
    talk = chat.Chat(chat.Server("http://here"), Console(file=StringIO()), tmp_path, [])
    talk.ask("hello")
    assert (
        talk.messages == []
        and "went away in mid-answer" in talk.console.file.getvalue()
    )


def test_a_refusal_is_told_in_the_servers_words():
    assert (
        chat.refusal(503, b'{"error": {"message": "loading"}}')
        == "The server says 503: loading"
    )
    assert chat.refusal(500, b"<html>") == "The server says 500."


def test_the_tools_look_and_never_leave_the_folder(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "notes.txt").write_text("The code word is falcon.")
    use = lambda name, path: chat.use_tool(name, f'{{"path": "{path}"}}', tmp_path)  # noqa: E731
    assert use("list_files", ".") == "below/\nnotes.txt"
    assert use("read_file", "notes.txt") == "The code word is falcon."
    assert use("list_files", "below") == "(empty)"
    for path in ("..", "/etc/passwd", "below/../../x"):
        assert "outside" in use("read_file", path)
    for wrong in ("not json", "{}", "[]", '{"path": "nothing.txt"}'):
        assert chat.use_tool("read_file", wrong, tmp_path).startswith("Error: ")
    assert "no tool" in use("delete", "notes.txt")


def test_a_thought_is_dim_and_an_answer_is_not():
    answer = chat.Answer()
    thought = answer.take({"reasoning_content": "Hm."})
    assert [str(span.style) for span in thought.spans] == ["dim italic"]
    said = answer.take({"content": "Yes."})
    assert said.plain == "\nYes." and not said.spans
    assert answer.message() == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }
