"""Chat templates of real models, with every kind of request that agents send."""

import logging
import re
from functools import cache
from itertools import islice

import pytest
import start_llm as s
from client_bodies import CHATS, EFFORTS, all_bodies, call, result
from nights import at_night
from templates import tiny_tokenizer, tokenizer_of

NAMES = [
    *("devstral-small", "gemma-3", "gemma-4", "glm-4.7-flash", "gpt-oss"),
    *("kimi-k2-thinking", "minimax-m2.7", "ministral-3", "qwen3", "qwen3.8"),
    # By day none that another is like.
    *("gemma-4-july", "gemma-4-small-july", "qwen3-coder", "qwen3-coder-next", "qwen3.5"),
    *("qwen3.6", "qwen3.8-unsloth"),
]  # fmt: skip
N_BY_DAY = 10
EACH = [*NAMES[:N_BY_DAY], *map(at_night, NAMES[N_BY_DAY:])]
# The request is at fault: OpenAI's API refuses a call without a result, too.
REFUSED = {("ministral-3", "a call without a result")}
CONFIG = s.Config(images_on_text_model="placeholder")


@cache
def template_of(name: str) -> s.ChatTemplate:
    tokenizer = tokenizer_of(f"{name}/qwen3")
    tags = (
        ("<|channel>", "<channel|>") if "gemma-4" in name else ("<think>", "</think>")
    )
    return s.ChatTemplate(
        tokenizer, CONFIG, think_start=tags[0], think_end=tags[1], ends=set()
    )


def parse(api: str, body: dict) -> s.ChatRequest:
    parser = s.parse_chat_request
    if api == "messages":
        parser = s.parse_anthropic_request
    request = parser(body, CONFIG, request_id="r", headers={})
    return s.extract_images(request, CONFIG, has_vision=False, salt=b"")[0]


@pytest.mark.parametrize("name", EACH)
def test_no_request_of_an_agent_is_refused_or_loses_a_text(
    name: str, caplog: pytest.LogCaptureFixture, pytestconfig: pytest.Config
) -> None:
    """All bodies of all agents with all efforts, by day few; Gemma 3 takes no tools."""
    is_night = pytestconfig.getoption("--all")
    first, step = (0, 1) if is_night else (NAMES.index(name), N_BY_DAY)
    template = template_of(name)
    assert template.traits.has_tools is (name != "gemma-3")
    caplog.clear()
    n_bodies = 0
    with caplog.at_level(logging.WARNING, "start-llm"):
        for label, api, body in islice(all_bodies(), first, None, step):
            if (name, label.partition(", effort")[0]) in REFUSED:
                continue
            request = parse(api, body)
            assert template.render_prompt(request).ids.size, label
            n_bodies += 1
    assert not [record.getMessage() for record in caplog.records]
    assert n_bodies >= 600 // step


TAKEN = {
    "qwen3.8": ["low", "medium", "xhigh"],
    "qwen3.8-unsloth": ["low", "medium", "xhigh"],
    "gpt-oss": ["low", "medium", "high"],
}


@pytest.mark.parametrize("name", EACH)
def test_the_efforts_that_a_template_takes_are_found(name: str) -> None:
    assert [*template_of(name).traits.effort_kwargs] == TAKEN.get(name, [])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("qwen3.8", "low low medium xhigh xhigh xhigh"),
        ("gpt-oss", "low low medium high high high"),
        ("qwen3", " " * 5),
    ],
)
def test_an_effort_becomes_the_nearest_that_the_template_takes(
    name: str, nearest: str
) -> None:
    template = template_of(name)
    for asked, taken in zip(s.EFFORTS, nearest.split(" "), strict=True):
        request = parse("chat", {**CHAT, "reasoning_effort": asked})
        assert template.find_effort(request) == taken
        off = parse(
            "chat", {**CHAT, "reasoning_effort": asked, "enable_thinking": False}
        )
        assert template.find_effort(off) == ""
    for fields in EFFORTS.values():
        assert template.render_prompt(parse("chat", {**CHAT, **fields})).text


CHAT = {"messages": CHATS["OpenClaw"]}

SOURCES = {
    # Only high differs, other words mean Max (GLM-5.2), and low as well (GLM-5.3).
    "{{ 'Effort: High' if reasoning_effort == 'high' else 'Effort: Max' }}": "high max",
    "{{ {'low': 'Low', 'high': 'High'}.get(reasoning_effort, 'Max') }}": "low high max",
    # Kimi K3 has another name, and refuses other words.
    "{% if thinking_effort is defined and thinking_effort not in ['low', 'high', 'max']"
    " %}{{ raise_exception('no') }}{% endif %}{{ thinking_effort }}": "low high max",
    # Mistral's knows two words; it does not think by default.
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('no') }}{% endif %}{{ reasoning_effort | default('none') }}": "high",
    "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}": "low medium high",
    # DeepSeek V4: what others are asked for is as without.
    "{{ 'Think hard.' if reasoning_effort == 'max' }}": "medium max",
    "": "",
}


@pytest.mark.parametrize(("source", "efforts"), SOURCES.items())
def test_efforts_are_found_however_a_template_takes_them(
    source: str, efforts: str
) -> None:
    loop = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    template = s.ChatTemplate(
        tiny_tokenizer(source + loop), CONFIG, think_start="", think_end="", ends=set()
    )
    assert [*template.traits.effort_kwargs] == efforts.split()

    if "none" in source:
        thinking = template.traits.thinking_kwargs
        assert thinking[True] == {"reasoning_effort": "high"}
        assert thinking[False] == {"reasoning_effort": "none"}


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
LOOP = "{% for m in messages %}" + TURN + "<|im_end|>{% endfor %}"
PARALLEL = [
    CHATS["OpenClaw"][1],
    {"role": "assistant", "content": "I look.", "tool_calls": [call(1), call(2)]},
    result(1),
    result(2, "beta"),
]


def rendered(source: str, messages: list) -> str:
    template = s.ChatTemplate(
        tiny_tokenizer(source), CONFIG, think_start="", think_end="", ends=set()
    )
    return template.render_prompt(parse("chat", {"messages": messages})).text


def test_ids_of_calls_are_written_as_a_template_takes_them() -> None:
    """Mistral's templates take nine letters, and ids that the model wrote stay."""
    printed = LOOP.replace("CALL", "[{{ c.id }} {{ c.function }}]")
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    source += "{{ raise_exception('nine!') }}{% endif %}{% endfor %}{% endfor %}"
    own = {**PARALLEL[1], "tool_calls": [{**call(1), "id": "aB3dE5fG7"}, call(2)]}
    text = rendered(source + printed, [PARALLEL[0], own, *PARALLEL[2:]])
    assert re.findall(r"\[(\w+) ", text) == ["aB3dE5fG7", "000000001"]


def test_the_name_of_a_tool_is_not_lost_where_only_ids_are_printed() -> None:
    """Kimi K2's: a result has the id of its call, too."""
    source = LOOP.replace("CALL", "[{{ c.id }} {{ c.function.arguments }}]").replace(
        "{{ m.content }}", "{{ m.tool_call_id }} {{ m.content }}"
    )
    text = rendered(source, PARALLEL)
    assert re.findall(r"\[(\S+)", text) == ["functions.read:0", "functions.read:1"]
    assert "functions.read:0 alpha result" in text
    assert "functions.read:1 beta" in text


def test_calls_stand_alone_where_a_template_takes_one_and_no_text() -> None:
    """Llama 3's."""
    source = LOOP.replace("CALL", "[{{ c.function.name }}{{ c.function.arguments }}]")
    source = source.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    refusal = "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}"
    refusal += "{{ raise_exception('one!') }}{% endif %}{% endfor %}"
    text = rendered(refusal + source, PARALLEL)
    order = ["I look.", "[read{", "alpha result", "[read{", "beta"]
    assert re.search(".*".join(map(re.escape, order)), text, re.DOTALL)
