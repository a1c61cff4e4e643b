"""MODEL: a folder or one sentence; exact text from ids; facts that other rooms may rely on."""

import json
import random
import shutil
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import start_llm
from start_llm import Config, Detokenizer, LoadedModel, ModelError, load_model, resolve_model

GB = 10**9
PLENTY = 64 * GB
TEXT = "héllo wörld, 你好 🙂🙂👩‍👩‍👧 def f(x):\n    return x\n\tcafé\u0301 naïve 🇨🇭 "
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if tools %}<tool_call>{{ tool_call.name }}</tool_call>{% endif %}"
)
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path) -> int:
    """A byte-level BPE tokenizer in the Qwen style; returns its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in PLAIN])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 of random weights, in two weight files with an index."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    folder.mkdir()
    config = {**QWEN3, "vocab_size": write_tokenizer(folder)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos_of(folder)]}))
    mx.random.seed(1)
    weights = sorted(tree_flatten(qwen3.Model(qwen3.ModelArgs.from_dict(config)).parameters()))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    mx.save_safetensors(str(folder / names[0]), dict(weights[:4]))
    mx.save_safetensors(str(folder / names[1]), dict(weights[4:]))
    index = {key: names[n >= 4] for n, (key, _) in enumerate(weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def eos_of(folder: Path) -> int:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return next(int(t["id"]) for t in added if t["content"] == "<|endoftext|>")


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return load_model(tiny, Config(model_path=str(tiny)))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal(path: str, memory_bytes: int = PLENTY, **settings: Any) -> str:
    """The one sentence that resolve_model ends with."""
    with pytest.raises(ModelError) as caught:
        resolve_model(Config(model_path=path, **settings), memory_bytes=memory_bytes)
    return sentence(caught.value)


def load_refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, Config(model_path=str(folder), **settings))
    return sentence(caught.value)


def sentence(error: ModelError) -> str:
    assert "\n" not in str(error)
    assert str(error)
    return str(error)


# -- folders ---------------------------------------------------------------------


def test_a_complete_folder_is_taken_as_it_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(Config(model_path=str(tiny)), memory_bytes=PLENTY) == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert resolve_model(Config(model_path="~/tiny-qwen3"), memory_bytes=PLENTY) == tiny


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./missing", "~/nothing/here", "a/b/c", "models/x/", "C:\\models"]
)
def test_a_path_that_does_not_exist_is_named(path: str) -> None:
    assert f"MODEL_PATH={path} is neither a folder" in refusal(path)


def test_what_lacks_in_a_folder_is_said(copy: Path) -> None:
    assert "it has no config.json, model*.safetensors" in refusal(str(copy / "config.json"))
    weights = sorted(copy.glob("model*.safetensors"))
    weights[1].unlink()
    assert "it has no model-00002-of-00002.safetensors (" in refusal(str(copy))
    weights[0].unlink()
    assert "no model*.safetensors" in refusal(str(copy))
    (copy / "config.json").unlink()
    assert "no config.json" in refusal(str(copy))


# -- the demo ------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds start-llm.py and nothing else, with a cache of its own."""
    home = tmp_path / "home"
    (home / "scripts").mkdir(parents=True)
    monkeypatch.setattr(start_llm, "__file__", str(home / "start-llm.py"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache" / "hf"))
    return home


def write_demo_script(home: Path, body: str) -> None:
    (home / "scripts" / "make_demo_model.py").write_text(f"import sys, pathlib\n{body}\n")


MAKES_A_MODEL = """
folder = pathlib.Path(sys.argv[1]); folder.mkdir()
(folder / "config.json").write_text("{}"); (folder / "model.safetensors").write_text("")
"""


def test_the_bundled_demo_comes_first(home: Path, tiny: Path) -> None:
    bundled = shutil.copytree(tiny, home / "models" / "demo")
    assert resolve_model(Config(model_path="demo"), memory_bytes=PLENTY) == bundled


def test_the_demo_is_made_once_and_again_when_its_script_changes(home: Path) -> None:
    write_demo_script(home, MAKES_A_MODEL)
    first = resolve_model(Config(model_path="demo"), memory_bytes=PLENTY)
    (first / "mark").touch()
    assert resolve_model(Config(model_path="demo"), memory_bytes=PLENTY) == first
    assert (first / "mark").exists()
    write_demo_script(home, MAKES_A_MODEL + "# changed")
    second = resolve_model(Config(model_path="demo"), memory_bytes=PLENTY)
    (home / "scripts" / "demo_model").mkdir()
    (home / "scripts" / "demo_model" / "corpus.txt").write_text("words")
    third = resolve_model(Config(model_path="demo"), memory_bytes=PLENTY)
    assert {entry.name for entry in first.parent.iterdir()} == {
        first.name, second.name, third.name,
    }  # fmt: skip
    assert len({first, second, third}) == 3


def test_a_demo_that_cannot_be_made_is_one_sentence_and_leaves_nothing(home: Path) -> None:
    assert "There is no demo model" in refusal("demo")
    write_demo_script(home, MAKES_A_MODEL + "raise SystemExit('no room left')")
    assert refusal("demo").endswith("failed with status 1: no room left")
    assert list((home.parent / "cache" / "start-llm").iterdir()) == []


def test_without_a_setting_the_platform_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_llm.platform, "machine", lambda: "arm64")
    for system, name in (("Darwin", "GLM-4.7-Flash"), ("Linux", "demo")):
        monkeypatch.setattr(start_llm.platform, "system", lambda system=system: system)
        assert name in start_llm._chosen(Config())
        assert start_llm._chosen(Config(model_path="a/b")) == "a/b"


# -- the hub ---------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of huggingface.co as a download asks for: one repository, org/tiny."""

    SHA = "a" * 40

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.refuse: tuple[int, str] | None = None  # (status, X-Error-Code) for every file
        self.sizes: dict[str, int] = {}  # what the listing claims, where it differs
        self.cut_after: int | None = None  # bytes of a body before the connection breaks
        self.refused_file = ""
        self.asked: list[tuple[str, str, str | None]] = []  # (method, path, Range)
        self.tokens: set[str | None] = set()
        super().__init__(("127.0.0.1", 0), HubHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self) -> list[tuple[str, int]]:
        return [(name, self.sizes.get(name, len(body))) for name, body in self.files.items()]


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers["Range"]))
        hub.tokens.add(self.headers["Authorization"])
        if path.startswith("/org/tiny/resolve/"):
            self.send_file(path.split("/", 5)[5])
        elif path.startswith("/api/models/org/tiny/tree/"):
            entries = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in hub.listing()]
            self.send_json(entries)
        elif path.startswith("/api/models/org/tiny"):
            self.send_json({"id": "org/tiny", "sha": hub.SHA})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def send_json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str) -> None:
        if name == self.server.refused_file and self.command == "GET":
            return self.answer(403, b"", {})
        if self.server.refuse:
            status, code = self.server.refuse
            return self.answer(status, b"", {"X-Error-Code": code})
        if name not in self.server.files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        body = self.server.files[name]
        headers = {"ETag": f'"{abs(hash(body)):x}"', "X-Repo-Commit": self.server.SHA}
        headers["X-Linked-Size"] = str(self.server.sizes.get(name, len(body)))
        if wanted := self.headers["Range"]:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            return self.answer(206, body[start:], headers)
        return self.answer(200, body, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut_after
        self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True
            self.connection.shutdown(1)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in sorted(tiny.iterdir())}
    hub = Hub({**files, "README.md": b"# not wanted", "pytorch_model.bin": b"0" * 1000})
    threading.Thread(target=hub.serve_forever, args=(0.01,)).start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's own retries wait
    (tmp_path / "hub").mkdir()
    yield hub
    hub.shutdown()
    hub.server_close()


def fetch(memory_bytes: int = PLENTY, **settings: Any) -> Path:
    return resolve_model(Config(model_path="org/tiny", **settings), memory_bytes=memory_bytes)


def test_a_repository_is_fetched_once_and_then_starts_offline(hub: Hub, tiny: Path) -> None:
    folder = fetch(hf_token="hf_secret")
    assert {file.name for file in folder.iterdir()} == {file.name for file in tiny.iterdir()}
    assert "Bearer hf_secret" in hub.tokens
    hub.asked.clear()
    assert fetch() == folder
    assert hub.asked == []


def test_an_incomplete_copy_is_finished_not_started(hub: Hub) -> None:
    folder = fetch()
    weights = folder / "model-00001-of-00002.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    hub.asked.clear()
    assert fetch() == folder
    assert weights.is_file()
    fetched = {path.split("/")[-1] for method, path, _ in hub.asked if method == "GET"}
    assert fetched.isdisjoint({"model-00002-of-00002.safetensors", "tokenizer.json"})


def test_a_broken_connection_goes_on_where_it_broke(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    name = "model-00002-of-00002.safetensors"
    hub.cut_after = len(hub.files[name]) // 3
    folder = fetch()
    assert (folder / name).read_bytes() == hub.files[name]
    ranges = [r for method, path, r in hub.asked if method == "GET" and path.endswith(name)]
    assert len(ranges) > 2
    assert all(r and not r.startswith("bytes=0-") for r in ranges[1:])


def test_a_second_start_fetches_only_the_files_that_the_first_did_not(hub: Hub) -> None:
    name = "model-00002-of-00002.safetensors"
    hub.refused_file = name
    assert "403 Forbidden" in refusal("org/tiny")
    hub.refused_file = ""
    hub.asked.clear()
    assert (fetch() / name).is_file()
    fetched = [path.split("/")[-1] for method, path, _ in hub.asked if method == "GET"]
    assert name in fetched
    assert "model-00001-of-00002.safetensors" not in fetched


def test_a_model_too_large_for_memory_is_refused_before_its_weights_are_asked_for(hub: Hub) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 20 * GB
    said = refusal("org/tiny", memory_bytes=8 * GB)
    assert "needs 20.5 GB of memory (this device recommends at most 8.0 GB)" in said
    assert said.endswith("MODEL_PATH=mlx-community/Qwen3-8B-4bit would fit.")
    assert refusal("org/tiny", memory_bytes=GB // 2).endswith("MODEL_PATH=demo would fit.")
    assert not any(method == "GET" and "safetensors" in path for method, path, _ in hub.asked)


def test_a_model_too_large_for_the_disk_is_refused_with_the_numbers(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 20 * GB
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(start_llm.shutil, "disk_usage", lambda path: usage(6 * GB))
    said = refusal("org/tiny")
    assert "20.0 GB more on disk" in said
    assert "has 6.0 GB free" in said
    assert said.endswith("MODEL_PATH=mlx-community/Qwen3-8B-4bit would fit.")


def test_what_is_here_already_need_not_fit_on_the_disk_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch()
    (folder / "config.json").unlink()
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(start_llm.shutil, "disk_usage", lambda path: usage(1000))
    assert fetch() == folder


def test_the_log_says_how_much_a_download_is(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="start-llm"):
        fetch()
    assert "org/tiny: fetching 127.9 kB into" in caplog.text


def test_an_unknown_type_is_refused_before_its_weights_are_asked_for(hub: Hub) -> None:
    hub.files["config.json"] = b'{"model_type": "from_the_future"}'
    assert "'from_the_future' are not known to mlx-lm" in refusal("org/tiny")
    assert not any(method == "GET" and "safetensors" in path for method, path, _ in hub.asked)


def test_a_repository_without_usable_weights_is_refused(hub: Hub) -> None:
    for name in list(hub.files):
        if name.endswith(".safetensors"):
            del hub.files[name]
    assert "it has no model*.safetensors" in refusal("org/tiny")


def test_each_way_the_hub_says_no_is_one_sentence(hub: Hub) -> None:
    assert f"neither a folder on this machine nor a repository on {hub.url}" in refusal("org/none")
    assert "nor a repository" in refusal("org/a--b")  # not a name the hub can have
    hub.refuse = (403, "GatedRepo")
    assert f"is gated: accept its terms at {hub.url}/org/tiny" in refusal("org/tiny")
    hub.refuse = (500, "")
    assert "500 Internal Server Error" in refusal("org/tiny")
    hub.refuse = None
    del hub.files["config.json"]
    assert "404" in refusal("org/tiny")


def test_no_network_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", closed)
    template = closed + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    said = refusal("org/tiny")
    assert said.startswith("org/tiny is not complete in the local cache and http://127.0.0.1:9")
    assert "refused" in said
    assert "set MODEL_PATH to a folder or to demo" in said


# -- loading -------------------------------------------------------------------------------


def test_the_facts_of_a_model(loaded: LoadedModel, tiny: Path) -> None:
    from mlx_lm.utils import get_total_parameters

    vocab = json.loads((tiny / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocab}
    assert loaded.model_id == "tiny-qwen3"
    assert (loaded.path, loaded.family) == (tiny, "qwen3")
    assert (loaded.size.context_length, loaded.limit) == (4096, 4096)
    assert loaded.eos_ids == {ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert loaded.size.vocab_size == len(loaded.tokenizer)
    n_params = get_total_parameters(loaded.model)
    assert loaded.size.nbytes == 4 * n_params
    markup = loaded.markup
    assert (markup.think_start, markup.think_end) == ("<think>", "</think>")
    assert markup.think_end_ids == (ids["</think>"],)
    assert (markup.tool_call_start, markup.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert markup.tool_parser is not None
    call = markup.tool_parser('{"name": "f", "arguments": {"x": 1}}', None)
    assert call == {"name": "f", "arguments": {"x": 1}}
    assert markup.hidden_ids == {ids[name] for name in SPECIAL}


def test_the_smaller_of_model_and_setting_limits_the_context(tiny: Path) -> None:
    model = load_model(tiny, Config(model_path=str(tiny), max_kv_size=1000, model_family="glm4"))
    assert (model.limit, model.size.context_length, model.family) == (1000, 4096, "glm4")


def test_the_id_clients_see(tiny: Path) -> None:
    for name in ("org/tiny", "demo"):
        assert load_model(tiny, Config(model_path=name)).model_id == name


def test_an_unknown_type_is_named_before_any_weight_is_read(copy: Path) -> None:
    for weights in copy.glob("*.safetensors"):
        weights.write_bytes(b"not weights")
    for kind in ("from_the_future", "cache", "../models/qwen3", None):
        edit_config(copy, model_type=kind)
        assert f"type {kind!r} are not known to mlx-lm 0." in load_refusal(copy)


def test_code_that_comes_with_a_model_runs_only_when_trusted(copy: Path) -> None:
    edit_config(copy, model_file="custom.py")
    (copy / "custom.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs")
    assert "'custom.py'" in load_refusal(copy)
    config = Config(model_path=str(copy), trust_remote_code=True)
    assert load_model(copy, config).model_id == "copy"


@pytest.mark.parametrize("damage", ["garbage", "truncated", "header", "missing", "tokenizer"])
def test_a_damaged_model_is_one_sentence(copy: Path, damage: str) -> None:
    file = copy / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    if damage == "garbage":
        file.write_bytes(b"not weights")
    elif damage == "truncated":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "header":
        file.write_bytes(whole[:20])
    elif damage == "missing":
        file.unlink()
    else:
        (copy / "tokenizer.json").write_text("{}")
    assert f"The model in {copy} cannot be loaded: " in load_refusal(copy)


def test_a_broken_config_is_one_sentence(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": ')
    assert "config.json cannot be read" in load_refusal(copy)
    (copy / "config.json").write_text("[]")
    assert "config.json cannot be read" in load_refusal(copy)


def test_the_revision_names_the_weights(loaded: LoadedModel, copy: Path) -> None:
    before = load_model(copy, Config(model_path=str(copy))).revision
    assert load_model(copy, Config(model_path=str(copy))).revision == before
    edit_config(copy, rope_theta=500.0)
    changed = load_model(copy, Config(model_path=str(copy))).revision
    weights = copy / "model-00001-of-00002.safetensors"
    weights.touch()
    assert len({before, changed, load_model(copy, Config(model_path=str(copy))).revision}) == 3


@pytest.mark.parametrize(
    ("facts", "tokenizer_length", "expected"),
    [
        ({"max_position_embeddings": 40960}, 131072, 40960),
        ({"n_positions": 1024}, 10**30, 1024),
        ({}, 8192, 8192),
        ({}, 10**30, 32768),
        (
            {"max_position_embeddings": 40960,
             "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                              "original_max_position_embeddings": 32768}},
            10**30, 131072,
        ),
        (
            {"max_position_embeddings": 163840,
             "rope_scaling": {"type": "yarn", "factor": 40,
                              "original_max_position_embeddings": 4096}},
            10**30, 163840,
        ),
        (
            {"max_position_embeddings": 131072,
             "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
                              "original_max_position_embeddings": 8192}},
            10**30, 131072,
        ),
    ],
)  # fmt: skip
def test_the_context_length(facts: dict[str, Any], tokenizer_length: int, expected: int) -> None:
    assert start_llm._context_length(facts, tokenizer_length) == expected


# -- text ------------------------------------------------------------------------------------


def detokenizer_of(loaded: Any) -> Any:
    return Detokenizer(loaded.tokenizer.backend_tokenizer, loaded.markup.hidden_ids)


def spoken(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.feed(token) for token in ids] + [detokenizer.finish()]


def test_text_of_a_reply_is_what_decoding_it_at_once_gives(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode(" " + TEXT, add_special_tokens=False)
    pieces = spoken(detokenizer_of(loaded), ids)
    assert "".join(pieces) == " " + TEXT  # with its leading space
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(piece != "" for piece in pieces) > len(TEXT) // 4  # it streams


def test_any_ids_give_the_text_that_decoding_the_shown_ones_gives(loaded: LoadedModel) -> None:
    rng = random.Random(7)
    hidden = loaded.markup.hidden_ids
    for _ in range(500):
        ids = [rng.randrange(len(loaded.tokenizer)) for _ in range(rng.randrange(40))]
        shown = [token for token in ids if token not in hidden]
        want = loaded.tokenizer.decode(shown, skip_special_tokens=False)
        assert "".join(spoken(detokenizer_of(loaded), ids)) == want


def test_hidden_ids_make_no_text_and_markup_does(loaded: LoadedModel) -> None:
    encode = loaded.tokenizer.convert_tokens_to_ids
    ids = [encode(name) for name in ("<|im_start|>", "<think>", "<|im_end|>", "<tool_call>")]
    assert "".join(spoken(detokenizer_of(loaded), ids)) == "<think><tool_call>"
    assert detokenizer_of(loaded).feed(len(loaded.tokenizer) + 5) == ""  # a padding row of the head


def test_a_character_cut_off_at_the_end_is_told_once(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode("a\U0001f9ff", add_special_tokens=False)[:-1]
    detokenizer = detokenizer_of(loaded)
    assert "".join(detokenizer.feed(token) for token in ids) == "a"
    assert set(detokenizer.finish()) == {"\ufffd"}
    assert detokenizer.finish() == ""


def test_detokenizers_on_many_threads_do_not_meet(loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode(TEXT * 20, add_special_tokens=False)
    texts: list[str] = []

    def work() -> None:
        texts.append("".join(spoken(detokenizer_of(loaded), ids)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [TEXT * 20] * 8


def test_special_tokens_that_a_tool_parser_reads_are_not_hidden() -> None:
    from mlx_lm.tool_parsers.kimi_k2 import parse_tool_call

    Token = namedtuple("Token", "content special")
    names = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|im_user|>", "word")
    added = {n: Token(name, name != "word") for n, name in enumerate(names)}

    class Tokenizer:
        tool_parser = staticmethod(parse_tool_call)
        think_start = think_end = think_start_tokens = think_end_tokens = None
        tool_call_start, tool_call_end = "<|tool_calls_section_begin|>", ""
        tool_call_start_tokens, tool_call_end_tokens = (0,), None
        added_tokens_decoder = added
        eos_token_ids = frozenset({9})

    markup = start_llm._markup(Tokenizer())
    assert markup.hidden_ids == {2, 9}


# -- the banner --------------------------------------------------------------------------------


def test_the_banner_says_what_runs_and_how_to_choose(loaded: LoadedModel, tiny: Path) -> None:
    said = start_llm.banner(loaded, Config(mlx_host="::1", mlx_port=9))
    assert said.startswith("tiny-qwen3 is served at http://[::1]:9/v1\n")
    assert "4,096 tokens" in said
    assert "MODEL_PATH=" in said
    assert "demo" not in said
    demo = load_model(tiny, Config(model_path="demo"))
    assert "This is the demo model" in start_llm.banner(demo, Config())


def test_the_device_has_memory() -> None:
    assert start_llm.device_memory_bytes() > 100_000_000
