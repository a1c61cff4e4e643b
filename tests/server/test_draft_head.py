"""DRAFT_MODEL as a head (MTP): the same replies and the same KV as without, in fewer steps."""

import itertools
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from drafting import (
    MOE,
    NEXT,
    copies_with_faults,
    count_guesses,
    forced,
    load_with,
    refusal,
)
from engine_fixture import words
from mlx.nn import quantize
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from nights import at_night
from server_fixture import SYSTEM, user
from test_idle_unload import NEVER, Sleeper
from tiny_heads import GEMMA
from tiny_models import DENSE, HYBRID

KINDS = [HYBRID, GEMMA, *map(at_night, (MOE, NEXT))]
find_start = s.CopyDrafter._find_start


@pytest.fixture
def pairs(make_drafting):
    """Folders of a model and of its head, by kind."""

    def folders(kind):
        drafting = make_drafting("head", kind)
        return drafting.folder, drafting.draft_folder

    return folders


@pytest.fixture
def head_of(make_drafting):
    """By kind."""
    return lambda kind, **size: make_drafting("head", kind, **size)


# -- in the engine -------------------------------------------------------------------------


def has_failed(bench):
    return bench.engine.call(lambda scheduler: scheduler.guesser.budget.balance < 0)


class Pairs:
    """What the head is given as true, and what a plain model says of the same tokens."""

    def __init__(self, folder, monkeypatch):
        model, _ = load(str(folder))
        self.layers = getattr(model, "language_model", model).model
        self.largest_difference = 0.0
        self.n_pairs = 0
        self.n_colds = 0
        guess = s.DraftHead.guess
        draft = s.MtpHead.draft

        def draft_noted(head, tokens, states, layer_caches, *, n_tokens):
            self.read_now = (tokens.tolist()[0], states, layer_caches[0].offset)
            return draft(head, tokens, states, layer_caches, n_tokens=n_tokens)

        def guess_checked(draft_head, past, n_tokens, generator, *, tenant):
            old_caches = draft_head._layer_caches
            n_read = draft_head._start + len(draft_head._read_ids)
            guessed = guess(draft_head, past, n_tokens, generator, tenant=tenant)
            token_ids, states, offset = self.read_now
            n = len(token_ids)
            is_cold = draft_head._layer_caches is not old_caches
            self.n_colds += is_cold
            self.n_pairs += n
            assert len(guessed) == n_tokens
            assert token_ids == past[-n:].tolist()
            if is_cold:
                assert offset == 0
                self.n_before = 0
            else:
                assert n_read == len(past) - n
                assert offset == self.n_before
            self.n_before += n
            assert {layer.offset for layer in draft_head._layer_caches} == {
                self.n_before
            }
            cold = self.layers(mx.array(past)[None])[:, -n - 1 : -1]
            difference = mx.abs(cold - states).max().item()
            self.largest_difference = max(self.largest_difference, difference)
            return guessed

        monkeypatch.setattr(s.DraftHead, "guess", guess_checked)
        monkeypatch.setattr(s.MtpHead, "draft", draft_noted)


@pytest.mark.parametrize("kind", [HYBRID, *map(at_night, (MOE, NEXT))])
def test_the_head_reads_each_token_and_the_state_before_it_once(
    head_of, kind, monkeypatch, rng
):
    drafting = head_of(kind)
    b = drafting.start()
    prompt = words(rng, 40)
    reply = drafting.reply(prompt, rng, n=90, every=6)
    seen = Pairs(drafting.folder, monkeypatch)
    ids, end, _ = b.ask(prompt, n=90, constraints=(forced(reply),))

    assert ids == reply
    assert not has_failed(b)
    assert seen.largest_difference < 1e-4
    assert seen.n_colds == 1  # at the first token of the reply
    assert 80 < seen.n_pairs <= 90
    assert end.saved_steps > 25


class SharedKV:
    """What the assistant is given, and what a plain model has after the same tokens."""

    def __init__(self, folder, monkeypatch):
        from mlx_vlm.speculative.drafters.gemma4_assistant import Model

        model, _ = load(str(folder))
        mx.eval(model(mx.array([[0]])))  # another thread goes on with it
        self.largest_difference = 0.0
        self.n_guesses = 0
        guess = s.DraftHead.guess
        draft_block = Model.draft_block

        def block_noted(assistant, y, state, *rest, **fields):
            kv = assistant._shared_kv
            self.now = y.tolist(), state, kv, assistant._position
            return draft_block(assistant, y, state, *rest, **fields)

        def guess_checked(draft_head, past, n_tokens, generator, *, tenant):
            guessed = guess(draft_head, past, n_tokens, generator, tenant=tenant)
            y, state, shared_kv, position = self.now
            self.n_guesses += 1
            assert len(guessed) == n_tokens
            assert y == [past[-1]]
            assert position == len(past) - 2, "position"

            n_fed = len(past) - 1
            layer_caches = make_prompt_cache(model)
            fed = mx.array(past[:-1])[None]
            cold = model.language_model.model(fed, cache=layer_caches)[:, -1:]
            pairs = [(state, cold)]
            least = {"sliding_attention": min(n_fed, 32), "full_attention": n_fed}
            for layer_type, cache in zip(least, layer_caches[2:], strict=True):
                cold_kv = cache.keys, cache.values
                for given, full in zip(shared_kv[layer_type], cold_kv, strict=True):
                    n = given.shape[2]
                    assert least[layer_type] <= n <= n_fed, "offset"
                    pairs.append((given, full[:, :, n_fed - n : n_fed]))
            differences = [mx.abs(a - b).max().item() for a, b in pairs]
            self.largest_difference = max(self.largest_difference, *differences)
            return guessed

        monkeypatch.setattr(s.DraftHead, "guess", guess_checked)
        monkeypatch.setattr(Model, "draft_block", block_noted)


def test_the_assistant_is_given_the_kv_of_the_model_and_its_last_state(
    head_of, monkeypatch, rng
):
    drafting = head_of(GEMMA)
    b = drafting.start()
    prompt = words(rng, 20)  # the window of 32 is filled in the middle of the reply
    reply = drafting.reply(prompt, rng, n=90, every=6)
    seen = SharedKV(drafting.folder, monkeypatch)
    ids, end, _ = b.ask(prompt, n=90, constraints=(forced(reply),))

    assert ids == reply
    assert not has_failed(b)
    n_steps = len(reply) - end.saved_steps
    assert seen.n_guesses >= n_steps - 2  # all but the last: there is nothing to draft
    assert seen.largest_difference < 1e-4
    assert end.saved_steps > 15
    assert b.head.model._shared_kv is None  # nothing refers to the buffers


def test_copies_come_first_and_the_head_reads_what_they_were_right_about(
    head_of, monkeypatch
):
    drafting = head_of(HYBRID)
    monkeypatch.setattr(s.CopyDrafter, "_find_start", find_start)
    b = drafting.start()
    rng = np.random.default_rng(5)
    prompt = words(rng, 200)
    reply = copies_with_faults(rng, prompt, 100, every=15)
    seen = Pairs(drafting.folder, monkeypatch)
    ids, _, _ = b.ask(prompt, n=100, constraints=(forced(reply),))

    assert ids == reply
    assert seen.largest_difference < 1e-4
    assert seen.n_colds == 1
    counted = b.metrics.snapshot()
    n_copied = counted["draft_tokens"] - counted["draft_model_tokens"]
    n_copied_right = (
        counted["draft_tokens_accepted"] - counted["draft_model_tokens_accepted"]
    )
    assert n_copied > 30
    assert n_copied_right > 0.5 * n_copied
    assert counted["draft_model_tokens"] > 10


def test_on_packed_kv_a_reply_is_the_same_with_a_head_and_without(head_of, rng):
    drafting = head_of(HYBRID, head_dim=64)
    plain, b = drafting.start_plain(kv_bits="4"), drafting.start(kv_bits="4")
    prompt = words(rng, 60)
    expected, _, _ = plain.ask(prompt, n=60)
    ids, end, ticket = b.ask(prompt, n=60)

    assert ids == expected
    assert end.saved_steps > 10
    assert b.packing is not None
    assert b.largest_difference(ticket, ids) <= 1e-4


def test_a_head_begins_anew_where_it_knows_no_states(head_of, monkeypatch, rng):
    """After a time in a batch, or too long without a draft."""
    monkeypatch.setattr(s, "MAX_STATES", 4)
    drafting = head_of(HYBRID)
    b = drafting.start()
    prompt = words(rng, 40)
    seen = Pairs(drafting.folder, monkeypatch)
    n_asked = itertools.count()
    lengths = [1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3, 0, 0, 2]
    monkeypatch.setattr(
        s.DraftBudget, "choose_length", lambda _: lengths[next(n_asked) // 2 % 15]
    )
    reply = drafting.reply(prompt, rng, n=60, every=6)
    ids, _, _ = b.ask(prompt, n=60, constraints=(forced(reply),))

    assert ids == reply
    assert seen.largest_difference < 1e-4
    assert 2 <= seen.n_colds <= 8


def test_a_long_reply_does_not_make_its_kv_grow_for_ever(head_of, monkeypatch):
    monkeypatch.setattr(s, "_MAX_HEAD_TOKENS", 20)
    monkeypatch.setattr(s, "MAX_STATES", 8)
    drafting = head_of(HYBRID)
    plain, b = drafting.start_plain(), drafting.start()
    prompt = words(np.random.default_rng(8), 40)
    seen = Pairs(drafting.folder, monkeypatch)
    expected, _, _ = plain.ask(prompt, n=100)
    ids, _, _ = b.ask(prompt, n=100)

    assert ids == expected
    assert seen.largest_difference < 1e-4
    assert 3 <= seen.n_colds <= 8


def test_a_head_that_fails_costs_nobody_anything(head_of, monkeypatch, caplog):
    drafting = head_of(HYBRID)
    plain, b = drafting.start_plain(), drafting.start()
    prompt = words(np.random.default_rng(9), 50)
    draft = s.MtpHead.draft
    n_drafts = itertools.count(1)

    def failing(*args, **fields):
        if next(n_drafts) == 12:
            raise RuntimeError("out of memory")
        return draft(*args, **fields)

    monkeypatch.setattr(s.MtpHead, "draft", failing)
    expected, _, _ = plain.ask(prompt, n=60)
    ids, _, ticket = b.ask(prompt, n=60)

    assert ids == expected
    assert b.largest_difference(ticket, ids) == 0.0
    assert "the draft model has failed" in caplog.text
    assert next(n_drafts) == 13


def test_the_memory_of_a_head_is_taken_from_the_limit(head_of):
    drafting = head_of(HYBRID)
    plain, b = drafting.start_plain(), drafting.start()
    n_bytes = b.engine.memory["draft_model"]

    assert "draft_model" not in plain.engine.memory
    lost_bytes = [bench.engine.report["cache_max_bytes"] for bench in (plain, b)]
    assert lost_bytes[0] - lost_bytes[1] == pytest.approx(n_bytes * s.KV_SHARE, abs=2)
    # Keys and values of two heads of 16 floats; buffers grow by 256 tokens.
    assert n_bytes == (1 << 20) + (4096 + 256) * 2 * 2 * 16 * 4


# -- loading -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_loaded_beside_the_model(pairs, kind):
    loaded = load_with(*pairs(kind))

    assert isinstance(loaded.draft_model, s.LoadedDraftHead)
    assert loaded.draft_model.path == pairs(kind)[1]
    assert loaded.draft_model.nbytes > 100_000
    assert load_with(*pairs(kind), speculation="off").draft_model is None


def test_a_quantized_assistant_of_an_e_model_drafts(head_of, tmp_path, rng):
    """Its output layer reads plain weights, of the tokens of some clusters."""
    from mlx_vlm.speculative.drafters import gemma4_assistant

    drafting = head_of(GEMMA)
    weights = mx.load(str(drafting.draft_folder / "model.safetensors"))
    config = json.loads((drafting.draft_folder / "config.json").read_text())
    n_tokens = config["text_config"]["vocab_size"]
    clusters = {"num_centroids": 2, "centroid_intermediate_top_k": 2}
    config = {**config, **clusters, "use_ordered_embeddings": True}
    head = gemma4_assistant.Model(gemma4_assistant.ModelConfig.from_dict(config))
    head.load_weights(list(weights.items()), strict=False)
    head.masked_embedding.token_ordering = mx.arange(n_tokens)
    quantize(head, group_size=32, bits=8)
    config["quantization"] = {"group_size": 32, "bits": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = str(tmp_path / "model.safetensors")
    mx.save_safetensors(file, dict(tree_flatten(head.parameters())))

    drafting.draft_folder = tmp_path
    _, end, _ = drafting.start().ask(words(rng, 20), n=60)

    assert end.saved_steps > 10


@pytest.mark.parametrize("kind", [HYBRID, MOE])
def test_a_head_in_the_files_of_a_model_is_used(pairs, kind, tmp_path):
    plain_folder, head_folder = pairs(kind)
    folder = shutil.copytree(plain_folder, tmp_path / "whole")
    weights = mx.load(str(folder / "model.safetensors"))
    head_weights = mx.load(str(head_folder / "model.safetensors"))
    for name, values in head_weights.items():
        weights[f"mtp.{name}"] = values
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    config = json.loads((head_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config["text_config"]))

    loaded = load_with(folder, "")
    assert isinstance(loaded.draft_model, s.LoadedDraftHead)
    own_weights = dict(tree_flatten(loaded.draft_model.head.model.parameters()))
    assert own_weights.keys() == head_weights.keys()
    for name, values in head_weights.items():
        assert mx.array_equal(own_weights[name], values), name
    assert load_with(folder, "", speculation="off").draft_model is None
    assert load_with(plain_folder, "").draft_model is None


def test_a_head_in_the_files_that_cannot_be_read_stops_no_start(
    pairs, tmp_path, caplog
):
    folder = shutil.copytree(pairs(HYBRID)[0], tmp_path / "whole")
    file = str(folder / "model.safetensors")
    mx.save_safetensors(file, {**mx.load(file), "mtp.fc.weight": mx.zeros((2, 2))})

    assert load_with(folder, "").draft_model is None
    assert "the head in the model's files cannot be used" in caplog.text


def test_a_head_of_another_model_stops_the_start(pairs, models, tmp_path):
    folder, head_folder = pairs(HYBRID)
    gemma_folder, assistant_folder = pairs(GEMMA)
    is_of_others = "is a head for models of the types"
    assert is_of_others in refusal(models(DENSE), head_folder)
    assert is_of_others in refusal(folder, assistant_folder)
    packed = refusal(gemma_folder, assistant_folder, kv_bits="4")
    assert "reads the KV of the model, which KV_BITS=4 packs" in packed

    other = shutil.copytree(head_folder, tmp_path / "head")
    config = json.loads((other / "config.json").read_text())
    for name, fault in (
        ("hidden_size", "is the head of another model: its hidden_size is"),
        ("vocab_size", "is the head of another model: its vocab_size is"),
        ("intermediate_size", "cannot be loaded by mlx-vlm: "),
    ):
        facts = config["text_config"]
        changed = {**config, "text_config": {**facts, name: facts[name] + 64}}
        (other / "config.json").write_text(json.dumps(changed))
        assert fault in refusal(folder, other)


@pytest.mark.parametrize("kind", [HYBRID, at_night(GEMMA)])
def test_a_head_drafts_on_after_the_weights_were_freed(pairs, kind):
    folder, head_folder = pairs(kind)
    settings = {"draft_model": str(head_folder), "idle_unload_seconds": NEVER}
    with Sleeper(folder, **settings) as served:
        replies = []
        counts = []
        for _ in range(2):
            exchange = served.ask([SYSTEM, user("Go on.")], max_tokens=60, tools=[])
            replies.append(exchange.answer)
            counted = served.state.metrics.snapshot()
            counts.append(counted["draft_model_tokens_accepted"])
            served.fall_asleep()

    assert replies[0] == replies[1]
    assert counts[1] > counts[0] > 0


# -- planted faults ----------------------------------------------------------------------


def state_before_the_norm(monkeypatch):
    def call(tap, hidden):
        if tap._is_open:
            tap._states = hidden
        return tap.norm(hidden)

    monkeypatch.setattr(s.StateTap, "__call__", call)


def state_of_the_token_before(monkeypatch):
    keep = s.TokenGenerator._keep_states

    def keep_late(generator, states):
        last = generator.states[-1][:, -1:] if generator.states else states[:, :1]
        keep(generator, mx.concatenate([last, states], axis=1)[:, :-1])

    monkeypatch.setattr(s.TokenGenerator, "_keep_states", keep_late)


def check_a_drafted_reply_is_the_same(drafting):
    prompt = words(np.random.default_rng(4), 60)
    plain, b = drafting.start_plain(), drafting.start()
    assert b.ask(prompt, n=50)[0] == plain.ask(prompt, n=50)[0]
    assert count_guesses(b)[0] > 0


def guesses_stay_in_its_kv(monkeypatch):
    from mlx_vlm.models.cache import KVCache

    monkeypatch.setattr(KVCache, "trim", lambda *_: None)


@pytest.mark.parametrize(
    "fault",
    [
        state_of_the_token_before,
        *map(at_night, (state_before_the_norm, guesses_stay_in_its_kv)),
    ],
)
def test_a_fault_of_the_head_is_noticed_and_changes_no_reply(
    head_of, monkeypatch, fault, rng
):
    fault(monkeypatch)
    check_a_drafted_reply_is_the_same(head_of(HYBRID))
    with pytest.raises(AssertionError, match=r"largest_difference|assert not|offset"):
        test_the_head_reads_each_token_and_the_state_before_it_once(
            head_of, HYBRID, monkeypatch, rng
        )


def one_position_off(monkeypatch):
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model

    set_shared_kv = Model.set_shared_kv

    def set_late(assistant, kv, *, kv_offset, position):
        set_shared_kv(assistant, kv, kv_offset=kv_offset, position=position + 1)

    monkeypatch.setattr(Model, "set_shared_kv", set_late)


def kv_with_what_was_wrong(monkeypatch):
    """The model's KV with its first token at the end, as if one of a draft had stayed."""
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model

    set_shared_kv = Model.set_shared_kv

    def set_longer(assistant, kv, *, kv_offset, position):
        longer = {
            layer_type: tuple(
                mx.concatenate([array[:, :, 1:], array[:, :, :1]], axis=2)
                for array in arrays
            )
            for layer_type, arrays in kv.items()
        }
        set_shared_kv(assistant, longer, kv_offset=kv_offset, position=position)

    monkeypatch.setattr(Model, "set_shared_kv", set_longer)


@pytest.mark.parametrize("fault", [kv_with_what_was_wrong, at_night(one_position_off)])
def test_a_fault_of_the_assistant_is_noticed_and_changes_no_reply(
    head_of, monkeypatch, fault, rng
):
    fault(monkeypatch)
    check_a_drafted_reply_is_the_same(head_of(GEMMA))
    with pytest.raises(AssertionError, match=r"largest_difference|assert not|position"):
        test_the_assistant_is_given_the_kv_of_the_model_and_its_last_state(
            head_of, monkeypatch, rng
        )
