"""Real coding agents at work on the real server: what they sent before costs nothing.

Claude Code, PI, Codex, Copilot, and OpenClaw through its gateway, run their own loops (files are
read, commands run, several at once) against servers in this process whose model says what a script
wants. Nothing else is played: prompts are rendered, fed and cached as ever. What was fed is read
from the model's own calls.

The clients are found in CLIENTS_HOME (default: ~/clients), where scripts/tools/clients/install.sh
puts them. Each starts once and talks to a dense and to a hybrid model.
"""

import json
import re
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from clients.drive import (
    FILES,
    ClaudeCode,
    Client,
    Codex,
    Copilot,
    OldClaudeCode,
    OldOpenClaw,
    OpenClaw,
    Pi,
    QwenCode,
)
from minimum_prefill import Fed, Request, common_prefix, fewest, prefilled
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from scripted_replies import Posted, Said, Script, Told, Wiretap, call, reply, spelled
from server_fixture import (
    PATIENCE,
    Message,
    Scribe,
    Served,
    connections,
    forget_pasts,
    free_port,
    wait_until,
)
from tiny_models import DENSE, HYBRID, tiny_model
from tiny_vision import DENSE_VISION, HYBRID_VISION, tiny_vision_model
from vision_fixture import Seeing, picture

KINDS = (DENSE, HYBRID)
MODEL = "tiny"  # what clients call it
SMALL = {"heads": 1, "kv_heads": 1}  # a prompt has 20,000 tokens
LEAST_SHARE = 0.99  # cached, of what was sent or generated before
LEAST_NEW_SHARE = (
    0.97  # of a new session's first request, where the client worked before
)
MOST_RATIO = 1.10  # prefilled / fewest
MOST_WARM_RATIO = 1.02  # from the second request on
MOST_RESTATED = 1.20  # the same where each turn has to say the new value of an id
MOST_FALLBACKS = 0.01  # of all requests
SLOW_SECONDS = 75  # of a prefill that breaks nothing

pytestmark = pytest.mark.timeout(
    290
)  # the first test of a client waits for all of its work

RESTATES = {"openclaw-2026.2.17"}  # a new message_id with every question
CLIENT_NAMES: dict[str, type[Client]] = {
    "claude-code-2.1.328": ClaudeCode,
    "claude-code-2.1.150": OldClaudeCode,
    "pi": Pi,
    "openclaw-2026.9.6": OpenClaw,
    "openclaw-2026.2.17": OldOpenClaw,
    "codex": Codex,
    "copilot": Copilot,
}
CLAUDES = [name for name, cls in CLIENT_NAMES.items() if issubclass(cls, ClaudeCode)]
WITHOUT_THINKING = {"copilot"}  # it sends none back
IN_BACKGROUND = {
    "claude-code-2.1.328"
}  # its sub-agents; it can also load tools when it wants them
CASES = [
    (name, "direct") for name in CLIENT_NAMES if name != "codex"
]  # how it reaches a server
CASES += [
    (name, "proxy")
    for name in ("claude-code-2.1.328", "pi", "openclaw-2026.9.6", "codex")
]


def cases(names: Iterable[str]) -> pytest.MarkDecorator:
    """For some clients only."""
    chosen = [case for case in CASES if case[0] in names]
    return pytest.mark.parametrize("case", chosen, indirect=True, ids="-".join)


# -- the script ------------------------------------------------------------------------------------

SUMMARY = 'lab output line 1\nline "two" with unicode: é ü 漢字'
GOODBYE = "Hello, that was all."


def turns(client: type[Client]) -> list[tuple[str, list[str]]]:
    """What the user says, and the replies to it, in the tools that this client has."""

    def run(command: str) -> str:
        more = {"description": command} if issubclass(client, Copilot) else {}
        return call(client.SHELL, **{client.COMMAND: command, **more})

    read, write = (
        call("read", path="notes.txt"),
        call("write", path="out.txt", content=SUMMARY),
    )
    if issubclass(client, Codex | Copilot):  # the shell, which takes any path
        read, write = run("cat notes.txt"), run(f"printf '%s' '{SUMMARY}' > out.txt")
    if issubclass(client, ClaudeCode):
        read = call("Read", file_path="notes.txt")
        write = call("Write", file_path="out.txt", content=SUMMARY)
    work = [
        reply(
            "The notes come first.\nThen the rest.",
            "I will read the notes first.",
            read,
        ),
        reply("Now the folder.", "", run("ls -la")),
        reply(
            "Two questions at once.",
            "",
            run("wc -l notes.txt src/app.py"),
            run("cat src/*.py"),
        ),
        reply("That is enough for a summary.", "", write),
        reply(
            "All is said.",
            "Done: the notes mention the falcon.\n\n* `src/app.py` greets.",
        ),
    ]
    check = [
        reply(
            "I have to look.",
            "Checking the output file.",
            run("cat out.txt"),
            run("wc -l *"),
        ),
        reply("Two.", "The output file has **two** lines."),
    ]
    return [
        (
            "Read notes.txt, count all lines, look into src, write a summary to out.txt.",
            work,
        ),
        ("Now show out.txt and tell me how many lines it has.", check),
        (
            "Say goodbye in one short sentence, without tools.",
            [reply("Short.", GOODBYE)],
        ),
    ]


# -- conversations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one client sent to one model, and what the server made of it; one entry per request."""

    client: str
    kind: str
    served: Served
    posted: list[Posted]
    told: list[Told]
    said: list[Said]
    fed: list[list[Fed]]
    records: list[dict[str, Any]]  # of the session logs
    n_fallbacks: int  # that the server counted

    @property
    def usages(self) -> list[Any]:
        return [one.usage for one in self.told]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [one.body for one in self.posted]

    @property
    def requests(self) -> list[Request]:
        return [Request(one.prompt, one.reply) for one in self.said]

    @property
    def n_prefilled(self) -> list[int]:
        """Raises ValueError where the model was fed what is in no prompt and no reply."""
        pairs = zip(self.fed, self.requests, strict=True)
        return [prefilled(fed, [request]) for fed, request in pairs]

    @property
    def as_meant(self) -> list[Request]:
        """Rendered with no server code, with every volatile field as it was at first.

        What Anthropic's API was sent, and what came back without thinking, has no rendering but
        the server's own.
        """
        if self.client in (*CLAUDES, *WITHOUT_THINKING):
            return self.requests
        pairs = zip(self.bodies, meant(self.bodies), strict=True)
        prompts = [
            self.served.scribe.prompt(messages, body) for body, messages in pairs
        ]
        return [
            Request(p, one.reply) for p, one in zip(prompts, self.said, strict=True)
        ]

    @property
    def n_fewest(self) -> list[int]:
        return fewest(
            self.as_meant, None if self.kind == DENSE else self.served.scribe.turns
        )


CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"
MESSAGE_ID = re.compile(r'(?<="message_id": ")[^"]+')


def meant(bodies: list[dict[str, Any]]) -> list[list[Message]]:
    """Messages with one id in the system prompt, and each carrier where its text was first told."""
    told: dict[str, int] = {}  # carriers, and the messages behind which they were first
    found = []
    for body in bodies:
        messages = [
            {"content": None, **message} for message in body["messages"]
        ]  # LiteLLM drops it
        if (last := words_of(messages[-1])).startswith(CARRIER):
            messages.pop()
            told.setdefault(last, len(messages) - 1)
        assert not any(words_of(message).startswith(CARRIER) for message in messages)
        for text, at in told.items():
            messages[at]["content"] = f"{words_of(messages[at])}\n\n{text}"
        first = MESSAGE_ID.search(words_of(bodies[0]["messages"][0]))
        rest = list(
            dropwhile(lambda one: one["role"] in ("system", "developer"), messages)
        )
        heads = messages[: len(messages) - len(rest)]
        system = "\n\n".join("\n".join(parts_of(one)) for one in heads)
        if first is not None:
            system = MESSAGE_ID.sub(first[0], system)
        found.append([{"role": "system", "content": system}, *rest])
    return found


def words_of(message: Message) -> str:
    return "".join(parts_of(message))


def parts_of(message: Message) -> list[str]:
    content = message.get("content") or ""
    return (
        [content]
        if isinstance(content, str)
        else [part.get("text", "") for part in content]
    )


def forget(served: Served) -> None:
    """A server that knows nothing."""
    served.forget()
    forget_pasts(served.state)
    read_records(served)


def held(client: Client, name: str, kind: str, served: Served) -> Conversation:
    """Have the whole conversation, with a server that knows nothing of those before."""
    forget(served)
    before = served.state.metrics.snapshot()["ledger_seam_fallback"]
    script_of, n_replies = turns(type(client)), 0
    replies = [spelled(served.scribe, text) for _, texts in script_of for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        script, tap = (
            Script(patch, served.scribe, {"": replies}),
            Wiretap(patch, served),
        )
        for words, texts in script_of:
            n_replies += len(texts)
            client.say(kind, words)
            wait_until(lambda n=n_replies: len(tap.told) >= n)
    return Conversation(
        client=name,
        kind=kind,
        served=served,
        posted=tap.posted,
        told=tap.told,
        said=script.said,
        fed=tap.fed,
        records=read_records(served),
        n_fallbacks=served.state.metrics.snapshot()["ledger_seam_fallback"] - before,
    )


def read_records(served: Served) -> list[dict[str, Any]]:
    """The lines of the session logs, which are gone then."""
    records = []
    for path in Path(served.state.config.log_root).rglob("*.log"):
        records += map(json.loads, path.read_text("utf-8").splitlines())
        path.unlink()
    return sorted(records, key=lambda record: record["time"])


@contextmanager
def serving(kind: str, root: Path) -> Iterator[Served]:
    """Greedy where the client leaves it open; the logs carry the exact tokens."""
    logs = str(root / f"logs-{uuid.uuid4().hex}")
    logging = {
        "enable_request_logging": True,
        "log_prompt_tokens": True,
        "log_root": logs,
    }
    served = Served(tiny_model(kind, root, **SMALL), default_temperature=0, **logging)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    with serving(DENSE, root) as dense, serving(HYBRID, root) as hybrid:
        yield {DENSE: dense, HYBRID: hybrid}


def urls_of(servers: dict[str, Served]) -> dict[str, str]:
    """Where clients find each server, without /v1."""
    return {
        kind: f"http://127.0.0.1:{served.state.config.mlx_port}"
        for kind, served in servers.items()
    }


@contextmanager
def proxied(served: Served | Seeing) -> Iterator[str]:
    """The same through a LiteLLM of its own."""
    config = served.state.config
    own = {
        "enable_proxy": True,
        "proxy_port": free_port(),
        "log_root": f"{config.log_root}-proxy",
    }
    config = config.model_copy(update=own)
    loaded = served.state.engine.model
    with s.run_proxy(
        config, {"id": loaded.model_id, "context_length": loaded.max_context_tokens}
    ):
        yield f"http://127.0.0.1:{config.proxy_port}"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except OSError:
        time.sleep(0.2)
        return False


@pytest.fixture(scope="module")
def proxies(servers):
    """Started for the first who asks, and ready."""
    if not Path(sys.executable).with_name("litellm").exists():
        pytest.skip("LiteLLM is not installed")
    with ExitStack() as stack:
        urls = {
            kind: stack.enter_context(proxied(served))
            for kind, served in servers.items()
        }
        for url in urls.values():
            wait_until(lambda url=url: answers(url))
        yield urls


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request):
    """A client that is installed, and its route."""
    skip_if_missing(request.param[0])
    return request.param


@pytest.fixture(scope="module")
def name(case):
    return case[0]


@pytest.fixture(scope="module")
def urls(case, servers, request):
    return (
        urls_of(servers) if case[1] == "direct" else request.getfixturevalue("proxies")
    )


def skip_if_missing(name: str) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the clients are installed for Linux")
    if CLIENT_NAMES[name].missing():
        pytest.skip("needs clients: scripts/tools/clients/install.sh, CLIENTS_HOME")


@contextmanager
def running(name: str, urls: dict[str, str], room: Path) -> Iterator[Client]:
    client = CLIENT_NAMES[name](room, urls, model=MODEL)
    try:
        client.start()
        yield client
    finally:
        client.close()


@pytest.fixture(scope="module")
def client(name, urls, tmp_path_factory):
    with running(name, urls, tmp_path_factory.mktemp(name)) as client:
        yield client


@pytest.fixture(scope="module")
def conversations(client, name, servers):
    return {kind: held(client, name, kind, served) for kind, served in servers.items()}


@pytest.fixture(params=KINDS)
def conversation(conversations, request):
    return conversations[request.param]


# -- what holds for all of them --------------------------------------------------------------------


def results_of(body: dict[str, Any]) -> list[str]:
    """What tools gave; Codex tells the time before it, Copilot how it ended behind it."""
    told = [words_of(one) for one in body["messages"] if one["role"] == "tool"]
    found = [
        text.rpartition("\nOutput:\n")[2].partition("\n<shellId: ")[0] for text in told
    ]
    for message in body["messages"]:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        found += [words_of(part) for part in parts if part["type"] == "tool_result"]
    return found


def answers_of(body: dict[str, Any]) -> list[tuple[str, int]]:
    """(thought, number of calls) of each reply that the client sends back."""
    found = []
    for message in (one for one in body["messages"] if one["role"] == "assistant"):
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        thoughts = [
            block["thinking"] for block in blocks if block["type"] == "thinking"
        ]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        calls += message.get("tool_calls") or []
        found.append(
            (message.get("reasoning_content") or "".join(thoughts), len(calls))
        )
    return found


def test_the_client_did_its_work(conversation):
    """Tools ran, several at once; thinking came back; nothing was asked that no script foresaw."""
    replies = [
        text for _, texts in turns(CLIENT_NAMES[conversation.client]) for text in texts
    ]
    *earlier, last = conversation.bodies
    assert len(earlier) + 1 == len(replies)
    results = results_of(last)
    assert "falcon" in results[0]
    assert [text.strip() for text in results].count(FILES["src/app.py"].strip()) == 1
    assert SUMMARY in results
    answers = answers_of(last)
    assert [n_calls for _, n_calls in answers] == [1, 1, 2, 1, 0, 2, 0]
    pairs = zip(replies, answers, strict=False)
    if conversation.client in WITHOUT_THINKING:
        assert not any(thought for _, (thought, _) in pairs)
    else:
        assert all(thought and text.startswith(thought) for text, (thought, _) in pairs)


def test_what_was_sent_or_generated_before_is_cached(conversation, table):
    requests, n_prefilled = conversation.requests, conversation.n_prefilled
    n_cached = [len(r.prompt) - n for r, n in zip(requests, n_prefilled, strict=True)]
    shares = []
    for place, request in enumerate(requests[1:], 1):
        told = [np.array(r.prompt + r.reply) for r in requests[:place]]
        shared = max(common_prefix(request.wanted, one) for one in told)
        # No client takes back what it sent, so all of it, and not only what looks the same now.
        shares.append(n_cached[place] / max(shared, len(told[-1])))
    needed = conversation.n_fewest
    row = "{:19} {:8} {} requests  cached {:.4f}  prefilled {} / {}, from the second on {} / {}"
    facts = (len(requests), min(shares), sum(n_prefilled), sum(needed))
    warm = (sum(n_prefilled[1:]), sum(needed[1:]))
    table(row.format(conversation.client, conversation.kind, *facts, *warm))
    assert min(shares) >= LEAST_SHARE, shares
    assert facts[2] <= MOST_RATIO * facts[3]
    most = MOST_RESTATED if conversation.client in RESTATES else MOST_WARM_RATIO
    assert warm[0] <= most * warm[1]
    assert [usage.cached_tokens for usage in conversation.usages] == n_cached
    assert [record["cached"] for record in conversation.records] == n_cached


def test_the_log_has_what_the_model_was_given(conversation):
    tokens = [tuple(record["tokens"]) for record in conversation.records]
    assert tokens == [request.prompt for request in conversation.requests]
    assert tokens[0] == conversation.as_meant[0].prompt


def test_no_request_falls_back(conversation, table):
    reasons = Counter(
        one["fallback"] for one in conversation.records if one["fallback"]
    )
    n, who = (
        len(conversation.records),
        f"{conversation.client:19} {conversation.kind:8}",
    )
    table(f"{who} {reasons.total()} of {n} requests fall back {dict(reasons) or ''}")
    assert reasons.total() == conversation.n_fallbacks
    assert conversation.n_fallbacks <= MOST_FALLBACKS * n


@cases({*CLIENT_NAMES} - {*CLAUDES})  # the plain model takes too long for their prompts
def test_the_last_reply_has_the_logits_of_a_cold_model(conversation):
    """On the tokens that the log reports; the plain model with a fresh cache, no server code."""
    said, tokens = conversation.said[-1], conversation.records[-1]["tokens"]
    assert conversation.usages[-1].cached_tokens > 0
    model = load(str(conversation.served.state.engine.model.path))[0]
    cache, given = make_prompt_cache(model), [*tokens, *said.reply[:-1]]
    for at in range(0, len(tokens) - 1, 2048):
        model(mx.array([given[at : min(at + 2048, len(tokens) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    cold = np.array(model(mx.array([given[len(tokens) - 1 :]]), cache=cache)[0])
    assert np.abs(cold - np.array(said.logits)).max() == 0


# -- what the script has no part in ----------------------------------------------------------------

Measured = tuple[
    list[list[tuple[int, int]]], list[int]
]  # (position, token) fed; tokens cached


def replayed(
    served: Served, bodies: list[dict[str, Any]], script: list[list[int]]
) -> Measured:
    """Post them to a server that knows nothing; without a script the model says what it likes."""
    with pytest.MonkeyPatch.context() as patch:
        if script:
            Script(patch, served.scribe, {"": script})
        tap = Wiretap(patch, served)
        for body in bodies:
            post(served, {**body, "max_completion_tokens": 60})
    fed = [
        [(one.at + i, token) for one in calls for i, token in enumerate(one.tokens)]
        for calls in tap.fed
    ]
    return fed, [usage.cached_tokens for usage in tap.usages]


def post(served: Served, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.state.config.mlx_port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        answer.read()


@cases(["pi"])
def test_without_the_script_no_prefill_changes(conversation, tmp_path_factory):
    """What a client sent, answered freely, and answered by a script of those very answers."""
    root, bodies = tmp_path_factory.getbasetemp(), conversation.bodies
    with serving(conversation.kind, root) as served:
        free = replayed(served, bodies, [])
        prompts = [record["tokens"] for record in read_records(served)]
    pairs = zip(free[0], prompts, strict=True)
    said = [[token for at, token in fed if at >= len(prompt)] for fed, prompt in pairs]
    with serving(conversation.kind, root) as served:
        scripted = replayed(served, bodies, said)
    assert said != [list(one.reply) for one in conversation.said]
    assert scripted == free


# -- other sessions, other agents ------------------------------------------------------------------

COUNT = "Count the files of this folder."
DELEGATE = "Ask a sub-agent how many files there are."
LOAD = "Load the tool that lists scheduled jobs, and use it."


def scenes_of(name: str, *, served: Served) -> dict[str, list[list[int]]]:
    """A new session with a sub-agent, and tools that are loaded when they are wanted."""
    agent = call("Agent", description="Count files", prompt=COUNT)
    main = [
        reply("Another one can do that.", "", agent),
        reply("So it is.", "It is at work."),
    ]
    if name in IN_BACKGROUND:
        main += [
            reply("It has come back.", "There are six."),
            reply("Where is it?", "", call("ToolSearch", query="select:CronList")),
            reply("Here.", "", call("CronList")),
            reply("None.", "No job is scheduled."),
        ]
    ls = call("Bash", command="ls | wc -l")
    sub = [reply("I count.", "", ls), reply("Six.", "There are six entries.")]
    texts = {DELEGATE: main, COUNT: sub}
    return {
        words: [spelled(served.scribe, text) for text in scene]
        for words, scene in texts.items()
    }


Talks = dict[str, list[Told]]  # opening words -> what was told, in the order it ended


def visited(client: Client, name: str, kind: str, served: Served) -> Talks:
    """A second session where the client worked before, with a server that knows of that."""
    scenes = scenes_of(name, served=served)
    with pytest.MonkeyPatch.context() as patch:
        script, tap = Script(patch, served.scribe, scenes), Wiretap(patch, served)
        client.say(kind, DELEGATE, new=True)
        if name in IN_BACKGROUND:
            client.say(kind, LOAD)
    talks: Talks = {words: [] for words in scenes}
    for one in tap.told:
        talks[script.opening(one.prompt)].append(one)
    for words, scene in scenes.items():
        assert [list(one.reply) for one in talks[words]] == scene
    return talks


@pytest.fixture(scope="module")
def visits(client, name, conversations, servers):
    return {
        kind: visited(client, name, kind, served) for kind, served in servers.items()
    }


@pytest.fixture(params=KINDS)
def visit(visits, request):
    return visits[request.param]


@cases(CLAUDES)
def test_a_new_session_begins_where_they_all_do(visit, name, table):
    first = visit[DELEGATE][0]
    share = first.usage.cached_tokens / len(first.prompt)
    table(
        f"{name:19} new session: {share:.4f} of {len(first.prompt)} tokens are cached"
    )
    assert share >= LEAST_NEW_SHARE


@cases(CLAUDES)
def test_a_sub_agent_and_loaded_tools_cost_the_main_thread_nothing(visit, name, table):
    for words, talk in visit.items():
        pairs = pairwise(talk)
        shares = [
            after.usage.cached_tokens / len(before.tokens) for before, after in pairs
        ]
        table(
            f"{name:19} {words[:16]}... {len(talk)} requests  cached {min(shares):.4f}"
        )
        assert min(shares) >= LEAST_SHARE, shares


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_of_qwen_code_is_resumed_though_the_folder_has_changed(
    servers, kind, tmp_path, monkeypatch, table
):
    """why(L-103): a new process, so git and the folder are looked at again."""
    monkeypatch.setitem(CLIENT_NAMES, "qwen-code", QwenCode)
    skip_if_missing("qwen-code")
    served, shell = servers[kind], QwenCode.SHELL
    forget(served)
    said = [
        reply(
            "I make it.", "", call(shell, command="seq 9 > out.txt; git add out.txt")
        ),
        reply("It is there.", "I made out.txt."),
        reply("I look.", "", call(shell, command="wc -l out.txt")),
        reply("Nine.", "It has nine lines."),
    ]
    Script(
        monkeypatch, served.scribe, {"": [spelled(served.scribe, one) for one in said]}
    )
    tap = Wiretap(monkeypatch, served)
    with running("qwen-code", urls_of(servers), tmp_path) as client:
        client.say(kind, "Make out.txt.")
        client.say(kind, "How many lines has it?")
    for before, now in pairwise(tap.told):
        share = now.usage.cached_tokens / len(before.tokens)
        table(
            f"qwen-code {kind}: cached {now.usage.cached_tokens} of {len(before.tokens)}"
        )
        assert share >= LEAST_SHARE
    assert len(tap.told) == 4


# -- patience --------------------------------------------------------------------------------------

PATIENT = ["claude-code-2.1.328", "pi"]
HELLO = "Just say hello."


@pytest.mark.parametrize("kind", KINDS)
@cases(PATIENT)
def test_a_client_killed_in_mid_prefill_finds_its_work_again(
    client, name, kind, servers, table
):
    served, held, gone = servers[kind], [], threading.Event()
    forget(served)

    def hold(rows: list[Fed]) -> None:
        if rows[0].at > 0 and not gone.is_set():
            held.append(rows[0])
            gone.wait(PATIENCE)

    with pytest.MonkeyPatch.context() as patch:
        Script(
            patch,
            served.scribe,
            {"": [spelled(served.scribe, reply("Short.", GOODBYE))]},
        )
        tap, n_connections = Wiretap(patch, served), connections()
        with served.holding(hold):
            with client.saying(kind, HELLO, new=True) as process:
                wait_until(lambda: held)
                process.kill()
            wait_until(lambda: connections() <= n_connections)
            gone.set()
            wait_until(lambda: held[0] in served.recorder.fed)
        reached = held[0].at + len(held[0].tokens)
        assert not tap.told, "it was done before"
        client.say(kind, HELLO, new=True)
    (told,) = tap.told
    cells = (name, kind, reached, len(told.prompt), told.usage.cached_tokens)
    table("{:19} {:8} killed after {} of {} tokens, then {} are cached".format(*cells))
    assert reached < len(told.prompt)
    assert told.usage.cached_tokens >= LEAST_SHARE * reached


@pytest.mark.slow
def test_a_slow_prefill_breaks_nothing(servers, tmp_path_factory, table):
    """All that are installed wait at the same time, for servers whose model stands still."""
    names = [
        n for n in (*PATIENT, "openclaw-2026.9.6") if not CLIENT_NAMES[n].missing()
    ]
    if not names or not sys.platform.startswith("linux"):
        skip_if_missing(PATIENT[0])
    scribe, goes_on = servers[DENSE].scribe, threading.Event()
    scenes = {
        f"I am {name}. {HELLO}": [spelled(scribe, reply("Short.", f"Hello, {name}."))]
        for name in names
    }
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        clients = [
            stack.enter_context(
                running(name, urls_of(servers), tmp_path_factory.mktemp(name))
            )
            for name in names
        ]
        for served in servers.values():
            forget(served)
            stack.enter_context(served.holding(lambda _rows: goes_on.wait(PATIENCE)))
        script, tap = Script(patch, scribe, scenes), Wiretap(patch, servers[DENSE])
        pool = stack.enter_context(ThreadPoolExecutor(len(names)))
        where = [KINDS[at % 2] for at in range(len(names))]
        works = [
            pool.submit(client.say, kind, words, seconds=PATIENCE)
            for client, kind, words in zip(clients, where, scenes, strict=True)
        ]
        wait_until(lambda: len(tap.posted) == len(names))
        time.sleep(SLOW_SECONDS)
        goes_on.set()
        wait_until(lambda: len(tap.told) == len(names))
        for work in works:
            work.result()
    assert {script.opening(told.prompt) for told in tap.told} == set(scenes)
    assert len(tap.posted) == len(names), "somebody asked again"
    for name, client in zip(names, clients, strict=True):
        if client.WAITS:
            assert f"Hello, {name}." in client.log()
    table(f"{', '.join(names)}: {SLOW_SECONDS} s without a token")


LOOKS = {
    "claude-code-2.1.328": call("Read", file_path="pic.png"),
    "pi": call("read", path="pic.png"),
    "codex": call("view_image", path="pic.png"),
}


class Eyes(Scribe):
    """What images say cannot be spelled."""

    def text(self, ids):
        return super().text([token for token in ids if token >= 0])


@pytest.mark.parametrize("kind", [DENSE_VISION, HYBRID_VISION])
@pytest.mark.parametrize("reader", LOOKS)
def test_a_client_reads_an_image(reader, kind, tmp_path, monkeypatch, table):
    skip_if_missing(reader)
    folder = tiny_vision_model(kind, tmp_path, **SMALL)
    seeing = Seeing(folder, monkeypatch, log_root=str(tmp_path), default_temperature=0)
    scribe, told, ending = Eyes(folder), [], s.ReplyGeneration._reply_end
    said = [
        reply("I have to look.", "I will look.", LOOKS[reader]),
        reply("Squares.", "It shows squares."),
        reply("Again.", "They are still squares."),
    ]
    Script(monkeypatch, scribe, {"": [spelled(scribe, one) for one in said]})

    def noted(answer):
        told.append((answer._prepared, ending(answer)))
        return told[-1][1]

    monkeypatch.setattr(s.ReplyGeneration, "_reply_end", noted)
    try:
        with ExitStack() as stack:
            url = seeing.url
            if reader == "codex":
                url = stack.enter_context(proxied(seeing))
                wait_until(lambda: answers(url))
            client = stack.enter_context(running(reader, {kind: url}, tmp_path))
            for work in tmp_path.glob("work-*"):
                (work / "pic.png").write_bytes(picture(7))
            client.say(kind, "Look at pic.png and say what is on it.", seconds=PATIENCE)
            client.say(kind, "And what else is there?", seconds=PATIENCE)
    finally:
        seeing.close()
    assert [len(prepared.engine_request.images) for prepared, _ in told] == [0, 1, 1]
    assert not any(prepared.plan.refusal for prepared, _ in told)
    usages = [end.usage for _, end in told]
    for before, usage in pairwise(usages):
        table(f"{reader} {kind}: cached {usage.cached_tokens} of {usage.prompt_tokens}")
        assert (
            usage.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1
        )
    assert seeing.tower_runs == 1
