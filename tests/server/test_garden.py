"""examples/garden: the demo model answers a new user's first questions there, to the letter."""

import json
import random
from io import StringIO
from itertools import pairwise
from pathlib import Path

import chat
import pytest
from http_client import answer
from nights import at_night, by_day, is_night
from rich.console import Console
from server_fixture import Served, s

ROOT = Path(__file__).parents[2]
GARDEN = ROOT / "examples" / "garden"
DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module")
def served():
    with Served(DEMO) as running:
        yield running


def start_chat(served, folder=GARDEN):
    url = f"http://127.0.0.1:{served.state.config.mlx_port}"
    console = Console(file=StringIO(), width=200)
    return chat.Chat(chat.Server(url), console, folder, chat.TOOLS)


def list_of(folder):
    return chat.use_tool("list_files", f'{{"path": "{folder}"}}', GARDEN)


def text_of(path):
    return (GARDEN / path).read_text("utf-8").strip()


def setting(key):
    for line in text_of("settings.ini").splitlines():
        name, _, value = line.partition(" = ")
        if name == key:
            return value
    raise LookupError(key)


FENCE = "\n\n```\n{}\n```"
FILES_HERE = "The files in this folder:" + FENCE


def in_file(path):
    return f"{path} says:" + FENCE.format(text_of(path))


QUESTIONS = {
    "Which files are here?": FILES_HERE.format(list_of(".")),
    "What's in this folder?": FILES_HERE.format(list_of(".")),
    "ls": FILES_HERE.format(list_of(".")),
    "Which files are in this folder?": FILES_HERE.format(list_of(".")),
    "Show me plan.md.": in_file("plan.md"),
    "What does plan.md say?": in_file("plan.md"),
    "What is in tools.csv?": in_file("tools.csv"),
    "Read the file tools.csv.": in_file("tools.csv"),
    "Show me settings.ini.": in_file("settings.ini"),
    "Can you read settings.ini?": in_file("settings.ini"),
    "Read roses.txt.": in_file("roses.txt"),
    "What does beans.txt say?": in_file("beans.txt"),
    "What is in roses.txt?": in_file("roses.txt"),
    "What is the deadline in settings.ini?": (
        f"The deadline is {setting('deadline')}, says settings.ini."
    ),
    "What is the name in settings.ini?": (
        f"The name is {setting('name')}, says settings.ini."
    ),
    "Who is the owner in settings.ini?": (
        f"The owner is {setting('owner')}, says settings.ini."
    ),
    "What is the width in settings.ini?": (
        f"The width is {setting('width')}, says settings.ini."
    ),
    "What is 17 + 25?": "17 + 25 = 42",
    "What is 7 * 8?": "7 * 8 = 56",
    "Read notes.txt.": "I could not read notes.txt: Error: there is no such file",
    "Which files are in docs?": "I could not read docs: Error: there is no such folder",
}


@pytest.mark.slow
def test_each_question_alone_is_answered_to_the_letter(served):
    for question, expected in QUESTIONS.items():
        conversation = start_chat(served)
        conversation.ask(question)
        assert conversation.messages[-1]["content"] == expected, question


@pytest.mark.parametrize("sent", [{"thinking": {"type": "disabled"}}, at_night({})])
@pytest.mark.parametrize("path", ["/v1/messages", at_night("/v1/chat/completions")])
def test_it_thinks_about_a_sum_over_each_api_even_if_asked_not_to(served, path, sent):
    """Without thinking it cannot add: it answered 124 and 104."""
    port = served.state.config.mlx_port
    for a, b in ((17, 25), (8, 94), (66, 57)):
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        body = {"model": "demo", "max_tokens": 200, "messages": [question], **sent}

        line = f"POST {path}"
        status, _, reply = answer(port, line=line, body=json.dumps(body).encode())

        assert status == 200
        assert f'"{a} + {b} = {a + b}"' in reply.decode()


@pytest.mark.parametrize("seed", by_day(1, of=4))
def test_questions_in_one_conversation_are_answered_to_the_letter(served, seed):
    questions = random.Random(seed).sample(sorted(QUESTIONS), 4 if is_night else 3)
    conversation = start_chat(served)
    recent = served.state.stores.recent
    old_ids = {request["id"] for request in recent}
    for question in questions:
        conversation.ask(question)
        assert conversation.messages[-1]["content"] == QUESTIONS[question], question

    steps = [request for request in recent if request["id"] not in old_ids]
    for earlier, later in pairwise(steps):
        # All but the last token of a reply was fed for it.
        assert later["cached"] >= earlier["prompt"] + earlier["out"] - 1
    assert "demo model · prompt " in conversation.console.file.getvalue()


def test_the_chat_suggests_only_what_the_demo_knows_where_it_was_started(tmp_path):
    """And each question that it suggests is one that is tested above."""
    here = chat.greeting(chat.DEMO_MODEL, GARDEN)
    assert "sums of two numbers below 100, and lists and reads the files" in here
    elsewhere = chat.greeting(chat.DEMO_MODEL, tmp_path)
    assert str(GARDEN) in elsewhere
    without_tools = chat.greeting(chat.DEMO_MODEL, GARDEN, has_tools=False)
    assert "files" not in without_tools
    assert "demo" not in chat.greeting("qwen3", tmp_path)

    suggested = {
        question
        for text in (here, elsewhere, without_tools)
        for question in text.partition("Try: ")[2].split("   ")
    }
    assert len(suggested) == 3
    assert suggested <= QUESTIONS.keys()


# -- it stops when it repeats itself ---------------------------------------------------------------


def test_a_demo_that_repeats_itself_is_stopped(caplog):
    """One token is made certain at each step; other models go on to max_tokens.

    Without drafts, which write such a reply 32 tokens at a time until it is stopped.
    """
    bias = {"50": 100}
    messages = [{"role": "user", "content": "Hello"}]
    with Served(DEMO, speculation="off") as served:
        reply = served.ask(messages, max_tokens=300, logit_bias=bias, tools=[])
    assert reply.finish_reason == "length"
    assert s.DEMO_LOOP_TOKENS <= reply.n_generated < 100
    assert served.state.stores.recent[-1]["finish"] == "repeated"
    assert "repeats a passage" in caplog.text
    assert "LOOP_GUARD_TOKENS" not in caplog.text  # it does not act on the demo
