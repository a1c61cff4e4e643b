"""Time the steps of agents on any server with OpenAI's or Anthropic's API, or on two in turns.

    python3 scripts/agent_steps.py --url http://127.0.0.1:8080
    python3 scripts/agent_steps.py --url http://127.0.0.1:8080 --against http://127.0.0.1:11434
    python3 scripts/agent_steps.py --url http://127.0.0.1:8080 --api anthropic --agents claude-code

An agent sends its whole conversation again at each step, so what people wait for is the time of a
step, not tokens a second of a first prompt. No server says it. This program sends what agents send,
with random words, and needs nothing but Python 3.9. Both servers should have the same model: then
their replies are alike, and so is the work.

WHAT IT DOES TO A SERVER  it asks some 50 requests, one after the other, the longest of --tokens and
what replies and results add. Their KV pushes out what the server has cached. Nothing is deleted.

THE AGENTS    what each sends, as their requests were recorded
    pi            its conversation, unchanged; in the end one result of the past is edited
    claude-code   beside it a request for a title, a sub-agent with another head, a reminder in the
                  newest message that is gone from the next request
    codex         a date before the task, results that begin with an id and a time; in the end a
                  compaction: the history without tools, then a new, short one
    openclaw      a minute before each question, call ids without "_", arguments written anew, a
                  last message in each request that is gone from the next one

WHAT IS PRINTED  by agent: seconds of a step (median, worst) from the request to its last byte;
seconds to the first token, also by length of the prompt; tokens that the server says it read
("not said": it counts no cached tokens), and the fewest that it had to, about: what no earlier
request had; where a last message is gone from the next request, also the reply that followed it.
A server reads less than that where a template writes the tools last: other tools after the same
system prompt. Tokens a second after the first one.

EXIT STATUS  0 measured, 2 a server could not be asked, 130 stopped by Ctrl-C
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Body = dict[str, Any]
Messages = list[Body]

CHARS_PER_TOKEN = 4.5  # of the words below: the length of a prompt is only about right
LENGTHS = (4_000, 16_000, 64_000, 1_000_000)  # of prompts, in the table
TIMEOUT_SECONDS = 1800.0  # without a byte: a long prompt on a slow machine
WORDS = (
    "the file reads a list of rows from disk and writes each value into its own table while "
    "another thread waits for new work in a queue that holds every open task of this service "
    "until some client asks again with more than one key so that a cache can answer it early"
)


class CannotAsk(Exception):
    """A sentence for people: what a server answered, or why it did not."""


# -- a request and its reply -----------------------------------------------------------


@dataclass
class Request:
    """What an agent sends, in the form of OpenAI's chats."""

    messages: Messages
    tools: list[Body]
    # The conversation without what changes by itself, and how many of its messages the
    # next request repeats as they are sent here.
    plain: Messages
    n_lasting: int
    kind: str = "step"  # "first", "step", "edit", "title", "sub-agent", "compaction"


@dataclass
class Step:
    """A request that was answered. Times are seconds; None: the server does not say."""

    agent: str
    kind: str
    seconds: float
    first_token: float
    prompt_tokens: int
    read_tokens: int | None
    fewest_tokens: int
    reply_tokens: int


@dataclass
class Reply:
    """What the events of a reply have said so far, by either API."""

    id: str = ""
    content: str = ""
    reasoning: str = ""
    reasoning_field: str = "reasoning_content"  # the name that it came under
    calls: list[Body] = field(default_factory=list)  # with the arguments as they came
    finish_reason: str = ""
    n_prompt: int = 0  # tokens
    n_cached: int | None = None  # of them; None: the server does not say
    n_out: int = 0
    ttft_seconds: float = 0.0  # 0: the reply is empty
    seconds: float = 0.0

    @property
    def first_seconds(self) -> float:
        """Until its first part; of an empty one until its end."""
        return self.ttft_seconds or self.seconds

    def hear(self, event: Body, *, seconds: float = 0.0) -> bool:
        """Add an event; whether it has a part of the reply. `seconds`: until it came."""
        self.seconds = seconds
        self.id = event.get("id") or self.id
        self._count(event)
        parts = [self._add_block(event)]
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            parts.append(self._add_delta(choice.get("delta") or {}))
        if any(parts) and not self.ttft_seconds:
            self.ttft_seconds = seconds
        return any(parts)

    def _count(self, event: Body) -> None:
        usage = (event.get("message") or event).get("usage") or {}
        if "input_tokens" in usage:  # Anthropic's, without those that were cached
            self.n_cached = usage.get("cache_read_input_tokens")
            n_written = usage.get("cache_creation_input_tokens") or 0
            self.n_prompt = usage["input_tokens"] + (self.n_cached or 0) + n_written
        elif "prompt_tokens" in usage:
            self.n_prompt = usage["prompt_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.n_cached = details.get("cached_tokens")
        n_out = usage.get("output_tokens") or usage.get("completion_tokens")
        self.n_out = n_out or self.n_out

    def _add_block(self, event: Body) -> bool:
        """A part of a block of Anthropic's API."""
        block = event.get("content_block") or {}
        delta = event.get("delta") or {}
        self.content += delta.get("text") or ""
        self.reasoning += delta.get("thinking") or ""
        if block.get("type") == "tool_use":
            self._add_call(block["id"], block["name"])
        if "partial_json" in delta:
            self.calls[-1]["function"]["arguments"] += delta["partial_json"]
        has_text = bool(delta.get("text") or delta.get("thinking"))
        return has_text or block.get("type") == "tool_use"

    def _add_delta(self, delta: Body) -> bool:
        """A part of a message of OpenAI's API."""
        for name in ("reasoning_content", "reasoning"):
            if delta.get(name):
                self.reasoning_field = name
                self.reasoning += delta[name]
                break
        self.content += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            function = piece.get("function") or {}
            # It opens a call or continues that of its index, or (no index) the last one.
            index = piece.get("index")
            if index is None:
                index = len(self.calls) - (not piece.get("id"))
            if index >= len(self.calls):
                self._add_call(piece.get("id"), function.get("name") or "")
            arguments = function.get("arguments") or ""
            self.calls[index]["function"]["arguments"] += arguments
        names = ("content", "reasoning_content", "reasoning", "tool_calls")
        return any(delta.get(name) for name in names)

    def _add_call(self, call_id: str | None, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call = {"id": call_id or f"call_{len(self.calls)}", "type": "function"}
        self.calls.append({**call, "function": function})

    def echo(self) -> Body | None:
        """As PI sends it back; None: it has neither words nor calls, and PI drops it.

        Arguments are parsed and written anew: an empty object for what is no JSON.
        """
        content = self.content if self.content.strip() else None
        if content is None and not self.calls:
            return None
        message: Body = {"role": "assistant", "content": content}
        if self.reasoning.strip():
            message[self.reasoning_field] = self.reasoning
        if self.calls:
            message["tool_calls"] = []
        for call in self.calls:
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                arguments = {}
            text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
            function = {**call["function"], "arguments": text}
            message["tool_calls"].append({**call, "function": function})
        return message


class Server:
    """One server that is asked, by one of two APIs."""

    def __init__(
        self,
        url: str,
        *,
        api: str = "openai",
        model: str = "",
        key: str = "unused",
        seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Without a model it is the first that it has; `seconds`: see TIMEOUT_SECONDS."""
        plain_url = url.rstrip("/").removesuffix("/v1")
        self.url = plain_url if "://" in plain_url else f"http://{plain_url}"
        self._is_anthropic = api == "anthropic"
        self.headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
            "x-api-key": key,
            "anthropic-version": "2023-06-01",
        }
        self._seconds = seconds
        # No proxies: a server on this machine or in this house is asked.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            self.model = model or str(self.get("/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            sentence = f"{self.url}/v1/models names no model: say which with --model"
            raise CannotAsk(sentence) from error

    def open(
        self, path: str, body: Body | None = None, *, method: str | None = None
    ) -> Any:
        """The response to a GET, or with a body to a POST. Raises CannotAsk."""
        url = self.url + path
        payload = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(url, payload, self.headers, method=method)
            return self._opener.open(request, timeout=self._seconds)
        except urllib.error.HTTPError as error:
            words = words_of(error.read(100_000).decode(errors="replace"))
            raise CannotAsk(f"{url} answers {error.code}: {words}") from error
        except (ValueError, http.client.InvalidURL) as error:
            raise CannotAsk(f"{url}, or its key, cannot be used: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CannotAsk(f"{self.url} does not answer: {reason}") from error

    def get(self, path: str) -> Any:
        """The JSON that is there. Raises CannotAsk."""
        with self.open(path) as response:
            try:
                return json.load(response)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise CannotAsk(f"{self.url}{path} is no JSON: {error}") from error

    def events(self, path: str, body: Body) -> Iterator[tuple[float, Body]]:
        """The events of a reply, each with the seconds until it came. Raises CannotAsk."""
        began = time.monotonic()
        with self.open(path, body) as response:
            try:
                for event in read_events(response):
                    if "error" in event:
                        words = words_of(json.dumps(event))
                        raise CannotAsk(f"{self.url}{path} answers: {words}")
                    yield time.monotonic() - began, event
            except (OSError, http.client.HTTPException, ValueError) as error:
                sentence = f"{self.url}{path} ends in mid-reply: {error}"
                raise CannotAsk(sentence) from error

    def stream(self, path: str, body: Body) -> Reply:
        """Ask for a reply and read it to its end. Raises CannotAsk."""
        reply = Reply()
        for seconds, event in self.events(path, {"model": self.model, **body}):
            reply.hear(event, seconds=seconds)
        if not reply.n_prompt:
            raise CannotAsk(f"{self.url}{path} counts no tokens of the prompt")
        return reply

    def ask(self, request: Request, *, max_tokens: int, session: str) -> Reply:
        """The reply to an agent's request. Raises CannotAsk."""
        limits = {"max_tokens": max_tokens, "temperature": 0}
        if self._is_anthropic:
            body = {**to_anthropic(request, session), **limits, "stream": True}
            return self.stream("/v1/messages", body)
        body = {
            "messages": request.messages,
            # Servers that do not know it pass over it.
            "chat_template_kwargs": {"enable_thinking": False},
            **limits,
        }
        if request.tools:
            body["tools"] = request.tools
        return self.ask_chat(body)

    def ask_chat(self, body: Body) -> Reply:
        """The reply to a chat by OpenAI's API. Raises CannotAsk."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return self.stream("/v1/chat/completions", {**body, **options})


def words_of(body: str) -> str:
    """The sentence in the body of an error; without one its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:500]


def read_events(lines: Iterable[bytes]) -> Iterator[Body]:
    """The data of server-sent events, one JSON object each. Raises ValueError."""
    for line in lines:
        name, _, data = line.decode().strip().partition(":")
        if name == "data" and data.strip() != "[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def to_anthropic(request: Request, session: str) -> Body:
    """A body of /v1/messages."""
    system = [{"type": "text", "text": request.messages[0]["content"]}]
    messages: Messages = []
    for message in request.messages[1:]:
        role = "assistant" if message["role"] == "assistant" else "user"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += to_blocks(message)
        else:
            messages.append({"role": role, "content": to_blocks(message)})
    body: Body = {
        "system": system,
        "messages": messages,
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": json.dumps({"session_id": session})},
    }
    if request.tools:
        functions = [tool["function"] for tool in request.tools]
        body["tools"] = [
            {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
            for function in functions
        ]
    return body


def to_blocks(message: Body) -> Messages:
    """The content blocks of a message."""
    if message["role"] == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": message["content"],
        }
        return [result]
    blocks: Messages = []
    if (message["content"] or "").strip():
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**use, "input": json.loads(function["arguments"])})
    return blocks


# -- agents ----------------------------------------------------------------------------


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def system(text: str) -> Body:
    return {"role": "system", "content": text}


def make_words(rng: random.Random, n_chars: float) -> str:
    """Random words of about so many characters, in lines."""
    known = WORDS.split()
    words = rng.choices(known, k=max(1, int(n_chars * len(known) / len(WORDS))))
    return "\n".join(" ".join(words[i : i + 12]) for i in range(0, len(words), 12))


def tool(
    name: str, description: str, *, n_optional: int = 0, **properties: Body
) -> Body:
    """A tool by the schemas of its parameters; the last `n_optional` may be left out."""
    required = list(properties)[: len(properties) - n_optional]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


# A request beside the conversation, and who hears its reply.
Beside = tuple[Request, Callable[[Reply], None]]


class Agent:
    """An agent with a conversation that only grows; subclasses send it as others do."""

    name = "pi"
    tool_names: tuple[str, ...] = ("read", "bash", "edit", "write")

    def __init__(self, *, head_tokens: int, result_tokens: int, seed: str) -> None:
        self._random = random.Random(f"{self.name} {seed}")
        self._result_tokens = result_tokens
        self.session = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        self.tools: list[Body] = []
        for name in self.tool_names:  # each in some 60 tokens
            parameter = "command" if name in ("bash", "exec_command") else "path"
            about = {"type": "string", "description": self.words(12)}
            properties: Body = {parameter: about}
            self.tools.append(tool(name, self.words(40), **properties))
        # No other session begins with these words, so each is cold at first.
        head = f"You are a coding agent, session {self.session}.\n"
        self.messages = [system(head + self.words(head_tokens)), self.question()]
        self.n_sent = 0

    def words(self, n_tokens: int) -> str:
        return make_words(self._random, n_tokens * CHARS_PER_TOKEN)

    def question(self) -> Body:
        return user(f"Go on with this: {self.words(40)}")

    def request(self, kind: str = "step") -> Request:
        """The next request; sent() says how this agent writes its conversation."""
        self.n_sent += 1
        if self.n_sent == 1 and kind == "step":
            kind = "first"
        plain = list(self.messages)
        return Request(self.sent(), self.tools, plain, self.n_lasting(), kind)

    def sent(self) -> Messages:
        return list(self.messages)

    def n_lasting(self) -> int:
        return len(self.messages)

    def hear(self, reply: Reply) -> None:
        """Take the reply into the conversation, with results or the next question."""
        self.messages.append(reply_message(reply))
        for call in reply.calls:
            result = {"role": "tool", "tool_call_id": call["id"]}
            self.messages.append({**result, "content": self.result()})
        if not reply.calls:
            self.messages.append(self.next_question())

    def next_question(self) -> Body:
        """What a tool would have shown, whatever the model has written."""
        return user(f"It prints:\n{self.result()}\nGo on.")

    def result(self) -> str:
        return self.words(self._result_tokens)

    def side_requests(self, step: int) -> Iterator[Beside]:  # noqa: ARG002
        """What it asks beside its conversation before this step."""
        return iter(())

    def last_requests(self) -> Iterator[Beside]:
        """What it asks after the last step."""
        return iter(())


def reply_message(reply: Reply) -> Body:
    """The reply in the conversation; "Done." in the place of nothing."""
    return reply.echo() or {"role": "assistant", "content": "Done."}


class Pi(Agent):
    def last_requests(self) -> Iterator[Beside]:
        """A result in the middle of the past is another one, twice."""
        for _ in range(2):
            roles = ("tool", "user")
            places = [i for i, m in enumerate(self.messages) if m["role"] in roles]
            place = places[len(places) // 2]
            changed = {**self.messages[place], "content": self.result()}
            self.messages[place] = changed
            yield self.request("edit"), self.hear


class ClaudeCode(Agent):
    name = "claude-code"
    tool_names = ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "Skill", "Write")

    def sent(self) -> Messages:
        """The newest message of every second request carries a reminder."""
        messages = list(self.messages)
        if self.n_sent % 2:
            reminder = "<system-reminder>\nThe todo list is empty.\n</system-reminder>"
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}\n\n{reminder}"}
        return messages

    def n_lasting(self) -> int:
        return len(self.messages) - self.n_sent % 2

    def side_requests(self, step: int) -> Iterator[Beside]:
        if step == 0:
            head = system("Write a title of three to seven words for this session.")
            messages = [head, self.messages[1]]
            yield Request(messages, [], messages, 2, "title"), lambda _: None
        if step == 3:
            helper = SubAgent(head_tokens=600, result_tokens=200, seed=self.session)
            for _ in range(3):
                yield helper.request("sub-agent"), helper.hear


class SubAgent(Agent):
    name = "sub-agent"
    tool_names = ("Bash", "Glob", "Grep", "Read")


class Codex(Agent):
    name = "codex"
    tool_names = ("exec_command", "write_stdin", "update_plan", "apply_patch")

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        date = "<environment_context>\n<current_date>2026-11-20</current_date>\n"
        self.messages.insert(1, user(f"{date}</environment_context>"))

    def result(self) -> str:
        number = self._random.getrandbits(24)
        return f"Chunk ID: {number:06x}\nWall time: 0.05 seconds\n{super().result()}"

    def last_requests(self) -> Iterator[Beside]:
        """A compaction: all of the past without tools, then a new beginning."""
        asked = user("CONTEXT CHECKPOINT COMPACTION: write a summary to go on from.")
        messages = [*self.messages, asked]
        request = Request(messages, [], messages, len(messages), "compaction")
        yield request, lambda _: None
        self.messages = [*self.messages[:2], user(f"Summary: {self.words(150)}")]
        yield self.request("compaction"), self.hear


class OpenClaw(Agent):
    name = "openclaw"
    tool_names = ("exec", "edit", "message", "process", "read", "session_status")

    def sent(self) -> Messages:
        """As it echoes its past, and the context of this moment at the end."""
        carrier = (
            "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: none\n"
            f"Active Subagents: {self.n_sent % 2}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
        )
        messages: Messages = []
        for number, kept in enumerate(self.messages):
            message = {k: v for k, v in kept.items() if not k.startswith("reasoning")}
            if message["role"] == "user":
                minute = f"[Fri 2026-11-20 08:{number % 60:02d} UTC]"
                message["content"] = f"{minute} {message['content']}"
            if "tool_call_id" in message:
                message["tool_call_id"] = message["tool_call_id"].replace("_", "")
            if "tool_calls" in message:
                calls = message["tool_calls"]
                message["tool_calls"] = [
                    {**call, "id": call["id"].replace("_", "")} for call in calls
                ]
            messages.append(message)
        return [*messages, user(carrier)]


AGENTS: dict[str, Callable[..., Agent]] = {
    agent.name: agent for agent in (Pi, ClaudeCode, Codex, OpenClaw)
}


# -- measuring -------------------------------------------------------------------------


class Bench:
    """Asks one server, and notes each step."""

    def __init__(self, server: Server, *, max_tokens: int) -> None:
        self.server = server
        self.steps: list[Step] = []
        self._max_tokens = max_tokens
        # What was sent, in the plain form, with its tools: how many tokens it had.
        self._known: list[tuple[Messages, list[Body], int]] = []

    def ask_all(self, agent: Agent, requests: Iterator[Beside]) -> None:
        """What an agent asks beside its conversation."""
        for request, hear in requests:
            hear(self.ask(agent, request))

    def ask(self, agent: Agent, request: Request) -> Reply:
        """Ask, and note the step. Raises CannotAsk."""
        reply = self.server.ask(
            request, max_tokens=self._max_tokens, session=agent.session
        )
        known = [
            n_tokens
            for messages, tools, n_tokens in self._known
            if tools == request.tools and messages == request.plain[: len(messages)]
        ]
        n_tokens = reply.n_prompt
        step = Step(
            agent=agent.name,
            kind=request.kind,
            seconds=reply.seconds,
            first_token=reply.first_seconds,
            prompt_tokens=n_tokens,
            read_tokens=None if reply.n_cached is None else n_tokens - reply.n_cached,
            fewest_tokens=max(1, n_tokens - max(known, default=0)),
            reply_tokens=reply.n_out,
        )
        self.steps.append(step)
        lasting = request.plain[: request.n_lasting]
        n_tail = len(json.dumps(request.messages[request.n_lasting :]))
        n_all = len(json.dumps([request.tools, request.messages]))
        if request.n_lasting < len(request.messages):  # its share, about
            n_tokens -= round(n_tokens * n_tail / n_all)
        else:
            whole = [*request.plain, reply_message(reply)]
            self._known.append((whole, request.tools, n_tokens + reply.n_out))
        self._known.append((lasting, request.tools, n_tokens))
        return reply


def run(
    benches: Sequence[Bench], names: Sequence[str], *, n_steps: int, **how: Any
) -> None:
    """All agents on all servers, which are asked in turns. Raises CannotAsk."""
    for name in names:
        sessions = [(bench, AGENTS[name](**how)) for bench in benches]
        for step in range(n_steps):
            # The other one first at every second step: what else the machine does, and
            # how warm it is, meets both.
            for bench, agent in sessions if step % 2 else sessions[::-1]:
                bench.ask_all(agent, agent.side_requests(step))
                agent.hear(bench.ask(agent, agent.request()))
            say(f"\r{name}: {step + 1} of {n_steps} steps", end="")
        for bench, agent in sessions:
            bench.ask_all(agent, agent.last_requests())
        say("")


def say(text: str, *, end: str = "\n") -> None:
    """For people, beside what is printed."""
    print(text, end=end, file=sys.stderr, flush=True)


def summarize(steps: Sequence[Step]) -> Body:
    """The figures of some steps."""
    seconds = [step.seconds for step in steps]
    firsts = [step.first_token for step in steps]
    read = [step.read_tokens for step in steps if step.read_tokens is not None]
    decoding = sum(s.seconds - s.first_token for s in steps)
    n_decoded = sum(max(0, s.reply_tokens - 1) for s in steps)
    return {
        "requests": len(steps),
        "step_seconds_median": statistics.median(seconds),
        "step_seconds_worst": max(seconds),
        "first_token_seconds_median": statistics.median(firsts),
        "first_token_seconds_worst": max(firsts),
        "read_tokens": sum(read) if len(read) == len(steps) else None,
        "fewest_tokens": sum(step.fewest_tokens for step in steps),
        "tokens_per_second": n_decoded / decoding if decoding > 0 else None,
        "seconds": sum(seconds),
    }


def rows_of(bench: Bench) -> Iterator[tuple[str, Body]]:
    """By agent: what came first and what came later; by length of the prompt; then all."""
    for agent, kind in dict.fromkeys((step.agent, step.kind) for step in bench.steps):
        steps = [s for s in bench.steps if (s.agent, s.kind) == (agent, kind)]
        yield f"{agent}, {kind}", summarize(steps)
    shortest = 0
    for longest in LENGTHS:
        steps = [s for s in bench.steps if shortest < s.prompt_tokens <= longest]
        if steps:
            yield f"to {longest:,} tokens", summarize(steps)
        shortest = longest
    yield "all", summarize(bench.steps)


def print_table(bench: Bench) -> None:
    print(f"\n{bench.server.url}  {bench.server.model}")
    heads = ("", "requests", "step", "worst", "first", "worst", "read", "fewest", "t/s")
    form = "{:24} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7}"
    print(form.format(*heads))
    for name, row in rows_of(bench):
        read, speed = row["read_tokens"], row["tokens_per_second"]
        step, first = "step_seconds", "first_token_seconds"
        keys = (f"{step}_median", f"{step}_worst", f"{first}_median", f"{first}_worst")
        seconds = [f"{row[key]:.2f} s" for key in keys]
        read_text = "not said" if read is None else f"{read:,}"
        speed_text = "" if speed is None else f"{speed:.1f}"
        cells = (*seconds, read_text, f"{row['fewest_tokens']:,}", speed_text)
        print(form.format(name, row["requests"], *cells))


def print_report(benches: Sequence[Bench]) -> None:
    """A table for each server, and how two compare."""
    for bench in benches:
        print_table(bench)
    if len(benches) == 2:
        first, second = (sum(s.seconds for s in bench.steps) for bench in benches)
        ratio = f"{second / first:.2f} times as long on the second"
        print(f"\nall steps: {first:.1f} s and {second:.1f} s, {ratio}")


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    apis = ("openai", "anthropic")
    parser.add_argument("--url", required=True, help="of a server, with /v1 or without")
    parser.add_argument("--api", choices=apis, default="openai")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--key", default="unused", help="of the server, if it has any")
    parser.add_argument("--against", default="", help="another server, in turns")
    parser.add_argument("--against-api", choices=apis, default="openai")
    parser.add_argument("--against-model", default="")
    parser.add_argument("--against-key", default="unused")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    numbers = {
        "--steps": (8, "of each agent"),
        "--tokens": (8_000, "of the first prompt, about"),
        "--result-tokens": (400, "of each result"),
        "--reply-tokens": (64, "of each reply, at most"),
    }
    for name, (default, what) in numbers.items():
        text = f"{what} ({default:,})"
        parser.add_argument(name, type=int, default=default, help=text)
    parser.add_argument("--seed", default="", help="the same words again; default: new")
    parser.add_argument("--json", help="the file to write all steps to")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    seed = options.seed or uuid.uuid4().hex
    asked = [(options.url, options.api, options.model, options.key)]
    if options.against:
        other = (options.against_api, options.against_model, options.against_key)
        asked.append((options.against, *other))
    benches = []
    try:
        for url, api, model, key in asked:
            server = Server(url, api=api, model=model, key=key)
            say(f"asks {server.url} ({server.model}), whose cache it fills")
            benches.append(Bench(server, max_tokens=options.reply_tokens))
        run(
            benches,
            options.agents,
            n_steps=options.steps,
            head_tokens=options.tokens,
            result_tokens=options.result_tokens,
            seed=seed,
        )
    except KeyboardInterrupt:
        say("\nstopped")
        return 130
    except CannotAsk as error:
        say(f"\n{error}")
        return 2
    print_report(benches)
    if options.json:
        servers = [
            {
                "url": bench.server.url,
                "model": bench.server.model,
                "figures": dict(rows_of(bench)),
                "steps": [asdict(step) for step in bench.steps],
            }
            for bench in benches
        ]
        report = {"seed": seed, "servers": servers}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
