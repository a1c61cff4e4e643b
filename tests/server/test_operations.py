"""The whole server in trouble: floods, deaf clients, a dying model, orders to stop, two users."""

import http.client
import json
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import product

import pytest
import start_llm as s
from http_client import exchange
from nights import at_night
from program import Program
from server_fixture import (
    MAX_WAIT_SECONDS,
    SYSTEM,
    Scribe,
    Served,
    free_port,
    user,
    wait_until,
)
from status_client import status, words
from tiny_models import TOOLS

CHAT = {"model": "any", "temperature": 0, "tools": TOOLS}


def chat(text="Hello.", **fields):
    return {**CHAT, "messages": [SYSTEM, user(text)], **fields}


def plain(text="Hello.", **fields):
    """A body that each of the three APIs understands."""
    return {
        "model": "any",
        "prompt": text,
        "messages": [user(text)],
        "max_tokens": 30,
        **fields,
    }


# -- floods, deaf clients --------------------------------------------------------------------------


def test_a_flood_is_refused_before_the_headers_in_the_clients_own_shape(folder):
    with Served(folder, max_queued_requests=2, batch_max_rows=1) as served:
        port = served.state.config.mlx_port
        may_go_on = threading.Event()
        with (
            served.holding(lambda fed: may_go_on.wait(MAX_WAIT_SECONDS)),
            ThreadPoolExecutor(16) as pool,
        ):
            bodies = [plain(words(40, n), stream=True) for n in range(12)]
            paths = ["/v1/chat/completions", "/v1/messages"] * 6
            posts = [
                pool.submit(exchange, port, "POST", path, body)
                for path, body in zip(paths, bodies, strict=True)
            ]
            wait_until(lambda: sum(posted.done() for posted in posts) >= 3)
            may_go_on.set()
            answers = [posted.result() for posted in posts]
        codes = [code for code, _, _ in answers]
        assert set(codes) == {200, 503} and codes.count(503) >= 3
        for path, (code, headers, body) in zip(paths, answers, strict=True):
            if code == 503:
                assert int(headers["Retry-After"]) > 0
                kind = json.loads(body)["error"]["type"]
                assert (kind == "overloaded_error") == (path == "/v1/messages")
        assert served.ask([SYSTEM, user("Hello.")]).finish_reason


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere fewer may wait")
def test_500_clients_in_one_moment_all_wait_to_be_accepted():
    address = ("127.0.0.1", free_port())
    with ExitStack() as opened:
        # Nobody accepts: what connects does so to the backlog.
        slots = threading.BoundedSemaphore(1)
        server = s.LLMServer(address, None, slots=slots)
        opened.callback(server.server_close)
        clients = [opened.enter_context(socket.socket()) for _ in range(500)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(address)

        for client in clients:
            assert client.getpeername() == address  # raises if it is not connected


@pytest.mark.parametrize("stream", [True, at_night(False)])
def test_who_does_not_read_holds_nobody_up(folder, monkeypatch, stream):
    accept = s.LLMServer.get_request

    def accepted(server):  # the system buffers megabytes, which take long to fill
        connection, address = accept(server)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        return connection, address

    monkeypatch.setattr(s.LLMServer, "get_request", accepted)
    with Served(folder, idle_connection_seconds=2) as served, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf.connect(("127.0.0.1", served.state.config.mlx_port))
        stop_never = {"logit_bias": {str(served.scribe.end): -100}}
        body = json.dumps(
            chat(stream=stream, max_tokens=100_000, **stop_never)
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        deaf.sendall(head.encode() + body)
        wait_until(lambda: status(served)["engine"]["decoding"] == 1)
        assert served.ask([SYSTEM, user(words(50))], max_tokens=40).n_generated
        if not stream:  # there is nothing to read yet: it may go on until it leaves
            deaf.close()
        wait_until(lambda: status(served)["engine"]["decoding"] == 0)
        wait_until(lambda: not status(served)["requests"])


@contextmanager
def requesting(served, body):
    """A client that has sent a request, and leaves at the end."""
    address = ("127.0.0.1", served.state.config.mlx_port)
    with closing(http.client.HTTPConnection(*address)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        yield


@pytest.mark.covering(1)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_who_leaves_frees_its_place_within_a_slice(folder, phase, stream):
    with Served(folder, batch_max_rows=1 if phase == "queued" else 8) as served:
        end = {"logit_bias": {str(served.scribe.end): -100}}

        def phases():
            return [request["phase"] for request in status(served)["requests"]]

        call_seconds = 0.2 if phase == "prefill" else 0.01
        with (
            served.holding(lambda fed: time.sleep(call_seconds)),
            ExitStack() as clients,
        ):
            if phase == "queued":
                busy = chat("Go on.", max_tokens=5000, **end)
                clients.enter_context(requesting(served, busy))
                wait_until(lambda: phases() == ["decode"])
            n_words = 8000 if phase == "prefill" else 50
            body = chat(words(n_words), stream=stream, max_tokens=5000, **end)
            with requesting(served, body):
                wait_until(lambda: phase in phases())
            left = time.monotonic()
            expected_phases = ["decode"] if phase == "queued" else []
            wait_until(lambda: phases() == expected_phases)
            assert time.monotonic() - left < 15  # all its tokens take 50 s


# -- faults ----------------------------------------------------------------------------------------


def test_what_went_wrong_inside_is_for_the_log_and_not_for_clients(folder, caplog):
    def fail(_fed):
        raise RuntimeError("[metal::malloc] /Users/me/secret.py line 7")

    with Served(folder) as served:
        port = served.state.config.mlx_port
        paths = ("/v1/chat/completions", "/v1/messages", "/v1/completions")
        for path, stream in product(paths, (False, True)):
            with served.holding(fail):
                code, _, answer = exchange(port, "POST", path, plain(stream=stream))
            assert code in ((200,) if stream else (500, 503))
            assert b"error" in answer
            secrets = (b"metal", b"malloc", b"secret", b"Traceback", b"/Users")
            assert not any(secret in answer for secret in secrets)
        assert served.ask([SYSTEM, user("Hello.")]).finish_reason

    assert "/Users/me/secret.py" in caplog.text


class ServingThread(threading.Thread):
    """The part of the program from the loading of the model to the exit status."""

    def __init__(self, folder, **settings):
        super().__init__()
        self.port = free_port()
        self.stop = threading.Event()
        self.statuses = []
        fields = {"mlx_port": self.port, "enable_proxy": False, **settings}
        config = s.Config(model_path=str(folder), **fields)
        self._state = s.build_state(config)
        self._servers = s._listen(config, self._state)
        self.engine = self._state.engine

    def run(self):
        self.statuses.append(s._serve(self._state, self._servers, stop=self.stop))

    def join(self):
        super().join(MAX_WAIT_SECONDS)


@contextmanager
def in_thread(folder, **settings):
    """A server whose model is loaded, and which has been told to stop in the end."""
    thread = ServingThread(folder, **settings)
    thread.start()
    try:
        wait_until(lambda: thread.engine.state == "ready")
        yield thread
    finally:
        thread.stop.set()
        thread.join()


@pytest.mark.parametrize("exits", [True, False])
def test_a_dead_model_is_said_at_once_and_ends_the_server_where_wanted(
    folder, monkeypatch, exits
):
    with in_thread(folder, exit_on_engine_death=exits) as serving_thread:
        port = serving_thread.port
        engine = serving_thread.engine

        def broken(_self):
            raise RuntimeError("planted: /secret/path")

        with ThreadPoolExecutor(1) as pool:
            body = chat(max_tokens=100_000, logit_bias={str(served_end(folder)): -100})
            waiting = pool.submit(exchange, port, "POST", "/v1/chat/completions", body)
            wait_until(lambda: engine.report["decoding"])
            monkeypatch.setattr(s.Scheduler, "step", broken)
            code, _, answer = waiting.result(timeout=MAX_WAIT_SECONDS)
        assert code == 503 and b"secret" not in answer
        if exits:
            serving_thread.join()
            assert serving_thread.statuses == [1]
        else:
            for line in (("GET", "/health"), ("POST", "/v1/chat/completions", chat())):
                code, _, answer = exchange(port, *line)
                assert code == 503 and json.loads(answer)["error"]
            assert serving_thread.is_alive()

    assert not serving_thread.is_alive()


def test_a_rank_that_ends_while_the_server_starts_ends_it_with_a_sentence(
    folder, monkeypatch
):
    thread = ServingThread(folder)
    end = s.RanksEnd("planted: rank 1 has gone")
    # Between the last look at the engine's state and the first at its model.
    monkeypatch.setattr(s.gc, "freeze", lambda: thread.engine.abandon(end))
    thread.start()
    thread.join()
    assert thread.statuses == [1]


# -- orders to stop --------------------------------------------------------------------------------


# A machine may be slow: running replies have a minute to end, and half of that is soon.
PATIENT = {"SHUTDOWN_GRACE_SECONDS": "60"}


@pytest.fixture(scope="module")
def start_program(tmp_path_factory, folder):
    programs = []

    def start():
        program_folder = tmp_path_factory.mktemp("program")
        programs.append(Program(program_folder, folder, **PATIENT))
        programs[-1].wait_until_ready()
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()


@contextmanager
def streaming(port, max_tokens, stop_id):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MAX_WAIT_SECONDS)
    with closing(connection):
        body = chat(stream=True, max_tokens=max_tokens, logit_bias={str(stop_id): -100})
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        while b"content" not in response.readline():
            pass
        yield response


def is_refused(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except (
        ConnectionResetError
    ):  # the door closed while this one stood in it: ask again
        return False

    return False


def test_an_order_to_stop_lets_replies_end_and_serves_nobody_new(start_program, folder):
    program = start_program()
    stop_id = served_end(folder)
    idle_client = http.client.HTTPConnection(
        "127.0.0.1", program.port, timeout=MAX_WAIT_SECONDS
    )
    idle_client.request("GET", "/health")
    assert idle_client.getresponse().read()

    with streaming(program.port, 600, stop_id) as response:
        # while this one runs, the program cannot end
        with streaming(program.port, 100_000, stop_id):
            program.process.send_signal(signal.SIGTERM)
            # a port is let go within 0.5 s, on a machine with time
            wait_until(lambda: is_refused(program.port), seconds=30)
            late_request = json.dumps(chat(max_tokens=3))
            idle_client.request("POST", "/v1/chat/completions", late_request)
            assert idle_client.getresponse().status == 503
        text = response.read()

    assert b'"finish_reason": "length"' in text
    assert text.rstrip().endswith(b"data: [DONE]")
    assert program.process.wait(timeout=MAX_WAIT_SECONDS) == 0
    lines = program.said.splitlines()
    assert lines[-1] == "stopped."
    assert sum(line.startswith("Stopping ...") for line in lines) == 1
    assert sum(line.startswith("start-llm ") for line in lines) == 2  # loading, banner


def test_a_reply_that_takes_too_long_is_cut_with_an_error(
    folder, caplog, capfd, monkeypatch
):
    monkeypatch.setattr(s.logger, "propagate", True)
    with in_thread(folder, shutdown_grace_seconds=0.1) as serving_thread:
        with streaming(serving_thread.port, 100_000, served_end(folder)) as response:
            serving_thread.stop.set()
            began = time.monotonic()
            text = response.read()
        serving_thread.join()

    assert time.monotonic() - began < 30
    assert b'"error"' in text
    assert b"the server is stopping" in text
    assert serving_thread.statuses == [0]
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_a_request_is_under_way_until_its_error_has_left(folder, monkeypatch):
    """Who waits for requests to end, as at a stop, would else take the error from the client."""
    live = []
    send = s.Handler._send_error_body

    def noted(handler, error):
        live.append(len(served.state.stores.live))
        send(handler, error)

    def broken(_fed):
        raise RuntimeError("planted")

    monkeypatch.setattr(s.Handler, "_send_error_body", noted)
    with Served(folder) as served:
        port = served.state.config.mlx_port
        with served.holding(broken):
            code, _, _ = exchange(
                port, "POST", "/v1/chat/completions", chat(max_tokens=3)
            )
        assert (code, live) == (500, [1])
        wait_until(lambda: not served.state.stores.live)


def test_a_second_order_is_obeyed_at_once(start_program, folder):
    program = start_program()
    with streaming(program.port, 100_000, served_end(folder)):
        program.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Stopping ..." in program.said)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=30) == 128 + signal.SIGTERM


def served_end(folder):
    return Scribe(folder).end
