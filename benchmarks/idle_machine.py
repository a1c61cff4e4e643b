"""Repeating a measurement while little else computes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

QUIET_CORES = 0.25  # that other programs may use
PATIENCE_SECONDS = 60.0  # to wait for that, in one series of measurements
SAMPLE_SECONDS = 0.3


def seconds_of_others() -> float:
    """Processor seconds spent so far by all programs but this one and those it started."""
    me = psutil.Process()
    own_seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        own_seconds += times.user + times.system
    busy = psutil.cpu_times()
    return busy.user + busy.nice + busy.system - own_seconds


class Others:
    """How many cores other programs have used since this was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds = seconds_of_others()

    @property
    def cores(self) -> float:
        spent = seconds_of_others() - self._seconds
        return spent / max(time.perf_counter() - self._began, 1e-6)


def wait_for_quiet(patience: float = PATIENCE_SECONDS) -> float:
    """Return when others compute little, or when patience ends; the seconds of it that are left."""
    began = time.monotonic()
    while (left := patience - (time.monotonic() - began)) > 0:
        other_programs = Others()
        time.sleep(SAMPLE_SECONDS)
        if other_programs.cores < QUIET_CORES:
            break
    return left


def rounds[T](times: int, measure: Callable[[], T]) -> list[T]:
    """Results of `times` quiet measurements, taken in at most twice as many.

    The quietest ones if there are not enough quiet ones.
    """
    results: list[tuple[float, T]] = []
    patience = PATIENCE_SECONDS
    for _ in range(2 * times):
        patience = wait_for_quiet(patience)
        other_programs = Others()
        result = measure()
        results.append((other_programs.cores, result))
        if sum(cores < QUIET_CORES for cores, _ in results) == times:
            break
    results.sort(key=lambda pair: pair[0])
    return [result for _, result in results[:times]]
