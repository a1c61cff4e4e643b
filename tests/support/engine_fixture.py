"""An engine on a tiny model, without HTTP: jobs in, events out, a cold run as the oracle."""

import functools
import json
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import start_llm as s
from cold_reference import Oracle, Rounding
from mlx_lm import load
from server_fixture import MAX_WAIT_SECONDS, Recorder, wait_until

VOCAB = 300  # plain text tokens of the tiny models' vocabulary
GREEDY = s.SamplingParams(
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
    max_context_tokens: int = 1 << 20
    packed_context_tokens: int = 0
    vision: None = None
    eos_ids: frozenset[int] = frozenset()
    nbytes: int = 1 << 20
    revision: str = "0" * 16
    device: str = "test"
    draft_model: s.LoadedDraftModel | s.LoadedDraftHead | None = None
    vocab_size: int = VOCAB
    lockstep: s.Lockstep = s.ALONE
    # What an idle engine tells it.
    template: Any = field(
        default_factory=lambda: SimpleNamespace(clear_memos=lambda: None)
    )


@functools.cache
def oracle(folder, packing=None):
    """One for each model and packing: many tests ask the same of the same."""
    rounding = packing and Rounding(
        (packing.key_bits, packing.value_bits),
        group_size=packing.group_size,
        is_rotated=packing.is_rotated,
    )
    return Oracle(folder, at_once=512, rounding=rounding)


class Ended:
    """How a request ended, and all that its handle knows of it."""

    def __init__(self, reason, handle):
        self.reason = reason
        self.handle = handle

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def __repr__(self):
        return f"Ended({self.reason!r})"


class Bench:
    """An engine on a tiny model, with a record of the log-probabilities of every token."""

    def __init__(
        self, path, monkeypatch, *, is_awaited=True, draft_folder=None, **settings
    ):
        self.path = path
        self.draft_folder = draft_folder
        self.seen: dict[s.RequestHandle, list[np.ndarray]] = {}
        self.asked: dict[s.RequestHandle, list[int]] = {}
        self.may_try_again = False  # else a second try would hide a fault from a test
        add_token = s.RunningRequest.add_token

        def recorded(row, token, *, logprobs):
            self.seen.setdefault(row.handle, []).append(np.array(logprobs))
            add_token(row, token, logprobs=logprobs)
            if row.has_failed:  # no token was reported
                self.seen[row.handle].pop()

        monkeypatch.setattr(s.RunningRequest, "add_token", recorded)
        config = s.Config(**settings)
        self.packing = s.choose_packing(config)
        self.metrics = s.CacheMetrics()
        self.engine = s.Engine(
            config,
            self.metrics,
            load=self._load,
            use_folder=(lambda folder: None) if config.cache_disk_folder else None,
        )
        self.engine.start()
        if is_awaited:
            wait_until(lambda: self.engine.state != "loading")
            assert self.engine.failure is None

    def _load(self):
        model, _ = load(str(self.path))
        s.pack_caches(model, self.packing)
        self.model = Recorder(model)
        if self.draft_folder is None:
            return Loaded(self.model)
        draft_config = json.loads((self.draft_folder / "config.json").read_text())
        if draft_config["model_type"] in s.HEAD_TARGETS:
            self.head = s.load_head(self.draft_folder, model)
            loaded_head = s.LoadedDraftHead(self.head, self.draft_folder, 1 << 20)
            return Loaded(self.model, draft_model=loaded_head)
        draft_model, _ = load(str(self.draft_folder))
        self.draft_model = s.LoadedDraftModel(
            draft_model,
            self.draft_folder,
            nbytes=1 << 20,
            vocab_size=draft_model.args.vocab_size,
        )
        return Loaded(self.model, draft_model=self.draft_model)

    def submit(self, tokens, n=8, boundaries=(), **fields):
        job = s.EngineRequest(
            key=s.TokenKey(
                b"r",
                np.asarray(tokens, np.int32),
                s.block_hashes(tokens, 16, root=b"r"),
            ),
            checkpoint_positions=tuple(boundaries),
            max_tokens=n,
            sampling=fields.pop("sampling", GREEDY),
            **fields,
        )

        ticket = self.engine.submit(job)
        self.asked[ticket] = list(tokens)
        return ticket

    def submit_at_once(self, prompts, fields=()):
        """Requests that are all there before the model reads the first of them."""
        is_held, everyone = threading.Event(), threading.Event()

        def hold(_scheduler):
            is_held.set()
            everyone.wait(MAX_WAIT_SECONDS)

        self.engine._inbox.put(hold)
        # Else it may take some of them with this task.
        assert is_held.wait(MAX_WAIT_SECONDS)
        fields = fields or [{}] * len(prompts)
        handles = [
            self.submit(p, **how) for p, how in zip(prompts, fields, strict=True)
        ]
        everyone.set()
        return handles

    def outcome(self, ticket, timeout=MAX_WAIT_SECONDS):
        """(ids, Ended or the error): how a request went, whatever way that was."""
        ids = []
        while True:
            event = ticket.next_event(timeout)
            assert event is not None, "nothing happened for too long"
            if isinstance(event, s.TokenEvent):
                ids.append(event.token_id)
            elif isinstance(event, str):
                return ids, Ended(event, ticket)
            elif isinstance(event, s.ServerError):
                return ids, event

    def finish(self, ticket, timeout=MAX_WAIT_SECONDS):
        ids, end = self.outcome(ticket, timeout)
        assert isinstance(end, Ended), str(end)
        assert self.may_try_again or not ticket.is_second_try
        return ids, end

    def ask(self, tokens, n=8, **fields):
        ticket = self.submit(tokens, n, **fields)
        ids, end = self.finish(ticket)
        return ids, end, ticket

    def largest_difference(self, ticket, ids):
        """Largest difference to a cold run over all generated tokens of a request."""
        warm = np.array(self.seen[ticket])
        cold = oracle(self.path, self.packing).logprobs(
            [*self.asked[ticket], *ids[:-1]], n=len(ids)
        )
        assert cold.shape == warm.shape
        return float(np.abs(cold - warm).max())


def words(rng, n):
    return rng.integers(10, VOCAB, n).tolist()


# A window that wrapped holds its keys in another order; MLA decodes by other sums than it
# prefills by (L-132).
TOLERANCE = {"gemma3_text": 1e-4, "glm4_moe_lite": 1e-4}
