"""What a tool with `strict: true` costs a reply that is plain text.

    .venv/bin/python benchmarks/strict_tool.py [--rounds 15] [--server start-llm.py]

A reply of 256 tokens is generated with and without `strict`, in turn, greedily, with the
same prompt: the text is the same, and no call is in it. Printed are tokens a second, as
medians, and the median of the quotients of neighbours.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import compared_servers
from agent_workload import TOOLS, chat, endless
from compared_servers import Server, our_server
from sections import DECODER, tokenizer_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "tools"))
import make_tiny_model as maker  # noqa: E402

N_TOKENS = 256
MODELS: dict[str, dict[str, int]] = {"tiny": {}, "larger": DECODER}


def measure(server: Server, body: dict[str, Any], n_rounds: int) -> list[list[float]]:
    """Tokens a second of each round, without strict and with it."""
    strict_tools = [{**tool, "strict": True} for tool in body["tools"]]
    bodies = [body, {**body, "tools": strict_tools}]
    contents = {server.ask(sent).message["content"] for sent in bodies}  # warms up, too
    assert len(contents) == 1, "the replies are not the same"

    speeds: list[list[float]] = []
    for n in range(n_rounds):
        ordered = bodies if n % 2 else bodies[::-1]
        pair = [server.ask(sent).decode_speed for sent in ordered]
        speeds.append(pair if n % 2 else pair[::-1])
    return speeds


def report(label: str, speeds: Sequence[Sequence[float]]) -> str:
    plain, strict = (statistics.median(column) for column in zip(*speeds, strict=True))
    quotient = statistics.median(pair[1] / pair[0] for pair in speeds)
    return (
        f"{label}: {plain:.0f} tokens/s, with strict {strict:.0f}; "
        f"median of the quotients {quotient:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--server", type=Path, default=ROOT / "start-llm.py")
    options = parser.parse_args()
    compared_servers.START_LLM = options.server.resolve()

    with TemporaryDirectory() as scratch:
        for label, size in MODELS.items():
            folder = Path(scratch) / label
            maker.make_model(folder, maker.choose_recipe("qwen3", **size))
            limits = endless(tokenizer_of(folder), N_TOKENS)
            body = chat([{"role": "user", "content": "Go on."}], n_out=0, **limits)
            assert body["tools"] == TOOLS
            with our_server(folder, Path(scratch)) as server:
                speeds = measure(server, body, options.rounds)
            print(report(label, speeds), flush=True)


if __name__ == "__main__":
    main()
