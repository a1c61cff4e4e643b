"""Files of this project as modules: none of them is in a package, and one has a hyphen."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
SUPPORT = ROOT / "tests" / "support"
START_LLM = Path(os.environ.get("START_LLM") or ROOT / "start-llm.py")


@functools.cache
def load_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before exec: dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def start_llm() -> ModuleType:
    return load_file(START_LLM, "start_llm")


def install_and_run() -> ModuleType:
    return load_file(ROOT / "install_and_run.py", "install_and_run")


def make_tiny_model() -> ModuleType:
    return load_file(SCRIPTS / "tools" / "make_tiny_model.py", "make_tiny_model")


def script(name: str) -> Any:
    """A program for users; they import one another by name."""
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return importlib.import_module(name)


def tiny_heads() -> ModuleType:
    for name in ("tiny_models", "tiny_families"):  # which it is made from
        load_file(SUPPORT / f"{name}.py", name)
    return load_file(SUPPORT / "tiny_heads.py", "tiny_heads")


def tiny_vision() -> ModuleType:
    load_file(SUPPORT / "tiny_models.py", "tiny_models")  # which it is made from
    return load_file(SUPPORT / "tiny_vision.py", "tiny_vision")
