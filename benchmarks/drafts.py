"""Decoding with drafts and without, beside mlx_lm.server and mlx_lm.generate, in one run.

    .venv/bin/python benchmarks/drafts.py [--rounds 3] [--kinds qwen3 qwen3_5] [--head]

All have the same random model and prompt, and a logits processor forces the same reply. The
prompt has a file of 60 lines, of about ten tokens each, and the reply is one of

    rewrite  the file, every 15th line another one
    diff     the unified diff of that
    call     a call that writes 40 of the lines to the file's path
    free     300 tokens of random words
    eight    eight of those, decoded together: tokens a second of all

Each round has a new file and asks all in turn, in any order; ratios are within a round. The
servers are asked over HTTP, mlx_lm.generate is called in this process; the clock runs from the
first token to the last. `call` begins with text, since mlx_lm.server sends a call when it is whole.

With --head a head (MTP) of mlx-vlm's class, or Gemma 4's assistant, drafts for `free` (here of 150
tokens), `long` (600), `two` and `eight`, for a model of 12 layers (Gemma: 6), beside the same
server without. It does all its work and is then made to be right as often as the row says, since no
head for a random model would be.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from agent_workload import Body, Words, chat, user
from compare import machine, with_openblas
from compared_servers import OURS, THEIRS, Server, our_server, their_server
from forced_server import force
from mlx_lm.utils import load_tokenizer
from mlx_lm_reference import Plain
from project_files import make_tiny_model, tiny_heads
from report import markdown, ratios, spread
from sections import ask_together, speed_together

SIZE: Final = {"hidden": 512, "mlp": 1536, "layers": 4}
FORCED_SERVER: Final = Path(__file__).resolve().parent / "forced_server.py"
AUTO: Final = "auto"
OFF: Final = "off"
GENERATE: Final = "mlx_lm.generate"
BARS: Final = {"rewrite": 2.0, "diff": 1.5, "call": 1.5, "free": 0.98, "eight": 0.98}
HEAD: Final = "head"
HEAD_SIZE: Final = {"hidden": 1024, "mlp": 3072, "layers": 12}
N_HEAD_TOKENS: Final = 150
N_LONG_TOKENS: Final = 600
HEAD_KINDS: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "gemma4")
# By the share of its tokens that are right: (reply, bar).
HEAD_ROWS: Final = (
    *((0.8, "free", 1.3), (0.5, "free", 0.98), (0.0, "free", 0.98)),
    *((0.0, "long", 0.98), (0.8, "two", 0.98), (0.8, "eight", 0.98)),
)
N_LINES: Final = 60
N_FREE_TOKENS: Final = 300
TOGETHER: Final = {"two": 2, "eight": 8}  # else a reply is alone
LINE_TOKENS: Final = 8  # as text is cut, and with the line end, about ten


class Task(NamedTuple):
    """A request, and the reply that it gets."""

    body: Body
    prompt_ids: list[int]
    text: str
    token_ids: list[int]


def make_task(kind: str, words: Words, n_free: int = N_FREE_TOKENS) -> Task:
    def line() -> str:
        return words.text(LINE_TOKENS)

    path = f"src/{line().replace(' ', '_')}.py"
    old = [line() for _ in range(N_LINES)]
    new = [line() if n % 15 == 14 else old[n] for n in range(N_LINES)]
    if kind == "rewrite":
        text = "\n".join(new)
    elif kind == "diff":
        text = "\n".join(difflib.unified_diff(old, new, path, path, lineterm=""))
    elif kind == "call":
        values = {"path": path, "content": "\n".join(old[10:50])}
        parameters = [
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in values.items()
        ]
        call = f"<function=write>\n{''.join(parameters)}</function>"
        text = f"{line()}\n\n<tool_call>\n{call}\n</tool_call>"
    else:
        text = words.text(2 * n_free)

    token_ids = words.tokenizer.encode(text, add_special_tokens=False)
    if kind in ("free", "long", *TOGETHER):  # as long as the others of the eight
        token_ids = token_ids[:n_free]
        text = words.tokenizer.decode(token_ids)
    messages = [user("\n".join([f"Change {path}:", "", *old]))]
    kwargs = {"enable_thinking": False}
    body = chat(messages, n_out=len(token_ids), chat_template_kwargs=kwargs)
    prompt_ids = words.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tools=body["tools"], **kwargs
    )
    return Task(body, prompt_ids, text, token_ids)


class Decoders:
    """All that decode with one model: our servers, by their settings, and mlx-lm."""

    def __init__(
        self, folder: Path, scratch: Path, stack: ExitStack, **settings: dict[str, Any]
    ) -> None:
        self._replies = scratch / "replies.json"
        self._replies.write_text("[]")  # of the requests of the start
        self.right = self._replies.with_suffix(".right")  # see forced_server.py
        self.right.write_text("0")
        program = [str(FORCED_SERVER), str(self._replies)]
        self._servers: dict[str, Server] = {}
        for name, changes in settings.items():
            server = our_server(folder, scratch, program=[*program, OURS], **changes)
            self._servers[name] = stack.enter_context(server)
        if AUTO in settings:
            server = their_server(folder, scratch, program=[*program, THEIRS])
            self._servers[THEIRS] = stack.enter_context(server)
            self._plain = Plain(folder)
        self.words = Words(load_tokenizer(folder), 1)

    def speeds(
        self, names: list[str], kind: str, n_rounds: int, n_free: int = N_FREE_TOKENS
    ) -> dict[str, list[float]]:
        """Of each by its name, round by round, in any order."""
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(n_rounds):
            n_tasks = TOGETHER.get(kind, 1)
            tasks = [make_task(kind, self.words, n_free) for _ in range(n_tasks)]
            for name in random.sample(names, len(names)):
                speeds[name].append(self.speed(name, tasks))
        return speeds

    def speed(self, name: str, tasks: list[Task]) -> float:
        """Tokens a second of all tasks together."""
        if name == GENERATE:
            (task,) = tasks
            processors = [force(task.token_ids)]
            n_tokens = len(task.token_ids)
            return self._plain.speed_with(processors, task.prompt_ids, n_tokens)

        self._replies.write_text(json.dumps([task.token_ids for task in tasks]))
        replies = ask_together(self._servers[name], [task.body for task in tasks])
        n_prompts = {len(task.prompt_ids) for task in tasks}
        assert {reply.n_prompt for reply in replies} == n_prompts, "another prompt"
        messages = json.dumps([reply.message for reply in replies])
        lines = [line for task in tasks for line in task.text.splitlines()]
        assert all("<" in line or line in messages for line in lines), "another reply"
        return replies[0].decode_speed if len(replies) == 1 else speed_together(replies)


def verdict(quotients: list[float], bar: float) -> str:
    return f">= {bar}: {'yes' if statistics.median(quotients) >= bar else '**no**'}"


def measure(decoders: Decoders, kind: str, n_rounds: int) -> list[str]:
    """The cells of a row."""
    names = [AUTO, OFF] if kind == "eight" else [AUTO, OFF, THEIRS, GENERATE]
    speeds = decoders.speeds(names, kind, n_rounds)
    medians = [f"{statistics.median(speeds[name]):.0f}" for name in names]
    quotients = [ratios(speeds[AUTO], speeds[name]) for name in names[1:]]
    gaps = [""] * (4 - len(names))
    cells = [*medians, *gaps, *map(spread, quotients), *gaps]
    return [*cells, verdict(quotients[0], BARS[kind])]


def measure_heads(
    kinds: list[str], replies: list[str], n_rounds: int
) -> list[list[str]]:
    """The rows of all kinds, with a head and without."""
    maker = make_tiny_model()
    rows = []
    for kind in kinds:
        with TemporaryDirectory() as scratch, ExitStack() as stack:
            folder = Path(scratch) / kind
            if kind == "gemma4":
                folder, head_folder = tiny_heads().tiny_gemma(
                    folder,
                    hidden_size=HEAD_SIZE["hidden"],
                    intermediate_size=HEAD_SIZE["mlp"],
                )
            else:
                recipe = maker.choose_recipe(kind, size="small", **HEAD_SIZE)
                maker.make_model(folder, recipe)
                head_folder = tiny_heads().tiny_head(folder)
            settings = {HEAD: {"draft_model": head_folder}, OFF: {"draft_model": ""}}
            decoders = Decoders(folder, Path(scratch), stack, **settings)
            for share_right, reply, bar in HEAD_ROWS:
                if reply not in replies:
                    continue
                decoders.right.write_text(str(share_right))
                n_tokens = N_LONG_TOKENS if reply == "long" else N_HEAD_TOKENS
                speeds = decoders.speeds([HEAD, OFF], reply, n_rounds, n_tokens)
                medians = [f"{statistics.median(speeds[name]):.0f}" for name in speeds]
                quotients = ratios(speeds[HEAD], speeds[OFF])
                cells = [*medians, spread(quotients), verdict(quotients, bar)]
                rows.append([kind, reply, f"{share_right:.0%}", *cells])
                print(*rows[-1], sep="  ", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--replies", nargs="+", choices=[*BARS, "long", "two"])
    parser.add_argument("--head", action="store_true")
    options = parser.parse_args()
    if not options.head and {"long", "two"} & {*(options.replies or ())}:
        parser.error("long and two are for --head")
    blas = with_openblas()
    command = " ".join(["python", *sys.argv])
    source = f"Measured on {machine(blas)}, with `{command}`."
    if options.head:
        kinds = options.kinds or [*HEAD_KINDS]
        replies = options.replies or [reply for _, reply, _ in HEAD_ROWS]
        rows = measure_heads(kinds, replies, options.rounds)
        headings = ["model", "reply", "right", "with a head, tokens/s", OFF]
        print(markdown([*headings, "head / off", "bar"], rows, source))
        return
    maker = make_tiny_model()
    rows = []
    for kind in options.kinds or ["qwen3", "qwen3_5"]:
        with TemporaryDirectory() as scratch, ExitStack() as stack:
            folder = Path(scratch) / kind
            maker.make_model(folder, maker.choose_recipe(kind, size="small", **SIZE))
            settings = {name: {"speculation": name} for name in (AUTO, OFF)}
            decoders = Decoders(folder, Path(scratch), stack, **settings)
            for reply in options.replies or BARS:
                rows.append([kind, reply, *measure(decoders, reply, options.rounds)])
                print(*rows[-1], sep="  ", flush=True)
    headings = [
        *("model", "reply", *(name + ", tokens/s" for name in (AUTO, OFF)), THEIRS),
        *(GENERATE, "auto / off", f"auto / {THEIRS}", f"auto / {GENERATE}", "bar"),
    ]
    print(markdown(headings, rows, source))


if __name__ == "__main__":
    main()
