"""A client of the gate before LiteLLM, without a socket between them."""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import start_llm as s
from litellm_gate import SERVER_CALL

# Of a gate, where a test does not say otherwise.
SETTINGS: dict[str, Any] = {
    "key": "",
    "models": [],
    "max_body_bytes": 10_000,
    "host_names": [],
    "cors_origins": [],
    "welcome": "Go to http://x:1/",
    "advice": s.advice_by_path(),
}


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    text: str


async def ask_gate(
    gate: Any, method: str, path: str, payload: bytes, headers: Mapping[str, str]
) -> Answer:
    """What it answers a client that sends its body in halves and waits. `x_y`: X-Y."""
    target, _, query = path.partition("?")
    sent_headers = [
        (name.replace("_", "-").encode(), value.encode())
        for name, value in headers.items()
    ]
    middle = len(payload) // 2
    messages = [
        {"type": "http.request", "body": payload[:middle], "more_body": True},
        {"type": "http.request", "body": payload[middle:], "more_body": False},
    ]
    answered: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        answered.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": target,
        "query_string": query.encode(),
        "server": ("10.0.0.7", 4000),
        "headers": [*sent_headers, (b"content-length", b"%d" % len(payload))],
    }
    SERVER_CALL.set(None)
    await gate(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in answered[1:]).decode()
    return Answer(answered[0]["status"], dict(answered[0]["headers"]), text)
