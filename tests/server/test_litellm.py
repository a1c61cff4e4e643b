"""LiteLLM beside the server: one configuration, one process, kept and ended; nobody else's touched.

The last part runs the real LiteLLM, once, before a server on a tiny model.
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import litellm_beside as beside
import openai
import psutil
import pytest
import start_llm as s
from http_client import exchange
from litellm_beside import Keeper, Order, is_open, settings_for
from litellm_stand_in import LISTENS
from nights import at_night
from replica_choice import STATE_WORDS
from server_fixture import (
    MAX_WAIT_SECONDS,
    MOST_TOKENS,
    TOOLS,
    Client,
    Exchange,
    Message,
    Served,
    Talk,
    free_port,
    user,
    wait_until,
)
from start_llm import Config, run_proxy

KEY = "hidden words 1"
PAGE = "https://chat.example"
LITELLM = Path(sys.executable).with_name("litellm")

DIES = "import time; time.sleep(0.1); raise SystemExit(3)"


def order_of(config: Config, model_id: str, context_length: int) -> Order:
    """What a server has the keeper do."""
    model = {"id": model_id, "context_length": context_length}
    return Order.from_json(json.dumps(s._make_order(config, model, LITELLM)))


def settings_of(**fields: Any) -> dict[str, Any]:
    return settings_for(order_of(Config(**fields), "maker/Model-4bit", 4096))


def routes_of(settings: dict[str, Any]) -> dict[str, str]:
    return {
        row["model_name"]: row["litellm_params"]["model"]
        for row in settings["model_list"]
    }


# -- configuration ---------------------------------------------------------------------------------


def test_every_name_leads_to_the_one_model_and_strict_names_only_to_their_own():
    route = "openai/maker/Model-4bit"
    routes = {"maker/Model-4bit": route}
    assert routes_of(settings_of()) == {**routes, "*": route}
    assert routes_of(settings_of(strict_model_names=True)) == routes
    assert routes_of(settings_of(proxy_model_id="mine")) == {"mine": route, "*": route}
    strict = settings_of(proxy_model_id="mine", strict_model_names=True)
    assert routes_of(strict) == {"mine": route, **routes}
    assert strict["start_llm_gate"]["models"] == list(routes_of(strict))
    assert settings_of()["start_llm_gate"]["models"] == []


def test_the_servers_key_goes_along_and_is_asked_of_clients_unless_they_have_their_own():
    shared_key = settings_of(api_key=f"{KEY}, second")
    separate_keys = settings_of(api_key=f"{KEY}, second", proxy_api_key="other")
    for settings in (shared_key, separate_keys):
        rows = settings["model_list"]
        assert {row["litellm_params"]["api_key"] for row in rows} == {KEY}
    assert shared_key["general_settings"]["master_key"] == KEY
    assert separate_keys["general_settings"]["master_key"] == "other"


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:81"), ("::1", "http://[::1]:81")]
)
def test_each_route_goes_to_the_server_with_no_key_of_anybody(host, url):
    settings = settings_of(mlx_host=host, mlx_port=81)
    rows = [row["litellm_params"] for row in settings["model_list"]]
    assert {row["api_base"] for row in rows} == {f"{url}/v1"}
    assert {row["api_key"] for row in rows} == {"none"}
    assert settings["start_llm_gate"]["servers"] == [{"url": url, "key": ""}]


def test_each_server_has_its_own_key_or_the_servers():
    replicas = "http://two:1, http://own@three:1"
    settings = settings_of(api_key="first, second", proxy_replicas=replicas)
    assert settings["start_llm_gate"]["servers"] == [
        {"url": "http://127.0.0.1:8080", "key": "first"},
        {"url": "http://two:1", "key": "first"},
        {"url": "http://three:1", "key": "own"},
    ]


def test_other_models_have_routes_of_their_own():
    names = "small=http://two:1, org/Big=http://own@three:1"
    settings = settings_of(api_key="first, second", proxy_models=names)
    routes = routes_of(settings)
    assert (routes["small"], routes["org/Big"]) == ("openai/small", "openai/org/Big")
    assert next(iter(routes)) == "maker/Model-4bit"  # which launch takes
    assert settings["start_llm_gate"]["named_servers"] == {
        "small": {"url": "http://two:1", "key": "first"},
        "org/Big": {"url": "http://three:1", "key": "own"},
    }
    assert settings_of()["start_llm_gate"]["named_servers"] == {}


def test_a_key_is_asked_of_all_or_its_lack_is_said_to_be_meant():
    with_key = settings_of(proxy_api_key=KEY)["general_settings"]
    without_key = settings_of()["general_settings"]
    permission = "dangerously_permit_weak_or_unset_master_key"
    assert with_key.get("master_key") == KEY
    assert "master_key" not in without_key
    # LiteLLM refuses to start with a key that it thinks weak; whoever sets one means it
    assert with_key.get(permission) is True
    assert without_key.get(permission) is True
    assert KEY not in repr(Config(proxy_api_key=KEY))


def test_the_gate_has_the_key_and_the_advice_of_the_server():
    gate = settings_of(api_key=KEY, mlx_port=81, proxy_port=82)["start_llm_gate"]
    assert gate["key"] == KEY
    assert "/v1/models" in gate["advice"]["/api/tags"]
    assert "http://127.0.0.1:82/v1" in gate["welcome"]
    assert settings_of()["start_llm_gate"]["key"] == ""


def test_nothing_is_tried_twice_and_a_day_of_silence_is_borne():
    settings = settings_of()
    router = settings["router_settings"]
    assert router["num_retries"] == 0
    assert router["disable_cooldowns"] is True
    assert router["timeout"] >= 86_400
    assert settings["litellm_settings"]["request_timeout"] >= 86_400


# -- a process kept --------------------------------------------------------------------------------


def are_gone(processes: list[psutil.Process], seconds: float = 8) -> bool:
    _, alive = psutil.wait_procs(processes, seconds)
    return not any(process.is_running() for process in alive)


class Pump:
    """A Keeper with a command of the test's, running in a thread; `states` are its reports."""

    def __init__(
        self, folder: Path, code: str, *, port: int | None = None, **times: float
    ):
        self.port = port or free_port()
        self.files = folder / "logs" / "litellm-0"
        command = [sys.executable, "-c", code, f"{self.files}.json", str(self.port)]
        self.states: list[str] = []
        fields: dict[str, Any] = {"delay": 0.05, "patience": 0.5, **times}
        fields["report"] = self.states.append
        fields["url"] = f"http://127.0.0.1:{self.port}"
        keeper = Keeper(command, self.files, '{"key": "hidden"}', self.port, **fields)
        self._stop = threading.Event()
        self.thread = threading.Thread(
            target=keeper.keep_running, args=(self._stop,), daemon=True
        )
        self.thread.start()

    @property
    def pid(self) -> int:
        """Of the command, 0 while there is none."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"{self.files}.pid").read_text().split()[0])
        return 0

    def wait_until_up(self) -> int:
        wait_until(lambda: is_open(self.port) and self.pid)
        return self.pid

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(MAX_WAIT_SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def pump(tmp_path) -> Iterator[Any]:
    """A function that starts pumps; all are stopped in the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, **fields: Any) -> Pump:
            new_pump = Pump(tmp_path, code, **fields)
            stack.callback(new_pump.stop)
            return new_pump

        yield start


@pytest.fixture
def console(caplog, monkeypatch):
    monkeypatch.setattr(s.logger, "propagate", True)
    for log in (s.logger, beside.log):
        caplog.set_level(logging.INFO, log.name)
    return caplog


def test_its_environment_is_its_own_and_no_web_page_may_ask_it(pump, monkeypatch):
    for name in ("OPENAI_API_KEY", "DATABASE_URL"):
        monkeypatch.setenv(name, "users-own")
    running = pump(LISTENS)
    pid = running.wait_until_up()

    line = Path(f"{running.files}.log").read_text().partition("\n")[0]
    for name in ("OPENAI_API_KEY", "DATABASE_URL", "HOME"):
        assert name not in line
    assert "LITELLM_MODE" in line
    assert f"CORS http://127.0.0.1:{running.port}" in line  # "*" is every page
    assert os.getpgid(pid) != os.getpgrp()  # the keeper can end it as a whole


def test_files_are_private_and_stop_leaves_no_process_no_port_and_no_pid_file(pump):
    running = pump(LISTENS)
    family = [psutil.Process(running.wait_until_up())]
    wait_until(family[0].children)
    family += family[0].children()
    assert len(family) == 2
    for ending in ("json", "log", "pid"):
        mode = Path(f"{running.files}.{ending}").stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    assert json.loads(Path(f"{running.files}.json").read_text()) == {"key": "hidden"}

    running.stop()
    assert are_gone(family, 5)
    assert not is_open(running.port)
    assert running.pid == 0


def test_one_that_is_killed_is_started_again(pump, console):
    running = pump(LISTENS)
    first = running.wait_until_up()
    wait_until(lambda: running.states[-1] == "up")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: running.pid not in (0, first) and is_open(running.port))
    assert "LiteLLM ended (-9)" in console.text
    wait_until(lambda: running.states[-1] == "up")
    # once more when it begins its second life
    assert running.states == ["starting", "up", "starting", "starting", "up"]


def test_one_that_never_comes_up_is_tried_ever_less_often(pump, console):
    running = pump(DIES, delay=0.1)
    waits = [0.1 * 2**n for n in range(4)]
    began = time.monotonic()
    wait_until(lambda: console.text.count("LiteLLM ended (3)") == 4)
    assert time.monotonic() - began > sum(waits[:3])
    running.stop()


@pytest.mark.parametrize("with_pid_file", [at_night(False), True])
def test_a_port_of_somebody_else_is_left_alone(pump, console, tmp_path, with_pid_file):
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
        running.thread.join(MAX_WAIT_SECONDS)
        assert not running.thread.is_alive()
        assert foreign.poll() is None
        assert f"(pid {foreign.pid})" in console.text
        assert running.states == ["port_taken"]
    finally:
        foreign.kill()
        foreign.wait()


def test_one_whose_server_lives_is_left_alone(pump, console):
    running = pump(LISTENS)
    first = running.wait_until_up()
    # of a second server, with the same folder
    second = pump(LISTENS, port=running.port)
    second.thread.join(MAX_WAIT_SECONDS)
    assert not second.thread.is_alive()
    assert running.pid == first
    assert f"(pid {first})" in console.text
    assert second.states == ["port_taken"]


def test_one_whose_server_was_killed_is_replaced(pump, console, tmp_path):
    port = free_port()
    files = tmp_path / "logs" / "litellm-0"
    files.parent.mkdir()
    command = [sys.executable, "-c", LISTENS, f"{files}.json", str(port)]
    with subprocess.Popen(command, start_new_session=True) as left_over:
        wait_until(lambda: is_open(port))
        # As if its parent had been another process, which is gone.
        Path(f"{files}.pid").write_text(f"{left_over.pid} 4194304")
        running = pump(LISTENS, port=port)
        wait_until(lambda: running.pid not in (0, left_over.pid) and is_open(port))
        assert not psutil.pid_exists(left_over.pid)

    assert "left over from a server that is gone" in console.text


def test_a_long_log_is_copied_once_and_begun_anew(pump, monkeypatch):
    monkeypatch.setattr(beside, "LOG_BYTES", 5000)
    serve = "http.server.HTTPS"
    chatters = LISTENS.replace(serve, f"print('x' * 6000, flush=True); {serve}")
    running = pump(chatters)
    running.wait_until_up()

    log = Path(f"{running.files}.log")
    old_log = Path(f"{running.files}.log.1")
    wait_until(lambda: old_log.exists() and log.stat().st_size < 5000)
    assert "x" * 6000 in old_log.read_text()
    assert stat.S_IMODE(old_log.stat().st_mode) == 0o600


# -- beside a server -------------------------------------------------------------------------------


def test_while_litellm_is_away_nobody_says_how_the_replicas_are():
    proxy = s.Proxy(Config())
    reported = [{"url": "http://two:1", "state": "up", "sessions": 1}]
    shown = []

    def lines() -> Iterator[bytes]:
        for _life in range(2):
            yield b"STATE starting\n"
            shown.append(proxy.replicas)
            yield f"REPLICAS {json.dumps(reported)}\n".encode()
            yield b"STATE up\n"
            shown.append(proxy.replicas)

    s._follow_keeper(lines(), proxy)
    assert shown == [[], reported, [], reported]
    assert proxy.replicas == []


def test_the_states_of_a_replica_are_the_same_everywhere():
    in_status = get_args(get_type_hints(s.ReplicaReport)["state"])
    openapi = json.loads((Path(s.__file__).parent / "web/openapi.json").read_text())
    replica = openapi["components"]["schemas"]["Replica"]["properties"]
    assert list(in_status) == list(STATE_WORDS) == replica["state"]["enum"]


@pytest.mark.parametrize("lacks", ["litellm", "keeper", "nothing"])
def test_without_a_part_there_is_one_line_and_no_proxy(
    monkeypatch, console, tmp_path, lacks
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
    proxy = s.Proxy(config)
    with run_proxy(config, {"id": "m", "context_length": 1}, proxy):
        assert proxy.body() == {"state": "off", "url": None}

    assert console.text.count("no proxy") == 1
    assert not (tmp_path / "logs").exists()


def test_where_the_logs_cannot_be_written_litellm_runs_with_a_folder_of_its_own(
    tmp_path, caplog
):
    no_folder = tmp_path / "file"
    no_folder.write_text("")

    with beside.folder_for(no_folder / "logs") as folder:
        assert folder.is_dir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"LOG_ROOT {no_folder / 'logs'} cannot be written"
    ]

    with beside.folder_for(tmp_path / "logs") as folder:
        assert folder == tmp_path / "logs"
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("off", ""),
        ("starting", "http://127.0.0.1:81/v1 (LiteLLM, within a minute; "),
        ("up", "http://127.0.0.1:81/v1 (LiteLLM)"),
        ("port_taken", "none: port 81 is taken; "),
        ("given_up", "none: LiteLLM cannot be started"),
    ],
)
def test_the_banner_promises_the_proxy_only_where_it_comes(state, words):
    config = Config(proxy_port=81, proxy_host="0.0.0.0", proxy_api_key=KEY)
    proxy = s.Proxy(config)
    proxy.state = state
    row = s._describe_proxy(SimpleNamespace(config=config, proxy=proxy))
    assert row.startswith(words)
    assert bool(row) == bool(words)


def test_the_name_at_the_proxy_is_the_models_where_names_are_strict(folder):
    settings = {"strict_model_names": True, "proxy_model_id": "mine"}
    with Served(folder, **settings) as served:
        fields = {"messages": [user("Hello")], "max_tokens": 1}
        assert served._sdk.chat.completions.create(model="mine", **fields).choices
        with pytest.raises(openai.NotFoundError, match="is not loaded"):
            served._sdk.chat.completions.create(model="claude-x", **fields)


# -- the real LiteLLM ------------------------------------------------------------------------------


class Lab:
    """A server on a tiny model, and LiteLLM before it."""

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        self.served = Served(model, max_kv_size=2048, keepalive_seconds=1.0, **settings)
        self.port = free_port()
        self.model_id = self.served.state.engine.model.model_id
        files = folder / "litellm"
        command = [sys.executable, str(LITELLM), "--config", f"{files}.json"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        order = order_of(self.served.state.config, self.model_id, 2048)
        settings = json.dumps(settings_for(order))
        keeper = Keeper(command, files, settings, self.port, "", origins=PAGE)
        self._stop = threading.Event()
        self._pump = threading.Thread(
            target=keeper.keep_running, args=(self._stop,), daemon=True
        )
        self._pump.start()
        wait_until(lambda: is_open(self.port))
        self.client = Client(self.port)

    def close(self) -> None:
        self._stop.set()
        self._pump.join(MAX_WAIT_SECONDS)
        self.client.close()
        self.served.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        """To LiteLLM: status and body."""
        status, _, answer = exchange(self.port, "POST", path, body, **headers)
        return status, answer.decode()

    def is_idle(self) -> bool:
        status = self.served.state.engine.report
        return not (status["queued"] or status["prefilling"] or status["decoding"])


@pytest.fixture(scope="module")
def lab(folder, tmp_path_factory) -> Iterator[Lab]:
    if not LITELLM.exists():
        pytest.skip("LiteLLM is not installed")
    with contextlib.closing(Lab(tmp_path_factory.mktemp("litellm"), folder)) as lab:
        yield lab


class Responses(Client):
    """A chat's messages by the Responses API, whose items go back as they came."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._items: list[list[dict[str, Any]]] = []  # of each reply

    def ask(
        self, messages: list[Message], *, stream: bool = True, **fields: Any
    ) -> Exchange:
        items: list[dict[str, Any]] = []
        replies = iter(self._items)
        for message in messages:
            if message["role"] == "assistant":
                items += next(replies)
            elif message["role"] == "tool":
                result = {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
                items.append(result)
            else:
                items.append(message)

        reply = self._sdk.responses.create(
            model="any",
            input=items,
            tools=[
                {"type": "function", **tool["function"]} for tool in fields["tools"]
            ],
            stream=stream,
            temperature=0,
            max_output_tokens=MOST_TOKENS,
        )
        if stream:
            reply = self._read_events(list(reply))

        reply_items = [
            item.model_dump(exclude_none=True, warnings=False) for item in reply.output
        ]
        self._items.append(reply_items)
        return Exchange(messages, fields, *self._as_chat(reply_items, reply))

    def _read_events(self, events: list[Any]) -> Any:
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        reply = events[-1].response
        assert "".join(deltas) == reply.output_text
        return reply

    def _as_chat(
        self, items: list[dict[str, Any]], reply: Any
    ) -> tuple[Message, str, Message]:
        texts = {"reasoning": "", "message": ""}
        calls = []
        for item in items:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                calls.append(call)
            else:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])

        answer = {
            "role": "assistant",
            "reasoning_content": texts["reasoning"] or None,
            "content": texts["message"] or None,
            "tool_calls": calls,
        }

        n_cached = reply.usage.input_tokens_details.cached_tokens
        usage = {
            "prompt_tokens": reply.usage.input_tokens,
            "completion_tokens": reply.usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }
        reason = "tool_calls" if calls else "stop"
        if reply.status == "incomplete":
            reason = "length"
        return answer, reason, usage


def outcome_of(step: Exchange) -> dict[str, Any]:
    return {
        "reasoning_content": step.answer.get("reasoning_content"),
        "content": step.answer.get("content"),
        "calls": step.said["tool_calls"],
        "finish_reason": step.finish_reason,
        "n_prompt": step.usage["prompt_tokens"],
        "n_cached": step.n_cached,
        "n_generated": step.n_generated,
    }


@pytest.mark.parametrize("stream", [True, at_night(False)])
def test_a_conversation_is_the_same_through_litellm_and_so_is_what_is_cached(
    lab, stream
):
    """By the Responses API, too, which LiteLLM makes chats of (L-102)."""
    tools = []
    for tool in TOOLS:
        # in the order that LiteLLM gives
        function = {
            "name": "",
            "description": "Does it.",
            **tool["function"],
            "strict": False,
        }
        tools.append({"type": "function", "function": function})

    outcomes = []
    for client in (lab.served, lab.client, Responses(lab.port)):
        lab.served.forget()
        talk = Talk(client, seed=5)
        steps = [talk.step(stream=stream, tools=tools) for _ in range(4)]
        outcomes.append([outcome_of(step) for step in steps])

    assert outcomes[0] == outcomes[1] == outcomes[2]

    through_proxy = outcomes[1]
    assert any(outcome["reasoning_content"] for outcome in through_proxy)
    assert any(outcome["calls"] for outcome in through_proxy)
    assert all(outcome["n_cached"] > 300 for outcome in through_proxy[1:])


def google_parts(answer: str) -> list[dict[str, Any]]:
    """Of one body, or of all its events if it is a stream."""
    parts = []
    for line in answer.split("\n"):
        if '{"cand' in line:
            event = json.loads(line.removeprefix("data: "))
            parts += event["candidates"][0]["content"]["parts"]
    return parts


@pytest.mark.parametrize("stream", [True, at_night(False)])
def test_a_conversation_by_googles_api_finds_its_past(lab, stream):
    """As Gemini CLI has it: without thinking, and with calls and results that have no ids."""
    lab.served.forget()
    contents: list[Message] = [
        {"role": "user", "parts": [{"text": "What is in the readme?"}]}
    ]
    functions = [tool["function"] for tool in TOOLS]
    body = {
        "contents": contents,
        "tools": [{"functionDeclarations": functions}],
        "generationConfig": {"temperature": 0, "maxOutputTokens": MOST_TOKENS},
    }
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    recent = lab.served.state.stores.recent
    n_past = 0
    n_calls = 0

    for n in range(5):
        old_ids = {request["id"] for request in recent}
        status, answer = lab.post(f"/v1beta/models/any:{verb}", body)
        assert status == 200, answer
        wait_until(lambda ids=old_ids: recent and recent[-1]["id"] not in ids)
        request = recent[-1]
        assert request["cached"] >= n_past
        n_past = request["prompt"] + request["out"]

        parts = google_parts(answer)
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        n_calls += len(calls)
        results = []
        for call in calls:
            result = {"name": call["name"], "response": {"n": n}}
            results.append({"functionResponse": result})
        contents.append({"role": "model", "parts": parts})
        next_parts = results or [{"text": f"and number {n}?"}]
        contents.append({"role": "user", "parts": next_parts})

    assert n_calls


def test_who_leaves_while_tokens_come_is_noticed_by_the_server(lab):
    with lab.served.holding(lambda _: time.sleep(0.05)):
        with lab.client.stream([user("Go on.")], max_tokens=1000) as chunks:
            next(iter(chunks))
            wait_until(lambda: not lab.is_idle())
        wait_until(lab.is_idle)


def test_silence_is_filled_and_the_headers_do_not_wait_for_a_token(lab):
    body = {"input": "Slow.", "max_output_tokens": 16, "stream": True, "model": "any"}
    connection = http.client.HTTPConnection(
        "127.0.0.1", lab.port, timeout=MAX_WAIT_SECONDS
    )
    may_go_on = threading.Event()
    with (
        contextlib.closing(connection),
        lab.served.holding(lambda _: may_go_on.wait(MAX_WAIT_SECONDS)),
    ):
        connection.request("POST", "/v1/responses", json.dumps(body))
        answer = connection.getresponse()
        while answer.readline() != b": ping\n":
            pass
        may_go_on.set()
        rest = answer.read()
    assert rest.endswith(b"data: [DONE]\n\n") or b"response.completed" in rest


def test_the_list_of_models_holds_the_loaded_one_and_no_strangers(lab):
    names = {model.id for model in lab.client._sdk.models.list()}
    assert names == {lab.model_id}


def test_whoever_asks_the_proxy_how_it_is_runs_no_chat(lab):
    """LiteLLM's own /health has every model of every server write something."""
    n_before = lab.served.state.metrics.totals()["requests"]

    answers = {}
    for path in ("/health", "/model/info"):
        answers[path] = json.loads(exchange(lab.port, "GET", path)[2])

    assert answers["/health"]["status"] == "ok"
    info = answers["/model/info"]["data"][0]["model_info"]
    assert info["max_input_tokens"] == 2048  # scripts/helpers/launch.py reads it
    assert lab.served.state.metrics.totals()["requests"] == n_before


def test_no_web_page_reads_what_it_says_but_those_that_may_ask_the_server(lab):
    allowed_origins = {}
    for page in ("https://evil.example", "null", PAGE):
        _, headers, _ = exchange(lab.port, "GET", "/v1/models", Origin=page)
        allowed_origins[page] = headers.get("access-control-allow-origin")
    assert allowed_origins == {"https://evil.example": None, "null": None, PAGE: PAGE}


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/responses", {"input": "x", "temperature": 9}, "temperature: "),
        ("/v1beta/models/m:generateContent", {"contents": 5}, "contents: should be"),
    ],
)
def test_a_bad_body_for_litellm_is_a_400_that_names_the_clients_field(
    lab, path, body, sentence
):
    status, answer = lab.post(path, body, **JSON)
    error = json.loads(answer)
    assert status == 400
    assert error.get("error", error)["message"].startswith(sentence)


# -- the gate before it, see test_litellm_gate.py -------------------------------------------


def test_what_is_not_there_is_json_with_what_to_use_and_never_litellms_page(lab):
    status, answer = lab.post("/api/chat", {}, **JSON)
    assert status == 404
    assert "/v1/chat/completions" in json.loads(answer)["error"]
    status, answer = lab.post("/v1/models", {}, **JSON)
    assert status == 405
    assert "takes GET, not POST" in json.loads(answer)["error"]["message"]
    for path in ("/key/generate", "/v1/batches"):
        status, answer = lab.post(path, {}, **JSON)
        assert status >= 400
        assert json.loads(answer)["error"]["message"]
    for path in ("/openapi.json", "/docs", "/redoc"):
        status, _, page = exchange(lab.port, "GET", path)
        assert status == 404
        assert b"/openapi.json describes the API" in page


def test_a_response_that_would_lose_its_history_is_a_400(lab):
    client = lab.client._sdk
    n_asked = len(lab.served.state.stores.recent)
    past = {"previous_response_id": "id_1"}
    with pytest.raises(openai.BadRequestError, match="no conversation is"):
        client.responses.create(model="any", input="And then?", **past)

    assert len(lab.served.state.stores.recent) == n_asked

    reply = client.responses.create(
        model="any", input="Hello.", store=True, max_output_tokens=9
    )
    assert reply.output
