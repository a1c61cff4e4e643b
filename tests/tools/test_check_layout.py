"""The layout check passes a sound source text and finds each planted fault."""

import pytest
from check_layout import check_layout

SOUND = '''"""A small server.

    CONFIG
    KV STATE
    MAIN
"""

from __future__ import annotations

import os
import threading
import time

import mlx.core as mx

# region CONFIG ================================================================
# Every setting, read once.
# Uses     -
# Thread   any; pure

Port = int
_LIMIT = 3


class Config:
    """Settings."""

    port: Port = 1


def clamp(value: int) -> int:
    """The value, or the limit if that is lower."""
    return min(value, _LIMIT)


# region KV STATE ==============================================================
# What outlives a request; why(L-01).
# Uses     CONFIG
# Owns     store_lock, a leaf
# Thread   model; mlx


class Store:
    """Keeps arrays."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store_lock = threading.Lock()

    def put(self, value: int) -> mx.array:
        return mx.array([_double(value)])


def _double(value: int) -> int:
    return 2 * value


# region MAIN ==================================================================
# Start.
# Uses     all
# Threads  main


def main() -> int:
    """Serve."""
    port: Port = len(os.environ)
    Store(Config()).put(port + int(time.time()))
    return 0


# endregion

if __name__ == "__main__":
    raise SystemExit(main())
'''
LESSON_PAGE = "# Lessons\n\n## L-01 A failure\n"
LAST_LINE = "    return 0\n"

FAULTS = [  # the fault that is reported, what is replaced in SOUND, and by what
    ("KV STATE is not on the title page", "    KV STATE\n", "    KV\n"),
    ("MAIN is out of order", "    KV STATE\n    MAIN", "    MAIN\n    KV STATE"),
    (
        "stands before the first section",
        "# region CONFIG",
        "STRAY = 1\n\n# region CONFIG",
    ),
    ("acts when the file is imported", "_LIMIT = 3\n", "_LIMIT = 3\nprint(_LIMIT)\n"),
    ("has no line Thread", "# Threads  main\n", ""),
    ("no docstring for its public name main", '    """Serve."""\n', ""),
    ("uses Config of CONFIG at line", "# Uses     CONFIG", "# Uses     -"),
    ("MAIN in Uses, which is no section above", "Uses     CONFIG", "Uses     MAIN"),
    ("CONFIG in Uses and uses nothing of it", "config: Config", "config: int"),
    ("uses _double at line", LAST_LINE, "    return _double(0)\n"),
    ("uses _LIMIT at line", LAST_LINE, "    return _LIMIT\n"),
    ("Thread line does not say mlx", LAST_LINE, "    return mx.array(0)\n"),
    ("its Thread line says pure", "min(value, _LIMIT)", "min(time.time(), _LIMIT)"),
    ("its Thread line says pure", "min(value, _LIMIT)", "min(open(value), _LIMIT)"),
    ("touches store_lock at line", LAST_LINE, "    return Store(0).store_lock\n"),
    ("touches environ at line", "mx.array([_d", "os.environ([_d"),
    ("lists old_lock in Owns", "store_lock, a leaf", "store_lock, old_lock"),
    ("L-99 is cited", "why(L-01)", "why(L-99)"),
]


def test_sound_layout_has_no_fault():
    assert check_layout(SOUND, LESSON_PAGE) == []


@pytest.mark.parametrize(("fault", "old", "new"), FAULTS)
def test_planted_layout_fault_is_found(fault, old, new):
    assert old in SOUND

    found = check_layout(SOUND.replace(old, new, 1), LESSON_PAGE)

    assert any(fault in sentence for sentence in found), found


def test_two_lessons_with_one_number_are_found():
    twice = LESSON_PAGE + "\n## L-01 Another failure\n"
    assert check_layout(SOUND, twice) == ["L-01 is the number of two lessons"]
