"""Tiny models made by scripts/tools/make_tiny_model.py: random weights, planted grammar."""

import functools
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = (
    Path(__file__).resolve().parents[2] / "scripts" / "tools" / "make_tiny_model.py"
)
# Kept from run to run; what a new version of the script would make otherwise is made anew.
MODELS = Path(__file__).resolve().parents[2] / ".pytest_cache" / "models"


@functools.cache
def load_script() -> ModuleType:
    """scripts/tools/make_tiny_model.py as a module; scripts/ is no package."""
    spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # before exec: dataclasses look their module up by name
    sys.modules["make_tiny_model"] = module
    spec.loader.exec_module(module)
    return module


KINDS: tuple[str, ...] = load_script().KINDS
DENSE = "qwen3"
HYBRID = "qwen3_5"
SLIDING = "gemma3_text"
MLA = "glm4_moe_lite"
# What README recommends, and Qwen 3.6: all have experts.
RECOMMENDED = ("qwen3_moe", "qwen3_5_moe", "glm4_moe", MLA)

# Words that are not in the grammar, and the tools that it calls.
WORDS = [
    *("alpha", "river", "stone", "cloud", "paper", "green", "seven", "table"),
    *("window", "orange"),
]
PARAMETERS = {
    "read": ["path"],
    "bash": ["command"],
    "write": ["path", "content"],
    "get_weather": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in keys},
                "required": keys,
            },
        },
    }
    for name, keys in PARAMETERS.items()
]


def tiny_model(kind: str, tmp_root: Path, **size: int) -> Path:
    """A copy of a tiny model, for mlx_lm.load; made in a second, and once only, for all workers.

    `size` changes single fields of the script's Recipe: `layers=4`, `window=128`, `seed=7`,
    `context=4096` (tokens), `heads=1, kv_heads=1` (half the cost of long prompts) ...
    """
    script = load_script()
    seed = size.pop("seed", None)
    recipe = script.choose_recipe(kind, size="tiny", seed=seed, **size)
    size_suffix = "".join(f"-{field}{value}" for field, value in sorted(size.items()))
    folder = tmp_root / f"{kind}-seed{recipe.seed}{size_suffix}"
    original = MODELS / folder.name
    script.make_model(original, recipe)
    if not folder.exists():
        shutil.copytree(original, folder)
    return folder
