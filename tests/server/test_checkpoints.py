"""Notes: states of recurrent layers from inside a call, and what a layer must be like for them."""

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import Bench, words
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load
from mlx_lm.models import mamba2
from mlx_lm.models.cache import make_prompt_cache
from nights import at_night
from recurrent_families import FAMILIES

# Their recurrent layers have one cache for two; or hand out its parts.
REFUSED = ("rwkv7", "recurrent_gemma")
MAMBA_2 = ("mamba2", "granitemoehybrid", "falcon_h1")


def make_model(family: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    fields = {"model_type": family, **FAMILIES[family]}
    model = module.Model(module.ModelArgs.from_dict(fields))
    mx.random.seed(3)
    small = tree_map(lambda p: 0.3 * mx.random.normal(p.shape), model.parameters())
    model.update(small)
    mx.eval(model.parameters())
    return model


def state_arrays(snapshot: s.StateCheckpoint) -> list[np.ndarray]:
    leaves = [leaf for _, leaf in tree_flatten(snapshot.leaves)]
    return [np.array(leaf) for leaf in leaves if isinstance(leaf, mx.array)]


def check_notes(model: Any, *, tolerance: float = 0.0) -> None:
    """Noted states are those of a run that ends there, and nothing else is another."""
    rng = np.random.default_rng(5)
    tokens = mx.array(rng.integers(10, 50, (1, 40)))
    plain = make_prompt_cache(model)
    noted = make_prompt_cache(model)

    ends = sorted(rng.choice(np.arange(1, 40), 5, replace=False).tolist())
    s.request_tapped_states(noted, ends)
    difference = model(tokens, cache=noted) - model(tokens, cache=plain)
    assert mx.abs(difference).max() <= tolerance

    notes = s.take_tapped_states(noted)
    assert len(notes) == len(ends) + 1

    for end, note in zip([*ends, 40], notes, strict=True):
        short = make_prompt_cache(model)
        model(tokens[:, :end], cache=short)
        for ours, theirs in zip(
            state_arrays(note), state_arrays(s.copy_state(short)), strict=True
        ):
            assert np.abs(ours - theirs).max() <= tolerance

    assert s.take_tapped_states(noted) == []

    difference = model(tokens, cache=noted) - model(tokens, cache=plain)
    assert mx.abs(difference).max() <= tolerance


PEOPLE_USE = ("qwen3_5", "qwen3_next", "qwen3_5_moe")


@pytest.mark.parametrize(
    "family", [*PEOPLE_USE, *(f for f in FAMILIES if f not in REFUSED)]
)
def test_states_inside_a_call_are_those_of_a_call_that_ends_there(
    family: str, models: Any
) -> None:
    model = load(str(models(family)))[0] if family in PEOPLE_USE else make_model(family)
    assert s.measure_kv(model).can_tap
    # upstream computes Mamba 2 in blocks of the tokens that it is given
    check_notes(model, tolerance=1e-4 if family in MAMBA_2 else 0.0)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_is_left_as_it_was(family: str) -> None:
    model = make_model(family)
    classes = [type(layer) for layer in model.modules()]
    tokens = mx.array([[1, 2, 3]])
    logits = model(tokens, cache=make_prompt_cache(model))

    spec = s.measure_kv(model)
    assert spec.has_state
    assert not spec.can_tap
    assert [type(layer) for layer in model.modules()] == classes

    cache = make_prompt_cache(model)
    s.request_tapped_states(cache, [1])
    assert (model(tokens, cache=cache) == logits).all()
    assert s.take_tapped_states(cache) == []


class Forgetful(mamba2.Mamba2Block):
    """Remembers the last call elsewhere than in its cache, so halves are not the whole."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        output = super().__call__(x, mask, cache)
        self.calls = getattr(self, "calls", 0) + 1
        cache[1] = cache[1] * self.calls
        return output


class Counting(mamba2.Mamba2Block):
    """Counts from the beginning of the call; the state after one token is right."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return super().__call__(x, mask, cache) + mx.arange(x.shape[1])[:, None]


@pytest.mark.parametrize("mixer", [Forgetful, Counting])
def test_layers_whose_calls_cannot_be_parted_are_refused(mixer: type) -> None:
    model = make_model("mamba2")
    for layer in model.layers:
        layer.mixer.__class__ = mixer
    assert not s.measure_kv(model).can_tap
    assert {type(layer.mixer) for layer in model.layers} == {mixer}


def test_a_state_after_the_end_of_a_call_is_an_error() -> None:
    model = make_model("mamba2")
    assert s.measure_kv(model).can_tap
    cache = make_prompt_cache(model)
    s.request_tapped_states(cache, [2, 4])

    with pytest.raises(AssertionError, match="after the end"):
        model(mx.array([[1, 2, 3]]), cache=cache)


@pytest.mark.parametrize("kind", ["qwen3_5", at_night("qwen3_5_moe")])
def test_boundaries_cost_no_call_of_the_model_and_are_gone_on_from(
    kind: str, monkeypatch: pytest.MonkeyPatch, models: Any
) -> None:
    bench = Bench(models(kind), monkeypatch)
    rng = np.random.default_rng(2)
    past = words(rng, 400)
    cuts = [90, 200, 330, 360, 395]
    bench.ask(past, n=1, boundaries=cuts)
    n_tokens = [len(call.tokens) for call in bench.model.fed]

    assert n_tokens[-3:-1] == [399, 1]  # then a step too many

    for cut in cuts:
        ids, end, ticket = bench.ask([*past[:cut], *words(rng, 12)], boundaries=[cut])
        assert end.cached_tokens == cut
        assert bench.largest_difference(ticket, ids) == 0.0

    bench.engine.stop()
