"""Fetch the chat templates and tokenizers of other projects that some tests read.

    python scripts/tools/fetch_artifacts.py [FOLDER]    default: MODEL_ARTIFACTS, or .artifacts

They come from Hugging Face and keep their own licences, so this repository does not hold them.
A file that cannot be had is named, and the exit status is 1; the tests that need it are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

Fetch = Callable[
    [str, str], Path
]  # a repository and a file in it -> the file on this machine


@dataclass(frozen=True)
class Artifact:
    """A file of the folder, and the repository that has it."""

    path: str
    repository: str
    file: str


ARTIFACTS: Final = (
    Artifact("templates/qwen3.jinja", "Qwen/Qwen3-0.6B", "tokenizer_config.json"),
    Artifact(
        "templates/qwen3-coder.jinja",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "chat_template.jinja",
    ),
    Artifact("templates/qwen3.5.jinja", "Qwen/Qwen3.5-4B", "chat_template.jinja"),
    Artifact(
        "templates/glm-4.7-flash.jinja", "zai-org/GLM-4.7-Flash", "chat_template.jinja"
    ),
    Artifact(
        "templates/gemma-3.jinja", "google/gemma-3-1b-it", "tokenizer_config.json"
    ),
    Artifact("templates/gemma-4.jinja", "google/gemma-4-31B-it", "chat_template.jinja"),
    Artifact("tokenizers/qwen3.tokenizer.json", "Qwen/Qwen3-0.6B", "tokenizer.json"),
    Artifact("tokenizers/glm-4.tokenizer.json", "zai-org/GLM-4.6", "tokenizer.json"),
)


def fetch_from_hub(repository: str, file: str) -> Path:
    """Raises OSError, of which the hub's own errors are kinds."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file))


def read_artifact(artifact: Artifact, fetch: Fetch) -> str:
    """Raises OSError where the file cannot be had, ValueError where it has no template."""
    text = fetch(artifact.repository, artifact.file).read_text(encoding="utf-8")
    if artifact.file != "tokenizer_config.json":
        return text

    template = json.loads(text).get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{artifact.file} has no chat_template")
    return template


def fetch_all(folder: Path, fetch: Fetch) -> list[str]:
    """Write what is not there yet. Returns a sentence for each file that could not be had."""
    faults = []
    for artifact in ARTIFACTS:
        path = folder / artifact.path
        if path.exists():
            continue

        try:
            text = read_artifact(artifact, fetch)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            faults.append(f"{artifact.path} from {artifact.repository}: {reason}")
            continue

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = os.environ.get("MODEL_ARTIFACTS") or str(ROOT / ".artifacts")
    parser.add_argument("folder", nargs="?", default=default)
    folder = Path(parser.parse_args(arguments).folder).expanduser()

    faults = fetch_all(folder, fetch_from_hub)
    for fault in faults:
        print(f"fetch_artifacts: {fault}", file=sys.stderr)
    print(f"{len(ARTIFACTS) - len(faults)} of {len(ARTIFACTS)} files are in {folder}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
