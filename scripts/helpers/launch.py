"""Start a coding agent on the running server, without a change to its settings.

    scripts/launch claude            also codex, pi, opencode, openclaw, copilot, qwen
    scripts/launch claude -- -p "Which files are here?"
    scripts/launch claude --print    only show command and environment

scripts/launch starts this program from any folder; in the clone `python3.12 install_and_run.py
launch` does the same.

What follows -- goes to the client. Base URL, key, model and context reach it in its environment or
as arguments. Where it reads them from a file alone, the file is in a temporary folder that is
removed when the client ends. Where the server listens and which key it wants is read as the server
reads it, from the environment and from .env; --url and --key say it otherwise.

The exit status is the client's (128 and the number of the signal that ended it), or 2 with one
sentence where it could not be started. Standard library only, for any Python from 3.12 on.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

Json = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parents[2]
ENV_FILE: Final = ROOT / ".env"
PROVIDER: Final = "start-llm"  # the name of the server in a client's settings
NO_KEY: Final = "unused"  # for clients that want a key where the server wants none
KEY_VARIABLE: Final = "START_LLM_KEY"  # for clients that want the name of a variable
TIMEOUT_SECONDS: Final = 10.0
DEMO_MODEL: Final = "demo"  # the server's own, of a few million parameters
DEMO_SENTENCE: Final = (
    "the demo model is not for agents, it knows sums and the files of its garden; serve "
    "another for work (install_and_run.py --model NAME)"
)
MASK: Final = "********"
# a call and its result: without room for one nothing is done
CALL_TOKENS: Final = 1_500
HOUR_TOKENS: Final = 20_000  # what an agent reads and writes in an hour of work
REPLY_PART: Final = 8  # 1/8 of the context is a reply's
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
PROXY_WAIT_SECONDS: Final = 300.0  # 60 were seen on a busy machine
USUAL_EFFORTS: Final = ("low", "medium", "high")  # where the server does not list any


class LaunchError(Exception):
    """The client was not started. The text says in one sentence why and what to do."""


def say(text: str) -> None:
    """Print a line for the person, if there is any; stdout belongs to the client."""
    if text:
        print(f"start-llm: {text}", file=sys.stderr, flush=True)


# The table: what each client is given ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """What a client is told about the server."""

    url: str  # without /v1
    key: str
    model: str
    context: int  # tokens of prompt and reply
    is_small: bool = False  # the model wants a short system prompt
    small_model: str = ""  # for sub-agents and the like; empty: `model`
    efforts: tuple[str, ...] = USUAL_EFFORTS  # of its thinking, the lowest first
    inputs: tuple[str, ...] = ("text",)  # and "image", where the model sees

    @property
    def output(self) -> int:
        """Tokens that one reply may have: an eighth of the context.

        A client keeps so many free, and its first prompt has to fit beside them. Where nothing
        is said Claude Code keeps 20,000, and takes any prompt for too long in a context of that.
        """
        return min(16_384, self.context // REPLY_PART)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What starts one client for one target, in a folder for its files."""

    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()  # variables that would lead the client elsewhere
    arguments: tuple[str, ...] = ()  # before the person's own
    files: dict[str, str] = field(default_factory=dict)  # by name in the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One row of the table, by its program. docs/clients.md says which version was tried.

    Tokens are those of the newest, typed at on a terminal in a small folder, as Qwen3.5 to 3.8
    count; a person's own instructions are not in them.
    """

    title: str
    package: str  # of npm
    set_up: Callable[[Target, str], Setup]  # and the folder
    first_prompt: int  # tokens: instructions, tools and one short question
    small_prompt: int = 0  # the same with --small; 0: it has none
    spare: int = 0  # tokens that it keeps free itself, beside those of its reply
    start_arguments: tuple[str, ...] = ()  # where the person gives none
    needs_proxy: bool = False  # it speaks an API that only LiteLLM's port has

    def count_first_prompt(self, *, is_small: bool) -> int:
        if is_small and self.small_prompt:
            return self.small_prompt
        return self.first_prompt

    def least_context(
        self, *, is_small: bool = False, n_work: int = CALL_TOKENS
    ) -> int:
        """Tokens of context for its first prompt, `n_work` of work, and a reply's part."""
        n_prompt = self.count_first_prompt(is_small=is_small)
        n_used = n_prompt + self.spare + n_work
        n_hundreds = -(-n_used * REPLY_PART // (REPLY_PART - 1) // 100)
        return n_hundreds * 100

    def count_work(self, target: Target) -> int:
        """Tokens that it can read and write after its first prompt, until it compacts."""
        n_prompt = self.count_first_prompt(is_small=target.is_small)
        return target.context - target.output - self.spare - n_prompt


def set_up_claude(target: Target, folder: str) -> Setup:
    """The variables stand in a settings file, too, which wins over the person's own.

    In its lean mode Claude Code reads no ANTHROPIC_AUTH_TOKEN, and asks whether it should
    use an ANTHROPIC_API_KEY ("No (recommended)"): it gets the key from a command.
    """
    key_name = KEY_VARIABLE if target.is_small else "ANTHROPIC_AUTH_TOKEN"
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        key_name: target.key,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.small_model or target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
        # It would count down in the system prompt and after each result.
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.small_model:
        environment["CLAUDE_CODE_SUBAGENT_MODEL"] = target.small_model
    # why(L-185): in its automatic mode it waits for a check that is not done here.
    settings: Json = {"env": environment, "disableAutoMode": "disable"}
    if target.is_small:
        environment["CLAUDE_CODE_SIMPLE"] = "1"
        settings["apiKeyHelper"] = f"printenv {KEY_VARIABLE}"

    clouds = ("BEDROCK", "VERTEX", "FOUNDRY")
    elsewhere = {f"CLAUDE_CODE_USE_{cloud}" for cloud in clouds}
    elsewhere |= {"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"} - {key_name}
    return Setup(
        environment=environment,
        unset=tuple(sorted(elsewhere)),
        arguments=("--settings", f"{folder}/claude.json"),
        files={"claude.json": json.dumps(settings) + "\n"},
    )


# why(L-187): a model that Codex has no metadata of gets no apply_patch, and instructions that
# describe another form of it. With a catalogue it gets these, a tenth as long.
CODEX_INSTRUCTIONS: Final = """\
You are Codex, a coding agent in the terminal of a user. You work in the user's folder with \
the tools that you are given. Go on until the task is done, then stop.

- Look before you change: search with `rg`, read the files that matter. Never guess what a \
file contains.
- Do what was asked, with the smallest change that does it, in the style of the code around \
it. Do not mend what is not part of the task; mention it.
- Instructions in AGENTS.md hold for its folder and everything below; those of a deeper \
folder win, and the user's words win over all.
- Changes in the folder that you did not make are the user's: keep them. Do not commit, \
and do not make branches, unless you are asked to.
- Check your work with the tests or the build that are there, the nearest first.
- Before a longer stretch of work, say in one sentence what you do next.
- At the end say in a few plain lines what you changed, in which files, and what is left \
or could not be checked.

Change files with apply_patch. It takes one text, a patch in this form; the lines around a \
change are copied from the file exactly, and begin with a space:

*** Begin Patch
*** Update File: src/greet.py
@@ def greet(name):
     name = name.strip()
-    print(name)
+    print(f"Hello, {name}")
     return name
*** Add File: docs/new.md
+The first line
*** Delete File: old.txt
*** End Patch

Several files may be in one patch, and `*** Move to: PATH` after `*** Update File: PATH` \
renames one. A patch that does not fit is refused and changes nothing: read the file again \
and write the patch anew. After one that succeeded the file need not be read again.
"""


def set_up_codex(target: Target, folder: str) -> Setup:
    """A catalogue tells Codex of the model that is served.

    Nothing in it lets Codex search for tools: all tools are in each request.
    """
    levels = [{"effort": effort, "description": ""} for effort in target.efforts]
    model = {
        "slug": target.model,
        "display_name": target.model,
        "base_instructions": CODEX_INSTRUCTIONS,
        "context_window": target.context,
        "supported_reasoning_levels": levels,
        "apply_patch_tool_type": "freeform",
        "shell_type": "unified_exec",
        "supports_search_tool": False,
        "supports_parallel_tool_calls": True,
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
    }
    table = f"model_providers.{PROVIDER}"
    settings = {
        "model": target.model,
        "model_provider": PROVIDER,
        "model_context_window": target.context,
        "model_catalog_json": f"{folder}/models.json",
        "web_search": "disabled",
        f"{table}.name": PROVIDER,
        f"{table}.base_url": f"{target.url}/v1",
        f"{table}.env_key": KEY_VARIABLE,
        f"{table}.stream_idle_timeout_ms": 3_600_000,
    }
    arguments: list[str] = []
    for name, value in settings.items():
        arguments += ["-c", f"{name}={json.dumps(value)}"]
    return Setup(
        environment={KEY_VARIABLE: target.key},
        arguments=tuple(arguments),
        files={"models.json": json.dumps({"models": [model]}, indent=1) + "\n"},
    )


FREE: Final = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}


def describe_provider(target: Target, *, key: str, **of_model: Json) -> Json:
    """The server and its model as PI and OpenClaw write them down."""
    model = {
        "id": target.model,
        "name": target.model,
        "reasoning": True,
        "input": target.inputs,
        "contextWindow": target.context,
        "maxTokens": target.output,
        **of_model,
    }
    api = {"api": "openai-completions", "apiKey": key}
    return {"baseUrl": f"{target.url}/v1", **api, "models": [model]}


def set_up_pi(target: Target, folder: str) -> Setup:
    """An extension registers the provider for this run; models.json is not touched."""
    provider = describe_provider(target, key=f"${KEY_VARIABLE}", cost=FREE)
    call = f"pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)})"
    chosen = ("--provider", PROVIDER, "--model", target.model)
    return Setup(
        environment={KEY_VARIABLE: target.key},
        arguments=("--extension", f"{folder}/start-llm.mjs", *chosen),
        files={"start-llm.mjs": f"export default (pi) => {call};\n"},
    )


def set_up_opencode(target: Target, _folder: str) -> Setup:
    limit = {"context": target.context, "output": target.output}
    model = {
        "tool_call": True,
        "reasoning": True,
        "attachment": "image" in target.inputs,
        "modalities": {"input": target.inputs, "output": ["text"]},
        "limit": limit,
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: model},
    }
    name = f"{PROVIDER}/{target.model}"
    settings = {"provider": {PROVIDER: provider}, "model": name, "small_model": name}
    return Setup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def set_up_openclaw(target: Target, folder: str) -> Setup:
    # Else it keeps the level of thinking that was chosen to itself.
    compat = {"supportsReasoningEffort": True}
    provider = describe_provider(target, key=target.key, compat=compat)
    settings = {
        "models": {"providers": {PROVIDER: provider}},
        "agents": {"defaults": {"model": {"primary": f"{PROVIDER}/{target.model}"}}},
        "gateway": {"mode": "local"},
    }
    # why(L-188): else a path in its system prompt is another one at each start.
    own_state = str(Path.home() / ".openclaw")
    return Setup(
        environment={
            "OPENCLAW_CONFIG_PATH": f"{folder}/openclaw.json",
            "OPENCLAW_STATE_DIR": os.environ.get("OPENCLAW_STATE_DIR") or own_state,
        },
        files={"openclaw.json": json.dumps(settings, indent=1) + "\n"},
    )


def set_up_copilot(target: Target, _folder: str) -> Setup:
    return Setup(
        environment={
            "COPILOT_OFFLINE": "true",
            "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
            "COPILOT_PROVIDER_API_KEY": target.key,
            "COPILOT_MODEL": target.model,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(target.context - target.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(target.output),
        },
        unset=("COPILOT_PROVIDER_TYPE", "COPILOT_PROVIDER_BEARER_TOKEN"),
    )


def set_up_qwen(target: Target, folder: str) -> Setup:
    """No variable has its context window: that is in the lowest of its settings files."""
    settings = {
        "model": {"generationConfig": {"contextWindowSize": target.context}},
        # After each turn a sub-agent would read the whole conversation, all of it anew.
        "memory": {"enableManagedAutoMemory": False},
    }
    return Setup(
        environment={
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"{folder}/qwen.json",
        },
        arguments=("--auth-type", "openai"),
        files={"qwen.json": json.dumps(settings) + "\n"},
    )


CLIENTS: Final = {
    "claude": Client(
        title="Claude Code",
        package="@anthropic-ai/claude-code",
        set_up=set_up_claude,
        first_prompt=13_300,
        small_prompt=1_200,
        spare=3_000,  # seen: it refuses prompts that leave fewer beside the reply
    ),
    "codex": Client(
        title="Codex",
        package="@openai/codex",
        set_up=set_up_codex,
        first_prompt=8_900,
        needs_proxy=True,
    ),
    "pi": Client(
        title="PI",
        package="@earendil-works/pi-coding-agent",
        set_up=set_up_pi,
        first_prompt=1_500,
    ),
    "opencode": Client(
        title="opencode",
        package="opencode-ai",
        set_up=set_up_opencode,
        first_prompt=7_800,
    ),
    "openclaw": Client(
        title="OpenClaw",
        package="openclaw",
        set_up=set_up_openclaw,
        first_prompt=13_100,
        start_arguments=("chat",),
    ),
    "copilot": Client(
        title="GitHub Copilot CLI",
        package="@github/copilot",
        set_up=set_up_copilot,
        first_prompt=13_700,
    ),
    "qwen": Client(
        title="Qwen Code",
        package="@qwen-code/qwen-code",
        set_up=set_up_qwen,
        first_prompt=20_100,
    ),
}


# The server ------------------------------------------------------------------------------------


def read_settings(
    env_file: Path = ENV_FILE, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The server's settings that are not empty: the environment's, which win, and .env's.

    python-dotenv reads that, as for the server, in its environment. Raises LaunchError.
    """
    written: dict[str, str | None] = {}
    if env_file.exists():
        program = "import dotenv, json, sys; "
        program += "print(json.dumps(dotenv.dotenv_values(sys.argv[1])))"
        python = ROOT / ".venv" / "bin" / "python"
        command = [str(python) if python.exists() else sys.executable, "-c", program]
        command.append(str(env_file))
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            fault = (result.stderr.strip() or "no message").splitlines()[-1]
            raise LaunchError(f"{env_file} cannot be read: {fault}")
        written = json.loads(result.stdout)
    stripped = {n: (value or "").strip() for n, value in {**written, **environ}.items()}
    return {name: value for name, value in stripped.items() if value}


def url_of(host: str, port: str) -> str:
    """Where clients on this machine find who listens there."""
    if host in {"0.0.0.0", "::", "localhost"}:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def first_key(settings: Mapping[str, str], *names: str) -> str:
    """The first key of the first of these settings that has one, or nothing."""
    keys = [key.strip() for name in names for key in settings.get(name, "").split(",")]
    return next(filter(None, keys), "")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of the two servers is: start-llm, or LiteLLM beside it."""

    url: str  # without /v1
    key: str  # empty: it needs none

    def get(self, path: str) -> tuple[int, Json]:
        """Status and body, empty where it is no JSON object.

        Raises OSError or HTTPException where nothing answers, ValueError for a bad URL.
        """
        parts = urlsplit(self.url)
        connect: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            connect = http.client.HTTPSConnection
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with closing(connect(parts.netloc, timeout=TIMEOUT_SECONDS)) as connection:
            connection.request("GET", parts.path + path, headers=headers)
            response = connection.getresponse()
            text = response.read()
        try:
            body = json.loads(text)
        except ValueError:
            body = {}
        return response.status, body if isinstance(body, dict) else {}


def place_of(settings: Mapping[str, str]) -> Place:
    """The server that these settings start; of several keys the first."""
    host = settings.get("MLX_HOST", "127.0.0.1")
    url = url_of(host, settings.get("MLX_PORT", "8080"))
    return Place(url, first_key(settings, "API_KEY"))


def ask(place: Place, path: str) -> tuple[int, Json]:
    """Status and body of one that has answered before. Raises LaunchError."""
    try:
        return place.get(path)
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(f"{place.url} went away: {error}") from error


def find_places(
    options: argparse.Namespace, settings: Mapping[str, str]
) -> tuple[Place, Place]:
    """The server, and LiteLLM. Raises LaunchError."""
    names = ("PROXY_PORT",) if options.url else ("MLX_PORT", "PROXY_PORT")
    for name in names:
        port = settings.get(name, "1")
        if not port.isdecimal() or not 1 <= int(port) <= 65_535:
            raise LaunchError(f"{port} is no port: see {name} in .env.")
    usual = place_of(settings)
    url = options.url.rstrip("/").removesuffix("/v1") or usual.url

    proxy_host = settings.get("PROXY_HOST", "127.0.0.1")
    proxy_url = url_of(proxy_host, settings.get("PROXY_PORT", "4000"))
    proxy_key = options.key or first_key(settings, "PROXY_API_KEY", "API_KEY")
    return Place(url, options.key or usual.key), Place(proxy_url, proxy_key)


@dataclass(frozen=True, slots=True)
class Server:
    """What answers: start-llm, or LiteLLM beside it, where only that can be reached."""

    place: Place
    entry: Json  # of its list of models
    status: Json  # GET /v1/status; empty where it is not served, as on LiteLLM's port

    @property
    def is_proxy(self) -> bool:
        """LiteLLM lists names alone."""
        return "id" in self.entry and "context_length" not in self.entry


def find_server(place: Place, proxy: Place) -> Server:
    """What answers there. `proxy` has the key for LiteLLM. Raises LaunchError."""
    if check_health(place) == 401:  # LiteLLM: start-llm asks for no key there
        place = replace(place, key=proxy.key)
        check_health(place)
    models = [entry for entry in list_models(place) if isinstance(entry, dict)]
    _, status = ask(place, "/v1/status")
    return Server(place, models[0] if models else {}, status)


def find_target(server: Server, *, is_small: bool) -> Target:
    """What a client is told about the server. Raises LaunchError."""
    place = server.place
    context = server.entry.get("context_length")
    if server.is_proxy:  # which lists names alone
        _, body = ask(place, "/model/info")
        with suppress(LookupError, TypeError):
            context = body["data"][0]["model_info"]["max_input_tokens"]
    if not isinstance(context, int):
        raise LaunchError(f"{place.url} is no start-llm: it names no model.")

    report = server.status.get("model")
    efforts = report.get("reasoning_efforts") if isinstance(report, dict) else None
    return Target(
        url=place.url,
        key=place.key or NO_KEY,
        model=str(server.entry["id"]),
        context=context,
        is_small=is_small,
        efforts=tuple(efforts) if isinstance(efforts, list) else USUAL_EFFORTS,
        inputs=tuple(server.entry.get("input_modalities", ("text",))),
    )


def check_small_model(proxy: Target, name: str) -> None:
    """Raise LaunchError unless LiteLLM knows this model by its name."""
    key = "" if proxy.key == NO_KEY else proxy.key
    ids = [str(entry.get("id")) for entry in list_models(Place(proxy.url, key))]
    if name not in ids:
        raise LaunchError(
            f"no model {name!r} is behind {proxy.url}, which has {', '.join(ids)}: set "
            f"PROXY_MODELS={name}=http://127.0.0.1:8081 in .env, where its server listens "
            "there, and start this server again."
        )


PROXY_FAULTS: Final = {
    "off": "runs none: ENABLE_PROXY is false there, or LiteLLM is not installed",
    "port_taken": "has none: another program has the port; stop that, or set PROXY_PORT "
    "in .env, and start the server again",
    "given_up": "could not start it: the server's console and litellm-PORT.log beside "
    "its session logs say why",
    "starting": f"has not started it in {PROXY_WAIT_SECONDS:.0f} seconds: its console "
    "says how far it is",
}


def to_proxy(client: Client, target: Target, server: Server, proxy: Place) -> Target:
    """The same by LiteLLM of this server, under the name that it lists first.

    `proxy` is where the settings of this shell have it. Raises LaunchError.
    """
    url = server.place.url
    needs = f"{client.title} needs what only LiteLLM has"
    report = server.status.get("proxy")
    if not isinstance(report, dict):
        say(
            f"{url} does not say where its LiteLLM is; it is looked for at "
            f"{proxy.url}, as the settings here have it"
        )
    else:
        if report.get("state") == "starting":
            say("LiteLLM is still starting beside the server; this waits for it")
        deadline = time.monotonic() + PROXY_WAIT_SECONDS
        while report.get("state") == "starting" and time.monotonic() < deadline:
            time.sleep(0.5)
            _, status = ask(server.place, "/v1/status")
            report = status.get("proxy") or {}
        state = report.get("state")
        if state != "up" or not report.get("url"):
            reason = PROXY_FAULTS.get(str(state), f"says that it is {state}")
            raise LaunchError(f"{needs}, and the server at {url} {reason}.")
        proxy = replace(proxy, url=seen_from_here(str(report["url"]), url))

    try:
        proxy.get("/health/liveliness")
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(
            f"{needs}, and nothing answers at {proxy.url}: ENABLE_PROXY is false, or it "
            "listens elsewhere (PROXY_HOST, PROXY_PORT)."
        ) from error
    models = list_models(proxy)
    model = str(models[0].get("id", target.model)) if models else target.model
    return replace(target, url=proxy.url, key=proxy.key or NO_KEY, model=model)


def seen_from_here(proxy_url: str, server_url: str) -> str:
    """The proxy's URL with the server's host, where the server names its own loopback."""
    proxy = urlsplit(proxy_url)
    host = urlsplit(server_url).hostname or ""
    if proxy.hostname not in LOOPBACK or host in LOOPBACK:
        return proxy_url
    return url_of(host, str(proxy.port))


HEALTH_FAULTS: Final = {
    "loading": "still loads its model; run this again when its console says that the "
    "model is served.",
    "draining": "is being drained, and takes no new sessions.",
    "error": "has failed: {error}",
}


def check_health(server: Place) -> int:
    """The status of an answer, 200 or 401. Raises LaunchError where it cannot work now."""
    start = f"start it with: python3.12 {ROOT / 'install_and_run.py'}"
    start += " (or give --url, where it listens elsewhere)"
    try:
        status, body = server.get("/health")
    except (OSError, http.client.HTTPException, ValueError) as error:
        sentence = f"no server answers at {server.url} ({error}); {start}"
        raise LaunchError(sentence) from error
    if status == 401:
        return status
    state = body.get("status")
    if str(state) in HEALTH_FAULTS:
        reason = HEALTH_FAULTS[str(state)].format(error=body.get("error"))
        raise LaunchError(f"the server at {server.url} {reason}")
    if status != 200 or state not in ("ok", "asleep"):
        raise LaunchError(f"what answers at {server.url} is no start-llm; {start}")
    return status


def list_models(place: Place) -> list[Json]:
    """The entries of GET /v1/models. Raises LaunchError."""
    status, body = ask(place, "/v1/models")
    if status == 401:
        raise LaunchError(
            f"{place.url} does not take the key of this shell or .env; set the one that the "
            "server was started with (API_KEY or PROXY_API_KEY), or give it with --key."
        )
    if status != 200:
        raise LaunchError(f"{place.url}/v1/models answers with status {status}.")
    models = body.get("data")
    return models if isinstance(models, list) else []


# The client ------------------------------------------------------------------------------------


def explain_no_room(client: Client, target: Target) -> str:
    """Why the client cannot work in this context, in one sentence; empty if it can."""
    is_small = target.is_small
    least = client.least_context(is_small=is_small)
    if target.context >= least:
        return ""

    n_prompt = client.count_first_prompt(is_small=is_small)
    advice = "serve a smaller model, or allow more (MEMORY_LIMIT_BYTES, MAX_KV_SIZE)"
    fitting = clients_with_room(target.context)
    if target.model == DEMO_MODEL:
        advice = DEMO_SENTENCE
    elif fitting:
        advice += f"; room is there for {', '.join(fitting)}"
    return (
        f"{client.title} needs {least:,} tokens of context (its first prompt alone is some "
        f"{n_prompt:,}), and {target.model} at {target.url} has {target.context:,}: {advice}."
    )


def clients_with_room(context: int, *, n_work: int = CALL_TOKENS) -> list[str]:
    """The clients that can do so much work in a context, one with --small if only so."""
    names = []
    for client in CLIENTS.values():
        if client.least_context(n_work=n_work) <= context:
            names.append(client.title)
        elif client.least_context(is_small=True, n_work=n_work) <= context:
            names.append(f"{client.title} with --small")
    return names


def explain_compaction(name: str, target: Target) -> str:
    """How often a client would sum up its conversation, and which ones less; or nothing.

    Nothing if it can work for an hour before.
    """
    client = CLIENTS[name]
    n_work = client.count_work(target)
    if n_work >= HOUR_TOKENS:
        return ""

    others = {}
    if client.small_prompt:
        others[f"{name} --small"] = client.count_work(replace(target, is_small=True))
    others["pi"] = CLIENTS["pi"].count_work(target)
    better = [f"`launch {c}` after {n:,}" for c, n in others.items() if n > n_work]
    advice = f"; {' and '.join(better)}" if better else ""
    n_calls = max(1, n_work // CALL_TOKENS)
    often = f"{n_calls} calls" if n_calls > 1 else "call"
    return (
        f"in {target.context:,} tokens of context {client.title} sums up its conversation "
        f"(compacts) after {max(0, n_work):,} tokens of work, about every {often}{advice}. "
        "KV_BITS=8 in the server's .env nearly doubles the context, if it is not set."
    )


def run_client(
    program: str, client: Client, target: Target, arguments: Sequence[str]
) -> int:
    """Run the client in this terminal until it ends. Returns its exit status."""
    with TemporaryDirectory(prefix="start-llm-") as folder:  # for its owner alone
        setup = client.set_up(target, folder)
        for name, text in setup.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        environment = {n: t for n, t in os.environ.items() if n not in setup.unset}
        # The server is reached directly, whatever proxy is set.
        host = urlsplit(target.url).hostname
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, (environment.get(name), host)))
        try:
            command = [program, *setup.arguments, *arguments]
            pid = os.posix_spawn(program, command, environment | setup.environment)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.ENOEXEC:
                # npm puts a text in place of a native program until its own script has run.
                reason = "it is not wholly installed; install it again, without --ignore-scripts"
            raise LaunchError(f"{program} cannot be started: {reason}") from error
        pass_signals_on(pid)
        return wait_for(pid)


def pass_signals_on(pid: int) -> None:
    """Send the client what is sent to us, except what it gets from the terminal anyway."""

    def handle(number: int, _frame: object) -> None:
        # Ctrl-C at a terminal goes to our process group, and so to the client.
        with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
            is_in_foreground = os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
            if number == signal.SIGINT and is_in_foreground:
                return
        os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)


def wait_for(pid: int) -> int:
    """The exit status of the client, or 128 and its signal. When it stops, so do we."""
    while True:
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        # The shell sees that we stop, too, and wakes us with `fg`.
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(pid, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def show_setup(
    name: str, target: Target, arguments: Sequence[str], *, shows_key: object
) -> None:
    """Print command, environment and files, the key masked unless it is to be seen."""
    client = CLIENTS[name]
    is_masked = not shows_key and target.key != NO_KEY
    shown = replace(target, key=MASK) if is_masked else target
    setup = client.set_up(shown, "FOLDER")
    if setup.unset:
        print(f"unset {' '.join(setup.unset)}")
    for variable, text in setup.environment.items():
        print(f"export {variable}={shlex.quote(text)}")
    print(shlex.join([name, *setup.arguments, *arguments]))
    for file, text in setup.files.items():
        print(f"# FOLDER/{file}, which is removed when {client.title} ends:")
        print("\n".join(f"#   {line}" for line in text.splitlines()))
    say("the key is masked; --show-key shows it" if is_masked else "")


def _client_name(text: str) -> str:
    """The name of a client. Raises ArgumentTypeError, with the one that is meant."""
    if text in CLIENTS:
        return text
    meant = difflib.get_close_matches(text, CLIENTS, n=1)
    question = f": did you mean {meant[0]}?" if meant else "."
    names = ", ".join(CLIENTS)
    raise argparse.ArgumentTypeError(f"no client {text!r}{question} There are {names}")


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Everything after the first -- is for the client. Exits with 2 and a usage line."""
    n_own = [*arguments, "--"].index("--")

    parser = argparse.ArgumentParser(
        prog="launch",
        description="Start a coding agent on the running server, for this run alone.",
        epilog="What follows -- goes to the client: launch claude -- -p 'Hello'",
        allow_abbrev=False,
    )
    parser.add_argument("client", type=_client_name)
    text = "only show the command and environment"
    parser.add_argument("--print", action="store_true", help=text)
    text = "a short system prompt (claude alone)"
    parser.add_argument("--small", action="store_true", help=text)
    text = "a model of PROXY_MODELS, for sub-agents and the like (claude alone)"
    parser.add_argument("--small-model", default="", metavar="NAME", help=text)
    parser.add_argument("--show-key", action="store_true", help="--print shows the key")
    parser.add_argument("--url", default="", help="the server; else MLX_HOST, MLX_PORT")
    parser.add_argument("--key", default="", help="its key; else the first of API_KEY")
    options, unknown = parser.parse_known_args(arguments[:n_own])

    if unknown:
        parser.error(f"what is for the client goes after --: -- {shlex.join(unknown)}")
    if options.small and not CLIENTS[options.client].small_prompt:
        parser.error(f"--small is for claude: {options.client} has no shorter prompt")
    if options.small_model and options.client != "claude":
        parser.error(f"--small-model is for claude: {options.client} has one model")
    options.arguments = arguments[n_own + 1 :]
    return options


def launch(options: argparse.Namespace) -> int:
    """Do what was asked for. Returns the exit status. Raises LaunchError."""
    client = CLIENTS[options.client]
    place, proxy = find_places(options, read_settings(ENV_FILE, os.environ))
    server = find_server(place, proxy)
    target = find_target(server, is_small=options.small)
    no_room = explain_no_room(client, target)
    if no_room and not options.print and not options.arguments:
        raise LaunchError(no_room)
    program = shutil.which(options.client)
    if program is None and not options.print:
        raise LaunchError(
            f"{client.title} is not installed (no `{options.client}` on PATH); install it "
            f"with: npm install -g {client.package}"
        )
    say(f"{DEMO_SENTENCE}." if target.model == DEMO_MODEL else "")
    # Of several servers a conversation is to find its own, and LiteLLM knows which.
    wants_proxy = (
        client.needs_proxy or server.status.get("replicas") or options.small_model
    )
    if not server.is_proxy and wants_proxy:
        target = to_proxy(client, target, server, proxy)
    if options.small_model:
        check_small_model(target, options.small_model)
        target = replace(target, small_model=options.small_model)

    arguments = options.arguments or client.start_arguments
    if options.print:
        shows_key = options.show_key or options.key
        show_setup(options.client, target, arguments, shows_key=shows_key)
        say(no_room)
        return 0

    # Its arguments may make its prompt another, or none (--version).
    say(no_room or explain_compaction(options.client, target))
    say(
        f"{client.title} with {target.model} at {target.url}, "
        f"{target.context:,} tokens of context"
    )
    say("its settings for this run alone: --print shows them")
    assert program is not None
    return run_client(program, client, target, arguments)


def main() -> int:
    options = read_arguments(sys.argv[1:])
    try:
        return launch(options)
    except LaunchError as problem:
        say(str(problem))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
