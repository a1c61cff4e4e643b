"""Real coding agents at work on any server: what the user says goes in, requests come out.

Each class starts one client, installed by install.sh in CLIENTS_HOME (default: ~/clients), with a
room of its own: HOME, a log, and for each server a folder under git to work in. Keys are dummies,
telemetry and updates are off, and no process outlives its `with` or `close`.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

sys.path.append(str(Path(__file__).resolve().parents[2] / "helpers"))

import launch
from litellm_beside import end_group

CLIENTS = Path(os.environ.get("CLIENTS_HOME") or Path.home() / "clients").resolve()
FILES = {
    "notes.txt": "Project notes.\nThe code word is falcon.\nDeadline: none.\n",
    "src/app.py": 'def main():\n    print("hello from app")\n\n\nmain()\n',
    "AGENTS.md": "# Lab project\n\nAlways answer briefly. Prefer ls over find.\n",
}
QUIET = """DISABLE_TELEMETRY DO_NOT_TRACK DISABLE_ERROR_REPORTING DISABLE_AUTOUPDATER
CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC PI_OFFLINE PI_SKIP_VERSION_CHECK OPENCLAW_NO_UPDATE_CHECK
OPENCLAW_DISABLE_BONJOUR OPENCLAW_SKIP_CHANNELS OPENCLAW_TELEMETRY_DISABLED
OPENCODE_DISABLE_AUTOUPDATE OPENCODE_DISABLE_MODELS_FETCH"""
CONTEXT = 131_072  # tokens

Settings = dict[str, Any]

CHIP = "arm64" if platform.machine() in ("arm64", "aarch64") else "x64"
PLATFORM = f"{platform.system().lower()}-{CHIP}"  # as npm calls it
CODEX_TARGETS = {  # as Rust calls them
    "linux-x64": "x86_64-unknown-linux-musl",
    "linux-arm64": "aarch64-unknown-linux-musl",
    "darwin-x64": "x86_64-apple-darwin",
    "darwin-arm64": "aarch64-apple-darwin",
}


class ClientError(Exception):
    """A client failed or was too slow; the text is the end of its log."""


@contextmanager
def started(
    command: list[str], folder: Path, *, env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; nothing of the group is left afterwards."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process.pid)


class Client:
    """One installed client. `urls`: where each server is, without /v1, by the test's own names."""

    PARTS: ClassVar[tuple[str, ...]] = ()  # what has to be installed
    # {launched} is what `launch` gives it, {turn} in a new session BEGIN, else GO_ON.
    COMMAND_LINE: ClassVar = ""
    BEGIN: ClassVar = ""
    GO_ON: ClassVar = ""
    SHELL: ClassVar = "exec"  # its tool that runs a command
    COMMAND: ClassVar = "command"  # and that tool's parameter
    LAUNCHED: ClassVar = ""  # what `launch` calls it

    def __init__(
        self, room: Path, urls: Mapping[str, str], *, model: str, key: str = "none"
    ) -> None:
        self.room = room
        self._urls = dict(urls)
        self._model = model
        self._key = key
        # server -> the session that `say` goes on with
        self._begun: dict[str, str] = {}

        files = {**FILES, "CLAUDE.md": FILES["AGENTS.md"]}
        for folder in map(self.folder, urls):
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, "utf-8")
            git = ["git", "-C", str(folder)]
            git += ["-c", "user.name=lab", "-c", "user.email=lab@localhost"]
            for order in ("init -q -b main", "add -A", "commit -q -m start"):
                subprocess.run([*git, *order.split()], check=True, timeout=20)
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
        parts = ("node24", *cls.PARTS)
        return [part for part in parts if not (CLIENTS / part).exists()]

    def folder(self, server: str) -> Path:
        """Where the client works for this server."""
        return self.room / f"work-{server}"

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
        if new:
            self._begun.pop(server, None)
        command = self._command(server, words)
        environment = {**self._env, **self._env_for(server)}
        self._run(command, self.folder(server), environment, seconds=seconds)

    def finish(self, server: str, *, seconds: float) -> None:
        """Wait for the turn to be over, where `say` returns before."""

    def _run(
        self, command: list[str], folder: Path, env: dict[str, str], *, seconds: float
    ) -> None:
        log = self.room / "client.log"
        with started(command, folder, env=env, log=log) as process:
            try:
                failed = process.wait(seconds)
            except subprocess.TimeoutExpired:
                sentence = f"not done after {seconds:g} s: {self.log()}"
                raise ClientError(sentence) from None
            if failed:
                raise ClientError(self.log())

    def _command(self, server: str, words: str) -> list[str]:
        turn = self.GO_ON if server in self._begun else self.BEGIN
        values = {
            "modules": CLIENTS / self.PARTS[0] / "node_modules",
            "model": self._model,
            "url": self._urls[server],
            "session": self._begun.setdefault(server, str(uuid.uuid4())),
            "words": words,
        }
        command: list[str] = []
        for argument in self.COMMAND_LINE.replace("{turn}", turn).split():
            if argument == "{launched}":
                command += self._set_up(server).arguments
            else:
                command.append(argument.format(**values))
        return command

    def _target(self, server: str) -> launch.Target:
        url, inputs = self._urls[server], ("text", "image")
        return launch.Target(url, self._key, self._model, CONTEXT, inputs=inputs)

    def _set_up(self, server: str) -> launch.Setup:
        """As `launch` starts it."""
        target = self._target(server)
        setup = launch.CLIENTS[self.LAUNCHED].set_up(target, str(self.room))
        for name, text in setup.files.items():
            (self.room / name).write_text(text, "utf-8")
        return setup

    def _env_for(self, server: str) -> dict[str, str]:
        return self._set_up(server).environment if self.LAUNCHED else {}


class ClaudeCode(Client):
    """Anthropic Messages. `model` may be a Claude's: that path has other tools and a budget."""

    PARTS = ("claude-code",)
    SHELL = "Bash"
    COMMAND_LINE = (
        f"{{modules}}/@anthropic-ai/claude-code-{PLATFORM}/claude -p {{words}} {{turn}} "
        "--output-format json --dangerously-skip-permissions"
    )
    BEGIN = "--session-id {session}"
    GO_ON = "--resume {session}"

    def _env_for(self, server: str) -> dict[str, str]:
        kinds = ("", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")
        return {
            "ANTHROPIC_BASE_URL": self._urls[server],
            "ANTHROPIC_API_KEY": self._key,
            "IS_SANDBOX": "1",  # or root may not skip the permissions
            **{f"ANTHROPIC_{kind}MODEL": self._model for kind in kinds},
        }


class OldClaudeCode(ClaudeCode):
    """Its billing header changes with every request."""

    PARTS = ("claude-code-2.1.150",)
    # All tools are 60,000 characters.
    COMMAND_LINE = f"{ClaudeCode.COMMAND_LINE} --tools Agent,Bash,Read,Write"


class Pi(Client):
    PARTS = ("pi",)
    LAUNCHED = "pi"
    SHELL = "bash"
    COMMAND_LINE = (
        "node {modules}/.bin/pi {launched} --thinking medium -p {turn} {words}"
    )
    GO_ON = "-c"  # the newest session of this folder


class Codex(Client):
    """OpenAI Responses, which the server has through LiteLLM only. A home for each server."""

    PARTS = ("codex",)
    SHELL = "exec_command"
    COMMAND = "cmd"
    COMMAND_LINE = (
        f"{{modules}}/@openai/codex-{PLATFORM}/vendor/{CODEX_TARGETS[PLATFORM]}/bin/codex "
        "exec {turn} --json --dangerously-bypass-approvals-and-sandbox -m {model} "
        '-c model_provider="lab" -c model_providers.lab.name="Lab" '
        '-c model_providers.lab.base_url="{url}/v1" '
        '-c model_providers.lab.env_key="LAB_KEY" {words}'
    )
    GO_ON = "resume --last"

    def _env_for(self, server: str) -> dict[str, str]:
        home = self.room / f"codex-{server}"
        home.mkdir(exist_ok=True)
        return {"CODEX_HOME": str(home), "LAB_KEY": self._key}


class Copilot(Client):
    """GitHub's, without GitHub. A home for each server: it goes on with the newest there."""

    PARTS = ("copilot",)
    LAUNCHED = "copilot"
    SHELL = "bash"
    COMMAND_LINE = (
        f"{{modules}}/@github/copilot-{PLATFORM}/copilot {{turn}} -p {{words}} "
        "--allow-all-tools"
    )
    GO_ON = "--continue"

    def _env_for(self, server: str) -> dict[str, str]:
        home = str(self.room / f"copilot-{server}")
        return {**super()._env_for(server), "HOME": home}


class OpenCode(Client):
    PARTS = ("opencode",)
    LAUNCHED = "opencode"
    SHELL = "bash"
    COMMAND_LINE = (
        f"{{modules}}/opencode-{PLATFORM}/bin/opencode run --format json "
        f"-m {launch.PROVIDER}/{{model}} {{turn}} {{words}}"
    )
    GO_ON = "-c"


class QwenCode(Client):
    PARTS = ("qwen-code",)
    LAUNCHED = "qwen"
    SHELL = "run_shell_command"
    COMMAND_LINE = (
        "node {modules}/@qwen-code/qwen-code/cli.js {launched} -m {model} --yolo "
        "{turn} -p {words}"
    )
    GO_ON = "--continue"  # the newest session of this folder


TOKEN = "lab-token"


class OpenClaw(Client):
    """The gateway, with an agent for each server; the user writes from its web page."""

    PARTS = ("openclaw",)
    HEALTH = "/health"

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
        settings_file = self.room / ".openclaw/openclaw.json"
        settings_file.parent.mkdir(parents=True, exist_ok=True)
        settings_file.write_text(json.dumps(self._settings()), "utf-8")
        command = [*self._program, "run", "--port", str(self._port), "--token", TOKEN]
        log = self.room / "client.log"
        gateway = started(command, self.room, env=self._env, log=log)
        process = self._running.enter_context(gateway)
        deadline = time.monotonic() + 90
        while not self._is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClientError(self.log())
            time.sleep(0.1)

    def close(self) -> None:
        self._running.close()

    def _settings(self) -> Settings:
        providers, agents = {}, []
        for name in self._urls:
            target = self._target(name)
            providers[name] = launch.describe_provider(
                target, key=target.key, cost=launch.FREE
            )
            model, folder = f"{name}/{self._model}", str(self.folder(name))
            agents.append({"id": name, "model": model, "workspace": folder})
        first = agents[0]
        defaults = {
            "workspace": first["workspace"],
            "model": {"primary": first["model"]},
        }
        gateway = {"mode": "local", "port": self._port, "bind": "loopback"}
        token = {"mode": "token", "token": TOKEN}
        return {
            "agents": {"defaults": {**defaults, "skipBootstrap": True}, "list": agents},
            "models": {"mode": "merge", "providers": providers},
            "gateway": {**gateway, "auth": token},
        }

    def _is_up(self) -> bool:
        url = f"http://127.0.0.1:{self._port}{self.HEALTH}"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except OSError:
            return False

    def _command(self, server: str, words: str) -> list[str]:
        self._begun[server] = str(uuid.uuid4())  # the run
        params = {
            "sessionKey": f"agent:{server}:main",
            "message": words,
            "idempotencyKey": self._begun[server],
        }
        return self._call("chat.send", params, seconds=50)

    def finish(self, server: str, *, seconds: float) -> None:
        params = {"runId": self._begun[server], "timeoutMs": int(seconds * 1000)}
        command = self._call("agent.wait", params, seconds=seconds)
        self._run(command, self.room, self._env, seconds=seconds + 30)

    def _call(self, method: str, params: Settings, *, seconds: float) -> list[str]:
        url = f"ws://127.0.0.1:{self._port}"
        timeout = str(int(seconds * 1000))
        options = ["--token", TOKEN, "--url", url, "--json"]
        options += ["--timeout", timeout, "--params", json.dumps(params)]
        return [*self._program, "call", method, *options]


class OldOpenClaw(OpenClaw):
    """Its system prompt has another message id with every question."""

    PARTS = ("openclaw-2026.2.17",)
    HEALTH = "/"
