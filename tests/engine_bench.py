"""An engine on a tiny model, without HTTP: jobs in, events out, a cold run as the oracle."""

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import start_llm as s
from mlx_lm import load
from oracle import Oracle
from serving import PATIENCE, Recorder, wait_until

VOCAB = 300  # plain text tokens of the tiny models' vocabulary
GREEDY = s.Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    repetition_context_size=64,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias={},
    seed=None,
)


@dataclass(frozen=True)
class Loaded:
    """As much of a LoadedModel as an engine asks for."""

    model: Any
    limit: int = 1 << 20
    vision: None = None
    eos_ids: frozenset[int] = frozenset()
    nbytes: int = 1 << 20
    # What an idle engine tells it.
    template: Any = field(default_factory=lambda: SimpleNamespace(forget=lambda: None))


@functools.cache
def oracle(folder):
    """One for each model: many tests ask the same of the same."""
    return Oracle(folder, at_once=512)


class Bench:
    """An engine on a tiny model, with a record of the log-probabilities of every token."""

    def __init__(self, path, monkeypatch, **settings):
        self.path = path
        self.seen: dict[s.Ticket, list[np.ndarray]] = {}
        self.asked: dict[s.Ticket, list[int]] = {}
        tell = s.Row.tell

        def recorded(row, token, *, logprobs):
            self.seen.setdefault(row.ticket, []).append(np.array(logprobs))
            tell(row, token, logprobs=logprobs)

        monkeypatch.setattr(s.Row, "tell", recorded)
        config = s.Config(**settings)
        self.metrics = s.CacheMetrics()
        self.engine = s.Engine(config, self.metrics, load=self._load)
        self.engine.start()
        wait_until(lambda: self.engine.state != "loading")
        assert self.engine.trouble is None

    def _load(self):
        self.model = Recorder(load(str(self.path))[0])
        return Loaded(self.model)

    def submit(self, tokens, n=8, boundaries=(), **fields):
        job = s.Job(
            prompt=s.Prompt(
                b"r", np.asarray(tokens, np.int32), s._block_hashes(tokens, 16, root=b"r")
            ),
            boundaries=tuple(boundaries),
            max_tokens=n,
            sampling=fields.pop("sampling", GREEDY),
            **fields,
        )
        ticket = self.engine.submit(job)
        self.asked[ticket] = list(tokens)
        return ticket

    def outcome(self, ticket, timeout=PATIENCE):
        """(ids, Finished or the error): how a request went, whatever way that was."""
        ids = []
        while True:
            event = ticket.next_event(timeout)
            assert event is not None, "nothing happened for too long"
            if isinstance(event, s.Token):
                ids.append(event.id)
            elif not isinstance(event, int):
                return ids, event

    def finish(self, ticket, timeout=PATIENCE):
        ids, end = self.outcome(ticket, timeout)
        assert isinstance(end, s.Finished), str(end)
        return ids, end

    def ask(self, tokens, n=8, **fields):
        ticket = self.submit(tokens, n, **fields)
        ids, end = self.finish(ticket)
        return ids, end, ticket

    def worst(self, ticket, ids):
        """Largest difference to a cold run over all generated tokens of a request."""
        warm = np.array(self.seen[ticket])
        cold = oracle(self.path).logprobs([*self.asked[ticket], *ids[:-1]], n=len(ids))
        assert cold.shape == warm.shape
        return float(np.abs(cold - warm).max())


def words(rng, n):
    return rng.integers(10, VOCAB, n).tolist()
