"""Each family of vision models: the same logits as mlx-vlm's own path, cold; the tower once."""

import sys
from hashlib import sha256

import mlx.core as mx
import numpy as np
import pytest
import start_llm as s
from mlx_lm.utils import load_tokenizer
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_model, load_processor
from tiny_families import FAMILIES, tiny_family
from tiny_models import TOOLS
from vision_fixture import ImageTurns, Seeing, picture, shown

SYSTEM = {"role": "system", "content": "You look at pictures and say what they are."}
A, B, C = (picture(seed, 240, 160) for seed in (1, 2, 3))
KEPT_APART = (
    "input_ids",
    "pixel_values",
    "attention_mask",
)  # as upstream's generate_step does


class Family(Seeing):
    """A server on a tiny model of a family; its oracle goes the way of mlx-vlm's generate_step."""

    def _plain(self):
        self.oracle, self.processor = (
            load_model(self.folder),
            load_processor(self.folder, False),
        )
        self.processor.tokenizer.backend_tokenizer.post_processor = (
            None  # the template says it all
        )
        self.tokenizer = load_tokenizer(self.folder)
        (self.pad,) = self.ids(self.family.pad)
        start = self.ids("<|im_start|>")
        heads = ("system\n", "user\n", "user\n<tool_response>")
        self.turns = ImageTurns(
            start[0], *(self.ids(f"<|im_start|>{name}") for name in heads)
        )

    def ids(self, text):
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def inputs(self, messages):
        text, images = self.text(messages)
        opened = [s.SentImage(data, "").decode() for data in images]
        return dict(self.processor(text=[text], images=opened or None))

    def prompt(self, messages):
        """Token ids; of an image, from its first token to its last, numbers that no other has."""
        ids = np.array(self.inputs(messages)["input_ids"])[0].tolist()
        images = iter(self.text(messages)[1])
        breaks, marked, inside = self.ids("[IMG_BREAK]"), [], 0
        for token in ids:
            is_part = token == self.pad or (inside and (token,) == breaks)
            if is_part and not inside:
                base = (
                    int.from_bytes(sha256(next(images)).digest()[:5], "big") * 100_000
                )
            inside = inside + 1 if is_part else 0
            marked.append(-(base + inside) if inside else token)
        return tuple(marked)

    @property
    def is_hybrid(self):
        return any(hasattr(layer, "max_size") for layer in self.model.make_cache())

    def cold(self, messages, reply):
        """Logits `(len(reply), vocabulary)`."""
        given = self.inputs(messages)
        ids = np.array(given["input_ids"])[0].tolist()
        whole = mx.array([[*ids, *reply[:-1]]])
        rest = {name: value for name, value in given.items() if name not in KEPT_APART}
        if "mm_token_type_ids" in rest:
            rest["mm_token_type_ids"] = (whole == self.pad).astype(mx.int32)
        inner = self.oracle.language_model
        inner._rope_deltas = inner._position_ids = None
        pixels = given.get("pixel_values")
        pixels = (
            pixels
            if pixels is None or isinstance(pixels, mx.array)
            else mx.array(pixels)
        )
        rest = {
            n: v if isinstance(v, mx.array) else mx.array(v) for n, v in rest.items()
        }
        mask = mx.ones_like(whole)
        made = self.oracle.get_input_embeddings(
            whole, pixels, mask=mask, **rest
        ).to_dict()
        told = {
            **rest,
            **{name: value for name, value in made.items() if value is not None},
        }
        logits = inner(whole, cache=make_prompt_cache(inner), **told).logits
        return logits[0, len(ids) - 1 :]

    def worst(self, one):
        logits = self.cold(one.messages, one.reply)
        allowed = np.isfinite(one.logprobs)
        assert allowed.mean() > 0.99
        logits = mx.where(mx.array(allowed), logits, -mx.inf)
        cold = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        assert np.ptp(cold[allowed]) > 1, (
            "logits that say nothing cannot tell a wrong cache"
        )
        return float(np.abs(cold[allowed] - one.logprobs[allowed]).max())


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request, tmp_path_factory):
    folder = tiny_family(request.param, tmp_path_factory.getbasetemp())
    Family.family = FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        server = Family(folder, patch, log_root=str(tmp_path_factory.mktemp("logs")))
        server.tolerance = FAMILIES[request.param].tolerance
        yield server
        server.close()


@pytest.fixture(autouse=True)
def fresh(request):
    if "seeing" in request.fixturenames:
        request.getfixturevalue("seeing").forget()


def ask(seeing, messages):
    return seeing.ask(messages, max_tokens=12)


def then(one, *parts, **answer):
    reply = {"role": "assistant", "content": None, **one.answer, **answer}
    return [*one.messages, reply, shown(*parts)]


def judge(seeing, n_images):
    """Every reply is what a cold run says; nothing was fed or looked at that need not be."""
    assert max(seeing.worst(one) for one in seeing.seen) <= seeing.tolerance
    assert seeing.tower_runs == n_images
    fed, fewest = sum(one.prefilled for one in seeing.seen), sum(seeing.fewest())
    # where states are kept, not behind what opens the reply
    assert fed <= 1.02 * fewest + 5 * len(seeing.seen) * seeing.is_hybrid
    assert seeing.state.metrics.snapshot()["vlm_retreat"] == 0
    assert "torch" not in sys.modules


def test_an_image_another_in_its_place_and_back(seeing):
    first = ask(seeing, [SYSTEM, shown("what is on this", A, "tell me")])
    ask(seeing, then(first, "and what else"))
    other = ask(seeing, [SYSTEM, shown("what is on this", B, "tell me")])
    again = ask(seeing, [SYSTEM, shown("what is on this", A, "tell me")])
    assert not np.array_equal(first.logprobs[0], other.logprobs[0]), (
        "the image says nothing"
    )
    assert again.reply == first.reply
    judge(seeing, n_images=2)


def test_two_images_and_a_change_side_by_side_and_apart(seeing):
    one = ask(seeing, [SYSTEM, shown(A, "and", B)])
    ask(seeing, then(one, "a third one\n", C, content="stones"))
    ask(seeing, [SYSTEM, shown(A, "and", C)])
    ask(seeing, [SYSTEM, shown(B, A, "\nand so on")])
    judge(seeing, n_images=3)


def test_features_are_taken_again_in_another_conversation(seeing):
    for words in ("what is on this", "a conversation of its own", "and one more"):
        ask(seeing, [SYSTEM, shown(words, A)])
    judge(seeing, n_images=1)


def test_text_alone_and_beside_images_in_one_batch(seeing):
    talks = [
        [SYSTEM, shown(f"number {i}", *[A, B][: i % 3], "say it")] for i in range(6)
    ]
    asked = {"model": "x", "temperature": 0, "max_tokens": 24, "tools": TOOLS}

    def one(i):
        said = seeing.openai.chat.completions.create(messages=talks[i], **asked)
        return said.choices[0].message.content

    replies = seeing.at_once(one, len(talks))
    for talk, reply in zip(talks, replies, strict=True):
        alone = seeing.ask(talk, max_tokens=24)
        assert seeing.worst(alone) <= seeing.tolerance
        assert reply == alone.answer.get("content")


def test_upstream_differs_cold_to_cold_where_we_allow_a_tolerance(seeing):
    """A window that wrapped holds its keys in another order than one that was filled at once."""
    inner = seeing.oracle.language_model
    ids = mx.random.randint(300, 900, (1, 90), key=mx.random.key(1))

    def fed(*sizes):
        cache, at, logits = make_prompt_cache(inner), 0, None
        for size in sizes:
            places = mx.broadcast_to(mx.arange(at, at + size), (3, 1, size))
            told = {"position_ids": places} if hasattr(inner, "get_rope_index") else {}
            logits, at = (
                inner(ids[:, at : at + size], cache=cache, **told).logits,
                at + size,
            )
        return np.array(logits[0, -1])

    apart = np.abs(fed(90) - fed(80, *[1] * 10)).max()
    assert (apart == 0.0) == (seeing.tolerance == 0.0)
    assert apart <= seeing.tolerance


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
    asked = [{"role": "user", "content": "what is it"}]
    assert renderer.render(asked, tools=[], kwargs={}) == "USER: what is it ASSISTANT:"
    assert loaded.vision.phrase == "<image>\n"


def refusal(folder):
    with pytest.raises(s.ModelError) as refused:
        s.load_model(folder, s.Config(model_path=str(folder), model_kind="vision"))
    return str(refused.value)


def test_a_processor_that_does_not_work_is_refused_at_start(tmp_path):
    folder = tiny_family("gemma3", tmp_path)
    (folder / "processor_config.json").write_text('{"image_seq_length": 0}')
    assert "a blank image: this model's processor makes no tokens of it" in refusal(
        folder
    )


def test_what_no_layer_would_be_given_is_refused_at_start(tmp_path, monkeypatch):
    from mlx_vlm.models.base import InputEmbeddingsFeatures
    from mlx_vlm.models.llava import llava

    make = llava.Model.get_input_embeddings

    def crossed(self, *args, **given):
        made = make(self, *args, **given).inputs_embeds
        return InputEmbeddingsFeatures(made, cross_attention_states=made)

    monkeypatch.setattr(llava.Model, "get_input_embeddings", crossed)
    assert "its layers want {'cross_attention_states'}" in refusal(
        tiny_family("llava", tmp_path)
    )
