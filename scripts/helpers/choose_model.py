"""Choose the model to serve where MODEL_PATH names none, and print its name.

    .venv/bin/python scripts/helpers/choose_model.py [--memory-bytes N]

Offers models that are on this machine already (Hugging Face cache, LM Studio's folders), then the
largest model of a short list that fits into memory and on the disk. On a terminal it asks, and
keeps the answer in .chosen-model beside start-llm.py. Without a terminal it takes what is here.
Else, or without network, or when declined, it is the demo model: nothing is downloaded without a
person's yes. start-llm.py runs this before it loads a model; the last line of stdout is the name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
from launch import CLIENTS, clients_with_room

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT_ANSWER: Final = ROOT / ".chosen-model"
DEMO: Final = "demo"

CONTEXT_TOKENS: Final = 18_000  # the least in which every agent of launch.py can work
LONGEST_CONTEXT: Final = 196_608  # tokens: start-llm.py's MAX_KV_SIZE
CACHE_SHARE: Final = 0.55  # of the memory beside the weights: start-llm.py's KV cache
SPARE_DISK_BYTES: Final = 2_000_000_000
CPU_MOST_BYTES: Final = 2_500_000_000  # on a CPU a larger model takes minutes to answer
NETWORK_SECONDS: Final = 3.0
MOST_QUESTIONS: Final = 3  # until an answer is understood

# What mlx-lm calls by another name than its file has: the types that are often met.
MODEL_FILES: Final = {
    "mistral": "llama",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its repository or folder."""

    name: str
    nbytes: int  # of its weights, which is nearly what a download takes
    kv_bytes_per_token: int
    is_local: bool = False
    longest_context: int = LONGEST_CONTEXT  # tokens that it was made for, if fewer

    @property
    def repository(self) -> str:
        """Its repository, by the last two folders if `name` is a path."""
        return "/".join(self.name.split("/")[-2:])

    @property
    def memory_bytes(self) -> int:
        """What it needs with the KV of CONTEXT_TOKENS."""
        return self.nbytes + int(CONTEXT_TOKENS * self.kv_bytes_per_token / CACHE_SHARE)


# Known-good models, the largest first. KV: layers x heads x width x 2 (keys, values) x 2 bytes.
APPLE_MODELS: Final = (
    Model(
        "mlx-community/GLM-4.5-Air-4bit",
        60_200_000_000,
        188_416,
        longest_context=131_072,
    ),
    Model("mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit", 32_400_000_000, 98_304),
    Model("lmstudio-community/GLM-4.7-Flash-MLX-4bit", 16_900_000_000, 54_144),
    Model(
        "mlx-community/Qwen3-14B-4bit", 8_310_000_000, 163_840, longest_context=40_960
    ),
    Model(
        "mlx-community/Qwen3-8B-4bit", 4_610_000_000, 147_456, longest_context=40_960
    ),
    Model(
        "mlx-community/Qwen3-4B-4bit", 2_260_000_000, 147_456, longest_context=40_960
    ),
    Model(
        "mlx-community/Qwen3-1.7B-4bit", 970_000_000, 114_688, longest_context=40_960
    ),
    Model(
        "mlx-community/Qwen3-0.6B-4bit", 335_000_000, 114_688, longest_context=40_960
    ),
)
CPU_MODELS: Final = (
    Model("Qwen/Qwen3-0.6B", 1_520_000_000, 114_688, longest_context=40_960),
)


# Decide -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which models can be served."""

    is_apple_silicon: bool
    memory_bytes: int  # that the server may use
    disk_bytes: int  # free where downloads go

    def can_serve(self, model: Model) -> bool:
        """Whether memory has room for a model and its context."""
        is_slow = not self.is_apple_silicon and model.nbytes > CPU_MOST_BYTES
        return model.memory_bytes <= self.memory_bytes and not is_slow

    def count_context(self, model: Model, *, kv_share: float = 1.0) -> int:
        """Tokens of context that there is room for, in full thousands.

        `kv_share`: bytes of KV by those without KV_BITS.
        """
        kv_bytes = CACHE_SHARE * (self.memory_bytes - model.nbytes)
        n_tokens = int(kv_bytes / model.kv_bytes_per_token / kv_share)
        return min(n_tokens, model.longest_context) // 1000 * 1000


def usable_memory(total_bytes: int, *, is_apple_silicon: bool) -> int:
    """What start-llm.py may use of a machine's memory: 0.9 of what Metal recommends.

    That is two thirds of up to 36 GB and three quarters of more. Without Metal it is all.
    """
    share = 1.0
    if is_apple_silicon:
        share = 2 / 3 if total_bytes <= 36 * 2**30 else 3 / 4
    return int(0.9 * share * total_bytes)


def list_offers(machine: Machine, local_models: Sequence[Model]) -> list[Model]:
    """The models to offer: those that are here, known-good ones first, then a download.

    The download is the largest known-good model that fits, if none as large is here. An
    empty list means that only the demo model fits.
    """
    known_models = APPLE_MODELS if machine.is_apple_silicon else CPU_MODELS
    known_names = {model.name for model in known_models}
    local_offers = [model for model in local_models if machine.can_serve(model)]
    local_offers.sort(
        key=lambda model: (model.repository not in known_names, -model.nbytes)
    )
    local_names = {model.repository for model in local_offers}

    for model in known_models:
        if model.name in local_names:
            return local_offers
        is_on_disk = model.nbytes + SPARE_DISK_BYTES <= machine.disk_bytes
        if machine.can_serve(model) and is_on_disk:
            return [*local_offers, model]
    return local_offers


def largest_fitting(room_bytes: int) -> str:
    """The largest known-good model whose weights take no more than that, or the demo."""
    return next((m.name for m in APPLE_MODELS if m.nbytes <= room_bytes), DEMO)


# Look at this machine ---------------------------------------------------------


def read_machine(memory_bytes: int | None = None) -> Machine:
    """This machine; `memory_bytes` is what the server may use, if that is known."""
    system = os.uname()
    is_apple_silicon = (system.sysname, system.machine) == ("Darwin", "arm64")
    total_bytes = psutil.virtual_memory().total
    usable_bytes = usable_memory(total_bytes, is_apple_silicon=is_apple_silicon)
    folder = hub_cache()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    return Machine(is_apple_silicon, memory_bytes or usable_bytes, free_bytes)


def hub_cache() -> Path:
    """Where huggingface_hub keeps downloads."""
    environ = os.environ
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser().absolute()


def find_local_models() -> list[Model]:
    """Complete models in MLX's format that are on this machine and can chat."""
    folders: dict[str, Path] = {}
    for repository in sorted(hub_cache().glob("models--*--*")):
        with suppress(OSError):
            revision = (repository / "refs" / "main").read_text().strip()
            name = repository.name.removeprefix("models--").replace("--", "/")
            folders[name] = repository / "snapshots" / revision
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        for folder in sorted(Path(root).expanduser().glob("*/*")):
            folders[str(folder)] = folder

    models = [read_model(name, folder) for name, folder in folders.items()]
    return [model for model in models if model is not None]


def read_model(name: str, folder: Path) -> Model | None:
    """What a folder holds; None if it is no complete chat model that mlx-lm can load."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        facts = json.loads((folder / "config.json").read_bytes())
        if not can_chat(folder) or not is_known_type(facts["model_type"]):
            return None
        index_file = folder / "model.safetensors.index.json"
        names = {file.name for file in folder.glob("model*.safetensors")}
        if index_file.is_file():
            names |= set(json.loads(index_file.read_bytes())["weight_map"].values())
        nbytes = sum((folder / file_name).stat().st_size for file_name in names)
        if nbytes:
            longest = min(LONGEST_CONTEXT, read_longest_context(facts))
            kv_bytes = count_kv_bytes(facts)
            return Model(name, nbytes, kv_bytes, True, longest_context=longest)
    return None


def can_chat(folder: Path) -> bool:
    """Whether a model has a chat template: embeddings and base models have none."""
    if any(folder.glob("chat_template.*")):
        return True
    text = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    return "chat_template" in json.loads(text)


def is_known_type(model_type: str) -> bool:
    """Whether mlx-lm has a file for a type of model; nothing of it is imported."""
    package = importlib.util.find_spec("mlx_lm")
    folders = package.submodule_search_locations if package else None
    file_name = f"{MODEL_FILES.get(model_type, model_type)}.py"
    return any(Path(folder, "models", file_name).is_file() for folder in folders or ())


def read_longest_context(facts: dict[str, Any]) -> int:
    """Tokens that a model was made for, by config.json."""
    facts = {**facts, **(facts.get("text_config") or {})}
    return int(facts.get("max_position_embeddings") or LONGEST_CONTEXT)


def count_kv_bytes(facts: dict[str, Any]) -> int:
    """Bytes of KV a token, by config.json, as if all layers had full attention."""
    facts = {**facts, **(facts.get("text_config") or {})}
    n_heads = int(facts["num_attention_heads"])
    n_kv_heads = int(facts.get("num_key_value_heads") or n_heads)
    width = int(facts.get("head_dim") or facts["hidden_size"] // n_heads)
    if facts.get("kv_lora_rank"):  # latent attention: one compressed vector
        latent = int(facts["kv_lora_rank"]) + int(facts.get("qk_rope_head_dim") or 0)
        return 2 * int(facts["num_hidden_layers"]) * latent
    return 2 * 2 * int(facts["num_hidden_layers"]) * n_kv_heads * width


def ask_hub_for_size(name: str) -> int | None:
    """Bytes of a repository's weights; None if the hub does not answer in time."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return None
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/api/models/{name}?blobs=true"
    sizes: list[int] = []

    def fetch() -> None:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            with urllib.request.urlopen(url, timeout=NETWORK_SECONDS) as response:
                files = json.load(response)["siblings"]
            weights = [f for f in files if f["rfilename"].endswith(".safetensors")]
            sizes.append(sum(file.get("size") or 0 for file in weights))

    # In a thread of its own: to look a name up has no limit of time.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(NETWORK_SECONDS)
    return sizes[0] if sizes else None


# Ask --------------------------------------------------------------------------


def is_on_terminal() -> bool:
    """Whether a person can be asked: not in a pipe, nor in the background."""
    try:
        is_foreground = os.tcgetpgrp(0) == os.getpgrp()
        return is_foreground and os.isatty(0) and os.isatty(2)
    except OSError:  # stdin is closed, or no terminal
        return False


def choose(memory_bytes: int | None = None) -> str:
    """The name of the model to serve. Asks on a terminal; never fails."""
    machine = read_machine(memory_bytes)
    local_models = find_local_models()
    kept_name = read_kept_answer()
    if kept_name in {DEMO, *[model.name for model in local_models]}:
        say(f"{kept_name} is served, as answered before ({KEPT_ANSWER.name} keeps it)")
        return kept_name

    offers = list_offers(machine, local_models)
    if not is_on_terminal():
        return choose_alone(offers)
    offers = confirm_download(offers)
    if not offers:
        say("no model of the list can be had here; the demo model is served")
        return DEMO
    if len(offers) == 1 and offers[0].is_local:
        say(f"{offers[0].name} is here already, and is served")
        return offers[0].name
    return ask(offers, machine)


def choose_alone(offers: Sequence[Model]) -> str:
    """What is served where nobody can be asked: a model that is here, or the demo."""
    if offers and offers[0].is_local:
        say(f"no model is chosen; {offers[0].name} is here already, and is served")
        return offers[0].name
    advice = f" (a real one: --model {offers[0].name})" if offers else ""
    say(f"no model is chosen and none is here: the demo model is served{advice}")
    return DEMO


def confirm_download(offers: list[Model]) -> list[Model]:
    """The offers, the download with the size that the hub states, or without it."""
    if not offers or offers[-1].is_local:
        return offers
    nbytes = ask_hub_for_size(offers[-1].name)
    if nbytes is None:
        say("the Hugging Face hub does not answer: nothing can be downloaded now")
        return offers[:-1]
    return [*offers[:-1], replace(offers[-1], nbytes=nbytes or offers[-1].nbytes)]


def ask(offers: Sequence[Model], machine: Machine) -> str:
    """Let the person at the terminal choose, and keep the answer."""
    say(f"no model is chosen. For {in_gigabytes(machine.memory_bytes)} of memory:")
    for number, model in enumerate(offers, start=1):
        location = "here already" if model.is_local else f"into {shorten(hub_cache())}"
        print(
            f"  {number}  {model.name}: {in_gigabytes(model.nbytes)} {location}",
            file=sys.stderr,
        )
        print(f"     {describe_room(machine, model)}", file=sys.stderr)
    other_numbers = ", another number" if len(offers) > 1 else ""
    question = (
        f"Enter for 1{other_numbers}, n (demo model, this time) or demo (always): "
    )

    for _ in range(MOST_QUESTIONS):
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        name = read_answer(answer, offers)
        if name == "" or not answer:  # declined, or Ctrl-D
            return DEMO
        if name is not None:
            keep_answer(name)
            return name
    say("no answer that can be used; the demo model is served")
    return DEMO


def describe_room(machine: Machine, model: Model) -> str:
    """How much context a model has on this machine, and which agents fit into it."""
    context = machine.count_context(model)
    fitting = clients_with_room(context)
    if len(fitting) == len(CLIENTS):
        agents = "room for every agent that launch starts"
    else:
        agents = f"room for {', '.join(fitting) or 'no agent'}"
    return f"some {context:,} tokens of context: {agents}"


def read_answer(answer: str, offers: Sequence[Model]) -> str | None:
    """The model that is meant, "" for none, or None if the answer says nothing."""
    word = answer.strip().lower()
    if word in {"n", "no"}:
        return ""
    if word == DEMO:
        return DEMO
    if word in {"", "y", "yes"}:
        return offers[0].name
    if word.isdecimal() and 0 < int(word) <= len(offers):
        return offers[int(word) - 1].name
    return None


def read_kept_answer() -> str:
    with suppress(OSError, ValueError):
        return KEPT_ANSWER.read_text(encoding="utf-8").strip()
    return ""


def keep_answer(name: str) -> None:
    with suppress(OSError):  # a folder that may only be read: it is asked again
        KEPT_ANSWER.write_text(name + "\n", encoding="utf-8")
        say(f"kept in {KEPT_ANSWER.name}; --model or MODEL_PATH wins over it")


def shorten(folder: Path) -> str:
    """A folder with ~ for the home folder, as a person writes it."""
    home = str(Path.home())
    text = str(folder)
    return "~" + text.removeprefix(home) if text.startswith(home + "/") else text


def in_gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def say(sentence: str) -> None:
    print(f"start-llm: {sentence}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--memory-bytes", metavar="N", type=int, help="that the server may use"
    )
    arguments = parser.parse_args()
    try:
        print(choose(arguments.memory_bytes))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
