"""A client that reads what the server says of itself."""

import http.client
import json
from contextlib import closing, suppress

from server_fixture import MAX_WAIT_SECONDS
from tiny_models import TOOLS, WORDS

FIELDS = {"model": "any", "temperature": 0, "max_tokens": 20, "tools": TOOLS}


def forget(served):
    """No KV, no recorded past, no request to compare with, and nothing told of any."""
    ask(served, "DELETE", "/v1/cache")
    served.state.stores.session_index.forget(None)
    served.state.stores.divergences.clear()


def ask(served, method, path, body=None, **headers):
    """(status, body as JSON where it is some)."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", served.state.config.mlx_port, timeout=MAX_WAIT_SECONDS
    )
    with closing(connection):
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        text = response.read().decode()
        with suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, text


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


def post(port, path, body, **headers):
    """(status, headers, body as bytes)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_WAIT_SECONDS)
    with closing(connection):
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()
