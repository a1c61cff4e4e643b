"""Ask a running server as PI does, turn after turn, and say whether its cache is healthy.

    python scripts/pi_like_probe.py                                    start-llm on this machine
    python scripts/pi_like_probe.py --base-url http://127.0.0.1:4000   any OpenAI-compatible server
                                                                       (counters: from MLX_PORT)
    python scripts/pi_like_probe.py --turns 20 --json
    python scripts/pi_like_probe.py --image [FILE.png]                 a vision model

WHAT IS ASKED

    developer prompt ──► question ──► reply ──────► results of its calls ──► reply ──► ...
    new to every cache:  as text      echoed the    canned and short; after a reply without
    turn 1 is cold (1)   parts        way PI does   calls, the next question

    (1) but for the tools, where a template prints them before the prompt

    With --image the first question has an image as well, new to every cache unless it is a file of
    yours: all later turns must find it.

WHAT IS PRINTED per turn, in tokens

    prompt    what was sent
    cached    of it, what the server did not compute again; hit is their ratio
    lost      of what the turn before had sent and generated, what was not cached: the divergence.
              The token that ends a reply is often among it; hundreds mean a rewritten past
    ttft      seconds to the first word, thought or call

HEALTHY (exit status 0, else 1; 2: the server could not be asked)

    hit is 97 % or more from turn 3 on; with --image it is 94 % or more in turn 2, which must find
    turn 1 with its image; and the counters of what must not happen stood still:
    vlm_retreat and exact_key_rejected_by_model_lcp, and hybrid_trim_miss from turn 2 on (turn 1 may
    begin as another conversation does, and have no checkpoint there). A turn in which the server
    drops past thinking, as PRESERVE_THINKING=false tells it to, is not judged by its hit.
"""

import argparse
import base64
import io
import json
import mimetypes
import random
import secrets
import sys
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import agent_steps
from agent_steps import Body, CannotAsk, Reply, Server, tool
from chat import add_place_options, make_table
from launch import LOOPBACK, place_of, read_settings
from PIL import Image
from rich.console import Console
from rich.progress import track

HEALTHY_SHARE: Final = 0.97  # of a prompt is cached ...
HEALTHY_FROM: Final = 3  # ... from this turn on
IMAGE_SHARE: Final = 0.94  # of turn 2 after an image
TURN_END_TOKENS: Final = 32  # how a turn ends and a reply begins; fewer than an image
# Counters that must not move, and one that must not after the first turn.
STILL: Final = ("vlm_retreat", "exact_key_rejected_by_model_lcp")
STILL_LATER: Final = "hybrid_trim_miss"
DROPPED_THINKING: Final = "thinking is not preserved"  # why a past was not replayed
RESULT_TOKENS: Final = 12  # of a call: few, or what is new would look missed
IMAGE_SIDE: Final = 224  # pixels of the image made here


# The server --------------------------------------------------------------------------------------


def read_status(server: Server) -> Body:
    """The status page of start-llm; empty where the server has none."""
    try:
        body = server.get("/v1/status")
    except CannotAsk:
        return {}
    return body if isinstance(body, dict) else {}


def read_counters(server: Server) -> dict[str, int] | None:
    """What start-llm counts; None where the server has no such page."""
    counters = read_status(server).get("counters")
    return counters if isinstance(counters, dict) else None


def drops_thinking(server: Server, reply: Reply) -> bool:
    """Whether start-llm says that it left past thinking out for this reply."""
    request_id = reply.id.rpartition("-")[2]
    return any(
        request_id.startswith(record["id"])
        for record in read_status(server).get("recent", ())
        if record.get("fallback") == DROPPED_THINKING
    )


# PI ----------------------------------------------------------------------------------------------

TEXT: Final[Body] = {"type": "string"}
NUMBER: Final[Body] = {"type": "number"}
CHANGE: Final[Body] = {
    "type": "object",
    "required": ["oldText", "newText"],
    "properties": {"oldText": TEXT, "newText": TEXT},
}
READ: Final = "Show a file of the project, whole or from line `offset` on."
BASH: Final = "Run a command in the project's folder and show what it prints."
EDIT: Final = "Replace pieces of a file; each old text must occur in it once."
WRITE: Final = "Write a file, a new one or over an old one."
TOOLS: Final[list[Body]] = [
    tool("read", READ, n_optional=2, path=TEXT, offset=NUMBER, limit=NUMBER),
    tool("bash", BASH, n_optional=1, command=TEXT, timeout=NUMBER),
    tool("edit", EDIT, path=TEXT, edits={"type": "array", "items": CHANGE}),
    tool("write", WRITE, path=TEXT, content=TEXT),
]
QUESTIONS: Final = (
    "Read notes.txt and list the files, then tell me what this project is.",
    "Open src/app.py and explain what main does.",
    "Write a short summary of that to out.txt.",
    "Check with bash how many lines out.txt has.",
    "Rename the function that greets people, everywhere it occurs.",
)


def read_image(path: str, nonce: str) -> str:
    """A data URL: of a file, or without a path of an image made for this nonce.

    Raises CannotAsk.
    """
    if not path:
        # Squares of color, others for another nonce.
        squares = Image.frombytes("RGB", (8, 8), random.Random(nonce).randbytes(192))
        file = io.BytesIO()
        size = (IMAGE_SIDE, IMAGE_SIDE)
        squares.resize(size, Image.Resampling.NEAREST).save(file, "PNG")
        kind, payload = "image/png", file.getvalue()
    else:
        kind = mimetypes.guess_type(path)[0] or "image/png"
        try:
            payload = Path(path).read_bytes()
        except OSError as error:
            raise CannotAsk(f"--image: {error}") from error
    return f"data:{kind};base64,{base64.b64encode(payload).decode()}"


class Agent(agent_steps.Agent):
    """PI at work in a made-up project: it answers the model's calls, or asks the next question.

    No other conversation shares more than the first words with one of another seed.
    """

    def __init__(
        self, seed: str, *, role: str, head_chars: int, image_url: str = ""
    ) -> None:
        """`image_url`: of an image that the first question has."""
        self._n_questions = 0
        n_tokens = int(head_chars / agent_steps.CHARS_PER_TOKEN)
        super().__init__(head_tokens=n_tokens, result_tokens=RESULT_TOKENS, seed=seed)
        self.tools = TOOLS
        self.messages[0]["role"] = role
        if image_url:  # as PI sends `@pic.png`
            self.messages[1]["content"] += [
                {"type": "text", "text": '<file name="/work/pic.png"></file>'},
                {"type": "image_url", "image_url": {"url": image_url}},
            ]

    def question(self) -> Body:
        text = QUESTIONS[self._n_questions % len(QUESTIONS)]
        self._n_questions += 1
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    next_question = question

    def body(self, *, max_tokens: int, effort: str) -> Body:
        """The next request."""
        limits = {"max_completion_tokens": max_tokens, "reasoning_effort": effort}
        return {"messages": self.messages, "tools": TOOLS, "store": False, **limits}


# Judging -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request and its reply, in tokens and seconds."""

    number: int
    asked: str  # the role of the newest message
    prompt: int
    cached: int
    out: int
    lost: int
    ttft_seconds: float
    seconds: float
    finish: str
    drops_thinking: bool

    @property
    def share(self) -> float:
        return self.cached / self.prompt


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a healthy server has."""

    name: str
    healthy: bool
    says: str


def measure_turn(
    reply: Reply,
    *,
    asked_role: str,
    last_turn: Turn | None,
    drops_thinking: bool = False,
) -> Turn:
    """What a reply says about the cache, seen after the turn before it."""
    n_known = last_turn.prompt + last_turn.out if last_turn else 0
    n_cached = reply.n_cached or 0
    return Turn(
        number=last_turn.number + 1 if last_turn else 1,
        asked=asked_role,
        prompt=reply.n_prompt,
        cached=n_cached,
        out=reply.n_out,
        lost=max(0, n_known - n_cached),
        ttft_seconds=round(reply.first_seconds, 4),
        seconds=round(reply.seconds, 4),
        finish=reply.finish_reason,
        drops_thinking=drops_thinking,
    )


def count_steps(
    old_counters: dict[str, int] | None, counters: dict[str, int] | None
) -> dict[str, int] | None:
    """How far each counter went; None where the server shows none."""
    if old_counters is None or counters is None:
        return None
    return {name: n - old_counters.get(name, 0) for name, n in counters.items()}


def judge(
    turns: Sequence[Turn],
    counters: Mapping[str, int] | None,
    *,
    later: Mapping[str, int] | None = None,
    has_image: bool = False,
) -> list[Check]:
    """`counters`: how far each of them moved meanwhile; `later`: after the first turn.

    `has_image`: the first turn ended with an image.
    """
    checks = [judge_hit(turns[HEALTHY_FROM - 1 :])]
    if has_image:  # the second turn must find all of the first, whose last part it is
        first, second = turns[:2]
        is_found = second.cached >= first.prompt - TURN_END_TOKENS
        found = "found" if is_found else "read again"
        says = (
            f"{second.share:.1%}, the image {found}; wanted {IMAGE_SHARE:.0%} with it"
        )
        is_healthy = is_found and second.share >= IMAGE_SHARE
        checks.append(Check("hit in turn 2", is_healthy, says))
    steps = {name: (counters or {}).get(name) for name in STILL}
    steps[f"{STILL_LATER} from turn 2 on"] = (later or {}).get(STILL_LATER)
    for name, step in steps.items():
        if step is not None:
            checks.append(Check(name, step == 0, f"moved by {step}; wanted 0"))
    return checks


def judge_hit(turns: Sequence[Turn]) -> Check:
    """Whether all turns found what was sent before, but those that drop thinking."""
    name = f"hit from turn {HEALTHY_FROM} on"
    judged = [turn for turn in turns if not turn.drops_thinking]
    if not judged:
        says = "no turn to judge: each drops past thinking, as it is set"
        return Check(name, True, says)

    worst = min(judged, key=lambda turn: turn.share)
    says = f"{worst.share:.1%} in turn {worst.number}, the worst; wanted {HEALTHY_SHARE:.0%}"
    if len(judged) < len(turns):
        dropping = [f"T{turn.number}" for turn in turns if turn.drops_thinking]
        says += f"; not judged: {', '.join(dropping)} (PRESERVE_THINKING=false)"
    return Check(name, worst.share >= HEALTHY_SHARE, says)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    server: Server
    turns: list[Turn]
    counters: dict[str, int] | None  # how far they moved
    checks: list[Check]

    @property
    def healthy(self) -> bool:
        return all(check.healthy for check in self.checks)


# Showing -----------------------------------------------------------------------------------------


def tracked[T](things: Iterable[T], title: str) -> Iterable[T]:
    """These, with a bar on stderr if a person looks at it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return things
    return track(list(things), title, console=console, transient=True)


def show(report: Report, console: Console) -> None:
    """The table of turns, the counters and the checks."""
    title = f"{report.server.model} at {report.server.url}"
    names = ("turn", "asked", "prompt", "cached", "hit", "lost", "out", "ttft")
    table = make_table(title, [*names, "finish"], texts=("asked", "finish"))
    for turn in report.turns:
        numbers = [f"{n:,}" for n in (turn.prompt, turn.cached, turn.lost, turn.out)]
        prompt, cached, lost, out = numbers
        row = (f"T{turn.number}", turn.asked, prompt, cached, f"{turn.share:.1%}", lost)
        table.add_row(*row, out, f"{turn.ttft_seconds:.3f}", turn.finish)
    console.print(table)

    if report.counters is None:
        console.print("counters: this server shows none at /v1/status")
    else:
        steps = [f"{name} {step:+d}" for name, step in report.counters.items()]
        console.print("counters: " + ", ".join(steps), soft_wrap=True)
    for check in report.checks:
        word = "[green]healthy[/]" if check.healthy else "[bold red]NOT HEALTHY[/]"
        console.print(f"{word}  {check.name}: {check.says}", soft_wrap=True)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options that every probe has; what they leave open is as in .env."""
    add_place_options(parser, url="--base-url", key="--api-key")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    text = "of the prompt; some servers know only system"
    parser.add_argument("--role", default="developer", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def probe(options: argparse.Namespace) -> Report:
    """Raises CannotAsk."""
    nonce = secrets.token_hex(8)
    image_url = ""
    if options.image is not None:
        image_url = read_image(options.image, nonce)
    server = Server(options.base_url, model=options.model, key=options.api_key)
    agent = Agent(
        nonce, role=options.role, head_chars=options.head_chars, image_url=image_url
    )
    shown = server  # whose status page is read: of LiteLLM beside start-llm that one
    settings = read_settings()
    parts = urllib.parse.urlsplit(server.url)
    proxy_port = settings.get("PROXY_PORT", "4000")
    if parts.hostname in LOOPBACK and str(parts.port) == proxy_port:
        shown = Server(place_of(settings).url, model="any", key=options.api_key)
    old_counters = first_counters = read_counters(shown)
    turns: list[Turn] = []
    for _ in tracked(range(options.turns), "turns"):
        asked_role = agent.messages[-1]["role"]
        body = agent.body(max_tokens=options.max_tokens, effort="medium")
        reply = server.ask_chat(body)
        if not turns:
            first_counters = read_counters(shown)
        turn = measure_turn(
            reply,
            asked_role=asked_role,
            last_turn=turns[-1] if turns else None,
            drops_thinking=drops_thinking(shown, reply),
        )
        turns.append(turn)
        agent.hear(reply)
    counters = read_counters(shown)
    steps = count_steps(old_counters, counters)
    later = count_steps(first_counters, counters)
    checks = judge(turns, steps, later=later, has_image=bool(image_url))
    return Report(server, turns, steps, checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_server_options(parser)
    parser.add_argument("--turns", type=int, default=8, help=f"at least {HEALTHY_FROM}")
    parser.add_argument("--head-chars", type=int, default=24_000, help="of the prompt")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of one reply")
    text = "ask about an image, too; without a file about one made for the purpose"
    parser.add_argument("--image", nargs="?", const="", metavar="FILE", help=text)
    options = parser.parse_args()
    if options.turns < HEALTHY_FROM:
        parser.error(f"--turns: the verdict needs at least {HEALTHY_FROM}")
    try:
        report = probe(options)
    except CannotAsk as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        turns = [{**asdict(t), "share": round(t.share, 4)} for t in report.turns]
        body = {
            "base_url": report.server.url,
            "model": report.server.model,
            "turns": turns,
            "counters": report.counters,
            "checks": [asdict(check) for check in report.checks],
            "healthy": report.healthy,
        }
        print(json.dumps(body, indent=2))
    else:
        show(report, Console(highlight=False))
    return 0 if report.healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
