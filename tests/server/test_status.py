"""WATCH: what the server says of itself is true, complete, and gives nobody's words away."""

import time
from collections import defaultdict

import pytest
import start_llm as s
from prometheus_client.parser import text_string_to_metric_families
from server_fixture import SYSTEM, Served, Talk, user, wait_until
from status_client import FIELDS, ask, explained, forget, status, words
from tiny_models import DENSE, HYBRID

COUNTERS = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")


pytestmark = pytest.mark.covering(1, over="module")


@pytest.fixture(scope="module", params=[HYBRID, DENSE])
def served(request, models):
    with Served(models(request.param)) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(served):
    forget(served)


def opening(n_words, seed=0):
    return [SYSTEM, user(words(n_words, seed))]


# -- status ----------------------------------------------------------------------------------------


def test_every_phase_of_a_request_is_seen_and_afterwards_it_is_among_the_recent(served):
    requests_by_phase = defaultdict(list)

    def look(_fed):
        time.sleep(0.02)
        for row in list(served.state.stores.live.values()):
            request = row()
            requests_by_phase[request["phase"]].append(request)

    messages = opening(1500)
    with served.holding(look):
        exchange = served.ask(messages, max_tokens=30)
    n_prompt = exchange.usage["prompt_tokens"]

    assert set(requests_by_phase) >= {"prefill", "decode"}

    prefilling = requests_by_phase["prefill"]
    decoding = requests_by_phase["decode"]

    for request in [*prefilling, *decoding]:
        assert request["prompt"] == n_prompt
        assert request["api"] == "chat"
        assert request["max_tokens"] == 30
        assert (request["first_token_seconds"] is None) == (request["out"] == 0)
        assert 0 <= request["cached"] <= request["done"] <= n_prompt

    n_done = [request["done"] for request in prefilling]
    assert n_done == sorted(n_done)
    assert len(set(n_done)) > 1
    assert any(request["tokens_per_second"] for request in decoding)
    assert decoding[-1]["first_token_seconds"] > 0

    wait_until(lambda: not status(served)["requests"])
    last = status(served)["recent"][-1]
    assert last["prompt"] == n_prompt
    assert last["out"] == exchange.n_generated
    assert last["finish"] in ("stop", "length")
    assert last["match"] == "miss"
    assert decoding[0]["id"] == last["id"]


@pytest.mark.covering(2)
def test_the_status_shows_checkpoints_and_kinds_of_layers_to_who_asks(served):
    served.ask(opening(700), max_tokens=5)
    wait_until(lambda: not status(served)["requests"])

    plain = status(served)
    _, detailed = ask(served, "GET", "/v1/status?detail=cache")

    assert "layers" not in plain
    assert all("checkpoints" not in entry for entry in plain["cache"])
    has_state = "recurrent" in detailed["layers"]
    assert has_state == served.state.engine.call(lambda s: s.spec.has_state)
    assert "attention" in detailed["layers"]
    (entry,) = detailed["cache"]
    positions = entry["checkpoints"]
    assert bool(positions) == has_state
    assert positions == sorted(positions)
    assert all(0 < position <= entry["tokens"] for position in positions)


def test_asking_for_the_status_forgets_nothing():
    state = s.build_state(s.Config()).for_tenant("")  # not started: nothing expires
    state.stores.session_index.note("old", {}, now=time.monotonic() - 1e6)
    for _ in range(2):
        (session,) = s.status_body(state)["sessions"]
        assert session["id"] == "old"

    state.stores.expire(time.monotonic())
    assert s.status_body(state)["sessions"] == []


@pytest.mark.covering(2)
def test_match_says_what_was_reused(served):
    talk = Talk(served, 1)
    for _ in range(2):
        talk.step()
    served.ask(talk.messages)
    served.ask(talk.messages)
    recent = status(served)["recent"][-4:]
    matches = [request["match"] for request in recent]
    is_dense = served.state.engine.call(lambda scheduler: not scheduler.spec.has_state)

    assert matches[0] == "miss"
    assert matches[1] in ("line", "checkpoint")
    assert matches[3] == ("exact" if is_dense else "checkpoint")


def test_memory_by_kind_adds_up_and_the_cache_is_drawn_as_a_tree(served):
    talk = Talk(served, 2, opening(900))
    talk.step()
    for seed in (3, 4):
        talk.branch(2, seed=seed).step()
    wait_until(lambda: status(served)["engine"]["decoding"] == 0)

    def adds_up(body):
        n_bytes = sum(line["bytes"] for line in body["cache"])
        return n_bytes == body["memory"]["cache"] > 0

    wait_until(lambda: adds_up(status(served)))  # an idle engine reports each second
    body = status(served)

    memory = body["memory"]
    lines = {line["id"]: line for line in body["cache"]}
    assert adds_up(body)
    assert memory["model"] + memory["cache"] + memory["running"] <= memory["limit"]

    branches = [line for line in lines.values() if line["parent"]]

    assert len(branches) >= 2

    for line in branches:
        parent = lines[line["parent"]]
        assert 0 < line["shared"] <= min(parent["tokens"], line["tokens"])


def test_what_is_dropped_is_gone_and_nothing_else(served):
    first = Talk(served, 5, opening(400, 5))
    second = Talk(served, 6, opening(400, 6))
    in_session_a = {"session_id": "a"}
    in_session_b = {"session_id": "b"}
    first.step(extra_body=in_session_a)
    second.step(extra_body=in_session_b)

    for query in ("session=", "session_id=a", "sesion=a"):  # an unset $ID, other words
        no_session = ask(served, "DELETE", f"/v1/cache?{query}")
        assert no_session == (200, {"dropped": 0, "files": 0})

    code, body = ask(served, "DELETE", "/v1/cache?session=a")
    assert code == 200
    assert body["dropped"] >= 1
    # tools and system prompt are shared
    assert first.step(extra_body=in_session_a).n_cached < 330
    assert second.step(extra_body=in_session_b).n_cached > 400

    code, _ = ask(served, "DELETE", "/v1/cache")
    assert code == 200
    assert second.step(extra_body=in_session_b).n_cached == 0


def test_what_only_saves_time_goes_with_the_last_line(served):
    template = served.state.engine.model.template
    memos = (template._canonicalizer.memo, template._encoder.memo)
    served.ask(opening(300))
    assert all(memo.entries for memo in memos)
    ask(served, "DELETE", "/v1/cache")
    wait_until(lambda: not any(memo.entries for memo in memos))


def test_metrics_are_prometheus_and_count_what_happened(served):
    def metrics():
        code, text = ask(served, "GET", "/metrics")
        assert code == 200

        families = list(text_string_to_metric_families(text))
        assert all(" " in family.documentation for family in families)

        values = {}
        for family in families:
            for sample in family.samples:
                labels = sorted(sample.labels.items())
                values[sample.name, *labels] = sample.value

        return values

    old = metrics()
    served.ask(opening(300))
    new = metrics()
    last = status(served)["recent"][-1]
    for name in ("ttft_seconds", "prefill_seconds", "decode_seconds", "cached_share"):
        key = (f"start_llm_{name}_count",)
        assert new[key] == old[key] + 1
    key = ("start_llm_requests_total", ("finish", last["finish"]), ("match", "miss"))

    assert new[key] == old.get(key, 0) + 1

    for name in COUNTERS:
        assert new[f"start_llm_{name}_total",] == 0
    assert new["start_llm_memory_model_bytes",] > 0


# -- why not more ----------------------------------------------------------------------------------


def conversation(served, n=3, **fields):
    """A few short replies, each of which goes back."""
    talk = Talk(served, 9, opening(350))
    for _ in range(n):
        talk.step(**{"max_tokens": 40, **fields})
    return talk


def test_explaining_changes_nothing_and_nothing_is_missing_where_all_is_reused(served):
    talk = conversation(served)
    n_calls = len(served.recorder.fed)
    bodies = [explained(served, talk.messages) for _ in range(2)]
    assert bodies[0] == bodies[1]
    assert bodies[0]["why_not_more"] is None
    assert len(served.recorder.fed) == n_calls

    exchange = served.ask(talk.messages)
    assert exchange.n_cached == bodies[0]["would_reuse"]
    assert exchange.usage["prompt_tokens"] == bodies[0]["prompt"]


INBOUND = """\
## Inbound Context (trusted metadata)
It is:
```json
{"channel": "webchat"}
```
"""


@pytest.mark.parametrize("rule", ["inbound_context", "runtime"])
def test_reply_that_may_be_another_persons_is_named_and_with_it_the_way_out(
    served, rule
):
    """OpenClaw leaves its section out now and then; nobody knows by whom it was sent."""
    head = f"Be brief.\n{INBOUND}{words(80)}"
    question = "Stats: runtime 896ms, tokens 8.5k\n" + words(60, seed=2)

    def causes(edit, **fields):
        forget(served)
        messages = [{"role": "system", "content": head}, user(question)]
        body = {**FIELDS, "tools": [], "messages": messages, **fields}
        body["max_tokens"] = 400
        _, completion = ask(served, "POST", "/v1/chat/completions", body)
        reply = completion["choices"][0]["message"]
        sent = [{**m, "content": edit(m["content"])} for m in messages]
        sent += [reply, user("And then?")]
        return explained(served, sent, tools=[], **fields)["why_not_more"]

    def edit(text):
        changed = text.replace(INBOUND, "") if rule != "runtime" else text
        return changed.replace("896ms", "999ms") if rule == "runtime" else changed

    cause = causes(edit)
    assert f"rule: {rule}" in cause["sentence"]
    assert "x-session-id" in cause["sentence"]
    assert causes(edit, session_id="s") is None
    assert causes(str) is None


def cause_after_edit(served, messages, place, content):
    """Why no more would be reused if the message at this place had this content."""
    edited = [dict(message) for message in messages]
    edited[place]["content"] = content
    return explained(served, edited)["why_not_more"]


def test_the_first_difference_is_named_with_both_texts(served):
    talk = conversation(served, 4)
    roles = [message["role"] for message in talk.messages]
    places = {0, roles.index("user")}
    if "tool" in roles:
        places.add(roles.index("tool"))

    for place in places:
        content = talk.messages[place]["content"]
        edited = content[:20] + "EDITED" + content[20:]
        cause = cause_after_edit(served, talk.messages, place, edited)
        assert cause["message"] == place
        assert cause["role"] == roles[place]
        assert "EDITED" in cause["is"]
        assert "EDITED" not in cause["was"]
        assert f"message {place}" in cause["sentence"]


def test_messages_are_counted_as_the_client_counts_them(served):
    """A late system message is folded into the message before it."""
    talk = conversation(served, 1)
    note = {"role": "system", "content": "Mind the gap."}
    first = user(words(600, 1))
    second = user(words(600, 2))
    messages = [*talk.messages, note, first, note, second]
    served.ask(messages)

    last = len(messages) - 1
    content = "EDITED " + messages[last]["content"]
    cause = cause_after_edit(served, messages, last, content)
    assert cause["message"] == last
    assert cause["role"] == "user"


def test_other_tools_and_evicted_kv_are_causes_of_their_own(served):
    talk = conversation(served)
    other_tools = [{"type": "function", "function": {"name": "other"}}]
    cause = explained(served, talk.messages, tools=other_tools)["why_not_more"]
    assert "tools" in cause["sentence"]

    served.state.engine.call(lambda scheduler: scheduler.cache.evict_to_fit(1 << 60))
    body = explained(served, talk.messages)
    assert body["would_reuse"] == 0
    assert "evicted" in body["why_not_more"]["sentence"]


def test_what_a_session_sent_before_and_is_prefilled_again_is_told_once(served, caplog):
    in_session = {"session_id": "s"}
    talk = conversation(served, 3, extra_body=in_session)
    assert status(served)["divergences"] == []

    edited = [dict(message) for message in talk.messages]
    edited[0]["content"] = "EDITED " + edited[0]["content"]
    served.ask(edited, extra_body=in_session)
    (divergence,) = status(served)["divergences"]

    assert divergence["again"] > 512
    assert "message 0: a system message" in divergence["why"]
    assert "message 0: a system message" in caplog.text
    assert "EDITED" not in divergence["why"]
    assert "EDITED" not in caplog.text

    served.ask(edited, extra_body=in_session)
    assert len(status(served)["divergences"]) == 1

    # nothing is prefilled again
    served.ask(opening(900, 77), extra_body=in_session)
    assert len(status(served)["divergences"]) == 1


@pytest.mark.parametrize("tools", [3, True, [1], [None], {"a": 1}])
def test_odd_tools_cannot_be_explained_and_are_a_400(served, tools):
    body = {"messages": [user("Hello.")], "tools": tools}
    assert ask(served, "POST", "/v1/cache/explain", body)[0] == 400
