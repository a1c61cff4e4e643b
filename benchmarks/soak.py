"""A day of agents in minutes: nothing may grow, hang or count an error.

    python benchmarks/soak.py --minutes 15 [--model FOLDER] [--agents 6]

Agents start conversations, go on with them, branch, edit, send again, leave in the middle and fall
idle; every limit of time is divided by 96, so that 15 minutes are 24 hours of TTLs. Every
30 seconds what the process holds is noted. The first quarter is warming up.

EXIT STATUS  0 memory flat, correctness counters 0, no thread, file or request left; 1 otherwise
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HOME = Path(__file__).resolve().parents[1]
DAY_IN = 96  # times as fast
GROWTH = 1.05  # of memory at rest, from after the warm-up to the end
CORRECTNESS = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")
WORDS = (HOME / "README.md").read_text().split()


class Server:
    """start-llm.py in a process of its own."""

    def __init__(self, model: str, port: int, folder: Path) -> None:
        self.port = port
        settings = {
            "MODEL_PATH": model,
            "MLX_PORT": str(port),
            "ENABLE_PROXY": "false",
            "LOG_ROOT": str(folder / "logs"),
            "LOG_LEVEL": "WARNING",
            "PROMPT_CACHE_TTL_SECONDS": str(1800 / DAY_IN),
            "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS": str(1800 / DAY_IN),
            "LEDGER_TTL_SECONDS": str(86_400 / DAY_IN / 24),
            "IDLE_CONNECTION_SECONDS": "5",
        }
        command = [sys.executable, str(HOME / "start-llm.py")]
        self.said = folder / "stderr.txt"
        with self.said.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, env={**os.environ, **settings}, stderr=stderr
            )
        self.seen = psutil.Process(self.process.pid)

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            body: dict[str, Any] = json.loads(connection.getresponse().read())
            return body
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        while True:
            try:
                if self.get("/health")["status"] == "ok":
                    return
            except OSError:
                time.sleep(0.2)

    def sample(self) -> dict[str, float]:
        body = self.get("/v1/status")
        return {
            "rss": self.seen.memory_info().rss,
            "threads": self.seen.num_threads(),
            "files": self.seen.num_fds(),
            "lines": body["engine"]["lines"],
            "requests": len(body["requests"]),
        }


class Agent:
    """One that works in conversations, badly behaved now and then."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._random = port, random.Random(seed)
        self._talks: list[list[dict[str, Any]]] = []
        self.n_done = self.n_left = 0
        self.errors: list[str] = []

    def words(self, most: int) -> str:
        return " ".join(self._random.choices(WORDS, k=self._random.randint(3, most)))

    def step(self) -> None:
        chance = self._random.random()
        if not self._talks or chance < 0.12:
            system = {
                "role": "system",
                "content": f"You are agent {self._random.randrange(5)}.",
            }
            self._talks.append([system, {"role": "user", "content": self.words(400)}])
            del self._talks[:-6]
        talk = self._random.choice(self._talks)
        if chance > 0.92 and len(talk) > 4:  # a branch or an edit
            talk = [
                dict(message)
                for message in talk[: self._random.randrange(2, len(talk))]
            ]
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

    def work(self, until: float) -> None:
        while time.monotonic() < until:
            self.step()
            time.sleep(self._random.choice((0, 0, 0.2, 3)))


def at_rest(server: Server) -> dict[str, float]:
    """Once nothing runs and every TTL has passed."""
    time.sleep(2 * 1800 / DAY_IN)
    return server.sample()


def run(server: Server, minutes: float, n_agents: int) -> list[str]:
    """The day. What was wrong with it."""
    server.wait_until_ready()
    wrong: list[str] = []
    rests, agents = [], [Agent(server.port, seed) for seed in range(n_agents)]
    for part in range(4):  # each with its night
        ends = time.monotonic() + 60 * minutes / 4 - 2 * 1800 / DAY_IN
        threads = [
            threading.Thread(target=agent.work, args=(ends,)) for agent in agents
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            print(part, server.sample(), flush=True)
            time.sleep(min(30, max(1, ends - time.monotonic())))
        rests.append(at_rest(server))
        print(part, "at rest", rests[-1], flush=True)
    first, last = rests[0], rests[-1]
    done, left = sum(a.n_done for a in agents), sum(a.n_left for a in agents)
    rss = [round(rest["rss"] / 1e6, 1) for rest in rests]
    print(f"{done} replies, {left} clients that left, memory at rest {rss} MB")
    if (
        last["rss"] > first["rss"] * GROWTH
        or statistics.mean(rss[2:]) > rss[0] * GROWTH
    ):
        wrong.append(f"memory grew: {rss} MB")
    grown = [name for name in ("threads", "files") if last[name] > first[name] + 1]
    wrong += [f"{name} grew from {first[name]} to {last[name]}" for name in grown]
    if last["lines"] or last["requests"]:
        wrong.append(f"left at rest: {last}")
    counters = server.get("/v1/status")["counters"]
    wrong += [f"{name} is {counters[name]}" for name in CORRECTNESS if counters[name]]
    wrong += [error for agent in agents for error in agent.errors]
    print("counters", counters)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="A day of agents in minutes.")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=8099)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(args.model, args.port, Path(folder))
        try:
            wrong = run(server, args.minutes, args.agents)
        finally:
            server.process.terminate()
            status = server.process.wait(30)
        said = server.said.read_text()
    wrong += [f"exit status {status}"] * (status != 0)
    wrong += [
        line for line in said.splitlines() if "Traceback" in line or " ERROR " in line
    ]
    print("\n".join(wrong) or "nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
