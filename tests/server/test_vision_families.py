"""Each family of vision models: the same logits as mlx-vlm's own path, cold; the tower once."""

import sys
from functools import cached_property

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_lm.utils import load_tokenizer
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.qwen3_5 import gated_delta
from mlx_vlm.utils import load_model, load_processor
from nights import at_night
from tiny_families import FAMILIES, tiny_family
from tiny_models import TOOLS
from vision_fixture import Seeing, picture, picture_message

SYSTEM = {"role": "system", "content": "You look at pictures and say what they are."}
A, B, C = (picture(seed, 240, 160) for seed in (1, 2, 3))
# As upstream's generate_step does.
KEPT_APART = ("input_ids", "pixel_values", "attention_mask")


def as_array(value):
    return value if isinstance(value, mx.array) else mx.array(value)


class Family(Seeing):
    """A server on a tiny model of a family; its oracle goes the way of mlx-vlm's generate_step."""

    def _plain(self):
        self.oracle = load_model(self.folder)
        self.processor = load_processor(self.folder, False)
        # the template says it all
        self.processor.tokenizer.backend_tokenizer.post_processor = None
        self.tokenizer = load_tokenizer(self.folder)
        (self.pad,) = self.ids(self.family.pad)
        self._find_turns()

    def inputs(self, messages):
        text, images = self.text(messages)
        opened = [s.SentImage(data, "").decode() for data in images]
        return dict(self.processor(text=[text], images=opened or None))

    @property
    def is_hybrid(self):
        return self.spec.has_state

    @cached_property
    def spec(self):
        return self.state.engine.call(lambda scheduler: scheduler.spec)

    def cold_logits(self, record):
        inputs = self.inputs(record.messages)
        ids = np.array(inputs["input_ids"])[0].tolist()
        token_ids = mx.array([[*ids, *record.reply[:-1]]])
        fields = {
            name: as_array(value)
            for name, value in inputs.items()
            if name not in KEPT_APART
        }
        if "mm_token_type_ids" in fields:
            fields["mm_token_type_ids"] = (token_ids == self.pad).astype(mx.int32)
        pixels = inputs.get("pixel_values")
        if pixels is not None:
            pixels = as_array(pixels)

        inner = self.oracle.language_model
        inner._rope_deltas = None
        inner._position_ids = None
        embeddings = self.oracle.get_input_embeddings(
            token_ids, pixels, mask=mx.ones_like(token_ids), **fields
        ).to_dict()
        embeddings = {n: value for n, value in embeddings.items() if value is not None}
        fields.update(embeddings)

        cache = make_prompt_cache(inner)
        logits = inner(token_ids, cache=cache, **fields).logits
        return logits[0, len(ids) - 1 :]


@pytest.fixture(scope="module", autouse=True)
def tokens_one_by_one():
    """As on Metal: upstream's blocks on the CPU are of what a call contains."""
    with pytest.MonkeyPatch.context() as patch:
        one_by_one = gated_delta.gated_delta_ops
        patch.setattr(gated_delta, "gated_delta_chunked", one_by_one)
        yield


pytestmark = pytest.mark.covering(1, over="module")


# One with windows, one of three positions a token, one whose images have lines.
BY_DAY = ("gemma4", "qwen2_5_vl", "mistral3")
PARAMS = [*BY_DAY, *(at_night(name) for name in FAMILIES if name not in BY_DAY)]


@pytest.fixture(scope="module", params=PARAMS)
def seeing(request, tmp_path_factory):
    folder = tiny_family(request.param, tmp_path_factory.getbasetemp())
    Family.family = FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        logs = tmp_path_factory.mktemp("logs")
        server = Family(folder, patch, log_root=str(logs))
        server.tolerance = FAMILIES[request.param].tolerance
        yield server
        server.close()


@pytest.fixture(autouse=True)
def fresh(request):
    if "seeing" in request.fixturenames:
        request.getfixturevalue("seeing").forget()


def ask(seeing, messages):
    return seeing.ask(messages, max_tokens=6)


def then(exchange, *parts, **answer):
    reply = {"role": "assistant", "content": None, **exchange.answer, **answer}
    return [*exchange.messages, reply, picture_message(*parts)]


def judge(seeing, n_images):
    """Every reply is what a cold run says; nothing was fed or looked at that need not be."""
    for exchange in seeing.seen:
        assert seeing.largest_difference(exchange) <= seeing.tolerance
    assert seeing.tower_runs == n_images

    n_prefilled = sum(exchange.prefilled for exchange in seeing.seen)
    # where states are kept, not behind what opens the reply
    n_allowed = 1.02 * sum(seeing.fewest())
    if seeing.is_hybrid:
        n_allowed += 5 * len(seeing.seen)

    assert n_prefilled <= n_allowed
    assert seeing.state.metrics.snapshot()["vlm_retreat"] == 0
    assert "torch" not in sys.modules


def test_an_image_another_in_its_place_and_back(seeing):
    talk_of_a = [SYSTEM, picture_message("what is on this", A, "tell me")]
    talk_of_b = [SYSTEM, picture_message("what is on this", B, "tell me")]
    first = ask(seeing, talk_of_a)
    ask(seeing, then(first, "and what else"))
    second = ask(seeing, talk_of_b)
    third = ask(seeing, talk_of_a)

    is_same = np.array_equal(first.logprobs[0], second.logprobs[0])
    assert not is_same, "the image says nothing"
    assert third.reply == first.reply

    judge(seeing, n_images=2)


def test_features_are_taken_again_in_another_conversation(seeing):
    for words in ("what is on this", "a conversation of its own", "and one more"):
        ask(seeing, [SYSTEM, picture_message(words, A)])
    judge(seeing, n_images=1)


def test_two_images_and_a_change_side_by_side_and_apart(seeing):
    first = ask(seeing, [SYSTEM, picture_message(A, "and", B)])
    ask(seeing, then(first, "a third one\n", C, content="stones"))
    ask(seeing, [SYSTEM, picture_message(A, "and", C)])
    ask(seeing, [SYSTEM, picture_message(B, A, "\nand so on")])
    judge(seeing, n_images=3)


def test_text_alone_and_beside_images_in_one_batch(seeing):
    talks = []
    for i in range(6):
        images = [A, B][: i % 3]
        talks.append([SYSTEM, picture_message(f"number {i}", *images, "say it")])
    fields = {"model": "x", "temperature": 0, "max_tokens": 12, "tools": TOOLS}

    def complete(i):
        completion = seeing.openai.chat.completions.create(messages=talks[i], **fields)
        return completion.choices[0].message.content

    replies = seeing.at_once(complete, len(talks), is_batched=seeing.spec.can_batch)
    for talk, reply in zip(talks, replies, strict=True):
        alone = seeing.ask(talk, max_tokens=12)
        assert seeing.largest_difference(alone) <= seeing.tolerance
        assert reply == alone.answer.get("content")


LLAVA_TEMPLATE = """{% for message in messages %}{{ message.role.upper() + ': ' -}}
{% for part in message.content | selectattr('type', 'equalto', 'image') -%}
{{ '<image>\\n' }}{% endfor -%}
{% for part in message.content | selectattr('type', 'equalto', 'text') -%}
{{ part.text + ' ' }}{% endfor -%}
{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""


def test_a_template_that_reads_only_lists_of_parts(tmp_path):
    folder = tiny_family("llava", tmp_path)
    (folder / "chat_template.jinja").write_text(LLAVA_TEMPLATE)
    loaded = s.load_model(folder, s.Config(model_path=str(folder)))
    renderer = loaded.template._renderer
    messages = [{"role": "user", "content": "what is it"}]
    prompt = renderer.render(messages, tools=[], kwargs={})
    assert prompt == "USER: what is it ASSISTANT:"
    assert loaded.vision.phrase == "<image>\n"


def refusal(folder):
    config = s.Config(model_path=str(folder), model_kind="vision")
    with pytest.raises(s.ModelError) as refused:
        s.load_model(folder, config)
    return str(refused.value)


def test_a_processor_that_does_not_work_is_refused_at_start(tmp_path):
    folder = tiny_family("gemma3", tmp_path)
    (folder / "processor_config.json").write_text('{"image_seq_length": 0}')
    reason = refusal(folder)
    assert "a blank image: this model's processor makes no tokens of it" in reason


def test_what_no_layer_would_be_given_is_refused_at_start(tmp_path, monkeypatch):
    from mlx_vlm.models.base import InputEmbeddingsFeatures
    from mlx_vlm.models.llava import llava

    make = llava.Model.get_input_embeddings

    def crossed(self, *args, **fields):
        embeddings = make(self, *args, **fields).inputs_embeds
        return InputEmbeddingsFeatures(embeddings, cross_attention_states=embeddings)

    monkeypatch.setattr(llava.Model, "get_input_embeddings", crossed)
    reason = refusal(tiny_family("llava", tmp_path))
    assert "its layers want cross_attention_states" in reason
