"""The real server in this process, on a tiny model that records what it is called with."""

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import start_llm as s
from minimum_prefill import Fed, Request, Turns
from mlx_lm.utils import load_tokenizer
from tiny_models import TOOLS, WORDS

Message = dict[str, Any]
MAX_WAIT_SECONDS = (
    240.0  # seconds for what will come: a machine may be busy with other tests
)
MOST_TOKENS = 400  # of a reply; the planted grammar ends nearly all of them long before


def free_port() -> int:
    """None that the system may lend a client before it is taken: those begin at 32768.

    Processes that test at the same time have ranges of their own.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first_port = 20_000 + int(worker) % 8 * 1_500
    while True:
        port = random.SystemRandom().randrange(first_port, first_port + 1_500)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(
    condition: Callable[[], object], *, seconds: float = MAX_WAIT_SECONDS
) -> None:
    """Raises AssertionError when the condition has not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def connections() -> int:
    """Threads that serve one."""
    return sum(
        "process_request_thread" in thread.name for thread in threading.enumerate()
    )


def wait_until_idle(engine: s.Engine) -> None:
    """Until no request runs or waits. The model thread is asked: its report may be 0.25 s old."""
    wait_until(lambda: not engine.call(lambda scheduler: scheduler.is_busy))


def _go_on(_rows: list[Fed]) -> None:
    """Nothing holds the model."""


@contextmanager
def without_drafts(engine: s.Engine) -> Iterator[None]:
    """Requests that come inside decode a token a step: one can be held between two tokens."""
    allowed = engine.call(lambda scheduler: scheduler._can_draft)
    engine.call(lambda scheduler: setattr(scheduler, "_can_draft", False))
    try:
        yield
    finally:
        engine.call(lambda scheduler: setattr(scheduler, "_can_draft", allowed))


def clear_cache(engine: s.Engine) -> None:
    """Forget every KV that no running request builds on."""
    engine._inbox.put(lambda scheduler: scheduler.cache.evict_to_fit(1 << 60))


def forget_pasts(state: s.ServerState) -> None:
    state.stores.ledger.forget(None)


_thread = threading.local()  # .recorder: the one that was called last in a thread


class Recorder:
    """A model that notes what every row of every call is given, and where; no padding.

    Of a step with a draft only what was accepted, token by token, as without drafts: what a draft
    got wrong is no token of anybody, and what is fed again was accepted before.
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.fed: list[Fed] = []
        self.n_rows_most = 0
        self.before_call: Callable[[list[Fed]], object] = _go_on

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        rows = inputs.tolist()
        offsets = _offsets(cache, len(rows))
        n_padding = _padding_behind(cache, len(rows))
        fed = [
            Fed(offset, tuple(tokens[: len(tokens) - n]))
            for offset, tokens, n in zip(offsets, rows, n_padding, strict=True)
        ]
        self.before_call(fed)
        self.fed += fed
        _thread.recorder = self
        self.n_rows_most = max(self.n_rows_most, len(rows))
        return self.plain(inputs, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class RecordedGenerator(s.TokenGenerator):
    """Has the model's record say what its steps accept."""

    def settle(self) -> None:
        self._note_accepted(super().settle)  # it accepts nothing that is new

    def step(self) -> list[s.SampledToken]:
        if not self.pending_ids:
            return super().step()
        return self._note_accepted(super().step)

    def step_with(self, draft: list[int]) -> list[s.SampledToken]:
        return self._note_accepted(
            lambda: super(RecordedGenerator, self).step_with(draft)
        )

    def _note_accepted(
        self, call: Callable[[], list[s.SampledToken] | None]
    ) -> list[s.SampledToken]:
        n_again = len(self.pending_ids)
        _thread.recorder = None
        tokens = call() or []
        if (recorder := _thread.recorder) is not None:
            fed = recorder.fed.pop()
            ids = tuple(token.token_id for token in tokens)
            start = fed.at + n_again
            assert fed.tokens[n_again : n_again + len(ids)] == ids
            recorder.fed += [Fed(at, (id_,)) for at, id_ in enumerate(ids, start)]
        return tokens


s.TokenGenerator = RecordedGenerator  # type: ignore[misc]


def _offsets(cache: Any, n_rows: int) -> list[int]:
    """Tokens that each row has in its cache; recurrent layers have no offset."""
    leaves = s.cache_leaves(cache)
    offsets = (leaf.offset for leaf in leaves if hasattr(leaf, "offset"))
    offset = next(offsets, 0)
    return [offset] * n_rows if isinstance(offset, int) else offset.tolist()


def _padding_behind(cache: Any, n_rows: int) -> list[int]:
    """How many tokens at the end of each row only pad it to the longest."""
    padding = getattr(cache[0], "_right_padding", None)
    return [0] * n_rows if padding is None else padding.tolist()


class Scribe:
    """Renders conversations with the model folder's own tokenizer and template, no server code."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        (self.end,) = self._encode("<|im_end|>")
        (self.call_end,) = self._encode("</tool_call>")
        start = tuple(self._encode("<|im_start|>"))
        user = start + tuple(self._encode("user\n"))
        system = start + tuple(self._encode("system\n"))
        tool = start + tuple(self._encode("user\n<tool_response>"))
        self.turns = Turns(start[0], system, user, tool)

    def ids(self, text: str) -> list[int]:
        """Markup is markup, and no special tokens are added."""
        return self._encode(text)

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def prompt(
        self, messages: list[Message], fields: dict[str, Any], **template_kwargs: Any
    ) -> tuple[int, ...]:
        """`fields`: those of the request."""
        template_kwargs = {
            "add_generation_prompt": True,
            "enable_thinking": True,
            **fields.get("extra_body", {}),
            **template_kwargs,
        }

        prompt_ids = self._tokenizer.apply_chat_template(
            [_with_objects(message) for message in messages],
            tools=fields.get("tools"),
            preserve_thinking=True,
            **template_kwargs,
        )
        return tuple(prompt_ids)

    def reply(
        self, messages: list[Message], answer: Message, fields: dict[str, Any]
    ) -> tuple[int, ...]:
        """The tokens that were generated for this answer and its end."""
        prompt = self.prompt(messages, fields)
        rendered = self.prompt([*messages, answer], fields, add_generation_prompt=False)
        assert rendered[: len(prompt)] == prompt
        end = rendered.index(self.end, len(prompt)) + 1
        return rendered[len(prompt) : end]


def _with_objects(message: Message) -> Message:
    """Tool-call arguments as objects, as templates want them."""
    if not message.get("tool_calls"):
        return message

    calls = []
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        function = {**call["function"], "arguments": arguments}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and what came back."""

    messages: list[Message]
    fields: dict[str, Any]
    answer: Message
    finish_reason: str
    usage: dict[str, Any]
    span: tuple[int, int] = (0, 0)  # of the model's record, while the request ran

    @property
    def n_cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def n_generated(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def said(self) -> Message:
        """The answer without the ids, which are random."""
        return {**self.answer, "tool_calls": functions_of(self.answer)}


def _parts(completion: Any) -> tuple[Message, str, dict[str, Any]]:
    """What `join_chunks` returns of a stream, for an answer that was not streamed."""
    choice = completion.choices[0]
    answer = choice.message.model_dump(exclude_unset=True, exclude_none=True)
    message = {"content": None, **answer}
    return message, choice.finish_reason, completion.usage.model_dump()


def functions_of(answer: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in answer.get("tool_calls") or ()]


def join_chunks(chunks: Iterable[Any]) -> tuple[Message, str, dict[str, Any]]:
    """A stream's (message, finish reason, usage), as an SDK user would put it together."""
    message: Message = {"role": "assistant", "content": None}
    finish_reason = ""
    usage: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.usage:
            usage = chunk.usage.model_dump()
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            _add_delta(message, choice.delta.model_dump(exclude_unset=True))
    return message, finish_reason, usage


def _add_delta(message: Message, delta: dict[str, Any]) -> None:
    for key in ("reasoning_content", "content"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for piece in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            name = {"name": piece["function"]["name"], "arguments": ""}
            calls.append({"id": piece["id"], "type": "function", "function": name})
        function = calls[piece["index"]]["function"]
        function["arguments"] += piece["function"].get("arguments") or ""


class Client(AbstractContextManager):
    """The openai SDK on a server, keeping what was exchanged."""

    def __init__(self, port: int) -> None:
        self.exchanges: list[Exchange] = []  # in the order they ended
        self._sdk = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
        )

    def close(self) -> None:
        self._sdk.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self) -> int:
        """How long the model's record is by now."""
        return 0

    def ask(
        self, messages: list[Message], *, stream: bool = True, **fields: Any
    ) -> Exchange:
        """Greedy unless told otherwise, with the tools the model knows."""
        fields = {"temperature": 0, "max_tokens": MOST_TOKENS, "tools": TOOLS, **fields}
        messages = list(messages)
        n_fed_before = self._mark()

        if stream:
            with self.stream(messages, **fields) as chunks:
                parts = join_chunks(chunks)
        else:
            parts = _parts(self._create(messages, **fields))

        span = (n_fed_before, self._mark())
        self.exchanges.append(Exchange(messages, fields, *parts, span))
        return self.exchanges[-1]

    def _create(self, messages: list[Message], **fields: Any) -> Any:
        return self._sdk.chat.completions.create(
            model="any", messages=messages, **fields
        )

    @contextmanager
    def stream(self, messages: list[Message], **fields: Any) -> Iterator[Iterable[Any]]:
        """The chunks of a streamed request; leaving early closes the connection."""
        wants = {"stream": True, "stream_options": {"include_usage": True}}
        with self._create(messages, **wants, **fields) as chunks:
            yield chunks


SYSTEM = {
    "role": "system",
    "content": "You are a careful agent. Read before you write.",
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class Talk:
    """An agent at work: tools answer the model's calls, a user answers its words."""

    def __init__(
        self, client: Client, seed: int, messages: list[Message] | None = None
    ) -> None:
        self._client = client
        self._random = random.Random(seed)
        self.messages = messages or [SYSTEM, user(self.words(20))]

    def words(self, n: int) -> str:
        return " ".join(self._random.choices(WORDS, k=n)).capitalize() + "."

    def step(self, **fields) -> Exchange:
        """One request; afterwards the conversation is ready for the next."""
        exchange = self._client.ask(self.messages, **fields)
        self.messages += [exchange.answer, *self._react(exchange.answer)]
        return exchange

    def _react(self, answer: Message) -> list[Message]:
        calls = answer.get("tool_calls")
        if not calls:
            return [user(self.words(12))]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": self.words(30)}
            for call in calls
        ]

    def branch(self, n_messages: int, *, seed: int) -> "Talk":
        """Another conversation with the same beginning and another question."""
        new_talk = Talk(self._client, seed)
        question = user(new_talk.words(15))
        new_talk.messages = [*self.messages[:n_messages], question]
        return new_talk


def _look_often(server: s.LLMServer, poll_interval: float = 0.02) -> None:
    """Accept connections; shutdown() waits for the next look, by default half a second."""
    super(s.LLMServer, server).serve_forever(poll_interval)


s.LLMServer.serve_forever = _look_often  # type: ignore[method-assign]


class RunningServer:
    """A server in this process whose model has been loaded. Close it when done."""

    def __init__(self, config: s.Config, load: Callable[[], s.LoadedModel]) -> None:
        state = s.build_state(config)
        use_folder = state.engine._use_folder if config.cache_disk == "on" else None
        engine = s.Engine(config, state.metrics, load=load, use_folder=use_folder)
        self.state = replace(state, engine=engine)

        self._stop = threading.Event()
        servers = s._listen(config, self.state)
        self._main = threading.Thread(
            target=s._serve,
            args=(self.state, servers),
            kwargs={"stop": self._stop},
            daemon=True,
        )
        self._main.start()

        wait_until(lambda: engine.state != "loading")
        assert engine.failure is None, engine.failure

    def close(self) -> None:
        self._stop.set()
        self._main.join(timeout=MAX_WAIT_SECONDS)
        assert not self._main.is_alive(), "the server did not stop"


class Served(Client):
    """A running server with its recorded model and an OpenAI client. Close it when done."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        port = settings.pop("mlx_port", None) or free_port()
        super().__init__(port)
        settings = {"enable_request_logging": False, "enable_proxy": False, **settings}
        config = s.Config(model_path=str(folder), mlx_port=port, **settings)
        self.scribe = Scribe(folder)
        self.recorder: Recorder | None = None
        self.given_up: list[Request] = []

        self._running = RunningServer(config, lambda: self._load(folder, config))
        self.state = self._running.state

    def _mark(self) -> int:
        return len(self.recorder.fed)

    def _load(self, folder: Path, config: s.Config) -> s.LoadedModel:
        loaded = s.load_model(folder, config)
        self.recorder = Recorder(loaded.model)
        return replace(loaded, model=self.recorder)

    def close(self) -> None:
        super().close()
        self._running.close()

    def forget(self) -> None:
        """An empty cache and an empty record."""
        clear_cache(self.state.engine)
        wait_until(lambda: self.state.engine.report["lines"] == 0)
        self.recorder.fed.clear()
        self.exchanges.clear()
        self.given_up.clear()

    @contextmanager
    def holding(self, before_call: Callable[[list[Fed]], object]) -> Iterator[None]:
        """The model thread runs this before each call of the model, and may wait in it."""
        self.recorder.before_call = before_call
        try:
            yield
        finally:
            self.recorder.before_call = _go_on

    def parse(self, messages: list[Message], **fields: Any) -> s.ChatRequest:
        """Greedy, as a chat that has come."""
        body = {"messages": messages, "temperature": 0, **fields}
        config = self.state.config
        return s.parse_chat_request(body, config, request_id="a", headers={})

    def prepare(self, messages: list[Message], **fields: Any) -> s.EngineRequest:
        """What the engine would be given for a chat."""
        state = self.state.for_tenant("")
        return s.prepare_request(state, self.parse(messages, **fields)).engine_request

    def request(self, exchange: Exchange) -> Request:
        """An exchange in tokens, from the messages alone."""
        messages = exchange.messages
        fields = exchange.fields
        prompt = self.scribe.prompt(messages, fields)
        reply = self.scribe.reply(messages, exchange.answer, fields)
        reply = reply[: exchange.n_generated]  # without the end where it was cut off
        assert len(prompt) == exchange.usage["prompt_tokens"]
        assert len(reply) == exchange.n_generated, (
            "the answer is not what was generated"
        )
        return Request(prompt, reply)
