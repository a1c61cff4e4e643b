"""A matcher for regular expressions that counts what it tries, where `re` only takes time."""

import re
from collections.abc import Callable, Iterable, Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
ONE_CHARACTER = {op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN}


class State(NamedTuple):
    """Where a match stands."""

    place: int
    groups: dict[int, tuple[int, int]]
    flags: int

    def at(self, place: int) -> "State":
        return self._replace(place=place)


Then = Callable[[State], State | None]  # the rest of the pattern; None: no match


class SteppingPattern:
    """A compiled pattern whose spans() are those of finditer(). `steps`: so far.

    It backtracks as `re` does, without the short cuts by which `re` is only faster.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._tree = parser.parse(pattern.pattern, pattern.flags)
        self._flags = int(pattern.flags)
        self._text = text
        self.steps = 0

    def spans(self) -> Iterator[tuple[int, int]]:
        start = 0
        while start <= len(self._text):
            found = self._match(self._tree, State(start, {}, self._flags), lambda s: s)
            if found is not None:
                yield start, found.place
            start = max(start + 1, found.place if found else 0)

    def _match(self, items: Iterable, state: State, then: Then) -> State | None:
        items = [*items]
        if not items:
            return then(state)
        self.steps += 1
        kind, value = items[0]
        name = "character" if kind in ONE_CHARACTER else str(kind).lower()
        try_item = getattr(self, f"_{name}")

        def go_on(reached: State) -> State | None:
            return self._match(items[1:], reached, then)

        found: State | None = try_item((kind, value), state, go_on)
        return found

    def _character(self, item: tuple, state: State, then: Then) -> State | None:
        is_there = self._is_character(item, state)
        return then(state.at(state.place + 1)) if is_there else None

    def _at(self, item: tuple, state: State, then: Then) -> State | None:
        return then(state) if is_at(item[1], self._text, state) else None

    def _branch(self, item: tuple, state: State, then: Then) -> State | None:
        for branch in item[1][1]:
            found = self._match(branch, state, then)
            if found is not None:
                return found
        return None

    def _subpattern(self, item: tuple, state: State, then: Then) -> State | None:
        group, added, removed, inner = item[1]

        def close(reached: State) -> State | None:
            groups = reached.groups
            if group is not None:
                groups = {**groups, group: (state.place, reached.place)}
            return then(State(reached.place, groups, state.flags))

        inside = state._replace(flags=(state.flags | added) & ~removed)
        return self._match(inner, inside, close)

    def _assert(self, item: tuple, state: State, then: Then) -> State | None:
        return then(state) if self._looks_like(item[1], state) else None

    def _assert_not(self, item: tuple, state: State, then: Then) -> State | None:
        return None if self._looks_like(item[1], state) else then(state)

    def _looks_like(self, value: tuple, state: State) -> bool:
        direction, inner = value
        start = state.place if direction > 0 else state.place - inner.getwidth()[0]
        return (
            start >= 0 and self._match(inner, state.at(start), lambda s: s) is not None
        )

    def _groupref(self, item: tuple, state: State, then: Then) -> State | None:
        start, end = state.groups[item[1]]
        if not self._text.startswith(self._text[start:end], state.place):
            return None
        return then(state.at(state.place + end - start))

    def _groupref_exists(self, item: tuple, state: State, then: Then) -> State | None:
        group, present, absent = item[1]
        chosen = present if group in state.groups else absent or []
        return self._match(chosen, state, then)

    def _possessive_repeat(self, item: tuple, state: State, then: Then) -> State | None:
        greedy = [(op.MAX_REPEAT, item[1])]
        found = self._match(greedy, state, lambda s: s)
        return None if found is None else then(found)

    def _max_repeat(self, item: tuple, state: State, then: Then) -> State | None:
        least, most, inner = item[1]
        if len(inner) > 1 or inner[0][0] not in ONE_CHARACTER:
            return self._repeat(item, state, then)
        n_found = 0
        while n_found < most and self._is_character(
            inner[0], state.at(state.place + n_found)
        ):
            self.steps += 1
            n_found += 1
        for n in range(n_found, least - 1, -1):
            found = then(state.at(state.place + n))
            if found is not None:
                return found
        return None

    def _repeat(
        self, item: tuple, state: State, then: Then, n_done: int = 0
    ) -> State | None:
        kind, (least, most, inner) = item

        def repeat(reached: State) -> State | None:
            if reached.place == state.place and n_done >= least:
                return None
            return self._repeat(item, reached, then, n_done + 1)

        found = None
        if n_done >= least and kind is op.MIN_REPEAT:
            found = then(state)
        if found is None and n_done < most:
            found = self._match(inner, state, repeat)
        if found is None and n_done >= least and kind is op.MAX_REPEAT:
            found = then(state)
        return found

    _min_repeat = _repeat

    def _is_character(self, item: tuple, state: State) -> bool:
        if state.place >= len(self._text):
            return False
        character = self._text[state.place]
        kind, value = item
        if kind is op.ANY:
            return bool(state.flags & re.DOTALL) or character != "\n"
        forms = {character}
        if state.flags & re.IGNORECASE:
            forms = {character.lower(), character.upper()}
        members = value if kind is op.IN else [(op.LITERAL, value)]
        is_negated = kind is op.NOT_LITERAL or members[0][0] is op.NEGATE
        is_member = any(is_in(form, *m) for form in forms for m in members)
        return is_member != is_negated


def is_in(character: str, kind: Any, value: Any) -> bool:
    if kind is op.NEGATE:
        return False
    if kind is op.LITERAL:
        return ord(character) == value
    if kind is op.RANGE:
        return value[0] <= ord(character) <= value[1]
    return re.fullmatch(CATEGORIES[value], character) is not None


def is_at(kind: Any, text: str, state: State) -> bool:
    forms = {
        op.AT_BEGINNING_STRING: r"\A",
        op.AT_BEGINNING: "^",
        op.AT_END_STRING: r"\Z",
        op.AT_END: "$",
        op.AT_BOUNDARY: r"\b",
    }
    lines = re.compile(forms[kind], state.flags & re.MULTILINE)
    return lines.match(text, state.place) is not None
