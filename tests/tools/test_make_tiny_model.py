"""The tiny models: replies parse, re-tokenise to themselves, and betray a wrong cache."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from tiny_models import (
    HYBRID,
    KINDS,
    MLA,
    PARAMETERS,
    SCRIPT,
    TOOLS,
    WORDS,
    load_script,
    tiny_model,
)

SLIDING_KINDS = ("gemma3_text", "gpt_oss")
REPLY = re.compile(
    r"(?P<thinking>[A-Z][A-Za-z ]+\.)\n</think>\n\n"
    r"(?P<text>(?:[A-Z][a-z ]+(?:\.\n\n)?)*)(?P<calls>(?:<tool_call>.*?</tool_call>)*)<\|im_end\|>",
    re.DOTALL,
)
CALL = re.compile(
    r"<tool_call>\n<function=(?P<name>\w+)>\n"
    r"(?P<arguments>(?:<parameter=\w+>\n[^<>\n]+\n</parameter>\n)+)</function>\n</tool_call>"
)
ARGUMENT = re.compile(r"<parameter=(\w+)>\n(.+)\n</parameter>\n")

# A BLAS that picks its kernel by the number of rows rounds a chunk otherwise than the whole.
ROUNDING = 1e-3 if "blas" in os.environ.get("LD_PRELOAD", "") else 0.0


@dataclass(frozen=True)
class Loaded:
    kind: str
    model: Any
    tokenizer: Any

    def prompt(
        self, seed: int, *, n_words: int = 40, changed: int | None = None
    ) -> list[int]:
        """A conversation of one question of random words; word number `changed` is another."""
        chosen = random.Random(seed).choices(WORDS, k=n_words)
        if changed is not None:
            chosen[changed] = "winter"
        messages = [{"role": "user", "content": " ".join(chosen)}]
        return self.tokenizer.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True
        )

    def generate(
        self, prompt: list[int], *, limit: int, sampler: Any = None
    ) -> tuple[list[int], mx.array]:
        """A reply, and the log-probabilities of its first token: (vocabulary,)."""
        reply: list[int] = []
        first_logprobs = mx.array([])
        steps = generate_step(
            mx.array(prompt), self.model, max_tokens=limit, sampler=sampler
        )
        for token, logprobs in steps:
            if not reply:
                first_logprobs = logprobs
            reply.append(int(token))
            if reply[-1] in self.tokenizer.eos_token_ids:
                break
        return reply, first_logprobs

    def reply(self, prompt: list[int], *, sampler: Any = None) -> list[int]:
        reply, _ = self.generate(prompt, limit=200, sampler=sampler)
        return reply

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


# Of the rest, only the experts are new: those of "qwen3_5_moe" and "glm4_moe_lite" stand for them.
MADE_KINDS = [kind for kind in KINDS if kind not in ("qwen3_moe", "glm4_moe")]


one_kind_each = pytest.mark.covering(1, over="module")


@pytest.fixture(scope="module", params=MADE_KINDS)
def loaded(request, tmp_path_factory) -> Loaded:
    folder = tiny_model(request.param, tmp_path_factory.getbasetemp() / "models")
    return Loaded(request.param, *mlx_lm.load(str(folder)))


@pytest.fixture(scope="module")
def replies(loaded: Loaded) -> list[tuple[list[int], list[int]]]:
    """20 greedy replies, each with its prompt."""
    prompts = [loaded.prompt(seed, n_words=5 + seed) for seed in range(20)]
    return [(prompt, loaded.reply(prompt)) for prompt in prompts]


def parsed(text: str) -> dict[str, Any]:
    """A reply as the message that a client would send back."""
    match = REPLY.fullmatch(text)
    assert match, text

    calls = []
    for call in CALL.finditer(match["calls"]):
        arguments = dict(ARGUMENT.findall(call["arguments"]))
        calls.append({"function": {"name": call["name"], "arguments": arguments}})

    assert calls or match["text"]
    assert match["calls"].count("<tool_call>") == len(calls), text

    return {
        "role": "assistant",
        "reasoning_content": match["thinking"],
        "content": match["text"].strip(),
        "tool_calls": calls,
    }


@one_kind_each
def test_greedy_replies_end_by_themselves_and_parse(loaded, replies):
    end_ids = loaded.tokenizer.eos_token_ids
    ended = [reply for _, reply in replies if reply[-1] in end_ids]
    assert len(ended) >= 18

    lengths = sorted(len(reply) for reply in ended)
    assert lengths[0] >= 8
    assert lengths[len(lengths) * 8 // 10] <= 60

    for reply in ended:
        for call in parsed(loaded.text(reply))["tool_calls"]:
            function = call["function"]
            assert set(function["arguments"]) == set(PARAMETERS[function["name"]])


@one_kind_each
def test_text_and_calls_are_both_common(loaded, replies):
    with_call = sum("<tool_call>" in loaded.text(reply) for _, reply in replies)
    assert 4 <= with_call <= 16
    assert len({tuple(reply) for _, reply in replies}) >= 17


@one_kind_each
def test_sampled_replies_parse_too(loaded):
    mx.random.seed(5)
    sampler = make_sampler(temp=1.0)
    sampled = [loaded.reply(loaded.prompt(1), sampler=sampler) for _ in range(6)]
    for reply in sampled:
        if reply[-1] in loaded.tokenizer.eos_token_ids:
            parsed(loaded.text(reply))
    assert len({tuple(reply) for reply in sampled}) > 3


@one_kind_each
def test_reply_retokenises_to_itself(loaded, replies):
    for _, reply in replies:
        assert loaded.encode(loaded.text(reply)) == reply


@one_kind_each
def test_parsed_reply_renders_to_the_generated_tokens(loaded, replies):
    for prompt, reply in replies:
        if reply[-1] not in loaded.tokenizer.eos_token_ids:
            continue
        question = loaded.text(prompt).split("user\n")[-1].split("<|im_end|>")[0]
        messages = [{"role": "user", "content": question}, parsed(loaded.text(reply))]
        messages += [
            {"role": "tool", "content": "12 degrees"},
            {"role": "tool", "content": "ok"},
        ]
        rendered = loaded.tokenizer.apply_chat_template(messages, tools=TOOLS)
        assert rendered[: len(prompt) + len(reply)] == prompt + reply


def first_difference(left: list[int], right: list[int]) -> int:
    """Where two prompts differ first. Raises ValueError where one begins with the other."""
    for index, (token, other_token) in enumerate(zip(left, right, strict=False)):
        if token != other_token:
            return index
    raise ValueError("one prompt begins with the other")


@one_kind_each
def test_a_word_far_back_changes_logits_and_words(loaded):
    differing = 0
    for seed in range(5):
        prompt = loaded.prompt(seed, n_words=200)
        changed_prompt = loaded.prompt(seed, n_words=200, changed=30)
        changed_at = first_difference(prompt, changed_prompt)
        assert len(prompt) - changed_at > 300

        reply, logprobs = loaded.generate(prompt, limit=40)
        changed_reply, changed_logprobs = loaded.generate(changed_prompt, limit=40)
        assert mx.abs(logprobs - changed_logprobs).max().item() > 1e-3
        differing += reply != changed_reply

    assert differing >= 3


@one_kind_each
def test_warm_logits_equal_cold_logits(loaded):
    tokens = mx.array([loaded.prompt(3, n_words=120)])
    n = tokens.shape[1]
    cold = loaded.model(tokens)[0]

    for cuts in ([n // 2], [n - 1], [63, 64, 65, 200], [n - 3, n - 2, n - 1]):
        cache = make_prompt_cache(loaded.model)
        pieces = [
            loaded.model(tokens[:, begin:end], cache=cache)[0]
            for begin, end in zip([0, *cuts], [*cuts, n], strict=True)
        ]
        is_inexact = loaded.kind in {*SLIDING_KINDS, MLA}
        allowed = max(ROUNDING, 1e-4 if is_inexact else 0.0)
        assert mx.abs(mx.concatenate(pieces) - cold).max().item() <= allowed


@one_kind_each
def test_a_skipped_token_changes_the_logits(loaded):
    prompt = loaded.prompt(4, n_words=150)
    shorter = prompt[:100] + prompt[101:]
    cold, wrong = (
        loaded.model(mx.array([tokens]))[0, -1] for tokens in (prompt, shorter)
    )
    assert mx.abs(cold - wrong).max().item() > 1e-3


@one_kind_each
@pytest.mark.parametrize("name", ["read", "list_files"])
@pytest.mark.parametrize("line_end", ["", "\n"])
def test_a_forced_opening_becomes_a_whole_call(loaded, name, line_end):
    opening = f"Maybe.\n</think>\n\n<tool_call>\n<function={name}>{line_end}"
    reply = loaded.reply(loaded.prompt(6) + loaded.encode(opening))
    call = CALL.match(opening[opening.index("<tool_call>") :] + loaded.text(reply))
    assert call
    assert call["name"] == name


def test_sliding_layers_rotate_and_hybrids_keep_a_state(loaded):
    kinds = {type(layer).__name__ for layer in make_prompt_cache(loaded.model)}
    special = {
        **dict.fromkeys(SLIDING_KINDS, "RotatingKVCache"),
        **dict.fromkeys((HYBRID, "qwen3_next", "qwen3_5_moe"), "ArraysCache"),
    }
    assert kinds == {"KVCache", special.get(loaded.kind, "KVCache")}


def test_tokenizer_is_the_same_for_all_kinds(loaded):
    script = load_script()
    ours = script.make_tokenizer()
    sample = (SCRIPT.read_text() + "naïve café 東京 \u00a0\t\r\n\n 12345 don't")[-6000:]
    assert loaded.encode(sample) == ours.encode(sample, add_special_tokens=False).ids
    assert loaded.text(loaded.encode(sample)) == sample
    assert loaded.tokenizer.has_thinking
    assert loaded.tokenizer.tool_call_start == "<tool_call>"
    assert 1000 <= len(loaded.tokenizer) <= 2500


# Chat template --------------------------------------------------------------------


@pytest.fixture(scope="module")
def render(tmp_path_factory):
    _, tokenizer = mlx_lm.load(
        str(tiny_model("qwen3", tmp_path_factory.getbasetemp() / "models"))
    )

    def render(messages, **switches) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, **{"enable_thinking": True, **switches}
        )

    return render


USER = {"role": "user", "content": "Question."}
THOUGHT = {"role": "assistant", "content": "Answer.", "reasoning_content": "Thought."}


def test_generation_prompt_opens_or_closes_thinking(render):
    opened = render([USER], add_generation_prompt=True)
    closed = render([USER], add_generation_prompt=True, enable_thinking=False)
    assert opened.endswith("<|im_start|>assistant\n<think>\n")
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_thinking_before_the_newest_question_is_stripped_unless_preserved(render):
    messages = [USER, THOUGHT, USER, THOUGHT]
    reply = "<|im_start|>assistant\n<think>\nThought.\n</think>\n\nAnswer.<|im_end|>\n"
    assert render(messages).count(reply) == 1
    assert render(messages, preserve_thinking=True).count(reply) == 2
    assert "<|im_start|>assistant\nAnswer.<|im_end|>\n" in render(messages)


def test_tool_results_share_a_user_turn_and_do_not_count_as_a_question(render):
    call = {"function": {"name": "read", "arguments": {"path": "a", "lines": [1, 2]}}}
    turn = {**THOUGHT, "content": None, "tool_calls": [call, call]}
    results = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]

    text = render([USER, turn, *results])

    call_start = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\n"
    call_end = "<parameter=lines>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    assert f"</think>\n\n{call_start}" in text
    assert f"{call_end}<|im_end|>" in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_system_text_tools_and_part_lists_are_rendered(render):
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    text = render([{"role": "system", "content": parts}, USER], tools=TOOLS)
    assert text.startswith("<|im_start|>system\n# Tools")
    assert all(json.dumps(tool) in text for tool in TOOLS)
    assert "Be brief.<|im_end|>\n<|im_start|>user\nQuestion.<|im_end|>\n" in text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": "Only this."}],
        [USER, {"role": "system", "content": "Late."}],
        [{"role": "developer", "content": "Unknown."}, USER],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_template_refuses_what_it_does_not_know(render, messages):
    with pytest.raises(Exception, match=r"message|role|text parts"):
        render(messages)


# Program ----------------------------------------------------------------------------


def digest(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


def test_command_line_is_repeatable_and_replaces_what_is_stale(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path / "tiny")]

    first_run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert first_run.stdout.startswith("made qwen3 model")
    assert first_run.stdout.count("\n") == 1
    first_digest = digest(tmp_path / "tiny")

    second_run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert second_run.stdout.startswith("found ")

    (tmp_path / "tiny" / "config.json").write_text("{}")
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert digest(tmp_path / "tiny") == first_digest
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_other_seeds_and_sizes_are_other_models(tmp_path):
    folders = [tiny_model("qwen3", tmp_path, seed=seed) for seed in (1, 2)]
    folders += [
        tiny_model("qwen3", tmp_path, layers=4),
        tiny_model("qwen3", tmp_path, seed=1),
    ]
    assert len({digest(folder)["model.safetensors"] for folder in folders}) == 3

    with pytest.raises(ValueError, match="kind"):
        tiny_model("qwen9", tmp_path)
    with pytest.raises(ValueError, match="layers"):
        tiny_model("qwen3", tmp_path, layers=3)
