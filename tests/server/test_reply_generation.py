"""Each request that was submitted ends once, whatever happens to whoever waits for it."""

from contextlib import closing

import pytest
import start_llm as s
from server_fixture import SYSTEM, user, wait_until
from status_client import forget, status, words


@pytest.fixture(autouse=True)
def empty(served):
    forget(served)


def n_running(served):
    return served.state.engine.call(
        lambda scheduler: len(scheduler.running) + len(scheduler.waiting)
    )


def transcripts(served):
    return served.state.for_tenant("").stores.ledger.snapshot()["transcripts"]


def generate(served, **fields):
    state = served.state.for_tenant("")
    request = served.parse([SYSTEM, user(words(80))], max_tokens=60, **fields)
    return s.ReplyGeneration(state, request)


def test_a_stream_that_failed_is_not_recorded_as_left(served):
    generation = generate(served, stream=True)

    def fail_late(_fed):
        if generation._decoder.shown_ends:  # a part that its client could have
            raise RuntimeError("planted")

    with served.holding(fail_late), closing(generation):
        with pytest.raises(s.ServerError):
            list(generation.bodies())
        assert generation._decoder.shown_ends

    assert transcripts(served) == 0


def test_a_stream_that_its_client_left_is_recorded_as_far_as_it_was_shown(served):
    generation = generate(served, stream=True)
    with closing(generation):
        for _ in generation.bodies():
            if generation._decoder.shown_ends:
                break

    assert transcripts(served) == 1


def test_closing_a_reply_reports_it_once(served):
    generation = generate(served)
    n_before = len(status(served)["recent"])

    generation.close()

    wait_until(lambda: n_running(served) == 0)
    assert len(status(served)["recent"]) == n_before + 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [(s, "ReplyDecoder"), (s, "_make_formatter"), (s.PromptPlanner, "verify")],
)
def test_what_fails_after_the_submission_ends_the_request(
    served, monkeypatch, owner, name
):
    handles = []
    submit = served.state.engine.submit

    def submit_and_note(request):
        handles.append(submit(request))
        return handles[-1]

    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(served.state.engine, "submit", submit_and_note)
    monkeypatch.setattr(owner, name, fail)

    with pytest.raises(RuntimeError, match="planted"):
        generate(served)

    assert [handle.stop_reason for handle in handles] == ["cancelled"]
    wait_until(lambda: n_running(served) == 0)


def test_a_fault_of_our_own_is_a_failure_and_no_leaving(served, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    generation = generate(served, stream=True)
    monkeypatch.setattr(generation._decoder, "feed", fail)

    with closing(generation), pytest.raises(RuntimeError, match="planted"):
        list(generation.bodies())

    assert status(served)["recent"][-1]["finish"] == "failed"
    wait_until(lambda: n_running(served) == 0)
