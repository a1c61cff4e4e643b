"""Show the cache and memory of a running server, and why prompts were prefilled again.

    python scripts/inspect_mlx_cache.py                     the server of the settings
    python scripts/inspect_mlx_cache.py --url URL --key K   another one
    python scripts/inspect_mlx_cache.py LOG                 a session log: what each request reused
    python scripts/inspect_mlx_cache.py --json              as the server sent it

EXIT STATUS  0 shown, 2 there is nothing to show
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path

from agent_steps import Body, CannotAsk, Server
from chat import add_place_options
from rich.console import Console
from rich.filesize import decimal as in_bytes
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

COLUMNS = (
    *("time", "prompt", "cached", "match", "waited", "prefill", "decode", "ttft_ms"),
    *("out", "finish", "stable_prefix_msg_count", "rules"),
)
TIMEOUT_SECONDS = 10.0  # it answers at once, whatever it computes
WIDE = 10_000  # columns, where no terminal limits them


def tree_of(entries: list[Body]) -> Tree:
    """Conversations as branches of what they share."""
    root = Tree("cache")
    nodes: dict[int | None, Tree] = {None: root}
    waiting = sorted(entries, key=lambda entry: -entry["tokens"])
    while waiting:
        ready = [entry for entry in waiting if entry["parent"] in nodes]
        # An entry whose parent was evicted meanwhile is shown at the root.
        for entry in ready or waiting:
            parent = nodes.get(entry["parent"], root)
            nodes[entry["id"]] = parent.add(describe_entry(entry))
        waiting = [entry for entry in waiting if entry["id"] not in nodes]
    return root


def describe_entry(entry: Body) -> str:
    """A cache entry in one line: its own tokens, bytes, state and session."""
    tokens = f"{entry['tokens']:,} tokens"
    if entry["shared"]:
        tokens += f", from {entry['shared']:,} on"
    state = "running" if entry["running"] else f"idle {entry['idle_seconds']:.0f} s"
    session = escape(entry["session"])
    line = f"{tokens}, {in_bytes(entry['bytes'])}, {state}  {session}"
    positions = entry.get("checkpoints")
    if positions:
        line += "\ncheckpoints at " + ", ".join(f"{p:,}" for p in positions)
    return line


def describe_layers(kinds: list[str]) -> str:
    """What the layers keep, a run of equal ones at a time: `0-2 recurrent, 3 ...`."""
    runs: list[str] = []
    start = 0
    for kind, equal_kinds in groupby(kinds):
        end = start + len(list(equal_kinds)) - 1
        numbers = f"{start}" if start == end else f"{start}-{end}"
        runs.append(f"{numbers} {kind}")
        start = end + 1
    return ", ".join(runs)


def show_status(body: Body, console: Console) -> None:
    """Memory, the cache, and what was prefilled again."""
    console.print(f"{body.get('model', {}).get('id', '-')}: {body['status']}")
    kinds = (f"{kind} {in_bytes(size)}" for kind, size in body["memory"].items())
    console.print("memory: " + ", ".join(kinds))
    if "layers" in body:
        console.print("layers: " + describe_layers(body["layers"]), highlight=False)
    console.print(tree_of(body["cache"]))

    counters = [f"{name} {n}" for name, n in body["counters"].items() if n]
    console.print("counters above zero: " + (", ".join(counters) or "none"))
    for divergence in body["divergences"]:
        reason = escape(divergence["why"])
        console.print(
            f"{divergence['again']:,} tokens again: {reason}", highlight=False
        )


def show_log(path: Path, console: Console) -> None:
    """One row for each request of a session log."""
    table = Table(*COLUMNS)
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        rules = [f"{rule} {n}" for rule, n in record.get("rules", {}).items()]
        record["rules"] = ", ".join(rules) or "-"
        table.add_row(*(escape(str(record.get(name, "-"))) for name in COLUMNS))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("log", nargs="?", type=Path, help="a cache-session-*.log")
    add_place_options(parser)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    width = None if sys.stdout.isatty() else WIDE
    console = Console(soft_wrap=True, width=width)
    try:
        if args.log:
            show_log(args.log, console)
            return 0
        server = Server(args.url, model="any", key=args.key, seconds=TIMEOUT_SECONDS)
        body = server.get("/v1/status?detail=cache")
        if args.json:
            print(json.dumps(body, indent=1))
        else:
            show_status(body, console)
    except (CannotAsk, OSError, ValueError) as error:
        place = f"{args.log}: " if args.log else ""
        sys.stderr.write(f"{place}{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
