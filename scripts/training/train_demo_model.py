"""Train the demo model that models/demo/ holds, from conversations made from a seed.

    python scripts/training/train_demo_model.py WORK_DIR [--steps 20000] [--seed 0]
        [--export models/demo] [--start FOLDER] [--rate 1.0] [--only-said] [--blend FOLDER]

Needs what the server does not: torch (CPU), tokenizers, safetensors, jinja2, rich. A step takes two
cores 0.7 to 1 s, 2.5 s where they cannot multiply bfloat16. Half the steps are not enough: copying
words that were never seen comes late (models/demo/README.md). WORK_DIR keeps the tokenizer and a
checkpoint; started again, it goes on from there, and a step's batch depends on the seed and the
step alone. Raising --steps afterwards trains on; up to half of the smaller number it is the same
run. `--start` begins with the weights and the tokenizer of a folder that this script exported
(take another seed, for other conversations), and its rows are as long as late in a run: short ones
have no room for many tools, and who practises there unlearns to choose. `--rate` is a share of the
learning rates. With `--only-said` nothing is learnt but what the assistant says in conversations:
late in training what others say, which cannot be foreseen, and rows of random copies are nine
tenths of the loss. `--export` alone (with --steps 0) writes the folder from the last checkpoint;
with `--blend` half-way between that and the weights of another folder.

Most of a conversation is given to the model and not learnt: the loss counts what the assistant
says, and a few tokens of the rest. Batches are of a few fixed shapes, for torch.compile; a text
that is shorter than its row gets unrelated lines in front, which is what agents send anyway.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: waiting threads yield the CPU

import demo_network
import jinja2
import torch
import torch.nn.functional as F
from demo_dialogues import Conversation, Words, write_conversation, write_system
from demo_network import CHUNK, Network, Shape
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer
from torch import Tensor

TEMPLATE: Final = Path(__file__).resolve().with_name("demo_chat_template.jinja")
CORPUS: Final = TEMPLATE.parent / "tiny_model" / "corpus.txt"
END: Final = "<|im_end|>"
PAD: Final = "<|endoftext|>"
SPECIAL: Final = (PAD, "<|im_start|>", END)
MARKUP: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
N_PIECES: Final = 1280  # bytes included
VOCABULARY: Final = 1296
# A word is cut at its capitals, and spaces are pieces of their own: a name is then cut the same way
# wherever it stands, and copying it is copying pieces. With a space joined to the word behind it,
# a fourth of all wrong tokens were the right word with or without that space.
PIECES: Final = (
    r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]|[\"':,(){}\[\]]+|[^A-Za-z0-9\s]| +|\s"
)

TOKENS_PER_BATCH: Final = 4096
ROWS: Final = (
    512,
    1024,
    2048,
    4096,
    8192,
)  # lengths; the last holds long system prompts
# From which step on, how often each.
LENGTHS: Final = (
    (0, (60, 36, 4, 0, 0)),
    (4000, (32, 46, 18, 3, 1)),
    (7000, (21, 46, 20, 9, 4)),
)
# How often a row is mostly instructions, as agents send them.
FILLED_SHARE: Final = {512: 0.0, 1024: 0.15, 2048: 0.3, 4096: 0.5, 8192: 0.7}
COPYING_SHARE: Final = 0.01  # of the rows, how many are random copies
CONTEXT_SHARE: Final = 0.05  # of the tokens that are given, how many are learnt too
CONTEXT_WEIGHT: Final = 0.1
CHARACTERS_PER_TOKEN: Final = 2.9  # about, of a conversation's repr
MATRIX_RATE: Final = 0.012  # of Muon
VECTOR_RATE: Final = 0.003  # of Adam: embeddings, norms, gates
NEWEST_SHARE: Final = (
    0.01  # of one step in the mean of the weights, which is what is exported
)
KEPT: Final = "checkpoint.pt"


# Text -> tokens -----------------------------------------------------------------------


@cache
def template() -> jinja2.Template:
    """The chat template as the server renders it."""

    def raise_exception(why: str) -> None:
        raise ValueError(why)

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters["tojson"] = lambda thing: json.dumps(thing, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(TEMPLATE.read_text("utf-8"))


def render(conversation: Conversation, *, thinking: bool, preserve: bool) -> str:
    """The whole conversation as the model reads it."""
    messages = conversation.messages()
    if not thinking:
        for message in messages:
            if message["role"] == "assistant":
                message["reasoning_content"] = ""
    return template().render(
        messages=messages, tools=conversation.tools, preserve_thinking=preserve
    )


def make_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE, learnt from conversations."""
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Split(Regex(PIECES), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=N_PIECES,
        min_frequency=2,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    conversations = (
        write_conversation(random.Random(f"words {seed} {i}")) for i in range(3000)
    )
    texts = [
        render(conversation, thinking=True, preserve=True)
        for conversation in conversations
    ]
    bare = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKUP))))
    prose = [CORPUS.read_text("utf-8"), template_free_prose()] * 20
    tokenizer.train_from_iterator(
        [bare.sub(" ", text) for text in texts] + prose, trainer
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    assert tokenizer.get_vocab_size() <= VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


@cache
def template_free_prose() -> str:
    """English and code that no conversation is made of: Python's own language reference."""
    from pydoc_data.topics import topics

    return "\n".join(str(text) for _, text in sorted(topics.items()))


@cache
def program_text() -> str:
    """Sources of Python's library; not of the modules that benchmarks/demo_model.py takes."""
    import ast
    import csv
    import email.message
    import http.client
    import json.decoder
    import logging
    import pathlib
    import textwrap
    import zipfile

    modules = (
        ast,
        csv,
        email.message,
        http.client,
        json.decoder,
        logging,
        pathlib,
        textwrap,
    )
    return "\n".join(map(inspect.getsource, (*modules, zipfile)))


def filler_text(rng: random.Random, n_chars: int) -> str:
    """Unrelated text of about this length: prose, or lines as agents' instructions have them."""
    kind = rng.randrange(4)
    if kind == 0:
        return write_system(Words(rng, held_out=False), n_chars // 45 + 1)[:n_chars]
    sources = (
        template_free_prose,
        program_text,
        lambda: CORPUS.read_text("utf-8") * 20,
    )
    prose = sources[kind - 1]()
    start = rng.randrange(max(1, len(prose) - n_chars))
    return prose[start : start + n_chars]


SPOKEN: Final = re.compile(
    r"(<\|im_start\|>assistant\n<think>\n)(.*?<\|im_end\|>)", re.DOTALL
)


def tokens_and_weights(
    tokenizer: Tokenizer, conversation: Conversation, *, thinking: bool, preserve: bool
) -> tuple[list[int], list[float]]:
    """Ids of a rendered conversation, and how much each counts as something to be said."""
    text = render(conversation, thinking=thinking, preserve=preserve)
    tokens: list[int] = []
    weights: list[float] = []

    def add(part: str, weight: float) -> None:
        ids = tokenizer.encode(part, add_special_tokens=False).ids
        tokens.extend(ids)
        weights.extend([weight] * len(ids))

    end = 0
    for spoken in SPOKEN.finditer(text):
        start = spoken.start(2)
        if not thinking:  # an empty thought is the server's, not ours
            start = text.index("</think>\n\n", start) + len("</think>\n\n")
        add(text[end:start], 0.0)
        add(text[start : spoken.end()], 1.0)
        end = spoken.end()
    add(text[end:], 0.0)
    return tokens, weights


# Batches ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length."""

    tokens: Tensor  # (B, T)
    weights: Tensor  # (B, T), of a token as a target
    positions: Tensor  # (B, T), with gaps


def copying_row(rng: random.Random, length: int) -> tuple[list[int], list[float]]:
    """Random tokens, part of which come again: what every later skill is built from."""
    row: list[int] = []
    weights: list[float] = []
    pool = [
        rng.randrange(N_PIECES - 40) for _ in range(rng.choice((20, 60, 200, 1000)))
    ]
    while len(row) < length:
        if len(row) > 40 and rng.random() < 0.6:
            n = rng.randrange(4, 30)
            start = rng.randrange(max(1, len(row) - n))
            again = row[start : start + n]
            row += again
            weights += [0.0] * 2 + [1.0] * (len(again) - 2)
        else:
            fresh = [rng.choice(pool) for _ in range(rng.randrange(5, 40))]
            row += fresh
            weights += [0.0] * len(fresh)
    return row[:length], weights[:length]


def conversation_row(
    tokenizer: Tokenizer, rng: random.Random, length: int
) -> tuple[list[int], list[float]]:
    """A conversation of at most `length` tokens, often with filler up to that.

    Tools and rules are long and teach nothing: one to many exchanges share them.
    """
    max_chars = length * CHARACTERS_PER_TOKEN
    is_filled = rng.random() < FILLED_SHARE[length]
    while True:
        state = rng.getrandbits(64)
        n = rng.choice((1, 2, 4, 6)) if is_filled else length // 32
        how = {"thinking": rng.random() > 0.06, "preserve": rng.random() < 0.85}
        conversation = write_conversation(
            random.Random(state), n_exchanges=n, practice=True
        )
        while (n_chars := len(repr(conversation))) > max_chars and len(
            conversation.exchanges
        ) > 1:
            conversation = replace(conversation, exchanges=conversation.exchanges[:-1])
        is_short = n_chars < 0.75 * max_chars and not is_filled and rng.random() < 0.9
        if is_short or n_chars > 1.2 * max_chars:  # rendering is what takes time
            continue
        row = tokens_and_weights(tokenizer, conversation, **how)
        while (spare := length - len(row[0])) < 0 and len(conversation.exchanges) > 1:
            conversation = replace(conversation, exchanges=conversation.exchanges[:-1])
            row = tokens_and_weights(tokenizer, conversation, **how)
        if spare < 0:
            continue
        if spare < 100 or not is_filled:
            return row
        filler = filler_text(rng, int(spare * rng.uniform(1.9, 2.9)))
        system = f"{filler}\n{conversation.system}"
        filled = tokens_and_weights(
            tokenizer, replace(conversation, system=system), **how
        )
        return filled if len(filled[0]) <= length else row


def row_length(rng: random.Random, step: float) -> int:
    """Short texts first: what is said there is new twice as often, for the same time."""
    shares = next(shares for start, shares in reversed(LENGTHS) if step >= start)
    return rng.choices(ROWS, shares)[0]


def make_batch(
    tokenizer: Tokenizer, seed: int, step: int, *, only_said: bool, goes_on: bool
) -> Batch:
    """The batch of one step: of these arguments, and nothing else."""
    rng = random.Random(f"batch {seed} {step}")
    length = row_length(rng, math.inf if goes_on else step)
    copying, context = (0.0, 0.0) if only_said else (COPYING_SHARE, CONTEXT_SHARE)
    n = max(1, TOKENS_PER_BATCH // length)
    tokens = torch.zeros(n, length, dtype=torch.long)
    weights = torch.zeros(n, length)
    positions = torch.arange(length).repeat(n, 1)
    for i in range(n):
        if rng.random() < copying:
            row, counts = copying_row(rng, length)
        else:
            row, counts = conversation_row(tokenizer, rng, length)
        tokens[i, : len(row)] = torch.tensor(row)
        weights[i, : len(row)] = torch.tensor(counts)
        is_context = (weights[i, : len(row)] == 0) & (
            torch.rand(len(row), generator=coin(rng)) < context
        )
        weights[i, : len(row)][is_context] = CONTEXT_WEIGHT
        if (
            rng.random() < 0.35
        ):  # as if much more stood between: distances of long prompts
            for _ in range(rng.choice((1, 2))):
                positions[i, rng.randrange(length) :] += int(2 ** rng.uniform(6, 15))
    return Batch(tokens, weights, positions)


def coin(rng: random.Random) -> torch.Generator:
    """A generator of torch's, seeded from `rng`."""
    return torch.Generator().manual_seed(rng.getrandbits(48))


def produce(queue: Any, folder: Path, steps: range, how: dict[str, Any]) -> None:
    """The process that writes batches while the other one learns."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_trainer, daemon=True).start()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for step in steps:
        batch = make_batch(tokenizer, step=step, **how)
        queue.put(
            (batch.tokens.numpy(), batch.weights.numpy(), batch.positions.numpy())
        )


def end_with_trainer() -> None:
    """A trainer that is killed cannot end the process that writes its batches."""
    trainer = multiprocessing.parent_process()
    assert trainer
    trainer.join()
    os._exit(1)


def batches(folder: Path, steps: range, **how: Any) -> Iterator[Batch]:
    """The batches of `steps`, made a few ahead."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=8)
    process = context.Process(
        target=produce, args=(queue, folder, steps, how), daemon=True
    )
    process.start()
    for _ in steps:
        while queue.empty():  # get() would wait for ever for one that has died
            process.join(0.01)
            assert process.exitcode in (None, 0), (
                "the process that writes batches has ended"
            )
        yield Batch(*(torch.from_numpy(part) for part in queue.get()))
    process.join()


# Learning -----------------------------------------------------------------------------


def orthogonal(gradients: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, by five Newton-Schulz steps (Muon's coefficients).

    (n, rows, columns) with rows <= columns: matrices of one shape in one go.
    """
    x = gradients.to(demo_network.PRODUCT)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.float()


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are made orthogonal: about half the steps of Adam here."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every matrix."""
        assert closure is None
        (group,) = self.param_groups
        by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for weight in group["params"]:
            by_shape.setdefault(tuple(sorted(weight.shape)), []).append(weight)
        for weights in by_shape.values():
            updates = orthogonal(
                torch.stack([wide(self.moved(weight)) for weight in weights])
            )
            for weight, update in zip(weights, updates, strict=True):
                step = update if weight.shape == update.shape else update.T
                scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                weight.mul_(1 - group["lr"] * 0.05).add_(
                    step, alpha=-group["lr"] * scale
                )

    def moved(self, weight: torch.nn.Parameter) -> Tensor:
        """The gradient with Nesterov's momentum."""
        state = self.state[weight]
        momentum = state["momentum"] if state else torch.zeros_like(weight)
        state["momentum"] = momentum
        momentum.lerp_(weight.grad, 0.05)
        return weight.grad.lerp(momentum, 0.95)


def wide(matrix: Tensor) -> Tensor:
    """With no more rows than columns."""
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


@dataclass(slots=True)
class Learner:
    """The network, its optimizers, and how far they are."""

    network: Network
    muon: Muon
    adam: torch.optim.Optimizer
    mean: dict[str, Tensor]  # of the weights of late: what is exported
    done: int = 0

    @classmethod
    def fresh(cls, seed: int, start: Path | None) -> Learner:
        """At step 0, with the weights of the folder `start` or with planted ones."""
        torch.manual_seed(seed)
        network = Network(Shape(VOCABULARY))
        if start:
            network.load_state_dict(exported(start))
        else:
            demo_network.plant_copying(network)
        parameters = list(network.named_parameters())
        matrices = [
            p
            for name, p in parameters
            if p.ndim == 2 and min(p.shape) > 16 and "embed" not in name
        ]
        chosen = {id(p) for p in matrices}
        vectors = [p for _, p in parameters if id(p) not in chosen]
        groups = [
            {"params": [p], "share": 0.3 if p.ndim == 2 else 1.0} for p in vectors
        ]
        adam = torch.optim.AdamW(
            groups, lr=VECTOR_RATE, betas=(0.9, 0.98), weight_decay=0.0
        )
        mean = {name: value.clone() for name, value in network.state_dict().items()}
        return cls(network, Muon(matrices, lr=MATRIX_RATE), adam, mean)

    def save(self, folder: Path) -> None:
        """Never leaves half a file."""
        parts = {"network": self.network, "muon": self.muon, "adam": self.adam}
        checkpoint = {name: part.state_dict() for name, part in parts.items()}
        checkpoint["mean"] = self.mean
        checkpoint["done"] = self.done
        torch.save(checkpoint, folder / f"{KEPT}.new")
        os.replace(folder / f"{KEPT}.new", folder / KEPT)

    def load(self, folder: Path) -> None:
        """Go on from what was saved."""
        checkpoint = torch.load(folder / KEPT, weights_only=True)
        self.network.load_state_dict(checkpoint["network"])
        self.muon.load_state_dict(checkpoint["muon"])
        self.adam.load_state_dict(checkpoint["adam"])
        self.mean = checkpoint["mean"]
        self.done = checkpoint["done"]

    def learn(self, batch: Batch, rate: float) -> tuple[float, float]:
        """One step. The mean loss of what is to be said, and the share of it that is right."""
        for optimizer, lr in ((self.muon, MATRIX_RATE), (self.adam, VECTOR_RATE)):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = lr * rate * group.get("share", 1.0)
        hidden = self.network.hidden(batch.tokens, batch.positions)[:, :-1]
        targets = batch.tokens[:, 1:]
        weights = batch.weights[:, 1:]
        counted = weights > 0
        logits = self.network.logits(hidden[counted])
        targets = targets[counted]
        weights = weights[counted]
        losses = F.cross_entropy(logits, targets, reduction="none")
        (losses * weights).sum().div(weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                self.mean[name].lerp_(value, max(NEWEST_SHARE, 1 / (self.done + 1)))
        is_reply = weights == 1
        right = (logits[is_reply].argmax(-1) == targets[is_reply]).float().mean()
        return float(losses[is_reply].detach().mean()), float(right)


def rate_at(step: int, steps: int, highest: float) -> float:
    """The learning rate's share: a short warm-up, a plateau, a linear end over the second half."""
    return highest * min(
        1.0, (step + 1) / 60, max(0.02, (steps - step) / (steps * 0.5))
    )


def train(folder: Path, chosen: argparse.Namespace) -> None:
    """Up to the chosen step, from the checkpoint if there is one."""
    learner = Learner.fresh(chosen.seed, chosen.start)
    if (folder / KEPT).exists():
        learner.load(folder)
    for layer in learner.network.layers:
        layer.compile(dynamic=False)
    log = (folder / "log.jsonl").open("a")
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with log, Progress(*columns) as bar:
        task = bar.add_task(
            "training", total=chosen.steps, completed=learner.done, note=""
        )
        steps = range(learner.done, chosen.steps)
        how = {"only_said": chosen.only_said, "goes_on": chosen.start is not None}
        for batch in batches(folder, steps, seed=chosen.seed, **how):
            began = time.monotonic()
            # A long row is rare: compiling for it takes longer than it saves.
            stance = "default" if batch.tokens.shape[1] <= 2048 else "force_eager"
            with torch.compiler.set_stance(stance):
                loss, right = learner.learn(
                    batch, rate_at(learner.done, chosen.steps, chosen.rate)
                )
            learner.done += 1
            seconds = time.monotonic() - began
            facts = {
                "step": learner.done,
                "rows": batch.tokens.shape[1],
                "loss": loss,
                "right": right,
                "seconds": seconds,
            }
            log.write(json.dumps(facts) + "\n")
            log.flush()
            bar.update(
                task, completed=learner.done, note=f"loss {loss:.3f} right {right:.1%}"
            )
            if learner.done % 100 == 0 or learner.done == chosen.steps:
                learner.save(folder)


# The folder ----------------------------------------------------------------------------

PREFIX: Final = "language_model.model."  # of our names, in a folder that mlx-lm reads


def exported(folder: Path) -> dict[str, Tensor]:
    """The weights that `export` wrote."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    return {name.removeprefix(PREFIX): value for name, value in weights.items()}


def export(work: Path, folder: Path, blend: Path | None) -> None:
    """models/demo as mlx-lm and the server read it, from the last checkpoint.

    Half of it, and half of the weights of `blend`: what more training forgot and what it taught.
    """
    from safetensors.torch import save_file

    mean = torch.load(work / KEPT, weights_only=True)["mean"]
    if blend:
        mean = {
            name: (mean[name] + value) / 2 for name, value in exported(blend).items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    # In float32, which CPUs multiply faster than what is half as long.
    weights = {PREFIX + name: value for name, value in mean.items()}
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    write_json(folder / "check.json", own_logits(mean))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    shutil.copyfile(work / "tokenizer.json", folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    eos = [tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)]
    shape = Shape(VOCABULARY)
    write_json(folder / "config.json", {**shape.config(), "eos_token_id": eos})
    write_json(
        folder / "generation_config.json", {"eos_token_id": eos, "do_sample": False}
    )
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        # why(L-59): else transformers gives every qwen3_5 Qwen's own way of cutting words.
        "auto_map": {"AutoTokenizer": [None, None]},
    }
    write_json(folder / "tokenizer_config.json", facts)


@torch.no_grad()
def own_logits(weights: dict[str, Tensor]) -> dict[str, Any]:
    """What our network says after some tokens, of the first ids: a test asks mlx-lm the same."""
    network = Network(Shape(VOCABULARY))
    network.load_state_dict(weights)
    demo_network.PRODUCT = torch.float32
    tokens = torch.tensor([[(7 * i * i + 3) % VOCABULARY for i in range(3 * CHUNK)]])
    positions = torch.arange(tokens.shape[1])[None]
    logits = network.logits(network.hidden(tokens, positions))[0, -1]
    return {
        "tokens": tokens[0].tolist(),
        "logits": [round(x, 5) for x in logits[:64].tolist()],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As a person would want to read it."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--only-said", action="store_true")
    parser.add_argument("--export", type=Path)
    parser.add_argument("--blend", type=Path)
    chosen = parser.parse_args()
    work: Path = chosen.work_dir
    work.mkdir(parents=True, exist_ok=True)
    assert all(length % CHUNK == 0 for length in ROWS)
    if not (work / "tokenizer.json").exists():
        tokenizer = (
            Tokenizer.from_file(str(chosen.start / "tokenizer.json"))
            if chosen.start
            else make_tokenizer(chosen.seed)
        )
        tokenizer.save(str(work / "tokenizer.json"))
    if chosen.steps:
        # Keep freed memory: giving it back and taking it again costs a page fault for each 4 kB.
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
        torch._dynamo.config.cache_size_limit = 64
        train(work, chosen)
    if chosen.export:
        export(work, chosen.export, chosen.blend)


if __name__ == "__main__":
    main()
