"""Conversations that go on after a restart, over HTTP: nothing is prefilled twice."""

import errno
import fcntl
import os
import random
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import openai
import pytest
import start_llm
import start_llm as s
from minimum_prefill import common_prefix, fewest, prefilled
from nights import at_night
from program import Agent, Program, ask
from server_fixture import Served, Talk, user, wait_until
from status_client import ask as ask_status
from status_client import explained
from tiny_models import DENSE, HYBRID, SLIDING, TOOLS, WORDS, tiny_model
from tiny_vision import DENSE_VISION, HYBRID_VISION, tiny_vision_model
from vision_fixture import Seeing, picture, picture_message


class Restarting:
    """A server that is stopped and started again on the same folder."""

    def __init__(self, folder, disk, **settings):
        self._folder = folder
        self._settings = {
            "cache_disk": "on",
            "cache_disk_folder": str(disk),
            "default_temperature": 0.0,
            **settings,
        }
        self.served = self.start()

    def start(self):
        return Served(self._folder, **self._settings)

    def restart(self):
        self.served.close()
        self.served = self.start()
        return self.served


@pytest.fixture
def start(tmp_path):
    started = []

    def start(kind, **settings):
        server = Restarting(tiny_model(kind, tmp_path), tmp_path / "disk", **settings)
        started.append(server)
        return server

    yield start
    for server in started:
        server.served.close()


def begin(server, seed):
    """A talk with an agent's instructions: too long to be read again for nothing."""
    talk = Talk(server.served, seed)
    talk.messages[0] = {"role": "system", "content": talk.words(400)}
    return talk


@pytest.mark.parametrize("kind", (at_night(DENSE), HYBRID, at_night(SLIDING)))
def test_restart_between_any_two_requests_costs_no_prefill(kind, start):
    server = start(kind)
    talk = begin(server, 1)
    fed, requests = [], []
    for _ in range(6):
        served = server.restart()
        served.recorder.fed.clear()  # what measures the model
        talk._client = served
        talk.step()
        fed += served.recorder.fed
        requests += [served.request(exchange) for exchange in served.exchanges]

    turns = served.scribe.turns if kind in (HYBRID, SLIDING) else None
    assert prefilled(fed, requests) <= 1.02 * sum(fewest(requests, turns))


@pytest.mark.parametrize("kind", (at_night(DENSE), HYBRID))
def test_dropped_thinking_is_still_there_after_a_restart(kind, start):
    server = start(kind)
    talk = begin(server, 2)
    n_known = 0

    for _ in range(3):
        exchange = talk.step()
        assert exchange.n_cached >= n_known - 1
        n_known = exchange.usage["prompt_tokens"] + exchange.n_generated - 1
        assert "reasoning_content" in exchange.answer
        for message in talk.messages:
            message.pop("reasoning_content", None)
        talk._client = server.restart()


def test_changed_id_in_the_system_prompt_is_no_reason_to_read_it_again(start):
    """The head stays as it was rendered before the restart, and the new id is restated."""
    server = start(DENSE)
    talk = Talk(server.served, 3)
    words = talk.words(400)
    n_known = 0

    for number in range(2):
        head = f'{words}\n\n"message_id": "{number}f00{number}-beef"\n\n{words}'
        talk.messages[0] = {"role": "system", "content": head}
        exchange = talk.step()
        assert exchange.n_cached >= n_known - 1
        n_known = exchange.usage["prompt_tokens"] + exchange.n_generated - 1
        talk._client = server.restart()


def test_another_conversation_on_a_known_prefix_is_warm_the_next_day(start):
    """And an explanation counts what a request would load from the disk."""
    server = start(DENSE)
    talk = begin(server, 4)
    first = talk.step()
    served = server.restart()
    other = Talk(served, 5, [talk.messages[0], user("A new day has begun.")])

    explanation = explained(served, other.messages)
    exchange = other.step()

    prompts = [served.request(one).prompt for one in (first, exchange)]
    assert exchange.n_cached >= common_prefix(*prompts) - 1
    assert explanation["would_reuse"] == exchange.n_cached > 300


def test_forgotten_conversation_is_not_there_after_a_restart(start, tmp_path):
    server = start(DENSE)
    talk = begin(server, 6)
    talk.step()
    s.drop_cache(server.served.state, None)
    files = [
        path for path in tmp_path.glob("disk/*/*") if path.suffix == ".safetensors"
    ]
    assert files == []
    everything = b"".join(path.read_bytes() for path in tmp_path.glob("disk/*/*"))
    assert talk.messages[0]["content"][:40].encode() not in everything

    talk._client = server.restart()
    exchange = talk.step()

    assert exchange.n_cached == 0
    assert server.served.state.stores.ledger.snapshot()["transcripts"] == 1


def count_records(folder):
    """How many records the next start would find."""
    n_records = 0
    for path in folder.glob("*/records"):
        # It may have been begun just now, and have no tables yet.
        connection = closing(sqlite3.connect(path))
        with connection as database, suppress(sqlite3.OperationalError):
            rows = database.execute("SELECT count(*) FROM records").fetchall()
            n_records += rows[0][0]
    return n_records


def delete_cache(server, query=""):
    return ask_status(server.served, "DELETE", "/v1/cache" + query)


def test_forgetting_all_on_a_full_disk_deletes_the_files(start, tmp_path, monkeypatch):
    server = start(DENSE)
    Talk(server.served, 1).step()
    server.served.state.records.flush(10.0)
    assert count_records(tmp_path / "disk")

    with monkeypatch.context() as patch:
        patch.setattr(s.RecordFile, "_save_changes", refuse_changes)
        code, body = delete_cache(server, "?session=a")
        assert code == 500
        assert "disk is full" in body["error"]["message"]
        _, status = ask_status(server.served, "GET", "/v1/status")
        assert "disk is full" in status["disk"]["records_off"]

        code, _ = delete_cache(server)
        assert code == 200
        assert count_records(tmp_path / "disk") == 0


def refuse_changes(records, database):
    raise sqlite3.OperationalError("database or disk is full")


def test_folder_that_cannot_be_used_is_said_and_forgets_nothing(
    start, tmp_path, monkeypatch
):
    """As a read-only one; whoever runs this may be root, who may write anywhere."""
    server = start(DENSE)
    Talk(server.served, 1).step()
    server.served.close()

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(s.os, "utime", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(s.Path, "unlink", refuse)
        patch.setattr(s.shutil, "rmtree", lambda _path, onexc: refuse())
        server.served = server.start()
        Talk(server.served, 1).step()

        _, status = ask_status(server.served, "GET", "/v1/status")
        assert "Read-only" in status["disk"]["off"]
        for query in ("?session=a", ""):
            code, body = delete_cache(server, query)
            assert code == 500
            assert "Read-only" in body["error"]["message"]
    assert count_records(tmp_path / "disk")

    code, _ = delete_cache(server)  # it can be written to by now
    assert code == 200
    assert count_records(tmp_path / "disk") == 0


def test_what_was_said_to_other_models_is_forgotten_too(start, tmp_path):
    root = tmp_path / "disk"
    other, in_use = "a" * 16, "b" * 16 + "-2"
    for name in (other, in_use, "photos"):
        (root / name).mkdir(parents=True)
        (root / name / "lock").touch()
        (root / name / "records").write_bytes(b"what was said")
        (root / name / "x.safetensors").write_bytes(b"what was said")
    server = start(DENSE)

    with (root / in_use / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, body = delete_cache(server)

    assert (code, body["files"]) == (200, 1)
    assert not (root / other).exists()
    assert (root / in_use / "records").exists()
    assert (root / "photos" / "records").exists(), "it is not ours"


@pytest.mark.parametrize("kind", (at_night(DENSE_VISION), HYBRID_VISION))
def test_image_is_not_read_again_after_a_restart(kind, tmp_path):
    """It is named by its bytes and a secret, which survives; its KV is on the disk."""
    folder = tiny_vision_model(kind, tmp_path)
    settings = {
        "cache_disk": "on",
        "cache_disk_folder": str(tmp_path / "disk"),
        "log_root": str(tmp_path / "logs"),
    }
    rng = random.Random(9)
    question = " ".join(rng.choices(WORDS, k=300))
    messages = [picture_message(question, picture(1), "tell me")]
    n_known = 0

    for number in range(2):
        with pytest.MonkeyPatch.context() as patch:
            server = Seeing(folder, patch, **settings)
            exchange = server.ask(messages, stream=False)
            cached = exchange.usage["prompt_tokens_details"]["cached_tokens"]
            tolerance = 1e-4 if kind == HYBRID_VISION else 0.0
            assert server.largest_difference(exchange) <= tolerance
            assert cached >= n_known - 1
            assert server.tower_runs == (number == 0)
            n_known = len(exchange.prompt) + len(exchange.reply) - 1
            server.close()
        reply = {"role": "assistant", "content": None, **exchange.answer}
        messages = [*messages, reply]
        for call in exchange.answer.get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
            messages.append(result)
        messages.append(user("And what else is there?"))


# -- prewarm ---------------------------------------------------------------------------------------


def test_prewarm_reads_the_prompt_and_writes_no_reply(start):
    server = start(DENSE)
    talk = Talk(server.served, 8)

    completion = server.served._create(talk.messages, tools=TOOLS, max_tokens=0)
    exchange = talk.step()

    assert completion.choices[0].message.content in (None, "")
    assert completion.usage.completion_tokens == 0
    assert exchange.n_cached == completion.usage.prompt_tokens - 1
    for place, wish in PREWARM_CANNOT.items():
        with pytest.raises(openai.BadRequestError, match="only read"):
            server.served._create(
                talk.messages, **{"tools": TOOLS, "max_tokens": 0, place: wish}
            )


PREWARM_CANNOT = {
    "stream": True,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
}


# -- kill -9 ---------------------------------------------------------------------------------------

N_KILLS = int(os.environ.get("KILLS", "1"))


def write_impatient_program(folder):
    """A copy of the program that writes what rests at once."""
    source = Path(start_llm.__file__).read_text()
    for name, seconds in (("AFTER", "2.0"), ("BUSY", "10.0")):
        setting = f"SAVE_{name}_SECONDS: Final = {seconds}"
        assert setting in source
        source = source.replace(setting, setting.replace(seconds, "0.05"))
    path = folder / "impatient.py"
    path.write_text(source)
    return path


def test_closed_terminal_loses_nothing(tmp_path):
    model = tiny_model(DENSE, tmp_path)
    disk = tmp_path / "disk"
    settings = {"CACHE_DISK": "on", "CACHE_DISK_FOLDER": str(disk)}
    question = [user(" ".join(random.Random(7).choices(WORDS, k=700)))]
    program = Program(tmp_path / "program", model, **settings)
    program.wait_until_ready()
    ask(program.port, question)

    program.process.send_signal(signal.SIGHUP)  # of the terminal, and of its shell
    assert program.end(signal.SIGHUP) == 0
    assert count_records(disk) > 0
    assert list(disk.rglob("*.safetensors"))


@pytest.mark.parametrize("kind", (at_night(DENSE), HYBRID))
def test_killed_server_starts_and_answers_rightly(kind, tmp_path, monkeypatch):
    """Killed while four agents work and entries are written, as often as KILLS says."""
    impatient = write_impatient_program(tmp_path)
    model = tiny_model(kind, tmp_path)
    rng = random.Random(7)
    question = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=700))}]
    monkeypatch.setattr(start_llm, "__file__", str(impatient))
    disk = tmp_path / "disk"
    settings = {
        "CACHE_DISK": "on",
        "CACHE_DISK_FOLDER": str(disk),
        "PROMPT_CACHE_TTL_SECONDS": "0",
    }
    expected = None
    n_loaded = 0
    for number in range(N_KILLS + 1):
        program = Program(tmp_path / "program", model, **settings)
        program.wait_until_ready()
        answer = ask(program.port, question)["choices"]
        assert answer == (expected := expected or answer), number
        assert "Traceback" not in program.said
        _, status = program.get("/v1/status")
        n_loaded += status["counters"]["disk_hits"]
        if number == N_KILLS:
            break
        wait_until(lambda: list(disk.rglob("*.safetensors")))  # of the question
        for seed in range(4):
            agent = Agent(program.port, number * 4 + seed, max_tokens=12, max_pause=1.0)
            agent.start()
        time.sleep(0.5 + 2 * rng.random())
        program.end(signal.SIGKILL)

    assert n_loaded > 0
    wait_until(lambda: not list(disk.rglob("*.new")))
    assert program.end(signal.SIGTERM) == 0
