"""What agents do, through the openai SDK: nothing is prefilled twice, and no reply changes by it.

What was prefilled is read from the model's own calls, the fewest possible comes from
minimum_prefill.py. Every word of every reply must be the likeliest by a cold run of the plain
model.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import start_llm as s
from cold_reference import Oracle
from minimum_prefill import Fed, Request, common_prefix, fewest, prefilled
from nights import at_night
from server_fixture import (
    MAX_WAIT_SECONDS,
    Exchange,
    Message,
    Served,
    Talk,
    connections,
    join_chunks,
    user,
    wait_until,
)
from tiny_models import DENSE, HYBRID, SLIDING, TOOLS

MOST = 1.02  # prefilled / fewest
CROWD_TOKENS = 4096
SLICE_TOKENS = 256


# -- servers ---------------------------------------------------------------------------------------


pytestmark = pytest.mark.covering(1, over="module")
KINDS = (HYBRID, DENSE, SLIDING)
WITH_STATE = (HYBRID, SLIDING)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def warm(kind, models):
    with Served(models(kind), prefill_step_size=SLICE_TOKENS) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(kind, models):
    return Oracle(models(kind), at_once=SLICE_TOKENS)


@pytest.fixture
def served(warm):
    warm.forget()
    return warm


# -- scenarios -------------------------------------------------------------------------------------


def three_conversations(served: Served) -> None:
    """Interleaved, then at once."""
    talks = [Talk(served, seed) for seed in (6, 7, 8)]
    for _ in range(2):
        for talk in talks:
            talk.step()
    with ThreadPoolExecutor(len(talks)) as pool:
        list(pool.map(lambda talk: [talk.step() for _ in range(2)], talks))


def cold_crowd(served: Served) -> None:
    """Eight at once on one prefix that nobody has computed yet, and a stranger among them."""
    novel = Talk(served, 9).words(CROWD_TOKENS * 3 // 8)
    talks = [Talk(served, seed) for seed in range(90, 98)]
    n_shared = share_system(served, talks, novel)
    # All but the last 45 tokens in whole slices: those who wait must not begin before the rest.
    n_lacking = (45 - n_shared) % SLICE_TOKENS
    n_shared = share_system(served, talks, novel + " the" * n_lacking)

    assert n_shared > CROWD_TOKENS
    assert n_shared % SLICE_TOKENS == 45

    with ThreadPoolExecutor(len(talks)) as pool:
        steps = [pool.submit(talk.step) for talk in talks]
        wait_until(lambda: len(served.recorder.fed) > 8)
        Talk(served, 98).step()
        for step in steps:
            step.result()


def share_system(served: Served, talks: list[Talk], content: str) -> int:
    """Give all the same system prompt; how many tokens their prompts have in common now."""
    for talk in talks:
        talk.messages[0] = {"role": "system", "content": content}
    prompts = [served.scribe.prompt(talk.messages, {"tools": TOOLS}) for talk in talks]
    return min(common_prefix(prompts[0], prompt) for prompt in prompts[1:])


def cancelled_prefill(served: Served) -> None:
    """Given up at half the prefill, then asked again."""
    talk = Talk(served, 10)
    talk.messages[1] = user(talk.words(1200))
    give_up_halfway(served, talk.messages)
    talk.step()


def divergence_everywhere(served: Served) -> None:
    """At every message boundary of a tool loop of five steps, in random order."""
    talk = Talk(served, 11)
    # Of one argument: a forced call has its arguments in the schema's order.
    choice = {"type": "function", "function": {"name": "bash"}}
    steps = [talk.step(tool_choice=choice) for _ in range(5)]
    boundaries = list(range(1, len(steps[-1].messages) + 2))  # the last reply included
    random.Random(12).shuffle(boundaries)
    for boundary in boundaries:
        exchange = talk.branch(boundary, seed=boundary).step()
        check_restored_within_one_message(served, exchange)


def check_restored_within_one_message(served: Served, exchange: Exchange) -> None:
    """What is reused reaches back no further than to the last message that is not new."""
    *past, _, _ = exchange.messages
    if "user" in (message["role"] for message in past):
        past_prompt = served.scribe.prompt(
            past, exchange.fields, add_generation_prompt=False
        )
        prompt = served.scribe.prompt(exchange.messages, exchange.fields)
        # What follows the end mark of a reply is no part of the reply.
        assert exchange.n_cached >= common_prefix(past_prompt, prompt) - 1


SCENARIOS = [three_conversations, cold_crowd, cancelled_prefill, divergence_everywhere]


def give_up_halfway(served: Served, messages: list[Message]) -> None:
    """Close a streamed request at half its prefill; the model waits until the server sees that."""
    prompt = served.scribe.prompt(messages, {"tools": TOOLS})
    halfway = threading.Event()
    has_left = threading.Event()
    held = []

    def hold(rows: list[Fed]) -> None:
        if rows[0].at >= len(prompt) // 2:
            held.append(rows[0])
            halfway.set()
            has_left.wait(MAX_WAIT_SECONDS)

    with served.holding(hold):
        with served.stream(messages, tools=TOOLS, temperature=0):
            assert halfway.wait(MAX_WAIT_SECONDS)
            n_connections = connections()
        wait_until(lambda: connections() < n_connections)
        has_left.set()

    wait_until(lambda: held[0] in served.recorder.fed)
    reached = held[0].at + len(held[0].tokens)
    assert reached < len(prompt) * 3 // 4

    served.given_up.append(Request(prompt, reached=reached))


# -- what holds in all of them ---------------------------------------------------------------------


def check_usage(served: Served, exchanges: list[Exchange], *, n_prefilled: int) -> None:
    """cached_tokens are the prompt tokens that the model was not given: in all, and where a request
    ran alone, of each."""
    n_claimed = sum(e.usage["prompt_tokens"] - e.n_cached for e in exchanges)
    n_given_up = sum(request.reached for request in served.given_up)
    assert n_claimed == n_prefilled - n_given_up

    spans = [exchange.span for exchange in exchanges]
    if any(span[1] > next_span[0] for span, next_span in pairwise(spans)):
        return

    for exchange in exchanges:
        calls = served.recorder.fed[slice(*exchange.span)]
        n_given = prefilled(calls, [served.request(exchange)])
        assert exchange.usage["prompt_tokens"] - exchange.n_cached == n_given


def cold_logprobs_of(oracle: Oracle, request: Request) -> np.ndarray:
    """Of every token of the vocabulary, for each token of the reply."""
    tokens = (*request.prompt, *request.reply[:-1])
    return oracle.logprobs(tokens, n=len(request.reply))


@pytest.fixture
def check_replies(served, oracle):
    """Every word is the likeliest by a cold run, unless words were ruled out."""

    def check(exchanges: list[Exchange]) -> None:
        for exchange in exchanges:
            if "tool_choice" not in exchange.fields:
                request = served.request(exchange)
                cold_logprobs = cold_logprobs_of(oracle, request)
                assert cold_logprobs.argmax(axis=-1).tolist() == list(request.reply)

    return check


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda x: x.__name__)
def test_nothing_is_prefilled_twice(served, check_replies, kind, table, scenario):
    scenario(served)
    exchanges = sorted(served.exchanges, key=lambda exchange: exchange.span)
    requests = [*served.given_up, *map(served.request, exchanges)]
    n_prefilled = prefilled(served.recorder.fed, requests)
    n_fewest = fewest(requests, served.scribe.turns if kind in WITH_STATE else None)
    ratio = n_prefilled / sum(n_fewest)
    table(
        f"{kind:12} {scenario.__name__:28} {len(requests):3} requests  "
        f"prefilled {n_prefilled:6}  fewest {sum(n_fewest):6}  ratio {ratio:.4f}"
    )

    assert ratio <= MOST, n_fewest
    check_usage(served, exchanges, n_prefilled=n_prefilled)
    check_replies(exchanges)


def note_submits(engine, monkeypatch):
    """The handles, and for each the stop reasons of those before it when it was submitted."""
    submit = engine.submit
    handles = []
    earlier_stop_reasons = []

    def submit_and_note(request):
        handle = submit(request)
        earlier_stop_reasons.append([earlier.stop_reason for earlier in handles])
        handles.append(handle)
        return handle

    monkeypatch.setattr(engine, "submit", submit_and_note)
    return handles, earlier_stop_reasons


def test_a_wrong_guess_is_taken_back_before_a_word_leaves(
    served, check_replies, monkeypatch
):
    """The client gets what a cold run says; the same template is guessed at no more."""
    render_after = s.Splice._render_after
    n_asked = []

    def guess_wrongly(splice, past_messages):
        rendered = render_after(splice, past_messages)
        n_asked.append(len(past_messages))
        if len(past_messages) < 15:  # the whole past has more messages
            ids = np.append(rendered.ids, rendered.ids[-1])
            rendered = replace(rendered, text=f"{rendered.text}.", ids=ids)
        return rendered

    talk = Talk(served, 77)
    for _ in range(11):
        talk.step()
    monkeypatch.setattr(served.state.stores.planner, "unguessable", {})
    monkeypatch.setattr(s.Splice, "_render_after", guess_wrongly)
    n_before = served.state.metrics.snapshot()["ledger_seam_fallback"]
    request = served.parse(talk.messages, tools=TOOLS)
    n_counted = s.count_tokens_body(served.state, request)["input_tokens"]

    assert len(n_asked) == 3
    assert n_asked[0] < n_asked[1] == n_asked[2]

    served.state.stores.planner.unguessable.clear()
    handles, earlier_stop_reasons = note_submits(served.state.engine, monkeypatch)
    first = talk.step()
    second = talk.step()
    assert len(handles) == 3
    assert earlier_stop_reasons[1] == ["cancelled"]
    assert len(n_asked) == 7
    assert min(n_asked[4:]) > 15

    check_replies([first, second])
    assert n_counted == first.usage["prompt_tokens"]
    assert served.state.metrics.snapshot()["ledger_seam_fallback"] == n_before


# -- what a client sees besides --------------------------------------------------------------------


def test_a_seed_says_the_same_alone_and_in_a_batch_of_eight(served):
    talks = [Talk(served, seed) for seed in range(200, 208)]
    share_system(served, talks, talks[0].words(700))  # rows that long need no padding
    fields = {
        "temperature": 0.8,
        "logit_bias": {str(served.scribe.end): -100},  # it goes on to max_tokens
        "max_tokens": 40,
        "tools": TOOLS,
    }
    alone = served.ask(talks[3].messages, seed=3, **fields)
    served.forget()
    everyone_asked = threading.Event()
    with (
        served.holding(lambda _rows: everyone_asked.wait(MAX_WAIT_SECONDS)),
        ExitStack() as stack,
    ):
        streams = []
        for seed, talk in enumerate(talks):
            stream = served.stream(talk.messages, seed=seed, **fields)
            streams.append(stack.enter_context(stream))
        everyone_asked.set()
        replies = [join_chunks(chunks)[0] for chunks in streams]

    assert served.recorder.n_rows_most == 8
    assert replies[3]["reasoning_content"] == alone.answer["reasoning_content"]
    assert replies[3]["content"] == alone.answer["content"]
    assert len({message["reasoning_content"] for message in replies}) > 4


@pytest.mark.parametrize("n_best", [3, *map(at_night, (0, 20))])
def test_log_probabilities_are_those_of_a_cold_run_best_first(
    served, oracle, n_best, monkeypatch
):
    """The same in a stream as in a whole reply."""
    talk = Talk(served, 310)
    bodies = []
    create = served._create

    def create_and_note(*args, **kwargs):
        bodies.append(create(*args, **kwargs))
        return bodies[-1]

    monkeypatch.setattr(served, "_create", create_and_note)
    fields = {"logprobs": True, "top_logprobs": n_best}
    exchange = served.ask(talk.messages, stream=False, **fields)
    entries = bodies[0].choices[0].logprobs.content

    streamed = []
    with served.stream(
        talk.messages, temperature=0, tools=TOOLS, max_tokens=400, **fields
    ) as chunks:
        choices = [choice for chunk in chunks for choice in chunk.choices]
    for choice in choices:
        if choice.logprobs:
            streamed += choice.logprobs.content

    assert streamed == entries

    request = served.request(exchange)
    cold = cold_logprobs_of(oracle, request)
    for entry, token, row in zip(entries, request.reply, cold, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert entry.token == served.scribe.text([token])
        top_logprobs = [top.logprob for top in entry.top_logprobs]
        largest = sorted(row, reverse=True)[:n_best]
        assert top_logprobs == pytest.approx(largest, abs=1e-4)
        assert top_logprobs == sorted(top_logprobs, reverse=True)


def test_arguments_leave_before_the_last_token_of_their_call_is_generated(served):
    """The model does not go on to that token before the client has seen a piece of them."""
    talk = Talk(served, 300)
    exchange = talk.step(tool_choice="required")
    request = served.request(exchange)
    last = len(request.prompt) + request.reply.index(served.scribe.call_end)
    arrived = threading.Event()
    in_time = []

    def hold(rows: list[Fed]) -> None:
        if rows[0].at == last - 1:
            in_time.append(arrived.wait(MAX_WAIT_SECONDS))

    with (
        served.holding(hold),
        served.stream(exchange.messages, **exchange.fields) as chunks,
    ):
        for chunk in chunks:
            deltas = [choice.delta.model_dump() for choice in chunk.choices]
            pieces = [piece for delta in deltas for piece in delta["tool_calls"] or ()]
            if any(piece["function"]["arguments"] for piece in pieces):
                arrived.set()

    assert in_time == [True]


# Cut off after five tokens, a thought ends in one of these words, which may still become a stop.
CUT = {
    "max_tokens": 5,
    "stop": [f" {word} moon" for word in ("the", "this", "that", "these")],
}


def test_streamed_and_whole_answers_are_the_same(served):
    ends = {"stop", "tool_calls", "length"}
    for seed in range(40):
        reasons = {exchange.finish_reason for exchange in served.exchanges}
        if seed >= 8 and reasons == ends:
            break
        talk = Talk(served, 400 + seed)
        is_thinking = seed % 2 == 0
        fields = {"extra_body": {"enable_thinking": is_thinking}}
        if seed % 4 == 0:
            fields.update(CUT)
        streamed = served.ask(talk.messages, stream=True, **fields)
        plain = served.ask(talk.messages, stream=False, **fields)

        assert streamed.said == plain.said
        assert streamed.finish_reason == plain.finish_reason
        assert streamed.n_generated == plain.n_generated
        assert ("reasoning_content" in plain.said) == is_thinking

    assert reasons == ends
