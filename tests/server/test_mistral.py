"""Mistral's calls from version 11 of its format on: no closing tag, and one that names the call."""

from itertools import pairwise
from pathlib import Path

import pytest
import scripted_replies
from server_fixture import Served, functions_of, user
from tiny_models import DENSE, tiny_model

RENAMED = {
    "<|im_start|>": "[INST]",
    "<|im_end|>": "</s>",
    "<|endoftext|>": "[CALL_ID]",  # special, as it is in their tokenizers
    "<think>": "[/INST]",
    "</think>": "[TOOL_CONTENT]",
    "<tool_call>": "[TOOL_CALLS]",
    "</tool_call>": "[ARGS]",
    "<tool_response>": "[TOOL_RESULTS]",
    "</tool_response>": "[/TOOL_RESULTS]",
}
# Ours, with what is peculiar to theirs: ids of nine letters, calls and results that carry them.
TEMPLATE = """
{%- if tools -%}{{- '[INST]These can be called: ' + (tools | tojson) + '[/INST]' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- '[INST]Rules: ' + message.content + '[/INST]' -}}
  {%- elif message.role == 'user' -%}
    {{- '[INST]' + message.content + '[/INST]' -}}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content -}}
    {{- '[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- message.content or '' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if call.id | length != 9 -%}{{- raise_exception('an id has nine letters') -}}{%- endif -%}
      {{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id -}}
      {{- '[ARGS]' + (call.function.arguments | tojson) -}}
    {%- endfor -%}
    {{- '</s>' -}}
  {%- endif -%}
{%- endfor -%}
""".strip()
LATER = TEMPLATE.replace(" + '[CALL_ID]' + call.id", "").replace(
    "message.tool_call_id + '[TOOL_CONTENT]' + ", ""
)
CALL_IDS = {TEMPLATE: "[CALL_ID]abcDEF123", LATER: ""}
ARGUMENTS = '{"path": "docs/[ARGS] \\"b\\".md"}'


@pytest.fixture(scope="module", params=CALL_IDS, ids=["v11", "v13"])
def folder(request, tmp_path_factory) -> Path:
    made = tiny_model(DENSE, tmp_path_factory.mktemp("mistral"))
    return scripted_replies.dressed(made, RENAMED, template=request.param, end="</s>")


@pytest.fixture
def served(folder, monkeypatch):
    with scripted_replies.serving_dressed(folder, monkeypatch) as one:
        yield one


def header(served: Served, name: str = "read") -> str:
    source = served.state.engine.model.template.source
    return f"[TOOL_CALLS]{name}{CALL_IDS[source]}[ARGS]"


def test_an_agent_loop_prefills_only_what_is_new(served, monkeypatch):
    read, write = (header(served, name) for name in ("read", "write"))
    replies = scripted_replies.in_turn(served, monkeypatch)
    replies += [f"I look.{read}{ARGUMENTS}</s>", f"{read}{ARGUMENTS}{write}" + "{}</s>"]
    replies += ["It says hello.</s>", "Bye.</s>"]
    messages, seen = (
        [{"role": "system", "content": "Be brief."}, user("What is there?")],
        [],
    )
    for news in ([], [], [user("And now?")], []):
        said = served.ask(messages)
        seen.append(said)
        calls = said.answer.get("tool_calls") or ()
        results = [
            {"role": "tool", "content": "hi", "tool_call_id": c["id"]} for c in calls
        ]
        messages += [said.answer, *results, *news]
    first, second, third, fourth = seen
    assert (first.answer["content"], first.finish_reason) == ("I look.", "tool_calls")
    assert functions_of(first.answer) == [{"name": "read", "arguments": ARGUMENTS}]
    assert functions_of(second.answer)[1] == {"name": "write", "arguments": "{}"}
    assert [said.answer["content"] for said in (second, third, fourth)] == [
        None, "It says hello.", "Bye.",
    ]  # fmt: skip
    for before, now in pairwise(seen):
        assert now.n_cached >= before.usage["total_tokens"] - 1
    assert served.state.metrics.snapshot()["ledger_seam_fallback"] == 0


def test_a_forced_call_opens_as_the_model_does(served, monkeypatch):
    tokens = scripted_replies.heard(monkeypatch)
    choice = {"type": "function", "function": {"name": "read"}}
    served.ask([user("Read it.")], tool_choice=choice, max_tokens=40)
    begins = header(served).removesuffix("abcDEF123[ARGS]")
    assert served.scribe.decode(tokens).startswith(begins)
