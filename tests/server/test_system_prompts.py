"""A system prompt is read once, wherever the model's own template prints it.

Models that cannot go back in their state go on from checkpoints only, so one has to be at the end
of what sessions share: the head. Each family here has a template in the shape of its own: the
system prompt in a message of its own, in the first user message, in the last one, or in plain
text that no added token parts.
"""

import numpy as np
import pytest
import start_llm as s
from artifacts import artifact
from minimum_prefill import common_prefix
from server_fixture import Message, user
from tiny_models import WORDS, load_script
from transformers import PreTrainedTokenizerFast

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
    "jamba": (JAMBA, ["<|eom|>", "<|bom|>", "<|system|>", "<|user|>", "<|assistant|>"]),
    "rwkv7": (RWKV, ["<|endoftext|>"]),
    "recurrent_gemma": (GEMMA_1, GEMMA_TOKENS),
    "gemma3_text": (GEMMA_3, GEMMA_TOKENS),
    "gemma3_official": ("gemma-3.jinja", ["<end_of_turn>", "<start_of_turn>"]),
}


def template_of(family: str) -> str:
    """The template of a family; a file's is skipped where there is no such file."""
    template = SHAPES[family][0]
    if not template.endswith(".jinja"):
        return template
    return artifact("templates", template).read_text("utf-8")


# -- a server, and what it was asked ---------------------------------------------------------------


def prose(n_words: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, n_words)).capitalize() + "."


def question(n: int) -> str:
    openings = ["What", "zq", "1.", "\N{EURO SIGN} is", "you", "Why", "As", "Do", "(a"]
    return f"{openings[n % 9]} {prose(15, 100 + n)}"


HEAD = {"role": "system", "content": prose(600, 1)}


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
