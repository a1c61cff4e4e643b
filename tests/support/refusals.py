"""Bodies that are refused, by API, and the field that each refusal names."""

import copy
import re
from inspect import signature
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase


def tool(name, **rest):
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object"}},
        **rest,
    }


CONVERSATION = [
    {"role": "system", "content": "You help."},
    {"role": "developer", "content": "Briefly."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "list"}, {"type": "text", "text": " it"}],
    },
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": name,
                "type": "function",
                "function": {"name": "ls", "arguments": arguments},
            }
            for name, arguments in (("c1", '{"a": 1}'), ("c2", {"a": 2}))
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "x"},
    {"role": "tool", "tool_call_id": "c2", "content": ""},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "thanks", "name": "bo"},
]


WRONG = [  # of a whole chat: the path of a value, and a wrong one there
    ("model", 3),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", []),
    ("stream_options.include_usage", 1),
    ("stream_options.includeUsage", 1),
    ("stream_options.usage2", 1),
    ("stream_options.str", 1),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("max_completion_tokens", "9"),
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_context_size", -1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logit_bias", [1]),
    ("logit_bias.4294967296", 1),
    ("logit_bias.a", 1),
    ("logit_bias.1", 101),
    ("logit_bias.1", "2"),
    ("seed", 1.5),
    ("seed", True),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", 3),
    ("stop", ["a"] * 17),
    ("stop[1]", ""),
    ("stop[0]", None),
    ("messages", []),
    ("messages", None),
    ("messages", "x"),
    ("messages", {}),
    ("messages[1]", None),
    ("messages[0].role", "function"),
    ("messages[0].role", None),
    ("messages[0].role", 1),
    ("messages[0].content", None),
    ("messages[2].content", 3),
    ("messages[2].content", {"str": 1}),
    ("messages[2].content", []),
    ("messages[2].content[1]", "text"),
    ("messages[2].content[1].text", None),
    ("messages[3].tool_calls", {}),
    ("messages[3].tool_calls[1].type", "custom"),
    ("messages[3].tool_calls[1].id", 7),
    ("messages[3].tool_calls[0].function", "ls"),
    ("messages[3].tool_calls[0].function.name", ""),
    ("messages[3].tool_calls[0].function.arguments", 3),
    ("messages[3].reasoning_content", []),
    ("messages[4].tool_call_id", 3),
    ("messages[7].name", {}),
    ("tools", {}),
    ("tools[1]", 3),
    ("tools[1].type", "web_search"),
    ("tools[1].function", None),
    ("tools[0].function.name", ""),
    ("tools[0].function.description", 3),
    ("tools[0].function.parameters", []),
    ("tool_choice", "always"),
    ("tool_choice", 3),
    ("tool_choice.function", None),
    ("tool_choice.function.name", 3),
    ("tool_choice.type", "allowed_tools"),
    ("parallel_tool_calls", "no"),
    ("logprobs", 1),
    ("top_logprobs", 21),
    ("top_logprobs", True),
    ("chat_template_kwargs", []),
]


def planted(path, value):
    """A good body with `value` at `path`."""
    body = {
        "messages": copy.deepcopy(CONVERSATION),
        "tools": [tool("ls"), tool("cat")],
        "tool_choice": {"type": "function", "function": {"name": "ls"}},
        "stream_options": {},
        "stop": ["a", "b"],
        "logprobs": True,
        "logit_bias": {"7": 1},
    }
    *outer_keys, last_key = [
        int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)
    ]
    inner = body
    for key in outer_keys:
        inner = inner[key]
    inner[last_key] = value

    return body


# -- all APIs --------------------------------------------------------------------------


def of_google(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(parts)}], **fields}


class Refusal(NamedTuple):
    """A body, or what is added to a good one, and how the refusal of it begins."""

    api: str  # chat, completion, messages, responses or google
    fields: Any
    name: str  # of the field; "": of none
    words: str = ""


def at(path: str, value: Any) -> dict[str, Any]:
    """The body that has this value there, and nothing else."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def text(words: Any) -> dict[str, Any]:
    return {"type": "text", "text": words}


USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
# What would change the answer, with values that ask for nothing and others that do.
SPECIAL: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1], [2, 0, "1"]),
    "best_of": ([1], [3]),
    "echo": ([False], [True]),
    "suffix": ([""], ["tail"]),
    "modalities": ([["text"]], [["text", "audio"], ["audio"]]),
    "response_format": (
        [{"type": "text"}],
        [{"type": "json_schema", "json_schema": {}}, {"type": "xml"}, "json"],
    ),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["auto", "none"], [{"name": "f"}]),
    "audio": ([], [{"voice": "alloy"}]),
    "previous_response_id": ([""], ["resp_1"]),
    "conversation": ([""], ["conv_1", {"id": "conv_1"}]),
    "assistant_id": ([""], ["asst_1"]),
}
BUDGET_PATHS = [
    "thinking.budget_tokens", "thinking_budget", "reasoning.max_tokens",
    "chat_template_kwargs.thinking_budget", "metadata.thinking_budget",
    "metadata.reasoning.max_tokens",
]  # fmt: skip
THINKING = [  # of a chat
    *((path, value) for path in BUDGET_PATHS for value in (-1, "5", True, {})),
    ("enable_thinking", "perhaps"), ("enable_thinking", {"type": "enabled"}), ("thinking", 3),
    ("thinking.type", "banana"), ("reasoning.effort", ["x"]), ("reasoning_effort", ""),
    ("metadata.reasoning_effort", "huge"), ("chat_template_kwargs.enable_thinking", 1),
    ("chat_template_kwargs.thinking", {"type": "disabled"}),
]  # fmt: skip
# How a template is applied is not the client's to say; documents are what it may print.
APPLYING = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
APPLYING = {"messages", *APPLYING} - {"self", "documents", "kwargs"}
PARTS = [
    ({"type": "image_url", "image_url": 3}, ".image_url", "should be a valid string"),
    ({"type": "image_url"}, ".image_url", "Field required"),
    ({"type": "thinking", "thinking": 3}, ".thinking", "should be a valid string"),
    (text({"text": "x"}), ".text", "should be a valid string"),
    ({"type": "smell"}, "", "should be of type 'text', 'thinking', 'image_url', 'in"),
    ({}, "", "should have a type"),
]
FORMAT = "output_config.format"
ITEM = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f"}
HELLO = {"text": "Hello"}
REFUSALS = [
    *(Refusal("chat", planted(path, value), path) for path, value in WRONG),
    *(Refusal("chat", at(path, value), path) for path, value in THINKING),
    *(
        Refusal("chat", at(f"chat_template_kwargs.{name}", "x"), f"chat_template_kwargs.{name}")
        for name in sorted(APPLYING)
    ),
    *(
        Refusal("chat", {"messages": [user(part)]}, f"messages[0].content[0]{path}", words)
        for part, path, words in PARTS
    ),
    Refusal("chat", {"n": 2}, "n", "should be 1"),
    Refusal("chat", at("response_format", {"type": "json_object", "schema": 3}),
            "response_format.schema"),
    Refusal("chat", {"temperature": 3}, "temperature", "should be less than or equal to 2"),
    Refusal("chat", {"tool_choice": "any"}, "tool_choice", "should be 'none', 'auto' or 'req"),
    Refusal("chat", {"tool_choice": {"type": "any"}}, "tool_choice.type", "should be 'function'"),
    Refusal("chat", {"functions": [{}]}, "functions", "this is the older form: send `tools`"),
    Refusal("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "a user message"),
    Refusal("chat", {"top_logprobs": 1}, "top_logprobs"),
    # A name that is no word is not repeated.
    *(
        Refusal("chat", {"stream_options": {name: 1}}, "stream_options", "should be a valid bool")
        for name in ("x" * 100_000, "a\nb", "", "a.b")
    ),
    *(
        Refusal("completion", {"prompt": prompt}, "prompt")
        for prompt in (None, "", [], ["a", "b"], [[1], [2]], [""], [[]], 3, {}, [1, "a"])
    ),
    *(
        Refusal("completion", {"prompt": prompt}, "prompt[1]")
        for prompt in ([1, -1], [1, 2**31], [1, True], [1, 1.5])
    ),
    Refusal("completion", {"prompt": "x", "logprobs": 0}, "logprobs"),
    Refusal("completion", {"prompt": "x", "return_progress": []}, "return_progress"),
    *(Refusal("messages", fields, name, words) for fields, name, words in (
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "user"}]}, "messages[0].content", ""),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0]", ""),
        ({"messages": [user(text("a"), {"type": "hologram"})]}, "messages[0].content[1]",
         "a block of type 'hologram' cannot be read here"),
        ({"messages": [said({"type": "tool_use", "id": "t"})]}, "messages[0].content[0]", ""),
        ({"messages": [user({**RESULT, "content": [None]})]},
         "messages[0].content[0].content[0]", "should be an object with a type"),
        ({"messages": [user({**RESULT, "content": [text(None)]})]},
         "messages[0].content[0].content[0]", "a block of type 'text' cannot be read here, or"),
        ({"messages": [user("x")]}, "messages[0].content[0]", ""),
        ({"messages": [user(text(3))]}, "messages[0].content[0]", ""),
        ({"messages": [user(text("a")), said({**USE, "id": 7})]}, "messages[1].content[0].id", ""),
        *(({"messages": [said(text("a"), {**USE, "name": name})]},
           "messages[0].content[1].name", "") for name in (3, {}, "")),
        ({"messages": [said({**USE, "input": [1]})], "system": "s"},
         "messages[0].content[0].input", ""),
        ({"messages": [user({**RESULT, "tool_use_id": 7})]},
         "messages[0].content[0].tool_use_id", ""),
        ({"system": 3}, "system", ""),
        ({"max_tokens": -1}, "max_tokens", ""),
        ({"max_tokens": "9"}, "max_tokens", ""),
        ({"temperature": 9}, "temperature", ""),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", ""),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", ""),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema", ""),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", ""),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", ""),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", ""),
        ({"tool_choice": {"type": "tool", "name": 3}}, "tool_choice.name", ""),
        ({"tool_choice": {"type": "any"}}, "tool_choice", ""),
        ({"stop_sequences": [""]}, "stop_sequences[0]", ""),
        ({"stop_sequences": ["a", "x" * 1025]}, "stop_sequences[1]", ""),
        ({"stop_sequences": "END"}, "stop_sequences", ""),
        ({"thinking": {"type": "perhaps"}}, "thinking.type", ""),
        # What a chat calls otherwise.
        (at("output_config.effort", "hugely"), "output_config.effort", ""),
        (at(FORMAT, 3), FORMAT, ""),
        (at(f"{FORMAT}.type", "xml"), f"{FORMAT}.type", ""),
        (at(f"{FORMAT}.type", "json_schema"), FORMAT, ""),
        (at(FORMAT, {"type": "json_object", "schema": 3}), f"{FORMAT}.schema", ""),
    )),
    *(Refusal("responses", fields, name, words) for fields, name, words in (
        *(
            (fields, "", f"the body is not valid JSON: {words}")
            for fields, words in (
                (b"", "Expecting value: line 1"),
                (b"{", "Expecting property name"),
                (b"[" * 5_000, "maximum recursion depth"),
                (b'{"input": NaN}', "a number is NaN or infinite"),
                (b'{"input": 1e999}', "a number is NaN or infinite"),
                (b'{"input": %s}' % (b"1" * 5000), "Exceeds the limit"),
                (b'\xef\xbb\xbf{"input": "x"}', "Unexpected UTF-8 BOM"),
                ('{"input": "x"}'.encode("utf-16"), "'utf-8' codec can't decode byte"),
                (b'"\xff"', "'utf-8' codec can't decode byte"),
            )
        ),
        ([], "", "the body should be an object, not a list"),
        ({}, "input", "is missing"),
        ({"input": 5}, "input", "should be a string or a list, not a whole number"),
        ({"input": []}, "input", "should not be empty"),
        ({"input": [5]}, "input[0]", "should be an object, not a whole number"),
        ({"input": [{}]}, "input[0].type", "is missing"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [user(HELLO)]}, "input[0].content[0].type", "is missing"),
        ({"input": [ITEM, {**CALL, "name": 5}]}, "input[1].name", "should be a string"),
        ({"input": [{**CALL, "type": "function_call_output"}]}, "input[0].output", "is missing"),
        ({"input": "x", "tools": 5}, "tools", "should be a list, not a whole number"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "a call is demanded, but"),
        ({"input": "x", "stream": "yes"}, "stream", "should be true or false, not a string"),
        ({"input": "x", "temperature": True}, "temperature", "should be a number, not true"),
        ({"input": "x", "reasoning": 5}, "reasoning", "should be an object"),
        ({"input": "x", **at("text.format.type", "json_schema")}, "text.format.schema",
         "is missing"),
        # What is stored nowhere.
        *(({"input": "x", **fields}, name, "no conversation is stored here")
          for name, fields in (
            ("previous_response_id", {"previous_response_id": "resp_1"}),
            ("conversation", {"conversation": {"id": "conv_1"}}),
            ("prompt", {"prompt": {"id": "pmpt_1"}}),
            ("input[1]", {"input": [ITEM, {"type": "item_reference"}]}))),
    )),
    *(Refusal("google", fields, name, words) for fields, name, words in (
        ([], "", "the body should be an object, not a list"),
        ({}, "contents", "is missing"),
        ({"contents": "Hi"}, "contents", "should be a list, not a string"),
        ({"contents": [{}]}, "contents[0].parts", "is missing"),
        (of_google(HELLO, role="assistant"), "contents[0].role", "should be user or model"),
        *((of_google(part), f"contents[0].parts[0]{path}", words) for part, path, words in (
            (5, "", "should be an object"),
            ({}, "", "should have text or functionResponse"),
            ({"text": 5}, ".text", "should be a string"),
            ({"fileData": {}}, "", "should have text"),
            ({**HELLO, "inlineData": "x"}, ".inlineData", "should be an object"),
            ({**HELLO, "inlineData": {"mimeType": "a/b"}}, ".inlineData.data", "is missing"),
            ({**HELLO, "inlineData": {"mimeType": 5, "data": "A"}}, ".inlineData.mimeType",
             "should be a string"),
            ({**HELLO, "inline_data": {"data": "A"}}, "",
             "has text and inlineData: they are two parts"),
            ({"functionCall": {"name": "f"}}, "",
             "should have text or functionResponse or inlineData"),
        )),
        (of_google({"functionCall": {}}, role="model"), "contents[0].parts[0].functionCall.name",
         "is missing"),
        (of_google(HELLO, systemInstruction={"parts": []}, system_instruction={}),
         "systemInstruction", "is there twice, in camel case and in snake case"),
        (of_google(HELLO, tools=5), "tools", "should be a list"),
        (of_google(HELLO, systemInstruction="x"), "systemInstruction",
         "should be an object, not a string"),
        (of_google(HELLO, **at("generationConfig.candidateCount", 2)),
         "generationConfig.candidateCount", "only one"),
        (of_google(HELLO, **at("toolConfig.functionCallingConfig.mode", "ANY")),
         "toolConfig.functionCallingConfig.mode", "a call is demanded"),
    )),
]  # fmt: skip
