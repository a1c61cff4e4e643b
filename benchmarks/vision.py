"""Compare this server with mlx_vlm.server, its prefix cache on, in conversations about images.

    .venv/bin/python benchmarks/vision.py [--kind dense hybrid] [--rounds 5] [--defaults]
                                          [--markdown DOCUMENT]

Both serve the same model of random weights side by side and are sent the same conversation in
turns, each with its own replies: instructions, an image and a question; two more questions; a
second image; one more question. Every round has other words and other images. A cell gives the
median and, in brackets, the extremes over the rounds.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report
from agent_workload import Words, chat
from compare import machine, with_openblas
from compared_servers import Server, free_port, our_server, running
from idle_machine import rounds
from PIL import Image
from project_files import tiny_vision
from report import ratios, spread
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

THEIRS = "mlx_vlm.server"
KINDS = {"dense": "qwen3_vl", "hybrid": "qwen3_5"}
MODEL = {
    "hidden": 512,
    "layers": 8,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "mlp": 1024,
}
# a cold image costs two thirds more
TOWER = {"depth": 2, "hidden": 128, "heads": 2, "side": 1024}
SIDE = 1024  # pixels: 32 x 32 tokens
TURNS = (
    "1: image",
    "2: same image",
    "3: same image",
    "4: second image",
    "5: both images",
)
PREFIX_CACHE = {"APC_ENABLED": "1"}
# By default nothing that holds an image is found again on a dense model: only the layout meant for
# 50,000 tokens and more can have one (apc.py, apc_lookup_plan). Two states are kept of all that was
# asked, and what is computed is written to disk as well.
AT_ITS_BEST = {
    "APC_LAYER_MAJOR_MEMORY_MIN_TOKENS": "256",
    "APC_CHECKPOINT_ENTRIES": "32",
    "APC_DISK_ENABLED": "0",
}

console = Console()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request cost, as far as the server tells."""

    ttft: float  # seconds, by the client's clock
    n_prompt: int
    prefilled: int
    tower_runs: int | None


def image_url(seed: int) -> str:
    """A noisy picture as a data URL."""
    noise = np.random.default_rng(seed).integers(0, 255, (SIDE // 8, SIDE // 8, 3))
    file = io.BytesIO()
    Image.fromarray(noise.astype(np.uint8)).resize((SIDE, SIDE)).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def question(words: Words, image: int | None = None) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": words.text(24)}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": image_url(image)}})
    return {"role": "user", "content": parts}


@contextmanager
def their_server(
    folder: Path, scratch: Path, settings: dict[str, str]
) -> Iterator[Server]:
    """mlx-vlm's own server. What it keeps on disk goes where it is thrown away."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_vlm.server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    environ = {
        **os.environ,
        **PREFIX_CACHE,
        **settings,
        "APC_DISK_PATH": str(scratch / "apc"),
    }
    with running(
        Server(THEIRS, port, model=str(folder)), command, scratch, environ
    ) as server:
        yield server


def tower_runs(server: Server) -> int | None:
    """How often it has looked at an image so far; mlx_vlm.server does not tell."""
    if server.name == THEIRS:
        return None
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/status") as answer:
        return int(json.load(answer)["counters"]["vlm_tower_runs"])


class Conversation:
    """With one server."""

    def __init__(self, server: Server, system: str, fields: dict[str, Any]) -> None:
        self.server = server
        self.turns: list[Turn] = []
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._fields = fields

    def ask(self, message: dict[str, Any]) -> None:
        old_runs = tower_runs(self.server)
        self._messages.append(message)
        body = chat(self._messages, n_out=200, **self._fields)  # replies end before
        reply = self.server.ask(body)
        self._messages.append(reply.message)

        new_runs = tower_runs(self.server)
        n_runs = None
        if old_runs is not None and new_runs is not None:
            n_runs = new_runs - old_runs
        turn = Turn(reply.ttft, reply.n_prompt, reply.prefilled, n_runs)
        self.turns.append(turn)


class Talks:
    """The same conversation with every server, another one each time."""

    def __init__(self, servers: Sequence[Server], folder: Path, n_system: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        call = tokenizer.convert_tokens_to_ids("<tool_call>")
        fields = {"logit_bias": {str(call): -100.0}, "enable_thinking": True}
        self._servers = list(servers)
        self._n_system = n_system
        self._fields = fields
        self._words = Words(tokenizer, 11)
        self._n_images = 0
        self._n_talks = 0

    def __call__(self) -> list[list[Turn]]:
        """The turns with each server, which are asked in turns; who comes first changes."""
        system = self._words.text(self._n_system)
        talks = [Conversation(server, system, self._fields) for server in self._servers]
        self._n_talks += 1
        order = talks if self._n_talks % 2 else talks[::-1]
        for has_image in (True, False, False, True, False):
            self._n_images += has_image
            message = question(self._words, self._n_images if has_image else None)
            for talk in order:
                talk.ask(message)
        return [talk.turns for talk in talks]


def table(kind: str, results: Sequence[Sequence[Sequence[Turn]]]) -> Table:
    """`results`: rounds, ours and theirs, turns."""
    title = f"{kind} ({KINDS[kind]}): time to first token (TTFT), tokens prefilled"
    drawn = Table(title=title)
    for heading in (
        "turn",
        "start-llm: prefilled",
        "tower runs",
        "TTFT, s",
        "/ its turn 1",
        f"{THEIRS}: prefilled",
        "TTFT, s",
        "/ its turn 1",
        "TTFT, ours / theirs",
    ):
        drawn.add_column(heading)

    first_ours = [our_turns[0] for our_turns, _ in results]
    first_theirs = [their_turns[0] for _, their_turns in results]
    for index, name in enumerate(TURNS):
        ours = [our_turns[index] for our_turns, _ in results]
        theirs = [their_turns[index] for _, their_turns in results]
        drawn.add_row(
            name,
            prefilled(ours),
            runs(ours),
            *times(ours, first_ours),
            prefilled(theirs),
            *times(theirs, first_theirs),
            spread(ratios(seconds(ours), seconds(theirs))),
        )
    return drawn


def seconds(turns: Sequence[Turn]) -> list[float]:
    return [turn.ttft for turn in turns]


def times(turns: Sequence[Turn], firsts: Sequence[Turn]) -> tuple[str, str]:
    """Seconds, and as a share of the same conversation's first turn."""
    shares = ratios(seconds(turns), seconds(firsts))
    return spread(seconds(turns), "{:.3f}"), spread(shares, "{:.3f}")


def prefilled(turns: Sequence[Turn]) -> str:
    n_prefilled = statistics.median_low(turn.prefilled for turn in turns)
    n_prompt = statistics.median_low(turn.n_prompt for turn in turns)
    return f"{n_prefilled:,} of {n_prompt:,}"


def runs(turns: Sequence[Turn]) -> str:
    return ", ".join(sorted({str(turn.tower_runs) for turn in turns}))


def make_model(kind: str, scratch: Path) -> Path:
    """With a chat template that keeps thoughts: mlx_vlm.server cannot be asked for that."""
    maker = tiny_vision()
    folder: Path = maker.tiny_vision_model(
        KINDS[kind], scratch, maker.Tower(**TOWER), **MODEL
    )
    template = folder / "chat_template.jinja"
    statement = "{%- set preserve_thinking = true -%}"
    template.write_text(statement + template.read_text("utf-8"), "utf-8")
    return folder


def measure(kind: str, scratch: Path, arguments: argparse.Namespace) -> Table:
    folder = make_model(kind, scratch)
    settings = {} if arguments.defaults else AT_ITS_BEST
    with (
        our_server(folder, scratch) as ours,
        their_server(folder, scratch, settings) as theirs,
    ):
        talk = Talks([ours, theirs], folder, arguments.system)
        with console.status(f"{kind}: {arguments.rounds} rounds"):
            talk()  # what is compiled or read for the first time
            results = rounds(arguments.rounds, talk)
    return table(kind, results)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--rounds", type=int, default=5, help="conversations with each server"
    )
    parser.add_argument(
        "--system", type=int, default=2000, help="tokens of the instructions"
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help=f"{THEIRS} with APC_ENABLED=1 and nothing else",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="DOCUMENT",
        help="put each table into its place there: docs/benchmarks.md has them",
    )
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    about = f"Measured on {machine(with_openblas())}, with `{' '.join(['python', *sys.argv])}`."
    console.print(about, highlight=False, soft_wrap=True)
    for kind in arguments.kind:
        with tempfile.TemporaryDirectory(prefix="start-llm-vision-") as scratch:
            drawn = measure(kind, Path(scratch), arguments)
        console.print(drawn)
        if arguments.markdown:
            headings = [str(column.header) for column in drawn.columns]
            rows = zip(*(column.cells for column in drawn.columns), strict=True)
            table = report.markdown(headings, rows, about)
            report.write_into(arguments.markdown, f"vision {kind}", table)


if __name__ == "__main__":
    main()
