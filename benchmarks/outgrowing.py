"""How many replicas a team of agents needs, and where affinity is not enough: a simulation.

    .venv/bin/python benchmarks/outgrowing.py [--agents 10 100 1000] [--markdown docs/outgrowing.md]

Agents work, think and wait; a router sends each request to a replica; a replica reads what it has
no KV of, writes a reply beside others, and keeps KV until its memory is full. Nothing is served:
time is simulated, so it takes a minute. Inputs are the constants below, each with its source;
--prefill-speed, --decode-speed, --batch-speed and --kv-tokens put in those of another machine
(`scripts/machine_report.py` measures them).

ROUTING
    random     any replica, each time
    affinity   a conversation stays where its first request went: the replica with the fewest
               conversations of the last ten minutes, as PROXY_REPLICAS has it
    files      the same, and what memory has no room for is read from the replica's own disk, as
               with CACHE_DISK=on
    shared     KV is shared between hosts, and each request goes where its first token is expected
               first: what engines with a common KV store and a router that knows it do
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import report

Routing = Literal["random", "affinity", "files", "shared"]
ROUTINGS: Final[tuple[Routing, ...]] = ("random", "affinity", "files", "shared")


# -- what was measured -------------------------------------------------------------------

# docs/benchmarks.md, "On an NVIDIA GPU": one H200, a model of the size of Qwen3 8B in bfloat16.
PREFILL_SPEED: Final = 47_600 / 3.95  # tokens a second, cold
FIRST_TOKEN_SECONDS: Final = 0.09  # of a message of some tokens, after 3,000 or 12,000
DECODE_SPEED: Final = 159.0  # tokens a second of one reply
# of eight at once together; of more, it is taken to be the same
BATCH_SPEED: Final = 443.0
BATCH: Final = 8
# start-llm.py, PREFILL POLICY: seconds of decoding for each second of prefill beside it.
DECODE_SHARE: Final = 2.0
# docs/benchmarks.md, "Packed KV": bytes with KV_BITS=8 by those of bfloat16.
PACKED_SHARE: Final = 0.53

# Arithmetic: Qwen3 8B has 36 layers of 8 KV heads of 128 numbers, keys and values, 2 bytes each.
KV_BYTES: Final = 36 * 8 * 128 * 2 * 2  # a token
# start-llm.py, KV_SHARE: of the H200's 141 GB, less 16.4 GB of weights.
KV_TOKENS: Final = int(0.55 * (141e9 - 16.4e9) / KV_BYTES)

# Characters of the first request of real clients with one line from the user, captured in November
# 2026, and the share of it that another session in the same workspace has, too (docs/clients.md
# names the clients). Four characters a token: an estimate.
CHARACTERS_A_TOKEN: Final = 4
FIRST_REQUESTS: Final = {
    "Claude Code": (49_880, 0.80),
    "OpenClaw": (46_359, 0.98),
    "Codex": (39_912, 0.995),
    "opencode": (31_030, 0.99),
    "PI": (5_836, 0.97),
}

# -- what is assumed ---------------------------------------------------------------------

STEPS: Final = 8  # requests of a turn, in the mean: calls of tools, and the answer
RESULT_TOKENS: Final = 800  # of a tool's result, in the mean
QUESTION_TOKENS: Final = 60  # of what a person writes
REPLY_TOKENS: Final = 150  # in the mean
TOOL_SECONDS: Final = 5.0  # in the mean, between a call and its result
PAUSE_SECONDS: Final = 180.0  # in the mean, until a person has read and asks again
# a conversation ends, or is compacted, at some of these
LAST_TOKENS: Final = (40_000, 120_000)
# a second, from the files of a replica: an NVMe drive, half of its speed
DISK_BYTES: Final = 3e9
NETWORK_BYTES: Final = 12.5e9  # a second, from the KV store to a replica: 100 Gbit/s
N_WORKSPACES: Final = 10  # agents of one client in one workspace begin alike

# What is enough: these shares of requests, and the mean over replies.
FIRST_TOKEN_LIMIT: Final = 3.0  # seconds, for 95 of 100 requests
STREAM_LIMIT: Final = 20.0  # tokens a second, mean of replies

RECENT_SECONDS: Final = 600.0  # in which the router counts a replica's conversations
TINY: Final = 1e-6  # of a token or a second: rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A replica's speeds and memory."""

    prefill_speed: float = PREFILL_SPEED
    decode_speed: float = DECODE_SPEED
    batch_speed: float = BATCH_SPEED
    kv_tokens: int = KV_TOKENS
    kv_bytes: float = KV_BYTES  # a token

    def stream_speed(self, n_streams: int) -> float:
        """Tokens a second of each of so many replies, on a line from one to eight."""
        place = min(n_streams - 1, BATCH - 1) / (BATCH - 1)
        total = self.decode_speed + place * (self.batch_speed - self.decode_speed)
        return total / n_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated."""

    agents: int
    replicas: int
    routing: Routing
    machine: Machine = Machine()
    seed: int = 1
    minutes: float = 30.0
    loses_replica: bool = False  # one ends in the middle, with its KV

    @property
    def warm_up(self) -> float:
        """Seconds whose requests are not counted."""
        return self.minutes * 60 / 3


type Head = tuple[str, int]  # a client and a workspace: prompts that begin alike
type Key = int | Head  # a conversation's number, or a head


@dataclass(slots=True)
class Conversation:
    """What an agent sends again and again."""

    number: int
    head: Head
    head_tokens: int
    tokens: int  # of the last prompt and its reply
    last_tokens: int  # it ends here
    home: int = -1  # the replica that affinity keeps it on
    asked: float = 0.0  # when it was heard of last
    n_stored: int = 0  # tokens of it in files or in the shared store


@dataclass(slots=True)
class Agent:
    """Who asks."""

    client: str
    workspace: int
    random: random.Random  # its own: it does the same whatever the replicas do
    talk: Conversation
    steps_left: int = 0  # of the turn


@dataclass(slots=True)
class Request:
    """One prompt and its reply."""

    agent: Agent
    arrived: float
    prompt_tokens: int
    reply_tokens: int
    is_first: bool  # of its conversation
    n_new: int  # tokens that nobody can have read before
    ready: float = 0.0  # when KV that is fetched is there
    n_cached: int = 0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True)
class Replica:
    """One server: a queue, one prefill at a time, replies side by side, and KV."""

    number: int
    machine: Machine
    # Tokens of heads, and of conversations after their heads; the oldest use first. A head
    # was used no earlier than what goes on from it.
    kv: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    n_kept: int = 0  # tokens in all
    running: set[Key] = field(default_factory=set)  # which are not evicted
    waiting: list[Request] = field(default_factory=list)
    prefilling: Request | None = None
    prefill_left: float = 0.0  # seconds, alone
    # Replies end by what each has been given so far: (given when it ends, number, request).
    replies: list[tuple[float, int, Request]] = field(default_factory=list)
    given: float = 0.0  # tokens to each reply, since the start
    now: float = 0.0
    version: int = 0  # of the event that is planned
    busy: float = 0.0  # seconds

    # -- time --------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Work until `now`, at the rates that hold since the last event."""
        seconds = now - self.now
        self.now = now
        if self.prefilling or self.replies:
            self.busy += seconds
        if self.prefilling:
            self.prefill_left -= seconds * self._prefill_rate()
        if self.replies:
            self.given += seconds * self._reply_rate()

    def next_event(self) -> float:
        """When a prefill or a reply ends, if nothing else happens."""
        times = []
        if self.prefilling:
            times.append(max(self.prefill_left, 0.0) / self._prefill_rate())
        if self.replies:
            left = max(self.replies[0][0] - self.given, 0.0)
            times.append(left / self._reply_rate())
        return self.now + min(times, default=math.inf)

    def _prefill_rate(self) -> float:
        return 1 / (1 + DECODE_SHARE) if self.replies else 1.0

    def _reply_rate(self) -> float:
        speed = self.machine.stream_speed(len(self.replies))
        return speed * DECODE_SHARE / (1 + DECODE_SHARE) if self.prefilling else speed

    # -- KV ----------------------------------------------------------------------------

    def cached_tokens(self, talk: Conversation) -> int:
        """How much of a conversation need not be read here."""
        return self.kv.get(talk.head, 0) + self.kv.get(talk.number, 0)

    def make_room(self, n_tokens: int) -> bool:
        """Evict what does not run, the oldest first. False: it is not enough."""
        limit = self.machine.kv_tokens - n_tokens
        if self.n_kept <= limit:
            return True
        for key in [key for key in self.kv if key not in self.running]:
            self.n_kept -= self.kv.pop(key)
            if self.n_kept <= limit:
                return True
        return False

    def keep(self, talk: Conversation, n_tokens: int) -> None:
        """KV of so many tokens of a conversation, used last."""
        own = {talk.number: n_tokens - talk.head_tokens, talk.head: talk.head_tokens}
        for key, n_own in own.items():
            self.n_kept += n_own - self.kv.pop(key, 0)
            self.kv[key] = n_own

    def expected_wait(self) -> float:
        """Seconds until a prefill that is asked for now can begin, about."""
        waiting = sum(
            (request.prompt_tokens - request.n_cached) / self.machine.prefill_speed
            for request in self.waiting
        )
        seconds = waiting + (self.prefill_left if self.prefilling else 0.0)
        return seconds / self._prefill_rate()


def draw_count(rng: random.Random, mean: float) -> int:
    """A count of some mean, at least 1; small ones are common, large ones are not."""
    return max(1, round(rng.expovariate(1 / mean)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case has shown, of the requests after the warm-up."""

    n_requests: int
    hit_rate: float  # prompt tokens that were not read, of all
    first_token: float  # seconds, 95 of 100
    stream_speed: float  # tokens a second, mean of replies
    misses: (
        float  # of requests that were not the first: those that read more than is new
    )
    busy: float  # of the seconds of all replicas, those with work

    @property
    def is_enough(self) -> bool:
        """Whether nobody waits too long."""
        is_soon = self.first_token <= FIRST_TOKEN_LIMIT
        return is_soon and self.stream_speed >= STREAM_LIMIT


class Simulation:
    """One case, from event to event."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._random = random.Random(case.seed)  # of the router
        self._numbers = itertools.count()
        self._order = itertools.count()  # events of the same time, as they were planned
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._talks: list[Conversation] = []  # that the router has heard of lately
        self._stored_heads: set[tuple[int, Head]] = set()  # by replica; shared: of 0
        self.replicas = [Replica(i, case.machine) for i in range(case.replicas)]
        self._alive = list(range(case.replicas))
        self.done: list[Request] = []

    # -- agents ------------------------------------------------------------------------

    def _join(self, number: int) -> Agent:
        """An agent, somewhere in a conversation."""
        clients = list(FIRST_REQUESTS)
        client = clients[number % len(clients)]
        workspace = number // len(clients) % N_WORKSPACES
        rng = random.Random(f"agent {self.case.seed} {number}")
        talk = self._begin(client, workspace, rng)
        talk.tokens = rng.randrange(talk.head_tokens, talk.last_tokens)
        return Agent(client, workspace, rng, talk)

    def _begin(self, client: str, workspace: int, rng: random.Random) -> Conversation:
        n_characters, share = FIRST_REQUESTS[client]
        n_tokens = n_characters // CHARACTERS_A_TOKEN
        return Conversation(
            number=next(self._numbers),
            head=(client, workspace),
            head_tokens=int(n_tokens * share),
            tokens=0,
            last_tokens=rng.randrange(*LAST_TOKENS),
        )

    def _ask(self, agent: Agent, now: float) -> None:
        """The next request of an agent."""
        if agent.talk.tokens >= agent.talk.last_tokens:
            agent.talk = self._begin(agent.client, agent.workspace, agent.random)
            agent.steps_left = 0
        talk = agent.talk
        if agent.steps_left:
            n_new = draw_count(agent.random, RESULT_TOKENS)
        else:
            agent.steps_left = draw_count(agent.random, STEPS)
            n_new = draw_count(agent.random, QUESTION_TOKENS)
        agent.steps_left -= 1

        is_first = talk.tokens == 0
        if is_first:
            n_characters, _ = FIRST_REQUESTS[agent.client]
            n_new += n_characters // CHARACTERS_A_TOKEN
        request = Request(
            agent=agent,
            arrived=now,
            prompt_tokens=talk.tokens + n_new,
            reply_tokens=draw_count(agent.random, REPLY_TOKENS),
            is_first=is_first,
            n_new=n_new,
        )
        self._arrive(request, now)

    # -- routing -----------------------------------------------------------------------

    def _route(self, request: Request, now: float) -> Replica:
        talk = request.agent.talk
        routing = self.case.routing
        if routing == "shared":
            waits = {
                number: self._expected_first_token(request, self.replicas[number])
                for number in self._candidates()
            }
            chosen = min(waits, key=waits.__getitem__)
        elif routing == "random":
            chosen = self._random.choice(self._alive)
        else:
            if talk.home not in self._alive:
                talk.home = self._emptiest(now)
                talk.n_stored = 0  # its files are elsewhere
                self._talks.append(talk)
            chosen = talk.home
        talk.asked = now
        return self.replicas[chosen]

    def _emptiest(self, now: float) -> int:
        """The replica with the fewest conversations of late."""
        self._talks = [t for t in self._talks if t.asked > now - RECENT_SECONDS]
        counts = Counter(talk.home for talk in self._talks)
        fewest = min(counts[number] for number in self._alive)
        numbers = [number for number in self._alive if counts[number] == fewest]
        return self._random.choice(numbers)

    def _candidates(self) -> Sequence[int]:
        """All replicas, or sixteen of many: a router need not ask each."""
        if len(self._alive) <= 16:
            return self._alive
        return self._random.sample(self._alive, 16)

    def _expected_first_token(self, request: Request, replica: Replica) -> float:
        talk = request.agent.talk
        n_cached = max(replica.cached_tokens(talk), self._stored_tokens(talk, replica))
        read = (request.prompt_tokens - n_cached) / self.case.machine.prefill_speed
        fetch = self._fetch_seconds(talk, replica)
        return max(fetch, replica.expected_wait()) + read

    def _stored_tokens(self, talk: Conversation, replica: Replica) -> int:
        """Of a conversation, what this replica can fetch: its head included."""
        routing = self.case.routing
        if routing not in ("files", "shared"):
            return 0
        place = replica.number if routing == "files" else 0
        head = talk.head_tokens if (place, talk.head) in self._stored_heads else 0
        return max(talk.n_stored, head)

    def _fetch_seconds(self, talk: Conversation, replica: Replica) -> float:
        n_here = replica.cached_tokens(talk)
        n_fetched = max(0, self._stored_tokens(talk, replica) - n_here)
        speed = NETWORK_BYTES if self.case.routing == "shared" else DISK_BYTES
        return n_fetched * self.case.machine.kv_bytes / speed

    # -- events ------------------------------------------------------------------------

    def run(self) -> Outcome:
        """All of it."""
        case = self.case
        end = case.minutes * 60
        for number in range(case.agents):
            agent = self._join(number)
            start = agent.random.uniform(0, PAUSE_SECONDS)
            self._plan(start, partial(self._ask, agent))
        if case.loses_replica:
            self._plan((case.warm_up + end) / 2, self._lose_one)

        now = 0.0
        while self._events and now <= end:
            now, _, action = heapq.heappop(self._events)
            action(now)
        return self._outcome(end)

    def _plan(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _arrive(self, request: Request, now: float) -> None:
        replica = self._route(request, now)
        talk = request.agent.talk
        n_here = replica.cached_tokens(talk)
        # Both may be otherwise when it begins; until then, the router goes by them.
        request.n_cached = min(n_here, request.prompt_tokens - 1)
        request.ready = now + self._fetch_seconds(talk, replica)
        replica.waiting.append(request)
        self._work(replica, now)

    def _go_on(self, replica: Replica, version: int, now: float) -> None:
        """A planned event, if nothing has come between."""
        if version == replica.version:
            self._work(replica, now)

    def _work(self, replica: Replica, now: float) -> None:
        """End what has ended, begin what can begin, and plan the next event."""
        replica.advance(now)
        if replica.prefilling and replica.prefill_left <= TINY:
            self._end_prefill(replica, replica.prefilling, now)
        while replica.replies and replica.replies[0][0] <= replica.given + TINY:
            _, _, request = heapq.heappop(replica.replies)
            self._end_reply(replica, request, now)
        if replica.prefilling is None:
            self._begin_prefill(replica, now)

        replica.version += 1
        when = replica.next_event()
        if replica.prefilling is None:
            fetched = [r.ready for r in replica.waiting if r.ready > now]
            when = min([when, *fetched])
        if when < math.inf:
            self._plan(when, partial(self._go_on, replica, replica.version))

    def _begin_prefill(self, replica: Replica, now: float) -> None:
        """The first that waits, whose KV is there and for which there is room."""
        for place, request in enumerate(replica.waiting):
            if request.ready > now:
                continue
            talk = request.agent.talk
            n_here = replica.cached_tokens(talk)
            n_total = request.prompt_tokens + request.reply_tokens
            replica.running |= {talk.number, talk.head}
            has_room = replica.make_room(n_total - n_here)
            replica.running.discard(talk.head)
            if not has_room:
                replica.running.discard(talk.number)
                return
            n_cached = max(n_here, self._stored_tokens(talk, replica))
            request.n_cached = min(n_cached, request.prompt_tokens - 1)
            replica.keep(talk, n_total)
            n_read = request.prompt_tokens - request.n_cached
            replica.prefilling = request
            replica.prefill_left = (
                FIRST_TOKEN_SECONDS + n_read / self.case.machine.prefill_speed
            )
            del replica.waiting[place]
            return

    def _end_prefill(self, replica: Replica, request: Request, now: float) -> None:
        replica.prefilling = None
        request.first_token = now
        entry = (replica.given + request.reply_tokens, next(self._order), request)
        heapq.heappush(replica.replies, entry)

    def _end_reply(self, replica: Replica, request: Request, now: float) -> None:
        agent = request.agent
        talk = agent.talk
        talk.tokens = request.prompt_tokens + request.reply_tokens
        talk.n_stored = talk.tokens
        place = replica.number if self.case.routing == "files" else 0
        self._stored_heads.add((place, talk.head))
        replica.running.discard(talk.number)
        request.finished = now
        self.done.append(request)
        mean = TOOL_SECONDS if agent.steps_left else PAUSE_SECONDS
        seconds = agent.random.expovariate(1 / mean)
        self._plan(now + seconds, partial(self._ask, agent))

    def _lose_one(self, now: float) -> None:
        """A replica ends, and its KV; clients send again what it had not answered."""
        if len(self._alive) == 1:
            return
        replica = self.replicas[self._alive.pop(0)]
        replica.advance(now)
        replica.version += 1  # nothing that was planned happens
        lost = [*replica.waiting, *(request for _, _, request in replica.replies)]
        lost += [replica.prefilling] if replica.prefilling else []
        for request in lost:
            self._arrive(request, now)

    def _outcome(self, end: float) -> Outcome:
        counted = [r for r in self.done if r.arrived >= self.case.warm_up]
        speeds = [
            request.reply_tokens / (request.finished - request.first_token)
            for request in counted
        ]
        # Who still waits at the end has waited so long, at least.
        waits = [request.first_token - request.arrived for request in counted]
        for replica in self.replicas:
            waits += [end - request.arrived for request in replica.waiting]
        waits.sort()
        followers = [request for request in counted if not request.is_first]
        n_missed = sum(r.prompt_tokens - r.n_cached > r.n_new for r in followers)
        n_prompt = sum(request.prompt_tokens for request in counted)
        return Outcome(
            n_requests=len(counted),
            hit_rate=sum(request.n_cached for request in counted) / n_prompt,
            first_token=waits[int(0.95 * (len(waits) - 1))],
            stream_speed=statistics.mean(speeds),
            misses=n_missed / len(followers),
            busy=statistics.mean(replica.busy for replica in self.replicas) / end,
        )


def simulate(case: Case) -> Outcome:
    """What a case shows."""
    return Simulation(case).run()


def minutes_for(n_agents: int) -> float:
    """As long as some thousand requests take."""
    return 10 + 3_000 / n_agents


def count_replicas(case: Case) -> tuple[int, Outcome]:
    """The fewest replicas that are enough, to a twentieth, and what they show.

    Where one for each agent is not enough: as many as agents.
    """
    too_few = 0
    enough = max(1, case.agents // 50)
    outcome = simulate(replace(case, replicas=enough))
    while not outcome.is_enough and enough < case.agents:
        too_few = enough
        enough = min(2 * enough, case.agents)
        outcome = simulate(replace(case, replicas=enough))
    if not outcome.is_enough:
        return enough, outcome
    while enough - too_few > max(1, enough // 20):
        middle = (too_few + enough) // 2
        tried = simulate(replace(case, replicas=middle))
        if tried.is_enough:
            enough, outcome = middle, tried
        else:
            too_few = middle
    return enough, outcome


# -- tables ------------------------------------------------------------------------------

TEAM_HEADINGS: Final = (
    "agents",
    "routing",
    "replicas",
    "agents a replica",
    "prompt tokens reused",
    "first token, 95 of 100",
    "tokens/s of a reply",
)
CHANGE_HEADINGS: Final = (
    "tokens reused; first token of 95 of 100",
    "affinity",
    "files",
    "shared",
)


def team_rows(
    agents: Sequence[int], machine: Machine
) -> tuple[list[tuple[str, ...]], dict[tuple[int, Routing], int]]:
    """How many replicas each team needs, by the way that its requests are routed."""
    rows = []
    counts: dict[tuple[int, Routing], int] = {}
    for n_agents in agents:
        for routing in ROUTINGS:
            case = Case(
                agents=n_agents,
                replicas=1,
                routing=routing,
                machine=machine,
                minutes=minutes_for(n_agents),
            )
            n_replicas, outcome = count_replicas(case)
            counts[n_agents, routing] = n_replicas
            share = f"{n_agents / n_replicas:.0f}"
            row = (
                f"{n_agents:,}",
                routing,
                f"{n_replicas:,}" if outcome.is_enough else "one each: too few",
                share,
                f"{outcome.hit_rate:.1%}",
                f"{outcome.first_token:.1f} s",
                f"{outcome.stream_speed:.0f}",
            )
            rows.append(row)
            print(*row, sep="  ", flush=True)
    return rows, counts


def change_rows(
    n_agents: int, n_replicas: int, machine: Machine
) -> list[tuple[str, ...]]:
    """What becomes of a team when something changes."""
    packed = replace(
        machine,
        kv_tokens=int(machine.kv_tokens / PACKED_SHARE),
        kv_bytes=machine.kv_bytes * PACKED_SHARE,
    )
    half = replace(machine, kv_tokens=machine.kv_tokens // 2)
    base = Case(
        agents=n_agents,
        replicas=n_replicas,
        routing="affinity",
        machine=machine,
        minutes=minutes_for(n_agents),
    )
    changes = {
        f"{n_agents} agents, {n_replicas} replicas": base,
        "with `KV_BITS=8`": replace(base, machine=packed),
        "with half of the memory": replace(base, machine=half),
        "one replica ends, with its KV": replace(base, loses_replica=True),
        "half of the replicas": replace(base, replicas=math.ceil(n_replicas / 2)),
    }
    rows = []
    for name, case in changes.items():
        cells = [name]
        for routing in ROUTINGS[1:]:
            outcome = simulate(replace(case, routing=routing))
            cells.append(f"{outcome.hit_rate:.1%}; {outcome.first_token:.1f} s")
        rows.append(tuple(cells))
        print(*cells, sep="  ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--prefill-speed", type=float, default=PREFILL_SPEED)
    parser.add_argument("--decode-speed", type=float, default=DECODE_SPEED)
    parser.add_argument("--batch-speed", type=float, default=BATCH_SPEED)
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS)
    parser.add_argument("--markdown", type=Path, metavar="DOCUMENT")
    options = parser.parse_args()
    if options.kv_tokens < 2 * LAST_TOKENS[1]:
        parser.error("--kv-tokens must hold two of the longest conversations")
    machine = Machine(
        prefill_speed=options.prefill_speed,
        decode_speed=options.decode_speed,
        batch_speed=options.batch_speed,
        kv_tokens=options.kv_tokens,
    )

    began = time.process_time()
    teams, counts = team_rows(options.agents, machine)
    middle = options.agents[len(options.agents) // 2]
    changes = change_rows(middle, counts[middle, "affinity"], machine)
    seconds = time.process_time() - began
    print(f"{seconds:.0f} s of a processor")
    if options.markdown:
        command = "python benchmarks/outgrowing.py"
        about = f"Simulated in {seconds:.0f} s of a processor with `{command}`."
        table = report.markdown(TEAM_HEADINGS, teams, about)
        report.write_into(options.markdown, "agents", table)
        table = report.markdown(CHANGE_HEADINGS, changes, about)
        report.write_into(options.markdown, "changes", table)


if __name__ == "__main__":
    main()
