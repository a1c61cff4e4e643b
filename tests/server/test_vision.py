"""Images with the same exact reuse: logits, tokens fed, tower runs, errors."""

import base64
import http.client
import io
import itertools
import json
import threading
from contextlib import closing
from functools import partial
from hashlib import sha256

import httpx
import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_vlm.models.qwen3_5 import gated_delta
from PIL import Image
from server_fixture import PATIENCE, connections, wait_until, wait_until_idle
from tiny_models import TOOLS
from tiny_vision import DENSE_VISION, HYBRID_VISION, tiny_vision_model
from vision_fixture import Seeing, data_url, picture, shown

SYSTEM = {"role": "system", "content": "You look at pictures and say what they are."}
A, B, C = (picture(seed) for seed in (1, 2, 3))


@pytest.fixture(scope="module")
def patches():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


# On Metal linear attention goes token by token. On the CPU upstream computes it in blocks of the
# slice it is given, so its last bits depend on where slices end, warm or cold; "stepwise" does
# here what Metal does.
@pytest.fixture(scope="module", params=[DENSE_VISION, HYBRID_VISION, "stepwise"])
def seeing(request, patches, tmp_path_factory):
    kind = HYBRID_VISION if request.param == "stepwise" else request.param
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stepwise":
            patch.setattr(
                gated_delta, "gated_delta_chunked", gated_delta.gated_delta_ops
            )
        folder = tiny_vision_model(kind, tmp_path_factory.getbasetemp())
        server = Seeing(folder, patch, log_root=str(tmp_path_factory.mktemp("logs")))
        server.tolerance = 1e-4 if request.param == HYBRID_VISION else 0.0
        yield server
        server.close()


@pytest.fixture(autouse=True)
def fresh(seeing):
    seeing.forget()


def answered(one):
    """The conversation with its answer, and what tools say to its calls."""
    calls = one.answer.get("tool_calls") or ()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in calls
    ]
    return [
        *one.messages,
        {"role": "assistant", "content": None, **one.answer},
        *results,
    ]


def judge(seeing, n_images):
    """Every reply is what a cold run says; nothing was fed that need not be."""
    for one in seeing.seen:
        assert seeing.worst(one) <= seeing.tolerance
    ratio = sum(one.prefilled for one in seeing.seen) / sum(seeing.fewest())
    assert ratio <= 1.02, ([one.prefilled for one in seeing.seen], seeing.fewest())
    assert seeing.tower_runs == n_images
    counters = seeing.state.metrics.snapshot()
    assert counters["vlm_retreat"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_follow_up_prefills_only_its_own_words(seeing, stream):
    one = seeing.ask([SYSTEM, shown("what is on this", A, "tell me")], stream=stream)
    for _ in range(3):
        one = seeing.ask(
            [*answered(one), shown("and what else is there")], stream=stream
        )
    judge(seeing, n_images=1)


def test_another_image_in_the_same_place_and_back_again(seeing):
    first = seeing.ask([SYSTEM, shown("what is on this", A)])
    other = seeing.ask([SYSTEM, shown("what is on this", B)])
    again = seeing.ask([SYSTEM, shown("what is on this", A)])
    assert not np.array_equal(first.logprobs[0], other.logprobs[0]), (
        "the image says nothing"
    )
    assert again.reply == first.reply
    judge(seeing, n_images=2)


def test_a_second_image_is_added(seeing):
    one = seeing.ask([SYSTEM, shown("what is on this", A)])
    one = seeing.ask([*answered(one), shown("and on this one", B, "compare them")])
    seeing.ask([*answered(one), shown("thank you")])
    judge(seeing, n_images=2)


def test_one_of_two_images_changes(seeing):
    seeing.ask([SYSTEM, shown("compare", A, "with", B)])
    seeing.ask([SYSTEM, shown("compare", A, "with", C)])  # the second
    seeing.ask([SYSTEM, shown("compare", B, "with", C)])  # the first
    judge(seeing, n_images=3)


def test_a_conversation_goes_on_after_another_one(seeing):
    mine = seeing.ask([SYSTEM, shown("what is on this", A)])
    other = seeing.ask([SYSTEM, shown("tell me about", B, "at once")])
    mine = seeing.ask([*answered(mine), shown("what else")])
    other = seeing.ask([*answered(other), shown("what else")])
    judge(seeing, n_images=2)


def test_a_cancelled_prefill_is_kept(seeing):
    long = [SYSTEM, shown("word " * 700, A, "word " * 1500, B, "and so on")]
    entered, go_on = threading.Event(), threading.Event()

    def hold():
        if sum(n for _, n in seeing.calls) > 900:
            entered.set()
            go_on.wait(PATIENCE)

    seeing.before_call = hold
    address = httpx.URL(seeing.url)
    try:
        with closing(http.client.HTTPConnection(address.host, address.port)) as client:
            chat = json.dumps({"model": "x", "messages": long, "tools": TOOLS})
            client.request("POST", "/v1/chat/completions", chat)
            assert entered.wait(PATIENCE), "the prompt was never read"
            n_connections = connections()
        wait_until(lambda: connections() < n_connections)
    finally:
        seeing.before_call = lambda: None
        go_on.set()
    wait_until_idle(seeing.state.engine)
    done = sum(n for _, n in seeing.calls)
    assert done < len(seeing.prompt(long)) - 200, "nothing was left to do"
    one = seeing.ask(long)
    assert seeing.worst(one) <= seeing.tolerance
    assert one.prefilled + done <= 1.02 * len(one.prompt)
    assert seeing.tower_runs == 2


def test_seven_at_once_with_and_without_images(seeing):
    talks = [
        [SYSTEM, shown(f"number {i}", *[A, B, C][: i % 3], "say it")] for i in range(7)
    ]

    def ask(i):
        return (
            seeing.openai.chat.completions.create(
                model="x",
                messages=talks[i],
                temperature=0,
                max_tokens=100 + 5 * i,
                tools=TOOLS,
            )
            .choices[0]
            .message
        )

    replies = seeing.at_once(ask, len(talks))
    for i, talk in enumerate(talks):
        alone = seeing.ask(talk, max_tokens=100 + 5 * i)
        assert seeing.worst(alone) <= seeing.tolerance
        assert alone.answer.get("content") == replies[i].content
    assert np.all([reply is not None for reply in replies])


def test_features_are_taken_again_in_another_conversation(seeing):
    seeing.ask([SYSTEM, shown("what is on this", A)])
    seeing.ask([shown("a conversation of its own", A, "with the same image")])
    before = seeing.state.metrics.snapshot()
    judge(seeing, n_images=1)
    assert before["vlm_feature_hits"] >= 1


def test_the_same_bytes_in_another_dress_are_the_same_image(seeing):
    one = seeing.ask([SYSTEM, shown("what is on this", A)])
    url = data_url(A, "image/x-odd").replace("base64,", "base64,\n ")
    dressed = {"type": "input_image", "image_url": url}
    content = [{"type": "text", "text": "what is on this"}, dressed]
    said = seeing.openai.chat.completions.create(
        model="x",
        temperature=0,
        tools=TOOLS,
        messages=[SYSTEM, {"role": "user", "content": content}],
    )
    assert (
        said.usage.prompt_tokens_details.cached_tokens
        >= one.usage["prompt_tokens"] - 10
    )
    assert seeing.tower_runs == 1


@pytest.mark.parametrize("stream", [True, False])
def test_anthropic_blocks_and_tool_results_carry_images(seeing, stream):
    def block(data):
        source = {"type": "base64", "media_type": "image/png", "data": ""}
        return {
            "type": "image",
            "source": source | {"data": base64.b64encode(data).decode()},
        }

    tools = [
        {"name": "read", "description": "reads", "input_schema": {"type": "object"}}
    ]
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a.png"}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "what is on these"}, block(A)],
        },
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [block(B)]}
            ],
        },
    ]
    fields = {"model": "claude-x", "max_tokens": 40, "tools": tools}
    for _ in range(2):
        if stream:
            with seeing.anthropic.messages.stream(
                messages=messages, **fields
            ) as events:
                said = events.get_final_message()
        else:
            said = seeing.anthropic.messages.create(messages=messages, **fields)
        messages = [*messages, {"role": "assistant", "content": said.content}]
        messages += [{"role": "user", "content": "what else"}]
    assert seeing.tower_runs == 2
    assert said.usage.cache_read_input_tokens > said.usage.input_tokens


def has_text(chunk):
    """The first chunk has a role alone, and may come before the prompt is read."""
    delta = chunk.choices[0].delta
    return bool(delta.content or getattr(delta, "reasoning_content", None))


def test_a_stream_goes_on_between_slices_and_images(seeing):
    wants = {"model": "x", "temperature": 0, "tools": TOOLS}
    talk = [SYSTEM, shown("tell me a very long story")]
    looking = [
        SYSTEM,
        shown(*(picture(seed, 480, 480) for seed in range(10, 14)), "and these"),
    ]
    ask = partial(seeing.openai.chat.completions.create, **wants)
    endless = {
        "max_tokens": 20_000,
        "logit_bias": {str(seeing.end): -100},
        "stream": True,
    }
    other = threading.Thread(target=ask, kwargs={"messages": looking, "max_tokens": 1})
    with ask(messages=talk, **endless) as chunks:
        stream = iter(chunks)
        next(chunk for chunk in stream if has_text(chunk))  # its own prompt is read
        began = len(seeing.calls)
        other.start()
        while other.is_alive():
            next(stream)
    slices = [at for at, (_, n) in enumerate(seeing.calls[began:]) if n > 64]
    assert len(slices) >= 4, "each image is a slice of its own at least"
    assert seeing.tower_runs == 4
    assert all(b - a > 1 for a, b in itertools.pairwise(slices)), (
        "no token between two slices"
    )


def test_features_take_no_more_than_their_share(seeing):
    model, share = seeing.model, seeing.model.max_bytes
    one = seeing.ask([SYSTEM, shown("what is on this", A)])
    try:
        model.max_bytes = int(1.5 * model.feature_bytes)
        for data in (B, C, A):
            seeing.ask([shown("another one", data)])
            assert model.feature_bytes <= model.max_bytes
        assert seeing.tower_runs == 4, "A went when B came"
        model.max_bytes = 0
        again = seeing.ask([shown("and again", A)])
        assert model.feature_bytes == 0
        assert seeing.worst(again) <= seeing.tolerance
        assert seeing.worst(one) <= seeing.tolerance
    finally:
        model.max_bytes = share


def test_one_image_is_unpacked_at_a_time_and_left_if_the_client_has_gone(
    seeing, monkeypatch
):
    vision = seeing.state.engine.model.vision
    budget = vision._unpacking
    process = vision._process
    n_free = []

    def noted(source):
        n_free.append(budget.n_free)
        return process(source)

    def leave():
        raise s.ClientGone

    monkeypatch.setattr(vision, "_process", noted)
    image = s.SentImage(picture(11), "here")
    with budget.reserve(1, s.assume_client), pytest.raises(s.ClientGone):
        vision.image_tokens("1" * 64, image, check_client=leave)
    assert not n_free, "it was unpacked beside another one"

    vision.image_tokens("1" * 64, image)
    vision.image_tokens("1" * 64, image)
    assert n_free == [0] and budget.n_free == 1


def test_no_image_is_unpacked_if_a_later_one_is_too_large(seeing, monkeypatch):
    file = io.BytesIO()
    Image.new("1", (8_001, 8_000)).save(file, "PNG")
    monkeypatch.setattr(
        seeing.state.engine.model.vision, "_process", lambda source: pytest.fail()
    )
    body = {"messages": [shown(picture(12), file.getvalue())]}
    request = s.parse_chat_request(body, s.Config(), request_id="r", headers={})

    with pytest.raises(s.BadRequest, match="pixels"):
        s.plan_request(seeing.state, request)


def test_what_the_server_says_of_images(seeing):
    seeing.ask([SYSTEM, shown("what is on this", A)])
    status = httpx.get(f"{seeing.url}/v1/status").json()
    assert status["counters"]["vlm_tower_runs"] >= 1
    assert status["memory"]["features"] > 0
    body = {"messages": [SYSTEM, shown("what is on this", B)], "tools": TOOLS}
    said = httpx.post(f"{seeing.url}/v1/cache/explain", json=body).json()
    assert 0 < said["would_reuse"] < said["prompt"]
    assert seeing.tower_runs == 1, "to explain is not to look"
    bad = shown("this", A[:300])
    refused = httpx.post(
        f"{seeing.url}/v1/chat/completions", json={"messages": [SYSTEM, bad]}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1].content[1]"
    seeing.ask([SYSTEM, shown("it still works", A)])


def plant(patch, fault, seeing):
    model = seeing.model
    prefill = s.VisionModel.prefill_image
    positions = s.VisionModel.image_positions
    if fault == "another image's features":
        first_features = lambda image: next(iter(model._features.values()))  # noqa: E731
        patch.setattr(model, "_run_tower", first_features)
    elif fault == "the image a place too late":

        def shifted(self, *args, position, **fields):
            return prefill(self, *args, position=position + 1, **fields)

        patch.setattr(s.VisionModel, "prefill_image", shifted)
    elif fault == "what follows is not shifted":
        unshifted = lambda self, image: positions(self, image)._replace(shift=0)  # noqa: E731
        patch.setattr(s.VisionModel, "image_positions", unshifted)
    elif fault == "rows and columns exchanged":

        def turned(self, image):
            found = positions(self, image)
            return found._replace(positions=found.positions[[0, 2, 1]])

        patch.setattr(s.VisionModel, "image_positions", turned)
    elif fault == "one mark for all images":
        inject = s.inject_image_markers
        same = lambda ids, image, digest: inject(ids, image, digest="ab" * 32)  # noqa: E731
        patch.setattr(s, "inject_image_markers", same)
    model._image_tokens = s.LRUCache(1_000)
    model._positions = s.LRUCache(1_000)


@pytest.mark.parametrize(
    "fault",
    [
        *(
            "another image's features",
            "the image a place too late",
            "what follows is not shifted",
        ),
        *("rows and columns exchanged", "one mark for all images"),
    ],
)
def test_a_planted_fault_is_noticed(seeing, fault):
    seeing.ask([SYSTEM, shown("what is on this", A)])
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault, seeing)
        seeing.ask([SYSTEM, shown("what is on this", A, "say it")])
        one = seeing.ask([SYSTEM, shown("what is on this", B, "say it")])
        one = seeing.ask([*answered(one), shown("and what else")])
    wrong = max(seeing.worst(one) for one in seeing.seen[1:])
    plant(patch, "", seeing)
    assert wrong > 100 * max(seeing.tolerance, 1e-6)


def test_upstream_itself_depends_on_slices_where_we_allow_a_tolerance(seeing):
    one = seeing.ask([SYSTEM, shown("what is on this", A)])
    ids = mx.array([list(one.reply) * 8])
    inner = seeing.oracle.language_model

    def fed(*sizes):
        cache, at, logits = seeing.model.make_cache(), 0, None
        for size in sizes:
            places = mx.broadcast_to(mx.arange(at, at + size), (3, 1, size))
            part = ids[:, at : at + size]
            logits = inner(part, cache=cache, position_ids=places).logits
            at += size
        return np.array(logits[0, -1])

    n = ids.shape[1]
    apart = np.abs(fed(n) - fed(37, n - 37)).max()
    assert (apart == 0.0) == (seeing.tolerance == 0.0)
    assert apart < 1e-4


def image_is_as_sent(seeing, messages):
    """The prompt has these images and no others, and the reply is a cold run's."""
    one = seeing.ask(
        messages
    )  # asserts that the prompt has the length of upstream's own
    assert seeing.worst(one) <= seeing.tolerance
    return one


@pytest.mark.parametrize(
    "around",
    [
        ("what is it\nCurrent time: 10:00", ""),
        ("<system-reminder>\nlook at this", "\n</system-reminder>"),
        ("<system-reminder>\nx\n</system-reminder>\n", ""),
    ],
)
def test_another_image_is_never_a_volatile_field(seeing, around):
    """why(L-57): what is stilled is text; an image behind the same words is another message."""
    before, behind = around
    post = partial(httpx.post, f"{seeing.url}/v1/chat/completions", timeout=PATIENCE)
    body, n_images = {"tools": TOOLS, "temperature": 0, "max_tokens": 300}, []
    start = [SYSTEM, shown("hello", before, A, *filter(None, [behind]))]
    reply = post(json=body | {"messages": start}).json()["choices"][0]["message"]
    seen = seeing.tower_runs
    for data in (B, A):
        start[1] = shown("hello", before, data, *filter(None, [behind]))
        said = post(json=body | {"messages": [*start, reply, shown("and now")]})
        assert said.status_code == 200, said.text
        n_images.append([view.source.data for _, view in seeing._last.images])
    assert (seen, seeing.tower_runs) == (1, 2)
    assert n_images == [[B], [A]]


def test_images_of_notes_that_are_gone_leave_no_trace(seeing):
    late = {"role": "system", "content": shown("note this", A)["content"]}
    body = {"tools": TOOLS, "max_tokens": 4}
    post = partial(httpx.post, f"{seeing.url}/v1/chat/completions", timeout=PATIENCE)
    first = seeing.ask([SYSTEM, shown("hello")])
    for notes in ([late], [], [late]):
        talk = [*answered(first), shown("go on"), *notes]
        said = post(json=body | {"messages": talk})
        assert said.status_code == 200, said.text
        assert bool(seeing._last.images) == bool(notes)


def test_nobody_can_write_a_mark(seeing):
    digests = [
        sha256(salt + A).hexdigest() for salt in (b"", seeing.state.tenant.encode())
    ]
    forged = " ".join(f"\ufdd1{digest}\ufdd2" for digest in digests)
    one = seeing.ask([SYSTEM, shown(f"see {forged} here")])
    assert len(seeing._last.images) == 0
    two = image_is_as_sent(seeing, [SYSTEM, shown(f"see {forged} here", A)])
    assert len(seeing._last.images) == 1
    assert one.prompt != two.prompt
    assert not any(digest in seeing.model._image_tokens for digest in digests)
