"""Measure this machine with a model of its own server, in ten minutes, and print one table.

    .venv/bin/python scripts/machine_report.py                      the model that is chosen here
    .venv/bin/python scripts/machine_report.py --model NAME         a repository, a folder or demo
    .venv/bin/python scripts/machine_report.py --quick --model demo a minute: does it run at all?

It starts a server on a free port, asks it as agents do, and ends it. Close what else needs the
GPU or memory first: other programs change the figures.

WHAT IS MEASURED

    first token    of a cold prompt, and of the next request of the same conversation (warm)
    agent          twelve steps of an agent (agent_steps.py: PI): seconds a step, tokens read
    decode         one reply alone, tokens a second from its first token to its last
    eight at once  eight agents on one prefix: tokens a second of all, and how often the shared
                   prefix was computed (1.0 is the fewest)
    file rewrite   a reply that repeats a file with one name changed: its speed, and how much of
                   the file it repeats
    memory         the most that MLX, the process and macOS (wired) held, and swap that was added
    parity         prompts of agent conversations, each answered greedily with what the cache has
                   and once more with an empty cache: the replies must be equal (on an NVIDIA GPU
                   they may differ, since the last bits there depend on how a prompt is cut)

WHAT IS WRITTEN  machine-report.json, with the same figures: chip, GPU, memory and versions, no
names of people, machines or folders, nothing that was said. A model in a folder is "a folder".

EXIT STATUS  0 measured, and warm equals cold, but for NVIDIA GPUs; 1 it does not; 2 nothing could
be measured; 130 stopped by Ctrl-C
"""

import argparse
import json
import os
import platform
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

import agent_steps
import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from agent_steps import Body, CannotAsk, Reply, Server
from pi_like_probe import TOOLS, Agent
from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[1]
FORMAT: Final = 1  # of the JSON file; another number: other fields

SAMPLE_SECONDS: Final = 0.5  # between two looks at the machine's memory
COLD_SECONDS: Final = 75.0  # the longest cold prompt takes at most this long
PROMPT_TOKENS: Final = (2_000, 8_000, 16_000, 32_000)  # tried as far as time allows
N_AGENTS: Final = 8
N_WARM_TURNS: Final = 3
N_PARITY_TURNS: Final = 4
N_AGENT_STEPS: Final = 12
LEAST_DECODED: Final = 16  # tokens; of fewer no speed is told

say = Console(stderr=True, highlight=False).print


# The server -------------------------------------------------------------------


def free_port() -> int:
    """A TCP port that nobody listens on, from a range that is not lent to clients."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Subject(NamedTuple):
    """The server that is measured."""

    server: Server
    log_folder: Path
    process: subprocess.Popen[bytes]


@contextmanager
def running_server(model: str, **changes: str) -> Iterator[Subject]:
    """A server of this checkout. Raises CannotAsk when it does not start.

    Its settings are those of this program's environment, but for some and the `changes`.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = {
            "MLX_HOST": "127.0.0.1",
            "MLX_PORT": str(port),
            "CACHE_DISK": "off",
            "CACHE_DISK_FOLDER": f"{folder}/disk",
            "API_KEY": "",
            "ENABLE_PROXY": "false",
            "LOG_ROOT": folder,
            "LOG_LEVEL": "WARNING",
            **changes,
        }
        if model:
            settings["MODEL_PATH"] = model
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "start-llm.py")],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        stack.callback(end_process, process)
        server = Server(f"http://127.0.0.1:{port}", model="any")
        # There is no limit of time: a model may be downloaded, and the server says so.
        while process.poll() is None:
            with suppress(CannotAsk):
                if server.get("/health")["status"] == "ok":
                    break
            time.sleep(0.2)
        else:
            raise CannotAsk("the server ended while it started; see above")
        yield Subject(server, Path(folder), process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, and insist after half a minute."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def watched_memory(pid: int) -> Iterator[dict[str, int]]:
    """The most bytes that were held meanwhile: of the process, wired, and swap added."""
    most: dict[str, int] = {}
    is_done = threading.Event()
    process = psutil.Process(pid)
    swap_at_start: int = psutil.swap_memory().used

    def watch() -> None:
        with suppress(psutil.Error):
            while not is_done.wait(SAMPLE_SECONDS if most else 0):
                sizes = {"process": process.memory_info().rss}
                sizes["swap"] = psutil.swap_memory().used - swap_at_start
                with suppress(AttributeError):  # only macOS tells
                    sizes["wired"] = psutil.virtual_memory().wired
                for kind, nbytes in sizes.items():
                    most[kind] = max(most.get(kind, 0), nbytes)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        is_done.set()
        thread.join()


# How much to ask --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long prompts and replies are, so that all of it takes ten minutes."""

    prompt_tokens: tuple[int, ...]  # of the cold prompts
    shared_tokens: int  # of the prefix of eight agents
    file_lines: int
    decode_tokens: int = 256
    agent_tokens: int = 96  # of each reply of the eight
    parity_tokens: int = 64


QUICK: Final = Plan(
    prompt_tokens=(400,),
    shared_tokens=300,
    decode_tokens=48,
    agent_tokens=16,
    file_lines=6,
    parity_tokens=24,
)


def make_plan(prefill_speed: float, *, most_tokens: int) -> Plan:
    """What fits into ten minutes on a machine that reads so many tokens a second.

    `most_tokens` is what the model takes as one prompt with its reply.
    """
    readable = min(prefill_speed * COLD_SECONDS, most_tokens / 2)
    prompts = tuple(n for n in PROMPT_TOKENS if n <= readable)
    shortest = prompts[0] if prompts else max(200, int(readable))
    return Plan(
        prompt_tokens=prompts or (shortest,),
        shared_tokens=shortest,
        file_lines=60 if prompts else 12,
    )


# Figures ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A cold prompt and the requests that continued it."""

    prompt_tokens: int
    cold_seconds: float
    warm_seconds: float  # the median of the requests that followed
    warm_cached_share: float  # the least of them


@dataclass(slots=True)
class Figures:
    """All that was measured. A field that is None could not be told."""

    load_seconds: float = 0.0
    first_token: list[FirstToken] = field(default_factory=list)
    agent_step_seconds: float | None = None  # the median of the steps after the first
    agent_worst_step_seconds: float | None = None  # of these
    agent_read_by_fewest: float | None = None  # tokens
    decode_tokens_per_second: float | None = None
    eight_tokens_per_second: float | None = None
    eight_prefix_computed: float | None = None
    eight_slowest_first_token: float | None = None
    rewrite_tokens_per_second: float | None = None
    rewrite_repeated_share: float | None = None
    mlx_peak_bytes: int = 0
    process_peak_bytes: int = 0
    wired_peak_bytes: int | None = None
    swap_added_bytes: int = 0
    parity_prompts: int = 0
    parity_equal: int = 0
    parity_cached_share: float | None = None


def decode_speed(reply: Reply) -> float | None:
    """Tokens a second of one reply, from its first token on; None of too few."""
    seconds = reply.seconds - reply.first_seconds
    if reply.n_out < LEAST_DECODED or seconds <= 0:
        return None
    return (reply.n_out - 1) / seconds


class Measurement:
    """Asks one server, step by step. Each step adds to `figures`."""

    def __init__(self, subject: Subject, *, is_quick: bool) -> None:
        self._subject = subject
        self._server = subject.server
        self._is_quick = is_quick
        self._chars_per_token = 4.0
        self.plan = QUICK
        self.figures = Figures()

    def run(self) -> Figures:
        """All steps, in the order of the table."""
        self._warm_up()
        steps: list[tuple[str, Callable[[], None]]] = [
            ("first token", self._measure_first_tokens),
            ("agent", self._measure_agent),
            ("decode", self._measure_decode),
            ("eight at once", self._measure_eight),
            ("file rewrite", self._measure_rewrite),
            ("parity", self._measure_parity),
        ]
        for name, step in steps:
            say(f"{name} ...")
            step()
        return self.figures

    def _new_agent(self, n_tokens: int) -> Agent:
        """An agent whose system prompt has about so many tokens, unlike any other's."""
        n_chars = int(n_tokens * self._chars_per_token)
        return Agent(secrets.token_hex(4), role="system", head_chars=n_chars)

    def _ask(self, agent: Agent, max_tokens: int) -> Reply:
        body = agent.body(max_tokens=max_tokens, effort="low")
        return self._server.ask_chat({**body, "temperature": 0})

    def _answer(self, question: str, **fields: int) -> Reply:
        """To a question alone."""
        messages = [agent_steps.user(question)]
        return self._server.ask_chat({"messages": messages, "temperature": 0, **fields})

    def _warm_up(self) -> None:
        """Compile the kernels, learn the machine's speed, and plan."""
        say("warming up ...")
        self._ask(self._new_agent(200), 8)
        agent = self._new_agent(300 if self._is_quick else 1_000)
        reply = self._ask(agent, 8)
        n_chars = len(json.dumps([agent.messages, TOOLS]))
        self._chars_per_token = n_chars / reply.n_prompt
        if self._is_quick:
            return
        model = self._server.get("/v1/status")["model"]
        speed = reply.n_prompt / reply.first_seconds
        self.plan = make_plan(speed, most_tokens=model["context_length"])

    def _measure_first_tokens(self) -> None:
        for n_tokens in self.plan.prompt_tokens:
            agent = self._new_agent(n_tokens)
            replies = [self._ask(agent, 16)]
            for _ in range(N_WARM_TURNS):
                agent.hear(replies[-1])
                replies.append(self._ask(agent, 16))
            cold, *warm = replies
            self.figures.first_token.append(
                FirstToken(
                    prompt_tokens=cold.n_prompt,
                    cold_seconds=cold.first_seconds,
                    warm_seconds=statistics.median(r.first_seconds for r in warm),
                    warm_cached_share=min((r.n_cached or 0) / r.n_prompt for r in warm),
                )
            )

    def _measure_agent(self) -> None:
        bench = agent_steps.Bench(self._server, max_tokens=self.plan.agent_tokens)
        agent_steps.run(
            [bench],
            ["pi"],
            n_steps=3 if self._is_quick else N_AGENT_STEPS,
            head_tokens=self.plan.shared_tokens,
            result_tokens=60 if self._is_quick else 400,
            seed=secrets.token_hex(4),
        )
        row = agent_steps.summarize([s for s in bench.steps if s.kind == "step"])
        self.figures.agent_step_seconds = row["step_seconds_median"]
        self.figures.agent_worst_step_seconds = row["step_seconds_worst"]
        self.figures.agent_read_by_fewest = row["read_tokens"] / row["fewest_tokens"]

    def _measure_decode(self) -> None:
        question = "Tell a long story about a lighthouse, with many details."
        reply = self._answer(question, max_tokens=self.plan.decode_tokens)
        self.figures.decode_tokens_per_second = decode_speed(reply)

    def _measure_eight(self) -> None:
        first = self._new_agent(self.plan.shared_tokens)
        bodies = []
        for n in range(N_AGENTS):
            body = first.body(max_tokens=self.plan.agent_tokens, effort="low")
            question = agent_steps.user(f"You are agent {n}. Begin.")
            messages = [first.messages[0], question]
            bodies.append({**body, "messages": messages, "temperature": 0})

        began = time.perf_counter()
        with ThreadPoolExecutor(N_AGENTS) as pool:
            replies = list(pool.map(self._server.ask_chat, bodies))
        seconds = time.perf_counter() - began

        figures = self.figures
        n_computed = sum(reply.n_prompt - (reply.n_cached or 0) for reply in replies)
        longest = max(reply.n_prompt for reply in replies)
        figures.eight_tokens_per_second = sum(r.n_out for r in replies) / seconds
        figures.eight_prefix_computed = n_computed / longest
        figures.eight_slowest_first_token = max(r.first_seconds for r in replies)

    def _measure_rewrite(self) -> None:
        text = make_program(self.plan.file_lines)
        question = (
            "Write this file again, whole, with the function greet_0 renamed to"
            f" welcome_0. Answer with the file alone.\n\n```python\n{text}```"
        )
        n_tokens = int(len(question) / 2)
        reply = self._answer(question, max_tokens=n_tokens, enable_thinking=False)
        self.figures.rewrite_tokens_per_second = decode_speed(reply)
        self.figures.rewrite_repeated_share = repeated_share(text, reply.content)

    def _measure_parity(self) -> None:
        n_before = len(read_records(self._subject.log_folder))
        # A tool loop, an edit of its past, a branch off it, and an insertion.
        max_tokens = self.plan.parity_tokens
        agent = self._new_agent(self.plan.shared_tokens)
        for _ in range(N_PARITY_TURNS):
            agent.hear(self._ask(agent, max_tokens))
        past = list(agent.messages)
        user = agent_steps.user
        edited = [past[0], user("Read notes.txt. Nothing else."), *past[2:]]
        branch = [*past[:-1], user("Sum up what was done.")]
        inserted = [past[0], user("Be brief."), *past[1:]]
        for messages in (edited, branch, inserted):
            agent.messages = messages
            self._ask(agent, max_tokens)

        records = read_records(self._subject.log_folder)[n_before:]
        prompts = [record["tokens"] for record in records]
        warm = [self._complete(ids, max_tokens) for ids in prompts]
        cold = []
        for ids in prompts:  # without KV and transcripts
            self._server.open("/v1/cache", method="DELETE").close()
            cold.append(self._complete(ids, max_tokens))

        figures = self.figures
        figures.parity_prompts = len(prompts)
        pairs = zip(map(shown_reply, warm), map(shown_reply, cold), strict=True)
        figures.parity_equal = sum(one == other for one, other in pairs)
        usages = [answer["usage"].get("prompt_tokens_details") or {} for answer in warm]
        n_cached = sum(details.get("cached_tokens") or 0 for details in usages)
        figures.parity_cached_share = n_cached / max(1, sum(map(len, prompts)))

    def _complete(self, prompt_ids: Sequence[int], max_tokens: int) -> Body:
        """The greedy continuation of a prompt that is given as tokens."""
        body = {"prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0}
        with self._server.open("/v1/completions", body) as response:
            answer: Body = json.load(response)
        return answer


def shown_reply(answer: Body) -> tuple[str, str]:
    """The text of a completion, and why it ended."""
    choice = answer["choices"][0]
    return choice["text"], choice["finish_reason"]


def make_program(n_lines: int) -> str:
    """A file of functions, three lines each, whose words are drawn by a fixed seed."""
    rng = random.Random("machine_report")
    functions = []
    for n in range(max(1, n_lines // 3)):
        words = agent_steps.make_words(rng, 40)
        functions.append(f'def greet_{n}(name):\n    return f"{words} {{name}}"\n\n')
    return "".join(functions)


def repeated_share(text: str, reply: str) -> float:
    """How many of the lines of a file a reply repeats, but for those to be changed."""
    kept_lines = [line for line in text.splitlines() if line and "greet_0" not in line]
    repeated = set(reply.splitlines())
    return sum(line in repeated for line in kept_lines) / len(kept_lines)


def read_records(log_folder: Path) -> list[Body]:
    """All records of all session logs, the oldest file first."""
    paths = sorted(log_folder.rglob("cache-session-*.log"), key=os.path.getmtime)
    lines = [line for path in paths for line in path.read_text("utf-8").splitlines()]
    return [json.loads(line) for line in lines]


# The report -------------------------------------------------------------------


def is_public_name(name: str) -> bool:
    """Whether this is demo, or a repository (owner/name) and no folder here."""
    owner, slash, repository = name.partition("/")
    is_repository = bool(owner and slash and repository) and "/" not in repository
    is_local = name.startswith((".", "~")) or Path(name).exists()
    return name == "demo" or (is_repository and not is_local)


def make_report(figures: Figures, status: Body, *, asked: str, is_quick: bool) -> Body:
    """What is written: figures without anything that was said or by whom, or on whose machine.

    The name of a folder may be private, so it is left out.
    """
    has_cuda = mx.cuda.is_available()
    model = status["model"]
    name = asked or model["id"]
    return {
        "format": FORMAT,
        "start_llm": status["version"],
        "quick": is_quick,
        "machine": {
            "chip": mx.device_info(mx.cpu)["device_name"],  # as in Apple M4 Pro
            "gpu": mx.device_info(mx.gpu)["device_name"] if has_cuda else None,
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.mac_ver()[0]}".strip(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
        },
        "model": {
            "name": name if is_public_name(name) else "a folder",
            "family": model["family"],
            "bytes": model["bytes"],
            "context_length": model["context_length"],
        },
        "figures": asdict(figures),
    }


ROWS: Final = (  # of the table: what is measured, its field in Figures, how it is written
    ("a step of an agent, median", "agent_step_seconds", "{:.2f} s"),
    ("... the worst", "agent_worst_step_seconds", "{:.2f} s"),
    ("... tokens read, by the fewest", "agent_read_by_fewest", "about {:.2f}"),
    ("decode, one stream", "decode_tokens_per_second", "{:.1f} tokens/s"),
    ("eight at once", "eight_tokens_per_second", "{:.1f} tokens/s in all"),
    ("... their shared prefix was computed", "eight_prefix_computed", "{:.2f} times"),
    ("... slowest first token", "eight_slowest_first_token", "{:.2f} s"),
    ("file rewrite", "rewrite_tokens_per_second", "{:.1f} tokens/s"),
    ("... lines of the file repeated", "rewrite_repeated_share", "{:.0%}"),
    ("MLX memory, most", "mlx_peak_bytes", "{:.2f} GB"),
    ("process memory, most", "process_peak_bytes", "{:.2f} GB"),
    ("wired memory of the machine, most", "wired_peak_bytes", "{:.2f} GB"),
    ("swap added", "swap_added_bytes", "{:.2f} GB"),
)


def rows_of(figures: Figures) -> list[tuple[str, str]]:
    """The table, a row a figure."""
    rows = [("model ready after", f"{figures.load_seconds:.1f} s")]
    for first in figures.first_token:
        speed = first.prompt_tokens / first.cold_seconds
        cold = f"{first.cold_seconds:.2f} s ({speed:,.0f} tokens/s)"
        rows.append((f"first token, cold, {first.prompt_tokens:,} tokens", cold))
        ratio = first.cold_seconds / first.warm_seconds
        share = f"(1/{ratio:.0f}; {first.warm_cached_share:.1%} cached)"
        warm = f"{first.warm_seconds:.2f} s {share}"
        rows.append(("first token, warm, same conversation", warm))
    for what, name, form in ROWS:
        value = getattr(figures, name)
        if name.endswith("_bytes") and value is not None:
            value /= 1e9
        rows.append((what, "not told" if value is None else form.format(value)))
    text = f"{figures.parity_equal} of {figures.parity_prompts} prompts"
    if figures.parity_cached_share is not None:
        text += f" ({figures.parity_cached_share:.0%} of them cached)"
    return [*rows, ("warm reply equals cold reply", text)]


def title_of(report: Body) -> str:
    """Machine and model in one line."""
    machine = report["machine"]
    model = report["model"]
    memory = machine["memory_bytes"] / 2**30
    chip = machine["gpu"] or machine["chip"]
    return (
        f"{chip}, {memory:.0f} GB, {machine['system']}; {model['name']}"
        f" ({model['bytes'] / 1e9:.2f} GB); start-llm {report['start_llm']},"
        f" mlx {machine['mlx']}"
    )


def measure(model: str, *, is_quick: bool) -> tuple[Figures, Body]:
    """Start a server, ask it, end it. Raises CannotAsk or OSError."""
    say("starting the server ...")
    began = time.perf_counter()
    with (
        running_server(model, LOG_PROMPT_TOKENS="true") as subject,  # for parity
        watched_memory(subject.process.pid) as most,
    ):
        load_seconds = time.perf_counter() - began
        figures = Measurement(subject, is_quick=is_quick).run()
        status = subject.server.get("/v1/status")
    figures.load_seconds = load_seconds
    figures.mlx_peak_bytes = status["memory"]["peak"]
    figures.process_peak_bytes = most.get("process", 0)
    figures.wired_peak_bytes = most.get("wired")
    figures.swap_added_bytes = most.get("swap", 0)
    return figures, status


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="", help="repository, folder or demo")
    parser.add_argument("--quick", action="store_true", help="short prompts, a minute")
    out = Path("machine-report.json")
    parser.add_argument("--out", type=Path, default=out, help="the JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    options = parser.parse_args(arguments)
    try:
        figures, status = measure(options.model, is_quick=options.quick)
    except KeyboardInterrupt:
        say("stopped; nothing was written")
        return 130
    except (CannotAsk, OSError) as error:
        say(f"nothing was measured: {error}", style="red", markup=False)
        return 2

    report = make_report(figures, status, asked=options.model, is_quick=options.quick)
    text = json.dumps(report, indent=1)
    options.out.write_text(text + "\n", encoding="utf-8")
    if options.json:
        sys.stdout.write(text + "\n")
    else:
        table = Table("what", "measured", title=title_of(report))
        for row in rows_of(figures):
            table.add_row(*row)
        Console().print(table)
    say(f"written to {options.out}; to send it: the issue template 'Machine report'")
    has_parity = 0 < figures.parity_prompts == figures.parity_equal
    if not has_parity and report["machine"]["gpu"] is None:
        say("a warm reply differs from a cold one: please report it", style="red")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
