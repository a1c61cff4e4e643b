"""The sections of the comparison. Each takes a Bench and yields lines of the table."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from agent_workload import SCENARIOS, Client, Count, Words, chat, endless, long_head
from client_workload import COSTUMES, PLAIN, Costume
from compared_servers import (
    OURS,
    THEIRS,
    Reply,
    Server,
    both_servers,
    burner,
    free_port,
    our_environment,
    our_server,
    peak_memory,
    running,
)
from idle_machine import rounds, wait_for_quiet
from mlx_lm_reference import Plain
from report import Line, ratios, spread
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from compare import Bench

HERE = Path(__file__).resolve().parent
KINDS = {"dense": "qwen3", "hybrid": "qwen3_5"}
AGENT = {"hidden": 192, "head_dim": 32, "mlp": 256}  # prefills 4,000 tokens/s
# 32k tokens in about a minute
LONG = {"hidden": 256, "head_dim": 64, "mlp": 512, "layers": 4}
OVERHEAD = {"heads": 1, "kv_heads": 1}  # only its own time is left out, so the smallest
# KV outweighs all else
MUCH_KV = {"heads": 1, "kv_heads": 1, "head_dim": 256, "layers": 4}
DECODER = {
    "hidden": 512,
    "head_dim": 64,
    "heads": 4,
    "kv_heads": 4,
    "layers": 4,
    "mlp": 2048,
}
# as wide as SmolLM2-135M, less deep: 200 MB
SMOL = {
    "hidden": 576,
    "head_dim": 64,
    "heads": 9,
    "kv_heads": 3,
    "layers": 12,
    "mlp": 1536,
    "vocabulary": 16_384,
}


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


# Tokens prefilled -------------------------------------------------------------------------------


def prefilled(bench: Bench) -> Iterator[Line]:
    """Every scenario on both kinds of model: tokens prefilled beside the fewest possible."""
    for name in SCENARIOS:
        counts = [count_tokens(bench, name, label) for label in KINDS]
        yield prefilled_line(
            name, [ours for ours, _ in counts], [theirs for _, theirs in counts]
        )
    yield cancelled_line(bench)


def count_tokens(
    bench: Bench, name: str, label: str, *, costume: Costume = PLAIN
) -> list[Count]:
    """One scenario on one kind of model: ours, theirs; what is no scenario is a costume."""
    folder = bench.model(KINDS[label], **AGENT)
    tokenizer = tokenizer_of(folder)
    counts = []
    with both_servers(folder, bench.scratch) as servers:
        for server in servers:
            bench.say(f"{name}, {label}, {server.name}")
            client = Client(server, tokenizer, rewindable=label == "dense", n_out=200)
            client.costume = costume
            SCENARIOS.get(name, long_head)(client, Words(tokenizer, len(name)))
            counts.append(client.count)
    return counts


def prefilled_line(
    name: str, ours: list[Count], theirs: list[Count], *, bar: float = 1.02
) -> Line:
    return Line(
        f"prompt tokens prefilled / fewest, dense; hybrid: {name}",
        "; ".join(map(count_text, ours)),
        "; ".join(map(count_text, theirs)),
        f"<= {bar:.2f}",
        met=max(count.ratio for count in ours) <= bar,
        values={"ours": list(map(asdict, ours)), "theirs": list(map(asdict, theirs))},
    )


def count_text(count: Count) -> str:
    return f"{count.ratio:.3f} ({count.prefilled:,} of {count.prompt:,})"


def volatile(bench: Bench) -> Iterator[Line]:
    """The same conversation as real agents send it: what changes in it, and what they take out."""
    for name, costume in COSTUMES.items():
        ours = []
        theirs = []
        for label in KINDS:
            our_count, their_count = count_tokens(bench, name, label, costume=costume)
            ours.append(our_count)
            theirs.append(their_count)
        bar = 1.02 if "thinking" in name else 1.10
        yield prefilled_line(name, ours, theirs, bar=bar)


def cancelled_line(bench: Bench) -> Line:
    """A client that leaves half-way through a long prefill and comes back at once."""
    n_tokens = 6000 if bench.quick else 16000
    shares: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for label, kind in KINDS.items():
        folder = bench.model(kind, **AGENT)
        words = Words(tokenizer_of(folder), 7)
        with both_servers(folder, bench.scratch) as servers:
            for server in servers:
                bench.say(f"cancel and retry, {label}, {server.name}")
                cold_seconds = server.ask(chat(words.history(n_tokens), n_out=2)).ttft
                body = chat(words.history(n_tokens), n_out=2)
                server.ask(body, give_up_after=cold_seconds / 2)
                again = server.ask(body)
                shares[server.name].append(again.prefilled / again.n_prompt)
    return Line(
        "cancelled at half its prefill time, sent again: share prefilled then, dense; hybrid",
        "; ".join(f"{share:.0%}" for share in shares[OURS]),
        "; ".join(f"{share:.0%}" for share in shares[THEIRS]),
        "the rest: about half",
        met=max(shares[OURS]) <= 0.55,
        values=shares,
    )


# Time to first token ----------------------------------------------------------------------------


def first_token(bench: Bench) -> Iterator[Line]:
    """Cold and warm at growing depth, beside the floor: the plain model on a ready cache."""
    depths = (2000, 8000) if bench.quick else (2000, 8000, 16000, 32000)
    for label, kind in KINDS.items():
        folder = bench.model(kind, **LONG)
        plain = Plain(folder)
        words = Words(tokenizer_of(folder), 3)
        with both_servers(folder, bench.scratch) as servers:
            for depth in depths:
                bench.say(f"{label}: first token at {depth:,} tokens")
                yield from first_token_lines(
                    bench, plain, servers, words.history(depth), label
                )


def first_token_lines(
    bench: Bench, plain: Plain, servers: list[Server], history: list[Any], label: str
) -> Iterator[Line]:
    words = Words(plain.tokenizer, len(history))
    wait_for_quiet()
    # 200 tokens are enough for replies to end.
    cold = [server.ask(chat(history, n_out=200)) for server in servers]
    plain.extend_to(cold[0].n_prompt)
    talks = {
        server.port: (list(history), reply)
        for server, reply in zip(servers, cold, strict=True)
    }

    def turn() -> tuple[float, ...]:
        """One more question to each server; their times to the first token, then the floor's."""
        question = {"role": "user", "content": words.text(24)}

        def ask(server: Server) -> Reply:
            talk, reply = talks[server.port]
            talk += [reply.message, question]
            reply = server.ask(chat(talk, n_out=200))
            talks[server.port] = talk, reply
            return reply

        ours, theirs = in_any_order(servers, ask)
        return ours.ttft, theirs.ttft, plain.floor(ours.prefilled)

    ours, theirs, floors = zip(*rounds(bench.times(9), turn), strict=True)
    yield floor_line(round(cold[0].n_prompt / 1000), label, [ours, theirs, floors])
    yield cold_line(round(cold[0].n_prompt / 1000), label, cold, [ours, theirs])


def floor_line(depth: int, label: str, times: list[Sequence[float]]) -> Line:
    ours, theirs, floors = times
    our_ms = 1e3 * statistics.median(ours)
    their_ms = 1e3 * statistics.median(theirs)
    floor_ms = 1e3 * statistics.median(floors)
    quotient = ratios(ours, floors)
    bar = 1.2 if depth >= 16 else None
    return Line(
        f"warm first token at {depth}k, {label} / floor ({floor_ms:.0f} ms)",
        f"{spread(quotient)} ({our_ms:.0f} ms)",
        f"{spread(ratios(theirs, floors))} ({their_ms:.0f} ms)",
        f"<= {bar}" if bar else "",
        met=statistics.median(quotient) <= bar if bar else None,
        values={"ours": ours, "theirs": theirs, "floors": floors},
    )


def cold_line(
    depth: int, label: str, cold: list[Reply], warm: list[Sequence[float]]
) -> Line:
    shares = []
    cells = []
    for warm_times, cold_reply in zip(warm, cold, strict=True):
        share = statistics.median(warm_times) / cold_reply.ttft
        shares.append(share)
        cells.append(f"1/{1 / share:.0f} (cold {cold_reply.ttft:.1f} s)")
    return Line(
        f"warm / cold first token at {depth}k, {label}",
        *cells,
        "<= 1/100" if depth == 16 else "",
        met=shares[0] <= 0.01 if depth == 16 else None,
        values={"shares": shares},
    )


# Decode -----------------------------------------------------------------------------------------


def decode(bench: Bench) -> Iterator[Line]:
    """One stream against mlx-lm without a server; eight at once against mlx-lm's server."""
    for label, kind in KINDS.items():
        for size, fields in (("large", DECODER), ("tiny", {})):
            folder = bench.model(kind, **fields)
            bench.say(f"{label}, {size}: decode speed")
            plain = Plain(folder)
            title = f"{label}, {size} model"
            with both_servers(folder, bench.scratch) as servers:
                yield from alone_lines(bench, plain, servers, title)
                yield from at_once_lines(bench, plain, servers, title)
    yield sampled_line(bench)


def sampled_line(bench: Bench) -> Line:
    """One stream that is sampled as this server does by default, from as many ids as Qwen3 has."""
    n_ids = 151_936
    folder = bench.model("qwen3", vocabulary=n_ids)
    bench.say("decode speed, sampled")
    words = Words(tokenizer_of(folder), 8)
    fields = {
        "temperature": 0.1,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        **endless(words.tokenizer, 128),
    }

    def once() -> list[float]:
        body = chat([{"role": "user", "content": words.text(200)}], n_out=0, **fields)
        return in_any_order(servers, lambda server: server.ask(body).decode_speed)

    with both_servers(folder, bench.scratch) as servers:
        ours, theirs = zip(*rounds(bench.times(7), once), strict=True)
    sampled = f"with top-k 40, top-p 0.9, min-p 0.05 of {n_ids:,} ids"
    return speed_line(f"decode, one request, tokens/s {sampled}", ours, theirs)


def speed_line(title: str, ours: Sequence[float], theirs: Sequence[float]) -> Line:
    """Tokens per second beside mlx-lm's server, round by round."""
    quotient = ratios(ours, theirs)
    return Line(
        title,
        f"{statistics.median(ours):.0f}; {spread(quotient)} x",
        f"{statistics.median(theirs):.0f}",
        ">= theirs",
        met=statistics.median(quotient) >= 1.0,
        values={"ours": ours, "theirs": theirs},
    )


def alone_lines(
    bench: Bench, plain: Plain, servers: list[Server], label: str
) -> Iterator[Line]:
    words = Words(plain.tokenizer, 5)
    fields = endless(plain.tokenizer, 256)

    def once() -> tuple[float, ...]:
        """Speeds of both servers, and mlx-lm's before and after them: machines slow down."""
        messages = [{"role": "user", "content": words.text(200)}]
        body = chat(messages, n_out=0, **fields)
        prompt = plain.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tools=body["tools"],
            **body["chat_template_kwargs"],
        )

        first_speed = plain.decode_speed(prompt, fields)
        replies = in_any_order(servers, lambda server: server.ask(body))
        last_speed = plain.decode_speed(prompt, fields)

        # All decode after the same tokens: attention to more of them takes longer.
        assert {reply.n_prompt for reply in replies} == {len(prompt)}, "another prompt"
        plain_speed = statistics.mean((first_speed, last_speed))
        return *(reply.decode_speed for reply in replies), plain_speed

    ours, theirs, plainly = zip(*rounds(bench.times(9), once), strict=True)
    quotient = ratios(ours, plainly)
    yield Line(
        f"decode, one request / mlx_lm.generate, {label} "
        f"({1e3 / statistics.median(plainly):.1f} ms a token)",
        spread(quotient),
        spread(ratios(theirs, plainly)),
        ">= 0.98",
        met=statistics.median(quotient) >= 0.98,
        values={"ours": ours, "theirs": theirs, "plain": plainly},
    )


def at_once_lines(
    bench: Bench, plain: Plain, servers: list[Server], label: str
) -> Iterator[Line]:
    words = Words(plain.tokenizer, 6)
    fields = endless(plain.tokenizer, 128)

    def once() -> list[list[Reply]]:
        talks = [[{"role": "user", "content": words.text(150)}] for _ in range(8)]
        bodies = [chat(talk, n_out=0, **fields) for talk in talks]
        return in_any_order(servers, lambda server: ask_together(server, bodies))

    ours, theirs = zip(*rounds(bench.times(7), once), strict=True)
    for phase, speed in (
        ("while all decode", speed_together),
        ("all in all", speed_in_all),
    ):
        our_speeds = [speed(replies) for replies in ours]
        their_speeds = [speed(replies) for replies in theirs]
        title = f"decode, eight at once, tokens/s {phase}, {label}"
        yield speed_line(title, our_speeds, their_speeds)


def in_any_order[T](servers: list[Server], ask: Callable[[Server], T]) -> list[T]:
    """Each server's answer, in the servers' order; which is asked first is drawn by lot."""
    shuffled = random.sample(servers, len(servers))
    answers = {id(server): ask(server) for server in shuffled}
    return [answers[id(server)] for server in servers]


def ask_together(server: Server, bodies: list[Any]) -> list[Reply]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(server.ask, bodies))


def speed_together(replies: list[Reply]) -> float:
    """Tokens per second of all while every one of them is being generated."""
    began = max(reply.sent + reply.stamps[0] for reply in replies)
    ended = min(reply.sent + reply.stamps[-1] for reply in replies)
    inside = 0.0
    for reply in replies:
        n_inside = sum(began <= reply.sent + stamp <= ended for stamp in reply.stamps)
        inside += reply.n_out * n_inside / len(reply.stamps)
    if inside == 0:  # some were over before the last one began
        return speed_in_all(replies)
    return inside / (ended - began)


def speed_in_all(replies: list[Reply]) -> float:
    """Tokens per second of all, from the first request's sending to the last token."""
    began = min(reply.sent for reply in replies)
    ended = max(reply.sent + reply.stamps[-1] for reply in replies)
    return sum(reply.n_out for reply in replies) / (ended - began)


# Inside our server ------------------------------------------------------------------------------


def overhead(bench: Bench) -> Iterator[Line]:
    """Time in our process on a warm request, less the time inside the model."""
    folder = bench.model("qwen3", **OVERHEAD)
    words = Words(tokenizer_of(folder), 17)
    for depth in (8000,) if bench.quick else (32000, 64000):
        bench.say(f"server overhead at {depth:,} tokens")
        with timed_server(folder, bench.scratch) as (server, log):
            costs = warm_costs(server, log, words, depth=depth, times=bench.times(15))
        overhead_ms = [1e3 * (cost["all"] - cost["model"]) for cost in costs]
        yield Line(
            f"server overhead, warm request, {depth // 1000}k of history, 1 token out",
            f"{spread(overhead_ms, '{:.1f}')} ms",
            bar="<= 25 ms",
            met=statistics.median(overhead_ms) <= 25,
            values={"costs": costs},
        )


def warm_costs(
    server: Server, log: Path, words: Words, *, depth: int, times: int
) -> list[dict[str, float]]:
    talk = words.history(depth)
    end = words.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ending = {"logit_bias": {str(end): 100.0}}  # a reply that ends at once, but ends
    server.ask(chat(talk, n_out=2, **ending))

    def turn() -> dict[str, float]:
        talk.append({"role": "assistant", "content": ""})
        talk.append({"role": "user", "content": words.text(24)})
        server.ask(chat(talk, n_out=2, **ending))
        return costs_in(log)[-1]

    return rounds(times, turn)


def memory(bench: Bench) -> Iterator[Line]:
    """Peaks inside our process, then both servers' resident memory with eight branches."""
    n_tokens = 8000 if bench.quick else 32000
    bench.say("peak memory inside our process")
    thousands = f"{n_tokens // 1000}k"
    measured = run_inside("memory", bench.model("qwen3", **MUCH_KV), n_tokens)
    for name, title, bar in (
        ("warm", f"one warm {thousands} request / its own KV", 1.15),
        ("warm_and_three", f"{thousands} and three short requests / unique KV", 1.3),
    ):
        ratio = measured[name]["peak"] / measured[name]["kv"]
        megabytes = measured[name]["kv"] / 1e6
        yield Line(
            f"peak bytes beside the weights, {title}",
            f"{ratio:.2f} x {megabytes:.0f} MB",
            bar=f"<= {bar}",
            met=ratio <= bar,
        )

    branches = measured["branches"]
    ratio = branches["at_rest"] / branches["kv"]
    yield Line(
        f"KV at rest, 8 branches of one {branches['prefix']:,}-token prefix / unique",
        f"{ratio:.3f}",
        bar="<= 1.1",
        met=ratio <= 1.1,
        values=measured,
    )
    yield branches_line(bench)


def branches_line(bench: Bench) -> Line:
    """From outside: what eight branches of a prefix add to each server's resident memory."""
    folder = bench.model("qwen3", **MUCH_KV)
    n_prefix = 2000 if bench.quick else 8000
    grown: list[list[int]] = []
    with both_servers(folder, bench.scratch) as servers:
        for server in servers:
            bench.say(f"resident memory with eight branches, {server.name}")
            words = Words(tokenizer_of(folder), 19)
            head = {"role": "system", "content": words.text(n_prefix)}
            server.ask(chat([head, {"role": "user", "content": "hello"}], n_out=1))
            talks = [
                [head, {"role": "user", "content": words.text(300)}] for _ in range(8)
            ]
            with peak_memory(server.pid) as resident:
                ask_together(server, [chat(talk, n_out=48) for talk in talks])
            grown.append(list(resident))

    added = [f"{(peak - first) / 1e6:.0f} MB" for first, peak in grown]
    return Line(
        f"resident memory added by 8 branches of a warm {n_prefix // 1000}k prefix, at the peak",
        *added,
        values={"bytes": grown},
    )


def checkpoints(bench: Bench) -> Iterator[Line]:
    """What taking checkpoints costs when nothing is ever reused."""
    n_tokens = 4000 if bench.quick else 8000
    bench.say("cost of checkpoints")
    folder = bench.model("qwen3_5", **AGENT)
    pairs = run_inside("checkpoints", folder, n_tokens, bench.times(12))
    cost = [pair["with"] / pair["without"] - 1 for pair in pairs]
    yield Line(
        f"cold {n_tokens // 1000}k prompt, hybrid: cost of taking checkpoints",
        spread(cost, "{:+.1%}"),
        bar="<= 3%",
        met=statistics.median(cost) <= 0.03,
        values={"pairs": pairs},
    )


def messages(bench: Bench) -> Iterator[Line]:
    """From the bytes of a warm request to where its KV is found; no HTTP, no model."""
    bench.say("a request like Claude Code's")
    first, *warm = run_inside(
        "messages", bench.model("qwen3", **OVERHEAD), 90_000, bench.times(15)
    )
    cost = [turn["ms"] for turn in warm]
    yield Line(
        f"{first['chars'] // 1000} kB and 12 tools over /v1/messages: parsed, rendered, looked up",
        f"{spread(cost, '{:.1f}')} ms",
        bar="<= 50 ms",
        met=statistics.median(cost) <= 50,
        values={"turns": [first, *warm]},
    )


def run_inside(program: str, folder: Path, *numbers: int) -> Any:
    command = [
        sys.executable,
        str(HERE / "server_overhead.py"),
        program,
        str(folder),
        *map(str, numbers),
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(result.stdout)


@contextmanager
def timed_server(folder: Path, scratch: Path) -> Iterator[tuple[Server, Path]]:
    """Our server in a process that says what each request cost, and the file where it says so."""
    port = free_port()
    command = [sys.executable, str(HERE / "server_overhead.py"), "serve"]
    environ = our_environment(folder, port, scratch)
    with running(Server(OURS, port), command, scratch, environ) as server:
        yield server, scratch / f"{OURS}-{port}.log"


def costs_in(log: Path) -> list[dict[str, float]]:
    """What `server_overhead.py serve` has written; a request's line comes just after its answer."""
    time.sleep(0.2)
    lines = log.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"all"')]


# One client in the way of another ---------------------------------------------------------------


def tokenising(bench: Bench) -> Iterator[Line]:
    """A stream goes on while another connection sends 64k tokens that are rendered and refused."""
    n_tokens = 16000 if bench.quick else 64000
    folder = bench.model("qwen3", **DECODER)
    words = Words(tokenizer_of(folder), 23)
    bench.say("a stream beside a long prompt that is only tokenised")
    with (
        our_server(folder, bench.scratch, max_kv_size=n_tokens // 2) as server,
        burner() as burn,
    ):
        shares = rounds(bench.times(15), lambda: refusal(server, words, n_tokens, burn))
    rendering_shares = [rendering for rendering, _ in shares]
    burner_shares = [burning for _, burning in shares]
    burner_median = statistics.median(burner_shares)
    yield Line(
        f"a stream's speed while {n_tokens // 1000}k tokens are rendered and tokenised / alone",
        f"{spread(rendering_shares)}; {burner_median:.2f} beside another program",
        bar=">= 0.8",
        met=statistics.median(rendering_shares) >= 0.8,
        values={"beside rendering, beside another program": shares},
    )


def refusal(
    server: Server, words: Words, n_tokens: int, burn: Callable[[], float]
) -> tuple[float, float]:
    """A stream's speed, as a share of its speed in the second before, while a request is refused.

    And while another program computes as long as rendering takes: what two cores can do at best.
    """
    body = chat(words.history(n_tokens), n_out=1)
    hello = [{"role": "user", "content": words.text(100)}]
    long = chat(hello, n_out=0, **endless(words.tokenizer, 500))
    windows: list[tuple[float, float]] = []

    def disturb() -> None:
        for work in (lambda: refuse(server, body), burn):
            time.sleep(1.4)
            seconds = work()
            ended = time.perf_counter()
            windows.append((ended - seconds, ended))

    [reply] = while_asking(server, [long], disturb)
    stamps = [reply.sent + stamp for stamp in reply.stamps]
    shares = [
        speed_between(stamps, began, ended) / speed_between(stamps, began - 1, began)
        for began, ended in windows
    ]
    return shares[0], shares[1]


def refuse(server: Server, body: Any) -> float:
    """Seconds from the request to its refusal; not those in which this process writes the JSON."""
    status, seconds = server.status_of(body)
    assert status == 400, f"the long prompt was to be refused, not {status}"
    return seconds


def while_asking(
    server: Server, bodies: list[Any], action: Callable[[], None]
) -> list[Reply]:
    """Run `action` while the server answers; the replies."""
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(ask_together, server, bodies)
        action()
        return replies.result()


def speed_between(stamps: list[float], began: float, ended: float) -> float:
    """Pieces of text per second in a window, part intervals counted in part."""
    first, last = np.interp([began, ended], stamps, np.arange(len(stamps)))
    return float(last - first) / (ended - began)


def short_behind_long(bench: Bench) -> Iterator[Line]:
    """A short cold request while another is prefilling a long prompt."""
    folder = bench.model("qwen3", **DECODER)
    tokenizer = tokenizer_of(folder)
    n_tokens = 6000
    bench.say("a short request behind a long prefill")
    with both_servers(folder, bench.scratch) as servers:
        our_times, their_times = (
            rounds(
                bench.times(5),
                partial(short_times, server, Words(tokenizer, 29), n_tokens),
            )
            for server in servers
        )
    ours = slowdowns(our_times)
    theirs = slowdowns(their_times)
    alone = statistics.median(seconds for seconds, _ in our_times)
    yield Line(
        f"a short request (300 + 64 tokens, {alone:.2f} s alone) behind a "
        f"{n_tokens // 1000}k prefill / alone",
        spread(ours),
        spread(theirs),
        "<= 2",
        met=statistics.median(ours) <= 2,
        values={"ours": our_times, "theirs": their_times},
    )


def slowdowns(times: list[tuple[float, list[float]]]) -> list[float]:
    """Of each short request during a long prefill: its seconds / those of one alone."""
    quotients: list[float] = []
    for alone, during_prefill in times:
        quotients += [seconds / alone for seconds in during_prefill]
    return quotients


def short_times(
    server: Server, words: Words, n_tokens: int
) -> tuple[float, list[float]]:
    """Seconds of a short request: alone, and of two, one after the other, during a long prefill."""
    alone = statistics.median(short_request(server, words) for _ in range(3))
    during_prefill: list[float] = []

    def send_some() -> None:
        for _ in range(2):
            time.sleep(0.7 + 0.6 * words.random.random())  # anywhere in a prefill slice
            during_prefill.append(short_request(server, words))

    while_asking(server, [chat(words.history(n_tokens), n_out=1)], send_some)
    return alone, during_prefill


def short_request(server: Server, words: Words) -> float:
    """Seconds for 300 cold tokens and 64 generated ones."""
    messages = [{"role": "system", "content": words.text(20)}]
    messages.append({"role": "user", "content": words.text(280)})
    body = chat(messages, n_out=0, **endless(words.tokenizer, 64))
    del body["tools"]
    return float(server.ask(body).seconds)


def short_together(bench: Bench) -> Iterator[Line]:
    """Four short cold prompts that are sent in one moment: how fast all are answered."""
    folder = bench.model("qwen3", **SMOL)
    words = Words(tokenizer_of(folder), 31)
    alike = (40, 40, 40, 40)
    unlike = (20, 60, 120, 220)

    def once(lengths: Sequence[int], n_out: int) -> list[list[Reply]]:
        bodies = [short_chat(words, n_prompt=n, n_out=n_out) for n in lengths]
        return in_any_order(servers, lambda server: ask_together(server, bodies))

    with both_servers(folder, bench.scratch) as servers:
        for lengths, n_out in ((alike, 16), (alike, 32), (alike, 128), (unlike, 32)):
            shape = "/".join(str(n) for n in sorted(set(lengths)))
            bench.say(f"four prompts of {shape} tokens at once, replies of {n_out}")
            pairs = rounds(bench.times(15), partial(once, lengths, n_out))
            ours, theirs = zip(*pairs, strict=True)
            yield speed_line(
                f"four cold prompts of {shape} tokens at once, replies of {n_out}, "
                "tokens/s all in all",
                [speed_in_all(replies) for replies in ours],
                [speed_in_all(replies) for replies in theirs],
            )


def short_chat(words: Words, *, n_prompt: int, n_out: int) -> Any:
    """A question of about so many tokens, without tools, with a reply of so many."""
    messages = [{"role": "user", "content": words.text(n_prompt - 10)}]
    body = chat(messages, n_out=0, **endless(words.tokenizer, n_out))
    del body["tools"]
    return body


ALL: Mapping[str, Callable[[Bench], Iterator[Line]]] = {
    "prefilled": prefilled,
    "volatile": volatile,
    "first_token": first_token,
    "decode": decode,
    "overhead": overhead,
    "messages": messages,
    "memory": memory,
    "checkpoints": checkpoints,
    "tokenising": tokenising,
    "short": short_behind_long,
    "together": short_together,
}
