"""WIRE: what a body may say, what it means, how a fault is named, what an answer looks like."""

import copy
import itertools
import json
import re

import pytest
import start_llm as s
from hypothesis import example, given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from pydantic import ValidationError
from refusals import CONVERSATION, REFUSALS, SPECIAL, WRONG, planted, tool

CONFIG = s.Config()
LONE = re.compile("[\ud800-\udfff]")


def chat(headers=None, config=CONFIG, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return s.parse_chat_request(body, config, request_id="r1", headers=headers or {})


def completion(**fields):
    return s.parse_completion_request(fields, CONFIG, request_id="r1", headers={})


def messages(**fields):
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    parse = s.parse_anthropic_request
    return parse(body, CONFIG, request_id="r1", headers={})


def whole_chat(**fields):
    return chat(
        messages=copy.deepcopy(CONVERSATION), tools=[tool("ls"), tool("cat")], **fields
    )


def refused(build, *args, **fields):
    with pytest.raises(s.BadRequest) as caught:
        build(*args, **fields)
    assert caught.value.param is None or caught.value.param in str(caught.value)
    return caught.value.param


# -- bytes -> JSON ---------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def mended(value):
    if isinstance(value, str):
        return LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [mended(item) for item in value]
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    return value


@given(json_values)
@example("\ud83d \ude00 \\ud800")
def test_a_body_is_what_the_standard_library_reads_with_lone_surrogates_replaced(value):
    for text in (json.dumps(value), json.dumps(value).replace("\\ud", "\\uD")):
        assert s.parse_json_body(text.encode()) == mended(json.loads(text))


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b'{"a": 1,\n "b" 2}', "line 2 column 6"),
        (b'{"a": 1,}', "line 1 column 9"),
        (b'{"a": "\xff"}', "line 1 column 8"),
        (b"[NaN]", "line 1 column 2"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "recursion limit"),
        (b"{} x", ""),
        (b"[-Infinity]", ""),
        (b'"\xed\xa0\x80"', ""),  # a surrogate
        (b"1" * 10_000, ""),
        (b'{"a": "\\ud800', ""),
        (b'"' + b"\\" * 1_000_001, ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_fault_of_json_is_told_with_its_place(raw, fault):
    with pytest.raises(s.BadRequest, match=r"^the body is not valid JSON: ") as refusal:
        s.parse_json_body(raw)
    assert fault in str(refusal.value)


@pytest.mark.parametrize("body", [None, [], "x", 3, [{"messages": []}]])
def test_a_body_is_an_object(body):
    for build in (s.parse_chat_request, s.parse_completion_request):
        with pytest.raises(s.BadRequest, match="object"):
            build(body, CONFIG, request_id="r", headers={})


# -- faults are named where they are ---------------------------------------------

BUILD = {"chat": chat, "completion": completion, "messages": messages}
REFUSED = [refusal for refusal in REFUSALS if refusal.api in BUILD]


@pytest.mark.parametrize(
    ("api", "fields", "name", "words"),
    REFUSED,
    ids=[f"{refusal.api}-{refusal.name}" for refusal in REFUSED],
)
def test_a_fault_is_named_by_its_path(api, fields, name, words):
    with pytest.raises(s.BadRequest) as refusal:
        BUILD[api](**fields)
    error = refusal.value
    assert (error.param.startswith(name), error.status) == (True, 400)
    assert error.param == name or name == "prompt"
    assert str(error).startswith(f"{error.param}: {words}")
    if api == "messages":
        body = s.anthropic_error_body(error)
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        dotted = re.sub(r"\[(\d+)\]", r".\1", name)
        assert body["error"]["message"].startswith(f"{dotted}: {words}")


def test_the_first_fault_is_told_whatever_else_is_wrong():
    """By its place, and not by its name: 2 comes before 10."""
    messages = [{"role": "user", "content": "x"} for _ in range(12)]
    messages[2] = 3
    messages[10] = {"role": "user", "content": [{"type": "text"}]}
    assert refused(chat, messages=messages) == "messages[2]"
    assert refused(chat, stream_options=3, stop=3) == "stream_options"


@pytest.mark.parametrize("name", SPECIAL)
def test_a_field_that_would_change_the_answer_is_refused_unless_it_asks_for_nothing(
    name,
):
    ordinary, special = SPECIAL[name]
    for value in special:
        for fields in ({name: value}, {"extra_body": {name: value}}):
            for param in (
                refused(chat, **fields),
                refused(completion, prompt="x", **fields),
            ):
                assert re.match(r"\w+", param)[0] == name

    for value in [*ordinary, None]:
        assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("build", "name", "meant"),
    [
        (chat, "max_token", "max_tokens"),
        (chat, "maxTokens", "max_tokens"),
        (chat, "temprature", "temperature"),
        (chat, "topP", "top_p"),
        (chat, "enable_thinkin", "enable_thinking"),
        (messages, "stop_sequence", "stop_sequences"),
        (messages, "metdata", "metadata"),
        (chat, "system", "a system message"),
        (chat, "stop_sequences", "stop"),
        (messages, "stop", "stop_sequences"),
    ],
)
def test_a_misspelt_field_is_logged_once_with_the_name_that_was_meant(
    caplog, build, name, meant
):
    s._warn_of_unknown.cache_clear()

    for _ in range(2):
        build(**{name: 1})

    [line] = caplog.messages
    assert repr(name) in line and f"did you mean {meant}?" in line


def test_fields_that_other_servers_know_are_not_taken_for_misspelt_ones(caplog):
    names = (
        *("cache_prompt", "cache_control", "ignore_eos", "min_keep", "min_tokens"),
        *("n_predict", "prediction", "prompt_cache_retention", "reasoning_format"),
        *("repeat_penalty", "speed", "store", "top_a", "typical_p", "verbosity"),
    )
    s._warn_of_unknown.cache_clear()

    for name in names:
        chat(**{name: 1})
        messages(**{name: 1})

    assert not caplog.messages


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).map("x_{}".format), json_values, max_size=4
    )
)
def test_unknown_and_advisory_fields_change_nothing(unknown):
    advisory = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "self": 1,
        "cls": 2,
    }
    dunder = {"__dataclass_self__": 1, "build": 2}

    assert whole_chat(**unknown, **advisory, **dunder) == whole_chat()
    assert completion(prompt="x", **unknown, **advisory) == completion(prompt="x")


@given(st.data())
def test_null_means_absent(data):
    optional = [
        "model", "stream", "stream_options", "max_tokens", "stop", "temperature", "seed", "tools",
        "tool_choice", "logprobs", "top_logprobs", "logit_bias", "thinking", "user", "n", "audio",
        "reasoning_effort", "chat_template_kwargs", "metadata", "extra_body", "parallel_tool_calls",
    ]  # fmt: skip
    nulls = dict.fromkeys(data.draw(st.sets(st.sampled_from(optional))))

    assert chat(**nulls) == chat()
    assert chat(**{"temperature": 0.5, **nulls, "seed": 4}).sampling.seed == 4


@given(json_values, st.sampled_from(sorted({path for path, _ in WRONG})))
def test_anything_anywhere_is_a_request_or_a_bad_request(value, path):
    body = planted(path, value)
    body_before = copy.deepcopy(body)

    try:
        request = chat(**body)
    except s.BadRequest as error:
        assert error.param
        top = re.match(r"\w+", path)[0]
        assert error.param.startswith((top, "tool_choice", "top_logprobs"))
    else:
        assert request.max_tokens >= 1
        assert all(isinstance(m["content"], str | list) for m in request.messages)
    assert body == body_before  # a request is parsed, never edited


# -- messages and tools ----------------------------------------------------------


def test_messages_stay_dicts_in_order_with_all_they_said():
    request = whole_chat()
    assert [m["role"] for m in request.messages] == [m["role"] for m in CONVERSATION]
    expected = copy.deepcopy(CONVERSATION)
    expected[3]["content"] = ""
    assert list(request.messages) == expected
    assert all(type(m) is dict for m in request.messages)


@pytest.mark.parametrize("content", [None, "", []])
def test_spellings_of_an_empty_message_are_one(content):
    call = {"id": "c", "function": {"name": "f", "arguments": ""}}
    for message in ({"role": "assistant", "tool_calls": [call]}, {"role": "tool"}):
        assert chat(messages=[{**message, "content": content}]) == chat(
            messages=[message]
        )
        assert chat(messages=[message]).messages[0]["content"] == ""


def test_thinking_echoed_under_either_name_is_one_field():
    answer = {"role": "assistant", "content": "a"}
    echoes = [
        {**answer, "reasoning": "t"},
        {**answer, "reasoning_content": "t", "reasoning": None, "tool_calls": []},
        {**answer, "reasoning_content": "t", "reasoning": "other"},
    ]

    for message in echoes:
        (parsed,) = chat(messages=[message]).messages
        assert parsed == {**answer, "reasoning_content": "t"}


def test_tools_keep_what_describes_the_function_and_drop_the_rest():
    schema = {
        "type": "object",
        "properties": {"b": {"default": None}, "a": {}},
        "$x": [None],
    }
    function = {"strict": True, "parameters": schema, "description": None, "name": "f"}
    expected = {"name": "f", "parameters": schema, "strict": True}

    for wrapped in (
        {"function": function},
        tool("", function=function, cache_control={"t": 1}),
    ):
        (parsed,) = chat(tools=[wrapped]).tools
        assert parsed == {"type": "function", "function": expected}
        assert list(parsed["function"]["parameters"]["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, [], s.ToolChoice("none")),
        ("auto", [], s.ToolChoice("none")),
        ("none", [], s.ToolChoice("none")),
        (None, ["f"], s.ToolChoice("auto")),
        ("auto", ["f"], s.ToolChoice("auto")),
        ("none", ["f"], s.ToolChoice("none")),
        ("required", ["f"], s.ToolChoice("required")),
        ("g", ["f", "g"], s.ToolChoice("named", "g")),
        ("required", [], None),
        ("g", ["f"], None),
        ("g", [], None),
    ],
)
def test_tool_choice(choice, tools, expected):
    given_choice = (
        {"type": "function", "function": {"name": "g"}} if choice == "g" else choice
    )
    fields = {"tool_choice": given_choice, "tools": [tool(name) for name in tools]}
    if expected is None:
        assert refused(chat, **fields) == "tool_choice"
    else:
        assert chat(**fields).tool_choice == expected


# -- sampling, lengths, stops ----------------------------------------------------


def test_defaults_are_the_configured_ones():
    config = s.Config(default_max_tokens=70, default_reasoning_effort="low")
    request = chat(config=config)
    assert (request.max_tokens, request.effort) == (70, "low")
    assert chat(config=config, reasoning_effort="max").effort == "max"


def test_only_what_was_sent_of_sampling_is_set():
    """The rest is the model's to say: LoadedModel.complete_sampling()."""
    sampling = chat(temperature=0, top_p=1, top_k=None).sampling
    assert sampling.model_fields_set == {"temperature", "top_p"}


def test_sampling_fields_reach_the_sampler():
    fields = {"temperature": 1, "top_k": -1, "presence_penalty": -2, "seed": -(2**63)}
    sampling = chat(**fields, logit_bias={"7": -100, "11": 2.5}).sampling
    assert sampling.logit_bias == {7: -100.0, 11: 2.5}
    assert {name: getattr(sampling, name) for name in fields} == fields


def test_lengths_and_stops():
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat(stop="x").stop == ("x",)
    assert chat(stop=["x", "\n\n"]).stop == ("x", "\n\n")
    assert chat().stop == chat(stop=[]).stop == ()
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream_options={"include_usage": None}).include_usage
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert refused(chat, top_logprobs=1) == "top_logprobs"


# -- thinking --------------------------------------------------------------------

SPELLINGS = [
    ({"enable_thinking": True}, True, None),
    ({"enable_thinking": False}, False, None),
    ({"thinking": True}, True, None),
    ({"thinking": "off"}, False, None),
    ({"thinking": "on"}, True, None),
    ({"thinking": "medium"}, True, "medium"),
    ({"thinking": "XHIGH"}, True, "xhigh"),
    ({"thinking": {"type": "enabled", "budget_tokens": 99}}, True, None),
    ({"thinking": {"type": "adaptive"}}, True, None),
    ({"thinking": {"type": "disabled"}}, False, None),
    ({"reasoning_effort": "none"}, False, None),
    ({"reasoning_effort": "off"}, False, None),
    ({"reasoning_effort": "minimal"}, True, "minimal"),
    ({"reasoning_effort": "max"}, True, "max"),
    ({"reasoning_effort": "low"}, True, "low"),
    ({"reasoning": {"enabled": True}}, True, None),
    ({"reasoning": {"enabled": False, "effort": "high"}}, False, None),
    ({"reasoning": {"enabled": True, "effort": "high"}}, True, "high"),
    ({"reasoning": {"effort": "none"}}, False, None),
    ({"reasoning": {"level": "medium"}}, True, "medium"),
    ({"reasoning": {"type": "disabled"}}, False, None),
    ({"enable_thinking": True, "reasoning_effort": "none"}, True, None),
    ({"enable_thinking": False, "thinking": "high"}, False, None),
    ({"thinking": True, "reasoning_effort": "medium"}, True, "medium"),
]


@pytest.mark.parametrize(("spelling", "thinks", "effort"), SPELLINGS, ids=str)
def test_every_spelling_of_thinking_means_the_same(spelling, thinks, effort):
    nested = ({"metadata": spelling}, {"extra_body": spelling})
    for fields, default in itertools.product((spelling, *nested), (True, False)):
        request = chat(config=s.Config(default_thinking=default), **fields)
        assert request.thinking is thinks
        assert request.effort == (effort or "")
        assert request.template_kwargs == {}


@pytest.mark.parametrize(
    "silent", [{}, {"reasoning": {}}, {"reasoning": {"summary": "auto"}}]
)
def test_a_body_that_says_nothing_of_thinking_gets_the_default(silent):
    for default in (True, False):
        assert (
            chat(config=s.Config(default_thinking=default), **silent).thinking
            is default
        )


def test_the_template_switch_wins_and_the_others_pass_through():
    switches = {"enable_thinking": False, "preserve_thinking": True, "custom": None}
    request = chat(enable_thinking=True, chat_template_kwargs=switches)
    assert not request.thinking
    assert request.template_kwargs == {"preserve_thinking": True}
    assert "enable_thinking" in switches

    request = chat(
        reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "odd"}
    )
    assert request.template_kwargs == {"reasoning_effort": "odd"}
    request = chat(
        reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}
    )
    assert (request.effort, request.template_kwargs) == ("high", {})
    assert not chat(chat_template_kwargs={"reasoning_effort": "none"}).thinking

    for name in ("thinking", "enable_thinking"):
        assert chat(chat_template_kwargs={name: True}).thinking is True
        assert chat(chat_template_kwargs={name: False}).thinking is False
    nested = chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert not nested.thinking
    assert not chat(metadata={"thinking": "off"}).thinking
    assert chat(metadata={"thinking": "off"}, thinking="on").thinking
    assert chat(extra_body={"thinking": "off"}, thinking="on").thinking


BUDGETS = {
    "Anthropic": {"thinking": {"type": "enabled", "budget_tokens": 5}},
    "Qwen": {"thinking_budget": 5},
    "Qwen with its switch": {"enable_thinking": True, "thinking_budget": 5},
    "OpenRouter": {"reasoning": {"max_tokens": 5}},
    "OpenRouter with its switch": {"reasoning": {"enabled": True, "max_tokens": 5}},
}
TEMPLATE_BUDGET = {"chat_template_kwargs": {"thinking_budget": 5}}


@pytest.mark.parametrize("spelling", BUDGETS.values(), ids=BUDGETS.keys())
def test_a_thinking_budget_is_found_in_every_spelling(spelling):
    for fields in (spelling, {"metadata": spelling}, {"extra_body": spelling}):
        assert chat(**fields).thinking_budget == 5
    assert chat().thinking_budget is None


def test_a_thinking_budget_for_the_template_is_kept_and_reaches_it():
    for fields in (TEMPLATE_BUDGET, {"extra_body": TEMPLATE_BUDGET}):
        request = chat(**fields)
        assert request.thinking_budget == 5
        assert request.template_kwargs == {"thinking_budget": 5}
    other = {"thinking_budget": 9, "reasoning": {"max_tokens": 8}}
    assert chat(**other, **TEMPLATE_BUDGET).thinking_budget == 5
    assert chat(**other, **BUDGETS["Anthropic"]).thinking_budget == 5
    assert chat(**other).thinking_budget == 9


@pytest.mark.parametrize("default", [True, False])
def test_openrouters_budget_alone_switches_thinking_on(default):
    config = s.Config(default_thinking=default)
    for fields in ({"max_tokens": 5}, {"max_tokens": 5, "effort": "high"}):
        assert chat(config=config, reasoning=fields).thinking
        assert chat(config=config, metadata={"reasoning": fields}).thinking
    off = chat(config=config, reasoning={"max_tokens": 5, "enabled": False})
    assert not off.thinking
    assert not chat(enable_thinking=False, reasoning={"max_tokens": 5}).thinking
    assert chat(config=config, thinking_budget=5).thinking is default


def test_thinking_parts_of_a_reply_are_its_thinking():
    parts = [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]
    (reply,) = chat(messages=[{"role": "assistant", "content": parts}]).messages
    assert reply["reasoning_content"] == "why"
    assert reply["content"] == parts[1:]
    user = {"role": "user", "content": parts}
    assert refused(chat, messages=[user]) == "messages[0].content"


# -- sessions --------------------------------------------------------------------

CLAUDE_USER = json.dumps({"device_id": "d", "session_id": "s-claude"})
IDS = [  # most specific first: each wins over all that follow
    ({"session_id": "a"}, {}, "a"),
    ({"conversation_id": "b"}, {}, "b"),
    ({"thread_id": "c"}, {}, "c"),
    ({"chat_id": 12}, {}, "12"),
    ({"metadata": {"session_id": "d"}}, {}, "d"),
    ({"metadata": {"user_id": CLAUDE_USER}}, {}, "s-claude"),
    ({"metadata": {"user_id": "user_a1_account_b2_session_c3-d4"}}, {}, "c3-d4"),
    ({}, {"X-Claude-Code-Session-Id": "e"}, "e"),
    ({}, {"x-session-id": "f"}, "f"),
    ({}, {"Thread-Id": "g"}, "g"),
    ({}, {"session-id": "h"}, "h"),
    ({"prompt_cache_key": "i"}, {}, "i"),
    ({"user": "j"}, {}, "j"),
]


@pytest.mark.parametrize("n", range(len(IDS)))
def test_a_session_id_is_found_wherever_clients_put_it(n):
    fields, headers, session_id = IDS[n]
    assert chat(headers, **fields).session == s.SessionContext(session_id)
    assert chat(extra_body=fields).session.session_id == (
        session_id if fields else None
    )

    everything = {}
    all_headers = {}
    for later_fields, later_headers, *_ in reversed(IDS[n:]):
        metadata = _merged_metadata(everything, later_fields)
        everything.update(later_fields)
        everything.update(metadata)
        all_headers.update(later_headers)
    assert chat(all_headers, **everything).session == s.SessionContext(session_id)


def _merged_metadata(old, new):
    merged = {**old.get("metadata", {}), **new.get("metadata", {})}
    return {"metadata": merged} if merged else {}


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"metadata": "x"}, {"metadata": {"user_id": "somebody"}}),
        *({"session_id": value} for value in ("", True, ["x"], None)),
        {"extra_body": [1]},
    ],
)
def test_what_is_no_session_id_is_passed_over(fields):
    assert chat(**fields).session == s.SessionContext()
    assert chat(**{**fields, "user": "u"}).session == s.SessionContext("u")


def test_a_sub_agent_has_a_session_of_its_own_and_a_parent():
    agent = {"x-claude-code-session-id": "main", "x-claude-code-agent-id": "7"}
    assert chat(agent).session == s.SessionContext("main/7", "main")
    child = {"x-session-id": "child", "x-parent-session-id": "main"}
    assert chat(child).session == s.SessionContext("child", "main")
    assert chat({"x-claude-code-agent-id": "7"}).session == s.SessionContext()


def test_a_session_id_is_bounded():
    assert len(chat(session_id="x" * 100_000).session.session_id) == 256


# -- completions -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", "x"), (["x"], "x"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ([5], (5,))],
)
def test_a_prompt_is_text_or_ids(prompt, expected):
    request = completion(
        prompt=prompt, max_tokens=3, stop="s", temperature=0, user="u", stream=True
    )

    assert (request.kind, request.prompt) == ("completion", expected)
    assert request.messages == ()
    assert (request.max_tokens, request.stop, request.stream) == (3, ("s",), True)
    assert (request.sampling.temperature, request.session.session_id) == (0.0, "u")
    assert not request.thinking


# -- answers ---------------------------------------------------------------------

USAGE = s.Usage(
    prompt_tokens=10, cached_tokens=8, completion_tokens=5, reasoning_tokens=2
)
HE = {"token": "he", "bytes": list(b"he"), "logprob": -0.5}
LOGPROBS = {"content": [{**HE, "top_logprobs": [HE, {**HE, "token": "x"}]}]}


def through_json(kind, body):
    """`body` as an SDK sees it; nothing in it may be lost on the way."""
    sent = json.loads(json.dumps(body, allow_nan=False))
    parsed = kind.model_validate(sent, strict=False)
    assert parsed.model_dump(exclude_unset=True) == sent
    return parsed


def test_a_chat_answer_is_what_the_sdk_expects():
    shape = s.OpenAIFormatter("chat", "r1", "org/model", 1700000000)
    message = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    ending = s.ReplyEnd("stop", USAGE, logprobs=LOGPROBS)

    completion = through_json(ChatCompletion, shape.full_body(message, ending))

    assert completion.id == "chatcmpl-r1"
    assert completion.model == "org/model"
    assert completion.object == "chat.completion"
    assert completion.choices[0].message.content == "hi"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.total_tokens == 15
    assert completion.usage.prompt_tokens_details.cached_tokens == 8
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2
    (first,) = completion.choices[0].logprobs.content
    assert first.bytes == list(b"he")
    assert [choice.token for choice in first.top_logprobs] == ["he", "x"]


BODIES = [s._ChatBody, s._CompletionBody, s._MessagesBody, s.SamplingParams]
ODD_VALUES = [
    *(True, 0, -1, 2, 1.5, 1e300, 2**70, "", "x" * 2000, [], {}, [None], [[]]),
    *([""], ["x"] * 20, [-1], [2**40], [1.5], [{}], {"x": 1}, {"7": "x"}, {"7": 999}),
    *({"1.5": 1}, {"9" * 5000: 1}),
    [{"type": "text"}],
    [{"role": "user", "content": [{"type": "text", "text": 3}]}],
    [{"role": "robot", "content": "x"}],
    [{"type": "function", "function": {"name": ""}}],
    [{"name": "x", "type": "bash_20250124"}],
]
SECRET = [{"type": "s3cret", "role": "s3cret", "content": [{"type": "s3cret"}]}]


@pytest.mark.parametrize("body", BODIES)
def test_a_fault_quotes_no_value_and_shows_no_name_of_the_program(body):
    sentences = set()
    for name, value in itertools.product(body.model_fields, [*ODD_VALUES, SECRET]):
        good = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
        try:
            s.validate_fields(body, good | {name: value})
        except s.BadRequest as refusal:
            sentences.add(str(refusal))

    assert len(sentences) > 10
    for sentence in sentences:
        assert not re.search("s3cret|xxxx|Body|Params|TypedDict|pydantic", sentence)


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "high"}, {"response_format": {"type": "xml"}}]
)
def test_extra_body_of_the_messages_api_counts_like_its_fields_in_the_body(fields):
    thinking = {"type": "enabled"}
    direct = messages(thinking=thinking, **fields)
    assert direct == messages(thinking=thinking, extra_body=fields)


def test_a_signature_that_is_null_is_none():
    thinking = {"type": "thinking", "thinking": "x", "signature": None}
    request = messages(messages=[{"role": "assistant", "content": [thinking]}])
    assert "thought_id" not in request.messages[0]


FAULTY_OBJECTS = [
    {f"x{n}": [[]] for n in range(1000)},  # wrong in their names, where names matter
    {str(n): [[]] for n in range(1000)},  # and in their values alone
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("faulty", [[1.5] * 1000, *FAULTY_OBJECTS], ids=type)
def test_a_million_faults_cost_no_more_than_one(body, faulty):
    """Each is an object of its own: 1.5 MB of them took 0.8 GB and held up all streams."""
    for name in body.model_fields:
        try:
            body.model_validate({"messages": [{}], "prompt": "x", name: faulty})
        except ValidationError as wrong:
            assert wrong.error_count() < 12, name


# -- results of parallel calls ---------------------------------------------------------------------


def calls(*ids):
    functions = [{"id": i, "type": "function", "function": {"name": "f"}} for i in ids]
    return {"role": "assistant", "tool_calls": functions}


def result(name):
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


def test_results_stand_in_the_order_of_their_calls_whatever_order_they_ended_in():
    user = {"role": "user", "content": "go on"}
    for order in itertools.permutations("abcx"):
        results = map(result, order)
        sent = [user, calls(*"abc"), *results, user, calls("d"), result("d"), user]
        read = chat(messages=sent).messages

        assert [m["content"] for m in read[2:6]] == ["of a", "of b", "of c", "of x"]
        assert [m["role"] for m in read] == [m["role"] for m in sent]
        assert read[8]["content"] == "of d"


def test_results_of_calls_in_several_messages_stand_in_the_order_of_all_of_them():
    user, note = ({"role": role, "content": "quickly"} for role in ("user", "system"))
    for messages in (
        [calls("a"), calls("b", "c"), result("a"), result("b"), result("c")],
        [calls("a"), calls("b", "c"), result("c"), result("a"), result("b")],
        [calls("a", "b", "c"), user, result("c"), result("a"), result("b")],
        [calls("a", "b", "c"), note, user, result("c"), result("a"), result("b")],
    ):
        read = chat(messages=[user, *messages]).messages
        assert [m["content"] for m in read[-3:]] == ["of a", "of b", "of c"]


@pytest.mark.parametrize("ids", [("a", "b"), (None,), (None, "b"), ("a", None)])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_note_between_results_follows_them(role, ids):
    """Also where a call has no id."""
    note = {"role": role, "content": "be quick"}
    results = [result(call_id or "x") for call_id in ids]
    results.insert(len(ids) if None in ids else 1, note)
    question = {"role": "user", "content": "and?"}
    sent = [note, calls(*ids), *results, question]
    read = chat(messages=sent).messages

    assert [m["role"] for m in read] == [
        role, "assistant", *["tool"] * len(ids), role, "user"
    ]  # fmt: skip


def test_an_image_that_is_refused_is_named_by_its_place_in_the_body():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    bad = {**result("b"), "content": [{"type": "text", "text": "see"}, image]}
    request = chat(messages=[calls("a", "b"), bad, result("a")])

    with pytest.raises(s.BadRequest) as refusal:
        s.extract_images(request, s.Config(), has_vision=False, salt=b"")
    assert str(refusal.value).startswith("messages[1].content[1]: ")


def test_results_of_calls_that_share_a_name_stay_as_they_came():
    """There are clients that name a call after its tool, also twice."""
    results = [{**result(text[0]), "content": text} for text in ("f1", "g0", "f2")]
    read = chat(messages=[calls("f", "g", "f"), *results]).messages[1:]
    assert [message["content"] for message in read] == ["f1", "g0", "f2"]


def test_results_without_their_calls_stay_as_they_came():
    messages = [result("b"), result("a"), {"role": "user", "content": "and?"}]
    read = chat(messages=messages).messages
    assert [message["content"] for message in read] == ["of b", "of a", "and?"]
