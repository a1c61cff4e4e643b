"""Texts are tokenized between their added tokens; of long ones one at a time (L-118)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import start_llm as s
from mlx_lm.utils import load_tokenizer
from templates import chat, said

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "start-llm.py").read_text() + (ROOT / "README.md").read_text()


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

    def noted(tokenizer, text, **kwargs):
        texts.append(text)
        return tokenize(tokenizer, text, **kwargs)

    monkeypatch.setattr(s, "_tokenize", noted)
    return texts


def leave_at_look(number: int) -> Callable[[], None]:
    """A client that is gone when it is looked at for this time."""
    looks = count(1)

    def check_client() -> None:
        if next(looks) == number:
            raise s.ClientGone

    return check_client


def ask(kind: str, texts: list[str], **fields) -> s.ChatRequest:
    request = replace(chat([said("user", text) for text in texts]), **fields)
    if kind == "completion":
        return replace(request, kind="completion", prompt="".join(texts))
    return request


def test_tokenizing_is_left_when_the_client_has_gone(template, tokenized):
    texts = [f"{n} {SOURCE[n:][:100]}" for n in range(40)]
    request = ask("chat", texts, check_client=leave_at_look(8))
    with pytest.raises(s.ClientGone):
        template.render_prompt(request)
    assert 0 < len(tokenized) <= 8


def test_a_completion_has_the_tokens_that_the_tokenizer_gives(template):
    text = SOURCE[:200_000]
    (encoding,) = template._encoder.tokenizer.encode_batch_fast([text])
    assert template.tokenize_completion(text).ids.tolist() == encoding.ids


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_of_long_texts_one_is_tokenized_at_a_time(
    kind, template, tokenized, monkeypatch
):
    """Who leaves while it waits has had no long text tokenized; short ones go on."""
    monkeypatch.setattr(s, "CLIENT_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(s, "_LONG_CHARACTERS", 10_000)
    long = ask(kind, [SOURCE[:20_000]], check_client=leave_at_look(200))
    with template._encoder._long_texts.reserve(1, s.assume_client):
        with pytest.raises(s.ClientGone):
            template.render_prompt(long)
        assert max(map(len, tokenized), default=0) <= 10_000
        assert template.render_prompt(ask(kind, [SOURCE[:5_000]])).n_tokens > 1_000

    long = replace(long, check_client=s.assume_client)
    assert template.render_prompt(long).n_tokens > 4_000


def test_a_prompt_that_is_too_long_when_it_is_rendered_is_not_tokenized(
    template, tokenized
):
    """Replies are not counted before: their thinking may be left out (L-129)."""
    request = ask("chat", [SOURCE], max_prompt_characters=100_000)
    rendered = template.render_prompt(request)
    assert not tokenized
    assert rendered.n_tokens == pytest.approx(len(SOURCE) / 4, rel=0.1)
