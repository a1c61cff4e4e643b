"""Bodies of chat requests that are refused: a good one with a wrong value at a path."""

import copy
import re


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
                "id": "c1",
                "type": "function",
                "function": {"name": "ls", "arguments": '{"a": 1}'},
            },
            {
                "id": "c2",
                "type": "function",
                "function": {"name": "ls", "arguments": {"a": 2}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "x"},
    {"role": "tool", "tool_call_id": "c2", "content": ""},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "thanks", "name": "bo"},
]


WRONG = [
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
    }
    *outer_keys, last_key = [
        int(part) if part.isdigit() else part for part in re.findall(r"\w+", path)
    ]
    inner = body
    for key in outer_keys:
        inner = inner[key]
    inner[last_key] = value

    return body
