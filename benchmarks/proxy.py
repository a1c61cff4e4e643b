"""What LiteLLM adds to the time to the first token, beside a running server that started it.

    .venv/bin/python benchmarks/proxy.py [--direct 8080] [--proxy 4000] [--requests 30]

The same short warm request, streamed, in turns to both ports: medians with their extremes.
"""

import argparse
import http.client
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import closing

BODY = {
    "model": "any",
    "stream": True,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Say something short."}],
}


def first_token_ms(port: int) -> float:
    """From connecting to the first words of the reply."""
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(BODY), headers)
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: {") and has_words(json.loads(line[6:])):
                break
        seconds = time.perf_counter() - began
        response.read()
    return seconds * 1000


def has_words(chunk: dict[str, list[dict[str, dict[str, str]]]]) -> bool:
    deltas = [choice["delta"] for choice in chunk["choices"]]
    return any(
        delta.get("content") or delta.get("reasoning_content") for delta in deltas
    )


def row(name: str, times: Sequence[float]) -> str:
    median = statistics.median(times)
    return f"{name:8} {median:6.1f} ms ({min(times):.1f}..{max(times):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--direct", type=int, default=8080, help="port of the server")
    parser.add_argument("--proxy", type=int, default=4000, help="port of LiteLLM")
    parser.add_argument("--requests", type=int, default=30)
    args = parser.parse_args()

    for _ in range(5):  # to warm up
        first_token_ms(args.direct)
        first_token_ms(args.proxy)

    direct_times = []
    proxy_times = []
    for _ in range(args.requests):
        direct_times.append(first_token_ms(args.direct))
        proxy_times.append(first_token_ms(args.proxy))
    added_times = [
        proxy - direct for direct, proxy in zip(direct_times, proxy_times, strict=True)
    ]
    print(row("direct", direct_times))
    print(row("proxy", proxy_times))
    print(row("added", added_times))


if __name__ == "__main__":
    main()
