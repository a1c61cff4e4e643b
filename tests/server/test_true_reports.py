"""Where memory is tight and clients change their minds: what the server says of it is true."""

import json
import re
from pathlib import Path

import pytest
import start_llm as s
from server_fixture import SYSTEM, Served, Talk, user
from status_client import ask, explained, forget, status, words
from tiny_models import TOOLS


@pytest.fixture(scope="module")
def served(folder):
    settings = {"prompt_cache_max_bytes": 1_700_000, "log_prompt_tokens": True}
    with Served(folder, **settings) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(served):
    forget(served)


def test_the_context_that_status_tells_is_the_one_there_is(served):
    _, body = ask(served, "GET", "/v1/models")
    (model,) = body["data"]
    n_context = status(served)["model"]["context_length"]
    assert n_context == model["context_length"]
    assert n_context < 131_072


def test_a_prompt_that_loses_its_thinking_for_room_is_counted_without(served):
    thought = {"type": "thinking", "thinking": words(1300), "signature": "x"}
    content = [thought, {"type": "text", "text": "Yes."}]
    talk = [user("hello"), {"role": "assistant", "content": content}, user("go on")]
    body = {
        "model": "m",
        "messages": talk,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    _, count = ask(served, "POST", "/v1/messages/count_tokens", body)
    _, message = ask(served, "POST", "/v1/messages", {**body, "max_tokens": 5})

    usage = message["usage"]
    n_prompt = usage["input_tokens"]
    n_prompt += usage["cache_creation_input_tokens"]
    n_prompt += usage["cache_read_input_tokens"]

    assert count["input_tokens"] == n_prompt


def test_tools_that_change_in_mid_session_are_told(served):
    talk = Talk(served, 1, [SYSTEM, user(words(300))])
    talk.step(extra_body={"session_id": "s"})
    changed = talk.step(tools=TOOLS[:2], extra_body={"session_id": "s"})

    (divergence,) = status(served)["divergences"]
    n_prefilled = changed.usage["prompt_tokens"] - changed.n_cached
    assert 512 < divergence["again"] <= n_prefilled
    assert "tools" in divergence["why"]


def test_what_another_session_says_hides_nothing(served):
    start = [SYSTEM, user(words(300))]
    for name in ("a", "b"):
        served.ask(start, extra_body={"session_id": name}, max_tokens=5)

    edited = [{**SYSTEM, "content": "EDITED " + SYSTEM["content"]}, start[1]]
    served.ask(edited, extra_body={"session_id": "a"}, max_tokens=5)
    (divergence,) = status(served)["divergences"]
    assert divergence["session"] == "a"


def test_a_client_is_not_blamed_for_what_the_server_tells_otherwise(folder):
    with Served(folder, preserve_thinking=False) as server:
        talk = Talk(server, 1, [SYSTEM, user(words(60))])
        for _ in range(3):
            talk.step(extra_body={"session_id": "x"})
        messages = [*talk.messages, user("and now?")]
        explanation = explained(server, messages, session_id="x")
    assert "rendered differently" in explanation["why_not_more"]["sentence"]


def wrapped(message_id, minute, text):
    """A user message as OpenClaw wraps it in a webchat."""
    fields = json.dumps({"message_id": message_id, "sender": "cli"}, indent=2)
    return user(
        f"Conversation info (untrusted metadata):\n```json\n{fields}\n```\n\n"
        f"[Fri 2026-11-20 14:{minute} UTC] {text}"
    )


def test_a_wrapped_question_that_comes_back_with_another_id_is_replayed(served):
    """why(L-116)"""
    question = f"What is in {words(150)}?"
    start = [SYSTEM, wrapped("d9e7c8c5-1777", 10, question)]
    first = served.ask(start, max_tokens=30)

    sent_again = wrapped("4be8cc62-0a1d", 11, question)
    next_question = wrapped("7cbc2c04-e382", 12, "And now?")
    messages = [SYSTEM, sent_again, first.answer, next_question]
    second = served.ask(messages, max_tokens=5)

    assert second.n_cached >= first.usage["total_tokens"] - 1


def test_docs_operations_explains_every_field_of_a_session_log(served, monkeypatch):
    records = []

    def write(_path, record):
        records.append(record)

    monkeypatch.setattr(served.state.session_log, "write", write)
    messages = [SYSTEM, user("And?")]
    served.ask(messages, max_tokens=5)
    prompt = served.prepare(messages, tools=TOOLS).key.tokens.tolist()
    assert records[0]["tokens"] == prompt
    operations = Path(s.__file__).resolve().parent / "docs/operations.md"
    _, _, text = operations.read_text().partition("## The session logs")
    rows = re.findall(r"^\| (`.+?) \|", text.partition("\n## ")[0], re.MULTILINE)
    fields = {name for row in rows for name in re.findall(r"`(\w+)`", row)}

    written = records[0].keys() - served.state.metrics.snapshot().keys()
    assert fields == written | {"time", "messages"}


def test_the_log_of_a_request_says_which_rules_fired_and_no_text(
    served, monkeypatch, caplog
):
    records = []

    def write(_path, record):
        records.append(record)

    monkeypatch.setattr(served.state.session_log, "write", write)
    billed = {**SYSTEM, "content": f"x-anthropic-billing-header: cc_1\n{words(9)}"}
    note = "<system-reminder>\nsecret plan\n</system-reminder>"
    question = wrapped("d9e7c8c5-1777", 10, f"What is it?\n\n{note}")

    with caplog.at_level("DEBUG", logger="start-llm"):
        served.ask([billed, question], max_tokens=5)
        served.ask([SYSTEM, user("And?")], max_tokens=5)

    rules = {"billing_header": 1, "reminder": 1, "timestamp": 1, "user_message_id": 1}
    assert [record["rules"] for record in records] == [rules, {}]

    assert "secret plan" not in caplog.text + json.dumps(records)
