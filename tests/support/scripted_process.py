"""A server with scripted replies in a process of its own, for a test that kills it.

    python scripted_process.py MODEL PORT REPLIES N

REPLIES is JSON: the tokens of each reply. On stdout come the lines `up` and, when the model stands
still in the middle of reply N, for ever, `held`.
"""

import json
import sys
import threading
from pathlib import Path

import conftest
import pytest

conftest.load_start_llm()  # for those that follow

from minimum_prefill import Fed  # noqa: E402
from scripted_replies import Script  # noqa: E402
from server_fixture import Served  # noqa: E402

N_TOKENS = 4  # of the reply in which it stands still


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    model, port, replies, held_reply = sys.argv[1:]
    served = Served(Path(model), mlx_port=int(port), default_temperature=0)
    patch = pytest.MonkeyPatch()
    script = Script(patch, served.scribe, {"": json.loads(replies)})
    stands_still = threading.Event()
    n_tokens = 0

    def hold(rows: list[Fed]) -> None:
        nonlocal n_tokens
        is_reply = len(script.said) > int(held_reply) and len(rows[0].tokens) == 1
        n_tokens += is_reply
        if n_tokens > N_TOKENS:
            say("held")
            stands_still.wait()

    with served.holding(hold):
        say("up")
        stands_still.wait()


if __name__ == "__main__":
    main()
