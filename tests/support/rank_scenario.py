"""One rank of a scenario, for test_cluster.py: rank_scenario.py FOLDER SEED REPORT.

Rank 0 submits requests at random moments: they share prefixes, go on from each other, batch,
are cancelled and evicted. Then it asks for each finished reply once more, without a cache. Both
ranks write what they have seen: the log-probabilities of each token, and all that they keep,
before each step.
"""

import hashlib
import json
import os
import random
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import forked_libraries  # noqa: F401 - loads start_llm
import numpy as np
import start_llm as s
from engine_fixture import GREEDY, words

FAULT = os.environ.get("PLANTED_FAULT", "")  # of rank 1
N_ROUNDS = int(os.environ.get("N_ROUNDS", "4"))


class Recording:
    """What a rank has seen."""

    def __init__(self) -> None:
        self.logprobs = defaultdict(list)  # by request id
        self.ids = defaultdict(list)
        self.steps = []  # a digest of all that is kept, before each step
        add_token, figures = s.RunningRequest.add_token, s.Scheduler.figures

        def record_token(row, token, *, logprobs):
            add_token(row, token, logprobs=logprobs)
            name = row.request.request_id
            self.logprobs[name].append(np.array(logprobs))
            self.ids[name].append(row.output_ids[-1])

        def record_figures(scheduler):
            self.steps.append(digest_of(scheduler))
            return [*figures(scheduler), self.steps[-1]]

        s.RunningRequest.add_token = record_token
        s.Scheduler.figures = record_figures

    def difference(self, name, index):
        """Of the last log-probabilities of a reply, to a run without a cache."""
        warm, cold = self.logprobs[name][index], self.logprobs[f"cold {name}"][0]
        is_allowed = np.isfinite(cold)
        assert (np.isfinite(warm) == is_allowed).all()
        return float(np.abs(warm[is_allowed] - cold[is_allowed]).max())

    def digest(self, name):
        return hashlib.sha256(np.array(self.logprobs[name]).tobytes()).hexdigest()[:16]


def digest_of(scheduler):
    """Of all entries, requests and accounts: what a later step can depend on."""
    entries = [
        [
            *(e.entry_id, e.parent and e.parent.entry_id, e.start, e.end, e.nbytes),
            *(e.n_uses, e.last_used, sorted(e.checkpoints), e.owner, e.is_running),
            e.key.tokens[: e.end].tobytes(),
        ]
        for e in scheduler.cache.entries
    ]
    running = [
        [
            *(r.request.request_id, r.num_computed_tokens, r.output_ids),
            *(r.prefill_speed, r.slice_ends, sorted(r.awaited_ends)),
            *(r.began_at, r.handle.times),
        ]
        for r in scheduler.running
    ]
    waiting = [(h.request.request_id, h.times) for h in scheduler.waiting]
    policy = scheduler.policy
    accounts = (policy.decode_debt, policy.burst_seconds, policy.oldest_credit)
    costs = list(scheduler.reader._slice_costs)
    kept = repr((entries, running, waiting, accounts, costs))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


class Asking:
    """Rank 0: submits requests, and keeps what came of them."""

    def __init__(self, engine, seed) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.random = random.Random(seed)
        self.prompts = {}
        self.replies = {}
        self.cached = {}
        self.constraints = {}  # of some requests
        self.greedy = []  # names of those that have none, and no noise
        self.n_asked = 0

    def submit(self, tokens, n, *, name=None, sampling=GREEDY, **fields):
        name = name or f"r{self.n_asked}"
        self.n_asked += 1
        key = s.TokenKey(
            b"r", np.asarray(tokens, np.int32), s.block_hashes(tokens, 16, root=b"r")
        )
        request = s.EngineRequest(
            key=key,
            checkpoint_positions=(len(tokens) // 2, len(tokens) - 20),
            max_tokens=n,
            sampling=sampling,
            request_id=name,
            owner=s.RequestOwner("", f"session {self.n_asked % 5}"),
            **fields,
        )
        self.prompts[name] = list(tokens)
        self.constraints[name] = request.constraints
        if sampling is GREEDY and not request.constraints:
            self.greedy.append(name)
        return name, self.engine.submit(request)

    def finish(self, name, handle):
        ids = []
        while True:
            event = handle.next_event(60)
            assert event is not None, f"nothing happened to {name} for a minute"
            if isinstance(event, s.ServerError):
                raise event
            if isinstance(event, s.TokenEvent):
                ids.append(event.token_id)
            elif isinstance(event, str):
                self.cached[name] = handle.cached_tokens
                if event != "cancelled":
                    self.replies[name] = ids
                return ids

    def play(self):
        base = words(self.rng, 300)
        for _ in range(N_ROUNDS):
            group = []
            for _ in range(self.random.randint(1, 4)):
                n_tokens = self.random.randint(4, 24)
                prompt = self.next_prompt(base)
                group.append(self.submit(prompt, n_tokens, **self.fields()))
                time.sleep(self.random.random() * 0.05)
            if self.random.random() < 0.5:
                time.sleep(self.random.random() * 0.2)
                self.random.choice(group)[1].stop_reason = "cancelled"
            for name, handle in group:
                self.finish(name, handle)
        self.engine.drop_kv("", "session 1")

    def next_prompt(self, base):
        """A new prompt, one that shares its beginning, or one that goes on from a reply."""
        kind = self.random.choice(("new", "shared", "next"))
        fresh = words(self.rng, self.random.randint(10, 200))
        if kind == "next" and self.replies:
            name = self.random.choice(sorted(self.replies))
            return self.prompts[name] + self.replies[name] + fresh
        return base[: self.random.randint(100, 300)] * (kind != "new") + fresh

    def fields(self):
        match self.random.randint(0, 3):
            case 0:
                seeded = GREEDY.model_copy(update={"temperature": 0.8, "seed": 3})
                return {"sampling": seeded}
            case 1:  # which other ranks do not get
                return {"constraints": (lambda: s.forbid_tokens([11, 12, 13]),)}
        return {}

    def ask_again_cold(self):
        """Each reply token by token, as the model gives it without a cache."""
        names = sorted(self.replies)
        for name in names:
            self.engine.drop_kv("", None)
            tokens = self.prompts[name] + self.replies[name][:-1]
            again, handle = self.submit(
                tokens, 1, name=f"cold {name}", constraints=self.constraints[name]
            )
            self.finish(again, handle)
            assert self.cached[again] == 0
        return names


def plant(fault):
    """A fault of this rank alone, which must end all ranks."""
    if fault == "clock":  # reads its own
        s.ClusterRank.now = lambda self: time.monotonic()
    if fault == "exception":
        step = s.DecodeBatch.step

        def failing(batch):
            if len(batch.requests[0].output_ids) > 3:
                raise RuntimeError("planted")
            return step(batch)

        s.DecodeBatch.step = failing
    if fault == "eviction":
        s.PrefixCache._enforce_entry_limit = lambda self, *, newest: self.evict_session(
            "", None
        )


def main():
    folder, seed, report_path = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    place = s.find_rank(os.environ)
    config = s.Config.from_env(os.environ)
    config, cluster = s.join_ranks(
        config, place, memory_bytes=1 << 31, stop=threading.Event()
    )
    recording = Recording()
    if place.rank:
        # Rank 0's fit of what memory allows is that of all: this one must not matter.
        s.affordable_tokens = lambda *_costs, **_shares: 70
        plant(FAULT)
    engine = s.Engine(
        config,
        s.CacheMetrics(),
        load=lambda: s.load_model(folder, config, cluster),
        cluster=cluster,
    )
    engine.start()
    report = {"names": [], "error": ""}
    if place.rank == 0:
        while engine.state == "loading":
            time.sleep(0.05)
        try:
            asking = Asking(engine, seed)
            asking.play()
            report["names"] = asking.ask_again_cold()
            report["cached"] = asking.cached
            report["replies"] = asking.replies
            report["prompts"] = asking.prompts
            report["greedy"] = asking.greedy
            report["constrained"] = [n for n, c in asking.constraints.items() if c]
            report["worst"] = {
                name: recording.difference(name, len(asking.replies[name]) - 1)
                for name in report["names"]
            }
        except s.ServerError as error:
            report["error"] = str(error)
        engine.stop()
    while engine.state != "dead":
        time.sleep(0.05)
    time.sleep(0.5)
    report |= {
        "failure": engine.failure,
        "steps": recording.steps,
        "logprobs": {name: recording.digest(name) for name in recording.logprobs},
        "ids": recording.ids,
    }
    report_path.write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
