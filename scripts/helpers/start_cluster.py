"""Start one model over several machines: the server on each of them, by mlx.launch.

    python3.12 install_and_run.py cluster --hosts 10.0.0.1,10.0.0.2 --model NAME
    python3.12 install_and_run.py cluster --hosts 127.0.0.1 --ranks 2 --model demo

The first host is rank 0, which clients ask. Each is an IP address that the others reach, and that
ssh reaches without a password, be it this machine; start-llm must be in the same folder on all of
them. The same versions are checked for here; weights, settings and the links between the machines
are checked by the ranks themselves. What is no option of this program goes to the server.

It ends with status 0 when it is told to, else with 1: a supervisor then starts it again.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parents[2]
SERVER: Final = ROOT / "start-llm.py"
LOOPBACK: Final = "127.0.0.1"  # mlx.launch starts what is there without ssh
SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH_SECONDS: Final = 120.0  # a slow machine imports for some seconds
LOOK_SECONDS: Final = 0.5  # between two looks whether a rank has ended
END_SECONDS: Final = 30.0  # for the others, when one has ended


class ClusterError(Exception):
    """The ranks were not started. The text says in one sentence why."""


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the server's."""
    parser = argparse.ArgumentParser(
        prog="install_and_run.py cluster",
        description="Start one model over several machines.",
        epilog="All other options are the server's. See docs/outgrowing.md.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="IP,IP",
        help="addresses of the machines; the first is rank 0, which clients ask",
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes on each host (1)"
    )
    parser.add_argument(
        "--starting-port",
        type=int,
        default=32323,
        metavar="N",
        help="MLX's first port, one more for each rank (32323)",
    )
    return parser.parse_known_args(arguments)


def check_host(host: str) -> None:
    """Raise ClusterError unless a host has the same version as this machine."""
    own = [sys.executable, str(SERVER), "--version"]
    command = [*SSH, host, f"cd {shlex.quote(str(ROOT))} && {shlex.join(own)}"]
    own_version = run_for_line(own, "this machine")
    version = run_for_line(command, host)
    if version != own_version:
        raise ClusterError(f"{host} has {version}, and this machine {own_version}")


def run_for_line(command: list[str], host: str) -> str:
    """The last line that a command prints. Raises ClusterError."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SSH_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{host} does not answer: {error}") from error
    lines = result.stdout.split("\n")
    if result.returncode or not result.stdout.strip():
        reason = " ".join(result.stderr.split())[-300:] or "it prints nothing"
        raise ClusterError(f"{host} cannot run {SERVER}: {reason}")
    return [line for line in lines if line.strip()][-1].strip()


def launch(options: argparse.Namespace, rest: list[str]) -> int:
    """Run mlx.launch until it ends or we are told to. Returns the exit status."""
    command = [
        str(Path(sys.executable).with_name("mlx.launch")),
        *("--hosts", options.hosts, "--repeat-hosts", str(options.ranks)),
        *("--backend", "ring", "--starting-port", str(options.starting_port)),
        *("--", sys.executable, str(SERVER), *rest),
    ]
    is_told = False

    def end(_number: int, _frame: object) -> None:
        nonlocal is_told
        is_told = True
        # mlx.launch would end without its ranks: they are of its process group.
        os.killpg(process.pid, signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=unblock)  # noqa: PLW1509
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    unblock()
    wait_for_end(process, n_ranks=options.ranks * len(options.hosts.split(",")))
    return 0 if is_told else 1


def wait_for_end(process: subprocess.Popen[bytes], *, n_ranks: int) -> None:
    """Wait for mlx.launch; kill what is left of it some seconds after the first rank has ended.

    It waits for all ranks itself, without end, and one that hangs takes no notice of its SIGTERM.
    """
    launcher = psutil.Process(process.pid)
    all_have_started = False
    ended_at = math.inf  # the first rank
    while process.poll() is None:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(psutil.Error):
            n_children = len(launcher.children())
            all_have_started = all_have_started or n_children >= n_ranks
            if all_have_started and n_children < n_ranks:
                ended_at = min(ended_at, time.monotonic())
        if time.monotonic() - ended_at > END_SECONDS:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def unblock() -> None:
    """Let signals end this process again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def main() -> int:
    """Check the machines, then start the ranks. Returns the exit status."""
    options, rest = read_arguments(sys.argv[1:])
    try:
        if options.ranks < 1 or options.ranks * len(options.hosts.split(",")) < 2:
            raise ClusterError(
                "two ranks are the least: name two --hosts, or --ranks 2"
            )
        for host in dict.fromkeys(options.hosts.split(",")):
            if host != LOOPBACK:
                check_host(host)
    except ClusterError as error:
        print(f"start-llm: {error}", file=sys.stderr)
        return 2
    return launch(options, rest)


if __name__ == "__main__":
    sys.exit(main())
