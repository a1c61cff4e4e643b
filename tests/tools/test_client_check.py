"""SCRIPTS for clients: what a real client's recorded requests show about the cache."""

import json
from dataclasses import replace

import client_check
import pytest
from capture_proxy import Exchange
from clients import drive

QUESTION = {"role": "user", "content": "Which files are here?"}
ANSWER = {"role": "assistant", "content": "Two of them."}


def chat(
    seq: int, messages: list, *, prompt: int, cached: int, is_whole: bool = True
) -> Exchange:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    events = [
        {"choices": [{"delta": {"content": ANSWER["content"]}}]},
        {"usage": usage},
    ]
    data_lines = [json.dumps(event) for event in events] + ["[DONE]"]
    return Exchange(
        seq,
        "POST",
        "/v1/chat/completions",
        headers={},
        body={"messages": messages, "stream": True},
        reply="".join(f"data: {line}\n\n" for line in data_lines),
        status=200,
        is_whole=is_whole,
    )


def anthropic(seq: int, messages: list, *, prompt: int, cached: int) -> Exchange:
    usage = {
        "input_tokens": 1,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": prompt - cached - 1,
        "output_tokens": 10,
    }
    block = {"type": "tool_use", "id": "t", "name": "Bash", "input": {}}
    events = [
        {"type": "message_start", "message": {"usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    reply = "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)
    return Exchange(
        seq,
        "POST",
        "/v1/messages?beta=true",
        headers={},
        body={"messages": messages, "system": "You help."},
        reply=reply,
        status=200,
    )


LONGER = [QUESTION, ANSWER, {"role": "user", "content": "And now?"}]


@pytest.mark.parametrize("ask", [chat, anthropic])
@pytest.mark.parametrize(("cached", "status"), [(110, 0), (108, 1)])
def test_what_was_sent_and_said_before_has_to_be_cached(ask, cached, status):
    first = ask(1, [QUESTION], prompt=100, cached=0)
    second = ask(2, LONGER, prompt=130, cached=cached)

    rows = client_check.rows_of([first, second])

    assert [row.talk for row in rows] == [1, 1]
    assert [row.n_prompt for row in rows] == [100, 130]
    assert [row.n_known for row in rows] == [0, 110]
    n_calls = 2 if ask is anthropic else 0
    assert sum(row.n_calls for row in rows) == n_calls
    assert client_check.verdict(rows, [])[1] == status


RULES = "\n".join(f"Keep {thing} tidy, and lose none." for thing in ("boats", "hats"))
N_STEPS = 5


def exchange(seq: int, path: str, body: dict) -> Exchange:
    return Exchange(seq, "POST", path, headers={}, body=body, status=200, reply="")


def agent(*, system=lambda k: RULES, task=lambda k: "Read the notes.", tail=()) -> list:
    """Requests of an agent by OpenAI's API: the k-th comes after k calls."""
    exchanges = []
    messages: list = []
    for k in range(N_STEPS):
        head = [
            {"role": "system", "content": system(k)},
            {"role": "user", "content": task(k)},
        ]
        body = {"messages": [*head, *messages, *tail]}
        exchanges.append(exchange(k, "/v1/chat/completions", body))
        function = {"name": "read", "arguments": json.dumps({"path": f"{k}.txt"})}
        call = {"id": f"call_{k}", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"{k} says"}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [result]
    return exchanges


def anthropic_agent(*, has_reminder: bool = False) -> list:
    """The same in Anthropic's API, with a header that differs in each request."""
    exchanges = []
    messages: list = [{"role": "user", "content": "Read the notes."}]
    for k in range(N_STEPS):
        header = (
            f"x-anthropic-billing-header: cc_version=2.1.121.dd4; cch={k + 9}a{k}8e;"
        )
        system = [{"type": "text", "text": text} for text in (header, RULES)]
        last = {"type": "text", "text": f"<system-reminder>{RULES}</system-reminder>"}
        sent = list(messages)
        if has_reminder:
            sent.append({"role": "user", "content": [last]})
        body = {"system": system, "messages": sent}
        exchanges.append(exchange(k, "/v1/messages?beta=true", body))
        use = {"type": "tool_use", "id": f"t_{k}", "name": "read", "input": {"n": k}}
        result = {"type": "tool_result", "tool_use_id": f"t_{k}", "content": "says"}
        messages += [{"role": "assistant", "content": [use]}]
        messages += [{"role": "user", "content": [result]}]
    return exchanges


def branches(n: int) -> list:
    """The same past, then another question each time."""
    body = agent()[-1].body
    exchanges = []
    for i in range(n):
        asked = {"role": "user", "content": f"Question {i}: where is it?"}
        messages = [*body["messages"], ANSWER, asked]
        exchanges.append(
            exchange(20 + i, "/v1/chat/completions", {"messages": messages})
        )
    return exchanges


def sub_agents() -> list:
    """Two with one system prompt and tasks that are nearly the same, side by side."""
    pairs = zip(
        agent(task=lambda k: "Count the files in folder 1."),
        agent(task=lambda k: "Count the files in folder 2."),
        strict=True,
    )
    return [request for pair in pairs for request in pair]


def inbound(k: int) -> str:
    """Pretty JSON in the middle of the system prompt."""
    context = json.dumps({"message_id": f"{k:08x}-1", "sender": "cli"}, indent=2)
    return f"{RULES}\n\n## Inbound context\n{context}\n\n{RULES}"


TITLE = [{"role": "system", "content": "You write titles."}, QUESTION]
REMINDER = {"role": "system", "content": "Plan mode is on."}
TITLES = [exchange(1, "/v1/chat/completions", {"messages": TITLE})]


@pytest.mark.parametrize(
    ("exchanges", "lengths"),
    [
        (agent(), [N_STEPS]),
        (anthropic_agent(), [N_STEPS]),
        (agent(system=inbound), [N_STEPS]),
        (anthropic_agent(has_reminder=True), [N_STEPS]),
        (agent(tail=[REMINDER]), [N_STEPS]),
        ([*TITLES, *agent(), *branches(3)], [1, N_STEPS + 1, 1, 1]),
        (sub_agents(), [N_STEPS, N_STEPS]),
        ([*agent(), *anthropic_agent()], [N_STEPS, N_STEPS]),
    ],
    ids=[
        *("chat", "anthropic", "id", "reminder", "trailing message"),
        *("title and branches", "sub-agents", "both APIs"),
    ],
)
def test_a_conversation_is_followed(exchanges, lengths):
    assert [len(talk) for talk in client_check.follow(exchanges)] == lengths


@pytest.mark.parametrize(
    "messages",
    [[None], [{"role": "user", "content": [3, None]}], [{"tool_calls": [3]}], [{}]],
)
def test_malformed_requests_are_no_trouble(messages):
    malformed = exchange(0, "/v1/chat/completions", {"messages": messages})
    talks = client_check.follow([malformed, malformed, *agent()])
    assert max(map(len, talks)) == N_STEPS


def test_one_request_is_nothing_to_judge_and_a_failed_one_is_named():
    rows = client_check.rows_of([chat(1, [QUESTION], prompt=100, cached=0)])
    assert client_check.verdict(rows, [])[1] == 2

    failed = chat(2, LONGER, prompt=1, cached=0)
    sentence, status = client_check.verdict(rows, [failed])
    assert status == 1
    assert "200" in sentence


@pytest.mark.parametrize(("end", "is_done"), [("", True), ("{", False)])
def test_a_client_may_leave_when_it_has_read_the_last_event(end, is_done):
    exchange = chat(1, [QUESTION], prompt=100, cached=0, is_whole=False)
    exchange = replace(exchange, reply=exchange.reply + end)
    assert client_check.is_done(exchange) == is_done


def test_a_client_that_is_missing_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(drive, "CLIENTS", tmp_path)
    assert client_check.main(["pi"]) == 2
    assert "install.sh node24 pi" in capsys.readouterr().err
