"""Anthropic's SDK as a client: blocks, one request, a tool loop."""

from typing import Any

from tiny_models import TOOLS


def text(words):
    return {"type": "text", "text": words}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def reply(*blocks):
    return {"role": "assistant", "content": list(blocks)}


OFFERED = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]

SYSTEM = "You are a careful agent. Read before you write."

GREEDY: dict[str, Any] = {
    "model": "any",
    "max_tokens": 300,
    "thinking": {"type": "adaptive"},
}


def ask(sdk, messages, *, stream, **fields):
    fields = {
        "system": SYSTEM,
        "tools": OFFERED,
        **GREEDY,
        **fields,
        "messages": messages,
    }
    fields["extra_body"] = {"temperature": 0}  # the SDK has no such argument any more

    if not stream:
        return sdk.messages.create(**fields)

    with sdk.messages.stream(**fields) as events:
        kinds = [event.type for event in events]
        message = events.get_final_message()

    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    return message


def react(message, n):
    """What an agent sends back: the reply as it came, and results or another question."""
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": f"result {n} of {i}",
        }
        for i, use in enumerate(uses)
    ]
    return [reply(*blocks), user(*(results or [text(f"and number {n}?")]))]


def total(usage):
    return (
        usage.input_tokens
        + usage.cache_creation_input_tokens
        + usage.cache_read_input_tokens
    )


def as_chat(message):
    """Its content as a chat message would have it."""
    texts = {"thinking": "", "text": ""}
    calls = []
    for block in message.content:
        if block.type == "tool_use":
            calls.append((block.name, block.input))
        else:
            texts[block.type] += getattr(block, block.type)
    return texts["thinking"], texts["text"], calls
