"""A session of Claude Code on tiny models of the kinds that people run this year.

Layers and template are the real ones, weights and widths are not. The model writes by a script; its
logits are its own.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import start_llm as s
from artifacts import artifact
from client_bodies import CLAUDE, outcome, text
from cold_reference import Oracle
from minimum_prefill import Request, fewest
from mlx.utils import tree_flatten
from nights import at_night
from scripted_replies import force_tokens, with_processor
from server_fixture import RunningServer, free_port
from templates import MARKUP, tiny_vocabulary
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

WORDS = [
    *("the", "lake", "is", "quiet", "and", "path", "goes", "over", "a", "hill"),
    *("mill",),
]
SMALL = {
    **dict.fromkeys(("hidden_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    "num_attention_heads": 4,
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(
        (
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        32,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), 2),
}
N_LAYERS = 7


@dataclass(frozen=True)
class Kind:
    """A model: its files, how it calls, how a reply of it begins and ends."""

    config: str
    template: str
    call: str  # of Read, with PATH
    ends: tuple[str, str]  # of a text, of a call
    thought: str = ""
    tolerance: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)


QWEN_CALL = """\
<tool_call>
<function=Read>
<parameter=path>
PATH
</parameter>
</function>
</tool_call>"""
QWEN = partial(
    Kind, call=QWEN_CALL, ends=("<|im_end|>", "<|im_end|>"), thought="hm\n</think>\n\n"
)
GEMMA = partial(
    Kind,
    call='<|tool_call>call:Read{path:<|"|>PATH<|"|>}<tool_call|>',
    ends=("<turn|>", "<|tool_response>"),
    thought="<|channel>thought\nhm<channel|>",
    tolerance=1e-4,
)
KINDS = {
    "Qwen3.8-27B": QWEN("qwen3_5-27b", "qwen3.8"),
    "Qwen3.6-35B-A3B": QWEN("qwen3_5_moe-35b-a3b", "qwen3.6"),
    "gemma-4-26b-a4b": GEMMA("gemma4-26b-a4b", "gemma-4-july"),
    "gemma-4-E4B": GEMMA(
        "gemma4-e4b", "gemma-4-small-july", changes={"num_kv_shared_layers": 1}
    ),
    "gpt-oss-20b": Kind(
        "gpt_oss-20b",
        "gpt-oss",
        call="<|start|>assistant<|channel|>commentary to=functions.Read "
        '<|constrain|>json<|message|>{"path": "PATH"}',
        ends=("<|return|>", "<|call|>"),
        thought="<|channel|>analysis<|message|>hm<|end|>",
        tolerance=1e-4,
    ),
}


def shrink(facts: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    small = {name: SMALL.get(name, value) for name, value in facts.items()} | changes
    if "text_config" in small:
        small["text_config"] = shrink(small["text_config"], changes)
    if "layer_types" in small:
        small["layer_types"] = small["layer_types"][:N_LAYERS]
    if "num_hidden_layers" in small:
        small["num_hidden_layers"] = N_LAYERS
    return small


def make_folder(folder: Path, kind: Kind) -> None:
    source = artifact("templates", f"{kind.template}.jinja").read_text("utf-8")
    markup = {*MARKUP.findall(source + kind.call + kind.thought), *kind.ends}
    vocabulary = json.loads(tiny_vocabulary())
    vocabulary["added_tokens"] = []  # it has only the markup of its model
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)),
        eos_token=kind.ends[0],
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in sorted(markup)])
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.ends]})
    tokenizer.chat_template = source
    folder.mkdir()
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(source, "utf-8")

    ends = tokenizer.convert_tokens_to_ids([*kind.ends])
    n_words = {
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
    }
    facts = json.loads(artifact("configs", f"{kind.config}.json").read_bytes())
    facts = shrink(facts, {**n_words, **kind.changes})
    facts["eos_token_id"] = ends
    (folder / "config.json").write_text(json.dumps(facts))
    model_class, args_class = mlx_lm.utils._get_classes(facts)
    mx.random.seed(3)
    model = model_class(args_class.from_dict(facts))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


@dataclass
class Turn:
    """A request as the model saw it."""

    talk: str  # which conversation it belongs to
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    logits: list[np.ndarray]


class Session:
    """Claude Code at work on a server: each reply is the next one of a script."""

    def __init__(
        self, name: str, folder: Path, patch: pytest.MonkeyPatch, **settings: Any
    ) -> None:
        self.kind = KINDS[name]
        port = free_port()
        config = s.Config(
            model_path=str(folder), mlx_port=port, enable_proxy=False, **settings
        )
        self.url = f"http://127.0.0.1:{port}"
        self.running = RunningServer(config, lambda: s.load_model(folder, config))
        self.template = self.running.state.engine.model.template
        self.turns: list[Turn] = []
        self.replies: list[tuple[str, tuple[int, ...]]] = []
        self.n_prefilled: list[int] = []
        self.cold = Oracle(folder, at_once=512)
        self._token_choice = s._token_choice
        patch.setattr(s, "_token_choice", self._with_script)

    def _with_script(self, request: s.EngineRequest) -> Any:
        talk, reply = self.replies.pop(0)
        turn = Turn(talk, tuple(request.key.tokens.tolist()), reply, [])
        self.turns.append(turn)

        def note(_tokens: mx.array, logits: mx.array) -> mx.array:
            # One more step is launched before the end is seen.
            if len(turn.logits) < len(reply):
                turn.logits.append(np.array(logits[0]))
            return logits

        choice = with_processor(self._token_choice(request), request, note)
        *others, note_logits = choice.processors
        forced = [note_logits, *others, force_tokens(reply)]
        return choice._replace(processors=forced)

    def ask(
        self, messages: list, *, talk: str = "main", calls: str = "", **fields: Any
    ) -> list:
        """One request; the conversation with its reply. `calls`: the path that is read."""
        kind = self.kind
        thinks = fields.get("thinking", {"type": "adaptive"})["type"] != "disabled"
        words = kind.thought if thinks else ""
        if calls:
            words += kind.call.replace("PATH", calls) + kind.ends[1]
        else:
            final = "<|start|>assistant<|channel|>final<|message|>"
            words += (
                final if "gpt" in kind.config else ""
            ) + f"It is done.{kind.ends[0]}"
        self.replies.append((talk, tuple(self.template.encode(words))))
        body = {
            **CLAUDE,
            **fields,
            "messages": messages,
            "stream": False,
            "max_tokens": 200,
        }
        answer = httpx.post(f"{self.url}/v1/messages", json=body, timeout=120).json()
        usage = answer["usage"]
        self.n_prefilled.append(
            usage["input_tokens"] + usage["cache_creation_input_tokens"]
        )
        assert any(b["type"] == "tool_use" for b in answer["content"]) == bool(calls), (
            str(answer["content"])
        )
        return [*messages, {"role": "assistant", "content": answer["content"]}]

    def fewest(self) -> list[int]:
        """Of each request, beside those of the same conversation."""
        by_talk: dict[str, list[Request]] = {}
        counts = []
        for turn in self.turns:
            requests = by_talk.setdefault(turn.talk, [])
            requests.append(Request(turn.prompt, turn.reply[:-1]))
            counts.append(fewest(requests)[-1])
        return counts

    def largest_difference(self) -> float:
        differences = []
        for turn in self.turns:
            tokens = [*turn.prompt, *turn.reply[:-1]]
            cold = self.cold.logprobs(tokens, n=len(turn.reply))
            logits = mx.array(np.array(turn.logits))
            warm = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            differences.append(float(np.abs(cold - warm).max()))
        return max(differences)


def prose(n: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


SYSTEM = [*CLAUDE["system"][:1], text(prose(300, 1))]
ENVIRONMENT = {"role": "system", "content": [text("environment: " + prose(80, 2))]}


def work(session: Session, *, efforts: list[str]) -> None:
    """Titles, steps with calls and late system messages, a sub-agent, a question."""
    question = {"role": "user", "content": [text("first question " + prose(20, 3))]}
    title = {
        "system": [text("Write a title.")],
        "tools": [],
        "thinking": {"type": "disabled"},
    }
    session.ask([question], talk="title", **title, output_config={"effort": "low"})

    messages = [question, ENVIRONMENT]
    for n, effort in enumerate(efforts):
        fields = {"system": SYSTEM, "output_config": {"effort": effort}}
        messages = session.ask(messages, calls=f"{n}.md", **fields)
        [call] = [b for b in messages[-1]["content"] if b["type"] == "tool_use"]
        result = {**outcome(0, prose(30, 10 + n)), "tool_use_id": call["id"]}
        note = {"role": "system", "content": f"note {n}: {prose(5, 40 + n)}"}
        messages += [{"role": "user", "content": [result]}, note]
        if n == 1:
            agent = [{"role": "user", "content": [text("look for it " + prose(9, 4))]}]
            for _ in range(2):
                agent = session.ask(
                    agent,
                    talk="sub-agent",
                    system=[text(prose(120, 5))],
                    tools=[{**CLAUDE["tools"][0], "name": "Grep"}],
                    metadata={"user_id": '{"session_id": "sub-1"}'},
                )
                agent.append({"role": "user", "content": [text(prose(9, 6))]})
    session.ask(messages, system=SYSTEM, output_config={"effort": efforts[-1]})


@pytest.fixture(params=[*map(at_night, KINDS)])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def session(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    make_folder(tmp_path / "model", KINDS[name])
    session = Session(name, tmp_path / "model", monkeypatch, log_root=str(tmp_path))
    yield session
    session.running.close()


def test_claude_code_reads_only_what_is_new_on_models_of_this_year(
    name: str, session: Session
) -> None:
    """It sends effort high, which Qwen3.8 refused; a new effort costs a sentence."""
    work(session, efforts=["high", "high", "low", "low"])

    n_prefilled, n_fewest = session.n_prefilled, session.fewest()
    n_before = 5  # title, two steps, a sub-agent's two
    assert sum(n_prefilled[:n_before]) / sum(n_fewest[:n_before]) <= 1.02
    assert sum(n_prefilled) / sum(n_fewest) <= 1.10
    assert session.largest_difference() <= session.kind.tolerance
    main = [turn for turn in session.turns if turn.talk == "main"]
    for turn, following in pairwise(main):
        past = turn.prompt + turn.reply[:-1]
        assert following.prompt[: len(past)] == past

    last_text = session.template.decode(np.array(main[-1].prompt))
    has_efforts = bool(session.template.traits.effort_kwargs)
    assert last_text.count("[reasoning_effort is now low]") == int(has_efforts)
