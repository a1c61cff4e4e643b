"""ANSWER: what a request becomes before it runs, and how a reply ends where the client said."""

import os
import stat
from types import SimpleNamespace

import numpy as np
import pytest
import start_llm as s
from hypothesis import given
from hypothesis import strategies as st

PIECES = st.lists(st.text(alphabet="abST OP\n", max_size=5), max_size=20)


@given(PIECES, st.lists(st.text(alphabet="abSTOP", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_at_the_first_one_however_the_text_is_chunked(pieces, stops):
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    machine = s.StopStrings(tuple(stops))
    out = "".join(machine.feed(piece) for piece in pieces)
    out += machine.finish()
    assert out == (text[: min(found)] if found else text)
    assert machine.hit == bool(found)


def test_stop_strings_hold_back_no_more_than_they_must():
    machine = s.StopStrings(("STOP",))
    assert machine.feed("and ST") == "and "
    assert machine.feed("AY ") == "STAY "


@pytest.mark.parametrize("wanted", [True, False])
def test_the_machine_is_kept_awake_while_a_request_runs_and_no_longer(
    tmp_path, monkeypatch, wanted
):
    note = tmp_path / "pid"
    fake = tmp_path / "caffeinate"
    fake.write_text(f"#!/bin/sh\necho $$ > {note}\nexec sleep 60\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with s.kept_awake(s.Config(keep_awake=wanted)):
        pid = _wait_for(note) if wanted else None
        if pid:
            os.kill(pid, 0)
    if pid:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert note.exists() == wanted


def _wait_for(note):
    for _ in range(500):
        if note.exists() and note.read_text().strip():
            return int(note.read_text())
        os.sched_yield()
        __import__("time").sleep(0.01)
    raise AssertionError("caffeinate was not started")


def rendered(**fields):
    return s.Rendered(text="", ids=np.array([1], np.int32), generation_start=90, **fields)


def test_checkpoints_are_asked_for_where_a_later_request_may_part_from_this_one():
    positions = s._checkpoint_positions(
        rendered(boundaries=(0, 10, 20, 40, 60, 80), system_end=10, last_user_start=40)
    )
    assert positions == (10, 40, 60, 80, 90)


def stub_model(**markup):
    ids = {"<tool_call>": [7], "</think>": [9]}
    template = SimpleNamespace(encode=lambda text: ids.get(text, [ord(c) for c in text]))
    facts = {"tool_call_start": "<tool_call>", "think_end_ids": (9,), **markup}
    return SimpleNamespace(template=template, markup=SimpleNamespace(**facts))


def asked(mode, name=None):
    tool = {"type": "function", "function": {"name": "read", "parameters": {}}}
    return SimpleNamespace(kind="chat", tool_choice=s.ToolChoice(mode, name), tools=(tool,))


FORMAT = s.ToolFormat(start="<tool_call>", end="</tool_call>", dialect="qwen", gap="\n")


def constraint(request, *, in_reasoning=False, tool_format=FORMAT, **markup):
    return s._constraint(
        stub_model(**markup), request, in_reasoning=in_reasoning, tool_format=tool_format
    )


def test_tool_choice_becomes_a_rule_for_the_logits():
    assert constraint(asked("auto")) is None
    assert constraint(asked("none"), tool_format=None).banned == {7}
    assert constraint(asked("none"), tool_format=None, tool_call_start=None) is None
    forced = constraint(asked("named", "read"))
    assert forced.after is None and len(forced.openings) == 1
    assert constraint(asked("required"), in_reasoning=True).after == 9
    with pytest.raises(s.BadRequest) as refused:
        constraint(asked("required"), tool_format=None)
    assert refused.value.param == "tool_choice"


@given(st.lists(st.integers(0, 4), max_size=6))
def test_a_constraint_lets_exactly_its_openings_through(reply):
    rule = s.Constraint(openings=((1, 2), (1, 3, 4)), after=0)
    allowed, banned = rule.allowed_next(reply, eos_ids=frozenset({5}))
    if 0 not in reply:
        assert (allowed, banned) == (set(), {5})
        return
    said = reply[reply.index(0) + 1 :]
    expected = {
        o[len(said)] for o in rule.openings if len(o) > len(said) and list(o[: len(said)]) == said
    }
    complete = any(list(o) == said for o in rule.openings)
    assert allowed == (set() if complete else expected)
