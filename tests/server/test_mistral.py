"""Mistral's calls from version 11 of its format on: no closing tag, and one that names the call."""

from itertools import pairwise
from pathlib import Path

import pytest
import scripted_replies
from nights import at_night
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


@pytest.fixture(scope="module", params=[TEMPLATE, at_night(LATER)], ids=["v11", "v13"])
def folder(request, tmp_path_factory) -> Path:
    plain = tiny_model(DENSE, tmp_path_factory.mktemp("mistral"))
    return scripted_replies.disguise_model(
        plain, RENAMED, template=request.param, end="</s>"
    )


@pytest.fixture(scope="module")
def served(folder):
    patching = pytest.MonkeyPatch.context()
    with patching as patch, scripted_replies.serving_disguised(folder, patch) as server:
        yield server


def header(served: Served, name: str = "read") -> str:
    source = served.state.engine.model.template.source
    return f"[TOOL_CALLS]{name}{CALL_IDS[source]}[ARGS]"


def test_an_agent_loop_prefills_only_what_is_new(served, monkeypatch):
    read = header(served, "read")
    write = header(served, "write")
    script = scripted_replies.script_replies(served, monkeypatch)
    script += [
        f"I look.{read}{ARGUMENTS}</s>",
        f"{read}{ARGUMENTS}{write}{{}}</s>",
        "It says hello.</s>",
        "Bye.</s>",
    ]

    messages = [{"role": "system", "content": "Be brief."}, user("What is there?")]
    replies = scripted_replies.run_agent_loop(served, messages, n=3)
    messages.append(user("And now?"))
    replies += scripted_replies.run_agent_loop(served, messages, n=1)

    first, second, third, fourth = replies
    assert (first.answer["content"], first.finish_reason) == ("I look.", "tool_calls")
    assert functions_of(first.answer) == [{"name": "read", "arguments": ARGUMENTS}]
    assert functions_of(second.answer)[1] == {"name": "write", "arguments": "{}"}
    assert second.answer["content"] is None
    assert third.answer["content"] == "It says hello."
    assert fourth.answer["content"] == "Bye."

    for earlier, later in pairwise(replies):
        assert later.n_cached >= earlier.usage["total_tokens"] - 1
    assert served.state.metrics.snapshot()["ledger_seam_fallback"] == 0


def test_a_forced_call_opens_as_the_model_does(served, monkeypatch):
    tokens = scripted_replies.record_reply_tokens(monkeypatch)
    choice = {"type": "function", "function": {"name": "read"}}
    served.ask([user("Read it.")], tool_choice=choice, max_tokens=40)

    start = header(served).removesuffix("abcDEF123[ARGS]")
    assert served.scribe.decode(tokens).startswith(start)
