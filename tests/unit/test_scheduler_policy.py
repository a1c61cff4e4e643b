"""PREFILL POLICY, PREFILL: who is read next, whether beside decoding, and how long a slice is.

Nothing here needs a model, a thread or a clock.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import start_llm as s

SPEED = 1000.0  # tokens a second


@dataclass
class Prefill:
    submitted_at: float
    n_prompt_rest: int
    prefill_speed: float = SPEED
    n_cached: int = 0

    @property
    def n_prompt(self):
        return self.n_cached + self.n_prompt_rest + 1

    @property
    def n_to_stop(self):
        return self.n_prompt_rest

    @property
    def seconds_left(self):
        return self.n_prompt_rest / self.prefill_speed


def choose(policy, candidates, *, is_decoding=False, is_background=False):
    """Whose turn it is, as the first of its step."""
    return policy.choose_turn(
        candidates,
        is_decoding=is_decoding,
        is_background=is_background,
        is_alone=False,
        pause_left=None,
    )


def run_slice(policy, candidates, *, seconds, is_decoding=False):
    """Let the next candidate prefill for so long, as Scheduler does; returns it.

    None if decoding has to catch up.
    """
    turn = choose(policy, candidates, is_decoding=is_decoding)
    if turn is None:
        return None
    turn.chosen.n_prompt_rest -= int(seconds * turn.chosen.prefill_speed)
    policy.charge_prefill(
        turn,
        seconds,
        is_only_prefill=len(candidates) == 1,
        is_decoding=is_decoding,
    )
    return turn.chosen


# -- who is read together --------------------------------------------------------------


def companions(chosen, *others, max_tokens=400, max_padding=0.25, free_padding=0):
    prompts = [Prefill(0.0, length) for length in (chosen, *others)]
    found = s.choose_companions(
        prompts[0],
        prompts[1:],
        max_tokens=max_tokens,
        max_padding=max_padding,
        free_padding=free_padding,
    )
    return [prompt.n_prompt_rest for prompt in found]


def test_prompts_of_like_lengths_are_read_together():
    assert companions(40, 300, 44, 41, 47) == [41, 44, 47]
    assert companions(40) == []


def test_policy_reads_unlike_lengths_together_where_padding_costs_less_than_a_call():
    assert companions(40, 75, 110, free_padding=0) == []
    assert companions(40, 75, 110, free_padding=35) == [75]
    assert companions(40, 75, 110, free_padding=60) == [75, 110]


@pytest.mark.parametrize("seed", range(20))
def test_a_joint_call_keeps_to_its_tokens_and_its_padding(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 200) for _ in range(30)]
    chosen, *others = lengths

    group = [chosen, *companions(chosen, *others)]

    n_fed = max(group) * len(group)
    assert len(group) == 1 or n_fed <= min(400, 1.25 * sum(group))


# -- which one -------------------------------------------------------------------------


def test_policy_gives_the_oldest_a_ninth_of_the_time():
    policy = s.PrefillPolicy()
    old = Prefill(0.0, 10**9)
    n_slices_of_old = 0

    for n in range(5000):
        candidates = [old, Prefill(1.0 + n, 300), Prefill(2.0 + n, 200)]
        chosen = run_slice(policy, candidates, seconds=0.1)
        n_slices_of_old += chosen is old

    share = (5000 - n_slices_of_old) / n_slices_of_old
    assert share == pytest.approx(s.MAX_OTHERS_SHARE, rel=0.02)


@pytest.mark.parametrize("seconds", [0.6, 0.85, 2.0])
def test_policy_makes_a_prompt_wait_for_shorter_ones_by_its_length(seconds):
    """why(L-71): one of 0.85 s waited 26 s for short ones, behind which others decoded."""
    policy = s.PrefillPolicy()
    policy.oldest_credit = -s.SLICE_SECONDS * s.MAX_OTHERS_SHARE
    old = Prefill(0.0, int(seconds * SPEED))
    now = 0.0

    while old.n_prompt_rest > 0:
        policy.charge_decode(0.03)
        now += 0.03
        candidates = [old, Prefill(now, 100)]
        if run_slice(policy, candidates, seconds=0.1, is_decoding=True):
            now += 0.1

    longest_start = 3 * s.SLICE_SECONDS * s.MAX_OTHERS_SHARE + s.MAX_DECODE_DEBT
    assert now < longest_start + 3 * seconds * (1 + seconds / s.SOON_SECONDS)


def test_policy_reads_equal_prompts_one_after_the_other():
    """In turns, all would end last (L-71)."""
    policy = s.PrefillPolicy()
    candidates = [Prefill(float(n), 2000) for n in range(6)]
    order = []

    while candidates:
        chosen = run_slice(policy, candidates, seconds=0.2)
        if chosen.n_prompt_rest <= 0:
            candidates.remove(chosen)
            order.append(chosen.submitted_at)

    assert order == sorted(order)


def test_policy_judges_the_oldest_in_the_background_by_the_account_of_long_prompts():
    policy = s.PrefillPolicy()
    policy.burst_seconds = s.BURST_SECONDS  # bars short ones, but in front
    policy.oldest_credit = 0.1
    oldest = Prefill(0.0, 100)

    turn = choose(
        policy, [oldest, Prefill(1.0, 50)], is_decoding=True, is_background=True
    )

    assert turn.chosen is oldest


# -- beside decoding -------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [int(SPEED * s.SOON_SECONDS) - 1, s.SHORT_TOKENS])
def test_policy_lets_decoding_wait_for_short_prompts_but_not_forever(n_tokens):
    """why(L-68)"""
    policy = s.PrefillPolicy()
    n_slices = 0

    while turn := choose(policy, [Prefill(0.0, n_tokens)], is_decoding=True):
        policy.charge_prefill(turn, 0.2, is_only_prefill=True, is_decoding=True)
        n_slices += 1

    assert n_slices == pytest.approx(s.BURST_SECONDS / 0.2, abs=1)
    assert not choose(policy, [Prefill(0.0, 10**6)], is_decoding=True)


# -- how long --------------------------------------------------------------------------


def prompt_with_images(rng, n):
    """Tokens, and the ranges of the images among them."""
    tokens = np.arange(10, 10 + n, dtype=np.int32)
    images = []
    position = 0
    while position + 40 < n:
        position += rng.randrange(30)
        image = slice(position, min(position + rng.randrange(2, 90), n - 1))
        digest = rng.randbytes(32).hex()
        tokens = s.inject_image_markers(tokens, image, digest=digest)
        images.append(image)
        position = image.stop + rng.randrange(2)

    return tokens, images


def test_slice_end_is_never_inside_an_image_and_always_further():
    rng = random.Random(3)
    for _ in range(300):
        tokens, images = prompt_with_images(rng, rng.randrange(80, 900))
        image_starts = [image.start for image in images]
        image_ends = [image.stop for image in images]
        start = rng.choice([0, *image_starts, *image_ends])
        later_ends = [end for end in image_ends if end > start]
        stop = min([*later_ends[:1], len(tokens) - 1])
        if stop <= start:
            continue

        max_tokens = rng.randrange(1, 400)
        end = s.slice_end(tokens, start, stop=stop, max_tokens=max_tokens)

        assert start < end <= stop
        assert not s.is_inside_image(tokens, end)
        if stop - start - max_tokens < s.MIN_WAIT_GAIN_TOKENS:
            assert end == stop, "who waits for the stop would prefill the rest"
        elif end != stop:
            assert end <= start + max_tokens


def test_affordable_tokens_fall_with_depth_where_attention_keeps_scores():
    """why(L-55)"""
    costs = [s.SliceCost(end, 1000.0 + 2.0 * end) for end in range(100, 3000, 100)]

    at_1000 = s.affordable_tokens(costs, 1000, working_bytes=6_000_000)
    at_9000 = s.affordable_tokens(costs, 9000, working_bytes=6_000_000)

    assert at_1000 == pytest.approx(6_000_000 / (2 * 3000))
    assert at_9000 == pytest.approx(6_000_000 / (2 * 19_000))


# -- what a prompt would cost ----------------------------------------------------------


def model_seconds(start, end):
    """A model: 0.05 s a call, 1,000 tokens a second, and twice that at 10,000 deep."""
    return 0.05 + (end - start) / 1000 + (end**2 - start**2) / 2 / 10_000_000


def read_prompt(times, start, end, *, slice_tokens=2048, delay=1.0):
    """Time the slices of a prompt; returns their seconds. `delay`: a factor."""
    total = 0.0
    for begin in range(start, end, slice_tokens):
        stop = min(begin + slice_tokens, end)
        seconds = delay * model_seconds(begin, stop)
        times.add(s.TimedSlice(stop - begin, (begin + stop) / 2, seconds))
        total += seconds
    return total


def test_slices_that_had_to_wait_do_not_make_the_cache_look_better():
    times = s.PrefillTimes(2048)
    cold = read_prompt(times, 0, 20_000, delay=40.0)  # kernels are compiled
    cold = read_prompt(times, 0, 20_000)
    read_prompt(times, 0, 20_000, delay=3.0)  # the machine is busy

    assert times.cold_seconds(20_000) == pytest.approx(cold, rel=0.01)


@pytest.mark.parametrize("n_tokens", [64, 200, 600])
def test_what_short_deep_slices_leave_open_is_not_counted_as_saved(n_tokens):
    """As after a restart, with KV from the disk: no cold prompt was read."""
    times = s.PrefillTimes(2048)
    cold = read_prompt(s.PrefillTimes(2048), 0, 30_000)

    read_prompt(times, 30_000, 30_000 + n_tokens)

    assert 0 < times.cold_seconds(30_000) <= 1.01 * cold


def test_nothing_is_claimed_before_a_slice_was_timed():
    times = s.PrefillTimes(2048)

    assert times.cold_seconds(20_000) is None
    assert times.expected_seconds(0, 20_000) is None


# -- memory that ran out ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "is_memory"),
    [
        ("[metal::malloc] Attempting to allocate 9 bytes which is greater", True),
        ("[malloc] Unable to allocate 9 bytes.", True),
        ("[METAL] Command buffer execution failed: Insufficient Memory", True),
        ("cudaMallocAsync(&data, size, stream) failed: out of memory", True),
        ("the buffer was deallocated while it was read", False),
        ("unknown allocation kind", False),
    ],
)
def test_scheduler_knows_the_sentences_that_mean_memory_ran_out(sentence, is_memory):
    assert s._is_out_of_memory(RuntimeError(sentence)) is is_memory
