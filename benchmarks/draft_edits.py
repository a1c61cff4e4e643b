"""What drafts save on real edits: files of this project's history, written again by a model.

    .venv/bin/python benchmarks/draft_edits.py TOKENIZER_FOLDER [--edits 60]

The prompt has the file as it was. The reply is

    rewrite  the file as it became
    diff     the unified diff
    edit     a call of an edit tool: the first change, with two lines around it

No model runs: the drafter sees the reply grow, and a step costs what a call of so many tokens is
said to cost, by a call of one. So the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx_lm
import numpy as np
from project_files import ROOT, start_llm

COSTS: Final = {
    "32 tokens cost 1.3 steps": {1: 1.0, 8: 1.1, 16: 1.15, 32: 1.3},
    "32 tokens cost 3.7 steps": {1: 1.0, 8: 2.2, 16: 2.6, 32: 3.7},
}
ENDINGS: Final = (".py", ".md", ".html", ".json")
CHARACTERS: Final = range(1_500, 14_000)  # of a file
CONTEXT: Final = 2  # lines around a change


class Edit(NamedTuple):
    path: str
    old: str
    new: str


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def edits(n_edits: int) -> list[Edit]:
    """Some of those in the last commits, the same ones in each run at one commit."""
    found: list[Edit] = []
    for commit in git("log", "--format=%h", "--no-merges", "-n", "260").split():
        names = ("diff-tree", "--no-commit-id", "--name-only", "-r", "--diff-filter=M")
        for path in git(*names, commit).split():
            if not path.endswith(ENDINGS) or path == "start-llm.py":
                continue
            old = git("show", f"{commit}^:{path}")
            if len(old) in CHARACTERS:
                found.append(Edit(path, old, git("show", f"{commit}:{path}")))
    random.Random(1).shuffle(found)
    return found[:n_edits]


def replies(edit: Edit) -> Iterator[tuple[str, str]]:
    old = edit.old.splitlines(keepends=True)
    new = edit.new.splitlines(keepends=True)
    yield "rewrite", edit.new
    yield "diff", "".join(difflib.unified_diff(old, new, edit.path, edit.path))

    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    change = next(change for change in changes if change[0] != "equal")
    _, old_start, old_end, new_start, new_end = change
    old_part = old[max(0, old_start - CONTEXT) : old_end + CONTEXT]
    new_part = new[max(0, new_start - CONTEXT) : new_end + CONTEXT]
    arguments = {"path": edit.path, "old": "".join(old_part), "new": "".join(new_part)}
    yield "edit", json.dumps({"name": "edit", "arguments": arguments})


def steps(server: Any, prompt: list[int], reply: list[int], costs: Any) -> float:
    """What decoding takes, in steps without a draft."""
    drafter = server.CopyDrafter(
        np.array(prompt, np.int32),
        end_ids=frozenset(),
        costs=costs_of(server, costs),
        metrics=server.CacheMetrics(),
    )
    n_done = 0
    n_steps = 0.0
    while n_done < len(reply):
        drafter.follow(reply, n_done)
        y = reply[n_done]
        draft = drafter.draft(len(reply) - n_done - 1, lambda y=y: y)
        if not draft:
            drafter.budget.learn_plain(1.0)
            n_steps += 1.0
            n_done += 1
            continue
        n_right = 0
        for drafted, written in zip(draft, reply[n_done + 1 :], strict=False):
            if drafted != written:
                break
            n_right += 1
        cost = next(costs[n] for n in sorted(costs) if n > len(draft))
        drafter.learn(n_draft=len(draft), n_accepted=n_right, seconds=cost)
        n_steps += cost
        n_done += 1 + n_right
    return n_steps


def costs_of(server: Any, costs: dict[int, float]) -> Any:
    measured = server.DraftCosts()
    for n_fed, cost in [*costs.items()] * 2:  # the first of each is not counted
        measured.measure(n_fed, cost)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path, help="a folder with tokenizer.json")
    parser.add_argument("--edits", type=int, default=60)
    options = parser.parse_args()
    tokenizer = mlx_lm.utils.load_tokenizer(options.tokenizer)
    server = start_llm()

    totals: dict[tuple[str, str], list[float]] = {}
    for edit in edits(options.edits):
        prompt = tokenizer.encode(f"Change {edit.path}:\n```\n{edit.old}\n```\n")
        for kind, text in replies(edit):
            reply = tokenizer.encode(text, add_special_tokens=False)
            for machine, costs in COSTS.items():
                total = totals.setdefault((kind, machine), [0.0, 0.0])
                total[0] += len(reply)
                total[1] += steps(server, prompt, reply, costs)
    for (kind, machine), (n_tokens, n_steps) in totals.items():
        print(f"{kind:8} {machine:26} {n_tokens / n_steps:.2f} times as fast")


if __name__ == "__main__":
    main()
