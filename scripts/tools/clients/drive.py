"""Real coding agents at work on any server: what the user says goes in, requests come out.

Each class starts one client, installed by install.sh in CLIENTS_HOME (default: ~/clients), with a
room of its own: HOME, a log, and for each server a folder under git to work in. Keys are dummies,
telemetry and updates are off, and no process outlives its `with` or `close`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

CLIENTS = Path(os.environ.get("CLIENTS_HOME") or Path.home() / "clients").resolve()
INSTALL = "scripts/tools/clients/install.sh"
FILES = {
    "notes.txt": "Project notes.\nThe code word is falcon.\nDeadline: none.\n",
    "src/app.py": 'def main():\n    print("hello from app")\n\n\nmain()\n',
    "AGENTS.md": "# Lab project\n\nAlways answer briefly. Prefer ls over find.\n",
}
QUIET = """DISABLE_TELEMETRY DO_NOT_TRACK DISABLE_ERROR_REPORTING DISABLE_AUTOUPDATER
CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC PI_OFFLINE PI_SKIP_VERSION_CHECK OPENCLAW_NO_UPDATE_CHECK
OPENCLAW_DISABLE_BONJOUR OPENCLAW_SKIP_CHANNELS OPENCLAW_TELEMETRY_DISABLED
OPENCODE_DISABLE_AUTOUPDATE OPENCODE_DISABLE_MODELS_FETCH"""
COST = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
LIMITS = {"contextWindow": 131072, "maxTokens": 8192}

Settings = dict[str, Any]


class ClientError(Exception):
    """A client did not do what it was told; the text is the end of its log."""


@contextmanager
def started(
    command: list[str], folder: Path, *, env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; nothing of the group is left afterwards."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number, seconds in ((signal.SIGTERM, 8), (signal.SIGKILL, 8)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


class Client:
    """One installed client. `urls`: where each server is, without /v1, by the test's own names."""

    PARTS: ClassVar[tuple[str, ...]] = ()  # what has to be installed
    SHELL: ClassVar = "exec"  # its tool that runs a command
    COMMAND: ClassVar = "command"  # and that tool's parameter
    WAITS: ClassVar = True  # `say` returns when the turn is over; if not, `finish` does

    def __init__(
        self, room: Path, urls: Mapping[str, str], *, model: str, key: str = "none"
    ) -> None:
        self.room, self._urls, self._model, self._key = room, dict(urls), model, key
        self._begun: dict[
            str, str
        ] = {}  # server -> the session that `say` goes on with
        for name in urls:
            self._fill(self.folder(name))
        self._env = {
            "PATH": f"{CLIENTS}/node24/bin:{os.environ['PATH']}",
            "HOME": str(room),
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "PI_TELEMETRY": "0",
            **dict.fromkeys(QUIET.split(), "1"),
        }

    @classmethod
    def missing(cls) -> list[str]:
        return [
            part for part in ("node24", *cls.PARTS) if not (CLIENTS / part).exists()
        ]

    @classmethod
    def how_to_install(cls) -> str:
        return f"to install: CLIENTS_HOME={CLIENTS} {INSTALL} {' '.join(cls.missing())}"

    def folder(self, server: str) -> Path:
        """Where the client works for this server."""
        return self.room / f"work-{server}"

    def _fill(self, folder: Path) -> None:
        for name, text in {**FILES, "CLAUDE.md": FILES["AGENTS.md"]}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
        git = [
            "git",
            "-C",
            str(folder),
            "-c",
            "user.name=lab",
            "-c",
            "user.email=lab@localhost",
        ]
        for order in ("init -q -b main", "add -A", "commit -q -m start"):
            subprocess.run([*git, *order.split()], check=True, timeout=20)

    def log(self) -> str:
        return (self.room / "client.log").read_text("utf-8", "replace")[-2000:]

    def start(self) -> None:
        """Run what has to run between two words of the user."""

    def close(self) -> None:
        """Leave nothing running."""

    def say(
        self, server: str, words: str, *, new: bool = False, seconds: float = 240
    ) -> None:
        """Have the user say this, in one session for each server or in a `new` one.

        Raises ClientError where the client fails, or takes longer than a busy machine needs.
        """
        with self.saying(server, words, new=new) as process:
            try:
                failed = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise ClientError(
                    f"not done after {seconds:g} s: {self.log()}"
                ) from None
            if failed:
                raise ClientError(self.log())

    def finish(self, server: str, *, seconds: float) -> None:
        """Wait for the turn to be over."""

    @contextmanager
    def saying(
        self, server: str, words: str, *, new: bool = False
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The client while it says this; it is killed on leaving."""
        if new:
            self._begun.pop(server, None)
        command, env = self._command(server, words), self._env | self._env_for(server)
        log, folder = self.room / "client.log", self.folder(server)
        with started(command, folder, env=env, log=log) as process:
            yield process

    def _command(self, server: str, words: str) -> list[str]:
        raise NotImplementedError

    def _env_for(self, server: str) -> dict[str, str]:
        del server
        return {}

    def _is_begun(self, server: str) -> bool:
        """Whether there is a session to go on with; from now on there is."""
        begun = server in self._begun
        self._begun.setdefault(server, str(uuid.uuid4()))
        return begun


class ClaudeCode(Client):
    """Anthropic Messages. `model` may be a Claude's: that path has other tools and a budget."""

    PARTS = ("claude-code",)
    SHELL = "Bash"
    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def _command(self, server: str, words: str) -> list[str]:
        which = "--resume" if self._is_begun(server) else "--session-id"
        modules = CLIENTS / self.PARTS[0] / "node_modules"
        program = modules / "@anthropic-ai/claude-code-linux-x64/claude"
        shown = ["--output-format", "json", "--dangerously-skip-permissions"]
        return [
            str(program),
            "-p",
            words,
            which,
            self._begun[server],
            *shown,
            *self.OPTIONS,
        ]

    def _env_for(self, server: str) -> dict[str, str]:
        places = [
            "MODEL",
            "DEFAULT_HAIKU_MODEL",
            "DEFAULT_SONNET_MODEL",
            "DEFAULT_OPUS_MODEL",
        ]
        return {
            "ANTHROPIC_BASE_URL": self._urls[server],
            "ANTHROPIC_API_KEY": self._key,
            "IS_SANDBOX": "1",  # or root may not skip the permissions
            **{f"ANTHROPIC_{place}": self._model for place in places},
        }


class OldClaudeCode(ClaudeCode):
    """Its billing header changes with every request."""

    PARTS = ("claude-code-2.1.150",)
    OPTIONS = ("--tools", "Agent,Bash,Read,Write")  # all of them are 60,000 characters


class Pi(Client):
    PARTS = ("pi",)
    SHELL = "bash"

    def start(self) -> None:
        model = {
            "id": self._model,
            "name": "Lab",
            "reasoning": True,
            "input": ["text", "image"],
        }
        models = [model | LIMITS | {"cost": COST}]
        kept = {"api": "openai-completions", "apiKey": self._key, "models": models}
        providers = {
            name: {"baseUrl": f"{url}/v1", **kept} for name, url in self._urls.items()
        }
        _write(self.room / ".pi/agent/models.json", {"providers": providers})

    def _command(self, server: str, words: str) -> list[str]:
        go_on = (
            ["-c"] if self._is_begun(server) else []
        )  # the newest session of this folder
        program = ["node", str(CLIENTS / "pi/node_modules/.bin/pi")]
        chosen = ["--provider", server, "--model", self._model, "--thinking", "medium"]
        return [*program, *chosen, "-p", *go_on, words]


class Codex(Client):
    """OpenAI Responses, which the server has through LiteLLM only. A home for each server."""

    PARTS = ("codex",)
    SHELL, COMMAND = "exec_command", "cmd"

    def start(self) -> None:
        for name, url in self._urls.items():
            place = {"name": "Lab", "base_url": f"{url}/v1", "env_key": "LAB_KEY"}
            lines = [
                "[model_providers.lab]",
                *(f"{k} = {json.dumps(v)}" for k, v in place.items()),
            ]
            home = self.room / f"codex-{name}"
            home.mkdir()
            (home / "config.toml").write_text("\n".join(lines), "utf-8")

    def _command(self, server: str, words: str) -> list[str]:
        go_on = ["resume", "--last"] if self._is_begun(server) else []
        package = CLIENTS / "codex/node_modules/@openai/codex-linux-x64"
        program = package / "vendor/x86_64-unknown-linux-musl/bin/codex"
        free = ["--json", "--dangerously-bypass-approvals-and-sandbox"]
        chosen = ["-c", 'model_provider="lab"', "-m", self._model]
        return [str(program), "exec", *go_on, *free, *chosen, words]

    def _env_for(self, server: str) -> dict[str, str]:
        return {"CODEX_HOME": str(self.room / f"codex-{server}"), "LAB_KEY": self._key}


class Copilot(Client):
    """GitHub's, without GitHub. A home for each server: it goes on with the newest there."""

    PARTS = ("copilot",)
    SHELL = "bash"

    def _command(self, server: str, words: str) -> list[str]:
        go_on = ["--continue"] if self._is_begun(server) else []
        program = CLIENTS / "copilot/node_modules/@github/copilot-linux-x64/copilot"
        return [str(program), *go_on, "-p", words, "--allow-all-tools"]

    def _env_for(self, server: str) -> dict[str, str]:
        told = {"BASE_URL": f"{self._urls[server]}/v1", "API_KEY": self._key}
        told["MAX_PROMPT_TOKENS"] = str(LIMITS["contextWindow"])
        told["MAX_OUTPUT_TOKENS"] = str(LIMITS["maxTokens"])
        named = {f"COPILOT_PROVIDER_{name}": value for name, value in told.items()}
        home = str(self.room / f"copilot-{server}")
        return {
            **named,
            "COPILOT_MODEL": self._model,
            "COPILOT_OFFLINE": "true",
            "HOME": home,
        }


class OpenCode(Client):
    PARTS = ("opencode",)
    SHELL = "bash"

    def start(self) -> None:
        limit = {"context": LIMITS["contextWindow"], "output": LIMITS["maxTokens"]}
        model = {"name": "Lab", "tool_call": True, "reasoning": True, "limit": limit}
        kept = {"npm": "@ai-sdk/openai-compatible", "models": {self._model: model}}
        providers = {
            name: {**kept, "options": {"baseURL": f"{url}/v1", "apiKey": self._key}}
            for name, url in self._urls.items()
        }
        _write(self.room / ".config/opencode/opencode.json", {"provider": providers})

    def _command(self, server: str, words: str) -> list[str]:
        go_on = ["-c"] if self._is_begun(server) else []
        program = CLIENTS / "opencode/node_modules/opencode-linux-x64/bin/opencode"
        chosen = ["--format", "json", "-m", f"{server}/{self._model}"]
        return [str(program), "run", *chosen, *go_on, words]


class QwenCode(Client):
    PARTS = ("qwen-code",)
    SHELL = "run_shell_command"

    def _command(self, server: str, words: str) -> list[str]:
        go_on = (
            ["--continue"] if self._is_begun(server) else []
        )  # the newest of this folder
        program = CLIENTS / "qwen-code/node_modules/@qwen-code/qwen-code/cli.js"
        chosen = ["--auth-type", "openai", "-m", self._model, "--yolo"]
        return ["node", str(program), *chosen, *go_on, "-p", words]

    def _env_for(self, server: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{self._urls[server]}/v1",
            "OPENAI_API_KEY": self._key,
        }


TOKEN = "lab-token"


class OpenClaw(Client):
    """The gateway, with an agent for each server; the user writes from its web page."""

    PARTS = ("openclaw",)
    HEALTH = "/health"
    WAITS = False  # that the agent answers is seen on the server

    def __init__(
        self, room: Path, urls: Mapping[str, str], *, model: str, key: str = "none"
    ) -> None:
        super().__init__(room, urls, model=model, key=key)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._env["OPENCLAW_STATE_DIR"] = str(room / ".openclaw")
        program = CLIENTS / self.PARTS[0] / "node_modules/openclaw/openclaw.mjs"
        self._program = ["node", str(program), "gateway"]
        self._running = ExitStack()

    def start(self) -> None:
        _write(self.room / ".openclaw/openclaw.json", self._settings())
        command = [*self._program, "run", "--port", str(self._port), "--token", TOKEN]
        log = self.room / "client.log"
        gateway = started(command, self.room, env=self._env, log=log)
        process = self._running.enter_context(gateway)
        ends = time.monotonic() + 90
        while not self._is_up():
            if process.poll() is not None or time.monotonic() > ends:
                raise ClientError(self.log())
            time.sleep(0.1)

    def close(self) -> None:
        self._running.close()

    def _settings(self) -> Settings:
        model = {
            "id": self._model,
            "name": "Lab",
            "reasoning": True,
            "input": ["text", "image"],
        }
        models = [model | LIMITS | {"cost": COST}]
        kept = {"api": "openai-completions", "apiKey": self._key, "models": models}
        providers = {
            name: {"baseUrl": f"{url}/v1", **kept} for name, url in self._urls.items()
        }
        agents = [
            {
                "id": name,
                "model": f"{name}/{self._model}",
                "workspace": str(self.folder(name)),
            }
            for name in self._urls
        ]
        defaults = {"workspace": agents[0]["workspace"], "skipBootstrap": True}
        auth = {"mode": "token", "token": TOKEN}
        return {
            "agents": {
                "defaults": {**defaults, "model": {"primary": agents[0]["model"]}},
                "list": agents,
            },
            "models": {"mode": "merge", "providers": providers},
            "gateway": {
                "mode": "local",
                "port": self._port,
                "bind": "loopback",
                "auth": auth,
            },
        }

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}{self.HEALTH}", timeout=5
            ):
                return True
        except OSError:
            return False

    def _command(self, server: str, words: str) -> list[str]:
        self._begun[server] = str(uuid.uuid4())  # the run
        sent = {"sessionKey": f"agent:{server}:main", "message": words}
        sent["idempotencyKey"] = self._begun[server]
        return self._call("chat.send", sent, seconds=50)

    def finish(self, server: str, *, seconds: float) -> None:
        wanted = {"runId": self._begun[server], "timeoutMs": int(seconds * 1000)}
        command, log = (
            self._call("agent.wait", wanted, seconds=seconds),
            self.room / "client.log",
        )
        with started(command, self.room, env=self._env, log=log) as process:
            if process.wait(seconds + 30):
                raise ClientError(self.log())

    def _call(self, method: str, params: Settings, *, seconds: float) -> list[str]:
        where = ["--token", TOKEN, "--url", f"ws://127.0.0.1:{self._port}", "--json"]
        how = ["--timeout", str(int(seconds * 1000)), "--params", json.dumps(params)]
        return [*self._program, "call", method, *where, *how]


class OldOpenClaw(OpenClaw):
    """Its system prompt has another message id with every question."""

    PARTS = ("openclaw-2026.2.17",)
    HEALTH = "/"


def _write(place: Path, settings: Settings) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(settings), "utf-8")
