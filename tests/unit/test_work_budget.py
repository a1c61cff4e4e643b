"""Memory is reserved before work begins, in turn, and small bodies wait for no large one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import start_llm as s
from server_fixture import MAX_WAIT_SECONDS, wait_until


class Client:
    """Whom a waiting request looks for."""

    def __init__(self) -> None:
        self.has_gone = False
        self.n_looks = 0

    def look(self) -> None:
        self.n_looks += 1
        if self.has_gone:
            raise s.ClientGone


class Work(threading.Thread):
    """Reserves memory on a thread of its own, and keeps it until it is told to end."""

    def __init__(self, reserve: Callable, n_bytes: int) -> None:
        super().__init__(daemon=True)
        self.client = Client()
        self.has_memory = threading.Event()
        self.can_end = threading.Event()
        self.has_left = False
        self._reserve = reserve
        self._n_bytes = n_bytes
        self.start()

    def run(self) -> None:
        try:
            with self._reserve(self._n_bytes, self.client.look):
                self.has_memory.set()
                self.can_end.wait()
        except s.ClientGone:
            self.has_left = True

    def end(self) -> None:
        self.can_end.set()
        self.join()


def has_turn(work: Work) -> bool:
    """It has what it asked for, before long."""
    return work.has_memory.wait(MAX_WAIT_SECONDS)


def waits(work: Work) -> bool:
    """It has looked for its client twice without a turn."""
    first = work.client.n_looks
    wait_until(lambda: work.client.n_looks > first + 1 or work.has_memory.is_set())
    return not work.has_memory.is_set()


def test_no_more_is_reserved_than_there_is_and_each_has_its_turn():
    budget = s.WorkBudget(10)
    first = Work(budget.reserve, 6)
    assert has_turn(first)
    second = Work(budget.reserve, 6)
    assert waits(second)
    third = Work(budget.reserve, 1)  # it would fit, but it came later
    assert waits(third)

    first.end()
    assert has_turn(second) and has_turn(third)
    second.end()
    third.end()
    assert budget.n_free == 10


def test_who_has_gone_leaves_the_queue():
    budget = s.WorkBudget(10)
    first = Work(budget.reserve, 10)
    assert has_turn(first)
    second = Work(budget.reserve, 10)
    third = Work(budget.reserve, 1)

    second.client.has_gone = True
    second.join()
    assert second.has_left and waits(third)
    first.end()
    assert has_turn(third)
    third.end()


def test_what_is_larger_than_all_of_it_has_its_turn_alone():
    budget = s.WorkBudget(10)
    with budget.reserve(1_000, s.assume_client):
        assert budget.n_free == 0
        assert waits(Work(budget.reserve, 1))


def test_what_a_body_did_not_need_is_given_back_at_once():
    budget = s.WorkBudget(10)
    with budget.reserve(8, s.assume_client) as reservation:
        reservation.shrink(20)
        assert budget.n_free == 2
        reservation.shrink(3)
        assert budget.n_free == 7
    assert budget.n_free == 10


def test_small_bodies_wait_for_no_large_one():
    budget = s.BodyBudget(3_200)
    large = Work(budget.reserve, 100_000)
    assert has_turn(large)
    assert waits(Work(budget.reserve, 101))

    for n_bytes in (0, 1, 100):
        small = Work(budget.reserve, n_bytes)
        assert has_turn(small)
        small.end()
    large.end()


def test_of_both_sizes_together_no_more_is_reserved_than_there_is():
    budget = s.BodyBudget(3_200)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(budget.reserve(100, s.assume_client))
        stack.enter_context(budget.reserve(1 << 40, s.assume_client))
        assert budget.for_small.n_free + budget.for_large.n_free == 0
