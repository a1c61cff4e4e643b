"""What is tested at night only: `pytest --all`."""

from typing import Any

import pytest


def at_night(value: Any) -> Any:
    """A value of parametrize, or of a fixture's params, that a day's tests leave out."""
    return pytest.param(value, marks=pytest.mark.slow)
