"""A long text is tokenized in parts, and has the tokens that it has as a whole (L-118)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import start_llm as s
from mlx_lm.utils import load_tokenizer
from templates import chat, said
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "start-llm.py").read_text() + (ROOT / "README.md").read_text()
ODD = [
    *(" ", "\n", "\n\n   \n", " " * 9, "\r\n", "\t\tab cd", " \u00a0x", "a " * 20),
    *("\u4e2d\u6587\u5b57\u7b26\u3002\u65b0\u7684", "\u00e9\u0301 go on", "\ufb01"),
    *("\U0001f642\u200d\U0001f467", "123456 7", "'s 'll DON'T x", "aB cD", "<0x0A>"),
]


def demo() -> Tokenizer:
    """Byte-level BPE with the regular expression of its family."""
    original = Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json"))
    plain = Tokenizer(original.model)
    plain.normalizer = original.normalizer
    plain.pre_tokenizer = original.pre_tokenizer
    return plain


def tokenizers() -> Iterator[tuple[str, Tokenizer]]:
    """The same vocabulary, used as each kind of tokenizer uses its own."""
    yield "byte-level", demo()
    spaced = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    llama = demo()
    llama.pre_tokenizer = pre_tokenizers.Sequence([])
    llama.normalizer = normalizers.Sequence(spaced)
    yield "a space is put before each text", llama
    gemma = demo()
    gemma.pre_tokenizer = pre_tokenizers.Sequence([])
    gemma.normalizer = spaced[1]
    yield "no words are parted", gemma
    metaspace = demo()
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    yield "words with a space before them", metaspace


TOKENIZERS = dict(tokenizers())


def texts(n: int) -> Iterator[str]:
    rng = random.Random(5)
    for _ in range(n):
        parts = []
        for _ in range(rng.randrange(40)):
            start = rng.randrange(len(SOURCE) - 300)
            excerpt = SOURCE[start : start + rng.randrange(300)]
            parts.append(rng.choice([excerpt, excerpt, rng.choice(ODD)]))
        yield "".join(parts)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_parts_have_the_tokens_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(s, "_PIECE_CHARACTERS", 80)
    cutter = s._TextCutter(TOKENIZERS[name])
    encode = partial(s._encode_plain, TOKENIZERS[name])
    n_parts = 0

    for text in texts(100):
        parts = list(cutter.split(text))
        assert [i for p in parts for i in encode(p)] == encode(text)
        n_parts += len(parts)

    assert n_parts > 1_000


def test_no_text_is_cut_where_a_token_of_the_vocabulary_goes_on():
    vocabulary = demo().get_vocab()
    vocabulary["of\u0120the"] = len(vocabulary)
    crossing = Tokenizer(WordLevel(vocabulary, unk_token="of\u0120the"))

    assert "[ ]" in s._TextCutter(demo())._places.pattern
    assert "[ ]" not in s._TextCutter(crossing)._places.pattern


def test_no_part_is_much_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(s, "_PIECE_CHARACTERS", 1_000)
    parts = list(s._TextCutter(demo()).split(SOURCE))

    assert "".join(parts) == SOURCE
    assert max(map(len, parts)) < 3_000


@pytest.fixture(scope="module")
def template() -> s.ChatTemplate:
    tokenizer = load_tokenizer(ROOT / "models/demo")
    return s.ChatTemplate(
        tokenizer,
        s.Config(),
        think_start=tokenizer.think_start or "",
        think_end=tokenizer.think_end or "",
        ends=set(tokenizer.eos_token_ids),
    )


@pytest.fixture
def tokenized(monkeypatch) -> list[str]:
    """The texts that went through the tokenizer."""
    texts: list[str] = []
    tokenize = s._tokenize

    def noted(tokenizer, text):
        texts.append(text)
        return tokenize(tokenizer, text)

    encode_whole = s.Encoder._encode_whole

    def noted_whole(encoder, text):
        texts.append(text)
        return encode_whole(encoder, text)

    monkeypatch.setattr(s, "_PIECE_CHARACTERS", 1_000)
    monkeypatch.setattr(s, "_tokenize", noted)
    monkeypatch.setattr(s.Encoder, "_encode_whole", noted_whole)
    return texts


def test_a_prompt_far_over_the_context_is_not_tokenized_to_its_end(template, tokenized):
    request = chat([said("user", SOURCE)])
    unlimited = template.render_prompt(request)
    template.clear_memos()
    tokenized.clear()

    limited = replace(request, max_counted_tokens=2_000)
    rendered = template.render_prompt(limited)

    assert sum(map(len, tokenized)) < 40_000 < len(SOURCE) // 10
    assert len(rendered.ids) > 2_000
    assert rendered.n_tokens == pytest.approx(len(unlimited.ids), rel=0.5)


def test_a_prompt_within_the_limit_is_counted_exactly(template, tokenized):
    request = chat([said("user", SOURCE[:60_000])])
    unlimited = template.render_prompt(request)

    n_tokens = len(unlimited.ids)
    limited = replace(request, max_counted_tokens=n_tokens)
    assert template.render_prompt(limited) == unlimited
    assert template.render_prompt(limited).ids.tolist() == unlimited.ids.tolist()


def leave_at_look(number: int) -> Callable[[], None]:
    """A client that is gone when it is looked at for this time."""
    looks = count(1)

    def check_client() -> None:
        if next(looks) == number:
            raise s.ClientGone

    return check_client


def test_tokenizing_is_left_when_the_client_has_gone(template, tokenized):
    conversation = chat([said("user", SOURCE[::-1])])
    request = replace(conversation, check_client=leave_at_look(8))
    with pytest.raises(s.ClientGone):
        template.render_prompt(request)
    assert 0 < len(tokenized) <= 8


def test_a_long_completion_has_the_tokens_that_the_tokenizer_gives(template):
    text = SOURCE[:200_000]
    (encoding,) = template._encoder.tokenizer.encode_batch_fast([text])

    assert template.tokenize_completion(text).ids.tolist() == encoding.ids


# -- texts that cannot be cut

NO_WORDS = "".join(SOURCE.split()).replace("system-reminder", "")[:60_000]


@pytest.fixture(params=[True, False], ids=["can be split", "cannot be split"])
def uncut(request, template) -> s.ChatTemplate:
    """One whose texts cannot be cut, by a tokenizer of each kind."""
    copied = template.for_tenant(f"uncut {request.param}")
    copied._encoder.can_split = request.param
    copied._encoder._cutter = s._TextCutter(copied._encoder._piece_tokenizer)
    copied._encoder._cutter.__dict__["_places"] = re.compile(s._NO_MATCH)
    return copied


def ask(kind: str, text: str, **fields) -> s.ChatRequest:
    request = replace(chat([said("user", text)]), **fields)
    if kind == "completion":
        return replace(request, kind="completion", prompt=text)
    return request


KINDS = pytest.mark.parametrize("kind", ["chat", "completion"])


@KINDS
def test_far_over_the_context_no_text_is_tokenized_as_a_whole(kind, uncut, tokenized):
    n_tokens = len(uncut.render_prompt(ask(kind, NO_WORDS)).ids)
    uncut.clear_memos()
    tokenized.clear()

    rendered = uncut.render_prompt(ask(kind, NO_WORDS, max_counted_tokens=2_000))

    assert max(map(len, tokenized)) <= 4_000
    assert sum(map(len, tokenized)) < len(NO_WORDS) / 2
    assert len(rendered.ids) > 2_000
    assert rendered.n_tokens == pytest.approx(n_tokens, rel=0.5)


@KINDS
def test_a_text_without_cuts_has_its_own_tokens_within_the_limit(
    kind, uncut, tokenized
):
    text = NO_WORDS[:50_000]
    whole = uncut.render_prompt(ask(kind, text))
    n_tokens = len(whole.ids)
    uncut.clear_memos()

    rendered = uncut.render_prompt(ask(kind, text, max_counted_tokens=n_tokens + 200))

    assert rendered.ids.tolist() == whole.ids.tolist()
    encoding = uncut._encoder.tokenizer.encode(text, add_special_tokens=False)
    assert set(encoding.ids) <= set(rendered.ids.tolist())
    assert max(map(len, tokenized)) >= len(text)


@KINDS
def test_of_texts_without_cuts_one_is_tokenized_at_a_time(
    kind, uncut, tokenized, monkeypatch
):
    """Who leaves while it waits has tokenized pieces alone."""
    monkeypatch.setattr(s, "CLIENT_LOOK_SECONDS", 0.001)
    text = NO_WORDS[:50_000]
    request = ask(kind, text, check_client=leave_at_look(200))
    with (
        uncut._encoder._long_texts.reserve(1, s.assume_client),
        pytest.raises(s.ClientGone),
    ):
        uncut.render_prompt(request)
    assert max(map(len, tokenized)) <= 4_000


@KINDS
def test_a_text_that_would_take_too_much_as_a_whole_is_refused_by_its_field(
    kind, uncut, tokenized
):
    text = (NO_WORDS * 2)[:70_000]
    with pytest.raises(s.BadRequest, match="without two words") as refused:
        uncut.render_prompt(ask(kind, text))

    assert refused.value.param == ("prompt" if kind == "completion" else "messages")
    assert max(map(len, tokenized)) <= 4_000


def test_a_completion_far_over_the_context_is_not_tokenized_to_its_end(
    template, tokenized
):
    limited = ask("completion", SOURCE[::-1], max_counted_tokens=2_000)
    rendered = template.render_prompt(limited)

    assert sum(map(len, tokenized)) < 40_000 < len(SOURCE) // 10
    assert rendered.n_tokens > len(rendered.ids) > 2_000


def test_tokenizing_a_completion_is_left_when_the_client_has_gone(template, tokenized):
    request = ask("completion", SOURCE[::-1], check_client=leave_at_look(5))
    with pytest.raises(s.ClientGone):
        template.render_prompt(request)
    assert 0 < len(tokenized) <= 7
