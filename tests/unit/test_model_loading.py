"""MODEL: a folder or one sentence; exact text from ids; facts that other rooms may rely on."""

import json
import random
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
import start_llm as s
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from tiny_models import DENSE
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

SOURCE = Path(s.__file__)
TEXT = "héllo wörld, 你好 🙂🙂👩‍👩‍👧 def f(x):\n    return x\n\tcafé naïve 🇨🇭 "
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 4096


@pytest.fixture(scope="module")
def tiny(models: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 of random weights, in two weight files with an index."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    shutil.copytree(models(DENSE, context=CONTEXT), folder)
    weights = sorted(mx.load(str(folder / "model.safetensors")).items())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    mx.save_safetensors(str(folder / names[0]), dict(weights[:4]))
    mx.save_safetensors(str(folder / names[1]), dict(weights[4:]))
    (folder / "model.safetensors").unlink()
    index = {key: names[n >= 4] for n, (key, _) in enumerate(weights)}
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> s.LoadedModel:
    return s.load_model(tiny, s.Config(model_path=str(tiny)))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal(path: str) -> str:
    """The one sentence that resolve_model ends with."""
    with pytest.raises(s.ModelError) as caught:
        s.resolve_model(s.Config(model_path=path))
    return sentence(caught.value)


def load_refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(s.ModelError) as caught:
        s.load_model(folder, s.Config(model_path=str(folder), **settings))
    return sentence(caught.value)


def sentence(error: s.ModelError) -> str:
    assert "\n" not in str(error)
    assert str(error)
    return str(error)


# -- folders ---------------------------------------------------------------------


def test_a_complete_folder_is_taken_as_it_is(tiny, monkeypatch):
    assert s.resolve_model(s.Config(model_path=str(tiny))) == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert s.resolve_model(s.Config(model_path="~/tiny-qwen3")) == tiny


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where start-llm.py, which seems to lie elsewhere, looks for the program that fetches."""
    (tmp_path / "home" / "scripts" / "helpers").mkdir(parents=True)
    monkeypatch.setattr(s, "__file__", str(tmp_path / "home" / "start-llm.py"))
    return tmp_path / "home" / "scripts" / "helpers" / "fetch_model.py"


def write_answer(program: Path, answer: object) -> Path:
    """A program that prints this at last; in a file it leaves what it was asked."""
    arguments = program.with_name("arguments.json")
    program.write_text(
        "import json, pathlib, sys\n"
        f"pathlib.Path({str(arguments)!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"print('noise'); print({str(answer)!r})"
    )
    return arguments


@pytest.mark.parametrize("name", ["org/tiny", "demo", "-x", "~/nothing/here"])
def test_what_is_no_folder_is_for_the_script(script, tiny, name):
    arguments = write_answer(script, tiny)
    assert s.resolve_model(s.Config(model_path=name)) == tiny

    memory = f"--memory-bytes={s.memory_limit(s.Config(model_path=name))}"
    expected = [memory, "--setting=MODEL_PATH", "--", name]
    assert json.loads(arguments.read_text()) == expected


def test_a_draft_model_is_named_and_fetched_as_the_model_is(script, tiny, copy):
    arguments = write_answer(script, copy)
    page = "https://huggingface.co/org/draft/tree/main"

    loaded = s.load_model(tiny, s.Config(model_path=str(tiny), draft_model=page))

    assert loaded.draft_model is not None
    assert loaded.draft_model.path == copy
    asked = json.loads(arguments.read_text())
    assert asked[1:] == ["--setting=DRAFT_MODEL", "--", "org/draft"]

    script.write_text("raise SystemExit(2)")
    assert load_refusal(tiny, draft_model="org/draft") == (
        "DRAFT_MODEL=org/draft: it cannot be served; the line above says why"
    )


@pytest.mark.parametrize("rest", ["/", "/tree/main", "?library=mlx#files"])
def test_a_page_of_the_hub_names_its_repository(script, rest):
    script.write_text("import sys; print(sys.argv[-1])")
    page = f"https://huggingface.co/org/tiny{rest}"
    assert s.resolve_model(s.Config(model_path=page)) == Path("org/tiny")


def test_the_demo_is_the_one_beside_the_server(script, copy):
    demo = script.parents[2] / "models" / "demo"
    shutil.copytree(copy, demo)
    assert s.resolve_model(s.Config(model_path="demo")) == demo


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json"])
def test_an_incomplete_folder_is_for_the_script(script, copy, name):
    assert s.resolve_model(s.Config(model_path=str(copy))) == copy

    script.write_text("raise SystemExit(7)")
    (copy / name).unlink()
    expected = f"MODEL_PATH={copy}: it cannot be served; the line above says why"
    assert refusal(str(copy)) == expected


@pytest.mark.parametrize("program", ["", "print()"])
def test_a_fetch_that_names_no_folder_is_refused_in_a_sentence(script, program):
    script.write_text(program)
    assert refusal("org/tiny") == "MODEL_PATH=org/tiny: what fetches it named no folder"


def test_copied_alone_the_server_asks_the_hub_itself(script, copy, monkeypatch):
    hub = f"def snapshot_download(name):\n    return {str(copy)!r} if name == 'own/er' else ''\n"
    (script.parent / "huggingface_hub.py").write_text(hub)
    monkeypatch.setenv("PYTHONPATH", str(script.parent))
    assert s.resolve_model(s.Config(model_path="own/er")) == copy


def test_without_a_setting_the_script_chooses_the_model(script):
    chooser = script.with_name("choose_model.py")
    arguments = write_answer(chooser, "/a folder/b")
    stop = threading.Event()
    assert s.choose_model(s.Config(), stop) == "/a folder/b"
    assert json.loads(arguments.read_text()) == []
    assert s.choose_model(s.Config(memory_limit_bytes=5), stop)
    assert json.loads(arguments.read_text()) == ["--memory-bytes=5"]

    chooser.write_text("raise SystemExit(1)")
    assert s.choose_model(s.Config(), stop) == "demo"
    chooser.unlink()
    assert s.choose_model(s.Config(), stop) == "demo"


def test_an_order_to_stop_ends_the_question(script):
    script.with_name("choose_model.py").write_text("import time; time.sleep(600)")
    stop = threading.Event()
    stop.set()

    assert s.choose_model(s.Config(), stop) == "demo"


def test_the_demo_stands_in_for_a_chosen_model_that_cannot_be_had(script, copy):
    demo = script.parents[2] / "models" / "demo"
    shutil.copytree(copy, demo)
    script.write_text("raise SystemExit(2)")
    config = s.Config(model_path="org/too-large")

    assert s.load_or_demo(config).path == demo
    with pytest.raises(s.ModelError):
        s.resolve_model(config)


def test_copied_alone_without_a_model_it_asks_for_one(script):
    assert refusal("") == "no model is named, and no demo is here: start with --model"


# -- loading -------------------------------------------------------------------------------


def test_the_facts_of_a_model(loaded, tiny):
    from mlx_lm.utils import get_total_parameters

    vocab = json.loads((tiny / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocab}
    assert loaded.model_id == "tiny-qwen3"
    assert (loaded.path, loaded.family) == (tiny, "qwen3")
    assert (loaded.context_length, loaded.max_context_tokens) == (CONTEXT, CONTEXT)
    assert loaded.eos_ids == {ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert loaded.vocab_size == loaded.model.args.vocab_size
    n_params = get_total_parameters(loaded.model)
    assert loaded.nbytes == 4 * n_params
    marks = loaded.tokenizer
    assert (marks.think_start, marks.think_end) == ("<think>", "</think>")
    assert marks.think_end_tokens == (ids["</think>"],)
    assert (marks.tool_call_start, marks.tool_call_end) == (
        "<tool_call>",
        "</tool_call>",
    )
    assert marks.tool_parser.__module__.endswith("qwen3_coder")
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert loaded.hidden_ids == {ids[name] for name in special}


def test_the_smaller_of_model_and_setting_limits_the_context(tiny):
    model = s.load_model(
        tiny, s.Config(model_path=str(tiny), max_kv_size=1000, model_family="glm4")
    )

    assert (model.max_context_tokens, model.context_length) == (1000, CONTEXT)
    assert model.family == "glm4"


class OwnCache(KVCache):  # type: ignore[misc]
    """A class that only one model knows."""


class CountingCache(OwnCache):
    """What it keeps depends on how many calls there were of all of its class."""

    n_calls = 0

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        type(self).n_calls += 1
        noise = mx.random.normal(values.shape, key=mx.random.key(self.n_calls))
        return super().update_and_fetch(keys, values + 10 * noise)


@pytest.mark.parametrize("cache_class", [OwnCache, CountingCache])
def test_a_class_of_caches_that_is_not_known_must_go_on_from_a_copy(
    copy, monkeypatch, cache_class
):
    """Before a request comes: each one would be answered from another's past."""

    def make_cache(model: qwen3.Model) -> list[Any]:
        return [cache_class() for _ in model.layers]

    monkeypatch.setattr(qwen3.Model, "make_cache", make_cache, raising=False)
    if cache_class is CountingCache:
        assert "it reads a prompt otherwise in parts" in load_refusal(copy)
        return
    loaded = s.load_model(copy, s.Config(model_path=str(copy)))
    assert s.measure_kv(loaded.model).is_opaque


def test_code_that_comes_with_a_model_runs_only_when_trusted(copy):
    edit_config(copy, model_file="custom.py")
    (copy / "custom.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs")
    refused = load_refusal(copy)
    assert "TRUST_REMOTE_CODE=true" in refused
    assert "trust_remote_code" not in refused
    config = s.Config(model_path=str(copy), trust_remote_code=True)
    assert s.load_model(copy, config).model_id == "copy"


def test_the_demo_is_read_as_it_is_also_where_code_is_trusted():
    """Its tokenizer names null as its code (L-59), which transformers would look up."""
    demo = Path(s.__file__).parent / "models" / "demo"
    for trusts in (False, True):
        config = s.Config(model_path="demo", trust_remote_code=trusts)
        tokenizer = s.load_model(demo, config).tokenizer
        assert type(tokenizer._tokenizer).__name__ == "TokenizersBackend"


@pytest.mark.parametrize(
    "damage",
    ["garbage", "truncated", "header", "missing", "tokenizer", "config", "a list"],
)
def test_a_damaged_model_is_one_sentence(copy, damage):
    file = copy / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    if damage == "garbage":
        file.write_bytes(b"not weights")
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        file.write_bytes(content[:20])
    elif damage == "missing":
        file.unlink()
    elif damage == "tokenizer":
        (copy / "tokenizer.json").write_text("{}")
    else:
        text = "[]" if damage == "a list" else '{"model_type": '
        (copy / "config.json").write_text(text)

    assert f"The model in {copy} cannot be loaded by mlx-lm 0." in load_refusal(copy)


def test_the_revision_names_the_weights(loaded, copy):
    config = s.Config(model_path=str(copy))
    original = s.load_model(copy, config).revision
    assert s.load_model(copy, config).revision == original

    edit_config(copy, rope_theta=500.0)
    with_other_config = s.load_model(copy, config).revision
    weights = copy / "model-00001-of-00002.safetensors"
    weights.touch()
    with_other_weights = s.load_model(copy, config).revision

    assert len({original, with_other_config, with_other_weights}) == 3


@pytest.mark.parametrize(
    ("facts", "tokenizer_length", "expected"),
    [
        ({"max_position_embeddings": 40960}, 131072, 40960),
        ({}, 8192, 8192),
        ({}, 10**30, 32768),
        ({"model_type": "gemma3_text"}, 10**30, 131072),
        (
            {"max_position_embeddings": 40960,
             "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 32768}},
            10**30, 131072,
        ),
        (
            {"max_position_embeddings": 131072,
             "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                              "original_max_position_embeddings": 8192}},
            10**30, 131072,
        ),
    ],
)  # fmt: skip
def test_the_context_length(facts, tokenizer_length, expected):
    assert s._context_length(facts, tokenizer_length) == expected


# -- text ------------------------------------------------------------------------------------


def detokenizer_of(loaded: Any) -> Any:
    return s.Detokenizer(loaded.tokenizer.backend_tokenizer, loaded.hidden_ids)


def spoken(detokenizer: s.Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.feed(token) for token in ids] + [detokenizer.finish()]


def test_text_of_a_reply_is_what_decoding_it_at_once_gives(loaded):
    ids = loaded.tokenizer.encode(" " + TEXT, add_special_tokens=False)
    pieces = spoken(detokenizer_of(loaded), ids)
    assert "".join(pieces) == " " + TEXT  # with its leading space
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > len(TEXT) // 4  # it streams


def test_any_ids_give_the_text_that_decoding_the_shown_ones_gives(loaded):
    rng = random.Random(7)
    hidden = loaded.hidden_ids
    for _ in range(500):
        ids = [rng.randrange(len(loaded.tokenizer)) for _ in range(rng.randrange(40))]
        shown = [token for token in ids if token not in hidden]
        want = loaded.tokenizer.decode(shown, skip_special_tokens=False)
        assert "".join(spoken(detokenizer_of(loaded), ids)) == want
    assert detokenizer_of(loaded).feed(len(loaded.tokenizer) + 5) == ""  # padding


def test_bytes_that_are_no_character_do_not_end_a_reply():
    """Behind a whole emoji in bytes a cut one (L-95)."""
    pieces = ["a", "b", *(f"<0x{byte:02X}>" for byte in (0xF0, 0x9F, 0x98, 0x80))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = [0, 2, 3, 4, 5, 2, 3, 1, 0, 2, 3]

    text = "".join(spoken(s.Detokenizer(backend, frozenset()), tokens))

    assert text == "a\U0001f600\ufffd\ufffdba\ufffd\ufffd"


def test_special_tokens_that_a_tool_parser_reads_are_not_hidden():
    from mlx_lm.tool_parsers.kimi_k2 import parse_tool_call

    Token = namedtuple("Token", "content special")
    names = "<|tool_call_begin|> <|tool_call_argument_begin|> <|im_user|> word"
    added = {n: Token(name, name != "word") for n, name in enumerate(names.split())}

    class Tokenizer:
        tool_parser = staticmethod(parse_tool_call)
        think_start_tokens = think_end_tokens = None
        tool_call_start_tokens = (0,)
        tool_call_end_tokens = None
        added_tokens_decoder = added
        eos_token_ids = frozenset({9})

    assert s._find_hidden_ids(Tokenizer()) == {2, 9}


# -- the banner --------------------------------------------------------------------------------


def write_banner(model, *, proxy_state="up", **settings):
    config = s.Config(**settings)
    proxy = s.Proxy(config)
    proxy.state = proxy_state
    engine = SimpleNamespace(
        model=model, memory={"limit": 2 * 10**9}, report={"cache_max_bytes": 10**9}
    )
    session_log = s.SessionLog(config)
    session_log.check()
    state = SimpleNamespace(
        config=config, engine=engine, proxy=proxy, session_log=session_log
    )
    return s._write_banner(state)


def test_the_banner_has_what_a_first_day_needs_in_at_most_thirteen_lines(loaded, tiny):
    text = write_banner(loaded)
    demo = s.load_model(tiny, s.Config(model_path="demo"))

    for part in (
        *(
            f"start-llm {s.VERSION} ",
            "tiny-qwen3: ",
            "4,096 tokens",
            "2.0 GB",
            "1.0 GB",
        ),
        *("http://127.0.0.1:8080/v1\n", "http://127.0.0.1:4000/v1 (LiteLLM)\n"),
        *("open http://127.0.0.1:8080/ to chat", "Ctrl-C", "launch claude\n"),
        *(str(SOURCE.parent / "logs"), loaded.device),
    ):
        assert part in text
    assert "demo" not in text
    demo_text = write_banner(demo)
    assert "What is 17 + 25?" in demo_text
    assert "launch" not in demo_text  # an agent's instructions are too long for it
    for shown in (text, demo_text, write_banner(loaded, proxy_state="off")):
        assert 8 <= shown.count("\n") + 1 <= 13


def test_the_addresses_of_the_banner_can_be_opened_here(loaded):
    text = write_banner(loaded, mlx_host="::1", mlx_port=9)
    assert "http://[::1]:9/v1\n" in text
    assert "launch claude --url http://[::1]:9\n" in text

    text = write_banner(loaded, mlx_host="0.0.0.0", api_key="k", proxy_state="off")
    assert "http://127.0.0.1:8080/v1\n" in text
    assert "0.0.0.0" not in text
    assert "Responses" not in text


def test_memory_of_a_gpu_does_not_count_if_the_cpu_is_to_compute(monkeypatch):
    def device_info(device: Any = None) -> dict[str, int]:
        return {"free_memory": 10_000} if device is None else {}

    monkeypatch.setattr(mx, "device_info", device_info)
    assert s.memory_limit(s.Config(mlx_backend="cpu")) > 100_000_000


def test_what_other_programs_hold_of_a_gpu_is_not_ours(monkeypatch):
    """What the server holds of it already is."""
    device = {"total_memory": 24_000, "free_memory": 10_000}
    monkeypatch.setattr(mx, "device_info", lambda _=None: device)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1_500)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 500)
    assert s.memory_limit(s.Config()) == 10_800


def test_marks_that_mlx_lm_does_not_know(tiny):
    """Magistral's thoughts: special tokens, which would not be shown either."""
    tokenizer = mlx_lm.utils.load_tokenizer(tiny)
    s._teach_tags(tokenizer)
    assert tokenizer.think_start == "<think>"

    eos_token_ids = tokenizer.eos_token_ids.copy()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["[THINK]", "[/THINK]", "<|call|>"]}
    )
    s._teach_tags(tokenizer)  # what is known stays
    assert tokenizer.think_start == "<think>"
    assert tokenizer.tool_call_start == "<tool_call>"

    tokenizer._think_start = None
    s._teach_tags(tokenizer)
    assert (tokenizer.think_start, tokenizer.think_end) == ("[THINK]", "[/THINK]")
    assert tokenizer.decode(tokenizer.think_end_tokens) == "[/THINK]"
    assert tokenizer.eos_token_ids == eos_token_ids
    hidden_ids = s._find_hidden_ids(tokenizer)
    assert hidden_ids.isdisjoint(tokenizer.think_start_tokens)


# -- weights on the CPU ----------------------------------------------------------------------------


def model_of(folder, weights_type, bits=None):
    """A tiny model with such weights."""
    model = mlx_lm.load(str(folder))[0]
    model.set_dtype(weights_type)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("weights_type", [mx.bfloat16, mx.float16])
def test_16_bits_become_float32_with_the_same_values(tiny, weights_type):
    model = model_of(tiny, weights_type)
    narrow = {name: mx.array(w) for name, w in tree_flatten(model.parameters())}

    s.widen_weights(model, max_bytes=10**9)

    for name, weights in tree_flatten(model.parameters()):
        assert weights.dtype == mx.float32
        assert mx.array_equal(weights, narrow[name].astype(mx.float32)), name


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_become_what_they_stand_for(tiny, bits):
    model = model_of(tiny, mx.bfloat16, bits)
    old_modules = dict(model.named_modules())

    s.widen_weights(model, max_bytes=10**9)

    n_dequantized = 0
    for name, module in model.named_modules():
        old = old_modules[name]
        if hasattr(old, "scales"):
            weights = mx.dequantize(
                old.weight, old.scales, old.biases, old.group_size, old.bits
            )
            assert module.weight.dtype == mx.float32
            assert mx.array_equal(module.weight, weights.astype(mx.float32)), name
            n_dequantized += 1

    assert n_dequantized > 5
    assert all(w.dtype == mx.float32 for _, w in tree_flatten(model.parameters()))


@pytest.mark.parametrize("bits", [None, 4])
def test_the_room_that_is_foreseen_is_the_room_that_is_taken(tiny, bits):
    """At one byte less the weights stay as they are."""
    wide = model_of(tiny, mx.bfloat16, bits)
    s.widen_weights(wide, max_bytes=10**9)
    n_bytes = sum(weights.nbytes for _, weights in tree_flatten(wide.parameters()))

    model = model_of(tiny, mx.bfloat16, bits)
    s.widen_weights(model, max_bytes=n_bytes - 1)
    assert any(w.dtype == mx.bfloat16 for _, w in tree_flatten(model.parameters()))
    s.widen_weights(model, max_bytes=n_bytes)
    assert all(w.dtype == mx.float32 for _, w in tree_flatten(model.parameters()))


def test_weights_do_not_exist_twice_while_they_are_widened(tiny):
    model = model_of(tiny, mx.bfloat16)
    n_bytes = sum(weights.nbytes for _, weights in tree_flatten(model.parameters()))
    mx.reset_peak_memory()
    n_active = mx.get_active_memory()

    s.widen_weights(model, max_bytes=10**9)

    assert mx.get_peak_memory() - n_active < 1.75 * n_bytes  # twice as many are added


# -- sampling where a request does not say --------------------------------------------

OWN = {"temperature": 0.1, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
QWEN = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
SWITCH = "{{ '<think>' if enable_thinking is defined and enable_thinking }}"


def sampled(folder, made, *, has_switch=False, **settings):
    """The model with this generation_config.json; None: without one."""
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if made is not None:
        file.write_text(json.dumps(made))
    source = TEMPLATE + SWITCH if has_switch else TEMPLATE
    (folder / "chat_template.jinja").write_text(source)
    return s.load_model(folder, s.Config(model_path=str(folder), **settings))


def sampling_of(model: s.LoadedModel, **fields: Any) -> dict[str, float]:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    request = s.parse_chat_request(body, s.Config(), request_id="r", headers={})
    sampling = model.complete_sampling(request).model_dump()
    names = (*OWN, "repetition_penalty")
    off = s.SamplingParams(temperature=1).model_dump()
    return {name: sampling[name] for name in names if sampling[name] != off[name]}


@pytest.mark.parametrize(
    ("made", "expected", "source"),
    [
        (None, OWN, "start-llm"),
        ({"eos_token_id": [1]}, OWN, "start-llm"),
        ({"temperature": "hot"}, OWN, "start-llm"),
        (QWEN, {"top_p": 0.95, "top_k": 20}, "generation_config.json"),
        # gpt-oss: nothing but that it samples, as transformers does by default.
        ({"do_sample": True}, {}, "generation_config.json"),
        ({"do_sample": False}, {"temperature": 0.0}, "generation_config.json"),
        (
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
            "generation_config.json",
        ),
    ],
    ids=str,
)
def test_a_model_samples_as_its_makers_say(copy, made, expected, source):
    model = sampled(copy, made)
    assert sampling_of(model) == expected
    assert model.sampling[True].describe().endswith(f"({source})")


def test_what_was_sent_wins_then_the_settings_then_the_makers(copy):
    model = sampled(copy, QWEN, default_top_k=7)
    assert sampling_of(model) == {"top_p": 0.95, "top_k": 7}
    sent = {"temperature": 0.5, "top_k": 9}
    assert sampling_of(model, **sent) == {"top_p": 0.95, **sent}
    assert model.sampling[True].source == "DEFAULT_TOP_K, generation_config.json"


def test_a_qwen_that_is_told_not_to_think_samples_in_its_other_way(copy):
    model = sampled(copy, QWEN, has_switch=True)
    assert sampling_of(model, enable_thinking=True) == {"top_p": 0.95, "top_k": 20}
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert sampling_of(model, enable_thinking=False) == expected
    always = sampled(copy, QWEN)  # its template has no switch
    assert sampling_of(always, enable_thinking=False) == {"top_p": 0.95, "top_k": 20}
