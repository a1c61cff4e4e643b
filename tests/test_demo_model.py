"""models/demo: what is shipped loads, is small, and works as an agent's model, end to end."""

import importlib.util
import json
import random
import sys
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from demo_dialogues import Words, is_held_out, write_conversation
from mlx_lm.utils import load_tokenizer
from serving import Served

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "models" / "demo"
MOST_BYTES = 30_000_000
trained = pytest.mark.skipif(not FOLDER.is_dir(), reason="models/demo is not trained yet")
READ = {
    "type": "function",
    "function": {
        "name": "peek_document",
        "description": "Read a file and return its text.",
        "parameters": {
            "type": "object",
            "properties": {"document": {"type": "string", "description": "Path to the file"}},
            "required": ["document"],
        },
    },
}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@pytest.fixture(scope="module")
def served():
    with closing(Served(FOLDER)) as running:
        yield running


def bench():
    """benchmarks/demo_model.py; benchmarks/ is no package."""
    path = ROOT / "benchmarks" / "demo_model.py"
    spec = importlib.util.spec_from_file_location("demo_model_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_model_benchmark"] = module
    spec.loader.exec_module(module)
    return module


# -- the folder ------------------------------------------------------------------------------------


@trained
def test_the_folder_is_whole_and_small():
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= MOST_BYTES
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3_5" and config["max_position_embeddings"] >= 32_768


@trained
def test_its_template_is_the_one_that_it_was_trained_with():
    template = (FOLDER / "chat_template.jinja").read_text("utf-8")
    assert template == (ROOT / "scripts" / "demo_chat_template.jinja").read_text("utf-8")


@trained
def test_a_name_is_cut_the_same_way_wherever_it_stands():
    tokenizer = load_tokenizer(FOLDER)
    for name in ("src/main_loop.py", "fetchInvoice", "KEY_7", "zorblat"):
        bare = tokenizer.tokenize(name)
        for around in (" {}", "\n{}", '"{}"', "={}", ">\n{}\n<"):
            pieces = [p.removeprefix("Ġ") for p in tokenizer.tokenize(around.format(name))]
            assert any(pieces[i : i + len(bare)] == bare for i in range(len(pieces)))


@trained
def test_mlx_says_what_the_trainers_own_network_said():
    """The delta rule in chunks, which it was trained with, is the one that mlx-lm steps through."""
    stated = json.loads((FOLDER / "check.json").read_text())
    model, _ = mlx_lm.load(str(FOLDER))
    logits = model(mx.array([stated["tokens"]]))[0, -1].tolist()
    assert logits[: len(stated["logits"])] == pytest.approx(stated["logits"], abs=1e-3)


# -- what it learnt from ---------------------------------------------------------------------------


def test_a_conversation_is_of_its_seed_alone():
    for held_out in (False, True):
        one, same, other = (
            write_conversation(random.Random(seed), held_out=held_out) for seed in (1, 1, 2)
        )
        assert one == same != other


def test_no_invented_word_is_in_both_halves():
    learnt, held = (Words(random.Random(3), half) for half in (False, True))
    assert not any(is_held_out(learnt.invented()) for _ in range(200))
    assert all(is_held_out(held.noun()) for _ in range(200))


@trained
def test_the_right_reply_is_judged_right():
    measure = bench()
    tokenizer = load_tokenizer(FOLDER)
    start = "<|im_start|>assistant\n<think>\n"
    for seed in range(40):
        conversation = write_conversation(random.Random(seed), held_out=True)
        messages = conversation.messages()
        for case in measure.cases(conversation):
            past = [*case.messages, messages[len(case.messages)]]
            said = tokenizer.apply_chat_template(
                past, tools=case.tools or None, tokenize=False, preserve_thinking=True
            )
            reply = said[said.rindex(start) + len(start) :].removesuffix("<|im_end|>\n")
            verdict = measure.judge(case, reply)
            assert verdict and all(verdict.values()), (case, reply)
            wrong = measure.judge(case, "Hm.\n</think>\n\nxyzzy")
            assert wrong and not any(wrong.values())


# -- as an agent's model ---------------------------------------------------------------------------


@trained
def test_an_agent_loop_end_to_end(served):
    """Real generation through the real server: a call by an unknown schema, then the answer."""
    question = {"role": "user", "content": "What is the deadline in notes/marble.txt?"}
    fields = {"tools": [READ]}
    first = served.ask([SYSTEM, question], **fields)
    assert first.finish_reason == "tool_calls"
    (call,) = first.answer["tool_calls"]
    assert call["function"]["name"] == "peek_document"
    assert json.loads(call["function"]["arguments"]) == {"document": "notes/marble.txt"}
    assert first.answer["reasoning_content"].strip()
    result = "owner: Dana\ndeadline: 2027-03-14\nbudget: 1200"
    told = {"role": "tool", "tool_call_id": call["id"], "content": result}
    second = served.ask([SYSTEM, question, first.answer, told], **fields)
    assert second.finish_reason == "stop" and not second.answer.get("tool_calls")
    assert "2027-03-14" in second.answer["content"]
    # All that was read and said before is there again: the state at the turn's end is kept.
    assert second.n_cached >= first.usage["prompt_tokens"]


@trained
def test_a_greeting_needs_no_tool(served):
    told = served.ask([SYSTEM, {"role": "user", "content": "Hello"}], tools=[READ])
    assert not told.answer.get("tool_calls") and "demo model" in told.answer["content"]


@trained
def test_it_knows_its_server(served):
    port = {"role": "user", "content": "Which port does the server use?"}
    assert "8080" in served.ask([port], tools=[]).answer["content"]
