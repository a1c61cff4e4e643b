"""Make a tiny language model that answers in sentences and well-formed tool calls.

    python make_tiny_model.py OUT_DIR [--kind qwen3] [--seed N] [--size small]

The weights are random, so the words mean nothing; but a small grammar is planted in them, so that
every reply closes its thinking, is either text or a tool call, and ends by itself. The same
arguments give the same files, byte for byte, with no network.

THE PLANTED GRAMMAR
    slot     a set of tokens that may stand at one place: determiners, verbs, "</think>" ...
    state    what may follow a token: slots and how much each is favoured. One residual dimension
             belongs to each state: the embedding of a token switches its state's dimension on,
             no layer ever writes there, and the output head pushes down by FORBIDDEN whatever
             must not follow. So the current token alone fixes the class of the next one.
    words    which token of the allowed slots it is, where a clause ends, and which tool is
             called, is left to the other, random dimensions, and through them to the context:
             one wrong KV entry far back changes the words.

Every piece of the grammar is one token that encodes to itself, and the chat template renders a
parsed reply back to the very text that was generated, so a reply costs no re-tokenisation.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

KINDS: Final = (
    *("qwen3", "qwen3_5", "qwen3_next", "gemma3_text", "gpt_oss"),
    *("qwen3_moe", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite"),
)
SOURCES: Final = Path(__file__).resolve().parent / "tiny_model"

Array = np.ndarray[Any, np.dtype[np.float32]]


# Recipe -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what a model is made of; equal recipes make equal files."""

    kind: str = "qwen3"
    seed: int = 0
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 64
    window: int = 64  # tokens that a sliding layer sees
    context: int = 131_072  # tokens, max_position_embeddings
    vocabulary: int = 0  # ids that the model can say, if more than the tokenizer knows

    def __post_init__(self) -> None:
        """Raise ValueError for what no config can be written for."""
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, not one of {', '.join(KINDS)}")
        if self.layers < 2 or self.layers % 2:
            fault = "two kinds of layer alternate, full last"
            raise ValueError(f"layers is {self.layers}: {fault}")


SIZES: Final[Mapping[str, Mapping[str, int]]] = {
    "tiny": {},
    "small": {"hidden": 192, "head_dim": 32, "mlp": 256},
}

# Random weights have tastes: with these seeds (of 0 to 7) text and calls are both common.
SEEDS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("qwen3", "qwen3_next", "gemma3_text", "qwen3_moe"), 1),
    "gpt_oss": 7,
    "glm4_moe_lite": 2,
}  # of all others 0


def choose_recipe(
    kind: str, *, size: str = "tiny", seed: int | None = None, **changes: int
) -> Recipe:
    """A recipe of a named size, with single fields changed (`layers=4`, `window=128` ...)."""
    chosen_seed = SEEDS.get(kind, 0) if seed is None else seed
    return Recipe(kind=kind, **{"seed": chosen_seed, **SIZES[size], **changes})


# Grammar ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens that are interchangeable, and the slots that may follow any of them.

    `then` maps a slot's name to a bias in standard deviations of a word's random logit: a slot of
    eight words has a best word at about +1.4, so a single token needs about as much to compete.
    """

    pieces: tuple[str, ...]
    then: Mapping[str, float] = field(default_factory=dict)


# After a token outside the grammar (a raw completion prompt ends in one) a clause begins.
AFTER_ANYTHING: Final[Mapping[str, float]] = {"text_subject": 0.0}

# A line a slot: name, pieces and what may follow, with its bias if that is not 0; "~" is a space.
# A forced opening may name another function (open_other), or leave the line end to the model
# (open_cut). `write` goes on to `path` after `content`, because a path may not know whose it is:
# the token before it is all that the grammar sees.
GRAMMAR: Final = r"""
think_open: <think> => newline
newline: \n => think_start
think_start: First Now Maybe Perhaps Again Clearly Next Still => think_subject
think_subject: ~I ~we ~they ~you => think_modal
think_modal: ~should ~must ~could ~might ~would ~will ~can ~may => think_verb
think_verb: ~inspect ~check ~search ~compare ~open ~test ~measure ~remember => think_article
think_article: ~the ~this ~that ~these => think_noun
think_noun: ~question ~folder ~function ~error ~log ~result ~request ~history =>
    think_stop:2.0 think_link
think_link: ~before ~while ~until ~because ~whenever => think_subject
think_stop: .\n => think_close
think_close: </think> => gap
gap: \n\n => text_start tool_call:1.5
text_start: The A This Every Your Our That Some => text_adjective text_noun
text_adjective: ~small ~quiet ~warm ~old ~careful ~new ~simple ~shared => text_noun
text_noun: ~server ~cache ~prefix ~token ~model ~thread ~window ~layer => text_verb
text_verb: ~keeps ~reads ~finds ~writes ~moves ~builds ~counts ~trims => text_article
text_article: ~its ~one ~another ~every ~no ~any => text_quality text_object
text_quality: ~large ~short ~exact ~early ~long ~fresh ~empty ~single => text_object
text_object: ~block ~page ~state ~answer ~buffer ~line ~checkpoint ~segment =>
    text_adverb text_link text_break:0.2 end:1.6
text_adverb: ~quickly ~slowly ~exactly ~twice ~again ~today ~once ~soon =>
    text_link text_break:0.5 end:1.8
text_link: ~and ~but ~so ~when ~although ~since => text_subject
text_subject: ~it ~everyone ~nobody ~somebody ~she ~he => text_verb
text_break: .\n\n => tool_call:2.2 text_start
end: <|im_end|> =>
tool_call: <tool_call> => open_read open_bash open_write open_get_weather
open_other: >\n => key_path key_command key_city
open_cut: > => line_key_path line_key_command line_key_city
path_root: src docs tests lib notes tools => path_stem
path_stem: /main /core /client /index /setup /report /server /table =>
    path_stem:-1.5 path_suffix
path_suffix: .py .md .txt .json .toml .yaml => call_close
command_start: ls cat grep head find sort git make => command_word
command_word: ~logs ~sources ~headers ~fixtures ~examples ~scripts ~notes ~build =>
    command_pipe call_close:0.8
command_pipe: ~| => command_filter
command_filter: ~uniq ~less ~tail ~tee ~nl ~wc => command_word
city_start: Berlin Paris Rome Oslo Lima Cairo Tokyo Quito => city_part call_close:1.2
city_part: ~North ~South ~East ~West ~Central ~Harbour => call_close
content_start: print return assert raise import yield => content_word
content_word: ~value ~total ~name ~item ~key ~size ~row ~cell =>
    content_link content_to_path:1.3
content_link: ~plus ~minus ~times ~over ~with ~from => content_word
content_to_path: \n</parameter>\n<parameter=path>\n => path_root
call_close: \n</parameter>\n</function>\n => call_end
call_end: </tool_call> => end:1.2 tool_call
open_read: \n<function=read>\n => key_path
key_path: <parameter=path>\n => path_root
line_key_path: \n<parameter=path>\n => path_root
open_bash: \n<function=bash>\n => key_command
key_command: <parameter=command>\n => command_start
line_key_command: \n<parameter=command>\n => command_start
open_write: \n<function=write>\n => key_content
key_content: <parameter=content>\n => content_start
line_key_content: \n<parameter=content>\n => content_start
open_get_weather: \n<function=get_weather>\n => key_city
key_city: <parameter=city>\n => city_start
line_key_city: \n<parameter=city>\n => city_start
"""


def grammar() -> dict[str, Slot]:
    """Every slot by name. Raises ValueError if a piece stands in two slots or a name is unknown."""
    slots = {}
    for line in GRAMMAR.strip().replace("\n    ", " ").splitlines():
        name, _, rule = line.partition(": ")
        words, _, followers = rule.partition("=>")
        biases = (follower.partition(":") for follower in followers.split())
        slots[name] = Slot(
            tuple(w.replace("~", " ").replace(r"\n", "\n") for w in words.split()),
            {follower: float(bias or 0) for follower, _, bias in biases},
        )
    pieces = [piece for slot in slots.values() for piece in slot.pieces]
    if len(set(pieces)) != len(pieces):
        raise ValueError("a piece of the grammar stands in two slots")
    unknown = {name for slot in slots.values() for name in slot.then} - set(slots)
    if unknown:
        raise ValueError(f"the grammar names slots that are not: {sorted(unknown)}")
    return slots


# Tokenizer --------------------------------------------------------------------

SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS: Final = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
TRAINED_VOCABULARY: Final = 1200

# How text is cut before merging; transformers cuts so for every qwen3_5, whatever the file says.
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def plant_pieces(model: dict[str, Any], pieces: list[str]) -> None:
    """Append merges to a BPE `model` (tokenizer.json's) until each piece is a single token.

    New merges rank behind all earlier ones, so they undo none of them.
    """
    from tokenizers.models import BPE

    vocabulary, merges = model["vocab"], model["merges"]
    for piece in pieces:
        encoder = BPE(vocabulary, [(left, right) for left, right in merges])
        token, *others = (token.value for token in encoder.tokenize(piece))
        for other in others:
            merges.append([token, other])
            token += other
            vocabulary.setdefault(token, len(vocabulary))


def make_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on corpus.txt, plant the grammar, add the markup tokens.

    Returns a `tokenizers.Tokenizer`; each piece of the grammar encodes to one token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Split(Regex(PIECES), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=TRAINED_VOCABULARY,
        min_frequency=2,
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = (SOURCES / "corpus.txt").read_text("utf-8")
    tokenizer.train_from_iterator([corpus], trainer)
    described = json.loads(tokenizer.to_str())
    pieces = [piece for slot in grammar().values() for piece in slot.pieces]
    words = [piece for piece in pieces if "<" not in piece]
    calls = [piece for piece in pieces if "=" in piece or "</function>" in piece]
    byte_words = [byte_level.pre_tokenize_str(word)[0][0] for word in words]
    plant_pieces(described["model"], byte_words)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    markup = (*MARKUP_TOKENS, *calls)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in markup])
    return tokenizer


# Weights ----------------------------------------------------------------------

FORBIDDEN: Final = 24.0  # logits between a token that may follow and one that may not
# standard deviation of a word's logit, from the random dimensions
WORD_SPREAD: Final = 1.5
# of the squared residual, in the state's dimension, after the last layer
STATE_SHARE: Final = 0.9
# of a token's own random dimensions; small: the context decides
EMBEDDING_SCALE: Final = 0.5
# what one attention (or linear attention) layer adds to them
ATTENTION_SCALE: Final = 1.5
MLP_SCALE: Final = 0.5
# What a projection must make up for: mixing values, gates and activations make them smaller.
GAINS: Final[Mapping[tuple[str, str], float]] = {
    ("", "down_proj"): 2.0,
    ("", "out_proj"): 1.8,
    ("", "o_proj"): 1.75,
    ("gpt_oss", "o_proj"): 1.1,
    ("qwen3_5", "o_proj"): 3.9,
    ("qwen3_5_moe", "o_proj"): 3.9,
    ("qwen3_next", "o_proj"): 3.9,
}
# Of latent attention; what they read is normed, and is not the residual stream.
LATENT_PROJECTIONS: Final = ("q_b_proj", "embed_q", "unembed_out")
MLP_NORMS: Final = ("post_attention_layernorm", "pre_feedforward_layernorm")
# of queries and keys; about sqrt(head_dim) peaks of softmax, not a mean
SHARPNESS: Final = 2.0


@dataclass(frozen=True, slots=True)
class States:
    """The grammar as numbers: tokens to states, states to biases of the tokens that follow."""

    of_token: list[int]  # state of each token
    # (vocabulary, n_states): logit of a token after a state, in word spreads
    following: Array

    @property
    def n(self) -> int:
        """How many states there are, and so how many residual dimensions are reserved."""
        return int(self.following.shape[1])

    @classmethod
    def from_grammar(cls, tokenizer: Any, vocabulary: int) -> States:
        """Number the states: slots that allow the same to follow share one; 0 is the default."""
        slots = grammar()
        ids: dict[str, list[int]] = {name: [] for name in slots}
        for name, slot in slots.items():
            for piece in slot.pieces:
                piece_ids = tokenizer.encode(piece, add_special_tokens=False).ids
                if len(piece_ids) != 1:
                    raise ValueError("a piece of the grammar is not a single token")
                ids[name] += piece_ids

        followers = [AFTER_ANYTHING]
        for slot in slots.values():
            if slot.then and slot.then not in followers:
                followers.append(slot.then)

        of_token = [0] * vocabulary
        shape = (vocabulary, len(followers))
        following = np.full(shape, -FORBIDDEN / WORD_SPREAD, np.float32)
        for name, slot in slots.items():
            for token in ids[name]:
                of_token[token] = followers.index(slot.then) if slot.then else 0
            for state, biases in enumerate(followers):
                if name in biases:
                    following[ids[name], state] = biases[name]
        return cls(of_token, following)


@dataclass(frozen=True, slots=True)
class Residual:
    """How large things are in the residual stream, so that norms leave them where we want them.

    Dimensions [0, n_states) belong to the states, the rest is random. All in root mean squares.
    """

    recipe: Recipe
    n_states: int

    @property
    def n_random(self) -> int:
        """Dimensions that the random network reads and writes."""
        return self.recipe.hidden - self.n_states

    def random_scale(self, layer: int, *, before_mlp: bool = False) -> float:
        """The random dimensions as they enter `layer`, or its MLP."""
        square = EMBEDDING_SCALE**2 + layer * (ATTENTION_SCALE**2 + MLP_SCALE**2)
        return math.sqrt(square + before_mlp * ATTENTION_SCALE**2)

    @property
    def state_value(self) -> float:
        """The value of the dimension of the current state."""
        random_square = self.n_random * self.random_scale(self.recipe.layers) ** 2
        return math.sqrt(random_square * STATE_SHARE / (1 - STATE_SHARE))

    def norm(self, scale: float) -> float:
        """What an RMS norm divides by where the random dimensions have this scale."""
        square = self.state_value**2 + self.n_random * scale**2
        return math.sqrt(square / self.recipe.hidden)

    def row(self, *, state: float, random: float) -> Array:
        """A vector over the residual with one value for each of the two kinds of dimension."""
        values = np.full(self.recipe.hidden, random, np.float32)
        values[: self.n_states] = state
        return values


@dataclass(frozen=True, slots=True)
class Planter:
    """Makes one parameter after the other; each has its own generator, so order is nothing."""

    states: States
    residual: Residual

    def parameter(self, name: str, shape: tuple[int, ...]) -> Array:
        """The values of the parameter that the model calls `name`."""
        parts = name.split(".")
        leaf = parts[-1] if parts[-1] not in {"weight", "bias"} else parts[-2]
        layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else 0
        if leaf.endswith("norm"):
            return self._norm(leaf, layer, shape)
        if leaf == "embed_tokens":
            return self._embedding(shape)
        if leaf == "lm_head":
            return self._head(shape)
        if leaf == "A_log":  # memories of about 10 to 10000 tokens
            return np.log(np.geomspace(0.1, 1e-4, shape[0])).astype(np.float32)
        if leaf in {"dt_bias", "sinks"} or parts[-1] == "bias":
            return np.zeros(shape, np.float32)
        return self._projection(leaf, shape, self._normal(name, shape))

    def _normal(self, name: str, shape: tuple[int, ...]) -> Array:
        seed = [self.residual.recipe.seed, zlib.crc32(name.encode())]
        return np.random.default_rng(seed).standard_normal(shape, np.float32)

    def _norm(self, leaf: str, layer: int, shape: tuple[int, ...]) -> Array:
        residual = self.residual
        gemma = residual.recipe.kind == "gemma3_text"
        if leaf in {"q_norm", "k_norm"}:
            values = np.full(shape, SHARPNESS, np.float32)
        elif shape != (residual.recipe.hidden,):  # inside linear attention
            return np.ones(shape, np.float32)
        elif gemma and leaf.startswith("post_"):  # on what a sub-layer adds
            scale = ATTENTION_SCALE if "attention" in leaf else MLP_SCALE
            # the rest is zero
            scale *= math.sqrt(residual.n_random / residual.recipe.hidden)
            values = residual.row(state=0.0, random=scale)
        else:
            before_mlp = leaf in MLP_NORMS
            depth = residual.recipe.layers if leaf == "norm" else layer
            scale = residual.random_scale(depth, before_mlp=before_mlp)
            random = residual.norm(scale) / scale
            values = residual.row(state=1.0 if leaf == "norm" else 0.0, random=random)
        return values - 1 if gemma else values

    def _embedding(self, shape: tuple[int, ...]) -> Array:
        values = self._normal("embed_tokens", shape) * EMBEDDING_SCALE
        values[:, : self.residual.n_states] = 0
        values[np.arange(shape[0]), self.states.of_token] = self.residual.state_value
        gemma = self.residual.recipe.kind == "gemma3_text"
        return values / math.sqrt(shape[1]) if gemma else values

    def _head(self, shape: tuple[int, ...]) -> Array:
        values = self._normal("lm_head", shape) / math.sqrt(self.residual.n_random)
        scale = self.residual.random_scale(self.residual.recipe.layers)
        normed_state = self.residual.state_value / self.residual.norm(scale)
        values[:, : self.residual.n_states] = self.states.following / normed_state
        return values * WORD_SPREAD

    def _projection(self, leaf: str, shape: tuple[int, ...], values: Array) -> Array:
        """A matrix (..., out, in), or a convolution (channels, taps, 1)."""
        kind = self.residual.recipe.kind
        if leaf in {"o_proj", "out_proj", "down_proj"}:  # these write to the residual
            scale = MLP_SCALE if leaf == "down_proj" else ATTENTION_SCALE
            gain = GAINS.get((kind, leaf)) or GAINS["", leaf]
            values *= scale * gain / math.sqrt(shape[-1])
            values[..., : self.residual.n_states, :] = 0
            return values
        if leaf == "conv1d":
            return values / math.sqrt(shape[1])
        if leaf in LATENT_PROJECTIONS:
            sharpness = SHARPNESS**2 if leaf == "q_b_proj" else 1.0
            n_inputs = shape[-2] if leaf == "embed_q" else shape[-1]
            return values * sharpness / math.sqrt(n_inputs)
        # Of the others a norm makes it.
        is_sharp = kind == "gpt_oss" and leaf in {"q_proj", "k_proj"}
        sharpness = SHARPNESS if is_sharp else 1.0
        return values * sharpness / math.sqrt(self.residual.n_random)


# Folder -----------------------------------------------------------------------


def model_config(recipe: Recipe, vocabulary: int, eos: list[int]) -> dict[str, Any]:
    """config.json: the keys that all kinds share, then those of this one.

    Kinds that have the same parts have the same keys, of which each reads its own.
    """
    shared = {
        "model_type": recipe.kind,
        "vocab_size": vocabulary,
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.mlp,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": recipe.context,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": eos,
    }
    sliding = {
        "sliding_window": recipe.window,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": recipe.head_dim,
        "layer_types": ["sliding_attention", "full_attention"] * (recipe.layers // 2),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    rope = {"rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    linear = {
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4,
        "linear_num_value_heads": recipe.heads,
        "linear_num_key_heads": recipe.kv_heads,
        "linear_key_head_dim": recipe.head_dim,
        "linear_value_head_dim": recipe.head_dim,
        "rope_parameters": {"type": "default", **rope},
        **rope,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": recipe.mlp,
        "shared_expert_intermediate_size": recipe.mlp,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    glm = {
        **experts,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 3 * recipe.head_dim,
        "kv_lora_rank": 2 * recipe.head_dim,
        "qk_nope_head_dim": recipe.head_dim,
        "qk_rope_head_dim": recipe.head_dim // 2,
        "v_head_dim": recipe.head_dim,
    }
    parts_of_kinds: dict[str, dict[str, Any]] = {
        "qwen3": {},
        "qwen3_5": linear,
        "qwen3_next": {**linear, **experts, "num_experts": 0},
        "gemma3_text": sliding,
        "gpt_oss": sliding,
        "qwen3_moe": experts,
        "qwen3_5_moe": {**linear, **experts},
        "glm4_moe": glm,
        "glm4_moe_lite": glm,
    }
    return {**shared, **parts_of_kinds[recipe.kind]}


@functools.cache
def made_by(recipe: Recipe) -> str:
    """What config.json's `made_by` says of a folder: a digest of all sources, and the recipe."""
    sources = [Path(__file__), *sorted(SOURCES.iterdir())]
    content = b"\0".join(path.read_bytes() for path in sources)
    return f"make_tiny_model {hashlib.sha256(content).hexdigest()[:12]} {recipe}"


def is_made(folder: Path, recipe: Recipe) -> bool:
    """Whether `folder` already holds what make_model would write there."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("made_by") == made_by(recipe)


def _write_folder(folder: Path, recipe: Recipe) -> None:
    from mlx.utils import tree_flatten
    from safetensors.numpy import save_file

    tokenizer = make_tokenizer()
    # Padded, as real ones are.
    vocabulary = max(recipe.vocabulary, math.ceil(tokenizer.get_vocab_size() / 64) * 64)
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = model_config(recipe, vocabulary, eos)
    states = States.from_grammar(tokenizer, vocabulary)
    planter = Planter(states, Residual(recipe, states.n))
    # Every parameter that mlx-lm wants; MLX computes none of them.
    architecture = importlib.import_module(f"mlx_lm.models.{recipe.kind}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    weights = {
        name: np.ascontiguousarray(planter.parameter(name, value.shape), np.float32)
        for name, value in parameters
    }

    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    shutil.copyfile(SOURCES / "chat_template.jinja", folder / "chat_template.jinja")
    files: dict[str, dict[str, Any]] = {
        "config.json": {**config, "made_by": made_by(recipe)},
        "generation_config.json": {"eos_token_id": eos, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.context,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def make_model(folder: Path, recipe: Recipe) -> bool:
    """Make `folder` hold the model of `recipe`; False if it was there already.

    Readers never see half a model: it is written beside `folder` and renamed. Of two processes
    that make the same one, both succeed.
    """
    if is_made(folder, recipe):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        _write_folder(fresh, recipe)
        try:
            if folder.exists():
                os.replace(folder, Path(scratch) / "stale")
            os.replace(fresh, folder)
        except OSError:
            if not is_made(folder, recipe):
                raise
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--seed", type=int, help="default: a good one for the kind")
    parser.add_argument("--size", choices=SIZES, default="small")
    options = parser.parse_args()
    recipe = choose_recipe(options.kind, size=options.size, seed=options.seed)
    is_new = make_model(options.out_dir, recipe)
    n_bytes = (options.out_dir / "model.safetensors").stat().st_size
    verb = "made" if is_new else "found"
    print(f"{verb} {options.kind} model, {n_bytes / 1e6:.1f} MB: {options.out_dir}")


if __name__ == "__main__":
    main()
