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
from tiny_models import DENSE, HYBRID, SLIDING


@pytest.fixture(scope="module", params=[DENSE, HYBRID, SLIDING])
def model(request, models):
    return mlx_lm.load(str(models(request.param)))[0]


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
def test_tokens_and_log_probabilities_are_those_of_mlx_lms_own_batch(model, seed):
    """To the last bit, in rows that join and leave."""

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
