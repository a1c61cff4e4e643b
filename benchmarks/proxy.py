"""What LiteLLM adds to the time to the first token, beside a running server that started it.

    .venv/bin/python benchmarks/proxy.py [--direct 8080] [--proxy 4000] [--requests 30]

The same short warm request, streamed, in turns to both ports: medians with their extremes.
"""

import argparse
import statistics
from collections.abc import Sequence

from compared_servers import Server

BODY = {
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Say something short."}],
}


def first_token_ms(port: int) -> float:
    """From connecting to the first words of the reply."""
    return 1000 * Server("", port, model="any").ask(BODY).ttft


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
