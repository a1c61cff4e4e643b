"""Several servers behind one LiteLLM (PROXY_REPLICAS), as processes; and a server being drained.

Which server gets a request is tested in tests/unit/test_replica_choice.py; here, at night, are the
real ones.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import start_llm
from http_client import exchange
from nights import at_night
from program import CHAT, Program, copy_helpers
from server_fixture import Served, free_port, wait_until
from status_client import ask, words

LITELLM = Path(sys.executable).with_name("litellm")
KEY = "key-of-all"
OWN_KEY = "key-of-the-third"

# -- draining ----------------------------------------------------------------------------------


@pytest.fixture
def served(folder) -> Iterator[Served]:
    with Served(folder) as served:
        yield served


def chat_of(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]
    return {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}


def test_a_drained_server_goes_on_with_known_sessions_and_takes_no_new_ones(served):
    known = {"x-session-id": "known"}
    assert ask(served, "POST", CHAT, chat_of("a b"), **known)[0] == 200
    assert ask(served, "POST", CHAT, chat_of("no id of a session"))[0] == 200

    status, body = ask(served, "POST", "/v1/drain")
    assert (status, body["status"]) == (200, "draining")
    status, body = ask(served, "GET", "/health")
    assert (status, body["status"]) == (503, "draining")
    assert ask(served, "GET", "/v1/status")[1]["status"] == "draining"

    assert ask(served, "POST", CHAT, chat_of("c d"), **known)[0] == 200
    again = chat_of("no id of a session", "reply", "next")
    assert ask(served, "POST", CHAT, again)[0] == 200
    sub_agent = {"x-session-id": "child", "x-parent-session-id": "known"}
    assert ask(served, "POST", CHAT, chat_of("e"), **sub_agent)[0] == 200
    for path in (CHAT, "/v1/messages"):
        status, body = ask(served, "POST", path, chat_of("new"))
        assert status == 503
        assert "takes no new sessions" in body["error"]["message"]

    assert ask(served, "DELETE", "/v1/drain")[1]["status"] == "ok"
    assert ask(served, "GET", "/health")[0] == 200
    assert ask(served, "POST", CHAT, chat_of("new"))[0] == 200


def test_a_session_whose_first_request_runs_is_known_to_a_drained_server(served):
    first = {"x-session-id": "one"}
    with (
        ThreadPoolExecutor() as pool,
        served.holding(lambda _rows: ask(served, "POST", "/v1/drain")),
    ):
        both = [pool.submit(ask, served, "POST", CHAT, chat_of("a"), **first)]
        wait_until(lambda: ask(served, "GET", "/health")[0] == 503)
        both.append(pool.submit(ask, served, "POST", CHAT, chat_of("b"), **first))
        assert [each.result()[0] for each in both] == [200, 200]


def test_one_key_of_several_cannot_drain_what_others_use(folder):
    keys = {"api_key": "one,two", "cache_isolation": "key"}
    with Served(folder, **keys) as served:
        sent = {"Authorization": "Bearer one"}
        status, body = ask(served, "POST", "/v1/drain", **sent)
        assert status == 403
        assert "SIGUSR1" in body["error"]["message"]
        assert ask(served, "GET", "/health")[0] == 200


# -- the real LiteLLM before three servers -----------------------------------------------------


class Farm:
    """Three servers with a cache on disk; the first one runs LiteLLM."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.ports = [free_port() for _ in range(3)]
        self.proxy_port = free_port()
        copy_helpers(folder / "server0")
        self.servers = [self.start(number) for number in (0, 1, 2)]
        for server in self.servers:
            server.wait_until_ready()
        wait_until(lambda: self.states() == {"up"})

    def start(self, number: int) -> Program:
        others = f"http://127.0.0.1:{self.ports[1]}, "
        others += f"http://{OWN_KEY}@127.0.0.1:{self.ports[2]}"
        settings = {
            "API_KEY": OWN_KEY if number == 2 else KEY,
            "PROMPT_CACHE_TTL_SECONDS": "0",
            "CACHE_DISK": "on",
            "CACHE_DISK_FOLDER": str(self.folder / f"disk{number}"),
            "DEFAULT_TEMPERATURE": "0",
        }
        if number == 0:
            settings["ENABLE_PROXY"] = "true"
            settings["PROXY_PORT"] = str(self.proxy_port)
            settings["PROXY_REPLICAS"] = others
        folder = self.folder / f"server{number}"
        return Program(folder, self.model, port=self.ports[number], **settings)

    def status(self, number: int) -> dict[str, Any]:
        """What a server says of itself."""
        headers = {"Authorization": f"Bearer {OWN_KEY if number == 2 else KEY}"}
        _, _, body = exchange(self.ports[number], "GET", "/v1/status", **headers)
        return json.loads(body)

    def replicas(self) -> list[dict[str, Any]]:
        """As the first server's status shows them."""
        return self.status(0).get("replicas", [])

    def states(self) -> set[str]:
        return {replica["state"] for replica in self.replicas()}

    def wait_for_state(self, number: int, state: str) -> None:
        def is_so() -> bool:
            replicas = self.replicas()
            return bool(replicas) and replicas[number]["state"] == state

        wait_until(is_so)

    def server_of(self, session: str) -> int:
        """Which one has had requests of a session."""
        for number in range(len(self.servers)):
            with contextlib.suppress(OSError):
                rows = self.status(number)["sessions"]
                if any(row["id"] == session for row in rows):
                    return number
        raise AssertionError(f"no server knows {session}")

    def saved_tokens(self, number: int, session: str) -> int:
        """Tokens of a session that a server has in files, as their headers tell."""
        disk = self.folder / f"disk{number}"
        segments = [
            start_llm.read_segment(path)[0] for path in disk.rglob("*.safetensors")
        ]
        return max(
            (segment.end for segment in segments if segment.session == session),
            default=0,
        )

    def close(self) -> None:
        for server in self.servers:
            if server.process.poll() is None:
                server.end(signal.SIGTERM)


@pytest.fixture(scope="module", params=[at_night("three servers")])
def farm(tmp_path_factory, folder) -> Iterator[Farm]:
    if not LITELLM.exists():
        pytest.skip("LiteLLM is not installed")
    with contextlib.closing(Farm(tmp_path_factory.mktemp("farm"), folder)) as farm:
        yield farm


def cached_of(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Talk:
    """A conversation at the port of LiteLLM."""

    def __init__(self, farm: Farm, seed: int, session: str) -> None:
        self.farm = farm
        self.session = session
        self.texts = [words(600, seed)]
        self.n_before = 0  # tokens of the last prompt

    def turn(self) -> int:
        """Ask, and return how many tokens that were sent before were read again."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        headers["x-session-id"] = self.session
        body = chat_of(*self.texts)
        status, _, payload = exchange(
            self.farm.proxy_port, "POST", CHAT, body, **headers
        )
        assert status == 200, payload
        answer = json.loads(payload)
        content = answer["choices"][0]["message"]["content"] or "-"
        # More than MIN_FILE_TOKENS, so it is written whenever a file with the turns
        # before it was.
        self.texts += [content, words(200, len(self.texts))]
        n_again = max(0, self.n_before - cached_of(answer))
        self.n_before = answer["usage"]["prompt_tokens"]
        return n_again

    def is_saved_by(self, number: int) -> bool:
        """Whether a server has in files all that the next request begins with."""
        n_saved = self.farm.saved_tokens(number, self.session)
        return n_saved >= self.n_before - MARGIN


MARGIN = 4  # tokens of a generation prompt, which the next request does not begin with


def test_a_killed_server_costs_its_sessions_one_cold_prefix_and_comes_back_warm(farm):
    talks = [Talk(farm, 300 + seed, f"killed{seed}") for seed in range(6)]
    for _ in range(2):
        for talk in talks:
            assert talk.turn() <= MARGIN
    wait_until(lambda: all(replica["sessions"] > 0 for replica in farm.replicas()))
    places = {talk.session: farm.server_of(talk.session) for talk in talks}
    lost = [talk for talk in talks if places[talk.session] == 1]
    others = [talk for talk in talks if places[talk.session] != 1]
    assert len(lost) >= 2

    # Its lines are on the disk some seconds after its last request.
    for talk in lost:
        wait_until(partial(talk.is_saved_by, 1))
    farm.servers[1].end(signal.SIGKILL)
    idle, *moved = lost

    for talk in moved:
        assert talk.turn() > MARGIN  # the cold prefix
        assert talk.turn() <= MARGIN
    for talk in others:
        assert talk.turn() <= MARGIN
    farm.wait_for_state(1, "down")
    assert f"http://127.0.0.1:{farm.ports[1]} does not answer" in farm.servers[0].said

    farm.servers[1] = farm.start(1)
    farm.servers[1].wait_until_ready()
    farm.wait_for_state(1, "up")
    for talk in (idle, *moved, *others):
        assert talk.turn() <= MARGIN, talk.session
    assert farm.server_of(idle.session) == 1
    said = farm.servers[0].said
    assert OWN_KEY not in said
    assert KEY not in said
