"""What is tested at night only: `pytest --all`."""

from typing import Any

import pytest


def by_day(n: int, *, of: int) -> list[Any]:
    """Seeds: the first n by day, and all at night."""
    return [*range(n), *map(at_night, range(n, of))]


def at_night(*values: Any) -> Any:
    """A case of parametrize, or a value of a fixture, that a day's tests leave out."""
    return pytest.param(*values, marks=pytest.mark.slow)
