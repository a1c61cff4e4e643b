"""Numbers to table lines, lines to a table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
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
    """Median, with the smallest and the largest value."""
    median = form.format(statistics.median(values))
    if len(values) < 3:
        return median
    low = form.format(min(values))
    high = form.format(max(values))
    return f"{median} ({low}..{high})"


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Pair by pair: what disturbs the machine disturbs both of a pair."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def rich_table(lines: Sequence[Line]) -> Table:
    table = Table(*HEADINGS)
    for line in lines:
        *cells, verdict = line.cells
        colour = {"yes": "green", "": "default"}.get(verdict, "red")
        table.add_row(*cells, f"[{colour}]{verdict.strip('*')}[/]")
    return table


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], about: str) -> str:
    """A table, and below it when and how it was measured."""
    table = [headings, ("---",) * len(headings), *rows]
    today = datetime.now().astimezone()
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{text}\n\n{today:%-d %B %Y}. {about}\n"


def write_into(document: Path, name: str, table: str) -> None:
    """Replace the table between `<!-- name -->` and `<!-- /name -->`; all else stays.

    Raises ValueError where the document has no such place.
    """
    begin = f"<!-- {name} -->\n"
    end = f"<!-- /{name} -->\n"
    place = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)

    old_text = document.read_text("utf-8")
    if not place.search(old_text):
        raise ValueError(f"{document} has no {begin.strip()} ... {end.strip()}")

    new_text = place.sub(lambda _: begin + table + end, old_text)
    document.write_text(new_text, "utf-8")


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [asdict(line) for line in lines]
