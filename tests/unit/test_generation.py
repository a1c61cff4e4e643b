"""SAMPLING: rows that decode together have the tokens that each has alone."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import start_llm as s
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import TokenBuffer, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from nights import by_day
from tiny_models import DENSE, HYBRID, SLIDING, tiny_model


def choice(**fields):
    greedy = {"sampler": greedy_sampler, "processors": [], "context": TokenBuffer()}
    return s.TokenChoice(**{**greedy, **fields})


def started(model, tokens, *, n_before=0, **fields):
    """A generator of one row, of whose prompt n_before tokens are in the cache."""
    cache = make_prompt_cache(model)
    ids = mx.array([tokens])
    if n_before:
        model(ids[:, :n_before], cache=cache)
        s.evaluate_caches(cache)
    return s.TokenGenerator(model, ids[:, n_before:], cache, [choice(**fields)])


def cold_logprobs(model, tokens):
    logits = model(mx.array([tokens]))[0, -1]
    return np.array(logits - mx.logsumexp(logits))


def same(ours, theirs, kind):
    tolerance = 1e-4 if kind == SLIDING else 0.0
    return np.abs(np.array(ours) - theirs).max() <= tolerance


@pytest.fixture(scope="module", params=[DENSE, HYBRID, SLIDING])
def plain(request, tmp_path_factory):
    folder = tiny_model(request.param, tmp_path_factory.getbasetemp())
    return request.param, mlx_lm.load(str(folder))[0]


def test_generation_feeds_what_it_has_sampled(plain):
    kind, model = plain
    prompt = np.random.default_rng(1).integers(10, 300, 60).tolist()

    generator = started(model, prompt, n_before=40)

    (first,) = generator.next_tokens()
    assert same(first.logprobs, cold_logprobs(model, prompt), kind)
    assert first.token_id == int(np.argmax(first.logprobs))
    assert s.kv_cache_offset(generator.layer_caches, recorded=0) == 60

    tokens = [*prompt, first.token_id]
    for n in range(1, 6):
        (fed,) = generator.step()
        assert fed.token_id == tokens[-1], "a step returns what it feeds"
        assert s.kv_cache_offset(generator.layer_caches, recorded=0) == 60 + n
        (following,) = generator.next_tokens()
        assert same(following.logprobs, cold_logprobs(model, tokens), kind)
        tokens.append(following.token_id)


def mlx_lms_own(model, tokens, cache, choices):
    """GenerationBatch, whose steps are what ours have to be."""
    n_rows = len(choices)
    return GenerationBatch(
        model,
        uids=list(range(n_rows)),
        inputs=mx.array(tokens),
        prompt_cache=cache,
        tokens=[choice.context.tokens.tolist() for choice in choices],
        samplers=[choice.sampler for choice in choices],
        fallback_sampler=greedy_sampler,
        logits_processors=[choice.processors for choice in choices],
        stop_sequences=[StopSequences() for _ in choices],
        max_tokens=[999] * n_rows,
    )


def random_choice(rng, context):
    sampling = s.SamplingParams(
        temperature=float(rng.choice([0.0, 1.0])),
        top_k=int(rng.choice([0, 40])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        logit_bias={7: 2.0} if rng.random() < 0.3 else {},
        seed=int(rng.integers(100)),
    )
    processors = s.make_processors(sampling, ())
    tokens = context if processors else []
    return s.TokenChoice(s.make_sampler(sampling), processors, TokenBuffer(tokens))


@pytest.mark.parametrize("seed", by_day(2, of=6))
def test_tokens_and_log_probabilities_are_those_of_mlx_lms_own_batch(plain, seed):
    """To the last bit, in rows that join and leave."""
    _, model = plain

    def run(make):
        rng = np.random.default_rng(seed)
        batch, seen = None, []
        for n_steps in rng.integers(1, 5, 4).tolist():
            prompt = rng.integers(10, 300, int(rng.integers(3, 60))).tolist()
            cache = make_prompt_cache(model)
            model(mx.array([prompt[:-1]]), cache=cache)
            cache = s.to_batch(cache)
            row = make(model, prompt[-1:], cache, [random_choice(rng, prompt[:-1])])
            if batch is None:
                batch, n_rows = row, 1
            else:
                batch.extend(row)
                n_rows += 1
            seen += [take_step(batch) for _ in range(n_steps)]
            if n_rows > 2:
                kept = sorted(rng.permutation(n_rows)[:2].tolist())
                keep = getattr(batch, "keep_rows", None) or batch.filter
                keep(kept)
                n_rows = 2
        return seen

    def take_step(batch):
        if isinstance(batch, GenerationBatch):
            return [(row.token, np.array(row.logprobs)) for row in batch.next()]
        return [(row.token_id, np.array(row.logprobs)) for row in batch.step()]

    def ours(model, tokens, cache, choices):
        return s.TokenGenerator(model, mx.array([tokens]), cache, choices)

    for our_rows, their_rows in zip(run(ours), run(mlx_lms_own), strict=True):
        assert [token_id for token_id, _ in our_rows] == [i for i, _ in their_rows]
        for (_, our_logprobs), (_, their_logprobs) in zip(
            our_rows, their_rows, strict=True
        ):
            assert np.array_equal(our_logprobs, their_logprobs)
