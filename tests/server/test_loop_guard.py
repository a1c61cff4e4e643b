"""LOOP_GUARD_TOKENS: a reply that repeats itself ends as any reply that is cut does."""

import logging

import pytest
import start_llm as s
from nights import at_night
from scripted_replies import force_tokens, with_processor
from server_fixture import SYSTEM, user, wait_until

LOOP = 'it goes on {"path": "a"}, and on, '


def answer(served, monkeypatch, ids, *, max_tokens, guard):
    """What a client gets of a reply that is these tokens, and how its request ended."""
    config = served.state.config.model_copy(update={"loop_guard_tokens": guard})
    choose = s._token_choice
    put = s.RequestHandle.put

    def put_and_wait(handle, event):
        """So the model is not ahead of the connection, which guards, however busy that is."""
        put(handle, event)
        wait_until(handle._events.empty)

    with monkeypatch.context() as patch:
        patch.setattr(
            s,
            "_token_choice",
            lambda request: with_processor(choose(request), request, force_tokens(ids)),
        )
        if guard:
            patch.setattr(s.RequestHandle, "put", put_and_wait)
        object.__setattr__(served.state, "config", config)
        exchange = served.ask([SYSTEM, user("Go")], max_tokens=max_tokens)
    return exchange, served.state.stores.recent[-1]["finish"]


@pytest.mark.parametrize(
    "opening", [at_night(""), "</think>", '</think><tool_call>\n{"name": "']
)
def test_a_loop_ends_a_reply_as_a_limit_does_where_the_guard_is_on(
    served, monkeypatch, caplog, opening
):
    """In thinking, in the answer and in a call; and with a line in the log."""
    ids = served.scribe.ids(opening) + 100 * served.scribe.ids(LOOP)

    with caplog.at_level(logging.WARNING):
        ended, finish = answer(served, monkeypatch, ids, max_tokens=900, guard=150)

    n_period = len(served.scribe.ids(LOOP))
    n_most = max(150, s.MIN_REPEATS * n_period) * 5 // 4 + s.LOOP_CHECK_TOKENS
    assert 150 <= ended.n_generated <= n_most + len(served.scribe.ids(opening))
    assert (finish, ended.finish_reason) == ("repeated", "length")
    assert f"repeats a passage of {n_period} tokens" in caplog.text

    n = ended.n_generated
    cut, finish = answer(served, monkeypatch, ids, max_tokens=n, guard=0)
    assert (ended.said, finish) == (cut.said, "length")
    longer, finish = answer(served, monkeypatch, ids, max_tokens=n + 70, guard=0)
    assert (longer.n_generated, finish) == (n + 70, "length")
