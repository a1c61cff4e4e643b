"""What a first day brings: narrow terminals, other folders, addresses that are not ours."""

import errno
import json
import os
import resource
import shlex
from io import StringIO
from pathlib import Path

import chat
import fetch_model
import pytest
import start_llm as s
from http_client import answer, listening, message_of, status
from rich.console import Console

import install_and_run as install


def test_a_bar_stays_in_its_line_however_narrow_the_terminal(monkeypatch):
    console = Console(file=StringIO(), force_terminal=True, width=40)
    monkeypatch.setattr(s, "_CONSOLE", console)
    s.show_prefill_progress("7f3a7f3a", n_read=100_000, n_prompt=131_072)
    assert "\n" not in console.file.getvalue()


@pytest.mark.parametrize(
    "suffix", ["", "/", "/tree/main", "/tree/main/", "/blob/main/config.json"]
)
def test_an_address_from_the_browser_is_named_as_its_repository(suffix):
    config = s.Config(model_path=f"https://huggingface.co/some/Model-4bit{suffix}")
    assert s._read_model_name(config) == "some/Model-4bit"
    assert s._read_model_name(s.Config(model_path="/my/tree/main")) == "/my/tree/main"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_loopback_address_that_was_not_asked_for_may_be_missing(
    monkeypatch, host
):
    (other_host,) = {"127.0.0.1", "::1"} - {host}
    config = s.Config(mlx_host=host)
    state = s.build_state(config)

    def listen_without(missing_host):
        def bind(address, *_, **__):
            if address[0] == missing_host:
                raise OSError(errno.EADDRNOTAVAIL, "planted")
            return address[0]

        monkeypatch.setattr(s, "LLMServer", bind)
        return s._listen(config, state)

    assert listen_without(other_host) == [host]

    with pytest.raises(s.ConfigError, match=f"cannot listen on {host}"):
        listen_without(host)


@pytest.mark.parametrize("host", ["localhost", "LocalHost"])
def test_localhost_in_any_case_is_both_loopback_addresses(monkeypatch, host):
    monkeypatch.setattr(s, "LLMServer", lambda address, *_, **__: address[0])
    config = s.Config(mlx_host=host)

    assert s._listen(config, s.build_state(config)) == ["127.0.0.1", "::1"]
    assert s.write_url(host, 9) == "http://127.0.0.1:9"


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, UNLIMITED, 4096),  # macOS
        (1024, 1 << 19, 4096),
        (512, 2048, 2048),
        (8192, 8192, None),
        (UNLIMITED, UNLIMITED, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed_and_never_lowered(
    monkeypatch, soft, hard, raised
):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))

    s._raise_descriptor_limit()

    assert limits == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize("name", ["IDLE_CONNECTION_SECONDS", "SHUTDOWN_GRACE_SECONDS"])
def test_no_time_is_longer_than_can_be_waited(name):
    with pytest.raises(s.ConfigError, match=name):
        s.Config.from_env({name: "9999999999"})


def test_an_env_file_that_cannot_be_read_is_one_sentence(monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(s, "_read_env_file", refuse)
    monkeypatch.setattr(fetch_model, "dotenv_values", refuse)
    monkeypatch.setattr("sys.argv", ["start-llm.py"])
    assert s.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert fetch_model.main() == 2
    assert ".env cannot be read" in capsys.readouterr().err


def test_packages_of_the_users_own_path_do_not_hide_the_pinned_ones(
    monkeypatch, tmp_path
):
    environments = []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install, "is_this_python_usable", lambda: True)
    monkeypatch.setattr(install, "prepare", lambda *_: None)
    monkeypatch.setattr(install, "server_environment", lambda _, environ: dict(environ))
    monkeypatch.setattr(os, "execve", lambda *call: environments.append(call[2]))
    monkeypatch.setattr(install, "hold_signals", lambda: None)
    install.run([])

    assert "PYTHONPATH" not in environments[0]


def test_the_command_it_names_works_where_it_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "is_this_python_usable", lambda: True)
    monkeypatch.setattr(install, "prepare", lambda *_: None)
    monkeypatch.setattr(install, "server_environment", lambda *_: {})
    assert install.run(["--setup-only"]) == 0
    output = capsys.readouterr().out
    _, _, command = output.partition("with: ")
    _, program, *_ = shlex.split(command)
    assert Path(program).exists()


def test_a_chats_tools_survive_what_they_meet(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert chat.use_tool("read_file", '{"path": "a"}', tmp_path).startswith("Error")
    assert chat.use_tool("read_file", "[" * 100_000, tmp_path).startswith("Error")


@pytest.mark.parametrize(
    "wrong", [["--url", "http://[::1"], ["--url", "h:x"], ["--key", "ключ"]]
)
def test_a_chat_says_what_it_cannot_use(monkeypatch, wrong):
    monkeypatch.setattr("sys.argv", ["chat.py", *wrong])
    with pytest.raises(SystemExit, match="cannot be used"):
        chat.main()


# -- paths that clients of other servers ask for ---------------------------------------


@pytest.fixture(scope="module")
def port():
    with listening() as port:
        yield port


@pytest.mark.parametrize(
    ("line", "real_line"),
    [
        ("POST /chat/completions", "POST /v1/chat/completions"),
        ("POST /completions", "POST /v1/completions"),
        ("POST /messages", "POST /v1/messages"),
        ("POST /messages/count_tokens", "POST /v1/messages/count_tokens"),
        ("POST /messages?beta=true", "POST /v1/messages?beta=true"),
        ("GET /models", "GET /v1/models"),
        ("GET /models/maker%2FModel", "GET /v1/models/maker%2FModel"),
        ("POST /v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("POST /v1/v1/messages", "POST /v1/messages"),
        ("GET /v1/v1/v1/models/", "GET /v1/models"),
        ("POST /v1//chat/completions", "POST /v1/chat/completions"),
        ("GET //v1/models", "GET /v1/models"),
    ],
)
def test_a_base_url_with_or_without_v1_reaches_the_same_route(port, line, real_line):
    code, _, body = answer(port, line=line, body=b"{}")
    real_code, _, real_body = answer(port, line=real_line, body=b"{}")
    assert (code, body) == (real_code, real_body)
    assert code in (400, 503)  # from inside the route: no model is loaded


def test_a_route_without_v1_needs_a_key_as_well():
    with listening(api_key="k") as port:
        for line in ("POST /chat/completions", "GET /v1/v1/models", "GET /models"):
            assert status(port, line=line) == 401


OLLAMA = [
    ("POST /api/chat", 404, "/v1/chat/completions"),
    ("POST /api/generate", 404, "/v1/chat/completions"),
    ("GET /api/tags", 404, "/v1/models"),
    ("POST /api/show", 404, "/v1/models"),
    ("GET /api/ps", 404, "/v1/models"),
    ("GET /api/version", 404, "/v1"),
    ("POST /api/pull", 404, "MODEL_PATH"),
    ("POST /api/embed", 404, "no embeddings"),
]
LM_STUDIO = [
    ("GET /api/v0/models", 404, "not LM Studio"),
    ("POST /api/v0/chat/completions", 404, "/v1/chat/completions"),
    ("POST /api/v1/chat", 404, "not LM Studio"),
    ("GET /api/nothing", 404, "neither Ollama nor LM Studio"),
]
OPENAI = [
    ("POST /completion", 404, "not llama.cpp's server"),
    ("GET /props", 404, "/v1"),
    ("POST /v1/embeddings", 404, "no embeddings"),
    ("POST /v1/responses", 404, "PROXY_PORT"),
    ("GET /v1/responses/resp_1", 404, "PROXY_PORT"),
    ("POST /v1/threads/thread_1/messages", 404, "no conversation is stored here"),
    ("GET /v1", 404, "/v1/chat/completions"),
    ("GET /v1/", 404, "/v1/chat/completions"),
    ("GET /v1/chat/completions", 405, "/v1/chat/completions"),
    ("POST /v1/chat/completions/chat/completions", 404, "/v1"),
    ("GET /docs", 404, "/openapi.json"),
    ("GET /swagger/index.html", 404, "/openapi.json"),
    ("POST /v1beta/models/gemini:generateContent", 404, "PROXY_PORT"),
    ("GET /nothing/at/all", 404, "/v1"),
]
ANTHROPIC = [
    ("POST /v1/messages/batches", 404, "/v1/messages"),
    ("GET /v1/messages", 405, "/v1/messages"),
    ("GET /messages", 405, "/v1/messages"),
]


@pytest.mark.parametrize(
    ("line", "code", "advice"), OLLAMA + LM_STUDIO + OPENAI + ANTHROPIC
)
def test_a_path_that_is_not_served_is_answered_with_what_to_use(
    port, line, code, advice
):
    found, _, body = answer(port, line=line)
    assert found == code
    assert advice in message_of(body)


def test_the_advice_has_the_shape_of_the_api_that_was_asked_for(port):
    for line, _, _ in OLLAMA:
        assert isinstance(json.loads(answer(port, line=line)[2])["error"], str)
    for line, _, _ in OPENAI:
        error = json.loads(answer(port, line=line)[2])["error"]
        assert error["type"] == "invalid_request_error"
    for line, _, _ in ANTHROPIC:
        body = json.loads(answer(port, line=line)[2])
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}

    with listening(api_key="k") as port:
        body = json.loads(answer(port, line="GET /api/tags")[2])
        assert "a key is needed" in body["error"]


# -- fields that stand for messages which are not stored here --------------------------


@pytest.mark.parametrize(
    "field", ["previous_response_id", "conversation", "assistant_id"]
)
def test_a_stored_conversation_is_refused_by_name_on_every_api(port, field):
    chat_body = {"messages": [{"role": "user", "content": "And then?"}]}
    bodies = {
        "/v1/chat/completions": chat_body,
        "/v1/messages": {**chat_body, "max_tokens": 9},
        "/v1/completions": {"prompt": "And then?"},
    }
    for path, body in bodies.items():
        sent = json.dumps({**body, field: "id_1"}).encode()
        code, _, reply = answer(port, line=f"POST {path}", body=sent)
        assert code == 400
        assert message_of(reply).startswith(f"{field}: no conversation is stored here")

        for harmless in ({field: None}, {"store": True}, {"thread_id": "a session"}):
            sent = json.dumps({**body, **harmless}).encode()
            assert status(port, line=f"POST {path}", body=sent) == 503


def test_the_version_is_that_of_the_program(port):
    assert json.loads(answer(port, line="GET /version")[2]) == {"version": s.VERSION}
