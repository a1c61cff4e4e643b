"""Real coding agents at work on the real server: what they sent before costs nothing.

PI, and OpenClaw through its gateway, run their own loops (files are read, commands run, several at
once) against servers in this process whose model says what a script wants. Nothing else is played:
prompts are rendered, fed and cached as ever. What was fed is read from the model's own calls.

The clients are found in CLIENTS_HOME (default: ~/clients); ../shared/clients/install.sh puts them
there. Each starts once and talks to a dense and to a hybrid model.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from fewest import Fed, Request, common_prefix, fewest, prefilled
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from scripted import Posted, Said, Script, Wiretap, call, reply, spelled
from serving import Message, Served, forget_pasts, free_port, wait_until
from tiny_models import DENSE, HYBRID, tiny_model

CLIENTS = Path(os.environ.get("CLIENTS_HOME") or Path.home() / "clients").resolve()
KINDS = (DENSE, HYBRID)
MODEL = "tiny"  # what clients call it
SMALL = {"heads": 1, "kv_heads": 1}  # a prompt has 20,000 tokens
LEAST_SHARE = 0.99  # cached, of what was sent or generated before
MOST_RATIO = 1.10  # prefilled / fewest
MOST_WARM_RATIO = 1.02  # from the second request on
MOST_RESTATED = 1.20  # the same where each turn has to say the new value of an id
MOST_FALLBACKS = 0.01  # of all requests

pytestmark = pytest.mark.timeout(290)  # the first test of a client waits for all of its work


# -- the script ------------------------------------------------------------------------------------

FILES = {
    "notes.txt": "Project notes.\nThe code word is falcon.\nDeadline: none.\n",
    "src/app.py": 'def main():\n    print("hello from app")\n\n\nmain()\n',
    "AGENTS.md": "# Lab project\n\nAlways answer briefly. Prefer ls over find.\n",
}
SUMMARY = 'lab output line 1\nline "two" with unicode: é ü 漢字'
GOODBYE = "Hello, that was all."


def turns(shell: str) -> list[tuple[str, list[str]]]:
    """What the user says, and the replies to it; `shell`: the tool that runs a command."""

    def run(command: str) -> str:
        return call(shell, command=command)

    read, write = call("read", path="notes.txt"), call("write", path="out.txt", content=SUMMARY)
    work = [
        reply("The notes come first.\nThen the rest.", "I will read the notes first.", read),
        reply("Now the folder.", "", run("ls -la")),
        reply("Two questions at once.", "", run("wc -l notes.txt src/app.py"), run("cat src/*.py")),
        reply("That is enough for a summary.", "", write),
        reply("All is said.", "Done: the notes mention the falcon.\n\n* `src/app.py` greets."),
    ]
    check = [
        reply("I have to look.", "Checking the output file.", run("cat out.txt"), run("wc -l *")),
        reply("Two.", "The output file has **two** lines."),
    ]
    return [
        ("Read notes.txt, count all lines, look into src, write a summary to out.txt.", work),
        ("Now show out.txt and tell me how many lines it has.", check),
        ("Say goodbye in one short sentence, without tools.", [reply("Short.", GOODBYE)]),
    ]


# -- the clients -----------------------------------------------------------------------------------


@contextmanager
def started(command: list[str], room: Path, env: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process in a group of its own; nothing of the group is left afterwards."""
    with (room / "client.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=room / "work",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number, seconds in ((signal.SIGTERM, 8), (signal.SIGKILL, 8)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Client:
    """An installed client with a room of its own: HOME, and a folder under git to work in."""

    PARTS: tuple[str, ...] = ()  # what has to be installed
    SHELL = "exec"

    def __init__(self, room: Path, urls: dict[str, str]) -> None:
        """`urls`: where each model is served."""
        self.room, self._urls, self._work = room, urls, room / "work"
        for name, text in FILES.items():
            (self._work / name).parent.mkdir(parents=True, exist_ok=True)
            (self._work / name).write_text(text, "utf-8")
        subprocess.run(["git", "init", "-q", "-b", "main", self._work], check=True, timeout=20)
        quiet = "DISABLE_TELEMETRY DO_NOT_TRACK PI_OFFLINE PI_SKIP_VERSION_CHECK"
        quiet += " OPENCLAW_NO_UPDATE_CHECK OPENCLAW_DISABLE_BONJOUR OPENCLAW_SKIP_CHANNELS"
        self._env = {
            "PATH": f"{CLIENTS}/node24/bin:{os.environ['PATH']}",
            "HOME": str(room),
            "NO_PROXY": "127.0.0.1,localhost",
            "PI_TELEMETRY": "0",
            **dict.fromkeys(quiet.split(), "1"),
        }

    @classmethod
    def missing(cls) -> list[str]:
        return [part for part in ("node24", *cls.PARTS) if not (CLIENTS / part).exists()]

    @classmethod
    def how_to_install(cls) -> str:
        parts = " ".join(cls.missing())
        return f"to install: CLIENTS_HOME={CLIENTS} ../shared/clients/install.sh {parts}"

    def _run(self, *command: str, seconds: float = 60) -> None:
        """Wait for a command to succeed."""
        with started(["node", *command], self.room, self._env) as process:
            assert process.wait(seconds) == 0, self.log()

    def log(self) -> str:
        return (self.room / "client.log").read_text("utf-8", "replace")[-2000:]

    def start(self) -> None:
        """Run what has to run between two words of the user."""

    def say(self, kind: str, words: str) -> None:
        """Have the user say this to the model of that kind, in one conversation for each."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing running."""


class Pi(Client):
    PARTS = ("pi",)
    SHELL = "bash"

    def __init__(self, room: Path, urls: dict[str, str]) -> None:
        super().__init__(room, urls)
        model = {"id": MODEL, "name": "Lab", "reasoning": True, "input": ["text"]}
        model |= {"contextWindow": 131072, "maxTokens": 16384, "cost": NO_COST}
        kept = {"api": "openai-completions", "apiKey": "none", "models": [model]}
        providers = {kind: {"baseUrl": url, **kept} for kind, url in urls.items()}
        place = room / ".pi" / "agent" / "models.json"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps({"providers": providers}), "utf-8")
        self._begun: set[str] = set()

    def say(self, kind: str, words: str) -> None:
        go_on = ["-c"] if kind in self._begun else []  # the newest session of this folder
        self._begun.add(kind)
        chosen = ["--provider", kind, "--model", MODEL, "--thinking", "medium"]
        self._run(str(CLIENTS / "pi/node_modules/.bin/pi"), *chosen, "-p", *go_on, words)


NO_COST = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
TOKEN = "lab-token"


class OpenClaw(Client):
    """The gateway, with an agent for each model; the user writes from its web page."""

    PARTS = ("openclaw",)
    HEALTH = "/health"

    def __init__(self, room: Path, urls: dict[str, str]) -> None:
        super().__init__(room, urls)
        self._port = free_port()
        state = room / ".openclaw"
        state.mkdir()
        (state / "openclaw.json").write_text(json.dumps(self._settings()), "utf-8")
        self._env["OPENCLAW_STATE_DIR"] = str(state)
        self._program = str(CLIENTS / self.PARTS[0] / "node_modules/openclaw/openclaw.mjs")
        self._running = ExitStack()

    def start(self) -> None:
        command = ["node", self._program, "gateway", "run", "--port", str(self._port)]
        gateway = started([*command, "--token", TOKEN], self.room, self._env)
        process = self._running.enter_context(gateway)
        wait_until(lambda: self._is_up(process), seconds=90)

    def _settings(self) -> dict[str, Any]:
        model = {"id": MODEL, "name": "Lab", "reasoning": True, "input": ["text"]}
        model |= {"contextWindow": 131072, "maxTokens": 8192, "cost": NO_COST}
        kept = {"api": "openai-completions", "apiKey": "none", "models": [model]}
        providers = {kind: {"baseUrl": url, **kept} for kind, url in self._urls.items()}
        agents = [{"id": kind, "model": f"{kind}/{MODEL}"} for kind in self._urls]
        auth = {"mode": "token", "token": TOKEN}
        defaults = {"workspace": str(self._work), "skipBootstrap": True}
        defaults["model"] = {"primary": agents[0]["model"]}
        for agent in agents:
            agent["workspace"] = str(self._work)
        return {
            "agents": {"defaults": defaults, "list": agents},
            "models": {"mode": "merge", "providers": providers},
            "gateway": {"mode": "local", "port": self._port, "bind": "loopback", "auth": auth},
        }

    def _is_up(self, process: subprocess.Popen) -> bool:
        assert process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{self.HEALTH}", timeout=5):
                return True
        except OSError:
            time.sleep(0.1)
            return False

    def say(self, kind: str, words: str) -> None:
        """Post the words; that the agent answers is seen on the server."""
        sent = {"sessionKey": f"agent:{kind}:main", "message": words}
        sent["idempotencyKey"] = str(uuid.uuid4())
        where = ["--token", TOKEN, "--url", f"ws://127.0.0.1:{self._port}", "--timeout", "50000"]
        told = ["chat.send", *where, "--json", "--params", json.dumps(sent)]
        self._run(self._program, "gateway", "call", *told)

    def close(self) -> None:
        self._running.close()


class OldOpenClaw(OpenClaw):
    PARTS = ("openclaw-2026.2.17",)
    HEALTH = "/"


RESTATES = {"openclaw-2026.2.17"}  # a new message_id with every question
CLIENT_NAMES = {"pi": Pi, "openclaw-2026.9.6": OpenClaw, "openclaw-2026.2.17": OldOpenClaw}


# -- conversations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one client sent to one model, and what the server made of it; one entry per request."""

    client: str
    kind: str
    served: Served
    posted: list[Posted]
    usages: list[Any]
    said: list[Said]
    fed: list[list[Fed]]
    records: list[dict[str, Any]]  # of the session logs
    n_fallbacks: int  # that the server counted

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
        """Rendered with no server code, with every volatile field as it was at first."""
        pairs = zip(self.bodies, meant(self.bodies), strict=True)
        prompts = [self.served.scribe.prompt(messages, body) for body, messages in pairs]
        return [Request(p, one.reply) for p, one in zip(prompts, self.said, strict=True)]

    @property
    def n_fewest(self) -> list[int]:
        return fewest(self.as_meant, None if self.kind == DENSE else self.served.scribe.turns)


CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"
MESSAGE_ID = re.compile(r'(?<="message_id": ")[^"]+')


def meant(bodies: list[dict[str, Any]]) -> list[list[Message]]:
    """Messages with one id in the system prompt, and each carrier where its text was first told."""
    told: dict[str, int] = {}  # carriers, and the messages behind which they were first
    found = []
    for body in bodies:
        messages = [dict(message) for message in body["messages"]]
        if (last := words_of(messages[-1])).startswith(CARRIER):
            messages.pop()
            told.setdefault(last, len(messages) - 1)
        assert not any(words_of(message).startswith(CARRIER) for message in messages)
        for text, at in told.items():
            messages[at]["content"] = f"{words_of(messages[at])}\n\n{text}"
        first = MESSAGE_ID.search(words_of(bodies[0]["messages"][0]))
        system = messages[0] | {"role": "system"}
        if first is not None:
            system["content"] = MESSAGE_ID.sub(first[0], words_of(system))
        found.append([system, *messages[1:]])
    return found


def words_of(message: Message) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def held(client: Client, name: str, kind: str, served: Served) -> Conversation:
    """Have the whole conversation, with a server that knows nothing of those before."""
    served.forget()
    forget_pasts(served.state)
    read_records(served)
    before = served.state.metrics.snapshot()["ledger_seam_fallback"]
    script_of, n_replies = turns(client.SHELL), 0
    replies = [spelled(served.scribe, text) for _, texts in script_of for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        script, tap = Script(patch, served.scribe, replies), Wiretap(patch, served)
        for words, texts in script_of:
            n_replies += len(texts)
            client.say(kind, words)
            wait_until(lambda n=n_replies: len(tap.usages) >= n, seconds=100)
    return Conversation(
        client=name,
        kind=kind,
        served=served,
        posted=tap.posted,
        usages=tap.usages,
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
    logging = {"enable_request_logging": True, "log_prompt_tokens": True, "log_root": logs}
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


@pytest.fixture(scope="module", params=CLIENT_NAMES)
def name(request):
    """A client that is installed."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the clients are installed for Linux")
    if (cls := CLIENT_NAMES[request.param]).missing():
        pytest.skip(cls.how_to_install())
    return request.param


@pytest.fixture(scope="module")
def conversations(name, servers, tmp_path_factory):
    urls = {
        kind: f"http://127.0.0.1:{served.state.config.mlx_port}/v1"
        for kind, served in servers.items()
    }
    client = CLIENT_NAMES[name](tmp_path_factory.mktemp(name), urls)
    try:
        client.start()
        return {kind: held(client, name, kind, served) for kind, served in servers.items()}
    finally:
        client.close()


@pytest.fixture(params=KINDS)
def conversation(conversations, request):
    return conversations[request.param]


# -- what holds for all of them --------------------------------------------------------------------


def test_the_client_did_its_work(conversation):
    """Tools ran, several at once; thinking came back; nothing was asked that no script foresaw."""
    shell = CLIENT_NAMES[conversation.client].SHELL
    replies = [text for _, texts in turns(shell) for text in texts]
    *earlier, last = conversation.bodies
    assert len(earlier) + 1 == len(replies)
    results = [words_of(one) for one in last["messages"] if one["role"] == "tool"]
    assert "falcon" in results[0]
    assert [text.strip() for text in results].count(FILES["src/app.py"].strip()) == 1
    assert SUMMARY in results
    answers = [one for one in last["messages"] if one["role"] == "assistant"]
    assert [len(one.get("tool_calls") or ()) for one in answers] == [1, 1, 2, 1, 0, 2, 0]
    thoughts = [one["reasoning_content"] for one in answers]
    assert all(text.startswith(t) for text, t in zip(replies, thoughts, strict=False))


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
    table.append(row.format(conversation.client, conversation.kind, *facts, *warm))
    assert min(shares) >= LEAST_SHARE, shares
    assert facts[2] <= MOST_RATIO * facts[3]
    most = MOST_RESTATED if conversation.client in RESTATES else MOST_WARM_RATIO
    assert warm[0] <= most * warm[1]
    assert [usage.cached for usage in conversation.usages] == n_cached
    assert [record["cached"] for record in conversation.records] == n_cached


def test_the_log_has_what_the_model_was_given(conversation):
    tokens = [tuple(record["tokens"]) for record in conversation.records]
    assert tokens == [request.prompt for request in conversation.requests]
    assert tokens[0] == conversation.as_meant[0].prompt


def test_no_request_falls_back(conversation, table):
    reasons = Counter(one["fallback"] for one in conversation.records if one["fallback"])
    n, who = len(conversation.records), f"{conversation.client:19} {conversation.kind:8}"
    table.append(f"{who} {reasons.total()} of {n} requests fall back {dict(reasons) or ''}")
    assert reasons.total() == conversation.n_fallbacks
    assert conversation.n_fallbacks <= MOST_FALLBACKS * n


def test_the_last_reply_has_the_logits_of_a_cold_model(conversation):
    """On the tokens that the log reports; the plain model with a fresh cache, no server code."""
    said, tokens = conversation.said[-1], conversation.records[-1]["tokens"]
    assert conversation.usages[-1].cached > 0
    model = load(str(conversation.served.state.engine.model.path))[0]
    cache, given = make_prompt_cache(model), [*tokens, *said.reply[:-1]]
    for at in range(0, len(tokens) - 1, 2048):
        model(mx.array([given[at : min(at + 2048, len(tokens) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    cold = np.array(model(mx.array([given[len(tokens) - 1 :]]), cache=cache)[0])
    assert np.abs(cold - np.array(said.logits)).max() == 0


# -- what the script has no part in ----------------------------------------------------------------

Measured = tuple[list[list[tuple[int, int]]], list[int]]  # (position, token) fed; tokens cached


def replayed(served: Served, bodies: list[dict[str, Any]], script: list[list[int]]) -> Measured:
    """Post them to a server that knows nothing; without a script the model says what it likes."""
    with pytest.MonkeyPatch.context() as patch:
        if script:
            Script(patch, served.scribe, script)
        tap = Wiretap(patch, served)
        for body in bodies:
            post(served, {**body, "max_completion_tokens": 60})
    fed = [
        [(one.at + i, token) for one in calls for i, token in enumerate(one.tokens)]
        for calls in tap.fed
    ]
    return fed, [usage.cached for usage in tap.usages]


def post(served: Served, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.state.config.mlx_port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


@pytest.mark.parametrize("name", ["pi"], indirect=True)
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
