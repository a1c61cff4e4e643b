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

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent_steps import Body, CannotAsk, Reply, Server, tool
from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))

from launch import DEMO_MODEL, ROOT, place_of, read_settings

with suppress(ImportError):  # arrow keys, and what was typed before
    import readline  # noqa: F401

GARDEN: Final = ROOT / "examples" / "garden"
MOST_CALLS: Final = 8  # in a row, then the person has the word again
MOST_CHARACTERS: Final = 20_000  # of a file
TIMEOUT_SECONDS: Final = 600.0  # without a byte; a long prefill says nothing


FOLDER: Final = {"type": "string", "description": "The folder to list"}
FILE: Final = {"type": "string", "description": "The path of the file"}
TOOLS: Final = [
    tool("list_files", "List the files in a folder.", path=FOLDER),
    tool("read_file", "Read a file and return its text.", path=FILE),
]


def use_tool(name: str, arguments: str, root: Path) -> str:
    """What a call gives, or why it gives nothing: the model is told either way."""
    try:
        path = (root / str(json.loads(arguments)["path"])).resolve()
        if not path.is_relative_to(root.resolve()):
            return "Error: that is outside the folder of this chat"
        if name == "list_files":
            entries = sorted(path.iterdir())
            names = [f"{e.name}/" if e.is_dir() else e.name for e in entries]
            return "\n".join(names) or "(empty)"
        if name == "read_file":
            with path.open(encoding="utf-8", errors="replace") as file:
                return file.read(MOST_CHARACTERS)
        return f"Error: there is no tool {name}"
    except FileNotFoundError:
        kind = "folder" if name == "list_files" else "file"
        return f"Error: there is no such {kind}"
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        # Without the path: a small model copies it wrongly.
        return f"Error: {getattr(error, 'strerror', None) or error}"


def add_place_options(
    parser: argparse.ArgumentParser, *, url: str = "--url", key: str = "--key"
) -> None:
    """The options for a server's URL and key, by these names."""
    usual = place_of(read_settings())
    text = "with /v1 or without; default: as MLX_HOST and MLX_PORT say"
    parser.add_argument(url, default=usual.url, help=text)
    text = "default: the first of API_KEY"
    parser.add_argument(key, default=usual.key or "unused", help=text)


def make_table(
    title: str, names: Sequence[str], *, texts: Collection[str] = ()
) -> Table:
    """A table of numbers, but for the columns in `texts`."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in texts else "right")
    return table


def advise(error: Exception) -> str:
    """What went wrong, and what to do where nobody listens."""
    reason = getattr(error.__cause__, "reason", None)
    is_nobody = isinstance(reason, ConnectionRefusedError)
    hint = ". Start one with: python3.12 install_and_run.py" if is_nobody else ""
    return f"{error}{hint}"


def cost_of(reply: Reply, model: str) -> str:
    """The line below a turn. A reply of the demo model is marked as such."""
    n_cached = reply.n_cached or 0
    share = f" ({n_cached / reply.n_prompt:.0%})" if reply.n_prompt else ""
    ttft = f"{reply.ttft_seconds:.2f} s" if reply.ttft_seconds else "-"
    new = f"new {reply.n_prompt - n_cached}"
    read = f"prompt {reply.n_prompt}, cached {n_cached}{share}, {new}"
    mark = "demo model · " if model == DEMO_MODEL else ""
    return f"{mark}{read} · TTFT {ttft} · reply {reply.n_out}"


@dataclass(slots=True)
class Chat:
    """A conversation and where it is shown."""

    server: Server
    console: Console
    root: Path
    tools: list[Body]
    messages: list[Body] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """One turn, with the calls it takes. What fails leaves the conversation as it was."""
        n_messages = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(MOST_CALLS):
                reply = self.hear()
                empty = {"role": "assistant", "content": ""}
                self.messages.append(reply.echo() or empty)
                for call in reply.calls:
                    self.answer_call(call)
                if not reply.calls:
                    return
            self.console.print(f"(stopped after {MOST_CALLS} calls)", style="yellow")
        except (CannotAsk, KeyboardInterrupt) as error:
            del self.messages[n_messages:]
            sentence = advise(error) if isinstance(error, CannotAsk) else "stopped"
            self.console.print(f"\n{sentence}", style="red", markup=False)

    def hear(self) -> Reply:
        """One reply, shown as it comes. Raises CannotAsk."""
        body: Body = {
            "model": self.server.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.tools:
            body["tools"] = self.tools

        reply = Reply()
        for seconds, event in self.server.events("/v1/chat/completions", body):
            n_thought, n_said = len(reply.reasoning), len(reply.content)
            reply.hear(event, seconds=seconds)
            thought, content = reply.reasoning[n_thought:], reply.content[n_said:]
            gap = "\n" if content and reply.reasoning and not n_said else ""
            shown = Text.assemble((thought, "dim italic"), gap, content)
            self.console.print(shown, end="", soft_wrap=True)
        if not reply.finish_reason:
            raise CannotAsk(f"The server at {self.server.url} went away in mid-answer.")

        self.console.print()
        cost = cost_of(reply, self.server.model)
        self.console.print(cost, style="dim cyan", markup=False, highlight=False)
        return reply

    def answer_call(self, call: Body) -> None:
        """Do what the model asked for, and show that it was done."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        shown = f"→ {name} {arguments}"
        self.console.print(shown, style="green", markup=False, highlight=False)
        content = use_tool(name, arguments, self.root)
        result = {"role": "tool", "tool_call_id": call["id"], "content": content}
        self.messages.append(result)


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
    start: list[Body] = [{"role": "system", "content": system}] if system else []
    chat.messages = list(start)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/new":
            chat.messages = list(start)
        elif text:
            chat.ask(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_place_options(parser)
    parser.add_argument("--system", default="", help="a system prompt")
    parser.add_argument("--no-tools", action="store_true", help="offer no tools")
    chosen = parser.parse_args()
    console = Console()
    try:
        server = Server(chosen.url, key=chosen.key, seconds=TIMEOUT_SECONDS)
    except (CannotAsk, KeyboardInterrupt) as error:
        sys.exit(advise(error) if isinstance(error, CannotAsk) else "stopped")
    chat = Chat(server, console, Path.cwd(), [] if chosen.no_tools else TOOLS)
    lines = greeting(server.model, chat.root, has_tools=bool(chat.tools))
    console.print(lines, style="dim", markup=False, highlight=False)
    converse(chat, chosen.system)


if __name__ == "__main__":
    main()
