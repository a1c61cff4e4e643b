"""Tenants: nobody learns what another has sent, and each sees only what is its own."""

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import llguidance
import pytest
import start_llm as s
from http_client import exchange
from nights import at_night
from server_fixture import SYSTEM, Served, user, wait_until, wait_until_idle
from status_client import ask, words
from tiny_models import TOOLS

CHAT = "/v1/chat/completions"
TWO_KEYS = {"api_key": "anna, ben", "cache_isolation": "key"}


def send(served: Served, key: str, body: dict[str, Any], expected: int = 200) -> Any:
    port = served.state.config.mlx_port
    bearer = {"Authorization": f"Bearer {key}"}
    status, _, payload = exchange(port, "POST", CHAT, body, **bearer)
    assert status == expected, payload
    wait_until_idle(served.state.engine)
    tenants = served.state.tenants
    wait_until(lambda: not any(state.stores.live for state in tenants.states()))
    return json.loads(payload)


# -- what is quicker the second time ---------------------------------------------------


class Work:
    """All that is made for requests, and that a memo could have kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self._patch = monkeypatch
        self._watch(s, "_tokenize", "tokens")
        self._watch(s.Canonicalizer, "_make", "canonical message")
        self._watch(s, "render_sample", "sample")
        self._watch(s, "probe_generation_prompt", "generation prompt")
        self._watch(s.Renderer, "render", "text")
        self._watch(llguidance, "LLMatcher", "grammar")
        self._watch(s.VisionModel, "_run_tower", "image features")

    def _watch(self, owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            self.made.append(f"{kind} {args[1:]!r}")
            return original(*args, **kwargs)

        self._patch.setattr(owner, name, make)

    def of(self, served: Served, key: str, body: dict[str, Any]) -> list[str]:
        """What one request makes, in no order."""
        self.made.clear()
        send(served, key, body)
        return sorted(self.made)


def schema(word: str) -> dict[str, Any]:
    properties = {word: {"enum": [word]}}
    form = {"type": "object", "properties": properties, "required": [word]}
    return {"type": "json_schema", "json_schema": {"name": word, "schema": form}}


def chat(word: str) -> dict[str, Any]:
    """A request with a word in everything that a memo keeps."""
    call = {"name": "look", "arguments": json.dumps({"path": f"{word} in a call"})}
    calls = [{"id": "call12345", "type": "function", "function": call}]
    return {
        "messages": [
            {**SYSTEM, "content": f"Be careful with {word} in a system prompt."},
            user(f"What is {word} in a question?"),
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call12345", "content": f"{word}, found"},
        ],
        "tools": TOOLS,
        "response_format": schema(word),
        "stop": [f"{word} in a stop string"],
        "chat_template_kwargs": {"mood": f"{word} in a kwarg"},
        "temperature": 0,
        "max_tokens": 3,
    }


def test_a_request_costs_the_same_work_whatever_another_key_has_sent(
    folder, monkeypatch
):
    """The last request makes all anew, whichever of two texts the other one has sent."""
    work = Work(monkeypatch)
    costs = []
    for sent_before in ("xylophone", "marimba"):
        with Served(folder, **TWO_KEYS) as served:
            work.of(served, "anna", chat(sent_before))
            costs.append(work.of(served, "ben", chat("xylophone")))

    assert costs[0] == costs[1]
    assert sum("xylophone" in item for item in costs[0]) > 10


def test_a_key_does_not_pay_twice_for_its_own(folder, monkeypatch):
    work = Work(monkeypatch)
    with Served(folder, **TWO_KEYS) as served:
        first = work.of(served, "anna", chat("xylophone"))
        second = work.of(served, "anna", chat("xylophone"))
        assert served.state.engine.model.template.tenant == ""

    kinds = ("tokens", "canonical message", "sample", "generation prompt", "grammar")
    for kind in kinds:
        assert sum(item.startswith(kind) for item in first) > 0, kind
        assert not [item for item in second if item.startswith(kind)], kind


@pytest.mark.parametrize(
    ("settings", "forgets"),
    [({"api_key": "anna", "cache_isolation": "key"}, False), (TWO_KEYS, True)],
)
def test_the_tokenizer_keeps_no_words_where_there_are_tenants(
    folder, monkeypatch, settings, forgets
):
    tokenizers: list[Any] = []
    monkeypatch.setattr(s, "keep_no_words", tokenizers.append)
    config = s.Config(model_path=str(folder), **settings)
    s.load_model(folder, config)
    assert bool(tokenizers) == forgets


# -- what a tenant sees ----------------------------------------------------------------

MOVING = {"uptime_seconds", "idle_seconds", "seconds", "prefill_left_seconds"}


def at_rest(value: Any) -> Any:
    """A body without what moves by itself."""
    if isinstance(value, dict):
        lasting = {key: item for key, item in value.items() if key not in MOVING}
        return {key: at_rest(item) for key, item in lasting.items()}
    if isinstance(value, list):
        return [at_rest(item) for item in value]
    return value


def seen(served: Served, key: str, **headers: str) -> Any:
    """All that this key can read of the server."""
    engine = served.state.engine
    engine.call(engine._publish)
    bearer = {"x-api-key": key, **headers}
    _, status = ask(served, "GET", "/v1/status", **bearer)
    _, metrics = ask(served, "GET", "/metrics", **bearer)
    return at_rest(status), metrics.splitlines()


def plain(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [SYSTEM, user(text)], "max_tokens": 3, **fields}


def is_decoding(served: Served, key: str) -> bool:
    _, status = ask(served, "GET", "/v1/status", **{"x-api-key": key})
    return "decode" in [request["phase"] for request in status["requests"]]


def test_a_key_sees_nothing_of_what_another_does(folder):
    # With drafts the long reply may be over before anybody looks.
    with Served(folder, speculation="off", **TWO_KEYS) as served:
        send(served, "ben", plain("A tuba."))
        first_view = seen(served, "ben")
        for n in range(3):
            body = plain(words(200 + n), session_id=f"s{n}")
            send(served, "anna", body)
        anna_status, anna_metrics = seen(served, "anna")
        second_view = seen(served, "ben")
        with ThreadPoolExecutor(1) as pool:
            body = plain(words(300), max_tokens=400)
            reply = pool.submit(send, served, "anna", body)
            wait_until(lambda: is_decoding(served, "anna"))
            third_view = seen(served, "ben")
            reply.result()
        send(served, "anna", {"messages": "odd"}, expected=400)
        last_view = seen(served, "ben")

    assert first_view == second_view == third_view == last_view

    status, metrics = first_view
    assert len(status["cache"]) == 1
    assert status["engine"] == {"state": "ready"} and not status["memory"]
    assert status["totals"]["requests"] == len(status["recent"]) == 1
    assert "start_llm_ttft_seconds_count 1.0" in metrics
    assert anna_status["totals"]["requests"] == 3
    assert "start_llm_ttft_seconds_count 3.0" in anna_metrics


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        at_night({}, ""),
        at_night({"api_key": "anna", "cache_isolation": "key"}, "anna"),
        ({"api_key": "anna, ben"}, "ben"),
        ({"cache_isolation": "user"}, ""),
    ],
    ids=["no key", "one key", "shared", "users without a key"],
)
def test_an_operator_sees_everything(folder, settings, key):
    with Served(folder, **settings) as served:
        for name in ("u", "v"):
            send(served, key, plain(words(100), user=name))
        send(served, key, plain(words(90)))
        status, metrics = seen(served, key)

    assert status["totals"]["requests"] == len(status["recent"]) == 3

    times = [request["time"] for request in status["recent"]]
    assert times == sorted(times)
    assert status["engine"]["lines"] == len(status["cache"])
    assert {"process", "peak", "working"} <= set(status["memory"])
    assert len(status["sessions"]) == 3
    assert "start_llm_requests_total" in " ".join(metrics)
    assert "start_llm_ttft_seconds_count 3.0" in metrics


# -- users of one key ------------------------------------------------------------------

CLAUDE = '{{"device_id": "{}", "account_uuid": "", "session_id": "{}"}}'


def reuse(served: Served, **fields: Any) -> int:
    """How many tokens of a long prompt are cached for whoever these fields name."""
    headers = fields.pop("headers", {})
    path = fields.pop("path", CHAT)
    body = plain(words(300), **fields)
    status, answer = ask(served, "POST", path, body, **headers)

    assert status == 200, answer

    wait_until_idle(served.state.engine)
    usage = answer["usage"]
    if path == CHAT:
        return usage["prompt_tokens_details"]["cached_tokens"]
    return usage["cache_read_input_tokens"]


def messages_of(user_id: str) -> dict[str, Any]:
    return {
        "path": "/v1/messages",
        "system": "Be brief.",
        "messages": [user(words(300))],
        "metadata": {"user_id": user_id},
    }


def with_key(key: str, **fields: str) -> dict[str, Any]:
    return {"headers": {"x-api-key": key}, **fields}


def claude_code(device: str, session: str) -> dict[str, Any]:
    return messages_of(CLAUDE.format(device, session))


USERS = {"cache_isolation": "user"}
KEYS_OF_USERS = {**TWO_KEYS, **USERS}
ANNA, BEN = ({"headers": {"X-Cache-User": name}} for name in ("anna", "ben"))
OLD_ID = "user_a1_account_b2_session_{}"  # of Claude Code
CLIENTS = [  # settings, two clients, and whether these share KV
    (USERS, ANNA, BEN, False),
    (USERS, {"prompt_cache_key": "anna"}, {"prompt_cache_key": "ben"}, False),
    (USERS, {"user": "anna"}, {"user": "ben"}, False),
    (USERS, {"safety_identifier": "anna"}, {}, False),
    (USERS, {**ANNA, "user": "x"}, {"user": "x"}, False),
    (USERS, messages_of("anna"), messages_of("ben"), False),
    (USERS, claude_code("a", "1"), claude_code("b", "1"), False),
    (USERS, claude_code("a", "1111"), claude_code("a", "2222"), True),
    (USERS, messages_of(OLD_ID.format(1)), messages_of(OLD_ID.format(2)), True),
    ({}, {"user": "anna"}, {"user": "ben"}, True),
    (TWO_KEYS, with_key("anna"), with_key("ben"), False),
    (KEYS_OF_USERS, with_key("anna", user="u"), with_key("ben", user="u"), False),
    ({"api_key": "anna, ben"}, with_key("anna"), with_key("ben"), True),
]


@pytest.fixture(scope="module")
def serving_with(folder) -> Iterator[Any]:
    """A function: settings -> a server that has them and an empty cache."""
    running: dict[str, Served] = {}
    with ExitStack() as stack:

        def find(settings: dict[str, str]) -> Served:
            name = repr(settings)
            if name not in running:
                running[name] = stack.enter_context(Served(folder, **settings))
            running[name].forget()
            return running[name]

        yield find


@pytest.mark.parametrize(("settings", "anna", "ben", "is_shared"), CLIENTS)
def test_kv_is_shared_by_nobody_who_is_apart(
    serving_with, settings, anna, ben, is_shared
):
    served = serving_with(settings)
    assert reuse(served, **anna) == 0
    assert reuse(served, **anna) > 300
    n_cached = reuse(served, **ben)
    assert n_cached > 300 if is_shared else n_cached == 0


def check_n_requests(served: Served, key: str, n: int, **headers: str) -> None:
    """As many as that are told to this key or user."""
    status, metrics = seen(served, key, **headers)
    assert status["totals"]["requests"] == n
    assert len(status["recent"]) == n
    (line,) = [row for row in metrics if "ttft_seconds_count" in row]
    assert line == f"start_llm_ttft_seconds_count {n}.0"


def test_a_user_sees_its_own_and_the_key_all_of_its_users(folder):
    settings = {**TWO_KEYS, "cache_isolation": "user"}
    with Served(folder, **settings) as served:
        send(served, "anna", plain(words(100), user="u"))
        send(served, "anna", plain(words(100), user="v"))
        send(served, "anna", plain(words(100, seed=1), user="v"))
        send(served, "ben", plain(words(100), user="u"))

        check_n_requests(served, "anna", 3)
        check_n_requests(served, "ben", 1)
        check_n_requests(served, "anna", 2, **{"X-Cache-User": "v"})
        check_n_requests(served, "anna", 0, **{"X-Cache-User": "w"})

        anna = {"x-api-key": "anna"}
        headers = {**anna, "X-Cache-User": "u"}
        _, body = ask(served, "DELETE", "/v1/cache", **headers)
        assert body["dropped"] == 1
        _, body = ask(served, "DELETE", "/v1/cache", **anna)
        assert body["dropped"] == 2
        status, _ = seen(served, "ben")
        assert len(status["cache"]) == 1


def test_a_key_forgets_its_users_who_have_not_come_since_the_start(folder, tmp_path):
    disk = {"cache_disk": "on", "cache_disk_folder": str(tmp_path)}
    settings = {**TWO_KEYS, **disk, "cache_isolation": "user"}
    with Served(folder, **settings) as served:
        for key in ("anna", "ben"):
            for name in ("u", "v"):
                send(served, key, {**chat("tuba"), "user": name})
        assert len(served.state.records.tenants()) == 4

    with Served(folder, **settings) as served:
        ask(served, "DELETE", "/v1/cache", **{"x-api-key": "anna"})
        of_ben = s.name_tenant(served.state.config, key="ben", user="")
        left = served.state.records.tenants()
        assert len(left) == 2
        assert all(s.is_seen_by(of_ben, tenant) for tenant in left)


def test_users_beyond_the_limit_are_forgotten_the_oldest_first():
    state = s.build_state(s.Config(cache_isolation="user", api_key="a, b"))
    n_users = s.Tenants.MAX_TENANTS + 10
    names = ["k", *(f"k/{n}" for n in range(n_users))]
    tenants = [state.for_tenant(name).keep() for name in names]
    tenants[2].stores.live["id"] = None  # has a request under way
    state.for_tenant("k/2").keep()  # is used again
    state.limit_tenants()

    left = {tenant.tenant for tenant in state.tenants.states()}
    assert {"k", "k/1", "k/2", "k/12"} <= left
    assert not {"k/0", "k/3", "k/10"} & left
    assert len(left) == s.Tenants.MAX_TENANTS + 1
    for name in ("k/0", "k/1"):
        state.metrics.of_tenant(name).bump("second_tries")
    assert state.metrics.of_tenant("k/0").snapshot()["second_tries"] == 0
    assert state.metrics.of_tenant("k/1").snapshot()["second_tries"] == 1
    assert state.metrics.of_tenant("k").snapshot()["second_tries"] == 2


def test_a_fault_in_the_stores_of_a_tenant_is_logged_once_and_ends_nothing(
    monkeypatch, caplog
):
    config = s.Config(cache_isolation="user", exit_on_engine_death=False)
    state = s.build_state(config)
    stores = [state.for_tenant(name).keep().stores for name in ("/a", "/b")]
    stop = threading.Event()
    n_rounds = []

    def expire(ledger, _now):
        if ledger is stores[0].ledger:
            raise KeyError("planted")
        if ledger is stores[1].ledger:
            n_rounds.append(1)
        if len(n_rounds) == 3:
            stop.set()

    monkeypatch.setattr(s.Ledger, "expire", expire)
    s._wait_until_stop(state, stop)

    assert len(n_rounds) == 3
    assert sum("planted" in str(record.exc_info) for record in caplog.records) == 1


# -- what clients wrote ----------------------------------------------------------------


@pytest.mark.parametrize("is_logged", [False, True])
def test_what_differs_is_quoted_only_where_requests_are_logged(
    folder, caplog, is_logged
):
    settings = {"max_kv_size": 8192, "enable_request_logging": is_logged}
    with Served(folder, **settings) as served:
        question = user("Now: " + words(900))
        for text in ("The marimba is loud.", "The xylophone is loud."):
            messages = [{**SYSTEM, "content": text}, question]
            body = {"messages": messages, "session_id": "s", "max_tokens": 3}
            send(served, "", body)
        _, status = ask(served, "GET", "/v1/status")

        system = {**SYSTEM, "content": "The tuba is loud."}
        body = {"messages": [system, question]}
        _, explanation = ask(served, "POST", "/v1/cache/explain", body)

    (divergence,) = status["divergences"]
    assert divergence["why"].startswith("message 0: a system message differs")

    for text in (json.dumps(divergence), caplog.text):
        assert ("xylophone" in text) == is_logged
        assert ("marimba" in text) == is_logged
    cause = explanation["why_not_more"]

    assert "tuba" in cause["is"]
    assert cause["role"] == "system"


# Words of a request that are to appear nowhere, each in a place of its own.
PLACES = [
    *("system", "user", "call", "result", "tool", "schema"),
    *("format", "kwarg", "stop", "image", "bare", "kind"),
]
SECRETS = {place: f"xylo{place}phone" for place in PLACES}


def chat_with_secrets() -> dict[str, Any]:
    """A request that is answered, with a secret in each of its fields."""
    call = {"name": "look", "arguments": json.dumps({"path": SECRETS["call"]})}
    calls = [{"id": "call12345", "type": "function", "function": call}]
    result = {"role": "tool", "tool_call_id": "call12345", "content": SECRETS["result"]}
    tool = {"name": SECRETS["tool"], "parameters": schema(SECRETS["schema"])}
    return {
        "messages": [
            {"role": "system", "content": SECRETS["system"] + words(300)},
            user(SECRETS["user"] + words(300)),
            {"role": "assistant", "content": "", "tool_calls": calls},
            result,
        ],
        "tools": [{"type": "function", "function": tool}],
        "response_format": schema(SECRETS["format"]),
        "chat_template_kwargs": {"mood": SECRETS["kwarg"]},
        "stop": [SECRETS["stop"]],
        "max_tokens": 4,
        "session_id": "s",
    }


def refused_chats() -> list[dict[str, Any]]:
    """One for each reason to refuse it."""
    good = chat_with_secrets()
    messages = good["messages"]
    image = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{SECRETS['image']}"},
    }
    odd_role = {"role": SECRETS["kind"], "content": SECRETS["user"]}
    odd_fields = {SECRETS["bare"]: {SECRETS["bare"]: 1}, "stop": 3}
    wrong_schema = {"type": SECRETS["format"], "pattern": f"({SECRETS['schema']}"}
    named_schema = {"name": "x", "schema": wrong_schema}
    wrong_format = {"type": "json_schema", "json_schema": named_schema}
    strict_tool = {"name": SECRETS["tool"], "parameters": wrong_schema, "strict": True}
    strict_tools = [{"type": "function", "function": strict_tool}]
    choice = {"type": "function", "function": {"name": SECRETS["tool"]}}
    return [
        {"messages": [{"role": "user", "content": [image]}]},
        {"messages": messages, "response_format": wrong_format},
        {"messages": messages, "tools": strict_tools, "tool_choice": choice},
        {"messages": messages, "tools": TOOLS, "tool_choice": choice},
        {"messages": messages, "reasoning_effort": SECRETS["kind"]},
        {"messages": [odd_role]},
        {"messages": messages, **odd_fields},
    ]


def requests_with_secrets() -> list[tuple[str, Any]]:
    """Bodies that are answered, and bodies that are refused for each reason."""
    good = chat_with_secrets()
    system, question, *_ = good["messages"]
    edited_system = {**system, "content": SECRETS["system"] + "!" + words(300)}
    edited = {**good, "messages": [edited_system, *good["messages"][1:]]}
    odd_block = {"type": SECRETS["kind"], "text": SECRETS["user"]}
    odd_message = {"role": "user", "content": [odd_block]}
    system_text = SECRETS["system"]
    bodies = [
        {"messages": [question], "system": system_text, "max_tokens": 4},
        {"messages": [odd_message], "max_tokens": 4},
    ]
    return [
        *((CHAT, body) for body in (good, edited, *refused_chats())),
        *(("/v1/messages", body) for body in bodies),
        ("/v1/completions", {"prompt": SECRETS["bare"], "max_tokens": 4}),
    ]


@pytest.mark.parametrize("refuses", [False, True])
def test_no_word_of_a_request_is_shown_or_written_down(
    folder, tmp_path, caplog, monkeypatch, refuses
):
    """Neither by status, metrics and page, nor in the log and the session logs.

    `refuses`: the chat template does, and quotes what it was given.
    """
    caplog.set_level(logging.DEBUG, s.logger.name)
    answers = []
    with Served(folder, log_root=str(tmp_path), max_kv_size=16_384) as served:
        if refuses:
            renderer = served.state.engine.model.template._renderer
            monkeypatch.setattr(renderer, "_apply", refuse)
        for path, body in requests_with_secrets():
            answers.append(ask(served, "POST", path, body))
            wait_until_idle(served.state.engine)
        wait_until(lambda: not served.state.stores.live)
        paths = ("/v1/status", "/metrics", "/health", "/v1/models")
        pages = [ask(served, "GET", path)[1] for path in paths]

    refused = [answer for status, answer in answers if status != 200]
    quoting = [answer for answer in refused if "xylo" in json.dumps(answer)]
    assert len(refused) + 4 >= len(answers) or refuses
    assert len(quoting) >= 3  # its own client is told

    files = [path.read_text() for path in tmp_path.rglob("*.log")]
    assert files or refuses
    assert pages[0]["divergences"] or refuses

    for text in (json.dumps(pages), caplog.text, *files):
        found = [secret for secret in SECRETS.values() if secret in text]
        assert not found


def refuse(messages: list[Any], **_kwargs: Any) -> str:
    raise ValueError(f"no such talk: {messages!r}")


def test_a_user_comes_into_being_when_something_is_stored_for_it(folder):
    settings = {**TWO_KEYS, "cache_isolation": "user"}
    with Served(folder, **settings) as served:
        tenants = served.state.tenants
        for path in ("/health", "/", "/openapi.json", "/v1/status", "/v1/models"):
            for n in range(3):
                headers = {"x-api-key": "anna", "x-cache-user": f"u{n}"}
                assert ask(served, "GET", path, **headers)[0] == 200
        assert not tenants.states()
        assert (
            seen(served, "anna", **{"x-cache-user": "u"})[0]["totals"]["requests"] == 0
        )

        send(served, "anna", plain(words(10), user="u"))
        send(served, "anna", plain(words(10), user="v", top_p=7), expected=400)
        assert len(tenants.states()) == 2


def test_ledgers_of_all_tenants_share_their_bytes(folder):
    """What was not used for longest goes first, whoever has sent it."""
    with Served(folder, **TWO_KEYS) as served:
        for key in ("anna", "ben", "anna"):
            send(served, key, chat("xylophone"))
        ledgers = [state.stores.ledger for state in served.state.tenants.states()]
        of_ben, of_anna = ledgers
        served.state.tenants.limit_ledgers(of_anna.nbytes)
        assert of_ben.nbytes == 0 and of_anna.nbytes > 0
