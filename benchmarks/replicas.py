"""Several servers behind one LiteLLM (PROXY_REPLICAS): prefilled tokens, and speed.

    .venv/bin/python benchmarks/replicas.py [--servers 1 2 3] [--sessions 40] [--turns 5]
            [--rounds 3] [--only tokens throughput overhead]

tokens      interleaved sessions of agents at port 4000: prefilled / fewest. The fewest are those of
            one server, and for each further one the instructions, which all sessions share; in
            brackets the ratio to one server's alone. With ids of sessions and without; as the
            clients dress them
throughput  the same sessions, eight at a time: requests a second, over those of the first of
            --servers. All servers run, and each round takes them in turns
overhead    what LiteLLM adds to the first token (benchmarks/proxy.py), in turns likewise

Small models, on one machine: its cores are shared by all servers.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from agent_workload import Client, Conversation, Count, Words
from client_workload import COSTUMES, PLAIN, Costume
from compared_servers import Server, free_port, our_server
from project_files import make_tiny_model
from proxy import first_token_ms
from transformers import AutoTokenizer

HEAD_TOKENS = 1_500  # of the instructions, which all sessions share
N_OUT = 160  # tokens of a reply, which ends before
N_AT_ONCE = 8
START_SECONDS = 120.0
KINDS = ("tokens", "throughput", "overhead")


@dataclass(frozen=True)
class Farm:
    """Servers, and the port before them."""

    ports: Sequence[int]
    proxy_port: int

    def forget(self) -> None:
        for port in self.ports:
            call(port, "DELETE", "/v1/cache")

    def prompts(self) -> list[int]:
        """How many requests each server has had."""
        return [
            call(port, "GET", "/v1/status")["totals"]["requests"] for port in self.ports
        ]


def call(port: int, method: str, path: str, body: object = None) -> Any:
    """The body of an answer. Raises OSError while nobody listens."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        headers = {"Content-Type": "application/json"}
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise ConnectionError(f"{response.status}: {text[:300]!r}")
        return json.loads(text)


def wait_until_up(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            call(port, "GET", "/v1/models")
            return
        time.sleep(0.2)
    raise TimeoutError("LiteLLM does not start")


@contextmanager
def farm_of(n_servers: int, model: Path, scratch: Path) -> Iterator[Farm]:
    """So many servers; the first one runs LiteLLM."""
    with ExitStack() as stack:
        others = [
            stack.enter_context(our_server(model, scratch)).port
            for _ in range(n_servers - 1)
        ]
        proxy_port = free_port()
        settings = {
            "enable_proxy": "true",
            "proxy_port": proxy_port,
            "proxy_replicas": ",".join(f"http://127.0.0.1:{port}" for port in others),
        }
        first = stack.enter_context(our_server(model, scratch, **settings))
        wait_until_up(proxy_port)
        time.sleep(3)  # the gate has asked all servers how they are
        yield Farm([first.port, *others], proxy_port)


class Sessions:
    """Agents, whose tokens are counted together."""

    def __init__(
        self,
        port: int,
        tokenizer: Any,
        options: argparse.Namespace,
        *,
        seed: int,
        look: tuple[bool, Costume] = (True, PLAIN),
    ) -> None:
        """`look`: whether they send an id, and how they dress what they send."""
        has_ids, costume = look
        head = Words(tokenizer, seed).text(HEAD_TOKENS)
        self.count = Count()
        self.talks: list[Conversation] = []
        ledger = None
        for number in range(options.sessions):
            headers = {"x-session-id": f"session-{seed}-{number}"} if has_ids else {}
            server = Server("LiteLLM", port, model="any", headers=headers)
            client = Client(server, tokenizer, rewindable=True, n_out=N_OUT)
            ledger = ledger or client._ledger
            client._ledger = ledger
            client.count = self.count
            client.costume = costume
            words = Words(tokenizer, seed * 1_000 + number)
            self.talks.append(Conversation(client, words, head=head))
        assert ledger is not None
        first, second, *_ = [
            ledger.render(talk.messages, is_prompt=True) for talk in self.talks[:2]
        ]
        n_least = min(len(first), len(second))
        different = np.flatnonzero(first[:n_least] != second[:n_least])
        self.n_shared = int(different[0])  # tokens that all sessions begin with

    def interleave(self, n_turns: int, seed: int) -> Count:
        """A turn of each, in another order each time."""
        order = random.Random(seed)
        for _ in range(n_turns):
            for talk in order.sample(self.talks, len(self.talks)):
                talk.turn()
        return self.count


def measure_tokens(
    farm: Farm, tokenizer: Any, options: argparse.Namespace, seed: int
) -> None:
    rows: list[tuple[str, bool, Costume]] = [
        ("with an id", True, PLAIN),
        ("without an id", False, PLAIN),
        *(
            (f"without an id, {name}", False, costume)
            for name, costume in COSTUMES.items()
        ),
    ]
    for number, (name, has_ids, costume) in enumerate(rows):
        farm.forget()
        before = farm.prompts()
        sessions = Sessions(
            farm.proxy_port,
            tokenizer,
            options,
            seed=seed + number,
            look=(has_ids, costume),
        )
        count = sessions.interleave(options.turns, seed)
        fewest = count.fewest + (len(farm.ports) - 1) * sessions.n_shared
        shares = [after - n for after, n in zip(farm.prompts(), before, strict=True)]
        print(
            f"{len(farm.ports)} server(s)  {count.prefilled / fewest:.3f}"
            f" ({count.ratio:.3f})"
            f"  {count.prefilled:,} of {count.prompt:,}, fewest {fewest:,}"
            f"  requests {shares}  {name}",
            flush=True,
        )


def measure_throughput(
    farms: Sequence[Farm], tokenizer: Any, options: argparse.Namespace
) -> None:
    ratios: list[list[float]] = [[] for _ in farms]
    for number in range(options.rounds):
        speeds = [
            requests_per_second(farm, tokenizer, options, 900 + number)
            for farm in farms
        ]
        for farm, speed, farm_ratios in zip(farms, speeds, ratios, strict=True):
            farm_ratios.append(speed / speeds[0])
            print(
                f"{len(farm.ports)} server(s)  {speed:.2f} requests/s"
                f"  {farm_ratios[-1]:.2f}, median {statistics.median(farm_ratios):.2f}",
                flush=True,
            )


def requests_per_second(
    farm: Farm, tokenizer: Any, options: argparse.Namespace, seed: int
) -> float:
    """Of sessions that run at the same time."""
    farm.forget()
    sessions = Sessions(farm.proxy_port, tokenizer, options, seed=seed)
    began = time.perf_counter()
    with ThreadPoolExecutor(N_AT_ONCE) as pool:
        list(pool.map(lambda talk: talk.turn(options.turns), sessions.talks))
    return options.sessions * options.turns / (time.perf_counter() - began)


def measure_overhead(farms: Sequence[Farm], n_requests: int = 200) -> None:
    """Medians of what port 4000 adds to the first token of the server that runs it."""
    for farm in farms:
        farm.forget()
    added: list[list[float]] = [[] for _ in farms]
    for number in range(-5, n_requests):
        for farm, times in zip(farms, added, strict=True):
            direct = first_token_ms(farm.ports[0])
            through = first_token_ms(farm.proxy_port)
            if number >= 0:  # the first ones warm up
                times.append(through - direct)
    medians = [statistics.median(times) for times in added]
    for farm, median in zip(farms, medians, strict=True):
        print(
            f"{len(farm.ports)} server(s)  {median:.1f} ms added"
            f"  {median / medians[0]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()

    with TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        maker = make_tiny_model()
        model = scratch / "model"
        maker.make_model(model, maker.choose_recipe("qwen3", size="small"))
        tokenizer = AutoTokenizer.from_pretrained(model)
        for n_servers in options.servers if "tokens" in options.only else ():
            with farm_of(n_servers, model, scratch) as farm:
                measure_tokens(farm, tokenizer, options, 100 * n_servers)
        if options.only == ["tokens"]:
            return

        farms = [  # all servers are up at once
            stack.enter_context(farm_of(n_servers, model, scratch))
            for n_servers in options.servers
        ]
        if "throughput" in options.only:
            measure_throughput(farms, tokenizer, options)
        if "overhead" in options.only:
            measure_overhead(farms)


if __name__ == "__main__":
    main()
