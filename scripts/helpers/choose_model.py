"""Choose the model to serve where MODEL_PATH names none, and print its name.

    .venv/bin/python scripts/helpers/choose_model.py [--memory-bytes N]

Offers models that are on this machine already (Hugging Face cache, LM Studio's folders), then two
of a short list that fit into memory and on the disk, with what each is good for. On a terminal it
asks, and keeps the answer in .chosen-model beside start-llm.py. Without a terminal it takes what is
here. Else, or without network, or when declined, it is the demo model: nothing is downloaded
without a person's yes. start-llm.py runs this before it loads a model; the last line of stdout is
the name.
"""

import argparse
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from count_kv import KVBytes, count_kv_bytes
from huggingface_hub import constants, get_session
from launch import CALL_TOKENS, CLIENTS, HOUR_TOKENS, clients_with_room, say

ROOT: Final = Path(__file__).resolve().parents[2]
KEPT_ANSWER: Final = ROOT / ".chosen-model"
DEMO: Final = "demo"

# The least tokens of context of a model that is offered, with KV_BITS=8: with fewer agents sum up
# all the time. Eight bits a weight rather than four are offered only where it stays long.
LEAST_CONTEXT: Final = 32_000
LEAST_OF_EIGHT_BITS: Final = 120_000
SHORT_CONTEXT: Final = 64_000  # tokens; KV_BITS=8 is advised where there are fewer
PACKED_SHARE: Final = 8.5 / 16  # bytes of KV with KV_BITS=8, by those without
LONGEST_CONTEXT: Final = 196_608  # tokens: start-llm.py's MAX_KV_SIZE
# How start-llm.py divides memory: KV_SHARE of what the weights leave is KV, of which an eighth
# is for images if a model sees them (FEATURES_PART); a prompt has spare places (HEADROOM_PART).
CACHE_SHARE: Final = 0.55
IMAGES_SHARE: Final = 1 / 8
SPARE_SHARE: Final = 1 / 33
SPARE_PLACES: Final = 256
SPARE_DISK_BYTES: Final = 2_000_000_000
CPU_MOST_BYTES: Final = 2_500_000_000  # on a CPU a larger model takes minutes to answer
NETWORK_SECONDS: Final = 3.0
MOST_QUESTIONS: Final = 3  # until an answer is understood
GONE: Final = frozenset({401, 404, 410})  # of the hub, for a name that it does not have


@dataclass(frozen=True, slots=True)
class Head:
    """A head of a model by its repository; DRAFT_MODEL names it."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its repository or folder."""

    name: str
    nbytes: int  # of its weights, which is nearly what a download takes
    kv: KVBytes
    sees_images: bool = True
    longest_context: int = LONGEST_CONTEXT  # tokens that it was made for, if fewer
    least_context: int = LEAST_CONTEXT
    good_for: str = ""  # in a line, for its owner
    is_for_agents: bool = True
    head: Head | None = None  # that guesses several tokens a step (DRAFT_MODEL)
    is_local: bool = False

    @property
    def repository(self) -> str:
        """Its repository, by the last two folders if `name` is a path."""
        return "/".join(self.name.split("/")[-2:])


# Known-good models, in the order in which they are offered: the first of each list that fits.
# Bytes are the hub's; KV is as count_kv.py counts it from config.json. What they are good for:
# agents' tasks that others have published (August to October 2026), not our own measurements.
QWEN_9B_KV: Final = KVBytes(32_768, 51_511_296)
QWEN_35B_4BIT: Final = Model(
    "mlx-community/Qwen3.6-35B-A3B-4bit",
    20_429_169_263,
    KVBytes(20_480, 64_389_120),
    good_for="the quick one: does most tasks well, four to six times as fast as a smart one",
    head=Head("mlx-community/Qwen3.6-35B-A3B-MTP-4bit", 475_000_000),
)
QWEN_27B_4BIT: Final = Model(
    "mlx-community/Qwen3.8-27B-4bit",
    16_054_541_349,
    KVBytes(65_536, 153_944_064),
    good_for="the smart one: best at hard tasks; slow, an agent's first answer takes minutes",
    head=Head("mlx-community/Qwen3.8-27B-MTP-4bit", 239_000_000),
)
QWEN_9B_4BIT: Final = Model(
    "mlx-community/Qwen3.5-9B-MLX-4bit",
    5_950_221_072,
    QWEN_9B_KV,
    good_for="the better one for agents: it uses tools well, for small changes to code",
    head=Head("mlx-community/Qwen3.5-9B-MTP-4bit", 137_000_000),
)


def in_eight_bits(model: Model, nbytes: int) -> Model:
    name = model.name.replace("4bit", "8bit")
    return replace(model, name=name, nbytes=nbytes, least_context=LEAST_OF_EIGHT_BITS)


FIRST_CHOICES: Final = (
    in_eight_bits(QWEN_35B_4BIT, 37_721_403_002),
    QWEN_35B_4BIT,
    QWEN_27B_4BIT,
    in_eight_bits(QWEN_9B_4BIT, 10_426_592_423),
    QWEN_9B_4BIT,
    Model(
        "mlx-community/Qwen3.5-4B-MLX-4bit",
        3_061_121_321,
        QWEN_9B_KV,
        good_for="the better one: for chats, and an agent's simple tasks",
        head=Head("mlx-community/Qwen3.5-4B-MTP-4bit", 68_000_000),
    ),
)
SECOND_CHOICES: Final = (
    in_eight_bits(QWEN_27B_4BIT, 29_501_218_479),
    QWEN_27B_4BIT,
    Model(
        "mlx-community/gemma-4-26b-a4b-it-4bit",
        15_373_568_786,
        KVBytes(20_480, 209_715_200),
        good_for="the quick one: five times as fast as a smart one; leave its thinking on",
        head=Head("mlx-community/gemma-4-26B-A4B-it-assistant-bf16", 872_000_000),
    ),
    Model(
        "mlx-community/gpt-oss-20b-MXFP4-Q8",
        12_104_199_097,
        KVBytes(24_576, 3_145_728),
        sees_images=False,
        longest_context=131_072,
        good_for="the quicker one, of OpenAI: weaker at code, and it sees no images",
    ),
    Model(
        "lmstudio-community/gemma-4-E4B-it-MLX-4bit",
        6_800_000_000,
        KVBytes(16_384, 20_971_520),
        longest_context=131_072,
        good_for="for chats and longer texts; less sure with an agent's tools",
        head=Head("mlx-community/gemma-4-E4B-it-assistant-bf16", 158_000_000),
    ),
    Model(
        "mlx-community/Qwen3-1.7B-4bit",
        970_000_000,
        KVBytes(114_688, 0),
        sees_images=False,
        longest_context=40_960,
        good_for="the quicker one: for short chats, not for agents",
        is_for_agents=False,
    ),
)
CPU_MODELS: Final = (
    Model(
        "Qwen/Qwen3-0.6B",
        1_520_000_000,
        KVBytes(2 * 114_688, 0),  # of float32, in which it is computed on a CPU
        sees_images=False,
        longest_context=40_960,
        least_context=16_000,
        good_for="small enough for a CPU: for a first try, not for agents",
        is_for_agents=False,
    ),
)
KNOWN_MODELS: Final = (*FIRST_CHOICES, *SECOND_CHOICES, *CPU_MODELS)


# Decide -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which models can be served."""

    is_apple_silicon: bool
    memory_bytes: int  # that the server may use
    disk_bytes: int  # free where downloads go

    def can_serve(self, model: Model) -> bool:
        """Whether memory has room for a model and its context, with KV_BITS=8 if need be."""
        if not self.is_apple_silicon and model.nbytes > CPU_MOST_BYTES:
            return False
        least = min(model.least_context, model.longest_context // 1000 * 1000)
        return self.count_context(model, kv_share=PACKED_SHARE) >= least

    def can_hold(self, model: Model) -> bool:
        """Whether the disk has room for a download."""
        return model.nbytes + SPARE_DISK_BYTES <= self.disk_bytes

    def count_context(self, model: Model, *, kv_share: float = 1.0) -> int:
        """Tokens of context that start-llm.py will have room for, in full thousands.

        `kv_share`: bytes of KV by those without KV_BITS.
        """
        kv_bytes = CACHE_SHARE * (self.memory_bytes - model.nbytes)
        if model.sees_images:
            kv_bytes *= 1 - IMAGES_SHARE
        token_bytes = max(model.kv.token * kv_share, 1)  # 0: it has no attention
        n_places = (kv_bytes - model.kv.fixed) / token_bytes - SPARE_PLACES
        n_tokens = max(0, int(n_places * (1 - SPARE_SHARE)))
        return min(n_tokens, model.longest_context) // 1000 * 1000


def usable_memory(total_bytes: int, *, is_apple_silicon: bool) -> int:
    """What start-llm.py may use of a machine's memory: 0.9 of what Metal recommends.

    That is two thirds of up to 36 GB and three quarters of more. Without Metal it is all.
    """
    share = 1.0
    if is_apple_silicon:
        share = 2 / 3 if total_bytes <= 36 * 2**30 else 3 / 4
    return int(0.9 * share * total_bytes)


def list_offers(
    machine: Machine, local_models: Sequence[Model], gone_names: Collection[str] = ()
) -> list[Model]:
    """The models to offer: those that are here, known-good ones first, then downloads.

    Where the first choice is here, nothing is offered for download. An empty list means
    that only the demo model fits. `gone_names`: what the hub no longer has.
    """
    known_models = {model.name: model for model in KNOWN_MODELS}
    places = {name: place for place, name in enumerate(known_models)}
    local_offers = []
    for model in filter(machine.can_serve, local_models):
        known = known_models.get(model.repository, model)
        local_offers.append(
            replace(
                model,
                good_for=known.good_for,
                is_for_agents=known.is_for_agents,
                head=known.head,
            )
        )

    local_offers.sort(
        key=lambda model: (places.get(model.repository, len(places)), -model.nbytes)
    )
    local_names = {model.repository for model in local_offers}
    choices = list_choices(machine, local_names, gone_names)
    if choices and choices[0].name in local_names:
        return local_offers
    downloads = [model for model in choices if model.name not in local_names]
    return local_offers + downloads


def list_choices(
    machine: Machine, local_names: Collection[str], gone_names: Collection[str]
) -> list[Model]:
    """The first choice for a machine, and the second: of each list the first that fits."""
    lists: tuple[Sequence[Model], ...] = (CPU_MODELS,)
    if machine.is_apple_silicon:
        lists = (FIRST_CHOICES, SECOND_CHOICES)
    choices: list[Model] = []
    for models in lists:
        for model in models:
            is_there = model.name in local_names or machine.can_hold(model)
            is_new = model.name not in gone_names and model not in choices
            if is_there and is_new and machine.can_serve(model):
                choices.append(model)
                break
    return choices


def first_fitting(room_bytes: int) -> str:
    """The first known-good model whose weights take no more than that, or the demo."""
    models = (*FIRST_CHOICES, *SECOND_CHOICES)
    return next((m.name for m in models if m.nbytes <= room_bytes), DEMO)


# Look at this machine ---------------------------------------------------------


def read_machine(memory_bytes: int | None = None) -> Machine:
    """This machine; `memory_bytes` is what the server may use, if that is known."""
    system = os.uname()
    is_apple_silicon = (system.sysname, system.machine) == ("Darwin", "arm64")
    total_bytes = psutil.virtual_memory().total
    usable_bytes = usable_memory(total_bytes, is_apple_silicon=is_apple_silicon)
    folder = Path(constants.HF_HUB_CACHE).absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    return Machine(is_apple_silicon, memory_bytes or usable_bytes, free_bytes)


def find_local_folders() -> dict[str, Path]:
    """Folders of the Hugging Face cache and of LM Studio, by the names of their models."""
    folders: dict[str, Path] = {}
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        with suppress(OSError):
            revision = (repository / "refs" / "main").read_text().strip()
            name = repository.name.removeprefix("models--").replace("--", "/")
            folders[name] = repository / "snapshots" / revision
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        for folder in sorted(Path(root).expanduser().glob("*/*")):
            folders[str(folder)] = folder
    return folders


def find_local_models(most_bytes: int = sys.maxsize) -> list[Model]:
    """Complete models on this machine that can be loaded and chat, up to a size."""
    models = []
    for name, folder in find_local_folders().items():
        nbytes = weigh_chat_model(folder)
        if 0 < nbytes <= most_bytes and (model := read_model(name, folder, nbytes)):
            models.append(model)
    return models


def weigh_chat_model(folder: Path) -> int:
    """Bytes of a model's weights; 0 if some are missing, or it cannot chat."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if not any(folder.glob("chat_template.*")):  # embeddings have none at all
            text = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
            if "chat_template" not in json.loads(text):
                return 0
        index_file = folder / "model.safetensors.index.json"
        names = {file.name for file in folder.glob("model*.safetensors")}
        if index_file.is_file():
            names |= set(json.loads(index_file.read_bytes())["weight_map"].values())
        return sum((folder / file_name).stat().st_size for file_name in names)
    return 0


def read_model(name: str, folder: Path, nbytes: int) -> Model | None:
    """The facts of a model; None if neither mlx-lm nor mlx-vlm can build it."""
    # They raise what they like; importing mlx-lm's OLMo even ends the program.
    with suppress(Exception, SystemExit):
        facts = json.loads((folder / "config.json").read_bytes())
        # On a CPU it is computed in float32.
        dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        text_facts = {**facts, **(facts.get("text_config") or {})}
        longest = text_facts.get("max_position_embeddings") or LONGEST_CONTEXT
        return Model(
            name,
            nbytes,
            count_kv_bytes(facts, dtype),
            sees_images=isinstance(facts.get("vision_config"), dict),
            longest_context=min(LONGEST_CONTEXT, int(longest)),
            is_local=True,
        )
    return None


def ask_hub(models: Sequence[Model]) -> dict[str, Model | None]:
    """What the hub answers in time: models with its sizes, by name; None if one is gone."""
    answers: dict[str, Model | None] = {}

    def fetch(model: Model) -> None:
        with suppress(Exception):  # the hub's client raises what it likes
            nbytes = ask_hub_for_size(model.name)
            sized = replace(model, nbytes=nbytes or model.nbytes)
            answers[model.name] = None if nbytes is None else sized

    # In threads of their own: to look a name up has no limit of time.
    deadline = time.monotonic() + NETWORK_SECONDS
    threads = [threading.Thread(target=fetch, args=[m], daemon=True) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def ask_hub_for_size(name: str) -> int | None:
    """Bytes of a repository's weights; None if there is none of this name.

    Raises what the hub's client raises.
    """
    # Not by its HfApi, which would print the hub's advice on tokens between our lines.
    url = f"{constants.ENDPOINT}/api/models/{name}?blobs=true"
    response = get_session().get(url, timeout=NETWORK_SECONDS)
    if response.status_code in GONE:
        return None
    files = response.raise_for_status().json()["siblings"]
    weights = [f for f in files if f["rfilename"].endswith(".safetensors")]
    return sum(file.get("size") or 0 for file in weights)


# Ask --------------------------------------------------------------------------


def is_on_terminal() -> bool:
    """Whether a person can be asked: not in a pipe, nor in the background."""
    try:
        is_foreground = os.tcgetpgrp(0) == os.getpgrp()
        return is_foreground and os.isatty(0) and os.isatty(2)
    except OSError:  # stdin is closed, or no terminal
        return False


def choose(memory_bytes: int | None = None) -> str:
    """The name of the model to serve. Asks on a terminal; never fails."""
    kept_name = ""
    with suppress(OSError, ValueError):
        kept_name = KEPT_ANSWER.read_text(encoding="utf-8").strip()
    kept_folder = find_local_folders().get(kept_name)
    if kept_name == DEMO or (kept_folder and weigh_chat_model(kept_folder)):
        say(f"{kept_name} is served, as answered before ({KEPT_ANSWER.name} keeps it)")
        return kept_name

    machine = read_machine(memory_bytes)
    local_models = find_local_models(machine.memory_bytes)
    if not is_on_terminal():
        offers = list_offers(machine, local_models)
        if offers and offers[0].is_local:
            say(f"no model is chosen; {offers[0].name} is here already, and is served")
            return offers[0].name
        advice = f" (a real one: --model {offers[0].name})" if offers else ""
        say(f"no model is chosen and none is here: the demo model is served{advice}")
        return DEMO
    offers = list_offers_of_hub(machine, local_models)
    if not offers:
        say("no model of the list can be had here; the demo model is served")
        return DEMO
    if len(offers) == 1 and offers[0].is_local:
        say(f"{offers[0].name} is here already, and is served")
        return offers[0].name
    return ask(offers, machine)


def list_offers_of_hub(machine: Machine, local_models: Sequence[Model]) -> list[Model]:
    """The offers that the hub still has, with its sizes; the next ones for those gone."""
    gone_names: set[str] = set()
    while True:
        offers = list_offers(machine, local_models, gone_names)
        answers = ask_hub([model for model in offers if not model.is_local])
        new_gone_names = [name for name, model in answers.items() if model is None]
        if not new_gone_names:
            return keep_answered(machine, offers, answers)
        for name in new_gone_names:
            say(f"{name} is no longer on the Hugging Face hub; it is left out")
        gone_names.update(new_gone_names)


def keep_answered(
    machine: Machine, offers: Sequence[Model], answers: Mapping[str, Model | None]
) -> list[Model]:
    """What is here, and the downloads for which the hub has answered, if they fit."""
    kept_offers = []
    for model in offers:
        answer = model if model.is_local else answers.get(model.name)
        if answer and machine.can_serve(answer):
            kept_offers.append(answer)
        elif answer:
            say(f"{model.name} is larger on the hub than was known: it does not fit")
        else:
            say(f"the Hugging Face hub does not answer: {model.name} cannot be had now")
    return kept_offers


def ask(offers: Sequence[Model], machine: Machine) -> str:
    """Let the person at the terminal choose, and keep the answer."""
    room = in_gigabytes(machine.memory_bytes)
    cache = re.sub(
        rf"\A{re.escape(str(Path.home()))}(?=/)", "~", constants.HF_HUB_CACHE
    )
    say(f"which model shall it be? One may use {room} of this machine's memory:")
    for number, model in enumerate(offers, start=1):
        location = "here already" if model.is_local else f"into {cache}"
        lines = [f"{model.name}: {in_gigabytes(model.nbytes)} {location}"]
        lines += filter(None, (model.good_for, *describe_room(machine, model)))
        if model.head:
            lines.append(
                "several tokens a step, where that pays, with the line DRAFT_MODEL="
                f"{model.head.name} in the file .env: {in_gigabytes(model.head.nbytes)} more"
            )
        print(f"  {number}  " + "\n     ".join(lines), file=sys.stderr)
    other_numbers = ", another number" if len(offers) > 1 else ""
    advice = " (advised)" if offers[0].good_for else ""
    question = f"Enter for 1{advice}{other_numbers}, n (demo model, this time) or demo (always): "

    for _ in range(MOST_QUESTIONS):
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        name = read_answer(answer, offers)
        if name == "" or not answer:  # declined, or Ctrl-D
            return DEMO
        if name is not None:
            with suppress(OSError):  # a folder that may only be read: it is asked again
                KEPT_ANSWER.write_text(name + "\n", encoding="utf-8")
                say(f"kept in {KEPT_ANSWER.name}; --model or MODEL_PATH wins over it")
            return name
    say("no answer that can be used; the demo model is served")
    return DEMO


def describe_room(machine: Machine, model: Model) -> list[str]:
    """Lines: how much of a session a model remembers, and for which agents that will do."""
    context = machine.count_context(model)
    packed_context = machine.count_context(model, kv_share=PACKED_SHARE)
    n_words = context * 3 // 4000 * 1000
    agents = describe_agents(context) if model.is_for_agents else ""
    text = f"remembers {context:,} tokens ({n_words:,} words){agents}"
    if context >= min(SHORT_CONTEXT, packed_context):
        return [text]
    more_agents = describe_agents(packed_context) if model.is_for_agents else ""
    if more_agents == agents:
        more_agents = ""
    packed_text = f"or {packed_context:,}, with the line KV_BITS=8 in the file .env"
    return [text, packed_text + more_agents]


def describe_agents(context: int) -> str:
    """The agents that can work in so many tokens of context."""
    tasks = {HOUR_TOKENS: "an hour of work and more", CALL_TOKENS: "short tasks"}
    for n_work, task in tasks.items():
        agents = clients_with_room(context, n_work=n_work)
        if agents == [client.title for client in CLIENTS.values()]:
            return f": {task} with any agent"
        if agents:
            *others, last = agents
            names = f"{', '.join(others)} or {last}" if others else last
            return f": {task} with {names}"
    return ": too few for an agent"


def read_answer(answer: str, offers: Sequence[Model]) -> str | None:
    """The model that is meant, "" for none, or None if the answer says nothing."""
    word = answer.strip().lower()
    if word in {"n", "no"}:
        return ""
    if word == DEMO:
        return DEMO
    if word in {"", "y", "yes"}:
        return offers[0].name
    if word.isdecimal() and 0 < int(word) <= len(offers):
        return offers[int(word) - 1].name
    return None


def in_gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    text = "that the server may use"
    parser.add_argument("--memory-bytes", metavar="N", type=int, help=text)
    arguments = parser.parse_args()
    try:
        print(choose(arguments.memory_bytes))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
