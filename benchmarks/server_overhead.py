"""Looking into our own server: programs that `sections` starts as processes of their own.

    python benchmarks/server_overhead.py serve          the server, writing each request's cost
    python benchmarks/server_overhead.py memory MODEL   peaks and bytes at rest, as JSON
    python benchmarks/server_overhead.py checkpoints MODEL N_TOKENS TIMES
    python benchmarks/server_overhead.py messages MODEL N_CHARS TIMES

A program of its own has a clean peak, and its time is not mixed with the client's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import mlx.core as mx
from agent_workload import Body, Words, chat
from project_files import start_llm

# The server, timed ------------------------------------------------------------------------------


class TimedModel:
    """A model that adds up its own time; it waits for its results, so nothing is left for later."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seconds = 0.0

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        mx.eval(inputs)
        began = time.perf_counter()
        logits: mx.array = self._model(inputs, cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
        self.seconds += time.perf_counter() - began
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def serve() -> None:
    """Run the server; each POST prints {"all": seconds, "model": seconds of it}.

    From the moment the request's headers are read to the end of the answer.
    """
    server = start_llm()
    timed: list[TimedModel] = []
    load = server.load_model
    answer = server.Handler.do_POST

    def load_timed(*args: Any) -> Any:
        loaded = load(*args)
        timed.append(TimedModel(loaded.model))
        return dataclasses.replace(loaded, model=timed[0])

    def timed_answer(handler: Any) -> None:
        began = time.perf_counter()
        model_seconds_before = timed[0].seconds
        answer(handler)
        costs = {
            "all": time.perf_counter() - began,
            "model": timed[0].seconds - model_seconds_before,
        }
        print(json.dumps(costs), flush=True)

    server.load_model = load_timed
    server.Handler.do_POST = timed_answer
    sys.argv = sys.argv[:1]
    raise SystemExit(server.main())


# The engine, without HTTP -----------------------------------------------------------------------


class InProcess:
    """Our server's request path from the parsed body on, in this process."""

    def __init__(self, folder: Path, log_root: str) -> None:
        self._server = start_llm()
        config = self._server.Config(
            model_path=str(folder), log_root=log_root, cache_disk="off"
        )
        self._state = self._server.build_state(config)
        self._state.engine.start()
        while self._state.engine.state == "loading":
            time.sleep(0.01)
        self.tokenizer = self._state.engine.model.tokenizer
        self.weights = self._state.engine.model.nbytes

    def ask(self, body: Body) -> Body:
        """The usage of a finished request."""
        request = self._server.parse_chat_request(
            body, self._state.config, request_id="bench", headers={}
        )
        answers = list(self._server.ReplyGeneration(self._state, request).bodies())
        usage: Body = answers[-1]["usage"]
        return {**usage, "message": answers[-1]["choices"][0]["message"]}

    def ask_messages(self, raw: bytes) -> Body:
        """Seconds from the bytes of POST /v1/messages to where its KV is found, and the usage."""
        server = self._server
        state = self._state
        find = server.PrefixCache.find
        find_seconds = [0.0]

        def timed_find(cache: Any, prompt: Any) -> Any:
            began = time.perf_counter()
            reuse = find(cache, prompt)
            find_seconds.append(time.perf_counter() - began)
            return reuse

        with mock.patch.object(server.PrefixCache, "find", timed_find):
            began = time.perf_counter()
            body = server.parse_json_body(raw)
            request = server.parse_anthropic_request(
                body, state.config, request_id="bench", headers={}
            )
            with closing(server.ReplyGeneration(state, request)) as answer:
                seconds = time.perf_counter() - began  # submitted
                message: Body = list(answer.bodies())[-1]
        return {"seconds": seconds + max(find_seconds), "message": message}

    def ask_together(self, bodies: list[Body]) -> list[Body]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.ask, bodies))

    def status(self) -> Body:
        time.sleep(0.3)  # the model thread publishes after its turn
        status: Body = self._state.engine.report
        return status

    def forget(self) -> None:
        self._state.engine._inbox.put(
            lambda scheduler: scheduler.cache.evict_to_fit(sys.maxsize)
        )

    def stop(self) -> None:
        self._state.engine.stop()


@contextmanager
def in_process(folder: Path) -> Iterator[InProcess]:
    with TemporaryDirectory() as logs:
        engine = InProcess(folder, logs)
        try:
            yield engine
        finally:
            engine.stop()


# Memory -----------------------------------------------------------------------------------------


def memory(folder: Path, n_tokens: int) -> Body:
    """Bytes: peaks of MLX's own count less the weights, and the KV that is really needed."""
    with in_process(folder) as engine:
        words = Words(engine.tokenizer, 11)
        token_bytes = engine.status()["kv_bytes_per_token"]
        history = words.history(n_tokens)
        last = engine.ask(chat(history, n_out=8))
        results: Body = {}
        for name, n_short in (("warm", 0), ("warm_and_three", 3)):
            history += [last["message"], {"role": "user", "content": words.text(8)}]
            short_talks = [
                [{"role": "user", "content": words.text(40)}] for _ in range(n_short)
            ]
            bodies = [chat(talk, n_out=48) for talk in [history, *short_talks]]
            usages, peak = peak_of(engine, bodies)
            last = max(usages, key=lambda usage: usage["prompt_tokens"])
            kv = sum(usage["total_tokens"] for usage in usages) * token_bytes
            results[name] = {"peak": peak, "kv": kv}
        engine.forget()
        results["branches"] = branches(
            engine, words, token_bytes, n_prefix=n_tokens // 4
        )
        return results


def peak_of(engine: InProcess, bodies: list[Body]) -> tuple[list[Body], int]:
    mx.clear_cache()
    mx.reset_peak_memory()
    usages = engine.ask_together(bodies)
    return usages, mx.get_peak_memory() - engine.weights


def branches(
    engine: InProcess, words: Words, token_bytes: int, *, n_prefix: int
) -> Body:
    """Eight at once on one prefix: at rest, and at the peak."""
    head = {"role": "system", "content": words.text(n_prefix)}
    engine.ask(chat([head, {"role": "user", "content": "hello"}], n_out=1))
    talks = [[head, {"role": "user", "content": words.text(300)}] for _ in range(8)]
    usages, peak = peak_of(engine, [chat(talk, n_out=48) for talk in talks])
    cached = min(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    unique = cached + sum(usage["total_tokens"] - cached for usage in usages)
    at_rest = engine.status()["cache_bytes"]
    return {
        "peak": peak,
        "at_rest": at_rest,
        "kv": unique * token_bytes,
        "prefix": cached,
    }


# Messages ---------------------------------------------------------------------------------------


def messages(folder: Path, n_chars: int, times: int) -> list[Body]:
    """Turns of a conversation as Claude Code has them: most of a body is its twelve tools."""
    with in_process(folder) as engine:
        words = Words(engine.tokenizer, 19)
        n_tokens = round(n_chars / len(words.text(1000)) * 1000)
        tools = [described_tool(words, index, n_tokens // 16) for index in range(12)]
        system = [{"type": "text", "text": words.text(n_tokens // 4)}]
        talk: list[Body] = [{"role": "user", "content": words.text(20)}]
        body = {"model": "any", "max_tokens": 8, "thinking": {"type": "adaptive"}}
        turns = []
        for _ in range(times + 1):
            sent = {**body, "system": system, "tools": tools, "messages": talk}
            raw = json.dumps(sent).encode()
            answer = engine.ask_messages(raw)
            usage = answer["message"]["usage"]
            cached = usage["cache_read_input_tokens"]
            turns.append(
                {"ms": 1e3 * answer["seconds"], "chars": len(raw), "cached": cached}
            )
            reply = {"role": "assistant", "content": answer["message"]["content"]}
            talk += [reply, {"role": "user", "content": words.text(20)}]
        return turns


def described_tool(words: Words, index: int, n_tokens: int) -> Body:
    keys = ("path", "command", "content", "pattern")
    properties = {
        key: {"type": "string", "description": words.text(12)} for key in keys
    }
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    return {
        "name": f"Tool{index}",
        "description": words.text(n_tokens),
        "input_schema": schema,
    }


# Checkpoints ------------------------------------------------------------------------------------


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """The engine as it would be for a model that can be rewound: no pauses, no copies."""
    server = start_llm()
    nothing = server.StateCheckpoint((), 0)
    with ExitStack() as stack:
        for owner, name, value in (
            (server, "_find_slice_ends", lambda *_, **__: []),
            (server.PrefixCache, "add_checkpoint", lambda *_: None),
            (server, "copy_state", lambda *_, **__: nothing),
            (server, "hold_recurrent_state", lambda _: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def checkpoints(folder: Path, n_tokens: int, times: int) -> list[Body]:
    """Processor seconds of the same cold prompts with and without, the order changing."""
    pairs: list[Body] = []
    with in_process(folder) as engine:
        words = Words(engine.tokenizer, 13)
        engine.ask(chat(words.history(500), n_out=2))
        for turn in range(times):
            body = chat(words.history(n_tokens), n_out=2)
            order = ("with", "without") if turn % 2 == 0 else ("without", "with")
            seconds = {
                name: cold_seconds(engine, body, name == "with") for name in order
            }
            pairs.append({"with": seconds["with"], "without": seconds["without"]})
    return pairs


def cold_seconds(engine: InProcess, body: Body, has_checkpoints: bool) -> float:
    engine.forget()
    with ExitStack() as stack:
        if not has_checkpoints:
            stack.enter_context(without_checkpoints())
        began = time.process_time()
        usage = engine.ask(body)
        seconds = time.process_time() - began
    assert not usage["prompt_tokens_details"]["cached_tokens"], "this was to be cold"
    return seconds


def main() -> None:
    name, *rest = sys.argv[1:]
    if name == "serve":
        serve()
    programs: dict[str, Callable[..., Any]] = {
        "memory": memory,
        "checkpoints": checkpoints,
        "messages": messages,
    }
    folder, *numbers = rest
    print(json.dumps(programs[name](Path(folder), *map(int, numbers))))


if __name__ == "__main__":
    main()
