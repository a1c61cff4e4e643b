"""Fetch the chat templates and tokenizers of other projects that some tests read.

    python scripts/tools/fetch_artifacts.py [FOLDER]    default: MODEL_ARTIFACTS, or .artifacts

They come from Hugging Face and keep their own licences, so this repository does not hold them.
A file that cannot be had is named, and the exit status is 1; the tests that need it are skipped.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download

ROOT: Final = Path(__file__).resolve().parents[2]
ARTIFACTS: Final = {  # a file of the folder: the repository that has it, and its name there
    "templates/qwen3.jinja": ("Qwen/Qwen3-0.6B", "tokenizer_config.json"),
    "templates/qwen3-coder.jinja": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "chat_template.jinja",
    ),
    "templates/qwen3.5.jinja": ("Qwen/Qwen3.5-4B", "chat_template.jinja"),
    "templates/glm-4.7-flash.jinja": ("zai-org/GLM-4.7-Flash", "chat_template.jinja"),
    "templates/gemma-3.jinja": ("google/gemma-3-1b-it", "tokenizer_config.json"),
    "templates/gemma-4.jinja": ("google/gemma-4-31B-it", "chat_template.jinja"),
    "tokenizers/qwen3.tokenizer.json": ("Qwen/Qwen3-0.6B", "tokenizer.json"),
    "tokenizers/glm-4.tokenizer.json": ("zai-org/GLM-4.6", "tokenizer.json"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = os.environ.get("MODEL_ARTIFACTS") or str(ROOT / ".artifacts")
    parser.add_argument("folder", nargs="?", default=default)
    folder = Path(parser.parse_args(arguments).folder).expanduser()

    n_faults = 0
    for name, (repository, file) in ARTIFACTS.items():
        path = folder / name
        try:
            if path.exists():
                continue
            text = Path(hf_hub_download(repository, file)).read_text(encoding="utf-8")
            if file == "tokenizer_config.json":
                text = json.loads(text).get("chat_template")
                if not isinstance(text, str):
                    raise ValueError(f"{file} has no chat_template")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
            n_faults += 1
            reason = str(error).strip().partition("\n")[0]
            print(f"{name} from {repository}: {reason}", file=sys.stderr)
    print(f"{len(ARTIFACTS) - n_faults} of {len(ARTIFACTS)} files are in {folder}")
    return 1 if n_faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
