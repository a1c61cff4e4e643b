"""scripts/helpers/choose_model.py: a model that fits every machine; only a yes downloads one."""

import json
import os
import pty
import select
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

import choose_model
import launch
import mlx.core as mx
import pytest
import start_llm as s
from choose_model import (
    CPU_MODELS,
    DEMO,
    FIRST_CHOICES,
    PACKED_SHARE,
    SECOND_CHOICES,
    Machine,
    Model,
    list_offers,
)
from count_kv import KVBytes
from nights import at_night
from stub_server import StubHandler, running

GIB = 2**30
GB = 10**9
# Memory of a Mac in GB, and what it is offered: the first choice, and another one.
TIERS = {
    8: ("Qwen3.5-4B-MLX-4bit", "Qwen3-1.7B-4bit"),
    16: ("Qwen3.5-9B-MLX-4bit", "gemma-4-E4B-it-MLX-4bit"),
    18: ("Qwen3.5-9B-MLX-4bit", "gemma-4-E4B-it-MLX-4bit"),
    24: ("Qwen3.5-9B-MLX-8bit", "gpt-oss-20b-MXFP4-Q8"),
    32: ("Qwen3.8-27B-4bit", "gemma-4-26b-a4b-it-4bit"),
    36: ("Qwen3.6-35B-A3B-4bit", "Qwen3.8-27B-4bit"),
    48: ("Qwen3.6-35B-A3B-4bit", "Qwen3.8-27B-4bit"),
    64: ("Qwen3.6-35B-A3B-8bit", "Qwen3.8-27B-8bit"),
    128: ("Qwen3.6-35B-A3B-8bit", "Qwen3.8-27B-8bit"),
    512: ("Qwen3.6-35B-A3B-8bit", "Qwen3.8-27B-8bit"),
}


def mac(gigabytes, *, disk=1000 * GB):
    memory = choose_model.usable_memory(gigabytes * GIB, is_apple_silicon=True)
    return Machine(is_apple_silicon=True, memory_bytes=memory, disk_bytes=disk)


def linux(gigabytes, *, disk=1000 * GB):
    memory = choose_model.usable_memory(gigabytes * GIB, is_apple_silicon=False)
    return Machine(is_apple_silicon=False, memory_bytes=memory, disk_bytes=disk)


def local(name, nbytes):
    return Model(name, nbytes, KVBytes(100_000, 0), is_local=True)


def names_of(offers):
    return [model.name.split("/")[-1] for model in offers]


# -- decide ---------------------------------------------------------------------


@pytest.mark.parametrize(("gigabytes", "names"), TIERS.items())
def test_a_mac_is_offered_a_first_and_a_second_choice(gigabytes, names):
    machine = mac(gigabytes)

    offers = list_offers(machine, [])

    assert tuple(names_of(offers)) == names
    for model in offers:
        context = machine.count_context(model, kv_share=PACKED_SHARE)
        assert context >= choose_model.LEAST_CONTEXT
        assert model.good_for


@pytest.mark.covering(1)
@pytest.mark.parametrize("gigabytes", TIERS)
@pytest.mark.parametrize("disk", [0, GB, 3 * GB, 6 * GB, 20 * GB, 50 * GB])
def test_on_a_small_disk_the_downloads_fit_or_nothing_is_offered(gigabytes, disk):
    offers = list_offers(mac(gigabytes, disk=disk), [])

    assert all(model.nbytes < disk for model in offers)
    assert bool(offers) == (disk >= 3 * GB)


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", [*FIRST_CHOICES, *SECOND_CHOICES])
@pytest.mark.parametrize("gigabytes", [16, 32, 64, 512])
def test_the_context_that_is_promised_is_what_the_server_has_room_for(gigabytes, model):
    machine = mac(gigabytes)
    shares = s.divide_memory(
        machine.memory_bytes,
        model_bytes=model.nbytes,
        max_kv_bytes=0,
        has_vision=model.sees_images,
    )
    spec = s.KVSpec(model.kv.token, 0, model.kv.fixed, False, True, False)
    capacity = s.MemoryBudget(shares, spec, None).capacity_tokens

    promised = machine.count_context(model)

    capacity = min(max(0, capacity), model.longest_context)
    assert promised <= capacity <= promised + 1001


@pytest.mark.parametrize(("gigabytes", "n_offers"), [(1, 0), (4, 0), (8, 1), (256, 1)])
def test_a_linux_cpu_is_offered_the_small_model_or_the_demo(gigabytes, n_offers):
    assert list_offers(linux(gigabytes), []) == list(CPU_MODELS[:n_offers])
    assert list_offers(linux(gigabytes, disk=2 * GB), []) == []


def test_what_is_here_comes_first_and_what_does_not_fit_is_left_out():
    small = local("mlx-community/Qwen3-1.7B-4bit", 2 * GB)
    unknown = local("me/own", 6 * GB)
    huge = local("me/huge", 90 * GB)

    offers = list_offers(mac(32), [unknown, huge, small])

    assert [model.is_local for model in offers] == [True, True, False, False]
    assert tuple(names_of(offers)) == ("Qwen3-1.7B-4bit", "own", *TIERS[32])
    assert offers[0].good_for and not offers[1].good_for
    assert list_offers(mac(32, disk=0), [huge]) == []


def test_a_known_model_that_is_here_is_not_offered_as_a_download():
    first, second = (f"mlx-community/{name}" for name in TIERS[48])
    for prefix in ("", "/home/me/.lmstudio/models/"):
        here = local(f"{prefix}{first}", 20 * GB)
        assert names_of(list_offers(mac(48), [here])) == [TIERS[48][0]]
        here = local(f"{prefix}{second}", 16 * GB)
        offers = list_offers(mac(48), [here])
        assert tuple(names_of(offers)) == (TIERS[48][1], TIERS[48][0])
    assert list_offers(linux(8), [local("me/large", 5 * GB)]) == [*CPU_MODELS]


# -- this machine ----------------------------------------------------------------


QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32,
    "intermediate_size": 32, "rms_norm_eps": 1e-6, "vocab_size": 32,
    "max_position_embeddings": 262_144, "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


def write_model(folder, *, template=True, **facts):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3, **facts}))
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    settings = {"chat_template": "{{ messages }}"} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_cached_model(home, name, **facts):
    repository = home / ".cache/huggingface/hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    return write_model(repository / "snapshots/abc", **facts)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with nothing in it, and a project of its own to keep an answer in."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_cache = str(tmp_path / ".cache/huggingface/hub")
    monkeypatch.setattr(choose_model.constants, "HF_HUB_CACHE", hub_cache)
    monkeypatch.setattr(choose_model.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(choose_model, "KEPT_ANSWER", tmp_path / ".chosen-model")
    return tmp_path


def test_models_of_the_hub_cache_and_of_lm_studio_are_found(home):
    write_cached_model(home, "org/tiny")
    lm_studio = write_model(home / ".lmstudio/models/org/own")
    old_lm_studio = write_model(home / ".cache/lm-studio/models/org/older")

    found = choose_model.find_local_models()

    assert [model.name for model in found] == [
        "org/tiny",
        str(lm_studio),
        str(old_lm_studio),
    ]
    assert {model.nbytes for model in found} == {1000}
    n_bytes = 4 if mx.default_device() == mx.cpu else 2
    assert {model.kv for model in found} == {KVBytes(64 * n_bytes, 0)}
    assert {model.longest_context for model in found} == {choose_model.LONGEST_CONTEXT}
    assert all(model.is_local for model in found)


def test_what_cannot_be_served_is_not_found(home):
    write_cached_model(home, "org/embeddings", template=False)
    write_cached_model(home, "org/strange", model_type="from_the_future")

    half = write_cached_model(home, "org/half")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (half / "model.safetensors.index.json").write_text(json.dumps(index))

    gguf = write_cached_model(home, "org/gguf")
    (gguf / "model.safetensors").rename(gguf / "model.gguf")

    broken = write_cached_model(home, "org/broken")
    (broken / "config.json").write_text("[]")

    assert choose_model.find_local_models() == []


# -- nobody to ask ---------------------------------------------------------------


def test_without_a_terminal_it_is_the_demo_or_what_is_here(home, monkeypatch, capsys):
    monkeypatch.setattr(choose_model, "is_on_terminal", lambda: False)
    monkeypatch.setattr(
        choose_model, "ask_hub", lambda _: pytest.fail("asked the network")
    )

    assert choose_model.choose() == DEMO
    assert "the demo model is served" in capsys.readouterr().err

    write_cached_model(home, "org/tiny")
    assert choose_model.choose() == "org/tiny"
    assert "org/tiny is here already" in capsys.readouterr().err
    assert not choose_model.KEPT_ANSWER.exists()


class Hub(StubHandler):
    """Answers as the hub does: 404 of names that are gone, else the sizes of files."""

    def do_GET(self):
        name = self.path.removeprefix("/api/models/").partition("?")[0]
        files = [
            {"rfilename": "model.safetensors", "size": 5 * GB},
            {"rfilename": "README.md", "size": 7},
        ]
        status = self.server.status_of_gone if name in self.server.gone else 200
        self.answer(status, json.dumps({"siblings": files}).encode())


@pytest.fixture
def hub(monkeypatch):
    """A hub that a test gives `gone`, the names that it does not know."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    with running(server) as port:
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(choose_model.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(choose_model.constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.mark.parametrize("status", [401, 404])
def test_a_name_that_is_gone_is_left_out_with_a_sentence(home, hub, capsys, status):
    hub.status_of_gone = status
    hub.gone = [f"mlx-community/{name}" for name in TIERS[48]]

    offers = choose_model.list_offers_of_hub(mac(48), [])

    assert not set(hub.gone) & {model.name for model in offers}
    assert len(offers) == 2 and {model.nbytes for model in offers} == {5 * GB}
    shown = capsys.readouterr().err
    for name in hub.gone:
        assert f"{name} is no longer on the Hugging Face hub" in shown


# -- a person at a terminal ----------------------------------------------------------

PROGRAM = """
import sys, pathlib, choose_model as c
c.KEPT_ANSWER = pathlib.Path(sys.argv[1])
c.read_machine = lambda _=None: c.Machine(True, 10 * 10**9, 10**12)
def answer(name, size={size}):
    if size is None:
        raise OSError
    return size
c.ask_hub_for_size = answer
open(sys.argv[2], "w").write(c.choose())
"""


def answer_on_terminal(home, keys, *, size="4_600_000_000"):
    """(the name it chose, all that was on the terminal) for what a person types."""
    folder = str(Path(choose_model.__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r})\n" + PROGRAM.format(size=size)
    pid, terminal = pty.fork()
    if not pid:
        arguments = [str(home / ".chosen-model"), str(home / "name")]
        os.execv(sys.executable, [sys.executable, "-c", code, *arguments])

    shown = b""
    os.write(terminal, keys)
    while select.select([terminal], [], [], 60)[0]:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        shown += piece

    os.waitpid(pid, 0)
    os.close(terminal)
    return (home / "name").read_text(), shown.decode()


@pytest.mark.parametrize(
    ("keys", "name", "is_kept"),
    [
        (b"\n", "mlx-community/Qwen3.5-9B-MLX-4bit", True),
        at_night(b"1\n", "mlx-community/Qwen3.5-9B-MLX-4bit", True),
        (b"2\n", "lmstudio-community/gemma-4-E4B-it-MLX-4bit", True),
        (b"demo\n", DEMO, True),
        (b"n\n", DEMO, False),
        at_night(b"\x04", DEMO, False),  # Ctrl-D
        at_night(b"what?\n7\nn\n", DEMO, False),
        (b"a\nb\nc\n", DEMO, False),
    ],
)
def test_a_download_is_asked_for_with_its_size_and_folder(home, keys, name, is_kept):
    chosen, shown = answer_on_terminal(home, keys)

    assert chosen == name
    assert (
        "mlx-community/Qwen3.5-9B-MLX-4bit: 4.6 GB into ~/.cache/huggingface" in shown
    )
    assert "remembers 75,000 tokens (56,000 words): an hour of work" in shown
    assert "the better one for agents" in shown
    assert (
        "DRAFT_MODEL=mlx-community/Qwen3.5-9B-MTP-4bit in the file .env: 0.1 GB more"
        in shown
    )
    assert (home / ".chosen-model").exists() == is_kept


def test_a_first_choice_has_room_for_an_hour_with_every_agent_in_8_bits():
    titles = [client.title for client in launch.CLIENTS.values()]
    for gigabytes in TIERS:
        machine = mac(gigabytes)
        context = machine.count_context(
            list_offers(machine, [])[0], kv_share=PACKED_SHARE
        )
        work = launch.HOUR_TOKENS
        assert launch.clients_with_room(context, n_work=work) == titles


def test_the_answer_is_not_asked_for_again_while_it_can_be_served(home):
    write_cached_model(home, "org/tiny")
    first, shown = answer_on_terminal(home, b"1\n")
    again, shown_again = answer_on_terminal(home, b"")

    assert first == again == "org/tiny"
    assert "org/tiny: 0.0 GB here already" in shown
    assert "Enter for" not in shown_again
