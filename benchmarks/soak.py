"""A day of agents in minutes: nothing may grow, hang or count an error.

    python benchmarks/soak.py --minutes 15 [--model FOLDER] [--agents 6] [--set KV_BITS=8 ...]

Agents start conversations, go on with them, branch, edit, send again, leave in the middle and fall
idle; every limit of time is divided by 96, so that 15 minutes are 24 hours of TTLs. Every
30 seconds what the process holds is noted. The first quarter is warming up.

EXIT STATUS  0 memory flat, correctness counters 0, no thread, file or request left; 1 otherwise
"""

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from compare import with_openblas
from compared_servers import Server, our_server

HOME = Path(__file__).resolve().parents[1]
DAY_IN = 96  # times as fast
GROWTH = 1.05  # of memory at rest, from after the warm-up to the end
# Not hybrid_trim_miss: agents edit old messages, where a hybrid model has no checkpoint.
CORRECTNESS = ("vlm_retreat", "exact_key_rejected_by_model_lcp")
WORDS = (HOME / "README.md").read_text().split()


SETTINGS = {
    "log_level": "WARNING",
    "prompt_cache_ttl_seconds": 1800 / DAY_IN,
    "prompt_cache_session_max_idle_seconds": 1800 / DAY_IN,
    "ledger_ttl_seconds": 86_400 / DAY_IN / 24,
    "idle_connection_seconds": 5,
}


def status_of(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.port}/v1/status", timeout=30
    ) as answer:
        body: dict[str, Any] = json.load(answer)
        return body


def sample(server: Server) -> dict[str, float]:
    """What the process holds."""
    body = status_of(server)
    process = psutil.Process(server.pid)
    return {
        "rss": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "lines": body["engine"]["lines"],
        "requests": len(body["requests"]),
    }


class Agent:
    """One that works in conversations, badly behaved now and then."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self._talks: list[list[dict[str, Any]]] = []
        self.n_done = self.n_left = 0
        self.errors: list[str] = []

    def words(self, max_words: int) -> str:
        return " ".join(
            self._random.choices(WORDS, k=self._random.randint(3, max_words))
        )

    def step(self) -> None:
        chance = self._random.random()
        if not self._talks or chance < 0.12:
            number = self._random.randrange(5)
            system = {"role": "system", "content": f"You are agent {number}."}
            self._talks.append([system, {"role": "user", "content": self.words(400)}])
            del self._talks[:-6]

        talk = self._random.choice(self._talks)
        if chance > 0.92 and len(talk) > 4:  # a branch or an edit
            n_messages = self._random.randrange(2, len(talk))
            talk = [dict(message) for message in talk[:n_messages]]
            talk.append({"role": "user", "content": self.words(60)})
            self._talks.append(talk)

        self._ask(talk, leave=0.80 < chance < 0.92)
        if len(talk) > 30:
            self._talks.remove(talk)

    def _ask(self, talk: list[dict[str, Any]], *, leave: bool) -> None:
        body = {"model": "any", "messages": talk, "max_tokens": 40, "stream": leave}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            response = connection.getresponse()
            if leave:
                response.read(self._random.randrange(1, 2000))
                self.n_left += 1
                return
            answer = json.loads(response.read())
            if response.status != 200:
                self.errors.append(str(answer)[:300])
                return
            message = answer["choices"][0]["message"]
            talk += [message, {"role": "user", "content": self.words(60)}]
            self.n_done += 1
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.errors.append(repr(error))
        finally:
            connection.close()

    def work(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.step()
            time.sleep(self._random.choice((0, 0, 0.2, 3)))


def at_rest(server: Server) -> dict[str, float]:
    """Once nothing runs and every TTL has passed."""
    time.sleep(2 * 1800 / DAY_IN)
    return sample(server)


def run(server: Server, minutes: float, n_agents: int) -> list[str]:
    """The day. Returns what was wrong with it."""
    agents = [Agent(server.port, seed) for seed in range(n_agents)]
    rests = []
    for part in range(4):  # each with its night
        deadline = time.monotonic() + 60 * minutes / 4 - 2 * 1800 / DAY_IN
        have_agents_work(server, agents, deadline, part)
        rests.append(at_rest(server))
        print(part, "at rest", rests[-1], flush=True)

    faults = find_growth(rests, agents)
    counters = status_of(server)["counters"]
    faults += [f"{name} is {counters[name]}" for name in CORRECTNESS if counters[name]]
    faults += [error for agent in agents for error in agent.errors]
    print("counters", counters)
    return faults


def have_agents_work(
    server: Server, agents: list[Agent], deadline: float, part: int
) -> None:
    """Until the deadline, each in a thread; prints samples meanwhile."""
    threads = [
        threading.Thread(target=agent.work, args=(deadline,)) for agent in agents
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        print(part, sample(server), flush=True)
        time.sleep(min(30, max(1, deadline - time.monotonic())))


def find_growth(rests: list[dict[str, float]], agents: list[Agent]) -> list[str]:
    """What grew from the first night to the last, or is left in it."""
    first = rests[0]
    last = rests[-1]
    n_done = sum(agent.n_done for agent in agents)
    n_left = sum(agent.n_left for agent in agents)
    rss = [round(rest["rss"] / 1e6, 1) for rest in rests]
    print(f"{n_done} replies, {n_left} clients that left, memory at rest {rss} MB")

    faults = []
    is_last_larger = last["rss"] > first["rss"] * GROWTH
    is_mean_larger = statistics.mean(rss[2:]) > rss[0] * GROWTH
    if is_last_larger or is_mean_larger:
        faults.append(f"memory grew: {rss} MB")
    grown = [name for name in ("threads", "files") if last[name] > first[name] + 1]
    faults += [f"{name} grew from {first[name]} to {last[name]}" for name in grown]
    if last["lines"] or last["requests"]:
        faults.append(f"left at rest: {last}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="A day of agents in minutes.")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings"
    )
    args = parser.parse_args()
    with_openblas()
    changes = {
        name.lower(): value for name, value in (p.split("=", 1) for p in args.set)
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with our_server(Path(args.model), scratch, **SETTINGS | changes) as server:
            faults = run(server, args.minutes, args.agents)
        log_text = (scratch / f"{server.name}-{server.port}.log").read_text()
    for line in log_text.splitlines():
        if "Traceback" in line or " ERROR " in line:
            faults.append(line)
    print("\n".join(faults) or "nothing wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
