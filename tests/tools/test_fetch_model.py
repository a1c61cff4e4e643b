"""scripts/helpers/fetch_model.py: from a name to a folder that has all, or to one sentence."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fetch_model
import huggingface_hub
import pytest
import start_llm
from fetch_model import FetchError, find
from stub_server import StubHandler, running

GB = 10**9
PLENTY = 64 * GB
N_BYTES = 50_000  # of a weight file
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the program takes for a complete model: it never looks into weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    for n, name in enumerate(SHARDS):
        (folder / name).write_bytes(random.Random(n).randbytes(N_BYTES))
    index = {"weight_map": {f"layer{n}": name for n, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fetch(
    name: str = "org/tiny", *, token: str | None = None, memory_bytes: int = PLENTY
) -> Path:
    return find(name, token=token, memory_bytes=memory_bytes)


def refusal(name: str, memory_bytes: int = PLENTY) -> str:
    """The one sentence that it ends with."""
    with pytest.raises(FetchError) as caught:
        fetch(name, memory_bytes=memory_bytes)
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- folders ---------------------------------------------------------------------


def test_a_complete_folder_is_taken_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert fetch("~/tiny") == folder


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./missing", "~/nothing/here", "a/b/c", "models/x/"]
)
def test_a_path_that_does_not_exist_is_named(path: str) -> None:
    assert f"MODEL_PATH={path} is neither a folder" in refusal(path)


def test_the_home_of_nobody_is_one_sentence() -> None:
    assert "MODEL_PATH=~nobody-at-all/model cannot" in refusal("~nobody-at-all/model")


def test_what_lacks_in_a_folder_is_said(folder: Path) -> None:
    weights = sorted(folder.glob("model*.safetensors"))
    weights[1].unlink()
    assert "it has no model-00002-of-00002.safetensors (" in refusal(str(folder))
    weights[0].unlink()
    assert "no model*.safetensors" in refusal(str(folder))
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(str(folder))


# -- the demo ------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with nothing in it."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(fetch_model, "ROOT", home)
    return home


def test_the_demo_is_the_one_beside_the_server(home: Path, folder: Path) -> None:
    assert "models/demo cannot be used" in refusal("demo")
    bundled = shutil.copytree(folder, home / "models" / "demo")
    assert fetch("demo") == bundled


# -- the hub ---------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of huggingface.co as a download asks for: one repository, org/tiny."""

    SHA = "a" * 40

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.sizes: dict[str, int] = {}  # what the listing claims, where it differs
        # (status, X-Error-Code) for every file.
        self.refuse: tuple[int, str] | None = None
        # Bytes of a body before the connection breaks.
        self.cut_after: int | None = None
        self.refused_file = ""
        self.asked: list[tuple[str, str, str | None]] = []  # (method, path, Range)
        self.tokens: set[str | None] = set()
        super().__init__(("127.0.0.1", 0), HubHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self) -> list[tuple[str, int]]:
        return [
            (name, self.sizes.get(name, len(body))) for name, body in self.files.items()
        ]

    def asked_for_weights(self) -> bool:
        return any(
            method == "GET" and "safetensors" in path for method, path, _ in self.asked
        )


class HubHandler(StubHandler):
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
            entries = [
                {"type": "file", "path": n, "size": s, "oid": n}
                for n, s in hub.listing()
            ]
            self.send_json(entries)
        elif path.startswith("/api/models/org/tiny"):
            self.send_json({"id": "org/tiny", "sha": hub.SHA})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def send_json(self, value: Any) -> None:
        self.answer(
            200, json.dumps(value).encode(), {"Content-Type": "application/json"}
        )

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


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    hub = Hub({**files, "README.md": b"# not wanted", "pytorch_model.bin": b"0" * 1000})
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    # The client's own retries wait.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (tmp_path / "hub").mkdir()

    with running(hub):
        yield hub


def test_a_repository_is_fetched_once_and_then_starts_offline(
    hub: Hub, folder: Path
) -> None:
    fetched = fetch(token="hf_secret")
    assert {file.name for file in fetched.iterdir()} == {
        file.name for file in folder.iterdir()
    }
    assert "Bearer hf_secret" in hub.tokens
    hub.asked.clear()
    assert fetch() == fetched
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
    ranges = [
        r for method, path, r in hub.asked if method == "GET" and path.endswith(name)
    ]
    assert len(ranges) > 2
    assert all(r and not r.startswith("bytes=0-") for r in ranges[1:])


def test_a_model_too_large_for_memory_is_refused_before_its_weights_are_asked_for(
    hub: Hub,
) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 20 * GB

    message = refusal("org/tiny", memory_bytes=8 * GB)
    assert "needs 22.1 GB of memory (the server may use 8.0 GB)" in message
    assert message.endswith("MODEL_PATH=mlx-community/Qwen3.5-4B-MLX-4bit would fit.")

    message = refusal("org/tiny", memory_bytes=GB // 2)
    assert message.endswith("MODEL_PATH=demo would fit.")

    assert not hub.asked_for_weights()


def test_a_model_too_large_for_the_disk_is_refused_with_the_numbers(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sizes["model-00001-of-00002.safetensors"] = 20 * GB
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(fetch_model.shutil, "disk_usage", lambda path: usage(6 * GB))

    message = refusal("org/tiny")

    assert "20.0 GB more on disk" in message
    assert "has 6.0 GB free" in message
    assert message.endswith("MODEL_PATH=mlx-community/Qwen3.5-9B-MLX-4bit would fit.")


def test_an_unknown_type_is_refused_before_its_weights_are_asked_for(hub: Hub) -> None:
    hub.files["config.json"] = b'{"model_type": "from_the_future"}'
    assert "'from_the_future' are not known to mlx-lm" in refusal("org/tiny")
    assert not hub.asked_for_weights()


def test_a_type_that_only_mlx_vlm_knows_is_taken(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "cohere2_moe"}')
    fetch_model.check_architecture(config)
    config.write_text('{"model_type": "glm4v", "vision_config": {"depth": 1}}')
    fetch_model.check_architecture(config)

    config.write_text(
        '{"model_type": "from_the_future", "vision_config": {"depth": 1}}'
    )
    with pytest.raises(fetch_model.FetchError, match="from_the_future"):
        fetch_model.check_architecture(config)


def test_a_head_is_taken_as_a_draft_model_and_not_as_a_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for head_type in start_llm.HEAD_TARGETS:
        config.write_text(json.dumps({"model_type": head_type}))
        fetch_model.check_architecture(config, setting="DRAFT_MODEL")
        with pytest.raises(fetch_model.FetchError, match=head_type):
            fetch_model.check_architecture(config)


def test_a_file_is_not_called_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    sentence = refusal(str(file))
    assert "it is a file" in sentence
    assert "GGUF" in sentence
    assert "model folder" not in sentence


def test_a_name_as_in_ollama_is_told_which_names_work_here(hub: Hub) -> None:
    sentence = refusal("qwen3:8b")
    assert "This is how Ollama names a model. Here it is MODEL_PATH=OWNER/NAME" in (
        sentence
    )
    assert f"{hub.url}/models?library=mlx&search=qwen3+8b lists" in sentence
    assert "would fit" not in sentence  # a model of another kind or size
    sentence = refusal("Qwen3-8B")
    assert "OWNER/NAME" in sentence and "Ollama" not in sentence
    assert "OWNER/NAME" not in refusal("a/b/c")


def test_each_way_the_hub_says_no_is_one_sentence(hub: Hub) -> None:
    message = refusal("org/none")
    assert f"neither a folder on this machine nor a repository on {hub.url}" in message
    assert "nor a repository" in refusal("org/a--b")  # not a name the hub can have

    hub.refuse = (403, "GatedRepo")
    assert f"is gated: accept its terms at {hub.url}/org/tiny" in refusal("org/tiny")
    hub.refuse = (500, "")
    assert "500 Internal Server Error" in refusal("org/tiny")
    hub.refuse = (401, "")
    assert f"{hub.url} refuses the token (HF_TOKEN, or" in refusal("org/tiny")

    hub.refuse = None
    del hub.files["config.json"]
    assert "org/tiny has no config.json" in refusal("org/tiny")


@pytest.mark.parametrize("suffix", ["", "/", "/tree/main"])
def test_an_address_copied_from_the_browser_is_its_repository(
    hub: Hub, suffix: str
) -> None:
    assert (fetch(f"{hub.url}/org/tiny{suffix}") / "config.json").is_file()
    other_branch = f"{hub.url}/org/tiny/tree/8bit"  # it has another model
    assert "nor a repository" in refusal(other_branch)
    assert "MODEL_PATH=org/tiny/tree/main is neither" in refusal("org/tiny/tree/main")


def test_no_network_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_url = "http://127.0.0.1:9"
    template = closed_url + "/{repo_id}/resolve/{revision}/{filename}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", closed_url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    message = refusal("org/tiny")

    assert message.startswith(
        f"org/tiny is not complete in the local cache and {closed_url}"
    )
    assert "refused" in message
    assert "is the name right? Or set MODEL_PATH to a folder or to demo" in message
    assert "is the name right? Here it is MODEL_PATH=OWNER/NAME" in refusal("tiny")


def test_a_fault_names_the_setting_that_names_the_model(hub: Hub) -> None:
    with pytest.raises(FetchError, match=r"^DRAFT_MODEL=org/none is neither"):
        find("org/none", token=None, memory_bytes=PLENTY, setting="DRAFT_MODEL")
    with pytest.raises(FetchError, match="the smaller the better"):
        find("org/tiny", token=None, memory_bytes=1000, setting="DRAFT_MODEL")


# -- the program ---------------------------------------------------------------------------


def test_the_program_prints_the_folder_and_shows_its_progress(
    hub: Hub, tmp_path: Path
) -> None:
    cache = tmp_path / "home"
    own = ("HF_", "MODEL_PATH")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "NO_PROXY": "*"}

    result = subprocess.run(
        [sys.executable, fetch_model.__file__, "org/tiny"],
        check=False,
        capture_output=True,
        text=True,
        env={**environ, "HF_TOKEN": "hf_secret"},
    )

    assert result.returncode == 0, result.stderr
    folder = result.stdout.splitlines()[-1]
    assert (Path(folder) / SHARDS[1]).read_bytes() == hub.files[SHARDS[1]]
    assert folder.startswith(str(cache))
    assert "org/tiny: fetching 100.1 kB into" in result.stderr
    assert "100%|" in result.stderr
    assert "Bearer hf_secret" in hub.tokens


def test_ctrl_c_in_its_slow_imports_ends_it_without_a_traceback(tmp_path: Path) -> None:
    interrupt = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "huggingface_hub.py").write_text(interrupt)

    result = subprocess.run(
        [sys.executable, fetch_model.__file__, "org/tiny"],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert (result.returncode, result.stderr) == (-signal.SIGINT, b"")


def test_the_program_fails_with_one_sentence(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["fetch_model.py", "--memory-bytes=1000", "--", "-x"]
    )

    assert fetch_model.main() == 2

    sentence = capsys.readouterr().err
    assert sentence.startswith("MODEL_PATH=-x is neither a folder")
    assert sentence.count("\n") == 1


@pytest.mark.parametrize(
    "variables", [{}, {"MODEL_PATH": "", "HF_TOKEN": ""}, {"HF_TOKEN": "b"}]
)
def test_settings_come_from_where_the_server_reads_them(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    (home / ".env").write_text("MODEL_PATH=org/tiny\nHF_TOKEN=a\n")
    for name in ("MODEL_PATH", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls: list[tuple[str, str | None]] = []

    def find(name: str, *, token: str | None, **_: Any) -> Path:
        calls.append((name, token))
        return home

    monkeypatch.setattr(fetch_model, "find", find)
    monkeypatch.setattr(fetch_model, "choose", lambda: "demo")
    monkeypatch.setattr(fetch_model.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["fetch_model.py"])

    assert fetch_model.main() == 0

    settings = {"MODEL_PATH": "org/tiny", "HF_TOKEN": "a", **variables}
    config = start_llm.Config.from_env(settings)
    assert calls == [(start_llm._read_model_name(config), config.hf_token or None)]
