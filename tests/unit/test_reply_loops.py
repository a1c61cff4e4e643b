"""REQUEST HANDLING: a reply that goes round in circles is ended; other repeats are not."""

import base64
import json
import random

import pytest
import start_llm as s
from artifacts import artifact
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import at_night, examples
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def encode():
    """What makes a text a real model's tokens."""
    path = artifact("tokenizers", "qwen3.5.tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


GUARD = {"min_tokens": 2048, "min_repeats": s.MIN_REPEATS}  # as is advised


def find_end(ids, **rule):
    """After how many tokens a reply of these ends; None: it does not."""
    for n in range(s.LOOP_CHECK_TOKENS, len(ids) + 1, s.LOOP_CHECK_TOKENS):
        assert not s.find_loop(ids[: n - 1], **{**GUARD, **rule}), "it looks seldom"
        if s.find_loop(ids[:n], **{**GUARD, **rule}):
            return n
    return None


def find_slowly(ids, *, min_tokens, min_repeats):
    """The same by its definition: the shortest end that consists of enough repeats."""
    for n_last in range(min_tokens, len(ids) + 1):
        end = ids[-n_last:]
        for period in range(1, n_last // min_repeats + 1):
            if end[period:] == end[:-period]:
                return period
    return 0


@settings(max_examples=examples(60), deadline=None)
@given(
    passage=st.lists(st.integers(0, 1), min_size=1, max_size=24),
    n_repeats=st.integers(1, 12),
    changes=st.lists(st.integers(0, 127), max_size=3),
    min_repeats=st.integers(2, 10),
)
def test_what_is_found_is_what_repeats(passage, n_repeats, changes, min_repeats):
    """Two different tokens only, and some changed: near repeats of all lengths."""
    ids = ([2, 3, 4, 5] * 32 + passage * n_repeats)[-128:]
    for position in changes:
        ids[position] ^= 1
    rule = {"min_tokens": 40, "min_repeats": min_repeats}
    assert s.find_loop(ids, **rule) == find_slowly(ids, **rule)


@pytest.mark.parametrize("n_before", [0, 63, 1000])
@pytest.mark.parametrize("period", [1, 41, 500])
def test_a_loop_is_found_before_it_is_a_quarter_longer(n_before, period):
    rng = random.Random(period)
    ids = [rng.randrange(100_000) for _ in range(n_before)]
    ids += [rng.randrange(100_000) for _ in range(period)] * (10_000 // period)
    n_loop = max(400, s.MIN_REPEATS * period)

    end = find_end(ids, min_tokens=400)

    assert end is not None
    assert n_before + n_loop <= end <= n_before + n_loop + max(64, n_loop // 4)


def legitimate_texts():
    """What agents write, and what repeats by its nature."""
    rng = random.Random(0)
    row = {"id": 0, "name": "", "email": "", "active": False, "tags": [], "score": 0.0}
    walls = ",\n".join(["  [1," + "0," * 30 + "1]"] * 32)
    log = "2026-11-29 09:00:{:02} INFO worker-1 [main] o.e.Job - heartbeat ok, queue=0, lag=0ms\n"
    return {
        "a map of 32 times 32": f"const map = [\n{walls}\n];\n",
        "rows of JSON": json.dumps([row] * 40, indent=1),
        "a table": "| name | value | note |\n" + "| - | 0 | |\n" * 150,
        "a log": "".join(log.format(i % 60) for i in range(300)),
        "zeros in base64": base64.b64encode(bytes(6000)).decode(),
        "base64": base64.b64encode(rng.randbytes(30_000)).decode(),
        "minified code": "!function(e){var t={};"
        + "e.a=function(){return 1};" * 100
        + "}();",
        "a long list": "\n".join(f"- [ ] step {i}: run the test" for i in range(600)),
        "a rule": "-" * 4000 + "\n" + "=" * 4000,
    }


BY_DAY = {"a map of 32 times 32", "rows of JSON", "a table", "zeros in base64"}


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else at_night(name) for name in legitimate_texts()]
)
def test_texts_that_repeat_by_their_nature_are_written_to_their_end(name, encode):
    ids = encode(legitimate_texts()[name])
    assert find_end(ids) is None


def test_a_token_costs_the_same_in_a_reply_of_any_length():
    """Counted: how many tokens are looked at for each token of a reply."""
    looked_at = 0

    class Reply:
        def __init__(self, n):
            self.n = n

        def __len__(self):
            return self.n

        def __getitem__(self, part):
            nonlocal looked_at
            n = min(self.n, -part.start)
            looked_at += n
            return [0, 1]

    for length in (4096, 32_768, 262_144):
        looked_at = 0
        for n in range(s.LOOP_CHECK_TOKENS, length + 1, s.LOOP_CHECK_TOKENS):
            s.find_loop(Reply(n), **GUARD)
        assert looked_at / length < 34
