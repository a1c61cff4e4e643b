"""One request of each kind that agents send, short: with what templates refuse or lose."""

import copy
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.328.abc; cc_entrypoint=cli;"
TITLE_SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def function(name: str) -> Body:
    described = {"name": name, "description": f"{name} it", "parameters": SCHEMA}
    return {"type": "function", "function": described}


def call(n: int, arguments: object = '{"path": "a.md"}', name: str = "read") -> Body:
    described = {"name": name, "arguments": arguments}
    return {"id": f"call_{n}", "type": "function", "function": described}


def result(n: int, content: object = "alpha result") -> Body:
    return {"role": "tool", "tool_call_id": f"call_{n}", "content": content}


def use(n: int) -> Body:
    return {
        "type": "tool_use",
        "id": f"toolu_{n}",
        "name": "Read",
        "input": {"path": "a"},
    }


def outcome(n: int, content: object = "alpha result") -> Body:
    return {"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": content}


def image() -> Body:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    return {"type": "image", "source": source}


USER = {"role": "user", "content": "first question"}
SYSTEM = {"role": "system", "content": "you are careful"}
DEVELOPER = {"role": "developer", "content": "you are a coding agent"}
LATE = {"role": "system", "content": "late reminder words"}
ANSWER = {"role": "assistant", "content": "an answer"}
NEXT = {"role": "user", "content": "second question"}
STEP = [{"role": "assistant", "content": None, "tool_calls": [call(1)]}, result(1)]
TOOLS = [function("read"), function("write")]

# -- Anthropic's Messages: Claude Code --------------------------------------------------

CLAUDE: Body = {
    "max_tokens": 32000,
    "stream": True,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "metadata": {"user_id": '{"session_id": "5a1e"}'},
    "system": [text(BILLING), text("you are Claude Code"), text("and careful")],
    "tools": [
        {"name": "Read", "description": "reads", "input_schema": SCHEMA},
        {"name": "Later", "input_schema": SCHEMA, "defer_loading": True},
    ],
}
ENVIRONMENT = {"role": "system", "content": [text("environment and skills")]}
ASKED = {"role": "user", "content": [text("first question")]}
THOUGHT = {"type": "thinking", "thinking": "some thought", "signature": "s"}
READ = {"role": "assistant", "content": [THOUGHT, text("I will read."), use(1)]}
REMINDER = text("<system-reminder>\nremember this\n</system-reminder>")

MESSAGES: dict[str, Body] = {
    "first": {**CLAUDE, "messages": [ASKED, ENVIRONMENT]},
    "step": {
        **CLAUDE,
        "messages": [
            ASKED,
            ENVIRONMENT,
            READ,
            {"role": "user", "content": [outcome(1)]},
            LATE,
        ],
    },
    "parallel": {
        **CLAUDE,
        "messages": [
            ASKED,
            {"role": "assistant", "content": [use(1), use(2)]},
            {"role": "user", "content": [outcome(1), outcome(2, "beta"), REMINDER]},
        ],
    },
    "found a deferred tool": {
        **CLAUDE,
        "messages": [
            ASKED,
            READ,
            {
                "role": "user",
                "content": [
                    outcome(1, [{"type": "tool_reference", "tool_name": "Later"}])
                ],
            },
        ],
    },
    "empty and failed results": {
        **CLAUDE,
        "messages": [
            ASKED,
            {"role": "assistant", "content": [use(1), use(2)]},
            {
                "role": "user",
                "content": [outcome(1, ""), {**outcome(2, "no"), "is_error": True}],
            },
        ],
    },
    "sub-agent": {
        **CLAUDE,
        "tools": CLAUDE["tools"][:1],
        "messages": [ENVIRONMENT, ASKED, LATE],
    },
    "background agent": {
        **CLAUDE,
        "messages": [ASKED, ANSWER, {"role": "user", "content": [REMINDER]}],
    },
    "title": {
        "max_tokens": 32000,
        "system": CLAUDE["system"],
        "tools": [],
        "output_config": {
            "effort": "low",
            "format": {"type": "json_schema", "schema": TITLE_SCHEMA},
        },
        "messages": [ASKED],
    },
    "compaction": {
        **CLAUDE,
        "messages": [
            ASKED,
            READ,
            {"role": "user", "content": [outcome(1), text("respond with text only")]},
        ],
    },
    "thinking in budgets": {
        **CLAUDE,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "messages": [ASKED, {"role": "assistant", "content": [THOUGHT]}, NEXT],
    },
    "an image": {
        **CLAUDE,
        "messages": [{"role": "user", "content": [text("first question"), image()]}],
    },
    "an image in a result": {
        **CLAUDE,
        "messages": [ASKED, READ, {"role": "user", "content": [outcome(1, [image()])]}],
    },
    "a prefilled reply": {
        **CLAUDE,
        "messages": [ASKED, {"role": "assistant", "content": "It is"}],
    },
}

# -- OpenAI's chats: PI, OpenClaw, opencode, Codex by the bridge, Copilot, Qwen Code -----

CHATS: dict[str, list[Body]] = {
    "PI": [DEVELOPER, USER, *STEP],
    "PI, an image after a result": [
        DEVELOPER,
        USER,
        *STEP,
        {
            "role": "user",
            "content": [
                text("attached image"),
                {
                    "type": "image_url",
                    "image_url": {"url": f"data:image/png;base64,{PNG}"},
                },
            ],
        },
    ],
    "OpenClaw": [SYSTEM, USER, {"role": "user", "content": [text("internal carrier")]}],
    "OpenClaw, parts": [
        {"role": "system", "content": [text("you are"), text("careful")]},
        {"role": "user", "content": [text("first"), text("question")]},
        {"role": "assistant", "content": [text("an answer")]},
        NEXT,
    ],
    "opencode": [SYSTEM, USER, {**STEP[0], "content": ""}, STEP[1], ANSWER, NEXT],
    "opencode, the title": [SYSTEM, {**USER, "content": "Generate a title"}, USER],
    "Codex": [DEVELOPER, DEVELOPER, USER, *STEP, {**DEVELOPER, "content": "sandbox"}],
    "Codex, a text between call and result": [
        DEVELOPER,
        USER,
        STEP[0],
        {**ANSWER, "content": "between"},
        STEP[1],
    ],
    "Copilot": [SYSTEM, USER, *STEP, *STEP],
    "Qwen Code": [
        SYSTEM,
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(1), call(2, '{"path": "second.md"}', "write")],
        },
        result(1),
        result(2, [text("beta"), text("gamma")]),
    ],
    "two system messages": [SYSTEM, {**SYSTEM, "content": "and brief"}, USER],
    "late system messages": [SYSTEM, USER, ANSWER, LATE, NEXT, LATE],
    "a system message after a result": [SYSTEM, USER, *STEP, LATE],
    "a developer in the middle": [SYSTEM, USER, ANSWER, DEVELOPER, NEXT],
    "the system alone": [SYSTEM],
    "no user": [SYSTEM, *STEP],
    "an assistant first": [ANSWER, NEXT],
    "nothing but an answer": [ANSWER],
    "two answers": [USER, ANSWER, {**ANSWER, "content": "another answer"}, NEXT],
    "a result without a call": [SYSTEM, USER, result(7)],
    "a call without a result": [SYSTEM, USER, STEP[0], NEXT],
    "a result with null": [SYSTEM, USER, STEP[0], result(1, None)],
    "an empty question": [SYSTEM, {"role": "user", "content": ""}],
    "arguments that are no JSON": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(1, "{path: a")]},
        result(1),
    ],
    "arguments as an object": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(1, {"path": "a"})]},
        result(1),
    ],
    "no arguments": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call(1, "")]},
        result(1),
    ],
    "reasoning_content": [USER, {**ANSWER, "reasoning_content": "some thought"}, NEXT],
    "reasoning": [USER, {**ANSWER, "reasoning": "some thought"}, NEXT],
    "reasoning beside a call": [
        USER,
        {**STEP[0], "content": "I look.", "reasoning_content": "some thought"},
        STEP[1],
    ],
    "thinking tags": [
        USER,
        {**ANSWER, "content": "<think>\nhm\n</think>\n\nyes"},
        NEXT,
    ],
}

EFFORTS: dict[str, Body] = {
    "nothing": {},
    **{
        effort: {"reasoning_effort": effort}
        for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    },
    "off": {"enable_thinking": False},
    "by kwargs": {"chat_template_kwargs": {"reasoning_effort": "high"}},
}


def all_bodies() -> Iterator[tuple[str, str, Body]]:
    """The name, the API ("messages" or "chat") and the body of each request."""
    for name, body in MESSAGES.items():
        yield f"Claude Code, {name}", "messages", copy.deepcopy(body)
        effortless = copy.deepcopy(body)
        effortless.pop("output_config", None)
        yield f"Claude Code, {name}, no effort", "messages", effortless
    for name, messages in CHATS.items():
        for effort, fields in EFFORTS.items():
            for with_tools, tools in (("", TOOLS), (", no tools", [])):
                body = {"messages": copy.deepcopy(messages), "tools": tools, **fields}
                yield f"{name}, effort {effort}{with_tools}", "chat", body
