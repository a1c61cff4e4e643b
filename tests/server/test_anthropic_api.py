"""MESSAGES: Anthropic's bodies mean the same chat, its events are those its SDK puts together."""

import copy
import itertools
import json
import threading
from functools import cache

import httpx
import nights
import pytest
import start_llm as s
from anthropic_client import (
    GREEDY,
    OFFERED,
    SYSTEM,
    as_chat,
    ask,
    react,
    reply,
    text,
    total,
    user,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import at_night
from openai import OpenAI
from pydantic import TypeAdapter
from server_fixture import MAX_WAIT_SECONDS, Served, wait_until_idle
from start_llm import (
    AnthropicFormatter,
    BadRequest,
    ReplyEnd,
    Usage,
    parse_anthropic_request,
)
from tiny_models import DENSE, HYBRID, TOOLS

CONFIG = s.Config()
USAGE = Usage(
    prompt_tokens=10, cached_tokens=8, completion_tokens=5, reasoning_tokens=2
)
READ = {"name": "read", "description": "reads", "input_schema": {"type": "object"}}


def parsed(config=CONFIG, headers=None, **fields):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    original = copy.deepcopy(body)
    request = parse_anthropic_request(
        body, config, request_id="r1", headers=headers or {}
    )
    assert body == original, "the body was changed"
    return request


def chat_of(*messages, **fields):
    """(role, text, rest) of each chat message."""
    found = []
    for message in parsed(messages=list(messages), **fields).messages:
        content = message["content"]
        text = content
        if not isinstance(content, str):
            text = [part["text"] for part in content]
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        found.append((message["role"], text, rest))

    return found


def refused(**fields):
    with pytest.raises(BadRequest) as refusal:
        parsed(**fields)
    return refusal.value


# -- what a body means -----------------------------------------------------------------------------


def test_a_string_and_one_text_block_are_the_same():
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = parsed(system="sys", messages=[{"role": "user", "content": "hi"}])
    blocks = parsed(
        system=[{**text("sys"), **mark}], messages=[user({**text("hi"), **mark})]
    )
    canon = s.Canonicalizer(
        CONFIG, part_separator="\n", thinking_tags=("<think>", "</think>")
    )
    plain_turns = s.canonicalize_messages(plain.messages, canon)
    block_turns = s.canonicalize_messages(blocks.messages, canon)

    assert [t.digest for t in plain_turns] == [t.digest for t in block_turns]


def test_a_tool_conversation_is_the_same_chat():
    arguments = {"path": "a", "n": 1}
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": arguments}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
    chat = chat_of(
        user(text("look")),
        reply(thought, text("I'll "), text("look."), use),
        user(result, {**result, "content": [text("a"), text("b")]}, text("and?")),
        {"role": "system", "content": "be brief"},
        tools=[READ],
    )
    call = {"id": "t1", "function": {"name": "read", "arguments": arguments}}
    fields = {"reasoning_content": "hm", "thought_id": "x", "tool_calls": [call]}

    assert chat == [
        ("user", ["look"], {}),
        ("assistant", "I'll look.", fields),
        ("tool", ["found"], {"tool_call_id": "t1"}),
        ("tool", ["a", "b"], {"tool_call_id": "t1"}),
        ("user", ["and?"], {}),
        ("system", ["be brief"], {}),
    ]


def test_a_document_nobody_can_read_is_told_and_costs_no_session():
    """Claude Code sends a PDF that it read as a document in a tool result, in each request."""
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    note = {"type": "text", "media_type": "text/plain", "data": "signed"}
    readable = {"type": "document", "source": note}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    unread = {"type": "document", "source": pdf}
    ((_, found, _), (_, shown, _)) = chat_of(
        user({**result, "content": [text("PDF file read: a.pdf"), unread]}, readable)
    )

    assert found[0] == "PDF file read: a.pdf"
    assert "cannot be read" in found[1]
    assert shown == ["signed"]


def test_documents_and_search_results_are_text_with_their_titles():
    titled = {"title": "Report", "context": "of 2026"}
    note = {"type": "text", "media_type": "text/plain", "data": "signed"}
    parts = {"type": "content", "content": [text("one"), text("two")]}
    result = {"type": "search_result", "source": "https://a.example", "title": "A"}
    ((_, shown, _),) = chat_of(
        user(
            {"type": "document", "source": note, **titled},
            {"type": "document", "source": parts, **titled},
            {"type": "document", "source": {"type": "content", "content": "three"}},
            {**result, "content": [text("found")]},
        )
    )
    heading = "title: Report\ncontext: of 2026"
    found = ["title: A\nsource: https://a.example", "found"]

    assert shown == [
        f"{heading}\n\nsigned", heading, "one", "two", "three", *found
    ]  # fmt: skip


def test_order_and_emptiness_survive():
    empty = {"type": "tool_result", "tool_use_id": "t"}
    assert chat_of(user(text("a"), empty, text("b")), user(text("c"))) == [
        ("user", ["a"], {}),
        ("tool", [""], {"tool_call_id": "t"}),
        ("user", ["b"], {}),
        ("user", ["c"], {}),
    ]
    assert chat_of({"role": "user", "content": ""}, reply()) == [
        ("user", [""], {}),
        ("assistant", "", {}),
    ]


IMAGE = {"type": "base64", "media_type": "image/png", "data": "errorAAA"}


@pytest.mark.parametrize(
    ("content", "first_texts"),
    [
        ("no such file", [text("Error:"), text("no such file")]),
        ("<tool_use_error>gone</tool_use_error>", [text("<tool_use_error>gone</tool_use_error>")]),
        ([], [text("Error:")]),
        ([{"type": "image", "source": IMAGE}], [text("Error:")]),  # its data is no sentence
    ],
)  # fmt: skip
def test_the_model_is_told_that_a_tool_failed(content, first_texts):
    failed = {"type": "tool_result", "tool_use_id": "t", "is_error": True}
    (message,) = parsed(messages=[user({**failed, "content": content})]).messages
    assert message["content"][: len(first_texts)] == first_texts


def test_images_are_a_chats_images_and_know_their_place():
    def parts(source, *, wrapped=False):
        block = {"type": "image", "source": source}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        (message,) = parsed(messages=[user(result if wrapped else block)]).messages
        return message["content"]

    sent = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    (part,) = parts(sent)
    assert part["image_url"].endswith("base64,AAAA")
    assert part["request_field"] == "messages[0].content[0]"

    (part,) = parts(sent, wrapped=True)
    assert part["request_field"] == "messages[0].content[0].content[0]"

    (part,) = parts({"type": "url", "url": "https://example.org/cat.png"})
    assert part["image_url"] == "https://example.org/cat.png"

    with pytest.raises(BadRequest) as refused:
        parts({"type": "file", "file_id": "f"})
    assert refused.value.param == "messages[0].content[0]"


def test_deferred_tools_stand_where_they_are_referenced_and_not_in_the_head():
    later = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    found = [
        {"type": "tool_reference", "tool_name": name} for name in ("later", "lost")
    ]
    result = user({"type": "tool_result", "tool_use_id": "t", "content": found})
    request = parsed(tools=[later, READ], messages=[result])

    assert [tool["function"]["name"] for tool in request.tools] == ["read"]
    assert [tool["function"]["name"] for tool in request.deferred_tools] == ["later"]

    texts = [part["text"] for part in request.messages[0]["content"]]
    tool = json.loads(texts[0].removeprefix("<tool>").removesuffix("</tool>"))
    assert tool == {"name": "later", "parameters": {"type": "object"}}
    assert "lost" in texts[1]
    assert parsed(tools=[READ], messages=[result]).tools == request.tools


@pytest.mark.parametrize(
    ("choice", "mode", "name", "parallel"),
    [
        ({"type": "auto"}, "auto", None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", None, False),
        ({"type": "tool", "name": "read"}, "named", "read", True),
        ({"type": "none"}, "none", None, True),
    ],
)
def test_tool_choice(choice, mode, name, parallel):
    request = parsed(tools=[READ], tool_choice=choice)
    assert (request.tool_choice.mode, request.tool_choice.name) == (mode, name)
    assert request.parallel_tool_calls is parallel


def test_server_tools_are_left_out_and_named_when_demanded():
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    assert parsed(tools=[search, READ]).tools == parsed(tools=[READ]).tools
    error = refused(tools=[search], tool_choice={"type": "tool", "name": "web_search"})
    assert "web_search" in str(error)


@pytest.mark.parametrize(
    ("thinking", "effort", "thinks"),
    [
        (None, "", False),
        ({"type": "disabled"}, "high", False),
        ({"type": "adaptive", "display": "omitted"}, "", True),
        ({"type": "enabled", "budget_tokens": 2000}, "", True),
        ({"type": "between_tools"}, "", True),
        ({"type": "adaptive"}, "low", True),
    ],
)
def test_thinking(thinking, effort, thinks):
    request = parsed(thinking=thinking, output_config={"effort": effort or None})
    assert (request.thinking, request.effort) == (thinks, effort if thinks else "")


def test_fields_with_other_names_and_those_that_only_anthropic_knows():
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    request = parsed(
        stop_sequences=["END"],
        top_k=3,
        temperature=0.5,
        metadata={"user_id": '{"device_id":"d","session_id":"s1"}'},
        context_management={"edits": [edit]},
        betas=["x"],
        service_tier="auto",
    )

    sampling = request.sampling
    assert (request.stop, sampling.top_k, sampling.temperature) == (("END",), 3, 0.5)
    assert (request.session.session_id, request.max_tokens) == ("s1", 9)

    agent = {"X-Claude-Code-Session-Id": "s1", "x-claude-code-agent-id": "a"}
    assert parsed(headers=agent).session.parent_session_id == "s1"


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({"stream": True}, "stream"),
        ({"output_config": {"format": {"type": "json_object"}}}, "format"),
        ({"output_format": {"type": "json_object"}}, "format"),
        ({"tool_choice": {"type": "any"}, "tools": [READ]}, "call"),
        ({"tool_choice": {"type": "tool", "name": "read"}, "tools": [READ]}, "call"),
    ],
)
def test_nothing_is_asked_of_a_reply_of_no_tokens(fields, wish):
    assert parsed(**fields).max_tokens == 9
    error = refused(max_tokens=0, **fields)
    assert error.param == "max_tokens"
    assert str(error).endswith(f"there can be no {wish}")


def test_a_reply_of_no_tokens_may_be_asked_for_in_any_other_way():
    thinking = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    for fields in (
        {},
        thinking,
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        {"tools": [READ], "tool_choice": {"type": "auto"}, "stream": False},
    ):
        assert parsed(max_tokens=0, **fields).max_tokens == 0


def test_with_anthropics_own_search_deferred_tools_are_there_at_once():
    later = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}
    search = {
        "type": "tool_search_tool_regex_20251119",
        "name": "tool_search_tool_regex",
    }
    request = parsed(tools=[search, later])
    assert [tool["function"]["name"] for tool in request.tools] == ["later"]
    assert not request.deferred_tools


def test_odd_numbers_and_characters_in_a_call_end_no_answer():
    for arguments in (
        '{"a": "\\ud83d"}',
        '{"a": ["\ud83d"]}',
        '{"a": ' + "9" * 5000 + "}",
        "[" * 2000 + "]" * 2000,
    ):
        shape = AnthropicFormatter("r1", "m")
        opened = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        shape.delta_events({"tool_calls": [opened]})
        body = shape.full_body({}, ReplyEnd("tool_calls", USAGE))
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("cut", ["{", '{"text": "a', '{"text": "a"', '{"n": 1, "te'])
def test_a_whole_reply_shows_a_cut_call_as_the_text_that_a_stream_has(cut):
    """An object, even an empty one, looks like a call that may run."""
    opened = {"id": "c", "function": {"name": "f", "arguments": ""}}
    deltas = [opened, *({"function": {"arguments": part}} for part in cut)]
    streamed, whole = AnthropicFormatter("r1", "m"), AnthropicFormatter("r1", "m")

    events = [
        event
        for delta in deltas
        for event in streamed.delta_events({"tool_calls": [delta]})
    ]
    for delta in deltas:
        whole.delta_events({"tool_calls": [delta]})
    body = whole.full_body({}, ReplyEnd("length", USAGE))

    (block,) = body["content"]
    sent = [event["delta"] for event in events[1:]]
    assert block["input"] == "".join(delta["partial_json"] for delta in sent) == cut
    assert (block["type"], block["name"]) == ("tool_use", "f")
    assert body["stop_reason"] == "max_tokens"


# -- what the events build -------------------------------------------------------------------------


@cache
def type_of_events():
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def through_sdk(events):
    """The message that the official SDK makes of the events."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot = None
    buffers = {}
    for event in events:
        parsed = type_of_events().validate_json(json.dumps(event))
        assert parsed.model_dump(exclude_unset=True) == event, (
            "the SDK reads something else"
        )
        snapshot = accumulate_event(
            event=parsed, current_snapshot=snapshot, json_bufs=buffers
        )

    return snapshot


def deltas_of(parts):
    """Chat deltas, and the content blocks they should become."""
    deltas = []
    blocks = []
    for number, (kind, pieces) in enumerate(parts):
        if kind == "call":
            arguments = json.dumps({"text": "".join(pieces)})
            opened = {"id": f"c{number}", "function": {"name": "f", "arguments": ""}}
            middle = len(arguments) // 2
            halves = [
                {"function": {"arguments": half}}
                for half in (arguments[:middle], arguments[middle:])
            ]
            deltas += [{"tool_calls": [call]} for call in (opened, *halves)]
            blocks.append(("tool_use", json.loads(arguments)))
            continue
        name = {"reasoning": "thinking", "content": "text"}[kind]
        field = {"reasoning": "reasoning_content", "content": "content"}[kind]
        deltas += [{field: piece} for piece in pieces]
        value = "".join(pieces)
        if blocks and blocks[-1][0] == name:
            value = blocks.pop()[1] + value
        blocks.append((name, value))

    return deltas, blocks


PARTS = st.lists(
    st.tuples(
        st.sampled_from(["reasoning", "content", "call"]),
        st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    ),
    max_size=5,
)


@settings(max_examples=100 if nights.is_night else 8)
@given(PARTS)
def test_any_reply_streams_and_stands_as_the_same_blocks(parts):
    from anthropic.types import Message

    deltas, blocks = deltas_of(parts)
    ending = ReplyEnd("stop", USAGE)
    streamed = AnthropicFormatter("r1", "m")
    plain = AnthropicFormatter("r1", "m")
    events = [*streamed.start_events(USAGE)]
    for delta in deltas:
        events += streamed.delta_events(delta)
        plain.delta_events(delta)
    message = through_sdk([*events, *streamed.end_events(ending)])
    body = plain.full_body({}, ending)

    assert Message.model_validate(body).model_dump() == message.model_dump()

    found = [
        (b.type, b.input if b.type == "tool_use" else getattr(b, b.type))
        for b in message.content
    ]

    assert found == blocks

    for block in message.content:
        if block.type == "thinking":
            assert block.signature == s.thinking_signature(block.thinking)


# -- the whole server ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[HYBRID, at_night(DENSE)])
def served(request, models):
    with Served(models(request.param), max_kv_size=4096) as served:
        yield served


@pytest.fixture
def sdk(served):
    import anthropic  # three seconds, paid by who needs it

    served.forget()
    port = served.state.config.mlx_port
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0
    ) as sdk:
        yield sdk


def test_a_tool_conversation_prefills_only_what_is_new(served, sdk):
    messages = [user(text("What is in the readme?"))]
    n_before = 0
    kinds = set()
    for n in range(6):
        counted = sdk.messages.count_tokens(
            model="any",
            system=SYSTEM,
            tools=OFFERED,
            messages=messages,
            thinking={"type": "adaptive"},
        )
        message = ask(sdk, messages, stream=bool(n % 2))
        assert counted.input_tokens == total(message.usage)
        assert message.usage.cache_read_input_tokens >= n_before - 1
        n_before = total(message.usage) + message.usage.output_tokens - 1
        kinds |= {block.type for block in message.content}
        messages += react(message, n)

    assert kinds == {"thinking", "text", "tool_use"}
    assert served.state.metrics.snapshot()["ledger_seam_fallback"] == 0


def test_both_apis_say_the_same_and_share_one_cache(served, sdk):
    """Each step is asked by both: whoever comes second has the whole prompt in the cache."""
    port = served.state.config.mlx_port
    chat = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    messages = [user(text("What is in the readme?"))]
    history = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is in the readme?"},
    ]
    for n in range(4):
        message = ask(sdk, messages, stream=bool(n % 2))
        completion = chat.chat.completions.create(
            model="any", messages=history, tools=TOOLS, temperature=0, max_tokens=300
        )
        chat_message = completion.choices[0].message
        calls = chat_message.tool_calls or []
        functions = [call.function for call in calls]
        assert as_chat(message) == (
            getattr(chat_message, "reasoning_content", None) or "",
            chat_message.content or "",
            [(f.name, json.loads(f.arguments)) for f in functions],
        )
        assert total(message.usage) == completion.usage.prompt_tokens
        n_cached = completion.usage.prompt_tokens_details.cached_tokens
        # hybrid: from the last checkpoint, a generation prompt before the end
        assert n_cached >= completion.usage.prompt_tokens - 8, (
            "the second one prefilled something"
        )
        messages += react(message, n)
        history.append(chat_message.model_dump(exclude_none=True))
        # Mistral's templates refuse all others
        assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"result {n} of {i}"}
            for i, call in enumerate(calls)
        ]
        history += results or [{"role": "user", "content": f"and number {n}?"}]

    chat.close()


def test_a_reply_tells_what_changed_since_the_request_of_an_earlier_one(served, sdk):
    """As Anthropic's SDK reads it; the tokens are those of the prompt that differ."""
    first = [user(text("What is in the readme?"))]

    def told(messages, previous, *, stream, **fields):
        fields["diagnostics"] = {"previous_message_id": previous}
        message = ask(sdk, messages, stream=stream, **fields)
        told = message.diagnostics
        return message, told and told.cache_miss_reason

    other_tools = [{**OFFERED[0], "name": "look"}]
    for stream in (True,) if not nights.is_night else (False, True):
        message, reason = told(first, None, stream=stream)
        assert reason is None, "there is no earlier one"
        later = [*first, *react(message, 0)]

        previous = message.id
        for fields, kind in (
            ({"system": f"{SYSTEM} Be brief."}, "system_changed"),
            ({"tools": other_tools}, "tools_changed"),
        ):
            message, reason = told(first, previous, stream=stream, **fields)
            assert reason.type == kind
            assert 0 < reason.cache_missed_input_tokens < total(message.usage)
            served.forget()
            previous = told(first, None, stream=stream)[0].id

        _, reason = told(later, previous, stream=stream)
        assert reason is None, "messages were only appended"

        message, _ = told(first, None, stream=stream)
        edited = [user(text("What is in the licence?")), *later[1:]]
        _, reason = told(edited, message.id, stream=stream)
        assert reason.type == "messages_changed"
        assert 0 < reason.cache_missed_input_tokens < 20

        _, reason = told(first, "msg_of_nobody", stream=stream)
        assert reason.type == "previous_message_not_found"


def test_stripped_thinking_is_found_by_its_signature(served, sdk):
    """The reply is changed beyond recognition, but its signature came back."""
    messages = [user(text("What is in the readme?"))]
    message = ask(sdk, messages, stream=True)
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    thought = blocks[0]["thinking"]
    blocks[0]["thinking"] = ""
    changed = [blocks[0], text("Something else entirely.")]
    body = {
        "max_tokens": 1,
        "messages": [*messages, reply(*changed), user(text("go on"))],
        "model": "any",
        "system": SYSTEM,
        "tools": OFFERED,
        "thinking": {"type": "adaptive"},
    }
    request = parse_anthropic_request(
        body, served.state.config, request_id="r", headers={}
    )
    plan = s.plan_request(served.state, request).plan
    prompt = served.scribe.text(plan.rendered.ids.tolist())

    assert thought in prompt
    assert "Something else entirely." in prompt


def test_max_tokens_and_stop_sequences_have_their_reasons(sdk):
    fields = {"tools": [], "thinking": {"type": "disabled"}}
    full = ask(sdk, [user(text("Tell me."))], stream=False, **fields)
    assert full.stop_reason == "end_turn"
    words = full.content[0].text
    stop = words[len(words) // 2 :][:3]
    cut = ask(
        sdk, [user(text("Tell me."))], stream=True, stop_sequences=[stop], **fields
    )

    assert cut.stop_reason == "stop_sequence"
    assert cut.stop_sequence == stop
    assert cut.content[0].text == words[: words.index(stop)]

    short = ask(sdk, [user(text("Tell me."))], stream=False, max_tokens=2, **fields)
    assert short.stop_reason == "max_tokens"
    assert short.usage.output_tokens == 2


@pytest.mark.parametrize("thinking", ["adaptive", at_night("disabled")])
def test_max_tokens_0_reads_the_prompt_into_the_cache_and_says_nothing(
    served, sdk, thinking
):
    import anthropic

    question = {"messages": [user(text("Warm me up."))], "thinking": {"type": thinking}}
    ask(sdk, stream=False, **question)
    repeated = ask(sdk, stream=False, **question)
    n_warm = repeated.usage.cache_read_input_tokens  # models with state: a few are left
    served.forget()
    recorded = served.state.stores.ledger.snapshot()

    warm_up = ask(sdk, stream=False, max_tokens=0, **question)

    assert warm_up.content == []
    assert (warm_up.stop_reason, warm_up.usage.output_tokens) == ("max_tokens", 0)
    assert warm_up.usage.cache_creation_input_tokens == total(warm_up.usage) - 1
    assert served.state.stores.ledger.snapshot() == recorded
    reply = ask(sdk, stream=False, **question)
    assert reply.content
    assert as_chat(reply) == as_chat(repeated)
    assert reply.usage.cache_read_input_tokens == n_warm > 0
    again = ask(sdk, stream=False, max_tokens=0, **question)
    assert again.usage.cache_read_input_tokens == n_warm
    with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: .* stream"):
        ask(sdk, stream=True, max_tokens=0, **question)


def test_output_config_binds_the_answer(sdk):
    """As a client asks for a title: no tools, no thinking, a schema."""
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 30},
            "done": {"type": "boolean"},
        },
        "required": ["title", "done"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    fields = {"tools": [], "thinking": {"type": "disabled"}, "output_config": wanted}
    for stream in (True, False):
        message = ask(sdk, [user(text("Name this talk."))], stream=stream, **fields)
        title = json.loads(message.content[0].text)
        assert set(title) == {"title", "done"}
        assert isinstance(title["done"], bool)


def test_errors_have_anthropics_shape_before_and_after_the_headers(served, sdk):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as refusal:
        ask(sdk, [user({"type": "hologram"})], stream=True)
    assert refusal.value.body["error"]["type"] == "invalid_request_error"

    # in the words that agents look for
    words = r"prompt is too long: \d+ tokens > \d+ maximum"
    with pytest.raises(anthropic.BadRequestError, match=words):
        ask(sdk, [user(text("word " * 6_000))], stream=False)

    with pytest.raises(anthropic.NotFoundError):
        sdk.get("/v1/messages/nothing", cast_to=httpx.Response)
    # a prefill is not continued
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        ask(sdk, [user(text("JSON, please")), reply(text("{"))], stream=True)

    def fail(_fed):
        raise RuntimeError("planted")

    with served.holding(fail), pytest.raises(anthropic.APIStatusError) as broken:
        ask(sdk, [user(text("fail"))], stream=True)
    assert broken.value.body["error"]["type"] == "api_error"
    assert "planted" not in str(broken.value)


def partial_arguments(stream):
    """Of all calls in a stream of events."""
    lines = [line for line in stream.splitlines() if "data: " in line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    deltas = [event["delta"] for event in events if "delta" in event]
    return "".join(delta.get("partial_json", "") for delta in deltas)


def test_a_call_that_was_cut_stays_open_for_a_client_that_runs_what_is_valid(
    served, sdk
):
    """Claude Code does not look at the stop reason (L-86)."""
    port = served.state.config.mlx_port
    for n in range(12):  # until the model ends its call by itself
        words = "What is in the readme?" + " Please." * n
        question = {"messages": [user(text(words))], "tool_choice": {"type": "any"}}
        full = ask(sdk, stream=False, **question)
        if full.stop_reason == "tool_use":
            break
    assert full.stop_reason == "tool_use"
    n_out = full.usage.output_tokens

    n_open = 0
    for n in range(n_out - 6, n_out - 1, 2):
        body = {**GREEDY, **question, "system": SYSTEM, "tools": OFFERED}
        body |= {"max_tokens": n, "stream": True, "temperature": 0}
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/messages?beta=true", json=body, timeout=60
        )
        assert '"stop_reason":"max_tokens"' in answer.text.replace(" ", "")
        arguments = partial_arguments(answer.text)
        if arguments:
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
            n_open += 1

    assert n_open
    cut = ask(sdk, stream=False, **{**question, "max_tokens": n_out - 4})
    assert cut.stop_reason == "max_tokens"


def test_pings_come_while_it_waits_and_a_client_that_leaves_ends_it(served):
    url = f"http://127.0.0.1:{served.state.config.mlx_port}/v1/messages?beta=true"
    gate = threading.Event()
    body = {"stream": True, "messages": [user(text("wait"))], **GREEDY}
    config = served.state.config.model_copy(update={"keepalive_seconds": 0.3})
    object.__setattr__(served.state, "config", config)
    try:
        with (
            served.holding(lambda _fed: gate.wait(MAX_WAIT_SECONDS)),
            httpx.stream("POST", url, json=body) as answer,
        ):
            names = (line for line in answer.iter_lines() if line.startswith("event:"))
            first_names = set(itertools.islice(names, 3))
            assert first_names <= {"event: ping", "event: message_start"}
            assert "event: ping" in first_names
    finally:
        gate.set()
        config = config.model_copy(update={"keepalive_seconds": 10.0})
        object.__setattr__(served.state, "config", config)

    wait_until_idle(served.state.engine)
