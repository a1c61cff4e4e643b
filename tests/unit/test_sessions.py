"""SESSIONS: what each conversation last looked like, bounded in turns, sessions and time."""

import threading
from functools import partial

import numpy as np
import pytest
import start_llm
from hypothesis import given
from hypothesis import strategies as st
from start_llm import Config, RequestHistory, SentRequest, SessionIndex, session_id_for


def known(index: SessionIndex, now: float) -> list[str]:
    index.expire(now)
    return [session["id"] for session in index.snapshot(now, newest=100_000)]


def context(session_id: str | None) -> start_llm.SessionContext:
    return start_llm.SessionContext(session_id=session_id)


def test_only_the_last_turns_of_a_session_are_kept_in_order() -> None:
    index = SessionIndex(Config(prompt_cache_max_entries_per_session=3))
    for n in range(5):
        index.note("a", {"prompt": n}, now=float(n))
    turns = [{"prompt": 2}, {"prompt": 3}, {"prompt": 4}]
    assert index.snapshot(10.0) == [{"id": "a", "idle_seconds": 6.0, "turns": turns}]


def test_an_idle_session_is_forgotten_and_use_keeps_one_alive() -> None:
    index = SessionIndex(Config(prompt_cache_session_max_idle_seconds=60))
    index.note("idle", {"prompt": 10}, now=0.0)
    index.note("used", {"prompt": 10}, now=1.0)
    index.note("idle", {"prompt": 10}, now=30.0)
    index.note("used", {"prompt": 10}, now=80.0)
    assert known(index, 85.0) == ["used", "idle"]  # newest first
    assert known(index, 91.0) == ["used"]  # by the clock alone, with no request
    index.note("other", {"prompt": 10}, now=200.0)
    assert known(index, 200.0) == ["other"]


def test_an_idle_limit_of_zero_keeps_sessions_for_ever() -> None:
    index = SessionIndex(Config(prompt_cache_session_max_idle_seconds=0))
    index.note("a", {"prompt": 10}, now=0.0)
    assert known(index, 1e9) == ["a"]


def test_the_number_of_sessions_is_bounded_by_dropping_the_least_recently_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SessionIndex, "MAX_SESSIONS", 100)
    index = SessionIndex(Config())
    index.note("kept", {"prompt": 10}, now=0.0)
    for n in range(300):
        index.note(f"s{n}", {"prompt": 10}, now=float(n))
        index.note("kept", {"prompt": 10}, now=float(n))
    assert set(known(index, 300.0)) == {"kept", *(f"s{n}" for n in range(201, 300))}


def test_the_snapshot_shows_the_newest() -> None:
    index = SessionIndex(Config())
    for n in range(50):
        index.note(f"s{n}", {"prompt": 10}, now=float(n))
    assert [session["id"] for session in index.snapshot(50.0, newest=2)] == [
        "s49",
        "s48",
    ]


def test_the_clients_own_id_wins_else_the_first_128_tokens_name_the_session() -> None:
    tokens = list(range(1000))
    assert session_id_for(context("abc"), tokens) == "abc"
    by_tokens = session_id_for(context(None), tokens)
    assert by_tokens.startswith("sha1:")
    assert len(by_tokens) == len("sha1:") + 40
    assert session_id_for(context(None), [*tokens[:128], 7]) == by_tokens
    assert session_id_for(context(""), tokens) == by_tokens
    assert session_id_for(context(None), [*tokens[:127], 7]) != by_tokens
    assert session_id_for(context(None), [1]) != session_id_for(context(None), [1, 0])


def test_notes_from_many_threads_are_all_kept() -> None:
    index = SessionIndex(Config(prompt_cache_max_entries_per_session=20))

    def work(name: str) -> None:
        for n in range(100):
            index.note("shared", {"prompt": 10}, now=float(n))
            index.note(name, {"prompt": 10}, now=float(n))
            index.snapshot(float(n))

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sessions = {s["id"]: s["turns"] for s in index.snapshot(100.0)}
    assert len(sessions) == 9
    assert len(sessions["shared"]) == 20  # of 800: the bound of one session


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_a_diff_counts_the_leading_messages_that_agree(
    before: list[int], now: list[int]
) -> None:
    n = start_llm.message_diff(before, now)
    assert before[:n] == now[:n]
    assert n == min(len(before), len(now)) or before[n] != now[n]


def test_only_a_strict_append_advances_the_record_of_a_session() -> None:
    store = start_llm.SessionTurnStore()
    update = partial(store.advance, "s")
    assert update(digests=["sys", "u"]) == 0
    assert update(digests=["sys", "u", "a", "t"]) == 2
    assert update(digests=["title", "u"]) == 0  # a title request under the same id
    assert update(digests=["sys", "u", "b"]) == 2  # an edit
    assert update(digests=["sys", "u", "a", "t"]) == 4  # a retry
    assert store.exchange_last("s", ["sys"]) == 0  # of another record
    assert update(digests=["sys", "u", "a", "t", "b"]) == 4


def test_the_last_request_is_what_the_next_is_compared_with() -> None:
    store = start_llm.SessionTurnStore()
    assert store.exchange_last("s", ["a", "b"]) == 0
    assert store.exchange_last("s", ["a", "c"]) == 1
    assert store.exchange_last("s", ["a", "c", "d"]) == 2
    assert store.exchange_last("other", ["a", "c"]) == 0
    for n in range(2 * store.MAX_SESSIONS):
        store.exchange_last(str(n), ["a"])
    assert store.exchange_last("s", ["a", "c", "d"]) == 0  # forgotten


def test_without_an_id_a_session_is_named_by_its_first_words() -> None:
    tokens = np.arange(300, dtype=np.int32)
    named = session_id_for(context(None), tokens, start_key=b"x")
    assert named == session_id_for(context(None), tokens[:5], start_key=b"x")
    assert named != session_id_for(context(None), tokens, start_key=b"y")


def answered(n: int) -> SentRequest:
    """A request with one message, answered at this time."""
    message = start_llm.CanonicalMessage("user", {}, {}, str(n).encode())
    return SentRequest("s", np.zeros(50, np.int32), (message,), b"head", float(n))


def test_of_many_short_conversations_only_so_many_are_kept_to_compare_with() -> None:
    history = RequestHistory(Config())
    for n in range(1_000):
        history.add(answered(n))
    assert 100 < len(history._requests) < 600  # each request looks at all of them


def test_a_request_is_forgotten_a_while_after_its_answer() -> None:
    history = RequestHistory(Config(ledger_ttl_seconds=10))
    for n in range(5):
        history.add(answered(n))
    history.expire(13.0)
    assert [request.answered_at for request in history._requests] == [3.0, 4.0]


def test_without_a_limit_no_request_is_forgotten() -> None:
    history = RequestHistory(Config(ledger_ttl_seconds=0))
    history.add(answered(0))
    history.expire(1e9)
    assert len(history._requests) == 1
