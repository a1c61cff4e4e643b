"""ERRORS: every error is a whole OpenAI error object with the status its kind promises."""

import json

import pytest
import start_llm as s

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
ARGUMENTS = {"ContextTooLong": (9001, 8192), "NotServed": (405, "m")}


def family(kind):
    return {kind.__name__}.union(*map(family, kind.__subclasses__()))


def test_the_table_is_complete():
    assert family(s.ServerError) == set(TABLE)
    assert not issubclass(s.ClientGone, s.ServerError)


@pytest.mark.parametrize("name", TABLE)
def test_each_kind_has_its_status_type_and_code(name):
    error = getattr(s, name)(*ARGUMENTS.get(name, "m"))
    assert error.status == TABLE[name][0]
    assert ("Retry-After" in error.headers) == (error.status == 503)

    body = json.loads(json.dumps(error.body()))
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert (body["error"]["type"], body["error"]["code"]) == TABLE[name][1:]


def test_a_bad_request_names_its_field_in_the_text_too():
    error = s.BadRequest("wrong", field="messages[3].content")
    assert error.param == "messages[3].content"
    assert str(error) == "messages[3].content: wrong"
    assert s.BadRequest("wrong").param is None


def test_what_http_refuses_has_its_own_status_code_and_headers():
    lost = s.NotServed(404, "m", code="model_not_found", headers={"Allow": "POST"})
    assert (lost.status, lost.headers) == (404, {"Allow": "POST"})
    assert lost.body()["error"]["code"] == "model_not_found"


def test_context_too_long_says_both_numbers_in_the_words_agents_match():
    error = s.ContextTooLong(9001, 8192)
    assert isinstance(error, s.BadRequest)
    assert "maximum context length is 8192 tokens" in str(error)
    assert "resulted in 9001 tokens" in str(error)
    assert error.param == "messages"


def test_an_event_is_one_line_to_whoever_reads_lines():
    # Half of a surrogate pair included: models do spell them.
    body = {"text": "a\u2028b\u0085c\ud83d\u00e9"}
    written = []
    response = s.ResponseWriter(None)
    response.send_chunk = written.append

    response.send_event(body)

    (event,) = written
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: ")) == body
