"""ERRORS: every error is a whole OpenAI error object with the status its kind promises."""

import json

import pytest
import start_llm
from start_llm import (
    ClientGone,
    ContextTooLong,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    ServerError,
)

TABLE = {
    "ServerError": (500, "server_error", None),
    "BadRequest": (400, "invalid_request_error", None),
    "ContextTooLong": (400, "invalid_request_error", "context_length_exceeded"),
    "NotFound": (404, "invalid_request_error", None),
    "MethodNotAllowed": (405, "invalid_request_error", None),
    "BodyTooLarge": (413, "invalid_request_error", "request_too_large"),
    "UnsupportedMedia": (415, "invalid_request_error", None),
    "NotReady": (503, "server_error", "model_not_ready"),
    "Overloaded": (503, "server_error", "queue_full"),
    "GenerationFailed": (500, "server_error", "generation_failed"),
}


def family(kind):
    return {kind.__name__} | {name for child in kind.__subclasses__() for name in family(child)}


def test_the_table_is_complete():
    assert family(ServerError) == set(TABLE)
    assert not issubclass(ClientGone, ServerError)


@pytest.mark.parametrize(
    "name", [n for n in TABLE if n not in ("ContextTooLong", "MethodNotAllowed")]
)
def test_each_kind_has_its_status_type_and_code(name):
    status, type_, code = TABLE[name]
    error = getattr(start_llm, name)("what went wrong", param="messages[3].content")
    assert error.status == status
    body = json.loads(json.dumps(error.body()))
    inner = {"message": "what went wrong", "type": type_, "param": "messages[3].content"}
    assert body == {"error": inner | {"code": code}}


def test_a_code_can_be_given_for_one_error_alone():
    assert NotFound("m", param="model", code="model_not_found").code == "model_not_found"
    assert NotFound("m").body()["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_context_too_long_says_both_numbers_in_the_words_agents_match():
    error = ContextTooLong(9001, 8192, max_tokens=77)
    assert isinstance(error, start_llm.BadRequest)
    assert "maximum context length is 8192 tokens" in str(error)
    assert "resulted in 9001 tokens" in str(error)
    assert "77" in str(error)
    assert "max_tokens" not in str(ContextTooLong(9001, 8192))
    status, type_, code = TABLE["ContextTooLong"]
    assert (error.status, error.type, error.code, error.param) == (status, type_, code, "messages")


def test_headers_belong_to_one_error():
    assert MethodNotAllowed("no", allowed="POST").headers == {"Allow": "POST"}
    assert Overloaded("full").headers == {"Retry-After": "2"}
    assert ServerError("x").headers == {}
    assert (MethodNotAllowed("no", allowed="GET").status, MethodNotAllowed.code) == (405, None)
