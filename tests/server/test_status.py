"""WATCH: what the server says of itself is true, complete, and gives nobody's words away."""

import time
from contextlib import closing

import pytest
import start_llm as s
from prometheus_client.parser import text_string_to_metric_families
from server_fixture import SYSTEM, Served, Talk, user, wait_until
from status_client import ask, explained, forget, status, words
from tiny_models import DENSE, HYBRID, tiny_model

COUNTERS = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")


@pytest.fixture(scope="module", params=[DENSE, HYBRID])
def served(request, tmp_path_factory):
    folder = tiny_model(request.param, tmp_path_factory.getbasetemp())
    with closing(Served(folder)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(served):
    forget(served)


# -- status ----------------------------------------------------------------------------------------


def test_every_phase_of_a_request_is_seen_and_afterwards_it_is_among_the_recent(served):
    seen = {}

    def look(_fed):
        time.sleep(0.02)
        for one in status_requests():
            seen.setdefault(one["phase"], []).append(one)

    def status_requests():
        return [reply.describe() for reply in list(served.state.stores.live.values())]

    messages = [SYSTEM, user(words(1500))]
    with served.holding(look):
        exchange = served.ask(messages, max_tokens=30)
    prompt = exchange.usage["prompt_tokens"]
    assert set(seen) >= {"prefill", "decode"}
    for one in [*seen["prefill"], *seen["decode"]]:
        assert one["prompt"] == prompt and one["api"] == "chat"
        assert 0 <= one["cached"] <= one["done"] <= prompt
    done = [one["done"] for one in seen["prefill"]]
    assert done == sorted(done) and len(set(done)) > 1
    assert any(one["tokens_per_second"] > 0 for one in seen["decode"])
    wait_until(lambda: not status(served)["requests"])
    last = status(served)["recent"][-1]
    assert (last["prompt"], last["out"]) == (prompt, exchange.n_generated)
    assert last["finish"] in ("stop", "length") and last["match"] == "miss"
    assert seen["decode"][0]["id"] == last["id"]


def test_asking_for_the_status_forgets_nothing():
    state = s.build_state(s.Config()).for_tenant("")  # not started: nothing expires
    state.stores.SESSION_INDEX.note("old", {}, now=time.monotonic() - 1e6)
    for _ in range(2):
        (session,) = s.status_body(state)["sessions"]
        assert session["id"] == "old"

    state.expire(time.monotonic())
    assert s.status_body(state)["sessions"] == []


def test_match_says_what_was_reused(served):
    talk = Talk(served, 1)
    for _ in range(2):
        talk.step()
    served.ask(talk.messages)
    served.ask(talk.messages)
    recent = [one["match"] for one in status(served)["recent"][-4:]]
    is_dense = served.state.engine.call(lambda scheduler: not scheduler.spec.has_state)
    assert recent[0] == "miss" and recent[1] in ("line", "checkpoint")
    assert recent[3] == ("exact" if is_dense else "checkpoint")


def test_memory_by_kind_adds_up_and_the_cache_is_drawn_as_a_tree(served):
    talk = Talk(served, 2, [SYSTEM, user(words(900))])
    talk.step()
    for seed in (3, 4):
        talk.branch(2, seed=seed).step()
    wait_until(lambda: status(served)["engine"]["decoding"] == 0)
    time.sleep(1.2)  # the report of an idle engine is a second old
    body = status(served)
    lines, memory = {line["id"]: line for line in body["cache"]}, body["memory"]
    assert sum(line["bytes"] for line in lines.values()) == memory["cache"] > 0
    assert memory["model"] + memory["cache"] + memory["running"] <= memory["limit"]
    branches = [line for line in lines.values() if line["parent"]]
    assert len(branches) >= 2
    for line in branches:
        parent = lines[line["parent"]]
        assert 0 < line["shared"] <= min(parent["tokens"], line["tokens"])


def test_what_is_dropped_is_gone_and_nothing_else(served):
    talks = [Talk(served, seed, [SYSTEM, user(words(400, seed))]) for seed in (5, 6)]
    for name, talk in zip("ab", talks, strict=True):
        talk.step(extra_body={"session_id": name})
    assert ask(served, "DELETE", "/v1/cache?session=") == (
        200,
        {"dropped": 0},
    )  # an unset $ID
    code, body = ask(served, "DELETE", "/v1/cache?session=a")
    assert code == 200 and body["dropped"] >= 1
    first = talks[0].step(extra_body={"session_id": "a"})
    second = talks[1].step(extra_body={"session_id": "b"})
    assert (
        first.n_cached < 330 < 400 < second.n_cached
    )  # tools and system prompt are shared
    assert ask(served, "DELETE", "/v1/cache")[0] == 200
    assert talks[1].step(extra_body={"session_id": "b"}).n_cached == 0


def test_what_only_saves_time_goes_with_the_last_line(served):
    template = served.state.engine.model.template
    memos = template._canonicalizer.memo, template._encoder.memo
    served.ask([SYSTEM, user(words(300))])
    time.sleep(1.5)  # an idle engine looks each second
    assert all(memo.entries for memo in memos)
    ask(served, "DELETE", "/v1/cache")
    wait_until(lambda: not any(memo.entries for memo in memos))


def test_metrics_are_prometheus_and_count_what_happened(served):
    def metrics():
        code, text = ask(served, "GET", "/metrics")
        assert code == 200
        families = list(text_string_to_metric_families(text))
        assert all(" " in family.documentation for family in families)
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    before = metrics()
    served.ask([SYSTEM, user(words(300))])
    after, last = metrics(), status(served)["recent"][-1]
    for name in ("ttft_seconds", "prefill_seconds", "decode_seconds", "cached_share"):
        key = (f"start_llm_{name}_count",)
        assert after[key] == before[key] + 1
    key = ("start_llm_requests_total", ("finish", last["finish"]), ("match", "miss"))
    assert after[key] == before.get(key, 0) + 1
    for name in COUNTERS:
        assert after[f"start_llm_{name}_total",] == 0
    assert after["start_llm_memory_model_bytes",] > 0


# -- why not more ----------------------------------------------------------------------------------


def conversation(served, n=3, **fields):
    talk = Talk(served, 9, [SYSTEM, user(words(700))])
    for _ in range(n):
        talk.step(**fields)
    return talk


def test_nothing_is_missing_where_all_is_reused(served):
    talk = conversation(served)
    body = explained(served, talk.messages)
    assert body["why_not_more"] is None
    exchange = served.ask(talk.messages)
    assert (
        exchange.n_cached == body["would_reuse"]
        and body["prompt"] == exchange.usage["prompt_tokens"]
    )


def test_explaining_runs_nothing_and_changes_nothing(served):
    talk = conversation(served)
    fed = len(served.recorder.fed)
    bodies = [explained(served, talk.messages) for _ in range(3)]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(served.recorder.fed) == fed


def test_the_first_difference_is_named_with_both_texts(served):
    talk = conversation(served, 4)
    tools = [i for i, message in enumerate(talk.messages) if message["role"] == "tool"]
    users = [i for i, message in enumerate(talk.messages) if message["role"] == "user"]
    for at in {0, users[0], *tools[:1]}:
        edited = [dict(message) for message in talk.messages]
        edited[at]["content"] = (
            edited[at]["content"][:20] + "EDITED" + edited[at]["content"][20:]
        )
        why = explained(served, edited)["why_not_more"]
        assert (why["message"], why["role"]) == (at, edited[at]["role"])
        assert "EDITED" in why["is"] and "EDITED" not in why["was"]
        assert why["rule"] is None and f"message {at}" in why["sentence"]


def test_messages_are_counted_as_the_client_counts_them(served):
    """A late system message is folded into the message before it."""
    talk = conversation(served, 1)
    note = {"role": "system", "content": "Mind the gap."}
    messages = [*talk.messages, note, user(words(600, 1)), note, user(words(600, 2))]
    served.ask(messages)
    edited = [dict(message) for message in messages]
    edited[-1]["content"] = "EDITED " + edited[-1]["content"]
    why = explained(served, edited)["why_not_more"]
    assert (why["message"], why["role"]) == (len(messages) - 1, "user")


def test_a_note_in_front_of_a_question_is_not_taken_for_it(served):
    said = [SYSTEM, user(words(300)), {"role": "assistant", "content": "Yes."}]
    note = {"role": "system", "content": "Mind the gap."}
    served.ask([*said, note, note, user(words(300, 1))])
    why = explained(served, [*said, note, note, user("EDITED " + words(300, 1))])[
        "why_not_more"
    ]
    assert (why["message"], why["role"]) == (5, "user")


def test_a_rule_that_could_have_stilled_it_is_named(tmp_path_factory):
    folder = tiny_model(DENSE, tmp_path_factory.getbasetemp())
    with closing(Served(folder, rule_current_time="off")) as served:
        system = "You are careful.\nCurrent time is {}\n" + words(700)
        served.ask(
            [{"role": "system", "content": system.format("10:41")}, user("Hello.")]
        )
        messages = [
            {"role": "system", "content": system.format("10:42")},
            user("Hello."),
        ]
        why = explained(served, messages)["why_not_more"]
        assert (why["message"], why["rule"]) == (0, "RULE_CURRENT_TIME")
        assert "10:41" in why["was"] and "10:42" in why["is"]


def test_other_tools_and_evicted_kv_are_causes_of_their_own(served):
    talk = conversation(served)
    others = [{"type": "function", "function": {"name": "other"}}]
    why = explained(served, talk.messages, tools=others)["why_not_more"]
    assert "tools" in why["sentence"]
    served.state.engine.call(lambda scheduler: scheduler.cache.evict_to_fit(1 << 60))
    body = explained(served, talk.messages)
    assert body["would_reuse"] == 0 and "evicted" in body["why_not_more"]["sentence"]


def test_what_a_session_sent_before_and_is_prefilled_again_is_told_once(served, caplog):
    talk = conversation(served, 3, extra_body={"session_id": "s"})
    assert status(served)["divergences"] == []
    edited = [dict(message) for message in talk.messages]
    edited[0]["content"] = "EDITED " + edited[0]["content"]
    served.ask(edited, extra_body={"session_id": "s"})
    (told,) = status(served)["divergences"]
    assert told["again"] > 512 and "message 0: a system message" in told["why"]
    assert "EDITED" not in told["why"] and "EDITED" not in caplog.text
    assert "message 0: a system message" in caplog.text
    served.ask(edited, extra_body={"session_id": "s"})
    assert len(status(served)["divergences"]) == 1
    served.ask(
        [SYSTEM, user(words(900, 77))], extra_body={"session_id": "s"}
    )  # nothing again
    assert len(status(served)["divergences"]) == 1


@pytest.mark.parametrize("body", [{}, {"messages": 7}, {"messages": []}, []])
def test_what_cannot_be_explained_is_a_400(served, body):
    code, answer = ask(served, "POST", "/v1/cache/explain", body)
    assert code == 400 and answer["error"]["message"]


def test_a_client_that_leaves_is_among_the_recent_as_cancelled(served):
    with served.holding(lambda fed: time.sleep(0.02)):
        with served.stream([SYSTEM, user(words(300))], max_tokens=400) as chunks:
            next(iter(chunks))
        wait_until(lambda: not status(served)["requests"])
    assert status(served)["recent"][-1]["finish"] == "cancelled"
