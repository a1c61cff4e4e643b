"""What is tested at night only: `pytest --all`."""

from typing import Any

import pytest


def at_night(*values: Any) -> Any:
    """A case of parametrize, or a value of a fixture, that a day's tests leave out."""
    return pytest.param(*values, marks=pytest.mark.slow)
