"""Repeating a measurement while little else computes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

QUIET_CORES = 0.25  # that other programs may use
PATIENCE_SECONDS = 20.0  # to wait for that before one measurement
SAMPLE_SECONDS = 0.3


def seconds_of_others() -> float:
    """Processor seconds spent so far by all programs but this one and those it started."""
    me = psutil.Process()
    own = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        own += times.user + times.system
    busy = psutil.cpu_times()
    return busy.user + busy.nice + busy.system - own


class Others:
    """How many cores other programs have used since this was made."""

    def __init__(self) -> None:
        self._at, self._seconds = time.perf_counter(), seconds_of_others()

    @property
    def cores(self) -> float:
        spent = seconds_of_others() - self._seconds
        return spent / max(time.perf_counter() - self._at, 1e-6)


def wait_for_quiet() -> None:
    """Return when others compute little, or when patience ends."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        others = Others()
        time.sleep(SAMPLE_SECONDS)
        if others.cores < QUIET_CORES:
            return


def rounds[T](times: int, measure: Callable[[], T]) -> list[T]:
    """Results of `times` quiet measurements, taken in at most twice as many.

    The quietest ones if there are not enough quiet ones.
    """
    results: list[tuple[float, T]] = []
    for _ in range(2 * times):
        wait_for_quiet()
        others = Others()
        result = measure()
        results.append((others.cores, result))
        if sum(cores < QUIET_CORES for cores, _ in results) == times:
            break
    results.sort(key=lambda pair: pair[0])
    return [result for _, result in results[:times]]
