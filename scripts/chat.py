"""A small chat with a running server, in the terminal: to see the cache work by hand.

    .venv/bin/python scripts/chat.py [--url http://127.0.0.1:8080] [--key KEY] [--system TEXT]
        [--no-tools]

Where the server listens and which key it wants is read as the server reads it: MLX_HOST, MLX_PORT
and API_KEY from the environment or from .env.

The answer streams in, thinking dimmed. After each turn one line says how many tokens the prompt
had, how many of them were cached, and the seconds to the first token (TTFT): ask twice, and see
that only what is new is read. The model may list and read what lies below the folder that the
chat was started in (--no-tools: it may not). Nothing is changed, and no command is run.

    /new    forget the conversation        /quit or Ctrl-D    leave        Ctrl-C    stop an answer
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dotenv import dotenv_values
from rich.console import Console
from rich.text import Text

with suppress(ImportError):  # arrow keys, and what was typed before
    import readline  # noqa: F401

Body = dict[str, Any]
ROOT: Final = Path(__file__).resolve().parent.parent
SETTINGS: Final = ROOT / ".env"
GARDEN: Final = ROOT / "examples" / "garden"
DEMO_MODEL: Final = "demo"
MOST_CALLS: Final = 8  # in a row, then the person has the word again
MOST_CHARACTERS: Final = 20_000  # of a file
TIMEOUT_SECONDS: Final = 600.0  # without a byte; a long prefill says nothing


class ChatError(Exception):
    """What went wrong, in one sentence for the person at the terminal."""


# Tools: two that only look -------------------------------------------------------------


def tool(name: str, description: str, parameter: str, about: str) -> Body:
    """A tool with one text parameter, as the API wants it."""
    properties = {parameter: {"type": "string", "description": about}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS: Final = [
    tool("list_files", "List the files in a folder.", "path", "The folder to list"),
    tool(
        "read_file", "Read a file and return its text.", "path", "The path of the file"
    ),
]


def use_tool(name: str, arguments: str, root: Path) -> str:
    """What a call gives, or why it gives nothing: the model is told either way."""
    try:
        path = (root / str(json.loads(arguments)["path"])).resolve()
        if not path.is_relative_to(root.resolve()):
            return "Error: that is outside the folder of this chat"
        if name == "list_files":
            entries = sorted(path.iterdir())
            return (
                "\n".join(f"{e.name}/" if e.is_dir() else e.name for e in entries)
                or "(empty)"
            )
        if name == "read_file":
            with path.open(encoding="utf-8", errors="replace") as file:
                return file.read(MOST_CHARACTERS)
        return f"Error: there is no tool {name}"
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        return f"Error: {_say_in_words(error, name)}"


def _say_in_words(error: Exception, tool_name: str) -> str:
    """What went wrong, without the path: a small model copies it wrongly."""
    kind = "folder" if tool_name == "list_files" else "file"
    match error:
        case FileNotFoundError():
            words = f"there is no such {kind}"
        case NotADirectoryError():
            words = "that is a file"
        case IsADirectoryError():
            words = "that is a folder"
        case OSError(strerror=str(reason)):
            words = reason
        case _:
            words = str(error)
    return words


# The server ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    url: str
    key: str = ""

    @contextmanager
    def asked(
        self, path: str, body: Body | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request that went well. Raises ChatError."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        headers = {"Content-Type": "application/json", "User-Agent": "start-llm-chat"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        full = parts.path.rstrip("/").removesuffix("/v1") + path
        sent = json.dumps(body) if body else None
        try:
            with closing(kind(parts.netloc, timeout=TIMEOUT_SECONDS)) as connection:
                connection.request("POST" if body else "GET", full, sent, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise ChatError(refusal(response.status, response.read()))
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(unreachable(self.url, error)) from error

    def stream(self, body: Body) -> Iterator[Body]:
        """The chunks of one chat completion. Raises ChatError."""
        with self.asked("/v1/chat/completions", body) as response:
            for line in response:
                text = line.decode("utf-8").strip().removeprefix("data:").strip()
                if text.startswith("{"):
                    yield json.loads(text)

    def model(self) -> str:
        """Which model answers. Raises ChatError."""
        with self.asked("/v1/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self.url} is no server of this kind.") from error


def read_settings() -> dict[str, str | None]:
    """The settings as the server reads them: the environment goes before .env."""
    return {**dotenv_values(SETTINGS), **os.environ}


def usual_server() -> Server:
    """The server of this folder's settings."""
    return server_of(read_settings())


def server_of(settings: Mapping[str, str | None]) -> Server:
    """The server that these settings start; of several keys the first."""

    def setting(name: str) -> str:
        return (settings.get(name) or "").strip()

    host = setting("MLX_HOST")
    if host in {"", "0.0.0.0", "::", "localhost"}:  # all addresses, so loopback's too
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    key = next(filter(None, map(str.strip, setting("API_KEY").split(","))), "")
    return Server(f"http://{host}:{setting('MLX_PORT') or 8080}", key)


def unreachable(url: str, error: Exception) -> str:
    """What to do about a server that does not answer."""
    if isinstance(error, ConnectionRefusedError):
        return (
            f"No server answers at {url}. Start one with: python3.12 install_and_run.py"
        )
    return f"The server at {url} went away: {str(error) or type(error).__name__}"


def refusal(status: int, body: bytes) -> str:
    """The server's own words, if it said any."""
    try:
        return f"The server says {status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"The server says {status}."


# One turn -------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """A reply as it comes in, and what it cost."""

    thought: str = ""
    content: str = ""
    calls: dict[int, Body] = field(default_factory=dict)
    usage: Body = field(default_factory=dict)
    first_seconds: float | None = None

    def take(self, delta: Body) -> Text:
        """Add a delta; returns what of it is to be shown."""
        thought = delta.get("reasoning_content") or ""
        content = delta.get("content") or ""
        self.thought += thought
        self.content += content

        for part in delta.get("tool_calls") or ():
            function = {"name": "", "arguments": ""}
            new_call = {"id": "", "type": "function", "function": function}
            call = self.calls.setdefault(part["index"], new_call)
            call["id"] = part.get("id") or call["id"]
            for name, text in part.get("function", {}).items():
                call["function"][name] += text or ""

        gap = "\n" if content and self.thought and content == self.content else ""
        return Text.assemble((thought, "dim italic"), gap, content)

    def message(self) -> Body:
        """As it goes back to the server."""
        message: Body = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        return message

    def cost(self, model: str) -> str:
        """The line below a turn. A reply of the demo model is marked as such."""
        prompt = self.usage.get("prompt_tokens", 0)
        details = self.usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens", 0)
        share = f" ({cached / prompt:.0%})" if prompt else ""
        ttft = "-" if self.first_seconds is None else f"{self.first_seconds:.2f} s"
        written = self.usage.get("completion_tokens", 0)
        read = f"prompt {prompt}, cached {cached}{share}, new {prompt - cached}"
        mark = "demo model · " if model == DEMO_MODEL else ""
        return f"{mark}{read} · TTFT {ttft} · reply {written}"


@dataclass(slots=True)
class Chat:
    """A conversation and where it is shown."""

    server: Server
    console: Console
    root: Path
    tools: list[Body]
    model: str = "any"
    messages: list[Body] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """One turn, with the calls it takes. What fails leaves the conversation as it was."""
        n_messages = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(MOST_CALLS):
                answer = self.hear()
                self.messages.append(answer.message())
                for call in answer.calls.values():
                    self.answer_call(call)
                if not answer.calls:
                    return
            self.console.print(f"(stopped after {MOST_CALLS} calls)", style="yellow")
        except (ChatError, KeyboardInterrupt) as error:
            del self.messages[n_messages:]
            self.console.print(
                f"\n{str(error) or 'stopped'}", style="red", markup=False
            )

    def hear(self) -> Answer:
        """One reply, shown as it comes."""
        body: Body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.tools:
            body["tools"] = self.tools

        answer = Answer()
        began = time.monotonic()
        is_whole = False
        for chunk in self.server.stream(body):
            if "error" in chunk:
                raise ChatError(
                    f"The server says: {chunk['error'].get('message', 'error')}"
                )
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk.get("choices", ()):
                is_whole = is_whole or bool(choice.get("finish_reason"))
                shown = answer.take(choice.get("delta", {}))
                if answer.first_seconds is None and (shown.plain or answer.calls):
                    answer.first_seconds = time.monotonic() - began
                self.console.print(shown, end="", soft_wrap=True)
        if not is_whole:
            raise ChatError(f"The server at {self.server.url} went away in mid-answer.")

        self.console.print()
        self.console.print(
            answer.cost(self.model), style="dim cyan", markup=False, highlight=False
        )
        return answer

    def answer_call(self, call: Body) -> None:
        """Do what the model asked for, and show that it was done."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        self.console.print(
            f"→ {name} {arguments}", style="green", markup=False, highlight=False
        )
        result = use_tool(name, arguments, self.root)
        self.messages.append(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
        )


def greeting(model: str, folder: Path, *, has_tools: bool = True) -> str:
    """The lines above the first question. `folder`: where the chat was started."""
    usage = f"{model} · /new forgets the conversation, /quit leaves"
    if model != DEMO_MODEL:
        return usage

    knows = "The demo model is tiny. It knows sums of two numbers below 100"
    questions = ["What is 17 + 25?"]
    if has_tools and folder == GARDEN:
        knows += ", and lists and reads the files of this folder"
        questions += ["Which files are here?", "What does plan.md say?"]
    elif has_tools:
        knows += f"; started in {GARDEN}, it also lists and reads the files there"
    advice = "For all else serve a real model: set MODEL_PATH, or start with --model."
    return f"{usage}\n{knows}. {advice}\nTry: {'   '.join(questions)}"


def converse(chat: Chat, system: str) -> None:
    """Turns until the person has had enough."""

    def begin() -> None:
        chat.messages[:] = [{"role": "system", "content": system}] if system else []

    begin()
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/new":
            begin()
        elif text:
            chat.ask(text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = usual_server()
    parser.add_argument(
        "--url", default=usual.url, help="default: as MLX_HOST and MLX_PORT say"
    )
    parser.add_argument(
        "--key", default=usual.key, help="default: the first of API_KEY"
    )
    parser.add_argument("--system", default="", help="a system prompt")
    parser.add_argument(
        "--no-tools", action="store_true", help="offer the model no tools"
    )
    chosen = parser.parse_args()
    console = Console()
    url = chosen.url if "://" in chosen.url else f"http://{chosen.url}"
    try:  # what http.client would fail on
        _ = urlsplit(url).port, chosen.key.encode("latin-1")
    except ValueError as error:
        sys.exit(f"--url or --key cannot be used: {error}")
    server = Server(url.rstrip("/"), chosen.key)
    chat = Chat(server, console, Path.cwd(), [] if chosen.no_tools else TOOLS)
    try:
        chat.model = server.model()
        lines = greeting(chat.model, chat.root, has_tools=bool(chat.tools))
    except (ChatError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "stopped")
    console.print(lines, style="dim", markup=False, highlight=False)
    converse(chat, chosen.system)


if __name__ == "__main__":
    main()
