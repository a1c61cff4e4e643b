"""Chat templates and tokenizers, and the messages that tests render with them."""

import copy
import re
from functools import cache
from pathlib import Path

import start_llm
from artifacts import FOLDER, artifact
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'developer' %}{{ raise_exception('Unknown role') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if not enable_thinking | default(true) %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

CHATML_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

GEMMA_TOKENS = [
    *(
        "<bos>",
        "<|turn>",
        "<turn|>",
        "<|think|>",
        "<|channel>",
        "<channel|>",
        "<|tool>",
        "<tool|>",
    ),
    *(
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
        "<|image|>",
    ),
]

GLM_TOKENS = [
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]

QWEN_TOKENS = [*CHATML_TOKENS, "<tool_response>", "</tool_response>"]

# What looks like an added token in the source of a template.
MARKUP = re.compile(r"""<\|?[a-zA-Z_/"|]+\|?>|\[/?[A-Z_]+\]|\]~[a-z!]+\[""")
REAL = {
    "qwen3": QWEN_TOKENS,
    "qwen3-coder": QWEN_TOKENS,
    "qwen3.5": QWEN_TOKENS,
    "glm-4.7-flash": GLM_TOKENS,
    "gemma-4": GEMMA_TOKENS,
}


@cache
def tiny_vocabulary() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    tokenizer.train_from_iterator([Path(__file__).read_text("utf-8")], trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CHATML_TOKENS]
    )
    return tokenizer.to_str()


def tiny_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(tiny_vocabulary())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = chat_template
    return tokenizer


@cache
def tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    """A template with a vocabulary, as `qwen3/glm-4`; the tiny one is there in no time."""
    name, vocabulary = model.split("/")
    if name == "chatml":
        return tiny_tokenizer()
    source = artifact("templates", f"{name}.jinja").read_text("utf-8")
    markup = tuple(REAL.get(name) or markup_of_templates())
    tokenizer = copy.copy(vocabulary_with(vocabulary, markup))
    tokenizer.chat_template = source
    return tokenizer


@cache
def vocabulary_with(
    vocabulary: str, markup: tuple[str, ...]
) -> PreTrainedTokenizerFast:
    """Read once for all templates that share it: that takes a third of a second."""
    if vocabulary == "tiny":
        tokenizer = tiny_tokenizer()
        tokenizer.bos_token = "<bos>"
    else:
        path = artifact("tokenizers", f"{vocabulary}.tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<bos>")
    new = [t for t in markup if t not in tokenizer.get_added_vocab()]
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in new])
    return tokenizer


def markup_of_templates() -> list[str]:
    sources = [path.read_text("utf-8") for path in FOLDER.glob("templates/*.jinja")]
    return sorted(set(MARKUP.findall("\n".join(sources))))


def chat(messages: list, **fields: object) -> start_llm.ChatRequest:
    body = {"messages": messages, "enable_thinking": True, **fields}
    config = start_llm.Config()
    return start_llm.parse_chat_request(body, config, request_id="r", headers={})


def call(arguments: object, name: str = "look", n: int = 0) -> dict:
    return {
        "id": f"call0000{n}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def said(role: str, content: object, **fields: object) -> dict:
    return {"role": role, "content": content, **fields}


def tool(description: str = "Looks.") -> dict:
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "string", "description": "what"}},
    }
    function = {"name": "look", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
