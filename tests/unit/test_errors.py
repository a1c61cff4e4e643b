"""ERRORS: every error is a whole OpenAI error object with the status its kind promises."""

import json

import pytest
import start_llm
from start_llm import (
    BadRequest,
    ClientGone,
    ContextTooLong,
    NotServed,
    Overloaded,
    ServerError,
)

TABLE = {
    "ServerError": (500, "server_error", None),
    "BadRequest": (400, "invalid_request_error", None),
    "ContextTooLong": (400, "invalid_request_error", "context_length_exceeded"),
    "NotServed": (405, "invalid_request_error", None),
    "NotReady": (503, "server_error", "model_not_ready"),
    "Draining": (503, "server_error", "draining"),
    "Overloaded": (503, "server_error", "queue_full"),
    "GenerationFailed": (500, "server_error", "generation_failed"),
}


def family(kind):
    names = {kind.__name__}
    for child in kind.__subclasses__():
        names |= family(child)
    return names


def test_the_table_is_complete():
    assert family(ServerError) == set(TABLE)
    assert not issubclass(ClientGone, ServerError)


@pytest.mark.parametrize(
    "name", [n for n in TABLE if n not in ("ContextTooLong", "NotServed")]
)
def test_each_kind_has_its_status_type_and_code(name):
    status, type_, code = TABLE[name]
    error = getattr(start_llm, name)("what went wrong")
    assert error.status == status

    body = json.loads(json.dumps(error.body()))
    assert body["error"] == {
        "message": "what went wrong",
        "type": type_,
        "param": None,
        "code": code,
    }
    assert list(body) == ["error"]


def test_a_bad_request_names_its_field_in_the_text_too():
    error = BadRequest("wrong", field="messages[3].content")
    assert error.param == "messages[3].content"
    assert str(error) == "messages[3].content: wrong"

    error = BadRequest("wrong")
    assert error.param is None
    assert str(error) == "wrong"


def test_what_http_refuses_has_its_own_status_code_and_headers():
    lost = NotServed(404, "m", code="model_not_found")
    assert (lost.status, lost.headers) == (404, {})
    assert lost.body()["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": "model_not_found",
    }

    refused = NotServed(405, "no", headers={"Allow": "POST"})
    assert refused.status == 405
    assert refused.headers == {"Allow": "POST"}
    assert refused.code is None


def test_context_too_long_says_both_numbers_in_the_words_agents_match():
    error = ContextTooLong(9001, 8192)
    assert isinstance(error, start_llm.BadRequest)
    assert "maximum context length is 8192 tokens" in str(error)
    assert "resulted in 9001 tokens" in str(error)

    assert (error.status, error.type, error.code) == TABLE["ContextTooLong"]
    assert error.param == "messages"


def test_headers_belong_to_one_error():
    assert Overloaded("full").headers == {"Retry-After": "2"}
    assert ServerError("x").headers == {}


def test_an_event_is_one_line_to_whoever_reads_lines():
    # Half of a surrogate pair included: models do spell them.
    body = {"text": "a\u2028b\u0085c\ud83d\u00e9"}
    written = []
    response = start_llm.ResponseWriter(None)
    response.send_chunk = written.append

    response.send_event(body)

    (event,) = written
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: ")) == body
