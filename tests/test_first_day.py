"""What a first day brings: narrow terminals, other folders, addresses that are not ours."""

import http.client
import json
import os
import shlex
from contextlib import closing
from io import StringIO
from pathlib import Path

import chat
import fetch_model
import openai
import pytest
import start_llm as s
from rich.console import Console
from serving import Served, free_port
from test_security import listening
from tiny_models import DENSE, tiny_model

import install_and_run as install


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(DENSE, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("width", [40, 60, 75, 80])
def test_a_bar_stays_in_its_line_however_narrow_the_terminal(monkeypatch, width):
    console = Console(file=StringIO(), force_terminal=True, width=width)
    monkeypatch.setattr(s, "_CONSOLE", console)
    s.show_progress("7f3a7f3a", done=100_000, of=131_072)
    assert "\n" not in console.file.getvalue()


def test_a_chat_names_the_model_that_it_talks_to(folder, tmp_path, monkeypatch, capsys):
    with closing(Served(folder, strict_model_names=True)) as served:
        url = f"http://127.0.0.1:{served.state.config.mlx_port}"
        monkeypatch.setattr("sys.argv", ["chat.py", "--url", url, "--no-tools"])
        words = iter(["Hello", "/quit"])
        monkeypatch.setattr("builtins.input", lambda _: next(words))
        chat.main()
    said = capsys.readouterr().out
    assert "TTFT" in said and "is not loaded" not in said


@pytest.mark.parametrize("behind", ["", "/", "/tree/main", "/tree/main/", "/blob/main/config.json"])
def test_an_address_from_the_browser_is_named_as_its_repository(behind):
    config = s.Config(model_path=f"https://huggingface.co/some/Model-4bit{behind}")
    assert s._chosen(config) == "some/Model-4bit"
    assert s._chosen(s.Config(model_path="/my/tree/main")) == "/my/tree/main"


@pytest.mark.parametrize("query", ["session=", "session_id=a", "sesion=a"])
def test_only_a_request_without_a_query_forgets_all(folder, query):
    with closing(Served(folder)) as served:
        port = served.state.config.mlx_port

        def ask(method, path, body=None):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
                connection.request(method, path, body and json.dumps(body))
                return json.load(connection.getresponse())

        messages = [{"role": "user", "content": "Hello " * 90}]
        ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 3})
        assert ask("DELETE", f"/v1/cache?{query}") == {"dropped": 0}
        assert ask("DELETE", "/v1/cache")["dropped"] >= 1


def test_codex_at_the_servers_own_port_is_told_where_its_api_is(folder):
    with closing(Served(folder)) as served, pytest.raises(openai.NotFoundError, match="PROXY_PORT"):
        served._sdk.responses.create(model="any", input="Hello.")


def test_an_address_of_another_machine_is_not_asked_who_listens_there(monkeypatch):
    asked = []
    monkeypatch.setattr(s.socket.socket, "connect_ex", lambda _, at: asked.append(at) or 0)
    config = s.Config(mlx_host="192.0.2.1", api_key="k", mlx_port=free_port())
    with pytest.raises(s.ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        s._listen(config, s.build_state(config))
    assert not asked


def test_no_time_is_longer_than_a_socket_can_wait():
    with pytest.raises(s.ConfigError, match="IDLE_CONNECTION_SECONDS"):
        s.Config.from_env({"IDLE_CONNECTION_SECONDS": "9999999999"})
    with (
        listening(idle_connection_seconds=1e8) as port,
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection,
    ):
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503


def test_an_env_file_that_cannot_be_read_is_one_sentence(monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(s, "dotenv_values", refuse)
    monkeypatch.setattr(fetch_model, "dotenv_values", refuse)
    monkeypatch.setattr("sys.argv", ["start-llm.py"])
    assert s.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert fetch_model.main() == 2
    assert ".env cannot be read" in capsys.readouterr().err


def test_the_home_of_nobody_is_one_sentence():
    with pytest.raises(s.ModelError, match="MODEL_PATH=~nobody-at-all/model"):
        s.resolve_model(s.Config(model_path="~nobody-at-all/model"))


def test_packages_of_the_users_own_path_do_not_hide_the_pinned_ones(monkeypatch, tmp_path):
    started = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install, "is_this_python_usable", lambda: True)
    monkeypatch.setattr(install, "prepare", lambda *_: None)
    monkeypatch.setattr(install, "server_environment", lambda _, environ: dict(environ))
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call[2]))
    install.run([])
    assert "PYTHONPATH" not in started[0]


def test_the_command_it_names_works_where_it_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "is_this_python_usable", lambda: True)
    monkeypatch.setattr(install, "prepare", lambda *_: None)
    assert install.run(["--setup-only"]) == 0
    said = capsys.readouterr().out
    assert Path(shlex.split(said.partition("with: ")[2])[1]).exists()


def test_a_chats_tools_survive_what_they_meet(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert chat.use_tool("read_file", '{"path": "a"}', tmp_path).startswith("Error")
    assert chat.use_tool("read_file", "[" * 100_000, tmp_path).startswith("Error")


def test_of_a_large_file_only_its_beginning_is_read(tmp_path, monkeypatch):
    (tmp_path / "big").write_text("x" * 100_000)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("all of it"))
    assert chat.use_tool("read_file", '{"path": "big"}', tmp_path) == "x" * chat.MOST_CHARACTERS


@pytest.mark.parametrize("wrong", [["--url", "http://[::1"], ["--url", "h:x"], ["--key", "ключ"]])
def test_a_chat_says_what_it_cannot_use(monkeypatch, wrong):
    monkeypatch.setattr("sys.argv", ["chat.py", *wrong])
    with pytest.raises(SystemExit, match="cannot be used"):
        chat.main()
