"""Send captured requests to a server again and report how much of each prompt it had cached.

    python scripts/tools/replay_capture.py CAPTURE --base-url http://127.0.0.1:8080 [--against URL2]
        [--max-tokens 1] [--model NAME] [--limit N] [--key KEY] [--json]

CAPTURE is what capture_proxy.py wrote, or a folder of numbered files, one per request. Requests go
out one at a time, in the order they came, as streams; with --against each goes to one server and
then to the other. Only the number of new tokens and, if wanted, the model's name are changed.

A server that has just served these requests knows them all, so ask a fresh one.

The replies in a capture are those of the server that was asked then. What another server generates
now is not in later prompts, so a hit share counts what it knew of prompts, not of its own replies.
A provider that wants more new tokens than a thinking budget has to be given --max-tokens.

Time to first token counts from sending to the first piece of text, reasoning or call. A reply of
one token may have none, then it counts to the end of the stream.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from capture_proxy import Exchange, read_capture, stream_events
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Body = dict[str, Any]

REPLY_SECONDS = 900.0
PASSED_HEADERS = ("anthropic-version", "anthropic-beta")
SESSION_WORDS = ("session", "thread-id", "agent-id")  # in names of headers
SAID = frozenset(
    {
        "content",
        "reasoning_content",
        "reasoning",
        "tool_calls",
        "text",
        "thinking",
        "partial_json",
    }
)


@dataclass(frozen=True, slots=True)
class Result:
    """How one server took one request."""

    seq: int
    n_prompt: int = 0
    n_cached: int = 0
    ttft_seconds: float = 0.0
    trouble: str = ""

    @property
    def body(self) -> Body:
        share = self.n_cached / self.n_prompt if self.n_prompt else 0.0
        return {**asdict(self), "hit_share": share}


@dataclass(frozen=True, slots=True)
class Wish:
    """How requests differ from those in the capture."""

    max_tokens: int = 1
    model: str = ""
    key: str = ""


def body_of(exchange: Exchange, wish: Wish) -> Body:
    """The body to send."""
    body = {**(exchange.body or {}), "stream": True}
    names = [n for n in ("max_tokens", "max_completion_tokens") if n in body] or [
        "max_tokens"
    ]
    body |= dict.fromkeys(names, wish.max_tokens)
    if exchange.api == "chat":
        body["stream_options"] = {
            **(body.get("stream_options") or {}),
            "include_usage": True,
        }
    if wish.model:
        body["model"] = wish.model
    return body


def headers_of(exchange: Exchange, wish: Wish) -> dict[str, str]:
    """Those that name the session and the API; of the rest only a key, if one was given."""
    headers = {
        name: value
        for name, value in exchange.headers.items()
        if name in PASSED_HEADERS or any(word in name for word in SESSION_WORDS)
    }
    if wish.key:
        headers["Authorization"] = f"Bearer {wish.key}"
        headers["x-api-key"] = wish.key
    headers["Content-Type"] = "application/json"
    return headers


def target_of(base_url: str, path: str) -> str:
    """Path to ask for, whether the base URL ends in /v1 or not."""
    base = urlsplit(base_url).path.rstrip("/")
    if path.startswith("/v1/"):
        base = base.removesuffix("/v1")
    return base + path


def ask(base_url: str, exchange: Exchange, wish: Wish) -> Result:
    """Send one request and read its reply to the end; failures are in the result."""
    url = urlsplit(base_url)
    is_tls = url.scheme == "https"
    kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = kind(url.hostname or "127.0.0.1", url.port, timeout=REPLY_SECONDS)

    payload = json.dumps(body_of(exchange, wish)).encode()
    target = target_of(base_url, exchange.path)
    headers = headers_of(exchange, wish)
    with closing(connection):
        try:
            connection.connect()
            sent = time.perf_counter()
            connection.request("POST", target, payload, headers)
            return read_result(connection.getresponse(), exchange.seq, sent)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Result(exchange.seq, trouble=repr(error))


def read_result(response: http.client.HTTPResponse, seq: int, sent: float) -> Result:
    """`sent`: perf_counter."""
    if response.status != 200:
        text = response.read(300).decode(errors="replace")
        return Result(seq, trouble=f"{response.status}: {text}")

    result = Result(seq)
    usage: Body = {}
    for event in events_of(response):
        usage.update(usage_of(event))
        if not result.ttft_seconds and says_something(event):
            result = replace(result, ttft_seconds=time.perf_counter() - sent)
        if "error" in event:
            result = replace(result, trouble=json.dumps(event["error"])[:300])
    ttft = result.ttft_seconds or time.perf_counter() - sent
    n_prompt, n_cached = tokens_of(usage)
    return replace(result, n_prompt=n_prompt, n_cached=n_cached, ttft_seconds=ttft)


def events_of(response: http.client.HTTPResponse) -> Iterator[Body]:
    """Of a stream, as they come; a server that does not stream gives one."""
    if "event-stream" in (response.getheader("Content-Type") or ""):
        yield from stream_events(iter(response.readline, b""))
    else:
        yield json.loads(response.read())


def usage_of(event: Body) -> Body:
    """The counts in an event; Anthropic's first ones are in its message."""
    usage = event.get("usage") or (event.get("message") or {}).get("usage") or {}
    return {name: value for name, value in usage.items() if value is not None}


def tokens_of(usage: Body) -> tuple[int, int]:
    """(prompt, of it cached): Anthropic counts apart what was read from a cache or put there."""
    if "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details") or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0
    cached = usage.get("cache_read_input_tokens", 0)
    created = usage.get("cache_creation_input_tokens", 0)
    return usage.get("input_tokens", 0) + cached + created, cached


def says_something(event: Body) -> bool:
    """Keep-alives and empty first deltas say nothing."""
    pieces = [
        choice.get("delta") or choice.get("message")
        for choice in event.get("choices") or ()
    ]
    pieces.append(event.get("delta"))
    is_call = (event.get("content_block") or {}).get("type") == "tool_use"
    dicts = [piece for piece in pieces if isinstance(piece, dict)]
    return is_call or any(piece.get(name) for piece in dicts for name in SAID)


# Report -------------------------------------------------------------------------------------------


def total_of(results: Sequence[Result]) -> Body:
    answered = [result for result in results if not result.trouble]
    n_prompt = sum(result.n_prompt for result in answered)
    n_cached = sum(result.n_cached for result in answered)
    seconds = [result.ttft_seconds for result in answered]
    return {
        "n_requests": len(results),
        "n_failed": len(results) - len(answered),
        "n_prompt": n_prompt,
        "n_cached": n_cached,
        "hit_share": n_cached / n_prompt if n_prompt else 0.0,
        "ttft_seconds": statistics.median(seconds) if seconds else 0.0,
    }


def as_json(results: dict[str, list[Result]]) -> str:
    servers = {
        url: {
            "total": total_of(server_results),
            "requests": [result.body for result in server_results],
        }
        for url, server_results in results.items()
    }
    return json.dumps(servers, indent=1)


def table_of(results: dict[str, list[Result]]) -> Table:
    """A line for each request, the servers side by side, and the totals."""
    caption = "ttft: ms to the first token, in the last line their median"
    table = Table("", title=" | ".join(results), caption=caption)
    for _ in results:
        for heading in ("prompt", "cached", "hit", "ttft"):
            table.add_column(heading, justify="right", no_wrap=True)

    for request_results in zip(*results.values(), strict=True):
        row = [f"#{request_results[0].seq}"]
        for result in request_results:
            row += cells(result.body)
        table.add_row(*row)

    table.add_section()
    total_row = ["all"]
    for server_results in results.values():
        total_row += cells(total_of(server_results))
    table.add_row(*total_row)
    return table


def cells(counted: Body) -> tuple[str, ...]:
    """Of one result or of a total."""
    if counted.get("trouble"):
        return ("failed", "", "", "")
    return (
        str(counted["n_prompt"]),
        str(counted["n_cached"]),
        f"{counted['hit_share']:.1%}",
        f"{counted['ttft_seconds'] * 1000:.0f}",
    )


def replay(
    exchanges: Iterable[Exchange], urls: Sequence[str], wish: Wish
) -> dict[str, list[Result]]:
    """Results by server; shows how far it is on the error stream."""
    requests = [exchange for exchange in exchanges if exchange.api]
    results: dict[str, list[Result]] = {url: [] for url in urls}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for exchange in progress.track(requests, description="replaying"):
            for url in results:
                results[url].append(ask(url, exchange, wish))
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Replay captured requests and count cache hits."
    )
    parser.add_argument("capture", type=Path)
    parser.add_argument(
        "--base-url", required=True, help="the server, with or without /v1"
    )
    parser.add_argument("--against", help="a second server, asked the same")
    parser.add_argument(
        "--max-tokens", type=int, default=1, help="new tokens per request"
    )
    parser.add_argument("--model", default="", help="instead of the captured name")
    parser.add_argument("--limit", type=int, help="requests to replay, from the first")
    parser.add_argument("--key", default="", help="API key to send")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        exchanges = [
            exchange for exchange in read_capture(args.capture) if exchange.api
        ]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2

    urls = [args.base_url]
    if args.against:
        urls.append(args.against)
    wish = Wish(args.max_tokens, args.model, args.key)
    results = replay(exchanges[: args.limit], urls, wish)
    if args.json:
        print(as_json(results))
    else:
        Console().print(table_of(results))

    failed: list[tuple[str, Result]] = []
    for url, server_results in results.items():
        failed += [(url, result) for result in server_results if result.trouble]
    for url, result in failed[:10]:
        print(f"{url} #{result.seq}: {result.trouble}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
