"""One local LLM server for agents, in one file, built around never prefilling the same token twice.

THE REQUEST PATH  (rooms in the order a request meets them; a room may only name rooms above it)

    ground    01 CONFIG    every setting, read once, frozen
              02 ERRORS    what can go wrong, and the HTTP status of each
              03 LOG       console, session logs, counters
    words     04 WIRE      request JSON -> ChatRequest; the shapes we answer with
              05 MESSAGES  Anthropic Messages <-> the same ChatRequest and answers
              06 HEAL      thinking that a client stripped, put back
              07 CANON     the second copy, volatile fields stilled: is this the same past?
              08 RENDER    messages -> the model's chat template -> tokens, nothing lost
              09 LEDGER    recorded pasts: replay their tokens, render only what is new
              10 KEY       chained block hashes: what a prefix is called
    memory    11 KV        the only room that knows what a KV layer looks like
              12 CACHE     lines, checkpoints, branches: the deepest exact prefix
              13 SESSIONS  what each conversation did last
    model     14 MODEL     weights, tokenizer, where they come from
              15 ENGINE    the model thread: schedule, prefill, decode, give back
    voice     16 SPLIT     characters -> reasoning | content | tool call
              17 TOOLS     tool-call text -> OpenAI tool_calls, as it is generated
    street    18 ANSWER    the whole path on one page
              19 HTTP      stdlib ThreadingHTTPServer, SSE, one error boundary
              20 PROXY     LiteLLM on :4000, a process beside this one
              21 MAIN      build the state, listen, load, serve, stop

WORDS WE USE
    original    messages as the model must see them
    canonical   the same with volatile fields stilled: decides equality, never meets the model
    transcript  a recorded past: canonical messages -> the tokens fed and generated for them
    line        one growable KV state of one conversation tip (all layers), with its tokens
    branch      a line that keeps only what follows its parent's first `start` tokens
    lent        a line whose KV a running row holds; it stays visible to lookups
    checkpoint  the state of the layers that cannot be rewound, at one position of a line
    row         one request on the model, from admission to the end
    offset      physical KV depth in model tokens; only _kv_cache_offset() makes one
    cached      prompt tokens of this request whose KV was reused
    n_*         a count;  *_tokens  ids;  *_seconds, *_bytes, *_ms  what they say

WHAT NEVER HAPPENS
    1  KV is reused for a token other than the one that built it
    2  model tokens are sliced by anything but a KvOffset
    3  an aborted request advances a session; what it completely prefilled is kept, it is exact
    4  what an exception interrupted is reused
    5  a second thread touches MLX
    6  a byte that means something is dropped on the way to the model without a word

THREADS AND LOCKS
    model           the only one that touches MLX: loads, runs and frees the model (KV to ENGINE)
    connection      one each, of low priority: parse, render, wait for events, write
    proxy pump      keeps LiteLLM running
    accept          one per listening address;  main waits for a signal
    locks are leaves, private to the object that owns what they guard; none is held while waiting
"""

from __future__ import annotations

import argparse
import errno
import gc
import hashlib
import inspect
import itertools
import json
import logging
import marshal
import math
import os
import platform
import queue
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from itertools import accumulate, islice, takewhile
from pathlib import Path
from socketserver import TCPServer
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Self,
    TypedDict,
    override,
)

import huggingface_hub
import jinja2
import mlx.core as mx
import mlx_lm
import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]
import regex  # type: ignore[import-untyped]
from dotenv import dotenv_values
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import GenerationBatch, StopSequences, wired_limit
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, _get_classes
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from rich.console import Console
from rich.filesize import decimal as in_bytes
from rich.logging import RichHandler
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# region 01 CONFIG =============================================================
# Every setting, read once, frozen.
# The field name in capitals is the variable's name, and the default written here is the only one.
# An empty variable counts as unset (`.env` files are full of them).
#
# Doors   Config, ConfigError
# Knows   -
# Thread  any; pure
# Budget  153
# ==============================================================================


class ConfigError(ValueError):
    """Settings that cannot be used, one line each: variable, value, what is allowed."""


def _number_word(value: object) -> object:
    """Text of a Literal of numbers: "OFF" is None, digits are an int, the rest is left as it is."""
    word = str(value).lower()
    if word == "off":
        return None
    return int(word) if word.isdecimal() else value


_Port = Annotated[int, Field(ge=1, le=65_535)]
_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]
_Interval = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]
_KvGroup = Annotated[Literal[32, 64, 128], BeforeValidator(_number_word)]
_Lower = BeforeValidator(str.lower)
_Family = Annotated[Literal["auto", "qwen3", "glm4", "generic"], _Lower]
_LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(str.upper)]
_RuleClass = Annotated[Literal["telemetry", "pinned", "transient", "off"], _Lower]


class Config(BaseModel):
    """Every setting of the server. Built by from_env(); tests pass fields by keyword."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # -- model
    model_path: str = ""  # Hugging Face repo or folder; empty: GLM-4.7-Flash on a Mac, else "demo"
    model_family: _Family = "auto"  # which tool-call format is tried first
    hf_token: str = Field(default="", repr=False)  # for gated repos; never logged
    trust_remote_code: bool = False  # run Python that comes with a model or tokenizer
    strict_model_names: bool = False  # another `model` in a request: 404 instead of being served

    # -- server
    mlx_host: str = "127.0.0.1"  # address to listen on; loopback means both 127.0.0.1 and ::1
    mlx_port: _Port = 8080  # TCP port
    max_connections: Annotated[int, Field(ge=1, le=900)] = 256  # open sockets
    max_queued_requests: _Positive = 256  # requests waiting for the model
    max_body_bytes: _Positive = 67_108_864  # bytes of one request body (64 MiB)
    keepalive_seconds: _Interval = 10.0  # between events of a stream that waits
    idle_connection_seconds: _Interval = 60.0  # a kept connection without a request is closed
    keep_awake: bool = False  # macOS: no sleep while a request runs

    # -- proxy
    enable_proxy: bool = True  # LiteLLM beside the server, where it is installed
    proxy_model_id: str = ""  # name shown through LiteLLM; empty: the model's own
    proxy_port: _Port = 4000  # TCP port, on 127.0.0.1 alone
    proxy_api_key: str = Field(default="", repr=False)  # that its clients need; empty: none
    proxy_startup_wait_seconds: _Seconds = 2.0  # between two log lines while it starts; 0 = none

    # -- engine
    max_kv_size: _Positive = 196_608  # tokens of prompt and reply; an admission limit
    prefill_step_size: _Positive = 2048  # tokens fed to the model at once
    batch_max_rows: _Positive = 32  # requests decoded together
    batch_padding_max: _Share = 0.25  # padding a batch may add, as a share of its real KV
    generation_watchdog_seconds: _Seconds = 600.0  # deadline of one request; 0 = none
    kv_bits: Annotated[Literal[4, 8] | None, BeforeValidator(_number_word)] = None  # 4, 8 or OFF
    kv_group_size: _KvGroup = 64  # values per quantisation group
    kv_quant_scheme: Annotated[Literal["uniform", "turboquant"], _Lower] = "uniform"
    quantized_kv_start: _Count = 5000  # token position where quantisation begins

    # -- prompt cache
    prompt_cache_max_bytes: _Count = 0  # bytes; 0 = a share of what the device recommends
    prompt_cache_max_entries_global: _Count = 24  # 0 = nothing is reused
    prompt_cache_max_entries_per_session: _Count = 2
    prompt_cache_ttl_seconds: _Seconds = 1800.0  # since last use; 0 = for ever
    prompt_cache_session_max_idle_seconds: _Seconds = 1800.0  # 0 = for ever
    prompt_cache_block_size: _Positive = 16  # tokens per hashed block
    cache_use_block_index: bool = True  # find a prefix by block hashes, not by scanning
    cache_canonicalize_tool_context: bool = True  # still volatile fields in the canonical copy
    ledger_max_bytes: _Count = 268_435_456  # bytes of recorded pasts (256 MiB)
    ledger_ttl_seconds: _Seconds = 86_400.0  # since last use; 0 = for ever
    rule_billing_header: _RuleClass = "telemetry"  # x-anthropic-billing-header: ...
    rule_message_id: _RuleClass = "pinned"  # "message_id": "..." in a system prompt
    rule_inbound_context: _RuleClass = "pinned"  # OpenClaw's section of the system prompt
    rule_timestamp: _RuleClass = "pinned"  # [Wed 2026-02-18 20:48 UTC] before a user's text
    rule_current_time: _RuleClass = "pinned"  # Current time is ...
    rule_current_date: _RuleClass = "pinned"  # Current date: ..., Today's date: ...
    rule_git_status: _RuleClass = "pinned"  # gitStatus: ... at the end of a system prompt
    rule_runtime: _RuleClass = "pinned"  # Stats: runtime ...
    rule_session_line: _RuleClass = "pinned"  # Runtime: agent=...
    rule_reminder: _RuleClass = "transient"  # <system-reminder>...</system-reminder>
    rule_internal_context: _RuleClass = "transient"  # OpenClaw's last message
    rule_operator_note: _RuleClass = "transient"  # what LiteLLM makes of a late system message
    rule_late_system: _RuleClass = "transient"  # system messages behind the first user message
    cache_vlm_image_identity: bool = True  # images are part of the key
    cache_session_partitioning: bool = True  # kept for old .env files; the lookup is global
    cache_norm_safety_check: bool = False  # complain when the canonical text shrank by 10 %
    normalize_write_tool_content_for_prompt: bool = False  # a digest instead of written content

    # -- sampling, where the request says nothing
    default_temperature: Annotated[float, Field(ge=0, le=2)] = 0.1  # 0 = greedy
    default_top_p: Annotated[float, Field(gt=0, le=1)] = 0.9  # 1 = off
    default_top_k: _Count = 40  # 0 = off
    default_min_p: _Share = 0.05  # 0 = off
    default_repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0  # more harms calls
    default_repetition_context_size: _Count = 256  # tokens the penalty looks back on
    default_max_tokens: _Positive = 2048  # tokens of one reply
    default_thinking: bool = True  # the model thinks before it answers
    preserve_thinking: bool = True  # past thinking stays in the prompt, where the template can

    # -- logs
    log_level: _LogLevel = "INFO"
    enable_request_logging: bool = True  # session logs, with prompt contents
    log_prompt_tokens: bool = False  # session logs carry the exact ids that each prompt fed
    log_root: str = "logs"  # folder
    vlm_cache_debug: bool = False  # log token ids of image prompts

    not_yet_acting: ClassVar[frozenset[str]] = frozenset(
        {
            *("KV_BITS", "KV_GROUP_SIZE", "KV_QUANT_SCHEME", "QUANTIZED_KV_START"),
            *("CACHE_VLM_IMAGE_IDENTITY", "CACHE_SESSION_PARTITIONING", "VLM_CACHE_DEBUG"),
        }
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str | None]) -> Self:
        """Build from variables by name. Raises ConfigError, which names every bad one at once."""
        texts = {name: (env.get(name.upper()) or "").strip() for name in cls.model_fields}
        try:
            return cls.model_validate({name: text for name, text in texts.items() if text})
        except ValidationError as error:
            problems = (
                f"{name.upper()}={texts[name]!r}: {problem['msg'].removeprefix('Input ')}"
                for problem in error.errors()
                for name in [str(problem["loc"][0])]
            )
            raise ConfigError("\n".join(problems)) from None

    @classmethod
    def set_without_effect(cls, env: Mapping[str, str | None]) -> list[str]:
        """Names in `env`, sorted, of settings that later work will use and nothing reads yet."""
        said = {name: (env.get(name) or "").strip().lower() for name in cls.not_yet_acting}
        return sorted(name for name, value in said.items() if value not in ("", "false", "off"))


# endregion

# region 02 ERRORS =============================================================
# What can go wrong while answering, and the HTTP status of each.
# Each class is one row of the table status, type, code; `headers` go out with its body.
#
# Doors   ServerError, BadRequest, ContextTooLong, NotServed, NotReady, Overloaded
# Doors   GenerationFailed, ClientGone
# Knows   -
# Thread  any; pure
# Budget  84
# ==============================================================================


class ServerError(Exception):
    """Becomes an OpenAI error object; `param`: the field at fault, as in "messages[3].content"."""

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class BadRequest(ServerError):
    """The request cannot be honoured as it is; sending it again will not help."""

    status, type = 400, "invalid_request_error"


class ContextTooLong(BadRequest):
    """In OpenAI's wording: agents match "maximum context length is" and start to compact."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, limit: int) -> None:
        self.n_prompt, self.limit = n_prompt, limit
        sentence = (
            f"This model's maximum context length is {limit} tokens. However, your messages "
            f"resulted in {n_prompt} tokens. Please reduce the length of the messages."
        )
        super().__init__(sentence, param="messages")


class NotServed(ServerError):
    """What is not here, or not taken so: path or model 404, method 405, size 413, encoding 415."""

    type = "invalid_request_error"

    def __init__(self, status: int, message: str, *, code: str = "", **headers: str) -> None:
        super().__init__(message, code=code)
        self.status, self.headers = status, headers


class NotReady(ServerError):
    """The model is loading, or its thread is dead."""

    status, code = 503, "model_not_ready"


class Overloaded(ServerError):
    """The queue is full. Not a 429, which clients take for a quota and hammer on."""

    status, code = 503, "queue_full"
    headers: Mapping[str, str] = {"Retry-After": "2"}


class GenerationFailed(ServerError):
    """The model failed on this request; the log has the traceback, the client does not."""

    code = "generation_failed"


class ClientGone(Exception):
    """The socket closed under us. Logged; nobody is left to answer."""


# endregion

# region 03 LOG ================================================================
# Console, session logs, counters.
# What a client wrote never reaches the console, only the session log: one JSON object per line,
# readable by its owner alone, and only while ENABLE_REQUEST_LOGGING is on.
#
# Doors   log, start_logging, request_line, CacheMetrics, SessionLog
# Knows   CONFIG
# Owns    _CACHE_METRICS_LOCK
# Thread  any
# Budget  89
# ==============================================================================

log: Final = logging.getLogger("start-llm")
# prefill and decode in seconds; prompt, cached and out in tokens
_REQUEST_KEYS: Final = "req prompt cached layer prefill decode out ttft_ms finish"


def start_logging(config: Config) -> None:
    """Send the server's log to stderr at LOG_LEVEL. Called by MAIN; a second call adds nothing."""
    log.setLevel(config.log_level)
    log.propagate = False  # a library that configures the root logger would print all twice
    if log.handlers:
        return
    if sys.stderr.isatty():
        console = Console(stderr=True)
        log.addHandler(RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S"))
    else:  # whole plain lines for a file, where rich would fold them at 80
        plain = logging.StreamHandler(sys.stderr)
        plain.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        log.addHandler(plain)


def request_line(**values: object) -> str:
    """`req=7f3a prompt=1200 ...`: always these keys first, in this order, "-" if unknown."""
    pairs = []
    for key, value in (dict.fromkeys(_REQUEST_KEYS.split()) | values).items():
        text = f"{value:.3f}" if isinstance(value, float) else str("" if value is None else value)
        # A session id, which a client chose, cannot break the line or reach the terminal.
        pairs.append(f"{key}={re.sub(r'[^!-<>-~]+', '_', text[:80]) or '-'}")
    return " ".join(pairs)


class CacheMetrics:
    """Counters of what should be rare; these are shown even at zero."""

    def __init__(self) -> None:
        self._CACHE_METRICS_LOCK = threading.Lock()
        names = "vlm_retreat hybrid_trim_miss exact_key_rejected_by_model_lcp ledger_seam_fallback"
        self._counts = Counter(dict.fromkeys(names.split(), 0))

    def bump(self, name: str, by: int = 1) -> None:
        with self._CACHE_METRICS_LOCK:
            self._counts[name] += by

    def snapshot(self) -> dict[str, int]:
        """A copy of all counters at one moment."""
        with self._CACHE_METRICS_LOCK:
            return dict(self._counts)


class SessionLog:
    """LOG_ROOT/<date>/cache-session-<id>.log: what a session sent and what the cache made of it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._complained = threading.Event()

    def write(self, session_id: str, record: dict[str, Any]) -> None:
        """Append `record` and the time as one line. Never raises: the first failure is logged."""
        if not self._config.enable_request_logging:
            return
        now = datetime.now().astimezone()
        stamped = {"time": now.isoformat(timespec="milliseconds"), **record}
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", session_id)[:64]
        if not safe or safe != session_id:  # harmless in a file name; the digest tells them apart
            safe += f"-{sha256(session_id.encode('utf-8', 'replace')).hexdigest()[:12]}"
        path = Path(self._config.log_root, f"{now:%Y-%m-%d}", f"cache-session-{safe}.log")
        try:
            line = json.dumps(stamped, ensure_ascii=False, default=str) + "\n"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                file.write(line.encode("utf-8", "replace"))  # one write: threads' lines never mix
        except (OSError, TypeError, ValueError, RecursionError) as error:
            if not self._complained.is_set():
                self._complained.set()
                log.warning("session log %s cannot be written: %s", path, error)


# endregion

# region 04 WIRE ===============================================================
# Request JSON -> ChatRequest; the shapes we answer with.
# pydantic checks types and ranges (strict: "1" is no number, true is no integer). Unknown fields
# pass; one that would change the answer and that we cannot honour is refused. Null means absent.
# Messages stay plain dicts, normalised only where clients spell one thing in several ways.
#
# Doors   Body, Message, OriginalMessages, KvOffset, FinishReason, Usage, Ending, AnswerShape
# Doors   parse_json_body, given_fields, checked, without_nulls, Each, Name
# Doors   ChatRequest, Sampling, ToolChoice, SessionContext
# Knows   CONFIG, ERRORS
# Thread  any; pure
# Budget  487
# ==============================================================================

Body = dict[str, Any]
Message = dict[str, Any]
OriginalMessages = NewType("OriginalMessages", tuple[Message, ...])
KvOffset = NewType("KvOffset", int)
FinishReason = Literal["stop", "length", "tool_calls"]


def parse_json_body(raw: bytes) -> object:
    """The JSON value in `raw`; lone surrogates (JS cuts emoji in half) become U+FFFD."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        fault = error
    try:  # a lone surrogate is a fault above but not here, and UTF-16 can write it
        text = json.dumps(json.loads(raw.decode()), ensure_ascii=False)
        mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return from_json(mended, allow_inf_nan=False)
    except (ValueError, RecursionError):
        raise BadRequest(f"the body is not valid JSON: {fault}") from None


Name = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Length = Annotated[int, Field(ge=1)]
_Offset = Annotated[float, Field(ge=-2, le=2)]
type Each[T] = Annotated[list[T], Field(fail_fast=True)]  # a million faults cost no more than one


def _bias_pairs(value: object) -> object:
    """{"15043": -100} -> ((15043, -100),)."""
    if not (isinstance(value, dict) and all(map(str.isdecimal, value))):
        raise PydanticCustomError("bias", "should be an object whose keys are token ids")
    return tuple((int(key), bias) for key, bias in value.items())


_Bias = tuple[_TokenId, Annotated[float, Field(ge=-100, le=100)]]
_Biases = Annotated[tuple[_Bias, ...], Field(fail_fast=True), BeforeValidator(_bias_pairs)]


@validated_dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(strict=True))
class Sampling:
    """How the next token is chosen. The bare defaults are greedy with everything else off."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0  # 0 = greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 = off
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 or -1 = off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # 0 = off
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0  # 1 = off
    repetition_context_size: Annotated[int, Field(ge=0)] = 256  # tokens
    presence_penalty: _Offset = 0.0
    frequency_penalty: _Offset = 0.0
    logit_bias: _Biases = ()  # (token id, added to its logit)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # None: another every time


class _TextPart(TypedDict):
    type: Literal["text"]
    text: str


class _ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: str


class _Function(TypedDict):  # offered, called or chosen
    name: Name
    description: NotRequired[str | None]
    parameters: NotRequired[Body | None]
    arguments: NotRequired[str | Body | None]


class _Tool(TypedDict):
    type: NotRequired[Literal["function"] | None]
    id: NotRequired[str | None]
    function: _Function
    defer_loading: NotRequired[bool | None]


class _WireMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | Each[_TextPart | _ThinkingPart] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[Each[_Tool] | None]
    tool_call_id: NotRequired[str | None]


class _AnyBody(BaseModel):
    """The fields both endpoints read. Sampling checks its own; the dicts within are open too."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    stop: Name | Annotated[list[Name], Field(max_length=16)] = []
    # What we cannot do, with the values that do not ask for it.
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    audio: None = None
    modalities: list[Literal["text"]] = []
    functions: Annotated[list[Body], Field(max_length=0)] = []  # the forerunner of tools
    function_call: Literal["none", "auto"] = "none"


class _ChatBody(_AnyBody):
    messages: Annotated[Each[_WireMessage], Field(min_length=1)]
    tools: Each[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _Tool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: Body = {}
    response_format: Body = {}
    thinking_budget: Annotated[int, Field(ge=0)] | None = Field(
        default=None, validation_alias=AliasPath("thinking", "budget_tokens")
    )


class _CompletionBody(_AnyBody):
    prompt: Name | Annotated[Each[_TokenId], Field(min_length=1)]
    response_format: dict[Literal["type"], Literal["text"]] = {}
    logprobs: None = None  # of chats only


def without_nulls(fields: Mapping[str, Any]) -> Body:
    """Null means absent."""
    return {name: value for name, value in fields.items() if value is not None}


def given_fields(body: object) -> Body:
    """What the body really says: nulls are absent, and a literal `extra_body` is laid under it."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    nested = body.get("extra_body")
    return without_nulls(nested if isinstance(nested, dict) else {}) | without_nulls(body)


def checked[T](build: Callable[..., T], given: Body) -> T:
    """`build` of what was given. Raises BadRequest for the first fault, at its deepest place."""
    try:
        return build(**given)
    except ValidationError as error:
        faults = [(_path(fault, given), fault["msg"]) for fault in error.errors()]
    first = faults[0][0]
    deepest = max((path for path, _ in faults if path[: len(first)] == first), key=len)
    wants = [want.removeprefix("Input ") for path, want in faults if path == deepest]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in deepest)[1:]
    raise BadRequest(f"{param}: {' or '.join(wants)}", param=param)  # several: a union's branches


def _path(fault: ErrorDetails, here: Any) -> list[str | int]:
    """The steps from the body `here` to the fault; pydantic puts the tags of unions among them."""
    path: list[str | int] = []
    for step in fault["loc"]:
        with suppress(KeyError, TypeError):
            if here is not fault["input"]:
                here = here[step]
                path.append(step)
    return [*path, fault["loc"][-1]] if fault["type"] == "missing" else path


_THINKING_NAMES: Final = ("enable_thinking", "thinking", "reasoning_effort", "reasoning")
_THINKING_LEVELS: Final[Mapping[str, str]] = {  # off, on, or how hard
    **dict.fromkeys(("off", "none", "disabled", "false"), "off"),
    **dict.fromkeys(("on", "enabled", "adaptive", "between_tools", "auto", "true"), "on"),
    **dict.fromkeys(("minimal", "low"), "low"),
    "medium": "medium",
    **dict.fromkeys(("high", "xhigh", "max"), "high"),
}
# No switches of a template but arguments of applying one: not a request's to set.
_NO_SWITCHES: Final = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "padding", "truncation", "max_length", "sanitize_control_tokens"),
)
_SESSION_NAMES: Final = ("session_id", "conversation_id", "thread_id", "chat_id")
_SESSION_PLACES: Final = (  # ids of a conversation, of a client's process, of a cache, of a user
    *(*_SESSION_NAMES, *(f"metadata.{name}" for name in _SESSION_NAMES), "metadata.user_id"),
    *("x-claude-code-session-id", "x-session-id", "thread-id", "session-id"),
    *("prompt_cache_key", "user"),
)
_CLAUDE_SESSION: Final = re.compile(r'"session_id"\s*:\s*"([^"]+)"')  # in metadata.user_id


def _flat(given: Body) -> Body:
    """The fields of the body, then those of its metadata as metadata.x."""
    metadata = given.get("metadata")
    inner = metadata.items() if isinstance(metadata, dict) else ()
    return given | {f"metadata.{name}": value for name, value in inner}


def _thinking_levels(value: object, param: str) -> Iterator[str]:
    """What one field says about thinking: nothing, one level, or (an object) several."""
    if isinstance(value, dict):
        for key in ("enabled", "effort", "level", "type"):
            yield from _thinking_levels(value.get(key), f"{param}.{key}")
    elif value is not None:
        if (word := str(value).lower()) not in _THINKING_LEVELS:
            words = ", ".join(_THINKING_LEVELS)
            raise BadRequest(f"{param}: {value!r:.60} is none of {words}", param=param)
        yield _THINKING_LEVELS[word]


def _thinking(given: Body, default: bool) -> tuple[bool, Body]:
    """(thinks, template switches). The first spelling that says anything wins."""
    switches = without_nulls(given.get("chat_template_kwargs", {}))
    for name in switches.keys() & set(_NO_SWITCHES):
        param = f"chat_template_kwargs.{name}"
        raise BadRequest(f"{param}: this is not a request's to set", param=param)
    switch = "chat_template_kwargs.enable_thinking"
    said = _flat(given) | {switch: switches.pop("enable_thinking", None)}
    places = (switch, *_THINKING_NAMES, *(f"metadata.{name}" for name in _THINKING_NAMES))
    levels = [level for p in places for level in _thinking_levels(said.get(p), p)]
    thinks = levels[0] != "off" if levels else default
    effort = next((level for level in levels if level not in ("off", "on")), None)
    if thinks and effort:
        switches.setdefault("reasoning_effort", effort)
    return thinks, switches


class SessionContext(NamedTuple):
    """The conversation a request says it belongs to, and the field or header that says so."""

    session_id: str | None = None
    source: str = ""
    parent: str | None = None  # of a sub-agent: the conversation that started it


def _session(given: Body, headers: Mapping[str, str]) -> SessionContext:
    """The id in the first of _SESSION_PLACES that has one."""
    places: Body = {**{name.lower(): value for name, value in headers.items()}, **_flat(given)}
    claude = _CLAUDE_SESSION.search(str(places.get("metadata.user_id")))
    places["metadata.user_id"] = claude and claude[1]
    said = {name: str(v)[:256] for name, v in places.items() if v and type(v) in (str, int)}
    place = next(filter(said.get, _SESSION_PLACES), "")
    session_id = said.get(place)
    parent = said.get("x-parent-session-id") or said.get("x-codex-parent-thread-id")
    if agent := said.get("x-claude-code-agent-id"):  # shares its parent's session id
        session_id, parent = f"{session_id}/{agent}", session_id
    return SessionContext(session_id, place, parent)


def _schema(form: Body) -> Body | None:
    """The JSON schema that a `response_format` binds the answer to; None for text."""
    match {"type": "text", **form}:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    param = "response_format" + ".json_schema.schema" * (form["type"] == "json_schema")
    raise BadRequest(f"{param}: should be a JSON schema", param=param)


def _message(index: int, wire: _WireMessage) -> Message:
    """One message without nulls and empty lists, thinking under one name, content always there."""
    message: Message = {k: v for k, v in wire.items() if v is not None and v != []}
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    param = f"messages[{index}].content"
    if isinstance(content := message.get("content"), list):
        thoughts = "".join(part["thinking"] for part in content if part["type"] == "thinking")
        message["content"] = [part for part in content if part["type"] == "text"]
        if thoughts and message["role"] != "assistant":
            raise BadRequest(f"{param}: only a reply has thinking parts", param=param)
        if thoughts:
            message.setdefault("reasoning_content", thoughts)
    if message["role"] in ("system", "developer", "user") and "content" not in message:
        raise BadRequest(f"{param}: a {message['role']} message needs it", param=param)
    return {"content": "", **message}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """May, must not, or must the model call a tool; `name` is set where mode is "named"."""

    mode: Literal["auto", "none", "required", "named"] = "none"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request as every later room sees it, whichever endpoint it came through."""

    kind: Literal["chat", "completion", "messages"]
    request_id: str
    model: str | None  # as asked for; None: whatever is loaded
    session: SessionContext
    sampling: Sampling
    max_tokens: int  # of the reply, >= 1
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    messages: OriginalMessages = OriginalMessages(())  # of a chat; content: a str or text parts
    prompt: str | tuple[int, ...] | None = None  # of a completion; ids may exceed the vocabulary
    tools: tuple[Body, ...] = ()
    deferred: tuple[Body, ...] = ()  # tools that can be called, but are not in the prompt's head
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives per token
    thinking: bool = False
    thinking_budget: int | None = None  # tokens
    schema: Body | None = None  # JSON schema of the answer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # never enable_thinking

    @classmethod
    def from_chat(
        cls, body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
    ) -> Self:
        """POST /v1/chat/completions. Raises BadRequest whose `param` is the path of the field."""
        given = given_fields(body)
        asked = checked(_ChatBody, given)
        if asked.top_logprobs and not asked.logprobs:
            raise BadRequest("top_logprobs: it needs logprobs to be true", param="top_logprobs")
        offered = {tool["function"]["name"] for tool in asked.tools}
        match asked.tool_choice:
            case {"function": {"name": str() as name}} if name in offered:
                choice = ToolChoice("named", name)
            case "auto" | "none" | "required" as mode if offered or mode != "required":
                choice = ToolChoice(mode if offered else "none")
            case wanted:
                wrong = f"tool_choice: {wanted!r:.80} is not among the tools"
                raise BadRequest(wrong, param="tool_choice")
        thinks, switches = _thinking(given, config.default_thinking)
        messages = itertools.starmap(_message, enumerate(asked.messages))
        # Only what describes the function: templates print a tool whole, with any cache_control.
        functions = (without_nulls(tool["function"]) for tool in asked.tools)
        tools = [{"type": "function", "function": function} for function in functions]
        late = [bool(tool.get("defer_loading")) for tool in asked.tools]
        same = {"parallel_tool_calls", "logprobs", "top_logprobs", "thinking_budget"}
        return cls(
            kind="chat",
            request_id=request_id,
            session=_session(given, headers),
            messages=OriginalMessages(tuple(messages)),
            tools=tuple(tool for tool, is_late in zip(tools, late, strict=True) if not is_late),
            deferred=tuple(itertools.compress(tools, late)),
            tool_choice=choice,
            thinking=thinks,
            schema=_schema(asked.response_format),
            template_kwargs=switches,
            **asked.model_dump(include=same),
            **_shared_fields(asked, given, config=config),
        )

    @classmethod
    def from_completion(
        cls, body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
    ) -> Self:
        """POST /v1/completions: one prompt, as text, as token ids or as a list of one of these."""
        given = given_fields(body)
        match given.get("prompt"):
            case [str() | list() as only]:
                given["prompt"] = only
            case [str() | list(), *_]:
                raise BadRequest("prompt: only one per request", param="prompt")
        asked = checked(_CompletionBody, given)
        return cls(
            kind="completion",
            request_id=request_id,
            session=_session(given, headers),
            prompt=asked.prompt if isinstance(asked.prompt, str) else tuple(asked.prompt),
            **_shared_fields(asked, given, config=config),
        )


def _shared_fields(asked: _AnyBody, given: Body, *, config: Config) -> Body:
    """The fields of a ChatRequest that both endpoints read the same way."""
    names = Sampling.__dataclass_fields__
    sampling = {name: given.get(name, getattr(config, f"default_{name}", None)) for name in names}
    return {
        "model": asked.model,
        "sampling": checked(Sampling, without_nulls(sampling)),
        "max_tokens": asked.max_completion_tokens or asked.max_tokens or config.default_max_tokens,
        "stop": (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        "stream": asked.stream,
        "include_usage": bool(asked.stream_options.get("include_usage")),
    }


class Usage(NamedTuple):
    """Tokens: of the prompt, those of it whose KV was reused, of the reply, of its thinking."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    def body(self) -> Body:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }


class Ending(NamedTuple):
    """How a reply ended; `stop`: the stop string that did it."""

    finish: FinishReason
    usage: Usage
    stop: str | None = None
    logprobs: Body | None = None  # those that have not left yet


class AnswerShape(NamedTuple):
    """The bodies of one answer, streamed or whole; chats carry dicts, completions carry text."""

    kind: Literal["chat", "completion"]
    request_id: str
    model: str  # the one that really answers
    created: int  # Unix seconds
    include_usage: bool = False  # at the end of a stream

    def begin(self, _usage: Usage) -> list[Body]:
        return self.say({"role": "assistant", "content": ""}) if self.kind == "chat" else []

    def ping(self) -> Body:
        """A stream event that says nothing. why(L-18): an SSE comment does not count as life."""
        # why(L-50): LiteLLM swallows an event without a choice, and one with empty content
        return self.say({"content": "", "reasoning_content": ""})[0]

    def say(self, delta: Body, logprobs: Body | None = None) -> list[Body]:
        """One stream event with what is new."""
        return [self._body("delta", delta, logprobs=logprobs)]

    def end(self, ending: Ending) -> list[Body]:
        last = self._body("delta", {}, finish_reason=ending.finish, logprobs=ending.logprobs)
        usage = {**last, "choices": [], "usage": ending.usage.body()}
        return [last, usage] if self.include_usage else [last]

    def whole(self, message: Body, ending: Ending) -> Body:
        """The whole message or text at once."""
        body = self._body("message", message, finish_reason=ending.finish, logprobs=ending.logprobs)
        return {**body, "usage": ending.usage.body()}

    def _body(self, part: str, words: Body, **more: object) -> Body:
        prefix, name, said = "cmpl", "text_completion", {"text": words.get("content") or ""}
        if self.kind == "chat":
            name = "chat.completion" + ".chunk" * (part == "delta")
            prefix, said = "chatcmpl", {part: words}
        head = {"id": f"{prefix}-{self.request_id}", "object": name, "created": self.created}
        choice = {"index": 0, **said, "finish_reason": None, **more}
        return {**head, "model": self.model, "choices": [choice]}


# endregion

# region 05 MESSAGES ===========================================================
# Anthropic Messages <-> the same ChatRequest, and the same answer as Anthropic's events.
#
# A body is checked as Anthropic's and said again as a chat: by whichever API a conversation comes,
# its prompt and its cache are the same. What clients attach for Anthropic's own machines
# (cache_control, context_management, betas) is accepted; everything is cached anyway.
# A tool with `defer_loading` is no part of the prompt's head: its definition stands where a
# `tool_reference` names it, so that loading one leaves all that was said before as it was (L-48).
#
# Doors   from_anthropic, AnthropicEvents, anthropic_error, thought_id
# Knows   CONFIG, ERRORS, WIRE
# Thread  any; pure
# Budget  273
# ==============================================================================


class _MessagesMessage(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | Each[Body]


class _MessagesTool(TypedDict):
    name: Name
    type: NotRequired[str | None]
    description: NotRequired[str | None]
    input_schema: NotRequired[Body]
    defer_loading: NotRequired[bool | None]


class _MessagesChoice(TypedDict):
    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str]
    disable_parallel_tool_use: NotRequired[bool | None]


class _MessagesBody(BaseModel):
    """What a chat says otherwise; the rest is checked as a chat's."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    messages: Annotated[Each[_MessagesMessage], Field(min_length=1)]
    system: str | Each[Body] = []
    tools: Each[_MessagesTool] = []
    tool_choice: _MessagesChoice = {"type": "auto"}
    stop_sequences: list[Name] = []
    output_config: Body = {}
    mcp_servers: Annotated[list[Body], Field(max_length=0)] = []


# Anthropic runs these itself; a model that is not made to call one does without.
_SERVER_TOOLS: Final = re.compile("(web_search|web_fetch|code_execution|tool_search|mcp|advisor)_")


def from_anthropic(
    body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """POST /v1/messages. Raises BadRequest whose `param` is the path of the field."""
    given = given_fields(body)
    asked = checked(_MessagesBody, given)
    tools = dict(_chat_tools(asked.tools))
    messages = [{"role": "system", "content": _parts(asked.system, tools, param="system")}]
    for index, message in enumerate(asked.messages):
        messages += _chat_messages(message, tools, param=f"messages[{index}].content")
    choice = {"any": "required", "tool": {"function": {"name": asked.tool_choice.get("name", "")}}}
    chat: Body = {
        "thinking": {"type": "disabled"},  # unless the request says otherwise
        **{name: value for name, value in given.items() if name not in _MessagesBody.model_fields},
        "messages": messages[not asked.system :],
        "tools": list(tools.values()),
        "tool_choice": choice.get(asked.tool_choice["type"], asked.tool_choice["type"]),
        "parallel_tool_calls": not asked.tool_choice.get("disable_parallel_tool_use"),
        "stop": asked.stop_sequences,
        "reasoning_effort": asked.output_config.get("effort"),
    }
    wanted = asked.output_config.get("format", given.get("output_format"))
    if isinstance(wanted, dict):
        chat["response_format"] = {**wanted, "json_schema": {"schema": wanted.get("schema")}}
    request = ChatRequest.from_chat(chat, config, request_id=request_id, headers=headers)
    return replace(request, kind="messages")


def _chat_tools(tools: list[_MessagesTool]) -> Iterator[tuple[str, Body]]:
    # Anthropic's own search never runs here: what it would find has to be there already.
    is_searched = any((tool.get("type") or "").startswith("tool_search_") for tool in tools)
    for index, tool in enumerate(tools):
        if (kind := tool.get("type") or "custom") == "custom":
            known = {"name": tool["name"], "description": tool.get("description")}
            function = without_nulls({**known, "parameters": tool.get("input_schema")})
            is_late = bool(tool.get("defer_loading")) and not is_searched
            yield tool["name"], {"function": function, "defer_loading": is_late}
        elif not _SERVER_TOOLS.match(kind):
            sentence = f"{kind!r} has no schema of its own here; offer it as a custom tool"
            raise BadRequest(f"tools[{index}].type: {sentence}", param=f"tools[{index}].type")


def _chat_messages(
    message: _MessagesMessage, tools: Mapping[str, Body], *, param: str
) -> list[Message]:
    """The same as chat messages: each tool result is a message of its own."""
    role, blocks = message["role"], _blocks(message["content"])
    if role == "assistant":
        return [_chat_reply(blocks, tools, param=param)]
    said: list[Message] = []
    for index, block in enumerate(blocks):
        here = f"{param}[{index}]"
        if block.get("type") == "tool_result":
            parts = _parts(without_nulls(block).get("content", ""), tools, param=f"{here}.content")
            if block.get("is_error") and not any("error" in p["text"].lower() for p in parts):
                parts.insert(0, {"type": "text", "text": "Error:"})  # no chat has a field for it
            said += [{"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": parts}]
            continue
        if not said or said[-1]["role"] == "tool":
            said += [{"role": role, "content": []}]
        said[-1]["content"].append({"type": "text", "text": _text(block, tools, param=here)})
    return said or [{"role": role, "content": ""}]


def _chat_reply(blocks: list[Body], tools: Mapping[str, Body], *, param: str) -> Message:
    """Texts were one stream and are one again; what `thought_id` names may have been left out."""
    reply: Message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for index, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str() as thought}:
                reply["reasoning_content"] += thought
                reply["thought_id"] = str(block.get("signature", ""))
            case {"type": "redacted_thinking"}:
                pass  # another machine's, which nobody can read
            case {"type": "tool_use", "name": name, "input": arguments}:
                call = {"id": block.get("id"), "function": {"name": name, "arguments": arguments}}
                reply["tool_calls"].append(call)
            case _:
                reply["content"] += _text(block, tools, param=f"{param}[{index}]")
    return {name: value for name, value in reply.items() if value or name == "content"}


def _blocks(said: Any) -> list[Any]:
    return said if isinstance(said, list) else [{"type": "text", "text": said}]


def _parts(said: Any, tools: Mapping[str, Body], *, param: str) -> list[Body]:
    """The text parts that the model reads."""
    texts = (_text(b, tools, param=f"{param}[{i}]") for i, b in enumerate(_blocks(said)))
    return [{"type": "text", "text": text} for text in texts]


def _text(block: Body, tools: Mapping[str, Body], *, param: str) -> str:
    match block:
        case {"type": "text", "text": str() as text}:
            return text
        case {"type": "tool_reference", "tool_name": str() as name}:
            function = tools[name]["function"] if name in tools else {"name": name}
            return f"<tool>\n{json.dumps(function, ensure_ascii=False)}\n</tool>"
        case {"type": "document", "source": {"type": "text", "data": str() as text}}:
            return text
        case {"type": "image", "source": dict() as source}:
            digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:12]
            return f"[an image, sha256 {digest}, that this model cannot see: it only reads text]"
    raise BadRequest(f"{param}: {json.dumps(block):.80} cannot be read here", param=param)


def thought_id(thought: str) -> str:
    """What stands as a thinking block's signature, and finds the thinking if it is left out."""
    return f"start-llm-{hashlib.sha256(thought.encode()).hexdigest()[:32]}"


class AnthropicEvents:
    """One answer as Anthropic says it; `whole` gives the message that the events build."""

    _STOPS: ClassVar = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

    def __init__(self, request_id: str, model: str) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant"}
        self._head["model"] = model
        self._blocks: list[Body] = []  # those that have ended
        self._open: Body = {}  # the one that has not, as it began
        self._said = ""  # in that one: text, or a call's arguments in JSON

    def begin(self, usage: Usage) -> list[Body]:
        return [{"type": "message_start", "message": self._message(usage)}]

    def ping(self) -> Body:
        return {"type": "ping"}

    def say(self, delta: Body, _logprobs: Body | None = None) -> list[Body]:
        """The events of a chat's delta; what is of another kind opens another block."""
        block: Body
        match delta:
            case {"tool_calls": [{"function": function, **call}]}:
                said, named = function["arguments"], {"name": function.get("name")}
                block = {"type": "tool_use", "id": call.get("id"), **named, "input": {}}
                told = {"type": "input_json_delta", "partial_json": said}
            case {"reasoning_content": said}:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                told = {"type": "thinking_delta", "thinking": said}
            case {"content": said}:
                block = {"type": "text", "text": ""}
                told = {"type": "text_delta", "text": said}
        events: list[Body] = []
        if block["type"] != self._open.get("type") or block.get("name"):
            events, self._open = self._end_block(), block
            events.append(self._event("start", content_block=block))
        self._said += said
        return [*events, self._event("delta", delta=told)] if said else events

    def _event(self, kind: str, **more: Body) -> Body:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **more}

    def _end_block(self) -> list[Body]:
        events, end = [], dict(self._open)
        match end:
            case {"type": "text"}:
                end["text"] = self._said
            case {"type": "thinking"}:
                signed = {"signature": thought_id(self._said)}
                events = [self._event("delta", delta={"type": "signature_delta", **signed})]
                end |= {"thinking": self._said, **signed}
            case {"type": "tool_use"}:
                with suppress(BadRequest):  # what no reader of JSON takes
                    end["input"] = parse_json_body((self._said or "{}").encode())
            case _:
                return []
        events.append(self._event("stop"))
        self._blocks.append(end)
        self._open, self._said = {}, ""
        return events

    def end(self, ending: Ending) -> list[Body]:
        events, message = self._end_block(), self.whole({}, ending)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        closing = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        return [*events, closing, {"type": "message_stop"}]

    def whole(self, _message: Body, ending: Ending) -> Body:
        """The chat's message has been said already, in the order in which it was generated."""
        self._end_block()
        reason = "stop_sequence" if ending.stop else self._STOPS[ending.finish]
        return self._message(ending.usage, stop_reason=reason, stop_sequence=ending.stop)

    def _message(self, usage: Usage, **stops: str | None) -> Body:
        # All that is prefilled is cached, but for the token that the first step of decoding feeds.
        new = usage.prompt - usage.cached
        tokens = {"input_tokens": min(new, 1), "cache_creation_input_tokens": max(new - 1, 0)}
        tokens |= {"cache_read_input_tokens": usage.cached, "output_tokens": usage.completion}
        nulls = {"stop_reason": None, "stop_sequence": None}
        return {**self._head, "content": [*self._blocks], **nulls, **stops, "usage": tokens}


def anthropic_error(error: ServerError) -> Body:
    """The error in Anthropic's shape; the words of a prompt too long are those agents look for."""
    kinds = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(error.status, error.type.replace("server_error", "api_error"))
    message = str(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.n_prompt} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


# endregion

# region 06 HEAL ===============================================================
# Put back the thinking that a client stripped from a reply of ours.
#
# For replies that the ledger does not cover (a fallback, a past it forgot), found by what a client
# does keep: a signature, or content and calls. Thinking that it sends is never replaced.
#
# Doors   HealingStore, _heal_messages, reply_digest, canonical_json
# Knows   WIRE, MESSAGES
# Owns    _healing_lock
# Thread  any
# Budget  92
# ==============================================================================


def _as_js(value: Any) -> Any:
    """A JSON value as a JavaScript client writes it again: 2.0 is 2, and so 2**53 + 1 is 2**53."""
    if isinstance(value, dict):
        return {key: _as_js(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_as_js, value))
    is_whole = type(value) in (int, float) and float(value).is_integer()
    return int(float(value)) if is_whole else value


def canonical_json(arguments: object) -> str:
    """Tool arguments, text or parsed, without what clients change: white space, order, numbers."""
    try:
        parsed = from_json(arguments or "{}") if isinstance(arguments, str) else arguments
        return json.dumps(_as_js(parsed or {}), sort_keys=True)
    except (ValueError, OverflowError):
        return str(arguments)


def reply_digest(message: Message) -> bytes:
    """What names a reply: its content and its calls. Not its thinking, and no call's id."""
    name = hashlib.sha256(message["content"].encode())
    for call in message.get("tool_calls", ()):
        function = call["function"]
        name.update(f"\0{function['name']}\0{canonical_json(function.get('arguments'))}".encode())
    return name.digest()


class HealingStore:
    """Thinking by reply_digest(); the replies used least recently are forgotten."""

    CAP: Final = 2000  # replies

    def __init__(self) -> None:
        self._healing_lock = threading.Lock()
        self._thoughts: OrderedDict[bytes, str] = OrderedDict()  # guarded by it

    def remember(self, reply: Message) -> None:
        """Keep the thinking of a whole reply, if it has any."""
        if thought := reply.get("reasoning_content"):
            digest = reply_digest(reply)
            with self._healing_lock:
                self._thoughts[digest] = thought
                self._thoughts.move_to_end(digest)
                if len(self._thoughts) > self.CAP:
                    self._thoughts.popitem(last=False)

    def thought_of(self, reply: Message) -> str:
        """The thinking that led to this reply; "" where none is known."""
        digest, named = reply_digest(reply), reply.get("thought_id")
        with self._healing_lock:
            if digest not in self._thoughts and str(named).startswith("start-llm-"):  # changed
                known = (d for d, thought in self._thoughts.items() if thought_id(thought) == named)
                digest = next(known, b"")
            if digest in self._thoughts:
                self._thoughts.move_to_end(digest)
            return self._thoughts.get(digest, "")

    def __len__(self) -> int:
        return len(self._thoughts)


def _heal_messages(messages: Iterable[Message], store: HealingStore) -> list[Message]:
    """The same messages; replies that came back without their thinking have it again."""
    healed = []
    for message in messages:
        is_bare = message["role"] == "assistant" and not message.get("reasoning_content")
        thought = store.thought_of(message) if is_bare and len(store) else ""
        healed.append({**message, "reasoning_content": thought} if thought else message)
    return healed


# endregion

# region 07 CANON ==============================================================
# The second copy of a conversation, its volatile fields stilled: it says whether this past is the
# same past, and never what the model reads (L-37).
#
# One registry of rules. Each finds one field in the texts of some roles:
#   telemetry   means nothing to the model: dropped, and counted
#   pinned      stays as it was first rendered; a value that differs is restated once, at the end
#   transient   comes and goes at the end of a conversation: told when it changed
# A pattern is anchored to a line or an end of the text, and finds nothing inside code fences or
# tool results, where the same words are somebody's data. `value` is what varies. Messages of only
# such blocks, and late system messages, become notes at the tail of the message before them.
#
# Doors   Canon, Rule, Turn, Volatile, Memo, SYSTEM_ROLES
# Doors   replaced, reminder, _canonicalize_messages
# Knows   CONFIG, WIRE, HEAL
# Thread  any; pure
# Budget  263
# ==============================================================================

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_USER: Final = frozenset({"user"})
_BOTH: Final = SYSTEM_ROLES | _USER
_SYSTEMS: Final = frozenset({"late_system", "operator_note"})  # rules of notes by the system


class Rule(NamedTuple):
    """One volatile field. Its setting is RULE_<NAME>, its class there the default."""

    name: str
    roles: frozenset[str]
    pattern: re.Pattern[str]
    in_fences: bool  # the client itself wraps this field in a code fence
    kind: str = "off"  # as configured


_STAMP: Final = r"[FMSTW][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?(?: [\w:+/-]+)?"
_ROUTED: Final = r"\[Inter-session message\] sourceSession=[^\n]*\n[^\n]*\n"
_INBOUND: Final = (
    r"^(?:## Group Chat Context\n)?## Inbound Context[^\n]*\n(?:(?!#|```)[^\n]*\n)*"
    r"```json\n(?:(?!```)[^\n]*\n)*```\n"
)
_DATE: Final = "(?:Current date|Today's date)(?: is|:)"
_REMINDER: Final = r"<system-reminder>(?:(?!</?system-reminder>)[\s\S])*</system-reminder>"
_OPENERS: Final = ("<system-reminder>", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>")
_CLOSERS: Final = ("</system-reminder>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
_CARRIER: Final = rf"{_OPENERS[1]}[\s\S]*?{_CLOSERS[1]}"
_FENCED: Final = frozenset({"message_id", "inbound_context"})
_TIME: Final = r"(?:Current time(?: is|:)|Reference UTC:)"
_SESSION: Final = "(?:Runtime: agent=|Inline buttons not enabled for )"
_RULES: Final = tuple(
    Rule(name, roles, re.compile(expression, re.MULTILINE), name in _FENCED)
    for name, roles, expression in (
        # why(L-37): Claude Code's first system block; its cch= changes with every request.
        ("billing_header", SYSTEM_ROLES, r"\A\s*x-anthropic-billing-header: cc_[^\n]*\n*"),
        # why(L-38): OpenClaw writes a new id into its system prompt at each user turn.
        ("message_id", SYSTEM_ROLES, r'^[ \t]*"message_id"[ \t]*:[ \t]*"(?P<value>[^"\n]*)"'),
        # The whole section is there in some of OpenClaw's runs and absent in others.
        ("inbound_context", SYSTEM_ROLES, _INBOUND),
        # why(L-39): minute stamps in front of user messages; on replay some become another prefix.
        ("timestamp", _USER, rf"\A(?P<value>\[{_STAMP}\] |{_ROUTED})"),
        ("current_time", _BOTH, rf"^{_TIME}[ \t]+(?P<value>[^\n]+)$"),
        # why(L-40): a day ends, and everything behind the date is prefilled again.
        ("current_date", SYSTEM_ROLES, rf"^[ \t*-]*{_DATE}[ \t]+(?P<value>[^\n]+)$"),
        ("git_status", SYSTEM_ROLES, r"^gitStatus: (?P<value>[\s\S]+)\Z"),
        # why(L-41): a line of figures about a sub-agent or a session.
        ("runtime", _USER, r"^Stats: runtime (?P<value>[^\n]+)$"),
        ("session_line", _BOTH, rf"^{_SESSION}(?P<value>[^\n]+)$"),
        # why(L-42): blocks that move with the newest message.
        ("reminder", _USER, rf"^{_REMINDER}[ \t]*$"),
        ("internal_context", _USER, rf"^{_CARRIER}[ \t]*$"),
        ("operator_note", _USER, r"\AOperator note \(not from the user\)[\s\S]*\Z"),
        ("late_system", SYSTEM_ROLES, r"(?!)"),  # found by its place, not by its words
    )
)
_FENCE: Final = re.compile(r"^(```+|~~~+)[^\n]*\n[\s\S]*?(?:^\1|\Z)", re.MULTILINE)


class Volatile(NamedTuple):
    """A volatile field of one message: `pinned` or `transient`, and where its text is."""

    rule: str
    kind: str
    value: str  # what is compared; of a block all its text, what is pinned in it stilled
    start: int = 0  # in the content as sent, without the line breaks that go with a block
    end: int = 0
    text: str = ""  # of a pinned block, as it is restated


@dataclass(frozen=True, slots=True)
class Turn:
    """One message in both pipelines. `head` and `tail`: notes of messages that fold into it."""

    role: str
    message: Message  # what the client said, telemetry dropped; `content` is text
    canonical: Message
    digest: bytes  # of the canonical message
    thought: str = ""  # of an assistant's message, as far as it was sent
    fields: tuple[Volatile, ...] = ()  # in its content, ascending
    head: tuple[Volatile, ...] = ()
    tail: tuple[Volatile, ...] = ()
    n_dropped: int = 0  # telemetry fields

    @property
    def notes(self) -> Iterator[Volatile]:
        """All transient texts it carries."""
        own = (found for found in self.fields if found.kind == "transient")
        return itertools.chain(self.head, own, self.tail)


class Memo[Value]:
    """What was made under a name, kept; when full it begins anew. What a race loses is remade."""

    ENTRY_CHARS: Final = 100  # what an entry costs beside its name

    def __init__(self, most: int) -> None:
        self.most = most  # characters of all names
        self.made: dict[str | bytes, Value] = {}
        self.n_chars = 0

    def of(self, name: str | bytes, make: Callable[[], Value]) -> Value:
        """What is kept under this name; made now if there is nothing."""
        made = self.made.get(name)
        if made is None:
            made = self.made[name] = make()
            self.n_chars += len(name) + self.ENTRY_CHARS
            if self.n_chars > self.most:
                self.made, self.n_chars = {}, 0
        return made


class Canon:
    """The rules as configured, and how this model's template joins text parts and tags thinking."""

    def __init__(self, config: Config, *, joint: str, tags: tuple[str, str]) -> None:
        known = _RULES if config.cache_canonicalize_tool_context else ()
        rules = (rule._replace(kind=getattr(config, f"rule_{rule.name}")) for rule in known)
        self.rules = tuple(rule for rule in rules if rule.kind != "off")
        self.joint = joint
        self._tags = tags
        self.memo: Memo[Turn] = Memo(16_000_000)  # clients resend it all

    def still(self, message: Message) -> Turn:
        """Both copies of one message; where it stands is not known here."""
        name = marshal.dumps(message, 2)  # version 2: equal values are equal bytes
        return self.memo.of(name, partial(self._stilled, message))

    def _stilled(self, message: Message) -> Turn:
        role, content = message["role"], message["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if role == "assistant":
            return self._reply(message, self.joint.join(parts))
        known = [rule for rule in self.rules if role in rule.roles]
        n_dropped, rules = 0, [rule for rule in known if rule.kind != "telemetry"]
        for rule in (rule for rule in known if rule.kind == "telemetry"):
            cuts = [rule.pattern.subn("", part) for part in parts]
            parts, n_dropped = [part for part, _ in cuts], n_dropped + sum(n for _, n in cuts)
        text = ""
        for part in filter(None, parts):  # as the template joins them; a block has its own lines
            is_block = text.endswith(_CLOSERS) or part.startswith(_OPENERS)
            joint = self.joint if "\n" in self.joint or not is_block else "\n"
            text += joint * bool(text) + part
        fields = tuple(_fields(text, rules))
        return _turn({**message, "content": text}, fields, n_dropped=n_dropped)

    def _reply(self, message: Message, content: str) -> Turn:
        """Thinking under one name, wherever the client has put it."""
        thought, (start, end) = message.get("reasoning_content") or "", self._tags
        opened, closed, answer = content.lstrip().partition(end or "\0")
        if not thought and closed and start and opened.startswith(start):
            thought, content = opened.removeprefix(start).strip("\n"), answer.lstrip("\n")
        if not thought.strip():  # blank lines are what is left of thinking that was cut out
            content = content.lstrip("\n")
        own = {k: v for k, v in message.items() if k != "reasoning_content"} | {"content": content}
        told = own | {"reasoning_content": thought} if thought.strip() else own
        return Turn("assistant", told, own, reply_digest(own), thought.strip())


def _turn(message: Message, fields: tuple[Volatile, ...] = (), *, n_dropped: int = 0) -> Turn:
    role, sent = message["role"], message["content"]
    words = replaced(sent, fields)
    canonical = {"role": role, "name": message.get("name", ""), "content": words}
    ours = words.count("__STABLE_") - sent.count("__STABLE_")  # not the client's own
    name = sha256("\0".join([*canonical.values(), str(ours)]).encode()).digest()
    return Turn(role, message, canonical, name, fields=fields, n_dropped=n_dropped)


def _fields(text: str, rules: Sequence[Rule]) -> Iterator[Volatile]:
    """Ascending; of two that overlap, the first; behind a pinned block the fields inside it."""
    fences = [fence.span() for fence in _FENCE.finditer(text)] if rules else []
    found = (
        _volatile(rule, match, rules=rules)
        for rule in rules
        for match in rule.pattern.finditer(text)
        if rule.in_fences or not any(a <= match.start() < b for a, b in fences)
    )
    end = 0
    for one in sorted(found, key=lambda one: one.start):
        if one.start >= end:
            yield one
            end = end if one.text else one.end


def _volatile(rule: Rule, match: re.Match[str], *, rules: Sequence[Rule]) -> Volatile:
    if rule.kind == "transient":
        return Volatile(rule.name, rule.kind, match[0].strip(), *match.span())
    if "value" in match.re.groupindex:
        return Volatile(rule.name, rule.kind, match["value"].strip(), *match.span("value"))
    inner = _fields(match[0], [other for other in rules if other.name != rule.name])
    return Volatile(rule.name, rule.kind, replaced(match[0], inner), *match.span(), match[0])


def replaced(text: str, fields: Iterable[Volatile]) -> str:
    """The text without its volatile values: a sentinel for a pinned one, nothing for a block."""
    said, end = "", 0
    for one in fields:
        if one.start < end:  # inside the one before
            continue
        said, end = said + text[end : one.start], one.end
        if one.kind == "transient":  # it goes with the line breaks around it
            said, rest = said.rstrip("\n"), text[end:].lstrip("\n")
            said, end = said + "\n\n" * bool(said and rest), len(text) - len(rest)
        elif not one.text:
            said += f"__STABLE_{'MSG_ID' if one.rule == 'message_id' else one.rule.upper()}__"
    return said + text[end:]


def _canonicalize_messages(messages: Iterable[Message], canon: Canon) -> tuple[Turn, ...]:
    """The conversation in both pipelines; the messages given are not changed.

    why(L-43): a message that only carries notes is no turn of its own: thinking templates would
    begin a new user turn there, and a template may reject or hoist a late system message.
    """
    turns: list[Turn] = []
    for message in messages:
        turn, before = canon.still(message), turns[-1].role if turns else "system"
        notes = () if before in SYSTEM_ROLES else _notes(turn, canon)
        if not notes:
            turns.append(turn)
        elif before == "assistant":
            turns.append(_turn({"role": "user", "content": "\n\n".join(n.value for n in notes)}))
        elif notes[0].rule in _SYSTEMS and not any(t.role == "assistant" for t in turns):
            first = next(i for i, t in enumerate(turns) if t.role not in SYSTEM_ROLES)
            turns[first] = replace(turns[first], head=(*turns[first].head, *notes))
        else:
            turns[-1] = replace(turns[-1], tail=(*turns[-1].tail, *notes))
    return tuple(turns)


def _notes(turn: Turn, canon: Canon) -> tuple[Volatile, ...]:
    """The texts of a late message that is nothing but notes; none if it is more than that."""
    if turn.role in SYSTEM_ROLES and any(rule.name == "late_system" for rule in canon.rules):
        return (Volatile("late_system", "transient", reminder(turn.message["content"])),)
    is_bare = turn.role == "user" and not turn.canonical["content"].strip()
    return tuple(turn.notes) if is_bare else ()


def reminder(text: str) -> str:
    """A system message's text, tagged so that the model can tell it from what it stands behind."""
    is_tagged = "<system-reminder>" in text
    return text if is_tagged else f"<system-reminder>\n{text}\n</system-reminder>"


# endregion

# region 08 RENDER =============================================================
# Messages -> the model's own chat template -> tokens, with nothing lost on the way.
#
# A template is not read but asked: canned conversations are rendered at construction, and what
# comes out is believed. What it cannot say is said another way (folded, merged, flattened); what
# is still missing is named once in the log. Markup in client text (`<|im_end|>` in a file) is
# broken up by a noncharacter before rendering and whole again before encoding, as plain text.
# Dropped: transformers' sanitize_control_tokens (skips keys, encodes the whole past every turn).
#
# Doors   Template, Rendered, Unspliceable
# Doors   _probe_preserve_thinking_support, _compute_msg_token_boundaries
# Knows   CONFIG, ERRORS, LOG, WIRE, CANON
# Thread  any
# Budget  534
# ==============================================================================

_BREAK: Final = "\ufdd0"  # a noncharacter: Unicode keeps it for the inside of programs
_BROKEN: Final = re.compile(f"{_BREAK}({_BREAK}?)")  # the character itself is doubled
_WRITERS: Final = frozenset({"write", "write_file", "create_file"})


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest: as a tokenizer matches its added tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _hide(value: Any, markup: re.Pattern[str]) -> Any:
    """A copy of a JSON value with markup broken up; strings without any are shared."""
    if isinstance(value, str):
        doubled = value.replace(_BREAK, _BREAK * 2)
        return markup.sub(lambda token: token[0][0] + _BREAK + token[0][1:], doubled)
    if isinstance(value, dict):
        return {_hide(key, markup): _hide(item, markup) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide(item, markup) for item in value]
    return value


class _Encoder:
    """Remembers the pieces between added tokens: to encode history again is to look it up."""

    def __init__(self, tokenizer: Any) -> None:
        self.whole: Tokenizer = tokenizer.backend_tokenizer
        self._plain = Tokenizer(self.whole.model)  # shares the vocabulary, knows no added tokens
        self._plain.normalizer = self.whole.normalizer
        self._plain.pre_tokenizer = self.whole.pre_tokenizer
        self.added = self.whole.get_added_tokens_decoder()
        self._id_of = {t.content: np.array([i], np.int32) for i, t in self.added.items()}
        self.find_added = _any_of(self._id_of)
        self.memo: Memo[np.ndarray] = Memo(32_000_000)  # about 64 MB with the ids
        # some tokens eat the spaces around them: then all is left to the tokenizer
        text = "Zed" + "".join(f" go {t} \n{t}\u00e9t\u00e9{t}{t}" for t in self._id_of) + " x.\n\n"
        wanted: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self._goes_by_piece = True
        self._goes_by_piece = self.encode(text).tolist() == wanted

    def markup(self, source: str, *tags: str) -> re.Pattern[str]:
        """Tokens for templates alone, not those that are plain words too (gemma's `<table>`)."""
        rest = {t.content for t in self.added.values() if not t.special}
        words = {t for t in rest if t not in source and self._plain.token_to_id(t) is not None}
        return _any_of(text for text in {*tags, *self._id_of} - words if len(text) > 1)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of a rendered text; broken markup becomes text, all other is markup."""
        if self._goes_by_piece:
            pieces = self.find_added.split(text)  # words, token, words, ..., token, words
            ids = [self._id_of[p] if i % 2 else self._words(p) for i, p in enumerate(pieces)]
        else:
            ids = [_ids(self.whole, part) for part in _BROKEN.split(text) if part]
        return np.concatenate([np.empty(0, np.int32), *ids])

    def _words(self, piece: str) -> np.ndarray:
        return self.memo.of(piece, lambda: _ids(self._plain, _BROKEN.sub(r"\1", piece)))


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    # why(L-32): encode() would stop every other thread for as long as it takes.
    return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)


_FAULTS: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_REFUSALS: Final = (jinja2.TemplateError, RecursionError, *_FAULTS)
_NONCE: Final = "-".join(("zq7", "seam5qz")).replace("-", "")  # not a word of this very file
_THOUGHT: Final = "zqthought"
_FIRST: Final = "zqfirst"
_WORDS: Final = "zq{}q"  # of message n: letters and digits come through trim and tojson as they are
_ACT: Final = {"name": "f", "description": "f", "parameters": {"type": "object"}}
_TOOL: Final[Body] = {"type": "function", "function": _ACT}
_Switches = dict[str, Any]


class _ChatTemplate:
    """The template as a function, and what became of canned conversations."""

    def __init__(self, tokenizer: Any) -> None:
        self._apply = tokenizer.apply_chat_template
        named = tokenizer.chat_template or ""
        self.source = named if isinstance(named, str) else "\n".join(named.values())
        self.thinking = _probe_thinking(self)  # switches for off, switches for on
        self.preserve = _probe_preserve_thinking_support(self)
        self.has_system = self._says("system user")
        self.has_late_system = self._says("system system user call tool system reply system user")
        self.has_repeats = self._says("user user reply reply")
        # between two text parts; a newline where the template misprints them
        joint = re.search(rf"{_FIRST}(\s*){_WORDS.format(0)}", self.attempt("parts"))
        self.joint = joint[1] if joint else "\n"
        self.without_reply = lru_cache(256)(self._without_reply)

    def render(self, messages: list[Message], *, tools: list[Any], switches: _Switches) -> str:
        """Raises BadRequest with the template's own sentence when it refuses."""
        switches = {"add_generation_prompt": True, "tokenize": False, **switches}
        try:
            return str(self._apply(messages, tools=tools or None, **switches))
        except _REFUSALS as refusal:
            sentence = f"the model's chat template refuses these messages: {refusal}"
            raise BadRequest(sentence, param="messages") from refusal

    def attempt(self, script: str, tools: Sequence[Body] = (), /, **switches: Any) -> str:
        """The text of a canned conversation, or nothing where the template refuses it."""
        try:
            return self.render(_canned(script), tools=list(tools), switches=switches)
        except BadRequest:
            return ""

    def _says(self, script: str) -> bool:
        """Whether the contents of a canned conversation come out, one after the other."""
        in_order = ".*".join(message["content"] for message in _canned(script))
        return re.search(in_order, self.attempt(script), re.DOTALL) is not None

    def _without_reply(self, switches: str) -> str:
        """What switches, a JSON object, make of canned conversations; no generation prompt."""
        told = {**json.loads(switches), "add_generation_prompt": False}
        head = "system " if self.has_system else ""
        plain = self.attempt(head + "user reply user", **told)
        return plain + "\0" + self.attempt(head + "user call tool reply user", [_TOOL], **told)


def _canned(script: str) -> list[Message]:
    """A conversation told by its roles, as in "user call tool reply"; "calls" are two of them."""
    messages: list[Message] = []
    for n, role in enumerate(script.split()):
        words, n_tools = _WORDS.format(n), script.split()[:n].count("tool")
        texts = (_FIRST, words) if role in {"calls", "parts"} else (words,)
        named = enumerate({"name": "f", "arguments": {"q": text}} for text in texts)
        calls = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in named]
        reply = {"role": "assistant", "reasoning_content": _THOUGHT}
        asking = {**reply, "content": "", "tool_calls": calls}
        own: dict[str, Message] = {
            "part": {"role": "user", "content": [{"type": "text", "text": t} for t in texts]},
            "tool": {"tool_call_id": f"call0000{n_tools}", "name": "f"},
            "reply": reply,
            "call": asking,
        }
        messages.append({"role": role, "content": words, **own.get(role.removesuffix("s"), {})})
    return messages


def _probe_preserve_thinking_support(chat: _ChatTemplate) -> _Switches:
    """Switches that make the template print past thinking; none if it has no such switch."""
    for switch in (
        {"preserve_thinking": True},  # Qwen3.6
        {"clear_thinking": False},  # GLM
        {"truncate_history_thinking": False},  # Nemotron
        {"keep_past_thinking": True},  # LFM2.5
    ):
        past = chat.attempt("user reply user", **switch)
        if _THOUGHT in past and past != chat.attempt("user reply user"):
            return switch
    return {}


def _probe_thinking(chat: _ChatTemplate) -> tuple[_Switches, _Switches]:
    """Switches for thinking off, and for thinking on."""
    efforts: list[_Switches] = [{"reasoning_effort": word} for word in ("low", "none")]
    for off in ({"enable_thinking": False}, {"thinking": False}, *efforts):
        on = {name: True for name in off if name != "reasoning_effort"}  # that never stops it
        if chat.attempt("user", **off) not in {"", chat.attempt("user", **on)}:
            return off, on
    return {}, {}


class _Turns:
    """How messages begin: openings are the text from an added token on to a message's content."""

    def __init__(self, chat: _ChatTemplate, encoder: _Encoder) -> None:
        self._chat = chat
        self._find_added = encoder.find_added
        user, tool = self._opening("user reply > user"), self._opening("user call > tool")
        others = ("user calls tool > tool", "user > reply", "user reply > system")
        openings = [user, tool, *map(self._opening, others)]
        openings += [self.prompt(role, on) for on in chat.thinking for role in ("user", "tool")]
        rows = [encoder.encode(text) for text in openings if text]
        self.ids = np.array(sorted({int(row[0]) for row in rows}), np.int32)
        inner = ((row, at) for row in rows for at in np.flatnonzero(np.isin(row, self.ids))[1:])
        # (first id, distance, id of another of them): one opening, not two
        self.echoes = {(int(row[0]), int(at), int(row[at])) for row, at in inner}
        dress = tool[len(user) :] if tool.startswith(user) else ""  # results as user messages
        is_user = f"{re.escape(user)}(?!{re.escape(dress or _BREAK)})"
        self.find_user = re.compile(is_user if user else "(?!)")

    def prompt(self, last_role: str, switches: _Switches) -> str:
        """What opens the reply to a message of this role."""
        return self._opening("user call tool >" if last_role == "tool" else "user >", **switches)

    def _opening(self, script: str, /, **switches: Any) -> str:
        """What opens the message after the ">" (none: the reply); "" where no added token does."""
        # last words before [closer][opening] words      closer: what ends a conversation there
        past, _, last = script.partition(">")
        n_past = len(past.split())
        closed = self._chat.attempt(past, **switches, add_generation_prompt=False)
        text = self._chat.attempt(past + last, **switches, add_generation_prompt=not last)
        closer, between = (told.rpartition(_WORDS.format(n_past - 1))[2] for told in (closed, text))
        between = between.partition(_WORDS.format(n_past))[0]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(closer, between, strict=False))
        own = between[len(list(same)) :].lstrip()
        tokens = (token.start() for token in self._find_added.finditer(between))
        starts = [at for at in tokens if at <= len(between) - len(own)]
        return between[starts[-1] :] if own and starts else ""


def _compute_msg_token_boundaries(tokens: np.ndarray, turns: _Turns) -> tuple[int, ...]:
    """Positions in `tokens` (int32 ids) where a message or the generation prompt begins."""
    begins = np.isin(tokens, turns.ids)
    for first, distance, again in turns.echoes:
        begins[distance:] &= (tokens[distance:] != again) | (tokens[:-distance] != first)
    return tuple(np.flatnonzero(begins).tolist())


def _parse_arguments(call: dict[str, Any], *, hides_writes: bool) -> dict[str, Any]:
    """The call with an object for arguments (text crashes templates); `_raw` holds what is none."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        parsed = None
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
        arguments = parsed if isinstance(parsed, dict) else {"_raw": arguments}
    written = arguments.get("content")
    if hides_writes and function["name"].lower() in _WRITERS and isinstance(written, str):
        digest = hashlib.sha256(written.encode()).hexdigest()[:12]
        arguments = {**arguments, "content": f"[{len(written)} characters, sha256 {digest}]"}
    return _call_like(call, arguments)


def _folded(messages: Iterable[Message], chat: _ChatTemplate) -> list[Message]:
    """The conversation, its messages joined where the template cannot take them apart."""
    folded: list[Message] = []
    for given in messages:
        message, before = given, folded[-1]["role"] if folded else ""
        is_system = given["role"] == "system"
        is_late = is_system and bool(folded) and not chat.has_late_system
        if is_late and before != "system":  # in the role before, never in the model's own mouth
            role = "user" if before == "assistant" else before
            message = {"role": role, "content": reminder(given["content"])}
        elif is_system and not chat.has_system:
            message = {**given, "role": "user"}
        if message["role"] == before and (is_late or (before != "tool" and not chat.has_repeats)):
            last = folded.pop()
            texts = filter(None, (last["content"], message["content"]))
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            message = {**last, **message, "content": "\n\n".join(texts)}
            message |= {"tool_calls": calls} if calls else {}
        folded.append(message)
    return folded


def _losses(messages: Iterable[Message], text: str) -> Iterator[str]:
    """Kinds of text that are not in the prompt, or not in their order."""
    start = end = 0
    for message in messages:
        start = start if message["role"] == "tool" else end  # a reply's results may come sorted
        told = [(f"{message['role']} messages", message["content"])]
        for function in (call["function"] for call in message.get("tool_calls", ())):
            values = [value for value in function["arguments"].values() if isinstance(value, str)]
            told += [("tool calls", function["name"])]
            told += [("tool-call arguments", value) for value in values]
        for kind, words in told:  # past thinking is the template's own affair
            said = words.strip()
            forms = (said, json.dumps(said, ensure_ascii=False)[1:-1])
            ends = (at + len(form) for form in forms if (at := text.find(form, start)) >= 0)
            end = max(end, stop := next(ends, -1))
            if stop < 0:
                yield kind


class Unspliceable(Exception):
    """Why it is not certain what follows a recorded past, in a word or two."""


class _Junction(NamedTuple):
    """A past that ends in a reply meets new messages: what does the template print behind it?

        [past, or a stub of it][reply: a nonce][new messages as they are]
                                         nonce |closer|end ... suffix ... generation prompt

    Found by rendering words of our own. A stub is enough where the suffix is the same as behind
    canned pasts of three kinds (L-44); elsewhere the past is rendered, but still not tokenised.
    """

    chat: _ChatTemplate
    ends: re.Pattern[str]  # texts of end tokens
    old: Sequence[Message]
    new: list[Message]  # shaped
    tools: list[Any]
    switches: _Switches

    def suffix(self, past: Iterator[Message], proven: Memo[tuple[str, ...]]) -> tuple[str, str]:
        """(closer, text from the end token on); may read `past`, shaped. Raises Unspliceable."""
        canned = list(map(_canned_like, self.new, itertools.count()))
        seam = proven.of(self._shape(), partial(self._prove, canned))
        text = self._behind(None, self.new) if seam else ""
        if not seam or not text.startswith("".join(seam)):
            # why(L-44): on some templates the closer depends on the place in the tool loop.
            whole = list(past)
            seam, text = self._parted(self._behind(whole, canned)), self._behind(whole, self.new)
            if not text.startswith("".join(seam)):
                raise Unspliceable("closer")
        return seam[0], text.removeprefix(seam[0])

    def _prove(self, canned: list[Message]) -> tuple[str, ...]:
        """Closer and end token, if a stub says as much as pasts of three kinds; else ()."""
        short = self._behind(None, canned)
        for past in ("user", "user call tool call tool", "user reply user call tool call tool"):
            with suppress(Unspliceable):
                if self._behind([*self._head("y"), *_canned(past)], canned) != short:
                    return ()
        return self._parted(short)

    def _parted(self, text: str) -> tuple[str, ...]:
        """Closer and end token, read off words of our own that follow the reply."""
        between = text.partition(_WORDS.format(0))[0]
        if found := self.ends.search(between):
            return between[: found.start()], found[0]
        if self.old[-1].get("tool_calls"):
            raise Unspliceable("no end token")
        return "", ""  # another added token follows at once

    def _behind(self, past: list[Message] | None, new: list[Message]) -> str:
        """The text after the nonce; with a stub for want of a past."""
        stub = [*self._head("x"), {"role": "user", "content": "x"}]
        before, tools = (stub, self.tools[:1]) if past is None else (past, self.tools)
        messages = _folded([*before, self._marked(), *new], self.chat)
        try:
            text = self.chat.render(messages, tools=tools, switches=self.switches)
        except BadRequest as refusal:
            raise Unspliceable("refused") from refusal
        if text.count(_NONCE) != 1:
            raise Unspliceable("nonce")
        return text.partition(_NONCE)[2]

    def _head(self, words: str) -> list[Message]:
        has_system = self.old[0]["role"] in SYSTEM_ROLES and len(self.old) > 1
        return [{"role": "system", "content": words}] if has_system else []

    def _marked(self) -> Message:
        """A reply of the same shape whose last words are the nonce; without any thinking."""
        if not (calls := self.old[-1].get("tool_calls")):
            return {"role": "assistant", "content": _NONCE}
        first = [_call_like(call, {}) for call in calls[:-1]]
        last = _call_like(calls[-1], {"q": _NONCE})
        return {"role": "assistant", "content": "", "tool_calls": [*first, last]}

    def _shape(self) -> str:
        """What the proof of a seam may depend on."""
        new = (self._marked(), *self.new)
        kinds = ([m["role"], min(len(m.get("tool_calls", ())), 2), bool(m["content"])] for m in new)
        n_tools = min(len(self.tools), 2)  # with one, a stub's list of tools is the whole list
        return json.dumps([len(self._head("x")), *kinds, n_tools, self.switches], default=str)


def _canned_like(message: Message, n: int) -> Message:
    """A message of the same shape with words of our own."""
    words = _WORDS.format(n)
    canned: Message = {**message, "content": words if message["content"] or n == 0 else ""}
    if calls := message.get("tool_calls"):
        canned["tool_calls"] = [_call_like(call, {"q": words}) for call in calls]
    return canned


def _call_like(call: Body, arguments: Body) -> Body:
    return {**call, "function": {**call["function"], "arguments": arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt. All positions count model tokens from its start."""

    text: str = ""  # of a replayed prompt, what was rendered of it
    ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), compare=False)
    boundaries: tuple[int, ...] = ()  # where messages and the generation prompt begin, ascending
    system_end: int = 0  # where the first user message begins, after system prompt and tools
    last_user_start: int | None = None  # None where no message is the user's
    note_ends: tuple[int, ...] = ()  # of the first reminders from the first user message on
    generation_start: int = 0  # len(tokens) where the template prints no generation prompt
    starts_in_reasoning: bool = False  # the prompt ends inside an open thinking block


class Template:
    """Chat template and tokenizer of one model; set up once, then used from any thread."""

    def __init__(
        self,
        tokenizer: Any,
        config: Config,
        *,
        think_start: str = "",
        think_end: str = "",
        ends: Iterable[int] = (),
    ) -> None:
        """`tokenizer`: a fast one, or mlx-lm's of one. No past is replayed without `ends`, ids."""
        self._config = config
        self._chat = _ChatTemplate(tokenizer)
        self.source = self._chat.source  # of all templates where there are several; "" for none
        self._encoder = _Encoder(tokenizer)
        self._turns = _Turns(self._chat, self._encoder)
        self._tags = (think_start, think_end)
        self._canon = Canon(config, joint=self._chat.joint, tags=self._tags)
        added = self._encoder.added
        self._ends = _any_of(added[token].content for token in ends if token in added)
        self._proven: Memo[tuple[str, ...]] = Memo(1_000_000)  # closer and end token by shape
        self._hide = partial(_hide, markup=self._encoder.markup(self.source, *self._tags))
        self._lost: set[str] = set()  # kinds already named in the log; only grows
        if config.normalize_write_tool_content_for_prompt:
            log.warning("NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT: the model cannot see its writes")
        if self.source and not self._chat.has_system:
            log.warning("this chat template has no system role: user messages carry that text")

    def encode(self, text: str) -> list[int]:
        """The tokenizer's ids; markup is markup, and no special tokens are added."""
        return list(map(int, self._encoder.encode(text.replace(_BREAK, _BREAK * 2))))

    def raw(self, prompt: str | Sequence[int]) -> Rendered:
        """A completion's prompt. Raises BadRequest: it is empty, or an id is not the model's."""
        whole, text = self._encoder.whole, prompt if isinstance(prompt, str) else ""
        tokens = whole.encode_batch_fast([text])[0].ids if text else list(map(int, prompt))
        known = range(whole.get_vocab_size())
        if not tokens:
            raise BadRequest("the prompt is empty", param="prompt")
        if strange := [token for token in tokens if token not in known]:
            raise BadRequest(f"prompt: {strange[0]} is not a token of this model", param="prompt")
        ids = np.array(tokens, np.int32)
        boundaries = _compute_msg_token_boundaries(ids, self._turns)
        return Rendered(text=text, ids=ids, boundaries=boundaries, generation_start=len(ids))

    def canonical(self, messages: Iterable[Message]) -> tuple[Turn, ...]:
        """The conversation in both pipelines, by this model's tags and the configured rules."""
        return _canonicalize_messages(messages, self._canon)

    def world(self, request: ChatRequest) -> bytes:
        """What a recorded past depends on beside its messages: template, tools, switches."""
        # Not a switch that only changes the generation prompt: effort changes in mid-session.
        canned = self._chat.without_reply(json.dumps(self._switches(request), sort_keys=True))
        facts = json.dumps([self.source, request.tools, canned], default=str)
        return sha256(facts.encode()).digest()

    def suffix(
        self, request: ChatRequest, past: Sequence[Message], *, new: Sequence[Message], is_cut: bool
    ) -> Rendered:
        """What follows the tokens of `past`; positions count from there. Raises Unspliceable."""
        # It begins with the template's own end token, in place of the one that ended the reply.
        tools, switches = self._hide(request.tools), self._switches(request)
        fresh = list(map(self._shape, new))
        at = _Junction(self._chat, self._ends, past, fresh, tools, switches)
        closer, text = at.suffix(map(self._shape, past[:-1]), self._proven)
        if any(_losses(fresh, text)):
            raise Unspliceable("lost text")
        if is_cut and past[-1].get("tool_calls"):
            raise Unspliceable("cut call")
        if not is_cut and not self._encoder.find_added.match(text):
            raise Unspliceable("end token")
        ending = self._turns.prompt(fresh[-1]["role"], switches)
        return self._measured(closer * is_cut + text, ending=ending)

    def _switches(self, request: ChatRequest) -> _Switches:
        wanted = self._hide(dict(request.template_kwargs))
        preserve = self._chat.preserve if self._config.preserve_thinking else {}
        return {**preserve, **wanted, **self._chat.thinking[request.thinking]}

    def prompt(self, request: ChatRequest, messages: Iterable[Message] | None = None) -> Rendered:
        """A whole prompt, of other messages if given. Raises BadRequest: the template refuses."""
        if request.kind == "completion":
            return self.raw(request.prompt or "")
        if not self.source:
            sentence = "this model has no chat template, only /v1/completions"
            raise BadRequest(sentence, param="messages")
        folded = _folded(map(self._shape, messages or request.messages), self._chat)
        tools, switches = self._hide(request.tools), self._switches(request)
        text = self._chat.render(folded, tools=tools, switches=switches)
        lost = {"tools" for tool in tools if tool["function"]["name"] not in text}
        for kind in sorted(lost.union(_losses(folded, text)) - self._lost):
            log.warning("the model's chat template loses or moves %s", kind)
            self._lost.add(kind)
        return self._measured(text, ending=self._turns.prompt(folded[-1]["role"], switches))

    def _measured(self, text: str, *, ending: str) -> Rendered:
        """Counts in pieces of the text: where a message begins, tokens do too."""
        encode, (start, end) = self._encoder.encode, self._tags
        ending = ending if text.endswith(ending) else ""
        tokens = encode(text)
        users = [found.start() for found in self._turns.find_user.finditer(text)]
        # why(L-51): among these a new session in the same folder parts from the one before it.
        notes = re.compile("</system-reminder>").finditer(text, *(users[:2] or [len(text)]))
        return Rendered(
            text=_BROKEN.sub(r"\1", text),
            ids=tokens,
            boundaries=_compute_msg_token_boundaries(tokens, self._turns),
            note_ends=tuple(len(encode(text[: note.end()])) for note in islice(notes, 4)),
            system_end=len(encode(text[: users[0]])) if users else 0,
            last_user_start=len(tokens) - len(encode(text[users[-1] :])) if users else None,
            generation_start=len(tokens) - len(encode(ending)),
            starts_in_reasoning=bool(start) and ending.rfind(start) > ending.rfind(end),
        )

    def _shape(self, message: Message) -> Message:
        """A copy in words this template understands, with what looks like markup broken up."""
        role, content = message["role"], message["content"]
        if not isinstance(content, str):
            content = self._chat.joint.join(part["text"] for part in content)
        shaped = {**message, "role": "system" if role == "developer" else role, "content": content}
        if calls := shaped.pop("tool_calls", None):  # some templates take [] for a call
            hides = self._config.normalize_write_tool_content_for_prompt
            shaped["tool_calls"] = [_parse_arguments(call, hides_writes=hides) for call in calls]
        hidden: Message = self._hide(shaped)
        if role == "assistant" and "reasoning_content" not in message:
            # it may have come back with its thinking: those two tags are the real ones again
            start, end = map(self._hide, self._tags)
            thought, closed, answer = hidden["content"].lstrip().partition(end or _BREAK)
            if start and closed and thought.startswith(start):
                hidden["content"] = thought.removeprefix(start).join(self._tags) + answer
        return hidden


# endregion

# region 09 LEDGER =============================================================
# What was fed and generated once is replayed token by token; only what is new is rendered.
#
#     messages   s   u   a   t   a   t     a chain hash over their canonical forms, from a root
#                |--- a past ---|  new     that stands for template, tools and switches
#     tokens     |fed, generated|suffix|
#
# A transcript is recorded after each whole reply, under the chain that ends in it: the tokens
# since its past's, what was told of volatile fields, and the replies' thinking, which a client may
# leave out but not change. Prompt boundaries need none: rendered again they are the same tokens.
# Not by session id (sub-agents share one), not by a table of templates (RENDER asks the template).
#
# Doors   Ledger, Draft, Generated
# Knows   CONFIG, LOG, WIRE, HEAL, CANON, RENDER
# Owns    _ledger_lock (leaf)
# Thread  any
# Budget  286
# ==============================================================================

_Place = tuple[int, str]  # message, rule
_ASKING: Final = frozenset({"user", "tool"})


class _Told(NamedTuple):
    """What the model was told of volatile fields on the way to some message."""

    pins: Mapping[_Place, set[str]] = {}
    notes: tuple[str, ...] = ()  # in the order of telling


@dataclass(eq=False, slots=True, kw_only=True)
class Transcript:
    """One prompt and the reply to it, as tokens."""

    draft: Draft  # its prompt, without messages and tokens
    reply: Generated  # without its tokens
    ids: npt.NDArray[np.int32]  # behind its past's; no end token, the template has its own there
    thoughts: tuple[str, ...]  # of each message, the reply included; of replayed ones as generated
    used: float  # seconds on the caller's clock
    holders: int = 0  # its place under a key, and the transcripts that go on from it

    @property
    def nbytes(self) -> int:
        """Texts are counted as much as the tokens that tell them."""
        told, positions = self.draft.told, self.draft.rendered.boundaries
        n_pointers = sum(map(len, (positions, self.reply.hashes, self.thoughts, told.notes)))
        is_shared = self.draft.past and self.draft.past.draft.told.pins is told.pins
        n_pins = 0 if is_shared else len(told.pins)
        return 2 * self.ids.nbytes + 8 * n_pointers + 300 * n_pins + 1_000

    def fits(self, turns: Sequence[Turn]) -> bool:
        """Whether all thinking that the client sent is what was generated there."""
        pairs = zip(turns, self.thoughts, strict=False)
        return all(turn.thought in ("", thought) for turn, thought in pairs)

    def line(self) -> Iterator[Transcript]:
        """This one, its past, and so on."""
        node: Transcript | None = self
        while node is not None:
            yield node
            node = node.draft.past


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The tokens of a whole reply, and when and for whom they were generated."""

    ids: Sequence[int]  # the end token included
    hashes: Sequence[bytes]  # names of the blocks of the prompt
    ended: int | None  # the end token; None for a reply that was cut
    session: str
    at: float  # seconds, on the clock that draft() is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt, and what the ledger must know to record the reply to it."""

    rendered: Rendered = field(default_factory=Rendered)
    turns: tuple[Turn, ...] = ()
    keys: tuple[bytes, ...] = ()  # the world, then one for each turn and all before it
    told: _Told = field(default_factory=_Told)  # by this prompt and its past
    past: Transcript | None = None
    kept: int = 0  # tokens of the past
    fallback: str = ""  # why a longer past was not replayed


def _chain(world: bytes, turns: Iterable[Turn]) -> tuple[bytes, ...]:
    links = (turn.role.encode() + turn.digest for turn in turns)
    return tuple(accumulate(links, lambda key, link: sha256(key + link).digest(), initial=world))


class Ledger:
    """Recorded pasts of one model, and the heads that conversations have in common."""

    ALTERNATIVES: Final = 4  # transcripts under one key
    TRIES: Final = 3  # pasts, the longest first, before a request is rendered as sent
    MAX_HEADS: Final = 256

    def __init__(self, config: Config, metrics: CacheMetrics, *, healing: HealingStore) -> None:
        # Set at construction
        self._config = config
        self._metrics = metrics
        self._healing = healing
        self._ledger_lock = threading.Lock()
        # Guarded by _ledger_lock; least recently used first, parents behind their children
        self._pasts: OrderedDict[bytes, list[Transcript]] = OrderedDict()
        self._heads: OrderedDict[bytes, tuple[list[Message], _Told]] = OrderedDict()
        self._nbytes = 0

    def draft(self, request: ChatRequest, template: Template, *, room: int, now: float) -> Draft:
        """The prompt of a chat: the longest past that can be replayed, and the rest rendered.

        One that would not fit into `room` tokens is rendered without past thinking instead.
        Raises BadRequest when the template refuses the messages.
        """
        turns = template.canonical(request.messages)
        self._metrics.bump("telemetry_dropped", sum(turn.n_dropped for turn in turns))
        plain = Draft(turns=turns, keys=_chain(template.world(request), turns))
        why = ""
        found = self._candidates(plain, session=request.session.session_id or "", now=now)
        for past in islice(found, self.TRIES):
            try:
                draft = self._replay(request, template, past=past, draft=plain)
                break
            except Unspliceable as miss:
                self._metrics.bump("exact_key_rejected_by_model_lcp")  # a replay that was refused
                why = why or str(miss)
        else:
            draft = self._as_sent(request, template, draft=plain)
        self._metrics.bump("ledger_seam_fallback", bool(why))
        if len(draft.rendered.ids) > room:  # then only the current tool loop keeps its thinking
            messages, told = _tell(turns, 0, known=_Told())
            users = [at for at, turn in enumerate(turns) if turn.role == "user"]
            for message in messages[: users[-1] if users else 0]:
                message.pop("reasoning_content", None)
            draft = replace(plain, rendered=template.prompt(request, messages), told=told)
        return replace(draft, fallback=why)

    def snapshot(self) -> dict[str, int]:
        """Counts and bytes, for /v1/status."""
        with self._ledger_lock:
            n_pasts = sum(map(len, self._pasts.values()))
            return {"transcripts": n_pasts, "heads": len(self._heads), "bytes": self._nbytes}

    def record(
        self, draft: Draft, template: Template, *, reply: Message, generated: Generated
    ) -> None:
        """Remember a whole reply under the form in which the client will send it back."""
        turn = template.canonical([reply])[0]
        self._healing.remember(turn.message)
        keys = (*draft.keys, *_chain(draft.keys[-1], [turn])[1:])
        ids = np.concatenate([draft.rendered.ids[draft.kept :], np.array(generated.ids, np.int32)])
        positions = replace(draft.rendered, ids=ids[:0], text="")
        thoughts = draft.past.thoughts if draft.past else ()
        own = [*draft.turns, turn][len(thoughts) :]
        past = Transcript(
            draft=replace(draft, rendered=positions, turns=(), keys=()),
            reply=replace(generated, ids=()),
            ids=ids if generated.ended is None else ids[:-1],
            thoughts=(*thoughts, *(one.thought for one in own)),
            used=generated.at,
        )
        with self._ledger_lock:
            others = self._pasts.setdefault(keys[-1], [])
            others.append(past)
            self._hold(past)
            if len(others) > self.ALTERNATIVES:
                self._hold(others.pop(0), by=-1)
            self._touch(keys)
            self._forget(past.used)

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._pasts:
                self._pasts.move_to_end(key)

    def _forget(self, now: float) -> None:
        idle, most = self._config.ledger_ttl_seconds, self._config.ledger_max_bytes
        while self._pasts:
            oldest = next(iter(self._pasts.values()))
            is_old = 0 < idle < now - max(past.used for past in oldest)
            if self._nbytes <= most and not is_old:
                return
            self._pasts.popitem(last=False)
            for past in oldest:
                self._hold(past, by=-1)

    def _hold(self, past: Transcript, *, by: int = 1) -> None:
        """Or let go, with -1: bytes count until the last that goes on from these is gone too."""
        for node in past.line():
            node.holders += by
            if node.holders > max(by, 0):  # somebody else holds it, and so all before it
                return
            self._nbytes += by * node.nbytes

    def _candidates(self, draft: Draft, *, session: str, now: float) -> Iterator[Transcript]:
        """Pasts that end in a reply and leave a newest message to render, the longest first."""
        newest = max((i for i, turn in enumerate(draft.turns) if turn.role in _ASKING), default=0)
        with self._ledger_lock:
            self._forget(now)
            self._touch(draft.keys)
            known = [list(self._pasts.get(key, ())) for key in draft.keys[newest:0:-1]]
        for pasts in known:
            if fits := [past for past in pasts if past.fits(draft.turns)]:
                best = max(fits, key=lambda past: (past.reply.session == session, past.used))
                best.used = now
                yield best

    def _replay(
        self, request: ChatRequest, template: Template, *, past: Transcript, draft: Draft
    ) -> Draft:
        """The past with what is new behind it. Raises Unspliceable."""
        depth, is_cut = len(past.thoughts), past.reply.ended is None
        new, told = _tell(draft.turns, depth, known=past.draft.told)
        is_new_turn = any(message["role"] == "user" for message in new)
        if any(past.thoughts) and is_new_turn and not self._config.preserve_thinking:
            raise Unspliceable("thinking is not preserved")
        old = [turn.message for turn in draft.turns[:depth]]
        new = _heal_messages(new, self._healing)
        suffix = template.suffix(request, old, new=new, is_cut=is_cut)
        ids = [node.ids for node in past.line()][::-1]
        kept, before, user = sum(map(len, ids)), past.draft.rendered, suffix.last_user_start
        rendered = replace(
            suffix,
            ids=np.concatenate([*ids, suffix.ids]),
            boundaries=(*before.boundaries, *(kept + b for b in suffix.boundaries)),
            system_end=before.system_end,
            note_ends=before.note_ends,
            last_user_start=before.last_user_start if user is None else kept + user,
            generation_start=kept + suffix.generation_start,
        )
        return replace(draft, rendered=rendered, told=told, past=past, kept=kept)

    def _as_sent(self, request: ChatRequest, template: Template, *, draft: Draft) -> Draft:
        """All messages rendered; the head as it was first rendered for anybody."""
        turns = draft.turns
        n_head = sum(1 for _ in takewhile(lambda turn: turn.role in SYSTEM_ROLES, turns))
        head, told = _tell(turns[:n_head], 0, known=_Told())
        if told.pins and any(turn.role in _ASKING for turn in turns):  # somewhere to restate
            # why(L-38): the first rendering stays, or a new id would move all that follows it.
            with self._ledger_lock:
                head, told = self._heads.setdefault(draft.keys[n_head], (head, told))
                self._heads.move_to_end(draft.keys[n_head])
                if len(self._heads) > self.MAX_HEADS:
                    self._heads.popitem(last=False)
        rest, told = _tell(turns, n_head, known=told)
        messages = _heal_messages([*head, *rest], self._healing)
        return replace(draft, rendered=template.prompt(request, messages), told=told)


def _tell(turns: Sequence[Turn], start: int, *, known: _Told) -> tuple[list[Message], _Told]:
    """Copies of the messages from `start` on as the model shall see them; all it is told by then.

    Pinned or transient values that the past tells otherwise are restated in the newest message.
    """
    pins: dict[_Place, set[str]] = {}
    stale = []
    for at, one in ((at, one) for at, turn in enumerate(turns) for one in turn.fields):
        if one.kind == "pinned":
            pins.setdefault((at, one.rule), set()).add(one.value)
            if at < start and one.value not in known.pins.get((at, one.rule), ()):
                stale.append(one.text.strip() or f"[{one.rule} is now {one.value}]")
    lines = "\n".join(dict.fromkeys(stale))
    missed = [n for turn in turns[:start] for n in turn.notes if n.value not in known.notes]
    wanted = {note.value for turn in turns for note in turn.notes}
    # what was told, and since then only what the client still sends, is not repeated
    heard = set(takewhile(wanted.__contains__, reversed(known.notes)))
    newest = max((i for i, turn in enumerate(turns) if turn.role in _ASKING), default=-1)
    messages, notes = [], list(known.notes)
    for at, turn in enumerate(turns[start:], start):
        tail = (*turn.tail, *missed) if at == newest else turn.tail
        carried = [note for note in turn.fields if note.kind == "transient"]
        news = dict.fromkeys(n.value for n in (*turn.head, *carried, *tail) if n.value not in heard)
        old = [note for note in carried if note.value not in news]
        content = replaced(turn.message["content"], old)
        above, below = ([n.value for n in some if n.value in news] for some in (turn.head, tail))
        said = [*above, content, *below, lines if at == newest else ""]
        messages.append({**turn.message, "content": "\n\n".join(filter(None, said))})
        heard.update(news)
        notes += news
    fresh = {place: values for place, values in pins.items() if known.pins.get(place) != values}
    return messages, _Told({**known.pins, **fresh} if fresh else known.pins, tuple(notes))


# endregion

# region 10 KEY ================================================================
# What a prefix is called: chained block hashes; and a stilled text, for people to compare.
# The hashes cover exact model tokens under a root for whatever else changes KV (model revision,
# tenant). The scrubbed text never names anything: reusing KV by it would answer an old prompt. Each
# rule removes one field inside one line, or reminder blocks that hold no other opening tag.
#
# Doors   _block_hashes, _scrub_cache_key, _assert_cache_key_safety
# Knows   -
# Thread  any; pure
# Budget  47
# ==============================================================================


def _block_hashes(
    tokens: npt.ArrayLike, block_size: int, *, root: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Names of all full blocks; `known`: those of the first ones."""
    # Name i is sha256(name i - 1, or root; block i), so it stands for all tokens to block i's end.
    names, n_bytes = list(known), 4 * block_size
    packed = memoryview(np.asarray(tokens, dtype="<i4")[len(known) * block_size :].tobytes())
    for at in range(0, len(packed) - n_bytes + 1, n_bytes):
        before = names[-1] if names else root
        names.append(hashlib.sha256(before + packed[at : at + n_bytes]).digest())
    return names


_VOLATILE: Final = (
    (re.compile(r"<system-reminder>(?:(?!<system-reminder>)[\s\S])*?</system-reminder>"), ""),
    (re.compile(r"\bCurrent time is\b[^\n]*"), "Current time is __STABLE_TIME__"),
    (re.compile(r"\bcch=[0-9a-fA-F]+;"), "cch=__STABLE_CCH__;"),
    (re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE), ""),
)


def _scrub_cache_key(text: str) -> str:
    """A prompt's text without what changes from request to request. For diagnosis only."""
    for field_pattern, stilled in _VOLATILE:
        text = field_pattern.sub(stilled, text)
    return text


def _assert_cache_key_safety(key_text: str, model_text: str) -> bool:
    """Whether a scrub kept at least 90 % of the text; less means that a rule matched too much."""
    return 10 * len(key_text) >= 9 * len(model_text)


# endregion

# region 11 KV =================================================================
# The only room that knows what a KV layer looks like.
#
# A model's cache is a list of layers; a layer may hold several (CacheList), so everything here
# works on its leaves. Two kinds: *attention* leaves (KVCache) can be cut at any position; every
# other leaf (recurrent state, sliding window) is *state*: known only where a snapshot was taken.
# At rest attention KV lives in a Span, free of cache objects, so that nothing is shared by
# accident: writing to one array object through two caches overwrote a stored past (L-03).
# Copies are contiguous and evaluated: a lazy view pins its whole parent buffer (L-06).
#
# Doors   KvCache, KvShape, Span, StateSnapshot, GROWTH_TOKENS, measure_kv, _kv_cache_offset
# Doors   evaluate, reserve, lend_span, take_span, copy_span, to_batch, row_from_batch
# Doors   snapshot_state, restore_state, recurrent_handles
# Knows   WIRE
# Thread  model only; mlx
# Budget  209
# ==============================================================================

KvCache = list[Any]  # one upstream cache object per layer
GROWTH_TOKENS: Final = 256  # upstream grows buffers by this step; ours end on the same grid


class KvShape(NamedTuple):
    """What one row of this model costs, measured on the model itself."""

    token_bytes: int  # attention KV of one token, all layers
    state_bytes: int  # one snapshot of all state leaves at most
    has_state: bool  # some layers cannot be rewound
    can_batch: bool  # every layer has an upstream batch form


class StateSnapshot(NamedTuple):
    """State leaves at one position: per leaf the upstream `state`, arrays of its own."""

    leaves: Sequence[Any]
    nbytes: int


class Span(NamedTuple):
    """Attention KV of `length` consecutive tokens, all attention leaves, and nothing else."""

    # of each leaf keys, then values: evaluated `(1, n_kv_heads, capacity >= length, head_dim)`
    arrays: tuple[mx.array, ...]
    length: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def cut(self, start: int, end: int) -> Span:
        """A copy of tokens [start, end); this span stays as it is."""
        copies = tuple(mx.contiguous(array[..., start:end, :]) for array in self.arrays)
        mx.eval(copies)
        return Span(copies, end - start)

    def join(self, tail: Span) -> Span:
        """These tokens followed by the tail's. Consumes both: neither may be used afterwards."""
        buffers, length = list(self.arrays), self.length + tail.length
        for i, more in enumerate(tail.arrays):
            buffers[i] = buffer = _grown(buffers[i], length)
            buffer[..., self.length : length, :] = more[..., : tail.length, :]
            mx.eval(buffer)  # one array at a time: at most one of them exists twice
        return Span(tuple(buffers), length)


def _grown(buffer: mx.array, length: int) -> mx.array:
    """A buffer for `length` tokens that begins as this one; a larger one is on the growth grid."""
    if buffer.shape[2] >= length:
        return buffer
    lacks = -(-length // GROWTH_TOKENS) * GROWTH_TOKENS - buffer.shape[2]
    larger = mx.pad(buffer, [(0, 0), (0, 0), (0, lacks), (0, 0)])
    mx.eval(larger)
    return larger


def _leaves(cache: Sequence[Any]) -> Iterator[Any]:
    for layer in cache:
        yield from _leaves(layer.caches) if isinstance(layer, CacheList) else (layer,)


def _attention(cache: KvCache) -> list[Any]:
    # why(L-05): subclasses and look-alikes (rotating, chunked) say they trim and then cannot.
    return [leaf for leaf in _leaves(cache) if type(leaf) in (KVCache, BatchKVCache)]


def _state(cache: KvCache) -> list[Any]:
    return [leaf for leaf in _leaves(cache) if type(leaf) not in (KVCache, BatchKVCache)]


def evaluate(cache: KvCache) -> None:
    """Finish all pending work of the cache, as upstream's prefill does after each slice."""
    mx.eval([layer.state for layer in cache])


def measure_kv(model: Any) -> KvShape:
    """Run two tokens through the model and read what its cache weighs."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 2), mx.int32), cache=cache)
    evaluate(cache)
    state = _state(cache)
    windows = [leaf for leaf in state if hasattr(leaf, "max_size")]
    window_bytes = sum(leaf.nbytes // leaf.keys.shape[2] * leaf.max_size for leaf in windows)
    return KvShape(
        token_bytes=sum(leaf.nbytes // leaf.keys.shape[2] for leaf in _attention(cache)),
        state_bytes=window_bytes + sum(leaf.nbytes for leaf in state if leaf not in windows),
        has_state=bool(state),
        can_batch=all(hasattr(layer, "merge") for layer in cache),
    )


def _kv_cache_offset(cache: KvCache, *, recorded: int) -> KvOffset:
    """Physical depth in model tokens; of recurrent layers alone, what their snapshot recorded."""
    # Hybrid caches mix ArraysCache (no `.offset`) with KVCache: layer 0 may not answer (L-02).
    offsets = (getattr(leaf, "offset", None) for leaf in _leaves(cache))
    return KvOffset(next((n for n in offsets if isinstance(n, int)), recorded))


def snapshot_state(cache: KvCache, *, row: int = 0) -> StateSnapshot:
    """Copy a row's state leaves, if there are any: evaluated, independent of the cache."""
    states = [leaf.state for leaf in _state(cache)]
    leaves = _each_array(states, lambda array: mx.contiguous(array[row : row + 1]))
    mx.eval(leaves)
    parts: Any = tree_flatten(leaves)  # [(path, part), ...]
    return StateSnapshot(leaves, sum(getattr(part, "nbytes", 0) for _, part in parts))


def _each_array(state: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """The same lists and tuples, new ones (L-04), with every array changed."""
    return tree_map(lambda part: change(part) if isinstance(part, mx.array) else part, state)


def restore_state(cache: KvCache, snapshot: StateSnapshot) -> None:
    """Put a snapshot into the state leaves of `cache`; the snapshot stays usable."""
    # why(L-03): two caches restored from one snapshot overwrote each other; a slice write changes
    # the object it goes through, and a new handle makes the first write copy.
    for leaf, state in zip(_state(cache), snapshot.leaves, strict=True):
        leaf.state = _each_array(state, lambda array: array[...])


def reserve(cache: KvCache, tokens: int, *, roomy: int) -> None:
    """Grow attention buffers, but empty ones, that cannot hold `tokens`, to `roomy` at once."""
    # Upstream copies a full buffer every 256 tokens; growing at each turn is no better (L-33).
    # One array at a time, so that at most one of them exists twice.
    for leaf in _attention(cache):
        if leaf.keys is not None and leaf.keys.shape[2] < tokens:
            leaf.keys = _grown(leaf.keys, roomy)
            leaf.values = _grown(leaf.values, roomy)


def lend_span(cache: KvCache, span: Span) -> None:
    """Move a span's buffers into the empty attention leaves; the span must not be used again."""
    pairs = itertools.batched(span.arrays, 2)
    for leaf, pair in zip(_attention(cache), pairs, strict=True):
        leaf.state = (*pair, span.length)


def take_span(cache: KvCache, length: int) -> Span:
    """Move the attention buffers, `length` tokens deep, out of a one-row cache, now spent."""
    leaves = _attention(cache)
    assert all(leaf.offset == length for leaf in leaves), "attention layers disagree on depth"
    arrays = tuple(array for leaf in leaves for array in (leaf.keys, leaf.values))
    mx.eval(arrays)
    return Span(arrays, length)


def copy_span(cache: KvCache, end: int, *, row: int) -> Span:
    """Copy tokens [0, end) of one row out of a cache in use, be it a batch or the row's own."""
    views = []
    for leaf in _attention(cache):
        start = leaf.left_padding.tolist()[row] if type(leaf) is BatchKVCache else 0
        views += [array[row : row + 1, :, start:] for array in (leaf.keys, leaf.values)]
    return Span(tuple(views), end).cut(0, end)


def to_batch(cache: KvCache) -> KvCache:
    """A one-row cache in upstream's batch form; copies, and the argument must not be used again."""
    return [layer.merge([layer]) for layer in cache]


def row_from_batch(cache: KvCache, row: int) -> KvCache:
    """One row of a batch as a cache of its own: contiguous, evaluated, sharing nothing."""
    single: KvCache = [layer.extract(row) for layer in cache]
    restore_state(single, snapshot_state(single))  # why(L-06): theirs are views of the batch
    evaluate(single)
    return single


def recurrent_handles(cache: KvCache) -> KvCache | None:
    """The recurrent leaves as they are now, for a snapshot; None where other state leaves are."""
    # These states are replaced at each step, never written to as a window is: keeping the handles
    # of one step is free and gives the position before the end token (L-10).
    leaves = _state(cache)
    if not all(isinstance(leaf, ArraysCache) for leaf in leaves):
        return None
    return [ArraysCache.from_state((list(leaf.cache), None, None)) for leaf in leaves] or None


# endregion

# region 12 CACHE ==============================================================
# Lines, checkpoints, branches: the deepest exact prefix, and who owns its bytes.
#
#     line A  [0 ............................ end)      root: owns all its KV
#     line B            [start ........ end)            branch: owns what follows A's first `start`
#
# Lines form a tree. A request that extends a line takes its buffers and writes on in place; one
# that diverges inside it either *splits* the line (cheap when little follows: the tail becomes a
# branch of its own and nothing is lost) or *branches* off a copy. A branch keeps only its own tail
# at rest, so N sub-agents on one prefix cost the prefix once (nothing is shared below
# SHARE_MIN_TOKENS, where it would not pay). A lent line stays visible: its prompt is known before
# it is computed, so a request with the same prefix can wait for it.
# Tried and dropped: shared segments between branch points. The common case, one conversation
# growing, then copied its whole prefix at each turn.
#
# Doors   LRUPromptCache, Prompt, Line, Reuse, TokenArray
# Knows   CONFIG, LOG, KV
# Thread  model only
# Budget  287
# ==============================================================================

TokenArray = npt.NDArray[np.int32]
Layer = Literal["line", "checkpoint", "branch", "miss"]
SHARE_MIN_TOKENS: Final = 256  # a shorter shared prefix is stored twice
SHARE_MIN_PART: Final = 16  # nor one shorter than this part of the branch
CHECKPOINT_SHARE: Final = 0.25  # of the byte budget, for one line's checkpoints


class Prompt(NamedTuple):
    """Model tokens and their names: what a lookup needs."""

    root: bytes  # stands for all that changes KV besides the tokens
    tokens: TokenArray  # `(n,)`
    hashes: list[bytes]  # chained, of the full blocks of `tokens`


@dataclass(eq=False, slots=True)
class Line:
    """One conversation tip. While lent, `span` is None and `end` is how far its row has got."""

    prompt: Prompt  # the whole path from position 0, at least to `end`
    parent: Line | None = None
    start: int = 0
    end: int = 0
    span: Span | None = None  # KV of [start, end); [0, start) is the parent's
    checkpoints: dict[int, StateSnapshot] = field(default_factory=dict)
    lender: Callable[[int], Span] | None = None  # copies [0, n) from the row that holds the KV
    last_used: float = 0.0
    uses: int = 0

    @property
    def state_bytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self.checkpoints.values())

    @property
    def nbytes(self) -> int:
        return self.state_bytes + (self.span.nbytes if self.span else 0)

    def checkpoints_to(self, limit: int) -> dict[int, StateSnapshot]:
        """All on the path from position 0 to `limit`, those of its parents included."""
        earlier = self.parent.checkpoints_to(min(limit, self.start)) if self.parent else {}
        return earlier | {p: s for p, s in self.checkpoints.items() if p <= limit}


class Reuse(NamedTuple):
    """A lookup's answer: reuse [0, depth) of `line` now; `promised` if one waits for its row."""

    line: Line | None
    depth: int
    promised: int = 0
    state: StateSnapshot | None = None
    layer: Layer = "miss"


def _common_prefix(a: TokenArray, b: TokenArray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@dataclass(eq=False)
class LRUPromptCache:
    """All KV at rest, and where the lent KV will come back to. Model thread only."""

    _config: Config
    _shape: KvShape
    _: KW_ONLY
    max_bytes: int
    metrics: CacheMetrics
    clock: Callable[[], float] = time.monotonic
    lines: list[Line] = field(default_factory=list)

    def find(self, prompt: Prompt) -> Reuse:
        """The deepest exact prefix held, short of the last token; mutates nothing but a counter."""
        limit = self._config.prompt_cache_max_entries_global
        lines = [line for line in self.lines if limit and line.prompt.root == prompt.root]
        lines.sort(key=lambda line: line.last_used, reverse=True)
        most = len(prompt.tokens) - 1
        shared = [min(self._shared(line.prompt, prompt), most) for line in lines]
        # Longest first, promises included; of equals one that needs no copy, then the newest.
        found = [Reuse(None, 0), *map(self._reusable, lines, shared)]
        best = max(found, key=lambda x: (max(x.depth, x.promised), x.depth, x.layer == "line"))
        matched = max((min(n, x.end) for x, n in zip(lines, shared, strict=True)), default=0)
        if matched >= self._config.prompt_cache_block_size and not max(best.depth, best.promised):
            self.metrics.bump("hybrid_trim_miss")
        return best

    def _shared(self, a: Prompt, b: Prompt) -> int:
        """How many leading tokens two prompts have in common."""
        if not self._config.cache_use_block_index:
            return _common_prefix(a.tokens, b.tokens)
        # Chained hashes agree up to the block where the tokens part, so bisection finds it.
        blocks = range(min(len(a.hashes), len(b.hashes)))
        n_same = bisect_left(blocks, 1, key=lambda i: a.hashes[i] != b.hashes[i])
        size = self._config.prompt_cache_block_size
        block = slice(n_same * size, (n_same + 1) * size)
        return block.start + _common_prefix(a.tokens[block], b.tokens[block])

    def _reusable(self, line: Line, shared: int) -> Reuse:
        """What of the first `shared` tokens this line can give now, and what if one waits."""
        depth, state = min(shared, line.end), None
        promised = shared if line.lender is not None and shared > line.end else 0
        layer: Layer = "branch"
        if self._shape.has_state:
            usable = line.checkpoints_to(depth)
            depth = max(usable, default=0)
            layer, state = "checkpoint", usable.get(depth)
        is_whole = depth == line.end and line.lender is None
        if is_whole or depth == 0:
            layer = "line" if depth else "miss"
        return Reuse(line, depth, promised, state, layer)

    def acquire(self, reuse: Reuse, prompt: Prompt) -> tuple[Line, Span | None]:
        """Buffers of [0, depth), the row's own (moved or copied), and the line it will grow."""
        # The caller sets `line.lender` and ends with `put_back` or `drop`.
        line, depth = reuse.line, reuse.depth
        while line is not None and depth <= line.start:
            line = line.parent
        if line is None or depth == 0:
            return self._enter(Line(prompt)), None
        line.uses += 1
        line.last_used = self.clock()
        if (span := self._move(line, depth)) is None:
            span = self._copy(line, depth)
            line = self._enter(Line(prompt, parent=line, start=depth, end=depth))
        line.prompt = prompt
        return line, span

    def _copy(self, line: Line, depth: int) -> Span:
        """KV [0, depth) of a line, read without disturbing it."""
        if line.lender is not None:
            return line.lender(depth)
        assert line.span is not None
        own = line.span.cut(0, depth - line.start)
        return own if line.parent is None else self._copy(line.parent, line.start).join(own)

    def _move(self, line: Line, depth: int) -> Span | None:
        """KV [0, depth) taken out of a resting line, now lent; None where more of it follows."""
        if line.lender is not None or line.end - depth > depth:
            return None
        if depth < line.end:
            self._split(line, depth)
        own, line.span = line.span, None
        assert own is not None
        if (parent := line.parent) is None:
            return own
        if (base := self._move(parent, line.start)) is None:
            return self._copy(parent, line.start).join(own)
        # The parent's buffers are the line's now, and so is its place in the tree.
        line.parent, line.start = parent.parent, parent.start
        line.checkpoints = parent.checkpoints | line.checkpoints
        for branch in self._branches(parent):
            branch.parent = line
        self._forget(parent)
        return base.join(own)

    def _split(self, line: Line, depth: int) -> None:
        """Cut a resting line at `depth`; what follows becomes a branch of it."""
        assert line.span is not None and line.start < depth < line.end
        rest = replace(line, parent=line, start=depth)
        rest.span = line.span.cut(depth - line.start, line.end - line.start)
        rest.checkpoints = {p: s for p, s in line.checkpoints.items() if p > depth}
        for branch in self._branches(line):
            if branch.start > depth:
                branch.parent = rest
        self._enter(rest)
        self._shorten(line, depth, span=line.span._replace(length=depth - line.start))

    def _shorten(self, line: Line, depth: int, *, span: Span) -> None:
        line.end, line.span = depth, span
        line.checkpoints = {p: s for p, s in line.checkpoints.items() if p <= depth}

    def put_back(self, line: Line, prompt: Prompt, *, span: Span) -> None:
        """The row is done: `span` holds exactly the KV of `prompt`, and is the cache's now."""
        line.lender, line.prompt = None, prompt
        line.end = len(prompt.tokens)
        line.last_used = self.clock()
        if line.start < max(SHARE_MIN_TOKENS, line.end // SHARE_MIN_PART):
            line.checkpoints = line.checkpoints_to(line.end)
            line.parent, line.start = None, 0
        line.span = span if line.parent is None else span.cut(line.start, line.end)
        budget = self.max_bytes * CHECKPOINT_SHARE
        # dropped where they are densest; the first (system prompt) and the last two stay
        while len(at := sorted(line.checkpoints)) > 3 and line.state_bytes > budget:
            densest = min(range(1, len(at) - 2), key=lambda i: at[i + 1] - at[i - 1])
            del line.checkpoints[at[densest]]
        self.evict_to_fit(0)

    def drop(self, line: Line) -> None:
        """Forget a line and the branches that need its KV, wrong after a failure (L-17)."""
        for branch in self._branches(line):
            if branch.lender is None:
                self.drop(branch)
            else:  # it took its copy before the failure
                branch.parent, branch.start = None, 0
        self._forget(line)

    def mend(self) -> None:
        """Forget lines that an exception left without KV, and what builds on them (L-34)."""
        for line in [x for x in self.lines if x.lender is None and x.span is None]:
            self.drop(line)

    def add_checkpoint(self, line: Line, position: int, *, snapshot: StateSnapshot) -> None:
        if self._shape.has_state:
            line.checkpoints[position] = snapshot

    def _enter(self, line: Line) -> Line:
        line.last_used = self.clock()
        self.lines.append(line)
        return line

    def _forget(self, line: Line) -> None:
        self.lines = [other for other in self.lines if other is not line]
        line.span, line.checkpoints = None, {}  # whoever names it still must not keep its bytes

    def _branches(self, line: Line) -> list[Line]:
        return [branch for branch in self.lines if branch.parent is line]

    @property
    def nbytes(self) -> int:
        """Bytes at rest; what rows hold is theirs to count."""
        return sum(line.nbytes for line in self.lines)

    def evict_to_fit(self, extra_bytes: int) -> bool:
        """Evict until `extra_bytes` more fit and the entry limit holds; False if that cannot be."""
        limit = self._config.prompt_cache_max_entries_global
        while len(self._resting()) > limit and self._evict_one():
            pass
        while self.nbytes + extra_bytes > self.max_bytes and self._evict_one(per_byte=True):
            pass
        return self.nbytes + extra_bytes <= self.max_bytes

    def sweep(self) -> None:
        """Evict lines unused for longer than the TTL."""
        oldest = self.clock() - (self._config.prompt_cache_ttl_seconds or math.inf)
        for line in self._resting():
            if line.last_used < oldest and not self._branches(line):
                self._forget(line)

    def _resting(self) -> list[Line]:
        return [line for line in self.lines if line.lender is None]

    def _evict_one(self, *, per_byte: bool = False) -> bool:
        needed = dict.fromkeys(self.lines, 0)  # depth below which branches need a line's KV
        for line in self.lines:
            if line.parent is not None:
                needed[line.parent] = max(needed[line.parent], line.start)
        now = self.clock()
        # A branch cancelled before it fed anything is empty, but an entry, and the first to go.
        values = {x: _value(x, needed[x], now=now) for x in self._resting() if x.end > needed[x]}
        if not values:
            return False
        victim = min(values, key=lambda x: values[x] / (max(x.nbytes, 1) if per_byte else 1))
        if (depth := needed[victim]) and victim.span is not None:
            self._shorten(victim, depth, span=victim.span.cut(0, depth - victim.start))
        else:
            self._forget(victim)
        return True


def _value(line: Line, needed: int, *, now: float) -> float:
    """Prefill work saved, which outgrows length, x chance of reuse: recent use counts (L-16)."""
    work = (line.end - (needed or line.start)) * (1.0 + line.end / 32_768)
    return work * (1.0 + math.log1p(line.uses)) / (1.0 + (now - line.last_used) / 300.0)


# endregion

# region 13 SESSIONS ===========================================================
# What each conversation's last turns looked like: how long, how much was cached, by which layer.
# This is for people (/v1/status, session logs). Lookup never asks it: a wrong or missing session id
# can cost a reader clarity but never a hit. note() and snapshot() want the same monotonic clock.
#
# Doors   SessionIndex, session_id_of, SessionTurnStore, _message_diff, _update_session_turn_store
# Knows   CONFIG, WIRE
# Owns    _sessions_lock, _turns_lock
# Thread  any
# Budget  99
# ==============================================================================

_Past = Sequence[object]  # a digest of each message


def session_id_of(
    context: SessionContext, tokens: npt.NDArray[np.int32], *, first_words: bytes = b""
) -> str:
    """The client's id; else a digest of how the conversation begins, the same for all like it."""
    # first_words: the canonical messages up to the user's first; without them, 128 tokens.
    head = first_words or np.asarray(tokens[:128], dtype="<i4").tobytes()
    return context.session_id or f"sha1:{hashlib.sha1(head, usedforsecurity=False).hexdigest()}"


class SessionIndex:
    """The last turns of each session, least recently used session first."""

    MOST: Final = 10_000  # sessions

    def __init__(self, config: Config) -> None:
        self._max_turns = max(1, config.prompt_cache_max_entries_per_session)
        self._max_idle_seconds = config.prompt_cache_session_max_idle_seconds or math.inf
        self._sessions_lock = threading.Lock()
        self._turns: OrderedDict[str, deque[tuple[float, Mapping[str, object]]]] = OrderedDict()

    def note(self, session_id: str, facts: Mapping[str, object], *, at: float) -> None:
        """Remember a turn that ended at this time; forget what is idle or too much."""
        with self._sessions_lock:
            turns = self._turns.setdefault(session_id, deque(maxlen=self._max_turns))
            turns.append((at, facts))
            self._turns.move_to_end(session_id)
            self._forget(at)

    def snapshot(self, now: float, *, newest: int = 20) -> dict[str, Any]:
        """{"count": sessions known, "newest": the most recently used ones, newest first}."""
        with self._sessions_lock:
            self._forget(now)
            shown = []
            for session_id, turns in islice(reversed(self._turns.items()), newest):
                aged = [{**facts, "age_seconds": round(now - at, 1)} for at, facts in turns]
                shown.append({"session_id": session_id, "turns": aged})
            return {"count": len(self._turns), "newest": shown}

    def _forget(self, now: float) -> None:
        while oldest := next(iter(self._turns.values()), None):
            if len(self._turns) <= self.MOST and now - oldest[-1][0] <= self._max_idle_seconds:
                break
            self._turns.popitem(last=False)


class SessionTurnStore:
    """The messages of each session's last request, and of its longest past, as digests."""

    MOST: Final = 2_000  # records, two for a session; the least recently used go first

    def __init__(self) -> None:
        self._turns_lock = threading.Lock()
        self._records: OrderedDict[tuple[str, bool], _Past] = OrderedDict()  # guarded

    def exchange_last(self, session_id: str, digests: _Past, *, only_grows: bool = False) -> int:
        """How many messages are as in the record; `only_grows`: the one that these must extend."""
        with self._turns_lock:
            before = self._records.pop((session_id, only_grows), ())
            stable = _message_diff(before, digests)
            stays = only_grows and not stable == len(before) < len(digests)
            self._records[session_id, only_grows] = before if stays else digests
            if len(self._records) > self.MOST:
                self._records.popitem(last=False)
        return stable


def _message_diff(before: _Past, now: _Past) -> int:
    """How many leading messages agree."""
    return sum(takewhile(bool, map(lambda old, new: old == new, before, now)))


def _update_session_turn_store(store: SessionTurnStore, session_id: str, *, digests: _Past) -> int:
    """How many messages are as the session's record has them; recorded if they extend it."""
    # A sub-agent, a title request or an edit under the same id does not: the main record stays.
    return store.exchange_last(session_id, digests, only_grows=True)


# endregion

# region 14 MODEL ==============================================================
# Find the model or fetch it, load it, and state the facts that other rooms need of it.
# What can be known before a long download (type, size against memory and disk) is asked before it.
# Text comes from DecodeStream, which equals tokenizer.decode(). Of mlx-lm's own, the BPE one loses
# a leading space and prints "!" for padding ids, the general one decodes a line again for each id.
#
# Doors   LoadedModel, Detokenizer, ModelError
# Doors   resolve_model, load_model, banner, device_memory_bytes
# Knows   CONFIG, LOG, RENDER
# Thread  load_model: the model thread; the rest any; mlx
# Budget  302
# ==============================================================================

_DEMO: Final = "demo"
_DEFAULT_ON_APPLE: Final = "lmstudio-community/GLM-4.7-Flash-MLX-4bit"
# What to suggest instead of a model that cannot work here: bytes of its weights.
_SMALLER: Final = {
    "mlx-community/Qwen3-30B-A3B-4bit": 17_200_000_000,
    "mlx-community/Qwen3-8B-4bit": 4_610_000_000,
    "mlx-community/Qwen3-4B-4bit": 2_260_000_000,
    "mlx-community/Qwen3-0.6B-4bit": 335_000_000,
}
_WORKING_BYTES: Final = 512 * 2**20  # beside the weights: activations, a first few thousand tokens
# What mlx-lm needs of a repository: the folder, or the list of files of a dry run.
_snapshot = partial(huggingface_hub.snapshot_download, allow_patterns=DEFAULT_ALLOW_PATTERNS)


class ModelError(Exception):
    """Why there is no model, in one sentence; main() prints it and exits 2."""


@contextmanager
def _in_a_sentence(what_fails: str) -> Iterator[None]:
    """Turn whatever is raised inside into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # mlx, transformers, the hub, httpx, xet raise what they like
        log.debug("%s", what_fails, exc_info=True)
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ModelError(f"{what_fails}: {reason or type(error).__name__}") from error


class Markup(NamedTuple):
    """The strings and ids with a meaning of their own in a reply; None where a model has none."""

    think_start: str | None
    think_end: str | None
    think_end_ids: tuple[int, ...]
    tool_call_start: str | None
    tool_call_end: str | None  # "" for formats that have no closing tag
    tool_parser: Callable[[str, Any], Any] | None  # mlx-lm's: (text, tools) -> call or calls
    hidden_ids: frozenset[int]  # never shown as text: special tokens without a meaning above


class ModelSize(NamedTuple):
    """How large the weights are, and what they were made for."""

    nbytes: int  # of the weights, as loaded
    vocab_size: int  # ids are below this
    context_length: int  # tokens the model was made for


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Facts that hold as long as the process. `model` is for the model thread alone."""

    model: Any
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    template: Template
    model_id: str  # what clients see: the repository, the folder's name, or "demo"
    path: Path
    family: str  # "qwen3", "glm4" or "generic"
    revision: str  # 16 hex digits; KV of another revision is never reused
    limit: int  # tokens of prompt and reply together: the smaller of model and MAX_KV_SIZE
    eos_ids: frozenset[int]
    markup: Markup
    size: ModelSize


class Detokenizer:
    """Ids of one reply -> whole characters; joined, tokenizer.decode() of those not hidden."""

    def __init__(self, backend: Any, hidden_ids: frozenset[int]) -> None:
        self._backend, self._hidden_ids = backend, hidden_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._unshown: list[int] = []  # ids of a character that is not complete yet

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" for a hidden id or a part of a character."""
        if token in self._hidden_ids:
            return ""
        text = self._stream.step(self._backend, token)
        self._unshown = [*self._unshown, token] if text is None else []
        return text or ""

    def finish(self) -> str:
        """What a character cut off at the end decodes to: U+FFFD, as in tokenizer.decode()."""
        rest, self._unshown = self._unshown, []
        return str(self._backend.decode(rest, skip_special_tokens=False))


def resolve_model(config: Config, *, memory_bytes: int) -> Path:
    """The folder that MODEL_PATH chooses; a first time may take minutes. Raises ModelError."""
    name = _chosen(config)
    if name == _DEMO:
        return _demo_folder()
    folder = Path(name).expanduser()
    if folder.exists():
        return _complete(folder)
    with suppress(OSError, ValueError, ModelError):  # it is not in the local cache, or not whole
        return _complete(Path(_snapshot(name, local_files_only=True)))
    return _download(name, config, memory_bytes=memory_bytes)


def _chosen(config: Config) -> str:
    """MODEL_PATH; unset, the model this project is tuned for where a Mac can run it."""
    is_apple_silicon = (platform.system(), platform.machine()) == ("Darwin", "arm64")
    return config.model_path or (_DEFAULT_ON_APPLE if is_apple_silicon else _DEMO)


def _complete(folder: Path) -> Path:
    """`folder`, if it has all that mlx-lm needs. Raises ModelError, saying what lacks."""
    with _in_a_sentence(f"The model folder {folder} cannot be used"):
        index = folder / "model.safetensors.index.json"
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
        needed = ("config.json", "model*.safetensors", *sorted(set(listed)))
        lacks = [name for name in needed if not any(file.is_file() for file in folder.glob(name))]
        if lacks:
            lack = ", ".join(lacks[:3])
            raise ValueError(f"it has no {lack} (mlx-lm reads neither GGUF nor PyTorch files)")
        return folder


def _demo_folder() -> Path:
    """The demo model beside this file, or one made by scripts/make_demo_model.py and kept."""
    home = Path(__file__).resolve().parent
    bundled, script = home / "models" / _DEMO, home / "scripts" / "make_demo_model.py"
    if bundled.is_dir():
        return _complete(bundled)
    # Beside Hugging Face's own cache, so that HF_HOME and XDG_CACHE_HOME move both.
    cache = Path(huggingface_hub.constants.HF_HOME).parent / "start-llm"
    with _in_a_sentence(f"There is no demo model, neither {bundled} nor one in {cache}"):
        sources = (script, *sorted(script.with_name("demo_model").glob("*")))
        digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        folder = cache / f"demo-{digest[:12]}"
        if folder.is_dir():
            return _complete(folder)
        log.info("making the demo model in %s (once)", folder)
        cache.mkdir(parents=True, exist_ok=True)
        # In a folder of its own, then renamed: a half-made model is never found.
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
            command = [sys.executable, str(script), f"{making}/{_DEMO}"]
            run = subprocess.run(command, check=False, capture_output=True, text=True)
            if run.returncode:
                last = run.stderr.rstrip().rpartition("\n")[2]
                raise ModelError(f"{script} failed with status {run.returncode}: {last}")
            with suppress(OSError):  # another start of the server was quicker
                Path(command[-1]).rename(folder)
        return _complete(folder)


def _download(repo: str, config: Config, *, memory_bytes: int) -> Path:
    """Fetch what is not here yet, the hub showing how far it is. Raises ModelError."""
    token, errors = config.hf_token or None, huggingface_hub.errors
    hub = huggingface_hub.constants.ENDPOINT
    advice = f"start again to resume, or set MODEL_PATH to a folder or to {_DEMO}"
    with _in_a_sentence(f"{repo} is not complete in the local cache and {hub} fails ({advice})"):
        try:
            # Asked first because it fails at once; without a network the others retry for 23 s.
            huggingface_hub.HfApi().model_info(repo, token=token, timeout=10)
            config_file = huggingface_hub.hf_hub_download(repo, "config.json", token=token)
            _check_architecture(Path(config_file))
            _check_room(repo, _snapshot(repo, token=token, dry_run=True), memory_bytes=memory_bytes)
            return _complete(Path(_snapshot(repo, token=token)))
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            neither = f"neither a folder on this machine nor a repository on {hub}"
            why = f"MODEL_PATH={repo} is {neither} (a private one needs HF_TOKEN)."
            if isinstance(error, errors.GatedRepoError):
                why = f"{repo} is gated: accept its terms at {hub}/{repo}, then set HF_TOKEN."
            raise ModelError(why) from error


def _check_room(repo: str, files: Sequence[Any], *, memory_bytes: int) -> None:
    """Raise ModelError unless memory has room for the weights and the disk for what is to come."""
    weights = sum(f.file_size or 0 for f in files if f.filename.endswith(".safetensors"))
    to_fetch = sum(f.file_size or 0 for f in files if f.will_download)
    needed, cache = weights + _WORKING_BYTES, huggingface_hub.constants.HF_HUB_CACHE
    free = shutil.disk_usage(cache).free
    if needed > memory_bytes or to_fetch > free:
        raise ModelError(
            f"{repo} needs {in_bytes(needed)} of memory (this device recommends at most "
            f"{in_bytes(memory_bytes)}) and {in_bytes(to_fetch)} more on disk ({cache} has "
            f"{in_bytes(free)} free); MODEL_PATH={_fitting(min(memory_bytes, free))} would fit."
        )
    log.info("%s: fetching %s into %s", repo, in_bytes(to_fetch), cache)


def _fitting(room_bytes: int) -> str:
    """The largest of the models we suggest that works in so much memory."""
    return next((name for name, n in _SMALLER.items() if n + _WORKING_BYTES <= room_bytes), _DEMO)


def load_model(path: Path, config: Config) -> LoadedModel:
    """Read weights and tokenizer, on the model thread, where they must stay. Raises ModelError."""
    _check_architecture(path / "config.json")
    with _in_a_sentence(f"The model in {path} cannot be loaded"):
        trust = {"trust_remote_code": config.trust_remote_code}
        loaded: Any = mlx_lm.load(str(path), tokenizer_config=trust, return_config=True, **trust)
        model, tokenizer, facts = loaded
        facts = {**facts, **(facts.get("text_config") or {})}
        name = _chosen(config)
        markup = _markup(tokenizer)
        tags = {"think_start": markup.think_start or "", "think_end": markup.think_end or ""}
        hint = f"{name} {facts['model_type']}".lower()
        family = next((known for known in ("qwen3", "glm4") if known[:-1] in hint), "generic")
        weights: Any = tree_flatten(model.parameters())  # [(path, array), ...]
        nbytes, vocab_size = sum(a.nbytes for _, a in weights), facts.get("vocab_size")
        context_length = _context_length(facts, tokenizer.model_max_length)
        size = ModelSize(nbytes, int(vocab_size or len(tokenizer)), context_length)
        # Which weights these are. Not a hash of their bytes: 17 GB take a minute to read.
        files = sorted(path.glob("model*.safetensors*"))
        stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        identity = repr(stamps).encode() + (path / "config.json").read_bytes()
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            template=Template(tokenizer, config, **tags, ends=tokenizer.eos_token_ids),
            model_id=path.resolve().name if path == Path(name).expanduser() else name,
            path=path,
            family=family if config.model_family == "auto" else config.model_family,
            revision=sha256(identity).hexdigest()[:16],
            limit=min(size.context_length, config.max_kv_size),
            eos_ids=frozenset(tokenizer.eos_token_ids),
            markup=markup,
            size=size,
        )


def _check_architecture(config_file: Path) -> None:
    """Raise ModelError unless mlx-lm, or the model's own file, can build what this names."""
    with _in_a_sentence(f"{config_file} cannot be read"):
        facts = {**json.loads(config_file.read_bytes())}
    kind, version = facts.get("model_type"), mlx_lm.__version__
    with _in_a_sentence(f"Models of type {kind!r} are not known to mlx-lm {version}"):
        _ = facts.get("model_file") or _get_classes(facts)  # private, but what mlx_lm.load() asks


def _context_length(facts: dict[str, Any], tokenizer_length: int) -> int:
    """Tokens. Configs state the length before YaRN (Qwen3) or after (DeepSeek): the larger one."""
    stated = int(facts.get("max_position_embeddings") or facts.get("n_positions") or 0)
    rope = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) == "yarn":
        original = rope.get("original_max_position_embeddings") or 0
        stated = max(stated, int(original * rope.get("factor", 1)))
    # transformers writes 1e30 where a tokenizer states no length.
    return stated or (tokenizer_length if tokenizer_length < 2**31 else 32_768)


def _markup(tokenizer: Any) -> Markup:
    marks = ("think_start", "think_end", "tool_call_start", "tool_call_end")
    named = {i for mark in marks for i in getattr(tokenizer, f"{mark}_tokens") or ()}
    parser = tokenizer.tool_parser
    # A special token that the parser's own source names is grammar (gemma4's <|"|> quotes).
    grammar = inspect.getsource(sys.modules[parser.__module__]) if parser else ""
    hidden = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in named
        if token.content not in grammar and re.escape(token.content) not in grammar
    }
    return Markup(
        **{mark: getattr(tokenizer, mark) for mark in marks},
        think_end_ids=tuple(tokenizer.think_end_tokens or ()),
        tool_parser=parser,
        hidden_ids=frozenset(hidden | tokenizer.eos_token_ids),
    )


def device_memory_bytes() -> int:
    """What a model and its KV may use: Metal's recommendation, a GPU's memory, or the RAM."""
    facts = mx.device_info()
    stated = facts.get("max_recommended_working_set_size") or facts.get("total_memory")
    return int(stated or psutil.virtual_memory().total)


def banner(model: LoadedModel, config: Config) -> str:
    """The lines a person reads once the server is up."""
    host = f"[{config.mlx_host}]" if ":" in config.mlx_host else config.mlx_host
    demo = "This is the demo model: it shows that the server works, not what it can do.\n"
    return (
        f"{model.model_id} is served at http://{host}:{config.mlx_port}/v1\n"
        f"  from {model.path}: {in_bytes(model.size.nbytes)} of weights, {model.limit:,} tokens of "
        f"context (the model: {model.size.context_length:,})\n"
        f"{demo if model.model_id == _DEMO else ''}"
        "To serve another, set MODEL_PATH to a Hugging Face repository or a folder, "
        f"e.g. MODEL_PATH={_fitting(device_memory_bytes())}"
    )


# endregion

# region 15 ENGINE =============================================================
# The model thread: admit, prefill in slices, decode in groups, give every row's KV back.
#
#     inbox -> waiting -> prefill (one slice at a time) -> decode (one step per group) -> put back
#
# A row owns its buffers from admission to the end, so a lone row decodes where its KV lies: no
# merge, no copy. Rows of like length decode as one upstream batch; a short row never pays for a
# long one's padding. mlx-lm's BatchGenerator merges every row on insertion and pads to the longest
# (measured: a lone 32k row then needs its KV twice), so the batch inside it, GenerationBatch, is
# used directly and told never to finish a row: when a row ends is decided here, in one place.
# Beside decoding, prefill gets a third of the time (DECODE_SHARE), in slices of SLICE_SECONDS.
#
# Doors   Engine, Ticket, Job, Progress, Token, Finished, Event, Logprob
# Doors   Constraint, avoid, think_at_most, follow
# Knows   CONFIG, ERRORS, LOG, WIRE, KEY, KV, CACHE, MODEL
# Thread  model, mlx; Ticket and Engine: any
# Budget  656
# ==============================================================================

SLICE_SECONDS: Final = 0.2  # of prefill between two decode steps
SLICE_ALONE_SECONDS: Final = 0.4  # of prefill before anything else is looked at
SLICE_MIN_TOKENS: Final = 64
SPEED_GUESS: Final = 2000.0  # tokens per second, for the very first slice
DECODE_SHARE: Final = 2.0  # seconds of decoding for one of prefill beside it
BURST_SECONDS: Final = 3.0  # of decoding that short prefills may borrow
SHORT_SECONDS: Final = 0.5  # a prefill is short if it takes less
WAIT_GAIN_TOKENS: Final = 64  # a prefix another row is computing is worth waiting for from here on
HEADROOM_SHARE: Final = 32  # spare buffer per row: this part of its prompt, for the reply
OPENING_TOKENS: Final = 64  # of a prompt's end that the first decode step may feed as well
CALL_TOKENS: Final = 16  # a call of the model that feeds fewer is not worth making on the CPU
STOP_GAP_TOKENS: Final = 4  # checkpoints nearer than this are one
LATTICE_TOKENS: Final = 2048  # spacing of checkpoints inside long prefills
LOOK_SECONDS: Final = 0.25  # between two looks at the TTL and two reports, while busy
IDLE_SECONDS: Final = 1.0  # the same, while idle; then unused buffers go back, too
KV_MEMORY_SHARE: Final = 0.6  # of memory beside the model; activations and the system need the rest

Logprob = tuple[float, tuple[tuple[int, float], ...]]  # of a token, and the top alternatives
EndReason = Literal["stop", "length", "cancelled", "deadline"]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class Next(NamedTuple):
    """What may come in the next `n_places`: these ids only, or any but these."""

    ids: Sequence[int] | npt.NDArray[np.bool_]  # or, of each id, whether it is one of them
    only: bool = True
    n_places: int = 1


# Yields what may come, is sent the tokens that came, never ends.
Course = Generator[Next, list[int]]
Constraint = Callable[[], Course]  # a course for each row


def avoid(ids: Sequence[int]) -> Course:
    """None of these tokens, ever."""
    while True:
        yield Next(ids, only=False, n_places=sys.maxsize)


def think_at_most(n_tokens: int, *, start: Sequence[int], end: int) -> Course:
    """`end` after so many tokens of a thought, opened by the prompt or by what comes first."""
    said = yield Next([], only=False, n_places=n_tokens + len(start))
    if said[: len(start)] == start and end not in said:
        yield Next([end])
    yield from avoid([])


def follow(grammar: Any) -> Course:
    """A reply that a copy of `grammar`, an LLMatcher of llguidance, accepts as a whole."""
    matcher = grammar.deep_copy()
    while True:
        flags = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
        if matcher.is_error():  # it is too hard: nothing but the end may come
            log.warning("the grammar gave up: %.200s", matcher.get_error())
        said = yield Next(flags, n_places=sys.maxsize if matcher.is_stopped() else 1)
        matcher.consume_tokens(said)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Job:
    """One request in model terms. `boundaries`: positions where a checkpoint is worth its bytes."""

    prompt: Prompt
    boundaries: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    top_logprobs: int = -1  # -1: no logprobs at all
    constraints: tuple[Constraint, ...] = ()

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.tokens)


class Progress(NamedTuple):
    """Prompt tokens whose KV exists."""

    done: int


class Token(NamedTuple):
    """A generated one; with its log-probabilities if they were asked for."""

    id: int
    logprob: Logprob | None = None


class Finished(NamedTuple):
    """The line is back in the cache: prompt and reply."""

    reason: EndReason
    cached: int = 0
    layer: str = "miss"
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # in queue, prefill, decode


Event = Progress | Token | Finished | ServerError  # the last: nothing of the request is kept


class Ticket:
    """A job on its way: events come out, a wish goes in. Any thread."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.marks = [time.monotonic()]  # the engine's: when submitted, admitted, decoding
        self.wish: EndReason | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put = self._events.put

    def next_event(self, timeout: float) -> Event | None:
        """The next event, or None when nothing happened for `timeout` seconds."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None

    def close(self, wish: EndReason = "cancelled") -> None:
        """End the row if it still runs ("stop": the reply is complete); its KV is kept."""
        self.wish = wish


_GREEDY: Final = partial(mx.argmax, axis=-1)


def _sampler(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """Log-probabilities `(1, vocab)` -> a token `(1,)`, from a random key the row owns."""
    # So a seed gives the same text alone and in a batch. Greedy rows share one function object,
    # which upstream then calls once for the whole batch.
    if sampling.temperature == 0:
        return _GREEDY
    seed = sampling.seed if sampling.seed is not None else time.time_ns()
    keys = [mx.random.key(seed % (1 << 63))]

    def sample(logprobs: mx.array) -> mx.array:
        keys[0], key = mx.random.split(keys[0])
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        return mx.random.categorical(logprobs / sampling.temperature, key=key)

    return sample


def _enforced(constraint: Constraint) -> LogitsProcessor:
    """Reads what came only when the constraint wants to know: reading waits for the model."""

    def run() -> Generator[mx.array, tuple[mx.array, mx.array]]:
        tokens, logits = yield mx.array(0)
        course = constraint()
        may = next(course)
        while True:
            listed, seen = np.zeros(logits.shape[-1], np.bool_), tokens.size
            if isinstance(may.ids, np.ndarray):  # a tokenizer may know more ids than the model
                listed[: may.ids.size] = may.ids[: listed.size]
            else:
                listed[list(may.ids)] = True
            mask = mx.array(listed == may.only)
            while tokens.size < seen + may.n_places:
                tokens, logits = yield mx.where(mask, logits, -mx.inf) if len(may.ids) else logits
            said: Any = tokens[seen:].tolist()
            may = course.send(said)

    steps = run()
    next(steps)
    return lambda tokens, logits: steps.send((tokens, logits))


def _processors(job: Job) -> list[LogitsProcessor]:
    """What bends the logits of this row, in order: penalties, then what is forced or banned."""
    s, size = job.sampling, job.sampling.repetition_context_size
    repetition = s.repetition_penalty if s.repetition_penalty != 1.0 else None
    penalties = (repetition, size, s.presence_penalty, size, s.frequency_penalty, size)
    bent: list[LogitsProcessor] = make_logits_processors(dict(s.logit_bias), *penalties)
    return bent + [_enforced(constraint) for constraint in job.constraints]


@dataclass(eq=False, slots=True)
class Row:
    """A request on the model. Its KV is exactly prompt + `out`, cut at `fed`."""

    ticket: Ticket
    job: Job  # the ticket's
    line: Line
    cache: KvCache  # empty while a group holds it
    fed: int
    reuse: Reuse
    stops: list[int]  # ascending positions where a prefill slice must end
    speed: float  # of its last prefill slice, or another row's, in tokens per second
    out: list[int] = field(default_factory=list)
    group: Group | None = None
    served: float = field(default_factory=time.monotonic)  # when its last prefill slice ended

    @property
    def to_prefill(self) -> int:
        return self.job.n_prompt - 1 - self.fed

    def read_span(self, end: int) -> Span:
        """Copy KV [0, end) while the row runs, wherever it lies now."""
        if (group := self.group) is None:
            return copy_span(self.cache, end, row=0)
        return copy_span(group.batch.prompt_cache, end, row=group.rows.index(self))

    def tell(self, token: int, *, logprobs: mx.array) -> None:
        """Add a token. `logprobs`: `(vocab,)`, of all tokens in the place of this one."""
        self.out.append(token)
        asked: Logprob | None = None
        if self.job.top_logprobs >= 0:
            best: Any = mx.argsort(-logprobs)[: self.job.top_logprobs].tolist()
            values: Any = logprobs[mx.array([token, *best])].tolist()
            asked = (values[0], tuple(zip(best, values[1:], strict=True)))
        self.ticket.put(Token(token, asked))


class Group:
    """Rows that decode together: one on its own buffers, or several in upstream's batch form."""

    def __init__(self, loaded: LoadedModel, row: Row) -> None:
        """Feed what is left of the row's prompt, and tell its first token."""
        processors = _processors(row.job)
        tokens = row.job.prompt.tokens
        context = tokens[:-1].tolist() if processors else []  # penalties see the cached tokens too
        rest = mx.array(_remaining_prefill(tokens, KvOffset(row.fed)))[None]

        def opening(inputs: mx.array, cache: KvCache) -> Any:
            """What is left of the prompt with its last token; on a GPU a call reads all weights."""
            if mx.default_device() != mx.cpu or rest.size < CALL_TOKENS:
                return loaded.model(mx.concatenate([rest, inputs], axis=1), cache=cache)
            # why(L-47): what the last layer makes of rows that nobody samples is never computed.
            loaded.model(rest, cache=cache)
            evaluate(cache)  # or the next write would copy the buffers that this call still reads
            return loaded.model(inputs, cache=cache)

        self.rows = [row]
        self._before: KvCache | None = None
        last = mx.array(tokens[-1:])
        rules = [context], [_sampler(row.job.sampling)], _GREEDY, [processors]
        endless = [StopSequences()], [1 << 60]  # tokens: it finishes no row itself
        self.batch = GenerationBatch(opening, [0], last, row.cache, *rules, *endless)
        self.batch.model = loaded.model
        row.fed = len(tokens)
        row.group, row.cache = self, []
        # why(L-46): step() launches a token before it returns the one before, and on the CPU
        # launching takes nearly as long as computing: so the first token is told before that.
        (token,) = self.batch._next_tokens.tolist()
        row.tell(token, logprobs=self.batch._next_logprobs[0])

    def step(self) -> None:
        """Advance all rows one token, and tell it; it is being fed already (L-10): `fed` has it."""
        self._before = recurrent_handles(self.batch.prompt_cache)
        for row, response in zip(self.rows, self.batch.next(), strict=True):
            if row.fed == row.job.n_prompt + len(row.out):  # the first token has been told
                row.tell(response.token, logprobs=response.logprobs)
            row.fed += 1

    def padding_with(self, n_tokens: int) -> float:
        """Padded tokens as a share of the real ones, were a row of this length to join."""
        lengths = [*(row.fed for row in self.rows), n_tokens]
        return max(lengths) * len(lengths) / sum(lengths) - 1

    def absorb(self, other: Group) -> None:
        """Join another group's rows to this batch; the other group must not be used again."""
        for group in (self, other):
            if len(group.rows) == 1:
                group.batch.prompt_cache = to_batch(group.batch.prompt_cache)
        self.batch.extend(other.batch)
        self._before = None
        for row in other.rows:
            row.group = self
        self.rows += other.rows

    def leave(self, row: Row) -> StateSnapshot | None:
        """Take a row out, its KV back in `row.cache`; returns its state before the last token."""
        index = self.rows.index(row)
        before = snapshot_state(self._before, row=index) if self._before else None
        row.cache = self.batch.prompt_cache
        if len(self.rows) > 1:
            row.cache = row_from_batch(self.batch.prompt_cache, index)
            self.batch.filter([i for i in range(len(self.rows)) if i != index])
        self.rows.remove(row)
        if len(self.rows) == 1:  # back to buffers of its own, which can be put back without a copy
            self.batch.prompt_cache = row_from_batch(self.batch.prompt_cache, 0)
        row.group, self._before = None, None
        return before


class Scheduler:
    """Everything that happens on the model thread, one `turn` at a time."""

    def __init__(self, loaded: LoadedModel, config: Config, *, metrics: CacheMetrics) -> None:
        self.loaded = loaded
        self.config = config
        self.shape = measure_kv(loaded.model)
        free = device_memory_bytes() - loaded.size.nbytes
        budget = config.prompt_cache_max_bytes or max(int(free * KV_MEMORY_SHARE), 1 << 28)
        self.cache = LRUPromptCache(config, self.shape, max_bytes=budget, metrics=metrics)
        self.waiting: list[Ticket] = []
        self.prefilling: list[Row] = []
        self.groups: list[Group] = []
        self._owed_seconds = 0.0  # decode time due before the next prefill slice
        self._speed = SPEED_GUESS
        # The longest row, prompt and reply, that the budget can hold at all.
        spaced_bytes = (HEADROOM_SHARE + 1) * max(self.shape.token_bytes, 1)
        self.capacity_tokens = (budget - self._row_bytes(0)) * HEADROOM_SHARE // spaced_bytes

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.groups)

    @property
    def rows(self) -> list[Row]:
        return self.prefilling + [row for group in self.groups for row in group.rows]

    def turn(self) -> None:
        """End what is over, admit what fits, one decode step per group, one prefill slice."""
        self._end_unwanted()
        for ticket in list(self.waiting):
            if len(self.rows) >= self.config.batch_max_rows or not self._admit(ticket):
                break
        began = time.monotonic()
        for group in list(self.groups):
            self._guarded(list(group.rows), partial(self._decode, group))
        self._owed_seconds = max(0.0, self._owed_seconds - (time.monotonic() - began))
        if self.prefilling:
            # The one that needs least time; waiting counts for a row, so that none starves.
            row = min(self.prefilling, key=lambda row: row.to_prefill / row.speed + row.served / 2)
            # Decoding gets what it is owed first, but one about to join it need not wait for that:
            # of several short requests at once the first would decode alone, step by costly step.
            borrowed = BURST_SECONDS if row.to_prefill < row.speed * SHORT_SECONDS else 0.0
            if not self.groups or self._owed_seconds <= borrowed:
                self._guarded([row], partial(self._prefill, row))

    def _admit(self, ticket: Ticket) -> bool:
        """Start a waiting job unless it had better wait; False: nor may those behind it start."""
        try:
            reuse = self.cache.find(ticket.job.prompt)
            if reuse.promised - reuse.depth >= WAIT_GAIN_TOKENS:
                # A running row will soon hold more of this prompt; it is told where to stop.
                for row in [row for row in self.rows if row.line is reuse.line]:
                    row.stops = sorted({*row.stops, min(reuse.promised, row.job.n_prompt - 1)})
                return True
            if self._make_room(ticket.job, reuse):
                self._start(ticket)
            elif self.rows:
                return False  # they will give bytes back
            else:
                ticket.put(Overloaded("the KV budget (PROMPT_CACHE_MAX_BYTES) is too small"))
        except Exception:
            log.exception("a request could not be started")
            self.cache.mend()
            ticket.put(GenerationFailed("the model failed on this request"))
        self.waiting.remove(ticket)
        return True

    def _make_room(self, job: Job, reuse: Reuse) -> bool:
        """Evict until the row's buffers fit beside everything else."""
        decoding = (layer for group in self.groups for layer in group.batch.prompt_cache)
        running = sum(layer.nbytes for layer in decoding)
        running += sum(self._row_bytes(row.job.n_prompt) for row in self.prefilling)
        moved = reuse.depth * self.shape.token_bytes if reuse.layer == "line" else 0
        return self.cache.evict_to_fit(running + self._row_bytes(job.n_prompt) - moved)

    def _row_bytes(self, n_prompt: int) -> int:
        return _with_headroom(n_prompt) * self.shape.token_bytes + self.shape.state_bytes

    def _start(self, ticket: Ticket) -> None:
        ticket.marks.append(time.monotonic())
        job = ticket.job
        reuse = self.cache.find(job.prompt)  # again: making room may have evicted what was found
        line, span = self.cache.acquire(reuse, job.prompt)
        cache = make_prompt_cache(self.loaded.model)  # why(L-09): of no maximum size
        if span is not None:
            lend_span(cache, span)
        if reuse.state is not None:
            restore_state(cache, reuse.state)
        offset = _kv_cache_offset(cache, recorded=reuse.depth)
        assert offset == reuse.depth, "the cache is not as deep as the lookup said"
        reserve(cache, job.n_prompt, roomy=_with_headroom(job.n_prompt))
        stops = self._stops(job, offset) if self.shape.has_state else []
        row = Row(ticket, job, line, cache, offset, reuse, stops, self._speed)
        line.lender, line.end = row.read_span, offset
        self.prefilling.append(row)
        ticket.put(Progress(offset))

    def _stops(self, job: Job, offset: KvOffset) -> list[int]:
        """Where prefill pauses for a checkpoint."""
        # Not beside another, which would cost a call of the model to save a few tokens; so where
        # the generation prompt begins is enough, and its end is fed with the first decode step.
        end, stops = job.n_prompt - 1, [int(offset)]
        lattice = range(LATTICE_TOKENS, end, LATTICE_TOKENS)
        for position in sorted({*job.boundaries, *lattice}):
            if stops[-1] + STOP_GAP_TOKENS < position <= end:
                stops.append(position)
        return stops[1:] + [end] * (end - stops[-1] > OPENING_TOKENS)

    def _prefill(self, row: Row) -> None:
        """One slice; what little is left then goes with the first decode step."""
        if row.to_prefill > OPENING_TOKENS or row.stops:
            began = time.monotonic()
            pending = _remaining_prefill(row.job.prompt.tokens, KvOffset(row.fed))
            pending = pending[: self._slice_length(row)]
            self.loaded.model(mx.array(pending)[None], cache=row.cache)
            evaluate(row.cache)
            mx.clear_cache()
            reserve(row.cache, row.job.n_prompt, roomy=_with_headroom(row.job.n_prompt))
            row.fed += len(pending)
            row.line.end = row.fed
            row.served = time.monotonic()
            row.speed = self._speed = len(pending) / max(row.served - began, 1e-6)
            owed = self._owed_seconds if self.groups else 0.0
            self._owed_seconds = owed + (row.served - began) * DECODE_SHARE
            row.ticket.put(Progress(row.fed))
        if row.stops and row.fed == row.stops[0]:
            row.stops.pop(0)
            self.cache.add_checkpoint(row.line, row.fed, snapshot=snapshot_state(row.cache))
        if row.to_prefill <= OPENING_TOKENS and not row.stops:
            self._begin_decode(row)

    def _slice_length(self, row: Row) -> int:
        """Tokens of the next slice: to the next stop, and short while others wait their turn."""
        to_stop = min([row.to_prefill, *(stop - row.fed for stop in row.stops[:1])])
        shared = bool(self.groups or self.waiting or len(self.prefilling) > 1)
        seconds = SLICE_SECONDS if shared else SLICE_ALONE_SECONDS
        timely = max(SLICE_MIN_TOKENS, int(row.speed * seconds))
        length = min(to_stop, timely, self.config.prefill_step_size)
        # Those who wait for this stop would not wait for so small a rest, and prefill it each.
        return to_stop if to_stop - length < WAIT_GAIN_TOKENS else length

    def _begin_decode(self, row: Row) -> None:
        """Decode in the group whose rows are most alike in length, or in one of its own."""
        self.prefilling.remove(row)
        row.ticket.marks.append(time.monotonic())
        group = Group(self.loaded, row)
        row.line.end = row.fed
        host = min(self.groups, key=lambda g: g.padding_with(row.fed), default=None)
        limit = self.config.batch_padding_max
        if host and self.shape.can_batch and host.padding_with(row.fed) <= limit:
            host.absorb(group)
        else:
            self.groups.append(group)

    def _decode(self, group: Group) -> None:
        group.step()
        for row in list(group.rows):
            if row.out[-1] in self.loaded.eos_ids:
                self._finish(row, "stop")
            elif len(row.out) >= row.job.max_tokens:
                self._finish(row, "length")

    def _end_unwanted(self) -> None:
        for ticket in [ticket for ticket in self.waiting if ticket.wish]:
            self.waiting.remove(ticket)
            ticket.put(Finished(reason="cancelled"))
        now = time.monotonic()
        for row in self.rows:
            is_late = 0 < self.config.generation_watchdog_seconds < now - row.ticket.marks[1]
            if reason := row.ticket.wish or ("deadline" if is_late else None):
                self._guarded([row], partial(self._finish, row, reason))

    def _finish(self, row: Row, reason: EndReason) -> None:
        """Put the row's KV back, then tell the connection: its next request must find it."""
        if row.group is None:
            self.prefilling.remove(row)
            row.ticket.marks.append(time.monotonic())
        elif before := row.group.leave(row):
            self.cache.add_checkpoint(row.line, row.fed - 1, snapshot=before)
        self.groups = [group for group in self.groups if group.rows]
        self._put_back(row)
        submitted, admitted, decoding = row.ticket.marks
        seconds = (admitted - submitted, decoding - admitted, time.monotonic() - decoding)
        row.ticket.put(Finished(reason, row.reuse.depth, row.reuse.layer, seconds))

    def _put_back(self, row: Row) -> None:
        if row.fed == 0:
            self.cache.drop(row.line)
            return
        evaluate(row.cache)
        self.cache.add_checkpoint(row.line, row.fed, snapshot=snapshot_state(row.cache))
        known = row.job.prompt
        tokens = np.concatenate([known.tokens, np.asarray(row.out, dtype=np.int32)])[: row.fed]
        size = self.config.prompt_cache_block_size
        hashes = known.hashes[: row.fed // size]
        hashes = _block_hashes(tokens, size, root=known.root, known=hashes)
        span = take_span(row.cache, row.fed)
        row.cache = []
        self.cache.put_back(row.line, Prompt(known.root, tokens, hashes), span=span)

    def _guarded(self, touched: list[Row], action: Callable[[], None]) -> None:
        """Run one action; if it raises, the rows it touched fail, and the engine goes on."""
        # why(L-17): what an exception interrupted may be half written; nothing of it is kept.
        try:
            action()
        except Exception:
            log.exception("the model failed on %d request(s)", len(touched))
            failed = {*touched, *(mate for row in touched if row.group for mate in row.group.rows)}
            self.prefilling = [row for row in self.prefilling if row not in failed]
            self.groups = [x for x in self.groups if x.rows and failed.isdisjoint(x.rows)]
            for row in failed:
                self.cache.drop(row.line)
                row.cache, row.group = [], None
                row.ticket.put(GenerationFailed("the model failed on this request"))


def _remaining_prefill(tokens: TokenArray, offset: KvOffset) -> TokenArray:
    """Prompt tokens still to prefill: all but the last, which the first decode step feeds.

    tokens  [0 ....... offset)[offset ....... n-1)[n-1]
             in the cache      to prefill          to decode
    """
    return tokens[offset : len(tokens) - 1]


def _with_headroom(n_prompt: int) -> int:
    """Buffer positions for a prompt and some reply, so that decoding seldom has to grow them."""
    return n_prompt + n_prompt // HEADROOM_SHARE + GROWTH_TOKENS


class Engine:
    """The model thread and its inbox. Every method may be called from any thread."""

    def __init__(
        self, config: Config, metrics: CacheMetrics, *, load: Callable[[], LoadedModel]
    ) -> None:
        """`load` runs on the model thread, which alone may touch what it returns through MLX."""
        self._config = config
        self._inbox: queue.SimpleQueue[Callable[[Scheduler], object]] = queue.SimpleQueue()
        args = (load, metrics)
        self._thread = threading.Thread(target=self._run, args=args, name="model", daemon=True)
        self._loaded: LoadedModel | None = None
        self.trouble: str | None = None  # why there is no model (any more), in one sentence
        self.settled = threading.Event()  # the model is loaded, or refused
        self._stopping = False
        self._report: dict[str, Any] = {}
        self.capacity_tokens = 0  # the longest row, prompt and reply, that the KV budget can hold

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current turn; running requests fail."""
        self._stopping = True
        self._inbox.put(lambda _scheduler: None)  # it may be waiting for something to do
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    @property
    def state(self) -> Literal["loading", "ready", "dead"]:
        if self.trouble is not None:
            return "dead"
        return "ready" if self._loaded is not None else "loading"

    @property
    def model(self) -> LoadedModel:
        """The loaded model. Raises NotReady while it loads and when the model thread is gone."""
        if self.trouble is not None or self._loaded is None:
            raise NotReady(self.trouble or "the model is still loading")
        return self._loaded

    def submit(self, job: Job) -> Ticket:
        """Queue a job. Raises NotReady, or Overloaded at MAX_QUEUED_REQUESTS."""
        assert self.model is not None and job.n_prompt and job.max_tokens > 0
        if self._inbox.qsize() + self._report["queued"] >= self._config.max_queued_requests:
            raise Overloaded(f"{self._config.max_queued_requests} requests are waiting already")
        ticket = Ticket(job)
        self._inbox.put(lambda scheduler: scheduler.waiting.append(ticket))
        if self.trouble is not None:  # the thread ended in between and may never look again
            raise NotReady(self.trouble)
        return ticket

    def status(self) -> dict[str, Any]:
        """State, rows by phase, queue and cache as of the last turn; safe to serialise."""
        return {"state": self.state, "error": self.trouble, **self._report}

    def _run(self, load: Callable[[], LoadedModel], metrics: CacheMetrics) -> None:
        scheduler: Scheduler | None = None
        trouble = "the model thread has stopped"
        try:
            loaded = load()
            scheduler = Scheduler(loaded, self._config, metrics=metrics)
            self.capacity_tokens = scheduler.capacity_tokens
            self._publish(scheduler)
            self._loaded = loaded
            self.settled.set()
            with wired_limit(loaded.model):
                self._serve(scheduler)
        except ModelError as error:
            trouble = str(error)
        except Exception:
            log.exception("the model thread died")
            trouble = "the model thread died; the log says why"
        finally:
            self.trouble = trouble
            self.settled.set()
            if scheduler is not None:  # nobody may be left waiting; before, nobody could submit
                self._receive(scheduler, wait_seconds=0)
                for ticket in [*scheduler.waiting, *(row.ticket for row in scheduler.rows)]:
                    ticket.put(NotReady(trouble))
            mx.clear_streams()  # why(L-20): streams left behind can abort the process at exit

    def _serve(self, scheduler: Scheduler) -> None:
        looked = time.monotonic()
        while not self._stopping:
            self._receive(scheduler, wait_seconds=0 if scheduler.busy else IDLE_SECONDS)
            if scheduler.busy:
                scheduler.turn()
            else:
                mx.clear_cache()
            if not scheduler.busy or time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                scheduler.cache.sweep()
                self._publish(scheduler)

    def _receive(self, scheduler: Scheduler, *, wait_seconds: float) -> None:
        """Do what is in the inbox."""
        with suppress(queue.Empty):
            self._inbox.get(timeout=wait_seconds)(scheduler)
            while True:
                self._inbox.get_nowait()(scheduler)

    def _publish(self, scheduler: Scheduler) -> None:
        self._report = {
            "queued": len(scheduler.waiting),
            "prefilling": len(scheduler.prefilling),
            "decoding": sum(len(group.rows) for group in scheduler.groups),
            "groups": len(scheduler.groups),
            "lines": len(scheduler.cache.lines),
            "cache_bytes": scheduler.cache.nbytes,
            "cache_max_bytes": scheduler.cache.max_bytes,
            "capacity_tokens": scheduler.capacity_tokens,
            "kv_bytes_per_token": scheduler.shape.token_bytes,
        }


# endregion

# region 16 SPLIT ==============================================================
# Characters -> reasoning | content | tool call, as they are generated.
#
#     <think>\nwhy\n</think>\n\nI'll look.\n\n<tool_call>...</tool_call>\nDone.
#               why             I'll look.    (to TOOLS)             \nDone.
#
# Any chunking gives the same texts: white space, and what `regex` finds may become a tag, are held
# back. White space before a tag belongs to the tag; after one, newlines are dropped until the first
# text of that kind, so that a reply of calls alone has no content. All else is as generated.
#   - A call leaves here with the rest of the reply: only its grammar (TOOLS) knows where it ends.
#   - A `</think>` nobody opened, a `<think>` inside thinking: dropped. They are never content.
#
# Doors   _ReasoningStreamSplitter, Tags, Piece
# Knows   -
# Thread  any; pure
# Budget  107
# ==============================================================================

TextKind = Literal["reasoning", "content"]


class Tags(NamedTuple):
    """The texts that part a reply; None where a model has no such thing."""

    think_start: str | None = None
    think_end: str | None = None
    tool_start: str | None = None


class Piece(NamedTuple):
    """A part of the reply. A "tool" piece is raw: the white space before it, its tags, and all."""

    kind: Literal["reasoning", "content", "tool"]
    text: str


class _ReasoningStreamSplitter:
    """Parts one reply; the prompt may have ended `in_reasoning`. `feed` it, `finish` it once."""

    def __init__(self, tags: Tags, *, in_reasoning: bool) -> None:
        self._tags = tags
        self._pattern = regex.compile("|".join(map(regex.escape, filter(None, tags))) or "(?!)")
        self._kind: TextKind = "reasoning" if in_reasoning else "content"
        self._started: set[TextKind] = set()  # kinds of which some text has left
        self._after_tag = in_reasoning  # a tag came since the last text
        self._held = ""  # white space or half a tag, until it is known what follows
        self.in_call = False  # all text is "tool" pieces, until who reads the calls says `resume`

    @property
    def is_thinking(self) -> bool:
        """The next text is reasoning, as far as is known."""
        return self._kind == "reasoning" and not self.in_call

    def feed(self, text: str, *, literal: bool = False) -> list[Piece]:
        """What is certain now. `literal`: no tag token came, what looks like a tag is text."""
        if self.in_call:
            return [Piece("tool", text)] if text else []
        return self.restore(text) if literal else self._scan(text)

    def resume(self, rest: str, *, called: bool) -> list[Piece]:
        """Go on after a call with what followed it; if it was one, it closed the thinking."""
        self.in_call = False
        if called:
            self._turn_to("content")
        return self._scan(rest)

    def restore(self, text: str) -> list[Piece]:
        """Take text as it is, in the kind the reply is in: nothing in it is a tag."""
        text = self._held + text
        if self._after_tag and self._kind not in self._started:
            text = text.lstrip("\n")
        end = len(text.rstrip())
        self._held = text[end:]
        if not end:
            return []
        self._started.add(self._kind)
        self._after_tag = False
        return [Piece(self._kind, text[:end])]

    def finish(self) -> list[Piece]:
        """What was held back: half a tag at the end of a reply is text."""
        pieces = self.restore("")
        if self._held and not self._after_tag:  # white space that follows only a tag goes with it
            pieces.append(Piece(self._kind, self._held))
        return pieces

    def _scan(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while match := self._pattern.search(text, partial=True):
            pieces += self.restore(text[: match.start()])
            if match.partial:
                self._held += match[0]
                return pieces
            text = text[match.end() :]
            if match[0] == self._tags.tool_start:
                self.in_call = True
                held, self._held = self._held, ""
                return [*pieces, Piece("tool", held + match[0] + text)]
            self._turn_to("reasoning" if match[0] == self._tags.think_start else "content")
        return [*pieces, *self.restore(text)]

    def _turn_to(self, kind: TextKind) -> None:
        self._kind, self._held, self._after_tag = kind, "", True


# endregion

# region 17 TOOLS ==============================================================
# Tool-call text -> OpenAI tool_calls, as it is generated; and the whole reply put together.
#
#     <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
#     <tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>
#     <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
#
# A call's first characters tell these apart; others are read at their end by mlx-lm's parser. A
# closing mark counts if what the format puts behind it follows: a file may contain `</parameter>`.
# What calls no tool that was offered stays text. Once a name has left, broken arguments are closed.
#
# Doors   ToolFormat, ToolCallStream, ToolCallDelta, ReplyStream, Delta, Reply, tool_openings
# Knows   SPLIT
# Thread  any; pure
# Budget  339
# ==============================================================================

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters"}}
NextId = Callable[[], str]


@lru_cache
def _compile(pattern: str) -> Any:
    """A pattern whose `\\s*` is bounded: a model caught in blanks is not read again and again."""
    return regex.compile(pattern.replace(r"\s*", r"[ \t\r\n]{0,400}"))


class _Dialect(NamedTuple):
    """One way to write a call between `<tool_call>` and `</tool_call>`."""

    sign: str  # in templates that speak it
    opening: str  # what begins a call: its {name}, bare or as {json}
    name: str  # a pattern of what comes before the arguments, JSON's `{` included
    key: str = ""  # what opens a value or ends the call; "": the arguments are JSON
    value_end: str = ""


# A value that nobody closed ends with the call, if the next call or the reply's end (NUL: it never
# comes, so the tags are held back until then) follows. Half a closing tag at its end is dropped.
_DIALECTS: Final = {  # the sign of the last is in all of them
    "qwen": _Dialect(
        sign="<function=",
        opening="{gap}<function={name}>{gap}",
        name=r"<function=(?P<qwen>[^\s<>]+)>",
        key=r"\s*(?:<parameter=(?P<key>[^<>\n]+)>(?:\n|(?=.))|</function>|(?P<end></tool_call>))",
        value_end=r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))"
        r"|\n?(?=</function>\s*</tool_call>\s*(?:<tool_call>|\0))",
    ),
    "glm": _Dialect(
        sign="<arg_key>",
        opening="{name}{gap}{required}",  # without it `read` might still become `read_file`
        name=r'(?P<glm>[^\s<>{}"]+)\s*(?=<arg_key>|</tool_call>)',
        key=r"\s*(?:<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>|(?P<end></tool_call>))",
        value_end=r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))|(?=</tool_call>\s*\0)",
    ),
    "hermes": _Dialect(
        sign="<tool_call>",
        opening='{gap}{{"name": {json}, "arguments":',
        name=r'\{\s*"name"\s*:\s*"(?P<hermes>[^"\\]+)"\s*,\s*"arguments"\s*:\s*\{',
    ),
}
_NAME: Final = rf"(?:\s+)?<tool_call>\s*(?:{'|'.join(d.name for d in _DIALECTS.values())})"


class ToolFormat(NamedTuple):
    """How a model is told to write its calls."""

    start: str
    end: str  # NUL, which never comes, where only the reply's end ends a call
    dialect: str  # "foreign": none of ours
    gap: str = ""  # what the template prints around the name
    parse: Any = None  # foreign formats only: mlx-lm's (text inside, tools) -> call or calls

    @classmethod
    def detect(
        cls, template: str, *, start: str | None, end: str | None, parse: Any
    ) -> ToolFormat | None:
        """Read it off a chat template and what mlx-lm found in it; None: no tool calls."""
        if start and start != "<tool_call>":
            return cls(start, end or "\0", "foreign", parse=parse)
        text = template.replace("\\n", "\n")  # Jinja strings spell it out
        if "<tool_call>" not in text:
            return None
        dialect = next(name for name, dialect in _DIALECTS.items() if dialect.sign in text)
        gap = "\n" if regex.search(r"(<tool_call>|</arg_key>)\n", text) else ""
        return cls("<tool_call>", "</tool_call>", dialect, gap)


def tool_openings(
    tool_format: ToolFormat, tools: Sequence[Tool], *, name: str | None = None
) -> list[str]:
    """What opens a call of each tool, or of `name` alone, up to where a model's own token ends."""
    if tool_format.dialect == "foreign":
        return [tool_format.start]
    opening = _DIALECTS[tool_format.dialect].opening.replace("{gap}", tool_format.gap)
    openings = []
    for offered, parameters in _parameters_by_name(tools).items():
        if name in (None, offered):
            required = "<arg_key>" if parameters.get("required") else ""
            slots = {"name": offered, "json": _json(offered), "required": required}
            openings.append(tool_format.start + opening.format(**slots))
    return openings


def _parameters_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """The schema of each offered tool."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def _listed(thing: Any) -> list[Any]:
    return thing if isinstance(thing, list) else [thing]


_json = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_PYTHON_TYPES: Final = (str, bool, int, float, list, dict, type(None))
_TYPE_NAMES: Final = ("string", "boolean", "integer", "number", "array", "object", "null")
_JSON_TYPES: Final = MappingProxyType(dict(zip(_PYTHON_TYPES, _TYPE_NAMES, strict=True)))
_PYTHON_LITERALS: Final = {"True": "true", "False": "false", "None": "null"}  # Jinja prints them


def _schema_types(schema: object) -> set[str]:
    """The JSON types a schema allows; empty when it says nothing, or is no schema."""
    node = schema if isinstance(schema, dict) else {}
    allowed = [node["const"]] if "const" in node else _listed(node.get("enum", []))
    named = _listed(node["type"]) if "type" in node else [_JSON_TYPES[type(v)] for v in allowed]
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _listed(node.get(key, []))]
    types = {name for name in named if isinstance(name, str)}.union(*map(_schema_types, parts))
    return types | {"integer"} if "number" in types else types


def _value_as_json(text: str, types: set[str]) -> str:
    """A complete value as JSON: what it reads as if its types (none: any) allow it, or a string."""
    try:
        value = json.loads(_PYTHON_LITERALS.get(text.strip(), text), strict=False)
        fits = "string" not in types or _JSON_TYPES[type(value)] in types
        return _json(value if fits and not isinstance(value, str) else text)
    except (ValueError, RecursionError):
        return _json(text)


_ATOM: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null"
_VALUE: Final = rf'\s*(?:(?P<open>[{{\["])|(?:{_ATOM})(?=[ \t\r\n,}}\]]))'
_CHARACTER: Final = r'[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_KEY: Final = rf'\s*"(?:{_CHARACTER})*"\s*:'
_JSON: Final = {  # what may come next, in what: `{` is an object without members yet, `}` one with
    "{": rf"{_KEY}{_VALUE}|\s*(?P<close>\}})",
    "}": rf"\s*,{_KEY}{_VALUE}|\s*(?P<close>\}})",
    "[": rf"{_VALUE}|\s*(?P<close>\])",
    "]": rf"\s*,{_VALUE}|\s*(?P<close>\])",
    # "raw": line breaks and `\d`, which JSON forbids but models write.
    '"': rf'(?:{_CHARACTER})+|(?P<raw>[\x00-\x1f]|\\(?=[^"\\/bfnrtu]))|(?P<close>")',
}
_CLOSED: Final = str.maketrans("{[", "}]")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of call number `index`: its name, at first, then its arguments piece by piece."""

    index: int
    id: str
    name: str | None
    arguments: str  # a fragment of JSON text


class ToolCallStream:
    """Reads the calls of one reply, each from its opening tag or the white space before it on."""

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool], *, next_id: NextId) -> None:
        self.n_calls = 0  # complete ones
        self._format, self._tools, self._next_id = tool_format, list(tools), next_id
        self._offered = _parameters_by_name(tools)
        self._reading: Iterator[None] | None = None  # of the open call; pauses for more text
        self._id = ""  # of that call, once its name is known and was offered
        self._unread = ""
        self._ended = False  # no more text will come
        self._deltas: list[ToolCallDelta] = []  # of one feed
        self._json = ""  # what this feed added to the arguments

    def feed(self, text: str, *, ended: bool = False) -> Heard:
        """Read on; when the reply has `ended`, give what there is, as valid JSON, or as text."""
        if self._reading is None:
            self._reading, self._id, self._unread = self._read(), "", ""
        raw = self._unread = self._unread + text
        self._ended, self._deltas, self._json = ended, [], ""
        is_over = next(self._reading, True)
        if self._id and self._json:
            self._tell(self._json)
        if is_over:
            self._reading = None
            self.n_calls += bool(self._id)
        back = "" if self._id else raw[: len(raw) - len(self._unread)]
        return self._deltas, back, self._unread if is_over else None, bool(self._id)

    def _tell(self, arguments: str, *, name: str | None = None) -> None:
        """A name leaves alone: there are clients that lose arguments that come with it."""
        if name is not None:
            self.n_calls += bool(self._id)  # foreign calls may come several at once
            self._id = self._next_id()
        self._deltas.append(ToolCallDelta(self.n_calls, self._id, name, arguments))

    def _read(self) -> Iterator[None]:
        if self._format.dialect == "foreign":
            yield from self._read_foreign()
        elif (match := (yield from self._take(_NAME))) is None:  # a tag, but no call
            self._unread = self._unread.partition(self._format.start)[2]
        else:
            name, dialect = match[match.lastgroup], _DIALECTS[match.lastgroup]
            if name in self._offered:
                self._tell("", name=name)
            self._json = "{"
            tagged = dialect.key and self._read_tagged(dialect, self._offered.get(name, {}))
            yield from tagged or self._read_json()
            self._unread = "" if self._ended else self._unread

    def _take(self, pattern: str) -> Generator[None, None, Any]:
        """Take a match off the unread text; None where it does not fit, or was cut off."""
        while (match := _compile(pattern).match(self._unread, partial=True)) and match.partial:
            if self._ended:
                return None
            yield
        self._unread = self._unread[match.end() if match else 0 :]
        return match

    def _read_tagged(self, dialect: _Dialect, parameters: Tool) -> Iterator[None]:
        """Keys and bare values between tags, typed by the tool's schema."""
        properties, comma = parameters.get("properties"), ""
        schemas = properties if isinstance(properties, dict) else {}
        while (match := (yield from self._take(dialect.key))) and not match["end"]:
            if match["key"]:
                key = match["key"].strip()
                self._json += f"{comma}{_json(key)}: "
                comma = ", "
                schema = schemas.get(key, parameters.get("additionalProperties"))
                yield from self._read_value(dialect.value_end, _schema_types(schema))
        self._json += "}"

    def _read_value(self, end: str, types: set[str]) -> Iterator[None]:
        """One of them; strings leave as they grow."""
        is_string, is_whole, value = types == {"string"}, False, ""
        self._json += '"' * is_string
        while not (is_whole or self._ended):
            match = _compile(end).search(self._unread, partial=True)
            text, is_whole = self._unread[: match.start()], not match.partial
            self._unread = self._unread[match.end() if is_whole else match.start() :]
            value += text
            if is_string:
                self._json += _json(text)[1:-1]  # pieces can be escaped one by one
            if not is_whole:
                yield
        self._json += '"' if is_string else _value_as_json(value, types)

    def _read_json(self) -> Iterator[None]:
        """JSON as generated; members leave when their values begin: closing all makes it valid."""
        opened = "{"  # a key of `_JSON` for each thing that is open, outermost first
        while opened and (match := (yield from self._take(_JSON[opened[-1]]))):
            kind, text = match.lastgroup, match[0]
            inside = opened[-1].translate(_CLOSED) + (text[-1] if kind == "open" else "")
            opened = opened[:-1] + ("" if kind == "close" else inside)
            self._json += _json(text)[1:-1] if kind == "raw" else text
        self._json += opened[::-1].translate(_CLOSED)
        yield from self._take(r"\s*[}\]]*\s*</tool_call>")  # also where a bracket was forgotten

    def _read_foreign(self) -> Iterator[None]:
        """A call, or several, for mlx-lm's parser: only at the end it can read them."""
        start, end = self._format.start, self._format.end
        while not self._ended and end not in self._unread.partition(start)[2]:
            yield
        body, _, self._unread = self._unread.partition(start)[2].partition(end)
        try:
            found = _listed(self._format.parse(body, self._tools))
            calls = [(call["name"], _json(dict(call.get("arguments") or {}))) for call in found]
        except Exception:  # noqa: BLE001 - mlx-lm's parsers raise what they like on bad text
            return
        for name, arguments in calls if all(name in self._offered for name, _ in calls) else ():
            self._tell("", name=name)
            self._tell(arguments)


Delta = Piece | ToolCallDelta  # what is new in a reply: text, or a part of a call
# New parts of a call, text of none (it goes back), what follows it (None: it is open), is it one
Heard = tuple[list[ToolCallDelta], str, str | None, bool]


class Reply(NamedTuple):
    """A reply put together from its deltas; None where there was nothing."""

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]  # {"id", "type", "function": {"name", "arguments"}}


@dataclass(eq=False)
class ReplyStream:
    """Reasoning, content and calls of one reply, in the order in which they were generated."""

    _splitter: _ReasoningStreamSplitter
    _calls: ToolCallStream | None = None  # where the splitter knows a tag that opens calls
    _deltas: list[Delta] = field(default_factory=list)
    n_calls: int = 0  # complete ones

    def feed(self, text: str, *, literal: bool = False) -> list[Delta]:
        """What is certain now; `literal` as in `_ReasoningStreamSplitter.feed`."""
        return self._route(self._splitter.feed(text, literal=literal))

    def finish(self) -> list[Delta]:
        """What was held back; the reply is over, wherever it was cut."""
        open_call = [Piece("tool", "")] if self._splitter.in_call else []
        return self._route(open_call, ended=True) + self._route(self._splitter.finish())

    def reply(self) -> Reply:
        """The join of all deltas: what a client that reads the stream has."""
        texts = {"content": "", "reasoning": ""}
        functions: dict[str, dict[str, Any]] = {}  # by the id of their call
        for delta in self._deltas:
            if isinstance(delta, Piece):
                texts[delta.kind] += delta.text
            else:
                function = functions.setdefault(delta.id, {"name": delta.name, "arguments": ""})
                function["arguments"] += delta.arguments
        calls = [{"id": i, "type": "function", "function": f} for i, f in functions.items()]
        return Reply(texts["content"] or None, texts["reasoning"] or None, calls)

    def _route(self, pieces: list[Piece], *, ended: bool = False) -> list[Delta]:
        """Note them as what a client gets: of a call, which is always the last piece, its parts."""
        n_known = len(self._deltas)
        while self._calls and pieces and pieces[-1].kind == "tool":
            *texts, call = pieces
            deltas, back, rest, is_call = self._calls.feed(call.text, ended=ended)
            self._deltas += [*texts, *deltas]
            self.n_calls = self._calls.n_calls
            pieces = self._splitter.restore(back)
            if rest is not None:
                pieces += self._splitter.resume(rest, called=is_call)
        self._deltas += pieces
        return self._deltas[n_known:]


# endregion

# region 18 ANSWER =============================================================
# The whole path on one page: request -> prompt -> job -> events -> the client's words.
#
#     prepare: render, check, constrain, submit      (may still be a 400)
#     listen:  tokens -> text -> stop strings -> reasoning | content | calls -> bodies
#     close:   note the turn, log it, then the last words
#
# A streamed and a whole answer read the same deltas, so they say the same. Iterators yield None
# when nothing is new for a while: HTTP then looks whether the client is still there.
#
# Doors   ServerState, Answer, Bodies, token_count
# Doors   health, status_body, models_body, model_body
# Knows   all
# Thread  connection
# Budget  517
# ==============================================================================

Bodies = Generator[dict[str, Any] | None]
TICK_SECONDS: Final = 0.25  # between two looks at the client while nothing is new


@contextmanager
def kept_awake(config: Config) -> Iterator[None]:
    """KEEP_AWAKE: macOS does not sleep inside; elsewhere there is no `caffeinate` to run."""
    command = shutil.which("caffeinate") if config.keep_awake else None
    process = subprocess.Popen([command, "-i"]) if command else None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything that outlives a request. CAPITALS mean just that."""

    config: Config
    engine: Engine
    metrics: CacheMetrics
    HEALING_STORE: HealingStore
    LEDGER: Ledger
    SESSION_INDEX: SessionIndex
    SESSION_TURN_STORE: SessionTurnStore
    session_log: SessionLog
    started: int  # Unix seconds


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the model's terms."""

    loaded: LoadedModel
    draft: Draft
    tool_format: ToolFormat | None
    job: Job


def prepare(state: ServerState, request: ChatRequest) -> Prepared:
    """Render and check a request. Raises every error that can still be a status code."""
    loaded = state.engine.model
    limit = min(loaded.limit, state.engine.capacity_tokens)
    draft = _draft(state, request, limit=limit)
    rendered = draft.rendered
    room = limit - len(rendered.ids)
    if room < 1:
        raise ContextTooLong(len(rendered.ids), limit)
    if any(token >= loaded.size.vocab_size for token, _ in request.sampling.logit_bias):
        raise BadRequest("logit_bias: a token id is outside the vocabulary", param="logit_bias")
    if state.config.cache_norm_safety_check:
        scrubbed = _scrub_cache_key(rendered.text)  # does it still look like the prompt?
        if not _assert_cache_key_safety(scrubbed, rendered.text):
            log.warning("the diagnostic key drops more than a tenth of the prompt")
    tool_format = None
    if (request.tools or request.deferred) and request.tool_choice.mode != "none":
        marks = loaded.markup
        tags = {"start": marks.tool_call_start, "end": marks.tool_call_end}
        tool_format = ToolFormat.detect(loaded.template.source, **tags, parse=marks.tool_parser)
    thinks = rendered.starts_in_reasoning
    wanted = _constraints(loaded, request, in_reasoning=thinks, tool_format=tool_format)
    job = Job(
        prompt=_prompt(loaded, draft, config=state.config),
        boundaries=_checkpoint_positions(rendered),
        max_tokens=min(request.max_tokens, room),
        sampling=request.sampling,
        top_logprobs=request.top_logprobs if request.logprobs else -1,
        constraints=tuple(wanted),
    )
    return Prepared(loaded, draft, tool_format, job)


def _draft(state: ServerState, request: ChatRequest, *, limit: int) -> Draft:
    """Its prompt, replayed as far as it is known. Raises NotReady, BadRequest, NotServed."""
    template = state.engine.model.template
    if state.config.strict_model_names and request.model is not None:
        model_body(state, request.model)
    if request.kind == "completion" or not state.config.cache_canonicalize_tool_context:
        return Draft(rendered=template.prompt(request))
    return state.LEDGER.draft(request, template, room=limit - 1, now=time.monotonic())


def token_count(state: ServerState, request: ChatRequest) -> dict[str, Any]:
    """POST /v1/messages/count_tokens: what the prompt of this very request would have."""
    draft = _draft(state, request, limit=state.engine.model.limit)
    return {"input_tokens": len(draft.rendered.ids)}


def _prompt(loaded: LoadedModel, draft: Draft, *, config: Config) -> Prompt:
    """The tokens under a root that stands for all else that changes KV: weights, KV storage."""
    facts = (loaded.revision, config.kv_bits, config.kv_group_size, config.kv_quant_scheme)
    root = hashlib.sha256(repr(facts).encode()).digest()
    size, ids = config.prompt_cache_block_size, draft.rendered.ids
    known = draft.past.reply.hashes[: draft.kept // size] if draft.past else ()
    return Prompt(root, ids, _block_hashes(ids, size, root=root, known=known))


def _checkpoint_positions(rendered: Rendered) -> tuple[int, ...]:
    """Ends of the head and of the messages, the last user's, and what a tool loop adds to it."""
    last_user = rendered.last_user_start or 0
    fixed = {rendered.system_end, *rendered.note_ends, last_user, rendered.generation_start}
    recent = {b for b in rendered.boundaries if b >= last_user}
    return tuple(sorted(fixed | recent))


def _constraints(
    loaded: LoadedModel, request: ChatRequest, *, in_reasoning: bool, tool_format: ToolFormat | None
) -> Iterator[Constraint]:
    """What the request demands of its reply. Raises BadRequest: that cannot be had."""
    if request.kind == "completion":
        return
    marks, encode, mode = loaded.markup, loaded.template.encode, request.tool_choice.mode
    calls, end = encode(marks.tool_call_start or ""), marks.think_end_ids
    budget = request.thinking_budget or request.max_tokens
    # of thinking that the reply itself may begin with
    start = encode(marks.think_start or "")[:1] if request.thinking and not in_reasoning else []
    thinks = in_reasoning or start
    if mode == "none" and len(calls) == 1:
        # The tools stay in the prompt, or the whole conversation behind them would be prefilled.
        yield partial(avoid, calls)
    if thinks and len(end) == 1 and budget < request.max_tokens:
        yield partial(think_at_most, budget, start=start, end=end[0])
    if mode in ("required", "named"):
        if tool_format is None:
            wrong = "tool_choice: this model's template knows no calls"
            raise BadRequest(wrong, param="tool_choice")
        offered = request.tools + request.deferred
        openings = tool_openings(tool_format, offered, name=request.tool_choice.name)
        gaps = ["\n\n"] * bool(thinks) + [""] * (not in_reasoning)
        texts = (_spelled(encode(gap + opening)) for gap in gaps for opening in openings)
        answer = f"({' | '.join(texts)}) <[*]>*"
    elif request.schema is not None:
        or_calls = f" | {_spelled(calls)} <[*]>*" if tool_format and calls else ""
        answer = f"BLANKS? (@json{or_calls})"
    else:
        return
    thought = f"<[^{','.join(map(str, [*end[:1], *loaded.eos_ids]))}]>* {_spelled(end)}"
    before = thought if in_reasoning else f"({_spelled(start)} {thought})?" if start else ""
    tags = (marks.think_start, marks.think_end, marks.tool_call_start, marks.tool_call_end)
    guide = _guide(loaded.tokenizer, tags=tags, eos_ids=loaded.eos_ids)
    schema = json.dumps(request.schema or {})
    yield partial(follow, _compiled(guide, f"{before} {answer}", schema=schema))


def _spelled(ids: Iterable[int]) -> str:
    """Tokens as a grammar of llguidance writes them."""
    return " ".join(f"<[{token}]>" for token in ids)


@lru_cache(maxsize=1)
def _guide(tokenizer: Any, *, tags: tuple[str | None, ...], eos_ids: frozenset[int]) -> Any:
    """The tokenizer as llguidance knows it: tags are markup, never a part of a JSON string."""
    import llguidance  # only for who asks: it takes 0.2 s, and what follows up to a second

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.add_special_tokens([tag for tag in tags if tag and copy.token_to_id(tag) is not None])
    return llguidance.LLTokenizer(copy.to_str(), eos_token=sorted(eos_ids))


@lru_cache(maxsize=32)
def _compiled(guide: Any, start: str, *, schema: str) -> Any:
    """An LLMatcher of replies like `start`. Raises BadRequest: the compiler's first sentence."""
    import llguidance

    blanks = r"[ \t\r\n]{1,%d}"  # limited: a model caught in them comes out again
    # what is certain to come would be spelled by the tokenizer, which takes a quoted tag for one
    lark = f'%llguidance {{"no_forcing": true}}\nstart: {start}\nBLANKS: /{blanks % 8}/'
    json_schema = {**json.loads(schema), "x-guidance": {"whitespace_pattern": blanks % 64}}
    grammars = [{"lark_grammar": lark}, {"name": "json", "json_schema": json_schema}]
    text = json.dumps({"grammars": grammars})
    matcher = llguidance.LLMatcher(guide, text, log_level=0)
    if wrong := matcher.get_error():
        param = "response_format.json_schema.schema"
        sentence = wrong.rpartition("error: ")[2].splitlines()[0].partition(". ")[0]
        raise BadRequest(f"{param}: {sentence:.300}", param=param)
    return matcher


class StopStrings:
    """Text up to the first stop string; what may still become one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._pattern = regex.compile("|".join(map(regex.escape, stops)) or "(?!)")
        self._held = ""
        self.hit = ""  # the one that came

    def feed(self, text: str) -> str:
        """What can leave now; nothing any more after a hit."""
        if self.hit:
            return ""
        text = self._held + text
        match = self._pattern.search(text, partial=True)
        start = match.start() if match else len(text)
        self.hit = match[0] if match and not match.partial else ""
        self._held = "" if self.hit else text[start:]
        return text[:start]

    def finish(self) -> str:
        return self._held


class Listener:
    """Generated ids -> deltas, with what the usage and the log want to know. One reply, one use."""

    def __init__(self, prepared: Prepared, request: ChatRequest) -> None:
        markup = prepared.loaded.markup
        tool_format, chats = prepared.tool_format, request.kind != "completion"
        start, end = (markup.think_start, markup.think_end) if chats else (None, None)
        call = tool_format.start if tool_format else None
        tags = Tags(think_start=start, think_end=end, tool_start=call)
        calls: ToolCallStream | None = None
        if tool_format is not None:
            offered = request.tools + request.deferred
            next_id = lambda: f"call_{uuid.uuid4().hex[:24]}"  # noqa: E731
            calls = ToolCallStream(tool_format, offered, next_id=next_id)
        in_reasoning = prepared.draft.rendered.starts_in_reasoning
        self.splitter = _ReasoningStreamSplitter(tags, in_reasoning=in_reasoning)
        self.stream = ReplyStream(self.splitter, calls)
        backend = prepared.loaded.tokenizer.backend_tokenizer
        self._detokenizer = Detokenizer(backend, markup.hidden_ids)
        self.stops = StopStrings(request.stop)
        ids = [prepared.loaded.template.encode(tag) for tag in (start, end, call) if tag]
        # of the tags, if each is a token of its own
        self._tag_ids = {i for (i, *_) in ids} if all(len(i) == 1 for i in ids) else set()
        self._one_call = not request.parallel_tool_calls
        self._eos_ids = prepared.loaded.eos_ids
        self.n_reasoning = 0
        self.ids: list[int] = []

    @property
    def is_over(self) -> bool:
        """The reply is complete although the model would go on."""
        return bool(self.stops.hit) or (self._one_call and self.stream.n_calls > 0)

    def hear(self, token: int) -> list[Delta]:
        """What this token adds; nothing once the reply is over."""
        if self.is_over:
            return []
        self.ids.append(token)
        if self.splitter.is_thinking:
            self.n_reasoning += 1
        text = "" if token in self._eos_ids else self._detokenizer.feed(token)
        if not text:
            return []
        # A tag the model means is a token of its own; the same characters in others are a quote.
        literal = bool(self._tag_ids) and token not in self._tag_ids and not self.stops.finish()
        return self.stream.feed(self.stops.feed(text), literal=literal)

    def generated(self, prepared: Prepared, session: str) -> Generated | None:
        """The tokens to go on from later; None where the client has less than the model said."""
        # Nor where it was cut in a thought or a call: the template prints what is not in the KV.
        ended = self.ids[-1] if self.ids and self.ids[-1] in self._eos_ids else None
        reply = self.stream.reply()
        is_cut = self.splitter.is_thinking or reply.tool_calls or not reply.content
        if self.is_over or (ended is None and is_cut):
            return None
        hashes, now = prepared.job.prompt.hashes, time.monotonic()
        return Generated(ids=self.ids, hashes=hashes, ended=ended, session=session, at=now)

    def finish(self) -> list[Delta]:
        """What was held back to the end."""
        rest = self.stops.feed(self._detokenizer.finish()) + self.stops.finish()
        return self.stream.feed(rest) + self.stream.finish()


class Answer:
    """One request on its way, to be closed. Making one raises what can still be a status code."""

    def __init__(self, state: ServerState, request: ChatRequest) -> None:
        self._state = state
        self._request = request
        self._began = time.monotonic()
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            with suppress(OSError):  # why(L-35): rendering must not slow down those who stream
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        self._prepared = prepare(state, request)
        self._listener = Listener(self._prepared, request)
        self._shape = self._shaped(self._prepared.loaded.model_id)
        self._ticket = state.engine.submit(self._prepared.job)
        self._first_token_at: float | None = None
        self._logprobs: list[Body] = []  # those that have not left yet
        self._cached: int | None = None  # known as soon as the model starts on it
        self._end: Finished | None = None

    def _shaped(self, model: str) -> AnswerShape | AnthropicEvents:
        request = self._request
        if request.kind == "messages":
            # why(L-52): on resume Claude Code drops the thinking of a model it did not ask for.
            return AnthropicEvents(request.request_id, request.model or model)
        facts = (request.request_id, model, int(time.time()), request.include_usage)
        return AnswerShape(request.kind, *facts)

    def close(self) -> None:
        """Give the request up if it still runs."""
        self._ticket.close()

    def whole(self) -> Bodies:
        """None while waiting, then the one body."""
        for deltas in self._listen():
            for delta in deltas or ():
                self._shape.say(_streamed(delta))
            yield None  # at every token, or a client that left would get a whole reply
        yield self._shape.whole(_whole_message(self._listener.stream.reply()), self._ending())

    def chunks(self) -> Bodies:
        """The bodies of a stream, keep-alives included; None while there is nothing to say."""
        shape, begun, spoke = self._shape, False, time.monotonic()
        for deltas in self._listen():
            bodies: list[Body] = []
            if not begun and self._cached is not None:
                bodies, begun = shape.begin(self._usage()), True
            for delta in deltas or ():
                bodies += shape.say(_streamed(delta), self._take_logprobs())
            if not bodies and time.monotonic() - spoke >= self._state.config.keepalive_seconds:
                bodies = [shape.ping()]
            if bodies:
                spoke = time.monotonic()
                yield from bodies
            else:
                yield None
        yield from shape.end(self._ending())

    def _listen(self) -> Iterator[list[Delta] | None]:
        """Deltas as they come; returns when the turn is noted. Raises what ended it instead."""
        with kept_awake(self._state.config):
            while self._end is None:
                match self._ticket.next_event(TICK_SECONDS):
                    case Progress(done):
                        self._cached = done if self._cached is None else self._cached
                        yield None
                    case None:
                        yield None
                    case Token() as event:
                        yield self._hear(event)
                    case ServerError() as error:
                        raise error
                    case Finished() as end:
                        self._end = end
            deltas = self._listener.finish()
            self._remember(self._end)
            self._note_turn(self._end)
            yield deltas

    def _hear(self, event: Token) -> list[Delta]:
        self._first_token_at = self._first_token_at or time.monotonic()
        if event.logprob and not self._listener.is_over:
            value, best = event.logprob
            top = [self._logprob(*pair) for pair in best]
            self._logprobs.append({**self._logprob(event.id, value), "top_logprobs": top})
        deltas = self._listener.hear(event.id)
        if self._listener.is_over:
            self._ticket.close("stop")
        return deltas

    def _logprob(self, token: int, logprob: float) -> Body:
        """OpenAI writes -9999.0 for a token that cannot come; JSON has no -Infinity."""
        text = str(self._prepared.loaded.tokenizer.decode([token]))
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def _take_logprobs(self) -> Body | None:
        """The log-probabilities since the last chunk, None where nobody asked."""
        entries, self._logprobs = self._logprobs, []
        return {"content": entries} if self._request.logprobs else None

    def _ending(self) -> Ending:
        stop = self._listener.stops.hit or None
        finish: FinishReason = "length"  # a call that was cut is none to run
        if self._listener.is_over or (self._end and self._end.reason == "stop"):
            finish = "tool_calls" if self._listener.stream.n_calls and not stop else "stop"
        return Ending(finish, self._usage(), stop, self._take_logprobs())

    def _usage(self) -> Usage:
        n_prompt, n_out = self._prepared.job.n_prompt, len(self._listener.ids)
        return Usage(n_prompt, self._cached or 0, n_out, self._listener.n_reasoning)

    def _remember(self, end: Finished) -> None:
        """Record the reply in the ledger. why(L-45): not one that the watchdog cut short."""
        prepared, session = self._prepared, self._request.session.session_id or ""
        if not prepared.draft.keys or end.reason not in ("stop", "length"):
            return
        reply, template = _whole_message(self._listener.stream.reply()), prepared.loaded.template
        reply["content"] = reply["content"] or ""
        generated = self._listener.generated(prepared, session)
        if generated:
            self._state.LEDGER.record(prepared.draft, template, reply=reply, generated=generated)
        # cut or stopped behind its thinking; or a client has its id and may bring only that
        is_named = self._request.kind == "messages"
        if (is_named or not generated) and not self._listener.splitter.is_thinking:
            self._state.HEALING_STORE.remember(template.canonical([reply])[0].message)

    def _note_turn(self, end: Finished) -> None:
        """Before the last words: the client's next request may be here right after them."""
        state, job, draft = self._state, self._prepared.job, self._prepared.draft
        session, store = self._request.session, state.SESSION_TURN_STORE
        # without an id, all up to the first words that are not the system's name a conversation
        named = zip(draft.turns, draft.keys[1:], strict=False)
        first_words = next((key for turn, key in named if turn.role not in SYSTEM_ROLES), b"")
        session_id = session_id_of(session, job.prompt.tokens, first_words=first_words)
        digests = [turn.digest for turn in draft.turns]
        stable = _update_session_turn_store(store, session_id, digests=digests)
        facts, counters = self._facts(end), state.metrics.snapshot()
        log.info(request_line(**facts, **counters))
        facts |= {"parent": session.parent, "stable_prefix_msg_count": stable}
        state.SESSION_INDEX.note(session_id, facts, at=time.monotonic())
        messages = self._request.messages
        start = store.exchange_last(session_id, [hash(marshal.dumps(m, 2)) for m in messages])
        record = {
            **facts,
            "head": draft.keys[0].hex()[:12] if draft.keys else None,  # template, tools, switches
            "n_messages": len(messages),
            "messages": messages[start:],  # what earlier lines of this log do not have
        }
        if state.config.log_prompt_tokens:
            record["tokens"] = job.prompt.tokens.tolist()
        state.session_log.write(session_id, record | counters)

    def _facts(self, end: Finished) -> dict[str, object]:
        """What the log says of the request."""
        ttft = (self._first_token_at or time.monotonic()) - self._began
        return {
            "req": self._request.request_id[:8],
            "prompt": self._prepared.job.n_prompt,
            "cached": end.cached,
            "layer": end.layer,
            "replayed": self._prepared.draft.kept,
            "fallback": self._prepared.draft.fallback or None,
            "prefill": round(end.seconds[1], 3),
            "decode": round(end.seconds[2], 3),
            "out": len(self._listener.ids),
            "ttft_ms": round(ttft * 1000),
            "finish": end.reason,
        }


def _whole_message(reply: Reply) -> dict[str, Any]:
    more = {"reasoning_content": reply.reasoning, "tool_calls": reply.tool_calls or None}
    said = {name: value for name, value in more.items() if value is not None}
    return {"role": "assistant", "content": reply.content, **said}


def _streamed(delta: Delta) -> dict[str, Any]:
    """A delta as chat clients read it."""
    if isinstance(delta, Piece):
        return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}
    function = {"arguments": delta.arguments}
    if delta.name is None:
        return {"tool_calls": [{"index": delta.index, "function": function}]}
    opened = {"index": delta.index, "id": delta.id, "type": "function"}
    return {"tool_calls": [{**opened, "function": {"name": delta.name, **function}}]}


def health(state: ServerState) -> tuple[int, dict[str, Any]]:
    """HTTP status and body; "ok" only while the model thread lives and the model is loaded."""
    said = {"ready": (200, "ok"), "loading": (503, "loading"), "dead": (503, "error")}
    status, word = said[state.engine.state]
    return status, without_nulls({"status": word, "error": state.engine.trouble})


def status_body(state: ServerState) -> dict[str, Any]:
    """GET /v1/status: engine, counters, sessions and, once loaded, the model."""
    body: dict[str, Any] = {
        "engine": state.engine.status(),
        "counters": state.metrics.snapshot(),
        "ledger": {**state.LEDGER.snapshot(), "healing": len(state.HEALING_STORE)},
        "sessions": state.SESSION_INDEX.snapshot(time.monotonic()),
        "uptime_seconds": int(time.time()) - state.started,
    }
    if state.engine.state == "ready":
        loaded = state.engine.model
        body["model"] = {
            "id": loaded.model_id,
            "family": loaded.family,
            "context_length": loaded.limit,
            "bytes": loaded.size.nbytes,
        }
    return body


def models_body(state: ServerState) -> dict[str, Any]:
    """GET /v1/models: the one model that is loaded. Raises NotReady."""
    loaded = state.engine.model
    n_most = min(loaded.limit, state.engine.capacity_tokens)
    entry = {"id": loaded.model_id, "object": "model", "created": state.started}
    entry |= {"owned_by": "start-llm", "context_length": n_most, "max_model_len": n_most}
    return {"object": "list", "data": [entry]}


def model_body(state: ServerState, model_id: str) -> dict[str, Any]:
    """Raises NotServed for any model but the one that is loaded."""
    entry: dict[str, Any] = models_body(state)["data"][0]
    if model_id != entry["id"]:
        sentence = f"the model {model_id[:200]!r} is not loaded, {entry['id']!r} is"
        raise NotServed(404, sentence, code="model_not_found")
    return entry


# endregion

# region 19 HTTP ===============================================================
# stdlib ThreadingHTTPServer, server-sent events, one error boundary.
# A thread per connection parses, renders and waits. What goes wrong before the headers becomes a
# status and an error body of the API that was called; after them, an error event. A client that
# left is noticed within a tick: the socket is asked whether its other end is still there.
#
# Doors   LLMServer, Handler
# Knows   ERRORS, LOG, WIRE, MESSAGES, ANSWER
# Thread  connection
# Budget  247
# ==============================================================================

_LINE_LIMIT: Final = 1 << 12  # of a chunk-size line or a trailer


class LLMServer(ThreadingHTTPServer):
    """One listening address. Several may share a state and a bound on open connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], state: ServerState, *, slots: threading.BoundedSemaphore
    ) -> None:
        self.state, self._slots = state, slots
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for a name that nobody needs

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread of its own; beyond MAX_CONNECTIONS, wait for one to close."""
        self._slots.acquire()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._slots.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections break; that is worth a line, not a traceback on the console."""
        log.debug("connection from %s ended badly: %r", client_address, sys.exception())


def _declared_length(headers: Any, limit: int) -> int | None:
    """Bytes of a body, None for a chunked one. Raises what refuses it unread."""
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise NotServed(415, "compressed bodies are not accepted; send plain JSON")
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        return None
    text = headers.get("Content-Length", "0").strip()
    if not (text.isascii() and text.isdigit()):
        raise BadRequest("Content-Length is not a number")
    return _allowed(int(text), limit)


def _allowed(n_bytes: int, limit: int) -> int:
    if n_bytes > limit:
        said = f"the body is larger than MAX_BODY_BYTES ({limit} bytes)"
        raise NotServed(413, said, code="request_too_large")
    return n_bytes


def _chunks(rfile: BufferedIOBase, limit: int) -> Iterator[bytes]:
    """The parts of a chunked body, RFC 9112 section 7.1."""
    total, size = 0, -1
    while size:
        line = rfile.readline(_LINE_LIMIT).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
            raise BadRequest("the chunked body is malformed")
        size = int(line, 16)
        total = _allowed(total + size, limit)
        yield rfile.read(size)
        if size:
            rfile.readline(_LINE_LIMIT)
    while rfile.readline(_LINE_LIMIT).strip():
        pass  # trailers


class Handler(BaseHTTPRequestHandler):
    """One connection: requests one after another, each through `_answer`."""

    server_version, sys_version = "start-llm", ""
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # the refusal of garbage has a status line, too
    disable_nagle_algorithm = True
    server: LLMServer
    _headers_sent = False
    _has_unread_body = True

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.state.config.idle_connection_seconds)

    def _answer(self) -> None:
        """The error boundary: nothing a request does leaves this function as an exception."""
        self._headers_sent = False
        has_length = self.headers.get("Content-Length", "0") != "0"
        self._has_unread_body = has_length or "Transfer-Encoding" in self.headers
        try:
            self._route()
        except ServerError as error:
            self._send_error_body(error)
        except (ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
            log.debug("the client left: %s", self.requestline)
        except Exception:
            log.exception("unexpected failure in %s", self.requestline)
            self._send_error_body(ServerError("the server failed on this request"))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer

    def _route(self) -> None:
        path = self.path.partition("?")[0].rstrip("/") or "/"
        if path.startswith("/v1/models/"):
            path, self._id = "/v1/models/*", path.removeprefix("/v1/models/")
        if path not in self._ROUTES:
            raise NotServed(404, f"there is nothing at {path[:200]}")
        allowed, route = self._ROUTES[path]
        if allowed != ("GET" if self.command == "HEAD" else self.command):
            said = f"{path} takes {allowed}, not {self.command}"
            raise NotServed(405, said, Allow=allowed)
        route(self)

    def _count_tokens(self) -> None:
        request = self._read_request(from_anthropic)
        self._send_json(200, token_count(self.server.state, request))

    _ROUTES: ClassVar[Mapping[str, tuple[str, Callable[[Handler], None]]]] = {
        "/": ("GET", lambda h: h._send_json(*health(h.server.state))),
        "/health": ("GET", lambda h: h._send_json(*health(h.server.state))),
        "/v1/status": ("GET", lambda h: h._send_json(200, status_body(h.server.state))),
        "/v1/models": ("GET", lambda h: h._send_json(200, models_body(h.server.state))),
        "/v1/models/*": ("GET", lambda h: h._send_json(200, model_body(h.server.state, h._id))),
        "/v1/chat/completions": ("POST", lambda h: h._generate(ChatRequest.from_chat)),
        "/v1/completions": ("POST", lambda h: h._generate(ChatRequest.from_completion)),
        "/v1/messages": ("POST", lambda h: h._generate(from_anthropic)),
        "/v1/messages/count_tokens": ("POST", _count_tokens),
    }

    def _generate(self, parse: Callable[..., ChatRequest]) -> None:
        request = self._read_request(parse)
        with closing(Answer(self.server.state, request)) as answer:
            bodies = answer.chunks() if request.stream else answer.whole()
            if request.stream:
                chunked = self.request_version != "HTTP/1.0"
                self.close_connection = self.close_connection or not chunked
                head = {"Content-Type": "text/event-stream; charset=utf-8"}
                head |= {"Transfer-Encoding": "chunked"} if chunked else {}
                self._begin(HTTPStatus.OK, head | {"Cache-Control": "no-cache"})
            for body in bodies:
                if body is None:  # nothing new
                    self._check_client()
                elif request.stream:
                    self._send_event(body)
                else:
                    self._send_json(200, body)
            if request.stream:
                if request.kind != "messages":
                    self._write_part(b"data: [DONE]\n\n")
                self._write_part(b"")

    def _read_request(self, parse: Callable[..., ChatRequest]) -> ChatRequest:
        body, request_id = parse_json_body(self._read_body()), uuid.uuid4().hex
        config, headers = self.server.state.config, dict(self.headers)
        return parse(body, config, request_id=request_id, headers=headers)

    def handle_expect_100(self) -> bool:
        """Do not invite a body that would be refused."""
        try:
            _declared_length(self.headers, self.server.state.config.max_body_bytes)
        except ServerError as error:
            self._send_error_body(error)
            return False
        return super().handle_expect_100()

    def _read_body(self) -> bytes:
        """The whole body. Raises ClientGone when it ends early."""
        limit = self.server.state.config.max_body_bytes
        length = _declared_length(self.headers, limit)
        raw = b"".join(_chunks(self.rfile, limit)) if length is None else self.rfile.read(length)
        if length is not None and len(raw) < length:
            raise ClientGone
        self._has_unread_body = False
        return raw

    def _check_client(self) -> None:
        """Raise ClientGone if the other end closed. A pipelined request is not a goodbye."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ClientGone

    def _send_json(self, status: int, body: object, **headers: str) -> None:
        payload = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        length = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        self._begin(status, length | headers)
        if self.command != "HEAD":
            self.wfile.write(payload)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._headers_sent = True
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _send_error_body(self, error: ServerError) -> None:
        """The error as a response, or, once the headers are out, as the stream's last event."""
        if self._has_unread_body or self._headers_sent:  # no request could follow on this
            self.close_connection = True
        body = anthropic_error(error) if self.path.startswith("/v1/messages") else error.body()
        try:
            if self._headers_sent:
                self._send_event(body)
                self._write_part(b"")
            else:
                self._send_json(error.status, body, **error.headers)
        except OSError:
            self.close_connection = True

    def _send_event(self, body: Body) -> None:
        """Anthropic's events have a name, which is their type."""
        name = f"event: {body['type']}\n" if "type" in body else ""
        self._write_part(f"{name}data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())

    def _write_part(self, payload: bytes) -> None:
        """One chunk, of which the empty one ends the body; HTTP/1.0 knows no chunks."""
        chunk = b"%x\r\n%s\r\n" % (len(payload), payload)
        self.wfile.write(payload if self.request_version == "HTTP/1.0" else chunk)

    @override
    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The stdlib's own refusals (bad request line, headers too long), in our error shape."""
        self.close_connection = True
        error = BadRequest(message or explain or "the request could not be understood")
        self._send_json(code, error.body())

    @override
    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.client_address[0], format % args)


# endregion

# region 20 PROXY ==============================================================
# LiteLLM beside the server: configured, started, watched, stopped.
# A program of its own, never imported, in an environment of its own: keys and databases of its
# user do not reach it. Its files are LOG_ROOT/litellm-PORT.json, .log, .pid. One whose server was
# killed is known by pid file, command line and parent, and replaced; others on the port are named.
#
# Doors   Proxy, proxy_settings, proxy_beside, is_open
# Knows   CONFIG, LOG
# Thread  proxy pump
# Budget  157
# ==============================================================================

_DAY: Final = 86_400  # seconds without a byte: a long prefill is no failure
_PROXY_ENVIRONMENT: Final = {
    "NO_PROXY": "*",
    "LITELLM_MODE": "PRODUCTION",  # or it reads the .env of the folder it is started in
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
}


def proxy_settings(config: Config, *, model_id: str, context_length: int) -> dict[str, Any]:
    """LiteLLM's configuration: every name is the one model, each route reaches us as it came."""
    host = f"[{config.mlx_host}]" if ":" in config.mlx_host else config.mlx_host
    base = f"http://{host}:{config.mlx_port}"
    # why(L-49): without the endpoints /v1/messages becomes /v1/responses; without supports_... the
    # thinking of a model it does not know is dropped. Only anthropic/ asks us to count tokens.
    about: dict[str, Any] = {"supported_endpoints": ["/v1/chat/completions", "/v1/messages"]}
    about |= {"supports_adaptive_thinking": True, "supports_legacy_thinking": True}
    about |= {"cache_control_ttl": True, "max_input_tokens": context_length}
    both = {"api_key": "none", "allowed_openai_params": ["user"]}
    own = {"model": f"openai/{model_id}", "api_base": f"{base}/v1", **both}
    claude = {"model": f"anthropic/{model_id}", "api_base": base, **both}
    routes = {config.proxy_model_id or model_id: own, "claude-*": claude}
    routes |= {} if config.strict_model_names else {"*": own}
    rows = [{"model_name": name, "litellm_params": to} for name, to in routes.items()]
    # The lack of a key, or one that LiteLLM thinks weak, is meant.
    lock: dict[str, Any] = {"dangerously_permit_weak_or_unset_master_key": True}
    lock |= {"master_key": config.proxy_api_key} if config.proxy_api_key else {}
    ping = {"sse_keepalive_ping_interval_seconds": config.keepalive_seconds}
    return {
        "model_list": [row | {"model_info": about} for row in rows],
        "general_settings": {"forward_client_headers_to_llm_api": True, **lock},
        "litellm_settings": {**ping, "request_timeout": _DAY, "drop_params": True},
        "router_settings": {"timeout": _DAY, "num_retries": 0, "disable_cooldowns": True},
    }


def is_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=0.5):
        return True
    return False


def _holder(port: int) -> str:
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # of another user
            if any(c.laddr and c.laddr.port == port for c in process.net_connections("tcp")):
                return f"{process.name()} (pid {process.pid})"
    return "a program of another user"


def _end_group(pid: int) -> None:
    """End the process that leads a group, then whatever is left of the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        with suppress(psutil.Error):
            psutil.Process(pid).wait(3)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A command that listens on `port` and has the path `files`.json among its arguments."""

    command: Sequence[str]
    files: Path  # without the ending: .json, .log and .pid
    settings: str  # goes into the first
    port: int
    told_every: float  # seconds between two lines about its start; 0 = none

    def keep_running(self, stop: threading.Event, *, delay: float = 1.0) -> None:
        """Start it again, ever later, till told to stop. Returns when nothing of it is left."""
        with suppress(OSError, ValueError, psutil.Error):
            pid, parent = map(int, Path(f"{self.files}.pid").read_text().split())
            stale = psutil.Process(pid)
            if f"{self.files}.json" in stale.cmdline():
                if stale.ppid() == parent:
                    log.error("no proxy: LiteLLM (pid %d) of another start-llm is there", pid)
                    return
                log.warning("ending LiteLLM (pid %d), left over from a server that is gone", pid)
                _end_group(pid)
        while not stop.is_set():
            if is_open(self.port):
                text = "no proxy: port %d is taken by %s; stop it or set PROXY_PORT and start again"
                log.error(text, self.port, _holder(self.port))
                return
            try:
                status: object = self._run(stop)
            except OSError as error:
                status = error
            if not stop.is_set():
                log.error("LiteLLM ended (%s): %s.log; again in %.0f s", status, self.files, delay)
                stop.wait(delay)
                delay = min(2 * delay, 60.0)

    def _run(self, stop: threading.Event) -> int | None:
        """One life of the command, told while it starts: its exit status. Raises OSError."""
        self.files.parent.mkdir(parents=True, exist_ok=True)
        settings, log_file, pid_file = (Path(f"{self.files}.{s}") for s in ("json", "log", "pid"))
        settings.unlink(missing_ok=True)  # it may have been readable for all
        for path in (settings, log_file):
            path.touch(mode=0o600)
        settings.write_text(self.settings)
        # A session of its own: Ctrl-C is for the server, which then ends its proxy.
        alone: dict[str, Any] = {"env": _PROXY_ENVIRONMENT, "start_new_session": True}
        with log_file.open("ab") as out:
            process = subprocess.Popen(self.command, stdout=out, stderr=out, **alone)
        try:
            pid_file.write_text(f"{process.pid} {os.getpid()}")
            began, due, is_up = time.monotonic(), self.told_every or math.inf, False
            while process.poll() is None and not stop.wait(0.2):
                seconds = time.monotonic() - began
                if not is_up and ((is_up := is_open(self.port)) or seconds >= due):
                    due += self.told_every
                    word = f"is up at http://127.0.0.1:{self.port}" if is_up else "is starting"
                    log.info("LiteLLM %s (%.0f s)", word, seconds)
            return process.poll()
        finally:
            _end_group(process.pid)
            pid_file.unlink(missing_ok=True)


@contextmanager
def proxy_beside(config: Config, *, model_id: str, context_length: int) -> Iterator[None]:
    """Inside, LiteLLM comes up and serves beside us; outside, nothing of it is left."""
    program, stop = Path(sys.executable).with_name("litellm"), threading.Event()
    files = Path(config.log_root).resolve() / f"litellm-{config.proxy_port}"
    command = [sys.executable, str(program), "--config", f"{files}.json"]
    command += ["--host", "127.0.0.1", "--port", str(config.proxy_port)]
    text = json.dumps(proxy_settings(config, model_id=model_id, context_length=context_length))
    proxy = Proxy(command, files, text, config.proxy_port, config.proxy_startup_wait_seconds)
    pump = threading.Thread(target=proxy.keep_running, args=(stop,), name="proxy pump")
    if not (config.enable_proxy and program.exists()):
        log.info("no proxy: ENABLE_PROXY is off, or LiteLLM is not installed")
        stop.set()
    pump.start()
    try:
        yield
    finally:
        stop.set()
        pump.join()


# endregion

# region 21 MAIN ===============================================================
# Build the state, listen, load, serve, stop.
# The server listens before the model is loaded: `/health` says 503 until it is. Loading happens on
# the model thread: arrays may not change threads before they are computed.
#
# Doors   build_state, main
# Knows   CONFIG, LOG, HEAL, LEDGER, SESSIONS, MODEL, ENGINE, ANSWER, HTTP, PROXY
# Thread  main
# Budget  115
# ==============================================================================

_FILES_WANTED = 4096
_USAGE = """Every setting is an environment variable or a line of .env; .env.example lists them all.
MODEL_PATH chooses the model: a folder, a Hugging Face repository, or "demo"."""


def build_state(config: Config) -> ServerState:
    """Everything that outlives a request, not yet started."""
    metrics, healing = CacheMetrics(), HealingStore()

    def load() -> LoadedModel:
        return load_model(resolve_model(config, memory_bytes=device_memory_bytes()), config)

    return ServerState(
        config=config,
        engine=Engine(config, metrics, load=load),
        metrics=metrics,
        HEALING_STORE=healing,
        LEDGER=Ledger(config, metrics, healing=healing),
        SESSION_INDEX=SessionIndex(config),
        SESSION_TURN_STORE=SessionTurnStore(),
        session_log=SessionLog(config),
        started=int(time.time()),
    )


def _listen(config: Config, state: ServerState) -> list[LLMServer]:
    """Bind every address; the second loopback may be missing. Raises ConfigError if taken."""
    slots, port = threading.BoundedSemaphore(config.max_connections), config.mlx_port
    servers: list[LLMServer] = []
    # `localhost` may mean either loopback, so a loopback host means both.
    is_loopback = config.mlx_host in ("127.0.0.1", "localhost", "::1")
    for host in ("127.0.0.1", "::1") if is_loopback else (config.mlx_host,):
        try:
            if is_open(port, host):  # on macOS a bind beside another's may succeed all the same
                raise OSError(errno.EADDRINUSE, "in use")
            servers.append(LLMServer((host, port), state, slots=slots))
        except OSError as error:
            if servers and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            for server in servers:
                server.server_close()
            why = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} on {host} is taken: start-llm runs already? Or set MLX_PORT"
            raise ConfigError(why) from error
    return servers


def _serve(state: ServerState, servers: list[LLMServer], *, stop: threading.Event) -> int:
    """Load, then serve until told to stop (0) or until the model thread dies (1)."""
    for server in servers:
        threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    state.engine.start()
    while not stop.is_set() and not state.engine.settled.wait(0.1):
        pass
    is_loaded = state.engine.state == "ready"
    if is_loaded:
        gc.collect()
        gc.freeze()  # why(L-36): what the libraries keep need not be searched at every turn
        sys.stderr.write(banner(state.engine.model, state.config) + "\n")
        (model,) = models_body(state)["data"]
        n_most = model["context_length"]
        with proxy_beside(state.config, model_id=model["id"], context_length=n_most):
            while not stop.is_set() and state.engine.state == "ready":
                stop.wait(0.5)
    trouble = state.engine.trouble if not stop.is_set() else None
    for server in servers:
        server.shutdown()
        server.server_close()
    state.engine.stop()
    if trouble:
        sys.stderr.write(f"start-llm: {trouble}\n")
        return 1 if is_loaded else 2
    return 0


def main() -> int:
    """Run the server; returns the exit status: 0 stopped, 1 the model died, 2 cannot start."""
    argparse.ArgumentParser(description=_USAGE).parse_args()
    written = dotenv_values(Path(__file__).resolve().parent / ".env")
    settings = {**written, **os.environ}
    # A connection is a file, and macOS starts programs with 256 of them.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_WANTED if hard == resource.RLIM_INFINITY else min(_FILES_WANTED, hard)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        config = Config.from_env(settings)
        start_logging(config)
        for name in Config.set_without_effect(settings):
            log.warning("%s is set, but nothing acts on it yet", name)
        state = build_state(config)
        servers = _listen(config, state)
    except ConfigError as error:
        sys.stderr.write(f"start-llm: {error}\n")
        return 2
    return _serve(state, servers, stop=stop)


# endregion

if __name__ == "__main__":
    raise SystemExit(main())
