"""SCHEDULER: short prompts that come together start together.

The scheduler runs a tiny model, by a clock that only the model's calls move forward: what they
cost is a table, so no figure here depends on the machine.
"""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from engine_fixture import GREEDY, Loaded
from mlx_lm.models import llama

VOCAB = 300


class Costs(NamedTuple):
    """Seconds of a call: with one token a row, and with more."""

    step: float
    row: float
    call: float
    token: float

    def reading(self, n_tokens):
        """Of a prompt that is read alone, with its first token."""
        return self.call + n_tokens * self.token + self.step + self.row


COSTS = {
    "slow": Costs(step=0.13, row=0.01, call=0.03, token=0.0045),
    "fast": Costs(step=0.008, row=0.0005, call=0.005, token=0.0002),
    "gpu": Costs(step=0.02, row=0.0005, call=0.02, token=0.0004),
}


class TimedModel:
    """A tiny model. Its calls take the time that the table of costs says."""

    def __init__(self, costs):
        self.costs = costs
        self.now = 0.0
        self.plain = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=16,
                num_hidden_layers=1,
                intermediate_size=16,
                num_attention_heads=1,
                rms_norm_eps=1e-5,
                vocab_size=VOCAB,
            )
        )
        mx.eval(self.plain.parameters())

    def __call__(self, inputs, cache=None):
        rows, n = inputs.shape
        step, row, call, token = self.costs
        self.now += step + row * rows if n == 1 else call + token * rows * n
        return self.plain(inputs, cache=cache)

    def __getattr__(self, name):
        return getattr(self.plain, name)


class TimedRank(s.Lockstep):
    def __init__(self, model):
        self.model = model

    def now(self):
        return self.model.now


class TimedHandle(s.RequestHandle):
    """Notes when its tokens came."""

    def __init__(self, model, request):
        super().__init__(request, model.now)
        self.model = model
        self.token_times = []

    def put(self, event):
        assert not isinstance(event, Exception), event
        if isinstance(event, s.TokenEvent):
            self.token_times.append(self.model.now)

    @property
    def first_token(self):
        return self.token_times[0] - self.submitted_at

    @property
    def longest_pause(self):
        return max(np.diff(self.token_times))


class Desk:
    def __init__(self, costs):
        self.model = TimedModel(costs)
        self.scheduler = s.Scheduler(
            Loaded(self.model, lockstep=TimedRank(self.model)),
            s.Config(speculation="off"),
            metrics=s.CacheMetrics(),
        )
        self.rng = np.random.default_rng(1)

    def submit(self, n_prompt, max_tokens, *, is_background=False, shared_ids=()):
        new_ids = self.rng.integers(10, VOCAB, n_prompt - len(shared_ids))
        ids = np.append(shared_ids, new_ids).astype(np.int32)
        request = s.EngineRequest(
            key=s.TokenKey(b"r", ids, s.block_hashes(ids, 16, root=b"r")),
            checkpoint_positions=(),
            max_tokens=max_tokens,
            sampling=GREEDY,
            is_background=is_background,
        )
        handle = TimedHandle(self.model, request)
        self.scheduler.waiting.append(handle)
        return handle

    def step(self, n=1):
        for _ in range(n):
            self.scheduler.step()

    def finish(self):
        while self.scheduler.is_busy:
            self.step()


@pytest.mark.covering(2)
@pytest.mark.parametrize("speed", COSTS)
@pytest.mark.parametrize("lengths", [[100] * 8, [100] * 4, [90, 100, 110, 120, 80, 70]])
@pytest.mark.parametrize("has_stream", [False, True])
def test_short_prompts_that_come_together_start_together(speed, lengths, has_stream):
    costs = COSTS[speed]
    desk = Desk(costs)
    first, *others = lengths
    handles = [desk.submit(first, 60)]
    desk.step(5 if has_stream else 1)  # the first one is alone for a moment
    began = desk.model.now
    handles += [desk.submit(length, 60) for length in others]

    desk.finish()

    reading = sum(map(costs.reading, others))
    last_first = max(handle.token_times[0] for handle in handles) - began
    assert last_first <= 1.3 * reading + costs.step
    assert handles[0].longest_pause <= 1.5


def test_where_padding_costs_less_than_a_step_an_idle_model_reads_both_in_one_call():
    desk = Desk(COSTS["slow"])
    desk.submit(40, 20)
    desk.finish()  # so it is known how long a step takes

    handles = [desk.submit(length, 20) for length in (30, 55)]
    desk.finish()

    assert handles[0].first_token == handles[1].first_token


@pytest.mark.parametrize("speed", COSTS)
def test_a_stream_beside_prompts_of_unlike_lengths_pauses_for_a_second_and_a_half(
    speed,
):
    desk = Desk(COSTS[speed])
    stream = desk.submit(40, 200)
    desk.step(3)
    for length in (30, 200, 60, 256, 110, 20, 75, 170):
        desk.submit(length, 20)

    desk.finish()

    assert stream.longest_pause <= 1.5


def test_a_long_prompt_beside_a_stream_leaves_it_two_thirds_of_the_time():
    costs = COSTS["slow"]
    desk = Desk(costs)
    stream = desk.submit(100, 400)
    desk.step(3)
    long = desk.submit(3000, 5)

    desk.finish()

    assert long.first_token > 2.5 * costs.reading(3000)
    assert stream.longest_pause <= 1.5


def test_short_prompts_beside_a_long_one_do_not_wait_for_its_end():
    costs = COSTS["slow"]
    desk = Desk(costs)
    long = desk.submit(6000, 5)
    desk.step(3)
    shorts = [desk.submit(100, 20) for _ in range(8)]

    desk.finish()

    last_first = max(handle.first_token for handle in shorts)
    assert last_first < 3 * 8 * costs.reading(100) < long.first_token


def test_short_prompts_do_not_wait_for_a_long_one_that_has_to_wait_itself():
    """When the turn of the oldest comes, and decoding has yet to be paid for it."""
    costs = Costs(step=0.049, row=0.001, call=0.0, token=0.001)
    desk = Desk(costs)
    desk.submit(40, 2000)  # decodes all the time
    desk.step(3)
    desk.submit(60_000, 5)
    desk.step(20)
    began = desk.model.now
    shorts = [desk.submit(400, 20) for _ in range(8)]

    while any(not handle.token_times for handle in shorts):
        desk.step()

    reading = 8 * costs.reading(400)
    assert desk.model.now - began <= 1.3 * reading + 2 * costs.step


@pytest.mark.parametrize("n_shared", [0, 100, 190])
def test_a_short_prompt_does_not_wait_for_the_turn_of_one_whose_prefix_it_has(n_shared):
    costs = COSTS["slow"]
    desk = Desk(costs)
    desk.submit(40, 400)  # decodes all the time
    desk.step(3)
    desk.submit(3000, 5)
    desk.step(6)
    long = desk.submit(6000, 5)
    desk.step()
    long_ids = long.request.key.tokens

    short = desk.submit(200, 5, shared_ids=long_ids[:n_shared])
    while not short.token_times:
        desk.step()

    assert short.first_token < 2 * costs.reading(200)
    assert not long.token_times


def test_a_title_does_not_hurry_the_prompt_whose_prefix_it_has():
    desk = Desk(COSTS["slow"])
    desk.submit(3000, 5)
    desk.step(3)
    long = desk.submit(6000, 5)
    desk.step()

    desk.submit(200, 5, is_background=True, shared_ids=long.request.key.tokens[:100])
    desk.step()

    (running,) = (r for r in desk.scheduler.running if r.handle is long)
    assert running.slice_ends == [100]
    assert running.n_to_stop == running.n_prompt_rest == 5999
