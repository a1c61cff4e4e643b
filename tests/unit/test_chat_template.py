"""RENDER: whatever the template, every text of the client is in the prompt, as text, exactly."""

import copy
import json
import logging
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import nights
import pytest
import start_llm as s
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from nights import at_night
from templates import (
    CHATML,
    GEMMA_TOKENS,
    GLM_TOKENS,
    QWEN_TOKENS,
    REAL,
    call,
    chat,
    said,
    tiny_tokenizer,
    tokenizer_of,
    tool,
)
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

BENT = settings(
    max_examples=15 if nights.is_night else 4,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# No system role, roles alternate: as gemma-2 and the early Mistrals are.
ALTERNATING = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MODELS = ["chatml/tiny", "qwen3/qwen3", *(f"{name}/tiny" for name in REAL)]
AT_NIGHT = [
    f"{name}/{vocabulary}" for name in REAL for vocabulary in ("qwen3", "glm-4")
]
QWENS = [model for model in MODELS if "gemma" not in model]


@cache
def template_of(model: str, **settings: str) -> s.ChatTemplate:
    return make_template(tokenizer_of(model), **settings)


def make_template(tokenizer: PreTrainedTokenizerFast, **env: str) -> s.ChatTemplate:
    is_gemma = "<|channel>" in (tokenizer.chat_template or "")
    start, end = ("<|channel>", "<channel|>") if is_gemma else ("<think>", "</think>")
    config = s.Config.from_env(env)
    return s.ChatTemplate(
        tokenizer, config, think_start=start, think_end=end, ends=set()
    )


def conversation(say: Callable[[str], str] = str) -> list:
    """Each kind of message; `say` may dress the words up."""
    calls = [
        call(json.dumps({"q": say("ask1")})),
        call(json.dumps({"q": say("ask2")}), n=1),
    ]
    return [
        said("system", say("rules1")),
        said("user", say("hello1")),
        said("assistant", say("reply1"), reasoning_content=say("thought1")),
        said("user", say("hello2")),
        said("assistant", None, tool_calls=calls),
        said("tool", say("result1"), tool_call_id="call00000"),
        said("tool", say("result2"), tool_call_id="call00001"),
    ]


WORDS = ["rules1", "hello1", "reply1", "hello2", "ask1", "ask2", "result1", "result2"]


@pytest.fixture(params=[*MODELS, *map(at_night, AT_NIGHT)])
def model(request: pytest.FixtureRequest) -> str:
    tokenizer_of(request.param)  # skips where it is absent
    return request.param


# -- ids --------------------------------------------------------------------------

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
code_text = st.sampled_from(
    ["def f(x):\n    return x\n", " <b> </b>", "\n\n\n", " é\u0301 漢字 🙂", "<|", "|>"]
)


@given(st.data())
@BENT
def test_encode_is_the_tokenizers_own(model: str, data: st.DataObject) -> None:
    tokens = st.sampled_from(sorted(tokenizer_of(model).get_added_vocab()))
    text = "".join(data.draw(st.lists(plain_text | code_text | tokens, max_size=12)))
    wanted = tokenizer_of(model).encode(text, add_special_tokens=False)
    assert template_of(model).encode(text) == wanted


ALL_TOKENS = {*GLM_TOKENS, *GEMMA_TOKENS, *QWEN_TOKENS}
said_text = (  # hypothesis likes to take strings of these files
    st.lists(plain_text | code_text, max_size=4)
    .map("".join)
    .filter(
        lambda text: not any(token in text for token in (*ALL_TOKENS, "<|endoftext|>"))
    )
)


@st.composite
def conversations(draw: st.DrawFn) -> list:
    messages = [said("system", draw(said_text))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(said("user", draw(said_text)))
        for _ in range(draw(st.integers(0, 2))):
            calls = [call(json.dumps({"q": draw(said_text)}))]
            messages.append(said("assistant", draw(said_text), tool_calls=calls))
            messages.append(said("tool", draw(said_text), tool_call_id="call00000"))
        messages.append(
            said("assistant", draw(said_text), reasoning_content=draw(said_text))
        )

    return [*messages, said("user", draw(said_text))]


@given(messages=conversations())
@BENT
def test_random_conversations_lose_nothing_and_are_remembered_right(
    model: str, messages: list
) -> None:
    """The memo is shared by all examples: a wrong piece in it would show in a later one."""
    template = template_of(model)
    tokenizer = tokenizer_of(model)
    request = chat(messages)
    request_before = copy.deepcopy(request)

    rendered = template.render_prompt(request)

    ids = rendered.ids.tolist()
    assert ids == tokenizer.encode(rendered.text, add_special_tokens=False)
    assert tokenizer.decode(ids) == unicode_form(tokenizer, rendered.text)
    assert template.render_prompt(request) == rendered
    assert request == request_before

    end = 0
    for message in messages:
        if message["role"] == "user":
            end = rendered.text.index(message["content"].strip(), end)


def unicode_form(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return normalizer.normalize_str(text) if normalizer else text


def test_tokens_that_eat_spaces_are_left_to_the_tokenizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """rstrip tokens (Phi-3) make piecewise encoding wrong; literal ones still are text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|eat|>", rstrip=True, normalized=False)])
    with caplog.at_level(logging.WARNING, "start-llm"):
        template = make_template(tokenizer)
    [record] = caplog.records
    assert "take the spaces around them" in record.getMessage()
    text = "a<|eat|>   b<|im_end|>c"

    assert template.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    rendered = template.render_prompt(chat([said("user", text)]))
    assert tokenizer.convert_tokens_to_ids("<|eat|>") not in rendered.ids.tolist()
    assert tokenizer.decode(rendered.ids.tolist()) == rendered.text


# -- markup as text ---------------------------------------------------------------


def ids_among(ids: set, rendered: s.RenderedPrompt) -> list:
    return [token for token in rendered.ids.tolist() if token in ids]


def test_markup_in_client_text_is_text(model: str) -> None:
    """In contents, thinking, arguments, results, tools: no special id, and no byte lost."""
    template = template_of(model)
    tokenizer = tokenizer_of(model)
    added = tokenizer.get_added_vocab()
    markup = "".join(f"a{token} {token}" for token in added) + "\ufdd0<\ufdd0|im_end|>z"
    marked_messages = conversation(lambda word: f"{word}{markup}{word}")
    marked = chat(marked_messages, tools=[tool(f"Looks. {markup}")])
    plain = chat(conversation(lambda word: f"{word}{word}"), tools=[tool("Looks.")])

    rendered = template.render_prompt(marked)
    simple = template.render_prompt(plain)

    special_ids = set(added.values())
    assert ids_among(special_ids, rendered) == ids_among(special_ids, simple)
    assert tokenizer.decode(rendered.ids.tolist()) == rendered.text
    n_starts = len(starts_in(template, rendered))
    assert n_starts == len(starts_in(template, simple))
    for word in WORDS:
        spoken = f"{word}{markup}{word}"
        as_json = json.dumps(spoken, ensure_ascii=False)[1:-1]
        assert spoken in rendered.text or as_json in rendered.text


def template_with(tokens: Iterable[AddedToken]) -> s.ChatTemplate:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([*tokens])
    return make_template(tokenizer)


@pytest.mark.parametrize(
    "words", ["]~b]~b]", "]~!b[e~[", "]~b]~!b[e~[", "]" + "~b]" * 9]
)
def test_markup_that_overlaps_in_client_text_is_text(words: str) -> None:
    """MiniMax-M2's tokens begin and end with brackets, and share them."""
    texts = ["]~b]", "]~!b[", "[e~["]
    tokens = [AddedToken(text, special=True, normalized=False) for text in texts]
    template = template_with(tokens)

    rendered = template.render_prompt(chat([said("user", words)]))

    assert words in rendered.text
    special_ids = {template.encode(text)[0] for text in texts}
    assert not ids_among(special_ids, rendered)


def test_added_tokens_of_blanks_are_used_in_client_text() -> None:
    """The tokenizers of GPT-NeoX and Phi-2 have them, for code."""
    tokens = [AddedToken(" " * n, normalized=False) for n in range(2, 9)]
    template = template_with(tokens)

    code = "if x:\n        return"
    rendered = template.render_prompt(chat([said("user", code)]))

    assert ids_among({template.encode(" " * 8)[0]}, rendered)
    assert code in rendered.text


def test_markup_in_names_is_text(model: str) -> None:
    template = template_of(model)
    tokenizer = tokenizer_of(model)
    tokens = tokenizer.get_added_vocab()
    special_ids = set(tokens.values())
    marked = {f"a{token}": "x" for token in tokens}
    plain = {f"a{n}": "x" for n in range(len(tokens))}

    def rendered(arguments: dict) -> s.RenderedPrompt:
        step = said("assistant", "", tool_calls=[call(arguments)])
        return template.render_prompt(chat([said("user", "u"), step]))

    marked_ids = ids_among(special_ids, rendered(marked))
    assert marked_ids == ids_among(special_ids, rendered(plain))


@pytest.mark.parametrize("model", QWENS)
def test_closing_tags_in_an_answer_do_not_cut_it(model: str) -> None:
    answer = "Close it with </think> here, open with <think>."
    messages = [said("user", "how?"), said("assistant", answer), said("user", "thanks")]
    assert answer in template_of(model).render_prompt(chat(messages)).text


# -- positions --------------------------------------------------------------------


def in_more_words(word: str) -> str:
    """After a message of a token or two the next start may be missed (GLM's markup)."""
    return f"{word} in more words"


def starts_in(template: s.ChatTemplate, rendered: s.RenderedPrompt) -> tuple[int, ...]:
    """Where its messages begin."""
    return s.compute_msg_token_boundaries(rendered.ids, template.traits)


def test_boundaries_part_the_messages(model: str) -> None:
    """Between two of them are the words of one message; all message starts but merged ones."""
    template = template_of(model)
    tokenizer = tokenizer_of(model)
    messages = conversation(in_more_words)
    rendered = template.render_prompt(chat(messages, tools=[tool()]))
    ids = rendered.ids.tolist()
    message_starts = starts_in(template, rendered)

    cuts = [0, *message_starts, len(ids)]
    spans = [tokenizer.decode(ids[start:end]) for start, end in pairwise(cuts)]
    found = [[word for word in WORDS if word in span] for span in spans]
    wanted = [["rules1"], ["hello1"], ["reply1"], ["hello2"], ["ask1", "ask2"]]
    wanted += [["result1"], ["result2"]]
    assert [words for words in found if words] == wanted

    # messages and prompt; GLM and chatml have a head in two turns, gemma no prompt after a result
    name, vocabulary = model.split("/")
    extra = {"glm-4.7-flash": 1, "chatml": 1, "gemma-4": -1}.get(name, 0)
    if "qwen" in name and vocabulary == "tiny":  # more tokens before <tool_response>
        extra = 1
    assert len(message_starts) == len(messages) + 1 + extra
    start_ids = {ids[position] for position in message_starts}
    assert start_ids <= set(tokenizer.get_added_vocab().values())


def test_places_of_a_prompt(model: str) -> None:
    template = template_of(model)
    tokenizer = tokenizer_of(model)
    messages = conversation(in_more_words)
    request = chat(messages, tools=[tool("hello1 hello2 look")])
    rendered = template.render_prompt(request)
    ids = rendered.ids.tolist()
    system_end = rendered.positions.head_ends[0]
    last_user_start, *later_starts = rendered.positions.turn_starts

    head = tokenizer.decode(ids[:system_end])
    assert "rules1" in head
    assert "hello1 hello2 look" in head
    assert "Looks" not in head

    rest = tokenizer.decode(ids[system_end:])
    assert rest.count("hello1") == 1
    assert "rules1" not in rest

    last_turn = tokenizer.decode(ids[last_user_start:])
    assert "hello2" in last_turn
    assert "reply1" not in last_turn
    message_starts = starts_in(template, rendered)
    assert last_user_start in message_starts

    prompt = tokenizer.decode(ids[later_starts[-1] :])
    assert "result2" not in prompt
    assert len(prompt) < 60
    assert set(later_starts) <= {*message_starts, len(ids)}
    assert set(later_starts) >= {n for n in message_starts if n > last_user_start}


def test_only_reminders_of_the_first_question_end_a_head(model: str) -> None:
    """Claude Code puts one below each file that it reads (L-51): no two sessions share it."""
    template = template_of(model)
    note = "<system-reminder>\nBe brief.\n</system-reminder>"
    question = [said("system", "rules"), said("user", f"{note}\n\nhello")]
    answer = [said("assistant", "ok"), said("user", f"more\n\n{note}")]
    step = [said("assistant", "", tool_calls=[call({"q": "a"})]), said("tool", note)]
    step[1]["tool_call_id"] = step[0]["tool_calls"][0]["id"]
    for later in ([], answer, step):
        positions = template.render_prompt(chat([*question, *later])).positions
        assert len(positions.head_ends) == 2


@pytest.mark.parametrize(
    ("model", "opens"),
    [
        ("chatml/tiny", True),
        ("qwen3/tiny", False),
        ("qwen3-coder/tiny", False),
        ("qwen3.5/tiny", True),
        ("glm-4.7-flash/tiny", True),
        ("gemma-4/tiny", False),
    ],
)
def test_starts_in_reasoning(model: str, opens: bool) -> None:
    template = template_of(model)
    for messages in (conversation(), conversation()[:2]):
        rendered = template.render_prompt(chat(messages))
        assert rendered.starts_in_reasoning is opens

        without_thinking = chat(messages, enable_thinking=False)
        rendered = template.render_prompt(without_thinking)
        assert not rendered.starts_in_reasoning


# -- what templates cannot say ------------------------------------------------------


def test_nothing_is_lost_and_nothing_said_about_it(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = make_template(tokenizer_of(model))
    parts = [{"type": "text", "text": "part1"}, {"type": "text", "text": "part2"}]
    messages = [
        said("developer", "rules0"),
        *conversation(),
        said("system", "late1"),
        said("assistant", ""),
        said("user", parts),
        said("user", "more1"),
    ]
    with caplog.at_level(logging.WARNING, "start-llm"):
        text = template.render_prompt(chat(messages, tools=[tool()])).text

    assert not caplog.records
    end = 0
    for words in ["rules0", *WORDS, "late1", "part1", "part2", "more1"]:
        end = text.index(words, end)
    assert "'text'" not in text


@pytest.mark.parametrize(
    ("model", "is_folded"), [("qwen3/tiny", False), ("qwen3.5/tiny", True)]
)
def test_a_late_system_message_ends_the_one_before(model: str, is_folded: bool) -> None:
    messages = [*conversation(), said("system", "late1")]
    text = template_of(model).render_prompt(chat(messages)).text
    folded = "result2\n\n<system-reminder>\nlate1\n</system-reminder>"
    assert (folded in text) is is_folded
    assert ("<|im_start|>system\nlate1<|im_end|>" in text) is not is_folded


def test_roles_that_must_alternate_and_no_system_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "start-llm"):
        template = make_template(tiny_tokenizer(ALTERNATING))
    first, second = [record.getMessage() for record in caplog.records]
    assert "no system role" in first
    assert "no tools" in second

    messages = [
        said("system", "rules"),
        said("user", "a"),
        said("user", "b"),
        said("system", "c"),
    ]
    text = template.render_prompt(chat(messages)).text
    reminder = "<system-reminder>\nc\n</system-reminder>"
    wanted = f"<|im_start|>user\nrules\n\na\n\nb\n\n{reminder}<|im_end|>\n<|im_start|>assistant\n"
    assert text == wanted

    two = [said("system", "rules"), said("system", "more"), said("user", "a")]
    text = template.render_prompt(chat(two)).text
    assert "user\nrules\n\nmore\n\na<|im_end|>" in text  # none of them is late

    alone = template.render_prompt(chat([said("system", "rules")])).text
    assert alone == "<|im_start|>user\nrules<|im_end|>\n<|im_start|>assistant\n"


def test_merged_replies_keep_the_thinking_of_both() -> None:
    """A client that was cut off sends two replies in a row, and here roles alternate."""
    thinking = "(m.reasoning_content or '') + '|' + m.content"
    source = ALTERNATING.replace("m.content | trim", thinking)
    template = make_template(tiny_tokenizer(source))
    messages = [
        said("user", "go"),
        said("assistant", "first", reasoning_content="why1"),
        said("assistant", "second", reasoning_content="why2"),
        said("user", "on"),
    ]
    text = template.render_prompt(chat(messages)).text

    assert "why1\n\nwhy2|first\n\nsecond<|im_end|>" in text


def test_a_developer_speaks_as_the_system(model: str) -> None:
    def rendered(role: str) -> s.RenderedPrompt:
        messages = [said(role, "rules"), said("user", "hello")]
        return template_of(model).render_prompt(chat(messages))

    assert rendered("developer") == rendered("system")
    assert rendered("developer").positions.head_ends[0] > 0


def test_what_is_lost_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lossy = CHATML.replace("{{- m.content }}", "{{- m.content if m.content != 'b' }}")
    template = make_template(tiny_tokenizer(lossy))
    request = chat([said("user", "b"), said("user", "a")])
    with caplog.at_level(logging.WARNING, "start-llm"):
        template.render_prompt(request)
        template.render_prompt(request)
    kinds = [record.getMessage().rpartition("moves ")[2] for record in caplog.records]

    assert kinds == ["user messages"]


def test_a_template_without_calls_has_them_in_the_words_of_a_reply() -> None:
    template = make_template(tiny_tokenizer(ALTERNATING))
    step = said("assistant", "", tool_calls=[call('{"q": "hière"}')])
    messages = [
        said("user", "a"),
        step,
        said("tool", "found", tool_call_id="call00000"),
    ]
    text = template.render_prompt(chat(messages)).text
    assert '{"name": "look", "arguments": {"q": "hière"}}' in text
    assert "user\nfound" in text


def test_arguments_as_text_and_as_object_are_one(model: str) -> None:
    prompts = []
    parsed = {"q": "ask1", "deep": {"n": [1, "x"]}}
    for arguments in (json.dumps(parsed), parsed):
        messages = [
            said("user", "u"),
            said("assistant", "", tool_calls=[call(arguments)]),
        ]
        prompts.append(template_of(model).render_prompt(chat(messages)))

    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "arguments", ["", "null", "[1, 2]", '"words"', '{"q": "cut o', "7"]
)
def test_arguments_that_are_no_object_do_not_crash(model: str, arguments: str) -> None:
    step = said("assistant", "", tool_calls=[call(arguments)])
    messages = [said("user", "u"), step, said("user", "v")]
    text = template_of(model).render_prompt(chat(messages)).text
    shown = {"": "", "null": ""}.get(arguments, arguments)
    assert shown in text or json.dumps(shown)[1:-1] in text


@pytest.mark.parametrize("depth", [100, 1500, 20_000])
def test_deep_arguments_arrive_or_are_a_bad_request(depth: int) -> None:
    deep = '{"q": ' + "[" * depth + "]" * depth + "}"
    messages = [said("user", "u"), said("assistant", "", tool_calls=[call(deep)])]
    try:
        text = template_of("chatml/tiny").render_prompt(chat(messages)).text
    except s.BadRequest:
        assert depth > 200
    else:
        assert "[" * depth in text


def test_a_refusal_is_a_bad_request_in_the_templates_words() -> None:
    refusal = "{{ raise_exception('No odd words') if messages[0].content == 'odd' }}"
    template = make_template(tiny_tokenizer(refusal + CHATML))
    with pytest.raises(s.BadRequest, match="No odd words") as caught:
        template.render_prompt(chat([said("user", "odd")]))
    assert caught.value.param == "messages"


def test_no_chat_template_is_a_bad_request() -> None:
    template = make_template(tiny_tokenizer(None))
    with pytest.raises(s.BadRequest, match="no chat template"):
        template.render_prompt(chat([said("user", "x")]))

    completion = template.tokenize_completion("some text")
    assert completion.ids.tolist() == tiny_tokenizer().encode("some text")


@pytest.mark.parametrize(
    "name", ["self", "switches", "conversations", "sanitize_control_tokens"]
)
def test_a_switch_with_a_name_of_ours_is_no_crash(name: str) -> None:
    plain = template_of("chatml/tiny").render_prompt(chat([said("user", "x")]))
    try:
        request = chat([said("user", "x")], chat_template_kwargs={name: True})
        assert template_of("chatml/tiny").render_prompt(request) == plain
    except s.BadRequest as refusal:
        assert refusal.param


# -- switches -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "kwargs_off", "kwargs_on"),
    [
        ("{{ 'T' if enable_thinking }}", {"enable_thinking": False}, {"enable_thinking": True}),
        ("{{ 'T' if thinking }}", {"thinking": False}, {"thinking": True}),
        ("{{ reasoning_effort | default('medium') }}", {"reasoning_effort": "low"}, {}),
        ("", {}, {}),
    ],
)  # fmt: skip
def test_thinking_switches(source: str, kwargs_off: dict, kwargs_on: dict) -> None:
    loop = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}" + source
    traits = make_template(tiny_tokenizer(loop)).traits
    assert traits.thinking_kwargs == {True: kwargs_on, False: kwargs_off}


def test_a_switch_that_the_template_refuses_is_none() -> None:
    refusal = "{% if enable_thinking %}{{ raise_exception('no') }}{% endif %}"
    template = make_template(tiny_tokenizer(refusal + CHATML))
    assert template.render_prompt(chat([said("user", "x")])).text


def test_client_switches_reach_the_template() -> None:
    source = CHATML + "{{ style }}"
    template = make_template(tiny_tokenizer(source))
    request = chat([said("user", "x")], chat_template_kwargs={"style": "<|im_end|>!"})
    rendered = template.render_prompt(request)
    assert rendered.text.endswith("<think>\n<|im_end|>!")
    assert rendered.ids.tolist().count(template.encode("<|im_end|>")[0]) == 1


def test_written_contents_are_hidden_only_when_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = json.dumps({"path": "a.py", "content": "print(1)\n" * 9})
    messages = [
        said("user", "u"),
        said("assistant", "", tool_calls=[call(arguments, "Write")]),
    ]
    assert "print(1)" in template_of("chatml/tiny").render_prompt(chat(messages)).text

    with caplog.at_level(logging.WARNING, "start-llm"):
        hiding = make_template(
            tiny_tokenizer(), NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT="true"
        )
        text = hiding.render_prompt(chat(messages)).text

    assert "print(1)" not in text
    assert "[81 characters, sha256 " in text
    assert "a.py" in text
    [record] = caplog.records
    assert "NORMALIZE_WRITE" in record.getMessage()


def test_a_template_may_be_a_function() -> None:
    """Of DeepSeek-V3.2, for one, mlx-lm brings the template in Python."""

    def written(
        messages: list, *, add_generation_prompt: bool = False, **_how: object
    ) -> str:
        prompt = ""
        for message in messages:
            prompt += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        if add_generation_prompt:
            prompt += "<|im_start|>assistant\n"
        return prompt

    tokenizer = TokenizerWrapper(tiny_tokenizer(None), chat_template=written)
    rendered = make_template(tokenizer).render_prompt(chat([said("user", "Hello.")]))

    text = "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_raw_encodes_as_the_tokenizer_does_by_default() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", bos)]
    )
    template = make_template(tokenizer)

    rendered = template.tokenize_completion("some <|im_end|> text")
    ids = rendered.ids.tolist()
    assert ids == tokenizer.encode("some <|im_end|> text")
    assert ids[0] == bos
    assert rendered.positions.checkpoints() == (0, len(ids))

    assert template.encode("some")[0] != bos
    rendered = template.render_prompt(chat([said("user", "x")]))
    assert rendered.ids.tolist().count(bos) == 2  # never doubled


def test_raw_takes_ids_of_the_vocabulary_only() -> None:
    template = template_of("chatml/tiny")
    assert template.tokenize_completion((5, 6, 7)).ids.tolist() == [5, 6, 7]
    for prompt in ((5, 10**6), (-1,), "", ()):
        with pytest.raises(s.BadRequest) as caught:
            template.tokenize_completion(prompt)
        assert caught.value.param == "prompt"
