"""Numbers to table lines, lines to a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

HEADINGS = ("what", "start-llm", "mlx_lm.server", "bar", "met")


@dataclass
class Line:
    """One row of the table; `met` is None where no bar is set."""

    what: str
    ours: str
    theirs: str = ""
    bar: str = ""
    met: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)  # for the JSON file

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = {True: "yes", False: "**no**", None: ""}[self.met]
        return (self.what, self.ours, self.theirs, self.bar, verdict)


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Median, with the smallest and the largest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    if len(values) < 3:
        return form.format(middle)
    return f"{form.format(middle)} ({form.format(low)}..{form.format(high)})"


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Pair by pair: what disturbs the machine disturbs both of a pair."""
    return [a / b for a, b in zip(over, under, strict=True)]


def rich_table(lines: Sequence[Line]) -> Table:
    table = Table(*HEADINGS)
    for line in lines:
        what, ours, theirs, bar, met = line.cells
        colour = {"yes": "green", "": "default"}.get(met, "red")
        table.add_row(what, ours, theirs, bar, f"[{colour}]{met.strip('*')}[/]")
    return table


def markdown(lines: Sequence[Line], about: str) -> str:
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(line.cells for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{about}\n"


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]
