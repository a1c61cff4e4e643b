"""One local LLM server for agents, in one file, built around never prefilling the same token twice.

THE REQUEST PATH  (rooms in the order a request meets them; a room may only name rooms above it)
    ground    01 CONFIG    every setting, read once, frozen
              02 ERRORS    what can go wrong, and the HTTP status of each
              03 LOG       console, session logs, counters
    words     04 WIRE      request JSON -> ChatRequest; the shapes we answer with
              05 MESSAGES  Anthropic Messages <-> the same ChatRequest and answers
              06 IMAGES    the bytes of images, and marks in the text where they stand
              07 HEAL      thinking that a client stripped, put back
              08 CANON     the second copy, volatile fields stilled: is this the same past?
              09 RENDER    messages -> the model's chat template -> tokens, nothing lost
              10 LEDGER    recorded pasts: replay their tokens, render only what is new
              11 KEY       chained block hashes, image marks: what a prefix is called
    memory    12 KV        the only room that knows what a KV layer looks like
              13 CACHE     lines, checkpoints, branches: the deepest exact prefix
              14 SESSIONS  what each conversation did last
    model     15 VISION    an image as tokens, positions and features
              16 MODEL     weights, tokenizer, where they come from
              17 ENGINE    the model thread: schedule, prefill, decode, give back
    voice     18 SPLIT     characters -> reasoning | content | tool call
              19 TOOLS     tool-call text -> OpenAI tool_calls, as it is generated
    street    20 ANSWER    the whole path on one page; what the server says of itself
              21 HTTP      stdlib http.server, SSE, one error boundary
              22 MAIN      build the state, listen, load, serve, LiteLLM beside it, stop

WORDS WE USE
    original    messages as the model must see them
    canonical   the same with volatile fields stilled: decides equality, never meets the model
    transcript  a recorded past: canonical messages -> the tokens fed and generated for them
    line        one growable KV state of one conversation tip (all layers), with its tokens
    branch      a line that keeps only what follows its parent's first `start` tokens
    checkpoint  the state of the layers that cannot be rewound, at one position of a line
    row         one request on the model; a line whose KV it holds is lent, and lookups still see it
    offset      physical KV depth in model tokens; only _kv_cache_offset() makes one
    cached      prompt tokens of this request whose KV was reused;  n_*  a count;  *_tokens  ids

WHAT NEVER HAPPENS
    1  KV is reused for a token other than the one that built it
    2  model tokens are sliced by anything but a KvOffset
    3  an aborted request advances a session; what it completely prefilled is kept, it is exact
    4  what an exception interrupted is reused;  5  a second thread touches MLX
    6  a byte that means something is dropped on the way to the model without a word

THREADS AND LOCKS
    model           the only one that touches MLX: loads, runs and frees the model (KV to ENGINE)
    connection      one each, of low priority: parse, render, wait for events, write
    accept          one per address;  main  waits;  locks are leaves, and none is held while waiting
"""

from __future__ import annotations

import argparse
import ast
import atexit
import binascii
import ctypes
import errno
import gc
import hmac
import inspect
import io
import json
import logging
import marshal
import math
import os
import queue
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from bisect import bisect_left
from calendar import day_abbr, day_name, month_abbr, month_name
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date, datetime
from functools import lru_cache, partial, reduce
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from itertools import accumulate, batched, chain, count, groupby, islice, product, takewhile
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Annotated, Any, Final, Literal, NamedTuple, NewType, NotRequired, TypedDict
from urllib.parse import parse_qsl, unquote

import mlx.core as mx
import mlx_lm
import numpy as np
import numpy.typing as npt
import prometheus_client as prometheus
import psutil  # type: ignore[import-untyped]
import regex  # type: ignore[import-untyped]
from dotenv import dotenv_values
from jinja2.utils import LRUCache
from mlx.nn import Module  # type: ignore[attr-defined]
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import GenerationBatch, StopSequences, wired_limit
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache, make_prompt_cache
from mlx_lm.sample_utils import apply_min_p, apply_top_p, make_logits_processors
from PIL import Image, ImageOps
from pydantic import AliasPath, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError, ValidationError, from_json
from rich.console import Console
from rich.filesize import decimal as in_bytes
from rich.logging import RichHandler
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerBase

# region 01 CONFIG =============================================================
# Every setting, read once, frozen. In capitals its name is the variable's; no default is elsewhere.
# Doors   Config, ConfigError, entries, is_loopback · Knows - · Thread any; pure · Budget 150

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]
_Interval = Annotated[float, Field(gt=0, le=1e8)]  # more is no timeout on macOS
_Share = Annotated[float, Field(ge=0, le=1)]
_Lower = BeforeValidator(str.lower)
_LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(str.upper)]
_RuleClass = Annotated[Literal["telemetry", "pinned", "transient", "off"], _Lower]


class ConfigError(ValueError):
    """Settings that cannot be used, one line each: variable, value, what is allowed."""


def entries(text: str) -> list[str]:
    """The parts of a comma-separated setting, none of them empty."""
    return [part for part in map(str.strip, text.split(",")) if part]


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach an address: 127.0.0.0/8, ::1, localhost."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


class Config(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Every setting of the server. Built by from_env(); tests pass fields by keyword."""

    model_path: str = ""  # Hugging Face repo or folder; empty: GLM-4.7-Flash on a Mac, else "demo"
    model_family: Annotated[Literal["auto", "qwen3", "glm4", "generic"], _Lower] = "auto"
    hf_token: str = Field(default="", repr=False)  # for gated repos; never logged
    trust_remote_code: bool = False  # run Python that comes with a model or tokenizer
    model_kind: Annotated[Literal["auto", "text", "vision"], _Lower] = "auto"  # which library loads
    strict_model_names: bool = False  # another `model` in a request: 404 instead of being served
    api_key: str = Field(default="", repr=False)  # keys, one of which each request needs
    mlx_host: str = "127.0.0.1"  # address to listen on; loopback means both 127.0.0.1 and ::1
    mlx_port: Annotated[int, Field(ge=1, le=65_535)] = 8080  # TCP port
    max_connections: Annotated[int, Field(ge=1, le=900)] = 256  # open sockets
    max_queued_requests: _Positive = 256  # requests waiting for the model
    max_body_bytes: _Positive = 67_108_864  # bytes of one request body (64 MiB)
    allow_remote_images: bool = False  # fetch http(s) image URLs, from public addresses only
    images_on_text_model: Annotated[Literal["refuse", "placeholder"], _Lower] = "refuse"
    keepalive_seconds: _Interval = 10.0  # between events of a stream that waits
    idle_connection_seconds: _Interval = 60.0  # a kept connection without a request is closed
    keep_awake: bool = False  # macOS: no sleep while a request runs
    shutdown_grace_seconds: _Seconds = 10.0  # for running replies, once told to stop
    exit_on_engine_death: bool = True  # so that a supervisor starts it anew
    allowed_hosts: str = ""  # names this machine is called by; loopback's own need no entry
    cache_isolation: Annotated[Literal["none", "key"], _Lower] = "none"  # key: a cache for each
    cors_origins: str = ""  # web pages that may ask, as in "https://chat.lan"; "*": every one
    enable_proxy: bool = True  # LiteLLM beside the server, where it is installed
    proxy_model_id: str = ""  # name shown through LiteLLM; empty: the model's own
    proxy_port: Annotated[int, Field(ge=1, le=65_535)] = 4000  # TCP port
    proxy_api_key: str = Field(default="", repr=False)  # that its clients need; empty: none
    proxy_host: str = "127.0.0.1"  # address LiteLLM listens on
    proxy_startup_wait_seconds: _Seconds = 2.0  # between two log lines while it starts; 0 = none
    max_kv_size: _Positive = 196_608  # tokens of prompt and reply; an admission limit
    prefill_step_size: _Positive = 2048  # tokens fed to the model at once
    batch_max_rows: _Positive = 32  # requests that run at once
    batch_padding_max: _Share = 0.25  # padding a batch may add, as a share of its real KV
    generation_watchdog_seconds: _Seconds = 600.0  # from when the model starts on it; 0 = none
    queue_timeout_seconds: _Seconds = 0.0  # of waiting for the model; 0 = as long as it takes
    memory_limit_bytes: _Count = 0  # model, KV and buffers; 0 = 0.9 of what the device recommends
    prompt_cache_max_bytes: _Count = 0  # bytes; 0 = a share of what the device recommends
    prompt_cache_max_entries_global: _Count = 24  # 0 = nothing is reused
    prompt_cache_max_entries_per_session: _Count = 2
    prompt_cache_ttl_seconds: _Seconds = 1800.0  # since last use; 0 = for ever
    prompt_cache_session_max_idle_seconds: _Seconds = 1800.0  # 0 = for ever
    prompt_cache_block_size: _Positive = 16  # tokens per hashed block
    cache_use_block_index: bool = True  # compare by block hashes, not token by token
    cache_canonicalize_tool_context: bool = True  # still volatile fields in the canonical copy
    ledger_max_bytes: _Count = 268_435_456  # bytes of recorded pasts (256 MiB)
    ledger_ttl_seconds: _Seconds = 86_400.0  # since last use; 0 = for ever
    rule_billing_header: _RuleClass = "telemetry"  # x-anthropic-billing-header: ...
    rule_message_id: _RuleClass = "pinned"  # "message_id": "..." in a system prompt
    rule_inbound_context: _RuleClass = "pinned"  # OpenClaw's section of the system prompt
    rule_timestamp: _RuleClass = "pinned"  # [Wed 2026-02-18 20:48 UTC] before a user's text
    rule_current_time: _RuleClass = "pinned"  # Current time is ...
    rule_current_date: _RuleClass = "pinned"  # Current date: ..., Today is ...
    rule_git_status: _RuleClass = "pinned"  # gitStatus: ... at the end of a system prompt
    rule_runtime: _RuleClass = "pinned"  # Stats: runtime ...
    rule_session_line: _RuleClass = "pinned"  # Runtime: agent=...
    rule_reminder: _RuleClass = "transient"  # <system-reminder>...</system-reminder>
    rule_internal_context: _RuleClass = "transient"  # OpenClaw's last message
    rule_operator_note: _RuleClass = "transient"  # what LiteLLM makes of a late system message
    rule_late_system: _RuleClass = "transient"  # system messages behind the first user message
    cache_vlm_image_identity: bool = True  # false: nothing from an image on is ever reused
    cache_norm_safety_check: bool = False  # complain when the canonical text shrank by 10 %
    normalize_write_tool_content_for_prompt: bool = False  # a digest instead of written content
    default_temperature: Annotated[float, Field(ge=0, le=2)] = 0.1  # 0 = greedy
    default_top_p: Annotated[float, Field(gt=0, le=1)] = 0.9  # 1 = off
    default_top_k: _Count = 40  # 0 = off
    default_min_p: _Share = 0.05  # 0 = off
    default_repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0  # more harms calls
    default_repetition_context_size: _Count = 256  # tokens the penalty looks back on
    default_max_tokens: _Positive = 2048  # tokens of one reply
    default_thinking: bool = True  # the model thinks before it answers
    preserve_thinking: bool = True  # past thinking stays in the prompt, where the template can
    log_level: _LogLevel = "INFO"
    enable_request_logging: bool = False  # session logs hold what clients sent
    log_prompt_tokens: bool = False  # session logs carry the exact ids that each prompt fed
    log_root: str = "logs"  # folder, as seen from start-llm.py
    log_keep_days: _Count = 14  # that session logs are kept; 0 = for ever
    vlm_cache_debug: bool = False  # log the first token ids of image prompts, and what is reused

    @field_validator("mlx_host", "cache_isolation", "proxy_host")
    @classmethod
    def _needs_a_key(cls, value: str, above: ValidationInfo) -> str:  # by the keys `above` alone
        keys = [above.data.get(name, "") for name in ("api_key", "proxy_api_key")]
        if not (value == "none" or is_loopback(value) or any(map(entries, keys))):
            raise PydanticCustomError("key", "should be used only where API_KEY is set")
        return value

    @classmethod
    def from_env(cls, env: Mapping[str, str | None]) -> Config:
        """Of variables by name, empty ones unset. Raises ConfigError, which names every bad one."""
        texts = {name: (env.get(name.upper()) or "").strip() for name in cls.model_fields}
        try:
            return cls.model_validate({name: text for name, text in texts.items() if text})
        except ValidationError as error:
            faults = [(str(f["loc"][0]), f["msg"].removeprefix("Input ")) for f in error.errors()]
        raise ConfigError("\n".join(f"{n.upper()}={texts[n]!r}: {want}" for n, want in faults))


# region 02 ERRORS =============================================================
# What can go wrong while answering: a table of status, type, code and headers by class.
# Doors   ServerError, BadRequest, ContextTooLong, NotServed, NotReady, Overloaded
# Doors   GenerationFailed, ClientGone · Knows - · Thread any; pure · Budget 70


class ServerError(Exception):
    """Becomes an OpenAI error object; `param`: the field at fault, as in "messages[3].content"."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = {}

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class BadRequest(ServerError):
    """The request cannot be honoured as it is; `at`: its param, which the text names first."""

    status, type = 400, "invalid_request_error"

    def __init__(self, why: str, *, at: str = "", param: str | None = None) -> None:
        super().__init__(f"{at}: {why}" if at else why)
        self.param = at or param


class ContextTooLong(BadRequest):
    """In OpenAI's wording: agents match "maximum context length is" and start to compact."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, limit: int) -> None:
        self.n_prompt, self.limit = n_prompt, limit
        sentence = f"This model's maximum context length is {limit} tokens. However, your messages "
        sentence += f"resulted in {n_prompt} tokens. Please reduce the length of the messages."
        super().__init__(sentence, param="messages")


class NotServed(BadRequest):
    """Key 401, host or web page 403, path or model 404, method 405, size 413, encoding 415."""

    def __init__(self, status: int, message: str, *, code: str = "", **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code or None, headers


class NotReady(ServerError):
    """The model is loading, or its thread is dead."""

    status, code, headers = 503, "model_not_ready", {"Retry-After": "5"}


class Overloaded(ServerError):
    """The queue is full. Not a 429, which clients take for a quota and hammer on."""

    status, code, headers = 503, "queue_full", {"Retry-After": "2"}


class GenerationFailed(ServerError):
    """The model failed on this request; the log has the traceback, the client does not."""

    code = "generation_failed"


class ClientGone(Exception):
    """The socket closed under us. Logged; nobody is left to answer."""


# region 03 LOG ================================================================
# Console, counters, session logs: one JSON object per line, a folder for each day. Only these hold
# what a client wrote, only while settings say so, and only their owner can read them.
# Doors   log, start_logging, request_line, show_progress, Facts, CacheMetrics, SessionLog
# Knows CONFIG · Owns _CACHE_METRICS_LOCK · Thread any · Budget 121

Facts = dict[str, Any]  # of a request, as the log, the page and Prometheus say them
log: Final = logging.getLogger("start-llm")
_CONSOLE: Final = Console(stderr=True)
_REQUEST_KEYS: Final = "id prompt cached match prefill decode out ttft_ms finish"  # tokens, s
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_HISTOGRAMS: Final = (
    ("ttft_seconds", "From the request to its first token", _SECONDS),
    ("prefill_seconds", "Of reading the prompt", _SECONDS),
    ("decode_seconds", "Of generating the reply", _SECONDS),
    ("cached_share", "Of the prompt's tokens", (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)),
)


def start_logging(config: Config) -> None:
    """Send the server's log to stderr at LOG_LEVEL. Called by MAIN; a second call adds nothing."""
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of what models write (L-94)
    log.setLevel(config.log_level)
    log.propagate = False  # a library that configures the root logger would print all twice
    handler: logging.Handler = RichHandler(console=_CONSOLE, show_path=False, log_time_format="%X")
    if not _CONSOLE.is_terminal:  # whole plain lines for a file, where rich would fold them at 80
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    log.handlers = log.handlers or [handler]


def request_line(**values: object) -> str:
    """`id=7f3a prompt=1200 ...`: always these keys first, in this order, "-" if unknown."""
    pairs = []
    for key, value in (dict.fromkeys(_REQUEST_KEYS.split()) | values).items():
        text = f"{value:.3f}" if isinstance(value, float) else str("" if value is None else value)
        # A session id, which a client chose, cannot break the line or reach the terminal.
        pairs.append(f"{key}={re.sub(r'[^!-<>-~]+', '_', text[:80]) or '-'}")
    return " ".join(pairs)


def show_progress(name: str, *, done: int, of: int) -> None:
    """On a terminal, in the last line, until something else is said there."""
    if _CONSOLE.is_terminal:
        text = f"{name} [{'#' * (40 * done // of):40}] {done:,} of {of:,} tokens" * (done < of)
        _CONSOLE.out(text.ljust(n := _CONSOLE.width - 1)[:n], end="\r", highlight=False)


class CacheMetrics:
    """Counters of what should be rare, shown even at zero, and what the requests took."""

    def __init__(self) -> None:
        self._CACHE_METRICS_LOCK = threading.Lock()
        self._registry = registry = prometheus.CollectorRegistry()
        name, what = "start_llm_requests", "Requests by what they reused and how they ended"
        self._ended = prometheus.Counter(name, what, ("match", "finish"), registry=registry)
        made = partial(prometheus.Histogram, namespace="start_llm", registry=registry)
        self._histograms = [made(key, what, buckets=limits) for key, what, limits in _HISTOGRAMS]
        names = "vlm_retreat hybrid_trim_miss exact_key_rejected_by_model_lcp ledger_seam_fallback "
        names += "telemetry_dropped evicted_for_room evicted_idle vlm_tower_runs vlm_feature_hits"
        self._counts = Counter(dict.fromkeys(names.split(), 0))

    def bump(self, name: str, by: int = 1) -> None:
        with self._CACHE_METRICS_LOCK:
            self._counts[name] += by

    def observe(self, facts: Facts) -> None:
        self._ended.labels(facts["match"], facts["finish"]).inc()
        if facts["finish"] not in ("cancelled", "failed") and facts["ttft_ms"]:  # they have none
            share = facts["cached"] / facts["prompt"]
            values = (facts["ttft_ms"] / 1000, facts["prefill"], facts["decode"], share)
            for histogram, value in zip(self._histograms, values, strict=True):
                histogram.observe(value)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        now = prometheus.CollectorRegistry()
        for name, n in self.snapshot().items():
            prometheus.Counter(f"start_llm_{name}", "Since the start", registry=now).inc(n)
        for name, value in gauges.items():
            prometheus.Gauge(f"start_llm_{name}", "Now", registry=now).set(value)
        return prometheus.generate_latest(self._registry) + prometheus.generate_latest(now)

    def snapshot(self) -> dict[str, int]:
        with self._CACHE_METRICS_LOCK:
            return dict(self._counts)


class SessionLog:
    """LOG_ROOT/<date>/cache-session-<id>.log: what a session sent and what the cache made of it."""

    def __init__(self, config: Config) -> None:
        self._config, self._complained = config, threading.Event()

    def write(self, session_id: str, record: dict[str, Any]) -> None:
        """Append `record` and the time as one line. Never raises: the first failure is logged."""
        now = datetime.now().astimezone()
        stamped = {"time": now.isoformat(timespec="milliseconds"), **record}
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", session_id)[:64]
        if not safe or safe != session_id:  # harmless in a file name; the digest tells them apart
            safe += f"-{sha256(session_id.encode('utf-8', 'replace')).hexdigest()[:12]}"
        root = Path(__file__).resolve().parent / os.path.expanduser(self._config.log_root)
        path = (folder := root / f"{now:%Y-%m-%d}") / f"cache-session-{safe}.log"
        try:
            line = json.dumps(stamped, ensure_ascii=False, default=str) + "\n"
            if not folder.exists():
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                self._prune(root, now.date())
            with open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                file.write(line.encode("utf-8", "replace"))  # one write: threads' lines never mix
        except (OSError, TypeError, ValueError, RecursionError) as error:
            if not self._complained.is_set():
                self._complained.set()
                log.warning("session log %s cannot be written: %s", path, error)

    def _prune(self, root: Path, today: date) -> None:
        for folder in root.glob("????-??-??"):
            with suppress(ValueError):
                if 0 < self._config.log_keep_days < (today - date.fromisoformat(folder.name)).days:
                    shutil.rmtree(folder)


# region 04 WIRE ===============================================================
# Request JSON -> ChatRequest; the shapes we answer with. pydantic checks types and ranges (strict:
# "1" is no number). Null means absent. Unknown fields pass; one that would change the answer and
# that we cannot honour is refused. Messages stay plain dicts, with one spelling for each thing.
# Doors   Body, Message, OriginalMessages, KvOffset, FinishReason, Usage, Ending, AnswerShape
# Doors   parse_json_body, given_fields, checked, without_nulls, Each, Name, Sampling, ToolChoice
# Doors   ChatRequest, SessionContext · Knows CONFIG, ERRORS · Thread any; pure · Budget 408

Body = dict[str, Any]
Message = dict[str, Any]
OriginalMessages = NewType("OriginalMessages", tuple[Message, ...])
KvOffset = NewType("KvOffset", int)
FinishReason = Literal["stop", "length", "tool_calls"]
Name = Annotated[str, Field(min_length=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=1024)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_BiasKey = Annotated[_Token, Field(strict=False)]  # JSON's keys are text
_TextPart = TypedDict("_TextPart", {"type": Literal["text"], "text": str})  # noqa: UP013
_Thought = TypedDict("_Thought", {"type": Literal["thinking"], "thinking": str})  # noqa: UP013
_BUDGET: Final = AliasPath("thinking", "budget_tokens")
type Each[T] = Annotated[list[T], Field(fail_fast=True)]  # a million faults cost no more than one
# A step to a fault, and not the name that pydantic gives the branch of a union.
_is_step: Final = re.compile(r"\d+|(?!(str|int|bool)$)[a-z][a-z_]*").fullmatch
_THINKING_NAMES: Final = ("enable_thinking", "thinking", "reasoning_effort", "reasoning")
_OBJECTS: Final = ("metadata", "chat_template_kwargs", "thinking", "reasoning")
_THINKING_PARTS: Final = ("", ".enabled", ".effort", ".level", ".type")
_THINKING_LEVELS: Final[Mapping[str, str]] = {  # off, on, or how hard
    **dict.fromkeys(("off", "none", "disabled", "false"), "off"),
    **dict.fromkeys(("on", "enabled", "adaptive", "between_tools", "auto", "true"), "on"),
    **dict.fromkeys(("minimal", "low"), "low"),
    "medium": "medium",
    **dict.fromkeys(("high", "xhigh", "max"), "high"),
}
_NO_SWITCHES: Final = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
_SESSION_PLACES: Final = (  # ids of a conversation, of a client's process, of a cache, of a user
    "session_id conversation_id thread_id chat_id metadata.session_id metadata.conversation_id "
    "metadata.thread_id metadata.chat_id metadata.user_id x-claude-code-session-id x-session-id "
    "thread-id session-id prompt_cache_key user"
)


def parse_json_body(raw: bytes) -> object:
    """The JSON value in `raw`; lone surrogates (JS cuts emoji in half) become U+FFFD."""
    with suppress(ValueError):
        return from_json(raw, allow_inf_nan=False)
    try:  # a lone surrogate is a fault above but not here
        text = json.dumps(json.loads(raw.decode()), ensure_ascii=False)
        return from_json(re.sub(r"[\ud800-\udfff]", "\ufffd", text), allow_inf_nan=False)
    except (ValueError, RecursionError) as fault:
        raise BadRequest(f"the body is not valid JSON: {fault}") from None


class Sampling(BaseModel, frozen=True, strict=True):
    """How the next token is chosen. The bare defaults are greedy with everything else off."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0  # 0 = greedy
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1 = off
    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 or -1 = off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0  # 0 = off
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0  # 1 = off
    repetition_context_size: Annotated[int, Field(ge=0)] = 256  # tokens
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Mapping[_BiasKey, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # None: another every time


class _ImagePart(TypedDict):
    type: Literal["image_url", "input_image"]
    image_url: str | Body  # or an object with a `url`
    at: NotRequired[str]  # its path in the request; ours


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
    content: NotRequired[str | Each[_TextPart | _Thought | _ImagePart] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[Each[_Tool] | None]
    tool_call_id: NotRequired[str | None]


class _ChatBody(BaseModel, strict=True, extra="allow"):  # but for the fields of Sampling
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool | None] = {}
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = []
    messages: Annotated[Each[_WireMessage], Field(min_length=1)]
    tools: Each[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _Tool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: Body = {}
    response_format: Body = {}
    thinking_budget: Annotated[int | None, Field(ge=0, validation_alias=_BUDGET)] = None
    n: Literal[1] = 1  # from here on: what we cannot do, with the values that do not ask for it
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    audio: None = None
    modalities: Each[Literal["text"]] = []
    functions: Annotated[list[Body], Field(max_length=0)] = []  # the forerunner of tools
    function_call: Literal["none", "auto"] = "none"


class _CompletionBody(BaseModel, strict=True):
    prompt: Name | Annotated[tuple[_Token, ...], Field(min_length=1, fail_fast=True, strict=False)]
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
        faults = [([s for s in f["loc"] if _is_step(str(s))], f["msg"]) for f in error.errors()]
    first = faults[0][0]
    deepest = max((path for path, _ in faults if path[: len(first)] == first), key=len)
    wants = [want.removeprefix("Input ") for path, want in faults if path == deepest]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in deepest)[1:]
    raise BadRequest(" or ".join(wants), at=param)  # several: a union's branches


def _by_path(fields: Body, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each field by its path, as in "metadata.user_id"."""
    for name, value in fields.items():
        yield above + name, value
        if name in _OBJECTS and isinstance(value, dict):
            yield from _by_path(value, f"{above}{name}.")


def _thinking(said: Body, switches: Body, *, default: bool) -> Body:
    """Whether to think, and template switches. The first spelling that says anything wins."""
    for name in switches.keys() & ({"messages", *_NO_SWITCHES} - {"documents"}):
        raise BadRequest("this is not a request's to set", at=f"chat_template_kwargs.{name}")
    levels, places = [], map("".join, product(("", "metadata."), _THINKING_NAMES, _THINKING_PARTS))
    for at in (*map("chat_template_kwargs.".__add__, ("enable_thinking", "thinking")), *places):
        if (value := said.get(at)) is None or (isinstance(value, dict) and at.endswith(_OBJECTS)):
            continue
        if (level := _THINKING_LEVELS.get(str(value).lower())) is None:
            raise BadRequest(f"{value!r:.60} is none of {', '.join(_THINKING_LEVELS)}", at=at)
        levels.append(level)
    thinks = levels[0] != "off" if levels else default
    effort = next((level for level in levels if thinks and level not in ("off", "on")), None)
    switches = {"reasoning_effort": effort, **without_nulls(switches), "enable_thinking": None}
    return {"thinking": thinks, "template_kwargs": without_nulls(switches)}


class SessionContext(NamedTuple):
    """The conversation a request says it belongs to."""

    session_id: str | None = None
    parent: str | None = None  # of a sub-agent: the conversation that started it


def _session(said: Body, headers: Mapping[str, str]) -> SessionContext:
    places: Body = {**{name.lower(): value for name, value in headers.items()}, **said}
    claude = re.search(r'"session_id"\s*:\s*"([^"]+)"', str(places.get("metadata.user_id")))
    places["metadata.user_id"] = claude and claude[1]
    ids = {name: str(v)[:256] for name, v in places.items() if v and type(v) in (str, int)}
    session_id = next(filter(None, map(ids.get, _SESSION_PLACES.split())), None)
    parent = ids.get("x-parent-session-id") or ids.get("x-codex-parent-thread-id")
    if agent := ids.get("x-claude-code-agent-id"):  # shares its parent's session id
        session_id, parent = f"{session_id}/{agent}", session_id
    return SessionContext(session_id, parent)


def _schema(form: Body) -> Body | None:
    """The JSON schema that a `response_format` binds the answer to; None for text."""
    match {"type": "text", "json_schema": form, **form}:  # Anthropic's has no object around it
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    raise BadRequest("should have a JSON schema", at="response_format")


def _message(index: int, wire: _WireMessage) -> Message:
    """One message without nulls and empty lists, thinking under one name, content always there."""
    message: Message = {k: v for k, v in wire.items() if v is not None and v != []}
    role, content, thoughts = message["role"], message.get("content"), None
    if isinstance(content, list):
        thoughts = "".join(p["thinking"] for p in content if p["type"] == "thinking") or None
        message["content"] = [part for part in content if part["type"] != "thinking"]
    needs_text = role not in ("assistant", "tool")
    if (thoughts and role != "assistant") or (needs_text and "content" not in message):
        wrong = f"a {role} message needs text, and no thinking"
        raise BadRequest(wrong, at=f"messages[{index}].content")
    thoughts = message.pop("reasoning_content", message.pop("reasoning", thoughts))
    return without_nulls({"content": "", **message, "reasoning_content": thoughts})


def _in_order(messages: Iterable[Message]) -> Iterator[Message]:
    """Results in their calls' order (L-70): clients send them as they end, templates drop ids."""
    places: dict[str | None, int] = {}
    for _, run in groupby(messages, key=lambda m: m["role"] in ("tool", "system", "developer")):
        some = sorted(run, key=lambda m: places.get(m.get("tool_call_id"), len(places)))
        ids = [call.get("id") for message in some for call in message.get("tool_calls", ())]
        places = ({i: n for n, i in enumerate(ids)} or places) if len({*ids}) == len(ids) else {}
        yield from some


def _tools(asked: _ChatBody) -> Body:
    wanted, offered = asked.tool_choice, {tool["function"]["name"] for tool in asked.tools}
    mode = wanted if isinstance(wanted, str) else "named"
    name = None if isinstance(wanted, str) else wanted["function"]["name"]
    if name not in {None, *offered} or (mode == "required" and not offered):
        raise BadRequest(f"{wanted!r:.80} is not among the tools", at="tool_choice")
    tools: tuple[list[Body], list[Body]] = [], []
    for tool in asked.tools:
        # Only what describes the function: templates print a tool whole, with any cache_control.
        function = {"type": "function", "function": without_nulls(tool["function"])}
        tools[bool(tool.get("defer_loading"))].append(function)
    choice = ToolChoice(mode if offered else "none", name)
    return {"tools": tuple(tools[0]), "deferred": tuple(tools[1]), "tool_choice": choice}


class ToolChoice(NamedTuple):
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
    messages: OriginalMessages  # of a chat; content: a str or parts, text and images
    image_ids: Mapping[str, Any] = field(default_factory=dict)  # by digest: text, tokens
    prompt: str | tuple[int, ...] | None = None  # of a completion; ids may exceed the vocabulary
    tools: tuple[Body, ...]
    deferred: tuple[Body, ...]  # tools that can be called, but are not in the prompt's head
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    logprobs: bool
    top_logprobs: int  # alternatives per token
    thinking: bool
    thinking_budget: int | None  # tokens
    schema: Body | None  # JSON schema of the answer
    template_kwargs: Mapping[str, Any]  # never enable_thinking

    @classmethod
    def from_chat(
        cls, body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
    ) -> ChatRequest:
        """POST /v1/chat/completions. Raises BadRequest whose `param` is the path of the field."""
        given = given_fields(body)
        asked = checked(_ChatBody, given)
        if asked.top_logprobs and not asked.logprobs:
            raise BadRequest("it needs logprobs to be true", at="top_logprobs")
        defaults = {n: getattr(config, f"default_{n}", None) for n in Sampling.model_fields}
        said = dict(_by_path(given))
        same = {"model", "stream", "parallel_tool_calls", "logprobs", "top_logprobs"}
        return cls(
            kind="chat",
            request_id=request_id,
            **_thinking(said, asked.chat_template_kwargs, default=config.default_thinking),
            session=_session(said, headers),
            sampling=checked(Sampling, without_nulls(defaults) | given),
            max_tokens=asked.max_completion_tokens or asked.max_tokens or config.default_max_tokens,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
            include_usage=bool(asked.stream_options.get("include_usage")),
            messages=OriginalMessages((*_in_order(map(_message, count(), asked.messages)),)),
            thinking_budget=asked.thinking_budget,
            schema=_schema(asked.response_format),
            **_tools(asked),
            **asked.model_dump(include=same),
        )

    @classmethod
    def from_completion(cls, body: object, config: Config, **how: Any) -> ChatRequest:
        """POST /v1/completions: one prompt, as text, as token ids or as a list of one of these."""
        given = given_fields(body)
        match given.get("prompt"):
            case [str() | list() as only]:
                given["prompt"] = only
            case [str() | list(), *_]:
                raise BadRequest("only one per request", at="prompt")
        prompt = checked(_CompletionBody, given).prompt
        unheard = ("tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "thinking")
        chat = dict.fromkeys((*unheard, "chat_template_kwargs", "extra_body"))
        chat |= {"messages": [{"role": "user", "content": ""}], "enable_thinking": False}
        request = cls.from_chat(given | chat, config, **how)
        return replace(request, kind="completion", prompt=prompt, messages=OriginalMessages(()))


class Usage(NamedTuple):
    """Tokens: of the prompt, those of it whose KV was reused, of the reply, of its thinking."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    def body(self) -> Body:
        body: Body = {"prompt_tokens": self.prompt, "completion_tokens": self.completion}
        body["total_tokens"] = self.prompt + self.completion
        body["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return {**body, "completion_tokens_details": {"reasoning_tokens": self.reasoning}}


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
        return [self._body("delta", delta, logprobs=logprobs)]

    def end(self, ending: Ending) -> list[Body]:
        last = self._body("delta", {}, finish_reason=ending.finish, logprobs=ending.logprobs)
        usage = {**last, "choices": [], "usage": ending.usage.body()}
        return [last, usage] if self.include_usage else [last]

    def whole(self, message: Body, ending: Ending) -> Body:
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


# region 05 MESSAGES ===========================================================
# Anthropic Messages <-> the same ChatRequest and answer. A body is checked as Anthropic's and said
# again as a chat: prompt and cache are the same by either API. What only Anthropic's machines
# understand is passed over. A tool with `defer_loading` is no part of the prompt's head: its
# definition stands where a `tool_reference` names it, and what was said before stays (L-48).
# Doors   any_request, from_anthropic, AnthropicEvents, anthropic_error, thought_id
# Knows CONFIG, ERRORS, WIRE · Thread any; pure · Budget 224

# Anthropic runs all but "custom" itself; a model that is not made to call one does without.
_KINDS: Final = "^(custom$|web_search_|web_fetch_|code_execution_|tool_search_|mcp_|advisor_)"


class _MessagesMessage(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | Each[Body]


class _MessagesTool(TypedDict):
    name: Name
    description: NotRequired[str | None]
    type: NotRequired[Annotated[str, Field(pattern=_KINDS)] | None]
    input_schema: NotRequired[Body]
    defer_loading: NotRequired[bool | None]


class _MessagesBody(BaseModel, strict=True, extra="allow"):  # what a chat says otherwise
    messages: Annotated[Each[_MessagesMessage], Field(min_length=1)]
    system: str | Each[Body] = []
    tools: Each[_MessagesTool] = []
    tool_choice: Body = {}
    stop_sequences: Annotated[Each[Name], Field(max_length=16)] = []
    output_config: Body = {}
    mcp_servers: Annotated[list[Body], Field(max_length=0)] = []


def any_request(body: object, config: Config, **how: Any) -> ChatRequest:
    """A request of any of the three APIs, known by the fields that it alone has."""
    match given_fields(body):
        case {"prompt": _}:
            return ChatRequest.from_completion(body, config, **how)
        case {"system": _} | {"tools": [{"name": _}, *_]} | {"stop_sequences": _}:
            return from_anthropic(body, config, **how)
    return ChatRequest.from_chat(body, config, **how)


def from_anthropic(body: object, config: Config, **how: Any) -> ChatRequest:
    """POST /v1/messages. Raises BadRequest whose `param` is the path of the field."""
    given = given_fields(body)
    asked = checked(_MessagesBody, given)
    tools = dict(_chat_tools(asked.tools))
    messages = _said("system", asked.system, tools=tools, param="system") if asked.system else []
    for i, m in enumerate(asked.messages):
        messages += _said(m["role"], m["content"], tools=tools, param=f"messages[{i}].content")
    kind, output = (choice := asked.tool_choice).get("type", "auto"), asked.output_config
    kinds = {"any": "required", "tool": {"function": {"name": choice.get("name")}}}
    chat: Body = {"thinking": {"type": "disabled"}, **given}  # unless the request says otherwise
    chat |= {"messages": messages, "tools": list(tools.values()), "stop": asked.stop_sequences}
    chat |= {"tool_choice": kinds.get(str(kind), kind), "reasoning_effort": output.get("effort")}
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    chat["response_format"] = output.get("format", given.get("output_format"))
    return replace(ChatRequest.from_chat(chat, config, **how), kind="messages")


def _chat_tools(tools: list[_MessagesTool]) -> Iterator[tuple[str, Body]]:
    # Anthropic's own search never runs here: what it would find has to be there already.
    is_searched = any((tool.get("type") or "").startswith("tool_search_") for tool in tools)
    for tool in tools:
        if (tool.get("type") or "custom") == "custom":
            known = {"name": tool["name"], "description": tool.get("description")}
            function = without_nulls({**known, "parameters": tool.get("input_schema")})
            is_late = bool(tool.get("defer_loading")) and not is_searched
            yield tool["name"], {"function": function, "defer_loading": is_late}


def _said(role: str, content: Any, *, tools: Mapping[str, Body], param: str) -> list[Message]:
    """As chat messages: each tool result is one of its own, and a reply's texts are one again."""
    turns: list[Message] = [{"role": role, "content": []}]
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for index, block in enumerate(blocks):
        here, turn = f"{param}[{index}]", turns[-1]
        match role, block:
            case "assistant", {"type": "thinking", "thinking": str() as thought}:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
                turn["thought_id"] = str(block.get("signature", ""))  # of what may be left out
            case "assistant", {"type": "redacted_thinking"}:
                pass  # another machine's, which nobody can read
            case "assistant", {"type": "tool_use", "name": name, "input": arguments}:
                call = {"id": block.get("id"), "function": {"name": name, "arguments": arguments}}
                turn.setdefault("tool_calls", []).append(call)
            case "user", {"type": "tool_result"}:  # a chat has no field for is_error
                found = without_nulls(block).get("content", "")
                (result,) = _said("tool", found, tools=tools, param=f"{here}.content")
                if block.get("is_error") and "error" not in str(result["content"]).lower():
                    result["content"].insert(0, {"type": "text", "text": "Error:"})
                result["tool_call_id"] = block.get("tool_use_id")
                turns += [result, {"role": role, "content": []}]
            case "user" | "tool", {"type": "image", "source": dict() as source}:
                turn["content"].append(_image(source, at=here))
            case _:
                turn["content"].append({"type": "text", "text": _text(block, tools, param=here)})
    if role == "assistant":
        reply = turns[0] | {"content": "".join(part["text"] for part in turns[0]["content"])}
        return [{name: value for name, value in reply.items() if value}]
    turns = [turn for turn in turns if turn["content"] or turn["role"] == "tool"]
    return turns or [{"role": role, "content": ""}]


def _text(block: Body, tools: Mapping[str, Body], *, param: str) -> str:
    match block:
        case {"type": "text", "text": str() as text}:
            return text
        case {"type": "tool_reference", "tool_name": str() as name}:
            function = tools[name]["function"] if name in tools else {"name": name}
            return f"<tool>\n{json.dumps(function, ensure_ascii=False)}\n</tool>"
        case {"type": "document", "source": {"type": "text", "data": str() as text}}:
            return text
        case {"type": "document", "source": {"type": "base64" | "url" | "file"}}:
            return "[a document that cannot be read here: extract its text with a tool]"
    raise BadRequest(f"{json.dumps(block):.80} cannot be read here", at=param)


def _image(source: Body, *, at: str) -> Body:
    said = {"base64": f"data:;base64,{source.get('data')}", "url": source.get("url")}
    if not isinstance(url := said.get(str(source.get("type"))), str):
        raise BadRequest("should be base64 or a url", at=f"{at}.source")
    return {"type": "image_url", "image_url": url, "at": at}


def thought_id(thought: str) -> str:
    """What stands as a thinking block's signature, and finds the thinking if it is left out."""
    return f"start-llm-{sha256(thought.encode()).hexdigest()[:32]}"


class AnthropicEvents:
    """One answer as Anthropic says it; `whole` gives the message that the events build."""

    def __init__(self, request_id: str, model: str) -> None:
        self._head: Body = {"id": f"msg_{request_id}", "type": "message", "role": "assistant"}
        self._head |= {"model": model, "stop_reason": None, "stop_sequence": None}
        self._blocks: list[Body] = []  # those that have ended
        self._open: Body = {}  # the one that has not, as it began
        self._said = ""  # in that one: text, or a call's arguments in JSON

    def begin(self, usage: Usage) -> list[Body]:
        return [{"type": "message_start", "message": self._message(usage)}]

    def ping(self) -> Body:
        return {"type": "ping"}

    def say(self, delta: Body, _logprobs: Body | None = None) -> list[Body]:
        """The events of a chat's delta; what is of another kind opens another block."""
        match delta:
            case {"tool_calls": [{"function": function, **call}]}:
                said, named = function["arguments"], {"name": function.get("name")}
                block = {"type": "tool_use", "id": call.get("id"), **named, "input": {}}
                told = {"type": "input_json_delta", "partial_json": said}
            case {"reasoning_content": said}:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                told = {"type": "thinking_delta", "thinking": said}
            case {"content": said}:
                block, told = {"type": "text", "text": ""}, {"type": "text_delta", "text": said}
        events: list[Body] = []
        if block["type"] != self._open.get("type") or block.get("name"):
            events = [*self._end_block(), self._event("start", content_block={**block})]
            self._open = block
        self._said += said
        return [*events, self._event("delta", delta=told)] if said else events

    def _event(self, kind: str, **more: Body) -> Body:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **more}

    def _end_block(self) -> Iterator[Body]:
        if block := self._open:
            if block["type"] == "tool_use":
                with suppress(BadRequest):  # what no reader of JSON takes
                    block["input"] = parse_json_body((self._said or "{}").encode(errors="replace"))
            else:
                block[block["type"]] = self._said
            if block["type"] == "thinking":
                name = block["signature"] = thought_id(self._said)
                yield self._event("delta", delta={"type": "signature_delta", "signature": name})
            yield self._event("stop")
            self._blocks.append(block)
            self._open, self._said = {}, ""

    def end(self, ending: Ending) -> list[Body]:
        events, message = [*self._end_block()], self.whole({}, ending)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        closing = {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        return [*events, closing, {"type": "message_stop"}]

    def whole(self, _message: Body, ending: Ending) -> Body:
        """The chat's message has been said already, in the order in which it was generated."""
        list(self._end_block())
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        reason = "stop_sequence" if ending.stop else reasons[ending.finish]
        return self._message(ending.usage, stop_reason=reason, stop_sequence=ending.stop)

    def _message(self, usage: Usage, **stops: str | None) -> Body:
        new = usage.prompt - usage.cached  # all is kept but the token that decoding begins with
        tokens = {"input_tokens": min(new, 1), "cache_creation_input_tokens": max(new - 1, 0)}
        tokens |= {"cache_read_input_tokens": usage.cached, "output_tokens": usage.completion}
        return {**self._head, "content": [*self._blocks], **stops, "usage": tokens}


def anthropic_error(error: ServerError) -> Body:
    """The error in Anthropic's shape; the words of a prompt too long are those agents look for."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kinds |= {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}
    kind, message = kinds.get(error.status, error.type), str(error)
    if isinstance(error, ContextTooLong):
        message = f"prompt is too long: {error.n_prompt} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


# region 06 IMAGES =============================================================
# Images of a request -> their bytes, with a mark in their place.
# A mark is a digest of the image between two noncharacters, a word like any other to CANON, the
# ledger and the chat template. Only where tokens are made, the model's own stand for it.
# Doors Picture, pictured · Knows CONFIG, ERRORS, WIRE · Thread connection · Budget 71

MAX_PIXELS: Final = 64_000_000  # of one image; a file of a few kB can hold more than memory does


class Picture(NamedTuple):
    """An image as it was sent."""

    data: bytes
    at: str  # the path of its part in the request

    def opened(self) -> Image.Image:
        """RGB pixels, upright; of a GIF the first frame. Raises BadRequest."""
        try:
            image = Image.open(io.BytesIO(self.data), formats=("PNG", "JPEG", "WEBP", "GIF"))
            if (n_pixels := math.prod(image.size)) <= MAX_PIXELS:
                upright = ImageOps.exif_transpose(image).convert("RGBA")
                white = Image.new("RGBA", upright.size, "white")  # behind what is transparent
                return Image.alpha_composite(white, upright).convert("RGB")
        except Exception as fault:  # Pillow's plugins raise what they like
            raise BadRequest("is no PNG, JPEG, WEBP, GIF that can be read", at=self.at) from fault
        raise BadRequest(f"has {n_pixels:,} pixels, more than {MAX_PIXELS:,}", at=self.at)


def pictured(
    request: ChatRequest, config: Config, *, sees: bool, salt: bytes
) -> tuple[ChatRequest, dict[str, Picture]]:
    """The request with marks for its images, and the images by digest. Raises BadRequest."""
    # `sees`: the model does; else a line of text may stand there. `salt`: whose images these are.
    pictures: dict[str, Picture] = {}

    def as_text(part: Body, at: str) -> Body:
        if part["type"] == "text":
            return part
        part = {"at": at, **part}
        if not sees and config.images_on_text_model == "refuse":
            raise BadRequest("this model reads only text (see IMAGES_ON_TEXT_MODEL)", at=part["at"])
        data = _data(part, config) if sees else repr(part["image_url"]).encode()
        digest = sha256(salt + data).hexdigest()
        cannot = f"[an image, sha256 {digest[:12]}, that this model cannot see: it only reads text]"
        if sees:
            pictures.setdefault(digest, Picture(data, part["at"]))
        return {"type": "text", "text": f"\ufdd1{digest}\ufdd2" if sees else cannot}

    def shown(index: int, message: Message) -> Message:
        where, content = f"messages[{index}].content", message["content"]
        parts = enumerate(content) if isinstance(content, list) else ()
        return message | {"content": [as_text(p, f"{where}[{i}]") for i, p in parts] or content}

    messages = OriginalMessages(tuple(map(shown, count(), request.messages)))
    return replace(request, messages=messages), pictures


def _data(part: Body, config: Config) -> bytes:
    url = part["image_url"] if isinstance(part["image_url"], str) else part["image_url"].get("url")
    scheme, _, rest = str(url).partition(":")
    why = "should be a data: URL in base64" + ", or http(s)" * config.allow_remote_images
    with suppress(ValueError):
        if scheme == "data" and "," in rest:
            return binascii.a2b_base64(unquote(rest.partition(",")[2]) + "==")
    if scheme in ("http", "https") and config.allow_remote_images:
        command = [sys.executable, str(Path(__file__).resolve().parent / "scripts/fetch_image.py")]
        done = subprocess.run(command, input=str(url).encode(), capture_output=True, check=False)
        if not done.returncode:
            return bytes(done.stdout)
        why = f"cannot be fetched: {done.stderr.decode()[:200].strip()}"
    raise BadRequest(why, at=part["at"])


# region 07 HEAL ===============================================================
# Put back the thinking that a client stripped from a reply which the ledger does not cover, found
# by what clients keep: a signature, or what was said to what. What they think themselves stays.
# Doors   HealingStore, _heal_messages, reply_digest, canonical_json
# Knows WIRE, MESSAGES · Thread any · Budget 65


def canonical_json(arguments: object) -> str:
    """Tool arguments as text without what clients change (JavaScript writes 2.0 as 2, in order)."""
    bare = partial(re.sub, r"(?m)\A(?:cd \S+ && )+|(?<![ \t])[ \t]++$", "")  # as Claude Code (L-81)

    def named(pairs: list[tuple[str, Any]]) -> Body:
        said = [(k, v) for k, v in pairs if v is not None and v is not False]
        return {k: v if isinstance(v, dict | list) else bare(str(v)) for k, v in said}

    how: Body = {"object_pairs_hook": named, "parse_int": lambda n: int(float(n))}
    how["parse_float"] = lambda n: int(f) if (f := float(n)).is_integer() else f
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return json.dumps(json.loads(text or "{}", **how) or {}, sort_keys=True)
    except (ValueError, OverflowError, RecursionError):
        return str(arguments)


def reply_digest(message: Message) -> bytes:
    """What names a reply: its content and its calls. Not its thinking, and no call's id."""
    name = sha256(message["content"].rstrip().encode())  # opencode trims (L-92)
    for function in (call["function"] for call in message.get("tool_calls", ())):
        name.update(f"\0{function['name']}\0{canonical_json(function.get('arguments'))}".encode())
    return name.digest()


class HealingStore:
    """Thinking by thought_id() and by what was said to what (L-76); the least used goes first."""

    CAP: Final = 4000  # names, two of each reply

    def __init__(self) -> None:
        self._thoughts, self._named = LRUCache(self.CAP), LRUCache(self.CAP)  # guard themselves

    def remember(self, reply: Message, answered: Iterable[bytes]) -> None:
        if words := reply.get("reasoning_content"):
            self._named[thought_id(words)] = words
            for name in answered:
                self._thoughts[name, reply_digest(reply)] = words

    def thought_of(self, reply: Message, answered: Iterable[bytes]) -> str:
        """The thinking that led to this reply; "" if none is known. The best name goes first."""
        words = (self._thoughts.get((name, reply_digest(reply))) for name in answered)
        return str(self._named.get(str(reply.get("thought_id"))) or next(filter(None, words), ""))

    def __len__(self) -> int:
        return len(self._thoughts)


def _heal_messages(
    messages: Iterable[Message], store: HealingStore, *, answered: Iterable[Iterable[bytes]]
) -> Iterator[Message]:
    """The same messages, replies with their thinking again. `answered`: what stands before each."""
    for message, before in zip(messages, answered, strict=False):
        is_bare = message["role"] == "assistant" and not message.get("reasoning_content")
        thought = store.thought_of(message, before) if is_bare and len(store) else ""
        yield {**message, "reasoning_content": thought} if thought else message


# region 08 CANON ==============================================================
# The second copy of a conversation, its volatile fields stilled: it says whether this past is the
# same past, and never what the model reads (L-37). Each rule finds one field in some roles' texts:
#   telemetry   means nothing to the model: dropped, and counted
#   pinned      stays as it was first rendered; a value that differs is restated once, at the end
#   transient   comes and goes at the end of a conversation: told when it changed
# Inside code fences and tool results the same words are somebody's data. `value` is what varies.
# Messages of only these, and late system ones, become notes of their neighbour that is no reply.
# Doors   Canon, Turn, Memo, SYSTEM_ROLES, replaced, reminder, stilling, _canonicalize_messages
# Knows CONFIG, WIRE, HEAL · Thread any; pure · Budget 247


class Rule(NamedTuple):  # one volatile field
    name: str  # its setting is RULE_<NAME>
    roles: frozenset[str]
    pattern: re.Pattern[str]
    kind: str = "off"  # as configured


SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_USER: Final = frozenset({"user"})
_BOTH: Final = SYSTEM_ROLES | _USER
_SYSTEMS: Final = frozenset({"late_system", "operator_note"})  # rules of notes by the system
_STAMP: Final = r"[FMSTW][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?(?: [\w:+/-]+)?"
_ROUTED: Final = r"\[Inter-session message\] sourceSession=[^\n]*\n[^\n]*\n"
_INBOUND: Final = (
    r"^(?:## Group Chat Context\n)?## Inbound Context[^\n]*\n(?:(?!#|```)[^\n]*\n)*"
    r"```json\n(?:(?!```)[^\n]*\n)*```\n"
)
_REMINDER: Final = r"<system-reminder>(?:(?!</?system-reminder>)[\s\S])*</system-reminder>"
_OPENERS: Final = ("<system-reminder>", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>")
_CLOSERS: Final = ("</system-reminder>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
_REST: Final = r"(?P<value>[^\n\ufdd1]+)"  # of a line, or as far as an image
# why(L-83): a day or a time, and not what the line says behind it, which may be instructions.
_NAMES: Final = "|".join(filter(None, (*day_name, *day_abbr, *month_name, *month_abbr)))
_NOW: Final = (
    r"(?: \([^()\n]{1,40}\))?\**(?: is|:)[ \t*]*+(?P<value>(?:[\d \t\xa0\u202f:.,/+()\u2013\u2014-]"
    rf"|(?<=\d)(?:T(?=\d)|Z\b|[a-z]{{2}}\b)|[AaPp]\.?[Mm]\b|(?:at|o[fn]|the)\b|UTC|GMT|[A-Z]{{1,3}}"
    rf"[SD]?T\b|[A-Z]\w+/[A-Z]\w+|(?:{_NAMES})\b)+(?<=[\w)])(?<!\b(?:at|o[fn]))(?<!\bthe))"
)
_TODAY: Final = r"(?:the )?current date(?:time)?(?:(?: and |/| )time)?|today's date|today"
_SHOT: Final = r"Git snapshot.*\n```text\n|gitContext: .*\n|<context name=\"gitStatus\">.*\n\n"
_GIT: Final = rf"^(?:gitStatus: |({_SHOT}))(?P<value>(?(1)(?:\n?(?!```|</).++)+|[\s\S]+\Z))"
_RULES: Final = tuple(
    Rule(name, roles, re.compile(expression, re.MULTILINE))
    for name, roles, expression in (
        # why(L-37): Claude Code's first system block; its cch= changes with every request.
        ("billing_header", SYSTEM_ROLES, r"\A\s*x-anthropic-billing-header: cc_[^\n]*\n*"),
        # why(L-38): OpenClaw writes a new id into its system prompt at each user turn.
        ("message_id", SYSTEM_ROLES, r'^[ \t]*"message_id"[ \t]*:[ \t]*"(?P<value>[^"\n]*)"'),
        ("inbound_context", SYSTEM_ROLES, _INBOUND),  # in some of OpenClaw's runs, absent in others
        # why(L-39): minute stamps in front of user messages; on replay some become another prefix.
        ("timestamp", _USER, rf"\A(?P<value>\[{_STAMP}\] |{_ROUTED})"),
        ("current_time", _BOTH, rf"^[ \t*-]*(?i:(the )?(current|system) time|reference utc){_NOW}"),
        # why(L-40): a day ends, and everything behind the date is prefilled again.
        ("current_date", SYSTEM_ROLES, rf"^[ \t*-]*(?i:{_TODAY}){_NOW}"),
        ("git_status", SYSTEM_ROLES, _GIT),  # why(L-103): a session that is resumed looks anew
        ("runtime", _USER, rf"^Stats: runtime {_REST}"),  # why(L-41): figures on sub-agents
        ("session_line", _BOTH, rf"^(?:Runtime: agent=|Inline buttons not enabled for ){_REST}"),
        ("reminder", _USER, rf"^{_REMINDER}[ \t]*$"),  # why(L-42): these move with the newest
        ("internal_context", _USER, rf"^{_OPENERS[1]}(?s:(?!<<<BEGIN_O).)*?{_CLOSERS[1]}[ \t]*$"),
        ("operator_note", _USER, r"\AOperator note \(not from the user\)[\s\S]*\Z"),
        ("late_system", SYSTEM_ROLES, r"(?!)"),  # found by its place, not by its words
    )
)
_FENCE: Final = re.compile(r"^(```+|~~~+)[^\n`~]*\n[\s\S]*?(?:^ *\1|(\Z))", re.MULTILINE)


class Volatile(NamedTuple):  # a volatile field of one message
    rule: str
    kind: str  # pinned or transient
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
        return chain(self.head, (n for n in self.fields if n.kind == "transient"), self.tail)


@dataclass(eq=False)
class Memo[Value]:
    """What was made under a name, kept; when full it begins anew. What a race loses is remade."""

    most: int  # bytes
    made: dict[str | bytes, Value] = field(default_factory=dict)
    nbytes: int = 0  # about

    def of(self, name: str | bytes, make: Callable[[], Value]) -> Value:
        if (made := self.made.get(name)) is None:
            made = self.made[name] = make()
            self.nbytes += 2 * len(name) + 700  # why(L-56): as measured, the name included
            if self.nbytes > self.most:
                self.forget()
        return made

    def forget(self) -> None:
        self.made, self.nbytes = {}, 0


class Canon:
    """The rules as configured, and how this model's template joins text parts and tags thinking."""

    def __init__(self, config: Config, *, joint: str, tags: tuple[str, str]) -> None:
        rules = (rule._replace(kind=getattr(config, f"rule_{rule.name}")) for rule in _RULES)
        self.rules = tuple(rule for rule in rules if rule.kind != "off")
        self.joint, self._tags = joint, tags
        self.memo: Memo[Turn] = Memo(32_000_000)  # clients resend it all

    def still(self, message: Message) -> Turn:
        """Both copies of a message, wherever it stands; equal ones are equal bytes in version 2."""
        return self.memo.of(marshal.dumps(message, 2), partial(self._stilled, message))

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
            is_block = role != "user" or text.endswith(_CLOSERS) or part.startswith(_OPENERS)
            text += (self.joint if "\n" in self.joint or not is_block else "\n") * bool(text) + part
        return _turn({**message, "content": text}, tuple(_fields(text, rules)), n_dropped=n_dropped)

    def _reply(self, message: Message, content: str) -> Turn:
        """Thinking under one name, wherever the client has put it."""
        thought, (start, end) = message.get("reasoning_content") or "", self._tags
        opened, closed, answer = content.lstrip().partition(end or "\0")
        if not thought and closed and start and opened.startswith(start):
            thought, content = opened.removeprefix(start).strip("\n"), answer.lstrip("\n")
        content = content if thought.strip() else content.lstrip("\n")  # thinking was cut out there
        own = {k: v for k, v in message.items() if k != "reasoning_content"} | {"content": content}
        told = own | {"reasoning_content": thought} if thought.strip() else own
        return Turn("assistant", told, own, reply_digest(own), thought.strip())


def _turn(message: Message, fields: tuple[Volatile, ...] = (), *, n_dropped: int = 0) -> Turn:
    role, sent = message["role"], message["content"]
    words = replaced(sent, fields)
    canonical = {"role": role, "name": message.get("name", ""), "content": words}
    ours = words.count("__STABLE_") - sent.count("__STABLE_")  # not the client's own
    named = role, canonical["name"], words.strip("\n" * (role != "tool")), str(ours)  # why(L-92)
    name = sha256("\0".join(named).encode()).digest()
    return Turn(role, message, canonical, name, fields=fields, n_dropped=n_dropped)


def _fields(text: str, rules: Sequence[Rule]) -> Iterator[Volatile]:
    """Ascending; of two that overlap, the first; behind a pinned block the fields inside it."""
    hidden = _FENCE.sub(lambda f: f[0] if f[2] == "" else "\0" * len(f[0]), text) if rules else ""
    found = (
        _volatile(rule, match, rules=rules)
        for rule in rules
        for match in rule.pattern.finditer(text)
        if "\ufdd1" not in match[0]  # why(L-57): an image is told as it is
        if rule.name in ("message_id", "inbound_context") or hidden[match.start()] != "\0"  # fenced
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
        if one.start >= end:  # else it is inside the one before
            said, end = said + text[end : one.start], one.end
            if one.kind == "transient":  # it goes with the line breaks around it
                said, rest = said.rstrip("\n"), text[end:].lstrip("\n")
                said, end = said + "\n\n" * bool(said and rest), len(text) - len(rest)
            elif not one.text:
                said += f"__STABLE_{'MSG_ID' if one.rule == 'message_id' else one.rule.upper()}__"
    return said + text[end:]


def _canonicalize_messages(messages: Iterable[Message], canon: Canon) -> tuple[Turn, ...]:
    """The conversation in both pipelines; notes alone are no turn: templates refuse them (L-43)."""
    turns, ahead = list[Turn](), (-1, tuple[Volatile, ...]())  # ahead: of a turn that are notes
    for message in messages:
        turn, before = canon.still(message), turns[-1].role if turns else "system"
        if not (notes := () if before in SYSTEM_ROLES else _notes(turn, canon)):
            if turn.role == "user" and ahead[0] == len(turns):  # why(L-101): they are its head
                turn, ahead = replace(turn, head=(*ahead[1], *turns.pop().tail)), (-1, ())
            turns.append(turn)
        elif before == "assistant":
            turns.append(_turn({"role": "user", "content": "\n\n".join(n.value for n in notes)}))
            ahead = len(turns), notes
        elif notes[0].rule in _SYSTEMS and not any(t.role == "assistant" for t in turns):
            first = next(i for i, t in enumerate(turns) if t.role not in SYSTEM_ROLES)
            turns[first] = replace(turns[first], head=(*turns[first].head, *notes))
        else:
            turns[-1] = replace(turns[-1], tail=(*turns[-1].tail, *notes))
    return tuple(turns)


def _notes(turn: Turn, canon: Canon) -> tuple[Volatile, ...]:
    """The texts of a late message that is nothing but notes; none if it is more than that."""
    text, may_be = turn.message["content"], turn.role in SYSTEM_ROLES
    if may_be and "\ufdd1" not in text and any(r.name == "late_system" for r in canon.rules):
        return (Volatile("late_system", "transient", reminder(text)),)
    return (*turn.notes,) if turn.role == "user" and not turn.canonical["content"].strip() else ()


def stilling(before: str, now: str) -> str | None:
    """The setting of a rule that finds all in which two texts differ, acting or not."""
    rules = (rule for rule in _RULES if rule.pattern.sub("", before) == rule.pattern.sub("", now))
    return next((f"RULE_{rule.name.upper()}" for rule in rules), None)


def reminder(text: str) -> str:
    """A system message's text, tagged so that the model can tell it from what it stands behind."""
    return text if "<system-reminder>" in text else f"<system-reminder>\n{text}\n</system-reminder>"


# region 09 RENDER =============================================================
# Messages -> the model's chat template -> tokens, nothing lost. A template is not read but asked:
# canned conversations are rendered at construction, and what comes out is believed. What it cannot
# say is said another way (folded, merged, flattened), or named once in the log. Markup in client
# text (`<|im_end|>` in a file) is broken up by a noncharacter for rendering, and plain text then.
# Doors   _probe_preserve_thinking_support, _compute_msg_token_boundaries, Unspliceable
# Doors Template, Rendered · Knows CONFIG, ERRORS, LOG, WIRE, CANON · Thread any · Budget 467

_BREAK: Final = "\ufdd0"  # a noncharacter: Unicode keeps it for the inside of programs
_BROKEN: Final = re.compile(f"{_BREAK}({_BREAK}?)")  # the character itself is doubled
_WRITERS: Final = frozenset({"write", "write_file", "create_file"})
_NONCE: Final = "-".join(("zq7", "seam5qz")).replace("-", "")  # not a word of this very file
_THOUGHT: Final = "zqthought"
_FIRST: Final = "zqfirst"
_WORDS: Final = "zq{}q"  # of message n: letters and digits come through trim and tojson as they are
_ACT: Final = {"name": "f", "description": "f", "parameters": {"type": "object"}}
_TOOL: Final[Body] = {"type": "function", "function": _ACT}


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest: as a tokenizer matches its added tokens."""
    # why(L-104): a group is one look for what its tokens share; Gemma 3 has 6,242 `<unused...>`.
    alike = groupby(sorted(tokens, reverse=True), key=lambda token: token[:4])
    groups = (f"(?:{'|'.join(map(re.escape, some))})" for _, some in alike)
    return re.compile(f"({'|'.join(groups) or '(?!)'})")


def _hide(value: Any, markup: re.Pattern[str]) -> Any:
    """A copy of a JSON value with markup broken up; strings without any are shared."""
    if isinstance(value, str):
        return markup.sub(lambda t: t[0][0] + _BREAK + t[0][1:], value.replace(_BREAK, _BREAK * 2))
    if isinstance(value, dict):
        return {_hide(key, markup): _hide(item, markup) for key, item in value.items()}
    return [_hide(item, markup) for item in value] if isinstance(value, list | tuple) else value


class _Encoder:  # remembers pieces between added tokens: to encode history again is to look it up
    def __init__(self, tokenizer: Any) -> None:
        self.whole: Tokenizer = tokenizer.backend_tokenizer
        self._plain = Tokenizer(self.whole.model)  # shares the vocabulary, knows no added tokens
        self._plain.normalizer = self.whole.normalizer
        self._plain.pre_tokenizer = self.whole.pre_tokenizer
        self.added = self.whole.get_added_tokens_decoder()
        self._id_of = {t.content: np.array([i], np.int32) for i, t in self.added.items()}
        self.find_added = _any_of(self._id_of)
        self.memo: Memo[np.ndarray] = Memo(64_000_000)
        text = "Zed" + "".join(f" go {t} \n{t}\u00e9t\u00e9{t}{t}" for t in self._id_of) + " x.\n\n"
        wanted: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self._goes_by_piece = True  # unless some token eats the spaces around it
        self._goes_by_piece = self.encode(text).tolist() == wanted

    def markup(self, source: str, *tags: str) -> re.Pattern[str]:
        """Tokens for templates alone, not those that are plain words too (gemma's `<table>`)."""
        rest = {t.content for t in self.added.values() if not t.special}
        words = {t for t in rest if t not in source and self._plain.token_to_id(t) is not None}
        return _any_of(text for text in {*tags, *self._id_of} - words if len(text) > 1)

    def pictured(self, text: str, images: Mapping[str, tuple[str, np.ndarray]]) -> np.ndarray:
        """The same; by digest, what is shown for a mark, and the tokens for the mark in it."""
        if not images:
            return self.encode(text)
        known = re.compile(f"\ufdd1({'|'.join(images)})\ufdd2")
        shown = known.sub(lambda mark: images[mark[1]][0], text)
        ids = [images[p][1] if i % 2 else self.encode(p) for i, p in enumerate(known.split(shown))]
        return np.concatenate(ids)

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
    began = time.monotonic()  # why(L-32): encode() would stop every other thread meanwhile
    ids = np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)
    if (spent := time.monotonic() - began) > 0.0003:  # why(L-60): a core is not ours alone
        time.sleep(min(spent / 2, 0.01))
    return ids


class _ChatTemplate:  # as a function, and what became of canned conversations
    def __init__(self, tokenizer: Any, encoder: _Encoder) -> None:
        self._apply, self._find_added = tokenizer.apply_chat_template, encoder.find_added
        named = tokenizer.chat_template or ""
        self.source = named if isinstance(named, str) else "\n".join(named.values())
        if not self._says("user") and _FIRST in self.attempt("parts"):  # LLaVA's loses plain texts
            self._apply = lambda m, /, **how: tokenizer.apply_chat_template(_in_parts(m), **how)
        self.source = self.source or self.attempt("user")  # of DeepSeek-V3.2 it is Python
        self.thinking = _probe_thinking(self)  # switches for off, switches for on
        self.preserve = _probe_preserve_thinking_support(self)
        self.has_system = self._says("system user")
        self.has_late_system = self._says("system system user call tool system reply system user")
        self.has_repeats = self._says("user user reply reply")
        joint = re.search(rf"{_FIRST}(\s*){_WORDS.format(0)}", self.attempt("parts"))
        self.joint = joint[1] if joint else "\n"  # between text parts; or it misprints them
        user, tool = self._opening("user reply > user"), self._opening("user call > tool")
        others = ("user calls tool > tool", "user > reply", "user reply > system")
        openings = [user, tool, *map(self._opening, others)]  # from an added token to content
        openings += [self.prompt(role, on) for on in self.thinking for role in ("user", "tool")]
        rows = [encoder.encode(text).tolist() for text in openings if text]
        self.firsts = np.array(sorted({row[0] for row in rows}), np.int32)
        inner = ((row, at) for row in rows for at in range(1, len(row)) if row[at] in self.firsts)
        self.echoes = {(row[0], at, row[at]) for row, at in inner}  # one opening, not two
        dress = tool[len(user) :] if tool.startswith(user) else ""  # results as user messages
        self.find_user = re.compile(f"{re.escape(user) or '(?!)'}(?!{re.escape(dress or _BREAK)})")

    def render(self, messages: list[Message], *, tools: list[Body], switches: Body) -> str:
        """Raises BadRequest with the template's own sentence when it refuses."""
        switches = {"add_generation_prompt": True, "tokenize": False, **switches}
        try:
            return str(self._apply(messages, tools=tools or None, **switches))
        except Exception as refusal:  # templates raise what they like, and so does Jinja
            sentence = f"the model's chat template refuses these messages: {refusal}"
            raise BadRequest(sentence, param="messages") from refusal

    def attempt(self, messages: str | list[Message], /, *tools: Body, **switches: Any) -> str:
        """The text of a conversation, or of a canned one; "" where the template refuses it."""
        told = _canned(messages) if isinstance(messages, str) else messages
        with suppress(BadRequest):
            return self.render(told, tools=list(tools), switches=switches)
        return ""

    def _says(self, script: str) -> bool:
        in_order = ".*".join(message["content"] for message in _canned(script))
        return re.search(in_order, self.attempt(script), re.DOTALL) is not None

    def without_reply(self, switches: str) -> str:
        """What switches, a JSON object, make of canned conversations; no generation prompt."""
        told = {**json.loads(switches), "add_generation_prompt": False}
        head = "system " if self.has_system else ""
        plain = self.attempt(head + "user reply user", **told)
        return plain + "\0" + self.attempt(head + "user call tool reply user", _TOOL, **told)

    def prompt(self, last_role: str, switches: Body) -> str:
        """What opens the reply to a message of this role."""
        return self._opening("user call tool >" if last_role == "tool" else "user >", **switches)

    def _opening(self, script: str, /, **switches: Any) -> str:
        """What opens the message after the ">" (none: the reply); "" where no added token does."""
        # last words before [closer][opening] words      closer: what ends a conversation there
        past, _, last = script.partition(">")
        n_past = len(past.split())
        closed = self.attempt(past, **switches, add_generation_prompt=False)
        text = self.attempt(past + last, **switches, add_generation_prompt=not last)
        closer, between = (told.rpartition(_WORDS.format(n_past - 1))[2] for told in (closed, text))
        between = between.partition(_WORDS.format(n_past))[0]
        own = between[sum(takewhile(bool, map(str.__eq__, closer, between))) :].lstrip()
        tokens = (token.start() for token in self._find_added.finditer(between))
        starts = [at for at in tokens if at <= len(between) - len(own)]
        return between[starts[-1] :] if own and starts else ""


def _canned(script: str) -> list[Message]:
    """A conversation told by its roles, as in "user call tool reply"; "calls" are two of them."""
    messages: list[Message] = []
    for n, role in enumerate(script.split()):
        words, n_tools = _WORDS.format(n), script.split()[:n].count("tool")
        texts = (_FIRST, words) if role in {"calls", "parts"} else (words,)
        named = enumerate({"name": "f", "arguments": {"q": text}} for text in texts)
        calls = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in named]
        reply: Message = {"role": "assistant", "reasoning_content": _THOUGHT}
        own: dict[str, Message] = {
            "part": {"role": "user", "content": [{"type": "text", "text": t} for t in texts]},
            "tool": {"tool_call_id": f"call0000{n_tools}", "name": "f"},
            "reply": reply,
            "call": reply | {"content": "", "tool_calls": calls},
        }
        messages.append({"role": role, "content": words, **own.get(role.removesuffix("s"), {})})
    return messages


def _probe_preserve_thinking_support(chat: _ChatTemplate) -> Body:
    """Switches that make the template print past thinking; none if it has no such switch."""
    keeping = {"preserve_thinking": True, "keep_past_thinking": True}  # Qwen3.6, LFM2.5
    cutting = {"clear_thinking": False, "truncate_history_thinking": False}  # GLM, Nemotron
    for name, value in (keeping | cutting).items():
        past = chat.attempt("user reply user", **{name: value})
        if _THOUGHT in past and past != chat.attempt("user reply user"):
            return {name: value}
    return {}


def _probe_thinking(chat: _ChatTemplate) -> tuple[Body, Body]:
    efforts: list[Body] = [{"reasoning_effort": word} for word in ("low", "none")]
    for off in ({"enable_thinking": False}, {"thinking": False}, *efforts):
        on = {name: True for name in off if name != "reasoning_effort"}  # that never stops it
        if chat.attempt("user", **off) not in {"", chat.attempt("user", **on)}:
            return off, on
    return {}, {}


def _compute_msg_token_boundaries(tokens: np.ndarray, chat: _ChatTemplate) -> tuple[int, ...]:
    """Positions in `tokens` (int32 ids) where a message or the generation prompt begins."""
    begins = np.isin(tokens, chat.firsts)
    for first, distance, again in chat.echoes:
        begins[distance:] &= (tokens[distance:] != again) | (tokens[:-distance] != first)
    return tuple(np.flatnonzero(begins).tolist())


def _parse_arguments(call: dict[str, Any], *, hides_writes: bool) -> dict[str, Any]:
    """The call with an object for arguments (text crashes templates); `_raw` holds what is none."""
    function = call["function"]
    if isinstance(arguments := function.get("arguments") or {}, str):
        with suppress(BadRequest):
            arguments = parse_json_body(arguments.encode())
        arguments = arguments if isinstance(arguments, dict) else {"_raw": function["arguments"]}
    written = arguments.get("content")
    if hides_writes and function["name"].lower() in _WRITERS and isinstance(written, str):
        digest = sha256(written.encode()).hexdigest()[:12]
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
            told += [("tool calls", function["name"]), *product(["tool-call arguments"], values)]
        for kind, words in told:  # past thinking is the template's own affair
            said = words.strip()
            forms = (json.dumps(said, ensure_ascii=False)[1:-1] if n else said for n in range(2))
            ends = (at + len(form) for form in forms if (at := text.find(form, start)) >= 0)
            end = max(end, stop := min(ends, default=-1))
            if stop < 0:
                yield kind


class Unspliceable(Exception):
    """Why it is not certain what follows a recorded past, in a word or two."""


def _canned_like(message: Message, n: int) -> Message:
    words = _WORDS.format(n)
    calls = [_call_like(call, {"q": words}) for call in message.get("tool_calls", ())]
    content = words if message["content"] or n == 0 else ""
    return without_nulls({**message, "content": content, "tool_calls": calls or None})


def _in_parts(messages: list[Message]) -> list[Message]:
    plain = ((m, isinstance(m["content"], str)) for m in messages)
    return [m | {"content": [{"type": "text", "text": m["content"]}]} if p else m for m, p in plain]


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
        self, tokenizer: Any, config: Config, *, think_start: str, think_end: str, ends: set[int]
    ) -> None:
        """`tokenizer`: a fast one, or mlx-lm's of one. No past is replayed without `ends`, ids."""
        self._config, self._encoder = config, _Encoder(tokenizer)
        self._chat = _ChatTemplate(tokenizer, self._encoder)
        self._without_reply = lru_cache(256)(self._chat.without_reply)
        self._opening = lru_cache(256)(lambda role, on: self._chat.prompt(role, json.loads(on)))
        self.source = self._chat.source  # of all templates where there are several; "" for none
        self._tags, self._lost = (think_start, think_end), set[str]()  # kinds named in the log
        self._canon = Canon(config, joint=self._chat.joint, tags=self._tags)
        self.canonical = partial(_canonicalize_messages, canon=self._canon)
        self._ends = _any_of(t.content for i, t in self._encoder.added.items() if i in ends)
        self._hide = partial(_hide, markup=self._encoder.markup(self.source, *self._tags))
        if config.normalize_write_tool_content_for_prompt:
            log.warning("NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT: the model cannot see its writes")
        if self.source and not self._chat.has_system:
            log.warning("this chat template has no system role: user messages carry that text")

    def image_phrase(self) -> str:  # that it prints for an image; "" where it cannot be asked
        first, last = _canned("parts")[0]["content"]
        shown = self._chat.attempt([{"role": "user", "content": [first, {"type": "image"}, last]}])
        said = re.search(rf"{_FIRST}(.*?){_WORDS.format(0)}", shown, re.DOTALL)
        return said[1].removeprefix(self._chat.joint).removesuffix(self._chat.joint) if said else ""

    def encode(self, text: str) -> list[int]:
        """The tokenizer's ids; markup is markup, and no special tokens are added."""
        return list(map(int, self._encoder.encode(text.replace(_BREAK, _BREAK * 2))))

    def raw(self, prompt: str | Sequence[int]) -> Rendered:
        """A completion's prompt. Raises BadRequest: it is empty, or an id is not the model's."""
        whole, text = self._encoder.whole, prompt if isinstance(prompt, str) else ""
        ids = np.array(whole.encode_batch_fast([text])[0].ids if text else [*prompt], np.int32)
        if not ids.size:
            raise BadRequest("the prompt is empty", param="prompt")
        if len(strange := ids[(ids < 0) | (ids >= whole.get_vocab_size())]):
            raise BadRequest(f"{strange[0]} is not a token of this model", at="prompt")
        boundaries = _compute_msg_token_boundaries(ids, self._chat)
        return Rendered(text=text, ids=ids, boundaries=boundaries, generation_start=len(ids))

    def forget(self) -> None:
        self._canon.memo.forget()
        self._encoder.memo.forget()

    def world(self, request: ChatRequest) -> bytes:
        """What a recorded past depends on beside its messages: template, tools, switches."""
        # Not a switch that only changes the generation prompt: effort changes in mid-session.
        told = self._without_reply(json.dumps(self._switches(request), sort_keys=True))
        return sha256(json.dumps([self.source, request.tools, told], default=str).encode()).digest()

    def splice(
        self, request: ChatRequest, past: Sequence[Message], *, before: Rendered, is_cut: bool
    ) -> Rendered:
        """The request's messages behind `past`, whose tokens `before` has. Raises Unspliceable."""
        fresh, switches = list(map(self._shape, request.messages)), self._switches(request)
        closer, text = self._behind(past, fresh, tools=self._hide(request.tools), switches=switches)
        if any(_losses(fresh, text)):
            raise Unspliceable("lost text")
        if is_cut and past[-1].get("tool_calls"):
            raise Unspliceable("cut call")
        if not is_cut and not self._encoder.find_added.match(text):
            raise Unspliceable("end token")
        return self._measured(closer * is_cut + text, request, last=fresh[-1], before=before)

    def _behind(
        self, past: Sequence[Message], new: list[Message], *, tools: list[Body], switches: Body
    ) -> tuple[str, str]:
        # [past][its reply: a nonce][new messages as they are]      -> (closer, end and suffix)
        #                     nonce |closer|end ... suffix ... generation prompt
        # why(L-44): it may depend on the past: this very one is rendered; with words of our own for
        # the new messages, too, where theirs do not show what is before them.
        calls = [_call_like(call, {}) for call in past[-1].get("tool_calls", ())]
        reply: Message = {"role": "assistant", "content": "" if calls else _NONCE}
        if calls:
            reply["tool_calls"] = [*calls[:-1], _call_like(calls[-1], {"q": _NONCE})]
        old = [*map(self._shape, past[:-1]), reply]

        def after(some: Iterable[Message]) -> str:
            text = self._chat.attempt(_folded([*old, *some], self._chat), *tools, **switches)
            if text.count(_NONCE) != 1:
                raise Unspliceable("nonce" if text else "refused")
            return text.partition(_NONCE)[2]

        text = after(new)
        head, shown, _ = text.partition(new[0]["content"] or _NONCE)
        if not (found := self._ends.search(head * bool(shown))):
            canned = after(map(_canned_like, new, count()))
            found = self._ends.search(canned.partition(_WORDS.format(0))[0])
        closer, end = (found.string[: found.start()], found[0]) if found else ("", "")
        if (calls and not end) or not text.startswith(closer + end):
            raise Unspliceable("closer")
        return closer, text.removeprefix(closer)

    def _switches(self, request: ChatRequest) -> Body:
        wanted = self._hide(dict(request.template_kwargs))
        preserve = self._chat.preserve if self._config.preserve_thinking else {}
        return {**preserve, **wanted, **self._chat.thinking[request.thinking]}

    def prompt(self, request: ChatRequest, messages: Iterable[Message] | None = None) -> Rendered:
        """A whole prompt, of other messages if given. Raises BadRequest: the template refuses."""
        if request.kind == "completion":
            return self.raw(request.prompt or "")
        if not self.source:
            raise BadRequest("this model has no chat template, only completions", param="messages")
        folded = _folded(map(self._shape, messages or request.messages), self._chat)
        tools, switches = self._hide(request.tools), self._switches(request)
        text = self._chat.render(folded, tools=tools, switches=switches)
        lost = {"tools" for tool in tools if tool["function"]["name"] not in text}
        for kind in sorted(lost.union(_losses(folded, text)) - self._lost):
            log.warning("the model's chat template loses or moves %s", kind)
            self._lost.add(kind)
        return self._measured(text, request, last=folded[-1])

    def _measured(
        self, text: str, request: ChatRequest, *, last: Message, before: Rendered | None = None
    ) -> Rendered:
        """Counts in pieces of the text: where a message begins, tokens do too."""
        encode, (start, end) = partial(self._encoder.pictured, images=request.image_ids), self._tags
        opening = self._opening(last["role"], json.dumps(self._switches(request), sort_keys=True))
        ending = opening if text.endswith(opening) else ""
        users = [found.start() for found in self._chat.find_user.finditer(text)]
        # why(L-51): among these a new session in the same folder parts from the one before it.
        notes = re.compile("</system-reminder>").finditer(text, *(users[:2] or [len(text)]))
        ends = (len(encode(text[: note.end()])) for note in islice(notes, 4))
        head = text[: users[0]] if users else ""
        known = before or Rendered(note_ends=tuple(ends), system_end=len(encode(head)))
        kept, ids = len(known.ids), np.concatenate([known.ids, encode(text)])
        begins = _compute_msg_token_boundaries(ids[kept:], self._chat)
        last_user = len(ids) - len(encode(text[users[-1] :])) if users else known.last_user_start
        told: Body = {"ids": ids, "boundaries": (*known.boundaries, *(kept + n for n in begins))}
        told |= {"last_user_start": last_user, "generation_start": len(ids) - len(encode(ending))}
        thinks = bool(start) and ending.rfind(start) > ending.rfind(end)
        return replace(known, text=_BROKEN.sub(r"\1", text), starts_in_reasoning=thinks, **told)

    def _shape(self, message: Message) -> Message:
        """A copy in words this template understands, with what looks like markup broken up."""
        role, content = message["role"], message["content"]
        if not isinstance(content, str):
            content = self._chat.joint.join(part["text"] for part in content)
        shaped = {**message, "role": "system" if role == "developer" else role, "content": content}
        if calls := shaped.pop("tool_calls", None):  # some templates take [] for a call
            hides = self._config.normalize_write_tool_content_for_prompt
            shaped["tool_calls"] = [_parse_arguments(call, hides_writes=hides) for call in calls]
            if ".thinking" in self.source:  # gpt-oss's shows text and thought alike, but not both
                told = filter(None, (message.get("reasoning_content"), content))
                shaped |= {"content": "\n\n".join(told), "thinking": ""}
        hidden: Message = self._hide(shaped)
        if role == "assistant" and "reasoning_content" not in message:
            # it may have come back with its thinking: those two tags are the real ones again
            start, end = map(self._hide, self._tags)
            thought, closed, answer = hidden["content"].lstrip().partition(end or _BREAK)
            if start and closed and thought.startswith(start):
                hidden["content"] = thought.removeprefix(start).join(self._tags) + answer
        return hidden


# region 10 LEDGER =============================================================
# What was fed and generated once is replayed token by token; only what is new is rendered.
#     messages   s   u   a   t   a   t     a chain hash over their canonical forms, from a root
#                |--- a past ---|  new     that stands for template, tools and switches
#     tokens     |fed, generated|suffix|
# A transcript is recorded after each whole reply, under the chain that ends in it (sub-agents share
# a session id): tokens, what was told of volatile fields, and the replies' thinking, which a client
# may leave out but not change. Prompts need none: rendered again they are the same tokens.
# Doors   Ledger, Draft, Generated
# Knows CONFIG, LOG, WIRE, HEAL, CANON, RENDER · Owns _ledger_lock (leaf) · Thread any · Budget 277

_ASKING: Final = frozenset({"user", "tool"})


class _Told(NamedTuple):  # to the model, of volatile fields, on the way to some message
    pins: Mapping[tuple[int, str], set[str]] = {}  # values by message and rule
    notes: tuple[str, ...] = ()  # in the order of telling


@dataclass(eq=False, slots=True, kw_only=True)
class Transcript:  # one prompt and the reply to it, as tokens
    rendered: Rendered  # the prompt's positions
    told: _Told
    reply: Generated  # without its tokens
    ids: tuple[npt.NDArray[np.int32], ...]  # its past's, and its own with no end token
    thoughts: tuple[str, ...]  # of each message, the reply included; of replayed ones as generated
    used: float  # seconds on the caller's clock
    nbytes: int  # texts are counted as much as the tokens that tell them

    def fits(self, turns: Sequence[Turn], session: str) -> bool:
        """Whether what it was told and thought is this conversation's, too."""
        # why(L-85): under one key lie all conversations that begin with the same words.
        mine, own = turns[: len(self.thoughts)], self.reply.call
        calls = [(i, c) for i, turn in enumerate(mine) for c in turn.message.get("tool_calls", ())]
        start = max((i for i, call in calls if own and call.get("id") == own), default=0)  # L-103
        said = {note.value for turn in mine[start:] for note in turn.notes}
        is_ours = self.reply.session == session or said.issubset(self.told.notes)
        return is_ours and all(map(lambda t, own: t.thought in ("", own), turns, self.thoughts))


class Generated(NamedTuple):
    """The tokens of a whole reply, and when and for whom they were generated."""

    ids: Sequence[int]  # the end token included
    hashes: Sequence[bytes]  # names of the blocks of the prompt
    ended: int | None  # the end token; None for a reply that was cut
    session: str
    at: float  # seconds, on the clock that draft() is given
    call: str = ""  # the id of the conversation's last call, if a model here made it


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
    holds: Callable[[], bool] = lambda: True  # takes long; if not, it must be drafted once more

    @property
    def answered(self) -> list[tuple[bytes, bytes]]:
        """Names of what stands before each turn and the reply: all but results, and its end."""
        links = (b"" if t.role == "tool" else t.digest for t in self.turns)  # clients cut results
        whole = accumulate(links, lambda key, link: sha256(key + link).digest(), initial=b"")
        return [*zip(whole, [b"", *(turn.digest for turn in self.turns)], strict=True)]


def _chain(world: bytes, turns: Iterable[Turn]) -> tuple[bytes, ...]:
    links = (turn.role.encode() + turn.digest for turn in turns)
    return tuple(accumulate(links, lambda key, link: sha256(key + link).digest(), initial=world))


class Ledger:
    """Recorded pasts of one model, and the heads that conversations have in common."""

    ALTERNATIVES: Final = 4  # transcripts under one key
    TRIES: Final = 3  # pasts, the longest first, before a request is rendered as sent
    MAX_HEADS: Final = 256  # by key: what is told; worlds that misled a guess; tools, as first told

    def __init__(self, config: Config, metrics: CacheMetrics, *, healing: HealingStore) -> None:
        self._config, self._metrics, self._healing = config, metrics, healing
        self._heads, self._misled, self._offered = (LRUCache(self.MAX_HEADS) for _ in range(3))
        self._ledger_lock = threading.Lock()
        # Guarded by _ledger_lock; least recently used first, parents behind their children
        self._pasts: OrderedDict[bytes, list[Transcript]] = OrderedDict()
        self._nbytes = 0

    def draft(self, request: ChatRequest, template: Template, *, room: int, now: float) -> Draft:
        """The prompt of a chat: the longest past that can be replayed, and the rest rendered."""
        # What would not fit into `room` tokens goes without past thinking. Raises BadRequest.
        asked, turns = request, template.canonical(request.messages)
        texts = sorted(json.dumps(tool, sort_keys=True) for tool in asked.tools)  # why(L-89)
        tools = self._offered.setdefault(sha256(str(texts).encode()).digest(), asked.tools)
        starts = zip(_chain(b"", turns)[1:], turns, strict=True)
        start = next((key for key, turn in starts if "tool_calls" in turn.message), None)
        # why(L-91): without tools a summary of what they did would be read from the first token on.
        tools = self._offered[start] = tools or (self._offered.get(start, ()) if start else ())
        request = replace(asked, tools=tools)
        self._metrics.bump("telemetry_dropped", sum(turn.n_dropped for turn in turns))
        plain = Draft(turns=turns, keys=_chain(template.world(request), turns))
        why, session = "", request.session.session_id or ""
        for past in islice(self._candidates(plain, session=session, now=now), self.TRIES):
            try:
                draft = self._replay(request, template, past=past, draft=plain)
                break
            except Unspliceable as miss:
                self._metrics.bump("exact_key_rejected_by_model_lcp")  # a replay that was refused
                why = why or str(miss)
        else:
            draft = self._as_sent(request, template, draft=plain)
        self._metrics.bump("ledger_seam_fallback", bool(why))
        needed = len(draft.rendered.ids) + min(asked.max_tokens, room // 8)
        if needed > room and request.tools and not asked.tools:
            self._offered[start] = ()  # there is no room for these
            return self.draft(asked, template, room=room, now=now)
        if len(draft.rendered.ids) > room:  # then only the current tool loop keeps its thinking
            messages, told = _tell(turns, 0, known=_Told())
            users = [at for at, turn in enumerate(turns) if turn.role == "user"]
            for message in messages[: users[-1] if users else 0]:
                message.pop("reasoning_content", None)
            brief = replace(plain, rendered=template.prompt(request, messages), told=told)
            draft = min(draft, brief, key=lambda one: len(one.rendered.ids))
        return replace(draft, fallback=why)

    def snapshot(self, now: float) -> dict[str, int]:
        with self._ledger_lock:
            self._forget(now)
            n_pasts = sum(map(len, self._pasts.values()))
            return {"transcripts": n_pasts, "heads": len(self._heads), "bytes": self._nbytes}

    def record(self, draft: Draft, *, reply: Turn, generated: Generated) -> None:
        """Remember a whole reply under the form in which the client will send it back."""
        past, keys = draft.past, (*draft.keys, *_chain(draft.keys[-1], [reply])[1:])
        own = np.concatenate([draft.rendered.ids[draft.kept :], np.array(generated.ids, np.int32)])
        thoughts, before = (past.thoughts, past.ids) if past else ((), ())
        thoughts += tuple(one.thought for one in [*draft.turns, reply][len(thoughts) :])
        pins = () if past and past.told.pins is draft.told.pins else draft.told.pins
        n_pointers = len(generated.hashes) + 2 * len(thoughts)
        call = [past.reply.call if past else ""]
        call += [one["id"] for one in reply.message.get("tool_calls", ())]
        new = Transcript(
            rendered=replace(draft.rendered, ids=own[:0], text=""),
            told=draft.told,
            reply=generated._replace(ids=(), call=call[-1]),
            ids=(*before, own if generated.ended is None else own[:-1]),
            thoughts=thoughts,
            used=generated.at,
            nbytes=2 * own.nbytes + 8 * n_pointers + 300 * len(pins) + 1_000,
        )
        with self._ledger_lock:
            self._keep(keys[-1], [*self._pasts.get(keys[-1], ()), new][-self.ALTERNATIVES :])
            self._touch(keys)
            self._forget(new.used)

    def _keep(self, key: bytes, pasts: list[Transcript]) -> None:
        before = self._pasts.pop(key, [])
        self._nbytes += sum(past.nbytes for past in pasts) - sum(past.nbytes for past in before)
        if pasts:
            self._pasts[key] = pasts

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in filter(self._pasts.__contains__, reversed(keys)):
            self._pasts.move_to_end(key)

    def _forget(self, now: float) -> None:
        idle, most = self._config.ledger_ttl_seconds or math.inf, self._config.ledger_max_bytes
        while self._pasts:
            key, oldest = next(iter(self._pasts.items()))
            if self._nbytes <= most and now - max(past.used for past in oldest) <= idle:
                return
            self._keep(key, [])

    def forget(self, session: str | None) -> None:  # None: the pasts of all
        with self._ledger_lock:
            for key, pasts in list(self._pasts.items()):
                self._keep(key, [p for p in pasts if session not in (None, p.reply.session)])
            for known in (self._heads, self._offered) if session is None else ():
                known.clear()

    def _candidates(self, draft: Draft, *, session: str, now: float) -> Iterator[Transcript]:
        """Pasts that end in a reply and leave a newest message to render; longest first, L-99."""
        newest = max((i for i, turn in enumerate(draft.turns) if turn.role in _ASKING), default=0)
        with self._ledger_lock:
            self._forget(now)
            self._touch(draft.keys)
            known = [list(self._pasts.get(key, ())) for key in draft.keys[newest:0:-1]]
        said = {note.value for turn in draft.turns for note in turn.notes}
        pins = [((at, one.rule), one.value) for at, t in enumerate(draft.turns) for one in t.fields]
        for pasts in known:
            if fits := [past for past in pasts if past.fits(draft.turns, session)]:
                fits.sort(key=lambda past: (len({*past.told.notes} - said), -past.used))  # L-96
                fits.sort(key=lambda p: sum(v not in p.told.pins.get(k, ()) for k, v in pins))
                best = max(fits, key=lambda past: past.reply.session == session)
                best.used = now
                yield best

    def _replay(
        self, request: ChatRequest, template: Template, *, past: Transcript, draft: Draft
    ) -> Draft:
        """The past with what is new behind it. Raises Unspliceable."""
        depth, is_cut = len(past.thoughts), past.reply.ended is None
        new, told = _tell(draft.turns, depth, known=past.told)
        is_new_turn = any(message["role"] == "user" for message in new)
        if any(past.thoughts) and is_new_turn and not self._config.preserve_thinking:
            raise Unspliceable("thinking is not preserved")
        old = [turn.message for turn in draft.turns[:depth]]
        before = replace(past.rendered, ids=np.concatenate(past.ids))
        healed = _heal_messages(new, self._healing, answered=draft.answered[depth:])
        rest = replace(request, messages=OriginalMessages(tuple(healed)))
        splice = partial(template.splice, rest, before=before, is_cut=is_cut)
        draft = replace(draft, told=told, past=past, kept=len(before.ids))
        # why(L-63): what follows a past is nearly always said by these of its messages alone.
        asked = max((i for i, message in enumerate(old) if message["role"] == "user"), default=0)
        *_, step = [0, *(i for i, message in enumerate(old[:-4]) if message["role"] == "assistant")]
        few = [message for i, message in enumerate(old) if i in (0, asked) or i >= step]
        if 2 * len(few) < len(old) and draft.keys[0] not in self._misled:
            with suppress(Unspliceable):
                draft = replace(draft, rendered=splice(few))
                return replace(draft, holds=partial(self._holds, draft, partial(splice, old)))
        return replace(draft, rendered=splice(old))

    def _holds(self, guess: Draft, whole: Callable[[], Rendered]) -> bool:
        time.sleep(0.0005)  # why(L-63): or this thread would keep the model's from beginning
        with suppress(Unspliceable):
            if (said := whole()) == guess.rendered and np.array_equal(said.ids, guess.rendered.ids):
                return True
        self._misled[guess.keys[0]] = True
        return False

    def _as_sent(self, request: ChatRequest, template: Template, *, draft: Draft) -> Draft:
        """All messages rendered; the head as it was first rendered for anybody."""
        n_head = sum(1 for _ in takewhile(lambda turn: turn.role in SYSTEM_ROLES, draft.turns))
        head, told = _tell(draft.turns[:n_head], 0, known=_Told())
        if told.pins and any(turn.role in _ASKING for turn in draft.turns):  # somewhere to restate
            # why(L-38): the first with these fields (L-93) stays, or a new id would move the rest.
            head, told = self._heads.setdefault((draft.keys[n_head], *told.pins), (head, told))
        rest, told = _tell(draft.turns, n_head, known=told)
        messages = [*_heal_messages([*head, *rest], self._healing, answered=draft.answered)]
        return replace(draft, rendered=template.prompt(request, messages), told=told)


def _tell(turns: Sequence[Turn], start: int, *, known: _Told) -> tuple[list[Message], _Told]:
    """Copies of messages from `start` on as the model shall see them; all it is told by then."""
    old = [note for turn in turns[:start] for note in turn.notes]
    missed = [note for note in old if note.value not in known.notes]
    rules = {note.value: note.rule for turn in turns for note in turn.notes}
    pins: dict[tuple[int, str], set[str]] = {}
    messages, stale, notes = [], [], [v for v in known.notes if v in rules or not missed]  # L-98
    for at, one in ((at, one) for at, turn in enumerate(turns) for one in turn.fields):
        if one.kind == "pinned":
            pins.setdefault((at, one.rule), set()).add(one.value)
            if at < start and one.value not in known.pins.get((at, one.rule), ()):
                stale.append(one.text.strip() or f"[{one.rule} is now {one.value}]")
    # why(L-84): what was told of late is not repeated if it moved; said twice, it is told twice
    moved: Counter[str] = Counter()
    for rule in {*rules.values()}:  # why(L-96): what is kept says nothing of another rule's order
        told = (value for value in reversed(known.notes) if rules.get(value, rule) == rule)
        moved.update(takewhile((rules.keys() - {note.value for note in old}).__contains__, told))
    newest = max((i for i, turn in enumerate(turns) if turn.role in _ASKING), default=-1)
    for at, turn in enumerate(turns[start:], start):
        tail = (*turn.tail, *missed) if at == newest else turn.tail
        carried = [note for note in turn.fields if note.kind == "transient"]
        here = dict.fromkeys(n.value for n in (*turn.head, *carried, *tail))
        news = [value for value in here if moved[value] < 1]
        content = replaced(turn.message["content"], [n for n in carried if n.value not in news])
        above, below = ([n.value for n in some if n.value in news] for some in (turn.head, tail))
        said = [*above, content, *below, "\n".join(dict.fromkeys(stale)) if at == newest else ""]
        messages.append({**turn.message, "content": "\n\n".join(filter(None, said))})
        moved.subtract(here.keys() - set(news))
        notes += news
    fresh = {place: values for place, values in pins.items() if known.pins.get(place) != values}
    return messages, _Told({**known.pins, **fresh} if fresh else known.pins, tuple(notes))


# region 11 KEY ================================================================
# What a prefix is called: chained hashes of exact model tokens, under a root for whatever else
# changes KV. In place of an image's tokens stand marks, negative numbers made of its digest: from
# there on another image is another prefix (G1). Scrubbed texts are for people: none finds any KV.
# Doors common_prefix, _inject_image_markers, image_starts, is_inside_image, _scrub_cache_key
# Doors _block_hashes, _assert_cache_key_safety, TokenArray · Knows - · Thread any; pure · Budget 64

TokenArray = npt.NDArray[np.int32]
_VOLATILE: Final = (
    (re.compile(r"<system-reminder>(?:(?!<system-reminder>)[\s\S])*?</system-reminder>"), ""),
    (re.compile(r"\bCurrent time is\b[^\n]*"), "Current time is __STABLE_TIME__"),
    (re.compile(r"\bcch=[0-9a-fA-F]+;"), "cch=__STABLE_CCH__;"),
    (re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE), ""),
)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens are the same."""
    parts = a[: len(b)] != b[: len(a)]
    return int(parts.argmax()) if parts.any() else len(parts)


def _inject_image_markers(ids: TokenArray, image: slice, *, digest: str) -> TokenArray:
    """A copy with marks in the place of the image's tokens; `digest`: 64 hex digits."""
    words = np.resize(np.frombuffer(bytes.fromhex(digest), "<u4"), image.stop - image.start)
    marked = ids.copy()
    marked[image] = -2 - (words & 0x3FFFFFFF).astype(np.int64) * 2
    marked[image.start] += 1  # odd: the first
    return marked


def image_starts(tokens: TokenArray) -> list[int]:
    """Positions of the first mark of each image, ascending."""
    return np.flatnonzero((tokens < 0) & (tokens % 2 == 1)).tolist()


def is_inside_image(tokens: TokenArray, position: int) -> bool:
    """Whether a cut before this token would part an image."""
    return position < len(tokens) and bool(tokens[position] < 0 and tokens[position] % 2 == 0)


def _block_hashes(
    tokens: npt.ArrayLike, block_size: int, *, root: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Names of all full blocks; `known`: those of the first ones."""
    # Name i is sha256(name i - 1, or root; block i), so it stands for all tokens to block i's end.
    packed, n_bytes = memoryview(np.asarray(tokens, dtype="<i4").tobytes()), 4 * block_size
    names = list(known[: len(packed) // n_bytes])
    for at in range(len(names) * n_bytes, len(packed) - n_bytes + 1, n_bytes):
        names.append(sha256((names[-1] if names else root) + packed[at : at + n_bytes]).digest())
    return names


def _scrub_cache_key(text: str) -> str:
    """A prompt's text without what changes from request to request. For diagnosis only."""
    return reduce(lambda said, rule: rule[0].sub(rule[1], said), _VOLATILE, text)


def _assert_cache_key_safety(key_text: str, model_text: str) -> bool:
    """Whether a scrub kept at least 90 % of the text; less means that a rule matched too much."""
    return 10 * len(key_text) >= 9 * len(model_text)


# region 12 KV =================================================================
# The only room that knows what a KV layer looks like. It may hold several leaves (CacheList).
# *Attention* leaves (KVCache) can be cut at any position; every other leaf (recurrent state,
# sliding window) is *state*: known only where a snapshot was taken. At rest attention KV lives in
# a Span, free of cache objects: writing to one array object through two caches overwrote a stored
# past (L-03). Copies are contiguous and evaluated: a view pins its whole parent buffer (L-06).
# Doors   KvCache, KvShape, Span, StateSnapshot, GROWTH_TOKENS, measure_kv, _kv_cache_offset
# Doors   evaluate, reserve, lend_span, take_span, copy_span, to_batch, row_from_batch
# Doors   snapshot_state, restore_state, note_states, noted_states, recurrent_handles
# Doors   like_upstream, row_offsets · Knows WIRE · Thread model only; mlx · Budget 267

KvCache = list[Any]  # one upstream cache object per layer
GROWTH_TOKENS: Final = 256  # upstream grows buffers by this step; ours end on the same grid


class KvShape(NamedTuple):
    """What one row of this model costs, measured on the model itself."""

    token_bytes: int  # attention KV of one token, all layers
    state_bytes: int  # one snapshot of all state leaves at most
    has_state: bool  # some layers cannot be rewound
    can_batch: bool  # every layer has an upstream batch form
    can_note: bool  # its recurrent layers note states inside a call


class StateSnapshot(NamedTuple):
    """State leaves at one position: per leaf the upstream `state`, arrays of its own."""

    leaves: Sequence[Any]
    nbytes: int


class Span(NamedTuple):
    """Attention KV of `length` consecutive tokens, all attention leaves, and nothing else."""

    arrays: list[mx.array]  # keys, values of each leaf: (1, n_kv_heads, >= length, head_dim)
    length: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def cut(self, start: int, end: int) -> Span:
        """A copy of tokens [start, end); this span stays as it is."""
        copies = [mx.contiguous(array[..., start:end, :]) for array in self.arrays]
        mx.eval(copies)
        return Span(copies, end - start)

    def join(self, tail: Span) -> Span:
        """These tokens followed by the tail's. Consumes both: neither may be used afterwards."""
        buffers, length = self.arrays, self.length + tail.length
        for i, more in enumerate(tail.arrays):
            buffers[i] = buffer = _grown(buffers[i], length)
            buffer[..., self.length : length, :] = more[..., : tail.length, :]
            mx.eval(buffer)  # one array at a time: at most one of them exists twice
        return Span(buffers, length)


def _grown(buffer: mx.array, length: int) -> mx.array:
    """A buffer for `length` tokens that begins as this one; a larger one is on the growth grid."""
    if buffer.shape[2] < length:
        lacks = -(-length // GROWTH_TOKENS) * GROWTH_TOKENS - buffer.shape[2]
        buffer = mx.pad(buffer, [(0, 0), (0, 0), (0, lacks), (0, 0)])
        mx.eval(buffer)
    return buffer


def _leaves(cache: KvCache, kind: Literal["attention", "state"]) -> list[Any]:
    leaves = (leaf for layer in cache for leaf in getattr(layer, "caches", [layer]))
    # why(L-05): subclasses and look-alikes (rotating, chunked) say they trim and then cannot.
    return [x for x in leaves if (type(x) in (KVCache, BatchKVCache)) == (kind == "attention")]


def evaluate(cache: KvCache) -> None:
    """Finish all pending work of the cache, as upstream's prefill does after each slice."""
    mx.eval([layer.state for layer in cache])


class _RecurrentCache(ArraysCache):  # type: ignore[misc]
    """mlx-lm's, with what the recurrent layers of mlx-vlm ask of theirs besides."""

    def update_window(self, index: int, source: mx.array, *args: int, lengths: None = None) -> None:
        """Keep the last inputs of a convolution, `args[0]` of them."""
        assert lengths is None, "rows of different lengths are never fed together"
        self[index] = mx.contiguous(source[:, source.shape[1] - args[0] :])

    def update_recurrent(self, index: int, *args: Any) -> Any:
        """`args`: how many tokens, and what makes (output, new state) of a state."""
        output, self[index] = args[1](self[index], None)[:2]
        return output, self[index]

    def extract(self, idx: int) -> Any:
        return self.from_state(([array[idx : idx + 1] for array in self.cache], None, None))


def like_upstream(layer: Any) -> Any:
    """mlx-lm's cache of the kind of an empty one of mlx-vlm. Raises ValueError."""
    match kind := type(layer).__name__:
        case "KVCache":
            return KVCache()
        case "ArraysCache":
            return _RecurrentCache(len(layer.cache))
        case "RotatingKVCache":
            return mlx_lm.models.cache.RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    raise ValueError(f"a cache of kind {kind} is not known here")


def row_offsets(cache: KvCache) -> mx.array:
    """How many tokens attention layers hold of each row, `(rows,)`."""
    return mx.array(_leaves(cache, "attention")[0].offset).reshape(-1)


def measure_kv(model: Any) -> KvShape:
    """Run two tokens through the model and read what its cache weighs."""
    cache = make_prompt_cache(model)
    model(mx.zeros((1, 2), mx.int32), cache=cache)
    evaluate(cache)
    attention, state = _leaves(cache, "attention"), _leaves(cache, "state")
    token_bytes = sum(leaf.nbytes // leaf.keys.shape[2] for leaf in attention)
    sizes = [(x, getattr(x, "max_size", getattr(x, "chunk_size", 0))) for x in state]  # tokens
    state_bytes = sum(x.nbytes // x.keys.shape[2] * n if n else x.nbytes for x, n in sizes)
    can_batch = all(hasattr(layer, "merge") for layer in cache)
    can_note = bool(state) and _made_to_note(model)
    return KvShape(token_bytes, state_bytes, bool(state), can_batch, can_note)


def _note_taker(kind: Any) -> Any:
    """This kind of layer; where its cache has `ends`, it runs in parts and notes states (L-61)."""

    def call(self: Any, *args: Any, **named: Any) -> Any:
        leaf: Any = named.get("cache", args[-1] if args else None)  # every step asks
        if not (ends := getattr(leaf, "ends", ())):
            return kind.__call__(self, *args, **named)
        x, *rest = args or (named.pop(next(iter(named))),)  # by name, too, it is the first
        outputs, leaf.ends = [], ()
        for part in mx.split(x, [end for end in ends if end < x.shape[1]], axis=1):
            outputs.append(kind.__call__(self, part, *rest, **named))
            leaf.notes.append(list(leaf.cache))
        return mx.concatenate(outputs, axis=1)

    return type(kind.__name__, (kind,), {"__call__": call})


def _made_to_note(model: Any) -> bool:
    """Have the innermost layers with a cache do so; False: they cannot, or not rightly."""
    fields = ((x, inspect.signature(type(x).__call__).parameters) for x in model.modules())
    takers = {id(layer): layer for layer, names in fields if "cache" in names}
    inner = [x for x in takers.values() if len(takers.keys() & set(map(id, x.modules()))) == 1]
    for layer in inner:
        layer.__class__ = _note_taker(type(layer))
    noted, first, tokens = make_prompt_cache(model), make_prompt_cache(model), mx.array([[0, 1]])
    note_states(noted, [1])
    with suppress(Exception):  # models may call their layers in other ways
        model(tokens, cache=noted), model(tokens[:, :1], cache=first)
        states = (tree_flatten(x.leaves) for x in (noted_states(noted)[0], snapshot_state(first)))
        pairs = [(x, y) for (_, x), (_, y) in zip(*states, strict=True) if x is not None]
        if all(mx.abs(x - y).max() <= 0.05 * mx.abs(y).max() for x, y in pairs):
            return True
    for layer in inner:
        layer.__class__ = type(layer).__base__
    return False


def note_states(cache: KvCache, ends: Sequence[int]) -> None:
    """Have the next call note its recurrent states behind so many tokens each, ascending."""
    for leaf in _leaves(cache, "state"):
        leaf.ends, leaf.notes = ends, []


def noted_states(cache: KvCache) -> list[StateSnapshot]:
    """One for each of the `ends`, in their order, and perhaps one more; they are forgotten."""
    notes = list(zip(*(leaf.notes for leaf in _leaves(cache, "state")), strict=True))
    note_states(cache, ())
    return [snapshot_state([ArraysCache.from_state((x, None, None)) for x in one]) for one in notes]


def _kv_cache_offset(cache: KvCache, *, recorded: int) -> KvOffset:
    """Physical depth in model tokens; of recurrent layers alone, what their snapshot recorded."""
    # Hybrid caches mix ArraysCache (no `.offset`) with KVCache: layer 0 may not answer (L-02).
    leaves = _leaves(cache, "attention") + _leaves(cache, "state")
    offsets = (getattr(leaf, "offset", None) for leaf in leaves)
    return KvOffset(next((n for n in offsets if isinstance(n, int)), recorded))


def snapshot_state(cache: KvCache, *, row: int = 0) -> StateSnapshot:
    """Copy a row's state leaves, if there are any: evaluated, independent of the cache."""
    for leaf in _leaves(cache, "state"):  # a slice leaves more of a window than is read again
        if (more := getattr(leaf, "_idx", 0) - getattr(leaf, "max_size", 1 << 60)) > 0:
            leaf.keys, leaf.values = leaf._trim(more, leaf.keys), leaf._trim(more, leaf.values)
            leaf._idx = leaf.max_size
    states = [leaf.state for leaf in _leaves(cache, "state")]
    leaves = _each_array(states, lambda array: mx.contiguous(array[row : row + 1]))
    mx.eval(leaves)
    parts = dict(tree_flatten(leaves)).values()
    return StateSnapshot(leaves, sum(getattr(part, "nbytes", 0) for part in parts))


def _each_array(state: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """The same lists and tuples, new ones (L-04), with every array changed."""
    return tree_map(lambda part: change(part) if isinstance(part, mx.array) else part, state)


def restore_state(cache: KvCache, snapshot: StateSnapshot) -> None:
    """Put a snapshot into the state leaves of `cache`; the snapshot stays usable."""
    # why(L-03): a slice write changes the object it goes through; through a new handle it copies.
    for leaf, state in zip(_leaves(cache, "state"), snapshot.leaves, strict=True):
        leaf.state = _each_array(state, lambda array: array[...])


def reserve(cache: KvCache, tokens: int, *, roomy: int) -> None:
    """Grow attention buffers, but empty ones, that cannot hold `tokens`, to `roomy` (L-33)."""
    for leaf in _leaves(cache, "attention"):
        if leaf.keys is not None and leaf.keys.shape[2] < tokens:
            leaf.keys = _grown(leaf.keys, roomy)
            leaf.values = _grown(leaf.values, roomy)


def lend_span(cache: KvCache, span: Span) -> None:
    """Move a span's buffers into the empty attention leaves; the span must not be used again."""
    for leaf, pair in zip(_leaves(cache, "attention"), batched(span.arrays, 2), strict=True):
        leaf.state = (*pair, span.length)


def take_span(cache: KvCache, length: int) -> Span:
    """Move the attention buffers, `length` tokens deep, out of a one-row cache, now spent."""
    leaves = _leaves(cache, "attention")
    assert all(leaf.offset == length for leaf in leaves), "attention layers disagree on depth"
    arrays = [array for leaf in leaves for array in (leaf.keys, leaf.values)]
    mx.eval(arrays)
    cache.clear()  # why(L-105): the group it comes from names this list to the end of the turn
    return Span(arrays, length)


def copy_span(cache: KvCache, end: int, *, row: int) -> Span:
    """Copy tokens [0, end) of one row out of a cache in use, be it a batch or the row's own."""
    views = []
    for leaf in _leaves(cache, "attention"):
        start = leaf.left_padding.tolist()[row] if type(leaf) is BatchKVCache else 0
        views += [array[row : row + 1, :, start:] for array in (leaf.keys, leaf.values)]
    return Span(views, end).cut(0, end)


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
    leaves = _leaves(cache, "state")  # a step replaces them (not a window's): kept for free (L-10)
    if not all(isinstance(leaf, ArraysCache) for leaf in leaves):
        return None
    return [ArraysCache.from_state((list(leaf.cache), None, None)) for leaf in leaves] or None


# region 13 CACHE ==============================================================
# Lines, checkpoints, branches: the deepest exact prefix, and who owns its bytes.
#     line A  [0 ............................ end)      root: owns all its KV
#     line B            [start ........ end)            branch: owns what follows A's first `start`
# A request that extends a line takes its buffers and writes on in place; one that diverges inside
# it either *splits* the line (cheap when little follows: the tail becomes a branch, nothing is
# lost) or *branches* off a copy. A branch keeps only its own tail at rest, so N sub-agents on one
# prefix cost the prefix once. A lent line stays visible: who has the same prefix can wait for it.
# Doors   LRUPromptCache, Prompt, Line, Reuse, FEW_CHECKPOINTS
# Knows CONFIG, LOG, KEY, KV · Thread model · Budget 322

SHARE_MIN_TOKENS: Final = 256  # a shorter shared prefix is stored twice
SHARE_MIN_PART: Final = 16  # nor one shorter than this part of the branch
CHECKPOINT_SHARE: Final = 0.25  # of the byte budget, for one line's checkpoints
FEW_CHECKPOINTS: Final = 8  # of a line: more of them give way before any KV does


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
    owner: tuple[str, str] = ("", "")  # tenant and session that used it last
    head: int = 0  # where its instructions end, which others share
    number: int = field(init=False, default_factory=count(1).__next__)
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
    layer: str = "miss"  # or "line", "checkpoint", "branch": what it takes to use it
    shared: int = 0  # leading tokens that have KV, be it without the state to go on from

    def match(self, n_prompt: int) -> str:
        """The layer, or that the prompt is held to its last token but one."""
        return "exact" if 0 < self.depth == n_prompt - 1 else self.layer


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
    _claim: tuple[Line | None, int, int] = (None, 0, sys.maxsize)  # [0, depth) of it; bytes lacking

    def find(self, prompt: Prompt) -> Reuse:
        """The deepest exact prefix held, short of the last token."""
        limit = self._config.prompt_cache_max_entries_global
        lines = [line for line in self.lines if limit and line.prompt.root == prompt.root]
        lines.sort(key=lambda line: line.last_used, reverse=True)
        found = [Reuse(None, 0), *(self._reusable(line, prompt) for line in lines)]
        # Longest first, promises included; of equals one that needs no copy, then the newest.
        best = max(found, key=lambda x: (max(x.depth, x.promised), x.depth, x.layer == "line"))
        return best._replace(shared=max(reuse.shared for reuse in found))

    def _shared(self, a: Prompt, b: Prompt) -> int:
        if not self._config.cache_use_block_index:
            return common_prefix(a.tokens, b.tokens)
        # Chained hashes agree up to the block where the tokens part, so bisection finds it.
        blocks = range(min(len(a.hashes), len(b.hashes)))
        size = self._config.prompt_cache_block_size
        at = size * bisect_left(blocks, 1, key=lambda i: a.hashes[i] != b.hashes[i])
        return at + common_prefix(a.tokens[at : at + size], b.tokens[at : at + size])

    def _reusable(self, line: Line, prompt: Prompt) -> Reuse:
        tokens = prompt.tokens
        shared = min(self._shared(line.prompt, prompt), len(tokens) - 1)
        promised = shared if line.lender is not None and shared > line.end else 0
        depth = held = min(shared, line.end)
        if is_inside_image(tokens, held):  # why(L-57): an image is fed whole or not at all
            self.metrics.bump("vlm_retreat")
            depth = held = max(start for start in image_starts(tokens) if start < held)
        layer, state = "branch", None
        if self._shape.has_state:
            usable = line.checkpoints_to(held)
            depth = max(usable, default=0)
            layer, state = "checkpoint", usable.get(depth)
        layer = "line" if depth == line.end and line.lender is None else layer
        return Reuse(line, depth, promised, state, layer if depth else "miss", held)

    def acquire(self, reuse: Reuse, prompt: Prompt) -> tuple[Line, Span | None]:
        """Buffers of [0, depth), the row's own (moved or copied), and the line it will grow."""
        line, depth = reuse.line, reuse.depth  # the caller lends it, then `put_back` or `drop`
        if reuse.shared >= self._config.prompt_cache_block_size and not depth:
            self.metrics.bump("hybrid_trim_miss")
        while line is not None and depth <= line.start:
            line = line.parent
        if line is None:
            return self._enter(Line(prompt)), None
        line.uses, line.last_used = line.uses + 1, self.clock()
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

    def _movable(self, line: Line | None, depth: int) -> int:
        if line is None or line.lender or not line.start < depth >= line.end - depth:
            return 0
        return depth - line.start + self._movable(line.parent, line.start)  # tokens, uncopied

    def _move(self, line: Line, depth: int) -> Span | None:
        """KV [0, depth) taken out of a resting line, now lent; None where more of it follows."""
        if not self._movable(line, depth):
            return None
        if depth < line.end:
            self._split(line, depth)
        own, line.span = line.span, None
        assert own is not None
        if (parent := line.parent) is None:
            return own
        if (base := self._move(parent, line.start)) is None:
            return self._copy(parent, line.start).join(own)
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
        line.lender, line.prompt, line.end = None, prompt, len(prompt.tokens)
        line.last_used = self.clock()
        if line.start < max(SHARE_MIN_TOKENS, line.end // SHARE_MIN_PART):
            line.checkpoints, line.parent, line.start = line.checkpoints_to(line.end), None, 0
        line.span = span if line.parent is None else span.cut(line.start, line.end)
        limit = self._config.prompt_cache_max_entries_global
        keep = line if limit and line.end > line.start else None  # why(L-78): it will be continued
        while len(self._resting()) > limit and self._evict_one(keep):
            pass
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
        while line.state_bytes > self.max_bytes * CHECKPOINT_SHARE and self._thin([line]):
            pass

    def _thin(self, lines: list[Line], *, few: int = 3, spare: int = 0) -> bool:
        """Drop a checkpoint where they are densest, but the first, the head's and the last two."""
        for line in sorted(lines, key=lambda line: line.state_bytes)[-1:]:  # where they are largest
            at = sorted(line.checkpoints)
            inner = [i for i in range(1, len(at) - 2) if at[i] not in (spare, line.head)]
            if inner and len(at) > few:
                del line.checkpoints[at[min(inner, key=lambda i: at[i + 1] - at[i - 1])]]
                return True
        return False

    def _enter(self, line: Line) -> Line:
        line.last_used = self.clock()
        self.lines.append(line)
        return line

    def _forget(self, line: Line) -> None:
        self.lines = [other for other in self.lines if other is not line]
        line.span, line.checkpoints = None, {}  # whoever names it still must not keep its bytes

    def _branches(self, line: Line) -> list[Line]:
        return [branch for branch in self.lines if branch.parent is line]

    def release(self, tenant: str, session: str | None) -> int:
        """Forget a session of a tenant, or all of them, but what others need; how many lines."""
        own = [x for x in self._resting() if x.owner[0] == tenant and session in (None, x.owner[1])]
        return sum(map(self._evict, sorted(own, key=lambda x: -x.start)))  # branches come first

    def snapshot(self) -> list[tuple[str, dict[str, Any]]]:
        """The tree of lines for people, each behind its tenant."""
        now, rows = self.clock(), []
        for line in self.lines:
            row: dict[str, Any] = {"id": line.number, "parent": line.parent and line.parent.number}
            row |= {"shared": line.start, "tokens": line.end, "bytes": line.nbytes}
            row |= {"idle_seconds": round(now - line.last_used, 1), "session": line.owner[1]}
            rows.append((line.owner[0], row | {"running": line.lender is not None}))
        return rows

    @property
    def nbytes(self) -> int:  # at rest; what rows hold is theirs to count
        return sum(line.nbytes for line in self.lines)

    def evict_to_fit(self, extra_bytes: int, keep: Line | None = None, *, depth: int = 0) -> bool:
        """Evict until so much more fits, but not [0, depth) of a line: what is moved needs none."""
        while keep and depth <= keep.start:
            keep = keep.parent
        thin = partial(self._thin, self.lines, few=FEW_CHECKPOINTS, spare=depth)  # L-77
        while True:
            moved = self._movable(keep, depth)
            lacks = self.nbytes + extra_bytes - moved * self._shape.token_bytes - self.max_bytes
            self._claim, kept = (keep, depth, lacks), keep if moved else None
            if lacks <= 0 or not (thin() or self._evict_one(kept, per_byte=True) or thin(few=3)):
                self._claim = None, 0, sys.maxsize
                return lacks <= 0

    def sweep(self) -> None:  # evict lines unused for longer than the TTL
        oldest = self.clock() - (self._config.prompt_cache_ttl_seconds or math.inf)
        for line in self._resting():
            if line.last_used < oldest and not self._branches(line):
                self.metrics.bump("evicted_idle", self._evict(line))

    def _resting(self) -> list[Line]:
        return [line for line in self.lines if line.lender is None]

    def _evict_one(self, keep: Line | None, *, per_byte: bool = False) -> bool:
        lines = {x for x in self._resting() if per_byte or not self._branches(x)} - {keep}  # L-78
        has_gone = any(map(self._evict, sorted(lines, key=partial(self._value, per_byte=per_byte))))
        self.metrics.bump("evicted_for_room", has_gone)
        return has_gone

    def _value(self, line: Line, *, per_byte: bool) -> float:
        """Prefill work saved, outgrowing length, x chance of reuse: recent use counts (L-16)."""
        work = (line.end - (self._needed(line) or line.start)) * (1.0 + line.end / 32_768)
        chance = (1.0 + math.log1p(line.uses)) / (1.0 + (self.clock() - line.last_used) / 300.0)
        return work * chance / (max(line.nbytes, 1) if per_byte else 1)

    def _needed(self, line: Line) -> int:
        """The depth below which branches need the line's KV, or a request that will be one."""
        claimed, depth, _ = self._claim
        kept = (x.start for x in self._branches(line) if x.lender is None)  # rows have their own
        return max([depth * (claimed is line), *kept])

    def _evict(self, line: Line) -> bool:
        """Forget a resting line but for what its branches need; False if they need all of it."""
        if (depth := self._needed(line)) == line.end:
            return False
        # why(L-87): of a line of which a little lacks, an eighth at least goes, its newest tokens.
        lost, size = max(self._claim[2], line.nbytes // 8), self._shape.token_bytes or 1
        keep = line.end - 1 - lost // size
        keep = max(line.checkpoints_to(keep), default=0) if self._shape.has_state else keep
        if SHARE_MIN_TOKENS <= keep - line.start <= self.max_bytes // 2 // size:  # it is copied
            depth = max(depth, keep)
        for x in [x for x in self._branches(line) if x.start > depth]:  # their rows have it all
            x.checkpoints |= {n: c for n, c in line.checkpoints.items() if depth < n <= x.start}
            x.parent, x.start = (line, depth) if depth else (line.parent, line.start)
        with suppress(RuntimeError, MemoryError):  # of the copy that a part takes: all goes
            if depth and line.span is not None:
                self._shorten(line, depth, span=line.span.cut(0, depth - line.start))
                return True
        self.drop(line)
        return True


# region 14 SESSIONS ===========================================================
# What each conversation's last turns looked like: how long, how much was cached, by which layer.
# For people (/v1/status, session logs): a wrong session id costs no hit. One monotonic clock.
# Doors   SessionIndex, session_id_of, SessionTurnStore, Sent, sent_again, why_not_more
# Doors   _message_diff, _update_session_turn_store
# Knows CONFIG, WIRE, CANON, KEY · Owns _sessions_lock, _turns_lock · Thread any · Budget 150

_Past = Sequence[object]  # a digest of each message
_SLACK: Final = 16  # tokens: of a generation prompt, or of a block that is not full
_CONTEXT: Final = 40  # characters shown before a difference, and twice as many behind it


def session_id_of(context: SessionContext, tokens: TokenArray, *, first_words: bytes = b"") -> str:
    """The client's id; else a digest of its beginning, to the user's `first_words` if known."""
    head = first_words or np.asarray(tokens[:128], dtype="<i4").tobytes()
    return context.session_id or f"sha1:{sha1(head, usedforsecurity=False).hexdigest()}"


class SessionIndex:
    """The last turns of each session."""

    MOST: Final = 10_000  # sessions

    def __init__(self, config: Config) -> None:
        self._config, self._sessions_lock = config, threading.Lock()
        self._sessions = LRUCache(self.MOST)  # (time of the last turn, turns) by id

    def note(self, session_id: str, facts: Mapping[str, object], *, at: float) -> None:
        most = max(1, self._config.prompt_cache_max_entries_per_session)
        with self._sessions_lock:
            turns = self._sessions.get(session_id, (at, []))[1]
            self._sessions[session_id] = at, [*turns, facts][-most:]

    def snapshot(self, now: float, *, newest: int = 20) -> list[dict[str, Any]]:
        """The sessions used last, the newest first; those that are idle are forgotten."""
        with self._sessions_lock:
            for name, (at, _) in self._sessions.items():
                if now - at > (self._config.prompt_cache_session_max_idle_seconds or math.inf):
                    del self._sessions[name]
            last = islice(self._sessions.items(), newest)
            return [{"id": name, "idle_seconds": now - at, "turns": v} for name, (at, v) in last]


class Sent(NamedTuple):
    """A request as far as one needs it to say how the next one differs."""

    session: str
    tokens: TokenArray  # and those of the reply
    turns: Sequence[Turn]  # canonical
    head: bytes  # stands for the template, the tools and the switches
    at: float = 0.0  # seconds, on the clock of forget()

    @property
    def digests(self) -> list[bytes]:
        return [turn.digest for turn in self.turns]


class SessionTurnStore:
    """The messages of each session's last request, and of its longest past, as digests."""

    MOST: Final = 2_000  # records, two for a session; the least recently used go first

    def __init__(self) -> None:
        self._turns_lock = threading.Lock()  # guards both
        self._records = LRUCache(self.MOST)  # digests by (session, whether it only grows)
        self._sent: list[Sent] = []  # of each conversation the last

    def send(self, sent: Sent) -> None:
        """Keep a request that was answered, in the place of one that it goes on from."""
        with self._turns_lock:
            old, own, name = self._sent, sent.digests, sent.session
            self._sent = [x for x in old if x.session != name or own[: len(x.turns)] != x.digests]
            self._sent.append(sent)
            while sum(len(one.tokens) + 4_000 for one in self._sent) > 2_000_000:  # tokens
                self._sent.pop(0)

    def forget(self, before: float) -> None:
        with self._turns_lock:
            self._sent = [one for one in self._sent if one.at >= before]

    def nearest(self, sent: Sent, *, own: bool) -> Sent | None:
        """The earlier request with most in common; `own`: of its session only."""
        with self._turns_lock:
            among = [one for one in self._sent if not own or one.session == sent.session]
        said = {*sent.digests}
        alike = [(len(said & {*x.digests}), common_prefix(x.tokens, sent.tokens)) for x in among]
        return among[alike.index(max(alike))] if among else None

    def exchange_last(self, session_id: str, digests: _Past, *, only_grows: bool = False) -> int:
        """How many messages are as in the record; `only_grows`: the one that these must extend."""
        with self._turns_lock:
            before: _Past = self._records.get((session_id, only_grows), ())
            stable = _message_diff(before, digests)
            if not only_grows or stable == len(before) < len(digests):
                self._records[session_id, only_grows] = digests
        return stable


def sent_again(before: Sent, now: Sent, *, cached: int) -> int:
    """About how many tokens of messages that were sent before are not among the cached."""
    same, said = common_prefix(before.tokens, now.tokens), set(before.digests)
    n_stable = _message_diff(before.digests, now.digests) * (before.head == now.head)
    sizes = [(turn.digest in said, len(str(turn.canonical))) for turn in now.turns[n_stable:]]
    share = sum(size for is_known, size in sizes if is_known) / max(1, sum(n for _, n in sizes))
    return max(0, same - cached) + int(share * (len(now.tokens) - max(same, cached)))


def why_not_more(before: Sent, now: Sent, *, cached: int, held: int) -> dict[str, Any] | None:
    """Why not all sent before is reused, in words; `held`: tokens with KV, be it without state."""
    same = common_prefix(before.tokens, now.tokens)
    why = _difference(before, now) if len(before.tokens) - same > _SLACK else {}
    if same - cached > _SLACK:
        gone = "KV of what follows was evicted, or dropped after a failure"
        late = "recurrent layers can only go on from a checkpoint"
        kept = f"of {same} tokens that are the same {cached} are cached: "
        kept += late if held - cached > _SLACK else gone
        why["sentence"] = "; ".join(filter(None, (why.get("sentence"), kept)))
    return why or None


def _difference(before: Sent, now: Sent) -> dict[str, Any]:
    """Where the messages part, by the number of the turn; nothing where one only goes on."""
    if before.head != now.head:
        return {"sentence": "the tools, or switches that the template renders first, are others"}
    if (at := _message_diff(before.digests, now.digests)) == len(now.turns):
        return {}
    if at == len(before.turns):
        return {"message": at, "sentence": "the last reply came back changed, or is told otherwise"}
    pair = [one.turns[at].canonical for one in (before, now)]
    is_text = pair[0]["content"] != pair[1]["content"]  # else its calls are others
    was, said = (one["content"] if is_text else str(one) for one in pair)
    start = max(0, _message_diff(was, said) - _CONTEXT)
    cuts = {"was": was[start : start + 3 * _CONTEXT], "is": said[start : start + 3 * _CONTEXT]}
    rule, role = stilling(was, said), now.turns[at].role
    sentence = f"a {role} message differs" + (f" ({rule} can still that)" if rule else "")
    return {"message": at, "role": role, **cuts, "rule": rule, "sentence": sentence}


def _message_diff(before: _Past, now: _Past) -> int:
    """How many leading messages agree."""
    return sum(takewhile(bool, map(lambda old, new: old == new, before, now)))


_update_session_turn_store = partial(SessionTurnStore.exchange_last, only_grows=True)


# region 15 VISION =============================================================
# What an image is to a vision model of mlx-vlm (on mlx-lm's caches): tokens, positions, features.
# It is fed as the embeddings that the tower made of it, at positions of its own in rows and columns
# (mRoPE) that shift what follows: stated at each call, since rows of several talks take turns.
# Doors   View, VisionModel, has_vision
# Knows ERRORS, LOG, IMAGES, KEY, KV · Thread model, mlx; view: any · Budget 166

_KEPT: Final = ("inputs_embeds", "per_layer_inputs", "visual_pos_masks", "deepstack_visual_embeds")
_KNOWN: Final = ("position_ids", "rope_deltas", "attention_mask_4d")  # said at each call; not read


class View(NamedTuple):
    """An image as one model reads it."""

    picture: Picture
    digest: str
    shown: str  # its mark, and what the processor writes around it
    ids: TokenArray  # `(n,)` marks, from its first token to its last
    real: TokenArray  # the tokens of all that is shown
    image: slice  # where its own are
    grid: Any  # rows and columns as the model counts them


def has_vision(path: Path) -> bool:
    """Whether a model folder has a vision tower, with weights, that mlx-vlm has a class for."""
    facts = json.loads((path / "config.json").read_bytes())
    if not isinstance(facts.get("vision_config"), dict):
        return False
    from mlx_vlm import models, utils

    # Conversions by mlx-lm leave the tower's weights out. Loading is lazy: only names are read.
    names = (str(name) for file in path.glob("model*.safetensors") for name in mx.load(str(file)))
    is_whole = any("vision" in name or "visual" in name for name in names)
    return is_whole and Path(models.__path__[0], str(utils.get_model_type(facts))).exists()


def _both_ways(mask: mx.array, image: mx.array) -> mx.array:
    cached = mask.shape[-1] - image.shape[1]
    pairs = mx.pad(image[:, :, None] * image[:, None], [(0, 0), (0, 0), (cached, 0)])
    return mask | (pairs > 0)[:, None]


class VisionModel(Module):  # type: ignore[misc]
    """A model of mlx-vlm that is called as one of mlx-lm: `(tokens, cache=...)` -> logits."""

    def __init__(self, path: Path, **trust: bool) -> None:
        super().__init__()
        from mlx_vlm import utils

        self.whole = utils.load_model(path, **trust)
        self._processor: Any = utils.load_processor(path, False, **trust)
        self._processor.tokenizer.backend_tokenizer.post_processor = None  # no <bos> at each image
        tokens = (getattr(self.whole.config, f"image_token_{x}", None) for x in ("id", "index"))
        self.image_token: int = next(token for token in tokens if token is not None)
        self.phrase = "<image>\n"  # what the chat template prints for an image
        self._rope_index: Any = getattr(self.whole.language_model, "get_rope_index", None)
        inner: Any = getattr(self.whole.language_model, "model", None)
        self._sees_both_ways = hasattr(inner, "_apply_blockwise_bidirectional_overlay")
        if self._sees_both_ways:  # Gemma 4; upstream's own does nothing once there is a cache
            inner._apply_blockwise_bidirectional_overlay = _both_ways
        self._views, self._places = LRUCache(1_000), LRUCache(1_000)  # by digest
        self._features: OrderedDict[str, dict[str, Any]] = OrderedDict()  # used last, last
        self.max_bytes = 0  # of features
        self.secret = uuid.uuid4().bytes  # so that nobody can write a mark, or find two alike

    @property
    def feature_bytes(self) -> int:
        return sum(part.nbytes for part in dict(tree_flatten(self._features)).values())

    def view(self, digest: str, picture: Picture) -> View:
        """The image as tokens; one that was not seen lately is decoded. Raises BadRequest."""
        known: View | None = self._views.get(digest)
        if known:
            return known._replace(picture=picture)
        inputs = self._read(picture)
        real = np.ravel(inputs.pop("input_ids")).astype(np.int32)
        if not (inside := np.flatnonzero(real == self.image_token)).size:
            raise BadRequest("this model's processor makes no tokens of it", at=picture.at)
        image = slice(int(inside[0]), int(inside[-1]) + 1)
        ids = _inject_image_markers(real, image, digest=digest)[image]
        text = partial(self._processor.tokenizer.decode, skip_special_tokens=False)
        shown = f"\ufdd1{digest}\ufdd2".join(map(text, (real[: image.start], real[image.stop :])))
        view = View(picture, digest, shown, ids, real, image, inputs.get("image_grid_thw"))
        self._views[digest] = view._replace(picture=Picture(b"", ""))
        return view

    def try_out(self) -> None:  # raises what it can
        file = io.BytesIO()
        Image.new("RGB", (224, 224)).save(file, "PNG")
        self._seen(self.view("0" * 64, Picture(file.getvalue(), "a blank image")))

    def _read(self, picture: Picture) -> dict[str, Any]:
        opened = picture.opened()
        try:
            read = self._processor(text=[self.phrase], images=[opened])
            return {n: np.array(v) for n, v in read.items() if n != "attention_mask"}
        except Exception as fault:  # a strip too narrow, say
            log.debug("an image cannot be prepared", exc_info=True)
            raise BadRequest("this model cannot take an image like this", at=picture.at) from fault

    def make_cache(self) -> KvCache:  # mlx-lm's caches, in the place of mlx-vlm's own
        return list(map(like_upstream, make_prompt_cache(self.whole.language_model)))

    def __call__(self, tokens: mx.array, cache: KvCache, *, shifts: Sequence[int] = (0,)) -> Any:
        """Logits of text tokens `(rows, n)`. `shifts`: of each row, by the images before."""
        places = {}
        if self._rope_index:
            at = (row_offsets(cache) + mx.array([*shifts]))[:, None] + mx.arange(tokens.shape[1])
            places = {"position_ids": mx.broadcast_to(at, (3, *at.shape))}
        return self.whole.language_model(tokens, cache=cache, **places).logits

    def look(self, tokens: TokenArray, view: View, *, cache: KvCache, at: int) -> str:
        """Feed text and the image it ends with, from this shifted position; what that counts as."""
        n_text = len(tokens) - len(view.ids)
        given, has_run = self._seen(view)
        real = np.concatenate([tokens[:n_text], view.real[view.image]])
        ids = mx.array(real)[None]
        told = self.whole.get_input_embeddings(ids[:, :n_text]).to_dict() if n_text else {}
        for name in ("inputs_embeds", "per_layer_inputs"):
            if told.get(name) is not None:
                given[name] = mx.concatenate([told[name], given[name]], axis=1)
        is_seen = mx.array((real == self.image_token) & (np.arange(len(real)) >= n_text))[None]
        if "visual_pos_masks" in given:
            given["visual_pos_masks"] = is_seen
        if self._sees_both_ways:
            given["mm_token_type_ids"] = is_seen.astype(mx.int32)
        if self._rope_index:
            text = np.broadcast_to(np.arange(n_text), (3, n_text))
            places = np.concatenate([text, self.places(view)[0] + n_text], axis=1) + at
            given["position_ids"] = mx.array(places.astype(np.int32))[:, None]
        given["inputs_embeds"] = mx.array(given["inputs_embeds"])  # Gemma 3 changes it in place
        self.whole.language_model(ids, cache=cache, **given)
        return "vlm_tower_runs" if has_run else "vlm_feature_hits"

    def places(self, view: View) -> tuple[Any, int]:
        """Positions `(3, n)` of the image's tokens, from 0; by how much later ones shift."""
        known: tuple[Any, int] = self._places.get(view.digest, ((), 0))
        if self._rope_index and not len(known[0]):
            ids, grid = mx.array(view.real)[None], mx.array(view.grid)
            places, shift = self._rope_index(ids, image_grid_thw=grid)
            own: Any = np.array(places)[:, 0, view.image]
            known = self._places[view.digest] = own - view.image.start, int(shift.item())
        return known

    def _seen(self, view: View) -> tuple[dict[str, Any], bool]:
        """What the layers want of the image; kept, as far as there is room."""
        kept = self._features.pop(view.digest, None)
        if has_run := kept is None:
            ids = mx.array(view.real[view.image])[None]
            inputs = self._read(view.picture)  # again: nobody holds the pixels of all who wait
            arrays = {n: mx.array(v) for n, v in inputs.items() if n != "input_ids"}
            made = self.whole.get_input_embeddings(ids, mask=mx.ones_like(ids), **arrays).to_dict()
            if unknown := {n for n, v in made.items() if v is not None} - {*_KEPT, *_KNOWN}:
                raise NotImplementedError(f"its layers want {unknown}, which nothing here feeds")
            kept = {n: made[n] for n in _KEPT if made.get(n) is not None}
            mx.eval(kept)
        self._features[view.digest] = kept
        while self.feature_bytes > self.max_bytes:
            self._features.popitem(last=False)
        return dict(kept), has_run


# region 16 MODEL ==============================================================
# Load the model and state the facts that other rooms need of it.
# What is no complete folder, scripts/fetch_model.py finds or fetches, in a process of its own.
# Text comes from DecodeStream, which equals tokenizer.decode(); mlx-lm's own do not (L-72).
# Doors LoadedModel, Detokenizer, ModelError, resolve_model, load_model, banner, memory_limit
# Knows CONFIG, LOG, WIRE, RENDER, VISION · Thread load_model: model; the rest any; mlx · Budget 203

_DEMO: Final = "demo"
_MARKS: Final = ("think_start", "think_end", "tool_call_start", "tool_call_end")
_HARMONY_CALL: Final = ("<|channel|>commentary to=functions.", "<|call|>")
_MORE_MARKS: Final[Iterable[tuple[str, ...]]] = (  # the last is a token that none but these have
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel|>analysis<|message|>", "<|end|>", *_HARMONY_CALL),
)


class ModelError(Exception):
    """Why there is no model, in one sentence; main() prints it and exits 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Facts that hold as long as the process. `model` is for the model thread alone."""

    model: Any
    tokenizer: Any  # mlx-lm's TokenizerWrapper: it knows what tags a reply has
    template: Template
    model_id: str  # what clients see: the repository, the folder's name, or "demo"
    path: Path
    family: str  # "qwen3", "glm4" or "generic"
    revision: str  # 16 hex digits; KV of another revision is never reused
    nbytes: int  # of the weights, as loaded
    vocab_size: int  # ids are below this
    context_length: int  # tokens the model was made for
    limit: int  # tokens of prompt and reply: the least of that, MAX_KV_SIZE and room for KV
    eos_ids: frozenset[int]
    hidden_ids: frozenset[int]  # never shown as text: special tokens without a meaning in a reply

    @property
    def vision(self) -> VisionModel | None:
        return self.model if isinstance(self.model, VisionModel) else None


class Detokenizer:
    """Ids of one reply -> whole characters; joined, tokenizer.decode() of those not hidden."""

    def __init__(self, backend: Any, hidden_ids: frozenset[int]) -> None:
        self._backend, self._hidden_ids = backend, hidden_ids
        self._stream = decoders.DecodeStream(skip_special_tokens=False)
        self._unshown: list[int] = []  # ids of a character that is not complete yet

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" for a hidden id or a part of a character."""
        if token in self._hidden_ids:
            return ""
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # noqa: BLE001 - why(L-95): it raises no narrower one
            self._stream = decoders.DecodeStream(skip_special_tokens=False)
            text = self._backend.decode([*self._unshown, token], skip_special_tokens=False)
        self._unshown = [*self._unshown, token] if text is None else []
        return text or ""

    def finish(self) -> str:
        """What a character cut off at the end decodes to: U+FFFD, as in tokenizer.decode()."""
        rest, self._unshown = self._unshown, []
        return str(self._backend.decode(rest, skip_special_tokens=False))


def resolve_model(config: Config) -> Path:
    """The folder that MODEL_PATH chooses; a first time may take minutes. Raises ModelError."""
    name, here = _chosen(config), Path(__file__).resolve().parent
    if _is_complete(at := Path(here / "models" if name == _DEMO else "", os.path.expanduser(name))):
        return at
    script = here / "scripts" / "fetch_model.py"
    command = [sys.executable, str(script), f"--memory-bytes={memory_limit(config)}", "--", name]
    if not script.is_file():  # this file was copied alone: then the hub must say what it does
        fetch = "import sys, huggingface_hub as hub\ntry: print(hub.snapshot_download(sys.argv[1]))"
        fetch += "\nexcept Exception as e: sys.exit(print('incomplete, and not fetched:', e) or 1)"
        command = [sys.executable, "-c", fetch, name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(process.terminate)  # it does not go on when we are told to stop
    said, _ = process.communicate()
    if process.returncode:
        why = " ".join(said.split()) or f"{script.name} says why above ({process.returncode})"
        raise ModelError(f"MODEL_PATH={name}: {why}")
    return Path(said.splitlines()[-1])


def _chosen(config: Config) -> str:
    is_apple_silicon = (os.uname().sysname, os.uname().machine) == ("Darwin", "arm64")
    named = re.sub("^https://huggingface.co/([^/]+/[^/]+)(/.*)?$", r"\1", config.model_path)
    return named or ("lmstudio-community/GLM-4.7-Flash-MLX-4bit" if is_apple_silicon else _DEMO)


def _is_complete(folder: Path) -> bool:
    with suppress(Exception):  # what is wrong with it, fetch_model.py says
        index = folder / "model.safetensors.index.json"
        listed = json.loads(index.read_bytes())["weight_map"].values() if index.is_file() else ()
        return all(any(folder.glob(n)) for n in {"config.json", "model*.safetensors", *listed})
    return False


def load_model(path: Path, config: Config) -> LoadedModel:
    """Read weights and tokenizer, on the model thread, where they must stay. Raises ModelError."""
    try:
        model, tokenizer, facts = _parts(path, config)
        _teach(tokenizer)
        name, facts = _chosen(config), {**facts, **(facts.get("text_config") or {})}
        tags = {name: getattr(tokenizer, name) or "" for name in ("think_start", "think_end")}
        template = Template(tokenizer, config, **tags, ends=tokenizer.eos_token_ids)
        if isinstance(model, VisionModel):
            model.phrase = template.image_phrase() or model.phrase
            model.try_out()
        hint = f"{name} {facts['model_type']}".lower()
        family = next((known for known in ("qwen3", "glm4") if known[:-1] in hint), "generic")
        context_length = _context_length(facts, tokenizer.model_max_length)
        # Which weights these are. Not a hash of their bytes: 17 GB take a minute to read.
        stamps = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.glob("*.safe*")]
        identity = repr(sorted(stamps)).encode() + (path / "config.json").read_bytes()
        return LoadedModel(
            model=model,
            tokenizer=tokenizer,
            template=template,
            model_id=path.resolve().name if path == Path(name).expanduser() else name,
            path=path,
            family=family if config.model_family == "auto" else config.model_family,
            revision=sha256(identity).hexdigest()[:16],
            nbytes=sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values()),
            vocab_size=int(facts.get("vocab_size") or len(tokenizer)),
            context_length=context_length,
            limit=min(context_length, config.max_kv_size),
            eos_ids=frozenset(tokenizer.eos_token_ids),
            hidden_ids=_hidden_ids(tokenizer),
        )
    except Exception as error:  # mlx and transformers raise what they like
        log.debug("loading %s", path, exc_info=True)
        why = f"cannot be loaded by mlx-lm {mlx_lm.__version__} or mlx-vlm: {error!r}"
        raise ModelError(f"The model in {path} {why}"[:500]) from error


def _parts(path: Path, config: Config) -> Any:
    """Model, tokenizer and config.json, by the library that knows this kind of model."""
    trust: Body = {"trust_remote_code": config.trust_remote_code}
    if config.model_kind == "text" or (config.model_kind == "auto" and not has_vision(path)):
        return mlx_lm.load(str(path), trust, return_config=True, **trust)
    facts, told = mlx_lm.utils.load_config(path), {**trust}
    if (template := path / "chat_template.json").is_file():  # a processor's; no tokenizer reads it
        told |= json.loads(template.read_bytes())
    tokenizer = mlx_lm.utils.load_tokenizer(path, told, eos_token_ids=facts.get("eos_token_id"))
    return VisionModel(path, **trust), tokenizer, facts


def _teach(tokenizer: Any) -> None:
    """Tell mlx-lm's wrapper what marks a reply has where it does not know them (L-88)."""
    vocabulary = {} if tokenizer.think_start else tokenizer.get_vocab()
    for marks in _MORE_MARKS:
        is_new = marks[-1] in vocabulary and not (marks[2:] and tokenizer.tool_call_start)
        for name, mark in zip(_MARKS, marks if is_new else (), strict=False):
            ids = tokenizer.encode(mark, add_special_tokens=False)
            vars(tokenizer).update({f"_{name}": mark, f"_{name}_tokens": tuple(ids)})
            if name == "tool_call_end":
                tokenizer.add_eos_token(mark)


def _context_length(facts: dict[str, Any], tokenizer_length: int) -> int:
    """Tokens. Configs state the length before YaRN (Qwen3) or after (DeepSeek): the larger one."""
    stated = int(facts.get("max_position_embeddings") or facts.get("n_positions") or 0)
    rope = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) == "yarn":
        stated = max(stated, int(rope.get("original_max_position_embeddings", 0) * rope["factor"]))
    unknown = 131_072 if facts.get("model_type") == "gemma3_text" else 32_768  # left out by 4B on
    return stated or (tokenizer_length if tokenizer_length < 2**31 else unknown)  # or 1e30


def _hidden_ids(tokenizer: Any) -> frozenset[int]:
    shown = {i for mark in _MARKS for i in getattr(tokenizer, f"{mark}_tokens") or ()}
    parser = tokenizer.tool_parser
    # A special token that the parser's source names is grammar (gemma4's <|"|>), and that of L-90.
    grammar = inspect.getsource(sys.modules[parser.__module__]) + "[CALL_ID]" if parser else ""
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    shown |= {i for i, text in special.items() if text in grammar or re.escape(text) in grammar}
    return frozenset(special.keys() - shown | tokenizer.eos_token_ids)


def memory_limit(config: Config) -> int:
    """Bytes for model, KV and buffers: 0.9 of Metal's recommendation, a GPU's memory, the RAM."""
    facts, ram = mx.device_info(), psutil.virtual_memory().total
    most = facts.get("max_recommended_working_set_size") or facts.get("total_memory") or ram
    return config.memory_limit_bytes or int(0.9 * int(most))


def banner(model: LoadedModel, config: Config) -> str:
    """The lines a person reads once the server is up."""
    host = f"[{config.mlx_host}]" if ":" in config.mlx_host else config.mlx_host
    demo = "This is the demo model: it calls tools, reads what they say, and knows little else.\n"
    return (
        f"{model.model_id} is served at http://{host}:{config.mlx_port}/v1\n"
        f"  from {model.path}: {in_bytes(model.nbytes)} of weights, {model.limit:,} tokens of "
        f"context (the model: {model.context_length:,})\n{demo if model.model_id == _DEMO else ''}"
        "To serve another, set MODEL_PATH to a folder or a repository (mlx-community/Qwen3-4B-4bit)"
    )


# region 17 ENGINE =============================================================
# The model thread: admit, prefill in slices, decode in groups, give every row's KV back.
#     inbox -> waiting -> prefill (one slice at a time) -> decode (one step per group) -> put back
# A lone row decodes where its KV lies. Rows of like length decode as one batch; a short row never
# pays for a long one's padding. mlx-lm's BatchGenerator merges all on insertion (a lone 32k row
# needs its KV twice): the GenerationBatch inside it is used, and told never to finish a row.
# Doors Engine, Ticket, Job, Token, Finished, Event, Logprob, Constraint, avoid
# Doors think_at_most, follow · Knows CONFIG, ERRORS, LOG, WIRE, KEY, KV, CACHE, VISION, MODEL
# Thread model, mlx; Ticket and Engine: any · Budget 768

SLICE_MIN_TOKENS: Final = 64
DECODE_SHARE: Final = 2.0  # seconds of decoding for one of prefill beside it
WAITING_SHARE: Final = 8.0  # why(L-71): seconds of waiting that one of prefill makes good
WAIT_GAIN_TOKENS: Final = 64  # a prefix another row is computing is worth waiting for from here on
HEADROOM_SHARE: Final = 32  # spare buffer per row: this part of its prompt, for the reply
FEATURE_SHARE: Final = 8  # this part of the KV budget, for what the tower made of images
OPENING_TOKENS: Final = 64  # of a prompt's end that the first decode step may feed as well
LATTICE_TOKENS: Final = 2048  # spacing of checkpoints inside long prefills
_greedy: Final = partial(mx.argmax, axis=-1)
_noise: Final = mx.vmap(lambda key: mx.random.gumbel(key=key))  # of each id, by a key of its own
IDLE_SECONDS: Final = 1.0  # without a request, until unused buffers go back; 60 while KV is held
BACKLOG_EVENTS: Final = 4096  # that a client may leave unread before it is dropped
NO_TOKEN: Final = -1  # in the place of one that nothing could be sampled for
_GONE: Final = "the model cannot be used any more; the server's log says why"

Logprob = tuple[float, tuple[tuple[int, float], ...]]  # of a token, and the top alternatives
EndReason = Literal["stop", "length", "cancelled", "deadline", "failed"]
type Course = Generator[Next, list[int]]  # yields what may come, is sent the tokens that came
type Constraint = Callable[[], Course]  # a course for each row
type Event = int | Token | Finished | ServerError  # int: of the prompt's tokens, so many have KV
type _Load = Callable[[], LoadedModel]


class Next(NamedTuple):  # what may come in the next `n_places`: these ids only, or any but these
    ids: Sequence[int] | npt.NDArray[np.bool_]  # or, of each id, whether it is one of them
    only: bool = True
    n_places: int = 1


def avoid(ids: Sequence[int]) -> Course:
    """None of these tokens, ever."""
    yield Next(ids, only=False, n_places=sys.maxsize)


def think_at_most(n_tokens: int, *, start: Sequence[int], ends: Sequence[int]) -> Course:
    """The first of `ends` (L-82) if none came in `n_tokens` of a thought that `start` may open."""
    said = yield Next([], only=False, n_places=n_tokens + len(start))
    if said[: len(start)] == start and not {*ends} & {*said}:
        yield Next(ends[:1])
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
    images: tuple[tuple[int, View], ...] = ()  # by the position of their first token, ascending
    owner: tuple[str, str] = ("", "")  # tenant and session
    top_logprobs: int = -1  # -1: no logprobs at all
    constraints: tuple[Constraint, ...] = ()

    @property
    def n_prompt(self) -> int:
        return len(self.prompt.tokens)


class Token(NamedTuple):
    """A generated one; with its log-probabilities if they were asked for."""

    id: int
    logprob: Logprob | None = None


class Finished(NamedTuple):
    """The line is back in the cache: prompt and reply."""

    reason: EndReason
    cached: int = 0
    match: str = "miss"
    held: int = 0  # leading tokens of which there was KV, be it without the state to go on from
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)  # in queue, prefill, decode


class Ticket:
    """A job on its way: events come out, a wish goes in. Any thread."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.marks = [time.monotonic()]  # the engine's: when submitted, admitted, decoding
        self.wish: EndReason | None = None  # ends the row if it still runs; its KV is kept
        self.match = "-"  # what it reuses, once that is known
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put, self.n_unread = self._events.put, self._events.qsize

    def seconds(self) -> tuple[float, float, float]:
        """Waiting, prefill and decode, as far as they are."""
        submitted, admitted, decoding, ended = [*self.marks, *[time.monotonic()] * 2][:4]
        return admitted - submitted, decoding - admitted, ended - decoding

    def next_event(self, timeout: float) -> Event | None:  # None: nothing came for so long
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None


def _samplable(logprobs: mx.array, sampling: Sampling) -> tuple[mx.array, mx.array]:
    """What may be sampled of `(1, vocab)`: log-probabilities, -inf for what may not; their ids."""
    k, values = sampling.top_k, logprobs[0].astype(mx.float32)
    ids, whole = mx.arange(values.size, dtype=mx.uint32), mx.logsumexp(values)
    for width in (128, 1):  # why(L-100): the best are in the blocks with the best; sorting is slow
        if 0 < k * width < values.size:
            lacks = 0, -values.size % width
            blocks = mx.pad(values, lacks, constant_values=-mx.inf).reshape(-1, width)
            named = mx.pad(ids, lacks, constant_values=logprobs.size - 1).reshape(-1, width)
            best = mx.argpartition(-blocks.max(axis=-1), kth=k - 1)[:k]
            values, ids = blocks[best].reshape(-1), named[best].reshape(-1)
    if sampling.top_p < 1:  # a share of the whole, whatever is left of it
        share = mx.exp(whole - mx.logsumexp(values))
        values = apply_top_p(values, max(sampling.top_p, 1e-6) * share)
    return (apply_min_p(values, sampling.min_p) if sampling.min_p > 0 else values), ids


def _sampler(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """Log-probabilities `(1, vocab)` -> a token `(1,)`, from a random key the row owns."""
    if sampling.temperature < 1e-6:  # float32 has no room for its inverse
        return _greedy  # one object: it is called once for all rows that share it
    seed = sampling.seed if sampling.seed is not None else time.time_ns()
    keys = [mx.random.key(seed % (1 << 63))]  # so a seed gives the same text in a batch

    def sample(logprobs: mx.array) -> mx.array:
        keys[0], key = mx.random.split(keys[0])
        values, ids = _samplable(logprobs, sampling)
        own = mx.stack([mx.broadcast_to(key[0], ids.shape), ids ^ key[1]], axis=1)
        return ids[mx.argmax(values / sampling.temperature + _noise(own), keepdims=True)]

    return sample


def _enforced(constraint: Constraint) -> Callable[[mx.array, mx.array], mx.array]:
    """Reads what came only when the constraint wants to know: reading waits for the model."""
    course, seen, due = constraint(), 0, 0
    mask: mx.array | None = None

    def bend(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal seen, due, mask
        if tokens.size >= due:
            said: Any = tokens[seen:].tolist() if seen else None
            may = course.send(said)
            seen, due = tokens.size, tokens.size + may.n_places
            listed = np.zeros(logits.shape[-1], np.bool_)
            if isinstance(may.ids, np.ndarray):  # a tokenizer may know more ids than the model
                listed[: may.ids.size] = may.ids[: listed.size]
            else:
                listed[list(may.ids)] = True
            mask = mx.array(listed == may.only) if len(may.ids) else None
        return logits if mask is None else mx.where(mask, logits, -mx.inf)

    return bend


def _processors(job: Job) -> list[Callable[[mx.array, mx.array], mx.array]]:
    s, size = job.sampling, min(job.sampling.repetition_context_size, 1 << 20)
    repetition = s.repetition_penalty if s.repetition_penalty != 1.0 else None
    penalties = (repetition, size, s.presence_penalty, size, s.frequency_penalty, size)
    bent = make_logits_processors(dict(s.logit_bias), *(penalties if size else ()))
    return [*bent, *map(_enforced, job.constraints)]


@dataclass(eq=False, slots=True)
class Row:  # a request on the model; its KV is exactly prompt + `out`, cut at `fed`
    ticket: Ticket
    job: Job  # the ticket's
    line: Line
    cache: KvCache  # empty while a group holds it
    fed: int
    reuse: Reuse
    stops: list[int]  # ascending positions where a prefill slice must end
    speed: float  # of its last prefill slice, or another row's, in tokens per second
    shifts: dict[int, int] = field(default_factory=dict)  # of positions behind an image, by its own
    out: list[int] = field(default_factory=list)
    group: Group | None = None

    @property
    def to_prefill(self) -> int:
        return self.job.n_prompt - 1 - self.fed

    def shift(self, at: int) -> int:
        """By how much the images before this position of the prompt move what follows them."""
        return sum(shift for start, shift in self.shifts.items() if start < at)

    def read_span(self, end: int) -> Span:
        """Copy KV [0, end) while the row runs, wherever it lies now."""
        if (group := self.group) is None:
            return copy_span(self.cache, end, row=0)
        return copy_span(group.batch.prompt_cache, end, row=group.rows.index(self))

    def prompt_fed(self, block_size: int) -> Prompt:
        root, tokens, hashes = self.job.prompt
        tokens = np.concatenate([tokens, np.asarray(self.out, dtype=np.int32)])[: self.fed]
        return Prompt(root, tokens, _block_hashes(tokens, block_size, root=root, known=hashes))

    def tell(self, token: int, *, logprobs: mx.array) -> None:
        """Add a token. `logprobs`: `(vocab,)`, computed, of all tokens in the place of this one."""
        bits = np.frombuffer(logprobs, np.uint16)  # why(L-54): one bad logit makes all of them bad
        infinite = 0x7C00 if logprobs.dtype == mx.float16 else 0x7F80  # an exponent of ones
        own = bits[(token + 1) * bits.size // logprobs.size - 1]  # its upper half
        self.out.append(token if own & infinite != infinite else NO_TOKEN)
        if NO_TOKEN in self.out[-2:]:
            return
        asked: Logprob | None = None
        if self.job.top_logprobs >= 0:
            k = min(self.job.top_logprobs, logprobs.size - 1)
            some = mx.argpartition(-logprobs, k)[:k] if k else mx.zeros(0, mx.uint32)
            best: Any = some[mx.argsort(-logprobs[some])].tolist()
            values: Any = logprobs[mx.array([token, *best])].tolist()
            asked = (values[0], tuple(zip(best, values[1:], strict=True)))
        self.ticket.put(Token(token, asked))


def _model_for(loaded: LoadedModel, rows: Sequence[Row]) -> Callable[..., Any]:
    """Text tokens `(rows, n)` and the cache of all that these rows were fed -> logits."""
    if (vision := loaded.vision) is None:
        return loaded.model  # type: ignore[no-any-return]
    return lambda tokens, cache: vision(tokens, cache, shifts=[row.shift(row.fed) for row in rows])


def _feed(row: Row, tokens: TokenArray, *, loaded: LoadedModel, cache: LRUPromptCache) -> bool:
    """The next tokens of a prompt; whether they end with an image."""
    at = row.fed + row.shift(row.fed)
    views = [view for start, view in row.job.images if row.fed <= start < row.fed + len(tokens)]
    with _noting(row, len(tokens), cache=cache):
        for view in views:
            cache.metrics.bump(loaded.model.look(tokens, view, cache=row.cache, at=at))
        if not views:
            _model_for(loaded, [row])(mx.array(tokens)[None], cache=row.cache)
        evaluate(row.cache)
    return bool(views)


class Group:  # rows decoding together: one on its own buffers, or several in upstream's batch form
    def __init__(self, loaded: LoadedModel, row: Row) -> None:
        """Feed what is left of the row's prompt, and tell its first token."""
        processors, tokens = _processors(row.job), row.job.prompt.tokens
        context = tokens[:-1][tokens[:-1] >= 0].tolist() if processors else []  # no image marks
        offset = _kv_cache_offset(row.cache, recorded=row.fed)
        rest = mx.array(_remaining_prefill(tokens, offset))[None]
        self.rows = [row]
        model = _model_for(loaded, self.rows)
        # why(L-47): a call of its own pays on the CPU: the last layer skips rows nobody samples.
        if mx.default_device() == mx.cpu and rest.size >= 16:
            model(rest, cache=row.cache)
            evaluate(row.cache)  # or the next write would copy the buffers this call still reads
            rest = rest[:, :0]

        def first(inputs: mx.array, cache: KvCache) -> Any:
            return model(mx.concatenate([rest, inputs], axis=1), cache=cache)

        self._before: KvCache | None = None
        rules = [context], [_sampler(row.job.sampling)], _greedy, [processors]
        bounds = [StopSequences()], [1 << 60]  # tokens: it finishes no row itself
        self.batch = GenerationBatch(first, [0], mx.array(tokens[-1:]), row.cache, *rules, *bounds)
        self.batch.model = model
        row.fed, row.group, row.cache = len(tokens), self, []
        (token,) = self.batch._next_tokens.tolist()
        row.tell(token, logprobs=self.batch._next_logprobs[0])
        time.sleep(0.0005)  # why(L-46): or it leaves when the second is launched

    def step(self) -> None:
        """Advance all rows one token, and tell it; it is being fed already (L-10): `fed` has it."""
        self._before = recurrent_handles(self.batch.prompt_cache)
        for row, response in zip(self.rows, self.batch.next(), strict=True):
            if row.fed == row.job.n_prompt + len(row.out):  # the first token has been told
                row.tell(response.token, logprobs=response.logprobs)
            row.fed += 1

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.batch.prompt_cache)

    def padding_with(self, n_tokens: int) -> float:
        """Padded tokens as a share of the real ones, were a row of this length to join."""
        lengths = [*(row.fed for row in self.rows), n_tokens]
        return max(lengths) * len(lengths) / sum(lengths) - 1

    def absorb(self, other: Group) -> None:
        """Join another group's rows to this batch; the other group must not be used again."""
        for row in other.rows:
            row.group = self  # so that a failure in what follows is one of them all
        for group in (self, other):
            if len(group.rows) == 1:
                group.batch.prompt_cache = to_batch(group.batch.prompt_cache)
        self.batch.extend(other.batch)
        evaluate(self.batch.prompt_cache)  # why(L-69): or one more copy is made in the same launch
        self._before = None
        self.rows += other.rows

    def leave(self, row: Row) -> StateSnapshot | None:
        """Take a row out, its KV back in `row.cache`; returns its state before the last token."""
        index = self.rows.index(row)
        before = snapshot_state(self._before, row=index) if self._before else None
        row.cache = self.batch.prompt_cache
        if len(self.rows) > 1:
            row.cache = row_from_batch(self.batch.prompt_cache, index)
            self.batch.filter([i for i in range(len(self.rows)) if i != index])
            evaluate(self.batch.prompt_cache)
        self.rows.remove(row)
        if len(self.rows) == 1:  # back to buffers of its own, which can be put back without a copy
            self.batch.prompt_cache = row_from_batch(self.batch.prompt_cache, 0)
        row.group, self._before = None, None
        return before


class Scheduler:  # everything that happens on the model thread, one `turn` at a time
    def __init__(self, loaded: LoadedModel, config: Config, *, metrics: CacheMetrics) -> None:
        self.loaded, self.config, self.shape = loaded, config, measure_kv(loaded.model)
        self.limit = memory_limit(config)
        free = self.limit - loaded.nbytes
        budget = min(config.prompt_cache_max_bytes or free, int(free * 0.55))
        self._working_bytes = free - budget  # for all that is neither weights, KV nor features
        if loaded.vision:
            loaded.vision.max_bytes = budget // FEATURE_SHARE
            budget -= loaded.vision.max_bytes
        self._slices: deque[tuple[int, float, float]] = deque(maxlen=32)  # end, bytes/token, speed
        self.cache = LRUPromptCache(config, self.shape, max_bytes=budget, metrics=metrics)
        self.waiting, self.rows = list[Ticket](), list[Row]()
        self._owed_seconds = self._credit = 0.0  # due to decoding, and to the oldest of prefills
        spaced_bytes = (HEADROOM_SHARE + 1) * max(self.shape.token_bytes, 1)
        self.capacity_tokens = (budget - _row_bytes(self.shape, 0)) * HEADROOM_SHARE // spaced_bytes

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    @property
    def prefilling(self) -> list[Row]:
        return [row for row in self.rows if row.group is None]

    @property
    def groups(self) -> list[Group]:
        return list(dict.fromkeys(row.group for row in self.rows if row.group))

    def turn(self) -> None:
        """End what is over, admit what fits, a decode step per group, a slice or who can join."""
        self._end_unwanted()
        for ticket in self.waiting[:32]:  # each takes a lookup
            if len(self.rows) >= self.config.batch_max_rows or not self._admit(ticket):
                break
        began = time.monotonic()
        for group in self.groups:
            self.guarded(list(group.rows), partial(self._decode, group))
        self._owed_seconds = max(0.0, self._owed_seconds - (time.monotonic() - began))
        while rows := self.prefilling:
            # why(L-71): the one that ends first, but a share of the time is the oldest one's.
            row = min(rows, key=lambda x: x.ticket.marks[0] if self._credit > 0 else x.to_prefill)
            # why(L-68): decoding gets its due, but waits for who can join: a step costs the same.
            borrowed_seconds = 3.0 if row.to_prefill / row.speed < 0.5 else 0.0
            if not self.groups or self._owed_seconds <= borrowed_seconds:
                self.guarded([row], partial(self._prefill, row))
            if not row.group or time.monotonic() - began > 0.2:
                break

    def _admit(self, ticket: Ticket) -> bool:
        """Start a waiting job unless it had better wait; False: nor may those behind it start."""
        try:
            reuse = self.cache.find(ticket.job.prompt)
            if reuse.promised - reuse.depth >= WAIT_GAIN_TOKENS:
                for row in [row for row in self.rows if row.line is reuse.line]:
                    row.stops = sorted({*row.stops, min(reuse.promised, row.job.n_prompt - 1)})
                return True
            fits = partial(self._make_room, _row_bytes(self.shape, ticket.job.n_prompt))
            if fits(reuse.line, depth=reuse.depth) or (not self.rows and fits()):
                self._start(ticket)
            elif self.rows:
                return time.monotonic() - ticket.marks[0] < 30  # smaller ones may pass
            else:
                ticket.put(self._no_room(ticket.job.n_prompt))
        except Exception as error:
            log.exception("a request could not be started")
            self.cache.mend()
            ticket.put(_failure(error, self.cache))
        self.waiting.remove(ticket)
        return True

    @property
    def running_bytes(self) -> int:  # of KV that rows hold, or will when their prompts are read
        prefilling = (_row_bytes(self.shape, row.job.n_prompt) for row in self.prefilling)
        return sum(prefilling) + sum(group.nbytes for group in self.groups)

    def _make_room(self, more_bytes: int, keep: Line | None = None, *, depth: int = 0) -> bool:
        """Evict for more than what runs has; nothing if its checkpoints are in the way (L-97)."""
        needed, few = self.running_bytes + more_bytes, FEW_CHECKPOINTS * self.shape.state_bytes
        least = needed + sum(min(row.line.state_bytes, few) for row in self.rows)
        return least <= self.cache.max_bytes and self.cache.evict_to_fit(needed, keep, depth=depth)

    def _no_room(self, n_tokens: int) -> ServerError:
        held = f"{self.running_bytes:,} of {self.cache.max_bytes:,} bytes of KV are in use"
        return Overloaded(f"no memory for {n_tokens:,} tokens now: {held}")

    def hold_limit(self) -> None:
        """Rows grow as they decode: if all is theirs, that begun last ends, its KV kept (L-79)."""
        while self.running_bytes > self.cache.max_bytes and self.rows[1:]:
            row = max(self.rows, key=lambda row: row.ticket.marks[1])
            self.guarded([row], partial(self._finish, row, self._no_room(row.fed)))
        lacking = max([0, *(group.nbytes - self._working_bytes for group in self.groups)])  # L-69
        self.cache.evict_to_fit(self.running_bytes + lacking)

    def _start(self, ticket: Ticket) -> None:
        ticket.marks.append(time.monotonic())
        job = ticket.job
        reuse = self.cache.find(job.prompt)  # again: making room may have evicted what was found
        line, span = self.cache.acquire(reuse, job.prompt)
        cache = make_prompt_cache(self.loaded.model)  # why(L-09): of no maximum size
        if span is not None:
            lend_span(cache, span)
            del span  # why(L-105): or `reserve` would hold all of it twice
        if reuse.state is not None:
            restore_state(cache, reuse.state)
        offset = _kv_cache_offset(cache, recorded=reuse.depth)
        assert offset == reuse.depth, "the cache is not as deep as the lookup said"
        reserve(cache, job.n_prompt, roomy=_with_headroom(job.n_prompt))
        speed = self._slices[-1][2] if self._slices else 2000.0  # at first
        stops = _stops(job, offset, shape=self.shape)
        row = Row(ticket, job, line, cache, offset, reuse._replace(state=None), stops, speed)
        row.shifts = {at: self.loaded.model.places(view)[1] for at, view in job.images}
        line.lender, line.end, line.owner = row.read_span, offset, job.owner
        line.head, ticket.match = min(job.boundaries, default=0), reuse.match(job.n_prompt)
        self.rows.append(row)
        ticket.put(offset)

    def _prefill(self, row: Row) -> None:
        """One slice; what little is left then goes with the first decode step."""
        began = time.monotonic()
        if row.to_prefill > OPENING_TOKENS or row.stops:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            offset = _kv_cache_offset(row.cache, recorded=row.fed)
            pending = _remaining_prefill(row.job.prompt.tokens, offset)[: _slice_length(self, row)]
            seen = _feed(row, pending, loaded=self.loaded, cache=self.cache)
            row.fed = row.line.end = row.fed + len(pending)
            took = time.monotonic() - began
            if len(pending) >= SLICE_MIN_TOKENS and not seen:  # less measures the call
                row.speed = len(pending) / max(took, 1e-6)
                n_bytes = (mx.get_peak_memory() - before) / len(pending)
                self._slices.append((row.fed, n_bytes, row.speed))
            mx.clear_cache()
            reserve(row.cache, row.job.n_prompt, roomy=_with_headroom(row.job.n_prompt))
            self._owed_seconds = took * DECODE_SHARE + (self._owed_seconds if self.groups else 0.0)
            row.ticket.put(row.fed)
        if row.stops and row.fed == row.stops[0]:
            row.stops.pop(0)
            self.cache.add_checkpoint(row.line, row.fed, snapshot=snapshot_state(row.cache))
        if row.to_prefill <= OPENING_TOKENS and not row.stops:
            self._begin_decode(row)
        took = time.monotonic() - began
        self._credit += took if self._credit <= 0 else -took * WAITING_SHARE
        if not {*self.prefilling} - {row}:  # alone: as much as a slice of it, paid in advance
            self._credit = -0.2 * WAITING_SHARE

    def _begin_decode(self, row: Row) -> None:
        """Decode in the group whose rows are most alike in length, or in one of its own."""
        others = self.groups if self.shape.can_batch else []
        row.ticket.marks.append(time.monotonic())
        with _noting(row, row.job.n_prompt - row.fed, cache=self.cache):
            group = Group(self.loaded, row)
        row.line.end = row.fed
        hosts = [x for x in others if x.padding_with(row.fed) <= self.config.batch_padding_max]
        host = min(hosts, key=lambda x: x.padding_with(row.fed), default=None)
        lacking = 2 * (host.nbytes + group.nbytes) - self._working_bytes if host else 0  # L-69
        if host and self._make_room(max(0, lacking)):
            host.absorb(group)

    def _decode(self, group: Group) -> None:
        group.step()
        for row in list(group.rows):
            if NO_TOKEN in row.out[-2:]:
                group.leave(row)
                self._fail([row], GenerationFailed("the model computed NaN or infinity"))
            elif (ends := row.out[-1] in self.loaded.eos_ids) or len(row.out) >= row.job.max_tokens:
                self._finish(row, "stop" if ends else "length")

    def _end_unwanted(self) -> None:
        now, patience = time.monotonic(), self.config.queue_timeout_seconds or math.inf
        for ticket in list(self.waiting):
            if ticket.wish or now - ticket.marks[0] > patience:
                self.waiting.remove(ticket)
                late = f"the model had no time for {patience:g} s (QUEUE_TIMEOUT_SECONDS)"
                ticket.put(Finished("cancelled") if ticket.wish else Overloaded(late))
        deadline = self.config.generation_watchdog_seconds or math.inf
        for row in list(self.rows):
            if row.group is None and row.fed == row.reuse.depth:  # it still waits for its turn
                row.ticket.marks[1] = now
            reason = row.ticket.wish
            if row.ticket.n_unread() > BACKLOG_EVENTS:
                log.warning("a client is dropped that does not read its reply")
                reason = "cancelled"
            elif not reason and now - row.ticket.marks[1] > deadline:
                log.warning("a reply ends after GENERATION_WATCHDOG_SECONDS (%g)", deadline)
                reason = "deadline"
            if reason:
                self.guarded([row], partial(self._finish, row, reason))

    def _finish(self, row: Row, end: EndReason | ServerError) -> None:
        """Put the row's KV back, then tell the connection: its next request must find it."""
        if row.group and (before := row.group.leave(row)):
            self.cache.add_checkpoint(row.line, row.fed - 1, snapshot=before)
        if row.fed == 0 or NO_TOKEN in row.out:  # the last turn saw NaN, though the client left
            self.cache.drop(row.line)
        else:
            self.cache.add_checkpoint(row.line, row.fed, snapshot=snapshot_state(row.cache))
            prompt = row.prompt_fed(self.config.prompt_cache_block_size)
            self.cache.put_back(row.line, prompt, span=take_span(row.cache, row.fed))
        self.rows.remove(row)
        facts = row.reuse.depth, row.ticket.match, row.reuse.shared, row.ticket.seconds()
        row.ticket.put(end if isinstance(end, ServerError) else Finished(end, *facts))

    def guarded(self, touched: list[Row], action: Callable[[], None]) -> None:
        """Run one action; if it raises, the rows it touched fail, and the engine goes on."""
        try:  # why(L-17): what an exception interrupted may be half written; nothing of it is kept.
            action()
        except Exception as error:
            log.exception("the model failed on %d request(s)", len(touched))
            groups = {row.group for row in touched if row.group}
            failed = [row for row in self.rows if row in touched or row.group in groups]
            self._fail(failed, _failure(error, self.cache))

    def _fail(self, rows: Iterable[Row], error: ServerError) -> None:
        """End rows whose KV may be wrong, or is: it goes, and what was built on it."""
        for row in rows:
            self.rows.remove(row)
            self.cache.drop(row.line)
            row.cache, row.group = [], None
            row.ticket.put(error)


def _slice_length(work: Scheduler, row: Row) -> int:
    """Tokens of the next slice: to the next stop, and short while others wait their turn."""
    to_stop = min([row.to_prefill, *(stop - row.fed for stop in row.stops[:1])])
    timely = row.speed * (0.4 if len(work.rows) + len(work.waiting) == 1 else 0.2)  # seconds
    if work._slices:  # no more than the working memory has room for
        # why(L-55): where attention scores are kept, a token costs bytes with its depth.
        depths, costs, _ = np.array([*work._slices]).T
        slope = np.polyfit(depths, costs, 1)[0] if np.ptp(depths) else 0.0
        cost = costs.mean() + max(slope, 0.0) * (row.fed - depths.mean())
        timely = min(timely, work._working_bytes / max(2 * cost, 1.0))
    length = min(to_stop, max(SLICE_MIN_TOKENS, int(timely)), work.config.prefill_step_size)
    if to_stop - length < WAIT_GAIN_TOKENS:  # or all who wait for it would prefill that rest
        return to_stop
    while is_inside_image(row.job.prompt.tokens, row.fed + length):
        length -= 1
    return length or to_stop  # which is the image's end


def _row_bytes(shape: KvShape, n_prompt: int) -> int:
    return _with_headroom(n_prompt) * shape.token_bytes + shape.state_bytes


def _failure(error: Exception, cache: LRUPromptCache) -> ServerError:
    """What a client is told of it. MLX says only in words that memory ran out."""
    if not isinstance(error, MemoryError) and "alloc" not in str(error):
        return GenerationFailed("the model failed on this request")
    with suppress(RuntimeError, MemoryError):  # what is evicted in part is copied
        cache.evict_to_fit(cache.max_bytes // 2)  # the next one shall have more room
    return Overloaded("memory ran out on this request; with fewer at once it may fit")


def _stops(job: Job, offset: KvOffset, *, shape: KvShape) -> list[int]:
    stops = {start + len(view.ids) for start, view in job.images}  # a slice has one image, its last
    if shape.has_state:
        stops.update(start for start, _ in job.images)
        stops.update(() if shape.can_note else _checkpoints(job, offset, end=job.n_prompt))
    return sorted(stop for stop in stops if offset < stop < job.n_prompt)


def _checkpoints(job: Job, start: int, *, end: int) -> list[int]:
    """Positions behind `start`, up to `end`, at which a state is worth its bytes; ascending."""
    tokens, lattice = job.prompt.tokens, range(LATTICE_TOKENS, end + 1, LATTICE_TOKENS)
    places = {min(at, job.n_prompt - 1) for at in (*job.boundaries, *lattice)}
    return [at for at in sorted(places) if start < at <= end and not is_inside_image(tokens, at)]


@contextmanager
def _noting(row: Row, n_tokens: int, *, cache: LRUPromptCache) -> Iterator[None]:
    """Inside, the row is fed these tokens; states on the way become checkpoints of its line."""
    layers, places = row.cache, _checkpoints(row.job, row.fed, end=row.fed + n_tokens)
    note_states(layers, [at - row.fed for at in places])
    yield
    for at, snapshot in zip(places, noted_states(layers), strict=False):
        cache.add_checkpoint(row.line, at, snapshot=snapshot)


def _remaining_prefill(tokens: TokenArray, offset: KvOffset) -> TokenArray:
    """Prompt tokens still to prefill: all but the last, which the first decode step feeds."""
    return tokens[offset : len(tokens) - 1]


def _with_headroom(n_prompt: int) -> int:
    """Buffer positions for a prompt and some reply, so that decoding seldom has to grow them."""
    return n_prompt + n_prompt // HEADROOM_SHARE + GROWTH_TOKENS


class Engine:
    """The model thread and its inbox. Every method may be called from any thread."""

    def __init__(self, config: Config, metrics: CacheMetrics, *, load: _Load) -> None:
        """`load` runs on the model thread, which alone may touch what it returns through MLX."""
        self._config = config
        self._inbox: queue.SimpleQueue[Callable[[Scheduler], object]] = queue.SimpleQueue()
        self._thread = threading.Thread(None, self._run, "model", (load, metrics), daemon=True)
        self.start = self._thread.start
        self._loaded: LoadedModel | None = None
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.trouble: str | None = None  # why there is no model (any more), in one sentence
        self.is_closing = False  # what runs may end, nothing more may begin
        self.memory: dict[str, int] = {}  # bytes by kind; this and the next two as of the last turn
        self.lines: list[tuple[str, dict[str, Any]]] = []  # each behind its tenant
        self.report: dict[str, Any] = {}  # rows by phase, queue and cache, likewise

    def stop(self) -> None:
        """End the thread after the current turn; running requests fail."""
        self.state = "dead"
        self._inbox.put(lambda _scheduler: None)  # it may be waiting for something to do
        if self._thread.is_alive():
            self._thread.join(timeout=10 if self._loaded else 1)  # what loads cannot be stopped

    @property
    def model(self) -> LoadedModel:
        """The loaded model. Raises NotReady while it loads and when the model thread is gone."""
        if self.state != "ready" or self._loaded is None:
            raise NotReady(_GONE if self.state == "dead" else "the model is still loading")
        return self._loaded

    def submit(self, job: Job) -> Ticket:
        """Queue a job. Raises NotReady, or Overloaded at MAX_QUEUED_REQUESTS."""
        _ = self.model  # or it raises
        assert job.n_prompt and job.max_tokens > 0
        if self.is_closing:
            raise NotReady("the server is stopping")
        if self._inbox.qsize() + self.report["queued"] >= self._config.max_queued_requests:
            raise Overloaded(f"{self._config.max_queued_requests} requests are waiting already")
        ticket = Ticket(job)
        self._inbox.put(lambda scheduler: scheduler.waiting.append(ticket))
        _ = self.model  # it may have ended in between, and never look again
        return ticket

    def ask[T](self, question: Callable[[Scheduler], T]) -> T:
        """What it returns, run on the model thread between two turns. Raises NotReady."""
        answer: Future[T] = Future()

        def run(scheduler: Scheduler) -> None:
            try:
                answer.set_result(question(scheduler))
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                answer.set_exception(error)

        self._inbox.put(run)
        while True:
            _ = self.model  # or it raises
            with suppress(TimeoutError):
                return answer.result(timeout=IDLE_SECONDS)

    def _run(self, load: _Load, metrics: CacheMetrics) -> None:
        scheduler: Scheduler | None = None
        try:
            loaded = load()
            scheduler = Scheduler(loaded, self._config, metrics=metrics)
            if scheduler.capacity_tokens < SLICE_MIN_TOKENS:
                taken = f"the model takes {loaded.nbytes:,} bytes of {scheduler.limit:,}"
                raise ModelError(f"{taken}: too little is left for KV (MEMORY_LIMIT_BYTES)")
            self._publish(scheduler)
            self._loaded = replace(loaded, limit=min(loaded.limit, scheduler.capacity_tokens))
            self.state = "ready" if self.state == "loading" else "dead"
            with wired_limit(loaded.model):
                self._serve(scheduler)
        except ModelError as error:
            self.trouble = str(error)
        except Exception:
            log.exception("the model thread died")
            self.trouble = "the model thread died; the log says why"
        finally:
            self.state = "dead"
            if scheduler is not None:  # nobody may be left waiting; before, nobody could submit
                self._receive(scheduler, wait_seconds=0)
                for ticket in [*scheduler.waiting, *(row.ticket for row in scheduler.rows)]:
                    ticket.put(NotReady(_GONE))
            mx.clear_streams()  # why(L-20): streams left behind can abort the process at exit

    def _serve(self, scheduler: Scheduler) -> None:
        looked = worked = time.monotonic()
        while self.state == "ready":
            self._receive(scheduler, wait_seconds=0 if scheduler.busy else IDLE_SECONDS)
            if scheduler.busy:
                scheduler.turn()
                worked = time.monotonic()  # why(L-67): who comes back soon finds its buffers
            elif not scheduler.cache.lines or time.monotonic() - worked > 60 * IDLE_SECONDS:
                if not scheduler.cache.lines:  # why(L-56): what it saves is little beside prefill
                    scheduler.loaded.template.forget()
                mx.clear_cache()
                getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # why(L-53): glibc must be asked
            if not scheduler.busy or time.monotonic() - looked > 0.25:
                looked = time.monotonic()
                scheduler.guarded([], scheduler.hold_limit)
                scheduler.cache.sweep()
                self._publish(scheduler)

    def _receive(self, scheduler: Scheduler, *, wait_seconds: float) -> None:
        with suppress(queue.Empty):
            self._inbox.get(timeout=wait_seconds)(scheduler)
            while True:
                self._inbox.get_nowait()(scheduler)

    def _publish(self, scheduler: Scheduler) -> None:
        cache, groups = scheduler.cache, scheduler.groups
        held = {"model": scheduler.loaded.nbytes, "cache": cache.nbytes}
        if vision := scheduler.loaded.vision:
            held["features"] = vision.feature_bytes
        held["running"] = scheduler.running_bytes
        working = mx.get_active_memory() + mx.get_cache_memory() - sum(held.values())
        self.memory = {"limit": scheduler.limit, **held, "working": max(0, working)}
        self.lines = cache.snapshot()
        report = {"queued": len(scheduler.waiting), "prefilling": len(scheduler.prefilling)}
        report |= {"decoding": sum(len(group.rows) for group in groups), "groups": len(groups)}
        report |= {"lines": len(cache.lines), "cache_bytes": cache.nbytes}
        report |= {"cache_max_bytes": cache.max_bytes, "capacity_tokens": scheduler.capacity_tokens}
        self.report = report | {"kv_bytes_per_token": scheduler.shape.token_bytes}


# region 18 SPLIT ==============================================================
# Characters -> reasoning | content | tool call, as they are generated.
#     <think>\nwhy\n</think>\n\nI'll look.\n\n<tool_call>...</tool_call>\nDone.
#               why             I'll look.    (to TOOLS)             \nDone.
# Any chunking gives the same texts: white space, and what `regex` finds may become a tag, are held
# back. White space before a tag belongs to the tag; after one, newlines are dropped until the first
# text of that kind, so that a reply of calls alone has no content. All else is as generated; but
# `</think>` nobody opened, `<think>` in thinking are dropped, unless said in a line of an answer.
# Doors _ReasoningStreamSplitter, Tags, Piece, HARMONY · Knows - · Thread any; pure · Budget 110

TextKind = Literal["reasoning", "content"]
_HEADERS: Final = (
    r"<\|end\|>|(?:<\|start\|>)?assistant(?= to=|<\|ch)"
    r"|<\|channel\|>(?:[^<]|<\|c){0,200}<\|message\|>"
)
# why(L-88): by what ends a thought: all that parts such a reply; what begins a turn; a text in it.
HARMONY: Final = {"<|end|>": (_HEADERS, "<|start|>assistant", "<|channel|>final<|message|>")}


class Tags(NamedTuple):
    """Patterns of what parts a reply, none in another; None where a model has no such thing."""

    think_start: str | None = None
    tool_start: str | None = None
    forgetful: str | None = None  # what begins a call where `tool_start` is forgotten
    think_end: str | None = None  # the last: of two that fit it is the other


class Piece(NamedTuple):
    """A part of the reply. A "tool" piece is raw: the white space before it, its tags, and all."""

    kind: Literal["reasoning", "content", "tool"]
    text: str


class _ReasoningStreamSplitter:
    """Parts one reply; the prompt may have ended `in_reasoning`. `feed` it, `finish` it once."""

    def __init__(self, tags: Tags, *, in_reasoning: bool) -> None:
        named = (f"(?P<{name}>{tag})" for name, tag in tags._asdict().items() if tag)
        self._all = regex.compile("|".join(named) or "(?!)")
        self._untagged = regex.compile(tags.forgetful or "(?!)")
        self._kind: TextKind = "reasoning" if in_reasoning else "content"
        self._started: set[str] = set()  # kinds of which some text has left, tags spoken of
        self.after_tag = in_reasoning  # a tag came since the last text
        self._held = ""  # white space or half a tag, until it is known what follows
        self.in_call = False  # all text is "tool" pieces, until who reads the calls says `resume`

    @property
    def is_thinking(self) -> bool:
        return self._kind == "reasoning" and not self.in_call

    def feed(self, text: str, *, literal: bool = False) -> list[Piece]:
        """What is certain now. `literal`: no tag token came, what looks like a tag is text."""
        if self.in_call:
            return [Piece("tool", text)] if text else []
        quoted = literal and self.is_thinking  # L-82: only what is said may lack its tag
        return self.restore(text) if quoted else self._scan(text, literal=literal)

    def resume(self, rest: str, *, called: bool) -> list[Piece]:
        """Go on after a call with what followed it; if it was one, it closed the thinking."""
        self.in_call = False
        if called:
            self._turn_to("content")
        return self._scan(rest)

    def restore(self, text: str) -> list[Piece]:
        """Take text as it is, in the kind the reply is in: nothing in it is a tag."""
        is_first = self.after_tag and self._kind not in self._started
        text = (self._held + text).lstrip("\n" * is_first)
        self._held = text[(end := len(text.rstrip())) :]
        if not end:
            return []
        self._started.add(self._kind)
        self.after_tag = False
        return [Piece(self._kind, text[:end])]

    def finish(self) -> list[Piece]:  # what was held back: half a tag at the end of a reply is text
        pieces = self.restore("")
        is_left = self._held and not self.after_tag  # white space behind a tag alone goes with it
        return [*pieces, Piece(self._kind, self._held)] if is_left else pieces

    def _scan(self, text: str, *, literal: bool = False) -> list[Piece]:
        text, self._held = self._held + text, ""
        pieces: list[Piece] = []
        while match := (self._untagged if literal else self._all).search(text, partial=True):
            pieces += self.restore(text[: match.start()])
            if match.partial:
                self._held += match[0]
                return pieces
            text = text[match.end() :]
            is_line = self.after_tag or not self._started or "\n" in self._held  # begins
            before = {"<think>": "reasoning", "</think>": "<think>"}.get(match[0], "")
            said = match[0] == "assistant" or (self._kind == "content" and before in self._started)
            tag = match.lastgroup if is_line or not said else None
            if tag in ("think_start", "think_end"):
                self._turn_to("reasoning" if tag == "think_start" else "content")
            elif is_line or tag == "tool_start":
                self.in_call = True
                held, self._held = self._held, ""
                return [*pieces, Piece("tool", held + match[0] + text)]
            else:  # in the middle of a line: it is spoken of
                pieces += self.restore(match[0])
                self._started.add(match[0])
        return [*pieces, *self.restore(text)]

    def _turn_to(self, kind: TextKind) -> None:
        self._kind, self._held, self.after_tag = kind, "", True


# region 19 TOOLS ==============================================================
# Tool-call text -> OpenAI tool_calls, as it is generated; and the whole reply put together.
#     <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
#     <tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>
#     <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
#     <invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n</invoke>
#     <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
# A call's first characters tell these apart; others are read at their end by mlx-lm's parser. A
# closing mark counts if what the format puts behind it follows: a file may contain `</parameter>`.
# What calls no tool that was offered stays text. Once a name has left, broken arguments are closed.
# Doors   ToolFormat, ReplyStream, tool_openings · Knows WIRE, SPLIT · Thread any; pure · Budget 338

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters"}}
_json = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_TYPES: Final = (str, bool, int, float, list, dict, type(None))
_TYPE_NAMES: Final = ("string", "boolean", "integer", "number", "array", "object", "null")
_JSON_TYPES: Final = {kind: name for name, kind in zip(_TYPE_NAMES, _TYPES, strict=True)}
_PY: Final = re.compile(r"\s*(?:[\[{]|(?:True|False|None)\s*\Z)")  # why(L-94): Python, perhaps


@lru_cache
def _compile(pattern: str) -> Any:  # with a bound to `\s*`: a model may be caught in blanks
    return regex.compile(pattern.replace(r"\s*", r"[ \t\r\n]{0,400}"))


class _Dialect(NamedTuple):  # one way to write a call
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
        opening="<tool_call>{gap}<function={name}>{gap}",
        name=r"<function=(?P<qwen>[^\s<>]{1,200})>",
        key=r"\s*(?:<parameter=(?P<key>[^<>\n]{1,200})>(?:\n|(?=.))|</function>|(?P<end></tool_call>))",
        value_end=r"\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>))"
        r"|\n?(?=</function>\s*</tool_call>\s*(?:<tool_call>|\0))",
    ),
    "glm": _Dialect(
        sign="<arg_key>",
        opening="<tool_call>{name}{gap}{required}",  # or `read` might become `read_file`
        name=r'(?P<glm>[^\s<>{}"]{1,200})\s*(?=<arg_key>|</tool_call>)',
        key=r"\s*(?:(?:<arg_key>){1,3}(?P<key>[^<]+)(?:</arg_key>\s*){1,3}(?:<arg_value>|(?=[^<\s]))"
        r"|(?P<end></tool_call>|(?=<tool_call>)))",
        value_end=r"</arg_value>(?=\s*<(?:arg_key|/tool_call>|tool_call>\w))|(?=</tool_call>\s*\0)",
    ),
    "minimax": _Dialect(  # several calls between its two tags
        sign="<invoke name=",
        opening='<minimax:tool_call>\n<invoke name="{name}">\n',
        name=r'<invoke name="?(?P<minimax>[^\s<>"]+)"?>',
        key=r'\s*(?:<parameter name="?(?P<key>[^<>"\n]{1,200})"?>|(?P<end></invoke>)'
        r"(?:\s*</minimax:tool_call>|(?=\s*<invoke ))|</invoke>|(?P<end></minimax:tool_call>))",
        value_end=r"</parameter>(?=\s*(?:<parameter |</invoke>|</minimax:tool_call>))"
        r"|(?=</invoke>\s*</minimax:tool_call>\s*\0)",
    ),
    "harmony": _Dialect(  # gpt-oss; the recipient may stand before the channel or behind it
        sign="<|channel|>",
        opening="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        name=r"(?:<\|channel\|>\w{1,20})?\s*to=functions\.(?P<harmony>[\w.-]{1,200}+)"
        r"(?:[^{<]|<\|c){0,99}+<\|message\|>\s*\{",
    ),
    "mistral": _Dialect(  # from v11 on; that one names the call, too
        "[ARGS]",
        "[TOOL_CALLS]{name}{gap}",
        r"(?:\[TOOL_CALLS\]\s*)?(?P<mistral>[^\s[\]{}]{1,200}+)(?:\[CALL_ID\]\w{1,40}+)?\[ARGS\]\s*\{",
    ),
    "hermes": _Dialect(
        sign="<tool_call>",
        opening='<tool_call>{gap}{{"name": {json}, "arguments":',
        name=r'\{\s*"name"\s*:\s*"(?P<hermes>[^"\\]{1,200})"\s*(?:,\s*"arguments"\s*:\s*\{|(?=\}))',
    ),
}
_NAME: Final = (
    rf"(?:\s+)?(?:<(?:minimax:)?tool_call>\s*)?(?:{'|'.join(d.name for d in _DIALECTS.values())})"
)
_ATOM: Final = r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][+-]?[0-9]{1,3})?|true|false|null"
_VALUE: Final = rf'\s*(?:(?P<open>[{{\["])|(?:{_ATOM}|(?P<py>True|False|None))(?=[ \t\r\n,}}\]]))'
_HEX: Final = r"(?i:(?!d[89a-f])[0-9a-f]{4}|d[89ab][0-9a-f]{2}\\(?-i:u)d[c-f][0-9a-f]{2})"
_ESC: Final = rf'["\\/bfnrt]|u{_HEX}'  # any other is "raw": models write \d, \users, half a pair
_CHAR: Final = rf'[^"\\\x00-\x1f]|\\(?:{_ESC})'
_KEY: Final = rf'\s*"(?:{_CHAR}){{0,999}}"\s*:'
_RAW: Final = rf"[\x00-\x1f]|\\(?!{_ESC})(?=(?s:.{{11}}))"
# why(L-86): a quote inside a string that nothing follows which could is one that was not escaped.
_STRING: Final = (
    rf'(?:{_CHAR})+|(?P<raw>{_RAW}|"(?=[^\s,}}\]<]|\s\s*(?:[^\s,}}\]"/<]|/[^/*])'
    r'|<(?!/?tool_call>)(?s:.{11})%s))|(?P<close>"(?=\s*(?:[}\]]|</?tool_call>|,%s)|\s\s*(?:"|/[/*])))'
)
_JSON: Final = {  # what may come next, in what: `{` is an object without members yet, `}` one with
    "{": rf"{_KEY}{_VALUE}|\s*(?P<close>\}})",
    "}": rf"\s*,{_KEY}{_VALUE}|\s*(?P<close>\}})",
    "[": rf"{_VALUE}|\s*(?P<close>\])",
    "]": rf"\s*,{_VALUE}|\s*(?P<close>\])",
    ']"': _STRING % ("", ""),  # a string in an array; in an object, where a key comes next
    '}"': _STRING % (r'|\s*,\s*(?:\w+\s*[^\s\w:]|[^\s"\w}\]/])', r'\s*(?:["}\]/]|\w+\s*:)'),
}
_BARE: Final = r'(?:<\|"\|>(?s:.*?)<\|"\|>|"[^"]*")(*SKIP)(*FAIL)|(?<=[{,])\s*([\w.$@/-]+)(?=:)'
_CLOSED: Final = str.maketrans("{[", "}]")


class ToolFormat(NamedTuple):
    """How a model is told to write its calls."""

    start: str
    end: str  # NUL, which never comes, where only the reply's end ends a call
    dialect: str  # "foreign": none of ours
    gap: str = ""  # what the template prints around the name, or behind it
    parse: Any = None  # mlx-lm's (text inside, tools) -> call or calls, for what is none of ours

    @classmethod
    def detect(cls, template: str, family: str, *, tokenizer: Any) -> ToolFormat | None:
        """Read it off a chat template and what mlx-lm found in it; None: no tool calls."""
        start, text = tokenizer.tool_call_start, template.replace("\\n", "\n")  # Jinja's strings
        known = start or "<tool_call>" * ("<tool_call>" in text) or "\0"
        fits = ((name, d.sign) for name, d in _DIALECTS.items() if d.opening.startswith(known))
        spoken, end = [name for name, sign in fits if sign in text], tokenizer.tool_call_end or "\0"
        if not spoken:
            return cls(start, end, "foreign", parse=tokenizer.tool_parser) if start else None
        dialect = min(spoken, key=lambda name: name not in family)  # "glm" is in "glm4"
        gap = regex.search(r"(?<=<tool_call>|</arg_key>)\n|\[CALL_ID\]|\[ARGS\]", text)
        return cls(known, end, dialect, gap[0] if gap else "", tokenizer.tool_parser)

    def forgetful(self, tools: Sequence[Tool]) -> str | None:
        """A pattern of what opens a call where the tag is forgotten (L-82), if models do that."""
        names = "|".join(map(regex.escape, _parameters_by_name(tools)))
        bare = {"qwen": rf"<function=(?:{names})>(?=\s{{0,40}}<(?:parameter=|/function>))"}
        bare["minimax"] = rf'<invoke name="?(?:{names})"?>(?=\s{{0,40}}<(?:parameter |/invoke>))'
        bare["mistral"] = rf"(?:{names})(?:\[CALL_ID\]\w{{1,40}}+)?\[ARGS\]"  # one tag for several
        bare["harmony"] = r"(?:<\|channel\|>\w{1,20}\s{1,9})?to=functions\."
        return bare.get(self.dialect) if names else None


def tool_openings(form: ToolFormat, tools: Sequence[Tool], *, name: str | None = None) -> list[str]:
    """What opens a call of each tool, or of `name` alone, up to where a model's own token ends."""
    if form.dialect == "foreign":
        return [form.start]
    opening, offered = _DIALECTS[form.dialect].opening, _parameters_by_name(tools)
    keys = {n: "<arg_key>" * bool(offered[n].get("required")) for n in offered if name in (None, n)}
    return [opening.format(name=n, json=_json(n), gap=form.gap, required=keys[n]) for n in keys]


def _parameters_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}


def _listed(thing: Any) -> list[Any]:
    return thing if isinstance(thing, list) else [thing]


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
    for read in (partial(json.loads, strict=False), ast.literal_eval)[: 1 + bool(_PY.match(text))]:
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = read(text.strip())
            kind = _JSON_TYPES.get(type(value), "string")
            fits = kind != "string" and ("string" not in types or kind in types)
            return _json(value if fits else text)
    return _json(text)


class ReplyStream:
    """One reply as a chat's deltas, in the order in which they were generated."""

    def __init__(
        self,
        splitter: _ReasoningStreamSplitter,
        tool_format: ToolFormat | None,  # None: the splitter knows no tag that opens calls
        *,
        tools: Sequence[Tool],
        ids: Iterator[str],  # for its calls
        most: int = sys.maxsize,  # calls
    ) -> None:
        self._splitter, self._format = splitter, tool_format or ToolFormat("", "\0", "foreign")
        self._parse: Any = lambda body: _listed(self._format.parse(body, list(tools)))[:most]
        self._ids, self._offered = ids, _parameters_by_name(tools)
        self._deltas: list[Body] = []
        self._calls: list[Body] = []  # the last may be open: its name is known and was offered
        self.n_calls = 0  # complete ones
        self._reading: Iterator[None] | None = None  # of the open call; pauses for more text
        self._unread = self._json = ""  # of that call; what this piece added to its arguments
        self._ended = False  # no more text will come

    def feed(self, text: str, *, literal: bool = False) -> list[Body]:
        """What is certain now; `literal` as in `_ReasoningStreamSplitter.feed`."""
        return self._route(self._splitter.feed(text, literal=literal))

    def finish(self, *, closes: bool = True) -> list[Body]:
        """What was held back; an open call gives what there is, as valid JSON, or as text."""
        self._ended = True
        # Unless it `closes`: Claude Code runs whatever is valid, half a file, too (L-86).
        is_left = len(self._calls) > self.n_calls and not closes
        open_call = [Piece("tool", "")] if self._splitter.in_call and not is_left else []
        return self._route(open_call) + self._route(self._splitter.finish())

    def message(self) -> Body:
        """The join of all deltas: what a client that reads the stream has."""
        fields = ("content", "reasoning_content")
        content, thought = ("".join(d.get(name, "") for d in self._deltas) for name in fields)
        said = {"reasoning_content": thought or None, "tool_calls": self._calls or None}
        return {"role": "assistant", "content": content or None, **without_nulls(said)}

    def _route(self, pieces: list[Piece]) -> list[Body]:
        n_known = len(self._deltas)
        while pieces:
            piece, *pieces = pieces
            if piece.kind == "tool":  # always the last
                pieces = self._read_on(piece.text)
            else:
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                self._deltas.append({name: piece.text})
        return self._deltas[n_known:]

    def _read_on(self, text: str) -> list[Piece]:
        """Read more of the open call; what proves to be none, and what follows it, comes back."""
        if self._reading is None:
            self._reading, self._unread = self._read(), ""
        raw = self._unread = self._unread + text
        self._json = ""
        is_over, is_call = next(self._reading, True), len(self._calls) > self.n_calls
        if is_call and self._json:
            self._argue(self._json)
        pieces = self._splitter.restore("" if is_call else raw[: len(raw) - len(self._unread)])
        if is_over:
            self._reading, self.n_calls = None, len(self._calls)
            pieces += self._splitter.resume(self._unread, called=is_call)
        return pieces

    def _open(self, name: str) -> None:
        """Its name leaves alone: there are clients that lose arguments that come with it."""
        call = {"id": next(self._ids), "type": "function"}
        self._calls.append({**call, "function": {"name": name, "arguments": ""}})
        self._tell({**call, "function": {"name": name, "arguments": ""}})

    def _argue(self, arguments: str) -> None:
        self._calls[-1]["function"]["arguments"] += arguments
        self._tell({"function": {"arguments": arguments}})

    def _tell(self, part: Body) -> None:
        self._deltas.append({"tool_calls": [{"index": len(self._calls) - 1, **part}]})

    def _read(self) -> Iterator[None]:
        if self._format.dialect == "foreign":
            yield from self._read_foreign()
        elif (match := (yield from self._take(_NAME))) is None:  # a tag, but no call
            if self._format.parse and _compile(r"\s*<tool_call>\s*\{").match(self._unread):
                return (yield from self._read_foreign())  # JSON's members in another order
            self._unread = self._unread.partition(self._format.start.split()[-1])[2]
        else:
            name, dialect = match[match.lastgroup], _DIALECTS[match.lastgroup]
            if name in self._offered:
                self._open(name)
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
        properties, comma = parameters.get("properties"), ""
        schemas = properties if isinstance(properties, dict) else {}
        while (match := (yield from self._take(dialect.key))) and match["end"] is None:
            if match["key"]:
                key = match["key"].strip()
                self._json += f"{comma}{_json(key)}: "
                comma, schema = ", ", schemas.get(key, parameters.get("additionalProperties"))
                yield from self._read_value(dialect.value_end, _schema_types(schema))
        self._json += "}"

    def _read_value(self, end: str, types: set[str]) -> Iterator[None]:
        """A bare value, typed by the tool's schema; strings leave as they grow."""
        is_string, is_whole, value = types == {"string"}, False, ""
        self._json += '"' * is_string
        while not is_whole:
            match = _compile(end).search(self._unread, partial=True)
            text, is_whole = self._unread[: match.start()], self._ended or not match.partial
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
        where = "{"  # the last of them, with what it is in if that is a string
        while opened and (match := (yield from self._take(_JSON[where]))):
            kind, text = match.lastgroup, match[0]
            if kind == "py":
                text = text.removesuffix(match["py"]) + _json(ast.literal_eval(match["py"]))
            inside = opened[-1].translate(_CLOSED) + (text[-1] if kind == "open" else "")
            opened = opened[:-1] + ("" if kind == "close" else inside)
            where = opened[-2:] if opened[-1:] == '"' else opened[-1:]
            self._json += _json(text)[1:-1] if kind == "raw" else text
        self._json += opened[::-1].translate(_CLOSED)
        # also where a bracket was forgotten, or the tag (L-82)
        yield from self._take(r"\s*[}\]]*\s*(?:</tool_call>|(?=<tool_call>|[^\s}\]<]))")

    def _read_foreign(self) -> Iterator[None]:
        """A call, or several, for mlx-lm's parser: only at the end it can read them."""
        start, end = self._format.start, self._format.end
        while not self._ended and end not in self._unread.partition(start)[2]:
            yield
        body, _, self._unread = self._unread.partition(start)[2].partition(end)
        if start == "<|tool_call>":  # why(L-82): of Gemma's keys its parser knows \w+ alone
            body = regex.sub(_BARE, r'<|"|>\1<|"|>', body)
        try:
            calls = [(x["name"], _json(dict(x["arguments"] or {}))) for x in self._parse(body)]
        except Exception:  # noqa: BLE001 - mlx-lm's parsers raise what they like on bad text
            return
        for name, arguments in calls if all(name in self._offered for name, _ in calls) else ():
            self._open(name)
            self._argue(arguments)


# region 20 ANSWER =============================================================
# The whole path on one page: request -> prompt -> job -> events -> the client's words.
#     prepare: render, check, constrain, submit      (may still be a 400)
#     listen:  tokens -> text -> stop strings -> reasoning | content | calls -> bodies
#     close:   note the turn, log it, then the last words
# Streamed or whole, an answer reads the same deltas; None while nothing is new: HTTP then looks.
# Doors   ServerState, empty_stores, Answer, prepare, token_count, models_body, model_body
# Doors   health, status_body, metrics_text, explain, drop_cache
# Knows all · Thread connection; status_body: also main · Budget 575

TICK_SECONDS: Final = 0.25  # between two looks at the client while nothing is new


@contextmanager
def kept_awake(config: Config) -> Iterator[None]:
    """KEEP_AWAKE: macOS does not sleep inside; elsewhere there is no `caffeinate` to run."""
    with ExitStack() as inside:
        if config.keep_awake and (command := shutil.which("caffeinate")):
            tied = [command, "-i", "-w", str(os.getpid())]  # ends with us, however that is
            inside.callback(inside.enter_context(subprocess.Popen(tied)).terminate)
        yield


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
    live: dict[str, Callable[[], Facts]]  # requests under way, by id
    recent: deque[Facts]  # the last ones; like the others, written and copied in single steps
    divergences: deque[Facts]
    started: int  # Unix seconds
    tenant: str = ""  # whose stores these are, where they are kept apart
    tenants: dict[str, ServerState] = field(default_factory=dict)  # all that were asked for

    def of(self, tenant: str) -> ServerState:
        """The same server with the stores of one tenant; "" is everybody."""
        if tenant not in self.tenants:
            stores = {**empty_stores(self.config, self.metrics), "tenant": tenant} if tenant else {}
            self.tenants.setdefault(tenant, replace(self, **stores) if tenant else self)
        return self.tenants[tenant]


def empty_stores(config: Config, metrics: CacheMetrics) -> dict[str, Any]:
    """What remembers requests, by its field of ServerState."""
    stores: dict[str, Any] = {"HEALING_STORE": (healing := HealingStore())}
    stores |= {"LEDGER": Ledger(config, metrics, healing=healing)}
    stores |= {"SESSION_INDEX": SessionIndex(config), "SESSION_TURN_STORE": SessionTurnStore()}
    return {**stores, "live": {}, "recent": deque(maxlen=200), "divergences": deque(maxlen=20)}


class Prepared(NamedTuple):
    request: ChatRequest  # with marks for its images
    loaded: LoadedModel
    draft: Draft
    tool_format: ToolFormat | None
    job: Job

    def sent(self, reply: Sequence[int] = ()) -> Sent:
        ids = np.concatenate([self.job.prompt.tokens, np.asarray(reply, np.int32)])
        return Sent(self.job.owner[1], ids, self.draft.turns, self.draft.keys[0], time.monotonic())

    def why(self, before: Sent, now: Sent, **known: int) -> Facts:
        """Why no more is reused, by the message: notes are messages, but no turns of their own."""
        why, said = why_not_more(before, now, **known) or {}, self.request.messages
        if "message" not in why:
            return why
        ends, canonical = range(1, len(said) + 1), self.loaded.template.canonical
        at = bisect_left(ends, (nth := why["message"]) + 1, key=lambda n: len(canonical(said[:n])))
        at = next(n for n in ends[at:] if canonical(said[:n])[nth].digest == now.digests[nth]) - 1
        sentence = f"message {at}: {why['sentence']}"
        return {**why, "message": at, "role": said[at]["role"], "sentence": sentence}


def prepare(state: ServerState, request: ChatRequest) -> Prepared:
    """Render and check a request. Raises every error that can still be a status code."""
    loaded = state.engine.model
    request, views = _seen(state, request)
    rendered = (draft := _draft(state, request)).rendered
    if (room := loaded.limit - len(rendered.ids)) < 1:
        raise ContextTooLong(len(rendered.ids), loaded.limit)
    if any(token >= loaded.vocab_size for token in request.sampling.logit_bias):
        raise BadRequest("a token id is outside the vocabulary", at="logit_bias")
    is_checked, text = state.config.cache_norm_safety_check, rendered.text
    if is_checked and not _assert_cache_key_safety(_scrub_cache_key(text), text):
        log.warning("the diagnostic key drops more than a tenth of the prompt")
    form = None
    if request.tool_choice.mode != "none":  # there are tools, then
        form = ToolFormat.detect(loaded.template.source, loaded.family, tokenizer=loaded.tokenizer)
    thinks, named = rendered.starts_in_reasoning, zip(draft.turns, draft.keys[1:], strict=False)
    head = next((key for turn, key in named if turn.role not in SYSTEM_ROLES), b"")
    root = sha256(repr((loaded.revision, state.tenant)).encode()).digest()
    ids, size = rendered.ids, state.config.prompt_cache_block_size
    hashes = draft.past.reply.hashes[: draft.kept // size] if draft.past else ()
    job = Job(
        prompt=Prompt(root, ids, _block_hashes(ids, size, root=root, known=hashes)),
        images=tuple((at, views[int(ids[at])]) for at in image_starts(ids)),
        owner=(state.tenant, session_id_of(request.session, ids, first_words=head)),
        boundaries=_checkpoint_positions(rendered),
        max_tokens=min(request.max_tokens, room),
        sampling=request.sampling,
        top_logprobs=request.top_logprobs if request.logprobs else -1,
        constraints=tuple(_constraints(loaded, request, in_reasoning=thinks, tool_format=form)),
    )
    if views and state.config.vlm_cache_debug:
        log.info("images at %s, tokens %s", image_starts(ids), ids[:64].tolist())
    return Prepared(request, loaded, draft, form, job)


def _seen(state: ServerState, request: ChatRequest) -> tuple[ChatRequest, dict[int, View]]:
    """The request with marks for its images, and these by their first mark. Raises BadRequest."""
    loaded, config = state.engine.model, state.config
    salt = loaded.vision.secret if loaded.vision else b""
    salt = state.tenant.encode() + (salt if config.cache_vlm_image_identity else os.urandom(16))
    request, pictures = pictured(request, config, sees=loaded.vision is not None, salt=salt)
    views: list[View] = [loaded.model.view(*pair) for pair in pictures.items()]
    ids = {view.digest: (view.shown, view.ids) for view in views}
    return replace(request, image_ids=ids), {int(view.ids[0]): view for view in views}


def _draft(state: ServerState, request: ChatRequest) -> Draft:
    """Its prompt, replayed as far as it is known. Raises NotReady, BadRequest, NotServed."""
    model = state.engine.model
    if state.config.strict_model_names and request.model is not None:
        model_body(state, request.model)
    if request.kind == "completion" or not state.config.cache_canonicalize_tool_context:
        return Draft(rendered=model.template.prompt(request))
    return state.LEDGER.draft(request, model.template, room=model.limit - 1, now=time.monotonic())


def models_body(state: ServerState) -> dict[str, Any]:
    """GET /v1/models: the one model that is loaded. Raises NotReady."""
    loaded = state.engine.model
    entry = {"id": loaded.model_id, "object": "model", "created": state.started}
    entry |= dict.fromkeys(("context_length", "max_model_len"), loaded.limit)
    return {"object": "list", "data": [entry | {"owned_by": "start-llm"}]}


def model_body(state: ServerState, model_id: str) -> dict[str, Any]:
    """Raises NotServed for any model but the one that is loaded."""
    entry: dict[str, Any] = models_body(state)["data"][0]
    if model_id != entry["id"]:
        sentence = f"the model {model_id[:200]!r} is not loaded, {entry['id']!r} is"
        raise NotServed(404, sentence, code="model_not_found")
    return entry


def token_count(state: ServerState, request: ChatRequest) -> dict[str, Any]:
    """POST /v1/messages/count_tokens: what the prompt of this very request would have."""
    while not (draft := _draft(state, _seen(state, request)[0])).holds():
        pass
    return {"input_tokens": len(draft.rendered.ids)}


def _checkpoint_positions(rendered: Rendered) -> tuple[int, ...]:
    """Ends of the head and of the messages, the last user's, and what a tool loop adds to it."""
    last_user = rendered.last_user_start or 0
    fixed = {rendered.system_end, *rendered.note_ends, last_user, rendered.generation_start}
    return tuple(sorted(fixed.union(b for b in rendered.boundaries if b >= last_user)))


def _constraints(
    loaded: LoadedModel, request: ChatRequest, *, in_reasoning: bool, tool_format: ToolFormat | None
) -> Iterator[Constraint]:
    """What the request demands of its reply. Raises BadRequest: that cannot be had."""
    if request.kind == "completion":
        return
    marks, encode, (mode, name) = loaded.tokenizer, loaded.template.encode, request.tool_choice
    calls, end = encode(marks.tool_call_start or ""), list(marks.think_end_tokens or ())
    budget = request.max_tokens if (n := request.thinking_budget) is None else max(n, 1)
    start = encode(marks.think_start or "") if request.thinking and not in_reasoning else []
    thinks = in_reasoning or start  # the reply itself may begin with a thought, then by `start`
    call = calls if len(calls) == 1 else []  # one token, or no one can know
    _, lead, final = HARMONY.get(marks.think_end, ("", "\n\n", ""))  # a call's, a text's
    if mode == "none" and call:  # the tools stay in the prompt, and so does all behind them
        yield partial(avoid, call)
    if thinks and len(end) == 1 and budget < request.max_tokens:
        yield partial(think_at_most, budget, start=start, ends=[*end, *call])
    if mode in ("required", "named"):
        if tool_format is None:
            raise BadRequest("this model's template knows no calls", at="tool_choice")
        openings = tool_openings(tool_format, request.tools + request.deferred, name=name)
        gaps = [lead] * bool(thinks) + [""] * (not in_reasoning)
        texts = (_spelled(encode(gap + opening)) for gap in gaps for opening in openings)
        answer = f"({' | '.join(texts)}) <[*]>*"
    elif request.schema is not None:
        lead = f"({_spelled(encode(lead))})?" if final else "BLANKS?"
        or_calls = f" | {lead} {_spelled(calls)} <[*]>*" if tool_format and calls else ""
        answer = f"({lead} {_spelled(encode(final))} @json{or_calls})"
    else:
        return
    thought = f"<[^{','.join(map(str, [*end[:1], *call, *loaded.eos_ids]))}]>* {_spelled(end)}"
    before = thought if in_reasoning else f"({_spelled(start)} {thought})?" if start else ""
    made = _compiled(_guide(marks), f"{before} {answer}", schema=json.dumps(request.schema or {}))
    yield partial(follow, made)


def _spelled(ids: Iterable[int]) -> str:  # tokens as a grammar of llguidance writes them
    return " ".join(f"<[{token}]>" for token in ids)


@lru_cache(maxsize=1)
def _guide(known: Any) -> Any:
    """What compiles for this tokenizer: tags are markup, never a part of a JSON string."""
    import llguidance  # only for who asks: it takes 0.2 s, and what follows up to a second

    copy = Tokenizer.from_str(known.backend_tokenizer.to_str())
    tags = (known.think_start, known.think_end, known.tool_call_start, known.tool_call_end)
    copy.add_special_tokens([tag for tag in tags if tag and copy.token_to_id(tag) is not None])
    words = llguidance.LLTokenizer(copy.to_str(), eos_token=sorted(known.eos_token_ids))
    return partial(llguidance.LLMatcher, words, log_level=0)


@lru_cache(maxsize=32)
def _compiled(guide: Any, start: str, *, schema: str) -> Any:
    """An LLMatcher of replies like `start`. Raises BadRequest: the compiler's first sentence."""
    blanks = r"[ \t\r\n]{1,%d}"  # limited: a model caught in them comes out again
    # what is certain to come would be spelled by the tokenizer, which takes a quoted tag for one
    lark = f'%llguidance {{"no_forcing": true}}\nstart: {start}\nBLANKS: /{blanks % 8}/'
    form = json.loads(schema)
    is_lenient = form.get("x-guidance") == {"lenient": True}  # passes over what it cannot enforce
    form["x-guidance"] = {"whitespace_pattern": blanks % 64, "lenient": is_lenient}
    grammars = [{"lark_grammar": lark}, {"name": "json", "json_schema": form}]
    matcher = guide(json.dumps({"grammars": grammars}))
    if wrong := matcher.get_error():
        sentence = wrong.rpartition("error: ")[2].splitlines()[0].partition(". ")[0]
        raise BadRequest(f"{sentence:.300}", at="response_format.json_schema.schema")
    return matcher


class StopStrings:  # text up to the first stop string; what may still become one is held back
    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self.held, self.hit = stops, "", ""  # the one that came

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """What can leave now; nothing any more after a hit."""
        if self.hit:
            return ""
        text = self.held + text
        held = (i for stop in self._stops for i in range(len(text)) if stop.startswith(text[i:]))
        found = [(text.find(stop), len(stop), stop) for stop in self._stops if stop in text]
        free = len(text) if is_last else min(held, default=len(text))
        start, _, self.hit = min([*found, (free, math.inf, "")])
        self.held = "" if self.hit else text[start:]
        return text[:start]


class Listener:
    """Generated ids -> deltas, with what the usage and the log want to know. One reply, one use."""

    def __init__(self, prepared: Prepared) -> None:
        request, loaded, form = prepared.request, prepared.loaded, prepared.tool_format
        known, thinks = loaded.tokenizer, prepared.draft.rendered.starts_in_reasoning
        offered = request.tools + request.deferred
        words = [known.think_start, form and form.start, known.think_end]
        words = [None] * 3 if request.kind == "completion" else words
        start, call, end = (word and regex.escape(word) for word in words)
        tags = Tags(start, call, form and form.forgetful(offered), HARMONY.get(words[2], [end])[0])
        call_ids = (uuid.uuid4().hex[:9] for _ in count())  # why(L-75): not any name will do
        self.splitter = _ReasoningStreamSplitter(tags, in_reasoning=thinks)
        self._most = sys.maxsize if request.parallel_tool_calls else 1  # calls
        self.stream = ReplyStream(self.splitter, form, tools=offered, ids=call_ids, most=self._most)
        named = {i[0] for i in map(loaded.template.encode, request.stop) if len(i) == 1}
        hidden = loaded.hidden_ids - (named - loaded.eos_ids)  # or such a stop would never be seen
        self._detokenizer = Detokenizer(known.backend_tokenizer, hidden)
        self.stops = StopStrings(request.stop)
        ids = [loaded.template.encode(word) for word in filter(None, words)]
        self._tag_ids = {i for (i, *_) in ids} if all(len(i) == 1 for i in ids) else set()
        self.n_reasoning = 0
        self.ids: list[int] = []

    @property
    def is_over(self) -> bool:  # the reply is complete although the model would go on
        return bool(self.stops.hit) or self.stream.n_calls >= self._most

    def hear(self, token: int) -> list[Body]:
        """What this token adds; nothing once the reply is over."""
        if self.is_over:
            return []
        self.ids.append(token)
        self.n_reasoning += self.splitter.is_thinking
        text = self._detokenizer.feed(token)
        # A tag the model means is a token of its own; the same characters in others are a quote.
        literal = bool(self._tag_ids) and token not in self._tag_ids and not self.stops.held
        now = self.splitter  # why(L-80): stop strings end what is said, not thoughts and files
        passes = token in self._tag_ids or (now.after_tag and (self.stops.held + text).isspace())
        if now.is_thinking or now.in_call or passes:
            text, self.stops.held = self.stops.held + text, ""
            return self.stream.feed(text, literal=literal)
        return self.stream.feed(self.stops.feed(text), literal=literal)

    def finish(self, *, closes: bool) -> list[Body]:
        if self.stream.n_calls >= self._most:  # what is held stands behind the last call
            return []
        rest = self.stops.feed(self._detokenizer.finish(), is_last=True)
        return self.stream.feed(rest) + self.stream.finish(closes=closes)


class Answer:
    """One request on its way, to be closed. Making one raises what can still be a status code."""

    def __init__(self, state: ServerState, request: ChatRequest) -> None:
        self._state, self._began = state, time.monotonic()
        if sys.platform == "linux":  # elsewhere threads have no priority of their own
            with suppress(OSError):  # why(L-35): rendering must not slow down those who stream
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        while True:
            self._prepared = prepare(state, request)
            self._ticket = state.engine.submit(self._prepared.job)
            if self._prepared.draft.holds():
                break
            self._ticket.wish = "cancelled"
        self._request = request = self._prepared.request
        self._listener = Listener(self._prepared)
        model, name, now = self._prepared.loaded.model_id, request.request_id, int(time.time())
        # why(L-52): on resume Claude Code drops the thinking of a model it did not ask for.
        self._shape: AnswerShape | AnthropicEvents = AnthropicEvents(name, request.model or model)
        if request.kind != "messages":
            self._shape = AnswerShape(request.kind, name, model, now, request.include_usage)
        self._first_token_at: float | None = None
        self._logprobs: list[Body] = []  # those that have not left yet
        self._cached: int | None = None  # known as soon as the model starts on it
        self._done = 0  # tokens of the prompt
        self._end: Finished | None = None
        state.live[request.request_id] = self._live

    def close(self) -> None:
        self._ticket.wish = "cancelled"
        self._state.live.pop(self._request.request_id, None)
        if self._end is None:
            self._tell(Finished("cancelled", self._cached or 0, "-"))

    def whole(self) -> Iterator[Body | None]:  # None while waiting, then the one body
        for deltas in self._listen():
            for delta in deltas:
                self._shape.say(delta)
            yield None  # at every token, or a client that left would get a whole reply
        yield self._shape.whole(self._listener.stream.message(), self._ending())

    def chunks(self) -> Iterator[Body | None]:
        """The bodies of a stream, keep-alives included; None while there is nothing to say."""
        shape, begun, spoke = self._shape, False, time.monotonic()
        for deltas in self._listen():
            bodies: list[Body] = []
            if not begun and self._cached is not None:
                bodies, begun = shape.begin(self._usage()), True
            for delta in deltas:
                bodies += shape.say(delta, self._take_logprobs())
            if not bodies and time.monotonic() - spoke >= self._state.config.keepalive_seconds:
                bodies = [shape.ping()]
            spoke = time.monotonic() if bodies else spoke
            yield from bodies or (None,)
        yield from shape.end(self._ending())

    def _listen(self) -> Iterator[list[Body]]:
        """Deltas as they come; returns when the turn is noted. Raises what ended it instead."""
        with kept_awake(self._state.config):
            while self._end is None:
                deltas: list[Body] = []
                match self._ticket.next_event(TICK_SECONDS):
                    case int(done):
                        self._cached = done if self._cached is None else self._cached
                        self._done, n_prompt = done, self._prepared.job.n_prompt
                        show_progress(self._request.request_id[:8], done=done, of=n_prompt)
                    case Token() as event:
                        deltas = self._hear(event)
                    case ServerError() as error:
                        self._end = Finished("failed", self._cached or 0, "-")
                        self._tell(self._end)
                        raise error
                    case Finished("cancelled"):
                        raise ClientGone
                    case Finished() as end:
                        is_whole = end.reason == "stop" or self._request.kind != "messages"
                        self._end, deltas = end, self._listener.finish(closes=is_whole)
                        self._remember(end)
                        self._note_turn(end)
                yield deltas

    def _hear(self, event: Token) -> list[Body]:
        self._first_token_at = self._first_token_at or time.monotonic()
        if event.logprob and not self._listener.is_over:
            value, best = event.logprob
            top = [self._logprob(*pair) for pair in best]
            self._logprobs.append({**self._logprob(event.id, value), "top_logprobs": top})
        deltas = self._listener.hear(event.id)
        if self._listener.is_over:
            self._ticket.wish = "stop"
        return deltas

    def _logprob(self, token: int, logprob: float) -> Body:  # OpenAI's -9999.0: it cannot come
        text = str(self._prepared.loaded.tokenizer.decode([token]))
        known = None if "\ufffd" in text else list(text.encode())  # it is a part of a character
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": known}

    def _take_logprobs(self) -> Body | None:
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
        heard, draft, job = self._listener, self._prepared.draft, self._prepared.job
        if not draft.keys or end.reason not in ("stop", "length"):
            return
        ids, reply, is_thinking = heard.ids, heard.stream.message(), heard.splitter.is_thinking
        reply["content"] = reply["content"] or ""
        said = self._prepared.loaded.template.canonical([reply])[0]
        ended = ids[-1] if ids and ids[-1] in self._prepared.loaded.eos_ids else None
        is_cut = is_thinking or "tool_calls" in reply or not reply["content"]  # not printed so
        # Nor can one go on from a reply of which the client has less than the model said.
        if not heard.is_over and not (ended is None and is_cut):
            whole = Generated(ids, job.prompt.hashes, ended, job.owner[1], time.monotonic())
            self._state.LEDGER.record(draft, reply=said, generated=whole)
        if not is_thinking:  # that is all that was thought, though more might have been said
            self._state.HEALING_STORE.remember(said.message, draft.answered[-1])

    def _note_turn(self, end: Finished) -> None:
        """Before the last words: the client's next request may be here right after them."""
        state, job, draft = self._state, self._prepared.job, self._prepared.draft
        facts, digests = self._tell(end), [turn.digest for turn in draft.turns]
        if end.reason == "deadline":  # nothing half-done is recorded
            return
        store, messages = state.SESSION_TURN_STORE, self._request.messages
        stable = _update_session_turn_store(store, job.owner[1], digests)
        facts |= {"parent": self._request.session.parent, "stable_prefix_msg_count": stable}
        state.SESSION_INDEX.note(job.owner[1], facts, at=time.monotonic())
        start = store.exchange_last(job.owner[1], [hash(marshal.dumps(m, 2)) for m in messages])
        head = draft.keys[0].hex()[:12] if draft.keys else None  # template, tools, switches
        record = {**facts, "head": head, "n_messages": len(messages)}
        if state.config.enable_request_logging:  # what earlier lines of this log do not have
            record["messages"] = messages[start:]
        if state.config.log_prompt_tokens:
            record["tokens"] = job.prompt.tokens.tolist()
        state.session_log.write(job.owner[1], record | state.metrics.snapshot())
        if draft.keys:
            self._compare(end, self._prepared.sent(self._listener.ids))

    def _compare(self, end: Finished, sent: Sent) -> None:
        """Say why, where much that this session had sent before was prefilled again."""
        store = self._state.SESSION_TURN_STORE
        before = store.nearest(sent, own=True)
        store.send(sent)
        if before is None or (again := sent_again(before, sent, cached=end.cached)) < 512:
            return  # so few tokens are not worth a sentence
        why = self._prepared.why(before, sent, cached=end.cached, held=end.held)
        name, said = self._request.request_id[:8], why.get("sentence", "it was sent elsewhere")
        full = f"{said}: {why['was']!r} is now {why['is']!r}" if "was" in why else said
        said = full if self._state.config.enable_request_logging else said
        log.warning("id=%s: about %d tokens were prefilled again: %s", name, again, said)
        facts = {"time": time.time(), "id": name, "session": sent.session}
        self._state.divergences.append({**facts, "again": again, "why": full})

    def _tell(self, end: Finished) -> Facts:
        """Say that the request is over, to all who count or show it."""
        ttft = (self._first_token_at or self._began) - self._began  # 0: there was none
        _, prefill, decode = (round(seconds, 3) for seconds in end.seconds)
        state, draft, facts = self._state, self._prepared.draft, self._about()
        facts |= {"cached": end.cached, "match": end.match, "finish": end.reason}
        facts |= {"prefill": prefill, "decode": decode, "ttft_ms": round(ttft * 1000)}
        facts |= {"replayed": draft.kept, "fallback": draft.fallback or None}
        log.info(request_line(**facts, **state.metrics.snapshot()))
        state.metrics.observe(facts)
        state.recent.append({"time": time.time(), **facts})
        return facts

    def _about(self) -> Facts:
        job, request = self._prepared.job, self._request
        about = {"id": request.request_id[:8], "api": request.kind, "session": job.owner[1]}
        return about | {"prompt": job.n_prompt, "out": len(self._listener.ids)}

    def _live(self) -> Facts:
        marks, now, cached = list(self._ticket.marks), time.monotonic(), self._cached or 0
        phase = ("queued", "prefill", "decode")[len(marks) - 1]
        n_new = len(self._listener.ids) if phase == "decode" else self._done - cached
        speed = round(n_new / max(now - marks[-1], 1e-3), 1)
        facts = {"phase": phase, "cached": cached, "done": self._done, "match": self._ticket.match}
        facts |= {"tokens_per_second": speed, "seconds": round(now - self._began, 1)}
        return self._about() | facts


def health(state: ServerState) -> tuple[int, dict[str, Any]]:
    """HTTP status and body; "ok" only while the model thread lives and the model is loaded."""
    why = "the model cannot be used; the server's log says why"
    said = {"ready": (200, {"status": "ok"}), "loading": (503, {"status": "loading"})}
    return said.get(state.engine.state, (503, {"status": "error", "error": why}))


def status_body(state: ServerState) -> dict[str, Any]:
    """GET /v1/status: everything that can be seen of the server, as of this moment."""
    engine, now, since = state.engine, time.monotonic(), state.started
    state.SESSION_TURN_STORE.forget(now - (state.config.ledger_ttl_seconds or math.inf))
    body = {**health(state)[1], "started": since, "uptime_seconds": int(time.time()) - since}
    body |= {"engine": {"state": engine.state, **engine.report}}
    body |= {"memory": {**engine.memory, "process": psutil.Process().memory_info().rss}}
    body |= {"requests": [tell() for tell in list(state.live.values())]}
    body |= {"recent": list(state.recent), "divergences": list(state.divergences)}
    body |= {"cache": [line for owner, line in engine.lines if state.tenant in ("", owner)]}
    body |= {"sessions": state.SESSION_INDEX.snapshot(now), "counters": state.metrics.snapshot()}
    body |= {"ledger": {**state.LEDGER.snapshot(now), "healing": len(state.HEALING_STORE)}}
    with suppress(NotReady):
        loaded = engine.model
        body["model"] = {"id": loaded.model_id, "family": loaded.family, "bytes": loaded.nbytes}
        body["model"]["context_length"] = loaded.limit
    return body


def metrics_text(state: ServerState) -> bytes:
    """GET /metrics: counters, histograms and what memory holds, for Prometheus."""
    said = status_body(state)
    gauges = {f"memory_{kind}_bytes": size for kind, size in said["memory"].items()}
    names = ("queued", "prefilling", "decoding", "lines")
    return state.metrics.exposition(gauges | {n: said["engine"].get(n, 0) for n in names})


def explain(state: ServerState, request: ChatRequest) -> dict[str, Any]:
    """POST /v1/cache/explain: what it would reuse, and why no more. Nothing is run."""
    while not (prepared := prepare(state, request)).draft.holds():
        pass
    draft, prompt, why = prepared.draft, prepared.job.prompt, None
    reuse = state.engine.ask(lambda scheduler: scheduler.cache.find(prompt))
    if draft.keys:
        sent, store = prepared.sent(), state.SESSION_TURN_STORE
        before = store.nearest(sent, own=True) or store.nearest(sent, own=False)
        why = {"sentence": "no request was answered before this one"}
        why = prepared.why(before, sent, cached=reuse.depth, held=reuse.shared) if before else why
    body: Facts = {"prompt": len(prompt.tokens), "would_reuse": reuse.depth}
    body |= {"match": reuse.match(len(prompt.tokens)), "replayed": draft.kept}
    return body | {"fallback": draft.fallback or None, "why_not_more": why or None}


def drop_cache(state: ServerState, session: str | None) -> dict[str, Any]:
    """DELETE /v1/cache: KV at rest and recorded pasts, of one session or all."""
    state.LEDGER.forget(session)
    return {"dropped": state.engine.ask(lambda x: x.cache.release(state.tenant, session))}


# region 21 HTTP ===============================================================
# The stdlib's server with a thread per connection, server-sent events, one error boundary.
# What goes wrong before the headers becomes a status and an error body of the API that was called;
# after them, an error event. Who may ask is settled before a byte of the body is read: `Host` tells
# a name that was rebound to us, `Origin` a web page, and a browser lets no page forge either.
# Doors   LLMServer, Handler
# Knows CONFIG, ERRORS, LOG, WIRE, MESSAGES, ANSWER · Thread connection · Budget 314

_LINE_LIMIT: Final = 1 << 12  # of a chunk-size line or a trailer
_PREFLIGHT: Final = ("OPTIONS", "*")
_COUNT: Final = ("POST", "/v1/messages/count_tokens")
_NO_KEY: Final = {("GET", "/"), ("GET", "/health"), ("GET", "/openapi.json"), _PREFLIGHT}
_METRICS: Final = prometheus.CONTENT_TYPE_LATEST
_ALWAYS: Final = {  # meant for the page, no harm elsewhere
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class LLMServer(ThreadingTCPServer):
    """One listening address. Several may share a state and a bound on open connections."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], state: ServerState, *, slots: threading.BoundedSemaphore
    ) -> None:
        self.state, self._slots = state, slots
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(self.address_family) as probe:
            probe.bind((address[0], 0))  # or it is not ours, and another machine would answer
            if probe.connect_ex(address) == 0:  # on macOS a bind may succeed all the same
                raise OSError(errno.EADDRINUSE, "in use")
        super().__init__(address, Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept, unless MAX_CONNECTIONS are open: an OSError has serve_forever ask again."""
        if self._slots.acquire(timeout=0.5):
            with suppress(OSError):
                return super().get_request()
            self._slots.release()
        raise BlockingIOError

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, _request: Any, client_address: Any) -> None:  # with no traceback
        log.debug("connection from %s ended badly: %r", client_address, sys.exception())


class _Incoming(socket.SocketIO):
    patience = due = 0.0  # a client sends something every `patience` seconds, and all by `due`

    def readinto(self, b: Any) -> int | None:
        seconds = min(self.patience, self.due - time.monotonic())
        if seconds <= 0 or not select.select([self], [], [], seconds)[0]:
            raise TimeoutError("the request is late")
        return super().readinto(b)


def _allowed(n_bytes: int, limit: int) -> int:
    if n_bytes > limit:
        said = f"the body is larger than MAX_BODY_BYTES ({limit} bytes)"
        raise NotServed(413, said, code="request_too_large")
    return n_bytes


def _chunks(rfile: io.BufferedIOBase, limit: int) -> Iterator[bytes]:
    """The parts of a chunked body, RFC 9112 section 7.1."""
    total, size = 0, -1
    while size:
        line = rfile.readline(_LINE_LIMIT).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
            raise BadRequest("the chunked body is malformed")
        size = int(line, 16)
        total = _allowed(total + size, limit)
        yield rfile.read(size)
        while rfile.readline(_LINE_LIMIT).strip() and not size:
            pass  # trailers


def _right_key(headers: Any, keys: Sequence[str]) -> str:
    """The key that came along, "" where none is needed. All are compared, in constant time."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    sent = headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""
    pairs = product((text.encode("latin-1").strip() for text in sent), keys)
    right = [key for text, key in pairs if hmac.compare_digest(text, key.encode())]
    if keys and not right:
        said = "a key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        raise NotServed(401, said, code="invalid_api_key", WWW_Authenticate="Bearer")
    return right[0] if right else ""


class Handler(BaseHTTPRequestHandler):
    """One connection: requests one after another, each through `_answer`."""

    server_version, sys_version = "start-llm", ""
    protocol_version = default_request_version = "HTTP/1.1"  # of the refusal of garbage, too
    disable_nagle_algorithm = True
    server: LLMServer
    path = ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.state.config.idle_connection_seconds)
        self._incoming = _Incoming(self.connection, "rb")
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        idle = self._incoming.patience = self.server.state.config.idle_connection_seconds
        self._incoming.due = time.monotonic() + 3 * idle  # up to one of them before it begins
        self.is_unread = True  # the request, or a part of it, as far as is known
        self._headers_sent, self._cors = False, dict[str, str]()
        super().handle_one_request()

    def finish(self) -> None:
        """To close with bytes unread is a reset, which can take the answer from the client."""
        self._incoming.patience = 1.0  # seconds without a byte
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.is_unread and self.rfile.read1(1 << 16):
                pass
        super().finish()

    def _answer(self) -> None:
        """The error boundary: only a lost connection gets through, to `LLMServer.handle_error`."""
        with ExitStack() as self._held:  # until the last word has left
            try:
                self._admit()
                self._route()
            except ServerError as error:
                self._send_error_body(error)
            except (ClientGone, ConnectionError, TimeoutError):
                raise
            except Exception:
                log.exception("unexpected failure in %s", self.requestline)
                self._send_error_body(ServerError("the server failed on this request"))

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer

    def _admit(self) -> None:
        """Refuse names, pages, bodies and keys, in this order, before the body is read."""
        config, host, origin = self.server.state.config, *map(self._header, ("Host", "Origin"))
        self._framing = "chunked" if self.request_version > "HTTP/1.0" else None  # of a stream
        own = entries(f"localhost,127.0.0.1,[::1],{config.mlx_host},{config.allowed_hosts}".lower())
        own += [f"{name}:{config.mlx_port}" for name in own]
        if "Host" in self.headers and is_loopback(config.mlx_host) and host not in own:
            raise NotServed(403, f"the Host {host[:200]!r} is not this server's: see ALLOWED_HOSTS")
        if "Origin" in self.headers and origin != f"http://{host}":
            if {origin, "*"}.isdisjoint(entries(config.cors_origins.lower())):
                raise NotServed(403, f"web pages of {origin[:200]!r} may not ask: see CORS_ORIGINS")
            may = {"Allow-Origin": origin, "Allow-Methods": "GET, POST, DELETE", "Max-Age": "600"}
            may["Allow-Headers"] = self._header("Access-Control-Request-Headers")
            self._cors = {"Vary": "Origin"} | {f"Access-Control-{k}": v for k, v in may.items()}
        self._length = self._body_length()
        self.is_unread = self._length != 0
        path, _, query = self.path.partition("?")
        self._session = dict(parse_qsl(query)).get("session", "" if query else None)
        asked = self.command.replace("HEAD", "GET"), path.rstrip("/") or "/"
        self._asked = _PREFLIGHT if self._cors and self.command == "OPTIONS" else asked
        key = "" if self._asked in _NO_KEY else _right_key(self.headers, entries(config.api_key))
        own_key = key if config.cache_isolation == "key" else ""  # whose stores; "": everybody's
        self._state = self.server.state.of(own_key and sha256(own_key.encode()).hexdigest()[:16])

    def _header(self, name: str) -> str:
        return " ".join(self.headers.get(name, "").lower().split())

    def _body_length(self) -> int:
        """Bytes of the body, -1 for a chunked one. Raises what refuses it unread."""
        length = ",".join(self.headers.get_all("Content-Length", ["0"])).strip()
        if self.headers.get_payload() or not re.fullmatch("[0-9]{1,18}", length):
            raise BadRequest("a line among the headers is no header, or Content-Length no number")
        if self._header("Content-Encoding") not in ("", "identity"):
            raise NotServed(415, "compressed bodies are not accepted; send plain JSON")
        if "Transfer-Encoding" in self.headers:  # whatever it says: not chunked is malformed
            self.close_connection |= "Content-Length" in self.headers  # RFC 9112 section 6.3
            return -1
        return _allowed(int(length), self.server.state.config.max_body_bytes)

    def handle_expect_100(self) -> bool:
        return True  # and nothing more: what is refused is not invited, `_read` does that

    def _read(self, parse: Callable[..., ChatRequest]) -> ChatRequest:
        """The whole body as a request. Raises ClientGone when it ends early."""
        if self._framing and self._header("Expect") == "100-continue":
            super().handle_expect_100()
        rfile, length, config = self.rfile, self._length, self.server.state.config
        chunks = _chunks(rfile, config.max_body_bytes) if length < 0 else [rfile.read(length)]
        if len(raw := b"".join(chunks)) < length:
            raise ClientGone
        self.is_unread = False
        body, request_id = parse_json_body(raw), uuid.uuid4().hex
        return parse(body, config, request_id=request_id, headers=dict(self.headers))

    def _route(self) -> None:
        method, path = self._asked
        path = re.sub("(?<=^/v1/models/).*", "*", path)
        if self._asked == ("GET", "/") and "text/html" not in self._header("Accept"):
            path = "/health"  # the page is for browsers
        routes = {taken: route for (taken, at), route in self._ROUTES.items() if at == path}
        if not routes:
            there = "; it is on PROXY_PORT, with ENABLE_PROXY" * (path == "/v1/responses")
            raise NotServed(404, f"there is nothing at {path[:200]}{there}")
        if method not in routes:
            allowed = ", ".join(routes)
            raise NotServed(405, f"{path} takes {allowed}, not {self.command}", Allow=allowed)
        if (body := routes[method](self)) is not None:
            self._send_json(200, body)

    def _send_file(self, name: str, kind: str) -> None:
        try:
            payload = (Path(__file__).resolve().parent / "web" / name).read_bytes()
        except OSError:
            raise NotServed(404, f"web/{name} is missing beside start-llm.py") from None
        self._send(200, payload, kind=kind)

    _ROUTES: Mapping[tuple[str, str], Callable[[Handler], object]] = {
        _PREFLIGHT: lambda h: h._begin(204),
        ("GET", "/"): lambda h: h._send_file("index.html", "text/html; charset=utf-8"),
        ("GET", "/health"): lambda h: h._send_json(*health(h.server.state)),
        ("GET", "/openapi.json"): lambda h: h._send_file("openapi.json", "application/json"),
        ("GET", "/metrics"): lambda h: h._send(200, metrics_text(h._state), kind=_METRICS),
        ("GET", "/v1/status"): lambda h: status_body(h._state),
        ("DELETE", "/v1/cache"): lambda h: drop_cache(h._state, h._session),
        ("POST", "/v1/cache/explain"): lambda h: explain(h._state, h._read(any_request)),
        ("GET", "/v1/models"): lambda h: models_body(h.server.state),
        ("GET", "/v1/models/*"): lambda h: model_body(h.server.state, unquote(h._asked[1][11:])),
        ("POST", "/v1/chat/completions"): lambda h: h._generate(ChatRequest.from_chat),
        ("POST", "/v1/completions"): lambda h: h._generate(ChatRequest.from_completion),
        ("POST", "/v1/messages"): lambda h: h._generate(from_anthropic),
        _COUNT: lambda h: token_count(h._state, h._read(from_anthropic)),
    }

    def _generate(self, parse: Callable[..., ChatRequest]) -> None:
        request = self._read(parse)
        if request.kind == "messages" and request.messages[-1]["role"] == "assistant":
            raise BadRequest("no reply can be begun for the model (prefill)", at="messages")
        answer = self._held.enter_context(closing(Answer(self._state, request)))
        if not request.stream:
            for body in self._new(answer.whole()):
                self._send_json(200, body)
            return
        kind = "text/event-stream; charset=utf-8"
        self._begin(200, Content_Type=kind, Transfer_Encoding=self._framing)
        for body in self._new(answer.chunks()):
            self._send_event(body)
        if request.kind != "messages":
            self._write_chunk(b"data: [DONE]\n\n")
        self._write_chunk(b"")

    def _new(self, bodies: Iterable[Body | None]) -> Iterator[Body]:
        """Those that are not None. Raises ClientGone if the other end closed meanwhile."""
        client = self.connection
        for body in bodies:
            if body is not None:
                yield body
            elif select.select([client], [], [], 0)[0] and not client.recv(1, socket.MSG_PEEK):
                raise ClientGone  # a pipelined request would have been something to read

    def _send_json(self, status: int, body: object, **headers: str) -> None:
        payload = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        self._send(status, payload, kind="application/json", **headers)

    def _send(self, status: int, payload: bytes, *, kind: str, **headers: str) -> None:
        self._begin(status, Content_Type=kind, Content_Length=str(len(payload)), **headers)
        if self.command != "HEAD":
            self.wfile.write(payload)

    def _begin(self, status: int, **headers: str | None) -> None:
        self._headers_sent = True
        self.send_response(status)
        for name, value in without_nulls({**_ALWAYS, **headers, **self._cors}).items():
            self.send_header(name.replace("_", "-"), value)  # Retry_After="2" is Retry-After: 2
        if self.close_connection or self.is_unread or self.request_version < "HTTP/1.1":
            self.send_header("Connection", "close")  # nothing could follow; http.server closes
        self.end_headers()

    def _send_error_body(self, error: ServerError) -> None:
        body = anthropic_error(error) if self.path.startswith("/v1/messages") else error.body()
        if self._headers_sent:
            self.close_connection = True
            self._send_event(body)
            self._write_chunk(b"")
        else:
            self._send_json(error.status, body, **error.headers)

    def _send_event(self, body: Body) -> None:
        """Anthropic's events have a name, which is their type. In ASCII: U+2028 may end lines."""
        name = f"event: {body['type']}\n" if "type" in body else ""
        self._write_chunk(f"{name}data: {json.dumps(body)}\n\n".encode())

    def _write_chunk(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload) if self._framing else payload)

    def send_error(self, code: int, message: str | None = None, *_more: str | None) -> None:
        """The stdlib's own refusals (bad request line, headers too long), in our error shape."""
        self._send_error_body(NotServed(code, message or "the request could not be understood"))

    def log_message(self, pattern: str, *args: Any) -> None:
        log.debug("%s %s", self.client_address[0], pattern % args)


# region 22 MAIN ===============================================================
# Build the state, listen, load, serve, stop. `/health` says 503 until the model is loaded, which
# happens on the model thread: arrays may not change threads before they are computed. LiteLLM is
# kept by scripts/litellm_beside.py: its stdin, a lifeline, closes however the server ends.
# Doors   build_state, proxy_beside, main
# Knows CONFIG, LOG, MODEL, ENGINE, ANSWER, HTTP · Thread main · Budget 144


def build_state(config: Config) -> ServerState:
    """Everything that outlives a request, not yet started."""
    metrics, started = CacheMetrics(), int(time.time())
    engine = Engine(config, metrics, load=lambda: load_model(resolve_model(config), config))
    stores = {**empty_stores(config, metrics), "session_log": SessionLog(config)}
    return ServerState(config, engine, metrics, started=started, **stores)


def _listen(config: Config, state: ServerState) -> list[LLMServer]:
    """Bind every address; the second loopback may be missing. Raises ConfigError if taken."""
    slots, port = threading.BoundedSemaphore(config.max_connections), config.mlx_port
    servers, both = list[LLMServer](), ("127.0.0.1", "::1")  # `localhost` may mean either
    for host in both if config.mlx_host in ("localhost", *both) else (config.mlx_host,):
        try:
            servers.append(LLMServer((host, port), state, slots=slots))
        except OSError as error:
            if servers and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            other = f"cannot listen on {host}:{port}: {error.strerror or error}"
            taken = f"port {port} on {host} is taken: start-llm runs already? Or set MLX_PORT"
            raise ConfigError(taken if error.errno == errno.EADDRINUSE else other) from error
    return servers


@contextmanager
def proxy_beside(config: Config, model: dict[str, Any]) -> Iterator[None]:
    """Inside, LiteLLM comes up and serves beside us; outside, nothing of it is left."""
    keeper = Path(__file__).resolve().parent / "scripts" / "litellm_beside.py"
    program = Path(sys.executable).with_name("litellm")
    if not (config.enable_proxy and program.exists() and keeper.exists()):
        log.info("no proxy: ENABLE_PROXY is off, LiteLLM is not installed, or no %s", keeper)
        yield
        return
    order = config.model_dump(mode="json") | {"program": str(program), "model_id": model["id"]}
    order |= model | {"api_key": "".join(entries(config.api_key)[:1])}
    # A session of its own: Ctrl-C is for the server, which then ends its proxy.
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
    with subprocess.Popen([sys.executable, keeper], **how) as process:  # closes its stdin, waits
        assert process.stdin
        with suppress(BrokenPipeError):  # dead already; its traceback is on the console
            process.stdin.write(json.dumps(order).encode() + b"\n")
        yield


def _serve(state: ServerState, servers: list[LLMServer], *, stop: threading.Event) -> int:
    """Load, then serve until told to stop (0) or until the model thread dies (1)."""
    for server in servers:
        threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    state.engine.start()
    while state.engine.state == "loading" and not stop.wait(0.1):
        pass
    with ExitStack() as beside:
        if is_loaded := state.engine.state == "ready":
            gc.collect()
            gc.freeze()  # why(L-36): what the libraries keep need not be searched at every turn
            sys.stderr.write(banner(state.engine.model, state.config) + "\n")
            beside.enter_context(proxy_beside(state.config, models_body(state)["data"][0]))
            lives_on = not state.config.exit_on_engine_death
            while not stop.is_set() and (lives_on or state.engine.state == "ready"):
                list(map(status_body, [*state.tenants.values()]))  # asked, it forgets what is old
                stop.wait(0.5)
        _drain(state, servers)
    if state.engine.trouble and not stop.is_set():
        sys.stderr.write(f"start-llm: {state.engine.trouble}\n")
        return 1 if is_loaded else 2
    return 0


def _drain(state: ServerState, servers: list[LLMServer]) -> None:
    """Take no more requests; replies may end in time, the others are cut."""
    state.engine.is_closing = True
    for server in servers:  # those who are connected stay so
        server.shutdown()
        server.server_close()
    for seconds in (state.config.shutdown_grace_seconds, 5.0):  # the last to say that it is cut
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and any(x.live for x in [*state.tenants.values()]):
            time.sleep(0.02)
        state.engine.stop()  # a second time it does nothing


def main() -> int:
    """Run the server; returns the exit status: 0 stopped, 1 the model died, 2 cannot start."""
    usage = "Settings, as MODEL_PATH, are environment variables or lines of .env: see .env.example."
    argparse.ArgumentParser(description=usage).parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection is one; macOS gives 256
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    getattr(ctypes.CDLL(None), "mallopt", min)(-8, 1)  # why(L-53): one arena for all threads
    stop = threading.Event()

    def told_to_stop(number: int, _frame: object) -> None:
        if stop.is_set():  # twice: at once, and LiteLLM too
            for child in psutil.Process().children():
                child.terminate()
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGINT, told_to_stop)
    signal.signal(signal.SIGTERM, told_to_stop)
    try:
        written = dotenv_values(Path(__file__).resolve().parent / ".env")
        config = Config.from_env({**written, **os.environ})
        start_logging(config)
        for name in sorted({*written} - {name.upper() for name in Config.model_fields}):
            log.warning("%s in .env: nothing acts on it", name)
        servers = _listen(config, state := build_state(config))
    except (ConfigError, UnicodeDecodeError, OSError) as error:
        sys.stderr.write(f"start-llm: {'.env: ' * isinstance(error, UnicodeError)}{error}\n")
        return 2
    return _serve(state, servers, stop=stop)


# endregion

if __name__ == "__main__":
    raise SystemExit(main())
