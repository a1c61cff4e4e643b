"""Models that README recommends, as their makers' files have them: GLM's calls, Qwen's images."""

from itertools import pairwise

import pytest
import scripted_replies
from mlx_vlm.models.qwen3_5 import gated_delta
from server_fixture import functions_of, user
from tiny_models import MLA, tiny_model
from tiny_vision import EXPERTS_VISION, tiny_vision_model
from vision_fixture import Seeing, picture, picture_message

# A turn has no end mark of its own: the role of the next one ends it.
GLM_TOKENS = {
    "<|im_start|>": "<|assistant|>",
    "<|im_end|>": "<|observation|>",
    "<tool_response>": "<arg_key>",
    "</tool_response>": "</arg_key>",
    "<think>": "<|user|>",
    "</think>": "<|system|>",
}
GLM_TEMPLATE = """
{%- if tools -%}{{- '<|system|>These can be called: ' + (tools | tojson) -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|observation|>' + message.content -}}
  {%- else -%}
    {{- '<|' + message.role + '|>' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>' + call.function.name -}}
      {%- for key, value in call.function.arguments | items -%}
        {{- '<arg_key>' + key + '</arg_key><arg_value>' + (value | string) + '</arg_value>' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
READ = "<tool_call>read<arg_key>path</arg_key><arg_value>a b.md</arg_value></tool_call>"
WRITE = (
    "<tool_call>write<arg_key>path</arg_key><arg_value>b.md</arg_value>"
    "<arg_key>content</arg_key><arg_value>1 < 2\n</arg_value></tool_call>"
)


@pytest.fixture(scope="module", params=["glm4_moe", MLA])
def glm_folder(request, tmp_path_factory):
    plain = tiny_model(request.param, tmp_path_factory.mktemp("glm"))
    return scripted_replies.disguise_model(
        plain, GLM_TOKENS, template=GLM_TEMPLATE, end="<|observation|>"
    )


def test_calls_of_glm_are_read_and_their_tokens_are_reused(glm_folder, monkeypatch):
    with scripted_replies.serving_disguised(glm_folder, monkeypatch) as served:
        script = scripted_replies.script_replies(served, monkeypatch)
        script += [
            f"I look.{READ}<|observation|>",
            f"{READ}{WRITE}<|observation|>",
            "It is done.<|observation|>",
        ]
        messages = [user("What is there?")]
        replies = scripted_replies.run_agent_loop(served, messages, n=3)

    read = {"name": "read", "arguments": '{"path": "a b.md"}'}
    write = {"name": "write", "arguments": '{"path": "b.md", "content": "1 < 2\\n"}'}
    first, second, third = replies
    assert (first.answer["content"], first.finish_reason) == ("I look.", "tool_calls")
    assert functions_of(first.answer) == [read]
    assert functions_of(second.answer) == [read, write]
    assert third.answer["content"] == "It is done."
    for earlier, later in pairwise(replies):
        assert later.n_cached >= earlier.usage["total_tokens"] - 1


def test_experts_see_images_call_tools_and_prefill_only_what_is_new(
    tmp_path_factory, monkeypatch
):
    """Qwen3_5MoeForConditionalGeneration: linear attention, experts, and a vision tower."""
    # Token by token, as on Metal: upstream's blocks on the CPU are of what a slice holds.
    monkeypatch.setattr(gated_delta, "gated_delta_chunked", gated_delta.gated_delta_ops)
    folder = tiny_vision_model(EXPERTS_VISION, tmp_path_factory.getbasetemp())
    logs = tmp_path_factory.mktemp("logs")
    seeing = Seeing(folder, monkeypatch, log_root=str(logs))
    messages = [picture_message("what is on this", picture(1), "tell me")]
    n_calls = 0
    for _ in range(5):
        reply = seeing.ask(messages)
        messages = [*messages, {"role": "assistant", "content": None, **reply.answer}]
        calls = reply.answer.get("tool_calls") or ()
        n_calls += len(calls)
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            messages.append(result)
        if not calls:
            messages.append(picture_message("and what else"))
    seeing.ask([*messages[:2], picture_message("say it again", picture(2))])
    seeing.close()

    assert n_calls
    assert seeing.tower_runs == 2
    for exchange in seeing.seen:
        assert seeing.largest_difference(exchange) == 0.0
    n_prefilled = [exchange.prefilled for exchange in seeing.seen]
    n_fewest = seeing.fewest()
    assert sum(n_prefilled) / sum(n_fewest) <= 1.02, (n_prefilled, n_fewest)
