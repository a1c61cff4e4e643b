"""Which server answers, where port 4000 serves several as one model (PROXY_REPLICAS).

litellm_gate.py asks choose() for each request. A conversation stays with a server, since its prefix
is there:

    known   the server that it went to last, while that is up, or is being drained
    new     of those that are up, the one with the fewest conversations of the last ten minutes
    moved   its server is gone, so it is like a new one. It stays where it goes then, when the old
            server is back, too: going back would cost it a second cold prefix (L-166). Who has
            asked nothing meanwhile still belongs to the old one
    none    a request that no later one can be known to follow: the servers take turns

choose() waits for nothing, so that the first six requests of a session, sent at once, go to one
server (L-165). A conversation is known by the session id that its client sends or, without one,
by the first words of its user, which no later request changes (L-167). Which server each has is
in a file, for a proxy that starts again; there are digests, URLs and times in it, no words.
"""

import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import anyio
import httpx

CHECK_EVERY_SECONDS: Final = 2.0
CHECK_SECONDS: Final = 10.0  # for a server to say how it is
MAX_ANSWER_BYTES: Final = 1_048_576  # in which it says that, or what is wrong
BUSY_SECONDS: Final = 600.0  # a conversation that was used since then counts
MAX_CONVERSATIONS: Final = 10_000  # beyond it, the least recently used is forgotten
MAX_PROMPT_LENGTH: Final = 1_000  # of a completion, which grows with each request

# States of a server; of all but the first two, the words say why it gets no request.
UP: Final = "up"
DRAINING: Final = "draining"
STATE_WORDS: Final[Mapping[str, str]] = {
    UP: "is up",
    DRAINING: "is being drained: it takes no new sessions",
    "loading": "still loads its model",
    "error": "has failed: its log says why",
    "down": "does not answer: its sessions go to the others",
    "key_refused": "refuses the key that PROXY_REPLICAS has for it, or lacks one",
    "other_model": "serves another model than this one",
}

# Where a client writes the id of its session; a sub-agent is where its parent is.
SESSION_HEADERS: Final = (
    b"x-parent-session-id",  # opencode
    b"x-claude-code-session-id",
    b"x-session-id",  # opencode
    b"session-id",  # Codex, PI
    b"x-litellm-session-id",
)
SESSION_FIELDS: Final = (
    *("session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key"),
)
# In metadata.user_id of Claude Code: a field of JSON text, in older versions the end.
CLAUDE_SESSION: Final = re.compile(
    r'"session_id"\s*:\s*"([^"]+)"|_session_([0-9a-f-]+)\Z'
)
# What agents add to a user's message, and leave out of it later.
REMINDER: Final = re.compile(r"(?s)<system-reminder>.*?</system-reminder>")


# -- conversations ---------------------------------------------------------------------


def conversation_by_headers(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """A digest of the session id among the headers; "" if there is none."""
    values = dict(headers)
    for name in SESSION_HEADERS:
        if values.get(name):
            return digest_of(values[name].decode("latin-1"))
    return ""


def read_object(payload: bytes) -> Mapping[str, Any]:
    """The fields of a body; none if it is no object of JSON: the server will say so."""
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def conversation_by_body(body: Mapping[str, Any]) -> str:
    """A digest of the session id in a body or, without one, of the user's first words."""
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    values = [
        fields.get(name) for fields in (body, metadata) for name in SESSION_FIELDS
    ]
    if match := CLAUDE_SESSION.search(str(metadata.get("user_id", ""))):
        values.append(match[1] or match[2])
    session_id = next((v for v in values if isinstance(v, str) and v), "")
    words = session_id or find_first_words(body)
    return digest_of(words) if words else ""


def find_first_words(body: Mapping[str, Any]) -> str:
    """The first message of the user, without reminders, in any API's body."""
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])[:MAX_PROMPT_LENGTH]
    messages = body.get("messages") or body.get("input") or body.get("contents")
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list):
        return ""
    for message in messages:
        if isinstance(message, dict) and message.get("role", "user") == "user":
            words = REMINDER.sub("", text_of(message)).strip()
            if words:
                return words
    return ""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; what stands beside it in a part may change (cache_control)."""
    content = message.get("content") or message.get("parts")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def digest_of(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# -- servers ---------------------------------------------------------------------------


@dataclass(slots=True)
class Replica:
    """A server, and how it is."""

    url: str
    key: str  # that is sent to it; "": none
    state: str = UP  # one of STATE_WORDS; it is checked as soon as the proxy runs


@dataclass(slots=True)
class Assignment:
    """Where a conversation is."""

    url: str
    used_at: float  # Unix seconds


@dataclass(slots=True)
class Replicas:
    """The servers, and the conversations that each has. Of one thread: the event loop's."""

    servers: list[Replica]
    client: httpx.AsyncClient
    model_id: str = ""  # that each must serve
    assignments_file: Path | None = None
    report: Callable[[str], None] = lambda _: None  # takes a line for the server's log
    _by_url: dict[str, Replica] = field(init=False)
    _assignments: OrderedDict[str, Assignment] = field(default_factory=OrderedDict)
    _n_turns: int = 0  # that servers took with requests without a conversation
    _is_saved: bool = True
    _reported: str = ""

    def __post_init__(self) -> None:
        self._by_url = {server.url: server for server in self.servers}

    @property
    def are_several(self) -> bool:
        """With one server there is nothing to choose, and nobody checks it."""
        return len(self.servers) > 1

    def choose(
        self, conversation: str, *, without: Collection[str] = ()
    ) -> Replica | None:
        """The server for a request of a conversation; None: no server can take it.

        A conversation "" is one that nobody knows again. `without`: URLs that have
        just failed.
        """
        if not self.are_several:
            return None if without else self.servers[0]
        assignment = self._assignments.get(conversation)
        if assignment is not None and assignment.url not in without:
            server = self._by_url.get(assignment.url)  # None: no more in the settings
            if server is not None and server.state in (UP, DRAINING):
                return self._assign(conversation, server)

        up = [server for server in self.servers if server.state == UP]
        candidates = [server for server in up if server.url not in without]
        if not candidates:
            return None
        if not conversation:
            self._n_turns += 1
            return candidates[self._n_turns % len(candidates)]
        loads = self.count_conversations()
        server = min(candidates, key=lambda server: loads[server.url])
        return self._assign(conversation, server)

    def _assign(self, conversation: str, server: Replica) -> Replica:
        self._is_saved = False
        self._assignments[conversation] = Assignment(server.url, time.time())
        self._assignments.move_to_end(conversation)
        if len(self._assignments) > MAX_CONVERSATIONS:
            self._assignments.popitem(last=False)
        return server

    async def note_refusal(self, server: Replica, conversation: str) -> None:
        """Forget where a conversation was, if the server that refused it is drained.

        A drained server refuses sessions that it does not know, as after a start of its
        own. So the client's next try goes elsewhere.
        """
        await self.check(server)
        if self.are_several and server.state == DRAINING:
            self._assignments.pop(conversation, None)

    def count_conversations(self) -> Counter[str]:
        """How many each server has had in the last minutes, by its URL."""
        since = time.time() - BUSY_SECONDS
        return Counter(
            assignment.url
            for assignment in self._assignments.values()
            if assignment.used_at > since
        )

    def explain(self) -> str:
        """Why none can take a request."""
        states = [f"{s.url} {STATE_WORDS[s.state]}" for s in self.servers]
        return f"no server can take this request now: {'; '.join(states)}"

    # -- how they are ------------------------------------------------------------------

    async def watch(self) -> None:
        """Look after the servers, for ever."""

        async def watch_server(server: Replica) -> None:
            while True:
                await self.check(server)
                self._save()
                await anyio.sleep(CHECK_EVERY_SECONDS)

        self._load()
        async with anyio.create_task_group() as group:
            for server in self.servers:
                group.start_soon(watch_server, server)

    async def check(self, server: Replica) -> None:
        """Ask a server how it is. The only one is not asked: there is no other way."""
        if self.are_several:
            self.note(server, await self._ask(server))

    async def _ask(self, server: Replica) -> str:
        headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
        try:
            with anyio.fail_after(CHECK_SECONDS):
                _, health = await self._get(f"{server.url}/health", {})
                status, models = await self._get(f"{server.url}/v1/models", headers)
            state = json.loads(health)["status"]
            if status in (401, 403):
                return "key_refused"
            if state in ("ok", "asleep"):  # a request wakes it
                names = [model["id"] for model in json.loads(models)["data"]]
                return UP if self.model_id in names else "other_model"
            return state if state in STATE_WORDS else "down"
        except Exception:  # noqa: BLE001  # whatever it answers: who watches goes on
            return "down"

    async def _get(self, url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The status and body of an answer. Raises ValueError: it is too long."""
        payload = b""
        async with self.client.stream("GET", url, headers=headers) as response:
            async for chunk in response.aiter_raw():  # not unpacked: that has no bound
                payload += chunk
                if len(payload) > MAX_ANSWER_BYTES:
                    raise ValueError
        return response.status_code, payload

    def note(self, server: Replica, state: str) -> None:
        """Let this be the state of a server; the log gets a line if it is another.

        The only one stays as it is: there is no other way.
        """
        if not self.are_several:
            return
        if state != server.state:
            server.state = state
            level = "INFO" if state in (UP, DRAINING) else "WARNING"
            self.report(f"{level} {server.url} {STATE_WORDS[state]}")
        loads = self.count_conversations()
        rows = [
            {"url": s.url, "state": s.state, "sessions": loads[s.url]}
            for s in self.servers
        ]
        text = json.dumps(rows)
        if text != self._reported:
            self._reported = text
            self.report(f"REPLICAS {text}")

    # -- the file ----------------------------------------------------------------------

    def _load(self) -> None:
        if self.assignments_file is None:
            return
        with suppress(OSError, ValueError, TypeError, AttributeError):
            rows = json.loads(self.assignments_file.read_text())
            for conversation, (url, used_at) in rows.items():
                assignment = Assignment(str(url), float(used_at))
                self._assignments[conversation] = assignment

    def _save(self) -> None:
        if self.assignments_file is None or self._is_saved:
            return
        self._is_saved = True
        items = self._assignments.items()
        rows = {conversation: (a.url, round(a.used_at)) for conversation, a in items}
        part = self.assignments_file.with_suffix(".part")
        with suppress(OSError):
            part.touch(mode=0o600)
            part.write_text(json.dumps(rows))
            part.replace(self.assignments_file)
