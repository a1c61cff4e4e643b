"""Start one model over several machines: the server on each of them, as a rank.

    python3.12 install_and_run.py cluster --hosts 10.0.0.1,10.0.0.2 --model NAME
    python3.12 install_and_run.py cluster --hosts 127.0.0.1 --ranks 2 --model demo

The first host is rank 0, which clients ask. Each is an IP address that the others reach. Those of
other machines are reached by ssh, without a password; start-llm must be in the same folder on all
of them. The same versions are checked for here; weights, settings and the links between the
machines are checked by the ranks themselves. What is no option of this program goes to the server.

    status 0   it got SIGINT or SIGTERM, and the ranks have ended
    status 1   a rank has ended, or a machine does not answer: a supervisor starts all again
    status 2   an option, a version or a setting is wrong: to start again does not help
"""

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parents[2]
SERVER: Final = ROOT / "start-llm.py"
SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
SSH_SECONDS: Final = 120.0  # a slow machine imports for some seconds
LOOK_SECONDS: Final = 0.2  # between two looks whether a rank has ended
END_SECONDS: Final = 20.0  # for the others, when one has ended; then they are killed
KILL_SECONDS: Final = 15.0  # for RANK_SCRIPT to do that, which takes it 10

STOPPED: Final = 0
FAILED: Final = 1
CANNOT_START: Final = 2

# Runs one rank: sh -c RANK_SCRIPT sh FOLDER RANK HOSTFILE'S_TEXT COMMAND ... A line on its
# stdin is a SIGTERM for the rank. The end of its stdin, as when ssh or this program is
# killed, is the last one: who hangs is killed.
RANK_SCRIPT: Final = """
cd "$1" || exit 1
MLX_RANK=$2
MLX_HOSTFILE=$(mktemp) && printf %s "$3" >"$MLX_HOSTFILE" || exit 1
export MLX_RANK MLX_HOSTFILE
shift 3
exec 3<&0
"$@" </dev/null 3<&- &
rank=$!
{
    while read -r _; do kill "$rank"; done
    kill "$rank"
    sleep 10
    kill -9 "$rank"
} <&3 >/dev/null 2>&1 &
stopper=$!
wait "$rank"
status=$?
kill "$stopper" 2>/dev/null
rm "$MLX_HOSTFILE"
exit "$status"
"""


class ClusterError(Exception):
    """The ranks are not started: `status` is the exit status, the text says why."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


def ip_addresses(text: str) -> list[str]:
    """Those of an option. Raises ValueError."""
    return [str(ip_address(host.strip())) for host in text.split(",")]


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the server's."""
    parser = argparse.ArgumentParser(
        prog="install_and_run.py cluster",
        description="Start one model over several machines.",
        epilog="All other options are the server's. See docs/outgrowing.md.",
        allow_abbrev=False,
    )
    text = "addresses of the machines; the first is rank 0, which clients ask"
    parser.add_argument(
        "--hosts", required=True, type=ip_addresses, metavar="IP,IP", help=text
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    text = "processes on each host (1)"
    parser.add_argument("--ranks", default=1, help=text, **number)
    text = "MLX's first port, one more for each rank (32323)"
    parser.add_argument("--starting-port", default=32323, help=text, **number)
    return parser.parse_known_args(arguments)


def is_this_machine(host: str) -> bool:
    """Whether an address is one of this machine."""
    interfaces = psutil.net_if_addrs().values()
    own = [address.address for addresses in interfaces for address in addresses]
    return host in own or ip_address(host).is_loopback


def check_host(host: str) -> None:
    """Raise ClusterError unless a host has the same version as this machine."""
    own = [sys.executable, str(SERVER), "--version"]
    command = [*SSH, host, f"cd {shlex.quote(str(ROOT))} && {shlex.join(own)}"]
    own_version = run_for_line(own, "this machine")
    version = run_for_line(command, host)
    if version != own_version:
        text = f"{host} has {version}, and this machine {own_version}"
        raise ClusterError(text, status=CANNOT_START)


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
        text = f"{host} does not answer: {error}"
        raise ClusterError(text, status=FAILED) from error
    if result.returncode or not result.stdout.strip():
        reason = " ".join(result.stderr.split())[-300:] or "it prints nothing"
        raise ClusterError(f"{host} cannot run {SERVER}: {reason}", status=FAILED)
    return result.stdout.strip().rpartition("\n")[2].strip()


def start_ranks(
    hosts: Sequence[str], *, starting_port: int, rest: Sequence[str]
) -> list[psutil.Popen]:
    """A process for each of these hosts: a shell here, or the ssh to one there."""
    addresses = [[f"{host}:{starting_port + i}"] for i, host in enumerate(hosts)]
    environment = dict(os.environ)
    if all(is_this_machine(host) for host in hosts):
        # Then nobody has to set one, and no other user of the machine is a rank.
        environment["CLUSTER_SECRET"] = secrets.token_hex(16)
    processes = []
    for rank, host in enumerate(hosts):
        place = [str(ROOT), str(rank), json.dumps(addresses)]
        server = [sys.executable, str(SERVER), *rest]
        command = ["sh", "-c", RANK_SCRIPT, "sh", *place, *server]
        if not is_this_machine(host):
            command = [*SSH, host, shlex.join(command)]
        # Of its own session, so that Ctrl-C on a terminal reaches this program alone.
        process = psutil.Popen(
            command,
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
        processes.append(process)
    return processes


def wait_for_end(processes: Sequence[psutil.Popen], signals: Sequence[int]) -> int:
    """Stop the ranks at each signal that has come, and when one of them has ended.

    Returns the exit status, when all have ended; those that hang are killed.
    """
    n_sent = 0
    while all(process.poll() is None for process in processes):
        if len(signals) > n_sent:
            n_sent += 1
            stop_ranks(processes)
        time.sleep(LOOK_SECONDS)
    cannot_start = any(process.poll() == CANNOT_START for process in processes)

    if not n_sent:
        stop_ranks(processes)
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    for process in alive:
        process.stdin.close()  # RANK_SCRIPT kills the rank
    _, alive = psutil.wait_procs(alive, timeout=KILL_SECONDS)
    for process in alive:  # an ssh to a machine that does not answer
        process.kill()

    if n_sent:
        return STOPPED
    return CANNOT_START if cannot_start else FAILED


def stop_ranks(processes: Sequence[psutil.Popen]) -> None:
    """Send each rank a SIGTERM: see RANK_SCRIPT."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.write(b"\n")


def main() -> int:
    options, rest = read_arguments(sys.argv[1:])
    try:
        hosts = [host for host in options.hosts for _ in range(options.ranks)]
        if len(hosts) < 2:
            text = "two ranks are the least: name two --hosts, or --ranks 2"
            raise ClusterError(text, status=CANNOT_START)
        for host in dict.fromkeys(hosts):
            if not is_this_machine(host):
                check_host(host)
    except ClusterError as error:
        print(f"start-llm: {error}", file=sys.stderr)
        return error.status

    signals: list[int] = []  # that have come
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, lambda number, _frame: signals.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # install_and_run.py blocks
    processes = start_ranks(hosts, starting_port=options.starting_port, rest=rest)
    return wait_for_end(processes, signals)


if __name__ == "__main__":
    sys.exit(main())
