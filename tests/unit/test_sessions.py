"""SESSIONS: what each conversation last looked like, bounded in turns, sessions and time."""

import numpy as np
import pytest
import start_llm as s
from hypothesis import given
from hypothesis import strategies as st

TURN = {"prompt": 10}


def session_ids(index: s.SessionIndex, *, now: float) -> list[str]:
    index.expire(now)
    sessions = index.snapshot(now, newest=100_000)
    return [session["id"] for session in sessions]


def context(session_id: str | None) -> s.SessionContext:
    return s.SessionContext(session_id=session_id)


ANONYMOUS = context(None)


def test_only_the_last_turns_of_a_session_are_kept_in_order():
    index = s.SessionIndex(s.Config(prompt_cache_max_entries_per_session=3))
    for n in range(5):
        index.note("a", {"prompt": n}, now=float(n))

    (session,) = index.snapshot(10.0, newest=20)
    assert session == {
        "id": "a",
        "idle_seconds": 6.0,
        "turns": [{"prompt": 2}, {"prompt": 3}, {"prompt": 4}],
    }


def test_an_idle_session_is_forgotten_and_use_keeps_one_alive():
    index = s.SessionIndex(s.Config(prompt_cache_session_max_idle_seconds=60))
    index.note("idle", TURN, now=0.0)
    index.note("used", TURN, now=1.0)
    index.note("idle", TURN, now=30.0)
    index.note("used", TURN, now=80.0)

    assert session_ids(index, now=85.0) == ["used", "idle"]  # newest first
    # By the clock alone, with no request.
    assert session_ids(index, now=91.0) == ["used"]

    index.note("other", TURN, now=200.0)
    assert session_ids(index, now=200.0) == ["other"]


def test_the_number_of_sessions_is_bounded_by_dropping_the_least_recently_used(
    monkeypatch,
):
    monkeypatch.setattr(s.SessionIndex, "MAX_SESSIONS", 100)
    index = s.SessionIndex(s.Config())
    index.note("kept", TURN, now=0.0)
    for n in range(300):
        index.note(f"s{n}", TURN, now=float(n))
        index.note("kept", TURN, now=float(n))
    newest = [f"s{n}" for n in range(201, 300)]
    assert set(session_ids(index, now=300.0)) == {"kept", *newest}


def test_the_clients_own_id_wins_else_the_first_128_tokens_name_the_session():
    tokens = list(range(1000))
    assert s.session_id_for(context("abc"), tokens) == "abc"

    by_tokens = s.session_id_for(ANONYMOUS, tokens)
    assert s.session_id_for(context(""), tokens) == by_tokens
    assert by_tokens.startswith("sha1:")
    assert len(by_tokens) == len("sha1:") + 40

    assert s.session_id_for(ANONYMOUS, [*tokens[:128], 7]) == by_tokens
    assert s.session_id_for(ANONYMOUS, [*tokens[:127], 7]) != by_tokens
    short_id = s.session_id_for(ANONYMOUS, [1])
    assert short_id != s.session_id_for(ANONYMOUS, [1, 0])


def answered(n: int, *digests: str, session_id: str = "s") -> s.SentRequest:
    """A request of these messages, by default of one of its own, answered at this time."""
    messages = tuple(
        s.CanonicalMessage("user", {}, {}, digest.encode())
        for digest in digests or [str(n)]
    )
    tokens = np.zeros(50, np.int32)
    return s.SentRequest(session_id, tokens, messages, b"head", float(n))


def times(index: s.SessionIndex, session_id: str | None = None) -> list[float]:
    """When the chats that are kept were answered."""
    return [request.answered_at for request in index.requests(session_id)]


def test_the_last_chat_of_each_conversation_of_a_session_is_kept():
    index = s.SessionIndex(s.Config())
    index.add(answered(1, "title", "u"))  # a title, often answered first
    index.add(answered(2, "sys", "u"))
    index.add(answered(3, "sys", "u", session_id="other"))
    index.add(answered(4, "sys", "u", "a", "t"))
    index.add(answered(5, "sys", "u", "b"))  # an edit
    assert times(index, "s") == [1.0, 4.0, 5.0]
    assert times(index, "other") == [3.0]

    index.add(answered(6, "sys", "u", "a", "t"))  # a retry
    assert times(index) == [1.0, 3.0, 5.0, 6.0]


def test_of_many_short_conversations_only_so_many_are_kept_to_compare_with():
    index = s.SessionIndex(s.Config())
    for n in range(1_000):
        index.add(answered(n))
    assert 100 < len(times(index)) < 600  # each request looks at all of them
    assert times(index)[-1] == 999.0


@pytest.mark.parametrize("what", ("a field", "messages as they were sent"))
def test_what_no_template_prints_counts_as_well(what):
    """A field that nobody knows has no token, and takes memory (L-128)."""
    index = s.SessionIndex(s.Config())
    message = s.CanonicalMessage("user", {"unknown": [[]] * 20_000}, {}, b"digest")
    for n in range(200):
        request = answered(n, session_id=str(n))
        if what == "a field":
            request = request._replace(messages=(message,))
        else:
            request = request._replace(sent_hashes=[0] * 5_000)
        index.add(request)
    assert 10 < len(times(index)) < 100


def test_a_request_is_forgotten_a_while_after_its_answer():
    index = s.SessionIndex(s.Config(ledger_ttl_seconds=10))
    for n in range(5):
        index.add(answered(n))
    index.expire(13.0)
    assert times(index) == [3.0, 4.0]


def test_a_request_that_is_too_large_leaves_those_of_other_sessions():
    index = s.SessionIndex(s.Config())
    index.add(answered(1))
    index.add(answered(2, session_id="huge"))
    huge = np.zeros(s.SessionIndex.MAX_COST, np.int32)
    index.add(answered(3, session_id="huge")._replace(tokens=huge))
    assert times(index) == [1.0]


def test_a_session_that_is_forgotten_leaves_no_request():
    index = s.SessionIndex(s.Config())
    for session_id in ("one", "two"):
        index.note(session_id, TURN, now=1.0)
        index.add(answered(1, session_id=session_id))

    index.forget("one")
    assert [request.session_id for request in index.requests(None)] == ["two"]
    index.forget(None)
    assert index.requests(None) == []
    assert "one" in index  # its figures are nobody's words


# -- why not more --------------------------------------------------------------------------


def sent(*roles: str, tokens: np.ndarray, n_reply_tokens: int = 0) -> s.SentRequest:
    """A request whose messages have these roles; with the same index they are the same."""
    messages = []
    for index, role in enumerate(roles):
        message = {"role": role, "content": f"{role} {index}"}
        digest = f"{role} {index}".encode()
        messages.append(s.CanonicalMessage(role, message, str(message), digest))
    return s.SentRequest(
        "s", tokens, tuple(messages), b"head", n_reply_tokens=n_reply_tokens
    )


EARLIER = sent("system", "user", tokens=np.arange(2_050), n_reply_tokens=50)


def rendered(n_same: int) -> np.ndarray:
    """A prompt that begins like the earlier one."""
    return np.concatenate([np.arange(n_same), np.full(2_200 - n_same, 9_999)])


def why(request: s.SentRequest, *, cached_tokens: int, matched_tokens: int) -> str:
    reason = s.explain_miss(
        EARLIER, request, cached_tokens=cached_tokens, matched_tokens=matched_tokens
    )
    return reason.sentence if reason else ""


def test_tokens_of_the_same_messages_are_read_again_if_rendered_otherwise():
    roles = ("system", "user", "assistant", "user")
    for n_same, n_reread in ((100, 1_900), (2_000, 0), (2_050, 0)):
        request = sent(*roles, tokens=rendered(n_same))
        assert s.count_reread_tokens(EARLIER, request, cached_tokens=n_same) == n_reread


def test_a_reply_is_blamed_only_for_its_own_tokens():
    came_back = ("system", "user", "assistant", "user")
    deleted = ("system", "user", "user")
    for roles, n_same, words in (
        (came_back, 2_000, "the last reply came back changed"),
        (came_back, 100, "messages before it are now rendered differently"),
        (deleted, 2_000, "the last reply did not come back"),
    ):
        request = sent(*roles, tokens=rendered(n_same))
        assert words in why(request, cached_tokens=n_same, matched_tokens=n_same)


def test_what_changed_since_an_earlier_request_has_anthropics_words():
    """No tokens are told where a setting of the template changed, or nothing is known."""
    same = sent("system", "user", "assistant", "user", tokens=rendered(2_000))
    edited = sent("system", "assistant", tokens=rendered(1_500))
    for earlier, request, kind, n_tokens in (
        (EARLIER, sent("user", tokens=rendered(10)), "system_changed", 1_990),
        (EARLIER, edited, "messages_changed", 500),
        (EARLIER, same._replace(context_key=b"", tools_hash=1), "tools_changed", 0),
        (EARLIER, same._replace(context_key=b""), "unavailable", None),
        (None, same, "previous_message_not_found", None),
    ):
        told = s.diagnose_miss(earlier, request)
        expected: dict[str, object] = {"type": kind}
        if n_tokens is not None:
            expected["cache_missed_input_tokens"] = n_tokens
        assert told == {"cache_miss_reason": expected}
    assert s.diagnose_miss(EARLIER, same) is None
    assert s.diagnose_miss(EARLIER, sent("system", tokens=rendered(9))) is None


def test_tokens_that_were_never_read_are_not_read_again():
    """A deadline ended the earlier request after 300 tokens of its prompt."""
    cut = sent("system", "user", tokens=np.arange(300))
    request = sent("system", "user", tokens=np.arange(3_224))

    assert s.count_reread_tokens(cut, request, cached_tokens=300) == 0
    assert s.count_reread_tokens(cut, request, cached_tokens=0) == 300
    assert s.explain_miss(cut, request, cached_tokens=300, matched_tokens=300) is None


@given(
    n_earlier=st.integers(1, 400),
    n_same=st.integers(0, 400),
    n_prompt=st.integers(1, 400),
    n_reply=st.integers(0, 50),
    share=st.floats(0, 1),
    roles=st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=4),
)
def test_what_is_read_again_was_read_before_and_is_read_now(  # noqa: PLR0913 - drawn
    n_earlier, n_same, n_prompt, n_reply, share, roles
):
    earlier = sent("system", "user", "assistant", tokens=np.arange(n_earlier))
    tokens = np.arange(n_prompt + n_reply)
    tokens[n_same:] += 10_000
    request = sent("system", *roles, tokens=tokens, n_reply_tokens=n_reply)
    n_cached = int(share * min(n_same, n_prompt - 1, n_earlier))

    n_reread = s.count_reread_tokens(earlier, request, cached_tokens=n_cached)

    assert 0 <= n_reread <= n_prompt - n_cached
    assert n_reread <= n_earlier
