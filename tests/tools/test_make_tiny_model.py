"""The tiny models: replies parse, re-tokenise to themselves, and betray a wrong cache."""

import random
import re

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from nights import at_night
from tiny_models import (
    DENSE,
    HYBRID,
    KINDS,
    PARAMETERS,
    TOOLS,
    WORDS,
    load_script,
)

CALL = (
    r"<tool_call>\n<function=\w+>\n"
    r"(?:<parameter=\w+>\n[^<>\n]+\n</parameter>\n)+</function>\n</tool_call>"
)
REPLY = re.compile(
    r"[A-Z][A-Za-z ]+\.\n</think>\n\n"
    rf"(?:[A-Z][a-z ]+(?:\.\n\n)?)*(?:{CALL})*<\|im_end\|>"
)


@pytest.fixture(
    scope="module", params=[DENSE, *(at_night(kind) for kind in KINDS if kind != DENSE)]
)
def loaded(request, models):
    return mlx_lm.load(str(models(request.param)))


def prompt_of(tokenizer, seed, *, n_words, changed=None):
    """A question of random words; word number `changed` is another."""
    chosen = random.Random(seed).choices(WORDS, k=n_words)
    if changed is not None:
        chosen[changed] = "winter"
    messages = [{"role": "user", "content": " ".join(chosen)}]
    return tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True
    )


def test_replies_end_by_themselves_parse_and_retokenise(loaded):
    model, tokenizer = loaded
    replies = []
    for seed in range(10):
        prompt = mx.array(prompt_of(tokenizer, seed, n_words=5 + seed))
        reply = []
        for token, _ in generate_step(prompt, model, max_tokens=200):
            reply.append(int(token))
            if token in tokenizer.eos_token_ids:
                break
        replies.append(reply)

    texts = [tokenizer.decode(reply) for reply in replies]
    ended = [text for text in texts if text.endswith("<|im_end|>")]
    assert len(ended) >= 9
    assert all(REPLY.fullmatch(text) for text in ended), ended
    assert 2 <= sum("<tool_call>" in text for text in texts) <= 8
    assert len({*texts}) >= 8
    for name, keys in re.findall(
        r"<function=(\w+)>\n(.+?)</function>", "".join(texts), re.DOTALL
    ):
        assert sorted(re.findall(r"<parameter=(\w+)>", keys)) == sorted(
            PARAMETERS[name]
        )
    for text, reply in zip(texts, replies, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == reply


def test_a_changed_word_far_back_and_a_skipped_token_change_the_logits(loaded):
    model, tokenizer = loaded
    prompt = prompt_of(tokenizer, 4, n_words=200)
    changed = prompt_of(tokenizer, 4, n_words=200, changed=30)
    skipped = prompt[:100] + prompt[101:]
    logits, *others = (
        model(mx.array([tokens]))[0, -1] for tokens in (prompt, changed, skipped)
    )
    for other in others:
        assert mx.abs(logits - other).max().item() > 1e-3


def test_what_is_stale_is_made_again(tmp_path):
    script = load_script()
    recipe = script.choose_recipe(HYBRID, size="tiny")
    folder = tmp_path / "tiny"

    assert script.make_model(folder, recipe)
    weights = (folder / "model.safetensors").read_bytes()
    assert not script.make_model(folder, recipe)
    (folder / "config.json").write_text("{}")
    assert script.make_model(folder, recipe)

    assert (folder / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
