"""Put a real coding agent to work on a running server, and say whether the cache holds.

    CLIENTS_HOME=~/clients scripts/tools/clients/install.sh           once: the clients, from npm
    python scripts/tools/client_check.py claude-code                  start-llm on this machine
    python scripts/tools/client_check.py pi --url http://127.0.0.1:4000 --model NAME

Where the server listens and which key it wants is read from the environment or from .env, as the
server reads it: MLX_HOST, MLX_PORT, API_KEY.

The client works in a folder of its own and says three things in one session: the first needs files
read, commands run and a file written. Its requests pass through the recorder of capture_proxy.py.

    prompt    tokens that were sent
    cached    of them, what the server did not compute again
    known     what the request before it in the same conversation had sent and got back
    share     cached / known: HEALTHY where it is 99 % or more for each but the first request

Exit status: 0 healthy, 1 not, 2 where nothing could be judged. What a model says decides how many
requests there are: the bundled demo model does as it is told only where it is told simply.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from capture_proxy import (
    CaptureFile,
    CaptureProxy,
    Exchange,
    read_capture,
    stream_events,
)
from captured_prompts import (
    Body,
    Step,
    follow,
    prompts_of,
    tokens_of,
    usage_of,
)
from clients import drive
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chat import usual_server

CLIENTS: Final[dict[str, type[drive.Client]]] = {
    "claude-code": drive.ClaudeCode,
    "claude-code-2.1.150": drive.OldClaudeCode,
    "pi": drive.Pi,
    "openclaw": drive.OpenClaw,
    "openclaw-2026.2.17": drive.OldOpenClaw,
    "opencode": drive.OpenCode,
    "copilot": drive.Copilot,
    "qwen-code": drive.QwenCode,
}
HEALTHY_SHARE: Final = 0.99
SERVER: Final = "checked"  # the client's name for it
WORDS: Final = (
    "Read notes.txt and src/app.py, run `ls -la`, then write a summary of two lines to out.txt.",
    "Now show out.txt with `cat` and tell me how many lines it has.",
    "Say goodbye in one short sentence, without tools.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a conversation, in tokens."""

    talk: int  # conversations count from 1: the session, its sub-agents, its titles
    n_prompt: int
    n_cached: int
    n_reply: int
    n_known: int  # 0 for the first of its conversation
    n_calls: int

    @property
    def share(self) -> float | None:
        return self.n_cached / self.n_known if self.n_known else None

    @property
    def is_healthy(self) -> bool:
        return self.share is None or self.share >= HEALTHY_SHARE


def rows_of(exchanges: Sequence[Exchange]) -> list[Row]:
    """In the order of the requests, conversation by conversation."""
    rows = []
    for number, talk in enumerate(follow(list(prompts_of(exchanges))), 1):
        n_known = 0
        for entry in talk:
            prompt = entry.later if isinstance(entry, Step) else entry
            usage = total_usage(prompt.exchange)
            n_prompt, n_cached = tokens_of(usage)
            n_reply = usage.get("completion_tokens") or usage.get("output_tokens") or 0
            n_calls = count_calls(prompt.exchange)
            rows.append(Row(number, n_prompt, n_cached, n_reply, n_known, n_calls))
            n_known = n_prompt + n_reply
    return rows


def is_done(exchange: Exchange) -> bool:
    """A client may leave as soon as it has read the last event."""
    last_events = ("data: [DONE]", '"type": "message_stop"}', '"type":"message_stop"}')
    has_last_event = exchange.reply.rstrip().endswith(last_events)
    return exchange.status == 200 and (exchange.is_whole or has_last_event)


def total_usage(exchange: Exchange) -> Body:
    """The token counts of a reply; those of a stream may come in several events."""
    if exchange.reply.startswith("{"):
        return usage_of(json.loads(exchange.reply))

    usage: Body = {}
    for event in stream_events(exchange.reply.split("\n")):
        usage.update(usage_of(event))
    return usage


def count_calls(exchange: Exchange) -> int:
    """Tool calls in a reply, streamed or whole, of either API."""
    if exchange.reply.startswith("{"):
        reply = json.loads(exchange.reply)
        choices = reply.get("choices") or [{"message": {}}]
        calls = choices[0]["message"].get("tool_calls") or ()
        blocks = reply.get("content") or ()
        return len(calls) + [block["type"] for block in blocks].count("tool_use")

    events = list(stream_events(exchange.reply.split("\n")))
    blocks = [event.get("content_block") or {} for event in events]
    choices = [choice for event in events for choice in event.get("choices") or ()]
    deltas = [choice.get("delta") or {} for choice in choices]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    call_indexes = {piece.get("index", 0) for piece in pieces}
    return len(call_indexes) + [block.get("type") for block in blocks].count("tool_use")


@contextmanager
def recorded(url: str, path: Path) -> Iterator[str]:
    """Where to send what is to be recorded on its way to `url`."""
    address = ("127.0.0.1", 0)
    with (
        closing(CaptureFile(path)) as capture,
        CaptureProxy(address, upstream=url, capture=capture) as proxy,
    ):
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
            thread.join()


def have_session(name: str, args: argparse.Namespace, room: Path) -> list[Exchange]:
    """What the client asked. Raises ClientError."""
    capture = room / "capture.jsonl"
    with recorded(args.url, capture) as url:
        client = CLIENTS[name](room, {SERVER: url}, model=args.model, key=args.key)
        try:
            client.start()
            for words in WORDS:
                client.say(SERVER, words, seconds=args.minutes * 60)
                client.finish(SERVER, seconds=args.minutes * 60)
        finally:
            client.close()
    return [exchange for exchange in read_capture(capture) if exchange.api]


def first_model(url: str, key: str) -> str:
    """The server's first model. Raises OSError or ValueError."""
    request = urllib.request.Request(
        f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        models = json.load(answer)["data"]
    return str(models[0]["id"])


def table_of(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=name)
    for heading in ("talk", "prompt", "cached", "known", "share", "reply", "calls"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.talk),
            str(row.n_prompt),
            str(row.n_cached),
            str(row.n_known or ""),
            "" if row.share is None else f"{row.share:.2%}",
            str(row.n_reply),
            str(row.n_calls),
            style="" if row.is_healthy else "red",
        )
    return table


def verdict(rows: Sequence[Row], failed: Sequence[Exchange]) -> tuple[str, int]:
    """A sentence and the exit status."""
    judged = [row for row in rows if row.n_known]
    unhealthy = [row for row in judged if not row.is_healthy]
    n_calls = sum(row.n_calls for row in rows)
    counts = f"{len(rows)} requests, {n_calls} tool calls"

    if failed:
        status = failed[0].status
        return f"NOT HEALTHY: {len(failed)} of {counts} failed, status {status}", 1
    if unhealthy:
        fault = f"have less than {HEALTHY_SHARE:.0%} cached"
        return f"NOT HEALTHY: {len(unhealthy)} of {counts} {fault}", 1
    if not judged:
        return f"NOTHING TO JUDGE: {counts}; the client never went on", 2
    if not n_calls:
        counts += "; the model called no tool (a demo model's words mean nothing)"
    return f"HEALTHY: {counts}", 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check a server's cache with a real client."
    )
    parser.add_argument("name", choices=CLIENTS)
    usual = usual_server()
    parser.add_argument(
        "--url",
        default=usual.url,
        help="the server, without /v1; default: as MLX_HOST and MLX_PORT say",
    )
    parser.add_argument(
        "--model", default="", help="its name there; default: the first that it has"
    )
    parser.add_argument(
        "--key",
        default=usual.key or "none",
        help="API key to send; default: the first of API_KEY",
    )
    parser.add_argument("--minutes", type=float, default=10, help="longest turn")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if CLIENTS[args.name].missing():
        print(CLIENTS[args.name].how_to_install(), file=sys.stderr)
        return 2
    try:
        args.model = args.model or first_model(args.url, args.key)
        with TemporaryDirectory(ignore_cleanup_errors=True) as room:
            # Of macOS's folder for temporary files, a client knows the other name.
            exchanges = have_session(args.name, args, Path(room).resolve())
    except (OSError, ValueError, LookupError, drive.ClientError) as error:
        print(f"{args.name} on {args.url}: {error}", file=sys.stderr)
        return 2

    failed = [exchange for exchange in exchanges if not is_done(exchange)]
    rows = rows_of([exchange for exchange in exchanges if exchange not in failed])
    sentence, status = verdict(rows, failed)
    if args.json:
        requests = [{**asdict(row), "share": row.share} for row in rows]
        result = {"client": args.name, "verdict": sentence, "requests": requests}
        print(json.dumps(result, indent=1))
    else:
        Console().print(table_of(args.name, rows))
        print(sentence)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
