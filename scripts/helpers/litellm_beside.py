"""Keep LiteLLM running beside a start-llm.py, which starts this program.

stdin     one line of JSON, an `Order`, with keys in it. Then it stays open as a lifeline: when it
          closes, because the server ended in whatever way, LiteLLM ends, and so does this program.
stderr    for the server: each line is a level and a sentence, to be logged; STATE and the state
          of LiteLLM: starting, up or port_taken; or, from the gate in LiteLLM, REPLICAS and how
          the servers are (replica_choice.py)
files     LOG_ROOT/litellm-PORT.json, .log, .log.1, .pid, .assignments, for their owner alone; where
          LOG_ROOT cannot be written, in a folder that goes with this program

LiteLLM is a program of its own, never imported, in an environment of its own: keys and databases
of its user do not reach it. One whose keeper was killed is known by pid file, command line and
parent, and replaced; anything else on the port is named and left alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
from translated_bodies import plain_name

DAY: Final = 86_400  # seconds without a byte: a long prefill is no failure
LOG_BYTES: Final = 10_000_000  # of .log; then it becomes .log.1
ENVIRONMENT: Final = {
    "NO_PROXY": "*",
    "LITELLM_MODE": "PRODUCTION",  # or it reads the .env of the folder it is started in
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    # To write these takes seconds, in which no chat goes on.
    "NO_DOCS": "True",
    "NO_REDOC": "True",
    "NO_OPENAPI": "True",
    "PYTHONPATH": str(Path(__file__).resolve().parent),  # of the gate
}
log = logging.getLogger("litellm_beside")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is needed of the server's settings, by their names there, and of its model."""

    program: str  # LiteLLM's
    model_id: str
    context_length: int  # tokens
    # `url` and `key` of each, the one that sends this first
    servers: list[dict[str, str]]
    named_servers: dict[str, dict[str, str]]  # with other models (PROXY_MODELS)
    strict_model_names: bool
    max_body_bytes: int
    keepalive_seconds: float
    proxy_model_id: str
    proxy_host: str
    proxy_port: int
    proxy_url: str  # of these two, as clients on this machine write it
    proxy_api_key: str
    proxy_startup_wait_seconds: float
    log_root: str
    log_level: str
    host_names: list[str]  # what clients may call it; none: whatever they like
    cors_origins: str  # web pages that may ask the server
    advice: dict[str, str]  # for paths that nobody serves: see litellm_gate.py

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Whatever else the server sends is left aside."""
        values = json.loads(text)
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def route_to(server: dict[str, str], model: str) -> dict[str, Any]:
    """How LiteLLM reaches the model of a server."""
    return {
        "model": f"openai/{model}",
        "api_base": f"{server['url']}/v1",
        "api_key": server["key"] or "none",
        "allowed_openai_params": ["user"],
        # why(L-102): for /v1/responses, which we lack
        "use_chat_completions_api": True,
    }


def names_of(order: Order) -> list[str]:
    """The names of the model; none if any other means it, too."""
    names = [order.model_id]
    if order.proxy_model_id not in ("", order.model_id):
        names.insert(0, order.proxy_model_id)
    return names if order.strict_model_names else []


def settings_for(order: Order) -> dict[str, Any]:
    """LiteLLM's configuration: every name is the one model, each route reaches us as it came."""
    # Each name that a client may send, as the gate sends it on, and how LiteLLM reaches
    # its model: only for what LiteLLM makes a chat of, see litellm_gate.py.
    names = names_of(order) or [order.proxy_model_id or order.model_id, "*"]
    info = {"model_info": {"max_input_tokens": order.context_length}}
    model_list = []
    for server in order.servers:
        route = {"litellm_params": route_to(server, order.model_id), **info}
        model_list += [{"model_name": plain_name(name), **route} for name in names]
    for name, server in order.named_servers.items():
        route = {"litellm_params": route_to(server, name)}
        model_list.append({"model_name": plain_name(name), **route})

    general_settings: dict[str, Any] = {
        "forward_client_headers_to_llm_api": True,
        # The lack of a key, or one that LiteLLM thinks weak, is meant.
        "dangerously_permit_weak_or_unset_master_key": True,
    }
    key = order.proxy_api_key or order.servers[0]["key"]
    if key:
        general_settings["master_key"] = key

    return {
        "model_list": model_list,
        "general_settings": general_settings,
        "litellm_settings": {
            "sse_keepalive_ping_interval_seconds": order.keepalive_seconds,
            "request_timeout": DAY,
            "drop_params": True,
            "callbacks": ["litellm_gate.gate"],
        },
        "router_settings": {
            "timeout": DAY,
            "num_retries": 0,
            "disable_cooldowns": True,
        },
        "start_llm_gate": {
            "key": key,
            "servers": order.servers,
            "named_servers": {
                plain_name(name): server for name, server in order.named_servers.items()
            },
            "model_id": order.model_id,
            "models": names_of(order),
            "max_body_bytes": order.max_body_bytes,
            "host_names": order.host_names,
            "cors_origins": re.findall("[^ ,]+", order.cors_origins.lower()),
            "welcome": (
                f"This is LiteLLM before start-llm, with the model {order.model_id}. "
                f"OpenAI's clients take the base URL {order.proxy_url}/v1, for chats and "
                f"responses; Anthropic's and Google's take {order.proxy_url}. "
                f"People find the server's page at {order.servers[0]['url']}/"
            ),
            "advice": order.advice,
        },
    }


def is_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


def holder_of(port: int) -> str:
    """The name and pid of the program that listens on this port."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # of another user
            addresses = [c.laddr for c in process.net_connections("tcp")]
            if any(address and address.port == port for address in addresses):
                name = " ".join(process.name().split())
                return f"{name} (pid {process.pid})"
    return "a program of another user"


def end_group(pid: int) -> None:
    """End the process that leads a group, then whatever is left of the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        with suppress(psutil.Error):
            psutil.Process(pid).wait(3)


def report_state(state: str) -> None:
    """Tell the server, whatever LOG_LEVEL is. It may be gone."""
    with suppress(OSError):
        sys.stderr.write(f"STATE {state}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Keeper:
    """Of a command that listens on `host`:`port` and has `files`.json among its arguments.

    `url`: how clients on this machine reach it.
    """

    command: Sequence[str]
    files: Path  # without the ending: .json, .log and .pid
    settings: str  # goes into the first
    port: int
    url: str
    host: str = "127.0.0.1"
    told_every: float = 0.0  # seconds between two lines about its start; 0 = none
    delay: float = 1.0  # seconds before its second start, then ever more
    patience: float = 10.0  # seconds, for the keeper of a server killed just now
    steady: float = 600.0  # seconds of one life that make up for those before
    origins: str = ""  # of web pages that may read what it says; empty: its own
    reports: bool = False  # the command, too, writes lines for the server
    report: Callable[[str], None] = report_state

    def keep_running(self, stop: threading.Event) -> None:
        """Start it again, ever later, until `stop`. Returns when nothing of it is left."""
        delay = self.delay
        if not self._make_way(stop):
            self.report("port_taken")
            return

        while not stop.is_set():
            if is_open(self.port, self.host):
                text = "no proxy: port %d is taken by %s; stop it or set PROXY_PORT and start again"
                log.error(text, self.port, holder_of(self.port))
                self.report("port_taken")
                return

            self.report("starting")
            started = time.monotonic()
            try:
                status: object = self._run(stop)
            except OSError as error:
                status = error
            if time.monotonic() - started >= self.steady:
                delay = self.delay

            if not stop.is_set():
                self.report("starting")
                text = "LiteLLM ended (%s): %s.log; again in %.0f s"
                log.error(text, status, self.files, delay)
                stop.wait(delay)
                delay = min(2 * delay, 60.0)

    def _make_way(self, stop: threading.Event) -> bool:
        """End a LiteLLM whose keeper was killed. False: there is one whose keeper lives."""
        deadline = time.monotonic() + self.patience
        with suppress(OSError, ValueError, psutil.Error):
            pid, parent = map(int, Path(f"{self.files}.pid").read_text().split())
            process = psutil.Process(pid)
            # The number may be that of another program by now.
            while f"{self.files}.json" in process.cmdline():
                if process.ppid() != parent:
                    text = (
                        "ending LiteLLM (pid %d), left over from a server that is gone"
                    )
                    log.warning(text, pid)
                    end_group(pid)
                    break
                if time.monotonic() > deadline:
                    text = "no proxy: LiteLLM (pid %d) of another start-llm is there"
                    log.error(text, pid)
                    return False
                if stop.wait(0.1):
                    return False
        return True

    def _run(self, stop: threading.Event) -> int | None:
        """One life of the command: its exit status. Raises OSError."""
        settings_file = Path(f"{self.files}.json")
        log_file = Path(f"{self.files}.log")
        pid_file = Path(f"{self.files}.pid")
        self.files.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (settings_file, pid_file):
            path.unlink(missing_ok=True)  # it may have been readable for all
        for path in (settings_file, log_file, pid_file):
            path.touch(mode=0o600)
        settings_file.write_text(self.settings)

        environment = {
            **ENVIRONMENT,
            # Unset or empty, every web page could read it.
            "LITELLM_CORS_ORIGINS": self.origins or self.url,
            "START_LLM_GATE": str(settings_file),
        }
        with ExitStack() as files:
            output = files.enter_context(log_file.open("ab"))
            descriptors = []
            if self.reports:
                descriptors.append(os.dup(2))
                files.callback(os.close, descriptors[0])
                environment["START_LLM_REPORTS"] = str(descriptors[0])
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=descriptors,
                start_new_session=True,  # a group, to be ended as a whole
            )

        pids = f"{process.pid} {os.getpid()}"
        try:
            pid_file.write_text(pids)
            self._watch(process, log_file, stop)
            return process.poll()
        finally:
            end_group(process.pid)
            with suppress(OSError):
                # A keeper that follows may have written its own by now.
                if pid_file.read_text() == pids:
                    pid_file.unlink()

    def _watch(
        self, process: subprocess.Popen[bytes], log_file: Path, stop: threading.Event
    ) -> None:
        """Log how it starts, keep its log small, until it has ended or should."""
        started = time.monotonic()
        due = self.told_every or math.inf
        is_up = False
        while process.poll() is None and not stop.wait(0.2):
            seconds = time.monotonic() - started
            if not is_up:
                is_up = is_open(self.port, self.host)
                if is_up:
                    log.info("LiteLLM is up at %s (%.0f s)", self.url, seconds)
                    self.report("up")
                elif seconds >= due:
                    due += self.told_every
                    log.info("LiteLLM is starting (%.0f s)", seconds)
            keep_small(log_file)


def keep_small(log_file: Path) -> None:
    """Copy and empty a log that has grown: a program that has it open appends on."""
    old_log = log_file.with_suffix(".log.1")
    # Somebody removed it, or the disk is full: then it is emptied all the more.
    with suppress(OSError):
        if log_file.stat().st_size > LOG_BYTES:
            try:
                old_log.touch(mode=0o600)
                shutil.copyfile(log_file, old_log)
            finally:
                os.truncate(log_file, 0)


@contextmanager
def folder_for(log_root: Path) -> Iterator[Path]:
    """LOG_ROOT, or where that cannot be written, a folder of its own inside."""
    with ExitStack() as stack:
        try:
            log_root.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(tempfile.TemporaryFile(dir=log_root))
        except OSError as error:
            name = tempfile.mkdtemp(prefix="start-llm-")  # for its owner alone
            stack.callback(shutil.rmtree, name, ignore_errors=True)
            reason = error.strerror or error
            text = "LOG_ROOT %s cannot be written (%s): LiteLLM's log is in %s, while it runs"
            log.warning(text, log_root, reason, name)
            log_root = Path(name)
        yield log_root


def main() -> None:
    line = sys.stdin.readline()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())

    def wait_for_the_end() -> None:
        # Not sys.stdin itself: its buffer would hold a lock at our own end.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if not line:
        return

    order = Order.from_json(line)
    # A level and a sentence in each line: the server logs them as its own. It may be
    # gone, if it was killed.
    logging.raiseExceptions = False
    logging.basicConfig(level=order.log_level, format="%(levelname)s %(message)s")
    root = Path(__file__).resolve().parents[2] / Path(order.log_root).expanduser()
    with folder_for(root) as folder:
        files = folder.resolve() / f"litellm-{order.proxy_port}"
        command = [sys.executable, order.program, "--config", f"{files}.json"]
        command += ["--host", order.proxy_host, "--port", str(order.proxy_port)]
        keeper = Keeper(
            command=command,
            files=files,
            settings=json.dumps(settings_for(order)),
            port=order.proxy_port,
            url=order.proxy_url,
            host=order.proxy_host,
            told_every=order.proxy_startup_wait_seconds,
            origins=order.cors_origins.strip(" ,").lower(),
            reports=len(order.servers) > 1,
        )
        keeper.keep_running(stop)


if __name__ == "__main__":
    main()
