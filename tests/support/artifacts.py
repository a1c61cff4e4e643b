"""Chat templates and tokenizers of other projects: read by tests, held by no repository of ours."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MODEL_ARTIFACTS") or ROOT / ".artifacts")


def artifact(*parts: str) -> Path:
    """A file of that folder. Where it is absent, the test is skipped."""
    path = FOLDER.joinpath(*parts)
    if not path.exists():
        pytest.skip("needs MODEL_ARTIFACTS: run scripts/tools/fetch_artifacts.py")
    return path
