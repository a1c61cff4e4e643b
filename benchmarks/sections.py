"""The sections of the comparison. Each takes a Bench and yields lines of the table."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from plain import Plain
from report import Line, ratios, spread
from servers import (
    OURS,
    THEIRS,
    Reply,
    Server,
    both_servers,
    free_port,
    our_environment,
    our_server,
    peak_memory,
    running,
    seconds_of_others,
)
from transformers import AutoTokenizer
from workload import SCENARIOS, Client, Count, Words, chat, endless

if TYPE_CHECKING:
    from compare import Bench

HERE = Path(__file__).resolve().parent
KINDS = {"dense": "qwen3", "hybrid": "qwen3_5"}
AGENT = {"hidden": 192, "head_dim": 32, "mlp": 256}  # prefills 4,000 tokens/s
LONG = {"hidden": 256, "head_dim": 64, "mlp": 512, "layers": 4}  # 32k tokens in about a minute
OVERHEAD = {"heads": 1, "kv_heads": 1}  # only its own time is left out, so the smallest
MUCH_KV = {"heads": 1, "kv_heads": 1, "head_dim": 256, "layers": 4}  # KV outweighs all else
QUIET_SHARE = 0.25  # cores that others may use before a window is dropped
DECODER = {"hidden": 512, "head_dim": 64, "heads": 4, "kv_heads": 4, "layers": 4, "mlp": 2048}


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


# Tokens prefilled -------------------------------------------------------------------------------


def prefilled(bench: Bench) -> Iterator[Line]:
    """Every scenario on both kinds of model: tokens prefilled beside the fewest possible."""
    for name in SCENARIOS:
        counts = [count_tokens(bench, name, label) for label in KINDS]
        yield prefilled_line(name, [ours for ours, _ in counts], [theirs for _, theirs in counts])
    yield cancelled_line(bench)


def count_tokens(bench: Bench, name: str, label: str) -> list[Count]:
    """One scenario on one kind of model: ours, theirs."""
    folder = bench.model(KINDS[label], **AGENT)
    tokenizer = tokenizer_of(folder)
    counts = []
    with both_servers(folder, bench.scratch) as servers:
        for server in servers:
            bench.say(f"{name}, {label}, {server.name}")
            client = Client(server, tokenizer, rewindable=label == "dense", n_out=200)
            SCENARIOS[name](client, Words(tokenizer, len(name)))
            counts.append(client.count)
    return counts


def prefilled_line(name: str, ours: list[Count], theirs: list[Count]) -> Line:
    return Line(
        f"prompt tokens prefilled / fewest, dense; hybrid: {name}",
        "; ".join(map(count_text, ours)),
        "; ".join(map(count_text, theirs)),
        "<= 1.02",
        met=max(count.ratio for count in ours) <= 1.02,
        values={"ours": list(map(asdict, ours)), "theirs": list(map(asdict, theirs))},
    )


def count_text(count: Count) -> str:
    return f"{count.ratio:.3f} ({count.prefilled:,} of {count.prompt:,})"


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
                whole = server.ask(chat(words.history(n_tokens), n_out=2)).ttft
                body = chat(words.history(n_tokens), n_out=2)
                server.ask(body, give_up_after=whole / 2)
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
        plain, words = Plain(folder), Words(tokenizer_of(folder), 3)
        with both_servers(folder, bench.scratch) as servers:
            for depth in depths:
                bench.say(f"{label}: first token at {depth:,} tokens")
                yield from first_token_lines(bench, plain, servers, words.history(depth), label)


def first_token_lines(
    bench: Bench, plain: Plain, servers: list[Server], history: list[Any], label: str
) -> Iterator[Line]:
    words = Words(plain.tokenizer, len(history))
    talks = [list(history) for _ in servers]
    cold = [server.ask(chat(talk, n_out=8)) for server, talk in zip(servers, talks, strict=True)]
    last, warm, floors = list(cold), [[], []], []
    plain.extend_to(cold[0].n_prompt)
    for _ in range(bench.times(9)):
        question = {"role": "user", "content": words.text(24)}
        for i, server in enumerate(servers):
            talks[i] += [last[i].message, question]
            last[i] = server.ask(chat(talks[i], n_out=8))
            warm[i].append(last[i].ttft)
        floors.append(plain.floor(last[0].prefilled))
    depth = round(cold[0].n_prompt / 1000)
    values = {"warm": warm, "cold": [r.ttft for r in cold], "floors": floors}
    values["new_tokens"] = [r.prefilled for r in last]
    quotient = ratios(warm[0], floors)
    theirs = statistics.median(ratios(warm[1], floors))
    ready = statistics.median(floors) * 1e3
    yield Line(
        f"warm first token at {depth}k, {label} / floor ({ready:.0f} ms)",
        f"{spread(quotient)} ({statistics.median(warm[0]) * 1e3:.0f} ms)",
        f"{theirs:.2f} ({statistics.median(warm[1]) * 1e3:.0f} ms)",
        "<= 1.2" if depth >= 16 else "",
        met=statistics.median(quotient) <= 1.2 if depth >= 16 else None,
        values=values,
    )
    shares = [statistics.median(w) / c.ttft for w, c in zip(warm, cold, strict=True)]
    yield Line(
        f"warm / cold first token at {depth}k, {label}",
        f"1/{1 / shares[0]:.0f} (cold {cold[0].ttft:.2f} s)",
        f"1/{1 / shares[1]:.0f} (cold {cold[1].ttft:.2f} s)",
        "<= 1/100" if depth == 16 else "",
        met=shares[0] <= 0.01 if depth == 16 else None,
    )


# Decode -----------------------------------------------------------------------------------------


def decode(bench: Bench) -> Iterator[Line]:
    """One stream against mlx-lm without a server; eight at once against mlx-lm's server."""
    for label, kind in KINDS.items():
        for size, fields in (("large", DECODER), ("tiny", {})):
            folder = bench.model(kind, **fields)
            bench.say(f"{label}, {size}: decode speed")
            plain = Plain(folder)
            with both_servers(folder, bench.scratch) as servers:
                yield from alone_lines(bench, plain, servers, f"{label}, {size} model")
                yield at_once_line(bench, plain, servers, f"{label}, {size} model")


def alone_lines(bench: Bench, plain: Plain, servers: list[Server], label: str) -> Iterator[Line]:
    words = Words(plain.tokenizer, 5)
    fields = endless(plain.tokenizer, 256)
    speeds: list[list[float]] = [[], [], []]
    for _ in range(bench.times(7)):
        messages = [{"role": "user", "content": words.text(200)}]
        for i, server in enumerate(servers):
            speeds[i].append(server.ask(chat(messages, n_out=0, **fields)).decode_speed)
        prompt = plain.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        speeds[2].append(plain.decode_speed(prompt, fields))
    step = 1e3 / statistics.median(speeds[2])
    ours, theirs = ratios(speeds[0], speeds[2]), ratios(speeds[1], speeds[2])
    yield Line(
        f"decode, one request / mlx_lm.generate, {label} ({step:.1f} ms a token)",
        spread(ours, "{:.3f}"),
        spread(theirs, "{:.3f}"),
        ">= 0.98",
        met=statistics.median(ours) >= 0.98,
        values={"speeds": speeds},
    )


def at_once_line(bench: Bench, plain: Plain, servers: list[Server], label: str) -> Line:
    words = Words(plain.tokenizer, 6)
    fields = endless(plain.tokenizer, 128)
    speeds: list[list[float]] = [[], []]
    for _ in range(bench.times(5)):
        bodies = [
            chat([{"role": "user", "content": words.text(150)}], n_out=0, **fields)
            for _ in range(8)
        ]
        for i, server in enumerate(servers):
            speeds[i].append(aggregate_speed(ask_together(server, bodies)))
    quotient = ratios(speeds[0], speeds[1])
    return Line(
        f"decode, eight at once, tokens/s, {label}",
        f"{statistics.median(speeds[0]):.0f}; {spread(quotient)} x",
        f"{statistics.median(speeds[1]):.0f}",
        ">= theirs",
        met=statistics.median(quotient) >= 1.0,
        values={"speeds": speeds},
    )


def ask_together(server: Server, bodies: list[Any]) -> list[Reply]:
    replies: list[Reply] = []
    threads = [
        threading.Thread(target=lambda body=body: replies.append(server.ask(body)))
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def aggregate_speed(replies: list[Reply]) -> float:
    """Tokens of all, from the first piece of text anywhere to the last."""
    began = min(reply.sent + reply.stamps[0] for reply in replies)
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
            talk = words.history(depth)
            last = server.ask(chat(talk, n_out=8))
            n_before = len(costs_in(log))
            for _ in range(bench.times(15)):
                talk += [last.message, {"role": "user", "content": words.text(24)}]
                last = server.ask(chat(talk, n_out=8))
            costs = costs_in(log)[n_before:]
        beside = [1e3 * (cost["all"] - cost["model"]) for cost in costs]
        yield Line(
            f"server overhead, warm request, {depth // 1000}k of history, 8 tokens out",
            f"{spread(beside, '{:.1f}')} ms",
            bar="<= 25 ms",
            met=statistics.median(beside) <= 25,
            values={"costs": costs},
        )


def memory(bench: Bench) -> Iterator[Line]:
    """Peaks inside our process, then both servers' resident memory with eight branches."""
    n_tokens = 8000 if bench.quick else 32000
    bench.say("peak memory inside our process")
    bars = {"warm": 1.15, "warm_and_three": 1.3}
    words = {"warm": f"one warm {n_tokens // 1000}k request / its own KV"}
    words["warm_and_three"] = f"{n_tokens // 1000}k and three short requests / unique KV"
    found = run_inside("memory", bench.model("qwen3", **MUCH_KV), n_tokens)
    for name, bar in bars.items():
        ratio = found[name]["peak"] / found[name]["kv"]
        what = f"peak bytes beside the weights, {words[name]}"
        mb = found[name]["kv"] / 1e6
        yield Line(what, f"{ratio:.2f} x {mb:.0f} MB", bar=f"<= {bar}", met=ratio <= bar)
    eight = found["branches"]
    ratio = eight["at_rest"] / eight["kv"]
    what = f"KV at rest, 8 branches of one {eight['prefix']:,}-token prefix / unique"
    yield Line(what, f"{ratio:.3f}", bar="<= 1.1", met=ratio <= 1.1, values=found)
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
            talks = [[head, {"role": "user", "content": words.text(300)}] for _ in range(8)]
            with peak_memory(server.pid) as seen:
                ask_together(server, [chat(talk, n_out=48) for talk in talks])
            grown.append(list(seen))
    ours, theirs = ((most - before) / 1e6 for before, most in grown)
    return Line(
        f"resident memory added by 8 branches of a warm {n_prefix // 1000}k prefix, at the peak",
        f"{ours:.0f} MB",
        f"{theirs:.0f} MB",
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


def run_inside(program: str, folder: Path, *numbers: int) -> Any:
    command = [sys.executable, str(HERE / "inside.py"), program, str(folder), *map(str, numbers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@contextmanager
def timed_server(folder: Path, scratch: Path) -> Iterator[tuple[Server, Path]]:
    """Our server in a process that says what each request cost, and the file where it says so."""
    port = free_port()
    command = [sys.executable, str(HERE / "inside.py"), "serve"]
    with running(OURS, command, port, scratch, our_environment(folder, port, scratch)) as server:
        yield server, scratch / f"{OURS}-{port}.log"


def costs_in(log: Path) -> list[dict[str, float]]:
    """What `inside.py serve` has written; the last request's line comes just after its answer."""
    time.sleep(0.2)
    lines = log.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"all"')]


# One client in the way of another ---------------------------------------------------------------


def tokenising(bench: Bench) -> Iterator[Line]:
    """A stream goes on while another connection sends 64k tokens that are rendered and refused."""
    n_tokens = 16000 if bench.quick else 64000
    folder = bench.model("qwen3", **DECODER)
    tokenizer = tokenizer_of(folder)
    words = Words(tokenizer, 23)
    bodies = [chat(words.history(n_tokens), n_out=1) for _ in range(bench.times(18))]
    hello = [{"role": "user", "content": words.text(100)}]
    long = chat(hello, n_out=0, **endless(tokenizer, 200 * len(bodies)))
    bench.say("a stream beside a long prompt that is only tokenised")
    limit = n_tokens // 2
    with our_server(folder, bench.scratch, max_kv_size=limit) as server:
        windows: list[Window] = []
        [reply] = while_asking(server, [long], lambda: refusals(server, bodies, windows))
    stamps = [reply.sent + stamp for stamp in reply.stamps]
    quiet = [w for w in windows if w.others < QUIET_SHARE] or windows
    # Each refusal with the second before it: pairs of neighbours.
    beside = [speed_between(stamps, w.began, w.ended) for w in quiet]
    alone = [speed_between(stamps, w.began - 1, w.began) for w in quiet]
    quotient = ratios(beside, alone)
    took = statistics.median(w.ended - w.began for w in quiet)
    yield Line(
        f"a stream's speed while {n_tokens // 1000}k tokens are rendered and tokenised "
        f"({took * 1e3:.0f} ms) / alone",
        spread(quotient),
        bar=">= 0.8",
        met=statistics.median(quotient) >= 0.8,
        values={"beside": beside, "alone": alone, "windows": [asdict(w) for w in windows]},
    )


@dataclass
class Window:
    """The time one refused request took, and how many cores other programs used around it."""

    began: float
    ended: float
    others: float


def refusals(server: Server, bodies: list[Any], windows: list[Window]) -> None:
    time.sleep(1)
    for body in bodies:
        before, since = seconds_of_others(server.pid), time.perf_counter()
        time.sleep(1.2)
        began = time.perf_counter()
        status, seconds = server.status_of(body)
        assert status == 400, f"the long prompt was to be refused, not {status}"
        others = seconds_of_others(server.pid) - before
        share = others / (time.perf_counter() - since)
        windows.append(Window(began, began + seconds, share))


def while_asking(server: Server, bodies: list[Any], action: Callable[[], None]) -> list[Reply]:
    """Run `action` while the server answers; the replies."""
    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.extend(ask_together(server, bodies)))
    asking.start()
    action()
    asking.join()
    return replies


def speed_between(stamps: list[float], began: float, ended: float) -> float:
    """Pieces of text per second in a window, part intervals counted in part."""
    at = np.interp([began, ended], stamps, np.arange(len(stamps)))
    return float(at[1] - at[0]) / (ended - began)


def short_behind_long(bench: Bench) -> Iterator[Line]:
    """A short cold request while another is prefilling a long prompt."""
    folder = bench.model("qwen3", **DECODER)
    tokenizer = tokenizer_of(folder)
    n_tokens = 6000 if bench.quick else 9000
    quotients: list[list[float]] = []
    seconds: list[list[float]] = []
    with both_servers(folder, bench.scratch) as servers:
        for server in servers:
            bench.say(f"a short request behind a long prefill, {server.name}")
            words = Words(tokenizer, 29)
            alone, behind = short_times(bench, server, words, n_tokens)
            quotients.append([t / statistics.median(alone) for t in behind])
            seconds.append([statistics.median(alone), statistics.median(behind)])
    ours, theirs = quotients
    yield Line(
        f"a short request (300 + 64 tokens, {seconds[0][0]:.2f} s alone) behind a "
        f"{n_tokens // 1000}k prefill / alone",
        spread(ours),
        spread(theirs),
        "<= 2",
        met=statistics.median(ours) <= 2,
        values={"ratios": quotients, "seconds": seconds},
    )


def short_times(
    bench: Bench, server: Server, words: Words, n_tokens: int
) -> tuple[list[float], list[float]]:
    """Seconds of short requests: alone, and sent one after the other behind a long one."""
    alone: list[float] = []
    behind: list[float] = []

    def send_some() -> None:
        for _ in range(3):
            time.sleep(0.7 + 0.6 * words.random.random())  # anywhere in a prefill slice
            behind.append(short_request(server, words))

    for _ in range(bench.times(4)):
        alone += [short_request(server, words) for _ in range(3)]
        while_asking(server, [chat(words.history(n_tokens), n_out=1)], send_some)
    return alone, behind


def short_request(server: Server, words: Words) -> float:
    """Seconds for 300 cold tokens and 64 generated ones."""
    messages = [{"role": "system", "content": words.text(20)}]
    messages.append({"role": "user", "content": words.text(280)})
    body = chat(messages, n_out=0, **endless(words.tokenizer, 64))
    del body["tools"]
    return server.ask(body).total


ALL: Mapping[str, Callable[[Bench], Iterator[Line]]] = {
    "prefilled": prefilled,
    "first_token": first_token,
    "decode": decode,
    "overhead": overhead,
    "memory": memory,
    "checkpoints": checkpoints,
    "tokenising": tokenising,
    "short": short_behind_long,
}
