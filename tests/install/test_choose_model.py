"""scripts/helpers/choose_model.py: a model that fits every machine; only a yes downloads one."""

import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import choose_model
import launch
import pytest
from choose_model import APPLE_MODELS, CPU_MODELS, DEMO, Machine, Model, list_offers

GIB = 2**30
GB = 10**9
# Memory of a Mac in GB, and what it is offered first.
TIERS = {
    8: "Qwen3-1.7B-4bit",
    16: "Qwen3-8B-4bit",
    24: "Qwen3-14B-4bit",
    32: "GLM-4.7-Flash-MLX-4bit",
    64: "Qwen3-Coder-30B-A3B-Instruct-8bit",
    128: "GLM-4.5-Air-4bit",
}


def mac(gigabytes, *, disk=1000 * GB):
    memory = choose_model.usable_memory(gigabytes * GIB, is_apple_silicon=True)
    return Machine(is_apple_silicon=True, memory_bytes=memory, disk_bytes=disk)


def linux(gigabytes, *, disk=1000 * GB):
    memory = choose_model.usable_memory(gigabytes * GIB, is_apple_silicon=False)
    return Machine(is_apple_silicon=False, memory_bytes=memory, disk_bytes=disk)


def local(name, nbytes):
    return Model(name, nbytes, 100_000, is_local=True)


# -- decide ---------------------------------------------------------------------


@pytest.mark.parametrize(("gigabytes", "name"), TIERS.items())
def test_a_mac_is_offered_the_largest_model_that_fits_with_its_context(gigabytes, name):
    machine = mac(gigabytes)

    (offer,) = list_offers(machine, [])

    assert offer.name.endswith(name)
    assert machine.count_context(offer) >= choose_model.CONTEXT_TOKENS
    larger = [model for model in APPLE_MODELS if model.nbytes > offer.nbytes]
    assert not any(machine.can_serve(model) for model in larger)


@pytest.mark.parametrize("gigabytes", TIERS)
@pytest.mark.parametrize("disk", [0, GB, 3 * GB, 5 * GB, 20 * GB, 50 * GB])
def test_on_a_small_disk_the_download_fits_or_nothing_is_offered(gigabytes, disk):
    offers = list_offers(mac(gigabytes, disk=disk), [])

    assert all(model.nbytes < disk for model in offers)
    assert bool(offers) == (disk >= 3 * GB)


@pytest.mark.parametrize(("gigabytes", "n_offers"), [(1, 0), (4, 0), (8, 1), (256, 1)])
def test_a_linux_cpu_is_offered_the_small_model_or_the_demo(gigabytes, n_offers):
    assert list_offers(linux(gigabytes), []) == list(CPU_MODELS[:n_offers])
    assert list_offers(linux(gigabytes, disk=2 * GB), []) == []


def test_what_is_here_comes_first_and_what_does_not_fit_is_left_out():
    small = local("mlx-community/Qwen3-4B-4bit", 2 * GB)
    unknown = local("me/own", 6 * GB)
    huge = local("me/huge", 90 * GB)

    offers = list_offers(mac(32), [unknown, huge, small])

    assert offers[:2] == [small, unknown]
    assert offers[2].name.endswith(TIERS[32]) and not offers[2].is_local
    assert list_offers(mac(32, disk=0), [huge]) == []


def test_a_known_model_that_is_here_is_not_offered_as_a_download():
    for prefix in ("", "/home/me/.lmstudio/models/"):
        model = local(f"{prefix}mlx-community/Qwen3-8B-4bit", 4_600_000_000)
        assert list_offers(mac(16), [model]) == [model]
    assert list_offers(linux(8), [local("me/large", 5 * GB)]) == [*CPU_MODELS]


def test_the_names_of_the_list_are_repositories_of_falling_size():
    sizes = [model.nbytes for model in APPLE_MODELS]
    assert sizes == sorted(sizes, reverse=True)
    assert all(model.name.count("/") == 1 for model in (*APPLE_MODELS, *CPU_MODELS))


# -- this machine ----------------------------------------------------------------


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


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
    assert {model.kv_bytes_per_token for model in found} == {128}
    assert {model.longest_context for model in found} == {choose_model.LONGEST_CONTEXT}
    assert all(model.is_local for model in found)


def test_the_context_that_a_model_was_made_for_is_all_that_it_has_room_for(home):
    write_cached_model(home, "org/short", max_position_embeddings=8_192)

    [model] = choose_model.find_local_models()

    assert model.longest_context == 8_192
    assert mac(64).count_context(model) == 8_000


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
        choose_model, "ask_hub_for_size", lambda _: pytest.fail("asked the network")
    )

    assert choose_model.choose() == DEMO
    assert "the demo model is served" in capsys.readouterr().err

    write_cached_model(home, "org/tiny")
    assert choose_model.choose() == "org/tiny"
    assert "org/tiny is here already" in capsys.readouterr().err
    assert not choose_model.KEPT_ANSWER.exists()


def test_a_hub_that_never_answers_is_waited_for_three_seconds_at_most(
    home, monkeypatch
):
    is_answered = threading.Event()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(choose_model, "NETWORK_SECONDS", 0.1)
    monkeypatch.setattr(
        choose_model.urllib.request, "urlopen", lambda *_, **__: is_answered.wait(60)
    )

    started = time.monotonic()
    assert choose_model.ask_hub_for_size("org/tiny") is None
    assert time.monotonic() - started < 30

    is_answered.set()


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
def test_the_program_answers_without_a_terminal(home, stdin):
    result = subprocess.run(
        [sys.executable, choose_model.__file__],
        check=True,
        stdin=stdin,
        capture_output=True,
        text=True,
    )

    assert result.stdout == "demo\n"


# -- a person at a terminal ----------------------------------------------------------

PROGRAM = """
import sys, pathlib, choose_model as c
c.KEPT_ANSWER = pathlib.Path(sys.argv[1])
c.read_machine = lambda _=None: c.Machine(True, 10 * 10**9, 10**12)
c.ask_hub_for_size = lambda name: {size}
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
        (b"\n", "mlx-community/Qwen3-8B-4bit", True),
        (b"1\n", "mlx-community/Qwen3-8B-4bit", True),
        (b"demo\n", DEMO, True),
        (b"n\n", DEMO, False),
        (b"\x04", DEMO, False),  # Ctrl-D
        (b"what?\n7\nn\n", DEMO, False),
        (b"a\nb\nc\n", DEMO, False),
    ],
)
def test_a_download_is_asked_for_with_its_size_and_folder(home, keys, name, is_kept):
    chosen, shown = answer_on_terminal(home, keys)

    assert chosen == name
    assert "mlx-community/Qwen3-8B-4bit: 4.6 GB into ~/.cache/huggingface" in shown
    assert "20,000 tokens of context: room for every agent" in shown
    assert (home / ".chosen-model").exists() == is_kept


def test_a_model_is_offered_only_with_room_for_every_agent():
    agents = launch.clients_with_room(choose_model.CONTEXT_TOKENS)
    assert agents == [client.title for client in launch.CLIENTS.values()]


def test_the_agents_that_have_room_are_named_beside_a_model():
    machine = mac(8)
    long = local("org/long", GB)
    short = replace(long, longest_context=8_000)
    tiny = replace(long, longest_context=2_000)

    assert "room for every agent" in choose_model.describe_room(machine, long)
    assert choose_model.describe_room(machine, short) == (
        "some 8,000 tokens of context: room for Claude Code with --small, PI"
    )
    assert "room for no agent" in choose_model.describe_room(machine, tiny)


def test_the_answer_is_not_asked_for_again_while_it_can_be_served(home):
    write_cached_model(home, "org/tiny")
    first, shown = answer_on_terminal(home, b"1\n")
    again, shown_again = answer_on_terminal(home, b"")

    assert first == again == "org/tiny"
    assert "org/tiny: 0.0 GB here already" in shown
    assert "Enter for" not in shown_again

    (home / ".chosen-model").write_text("org/gone")
    assert answer_on_terminal(home, b"n\n")[0] == DEMO


def test_without_network_nothing_is_offered_for_download(home):
    chosen, shown = answer_on_terminal(home, b"", size="None")

    assert chosen == DEMO
    assert "does not answer" in shown and "Enter for" not in shown
