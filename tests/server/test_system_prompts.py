"""A system prompt is read once, wherever the model's own template prints it.

Models that cannot go back in their state go on from checkpoints only, so one has to be at the end
of what sessions share: the head. Each family here has a template in the shape of its own: the
system prompt in a message of its own, in the first user message, in the last one, or in plain
text that no added token parts.
"""

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from artifacts import artifact
from minimum_prefill import Request, common_prefix, fewest
from mlx.utils import tree_flatten, tree_map
from nights import at_night
from recurrent_families import FAMILIES
from server_fixture import Message, Served, user
from tiny_models import WORDS, load_script
from transformers import PreTrainedTokenizerFast

MOST = 1.02  # prefilled / fewest

# -- templates -------------------------------------------------------------------------------------

# One message after the other; {s} and {e} are what begins and ends one.
IN_TURNS = """\
{{%- for m in messages -%}}
{{{{- '{s}' + m.role + '{mid}' + m.content + '{e}' }}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '{s}assistant{mid}' }}}}{{%- endif -%}}"""
CHATML = IN_TURNS.format(s="<|im_start|>", mid="\\n", e="<|im_end|>\\n")
JAMBA = IN_TURNS.format(s="<|bom|><|", mid="|> ", e="<|eom|>")
# The system prompt is the beginning of the first user message: Gemma 3's official one.
GEMMA_3 = """\
{%- set head = '' -%}{%- set rest = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set head = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('user and assistant must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
{{- (head if loop.first else '') + (m.content | trim) + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
# There is no system role: we put the text into the first user message.
GEMMA_1 = (
    "{%- if messages[0].role == 'system' -%}"
    "{{- raise_exception('System role not supported') -}}{%- endif -%}"
) + GEMMA_3
# The system prompt is the beginning of the last user message.
MISTRAL = """\
{%- set head = '' -%}{%- set rest = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set head = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{{- '<s>' -}}
{%- for m in rest -%}
{%- if m.role == 'user' -%}
{{- '[INST] ' + (head if loop.last else '') + m.content + '[/INST]' -}}
{%- else -%}{{- ' ' + m.content + '</s>' -}}{%- endif -%}
{%- endfor -%}"""
# No added token at all.
RWKV = """\
{%- for m in messages -%}{{- m.role | capitalize + ': ' + (m.content | trim) + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"""

GEMMA_TOKENS = ["<end_of_turn>", "<start_of_turn>"]
# By family: the template, and the tokens that it has, that which ends a reply first.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "mamba2": (MISTRAL, ["</s>", "<s>", "[INST]", "[/INST]"]),
    "lfm2": ("{{- '<|startoftext|>' -}}" + CHATML, ["<|im_end|>", "<|startoftext|>"]),
    "falcon_h1": (CHATML, ["<|im_end|>"]),
    "jamba": (
        JAMBA,
        ["<|eom|>", "<|bom|>", "<|system|>", "<|user|>", "<|assistant|>"],
    ),
    "rwkv7": (RWKV, ["<|endoftext|>"]),
    "recurrent_gemma": (GEMMA_1, GEMMA_TOKENS),
    "gemma3_text": (GEMMA_3, GEMMA_TOKENS),
    "gemma3_official": ("gemma-3.jinja", ["<end_of_turn>", "<start_of_turn>"]),
}
GEMMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 64,
    "sliding_window_pattern": 2,
    "rms_norm_eps": 1e-6,
}
SIZES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "gemma3_text": GEMMA,
    "gemma3_official": GEMMA,
}


def template_of(family: str) -> str:
    """The template of a family; a file's is skipped where there is no such file."""
    template = SHAPES[family][0]
    if not template.endswith(".jinja"):
        return template
    return artifact("templates", template).read_text("utf-8")


def make_folder(folder: Path, family: str) -> Path:
    """The folder of a tiny model with random weights."""
    template = template_of(family)
    kind = "gemma3_text" if family.startswith("gemma3") else family
    folder.mkdir()
    tokenizer = load_script().make_tokenizer()
    tokenizer.add_special_tokens(SHAPES[family][1])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = SHAPES[family][1][0]
    config = {
        **SIZES[family],
        "model_type": kind,
        "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
        "max_position_embeddings": 16_384,
        "eos_token_id": [tokenizer.token_to_id(eos)],
    }
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(3)
    weights = tree_map(lambda p: 0.1 * mx.random.normal(p.shape), model.parameters())
    flat = dict(tree_flatten(weights))
    mx.save_safetensors(str(folder / "model.safetensors"), flat, {"format": "mlx"})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 16_384,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


# -- a server, and what it was asked ---------------------------------------------------------------


class Heads:
    """A server of one family; it keeps what the engine was asked, in order."""

    def __init__(self, folder: Path, end: str, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, ...]] = []  # prompts
        submit = s.Engine.submit

        def record(engine: s.Engine, request: s.EngineRequest) -> s.RequestHandle:
            self.asked.append(tuple(request.key.tokens.tolist()))
            return submit(engine, request)

        patch.setattr(s.Engine, "submit", record)
        patch.setattr(s, "make_sampler", lambda _sampling: self._say())
        self.served = Served(folder)
        self._script = self.served.scribe.ids(f"river stone{end}")

    def _say(self) -> Any:
        words = iter(self._script)
        return lambda _logprobs: mx.array([next(words, self._script[-1])])

    def forget(self) -> None:
        self.served.forget()
        self.asked.clear()

    def ask(self, messages: list[Message]) -> Message:
        return self.served.ask(messages, tools=[]).answer

    @property
    def n_prefilled(self) -> int:
        """What the model was given, less the replies that it was given back."""
        n_fed = sum(len(fed.tokens) for fed in self.served.recorder.fed)
        return n_fed - sum(exchange.n_generated for exchange in self.served.exchanges)

    @property
    def n_fewest(self) -> int:
        reply = tuple(self._script)
        return sum(fewest([Request(prompt, reply) for prompt in self.asked]))


BY_DAY = {"lfm2", "jamba", "gemma3_text", "gemma3_official"}


@pytest.fixture(
    scope="module",
    params=[name if name in BY_DAY else at_night(name) for name in SHAPES],
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def heads(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heads]:
    root = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(root / family, family)
        heads = Heads(folder, SHAPES[family][1][0], patch)
        yield heads
        heads.served.close()


def prose(n_words: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n_words)).capitalize() + "."


def question(n: int) -> str:
    openings = ["What", "zq", "1.", "\N{EURO SIGN} is", "you", "Why", "As", "Do", "(a"]
    return f"{openings[n % 9]} {prose(15, 100 + n)}"


HEAD = {"role": "system", "content": prose(600, 1)}


def check(heads: Heads, table: Any, title: str, *, n_shared: int = 1000) -> None:
    """The scenario is one (prompts share much), and costs no more than it must."""
    first, *later = heads.asked
    assert max(common_prefix(first, prompt) for prompt in later) > n_shared
    n_prefilled = heads.n_prefilled
    n_fewest = heads.n_fewest
    table(
        f"{title}: prefilled {n_prefilled}, fewest {n_fewest}, {n_prefilled / n_fewest:.3f}"
    )
    assert n_prefilled <= MOST * n_fewest


# -- what holds for all ----------------------------------------------------------------------------


@pytest.mark.covering(1, over="module")
def test_new_sessions_read_one_head_once(heads: Heads, family: str, table: Any) -> None:
    heads.forget()
    for n in range(3):
        heads.ask([HEAD, user(question(n))])
    check(heads, table, f"{family}, three sessions")


@pytest.mark.covering(1, over="module")
def test_sub_agents_read_no_head(heads: Heads, family: str, table: Any) -> None:
    """They begin while a conversation goes on, under the same system prompt."""
    heads.forget()
    main = [HEAD, user(question(10))]
    for n in range(4):
        reply = heads.ask(main)
        heads.ask([HEAD, user(question(20 + n))])
        main += [{"role": "assistant", "content": reply["content"]}, user(question(n))]
    check(heads, table, f"{family}, sub-agents")


@pytest.mark.covering(1, over="module")
def test_eight_at_once_read_one_head_once(
    heads: Heads, family: str, table: Any
) -> None:
    heads.forget()
    chats = [[HEAD, user(question(30 + n))] for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(heads.ask, messages) for messages in chats]
    for reply in replies:
        reply.result()
    check(heads, table, f"{family}, eight at once")


# -- where a head ends -----------------------------------------------------------------------------


def make_template(family: str) -> s.ChatTemplate:
    tokenizer = load_script().make_tokenizer()
    tokenizer.add_special_tokens(SHAPES[family][1])
    end = SHAPES[family][1][0]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.chat_template = template_of(family)
    ends = {tokenizer.token_to_id(end)}
    return s.ChatTemplate(fast, s.Config(), think_start="", think_end="", ends=ends)


def chat(*messages: Message) -> s.ChatRequest:
    body = {"model": "m", "messages": list(messages)}
    return s.parse_chat_request(body, s.Config(), request_id="r", headers={})


@pytest.mark.parametrize("family", SHAPES)
def test_a_head_ends_where_two_first_questions_part(family: str) -> None:
    """And never after that: a checkpoint there would be nobody's."""
    template = make_template(family)
    rng = np.random.default_rng(4)
    for n in range(20):
        system = prose(int(rng.integers(5, 60)), n)
        # Some begin as the system prompt does, or are part of it.
        texts = [question(n), system[:9], system, "zq", "<system-reminder>a", "é"]
        first, second = rng.choice(len(texts), 2, replace=False)
        prompts = [
            template.render_prompt(
                chat({"role": "system", "content": system}, user(texts[index]))
            )
            for index in (first, second)
        ]
        shared = common_prefix(prompts[0].ids, prompts[1].ids)
        for prompt in prompts:
            head_end = prompt.positions.head_ends[0]
            assert shared - 12 <= head_end <= shared
            assert prompt.positions.checkpoints()[0] == head_end


def test_a_reminder_after_a_folded_head_has_its_end_noted() -> None:
    """One that the system prompt has in its text is no reminder of the question's."""
    template = make_template("gemma3_text")
    note = "<system-reminder>\nBe brief.\n</system-reminder>\n\n"
    system = {"role": "system", "content": f"Quote: {note} End of {HEAD['content']}"}
    request = chat(system, user(note + "Hello"))
    positions = template.render_prompt(request).positions
    system_end, note_end = positions.head_ends
    assert note_end > system_end > 1000
