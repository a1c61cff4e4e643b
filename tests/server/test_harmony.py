"""Harmony, in which gpt-oss replies: channels instead of tags, and the recipient in a header."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import scripted_replies
import start_llm as s
from server_fixture import functions_of, user
from tiny_models import TOOLS, tiny_model

RENAMED = {
    "<|im_start|>": "<|start|>",
    "<|im_end|>": "<|return|>",
    "<|endoftext|>": "<|end|>",
    "<think>": "<|channel|>",
    "</think>": "<|message|>",
    "<tool_call>": "<|constrain|>",
    "</tool_call>": "<|call|>",
}
# Ours, with what is peculiar to theirs: a final message ends otherwise once it is past, thinking
# is called so and is dropped behind an answer, and a result names the call before it.
TEMPLATE = """
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' -}}
{%- set first = messages[0].content if messages[0].role in ('system', 'developer') else '' -%}
{%- if tools or first -%}
  {{- '<|start|>developer<|message|># Instructions\\n\\n' + first -}}
  {%- for tool in tools or [] -%}{{- '\\n\\ntype ' + tool.function.name + ' = ' -}}
    {{- tool.function.parameters | tojson -}}{%- endfor -%}
  {{- '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(call=none, answer=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}
    {%- set last.answer = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}
  {%- elif message.role == 'tool' -%}
    {%- if not last.call -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
    {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' -}}
    {{- message.content | tojson + '<|end|>' -}}
  {%- elif message.role == 'assistant' and message.tool_calls -%}
    {%- if message.content and message.thinking -%}
      {{- raise_exception('content and thinking') -}}
    {%- endif -%}
    {%- set why = message.content or message.thinking -%}
    {%- if loop.index0 > last.answer and why -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + why + '<|end|>' -}}
    {%- endif -%}
    {%- set last.call = message.tool_calls[0].function.name -%}
    {{- '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' -}}
    {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content -}}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sliding-window model of random weights; <|end|> ends none of its replies."""
    plain = tiny_model("gpt_oss", tmp_path_factory.mktemp("harmony"))
    return scripted_replies.disguise_model(
        plain, RENAMED, template=TEMPLATE, end="<|return|>"
    )


@pytest.fixture(scope="module")
def served(folder):
    patching = pytest.MonkeyPatch.context()
    with patching as patch, scripted_replies.serving_disguised(folder, patch) as server:
        yield server


@pytest.fixture
def script(served, monkeypatch):
    return scripted_replies.script_replies(served, monkeypatch)


THOUGHT = (
    "<|channel|>analysis<|message|>The file must be read.<|end|><|start|>assistant"
)
ARGUMENTS = '{"path": "docs/a \\"b\\".md"}'
HEADERS = (
    "<|channel|>commentary to=functions.read <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.read json<|message|>",
    " to=functions.read<|channel|>commentary json<|message|>",
)


def test_an_agent_loop_prefills_only_what_is_new(served, script):
    loaded = served.state.engine.model
    eos = {loaded.tokenizer.decode([token]) for token in loaded.eos_ids}
    assert {"<|return|>", "<|call|>"} <= eos

    messages = [
        {"role": "system", "content": "Be brief."},
        user("What does docs/a say?"),
    ]
    script += [
        f"{THOUGHT}{HEADERS[0]}{ARGUMENTS}<|call|>",
        f"{THOUGHT}{HEADERS[2]}{ARGUMENTS}<|call|>",
        "<|channel|>final<|message|>It says hello.<|return|>",
        "<|channel|>final<|message|>It says hello.<|return|>",
    ]

    replies = []
    for news in (
        [{"role": "tool", "content": "hello, " * 40}],
        [{"role": "tool", "content": "bye"}],
        [user("And now?")],
        [],
    ):
        reply = served.ask(messages)
        replies.append(reply)
        messages.append(reply.answer)
        calls = reply.answer.get("tool_calls") or [{"id": ""}]
        call_id = calls[0]["id"]
        messages += [{"tool_call_id": call_id, **message} for message in news]

    first, second, third, fourth = replies
    for reply in (first, second):
        assert reply.finish_reason == "tool_calls"
        assert functions_of(reply.answer) == [{"name": "read", "arguments": ARGUMENTS}]
        assert reply.answer["reasoning_content"] == "The file must be read."
        assert reply.answer["content"] is None

    assert third.finish_reason == fourth.finish_reason == "stop"
    assert third.answer["content"] == "It says hello."

    for earlier, later in pairwise(replies):
        if earlier.finish_reason == "tool_calls":
            assert later.n_cached == earlier.usage["total_tokens"]
    # The token that ends an answer is another once it is past, and windows cannot be rewound.
    assert fourth.n_cached >= third.usage["prompt_tokens"] - 4
    assert served.state.metrics.snapshot()["ledger_seam_fallback"] == 0


def test_a_loop_that_is_rendered_keeps_its_thinking(served):
    """After a restart nothing is replayed; the template takes a text or a thought, not both."""
    function = {"name": "read", "arguments": ARGUMENTS}
    call = {"id": "a", "type": "function", "function": function}
    reply = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "hello"}
    thinking = "It must be read."
    for content, analysis in (("", thinking), ("I look.", f"{thinking}\n\nI look.")):
        message = {**reply, "content": content, "reasoning_content": thinking}
        question = user(f"What is said {content}?")
        exchange = served.ask([question, message, result], max_tokens=1)

        tokens = []
        for row in served.recorder.fed[slice(*exchange.span)]:
            tokens += row.tokens
        prompt = served.scribe.decode(tokens)
        assert f"<|channel|>analysis<|message|>{analysis}<|end|>" in prompt


def test_a_schema_leaves_room_for_a_call_behind_a_thought(served):
    accepts = json_or_call_check(served, TOOLS)

    for header in HEADERS[:2]:
        assert accepts(THOUGHT + header + ARGUMENTS)


def test_beside_a_schema_a_strict_tool_is_bound(served):
    function = {**TOOLS[0]["function"], "strict": True}
    name = function["name"]
    accepts = json_or_call_check(served, [{"type": "function", "function": function}])
    header = f"{THOUGHT}{HEADERS[0].replace('read', name)}"
    arguments = dict.fromkeys(function["parameters"]["required"], "a")

    assert accepts(f"{header}{json.dumps(arguments)}")
    assert not accepts(f"{header}{json.dumps(dict.fromkeys(arguments, 3))}")


def json_or_call_check(served, tools):
    """Whether the grammar accepts a reply to a request for a JSON object or calls."""
    body = {
        "messages": [user("q")],
        "tools": tools,
        "response_format": {"type": "json_object"},
    }
    request = s.parse_chat_request(
        body, served.state.config, request_id="r", headers={}
    )
    prepared = s.prepare_request(served.state, request)
    (constraint,) = prepared.engine_request.constraints
    (matcher,) = constraint.args

    def accepts(text):
        tokens = served.scribe.encode(text, add_special_tokens=False)
        return matcher.deep_copy().validate_tokens(tokens) == len(tokens)

    return accepts


def test_a_forced_call_and_a_schema_open_as_the_model_does(served, monkeypatch):
    tokens = scripted_replies.record_reply_tokens(monkeypatch)
    served.ask([user("Read it.")], tool_choice="required", max_tokens=120)
    text = served.scribe.decode(tokens).rpartition("<|end|><|start|>assistant")[2]
    text = text.removeprefix("<|start|>assistant")

    assert text.startswith("<|channel|>commentary to=functions."), text[:200]

    tokens.clear()
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = served.ask(
        [user("Say it.")], response_format=form, tools=[], reasoning_effort="none"
    )

    assert json.loads(reply.answer["content"]).keys() == {"a"}

    text = served.scribe.decode(tokens)
    assert "<|channel|>final<|message|>" in text
