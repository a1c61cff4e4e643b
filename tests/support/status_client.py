"""A client that reads what the server says of itself."""

import json
from contextlib import suppress

from http_client import exchange
from tiny_models import TOOLS, WORDS

FIELDS = {"model": "any", "temperature": 0, "max_tokens": 20, "tools": TOOLS}


def forget(served):
    """No KV, no recorded past, no request to compare with, and nothing told of any."""
    ask(served, "DELETE", "/v1/cache")
    served.state.stores.session_index.forget(None)
    served.state.stores.divergences.clear()


def ask(served, method, path, body=None, **headers):
    """(status, body as JSON where it is some)."""
    port = served.state.config.mlx_port
    code, _, payload = exchange(port, method, path, body, **headers)
    with suppress(ValueError):
        return code, json.loads(payload)
    return code, payload.decode()


def status(served):
    return ask(served, "GET", "/v1/status")[1]


def words(n, seed=0):
    return " ".join(WORDS[(seed + 7 * i * i + i) % len(WORDS)] for i in range(n))


def explained(served, messages, **fields):
    code, body = ask(
        served, "POST", "/v1/cache/explain", {**FIELDS, "messages": messages, **fields}
    )
    assert code == 200, body
    return body
