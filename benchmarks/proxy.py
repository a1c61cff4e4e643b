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
        for line in (answer := connection.getresponse()):
            if line.startswith(b"data: {") and has_words(json.loads(line[6:])):
                break
        took = time.perf_counter() - began
        answer.read()
    return took * 1000


def has_words(chunk: dict[str, list[dict[str, dict[str, str]]]]) -> bool:
    deltas = [choice["delta"] for choice in chunk["choices"]]
    return any(
        delta.get("content") or delta.get("reasoning_content") for delta in deltas
    )


def row(name: str, times: Sequence[float]) -> str:
    return f"{name:8} {statistics.median(times):6.1f} ms ({min(times):.1f}..{max(times):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--direct", type=int, default=8080, help="port of the server")
    parser.add_argument("--proxy", type=int, default=4000, help="port of LiteLLM")
    parser.add_argument("--requests", type=int, default=30)
    args = parser.parse_args()
    for _ in range(5):
        first_token_ms(args.direct), first_token_ms(args.proxy)
    pairs = [
        (first_token_ms(args.direct), first_token_ms(args.proxy))
        for _ in range(args.requests)
    ]
    print(row("direct", [direct for direct, _ in pairs]))
    print(row("proxy", [proxy for _, proxy in pairs]))
    print(row("added", [proxy - direct for direct, proxy in pairs]))


if __name__ == "__main__":
    main()
