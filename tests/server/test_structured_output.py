"""What a request demands of its reply: a form of JSON, a call, no call, an end of its thinking."""

import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import mlx.core as mx
import nights
import numpy as np
import openai
import pytest
import start_llm as s
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nights import at_night, by_day
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


@pytest.fixture(scope="module", params=[HYBRID, at_night(DENSE)])
def served(request, models):
    with Served(models(request.param)) as served:
        yield served


@pytest.fixture(scope="module")
def self_opening(tmp_path_factory):
    """A model whose prompt does not open its thinking: it does, or does not."""
    root = tmp_path_factory.mktemp("opening")
    folder = tiny_model(DENSE, root)
    template = folder / "chat_template.jinja"
    text = template.read_text()

    assert "<think>\\n" in text.rpartition("add_generation_prompt")[2]

    head, name, tail = text.rpartition("add_generation_prompt")
    template.write_text(head + name + tail.replace("<think>\\n' ", "' ", 1))
    with Served(folder) as served:
        yield served


# -- grammars --------------------------------------------------------------------------------------


def printed_grammar() -> str:
    """The grammar at the head of REPLY GRAMMAR; an indented line goes on with a rule."""
    source = Path(s.__file__).read_text()
    section = source.partition("\n# region REPLY GRAMMAR ")[2]
    lines = section.partition("%llguidance")[2].partition("\n#\n")[0].split("\n#     ")
    return f"%llguidance{'\n'.join(lines)}".replace("\n    ", " ")


def test_the_printed_grammar_is_that_of_a_forced_call(dense, compiled):
    parameters = {"properties": {"path": {"type": "string"}}, "required": ["path"]}
    tool = {"function": {"name": "ls", "parameters": parameters}}

    constraints(dense, tools=[tool], tool_choice="required")

    assert compiled == [printed_grammar()]


# -- JSON ------------------------------------------------------------------------------------------


def array_of(items, n):
    return {"type": "array", "items": items, "minItems": n, "maxItems": n + 2}


def object_of(fields):
    return {
        "type": "object",
        "properties": fields,
        "required": sorted(fields)[:2],
        "additionalProperties": False,
    }


texts = st.text('ab<>{}"\\é/', max_size=9)
tags = st.sampled_from(["<think>", "</think>", "<tool_call>", "<|im_end|>"])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-50, 50).map(
        lambda n: {"type": "integer", "minimum": n, "maximum": n + 300}
    ),
    st.integers(0, 6).map(
        lambda n: {"type": "string", "minLength": n, "maxLength": n + 5}
    ),
    st.lists(texts, min_size=1, max_size=3, unique=True).map(
        lambda values: {"enum": values}
    ),
    tags.map(lambda tag: {"const": f"a{tag}b"}),
)


def grow(schemas):
    names = st.sampled_from("abcd")
    fields = st.dictionaries(names, schemas, min_size=1, max_size=3)
    return st.one_of(
        st.builds(array_of, schemas, st.integers(0, 2)),
        st.builds(object_of, fields),
        st.lists(schemas, min_size=2, max_size=2).map(lambda both: {"anyOf": both}),
    )


@settings(max_examples=40 if nights.is_night else 4)
@given(
    st.recursive(leaves, grow, max_leaves=4),
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

    content = exchange.answer["content"]
    assert len(content) - len(content.lstrip()) <= 8

    jsonschema.validate(json.loads(content), schema)
    assert bool(exchange.answer.get("reasoning_content")) == thinks


@pytest.mark.parametrize(
    ("response_format", "accepted"),
    [
        ({"type": "json_object", "schema": {}}, ["[1]", "{}"]),
        (form({}), ["[1]", "{}"]),
        ({"type": "json_object"}, ["{}"]),
    ],
)
def test_json_is_demanded_and_an_object_where_no_schema_is_given(
    dense, response_format, accepted
):
    *_, constraint = constraints(dense, response_format=response_format)
    (matcher,) = constraint.args
    (end,) = dense.scribe.ids("</think>")

    for text in ("[1]", "{}", "hello"):
        ids = [end, *dense.scribe.ids(text)]
        is_accepted = matcher.deep_copy().validate_tokens(ids) == len(ids)
        assert is_accepted == (text in accepted)


def test_what_it_was_thinking_is_not_changed_by_what_must_follow(served):
    plain = served.ask(ASKED, tools=openai.omit)
    bound = served.ask(
        ASKED, tools=openai.omit, response_format=form(TITLE), max_tokens=LONG
    )

    assert plain.answer["reasoning_content"]
    assert bound.answer["reasoning_content"] == plain.answer["reasoning_content"]
    jsonschema.validate(json.loads(bound.answer["content"]), TITLE)


def test_a_warm_cache_says_what_a_cold_one_says_and_the_next_turn_is_cached(served):
    fields = {"tools": openai.omit, "response_format": form(TITLE), "max_tokens": LONG}
    served.forget()
    cold = served.ask(ASKED, **fields)
    warm = served.ask(ASKED, **fields)

    assert warm.said == cold.said
    assert warm.n_cached > cold.n_cached

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
    replies_alone = [served.ask(talks[i], **fields[i]).said for i in range(4)]
    served.forget()
    n_rows = []
    barrier = threading.Barrier(4)

    def ask(i):
        barrier.wait()
        exchange = served.ask(talks[i], **fields[i])
        n_rows.append(served.recorder.n_rows_most)
        return exchange.said

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(ask, range(4)))
    assert max(n_rows) > 1
    assert replies == replies_alone


@pytest.mark.parametrize("seed", by_day(1, of=6))
def test_with_tools_the_reply_is_json_or_calls(served, seed):
    (call,) = served.scribe.ids("<tool_call>")
    fields = {
        "temperature": 1,
        "seed": seed,
        "response_format": form(TITLE),
        "max_tokens": LONG,
    }
    messages = Talk(served, seed).messages
    calls = served.ask(messages, **fields)
    words = served.ask(messages, logit_bias={str(call): -100}, **fields)

    assert calls.answer["tool_calls"]
    assert calls.answer["content"] is None
    assert words.finish_reason == "stop"
    assert "tool_calls" not in words.answer

    jsonschema.validate(json.loads(words.answer["content"]), TITLE)


def test_a_call_that_is_required_wins_over_a_schema(served, caplog):
    caplog.set_level(logging.INFO, s.logger.name)
    bash = {"type": "function", "function": {"name": "bash"}}
    for choice in ("required", bash):
        exchange = served.ask(ASKED, tool_choice=choice, response_format=form(TITLE))
        calls = exchange.answer["tool_calls"]
        assert calls
        if choice is bash:
            assert calls[0]["function"]["name"] == "bash"
        assert exchange.finish_reason == "tool_calls"
        ended = f"{len(calls)} tool call{'s' if len(calls) > 1 else ''}"
        assert any(line.endswith(f", {ended}") for line in caplog.messages)


def test_nothing_but_json_comes_where_no_tool_may_be_called(dense):
    (call,) = dense.scribe.ids("<tool_call>")
    for choice, n_constraints in (("none", 2), ("auto", 1)):
        fields = {"tool_choice": choice, "response_format": form(TITLE)}
        found = constraints(dense, tools=TOOLS, enable_thinking=False, **fields)
        assert len(found) == n_constraints
        may_call = all(next(constraint()).flags[call] for constraint in found)
        assert may_call == (choice == "auto")


# By what llguidance says of them.
WRONG = {
    "Invalid type: objekt": {"type": "objekt"},
    "regex parse error: look-around": {"type": "string", "pattern": "(?=a)b"},
    "regex parse error: unclosed group": {"type": "string", "pattern": "x" * 999 + "("},
    'Unimplemented keys: ["not"]': {"not": {}},
    'Unimplemented keys: ["uniqueItems"]': {"type": "array", "uniqueItems": True},
    "Unknown format: zzz": {"type": "string", "format": "zzz"},
    "Pointer '/$defs/none' does not exist": {"$ref": "#/$defs/none"},
    "Resource 'https://example.org/s.json' is not": {
        "$ref": "https://example.org/s.json"
    },
    "Unsatisfiable schema: minimum": {"type": "integer", "minimum": 5, "maximum": 1},
    "float range": {"type": "number", "minimum": 1e308},
    "enum must be an array": {"enum": 3},
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_schema_that_cannot_be_compiled_is_refused_in_one_sentence(dense, reason):
    with pytest.raises(s.BadRequest) as refused:
        constraints(dense, response_format=form(WRONG[reason]))
    message = str(refused.value)
    assert refused.value.param == "response_format.json_schema.schema"
    assert f"schema: {reason}" in message or reason == "float range" in message
    assert len(message) < 400 and "\n" not in message
    assert "%json" not in message and "compile" not in message


NONSENSE = {"type": "objekt"}
WRONG_FORMAT = {"type": "json_schema", "schema": NONSENSE}
CHAT, MESSAGES = s.parse_chat_request, s.parse_anthropic_request


@pytest.mark.parametrize(
    ("parse", "fields", "path"),
    [
        (CHAT, {"response_format": form(NONSENSE)}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": WRONG_FORMAT}, "response_format.schema"),
        (CHAT, {"response_format": {**WRONG_FORMAT, "type": "json_object"}},
         "response_format.schema"),
        (MESSAGES, {"output_config": {"format": WRONG_FORMAT}}, "output_config.format.schema"),
        (MESSAGES, {"output_format": WRONG_FORMAT}, "output_format.schema"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_compiled_is_named_by_its_path_in_the_body(
    dense, parse, fields, path
):
    body = {"messages": [user("hi")], "max_tokens": 9, **fields}
    wanted = parse(body, dense.state.config, request_id="r", headers={})

    with pytest.raises(s.BadRequest, match="Invalid type: objekt") as refused:
        s.prepare_request(dense.state, wanted)

    assert refused.value.param == path
    assert str(refused.value).startswith(f"{path}: ")


def test_a_strict_tool_is_refused_in_the_same_words(dense):
    schema = {"type": "array", "uniqueItems": True}
    function = {"name": "f", "parameters": {"properties": {"x": schema}}}
    tools = [{"function": function, "strict": True}]

    with pytest.raises(s.BadRequest) as refused:
        constraints(dense, tools=tools, tool_choice="required")

    sentence = (
        'tools[0].function.parameters: strict: Unimplemented keys: ["uniqueItems"]'
    )
    assert str(refused.value) == sentence


def property_of(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}}


def test_a_schema_that_is_too_large_is_refused_before_it_is_compiled(dense, compiled):
    schema = property_of(enum=["value" * 40_000])
    function = {"name": "f", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    for fields, param in (
        ({"response_format": form(schema)}, "response_format.json_schema.schema"),
        ({"tools": tools}, "tools[0].function.parameters"),
    ):
        with pytest.raises(s.BadRequest, match="it has more than 200,000") as refused:
            constraints(dense, **fields)
        assert refused.value.param == param
    assert not compiled


def test_a_definition_that_is_named_often_is_not_written_out_often(dense, compiled):
    """Between tags each value has all definitions: 1,000 times 80,000 characters."""
    definitions = {"side": {"enum": ["up" * 40_000]}}
    side = {"type": "array", "items": {"$ref": "#/$defs/side"}}
    properties = {f"p{n}": side for n in range(1_000)}
    schema = {"properties": properties, "$defs": definitions, "type": "object"}
    function = {"name": "f", "parameters": schema, "strict": True}

    with pytest.raises(s.BadRequest, match="it has more than 200,000") as refused:
        constraints(
            dense,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )

    assert "other tools" not in str(refused.value)
    assert not compiled


def test_schemas_that_are_too_large_together_leave_a_forced_call_free(
    dense, compiled, monkeypatch
):
    monkeypatch.setattr(s, "MAX_GRAMMAR_CHARACTERS", 2_000)
    schema = property_of(enum=[f"value {n}" for n in range(60)])
    functions = [{"name": f"f{n}", "parameters": schema} for n in range(3)]
    tools = [{"type": "function", "function": function} for function in functions]
    constraints(dense, tools=tools, tool_choice="required")
    assert max(map(len, compiled)) < 1_000

    for tool, function in zip(tools, functions, strict=True):
        tool["function"] = {**function, "strict": True}
    with pytest.raises(s.BadRequest, match="all tools and schemas"):
        constraints(dense, tools=tools, tool_choice="required")


def test_only_tools_that_are_not_strict_give_way_to_one_that_is(
    dense, compiled, monkeypatch
):
    monkeypatch.setattr(s, "MAX_GRAMMAR_CHARACTERS", 1_500)
    schema = property_of(enum=[f"strict {n}" for n in range(20)])
    functions = [{"name": f"g{n}", "parameters": schema} for n in range(3)]
    functions[1]["strict"] = True
    tools = [{"type": "function", "function": function} for function in functions]

    constraints(dense, tools=tools, tool_choice="required")

    grammar = compiled[-1]
    assert "arguments0: <[*]>*" in grammar
    assert "arguments1: <[*]>*" not in grammar
    assert "strict 19" in grammar
    assert "arguments2: <[*]>*" in grammar


def test_compiled_schemas_are_bounded_in_bytes(dense):
    compiler = s.grammar_compiler(dense.state.engine.model.tokenizer)
    for n in range(20):
        schema = json.dumps({"enum": [f"{n}" * 20_000]})
        compiler.compile(f"start: %json {schema}", tenant="")
        assert compiler.memo.nbytes <= compiler.MEMO_BYTES
    assert len(compiler.memo.entries) < 20


def test_too_many_tools_for_a_forced_call_are_no_fault_of_a_schema(dense, monkeypatch):
    monkeypatch.setattr(s, "MAX_GRAMMAR_CHARACTERS", 500)
    tools = [{"type": "function", "function": {"name": f"tool{n}"}} for n in range(40)]
    with pytest.raises(s.BadRequest, match="too many") as refused:
        constraints(dense, tools=tools, tool_choice="required")
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    "reason", ['Unimplemented keys: ["not"]', "Unknown format: zzz"]
)
def test_a_schema_may_ask_to_be_enforced_as_far_as_it_can_be(dense, reason):
    """pydantic's `Path` is a format that nothing enforces."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3, **WRONG[reason]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    with pytest.raises(s.BadRequest):
        constraints(dense, response_format=form(schema))

    odd_options = {"lenient": 1, "whitespace_pattern": "x"}
    for options in ({"lenient": False}, odd_options, "lenient", None):
        strict = {**schema, "x-guidance": options}
        with pytest.raises(s.BadRequest):
            constraints(dense, response_format=form(strict))

    lenient = {**schema, "x-guidance": {"lenient": True}}
    assert constraints(dense, response_format=form(lenient))


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The grammars that were compiled."""
    noted: list[str] = []
    compile_grammar = llguidance.LLMatcher

    def note(vocabulary, grammar, **options):
        noted.append(grammar)
        return compile_grammar(vocabulary, grammar, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", note)
    return noted


def test_a_schema_is_compiled_once_and_every_row_has_its_own_matcher(dense, compiled):
    fields = {"tools": openai.omit, "response_format": form({"enum": ["a", "b"]})}
    first = dense.ask(ASKED, **fields)
    second = dense.ask(ASKED, **fields)

    assert first.said == second.said
    assert len(compiled) == 1
    assert s.grammar_compiler.cache_info().currsize == 1


# -- thinking --------------------------------------------------------------------------------------


def n_thinking(exchange):
    return exchange.usage["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [3, at_night(1), at_night(6)])
@pytest.mark.parametrize("has_schema", [True, False])
def test_the_thinking_budget_is_kept_to_the_token(served, n, has_schema):
    fields = {"tools": openai.omit, "max_tokens": LONG}
    if has_schema:
        fields["response_format"] = form(TITLE)
    free = served.ask(ASKED, **fields)
    budget = {"thinking": {"type": "enabled", "budget_tokens": n}}
    limited = served.ask(ASKED, extra_body=budget, **fields)

    assert n_thinking(free) > n + 1
    assert n_thinking(limited) == n + 1  # its end tag is counted
    assert free.answer["reasoning_content"].startswith(
        limited.answer["reasoning_content"]
    )

    if has_schema:
        jsonschema.validate(json.loads(limited.answer["content"]), TITLE)


def request(served, **fields):
    body = {"messages": ASKED, **fields}
    config = served.state.config
    return s.parse_chat_request(body, config, request_id="r", headers={})


def constraints(served, **fields):
    prepared = s.prepare_request(served.state, request(served, **fields))
    return prepared.engine_request.constraints


def test_nothing_is_bent_where_nothing_is_asked(dense):
    budget = {"type": "enabled", "budget_tokens": 100}
    constraints_of = partial(constraints, dense, tools=TOOLS)
    assert constraints_of() == ()
    assert constraints_of(response_format={"type": "text"}) == ()
    assert constraints_of(thinking=budget, max_tokens=100) == ()
    assert constraints_of(thinking={**budget, "type": "disabled"}, max_tokens=500) == ()
    assert len(constraints_of(thinking=budget, max_tokens=101)) == 1
    assert len(constraints_of(tool_choice="none")) == len(constraints(dense)) == 1


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"response_format": form(TITLE)}]
)
def test_a_thought_that_something_must_follow_holds_no_call(dense, fields):
    (call,) = dense.scribe.ids("<tool_call>")
    (end,) = dense.scribe.ids("</think>")
    (constraint,) = constraints(dense, tools=TOOLS, **fields)
    steps = constraint()
    allowed = [next(steps)]
    allowed += [steps.send([token]) for token in dense.scribe.ids("hm, so")]

    assert all(tokens.flags[end] for tokens in allowed)
    assert not any(tokens.flags[call] for tokens in allowed)


@pytest.mark.parametrize("seeds", [range(1), at_night(range(1, 5))], ids=str)
@pytest.mark.parametrize("thinks", [True, False])
def test_a_reply_may_open_its_own_thinking_before_json_and_calls(
    self_opening, thinks, seeds
):
    (start,) = self_opening.scribe.ids("<think>")
    for seed in seeds:
        fields = {
            "temperature": 1,
            "seed": seed,
            "max_tokens": LONG,
            "logit_bias": {str(start): 5 if thinks else -100},
        }

        json_fields = {"tools": openai.omit, "response_format": form(TITLE)}
        words = self_opening.ask(ASKED, **json_fields, **fields)
        assert bool(words.answer.get("reasoning_content")) == thinks
        jsonschema.validate(json.loads(words.answer["content"]), TITLE)

        budget = {"thinking": {"type": "enabled", "budget_tokens": 4}}
        fields["max_tokens"] = 100  # after its call, the model says what it likes
        calls = self_opening.ask(
            ASKED, tool_choice="required", extra_body=budget, **fields
        )
        assert calls.answer["tool_calls"]
        assert n_thinking(calls) == (5 if thinks else 0)


# -- constraints, alone ----------------------------------------------------------------------------


def allowed_ids(constraint, prompt, reply, *, n_vocab=8):
    """The ids that may come after each token of a reply that is forced."""
    processor = s._ConstraintProcessor(constraint)
    allowed = []
    for n in range(len(reply) + 1):
        tokens = mx.array([*prompt, *reply[:n]])
        logits = np.array(processor(tokens, mx.zeros((1, n_vocab))))[0]
        allowed.append(set(np.flatnonzero(np.isfinite(logits)).tolist()))
    return allowed


EVERY = set(range(8))
replies = st.lists(st.integers(0, 7), max_size=12)


@given(replies, st.sets(st.integers(0, 7), min_size=1, max_size=7))
def test_what_is_avoided_never_comes(reply, ids):
    allowed = allowed_ids(lambda: s.forbid_tokens(sorted(ids)), [1, 2], reply)
    assert allowed == [EVERY - ids] * (len(reply) + 1)


@given(replies, st.integers(1, 6), st.booleans())
def test_thinking_ends_after_its_budget_and_only_if_it_thinks(reply, n, opens):
    start = [6] if opens else []
    end = 7
    call = 5

    def constraint():
        return s.limit_thinking(n, start=start, ends=[end, call])

    allowed = allowed_ids(constraint, [7, 6], reply)
    place = len(start) + n
    # into a call no end of a thought is written
    has_ended = end in reply[:place] or call in reply[:place]
    has_begun = not opens or 6 in reply[:2]
    expected = [EVERY] * len(allowed)
    if len(reply) >= place and has_begun and not has_ended:
        expected[place] = {end}

    assert allowed == expected


def test_a_token_before_the_tag_that_opens_thinking_counts():
    """GLM writes a line break there."""

    def constraint():
        return s.limit_thinking(3, start=[6], ends=[7])

    allowed = allowed_ids(constraint, [4], [1, 6, 3, 3, 7])
    assert allowed == [EVERY, EVERY, EVERY, EVERY, {7}, EVERY]
    assert allowed_ids(constraint, [4], [1, 3, 6, 3, 3]) == [EVERY] * 6


def test_white_space_keeps_no_model_from_thinking_before_json(self_opening):
    """GLM begins with a line break, and thinks after it."""
    *_, constraint = constraints(self_opening, response_format=form(TITLE))
    flags = next(constraint()).flags
    (start,) = self_opening.scribe.ids("<think>")
    (line_break,) = self_opening.scribe.ids("\n")

    assert flags[start]
    assert not flags[line_break]


@given(st.sets(st.integers(0, 12), min_size=1))
def test_an_id_that_the_model_does_not_know_needs_no_mask(ids):
    (allowed,) = allowed_ids(lambda: s.forbid_tokens(sorted(ids)), [1], [])
    assert allowed == EVERY - ids

    def constraint():
        return s.limit_thinking(1, start=[], ends=sorted(ids))

    assert allowed_ids(constraint, [1], [20])[-1] == {min(ids)} & EVERY


@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), max_size=12),
)
@example([1, 1, 2], [1, 1, 1, 2])
def test_a_call_is_opened_wherever_its_tokens_stand(opening, reply):
    consumed: list[list[int]] = []
    grammar = SimpleNamespace(
        deep_copy=lambda: grammar,
        consume_tokens=consumed.append,
        compute_logit_bias=lambda: bytes(8),
        is_error=lambda: False,
        is_stopped=lambda: False,
    )
    steps = s.watch_for_call([opening], grammar)
    next(steps)
    for token_id in reply:
        steps.send([token_id])

    text = "".join(map(str, reply))
    assert bool(consumed) == ("".join(map(str, opening)) in text)


def test_a_token_that_a_grammar_refuses_ends_it_and_raises_nothing(dense):
    """Of NaN any token may be taken: that row fails alone, and not the batch that it is in."""
    *_, constraint = constraints(
        dense, response_format=form(TITLE), enable_thinking=False
    )
    steps = constraint()
    refused_ids = np.flatnonzero(~next(steps).flags)
    for _ in range(2):
        allowed = steps.send([int(refused_ids[0])])
        assert allowed.n_steps == sys.maxsize  # nothing but the end may come


def test_a_model_without_a_call_format_cannot_be_made_to_call(dense):
    wanted = request(dense, tools=TOOLS, tool_choice="required")
    with pytest.raises(s.BadRequest) as refused:
        s._find_call_forms(wanted, None, shown_tools=())
    assert refused.value.param == "tool_choice"
