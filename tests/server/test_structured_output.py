"""What a request demands of its reply: a form of JSON, a call, no call, an end of its thinking."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jsonschema
import mlx.core as mx
import numpy as np
import openai
import pytest
import start_llm as s
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fixture import SYSTEM, Served, Talk, user
from tiny_models import DENSE, HYBRID, TOOLS, tiny_model

LONG = 3000  # tokens; whatever the schemas below allow is shorter
TITLE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "n": {"enum": [1, 22, 333]},
    },
    "required": ["title", "n"],
    "additionalProperties": False,
}
ASKED = [SYSTEM, user("What is this about?")]


def form(schema):
    return {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }


@pytest.fixture(scope="module", params=[DENSE, HYBRID])
def served(request, tmp_path_factory):
    served = Served(tiny_model(request.param, tmp_path_factory.getbasetemp()))
    yield served
    served.close()


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    served = Served(tiny_model(DENSE, tmp_path_factory.getbasetemp()))
    yield served
    served.close()


@pytest.fixture(scope="module")
def self_opening(tmp_path_factory):
    """A model whose prompt does not open its thinking: it does, or does not."""
    root = tmp_path_factory.mktemp("opening")
    folder = tiny_model(DENSE, root)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    assert "<think>\\n" in text.rpartition("add_generation_prompt")[2]
    head, middle, tail = text.rpartition("add_generation_prompt")
    template.write_text(head + middle + tail.replace("<think>\\n' ", "' ", 1))
    served = Served(folder)
    yield served
    served.close()


# -- JSON ------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(
        lambda n: {"type": "integer", "minimum": n, "maximum": n + 300}
    ),
    st.integers(0, 6).map(
        lambda n: {"type": "string", "minLength": n, "maxLength": n + 5}
    ),
    st.lists(
        st.text('ab<>{}"\\é/', max_size=9), min_size=1, max_size=3, unique=True
    ).map(lambda words: {"enum": words}),
    st.sampled_from(["<think>", "</think>", "<tool_call>", "<|im_end|>"]).map(
        lambda tag: {"const": f"a{tag}b"}
    ),
)


def grown(schemas):
    arrays = st.builds(
        lambda items, n: {
            "type": "array",
            "items": items,
            "minItems": n,
            "maxItems": n + 2,
        },
        schemas,
        st.integers(0, 2),
    )
    objects = st.dictionaries(
        st.sampled_from("abcd"), schemas, min_size=1, max_size=3
    ).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields)[:2],
            "additionalProperties": False,
        }
    )
    return st.one_of(
        arrays, objects, st.lists(schemas, min_size=2, max_size=2).map(any_of)
    )


def any_of(schemas):
    return {"anyOf": schemas}


@settings(max_examples=25)
@given(
    st.recursive(leaves, grown, max_leaves=4),
    st.sampled_from([0, 1.0]),
    st.booleans(),
    st.booleans(),
)
def test_every_whole_reply_is_of_the_schema(dense, schema, temperature, thinks, stream):
    exchange = dense.ask(
        ASKED,
        max_tokens=LONG,
        tools=openai.omit,
        temperature=temperature,
        stream=stream,
        response_format=form(schema),
        extra_body={"enable_thinking": thinks},
    )
    assert exchange.finish_reason == "stop"
    said = exchange.answer["content"]
    assert len(said) - len(said.lstrip()) <= 8
    jsonschema.validate(json.loads(said), schema)
    assert bool(exchange.answer.get("reasoning_content")) == thinks


def test_json_object_is_any_object_and_max_tokens_may_cut_it(dense):
    asked = {"tools": openai.omit, "response_format": {"type": "json_object"}}
    exchange = dense.ask(
        ASKED, max_tokens=60, extra_body={"enable_thinking": False}, **asked
    )
    assert exchange.answer["content"].lstrip().startswith("{")
    assert exchange.finish_reason in ("stop", "length")
    if exchange.finish_reason == "length":
        assert exchange.n_generated == 60


def test_what_it_was_thinking_is_not_changed_by_what_must_follow(served):
    plain = served.ask(ASKED, tools=openai.omit)
    bound = served.ask(
        ASKED, tools=openai.omit, response_format=form(TITLE), max_tokens=LONG
    )
    thought = plain.answer["reasoning_content"]
    assert thought and bound.answer["reasoning_content"] == thought
    jsonschema.validate(json.loads(bound.answer["content"]), TITLE)


def test_a_warm_cache_says_what_a_cold_one_says_and_the_next_turn_is_cached(served):
    asked = {"tools": openai.omit, "response_format": form(TITLE), "max_tokens": LONG}
    served.forget()
    cold = served.ask(ASKED, **asked)
    warm = served.ask(ASKED, **asked)
    assert warm.said == cold.said and warm.n_cached > cold.n_cached
    later = served.ask([*ASKED, cold.answer, user("And now?")], tools=openai.omit)
    assert later.n_cached >= cold.usage["prompt_tokens"] + cold.n_generated - 1


def test_in_a_batch_the_others_say_what_they_say_alone(served):
    talks = [Talk(served, seed).messages for seed in range(4)]
    fields = [
        {"max_tokens": 80},
        {"tools": openai.omit, "response_format": form(TITLE), "max_tokens": LONG},
        {"max_tokens": 80, "temperature": 1, "seed": 5},
        {"tools": openai.omit, "response_format": form({"enum": ["yes", "no"]})},
    ]
    alone = [served.ask(talk, **one) for talk, one in zip(talks, fields, strict=True)]
    served.forget()
    n_rows, barrier = [], threading.Barrier(4)

    def ask(place):
        barrier.wait()
        exchange = served.ask(talks[place], **fields[place])
        n_rows.append(served.recorder.n_rows_most)
        return exchange

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4)))
    assert max(n_rows) > 1
    assert [one.said for one in together] == [one.said for one in alone]


@pytest.mark.parametrize("seed", range(6))
def test_with_tools_the_reply_is_json_or_calls(served, seed):
    (call,) = served.scribe.ids("<tool_call>")
    fields = {
        "temperature": 1,
        "seed": seed,
        "response_format": form(TITLE),
        "max_tokens": LONG,
    }
    asked = Talk(served, seed).messages
    calls = served.ask(asked, **fields)
    words = served.ask(asked, logit_bias={str(call): -100}, **fields)
    assert calls.answer["tool_calls"] and calls.answer["content"] is None
    assert words.finish_reason == "stop" and "tool_calls" not in words.answer
    jsonschema.validate(json.loads(words.answer["content"]), TITLE)


def test_a_call_that_is_required_wins_over_a_schema(served):
    named = {"type": "function", "function": {"name": "bash"}}
    for choice in ("required", named):
        exchange = served.ask(ASKED, tool_choice=choice, response_format=form(TITLE))
        called = [call["function"]["name"] for call in exchange.answer["tool_calls"]]
        assert called if choice == "required" else called[0] == "bash"
        assert exchange.finish_reason == "tool_calls"


def test_without_tools_nothing_but_json_comes_where_none_may_be_called(served):
    exchange = served.ask(
        ASKED,
        tool_choice="none",
        response_format=form(TITLE),
        max_tokens=LONG,
        temperature=1,
    )
    jsonschema.validate(json.loads(exchange.answer["content"]), TITLE)


WRONG = {
    "Invalid type": {"type": "objekt"},
    "look-around": {"type": "string", "pattern": "(?=a)b"},
    "unclosed group": {"type": "string", "pattern": "("},
    "not": {"not": {}},
    "Unknown format": {"type": "string", "format": "zzz"},
    "does not exist": {"$ref": "#/$defs/none"},
    "Unsatisfiable": {"type": "integer", "minimum": 5, "maximum": 1},
}


@pytest.mark.parametrize("why", WRONG)
def test_a_schema_that_cannot_be_compiled_is_refused_in_one_sentence(dense, why):
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as refused:
            dense.ask(ASKED, stream=stream, response_format=form(WRONG[why]))
        said = refused.value.body
        assert said["param"] == "response_format.json_schema.schema"
        assert why in said["message"] and "\n" not in said["message"]
    assert dense.ask(ASKED, max_tokens=3).n_generated == 3


def test_too_many_tools_for_a_forced_call_are_no_fault_of_a_schema(dense):
    names = [f"{n:064b}" for n in range(1200)]  # each digit is a token
    tools = [{"type": "function", "function": {"name": name}} for name in names]

    with pytest.raises(openai.BadRequestError) as refused:
        dense.ask(ASKED, tools=tools, tool_choice="required")

    assert refused.value.body["param"] == "tool_choice"
    assert "too many" in refused.value.body["message"]


@pytest.mark.parametrize("why", ["not", "Unknown format"])
def test_a_schema_may_ask_to_be_enforced_as_far_as_it_can_be(dense, why):
    """pydantic's `Path` is a format that nothing enforces."""
    short = {"type": "string", "maxLength": 3, **WRONG[why]}
    schema = {"type": "object", "properties": {"a": short}, "required": ["a"]}
    schema["additionalProperties"] = False
    with pytest.raises(s.BadRequest):
        constraints(dense, response_format=form(schema))
    for other in (
        {"lenient": False},
        {"lenient": 1, "whitespace_pattern": "x"},
        "lenient",
        None,
    ):
        with pytest.raises(s.BadRequest):
            constraints(dense, response_format=form({**schema, "x-guidance": other}))
    lenient = {**schema, "x-guidance": {"lenient": True}}
    said = dense.ask(ASKED, tools=openai.omit, response_format=form(lenient)).answer[
        "content"
    ]
    assert "a" in json.loads(said)


def test_a_schema_is_compiled_once_and_every_row_has_its_own_matcher(dense):
    fields = {"tools": openai.omit, "response_format": form({"enum": ["a", "b"]})}
    before = s._compile_grammar.cache_info()
    first, second = dense.ask(ASKED, **fields), dense.ask(ASKED, **fields)
    after = s._compile_grammar.cache_info()
    assert first.said == second.said
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
    assert s._grammar_compiler.cache_info().currsize == 1


# -- thinking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 6])
@pytest.mark.parametrize("bound", [True, False])
def test_the_thinking_budget_is_kept_to_the_token(served, n, bound):
    fields = {"tools": openai.omit, "max_tokens": LONG}
    if bound:
        fields["response_format"] = form(TITLE)
    free = served.ask(ASKED, **fields)
    n_free = free.usage["completion_tokens_details"]["reasoning_tokens"]
    budget = {"thinking": {"type": "enabled", "budget_tokens": n}}
    kept = served.ask(ASKED, extra_body=budget, **fields)
    n_kept = kept.usage["completion_tokens_details"]["reasoning_tokens"]
    assert n_free > n + 1 and n_kept == n + 1  # its end tag is counted
    assert free.answer["reasoning_content"].startswith(kept.answer["reasoning_content"])
    if bound:
        jsonschema.validate(json.loads(kept.answer["content"]), TITLE)


def test_a_budget_that_is_not_reached_changes_nothing(served):
    free = served.ask(ASKED, tools=openai.omit)
    budget = {"thinking": {"type": "enabled", "budget_tokens": 300}}
    assert served.ask(ASKED, tools=openai.omit, extra_body=budget).said == free.said


def request(served, **fields):
    body = {"messages": ASKED, **fields}
    config = served.state.config
    return s.parse_chat_request(body, config, request_id="r", headers={})


def constraints(served, **fields):
    return s.prepare_request(
        served.state, request(served, **fields)
    ).engine_request.constraints


def test_nothing_is_bent_where_nothing_is_asked(dense):
    budget = {"type": "enabled", "budget_tokens": 100}
    asked = partial(constraints, dense, tools=TOOLS)
    assert asked() == ()
    assert asked(response_format={"type": "text"}) == ()
    assert asked(thinking=budget, max_tokens=100) == ()
    assert asked(thinking={**budget, "type": "disabled"}, max_tokens=500) == ()
    assert len(asked(thinking=budget, max_tokens=101)) == 1
    assert len(asked(tool_choice="none")) == len(constraints(dense)) == 1


@pytest.mark.parametrize(
    "asked", [{"tool_choice": "required"}, {"response_format": form(TITLE)}]
)
def test_a_thought_that_something_must_follow_holds_no_call(dense, asked):
    (call,), (end,) = dense.scribe.ids("<tool_call>"), dense.scribe.ids("</think>")
    (constraint,) = constraints(dense, tools=TOOLS, **asked)
    course = constraint()
    first = next(course).flags
    thinking = [
        first,
        *(course.send([token]).flags for token in dense.scribe.ids("hm, so")),
    ]
    assert all(flags[end] and not flags[call] for flags in thinking)


@pytest.mark.parametrize("wrong", [-1, "5", 1.5, True])
def test_a_budget_that_is_no_number_of_tokens_is_refused(dense, wrong):
    with pytest.raises(s.BadRequest) as refused:
        request(dense, thinking={"type": "enabled", "budget_tokens": wrong})
    assert refused.value.param == "thinking.budget_tokens"


@pytest.mark.parametrize("thinks", [True, False])
def test_a_reply_may_open_its_own_thinking_before_json_and_calls(self_opening, thinks):
    (start,) = self_opening.scribe.ids("<think>")
    for seed in range(5):
        fields = {"temperature": 1, "seed": seed, "max_tokens": LONG}
        fields["logit_bias"] = {str(start): 5 if thinks else -100}
        only = {"tools": openai.omit, "response_format": form(TITLE)}
        words = self_opening.ask(ASKED, **only, **fields)
        assert bool(words.answer.get("reasoning_content")) == thinks
        jsonschema.validate(json.loads(words.answer["content"]), TITLE)
        budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
        calls = self_opening.ask(
            ASKED, tool_choice="required", extra_body=budget, **fields
        )
        assert calls.answer["tool_calls"]
        n_thought = calls.usage["completion_tokens_details"]["reasoning_tokens"]
        assert n_thought == (5 if thinks else 0)


# -- constraints, alone ----------------------------------------------------------------------------


def bent(constraint, prompt, reply, *, n_vocab=8):
    """The ids that may come after each token of a reply that is forced."""
    processor = s._ConstraintProcessor(constraint)
    seen = []
    for n in range(len(reply) + 1):
        tokens = mx.array([*prompt, *reply[:n]])
        logits = np.array(processor(tokens, mx.zeros((1, n_vocab))))[0]
        seen.append(set(np.flatnonzero(np.isfinite(logits)).tolist()))
    return seen


EVERY = set(range(8))
replies = st.lists(st.integers(0, 7), max_size=12)


@given(replies, st.sets(st.integers(0, 7), min_size=1, max_size=7))
def test_what_is_avoided_never_comes(reply, ids):
    assert bent(lambda: s.forbid_tokens(sorted(ids)), [1, 2], reply) == [
        EVERY - ids
    ] * (len(reply) + 1)


@given(replies, st.integers(1, 6), st.booleans())
def test_thinking_ends_after_its_budget_and_only_if_it_thinks(reply, n, opens):
    start, end, call = [6] * opens, 7, 5
    seen = bent(
        lambda: s.limit_thinking(n, start=start, ends=[end, call]), [7, 6], reply
    )
    place = len(start) + n
    is_over = {end, call} & {
        *reply[:place]
    }  # into a call no end of a thought is written
    is_due = len(reply) >= place and reply[: len(start)] == start and not is_over
    expected = [EVERY] * len(seen)
    if is_due:
        expected[place] = {end}
    assert seen == expected


def test_a_constraint_reads_the_reply_only_when_it_must():
    class Unread:
        def __init__(self, size):
            self.size = size

    processor = s._ConstraintProcessor(lambda: s.limit_thinking(5, start=[], ends=[7]))
    for size in range(3, 8):
        processor(Unread(size), mx.zeros((1, 8)))
    with pytest.raises(TypeError):  # now it looks
        processor(Unread(8), mx.zeros((1, 8)))


def test_a_token_that_a_grammar_refuses_ends_it_and_raises_nothing(dense):
    """Of NaN any token may be taken: that row fails alone, and not the batch that it is in."""
    *_, constraint = constraints(
        dense, response_format=form(TITLE), enable_thinking=False
    )
    course = constraint()
    refused = int(np.flatnonzero(~next(course).flags)[0])
    ends = [course.send([refused]).n_steps for _ in range(2)]
    assert ends == [sys.maxsize] * 2  # nothing but the end may come


def test_ids_that_the_model_does_not_know_are_left_out():
    for n_known in (5, 8, 11):
        flags = np.arange(n_known) > 2
        may = bent(
            lambda flags=flags: (x for x in [s.AllowedTokens(flags=flags)]), [1], []
        )
        assert may == [set(range(3, min(n_known, 8)))]


def test_a_model_without_a_call_format_cannot_be_made_to_call(dense):
    wanted = request(dense, tools=TOOLS, tool_choice="required")
    with pytest.raises(s.BadRequest) as refused:
        s._find_call_forms(wanted, None)
    assert refused.value.param == "tool_choice"


def test_json_object_takes_a_schema_too(dense):
    asked = {"type": "json_object", "schema": TITLE}
    assert request(dense, response_format=asked).json_schema == TITLE
    with pytest.raises(s.BadRequest) as refused:
        request(dense, response_format={"type": "json_object", "schema": 3})
    assert refused.value.param == "response_format.schema"
