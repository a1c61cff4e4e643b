"""LOOP_GUARD_TOKENS: a reply that repeats itself ends as any reply that is cut does."""

import logging
from contextlib import closing

import pytest
import start_llm as s
from scripted_replies import force_tokens, with_processor
from server_fixture import SYSTEM, Scribe, Served, user
from tiny_models import DENSE, tiny_model

LOOP = 'it goes on {"path": "a"}, and on, '


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(DENSE, tmp_path_factory.getbasetemp())


@pytest.fixture
def scribe(folder):
    return Scribe(folder)


def answer(folder, monkeypatch, ids, *, max_tokens=1500, **settings):
    """What a client gets of a reply that is these tokens, and its row in the status."""
    choose = s._token_choice
    monkeypatch.setattr(
        s,
        "_token_choice",
        lambda request: with_processor(choose(request), request, force_tokens(ids)),
    )
    with closing(Served(folder, **settings)) as served:
        exchange = served.ask([SYSTEM, user("Go")], max_tokens=max_tokens)
        return exchange, served.state.stores.recent[-1]


@pytest.mark.parametrize("opening", ["", "</think>", '</think><tool_call>\n{"name": "'])
def test_a_loop_ends_a_reply_as_a_limit_does(
    folder, scribe, monkeypatch, caplog, opening
):
    """In thinking, in the answer and in a call; and with a line in the log."""
    ids = scribe.ids(opening) + 200 * scribe.ids(LOOP)

    with caplog.at_level(logging.WARNING):
        ended, row = answer(folder, monkeypatch, ids, loop_guard_tokens=400)

    n_period = len(scribe.ids(LOOP))
    assert 400 <= ended.n_generated <= 400 + 100 + 64 + len(scribe.ids(opening))
    assert row["finish"] == "repeated"
    assert ended.finish_reason == "length"
    assert f"repeats a passage of {n_period} tokens" in caplog.text
    cut, _ = answer(folder, monkeypatch, ids, max_tokens=ended.n_generated)
    assert ended.said == cut.said


def test_without_the_guard_a_loop_goes_on_to_the_limit(folder, scribe, monkeypatch):
    ids = scribe.ids("</think>") + 200 * scribe.ids(LOOP)
    ended, row = answer(folder, monkeypatch, ids, max_tokens=900, loop_guard_tokens=0)
    assert (ended.n_generated, row["finish"]) == (900, "length")
