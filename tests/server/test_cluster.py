"""One model over several ranks: two processes on loopback, as start_cluster.py has them."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import start_cluster
import start_llm as s
from cold_reference import Oracle
from engine_fixture import GREEDY, Loaded
from exact_blas import preloading
from forked_process import ForkedProcess, run_program
from mlx_lm import load
from nights import at_night
from program import Agent, Program, ask
from server_fixture import MAX_WAIT_SECONDS, free_port, user, wait_until
from tiny_models import DENSE, HYBRID, WORDS, tiny_model

TESTS = Path(__file__).parents[1]
SCENARIO = TESTS / "support" / "rank_scenario.py"
START = TESTS.parent / "scripts" / "helpers" / "start_cluster.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
ROUNDING = 1e-3  # a sharded model sums its layers in another order
N_KILLS = int(os.environ.get("RANK_KILLS", "1"))
WATCHDOG_SECONDS = 4.0


def rank_environment(folder, n_ranks=2):
    """By rank, what start_cluster.py sets, and where rank 0 listens for the others."""
    hosts = [[f"127.0.0.1:{free_port()}"] for _ in range(n_ranks)]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    shared = {
        "MLX_HOSTFILE": str(hostfile),
        "CLUSTER_PORT": str(free_port()),
        "CLUSTER_WATCHDOG_SECONDS": str(WATCHDOG_SECONDS),
        **ONE_THREAD,
    }
    return [{**shared, "MLX_RANK": str(rank)} for rank in range(n_ranks)]


# -- the engine ------------------------------------------------------------------------------------


def play(folder, model, seed, **settings):
    """Run the scenario; the reports of both ranks."""
    folder.mkdir(exist_ok=True)
    reports = [folder / f"rank{rank}.json" for rank in range(2)]
    processes = []
    for report, variables in zip(reports, rank_environment(folder), strict=True):
        report.unlink(missing_ok=True)
        environment = {**os.environ, **preloading(), **variables, **settings}
        arguments = (str(model), str(seed), str(report))
        console = report.with_suffix(".txt")
        process = ForkedProcess(run_program, SCENARIO, console, environment, *arguments)
        processes.append(process)
    for process, report in zip(processes, reports, strict=True):
        status = process.wait(MAX_WAIT_SECONDS)
        assert status == 0, report.with_suffix(".txt").read_text()
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.parametrize("kind", (at_night(DENSE), HYBRID))
def test_ranks_keep_and_compute_the_same_at_each_step(kind, tmp_path, table):
    """And what comes from the cache is what the sharded model computes without it.

    That is what the whole model computes, but for rounding.
    """
    model = tiny_model(kind, tmp_path)
    first, second = play(
        tmp_path, model, seed=1, PROMPT_CACHE_MAX_ENTRIES_GLOBAL="4", BATCH_MAX_ROWS="3"
    )

    assert first["failure"] is None and second["failure"] is None
    assert first["error"] == ""
    n_steps = min(len(first["steps"]), len(second["steps"]))
    assert n_steps > 50 and n_steps >= len(first["steps"]) - 2  # it ends at once
    assert first["steps"][:n_steps] == second["steps"][:n_steps]
    assert first["ids"] == second["ids"]
    for name, digest in first["logprobs"].items():
        if name.removeprefix("cold ") not in first["constrained"]:  # masked on rank 0
            assert second["logprobs"][name] == digest, name

    assert max(first["worst"].values()) == 0.0
    oracle = Oracle(model, at_once=512)
    for name in first["names"]:
        if name in first["greedy"]:
            tokens = first["prompts"][name] + first["replies"][name][:-1]
            logprobs = oracle.logprobs(tokens, n=1)[0]
            assert logprobs.max() - logprobs[first["replies"][name][-1]] < ROUNDING
    assert sum(first["cached"].values()) > 500
    n_cached = sum(first["cached"].values())
    table(
        f"{kind} on two ranks: {n_steps} steps, {len(first['names'])} replies,"
        f" {n_cached} tokens from the cache, largest difference 0.0"
    )


@pytest.mark.parametrize(
    "fault", (at_night("clock"), at_night("exception"), "eviction")
)
def test_ranks_that_differ_end(fault, tmp_path):
    """A fault that one rank alone has: every request gets an error, and both ranks end."""
    model = tiny_model(DENSE, tmp_path)
    first, second = play(
        tmp_path,
        model,
        seed=3,
        PLANTED_FAULT=fault,
        PROMPT_CACHE_MAX_ENTRIES_GLOBAL="2",
    )
    assert "machines that share the model" in first["error"]
    assert first["failure"] and second["failure"]
    if fault != "exception":
        assert "not in step" in second["failure"]


class CountedRank(s.Lockstep):
    """Counts what rank 0 of several would send, and notes what it would compare."""

    def __init__(self):
        self.n_messages = 0
        self.compared = {}

    def compare(self, name, read):
        self.compared[name] = read()

    def from_rank_0(self, name, read):
        self.n_messages += 1
        return read()


def count_messages(folder, n_requests):
    """Those of a step in which one request runs, and the others wait."""
    lockstep = CountedRank()
    model, _ = load(str(folder))
    scheduler = s.Scheduler(
        Loaded(model, lockstep=lockstep),
        s.Config(batch_max_rows=1),
        metrics=s.CacheMetrics(),
    )
    for number in range(n_requests):
        tokens = np.arange(number, number + 40, dtype=np.int32)
        key = s.TokenKey(b"r", tokens, s.block_hashes(tokens, 16, root=b"r"))
        request = s.EngineRequest(
            key=key, checkpoint_positions=(), max_tokens=50, sampling=GREEDY
        )
        scheduler.waiting.append(s.RequestHandle(request))
    for _ in range(3):  # the first one is started, and read
        scheduler.step()
    assert len(scheduler.running) == 1 and len(scheduler.waiting) == n_requests - 1
    lockstep.n_messages = 0
    scheduler.step()
    return lockstep.n_messages


def test_waiting_requests_cost_other_ranks_no_messages(folder):
    assert count_messages(folder, 100) == count_messages(folder, 1)


def test_ranks_compare_the_tokens_that_end_their_replies(folder):
    """They are in a file that need not be the same where the weights are."""
    lockstep = CountedRank()
    model, _ = load(str(folder))
    loaded = Loaded(model, lockstep=lockstep)
    s.Scheduler(loaded, s.Config(), metrics=s.CacheMetrics())

    assert lockstep.compared["the list of end tokens"] == sorted(loaded.eos_ids)


# -- the program -----------------------------------------------------------------------------------


class TwoRanks:
    """The program as two processes; rank 0 is asked."""

    def __init__(self, folder, model, **settings):
        folder.mkdir(exist_ok=True)
        self.ranks = []
        for rank, variables in enumerate(rank_environment(folder)):
            # By rank, if it is a list of two.
            own = {k: v if isinstance(v, str) else v[rank] for k, v in settings.items()}
            program = Program(folder / f"rank{rank}", model, **{**variables, **own})
            self.ranks.append(program)

    @property
    def port(self):
        return self.ranks[0].port

    def wait_until_ready(self):
        self.ranks[0].wait_until_ready()

    def ask(self, messages, **fields):
        return ask(self.port, messages, **fields)

    def wait_for_end(self, seconds=MAX_WAIT_SECONDS):
        """The exit status of each rank."""
        return [rank.process.wait(timeout=seconds) for rank in self.ranks]

    def close(self):
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()

    @property
    def said(self):
        return "\n".join(rank.said for rank in self.ranks)


@pytest.fixture
def start(tmp_path):
    started = []

    def start(kind=DENSE, **settings):
        model = settings.pop("model", None) or tiny_model(kind, tmp_path)
        started.append(TwoRanks(tmp_path / f"start{len(started)}", model, **settings))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def words(rng, n):
    return " ".join(rng.choices(WORDS, k=n))


def test_a_conversation_is_answered_from_the_cache_as_without_it(start):
    ranks = start(HYBRID)
    ranks.wait_until_ready()
    with urllib.request.urlopen(f"http://127.0.0.1:{ranks.port}/v1/status") as answer:
        report = json.load(answer)["ranks"]
    assert report["hosts"] == ["127.0.0.1", "127.0.0.1"]
    rng = random.Random(1)
    messages = [user(words(rng, 300))]
    turns = []
    for _ in range(3):
        body = ranks.ask(messages, logprobs=True, top_logprobs=5)
        turns.append((list(messages), body["choices"][0]))
        messages += [body["choices"][0]["message"], user(words(rng, 30))]
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * body["usage"]["prompt_tokens"]

    # What rank 0 alone knows of: a grammar, a seed.
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
    schema["additionalProperties"] = False
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = ranks.ask(messages, response_format=strict, max_tokens=40)
    content = answer["choices"][0]["message"]["content"]
    assert re.match(r'\s*\{\s*("a"|\}|$)', content), content
    seeded = [ranks.ask(messages, temperature=0.9, seed=5) for _ in range(2)]
    assert seeded[0]["choices"] == seeded[1]["choices"]

    drop = urllib.request.Request(
        f"http://127.0.0.1:{ranks.port}/v1/cache", method="DELETE"
    )
    urllib.request.urlopen(drop).close()
    for past, choice in turns[:1]:
        again = ranks.ask(past, logprobs=True, top_logprobs=5)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["choices"][0]["logprobs"] == choice["logprobs"]

    ranks.ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks.wait_for_end() == [0, 0], ranks.said
    assert "Traceback" not in ranks.said


def test_a_model_that_ranks_cannot_divide_is_refused():
    facts = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for n_ranks, reason in (
        (3, "3 ranks cannot divide 4 heads"),
        (4, "of this kind cannot be divided"),
    ):
        cluster = SimpleNamespace(n_ranks=n_ranks)
        with pytest.raises(ValueError, match=reason):
            s._divide_model(object(), facts, cluster)


# -- killed and stopped ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", (signal.SIGKILL, at_night(signal.SIGSTOP)))
def test_all_are_answered_when_a_rank_is_gone(number, start, table):
    """At a random moment, as often as RANK_KILLS says; then a start that answers rightly."""
    rng = random.Random(f"{number} {os.environ.get('RANK_SEED', '0')}")
    question = [user(words(rng, 400))]
    expected = {}
    slowest = 0.0
    for round_number in range(N_KILLS):
        is_odd = (round_number + (number == signal.SIGSTOP)) % 2
        kind = HYBRID if is_odd else DENSE
        victim = 1 - round_number // 2 % 2
        ranks = start(kind)
        ranks.wait_until_ready()
        answer = ranks.ask(question)["choices"]
        assert answer == expected.setdefault(kind, answer), round_number

        agents = [Agent(ranks.port, seed, max_tokens=60) for seed in range(3)]
        for agent in agents:
            agent.start()
        time.sleep(0.3 + 2 * rng.random())
        began = time.monotonic()
        ranks.ranks[victim].process.send_signal(number)
        survivor = ranks.ranks[1 - victim]
        assert survivor.process.wait(timeout=MAX_WAIT_SECONDS) == 1, survivor.said
        if (
            victim == 0 and number == signal.SIGSTOP
        ):  # nobody can answer till it goes on
            ranks.ranks[0].process.send_signal(signal.SIGCONT)
            assert ranks.ranks[0].process.wait(timeout=MAX_WAIT_SECONDS) == 1
        for agent in agents:
            agent.join(MAX_WAIT_SECONDS)
            assert not agent.is_alive()
            if isinstance(agent.end, urllib.error.HTTPError):
                assert "machines that share the model" in agent.end.read().decode()
            slowest = max(slowest, agent.answered_at - began)
        assert "Traceback" not in survivor.said
        assert "start-llm: " in survivor.said
        ranks.close()
    table(
        f"{signal.Signals(number).name} of a rank, {N_KILLS} times: all requests ended"
        f" within {slowest:.1f} s"
    )
    assert slowest < WATCHDOG_SECONDS + 10


# -- the command -----------------------------------------------------------------------------------


FAKE_RANK = """
import os, pathlib, signal, sys, time

if sys.argv[1:] == ["--version"]:
    sys.exit(print("start-llm 1.0.0"))
rank = os.environ["MLX_RANK"]

def stop(*_):
    time.sleep(0.3 + 0.3 * int(rank))  # replies end
    print(f"rank {rank} has ended", flush=True)
    os._exit(0)

is_deaf = sys.argv[1] == "deaf" and rank == "1"
signal.signal(signal.SIGTERM, signal.SIG_IGN if is_deaf else stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
hosts = open(os.environ["MLX_HOSTFILE"]).read()
print(f"rank {rank} of {hosts}, process {os.getpid()}", flush=True)
has_begun = pathlib.Path(sys.argv[0]).with_name("rank 0 has begun")
if rank == "0":
    has_begun.touch()
if sys.argv[1].isdecimal() and rank == "1":
    while not has_begun.exists():
        time.sleep(0.01)
    sys.exit(int(sys.argv[1]))
while True:
    time.sleep(60)
"""
# The command with that program as server, and little patience.
COMMAND_OF_FAKES = """
import pathlib, sys
import start_cluster as c

c.SERVER = pathlib.Path(sys.argv.pop(1))
c.END_SECONDS = 2.0
c.RANK_SCRIPT = c.RANK_SCRIPT.replace("sleep 10", "sleep 4")
sys.exit(c.main())
"""
FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift  # the host
exec sh -c "$*"
"""


class FakeRanks:
    """The command with two ranks that are no servers; rank 1 is reached by ssh."""

    def __init__(self, folder, mode):
        server = folder / "fake rank.py"
        server.write_text(FAKE_RANK)
        ssh = folder / "ssh"
        ssh.write_text(FAKE_SSH)
        ssh.chmod(0o755)
        command = [sys.executable, "-c", COMMAND_OF_FAKES, str(server)]
        command += ["--hosts", "127.0.0.1,10.99.99.9", mode]
        paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": START.parent}
        self._console = folder / "console"
        with self._console.open("wb") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **paths}, stdout=file, stderr=file
            )
        hosts = '[["127.0.0.1:32323"], ["10.99.99.9:32324"]]'
        for rank in (0, 1):
            start = f"rank {rank} of {hosts}, process "
            wait_until(lambda start=start: start in self.said)

    @property
    def said(self):
        return self._console.read_text()

    def wait_for_end(self):
        """The exit status; no rank is left then."""
        status = self.process.wait(timeout=MAX_WAIT_SECONDS)
        pids = [int(pid) for pid in re.findall(r"process (\d+)", self.said)]
        assert len(pids) == 2
        assert not any(psutil.pid_exists(pid) for pid in pids)
        return status


@pytest.fixture
def fake_ranks(tmp_path):
    started = []

    def start(mode):
        started.append(FakeRanks(tmp_path, mode))
        return started[-1]

    yield start
    for ranks in started:
        ranks.process.kill()


def test_the_command_waits_until_all_ranks_have_ended(fake_ranks):
    ranks = fake_ranks("well")
    times = psutil.Process(ranks.process.pid).cpu_times()
    time.sleep(1)
    later_times = psutil.Process(ranks.process.pid).cpu_times()
    assert later_times.user - times.user < 0.5  # it waits, and takes no processor

    ranks.process.send_signal(signal.SIGINT)
    assert ranks.wait_for_end() == 0
    for rank in (0, 1):
        assert f"rank {rank} has ended" in ranks.said


def test_ranks_are_stopped_when_the_command_is_killed(fake_ranks):
    ranks = fake_ranks("well")
    ranks.process.kill()
    for rank in (0, 1):
        wait_until(lambda rank=rank: f"rank {rank} has ended" in ranks.said)


def test_a_rank_that_hangs_is_killed(fake_ranks):
    ranks = fake_ranks("deaf")
    ranks.process.send_signal(signal.SIGTERM)
    assert ranks.wait_for_end() == 0
    assert "rank 0 has ended" in ranks.said
    assert "rank 1 has ended" not in ranks.said


@pytest.mark.parametrize(
    ("status", "expected"), (at_night(0, 1), (1, 1), (2, 2), at_night(137, 1))
)
def test_a_rank_that_ends_ends_the_command(status, expected, fake_ranks):
    """A wrong setting is not tried again by a supervisor: status 2."""
    ranks = fake_ranks(str(status))
    assert ranks.wait_for_end() == expected
    assert "rank 0 has ended" in ranks.said


def test_a_machine_with_another_version_is_named(tmp_path, monkeypatch, capsys):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho start-llm 0.9.0\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    argv = ["start_cluster.py", "--hosts", "127.0.0.1, 10.99.99.9"]
    monkeypatch.setattr(sys, "argv", argv)
    assert start_cluster.main() == 2
    assert "10.99.99.9 has start-llm 0.9.0" in capsys.readouterr().err

    ssh.write_text("#!/bin/sh\necho no route >&2; exit 255\n")
    assert start_cluster.main() == 1  # it may start yet
    error = capsys.readouterr().err
    assert error.startswith("start-llm: 10.99.99.9 ") and "no route" in error


# -- what is sent ----------------------------------------------------------------------------------


@pytest.fixture
def connection():
    """Its two ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname())
        sockets = (connected, listener.accept()[0])
    yield sockets
    for end in sockets:
        end.close()


def make_rank(rank, end):
    link = s._Link(end, f"rank {1 - rank}")
    return s.ClusterRank(s.RankPlace(rank, 2, "127.0.0.1"), [link], max_silence=0.3)


@pytest.fixture
def two_ranks(connection):
    """Rank 0 and rank 1 in one process."""
    return [make_rank(rank, end) for rank, end in enumerate(connection)]


def test_what_rank_0_reads_is_what_the_others_get(two_ranks):
    first, second = two_ranks
    values = [17.25, 0, None, "stop", [1, "a"], 1e308, True]
    for value in values:
        assert first.from_rank_0("x", lambda value=value: value) == value
        assert second.from_rank_0("x", lambda: "its own") == value
    first.compare("x", lambda: [1, "a"])
    second.compare("x", lambda: [1, "a"])


def test_ranks_that_read_different_things_end(two_ranks):
    first, second = two_ranks
    first.from_rank_0("now", time.monotonic)
    with pytest.raises(s.RanksEnd, match="rank 0 is at 'now', rank 1 at 'stop'"):
        second.from_rank_0("stop", lambda: None)
    first.compare("the cache", lambda: [1])
    with pytest.raises(s.RanksEnd, match="the cache of rank 1 differs"):
        second.compare("the cache", lambda: [2])


def test_a_rank_that_leaves_says_why(two_ranks):
    first, second = two_ranks
    ends = []
    first.on_end = ends.append
    second.leave("it has no memory")
    wait_until(lambda: ends)
    assert [str(end) for end in ends] == ["rank 1 has ended: it has no memory"]
    for _ in range(2):
        with pytest.raises(s.RanksEnd, match="it has no memory"):
            first.from_rank_0("now", time.monotonic)


def test_rank_0_may_stop_and_no_other(two_ranks):
    ends = {}
    for cluster in two_ranks:
        cluster.on_end = partial(ends.setdefault, cluster.rank)
    for cluster in two_ranks:
        cluster.leave(None)
    wait_until(lambda: len(ends) == 2)
    assert ends[0].is_failure and str(ends[0]) == "rank 1 was stopped"
    assert not ends[1].is_failure


def test_ranks_with_other_weights_load_no_model(two_ranks, tmp_path, monkeypatch):
    models = [
        tiny_model(DENSE, tmp_path / "a"),
        tiny_model(DENSE, tmp_path / "b", seed=9),
    ]
    monkeypatch.setattr(s, "_load_kind", lambda *_: "loaded")
    assert s.load_model(models[0], s.Config(), two_ranks[0]) == "loaded"
    with pytest.raises(s.RanksEnd, match="the model of rank 1 differs"):
        s.load_model(models[1], s.Config(), two_ranks[1])


def test_messages_of_two_threads_do_not_mingle(connection):
    """One of them longer than what the socket takes at once."""
    connection[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sending, reading = (s._Link(end, "a rank") for end in connection)
    long_message = ["x", "y" * 3_000_000]
    for message in (long_message, s._ALIVE):
        threading.Thread(target=sending.send, args=(message,)).start()
        connection[1].recv(1, socket.MSG_PEEK)  # the long one is being sent
    messages = [reading.read(MAX_WAIT_SECONDS) for _ in range(2)]
    assert messages == [long_message, s._ALIVE]


def test_a_rank_that_steps_no_more_is_noticed(two_ranks):
    ends = {}
    for cluster in two_ranks:
        cluster.on_end = partial(ends.setdefault, cluster.rank)
    began = time.monotonic()
    for cluster in two_ranks:  # while it loads, it lets the other know
        wait_until(lambda link=cluster._links[0]: link.received_at > began)
    assert not ends

    for cluster in two_ranks:
        cluster.begin_steps()
    wait_until(lambda: len(ends) == 2)
    for rank in (0, 1):
        expected = f"rank {1 - rank} has sent nothing for longer than CLUSTER_WATCHDOG"
        assert expected in str(ends[rank])
    with pytest.raises(s.RanksEnd):
        two_ranks[1].from_rank_0("now", time.monotonic)


@pytest.mark.parametrize(
    ("message", "expected"),
    (
        (None, "rank 1 has sent nothing for longer than 0.3 s"),
        (b"", "rank 1 has ended, or its connection is lost"),
        (b"[1, 2, 3]\n", "rank 1 sends no message of ours"),
        (b'"ack"\n', "rank 1 sends no message of ours"),
        (b"\xff\n", "rank 1 sends no message of ours"),
        (b"[" * 100_000 + b"\n", "rank 1 sends no message of ours"),
    ),
)
def test_a_rank_that_hangs_or_ends_while_it_loads_is_noticed(
    message, expected, connection, monkeypatch
):
    monkeypatch.setattr(s, "_LOADING_SILENCE", 0.3)
    first = make_rank(0, connection[0])
    ends = []
    first.on_end = ends.append
    if message:
        connection[1].sendall(message)
    elif message == b"":
        connection[1].shutdown(socket.SHUT_RDWR)
    wait_until(lambda: ends)
    assert [str(end) for end in ends] == [expected]


def test_a_request_reaches_other_ranks_whole():
    tokens = np.array([5, 2**31 - 1, 7] * 20, np.int32)
    key = s.TokenKey(b"\x00r", tokens, s.block_hashes(tokens, 16, root=b"\x00r"))
    request = s.EngineRequest(
        key=key,
        checkpoint_positions=(3, 9),
        checkpoint_ids=frozenset((4, 8)),
        max_tokens=5,
        sampling=s.SamplingParams(temperature=0.5),
        owner=s.RequestOwner("tenant", "session"),
        request_id="id",
    )
    handle = s.RequestHandle(request)
    record = json.loads(json.dumps(s._write_request(handle)))
    other = s._read_request(record, block_size=16)

    assert other.submitted_at == handle.submitted_at
    assert other.request.key.salt == key.salt
    assert other.request.key.block_hashes == key.block_hashes
    assert (other.request.key.tokens == tokens).all()
    for name in ("checkpoint_positions", "checkpoint_ids", "max_tokens", "owner"):
        assert getattr(other.request, name) == getattr(request, name)
    other.put(3)
    assert other.next_event(0) is None  # nobody reads its events


def test_secrets_and_a_machines_own_settings_are_not_sent():
    config = s.Config(
        api_key="K-E-Y", hf_token="K-E-Y", cluster_secret="K-E-Y", model_path="/here"
    )
    shared = s._shared_settings(config)
    assert "K-E-Y" not in json.dumps(shared)
    assert "model_path" not in shared and "memory_limit_bytes" not in shared
    assert shared["max_kv_size"] == config.max_kv_size


@pytest.mark.parametrize(
    ("hosts", "is_made"),
    ((["127.0.0.1"] * 3, True), (["127.0.0.1", "10.99.99.9"], False)),
)
def test_ranks_on_one_machine_get_a_secret_that_is_new_each_time(
    hosts, is_made, monkeypatch
):
    environments = []
    monkeypatch.setenv("CLUSTER_SECRET", "own")
    monkeypatch.setattr(
        start_cluster.psutil,
        "Popen",
        lambda command, **options: environments.append((options["env"], command)),
    )
    for _ in range(2):
        start_cluster.start_ranks(hosts, starting_port=1, rest=[])
    secrets = [env["CLUSTER_SECRET"] for env, _ in environments]
    starts = [set(secrets[: len(hosts)]), set(secrets[len(hosts) :])]
    if is_made:
        assert [len(start) for start in starts] == [1, 1]
        assert starts[0] != starts[1]
        assert all(len(secret) == 32 for secret in secrets)
        for _, command in environments:  # others can read it
            assert not any(secret in str(command) for secret in secrets)
    else:
        assert starts == [{"own"}, {"own"}]


@pytest.mark.parametrize(
    ("variables", "hosts", "place"),
    (
        ({}, [["127.0.0.1:1"], ["127.0.0.1:2"]], None),
        (
            {"MLX_RANK": "1"},
            [["10.0.0.5:1", "10.0.0.6:2"], ["10.0.0.7:1"]],
            (1, 2, "10.0.0.5"),
        ),
        ({"MLX_RANK": "0"}, [["127.0.0.1:1"]], None),
        ({"MLX_RANK": "0"}, "", None),
        ({"MLX_RANK": "2"}, [["a:1"], ["b:2"]], "there are 2 ranks"),
        ({"MLX_RANK": "x"}, [["a:1"], ["b:2"]], "cannot be read"),
        ({"MLX_RANK": "0"}, [[], []], "cannot be read"),
    ),
)
def test_a_process_knows_its_rank(variables, hosts, place, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(json.dumps(hosts) if hosts else "")
    environ = {"MLX_HOSTFILE": str(hostfile), **variables}
    if not isinstance(place, str):
        assert s.find_rank(environ) == place
        return
    with pytest.raises(s.ConfigError, match=place):
        s.find_rank(environ)


_joining = []


class Joining(threading.Thread):
    """A rank that joins."""

    def __init__(self, port, rank, secret="x", memory_bytes=100, n_ranks=2):
        super().__init__(daemon=True)
        self._config = s.Config(cluster_port=port, cluster_secret=secret)
        self._place = s.RankPlace(rank, n_ranks, "127.0.0.1")
        self._memory_bytes = memory_bytes
        self.stop = threading.Event()
        self.config = None
        self.cluster = None
        self.error = ""
        _joining.append(self)
        self.start()

    def run(self):
        try:
            self.config, self.cluster = s.join_ranks(
                self._config,
                self._place,
                memory_bytes=self._memory_bytes,
                stop=self.stop,
            )
        except (s.ConfigError, s.RanksEnd) as error:
            self.error = str(error)

    def wait(self):
        self.join(MAX_WAIT_SECONDS)
        assert not self.is_alive()
        return self


def test_who_is_no_rank_does_not_stop_the_others(port_of_rank_0):
    """Somebody else connects to CLUSTER_PORT, sends nothing or nonsense, and goes."""
    first = Joining(port_of_rank_0, 0)
    hello = b'{"rank": %s, "nonce": "a", "proof": "%s", "facts": {"memory_bytes": 1}}\n'
    for nonsense in (
        *(b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[" * 70_000),
        *(b"[" * 60_000 + b"\n", hello % (b"Infinity", b"")),
        *(hello % (b"1", "é".encode()), hello % (b"1", rb"\ud800")),
    ):
        wait_until(partial(_can_connect, port_of_rank_0, nonsense))
    stranger = Joining(port_of_rank_0, 1, secret="y").wait()
    assert "CLUSTER_SECRET is another one on rank 0" in stranger.error

    second = Joining(port_of_rank_0, 1, memory_bytes=99).wait()
    assert first.wait().config.memory_limit_bytes == 99
    assert second.config.memory_limit_bytes == 99
    assert second.config.speculation == "off"


@pytest.mark.parametrize("n_silent", (2, 5))
def test_silent_connections_keep_no_rank_waiting(n_silent, port_of_rank_0, monkeypatch):
    """They are neither waited for nor, where they are too many, kept."""
    monkeypatch.setattr(s, "_HELLO_SECONDS", MAX_WAIT_SECONDS)
    monkeypatch.setattr(s, "_JOIN_SECONDS", MAX_WAIT_SECONDS - 5)
    monkeypatch.setattr(s, "_MAX_GREETED", 3)
    first = Joining(port_of_rank_0, 0)
    wait_until(partial(_can_connect, port_of_rank_0, b""))
    address = ("127.0.0.1", port_of_rank_0)
    with ExitStack() as silent:
        for _ in range(n_silent):
            connection = socket.create_connection(address)
            silent.enter_context(connection).settimeout(MAX_WAIT_SECONDS)
        second = Joining(port_of_rank_0, 1).wait()
        assert (first.wait().error, second.error) == ("", "")
        while connection.recv(1000):  # it is let go
            pass


@pytest.mark.parametrize("fact", ("VERSION", "LIBRARY"))
def test_ranks_of_different_versions_do_not_start(fact, port_of_rank_0, monkeypatch):
    first = Joining(port_of_rank_0, 0)
    wait_until(partial(_can_connect, port_of_rank_0, b""))
    if fact == "VERSION":
        monkeypatch.setattr(s, "VERSION", "0.9.0")
    else:
        monkeypatch.setattr(s, "version_of_package", lambda name: "0.1")
    second = Joining(port_of_rank_0, 1)
    expected = {"VERSION": "start-llm is 1.0.0 on rank 0, and 0.9.0 on rank 1"}
    for rank in (first, second):
        assert expected.get(fact, "0.1 on rank 1") in rank.wait().error


def test_a_rank_whose_others_do_not_come_can_be_stopped(port_of_rank_0):
    for number in (0, 1):
        rank = Joining(port_of_rank_0, number)
        rank.stop.set()
        assert "the start was stopped" in rank.wait().error


def test_a_rank_whose_others_do_not_come_names_them(port_of_rank_0, monkeypatch):
    monkeypatch.setattr(s, "_JOIN_SECONDS", 0.7)
    address = f"127.0.0.1:{port_of_rank_0} (CLUSTER_PORT)"
    rank = Joining(port_of_rank_0, 1).wait()
    assert rank.error == f"rank 0 did not answer at {address} within 0.7 s"
    rank = Joining(port_of_rank_0, 0).wait()
    assert rank.error == "rank 1 did not come within 0.7 s"


@pytest.fixture
def port_of_rank_0():
    yield free_port()
    while _joining:
        rank = _joining.pop()
        rank.stop.set()
        if rank.wait().cluster is not None:
            rank.cluster.leave(None)


def _can_connect(port, data):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(data)
    except OSError:
        return False
    return True


def test_ranks_on_a_network_need_a_secret():
    place = s.RankPlace(0, 2, "10.0.0.5")
    with pytest.raises(s.ConfigError, match="CLUSTER_SECRET must be set"):
        s.join_ranks(s.Config(), place, memory_bytes=1, stop=threading.Event())
