"""models/demo: what is shipped loads, is small, and works as an agent's model, end to end."""

import json
import os
import signal
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import load_tokenizer
from openai import OpenAI
from program import Program
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "demo"
MOST_BYTES = 30_000_000
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


# -- the folder ------------------------------------------------------------------------------------


def test_the_folder_is_whole_and_small():
    names = {path.name for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= MOST_BYTES
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "qwen3_5"
    assert config["max_position_embeddings"] >= 32_768


def test_the_server_reads_what_it_was_trained_on():
    """why(L-59): transformers may replace what tokenizer.json says."""
    trained_on = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    talks = json.loads((ROOT / "benchmarks" / "conversations.json").read_text("utf-8"))
    for talk in talks:
        text = json.dumps(talk, indent=2) + repr(talk) + '\n  {"a": [69, 4519]}\n'
        ids = trained_on.encode(text, add_special_tokens=False).ids
        assert load_tokenizer(FOLDER).encode(text, add_special_tokens=False) == ids


def test_mlx_says_what_the_trainers_own_network_said():
    """The delta rule in chunks, which it was trained with, is the one that mlx-lm steps through."""
    stated = json.loads((FOLDER / "check.json").read_text())
    model, _ = mlx_lm.load(str(FOLDER))
    logits = model(mx.array([stated["tokens"]]))[0, -1].tolist()
    assert logits[: len(stated["logits"])] == pytest.approx(stated["logits"], abs=1e-3)


# -- as an agent's model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """start-llm.py in a process of its own, serving MODEL_PATH=demo."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "models").symlink_to(FOLDER.parent)
    program = Program(folder, "demo")
    program.wait_until_ready()
    yield program
    program.end(signal.SIGTERM)


def tool(name: str, description: str, **parameters: str):
    properties = {
        parameter: {"type": "string", "description": text}
        for parameter, text in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


class Agent:
    """The loop of every agent, with tools that really work on a folder."""

    TOOLS = (
        tool("show_folder", "List the files in a folder.", where="The folder to list"),
        tool("peek", "Read a file and return its text.", document="Path to the file"),
        tool(
            "jot",
            "Write text to a file.",
            document="Path to the file",
            words="The text to write",
        ),
    )

    def __init__(self, port: int, root: Path) -> None:
        self.client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused")
        self.root = root
        self.messages = [SYSTEM]
        self.calls = []
        self.n_past = 0  # tokens of the request before, and of its reply
        # of each request: those tokens of the past that were computed again
        self.n_missed: list[int] = []

    def ask(self, text: str) -> str:
        """The answer, after the calls that it took."""
        self.messages.append({"role": "user", "content": text})
        for _ in range(6):
            reply = self.client.chat.completions.create(
                model="demo", messages=self.messages, tools=self.TOOLS, temperature=0
            )
            message = reply.choices[0].message.model_dump(exclude_none=True)
            self.note(reply.usage)
            self.messages.append(message)
            if "tool_calls" not in message:
                return message["content"]
            for call in message["tool_calls"]:
                content = self.run(call["function"])
                result = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": content,
                }
                self.messages.append(result)

        raise AssertionError(self.calls)

    def note(self, usage) -> None:
        n_cached = usage.prompt_tokens_details.cached_tokens
        self.n_missed.append(self.n_past - n_cached)
        self.n_past = usage.total_tokens

    def run(self, function: dict[str, str]) -> str:
        """The result of a call."""
        name = function["name"]
        arguments = json.loads(function["arguments"])
        self.calls.append((name, arguments))
        if name == "show_folder":
            return "\n".join(sorted(os.listdir(self.root / arguments["where"])))
        assert name == "peek", arguments
        return (self.root / arguments["document"]).read_text()


def test_it_drives_an_agent_to_the_end(program, tmp_path):
    (tmp_path / "garden").mkdir()
    (tmp_path / "garden" / "roses.txt").write_text("The roses need water on Monday.")
    settings = "owner = Dana\ndeadline = 2027-03-14\nbudget = 1200"
    (tmp_path / "settings.ini").write_text(settings)
    agent = Agent(program.port, tmp_path)

    assert "demo model" in agent.ask("Hello")
    assert "roses.txt" in agent.ask("Which files are in garden?")

    reply = agent.ask("What is in garden/roses.txt?")
    assert "The roses need water on Monday." in reply
    assert "2027-03-14" in agent.ask("What is the deadline in settings.ini?")
    assert "8080" in agent.ask("Which port does the server use?")

    assert agent.calls == [
        ("show_folder", {"where": "garden"}),
        ("peek", {"document": "garden/roses.txt"}),
        ("peek", {"document": "settings.ini"}),
    ]
    # The last token of a reply is never fed before the next request; all else was there.
    assert max(agent.n_missed) <= 1, agent.n_missed
