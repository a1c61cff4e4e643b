"""LiteLLM beside the server: one configuration, one process, kept and ended; nobody else's touched.

The last part runs the real LiteLLM, once, between the openai SDK and a server on a tiny model, and
before a stub that plays the server where the Anthropic route is looked at.
"""

import contextlib
import http.client
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import litellm_beside as beside
import openai
import psutil
import pytest
import start_llm as s
from anthropic_client import SYSTEM, as_chat, ask, react, text, total
from anthropic_client import user as blocks
from litellm_beside import Keeper, Order, is_open, settings_for
from server_fixture import (
    MOST_TOKENS,
    PATIENCE,
    TOOLS,
    Client,
    Exchange,
    Message,
    Served,
    Talk,
    free_port,
    functions_of,
    user,
    wait_until,
)
from start_llm import Config, run_proxy
from tiny_models import DENSE, tiny_model

KEY = "hidden words 1"
PAGE = "https://chat.example"
LITELLM = Path(sys.executable).with_name("litellm")

# What stands in for LiteLLM. Its last argument is the port. It starts a child of its own.
LISTENS = """
import http.server, os, subprocess, sys
print("environment", sorted(os.environ), "CORS", os.environ.get("LITELLM_CORS_ORIGINS"), flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), None).serve_forever()
"""
DIES = "import time; time.sleep(0.1); raise SystemExit(3)"


def order_of(config: Config, **more: Any) -> str:
    """What a server says to the keeper, but for the list of keys."""
    model = {
        "model_id": "maker/Model-4bit",
        "context_length": 4096,
        "program": str(LITELLM),
        "advice": s.advice_by_path(config),
    }
    return json.dumps(config.model_dump(mode="json") | model | more)


def settings_of(**fields: Any) -> dict[str, Any]:
    return settings_for(Order.from_json(order_of(Config(**fields))))


def routes_of(settings: dict[str, Any]) -> dict[str, str]:
    return {
        row["model_name"]: row["litellm_params"]["model"]
        for row in settings["model_list"]
    }


# -- configuration ---------------------------------------------------------------------------------


def test_every_name_leads_to_the_one_model_and_strict_names_only_to_their_own():
    own, claude = "openai/maker/Model-4bit", "anthropic/maker/Model-4bit"
    plain = {"maker/Model-4bit": own, "claude-*": claude}
    assert routes_of(settings_of()) == plain | {"*": own}
    assert routes_of(settings_of(strict_model_names=True)) == plain
    assert routes_of(settings_of(proxy_model_id="mine"))["mine"] == own


def test_the_servers_key_goes_along_and_is_asked_of_clients_unless_they_have_their_own():
    same, other = (
        settings_of(api_key=KEY),
        settings_of(api_key=KEY, proxy_api_key="other"),
    )
    for settings in (same, other):
        assert {row["litellm_params"]["api_key"] for row in settings["model_list"]} == {
            KEY
        }
    keys = [settings["general_settings"]["master_key"] for settings in (same, other)]
    assert keys == [KEY, "other"]


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:81"), ("::1", "http://[::1]:81")]
)
def test_each_route_goes_to_the_server_with_no_key_of_anybody(host, url):
    rows = [
        row["litellm_params"]
        for row in settings_of(mlx_host=host, mlx_port=81)["model_list"]
    ]
    assert {row["api_base"].removesuffix("/v1") for row in rows} == {url}
    assert {row["api_key"] for row in rows} == {"none"}


def test_a_key_is_asked_of_all_or_its_lack_is_said_to_be_meant():
    key, free = settings_of(proxy_api_key=KEY), settings_of()
    allowed = "dangerously_permit_weak_or_unset_master_key"
    assert key["general_settings"].get("master_key") == KEY
    # LiteLLM refuses to start with a key that it thinks weak; whoever sets one means it
    assert (
        key["general_settings"].get(allowed)
        is free["general_settings"].get(allowed)
        is True
    )
    assert "master_key" not in free["general_settings"]
    assert KEY not in repr(Config(proxy_api_key=KEY))


def test_the_gate_has_the_key_and_the_advice_of_the_server():
    gate = settings_of(api_key=KEY, mlx_port=81, proxy_port=82)["start_llm_gate"]
    assert gate["key"] == KEY
    assert "http://127.0.0.1:81/v1/models" in gate["advice"]["/api/tags"]
    assert "http://127.0.0.1:82/v1" in gate["welcome"]
    assert settings_of()["start_llm_gate"]["key"] == ""


def test_nothing_is_tried_twice_and_a_day_of_silence_is_borne():
    settings = settings_of()
    router = settings["router_settings"]
    assert (router["num_retries"], router["disable_cooldowns"]) == (0, True)
    assert (
        min(router["timeout"], settings["litellm_settings"]["request_timeout"])
        >= 86_400
    )


# -- a process kept --------------------------------------------------------------------------------


def pid_in(path: Path) -> int:
    """Of the command, 0 while there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(path.read_text().split()[0])
    return 0


class Pump:
    """A Keeper with a command of the test's, running in a thread."""

    def __init__(
        self, folder: Path, code: str, *, port: int | None = None, **how: float
    ):
        self.port, self.files = port or free_port(), folder / "logs" / "litellm-0"
        command = [sys.executable, "-c", code, f"{self.files}.json", str(self.port)]
        times = {"delay": 0.05, "patience": 0.5, **how}
        keeper = Keeper(command, self.files, '{"key": "hidden"}', self.port, **times)
        self._stop = threading.Event()
        self.thread = threading.Thread(
            target=keeper.keep_running, args=(self._stop,), daemon=True
        )
        self.thread.start()

    @property
    def pid(self) -> int:
        return pid_in(Path(f"{self.files}.pid"))

    def wait_until_up(self) -> int:
        wait_until(lambda: is_open(self.port) and self.pid)
        return self.pid

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def pump(tmp_path) -> Iterator[Any]:
    """A function that starts pumps; all are stopped in the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, **how: Any) -> Pump:
            started = Pump(tmp_path, code, **how)
            stack.callback(started.stop)
            return started

        yield start


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(s.logger, "propagate", True)
    for log in (s.logger, beside.log):
        caplog.set_level(logging.INFO, log.name)
    return caplog


def test_stop_leaves_no_process_no_port_and_no_pid_file(pump):
    running = pump(LISTENS)
    family = [psutil.Process(running.wait_until_up())]
    wait_until(family[0].children)
    family += family[0].children()
    assert len(family) == 2
    running.stop()
    assert not any(process.is_running() for process in psutil.wait_procs(family, 5)[1])
    assert not is_open(running.port)
    assert running.pid == 0


def test_its_files_are_for_their_owner_alone(pump):
    running = pump(LISTENS)
    running.wait_until_up()
    for ending in ("json", "log", "pid"):
        mode = Path(f"{running.files}.{ending}").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    assert json.loads(Path(f"{running.files}.json").read_text()) == {"key": "hidden"}


def test_one_that_is_killed_is_started_again(pump, said):
    running = pump(LISTENS)
    first = running.wait_until_up()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: running.pid not in (0, first) and is_open(running.port))
    assert "LiteLLM ended (-9)" in said.text


def test_one_that_never_comes_up_is_tried_ever_less_often(pump, said):
    running = pump(DIES, delay=0.1)
    waits = [0.1 * 2**n for n in range(4)]
    began = time.monotonic()
    wait_until(lambda: said.text.count("LiteLLM ended (3)") == 4)
    assert time.monotonic() - began > sum(waits[:3])
    running.stop()


def test_after_a_long_life_it_comes_again_as_soon_as_at_first(pump, said):
    running = pump(DIES, delay=1.0, steady=0.05)
    wait_until(lambda: said.text.count("LiteLLM ended (3)") == 3)
    assert said.text.count("again in 1 s") == 3
    running.stop()


def test_a_command_that_cannot_be_written_for_is_told_in_one_line(tmp_path, said):
    blocked = tmp_path / "logs"
    blocked.write_text("a file where the folder should be")
    running = Pump(tmp_path, LISTENS, delay=30)
    wait_until(lambda: "LiteLLM ended" in said.text)
    running.stop()
    assert "Traceback" not in said.text


@pytest.mark.parametrize("with_pid_file", [False, True])
def test_a_port_of_somebody_else_is_left_alone(pump, said, tmp_path, with_pid_file):
    port = free_port()
    foreign = subprocess.Popen(
        [sys.executable, "-m", "http.server", "-b", "127.0.0.1", str(port)]
    )
    try:
        wait_until(lambda: is_open(port))
        if with_pid_file:  # the number was given to another program since
            (tmp_path / "logs").mkdir()
            (tmp_path / "logs" / "litellm-0.pid").write_text(f"{foreign.pid} 1")
        running = pump(LISTENS, port=port)
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()
        assert foreign.poll() is None
        assert f"(pid {foreign.pid})" in said.text
    finally:
        foreign.kill()
        foreign.wait()


def test_one_whose_server_lives_is_left_alone(pump, said):
    running = pump(LISTENS)
    first = running.wait_until_up()
    second = pump(
        LISTENS, port=running.port
    )  # of a second server, with the same folder
    second.thread.join(PATIENCE)
    assert not second.thread.is_alive()
    assert running.pid == first
    assert f"(pid {first})" in said.text


def test_one_whose_server_was_killed_is_replaced(pump, said, tmp_path):
    port, files = free_port(), tmp_path / "logs" / "litellm-0"
    files.parent.mkdir()
    command = [sys.executable, "-c", LISTENS, f"{files}.json", str(port)]
    with subprocess.Popen(command, start_new_session=True) as left_over:
        wait_until(lambda: is_open(port))
        # As if its parent had been another process, which is gone.
        Path(f"{files}.pid").write_text(f"{left_over.pid} 4194304")
        running = pump(LISTENS, port=port)
        wait_until(lambda: running.pid not in (0, left_over.pid) and is_open(port))
        assert not psutil.pid_exists(left_over.pid)
    assert "left over from a server that is gone" in said.text


def test_a_long_log_is_copied_once_and_begun_anew(pump, monkeypatch):
    monkeypatch.setattr(beside, "LOG_BYTES", 5000)
    chatters = LISTENS.replace(
        "http.server.HTTPS", "print('x' * 6000, flush=True); http.server.HTTPS"
    )
    running = pump(chatters)
    running.wait_until_up()
    log, last = (Path(f"{running.files}.{ending}") for ending in ("log", "log.1"))
    wait_until(lambda: last.exists() and log.stat().st_size < 5000)
    assert "x" * 6000 in last.read_text()
    assert stat.S_IMODE(last.stat().st_mode) == 0o600


# -- beside a server -------------------------------------------------------------------------------

# What stands in for a server: the real file, with a LiteLLM of the test's.
SERVER = """
import json, sys, time
from pathlib import Path
import conftest, start_llm as s
sys.executable, fields = sys.argv[1], json.loads(sys.argv[2])
config = s.Config(**fields)
s.start_logging(config)
with s.run_proxy(config, {"id": "m", "context_length": 1}):
    sys.stdin.read()
"""


class Beside:
    """A process that runs proxy_beside(), and what it leaves."""

    def __init__(self, folder: Path, *, port: int | None = None, **fields: Any) -> None:
        # Beside this Python there is a LiteLLM which only listens.
        for name, code in (
            ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
            ("litellm", LISTENS),
        ):
            (folder / name).write_text(code)
            (folder / name).chmod(0o755)
        self.port, self._console = port or free_port(), folder / "console.txt"
        self.logs = folder / "logs"
        fields |= {"proxy_port": self.port, "log_root": str(self.logs)}
        command = [
            sys.executable,
            "-c",
            SERVER,
            str(folder / "python"),
            json.dumps(fields),
        ]
        path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        secret = {
            "OPENAI_API_KEY": "users-own",
            "DATABASE_URL": "users-own",
            "PYTHONPATH": path,
        }
        with self._console.open("ab") as console:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=console,
                env={**os.environ, **secret},
            )

    @property
    def said(self) -> str:
        return self._console.read_text()

    @property
    def pid(self) -> int:
        return pid_in(self.logs / f"litellm-{self.port}.pid")

    def family(self, *, but: int = 0) -> list[psutil.Process]:
        """Keeper, LiteLLM (another than `but`), its child: once all are there."""
        children = psutil.Process(self.process.pid).children

        def is_whole() -> bool:
            return (
                self.pid not in (0, but)
                and is_open(self.port)
                and len(children(recursive=True)) == 3
            )

        wait_until(is_whole)
        return children(recursive=True)

    def end(self) -> int:
        """As a server that was told to: its exit status."""
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode


@pytest.fixture
def server(tmp_path) -> Iterator[Any]:
    """A function that starts those; all are killed in the end, and what is beside them goes."""
    started: list[Beside] = []

    def start(**fields: Any) -> Beside:
        started.append(Beside(tmp_path, **fields))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
    wait_until(lambda: not any(is_open(one.port) for one in started))


def are_gone(processes: list[psutil.Process], seconds: float = 8) -> bool:
    return not any(one.is_running() for one in psutil.wait_procs(processes, seconds)[1])


def test_its_environment_is_its_own_and_its_words_are_the_servers(server):
    one = server(proxy_startup_wait_seconds=0.3, api_key="first, second")
    family = one.family()
    wait_until(lambda: f"LiteLLM is up at http://127.0.0.1:{one.port}" in one.said)
    assert " INFO    proxy: LiteLLM is up" in one.said.splitlines()[-1]
    line = (one.logs / f"litellm-{one.port}.log").read_text().partition("\n")[0]
    for name in ("OPENAI_API_KEY", "DATABASE_URL", "HOME"):
        assert name not in line
    assert "LITELLM_MODE" in line
    assert f"CORS http://127.0.0.1:{one.port}" in line  # not "*", which is every page
    settings = json.loads((one.logs / f"litellm-{one.port}.json").read_text())
    assert settings["general_settings"]["master_key"] == "first"
    assert "--host 127.0.0.1" in " ".join(psutil.Process(one.pid).cmdline())
    assert one.end() == 0
    assert are_gone(family)
    assert not is_open(one.port)


def test_ctrl_c_is_for_the_server(server):
    one = server()
    groups = {os.getpgid(process.pid) for process in one.family()}
    assert os.getpgid(one.process.pid) not in groups
    assert len(groups) == 2, "the keeper can end the other as a whole"


def test_a_litellm_that_is_killed_comes_again_and_is_told(server):
    one = server()
    one.family()
    first = one.pid
    os.kill(first, signal.SIGKILL)
    family = one.family(but=first)
    assert "LiteLLM ended (-9)" in one.said
    assert one.end() == 0
    assert are_gone(family)


def test_a_server_that_is_killed_leaves_nothing_and_the_next_one_has_the_port(server):
    one = server()
    family = one.family()
    one.process.kill()
    next_one = server(port=one.port)  # at once
    assert are_gone(family)
    others = next_one.family(but=family[1].pid)
    assert not {process.pid for process in others} & {process.pid for process in family}
    assert "no proxy" not in next_one.said
    wait_until(lambda: f"LiteLLM is up at http://127.0.0.1:{one.port}" in next_one.said)
    assert next_one.pid in {process.pid for process in others}


def test_a_keeper_that_is_killed_leaves_one_that_the_next_server_replaces(server):
    one = server()
    keeper, litellm, child = one.family()
    keeper.kill()
    assert one.end() == 0
    assert litellm.is_running()
    next_one = server(port=one.port)
    next_one.family(but=litellm.pid)
    assert are_gone([litellm, child])
    assert "left over from a server that is gone" in next_one.said


def test_a_keeper_that_is_told_to_end_ends_in_order(server):
    one = server()
    keeper, *others = one.family()
    keeper.terminate()
    assert are_gone(others)
    assert one.end() == 0
    assert are_gone([keeper])


@pytest.mark.parametrize("lacks", ["litellm", "keeper", "nothing"])
def test_without_a_part_there_is_one_line_and_no_proxy(
    monkeypatch, said, tmp_path, lacks
):
    (tmp_path / "litellm").touch()
    (tmp_path / "scripts" / "helpers").mkdir(parents=True)
    (tmp_path / "scripts" / "helpers" / "litellm_beside.py").touch()
    python = tmp_path / ("none" if lacks == "litellm" else "") / "python"
    file = tmp_path / ("none" if lacks == "keeper" else "") / "start-llm.py"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(s, "__file__", str(file))
    fields = {"enable_proxy": lacks != "nothing", "proxy_port": free_port()}
    config = Config(log_root=str(tmp_path / "logs"), **fields)
    with run_proxy(config, {"id": "m", "context_length": 1}):
        pass
    assert said.text.count("no proxy") == 1
    assert not (tmp_path / "logs").exists()


# -- the real LiteLLM ------------------------------------------------------------------------------

EVENTS = [
    {
        "type": "message_start",
        "message": {"id": "m", "type": "message", "role": "assistant"},
    },
    {"type": "ping"},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "signature_delta", "x": "own"},
    },
    {"type": "content_block_stop", "index": 0},
    {"type": "message_stop"},
]
QUEUE_FULL = {
    "error": {"message": "the queue is full", "type": "server_error", "code": "q"}
}


class Stub(ThreadingHTTPServer):
    """Plays the server: keeps what it is asked, answers with fixed words."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class StubHandler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append((self.path, headers, body))
        if self.path.partition("?")[0].endswith("count_tokens"):
            self._answer(200, json.dumps({"input_tokens": 4321}))
        elif "messages" in self.path and body.get("stream"):
            said = "".join(
                f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in EVENTS
            )
            self._answer(200, said, kind="text/event-stream")
        else:
            self._answer(503, json.dumps(QUEUE_FULL))

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Lab:
    """A server on a tiny model, a stub, and LiteLLM before both."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.served = Served(model, max_kv_size=2048, keepalive_seconds=1.0)
        self.stub, self.port = Stub(), free_port()
        self.model_id = self.served.state.engine.model.model_id
        stub = Config(mlx_port=self.stub.server_port, proxy_model_id="stubbed")
        real, stubbed = (
            settings_for(
                Order.from_json(order_of(config, model_id=name, context_length=2048))
            )
            for config, name in (
                (self.served.state.config, self.model_id),
                (stub, "stubbed"),
            )
        )
        # what LiteLLM knows of a model comes from all of its rows; the stub has the name "claude-*"
        renamed = {"claude-*": "own-claude-*"}
        wanted = [
            {**row, "model_name": renamed.get(row["model_name"], row["model_name"])}
            for row in real["model_list"]
        ]
        wanted += [row for row in stubbed["model_list"] if row["model_name"] != "*"]
        files = folder / "litellm"
        command = [sys.executable, str(LITELLM), "--config", f"{files}.json"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        keeper = Keeper(
            command,
            files,
            json.dumps({**real, "model_list": wanted}),
            self.port,
            origins=PAGE,
        )
        self._stop = threading.Event()
        self._pump = threading.Thread(
            target=keeper.keep_running, args=(self._stop,), daemon=True
        )
        self._pump.start()
        wait_until(lambda: is_open(self.port))
        self.client = Client(self.port)

    def close(self) -> None:
        self._stop.set()
        self._pump.join(PATIENCE)
        self.client.close()
        self.served.close()
        self.stub.shutdown()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=PATIENCE
        )
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def is_idle(self) -> bool:
        status = self.served.state.engine.report
        return not (status["queued"] or status["prefilling"] or status["decoding"])


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    if not LITELLM.exists():
        pytest.skip("LiteLLM is not installed")
    model = tiny_model(DENSE, tmp_path_factory.getbasetemp())
    with contextlib.closing(Lab(tmp_path_factory.mktemp("litellm"), model)) as lab:
        yield lab


class Responses(Client):
    """A chat's messages by the Responses API, whose items go back as they came."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._items: list[list[dict[str, Any]]] = []  # of each reply

    def ask(
        self, messages: list[Message], *, stream: bool = True, **fields: Any
    ) -> Exchange:
        items, replies = list[dict[str, Any]](), iter(self._items)
        for message in messages:
            if message["role"] == "assistant":
                items += next(replies)
            elif message["role"] == "tool":
                result = {
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
                items.append({"type": "function_call_output", **result})
            else:
                items.append(message)
        tools = [{"type": "function", **tool["function"]} for tool in fields["tools"]]
        asked = {"model": "any", "input": items, "tools": tools, "stream": stream}
        reply = self._sdk.responses.create(
            **asked, temperature=0, max_output_tokens=MOST_TOKENS
        )
        if stream:
            events = list(reply)
            reply = events[-1].response
            shown = "".join(
                e.delta for e in events if e.type == "response.output_text.delta"
            )
            assert shown == reply.output_text
        said = [
            item.model_dump(exclude_none=True, warnings=False) for item in reply.output
        ]
        self._items.append(said)
        return Exchange(messages, fields, *self._as_chat(said, reply))

    def _as_chat(
        self, said: list[dict[str, Any]], reply: Any
    ) -> tuple[Message, str, Message]:
        texts = {"reasoning": "", "message": ""}
        calls = []
        for item in said:
            if item["type"] == "function_call":
                named = {"name": item["name"], "arguments": item["arguments"]}
                calls.append(
                    {"id": item["call_id"], "type": "function", "function": named}
                )
            else:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
        answer = {"role": "assistant", "reasoning_content": texts["reasoning"] or None}
        answer |= {"content": texts["message"] or None, "tool_calls": calls}
        usage, cached = reply.usage, reply.usage.input_tokens_details.cached_tokens
        counts = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
        }
        reason = "tool_calls" if calls else "stop"
        if reply.status == "incomplete":
            reason = "length"
        return (
            answer,
            reason,
            counts | {"prompt_tokens_details": {"cached_tokens": cached}},
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_is_the_same_through_litellm_and_so_is_what_is_cached(
    lab, stream
):
    """By the Responses API, too, which LiteLLM makes chats of (L-102)."""
    told, common = (
        [],
        {"name": "", "description": "Does it."},
    )  # in the order that LiteLLM gives
    functions = [common | tool["function"] | {"strict": False} for tool in TOOLS]
    tools = [{"type": "function", "function": function} for function in functions]
    for client in (lab.served, lab.client, Responses(lab.port)):
        lab.served.forget()
        talk = Talk(client, seed=5)
        steps = [talk.step(stream=stream, tools=tools) for _ in range(4)]
        words = [
            [step.answer.get(k) for k in ("reasoning_content", "content")]
            for step in steps
        ]
        calls = [step.said["tool_calls"] for step in steps]
        counts = [(s.usage["prompt_tokens"], s.n_cached, s.n_generated) for s in steps]
        told.append((words, calls, [step.finish_reason for step in steps], counts))
    assert told[0] == told[1] == told[2]
    words, calls, _, counts = told[1]
    assert any(reasoning for reasoning, _ in words)
    assert any(calls)
    assert all(cached > 300 for _, cached, _ in counts[1:])


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_by_googles_api_finds_its_past(lab, stream):
    """As Gemini CLI has it: without thinking, and with calls and results that have no ids."""
    lab.served.forget()
    asked: list[Message] = [
        {"role": "user", "parts": [{"text": "What is in the readme?"}]}
    ]
    offered = [{"functionDeclarations": [tool["function"] for tool in TOOLS]}]
    settings = {"temperature": 0, "maxOutputTokens": MOST_TOKENS}
    body = {"contents": asked, "tools": offered, "generationConfig": settings}
    recent, known, called = lab.served.state.stores.recent, 0, []
    for n in range(5):
        before = {one["id"] for one in recent}
        verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
        status, said = lab.post(f"/v1beta/models/any:{verb}", body)
        assert status == 200, said
        wait_until(lambda ids=before: recent and recent[-1]["id"] not in ids)
        facts = recent[-1]
        assert facts["cached"] >= known
        known = facts["prompt"] + facts["out"]
        events = [
            line.removeprefix("data: ") for line in said.split("\n") if '{"cand' in line
        ]
        parts = [
            p
            for e in events
            for p in json.loads(e)["candidates"][0]["content"]["parts"]
        ]
        names = [
            part["functionCall"]["name"] for part in parts if "functionCall" in part
        ]
        results = [
            {"functionResponse": {"name": x, "response": {"n": n}}} for x in names
        ]
        called += names
        asked.append({"role": "model", "parts": parts})
        asked.append(
            {"role": "user", "parts": results or [{"text": f"and number {n}?"}]}
        )
    assert called


@pytest.mark.parametrize("stream", [True, False])
def test_both_sdks_say_and_find_the_same_on_both_ports(lab, stream):
    """A tool conversation by four ways in turn: one reply, one count of tokens, one cache."""
    served, model = lab.served, lab.model_id
    served.forget()
    ports = (served.state.config.mlx_port, lab.port)
    chats = [Client(port) for port in ports]
    bases = [f"http://127.0.0.1:{port}" for port in ports]
    messages_apis = [
        anthropic.Anthropic(base_url=b, api_key="none", max_retries=0) for b in bases
    ]
    talk, history = Talk(chats[0], 5), [blocks(text("What is in the readme?"))]
    talk.messages = [
        {"role": "system", "content": SYSTEM},
        user("What is in the readme?"),
    ]
    for n in range(3):
        ours = [ask(sdk, history, stream=stream, model=model) for sdk in messages_apis]
        theirs = [chat.ask(talk.messages, stream=stream) for chat in chats]
        said = [as_chat(message) for message in ours]
        for exchange in theirs:
            calls = [
                (f["name"], json.loads(f["arguments"]))
                for f in functions_of(exchange.answer)
            ]
            thought, words = (
                exchange.answer.get(k) or "" for k in ("reasoning_content", "content")
            )
            said.append((thought, words, calls))
        assert all(one == said[0] for one in said), said
        sizes = [
            *(total(m.usage) for m in ours),
            *(e.usage["prompt_tokens"] for e in theirs),
        ]
        assert len(set(sizes)) == 1, sizes
        cached = [ours[1].usage.cache_read_input_tokens, *(e.n_cached for e in theirs)]
        assert cached == [sizes[0] - 1] * 3, "who came later prefilled something"
        history += react(ours[n % 2], n)
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": f"result {n} of {i}",
            }
            for i, call in enumerate(theirs[n % 2].answer.get("tool_calls") or ())
        ]
        talk.messages += [
            theirs[n % 2].answer,
            *(results or [user(f"and number {n}?")]),
        ]
    for one in (*chats, *messages_apis):
        one.close()


def test_a_prompt_too_long_is_a_400_in_the_words_that_agents_look_for(lab):
    for stream in (True, False):
        with pytest.raises(
            openai.BadRequestError, match="maximum context length is 2048 tokens"
        ):
            lab.client.ask([user("word " * 3000)], stream=stream)


def test_who_leaves_while_tokens_come_is_noticed_by_the_server(lab):
    with lab.served.holding(lambda _: time.sleep(0.05)):
        with lab.client.stream([user("Go on.")], max_tokens=1000) as chunks:
            next(iter(chunks))
            wait_until(lambda: not lab.is_idle())
        wait_until(lab.is_idle)


def test_silence_is_filled_and_the_headers_do_not_wait_for_a_token(lab):
    body = {
        "messages": [user("Slow.")],
        "stream": True,
        "max_tokens": 3,
        "model": "any",
    }
    connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=PATIENCE)
    go = threading.Event()
    with (
        contextlib.closing(connection),
        lab.served.holding(lambda _: go.wait(PATIENCE)),
    ):
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        while answer.readline() != b": ping\n":
            pass
        go.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_the_list_of_models_holds_the_loaded_one_and_no_strangers(lab):
    names = {model.id for model in lab.client._sdk.models.list()}
    assert names == {lab.model_id, "stubbed"}


def test_no_web_page_reads_what_it_says_but_those_that_may_ask_the_server(lab):
    told = {}
    for page in ("https://evil.example", "null", PAGE):
        connection = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"Origin": page})
            told[page] = connection.getresponse().headers["access-control-allow-origin"]
    assert told == {"https://evil.example": None, "null": None, PAGE: PAGE}


JSON = {"Content-Type": "application/json"}
CHAT = {
    "messages": [user("Hello")],
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "seed": 3,
    "user": "u",
    "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False,
    "reasoning_effort": "low",
    "tool_choice": "auto",
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object"}},
        }
    ],
    "max_completion_tokens": 9,
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
}
ANTHROPIC = {
    "max_tokens": 9,
    "system": [
        {
            "type": "text",
            "text": "s",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ],
    "messages": [
        user("Hello"),
        {"role": "system", "content": "late"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "own"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
    "output_config": {"effort": "high"},
    "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
    },
    "metadata": {"user_id": "u"},
    "top_k": 4,
    "stop_sequences": ["q"],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}


def test_what_a_chat_asks_for_arrives_with_its_session_and_an_error_comes_back(lab):
    headers = {"x-session-id": "S1", "x-claude-code-session-id": "C1"}
    status, said = lab.post(
        "/v1/chat/completions", {**CHAT, "model": "stubbed"}, **headers
    )
    assert status == 503
    assert "the queue is full" in said
    path, heard, body = lab.stub.asked[-1]
    assert path == "/v1/chat/completions"
    assert {name: heard.get(name) for name in headers} == headers
    assert body == {**CHAT, "model": "stubbed"}


@pytest.mark.parametrize(
    "thinking",
    [
        {"type": "adaptive", "display": "omitted"},
        {"type": "enabled", "budget_tokens": 2000},
        {"type": "disabled"},
    ],
)
@pytest.mark.parametrize("model", ["stubbed", "claude-sonnet-4-5"])
def test_anthropic_messages_pass_untouched_in_both_directions(lab, model, thinking):
    asked = {**ANTHROPIC, "thinking": thinking, "stream": True}
    session = {"x-claude-code-session-id": "C1"}
    status, said = lab.post(
        "/v1/messages?beta=true", {**asked, "model": model}, **session
    )
    assert status == 200
    heard = [
        json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: ")
    ]
    assert [event["type"] for event in heard] == [event["type"] for event in EVENTS]
    assert heard[1:] == EVENTS[1:]
    path, headers, body = lab.stub.asked[-1]
    assert path.startswith("/v1/messages")
    assert headers["x-claude-code-session-id"] == "C1"
    assert body == {**asked, "model": "stubbed"}


def test_claude_code_has_its_tokens_counted_by_the_server(lab):
    asked = {"model": "claude-x", "messages": [user("Hello")]}
    status, said = lab.post("/v1/messages/count_tokens", asked)
    assert (status, json.loads(said)["input_tokens"]) == (200, 4321)


# -- the gate before it, see test_litellm_gate.py -------------------------------------------


def test_a_chats_thinking_and_metadata_arrive(lab):
    asked = {
        **CHAT,
        "thinking": {"type": "enabled", "budget_tokens": 7},
        "metadata": {"session_id": "S1"},
        "model": "stubbed",
    }
    assert lab.post("/v1/chat/completions", asked, **JSON)[0] == 503
    assert lab.stub.asked[-1][2] == asked


def test_what_is_not_there_is_answered_with_what_to_use(lab):
    server = f"http://127.0.0.1:{lab.served.state.config.mlx_port}"
    status, said = lab.post("/api/chat", {}, **JSON)
    assert status == 404
    assert f"{server}/v1/chat/completions" in json.loads(said)["error"]
    for path in ("/v1/threads", "/v1/nothing", "/v1/embeddings"):
        status, said = lab.post(path, {}, **JSON)
        assert (status, json.loads(said)["error"]["param"]) == (404, None)
    status, said = lab.post("/v1/models", {}, **JSON)
    assert status == 405
    assert "/v1/models takes GET, not POST" in json.loads(said)["error"]["message"]


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_a_response_that_would_lose_its_history_is_a_400(lab, field):
    client = lab.client._sdk
    n_asked = len(lab.served.state.stores.recent)
    with pytest.raises(openai.BadRequestError, match=f"{field}: no conversation is"):
        client.responses.create(model="any", input="And then?", **{field: "id_1"})
    assert len(lab.served.state.stores.recent) == n_asked
    reply = client.responses.create(
        model="any", input="Hello.", store=True, max_output_tokens=9
    )
    assert reply.output
