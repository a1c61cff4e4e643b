"""Find the model that a name stands for, fetch what of it is not here yet, and print its folder.

    .venv/bin/python scripts/helpers/fetch_model.py [NAME] [--memory-bytes N] [--setting NAME]

NAME is a folder, a Hugging Face repository or "demo". Without one it is MODEL_PATH, and without
that choose_model.py asks, as at the start of start-llm.py. MODEL_PATH and HF_TOKEN come from the
environment or from .env.

start-llm.py runs this where MODEL_PATH is no complete folder; by hand it fetches a model before
going offline. The last line of stdout is the folder; progress is on stderr. What fails is one
sentence on stderr and exit status 2. What can be known before a long download (type, size against
memory and disk) is asked before it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote_plus

if __name__ == "__main__":
    # Ctrl-C ends it at once, in the slow imports, too; Python would wait for the hub's threads, to
    # the end of their files.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import huggingface_hub
import mlx_lm
import psutil  # type: ignore[import-untyped]
from choose_model import DEMO, choose, first_fitting
from count_kv import find_vision_module
from dotenv import dotenv_values
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _get_classes
from rich.filesize import decimal as in_bytes

ROOT: Final = Path(__file__).resolve().parents[2]
# beside the weights: activations, KV of an agent's first steps
WORKING_BYTES: Final = 2 * 2**30
# HEAD_TARGETS of start-llm.py.
HEAD_TYPES: Final = ("qwen3_5_mtp", "gemma4_assistant", "gemma4_unified_assistant")
# What mlx-lm needs of a repository: the folder, or the list of files of a dry run.
snapshot = partial(
    huggingface_hub.snapshot_download, allow_patterns=DEFAULT_ALLOW_PATTERNS
)


class FetchError(Exception):
    """Why there is no model, in one sentence."""


@contextmanager
def in_a_sentence(what_fails: str) -> Iterator[None]:
    """Turn whatever is raised inside into a FetchError."""
    try:
        yield
    except FetchError:
        raise
    except Exception as error:  # mlx-lm, the hub, httpx, xet raise what they like
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise FetchError(f"{what_fails}: {reason or type(error).__name__}") from error


def find(
    name: str, *, token: str | None, memory_bytes: int, setting: str = "MODEL_PATH"
) -> Path:
    """The folder of a model; a first time may take minutes. Raises FetchError.

    `setting`: what names the model, for errors.
    """
    if name == DEMO:
        return complete(ROOT / "models" / DEMO)
    with in_a_sentence(f"{setting}={name} cannot be used"):
        folder = Path(name).expanduser()
        if folder.is_file():
            raise ValueError(
                "it is a file, and mlx-lm reads a folder, with config.json and "
                "*.safetensors in it (no GGUF, nor PyTorch files)"
            )
        if folder.exists():
            return complete(folder)
    repo = name.removeprefix(f"{huggingface_hub.constants.ENDPOINT}/")
    if repo != name:  # as copied from the browser
        repo = repo.rstrip("/").removesuffix("/tree/main")
    with suppress(OSError, ValueError, FetchError):  # it is not here, or not whole
        return complete(Path(snapshot(repo, local_files_only=True)))
    return download(repo, token=token, memory_bytes=memory_bytes, setting=setting)


def complete(folder: Path) -> Path:
    """`folder`, if it has all that mlx-lm needs. Raises FetchError, saying what lacks."""
    with in_a_sentence(f"The model folder {folder} cannot be used"):
        index = folder / "model.safetensors.index.json"
        needed = ["config.json", "model*.safetensors"]
        if index.is_file():
            needed += sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        lacks = [n for n in needed if not any(f.is_file() for f in folder.glob(n))]
        if lacks:
            reason = "(mlx-lm reads neither GGUF nor PyTorch files)"
            raise ValueError(f"it has no {', '.join(lacks[:3])} {reason}")
        return folder


def download(repo: str, *, token: str | None, memory_bytes: int, setting: str) -> Path:
    """Fetch what is not here yet, the hub showing how far it is. Raises FetchError."""
    hub = huggingface_hub.constants.ENDPOINT
    errors = huggingface_hub.errors
    question = f"is there a network, and is the name right?{name_advice(repo, setting)}"
    with suppress(ValueError):  # no name of a repository
        if isinstance(huggingface_hub.try_to_load_from_cache(repo, "config.json"), str):
            question = "start again to resume."
    advice = f"{question} Or set {setting} to a folder or to {DEMO}"
    fault = f"{repo} is not complete in the local cache and {hub} fails ({advice})"
    with in_a_sentence(fault):
        try:
            # Asked first because it fails at once; without a network the others retry for 23 s.
            huggingface_hub.HfApi().model_info(repo, token=token, timeout=10)
            config = huggingface_hub.hf_hub_download(repo, "config.json", token=token)
            check_architecture(Path(config), setting=setting)
            files = snapshot(repo, token=token, dry_run=True)
            check_room(repo, files, memory_bytes=memory_bytes, setting=setting)
            return complete(Path(snapshot(repo, token=token)))
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            reason = (
                f"{setting}={repo} is neither a folder on this machine nor a "
                f"repository on {hub} (a private one needs HF_TOKEN)."
            )
            reason += name_advice(repo, setting)
            if isinstance(error, errors.GatedRepoError):
                reason = f"{repo} is gated: accept its terms at {hub}/{repo}, then set HF_TOKEN."
            raise FetchError(reason) from error
        except errors.RemoteEntryNotFoundError as error:
            reason = (
                f"{repo} has no config.json: no model that mlx-lm reads (GGUF is not)."
            )
            raise FetchError(reason) from error
        except errors.HfHubHTTPError as error:
            if error.response.status_code != 401:
                raise
            raise FetchError(
                f"{hub} refuses the token (HF_TOKEN, or that of `hf auth login`), "
                "for public models, too."
            ) from error


def name_advice(name: str, setting: str) -> str:
    """Which names work, in place of one that no repository can have; "" of all others."""
    if "/" in name:
        return ""
    is_of_ollama = re.fullmatch(r"[\w.-]+:[\w.-]+", name)  # qwen3:8b
    advice = " This is how Ollama names a model." if is_of_ollama else ""
    words = quote_plus(name.replace(":", " "))
    page = f"{huggingface_hub.constants.ENDPOINT}/models?library=mlx&search={words}"
    return f"{advice} Here it is {setting}=OWNER/NAME: {page} lists such models."


def check_architecture(config_file: Path, *, setting: str = "MODEL_PATH") -> None:
    """Raise FetchError unless mlx-lm, mlx-vlm or the model's own file can build what this names."""
    with in_a_sentence(f"{config_file} cannot be read"):
        facts = {**json.loads(config_file.read_bytes())}
    kind = facts.get("model_type")
    is_head = setting == "DRAFT_MODEL" and kind in HEAD_TYPES
    if is_head or facts.get("model_file"):
        return
    if isinstance(facts.get("vision_config"), dict) and find_vision_module(facts):
        return

    version = mlx_lm.__version__
    with in_a_sentence(f"Models of type {kind!r} are not known to mlx-lm {version}"):
        try:
            _get_classes(facts)  # private, but what mlx_lm.load() asks
        except ValueError:
            if not find_vision_module(facts):  # which serves text alone, too
                raise


def check_room(
    repo: str, files: Sequence[Any], *, memory_bytes: int, setting: str
) -> None:
    """Raise FetchError unless memory has room for the weights and the disk for what is to come."""
    weight_files = [file for file in files if file.filename.endswith(".safetensors")]
    new_files = [file for file in files if file.will_download]
    needed_bytes = WORKING_BYTES + sum(file.file_size or 0 for file in weight_files)
    fetched_bytes = sum(file.file_size or 0 for file in new_files)
    cache = huggingface_hub.constants.HF_HUB_CACHE
    free_bytes = shutil.disk_usage(cache).free

    if needed_bytes > memory_bytes or fetched_bytes > free_bytes:
        advice = "the smaller the better"
        if setting == "MODEL_PATH":
            smaller = first_fitting(min(memory_bytes - WORKING_BYTES, free_bytes))
            advice = f"MODEL_PATH={smaller} would fit"
        raise FetchError(
            f"{repo} needs {in_bytes(needed_bytes)} of memory (the server may use "
            f"{in_bytes(memory_bytes)}) and {in_bytes(fetched_bytes)} more on disk "
            f"({cache} has {in_bytes(free_bytes)} free); {advice}."
        )
    text = f"{repo}: fetching {in_bytes(fetched_bytes)} into {cache}"
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("NAME", nargs="?", help="folder, repository or demo")
    total = psutil.virtual_memory().total
    text = "that a model may use (default: this machine's, %(default)s)"
    parser.add_argument("--memory-bytes", type=int, default=total, help=text)
    text = "that names it, for errors (default: %(default)s)"
    parser.add_argument("--setting", default="MODEL_PATH", help=text)
    args = parser.parse_args()
    try:
        with in_a_sentence(f"{ROOT / '.env'} cannot be read"):
            settings = {**dotenv_values(ROOT / ".env"), **os.environ}
        name = args.NAME or (settings.get("MODEL_PATH") or "").strip() or choose()
        token = (settings.get("HF_TOKEN") or "").strip() or None
        memory_bytes, setting = args.memory_bytes, args.setting
        print(find(name, token=token, memory_bytes=memory_bytes, setting=setting))
    except FetchError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
