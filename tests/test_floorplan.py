"""FLOORPLAN: a sound file has no problem, and each planted violation is found and named."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_floorplan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("floorplan", ROOT / "scripts" / "floorplan.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["floorplan"] = module  # before exec: dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


floorplan = load_floorplan()

SOUND = '''"""A small server.

    ground    01 CONFIG    settings
              02 STORE     what outlives a request
    street    03 MAIN      start
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

import mlx.core as mx

# region 01 CONFIG =============================================================
# Every setting, read once.
#
# Doors   Config, LIMIT,
#         clamp
# Knows   -
# Thread  any; pure
# Budget  30
# ==============================================================================

LIMIT = 3
_TABLE: Final[dict[str, int]] = {"a": 1}


class Config:
    """Settings."""

    port: int = 1


def clamp(value: int) -> int:
    """Bound it."""
    return min(value, LIMIT + _TABLE["a"])


# region 02 STORE ==============================================================
# What outlives a request; why(L-01).
#
# Doors   Store
# Knows   CONFIG
# Owns    store_lock
# Thread  model; mlx
# Budget  40
# ==============================================================================


class Store:
    """Keeps arrays."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store_lock = threading.Lock()

    def put(self, value: int, *, at: float) -> mx.array:
        return mx.array([_sum(value, int(at))])


def _sum(left: int, right: int) -> int:
    return left + right


# region 03 MAIN ===============================================================
# Start.
#
# Doors   main
# Knows   CONFIG, STORE
# Thread  main
# Budget  30
# ==============================================================================


def main() -> int:
    """Serve."""
    Store(Config()).put(len(os.environ), at=time.time())
    return 0


# endregion

if __name__ == "__main__":
    raise SystemExit(main())
'''

LESSONS = "# Lessons\n\n## L-01 A failure\n"
PUT = "        return mx.array([_sum(value, int(at))])\n"
FILLING = "".join(f"    a{n} = {n}\n" for n in range(38))  # with main's own 3 lines: 41

PLANTED = [
    ("stands in no room", "# region 01", "STRAY = 1\n\n# region 01"),
    ("not numbered", "# region 03 MAIN", "# region 04 MAIN"),
    ("title page", "              02 STORE     what outlives a request\n", ""),
    ("lines, budget 30", "# Budget  30", "# Budget  30\n" + "#\n" * 31),
    ("the banner has no Thread", "# Thread  main\n", ""),
    ("lines of purpose", "# Start.\n", "# Start.\n" * 12),
    ("no `# endregion`", "    return 0\n\n\n# endregion", "    return 0\n\n"),
    ("door gone does not exist", "# Doors   main", "# Doors   main, gone"),
    ("door main has no docstring", '    """Serve."""\n', ""),
    ("knows MAIN, which is not above", "# Knows   CONFIG\n", "# Knows   CONFIG, MAIN\n"),
    ("says it knows CONFIG but", "Store(Config())", "Store(None)"),
    ("belongs to CONFIG, which it does not", "# Knows   CONFIG\n", "# Knows   -\n"),
    ("_sum at line", "    return 0\n", "    return _sum(0, 0)\n"),
    (
        "reaches for store_lock of STORE",
        "    return 0\n",
        "    return Store(0).store_lock\n",
    ),
    ("mx at line", "    return 0\n", "    return mx.array(0)\n"),
    ("imports mlx at line", "    return 0\n", "    from mlx_lm import load\n    return load\n"),
    ("but the banner says pure", "return min(value, LIMIT", "return min(time.time(), LIMIT"),
    ("but the banner says pure", "return min(value, LIMIT", "return min(open(value), LIMIT"),
    ("imports random at line", '    """Bound it."""\n', '    """Bound."""\n    import random\n'),
    ("reads the environment", PUT, "        return os.environ\n"),
    ("litellm is imported", PUT, "        import litellm\n" + PUT),
    ("mlx_vlm is imported", "import mlx.core as mx\n", "import mlx.core as mx\nimport mlx_vlm\n"),
    ("does something when the file", "LIMIT = 3\n", "LIMIT = 3\nprint(LIMIT)\n"),
    ("does something when the file", "LIMIT = 3\n", "for LIMIT in (3,):\n    pass\n"),
    ("mutable module name", "LIMIT = 3\n", "LIMIT = 3\nSEEN = {}\n"),
    ("mutable module name", "LIMIT = 3\n", "LIMIT = 3\nSEEN: Final = set()\n"),
    ("mutable module name", "LIMIT = 3\n", "LIMIT = 3\nGUARD = threading.Lock()\n"),
    ("`global`", '    """Serve."""\n', '    """Serve."""\n    global LIMIT\n'),
    ("main has 41 lines of code", '    """Serve."""\n', '    """Serve."""\n' + FILLING),
    ("by position", "value: int, *, at: float", "value: int, by: int, at: float"),
    ("attributes, limit", PUT, "".join(f"        self.b{n} = 0\n" for n in range(11)) + PUT),
    ("cites L-99", "why(L-01)", "why(L-99)"),
]


def problems_of(source: str) -> list[str]:
    return floorplan.check(floorplan.read_plan(source), lessons=LESSONS)


def test_a_sound_file_has_no_problem():
    assert problems_of(SOUND) == []


@pytest.mark.parametrize(("expected", "old", "new"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_violation_is_found(expected, old, new):
    assert old in SOUND
    found = problems_of(SOUND.replace(old, new, 1))
    assert any(expected in problem for problem in found), found


def test_long_classes_and_files_are_found(monkeypatch):
    monkeypatch.setattr(floorplan, "CLASS_LINES", 5)
    monkeypatch.setattr(floorplan, "FILE_LINES", 50)
    found = " ".join(problems_of(SOUND))
    assert "class Store has 6 lines of code" in found
    assert f"the file has {len(SOUND.splitlines())} lines" in found


def test_frozen_fields_are_no_attributes_but_changeable_ones_are():
    fields = "".join(f"    f{n}: int\n" for n in range(13))
    for decorator, is_bad in (("@dataclass(frozen=True)", False), ("@dataclass", True)):
        source = SOUND.replace("LIMIT = 3\n", f"LIMIT = 3\n\n\n{decorator}\nclass Big:\n{fields}")
        assert any("attributes" in p for p in problems_of(source)) is is_bad


def test_a_variable_may_share_its_name_with_what_another_room_hides():
    source = SOUND.replace("    return 0\n", "    _sum = 0\n    return _sum\n")
    assert problems_of(source) == []


def test_overrides_keep_the_parameters_they_were_given():
    three = "value: int, by: int, at: float"
    source = SOUND.replace("value: int, *, at: float", three)
    assert problems_of(source.replace("    def put", "    @override\n    def put")) == []
    assert problems_of(source.replace("def put", "def __exit__")) == []


def test_the_map_names_rooms_doors_methods_and_lines():
    text = floorplan.draw(floorplan.read_plan(SOUND))
    line = 1 + SOUND.splitlines().index("def clamp(value: int) -> int:")
    assert f"`clamp` {line}" in text
    assert "| 02 STORE |" in text and "`Store.put`" in text and "`_sum`" in text
    assert "5 functions, median 2 lines of code" in text


def test_this_file_of_ours_is_sound():
    assert floorplan.check_project() == []
