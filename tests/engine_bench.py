"""An engine on a tiny model, without HTTP: jobs in, events out, a cold run as the oracle."""

import functools
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import start_llm as s
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from serving import Recorder

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


class Oracle:
    """Cold runs of the plain model, with a fresh cache and no server code; each is made once."""

    def __init__(self, path):
        self._model = load(str(path))[0]
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], np.ndarray] = {}

    def rows(self, prompt, ids):
        """The log-probabilities that each of `ids` was drawn from, (vocabulary,) each."""
        prompt, ids = tuple(prompt), tuple(ids)
        if ids and (prompt, ids[:-1]) not in self._rows:
            for n, row in enumerate(self._run(prompt, ids)):
                self._rows[prompt, ids[:n]] = row
        return [self._rows[prompt, ids[:n]] for n in range(len(ids))]

    def _run(self, prompt, ids):
        plain, inputs = self._model, list(prompt)
        cache = make_prompt_cache(plain)
        while len(inputs) > 4096:  # the scores of a 16k prompt at once would be 2 GB
            plain(mx.array([inputs[:4096]]), cache=cache)
            mx.eval([c.state for c in cache])
            inputs = inputs[4096:]
        for token in ids:
            logits = plain(mx.array([inputs]), cache=cache)[:, -1, :]
            yield np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[0]
            inputs = [token]


oracle = functools.cache(Oracle)  # by the folder: many tests ask the same of the same model


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
        assert self.engine.settled.wait(60) and self.engine.trouble is None

    def _load(self):
        self.model = Recorder(load(str(self.path))[0])
        return SimpleNamespace(model=self.model, vision=None, eos_ids=frozenset(), nbytes=1 << 20)

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

    def outcome(self, ticket, timeout=30):
        """(ids, Finished or the error): how a request went, whatever way that was."""
        ids = []
        while True:
            event = ticket.next_event(timeout)
            assert event is not None, "nothing happened for too long"
            if isinstance(event, s.Token):
                ids.append(event.id)
            elif not isinstance(event, s.Progress):
                return ids, event

    def finish(self, ticket, timeout=20):
        ids, end = self.outcome(ticket, timeout)
        assert isinstance(end, s.Finished), str(end)
        return ids, end

    def ask(self, tokens, n=8, **fields):
        ticket = self.submit(tokens, n, **fields)
        ids, end = self.finish(ticket)
        return ids, end, ticket

    def worst(self, ticket, ids):
        """Largest difference to a cold run over all generated tokens of a request."""
        cold, warm = oracle(self.path).rows(self.asked[ticket], ids), self.seen[ticket]
        assert len(cold) == len(warm)
        return float(np.abs(np.array(cold) - np.array(warm)).max(initial=0.0))


def words(rng, n):
    return rng.integers(10, VOCAB, n).tolist()
