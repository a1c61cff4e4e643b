"""Real coding agents at work on the real server: what they sent before costs nothing.

Claude Code, PI, Codex, Copilot, and OpenClaw through its gateway, run their own loops (files are
read, commands run, several at once) against servers in this process whose model generates what a
script has. All else is real: prompts are rendered, prefilled and cached as ever. What was prefilled
is read from the model's own calls.

The clients are found in CLIENTS_HOME (default: ~/clients), where scripts/tools/clients/install.sh
puts them. Each starts once and talks to a dense and to a hybrid model.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

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
    OpenCode,
    Pi,
    QwenCode,
)
from minimum_prefill import Fed, Request, common_prefix, fewest, prefilled
from scripted_replies import (
    AnsweredRequest,
    PostedRequest,
    Script,
    ScriptedReply,
    Wiretap,
    call,
    encode_reply,
    reply,
)
from server_fixture import (
    MAX_WAIT_SECONDS,
    Message,
    Served,
    forget_pasts,
    free_port,
    wait_until,
)
from tiny_models import DENSE, HYBRID, tiny_model

KINDS = (DENSE, HYBRID)
MODEL = "tiny"  # what clients call it
LAUNCH = Path(__file__).parents[2] / "scripts" / "helpers" / "launch.py"
SMALL = {"heads": 1, "kv_heads": 1}  # a prompt has 20,000 tokens
LEAST_SHARE = 0.99  # cached, of what was sent or generated before
# Of the first request of a new session, where the client worked before.
LEAST_NEW_SHARE = 0.97
MOST_RATIO = 1.10  # prefilled / fewest
MOST_WARM_RATIO = 1.02  # from the second request on
MOST_RESTATED = 1.20  # the same where each turn has to say the new value of an id
MOST_FALLBACKS = 0.01  # of all requests
# The first test of a client waits for all of its work.
# Where clients are installed, 200 s of processor time.
pytestmark = [pytest.mark.timeout(290), pytest.mark.slow]

RESTATES = {"openclaw-2026.2.17"}  # a new message_id with every question
CLIENT_NAMES: dict[str, type[Client]] = {
    "claude-code-2.1.332": ClaudeCode,
    "claude-code-2.1.150": OldClaudeCode,
    "pi": Pi,
    "openclaw-2026.9.6": OpenClaw,
    "openclaw-2026.2.17": OldOpenClaw,
    "codex": Codex,
    "copilot": Copilot,
}
CLAUDES = [name for name, cls in CLIENT_NAMES.items() if issubclass(cls, ClaudeCode)]
WITHOUT_THINKING = {"copilot"}  # it sends none back
# Its sub-agents work in the background; it can also load tools when it wants them.
IN_BACKGROUND = {"claude-code-2.1.332"}

# Clients, and how each reaches a server.
BEHIND_PROXY = ("claude-code-2.1.332", "pi", "openclaw-2026.9.6", "codex")
CASES = [(name, "direct") for name in CLIENT_NAMES if name != "codex"]
CASES += [(name, "proxy") for name in BEHIND_PROXY]


def cases(names: Iterable[str]) -> pytest.MarkDecorator:
    """For some clients only."""
    chosen = [case for case in CASES if case[0] in names]
    return pytest.mark.parametrize("case", chosen, indirect=True, ids="-".join)


# -- the script ------------------------------------------------------------------------------------

SUMMARY = 'lab output line 1\nline "two" with unicode: é ü 漢字'
GOODBYE = "Hello, that was all."


def turns(client: type[Client]) -> list[tuple[str, list[str]]]:
    """The user's messages, and the replies to each, in the tools that this client has."""

    def run(command: str) -> str:
        arguments = {client.COMMAND: command}
        if issubclass(client, Copilot | OpenCode):
            arguments["description"] = command
        return call(client.SHELL, **arguments)

    # the shell, which takes any path
    if issubclass(client, Codex | Copilot | OpenCode):
        read = run("cat notes.txt")
        write = run(f"printf '%s' '{SUMMARY}' > out.txt")
    elif issubclass(client, ClaudeCode):
        read = call("Read", file_path="notes.txt")
        write = call("Write", file_path="out.txt", content=SUMMARY)
    else:
        read = call("read", path="notes.txt")
        write = call("write", path="out.txt", content=SUMMARY)

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
    posted: list[PostedRequest]
    answers: list[AnsweredRequest]
    scripted: list[ScriptedReply]
    fed: list[list[Fed]]
    records: list[dict[str, Any]]  # of the session logs
    n_fallbacks: int  # that the server counted

    @property
    def usages(self) -> list[Any]:
        return [answer.usage for answer in self.answers]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.body for request in self.posted]

    @property
    def requests(self) -> list[Request]:
        return [Request(record.prompt, record.reply) for record in self.scripted]

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

        bodies = self.bodies
        requests = []
        for body, messages, record in zip(
            bodies, meant(bodies), self.scripted, strict=True
        ):
            prompt = self.served.scribe.prompt(messages, body)
            requests.append(Request(prompt, record.reply))
        return requests

    @property
    def n_fewest(self) -> list[int]:
        if self.kind == DENSE:
            return fewest(self.as_meant)
        return fewest(self.as_meant, self.served.scribe.turns)


CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"
MESSAGE_ID = re.compile(r'(?<="message_id": ")[^"]+')


def meant(bodies: list[dict[str, Any]]) -> list[list[Message]]:
    """Messages with one id in the system prompt, and each carrier where it came first."""
    first_id = MESSAGE_ID.search(words_of(bodies[0]["messages"][0]))
    carriers: dict[str, int] = {}  # text -> index of the message it first came after
    conversations = []

    for body in bodies:
        # LiteLLM drops a content that is null.
        messages = [{"content": None, **message} for message in body["messages"]]

        last_text = words_of(messages[-1])
        if last_text.startswith(CARRIER):
            messages.pop()
            carriers.setdefault(last_text, len(messages) - 1)
        assert not any(words_of(message).startswith(CARRIER) for message in messages)
        for text, index in carriers.items():
            messages[index]["content"] = f"{words_of(messages[index])}\n\n{text}"

        dialogue = list(dropwhile(is_system, messages))
        system_messages = messages[: len(messages) - len(dialogue)]
        system = "\n\n".join("\n".join(parts_of(m)) for m in system_messages)
        if first_id is not None:
            system = MESSAGE_ID.sub(first_id[0], system)
        conversations.append([{"role": "system", "content": system}, *dialogue])
    return conversations


def is_system(message: Message) -> bool:
    return message["role"] in {"system", "developer"}


def words_of(message: Message) -> str:
    return "".join(parts_of(message))


def parts_of(message: Message) -> list[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part.get("text", "") for part in content]


def forget(served: Served) -> None:
    """Empty the server's cache, ledger and logs."""
    served.forget()
    forget_pasts(served.state)
    read_records(served)


def held(client: Client, name: str, kind: str, served: Served) -> Conversation:
    """Have the whole conversation, with a server that has forgotten those before."""
    forget(served)
    n_fallbacks_before = count_fallbacks(served)
    client_turns = turns(type(client))
    replies = [
        encode_reply(served.scribe, text) for _, texts in client_turns for text in texts
    ]

    with pytest.MonkeyPatch.context() as patch:
        script = Script(patch, served.scribe, {"": replies})
        tap = Wiretap(patch, served)
        n_replies = 0
        for user_text, texts in client_turns:
            n_replies += len(texts)
            client.say(kind, user_text)
            wait_until(lambda n=n_replies: len(tap.told) >= n)

    return Conversation(
        client=name,
        kind=kind,
        served=served,
        posted=tap.posted,
        answers=tap.told,
        scripted=script.said,
        fed=tap.fed,
        records=read_records(served),
        n_fallbacks=count_fallbacks(served) - n_fallbacks_before,
    )


def count_fallbacks(served: Served) -> int:
    return served.state.metrics.snapshot()["ledger_seam_fallback"]


def read_records(served: Served) -> list[dict[str, Any]]:
    """The lines of the session logs, which are gone then."""
    records = []
    for path in Path(served.state.config.log_root).rglob("*.log"):
        records += map(json.loads, path.read_text("utf-8").splitlines())
        path.unlink()
    return sorted(records, key=lambda record: record["time"])


def serve(kind: str, root: Path) -> Served:
    """Greedy where the client leaves it open; the logs carry the exact tokens."""
    return Served(
        tiny_model(kind, root, **SMALL),
        default_temperature=0,
        enable_request_logging=True,
        log_prompt_tokens=True,
        log_root=str(root / f"logs-{uuid.uuid4().hex}"),
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    with serve(DENSE, root) as dense, serve(HYBRID, root) as hybrid:
        yield {DENSE: dense, HYBRID: hybrid}


def urls_of(servers: dict[str, Served]) -> dict[str, str]:
    """Where clients find each server, without /v1."""
    return {
        kind: f"http://127.0.0.1:{served.state.config.mlx_port}"
        for kind, served in servers.items()
    }


@contextmanager
def proxied(served: Served) -> Iterator[str]:
    """The same through a LiteLLM of its own."""
    config = served.state.config
    proxy_settings = {
        "enable_proxy": True,
        "proxy_port": free_port(),
        "log_root": f"{config.log_root}-proxy",
    }
    config = config.model_copy(update=proxy_settings)

    loaded = served.state.engine.model
    entry = {"id": loaded.model_id, "context_length": loaded.max_context_tokens}
    with s.run_proxy(config, entry, s.Proxy(config)):
        yield f"http://127.0.0.1:{config.proxy_port}"


def is_answering(url: str) -> bool:
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
            wait_until(lambda url=url: is_answering(url))
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
    _, route = case
    if route == "direct":
        return urls_of(servers)
    return request.getfixturevalue("proxies")


def skip_if_missing(name: str) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("the clients are installed for Linux")
    if CLIENT_NAMES[name].missing():
        pytest.skip("needs clients: scripts/tools/clients/install.sh, CLIENTS_HOME")


@contextmanager
def running(name: str, urls: dict[str, str], folder: Path) -> Iterator[Client]:
    client = CLIENT_NAMES[name](folder, urls, model=MODEL)
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
    """What tools returned; Codex puts the time before it, Copilot an exit status after it."""
    results = []
    for message in body["messages"]:
        if message["role"] == "tool":
            _, _, text = words_of(message).rpartition("\nOutput:\n")
            result, _, _ = text.partition("\n<shellId: ")
            results.append(result)

    for message in body["messages"]:
        blocks = blocks_of(message)
        results += [words_of(b) for b in blocks if b["type"] == "tool_result"]
    return results


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """Its content blocks; none where the content is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def answers_of(body: dict[str, Any]) -> list[tuple[str, int]]:
    """(reasoning, number of calls) of each reply that the client sends back."""
    answers = []
    for message in body["messages"]:
        if message["role"] != "assistant":
            continue
        reasoning = message.get("reasoning_content") or ""
        n_calls = len(message.get("tool_calls") or ())

        for block in blocks_of(message):
            if block["type"] == "thinking" and not message.get("reasoning_content"):
                reasoning += block["thinking"]
            if block["type"] == "tool_use":
                n_calls += 1
        answers.append((reasoning, n_calls))
    return answers


def test_the_client_did_its_work(conversation):
    """Tools ran, several at once; thinking came back; nothing was asked that no script foresaw."""
    client_turns = turns(CLIENT_NAMES[conversation.client])
    replies = [text for _, texts in client_turns for text in texts]
    bodies = conversation.bodies
    assert len(bodies) == len(replies)

    results = results_of(bodies[-1])
    assert "falcon" in results[0]
    assert [text.strip() for text in results].count(FILES["src/app.py"].strip()) == 1
    assert SUMMARY in results

    answers = answers_of(bodies[-1])
    assert [n_calls for _, n_calls in answers] == [1, 1, 2, 1, 0, 2, 0]
    for text, (reasoning, _) in zip(replies, answers, strict=False):
        if conversation.client in WITHOUT_THINKING:
            assert not reasoning
        else:
            assert reasoning and text.startswith(reasoning)


def test_what_was_sent_or_generated_before_is_cached(conversation, table):
    requests = conversation.requests
    n_prefilled = conversation.n_prefilled
    n_cached = [len(r.prompt) - n for r, n in zip(requests, n_prefilled, strict=True)]

    shares = []
    for index, request in enumerate(requests[1:], 1):
        earlier = [np.array(r.prompt + r.reply) for r in requests[:index]]
        n_common = max(common_prefix(request.wanted, tokens) for tokens in earlier)
        # No client takes back what it sent, so all of it, and not only what looks the same now.
        shares.append(n_cached[index] / max(n_common, len(earlier[-1])))

    n_fewest = conversation.n_fewest
    total = sum(n_prefilled)
    minimum = sum(n_fewest)
    warm_total = sum(n_prefilled[1:])
    warm_minimum = sum(n_fewest[1:])
    table(
        f"{conversation.client:19} {conversation.kind:8} {len(requests)} requests"
        f"  cached {min(shares):.4f}  prefilled {total} / {minimum},"
        f" from the second on {warm_total} / {warm_minimum}"
    )
    assert min(shares) >= LEAST_SHARE, shares
    assert total <= MOST_RATIO * minimum
    is_restated = conversation.client in RESTATES
    max_ratio = MOST_RESTATED if is_restated else MOST_WARM_RATIO
    assert warm_total <= max_ratio * warm_minimum
    assert [usage.cached_tokens for usage in conversation.usages] == n_cached
    assert [record["cached"] for record in conversation.records] == n_cached


def test_the_log_has_what_the_model_was_given(conversation):
    tokens = [tuple(record["tokens"]) for record in conversation.records]
    assert tokens == [request.prompt for request in conversation.requests]
    assert tokens[0] == conversation.as_meant[0].prompt


def test_no_request_falls_back(conversation, table):
    records = conversation.records
    reasons = Counter(r["fallback"] for r in records if r["fallback"])
    n_fallbacks = reasons.total()
    table(
        f"{conversation.client:19} {conversation.kind:8} {n_fallbacks} of"
        f" {len(records)} requests fall back {dict(reasons) or ''}"
    )
    assert n_fallbacks == conversation.n_fallbacks
    assert n_fallbacks <= MOST_FALLBACKS * len(records)


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
        words: [encode_reply(served.scribe, text) for text in scene]
        for words, scene in texts.items()
    }


Talks = dict[
    str, list[AnsweredRequest]
]  # opening words -> answers, in the order they ended


def visited(client: Client, name: str, kind: str, served: Served) -> Talks:
    """A second session where the client worked before, with a server that has that cached."""
    scenes = scenes_of(name, served=served)
    with pytest.MonkeyPatch.context() as patch:
        script = Script(patch, served.scribe, scenes)
        tap = Wiretap(patch, served)
        client.say(kind, DELEGATE, new=True)
        if name in IN_BACKGROUND:
            client.say(kind, LOAD)

    talks: Talks = {words: [] for words in scenes}
    for answer in tap.told:
        talks[script.opening(answer.prompt)].append(answer)
    for words, scene in scenes.items():
        assert [list(answer.reply) for answer in talks[words]] == scene
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
    n_tokens = len(first.prompt)
    share = first.usage.cached_tokens / n_tokens
    table(f"{name:19} new session: {share:.4f} of {n_tokens} tokens are cached")
    assert share >= LEAST_NEW_SHARE


@cases(CLAUDES)
def test_a_sub_agent_and_loaded_tools_cost_the_main_thread_nothing(visit, name, table):
    for words, talk in visit.items():
        shares = [
            answer.usage.cached_tokens / len(previous.tokens)
            for previous, answer in pairwise(talk)
        ]
        table(
            f"{name:19} {words[:16]}... {len(talk)} requests  cached {min(shares):.4f}"
        )
        assert min(shares) >= LEAST_SHARE, shares


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_of_qwen_code_is_resumed_though_the_folder_has_changed(
    request, kind, tmp_path, monkeypatch, table
):
    """why(L-103): a new process, so git and the folder are looked at again."""
    monkeypatch.setitem(CLIENT_NAMES, "qwen-code", QwenCode)
    skip_if_missing("qwen-code")
    all_servers = request.getfixturevalue("servers")
    served = all_servers[kind]
    forget(served)
    make_file = call(QwenCode.SHELL, command="seq 9 > out.txt; git add out.txt")
    count_lines = call(QwenCode.SHELL, command="wc -l out.txt")
    replies = [
        reply("I make it.", "", make_file),
        reply("It is there.", "I made out.txt."),
        reply("I look.", "", count_lines),
        reply("Nine.", "It has nine lines."),
    ]
    scene = [encode_reply(served.scribe, text) for text in replies]
    Script(monkeypatch, served.scribe, {"": scene})
    tap = Wiretap(monkeypatch, served)

    with running("qwen-code", urls_of(all_servers), tmp_path) as client:
        client.say(kind, "Make out.txt.")
        client.say(kind, "How many lines has it?")

    for previous, answer in pairwise(tap.told):
        n_cached = answer.usage.cached_tokens
        n_before = len(previous.tokens)
        table(f"qwen-code {kind}: cached {n_cached} of {n_before}")
        assert n_cached / n_before >= LEAST_SHARE
    assert len(tap.told) == 4


LAB_SERVER = """
import json, sys

SCHEMA = {"type": "object", "properties": {"project": {"type": "string"}}, "required": ["project"]}
TOOL = {"name": "code_word", "description": "Says a project's word.", "inputSchema": SCHEMA}
for line in sys.stdin:
    message = json.loads(line)
    params = message.get("params", {})
    results = {
        "initialize": {
            "protocolVersion": params.get("protocolVersion"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "lab", "version": "1"},
        },
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "The word is falcon."}]},
    }
    if "id" in message:
        result = results.get(message["method"], {})
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        print(json.dumps(answer), flush=True)
"""
PATCH = """\
*** Begin Patch
*** Update File: src/app.py
@@ def main():
-    print("hello from app")
+    print("hello from falcon")
*** Add File: docs/word.md
+The word is falcon.
*** End Patch
"""
AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')


def launch_codex(
    codex: Codex, url: str, words: str
) -> subprocess.CompletedProcess[str]:
    """Let the user say this, as `launch codex` starts it, with an MCP server called lab."""
    lab_server = codex.room / "lab.py"
    lab_server.write_text(LAB_SERVER, "utf-8")
    settings = {"command": sys.executable, "args": [str(lab_server)]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    home = codex.room / "codex-home"
    home.mkdir()
    (home / "config.toml").write_text("\n".join(["[mcp_servers.lab]", *lines]), "utf-8")

    program = Path(codex._command(DENSE, words)[0])
    path = f"{program.parent}:{codex._env['PATH']}"
    free = ["exec", "--dangerously-bypass-approvals-and-sandbox", words]
    return subprocess.run(
        [sys.executable, str(LAUNCH), "codex", "--url", url, "--", *free],
        env={**codex._env, "PATH": path, "CODEX_HOME": str(home)},
        cwd=codex.folder(DENSE),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=MAX_WAIT_SECONDS,
    )


def patching_scenes(served: Served, words: str) -> dict[str, list[Any]]:
    """Replies that call the MCP server, patch two files, and have a sub-agent count."""

    def encode(thought: str, text: str = "", *calls: str) -> list[int]:
        return encode_reply(served.scribe, reply(thought, text, *calls))

    def wait_for_agent(prompt: str) -> list[int]:
        targets = json.dumps(AGENT_ID.findall(prompt)[-1:])
        return encode(
            "I wait.", "", call("multi_agent_v1__wait_agent", targets=targets)
        )

    main = [
        encode("Ask.", "", call("mcp__lab__code_word", project="lab")),
        encode("Now the files.", "I edit.", call("apply_patch", content=PATCH)),
        encode("Count.", "", call("multi_agent_v1__spawn_agent", message=COUNT)),
        wait_for_agent,
        encode("That is all.", GOODBYE),
    ]
    count = call(Codex.SHELL, cmd="ls | wc -l")
    return {
        words: main,
        COUNT: [encode("I count.", "", count), encode("Four.", "There are 4.")],
    }


def test_codex_patches_files_calls_an_mcp_server_and_has_a_sub_agent(
    servers, proxies, tmp_path, table
):
    """All of it goes through LiteLLM; a model that it does not know has no apply_patch."""
    skip_if_missing("codex")
    served = servers[DENSE]
    forget(served)
    codex = Codex(tmp_path, {DENSE: proxies[DENSE]}, model=MODEL)
    words = "Write the lab's word into the greeting."
    scenes = patching_scenes(served, words)

    with pytest.MonkeyPatch.context() as patch:
        script = Script(patch, served.scribe, scenes)
        tap = Wiretap(patch, served)
        result = launch_codex(codex, proxies[DENSE], words)

    assert result.returncode == 0, result.stderr
    assert GOODBYE in result.stdout and "metadata" not in result.stderr
    folder = codex.folder(DENSE)
    assert (folder / "docs/word.md").read_text("utf-8") == "The word is falcon.\n"
    assert "hello from falcon" in (folder / "src/app.py").read_text("utf-8")
    opened = Counter(script.opening(answer.prompt) for answer in tap.told)
    assert opened == {words: len(scenes[words]), COUNT: len(scenes[COUNT])}
    last_prompt = served.scribe.text(tap.told[-1].prompt)
    assert "The word is falcon." in last_prompt and "There are 4." in last_prompt

    n_fewest = sum(fewest([Request(said.prompt, said.reply) for said in script.said]))
    n_prefilled = sum(len(t.prompt) - t.usage.cached_tokens for t in tap.told)
    table(f"codex, launched       prefilled {n_prefilled} / {n_fewest}")
    assert n_prefilled <= MOST_WARM_RATIO * n_fewest
