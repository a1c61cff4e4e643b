"""What holds for each drafter, whatever it draws from: copies, a draft model, a head."""

import itertools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, VOCAB, Bench, words
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from nights import at_night
from tiny_heads import GEMMA, tiny_pair
from tiny_models import DENSE, HYBRID, MLA, SLIDING

MOE = "qwen3_5_moe"
NEXT = "qwen3_next"
# Windows sum in another order after a call of several tokens, and MLA in one of several.
TOLERANCES = {SLIDING: 1e-4, MLA: 1e-4, GEMMA: 1e-4}
SEEDED = GREEDY.model_copy(update={"temperature": 0.8, "top_k": 20, "seed": 4})
PENALTY = GREEDY.model_copy(update={"repetition_penalty": 1.2})
LENGTHS = {"copies": (7, 15, 31, 3), "model": (7, 2, 4, 1, 3), "head": (3, 1, 2)}
# Each drafter where there are states, and a head that reads the model's KV.
FIRST = [("copies", HYBRID), ("model", HYBRID), ("head", HYBRID), ("head", GEMMA)]
OTHERS = [
    *(("copies", kind) for kind in (DENSE, SLIDING, MLA)),
    *(("model", kind) for kind in (DENSE, SLIDING, MLA)),
    *(("head", kind) for kind in (MOE, NEXT)),
]


def drafters(*by_day):
    """Marks a test of the fixture `drafting`: all pairs of a drafter and a kind of model."""
    by_day = by_day or FIRST
    pairs = [*FIRST, *OTHERS]
    cases = [pair if pair in by_day else at_night(pair) for pair in pairs]
    return pytest.mark.parametrize("drafting", cases, indirect=True, ids="-".join)


def make_eager(patch: pytest.MonkeyPatch, drafter: str) -> None:
    """Drafts of unlike lengths are tried wherever there may be one, by one drafter alone.

    After a failure, which costs 100 plain steps, there may be none.
    """
    lengths = itertools.cycle(LENGTHS[drafter])

    def choose_length(budget):
        return next(lengths) if budget.balance > -50 else 0

    patch.setattr(s.DraftBudget, "choose_length", choose_length)
    patch.setattr(s.DraftCosts, "in_plain_steps", lambda *_: 0.0)
    if drafter == "copies":
        patch.setattr(s, "_MATCH_TOKENS", 2)
    else:
        patch.setattr(s.CopyDrafter, "_find_start", lambda *_: None)


class Drafting:
    """Engines on one model, with drafts of one drafter and without. Close it when done."""

    def __init__(
        self,
        drafter: str,
        kind: str,
        root: Path,
        patch: pytest.MonkeyPatch,
        *,
        models,
        **size,
    ) -> None:
        self.drafter = drafter
        self.kind = kind
        self.tolerance = TOLERANCES.get(kind, 0.0)
        self._patch = patch
        self._benches: list[Bench] = []
        self.draft_folder = None
        if drafter == "head":
            self.folder, self.draft_folder = tiny_pair(kind, root, **size)
        else:
            self.folder = models(kind, **size)
            if drafter == "model":
                self.draft_folder = models(DENSE)
        make_eager(patch, drafter)

    @property
    def settings(self):
        """Of a server with drafts."""
        return {"draft_model": str(self.draft_folder)} if self.draft_folder else {}

    def start(self, **settings) -> Bench:
        """An engine with drafts."""
        fields = {"draft_folder": self.draft_folder, "speculation": "auto", **settings}
        self._benches.append(Bench(self.folder, self._patch, **fields))
        return self._benches[-1]

    def start_plain(self, **settings) -> Bench:
        return self.start(draft_folder=None, speculation="off", **settings)

    def prompt(self, rng, n=60) -> list[int]:
        """For copies one with something to copy."""
        return words(rng, n) * 3 if self.drafter == "copies" else words(rng, n)

    def reply(self, prompt, rng, *, n, every):
        """What the drafter would guess, with a random token now and then."""
        if self.drafter == "copies":
            return copies_with_faults(rng, prompt, n, every)
        drafts_itself = self.drafter == "head"
        folder = self.folder if drafts_itself else self.draft_folder
        return follow(folder, prompt, rng, n=n, every=every)

    def close(self) -> None:
        for bench in self._benches:
            bench.engine.stop()


def load_with(folder, draft_folder, **settings):
    config = s.Config(model_path=str(folder), draft_model=str(draft_folder), **settings)
    return s.load_model(folder, config)


def refusal(*folders, **settings):
    """What the start says of a folder and a DRAFT_MODEL that does not suit it."""
    with pytest.raises(s.ModelError) as caught:
        load_with(*folders, **settings)
    return str(caught.value)


def forced(reply, *, n_others=0):
    """A constraint that leaves one token at each place, or some, while it lasts."""

    def begin():
        for token_id in reply:
            flags = s._flag_ids([*range(10, 10 + n_others), token_id])
            yield s.AllowedTokens(flags, others=False)
        yield s.AllowedTokens(n_steps=s._FOREVER)

    return begin


def copies_with_faults(rng, source, n, every):
    """A reply that copies parts of a text, with other tokens in between."""
    reply = []
    at = 0
    while len(reply) < n:
        if rng.random() < 1 / every:
            reply.append(int(rng.integers(10, 300)))
            at = int(rng.integers(0, len(source) - n))
        else:
            reply.append(source[at])
            at += 1
    return reply


def follow(folder, prompt, rng, *, n, every):
    """What the model of a folder says, with a random token now and then."""
    model, _ = load(str(folder))
    caches = make_prompt_cache(model)
    reply = []
    logits = model(mx.array(prompt)[None], cache=caches)
    for _ in range(n):
        token_id = mx.argmax(logits[0, -1]).item()
        if rng.random() < 1 / every:
            token_id = int(rng.integers(10, VOCAB))
        reply.append(token_id)
        logits = model(mx.array([[token_id]]), cache=caches)
    return reply


def counters(bench):
    """Of all drafts."""
    names = ("draft_steps", "draft_tokens", "draft_tokens_accepted")
    snapshot = bench.metrics.snapshot()
    return {name: snapshot[name] for name in names}


def count_guesses(bench: Bench) -> tuple[int, int]:
    """Of a draft model or a head: all, and those that were right."""
    snapshot = bench.metrics.snapshot()
    return snapshot["draft_model_tokens"], snapshot["draft_model_tokens_accepted"]


def check_same_reply(plain: Bench, b: Bench, prompt, *, tolerance=0.0, **fields):
    """With drafts and without: tokens, log-probabilities, and what goes on from it.

    Returns what was read of the cache for what goes on, beside the most that could be.
    """
    n = fields.pop("n", 80)
    expected, _, plain_handle = plain.ask(prompt, n=n, **fields)
    ids, _, handle = b.ask(prompt, n=n, **fields)
    assert ids == expected
    np.testing.assert_allclose(
        b.seen[handle], plain.seen[plain_handle], atol=tolerance, rtol=0.0
    )

    ids, end, handle = b.ask(prompt + ids + words(np.random.default_rng(n), 9), n=5)
    assert b.largest_difference(handle, ids) <= tolerance
    return len(prompt) + n - end.cached_tokens


def check_drafted_replies(drafting: Drafting, fields, *, n_others):
    """Free, or at each place what the drafter would guess, mostly, or one of others."""
    plain, b = drafting.start_plain(), drafting.start()
    rng = np.random.default_rng(4)
    for _ in range(2):
        prompt = drafting.prompt(rng)
        constraints = {}
        if n_others is not None:
            reply = drafting.reply(prompt, rng, n=80, every=12)
            constraints["constraints"] = (forced(reply, n_others=n_others),)
        same = {"tolerance": drafting.tolerance, **fields, **constraints}
        assert check_same_reply(plain, b, prompt, **same) <= 2

    counted = counters(b)
    assert counted["draft_steps"] > 0
    if n_others == 0:  # else the reply may have nothing of what would be guessed
        assert counted["draft_tokens_accepted"] > 0
    assert counters(plain)["draft_steps"] == 0


# -- planted faults ----------------------------------------------------------------------

# Other tokens, other log-probabilities, or none.
DIFFERS = r"assert .* == .*|Not equal to tolerance|assert .* <= |NaN or infinity"


def cut_windows_by(n_more):
    """A fault: of a wrong draft so many tokens more are cut off a window."""

    def fault(monkeypatch):
        trim_leaf = s.trim_leaf

        def trim_otherwise(leaf, n_tokens):
            is_window = s.leaf_kind(leaf).window_attribute
            trim_leaf(leaf, max(0, n_tokens + n_more * bool(n_tokens and is_window)))

        monkeypatch.setattr(s, "trim_leaf", trim_otherwise)

    return fault


one_cut_too_few = cut_windows_by(-1)
one_cut_too_many = cut_windows_by(1)
none_cut = cut_windows_by(-1000)


def windows_counted_and_not_cut(monkeypatch):
    """As upstream's `trim` has it."""
    monkeypatch.setattr(s, "trim_leaf", lambda leaf, n_tokens: leaf.trim(n_tokens))


def nothing_taken_back(monkeypatch):
    monkeypatch.setattr(s.KVCache, "trim", lambda leaf, n: n)


def state_not_put_back(monkeypatch):
    kinds = {
        leaf: kind._replace(can_put_back=False) for leaf, kind in s.LEAF_KINDS.items()
    }
    real = s.TokenGenerator.step_with

    def step_with(generator, draft):
        with monkeypatch.context() as patch:
            patch.setattr(s, "LEAF_KINDS", kinds)
            return real(generator, draft)

    monkeypatch.setattr(s.TokenGenerator, "step_with", step_with)
