"""How the server ends where a signal comes while it starts: its exit status, and what it printed.

    python benchmarks/signals.py --runs 20
    python benchmarks/signals.py --program install_and_run.py --signal SIGINT --window 0 1
    python benchmarks/signals.py --after ": loading" --window 0 0.5

Each run starts the program anew (on MODEL_PATH, by default the demo) and sends one signal, at a
random time inside the window: seconds after the start, or after a text was printed. An end is
quiet if its status is 0, or that of the signal, and if nothing that it printed is a traceback or
an abort. `--root` takes another checkout.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOUD_WORDS = (
    "Traceback",
    "terminate called",
    "Fatal Python error",
    "Exception ignored",
)
MAX_SECONDS = 60.0  # of a start, and of an end


class End(NamedTuple):
    """How one run ended."""

    delay: float  # until the signal, in seconds
    status: int
    seconds: float  # from the signal to the end
    output: str

    def is_quiet(self, number: int) -> bool:
        """Whether a person would see nothing but that it has stopped."""
        if any(word in self.output for word in LOUD_WORDS):
            return False
        return self.status in (0, -number, 128 + number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_text(path: Path, text: str) -> None:
    """Return when the program has printed it. Raises TimeoutError."""
    deadline = time.monotonic() + MAX_SECONDS
    while text not in path.read_text(encoding="utf-8", errors="replace"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{text!r} was not printed")
        time.sleep(0.005)


def run_once(command: list[str], number: int, *, text: str, delay: float) -> End:
    """Start the program, send the signal `delay` seconds after a text, await the end."""
    settings = {
        "MLX_PORT": str(free_port()),
        "ENABLE_PROXY": "false",
        "CACHE_DISK": "off",
    }
    with tempfile.NamedTemporaryFile() as file:
        process = subprocess.Popen(
            command,
            env={"MODEL_PATH": "demo", "HF_HUB_OFFLINE": "1", **os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a terminal's Ctrl-C reaches children, too
        )
        try:
            wait_for_text(Path(file.name), text)
            time.sleep(delay)
            sent_at = time.monotonic()
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            status = process.wait(timeout=MAX_SECONDS)
            seconds = time.monotonic() - sent_at
        finally:
            process.kill()  # does nothing to one that has ended
        output = Path(file.name).read_text(encoding="utf-8", errors="replace")
    return End(delay, status, seconds, output)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--program", default="start-llm.py")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--signal", choices=("SIGTERM", "SIGINT"), default="SIGTERM")
    parser.add_argument("--after", metavar="TEXT", default="")
    parser.add_argument("--window", type=float, nargs=2, default=(0.1, 5.0))
    parser.add_argument("--seed", type=int, default=38)
    args = parser.parse_args()

    number = signal.Signals[args.signal]
    rng = random.Random(args.seed)
    command = [sys.executable, str(args.root / args.program)]
    statuses: Counter[int] = Counter()
    n_quiet = 0
    slowest = 0.0
    for _ in range(args.runs):
        end = run_once(
            command, number, text=args.after, delay=rng.uniform(*args.window)
        )
        statuses[end.status] += 1
        n_quiet += end.is_quiet(number)
        slowest = max(slowest, end.seconds)
        if not end.is_quiet(number):
            last_line = (end.output.strip().splitlines() or ["-"])[-1]
            print(f"loud: signal after {end.delay:.2f} s, {end.status}: {last_line}")

    counts = ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items()))
    print(
        f"{args.program}, {args.signal}: {n_quiet} of {args.runs} ends were quiet;"
        f" the slowest took {slowest:.1f} s; exit statuses {counts}"
    )
    return 0 if n_quiet == args.runs else 1


if __name__ == "__main__":
    raise SystemExit(main())
