"""A local LLM server for agents that prefills only what is new.

Agents send their whole conversation again with each step. This server recognizes what
it has read and written before, replays exactly those tokens, and prefills only what is
new. The KV of a position is reused only for the very tokens that built it.

    client --> LiteLLM :4000 --> this server :8080 --> model thread --> MLX
               (optional)        a thread for each     the only one
                                 connection            that touches MLX

THE PATH OF A REQUEST
    body -> ChatRequest -> canonical messages -> PromptPlan: tokens replayed | rendered
         -> EngineRequest -> cached prefix | prefill -> decode -> text
         -> reasoning, content, tool calls -> response; KV and tokens are remembered

SECTIONS, in the order in which a request meets them; each uses only sections above it
    OPTIONS           the command line, read before what is slow to import
    CUDA              what MLX reads from the environment on an NVIDIA GPU
    ERRORS            what can go wrong, with the HTTP status of each
    CONFIG            all settings, read once
    LOGGING           console, session logs, metrics
    WORK BUDGET       how much is prepared at once, before the model has it
    API TYPES         a request as all APIs mean it; the figures of a reply
    REQUEST BODIES    JSON -> checked fields, or an error that names the field
    OPENAI API        request bodies -> ChatRequest; response bodies
    ANTHROPIC API     the same for the Messages API
    REQUEST IMAGES    images taken out of a request, markers left in their place
    CANONICALIZATION  a second copy of the messages, without what changes by itself
    SAVED RECORDS     what is remembered of conversations, in a file
    THINKING RESTORE  thinking that a client has stripped, put back
    TOKENIZER         text -> tokens; markup that a client sends is text
    TEMPLATE TRAITS   what the model's own chat template can print, found by probing
    CHAT TEMPLATE     messages -> text and tokens, by that template
    TOKEN HASHES      hashes of token blocks; markers in the place of image tokens
    LEDGER            replay what was recorded, render only new messages
    UPSTREAM          what we use of mlx-lm and mlx-vlm undocumented
    KV STATE          what the layers of a model keep, moved and copied
    PREFIX CACHE      KV of past requests, found by their tokens
    DISK CACHE        the same in files, for what a restart would forget
    SESSIONS          what each session sent last; why not more could be reused
    VISION MODEL      images as tokens, positions and embeddings
    MODEL LOADING     weights, tokenizer, and facts about them
    SAMPLING          the next token, among those that the request allows
    REPLY GRAMMAR     what a request demands of its reply: tool calls, JSON of a schema
    SCHEDULER         which requests run: admit, prefill, decode, put back
    WARM-UP           what would be compiled at the first requests, before they come
    ENGINE            the model thread, and what other threads ask of it
    REASONING PARSER  generated text -> reasoning | content | tool call text
    CALL TEXT         text of calls as it is read, schemas of tools, values as JSON
    CALL SYNTAXES     how models write tool calls
    MENDED JSON       arguments in JSON, with faults -> JSON, as they are generated
    FOREIGN CALLS     calls that are read as a whole, once they have ended
    TOOL CALLS        tool call text -> OpenAI tool calls, as they are generated
    CALL FORMS        how a call is written whose arguments fit the tool's schema
    TENANTS           what outlives a request, apart for each tenant
    REQUEST HANDLING  one request from its body to its response
    STATUS            health, status, metrics, explanations
    HTTP SERVER       routes, access checks, server-sent events, error responses
    MAIN              start, serve, stop; LiteLLM beside the server

GLOSSARY; in brackets the name in the system that this one replaces
    canonical message   a message without its volatile fields: compared, never rendered
    volatile field      a part that changes by itself: an id, a date, a reminder
      pinned value      one that stays in the prompt as it was rendered first
      note              a reminder or late system message, which comes and goes
    restate             put into the newest message what a replayed prompt lacks
    ledger, transcript  recorded tokens of conversations. Others have none: vLLM, SGLang
                        and llama.cpp render and tokenize the whole history each time
    splice              render only new messages, to follow a transcript
    cache entry         KV of a conversation; SGLang: a path in the radix tree
    PrefixCache         all entries; SGLang: RadixCache [LRUPromptCache]
    checkpoint          state of layers that cannot be rewound, at one position;
                        SGLang: a Mamba state, llama.cpp: a context checkpoint
    token key           a prompt with its block hashes; vLLM: block hashes of a request
    running request     a request on the model; vLLM: Request in the running queue
    decode batch        requests that decode together; mlx-lm: GenerationBatch
    layer caches        one object a layer; mlx-lm: prompt_cache
    canonicalize_messages, heal_messages, kv_cache_offset, block_hashes ...
                        [the same with an underscore]; [_scrub_cache_key]: gone, keys
                        are made of model tokens alone

WHAT NEVER HAPPENS
    KV is reused for another token than the one that built it.
    Prompt tokens are cut at anything but a KvOffset, made by kv_cache_offset() alone.
    A failed reply is recorded in the ledger, or more of one that its client has left
    than was shown. (The KV of a reply that was cancelled, or had to end for want of
    memory, is exact, so it is kept; KV that an exception interrupted is dropped.)
    A second thread touches MLX. (An image's processor copies what it returns into MLX
    arrays, on any thread; there, nothing is computed with them.)
    Content that a client sends is lost in silence: what cannot be read gets an error, a
    sentence in its place in the prompt, or a line in the log. (Left out on purpose:
    telemetry; of Anthropic's, server tools that are offered and encrypted thinking; of
    a tool, all but its function; of thinking under two names, one.)

THREADS AND LOCKS
    main        starts, waits, stops          model       loads and runs the model
    accept      one for each address          connection  one for each client: parses,
    console     writes the log                            renders, waits, writes
    disk        writes KV to files            records     saves what is remembered
    Locks guard themselves only: none is held while another is taken, or while waiting.
    (But jinja2's LRUCache has a lock of its own, for one access at a time.)
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until main() handles them, signals end the process at once, without a traceback.
    # install_and_run.py has blocked them until here: Python itself would print one.
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))

import argparse
import ast
import atexit
import binascii
import ctypes
import errno
import fcntl
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
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import zlib
from bisect import bisect_left
from calendar import day_abbr, day_name, month_abbr, month_name
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    suppress,
)
from copy import copy
from dataclasses import (
    KW_ONLY,
    asdict,
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from datetime import date, datetime
from difflib import get_close_matches
from email.message import Message as HttpHeaders
from enum import Enum, auto
from functools import cached_property, lru_cache, partial
from hashlib import sha1, sha256
from heapq import heapify, heappop, heappush
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of_package
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import (
    batched,
    chain,
    count,
    groupby,
    islice,
)
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import NoneType
from typing import (
    Annotated,
    Any,
    BinaryIO,
    Final,
    Literal,
    NamedTuple,
    NewType,
    NoReturn,
    NotRequired,
    Protocol,
    TextIO,
    TypedDict,
    cast,
    get_args,
)
from unittest.mock import patch
from urllib.parse import parse_qsl, unquote
from weakref import WeakValueDictionary

# region OPTIONS ===============================================================
# The command line. It is read before anything that is slow to import, so that --help,
# --version and a wrong option are answered at once.
#
# Each option stands for a setting, and wins over the environment and .env. For example
# `--port 9000 --no-proxy` is {"MLX_PORT": "9000", "ENABLE_PROXY": "false"}. The program
# install_and_run.py has the same options; a test holds them equal.
#
# Public   VERSION, read_options
# Uses     -
# Thread   main; pure

# An older Python stops at this line, which it cannot parse, and prints it.
type _Needs = Literal["start-llm needs Python 3.12: run python3 install_and_run.py"]

VERSION: Final = "1.0.0"  # a test holds pyproject.toml to it


class _OptionParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without listing all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"start-llm: {message} (--help lists the options)\n")

    def refuse(self, word: str) -> NoReturn:
        """Exit, for a word that is no option: for --prot, say that --port is meant."""
        if not word.startswith("-"):
            self.error(f"{word} stands alone: --model {word} is meant?")
        name = word.split("=")[0]
        options = [option for option in self._option_string_actions if option != "-h"]
        near = get_close_matches(name, options, n=1)
        advice = f": {near[0]} is meant?" if near else ""
        self.error(f"{name} is no option{advice}")


def read_options(arguments: Sequence[str]) -> dict[str, str]:
    """The settings that the options of a command line stand for.

    Raises SystemExit: after --help or --version, or with status 2 and a sentence.
    """
    parser = _OptionParser(
        prog="start-llm",
        description="Serve a local model to agents.",
        epilog="All other settings are environment variables or lines of .env: see"
        " .env.example. An option wins over both.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        dest="MODEL_PATH",
        metavar="NAME",
        help="Hugging Face repository, folder or demo (MODEL_PATH)",
    )
    parser.add_argument(
        "--port",
        dest="MLX_PORT",
        metavar="N",
        type=_read_port,
        help="TCP port (MLX_PORT, 8080)",
    )
    parser.add_argument(
        "--host",
        dest="MLX_HOST",
        metavar="ADDRESS",
        help="where to listen (MLX_HOST, 127.0.0.1)",
    )
    parser.add_argument(
        "--api-key",
        dest="API_KEY",
        metavar="KEY",
        help="that each request must bring (API_KEY)",
    )
    parser.add_argument(
        "--backend",
        dest="MLX_BACKEND",
        metavar="NAME",
        type=_read_backend,
        help="auto, cpu or cuda: where MLX computes (MLX_BACKEND, auto)",
    )
    parser.add_argument(
        "--no-proxy",
        dest="ENABLE_PROXY",
        action="store_const",
        const="false",
        help="do not start LiteLLM (ENABLE_PROXY=false)",
    )
    parser.add_argument(
        "--warm-up",
        dest="KERNEL_WARM_UP",
        action="store_const",
        const="exit",
        help="load the model, compile what it needs, and end (KERNEL_WARM_UP=exit)",
    )
    parser.add_argument("--version", action="version", version=f"start-llm {VERSION}")

    options, unknown_words = parser.parse_known_args(arguments)
    if unknown_words:
        parser.refuse(unknown_words[0])
    return {name: text for name, text in vars(options).items() if text is not None}


def _read_port(text: str) -> str:
    if not (text.isdecimal() and 0 < int(text) < 65_536):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 65535")
    return text


def _read_backend(text: str) -> str:
    if text not in {"auto", "cpu", "cuda"}:
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda")
    return text


if __name__ == "__main__":
    read_options(sys.argv[1:])
    if sys.version_info[:2] != (3, 12) or find_spec("mlx_lm") is None:
        sys.exit(
            f"start-llm: {sys.executable} is no Python 3.12 with what this needs: run "
            "python3 install_and_run.py, which makes one and starts the server"
        )


# region CUDA ==================================================================
# What MLX's CUDA build reads from the environment when it is imported. That build is
# installed on Linux with an NVIDIA GPU; where it is not, nothing is set.
#
# It compiles each kernel when it is first needed (38 s for a first request on an H200),
# and keeps it as a file. By default the files lie in /tmp: a reboot deletes them, and
# where a machine has several users, one of them may put code there that we would run.
# MLX finds a file by the kernel's name alone, even one that was made for another GPU or
# by another MLX or compiler. So each user has a folder for each combination of these:
#
#     ~/.cache/start-llm/kernels/mlx-0.32.4-sm_89-nvrtc-13.5.37
#
# A variable that the user has set stays as it is. Where no private folder can be made,
# the files stay in /tmp.
#
# Public   set_cuda_environment
# Uses     -
# Thread   main

_CUDA_SETTINGS = {
    # MLX caches graphs and attention plans: a new one for each length of the last slice
    # of a prompt. Once it has made twice as many as a cache holds, it would raise an
    # exception, which the first line prevents.
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",  # instead of 400
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",  # instead of 256; a plan takes 22 ms
}


def set_cuda_environment(environ: MutableMapping[str, str]) -> None:
    """Set what MLX's CUDA build should read, where that build is installed."""
    try:
        mlx_version = version_of_package("mlx-cuda-13")
        compiler_version = version_of_package("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return
    for name, value in _CUDA_SETTINGS.items():
        environ.setdefault(name, value)

    if "MLX_PTX_CACHE_DIR" in environ:
        return
    architecture = _find_architecture()
    if not architecture:
        return
    key = f"mlx-{mlx_version}-{architecture}-nvrtc-{compiler_version}"
    home = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "start-llm" / "kernels" / key
    if _make_private(folder):
        environ["MLX_PTX_CACHE_DIR"] = str(folder)


def _find_architecture() -> str:
    """The GPU's, as "sm_89"; "" where the driver shows no GPU that MLX can use."""
    script = Path(__file__).with_name("scripts") / "helpers" / "find_gpu.py"
    command = [sys.executable, str(script)]
    try:
        printed = subprocess.check_output(command, timeout=20)
        answer: dict[str, str] = json.loads(printed)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    return answer.get("architecture", "")


def _make_private(folder: Path) -> bool:
    """Make a folder that only this user reads and writes; False: it cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


if __name__ == "__main__":
    set_cuda_environment(os.environ)
    try:
        import_module("mlx.core")
    except ImportError as problem:  # the CUDA build, without a driver
        sys.exit(
            f"start-llm: MLX cannot be loaded ({problem}): run python3 "
            "install_and_run.py, which installs MLX's build for this machine"
        )

# What is slow to import: seconds of MLX, transformers and others.
import mlx.core as mx

# mlx-lm sets the limit of open files when it is imported, and fails where it may not.
with patch.object(resource, "setrlimit"):
    import mlx_lm

import numpy as np
import numpy.typing as npt
import prometheus_client as prometheus
import psutil  # type: ignore[import-untyped]
import regex  # type: ignore[import-untyped]
from dotenv import dotenv_values
from dotenv.parser import parse_stream
from jinja2.utils import LRUCache
from mlx.nn import Module  # type: ignore[attr-defined]
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import GenerationBatch, StopSequences, wired_limit
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_p,
    greedy_sampler,
    make_logits_processors,
)
from PIL import Image, ImageOps
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, ValidationError, from_json
from rich.console import Console
from rich.filesize import decimal as in_bytes
from rich.logging import RichHandler
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerBase

# region ERRORS ================================================================
# What can go wrong while a request is answered; each error knows its HTTP status.
#
#     class               status    type                   code
#     ServerError         500       server_error           -
#       GenerationFailed  500       server_error           generation_failed
#       NotReady          503       server_error           model_not_ready
#       Overloaded        503       server_error           queue_full
#       BadRequest        400       invalid_request_error  -
#         ContextTooLong  400       invalid_request_error  context_length_exceeded
#         NotServed       4xx, 501  invalid_request_error  given where it is raised
#     ClientGone          none: nobody is left to read an answer
#
# For example BadRequest("should be a text", field="messages[3].content") is sent as
#
#     status   400
#     message  "messages[3].content: should be a text"
#     type     "invalid_request_error"
#     param    "messages[3].content"
#
# Any section raises them. Handler (HTTP SERVER) sends the status and the body; in a
# stream that has begun, an event with the body. After any other exception the log has
# the traceback, and the client gets a 500 without it. The form and the types are
# OpenAI's. So is the code context_length_exceeded, at which agents compact; most other
# codes are our own. For the Messages API anthropic_error_body() translates them.
#
# Public   ServerError, BadRequest, ContextTooLong, NotServed, NotReady, Overloaded,
#          GenerationFailed, ClientGone, describe_fault, OUR_FAULT
# Uses     -
# Thread   any; pure


class _ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(TypedDict):
    error: _ErrorObject


class ServerError(Exception):
    """A request that gets an error instead of an answer; str() of it is the message."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None
    param: str | None = None  # the field at fault, as in "messages[3].content"
    quote: str = ""  # the part of the message that may be what the client wrote
    headers: Mapping[str, str] = {}  # that the response has besides the usual ones

    def without_quote(self) -> str:
        """The message for those who did not write the request: log and status page."""
        return str(self).replace(self.quote, "...") if self.quote else str(self)

    def body(self) -> _ErrorBody:
        """The body of the response, as OpenAI writes it."""
        return {
            "error": {
                "message": str(self),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class GenerationFailed(ServerError):
    """The model failed on this request. The traceback is in the log only."""

    code = "generation_failed"


class NotReady(ServerError):
    """The model is still loading, or the model thread is dead."""

    status = 503
    code = "model_not_ready"
    headers: Mapping[str, str] = {"Retry-After": "5"}


class Overloaded(ServerError):
    """No place for this request now. A 429 would mean a quota to clients."""

    status = 503
    code = "queue_full"
    headers: Mapping[str, str] = {"Retry-After": "2"}


class BadRequest(ServerError):
    """The request cannot be answered as it is.

    Both `field` and `param` are the path of the field at fault. `field` is put before
    the message, too; `param` leaves the message as it is.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        param: str | None = None,
        quote: str = "",
    ) -> None:
        if field:
            message = f"{field}: {message}"
            param = field
        super().__init__(message)
        self.param = param
        self.quote = quote


class ContextTooLong(BadRequest):
    """The prompt leaves no room for a reply.

    In OpenAI's words: agents look for "maximum context length is", and then compact.
    """

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. "
            f"However, your messages resulted in {n_prompt} tokens. "
            "Please reduce the length of the messages.",
            param="messages",
        )
        self.n_prompt = n_prompt
        self.limit = limit


class NotServed(BadRequest):
    """Refused for its path, headers, size or model name, each with its own status.

    401 key, 403 host or web page, 404 path or model, 405 method, 408 a body that comes
    too slowly, 413 one that is too large, 415 its encoding, 501 its transfer coding.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ClientGone(Exception):
    """The client has closed its connection."""


# -- wrong values ----------------------------------------------------------------------
# pydantic checks requests and settings. A client reads our sentences, not pydantic's.

# The type of our own PydanticCustomError: its message is such a sentence already.
OUR_FAULT: Final = "ours"
# Our sentence for each of pydantic's types. In braces: values of the fault's context.
_FAULTS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "bool_type": "should be true or false",
    "bool_parsing": "should be true or false",
    "dict_type": "should be an object",
    "float_type": "should be a number",
    "float_parsing": "should be a number",
    "finite_number": "should be a number, and finite",
    "int_type": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_parsing_size": "should be a whole number with fewer digits",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "string_type": "should be a text",
    "model_attributes_type": "should be an object",
    "union_tag_not_found": "should have a type",
    "union_tag_invalid": "should be of type {expected_tags}",
    "literal_error": "should be {expected}",
    "greater_than": "should be more than {gt}",
    "greater_than_equal": "should be {ge} or more",
    "less_than": "should be less than {lt}",
    "less_than_equal": "should be {le} or less",
    "too_short": "should not be empty",
    "too_long": "should have {max_length} items or fewer",
    "string_too_short": "should not be empty",
    "string_too_long": "should have {max_length} characters or fewer",
}


def describe_fault(details: ErrorDetails) -> str:
    """What is wrong with a value, in our words: "should be 1 or more"."""
    if details["type"] == OUR_FAULT:
        return details["msg"]
    sentence = _FAULTS.get(details["type"], "has a value that cannot be used")
    return sentence.format_map(details.get("ctx", {}))


# region CONFIG ================================================================
# All settings, read once at the start and never changed. Three parts:
#
#     settings            Config: one line for each, with its default and its range
#     tenants             who shares nothing with whom, by CACHE_ISOLATION
#     misspelt settings   names in .env or the environment that nothing acts on
#
# For example MAX_KV_SIZE=32768, a variable of the environment or a line of .env, is the
# field max_kv_size of Config; the environment wins. (MAIN reads both.) To add a
# setting, write a line in Config and one in .env.example, then run
# scripts/tools/list_settings.py, which writes docs/settings.md: tests hold the three to
# the same list. Only .env.example explains a setting at length.
#
# Public   Config, ConfigError, check_names, split_list, is_loopback, write_url,
#          has_tenants, name_tenant, key_of_tenant, is_seen_by,
#          Temperature, TopP, MinP, RepetitionPenalty
# Uses     ERRORS
# Thread   any; pure

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Port = Annotated[int, Field(ge=1, le=65_535)]
_Fraction = Annotated[float, Field(ge=0, le=1)]
_Seconds = Annotated[float, Field(ge=0)]
_SocketTimeout = Annotated[float, Field(gt=0, le=1e8)]  # macOS refuses longer ones
# Of a request as of a setting: SamplingParams has these ranges, too.
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]

_Lower = BeforeValidator(str.lower)
_Upper = BeforeValidator(str.upper)
_ModelFamily = Annotated[Literal["auto", "qwen3", "glm4", "generic"], _Lower]
_AutoOrOff = Annotated[Literal["auto", "off"], _Lower]
_Backend = Annotated[Literal["auto", "cpu", "cuda"], _Lower]
_ModelKind = Annotated[Literal["auto", "text", "vision"], _Lower]
_AutoOnOff = Annotated[Literal["auto", "on", "off"], _Lower]
_WarmUp = Annotated[Literal["auto", "on", "off", "exit"], _Lower]
_ImagePolicy = Annotated[Literal["refuse", "placeholder"], _Lower]
_Isolation = Annotated[Literal["none", "key", "user"], _Lower]
_RuleClass = Annotated[Literal["telemetry", "pinned", "transient", "off"], _Lower]
_NoteClass = Annotated[Literal["transient", "off"], _Lower]
_LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], _Upper]


class ConfigError(ValueError):
    """Settings that cannot be used: for each a line with its value and the fault."""


def split_list(text: str) -> list[str]:
    """The parts of a comma-separated setting; empty parts are dropped."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address: 127.0.0.0/8, ::1, localhost."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host.lower() == "localhost"


def write_url(host: str, port: int) -> str:
    """A URL that works on this machine; an address of all networks has loopback's."""
    openable = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}
    host = openable.get(host.lower(), host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Config(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The settings of the server. from_env() makes it; tests pass fields by keyword."""

    # Model
    model_path: str = ""  # repository or folder; empty: choose_model() chooses one
    model_family: _ModelFamily = "auto"  # whose tool-call format is tried first
    hf_token: str = Field(default="", repr=False)  # for gated repositories
    trust_remote_code: bool = False  # run Python that comes with a model or tokenizer
    model_kind: _ModelKind = "auto"  # text: load with mlx-lm; vision: with mlx-vlm
    mlx_backend: _Backend = "auto"  # install_and_run.py installs MLX's build for it
    cpu_float32: _AutoOrOff = "auto"  # on the CPU, compute narrower weights as float32
    strict_model_names: bool = False  # a request for another model is a 404

    # HTTP server. Keys stand above the settings that need one: see _require_key().
    api_key: str = Field(default="", repr=False)  # a list; each request must send one
    mlx_host: str = "127.0.0.1"  # this, ::1 and localhost: both loopback addresses
    mlx_port: _Port = 8080
    max_connections: Annotated[int, Field(ge=1, le=900)] = 256  # open at once
    max_queued_requests: _Positive = 256  # waiting for the model; one more is a 503
    max_body_bytes: _Positive = 67_108_864  # of one request (64 MiB)
    allow_remote_images: bool = False  # fetch http(s) URLs, from public addresses only
    images_on_text_model: _ImagePolicy = "refuse"
    keepalive_seconds: _SocketTimeout = 10.0  # between the events of a waiting stream
    idle_connection_seconds: _SocketTimeout = 60.0  # until it is closed
    keep_awake: bool = False  # macOS does not sleep while a request runs
    shutdown_grace_seconds: _Seconds = 10.0  # for running replies when it has to stop
    exit_on_engine_death: bool = True  # so that a supervisor starts it again
    allowed_hosts: str = ""  # a list: more names that clients call this machine by
    # key: no two keys share anything; user: nor do two users of a key
    cache_isolation: _Isolation = "none"
    cors_origins: str = ""  # a list: web pages that may send requests; "*": all

    # LiteLLM
    enable_proxy: bool = True  # run it beside the server, if it is installed
    proxy_model_id: str = ""  # the model's name there; empty: the model's own
    proxy_port: _Port = 4000
    proxy_api_key: str = Field(default="", repr=False)  # empty: API_KEY, if any
    proxy_host: str = "127.0.0.1"
    proxy_startup_wait_seconds: _Seconds = 10.0  # between log lines while it starts

    # Engine
    max_kv_size: _Positive = 196_608  # tokens of prompt and reply: limits admission
    prefill_step_size: _Positive = 2048  # tokens fed to the model at once
    batch_max_rows: _Positive = 32  # requests that run at once
    batch_padding_max: _Fraction = 0.25  # padding of a decode batch / its real KV
    generation_watchdog_seconds: _Seconds = 600.0  # for one request; 0: no limit
    queue_timeout_seconds: _Seconds = 0.0  # of waiting for the model; 0: no limit
    kernel_warm_up: _WarmUp = "auto"  # auto: on an NVIDIA GPU; exit: warm up, and end
    memory_limit_bytes: _Count = 0  # 0: 0.9 of what the device recommends

    # Prompt cache and ledger
    prompt_cache_max_bytes: _Count = 0  # 0: a share of what the model leaves free
    prompt_cache_max_entries_global: _Count = 1000  # 0: nothing is reused
    prompt_cache_max_entries_per_session: _Count = 2  # turns that /v1/status shows
    prompt_cache_ttl_seconds: _Seconds = 0.0  # since last use; 0: for ever
    prompt_cache_session_max_idle_seconds: _Seconds = 1800.0  # in /v1/status
    prompt_cache_block_size: _Positive = 16  # tokens in a hashed block
    cache_use_block_index: bool = True  # compare hashes of blocks, not each token
    cache_canonicalize_tool_context: bool = True  # false: no ledger, render as sent
    cache_vlm_image_identity: bool = True  # false: no reuse from the first image on
    cache_norm_safety_check: bool = False  # warn if a rule masks over a tenth of a text
    normalize_write_tool_content_for_prompt: bool = False  # shorten written contents
    ledger_max_bytes: _Count = 268_435_456  # 256 MiB; at most 1/16 of all memory
    ledger_ttl_seconds: _Seconds = 86_400.0  # since last use; 0: for ever

    # Cache on disk: what was read before a restart need not be read again
    cache_disk: _AutoOnOff = "auto"  # auto: on for one person, on this machine
    cache_disk_folder: str = ""  # empty: ~/.cache/start-llm
    cache_disk_max_bytes: _Count = 0  # 0: 32 GiB, but a tenth of the free disk at most
    cache_disk_max_bytes_per_day: _Count = 0  # written; 0: four times the one above

    # Classes of volatile fields: see CANONICALIZATION
    rule_billing_header: _RuleClass = "telemetry"  # x-anthropic-billing-header: ...
    rule_message_id: _RuleClass = "pinned"  # "message_id": "..." in a system prompt
    rule_inbound_context: _RuleClass = "pinned"  # a section of OpenClaw's system prompt
    rule_user_message_id: _RuleClass = "pinned"  # the same in front of a user's text
    rule_timestamp: _RuleClass = "pinned"  # [Wed 2026-02-18 20:48 UTC] before a text
    rule_current_time: _RuleClass = "pinned"  # Current time is ...
    rule_current_date: _RuleClass = "pinned"  # Current date: ..., Today is ...
    rule_git_status: _RuleClass = "pinned"  # gitStatus: ... ends a system prompt
    rule_runtime: _RuleClass = "pinned"  # Stats: runtime ...
    rule_session_line: _RuleClass = "pinned"  # Runtime: agent=...
    rule_reminder: _RuleClass = "transient"  # <system-reminder>...</system-reminder>
    rule_internal_context: _RuleClass = "transient"  # OpenClaw's last message
    rule_operator_note: _RuleClass = "transient"  # LiteLLM's form of a system message
    rule_late_system: _NoteClass = "transient"  # a system message after a user message

    # Sampling, where a request does not say
    default_temperature: Temperature = 0.1  # 0: greedy
    default_top_p: TopP = 0.9  # 1: off
    default_top_k: _Count = 40  # 0: off
    default_min_p: MinP = 0.05  # 0: off
    default_repetition_penalty: RepetitionPenalty = 1.0  # off; more harms tool calls
    default_repetition_context_size: _Count = 256  # tokens that the penalty looks at
    default_max_tokens: _Positive = 2048  # of one reply
    default_thinking: bool = True  # the model thinks before it replies
    preserve_thinking: bool = True  # past thinking stays in the prompt

    # Logs
    log_level: _LogLevel = "INFO"
    enable_request_logging: bool = False  # session logs contain what clients send
    log_prompt_tokens: bool = False  # session logs contain the ids of each prompt
    log_root: str = "logs"  # folder; a relative one is beside start-llm.py
    log_keep_days: _Count = 14  # of session logs; 0: for ever
    vlm_cache_debug: bool = False  # log where the images of a prompt are

    @field_validator("mlx_host", "proxy_host", "cache_isolation")
    @classmethod
    def _require_key(cls, value: str, info: ValidationInfo) -> str:
        """Without a key, refuse an address that others can reach, and isolation by key.

        pydantic validates the fields in their order, and info.data has those above. So
        MLX_HOST and CACHE_ISOLATION need API_KEY; PROXY_HOST, which stands below both
        keys, needs one of the two.
        """
        if info.field_name == "cache_isolation":
            needs_key = value == "key"
        else:
            needs_key = not is_loopback(value)
        keys = [info.data.get(name, "") for name in ("api_key", "proxy_api_key")]
        if needs_key and not any(split_list(key) for key in keys):
            sentence = "should be used only where API_KEY is set"
            raise PydanticCustomError(OUR_FAULT, sentence)
        return value

    @classmethod
    def from_env(
        cls, env: Mapping[str, str | None], *, places: Mapping[str, str] | None = None
    ) -> Config:
        """Settings from variables by name; an empty variable counts as not set.

        Variables that are no settings are passed over: check_names() is for them.
        Raises ConfigError with a line for each bad value; `places` says where each
        variable stands, such as {"MLX_PORT": "in /home/me/start-llm/.env"}.
        """
        texts = {}
        for name in cls.model_fields:
            text = (env.get(name.upper()) or "").strip()
            if text:
                texts[name] = text

        try:
            return cls.model_validate(texts)
        except ValidationError as error:
            faults = error.errors()

        lines = []
        for fault in faults:
            field_name = str(fault["loc"][0])
            name = field_name.upper()
            place = f" {places[name]}" if places else ""
            setting = f"{name}={texts[field_name]!r}{place}"
            lines.append(f"{setting}: {describe_fault(fault)}")
        raise ConfigError("\n".join(lines))


# -- tenants ---------------------------------------------------------------------------
# A tenant is who shares nothing with others: everybody, a key, or a user of a key. Each
# has a name, made of digests:
#
#     ""                                   everybody
#     "8d1f5c0ab3e27946"                   a key
#     "8d1f5c0ab3e27946/41b6e09f7ad2c385"  a user of that key
#
# CACHE_ISOLATION=none has the first only, =key the first two, =user all three. Where
# API_KEY is a single key, its name is "", and that of its user "/41b6e09f7ad2c385". A
# request that names a user belongs to that user, any other to its key.
#
# A tenant reuses only what is its own. In reports, and when it has things forgotten, it
# sees what is below it, too: "" sees everything, a key also what its users have.


def has_tenants(config: Config) -> bool:
    """Whether there can be two tenants."""
    if config.cache_isolation == "key":
        return len(split_list(config.api_key)) > 1
    return config.cache_isolation == "user"


def name_tenant(config: Config, *, key: str, user: str) -> str:
    """The tenant of a request with this API key, for this user; either may be ""."""
    if not has_tenants(config):
        return ""
    has_keys = len(split_list(config.api_key)) > 1
    tenant = _short_digest(key) if has_keys and key else ""
    if config.cache_isolation == "user" and user:
        tenant += f"/{_short_digest(user)}"
    return tenant


def key_of_tenant(tenant: str) -> str:
    """The key that a user belongs to: "K" of "K/U", and of "K" itself."""
    return tenant.partition("/")[0]


def is_seen_by(viewer: str, tenant: str) -> bool:
    """Whether `viewer` may see what is `tenant`'s: it is that tenant, or above it."""
    return viewer in ("", tenant, key_of_tenant(tenant))


def _short_digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# -- misspelt settings -----------------------------------------------------------------
# .env is ours alone, so every unknown name in it is a mistake. The environment has the
# variables of other programs, too: there, only what is nearly a setting's name is one.
#
#     .env         LOG_PATH=x   "... nothing acts on it; did you mean LOG_ROOT?"
#     environment  LOG_PATH=x   no sentence
#                  MLX_PROT=9   "... nothing acts on it; did you mean MLX_PORT?"
#     both         KV_BITS=8    "... nothing acts on it yet"
#                  MODELPATH=x  ConfigError, unless MODEL_PATH is set

# Settings of other programs that a shell may have, each a letter or two from one of
# ours: GitHub's token, a level of many programs, LocalAI's folder.
_FOREIGN_NAMES: Final = {"GH_TOKEN", "LOGLEVEL", "MODELS_PATH"}
# Settings of the system that this one replaces, for what it does not do yet.
_IDLE_NAMES: Final = {
    "CACHE_SESSION_PARTITIONING",
    "KV_BITS",
    "KV_GROUP_SIZE",
    "KV_QUANT_SCHEME",
    "QUANTIZED_KV_START",
}
_SETTING_NAMES: Final = {name.upper() for name in Config.model_fields}
_TYPO_RATIO: Final = 0.875  # of difflib: two letters swapped in a name of eight
_SIMILAR_RATIO: Final = 0.6  # difflib's default


class _UnknownName(NamedTuple):
    """A variable that is no setting, and the setting that is probably meant, if any."""

    name: str
    place: str
    setting: str

    def describe(self) -> str:
        sentence = f"{self.name} in {self.place}: nothing acts on it"
        if self.name in _IDLE_NAMES:
            return f"{sentence} yet"
        return f"{sentence}; did you mean {self.setting}?" if self.setting else sentence


def check_names(
    env_file: Mapping[str, str | None], environ: Mapping[str, str]
) -> list[str]:
    """A sentence for each variable that is probably meant as a setting, but is none.

    Raises ConfigError if MODEL_PATH is meant and is not set: the server would load
    another model.
    """
    unknown = [*_unknown_in_file(env_file), *_unknown_in_environment(environ)]
    values = {**env_file, **environ}
    has_model = bool(values.get("MODEL_PATH"))
    for variable in unknown:
        is_model = variable.setting == "MODEL_PATH"
        if is_model and values[variable.name] and not has_model:
            advice = "Rename or remove it: as it is, another model would be served"
            raise ConfigError(f"{variable.describe()} {advice}")
    return [variable.describe() for variable in unknown]


def _unknown_in_file(env_file: Mapping[str, str | None]) -> Iterator[_UnknownName]:
    """All unknown names in .env, each with the setting that is most like it.

    A name that is taken for MODEL_PATH stops the start. So only its typing errors are,
    and names that begin with MODEL, such as MODEL_NAME.
    """
    for name in sorted(env_file.keys() - _SETTING_NAMES):
        setting = _find_typo(name, _SETTING_NAMES)
        if not setting and name.upper().startswith("MODEL"):
            setting = "MODEL_PATH"
        if not setting:
            others = _SETTING_NAMES - {"MODEL_PATH"}
            setting = _find_similar(name, others, ratio=_SIMILAR_RATIO)
        yield _UnknownName(name, ".env", setting)


def _unknown_in_environment(environ: Mapping[str, str]) -> Iterator[_UnknownName]:
    """Idle settings, MODEL, and typing errors of settings that are not set there."""
    for name in sorted(environ.keys() - _SETTING_NAMES - _FOREIGN_NAMES):
        setting = _find_typo(name, _SETTING_NAMES - environ.keys())
        if name == "MODEL":  # no other program is known to read it
            setting = "MODEL_PATH"
        if environ[name] and (setting or name in _IDLE_NAMES):
            yield _UnknownName(name, "the environment", setting)


def _find_typo(name: str, settings: Iterable[str]) -> str:
    """The setting that differs by a letter or two; "" if there is none."""
    n_letters = len(name.replace("_", ""))
    candidates = [
        setting
        for setting in settings
        if abs(len(setting.replace("_", "")) - n_letters) <= 1
    ]
    return _find_similar(name, candidates, ratio=_TYPO_RATIO)


def _find_similar(name: str, settings: Iterable[str], *, ratio: float) -> str:
    """The setting with the most similar name, in any case; "" if none is similar."""
    spelling = name.upper().replace("-", "_")
    matches = get_close_matches(spelling, sorted(settings), n=1, cutoff=ratio)
    return matches[0] if matches else ""


# region LOGGING ===============================================================
# What the server reports about itself:
#
#     console       stderr; a short line for each request that has ended, and at DEBUG
#                   all of its RequestFacts; a warning for each that was refused. Nobody
#                   waits for it: a thread of its own writes what ConsoleStream takes
#     session logs  files in LOG_ROOT; a JSON object for each request that was answered
#     metrics       counters, sums and histograms, for /metrics and /v1/status
#
# For example a request of PI with 2,003 tokens is
#
#     on the console     PI  2,003 tokens, 98 % cached, read 0.1 s, ..., stop
#     in a session log   {"time": "2026-11-27T09:41:07.250+01:00", "id": "7f3a", ...}
#     in the metrics     start_llm_requests_total{finish="stop",match="line"} 1.0
#
# All of this is figures. What clients write is logged only if ENABLE_REQUEST_LOGGING or
# LOG_PROMPT_TOKENS wants it, which REQUEST HANDLING sees to. Session ids, which clients
# choose, are on the console and in the names of files anyway.
#
# Public   logger, ConsoleStream, start_logging, FaultLog, RequestFacts, Refusal,
#          format_request_line, format_summary, format_refusal, name_client, printable,
#          show_prefill_progress, CacheMetrics, Totals, SessionLog
# Uses     CONFIG
# Owns     _CACHE_METRICS_LOCK
# Thread   any

logger: Final = logging.getLogger("start-llm")
_CONSOLE: Final = Console(stderr=True)

# -- console ---------------------------------------------------------------------------

_MAX_WAITING_CHARACTERS: Final = 1 << 20  # of texts that are not written yet


class ConsoleStream(io.TextIOBase):
    """Stands in for stderr, so that nobody waits until somebody reads it.

    write() only keeps the text, and never fails; a thread writes it. What it cannot
    write is dropped: nobody reads the pipe, or the disk is full. A line says how many
    lines are missing as soon as it can be written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Write to what `stream` writes to; None, if stderr is closed: to nothing."""
        super().__init__()
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - kept
        self._stream = stream
        self._changed = threading.Condition()  # guards the next four
        self._texts: list[str] = []
        self._n_characters = 0  # of these texts
        self._n_dropped = 0  # lines that came while there were too many texts
        self._is_writing = False
        thread = threading.Thread(target=self._work, name="console", daemon=True)
        thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream that it stands in for."""
        return self._stream.encoding

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Keep a text to be written, or drop it if too much waits or was dropped."""
        with self._changed:
            is_full = self._n_characters + len(text) > _MAX_WAITING_CHARACTERS
            if is_full or self._n_dropped:  # the line that reports them comes first
                self._n_dropped += text.count("\n")
            else:
                self._texts.append(text)
                self._n_characters += len(text)
            self._changed.notify_all()
        return len(text)

    def drain(self, *, seconds: float) -> None:
        """Return when all is written, at the latest after so many seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._texts and not self._is_writing, timeout=seconds
            )

    # -- the thread that writes --------------------------------------------------------

    def _work(self) -> None:
        n_lost = 0  # lines that are missing, which no line has reported yet
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts)
                self._is_writing = True
                text = "".join(self._texts)
                self._texts = []
                self._n_characters = 0
                n_dropped = self._n_dropped  # all of them came after `text`
                self._n_dropped = 0

            n_lost = self._write_after_report(text, n_lost=n_lost) + n_dropped
            if n_dropped:
                n_lost = self._write_after_report("", n_lost=n_lost)

    def _write_after_report(self, text: str, *, n_lost: int) -> int:
        """Report lost lines, then write the text; returns how many are unreported."""
        try:
            if n_lost:
                self._write_out(f"{n_lost} lines are missing: nobody could take them\n")
                n_lost = 0
            self._write_out(text)
        except OSError:
            n_lost += text.count("\n")
        return n_lost

    def _write_out(self, text: str) -> None:
        descriptor = self.fileno()
        payload = text.encode(self.encoding, "backslashreplace")
        while payload:
            try:
                payload = payload[os.write(descriptor, payload) :]
            except BlockingIOError:  # whoever shares the terminal may set that
                select.select([], [descriptor], [])


def start_logging(config: Config) -> None:
    """Write the log to stderr, from LOG_LEVEL on. Called again, it adds no handler."""
    # why(L-94): text of the model is read as Python, which warns of odd escapes in it.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logger.setLevel(config.log_level)
    logger.propagate = False  # if a library sets up the root logger, it repeats nothing
    if not logger.handlers:
        logger.addHandler(_make_handler())


def _make_handler() -> logging.Handler:
    if _CONSOLE.is_terminal:
        return RichHandler(console=_CONSOLE, show_path=False, log_time_format="%X")
    # In a file a record is one line; rich would break it at column 80.
    handler = logging.StreamHandler(sys.stderr)
    form = "%(asctime)s %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(form))
    return handler


class FaultLog:
    """Runs what no request waits for; a fault that comes again is logged once."""

    def __init__(self) -> None:
        self._logged_faults: deque[str] = deque(maxlen=8)

    def guard(self, task: Callable[[], object]) -> None:
        """Run a task. If it fails, that is logged, and nothing is raised."""
        try:
            task()
        except Exception as error:
            if repr(error) not in self._logged_faults:
                logger.exception("a fault beside the requests, which are served on")
            self._logged_faults.append(repr(error))


class RequestFacts(TypedDict):
    """A request that has ended, as the console, session logs and /v1/status show it."""

    id: str
    api: str  # "chat", "completion", "messages"
    session: str
    prompt: int  # tokens, as are `out` and `cached`
    out: int
    cached: int
    match: str  # what was reused: see HitKind of PREFIX CACHE; "-" if it never ran
    finish: str  # "stop", "length", "repeated", "deadline", "cancelled", "failed"
    prefill: float  # seconds, as are `decode` and `waited`
    decode: float
    waited: float  # until the model began with it
    waited_for: str | None  # longest: "queue", "prefix" or "memory"; None: for nothing
    ttft_ms: int  # from the request to the first token; 0 if there was none
    replayed: int  # prompt tokens that came from a transcript
    fallback: str | None  # why no longer transcript was replayed


_FIRST_KEYS: Final = (
    "id",
    "prompt",
    "cached",
    "match",
    "prefill",
    "decode",
    "out",
    "ttft_ms",
    "finish",
)
_UNPRINTABLE: Final = re.compile(r"(?:[^!-~]|=)+")  # all but visible ASCII; "="


def format_request_line(**values: object) -> str:
    """`id=7f3a prompt=1200 ... finish=stop ...`: _FIRST_KEYS first, then the others."""
    ordered = {**dict.fromkeys(_FIRST_KEYS), **values}
    pairs = [f"{key}={_format_value(value)}" for key, value in ordered.items()]
    return " ".join(pairs)


def _format_value(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    # Clients choose session ids: none may break the line, or control the terminal.
    return _UNPRINTABLE.sub("_", text[:80]) or "-"


def format_summary(facts: RequestFacts, *, client: str, n_calls: int = 0) -> str:
    """What a person wants to know of a request that has ended; no part that is zero.

    `n_calls`: the tool calls in its reply, for which it ended if it was not cut.

    PI  2,003 tokens, 98 % cached, read 0.1 s, first 0.2 s, 64 out in 0.5 s, stop
    """
    prompt = facts["prompt"]
    parts = [f"{prompt:,} tokens"]
    percent = 100 * facts["cached"] // prompt
    if percent:
        parts.append(f"{percent} % cached")

    waiting = f"waited for {facts['waited_for']}" if facts["waited_for"] else "waited"
    parts += _show_seconds(waiting, facts["waited"])
    parts += _show_seconds("read", facts["prefill"])
    parts += _show_seconds("first", facts["ttft_ms"] / 1000)
    if facts["out"]:
        parts.append(f"{facts['out']:,} out in {facts['decode']:.1f} s")
    finish = facts["finish"]
    if n_calls and finish == "stop":
        finish = "1 tool call" if n_calls == 1 else f"{n_calls} tool calls"
    parts.append(finish)
    return f"{client or '-'}  {', '.join(parts)}"


def _show_seconds(name: str, seconds: float) -> list[str]:
    """`name 0.3 s`; nothing if it would be 0.0."""
    text = f"{seconds:.1f}"
    return [] if text == "0.0" else [f"{name} {text} s"]


class Refusal(TypedDict):
    """A request that was answered with an error."""

    at: float  # Unix seconds
    method: str  # "" if there was no request line that can be read, as is `path`
    path: str  # without its query
    status: int
    client: str
    sentence: str


def format_refusal(refusal: Refusal) -> str:
    """`400 POST /v1/chat/completions, curl: the body is not valid JSON`."""
    place = f"{refusal['method']} {refusal['path']}".strip() or "no request line"
    client = refusal["client"] or "-"
    return f"{refusal['status']} {place}, {client}: {refusal['sentence']}"


def printable(text: str, *, max_length: int) -> str:
    """The beginning of a text as one line without control characters."""
    line = " ".join(text[: 4 * max_length].split())[:max_length]
    return "".join(c if c.isprintable() else "_" for c in line)


# How a User-Agent begins, in lower case -> the name that people know. The first counts.
_CLIENT_NAMES: Final[Mapping[str, str]] = {
    "claude-cli": "Claude Code",
    "claude-code": "Claude Code",
    "pi-coding-agent": "PI",
    "pi/": "PI",
    "pi ": "PI",  # `pi (linux 6.1.0; x64)`
    "codex": "Codex",  # also codex_cli_rs, codex_exec, codex-tui
    "opencode": "opencode",
    "openclaw": "OpenClaw",
    "githubcopilot": "Copilot",
    "copilot": "Copilot",
    "qwencode": "Qwen Code",
    "qwen-code": "Qwen Code",
    "curl/": "curl",
    "python": "python",  # also Python-urllib, python-requests, python-httpx
    "openai/python": "python",
    "asyncopenai/python": "python",
    "anthropic/python": "python",
    "asyncanthropic/python": "python",
    "mozilla/": "browser",
    "start-llm-chat": "chat.py",
}


def name_client(user_agent: str) -> str:
    """Who sends a User-Agent; of an unknown one its first product, "" without any."""
    line = printable(user_agent, max_length=200)
    for beginning, name in _CLIENT_NAMES.items():
        if f"{line.lower()} ".startswith(beginning):
            return name
    return re.split("[ /]", line, maxsplit=1)[0][:40]


def show_prefill_progress(request_name: str, *, n_read: int, n_prompt: int) -> None:
    """Draw a bar in the last line of a terminal, until something else is written there.

    When all tokens of the prompt are read, the line becomes empty.
    """
    if not _CONSOLE.is_terminal:
        return
    text = ""
    if n_read < n_prompt:
        bar = "#" * (40 * n_read // n_prompt)
        text = f"{request_name} [{bar:40}] {n_read:,} of {n_prompt:,} tokens"
    width = _CONSOLE.width - 1
    _CONSOLE.out(text[:width].ljust(width), end="\r", highlight=False)


# -- metrics ---------------------------------------------------------------------------

_COUNTERS: Final = {  # of what should be rare, or is worth watching
    "vlm_retreat": "Prefixes that ended in an image and were cut to end before it",
    "hybrid_trim_miss": "Prompts with cached KV, but no checkpoint near its end",
    "exact_key_rejected_by_model_lcp": "Transcripts that were tried and refused",
    "ledger_seam_fallback": "Prompts for which one transcript or more was refused",
    "telemetry_dropped": "Telemetry fields that were left out of prompts",
    "second_tries": "Requests that failed before their first token and were read again",
    "evicted_for_room": "Cache entries evicted or shortened to make room",
    "evicted_idle": "Cache entries evicted after PROMPT_CACHE_TTL_SECONDS",
    "vlm_tower_runs": "Images read by the vision tower",
    "vlm_feature_hits": "Images whose features were kept from an earlier request",
    "disk_hits": "Requests for which KV was loaded from the disk",
    "disk_tokens": "Tokens whose KV was loaded from the disk",
}
_GAUGES: Final = {
    "queued": "Requests that wait for the model",
    "prefilling": "Requests whose prompt is being read",
    "decoding": "Requests whose reply is being generated",
    "lines": "Cache entries",
    "memory_limit_bytes": "Bytes that the server may take in all",
    "memory_model_bytes": "Bytes of the weights",
    "memory_cache_bytes": "Bytes of cache entries that rest",
    "memory_running_bytes": "Bytes of KV that running requests hold",
    "memory_features_bytes": "Bytes of image features",
    "memory_working_bytes": "Bytes of all other buffers of MLX",
    "memory_peak_bytes": "Most bytes that MLX had in use since the start",
    "memory_process_bytes": "Bytes of the process, as the system counts them",
    "disk_bytes": "Bytes of KV on the disk",
    "disk_written_today_bytes": "Bytes of KV that were written to the disk today",
}
_SUMS: Final = {
    "refused": "Requests that were answered with an error before the model was asked",
    "failed": "Requests that the model, or want of memory, ended with an error",
    "prompt_tokens": "Tokens of the prompts of all requests",
    "cached_tokens": "Those of them whose KV was there already",
    "generated_tokens": "Tokens of the replies",
    "saved_seconds": "Seconds that cached tokens would have taken to read",
}
_SECONDS_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SHARE_BUCKETS: Final = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)
_HISTOGRAMS: Final = {  # of requests that were answered
    "ttft_seconds": ("Seconds from the request to its first token", _SECONDS_BUCKETS),
    "prefill_seconds": ("Seconds to read the prompt", _SECONDS_BUCKETS),
    "decode_seconds": ("Seconds to generate the reply", _SECONDS_BUCKETS),
    "cached_share": ("Cached tokens, as a share of the prompt", _SHARE_BUCKETS),
}


class Totals(TypedDict):
    """Sums over all requests that have ended, and how many were refused before."""

    requests: int  # that have ended, be it by an error
    refused: int  # before the model was asked; they are no `requests`
    failed: int  # of `requests`
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_seconds: float
    saved_seconds: float  # that cached tokens would have taken to read


class CacheMetrics:
    """Counters, sums and histograms since the start: of all, of a key, or of a user.

    What is counted for one is counted for its parents, too:

        all <-- key "K" <-- user "K/U"
        all <-- user "/U", where requests have no keys
    """

    def __init__(self, parent: CacheMetrics | None = None) -> None:
        self._CACHE_METRICS_LOCK = threading.Lock()  # guards _counts and _totals
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._totals: Totals = {
            "requests": 0,
            "refused": 0,
            "failed": 0,
            "prompt_tokens": 0,
            "cached_tokens": 0,
            "generated_tokens": 0,
            "prefill_seconds": 0.0,
            "saved_seconds": 0.0,
        }
        self._parent = parent
        # Those of all tenants, by name: one dict, whoever has it.
        self._tenants: dict[str, CacheMetrics] = parent._tenants if parent else {}

        self._registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "start_llm_requests",
            "Requests, by what was reused and how they ended",
            labelnames=("match", "finish"),
            registry=self._registry,
        )
        self._histograms = {
            name: prometheus.Histogram(
                f"start_llm_{name}", sentence, buckets=buckets, registry=self._registry
            )
            for name, (sentence, buckets) in _HISTOGRAMS.items()
        }
        self._waiting_seconds = prometheus.Histogram(
            "start_llm_waiting_seconds",
            "Seconds that requests waited before their prompt was read, by reason",
            labelnames=("reason",),
            buckets=_SECONDS_BUCKETS,
            registry=self._registry,
        )
        for reason in ("queue", "prefix", "memory"):
            self._waiting_seconds.labels(reason)  # shown at zero, too

    def make_tenant(self, tenant: str) -> CacheMetrics:
        """The metrics of a tenant; those of a new user are forgotten without keep().

        Call it on the metrics of all.
        """
        if tenant in self._tenants:
            return self._tenants[tenant]
        key = key_of_tenant(tenant)
        parent = self._tenants.setdefault(key, CacheMetrics(self)) if key else self
        return parent if key == tenant else CacheMetrics(parent)

    def keep(self, tenant: str) -> None:
        """Let these be the metrics of a tenant from now on, if it has none."""
        if self._parent is not None:
            self._tenants.setdefault(tenant, self)

    def of_tenant(self, tenant: str) -> CacheMetrics:
        """The metrics of a tenant; if it has none, those of its key, or else of all."""
        of_key = self._tenants.get(key_of_tenant(tenant), self)
        return self._tenants.get(tenant, of_key)

    def drop_tenant(self, tenant: str) -> None:
        """Forget what was counted for a tenant alone."""
        self._tenants.pop(tenant, None)

    def _levels(self) -> Iterator[CacheMetrics]:
        """These, those of the key, those of all."""
        level: CacheMetrics | None = self
        while level is not None:
            yield level
            level = level._parent

    def bump(self, name: str, n: int = 1) -> None:
        """Add `n` to a counter. Raises KeyError if there is none of that name."""
        for level in self._levels():
            with level._CACHE_METRICS_LOCK:
                level._counts[name] += n

    def observe_wait(self, reason: str, seconds: float) -> None:
        """Count that a request has waited, for "queue", "prefix" or "memory"."""
        for level in self._levels():
            level._waiting_seconds.labels(reason).observe(seconds)

    def observe(self, facts: RequestFacts, *, saved_seconds: float) -> None:
        """Count a request that has ended; if it was answered, its times as well.

        `saved_seconds`: that its cached tokens would have taken to read.
        """
        for level in self._levels():
            level._add_to_totals(facts, saved_seconds)
            level._observe_times(facts)

    def add_refused(self) -> None:
        """Count a request that was refused before the model was asked."""
        for level in self._levels():
            with level._CACHE_METRICS_LOCK:
                level._totals["refused"] += 1

    def _add_to_totals(self, facts: RequestFacts, saved_seconds: float) -> None:
        with self._CACHE_METRICS_LOCK:
            totals = self._totals
            totals["requests"] += 1
            totals["failed"] += facts["finish"] == "failed"
            totals["prompt_tokens"] += facts["prompt"]
            totals["cached_tokens"] += facts["cached"]
            totals["generated_tokens"] += facts["out"]
            totals["prefill_seconds"] += facts["prefill"]
            totals["saved_seconds"] += saved_seconds

    def _observe_times(self, facts: RequestFacts) -> None:
        self._requests.labels(facts["match"], facts["finish"]).inc()
        if facts["finish"] in ("cancelled", "failed") or not facts["ttft_ms"]:
            return
        values = {
            "ttft_seconds": facts["ttft_ms"] / 1000,
            "prefill_seconds": facts["prefill"],
            "decode_seconds": facts["decode"],
            "cached_share": facts["cached"] / facts["prompt"],
        }
        for name, value in values.items():
            self._histograms[name].observe(value)

    def totals(self) -> Totals:
        """The sums by now; seconds in milliseconds."""
        with self._CACHE_METRICS_LOCK:
            totals = self._totals.copy()
        totals["prefill_seconds"] = round(totals["prefill_seconds"], 3)
        totals["saved_seconds"] = round(totals["saved_seconds"], 3)
        return totals

    def snapshot(self) -> dict[str, int]:
        """The counters, by name."""
        with self._CACHE_METRICS_LOCK:
            return dict(self._counts)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        """All metrics, and `gauges` as of now, in the text format of Prometheus."""
        registry = prometheus.CollectorRegistry()
        for name, n in self.snapshot().items():
            counter = prometheus.Counter(
                f"start_llm_{name}", _COUNTERS[name], registry=registry
            )
            counter.inc(n)
        totals: Mapping[str, Any] = self.totals()
        for name, sentence in _SUMS.items():
            counter = prometheus.Counter(
                f"start_llm_{name}", sentence, registry=registry
            )
            counter.inc(totals[name])
        for name, value in gauges.items():
            gauge = prometheus.Gauge(
                f"start_llm_{name}", _GAUGES.get(name, name), registry=registry
            )
            gauge.set(value)

        kept_metrics = prometheus.generate_latest(self._registry)
        return kept_metrics + prometheus.generate_latest(registry)


# -- session logs ----------------------------------------------------------------------


class SessionLog:
    """LOG_ROOT/<day>/cache-session-<id>.log: what a session sent, and what was reused.

    A line is one JSON object. Only the owner can read the files, or see their names.
    """

    def __init__(self, config: Config) -> None:
        log_root = os.path.expanduser(config.log_root)
        self._root = Path(__file__).resolve().parent / log_root
        self._keep_days = config.log_keep_days
        self._has_warned = threading.Event()

    def check(self) -> None:
        """Warn at the start if nothing can be written there."""
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=self._root):
                pass
        except OSError as error:
            self._has_warned.set()
            reason = error.strerror or error
            logger.warning(
                "LOG_ROOT %s cannot be written: %s. Sessions are not logged",
                self._root,
                reason,
            )

    def write(self, session_id: str, record: Mapping[str, object]) -> None:
        """Append the time and a record. Never raises; the first failure is logged."""
        now = datetime.now().astimezone()
        folder = self._root / now.date().isoformat()
        path = folder / f"cache-session-{_file_stem(session_id)}.log"
        try:
            line = _stamped_line(now, record)
            is_new_day = _make_folder(folder)
            _append_line(path, line)
        except (OSError, TypeError, ValueError, RecursionError) as error:
            self._warn_once(path, error)
            return
        if is_new_day:
            self._delete_old_days(now.date())

    def _warn_once(self, path: Path, error: Exception) -> None:
        if not self._has_warned.is_set():
            self._has_warned.set()
            logger.warning("session log %s cannot be written: %s", path, error)

    def _delete_old_days(self, today: date) -> None:
        if not self._keep_days:
            return
        for folder in self._root.glob("????-??-??"):
            try:
                age = today - date.fromisoformat(folder.name)
            except ValueError:
                continue  # not a day of ours
            if age.days > self._keep_days:
                _delete_folder(folder)


def _make_folder(folder: Path) -> bool:
    """Make the folder of a day, and LOG_ROOT, for their owner alone.

    Returns False if the first is there already.
    """
    root = folder.parent
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    _close_root(root)
    return True


# What LOG_ROOT may hold and still be ours alone: days, and the files of LiteLLM.
_OWN_LOG: Final = re.compile(r"\d{4}-\d\d-\d\d|litellm-\d+\..+|\.gitkeep|\.DS_Store")


def _close_root(root: Path) -> None:
    """Keep others out of a LOG_ROOT that was there, if it is for nothing but logs.

    One that others may write to is shared on purpose: /tmp, which may be empty.
    """
    status = root.stat()
    if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        return
    if all(_OWN_LOG.fullmatch(path.name) for path in root.iterdir()):
        root.chmod(0o700)


def _delete_folder(folder: Path) -> None:
    """Delete the session logs in a folder, and the folder if nothing else is in it."""
    try:
        for path in folder.glob("cache-session-*.log"):
            path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError as error:
        logger.warning("old session logs %s cannot be deleted: %s", folder, error)


def _file_stem(session_id: str) -> str:
    """A session id as a part of a file name; no two ids have the same.

    Only a short id of small letters, digits, "_" and "-" is its own name: macOS takes
    "A" and "a" for one file. Any other has a "." and a digest, which no such id has.
    """
    if re.fullmatch(r"[a-z0-9_-]{1,64}", session_id):
        return session_id
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", session_id)[:64]
    digest = sha256(session_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{stem}.{digest[:32]}"


def _stamped_line(moment: datetime, record: Mapping[str, object]) -> bytes:
    stamped = {"time": moment.isoformat(timespec="milliseconds"), **record}
    line = json.dumps(stamped, ensure_ascii=False, default=str)
    return f"{line}\n".encode("utf-8", "replace")  # half of a surrogate pair: "?"


def _append_line(path: Path, line: bytes) -> None:
    """Append to a file that only its owner reads; in one write, so lines never mix.

    Raises OSError, and leaves no half of a line: the next one would continue it.
    """
    opener = partial(os.open, mode=0o600)
    with open(path, "ab", buffering=0, opener=opener) as file:
        n_written = file.write(line)
        if n_written < len(line):
            file.truncate(file.tell() - n_written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# region WORK BUDGET ===========================================================
# How much memory requests may take before the model has them, all together.
#
# A body of a few bytes can ask for much: an image unpacks to gigabytes, and tokens take
# more memory than the text that they spell. So memory is reserved before each step, and
# a request that finds too little left waits in a queue. While it waits, it looks now
# and then whether its client is still there.
#
# A body of 1 MB, for example, reserves
#
#     3 MB   "held"   once 64 kB of it have come, until its reply has ended
#     48 MB  "work"   once all of it has come, until the engine has its tokens
#
# Its client may take a minute to send it, so no work is reserved meanwhile. Two other
# sections have a WorkBudget of one unit, so that one request at a time does a step: one
# text that cannot be cut is tokenized (TOKENIZER), one image unpacked (VISION MODEL).
#
# Public   WorkBudget, Reservation, BodyBudget, BodyMemory, CLIENT_LOOK_SECONDS,
#          memory_bytes
# Uses     -
# Thread   any

CLIENT_LOOK_SECONDS: Final = 0.25  # the longest time between two looks at the client


class WorkBudget:
    """Units that may be reserved at once, such as bytes; first come, first served.

    A request for more units than there are gets all of them.
    """

    def __init__(self, n_units: int) -> None:
        self.n_units = n_units
        self.n_free = n_units
        self._budget_lock = threading.Lock()  # guards `n_free` and the queue
        # One event for each that waits, the oldest first. It is set when units may be
        # free for it.
        self._waiting: deque[threading.Event] = deque()

    @contextmanager
    def reserve(
        self, n_units: int, check_client: Callable[[], None]
    ) -> Iterator[Reservation]:
        """Reserve units for the time inside; waits until they are free, in turn.

        `check_client` is called at least every CLIENT_LOOK_SECONDS of the wait. What it
        raises ends the wait.
        """
        n_units = min(n_units, self.n_units)
        self._acquire(n_units, check_client)
        reservation = Reservation(self, n_units)
        try:
            yield reservation
        finally:
            reservation.shrink(0)

    def _acquire(self, n_units: int, check_client: Callable[[], None]) -> None:
        """Take the units: at once where nobody waits, else at the head of the queue."""
        turn = threading.Event()
        with self._budget_lock:
            if not self._waiting and self._take(n_units):
                return
            self._waiting.append(turn)
        try:
            while not self._take_in_turn(n_units, turn):
                turn.wait(CLIENT_LOOK_SECONDS)
                check_client()
        finally:
            with self._budget_lock:
                self._waiting.remove(turn)
                self._wake_first()  # what is left may be enough for the next

    def _take_in_turn(self, n_units: int, turn: threading.Event) -> bool:
        """Take the units if they are free and `turn` is the first in the queue."""
        with self._budget_lock:
            # What is released from now on sets the event again, so that wait() returns.
            turn.clear()
            return self._waiting[0] is turn and self._take(n_units)

    def _take(self, n_units: int) -> bool:
        """Take the units if they are free, and say whether; the lock is held."""
        if n_units > self.n_free:
            return False
        self.n_free -= n_units
        return True

    def _wake_first(self) -> None:
        """Let the oldest that waits try; any other would find that it is not first."""
        if self._waiting:
            self._waiting[0].set()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for what others have reserved."""
        return bool(self._waiting)

    def release(self, n_units: int) -> None:
        """Give units back; only a Reservation calls it, with units of its own."""
        with self._budget_lock:
            self.n_free += n_units
            self._wake_first()


class Reservation:
    """Units of a budget that are taken, until they are given back."""

    def __init__(self, budget: WorkBudget, n_units: int) -> None:
        self._budget = budget
        self._n_units = n_units

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for units of the same budget."""
        return self._budget.is_awaited

    def shrink(self, n_units: int) -> None:
        """Give back all but `n_units`, if there are more."""
        n_excess = max(0, self._n_units - n_units)
        self._n_units -= n_excess
        self._budget.release(n_excess)


def memory_bytes(*values: object) -> int:
    """Bytes that values take in memory together, with all that is in them."""
    n_bytes = 0
    counted: set[int] = set()
    places = [*values]
    while places:
        value = places.pop()
        if id(value) in counted:
            continue
        counted.add(id(value))
        n_bytes += sys.getsizeof(value)
        match value:
            case dict():
                places += [*value, *value.values()]
            case list() | tuple() | set() | frozenset():
                places += value
            case _ if is_dataclass(value):
                places += [getattr(value, part.name) for part in fields(value)]
    return n_bytes


class BodyBudget:
    """Memory for the bodies of requests, in bytes.

    A quarter is for small bodies alone, so that they wait for no large one.
    """

    def __init__(self, n_bytes: int) -> None:
        self.for_small = WorkBudget(n_bytes // 4)
        self.for_large = WorkBudget(n_bytes - n_bytes // 4)
        self.max_small_bytes = n_bytes // 32

    def reserve(
        self, n_bytes: int, check_client: Callable[[], None]
    ) -> AbstractContextManager[Reservation]:
        """Reserve memory, as WorkBudget.reserve() does."""
        is_small = n_bytes <= self.max_small_bytes
        budget = self.for_small if is_small else self.for_large
        return budget.reserve(n_bytes, check_client)


class BodyMemory:
    """What the bodies of all requests may take beside KV and the model (L-122).

    Of a memory limit of 64 GB, 4 GB are for work and 2 GB to hold bodies. If the work
    of one needs more than the 3 GB that large bodies share, it has them alone. If it
    needs more than 16 GB, the body is refused: it would take memory that KV has.
    """

    # For each byte of a body. Until it is tokenized, a body of 10 MB was measured to
    # take 31 as the schema of a tool, 21 as calls or messages of one letter, 3 to 16 as
    # text. The rest of the 48, and what is held after that, are estimates.
    WORK_BYTES: Final = 48
    HELD_BYTES: Final = 3
    MIN_BYTES: Final = 1 << 26  # of each of the three limits: 64 MiB

    def __init__(self, limit_bytes: int) -> None:
        self.work = BodyBudget(max(limit_bytes // 16, self.MIN_BYTES))
        self.held = BodyBudget(max(limit_bytes // 32, self.MIN_BYTES))
        self.max_body_bytes = max(limit_bytes // 4, self.MIN_BYTES) // self.WORK_BYTES


# region API TYPES =============================================================
# The types that the sections below share: a request in one form, whichever API it came
# through, and what the writer of a response needs to know of a reply.
#
#     body   -> REQUEST BODIES -> parser of an API -> ChatRequest
#     reply  -> deltas, Usage, ReplyEnd -> ResponseFormatter of an API -> bodies
#
# An API is a parser, a formatter and a route in HTTP SERVER. Messages stay plain dicts,
# so that fields we do not know reach the chat template.
#
# Public   JsonObject, Message, OriginalMessages, TokenIds, KvOffset, TokenId, ListOf,
#          MapOf, SamplingParams, ToolChoice, SessionContext, assume_client,
#          ChatRequest, FinishReason, Usage, PromptProgress, ReplyEnd,
#          ResponseFormatter
# Uses     CONFIG
# Thread   any; pure

JsonObject = dict[str, Any]

# A message of a chat, in the one spelling that all sections read:
#     role               "system", "developer", "user", "assistant" or "tool"
#     content            text, or a list of text parts and images; "" or [] if none
#     reasoning_content  thinking of the assistant, if the client sent it
#     thought_id         the signature of that thinking, ours (thinking_signature()) or
#                        another server's; some clients send it without the thinking
#     tool_calls         of the assistant; each has a `function` with a `name`; an `id`
#                        and `arguments`, an object or JSON text, if they were sent
#     tool_call_id       of a tool message: the call that it answers
# Other fields are as the client sent them. No field is null; those inside may be.
Message = dict[str, Any]
# The messages of a request as the model must see them: never their canonical copies.
OriginalMessages = NewType("OriginalMessages", tuple[Message, ...])
TokenIds = npt.NDArray[np.int32]  # of a prompt or a part of one, `(n,)`
# Depth of a KV cache in tokens, as its layers report it. kv_cache_offset() makes it.
KvOffset = NewType("KvOffset", int)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A list and an object of a body. Only the first fault in them is looked for: a million
# faults cost no more than one.
type ListOf[T] = Annotated[list[T], Field(fail_fast=True)]
type MapOf[K, V] = Annotated[dict[K, V], Field(fail_fast=True)]

# -- requests --------------------------------------------------------------------------

_BiasKey = Annotated[TokenId, Field(strict=False)]  # a key in JSON is text
_Bias = Annotated[float, Field(ge=-100, le=100)]
_OpenAIPenalty = Annotated[float, Field(ge=-2, le=2)]  # added to logits; 0: off


class SamplingParams(BaseModel, frozen=True, strict=True):
    """How the next token is chosen. Without any field: greedily, all else off."""

    temperature: Temperature = 0.0  # 0: greedy
    top_p: TopP = 1.0  # 1: off
    top_k: int = Field(0, ge=-1)  # 0 or -1: off
    min_p: MinP = 0.0  # 0: off
    repetition_penalty: RepetitionPenalty = 1.0  # 1: off
    repetition_context_size: int = Field(256, ge=0)  # tokens that the penalty sees
    presence_penalty: _OpenAIPenalty = 0.0
    frequency_penalty: _OpenAIPenalty = 0.0
    logit_bias: MapOf[_BiasKey, _Bias] = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)  # None: random


class ToolChoice(NamedTuple):
    """Whether the model may, must or must not call a tool."""

    mode: Literal["auto", "none", "required", "named"] = "none"
    name: str | None = None  # of the tool that it must call, if the mode is "named"


class SessionContext(NamedTuple):
    """The conversation that a request belongs to, by the ids that its client sent."""

    session_id: str | None = None
    parent_session_id: str | None = None  # of a sub-agent: who started it


def assume_client() -> None:
    """Raise nothing: the `check_client` of a request that has no client to look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request in the form that all sections know, whichever API it came through."""

    kind: Literal["chat", "completion", "messages"]  # "messages" is Anthropic's
    request_id: str
    model: str | None  # the name that was sent; None: whichever is loaded
    session: SessionContext
    user: str = ""  # whose request it is, for CACHE_ISOLATION=user
    sampling: SamplingParams
    max_tokens: int  # of the reply; 0: the prompt is read, for the cache alone
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool  # at the end of a stream
    return_progress: bool = False  # of prefill, in a stream
    messages: OriginalMessages  # none if it is a completion
    # By digest of an image: the text and the tokens that stand for it.
    image_tokens: Mapping[str, Any] = field(default_factory=dict)
    # Of a completion, as text or as token ids, which may exceed the vocabulary.
    prompt: str | tuple[int, ...] | None = None
    tools: tuple[JsonObject, ...]  # {"type": "function", "function": {"name": ...}}
    deferred_tools: tuple[JsonObject, ...]  # can be called, but are not in the prompt
    tool_choice: ToolChoice
    strict_tools: Mapping[str, str]  # the path of the schema in the body, by name
    parallel_tool_calls: bool
    logprobs: bool
    top_logprobs: int  # alternatives per token
    thinking: bool
    thinking_budget: int | None  # tokens
    json_schema: JsonObject | None  # that the reply must fit
    template_kwargs: Mapping[str, Any]  # for the chat template; never enable_thinking
    # Called between two pieces of long work. Raises ClientGone.
    check_client: Callable[[], None] = field(default=assume_client, compare=False)
    # Tokens of a longer prompt are estimated from here on; it is refused anyway.
    max_counted_tokens: int = sys.maxsize


# -- replies ---------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(NamedTuple):
    """Counts of tokens."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: their KV was reused
    completion_tokens: int
    reasoning_tokens: int  # of the completion


class PromptProgress(NamedTuple):
    """How far a prompt has been read, with the names of llama.cpp's server."""

    total: int  # tokens, as are `cache` and `processed`
    cache: int  # whose KV was reused
    processed: int  # that have KV, those of `cache` included
    time_ms: int  # since the model began to read


class ReplyEnd(NamedTuple):
    """How a reply ended."""

    finish_reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None  # the one that ended it
    logprobs: JsonObject | None = None  # those that no delta carried


class ResponseFormatter(Protocol):
    """Writes one reply as the bodies of an API.

    The reply comes as deltas of a chat: {"content": text}, {"reasoning_content": text}
    or {"tool_calls": [call]}. The first delta of a call has its id, its name and the
    beginning of its arguments, the others only more of the arguments:

        {"index": 0, "id": ..., "type": "function", "function": {"name", "arguments"}}
        {"index": 0, "function": {"arguments"}}

    A stream is start_events(), delta_events() for each delta, then end_events(), with
    ping_event() at any time between events. For a whole body, delta_events() is called
    with each delta, too, and then full_body().
    """

    @property
    def closes_cut_calls(self) -> bool:
        """Whether a call that was cut gets its closing brackets, so that it parses."""

    def start_events(self, usage: Usage, /) -> list[JsonObject]:
        """The events that begin a stream; what was cached is known by now."""

    def ping_event(self) -> JsonObject:
        """An event that changes nothing and keeps a client waiting (L-18)."""

    def progress_events(self, progress: PromptProgress, /) -> list[JsonObject]:
        """The events that show how far the prompt is read; none if nobody asked."""

    def delta_events(
        self, delta: JsonObject, logprobs: JsonObject | None = None, /
    ) -> list[JsonObject]:
        """The events for a delta, and for logprobs of its tokens."""

    def end_events(self, ending: ReplyEnd, /) -> list[JsonObject]:
        """The events that end a stream."""

    def full_body(self, message: JsonObject, ending: ReplyEnd, /) -> JsonObject:
        """The body of a whole reply; `message` is all of its deltas together."""


# region REQUEST BODIES ========================================================
# A body as bytes -> a JSON value -> the fields of a pydantic model, or a BadRequest.
#
#     body     {"messages": [{"role": "user", "content": 3}]}
#     error    messages[0].content: should be a text or a list
#
# The models stand in the sections of the APIs. They are strict: "1" is no number. Null
# means absent. Pydantic finds the faults. Its words and its paths become those that a
# client knows.
#
# Public   NonEmptyText, parse_json_body, present_fields, drop_nulls, value_at,
#          validate_fields, refuse_unless
# Uses     ERRORS, API TYPES
# Thread   any; pure

# -- JSON ------------------------------------------------------------------------------

MAX_CONTAINERS: Final = 250_000  # arrays and objects of a body


def parse_json_body(raw: bytes) -> object:
    """The JSON value in `raw`. Raises BadRequest if it is none.

    A lone surrogate becomes U+FFFD: JavaScript cuts emoji in half. An array of two
    bytes of JSON takes a hundred in memory, so the number of arrays and objects is
    limited (L-122).
    """
    if _count_containers(raw) > MAX_CONTAINERS:
        raise BadRequest(
            f"the body has more than {MAX_CONTAINERS:,} arrays and objects: no context"
            " has the room for them"
        )
    with suppress(ValueError):
        return from_json(raw, allow_inf_nan=False)
    # Pydantic's reader, which is faster, refuses lone surrogates. The reader of the
    # standard library accepts them, and says what is wrong and where.
    try:
        value = json.loads(raw.decode())
        text = json.dumps(value, ensure_ascii=False)
        whole_text = re.sub(r"[\ud800-\udfff]", "\ufffd", text)
        return from_json(whole_text, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        fault = _describe_json_fault(error, raw)
    raise BadRequest(f"the body is not valid JSON: {fault}")


# A string, with its end if it has one, or an opening bracket outside of strings. It
# never steps back, so that no byte is looked at twice.
_BRACKET: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|([\[{])', re.DOTALL)


def _count_containers(raw: bytes) -> int:
    """How many arrays and objects a JSON value has.

    Up to the limit, brackets in strings are counted, too, which is faster. Beyond the
    limit nothing is counted.
    """
    n_brackets = raw.count(b"[") + raw.count(b"{")  # those in strings, too
    if n_brackets <= MAX_CONTAINERS:
        return n_brackets
    brackets = (match for match in _BRACKET.finditer(raw) if match[1])
    return sum(1 for _ in islice(brackets, MAX_CONTAINERS + 1))


# What json.JSONDecodeError says, and what a client is told.
_JSON_FAULTS: Final[Mapping[str, str]] = {
    "Expecting value": "a value is missing",
    "Expecting property name enclosed in double quotes": (
        "a name in double quotes is missing"
    ),
    "Expecting ':' delimiter": "a colon is missing after a name",
    "Expecting ',' delimiter": "a comma or a closing bracket is missing",
    "Extra data": "something follows its end",
    "Unterminated string starting at": "a string has no end",
    "Invalid control character at": "a control character in a string is not escaped",
    "Invalid \\escape": "no character is escaped like this",
    "Invalid \\uXXXX escape": "four hexadecimal digits must follow \\u",
    "Unexpected UTF-8 BOM (decode using utf-8-sig)": "it begins with a byte order mark",
}


def _describe_json_fault(error: ValueError | RecursionError, raw: bytes) -> str:
    """What is wrong with a body, and where."""
    if not raw.strip():
        return "it is empty"
    if isinstance(error, RecursionError) or "recursion limit" in str(error):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8"
    if isinstance(error, json.JSONDecodeError):
        fault = _JSON_FAULTS.get(error.msg.removesuffix(": "), "it cannot be read")
        return f"{fault} (line {error.lineno}, column {error.colno})"
    return "a number is NaN or infinite, or has too many digits"


# -- fields ----------------------------------------------------------------------------

NonEmptyText = Annotated[str, Field(min_length=1)]


def present_fields(body: object) -> JsonObject:
    """The fields of a body that are not null. Raises BadRequest if it is no object.

    `extra_body` is replaced by its fields, of which those count that the body lacks:
    OpenAI's SDK unpacks it, but some clients send it as it is. If it is no object, it
    is passed over, as is any field that we do not know.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    extra_body = body.get("extra_body")
    extra_fields = extra_body if isinstance(extra_body, dict) else {}
    fields = {**drop_nulls(extra_fields), **drop_nulls(body)}
    fields.pop("extra_body", None)
    return fields


def drop_nulls(fields: Mapping[str, Any]) -> JsonObject:
    """A copy without the fields that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def value_at(fields: JsonObject, path: str) -> object:
    """The value at a path such as "metadata.user_id"; None if there is none."""
    value: object = fields
    for name in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def validate_fields[T: BaseModel](model: type[T], fields: JsonObject) -> T:
    """The fields as a model. Raises BadRequest, which names the first wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        faults = [_Fault.of(details, fields) for details in error.errors()]
    raise _describe_first(faults)


def refuse_unless(*harmless: object, sentence: str) -> BeforeValidator:
    """A check of a field: the values that ask for nothing pass, others are refused."""

    def check(value: object) -> object:
        if not any(value == item and type(value) is type(item) for item in harmless):
            raise PydanticCustomError(OUR_FAULT, sentence)
        return value

    return BeforeValidator(check)


# -- faults ----------------------------------------------------------------------------


# A name that is no plain word ends the path of a fault: it may be a megabyte long, or
# break a line of the log.
_PLAIN_NAME: Final = re.compile(r"[\w-]{1,64}")


class _Fault(NamedTuple):
    """A wrong value, and where it is."""

    path: tuple[int | str, ...]  # ("messages", 3, "content")
    message: str
    is_of_type: bool  # it has the wrong type, or is none of a few texts

    @classmethod
    def of(cls, details: ErrorDetails, fields: JsonObject) -> _Fault:
        kind = details["type"]
        is_of_type = kind.endswith("_type") or kind == "literal_error"
        path = _find_path(details, fields)
        return cls(path, describe_fault(details), is_of_type)


def _find_path(details: ErrorDetails, fields: JsonObject) -> tuple[int | str, ...]:
    """The path of a fault in the fields that were sent.

    Pydantic's path has the branches of unions, too: ("stop", "list[...]", 1). A step
    that is neither an index nor a name in the value reached so far is such a branch.
    """
    path: list[int | str] = []
    value: Any = fields
    for step in details["loc"]:
        if value is details["input"]:
            break  # the rest names a branch or a missing field
        is_index = isinstance(value, list) and isinstance(step, int)
        is_name = isinstance(value, dict) and step in value
        if is_name and not _PLAIN_NAME.fullmatch(str(step)):
            break
        if is_index or is_name:
            path.append(step)
            value = value[step]

    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return tuple(path)


def _describe_first(faults: Sequence[_Fault]) -> BadRequest:
    """The error for the first wrong field. Of a union, each branch reports a fault.

    content: 3        both branches want another type: "a text or a list"
    stop: ["a", 3]    the branch of lists has the deeper fault, which counts: stop[1]
    prompt: []        a text has another type; a list "should not be empty", which
                      counts, as no fault of type
    """
    first_path = faults[0].path
    inside = [fault for fault in faults if fault.path[: len(first_path)] == first_path]
    deepest_path = max((fault.path for fault in inside), key=len)

    deepest = [fault for fault in inside if fault.path == deepest_path]
    meant = [fault for fault in deepest if not fault.is_of_type] or deepest
    first_message, *messages = dict.fromkeys(fault.message for fault in meant)
    text = first_message
    for message in messages:
        text += f" or {message.removeprefix('should be ')}"
    return BadRequest(text, field=_spell_path(deepest_path))


def _spell_path(path: Iterable[int | str]) -> str:
    """A path as clients know it: messages[3].content."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


# region OPENAI API ============================================================
# Chat completions and completions: bodies -> ChatRequest, reply -> bodies.
#
#     body       "reasoning": {"effort": "low"}, "user": "u"
#     request    thinking=True, template_kwargs={"reasoning_effort": "low"},
#                session=SessionContext("u"), user="u"
#
# Unknown fields pass. A field that we cannot honour is refused if it would change the
# reply. Clients have many spellings for three things: whether to think, how many tokens
# of it, and the id of their session. Each has a table of places: the first place that
# has a value counts.
#
# A completion is parsed as a chat with one empty message, which its prompt then
# replaces. Fields that only chats have are ignored there.
#
# Public   StopText, parse_chat_request, parse_completion_request,
#          OpenAIFormatter, USER_HEADER
# Uses     CONFIG, ERRORS, API TYPES, REQUEST BODIES
# Thread   any; pure

# -- what a body may contain -----------------------------------------------------------

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class _TextPart(TypedDict):
    type: Literal["text"]
    text: str


class _ThinkingPart(TypedDict):
    type: Literal["thinking"]
    thinking: str


class _ImagePart(TypedDict):
    type: Literal["image_url", "input_image"]
    image_url: str | JsonObject  # an object has the text in `url`
    request_field: NotRequired[str]  # ours: its path in the body of a Messages API


_ContentPart = Annotated[
    _TextPart | _ThinkingPart | _ImagePart, Field(discriminator="type")
]


class _Function(TypedDict):  # offered, called or chosen
    name: NonEmptyText
    description: NotRequired[str | None]
    parameters: NotRequired[JsonObject | None]
    strict: NotRequired[bool | None]
    arguments: NotRequired[str | JsonObject | None]


class _Tool(TypedDict):  # or a tool call, or the choice of a tool
    type: NotRequired[Literal["function"] | None]
    id: NotRequired[str | None]
    function: _Function
    strict: NotRequired[bool | None]
    defer_loading: NotRequired[bool | None]


class _ChatMessage(TypedDict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: NotRequired[str | ListOf[_ContentPart] | None]
    name: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[ListOf[_Tool] | None]
    tool_call_id: NotRequired[str | None]


_StoredHistory = Annotated[
    object,
    refuse_unless(
        None,
        "",
        sentence="no conversation is stored here: leave it out, send all messages",
    ),
]
_One = Annotated[
    object, refuse_unless(1, sentence="one reply is written for each request: send 1")
]
_NOT_HERE: Final = "this server cannot do it: leave it out"
_TEXT_ONLY: Final = "this server writes text alone: leave it out"
_SEND_TOOLS: Final = "this is the older form: send `tools` and `tool_choice`"


class _PromptCacheOptions(TypedDict):
    prewarm: NotRequired[bool]  # ours: the prompt is read, for the cache alone


class _ChatBody(BaseModel, strict=True, extra="allow"):
    """The fields that have one spelling, except for those of SamplingParams.

    extra="allow" holds for the dicts inside, too: unknown fields of a message stay.
    """

    model: str | None = None
    stream: bool = False
    stream_options: MapOf[str, bool | None] = {}
    return_progress: bool = False  # llama.cpp's server
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] = []
    messages: Annotated[ListOf[_ChatMessage], Field(min_length=1)]
    tools: ListOf[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _Tool = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    chat_template_kwargs: JsonObject = {}
    response_format: JsonObject = {}
    prompt_cache_options: _PromptCacheOptions = {}
    # What we cannot do, with the values that do not ask for it.
    n: _One = 1
    best_of: _One = 1
    echo: Annotated[object, refuse_unless(False, sentence=_NOT_HERE)] = False
    suffix: Annotated[object, refuse_unless("", sentence=_NOT_HERE)] = ""
    audio: Annotated[object, refuse_unless(None, sentence=_TEXT_ONLY)] = None
    modalities: Annotated[object, refuse_unless([], ["text"], sentence=_TEXT_ONLY)] = []
    functions: Annotated[object, refuse_unless([], sentence=_SEND_TOOLS)] = []
    function_call: Annotated[
        object, refuse_unless("none", "auto", sentence=_SEND_TOOLS)
    ] = "none"
    # Without the history that these stand for, the model would reply to a fragment.
    previous_response_id: _StoredHistory = None  # Responses API
    conversation: _StoredHistory = None  # Responses API
    assistant_id: _StoredHistory = None  # Assistants API: instructions and tools


_ASK_A_CHAT: Final = "only chats have them, at /v1/chat/completions"
_PromptIds = Annotated[
    tuple[TokenId, ...], Field(min_length=1, fail_fast=True, strict=False)
]


class _CompletionBody(BaseModel, strict=True):
    """The fields that differ from those of a chat."""

    prompt: NonEmptyText | _PromptIds
    response_format: MapOf[Literal["type"], Literal["text"]] = {}
    logprobs: Annotated[object, refuse_unless(None, sentence=_ASK_A_CHAT)] = None
    return_progress: bool = False  # without effect, but described for both


# -- bodies -> requests ----------------------------------------------------------------

# Fields of a chat that a completion ignores.
_CHAT_ONLY_FIELDS: Final = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
    "return_progress",
    "thinking",
    "thinking_budget",
    "reasoning",
    "reasoning_effort",
    "chat_template_kwargs",
)


def parse_chat_request(
    body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """POST /v1/chat/completions. Raises BadRequest, which names the wrong field."""
    fields = present_fields(body)
    lower_headers = {name.lower(): value for name, value in headers.items()}
    parsed = validate_fields(_ChatBody, fields)
    if parsed.top_logprobs and not parsed.logprobs:
        raise BadRequest("it needs logprobs to be true", field="top_logprobs")

    _check_template_kwargs(parsed.chat_template_kwargs)
    thinking = _find_thinking(fields, default=config.default_thinking)
    sampling = _sampling_params(fields, config)
    messages = [
        _normalize_message(message, field=f"messages[{index}]")
        for index, message in enumerate(parsed.messages)
    ]
    json_schema = _json_schema(parsed.response_format)
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop
    max_tokens = parsed.max_completion_tokens or parsed.max_tokens
    max_tokens = max_tokens or config.default_max_tokens
    if parsed.prompt_cache_options.get("prewarm"):
        max_tokens = 0
        _check_prewarm(parsed)

    return ChatRequest(
        kind="chat",
        request_id=request_id,
        model=parsed.model,
        session=_find_session(fields, lower_headers),
        user=_find_user(fields, lower_headers),
        sampling=sampling,
        max_tokens=max_tokens,
        stop=tuple(stop),
        stream=parsed.stream,
        include_usage=bool(parsed.stream_options.get("include_usage")),
        return_progress=parsed.return_progress,
        messages=OriginalMessages(tuple(_order_tool_results(messages))),
        tools=_functions(parsed.tools, is_deferred=False),
        deferred_tools=_functions(parsed.tools, is_deferred=True),
        tool_choice=_tool_choice(parsed),
        strict_tools=_strict_tools(parsed.tools),
        parallel_tool_calls=parsed.parallel_tool_calls,
        logprobs=parsed.logprobs,
        top_logprobs=parsed.top_logprobs,
        thinking=thinking.is_on,
        thinking_budget=_find_thinking_budget(fields),
        json_schema=json_schema,
        template_kwargs=_template_kwargs(parsed.chat_template_kwargs, thinking.effort),
    )


def _check_prewarm(parsed: _ChatBody) -> None:
    """Raise BadRequest for what is asked of a reply that will not be generated."""
    is_asked_for = {
        "stream": parsed.stream,
        "response_format": bool(parsed.response_format),
        "tool_choice": parsed.tool_choice not in ("none", "auto"),
    }
    for place, is_asked in is_asked_for.items():
        if is_asked:
            sentence = "the prompt is only read into the cache: there will be no reply"
            raise BadRequest(sentence, field=place)


def parse_completion_request(
    body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """POST /v1/completions: one prompt, as text, as token ids or as a list of one.

    Raises BadRequest, which names the wrong field.
    """
    fields = present_fields(body)
    match fields.get("prompt"):
        case [str() | list() as prompt]:
            fields["prompt"] = prompt
        case [str() | list(), *_]:
            raise BadRequest("only one per request", field="prompt")
    parsed = validate_fields(_CompletionBody, fields)

    chat_body = {
        name: value for name, value in fields.items() if name not in _CHAT_ONLY_FIELDS
    }
    chat_body["messages"] = [{"role": "user", "content": ""}]
    chat_body["enable_thinking"] = False
    request = parse_chat_request(
        chat_body, config, request_id=request_id, headers=headers
    )
    return replace(
        request,
        kind="completion",
        prompt=parsed.prompt,
        messages=OriginalMessages(()),  # it has none; the empty one was for the parser
    )


def _sampling_params(fields: JsonObject, config: Config) -> SamplingParams:
    """The parameters of a body; the DEFAULT_... settings where it has none."""
    defaults = {
        name: getattr(config, f"default_{name}", None)
        for name in SamplingParams.model_fields
    }
    return validate_fields(SamplingParams, {**drop_nulls(defaults), **fields})


def _json_schema(response_format: JsonObject) -> JsonObject | None:
    """The schema that the reply must fit; None: any text will do."""
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's server and Together take a schema with it
        schema = response_format.get("schema", {"type": "object"})
        if not isinstance(schema, dict):
            raise BadRequest("should be an object", field="response_format.schema")
        return schema

    if kind != "json_schema":
        sentence = "should be 'text', 'json_object' or 'json_schema'"
        raise BadRequest(sentence, field="response_format.type")
    # OpenAI puts the schema into an object of that name, Anthropic does not.
    owner = response_format.get("json_schema", response_format)
    schema = owner.get("schema") if isinstance(owner, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest("should have a JSON schema", field="response_format")
    return schema


# -- thinking --------------------------------------------------------------------------

# Where a body may ask for thinking, with a bool or one of the levels below. The first
# value that is present switches it on or off; the first that is an effort, such as
# "low", decides how hard to think.
_THINKING_FIELDS: Final = (
    "enable_thinking",  # Qwen's API
    "thinking",  # OpenClaw
    "thinking.enabled",
    "thinking.effort",
    "thinking.level",
    "thinking.type",  # Anthropic, GLM's API: "enabled", "adaptive", "disabled"
    "reasoning_effort",  # OpenAI's chat completions, LiteLLM
    "reasoning",
    "reasoning.enabled",  # OpenRouter
    "reasoning.effort",  # OpenAI's responses, OpenRouter
    "reasoning.level",
    "reasoning.type",
)
_THINKING_PLACES: Final = (
    "chat_template_kwargs.enable_thinking",  # vLLM, SGLang: as Qwen's templates name it
    "chat_template_kwargs.thinking",  # as DeepSeek's do
    *_THINKING_FIELDS,
    *(f"metadata.{name}" for name in _THINKING_FIELDS),
)
# Where a body may say how many tokens it may think. The first that is present counts.
_BUDGET_FIELDS: Final = (
    "thinking.budget_tokens",  # Anthropic
    "thinking_budget",  # Qwen's API
    "reasoning.max_tokens",  # OpenRouter
)
_BUDGET_PLACES: Final = (
    "chat_template_kwargs.thinking_budget",  # Qwen, Seed-OSS; their templates get it
    *_BUDGET_FIELDS,
    *(f"metadata.{name}" for name in _BUDGET_FIELDS),
)
# They also switch thinking on, where nothing else says whether to think.
_SWITCHING_BUDGETS: Final = ("reasoning.max_tokens", "metadata.reasoning.max_tokens")
_THINKING_LEVELS: Final[Mapping[str, str]] = {
    "off": "off",
    "none": "off",
    "disabled": "off",
    "false": "off",  # also as a bool
    "on": "on",
    "enabled": "on",
    "adaptive": "on",
    "between_tools": "on",
    "auto": "on",
    "true": "on",  # also as a bool
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
# How a template is applied is not a request's to set; `documents` are for it to print.
_RESERVED_KWARGS: Final = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
} - {"documents"}


class _Thinking(NamedTuple):
    """Whether to think, and how hard."""

    is_on: bool
    effort: str | None = None  # "low", "medium" or "high"; None: the body names none


def _find_thinking(fields: JsonObject, *, default: bool) -> _Thinking:
    """The thinking that a body asks for. Raises BadRequest if a value is no level.

    {"thinking": true, "reasoning_effort": "low"} is on, with the effort "low".
    {"reasoning": {"max_tokens": 2000}} is on, as it says nothing else.
    """
    levels = []
    for place in _THINKING_PLACES:
        value = value_at(fields, place)
        can_be_object = f"{place}.type" in _THINKING_PLACES  # as can "thinking"
        if value is None or (can_be_object and isinstance(value, dict)):
            continue  # the fields of the object have places of their own

        level = _THINKING_LEVELS.get(str(value).lower())
        if level is None:
            names = ", ".join(_THINKING_LEVELS)
            quote = f"{value!r:.60}"
            raise BadRequest(f"{quote} is none of {names}", field=place, quote=quote)
        levels.append(level)

    if not levels:
        budgets = [value_at(fields, place) for place in _SWITCHING_BUDGETS]
        return _Thinking(default or any(budget is not None for budget in budgets))
    if levels[0] == "off":
        return _Thinking(False)
    efforts = [level for level in levels if level not in ("off", "on")]
    return _Thinking(True, efforts[0] if efforts else None)


def _find_thinking_budget(fields: JsonObject) -> int | None:
    """The number of tokens that a reply may think; None: as many as it likes.

    Raises BadRequest if the value at one of the places is no such number.
    """
    budgets: list[int] = []
    for place in _BUDGET_PLACES:
        value = value_at(fields, place)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise BadRequest("should be a number of tokens, 0 or more", field=place)
        budgets.append(value)
    return budgets[0] if budgets else None


def _check_template_kwargs(template_kwargs: JsonObject) -> None:
    for name in template_kwargs:
        if name in _RESERVED_KWARGS:
            place = f"chat_template_kwargs.{name}"
            raise BadRequest("this is not a request's to set", field=place)


def _template_kwargs(sent_kwargs: JsonObject, effort: str | None) -> JsonObject:
    """What a chat template gets, except enable_thinking, which ChatRequest.thinking is.

    A `reasoning_effort` among the kwargs that were sent counts before `effort`.
    """
    template_kwargs = drop_nulls({"reasoning_effort": effort})
    template_kwargs.update(drop_nulls(sent_kwargs))
    template_kwargs.pop("enable_thinking", None)
    return template_kwargs


# -- session ---------------------------------------------------------------------------

# Where a session id may be, the strongest first: the path of a field in the body or, if
# the body has no such field, the name of a header.
_SESSION_PLACES: Final = (
    "session_id",  # this one and the next seven as in our first system
    "conversation_id",
    "thread_id",
    "chat_id",
    "metadata.session_id",
    "metadata.conversation_id",
    "metadata.thread_id",
    "metadata.chat_id",
    "metadata.user_id",  # Claude Code: see _claude_session_id()
    "x-claude-code-session-id",
    "x-session-id",  # opencode
    "thread-id",  # Codex; a sub-agent has its own
    "session-id",  # Codex, PI; a sub-agent has that of its parent
    "prompt_cache_key",  # OpenAI: requests that begin with the same tokens
    "user",  # OpenAI: a person, if nothing better is known
)
_PARENT_PLACES: Final = (
    "x-parent-session-id",  # opencode
    "x-codex-parent-thread-id",
)
_AGENT_PLACES: Final = ("x-claude-code-agent-id",)
# Where a gateway may name the user that it asks for, the strongest first, as above.
USER_HEADER: Final = "x-cache-user"
_USER_PLACES: Final = (
    USER_HEADER,
    "metadata.user_id",  # Anthropic: see _without_session()
    "safety_identifier",  # OpenAI, as is the next one: its older name
    "user",
    "prompt_cache_key",  # OpenAI: often one for each session
)
_MAX_ID_LENGTH: Final = 256
# In a `user_id` of Claude Code: now a field of JSON text, in older versions the end.
_CLAUDE_SESSION: Final = re.compile(
    r'"session_id"\s*:\s*"([^"]*)"|_session_([0-9a-f-]+)\Z'
)


def _find_session(fields: JsonObject, headers: Mapping[str, str]) -> SessionContext:
    """The ids of the conversation; the names of `headers` are in lower case."""
    session_id = _find_id(_SESSION_PLACES, fields, headers)
    agent_id = _find_id(_AGENT_PLACES, fields, headers)
    # A sub-agent sends the session id of its parent. Its own id alone names no session:
    # it is unique only within that of its parent.
    if session_id is not None and agent_id is not None:
        return SessionContext(f"{session_id}/{agent_id}", session_id)
    return SessionContext(session_id, _find_id(_PARENT_PLACES, fields, headers))


def _find_id(
    places: Sequence[str], fields: JsonObject, headers: Mapping[str, str]
) -> str | None:
    """The first id at one of these places: a text or a number that is not empty."""
    for place in places:
        value = value_at(fields, place)
        if value is None:
            value = headers.get(place)
        if place == "metadata.user_id":  # names a person; of Claude Code, a session too
            value = _claude_session_id(str(value))
        is_id = isinstance(value, str | int) and not isinstance(value, bool)
        if value and is_id:
            return str(value)[:_MAX_ID_LENGTH]
    return None


def _find_user(fields: JsonObject, headers: Mapping[str, str]) -> str:
    """The user that a request names, at full length; "" if it names none.

    USER_HEADER is looked for among the headers alone, the others in the body alone.
    """
    for place in _USER_PLACES:
        is_header = place == USER_HEADER
        value = headers.get(place) if is_header else value_at(fields, place)
        if isinstance(value, bool) or not isinstance(value, str | int):
            continue
        user = str(value).strip()
        if place == "metadata.user_id":
            user = _without_session(user)
        if user:
            return user
    return ""


def _without_session(user_id: str) -> str:
    """A `user_id` of Claude Code without its session: person, account and device stay.

    {"device_id": "d", "session_id": "s"} -> {"device_id": "d", }
    user_a1_account_b2_session_c3 -> user_a1_account_b2
    """
    return _CLAUDE_SESSION.sub("", user_id)


def _claude_session_id(user_id: str) -> str | None:
    """The session in such a `user_id`: "s" and "c3" in these two; None: it has none."""
    match = _CLAUDE_SESSION.search(user_id)
    return (match[1] or match[2]) if match else None


# -- messages --------------------------------------------------------------------------


def _normalize_message(sent: _ChatMessage, *, field: str) -> Message:
    """A message as all sections know it; `field` is its path in the body.

    Raises BadRequest: a message that needs text has none, or one that is not of the
    assistant has thinking among its parts.
    """
    message: Message = {
        name: value for name, value in sent.items() if value not in (None, [])
    }
    role = message["role"]
    content = message.get("content")
    thinking = None
    if isinstance(content, list):
        thinking = _join_thinking(content)
        message["content"] = [part for part in content if part["type"] != "thinking"]

    if role not in ("assistant", "tool") and "content" not in message:
        raise BadRequest(f"a {role} message needs text", field=f"{field}.content")
    if thinking is not None and role != "assistant":
        fault = f"a {role} message has no thinking: only the assistant's has"
        raise BadRequest(fault, field=f"{field}.content")

    for name in ("reasoning", "reasoning_content"):  # the last that is sent counts
        thinking = message.pop(name, thinking)
    return drop_nulls({"content": "", **message, "reasoning_content": thinking})


def _join_thinking(parts: Iterable[Mapping[str, Any]]) -> str | None:
    texts = [part["thinking"] for part in parts if part["type"] == "thinking"]
    return "".join(texts) or None


def _order_tool_results(messages: Iterable[Message]) -> list[Message]:
    """Put the results of parallel calls into the order of the calls.

        sent     calls a, b | result of b, note, result of a | next question
        ordered  calls a, b | result of a, result of b, note | next question

    why(L-70): clients send results as the calls end, and most templates print them
    without ids, so the model would take one for the other. What is no result of these
    calls, such as a note of the system, follows. Where two calls have the same id,
    nothing is moved.
    """
    ordered: list[Message] = []
    positions: dict[str | None, int] = {}  # of the newest calls, by id
    for are_results, group in groupby(messages, key=_can_follow_calls):
        run = list(group)
        if are_results:
            run.sort(key=lambda m: positions.get(m.get("tool_call_id"), len(positions)))
        ordered += run

        call_ids = _call_ids(run)
        if len(set(call_ids)) < len(call_ids):
            positions = {}
        elif call_ids:
            positions = {call_id: n for n, call_id in enumerate(call_ids)}
    return ordered


def _can_follow_calls(message: Message) -> bool:
    return message["role"] in ("tool", "system", "developer")


def _call_ids(messages: Iterable[Message]) -> list[str | None]:
    call_ids: list[str | None] = []
    for message in messages:
        call_ids += [call.get("id") for call in message.get("tool_calls", ())]
    return call_ids


# -- tools -----------------------------------------------------------------------------


def _functions(tools: Iterable[_Tool], *, is_deferred: bool) -> tuple[JsonObject, ...]:
    """The functions of those tools that are deferred, or of those that are not.

    Nothing else of a tool is kept: templates print it whole, with any cache_control.
    """
    return tuple(
        {"type": "function", "function": drop_nulls(tool["function"])}
        for tool in tools
        if bool(tool.get("defer_loading")) == is_deferred
    )


def _strict_tools(tools: Sequence[_Tool]) -> dict[str, str]:
    """Of the tools whose arguments must fit their schema: where it is, by name."""
    paths = {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        if tool.get("strict") or function.get("strict"):
            paths[function["name"]] = f"tools[{index}].function.parameters"
    return paths


def _tool_choice(parsed: _ChatBody) -> ToolChoice:
    """The choice that a body makes, "none" if it has no tools.

    Raises BadRequest: it demands a tool that is not there.
    """
    names = {tool["function"]["name"] for tool in parsed.tools}
    choice = parsed.tool_choice
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise BadRequest(
                "a call is demanded, but there are no tools", field="tool_choice"
            )
        return ToolChoice(choice if names else "none")

    name = choice["function"]["name"]
    if name not in names:
        quote = f"{name!r:.80}"
        sentence = f"{quote} is not among the tools"
        raise BadRequest(sentence, field="tool_choice", quote=quote)
    return ToolChoice("named", name)


# -- reply -> bodies -------------------------------------------------------------------


class OpenAIFormatter(NamedTuple):
    """A ResponseFormatter for chat completions and completions."""

    kind: Literal["chat", "completion"]
    request_id: str
    model: str  # that answers
    created: int  # Unix seconds
    include_usage: bool = False  # at the end of a stream
    return_progress: bool = False  # of prefill

    @property
    def closes_cut_calls(self) -> bool:
        """Yes: clients parse any arguments, and then look at the finish reason."""
        return True

    def start_events(self, _usage: Usage) -> list[JsonObject]:
        """A chat begins with the role, a completion with its first text."""
        if self.kind == "completion":
            return []
        return [self._chunk({"role": "assistant", "content": ""})]

    def ping_event(self) -> JsonObject:
        """A chunk without text. why(L-50): with `content` alone, LiteLLM drops it."""
        return self._chunk({"content": "", "reasoning_content": ""})

    def progress_events(self, progress: PromptProgress) -> list[JsonObject]:
        """A chunk as llama.cpp's server sends it; for others it is one without text."""
        if not self.return_progress:
            return []
        return [{**self.ping_event(), "prompt_progress": progress._asdict()}]

    def delta_events(
        self, delta: JsonObject, logprobs: JsonObject | None = None
    ) -> list[JsonObject]:
        """One chunk."""
        return [self._chunk(delta, logprobs=logprobs)]

    def end_events(self, ending: ReplyEnd) -> list[JsonObject]:
        """The chunk with the finish reason and, if it is wanted, one with the usage."""
        last_chunk = self._chunk(
            {}, finish_reason=ending.finish_reason, logprobs=ending.logprobs
        )
        if not self.include_usage:
            return [last_chunk]
        usage = _usage_body(ending.usage)
        return [last_chunk, {**last_chunk, "choices": [], "usage": usage}]

    def full_body(self, message: JsonObject, ending: ReplyEnd) -> JsonObject:
        """A chat completion, or a text completion."""
        if self.kind == "completion":
            body = self._text_completion(
                message, finish_reason=ending.finish_reason, logprobs=ending.logprobs
            )
        else:
            body = self._chat_completion(message, ending)
        return {**body, "usage": _usage_body(ending.usage)}

    def _chat_completion(self, message: JsonObject, ending: ReplyEnd) -> JsonObject:
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": ending.finish_reason,
                    "logprobs": ending.logprobs,
                }
            ],
        }

    def _chunk(
        self,
        delta: JsonObject,
        *,
        finish_reason: FinishReason | None = None,
        logprobs: JsonObject | None = None,
    ) -> JsonObject:
        """An event of a stream."""
        if self.kind == "completion":
            return self._text_completion(
                delta, finish_reason=finish_reason, logprobs=logprobs
            )
        return {
            "id": f"chatcmpl-{self.request_id}",
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "delta": delta,
                    "finish_reason": finish_reason,
                    "logprobs": logprobs,
                }
            ],
        }

    def _text_completion(
        self,
        message: JsonObject,
        *,
        finish_reason: FinishReason | None,
        logprobs: JsonObject | None,
    ) -> JsonObject:
        """A completion, or an event of its stream, which has the same shape."""
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "text": message.get("content") or "",
                    "finish_reason": finish_reason,
                    "logprobs": logprobs,
                }
            ],
        }


def _usage_body(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


# region ANTHROPIC API =========================================================
# The Messages API: a body is translated to that of a chat, a reply to content blocks.
#
#     Messages API                        chat
#     system                              a system message
#     assistant: thinking, text,          one assistant message with reasoning_content,
#         tool_use                            content and tool_calls
#     user: text, image                   a user message for each run of them
#     user: tool_result                   a tool message
#
# parse_chat_request() reads the translated body, so prompt and cache are the same by
# either API. The content of messages is checked while it is translated, since a fault
# must be named where it is in the body that was sent. Most other fields have the same
# path in a chat; anthropic_error_body() translates the paths of the rest.
#
# Left out is what only Anthropic's own machines can do: server tools that are offered,
# and encrypted thinking. A history in which server tools were used is refused.
#
# A tool with `defer_loading` is not among the tools of the prompt. The client finds it
# later and sends a `tool_reference`; the prompt has its definition there, so that
# nothing before it changes (L-48). If the request offers Anthropic's tool search, which
# does not run here, no tool is deferred.
#
# Public   parse_any_request, parse_anthropic_request, thinking_signature,
#          AnthropicFormatter, anthropic_error_body
# Uses     CONFIG, ERRORS, API TYPES, REQUEST BODIES, OPENAI API
# Thread   any; pure

# -- what a body may contain -----------------------------------------------------------

# Anthropic runs all of these but "custom" itself, so they are left out. Any other type,
# such as bash_20250124, is refused: only Anthropic's models know how to call it.
_TOOL_TYPES: Final = re.compile(
    "custom$|web_search_|web_fetch_|code_execution_|tool_search_|mcp_|advisor_"
)


def _refuse_tool_type(name: str) -> str:
    """Raise for a tool that only Anthropic's models know how to call."""
    if not _TOOL_TYPES.match(name):
        sentence = (
            "only Anthropic's own models know this tool: offer one of type custom"
        )
        raise PydanticCustomError(OUR_FAULT, sentence)
    return name


_NO_SERVERS: Final = "no server is asked for tools here: leave it out"


class _MessagesMessage(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[JsonObject]


class _MessagesTool(TypedDict):
    name: NonEmptyText
    description: NotRequired[str | None]
    type: NotRequired[Annotated[str, AfterValidator(_refuse_tool_type)] | None]
    input_schema: NotRequired[JsonObject]
    strict: NotRequired[bool | None]
    defer_loading: NotRequired[bool | None]


class _MessagesChoice(TypedDict):
    type: NotRequired[Literal["auto", "any", "tool", "none"]]
    name: NotRequired[NonEmptyText | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class _MessagesBody(BaseModel, strict=True, extra="allow"):
    """The fields that differ from those of a chat."""

    max_tokens: Annotated[int, Field(ge=0)] | None = (
        None  # 0: what a chat calls prewarm
    )
    messages: Annotated[ListOf[_MessagesMessage], Field(min_length=1)]
    system: str | ListOf[JsonObject] = []
    tools: ListOf[_MessagesTool] = []
    tool_choice: _MessagesChoice = {}
    stop_sequences: Annotated[ListOf[StopText], Field(max_length=16)] = []
    output_config: JsonObject = {}
    mcp_servers: Annotated[object, refuse_unless([], sentence=_NO_SERVERS)] = []


# -- body -> request -------------------------------------------------------------------


def parse_any_request(
    body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """A request of any API, for /v1/explain. Raises BadRequest.

    It is known by a field that no other API has; without any, it is read as a chat.
    """
    parse = parse_chat_request
    match present_fields(body):
        case {"prompt": _}:
            parse = parse_completion_request
        case {"system": _} | {"tools": [{"name": _}, *_]} | {"stop_sequences": _}:
            parse = parse_anthropic_request
    return parse(body, config, request_id=request_id, headers=headers)


def parse_anthropic_request(
    body: object, config: Config, *, request_id: str, headers: Mapping[str, str]
) -> ChatRequest:
    """POST /v1/messages. Raises BadRequest, which names the wrong field."""
    fields = present_fields(body)
    parsed = validate_fields(_MessagesBody, fields)
    tools = _translate_tools(parsed.tools)
    choice = parsed.tool_choice
    output = parsed.output_config
    chat_body = {
        **fields,  # most fields have the same name
        "max_tokens": parsed.max_tokens or None,
        "prompt_cache_options": {"prewarm": parsed.max_tokens == 0},
        "messages": _translate_messages(parsed, tools),
        "tools": list(tools.values()),
        "tool_choice": _translate_choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        "stop": parsed.stop_sequences,
        "thinking": fields.get("thinking", {"type": "disabled"}),
        "reasoning_effort": output.get("effort"),
        "response_format": output.get("format", fields.get("output_format")),
    }
    request = parse_chat_request(
        chat_body, config, request_id=request_id, headers=headers
    )
    strict_tools = {
        tool["name"]: f"tools[{index}].input_schema"
        for index, tool in enumerate(parsed.tools)
        if tool["name"] in request.strict_tools
    }
    return replace(request, kind="messages", strict_tools=strict_tools)


def _translate_tools(tools: Iterable[_MessagesTool]) -> dict[str, JsonObject]:
    """The tools that the client runs, by name."""
    # Anthropic's search does not run here: what it would find has to be there already.
    types = [_tool_type(tool) for tool in tools]
    has_search = any(name.startswith("tool_search_") for name in types)

    translated: dict[str, JsonObject] = {}
    for tool in tools:
        if _tool_type(tool) != "custom":
            continue
        function = {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        translated[tool["name"]] = {
            "function": drop_nulls(function),
            "strict": tool.get("strict"),
            "defer_loading": bool(tool.get("defer_loading")) and not has_search,
        }
    return translated


def _tool_type(tool: _MessagesTool) -> str:
    return tool.get("type") or "custom"


def _translate_choice(choice: _MessagesChoice) -> object:
    """The tool_choice of a chat. Raises BadRequest: it lacks the name of a tool."""
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            name = choice.get("name")
            if name is None:
                raise BadRequest(
                    "a choice of type tool needs it", field="tool_choice.name"
                )
            return {"function": {"name": name}}
        case kind:  # "auto" or "none"
            return kind


def _translate_messages(
    parsed: _MessagesBody, tools: Mapping[str, JsonObject]
) -> list[Message]:
    """The messages of a chat. Raises BadRequest for a block that cannot be read."""
    messages: list[Message] = []
    if parsed.system:
        builder = _MessageBuilder("system", tools)
        builder.append_content(parsed.system, field="system")
        messages += builder.finish()
    for index, message in enumerate(parsed.messages):
        builder = _MessageBuilder(message["role"], tools)
        builder.append_content(message["content"], field=f"messages[{index}].content")
        messages += builder.finish()
    return messages


_UNREAD_DOCUMENT: Final = (
    "[a document that cannot be read here: extract its text with a tool]"
)


def _heading(block: JsonObject) -> str:
    """Title, source and context of a document or search result, a line for each."""
    lines = [
        f"{name}: {block[name]}"
        for name in ("title", "source", "context")
        if isinstance(block.get(name), str) and block[name]
    ]
    return "\n".join(lines)


# The types of the fields of the blocks that become a call and its result.
_CALL_TYPES: Final = {
    "id": (str, NoneType),
    "name": (str,),
    "input": (dict, str, NoneType),
}
_RESULT_TYPES: Final = {"tool_use_id": (str, NoneType)}


def _check_types(
    block: JsonObject, types: Mapping[str, tuple[type, ...]], *, field: str
) -> None:
    """Raise BadRequest if a field of a block has another type than those in `types`."""
    for name, allowed in types.items():
        if not isinstance(block.get(name), allowed):
            type_name = "an object" if dict in allowed else "a text"
            raise BadRequest(f"should be {type_name}", field=f"{field}.{name}")


def _mark_error(parts: list[JsonObject]) -> None:
    """Put "Error:" before a result without that word: a chat has no `is_error`."""
    texts = [part.get("text", "").lower() for part in parts]
    if not any("error" in text for text in texts):
        parts.insert(0, {"type": "text", "text": "Error:"})


def _refuse_block(block: object, *, field: str) -> BadRequest:
    """The error for a block with a wrong field, or that no message of its role has."""
    if not isinstance(block, dict):
        return BadRequest("should be a content block, an object", field=field)
    if not isinstance(block.get("type"), str):
        return BadRequest("should be a text", field=f"{field}.type")
    quote = f"{block['type']!r:.60}"
    sentence = f"a block of type {quote} cannot be read here, or a field of it is wrong"
    return BadRequest(sentence, field=field, quote=quote)


class _MessageBuilder:
    """Builds the chat messages that stand for one message of the Messages API.

        sent     user: text "a", tool_result, text "b", image
        chat     user: "a" | tool: the result | user: "b", image

    Its user calls append_content() once, then finish(). A tool result is a message of
    its own: another builder, with the role "tool", makes it. `field` is always the path
    in the body.
    """

    def __init__(self, role: str, tools: Mapping[str, JsonObject]) -> None:
        self._role = role
        self._tools = tools  # of a chat, by name
        self._messages: list[Message] = []
        self._begin_message()

    def append_content(self, content: Any, *, field: str) -> None:
        """Append a text or a list of blocks. Raises BadRequest: one cannot be read."""
        if not isinstance(content, list):
            content = [{"type": "text", "text": content}]
        for index, block in enumerate(content):
            self._append_block(block, field=f"{field}[{index}]")

    def finish(self) -> list[Message]:
        """The messages: at least one; of an assistant or a tool, exactly one."""
        if self._role == "assistant":
            return [self._finish_reply()]
        messages = [
            message
            for message in self._messages
            if message["content"] or message["role"] == "tool"
        ]
        return messages or [{"role": self._role, "content": ""}]

    def _finish_reply(self) -> Message:
        """The one message of an assistant, without fields that are empty.

        Its texts are joined: they were generated as one.
        """
        (reply,) = self._messages
        text = "".join(part["text"] for part in reply["content"])
        fields = {**reply, "content": text}
        return {name: value for name, value in fields.items() if value}

    def _append_block(self, block: Any, *, field: str) -> None:
        match self._role, block:
            case _, {"type": "text", "text": str(text)}:
                self._append_text(text)
            case "assistant", {"type": "thinking", "thinking": str()}:
                self._append_thinking(block)
            case "assistant", {"type": "redacted_thinking"}:
                pass  # encrypted thinking of another model
            case "assistant", {"type": "tool_use", "name": _, "input": _}:
                self._append_tool_call(block, field=field)
            case "user", {"type": "tool_result"}:
                self._append_tool_result(block, field=field)
            case "user" | "tool", {"type": "image", "source": dict()}:
                self._append_image(block["source"], field=field)
            case _, {"type": "document"}:
                self._append_document(block, field=field)
            case "user" | "tool", {"type": "search_result", "content": list(content)}:
                self._append_titled(block, content, field=f"{field}.content")
            case _, {"type": "tool_reference", "tool_name": str(name)}:
                self._append_definition(name)
            case _:
                raise _refuse_block(block, field=field)

    def _begin_message(self) -> None:
        self._messages.append({"role": self._role, "content": []})

    def _append_text(self, text: str) -> None:
        self._messages[-1]["content"].append({"type": "text", "text": text})

    def _append_document(self, block: JsonObject, *, field: str) -> None:
        match block.get("source"):
            case {"type": "content", "content": str() | list() as content}:
                self._append_titled(block, content, field=f"{field}.source.content")
            case {"type": "text", "data": str(text)}:
                heading = _heading(block)
                self._append_text(f"{heading}\n\n{text}" if heading else text)
            case {"type": "base64" | "url" | "file"}:
                self._append_text(_UNREAD_DOCUMENT)
            case _:
                raise _refuse_block(block, field=field)

    def _append_titled(self, block: JsonObject, content: Any, *, field: str) -> None:
        """Append the content of a document or a search result, after its title."""
        if heading := _heading(block):
            self._append_text(heading)
        self.append_content(content, field=field)

    def _append_image(self, source: JsonObject, *, field: str) -> None:
        match source:
            case {"type": "base64"}:  # the data show the media type
                url = f"data:;base64,{source.get('data')}"
            case {"type": "url", "url": str(url)}:
                pass
            case _:
                raise BadRequest("should be base64 or a url", field=f"{field}.source")
        part = {"type": "image_url", "image_url": url, "request_field": field}
        self._messages[-1]["content"].append(part)

    def _append_thinking(self, block: JsonObject) -> None:
        message = self._messages[-1]
        earlier = message.get("reasoning_content", "")
        message["reasoning_content"] = earlier + block["thinking"]
        message["thought_id"] = str(drop_nulls(block).get("signature", ""))

    def _append_tool_call(self, block: JsonObject, *, field: str) -> None:
        _check_types(block, _CALL_TYPES, field=field)
        if not block["name"]:
            raise BadRequest("it is empty", field=f"{field}.name")
        call = {
            "id": block.get("id"),
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        self._messages[-1].setdefault("tool_calls", []).append(call)

    def _append_tool_result(self, block: JsonObject, *, field: str) -> None:
        _check_types(block, _RESULT_TYPES, field=field)
        builder = _MessageBuilder("tool", self._tools)
        content = drop_nulls(block).get("content", "")
        builder.append_content(content, field=f"{field}.content")
        (result,) = builder.finish()

        if block.get("is_error"):
            _mark_error(result["content"])
        result["tool_call_id"] = block.get("tool_use_id")
        self._messages.append(result)
        self._begin_message()

    def _append_definition(self, name: str) -> None:
        """Append the definition of a tool, or its name if it is not offered."""
        tool = self._tools.get(name, {"function": {"name": name}})
        definition = json.dumps(tool["function"], ensure_ascii=False)
        self._append_text(f"<tool>\n{definition}\n</tool>")


# -- reply -> events and bodies --------------------------------------------------------


def thinking_signature(thinking: str) -> str:
    """The signature of a thinking block: it finds the text that a client leaves out."""
    return f"start-llm-{sha256(thinking.encode()).hexdigest()[:32]}"


@dataclass(slots=True)
class _Block:
    """A content block of a reply, as it is generated.

    A new kind is a case in delta_body(), full_body() and delta_events().
    """

    start_body: JsonObject  # in content_block_start
    text: str = ""  # of a call: its arguments, as JSON

    @property
    def kind(self) -> str:
        """Its type: "text", "thinking" or "tool_use"."""
        return str(self.start_body["type"])

    def delta_body(self, text: str) -> JsonObject:
        """What content_block_delta has for a piece of its text."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case _:
                return {"type": "input_json_delta", "partial_json": text}

    def full_body(self) -> JsonObject:
        """The whole block, in a body that is no stream."""
        match self.kind:
            case "text":
                return {"type": "text", "text": self.text}
            case "thinking":
                signature = thinking_signature(self.text)
                return {
                    "type": "thinking",
                    "thinking": self.text,
                    "signature": signature,
                }
            case _:
                return {**self.start_body, "input": _read_arguments(self.text)}


def _read_arguments(text: str) -> object:
    """The arguments of a call; of one that was cut, the text that there is.

    That is what a client of a stream has. An object, even an empty one, might be run.
    """
    try:
        return parse_json_body((text or "{}").encode(errors="replace"))
    except BadRequest:
        return text


class AnthropicFormatter:
    """A ResponseFormatter for the Messages API.

    The deltas of one kind, or of one tool call, make a content block.
    """

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model
        self._content: list[JsonObject] = []  # the blocks that have ended
        self._block: _Block | None = None  # the one that is open

    @property
    def closes_cut_calls(self) -> bool:
        """No. why(L-86): Claude Code runs each call that it can parse."""
        return False

    def start_events(self, usage: Usage) -> list[JsonObject]:
        """The message, which has no content yet."""
        return [{"type": "message_start", "message": self._message_body(usage)}]

    def ping_event(self) -> JsonObject:
        """The API's own keep-alive."""
        return {"type": "ping"}

    def progress_events(self, _progress: PromptProgress) -> list[JsonObject]:
        """None: the API has no such event."""
        return []

    def delta_events(
        self, delta: JsonObject, _logprobs: JsonObject | None = None
    ) -> list[JsonObject]:
        """The events of a delta, which may end a block and begin another."""
        events: list[JsonObject] = []
        open_kind = self._block.kind if self._block else None
        match delta:
            case {"tool_calls": [{"id": call_id, "function": function}]}:
                text = function["arguments"]
                name = function["name"]
                call = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                events = self._begin_block(call)
            case {"tool_calls": [{"function": {"arguments": text}}]}:
                pass  # of the call whose block is open
            case {"reasoning_content": text}:
                if open_kind != "thinking":
                    thinking = {"type": "thinking", "thinking": "", "signature": ""}
                    events = self._begin_block(thinking)
            case {"content": text}:
                if open_kind != "text":
                    events = self._begin_block({"type": "text", "text": ""})

        assert self._block is not None
        self._block.text += text
        if text:
            events.append(self._delta_event(self._block.delta_body(text)))
        return events

    def end_events(self, ending: ReplyEnd) -> list[JsonObject]:
        """The end of the last block, then of the message."""
        message_delta = {
            "type": "message_delta",
            "delta": {
                "stop_reason": _stop_reason(ending),
                "stop_sequence": ending.stop_sequence,
            },
            "usage": _messages_usage(ending.usage),
        }
        return [*self._end_block(), message_delta, {"type": "message_stop"}]

    def full_body(self, _message: JsonObject, ending: ReplyEnd) -> JsonObject:
        """The message with the blocks of all deltas, in the order they came in."""
        self._end_block()
        return self._message_body(
            ending.usage,
            stop_reason=_stop_reason(ending),
            stop_sequence=ending.stop_sequence,
        )

    def _message_body(
        self,
        usage: Usage,
        *,
        stop_reason: str | None = None,
        stop_sequence: str | None = None,
    ) -> JsonObject:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": _messages_usage(usage),
        }

    def _begin_block(self, start_body: JsonObject) -> list[JsonObject]:
        """End the block that is open, if one is, and open one that begins like this."""
        events = self._end_block()
        self._block = _Block(start_body)
        start_event = {
            "type": "content_block_start",
            "index": len(self._content),
            "content_block": start_body,
        }
        return [*events, start_event]

    def _end_block(self) -> list[JsonObject]:
        """The events that end the open block; none if none is open."""
        block = self._block
        if block is None:
            return []
        body = block.full_body()
        events: list[JsonObject] = []
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": body["signature"]}
            events.append(self._delta_event(signature))
        events.append({"type": "content_block_stop", "index": len(self._content)})
        self._content.append(body)
        self._block = None
        return events

    def _delta_event(self, delta: JsonObject) -> JsonObject:
        return {
            "type": "content_block_delta",
            "index": len(self._content),
            "delta": delta,
        }


_STOP_REASONS: Final[Mapping[FinishReason, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


def _stop_reason(ending: ReplyEnd) -> str:
    if ending.stop_sequence:
        return "stop_sequence"
    return _STOP_REASONS[ending.finish_reason]


def _messages_usage(usage: Usage) -> JsonObject:
    """The counts of the API. Each token of the prompt is in one of the first three.

    Of 100 tokens, 60 of them cached: 60 are read from the cache, 39 are written to it,
    and 1 is input. It is the last, with which decoding begins.
    """
    n_new = usage.prompt_tokens - usage.cached_tokens
    n_input = min(n_new, 1)
    return {
        "input_tokens": n_input,
        "cache_creation_input_tokens": n_new - n_input,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# -- errors ----------------------------------------------------------------------------

# By status. Errors of any other status have the type that they have in OpenAI's API.
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
# Beginnings of paths in a chat and in the Messages API; the first that fits counts.
_MESSAGES_NAMES: Final = (
    ("reasoning_effort", "output_config.effort"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
)


def _messages_path(path: str) -> str:
    """A path as Anthropic writes it: messages[3].content -> messages.3.content.

    A path in the chat that was made of the body becomes that in the body.
    """
    for chat_name, name in _MESSAGES_NAMES:
        if path.startswith(chat_name):
            path = name + path.removeprefix(chat_name)
            break
    return re.sub(r"\[(\d+)\]", r".\1", path)


def anthropic_error_body(error: ServerError) -> JsonObject:
    """The body, or the event, of an error in the Messages API."""
    message = str(error)
    if error.param is not None and message.startswith(f"{error.param}: "):
        message = _messages_path(error.param) + message.removeprefix(error.param)
    if isinstance(error, ContextTooLong):  # in the words that agents look for
        sizes = f"{error.n_prompt} tokens > {error.limit} maximum"
        message = f"prompt is too long: {sizes}"
    return {
        "type": "error",
        "error": {
            "type": _ERROR_TYPES.get(error.status, error.type),
            "message": message,
        },
    }


# region REQUEST IMAGES ========================================================
# Images are taken out of a request; a marker is left where each was. Three parts:
#
#     out of a request   extract_images: the files, and the markers in their place
#     pixels             SentImage.decode: a file -> an RGB image of bounded size
#     parts of a file    files that would take too long are refused unread
#
# For example
#
#     before   part of type "image_url", with "data:image/png;base64,iVBORw0KGgo..."
#     after    part of type "text", with "\ufdd1" + digest of the image + "\ufdd2"
#
# A marker is text like any other to the sections that compare, record and render
# messages; only CANONICALIZATION knows it, and leaves it alone. Where a prompt becomes
# tokens, those of the image take its place. Its two ends are noncharacters, which
# Unicode keeps for the inside of programs.
#
# Public   SentImage, extract_images
# Uses     CONFIG, ERRORS, API TYPES
# Thread   connection


# -- out of a request ------------------------------------------------------------------


def extract_images(
    request: ChatRequest, config: Config, *, has_vision: bool, salt: bytes
) -> tuple[ChatRequest, dict[str, SentImage]]:
    """The request with a marker for each image, and the images by digest.

    `salt` goes into the digests, so that no client can name another tenant's image. If
    the model has no vision, IMAGES_ON_TEXT_MODEL decides whether an image is refused or
    replaced by a line of text. Raises BadRequest.
    """
    extractor = _ImageExtractor(config, has_vision, salt)
    messages: list[Message] = []
    for index, message in enumerate(request.messages):
        content = message["content"]
        if isinstance(content, list):
            field = f"messages[{index}].content"
            content = extractor.replace_images(content, field=field)
        messages.append({**message, "content": content})
    originals = OriginalMessages(tuple(messages))
    return replace(request, messages=originals), extractor.images


@dataclass(slots=True)
class _ImageExtractor:
    """Replaces images by text, and collects them."""

    config: Config
    has_vision: bool
    salt: bytes
    images: dict[str, SentImage] = field(default_factory=dict)  # by digest

    def replace_images(
        self, parts: Iterable[JsonObject], *, field: str
    ) -> list[JsonObject]:
        """The parts of a message without images; `field` is their path in the body."""
        texts: list[JsonObject] = []
        for index, part in enumerate(parts):
            if part["type"] == "text":
                texts.append(part)
                continue
            # A request of the Messages API had the part at another path of its body.
            part_field = part.get("request_field", f"{field}[{index}]")
            replace_image = self._mark if self.has_vision else self._describe
            text = replace_image(part["image_url"], field=part_field)
            texts.append({"type": "text", "text": text})
        return texts

    def _mark(self, image_url: Any, *, field: str) -> str:
        """Collect an image. Returns its marker."""
        if isinstance(image_url, dict):  # as in the chat completions of OpenAI
            image_url = image_url.get("url")
        data = _read_image(str(image_url), self.config, field=field)
        digest = self._digest(data)
        self.images.setdefault(digest, SentImage(data, field))
        return f"\ufdd1{digest}\ufdd2"

    def _describe(self, image_url: Any, *, field: str) -> str:
        """A line about an image that the model cannot see.

        Its number, made of the salt and of the URL as sent, tells one from another.
        """
        if self.config.images_on_text_model == "refuse":
            fault = "this model reads only text (see IMAGES_ON_TEXT_MODEL)"
            raise BadRequest(fault, field=field)
        digest = self._digest(repr(image_url).encode())
        name = f"sha256 {digest[:12]}"
        return f"[an image, {name}, that this model cannot see: it only reads text]"

    def _digest(self, data: bytes) -> str:
        return sha256(self.salt + data).hexdigest()


def _read_image(url: str, config: Config, *, field: str) -> bytes:
    """The file that a URL contains or names. Raises BadRequest."""
    head, comma, encoded = url.partition(",")
    if comma and head.startswith("data:"):
        with suppress(ValueError):
            # Padding that is missing is added; more than is needed does no harm.
            return binascii.a2b_base64(unquote(encoded) + "==")

    if not config.allow_remote_images:
        raise BadRequest("should be a data: URL in base64", field=field)
    if not url.startswith(("http:", "https:")):
        raise BadRequest("should be a data: URL in base64, or http(s)", field=field)
    return _fetch_image(url, field=field)


def _fetch_image(url: str, *, field: str) -> bytes:
    """The file at an http(s) URL, fetched by a process of its own.

    The script asks public addresses only, and keeps to limits of bytes and time; its
    alarm works in the main thread of a process only. Raises BadRequest, with the
    sentence that it prints.
    """
    script = Path(__file__).resolve().parent / "scripts/helpers/fetch_image.py"
    process = subprocess.run(
        [sys.executable, str(script)],
        input=url.encode(),
        capture_output=True,
        check=False,
    )
    if process.returncode != 0:
        complaint = process.stderr.decode()[:200].strip()
        sentence = f"cannot be fetched: {complaint}"
        raise BadRequest(sentence, field=field, quote=complaint)
    return process.stdout


# -- pixels ----------------------------------------------------------------------------

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_PIXELS: Final = 64_000_000  # of an image: a few kB can unpack to 256 MB
_MAX_WEBP_PIXELS: Final = 32_000_000  # each takes 16 bytes while Pillow unpacks it
# As many as any model sees (Qwen3-VL: 16 million): what is shrunk to it loses nothing.
_MAX_SEEN_PIXELS: Final = 1 << 24
_MAX_STRIP_PIXELS: Final = 1 << 18  # of a shrunk image, made at once
_UNREADABLE: Final = "is no PNG, JPEG, WEBP, GIF that can be read"
_TOO_LARGE: Final = "has more than {:,} pixels"


class SentImage(NamedTuple):
    """An image as the client sent it."""

    data: bytes  # a file
    field: str  # the path of its part in the body

    def check_header(self) -> None:
        """Raise BadRequest where decode() would, as far as the header shows it."""
        self._open()

    def decode(self) -> Image.Image:
        """RGB pixels, upright, on white; of a GIF the first frame.

        A large image is shrunk to _MAX_SEEN_PIXELS. Raises BadRequest: the file is no
        image that can be read, is too large, or would take too long to unpack.
        """
        image = self._open()
        try:
            return _normalize(image)
        except Exception as error:  # Pillow's readers raise errors of any kind
            raise self._refusal(_UNREADABLE) from error

    def _open(self) -> Image.Image:
        """The image, of which only the header is read so far."""
        fault = _find_costly_parts(self.data)
        if fault:
            raise self._refusal(f"{fault}; save it anew")
        try:
            image = Image.open(io.BytesIO(self.data), formats=_FORMATS)
        except Image.DecompressionBombError as error:  # Pillow's limit is above ours
            raise self._refusal(_TOO_LARGE.format(_MAX_PIXELS)) from error
        except Exception as error:
            raise self._refusal(_UNREADABLE) from error

        max_pixels = _MAX_WEBP_PIXELS if image.format == "WEBP" else _MAX_PIXELS
        if math.prod(image.size) > max_pixels:
            raise self._refusal(_TOO_LARGE.format(max_pixels))
        return image

    def _refusal(self, fault: str) -> BadRequest:
        return BadRequest(fault, field=self.field)


def _normalize(image: Image.Image) -> Image.Image:
    """RGB pixels, upright, on white, no more than a model sees; changes `image`."""
    scale = math.sqrt(_MAX_SEEN_PIXELS / math.prod(image.size))
    width, height = (max(1, int(side * scale)) for side in image.size)
    if scale < 1:
        image.draft("RGB", (width, height))  # a JPEG is unpacked at 1/2, 1/4 or 1/8

    image.load()
    image = _reduce_shades(image)
    if math.prod(image.size) > _MAX_SEEN_PIXELS:
        image = _shrink(image, width, height)
    ImageOps.exif_transpose(image, in_place=True)
    return _put_on_white(image)


def _reduce_shades(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as grey of 8, of which Pillow would make white from 255 on."""
    if image.mode != "I;16":
        return image
    grey = image.point(lambda shade: shade / 256).convert("L")
    grey.info.pop("transparency", None)  # one of 65,536 shades
    return grey


def _shrink(image: Image.Image, width: int, height: int) -> Image.Image:
    """A smaller copy: RGB pixels on white.

    why(L-112): an image of 64 million pixels has 256 MB, and so has each copy. So it is
    shrunk in strips. For example 8,000 x 8,000 pixels become 4,096 x 4,096 in strips of
    64 rows; rows 64 to 128 are made of the rows 125 to 250 of the image.
    """
    shrunk = Image.new("RGB", (width, height))
    shrunk.info = {**image.info}  # which says how the camera was held
    shrunk.info.pop("transparency", None)
    ratio = image.height / height
    n_rows = max(1, _MAX_STRIP_PIXELS // width)
    for row in range(0, height, n_rows):
        end_row = min(row + n_rows, height)
        strip = _shrink_strip(
            image,
            (width, end_row - row),
            source_start=row * ratio,
            source_end=min(end_row * ratio, image.height),
        )
        shrunk.paste(strip, (0, row))
    return shrunk


def _shrink_strip(
    image: Image.Image, size: tuple[int, int], *, source_start: float, source_end: float
) -> Image.Image:
    """Rows [source_start, source_end) of an image, shrunk to `size`, on white."""
    ratio = (source_end - source_start) / size[1]
    margin = math.ceil(2 * ratio) + 1  # rows around them that bicubic filtering reads
    top = max(0, math.floor(source_start) - margin)
    bottom = min(math.ceil(source_end) + margin, image.height)
    strip = image.crop((0, top, image.width, bottom))

    strip = strip.convert("RGBA" if strip.has_transparency_data else "RGB")
    strip = strip.resize(
        size,
        Image.Resampling.BICUBIC,
        box=(0, source_start - top, image.width, source_end - top),
    )
    return _put_on_white(strip)


def _put_on_white(image: Image.Image) -> Image.Image:
    """RGB pixels; what is transparent is white."""
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    background = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")


# -- the parts of a file ---------------------------------------------------------------
# why(L-130): a part of a few bytes can take as long as an image. So parts are counted
# before Pillow sees the file. A file of any format is a sequence of parts, each of a
# kind: a marker of a JPEG, a chunk of a PNG or WEBP, a block of a GIF.

_MAX_PARTS: Final = 4_000  # of a file, without those that are pixels
_MAX_SCANS: Final = 64  # of a JPEG, or compressed texts of a PNG
# A scan of a JPEG is a pass over its pixels; progressive ones have 6 to 30. A text or a
# profile of a PNG unpacks to up to a megabyte.
_SCANS: Final = (b"\xda", b"zTXt", b"iTXt", b"iCCP")
# Between compressed pixels: what is neither a byte 0xff of theirs nor a restart.
_JPEG_MARKER: Final = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_PNG_PIXELS: Final = (b"IDAT", b"fdAT")
_MIN_PIXEL_BYTES: Final = 256  # a chunk of a PNG with fewer costs more than its bytes


def _find_costly_parts(data: bytes) -> str:
    """What is wrong with a file of too many parts; "" if there are not too many."""
    kinds: Iterator[bytes] = iter(())
    if data.startswith(b"\xff\xd8"):
        kinds = _jpeg_parts(data)
    elif data.startswith(b"\x89PNG"):
        kinds = _png_parts(data)
    elif data.startswith(b"GIF8"):
        kinds = _gif_parts(data)
    elif data.startswith(b"RIFF"):
        kinds = _webp_parts(data)

    n_scans = 0
    for n_parts, kind in enumerate(kinds, start=1):
        n_scans += kind in _SCANS
        if n_scans > _MAX_SCANS:
            return f"has more than {_MAX_SCANS} scans or compressed texts"
        if n_parts > _MAX_PARTS:
            return f"has more than {_MAX_PARTS:,} parts"
    return ""


def _jpeg_parts(data: bytes) -> Iterator[bytes]:
    """The markers, up to the end of the image, as libjpeg reads them:

    ff da 00 0c ...    a segment begins with its length, so what is in it is no marker
    1f ff 00 ff d0     pixels follow that of a scan: ff 00 is a byte, ff d0 a restart
    ff d9              the end
    """
    position = 2
    while match := _JPEG_MARKER.search(data, position):
        yield match[1]
        position = match.end()
        if match[1] == b"\xd9":
            return
        if match[1] >= b"\xc0" and match[1] != b"\xd8":
            position += int.from_bytes(data[position : position + 2])


def _png_parts(data: bytes) -> Iterator[bytes]:
    """The kinds of all chunks, except long ones of pixels."""
    position = 8
    while position < len(data):
        n_bytes = int.from_bytes(data[position : position + 4])
        kind = data[position + 4 : position + 8]
        position += 12 + n_bytes
        if kind not in _PNG_PIXELS or n_bytes < _MIN_PIXEL_BYTES:
            yield kind


def _webp_parts(data: bytes) -> Iterator[bytes]:
    """The kinds of all chunks; a frame is one."""
    position = 12
    while position < len(data):
        yield data[position : position + 4]
        n_bytes = int.from_bytes(data[position + 4 : position + 8], "little")
        position += 8 + n_bytes + n_bytes % 2


def _gif_parts(data: bytes) -> Iterator[bytes]:
    """The blocks before the first frame, which is all that is read:

    21 fe              an extension and its label
    03 61 62 63        a piece of it, after its length
    00                 the end of the extension
    2c                 the first frame
    """
    flags = data[10:11] or b"\0"
    position = 13
    if flags[0] & 128:  # a table of colours comes first
        position += 3 << ((flags[0] & 7) + 1)
    while position < len(data) and data[position] not in b",;":
        yield b"block"
        if data[position] != ord("!"):  # Pillow passes over such a byte
            position += 1
            continue
        position += 2
        n_bytes = -1
        while n_bytes != 0 and position < len(data):
            yield b"block"
            n_bytes = data[position]
            position += 1 + n_bytes


# region CANONICALIZATION ======================================================
# Makes a second, canonical copy of each message, without what changes by itself. The
# copies are only compared: are these the messages of a recorded conversation? What the
# model reads is made of the originals, and of recorded tokens (L-37).
#
#     as sent                                    canonical
#     [Fri 2026-11-20 14:16 UTC] list files      __STABLE_TIMESTAMP__list files
#     <system-reminder>plan</system-reminder>
#
# A rule finds one kind of volatile field, here a timestamp and a reminder. The setting
# RULE_<NAME> says what becomes of the field:
#   telemetry   It means nothing to the model, and is dropped from both copies.
#   pinned      A value, such as an id or a date. The canonical copy has a placeholder
#               (in place of a whole block, nothing). A prompt keeps the value that it
#               had first; LEDGER restates another one.
#   transient   A note: a block that comes and goes. The canonical copy has nothing in
#               its place. LEDGER renders it where it is new.
#   off         It is plain text.
#
# A rule looks at the text parts of a message one by one; only an operator's note goes
# on in the next parts. Tool results and replies have no volatile fields, whatever is in
# them. What begins in a code fence is data and stays (but see Rule.is_fenced).
# No prompt has what identifies or directs somebody else: a pinned value may stand in
# the prompts of other sessions only where its rule has crosses_sessions (L-106).
#
# To add a field: an entry in _RULES, a RULE_ setting (see CONFIG), a lesson, tests; if
# it is a block between tags, these in _BLOCK_STARTS and _BLOCK_ENDS. Its pattern must
# read any text in linear work (L-113): each repeat without a limit stops at a line end
# or at the next opener, or is possessive. tests/unit/test_linear_work.py tries each.
#
# Public   Canonicalizer, CanonicalMessage, VolatileField, PinnedValue, Note, Memo,
#          SYSTEM_ROLES, canonicalize_messages, count_rules, mask_volatile,
#          wrap_reminder, reply_digest, canonical_json, cut_thinking, text_parts,
#          keeps_most_text, find_masking_rule
# Uses     CONFIG, WORK BUDGET, API TYPES
# Thread   any; pure, but for memos


# -- rules -----------------------------------------------------------------------------

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_USER: Final = frozenset({"user"})
_SYSTEM_OR_USER: Final = SYSTEM_ROLES | _USER

_IMAGE_MARK: Final = "\ufdd1"  # begins what stands in a text for an image
_BLOCK_STARTS: Final = ("<system-reminder>", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>")
_BLOCK_ENDS: Final = ("</system-reminder>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")

_REST_OF_LINE: Final = r"(?P<value>[^\n\ufdd1]+)"  # or as far as an image
_DATE_WORDS: Final = "|".join(
    filter(None, [*day_name, *day_abbr, *month_name, *month_abbr])
)
# A clock does not end with such a word: of "Today is Friday, the day" it is "Friday".
_NO_LINKING_WORD: Final = r"(?<=[\w)])(?<!\bat)(?<!\bo[fn])(?<!\bthe)"
# why(L-83): a day or a time, and not what follows it in the line: that may be an
# instruction. Blanks are taken all at once (L-113): a million of them took minutes.
_CLOCK: Final = rf"""(?x:
    (?: [ ]\([^()\n]{{1,40}}\) )?  \**      # " (UTC)", and Markdown's "**"
    (?: [ ]is | : )  [ \t*]*+
    (?P<value>
        (?: [\d \t\xa0\u202f:.,/+()\u2013\u2014-]
          | (?<=\d) (?: T(?=\d) | Z\b | [a-z]{{2}}\b )      # 20T10, 00Z, 5th
          | [AaPp]\.?[Mm]\b
          | (?: at | o[fn] | the )\b        # "the 5th of May at 10:05"
          | UTC | GMT | [A-Z]{{1,3}}[SD]?T\b | [A-Z]\w+/[A-Z]\w+  # Europe/Berlin
          | (?: {_DATE_WORDS} )\b
        )+ {_NO_LINKING_WORD}
    )
)"""
_STAMP: Final = r"""(?x:
    \[ [FMSTW][a-z]{2} [ ] \d{4}-\d\d-\d\d  # [Fri 2026-11-20
    [ ] \d\d:\d\d (?: :\d\d )?              # 14:16, or 14:16:05
    (?: [ ] [\w:+/-]+ )? \] [ ]             # UTC], GMT+1], Europe/Berlin]
)"""
# why(L-116): OpenClaw puts JSON before a user's text, and before its stamp.
_WRAPPER_START: Final = r"(?:Conversation[ ]info[ ]\([^()\n]{1,40}\):\n```json\n)"
_WRAPPER_LINE: Final = r"(?:(?!```)[^\n]*\n)"
_WRAPPER_ID: Final = r"""(?x:               # {"sender": "cli", "message_id": "1"}
    [^\n"]* (?: "(?!message_id")[^"\n]*" [^"\n]* )*?
    "message_id" [ ]*:[ ]* "
)"""
_WRAPPER: Final = rf"(?:{_WRAPPER_START}{_WRAPPER_LINE}{{1,60}}```\n{{1,3}})"
_ROUTED: Final = r"""(?x:
    (?P<private>                            # it names a session: see Rule
        \[Inter-session [ ] message\] [ ] sourceSession= [^\n]* \n
        [^\n]* \n
    )
)"""


class Rule(NamedTuple):
    """How one volatile field is found. `example` and `near_miss` are tested.

    Groups of the pattern, each of which it may lack:
        value     what varies of the match; without this group the match is a block, of
                  which all varies
        context   text that stands before the field and belongs to no field
        private   if it has matched, the value may not cross sessions
    """

    name: str
    roles: frozenset[str]  # of the messages in which it is looked for
    pattern: re.Pattern[str]
    example: str  # a text in which the pattern finds the field
    near_miss: str  # one in which it does not
    # Whether a pinned value may stand in the prompts of other sessions: it identifies
    # nobody and directs nothing (L-106).
    crosses_sessions: bool = False
    is_fenced: bool = False  # its client writes it in a code fence
    spans_parts: bool = False  # it goes on in the other text parts of its message
    setting: str = "off"  # as configured

    @property
    def is_block(self) -> bool:
        """Whether all that is found varies, and not only a value in it."""
        return "value" not in self.pattern.groupindex


# The usual class of each is the default of its setting in CONFIG.
_RULES: Final = (
    # why(L-37): Claude Code's first system block; its cch= changes with each request.
    Rule(
        name="billing_header",
        roles=SYSTEM_ROLES,
        pattern=re.compile(r"\A\s*x-anthropic-billing-header: cc_[^\n]*\n*"),
        example="x-anthropic-billing-header: cc_version=2.1.121.dd4; cch=0d3a3;",
        near_miss="x-anthropic-billing-header: is what some clients send.",
    ),
    # why(L-38): OpenClaw writes a new id into its system prompt at each user turn.
    Rule(
        name="message_id",
        roles=SYSTEM_ROLES,
        pattern=re.compile(
            r"""(?xm)
            ^ [ \t]* "message_id" [ \t]*:[ \t]*
            "(?P<value> [^"\n]* )"
            """
        ),
        example='  "message_id": "d9e7c8c5-1777",',
        near_miss='{"message_id": "d9e7c8c5-1777"}',
        crosses_sessions=True,
        is_fenced=True,
    ),
    # why(L-38): the section around that id is absent in some of OpenClaw's requests. It
    # names the sender and the chat.
    Rule(
        name="inbound_context",
        roles=SYSTEM_ROLES,
        pattern=re.compile(
            r"""(?xm)
            ^ (?: \#\#[ ]Group[ ]Chat[ ]Context\n )?
            \#\#[ ]Inbound[ ]Context [^\n]*\n
            (?: (?! \# | ``` ) [^\n]*\n )*      # sentences
            ```json\n
            (?: (?! ``` ) [^\n]*\n )*
            ```\n
            """
        ),
        example='## Inbound Context (trusted)\nIt is:\n```json\n{"a": 1}\n```\n',
        near_miss="## Inbound Context (trusted)\nThere is none.\n",
    ),
    # why(L-116): a question that is sent again has a new id.
    Rule(
        name="user_message_id",
        roles=_USER,
        pattern=re.compile(
            rf"""(?x)
            \A
            (?P<context>
                {_WRAPPER_START} {_WRAPPER_LINE}{{0,60}}? {_WRAPPER_ID}
            )
            (?P<value> [^"\n]+ ) (?= " )
            """
        ),
        example='Conversation info (untrusted metadata):\n```json\n{\n  "message_id": '
        '"d9e7c8c5-1777"\n}\n```\n\nlist files',
        near_miss='```json\n{\n  "message_id": "d9e7c8c5-1777"\n}\n```\n\nlist files',
        crosses_sessions=True,
    ),
    # why(L-39): it stands before a user's text. In later requests some stamps become
    # the other form, _ROUTED, which names a session.
    Rule(
        name="timestamp",
        roles=_USER,
        pattern=re.compile(
            rf"""(?x)
            \A (?P<context> (?: {_WRAPPER} )? )
            (?P<value> {_STAMP} | {_ROUTED} )
            """
        ),
        example="[Fri 2026-11-20 14:16 UTC] Read notes.txt",
        near_miss="At [Fri 2026-11-20 14:16 UTC] it began",
        crosses_sessions=True,
    ),
    Rule(
        name="current_time",
        roles=_SYSTEM_OR_USER,
        pattern=re.compile(
            rf"""(?xm)
            ^ [ \t*-]*
            (?i: (?: the[ ] )? (?: current | system )[ ]time | reference[ ]utc )
            {_CLOCK}
            """
        ),
        example="- **Current time (UTC)**: 10:05 PM. Be brief.",
        near_miss="current times: 10:05",
        crosses_sessions=True,
    ),
    # why(L-40): a day ends, and all that stands after the date is prefilled again.
    Rule(
        name="current_date",
        roles=SYSTEM_ROLES,
        pattern=re.compile(
            rf"""(?xm)
            ^ [ \t*-]*
            (?i: (?: the[ ] )? current[ ]date (?: time )?
                 (?: (?: [ ]and[ ] | / | [ ] )time )?
              | today's[ ]date
              | today )
            {_CLOCK}
            """
        ),
        example="Today is Friday, the 20th of November 2026. You help.",
        near_miss="Today is the day we ship.",
        crosses_sessions=True,
    ),
    # why(L-103): a session that is resumed looks at its folder again. The status may
    # name a git user, and crosses sessions all the same: Claude Code names the folder
    # elsewhere in the prompt, so only prompts of one folder are the same without it.
    Rule(
        name="git_status",
        roles=SYSTEM_ROLES,
        pattern=re.compile(
            r"""(?xm)
            ^ (?: gitStatus:[ ]                 # Claude Code's: the last text of all
                | (?P<has_end>                  # instructions follow these
                    Git[ ]snapshot .* \n ```text \n           # Qwen Code's
                  | gitContext:[ ] .* \n                      # Mistral Vibe's
                  | <context[ ]name="gitStatus"> .* \n\n      # Continue's
                  )
              )
            (?P<value>
                # If it has_end: as far as an empty line, a fence or a closing tag.
                (?(has_end) (?: \n? (?! ``` | </ ) .++ )+ | [\s\S]+ \Z )
            )
            """
        ),
        example="gitStatus: now\n\nStatus:\n M notes.txt",
        near_miss="the gitStatus: (clean)",
        crosses_sessions=True,
    ),
    # why(L-41): figures on a sub-agent's run.
    Rule(
        name="runtime",
        roles=_USER,
        pattern=re.compile(rf"(?m)^Stats: runtime {_REST_OF_LINE}"),
        example="Stats: runtime 896ms, tokens 8.5k",
        near_miss="Runtime: 896ms",
    ),
    # why(L-41): which agent, session and host; which chat.
    Rule(
        name="session_line",
        roles=_SYSTEM_OR_USER,
        pattern=re.compile(
            rf"(?m)^(?:Runtime: agent=|Inline buttons not enabled for ){_REST_OF_LINE}"
        ),
        example="Runtime: agent=main | session=agent:main:main | host=vm",
        near_miss="Runtime: 896ms",
    ),
    # why(L-42): notes that move along with the newest message, and end without a trace.
    Rule(
        name="reminder",
        roles=_USER,
        pattern=re.compile(
            r"""(?xm)
            ^ <system-reminder>
            (?: (?! </?system-reminder> ) [\s\S] )*
            </system-reminder> [ \t]* $
            """
        ),
        example="<system-reminder>\nplan mode\n</system-reminder>",
        near_miss="in `<system-reminder>x</system-reminder>` blocks",
    ),
    Rule(
        name="internal_context",
        roles=_USER,
        pattern=re.compile(
            r"""(?xm)
            ^ <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>
            (?s: (?! <<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> ) . )*?
            <<<END_OPENCLAW_INTERNAL_CONTEXT>>> [ \t]* $
            """
        ),
        example=(
            "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n1 job\n"
            "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
        ),
        near_miss="<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n1 job",
    ),
    # What LiteLLM's bridge makes of a late system message.
    Rule(
        name="operator_note",
        roles=_USER,
        pattern=re.compile(r"\AOperator note \(not from the user\)[\s\S]*\Z"),
        example="Operator note (not from the user): it was\n9 tokens left",
        near_miss="see: Operator note (not from the user): no",
        spans_parts=True,
    ),
)
# A system message in mid-conversation: it is found by its place, not by a pattern, so
# nothing in it can be pinned. It is too much to be dropped: transient or off.
_LATE_SYSTEM: Final = "late_system"
_SYSTEM_NOTES: Final = frozenset({_LATE_SYSTEM, "operator_note"})


# -- fields and messages ---------------------------------------------------------------


class PinnedValue(NamedTuple):
    """A pinned value, or a pinned block, in the text of a message."""

    rule: str
    value: str  # what is compared; of a block its text, the pinned values in it masked
    start: int  # in the content of CanonicalMessage.original
    end: int
    block: str = ""  # the whole text of a block; "" if only a part of a line varies
    is_private: bool = False  # it may not stand in the prompts of other sessions


class Note(NamedTuple):
    """A block that comes and goes, or a late system message."""

    rule: str
    text: str  # as the model reads it
    start: int = 0  # in the content of `original`, if the block stands there
    end: int = 0


VolatileField = PinnedValue | Note


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """One message, as sent and as compared, with the notes that belong to it."""

    role: str
    # As sent, without telemetry; its content is one text, and thinking has its field.
    original: Message
    canonical: Message
    digest: bytes  # of `canonical`
    thinking: str = ""  # of a reply, as far as the client sent it; not in the digest
    pinned: tuple[PinnedValue, ...] = ()  # in the content of `original`, ascending
    inline_notes: tuple[Note, ...] = ()  # the same
    notes_above: tuple[Note, ...] = ()  # are rendered before the content
    notes_below: tuple[Note, ...] = ()  # and after it
    dropped: tuple[str, ...] = ()  # the rule of each telemetry field

    @property
    def notes(self) -> tuple[Note, ...]:
        """All its notes, in the order in which the model reads them."""
        return (*self.notes_above, *self.inline_notes, *self.notes_below)


def count_rules(messages: Iterable[CanonicalMessage]) -> dict[str, int]:
    """How many fields each rule has found in a conversation, by its name."""
    found: Counter[str] = Counter()
    for message in messages:
        found.update(message.dropped)
        found.update(pinned.rule for pinned in message.pinned)
        found.update(note.rule for note in message.notes)
    return dict(sorted(found.items()))


def mask_volatile(text: str, fields: Iterable[VolatileField]) -> str:
    """The text without these fields, which _find_fields() has found.

    A pinned value becomes a placeholder. A pinned block is left out, with the fields
    inside it. A note is left out, with the line breaks around it, which come and go
    with it: "hi\n<note>\nbye" becomes "hi\n\nbye", "hi\n<note>" becomes "hi".
    """
    pieces: list[str] = []
    end = 0
    for volatile in _outer_fields(fields):
        pieces.append(text[end : volatile.start])
        end = volatile.end

        if isinstance(volatile, Note):
            while text.startswith("\n", end):
                end += 1
            _strip_line_breaks(pieces)
            if pieces and end < len(text):
                pieces.append("\n\n")
        elif not volatile.block:
            pieces.append(_placeholder(volatile.rule))
    return "".join([*pieces, text[end:]])


def _outer_fields(fields: Iterable[VolatileField]) -> Iterator[VolatileField]:
    """These fields, which ascend, but for those inside a pinned block."""
    end = 0
    for volatile in fields:
        if volatile.start >= end:
            end = volatile.end
            yield volatile


def _strip_line_breaks(pieces: list[str]) -> None:
    """Take line breaks, and pieces that are nothing else, off the end of a text."""
    while pieces:
        last = pieces.pop().rstrip("\n")
        if last:
            pieces.append(last)
            return


def _placeholder(rule: str) -> str:
    name = "MSG_ID" if rule == "message_id" else rule.upper()
    return f"__STABLE_{name}__"


def wrap_reminder(text: str) -> str:
    """Tag the text of a system message, so that the model can tell it from its place.

    It may stand in a tool result or after a user's words. A text with tags stays.
    """
    if "<system-reminder>" in text:
        return text
    return f"<system-reminder>\n{text}\n</system-reminder>"


# -- digests ---------------------------------------------------------------------------


def _digest_input(
    message: Message, canonical_content: str, fields: Iterable[VolatileField]
) -> bytes:
    """The digest of a message that is no reply: role, name and canonical content.

    Not the call that it answers: clients rewrite ids. Nor fields that we do not know,
    so a replayed message keeps those that it had first.
    """
    role = message["role"]
    # why(L-92): clients trim line breaks, except in tool results.
    text = canonical_content if role == "tool" else canonical_content.strip("\n")
    # A placeholder that the client wrote itself is text, and stands for no value.
    n_placeholders = 0
    for volatile in _outer_fields(fields):
        if isinstance(volatile, PinnedValue) and not volatile.block:
            n_placeholders += 1
    parts = [role, message.get("name", ""), text, str(n_placeholders)]
    return sha256("\0".join(parts).encode()).digest()


def reply_digest(message: Message) -> bytes:
    """The digest of a reply: its content and tool calls.

    Neither its thinking, which clients drop, nor the ids of calls, which they rewrite.
    """
    digest = sha256(message["content"].rstrip().encode())  # why(L-92): clients trim it
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = canonical_json(function.get("arguments"))
        digest.update(f"\0{function['name']}\0{arguments}".encode())
    return digest.digest()


def canonical_json(arguments: object) -> str:
    """The arguments of a tool call, without what clients change in them.

    They parse and print JSON: JavaScript writes 2.0 as 2 and reorders members. What
    else Claude Code changes is in _canonical_members(). Nothing, in whatever form ("",
    null, [], 0), is {}. Text that is no JSON stays.
    """
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(
            text or "{}",
            object_pairs_hook=_canonical_members,
            parse_int=lambda digits: int(float(digits)),
            parse_float=_canonical_float,
        )
        return json.dumps(value or {}, sort_keys=True)
    except (ValueError, OverflowError, RecursionError):
        return str(arguments)


def _canonical_float(digits: str) -> int | float:
    value = float(digits)
    return int(value) if value.is_integer() else value


# A "cd" in front of a command, and blanks at the ends of lines, in any member: names of
# members differ. The look at the character before finds each run of blanks only once.
_CLAUDE_CODE_CUTS: Final = re.compile(r"(?m)\A(?:cd \S+ && )+|(?<![ \t])[ \t]++$")


def _canonical_members(pairs: list[tuple[str, Any]]) -> JsonObject:
    """The members of an object, as Claude Code may have understood them (L-81).

    It adds members that are false, or writes a number as text.
    """
    members: JsonObject = {}
    for name, value in pairs:
        if value is None or value is False:
            continue
        is_scalar = not isinstance(value, dict | list)
        members[name] = _CLAUDE_CODE_CUTS.sub("", str(value)) if is_scalar else value
    return members


# -- one message -----------------------------------------------------------------------


class Memo[Value]:
    """Values that need not be made again, by tenant and key.

    A value is quicker to find than to make, so whoever finds one learns that somebody
    has sent the same. why(L-109): only a tenant's own requests find what it has made.

    It is emptied when they take more than `max_bytes`. Any thread may use it: two may
    make the same value at the same time, and one of both is kept.
    """

    ENTRY_BYTES: Final = 100  # of an empty entry

    def __init__(
        self, max_bytes: int, measure: Callable[..., int] = memory_bytes
    ) -> None:
        """`measure`: the bytes that a key and its value take."""
        self.max_bytes = max_bytes
        self.entries: dict[tuple[str, str | bytes], Value] = {}
        self.nbytes = 0
        self._measure = measure

    def get_or_make(
        self, key: str | bytes, make: Callable[[], Value], *, tenant: str
    ) -> Value:
        """The value under this key; if there is none, the one that `make` returns."""
        value = self.entries.get((tenant, key))
        if value is None:
            value = make()
            self.entries[tenant, key] = value
            self.nbytes += self._measure(key, value) + self.ENTRY_BYTES  # why(L-56)
            if self.nbytes > self.max_bytes:
                self.clear()
        return value

    def clear(self) -> None:
        """Drop all values."""
        self.entries = {}
        self.nbytes = 0


class Canonicalizer:
    """Makes canonical messages by the rules as configured, for one chat template."""

    MEMO_BYTES: Final = 32_000_000  # clients send all their messages again and again

    def __init__(
        self, config: Config, *, part_separator: str, thinking_tags: tuple[str, str]
    ) -> None:
        """`part_separator`: between text parts, as the chat template joins them.

        `thinking_tags`: the texts around the model's thinking; "" where there are none.
        """
        self.rules: list[Rule] = []  # but those that are off
        for rule in _RULES:
            setting = getattr(config, f"rule_{rule.name}")
            if setting != "off":
                self.rules.append(rule._replace(setting=setting))
        self._moves_late_system = config.rule_late_system != "off"
        self._part_separator = part_separator
        self._thinking_tags = thinking_tags
        self.memo: Memo[CanonicalMessage] = Memo(self.MEMO_BYTES)
        self.tenant = ""  # whose messages these are, for the memo

    def for_tenant(self, tenant: str) -> Canonicalizer:
        """The same rules for the messages of one tenant. It shares the memo."""
        canonicalizer = copy(self)
        canonicalizer.tenant = tenant
        return canonicalizer

    def canonicalize(self, message: Message) -> CanonicalMessage:
        """The canonical message of one message, wherever it stands. For any thread."""
        # Version 2: equal bytes for equal messages with the same order of members.
        key = marshal.dumps(message, 2)
        return self.memo.get_or_make(
            key, lambda: self._make(message), tenant=self.tenant
        )

    def find_notes(self, message: CanonicalMessage) -> tuple[Note, ...]:
        """The notes of a message that has nothing else; () if it has other text.

        The message stands after the system prompt: a system message is a late one.
        """
        if message.role == "user":
            has_text = message.canonical["content"].strip()
            # why(L-134): a block has no text in the canonical copy, and is not lost.
            has_block = any(pinned.block for pinned in message.pinned)
            return () if has_text or has_block else message.notes
        if message.role not in SYSTEM_ROLES:
            return ()

        text = message.original["content"]
        if self._moves_late_system and _IMAGE_MARK not in text:
            return (Note(_LATE_SYSTEM, wrap_reminder(text)),)
        return ()

    def _make(self, message: Message) -> CanonicalMessage:
        role = message["role"]
        if role == "assistant":
            return self._make_reply(message)

        parts = self._read_parts(message)
        texts = [part.text for part in parts]
        content, starts = self._join_parts(texts, role)
        # Joined without its notes: a part that is a note leaves no line break behind.
        canonical_texts = [part.canonical for part in parts]
        canonical, _ = self._join_parts(canonical_texts, role)
        fields: list[VolatileField] = []
        dropped: list[str] = []
        for part, start in zip(parts, starts, strict=True):
            dropped += part.dropped
            fields += [_move_field(found, start) for found in part.fields]
        original = {**message, "content": content}
        return _make_input(original, canonical, fields, dropped=dropped)

    def _read_parts(self, message: Message) -> list[_Part]:
        role = message["role"]
        texts = text_parts(message["content"])
        rules = [rule for rule in self.rules if role in rule.roles]
        spanning_rules = [rule for rule in rules if rule.spans_parts]
        if any(rule.pattern.search(texts[0]) for rule in spanning_rules):
            joined_text, _ = self._join_parts(texts, role)
            texts = [joined_text]
        return [_read_part(text, rules) for text in texts]

    def _make_reply(self, message: Message) -> CanonicalMessage:
        """A reply: its thinking under one name, wherever the client has put it."""
        content = self._part_separator.join(text_parts(message["content"]))
        thinking = message.get("reasoning_content") or ""
        if not thinking:
            thinking, content = cut_thinking(content, self._thinking_tags)
        if not thinking.strip():
            content = content.lstrip("\n")  # which stood after thinking, now cut out
        canonical = {**message, "content": content}
        canonical.pop("reasoning_content", None)
        original = canonical
        if thinking.strip():
            original = {**canonical, "reasoning_content": thinking}
        return CanonicalMessage(
            role="assistant",
            original=original,
            canonical=canonical,
            digest=reply_digest(canonical),
            thinking=thinking.strip(),
        )

    def _join_parts(self, parts: Iterable[str], role: str) -> tuple[str, list[int]]:
        """The text of several parts, as the template joins them, and where each begins.

        Blocks and the parts of a system prompt or tool result begin on a new line,
        though some templates put nothing between parts.
        """
        text = ""
        starts = []
        for part in parts:
            if text and part:
                needs_line = (
                    role != "user"
                    or text.endswith(_BLOCK_ENDS)
                    or part.startswith(_BLOCK_STARTS)
                )
                has_line = "\n" in self._part_separator
                text += "\n" if needs_line and not has_line else self._part_separator
            starts.append(len(text))
            text += part
        return text, starts


def cut_thinking(content: str, tags: tuple[str, str]) -> tuple[str, str]:
    """The thinking at the start of a reply, and the content after it.

    Some clients send a reply back as it was streamed, its thinking in the content.
    """
    start_tag, end_tag = tags
    if start_tag and end_tag:
        inside, found_tag, answer = content.lstrip().partition(end_tag)
        if found_tag and inside.startswith(start_tag):
            thinking = inside.removeprefix(start_tag).strip("\n")
            return thinking, answer.lstrip("\n")
    return "", content


def text_parts(content: str | list[JsonObject]) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content]


def _make_input(
    original: Message,
    canonical_content: str,
    fields: Sequence[VolatileField] = (),
    *,
    dropped: Sequence[str] = (),
) -> CanonicalMessage:
    """The canonical message of a message whose content is text, and no reply."""
    role = original["role"]
    name = original.get("name", "")
    return CanonicalMessage(
        role=role,
        original=original,
        canonical={"role": role, "name": name, "content": canonical_content},
        digest=_digest_input(original, canonical_content, fields),
        pinned=tuple(found for found in fields if isinstance(found, PinnedValue)),
        inline_notes=tuple(found for found in fields if isinstance(found, Note)),
        dropped=tuple(dropped),
    )


class _Part(NamedTuple):
    """A text part of a message, which is all that a rule sees at a time."""

    text: str  # without telemetry
    canonical: str
    fields: list[VolatileField]  # in `text`
    dropped: list[str]  # the rule of each telemetry field


def _read_part(text: str, rules: Sequence[Rule]) -> _Part:
    telemetry = _find_fields(text, [r for r in rules if r.setting == "telemetry"])
    text = mask_volatile(text, telemetry)
    fields = _find_fields(text, [r for r in rules if r.setting != "telemetry"])
    dropped = [found.rule for found in telemetry]
    return _Part(text, mask_volatile(text, fields), fields, dropped)


def _move_field(found: VolatileField, distance: int) -> VolatileField:
    return found._replace(start=found.start + distance, end=found.end + distance)


# A code fence. The group `unclosed` is "" where it never ends, and None where it does.
_FENCE: Final = re.compile(
    r"""(?xm)
    ^ (?P<ticks> ```+ | ~~~+ ) [^\n`~]* \n      # "```sh"; but not "```sh``` fails"
    [\s\S]*?
    (?: ^ [ ]* (?P=ticks) [`~]*+ (?! \w )         # not by "```sh", which opens another
      | (?P<unclosed> \Z )
    )
    """
)


def _find_fields(text: str, rules: Sequence[Rule]) -> list[VolatileField]:
    """The volatile fields of a text, ascending by where they begin.

    Of two that overlap, the first one. But a pinned block is followed by the pinned
    values inside it, which have places of their own. No field is what is data, in a
    code fence, nor what has an image in it: the model must see this image (L-57).
    """
    if not rules:
        return []
    unfenced_text = _FENCE.sub(_blank_fence, text)
    found: list[VolatileField] = []
    for rule in rules:
        for match in rule.pattern.finditer(text):
            # Where the match begins, its context included.
            begins_in_fence = unfenced_text[match.start()] == "\0"
            is_data = begins_in_fence and not rule.is_fenced
            if not is_data and _IMAGE_MARK not in match[0]:
                found.append(_make_field(rule, match, rules))
    return _drop_overlaps(found)


def _blank_fence(fence: re.Match[str]) -> str:
    if fence["unclosed"] is not None:
        return fence[0]  # what follows may be the client's
    return "\0" * len(fence[0])


def _drop_overlaps(found: list[VolatileField]) -> list[VolatileField]:
    """The fields, ascending; of two that overlap, the first one.

    The values inside a pinned block stay, too. A note inside is a part of the block.
    """
    fields: list[VolatileField] = []
    end = 0  # of the last field that is no block
    block_end = 0
    for volatile in sorted(found, key=lambda volatile: volatile.start):
        is_pinned = isinstance(volatile, PinnedValue)
        is_inner_value = is_pinned and volatile.end <= block_end
        starts_in_block = volatile.start < block_end
        if volatile.start < end or (starts_in_block and not is_inner_value):
            continue
        fields.append(volatile)
        if isinstance(volatile, PinnedValue) and volatile.block:
            block_end = max(block_end, volatile.end)
        else:
            end = volatile.end
    return fields


def _make_field(
    rule: Rule, match: re.Match[str], rules: Sequence[Rule]
) -> VolatileField:
    """The field that a rule has found. `rules`: all, for the fields inside a block."""
    has_context = "context" in rule.pattern.groupindex
    start = match.end("context") if has_context else match.start()
    end = match.end()
    block = match.string[start:end]
    if rule.setting == "transient":
        return Note(rule.name, block.strip(), start, end)

    if rule.is_block or rule.setting == "telemetry":
        inner_rules = [r for r in rules if r.setting == "pinned" and r is not rule]
        value = mask_volatile(block, _find_fields(block, inner_rules))
    else:
        start, end = match.span("value")
        value = match["value"].strip()
        block = ""
    has_private_part = match.groupdict().get("private") is not None
    return PinnedValue(
        rule=rule.name,
        value=value,
        start=start,
        end=end,
        block=block,
        is_private=has_private_part or not rule.crosses_sessions,
    )


# -- a conversation --------------------------------------------------------------------


_MESSAGES_BETWEEN_LOOKS: Final = 256


def canonicalize_messages(
    messages: Iterable[Message],
    canonicalizer: Canonicalizer,
    *,
    check_client: Callable[[], None] = assume_client,
) -> tuple[CanonicalMessage, ...]:
    """The canonical messages of a conversation.

    A message of notes alone is no message here: templates refuse or misplace it. Its
    notes belong to a neighbour.

        sent                                 here
        user       list files                user        list files
        system     (late) the folder is /a               note above: the folder is /a
        assistant  a.txt                     assistant   a.txt
        user       <a reminder>
        user       thanks                    user        thanks
                                                         note above: the reminder

    Raises what `check_client` raises.
    """
    folding = _NoteFolding()
    for index, message in enumerate(messages):
        if index % _MESSAGES_BETWEEN_LOOKS == 0:
            check_client()
        canonical_message = canonicalizer.canonicalize(message)
        notes: tuple[Note, ...] = ()
        if folding.is_past_system_prompt():
            notes = canonicalizer.find_notes(canonical_message)
        if notes:
            folding.add_notes(notes)
        else:
            folding.add_message(canonical_message)
    return folding.fold()


@dataclass(slots=True)
class _OpenMessage:
    """A message of a conversation, to which notes may still be added."""

    message: CanonicalMessage
    notes_above: list[Note] = field(default_factory=list)
    notes_below: list[Note] = field(default_factory=list)
    made_of: tuple[Note, ...] = ()  # the notes, if it stands for notes alone

    def close(self) -> CanonicalMessage:
        if not self.notes_above and not self.notes_below:
            return self.message
        return replace(
            self.message,
            notes_above=tuple(self.notes_above),
            notes_below=tuple(self.notes_below),
        )


class _NoteFolding:
    """The messages of a conversation so far, and where the next notes go.

    Each step looks at the first and the last message only: ten times as many notes take
    ten times as long, and no more (L-113).
    """

    def __init__(self) -> None:
        self._messages: list[_OpenMessage] = []
        self._first: _OpenMessage | None = None  # that is no system message
        self._has_reply = False

    def fold(self) -> tuple[CanonicalMessage, ...]:
        """All messages, with the notes that belong to them."""
        return tuple(message.close() for message in self._messages)

    def is_past_system_prompt(self) -> bool:
        return self._first is not None

    def add_message(self, message: CanonicalMessage) -> None:
        added = _OpenMessage(message)
        if self._messages and message.role == "user":
            last = self._messages[-1]
            if last.made_of:
                # why(L-101): notes after a reply belong to the question that follows.
                self._messages.pop()
                added.notes_above = [*last.made_of, *last.notes_below]
        self._messages.append(added)
        if self._first is None and message.role not in SYSTEM_ROLES:
            self._first = added
        self._has_reply = self._has_reply or message.role == "assistant"

    def add_notes(self, notes: tuple[Note, ...]) -> None:
        """Add notes to a neighbour, after the first message that is no system message.

        Not to what the model has said, nor to a late system message.
        """
        last = self._messages[-1]
        is_by_system = notes[0].rule in _SYSTEM_NOTES
        if is_by_system and not self._has_reply:
            # So system prompt, tools and environment are one prefix for all sessions.
            # why(L-43): a client sends its environment after the user's first words.
            assert self._first is not None
            self._first.notes_above += notes
        elif last.message.role in ("user", "tool"):
            # why(L-43): there, a note keeps the whole prompt before it a prefix.
            last.notes_below += notes
        else:
            # A message of the user's, which the next question takes the place of.
            text = "\n\n".join(note.text for note in notes)
            message = _make_input({"role": "user", "content": text}, text)
            self._messages.append(_OpenMessage(message, made_of=notes))


# -- for people ------------------------------------------------------------------------


def keeps_most_text(messages: Iterable[CanonicalMessage]) -> bool:
    """Whether the canonical texts are at least 90 % as long as the originals.

    Less means that a rule finds too much. Notes count as text that is left out, but not
    those that make a message of their own, after a reply.
    """
    n_original = 0
    n_canonical = 0
    for message in messages:
        folded_notes = [*message.notes_above, *message.notes_below]
        n_original += len(message.original["content"])
        n_original += sum(len(note.text) for note in folded_notes)
        n_canonical += len(message.canonical["content"])
    return 10 * n_canonical >= 9 * n_original


def find_masking_rule(role: str, old_text: str, new_text: str) -> str | None:
    """The setting of a rule that finds all in which two texts differ, active or not.

    `role`: of the messages whose texts these are. Rules look at some roles only.
    """
    for rule in _RULES:
        if role not in rule.roles:
            continue
        setting = "transient" if rule.is_block else "pinned"
        active = [rule._replace(setting=setting)]
        old_masked = mask_volatile(old_text, _find_fields(old_text, active))
        new_masked = mask_volatile(new_text, _find_fields(new_text, active))
        if old_masked == new_masked:
            return f"RULE_{rule.name.upper()}"
    return None


# region SAVED RECORDS =========================================================
# What is remembered of conversations, in a file that the next start reads.
#
#     put --> queue --> thread "records", one transaction for all that came in 50 ms
#                            |
#     load  <----------------+-- a database of SQLite, with a journal (WAL): what was
#                                committed is there, however the process ended
#
# The file is a copy: whoever puts records keeps its own in memory, and calls load()
# once, when it is made. A record has a value, as JSON, and parts: large texts and
# tokens that records share. A part is stored once, under its digest; parts that no
# record has any more are deleted now and then, and at once if something is forgotten:
#
#     records   tenant, kind, key, number -> session, last use, value, digests of parts
#     parts     digest -> bytes
#
# Nothing is lost but what the last 50 ms brought; if the machine loses power, what came
# since SQLite synced its journal last. A row whose checksum is wrong is left out. A
# file that SQLite cannot read, be it one page of it, is deleted, and begun anew.
#
# Public   RecordFile, TenantRecords, SavedRecord
# Uses     LOGGING
# Thread   any: put, remove, touch; load: its caller's, on a connection of its own;
#          what is written: "records"

_SAVE_DELAY_SECONDS: Final = 0.05  # in which records are gathered for a transaction
_LOAD_SECONDS: Final = 10.0  # until what was put before is in the file
_CLEAN_AFTER: Final = 2_000  # changes, until parts that no record has are deleted
_RECORD_FORMAT: Final = 1  # of values; another number: the file is begun anew
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
    tenant TEXT, kind TEXT, key BLOB, number INTEGER,
    session_id TEXT, used_at REAL, value BLOB, digests BLOB, checksum INTEGER,
    PRIMARY KEY (tenant, kind, key, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (digest BLOB PRIMARY KEY, data BLOB) WITHOUT ROWID;
"""
_DIGEST_BYTES: Final = 32


_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class _UnusableFile(sqlite3.DatabaseError):
    """The file is no database of ours; the text says why."""

    sqlite_errorcode = sqlite3.SQLITE_NOTADB


class SavedRecord(NamedTuple):
    """A record in its saved form."""

    session_id: str
    last_used: float  # seconds, on the clock of time.monotonic()
    value: Any  # as JSON has it
    parts: Sequence[bytes] = ()  # that other records may have, too; none is empty


class RecordFile:
    """The file of all tenants. Until open() nothing is saved, and nothing is there."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._orders: queue.SimpleQueue[Callable[[sqlite3.Connection], None]]
        self._orders = queue.SimpleQueue()
        self._failure = ""  # why nothing is saved any more
        self._n_changes = 0  # since unused parts were deleted

    def open(self, path: Path, *, ttl_seconds: float) -> None:
        """Read and write this file from now on; drop what was not used for so long.

        `ttl_seconds`: 0 for ever. Without a usable file nothing is saved.
        """
        try:
            try:
                self._prepare(path, ttl_seconds)
            except sqlite3.DatabaseError as fault:
                if fault.sqlite_errorcode not in _DAMAGED:
                    raise
                logger.warning("records: %s is begun anew: %s", path, fault)
                for suffix in ("", "-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                self._prepare(path, ttl_seconds)
        except (sqlite3.Error, OSError) as fault:
            logger.warning("records: nothing is saved: %s", fault)
            return
        self._path = path
        threading.Thread(target=self._run, name="records", daemon=True).start()

    def _prepare(self, path: Path, ttl_seconds: float) -> None:
        """Make the tables, or check them.

        Raises sqlite3.Error, with a code of _DAMAGED if the file is of no use; OSError.
        """
        path.touch(mode=0o600)
        with closing(_connect(path)) as database:
            (file_format,) = database.execute("PRAGMA user_version").fetchone()
            if file_format not in (0, _RECORD_FORMAT):
                raise _UnusableFile(f"its format is {file_format}")
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":  # else one page would cost all records, at each start
                raise _UnusableFile(verdict)
            database.execute(f"PRAGMA user_version = {_RECORD_FORMAT}")
            database.executescript(_SCHEMA)
            if ttl_seconds:
                oldest = time.time() - ttl_seconds
                database.execute("DELETE FROM records WHERE used_at < ?", (oldest,))
            _delete_unused_parts(database)
            database.commit()

    def of_tenant(self, tenant: str) -> TenantRecords:
        """The records of a tenant."""
        return TenantRecords(self, tenant)

    def order(self, function: Callable[[sqlite3.Connection], None]) -> None:
        """Run a function on the database, soon."""
        if self._path is not None and not self._failure:
            self._orders.put(function)

    def flush(self, timeout: float) -> bool:
        """Wait until what was ordered is in the file; whether it was in time."""
        if self._path is None or self._failure:
            return True
        is_done = threading.Event()

        def commit(database: sqlite3.Connection) -> None:
            database.commit()
            is_done.set()

        self._orders.put(commit)
        return is_done.wait(timeout)

    def tenants(self) -> list[str]:
        """The tenants that have records in the file."""
        rows: list[tuple[str]] = []
        query = "SELECT DISTINCT tenant FROM records"
        self.order(lambda database: rows.extend(database.execute(query)))
        self.flush(_LOAD_SECONDS)
        return [tenant for (tenant,) in rows]

    def load(self, tenant: str, kind: str) -> list[tuple[bytes, SavedRecord]]:
        """See TenantRecords. Nothing, if there is no file or it cannot be read."""
        if self._path is None:
            return []
        try:
            self.flush(_LOAD_SECONDS)
            with closing(_connect(self._path)) as database:
                return list(_read_records(database, tenant, kind))
        except (sqlite3.Error, TypeError, ValueError) as fault:
            logger.warning("records: they cannot be read: %s", fault)
            return []

    def _run(self) -> None:
        assert self._path is not None
        try:
            with closing(_connect(self._path)) as database:
                while True:
                    self._save_next(database)
        except (sqlite3.Error, OSError) as fault:
            self._failure = str(fault)
            logger.warning("records: nothing is saved any more: %s", fault)

    def _save_next(self, database: sqlite3.Connection) -> None:
        """Wait for an order, and carry out all that come within 50 ms."""
        orders = [self._orders.get()]
        time.sleep(_SAVE_DELAY_SECONDS)
        with suppress(queue.Empty):
            while True:
                orders.append(self._orders.get_nowait())
        for order in orders:
            try:
                order(database)
            except (sqlite3.Error, OSError):
                raise
            except Exception as fault:  # noqa: BLE001 - of one record, not of the file
                logger.warning("records: one is not saved: %s", fault)
        self._n_changes += len(orders)
        if self._n_changes > _CLEAN_AFTER:  # else parts would grow without limit
            self._n_changes = 0
            _delete_unused_parts(database)
        database.commit()


def _connect(path: Path) -> sqlite3.Connection:
    """Open the database. What is deleted is overwritten. Raises sqlite3.Error."""
    database = sqlite3.connect(path, timeout=10.0)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON"):
        database.execute(f"PRAGMA {pragma}")
    return database


def _delete_unused_parts(database: sqlite3.Connection) -> None:
    """Delete the parts that no record has."""
    used: set[bytes] = set()
    for (digests,) in database.execute("SELECT digests FROM records"):
        used.update(_split_digests(digests))
    stored = database.execute("SELECT digest FROM parts").fetchall()
    unused = [(digest,) for (digest,) in stored if digest not in used]
    database.executemany("DELETE FROM parts WHERE digest = ?", unused)


def _split_digests(digests: bytes) -> list[bytes]:
    starts = range(0, len(digests), _DIGEST_BYTES)
    return [digests[start : start + _DIGEST_BYTES] for start in starts]


def _read_records(
    database: sqlite3.Connection, tenant: str, kind: str
) -> Iterator[tuple[bytes, SavedRecord]]:
    shared: dict[bytes, bytes] = {}  # by digest, so that each part is one object
    rows = database.execute(
        "SELECT key, session_id, used_at, value, digests, checksum FROM records"
        " WHERE tenant = ? AND kind = ? ORDER BY used_at, key, number",
        (tenant, kind),
    )
    for key, session_id, used_at, value, digests, checksum in rows:
        if zlib.crc32(value + digests) != checksum:
            continue
        parts: list[bytes] = []
        for digest in _split_digests(digests):
            part = shared.get(digest) or _find_part(database, digest)
            shared[digest] = part
            parts.append(part)
        if all(parts):
            last_used = time.monotonic() - (time.time() - used_at)
            yield key, SavedRecord(session_id, last_used, json.loads(value), parts)


def _find_part(database: sqlite3.Connection, digest: bytes) -> bytes:
    """The part under a digest; b"" if it is not there, or damaged."""
    query = "SELECT data FROM parts WHERE digest = ?"
    for (data,) in database.execute(query, (digest,)):
        if sha256(data).digest() == digest:
            return bytes(data)
        # The next record that has it brings it again. Not if others write meanwhile.
        with suppress(sqlite3.OperationalError):
            database.execute("DELETE FROM parts WHERE digest = ?", (digest,))
            database.commit()
    return b""


class TenantRecords:
    """The records of one tenant in the file."""

    def __init__(self, file: RecordFile, tenant: str) -> None:
        self._file = file
        self._tenant = tenant

    def put(self, kind: str, key: bytes, pack: Callable[[], list[SavedRecord]]) -> None:
        """Replace the records under a key.

        `pack` is called later, on the file's thread: it reads nothing that changes.
        """

        def save(database: sqlite3.Connection) -> None:
            self._delete(database, kind, key)
            for number, record in enumerate(pack()):
                self._insert(database, kind, key, number, record)

        self._file.order(save)

    def remove(self, kind: str, key: bytes) -> None:
        """Remove the records under a key."""
        self._file.order(lambda database: self._delete(database, kind, key))

    def touch(self, kind: str, key: bytes) -> None:
        """Note that the records under a key are used now."""
        used_at = time.time()

        def update(database: sqlite3.Connection) -> None:
            database.execute(
                "UPDATE records SET used_at = ?"
                " WHERE tenant = ? AND kind = ? AND key = ?",
                (used_at, self._tenant, kind, key),
            )

        self._file.order(update)

    def forget_parts(self) -> None:
        """Delete what no record has any more, in the journal, too."""

        def clean(database: sqlite3.Connection) -> None:
            _delete_unused_parts(database)
            database.commit()
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        self._file.order(clean)

    def load(self, kind: str) -> list[tuple[bytes, SavedRecord]]:
        """All whole records of a kind with their keys, those used last as the last.

        A part that several records have is one object.
        """
        return self._file.load(self._tenant, kind)

    def _delete(self, database: sqlite3.Connection, kind: str, key: bytes) -> None:
        database.execute(
            "DELETE FROM records WHERE tenant = ? AND kind = ? AND key = ?",
            (self._tenant, kind, key),
        )

    def _insert(
        self,
        database: sqlite3.Connection,
        kind: str,
        key: bytes,
        number: int,
        record: SavedRecord,
    ) -> None:
        digests = b""
        for part in record.parts:
            digest = sha256(part).digest()
            database.execute(
                "INSERT OR IGNORE INTO parts VALUES (?, ?)", (digest, part)
            )
            digests += digest
        # A lone surrogate, which UTF-8 has not, is written as \ud800.
        value = json.dumps(record.value).encode()
        checksum = zlib.crc32(value + digests)
        used_at = time.time() - (time.monotonic() - record.last_used)
        place = (self._tenant, kind, key, number)
        database.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*place, record.session_id, used_at, value, digests, checksum),
        )


# region THINKING RESTORE ======================================================
# Puts the thinking back that a client has stripped from a reply.
#
# LEDGER replays the recorded tokens of most replies, with their thinking. This section
# is for replies that have to be rendered again.
#
#     the model wrote        [thinking: "2 + 2"] "4"
#     the client sends       user "sum of 2 and 2?", assistant "4", user "and 3?"
#     the model is shown     the same, with the thinking "2 + 2" before "4"
#
# Thinking is found by its signature, if the client keeps that. Otherwise it is found by
# the text and calls of the reply together with what the reply answered: "yes" alone
# may follow from any thinking (L-76). Thinking that a client sends is never replaced.
#
# Thinking is kept with and put back into plain Messages, whose content is one text.
# What a reply answers is named by CanonicalMessages: `original` is such a Message;
# `digest` names it without what changes by itself, such as ids and dates; `pinned` are
# such values, of which some are private to a session (`is_private`).
#
# Public   HealingStore, ReplyContext, Session, ANONYMOUS, heal_messages,
#          private_owner, reply_contexts
# Uses     API TYPES, ANTHROPIC API, CANONICALIZATION, SAVED RECORDS
# Owns     _healing_lock
# Thread   any


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Who sends a conversation: a session that its client has named, or nobody known.

    Sessions are compared by is_same() alone. Two anonymous ones are never known to be
    the same one.
    """

    name: str | None = None  # the session id as sent; None: anonymous

    @classmethod
    def of(cls, request: ChatRequest) -> Session:
        """The session of a request; an empty id is none."""
        return cls(request.session.session_id or None)

    def is_same(self, other: Session) -> bool:
        """Whether both have a name, and it is one."""
        return self.name is not None and self.name == other.name


ANONYMOUS: Final = Session()


def private_owner(owner: bytes, message: CanonicalMessage, session: Session) -> bytes:
    """Whose private values a conversation has, once `message` is added to it.

    `owner` is whose it had before: b"" while it has no private value. If the session
    has a name, it is the owner; if not, all that send the same private values are one
    owner. What was remembered of one owner is found for no other by its context
    (L-106).
    """
    private_values = [pinned for pinned in message.pinned if pinned.is_private]
    if not private_values:
        return owner
    if session.name is not None:
        return sha256(session.name.encode()).digest()

    digest = sha256(owner)
    for pinned in private_values:
        digest.update(f"\0{pinned.rule}\0{pinned.value}".encode())
    return digest.digest()


class ReplyContext(NamedTuple):
    """What a reply answers, as two digests. Both cover private_owner() (L-106)."""

    # Without the contents of tool results: clients shorten them.
    all_messages: bytes
    # The one that it answers: finds thinking where a client has edited older messages.
    last_message: bytes


def reply_contexts(
    messages: Iterable[CanonicalMessage], session: Session
) -> list[ReplyContext]:
    """What a reply would answer in the place of each message, and after the last."""
    chain = b""
    owner = b""
    contexts = [ReplyContext(chain, b"")]
    for message in messages:
        link = b"" if message.role == "tool" else message.digest
        chain = sha256(chain + link).digest()
        owner = private_owner(owner, message, session)
        contexts.append(ReplyContext(chain + owner, message.digest + owner))
    return contexts


class _Thought(NamedTuple):
    """The thinking of a reply, under one of its keys."""

    thinking: str
    session_id: str  # as people see it, see GeneratedReply
    last_used: float  # seconds, by this key

    def pack(self) -> list[SavedRecord]:
        """It, to be saved; the text is stored once for all its keys."""
        text = self.thinking.encode("utf-8", "surrogatepass")
        return [SavedRecord(self.session_id, self.last_used, None, [text])]


# The kinds of keys. The second is a hash of the thinking, whosever it is: a client has
# the hash only from a reply with that thinking.
_BY_CONTEXT: Final = "thinking by context"  # of digests of the context and the reply
_BY_SIGNATURE: Final = "thinking by signature"


class HealingStore:
    """The thinking of replies. For any thread; the least recently used goes first.

    A reply is found under three keys: two for its context, one for its signature.
    """

    CAP: Final = 4000  # keys of each kind
    MAX_BYTES: Final = 64_000_000  # of thinking

    def __init__(
        self, saved: TenantRecords | None = None, *, ttl_seconds: float = 0.0
    ) -> None:
        """`ttl_seconds`: since its last use thinking is dropped; 0: never."""
        self._saved = saved or RecordFile().of_tenant("")
        self._max_idle_seconds = ttl_seconds or math.inf
        self._healing_lock = threading.Lock()  # guards what follows
        # By kind and key; those used least recently first.
        self._thoughts: dict[str, OrderedDict[bytes, _Thought]] = {
            _BY_CONTEXT: OrderedDict(),
            _BY_SIGNATURE: OrderedDict(),
        }
        self._n_keys: Counter[int] = Counter()  # of each text, by its id()
        self._nbytes = 0  # of the texts that have a key

    def load(self) -> None:
        """Remember what an earlier server has saved."""
        texts: dict[bytes, str] = {}  # each once, whatever keys it has
        for kind in self._thoughts:
            for key, saved in self._saved.load(kind):
                (part,) = saved.parts
                text = texts.setdefault(part, part.decode("utf-8", "surrogatepass"))
                thought = _Thought(text, saved.session_id, saved.last_used)
                with self._healing_lock:
                    self._keep(kind, key, thought)

    def remember(
        self, reply: Message, context: ReplyContext, *, session_id: str = ""
    ) -> None:
        """Keep the thinking of a reply, if it has any."""
        thinking = reply.get("reasoning_content")
        if not thinking:
            return
        thought = _Thought(thinking, session_id, time.monotonic())
        digest = reply_digest(reply)
        with self._healing_lock:
            for context_digest in context:
                self._put(_BY_CONTEXT, context_digest + digest, thought)
            self._put(_BY_SIGNATURE, thinking_signature(thinking).encode(), thought)
            # why(L-128): what outlives a request is bounded in bytes.
            while self._nbytes > self.MAX_BYTES:
                for kind, thoughts in self._thoughts.items():
                    self._drop(kind, next(iter(thoughts), b""))

    def find_thinking(self, reply: Message, context: ReplyContext) -> str:
        """The thinking that led to this reply; "" if it is not known."""
        if not len(self):
            return ""
        digest = reply_digest(reply)
        signature = reply.get("thought_id")
        with self._healing_lock:
            thinking = ""
            if isinstance(signature, str):
                thinking = self._use(_BY_SIGNATURE, signature.encode())
            for context_digest in context:
                thinking = thinking or self._use(_BY_CONTEXT, context_digest + digest)
        return thinking

    def expire(self, now: float) -> None:
        """Drop what was not used for too long."""
        with self._healing_lock:
            for kind in self._thoughts:
                self._drop_idle(kind, now)

    def forget(self, session_id: str | None) -> None:
        """Drop the thinking of the replies to a session; None: all of it."""
        with self._healing_lock:
            for kind, thoughts in self._thoughts.items():
                forgotten = [
                    key
                    for key, thought in thoughts.items()
                    if session_id in (None, thought.session_id)
                ]
                for key in forgotten:
                    self._drop(kind, key)
        self._saved.forget_parts()

    def __len__(self) -> int:
        return len(self._thoughts[_BY_CONTEXT])

    # The methods below are called with the lock held.

    def _drop_idle(self, kind: str, now: float) -> None:
        thoughts = self._thoughts[kind]
        while thoughts:
            key, thought = next(iter(thoughts.items()))
            if now - thought.last_used <= self._max_idle_seconds:
                return
            self._drop(kind, key)

    def _use(self, kind: str, key: bytes) -> str:
        """The thinking under a key, which is now the one used last; "" without any."""
        thoughts = self._thoughts[kind]
        thought = thoughts.pop(key, None)
        if thought is None:
            return ""
        thoughts[key] = thought._replace(last_used=time.monotonic())
        self._saved.touch(kind, key)
        return thought.thinking

    def _put(self, kind: str, key: bytes, thought: _Thought) -> None:
        """Replace the thought under a key, in the file, too."""
        self._keep(kind, key, thought)
        self._saved.put(kind, key, thought.pack)

    def _keep(self, kind: str, key: bytes, thought: _Thought) -> None:
        """Replace the thought under a key; drop the oldest if there are too many."""
        thoughts = self._thoughts[kind]
        self._drop(kind, key)
        thoughts[key] = thought
        text = thought.thinking
        if not self._n_keys[id(text)]:
            self._nbytes += sys.getsizeof(text)
        self._n_keys[id(text)] += 1
        if len(thoughts) > self.CAP:
            self._drop(kind, next(iter(thoughts)))

    def _drop(self, kind: str, key: bytes) -> None:
        """Remove a key, if it is there, and the text's bytes with its last key."""
        thought = self._thoughts[kind].pop(key, None)
        if thought is None:
            return
        self._saved.remove(kind, key)
        text = thought.thinking
        self._n_keys[id(text)] -= 1
        if not self._n_keys[id(text)]:
            del self._n_keys[id(text)]
            self._nbytes -= sys.getsizeof(text)


def heal_messages(
    messages: Iterable[Message],
    store: HealingStore,
    *,
    contexts: Iterable[ReplyContext],
) -> list[Message]:
    """The same messages; replies that were sent without their thinking have it again.

    `contexts`: one for each message, in order; more are ignored.
    """
    healed = []
    for message, context in zip(messages, contexts, strict=False):
        thinking = ""
        if message["role"] == "assistant" and not message.get("reasoning_content"):
            thinking = store.find_thinking(message, context)
        restored = {"reasoning_content": thinking} if thinking else {}
        healed.append({**message, **restored})
    return healed


# region TOKENIZER =============================================================
# Text -> tokens. Markup ("<|im_end|>") is markup if the chat template prints it, and
# plain text if a client sends it, in a file for example.
#
# A tokenizer first finds its added tokens in a text: they are the markup. So that the
# text of a client is not taken for markup, break_markup() puts a character into all
# that looks like an added token, and encode() takes this character out again after it
# has looked for added tokens. In between, the text is called broken:
#
#     a client sends             what is <|im_end|> ?
#     break_markup()             what is <\ufdd0|im_end|> ?
#     the template prints        <|im_start|>user\nwhat is <\ufdd0|im_end|> ?<|im_end|>
#     encode()                   151644 872 198 ... the letters of <|im_end|> ... 151645
#
# A rendered prompt is encoded piece by piece, between its added tokens (Encoder). A
# very long piece is cut where no token can reach over the cut (_TextCutter).
#
# Public   token_pattern, break_markup, remove_breaks, EncodingLimit, EncodedPrompt,
#          Encoder
# Uses     ERRORS, WORK BUDGET, API TYPES, CANONICALIZATION
# Thread   any

_BREAK: Final = "\ufdd0"  # a noncharacter: Unicode keeps it for the inside of programs
_BREAKS: Final = re.compile(f"{_BREAK}({_BREAK}?)")  # a client's own ones are doubled
_NO_MATCH: Final = "(?!)"
_ENCODER_MEMO_BYTES: Final = 64_000_000


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds tokens as a tokenizer finds its added tokens: leftmost, then longest.

    They are in a group, so that split() returns them as well.
    """
    # why(L-104): re tries all alternatives at each place, but looks only once for what
    # a group of them begins with. Gemma 3 has 6,242 tokens "<unused...>".
    groups: dict[str, list[str]] = {}
    longest_first = sorted(tokens, reverse=True)  # "<ab" comes before "<a"
    for token in longest_first:
        group = groups.setdefault(token[:4], [])
        group.append(re.escape(token))
    alternatives = [f"(?:{'|'.join(group)})" for group in groups.values()]
    pattern = "|".join(alternatives) or _NO_MATCH
    return re.compile(f"({pattern})")


def break_markup(value: Any, markup: re.Pattern[str]) -> Any:
    """A copy of a JSON value with a break in all markup, in keys as well."""
    match value:
        case str():
            text = value.replace(_BREAK, _BREAK * 2)
            while markup.search(text):  # again: "]~b]~b]" is two tokens that overlap
                text = markup.sub(_break_token, text)
            return text
        case dict():
            pairs = value.items()
            return {
                break_markup(key, markup): break_markup(item, markup)
                for key, item in pairs
            }
        case list() | tuple():
            return [break_markup(item, markup) for item in value]
    return value


def _break_token(match: re.Match[str]) -> str:
    token = match[0]
    return token[0] + _BREAK + token[1:]


def remove_breaks(text: str) -> str:
    """The text before its markup was broken."""
    return _BREAKS.sub(r"\1", text)


class EncodingLimit(NamedTuple):
    """Where the encoding of a text may end early.

    It ends after the first part with which the text has more than `max_tokens`.
    `check_client` is called before each part; what it raises ends the encoding, too.
    """

    max_tokens: int = sys.maxsize
    check_client: Callable[[], None] = assume_client
    field: str = "messages"  # of the request, which has the text: for an error


class EncodedPrompt(NamedTuple):
    """The tokens of a text, or of its beginning."""

    ids: TokenIds
    n_left_out: int  # about so many tokens follow, which were not made

    @property
    def n_tokens(self) -> int:
        """Of the whole text; if some were left out, an estimate."""
        return len(self.ids) + self.n_left_out


_PIECE_CHARACTERS: Final = 1 << 16  # of a text that is tokenized at once
_LONG_PIECES: Final = 4  # a text of more pieces that cannot be cut is counted first
_MAX_WHOLE_PIECES: Final = 64  # a text of more pieces that cannot be cut is refused
_COMPARED_CHARACTERS: Final = 64  # are encoded before and after a place, to try a cut
_MAX_CUT_TRIES: Final = 64
# Where a text may be cut: at the space between two words, and between two lines.
_WORD_END: Final = "(?<=[a-zA-Z][a-zA-Z])[ ](?=[a-zA-Z][a-zA-Z])"
_LINE_END: Final = r"(?<=\n)(?=\S)"
# Find tokens that go on at such a place. Vocabularies spell a space " ", "\u2581" or
# "\u0120". "\0" stands between two tokens.
_WORD_CROSSING: Final = re.compile("[a-zA-Z][ \u2581\u0120][a-zA-Z]")
_LINE_CROSSING: Final = re.compile(r"[\n\u010a][^\s\0\u010a\u010d\u0120\u0109\u2581]")


class _TextCutter:
    """Cuts a long text where no token of a tokenizer goes on, whatever is around.

    why(L-118): a tokenizer takes 160 bytes for each byte of a text. So a long text is
    tokenized in parts, which must give the very tokens that the whole gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def split(self, text: str) -> Iterator[str]:
        """Parts of a text, most of them a bit longer than _PIECE_CHARACTERS.

        For "a brown fox" they are "a brown" and " fox". Some tokenizers put a space
        before each text: for these they are "a brown" and "fox".
        """
        start = 0
        while len(text) - start > _PIECE_CHARACTERS:
            cut = self._find_cut(text, start)
            if cut is None:
                break
            yield text[start : cut.start]
            start = cut.stop
        yield text[start:]

    @cached_property
    def _places(self) -> re.Pattern[str]:
        """Where a text may be cut: no token of the vocabulary goes on there."""
        tokens = "\0".join(self._tokenizer.get_vocab(with_added_tokens=False))
        places = []
        if not _WORD_CROSSING.search(tokens):
            places.append(_WORD_END)
        if not _LINE_CROSSING.search(tokens):
            places.append(_LINE_END)
        return re.compile("|".join(places) or _NO_MATCH)

    def _find_cut(self, text: str, start: int) -> slice | None:
        """The end of a part that begins at `start`, and the start of the next one."""
        places = self._places.finditer(text, start + _PIECE_CHARACTERS)
        for place in islice(places, _MAX_CUT_TRIES):
            # A part that follows a word begins with the space, or after it if the
            # tokenizer puts one before each text. At a line end both are one position.
            for next_start in sorted({place.start(), place.end()}):
                cut = slice(place.start(), next_start)
                if self._keeps_tokens(text, cut):
                    return cut
        return None

    def _keeps_tokens(self, text: str, cut: slice) -> bool:
        """Whether the text around a cut has the same tokens, cut and whole."""
        first = max(0, cut.start - _COMPARED_CHARACTERS)
        last = cut.stop + _COMPARED_CHARACTERS
        ids_before = _encode_plain(self._tokenizer, text[first : cut.start])
        ids_after = _encode_plain(self._tokenizer, text[cut.stop : last])
        whole_ids = _encode_plain(self._tokenizer, text[first:last])
        return ids_before + ids_after == whole_ids


class Encoder:
    """The tokens of rendered text.

    It remembers those of each piece of text between added tokens, so that to encode a
    long history again is to look up its pieces:

        <|im_start|>  user\nhi  <|im_end|>  \n
        token         piece     token       piece
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a fast one of transformers, or mlx-lm's wrapper of one."""
        self.tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.added_tokens = self.tokenizer.get_added_tokens_decoder()
        self._ids_of_added: dict[str, TokenIds] = {}
        for token_id, token in self.added_tokens.items():
            ids = np.array([token_id], np.int32)
            self._ids_of_added[token.content] = ids
        self.find_added = token_pattern(self._ids_of_added)
        self.memo: Memo[TokenIds] = Memo(_ENCODER_MEMO_BYTES)
        self.tenant = ""  # whose texts these are, for the memo
        self._long_texts = WorkBudget(1)  # why(L-118): without a cut, one at a time

        # The same tokenizer, but without added tokens.
        plain = Tokenizer(self.tokenizer.model)
        plain.normalizer = self.tokenizer.normalizer
        plain.pre_tokenizer = self.tokenizer.pre_tokenizer
        self._piece_tokenizer = plain
        self._cutter = _TextCutter(plain)

        # Pieces give other tokens if an added token takes the spaces around it (Phi-3).
        # Then texts are left whole. To find out, a sample is encoded in pieces.
        self.can_split = True
        sample = self._sample_text()
        sample_ids: list[int] = tokenizer.encode(sample, add_special_tokens=False)
        self.can_split = self.encode(sample).tolist() == sample_ids

    def for_tenant(self, tenant: str) -> Encoder:
        """The same for the texts of one tenant. It shares tokenizer and memo."""
        encoder = copy(self)
        encoder.tenant = tenant
        return encoder

    def _sample_text(self) -> str:
        """A text with each added token before and after spaces, words and itself."""
        uses = [f" go {t} \n{t}\u00e9t\u00e9{t}{t}" for t in self._ids_of_added]
        return "Zed" + "".join(uses) + " x.\n\n"

    def find_markup(self, template: str, tags: Iterable[str]) -> re.Pattern[str]:
        """A pattern of what has to be broken in texts of clients.

        That is all added tokens and `tags`. Not broken are single characters, white
        space, and added tokens that are words of the plain vocabulary as well, such as
        Gemma's "<table>", unless they are special or the chat template contains them.
        """
        markup = {*tags, *self._ids_of_added}
        for token in self.added_tokens.values():
            if token.special or token.content in template:
                continue
            word_id = self._piece_tokenizer.token_to_id(token.content)
            if word_id is not None:
                markup.discard(token.content)
        return token_pattern(t for t in markup if len(t) > 1 and not t.isspace())

    def encode(self, text: str) -> TokenIds:
        """The tokens of a text. Broken markup is text, all other markup is markup."""
        return self._encode_parts(
            self._parts(text), self._encode_part, text, EncodingLimit()
        ).ids

    def encode_raw(self, text: str) -> TokenIds:
        """The tokens of a text that was not broken, and may contain the character."""
        return self.encode(text.replace(_BREAK, _BREAK * 2))

    def encode_completion(self, text: str, limit: EncodingLimit) -> EncodedPrompt:
        """The tokens of a text as the tokenizer encodes it, those that it adds too."""
        if len(text) > _PIECE_CHARACTERS and self.can_split:
            parts = self._parts_of_completion(text)
            if parts is not None:
                return self._encode_parts(parts, self._encode_part, text, limit)
        return self._encode_parts([text], self._encode_whole, text, limit)

    def _parts_of_completion(self, text: str) -> Iterable[str | TokenIds] | None:
        """The parts of a text, between what the tokenizer adds to any text.

        None: what it adds is neither at the start nor at the end.
        """
        short_ids = self._encode_whole("a")
        plain_ids = self.encode("a")
        start = int(np.argmax(short_ids == plain_ids[0]))
        end = start + len(plain_ids)
        if not np.array_equal(short_ids[start:end], plain_ids):
            return None
        parts = self._parts(text.replace(_BREAK, _BREAK * 2))
        return chain([short_ids[:start]], parts, [short_ids[end:]])

    def _encode_whole(self, text: str) -> TokenIds:
        (encoding,) = self.tokenizer.encode_batch_fast([text])
        return np.array(encoding.ids, np.int32)

    def encode_prompt(self, text: str, request: ChatRequest) -> EncodedPrompt:
        """The tokens of a text in which marks stand for images of the request.

        A mark is a digest between two noncharacters (REQUEST IMAGES). `image_tokens`
        of the request: by digest, the text that a prompt has for the image, with the
        mark in it once more, and the tokens for that mark.

        Raises BadRequest: a part is too long and cannot be cut.
        """
        parts = self._parts_with_images(text, request.image_tokens)
        limit = EncodingLimit(request.max_counted_tokens, request.check_client)
        return self._encode_parts(parts, self._encode_part, text, limit)

    def count_tokens(self, text: str, limit: EncodingLimit) -> int:
        """About how many tokens a text has: it is cut anywhere. None are remembered."""

        def encode(piece: str) -> TokenIds:
            return np.array(_encode_plain(self._piece_tokenizer, piece), np.int32)

        return self._encode_parts(_pieces(text), encode, text, limit).n_tokens

    def _encode_parts(
        self,
        parts: Iterable[str | TokenIds],
        encode: Callable[[str], TokenIds],
        text: str,
        limit: EncodingLimit,
    ) -> EncodedPrompt:
        """The tokens of the parts of a text. `encode` gives those of a part.

        Parts that are arrays, of an added token or an image, are tokens already.
        """
        ids_of_parts: list[TokenIds] = []
        n_tokens = 0
        n_characters = 0
        n_left_out = 0
        for part in parts:
            limit.check_client()
            if isinstance(part, str):
                part_limit = limit._replace(max_tokens=limit.max_tokens - n_tokens)
                encoded = self._encode_text(part, encode, part_limit)
            else:
                encoded = EncodedPrompt(part, 0)
            ids_of_parts.append(encoded.ids)
            n_tokens += encoded.n_tokens
            n_characters += len(part)
            if n_tokens > limit.max_tokens:
                n_left_characters = max(0, len(text) - n_characters)
                n_left_out = n_left_characters * n_tokens // max(n_characters, 1)
                n_left_out += encoded.n_left_out
                break
        return EncodedPrompt(_join(ids_of_parts), n_left_out)

    def _encode_text(
        self, text: str, encode: Callable[[str], TokenIds], limit: EncodingLimit
    ) -> EncodedPrompt:
        """The tokens of a part that is a text.

        why(L-118): a long text that could not be cut takes too much memory as a whole.
        So it is first encoded in pieces, cut anywhere. If these have more tokens than
        the limit, they are returned: the prompt is refused, and needs only their
        number.
        """
        if len(text) <= _LONG_PIECES * _PIECE_CHARACTERS:
            return EncodedPrompt(encode(text), 0)

        counted = self._encode_parts(_pieces(text), encode, text, limit)
        if counted.n_tokens > limit.max_tokens:
            return counted

        max_characters = _MAX_WHOLE_PIECES * _PIECE_CHARACTERS
        if len(text) > max_characters:
            raise BadRequest(
                f"a text of more than {max_characters:,} characters without two words"
                " or lines in a row cannot be tokenized: send it in parts",
                field=limit.field,
            )
        with self._long_texts.reserve(1, limit.check_client):
            return EncodedPrompt(encode(text), 0)

    def _parts_with_images(
        self, text: str, images: Mapping[str, tuple[str, TokenIds]]
    ) -> Iterator[str | TokenIds]:
        """The parts of a text. Those that are images are tokens already."""
        if not images:
            yield from self._parts(text)
            return
        marks = re.compile(f"\ufdd1({'|'.join(images)})\ufdd2")
        text = marks.sub(lambda mark: images[mark[1]][0], text)
        for index, part in enumerate(marks.split(text)):
            if index % 2 == 1:
                yield images[part][1]  # split() gives digests and texts in turns
            else:
                yield from self._parts(part)

    def _parts(self, text: str) -> Iterator[str | TokenIds]:
        """The parts of a broken text. Added tokens are tokens already."""
        if not self.can_split:
            # Cut at each break, so that no markup is whole. _BREAKS has a group, which
            # is empty or a break that the client has sent: split() returns it, too.
            yield from filter(None, _BREAKS.split(text))
            return
        start = 0
        for match in self.find_added.finditer(text):
            yield from self._cutter.split(remove_breaks(text[start : match.start()]))
            yield self._ids_of_added[match[0]]
            start = match.end()
        yield from self._cutter.split(remove_breaks(text[start:]))

    def _encode_part(self, part: str) -> TokenIds:
        """The tokens of a text without added tokens, or if it cannot be split, with."""
        if not self.can_split:
            return _tokenize(self.tokenizer, part)
        return self.memo.get_or_make(
            part, lambda: _tokenize(self._piece_tokenizer, part), tenant=self.tenant
        )


def _pieces(text: str) -> Iterator[str]:
    """A text cut anywhere."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


def _join(parts: list[TokenIds]) -> TokenIds:
    return np.concatenate([np.empty(0, np.int32), *parts])


def _encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, and none that the tokenizer adds to it."""
    # why(L-32): encode() would keep the GIL.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _tokenize(tokenizer: Tokenizer, text: str) -> TokenIds:
    """The tokens of a text. Other threads run meanwhile, and for some time after."""
    started_at = time.monotonic()
    ids = np.array(_encode_plain(tokenizer, text), np.int32)
    # why(L-60): the model thread needs the core as well.
    spent_seconds = time.monotonic() - started_at
    if spent_seconds > 0.0003:
        time.sleep(min(spent_seconds / 2, 0.01))
    return ids


# region TEMPLATE TRAITS =======================================================
# Finds out what the chat template of the model can print, and how.
#
# A template may drop what it does not know, a role for example, without an error
# (L-14). So each template is probed at start: it renders canned conversations, which we
# have written, and what it prints shows its traits. CHAT TEMPLATE relies on them. No
# template is known by name.
#
#     user      zq0q             <|im_start|>user\nzq0q<|im_end|>\n
#     assistant zq1q      ->     <|im_start|>assistant\nzq1q<|im_end|>\n
#     system    zq2q             (nothing: this template has no late system messages)
#
#  1 Renderer  messages -> text, by the template.
#  2 Probing   canned conversations -> TemplateTraits.
#
# Public   Renderer, canned_words, TemplateTraits, probe_traits,
#          probe_preserve_thinking_support, probe_generation_prompt, render_sample,
#          compute_msg_token_boundaries, count_common, skip_spaces
# Uses     ERRORS, API TYPES, TOKENIZER
# Thread   any


# -- 1 renderer ------------------------------------------------------------------------


class Renderer:
    """A chat template as a function from messages to text."""

    def __init__(self, tokenizer: Any, find_added: re.Pattern[str]) -> None:
        """`find_added`: finds the added tokens in what it prints."""
        self.source = ""  # of the template, once it is known
        self.find_added = find_added
        self._apply = tokenizer.apply_chat_template
        self._reads_only_parts = False
        if not self.shows("user"):
            # LLaVA's template prints the text parts of a message, but no plain text.
            self._reads_only_parts = _CANNED_FIRST in self.try_render("parts")

        # "" if there is no template. It may be a function (DeepSeek-V3.2's): then
        # something that it prints.
        self.source = _template_source(tokenizer) or self.try_render("user")

    def render(
        self,
        messages: list[Message],
        *,
        tools: Sequence[JsonObject],
        kwargs: JsonObject,
    ) -> str:
        """The text of a conversation, with a generation prompt unless `kwargs` say no.

        `kwargs`: what the template reads beside messages and tools, `enable_thinking`
        for one. Raises BadRequest with the template's own sentence if it refuses.
        """
        if self._reads_only_parts:
            messages = [_as_parts(message) for message in messages]
        kwargs = {"add_generation_prompt": True, "tokenize": False, **kwargs}
        try:
            return str(self._apply(messages, tools=list(tools) or None, **kwargs))
        except Exception as error:
            # Templates raise what they like, and so does Jinja; that an error is our
            # own cannot be seen.
            refusal = str(error)
            reason = f"the model's chat template refuses these messages: {refusal}"
            # A sentence of the template's own does not quote the client.
            quote = "" if refusal in self.source else refusal
            raise BadRequest(reason, param="messages", quote=quote) from error

    def try_render(
        self,
        messages: str | list[Message],
        *,
        tools: Sequence[JsonObject] = (),
        kwargs: JsonObject | None = None,
    ) -> str:
        """The same, or "" if the template refuses the messages.

        A string is the kinds of a canned conversation, as "user reply".
        """
        if isinstance(messages, str):
            messages = _canned_conversation(messages)
        with suppress(BadRequest):
            return self.render(messages, tools=tools, kwargs=kwargs or {})
        return ""

    def shows(self, kinds: str) -> bool:
        """Whether the contents of a canned conversation are all printed, in order."""
        contents = [message["content"] for message in _canned_conversation(kinds)]
        in_order = re.compile(".*".join(contents), re.DOTALL)
        return in_order.search(self.try_render(kinds)) is not None


def _template_source(tokenizer: Any) -> str:
    """The text of the chat template; "" if it has none."""
    source = tokenizer.chat_template or ""
    if isinstance(source, dict):  # several templates, by name
        return "\n".join(source.values())
    return str(source)


def _as_parts(message: Message) -> Message:
    """The message with a text part for content, if that is a text."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


# -- 2 probing -------------------------------------------------------------------------
# Each trait is found by one function, from what the template prints for conversations
# of our own. Another trait is a field of TemplateTraits and one more function.

# Letters and digits, which every template prints as they are.
_CANNED_FIRST: Final = "zqfirst"
_CANNED_THINKING: Final = "zqthought"
_CANNED_TOOL: Final[JsonObject] = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
}


_NO_SPACE: Final = re.compile(r"\S|\Z")


def canned_words(index: int) -> str:
    """The words of message `index` in a canned conversation."""
    return f"zq{index}q"


def _canned_conversation(kinds: str) -> list[Message]:
    """A conversation of our own, by the kinds of its messages.

        "user call tool reply"  ->  user       zq0q
                                    assistant  (thinking) f(q="zq1q")
                                    tool       zq2q
                                    assistant  (thinking) zq3q

    "calls" is a message of two calls, "parts" a user message of two text parts. In both
    the first of the two has the word "zqfirst".
    """
    messages: list[Message] = []
    n_results = 0
    for index, kind in enumerate(kinds.split()):
        words = canned_words(index)
        reply: Message = {"role": "assistant", "reasoning_content": _CANNED_THINKING}
        match kind:
            case "parts":
                message = {"role": "user", "content": _canned_parts(words)}
            case "reply":
                message = {**reply, "content": words}
            case "call":
                calls = [_canned_call(words, n=0)]
                message = {**reply, "content": "", "tool_calls": calls}
            case "calls":
                calls = [_canned_call(_CANNED_FIRST, n=0), _canned_call(words, n=1)]
                message = {**reply, "content": "", "tool_calls": calls}
            case "tool":
                message = {
                    "role": "tool",
                    "name": "f",
                    "tool_call_id": _canned_call_id(n_results),
                    "content": words,
                }
                n_results += 1
            case role:
                message = {"role": role, "content": words}
        messages.append(message)
    return messages


def _canned_parts(words: str) -> list[JsonObject]:
    return [
        {"type": "text", "text": _CANNED_FIRST},
        {"type": "text", "text": words},
    ]


def _canned_call_id(n: int) -> str:
    return f"call0000{n}"  # Mistral's templates refuse ids of other than nine letters


def _canned_call(words: str, *, n: int) -> JsonObject:
    return {
        "id": _canned_call_id(n),
        "type": "function",
        "function": {"name": "f", "arguments": {"q": words}},
    }


class InnerStart(NamedTuple):
    """A token that begins messages, but not if it stands inside the start of one.

    Results of tools often stand in a user message: the first one then begins with
    <|im_start|>user\n<tool_response>, the second with <tool_response> alone.
    """

    first_id: int  # the token that does begin the message: <|im_start|>
    distance: int  # in tokens
    inner_id: int  # <tool_response>


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What a chat template can print, and how, as far as that was found by probing."""

    has_system: bool  # messages of this role
    has_late_system: bool  # also after others, each at its place
    has_repeats: bool  # messages of the same role after each other
    has_tools: bool
    part_separator: str  # between the text parts of a message
    image_placeholder: str  # "" if it prints none
    thinking_kwargs: Mapping[bool, JsonObject]  # template kwargs: thinking on, off
    preserve_kwargs: JsonObject  # so that it prints the thinking of past turns
    # Of a message with calls it prints `content` or `thinking`, but not both (gpt-oss).
    merges_thinking: bool
    message_start_ids: TokenIds  # the tokens with which messages begin
    inner_starts: frozenset[InnerStart]
    user_start: re.Pattern[str]  # where a user message begins in a prompt


def probe_traits(renderer: Renderer, encoder: Encoder) -> TemplateTraits:
    """All traits of a template. It renders about forty canned conversations."""
    part_separator = _probe_part_separator(renderer)
    thinking_kwargs = _probe_thinking_kwargs(renderer)
    starts = [
        encoder.encode(text).tolist()
        for text in _probe_message_starts(renderer, thinking_kwargs)
    ]
    start_ids = np.unique([ids[0] for ids in starts]).astype(np.int32)
    return TemplateTraits(
        has_system=renderer.shows("system user"),
        has_late_system=renderer.shows(
            "system system user call tool system reply system user"
        ),
        has_repeats=renderer.shows("user user reply reply"),
        has_tools=renderer.try_render("user", tools=[_CANNED_TOOL])
        != renderer.try_render("user"),
        part_separator=part_separator,
        image_placeholder=_probe_image_placeholder(renderer, part_separator),
        thinking_kwargs=thinking_kwargs,
        preserve_kwargs=probe_preserve_thinking_support(renderer),
        merges_thinking=_probe_merged_thinking(renderer),
        message_start_ids=start_ids,
        inner_starts=_find_inner_starts(starts, start_ids),
        user_start=_probe_user_start(renderer),
    )


def _probe_part_separator(renderer: Renderer) -> str:
    """The white space between two text parts; a newline if it prints them otherwise."""
    text = renderer.try_render("parts")
    separator = re.search(rf"{_CANNED_FIRST}(\s*){canned_words(0)}", text)
    return "\n" if separator is None else separator[1]


def _probe_image_placeholder(renderer: Renderer, part_separator: str) -> str:
    """What it prints for an image between two texts."""
    first, last = _canned_parts(canned_words(0))
    parts = [first, {"type": "image"}, last]
    text = renderer.try_render([{"role": "user", "content": parts}])
    gap = re.search(rf"(?s){_CANNED_FIRST}(.*?){canned_words(0)}", text)
    if gap is None:
        return ""
    placeholder = gap[1].removeprefix(part_separator)
    return placeholder.removesuffix(part_separator)


_THINKING_KWARGS: Final[Sequence[Mapping[bool, JsonObject]]] = (
    {True: {"enable_thinking": True}, False: {"enable_thinking": False}},
    {True: {"thinking": True}, False: {"thinking": False}},
    {True: {}, False: {"reasoning_effort": "low"}},
    {True: {}, False: {"reasoning_effort": "none"}},
)


def _probe_thinking_kwargs(renderer: Renderer) -> Mapping[bool, JsonObject]:
    """The template kwargs for thinking on and off; both {} if none is known.

    A template with a reasoning effort thinks by default. Off is the effort "low" there,
    and "none" only if the template refuses or ignores "low": a template that prints
    whatever effort it is given would print "none", too.
    """
    for kwargs in _THINKING_KWARGS:
        text_on = renderer.try_render("user", kwargs=kwargs[True])
        text_off = renderer.try_render("user", kwargs=kwargs[False])
        if text_on and text_off and text_on != text_off:
            return kwargs
    return {True: {}, False: {}}


def probe_preserve_thinking_support(renderer: Renderer) -> JsonObject:
    """The template kwargs that make it print the thinking of past turns.

    {} if none does that, or if none changes what it prints anyway.
    """
    choices: list[JsonObject] = [
        {"preserve_thinking": True},  # Qwen3.6
        {"keep_past_thinking": True},  # LFM2.5
        {"clear_thinking": False},  # GLM
        {"truncate_history_thinking": False},  # Nemotron
    ]
    default_text = renderer.try_render("user reply user")
    for kwargs in choices:
        text = renderer.try_render("user reply user", kwargs=kwargs)
        if _CANNED_THINKING in text and text != default_text:
            return kwargs
    return {}


def _probe_merged_thinking(renderer: Renderer) -> bool:
    """Whether it prints the field `thinking` of a call, but not with `content`."""
    user, call = _canned_conversation("user call")
    del call["reasoning_content"]
    alone = {**call, "thinking": _CANNED_THINKING}
    with_text = {**alone, "content": _CANNED_FIRST}
    text = renderer.try_render([user, with_text])
    has_both = _CANNED_THINKING in text and _CANNED_FIRST in text
    return not has_both and _CANNED_THINKING in renderer.try_render([user, alone])


def _probe_message_starts(
    renderer: Renderer, thinking_kwargs: Mapping[bool, JsonObject]
) -> list[str]:
    """The texts with which messages of all kinds begin, and all generation prompts."""
    texts = [
        _probe_message_start(renderer, "user reply", "user"),
        _probe_message_start(renderer, "user call", "tool"),
        _probe_message_start(renderer, "user calls tool", "tool"),
        _probe_message_start(renderer, "user", "reply"),
        _probe_message_start(renderer, "user reply", "system"),
    ]
    for kwargs in thinking_kwargs.values():
        texts.append(probe_generation_prompt(renderer, "user", kwargs))
        texts.append(probe_generation_prompt(renderer, "tool", kwargs))
    return [text for text in texts if text]


def _find_inner_starts(
    starts: list[list[int]], start_ids: TokenIds
) -> frozenset[InnerStart]:
    inner_starts = set()
    for ids in starts:
        for distance, token_id in enumerate(ids):
            if distance > 0 and token_id in start_ids:
                inner_starts.add(InnerStart(ids[0], distance, token_id))
    return frozenset(inner_starts)


def _probe_user_start(renderer: Renderer) -> re.Pattern[str]:
    """Finds the start of user messages, and not of results that stand in some."""
    user_start = _probe_message_start(renderer, "user reply", "user")
    result_start = _probe_message_start(renderer, "user call", "tool")
    if not user_start:
        return token_pattern([])  # finds nothing
    pattern = re.escape(user_start)
    if result_start.startswith(user_start) and result_start != user_start:
        pattern += f"(?!{re.escape(result_start.removeprefix(user_start))})"
    return re.compile(pattern)


def probe_generation_prompt(
    renderer: Renderer, last_role: str, kwargs: JsonObject
) -> str:
    """The text that opens the reply to a message of this role."""
    past = "user call tool" if last_role == "tool" else "user"
    return _probe_message_start(renderer, past, "", kwargs)


def _probe_message_start(
    renderer: Renderer, past: str, kind: str, kwargs: JsonObject | None = None
) -> str:
    """The text that opens a message of this kind after `past`; "" if there is none.

    If `kind` is "", the message is the reply. Two texts are compared, from the last
    words of the past on:

        only the past         zq1q<|im_end|>\n
        with the message      zq1q<|im_end|>\n<|im_start|>user\nzq2q
                                              |- start --------|

    They differ from <|im_start|> on. The start begins with the last added token that is
    not after this place.
    """
    n_past = len(past.split())
    last_words = canned_words(n_past - 1)
    no_prompt = {**(kwargs or {}), "add_generation_prompt": False}
    past_text = renderer.try_render(past, kwargs=no_prompt)
    if kind:
        text = renderer.try_render(f"{past} {kind}", kwargs=no_prompt)
    else:
        text = renderer.try_render(past, kwargs=kwargs)

    # What follows the last words of the past, in both; all of it if they are not there.
    # The gap ends where the words of the message begin, if it has any.
    past_end = past_text.rpartition(last_words)[2]
    gap = text.rpartition(last_words)[2].partition(canned_words(n_past))[0]
    difference = skip_spaces(gap, count_common(past_end, gap))
    if difference == len(gap):
        return ""  # nothing follows the past
    start = -1
    for match in renderer.find_added.finditer(gap):
        if match.start() <= difference:
            start = match.start()
    return gap[start:] if start >= 0 else ""


def count_common(first: str, second: str) -> int:
    """How many leading characters of two texts are the same."""
    for index, (character, other) in enumerate(zip(first, second, strict=False)):
        if character != other:
            return index
    return min(len(first), len(second))


def skip_spaces(text: str, start: int) -> int:
    """Where the white space ends that may begin there."""
    match = _NO_SPACE.search(text, start)
    return match.start() if match else len(text)


def render_sample(
    renderer: Renderer, traits: TemplateTraits, kwargs: JsonObject
) -> str:
    """Two canned conversations as these template kwargs make the template print them.

    Without generation prompts: kwargs that change nothing else give the same sample.
    """
    kwargs = {**kwargs, "add_generation_prompt": False}
    system = "system " if traits.has_system else ""
    plain = renderer.try_render(f"{system}user reply user", kwargs=kwargs)
    with_tool = renderer.try_render(
        f"{system}user call tool reply user", tools=[_CANNED_TOOL], kwargs=kwargs
    )
    return f"{plain}\0{with_tool}"


def compute_msg_token_boundaries(
    ids: TokenIds, traits: TemplateTraits
) -> tuple[int, ...]:
    """The positions in a prompt where a message, or the generation prompt, begins.

    Not an inner start. That is one if the token `distance` before it is `first_id`; the
    tokens between them are not compared.
    """
    is_start = np.isin(ids, traits.message_start_ids)
    for first_id, distance, inner_id in traits.inner_starts:
        is_first = ids[:-distance] == first_id
        is_inner = ids[distance:] == inner_id
        is_start[distance:] &= ~(is_first & is_inner)
    return tuple(np.flatnonzero(is_start).tolist())


# region CHAT TEMPLATE =========================================================
# Messages -> prompt, by the chat template that comes with the model.
#
#     messages -> shape -> fold -> render -> text -> tokens, and the positions of parts
#
#  1 Shaping   Each message gets a form that the template can print. Messages that it
#              cannot print one after the other are merged. Text that is lost even
#              so is logged, once for each kind: _find_losses() says what is looked for.
#  2 Prompts   A whole prompt.
#  3 Splicing  New messages after recorded tokens, for LEDGER.
#
# Public   ChatTemplate, RenderedPrompt, PromptPositions, Splice, SpliceRefused
# Uses     CONFIG, ERRORS, LOGGING, API TYPES, REQUEST BODIES, CANONICALIZATION,
#          TOKENIZER, TEMPLATE TRAITS
# Thread   any


# -- 1 shaping -------------------------------------------------------------------------

_WRITE_TOOLS: Final = frozenset({"write", "write_file", "create_file"})

# How _find_losses() looks for texts in a prompt.
_MAX_LOST: Final = 16  # texts of a kind; then no more of that kind are looked for
_FIRST_SEARCH: Final = 1 << 10  # characters that are searched first
_SORTED_CHARACTERS: Final = 50_000  # within which results of tools are sorted, mostly


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageShaper:
    """Puts messages into a form that the template can print."""

    markup: re.Pattern[str]  # to be broken, see TOKENIZER
    part_separator: str
    thinking_tags: tuple[str, str]  # "" if the model has none
    merges_thinking: bool  # beside calls the template prints text or thinking (gpt-oss)
    hides_writes: bool  # NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT

    def shape(self, message: Message) -> Message:
        """A copy of a message in which all markup is broken."""
        role = message["role"]
        content = self.part_separator.join(text_parts(message["content"]))
        if role == "assistant" and "reasoning_content" not in message:
            thinking, content = cut_thinking(content, self.thinking_tags)
            if thinking:
                message = {**message, "reasoning_content": thinking}
        shaped = {**message, "content": content}
        if role == "developer":
            shaped["role"] = "system"  # why(L-14)

        calls = shaped.pop("tool_calls", None)  # some templates take [] for a call
        if calls:
            shaped["tool_calls"] = [self._shape_call(call) for call in calls]
        if calls and self.merges_thinking:
            texts = [message.get("reasoning_content"), content]
            shaped["content"] = "\n\n".join(filter(None, texts))
            shaped["thinking"] = ""

        broken: Message = self.break_markup(shaped)
        return broken

    def break_markup(self, value: Any) -> Any:
        """A copy of a JSON value, with breaks in what is markup for this model."""
        return break_markup(value, self.markup)

    def _shape_call(self, call: JsonObject) -> JsonObject:
        """The call with an object for arguments: text crashes templates (L-15)."""
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parse_arguments(arguments)

        written = arguments.get("content")
        is_write = function["name"].lower() in _WRITE_TOOLS
        if self.hides_writes and is_write and isinstance(written, str):
            digest = sha256(written.encode()).hexdigest()[:12]
            summary = f"[{len(written)} characters, sha256 {digest}]"
            arguments = {**arguments, "content": summary}
        return _replace_arguments(call, arguments)


def _parse_arguments(text: str) -> JsonObject:
    """The arguments of a call; text that is no JSON object as a single one, `_raw`."""
    with suppress(BadRequest):
        arguments = parse_json_body(text.encode())
        if isinstance(arguments, dict):
            return arguments
    return {"_raw": text}


def _replace_arguments(call: JsonObject, arguments: JsonObject) -> JsonObject:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _fold_messages(
    messages: Iterable[Message], traits: TemplateTraits
) -> list[Message]:
    """The conversation, with messages merged that cannot follow each other.

    System messages become user messages if the template has none. A late one, which
    follows other messages, changes if the template cannot print it there:

        after             it becomes
        user, tool        a reminder, at the end of that message
        assistant         a user message with a reminder: the model has not said it
    """
    # Messages that become one are merged together: one by one, a long text is copied
    # for each message that it is made of (L-113).
    runs: list[list[Message]] = []
    is_head = True
    last_role = ""
    for message in messages:
        is_system = message["role"] == "system"
        is_head = is_head and is_system
        must_be_first = is_system and not traits.has_late_system
        printable = message
        if must_be_first and not is_head:
            printable = _as_reminder(message, last_role)
        elif is_system and not traits.has_system:
            printable = {**message, "role": "user"}

        is_repeat = printable["role"] == last_role
        can_repeat = traits.has_repeats or last_role == "tool"
        if is_repeat and (must_be_first or not can_repeat):
            runs[-1].append(printable)
        else:
            runs.append([printable])
        last_role = printable["role"]
    return [_merge_messages(run) for run in runs]


def _as_reminder(message: Message, last_role: str) -> Message:
    """A late system message in a form that can follow a message of `last_role`."""
    role = "user" if last_role == "assistant" else last_role
    return {"role": role, "content": wrap_reminder(message["content"])}


def _merge_messages(messages: Sequence[Message]) -> Message:
    """One message with the content, the thinking and the calls of all."""
    if len(messages) == 1:
        return messages[0]
    merged: Message = {}
    for message in messages:
        merged |= message
    for name in ("content", "reasoning_content"):
        texts = [message.get(name) for message in messages]
        if any(texts):
            merged[name] = "\n\n".join(filter(None, texts))
    calls: list[JsonObject] = []
    for message in messages:
        calls += message.get("tool_calls", ())
    if calls:
        merged["tool_calls"] = calls
    return merged


def _find_losses(messages: Iterable[Message], text: str) -> list[str]:
    """Kinds of text in messages that `text` lacks or has in another order.

    Thinking is not looked for: templates leave out past thinking on purpose (L-26). Nor
    are arguments that are numbers or objects: each template has its own form for them.
    """
    losses: list[str] = []
    end = 0  # of the last of all texts that were found
    # Each text is looked for after the one before it. But a template may sort the
    # results of tools: each is looked for near `end`, then after what precedes all.
    start = 0
    for message in messages:
        if message["role"] != "tool":
            start = end
        near = max(start, end - _SORTED_CHARACTERS)
        for kind, words in _printed_texts(message):
            if losses.count(kind) == _MAX_LOST:
                continue  # each time, all of the text would be searched
            words_end = _find_end(words, text, near)
            if words_end < 0:
                words_end = _find_end(words, text, start)
            end = max(end, words_end)
            if words_end < 0:
                losses.append(kind)
    return losses


def _printed_texts(message: Message) -> Iterator[tuple[str, str]]:
    """The texts of a message that a template should print, each with its kind."""
    yield f"{message['role']} messages", message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield "tool calls", function["name"]
        for value in function["arguments"].values():
            if isinstance(value, str):
                yield "tool-call arguments", value


def _find_end(words: str, text: str, start: int) -> int:
    """Where `words` end, as they are or escaped as in JSON; -1: not after `start`."""
    plain = words.strip()
    in_json = json.dumps(plain, ensure_ascii=False)[1:-1]
    # Most often one form is near and the other is nowhere. So the part that is searched
    # grows until one form is found: the whole text is not searched for the other.
    n_searched = len(in_json) + _FIRST_SEARCH
    while True:
        search_end = start + n_searched
        ends = []
        for form in {plain, in_json}:
            position = text.find(form, start, search_end)
            if position >= 0:
                ends.append(position + len(form))
        if ends or search_end >= len(text):
            return min(ends, default=-1)
        n_searched *= 4


def _has_names(names: Iterable[str], text: str) -> bool:
    """Whether all names are in a text. In their order, they are found in one pass."""
    start = 0
    for name in names:
        position = text.find(name, start)
        if position < 0:
            position = text.find(name)
        if position < 0:
            return False
        start = position
    return True


# -- 2 prompts -------------------------------------------------------------------------

_NOTE_END: Final = re.compile("</system-reminder>")
_MAX_TOKEN_CHARACTERS: Final = 8  # on average, of a prompt that may fit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPositions:
    """Where the parts of a prompt begin and end, in model tokens from its start.

    system prompt, tools | user | assistant | user            | generation prompt
                system_end                  last_user_start   generation_start

    Some templates print system prompt and tools in the first user message. Then
    `system_end` is inside that message.
    """

    message_starts: tuple[int, ...] = ()  # also of the generation prompt; ascending
    system_end: int = 0  # after system prompt and tools; 0 if there is no user message
    last_user_start: int | None = None  # of the last user message
    note_ends: tuple[int, ...] = ()  # of the first reminders in the first user message
    generation_start: int = 0  # the length of a prompt without generation prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt as text and as tokens."""

    text: str = ""  # of a replayed prompt, what was rendered of it
    ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32), compare=False)
    positions: PromptPositions = PromptPositions()
    starts_in_reasoning: bool = False  # the prompt ends inside an open thinking block
    n_left_out: int = 0  # about so many tokens are missing; the prompt is refused

    @property
    def n_tokens(self) -> int:
        """Of the whole prompt; if some were left out, an estimate."""
        return len(self.ids) + self.n_left_out


class ChatTemplate:
    """Chat template and tokenizer of one model. Set up once, then for any thread."""

    MAX_NOTE_ENDS: Final = 4
    MEMO_BYTES: Final = 500_000  # of texts that depend on template kwargs alone

    def __init__(
        self,
        tokenizer: Any,
        config: Config,
        *,
        think_start: str,
        think_end: str,
        ends: set[int],
    ) -> None:
        """Probe the template of a fast tokenizer, or of mlx-lm's wrapper of one.

        `ends`: the tokens that end a reply; without them no call can be spliced.
        """
        thinking_tags = (think_start, think_end)
        self._config = config
        self._encoder = Encoder(tokenizer)
        self._renderer = Renderer(tokenizer, self._encoder.find_added)
        self.source = self._renderer.source  # of the template; "" if there is none
        self.traits = probe_traits(self._renderer, self._encoder)
        self.shaper = _MessageShaper(
            markup=self._encoder.find_markup(self.source, thinking_tags),
            part_separator=self.traits.part_separator,
            thinking_tags=thinking_tags,
            merges_thinking=self.traits.merges_thinking,
            hides_writes=config.normalize_write_tool_content_for_prompt,
        )
        self._canonicalizer = Canonicalizer(
            config,
            part_separator=self.traits.part_separator,
            thinking_tags=thinking_tags,
        )
        added_tokens = self._encoder.added_tokens
        end_tokens = [added_tokens[i].content for i in ends if i in added_tokens]
        self.find_end_token = token_pattern(end_tokens).search
        # Samples by template kwargs, and generation prompts by the last role as well.
        self._probed_texts: Memo[str] = Memo(self.MEMO_BYTES)
        self.tenant = ""  # whose requests these are, for all memos
        self._logged_losses: set[str] = set()
        self._warn()

    def _warn(self) -> None:
        if self._config.normalize_write_tool_content_for_prompt:
            name = "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT"
            logger.warning("%s: a past write that is rendered is a digest", name)
        if not self._encoder.can_split:
            logger.warning(
                "this tokenizer's added tokens take the spaces around them: each"
                " request tokenizes all of its text again"
            )
        if self.source and not self.traits.has_system:
            logger.warning(
                "this chat template has no system role: user messages carry that text"
            )

    def for_tenant(self, tenant: str) -> ChatTemplate:
        """The same template for the requests of one tenant. It shares the memos."""
        template = copy(self)
        template.tenant = tenant
        template._encoder = self._encoder.for_tenant(tenant)
        template._canonicalizer = self._canonicalizer.for_tenant(tenant)
        return template

    def canonicalize(
        self,
        messages: Iterable[Message],
        *,
        check_client: Callable[[], None] = assume_client,
    ) -> tuple[CanonicalMessage, ...]:
        """The canonical messages of a conversation. `check_client` may end it."""
        return canonicalize_messages(
            messages, self._canonicalizer, check_client=check_client
        )

    def clear_memos(self) -> None:
        """Forget canonical messages and tokens of texts; they can be made again."""
        self._canonicalizer.memo.clear()
        self._encoder.memo.clear()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. All markup in it is markup, and none is added."""
        ids: list[int] = self._encoder.encode_raw(text).tolist()
        return ids

    def decode(self, ids: TokenIds) -> str:
        """The text of tokens, markup included; images have none."""
        text_ids = ids[ids >= 0].tolist()
        return self._encoder.tokenizer.decode(text_ids, skip_special_tokens=False)

    def tokenize_completion(
        self, prompt: str | Sequence[int], limit: EncodingLimit | None = None
    ) -> RenderedPrompt:
        """The prompt of a completion. Raises BadRequest: empty, or an unknown id."""
        text = ""
        ids = np.array([], np.int32)
        n_left_out = 0
        tokenizer = self._encoder.tokenizer
        if not isinstance(prompt, str):
            ids = np.array(prompt, np.int32)
        elif prompt:
            text = prompt
            ids, n_left_out = self._encoder.encode_completion(
                text, limit or EncodingLimit()
            )
        if n_left_out:
            return RenderedPrompt(ids=ids, n_left_out=n_left_out)

        if not ids.size:
            raise BadRequest("the prompt is empty", param="prompt")
        unknown_ids = ids[(ids < 0) | (ids >= tokenizer.get_vocab_size())]
        if unknown_ids.size:
            raise BadRequest(
                f"{unknown_ids[0]} is not a token of this model", field="prompt"
            )
        positions = PromptPositions(
            message_starts=compute_msg_token_boundaries(ids, self.traits),
            generation_start=len(ids),
        )
        return RenderedPrompt(text=text, ids=ids, positions=positions)

    def render_prompt(
        self, request: ChatRequest, messages: Iterable[Message] | None = None
    ) -> RenderedPrompt:
        """The whole prompt of a request; of `messages` instead of its own, if given.

        Raises BadRequest: the template refuses the messages.
        """
        if request.kind == "completion":
            limit = EncodingLimit(
                request.max_counted_tokens, request.check_client, field="prompt"
            )
            return self.tokenize_completion(request.prompt or "", limit)
        if not self.source:
            raise BadRequest(
                "this model has no chat template, only completions", param="messages"
            )
        shaped = [self.shaper.shape(m) for m in messages or request.messages]
        folded = _fold_messages(shaped, self.traits)
        text = self.render_text(folded, request)
        self._log_losses(folded, request.tools, text)
        head = self._measure_head(text, shaped, request)
        return self.tokenize_prompt(
            text,
            request,
            last_role=folded[-1]["role"],
            recorded=RenderedPrompt(positions=head),
        )

    def count_least_tokens(
        self, request: ChatRequest, *, max_context_tokens: int
    ) -> int:
        """About how many tokens a chat has at least; 0 if that is not worth counting.

        why(L-129): a chat that cannot fit is refused before it is rendered. A chat of
        few characters may fit, so its tokens are not counted. A number over
        `max_counted_tokens` is an estimate.
        """
        printed = [self._printed_of(message) for message in request.messages]
        if self.traits.has_tools:
            printed.append(request.tools)
        n_characters = sum(map(_count_characters, chain.from_iterable(printed)))
        if n_characters <= _MAX_TOKEN_CHARACTERS * max_context_tokens:
            return 0

        limit = EncodingLimit(request.max_counted_tokens, request.check_client)
        return self._encoder.count_tokens(" ".join(_texts_of(printed)), limit)

    def _printed_of(self, message: Message) -> Sequence[JsonObject | str]:
        """What any template prints of a message.

        Of a reply only its calls: its content may have past thinking in it, which many
        templates leave out.
        """
        if message["role"] == "assistant":
            if self.shaper.hides_writes or not self.traits.has_tools:
                return []
            return [call["function"] for call in message.get("tool_calls", ())]
        return text_parts(message["content"])

    def render_context_key(self, request: ChatRequest) -> bytes:
        """A digest of all that recorded tokens depend on, except the messages.

        That is the template, the tools, and template kwargs; but not a kwarg that only
        changes the generation prompt: users change the effort in mid-session.
        """
        kwargs = self.template_kwargs(request)
        sample = self._probed_texts.get_or_make(
            _as_key(kwargs),
            lambda: render_sample(self._renderer, self.traits, kwargs),
            tenant=self.tenant,
        )
        parts = [self.source, request.tools, sample]
        return sha256(marshal.dumps(parts, 2)).digest()

    # The methods below are for Splice as well.

    def template_kwargs(self, request: ChatRequest) -> JsonObject:
        """What the template reads beside messages and tools.

        Later ones win: the setting PRESERVE_THINKING, what the client has sent, and
        `request.thinking`, which is made of all fields that switch thinking.
        """
        preserve: JsonObject = {}
        if self._config.preserve_thinking:
            preserve = self.traits.preserve_kwargs
        sent = self.shaper.break_markup(dict(request.template_kwargs))
        return {**preserve, **sent, **self.traits.thinking_kwargs[request.thinking]}

    def render_text(self, messages: list[Message], request: ChatRequest) -> str:
        """The text of messages that are shaped and folded. Raises BadRequest."""
        request.check_client()
        tools = self.shaper.break_markup(request.tools)
        kwargs = self.template_kwargs(request)
        return self._renderer.render(messages, tools=tools, kwargs=kwargs)

    def tokenize_prompt(
        self,
        text: str,
        request: ChatRequest,
        *,
        last_role: str,
        recorded: RenderedPrompt,
    ) -> RenderedPrompt:
        """The prompt of a rendered text, after the tokens and positions of `recorded`.

        `last_role`: of the last message, which the generation prompt depends on.
        """
        new_ids, n_left_out = self._encoder.encode_prompt(text, request)
        ids = np.concatenate([recorded.ids, new_ids])
        if n_left_out:
            return RenderedPrompt(ids=ids, n_left_out=n_left_out)

        n_recorded = len(recorded.ids)
        new_starts = compute_msg_token_boundaries(new_ids, self.traits)
        new_starts = tuple(n_recorded + start for start in new_starts)
        last_user_start = recorded.positions.last_user_start
        user_starts = [match.start() for match in self.traits.user_start.finditer(text)]
        if user_starts:
            last_user = text[user_starts[-1] :]
            last_user_start = len(ids) - self._count_tokens(last_user, request)
        generation_prompt = self._find_generation_prompt(last_role, request)
        if not text.endswith(generation_prompt):
            generation_prompt = ""
        n_generation = self._count_tokens(generation_prompt, request)

        positions = replace(
            recorded.positions,
            message_starts=recorded.positions.message_starts + new_starts,
            last_user_start=last_user_start,
            generation_start=len(ids) - n_generation,
        )
        return RenderedPrompt(
            text=remove_breaks(text),
            ids=ids,
            positions=positions,
            starts_in_reasoning=self._opens_thinking(generation_prompt),
        )

    def starts_with_added_token(self, text: str) -> bool:
        """Whether tokens before this text cannot merge with it."""
        return self._encoder.find_added.match(text) is not None

    def _measure_head(
        self, text: str, messages: list[Message], request: ChatRequest
    ) -> PromptPositions:
        """The positions that are the same in all prompts of a conversation.

        `messages`: shaped, and not folded. why(L-51): the prompt of a new session
        differs from that of an older one in the first user message, often after a
        reminder. So KV is worth keeping at the ends of these reminders. (A reminder may
        end inside a token. Then the position is that of a token near its end.)
        """
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            return PromptPositions()
        until_user = messages[: roles.index("user") + 1]
        starts = list(islice(self.traits.user_start.finditer(text), 2))
        head_end = self._find_head_end(
            text, user_starts=starts, messages=until_user, request=request
        )

        text_end = starts[1].start() if len(starts) > 1 else len(text)
        notes = _NOTE_END.finditer(text, head_end, text_end)
        note_ends = [
            self._count_tokens(text[: note.end()], request)
            for note in islice(notes, self.MAX_NOTE_ENDS)
        ]
        return PromptPositions(
            note_ends=tuple(note_ends),
            system_end=self._count_tokens(text[:head_end], request),
        )

    def _find_head_end(
        self,
        text: str,
        *,
        user_starts: list[re.Match[str]],
        messages: list[Message],
        request: ChatRequest,
    ) -> int:
        """Where system prompt and tools end, in characters.

        `messages` end with the first user message. In most templates system prompt and
        tools end where this message starts:

            <|im_start|>user\nhi<|im_end|>            before <|im_start|>
            <start_of_turn>user\nYou help.\n\nhi    after "help." (Gemma 3)
        """
        if not user_starts:
            return self._find_folded_end(text, messages, request)
        words = messages[-1]["content"].strip()
        words_start = skip_spaces(text, user_starts[0].end())
        words_end = skip_spaces(text, words_start + len(words))
        has_words = text.startswith(words, words_start)
        if has_words and self._encoder.find_added.match(text, words_end):
            # The user's words fill this message: nothing else is in it.
            return user_starts[0].start()
        folded_end = self._find_folded_end(text, messages, request)
        return max(user_starts[0].start(), folded_end)

    def _find_folded_end(
        self, text: str, messages: list[Message], request: ChatRequest
    ) -> int:
        """Where a prompt differs if the user says something else, in characters.

        `messages` end with the first user message. why(L-108): system prompt and tools
        may stand in that message (Gemma 3, Llama 3, any template without system role),
        or the message may begin without an added token (RWKV). White space before the
        user's words is left out: it can be one token with them.
        """
        other_words = {**messages[-1], "content": _NONCE}
        try:
            folded = _fold_messages([*messages[:-1], other_words], self.traits)
            other_text = self.render_text(folded, request)
        except BadRequest:
            return 0
        head, found_words, _ = other_text.partition(_NONCE)
        if not found_words:
            return 0
        return len(text[: count_common(head, text)].rstrip())

    def _count_tokens(self, text: str, request: ChatRequest) -> int:
        """The tokens of a part of a text that begins or ends where a message begins."""
        return len(self._encoder.encode_prompt(text, request).ids)

    def _opens_thinking(self, generation_prompt: str) -> bool:
        """Whether it ends inside a thinking block."""
        start_tag, end_tag = self.shaper.thinking_tags
        if not start_tag:
            return False
        last_start = generation_prompt.rfind(start_tag)
        return last_start > generation_prompt.rfind(end_tag)

    def _find_generation_prompt(self, last_role: str, request: ChatRequest) -> str:
        kwargs = self.template_kwargs(request)
        return self._probed_texts.get_or_make(
            f"{last_role} {_as_key(kwargs)}",
            lambda: probe_generation_prompt(self._renderer, last_role, kwargs),
            tenant=self.tenant,
        )

    def _log_losses(
        self, messages: list[Message], tools: Iterable[JsonObject], text: str
    ) -> None:
        """Log each kind of text that the template loses, once. Of tools: names."""
        losses = set(_find_losses(messages, text))
        names = [self.shaper.break_markup(tool["function"]["name"]) for tool in tools]
        if not _has_names(names, text):
            losses.add("tools")
        for kind in sorted(losses - self._logged_losses):
            logger.warning("the model's chat template loses or moves %s", kind)
            self._logged_losses.add(kind)


def _count_characters(value: str | JsonObject) -> int:
    """Of a text, or about so many of a JSON value."""
    return len(value if isinstance(value, str) else marshal.dumps(value))


def _texts_of(value: object) -> Iterator[str]:
    """The texts in a JSON value, with the names in objects.

    The arguments of a call are read: an escaped letter has more tokens than a letter.
    """
    places: list[object] = [value]
    while places:
        match places.pop():
            case str(text):
                yield text
            case {"name": str(name), "arguments": str(arguments)}:
                places += [name, _parse_arguments(arguments)]
            case dict() as members:
                places += [*members, *members.values()]
            case list() | tuple() as items:
                places += items


def _as_key(kwargs: JsonObject) -> str:
    return json.dumps(kwargs, sort_keys=True)


# -- 3 splicing ------------------------------------------------------------------------
# The ledger has the tokens of a past: a conversation up to a reply as the model has
# generated it. What the template prints after a reply is found by rendering the same
# conversation with a word of our own, the nonce, for the words of that reply:
#
#     recorded  ...<|im_start|>assistant\n<think>\nhm\n</think>\n\nHello!
#     rendered  ...<|im_start|>assistant\nNONCE<|im_end|>\n<|im_start|>user\nBye ...
#                                              |- suffix ----------------------
#     prompt    the recorded tokens, and then the tokens of the suffix
#
# In a reply with calls, the nonce is the only argument of the last call, and the other
# calls have no arguments. A closing then stands between the nonce and the suffix:
#
#     rendered  ...<tool_call>\n{"q": "NONCE"}\n</tool_call><|im_end|>\n ...
#                                          |- closing -----|- suffix ---
#
# How the reply ended decides what of this follows the recorded tokens:
#
#     by an end token        The suffix. It begins with the end token, which is not
#                            recorded, as the template may print another one.
#     cut at the limit       Closing and suffix, if it is text. A call that was cut is
#                            never continued.
#     after its first call   The rest of the closing, of which the reply has a part
#                            (`parallel_tool_calls: false`), and the suffix.
#
# why(L-44): a suffix may depend on all that comes before it, so the whole past is
# rendered. An excerpt of the past gave some models a wrong suffix.

# In two parts: a client may send this very file, and must not send the word.
_NONCE: Final = "zq7" + "seam5qz"

MAX_CLOSING_TOKENS: Final = 64  # in which the end of a call is looked for


class SpliceRefused(Exception):
    """It is not certain what follows recorded tokens. The message is a word or two."""


class Splice(NamedTuple):
    """New messages, to be rendered after recorded tokens."""

    template: ChatTemplate
    request: ChatRequest  # its messages are the new ones
    recorded: RenderedPrompt  # the tokens and their positions; its text is not used
    is_cut: bool  # the last recorded reply has no end token, nor all of its closing
    past_messages: list[Message]  # those that were recorded; the last one is that reply

    def render(self) -> RenderedPrompt:
        """The whole prompt. Raises SpliceRefused: what must follow is not certain."""
        return self._render_after(self.past_messages)

    def guess(self) -> RenderedPrompt | None:
        """The same, rendered after an excerpt of the past, which is much faster.

        It may be wrong (L-44): render() tells. None if it is refused, or saves little.
        """
        excerpt = _excerpt(self.past_messages)
        if 2 * len(excerpt) < len(self.past_messages):
            with suppress(SpliceRefused):
                return self._render_after(excerpt)
        return None

    def _render_after(self, past_messages: list[Message]) -> RenderedPrompt:
        new_messages = [self.template.shaper.shape(m) for m in self.request.messages]
        suffix = self._render_suffix(past_messages, new_messages)
        if _find_losses(new_messages, suffix.text):
            raise SpliceRefused("lost text")
        closing = self._missing_closing(suffix.closing) if self.is_cut else ""
        # The end token that the model has generated is not recorded, so the suffix must
        # print one: an added token, whichever the template prints there. A reply that
        # was cut has generated none.
        if not self.is_cut and not self.template.starts_with_added_token(suffix.text):
            raise SpliceRefused("end token")
        # The last message may be merged into the one before it.
        last_messages = [_with_nonce(past_messages[-1]), *new_messages]
        folded = _fold_messages(last_messages, self.template.traits)
        return self.template.tokenize_prompt(
            closing + suffix.text,
            self.request,
            last_role=folded[-1]["role"],
            recorded=self.recorded,
        )

    def _missing_closing(self, closing: str) -> str:
        """What the recorded reply lacks of the closing.

        After a text that is the whole closing. A call has ended with a part of it
        (L-120), which is found by comparing the ends of both, letter by letter:

            the reply ends with    {"q": "x"}
            the closing is         "}\n</tool_call>
            the reply lacks        \n</tool_call>
        """
        if not self.past_messages[-1].get("tool_calls"):
            return closing
        written = self.template.decode(self.recorded.ids[-MAX_CLOSING_TOKENS:])
        end = _find_written_end(closing, written)
        if end == 0:
            raise SpliceRefused("closer")
        return closing[end:]

    def _render_suffix(
        self, past_messages: list[Message], new_messages: list[Message]
    ) -> _Suffix:
        """What the template prints after the words of the last past message."""
        reply = _with_nonce(past_messages[-1])
        shape = self.template.shaper.shape
        past = [shape(message) for message in past_messages[:-1]]
        text = self._render_after_nonce([*past, reply, *new_messages])

        # The first end token of the suffix stands before the new messages.
        find_end_token = self.template.find_end_token
        words_start = text.find(new_messages[0]["content"])
        text_before = text[: max(words_start, 0)]  # "" also if there are no words
        end = find_end_token(text_before)
        if end is None:
            # The first new message is empty, or the template changes its text. To find
            # where it begins, render canned words in its place.
            canned = [_with_canned_words(m, n) for n, m in enumerate(new_messages)]
            canned_text = self._render_after_nonce([*past, reply, *canned])
            text_before = canned_text.partition(canned_words(0))[0]
            end = find_end_token(text_before)

        if end is None:
            if "tool_calls" in reply:
                raise SpliceRefused("closer")
            return _Suffix("", text)
        if not text.startswith(text_before[: end.end()]):
            raise SpliceRefused("closer")  # canned words have changed it
        closing = text_before[: end.start()]
        return _Suffix(closing, text.removeprefix(closing))

    def _render_after_nonce(self, messages: list[Message]) -> str:
        """The text after the nonce. Raises SpliceRefused: it is not there, or twice."""
        folded = _fold_messages(messages, self.template.traits)
        try:
            text = self.template.render_text(folded, self.request)
        except BadRequest as refusal:
            raise SpliceRefused("refused") from refusal
        if text.count(_NONCE) != 1:
            raise SpliceRefused("nonce" if text else "refused")
        return text.partition(_NONCE)[2]


def _find_written_end(closing: str, written: str) -> int:
    """Up to where a text has the closing at its end; 0 if it has nothing of it.

    That is the end of the part of the closing which has most last letters in common
    with the text; of several such parts, of the first one.
    """
    written_end = 0
    most_equal = 0
    for end in range(1, len(closing) + 1):
        n_equal = count_common(closing[:end][::-1], written[::-1])
        if n_equal > most_equal:
            written_end = end
            most_equal = n_equal
    return written_end


class _Suffix(NamedTuple):
    """What a template prints after the words of a reply."""

    closing: str  # up to the end token
    text: str  # from there on: new messages and generation prompt


def _with_nonce(reply: Message) -> Message:
    """The reply with the nonce for its content, or for the last argument of its calls.

    Thinking, and text beside calls, are left out: templates print these in other
    places, or refuse them.
    """
    calls = [_replace_arguments(call, {}) for call in reply.get("tool_calls", ())]
    if not calls:
        return {"role": "assistant", "content": _NONCE}
    calls[-1] = _replace_arguments(calls[-1], {"q": _NONCE})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_canned_words(message: Message, index: int) -> Message:
    """The message with words of our own; the first one always has some."""
    words = canned_words(index)
    content = words if message["content"] or index == 0 else ""
    calls = [
        _replace_arguments(call, {"q": words}) for call in message.get("tool_calls", ())
    ]
    return drop_nulls({**message, "content": content, "tool_calls": calls or None})


def _excerpt(messages: list[Message]) -> list[Message]:
    """The messages that nearly always decide what a template prints after all of them.

    why(L-63): the first one, the last one from the user, and the last steps, which are
    four messages and those before them up to a reply.
    """
    last_user = 0
    last_steps = 0
    last_four = len(messages) - 4
    for index, message in enumerate(messages):
        if message["role"] == "user":
            last_user = index
        elif message["role"] == "assistant" and index < last_four:
            last_steps = index
    indices = {0, last_user, *range(last_steps, len(messages))}
    return [messages[index] for index in sorted(indices)]


# region TOKEN HASHES ==========================================================
# Names for the tokens of a prompt: hashes of its blocks. PREFIX CACHE finds KV by them.
#
#     block 0 = sha256(root    + tokens 0 to 255)      of blocks of 256 tokens
#     block 1 = sha256(block 0 + tokens 256 to 511)
#
# So a name stands for all tokens up to the end of its block. The root stands for all
# else that must be the same: the model, whose KV it is, and the tenant, who alone may
# use it.
#
# The model has the same token ids for every image. So that another image is another
# prefix (L-57), negative markers made of the image's digest stand in their place. The
# first marker of an image is odd, all others are even:
#
#     ids as rendered    12   7  900  900  900   5        900: a patch of the image
#     ids with markers   12   7  -13  -88  -40   5        -13: the image begins
#
# Public   common_prefix_length, inject_image_markers, image_starts, is_inside_image,
#          block_hashes
# Uses     API TYPES
# Thread   any; pure


def common_prefix_length(first: TokenIds, second: TokenIds) -> int:
    """How many leading tokens are the same."""
    n_shorter = min(len(first), len(second))
    differs = first[:n_shorter] != second[:n_shorter]
    if not differs.any():
        return len(differs)
    return int(differs.argmax())


def inject_image_markers(ids: TokenIds, image: slice, *, digest: str) -> TokenIds:
    """A copy of `ids` with markers at the positions of an image: at least one.

    `digest`: of the image, 64 hex digits, which are eight words of 32 bits. Each token
    gets a word, in turn; models make dozens of tokens of an image, so all are used.
    """
    n_tokens = image.stop - image.start
    assert n_tokens > 0
    digest_words = np.frombuffer(bytes.fromhex(digest), "<u4")
    words = np.resize(digest_words, n_tokens)  # repeated as often as needed

    # 30 bits of each word become an even number from -2 down to -2**31, the least
    # int32. The first marker is one more, so it is odd.
    numbers = (words & 0x3FFFFFFF).astype(np.int64)
    marked_ids = ids.copy()
    marked_ids[image] = -2 - 2 * numbers
    marked_ids[image.start] += 1
    return marked_ids


def image_starts(tokens: TokenIds) -> list[int]:
    """The positions at which an image begins, ascending."""
    is_start = (tokens < 0) & (tokens % 2 == 1)
    return np.flatnonzero(is_start).tolist()


def is_inside_image(tokens: TokenIds, position: int) -> bool:
    """Whether the token at `position` is of an image, but not its first.

    Then a cut before it would part the image.
    """
    if position >= len(tokens):
        return False
    token = int(tokens[position])
    return token < 0 and token % 2 == 0


def block_hashes(
    tokens: npt.ArrayLike,
    block_size: int,
    *,
    root: bytes,
    first_hashes: Sequence[bytes] = (),
) -> list[bytes]:
    """The names of all full blocks.

    `first_hashes`: of the first ones, if known. They must be of the same tokens, root
    and block size, which is not checked.
    """
    token_bytes = np.asarray(tokens, dtype="<i4").tobytes()
    block_bytes = 4 * block_size
    n_blocks = len(token_bytes) // block_bytes

    hashes = list(first_hashes[:n_blocks])
    name = hashes[-1] if hashes else root
    for index in range(len(hashes), n_blocks):
        start = index * block_bytes
        block = token_bytes[start : start + block_bytes]
        name = sha256(name + block).digest()
        hashes.append(name)
    return hashes


# region LEDGER ================================================================
# Replay what was fed and generated before, token by token; render only what is new.
# A prompt then begins with exactly the tokens whose KV is in the cache.
#
# Example: an agent in a tool loop. Its client drops thinking and prints the arguments
# of calls in its own way; `call+` is the call as it was generated.
#
#     the client sends        the prompt: replayed           | rendered
#  1  system user                                            | system user
#  2  ... call result         system user call+              | result
#  3  ... call result         system user call+ result call+ | result
#
# Example: a client puts another message id, A, then B, into its system prompt.
#
#  1  system(A) user                                         | system(A) user
#  2  system(B) ... user      system(A) user reply+          | user [id is now B]
#
# system(A) stays as it was first rendered. That the id is now B is restated once, in
# the newest message. A third request with B restates nothing: the model has read it.
#
#  1 Keys       A conversation is recognized by its canonical messages, in which A and B
#               are the same placeholder. Each prefix of it has a key: a hash chained
#               over their digests, from a root for template, tools and switches.
#  2 Restating  Pinned values (ids, dates) stay as first rendered; notes (reminders,
#               late system messages) come and go. Where the replayed prompt is out of
#               date, the newest message states what holds now.
#  3 Records    A transcript, the tokens of a conversation up to a reply, is recorded
#               after each reply under the key of that conversation. (A prompt needs
#               none: rendered again, it gives the same tokens.) System messages and
#               tools are recorded as they were first rendered.
#  4 Whose      Conversations of several people may have the same key. Which records may
#               be used for whom is decided here.
#  5 Store      Finds records by key, and drops those used least recently.
#  6 Planner    Replay the longest transcript that fits and render the remaining
#               messages after it. Where that cannot be done, render all as sent.
#
# From other sections: of a CanonicalMessage the `original` is rendered and the `digest`
# compared; `pinned` are its PinnedValues (`value`, or a whole `block`), `notes` its
# Notes (`text`), each with the name of its `rule`. A ChatTemplate renders whole
# prompts, a Splice what follows recorded tokens; it may raise SpliceRefused. A Session
# has a name, or is anonymous.
#
# Public   Ledger, PromptPlanner, PromptPlan, Conversation, GeneratedReply, ShownEnd
# Uses     CONFIG, LOGGING, WORK BUDGET, API TYPES, CANONICALIZATION, SAVED RECORDS,
#          THINKING RESTORE, CHAT TEMPLATE
# Owns     _ledger_lock
# Thread   any


# -- 1 keys ----------------------------------------------------------------------------

_INPUT_ROLES: Final = frozenset({"user", "tool"})  # of the messages that replies answer


class Conversation(NamedTuple):
    """The canonical messages of a request, and a key for each prefix of them."""

    messages: tuple[CanonicalMessage, ...] = ()
    prefix_keys: tuple[bytes, ...] = ()  # [n] is the key of the first n messages
    session: Session = ANONYMOUS

    @property
    def context_key(self) -> bytes:
        """Stands for all else that the prompt depends on: template, tools, switches."""
        return self.prefix_keys[0]

    @property
    def head_key(self) -> bytes:
        """Of its head: the system messages that it begins with."""
        return self.prefix_keys[self.n_system]

    @property
    def n_system(self) -> int:
        """How many system messages it begins with."""
        n_system = 0
        for message in self.messages:
            if message.role not in SYSTEM_ROLES:
                break
            n_system += 1
        return n_system

    def transcript_keys(self, n_messages: int) -> tuple[bytes, ...]:
        """The keys of transcripts that end with the last of the first `n_messages`.

        Two keys: of the reply as it was recorded whole, and of any reply here that its
        client has left. Empty if the last message is no reply.
        """
        if self.messages[n_messages - 1].role != "assistant":
            return ()
        prompt_key, key = self.prefix_keys[n_messages - 1 : n_messages + 1]
        return key, _left_reply_key(prompt_key)


def _chain_keys(root: bytes, messages: Iterable[CanonicalMessage]) -> tuple[bytes, ...]:
    """The keys of all prefixes; that of no messages is the root."""
    keys = [root]
    for message in messages:
        keys.append(_extend_key(keys[-1], message))
    return tuple(keys)


def _extend_key(key: bytes, message: CanonicalMessage) -> bytes:
    # The ids of calls are not part of the digest: clients change them.
    return sha256(key + message.role.encode() + message.digest).digest()


def _left_reply_key(prompt_key: bytes) -> bytes:
    """The key of all replies to a prompt that their clients have left, wherever."""
    return sha256(prompt_key + b"left").digest()


def _newest_input(messages: Sequence[CanonicalMessage]) -> int:
    """The index of the newest user or tool message; -1 if there is none."""
    for index in reversed(range(len(messages))):
        if messages[index].role in _INPUT_ROLES:
            return index
    return -1


# -- 2 restating -----------------------------------------------------------------------
# Pure functions. A new class of volatile fields needs a place in StatedValues, to know
# what the model has read of it, a step in restate_messages() that uses it, and a column
# in the table of part 4.


class FieldPlace(NamedTuple):
    """Where a pinned value stands."""

    message_index: int
    rule: str  # its name


class PrivateValue(NamedTuple):
    """A pinned value that crosses no sessions (L-106)."""

    place: FieldPlace
    value: str


class StatedValues(NamedTuple):
    """The volatile values that the model has read by the end of a prompt."""

    # The last ones at each place: a message has one place for all fields of a rule.
    pinned: Mapping[FieldPlace, set[str]] = {}
    notes: tuple[str, ...] = ()  # in the order in which they were stated
    private: frozenset[PrivateValue] = frozenset()  # all that were ever stated

    def has_pinned(self, place: FieldPlace, value: str) -> bool:
        return value in self.pinned.get(place, ())


NOTHING_STATED: Final = StatedValues()


class Restated(NamedTuple):
    """Messages to render, and what the prompt states once they are rendered."""

    messages: list[Message]
    stated: StatedValues


def restate_messages(
    messages: Sequence[CanonicalMessage], start: int, stated: StatedValues
) -> Restated:
    """Copy messages[start:], to be rendered after a prompt of messages[:start].

    `stated` is what that prompt states. The client may have changed messages[:start]
    since, so the newest input states whatever the prompt lacks or has wrong. A note
    that only moved to a new message is left out there.
    """
    past_messages = messages[:start]
    newest_index = _newest_input(messages)
    moved_notes = _find_moved_notes(messages, start, stated)
    unstated_notes = [
        text for text in _note_texts(past_messages) if text not in stated.notes
    ]
    sent_anyway = set(_note_texts(messages[start : newest_index + 1]))
    missing_notes = [text for text in unstated_notes if text not in sent_anyway]
    missing_notes = list(dict.fromkeys(missing_notes))  # each once

    copies: list[Message] = []
    new_notes: list[str] = []
    for index, message in enumerate(messages[start:], start):
        moved_here = moved_notes[index - start]
        paragraphs = _paragraphs(message, moved_here)
        stated_here = [
            text for text in _note_texts([message]) if text not in moved_here
        ]
        if index == newest_index:
            paragraphs += [*missing_notes, _corrections(past_messages, stated)]
            stated_here += missing_notes

        content = "\n\n".join(filter(None, paragraphs))
        copies.append({**message.original, "content": content})
        new_notes += dict.fromkeys(stated_here)  # each once

    old_notes = stated.notes
    client_replaces_notes = bool(unstated_notes)
    if client_replaces_notes:
        # why(L-98): it put a note into a past message that we have not stated, so notes
        # it no longer sends are withdrawn: if one returns, state it again. Otherwise a
        # note that it no longer sends is only an old one.
        sent_notes = set(_note_texts(messages))
        old_notes = tuple(text for text in old_notes if text in sent_notes)
    pinned = _merge_pinned(messages, stated)
    private = stated.private | _private_values(messages)
    return Restated(copies, StatedValues(pinned, (*old_notes, *new_notes), private))


def _paragraphs(message: CanonicalMessage, moved_notes: set[str]) -> list[str]:
    """What a message has to state: its notes and its text, without the moved notes.

    Only notes are left out. A text that reads like one of them is the client's.
    """
    notes_above = [n.text for n in message.notes_above if n.text not in moved_notes]
    notes_below = [n.text for n in message.notes_below if n.text not in moved_notes]
    moved_inside = [note for note in message.inline_notes if note.text in moved_notes]
    # To mask a note is to remove it, with the line breaks around it.
    text = mask_volatile(message.original["content"], moved_inside)
    return [*notes_above, text, *notes_below]


def _find_moved_notes(
    messages: Sequence[CanonicalMessage], start: int, stated: StatedValues
) -> list[set[str]]:
    """For each of messages[start:], its notes that have only moved there.

    They are not stated again. A client that hangs a reminder on its newest message:

        stated                     "plan"
        past messages, before      user "plan", assistant
        past messages, now         user, assistant
        new messages               user "plan"               moved

    The stated notes are read from the last one back. Of one rule, in the order stated:

        stated         past, now   new      the new "plan" is
        "plan"         -           "plan"   moved
        "plan" "edit"  "edit"      "plan"   news: "edit" came after it and stayed (L-96)
        "plan"         "plan"      "plan"   news: the first one is still there (L-84)
        "plan" "edit"  -           "plan"   news: "edit" is gone, and with it its rule

    Rules are not recorded, so that of a note in no message is unknown. It may have been
    any, so all that was stated before such a note is news.
    """
    rule_of = {note.text: note.rule for message in messages for note in message.notes}
    past_notes = set(_note_texts(messages[:start]))
    rules_that_stayed: set[str] = set()
    n_moved: Counter[str] = Counter()  # a note that was stated twice may move twice
    for text in reversed(stated.notes):
        if text not in rule_of:
            break  # gone, and its rule unknown: what was stated before it is news
        if text in past_notes:
            rules_that_stayed.add(rule_of[text])
        elif rule_of[text] not in rules_that_stayed:
            n_moved[text] += 1

    moved_notes = []
    for message in messages[start:]:
        moved_here = {text for text in _note_texts([message]) if n_moved[text] > 0}
        n_moved.subtract(moved_here)
        moved_notes.append(moved_here)
    return moved_notes


def _corrections(messages: Sequence[CanonicalMessage], stated: StatedValues) -> str:
    """A line, or the whole block, for each pinned value that was stated differently."""
    lines = []
    for place, pinned in _pinned_fields(messages):
        if not stated.has_pinned(place, pinned.value):
            block = pinned.block.strip()
            lines.append(block or f"[{pinned.rule} is now {pinned.value}]")
    return "\n".join(dict.fromkeys(lines))


def _merge_pinned(
    messages: Sequence[CanonicalMessage], stated: StatedValues
) -> Mapping[FieldPlace, set[str]]:
    """The pinned values once these are stated; if none is new, the object is shared."""
    updates: dict[FieldPlace, set[str]] = {}
    for place, pinned in _pinned_fields(messages):
        updates.setdefault(place, set()).add(pinned.value)
    merged = {**stated.pinned, **updates}
    return stated.pinned if merged == stated.pinned else merged


def _note_texts(messages: Iterable[CanonicalMessage]) -> list[str]:
    return [note.text for message in messages for note in message.notes]


def _pinned_fields(
    messages: Sequence[CanonicalMessage],
) -> Iterator[tuple[FieldPlace, PinnedValue]]:
    for index, message in enumerate(messages):
        for pinned in message.pinned:
            yield FieldPlace(index, pinned.rule), pinned


def _private_values(messages: Sequence[CanonicalMessage]) -> frozenset[PrivateValue]:
    return frozenset(
        PrivateValue(place, pinned.value)
        for place, pinned in _pinned_fields(messages)
        if pinned.is_private
    )


# -- 3 records -------------------------------------------------------------------------


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class LedgerRecord:
    """What the ledger has under a key. The ledger's lock guards what changes."""

    nbytes: int  # estimated, without shared_parts()
    session_id: str = ""  # for Ledger.forget(), see GeneratedReply; it changes
    last_used: float = 0.0  # seconds; it changes

    def shared_parts(self) -> Iterable[object]:
        """What other records may hold as well."""
        return ()

    def pack(self) -> SavedRecord:
        """It, to be saved. Its class has its inverse, unpack()."""
        raise NotImplementedError

    def total_bytes(self) -> int:
        """About how many bytes it takes alone."""
        return self.nbytes + sum(map(sys.getsizeof, self.shared_parts()))


class ShownEnd(NamedTuple):
    """Where a client may have left a reply: it was sent all text of so many tokens."""

    n_tokens: int
    n_letters: int  # of the content


class GeneratedReply(NamedTuple):
    """The tokens of a reply, and for whom they were generated."""

    # The last one is the end token, unless the reply is cut. Those of a reply that its
    # client has left may go on to an end token, and to calls: cut_to() drops these.
    ids: TokenIds
    is_cut: bool  # it is replayed without its end token; always, if its client left it
    block_hashes: Sequence[bytes]  # of the prompt
    session_id: str  # as people see it: the client's, or made by session_id_for()
    finished_at: float  # seconds, on the clock of Ledger.expire()
    shown_text: str = ""  # of a reply that its client has left: the content
    shown_ends: Sequence[ShownEnd] = ()  # and where it may have; ascending


@dataclass(eq=False, slots=True, kw_only=True)
class Transcript(LedgerRecord):
    """The tokens of a conversation up to a reply.

    The end token of the reply is not among them: templates print it before the next
    message. Before the end token of a cut reply they may print more (a line break),
    which a whole reply has generated itself. `reply.is_cut` tells Splice to render it.
    """

    # Of each request its new prompt tokens, then the tokens of its reply. Transcripts
    # that continue this one share them.
    segments: tuple[TokenIds, ...]
    positions: PromptPositions  # of the last prompt
    reply: GeneratedReply
    stated: StatedValues
    # Of each message and the reply: as sent, or as it was put back (L-137), or "".
    thinking: tuple[str, ...]
    session: Session
    last_call_id: str  # of the last tool call generated here; "" if there is none
    part_of: Transcript | None = None  # the record that cut_to() has cut

    @classmethod
    def of(
        cls, plan: PromptPlan, reply: CanonicalMessage, generated: GeneratedReply
    ) -> Transcript:
        """What to record of a prompt and its reply."""
        segments: tuple[TokenIds, ...] = ()
        last_call_id = ""
        if plan.transcript is not None:
            segments = plan.transcript.segments
            last_call_id = plan.transcript.last_call_id

        prompt_ids = plan.rendered.ids[plan.n_replayed :].copy()
        reply_ids = generated.ids if generated.is_cut else generated.ids[:-1]
        for call in reply.original.get("tool_calls", ()):
            last_call_id = call["id"]
        return cls(
            nbytes=_transcript_bytes(plan, generated),
            session_id=generated.session_id,
            last_used=generated.finished_at,
            segments=(*segments, prompt_ids, reply_ids),
            positions=plan.rendered.positions,
            reply=generated,
            stated=plan.stated,
            thinking=(*plan.thinking, reply.thinking),
            session=plan.conversation.session,
            last_call_id=last_call_id,
        )

    @property
    def n_messages(self) -> int:
        return len(self.thinking)

    def cut_to(self, reply: CanonicalMessage) -> Transcript | None:
        """The transcript up to where the client's copy of the reply ends.

        It is None if no delta ended there.

        A client that leaves a reply may have some deltas less than were generated
        (L-121). White space at the end does not count:

            deltas shown          I have | looked. | It is | four
            tokens so far         2        4         6       7
            the client sends      I have looked.     -> ends after 4 tokens
            the client sends      I have loo         -> None
        """
        if not self.reply.shown_ends:
            return self  # nobody left it
        text = reply.original["content"].rstrip()
        shown_text = self.reply.shown_text
        has_calls = "tool_calls" in reply.original
        if not text or has_calls or not shown_text.startswith(text):
            return None
        ends = self.reply.shown_ends
        index = bisect_left(ends, len(text), key=lambda end: end.n_letters)
        if index == len(ends) or shown_text[len(text) : ends[index].n_letters].strip():
            return None
        *segments, reply_ids = self.segments
        shown_ids = reply_ids[: ends[index].n_tokens]
        return replace(self, segments=(*segments, shown_ids), part_of=self)

    def is_same(self, other: Transcript) -> bool:
        """Whether both serve the same requests, with the same tokens."""
        return (
            self.session_id == other.session_id
            and self.session.name == other.session.name
            and self.stated == other.stated
            and self.thinking == other.thinking
            and self.last_call_id == other.last_call_id
            and self.reply.shown_ends == other.reply.shown_ends
            and self.reply.is_cut == other.reply.is_cut
            and np.array_equal(
                np.concatenate(self.segments), np.concatenate(other.segments)
            )
        )

    def pack(self) -> SavedRecord:
        arrays = [*self.segments, self.reply.ids]
        texts = [text.encode("utf-8", "surrogatepass") for text in self.thinking]
        parts = [array.astype("<i4").tobytes() for array in arrays] + texts
        value = {
            "nbytes": self.nbytes,
            "n_segments": len(self.segments),
            "part_bytes": [len(part) for part in parts],  # an empty one is not saved
            "positions": asdict(self.positions),
            "is_cut": self.reply.is_cut,
            "shown_text": self.reply.shown_text,
            "shown_ends": list(self.reply.shown_ends),
            "stated": _pack_stated(self.stated),
            "session": self.session.name,
            "last_call_id": self.last_call_id,
        }
        saved_parts = [part for part in parts if part]
        return SavedRecord(
            self.session_id, self.last_used, {"transcript": value}, saved_parts
        )

    @classmethod
    def unpack(cls, saved: SavedRecord, texts: dict[bytes, str]) -> Transcript:
        """The transcript of a record. `texts`: those unpacked before, by their bytes.

        Raises LookupError, TypeError or ValueError if it is no transcript.
        """
        value = saved.value["transcript"]
        saved_parts = iter(saved.parts)
        parts = [next(saved_parts) if n else b"" for n in value["part_bytes"]]
        n_segments = value["n_segments"]
        arrays = [np.frombuffer(part, "<i4") for part in parts[: n_segments + 1]]
        for part in parts[n_segments + 1 :]:
            texts.setdefault(part, part.decode("utf-8", "surrogatepass"))
        positions = value["positions"]
        reply = GeneratedReply(
            ids=arrays[-1],
            is_cut=value["is_cut"],
            block_hashes=(),
            session_id=saved.session_id,
            finished_at=saved.last_used,
            shown_text=value["shown_text"],
            shown_ends=[ShownEnd(*end) for end in value["shown_ends"]],
        )
        return cls(
            nbytes=value["nbytes"],
            session_id=saved.session_id,
            last_used=saved.last_used,
            segments=tuple(arrays[:-1]),
            positions=PromptPositions(
                message_starts=tuple(positions.pop("message_starts")),
                note_ends=tuple(positions.pop("note_ends")),
                **positions,
            ),
            reply=reply,
            stated=_unpack_stated(value["stated"]),
            thinking=tuple(texts[part] for part in parts[n_segments + 1 :]),
            session=Session(value["session"]),
            last_call_id=value["last_call_id"],
        )

    def shared_parts(self) -> Iterable[object]:
        """Its tokens and thinking: transcripts that continue this one hold them too."""
        for segment in self.segments:
            yield segment if segment.base is None else segment.base
        yield from self.thinking


def _transcript_bytes(plan: PromptPlan, generated: GeneratedReply) -> int:
    """About how many bytes a transcript takes, without its shared parts."""
    n_tokens = len(plan.rendered.ids) - plan.n_replayed + len(generated.ids)
    n_messages = len(plan.conversation.messages) + 1
    n_pointers = len(generated.block_hashes) + 2 * n_messages
    n_pointers += 20 * len(generated.shown_ends)
    stated = plan.stated
    n_stated = len(stated.private)
    if plan.transcript is None or plan.transcript.stated.pinned is not stated.pinned:
        n_stated += len(stated.pinned)  # else the other transcript counts them

    # The texts (of notes, and what was shown) are taken to be as large as their tokens.
    return 4 * n_tokens + 8 * n_pointers + 300 * n_stated + 1_000


_START_BYTES: Final = 600  # of each record below, without what it has rendered


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedHead(LedgerRecord):
    """The system messages that prompts begin with, as they were first rendered."""

    restated: Restated

    @classmethod
    def of(cls, restated: Restated) -> RenderedHead:
        n_bytes = _START_BYTES + memory_bytes(*restated)
        return cls(nbytes=n_bytes, restated=restated)

    def pack(self) -> SavedRecord:
        messages, stated = self.restated
        value = {"messages": messages, "stated": _pack_stated(stated)}
        return SavedRecord(self.session_id, self.last_used, {"head": value})

    @classmethod
    def unpack(cls, saved: SavedRecord) -> RenderedHead:
        value = saved.value["head"]
        stated = _unpack_stated(value["stated"])
        return cls.of(Restated(value["messages"], stated))


@dataclass(eq=False, slots=True, kw_only=True)
class RenderedTools(LedgerRecord):
    """The tools that prompts begin with, as they were first rendered."""

    text: bytes  # as JSON: a tenth of the memory of what it stands for
    digest: bytes  # of the tools, in this order and with members in theirs

    @classmethod
    def of(cls, tools: tuple[JsonObject, ...], digest: bytes) -> RenderedTools:
        text = json.dumps(tools, ensure_ascii=False).encode()
        return cls(nbytes=_START_BYTES + len(text), text=text, digest=digest)

    def read(self) -> tuple[JsonObject, ...]:
        return tuple(from_json(self.text))

    def pack(self) -> SavedRecord:
        value = {"digest": self.digest.hex()}
        return SavedRecord(
            self.session_id, self.last_used, {"tools": value}, [self.text]
        )

    @classmethod
    def unpack(cls, saved: SavedRecord) -> RenderedTools:
        (text,) = saved.parts
        digest = bytes.fromhex(saved.value["tools"]["digest"])
        return cls(nbytes=_START_BYTES + len(text), text=text, digest=digest)


@dataclass(eq=False, slots=True, kw_only=True)
class StartReference(LedgerRecord):
    """The key of the head that a session has, or of a conversation's tools."""

    nbytes: int = _START_BYTES
    start_key: bytes

    def pack(self) -> SavedRecord:
        value = {"start_key": self.start_key.hex()}
        return SavedRecord(self.session_id, self.last_used, {"reference": value})

    @classmethod
    def unpack(cls, saved: SavedRecord) -> StartReference:
        return cls(start_key=bytes.fromhex(saved.value["reference"]["start_key"]))


PromptStart = RenderedHead | RenderedTools | StartReference


def _pack_stated(stated: StatedValues) -> JsonObject:
    return {
        "pinned": [[*place, sorted(values)] for place, values in stated.pinned.items()],
        "notes": stated.notes,
        "private": [[*place, value] for place, value in stated.private],
    }


def _unpack_stated(packed: JsonObject) -> StatedValues:
    pinned = {
        FieldPlace(index, rule): set(values) for index, rule, values in packed["pinned"]
    }
    private = {
        PrivateValue(FieldPlace(index, rule), value)
        for index, rule, value in packed["private"]
    }
    return StatedValues(pinned, tuple(packed["notes"]), frozenset(private))


def _unpack_record(saved: SavedRecord, texts: dict[bytes, str]) -> LedgerRecord:
    """A record as it was. Raises LookupError, TypeError, ValueError: it is none."""
    record: LedgerRecord
    match saved.value:
        case {"transcript": _}:
            return Transcript.unpack(saved, texts)
        case {"head": _}:
            record = RenderedHead.unpack(saved)
        case {"tools": _}:
            record = RenderedTools.unpack(saved)
        case _:
            record = StartReference.unpack(saved)
    record.session_id = saved.session_id
    record.last_used = saved.last_used
    return record


# -- 4 whose is it? --------------------------------------------------------------------
# Pure functions. All conversations that begin with the same words have the same keys:
# Ann and Bob both say "hi" and are told "Hello!". May the transcript of Bob's greeting
# be replayed for Ann? What is not part of the key decides: sessions, thinking, notes
# and private values.
#
# "The last call" is the last one that was generated in the transcript. Its id is random
# and not part of the key, so a client that sends it was given it in this conversation,
# and may have changed notes and values since (L-103). If the request does not send it,
# "the last call" is message 0. "Another head" has a private value in the system prompt
# that the transcript has never stated: whoever clones a chat has the ids of its calls,
# too (L-106). By the session of the request:
#
#                                  request -> transcript:   transcript -> request:
#                                  every note must have     every private value must
#                                  been stated, from        be sent, from
#     the transcript's session     not checked              not checked
#     another one that has a name  the last call            message 0
#     anonymous                    the last call            the last call
#     anonymous, another head      the last call            message 0
#
# Thinking is alike for all four: the client may drop it, but not change it.
#
# Of other records the key says for whom they are:
#
#     heads       for all that send the same private values and notes; a session with a
#                 name has its first head again, whatever values it sends
#     tools       of a conversation up to its first call: for the same private_owner()
#     thinking    the same: see THINKING RESTORE


def may_replay(transcript: Transcript, conversation: Conversation) -> bool:
    """Whether a transcript with a key of this conversation may be replayed for it."""
    messages = conversation.messages
    session = conversation.session
    for message, thinking in zip(messages, transcript.thinking, strict=False):
        if message.thinking not in ("", thinking):
            return False
    if session.is_same(transcript.session):
        return True

    # why(L-85): without one of the request's notes it is somebody else's. It may have
    # stated more: clients drop notes as they grow old.
    call_index = _find_last_call(transcript, messages)
    notes = _note_texts(messages[call_index : transcript.n_messages])
    if not set(notes).issubset(transcript.stated.notes):
        return False

    # why(L-106): no prompt has a private value that somebody else has sent.
    unsent = transcript.stated.private - _private_values(messages)
    head_values = _private_values(messages[: conversation.n_system])
    has_other_head = not head_values.issubset(transcript.stated.private)
    if session.name is not None or has_other_head:
        return not unsent
    return all(private.place.message_index < call_index for private in unsent)


def _find_last_call(
    transcript: Transcript, messages: Sequence[CanonicalMessage]
) -> int:
    """The index of the message with the last call generated in it; 0 if none has it."""
    call_id = transcript.last_call_id
    for index in reversed(range(transcript.n_messages)):
        calls = messages[index].original.get("tool_calls", ())
        if call_id and any(call.get("id") == call_id for call in calls):
            return index
    return 0


class Mismatch(NamedTuple):
    """How badly a transcript fits a conversation that it may be replayed for.

    Of several the smallest is replayed: what is compared first is named first.
    """

    is_foreign: bool  # of another session, or of one that is not known
    n_unstated: int  # pinned values of the request that it has not stated (L-99)
    n_unsent: int  # notes that it has stated and the request does not send (L-96)
    age: float  # its last use as a negative time: the later, the smaller


def find_mismatch(transcript: Transcript, conversation: Conversation) -> Mismatch:
    """How badly this one fits."""
    n_unstated = 0
    for place, pinned in _pinned_fields(conversation.messages):
        if not transcript.stated.has_pinned(place, pinned.value):
            n_unstated += 1
    sent_notes = _note_texts(conversation.messages)
    n_unsent = len(set(transcript.stated.notes).difference(sent_notes))
    is_foreign = not conversation.session.is_same(transcript.session)
    return Mismatch(is_foreign, n_unstated, n_unsent, -transcript.last_used)


def _shared_head_key(conversation: Conversation, stated: StatedValues) -> bytes:
    """The key of a head for all that may have it in common. `stated`: by the head.

    why(L-93): a head with other fields in other places is another head. why(L-106): so
    is one with other private values or notes.
    """
    key = conversation.head_key
    places = tuple(stated.pinned)
    return _digest("head", key, places, sorted(stated.private), stated.notes)


def _session_head_key(conversation: Conversation, stated: StatedValues) -> bytes:
    """The key under which a session has its head; b"" if it is anonymous."""
    name = conversation.session.name
    if name is None:
        return b""
    return _digest("session", name, conversation.head_key, tuple(stated.pinned))


def _conversation_tools_key(
    messages: Iterable[CanonicalMessage], session: Session
) -> bytes:
    """The key under which a conversation has its tools; b"" before its first call."""
    key = b""
    owner = b""
    for message in messages:
        key = _extend_key(key, message)
        owner = private_owner(owner, message, session)
        if "tool_calls" in message.original:
            return key + owner
    return b""


def _digest(*parts: object) -> bytes:
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()


# -- 5 store ---------------------------------------------------------------------------


_LEDGER: Final = "ledger"  # the kind of its saved records


class Chosen[Value](NamedTuple):
    """What a prompt begins with, and what to remember if the request is accepted."""

    value: Value
    starts: Mapping[bytes, PromptStart]  # by key


class Ledger:
    """What is remembered of prompts: transcripts, and heads and tools as rendered.

    For any thread, in memory. It records and finds; what a prompt becomes is decided by
    PromptPlanner. A model of its own needs a ledger of its own: no key names the model.

    why(L-128): all of it is counted in bytes, and of a request that is refused nothing
    is remembered. Until a request is accepted, only its plan holds what it begins with.
    The ledger finds it there, so that requests planned at the same time begin alike.
    """

    MAX_ALTERNATIVES: Final = 4  # transcripts under one key

    def __init__(self, config: Config, saved: TenantRecords | None = None) -> None:
        """What `saved` has from an earlier server is here after load()."""
        self._config = config
        self._saved = saved or RecordFile().of_tenant("")
        # Guards the four below, and what changes in the records.
        self._ledger_lock = threading.Lock()
        # By key; those used least recently first.
        self._records: OrderedDict[bytes, Sequence[LedgerRecord]] = OrderedDict()
        self._nbytes = 0
        self._holders: Counter[int] = Counter()  # of each shared part, by its id()
        self._planned: WeakValueDictionary[bytes, LedgerRecord] = WeakValueDictionary()

    def load(self) -> None:
        """Remember what an earlier server has saved."""
        records: dict[bytes, list[LedgerRecord]] = {}
        texts: dict[bytes, str] = {}
        for key, saved in self._saved.load(_LEDGER):
            with suppress(LookupError, TypeError, ValueError, StopIteration):
                record = _unpack_record(saved, texts)
                records.setdefault(key, []).append(record)
        with self._ledger_lock:
            for key, found in records.items():
                self._keep(key, found)
            self._expire(time.monotonic())

    def choose_head(
        self, conversation: Conversation, head: Restated
    ) -> Chosen[Restated]:
        """The head to render: the first that may stand for `head`, or `head` itself.

        why(L-38): a new id in one of its messages would change all that follows it.
        """
        session_key = _session_head_key(conversation, head.stated)
        start_key = self._find_reference(session_key)
        start = self._find_start(start_key, RenderedHead)
        if start is None:
            start_key = _shared_head_key(conversation, head.stated)
            start = self._find_or_plan(
                start_key, RenderedHead, lambda: RenderedHead.of(head)
            )

        starts: dict[bytes, PromptStart] = {start_key: start}
        if session_key:
            starts[session_key] = StartReference(start_key=start_key)
        return Chosen(start.restated, starts)

    def choose_tools(
        self, request: ChatRequest, messages: Iterable[CanonicalMessage]
    ) -> Chosen[tuple[JsonObject, ...]]:
        """The tools to show for a request that has these messages.

        Templates print them first: after another list of tools nothing can be replayed.
        why(L-89): lists that differ only in order are shown in the order seen first.
        why(L-91): a request without tools, but with calls in its history, is shown the
        tools of its conversation. Clients ask for summaries like this.
        """
        conversation_key = _conversation_tools_key(messages, Session.of(request))
        tools = request.tools
        start: RenderedTools | None
        if tools:
            texts = sorted(json.dumps(tool, sort_keys=True) for tool in tools)
            start_key = sha256("\0".join(["tools", *texts]).encode()).digest()
            # Version 2: equal bytes for equal tools with the same order of members.
            digest = sha256(marshal.dumps(tools, 2)).digest()
            start = self._find_or_plan(
                start_key, RenderedTools, lambda: RenderedTools.of(tools, digest)
            )
            shown_tools = tools if start.digest == digest else start.read()
        else:
            start_key = self._find_reference(conversation_key)
            start = self._find_start(start_key, RenderedTools)
            if start is None:
                return Chosen((), {})
            shown_tools = start.read()

        starts: dict[bytes, PromptStart] = {start_key: start}
        if conversation_key:
            starts[conversation_key] = StartReference(start_key=start_key)
        return Chosen(shown_tools, starts)

    def remember(self, plan: PromptPlan, *, session_id: str, now: float) -> None:
        """Keep what the prompt of an accepted request begins with.

        why(L-136): only this is a use, of that and of the transcript that it replays.
        What is found for a request that is refused stays as old as it was.
        `session_id`: see GeneratedReply.
        """
        transcript = plan.transcript
        with self._ledger_lock:
            if transcript is not None:
                (transcript.part_of or transcript).last_used = now
            for key, start in plan.starts.items():
                start.last_used = now
                if isinstance(start, StartReference) or key not in self._records:
                    start.session_id = session_id
                    self._put(key, [start])
                else:
                    self._records.move_to_end(key)
                    self._saved.touch(_LEDGER, key)
            self._mark_past_used(plan.conversation)
            self._expire(now)

    def record(
        self, plan: PromptPlan, *, reply: CanonicalMessage, generated: GeneratedReply
    ) -> None:
        """Remember a reply. `reply`: as the client will send it back.

        If the client has left it, what it sends back may be shorter.
        """
        transcript = Transcript.of(plan, reply, generated)
        prompt_key = plan.conversation.prefix_keys[-1]
        key = _extend_key(prompt_key, reply)
        if generated.shown_ends:
            key = _left_reply_key(prompt_key)
        with self._ledger_lock:
            others = [
                t for t in self._find_transcripts(key) if not t.is_same(transcript)
            ]
            others.sort(key=lambda other: other.last_used)
            kept = others[-(self.MAX_ALTERNATIVES - 1) :]
            self._put(key, [*kept, transcript])
            self._mark_past_used(plan.conversation)
            self._expire(transcript.last_used)

    def candidates(self, conversation: Conversation) -> Iterator[Transcript]:
        """Transcripts to replay for this conversation, the longest first.

        Each ends before the newest input, in which changes are restated.
        """
        newest_index = _newest_input(conversation.messages)
        with self._ledger_lock:
            groups = [
                self._find_ending_at(conversation, n)
                for n in range(newest_index, 0, -1)
            ]

        for group in groups:
            fitting = [t for t in group if may_replay(t, conversation)]
            if fitting:
                yield min(fitting, key=lambda t: find_mismatch(t, conversation))

    def forget(self, session_id: str | None) -> None:
        """Drop what was recorded of a session; None: all.

        `session_id`: see GeneratedReply. Heads and tools that it has sent first become
        another session's that has a reference to them, if there is one. (Conversations
        without a session have none to heads.)
        """
        with self._ledger_lock:
            if session_id is not None:
                self._hand_over_starts(session_id)
            for key, records in list(self._records.items()):
                left = [r for r in records if session_id not in (None, r.session_id)]
                if len(left) < len(records):
                    self._put(key, left)
        self._saved.forget_parts()

    def _hand_over_starts(self, session_id: str) -> None:
        heirs = {
            record.start_key: record.session_id
            for record in chain.from_iterable(self._records.values())
            if isinstance(record, StartReference) and record.session_id != session_id
        }
        for key in heirs.keys() & self._records.keys():
            for record in self._records[key]:
                if record.session_id == session_id:
                    record.session_id = heirs[key]

    def expire(self, now: float) -> None:
        """Drop what was not used for LEDGER_TTL_SECONDS."""
        with self._ledger_lock:
            self._expire(now)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is recorded. (One integer is read: that needs no lock.)"""
        return self._nbytes

    def oldest_use(self) -> float:
        """When the record was used that was not used for longest.

        TENANTS compares ledgers by it, and then calls drop_oldest(). If that record is
        used in between, another is dropped, which costs no more than rendering it anew.
        """
        with self._ledger_lock:
            oldest = next(iter(self._records.values()), ())
            return max((record.last_used for record in oldest), default=math.inf)

    def drop_oldest(self) -> None:
        """Drop the record that was not used for longest."""
        with self._ledger_lock:
            key = next(iter(self._records), b"")
            self._put(key, ())

    def snapshot(self) -> dict[str, int]:
        """Counts for the status page."""
        with self._ledger_lock:
            n_records = Counter(map(type, chain.from_iterable(self._records.values())))
        return {
            "transcripts": n_records[Transcript],
            "heads": n_records[RenderedHead],
            "tools": n_records[RenderedTools],
            "bytes": self._nbytes,
        }

    def _find_or_plan[Start: LedgerRecord](
        self, key: bytes, kind: type[Start], make: Callable[[], Start]
    ) -> Start:
        """The start under a key, recorded or planned; if there is none, a new one."""
        start = self._find_start(key, kind)
        if start is not None:
            return start
        own_start = make()
        with self._ledger_lock:
            planned = self._planned.setdefault(key, own_start)
        assert isinstance(planned, kind)
        return planned

    def _find_reference(self, key: bytes) -> bytes:
        """The key of the start that is meant here; b"" if there is none."""
        reference = self._find_start(key, StartReference)
        return b"" if reference is None else reference.start_key

    def _find_start[Start: LedgerRecord](
        self, key: bytes, kind: type[Start]
    ) -> Start | None:
        with self._ledger_lock:
            for record in self._records.get(key, ()):
                if isinstance(record, kind):
                    return record
        return None

    # The methods below are called with the lock held.

    def _find_transcripts(self, key: bytes) -> list[Transcript]:
        records = self._records.get(key, ())
        return [record for record in records if isinstance(record, Transcript)]

    def _find_ending_at(
        self, conversation: Conversation, n_messages: int
    ) -> list[Transcript]:
        """The transcripts of the first messages, as far as the client has them."""
        reply = conversation.messages[n_messages - 1]
        transcripts = []
        for key in conversation.transcript_keys(n_messages):
            for transcript in self._find_transcripts(key):
                part = transcript.cut_to(reply)
                if part is not None:
                    transcripts.append(part)
        return transcripts

    def _put(self, key: bytes, records: Sequence[LedgerRecord]) -> None:
        """Replace the records under a key, in the file, too; [] removes it."""
        self._keep(key, records)
        kept = self._records.get(key, ())
        if kept:
            self._saved.put(_LEDGER, key, lambda: [record.pack() for record in kept])
        else:
            self._saved.remove(_LEDGER, key)

    def _keep(self, key: bytes, records: Sequence[LedgerRecord]) -> None:
        """Replace the records under a key; [] removes it.

        why(L-136): a record that alone is too large is not kept, or all others would go
        for it.
        """
        max_bytes = self._config.ledger_max_bytes
        kept = [record for record in records if record.total_bytes() <= max_bytes]
        for record in kept:
            self._count(record)
        for record in self._records.pop(key, ()):
            self._uncount(record)
        if kept:
            self._records[key] = kept

    def _count(self, record: LedgerRecord) -> None:
        """Add its bytes; why(L-135): those of a shared part with its first holder."""
        self._nbytes += record.nbytes
        for part in record.shared_parts():
            if not self._holders[id(part)]:
                self._nbytes += sys.getsizeof(part)
            self._holders[id(part)] += 1

    def _uncount(self, record: LedgerRecord) -> None:
        """Subtract its bytes; those of a shared part with its last holder."""
        self._nbytes -= record.nbytes
        for part in record.shared_parts():
            self._holders[id(part)] -= 1
            if not self._holders[id(part)]:
                del self._holders[id(part)]
                self._nbytes -= sys.getsizeof(part)

    def _mark_past_used(self, conversation: Conversation) -> None:
        """Move the transcripts of a conversation to the end, the shortest last.

        So a transcript expires after those that continue it and share its segments.
        """
        for n_messages in range(len(conversation.messages), 0, -1):
            for key in conversation.transcript_keys(n_messages):
                if key in self._records:
                    self._records.move_to_end(key)

    def _expire(self, now: float) -> None:
        """Drop the least recently used while they are too old, or all are too large.

        The order is that of conversations, `last_used` that of single transcripts: an
        older one may stand after a younger one that continues it, and goes with it.
        """
        max_idle_seconds = self._config.ledger_ttl_seconds or math.inf
        while self._records:
            key, oldest = next(iter(self._records.items()))
            idle_seconds = now - max(record.last_used for record in oldest)
            is_full = self._nbytes > self._config.ledger_max_bytes
            if not is_full and idle_seconds <= max_idle_seconds:
                return
            self._put(key, [])


# -- 6 planner -------------------------------------------------------------------------

_MAX_TRIES: Final = 3  # transcripts per request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """A prompt, how it was made, and what the ledger needs to record its reply."""

    rendered: RenderedPrompt
    conversation: Conversation = field(default_factory=Conversation)
    stated: StatedValues = NOTHING_STATED
    tools: tuple[JsonObject, ...] = ()  # as the prompt shows them
    transcript: Transcript | None = None  # that is replayed
    n_replayed: int = 0  # tokens of the transcript, at the start of `rendered`
    refusal: str = ""  # why the longest transcript was not replayed
    thinking: tuple[str, ...] = ()  # of each message, see Transcript
    unverified: Splice | None = None  # set if `rendered` is its guess
    starts: Mapping[bytes, PromptStart] = field(default_factory=dict)  # to remember

    @property
    def can_be_recorded(self) -> bool:
        return bool(self.conversation.prefix_keys)  # has none if it is no chat


@dataclass(eq=False, slots=True)
class PromptPlanner:
    """Makes the prompts of chats: replays what the ledger has and renders the rest."""

    config: Config
    metrics: CacheMetrics
    ledger: Ledger
    healing: HealingStore
    # Context keys for which a guess was wrong.
    unguessable: LRUCache = field(default_factory=lambda: LRUCache(256))

    def plan(
        self, request: ChatRequest, template: ChatTemplate, *, room: int
    ) -> PromptPlan:
        """Make the prompt of a chat; verify() it before a token of the reply is sent.

        `room`: tokens that the prompt may have. A longer one goes without the thinking
        of past turns, and may still be too long.
        Raises BadRequest: the chat template refuses the messages.
        """
        messages = template.canonicalize(
            request.messages, check_client=request.check_client
        )
        n_dropped = sum(len(message.dropped) for message in messages)
        self.metrics.bump("telemetry_dropped", n_dropped)

        sent_tools = request.tools
        chosen = self.ledger.choose_tools(request, messages)
        request = replace(request, tools=chosen.value)
        plan = self._plan_unlimited(request, template, messages)

        # Tools that the client did not send must not take the room for the reply.
        reply_room = min(request.max_tokens, room // 8)
        is_tight = plan.rendered.n_tokens + reply_room > room
        if is_tight and chosen.value and not sent_tools:
            chosen = Chosen((), {})
            request = replace(request, tools=())
            plan = self._plan_unlimited(request, template, messages)

        if plan.rendered.n_tokens > room:
            shorter_plan = self._render_as_sent(
                request, template, plan.conversation, drops_thinking=True
            )
            if shorter_plan.rendered.n_tokens < plan.rendered.n_tokens:
                plan = replace(shorter_plan, refusal=plan.refusal)
        starts = {**plan.starts, **chosen.starts}
        return replace(plan, tools=request.tools, starts=starts)

    def verify(self, plan: PromptPlan) -> bool:
        """Whether a prompt is what it would be without a guess.

        If not, the caller cancels it and plans again: guesses are over for this
        template with these tools (the last 256 such pairs are noted). This renders all
        messages, so it is called when the model is at work on the prompt already.
        """
        if plan.unverified is None:
            return True
        time.sleep(0.0005)  # why(L-63): lets the model thread begin
        with suppress(SpliceRefused):
            exact = plan.unverified.render()
            # == compares all but the ids: an array has no single truth value.
            has_same_ids = np.array_equal(exact.ids, plan.rendered.ids)
            if has_same_ids and exact == plan.rendered:
                return True
        self.unguessable[plan.conversation.context_key] = True
        return False

    def _plan_unlimited(
        self,
        request: ChatRequest,
        template: ChatTemplate,
        messages: tuple[CanonicalMessage, ...],
    ) -> PromptPlan:
        """Replay the longest transcript that can be, or render all as sent."""
        keys = _chain_keys(template.render_context_key(request), messages)
        conversation = Conversation(messages, keys, Session.of(request))
        plan = None
        refusals: list[str] = []
        n_tries = 0
        for transcript in self.ledger.candidates(conversation):
            if not self._may_show_thinking(transcript, messages):
                refusals.append("thinking is not preserved")
                continue  # as configured: no fault, and soon found
            try:
                plan = self._replay(request, template, conversation, transcript)
                break
            except SpliceRefused as error:
                # The metric has an old name; it counts refused replays.
                self.metrics.bump("exact_key_rejected_by_model_lcp")
                refusals.append(str(error))
            n_tries += 1
            if n_tries == _MAX_TRIES:
                break
        if plan is None:
            plan = self._render_as_sent(request, template, conversation)
        if not refusals:
            return plan

        # Counts plans without the longest transcript, as configured or for a fault.
        self.metrics.bump("ledger_seam_fallback")
        return replace(plan, refusal=refusals[0])

    def _may_show_thinking(
        self, transcript: Transcript, messages: Sequence[CanonicalMessage]
    ) -> bool:
        """Whether the prompt may have the thinking of this transcript, if it has any.

        With PRESERVE_THINKING=false thinking goes with the next message of the user.
        """
        if self.config.preserve_thinking or not any(transcript.thinking):
            return True
        new_messages = messages[transcript.n_messages :]
        return all(message.role != "user" for message in new_messages)

    def _replay(
        self,
        request: ChatRequest,
        template: ChatTemplate,
        conversation: Conversation,
        transcript: Transcript,
    ) -> PromptPlan:
        """Continue a transcript with the remaining messages. Raises SpliceRefused."""
        n_past = transcript.n_messages
        messages = conversation.messages
        new_messages, stated = restate_messages(messages, n_past, transcript.stated)
        healed = self._heal(new_messages, conversation)
        recorded_ids = np.concatenate(transcript.segments)
        splice = Splice(
            template,
            replace(request, messages=OriginalMessages(tuple(healed))),
            recorded=RenderedPrompt(ids=recorded_ids, positions=transcript.positions),
            is_cut=transcript.reply.is_cut,
            past_messages=[message.original for message in messages[:n_past]],
        )
        guess = None  # then render() tells whether this can be replayed at all
        if conversation.context_key not in self.unguessable:
            guess = splice.guess()
        return PromptPlan(
            rendered=splice.render() if guess is None else guess,
            conversation=conversation,
            stated=stated,
            transcript=transcript,
            n_replayed=len(recorded_ids),
            thinking=transcript.thinking + _thinking_of(healed),
            unverified=None if guess is None else splice,
        )

    def _render_as_sent(
        self,
        request: ChatRequest,
        template: ChatTemplate,
        conversation: Conversation,
        *,
        drops_thinking: bool = False,
    ) -> PromptPlan:
        """Render all messages as they were sent, but for the system's pinned values.

        These stay as they were first rendered, where that may be used, and where a
        newer message can restate them. `drops_thinking`: without the thinking that was
        sent from before the newest user message. None is put back then, either.
        """
        messages = conversation.messages
        n_system = conversation.n_system
        head = restate_messages(messages[:n_system], 0, NOTHING_STATED)
        can_restate = _newest_input(messages) >= 0
        starts: Mapping[bytes, PromptStart] = {}
        if head.stated.pinned and can_restate:
            head, starts = self.ledger.choose_head(conversation, head)

        later_messages, stated = restate_messages(messages, n_system, head.stated)
        if drops_thinking:
            user_indices = [n for n, m in enumerate(messages) if m.role == "user"]
            n_past = max(user_indices, default=n_system) - n_system
            for past_message in later_messages[:n_past]:
                past_message.pop("reasoning_content", None)
            # Recorded as if it were there: who sends it again may have this replayed.
            thinking = tuple(message.thinking for message in messages)
        else:
            later_messages = self._heal(later_messages, conversation)
            thinking = _thinking_of([*head.messages, *later_messages])
        return PromptPlan(
            rendered=template.render_prompt(request, [*head.messages, *later_messages]),
            conversation=conversation,
            stated=stated,
            starts=starts,
            thinking=thinking,
        )

    def _heal(
        self, newest: Sequence[Message], conversation: Conversation
    ) -> list[Message]:
        """Put the thinking back into copies of the newest messages."""
        contexts = reply_contexts(conversation.messages, conversation.session)
        start = len(conversation.messages) - len(newest)
        return heal_messages(newest, self.healing, contexts=contexts[start:])


def _thinking_of(messages: Iterable[Message]) -> tuple[str, ...]:
    """The thinking of each message; "" for all that are no replies."""
    thinking = []
    for message in messages:
        is_reply = message["role"] == "assistant"
        text = message.get("reasoning_content", "") if is_reply else ""
        thinking.append(text.strip())
    return tuple(thinking)


# region UPSTREAM ==============================================================
# What we lean on in mlx-lm and mlx-vlm although they do not document it: private names,
# attributes of their cache objects, the ways their models are called. Each has a
# function or class here with a plain name, and no other section uses the name itself,
# with two exceptions: KV STATE uses attributes of caches (1 below), and VISION MODEL
# calls `language_model` (4) with inputs of its own.
#
# A release may change any of it without a word. So the versions are pinned
# (requirements.txt), and a comment in front of each function names the test that fails
# then. Where one fails, upstream is read again before the pin moves.
#
#  1 Caches      what a layer keeps. KV STATE moves and copies it
#  2 Generation  sequences that decode together
#  3 Tokenizer   the tags of a reply
#  4 Vision      models of mlx-vlm
#  5 CUDA        what is slow there
#
# Public   LayerCaches, cache_leaves, LeafKind, leaf_kind, check_cache_kinds,
#          first_slot, window_tokens, drop_outside_window, make_recurrent,
#          to_mlx_lm_cache, ModelCall, Sampler, LogitsProcessor, TokenChoice,
#          SampledToken, feed_padded, TokenGenerator, REPLY_TAGS, set_reply_tag,
#          keep_no_words, read_tool_parser_source, LayerInputs, has_vision_class,
#          load_vision_model, load_image_processor, image_token_id, find_rope_index,
#          see_images_both_ways, embed_text, embed_image, read_gated_delta_in_chunks
# Uses     -
# Thread   model; the tokenizer's: any; mlx


# -- 1 caches --------------------------------------------------------------------------
#
# A layer has one cache object, or a CacheList of several. The innermost are its leaves.
# `state` is all that a leaf keeps: another leaf of its class becomes equal to it when
# that is set there. Most classes have a form for batches, with several rows:
#
#     leaf              its `state`                                    form for batches
#     KVCache           keys, values, n. of tokens                     BatchKVCache
#     RotatingKVCache   keys, values, n. of tokens, n. of first ones   BatchRotating-
#                       that stay, window, place of the next token     KVCache
#     ChunkedKVCache    keys, values, n. of tokens, chunk, its start   -
#     ArraysCache       list of arrays, padding and lengths of rows    itself
#
# In a batch, a short row of KV is padded at its beginning. The buffers of a KVCache
# have spare places at their end. All leaves have `nbytes` and `empty()`; those with a
# form for batches have `merge`, `extract`, `extend` and `filter`. KV STATE uses these,
# `keys`, `values` and `offset` of attention leaves, and the list `cache`, by name.
#
# What KV STATE does with a leaf follows from its kind, in LEAF_KINDS. A class of leaves
# that is not there is refused when a model is loaded.

LayerCaches = list[Any]  # one cache object of mlx-lm for each layer


# Pinned by test_upstream.py::test_cache_lists_contain_leaves
def cache_leaves(layer_caches: LayerCaches) -> list[Any]:
    """The leaves of all layers, in their order."""
    leaves: list[Any] = []
    for layer in layer_caches:
        leaves += getattr(layer, "caches", [layer])
    return leaves


# Pinned by test_vision.py, which runs a hybrid model of mlx-vlm
class _VisionRecurrentCache(ArraysCache):  # type: ignore[misc]
    """mlx-lm's recurrent cache, with two methods that layers of mlx-vlm call."""

    def update_window(
        self,
        index: int,
        source: mx.array,
        width: int,
        *,
        lengths: None = None,
    ) -> None:
        """Keep the last `width` inputs of a convolution."""
        assert lengths is None, "rows of different lengths are never fed together"
        start = source.shape[1] - width
        self[index] = mx.contiguous(source[:, start:])

    def update_recurrent(
        self,
        index: int,
        _n_tokens: int,
        update: Callable[..., Any],
    ) -> Any:
        """Replace a state; `update` makes (output, new state, ...) of (state, None)."""
        output, self[index] = update(self[index], None)[:2]
        return output, self[index]

    def extract(self, row: int) -> Any:
        """One row, as a cache of this class; upstream's method makes an ArraysCache."""
        arrays = [array[row : row + 1] for array in self.cache]
        return self.from_state((arrays, None, None))


# Pinned by test_upstream.py::test_each_class_of_leaves_has_its_kind
class LeafKind(NamedTuple):
    """What can be done with leaves of one kind."""

    name: str  # for people
    can_cut: bool = False  # it has KV of every token, so it is moved and cut as a span
    # A call of the model replaces its arrays, and writes into none. So the old ones can
    # be held without a copy, and read between the parts of a tapped call.
    can_hold: bool = False
    window_attribute: str = ""  # how many tokens it needs; "" if it has no window
    # No row can be sliced out of the arrays of a batch: its places are padded, or in
    # another order. Upstream's `extract` makes a leaf of a row then.
    must_extract: bool = False


_ATTENTION: Final = LeafKind("attention", can_cut=True)
_RECURRENT: Final = LeafKind("recurrent", can_hold=True)
_WINDOW: Final = LeafKind("window", window_attribute="max_size")
_CHUNK: Final = LeafKind("window", window_attribute="chunk_size")

LEAF_KINDS: Final[dict[type, LeafKind]] = {
    KVCache: _ATTENTION,
    BatchKVCache: _ATTENTION,
    RotatingKVCache: _WINDOW,
    BatchRotatingKVCache: _WINDOW._replace(must_extract=True),
    ChunkedKVCache: _CHUNK,
    ArraysCache: _RECURRENT,
    _VisionRecurrentCache: _RECURRENT,
}


# Pinned by test_upstream.py::test_each_class_of_leaves_has_its_kind
def leaf_kind(leaf: Any) -> LeafKind:
    """The kind of a leaf. Raises ValueError if its class is not known."""
    # why(L-05): by class. Leaves may say that they can be trimmed, and then cannot.
    kind = LEAF_KINDS.get(type(leaf))
    if kind is None:
        raise ValueError(f"a cache of kind {type(leaf).__name__} is not known here")
    return kind


# Pinned by test_upstream.py::test_caches_of_kinds_that_are_not_known_are_refused
def check_cache_kinds(layer_caches: LayerCaches) -> None:
    """Raises ValueError if a leaf is of no kind that is known.

    What it keeps might be lost when it is copied, or not be restored.
    """
    for leaf in cache_leaves(layer_caches):
        leaf_kind(leaf)


# Pinned by test_upstream.py::test_rows_of_a_batch_are_padded_at_their_beginning
def first_slot(leaf: Any, *, row: int) -> int:
    """Where in the buffers of an attention leaf the first token of a row is."""
    if type(leaf) is not BatchKVCache:
        return 0
    padding: list[int] = leaf.left_padding.tolist()
    return padding[row]


# Pinned by test_upstream.py::test_windows_say_how_many_tokens_they_read
def window_tokens(leaf: Any) -> int:
    """How many tokens of KV a window or chunk needs; 0 for other leaves."""
    attribute = leaf_kind(leaf).window_attribute
    n_tokens: int = getattr(leaf, attribute) if attribute else 0
    return n_tokens


# Pinned by test_upstream.py::test_a_window_is_no_longer_than_what_is_read_again
def drop_outside_window(leaf: Any) -> None:
    """Drop what a prefill slice has left before the window, if the leaf is a window.

    While a slice is read, a RotatingKVCache is longer than its window by the slice.
    """
    n_tokens = getattr(leaf, "_idx", 0)
    n_excess = n_tokens - getattr(leaf, "max_size", n_tokens)
    if n_excess <= 0:
        return
    leaf.keys = leaf._trim(n_excess, leaf.keys)
    leaf.values = leaf._trim(n_excess, leaf.values)
    leaf._idx = leaf.max_size


# Pinned by test_upstream.py::test_recurrent_caches_are_lists_of_arrays
def make_recurrent(arrays: list[mx.array]) -> Any:
    """A leaf that keeps these arrays as the state of a recurrent layer."""
    return ArraysCache.from_state((arrays, None, None))


# Pinned by test_vision_families.py
def to_mlx_lm_cache(layer: Any) -> Any:
    """mlx-lm's cache in the place of an empty one of mlx-vlm. Raises ValueError."""
    kind = type(layer).__name__
    match kind:
        case "KVCache":
            return KVCache()
        case "ArraysCache":
            return _VisionRecurrentCache(len(layer.cache))
        case "RotatingKVCache":
            return RotatingKVCache(max_size=layer.max_size, keep=layer.keep)
    raise ValueError(f"a cache of kind {kind} is not known here")


# -- 2 generation ----------------------------------------------------------------------

type ModelCall = Callable[..., mx.array]  # (tokens `(rows, n)`, cache=LayerCaches)
# log-probabilities `(1, vocab)` -> token `(1,)`
type Sampler = Callable[[mx.array], mx.array]
# (the tokens so far, logits `(1, vocab)`) -> logits
type LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


class TokenChoice(NamedTuple):
    """How the next token of a row is chosen from its logits."""

    sampler: Sampler
    processors: list[LogitsProcessor]
    context: list[int]  # tokens of the prompt but the last, as processors read them


class SampledToken(NamedTuple):
    """A token, and what it was sampled from."""

    token_id: int
    logprobs: mx.array  # `(vocab,)`, computed, of all tokens in the place of this one


# Pinned by test_upstream.py::test_rows_that_are_read_together_have_the_kv_of_each_alone
def feed_padded(
    model: ModelCall, token_rows: Sequence[list[int]], layer_caches: LayerCaches
) -> None:
    """Let the model read rows of unlike lengths in one call.

    `layer_caches`: attention alone, in batch form, with what comes before, if anything.
    Padding comes after a row, where none of its tokens sees it; then it is moved to
    where a batch has padding.
    """
    longest = max(map(len, token_rows))
    padding = [longest - len(token_ids) for token_ids in token_rows]
    padded_rows = [
        token_ids + [0] * n_missing
        for token_ids, n_missing in zip(token_rows, padding, strict=True)
    ]
    for layer in layer_caches:
        layer.prepare(right_padding=padding)
    model(mx.array(padded_rows), cache=layer_caches)
    for layer in layer_caches:
        layer.finalize()


# Pinned by test_upstream.py::test_generation_feeds_what_it_has_sampled
class TokenGenerator:
    """Rows that decode together, one token a step: mlx-lm's GenerationBatch.

    A token that a step returns is being fed already (L-10): the KV of all rows then
    ends with it, and the token after it is being computed. No row ends by itself.
    """

    def __init__(
        self,
        model: ModelCall,
        tokens: mx.array,
        layer_caches: LayerCaches,
        choices: Sequence[TokenChoice],
    ) -> None:
        """Feed the last tokens of each prompt, `(rows, n)`, n > 0, and sample."""

        def feed_prompt_end(last_token: mx.array, cache: LayerCaches) -> mx.array:
            parts = [tokens[:, :-1], last_token]
            prompt_end = mx.concatenate(parts, axis=1)
            return model(prompt_end, cache=cache)

        n_rows = len(choices)
        # To make a batch runs its first step, in which the model reads all of `tokens`.
        # In later steps upstream calls it with one token of each row.
        self._batch: Any = GenerationBatch(
            feed_prompt_end,
            uids=list(range(n_rows)),
            inputs=tokens[:, -1],
            prompt_cache=layer_caches,
            tokens=[choice.context for choice in choices],
            samplers=[choice.sampler for choice in choices],
            fallback_sampler=choices[0].sampler,
            logits_processors=[choice.processors for choice in choices],
            stop_sequences=[StopSequences() for _ in choices],
            max_tokens=[sys.maxsize] * n_rows,
        )
        self._batch.model = model

    @property
    def layer_caches(self) -> LayerCaches:
        """The KV of all rows; of more than one in upstream's batch form."""
        caches: LayerCaches = self._batch.prompt_cache
        return caches

    @layer_caches.setter
    def layer_caches(self, layer_caches: LayerCaches) -> None:
        self._batch.prompt_cache = layer_caches

    def first_tokens(self) -> list[SampledToken]:
        """The token sampled last, of each row; it is not fed yet."""
        token_ids: list[int] = self._batch._next_tokens.tolist()
        logprobs_of_rows: list[mx.array] = self._batch._next_logprobs
        rows = zip(token_ids, logprobs_of_rows, strict=True)
        return [SampledToken(token_id, logprobs) for token_id, logprobs in rows]

    def step(self) -> list[SampledToken]:
        """Feed the token sampled last of each row, return it, and sample the next."""
        responses = self._batch.next()
        tokens: list[SampledToken] = []
        for response in responses:
            token = SampledToken(response.token, response.logprobs)
            tokens.append(token)
        return tokens

    def extend(self, newcomers: TokenGenerator) -> None:
        """Add the rows of another generator, which must not be used afterwards.

        The caches of both must be in batch form (KV STATE: `to_batch`).
        """
        self._batch.extend(newcomers._batch)

    def keep_rows(self, rows: list[int]) -> None:
        """Drop all other rows, and their KV."""
        self._batch.filter(rows)


# -- 3 tokenizer -----------------------------------------------------------------------
#
# mlx-lm's TokenizerWrapper has the tags of a reply as read-only properties,
# `think_start`, `think_start_tokens`, and so on: None where a model has no such tag.

ReplyTag = Literal["think_start", "think_end", "tool_call_start", "tool_call_end"]
REPLY_TAGS: Final[tuple[ReplyTag, ...]] = get_args(ReplyTag)


# Pinned by test_upstream.py::test_a_tag_that_is_set_is_read_by_the_property
def set_reply_tag(
    tokenizer: Any,
    tag: ReplyTag,
    text: str,
) -> None:
    """Teach mlx-lm's tokenizer a tag that it does not know of the model."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    private_name = f"_{tag}"
    setattr(tokenizer, private_name, text)
    setattr(tokenizer, f"{private_name}_tokens", tuple(token_ids))


# Pinned by test_upstream.py::test_a_tokenizer_is_told_to_keep_no_words
def keep_no_words(tokenizer: Any) -> None:
    """Have a tokenizer keep no words that it has encoded, from now on.

    Its words are everybody's: one that was sent before is encoded sooner (L-109).
    """
    model = tokenizer.backend_tokenizer.model
    if hasattr(model, "_resize_cache"):  # WordPiece and WordLevel have none
        model._resize_cache(0)


# Pinned by test_upstream.py::test_a_tool_parser_is_a_function_of_a_module
def read_tool_parser_source(tokenizer: Any) -> str:
    """The source text of mlx-lm's parser of this model's tool calls; "" if it has none.

    Special tokens that occur in it are a part of the grammar of calls.
    """
    if tokenizer.tool_parser is None:
        return ""
    return inspect.getsource(sys.modules[tokenizer.tool_parser.__module__])


# -- 4 vision --------------------------------------------------------------------------
#
# A model of mlx-vlm has a `language_model`, which is called as mlx-lm's models are, and
# `get_input_embeddings`, which runs its vision tower. Nothing here is documented.
# mlx_vlm is imported inside functions: a server of a text model starts without it.

# What the layers take beside tokens, by the names of their arguments.
type LayerInputs = dict[str, mx.array]
_LAYER_INPUTS: Final = frozenset(
    ("inputs_embeds", "per_layer_inputs", "visual_pos_masks", "deepstack_visual_embeds")
)
# What VISION MODEL makes for each call itself, or no layer reads.
_IGNORED_INPUTS: Final = frozenset(("position_ids", "rope_deltas", "attention_mask_4d"))


# Pinned by test_model_kind.py
def has_vision_class(config: dict[str, Any]) -> bool:
    """Whether mlx-vlm has a class for the model of this config.json."""
    from mlx_vlm import models, utils

    model_type = str(utils.get_model_type(config))
    models_folder = Path(models.__path__[0])
    return (models_folder / model_type).exists()


# Pinned by test_model_kind.py
def load_vision_model(path: Path, *, trust_remote_code: bool) -> Any:
    """A model of mlx-vlm with its weights."""
    from mlx_vlm import utils

    return utils.load_model(path, trust_remote_code=trust_remote_code)


# Pinned by test_vision_families.py, whose tokenizers add a token in front
def load_image_processor(path: Path, *, trust_remote_code: bool) -> Any:
    """What makes tokens and pixels of text and images. It adds no tokens by itself."""
    from mlx_vlm import utils

    processor = utils.load_processor(
        path, add_detokenizer=False, trust_remote_code=trust_remote_code
    )
    # Or each image would begin with the <bos> of a prompt.
    processor.tokenizer.backend_tokenizer.post_processor = None
    return processor


# Pinned by test_vision_families.py
def image_token_id(model: Any) -> int:
    """The token that stands for each part of an image. Raises ValueError."""
    for name in ("image_token_id", "image_token_index"):
        token_id = getattr(model.config, name, None)
        if token_id is not None:
            return int(token_id)
    raise ValueError("its config.json names no token for images")


# (token ids `(1, n)`, image_grid_thw=rows and columns)
# -> (positions `(3, 1, n)`, the shift of what follows `(1, 1)`)
type RopeIndex = Callable[..., tuple[mx.array, mx.array]]


# Pinned by test_vision.py::test_a_planted_fault_is_noticed
def find_rope_index(model: Any) -> RopeIndex | None:
    """What gives images positions in rows and columns (mRoPE); None if nothing does."""
    rope_index: RopeIndex | None
    rope_index = getattr(model.language_model, "get_rope_index", None)
    return rope_index


# Pinned by test_upstream.py::test_the_tokens_of_an_image_see_each_other
def see_images_both_ways(model: Any) -> bool:
    """Let the tokens of an image see those after them, too, where a model wants that.

    That is Gemma 4. Upstream's own mask for it does nothing after a cached prefix.
    Returns whether calls must then name an image's tokens (`mm_token_type_ids`).
    """
    inner: Any = getattr(model.language_model, "model", None)
    if not hasattr(inner, "_apply_blockwise_bidirectional_overlay"):
        return False
    inner._apply_blockwise_bidirectional_overlay = _add_image_block
    return True


def _add_image_block(mask: mx.array, image_flags: mx.array) -> mx.array:
    """A causal mask in which the tokens of the only image of a call see each other.

    `mask`: `(..., n, n_cached + n)`, true where a token is seen.
    `image_flags`: `(1, n)`.
    """
    n_tokens = image_flags.shape[1]
    n_cached = mask.shape[-1] - n_tokens
    queries = image_flags[:, :, None]
    keys = image_flags[:, None]
    cached_padding = [(0, 0), (0, 0), (n_cached, 0)]
    pairs = mx.pad(queries * keys, cached_padding)
    is_pair = pairs > 0
    return mask | is_pair[:, None]


# Pinned by test_vision_families.py
def embed_text(model: Any, token_ids: mx.array) -> LayerInputs:
    """What the layers take of text `(1, n)`."""
    return _present_inputs(model.get_input_embeddings(token_ids))


# Pinned by test_vision_families.py
def embed_image(
    model: Any,
    token_ids: mx.array,
    pixels: dict[str, mx.array],
) -> LayerInputs:
    """What the layers take of an image: the vision tower runs. Not evaluated.

    `token_ids`: `(1, n)`, the image's own; `pixels`: what the processor made beside
    them. Raises NotImplementedError if layers want what is not fed here.
    """
    mask = mx.ones_like(token_ids)
    features = model.get_input_embeddings(token_ids, mask=mask, **pixels)
    inputs = _present_inputs(features)
    unknown = inputs.keys() - _LAYER_INPUTS - _IGNORED_INPUTS
    if unknown:
        raise NotImplementedError(
            f"its layers want {unknown}, which nothing here feeds"
        )
    return {name: inputs[name] for name in inputs if name in _LAYER_INPUTS}


def _present_inputs(features: Any) -> LayerInputs:
    inputs: LayerInputs = {}
    for name, value in features.to_dict().items():
        if value is not None:
            inputs[name] = value
    return inputs


# -- 5 CUDA ----------------------------------------------------------------------------


# Pinned by test_upstream.py::test_gated_delta_layers_read_chunks_as_they_read_tokens
def read_gated_delta_in_chunks() -> None:
    """Let the gated-delta layers of mlx-lm's models read a prompt in chunks.

    mlx-lm has a kernel for them on Metal. Elsewhere it reads token by token (Qwen3.5 on
    CUDA: some 150 tokens a second), which mlx-vlm does 64 tokens at a time, by products
    of matrices. Both are the same but for rounding.
    """
    from mlx_vlm.models.qwen3_5.gated_delta import gated_delta_chunked

    read_tokens = gated_delta.gated_delta_ops

    def read(*args: Any) -> tuple[mx.array, mx.array]:
        queries, _, _, decay, *_ = args
        is_prompt = queries.shape[1] > 1
        has_one_decay = decay.ndim == 3  # for each head; Kimi's has one for each value
        if is_prompt and has_one_decay:
            chunked: tuple[mx.array, mx.array] = gated_delta_chunked(*args)
            return chunked
        one_by_one: tuple[mx.array, mx.array] = read_tokens(*args)
        return one_by_one

    gated_delta.gated_delta_ops = read


# region KV STATE ==============================================================
# What the layers of a model keep of the tokens that they have read: moved, copied, cut.
#
# A layer keeps it in cache objects, its leaves (UPSTREAM, 1). There are two classes:
#
#     attention   KV of every token. It can be cut anywhere: the KV of [0, 300) begins
#                 with that of [0, 200).
#     state       What a recurrent layer, or a layer that sees a window, has made of all
#                 tokens so far. It is known only at positions where a copy was taken.
#
#     tokens             0 ........................ 200 .......... 300
#     attention leaves   [==========================|==============)   KVSpan
#     state leaves                                  S              S   StateCheckpoint
#
# A request goes on from 200 with KV [0, 200) of the span and the checkpoint that was
# taken at 200. It cannot go on from 250: attention could, but no state is known there.
#
# While a request runs, all this lies in cache objects. At rest it lies in spans and
# checkpoints, which are arrays without cache objects:
#
#     running                      at rest
#     LayerCaches  -- take_span --> KVSpan           moved; the caches are empty then
#                  <-- load_span --                  moved; the span is spent
#                  -- copy_span -->
#                  -- copy_state --> StateCheckpoint
#                  <-- restore_state --              the checkpoint stays usable
#
# No array object is ever in two caches: a write through one changed what the other had
# stored (L-03). (Arrays of recurrent layers may be, for a step: they are replaced, and
# never written into. hold_recurrent_state() and the tap rely on it.) A copy is
# contiguous and evaluated: a view would keep the whole buffer that it is taken from
# (L-06).
#
#  1 What a model keeps   its kind and size, measured
#  2 Spans                attention KV
#  3 State                checkpoints
#  4 Batches              several rows in one cache
#  5 The tap              checkpoints from inside a call of the model
#
# Public   KVSpec, KVSpan, StateCheckpoint, BUFFER_STEP_TOKENS,
#          measure_kv, kv_cache_offset, evaluate_caches, reserve_tokens, load_span,
#          take_span, copy_span, copy_state, make_checkpoint, restore_state,
#          hold_recurrent_state,
#          to_batch, extract_row, row_offsets, request_tapped_states,
#          take_tapped_states
# Uses     API TYPES, UPSTREAM
# Thread   model; mlx


# -- 1 what a model keeps --------------------------------------------------------------


class KVSpec(NamedTuple):
    """What a model keeps of the tokens of one row, measured on the model itself."""

    token_bytes: int  # attention KV of one token, all layers
    state_bytes: int  # one checkpoint at most
    has_state: bool  # some layers keep state, so requests go on from checkpoints
    can_batch: bool  # every layer has a form for batches
    can_tap: bool  # a tap is installed, so checkpoints need no call of their own
    layer_kinds: Sequence[str] = ()  # of each layer: "attention", "window of 128" ...


def measure_kv(model: Any) -> KVSpec:
    """Run two tokens through a model, read what it keeps, and try to install a tap."""
    layer_caches = make_prompt_cache(model)
    two_tokens = mx.array([[0, 0]])
    model(two_tokens, cache=layer_caches)
    evaluate_caches(layer_caches)

    attention_leaves = _attention_leaves(layer_caches)
    state_leaves = _state_leaves(layer_caches)
    return KVSpec(
        token_bytes=sum(_bytes_per_token(leaf) for leaf in attention_leaves),
        state_bytes=sum(_max_state_bytes(leaf) for leaf in state_leaves),
        has_state=bool(state_leaves),
        can_batch=all(hasattr(layer, "merge") for layer in layer_caches),
        can_tap=bool(state_leaves) and _install_tap(model),
        layer_kinds=tuple(_name_kind(layer) for layer in layer_caches),
    )


def _name_kind(layer: Any) -> str:
    """What a layer keeps, for people: "attention", "recurrent", "window of 128"."""
    names: list[str] = []
    for leaf in cache_leaves([layer]):
        name = leaf_kind(leaf).name
        n_tokens = window_tokens(leaf)
        names.append(f"{name} of {n_tokens}" if n_tokens else name)
    return " + ".join(names)


def _attention_leaves(layer_caches: LayerCaches) -> list[Any]:
    leaves = cache_leaves(layer_caches)
    return [leaf for leaf in leaves if leaf_kind(leaf).can_cut]


def _state_leaves(layer_caches: LayerCaches) -> list[Any]:
    leaves = cache_leaves(layer_caches)
    return [leaf for leaf in leaves if not leaf_kind(leaf).can_cut]


def _bytes_per_token(leaf: Any) -> int:
    n_places: int = leaf.keys.shape[2]
    n_bytes: int = leaf.nbytes
    return n_bytes // n_places


def _max_state_bytes(leaf: Any) -> int:
    """Bytes of a state leaf in a checkpoint; of a window that is full (L-74)."""
    n_tokens = window_tokens(leaf)
    if n_tokens:
        return _bytes_per_token(leaf) * n_tokens
    n_bytes: int = leaf.nbytes
    return n_bytes


def kv_cache_offset(layer_caches: LayerCaches, *, recorded: int) -> KvOffset:
    """How many tokens the layers have really read: the only maker of a KvOffset.

    The caches are those of a single row. `recorded` is what the caller's books say. It
    is taken only where no layer counts: recurrent layers do not.
    """
    # why(L-02): attention first: a hybrid model's first layer may not count tokens.
    leaves = _attention_leaves(layer_caches)
    leaves += _state_leaves(layer_caches)
    for leaf in leaves:
        offset = getattr(leaf, "offset", None)
        if offset is not None:
            assert isinstance(offset, int), "these caches are of several rows"
            return KvOffset(offset)
    return KvOffset(recorded)


def evaluate_caches(layer_caches: LayerCaches) -> None:
    """Finish all pending work on the caches, as upstream does after a prefill slice."""
    states = [layer.state for layer in layer_caches]
    mx.eval(states)


# -- 2 spans ---------------------------------------------------------------------------

BUFFER_STEP_TOKENS: Final = 256  # upstream grows buffers by this, and so does _grow()


class KVSpan(NamedTuple):
    """Attention KV of `length` consecutive tokens, in all layers, and nothing else."""

    # Keys and values of each leaf in turn: `(1, n_kv_heads, >= length, head_dim)`.
    arrays: list[mx.array]
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, spare places included."""
        return sum(array.nbytes for array in self.arrays)

    def cut(self, start: int, end: int) -> KVSpan:
        """A copy of tokens [start, end); this span stays as it is."""
        views = [array[..., start:end, :] for array in self.arrays]
        copies = [mx.contiguous(view) for view in views]
        mx.eval(copies)
        return KVSpan(copies, end - start)

    def join(self, *tails: KVSpan) -> KVSpan:
        """These tokens and then the tails'. None of the spans may be used afterwards.

        why(L-105): one array at a time, so at most one exists twice: the lists let go
        of the old ones before the next one is written.
        """
        length = self.length + sum(tail.length for tail in tails)
        for i in range(len(self.arrays)):
            buffer = _grow(self.arrays[i], length)
            self.arrays[i] = buffer
            start = self.length
            for tail in tails:
                tail_tokens = tail.arrays.pop(0)[..., : tail.length, :]
                buffer[..., start : start + tail.length, :] = tail_tokens
                start += tail.length
            mx.eval(buffer)
        return KVSpan(self.arrays, length)


def _grow(buffer: mx.array, n_tokens: int) -> mx.array:
    """The buffer itself if it has places for `n_tokens`, or else a larger copy."""
    n_places = buffer.shape[2]
    if n_places >= n_tokens:
        return buffer
    n_steps = math.ceil(n_tokens / BUFFER_STEP_TOKENS)
    n_new_places = n_steps * BUFFER_STEP_TOKENS - n_places
    padding = [(0, 0), (0, 0), (0, n_new_places), (0, 0)]
    larger_buffer = mx.pad(buffer, padding)
    mx.eval(larger_buffer)
    return larger_buffer


def take_span(layer_caches: LayerCaches, length: int) -> KVSpan:
    """Move the attention KV of a single row, `length` tokens, out of its caches.

    The list of caches is emptied.
    """
    leaves = _attention_leaves(layer_caches)
    for leaf in leaves:
        assert leaf.offset == length, "attention layers disagree on depth"

    arrays: list[mx.array] = []
    for leaf in leaves:
        arrays += [leaf.keys, leaf.values]
    mx.eval(arrays)
    # why(L-105): whoever still has this list would keep the buffers alive.
    layer_caches.clear()
    return KVSpan(arrays, length)


def load_span(layer_caches: LayerCaches, span: KVSpan) -> None:
    """Move a span's buffers into empty caches; the span must not be used afterwards."""
    leaves = _attention_leaves(layer_caches)
    pairs = batched(span.arrays, 2)  # keys and values
    for leaf, (keys, values) in zip(leaves, pairs, strict=True):
        leaf.state = (keys, values, span.length)


def copy_span(
    layer_caches: LayerCaches,
    end: int,
    *,
    row: int,
) -> KVSpan:
    """Copy tokens [0, end) of one row out of caches in use, be they a batch or not."""
    views: list[mx.array] = []
    for leaf in _attention_leaves(layer_caches):
        start = first_slot(leaf, row=row)
        for buffer in (leaf.keys, leaf.values):
            row_buffer = buffer[row : row + 1]
            views.append(row_buffer[:, :, start:])
    return KVSpan(views, end).cut(0, end)


def reserve_tokens(
    layer_caches: LayerCaches,
    n_tokens: int,
    *,
    capacity: int,
) -> None:
    """Grow buffers that have no place for `n_tokens`, to `capacity` at least (L-33).

    `capacity` is no less than `n_tokens`. Empty caches stay empty: their first write
    makes the buffers.
    """
    for leaf in _attention_leaves(layer_caches):
        if leaf.empty():
            continue
        if leaf.keys.shape[2] < n_tokens:
            leaf.keys = _grow(leaf.keys, capacity)
            leaf.values = _grow(leaf.values, capacity)


# -- 3 state ---------------------------------------------------------------------------


class StateCheckpoint(NamedTuple):
    """The state leaves of one row at one position; its arrays are its own."""

    leaves: Sequence[Any]  # of each leaf upstream's `state`
    nbytes: int


def copy_state(layer_caches: LayerCaches, *, row: int = 0) -> StateCheckpoint:
    """Copy the state leaves of one row; an empty checkpoint if there are none.

    It changes the caches, but nothing that is read: after a prefill slice a window
    still has tokens that have left it, and these are dropped first.
    """

    def slice_row(array: mx.array) -> mx.array:
        return array[row : row + 1]

    views: list[Any] = []
    for leaf in _state_leaves(layer_caches):
        if leaf_kind(leaf).must_extract:
            views.append(leaf.extract(row).state)
        else:
            drop_outside_window(leaf)
            views.append(_map_arrays(leaf.state, slice_row))

    # why(L-06): contiguous, or a view would keep the arrays of all rows. (Of the arrays
    # of a single row no copy is made until the cache writes into its own.)
    return make_checkpoint(_map_arrays(views, mx.contiguous))


def make_checkpoint(leaves: Sequence[Any]) -> StateCheckpoint:
    """A checkpoint of states whose arrays nobody else has; they are evaluated."""
    arrays = _arrays_in(leaves)
    mx.eval(arrays)
    return StateCheckpoint(leaves, sum(array.nbytes for array in arrays))


def restore_state(layer_caches: LayerCaches, checkpoint: StateCheckpoint) -> None:
    """Put a checkpoint into the state leaves; it stays usable."""

    def new_handle(array: mx.array) -> mx.array:
        return array[...]  # why(L-03): the first write through it makes a copy

    leaves = _state_leaves(layer_caches)
    states = _map_arrays(checkpoint.leaves, new_handle)
    for leaf, state in zip(leaves, states, strict=True):
        leaf.state = state


def _arrays_in(state: Any) -> list[mx.array]:
    """All arrays of lists and tuples, in order."""
    parts = dict(tree_flatten(state)).values()
    return [part for part in parts if isinstance(part, mx.array)]


def _map_arrays(state: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """The same lists and tuples, new ones (L-04), with every array changed."""

    def change_array(part: Any) -> Any:
        return change(part) if isinstance(part, mx.array) else part

    return tree_map(change_array, state)


def hold_recurrent_state(layer_caches: LayerCaches) -> LayerCaches | None:
    """The state before a decode step, for `copy_state` if a reply ends with it (L-10).

    It costs nothing: a step replaces the arrays of recurrent layers, and leaves the old
    ones as they are. None if no layer keeps state, or if a window does: a step writes
    into its arrays.
    """
    leaves = _state_leaves(layer_caches)
    if not leaves or not all(leaf_kind(leaf).can_hold for leaf in leaves):
        return None
    arrays_by_leaf = [list(leaf.cache) for leaf in leaves]
    return [make_recurrent(arrays) for arrays in arrays_by_leaf]


# -- 4 batches -------------------------------------------------------------------------


def to_batch(*rows: LayerCaches) -> LayerCaches:
    """Caches of single rows in upstream's batch form, which `extend` can add rows to.

    A copy; the arguments must not be used afterwards.
    """
    layers = zip(*rows, strict=True)
    return [layer_rows[0].merge(list(layer_rows)) for layer_rows in layers]


def extract_row(layer_caches: LayerCaches, row: int) -> LayerCaches:
    """A copy of one row of a batch, as caches of a single row."""
    row_caches: LayerCaches = [layer.extract(row) for layer in layer_caches]
    # why(L-06): upstream extracts views of the batch's state.
    restore_state(row_caches, copy_state(row_caches))
    evaluate_caches(row_caches)
    return row_caches


def row_offsets(layer_caches: LayerCaches) -> mx.array:
    """How many tokens the attention layers, of which there are some, have of each row.

    The shape is `(rows,)`.
    """
    offset = _attention_leaves(layer_caches)[0].offset
    return mx.array(offset).reshape(-1)


# -- 5 the tap -------------------------------------------------------------------------
#
# why(L-61): A checkpoint needs the state at its position. A call of the model leaves
# only the state at its end. So a checkpoint inside a prefill slice would split it in
# two calls, and each call is a pass over all layers, weights and tokens before.
# (Splitting only where it saves 48 tokens was tried: a short prompt that was repeated
# then had no checkpoint near its end.)
#
# But only the recurrent layers have to stop there. With the tap, each of them reads its
# input in parts, inside one call of the model, and keeps the state after each part.
#
#     one call with 36 tokens, state wanted after 31
#
#     attention layer    [0 ............................ 36)
#     recurrent layer    [0 ................... 31)[31 . 36)     put together again
#                                                 S        S     taken
#
# It is asked by request_tapped_states before the call, and take_tapped_states after it.
#
# To install the tap, the class of each such layer is replaced by a subclass of it. Not
# every layer works in parts: two may share a cache (RWKV-7), or a layer may hand parts
# of it to others (RecurrentGemma). So the tap is tried when a model is loaded, and
# removed if a tapped state is not that of a shorter call, or the call's output is not
# what it is without a request. Eight families of ten can
# (tests/server/test_checkpoints.py). For the others, and for windows, a slice ends at
# a checkpoint.


@dataclass(slots=True)
class _TapRequest:
    """What is asked of one state leaf in the next call of the model, and the answer."""

    ends: Sequence[int]  # after so many tokens of the call each, ascending
    states: list[list[mx.array]] = field(default_factory=list)


def request_tapped_states(layer_caches: LayerCaches, ends: Sequence[int]) -> None:
    """Ask for the states after so many tokens each, ascending, of the next call."""
    for leaf in _state_leaves(layer_caches):
        leaf.tap_request = _TapRequest(ends)


def take_tapped_states(layer_caches: LayerCaches) -> list[StateCheckpoint]:
    """The states that were asked for, in order, and perhaps that at the call's end.

    request_tapped_states() comes first. They are given out once; an empty list if no
    tap is installed.
    """
    leaves = _state_leaves(layer_caches)
    states_by_leaf = [leaf.tap_request.states for leaf in leaves]
    request_tapped_states(layer_caches, ())

    checkpoints: list[StateCheckpoint] = []
    for states in zip(*states_by_leaf, strict=True):
        tapped_leaves = [make_recurrent(arrays) for arrays in states]
        checkpoint = copy_state(tapped_leaves)
        checkpoints.append(checkpoint)
    return checkpoints


def _install_tap(model: Any) -> bool:
    """Give each recurrent layer a class that answers requests for states.

    Returns False, and leaves the model as it was, if what they answer is wrong.
    """
    layers = _find_cached_layers(model)
    own_classes = [type(layer) for layer in layers]
    tapped_classes = {
        layer_class: _make_tapped_class(layer_class) for layer_class in set(own_classes)
    }
    for layer in layers:
        layer.__class__ = tapped_classes[type(layer)]
    if _is_tap_right(model):
        return True

    for layer, layer_class in zip(layers, own_classes, strict=True):
        layer.__class__ = layer_class
    return False


def _is_tap_right(model: Any) -> bool:
    """Whether a call of two tokens, tapped after one, is like two plain calls.

    The states after one and after both are compared with those of plain calls, and the
    logits.
    """
    tapped_caches = make_prompt_cache(model)
    plain_caches = make_prompt_cache(model)
    short_caches = make_prompt_cache(model)
    tokens = mx.array([[0, 1]])
    request_tapped_states(tapped_caches, [1])
    try:
        tapped_logits = model(tokens, cache=tapped_caches)
        plain_logits = model(tokens, cache=plain_caches)
        model(tokens[:, :1], cache=short_caches)
        after_one, after_both = take_tapped_states(tapped_caches)
        return (
            _is_close(tapped_logits, plain_logits)
            and _is_same_state(after_one, copy_state(short_caches))
            and _is_same_state(after_both, copy_state(plain_caches))
        )
    except Exception:  # noqa: BLE001 - a layer that is called in another way
        return False


def _find_cached_layers(model: Any) -> list[Any]:
    """The innermost modules that are called with a cache.

    Attention layers are among them. Nobody requests states of their leaves.
    """
    layers: list[Any] = []
    for module in model.modules():
        cached_modules = filter(_takes_cache, module.modules())
        cached_ids = [id(cached_module) for cached_module in cached_modules]
        if cached_ids == [id(module)]:
            layers.append(module)
    return layers


def _takes_cache(module: Any) -> bool:
    signature = inspect.signature(type(module).__call__)
    return "cache" in signature.parameters


def _make_tapped_class(layer_class: Any) -> type:
    """A subclass of a layer's class that answers the request in its cache."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Each layer comes here at each decode step, when nothing is requested.
        last_arg = args[-1] if args else None
        leaf = kwargs.get("cache", last_arg)
        request: _TapRequest | None = getattr(leaf, "tap_request", None)
        if request is None or not request.ends:
            return layer_class.__call__(self, *args, **kwargs)

        if not args:  # the input is the first argument, by name, too
            first_name = next(iter(kwargs))
            args = (kwargs.pop(first_name),)
        inputs, *other_args = args

        def run_part(part: mx.array) -> mx.array:
            output: mx.array
            output = layer_class.__call__(self, part, *other_args, **kwargs)
            return output

        return _run_in_parts(run_part, inputs, leaf)

    return type(layer_class.__name__, (layer_class,), {"__call__": call})


def _run_in_parts(
    run_part: Callable[[mx.array], mx.array],
    inputs: mx.array,
    leaf: Any,
) -> mx.array:
    """Run a layer on inputs `(1, n, ...)` in parts that end where states are wanted."""
    request: _TapRequest = leaf.tap_request
    n_tokens = inputs.shape[1]
    assert request.ends[-1] <= n_tokens, "a state is wanted after the end of the call"
    inner_ends = [end for end in request.ends if end < n_tokens]
    request.ends = ()  # it is answered once, be this cache that of two layers

    outputs: list[mx.array] = []
    for part in mx.split(inputs, inner_ends, axis=1):
        output = run_part(part)
        outputs.append(output)
        request.states.append(list(leaf.cache))
    return mx.concatenate(outputs, axis=1)


def _is_same_state(checkpoint: StateCheckpoint, expected: StateCheckpoint) -> bool:
    """Whether two states are the same but for rounding. Raises ValueError."""
    arrays = _arrays_in(checkpoint.leaves)
    expected_arrays = _arrays_in(expected.leaves)
    pairs = zip(arrays, expected_arrays, strict=True)
    return all(_is_close(array, expected_array) for array, expected_array in pairs)


def _is_close(array: mx.array, expected: mx.array) -> bool:
    """Whether two arrays are the same but for rounding; false for NaN."""
    tolerance = 0.05 * mx.abs(expected).max()
    difference = mx.abs(array - expected).max()
    return bool((difference <= tolerance).item())


# region PREFIX CACHE ==========================================================
# KV of past requests, found again by the exact tokens that built it.
#
#     root    [0 ........................... end)   owns the KV of all its tokens
#     branch              [start ........... end)   owns the KV from `start` on; the
#                                                   KV before is its parent's
#
# Lookups see an entry while it rests, and while it runs: then a request holds its KV
# and extends it, and others can wait for a prefix that is being computed.
#
#     find -> start -> the request runs, lease.add_checkpoint -> lease.put_back or drop
#
# A request that continues an entry takes over its buffers and writes on in place. One
# that diverges inside an entry splits it if little follows (the tail becomes a branch,
# nothing is lost), and works on a copy if much follows. At rest a branch keeps only its
# own tail: N sub-agents on one prefix cost that prefix once.
#
# Bytes decide what is evicted: where they are short, the KV that saves least work for
# each byte goes, by the time until its session will return. A limit of entries and of
# idle time can be set as well; by default neither evicts while memory is free (L-119).
#
#     EntryTree      which entry owns which KV
#     SessionPauses  when sessions return
#     PrefixCache    lookup; what a request gets; what is evicted
#     CacheLease     what a request may do with the entry that it extends
#
# Positions and depths count tokens from the beginning of the prompt.
# Public   TokenKey, RequestOwner, NO_OWNER, CacheEntry, PrefixMatch, NO_MATCH,
#          HitKind, PrefixCache, CacheLease, EntryReport, MIN_CHECKPOINTS,
#          MIN_PREFIX_TOKENS, DOUBLE_COST_DEPTH
# Uses     CONFIG, LOGGING, API TYPES, TOKEN HASHES, KV STATE
# Thread   model

MIN_PREFIX_TOKENS: Final = 256  # a shorter prefix is not worth sharing or keeping
MAX_BRANCH_RATIO: Final = 16  # nor is sharing less than 1/16 of a branch
CHECKPOINT_SHARE: Final = 0.25  # of max_bytes, for the checkpoints of one entry
MIN_CHECKPOINTS: Final = 8  # per entry; any more go before KV does (L-77)
DOUBLE_COST_DEPTH: Final = 32_768  # where attention has doubled the cost of a token
HALF_CHANCE_SECONDS: Final = 300.0  # unused for so long: half as likely to be reused

# What is reused, in the API's words. "line": a whole entry, whose buffers are taken
# over; "branch" or, for models with state, "checkpoint": the beginning of an entry;
# "exact": every token of the prompt that can be cached.
HitKind = Literal["miss", "exact", "line", "branch", "checkpoint"]


class TokenKey(NamedTuple):
    """The tokens of a prompt, with hashes that make prompts quick to compare."""

    salt: bytes  # the root of its hashes: the model, the tenant, all that changes KV
    tokens: TokenIds  # `(n_tokens,)`
    block_hashes: list[bytes]  # one for each full block; it covers all blocks before


class RequestOwner(NamedTuple):
    """On whose behalf a request runs. Entries are shown and evicted by it."""

    tenant: str = ""
    session: str = ""


NO_OWNER: Final = RequestOwner()


class RunningKV(Protocol):
    """The KV that a running request holds."""

    def load_kv(self, span: KVSpan, state: StateCheckpoint | None) -> None:
        """Take over the KV and the state of the cached tokens.

        `span` belongs to the request from now on; `state` stays the cache's.
        """

    def read_span(self, end: int) -> KVSpan:
        """A copy of KV [0, end)."""


@dataclass(eq=False, slots=True)
class CacheEntry:
    """The KV of one conversation, except for what its parents own."""

    key: TokenKey  # the whole path from position 0, at least to `end`
    parent: CacheEntry | None = None
    start: int = 0
    end: int = 0  # while it runs: how far the request has got
    # One of these two is set: it says in which state the entry is.
    span: KVSpan | None = None  # at rest: KV of [start, end)
    running_kv: RunningKV | None = None  # running: KV of [0, end)
    checkpoints: dict[int, StateCheckpoint] = field(default_factory=dict)  # by position
    owner: RequestOwner = NO_OWNER  # of the last request
    head_end: int = 0  # where system prompt and tools end, which sessions share
    last_used: float = 0.0  # seconds, by the cache's clock
    n_uses: int = 0
    entry_id: int = 0  # shown to people

    @property
    def is_running(self) -> bool:
        """Whether a request holds its KV."""
        return self.running_kv is not None

    def rested_span(self) -> KVSpan:
        """The KV [start, end) of an entry at rest."""
        assert self.span is not None, "it runs, or its KV was taken"
        return self.span

    @property
    def state_bytes(self) -> int:
        """Bytes of its own checkpoints."""
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints.values())

    @property
    def nbytes(self) -> int:
        """Bytes in memory; a running request counts its KV itself."""
        kv_bytes = self.span.nbytes if self.span else 0
        return kv_bytes + self.state_bytes

    def own_checkpoints(self, low: int, high: int) -> dict[int, StateCheckpoint]:
        """Its checkpoints at positions in (low, high]."""
        return {p: c for p, c in self.checkpoints.items() if low < p <= high}

    def path_checkpoints(self, limit: int) -> dict[int, StateCheckpoint]:
        """Checkpoints in (0, limit], of this entry and of its parents before it."""
        own_checkpoints = self.own_checkpoints(0, limit)
        if self.parent is None:
            return own_checkpoints
        return self.parent.path_checkpoints(min(limit, self.start)) | own_checkpoints

    def thin_checkpoints(self, *, min_left: int = 0, spared_position: int = 0) -> bool:
        """Drop the checkpoint whose neighbours are closest to each other.

        The first, the last two and those at `head_end` and `spared_position` stay:
        there requests continue. Returns False, and drops none, if there is no other, or
        if fewer than `min_left` would be left.
        """
        if len(self.checkpoints) <= min_left:
            return False
        positions = sorted(self.checkpoints)
        gaps: dict[int, int] = {}  # by position: tokens between its neighbours
        for i in range(1, len(positions) - 2):
            if positions[i] not in (self.head_end, spared_position):
                gaps[positions[i]] = positions[i + 1] - positions[i - 1]
        if not gaps:
            return False
        del self.checkpoints[min(gaps, key=gaps.__getitem__)]
        return True

    def owner_of(self, depth: int) -> CacheEntry | None:
        """The entry that owns the last token of [0, depth): this one or a parent."""
        if depth > self.start:
            return self
        return self.parent.owner_of(depth) if self.parent else None

    def is_movable(self, depth: int) -> bool:
        """Whether a request can take over the buffers of KV [start, depth).

        Not if a request runs here already. Not either if [depth, end), which has to be
        copied out of the way, is longer than [0, depth).
        """
        if self.is_running or depth <= self.start:
            return False
        n_following = self.end - depth
        return n_following <= depth

    def moved_tokens(self, depth: int) -> int:
        """How many tokens of KV move, if a request takes [0, depth)."""
        if not self.is_movable(depth):
            return 0
        n_own = depth - self.start
        if self.parent is None:
            return n_own
        return n_own + self.parent.moved_tokens(self.start)

    def copy_kv(self, depth: int) -> KVSpan:
        """A copy of KV [0, depth); `depth` is in (start, end]."""
        if self.running_kv is not None:
            return self.running_kv.read_span(depth)
        own_kv = self.rested_span().cut(0, depth - self.start)
        if self.parent is None:
            return own_kv
        return self.parent.copy_kv(self.start).join(own_kv)


class MatchRank(NamedTuple):
    """How good a match is: the larger the better, the first field counts most."""

    depth: int  # to wait for pending tokens is better than to read them
    cached_tokens: int  # of two as deep, the one with less to wait for
    is_whole_entry: bool  # of two that are the same, the one that need not be split


class PrefixMatch(NamedTuple):
    """What a lookup found, as counts of leading tokens of the prompt.

    It holds until the cache changes. evict_to_fit(keep=match) spares what was found,
    unless there is no memory for a copy of it; so find() comes again before start().

    matched    [0 ................)          have KV in some entry
    cached     [0 ...........)               can be reused now: have their state, too
    pending    [0 .....................)     will have KV when the request that runs on
                                             `entry` has read them; 0 if none does
    """

    entry: CacheEntry | None = None  # None if nothing is cached or pending
    kv_owner: CacheEntry | None = None  # has the last cached token: `entry`, a parent
    matched_tokens: int = 0  # the most that an entry has, perhaps not `entry`
    cached_tokens: int = 0
    pending_tokens: int = 0
    state: StateCheckpoint | None = None  # after the cached tokens
    parts_image: bool = False  # more is the same, but ends inside an image (L-57)
    hit_kind: HitKind = "miss"

    @property
    def depth(self) -> int:
        """How many tokens are cached, or will be."""
        return max(self.cached_tokens, self.pending_tokens)

    @property
    def rank(self) -> MatchRank:
        """By this, lookups compare what they find."""
        return MatchRank(self.depth, self.cached_tokens, self.is_whole_entry)

    @property
    def is_movable(self) -> bool:
        """Whether `start` moves the last cached tokens; else it copies all of them."""
        owner = self.kv_owner
        return owner is not None and owner.is_movable(self.cached_tokens)

    @property
    def moved_tokens(self) -> int:
        """How many tokens of KV `start` moves."""
        owner = self.kv_owner
        return owner.moved_tokens(self.cached_tokens) if owner else 0

    @property
    def is_whole_entry(self) -> bool:
        """Whether the cached tokens are all those of an entry at rest."""
        if self.entry is None or self.entry.is_running:
            return False
        return self.cached_tokens == self.entry.end


NO_MATCH: Final = PrefixMatch()


class EntryTree:
    """Which entry owns which KV. The caller decides what to take and what to evict.

    No other class writes `key`, `parent`, `start`, `end`, `span` or `running_kv` of an
    entry; PrefixCache adds and thins checkpoints, and says whose it is. These hold for
    every entry between two calls of its methods, except for one whose KV was taken and
    does not run yet (inside PrefixCache.start):

        at rest, `span` is the KV of exactly [start, end)
        parent.start < start <= parent.end; for a root, start == 0
        an entry and its parent have the same first `start` tokens

        run      an entry whose KV was taken, or a new one: its request has the KV
        advance  the request has read more
        rest     the request is over, and gives the KV of the whole path back
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.entries: list[CacheEntry] = []
        self._clock = clock
        self._ids = count(1)

    @property
    def resting(self) -> list[CacheEntry]:
        """Entries at rest."""
        return [entry for entry in self.entries if not entry.is_running]

    def branches_of(self, entry: CacheEntry) -> list[CacheEntry]:
        """The branches that start in this entry, running or not."""
        return [branch for branch in self.entries if branch.parent is entry]

    def leaves(self) -> list[CacheEntry]:
        """The entries at rest that have no branch, be it running or at rest."""
        parents = {entry.parent for entry in self.entries}
        return [entry for entry in self.resting if entry not in parents]

    def shared_depths(self) -> Counter[CacheEntry]:
        """By entry, the depth to which branches need its KV; 0 if none does.

        A running branch needs none: its request holds the KV of the whole path.
        """
        depths: Counter[CacheEntry] = Counter()
        for branch in self.resting:
            if branch.parent is not None:
                depths[branch.parent] = max(depths[branch.parent], branch.start)
        return depths

    def insert(self, entry: CacheEntry) -> None:
        """Add an entry, and number it."""
        entry.entry_id = next(self._ids)
        self.entries.append(entry)

    def run(
        self, entry: CacheEntry, key: TokenKey, *, end: int, running_kv: RunningKV
    ) -> None:
        """A request that has KV [0, end) extends an entry, towards all of `key`."""
        entry.key = key
        entry.end = end
        entry.running_kv = running_kv
        entry.last_used = self._clock()

    def mark_reused(self, entry: CacheEntry) -> None:
        """Count that a request goes on from the KV of this entry."""
        entry.n_uses += 1
        entry.last_used = self._clock()

    def advance(self, entry: CacheEntry, end: int) -> None:
        """The request that extends an entry has KV [0, end) now."""
        entry.end = end

    def rest(self, entry: CacheEntry, key: TokenKey, span: KVSpan) -> None:
        """Let an entry rest with `span`, KV of all tokens of `key`.

        A branch keeps what follows its parent's part; one that shares too little
        becomes a root. Raises MemoryError or RuntimeError if there is no memory for
        that copy: the entry is dropped then.
        """
        end = len(key.tokens)
        min_shared = max(MIN_PREFIX_TOKENS, end // MAX_BRANCH_RATIO)
        if entry.parent is not None and entry.start < min_shared:
            entry.checkpoints = entry.path_checkpoints(end)
            self._detach(entry)
        entry.checkpoints = entry.own_checkpoints(0, end)
        if entry.parent is not None:
            try:
                span = span.cut(entry.start, end)
            except Exception:
                self.drop(entry)
                raise
        entry.key = key
        entry.end = end
        entry.span = span
        entry.running_kv = None
        entry.last_used = self._clock()

    def take_kv(self, entry: CacheEntry, depth: int) -> KVSpan:
        """Take KV [0, depth) out of an entry at rest, for a request to run on it.

        What follows `depth` becomes a branch. A parent that is movable, too, is merged
        into the entry; the KV of one that is not is copied. Raises MemoryError or
        RuntimeError if there is no memory for a copy: entries that are not whole any
        more are dropped then (L-34).
        """
        if depth < entry.end:
            self._split(entry, depth)
        own_kv = entry.rested_span()
        entry.span = None
        try:
            return self._join_to_parent(entry, own_kv)
        except Exception:
            self.drop(entry)
            raise

    def _join_to_parent(self, entry: CacheEntry, own_kv: KVSpan) -> KVSpan:
        """KV of the whole path of an entry, of which `own_kv` is the last part.

        Where the parent can be moved, the entry takes its KV and its place:

            before    parent  [0 ........ end)
                      entry         [start ......... end)
            after     entry   [0 ................... end)
                      tail          [start)... end)      what the parent had beyond
                                                         `start`, if anything
        """
        parent = entry.parent
        if parent is None:
            return own_kv
        if not parent.is_movable(entry.start):
            return parent.copy_kv(entry.start).join(own_kv)
        parent_kv = self.take_kv(parent, entry.start)
        self._replace_parent(entry, parent)
        return parent_kv.join(own_kv)

    def _split(self, entry: CacheEntry, depth: int) -> None:
        """Cut an entry at rest in two.

        before    entry  [start ............... end)
        after     entry  [start .... depth)
                  tail              [depth .... end)    its new branch
        """
        assert entry.start < depth < entry.end
        span = entry.rested_span()
        n_kept = depth - entry.start
        # why(L-150): the tail is as old as the entry was. The request does not use it.
        tail = replace(entry, parent=entry, start=depth)
        tail.span = span.cut(n_kept, span.length)
        tail.checkpoints = entry.own_checkpoints(depth, entry.end)
        for branch in self.branches_of(entry):
            if branch.start > depth:
                branch.parent = tail
        self.insert(tail)
        self._shorten(entry, depth, span=span._replace(length=n_kept))

    def _shorten(self, entry: CacheEntry, end: int, *, span: KVSpan) -> None:
        entry.end = end
        entry.span = span
        entry.checkpoints = entry.own_checkpoints(0, end)

    def _replace_parent(self, entry: CacheEntry, parent: CacheEntry) -> None:
        """Put an entry in the place of its parent, whose KV it has taken."""
        entry.parent = parent.parent
        entry.start = parent.start
        entry.checkpoints = parent.checkpoints | entry.checkpoints
        for branch in self.branches_of(parent):
            branch.parent = entry
        self._remove(parent)

    def truncate(self, entry: CacheEntry, depth: int) -> None:
        """Give up KV [depth, end) of an entry at rest; with depth 0 the whole entry.

        All KV that is evicted goes through here. No branch at rest may need this KV.
        """
        for branch in self.branches_of(entry):
            if branch.start > depth:
                self._reattach(branch, entry, depth=depth)
        if depth:
            # Without memory for a copy of what stays, the whole entry goes.
            with suppress(RuntimeError, MemoryError):
                span = entry.rested_span().cut(0, depth - entry.start)
                self._shorten(entry, depth, span=span)
                return
        self.drop(entry)

    def _detach(self, branch: CacheEntry) -> None:
        """Make a running branch a root: its request holds the KV of the whole path."""
        branch.parent = None
        branch.start = 0

    def _reattach(self, branch: CacheEntry, parent: CacheEntry, *, depth: int) -> None:
        """Let a running branch start where its parent is about to end.

        That is at `depth`, or, if nothing of the parent stays, where the parent starts.
        The request holds the KV from there on; the branch inherits the checkpoints,
        without which the next session on this prefix would be cold (L-87).
        """
        inherited = parent.own_checkpoints(depth, branch.start)
        branch.checkpoints.update(inherited)
        if depth:
            branch.parent = parent
            branch.start = depth
        else:
            branch.parent = parent.parent
            branch.start = parent.start

    def drop(self, entry: CacheEntry) -> None:
        """Forget an entry, and the branches at rest that need its KV.

        Its KV may be wrong (L-17), gone, or not worth its bytes.
        """
        for branch in self.branches_of(entry):
            if branch.is_running:
                self._detach(branch)  # its request has a copy, made while all was well
            else:
                self.drop(branch)
        self._remove(entry)

    def _remove(self, entry: CacheEntry) -> None:
        self.entries = [other for other in self.entries if other is not entry]
        # A request may still refer to the entry, but must not keep its bytes alive.
        entry.span = None
        entry.checkpoints = {}


class SessionPauses:
    """How long each session leaves its KV unused between two requests.

    why(L-119): of many agents that take turns, the one that just had its turn is the
    last to return. To evict the least recently used evicts what is asked for next; if a
    little more takes part than fits, nothing is ever found. Sessions are remembered
    when their KV is gone, or nobody would be seen to return.
    """

    MAX_SESSIONS: Final = 4096
    N_PAUSES: Final = 3  # of each session, the last ones

    def __init__(self) -> None:
        self._rested_at = LRUCache(self.MAX_SESSIONS)  # by owner, in seconds
        self._pauses = LRUCache(self.MAX_SESSIONS)  # by owner, in seconds each

    def begin(self, owner: RequestOwner, now: float) -> None:
        """A request of a session begins to run."""
        rested_at = self._rested_at.get(owner)
        if rested_at is not None:
            pauses = [*self._pauses.get(owner, ()), now - rested_at]
            self._pauses[owner] = pauses[-self.N_PAUSES :]

    def end(self, owner: RequestOwner, now: float) -> None:
        """The KV of a request rests."""
        self._rested_at[owner] = now

    def expected_wait(self, entry: CacheEntry, now: float) -> float:
        """In how many seconds an entry will be used, as far as its session shows.

        By default as long as it was unused already. A session that made pauses is
        expected back after its shortest recent one, so one that works on a task returns
        soon. That holds until it is twice as late. With a shortest pause of 20 s:

            unused for       5 s    15 s    30 s    50 s
            expected in     15 s     5 s    10 s    50 s
        """
        idle_seconds = now - entry.last_used
        pauses: Sequence[float] = self._pauses.get(entry.owner, ())
        pause = min(pauses, default=0.0)
        if idle_seconds < 2 * pause:
            return abs(pause - idle_seconds)
        return idle_seconds


def expected_saving(entry: CacheEntry, start: int, *, wait_seconds: float) -> float:
    """How much prefill it saves to keep KV [start, end) of an entry (L-16).

    The work is counted in tokens at the beginning of a prompt. The chance of reuse is
    relative: it grows with the number of uses, and falls with the time until the next.
    """
    work = (entry.end - start) * (1.0 + entry.end / DOUBLE_COST_DEPTH)
    frequency = 1.0 + math.log1p(entry.n_uses)
    chance = frequency / (1.0 + wait_seconds / HALF_CHANCE_SECONDS)
    return work * chance


def _bytes_from(entry: CacheEntry, depth: int) -> int:
    """Bytes of what an entry has beyond `depth`, all tokens taken as alike."""
    n_own = max(entry.end - entry.start, 1)  # 0: its request has read nothing
    return entry.nbytes * (entry.end - max(depth, entry.start)) // n_own


def _image_start(tokens: TokenIds, depth: int) -> int:
    """`depth`, or where the image begins that a cut there would part."""
    if not is_inside_image(tokens, depth):
        return depth
    return max(start for start in image_starts(tokens) if start < depth)


class EntryReport(TypedDict):
    """A cache entry, as GET /v1/status shows it."""

    id: int
    parent: int | None  # id of the entry that it branches from
    shared: int  # tokens whose KV the parent owns
    tokens: int
    bytes: int
    idle_seconds: float
    session: str
    running: bool
    checkpoints: NotRequired[list[int]]  # their positions, if they were asked for


class PrefixCache:
    """Gives every request its longest cached prefix, in a limited number of bytes."""

    def __init__(
        self,
        config: Config,
        spec: KVSpec,
        *,
        max_bytes: int,
        metrics: CacheMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes  # of KV and checkpoints, those of requests included
        self.metrics = metrics
        self._config = config
        self._spec = spec
        self._clock = clock
        self._tree = EntryTree(clock)
        self._pauses = SessionPauses()

    @property
    def entries(self) -> list[CacheEntry]:
        """All entries, the oldest first."""
        return self._tree.entries

    @property
    def nbytes(self) -> int:
        """Bytes in memory; running requests count their KV themselves."""
        return sum(entry.nbytes for entry in self.entries)

    # -- lookup ------------------------------------------------------------------------

    def find(self, key: TokenKey) -> PrefixMatch:
        """The longest prefix that is cached or pending. Changes no entry."""
        if not self._config.prompt_cache_max_entries_global:
            return NO_MATCH
        entries = [entry for entry in self.entries if entry.key.salt == key.salt]
        entries.sort(key=lambda entry: entry.last_used, reverse=True)
        best = NO_MATCH
        most_matched = 0
        for entry in entries:
            depth = min(best.depth, most_matched)
            if not self._can_share(entry, key, depth, best=best):
                continue
            match = self._match(entry, key)
            most_matched = max(most_matched, match.matched_tokens)
            if match.rank > best.rank:  # of equals the one used last
                best = match
        return best._replace(
            matched_tokens=most_matched,
            hit_kind=self._hit_kind(best, len(key.tokens)),
        )

    def _can_share(
        self, entry: CacheEntry, key: TokenKey, depth: int, *, best: PrefixMatch
    ) -> bool:
        """Whether an entry may be better than `best`, by one hash and one token.

        It may if it shares more than `depth` tokens with the prompt; or just `depth`,
        if it ends there, or if `best` still waits for them. Of many sessions on one
        system prompt most are passed over: a lookup among 1,000 of them takes 2 ms, and
        13 ms without this.
        """
        if not self._config.cache_use_block_index:
            return True
        n_blocks = depth // self._config.prompt_cache_block_size
        hashes = entry.key.block_hashes
        if n_blocks > len(hashes):
            return False
        if n_blocks and hashes[n_blocks - 1] != key.block_hashes[n_blocks - 1]:
            return False
        if entry.end <= depth or best.cached_tokens < depth:
            return True
        return bool(entry.key.tokens[depth] == key.tokens[depth])

    def _match(self, entry: CacheEntry, key: TokenKey) -> PrefixMatch:
        """What one entry has of a prompt, except its last token: it is fed (L-11)."""
        n_common = min(self.count_common(entry.key, key), len(key.tokens) - 1)
        # The key of a running entry is its whole prompt, which will have been read.
        n_pending = n_common if entry.is_running and n_common > entry.end else 0
        depth = min(n_common, entry.end)
        n_matched = _image_start(key.tokens, depth)

        # State cannot be rewound: with it, a request can only go on from a checkpoint.
        checkpoints = entry.path_checkpoints(n_matched)
        n_cached = max(checkpoints, default=0) if self._spec.has_state else n_matched
        return PrefixMatch(
            entry,
            kv_owner=entry.owner_of(n_cached),
            matched_tokens=n_matched,
            cached_tokens=n_cached,
            pending_tokens=n_pending,
            state=checkpoints.get(n_cached),
            parts_image=n_matched < depth,
        )

    def count_common(self, cached: TokenKey, wanted: TokenKey) -> int:
        """How many leading tokens of two prompts are the same."""
        if not self._config.cache_use_block_index:
            return common_prefix_length(cached.tokens, wanted.tokens)

        def differs(block: int) -> bool:
            return cached.block_hashes[block] != wanted.block_hashes[block]

        # Hashes are the same up to the block in which the tokens part, and none after.
        n_blocks = min(len(cached.block_hashes), len(wanted.block_hashes))
        size = self._config.prompt_cache_block_size
        start = size * bisect_left(range(n_blocks), True, key=differs)
        block = slice(start, start + size)
        return start + common_prefix_length(cached.tokens[block], wanted.tokens[block])

    def _metrics_of(self, owner: RequestOwner) -> CacheMetrics:
        return self.metrics.of_tenant(owner.tenant)

    def _hit_kind(self, match: PrefixMatch, n_prompt: int) -> HitKind:
        if not match.cached_tokens:
            return "miss"
        if match.cached_tokens == n_prompt - 1:
            return "exact"
        if match.is_whole_entry:
            return "line"
        return "checkpoint" if self._spec.has_state else "branch"

    # -- what a request gets -----------------------------------------------------------

    def add_loaded(self, entry: CacheEntry) -> None:
        """Add an entry at rest, whose KV was loaded from elsewhere."""
        entry.last_used = self._clock()
        self._tree.insert(entry)

    def start(
        self,
        match: PrefixMatch,
        key: TokenKey,
        *,
        running: RunningKV,
        owner: RequestOwner,
        head_end: int = 0,
    ) -> CacheLease:
        """Give a request the KV of its cached tokens, and an entry to extend.

        The KV is moved or copied. From now on the entry runs. Raises what `load_kv`
        raises, and MemoryError or RuntimeError if there is no memory for a copy: the
        request has no entry then, and KV that was moved already is dropped.
        """
        if self._lacks_checkpoint(match):
            self._metrics_of(owner).bump("hybrid_trim_miss")
        if match.parts_image:
            self._metrics_of(owner).bump("vlm_retreat")

        self._pauses.begin(owner, self._clock())
        entry = self._give_kv(match, key, running)
        self._tree.run(entry, key, end=match.cached_tokens, running_kv=running)
        entry.owner = owner
        entry.head_end = head_end
        return CacheLease(self, self._tree, entry, match.kv_owner)

    def _lacks_checkpoint(self, match: PrefixMatch) -> bool:
        """Whether much KV is of no use, for want of a state to go on from.

        With no state at all that is a block; else as much as is worth sharing.
        """
        n_lost = match.matched_tokens - match.cached_tokens
        if match.cached_tokens:
            return n_lost >= MIN_PREFIX_TOKENS
        return n_lost >= self._config.prompt_cache_block_size

    def _give_kv(
        self, match: PrefixMatch, key: TokenKey, running: RunningKV
    ) -> CacheEntry:
        """Load the cached KV into a request; the entry that the request will extend."""
        kv_owner = match.kv_owner
        if kv_owner is None:
            entry = CacheEntry(key)
            self._tree.insert(entry)
            return entry

        depth = match.cached_tokens
        if not match.is_movable:
            running.load_kv(kv_owner.copy_kv(depth), match.state)
            branch = CacheEntry(key, parent=kv_owner, start=depth, end=depth)
            self._tree.insert(branch)
            self._tree.mark_reused(kv_owner)
            return branch

        span = self._tree.take_kv(kv_owner, depth)
        try:
            running.load_kv(span, match.state)
        except Exception:
            self._tree.drop(kv_owner)
            raise
        self._tree.mark_reused(kv_owner)
        return kv_owner

    def keep_checkpoint(
        self, entry: CacheEntry, position: int, checkpoint: StateCheckpoint
    ) -> None:
        """Keep the state that a request has reached, if the model has any."""
        if not self._spec.has_state:
            return
        entry.checkpoints[position] = checkpoint
        while entry.state_bytes > self.max_bytes * CHECKPOINT_SHARE:
            if not entry.thin_checkpoints():
                return

    def rest(self, entry: CacheEntry, key: TokenKey, span: KVSpan) -> None:
        """Let an entry rest, and evict what has no place beside it.

        Raises what EntryTree.rest raises.
        """
        self._tree.rest(entry, key, span)
        self._pauses.end(entry.owner, entry.last_used)
        self._enforce_entry_limit(newest=entry)
        self.evict_to_fit(0)

    def drop_source(self, match: PrefixMatch) -> None:
        """Forget the entry that a request could not be started on (L-114)."""
        if match.kv_owner is not None:
            self._tree.drop(match.kv_owner)

    # -- eviction ----------------------------------------------------------------------
    # Who goes first: `expected_saving`. What must stay: `_needed_depth`. What is worth
    # keeping: `_depth_to_keep`. How KV is given up: `EntryTree.truncate`.

    def evict_idle(self) -> None:
        """Evict entries that were not used for the TTL, once they have no branches."""
        ttl_seconds = self._config.prompt_cache_ttl_seconds
        if not ttl_seconds:
            return
        oldest = self._clock() - ttl_seconds
        for entry in self._tree.leaves():
            if entry.last_used < oldest:
                self._tree.truncate(entry, 0)
                self._metrics_of(entry.owner).bump("evicted_idle")

    def evict_session(self, tenant: str, session: str | None) -> int:
        """Evict what rests of a session, or of a tenant (None), and no branch needs.

        That is all that the tenant may see. Returns how many entries were evicted or
        shortened.
        """
        entries = [e for e in self._tree.resting if is_seen_by(tenant, e.owner.tenant)]
        if session is not None:
            entries = [entry for entry in entries if entry.owner.session == session]
        entries.sort(key=lambda entry: entry.start, reverse=True)  # branches come first
        n_evicted = 0
        for entry in entries:
            depth = self._tree.shared_depths()[entry]
            if depth < entry.end:
                self._tree.truncate(entry, depth)
                n_evicted += 1
        return n_evicted

    def _enforce_entry_limit(self, *, newest: CacheEntry) -> None:
        """Evict the least valuable entries until no more rest than the limit.

        Only those without branches: to shorten one with branches frees no place.
        """
        limit = self._config.prompt_cache_max_entries_global
        # why(L-78): the newest is continued next, unless its request has read nothing.
        spared = newest if limit and newest.end > newest.start else None
        while len(self._tree.resting) > limit:
            savings = {
                entry: self._expected_saving(entry, entry.start)
                for entry in self._tree.leaves()
                if entry is not spared
            }
            if not savings:
                return
            victim = min(savings, key=savings.__getitem__)
            self._tree.truncate(victim, 0)
            self._metrics_of(victim.owner).bump("evicted_for_room")

    def evict_to_fit(self, extra_bytes: int, *, keep: PrefixMatch = NO_MATCH) -> bool:
        """Evict until `extra_bytes` more fit, but nothing a request will reuse (L-78).

        `keep`: what that request will reuse. `extra_bytes` includes those of its
        buffers that will be moved to the request, so they are not counted twice.
        Returns False if nothing more can be evicted.
        """
        while True:
            moved_bytes = keep.moved_tokens * self._spec.token_bytes
            lacking_bytes = self.nbytes - moved_bytes + extra_bytes - self.max_bytes
            if lacking_bytes <= 0:
                return True
            if not self._free_some(lacking_bytes, keep=keep):
                return False

    def _free_some(self, lacking_bytes: int, *, keep: PrefixMatch) -> bool:
        """Free checkpoints that are many, or else KV, or else any that can be spared.

        why(L-77, L-97): beyond a few, an entry's checkpoints are worth less than KV.
        """
        position = keep.cached_tokens
        if self._thin_largest(
            lacking_bytes, min_left=MIN_CHECKPOINTS, spared_position=position
        ):
            return True
        if self._evict_kv(lacking_bytes, keep=keep):
            return True
        return self._thin_largest(lacking_bytes, spared_position=position)

    def _thin_largest(
        self, lacking_bytes: int, *, min_left: int = 0, spared_position: int = 0
    ) -> bool:
        """Drop checkpoints, each of the entry whose checkpoints take most bytes.

        Until that is enough, or no entry can spare one. Returns False if none could.
        """
        # The largest is popped first. No two entries have the same id.
        heap = [(-e.state_bytes, e.entry_id, e) for e in self.entries]
        heapify(heap)
        freed_bytes = 0
        while heap and freed_bytes < lacking_bytes:
            _, entry_id, entry = heappop(heap)
            bytes_before = entry.state_bytes
            if entry.thin_checkpoints(
                min_left=min_left, spared_position=spared_position
            ):
                freed_bytes += bytes_before - entry.state_bytes
                heappush(heap, (-entry.state_bytes, entry_id, entry))
        return freed_bytes > 0

    def _evict_kv(self, lacking_bytes: int, *, keep: PrefixMatch) -> bool:
        """Evict or shorten the entry whose KV saves least per byte, if one can be."""
        needed_depths = self._needed_depths(keep)
        savings = self._savings_per_byte(needed_depths)
        if not savings:
            return False

        victim = min(savings, key=savings.__getitem__)
        kept_depth = self._depth_to_keep(victim, lacking_bytes)
        self._tree.truncate(victim, max(needed_depths[victim], kept_depth))
        self._metrics_of(victim.owner).bump("evicted_for_room")
        return True

    def next_to_go(self, extra_bytes: int) -> list[CacheEntry]:
        """About the entries that would be evicted if so many bytes were needed."""
        lacking_bytes = self.nbytes + extra_bytes - self.max_bytes
        if lacking_bytes <= 0:
            return []
        depths = self._tree.shared_depths()
        savings = self._savings_per_byte(depths)
        victims = []
        for entry in sorted(savings, key=savings.__getitem__):
            if lacking_bytes <= 0:
                break
            victims.append(entry)
            lacking_bytes -= _bytes_from(entry, depths[entry])
        return victims

    def _savings_per_byte(
        self, needed_depths: Counter[CacheEntry]
    ) -> dict[CacheEntry, float]:
        """By entry at rest, what the KV saves that would go: what nobody needs now.

        Of an entry of 2,000 tokens of which branches need 1,800, 200 would go.
        """
        savings = {}
        for entry in self._tree.resting:
            depth = needed_depths[entry]
            if depth < entry.end:
                saving = self._expected_saving(entry, max(depth, entry.start))
                savings[entry] = saving / max(_bytes_from(entry, depth), 1)
        return savings

    def _expected_saving(self, entry: CacheEntry, start: int) -> float:
        wait_seconds = self._pauses.expected_wait(entry, self._clock())
        return expected_saving(entry, start, wait_seconds=wait_seconds)

    def _needed_depths(self, keep: PrefixMatch) -> Counter[CacheEntry]:
        """By entry, the depth to which branches, or the request, need its KV."""
        depths = self._tree.shared_depths()
        owner = keep.kv_owner
        if owner is None:
            return depths
        if keep.is_movable:
            depths[owner] = owner.end  # its buffers are taken over: shortening frees 0
        else:
            depths[owner] = max(depths[owner], keep.cached_tokens)
        return depths

    def _depth_to_keep(self, entry: CacheEntry, lacking_bytes: int) -> int:
        """The depth to which a victim may stay although nobody needs it (L-87).

        Its newest tokens go, an eighth at least. What stays has to be copied: 0 if that
        is too little to be worth a copy, or too much to exist twice.
        """
        token_bytes = self._spec.token_bytes or 1  # 0: no layer has attention
        freed_bytes = max(lacking_bytes, entry.nbytes // 8)
        freed_tokens = freed_bytes // token_bytes + 1
        # A cut inside an image would make each lookup retreat (L-57).
        depth = _image_start(entry.key.tokens, max(0, entry.end - freed_tokens))
        if self._spec.has_state:
            depth = max(entry.path_checkpoints(depth), default=0)
        max_tokens = self.max_bytes // 2 // token_bytes
        if MIN_PREFIX_TOKENS <= depth - entry.start <= max_tokens:
            return depth
        return 0

    def describe(
        self, *, shows_checkpoints: bool = False
    ) -> list[tuple[str, EntryReport]]:
        """For each entry its tenant, and what the status page shows of it."""
        now = self._clock()
        reports: list[tuple[str, EntryReport]] = []
        for entry in self.entries:
            report: EntryReport = {
                "id": entry.entry_id,
                "parent": entry.parent.entry_id if entry.parent else None,
                "shared": entry.start,
                "tokens": entry.end,
                "bytes": entry.nbytes,
                "idle_seconds": round(now - entry.last_used, 1),
                "session": entry.owner.session,
                "running": entry.is_running,
            }
            if shows_checkpoints:
                report["checkpoints"] = sorted(entry.checkpoints)
            reports.append((entry.owner.tenant, report))
        return reports


@dataclass(eq=False, slots=True)
class CacheLease:
    """The right of one request to extend an entry, until `put_back` or `drop`."""

    _cache: PrefixCache
    _tree: EntryTree
    entry: CacheEntry  # to be compared and looked at; only the cache changes it
    _source: CacheEntry | None  # where the last cached token came from

    @property
    def state_bytes(self) -> int:
        """Bytes of the checkpoints of the entry."""
        return self.entry.state_bytes

    def advance(self, end: int) -> None:
        """Let lookups use KV [0, end) of the request."""
        self._tree.advance(self.entry, end)

    def add_checkpoint(self, position: int, checkpoint: StateCheckpoint) -> None:
        """Keep the state that the request has reached, if the model has any."""
        self._cache.keep_checkpoint(self.entry, position, checkpoint)

    def drop_checkpoint(self, position: int) -> None:
        """Drop a state that is of no use any more, if it is still there."""
        self.entry.checkpoints.pop(position, None)

    def put_back(self, key: TokenKey, span: KVSpan) -> None:
        """Let the entry rest. The cache now owns `span`, KV of all tokens of `key`.

        Raises what EntryTree.rest raises; the entry is dropped then.
        """
        self._cache.rest(self.entry, key, span)

    def drop(self) -> None:
        """Forget the entry of a failed request, and the branches that build on it.

        If it is forgotten already, this does nothing.
        """
        self._tree.drop(self.entry)

    def drop_with_source(self) -> None:
        """Forget also the entry that the cached KV was copied from (L-114)."""
        self.drop()
        if self._source is not None:
            self._tree.drop(self._source)


# region DISK CACHE ============================================================
# KV in files, for what a restart, an update or a crash would forget.
#
# A file is a segment: the KV of tokens [start, end) of one conversation, with these
# tokens, and the states that were kept between them. What comes before `start` is in
# the segment's parent. Of an entry that has grown only what is new is written:
#
#     10:00  a conversation of 9,000 tokens rests   root    [0 ........ 9,000)
#     10:01  it has grown to 9,700                  second  [9,000 .. 9,700)
#     10:05  another one parts from it at 8,200     third   [8,200 .... 8,900)
#
# To continue the second, the 9,000 tokens of the root are loaded, and its own 700.
#
# A name stands for the tenant, the weights and all tokens from the beginning to `end`:
# it is a hash over them. So are landmarks, the names of every 256 tokens. A prompt is
# looked up by its landmarks, and its tokens are compared with those in the file.
#
#     ~/.cache/start-llm/<identity>/     of weights, versions and device; 0700
#         lock                           held by the server that uses it
#         written                        bytes that were written today
#         secret                         that is in the names of images
#         <name>.safetensors             a segment; 0600
#
# A segment is written under another name, and renamed once the disk has it: there is no
# half of one. A file that is damaged, or of another format, is deleted, and its tokens
# are read again. Each array has a checksum: the format has none, and one flipped bit
# would be another KV.
#
#     writing    between two steps of the model, DiskTier copies some arrays out of an
#                entry that rests; a thread of its own brings them to the disk
#     reading    when a request starts and the disk has more of its prompt than memory,
#                the rest is loaded into an entry that the request then continues
#
# Public   DiskTier, DiskReport, open_disk_cache, wants_disk_cache
# Uses     CONFIG, LOGGING, API TYPES, TOKEN HASHES, KV STATE, PREFIX CACHE
# Thread   model, mlx; SegmentWriter: a thread of its own

LANDMARK_TOKENS: Final = 256  # between the positions at which a lookup finds a segment
MIN_LOADED_TOKENS: Final = 256  # fewer are read faster than they are loaded
MIN_SAVED_TOKENS: Final = 512  # fewer are written once they have rested for long
MAX_COMPARED: Final = 8  # segments whose tokens are read, of those that go on
MIN_SEGMENT_TOKENS: Final = 16  # fewer are not worth a file
MAX_SEGMENT_BYTES: Final = 128 << 20  # what is interrupted loses no more than that
SAVE_AFTER_SECONDS: Final = 2.0  # of rest, while no request runs
SAVE_BUSY_SECONDS: Final = 10.0  # of rest, beside others that run
SAVE_SHORT_SECONDS: Final = 30.0  # of rest, for less than MIN_SAVED_TOKENS
SAVE_PIECE_SECONDS: Final = 0.01  # for what is copied between two steps
WRITER_WAIT_SECONDS: Final = 0.02  # until a request is noticed that came meanwhile
LOOK_SECONDS: Final = 1.0  # between two looks for what is due, beside requests
FORGET_SECONDS: Final = 10.0  # for what is being written, before it is deleted
SAVE_SHARE: Final = 0.04  # of the time of running requests that copying takes
SPILL_SHARE: Final = 0.25  # the same, of what memory has no room for much longer
SPILL_PART: Final = 4  # that is what goes once a prompt needs this part of the memory
MAX_UNWRITTEN_BYTES: Final = 256 << 20  # that wait for the disk
_DISK_FORMAT: Final = 1  # of the files; Segment refuses another one
_SEGMENT_SUFFIX: Final = ".safetensors"
_NEW_SUFFIX: Final = ".new"  # of a file that is being written
_MAX_HEADER_BYTES: Final = 16 << 20
_SECONDS_A_DAY: Final = 86_400
_DEFAULT_DISK_BYTES: Final = 32 << 30  # by default, but at most a ...
_DISK_PART: Final = 10  # ... tenth of the free disk
_DAILY_FACTOR: Final = 4  # by default so many times CACHE_DISK_MAX_BYTES a day

_SegmentName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_ArrayType = Literal["BF16", "F16", "F32", "U32", "U8", "I32", "I64", "BOOL"]


class DiskError(Exception):
    """A file, or the whole cache on disk, cannot be used; the text says why."""


# -- 1 files ---------------------------------------------------------------------------


class ArrayInfo(BaseModel, frozen=True, extra="forbid"):
    """An array of a file, as safetensors describes it."""

    dtype: _ArrayType
    shape: tuple[Annotated[int, Field(ge=0)], ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return _ARRAY_TYPES[self.dtype].size * math.prod(self.shape)


class Segment(BaseModel, frozen=True, extra="forbid"):
    """What a file contains, as its metadata describes it."""

    format: Literal[1] = _DISK_FORMAT
    name: _SegmentName  # of the tokens [0, end)
    parent: _SegmentName | Literal[""] = ""  # has the KV before `start`; "": a root
    start: int = Field(ge=0)
    end: int = Field(ge=1)
    landmarks: tuple[_SegmentName, ...]  # names of beginnings that end in (start, end]
    head_end: int = 0  # where system prompt and tools end
    tenant: str = ""
    session: str = ""
    # By position, in (start, end]: the states there. In the place of each array is
    # {"array": its name}.
    states: dict[int, Any] = {}
    arrays: dict[str, ArrayInfo]  # in the order of the file; "tokens" is the first

    @cached_property  # of all segments it is read, when one has to go
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(info.nbytes for info in self.arrays.values())


class _SegmentHeader(NamedTuple):
    """The beginning of a file, checked."""

    segment: Segment
    checksums: dict[str, str]  # by the name of the array
    nbytes: int
    used_at: float  # Unix seconds: when the file was written, or loaded last


def _write_header(segment: Segment, checksums: Mapping[str, str]) -> bytes:
    """The first bytes of a file; as many, whatever the checksums are.

    The metadata of safetensors are texts: ours describe the segment and its checksums,
    and "own" is the checksum of the two.
    """
    description = segment.model_dump_json()
    sums = json.dumps({name: checksums[name] for name in segment.arrays})
    own_sum = _checksum((description + sums).encode())
    table: JsonObject = {
        "__metadata__": {"segment": description, "checksums": sums, "own": own_sum}
    }
    offset = 0
    for name, info in segment.arrays.items():
        table[name] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(path: Path) -> _SegmentHeader:
    """What a file contains. Raises DiskError: it is not whole or not ours; OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise DiskError("its header is too long")
        text = file.read(length)
        status = os.fstat(file.fileno())
    try:
        metadata = from_json(text)["__metadata__"]
        description, sums = metadata["segment"], metadata["checksums"]
        if _checksum((description + sums).encode()) != metadata["own"]:
            raise DiskError("its header is damaged")
        segment = Segment.model_validate_json(description)
        checksums: dict[str, str] = from_json(sums)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DiskError("its header cannot be read") from error
    if status.st_size != 8 + length + segment.nbytes:
        raise DiskError("it is too short or too long")
    if path.name != segment.name + _SEGMENT_SUFFIX:
        raise DiskError("it has the name of another one")
    return _SegmentHeader(segment, checksums, 8 + length, status.st_mtime)


def _read_arrays(path: Path, names: Container[str]) -> dict[str, npt.NDArray[Any]]:
    """The bytes of arrays, with right checksums. Raises DiskError, OSError."""
    header = _read_header(path)
    arrays: dict[str, npt.NDArray[Any]] = {}
    with path.open("rb") as file:
        file.seek(header.nbytes)
        for name, info in header.segment.arrays.items():
            if name not in names:
                file.seek(info.nbytes, os.SEEK_CUR)
                continue
            data = np.empty(info.nbytes, dtype=np.uint8)
            if file.readinto(memoryview(data)) < info.nbytes:
                raise DiskError("it is too short")
            if _checksum(data) != header.checksums[name]:
                raise DiskError(f"its array {name} is damaged")
            arrays[name] = data
    return arrays


def _checksum(data: bytes | npt.NDArray[Any]) -> str:
    return f"{zlib.crc32(data):08x}"


class SegmentWriter:
    """Writes one file after another, on a thread of its own.

        begin -> add, add ... -> finish     the file is there, and take_written() has it
                              -> abandon    there is none

    Nobody waits for the disk: whoever adds looks at `unwritten_bytes` before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._written: queue.SimpleQueue[Segment] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two counts
        self.unwritten_bytes = 0  # that the disk does not have yet
        self.n_unwritten_files = 0  # that were begun, and are not there yet
        self.failure = ""  # why nothing is written any more, in words
        self._file: _NewFile | None = None  # of the thread alone
        threading.Thread(target=self._run, name="disk", daemon=True).start()

    def begin(self, segment: Segment) -> None:
        """Begin a file; the one before is finished or abandoned."""
        with self._lock:
            self.n_unwritten_files += 1

        def begin() -> None:
            self._file = _NewFile(self._folder, segment)

        self._orders.put(begin)

    def add(self, data: npt.NDArray[Any]) -> None:
        """Add the next array. It belongs to the writer from now on."""
        with self._lock:
            self.unwritten_bytes += data.nbytes

        def add() -> None:
            with self._lock:
                self.unwritten_bytes -= data.nbytes
            if self._file is not None:
                self._file.add(data)

        self._orders.put(add)

    def finish(self) -> None:
        """Let the file appear under its name, once the disk has it."""

        def finish() -> None:
            try:
                if self._file is not None:
                    self._file.finish()
                    self._written.put(self._file.segment)
                    self._file = None
            finally:
                self._count_end()

        self._orders.put(finish)

    def abandon(self) -> None:
        """Forget the file that was begun."""

        def abandon() -> None:
            self._drop_file()
            self._count_end()

        self._orders.put(abandon)

    def wait(self, timeout: float) -> bool:
        """Wait until everything is done that was asked; whether it was in time."""
        is_done = threading.Event()
        self._orders.put(is_done.set)
        return is_done.wait(timeout)

    def take_written(self) -> list[Segment]:
        """The segments whose files have appeared since the last call."""
        segments: list[Segment] = []
        with suppress(queue.Empty):
            while True:
                segments.append(self._written.get_nowait())
        return segments

    def _count_end(self) -> None:
        with self._lock:
            self.n_unwritten_files -= 1

    def _drop_file(self) -> None:
        if self._file is not None:
            self._file.drop()
        self._file = None

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                order()
            except Exception as error:  # noqa: BLE001 - the server goes on without it
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Write nothing any more. What is there can still be read."""
        if not self.failure:
            self.failure = getattr(error, "strerror", None) or repr(error)
            logger.warning("disk cache: nothing is written any more: %s", self.failure)
        self._drop_file()


class _NewFile:
    """A file that is being written."""

    def __init__(self, folder: Path, segment: Segment) -> None:
        """Raises OSError."""
        self.segment = segment
        self._path = folder / (segment.name + _SEGMENT_SUFFIX)
        self._new_path = folder / (segment.name + _NEW_SUFFIX)
        self._checksums = dict.fromkeys(segment.arrays, "0" * 8)
        self._names = iter(segment.arrays)  # of the arrays that are not written yet
        self._file = _open_private(self._new_path)
        self._file.write(_write_header(segment, self._checksums))

    def add(self, data: npt.NDArray[Any]) -> None:
        """Write the next array. Raises OSError."""
        name = next(self._names)
        assert data.nbytes == self.segment.arrays[name].nbytes
        self._checksums[name] = _checksum(data)
        self._file.write(data)

    def finish(self) -> None:
        """Give the file its checksums and its name. Raises OSError."""
        self._file.seek(0)
        self._file.write(_write_header(self.segment, self._checksums))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._new_path.replace(self._path)
        _sync_folder(self._path.parent)

    def drop(self) -> None:
        """Leave nothing of it."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._new_path.unlink()


def _open_private(path: Path) -> BinaryIO:
    """A new file that nobody else can read. Raises OSError."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _sync_folder(folder: Path) -> None:
    """Let the disk have the names in a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- 2 which segments there are --------------------------------------------------------


class _PromptNames:
    """The names of the beginnings of a prompt."""

    def __init__(self, key: TokenKey) -> None:
        self._key = key
        self._hashes = block_hashes(key.tokens, LANDMARK_TOKENS, root=key.salt)
        self.landmarks = [name.hex()[:32] for name in self._hashes]  # of 256, 512 ...

    def name_of(self, end: int) -> str:
        """Of the first `end` tokens."""
        n_landmarks = end // LANDMARK_TOKENS
        before = self._hashes[n_landmarks - 1] if n_landmarks else self._key.salt
        rest = self._key.tokens[n_landmarks * LANDMARK_TOKENS : end]
        return sha256(before + rest.astype("<i4").tobytes() + b".").hexdigest()[:32]

    def landmarks_in(self, start: int, end: int) -> tuple[str, ...]:
        """Of the beginnings whose length is in (start, end]."""
        first = start // LANDMARK_TOKENS
        return tuple(self.landmarks[first : end // LANDMARK_TOKENS])


class DiskMatch(NamedTuple):
    """What the disk has of a prompt.

    The KV of each segment counts up to the start of the next one, that of the last one
    up to `depth`.
    """

    segments: tuple[Segment, ...] = ()  # from the root on
    depth: int = 0  # leading tokens with KV

    def parts(self) -> Iterator[tuple[Segment, int]]:
        """Each segment, with the position up to which its KV counts."""
        starts_of_next = [segment.start for segment in self.segments[1:]]
        yield from zip(self.segments, [*starts_of_next, self.depth], strict=False)

    def positions(self) -> list[int]:
        """Where states are known, ascending."""
        return [
            position
            for segment, end in self.parts()
            for position in sorted(segment.states)
            if position <= end
        ]


NO_DISK_MATCH: Final = DiskMatch()


class LoadedKV(NamedTuple):
    """KV [start, end) of a prompt from the disk, and states at positions in it."""

    span: KVSpan
    states: dict[int, StateCheckpoint]


class DiskReport(TypedDict):
    """The cache on disk, as GET /v1/status shows it."""

    folder: str
    files: int
    bytes: int
    max_bytes: int
    written_today_bytes: int
    max_bytes_per_day: int
    off: NotRequired[str]  # why nothing is written any more


class DiskCache:
    """The segments of one model, and which of them a prompt can use."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_bytes_per_day: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take a folder, and read the headers of its files.

        Raises DiskError: another server has the folder, or it cannot be used.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        self.max_bytes_per_day = max_bytes_per_day
        self.nbytes = 0
        self._read_speed: float | None = None  # bytes a second, of the fastest load
        self._clock = clock
        self._segments: dict[str, Segment] = {}  # by name, as all that follow
        self._used_at: dict[str, float] = {}  # Unix seconds
        self._by_landmark: defaultdict[str, list[Segment]] = defaultdict(list)
        self._children: defaultdict[str, list[Segment]] = defaultdict(list)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock_file = (folder / "lock").open("a")
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(folder / "lock")  # see _drop_other_folders
            self._scan()
            self.image_secret = self._read_secret()
        except BlockingIOError as error:
            raise DiskError("another server uses it") from error
        except OSError as error:
            raise DiskError(error.strerror or str(error)) from error
        self._written_day, self._written_bytes = self._read_written()
        self.writer = SegmentWriter(folder)

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock_file.close()

    # -- the folder --------------------------------------------------------------------

    def _scan(self) -> None:
        """Read what there is; delete what is damaged, half written or alone."""
        for path in self.folder.glob("*" + _NEW_SUFFIX):
            with suppress(OSError):
                path.unlink()
        found: list[Segment] = []
        for path in self.folder.glob("*" + _SEGMENT_SUFFIX):
            try:
                header = _read_header(path)
            except DiskError as fault:
                self._delete_file(path, fault)
                continue
            except OSError:
                continue  # it cannot be read now
            self._used_at[header.segment.name] = header.used_at
            found.append(header.segment)
        # A parent begins before its children do, so it is there first.
        for segment in sorted(found, key=lambda segment: segment.start):
            self._add(segment)
        self._make_room()

    def _read_secret(self) -> bytes:
        """What is in the names of images: always the same. Raises OSError."""
        path = self.folder / "secret"
        with suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == 16:
                return secret
        secret = os.urandom(16)
        with _open_private(path) as file:
            file.write(secret)
        return secret

    def _read_written(self) -> tuple[int, int]:
        """The day that was written on last, and how many bytes."""
        with suppress(OSError, ValueError):
            day, n_bytes = (self.folder / "written").read_text().split()
            return int(day), int(n_bytes)
        return 0, 0

    @property
    def written_today_bytes(self) -> int:
        """Bytes of files since midnight UTC, also of earlier servers."""
        is_today = self._written_day == self._today()
        return self._written_bytes if is_today else 0

    def _today(self) -> int:
        return int(self._clock() // _SECONDS_A_DAY)

    def _count_written(self, segment: Segment) -> None:
        self._written_bytes = self.written_today_bytes + segment.nbytes
        self._written_day = self._today()
        with suppress(OSError):
            text = f"{self._written_day} {self._written_bytes}\n"
            (self.folder / "written").write_text(text)

    def may_write(self, n_bytes: int) -> bool:
        """Whether so many bytes more may be written today."""
        if self.writer.failure or n_bytes > self.max_bytes:
            return False
        return self.written_today_bytes + n_bytes <= self.max_bytes_per_day

    def _path_of(self, segment: Segment) -> Path:
        return self.folder / (segment.name + _SEGMENT_SUFFIX)

    def _delete_file(self, path: Path, reason: object) -> None:
        logger.warning("disk cache: %s is deleted: %s", path.name, reason)
        with suppress(OSError):
            path.unlink()

    # -- the index ---------------------------------------------------------------------

    def _add(self, segment: Segment) -> None:
        """Add a segment whose file is there; without its parent, it is deleted."""
        parent = self._segments.get(segment.parent)
        has_parent = parent is not None and parent.start < segment.start <= parent.end
        if segment.start and not has_parent:
            self._delete_file(self._path_of(segment), "what comes before it is gone")
            return
        self.nbytes += segment.nbytes
        self._segments[segment.name] = segment
        self._used_at.setdefault(segment.name, self._clock())
        self._children[segment.parent].append(segment)
        for landmark in segment.landmarks:
            self._by_landmark[landmark].append(segment)

    def collect(self) -> None:
        """Take over the files that were written since the last call, and make room."""
        for segment in self.writer.take_written():
            self._count_written(segment)
            if segment.name not in self._segments:
                self._add(segment)
            self._note_use(self._segments.get(segment.name))
        self._make_room()

    def _make_room(self) -> None:
        while self.nbytes > self.max_bytes:
            leaves = [
                s for s in self._segments.values() if not self._children.get(s.name)
            ]
            self.remove(min(leaves, key=self._value_of))

    def _value_of(self, segment: Segment) -> float:
        """The prefill that a segment saves for each of its bytes, less by its age."""
        age_seconds = self._clock() - self._used_at[segment.name]
        age_days = max(0.0, age_seconds) / _SECONDS_A_DAY
        n_tokens = segment.end - segment.start
        work = n_tokens * (1.0 + segment.end / DOUBLE_COST_DEPTH)
        return work / segment.nbytes / (1.0 + age_days)

    def remove(self, segment: Segment) -> None:
        """Delete a segment, and those that continue it."""
        family = [segment]
        for member in family:  # it grows meanwhile
            family += self._children.get(member.name, ())
        for member in reversed(family):
            self._remove_one(member)

    def _remove_one(self, segment: Segment) -> None:
        if self._segments.pop(segment.name, None) is None:
            return
        self.nbytes -= segment.nbytes
        self._used_at.pop(segment.name)
        self._children.pop(segment.name, None)
        self._children[segment.parent].remove(segment)
        for landmark in segment.landmarks:
            self._by_landmark[landmark].remove(segment)
            if not self._by_landmark[landmark]:
                del self._by_landmark[landmark]
        with suppress(OSError):
            self._path_of(segment).unlink()

    def remove_session(self, tenant: str, session: str | None) -> None:
        """Delete what is of a session, or of a tenant (None), and what continues it."""
        self._remove_all(
            segment
            for segment in self._segments.values()
            if is_seen_by(tenant, segment.tenant) and session in (None, segment.session)
        )

    def remove_idle(self, ttl_seconds: float) -> None:
        """Delete what was not used for so long. What continues it was not, either."""
        oldest = self._clock() - ttl_seconds
        self._remove_all(
            segment
            for segment in self._segments.values()
            if self._used_at[segment.name] < oldest
        )

    def remove_prompt(self, key: TokenKey) -> None:
        """Delete what would be loaded for a prompt: it may be faulty (L-114)."""
        self._remove_all(self.find(key).segments)

    def _remove_all(self, segments: Iterable[Segment]) -> None:
        for segment in list(segments):
            self.remove(segment)

    # -- lookup ------------------------------------------------------------------------

    def find(self, key: TokenKey) -> DiskMatch:
        """The segments that have most of a prompt. Their tokens are compared."""
        landmarks = _PromptNames(key).landmarks
        known = set(landmarks)

        def is_missing(number: int) -> bool:
            return landmarks[number] not in self._by_landmark

        # A segment is here only with all before it. So where a beginning is known, all
        # shorter ones are.
        n_known = bisect_left(range(len(landmarks)), True, key=is_missing)
        if not n_known:
            return NO_DISK_MATCH
        segments = list(self._by_landmark[landmarks[n_known - 1]])
        matches = [self._follow(segment, key, known) for segment in segments]
        return max(matches, key=lambda match: match.depth)

    def has_segment(self, key: TokenKey, end: int) -> bool:
        """Whether there is a file of the first `end` tokens, found by `find` or not."""
        return _PromptNames(key).name_of(end) in self._segments

    def _follow(self, segment: Segment, key: TokenKey, known: set[str]) -> DiskMatch:
        """What a segment, its parents and those that continue it have of a prompt.

        `known`: the landmarks of the prompt.
        """
        depth = self._common_depth(segment, key)
        if depth <= segment.start:
            return NO_DISK_MATCH
        path = [segment]
        while True:
            children = self._children_before(path[-1], depth, known)
            depths = [self._common_depth(child, key) for child in children]
            deepest = max(depths, default=0)
            if deepest <= depth:
                break
            path.append(children[depths.index(deepest)])
            depth = deepest
        while path[0].parent:
            path.insert(0, self._segments[path[0].parent])
        return DiskMatch(tuple(path), depth)

    def _children_before(
        self, segment: Segment, depth: int, known: set[str]
    ) -> list[Segment]:
        """Those that continue a segment from a position up to `depth`.

        Of more than MAX_COMPARED, such as sessions on one system prompt, only those
        whose first landmark is one of the prompt's: their tokens need not be read.
        """
        children = self._children.get(segment.name, ())
        children = [child for child in children if child.start <= depth]
        if len(children) > MAX_COMPARED:
            children = [c for c in children if known.intersection(c.landmarks[:1])]
        return children

    def _common_depth(self, segment: Segment, key: TokenKey) -> int:
        """Up to where a segment has the tokens of a prompt; 0 if it is damaged."""
        try:
            data = _read_arrays(self._path_of(segment), {"tokens"})["tokens"]
        except (DiskError, OSError) as fault:
            self._note_fault(segment, fault)
            return 0
        tokens = data.view("<i4")
        wanted = key.tokens[segment.start : segment.end]
        return segment.start + common_prefix_length(tokens, wanted)

    def _note_fault(self, segment: Segment, fault: Exception) -> None:
        """Delete a damaged segment; one that could only not be read stays."""
        if isinstance(fault, (DiskError, FileNotFoundError)):
            logger.warning("disk cache: %s is deleted: %s", segment.name, fault)
            self.remove(segment)

    def expected_seconds(self, match: DiskMatch, start: int) -> float:
        """How long it takes to load KV [start, depth), by the fastest load so far.

        0.0 before any.
        """
        if self._read_speed is None:
            return 0.0
        n_bytes = sum(segment.nbytes for segment, end in match.parts() if end > start)
        return n_bytes / self._read_speed

    def read(self, match: DiskMatch, start: int, end: int) -> LoadedKV | None:
        """KV [start, end) of a match, with the states where requests will go on.

        Those are the one at `end`, and the one where system prompt and tools end. None
        if a file cannot be read; a damaged one is deleted.
        """
        began = time.monotonic()
        spans: list[KVSpan] = []
        states: dict[int, StateCheckpoint] = {}
        n_bytes = 0
        for segment, part_end in match.parts():
            low, high = max(start, segment.start), min(end, part_end)
            if low >= high:
                continue
            positions = [
                position
                for position in segment.states
                if low < position <= high and position in (end, segment.head_end)
            ]
            try:
                arrays = _load_arrays(self._path_of(segment), segment, positions)
            except (DiskError, OSError) as fault:
                self._note_fault(segment, fault)
                return None
            n_bytes += sum(array.nbytes for array in arrays.values())
            spans.append(_read_span(segment, arrays, low, high))
            for position in positions:
                leaves = _state_from_json(segment.states[position], arrays)
                states[position] = make_checkpoint(leaves)
            self._note_use(segment)
        speed = n_bytes / max(time.monotonic() - began, 1e-6)
        self._read_speed = max(speed, self._read_speed or 0.0)
        return LoadedKV(spans[0].join(*spans[1:]), states)

    def _note_use(self, segment: Segment | None) -> None:
        """Remember, beyond a restart, that a segment and its parents are used now."""
        now = self._clock()
        while segment is not None:
            self._used_at[segment.name] = now
            with suppress(OSError):
                os.utime(self._path_of(segment), (now, now))
            segment = self._segments.get(segment.parent)

    def report(self) -> DiskReport:
        """The cache on disk, for people."""
        report: DiskReport = {
            "folder": str(self.folder),
            "files": len(self._segments),
            "bytes": self.nbytes,
            "max_bytes": self.max_bytes,
            "written_today_bytes": self.written_today_bytes,
            "max_bytes_per_day": self.max_bytes_per_day,
        }
        if self.writer.failure:
            report["off"] = self.writer.failure
        return report


# -- 3 KV to bytes, and back -----------------------------------------------------------


class _ArrayKind(NamedTuple):
    """A type of arrays: in MLX, in numpy, which has no bfloat16, and its size."""

    mlx_type: mx.Dtype
    numpy_type: str
    size: int  # bytes of one number


_ARRAY_TYPES: Final[Mapping[str, _ArrayKind]] = {
    "BF16": _ArrayKind(mx.bfloat16, "<u2", 2),
    "F16": _ArrayKind(mx.float16, "<f2", 2),
    "F32": _ArrayKind(mx.float32, "<f4", 4),
    "U32": _ArrayKind(mx.uint32, "<u4", 4),
    "U8": _ArrayKind(mx.uint8, "<u1", 1),
    "I32": _ArrayKind(mx.int32, "<i4", 4),
    "I64": _ArrayKind(mx.int64, "<i8", 8),
    "BOOL": _ArrayKind(mx.bool_, "|b1", 1),
}
_NAMES_OF_TYPES: Final = {kind.mlx_type: name for name, kind in _ARRAY_TYPES.items()}


class _PlannedSegment(NamedTuple):
    """A segment to be written, and what its arrays are, in their order."""

    segment: Segment
    # Each function returns one array of the entry. It is called between two steps, when
    # the array is copied: KV that is held longer would be copied by a request that
    # writes into it (L-03). States are never written into, so they may be held.
    readers: list[Callable[[], mx.array]]


def _plan_segment(entry: CacheEntry, match: DiskMatch, end: int) -> _PlannedSegment:
    """The segment [match.depth, end) of an entry at rest; `match` is all before it."""
    start = match.depth
    assert entry.start <= start < end <= entry.end
    readers = _find_readers(entry, start, end)
    states: dict[int, Any] = {}
    for position in _states_to_write(entry, start, end):
        leaves = entry.checkpoints[position].leaves
        states[position] = _state_to_json(leaves, f"state.{position}", readers)

    names = _PromptNames(entry.key._replace(tokens=entry.key.tokens[:end]))
    segment = Segment(
        name=names.name_of(end),
        parent=match.segments[-1].name if match.segments else "",
        start=start,
        end=end,
        landmarks=names.landmarks_in(start, end),
        head_end=entry.head_end,
        tenant=entry.owner.tenant,
        session=entry.owner.session,
        states=states,
        arrays={name: _describe_array(read()) for name, read in readers.items()},
    )
    return _PlannedSegment(segment, list(readers.values()))


def _find_readers(
    entry: CacheEntry, start: int, end: int
) -> dict[str, Callable[[], mx.array]]:
    """What returns the tokens, and the KV of each layer, of [start, end)."""
    readers: dict[str, Callable[[], mx.array]] = {}
    tokens = entry.key.tokens[start:end]
    readers["tokens"] = partial(mx.array, tokens)
    n_arrays = len(entry.rested_span().arrays)
    for number in range(n_arrays):
        readers[f"kv.{number}"] = partial(_read_kv, entry, number, start, end)
    return readers


def _read_kv(entry: CacheEntry, number: int, start: int, end: int) -> mx.array:
    """Keys or values of one layer, of the tokens [start, end)."""
    array = entry.rested_span().arrays[number]
    return array[..., start - entry.start : end - entry.start, :]


def _states_to_write(entry: CacheEntry, start: int, end: int) -> list[int]:
    """The positions in (start, end] whose states are worth their bytes.

    Always the last one, and that where system prompt and tools end: there requests go
    on. Of the others the last ones, until all together are as large as the KV of these
    tokens: in a hybrid model one state can be as large as the KV of 3,000 tokens.
    """
    span = entry.rested_span()
    left_bytes = span.nbytes * (end - start) // span.length
    states = entry.own_checkpoints(start, end)
    positions: list[int] = []
    for position in sorted(states, reverse=True):
        left_bytes -= states[position].nbytes
        is_needed = not positions or position == entry.head_end
        if is_needed or left_bytes >= 0:
            positions.append(position)
    return sorted(positions)


def _describe_array(array: mx.array) -> ArrayInfo:
    return ArrayInfo(
        dtype=cast(_ArrayType, _NAMES_OF_TYPES[array.dtype]), shape=tuple(array.shape)
    )


def _copy_array(array: mx.array) -> npt.NDArray[Any]:
    """The bytes of an array.

    why(L-124): what the processor reads of an array in use moves out of a GPU's memory.
    So it is copied by the device first.
    """
    device_copy = mx.where(mx.array(True), array, array)
    if device_copy.dtype == mx.bfloat16:
        device_copy = device_copy.view(mx.uint16)
    return np.array(device_copy).reshape(-1).view(np.uint8)


def _state_to_json(
    part: Any, name: str, readers: dict[str, Callable[[], mx.array]]
) -> Any:
    """A state as JSON; what returns its arrays is put into `readers`, by their names.

    (keys, None, 3) becomes {"tuple": [{"array": "state.31.0"}, null, 3]}.
    """
    if isinstance(part, mx.array):
        readers[name] = lambda: part
        return {"array": name}
    if isinstance(part, (list, tuple)):
        parts = [
            _state_to_json(inner_part, f"{name}.{number}", readers)
            for number, inner_part in enumerate(part)
        ]
        return {"list" if isinstance(part, list) else "tuple": parts}
    assert part is None or isinstance(part, (int, float, str)), type(part)
    return part


def _state_from_json(described: Any, arrays: Mapping[str, mx.array]) -> Any:
    """The state of which _state_to_json made JSON."""
    match described:
        case {"array": name}:
            return arrays[name]
        case {"list": parts}:
            return [_state_from_json(part, arrays) for part in parts]
        case {"tuple": parts}:
            return tuple(_state_from_json(part, arrays) for part in parts)
    return described


def _load_arrays(
    path: Path, segment: Segment, positions: Sequence[int]
) -> dict[str, mx.array]:
    """The KV of a file and its states at some positions. Raises DiskError, OSError."""
    prefixes = ("kv.", *(f"state.{position}." for position in positions))
    names = {name for name in segment.arrays if name.startswith(prefixes)}
    arrays = _read_arrays(path, names)
    return {name: _to_mlx(arrays[name], segment.arrays[name]) for name in arrays}


def _to_mlx(data: npt.NDArray[Any], info: ArrayInfo) -> mx.array:
    """The array of these bytes."""
    kind = _ARRAY_TYPES[info.dtype]
    numbers = data.view(kind.numpy_type)
    array = mx.array(numbers.reshape(info.shape))
    return array.view(kind.mlx_type) if info.dtype == "BF16" else array


def _read_span(
    segment: Segment, arrays: Mapping[str, mx.array], low: int, high: int
) -> KVSpan:
    """KV [low, high) out of the arrays of a segment."""
    n_kv = sum(name.startswith("kv.") for name in arrays)
    views = [arrays[f"kv.{number}"] for number in range(n_kv)]
    span = KVSpan(views, segment.end - segment.start)
    return span.cut(low - segment.start, high - segment.start)


# -- 4 what the model thread does ------------------------------------------------------


def wants_disk_cache(config: Config) -> bool:
    """Whether KV may be written to the disk: it is what people have said.

    By default only where one person uses the server, on this machine.
    """
    if not config.prompt_cache_max_entries_global:
        return False
    if config.cache_disk != "auto":
        return config.cache_disk == "on"
    is_local = is_loopback(config.mlx_host) and is_loopback(config.proxy_host)
    return is_local and config.cache_isolation == "none"


def open_disk_cache(config: Config, identity: str) -> DiskCache | None:
    """The cache on disk of a model; None, and a line in the log, if there is none.

    `identity` stands for all that makes KV of the same tokens another one, but tenants.
    """
    root = Path(config.cache_disk_folder or "~/.cache/start-llm").expanduser()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        max_bytes = _find_disk_limit(config, root)
        folder = root / identity
        _drop_other_folders(folder, max_bytes // 2)
        max_daily_bytes = config.cache_disk_max_bytes_per_day
        disk = DiskCache(
            folder,
            max_bytes=max_bytes,
            max_bytes_per_day=max_daily_bytes or _DAILY_FACTOR * max_bytes,
        )
    except (DiskError, OSError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else fault
        logger.warning("disk cache: %s is not used: %s", root, reason)
        return None
    logger.info(
        "disk cache: %d files, %s of %s, in %s",
        len(disk._segments),
        in_bytes(disk.nbytes),
        in_bytes(max_bytes),
        folder,
    )
    return disk


def _find_disk_limit(config: Config, root: Path) -> int:
    """CACHE_DISK_MAX_BYTES or its default, for which files of the cache count as free.

    Raises OSError.
    """
    if config.cache_disk_max_bytes:
        return config.cache_disk_max_bytes
    free_bytes = shutil.disk_usage(root).free + _count_files(root)
    return min(_DEFAULT_DISK_BYTES, free_bytes // _DISK_PART)


def _count_files(folder: Path) -> int:
    n_bytes = 0
    for path in folder.rglob("*" + _SEGMENT_SUFFIX):
        with suppress(FileNotFoundError):  # the server of another model has deleted it
            n_bytes += path.stat().st_size
    return n_bytes


def _drop_other_folders(folder: Path, max_bytes: int) -> None:
    """Delete the folders of other models, the least recently used first, to a limit.

    Raises OSError.
    """
    locks = [lock for lock in folder.parent.glob("*/lock") if lock.parent != folder]
    locks.sort(key=lambda lock: lock.stat().st_mtime, reverse=True)
    n_bytes = 0
    for lock in locks:
        n_bytes += _count_files(lock.parent)
        if n_bytes <= max_bytes:
            continue
        with lock.open("a") as file, suppress(BlockingIOError):  # it is used
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


class DiskTier:
    """Loads what only the disk has, and writes what only memory has.

    Entries that rest are written, some arrays between two steps. Nothing is written of
    one that runs. If a request continues the entry that is being written, the file is
    abandoned: what is new is written when the entry rests again.

    Where memory is short, what will be evicted next is written as soon as it rests
    (L-163). An eviction itself waits for no file.
    """

    def __init__(self, disk: DiskCache, cache: PrefixCache, spec: KVSpec) -> None:
        self.files = disk
        self._cache = cache
        self._spec = spec
        self._clock = time.monotonic
        max_tokens = MAX_SEGMENT_BYTES // max(spec.token_bytes, 1)
        self._max_tokens = max(LANDMARK_TOKENS, max_tokens)  # of a segment
        # The key of each entry as it rested last, and how many tokens the disk has.
        self._saved: dict[CacheEntry, tuple[TokenKey, int]] = {}
        self._forgotten: list[tuple[str, str | None]] = []  # while the disk was slow
        self._job: Generator[None] | None = None
        self._share = SAVE_SHARE  # of the time of running requests that the job takes
        self._not_before = 0.0  # when to go on, beside running requests

    def load(
        self,
        key: TokenKey,
        match: PrefixMatch,
        *,
        owner: RequestOwner,
        prefill_speed: float | None,
    ) -> int:
        """Load what the disk has of a prompt beyond `match` into an entry at rest.

        There must be memory for the whole prompt. Returns how many tokens were loaded:
        0 if the disk has hardly more, or if reading them is faster. `prefill_speed`:
        tokens a second; None: not known.
        """
        n_known = len(key.tokens) - 1
        if n_known - match.depth < MIN_LOADED_TOKENS:
            return 0  # memory has it: nothing is looked up
        found = self.files.find(key)
        depth = min(found.depth, n_known)
        if self._spec.has_state:
            depth = max((p for p in found.positions() if p <= depth), default=0)
        n_more = depth - match.depth
        if n_more < MIN_LOADED_TOKENS:
            return 0
        is_branch = match.cached_tokens >= MIN_PREFIX_TOKENS
        start = match.cached_tokens if is_branch else 0
        load_seconds = self.files.expected_seconds(found, start)
        if prefill_speed and load_seconds > n_more / prefill_speed:
            return 0

        loaded = self.files.read(found, start, depth)
        if loaded is None:
            return 0
        entry = CacheEntry(
            key,
            parent=match.kv_owner if is_branch else None,
            start=start,
            end=depth,
            span=loaded.span,
            checkpoints=loaded.states,
            owner=owner,
            head_end=found.segments[0].head_end,
        )
        self._cache.add_loaded(entry)
        return n_more

    def save_some(self, *, is_busy: bool, is_closing: bool = False) -> bool:
        """Copy some arrays, for SAVE_PIECE_SECONDS. Returns False if there is nothing.

        `is_busy`: requests run, and wait for this. `is_closing`: there will be no later
        chance, so everything is written now.
        """
        began = self._clock()
        if is_busy and began < self._not_before:
            return True
        writer = self.files.writer
        # What comes after a file may continue it, so it has to be in the index first.
        is_file_ending = self._job is None and writer.n_unwritten_files > 0
        if is_file_ending or writer.unwritten_bytes > MAX_UNWRITTEN_BYTES:
            if not is_busy:
                writer.wait(WRITER_WAIT_SECONDS)
            return True
        if self._job is None:
            self._job = self._find_job(is_busy=is_busy, is_closing=is_closing)
        if self._job is None:
            self._not_before = began + LOOK_SECONDS
            return False

        for _ in self._job:
            if self._clock() - began >= SAVE_PIECE_SECONDS:
                break
        else:
            self._job = None
        now = self._clock()
        self._not_before = now + (now - began) / self._share
        return True

    def save_all(self, seconds: float) -> None:
        """Write everything that is not written yet, as far as the time is enough."""
        deadline = self._clock() + seconds
        while self._clock() < deadline:
            if not self.save_some(is_busy=False, is_closing=True):
                break

    def _find_job(self, *, is_busy: bool, is_closing: bool) -> Generator[None] | None:
        """Begin to write what is due: what memory loses next, or else the newest."""
        self.files.collect()
        for tenant, session in self._forgotten:
            self.files.remove_session(tenant, session)
        self._forgotten.clear()
        if not self.files.may_write(MIN_SAVED_TOKENS * self._spec.token_bytes):
            return None
        entries = set(self._cache.entries)
        self._saved = {e: saved for e, saved in self._saved.items() if e in entries}
        endangered = self._cache.next_to_go(self._cache.max_bytes // SPILL_PART)
        self._share = SPILL_SHARE
        job = self._begin_first(endangered, min_seconds=0.0)
        if job is not None:
            return job

        resting = [entry for entry in entries if not entry.is_running]
        resting.sort(key=lambda entry: entry.last_used, reverse=True)
        min_seconds = SAVE_BUSY_SECONDS if is_busy else SAVE_AFTER_SECONDS
        self._share = SAVE_SHARE
        return self._begin_first(
            resting, min_seconds=0.0 if is_closing else min_seconds
        )

    def _begin_first(
        self, entries: Iterable[CacheEntry], *, min_seconds: float
    ) -> Generator[None] | None:
        """Begin to write the first one that is due; None if there is none."""
        for entry in entries:
            if self._is_due(entry, min_seconds=min_seconds):
                job = self._begin(entry)
                if job is not None:
                    return job
        return None

    def _is_due(self, entry: CacheEntry, *, min_seconds: float) -> bool:
        """Whether to write an entry: much that is new, or little that has rested long.

        `min_seconds`: of rest; 0.0 if there is no later chance.
        """
        # Of fewer than LANDMARK_TOKENS, no lookup would find a file.
        min_end = MIN_SAVED_TOKENS if min_seconds else LANDMARK_TOKENS
        rest_seconds = self._clock() - entry.last_used
        if entry.end < min_end or rest_seconds < min_seconds:
            return False
        n_new = entry.end - self._find_saved_end(entry)
        if min_seconds and n_new < MIN_SAVED_TOKENS:
            min_seconds = SAVE_SHORT_SECONDS
        return n_new >= MIN_SEGMENT_TOKENS and rest_seconds >= min_seconds

    def _find_saved_end(self, entry: CacheEntry) -> int:
        """How many tokens of an entry the disk has; looked up when it has run."""
        key, end = self._saved.get(entry, (None, 0))
        if key is entry.key:
            return end
        return self._find_on_disk(entry).depth

    def _find_on_disk(self, entry: CacheEntry) -> DiskMatch:
        key = entry.key._replace(tokens=entry.key.tokens[: entry.end])
        match = self.files.find(key)
        self._saved[entry] = (entry.key, match.depth)
        return match

    def _begin(
        self, entry: CacheEntry, *, min_tokens: int = MIN_SEGMENT_TOKENS
    ) -> Generator[None] | None:
        """Begin to write what the disk lacks of an entry; its parent comes first."""
        match = self._find_on_disk(entry)
        if match.depth < entry.start:
            parent = entry.parent
            assert parent is not None
            return None if parent.is_running else self._begin(parent, min_tokens=1)
        end = min(entry.end, match.depth + self._max_tokens)
        n_tokens = end - match.depth
        n_bytes = n_tokens * self._spec.token_bytes
        if n_tokens < min_tokens or not self.files.may_write(n_bytes):
            return None
        if self.files.has_segment(entry.key, end):  # too short for a lookup to find
            self._saved[entry] = (entry.key, end)
            return None
        return self._write(entry, match, end)

    def _write(self, entry: CacheEntry, match: DiskMatch, end: int) -> Generator[None]:
        """Hand a segment to the writer, an array at a time."""
        key, entry_end = entry.key, entry.end
        segment, readers = _plan_segment(entry, match, end)
        writer = self.files.writer
        writer.begin(segment)
        is_whole = False
        try:
            for read in readers:
                # A request may have taken the KV since the last step, or it is evicted.
                has_changed = entry.key is not key or entry.end != entry_end
                if entry.span is None or has_changed:
                    return
                writer.add(_copy_array(read()))
                yield
            is_whole = True
        finally:
            if is_whole:
                writer.finish()
                self._saved[entry] = (key, end)
            else:
                writer.abandon()

    def forget(self, tenant: str, session: str | None) -> None:
        """Delete what is of a session, or of a tenant (None), or is on its way."""
        if self._job is not None:
            self._job.close()
            self._job = None
        if not self.files.writer.wait(FORGET_SECONDS):
            self._forgotten.append((tenant, session))  # deleted once it is there
        self.files.collect()
        self.files.remove_session(tenant, session)
        # What continued it is gone, too, and is written again if memory has it.
        self._saved.clear()


# region SESSIONS ==============================================================
# What each session sent last, and why the next request could not reuse more of it.
#
# All of this is for people: the status page, session logs, warnings. Nothing here finds
# KV. (LEDGER compares the session id that a client sends; PREFIX CACHE shows and drops
# entries by the one that session_id_for() returns.)
#
#     SessionIndex       figures of the last requests of each session
#     SessionTurnStore   the messages that each session has sent: which ones are new?
#     RequestHistory     answered requests as a whole, to compare the next one with
#     explain_miss       from two requests to the reason in a sentence
#
# Two requests are compared by their tokens, and by their canonical messages:
#
#     earlier    [0 ............ common) ........ end)
#     request    [0 ............ common) ................. end)
#     reused     [0 ... cached)
#                              ^ from here to common: KV or state is missing
#                                       ^ from here on: the messages differ
#
# From other sections: a CanonicalMessage is a message without what changes by itself,
# and its digest; a context key stands for the template, the tools and the settings that
# the template renders before the messages.
#
# Public   SessionIndex, SessionRow, session_id_for, SessionTurnStore, RequestHistory,
#          SentRequest, MissReason, count_reread_tokens, explain_miss, message_diff
# Uses     CONFIG, API TYPES, CANONICALIZATION, TEMPLATE TRAITS, TOKEN HASHES
# Owns     _sessions_lock, _turns_lock, _history_lock
# Thread   any

MIN_LOST_TOKENS: Final = 16  # so many, or fewer, are as a rule a generation prompt
EXCERPT_MARGIN: Final = 40  # characters before a difference; twice as many after it


def session_id_for(
    context: SessionContext, tokens: TokenIds, *, start_key: bytes = b""
) -> str:
    """The client's session id, or else a digest of how the conversation begins.

    `start_key` stands for the messages up to the first one of the user. Where there is
    none (a completion), the digest is that of the first 128 tokens of the prompt.
    """
    if context.session_id:
        return context.session_id
    start = start_key or np.asarray(tokens[:128], dtype="<i4").tobytes()
    return f"sha1:{sha1(start, usedforsecurity=False).hexdigest()}"


# -- figures and messages of each session ----------------------------------------------


class SessionRow(TypedDict):
    """A session on the status page."""

    id: str
    idle_seconds: float
    turns: list[Mapping[str, object]]  # figures of its last requests, the oldest first


class _SessionTurns(NamedTuple):
    last_used: float
    turns: list[Mapping[str, object]]


class SessionIndex:
    """Figures of the last requests of each session. Times: seconds on one clock."""

    MAX_SESSIONS: Final = 10_000  # beyond it, the least recently used is dropped

    def __init__(self, config: Config) -> None:
        # One setting for both: a session has as many rows here as cache entries.
        self._max_turns = max(1, config.prompt_cache_max_entries_per_session)
        max_idle_seconds = config.prompt_cache_session_max_idle_seconds
        self._max_idle_seconds = max_idle_seconds or math.inf
        self._sessions_lock = threading.Lock()
        # _SessionTurns by id. items() is a list, that used last first.
        self._sessions = LRUCache(self.MAX_SESSIONS)

    def note(self, session_id: str, facts: Mapping[str, object], *, now: float) -> None:
        """Add the figures of a request that was answered."""
        with self._sessions_lock:
            session = self._sessions.get(session_id)
            turns = [*session.turns, facts] if session else [facts]
            self._sessions[session_id] = _SessionTurns(now, turns[-self._max_turns :])

    def expire(self, now: float) -> None:
        """Drop sessions that were idle for longer than the setting allows."""
        with self._sessions_lock:
            for session_id, session in self._sessions.items():
                if now - session.last_used > self._max_idle_seconds:
                    del self._sessions[session_id]

    def snapshot(self, now: float, *, newest: int = 20) -> list[SessionRow]:
        """The sessions used last, the newest first."""
        with self._sessions_lock:
            sessions = list(self._sessions.items())
        return [
            {
                "id": session_id,
                "idle_seconds": now - session.last_used,
                "turns": session.turns,
            }
            for session_id, session in sessions[:newest]
        ]


class SessionTurnStore:
    """The messages that each session has sent, as digests.

    A session has several conversations: beside the main one, clients send requests for
    a title, for a summary and for sub-agents under the same id. In a record of its own,
    the last request of a session is kept, whatever it was for: of the next request the
    session log has only the messages that are new.
    """

    MAX_SESSIONS: Final = 1_000  # beyond it, the least recently used is dropped
    MAX_CONVERSATIONS: Final = 4  # of a session

    def __init__(self) -> None:
        self._turns_lock = threading.Lock()
        # By session id: a list of conversations, the newest last; a request. Each of
        # these is the digests of its messages.
        self._conversations = LRUCache(self.MAX_SESSIONS)
        self._last_requests = LRUCache(self.MAX_SESSIONS)

    def advance(self, session_id: str, digests: Sequence[object]) -> int:
        """Record a request; how many of its first messages the session had sent."""
        n_stable = 0
        others = []  # conversations that this request does not continue
        with self._turns_lock:
            for conversation in self._conversations.get(session_id, ()):
                n_common = message_diff(conversation, digests)
                n_stable = max(n_stable, n_common)
                if n_common < len(conversation):
                    others.append(conversation)
            conversations = [*others, digests][-self.MAX_CONVERSATIONS :]
            self._conversations[session_id] = conversations
        return n_stable

    def exchange_last(self, session_id: str, digests: Sequence[object]) -> int:
        """Record a request; how many messages it has in common with the one before."""
        with self._turns_lock:
            last_request = self._last_requests.get(session_id, ())
            self._last_requests[session_id] = digests
        return message_diff(last_request, digests)

    def forget(self, session_id: str | None) -> None:
        """Drop what a session has sent; None: what all have."""
        with self._turns_lock:
            for sessions in (self._conversations, self._last_requests):
                if session_id is None:
                    sessions.clear()
                elif session_id in sessions:
                    del sessions[session_id]


def message_diff(earlier: Sequence[object], current: Sequence[object]) -> int:
    """How many leading items of two sequences are the same."""
    n_same = 0
    for earlier_item, item in zip(earlier, current, strict=False):
        if earlier_item != item:
            break
        n_same += 1
    return n_same


# -- requests to compare with ----------------------------------------------------------


class SentRequest(NamedTuple):
    """A request, as far as it takes to say how another one differs from it."""

    session_id: str
    tokens: TokenIds  # of the prompt, and of the reply if there is one
    messages: Sequence[CanonicalMessage]
    context_key: bytes
    answered_at: float = 0.0  # seconds, on the clock of RequestHistory.expire()
    n_reply_tokens: int = 0  # the last ones of `tokens`
    cost: int = 0  # see RequestHistory

    @property
    def n_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's."""
        return len(self.tokens) - self.n_reply_tokens

    @property
    def digests(self) -> list[bytes]:
        """Those of its messages."""
        return [message.digest for message in self.messages]


class RequestHistory:
    """The last answered request of each conversation; no completions."""

    MAX_COST: Final = 2_000_000  # of all; beyond it, the oldest go first
    # What each request costs, beside the larger of two figures. One is time: a new
    # request is compared with all the others, token by token. One is memory, in words
    # of 4 bytes: what no template prints takes some, too (L-128).
    REQUEST_COST: Final = 4_000

    def __init__(self, config: Config) -> None:
        self._max_age_seconds = config.ledger_ttl_seconds or math.inf
        self._history_lock = threading.Lock()
        self._requests: list[SentRequest] = []  # the oldest first

    def add(self, request: SentRequest) -> None:
        """Keep an answered chat, and drop those of its session that it continues.

        One that is too large for all of the history is not kept, nor drops any other.
        """
        digests = request.digests
        n_bytes = len(marshal.dumps([m.original for m in request.messages], 2))
        cost = self.REQUEST_COST + max(len(request.tokens), n_bytes // 4)
        if cost > self.MAX_COST:
            return
        request = request._replace(cost=cost)

        def is_continued(earlier: SentRequest) -> bool:
            if earlier.session_id != request.session_id:
                return False
            return digests[: len(earlier.messages)] == earlier.digests

        with self._history_lock:
            requests = [r for r in self._requests if not is_continued(r)]
            requests.append(request)
            total_cost = sum(r.cost for r in requests)
            while total_cost > self.MAX_COST:
                total_cost -= requests.pop(0).cost
            self._requests = requests

    def expire(self, now: float) -> None:
        """Drop requests that were answered too long ago, by the ledger's setting."""
        oldest = now - self._max_age_seconds
        with self._history_lock:
            self._requests = [r for r in self._requests if r.answered_at >= oldest]

    def forget(self, session_id: str | None) -> None:
        """Drop the requests of a session; None: all."""
        with self._history_lock:
            if session_id is None:
                self._requests = []
            self._requests = [r for r in self._requests if r.session_id != session_id]

    def find_nearest(
        self, request: SentRequest, *, session_only: bool
    ) -> SentRequest | None:
        """The request with most messages, and then most tokens, in common.

        `session_only`: of the same session. None if there is no request to choose from;
        the nearest may have nothing in common.
        """
        with self._history_lock:
            candidates = self._requests[::-1]  # of equal ones max() takes the newest
        if session_only:
            candidates = [r for r in candidates if r.session_id == request.session_id]
        digests = set(request.digests)

        def similarity(earlier: SentRequest) -> tuple[int, int]:
            n_messages = len(digests.intersection(earlier.digests))
            n_tokens = common_prefix_length(earlier.tokens, request.tokens)
            return n_messages, n_tokens

        return max(candidates, key=similarity, default=None)


# -- why not more ----------------------------------------------------------------------


def count_reread_tokens(
    earlier: SentRequest, request: SentRequest, *, cached_tokens: int
) -> int:
    """About how many tokens were read again, though their messages were sent before.

        tokens of the request   [ cached | the same, but not cached | all that follows ]
        read again                0        all of them                a share

    The share is that of characters in messages that the earlier request had, too. The
    first messages are left out of it, as far as both requests have the same: as a rule
    their tokens are those that are the same. If all messages of the earlier request
    are among them, what is left of its prompt was rendered otherwise: so many of the
    tokens that follow are read again in any case.
    """
    n_common = common_prefix_length(earlier.tokens, request.tokens)
    n_stable = 0
    if earlier.context_key == request.context_key:
        n_stable = message_diff(earlier.digests, request.digests)

    n_known = max(n_common, cached_tokens)
    n_rerendered = 0
    if earlier.messages and n_stable == len(earlier.messages):
        n_rerendered = max(0, earlier.n_prompt_tokens - n_known)

    earlier_digests = set(earlier.digests)
    n_characters = 0
    n_repeated_characters = 0
    for message in request.messages[n_stable:]:
        size = len(str(message.canonical))
        n_characters += size
        if message.digest in earlier_digests:
            n_repeated_characters += size

    repeated_share = n_repeated_characters / max(1, n_characters)
    n_following = max(0, len(request.tokens) - n_known - n_rerendered)
    n_reread = max(0, n_common - cached_tokens) + n_rerendered
    return n_reread + int(repeated_share * n_following)


class ChangedText(NamedTuple):
    """An excerpt around the first difference of two texts."""

    earlier: str
    current: str
    rule: str | None  # the RULE_... setting that could mask the difference, if one can


class MissReason(NamedTuple):
    """Why no more of an earlier request was reused."""

    sentence: str
    message_index: int | None = None  # of the first message that differs, if one does
    role: str = ""  # of that message
    change: ChangedText | None = None  # in that message, where both requests have one

    def body(self) -> JsonObject:
        """As JSON."""
        body: JsonObject = {"sentence": self.sentence}
        if self.message_index is not None:
            body["message"] = self.message_index
            body["role"] = self.role
        if self.change is not None:
            body["was"] = self.change.earlier
            body["is"] = self.change.current
            body["rule"] = self.change.rule
        return body


def explain_miss(
    earlier: SentRequest,
    request: SentRequest,
    *,
    cached_tokens: int,
    matched_tokens: int,
) -> MissReason | None:
    """Why not all tokens of an earlier request are reused; None if all that can be are.

    `matched_tokens` have KV; of these, `cached_tokens` have their state, too.
    """
    n_common = common_prefix_length(earlier.tokens, request.tokens)
    reason = None
    if len(earlier.tokens) - n_common > MIN_LOST_TOKENS:
        reason = _find_difference(earlier, request)
    if n_common - cached_tokens <= MIN_LOST_TOKENS:
        return reason

    causes = []
    if matched_tokens - cached_tokens > MIN_LOST_TOKENS:
        causes.append("layers with state can only continue from a checkpoint")
    if n_common - matched_tokens > MIN_LOST_TOKENS or not causes:
        causes.append("the KV of the others was evicted, or dropped after a failure")
    sentence = f"of {n_common} tokens that are the same {cached_tokens} are cached: "
    sentence += ", and ".join(causes)
    if reason is None:
        return MissReason(sentence)
    return reason._replace(sentence=f"{reason.sentence}; {sentence}")


def _find_difference(earlier: SentRequest, request: SentRequest) -> MissReason | None:
    """Where the messages first differ; None if the earlier request has them all."""
    if earlier.context_key != request.context_key:
        return MissReason("other tools, or other settings of the chat template")

    index = message_diff(earlier.digests, request.digests)
    if index == len(request.messages):
        return None
    message = request.messages[index]
    if index == len(earlier.messages):
        return MissReason(_judge_reply(earlier, request, message), index, message.role)

    change = _compare_texts(earlier.messages[index].canonical, message.canonical)
    sentence = f"a {message.role} message differs"
    if change.rule:
        sentence += f", which {change.rule} could mask"
    return MissReason(sentence, index, message.role, change)


def _judge_reply(
    earlier: SentRequest, request: SentRequest, message: CanonicalMessage
) -> str:
    """Why tokens are lost though all earlier messages came back; `message` is next."""
    n_common = common_prefix_length(earlier.tokens, request.tokens)
    if earlier.n_prompt_tokens - n_common > MIN_LOST_TOKENS:
        return "messages before it are now rendered differently"
    if message.role != "assistant":
        return "the last reply did not come back before it"
    return "the last reply came back changed, or is now rendered differently"


def _compare_texts(earlier: Message, current: Message) -> ChangedText:
    """The first difference of two contents; if they are equal, of whole messages."""
    text = current["content"]
    earlier_text = earlier["content"]
    if text == earlier_text:
        text = str(current)
        earlier_text = str(earlier)

    start = max(0, count_common(earlier_text, text) - EXCERPT_MARGIN)
    excerpt = slice(start, start + 3 * EXCERPT_MARGIN)
    rule = find_masking_rule(current["role"], earlier_text, text)
    return ChangedText(earlier_text[excerpt], text[excerpt], rule)


# region VISION MODEL ==========================================================
# An image as a vision model reads it: tokens, positions, embeddings.
#
# The model is one of mlx-vlm. Here it is called as one of mlx-lm is, on caches of
# mlx-lm, so that the engine knows one kind of model. An image is, in turn:
#
#     in the prompt's text   what the model's processor writes around it, and a marker
#     in the cache key       negative numbers made of its digest (TOKEN HASHES)
#     for the layers         embeddings, which the model's vision tower made of it
#
# A prefill slice contains one image at most, whole, and ends with it (L-57).
#
# Some models (Qwen, GLM) give an image's tokens positions in rows and columns (mRoPE).
# Text after it goes on after the largest of them, so from there on positions are not
# places in the KV: they are shifted.
#
#     tokens            a   b   [image: 2 rows, 3 columns]   c   d
#     place in the KV   0   1    2   3   4   5   6   7       8   9
#     position: time    0   1    2   2   2   2   2   2       5   6
#               row     0   1    2   2   2   3   3   3       5   6
#               column  0   1    2   3   4   2   3   4       5   6      shift: -3
#
# mlx-vlm remembers the shift of its last call, which may be another conversation's. So
# positions are stated in each call.
#
# Public   ImageTokens, ImagePositions, VisionModel, has_vision_tower
# Uses     ERRORS, LOGGING, WORK BUDGET, API TYPES, REQUEST IMAGES, TOKEN HASHES,
#          UPSTREAM, KV STATE
# Thread   model, mlx; image_tokens: any


class ImageTokens(NamedTuple):
    """An image as one model reads it."""

    source: SentImage
    digest: str  # names the image; with a secret in it, so nobody can make one
    text: str  # what stands for it in the prompt: a marker, and what is around it
    marker_ids: TokenIds  # markers `(n,)`, in place of its own tokens
    model_ids: TokenIds  # tokens of all of `text`
    image_slice: slice  # its own in `model_ids`, from the first to the last
    grid: Any  # its rows and columns, where the processor counts them


class ImagePositions(NamedTuple):
    """Where an image's tokens are, and what comes after them."""

    positions: npt.NDArray[np.int64]  # `(3, n)`: time, row, column, counted from 0
    shift: int  # of all text after it; 0 without mRoPE


def has_vision_tower(path: Path) -> bool:
    """Whether a model folder has a vision tower with weights that mlx-vlm can load."""
    config = json.loads((path / "config.json").read_bytes())
    if not isinstance(config.get("vision_config"), dict):
        return False
    # Conversions by mlx-lm leave the tower's weights out. Loading is lazy: this reads
    # names only.
    names: list[str] = []
    for file in path.glob("model*.safetensors"):
        weights: Any = mx.load(str(file))
        names += weights
    has_weights = any("vision" in name or "visual" in name for name in names)
    return has_weights and has_vision_class(config)


class VisionModel(Module):  # type: ignore[misc]
    """A model of mlx-vlm that is called as one of mlx-lm is."""

    def __init__(self, path: Path, *, trust_remote_code: bool) -> None:
        super().__init__()
        self.whole = load_vision_model(path, trust_remote_code=trust_remote_code)
        self._processor: Any = load_image_processor(
            path, trust_remote_code=trust_remote_code
        )
        self.image_token = image_token_id(self.whole)
        self.phrase = "<image>\n"  # until MODEL LOADING sets what the template renders
        # It is in the digest of each image, so that nobody can write markers, or find
        # two images whose markers are alike. ENGINE puts that of a disk cache here.
        self.secret = uuid.uuid4().bytes

        self._rope_index = find_rope_index(self.whole)
        self._sees_both_ways = see_images_both_ways(self.whole)

        # By digest. `_image_tokens` is for any thread, the others for the model thread.
        self._image_tokens = LRUCache(1_000)
        self._positions = LRUCache(1_000)
        self._features: OrderedDict[str, LayerInputs] = (
            OrderedDict()
        )  # oldest use first
        self.max_bytes = 0  # of features, until the Scheduler sets its share of memory
        # why(L-112): one image is unpacked at a time. Connection threads first queue in
        # `_unpacking`, so the model thread, which takes the lock alone, waits for one.
        self._unpacking = WorkBudget(1)
        self._unpack_lock = threading.Lock()

    @property
    def feature_bytes(self) -> int:
        """Bytes of what the tower made of images, as far as it is kept."""
        arrays: Any = dict(tree_flatten(self._features)).values()
        return sum(array.nbytes for array in arrays)

    # -- any thread: images as tokens --------------------------------------------------

    def check_headers(
        self, sources: Mapping[str, SentImage], *, check_client: Callable[[], None]
    ) -> None:
        """Raise BadRequest if the header of one shows that it cannot be decoded.

        `sources`: images by digest. Those that are known are not checked again.
        """
        cached = self._image_tokens
        new_digests = [digest for digest in sources if cached.get(digest) is None]
        if not new_digests:
            return
        with self._unpacking.reserve(1, check_client):
            for digest in new_digests:
                sources[digest].check_header()

    def image_tokens(
        self,
        digest: str,
        source: SentImage,
        *,
        check_client: Callable[[], None] = assume_client,
    ) -> ImageTokens:
        """An image as tokens. One not seen lately is decoded, when its turn comes.

        Raises BadRequest, and what `check_client` raises.
        """
        cached: ImageTokens | None = self._image_tokens.get(digest)
        if cached is None:
            with self._unpacking.reserve(1, check_client):
                check_client()
                cached = self._image_tokens.get(digest)  # made while this one waited
                if cached is None:
                    cached = self._make_image_tokens(digest, source)
        return cached._replace(source=source)

    def _make_image_tokens(self, digest: str, source: SentImage) -> ImageTokens:
        """An image as tokens, without its bytes, and kept like that."""
        processed = self._process(source)
        model_ids = np.ravel(processed["input_ids"]).astype(np.int32)
        places = np.flatnonzero(model_ids == self.image_token)
        if not places.size:
            raise BadRequest(
                "this model's processor makes no tokens of it", field=source.field
            )
        image_slice = slice(int(places[0]), int(places[-1]) + 1)
        markers = inject_image_markers(model_ids, image_slice, digest=digest)
        prefix = self._decode(model_ids[: image_slice.start])
        suffix = self._decode(model_ids[image_slice.stop :])

        image = ImageTokens(
            source=SentImage(b"", ""),
            digest=digest,
            text=f"{prefix}\ufdd1{digest}\ufdd2{suffix}",
            marker_ids=markers[image_slice],
            model_ids=model_ids,
            image_slice=image_slice,
            grid=processed.get("image_grid_thw"),
        )
        self._image_tokens[digest] = image
        return image

    def _decode(self, token_ids: TokenIds) -> str:
        tokenizer = self._processor.tokenizer
        text: str = tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def _process(self, source: SentImage) -> dict[str, npt.NDArray[Any]]:
        """Tokens and pixels of an image, by mlx-vlm's names. Raises BadRequest.

        A connection thread and the model thread may come here at once.
        """
        try:
            with self._unpack_lock:
                processed = self._processor(
                    text=[self.phrase], images=[source.decode()]
                )
            return {
                name: np.array(value)
                for name, value in processed.items()
                if name != "attention_mask"
            }
        except BadRequest:
            raise
        except Exception as error:  # a strip that is too narrow, for example
            logger.debug("an image cannot be prepared", exc_info=True)
            raise BadRequest(
                f"this model cannot take an image like this: {error}",
                field=source.field,
            ) from error

    # -- model thread: text ------------------------------------------------------------

    def make_cache(self) -> LayerCaches:
        """Empty caches: mlx-lm's, of the kinds of mlx-vlm's."""
        vision_caches = make_prompt_cache(self.whole.language_model)
        return [to_mlx_lm_cache(layer) for layer in vision_caches]

    def __call__(
        self,
        tokens: mx.array,
        cache: LayerCaches,
        *,
        shifts: Sequence[int] = (0,),
    ) -> mx.array:
        """Logits of text tokens `(rows, n)`. `shifts`: of rows, by all their images."""
        inputs: LayerInputs = {}
        if self._rope_index is not None:
            first_positions = row_offsets(cache) + mx.array([*shifts])
            positions = first_positions[:, None] + mx.arange(tokens.shape[1])
            inputs["position_ids"] = mx.broadcast_to(positions, (3, *positions.shape))
        logits: mx.array
        logits = self.whole.language_model(tokens, cache=cache, **inputs).logits
        return logits

    # -- model thread: images ----------------------------------------------------------

    def prefill_image(
        self,
        tokens: TokenIds,
        image: ImageTokens,
        *,
        layer_caches: LayerCaches,
        position: int,
    ) -> str:
        """Feed text and the image that it ends with.

        `tokens` are those of the cache key, with markers; `position` is that of the
        first, shifts of earlier images included. Returns the metric that counts it.
        """
        n_text = len(tokens) - len(image.marker_ids)
        image_ids = image.model_ids[image.image_slice]
        model_ids = np.concatenate([tokens[:n_text], image_ids])

        features = self._features.pop(image.digest, None)
        metric = "vlm_tower_runs" if features is None else "vlm_feature_hits"
        if features is None:
            features = self._run_tower(image)
        self._keep_features(image, features)

        inputs = self._layer_inputs(features, model_ids, n_text=n_text)
        if self._rope_index is not None:
            positions = self._slice_positions(image, n_text) + position
            position_ids = positions.astype(np.int32)
            inputs["position_ids"] = mx.array(position_ids)[:, None]
        token_ids = mx.array(model_ids)[None]
        self.whole.language_model(token_ids, cache=layer_caches, **inputs)
        return metric

    def _run_tower(self, image: ImageTokens) -> LayerInputs:
        """What the layers take of an image. It does not depend on what is before it."""
        # Pixels are made again here: nobody keeps those of all images that wait.
        pixels: dict[str, mx.array] = {}
        for name, value in self._process(image.source).items():
            if name != "input_ids":
                pixels[name] = mx.array(value)
        token_ids = mx.array(image.model_ids[image.image_slice])[None]
        features = embed_image(self.whole, token_ids, pixels)
        mx.eval(features)
        return features

    def _keep_features(self, image: ImageTokens, features: LayerInputs) -> None:
        """Remember them as used last; forget what was not used for longest."""
        self._features[image.digest] = features
        while self.feature_bytes > self.max_bytes:
            self._features.popitem(last=False)

    def forget_features(self) -> None:
        """Let the tower run again for all images: what it made may be wrong (L-114)."""
        self._features.clear()

    def _layer_inputs(
        self,
        features: LayerInputs,
        model_ids: TokenIds,
        *,
        n_text: int,
    ) -> LayerInputs:
        """What the layers take of text and the image after it, except for positions."""
        inputs = dict(features)
        if n_text:
            text_ids = mx.array(model_ids[:n_text])[None]
            text_inputs = embed_text(self.whole, text_ids)
            for name in ("inputs_embeds", "per_layer_inputs"):
                if name in text_inputs:
                    parts = [text_inputs[name], features[name]]
                    inputs[name] = mx.concatenate(parts, axis=1)
        # A copy: Gemma 3 changes it in place.
        inputs["inputs_embeds"] = mx.array(inputs["inputs_embeds"])

        is_image = model_ids == self.image_token
        is_image[:n_text] = False
        image_flags = mx.array(is_image)[None]
        if "visual_pos_masks" in features:
            inputs["visual_pos_masks"] = image_flags
        if self._sees_both_ways:
            inputs["mm_token_type_ids"] = image_flags.astype(mx.int32)
        return inputs

    def _slice_positions(
        self, image: ImageTokens, n_text: int
    ) -> npt.NDArray[np.int64]:
        """Positions `(3, n)` of text and the image after it, counted from 0."""
        text_positions = np.broadcast_to(np.arange(n_text), (3, n_text))
        image_positions = self.image_positions(image).positions + n_text
        return np.concatenate([text_positions, image_positions], axis=1)

    def image_positions(self, image: ImageTokens) -> ImagePositions:
        """Where an image's tokens are, and by how much it shifts what follows."""
        if self._rope_index is None:
            n_tokens = len(image.marker_ids)
            return ImagePositions(np.tile(np.arange(n_tokens), (3, 1)), shift=0)
        cached: ImagePositions | None = self._positions.get(image.digest)
        if cached is not None:
            return cached

        token_ids = mx.array(image.model_ids)[None]
        positions, shift = self._rope_index(
            token_ids, image_grid_thw=mx.array(image.grid)
        )
        own_positions: Any = np.array(positions)[:, 0, image.image_slice]
        own_positions = own_positions - image.image_slice.start
        shift_value: Any = shift.item()
        image_positions = ImagePositions(own_positions, shift=int(shift_value))
        self._positions[image.digest] = image_positions
        return image_positions

    def self_test(self) -> None:
        """Run the tower on a blank image, the layers on text. Raises what they do."""
        file = io.BytesIO()
        Image.new("RGB", (224, 224)).save(file, "PNG")
        source = SentImage(file.getvalue(), "a blank image")
        image = self.image_tokens("0" * 64, source)
        self._run_tower(image)
        layer_caches = self.make_cache()
        self(mx.array([[0, 0]]), layer_caches)
        evaluate_caches(layer_caches)


# region MODEL LOADING =========================================================
# From MODEL_PATH to a model that can be served, with the facts that others need of it.
#
#     choose_model    a name, where MODEL_PATH is unset   may ask a person
#     resolve_model   MODEL_PATH -> a folder              may fetch it
#     load_model      a folder -> LoadedModel             on the thread where it stays
#     Detokenizer     token ids of a reply -> text        one for each reply
#
# For example MODEL_PATH=mlx-community/Qwen3-4B-4bit names no folder here. So
# scripts/helpers/fetch_model.py finds or fetches it, and prints its folder; it is a
# process of its own, so that what it needs stays out of the server. Then load_model()
# has mlx-lm read the weights, and teaches the tokenizer the tags that mlx-lm does not
# know. The model's chat template is probed, and the facts are gathered.
#
# Public   LoadedModel, Detokenizer, ModelError, choose_model, resolve_model,
#          load_or_demo, load_model, memory_limit
# Uses     CONFIG, LOGGING, API TYPES, CHAT TEMPLATE, UPSTREAM, VISION MODEL
# Thread   choose_model: main; resolve_model, load_or_demo, load_model: model; the
#          rest any; mlx


class ModelError(Exception):
    """Why there is no model, in one sentence; main() prints it and exits with 2."""


_Kind = Literal["text", "vision"]
_DEMO_MODEL: Final = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, and facts that hold as long as the process.

    `model` is for the model thread alone.
    """

    model: Any  # called as mlx-lm's models are: (tokens `(rows, n)`, cache=LayerCaches)
    tokenizer: Any  # mlx-lm's TokenizerWrapper; it has the tags of a reply
    template: ChatTemplate
    model_id: str  # what clients see: the repository, the folder's name, or "demo"
    path: Path
    family: str  # "qwen3", "glm4" or "generic"
    revision: str  # 16 hex digits; KV of another revision is never reused
    nbytes: int  # of the weights, as loaded
    vocab_size: int  # ids are below this
    context_length: int  # tokens the model was made for
    # Tokens that prompt and reply may have: the least of `context_length`, MAX_KV_SIZE
    # and, once ENGINE knows it, what fits into memory.
    max_context_tokens: int
    eos_ids: frozenset[int]
    hidden_ids: frozenset[int]  # special tokens that mean nothing in a reply's text
    device: str  # that computes, as in "Apple M2 (gpu)"

    @property
    def is_demo(self) -> bool:
        """Whether it is the demo model, of a few million parameters."""
        return self.model_id == _DEMO_MODEL

    def for_tenant(self, tenant: str) -> LoadedModel:
        """The same model with the memos of one tenant."""
        if tenant == self.template.tenant:
            return self
        return replace(self, template=self.template.for_tenant(tenant))

    @property
    def vision(self) -> VisionModel | None:
        """The model, if it reads images."""
        return self.model if isinstance(self.model, VisionModel) else None


# -- the text of a reply ---------------------------------------------------------------


class Detokenizer:
    """Token ids of one reply -> text, in whole characters.

    All texts together are tokenizer.decode() of the ids that are not hidden.
    """

    # why(L-72): mlx-lm's detokenizers are not equal to decode(); DecodeStream is.

    def __init__(self, backend: Any, hidden_ids: frozenset[int]) -> None:
        self._backend = backend  # of the tokenizers library
        self._hidden_ids = hidden_ids
        self._stream = _new_decode_stream()
        self._pending_ids: list[int] = []  # of a character that is not complete yet

    @property
    def is_inside_character(self) -> bool:
        """Whether the last tokens are the beginning of a character."""
        return bool(self._pending_ids)

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" for a hidden id or inside a character."""
        if token in self._hidden_ids:
            return ""
        token_ids = [*self._pending_ids, token]
        try:
            text = self._stream.step(self._backend, token)
        except Exception:  # noqa: BLE001 - why(L-95): it raises no narrower one
            self._stream = _new_decode_stream()
            text = self._decode(token_ids)
        if text is None:
            self._pending_ids = token_ids
            return ""
        self._pending_ids = []
        return str(text)

    def finish(self) -> str:
        """U+FFFD for a character that is cut off at the end, as decode() has it."""
        text = self._decode(self._pending_ids)
        self._pending_ids = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


def _new_decode_stream() -> Any:
    return decoders.DecodeStream(skip_special_tokens=False)


# -- which folder ----------------------------------------------------------------------

_HUB_URL: Final = re.compile(r"^https://huggingface.co/([^/]+/[^/?#]+)([/?#].*)?$")

# In place of scripts/helpers/fetch_model.py where start-llm.py was copied alone.
_FETCH_PROGRAM: Final = """
import sys
import huggingface_hub
try:
    print(huggingface_hub.snapshot_download(sys.argv[1]))
except Exception as error:
    print("incomplete, and not fetched:", error)
    sys.exit(1)
"""


def resolve_model(config: Config) -> Path:
    """The folder that MODEL_PATH names, fetched if need be. Raises ModelError."""
    name = _read_model_name(config)
    server_folder = Path(__file__).resolve().parent
    if name == _DEMO_MODEL:
        folder = server_folder / "models" / name
    else:
        folder = Path(os.path.expanduser(name))
    if _is_complete(folder):
        return folder

    script = server_folder / "scripts" / "helpers" / "fetch_model.py"
    command = [sys.executable, "-c", _FETCH_PROGRAM, name]
    if script.is_file():
        limit = f"--memory-bytes={memory_limit(config)}"
        command = [sys.executable, str(script), limit, "--", name]
    elif name == _DEMO_MODEL:
        raise ModelError("no model is named, and no demo is here: start with --model")
    return _fetch(name, command)


def choose_model(config: Config, stop: threading.Event) -> str:
    """The model to serve where MODEL_PATH names none: the demo, or a person's choice.

    scripts/helpers/choose_model.py asks on a terminal. It is ended if `stop` is set
    meanwhile.
    """
    script = Path(__file__).resolve().parent / "scripts" / "helpers" / "choose_model.py"
    if not script.is_file():
        return _DEMO_MODEL
    command = [sys.executable, str(script)]
    if config.memory_limit_bytes:
        command.append(f"--memory-bytes={config.memory_limit_bytes}")

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not stop.wait(0.05):
            pass
        if stop.is_set():
            process.terminate()
        output, _ = process.communicate()
    return output.splitlines()[-1] if output else _DEMO_MODEL


def _read_model_name(config: Config) -> str:
    """MODEL_PATH, of a page of the hub its repository; the demo where it is unset."""
    if config.model_path:
        return _HUB_URL.sub(r"\1", config.model_path)
    return _DEMO_MODEL


def _is_complete(folder: Path) -> bool:
    """Whether a folder has a config.json and all weights that its index lists."""
    names = {"config.json", "model*.safetensors"}
    with suppress(Exception):  # fetch_model.py names what is wrong with it
        index_file = folder / "model.safetensors.index.json"
        if index_file.is_file():
            index = json.loads(index_file.read_bytes())
            names |= set(index["weight_map"].values())
        return all(any(folder.glob(name)) for name in names)
    return False


def _fetch(name: str, command: list[str]) -> Path:
    """Run the program that fetches a model; its last line is the folder."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    atexit.register(process.terminate)  # it ends when this process does
    output, _ = process.communicate()
    if process.returncode:
        reason = " ".join(output.split())
        if not reason:
            reason = "it cannot be served; the line above says why"
        raise ModelError(f"MODEL_PATH={name}: {reason}")
    if not output.strip():
        raise ModelError(f"MODEL_PATH={name}: what fetches it named no folder")
    return Path(output.splitlines()[-1])


# -- loading ---------------------------------------------------------------------------

# Tags that mlx-lm does not know (L-88), in the order of REPLY_TAGS: start and end of
# thinking, then of a call. A model has them if the last one is in its vocabulary.
_MAGISTRAL_TAGS: Final[Sequence[str]] = ("[THINK]", "[/THINK]")
_GPT_OSS_TAGS: Final[Sequence[str]] = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|channel|>commentary to=functions.",
    "<|call|>",
)


def load_or_demo(config: Config) -> LoadedModel:
    """The model of MODEL_PATH, or the demo where that cannot be fetched or loaded.

    For a model that choose_model() chose: it was never a condition of the start.
    Raises ModelError if the demo cannot be loaded.
    """
    try:
        return load_model(resolve_model(config), config)
    except ModelError as error:
        logger.warning("%s; the demo model is served instead", error)
    demo = config.model_copy(update={"model_path": _DEMO_MODEL})
    return load_model(resolve_model(demo), demo)


def load_model(path: Path, config: Config) -> LoadedModel:
    """Read weights and tokenizer, on the thread where they stay. Raises ModelError.

    A model whose images cannot be read is served as a text model, with a warning,
    unless MODEL_KIND insists.
    """
    _prepare_device(config)
    if config.model_kind != "auto":
        return _load_or_explain(path, config, kind=config.model_kind)
    if not _has_vision_tower(path):
        return _load_or_explain(path, config, kind="text")
    try:
        return _load_or_explain(path, config, kind="vision")
    except ModelError as error:
        vision_error = str(error)
    try:
        loaded = _load_or_explain(path, config, kind="text")
    except ModelError as error:
        raise ModelError(f"{vision_error}. {error}") from None

    logger.warning(
        "this model is served without its images, which are refused: MODEL_KIND=vision"
        " insists on them. %s",
        vision_error,
    )
    return loaded


def _prepare_device(config: Config) -> None:
    """Choose the device of MLX_BACKEND, and set what a GPU needs."""
    if config.mlx_backend == "cpu":
        mx.set_default_device(mx.cpu)
    if mx.default_device() == mx.gpu and mx.cuda.is_available():
        read_gated_delta_in_chunks()
    if "free_memory" in mx.device_info():  # beyond it, MLX frees what it keeps to reuse
        mx.set_memory_limit(memory_limit(config))


def _has_vision_tower(path: Path) -> bool:
    try:
        return has_vision_tower(path)
    except Exception:  # noqa: BLE001 - what loads the model explains what is wrong
        return False


def _load_or_explain(path: Path, config: Config, *, kind: _Kind) -> LoadedModel:
    """Load a model, for text or for images, too. Raises ModelError."""
    try:
        return _load(path, config, kind=kind)
    except Exception as error:  # mlx and transformers raise what they like
        logger.debug("loading %s", path, exc_info=True)
        library = "mlx-vlm" if kind == "vision" else f"mlx-lm {mlx_lm.__version__}"
        sentence = f"The model in {path} cannot be loaded by {library}: {error!r}"
        reason = sentence[:500]
    # Outside, so that the error does not keep the weights that were loaded already.
    raise ModelError(reason)


def _load(path: Path, config: Config, *, kind: _Kind) -> LoadedModel:
    trust = config.trust_remote_code
    model, tokenizer, model_config = _load_parts(path, kind=kind, trust=trust)
    if config.cpu_float32 == "auto" and mx.default_device() == mx.cpu:
        widen_weights(model, max_bytes=memory_limit(config) // 2)
    _teach_tags(tokenizer)
    if has_tenants(config):
        keep_no_words(tokenizer)
    template = ChatTemplate(
        tokenizer,
        config,
        think_start=tokenizer.think_start or "",
        think_end=tokenizer.think_end or "",
        ends=tokenizer.eos_token_ids,
    )
    check_cache_kinds(make_prompt_cache(model))
    if isinstance(model, VisionModel):
        model.phrase = template.traits.image_placeholder or model.phrase
        model.self_test()

    # Of a vision model, config.json has the facts about its layers in `text_config`.
    text_config = model_config.get("text_config") or {}
    facts = {**model_config, **text_config}
    context_length = _context_length(facts, tokenizer.model_max_length)
    model_id = _read_model_name(config)
    if path == Path(model_id).expanduser():  # neither a repository nor the demo
        model_id = path.resolve().name
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        template=template,
        model_id=model_id,
        path=path,
        family=_find_family(f"{model_id} {facts['model_type']}", config),
        revision=_weights_revision(path),
        nbytes=_count_bytes(model),
        vocab_size=int(facts.get("vocab_size") or len(tokenizer)),
        context_length=context_length,
        max_context_tokens=min(context_length, config.max_kv_size),
        eos_ids=frozenset(tokenizer.eos_token_ids),
        hidden_ids=_find_hidden_ids(tokenizer),
        device=f"{mx.device_info()['device_name']} ({mx.default_device().type.name})",
    )


class _ModelParts(NamedTuple):
    """What a library makes of a model's folder."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]  # config.json


def _load_parts(path: Path, *, kind: _Kind, trust: bool) -> _ModelParts:
    """Load with mlx-vlm what reads images, and all else with mlx-lm.

    `trust`: whether Python files of the model may run.
    """
    tokenizer_config: JsonObject = {"trust_remote_code": trust}
    if kind == "text":
        parts = mlx_lm.load(
            str(path), tokenizer_config, return_config=True, trust_remote_code=trust
        )
        return _ModelParts(*parts)

    model_config = mlx_lm.utils.load_config(path)
    template_file = path / "chat_template.json"  # a processor's; no tokenizer reads it
    if template_file.is_file():
        tokenizer_config |= json.loads(template_file.read_bytes())
    tokenizer = mlx_lm.utils.load_tokenizer(
        path, tokenizer_config, eos_token_ids=model_config.get("eos_token_id")
    )
    model = VisionModel(path, trust_remote_code=trust)
    return _ModelParts(model, tokenizer, model_config)


def _teach_tags(tokenizer: Any) -> None:
    """Teach mlx-lm's tokenizer the tags of a model where it knows none (L-88)."""
    if tokenizer.think_start:
        return
    vocabulary = tokenizer.get_vocab()
    texts = _MAGISTRAL_TAGS if _MAGISTRAL_TAGS[-1] in vocabulary else ()
    call_end = _GPT_OSS_TAGS[-1]
    # A fine-tune may have gpt-oss's tokens, and calls in a format that mlx-lm knows.
    if call_end in vocabulary and not tokenizer.tool_call_start:
        texts = _GPT_OSS_TAGS
        tokenizer.add_eos_token(call_end)
    for tag, text in zip(REPLY_TAGS, texts, strict=False):
        set_reply_tag(tokenizer, tag, text)


# -- weights on the CPU ----------------------------------------------------------------
#
# MLX's CPU backend multiplies float32 with BLAS, and all else with loops of its own.
# GFLOP/s of one thread, with OpenBLAS (L-107):
#
#                   float32   bfloat16   4 bits
#     512 rows          225        6.8      3.1      prefill
#       1 row           4.9        3.2      2.7      decode
#
# So weights are made float32 where memory allows. Those of 16 bits keep their values
# exactly, and quantized ones become what they stand for.

_NARROW_TYPES: Final = (mx.float16, mx.bfloat16)


def widen_weights(model: Any, *, max_bytes: int) -> None:
    """Make all weights of a model float32, if they take no more than `max_bytes`.

    One layer at a time: at no time do all weights exist twice.
    """
    n_bytes = _count_bytes(model)
    n_wide_bytes = _count_wide_bytes(model)
    if n_wide_bytes == n_bytes:
        return
    if n_wide_bytes > max_bytes:
        logger.info(
            "weights stay as they are, which is slow on a CPU: as float32 they would"
            " take %s, of %s that they may",
            in_bytes(n_wide_bytes),
            in_bytes(max_bytes),
        )
        return

    began = time.monotonic()
    mlx_lm.utils.dequantize_model(model)  # not computed yet
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for _, module in [*modules, ("", model)]:
        module.apply(_as_float32)
        mx.eval(module.parameters())
    logger.info(
        "weights are computed as float32, which is fast on a CPU: %s, stored as %s;"
        " that took %.1f s (CPU_FLOAT32)",
        in_bytes(_count_bytes(model)),
        in_bytes(n_bytes),
        time.monotonic() - began,
    )


def _as_float32(weights: mx.array) -> mx.array:
    return weights.astype(mx.float32) if weights.dtype in _NARROW_TYPES else weights


def _count_wide_bytes(model: Any) -> int:
    """Bytes of all weights, were they float32."""
    n_bytes = sum(_wide_bytes(array) for array in _weights_of(model))
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    for _, module in modules:
        if "scales" in module:  # quantized: one array will take the place of three
            n_bytes += 4 * (module.weight.nbytes * 8 // module.bits)
            for name in ("weight", "scales", "biases"):
                n_bytes -= _wide_bytes(module[name]) if name in module else 0
    return n_bytes


def _wide_bytes(weights: mx.array) -> int:
    return weights.nbytes * (2 if weights.dtype in _NARROW_TYPES else 1)


# -- facts -----------------------------------------------------------------------------


def _find_family(model_names: str, config: Config) -> str:
    """Whose format of tool calls is tried first, by the model's name and type.

    Whatever its version, a Qwen is taken for "qwen3", and a GLM for "glm4".
    """
    if config.model_family != "auto":
        return config.model_family
    for name, family in (("qwen", "qwen3"), ("glm", "glm4")):
        if name in model_names.lower():
            return family
    return "generic"


def _weights_revision(path: Path) -> str:
    """Which weights these are: 16 hex digits of names, sizes, times, and config.json.

    It is not a hash of their bytes: to read 17 GB takes a minute.
    """
    stamps: list[tuple[str, int, int]] = []
    for file in path.glob("*.safe*"):
        status = file.stat()
        stamps.append((file.name, status.st_size, status.st_mtime_ns))
    config_bytes = (path / "config.json").read_bytes()
    identity = repr(sorted(stamps)).encode() + config_bytes
    return sha256(identity).hexdigest()[:16]


def _count_bytes(model: Any) -> int:
    return sum(array.nbytes for array in _weights_of(model))


def _weights_of(model: Any) -> list[mx.array]:
    named_weights: Any = tree_flatten(model.parameters())
    return [array for _, array in named_weights]


def _context_length(facts: dict[str, Any], tokenizer_length: int) -> int:
    """Tokens that a model was made for, as its config or its tokenizer states."""
    stated = facts.get("max_position_embeddings") or facts.get("n_positions") or 0
    length = int(stated)
    # Configs state the length before YaRN (Qwen3) or after it (DeepSeek).
    rope = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) == "yarn":
        original_length = rope.get("original_max_position_embeddings", 0)
        length = max(length, int(original_length * rope["factor"]))
    if length:
        return length
    if tokenizer_length < 2**31:  # or 1e30, for "not known"
        return tokenizer_length
    # Gemma 3 leaves it out from 4B on.
    return 131_072 if facts.get("model_type") == "gemma3_text" else 32_768


def _find_hidden_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens that are no part of a reply's text, tags or calls."""
    shown_ids: set[int] = set()
    for tag in REPLY_TAGS:
        shown_ids |= set(getattr(tokenizer, f"{tag}_tokens") or ())

    # A special token that the parser of calls names is part of a call, as gemma4's
    # <|"|> is. [CALL_ID] is, too, though Mistral's parser does not name it (L-90).
    grammar = read_tool_parser_source(tokenizer)
    if grammar:
        grammar += "[CALL_ID]"
    special_ids: set[int] = set()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if not token.special:
            continue
        special_ids.add(token_id)
        if token.content in grammar or re.escape(token.content) in grammar:
            shown_ids.add(token_id)
    # An end token ends the reply, be it the closing tag of a call: gpt-oss's <|call|>.
    return frozenset((special_ids - shown_ids) | tokenizer.eos_token_ids)


def memory_limit(config: Config) -> int:
    """Bytes for model, KV and buffers.

    By default 0.9 of what Metal recommends, or of the RAM, or of an NVIDIA GPU's memory
    as far as no other program holds it.
    """
    if config.memory_limit_bytes:
        return config.memory_limit_bytes
    device = mx.device_info(mx.cpu if config.mlx_backend == "cpu" else None)
    if "free_memory" in device:
        n_held_bytes = mx.get_active_memory() + mx.get_cache_memory()
        return int(0.9 * (int(device["free_memory"]) + n_held_bytes))
    recommended_bytes = device.get("max_recommended_working_set_size")
    return int(0.9 * int(recommended_bytes or psutil.virtual_memory().total))


# region SAMPLING ==============================================================
# Choose the next token of a reply, among those that the request allows.
#
#     logits  ->  logit bias, penalties  ->  constraints
#             ->  log-probabilities
#             ->  top-k, top-p, min-p    ->  divided by the temperature
#             ->  random noise           ->  token
#
# mlx-lm's GenerationBatch does this: the first line by the "logits processors" of each
# request, the last two by its "sampler" (UPSTREAM: TokenChoice). Both are made here. As
# in mlx-lm, top-p comes before the temperature; in vLLM it comes after. But top-k is
# first here and last in mlx-lm: the same tokens are left, and few have to be sorted.
#
#  1 Sampler      The best candidates are found without sorting the vocabulary (L-100).
#  2 Constraints  A constraint allows tokens; all others get a logit of -inf. It is a
#                 generator: it yields what may come next, and is sent the tokens that
#                 came. limit_thinking(2, start=[], ends=[END]) does this:
#                     yields "any token, 2 times"      is sent [hm, so]
#                     yields "END, once"               is sent [END]
#                     yields "any token, forever"
#                 REPLY GRAMMAR chooses the constraints of a request.
#
# Public   make_sampler, make_processors, AllowedTokens, ConstraintSteps, Constraint,
#          forbid_tokens, limit_thinking, follow_grammar, watch_for_call
# Uses     LOGGING, API TYPES, UPSTREAM
# Thread   model; mlx


# -- 1 sampler -------------------------------------------------------------------------

_MIN_TEMPERATURE: Final = 1e-6  # below, noise is lost beside logits: greedy
_MIN_TOP_P: Final = 1e-6  # with 0, apply_top_p would leave no token at all
_BLOCK_SIZE: Final = 128
_gumbel_for_each: Final = mx.vmap(lambda key: mx.random.gumbel(key=key))


def make_sampler(sampling: SamplingParams) -> Sampler:
    """A function from log-probabilities `(1, vocab)` to a token id `(1,)`.

    All greedy requests share one function: mlx-lm calls it once for all of them.
    """
    if sampling.temperature < _MIN_TEMPERATURE:
        greedy: Sampler = greedy_sampler
        return greedy
    return _RandomSampler(sampling)


class _RandomSampler:
    """Draws by a random key of its own: other requests do not change what is drawn.

    So a seed gives the same text again, but for the last bits of the logits, which a
    batch changes: they decide where the sums of two tokens are nearly equal.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        seed = time.time_ns() if sampling.seed is None else sampling.seed
        self._sampling = sampling
        self._key = mx.random.key(seed % (1 << 63))

    def __call__(self, logprobs: mx.array) -> mx.array:
        """The token with the largest sum of scaled log-probability and Gumbel noise."""
        self._key, step_key = mx.random.split(self._key)
        values, ids = _find_candidates(logprobs, self._sampling)

        # why(L-100): noise belongs to a token id: the order of the candidates follows
        # the last bits of the logits, which a batch changes.
        first_half = mx.broadcast_to(step_key[0], ids.shape)
        second_half = ids ^ step_key[1]  # so that each id has a key of its own
        noise = _gumbel_for_each(mx.stack([first_half, second_half], axis=1))

        sums = values / self._sampling.temperature + noise
        return ids[mx.argmax(sums, keepdims=True)]


def _find_candidates(
    logprobs: mx.array, sampling: SamplingParams
) -> tuple[mx.array, mx.array]:
    """The tokens that may be drawn: log-probabilities and ids, both `(n,)`, unsorted.

    Some of them may not be drawn after all: their log-probability is -inf.
    """
    values = logprobs[0].astype(mx.float32)
    ids = mx.arange(values.size, dtype=mx.uint32)
    log_total = mx.logsumexp(values)  # about 0: bfloat16 does not add up to 1

    # why(L-100): the best k tokens are in those k blocks that hold the best ones.
    for block_size in (_BLOCK_SIZE, 1):
        if 0 < sampling.top_k * block_size < values.size:
            values, ids = _keep_best_blocks(values, ids, sampling.top_k, block_size)

    if sampling.top_p < 1:
        # `top_p` is a share of all tokens, and mlx-lm's apply_top_p() takes a share of
        # those that it is given; if that comes to more than 1, all of them stay.
        total_by_kept = mx.exp(log_total - mx.logsumexp(values))
        values = apply_top_p(values, max(sampling.top_p, _MIN_TOP_P) * total_by_kept)
    if sampling.min_p > 0:
        values = apply_min_p(values, sampling.min_p)
    return values, ids


def _keep_best_blocks(
    values: mx.array, ids: mx.array, n_blocks: int, block_size: int
) -> tuple[mx.array, mx.array]:
    """The blocks of values `(n,)` that hold the largest ones, and their ids."""
    n_padding = -values.size % block_size
    values = mx.pad(values, (0, n_padding), constant_values=-mx.inf)
    ids = mx.pad(ids, (0, n_padding), mode="edge")
    value_blocks = values.reshape(-1, block_size)
    id_blocks = ids.reshape(-1, block_size)

    largest = value_blocks.max(axis=-1)
    chosen = mx.argpartition(-largest, kth=n_blocks - 1)[:n_blocks]
    return value_blocks[chosen].reshape(-1), id_blocks[chosen].reshape(-1)


# -- 2 constraints ---------------------------------------------------------------------

_FOREVER: Final = sys.maxsize
_MAX_LOOK_BACK: Final = 1 << 20  # tokens; MLX slices by 32-bit integers


class AllowedTokens(NamedTuple):
    """What may come in the next `n_steps` steps; by default, any token.

    If nothing may, the request fails: a row of -inf has no log-probabilities (L-54).
    """

    flags: npt.NDArray[np.bool_] = np.empty(0, np.bool_)  # of each id, from 0 on
    others: bool = True  # whether ids beyond the flags may come
    n_steps: int = 1

    def mask(self, n_vocab: int) -> mx.array | None:
        """Of each id that the model knows, whether it may come; None: all may.

        A tokenizer may know more ids than the model, or fewer.
        """
        if self.flags.size == 0 and self.others:
            return None
        mask = np.full(n_vocab, self.others)
        n_known = min(n_vocab, self.flags.size)
        mask[:n_known] = self.flags[:n_known]
        return mx.array(mask)


# Yields what may come next; is sent the tokens that came since.
type ConstraintSteps = Generator[AllowedTokens, list[int]]
type Constraint = Callable[[], ConstraintSteps]  # begins at the first token of a reply


def _flag_ids(ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    """True for these ids, False for those between them."""
    flags = np.zeros(max(ids) + 1, np.bool_)
    flags[list(ids)] = True
    return flags


def forbid_tokens(ids: Sequence[int]) -> ConstraintSteps:
    """None of these tokens, ever."""
    yield AllowedTokens(~_flag_ids(ids), n_steps=_FOREVER)


def limit_thinking(
    n_tokens: int,
    *,
    start: Sequence[int],
    ends: Sequence[int],
    white_space: Sequence[int] = (),
) -> ConstraintSteps:
    """After `n_tokens` of thinking the first of `ends`, unless any of them came before.

    `start`: the tokens with which a reply opens thinking; [] if the prompt has done so.
    One token of `white_space` may come before them. Thinking that opens later in the
    reply has no limit.
    why(L-82): after a tool call the tag that ends thinking would be a part of the call.
    """
    reply_ids = yield AllowedTokens(n_steps=len(start) + n_tokens)
    if start and reply_ids[0] in white_space:
        # The white space took a step: wait for one token more.
        last_ids = yield AllowedTokens()
        reply_ids = reply_ids[1:] + last_ids
    is_thinking = reply_ids[: len(start)] == list(start)
    if is_thinking and set(ends).isdisjoint(reply_ids):
        yield AllowedTokens(_flag_ids(ends[:1]), others=False)
    yield AllowedTokens(n_steps=_FOREVER)


def follow_grammar(grammar: Any, first_ids: Sequence[int] = ()) -> ConstraintSteps:
    """Only what `grammar`, an LLMatcher of llguidance, accepts after `first_ids`."""
    matcher = grammar.deep_copy()
    new_ids = list(first_ids)
    while True:
        matcher.consume_tokens(new_ids)
        flags = np.frombuffer(matcher.compute_logit_bias(), np.uint8) > 0
        if matcher.is_error():
            # It grew too large. The matcher now allows nothing but the end.
            logger.warning("the grammar gave up: %.200s", matcher.get_error())
        n_steps = _FOREVER if matcher.is_stopped() else 1
        new_ids = yield AllowedTokens(flags, others=False, n_steps=n_steps)


def watch_for_call(call_id: int, grammar: Any) -> ConstraintSteps:
    """Any token, until the one that opens a call; from it on what `grammar` accepts.

    It reads every token, so no step begins before the token of the last is computed.
    """
    new_ids: list[int] = []
    while call_id not in new_ids:
        new_ids = yield AllowedTokens()
    yield from follow_grammar(grammar, new_ids[new_ids.index(call_id) :])


class _ConstraintProcessor:
    """A logits processor that keeps a reply to a constraint.

    It reads tokens only when the constraint has to decide: whoever reads a token waits
    until the model has computed it.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._steps = constraint()
        self._n_read = 0  # tokens of prompt and reply that were read, or not needed
        self._n_next = 0  # when there are so many, the constraint decides again
        self._mask: mx.array | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= self._n_next:
            allowed = self._advance(tokens)
            self._n_read = tokens.size
            self._n_next = tokens.size + allowed.n_steps
            self._mask = allowed.mask(logits.shape[-1])
        if self._mask is None:
            return logits
        return mx.where(self._mask, logits, -mx.inf)

    def _advance(self, tokens: mx.array) -> AllowedTokens:
        if self._n_read == 0:  # all tokens so far are the prompt's
            return next(self._steps)
        new_ids: Any = tokens[self._n_read :].tolist()
        return self._steps.send(new_ids)


def make_processors(
    sampling: SamplingParams, constraints: Iterable[Constraint]
) -> list[LogitsProcessor]:
    """What changes the logits of a request before a token is sampled, in this order."""
    repetition_penalty = None  # 1 is none
    if sampling.repetition_penalty != 1:
        repetition_penalty = sampling.repetition_penalty
    n_look_back = min(sampling.repetition_context_size, _MAX_LOOK_BACK)
    penalties: JsonObject = {}
    if n_look_back > 0:  # for 0 mlx-lm would look back on everything
        penalties = {
            "repetition_penalty": repetition_penalty,
            "repetition_context_size": n_look_back,
            "presence_penalty": sampling.presence_penalty,
            "presence_context_size": n_look_back,
            "frequency_penalty": sampling.frequency_penalty,
            "frequency_context_size": n_look_back,
        }
    processors = make_logits_processors(dict(sampling.logit_bias), **penalties)
    return [*processors, *map(_ConstraintProcessor, constraints)]


# region REPLY GRAMMAR =========================================================
# A reply that must be tool calls, or JSON of a schema, follows a grammar.
#
# The grammar is a text. llguidance compiles it, and tells before each token of the
# reply which ones may come (SAMPLING: follow_grammar). This is the whole grammar of a
# forced call of ls(path), by a model that writes calls as Qwen3-Coder does, after a
# prompt that ends with <think>. Of the tokens 1110 is <tool_call>, 1111 </tool_call>,
# 1115 </think>, 303 two line breaks, 1107 and 1109 end a reply:
#
#     %llguidance {"no_forcing": true}
#     start: <[^1115,1110,1107,1109]>* <[1115]> <[303]> calls
#     calls: call (BLANKS? call)*
#     call: <[1110]> <[198]> <[27]> <[360]> <[28]> <[486]> <[966]> arguments0
#     arguments0: "<" "parameter=path>\n" (value0) "/function>\n" <[1111]>
#     VALUE0_TEXT: /(?s:.{0,})/
#     VALUE0_END: /<\/parameter>[ \t\r\n]{0,400}</
#     VALUE0_LINE: VALUE0_TEXT & /(?s:(.*[^\n])?)/
#     value0[lazy]: VALUE0_TEXT /\n/ VALUE0_END | VALUE0_LINE VALUE0_END
#     BLANKS: /[ \t\r\n]{1,8}/
#
#     <[303]>          the token with that id; <[^7,9]> any but 7 and 9; <[*]> any
#     "/function>\n"   any tokens that spell this text
#     /[ab]{9}/        any tokens that spell a text that the pattern fits as a whole
#     A & B            a text that both fit;  A | B  either;  A? A*  as in a pattern
#     [lazy]           the shortest text that fits: a value ends at the first end tag
#     %json {...}      any tokens that spell JSON of this schema; here is none
#
# A value ends at </parameter> only where the next tag follows, so the `<` of that tag
# belongs to VALUE0_END, and the text after a value is "/function>\n".
#
# So a reply is thinking, without a token that would end it or start a call; </think>;
# and one call or more. Tags are written as tokens, and so is the opening of a call, as
# the tokenizer cuts it ("<tool_call>\n<function=ls>\n" in `call`). The arguments may be
# cut as the model likes. Other demands have another `start`. After thinking, a reply
# that must be JSON goes on with (json | calls). If a tool is strict, all is allowed
# up to the token that opens a call; from there on `start: calls` rules the reply.
#
#  1 Call forms   What a call consists of; CALL FORMS makes them of a tool's schema.
#  2 Reply form   The tags of the model, as tokens.
#  3 Text         The rules of a grammar, as a text.
#  4 Compiler     Text -> LLMatcher, kept for the next request.
#  5 Constraints  What a request demands, and what is left of it where it is too much.
#  6 Faults       What a client is told of a schema that cannot be enforced.
#
# Public   Blanks, JsonValue, TextValue, OneOf, CallPart, CallParts, CallForm,
#          find_excess, make_constraints
# Uses     ERRORS, API TYPES, CANONICALIZATION, MODEL LOADING, SAMPLING
# Thread   any


# -- 1 call forms ----------------------------------------------------------------------


class Blanks(NamedTuple):
    """A little white space, or none."""


class JsonValue(NamedTuple):
    """JSON of a schema."""

    schema: JsonObject
    is_lenient: bool  # what of the schema cannot be enforced is passed over


class TextValue(NamedTuple):
    """A text without quotes, and the tag that ends it; what is None sets no bound."""

    end: str  # a line break in it stands for any white space
    drops_line_break: bool = False  # that before the end is no part of the text
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None  # a regular expression that fits a part of the text
    is_no_container: bool = False  # it must not look like an array or object in JSON


class OneOf(NamedTuple):
    """One of these; () means nothing."""

    choices: tuple[CallParts, ...]


type CallPart = str | Blanks | JsonValue | TextValue | OneOf
type CallParts = tuple[CallPart, ...]


class CallForm(NamedTuple):
    """How a call of one tool is written."""

    opening: str  # up to its arguments, as the model's tokenizer cuts it
    parts: CallParts | None = None  # what follows; None: anything
    fault: str = ""  # why that cannot fit the schema
    schema_path: str = ""  # in the body, if the tool is strict

    @property
    def is_strict(self) -> bool:
        """Whether the arguments must fit. Of an unknown syntax nothing is enforced."""
        return bool(self.schema_path) and self.parts is not None

    def refusal(self, fault: str) -> BadRequest:
        """The error for a strict tool whose schema cannot be enforced."""
        quote = f"{fault:.300}"
        return BadRequest(f"strict: {quote}", field=self.schema_path, quote=quote)


# -- 2 reply form ----------------------------------------------------------------------

# What follows the tag that ends thinking: before a call, and before a text.
# why(L-88): gpt-oss prints headers there.
_AFTER_THINKING: Final = {
    "<|end|>": ("<|start|>assistant", "<|channel|>final<|message|>")
}
_AFTER_OTHER_THINKING: Final = ("\n\n", "")

# What may come before the tag that opens thinking, as one token: GLM writes "\n".
_WHITE_SPACE: Final = ("\n", "\n\n", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplyForm:
    """The tags of one reply, as tokens; [] for those that it cannot have."""

    in_reasoning: bool  # the prompt has opened thinking
    think_start: list[int]  # [] unless the reply may open thinking itself
    white_space: list[int]  # one of these may come before it, unless a grammar rules
    think_end: list[int]
    call_start: list[int]
    before_call: list[int]  # after thinking
    before_text: list[int]  # a header; [] if a text has none
    eos_ids: frozenset[int]

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        request: ChatRequest,
        *,
        in_reasoning: bool,
        call_start: str,
    ) -> _ReplyForm:
        """The form of the reply to a request. `call_start`: the tag, "" if none."""
        tags = loaded.tokenizer
        encode = loaded.template.encode
        opens_thinking = request.thinking and not in_reasoning
        before_call, before_text = _AFTER_THINKING.get(
            tags.think_end, _AFTER_OTHER_THINKING
        )
        white_space = [encode(text) for text in _WHITE_SPACE]
        return cls(
            in_reasoning=in_reasoning,
            think_start=encode(tags.think_start or "") if opens_thinking else [],
            white_space=[ids[0] for ids in white_space if len(ids) == 1],
            think_end=list(tags.think_end_tokens or ()),
            call_start=encode(call_start),
            before_call=encode(before_call),
            before_text=encode(before_text),
            eos_ids=loaded.eos_ids,
        )

    @property
    def may_think(self) -> bool:
        return self.in_reasoning or bool(self.think_start)

    @property
    def call_id(self) -> list[int]:
        """The token that opens a call; [] if several do, which may be plain words."""
        return self.call_start if len(self.call_start) == 1 else []

    def forced_call(self) -> str:
        """The rule "start" of a reply that is calls, after thinking."""
        return f"{self._thinking(_tokens(self.before_call))} calls"

    def json_or_calls(self, calls: str) -> str:
        """The rule "start" of a reply that is JSON; or calls, by the rule `calls`.

        THINKING (json | <[9]> <[*]>*)         <[9]> starts a call
        THINKING (<[4]> json | <[9]> <[*]>*)   gpt-oss: <[4]> is the header of a text
        """
        if self.before_text:
            thinking = self._thinking(_tokens(self.before_call))
        else:
            thinking = self._thinking("BLANKS?") or "BLANKS?"
        text = f"{_tokens(self.before_text)} json"
        return f"{thinking} ({text} | {calls})" if calls else f"{thinking} {text}"

    def any_call(self) -> str:
        """A rule: the start of a call, then anything."""
        return f"{_tokens(self.call_start)} <[*]>*" if self.call_start else ""

    def _thinking(self, after: str) -> str:
        """A rule: thinking, the tag that ends it, then the rule `after`.

        Thinking may not contain a call: that would end the reply before what is
        demanded. Let <[6]> open thinking, <[7]> end it, <[9]> open a call, and <[2]>
        end the reply. The first rule is for thinking that the prompt has opened, the
        second for thinking that the reply may open as its first token:

            <[^7,9,2]>* <[7]> BLANKS?
            (<[6]> <[^7,9,2]>* <[7]> BLANKS?)?

        White space before <[6]> is not allowed: the grammar could not tell it from that
        before the answer, and a model that begins with it would be kept from thinking.
        """
        if not self.may_think:
            return ""
        end_ids = [*self.think_end[:1], *self.call_id, *self.eos_ids]
        text = f"<[^{','.join(map(str, end_ids))}]>*"
        thinking = f"{text} {_tokens(self.think_end)} {after}"
        if self.in_reasoning:
            return thinking
        return f"({_tokens(self.think_start)} {thinking})?"


# -- 3 text ----------------------------------------------------------------------------

# What is markup if it is one token: <arg_key>, [TOOL_CALLS]
_MARKUP: Final = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")

# Without "no_forcing" llguidance itself writes what is certain to come. It would spell
# <tool_call> in a JSON string, where it is text, by the token of the tag.
_GRAMMAR_HEAD: Final = '%llguidance {"no_forcing": true}'
_BLANKS_RULE: Final = r"/[ \t\r\n]{1,8}/"


def _write_grammar(
    start: str,
    calls: Sequence[CallForm],
    *,
    schema: JsonObject | None,
    encode: Callable[[str], list[int]],
) -> str:
    """The text of a grammar. In `start`, "calls" are these and "json" is the schema."""
    grammar = _GrammarText(start, encode)
    if calls:
        grammar.add_calls(calls)
    if schema is not None:
        grammar.rules["json"] = f"%json {json.dumps(schema)}"
    grammar.rules["BLANKS"] = _BLANKS_RULE
    rules = [f"{name}: {rule}" for name, rule in grammar.rules.items()]
    return "\n".join([_GRAMMAR_HEAD, *rules])


class _GrammarText:
    """The rules of one grammar, by name, each before those that it is made of."""

    def __init__(self, start: str, encode: Callable[[str], list[int]]) -> None:
        self.rules = {"start": start}
        self._encode = encode
        self._numbers = count()

    def add_calls(self, calls: Sequence[CallForm]) -> None:
        """Add the rule "calls": one call or more."""
        self.rules["calls"] = "call (BLANKS? call)*"
        openings = [_tokens(self._encode(call.opening)) for call in calls]
        self.rules["call"] = " | ".join(
            f"{opening} arguments{index}" for index, opening in enumerate(openings)
        )
        for index, call in enumerate(calls):
            name = f"arguments{index}"
            self.rules[name] = "<[*]>*"  # also: its place, before its parts
            if call.parts is not None:
                self.rules[name] = self._sequence(call.parts)

    def _sequence(self, parts: Iterable[CallPart]) -> str:
        """These parts in their order, for a rule."""
        return " ".join(map(self._part, parts))

    def _part(self, part: CallPart) -> str:
        match part:
            case str(text):
                return self._spell(text)
            case Blanks():
                return "BLANKS?"
            case JsonValue():
                name = f"schema{next(self._numbers)}"
                schema = _guide(part.schema, is_lenient=part.is_lenient)
                self.rules[name] = f"%json {json.dumps(schema)}"
                return name
            case TextValue():
                return self._text_value(part)
            case OneOf(choices):
                return f"({' | '.join(map(self._sequence, choices))})"

    def _spell(self, text: str) -> str:
        """A certain text: <arg_key> that is a token has to be that token."""
        return " ".join(
            _tokens(self._encode(piece))
            if self._is_token(piece)
            else json.dumps(piece, ensure_ascii=False)
            for piece in _MARKUP.split(text)
            if piece
        )

    def _is_token(self, piece: str) -> bool:
        return bool(_MARKUP.fullmatch(piece)) and len(self._encode(piece)) == 1

    def _text_value(self, value: TextValue) -> str:
        """A text, and its end. Let </arg_value> be the token 11, and </parameter> none:

        ends with "</arg_value>\n"     VALUE0_TEXT <[11]> BLANKS?
        ends with "</parameter>\n<"    value0, the shortest with VALUE0_END
        """
        name = f"VALUE{next(self._numbers)}"
        self.rules[f"{name}_TEXT"] = _text_terminal(value)
        tag = _MARKUP.match(value.end)
        if tag is not None and self._is_token(tag[0]):
            end = " BLANKS? ".join(map(self._spell, value.end.split("\n")))
            return f"{name}_TEXT {end}"
        return self._lazy_value(name, value)

    def _lazy_value(self, name: str, value: TextValue) -> str:
        """The same where the end is no token."""
        end_lines = map(re.escape, value.end.split("\n"))
        end_pattern = r"[ \t\r\n]{0,400}".join(end_lines)
        self.rules[f"{name}_END"] = _lark_pattern(end_pattern)
        choices = f"{name}_TEXT {name}_END"
        if value.drops_line_break:
            # A text that itself ends with a line break comes with a second one.
            self.rules[f"{name}_LINE"] = rf"{name}_TEXT & /(?s:(.*[^\n])?)/"
            choices = rf"{name}_TEXT /\n/ {name}_END | {name}_LINE {name}_END"

        lazy_name = name.lower()
        self.rules[f"{lazy_name}[lazy]"] = choices
        return lazy_name


def _tokens(ids: Iterable[int]) -> str:
    """[7, 9] -> "<[7]> <[9]>"."""
    return " ".join(f"<[{token_id}]>" for token_id in ids)


def _text_terminal(value: TextValue) -> str:
    """A terminal of Lark: the texts that a value may be."""
    max_length = "" if value.max_length is None else str(value.max_length)
    length = f"{{{value.min_length or 0},{max_length}}}"
    patterns = [f"(?s:.{length})"]
    if value.pattern is not None:
        patterns.append(_whole_pattern(value.pattern))
    terminal = " & ".join(_lark_pattern(pattern) for pattern in patterns)
    if value.is_no_container:
        terminal += r" & ~/\s*[\[\{](?s:.*)/"
    return terminal


_ANCHORED_END: Final = re.compile(r"(?s:(?:[^\\]|\\.)*)\$")


def _whole_pattern(pattern: str) -> str:
    """A pattern of JSON schema, which fits a part of a text, for the whole of it.

    It is without `|`, for CALL FORMS refuses one: in "^a|b" only `a` is anchored.
    """
    # "^a" -> "(a)(?s:.*)". What ends with an escaped dollar sign is not anchored there.
    before = after = "(?s:.*)"
    if pattern.startswith("^"):
        before = ""
        pattern = pattern[1:]
    if _ANCHORED_END.fullmatch(pattern):
        after = ""
        pattern = pattern[:-1]
    return f"{before}({pattern}){after}"


def _lark_pattern(source: str) -> str:
    """A regular expression as Lark writes it, between slashes."""
    slashed = re.sub(
        r"(\\.)|/", lambda match: match[1] or r"\/", source, flags=re.DOTALL
    )
    return f"/{slashed}/"


# -- 4 compiler ------------------------------------------------------------------------

# What is compiled: of one schema, of all calls together, and of a regular expression.
# A schema of the largest size takes a second.
MAX_SCHEMA_CHARACTERS: Final = 100_000
MAX_CALLS_CHARACTERS: Final = 200_000
MAX_PATTERN_CHARACTERS: Final = 10_000


class _GrammarCompiler:
    """Makes LLMatchers for one tokenizer."""

    # For each character of a grammar, as measured: 300 of properties, 400 of patterns.
    MATCHER_BYTES: Final = 400
    MEMO_BYTES: Final = 2 * MATCHER_BYTES * MAX_CALLS_CHARACTERS  # the largest fits

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: mlx-lm's wrapper of one."""
        # 0.2 s, and the tokenizer up to 1 s: only if a request needs it
        import llguidance

        # The tags of a reply are markup, so they cannot be a part of a JSON string.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        added_tokens = [
            token.content for token in backend.get_added_tokens_decoder().values()
        ]
        tags = [
            tokenizer.think_start,
            tokenizer.think_end,
            tokenizer.tool_call_start,
            tokenizer.tool_call_end,
            *filter(_MARKUP.fullmatch, added_tokens),
        ]
        backend.add_special_tokens(
            [tag for tag in tags if tag and backend.token_to_id(tag) is not None]
        )
        vocabulary = llguidance.LLTokenizer(
            backend.to_str(), eos_token=sorted(tokenizer.eos_token_ids)
        )
        self._make_matcher = partial(llguidance.LLMatcher, vocabulary, log_level=0)
        self.memo: Memo[Any] = Memo(
            self.MEMO_BYTES, lambda text, _matcher: self.MATCHER_BYTES * len(text)
        )

    def compile(self, grammar: str, *, tenant: str) -> Any:
        """An LLMatcher of the replies that a grammar describes. It may be in error."""
        return self.memo.get_or_make(
            grammar, lambda: self._compile(grammar), tenant=tenant
        )

    def _compile(self, grammar: str) -> Any:
        return self._make_matcher(grammar)


_grammar_compiler: Final = lru_cache(maxsize=1)(_GrammarCompiler)


# -- 5 constraints ---------------------------------------------------------------------

_SCHEMA_FIELD: Final = "response_format.json_schema.schema"


def make_constraints(
    loaded: LoadedModel,
    request: ChatRequest,
    *,
    in_reasoning: bool,
    call_start: str,
    call_forms: Sequence[CallForm],
) -> tuple[Constraint, ...]:
    """What a request demands of its reply.

    `in_reasoning`: the prompt has opened thinking. `call_start`: the tag that opens a
    call, "" for a model that knows no calls. `call_forms`: how a call may be written,
    if the reply must be one, or if one may come and some tool is strict; else none.
    Raises BadRequest: a schema cannot be compiled, or the call cannot be forced.
    """
    if request.kind == "completion":
        return ()  # its body has no field that demands anything of the reply
    form = _ReplyForm.of(
        loaded, request, in_reasoning=in_reasoning, call_start=call_start
    )
    can_call = request.tool_choice.mode != "none"
    constraints: list[Constraint] = []

    if not can_call and form.call_id:
        # The prompt keeps its tools: without them the KV of all that follows is lost.
        constraints.append(partial(forbid_tokens, form.call_id))

    thinking_limit = _make_thinking_limit(request, form)
    if thinking_limit is not None:
        constraints.append(thinking_limit)

    grammars = _ReplyGrammars(loaded, form, call_forms)
    must_call = request.tool_choice.mode in ("required", "named")
    if must_call:
        grammar = grammars.compile_calls(form.forced_call())
        constraints.append(partial(follow_grammar, grammar))
    elif request.json_schema is not None:
        grammar = grammars.compile_schema(request.json_schema, can_call=can_call)
        constraints.append(partial(follow_grammar, grammar))
    elif grammars.has_strict_calls and form.call_id:
        # Where several tokens open a call, nobody sees in time that it is one.
        grammar = grammars.compile_calls("calls")
        constraints.append(partial(watch_for_call, form.call_id[0], grammar))
    return tuple(constraints)


def _make_thinking_limit(request: ChatRequest, form: _ReplyForm) -> Constraint | None:
    """The thinking budget of a request; None if nothing has to be done to keep it."""
    if request.thinking_budget is None or not form.may_think:
        return None
    budget = max(request.thinking_budget, 1)
    can_end_it = len(form.think_end) == 1
    if budget >= request.max_tokens or not can_end_it:
        return None
    return partial(
        limit_thinking,
        budget,
        start=form.think_start,
        ends=[*form.think_end, *form.call_id],
        white_space=form.white_space,
    )


class _ReplyGrammars:
    """Compiles the grammar of a reply, as strong as it can be.

    What llguidance cannot compile is weakened step by step (`compile_calls`). What is
    strict is never weakened: the request is refused. That is a schema in
    `response_format`, and that of a strict tool whose calls can be described at all
    (CallForm.is_strict).
    """

    def __init__(
        self, loaded: LoadedModel, form: _ReplyForm, calls: Sequence[CallForm]
    ) -> None:
        """Raises BadRequest: a strict tool has a fault."""
        self._loaded = loaded
        self._form = form
        self._calls = calls
        for call in calls:
            if call.fault and call.schema_path:
                raise call.refusal(call.fault)

    @property
    def has_strict_calls(self) -> bool:
        """Whether the arguments of some tool must fit its schema."""
        return any(call.is_strict for call in self._calls)

    def compile_schema(self, schema: JsonObject, *, can_call: bool) -> Any:
        """An LLMatcher of replies that are JSON of a schema. Raises BadRequest."""
        if fault := find_excess(schema):
            raise BadRequest(fault, field=_SCHEMA_FIELD)
        # A client may ask that what cannot be enforced is passed over; nothing else.
        is_lenient = schema.get("x-guidance") == {"lenient": True}
        guided = _guide(schema, is_lenient=is_lenient)
        # First without the schemas of the tools: a fault is that of this schema, then.
        any_call = self._form.any_call() if can_call else ""
        start = self._form.json_or_calls(any_call)
        matcher = self._compile(start, (), guided)
        if matcher.is_error():
            fault = _describe_fault(matcher.get_error(), schema)
            raise BadRequest(fault, field=_SCHEMA_FIELD, quote=fault)
        if not self.has_strict_calls:
            return matcher
        start = self._form.json_or_calls("calls")
        return self.compile_calls(start, guided)

    def compile_calls(self, start: str, schema: JsonObject | None = None) -> Any:
        """An LLMatcher of the rule `start`, in which "calls" are calls of the tools.

        Tried in this order, until one compiles; raises BadRequest if none does, or if a
        step would free the arguments of a strict tool:

            the arguments of each call fit the schema of its tool
            a call that does not compile by itself may have any arguments
            each call may have any arguments, but only these tools may be called
        """
        for calls in self._weaker_calls():
            matcher = self._compile(start, calls, schema)
            if not matcher.is_error():
                return matcher
        sentence = "the tools are too many for a call to be forced"
        raise BadRequest(sentence, field="tool_choice")

    def _weaker_calls(self) -> Iterator[Sequence[CallForm]]:
        """These calls, then weaker ones, but none that are too large to be compiled."""
        n_characters = sum(len(json.dumps(call.parts)) for call in self._calls)
        if n_characters <= MAX_CALLS_CHARACTERS:
            yield self._calls
            yield [self._free_if_faulty(call) for call in self._calls]
        fault = "with the other tools it is too large to be enforced"
        free_calls = [self._free(call, fault) for call in self._calls]
        if sum(len(call.opening) for call in free_calls) <= MAX_CALLS_CHARACTERS:
            yield free_calls

    def _free_if_faulty(self, call: CallForm) -> CallForm:
        """The call with any arguments, if it does not compile. Raises: it is strict."""
        error = self._compile("calls", [call]).get_error()
        return self._free(call, _describe_fault(error)) if error else call

    def _free(self, call: CallForm, fault: str) -> CallForm:
        """The call with any arguments. Raises BadRequest with `fault`: it is strict."""
        if call.is_strict:
            raise call.refusal(fault)
        return call._replace(parts=None)

    def _compile(
        self, start: str, calls: Sequence[CallForm], schema: JsonObject | None = None
    ) -> Any:
        template = self._loaded.template  # as one tenant has it: it has the tenant's id
        grammar = _write_grammar(start, calls, schema=schema, encode=template.encode)
        compiler = _grammar_compiler(self._loaded.tokenizer)
        return compiler.compile(grammar, tenant=template.tenant)


# -- 6 faults --------------------------------------------------------------------------


def _guide(schema: JsonObject, *, is_lenient: bool) -> JsonObject:
    """A schema with what the compiler is told about it."""
    guidance = {
        "whitespace_pattern": r"[ \t\r\n]{1,64}",  # a model gets out of no more
        "lenient": is_lenient,
    }
    return {**schema, "x-guidance": guidance}


def find_excess(schema: Mapping[str, Any]) -> str:
    """What of a schema is too large to be compiled; "" if nothing is."""
    n_characters = len(json.dumps(schema))
    if n_characters > MAX_SCHEMA_CHARACTERS:
        return (
            f"a schema of {n_characters:,} characters cannot be enforced, one of"
            f" {MAX_SCHEMA_CHARACTERS:,} can"
        )
    for path, value in _walk_schema(schema):
        for pattern in _patterns_of(value):
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                return (
                    f"a pattern of {len(pattern):,} characters ({path:.100}) cannot"
                    f" be enforced, one of {MAX_PATTERN_CHARACTERS:,} can"
                )
    return ""


def _patterns_of(schema: object) -> list[str]:
    """The regular expressions of a schema, without those of its parts."""
    if not isinstance(schema, dict):
        return []
    names = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(names if isinstance(names, dict) else ())]
    return [pattern for pattern in patterns if isinstance(pattern, str)]


# In a schema: what has schemas by names that somebody chose, and what has none.
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("enum", "const", "default", "examples")


def _walk_schema(schema: object) -> Iterator[tuple[str, object]]:
    """A schema and all that is in it, each after its path: "properties.tags.anyOf[1]".

    What is less deep comes first.
    """
    places: deque[tuple[str, object]] = deque([("", schema)])
    while places:
        path, value = places.popleft()
        yield path.removeprefix("."), value
        for step, part in _schema_parts(value):
            places.append((path + step, part))


def _schema_parts(value: object) -> Iterator[tuple[str, object]]:
    """The parts of a schema, or of a list of schemas, each after its step to it."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    if not isinstance(value, dict):
        return
    for name, part in value.items():
        if name in _NAMED_SCHEMAS and isinstance(part, dict):
            for key, schema in part.items():
                yield f".{name}.{key}", schema
        elif name not in _VALUES:
            yield f".{name}", part


# An error of llguidance says where it is, and quotes these lines of the grammar:
#     at 7(10): failed to compile JSON schema: Invalid type: objekt
#        6 | schema0: %json {"type": "objekt"}
#                     ^
_ERROR_PLACE: Final = re.compile(
    r"""(?xs:
        \A .*? failed\ to\ compile\ JSON\ schema:\ # for a pattern of ours there is none
      | \n \ + \d+ \ \| .*
    )"""
)

# What it says of keywords such as "uniqueItems".
_UNKNOWN_KEYWORDS: Final = re.compile(r"Unimplemented keys: \[(.*)\]")

# What else it says, and what a client is told.
_SCHEMA_FAULTS: Final[Mapping[str, str]] = {
    r"Resource '(?:json-schema:///)?(.*?)' is not present": (
        "{} is another document, and none is fetched: put what it says into $defs"
    ),
    r"Pointer '(.*?)' does not exist": "the $ref #{} leads to nothing",
    r"Invalid type: (.*)": "{} is no type of JSON",
    r"Unknown format: (.*)": "the format {} is not known",
    r"Unsatisfiable schema: ([^:]*)": "no value can fit it: {}",
    r"for (?:float|integer) range": "this minimum or maximum cannot be enforced",
    r"error: (.*)": "a pattern cannot be read: {}",  # after lines that quote it
    r"multiple ?of": "multipleOf should be a number above 0 with few digits",
    r"Expected .* for '(\w+)'": "{} has a value of a wrong type",
    r"^schema must be": "what should be a schema in it is no object",
    r"^(\$?\w+) must be": "{} has a value of a wrong type",
    r"oneOf constraints": "oneOf cannot be enforced where two branches overlap",
    r"(?i)recursion": "it is nested too deeply",
}


def _describe_fault(error: str, schema: JsonObject | None = None) -> str:
    """What cannot be enforced, and where in the schema, in one sentence of ours."""
    error = _ERROR_PLACE.sub("", error)
    match = _UNKNOWN_KEYWORDS.search(error)
    if match is not None:
        keywords = match[1]
        names = {_read_rust_string(text) for text in _RUST_STRING.findall(keywords)}
        place = _find_keyword(schema or {}, names)
        where = f" of {place:.100}" if place else ""
        return f"{keywords:.100}{where} cannot be enforced: leave it out"
    for pattern, sentence in _SCHEMA_FAULTS.items():
        match = re.search(pattern, error)
        if match is not None:
            return sentence.format(*(f"{text:.100}" for text in match.groups()))
    return "it cannot be enforced as it is: make it simpler"


# As Rust prints a string: "a\u{200b}b". JSON has no such escape.
_RUST_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_RUST_ESCAPE: Final = re.compile(r"\\(?:u\{(?P<code>\w+)\}|(?P<letter>.))")


def _read_rust_string(text: str) -> str:
    def unescape(match: re.Match[str]) -> str:
        if match["code"]:
            return chr(int(match["code"], 16))
        control = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
        return control.get(match["letter"], match["letter"])

    return _RUST_ESCAPE.sub(unescape, text)


def _find_keyword(schema: JsonObject, keywords: set[str]) -> str:
    """Where the first of these keywords stands: "properties.tags"; "": at the top."""
    for path, value in _walk_schema(schema):
        if isinstance(value, dict) and keywords & value.keys():
            return path
    return ""


# region SCHEDULER =============================================================
# What the model does next, and for whom.
#
#     waiting ------> prefilling ------> decoding ------> put back into the cache
#              admit      slice by slice     step by step
#
# One step of the scheduler: end what is over, admit what fits, decode one step in each
# batch, then prefill one slice of one prompt. If that ends the prompt, a slice of the
# next may follow; while decoding has to catch up, none is read. A step takes about
# SLICE_SECONDS: others decode on beside a long prompt, and nobody waits long to be
# noticed. Four times a second, between two steps, ENGINE calls `hold_limit`.
#
# For example A decodes, B has read 4,096 of its 9,000 tokens, and C comes with 200:
#
#     1st step    C is admitted. A gets a token. C is read, since it ends before B, and
#                 decodes from now on. It took 0.1 s, so decoding is owed 0.2 s.
#     some steps  A and C get tokens, until decoding has had its 0.2 s
#     next step   A and C get a token; B reads a slice of 0.2 s, so 0.4 s are owed
#     and so on   until B has read its prompt, and decodes, too
#
#  1 Requests      what is asked of the model; its events; handles for connections
#  2 Policy        who prefills next, how much, and whether decoding waits for it
#  3 Running       one request: its KV, its tokens, its entry in the cache
#  4 Decode batch  requests that decode together
#  5 Memory        who fits, what is evicted, who must end
#  6 Prefill       the model reads prompts, slice by slice, and keeps states on the way
#  7 Scheduler     chooses: who ends, who starts, who prefills; and what a failure ends
#
# A request that decodes alone does so in its own buffers. Requests of similar length
# decode as one batch; a short one never pays for padding to the length of a long one.
# A request joins a batch when it begins to decode, not later. Requests that have only a
# short rest to read are merged before that, and read it in one call (L-123).
# Dropped: mlx-lm's BatchGenerator, which merges on insertion (a single request of 32k
# tokens needs its KV twice). Its GenerationBatch is used (UPSTREAM), and ends nobody.
#
# Public   EngineRequest, RequestHandle, RequestTimes, RequestState, StateSeconds,
#          WaitReason, WaitCause, Activity, Reuse, TokenEvent, SecondTryEvent,
#          FinishedEvent, EndReason, EngineEvent, Logprob, MIN_SLICE_TOKENS, Scheduler
# Uses     CONFIG, ERRORS, LOGGING, API TYPES, TOKEN HASHES, UPSTREAM, KV STATE,
#          PREFIX CACHE, DISK CACHE, VISION MODEL, MODEL LOADING, SAMPLING
# Thread   model, mlx; RequestHandle: any


# -- 1 requests ------------------------------------------------------------------------

MAX_UNREAD_EVENTS: Final = 4096  # then the client is dropped

RequestState = Literal["waiting", "prefilling", "decoding"]
WaitReason = Literal["queue", "prefix", "memory"]
EndReason = Literal["stop", "length", "repeated", "cancelled", "deadline", "failed"]

# Log-probability of a token; ids and log-probabilities of the most probable tokens.
Logprob = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class EngineRequest:
    """A request in the model's terms: tokens, not messages."""

    key: TokenKey  # the prompt
    checkpoint_positions: tuple[int, ...]  # where other prompts may part from this one
    checkpoint_ids: frozenset[int] = frozenset()  # a reply may be over after these
    max_tokens: int
    sampling: SamplingParams
    images: tuple[tuple[int, ImageTokens], ...] = ()  # by position, ascending
    owner: RequestOwner = NO_OWNER
    request_id: str = ""  # shown to those who wait for its prefix
    top_logprobs: int = -1  # how many of the most probable tokens; -1: no logprobs
    constraints: tuple[Constraint, ...] = ()

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.key.tokens)


class TokenEvent(NamedTuple):
    """A token was generated."""

    token_id: int
    logprob: Logprob | None = None  # if it was asked for


class Reuse(NamedTuple):
    """What of a prompt was in the cache when the model began with it."""

    hit_kind: HitKind | Literal["-"] = "-"  # "-": nothing was looked up yet
    cached_tokens: int = 0
    matched_tokens: int = 0  # leading tokens with KV, be it without usable state


class StateSeconds(NamedTuple):
    """How long a request was in each state."""

    waiting: float = 0.0
    prefilling: float = 0.0
    decoding: float = 0.0


class FinishedEvent(NamedTuple):
    """The request is over; its KV is in the cache, unless that failed."""

    reason: EndReason
    reuse: Reuse = Reuse()
    seconds: StateSeconds = StateSeconds()


class SecondTryEvent(NamedTuple):
    """The request begins again, without the cache. There was no token yet."""


# An int: KV of so many tokens of the prompt is there. An error ends the request.
type EngineEvent = int | TokenEvent | SecondTryEvent | FinishedEvent | ServerError


class WaitCause(NamedTuple):
    """What a request waits for.

    queue    its turn: BATCH_MAX_ROWS run, or others are read before it
    prefix   another request, which reads a prefix that both have
    memory   room for its KV
    """

    reason: WaitReason
    request_id: str | None = None  # whose prefix it waits for


# None: the request has just come, or come again, and the scheduler has not seen it yet.
type Activity = WaitCause | Literal["prefilling", "decoding"] | None


class RequestTimes(NamedTuple):
    """What a request does, and for how long it did what; never changed in place.

    It waits, for one cause after another; then its prompt is read; then it decodes. A
    second try waits and is read once more.
    """

    since: float  # when `activity` began; time.monotonic()
    activity: Activity = None
    ended: Mapping[Activity, float] = {}  # seconds of what it did before

    @property
    def state(self) -> RequestState:
        """The state that it is in."""
        if self.activity is None or isinstance(self.activity, WaitCause):
            return "waiting"
        return self.activity

    @property
    def cause(self) -> WaitCause | None:
        """What it waits for; None: it does not wait, or nobody knows yet for what."""
        return self.activity if isinstance(self.activity, WaitCause) else None

    def begin(self, activity: Activity, now: float) -> RequestTimes:
        """Its times if it does something else from `now` on.

        The time until the scheduler sees it belongs to the cause that is found then.
        """
        if self.activity is None and isinstance(activity, WaitCause):
            return self._replace(activity=activity)
        if self.activity == activity:
            return self
        return RequestTimes(now, activity, self._until(now))

    def seconds(self, now: float) -> StateSeconds:
        """How long it has been in each state."""
        seconds = self._until(now)
        prefilling = seconds.pop("prefilling", 0.0)
        decoding = seconds.pop("decoding", 0.0)
        return StateSeconds(sum(seconds.values()), prefilling, decoding)

    def wait_seconds(self, now: float) -> dict[WaitCause, float]:
        """How long it has waited for each cause."""
        return {
            activity: seconds
            for activity, seconds in self._until(now).items()
            if isinstance(activity, WaitCause)
        }

    def _until(self, now: float) -> dict[Activity, float]:
        seconds = dict(self.ended)
        seconds[self.activity] = seconds.get(self.activity, 0.0) + now - self.since
        return seconds


class RequestHandle:
    """A submitted request, for its connection: events come out, a stop reason goes in.

    Any thread may use it. Only the scheduler changes `times`, `reuse` and
    `is_second_try`.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.submitted_at = time.monotonic()
        self.times = RequestTimes(self.submitted_at)
        self.reuse = Reuse()
        self.is_second_try = False  # without the cache, after an error
        self.stop_reason: EndReason | None = None  # set it to end the request
        self._events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()

    def begin(self, activity: Activity, now: float) -> None:
        """Note what it does from now on."""
        self.times = self.times.begin(activity, now)

    def begin_again(self) -> None:
        """Note that its second try begins, as if it had just come."""
        self.is_second_try = True
        self.begin(None, time.monotonic())
        self.reuse = Reuse()
        self.put(SecondTryEvent())

    def finished_event(self, reason: EndReason) -> FinishedEvent:
        """What is known of the request when it ends, now."""
        seconds = self.times.seconds(time.monotonic())
        return FinishedEvent(reason, self.reuse, seconds)

    def put(self, event: EngineEvent) -> None:
        """Add an event."""
        self._events.put(event)

    def put_end(self, end: EndReason | ServerError) -> None:
        """Add the last event: it is over, or it has failed."""
        self.put(end if isinstance(end, ServerError) else self.finished_event(end))

    def n_unread(self) -> int:
        """How many events the connection has not taken yet."""
        return self._events.qsize()

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Take the oldest event; None if there is none for so many seconds."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None


# -- 2 policy --------------------------------------------------------------------------
# Pure: no model, no thread, no clock. Of a running request it reads `submitted_at`,
# `n_prompt`, `n_to_prefill` and `prefill_speed`: test_scheduler_policy.py stands in.

# How much is read in one call. While it lasts, nobody decodes, and nothing is noticed.
SLICE_SECONDS: Final = 0.2  # if others wait or run
LONE_SLICE_SECONDS: Final = 0.4  # if nobody else does
MIN_SLICE_TOKENS: Final = 64
MAX_REST_TOKENS: Final = 64  # if no more is left, the first decode step reads it, too
MAX_JOINT_TOKENS: Final = 256  # a longer prompt is not read with others (L-123)
MAX_JOINT_SECONDS: Final = 3.0  # of a call that reads several prompts

# Who reads next, and whether that may be now.
DECODE_SHARE: Final = 2.0  # seconds of decoding for each second of prefill beside it
SOON_SECONDS: Final = 0.5  # a prompt that ends so soon is read before that decoding
MAX_SOON_DEBT: Final = 3.0  # unless more seconds of it are owed
MAX_OTHERS_SHARE: Final = 8.0  # seconds that others prefill for each one of the oldest
# If another request is reading so many more tokens of the same prompt than are cached,
# a request waits for them.
MIN_WAIT_GAIN_TOKENS: Final = 64


class SchedulingPolicy:
    """Which request prefills next, and whether it may while others decode.

    There are two accounts, in seconds of model time:

        decode_debt    How long others must decode before the next slice is read. Each
                       second of prefill adds DECODE_SHARE seconds, each second of
                       decoding takes one off. A prompt that ends soon may be read
                       before the debt is paid.
        oldest_credit  While it is positive, the oldest request is next: each second
                       that it reads takes several off. Else the one that ends first is
                       next: each second adds one.

    For example a short prompt has been read for 0.2 s: the credit is 0.2. The oldest,
    which takes minutes, reads a slice of 0.2 s: the credit is 0.2 - 8 * 0.2 = -1.4. Now
    short prompts have 1.4 s before the oldest reads again.

    A second takes MAX_OTHERS_SHARE off if the prompt has four seconds or more to go,
    and less if it has less: 2 if it has one.
    """

    def __init__(self) -> None:
        self.decode_debt = 0.0
        self.oldest_credit = 0.0

    def next_prefill(self, candidates: Sequence[RunningRequest]) -> RunningRequest:
        """The candidate that ends first, or the oldest one if it is its turn.

        why(L-71): prompts that come together are not all answered last, and a long one
        gets its share beside short ones without end.
        """
        if self.oldest_credit > 0:
            return min(candidates, key=lambda candidate: candidate.submitted_at)
        return min(candidates, key=lambda candidate: candidate.n_to_prefill)

    def may_prefill(self, candidate: RunningRequest, *, is_decoding: bool) -> bool:
        """Whether this one may prefill a slice now. `is_decoding`: others decode.

        They wait for a prompt that ends soon: a step of a batch costs the same with one
        request more (L-68).
        """
        if not is_decoding:
            return True
        seconds_left = candidate.n_to_prefill / candidate.prefill_speed
        max_debt = MAX_SOON_DEBT if seconds_left < SOON_SECONDS else 0.0
        return self.decode_debt <= max_debt

    def charge_decode(self, seconds: float) -> None:
        """All batches have decoded, for so long."""
        self.decode_debt = max(0.0, self.decode_debt - seconds)

    def charge_slice(self, seconds: float, *, is_decoding: bool) -> None:
        """A request has read, for so long. `is_decoding`: others decode, and waited.

        If nobody does, older debts are owed to nobody. This one is owed to the request
        itself, which decodes from now on if its prompt has ended.
        """
        if not is_decoding:
            self.decode_debt = 0.0
        self.decode_debt += seconds * DECODE_SHARE

    def charge_prefill(
        self, reader: RunningRequest, seconds: float, *, is_alone: bool
    ) -> None:
        """`reader` has read, for so long. `is_alone`: no other one is prefilling.

        One that is alone takes no time from anybody. But it has had a slice: a shorter
        prompt that comes now is read before the next one (L-71).
        """
        if is_alone:
            self.oldest_credit = -SLICE_SECONDS * MAX_OTHERS_SHARE
        elif self.oldest_credit > 0:
            seconds_left = seconds + reader.n_to_prefill / reader.prefill_speed
            others_share = min(MAX_OTHERS_SHARE, seconds_left / SOON_SECONDS)
            self.oldest_credit -= seconds * others_share
        else:
            self.oldest_credit += seconds


def choose_companions(
    chosen: RunningRequest,
    candidates: Iterable[RunningRequest],
    *,
    max_tokens: float,
    max_padding: float,
) -> list[RunningRequest]:
    """Who is read in one call with `chosen`: rests that are most like it in length.

    `max_tokens`: of the call, padding included. `max_padding`: as a share of the real
    tokens, of the rests and of the whole prompts. Rests of 40 and 60 have 20 of 100.
    """

    def difference(candidate: RunningRequest) -> int:
        return abs(candidate.n_to_prefill - chosen.n_to_prefill)

    group = [chosen]
    for candidate in sorted(candidates, key=difference):
        wider_group = [*group, candidate]
        n_to_prefill = [member.n_to_prefill for member in wider_group]
        n_prompt = [member.n_prompt for member in wider_group]
        padding = max(_padding(n_to_prefill), _padding(n_prompt))
        fits = max(n_to_prefill) * len(wider_group) <= max_tokens
        if fits and padding <= max_padding:
            group = wider_group
    return group[1:]


def _padding(lengths: Sequence[int]) -> float:
    """Padding of rows of these lengths, as a share of real tokens."""
    return max(lengths) * len(lengths) / sum(lengths) - 1


class SliceCost(NamedTuple):
    """What was measured of a prefill slice."""

    end: int  # position
    bytes_per_token: float  # of working memory, at its peak


def affordable_tokens(
    costs: Sequence[SliceCost], position: int, *, working_bytes: int
) -> float:
    """How many tokens a slice from `position` may have, by the memory of earlier ones.

    why(L-55): where attention scores are kept, a token costs bytes with its depth. A
    straight line through what was measured predicts it. Infinite if nothing was.
    """
    if not costs:
        return math.inf
    ends = np.array([float(cost.end) for cost in costs])
    per_token = np.array([cost.bytes_per_token for cost in costs])

    slope = np.polyfit(ends, per_token, 1)[0] if np.ptp(ends) else 0.0
    predicted = per_token.mean() + max(slope, 0.0) * (position - ends.mean())
    # Twice the prediction has to fit: a slice may need more than the line says.
    return float(working_bytes / max(2 * predicted, 1.0))


def slice_end(tokens: TokenIds, start: int, *, stop: int, max_tokens: int) -> int:
    """Where a slice from `start` ends: at `stop`, or before, but not inside an image.

    A slice of an image alone ends at `stop`, which is then the image's end. A rest of
    less than MIN_WAIT_GAIN_TOKENS is added to the slice, whatever `max_tokens` is.
    """
    end = start + max_tokens
    if stop - end < MIN_WAIT_GAIN_TOKENS:
        return stop  # requests that wait for `stop` would all prefill such a short rest
    while end > start and is_inside_image(tokens, end):
        end -= 1
    return end if end > start else stop


# -- 3 running -------------------------------------------------------------------------

NO_TOKEN: Final = -1  # in the place of a token for which the model computed no numbers


class RunningRequest:
    """A request on the model, from its start to the return of its KV.

    The KV is that of exactly the first `num_computed_tokens` of prompt and output:

        prefilling   in `layer_caches`; `batch` is None
        decoding     in the caches of `batch`; `layer_caches` is empty
    """

    def __init__(
        self,
        handle: RequestHandle,
        match: PrefixMatch,
        *,
        cache: PrefixCache,
        layer_caches: LayerCaches,
        prefill_speed: float,
    ) -> None:
        """Take over the KV that was matched. Raises what PrefixCache.start raises."""
        request = handle.request
        self.handle = handle
        self.request = request
        self.layer_caches = layer_caches
        self.batch: DecodeBatch | None = None
        self.num_computed_tokens = match.cached_tokens
        self.output_ids: list[int] = []
        self.slice_ends: list[int] = []  # where a slice must end, ascending
        self.prefill_speed = prefill_speed  # tokens a second of the last slice
        self.submitted_at = handle.submitted_at
        self.started_at = math.inf  # when the model began to read for it, in this try
        self.reply_checkpoint = 0  # the position of the last one; 0: there is none
        self.image_shifts: dict[int, int] = {}  # see `position_shift`; by image start
        self.lease = cache.start(
            match,
            request.key,
            running=self,
            owner=request.owner,
            head_end=min(request.checkpoint_positions, default=0),
        )

    @property
    def has_begun(self) -> bool:
        """Whether the model has begun to read for it, in this try."""
        return self.started_at < math.inf

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return self.request.n_prompt

    @property
    def n_to_prefill(self) -> int:
        """Tokens of the prompt that are left, but the last: decoding feeds it."""
        return self.request.n_prompt - 1 - self.num_computed_tokens

    @property
    def needs_slice(self) -> bool:
        """Whether a slice of its prompt must be read before it can decode."""
        return self.n_to_prefill > MAX_REST_TOKENS or bool(self.slice_ends)

    @property
    def can_read_with_others(self) -> bool:
        """Whether the rest of its prompt may be read in one call with those of others.

        A second try may not: what failed may have been another's (L-114).
        """
        is_short = 0 < self.n_to_prefill <= MAX_JOINT_TOKENS and not self.slice_ends
        return is_short and not self.handle.is_second_try

    @property
    def has_replied(self) -> bool:
        """Whether the connection has a token of the reply."""
        return bool(self.output_ids) and self.output_ids[0] != NO_TOKEN

    @property
    def has_failed(self) -> bool:
        """Whether the model computed no numbers for a token: it is the last one."""
        return self.output_ids[-1:] == [NO_TOKEN]

    def load_kv(self, span: KVSpan, state: StateCheckpoint | None) -> None:
        """Take over KV and state from the cache (PREFIX CACHE: RunningKV)."""
        load_span(self.layer_caches, span)
        if state is not None:
            restore_state(self.layer_caches, state)

    def read_span(self, end: int) -> KVSpan:
        """A copy of KV [0, end), wherever it is now (PREFIX CACHE: RunningKV)."""
        if self.batch is None:
            return copy_span(self.layer_caches, end, row=0)
        row = self.batch.requests.index(self)
        return copy_span(self.batch.layer_caches, end, row=row)

    def add_slice_ends(self, positions: Iterable[int]) -> None:
        """Let prefill slices end at these positions, too."""
        self.slice_ends = sorted({*self.slice_ends, *positions})

    def find_image(self, end: int) -> ImageTokens | None:
        """The image that a slice up to `end` ends with: a slice has at most one.

        An image is read in one call of its own kind, and moves the positions of what
        follows; so text after it is read in the next call.
        """
        for start, image in self.request.images:
            if self.num_computed_tokens <= start < end:
                return image
        return None

    def position_shift(self) -> int:
        """By how much the images so far move the positions of what follows.

        An image has rows and columns of positions, and so fewer than it has tokens.
        """
        shift = 0
        for start, image_shift in self.image_shifts.items():
            if start < self.num_computed_tokens:
                shift += image_shift
        return shift

    def computed_key(self, block_size: int) -> TokenKey:
        """The key of all tokens whose KV the request has."""
        salt, prompt_ids, prompt_hashes = self.request.key
        output_ids = np.asarray(self.output_ids, dtype=np.int32)
        tokens = np.concatenate([prompt_ids, output_ids])[: self.num_computed_tokens]
        hashes = block_hashes(tokens, block_size, root=salt, first_hashes=prompt_hashes)
        return TokenKey(salt, tokens, hashes)

    def add_token(self, token_id: int, *, logprobs: mx.array) -> None:
        """Add a generated token, sampled from `logprobs`, `(vocab,)`: computed ones.

        If the model computed no numbers, NO_TOKEN takes its place, and is the last.
        """
        if self.has_failed:
            return
        if not _is_finite_at(logprobs, token_id):
            self.output_ids.append(NO_TOKEN)
            return
        self.output_ids.append(token_id)
        n_top = self.request.top_logprobs
        logprob = read_logprobs(logprobs, token_id, n_top) if n_top >= 0 else None
        self.handle.put(TokenEvent(token_id, logprob))


def _is_finite_at(logprobs: mx.array, token_id: int) -> bool:
    """Whether the log-probability of a token is a number, by the bits in its buffer.

    why(L-54): NaN and infinity have all bits of the exponent set; one bad logit makes
    all log-probabilities bad. As operations of MLX this took 3 % of a small model.
    """
    # A float32 is two halves, of which the upper one comes last; others are one.
    halves = np.frombuffer(logprobs, np.uint16)
    halves_per_value = halves.size // logprobs.size
    upper_half = halves[(token_id + 1) * halves_per_value - 1]
    exponent_bits = 0x7C00 if logprobs.dtype == mx.float16 else 0x7F80
    return bool(upper_half & exponent_bits != exponent_bits)


def read_logprobs(logprobs: mx.array, token_id: int, n_top: int) -> Logprob:
    """The log-probability of a token, and the `n_top` most probable tokens."""
    n_top = min(n_top, logprobs.size - 1)
    top_ids: Any = []
    if n_top:
        unsorted_ids = mx.argpartition(-logprobs, n_top)[:n_top]
        order = mx.argsort(-logprobs[unsorted_ids])
        top_ids = unsorted_ids[order].tolist()
    values: Any = logprobs[mx.array([token_id, *top_ids])].tolist()
    return values[0], tuple(zip(top_ids, values[1:], strict=True))


def _remaining_prefill(tokens: TokenIds, offset: KvOffset) -> TokenIds:
    """Tokens of a prompt that are still to be prefilled: all but the last.

    The last one is fed by the first decode step, which samples a token from it (L-11).
    """
    return tokens[offset : len(tokens) - 1]


def _model_call(loaded: LoadedModel, requests: Sequence[RunningRequest]) -> ModelCall:
    """The model as a function of text tokens `(rows, n)` and of these requests' KV.

    `requests` may change later: a row is always the request at its index.
    """
    vision = loaded.vision
    if vision is None:
        call: ModelCall = loaded.model
        return call

    def call_with_shifts(tokens: mx.array, cache: LayerCaches) -> mx.array:
        shifts = [running.position_shift() for running in requests]
        logits: mx.array = vision(tokens, cache, shifts=shifts)
        return logits

    return call_with_shifts


# -- 4 decode batch --------------------------------------------------------------------
#
# A prompt of five tokens, p0 to p4, and its reply, r0, r1, ...:
#
#                        feeds      KV of    output_ids   reported
#     prefill slices     p0 .. p3   4        -            -
#     DecodeBatch(...)   p4         5        r0           r0
#     step               r0         6        r0           -
#     step               r1         7        r0 r1        r1
#     step               r2         8        r0 r1 r2     r2
#
# A step *accepts* the tokens that it feeds: their KV is there, they are in the reply.
# After each step KV and `output_ids` end with the same token. A step reports what it
# accepts, and meanwhile the token after it is being computed (L-10). Only r0 is
# reported when it is sampled, for the sake of the time to the first token; so the first
# step accepts r0, and has nothing to report.
#
# State that cannot be rewound is kept from before the last step, too: a client may send
# the reply back without its last token, which is often an end token.

MIN_LONE_CALL_TOKENS: Final = 16  # a shorter rest is fed together with the last token
HANDOVER_SECONDS: Final = 0.0005  # in which connections send their first tokens


class AcceptedTokens(NamedTuple):
    """What a step has added to the reply of a request: one token, for now.

    With drafts there may be more. Since a state cannot be rewound, only the last one
    may be an end token, one of `checkpoint_ids`, or the last of `max_tokens`.
    """

    running: RunningRequest
    token_ids: list[int]


class PreviousState(NamedTuple):
    """The state of a request before the last step of its batch."""

    position: int
    state: StateCheckpoint


class DecodeBatch:
    """Requests that decode together: one in its own buffers, several as one batch.

    An exception in a method leaves the KV of all its requests in doubt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        requests: Sequence[RunningRequest],
        joint_caches: LayerCaches | None = None,
    ) -> None:
        """Feed what is left of prompts, and sample and report their first tokens.

        `joint_caches`: the KV of several requests, of all their prompts but the last
        token, in batch form. None: there is one request, and it has its KV.
        """
        # The model's call reads this very list: it is only changed in place.
        self.requests = list(requests)
        self._previous_state: LayerCaches | None = None  # before the last step
        # By request: its row in that state, and its position then.
        self._previous_rows: dict[RunningRequest, tuple[int, int]] = {}

        model = _model_call(loaded, self.requests)
        if joint_caches is None:
            tokens = self._prefill_rest(model, requests[0])
        else:
            last_ids = [running.request.key.tokens[-1:] for running in requests]
            tokens = mx.array(np.stack(last_ids))
        self._generator = TokenGenerator(
            model,
            tokens,
            joint_caches or requests[0].layer_caches,
            [_token_choice(running.request) for running in requests],
        )
        for running in requests:
            running.num_computed_tokens = running.n_prompt
            running.batch = self
            running.layer_caches = []

        first_tokens = self._generator.first_tokens()
        for running, token in zip(requests, first_tokens, strict=True):
            running.add_token(token.token_id, logprobs=token.logprobs)
        # why(L-46): else the token is sent only when the next step has been launched.
        time.sleep(HANDOVER_SECONDS)

    def _prefill_rest(self, model: ModelCall, running: RunningRequest) -> mx.array:
        """Read the rest of a prompt, where that pays; returns what is left, `(1, n)`.

        why(L-47): in a call of its own, the last layer skips tokens whose logits nobody
        reads. On a GPU that does not pay: each call reads all weights.
        """
        prompt_ids = running.request.key.tokens
        n_computed = running.num_computed_tokens
        offset = kv_cache_offset(running.layer_caches, recorded=n_computed)
        rest = _remaining_prefill(prompt_ids, offset)
        tokens = mx.array(np.append(rest, prompt_ids[-1:]))[None]
        if mx.default_device() != mx.cpu or len(rest) < MIN_LONE_CALL_TOKENS:
            return tokens

        model(tokens[:, :-1], cache=running.layer_caches)
        # Else the next call copies the buffers, which this one still reads.
        evaluate_caches(running.layer_caches)
        return tokens[:, -1:]

    @property
    def layer_caches(self) -> LayerCaches:
        """The KV of all its requests; of more than one in batch form."""
        return self._generator.layer_caches

    @property
    def nbytes(self) -> int:
        """Bytes of KV and state, padding included."""
        return sum(layer.nbytes for layer in self.layer_caches)

    def step(self) -> list[AcceptedTokens]:
        """Feed and report the next token of each request; returns what was accepted."""
        self._previous_state = hold_recurrent_state(self.layer_caches)
        self._previous_rows = {
            running: (row, running.num_computed_tokens)
            for row, running in enumerate(self.requests)
        }
        fed_tokens = self._generator.step()

        accepted: list[AcceptedTokens] = []
        for running, token in zip(self.requests, fed_tokens, strict=True):
            is_first_token = running.num_computed_tokens == running.n_prompt
            if not is_first_token:  # which __init__ has reported
                running.add_token(token.token_id, logprobs=token.logprobs)
            running.num_computed_tokens += 1
            accepted.append(AcceptedTokens(running, [token.token_id]))
        return accepted

    def read_state(self, running: RunningRequest) -> StateCheckpoint:
        """A copy of the state of a request after the token that it was fed last."""
        return copy_state(self.layer_caches, row=self.requests.index(running))

    def padding_with(self, joining_batch: DecodeBatch) -> float:
        """Padding as a share of real tokens, if another batch joined.

        A short request counts as BUFFER_STEP_TOKENS: no buffer has fewer places.
        """
        requests = self.requests + joining_batch.requests
        lengths = [running.num_computed_tokens for running in requests]
        return _padding([max(length, BUFFER_STEP_TOKENS) for length in lengths])

    def merge(self, joining_batch: DecodeBatch) -> None:
        """Take over the requests of another batch, which must not be used any more."""
        for batch in (self, joining_batch):
            if len(batch.requests) == 1:
                batch._generator.layer_caches = to_batch(batch.layer_caches)
        self._generator.extend(joining_batch._generator)
        # why(L-69): else the next step makes this copy, too, while it makes its own.
        evaluate_caches(self.layer_caches)
        self._previous_state = None
        self.requests += joining_batch.requests
        for running in joining_batch.requests:
            running.batch = self

    def remove(self, running: RunningRequest) -> PreviousState | None:
        """Give a request its KV back, and take it out of the batch.

        None: the model has no state, or none is known from before the last step.
        """
        previous = None
        if self._previous_state is not None:
            previous_row, position = self._previous_rows[running]
            state = copy_state(self._previous_state, row=previous_row)
            previous = PreviousState(position, state)

        row = self.requests.index(running)
        running.layer_caches = self.layer_caches
        if len(self.requests) > 1:
            running.layer_caches = extract_row(self.layer_caches, row)
            other_rows = [i for i in range(len(self.requests)) if i != row]
            self._generator.keep_rows(other_rows)
            evaluate_caches(self.layer_caches)  # why(L-69): as in `merge`
        self.requests.remove(running)
        if len(self.requests) == 1:
            # Into buffers of its own, which can be put back without a copy.
            self._generator.layer_caches = extract_row(self.layer_caches, 0)
        running.batch = None
        return previous


def _token_choice(request: EngineRequest) -> TokenChoice:
    processors = make_processors(request.sampling, request.constraints)
    context: list[int] = []
    if processors:
        prompt_ids = request.key.tokens[:-1]
        context = prompt_ids[prompt_ids >= 0].tolist()  # without markers of images
    return TokenChoice(make_sampler(request.sampling), processors, context)


def _batches_of(requests: Iterable[RunningRequest]) -> list[DecodeBatch]:
    """The batches in which requests decode, each once."""
    batches: list[DecodeBatch] = []
    for running in requests:
        if running.batch is not None and running.batch not in batches:
            batches.append(running.batch)
    return batches


# -- 5 memory --------------------------------------------------------------------------
#
#     memory limit = weights + KV + image features + working memory
#
# KV is that of entries at rest, that of running requests, and checkpoints. It gets
# KV_SHARE of what the weights leave: a decode step of a model with few attention layers
# may need nearly as much as all KV (L-55).

KV_SHARE: Final = 0.55
FEATURES_PART: Final = 8  # 1/8 of KV, for what the vision tower made of images
HEADROOM_PART: Final = 32  # 1/32 of a prompt, as spare places of its buffers


class MemoryShares(NamedTuple):
    """How memory is divided, in bytes."""

    limit: int
    kv: int
    features: int
    working: int


def divide_memory(
    limit: int, *, model_bytes: int, max_kv_bytes: int, has_vision: bool
) -> MemoryShares:
    """The shares of what a model leaves of a limit. `max_kv_bytes`: a setting, or 0."""
    free_bytes = limit - model_bytes
    kv_bytes = min(max_kv_bytes or free_bytes, int(free_bytes * KV_SHARE))
    working_bytes = free_bytes - kv_bytes
    feature_bytes = kv_bytes // FEATURES_PART if has_vision else 0
    return MemoryShares(limit, kv_bytes - feature_bytes, feature_bytes, working_bytes)


def _with_headroom(n_prompt: int) -> int:
    """Places for a prompt and some reply, so that decoding seldom grows the buffers."""
    return n_prompt + n_prompt // HEADROOM_PART + BUFFER_STEP_TOKENS


class MemoryBudget:
    """Keeps KV within its share: who fits, what is evicted for it, who must end.

    The cache counts and evicts what rests, and checkpoints. What runs is counted here.
    """

    def __init__(self, shares: MemoryShares, spec: KVSpec, cache: PrefixCache) -> None:
        self.shares = shares
        self._spec = spec
        self._cache = cache

    @property
    def capacity_tokens(self) -> int:
        """The longest prompt whose KV fits."""
        kv_bytes = self.shares.kv - self.prompt_bytes(0)
        n_places = kv_bytes // max(self._spec.token_bytes, 1)  # 0: without attention
        return n_places * HEADROOM_PART // (HEADROOM_PART + 1)

    def prompt_bytes(self, n_prompt: int) -> int:
        """What a request will hold when its prompt is read."""
        token_bytes = self._spec.token_bytes
        return _with_headroom(n_prompt) * token_bytes + self._spec.state_bytes

    def running_bytes(self, requests: Sequence[RunningRequest]) -> int:
        """What running requests hold, or will when their prompts are read."""
        n_bytes = sum(batch.nbytes for batch in _batches_of(requests))
        for running in requests:
            if running.batch is None:
                n_bytes += self.prompt_bytes(running.n_prompt)
        return n_bytes

    def make_room(
        self,
        extra_bytes: int,
        requests: Sequence[RunningRequest],
        *,
        keep: PrefixMatch = NO_MATCH,
    ) -> bool:
        """Evict until `extra_bytes` fit beside what runs; returns False if they cannot.

        Nothing of `keep` goes, and nothing at all if what runs leaves too little even
        with an empty cache (L-97). What runs includes a few checkpoints of each of
        these requests: the cache does not evict those.
        """
        needed_bytes = self.running_bytes(requests) + extra_bytes
        few_checkpoints = MIN_CHECKPOINTS * self._spec.state_bytes
        checkpoint_bytes = 0
        for running in requests:
            checkpoint_bytes += min(running.lease.state_bytes, few_checkpoints)
        if needed_bytes + checkpoint_bytes > self._cache.max_bytes:
            return False
        return self._cache.evict_to_fit(needed_bytes, keep=keep)

    def make_room_to_merge(
        self,
        n_bytes: int,
        requests: Sequence[RunningRequest],
    ) -> bool:
        """Make room to merge so many bytes of KV: for two copies of them (L-69)."""
        copy_bytes = 2 * n_bytes
        return self.make_room(max(0, copy_bytes - self.shares.working), requests)

    def find_excess(self, requests: Sequence[RunningRequest]) -> RunningRequest | None:
        """The request that must end: the newest of several that do not fit together.

        why(L-79): only the KV of running requests itself is a reason. Room for copies
        is none: batches can go on unmerged, and what rests can be evicted instead.
        """
        if len(requests) < 2 or self.running_bytes(requests) <= self._cache.max_bytes:
            return None
        return max(requests, key=lambda one: (one.started_at, one.submitted_at))

    def evict_for_running(self, requests: Sequence[RunningRequest]) -> None:
        """Evict until running requests fit, and a copy of their largest batch, too."""
        copy_bytes = max((batch.nbytes for batch in _batches_of(requests)), default=0)
        lacking_bytes = max(0, copy_bytes - self.shares.working)
        self._cache.evict_to_fit(self.running_bytes(requests) + lacking_bytes)

    def shortage(
        self, n_tokens: int, requests: Sequence[RunningRequest]
    ) -> ServerError:
        """The error for a request of so many tokens that does not fit now."""
        held_bytes = self.running_bytes(requests)
        return Overloaded(
            f"no memory for {n_tokens:,} tokens now: {held_bytes:,} of"
            f" {self._cache.max_bytes:,} bytes of KV are in use"
        )


# -- 6 prefill -------------------------------------------------------------------------
#
# A prompt is read slice by slice, all but its last token: that one is fed by the first
# step of its decode batch, which samples r0 from it (L-11). A slice ends where a
# checkpoint is worth it, or where somebody waits for the prefix (`slice_ends`).
#
#     prompt of 5,000     slice        slice        slice    p4999: first decode step
#                     [0 .. 2048)  [.. 4096)    [.. 4999)

CHECKPOINT_SPACING: Final = 2048  # tokens, inside long prefills
N_MEASURED_SLICES: Final = 32
FIRST_SPEED: Final = 2000.0  # tokens a second, before any slice was measured


def _find_slice_ends(
    request: EngineRequest, offset: KvOffset, *, spec: KVSpec
) -> list[int]:
    """Where slices of a prompt must end, after `offset` and inside it; ascending.

    after each image    a slice has one image at most, and ends with it
    before each image   if the model has state: a checkpoint is taken there
    at each checkpoint  if the model has state, and cannot take it inside a slice
                        (L-61)
    """
    positions = [start + len(image.marker_ids) for start, image in request.images]
    if spec.has_state:
        positions += [start for start, _ in request.images]
        if not spec.can_tap:
            n_prompt = request.n_prompt
            positions += _find_checkpoints(request, offset, end=n_prompt)
    return sorted({p for p in positions if offset < p < request.n_prompt})


def _find_checkpoints(request: EngineRequest, start: int, *, end: int) -> list[int]:
    """Positions in (start, end] where a state is worth its bytes; ascending."""
    tokens = request.key.tokens
    spaced_positions = range(CHECKPOINT_SPACING, end + 1, CHECKPOINT_SPACING)
    last_position = request.n_prompt - 1
    positions: set[int] = set()
    for wanted_position in (*request.checkpoint_positions, *spaced_positions):
        position = min(wanted_position, last_position)
        if start < position <= end and not is_inside_image(tokens, position):
            positions.add(position)
    return sorted(positions)


@contextmanager
def _taking_checkpoints(running: RunningRequest, end: int) -> Iterator[None]:
    """Keep states on the way, while the model reads a prompt up to `end` (L-61).

    For example from 4,096 to 4,999, where a checkpoint at 4,990 is worth it: the state
    is taken after 894 tokens of the call. Models that cannot do this get no states
    here: their slices end at each checkpoint (`_find_slice_ends`).
    """
    start = running.num_computed_tokens
    layer_caches = running.layer_caches  # a decode batch may have them after the call
    positions = _find_checkpoints(running.request, start, end=end)
    request_tapped_states(layer_caches, [position - start for position in positions])
    yield  # after an exception the caches are dropped, and what was asked with them
    states = take_tapped_states(layer_caches)
    # Without a tap there are none. With one there may be one more than was asked for,
    # at the end of the call.
    for position, state in zip(positions, states, strict=False):
        running.lease.add_checkpoint(position, state)


def _reserve(running: RunningRequest) -> None:
    n_prompt = running.n_prompt
    capacity = _with_headroom(n_prompt)
    reserve_tokens(running.layer_caches, n_prompt, capacity=capacity)


class PromptReader:
    """Lets the model read prompts, and measures what a slice costs.

    An exception in a method leaves the KV of the requests that it was given in doubt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: Config,
        *,
        spec: KVSpec,
        budget: MemoryBudget,
        metrics: CacheMetrics,
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._spec = spec
        self._budget = budget
        self._metrics = metrics
        self._slice_costs: deque[SliceCost] = deque(maxlen=N_MEASURED_SLICES)
        self.measured_speed: float | None = None  # tokens a second of the last slice
        self.peak_bytes = 0  # the most that MLX had in use; see `note_peak`

    @property
    def expected_speed(self) -> float:
        """Tokens a second of a prompt of which nothing was read yet."""
        return self.measured_speed or FIRST_SPEED

    def prepare(self, running: RunningRequest) -> KvOffset:
        """Grow its buffers for the prompt, and plan its slices; returns its offset."""
        request = running.request
        n_cached = running.num_computed_tokens
        offset = kv_cache_offset(running.layer_caches, recorded=n_cached)
        assert offset == n_cached, "the KV is not as deep as the lookup promised"

        _reserve(running)
        running.add_slice_ends(_find_slice_ends(request, offset, spec=self._spec))
        for start, image in request.images:
            positions = self._loaded.model.image_positions(image)
            running.image_shifts[start] = positions.shift
        return offset

    def read_slice(self, running: RunningRequest, *, seconds: float) -> None:
        """Read the next slice, of about so many seconds."""
        end = self._choose_slice_end(running, seconds=seconds)
        is_text = running.find_image(end) is None
        with self._measure([running], is_usual=is_text):
            self._feed(running, end)
        _reserve(running)  # the first slice makes the buffers; later nothing is to do
        running.handle.put(end)

        if running.slice_ends and running.slice_ends[0] == end:
            running.slice_ends.pop(0)
            running.lease.add_checkpoint(end, copy_state(running.layer_caches))

    def read_together(self, requests: Sequence[RunningRequest]) -> LayerCaches:
        """Read the rests of prompts in one call, each but its last token (L-123).

        Returns the KV of all, in batch form: they have none of their own any more.
        """
        is_cold = not any(running.num_computed_tokens for running in requests)
        with self._measure(requests, is_usual=is_cold):
            joint_caches = self._feed_together(requests)
        for running in requests:
            running.handle.put(running.num_computed_tokens)
        return joint_caches

    def begin_batch(
        self,
        requests: Sequence[RunningRequest],
        joint_caches: LayerCaches | None = None,
    ) -> None:
        """Let requests decode in a batch of their own, which reads their rests.

        `joint_caches`: see DecodeBatch.
        """
        now = time.monotonic()
        with ExitStack() as taking:
            for running in requests:
                running.handle.begin("decoding", now)
                end = running.n_prompt
                taking.enter_context(_taking_checkpoints(running, end))
            batch = DecodeBatch(self._loaded, requests, joint_caches)
        for running in batch.requests:
            running.lease.advance(running.num_computed_tokens)

    def max_slice_tokens(self, running: RunningRequest, *, seconds: float) -> int:
        """How many tokens are read in so many seconds, if memory allows as many.

        At least MIN_SLICE_TOKENS, so that each slice brings the prompt forward.
        """
        affordable = affordable_tokens(
            self._slice_costs,
            running.num_computed_tokens,
            working_bytes=self._budget.shares.working,
        )
        n_tokens = min(running.prefill_speed * seconds, affordable)
        max_tokens = max(MIN_SLICE_TOKENS, int(n_tokens))
        return min(max_tokens, self._config.prefill_step_size)

    def note_peak(self) -> None:
        """Keep MLX's peak of memory, which each prefill slice sets back."""
        self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory())

    def _choose_slice_end(self, running: RunningRequest, *, seconds: float) -> int:
        stop = min([running.n_prompt - 1, *running.slice_ends])
        return slice_end(
            running.request.key.tokens,
            running.num_computed_tokens,
            stop=stop,
            max_tokens=self.max_slice_tokens(running, seconds=seconds),
        )

    @contextmanager
    def _measure(
        self, requests: Sequence[RunningRequest], *, is_usual: bool
    ) -> Iterator[None]:
        """Measure what a slice costs that these requests read in one call.

        Not `is_usual`: an image, or KV that is merged, costs more than the tokens read.
        """
        began = time.monotonic()
        active_bytes = mx.get_active_memory()
        self.note_peak()
        mx.reset_peak_memory()
        starts = [running.num_computed_tokens for running in requests]
        yield
        seconds = time.monotonic() - began
        ends = [running.num_computed_tokens for running in requests]
        n_tokens = sum(ends) - sum(starts)
        if n_tokens >= MIN_SLICE_TOKENS and is_usual:  # less measures the call
            speed = n_tokens / max(seconds, 1e-6)
            for running in requests:
                running.prefill_speed = speed
            self.measured_speed = speed
            slice_bytes = mx.get_peak_memory() - active_bytes
            self._slice_costs.append(SliceCost(max(ends), slice_bytes / n_tokens))
        mx.clear_cache()

    def _feed_together(self, requests: Sequence[RunningRequest]) -> LayerCaches:
        """Let the model read the rests of prompts, each but its last token."""
        token_rows: list[list[int]] = []
        for running in requests:
            n_computed = running.num_computed_tokens
            offset = kv_cache_offset(running.layer_caches, recorded=n_computed)
            rest = _remaining_prefill(running.request.key.tokens, offset)
            token_rows.append(rest.tolist())

        joint_caches = to_batch(*(running.layer_caches for running in requests))
        evaluate_caches(joint_caches)
        for running in requests:
            running.layer_caches = []  # else the KV would be there twice
        feed_padded(_model_call(self._loaded, requests), token_rows, joint_caches)
        evaluate_caches(joint_caches)

        for running in requests:
            running.num_computed_tokens = running.n_prompt - 1
        depths = [running.num_computed_tokens for running in requests]
        assert row_offsets(joint_caches).tolist() == depths, "rows of another depth"
        return joint_caches

    def _feed(self, running: RunningRequest, end: int) -> None:
        """Let the model read a prompt up to `end`, and keep states on the way."""
        start = running.num_computed_tokens
        layer_caches = running.layer_caches
        offset = kv_cache_offset(layer_caches, recorded=start)
        prompt_ids = running.request.key.tokens
        tokens = _remaining_prefill(prompt_ids, offset)[: end - start]

        image = running.find_image(end)
        with _taking_checkpoints(running, end):
            if image is None:
                model = _model_call(self._loaded, [running])
                model(mx.array(tokens)[None], cache=layer_caches)
            else:
                position = start + running.position_shift()
                counter = self._loaded.model.prefill_image(
                    tokens, image, layer_caches=layer_caches, position=position
                )
                tenant = running.request.owner.tenant
                self._metrics.of_tenant(tenant).bump(counter)
            evaluate_caches(layer_caches)
        running.num_computed_tokens = start + len(tokens)
        running.lease.advance(running.num_computed_tokens)


# -- 7 scheduler -----------------------------------------------------------------------

_QUEUE: Final = WaitCause("queue")
_MEMORY: Final = WaitCause("memory")

MAX_LOOKUPS: Final = 32  # of waiting requests, in one step
MAX_PASSED_SECONDS: Final = 30.0  # a request lets smaller ones pass it for so long
REPLY_CHECKPOINT_SPACING: Final = 64  # tokens, inside replies


class Scheduler:
    """Everything that happens on the model thread, one step at a time."""

    def __init__(
        self, loaded: LoadedModel, config: Config, *, metrics: CacheMetrics
    ) -> None:
        """Measure the model and divide memory. Runs the model, on two tokens."""
        self.loaded = loaded
        self.config = config
        self.metrics = metrics
        self.spec = measure_kv(loaded.model)
        shares = divide_memory(
            memory_limit(config),
            model_bytes=loaded.nbytes,
            max_kv_bytes=config.prompt_cache_max_bytes,
            has_vision=loaded.vision is not None,
        )
        if loaded.vision is not None:
            loaded.vision.max_bytes = shares.features

        self.cache = PrefixCache(
            config, self.spec, max_bytes=shares.kv, metrics=metrics
        )
        self.budget = MemoryBudget(shares, self.spec, self.cache)
        self.reader = PromptReader(
            loaded, config, spec=self.spec, budget=self.budget, metrics=metrics
        )
        self.policy = SchedulingPolicy()
        self.disk: DiskTier | None = None  # ENGINE opens it
        self.waiting: list[RequestHandle] = []  # in the order they came
        self.running: list[RunningRequest] = []  # in the order they started

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def prefilling(self) -> list[RunningRequest]:
        """Running requests whose prompts are not read yet, or not to their end."""
        return [running for running in self.running if running.batch is None]

    @property
    def batches(self) -> list[DecodeBatch]:
        """All decode batches."""
        return _batches_of(self.running)

    def kv_identity(self) -> str:
        """What makes KV of the same tokens the same, in 16 hex digits.

        Another version of a library may compute it otherwise.
        """
        packages = ("mlx", "mlx-lm", "mlx-vlm")
        facts = (
            self.loaded.revision,
            self.loaded.nbytes,  # tells weights that were made float32
            self.loaded.device,
            self.spec,
            [version_of_package(name) for name in packages],
        )
        return sha256(repr(facts).encode()).hexdigest()[:16]

    def step(self) -> None:
        """End what is over, admit what fits, decode a step, then prefill."""
        self._end_waiting()
        self._end_running()
        self._admit_waiting()

        began = time.monotonic()
        for batch in self.batches:
            self._decode(batch)
        self.policy.charge_decode(time.monotonic() - began)
        self._prefill_next(began)

    # -- end ---------------------------------------------------------------------------

    def _end_waiting(self) -> None:
        """End waiting requests that are cancelled, or that have waited too long."""
        now = time.monotonic()
        for handle in list(self.waiting):
            end: EndReason | ServerError | None = self._find_timeout(handle, now)
            if handle.stop_reason is not None:
                end = "cancelled"
            if end is not None:
                self.waiting.remove(handle)
                handle.put_end(end)

    def _find_timeout(self, handle: RequestHandle, now: float) -> Overloaded | None:
        """The error for a request that the model has not begun; None: it may wait."""
        max_seconds = self.config.queue_timeout_seconds or math.inf
        is_late = now - handle.submitted_at > max_seconds
        if not is_late or handle.is_second_try:  # the model had time for it before
            return None
        setting = f"QUEUE_TIMEOUT_SECONDS ({max_seconds:g})"
        return Overloaded(f"it waited for the model longer than {setting}")

    def _end_running(self) -> None:
        """End running requests that are cancelled, overdue or not read any more."""
        now = time.monotonic()
        for running in list(self.running):
            end = self._find_end(running, now)
            if end is not None:
                self._finish(running, end)

    def _find_end(
        self, running: RunningRequest, now: float
    ) -> EndReason | ServerError | None:
        """Why a request must end now; None: it goes on."""
        handle = running.handle
        if handle.n_unread() > MAX_UNREAD_EVENTS:
            logger.warning("a client is dropped that does not read its reply")
            return "cancelled"
        if handle.stop_reason is not None:
            return handle.stop_reason
        if not running.has_begun:
            return self._find_timeout(handle, now)

        # why(L-87): the deadline does not count the wait for the first slice.
        max_seconds = self.config.generation_watchdog_seconds
        if max_seconds and now - running.started_at > max_seconds:
            setting = f"GENERATION_WATCHDOG_SECONDS ({max_seconds:g})"
            logger.warning("a reply ends after %s", setting)
            return "deadline"
        return None

    def _finish(self, running: RunningRequest, end: EndReason | ServerError) -> None:
        """End a request, report it, and let the cache have its KV.

        Does nothing if a failure of its batch has ended it already.
        """
        if running not in self.running:
            return
        if end != "cancelled":
            # Its client sends the whole reply back: no state inside it will be needed.
            running.lease.drop_checkpoint(running.reply_checkpoint)
        previous = self._take_out(running)
        if running not in self.running:  # the batch failed when it was taken out
            return
        self._leave(running, previous)
        running.handle.put_end(end)

    def _take_out(self, running: RunningRequest) -> PreviousState | None:
        """Take a request out of its batch, if any; its state before the last step.

        An exception ends the whole batch: the request does not run any more then.
        """
        previous = None
        if running.batch is not None:
            with self.guard(*running.batch.requests):
                previous = running.batch.remove(running)
        return previous

    def _leave(
        self, running: RunningRequest, previous: PreviousState | None = None
    ) -> None:
        """Let a request run no more. If its KV cannot be kept, that is all it loses."""
        try:
            self._put_back(running, previous)
        except Exception as error:
            logger.exception("the KV of a request is lost")
            running.layer_caches = []
            running.lease.drop()
            self._free_memory(error)
        self.running.remove(running)

    def _put_back(
        self, running: RunningRequest, previous: PreviousState | None
    ) -> None:
        """Let the cache have the KV, and the state before the last step.

        This comes before the end is reported: the client's next request must find it.
        """
        lease = running.lease
        n_tokens = running.num_computed_tokens
        if n_tokens == 0 or running.has_failed:
            # Nothing was read, or the KV is wrong. (A first token without numbers fails
            # the request after the next step only; its client may leave before that.)
            lease.drop()
            return
        if previous is not None:
            lease.add_checkpoint(previous.position, previous.state)
        lease.add_checkpoint(n_tokens, copy_state(running.layer_caches))
        key = running.computed_key(self.config.prompt_cache_block_size)
        lease.put_back(key, take_span(running.layer_caches, n_tokens))

    def hold_limit(self) -> None:
        """Keep running requests within memory: they grow while they decode (L-79).

        As long as they alone have too much, the newest ends; or it waits again, if the
        model has not begun with it. Its KV is kept. ENGINE calls this before it looks
        at the cache and reports, and logs what it raises.
        """
        while running := self.budget.find_excess(self.running):
            if running.has_begun:
                n_tokens = running.num_computed_tokens
                error = self.budget.shortage(n_tokens, self.running)
                self._finish(running, error)
            else:
                self._leave(running)
                self.waiting.insert(0, running.handle)
        self.budget.evict_for_running(self.running)

    # -- admit -------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Start waiting requests, the oldest first, as long as they fit.

        What each of the others waits for is noted in its handle.
        """
        can_go_on = True
        for index, handle in enumerate(list(self.waiting)):
            has_place = len(self.running) < self.config.batch_max_rows
            if not can_go_on or not has_place or index >= MAX_LOOKUPS:
                handle.begin(_QUEUE, time.monotonic())
                continue
            try:
                can_go_on = self._admit(handle)
            except Exception as error:
                logger.exception("a request could not be started")
                self.waiting.remove(handle)
                self._free_memory(error)
                explanation = _explain_failure(error)
                if _may_try_again(handle, explanation):
                    self._try_again(handle)
                else:
                    handle.put(explanation)

    def _admit(self, handle: RequestHandle) -> bool:
        """Start a request, or let it wait. Returns False: later ones wait, too."""
        match = self._find_prefix(handle)
        if match.pending_tokens - match.cached_tokens >= MIN_WAIT_GAIN_TOKENS:
            request_id = self._let_slice_end_at(match)
            handle.begin(WaitCause("prefix", request_id), time.monotonic())
            return True

        n_prompt = handle.request.n_prompt
        if self._make_room_to_start(n_prompt, match):
            self._start(handle)
            self.waiting.remove(handle)
            return True
        if self.running:
            now = time.monotonic()
            handle.begin(_MEMORY, now)
            passed_seconds = handle.times.wait_seconds(now)[_MEMORY]
            return passed_seconds < MAX_PASSED_SECONDS
        self.waiting.remove(handle)
        handle.put(self.budget.shortage(n_prompt, self.running))
        return True

    def _find_prefix(self, handle: RequestHandle) -> PrefixMatch:
        """What is cached of a prompt; a second try goes without it."""
        if handle.is_second_try:
            return NO_MATCH
        return self.cache.find(handle.request.key)

    def _let_slice_end_at(self, match: PrefixMatch) -> str | None:
        """Let a slice end where the prefix is complete that a request waits for.

        Returns the id of the request that reads the prefix.
        """
        for running in self.running:
            if running.lease.entry is match.entry:
                last_position = running.n_prompt - 1
                running.add_slice_ends([min(match.pending_tokens, last_position)])
                return running.request.request_id
        return None

    def _make_room_to_start(self, n_prompt: int, match: PrefixMatch) -> bool:
        """Make room for a prompt. Its own cached prefix goes only if nothing runs."""
        n_bytes = self.budget.prompt_bytes(n_prompt)
        if self.budget.make_room(n_bytes, self.running, keep=match):
            return True
        return not self.running and self.budget.make_room(n_bytes, self.running)

    def _start(self, handle: RequestHandle) -> None:
        """Give a request the KV of its cached tokens; it can prefill then.

        If others run, it goes on waiting, for its turn; else it is read next.
        """
        if self.running:
            handle.begin(_QUEUE, time.monotonic())
        # A second lookup: to make room may have evicted what the first one found.
        match = self._find_prefix(handle)
        if self._load_more(handle, match):
            match = self._find_prefix(handle)
        try:
            running = RunningRequest(
                handle,
                match,
                cache=self.cache,
                layer_caches=make_prompt_cache(self.loaded.model),  # why(L-09): no max.
                prefill_speed=self.reader.expected_speed,
            )
        except Exception as error:
            if not _is_out_of_memory(error):  # what is cached may be faulty (L-114)
                self.cache.drop_source(match)
            raise
        try:
            offset = self.reader.prepare(running)
        except Exception as error:
            if _is_out_of_memory(error):
                running.lease.drop()
            else:
                running.lease.drop_with_source()
            raise
        # Not the match itself: a checkpoint would outlive its eviction there (L-105).
        handle.reuse = Reuse(match.hit_kind, match.cached_tokens, match.matched_tokens)
        self.running.append(running)
        handle.put(offset)

    def _load_more(self, handle: RequestHandle, match: PrefixMatch) -> bool:
        """Load what only the disk has of a prompt into the cache, if it is much."""
        if self.disk is None or handle.is_second_try:
            return False
        request = handle.request
        n_tokens = self.disk.load(
            request.key,
            match,
            owner=request.owner,
            prefill_speed=self.reader.measured_speed,
        )
        if n_tokens:
            metrics = self.metrics.of_tenant(request.owner.tenant)
            metrics.bump("disk_hits")
            metrics.bump("disk_tokens", n_tokens)
        return n_tokens > 0

    # -- prefill -----------------------------------------------------------------------

    def _prefill_next(self, step_began: float) -> None:
        """Prefill one slice, or more as long as each ends a prompt (L-68)."""
        while self.prefilling:
            running = self.policy.next_prefill(self.prefilling)
            if not self.policy.may_prefill(running, is_decoding=bool(self.batches)):
                return
            companions: list[RunningRequest] = []
            with self.guard():  # it changes no KV: if it fails, this one reads alone
                companions = self._find_companions(running)
            if companions:
                self._prefill_together([running, *companions])
            else:
                self._prefill(running)
            if running.batch is None or time.monotonic() - step_began > SLICE_SECONDS:
                return

    def _prefill(self, running: RunningRequest) -> None:
        """Prefill one slice. If no further one is needed, the request decodes then."""
        began = time.monotonic()
        with self.guard(running):
            self._note_prefill([running], began)
            if running.needs_slice:
                has_company = len(self.running) + len(self.waiting) > 1
                seconds = SLICE_SECONDS if has_company else LONE_SLICE_SECONDS
                self.reader.read_slice(running, seconds=seconds)
            if not running.needs_slice:
                self.reader.begin_batch([running])
            self._charge_prefill(began, [running])
        if running.batch is not None:
            self._join_best_batch(running.batch)

    def _prefill_together(self, requests: Sequence[RunningRequest]) -> None:
        """Read rests of prompts in one call; they decode as one batch then (L-123)."""
        began = time.monotonic()
        with self.guard(*requests):
            self._note_prefill(requests, began)
            joint_caches = self.reader.read_together(requests)
            self.reader.begin_batch(requests, joint_caches)
            self._charge_prefill(began, requests)
        batch = requests[0].batch
        if batch is not None:
            self._join_best_batch(batch)

    def _note_prefill(self, requests: Sequence[RunningRequest], now: float) -> None:
        """Note that the model reads for them now, if it did not before."""
        for running in requests:
            running.started_at = min(running.started_at, now)
            running.handle.begin("prefilling", now)

    def _charge_prefill(self, began: float, requests: Sequence[RunningRequest]) -> None:
        """Charge the turn of these requests to both accounts, rests included."""
        seconds = time.monotonic() - began
        own_batch = requests[0].batch
        is_decoding = any(batch is not own_batch for batch in self.batches)
        self.policy.charge_slice(seconds, is_decoding=is_decoding)
        others = [running for running in self.prefilling if running not in requests]
        self.policy.charge_prefill(requests[0], seconds, is_alone=not others)

    def _find_companions(self, running: RunningRequest) -> list[RunningRequest]:
        """Others whose prompts are read in the same call: few tokens of them are left.

        For example sub-agents, with one system prompt that is cached. Only where every
        layer keeps all tokens: the padding comes after what is read.
        """
        has_attention_alone = self.spec.can_batch and not self.spec.has_state
        can_pad = has_attention_alone and self.loaded.vision is None
        if not can_pad or not running.can_read_with_others:
            return []
        others = [
            other
            for other in self.prefilling
            if other is not running and other.can_read_with_others
        ]
        seconds = SOON_SECONDS if self.batches else MAX_JOINT_SECONDS
        companions = choose_companions(
            running,
            others,
            max_tokens=self.reader.max_slice_tokens(running, seconds=seconds),
            max_padding=self.config.batch_padding_max,
        )
        if not companions:
            return []
        group = [running, *companions]
        n_bytes = sum(self.budget.prompt_bytes(member.n_prompt) for member in group)
        has_room = self.budget.make_room_to_merge(n_bytes, self.running)
        return companions if has_room else []

    def _join_best_batch(self, batch: DecodeBatch) -> None:
        """Merge a new batch into the one that suits it best, if there is any."""
        host = None
        with self.guard():  # it changes no KV: if it fails, the batch decodes alone
            host = self._find_host(batch)
        if host is not None:
            with self.guard(*batch.requests, *host.requests):
                host.merge(batch)

    def _find_host(self, batch: DecodeBatch) -> DecodeBatch | None:
        """The batch whose requests are most alike in length to those of a new one.

        None: it decodes alone, since padding or the copies would take too much.
        """
        others = [other for other in self.batches if other is not batch]
        if not others or not self.spec.can_batch:
            return None
        host = min(others, key=lambda other: other.padding_with(batch))
        if host.padding_with(batch) > self.config.batch_padding_max:
            return None
        n_bytes = host.nbytes + batch.nbytes
        has_room = self.budget.make_room_to_merge(n_bytes, self.running)
        return host if has_room else None

    # -- decode ------------------------------------------------------------------------

    def _decode(self, batch: DecodeBatch) -> None:
        """Decode a step of each request, and end those that are complete."""
        accepted: list[AcceptedTokens] = []  # stays so if the step fails
        with self.guard(*batch.requests):
            accepted = batch.step()
            if self.spec.has_state:
                self._keep_reply_states(batch, accepted)
        for running, token_ids in accepted:
            self._end_if_complete(running, token_ids)

    def _end_if_complete(
        self, running: RunningRequest, token_ids: Sequence[int]
    ) -> None:
        """End a request that its last accepted tokens have completed, or broken.

        Does nothing for one that a failure of its batch has ended already.
        """
        if running not in self.running:
            return
        if running.has_failed:
            error = GenerationFailed("the model computed NaN or infinity")
            self._fail_alone(running, error)
        elif not self.loaded.eos_ids.isdisjoint(token_ids):
            self._finish(running, "stop")
        elif len(running.output_ids) >= running.request.max_tokens:
            self._finish(running, "length")

    def _keep_reply_states(
        self, batch: DecodeBatch, accepted: Sequence[AcceptedTokens]
    ) -> None:
        """Keep states from which a part of a reply can be gone on with.

        One after each token that may end it, though the model goes on (L-120). And one
        every REPLY_CHECKPOINT_SPACING tokens, of which only the newest stays, for a
        client that cancels the reply (L-121).
        """
        for running, token_ids in accepted:
            position = running.num_computed_tokens
            n_replied = position - running.n_prompt
            n_since_spaced = n_replied % REPLY_CHECKPOINT_SPACING
            if token_ids[-1] in running.request.checkpoint_ids:
                state = batch.read_state(running)
                running.lease.add_checkpoint(position, state)
            elif n_since_spaced < len(token_ids):  # they passed, or are at, a multiple
                state = batch.read_state(running)
                running.lease.drop_checkpoint(running.reply_checkpoint)
                running.lease.add_checkpoint(position, state)
                running.reply_checkpoint = position

    # -- failures ----------------------------------------------------------------------

    @contextmanager
    def guard(self, *requests: RunningRequest) -> Iterator[None]:
        """If what follows raises, these requests fail, and no others.

        They are those whose KV it changes: an exception may leave that half written, so
        it is dropped (L-17). Whoever changes a batch names all requests in it.
        """
        try:
            yield
        except Exception as error:
            failed = [running for running in self.running if running in requests]
            logger.exception("a fault costs %d request(s) their KV", len(failed))
            self._free_memory(error)
            for running in reversed(failed):  # `_try_again` lets each come first
                self._fail(running, _explain_failure(error))

    def _fail_alone(self, running: RunningRequest, error: ServerError) -> None:
        """End one request of a batch whose KV is wrong; the others go on."""
        self._take_out(running)
        if running in self.running:
            self._fail(running, error)

    def _fail(self, running: RunningRequest, error: ServerError) -> None:
        """End a request whose KV is or may be wrong; what builds on it goes, too.

        Without a token yet it is tried again, once.
        """
        self.running.remove(running)
        running.layer_caches = []
        running.batch = None
        if not running.has_replied and _may_try_again(running.handle, error):
            running.lease.drop_with_source()
            self._try_again(running.handle)
        else:
            running.lease.drop()
            running.handle.put(error)

    def _try_again(self, handle: RequestHandle) -> None:
        """Let a request begin again, as the next one, without the cache (L-114)."""
        self.metrics.bump("second_tries")
        logger.warning(
            "id=%s: it failed before its first token, and is read again without the"
            " cache",
            handle.request.request_id or "-",
        )
        if self.disk is not None:
            with self.guard():  # a second try does not look there
                self.disk.files.remove_prompt(handle.request.key)
        if handle.request.images:
            self.loaded.model.forget_features()
        handle.begin_again()
        self.waiting.insert(0, handle)

    def save_some(self) -> bool:
        """Bring some KV to the disk; whether there is more to do."""
        if self.disk is None:
            return False
        writer = self.disk.files.writer
        try:
            return self.disk.save_some(is_busy=self.is_busy)
        except Exception as error:
            if not writer.failure:
                logger.exception("disk cache: nothing is written any more")
                writer.failure = repr(error)
            return False

    def evict_idle(self) -> None:
        """Evict what was not used for PROMPT_CACHE_TTL_SECONDS, on the disk, too."""
        self.cache.evict_idle()
        ttl_seconds = self.config.prompt_cache_ttl_seconds
        if self.disk is not None and ttl_seconds:
            self.disk.files.remove_idle(ttl_seconds)

    def drop_kv(self, tenant: str, session: str | None) -> int:
        """Forget what rests of a session, or of a tenant (None), on the disk, too.

        Returns how many entries of the cache were evicted or shortened.
        """
        n_evicted = self.cache.evict_session(tenant, session)
        if self.disk is not None:
            self.disk.forget(tenant, session)
        return n_evicted

    def _free_memory(self, error: Exception) -> None:
        """If memory ran out, half of what is cached goes."""
        if not _is_out_of_memory(error):
            return
        kept_bytes = self.cache.nbytes // 2
        self.cache.evict_to_fit(self.cache.max_bytes - kept_bytes)


def _explain_failure(error: Exception) -> ServerError:
    """What a client is told of an exception of the model: an error of its own.

    Each connection raises its error, on its own thread.
    """
    if _is_out_of_memory(error):
        return Overloaded(
            "memory ran out on this request; with fewer at once it may fit"
        )
    return GenerationFailed("the model failed on this request")


def _may_try_again(handle: RequestHandle, error: ServerError) -> bool:
    """Whether a request that failed without a token gets a second try: not for memory.

    Nor if its client has left, or if this was the second try.
    """
    if handle.is_second_try or handle.stop_reason is not None:
        return False
    return isinstance(error, GenerationFailed)


# What MLX writes; the last two on Metal, and on CUDA.
_OUT_OF_MEMORY: Final = ("to allocate", "insufficient memory", "out of memory")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an exception means that memory ran out. MLX has no type for it."""
    if isinstance(error, MemoryError):
        return True
    sentence = str(error).lower()
    return any(phrase in sentence for phrase in _OUT_OF_MEMORY)


# region WARM-UP ===============================================================
# On an NVIDIA GPU each kernel is compiled when it is first needed: the first request
# took 38 s on an H200, the first batch of eight 9 to 43 s. So the scheduler runs some
# requests of our own before the server lets others in:
#
#     1  a prompt of more than one slice         prefill; a reply, decoded greedily
#     2  one that parts from it in the middle    KV that is copied, a checkpoint
#     3  sampled, with penalties                 all that chooses a token
#     4  held to a constraint                    masks
#     5  two, four, eight at once                decode batches that grow and shrink
#
# Their KV is evicted afterwards. What they measured of the model's speed stays.
#
# Public   WarmUpProgress, is_warm_up_wanted, warm_up
# Uses     CONFIG, ERRORS, LOGGING, API TYPES, TOKEN HASHES, PREFIX CACHE, SAMPLING,
#          SCHEDULER
# Thread   model; mlx

_WARM_REPLY_TOKENS: Final = 8
_WARM_BATCHES: Final = (2, 4, 8)  # requests at once
_SHORT_PROMPT_TOKENS: Final = 300
_GREEDY: Final = SamplingParams(top_k=0, repetition_context_size=0, seed=None)
_SAMPLED: Final = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    repetition_context_size=64,
    seed=0,
)


class WarmUpProgress(NamedTuple):
    """How many steps of the warm-up are over."""

    n_done: int
    n_steps: int


def is_warm_up_wanted(config: Config) -> bool:
    """Whether kernels are compiled when they are needed: on an NVIDIA GPU."""
    if config.kernel_warm_up == "auto":
        return mx.default_device() == mx.gpu and mx.cuda.is_available()
    return config.kernel_warm_up in {"on", "exit"}


def warm_up(scheduler: Scheduler, *, note: Callable[[WarmUpProgress], bool]) -> None:
    """Run each kind of work once.

    `note` is told how far it is, and says whether to go on.
    """
    loaded = scheduler.loaded
    steps = _warm_up_steps(scheduler)
    scheduler.loaded = replace(loaded, eos_ids=frozenset())  # no reply ends early
    for number, requests in enumerate(steps):
        if not note(WarmUpProgress(number, len(steps))):
            break
        handles = [RequestHandle(request) for request in requests]
        scheduler.waiting += handles
        while scheduler.is_busy:
            scheduler.step()
        for handle in handles:
            _warn_of_failure(handle)
    scheduler.loaded = loaded
    scheduler.cache.evict_session(NO_OWNER.tenant, None)


def _warn_of_failure(handle: RequestHandle) -> None:
    """Log why a request of the warm-up failed, if it did: clients will meet it, too."""
    while handle.n_unread():
        event = handle.next_event(0)
        if isinstance(event, ServerError):
            logger.warning("warm-up: %s", event)


def _warm_up_steps(scheduler: Scheduler) -> list[list[EngineRequest]]:
    """The requests of each step, which run at once."""
    n_long = min(
        scheduler.config.prefill_step_size + _SHORT_PROMPT_TOKENS,
        scheduler.budget.capacity_tokens // 2,
    )
    n_short = min(_SHORT_PROMPT_TOKENS, n_long)
    n_vocab = scheduler.loaded.vocab_size
    block_size = scheduler.config.prompt_cache_block_size

    def request(
        number: int,
        n_tokens: int,
        *,
        sampling: SamplingParams = _GREEDY,
        constraints: tuple[Constraint, ...] = (),
    ) -> EngineRequest:
        """One whose prompt parts from all others after their first half."""
        ids = np.arange(n_tokens, dtype=np.int32) % min(n_vocab, 1_000)
        ids[n_tokens // 2 :] = (ids[n_tokens // 2 :] + number) % n_vocab
        hashes = block_hashes(ids, block_size, root=b"")
        return EngineRequest(
            key=TokenKey(b"", ids, hashes),
            checkpoint_positions=(n_tokens // 2, n_tokens - 1),
            max_tokens=_WARM_REPLY_TOKENS,
            sampling=sampling,
            constraints=constraints,
        )

    masked: tuple[Constraint, ...] = (partial(forbid_tokens, [0]),)
    steps = [
        [request(0, n_long)],
        [request(1, n_long)],
        [request(2, n_short, sampling=_SAMPLED)],
        [request(3, n_short, constraints=masked)],
    ]
    for n_requests in _WARM_BATCHES:
        numbers = range(10 * n_requests, 11 * n_requests)  # in no other step
        steps.append([request(number, n_short) for number in numbers])
    return steps


# region ENGINE ================================================================
# The model thread, and what other threads may ask of it.
#
#     submit, call --> inbox --> model thread: scheduler.step(), again and again
#                                      |
#     RequestHandle.next_event  <-------+-------> memory, report, cache_entries
#
# Other threads never touch the scheduler or MLX. They put functions into the inbox,
# which the model thread runs between two steps; and they read what it publishes.
#
# For example submit() puts a function into the inbox that appends a handle to
# `scheduler.waiting`, and returns the handle. The model thread finds it before its next
# step, or at once if it rests. The connection waits in handle.next_event().
#
# Public   Engine, EngineReport, MemoryReport, RequestLoad
# Uses     CONFIG, ERRORS, LOGGING, PREFIX CACHE, DISK CACHE, MODEL LOADING, SCHEDULER,
#          WARM-UP
# Thread   Engine: any; _run and what it calls: model, mlx

IDLE_SECONDS: Final = 1.0  # at rest: between two reports; until memory is given back
IDLE_SECONDS_WITH_KV: Final = 60.0  # the second of these while KV is cached (L-67)
REPORT_SECONDS: Final = 0.25  # between two reports while requests run
CALL_CHECK_SECONDS: Final = 1.0  # between two looks whether the model thread lives
_GONE: Final = "the model cannot be used any more; the server's log says why"
_STOPPING: Final = "the server is stopping"


class MemoryReport(TypedDict, total=False):
    """Bytes by kind; empty until the model is loaded."""

    limit: int
    model: int
    cache: int  # KV at rest, and all checkpoints
    features: int  # of images; only for vision models
    running: int  # KV of running requests
    working: int  # all that MLX has besides
    peak: int  # the most that MLX had in use since the start


class EngineReport(TypedDict, total=False):
    """Requests by state, and the cache; empty until the model is loaded."""

    queued: int
    prefilling: int
    decoding: int
    groups: int  # decode batches: clients know this and the next by their old names
    lines: int  # cache entries
    cache_bytes: int
    cache_max_bytes: int
    capacity_tokens: int  # the longest prompt whose KV fits
    kv_bytes_per_token: int
    prefill_tokens_per_second: float  # of the last slice; absent until there was one


class RequestLoad(NamedTuple):
    """A request in the engine, as far as its tenant may see it."""

    tenant: str
    phase: Literal["queued", "prefilling", "decoding"]
    nbytes: int = 0  # of its KV; of a prompt that is being read, what it will have
    batch: int = -1  # number of its decode batch


class Engine:
    """The model thread and its inbox. Any thread may call any method."""

    def __init__(
        self,
        config: Config,
        metrics: CacheMetrics,
        *,
        load: Callable[[], LoadedModel],
        use_folder: Callable[[Path], None] | None = None,
    ) -> None:
        """`load` runs on the model thread, and may raise ModelError.

        With `use_folder`, KV is kept on the disk, too. It is called on the model thread
        with the folder of this model, before requests are let in.
        """
        self._config = config
        self._metrics = metrics
        self._load = load
        self._use_folder = use_folder
        self._inbox = queue.SimpleQueue[Callable[[Scheduler], object]]()
        self._n_waiting = 0  # requests that the model thread has taken from the inbox
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._faults = FaultLog()  # of what no request waits for

        # The thread loads the weights, warms up, then lets requests in.
        self._is_loading = True  # the weights
        self.warm_up: WarmUpProgress | None = None  # None: before it and after it
        self._loaded: LoadedModel | None = None  # None: no request may come yet
        self.is_closing = False  # set by MAIN: requests may end, none may begin
        self._has_ended = threading.Event()  # or the thread ends after this step
        self.failure: str | None = None  # a sentence; None: nothing has failed

        # What the thread has published: while requests run at most REPORT_SECONDS and
        # one step ago, else IDLE_SECONDS.
        self.memory: MemoryReport = {}
        self.report: EngineReport = {}
        self.cache_entries: list[tuple[str, EntryReport]] = []  # (tenant, entry)
        self.loads: list[RequestLoad] = []
        self.disk: DiskReport | None = None  # None: KV is not kept on the disk

    def start(self) -> None:
        """Start the model thread, which loads the model."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; running requests fail."""
        self._has_ended.set()
        self._inbox.put(lambda _scheduler: None)  # wakes the thread if it rests
        if not self._is_loading:  # loading cannot be stopped, so nobody waits for it
            self._thread.join(timeout=10 + self._config.shutdown_grace_seconds)

    @property
    def state(self) -> Literal["loading", "ready", "dead"]:
        """What requests meet. "dead": the thread has ended; `failure` may say why."""
        if self._has_ended.is_set():
            return "dead"
        return "ready" if self._loaded else "loading"

    @property
    def model(self) -> LoadedModel:
        """The loaded model. Raises NotReady: it is loading, or the thread ended."""
        if self._has_ended.is_set():
            raise self._explain_end()
        if self._loaded is None:
            raise NotReady("the model is still loading")
        return self._loaded

    def _explain_end(self) -> NotReady:
        """What a client is told once the model thread has ended, or ends."""
        is_stopped = self.is_closing and self.failure is None
        return NotReady(_STOPPING if is_stopped else _GONE)

    def submit(self, request: EngineRequest) -> RequestHandle:
        """Queue a request. Raises NotReady, or Overloaded at MAX_QUEUED_REQUESTS.

        Others may submit in the same moment, so a few more than that may get in.
        """
        assert request.n_prompt and request.max_tokens > 0
        self._check_ready()
        if self.is_closing:
            raise NotReady(_STOPPING)
        max_queued = self._config.max_queued_requests
        if self._inbox.qsize() + self._n_waiting >= max_queued:
            raise Overloaded(f"{max_queued} requests are waiting already")

        handle = RequestHandle(request)
        self._inbox.put(lambda scheduler: scheduler.waiting.append(handle))
        self._check_ready()  # the thread may have ended, and never look again
        return handle

    def call[T](self, function: Callable[[Scheduler], T]) -> T:
        """Run a function on the model thread, between two steps; returns its result.

        Raises what the function raises. Raises NotReady if no model is loaded, or if
        the thread ends before it runs the function.
        """
        self._check_ready()  # else the function would run when nobody waits for it
        result: Future[T] = Future()

        def run(scheduler: Scheduler) -> None:
            try:
                result.set_result(function(scheduler))
            except Exception as error:  # noqa: BLE001 - raised again by the caller
                result.set_exception(error)

        self._inbox.put(run)
        while True:
            self._check_ready()
            if wait_for_futures([result], timeout=CALL_CHECK_SECONDS).done:
                return result.result()

    def _check_ready(self) -> None:
        """Raises NotReady, as `model` does."""
        _ = self.model

    # -- the model thread --------------------------------------------------------------

    def _run(self) -> None:
        """Load the model, serve requests, and leave nobody waiting in the end."""
        scheduler: Scheduler | None = None
        try:
            loaded = self._load()
            self._is_loading = False
            scheduler = Scheduler(loaded, self._config, metrics=self._metrics)
            _check_room(scheduler)
            if is_warm_up_wanted(self._config):
                self._warm_up(scheduler)
            if self._has_ended.is_set():  # stop() was called meanwhile
                return
            self._faults.guard(partial(self._open_disk, scheduler))
            self._open(scheduler)
            with wired_limit(loaded.model):
                self._serve(scheduler)
        except ModelError as error:
            self.failure = str(error)
        except Exception:
            logger.exception("the model thread died")
            self.failure = "the model thread died; the log says why"
        finally:
            self._has_ended.set()
            if scheduler is not None:  # else nobody could submit yet
                self._refuse_all(scheduler)
                self._save_all(scheduler)
            mx.clear_streams()  # why(L-20): else the process may abort at its end

    def _warm_up(self, scheduler: Scheduler) -> None:
        began = time.monotonic()

        def note(progress: WarmUpProgress) -> bool:
            self.warm_up = progress
            return self.state == "loading"

        warm_up(scheduler, note=note)
        self.warm_up = None
        logger.info("warmed up in %.1f s", time.monotonic() - began)

    def _open_disk(self, scheduler: Scheduler) -> None:
        """Find the KV that earlier servers have left on the disk, if it is kept."""
        if self._use_folder is None:
            return
        disk = open_disk_cache(self._config, scheduler.kv_identity())
        if disk is None:
            return
        self._use_folder(disk.folder)
        scheduler.disk = DiskTier(disk, scheduler.cache, scheduler.spec)
        if scheduler.loaded.vision is not None:
            scheduler.loaded.vision.secret = disk.image_secret

    def _save_all(self, scheduler: Scheduler) -> None:
        """Write to the disk what only memory has, as far as there is time."""
        if scheduler.disk is None or self.failure is not None:
            return
        try:
            scheduler.disk.save_all(self._config.shutdown_grace_seconds)
        except Exception:
            logger.exception("disk cache: not all of it was written")
        scheduler.disk.files.close()

    def _open(self, scheduler: Scheduler) -> None:
        """Let requests in: publish what they read, then the model."""
        loaded = scheduler.loaded
        self._publish(scheduler)
        capacity_tokens = scheduler.budget.capacity_tokens
        max_tokens = min(loaded.max_context_tokens, capacity_tokens)
        self._loaded = replace(loaded, max_context_tokens=max_tokens)

    def _serve(self, scheduler: Scheduler) -> None:
        """Step as long as there is something to do; look around now and then."""
        worked_at = time.monotonic()
        reported_at = worked_at
        can_rest = True  # nothing runs, and no KV is left to be saved
        while not self._has_ended.is_set():
            wait_seconds = IDLE_SECONDS if can_rest else 0.0
            self._receive(scheduler, wait_seconds=wait_seconds)
            self._n_waiting = len(scheduler.waiting)
            if scheduler.is_busy:
                scheduler.step()
                worked_at = time.monotonic()
            else:
                idle_seconds = time.monotonic() - worked_at
                self._faults.guard(partial(self._rest, scheduler, idle_seconds))
            has_more_to_save = scheduler.save_some()
            can_rest = not (has_more_to_save or scheduler.is_busy)

            since_report = time.monotonic() - reported_at
            if not scheduler.is_busy or since_report > REPORT_SECONDS:
                reported_at = time.monotonic()
                self._faults.guard(scheduler.hold_limit)
                self._faults.guard(scheduler.evict_idle)
                self._faults.guard(partial(self._publish, scheduler))

    def _receive(self, scheduler: Scheduler, *, wait_seconds: float) -> None:
        """Run all functions of the inbox; wait for the first one, if there is none."""
        with suppress(queue.Empty):
            self._inbox.get(timeout=wait_seconds)(scheduler)
            while True:
                self._inbox.get_nowait()(scheduler)

    def _rest(self, scheduler: Scheduler, idle_seconds: float) -> None:
        """Give memory back that nobody has used for a while (L-53).

        why(L-67): while KV is cached, somebody will come back and need the buffers.
        """
        if scheduler.cache.entries and idle_seconds <= IDLE_SECONDS_WITH_KV:
            return
        if not scheduler.cache.entries:
            # why(L-56): without KV, what memos save is little beside prefill.
            scheduler.loaded.template.clear_memos()
        mx.clear_cache()
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc gives nothing back by itself
            libc.malloc_trim(0)

    def _publish(self, scheduler: Scheduler) -> None:
        """Let other threads see what runs, and what memory is used for."""
        cache = scheduler.cache
        budget = scheduler.budget
        batches = scheduler.batches
        report: EngineReport = {
            "queued": len(scheduler.waiting),
            "prefilling": len(scheduler.prefilling),
            "decoding": sum(len(batch.requests) for batch in batches),
            "groups": len(batches),
            "lines": len(cache.entries),
            "cache_bytes": cache.nbytes,
            "cache_max_bytes": cache.max_bytes,
            "capacity_tokens": budget.capacity_tokens,
            "kv_bytes_per_token": scheduler.spec.token_bytes,
        }
        speed = scheduler.reader.measured_speed
        if speed is not None:
            report["prefill_tokens_per_second"] = round(speed, 1)
        self.report = report
        self.memory = self._describe_memory(scheduler)
        self.cache_entries = cache.describe()
        self.loads = _list_loads(scheduler)
        if scheduler.disk is not None:
            self.disk = scheduler.disk.files.report()

    def _describe_memory(self, scheduler: Scheduler) -> MemoryReport:
        scheduler.reader.note_peak()
        report: MemoryReport = {
            "limit": scheduler.budget.shares.limit,
            "model": scheduler.loaded.nbytes,
            "cache": scheduler.cache.nbytes,
            "running": scheduler.budget.running_bytes(scheduler.running),
            "peak": scheduler.reader.peak_bytes,
        }
        known_bytes = report["model"] + report["cache"] + report["running"]
        vision = scheduler.loaded.vision
        if vision is not None:
            report["features"] = vision.feature_bytes
            known_bytes += report["features"]
        mlx_bytes = mx.get_active_memory() + mx.get_cache_memory()
        report["working"] = max(0, mlx_bytes - known_bytes)
        return report

    def _refuse_all(self, scheduler: Scheduler) -> None:
        """Tell all requests that there will be no answer."""
        self._receive(scheduler, wait_seconds=0.0)
        running = [running.handle for running in scheduler.running]
        for handle in [*scheduler.waiting, *running]:
            handle.put(self._explain_end())


def _check_room(scheduler: Scheduler) -> None:
    """Raise ModelError if there is hardly room for KV."""
    if scheduler.budget.capacity_tokens < MIN_SLICE_TOKENS:
        limit = scheduler.budget.shares.limit
        raise ModelError(
            f"the model takes {scheduler.loaded.nbytes:,} bytes of {limit:,}:"
            " too little is left for KV (MEMORY_LIMIT_BYTES)"
        )


def _list_loads(scheduler: Scheduler) -> list[RequestLoad]:
    loads = [
        RequestLoad(handle.request.owner.tenant, "queued")
        for handle in scheduler.waiting
    ]
    prompt_bytes = scheduler.budget.prompt_bytes
    for running in scheduler.prefilling:
        n_bytes = prompt_bytes(running.request.n_prompt)
        loads.append(RequestLoad(running.request.owner.tenant, "prefilling", n_bytes))
    for number, batch in enumerate(scheduler.batches):
        for running in batch.requests:
            n_bytes = prompt_bytes(running.num_computed_tokens)
            tenant = running.request.owner.tenant
            loads.append(RequestLoad(tenant, "decoding", n_bytes, number))
    return loads


# region REASONING PARSER ======================================================
# Generated text -> reasoning, content and the text of calls, while it is generated.
#
#     <think>\nWhy?\n</think>\n\nI look.\n\n<tool_call>...</tool_call>\nDone.
#              ----                                                            reasoning
#                                -------                              -------  content
#                                       ------------------------------         tool
#
# The texts are the same however the reply is cut into chunks. So what may belong to a
# tag is held back until that is certain: half a tag; and white space at the end, which
# is dropped if a tag follows.
#
#     chunk fed      emitted                   held back
#     I look.\n      content "I look."         \n            white space
#     \n<tool        -                         \n\n<tool     may become <tool_call>
#     box>           content "\n\n<toolbox>"   -             it did not
#
# Line breaks after a tag are dropped until text of that kind was emitted, so that a
# reply of calls alone has no content. All other text is emitted as it was generated. A
# line break before a thought is kept if none follows the thought: the content of
# "One.\n<think>Why</think>Two." is "One.\nTwo."
#
# Whoever reads the calls (TOOL CALLS) takes over where one begins: from there on all
# text is "tool" pieces, until `resume` says where the call has ended. If that was none,
# its text is given back by `add_text`, and the reply goes on as it was.
#
# What looks like a tag may be a quotation: an answer about <think>, a file that
# contains <tool_call>. Two things tell them apart. A model writes a tag as a token of
# its own: a chunk without such tokens is fed as `literal`, and only untagged calls are
# looked for in it. And a tag in the middle of a line may be a word of the sentence:
# _find_role() tells what a tag does, by the rules of the two functions after it.
#
# In a pattern \0 is the end of the reply. finish() puts it after what was held back;
# nothing else does, and models do not write it.
#
# Public   ReasoningStreamSplitter, Tags, Piece, TextKind, NO_PATTERN, FENCE_START,
#          think_tag_pattern
# Uses     -
# Thread   any; pure

TextKind = Literal["reasoning", "content"]
TagRole = Literal["think_start", "think_end", "tool_start", "fence_end", "text"]

NO_PATTERN: Final = "(?!)"  # a regular expression that matches nowhere

# A call may stand in a block of code of its own. Then these two lines are part of it.
FENCE_START: Final = r"```[\w-]{0,20}[ \t]{0,9}\n\s{0,99}"
_FENCE_END: Final = r"\A\s{0,99}```[ \t]{0,9}(?=\n|\0)"
_UNTAGGED_OBJECT: Final = regex.compile(rf"(?:{FENCE_START})?\{{")


class Tags(NamedTuple):
    """Patterns of what parts a reply; None where a model has no such thing.

    Where two fit at the same place, the first in this order counts.
    """

    think_start: str | None = None
    tool_start: str | None = None
    # What begins a call where `tool_start` was left out. Of JSON that may be "{" alone.
    untagged_call: str | None = None
    think_end: str | None = None

    @property
    def has_channels(self) -> bool:
        """Whether the model is gpt-oss, whose replies have channels."""
        return self.think_end == _HARMONY_THINK_END


# why(L-88): a reply of gpt-oss has channels, and no closing tags:
#     <|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary
#      to=functions.read <|constrain|>json<|message|>{"path": "a.md"}
# The header of the analysis is `think_start`. A header with a recipient begins a call:
# with `tool_start`, or in another spelling, which is the `untagged_call`. Each piece of
# markup that is neither ends thinking, or stands where thinking has ended before. For
# each an example; what it finds is in brackets.
_HARMONY_THINK_END: Final = r"""(?x:
    # The end of a message:       Why?[<|end|>]<|start|>assistant<|channel|>...
    <\|end\|>
    (?= \s{0,9} (?: <\|start\|> | <\|ch | assistant (?: [ ]to= | <\|ch ) | \0 ) )

    # The start of the next one:  [<|start|>assistant]<|channel|>...
    # also without its tag:       Why?[assistant]<|channel|>...
  | (?: <\|start\|> | (?<! <\|channel\|> ) ) assistant (?= [ ]to= | <\|ch )

    # A recipient that is none:   [<|channel|>analysis to=user]<|channel|>...
  | (?: <\|channel\|> \w{1,20} )? [ ]? to=(?: assistant | user ) (?= <\|ch )

    # A tool nobody offered:      [to=python<|channel|>analysis<|message|>]print(1)
  | to= (?! functions\. ) [\w.]{1,60}+
    (?: <\|channel\|> [^<]{0,40} )? (?: <\|constrain\|> \w{1,20} )? <\|message\|>

    # A tag that comes twice:     [<|channel|>]<|channel|>...
  | <\|channel\|> (?= <\|ch )

    # Any other header:           [<|channel|>final<|message|>]Hi
    # also with a format:         [<|channel|>final <|constrain|>json<|message|>]{}
  | <\|channel\|> (?: [^<] | <\|con ){0,200} <\|message\|>
)"""
# A header with a recipient that is no function of ours: one of the tools that gpt-oss
# was trained with. What follows is code for it, and no answer: it counts as thinking.
_BUILT_IN: Final = regex.compile(r"to=(?!functions\.|assistant\b|user\b)[\w.]")


# Gemma leaves out the tag before the word, and writes closing tags of calls twice.
_GEMMA_THOUGHT: Final = "thought\n"
_GEMMA_CALL_END: Final = "<tool_call|>"
# Kimi's calls stand one after another in a section, whose tags may be left out.
_KIMI_CALL_STARTS: Final = ("<|tool_call_begin|>", "<|tool_call_section_begin|>")

# By its tag, what begins or ends thinking in a model that also writes it otherwise.
_THINK_TAG_PATTERNS: Final[Mapping[str, str]] = {
    "<|end|>": _HARMONY_THINK_END,
    "<|channel>thought": rf"<\|channel>thought|{_GEMMA_THOUGHT}",
    "<channel|>": rf"<channel\|>|{regex.escape(_GEMMA_CALL_END)}",
}


def think_tag_pattern(tag: str) -> str:
    """The pattern in Tags for the tag with which a model begins or ends thinking."""
    return _THINK_TAG_PATTERNS.get(tag) or str(regex.escape(tag))


class Piece(NamedTuple):
    """A part of a reply.

    A "tool" piece is raw: it contains the tags of the call, and the white space before.
    """

    kind: Literal["reasoning", "content", "tool"]
    text: str


# Finds:      ```python    Finds not:  ```an inline span```
_FENCE_LINE: Final = re.compile(
    r"\s*(?P<fence>`{3,}(?=[^`]*\Z)|~{3,})(?P<language>.*)", re.DOTALL
)
_FENCE_LINE_LENGTH: Final = 200  # characters of a line that are looked at
# White space that is held back. A model may print line breaks without end, and what is
# held back is searched again with each chunk.
_MAX_HELD_SPACE: Final = 99


class _CodeFence:
    """Whether a text that comes in pieces is in a block of code: between ``` lines.

    A block that begins with ```` may contain ``` lines, and any block ```python: a
    line that ends a block names no language.
    """

    def __init__(self) -> None:
        self._opening = ""  # of the block before the current line: "```"; "": none
        self._line_start = ""

    @property
    def is_open(self) -> bool:
        """Whether what follows is code."""
        return bool(self._opening_after_line())

    def read(self, text: str) -> None:
        """Read on in the text."""
        first, *lines = text.split("\n")
        self._line_start = (self._line_start + first)[:_FENCE_LINE_LENGTH]
        for line in lines:
            self._opening = self._opening_after_line()
            self._line_start = line[:_FENCE_LINE_LENGTH]

    def _opening_after_line(self) -> str:
        match = _FENCE_LINE.match(self._line_start)
        if match is None:
            return self._opening
        fence = match["fence"]
        if not self._opening:
            return fence
        is_end = fence.startswith(self._opening) and not match["language"].strip()
        return "" if is_end else self._opening


_FENCED_TAG: Final = regex.compile(rf"{FENCE_START}(?P<tag>(?s:.+))")


def _compile_patterns(tags: Tags) -> dict[tuple[bool, bool], Any]:
    """What is looked for, by whether the text is literal, and a call was in a block.

    A group has the name of its tag.
    """
    fence = f"(?:{FENCE_START})?"
    groups = []
    for name, tag in tags._asdict().items():
        if tag:
            lead = fence if name in {"tool_start", "untagged_call"} else ""
            groups.append(f"(?P<{name}>{lead}(?:{tag}))")
    any_tag = "|".join(groups) or NO_PATTERN

    # Literal text has no tag of a call, but perhaps the ``` line before one. That line
    # is held back until the tag comes: without \0 the line fits its pattern in part, as
    # the beginning of something longer.
    untagged = f"(?P<untagged_call>{fence}(?:{tags.untagged_call or NO_PATTERN}))"
    if tags.tool_start:
        untagged += rf"|{FENCE_START}\0"
    if _GEMMA_THOUGHT in (tags.think_start or ""):  # a word, and no token
        untagged += f"|(?P<think_start>{_GEMMA_THOUGHT})"

    patterns = {}
    for literal, source in ((False, any_tag), (True, untagged)):
        patterns[literal, False] = regex.compile(source)
        fenced_source = f"(?P<fence_end>{_FENCE_END})|{source}"
        patterns[literal, True] = regex.compile(fenced_source)
    return patterns


class ReasoningStreamSplitter:
    """Parts one reply into pieces: `feed` it as it is generated, then `finish` it.

    reasoning <--- think_start, think_end ---> content
        |                                         |
        +--------> in_call <----------------------+
    """

    def __init__(self, tags: Tags, *, in_reasoning: bool) -> None:
        """`in_reasoning`: the prompt ends inside thinking; there the reply begins."""
        self._patterns = _compile_patterns(tags)
        self._has_channels = tags.has_channels

        self.in_call = False
        self.after_tag = in_reasoning  # no text was emitted since the last tag
        self._kind: TextKind = "reasoning" if in_reasoning else "content"
        self._held = ""  # white space, then perhaps half a tag
        self._dropped: dict[TextKind, str] = {}  # white space: the "\n" of "One.\n"
        self._emitted_kinds: set[TextKind] = set()  # of which there was some text
        self._is_quoting = False  # the text ends with a quote, or a tag spoken of
        self._fence = _CodeFence()  # in the content
        self._is_call_fenced = False  # the line that ends the block may come next
        self._has_quoted_think = False  # an answer has spoken of <think>
        self._follows_false_call = False  # what began as a call was text

    @property
    def is_thinking(self) -> bool:
        """Whether text is reasoning now."""
        return self._kind == "reasoning" and not self.in_call

    @property
    def holds_text(self) -> bool:
        """Whether other text than white space was fed and not emitted."""
        return self.in_call or bool(self._held.strip())

    def feed(self, text: str, *, literal: bool = False) -> list[Piece]:
        """What is certain now. `literal`: what looks like a tag is text.

        A call without its tag is found there, too: what it begins with is no token.
        """
        if self.in_call:
            return [Piece("tool", text)] if text else []
        if literal and self.is_thinking:
            return self.add_text(text)  # why(L-82): calls in thinking are quoted
        return self._scan(text, literal=literal)

    def resume(self, rest: str, *, called: bool) -> list[Piece]:
        """Go on after a call with `rest`, the text that follows it.

        A call ends thinking. `called` is False if it was none; then its text went to
        add_text() before.
        """
        self.in_call = False
        if called:
            self._begin("content")
        self._follows_false_call = not called
        # Not as literal: the token of the next tag may be in it. Of other text it has
        # only what the reader had to see to know that the call was over.
        return self._scan(rest, literal=False)

    def add_text(self, text: str) -> list[Piece]:
        """Take text in which nothing is a tag, as part of what the reply is in now."""
        text = self._held + text
        is_first = self._kind not in self._emitted_kinds
        begins_message = self.after_tag and self._has_channels
        if self.after_tag and (begins_message or is_first):
            text = text.lstrip("\n")

        n_solid = max(len(text.rstrip()), len(text) - _MAX_HELD_SPACE)
        solid_text = text[:n_solid]
        self._held = text[n_solid:]
        if not solid_text:
            return []
        if begins_message and not is_first:
            solid_text = "\n\n" + solid_text  # a new message of the same channel
        elif self.after_tag and not solid_text.startswith("\n"):
            solid_text = self._dropped.get(self._kind, "") + solid_text
        if self._kind == "content":
            self._fence.read(solid_text)
        self.after_tag = False
        self._is_call_fenced = False
        self._dropped[self._kind] = ""
        self._follows_false_call = False
        self._is_quoting = solid_text[-1] in "`'\""
        self._emitted_kinds.add(self._kind)
        return [Piece(self._kind, solid_text)]

    def finish(self) -> list[Piece]:
        """What was held back. Half a tag at the end of a reply is text."""
        match = self._pattern(literal=False).search(self._held + "\0")
        if match and self._find_role(match) in {"think_end", "fence_end"}:
            self._held = ""

        pieces = self.add_text("")
        if self._held and not self.after_tag:
            pieces.append(Piece(self._kind, self._held))
        return pieces

    def _pattern(self, *, literal: bool) -> Any:
        """What tags are looked for now, in text that is `literal` or not."""
        return self._patterns[literal, self._is_call_fenced]

    def _scan(self, text: str, *, literal: bool) -> list[Piece]:
        """Part the text that was held back and `text` by tags."""
        text = self._held + text
        self._held = ""
        pieces: list[Piece] = []
        while match := self._pattern(literal=literal).search(text, partial=True):
            pieces += self.add_text(text[: match.start()])
            if match.partial:  # half a tag, or nothing, at the end of the text
                self._held += match[0]
                return pieces

            tag = self._without_other_fence(match[0])
            role = self._find_role(match)
            text = text[match.end() :]
            if tag != match[0]:
                # The line ends another block of code: it is text, the tag comes next.
                pieces += self.add_text(match[0].removesuffix(tag))
                text = tag + text
            elif role == "tool_start":
                call_text = self._held + tag + text
                self._held = ""
                self.in_call = True
                self._is_call_fenced |= tag.startswith("```")
                return [*pieces, Piece("tool", call_text)]
            elif role == "text":
                pieces += self.add_text(tag)
                self._is_quoting = True
                if tag == "<think>":
                    self._has_quoted_think = True
            elif role == "fence_end":
                self._is_call_fenced = False
                pieces += self.add_text(tag.partition("`")[0])
            else:
                self._begin("reasoning" if role == "think_start" else "content")
        return pieces + self.add_text(text)  # nothing is looked for: no tags

    def _without_other_fence(self, tag: str) -> str:
        """The tag without a line before it that ends a block of code, or is thought."""
        is_other = self._kind == "reasoning" or self._fence.is_open
        match = _FENCED_TAG.match(tag)
        return match["tag"] if match and is_other else tag

    def _find_role(self, match: Any) -> TagRole:
        """What a tag does. The text before it was emitted, except white space.

        At the start of a line a tag is one, unless it is misplaced. In the middle of a
        line it may be a word of the sentence; there an untagged call is always text,
        but for Kimi's, which begins with a token.
        """
        tag: str = match[0]
        is_first = self.after_tag or not self._emitted_kinds or self._follows_false_call
        begins_line = "\n" in self._held or tag.startswith("```")  # after a ``` line
        may_be_word = not (is_first or begins_line)
        if may_be_word and self._is_spoken_of(tag):
            return "text"
        if self._is_misplaced(tag):
            return "text"
        if match.lastgroup == "untagged_call":
            begins_with_token = tag.startswith(_KIMI_CALL_STARTS)
            is_word = may_be_word and (self._is_quoting or not begins_with_token)
            return "text" if is_word else "tool_start"
        if match.lastgroup == "think_end" and self._has_channels:
            is_built_in = _BUILT_IN.search(tag) is not None
            return "think_start" if is_built_in else "think_end"
        role: TagRole = match.lastgroup
        return role  # "think_end" also if it ends nothing: it is dropped (L-07)

    def _is_spoken_of(self, tag: str) -> bool:
        """Whether a tag in the middle of a line is a word of the sentence."""
        follows_space = bool(self._held)
        is_quoted = self._is_quoting and not follows_space
        if tag.startswith("assistant"):  # "the assistant", not "Why?assistant"
            return is_quoted or follows_space
        if tag.startswith(("<|start|>", "<|channel|>")):
            return is_quoted
        if self._kind == "reasoning":
            return False
        if tag == "<think>":
            has_thought = "reasoning" in self._emitted_kinds
            return has_thought or is_quoted or follows_space
        return tag == "</think>" and self._has_quoted_think

    def _is_misplaced(self, tag: str) -> bool:
        """Whether a tag is where it cannot be one.

        In an example of code it is text. Gemma's word begins a thought only where the
        reply begins, and its closing tag stands only after a call. JSON without a tag
        is an example of a call if it follows text.
        """
        if _UNTAGGED_OBJECT.fullmatch(tag):
            return self._kind == "reasoning" or "content" in self._emitted_kinds
        if tag in {"<think>", "</think>"}:
            return self._kind == "content" and self._fence.is_open
        if tag == _GEMMA_THOUGHT:
            return bool(self._emitted_kinds)
        return tag == _GEMMA_CALL_END and not self.after_tag

    def _begin(self, kind: TextKind) -> None:
        """A tag has come: drop the white space before it, go on in `kind`."""
        if self._kind in self._emitted_kinds and self._held:
            self._dropped[self._kind] = self._held
        self._kind = kind
        self._held = ""
        self.after_tag = True


# region CALL TEXT =============================================================
# What the readers of calls share: text that is read while it is generated, the schemas
# of tools, and values as JSON.
#
#  1 Text       A reader takes from the front of the UnreadText what is certain. It asks
#               for a Pattern, such as "a comma, or the bracket that closes an array":
#
#                   unread text    match_next(pattern)
#                   , "b"]         the match: the comma is taken
#                   \n             a partial match: either may follow, so wait
#                   x              None: neither is there
#
#  2 Schemas    What types an argument may have, by the schema of its tool.
#  3 Values     Between tags a value is bare text; its types say what it means.
#
# In a pattern \0 is the end of the reply. Of "</tool_call> \s* \0", for instance: the
# call ends here if the reply does. Models do not write that character. So while the
# reply runs, the pattern matches partially at the most, and the reader waits. Once the
# reply is over, take_until() puts a \0 after the text and tries again. (The token that
# ends a call is fed as \0, too: CallReader.feed_end.)
#
# Public   Tool, Schema, Pattern, TextBefore, UnreadText, TAG_LENGTH, SchemaPart,
#          parameters_by_name, to_json, escape_json, load_value, value_as_json,
#          without_false_escapes, as_list
# Uses     -
# Thread   any; pure

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "parameters"}}
Schema = Mapping[str, Any]  # a JSON schema


# -- 1 text ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pattern:
    """A regular expression, a text that it matches, and one that it does not."""

    source: str  # \s* in it means at most 400 blanks: a model may write them for ever
    example: str
    near_miss: str

    @cached_property
    def compiled(self) -> Any:
        """As compiled by the regex library, whose matches may be partial."""
        return regex.compile(self.source.replace(r"\s*", r"[ \t\r\n]{0,400}"))


class TextBefore(NamedTuple):
    """A text up to what ends it."""

    text: str
    ending: Any = None  # the match; None: it has not come
    cut_tag: str = ""  # at the end of the reply: what might have become one

    @property
    def kind(self) -> str:
        """The group that has matched (ParameterTags), or "closed", or "missing".

        Of a group and one inside it, the outer one counts: it comes first.
        """
        if self.ending is None:
            return "missing"
        groups: dict[str, str | None] = self.ending.groupdict()
        for kind, tag in groups.items():
            if tag is not None:
                return kind
        return "closed"

    @property
    def tag(self) -> str:
        """The text of that group; "" if there is none."""
        if self.kind in {"closed", "missing"}:
            return ""
        return str(self.ending[self.kind])


class UnreadText:
    """The text of a call that was generated and not read. It is read from the front."""

    def __init__(self) -> None:
        self.text = ""
        self.is_complete = False  # no more will come
        self.is_cut = False  # it is complete, and ends inside a tag or a member
        self.has_tokens = False  # an end tag would have come as a token of its own

    def match_next(self, pattern: Pattern) -> Any:
        """Take a match from the front and return it; None if nothing fits there.

        A match that is `partial` depends on text that is still to come: nothing is
        taken. In a complete text none is partial.
        """
        match = pattern.compiled.match(self.text, partial=True)
        if match is None:
            return None
        if match.partial and not self.is_complete:
            return match
        if match.partial:  # what would complete it never comes
            self.is_cut = True
            return None
        self.text = self.text[match.end() :]
        return match

    def take_until(self, pattern: Pattern) -> TextBefore:
        """Take the text before a match, and the match.

        Until the match has come, what may be its beginning stays: of `a.md</para` only
        `a.md` is taken. In a complete text that beginning is taken, too.
        """
        match = self._find_first(pattern)
        text = self.text[: match.start()]
        if not match.partial:
            self.text = self.text[match.end() :]
            return TextBefore(text, match)
        self.text = self.text[match.start() :]
        if not self.is_complete:
            return TextBefore(text)

        # Either the pattern fits the end of the reply (\0), or the rest is half a tag.
        rest = self.text
        match_at_end = pattern.compiled.match(rest + "\0")
        if match_at_end is None:
            self.text = ""
            return TextBefore(text, cut_tag=rest)
        self.text = rest[match_at_end.end() :]
        return TextBefore(text, match_at_end)

    def _find_first(self, pattern: Pattern) -> Any:
        """The first match, also one that is partial.

        search() prefers a whole match to a partial one that begins before it. So each
        place before its match is tried at which a tag may begin. A partial match goes
        to the end of the text, so it begins at most _LONGEST_MATCH letters before that.
        """
        match = pattern.compiled.search(self.text, partial=True)
        first_start = max(0, len(self.text) - _LONGEST_MATCH)
        for start in _TAG_START.finditer(self.text, first_start, match.start()):
            earlier = pattern.compiled.match(self.text, start.start(), partial=True)
            if earlier is not None:
                return earlier
        return match


TAG_LENGTH: Final = 250  # letters of a tag, at most
_TAG_START: Final = re.compile(r"[\s<\]\"'`]")
_LONGEST_MATCH: Final = 3000  # letters of a tag, with the tags and blanks around it


# -- 2 schemas -------------------------------------------------------------------------

_JSON_TYPES: Final = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ALL_TYPES: Final = set(_JSON_TYPES.values())
_MAX_REFERENCES: Final = 10  # one after another
_MAX_UNIONS: Final = 20  # one in another


def parameters_by_name(tools: Iterable[Tool]) -> dict[str, Schema]:
    """By the name of each tool, the schema of its arguments."""
    schemas = {}
    for tool in tools:
        function = tool["function"]
        schemas[function["name"]] = function.get("parameters", {})
    return schemas


class SchemaPart(NamedTuple):
    """The schema of a tool's arguments, or of a value in them.

    A reference in it, {"$ref": "#/$defs/name"}, is looked up in `root`: the schema of
    the tool.
    """

    schema: object
    root: Schema

    @classmethod
    def of_tool(cls, parameters: Schema) -> SchemaPart:
        """The whole schema of a tool's arguments."""
        return cls(parameters, parameters)

    @property
    def types(self) -> set[str]:
        """The JSON types that it allows; empty if any, or if it is no schema."""
        types = self._find_types({})
        return types if types != _ALL_TYPES else set()

    def _find_types(self, known_types: dict[int, set[str]], depth: int = 0) -> set[str]:
        """The same, but where any type is allowed, all of them.

        `known_types`: of the schemas that were read, by their id. A union may refer to
        itself, which adds no type to it.
        """
        schema = self.resolved
        if schema is True or depth > _MAX_UNIONS:
            return _ALL_TYPES
        if not isinstance(schema, dict):
            return set()
        if id(schema) in known_types:
            return known_types[id(schema)]
        known_types[id(schema)] = set()
        types = _own_types(schema)
        for key in ("anyOf", "oneOf"):
            branch_types: set[str] = set()
            for branch in as_list(schema.get(key, [])):
                part = self._replace(schema=branch)
                branch_types |= part._find_types(known_types, depth + 1)
            types &= branch_types or _ALL_TYPES
        for branch in as_list(schema.get("allOf", [])):
            part = self._replace(schema=branch)
            types &= part._find_types(known_types, depth + 1) or _ALL_TYPES
        known_types[id(schema)] = types
        return types

    @property
    def resolved(self) -> object:
        """What it refers to, or else itself; None if it refers to nothing."""
        schema = self.schema
        for _ in range(_MAX_REFERENCES):
            path = _member_of(schema, "$ref")
            if not isinstance(path, str):
                return schema
            schema = self.root
            for step in path.removeprefix("#").split("/")[1:]:
                schema = _member_of(schema, step)
        return None

    @property
    def keys(self) -> list[str]:
        """The members that it names."""
        properties = self._keyword("properties")
        return list(properties) if isinstance(properties, dict) else []

    @property
    def items(self) -> SchemaPart:
        """The schema of the items of an array."""
        return self._replace(schema=self._keyword("items"))

    def member(self, key: str) -> SchemaPart:
        """The schema of a member of an object."""
        if key in self.keys:
            return self._replace(schema=self._keyword("properties")[key])
        return self._replace(schema=self._keyword("additionalProperties"))

    def _keyword(self, name: str) -> Any:
        return _member_of(self.resolved, name)


def _member_of(schema: object, step: str) -> object:
    """What is at a step of a reference, such as #/anyOf/0; None if nothing is."""
    if isinstance(schema, list):
        schema = {str(n): branch for n, branch in enumerate(schema)}
    return schema.get(step) if isinstance(schema, dict) else None


def _own_types(schema: Schema) -> set[str]:
    """Those that it names, of the values that it lists; all if it does neither.

    {"type": ["string", "null"], "enum": ["a", "b"]} means null, too: OpenAI's examples
    have optional arguments written so.
    """
    names = as_list(schema.get("type", []))
    types = {name for name in names if isinstance(name, str)}
    if "number" in types:
        types.add("integer")
    values = as_list(schema.get("enum", []))
    if "const" in schema:
        values = [schema["const"]]
    value_types = {_JSON_TYPES[type(value)] for value in values}
    if value_types:
        types = types & (value_types | {"null"}) or types or value_types
    return types or set(_ALL_TYPES)


def as_list(item: Any) -> list[Any]:
    """A list as it is, and anything else as the only item of one."""
    return item if isinstance(item, list) else [item]


# -- 3 values --------------------------------------------------------------------------

# why(L-94): models write Python where JSON is wanted: ['a', None], True
_PYTHON_VALUE: Final = re.compile(r"\s*(?:[\[{]|(?:True|False|None)\s*\Z)")
# A backslash, and what makes it an escape, if anything does.
_PYTHON_ESCAPE: Final = re.compile(
    r"""\\(?:(?P<escape>[\\'"abfnrtvxuUN\n]|[0-3]?[0-7]{1,2}(?![0-7]))|)"""
)


def to_json(value: object) -> str:
    """JSON, in which half of a surrogate pair is U+FFFD, as in what clients send.

    Raises ValueError if it is NaN or infinite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def value_as_json(text: str, types: set[str]) -> str:
    """A bare value as JSON: what it means, by its types (empty: any).

        5          integer         5
        5          string          "5"
        ['a']      array           ["a"]
        five       integer         "five"

    A value of another type than the schema's is passed on: the client knows better how
    to say what is wrong. What is neither JSON nor Python is a string.
    """
    can_be_string = not types or "string" in types
    parsers = [load_value] if can_be_string else [load_value, _load_escaped]
    for parse in parsers:
        with suppress(ValueError, TypeError, RecursionError):
            value = parse(text.strip())
            if can_be_string or not isinstance(value, str):
                return to_json(text if _is_string(value, types) else value)
    return to_json(text)


def load_value(text: str) -> object:
    """A value in JSON; or a list, a dict or a word in Python.

    Raises ValueError, RecursionError.
    """
    with suppress(ValueError):
        return json.loads(text, strict=False)
    if not _PYTHON_VALUE.match(text):
        raise ValueError(text)
    try:
        return ast.literal_eval(without_false_escapes(text.strip()))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(text) from error


def _load_escaped(text: str) -> object:
    """JSON in a string in JSON, also without its quotes: [{\\"a\\": 1}]."""
    quoted_text = text if text.startswith('"') else f'"{text}"'
    return json.loads(json.loads(quoted_text, strict=False), strict=False)


def without_false_escapes(source: str) -> str:
    """Python with a second backslash where one begins no escape.

    It means the same; Python would print a warning.
    """
    return _PYTHON_ESCAPE.sub(
        lambda match: match[0] if match["escape"] else f"\\{match[0]}", source
    )


def _is_string(value: object, types: set[str]) -> bool:
    """Whether a text that reads as `value` is a string all the same.

    "5" is one where the schema wants a string, and None where it wants one or a number.
    """
    value_type = _JSON_TYPES.get(type(value), "string")
    return value_type == "string" or ("string" in types and value_type not in types)


def escape_json(text: str) -> str:
    """A part of a string in JSON, without quotes. Parts can be escaped one by one."""
    return to_json(text)[1:-1]


# region CALL SYNTAXES =========================================================
# How models write tool calls, and which of these ways a model was told.
#
#     hermes     <tool_call>{"name": "read", "arguments": {"path": "a.md"}}</tool_call>
#     qwen       <tool_call><function=read><parameter=path>a.md</parameter>...
#     glm        <tool_call>read<arg_key>path</arg_key><arg_value>a.md</arg_value>...
#     minimax    <minimax:tool_call><invoke name="read"><parameter name="path">a.md...
#     harmony    <|channel|>commentary to=functions.read json<|message|>{"path": "a.md"}
#     mistral    [TOOL_CALLS]read[ARGS]{"path": "a.md"}
#     kimi       <|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{"pa...
#     minicpm    <function name="read"><param name="path">a.md</param></function>
#     foreign    Gemma's: <|tool_call>call:read{path:<|"|>a.md<|"|>}<tool_call|>
#                any other: mlx-lm's parser reads it
#
# Real models write calls that are nearly right (L-82), and files that contain the tags
# of calls. So a closing tag counts only where the syntax's next tag follows it, the tag
# of a key is text inside a line (Qwen's) or in quotes, and tags that were left out cost
# nothing where it is certain what is meant.
#
#  1 Records    what is known of a syntax
#  2 Patterns   the names, the keys and the ends of values of each
#  3 Tables     CALL_SYNTAXES, which are read while they are generated (TOOL CALLS), and
#               FOREIGN_FORMATS, which are read at the end of a call (FOREIGN CALLS)
#  4 Formats    which of them a chat template has told the model to write
#
# To add a syntax, add an entry to CALL_SYNTAXES, whose examples are tested, and its tag
# to CALL_START and detect(); an end tag after JSON also to the patterns of MENDED JSON.
# To add a foreign format, add one to FOREIGN_FORMATS, or nothing if mlx-lm's parser
# reads it and overlooks no text.
#
# Public   ParameterTags, ArgumentSpelling, CallSyntax, ForeignFormat, CALL_SYNTAXES,
#          FOREIGN_SYNTAX, FOREIGN_FORMATS, HERMES_START, MISTRAL_START, CALL_START,
#          ToolCallFormat, tool_call_prefixes
# Uses     REASONING PARSER, CALL TEXT
# Thread   any; pure


# -- 1 records -------------------------------------------------------------------------


class ParameterTags(NamedTuple):
    """What stands before and after the values of a call, which are bare text.

    `key` matches one tag, and its groups say which:

        <parameter=path>     group `key`: a value follows, of the argument "path"
        </function>          no group: go on to the next tag
        </tool_call>         group `end`: the call ends here

    `value_end` matches what may end a value, and its groups say how:

        </parameter>\n<par   no group: so it should, the value is "closed"
        "<parameter=path>"   group `text`: it does not, whatever it looks like
        </tool_call>         group `unclosed`: the call ends, the value was never closed
        <parameter=n>        group `next_key`: nor was it here, and its text is the key
        </parameter> is      group `quoted`: it does not, the tag is part of the value
        \n</parameter>\nx    group `unreadable`: nobody can tell where it ends
    """

    key: Pattern
    value_end: Pattern
    # Ends a value if the tag before it has a group `quoted`: <![CDATA[, after which no
    # other tag means anything. None: no tag has.
    quoted_value_end: Pattern | None = None
    # More of what may end a value: the tag of the next value, if the value before was
    # never closed. For each value KEYS becomes the names in the tool's schema: the tag
    # of another name is text. IN_LINE becomes a group, for a tag inside a line:
    #
    #     <parameter=path>\na.md <parameter=n>    `text`: a value with lines of its own
    #     <parameter=path>a.md <parameter=n>      `unreadable`
    next_key: str = ""
    # Any tag of the format. A value that begins or ends with one is unreadable.
    any_tag: str = NO_PATTERN
    # A tag that makes a value unreadable which has a quoted closing tag before.
    later_tag: str = NO_PATTERN

    def for_value(self, keys: Sequence[str], *, is_in_line: bool) -> ParameterTags:
        """The same for one value: KEYS and IN_LINE are replaced.

        `keys`: of the tool's schema. `is_in_line`: the value begins on the line of its
        own tag.
        """
        source = self.value_end.source
        if keys and self.next_key:
            names = "|".join(sorted(map(regex.escape, keys)))
            source += "|" + self.next_key.replace("KEYS", names)
        source = source.replace("IN_LINE", "unreadable" if is_in_line else "text")
        return self._replace(value_end=replace(self.value_end, source=source))

    def with_end_token(self, end: str) -> ParameterTags:
        """The same where the end tag of a call comes as a token of its own.

        That token is read as \\0 (CallReader.feed_end). The same letters in other
        tokens are text.
        """
        return self._replace(
            value_end=replace(
                self.value_end, source=self.value_end.source.replace(end, r"\0")
            ),
            any_tag=self.any_tag.replace(end, NO_PATTERN),
        )


class ArgumentSpelling(NamedTuple):
    """How arguments are written between tags, for str.format().

    Qwen's:

        <function=read>\n            the prefix, of CallSyntax
        <                            first
        parameter=path>\n            key, then the value: a.md
        \n</parameter>\n<            has_line_break, value_end
        /function>\n</tool_call>     end
    """

    first: str
    key: str
    value_end: str  # a line break in it stands for any white space
    end: str
    has_line_break: bool = False  # before `value_end`; it is no part of the value


class CallSyntax(NamedTuple):
    """One way to write a call."""

    marker: str  # in each chat template that tells a model to write so
    prefix: str  # how a call begins, for str.format()
    # Matches from the name, in some syntaxes from the tag before it, to the arguments;
    # of JSON arguments it takes the first {. The group with the name of the syntax is
    # the name of the tool.
    name: Pattern
    example: str
    # Matches the beginning of a call whose tag was left out; "": models do not do that.
    # NAMES in it is replaced by the names of the tools.
    untagged_call: str = ""
    tags: ParameterTags | None = None  # None: the arguments are JSON
    # How a forced call is written; None: in JSON, or, for MiniCPM, not by a grammar.
    spelling: ArgumentSpelling | None = None
    json_end: str = ""  # what follows JSON; a line break stands for any white space


class ForeignFormat(NamedTuple):
    """One way to write calls that are read as a whole. None has all of these."""

    opening: str = ""  # follows the tag of a forced call, for str.format()
    untagged_call: str = ""  # as in CallSyntax
    string_mark: str = ""  # before and after a string: MarkedCalls reads it
    is_json: bool = False  # a list of calls, and no end tag: parse_json_calls()
    is_python: bool = False  # a list of calls: parse_python_calls()
    # mlx-lm's parser reads all others, and overlooks what it does not look for. So the
    # text between the tags must match `body`, and have no more of the tags of a call
    # and of an argument than the parser has found.
    body: str = ""  # "": any text
    call_tag: str = NO_PATTERN
    argument_tag: str = NO_PATTERN


# -- 2 patterns ------------------------------------------------------------------------
#
# A value that was never closed ends with its call, if after that comes the end of the
# reply (\0), or another call.

# What follows a closing tag that is text: none of the tags NEXT. The (?! alone would
# also fit where half of such a tag has come. So the 20 characters must have come that
# the longest has, </minimax:tool_call>; or fewer, that begin no tag, and then the end.
_NO_NEXT: Final = r"""(?x:
    \s*+ (?! NEXT | \0 ) (?= (?s: .{20} ) | [^<\0] [^\0]{0,19} \0 )
)"""
_QWEN_NO_NEXT: Final = _NO_NEXT.replace(
    "NEXT", r"<parameter[= ] | </parameter> | </function> | </tool_call>"
)

_QWEN_NAME: Final = Pattern(
    r"<function=(?P<qwen>[^\s<>]{1,200})>",
    example="<function=read>",
    near_miss="<function=read me>",
)
_QWEN_KEY: Final = Pattern(
    r"""(?x:
        \s*
        (?: <parameter (?: = | [ ]name= ) (?P<quote> ["']? )
            (?P<key> [^<>\n"']{1,200} ) (?P=quote) >
            (?: \n | (?=.) )        # the first line break is no part of the value
          | </function>
          | (?P<end> </tool_call> | \0 )
        )
    )""",
    example="\n<parameter=path>\na",
    near_miss="\n<parameter>\na",
)
# Comments have an example of a value, and what follows it.
_QWEN_VALUE_END: Final = Pattern(
    r"""(?x:
        \n? </parameter>                          # a.md\n</parameter>\n<parameter=n>
        (?= \s* (?: <parameter[= ] | </tool_call> | </function> LAST ) )
      | (?P<unclosed> \n?                         # a.md\n</function>\n</tool_call>
            (?= </function> \s* </tool_call> \s* <tool_call>         # another call
              | (?: </function> \s* )? </tool_call> \s* \0 )         # or the end
          | \n (?= (?: </function> \s* )? </tool_call> [ \t]{0,9} \n ) )
      | (?P<unreadable>                           # a.md\n<tool_call>\nb.md
            \n (?: <tool_call> | <function= [^<>\s]{1,200} > ) \s* \n
          | \n? </parameter> (?= \s* </parameter> )
          | \n </parameter> NO_NEXT               # a.md\n</parameter>\nb.md
          | \n </parameter> (?= \w )
          | </parameter> (?= < | [ \t]{0,9} \n )  # a.md</parameter><parameterr=n>5
            NO_NEXT (?= < )
          | </function> [ \t]{0,9} \n NO_NEXT )   # a.md</function>\nb.md
      | (?P<IN_LINE> </parameter> (?= \w ) )      # a.md</parameter>b.md
      | (?P<quoted>                               # it ends with </parameter> as all do
            (?: </parameter> (?: \s* </function> )? | </tool_call> ) NO_NEXT )
    )""".replace("NO_NEXT", _QWEN_NO_NEXT).replace(
        # What may follow the </function> of a call: its end, another call, or a line of
        # prose. In a file that has </function> in it, some other tag may follow.
        "LAST",
        r"""(?x:
            \s* (?: </tool_call> (?: [^"'`] | \0 ) | <tool_call> | <function= | \0 )
          | [ \t]{0,9} \n \s* [^<\s]
        )""",
    ),
    example="a.md\n</parameter>\n</function>\n</tool_call>\n",
    near_miss="a.md\n</parameter>\n",
)
# Inside a line the tag of a key is text, if the value began on a line of its own.
_QWEN_NEXT_KEY: Final = r"""(?x:
    \n (?= TAG [ \t]{0,9} \n )
  | (?P<unreadable> \n TAG (?= [ \t]{0,9} [^ \t\n] ) | TAG [ \t]{0,9} \n )
  | (?P<text> ["'`] TAG (?= [ \t]{0,9} [^ \t\n] ) )
  | (?P<IN_LINE> TAG (?= [ \t]{0,9} [^ \t\n] ) )
)""".replace(
    "TAG", "<parameter (?: = | [ ]name= ) [\"']? (?P<next_key> KEYS ) [\"']? >"
)

# The tag of a key is text in quotes, or between blanks.
_NEXT_KEY: Final = r"""(?x:
    (?P<text> ["'`] TAG | [ ] TAG [ ] )
  | \n? (?= TAG )
)"""

_GLM_NAME: Final = Pattern(
    r"""(?x:
        (?P<glm> [^\s<>{}[\]"]{1,200} )
        \s*
        (?= <arg_key>
          | </tool_call>
          | (?<= <tool_call> [^{]{0,600} ) \{ )    # JSON, where the tag came before
    )""",
    example="read<arg_key>",
    near_miss="read it<arg_key>",
)
_GLM_KEY: Final = Pattern(
    r"""(?x:
        \s*
        (?: (?: <arg_key> ){1,3}     # why(L-82): tags come twice, or not at all
            (?P<key> [^<]+ )
            (?: (?: </arg_key> \s* ){1,3}
                (?: <arg_value> | (?= [^<\s"'`] | ["'`] [^<] ) )
              | <arg_value> )
          | (?P<end> </tool_call> | \0 | (?= <tool_call> ) )
        )
    )""",
    example="<arg_key>path</arg_key></arg_key><arg_value>a",
    near_miss="<arg_key>path</arg_key></arg_value>",
)
_GLM_VALUE_END: Final = Pattern(
    r"""(?x:
        </arg_value> (?= \s* (?: <arg_key | </tool_call> | <tool_call>\w ) )
      | (?P<unclosed> (?= </tool_call> \s* (?: \n <tool_call> | \0 ) ) )
      | (?P<unreadable> <arg_value> | </arg_value> (?= \s* </arg_value> ) )
      | (?P<text> ["'`] MARK | [ ] MARK [ ] )
      | (?P<quoted> (?: </arg_value> | </tool_call> ) NO_NEXT )
    )""".replace(
        "NO_NEXT",
        _NO_NEXT.replace(
            "NEXT", r"<arg_key | </arg_value> | </tool_call> | <tool_call>"
        ),
    ).replace("MARK", "(?: <arg_value> | </?arg_key> )"),
    example="a.md</arg_value>\n<arg_key>",
    near_miss="a.md</arg_value> ",
)
_GLM_NEXT_KEY: Final = _NEXT_KEY.replace(
    "TAG", r"<arg_key> \s* (?P<next_key> KEYS ) \s* (?: </arg_key> | <arg_value> )"
)

_MINIMAX_NAME: Final = Pattern(
    r'<invoke name="?(?P<minimax>[^\s<>"]+)"?>',
    example='<invoke name="read">',
    near_miss='<invoke name="read me">',
)
_MINIMAX_KEY: Final = Pattern(
    r"""(?x:
        \s*
        (?: <parameter[ ]name= "? (?P<key> [^<>"\n]{1,200} ) "? >
          | (?P<end> </invoke> )     # and the block ends, or another call follows
            (?: \s* </minimax:tool_call> | (?= \s* <invoke[ ] ) )
          | </invoke>
          | (?P<end> </minimax:tool_call> | \0 )
        )
    )""",
    example='\n<parameter name="path">',
    near_miss='\n<parameter="path">',
)
_MINIMAX_VALUE_END: Final = Pattern(
    r"""(?x:
        </parameter>
        (?= \s* (?: <parameter[ ]
                   | (?: </invoke> \s* )? </minimax:tool_call> (?: [^"'`] | \0 )
                   | </invoke> \s* (?: <(?:invoke|parameter)[ ] | LAST ) ) )
      | (?P<unclosed> (?= </invoke> \s* (?: </minimax:tool_call> \s* )?
            (?: \0 | <(?:minimax:tool_call>|invoke[ ]) ) ) )
      | (?P<unreadable>
            </parameter> (?= < | [ \t]{0,9} \n ) NO_NEXT (?= < )  # a misspelt key
            | </parameter> (?= \s* </parameter> )
            | </minimax:tool_call> \s* \0
            | </parameter> (?= \w | [ \t]{0,9} \n NO_NEXT ) )
      | (?P<text> ["'`] <parameter[ ]name="? [^<>"\n]{1,200} )
      | (?P<quoted> (?: </parameter> | </minimax:tool_call> ) NO_NEXT )
    )""".replace(
        # The outer closing tag was forgotten: no other value ends in what follows.
        "LAST",
        r"(?: (?! </parameter> ) [^\0] ){0,2000}+ \0",
    ).replace(
        "NO_NEXT",
        _NO_NEXT.replace(
            "NEXT", r"<parameter[ ] | </parameter> | </invoke> | </minimax:tool_call>"
        ),
    ),
    example="a.md</parameter>\n</invoke>\n</minimax:tool_call>\n",
    near_miss="a.md</parameter>\n</invoke> is how it ends</parameter>",
)
_MINIMAX_NEXT_KEY: Final = _NEXT_KEY.replace(
    "TAG", '<parameter[ ]name="? (?P<next_key> KEYS ) "?>'
)

_KIMI_NAME: Final = Pattern(
    r"""(?x:
        (?: <\|tool_calls?_section_begin\|> \s* )?  # only before the first call
        <\|tool_call_begin\|> \s*
        (?: functions\. )? (?P<kimi> [^\s<>{}]{1,200}? ) : \d{1,6}
        \s* <\|tool_call_argument_begin\|>
        \s* \{
    )""",
    example="<|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{",
    near_miss="<|tool_call_begin|>functions.read<|tool_call_argument_begin|>{",
)

_MINICPM_NAME: Final = Pattern(
    r"""<function\s{1,9}name="?(?P<minicpm>[^\s<>"]{1,200}+)"?\s{0,9}>""",
    example='<function name="read">',
    near_miss='<function name="read me">',
)
_MINICPM_KEY: Final = Pattern(
    r"""(?x:
        \s*
        (?: <param [ ]name= "? (?P<key> [^<>"\n]{1,200} ) "? >
            \s* (?: (?P<quoted> <!\[CDATA\[ )
                   | (?= [^\s<] | <[^!] | <![^\[] | <!\[[^C] ) )
          | (?P<end> </function> )
        )
    )""",
    example='\n<param name="path">a',
    near_miss='\n<param="path">a',
)
_MINICPM_VALUE_END: Final = Pattern(
    r"""(?x:
        \s* </param> (?= \s* (?: <param[ ] | </function> ) )
      | (?P<unclosed> (?= </function> \s* (?: <function[ ] | \0 ) ) )
      | (?P<unreadable> </param> NO_NEXT               # CDATA is for quotations
            | </param> (?= \s* </param> )
            | <param[ ] | [ ]name="[^"<>\n]{1,99}"> )
      | (?P<quoted> </function> NO_NEXT )
    )""".replace(
        "NO_NEXT", _NO_NEXT.replace("NEXT", r"<param[ ] | </param> | </function>")
    ),
    example="a.md</param>\n</function>",
    near_miss="a.md</param> ",
)
_MINICPM_QUOTED_END: Final = Pattern(
    r"\]\]>\s*</param>(?=\s*(?:<param |</function>))",
    example="a <b>]]></param>\n</function>",
    near_miss="a </param></function>",
)
_MINICPM_NEXT_KEY: Final = _NEXT_KEY.replace(
    "TAG", '<param[ ]name="? (?P<next_key> KEYS ) "?>'
)

# `++` and the bounds: what is no header must not be tried from each of its letters
# (L-88).
_HARMONY_NAME: Final = Pattern(
    r"""(?x:
        (?: <\|channel\|> [^<]{0,40}? )?       # or after the recipient
        \s* to= (?: functions\. )? (?P<harmony> [\w.-]{1,200}+ )
        (?: [^{<] | <\|c ){0,99}+             # <|c: <|channel|>, <|constrain|>json
        <\|message\|>
        \s* \{
    )""",
    example=" to=functions.read<|channel|>commentary json<|message|>{",
    near_miss="<|channel|>commentary json<|message|>{",
)

# why(L-90): from version 11 of the format on; that version has an id, too. After its
# tag a name may stand without [ARGS].
_MISTRAL_NAME: Final = Pattern(
    r"""(?x:
        (?: \[TOOL_CALLS\] \s* (?P<mistral> [^\s[\]{}]{1,200}+ ) ID? (?: \[ARGS\] )?
          | (?P<mistral> [^\s[\]{}]{1,200}+ ) ID? \[ARGS\]
        )
        \s* \{
    )""".replace("ID", r"(?: \[CALL_ID\] \w{1,40}+ )"),
    example="[TOOL_CALLS]read[CALL_ID]aB3dE6gH9[ARGS]{",
    near_miss='[TOOL_CALLS][{"name": "read"}]',
)

# Without [TOOL_CALLS]: read[ARGS]{ or read[CALL_ID]aB3dE6gH9[ARGS]{
_MISTRAL_UNTAGGED_CALL: Final = r"(?:NAMES)(?:\[CALL_ID\]\w{1,40}+)?\[ARGS\]"

_HERMES_NAME: Final = Pattern(
    r"""(?x:
        \{ \s* "name" \s* : \s* "(?P<hermes> [^"\\]{1,200} )" \s*
        (?: , \s* "arguments" \s* : \s* \{
          | (?= \} )                 # a call without arguments
        )
    )""",
    example='{"name": "read", "arguments": {',
    near_miss='{"name": "read", "arguments": [',
)

# why(L-82): Qwen2.5-Coder leaves out the tag, with or without a block of code.
_HERMES_UNTAGGED_CALL: Final = r"""(?x:
    \{
    (?= \s{0,99} "name" \s{0,9} : \s{0,9} "(?:NAMES)" \s{0,9} ,
        \s{0,99} "arguments" \s{0,9} : \s{0,9} \{ )
)"""


# -- 3 tables --------------------------------------------------------------------------

HERMES_START: Final = "<tool_call>"  # JSON follows, or another syntax
MISTRAL_START: Final = "[TOOL_CALLS]"  # older templates print a list of calls after it

CALL_SYNTAXES: Final = {  # in the order in which they are tried
    "qwen": CallSyntax(
        marker="<function=",
        prefix="<tool_call>{gap}<function={name}>{gap}",
        name=_QWEN_NAME,
        example="<tool_call>\n<function=read>\n<parameter=path>\na.md\n</parameter>\n"
        "</function>\n</tool_call>",
        untagged_call=r"<function=(?:NAMES)>(?=\s{0,40}<(?:parameter=|/function>))",
        tags=ParameterTags(
            _QWEN_KEY,
            _QWEN_VALUE_END,
            next_key=_QWEN_NEXT_KEY,
            any_tag=r"""(?x:
                <tool_call> | </tool_call> | <function= [^<>\s]{1,200} > | </function>
              | </parameter> | <parameter= [^<>\n]{1,200} >
            )""",
            later_tag=r"""(?x:
                \n \s* < (?: \w{1,20} = | parameter[ ] )
              | <parameter (?: = | [ ]name= ) [^<>\n]{1,200} > [ \t]{0,9} \n
            )""",
        ),
        # The end of a value has the beginning of the next tag: a file may have closing
        # tags in it.
        spelling=ArgumentSpelling(
            first="<",
            key="parameter={key}>\n",
            value_end="</parameter>\n<",
            end="/function>\n</tool_call>",
            has_line_break=True,
        ),
    ),
    "glm": CallSyntax(
        marker="<arg_key>",
        prefix="<tool_call>{name}{gap}{first_tag}",  # or `read` might become `reader`
        name=_GLM_NAME,
        example="<tool_call>read<arg_key>path</arg_key><arg_value>a.md</arg_value>"
        "</tool_call>",
        tags=ParameterTags(
            _GLM_KEY,
            _GLM_VALUE_END,
            next_key=_GLM_NEXT_KEY,
            any_tag="<tool_call>|</tool_call>|</?arg_key>|</?arg_value>",
            later_tag="</?arg_key>",
        ),
        spelling=ArgumentSpelling(
            first="",
            key="<arg_key>{key}</arg_key>{gap}<arg_value>",
            value_end="</arg_value>\n",
            end="</tool_call>",
        ),
    ),
    "minimax": CallSyntax(  # one <minimax:tool_call> has several calls
        marker="<invoke name=",
        prefix='<minimax:tool_call>\n<invoke name="{name}">\n',
        name=_MINIMAX_NAME,
        example='<minimax:tool_call>\n<invoke name="read">\n'
        '<parameter name="path">a.md</parameter>\n</invoke>\n</minimax:tool_call>',
        untagged_call=r'<invoke name="?(?:NAMES)"?>'
        r"(?=\s{0,40}<(?:parameter |/invoke>))",
        tags=ParameterTags(
            _MINIMAX_KEY,
            _MINIMAX_VALUE_END,
            next_key=_MINIMAX_NEXT_KEY,
            any_tag=r"<minimax:tool_call>|</minimax:tool_call>|<invoke[ ][^<>]{1,200}>"
            r"|</invoke>|</parameter>",
            later_tag=r"<parameter[ ]name=|\n\s*<\w{1,20}[ ]name=",
        ),
        spelling=ArgumentSpelling(
            first="<",
            key='parameter name="{key}">',
            value_end="</parameter>\n<",
            end="/invoke>\n</minimax:tool_call>",
        ),
    ),
    "harmony": CallSyntax(  # gpt-oss
        marker="<|channel|>",
        prefix="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        name=_HARMONY_NAME,
        example="<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
        '{"path": "a.md"}',
        untagged_call=r"(?:<\|channel\|>[^<]{0,40})?"
        r"to=(?:functions\.|(?:NAMES)(?=[\s<]))",
    ),
    "mistral": CallSyntax(  # several calls may follow one [TOOL_CALLS]
        marker="[ARGS]",
        prefix="[TOOL_CALLS]{name}{gap}",
        name=_MISTRAL_NAME,
        example='[TOOL_CALLS]read[ARGS]{"path": "a.md"}',
        untagged_call=_MISTRAL_UNTAGGED_CALL,
    ),
    "kimi": CallSyntax(
        marker="<|tool_call_begin|>",
        prefix="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        "<|tool_call_argument_begin|>",
        name=_KIMI_NAME,
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0"
        '<|tool_call_argument_begin|>{"path": "a.md"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        untagged_call=r"""(?x:
            (?: <\|tool_calls?_section_begin\|> \s{0,9} )?
            <\|tool_call_begin\|> \s{0,9} (?: functions\. )? (?:NAMES) :
        )""",
        json_end="<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "minicpm": CallSyntax(
        marker="<param name=",
        prefix='<function name="{name}">',
        name=_MINICPM_NAME,
        example='<function name="read"><param name="path">a.md</param></function>',
        tags=ParameterTags(
            _MINICPM_KEY,
            _MINICPM_VALUE_END,
            _MINICPM_QUOTED_END,
            _MINICPM_NEXT_KEY,
            any_tag="<function [^<>]{1,200}>|</function>|</param>",
            later_tag="<param[ ]",
        ),
    ),
    "hermes": CallSyntax(  # its marker is in the templates of qwen and glm, too
        marker="<tool_call>",
        prefix='<tool_call>{gap}{{"name": {json_name}, "arguments":',
        name=_HERMES_NAME,
        example='<tool_call>\n{"name": "read", "arguments": {"path": "a.md"}}\n'
        "</tool_call>",
        untagged_call=_HERMES_UNTAGGED_CALL,
        json_end="\n}\n</tool_call>",
    ),
}

# How a call of any syntax begins; the tag may have been left out.
CALL_START: Final = Pattern(
    # (?:\s+)? is any number of blanks: \s* would be 400 at most.
    rf"(?:\s+)?(?:{FENCE_START})?(?:<(?:minimax:)?tool_call>\s*)?(?:"
    + "|".join(syntax.name.source for syntax in CALL_SYNTAXES.values())
    + ")",
    example="\n\n<tool_call>\n<function=read>",
    near_miss="\n\n<tool_call>\n<think>",
)

FOREIGN_SYNTAX: Final = "foreign"  # in the place of a key of CALL_SYNTAXES


def _up_to(tag: str) -> str:
    """A pattern: any text, which does not contain the tag, and the tag."""
    tag_pattern = regex.escape(tag)
    return f"(?s:(?:(?!{tag_pattern}).)*+){tag_pattern}"


FOREIGN_FORMATS: Final = {  # by the tag that begins their calls
    # Gemma 4    <|tool_call>call:read{path:<|"|>a.md<|"|>}<tool_call|>
    "<|tool_call>": ForeignFormat(
        opening="call:{name}{{",
        untagged_call=r"call:(?:NAMES)\{",
        string_mark='<|"|>',
    ),
    # FunctionGemma    <start_function_call>call:read{path:<escape>a.md<escape>}...
    "<start_function_call>": ForeignFormat(
        opening="call:{name}{{",
        untagged_call=r"call:(?:NAMES)\{",
        string_mark="<escape>",
    ),
    # LFM2    <|tool_call_start|>[read(path="a.md")]<|tool_call_end|>
    "<|tool_call_start|>": ForeignFormat(opening="[{name}(", is_python=True),
    # Mistral, before version 11    [TOOL_CALLS][{"name": "read", "arguments": {...}}]
    MISTRAL_START: ForeignFormat(untagged_call=_MISTRAL_UNTAGGED_CALL, is_json=True),
    # LongCat    <longcat_tool_call>read\n<longcat_arg_key>path</longcat_arg_key>...
    "<longcat_tool_call>": ForeignFormat(
        opening="{name}\n",
        body=r"[^<]*+(?:<longcat_arg_key>"
        + _up_to("</longcat_arg_key>")
        + r"\s*<longcat_arg_value>"
        + _up_to("</longcat_arg_value>")
        + r"\s*)*+",
        argument_tag="<longcat_arg_key>",
    ),
    # Muse Spark    <atem:function_calls><atem:invoke name="read"><atem:parameter ...
    "<atem:function_calls>": ForeignFormat(
        body=r"\s*(?:<atem:invoke\b[^>]*+>\s*(?:<atem:parameter\b[^>]*+>"
        + _up_to("</atem:parameter>")
        + r"\s*)*+(?:</atem:invoke>\s*|\Z))++",
        call_tag=r"<atem:invoke\b",
        argument_tag=r"<atem:parameter\b",
    ),
    # Kimi K3    <|open|>tools<|sep|><|open|>call tool="read"<|sep|><|open|>argument ...
    "<|open|>tools<|sep|>": ForeignFormat(
        body=r"\s*(?:<\|open\|>call\b"
        + _up_to("<|sep|>")
        + r"\s*(?:<\|open\|>json\b"
        + _up_to("<|close|>json<|sep|>")
        + r"\s*|(?:<\|open\|>argument\b"
        + _up_to("<|close|>argument<|sep|>")
        + r"\s*)*+)<\|close\|>call<\|sep\|>\s*)++",
        call_tag=r"<\|open\|>call\b",
        argument_tag=r"<\|open\|>argument\b",
    ),
}


# -- 4 formats -------------------------------------------------------------------------


class ToolCallFormat(NamedTuple):
    """How a model is told to write its calls."""

    start: str
    end: str  # \0, which never comes, where only the end of the reply ends a call
    syntax: str  # a key of CALL_SYNTAXES, or FOREIGN_SYNTAX
    gap: str = ""  # a line break, or [ARGS]: what the template has next to the name
    parse: Any = None  # mlx-lm's: (text between start and end, tools) -> call or calls

    @property
    def is_foreign(self) -> bool:
        """Whether its calls are read as a whole."""
        return self.syntax == FOREIGN_SYNTAX

    @property
    def foreign(self) -> ForeignFormat:
        """What is known of a foreign format; of most, nothing."""
        return FOREIGN_FORMATS.get(self.start, ForeignFormat())

    @classmethod
    def detect(
        cls, template: str, family: str, *, tokenizer: Any
    ) -> ToolCallFormat | None:
        """The format of a chat template; None if it has no tool calls.

        `tokenizer` is mlx-lm's, which knows the tags of some models, and a parser.
        """
        text = template.replace("\\n", "\n")  # as it stands in Jinja's strings
        start = tokenizer.tool_call_start
        end = tokenizer.tool_call_end or "\0"
        if not start and HERMES_START in text:
            start = HERMES_START
        if not start:
            return None

        syntax = _find_syntax(text, start, family)
        if syntax == FOREIGN_SYNTAX:
            return cls(start, end, FOREIGN_SYNTAX, parse=tokenizer.tool_parser)
        gap = regex.search(r"(?<=<tool_call>|</arg_key>)\n|\[CALL_ID\]|\[ARGS\]", text)
        return cls(start, end, syntax, gap[0] if gap else "", tokenizer.tool_parser)

    def untagged_pattern(self, tools: Sequence[Tool]) -> str | None:
        """What begins a call of one of `tools` if the model left out the tag (L-82).

        None if models do not do that in this syntax.
        """
        names = "|".join(regex.escape(name) for name in parameters_by_name(tools))
        if not names:
            return None
        entry = self.foreign if self.is_foreign else CALL_SYNTAXES[self.syntax]
        return entry.untagged_call.replace("NAMES", names) or None


def _find_syntax(template: str, start: str, family: str) -> str:
    """The syntax of a template whose calls begin with `start`.

    If there are several, that of the model's family counts, or else the first.
    """
    syntaxes = [
        name
        for name, syntax in CALL_SYNTAXES.items()
        if syntax.prefix.startswith(start) and syntax.marker in template
    ]
    for name in syntaxes:
        if name in family:  # "glm" in "glm4"
            return name
    return syntaxes[0] if syntaxes else FOREIGN_SYNTAX


def tool_call_prefixes(
    tool_format: ToolCallFormat, tools: Sequence[Tool], *, name: str | None = None
) -> list[str]:
    """What a call begins with, of each tool, or of the one called `name`.

    To force a call, the reply is made to begin with one of them. They end where one of
    the model's own tokens ends, so that it goes on as it would by itself.
    """
    if not tool_format.is_foreign:
        prefix = CALL_SYNTAXES[tool_format.syntax].prefix
    elif opening := tool_format.foreign.opening:
        prefix = tool_format.start + opening
    else:
        return [tool_format.start]

    prefixes = []
    for tool_name, parameters in parameters_by_name(tools).items():
        if name in (None, tool_name):
            tool_prefix = prefix.format(
                name=tool_name,
                json_name=json.dumps(tool_name, ensure_ascii=False),
                gap=tool_format.gap,
                first_tag="<arg_key>" if parameters.get("required") else "",
            )
            prefixes.append(tool_prefix)
    return prefixes


# region MENDED JSON ===========================================================
# Arguments as JSON: mended while they are read, and read up to the end of their call.
#
#     generated                          emitted
#     {"name": "read", "arguments": {    {                         by CallReader
#     "path": "a.md", // the first       "path": "a.md"
#     'n': 5 "all": True,                , "n": 5 ,"all": true
#     }, "id": "1"}                      -
#     \n</tool_call>Done.                }                         by CallReader
#
# Models write comments, commas or quotes too many or too few, and Python's words.
#
#  1 Values     what may come next in an object or in an array
#  2 Strings    what may come next in a string, and whether it was ever closed
#  3 Objects    MendedObject reads one object, and withholds its last bracket
#  4 Calls      JsonArguments reads the arguments, and what follows up to the call's end
#
# Nothing is emitted twice or taken back. So a member is emitted once its value begins:
# closing all that is open then makes valid JSON. And clients run what is valid (L-86).
# So if more arguments follow, or some cannot be read, the last bracket is not emitted.
#
# Public   NUMBER, LOST_MEMBER, MendedObject, JsonArguments
# Uses     REASONING PARSER, CALL TEXT
# Thread   any; pure


# -- 1 values --------------------------------------------------------------------------
#
# A number or a word is certain once something follows it.

_GAP: Final = r"""(?x:
    (?: \s* (?P<skipped> // [^\n]{0,999} \n | /\* (?s: .){0,999}? \*/ ) ){0,99}
    \s*
)"""
NUMBER: Final = r"""(?x:
    -? (?: 0 | [1-9][0-9]{0,99} )
    (?: \. [0-9]{1,99} )?
    (?: [eE] [+-]? [0-9]{1,3} )?
)"""
# As Python writes it. It is read as a whole, so it is short.
_SINGLE_QUOTED: Final = r"""'(?:[^'\\\x00-\x1f]|\\['"\\nrt]){0,999}'"""
_VALUE: Final = (
    r"""(?x:
        GAP
        (?: (?P<open> [{\["] )
          | (?P<single_quoted> SINGLE_QUOTED ) (?= \s* [,}\]] )
          | (?: NUMBER | true | false | null | (?P<python> True | False | None )
              | (?P<word> [\w.+-]{1,200} ) )          # NaN, 1e9999, 007: a string
            (?= [ \t\r\n,}\]/<] )                   # 5</tool_call>: its } was forgotten
        )
    )""".replace("NUMBER", NUMBER)
    .replace("GAP", _GAP)
    .replace("SINGLE_QUOTED", _SINGLE_QUOTED)
)
_ESCAPE: Final = r"""(?x:
    ["\\/bfnrt]
  | u (?i: (?! d[89a-f] ) [0-9a-f]{4}                         # a character
         | d[89ab][0-9a-f]{2} \\ (?-i:u) d[c-f][0-9a-f]{2} )  # or a surrogate pair
)"""
_CHARACTER: Final = rf'(?:[^"\\\x00-\x1f]|\\{_ESCAPE})'
_KEY: Final = (
    rf'{_GAP}(?P<key>"{_CHARACTER}{{0,999}}"|(?P<single_quoted>{_SINGLE_QUOTED})'
    rf"|(?P<bare_key>[A-Za-z_$][\w$-]{{0,199}})){_GAP}:"
)


@dataclass(frozen=True, eq=False)
class JsonState(Pattern):
    """Where in JSON a reader is, as the pattern of what may come next there."""

    closer: str  # of what is open


_OBJECT_START: Final = JsonState(  # after {
    rf"{_KEY}{_VALUE}|{_GAP}(?P<close>\}})",
    example='"n": 5,',
    near_miss="'n: 5,",
    closer="}",
)
_OBJECT_MEMBER: Final = JsonState(  # after a member
    rf'{_GAP}(?:,|(?P<no_comma>(?="))){_KEY}{_VALUE}'
    rf"|{_GAP}(?:(?P<skipped>,){_GAP})?(?P<close>\}})",
    example=', "items": [',
    near_miss=", ]",
    closer="}",
)
_ARRAY_START: Final = JsonState(  # after [
    rf"{_VALUE}|{_GAP}(?P<close>\])",
    example="-2.5e3,",
    near_miss="'a,",
    closer="]",
)
_ARRAY_ITEM: Final = JsonState(  # after an item
    rf"{_GAP},{_VALUE}|{_GAP}(?:(?P<skipped>,){_GAP})?(?P<close>\])",
    example=", True]",
    near_miss=", }",
    closer="]",
)
# The state after a first member or item. All other states stay as they are.
_NEXT_STATES: Final = {_OBJECT_START: _OBJECT_MEMBER, _ARRAY_START: _ARRAY_ITEM}
_OPENED_STATES: Final = {"{": _OBJECT_START, "[": _ARRAY_START}

# What JSON has in the place of a group.
_MENDED_GROUPS: Final[Mapping[str, Callable[[str], str]]] = {
    "skipped": lambda _comment: "",
    "no_comma": lambda _nothing: ",",
    "bare_key": to_json,
    "word": to_json,
    "single_quoted": lambda text: to_json(ast.literal_eval(text)),
    "python": {"True": "true", "False": "false", "None": "null"}.__getitem__,
}


def _mend(match: Any) -> str:
    """The text of a match as JSON: without comments, and words as what they mean."""
    edits: list[tuple[int, int, str]] = []
    for group, write in _MENDED_GROUPS.items():
        if group not in match.re.groupindex:
            continue
        for start, end in match.spans(group):
            old_text = match.string[start:end]
            edits.append((start, end, write(old_text)))

    text: str = match[0]
    for start, end, new_text in sorted(edits, reverse=True):
        before = text[: start - match.start()]
        after = text[end - match.start() :]
        text = before + new_text + after
    return text


# -- 2 strings -------------------------------------------------------------------------
#
# What comes next in a string: text; or one raw character, which JSON would escape: a
# line break, a backslash that begins no escape, and, why(L-86), a quote inside the
# string. What follows a quote decides whether it ends the string:
#
#     }  ]  or a tag of the call          "hello"}        ends it
#     a comma, and what may follow it     "hello", "n":   ends it (in arrays: any comma)
#     blanks, and a quote or a comment    "hello" "n":    ends it; a comma was forgotten
#     a letter, a bracket ...             print("hello")  is inside
#     blanks, and any other character     say "hello" to  is inside
#     a tag of something else             "<b>            is inside
#     a comma, and no key after it        f("a", b + 1)   is inside (in objects)
#     a colon                             "x, "n": 5      ends a key: the string before
#                                                         was never closed (L-133)
#
# A (?! does not wait for text that is still to come. So the 11 characters that it may
# look at must be there: as many as \ud83d\ude00 has after its first backslash, and
# </tool_call> after its <.

_STRING: Final = r"""(?x:
    CHARACTER+
  | (?P<raw>
        [\x00-\x1f]
      | \\ (?! ESCAPE ) (?= (?s: .{11} ) )          # C:\Users
      | " (?= [^\s,:}\]<]                           # print("hello")
            | \s \s* (?: [^\s,:}\]"/<] | / [^/*] )  # say "hello" to; "a" / b
            | < (?! /?tool_call> ) (?s: .{11} )     # "<b>
            | COMMA_INSIDE )                        # f("a", b + 1)
    )
  | (?P<close>
        " (?= \s* (?: [}\]] | </?tool_call>         # "hello"}; its } was forgotten
                     | COMMA_AFTER )                # "hello", "n": 5
            | \s \s* (?: " | / [/*] ) )             # "hello" "n"; "hello" // why
    )
  | (?P<key_end> " (?= \s* : ) )                   # "x, "n": 5
)""".replace("CHARACTER", _CHARACTER).replace("ESCAPE", _ESCAPE)

_OBJECT_STRING: Final = JsonState(
    _STRING.replace(
        "COMMA_INSIDE",
        r"""(?x:
            \s* , \s*
            (?: \w+ \s* [^\s\w:]
              | [^\s"'\w}\]/]
              | '[^'\n]{0,99}+ (?: [^'] | '\s* [^\s:] )   # "a", 'b') is no key
            )
        )""",
    ).replace(
        "COMMA_AFTER",
        r"""(?x:
            , \s*
            (?: ["}\]/] | \w+ \s* : | '[^'\n]{0,99}+' \s* : )
        )""",
    ),
    example='", "n": 5',
    near_miss='", n',  # the string goes on, or a key without quotes follows
    closer='"',
)
_ARRAY_STRING: Final = JsonState(
    _STRING.replace("COMMA_INSIDE", NO_PATTERN).replace("COMMA_AFTER", ","),
    example='", n',
    near_miss='"',
    closer='"',
)

_WORD_IN_QUOTES: Final = re.compile(r"(?:\A|[\s,;{]\")([\w$.-]+)\Z")
_CALL_END_TAG: Final = re.compile(
    r"""(?x)
    </ (?:minimax:)? tool_call> | <\|tool_call (?:s_section)? _end\|> | <\|call\|>
  | \[TOOL_CALLS\]
    """
)


class OpenString:
    """What tells that a string in JSON was never closed (L-133).

    A raw character is one that JSON would escape. The string was not closed, if it has

        the closing tag of its call, and a raw quote or line break    is_doubtful
        a key of the tool's, and then a raw quote                     has_key
        and, where the reply is over in it: such a tag, a raw quote,
        or a bracket at the end of a line                             is_unclosed
    """

    def __init__(self, keys: set[str]) -> None:
        """`keys`: of the tool's schema."""
        self.has_key = False
        self._keys = keys
        self._end = ""  # of its text, as long as a tag
        self._has_quote = False
        self._has_break = False
        self._has_tag = False

    @property
    def is_doubtful(self) -> bool:
        """Whether it was never closed, if what looks like a tag in it may be one."""
        return self._has_tag and (self._has_quote or self._has_break)

    @property
    def is_unclosed(self) -> bool:
        """Whether it was never closed, if the reply is over."""
        has_bracket = re.search(r"[}\]]\s*(?:\n|\Z)", self._end) is not None
        return self._has_tag or self._has_quote or has_bracket

    def take(self, text: str, *, is_raw: bool) -> tuple[str, str]:
        """Read its next part; returns the part up to a tag, and the rest of it.

        The tag, the closing one of a call, may have begun in an earlier part.
        """
        if is_raw and text == '"':
            self._has_quote = True
            word = _WORD_IN_QUOTES.search(self._end)
            self.has_key |= word is not None and word[1] in self._keys
        self._has_break |= is_raw and text == "\n"
        text_with_end = self._end + text
        tag = _CALL_END_TAG.search(text_with_end)
        if tag is None:
            self._end = text_with_end[-TAG_LENGTH:]
            return text, ""
        n_taken = tag.end() - len(self._end)
        self._has_tag = True
        self._end = ""  # so that the tag is found once
        return text[:n_taken], text[n_taken:]


# -- 3 objects -------------------------------------------------------------------------

# Where an object is left open, and nothing was written that would be lost: before a tag
# that ends the call.
_LEFT_OPEN: Final = Pattern(
    r"""(?x)
    \s* (?: , \s* )?
    (?= </ (?: tool_call | function | invoke | minimax:tool_call ) >
      | <tool_call> \s* [{<\w]
      | <\|call\|> )
    """,
    example="\n</tool_call>",
    near_miss=', "n</tool_call>',
)


class MendedObject:
    """Reads one JSON object, whose { was read before, and mends it.

    Its last bracket is `closing`, with those before it that were forgotten: for
    {"items": [1, 2 it is ]}. It is for whoever reads what follows the object.
    """

    def __init__(self, unread: UnreadText, keys: Iterable[str]) -> None:
        """`keys`: of the tool's schema."""
        self.is_done = False
        self.is_broken = False  # some of what was written cannot be read
        self.closing = ""  # once it is done and not broken
        # A key of the tool's is in an object inside this one: if a bracket is missing,
        # it was before that key.
        self.has_inner_key = False
        self.has_mended_bracket = False
        self.has_quoted_end = False  # the end tag of the call came in it as a token
        self._unread = unread
        self._keys = set(keys)
        self._open = [_OBJECT_START]  # all that is open, outermost first
        self._string = OpenString(self._keys)  # that is open, or was last

    @property
    def is_in_string(self) -> bool:
        """Whether a string is open, and nothing tells yet that it is closed."""
        is_open = bool(self._open) and self._open[-1].closer == '"'
        return is_open and not self._unread.text.startswith('"')

    def read(self) -> str:
        """What more is certain, as JSON text without `closing`."""
        json_text = ""
        while not self.is_done:
            match = self._unread.match_next(self._open[-1])
            if match is not None and match.partial:
                break
            text = self._accept(match) if match else self._accept_other()
            if text is None:  # the next text decides
                break
            self.is_done = self.is_broken or not self._open
            if self._open:
                json_text += text
            else:  # the last bracket was read
                self.closing = text
        return json_text

    def _accept(self, match: Any) -> str:
        """Go on to the state after `match`; returns its text as JSON."""
        text: str = match[0]
        state = self._open.pop()
        if state.closer == '"':
            if match["close"] is not None:
                return text
            self._open.append(state)
            return self._accept_string(match)
        if match["close"] is not None:
            return _mend(match)
        if self._open and state is _OBJECT_MEMBER:
            self.has_inner_key |= match["key"].strip("\"'") in self._keys
        self._open.append(_NEXT_STATES.get(state, state))
        if match["open"] is not None:
            string = _OBJECT_STRING if state.closer == "}" else _ARRAY_STRING
            self._open.append(_OPENED_STATES.get(text[-1], string))
            self._string = OpenString(self._keys)
        return _mend(match)

    def _accept_string(self, match: Any) -> str:
        """Take a part of a string; returns it as JSON."""
        if match["key_end"] is not None:
            self.is_broken = True
            return ""
        is_raw = match["raw"] is not None
        text, rest = self._string.take(match[0], is_raw=is_raw)
        self._unread.text = rest + self._unread.text
        is_text = self._unread.has_tokens and not self.has_quoted_end
        is_tag = self._string.is_doubtful and not is_text
        self.is_broken = is_tag or self._string.has_key
        return escape_json(text) if is_raw else text

    def _accept_other(self) -> str | None:
        """What comes next does not fit, or was cut off; returns what closes it.

        None: the next text decides. "" if it is broken.
        """
        rest = self._unread.text.strip()
        if self._unread.is_complete and self._is_whole(rest):
            self._unread.text = ""
            return self._close_all()
        if self._open[-1].closer != '"':
            match = self._unread.match_next(_LEFT_OPEN)
            if match is not None and match.partial:
                return None
            # {"path": "a.md"</tool_call>    all brackets that are open were forgotten;
            #                                after { alone, an argument may have been
            if match is not None and self._open != [_OBJECT_START]:
                return self._close_all()
            # {"items": [1, 2}               the innermost one was
            closers = [state.closer for state in self._open]
            if rest[:1] in closers and not self.has_inner_key:
                self.has_mended_bracket = True
                return self._open.pop().closer
        self.is_broken = True
        return ""

    def _is_whole(self, rest: str) -> bool:
        """Whether the last `rest` of a reply has no part of an argument."""
        if self._open == [_OBJECT_START]:
            return False  # it may have had any
        if self._open[-1].closer != '"':
            return not rest.strip(", \t\r\n}]")
        if self._string.is_unclosed:
            return False
        # Half an escape: the string was cut, wherever it was.
        return rest.startswith("\\") or not rest.strip('", \t\r\n}]')

    def _close_all(self) -> str:
        """What closes all that is open; "" if it is broken."""
        if self.has_inner_key and len(self._open) > 1:
            self.is_broken = True
            return ""
        closers = [state.closer for state in reversed(self._open)]
        self._open.clear()
        return "".join(closers)


# -- 4 calls ---------------------------------------------------------------------------

# After the arguments: brackets, one too many or too few, and the closing tag. Without
# the tag the call has ended, too, if another call or a text follows (L-82).
_CALL_END: Final = Pattern(
    r"""(?x:
        \s* [}\]]* \s*
        (?: </tool_call> | <\|call\|>
          | <\|tool_call_end\|>                     # Kimi's, and of all its calls
            (?: \s* <\|tool_calls?_section_end\|>
              | (?= \s* (?: [^\s<] | <[^|] | <\|tool_call_b | \0 ) )
            )
          | (?= <tool_call> | [^\s}\]<] )
        )
    )""",
    example="}}\n</tool_call>",
    near_miss="}\n<b>",
)
# The same where the arguments are a member of the call, whose bracket comes after them.
# Before that bracket no text can follow.
_CALL_OBJECT_END: Final = Pattern(
    r"""(?x:
        GAP [}\]]+ GAP
            (?: </tool_call>
              | (?= [^\s}\]</] | / [^/*] | < [^/] | </ (?: [^t] | t [^o] ) ) )
      | \s* (?: </tool_call> | (?= <tool_call> \s* [{<\w] ) )   # it was forgotten
    )""".replace("GAP", _GAP),
    example="}}\n</tool_call>",
    near_miss="\nDone.",
)
# After the arguments, a member of the call that is none of them.
_CALL_MEMBER: Final = Pattern(
    r"""(?x:
        \s* [}\]]? \s* , \s* " (?: id | type | index | call_id | tool_call_id ) "
        \s* : \s* (?: " CHARACTER{0,99} " | (?: NUMBER | null ) (?= [\s,}\]</] ) )
    )""".replace("CHARACTER", _CHARACTER).replace("NUMBER", NUMBER),
    example=', "id": "5"',
    near_miss=', "n": "5"',
)
# Any member after the arguments, also one whose name has no quotes: what was meant as
# an argument, before which a bracket was closed too early.
LOST_MEMBER: Final = Pattern(
    r"""(?x:
        (?: BRACKETS (?: // [^\n]{0,999} \n | /\* (?s: .){0,999}? \*/ ) ){0,9}
        BRACKETS
        (?: " CHARACTER{0,99} " | ' [^'\n]{0,99} '
          | \w{1,99} ["'] | (?<= [,;] \s{0,9} ) \w{1,99} )
        \s{0,9} :
    )""".replace("CHARACTER", _CHARACTER).replace("BRACKETS", r"[\s}\],;]{0,99}+"),
    example='; "n": 5',
    near_miss="}\nn: 5",
)
# The reply was cut in the name of such a member: , "n
_CUT_MEMBER: Final = re.compile(r"[,;]\s*[\"']")


class JsonArguments:
    """Reads arguments in JSON, whose { was read before, and on to the call's end."""

    def __init__(
        self, unread: UnreadText, keys: Iterable[str], *, is_member: bool
    ) -> None:
        """`keys`: of the tool's schema.

        `is_member`: the call is an object, of which the arguments are a member.
        """
        self.is_done = False  # the call has ended, or is broken
        self.is_broken = False  # some of what was written cannot be read
        self.closing = ""  # the last bracket, once it is read: for the caller to emit
        self._unread = unread
        self._is_member = is_member
        self._arguments = MendedObject(unread, keys)

    def quotes_end(self, _tag: str) -> bool:
        """Whether a string is open where the end tag comes as a token."""
        return self._arguments.is_in_string

    def read_end_as_text(self) -> None:
        """The end tag was quoted as a token: so it may be one in other tokens."""
        self._arguments.has_quoted_end = True

    def read(self) -> str:
        """What more is certain of the arguments, as JSON text without `closing`."""
        json_text = self._arguments.read()
        if self._arguments.is_broken:
            self.is_done = self.is_broken = True
        elif self._arguments.is_done:
            self.closing = self._arguments.closing
            self._read_later()
        return json_text

    def _read_later(self) -> None:
        """Take the members of the call that follow its arguments, then its end.

        , "id": "1"    a member of the call
        , "id": "1     the reply was cut in one: nothing of the arguments is lost
        , "n": 5       it was an argument: broken
        , "n           the reply was cut in what may have been one: broken
        """
        while lost := LOST_MEMBER.compiled.match(self._unread.text, partial=True):
            if lost.partial:
                break
            member = self._unread.match_next(_CALL_MEMBER)
            if member is None:
                self.is_broken = not self._unread.is_cut
                self.is_done = True
                return
            if member.partial:
                return
        if lost is not None and not self._unread.is_complete:
            return  # a member may follow
        is_cut = lost is not None and _CUT_MEMBER.search(lost[0]) is not None
        self._end_call()
        self.is_broken |= self.is_done and is_cut

    def _end_call(self) -> None:
        """Take what ends the call."""
        end = _CALL_OBJECT_END if self._is_member else _CALL_END
        match = self._unread.match_next(end)
        if match is not None and match.partial:
            return
        self.is_done = True
        rest = self._unread.text.lstrip()
        if self._is_member:
            first = (rest if match is None else match[0].lstrip())[:1]
            # {"name": "read", "arguments": {"path": "a.md"} Done.
            # The bracket of the call is missing before a text.
            is_inside = match is None and first not in {"", "}", "]"}
            # {"name": "read", "arguments": {"tree": {"k": 1, "n": 5}}</tool_call>
            # It is missing before the tag; or the tree's is, and n is an argument.
            has_bracket = first not in {"", "<"}
            has_inner_key = self._arguments.has_inner_key
            self.is_broken = is_inside or (has_inner_key and not has_bracket)
        else:
            # {"items": [1, 2} Done.
            # Where a bracket was forgotten, a text may be more of the items.
            has_tag = match is not None and "<" in match[0]
            follows_text = not has_tag and rest[:1] not in {"", "<", "["}
            has_mended = self._arguments.has_mended_bracket
            self.is_broken = has_mended and follows_text


# region FOREIGN CALLS =========================================================
# Calls that are read as a whole, once they have ended: Gemma's, in JSON, in Python, and
# what only mlx-lm's parser reads.
#
#     unread text    <|tool_call>call:read{path:<|"|>a.md<|"|>}<tool_call|>Done.
#     body, parsed               ------------------------------
#     rest, text                                                           -----
#
#  1 JSON       [{"name": "read", "arguments": {"path": "a.md"}}]
#  2 Python     [read(path="a.md")]
#  3 Gemma      call:read{path:<|"|>a.md<|"|>}
#  4 Reader     ForeignCalls finds where the body ends, and who reads it
#
# A body with one call that cannot be read has none: it becomes text. So no call runs
# with fewer arguments than were written.
#
# Public   WholeCall, WHOLE_JSON_START, ForeignCalls
# Uses     REASONING PARSER, CALL TEXT, CALL SYNTAXES, MENDED JSON
# Thread   any; pure


class WholeCall(NamedTuple):
    """A call that was read as a whole."""

    name: str
    arguments: str  # JSON
    call_id: str | None = None


# -- 1 JSON ----------------------------------------------------------------------------

# Calls in JSON that CALL_START does not fit: a list, members in another order, or
# arguments that are a string.
WHOLE_JSON_START: Final = Pattern(
    rf"\s*(?:{FENCE_START})?"
    r"(?:<tool_call>\s*(?:\{|\[\s*\{)|\[TOOL_CALLS\]\s*[\[{])",
    example='<tool_call>\n{"arguments": {"path": "a.md"}, "name": "read"}',
    near_miss="<tool_call>\n[1",
)
# After such a call: brackets too many, and the tag, which may have been forgotten.
_WHOLE_JSON_END: Final = Pattern(
    r"(?:\s*[}\]]{1,99}+)?+(?:\s*</tool_call>|(?=\s*(?:[^\s<}\]]|<[^/]|</[^t])))",
    example="\n}</tool_call>",
    near_miss="\n</td>",
)
_OBJECT_OR_LIST: Final = re.compile(r"\s*(?:\{|\[\s*\{)")
_JSON_MARK: Final = regex.compile(r'(?s:\\.)|["\[\]{}]|</tool_call>')
# As Mistral's templates want them.
_CALL_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_KNOWN_MEMBERS: Final = {"name", "arguments", "id", "type"}


class JsonSpan:
    """Finds where a list or an object in JSON ends, in a text that grows.

    At the latest it ends before a closing tag that is in no string. It only counts
    brackets: what is between them may be Python, so MendedObject could not read it.
    """

    def __init__(self) -> None:
        self._position = 0  # up to it the text was read
        self._depth = 0
        self._is_in_string = False
        self._end: int | None = None

    def find_end(self, text: str) -> int | None:
        """The position after it; None if it has not come. Each letter is read once."""
        if self._end is not None:
            return self._end
        for match in _JSON_MARK.finditer(text, self._position, partial=True):
            if match.partial:  # half an escape, half a tag, or nothing
                self._position = match.start()
                return None
            self._position = match.end()
            mark = match[0]
            if mark == '"':
                self._is_in_string = not self._is_in_string
            elif self._is_in_string:
                continue
            elif mark in "[{":
                self._depth += 1
            elif mark in "]}":
                self._depth -= 1
                if self._depth == 0:
                    self._end = match.end()
                    break
            elif mark == "</tool_call>":
                self._end = match.start()
                break
        return self._end


def parse_json_calls(text: str) -> list[WholeCall]:
    """Calls in JSON: an object, or a list. Raises ValueError if one is no call."""
    return [_parse_json_call(call) for call in as_list(load_value(text))]


def _parse_json_call(call: Any) -> WholeCall:
    """Raises ValueError if it has no name or arguments under these keys."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(call)
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = load_value(arguments or "{}")
    if arguments == []:
        arguments = {}  # nothing was written that would be lost
    if arguments is None and call.keys() <= _KNOWN_MEMBERS:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(call)
    call_id = call.get("id")
    is_id = isinstance(call_id, str) and _CALL_ID.fullmatch(call_id)
    return WholeCall(call["name"], to_json(arguments), call_id if is_id else None)


# -- 2 Python --------------------------------------------------------------------------


def parse_python_calls(text: str) -> list[WholeCall]:
    """Calls that are a list in Python, as LFM2 writes them. Raises ValueError.

        [read(path="a.md"), write(path="b.md", lines=[1, 2])]

    An argument without a name is an error: nobody knows which one it is.
    """
    # A line break inside quotes is none in Python.
    text = _PYTHON_STRING.sub(lambda match: match[0].replace("\n", "\\n"), text.strip())
    text = without_false_escapes(text)
    source = text if text.startswith("[") else f"[{text}]"
    try:
        body = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ValueError(text) from error
    calls = []
    for element in getattr(body, "elts", []):
        # To Python resolve-id() is a difference: its last part is the call.
        call = getattr(element, "right", element)
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError(text)
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError(text)
            arguments[keyword.arg] = _python_value(keyword.value, source)
        written = ast.get_source_segment(source, element) or ""
        name = written.partition("(")[0].rstrip()
        calls.append(WholeCall(name, to_json(arguments)))
    return calls


_PYTHON_STRING: Final = re.compile(
    r'''(?s:"""(?:.)*?"""|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')''',
)
_JSON_WORDS: Final = {"true": True, "false": False, "null": None}


class _JsonWords(ast.NodeTransformer):
    """Replaces the words of JSON by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The value of a word; any other name stays."""
        if node.id not in _JSON_WORDS:
            return node
        return ast.copy_location(ast.Constant(_JSON_WORDS[node.id]), node)


def _python_value(node: ast.expr, source: str) -> Any:
    """What an argument means; also JSON's words, and a text without quotes.

    Two texts in a row are one in Python, and here a comma that was forgotten.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = ast.get_source_segment(source, part) or ""
            if not _PYTHON_STRING.fullmatch(text.lstrip("rRuU")):
                raise ValueError(source)
    with suppress(ValueError):
        return ast.literal_eval(_JsonWords().visit(node))
    if any(isinstance(part, ast.Constant) for part in ast.walk(node)):
        raise ValueError(source)
    return ast.get_source_segment(source, node)


# -- 3 Gemma ---------------------------------------------------------------------------


class MarkedCalls:
    """Reads whole calls as Gemma writes them, with a mark before and after strings.

        call:read{path:<|"|>a.md<|"|>,lines:[1,2],options:{all:true}}

    Real calls lack marks, or have too many closing brackets:

        call:read{path:a.md,lines:[1,2]}}         a text without marks
        call:read{path:<|"|>a.md,lines:[1,2]}     a text with one of them
        call:read{path:"a.md",lines:[1,2]}        quotes in the place of marks

    The tool's schema tells which text is a string. A text without marks ends before
    what matches `text_end`: of an argument, a key of the tool's or the end of the call;
    of a member in an object, any key or its bracket; of an item, a comma or a bracket.
    """

    def __init__(
        self, text: str, *, mark: str, offered: Mapping[str, Schema], is_closed: bool
    ) -> None:
        """`is_closed`: the end tag has come, so a bracket may only be forgotten."""
        self._text = text
        self._position = 0
        self._mark = mark
        self._offered = offered
        self._is_closed = is_closed
        keys: set[str] = set()
        for parameters in offered.values():
            keys.update(SchemaPart.of_tool(parameters).keys)
        names = "|".join(sorted(map(regex.escape, keys))) or NO_PATTERN
        self._key_pattern = regex.compile(rf"[,;\s](?:{names}):")

    def read(self) -> list[WholeCall]:
        """All calls. Raises ValueError if some text belongs to none."""
        calls = []
        while not self._take(r"[\s}]*\Z"):
            match = self._require(r"[\s}]*(?:call:)?([\w.:-]+)\{")
            schema = SchemaPart.of_tool(self._offered.get(match[1], {}))
            arguments = self._read_object(schema, is_outermost=True)
            calls.append(WholeCall(match[1], arguments))
        return calls

    def _take(self, pattern: str) -> Any:
        """Take a match from the front and return it; None if nothing fits there."""
        match = regex.compile(pattern).match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return match

    def _require(self, pattern: str) -> Any:
        """The same. Raises ValueError if nothing fits there."""
        match = self._take(pattern)
        if match is None:
            raise ValueError(self._text[self._position :])
        return match

    def _read_object(self, schema: SchemaPart, *, is_outermost: bool = False) -> str:
        """Read an object whose { was taken; returns it as JSON.

        Raises ValueError if a key comes twice.
        """
        mark = regex.escape(self._mark)
        key_pattern = rf"""(?x:
            \s*
            (?: {mark} (?P<key> (?s:.)*? ) {mark}
              | "(?P<key> [^"]* )"
              | (?P<key> {_BARE_KEY} )
            )
            \s* : (?P<gap> \s* )
        )"""
        end = r"\s*(?:\}|\Z)" if self._is_closed and is_outermost else r"\s*\}"
        text_end = self._text_end(schema) if is_outermost else _MEMBER_END
        members: dict[str, str] = {}
        while not self._take(end):
            if members:
                self._require(r"\s*,")
            match = self._require(key_pattern)
            key = match["key"]
            if key in members:  # of two values JSON keeps one
                raise ValueError(key)
            members[key] = self._read_value(
                schema.member(key), text_end, gap=match["gap"].lstrip(" \t")
            )
        pairs = [f"{to_json(key)}: {value}" for key, value in members.items()]
        return f"{{{', '.join(pairs)}}}"

    def _text_end(self, schema: SchemaPart) -> str:
        """The `text_end` of the arguments of a call.

        , n:             the next argument: a key of the tool's; if it has none, any
        }  }call:read{   the end of the body, or the next call
        nothing          the end of the body, if the bracket was forgotten
        """
        keys = "|".join(map(regex.escape, schema.keys)) or _BARE_KEY
        call_end = r"\}[\s}]*+(?:\Z|call:[\w.:-]+\{)"
        if self._is_closed:
            call_end += r"|\Z"
        # Blanks and brackets are read from the first of them, or from the colon before
        # an empty text. If each were tried, a long row of them would take for ever.
        call_end = rf"(?:(?<![\s}}])|(?<=:\s{{0,9}}))\s*+(?:{call_end})"
        return rf'(?:{_BLANKS},\s*+"?(?:{keys})"?\s*:|{call_end})'

    def _read_array(self, schema: SchemaPart) -> str:
        """Read an array whose [ was taken; returns it as JSON."""
        items: list[str] = []
        while not self._take(r"\s*\]"):
            if items:
                self._require(r"\s*,")
            self._take(r"\s+")
            items.append(self._read_value(schema.items, _ITEM_END))
        return f"[{', '.join(items)}]"

    def _read_value(self, schema: SchemaPart, text_end: str, gap: str = "") -> str:
        """Read a value; returns it as JSON.

        `gap`: the white space before it, which is part of a text without marks.
        """
        types = schema.types
        if self._take(regex.escape(self._mark)):
            text = self._read_marked(text_end)
            is_text = not types or "string" in types
            return to_json(text) if is_text else value_as_json(text, types)

        json_text = None if types == {"string"} else self._read_container(schema)
        return json_text or self._read_bare(types, text_end, gap)

    def _read_bare(self, types: set[str], text_end: str, gap: str) -> str:
        """A value without marks, which is no object and no array, as JSON."""
        if match := self._take(r'"(?:[^"\\]|\\.)*+"(?=\s*[,}\]])'):
            with suppress(ValueError):
                return to_json(json.loads(match[0], strict=False))
            return to_json(match[0][1:-1])
        if match := self._take(r"'(?:[^'\\]|\\.)*+'(?=\s*[,}\]])"):
            return to_json(match[0][1:-1].replace("\\'", "'"))
        if match := self._take(rf"(?:{NUMBER}|(?i:true|false|null))(?=\s*[,}}\]])"):
            return value_as_json(match[0], types)
        return value_as_json(gap + self._read_text(text_end), types)

    def _read_container(self, schema: SchemaPart) -> str | None:
        """An object or an array; None, and nothing is taken, if none is there."""
        start = self._position
        with suppress(ValueError):
            json_text = None
            if self._take(r"\{"):
                json_text = self._read_object(schema)
            elif self._take(r"\["):
                json_text = self._read_array(schema)
            if json_text is not None and self._take(r"(?=\s*(?:[,}\]]|\Z))"):
                return json_text
        self._position = start
        return None

    def _read_marked(self, text_end: str) -> str:
        """A string whose first mark was taken, up to one before a comma or a bracket.

        Its second mark may be missing. Then it ends like a text without marks.
        """
        start = self._position
        mark = regex.escape(self._mark)
        ending_mark = regex.compile(rf"{mark}(?=(?P<ends>\s*(?:[,}}\]]|\Z))?)")
        for match in ending_mark.finditer(self._text, start):
            if match["ends"] is not None:
                self._position = match.end()
                text = self._text[start : match.start()]
                # <|"|>a.md<|,text:<|"|>    two strings: between them a mark was damaged
                has_half_mark = "<|" in text or "|>" in text
                has_key = self._key_pattern.search(text) is not None
                if self._mark in text or (has_half_mark and has_key):
                    raise ValueError(text)
                return text
            next_key = rf",\s*{_BARE_KEY}\s*:\s*\Z"
            if regex.search(next_key, self._text[start : match.start()]):
                break  # <|"|>a.md,text:<|"|>b: the mark opens the next string
        text = self._read_text(text_end)  # <|"|>a.md"    a quote for the second mark
        return text.removesuffix('"') if text.count('"') == 1 else text

    def _read_text(self, text_end: str) -> str:
        """A text without a mark at its end, or without any.

        Raises ValueError if it has a mark or a key inside: then it may be two texts.
        """
        text = self._read_unmarked(text_end)
        has_key = self._key_pattern.search(text) is not None
        if self._mark in text or has_key or _TAG_LIKE.search(text):
            raise ValueError(text)
        return text

    def _read_unmarked(self, text_end: str) -> str:
        """The text before `text_end`, without a mark or a quote at one of its ends."""
        text: str = self._require(rf"((?s:.)*?)(?={text_end})")[1]
        # path:f() { return }}    the first bracket is the text's, the second the call's
        while text.count("{") > text.count("}") and self._take(r"\}(?=\s*\})"):
            text += "}"
        if text.endswith(self._mark):
            text = text.removesuffix(self._mark)  # "a.md<|"|>    a quote for the first
            return text.removeprefix('"') if text.count('"') == 1 else text
        return text


_TAG_LIKE: Final = re.compile(r"<\||\|>|_function_call>|call:\w+")
_BARE_KEY: Final = r"[\w.$@/-]+"
# Before what ends a text: it is looked for at each letter, so blanks are read once.
_BLANKS: Final = r"(?:(?<!\s)\s++)?"
_MEMBER_END: Final = rf"{_BLANKS}(?:,\s*+{_BARE_KEY}\s*:|\}})"
_ITEM_END: Final = rf"{_BLANKS}[,\]]"


# -- 4 reader --------------------------------------------------------------------------

_CALL_FENCE: Final = re.compile(rf"\A\s*{FENCE_START}")
# An argument after the end of a call whose strings have marks: the tag came too early.
_LATE_MARK: Final = Pattern(
    r"\s*(?:[,}\]]|[^<]{0,99}+<(?:\|\"\|>|escape>))",
    example=',text:<|"|>',
    near_miss="<|tool_call>",
)


class _CallBody(NamedTuple):
    """Where the text of calls ends that follows the start tag."""

    end: int
    n_read: int  # with the end tag
    is_damaged: bool = False  # an argument follows, or a member of what is no object


class ForeignCalls:
    """Reads whole calls: `read` again with each text, until it is done.

        the body is read by       if it begins with
        MarkedCalls               the start tag of a format with a `string_mark`
        parse_json_calls()        { or [{
        parse_python_calls()      the start tag of LFM2
        mlx-lm's parser           anything else

    If that raises, or overlooks a part of the body, there are no calls in it.
    """

    def __init__(
        self,
        unread: UnreadText,
        tool_format: ToolCallFormat,
        tools: Sequence[Tool],
        max_calls: int,
    ) -> None:
        self.is_done = False
        self.n_left_out = 0  # calls after the first `max_calls`
        self._unread = unread
        self._format = tool_format
        self._tools = tools
        self._max_calls = max_calls
        self._foreign = tool_format.foreign
        self._json_span = JsonSpan()
        self._end_token: int | None = None  # where it is in the unread text

    def note_end(self) -> None:
        """The end tag comes next, as a token of its own. Only the first one counts."""
        if self._end_token is None:
            self._end_token = len(self._unread.text)

    def read(self) -> list[WholeCall]:
        """All calls, once it is done; none if nothing fits."""
        text = _CALL_FENCE.sub("", self._unread.text)
        if text.lstrip().startswith(self._format.start):
            text = text.partition(self._format.start)[2]
        body = self._find_body(text)
        if body is None:
            if not self._unread.is_complete:
                return []
            # The reply is over: up to an end tag that looked quoted, or to the end.
            n_body = len(text.partition(self._format.end)[0])
            body = _CallBody(n_body, n_body + len(self._format.end))
        self._unread.text = text[body.n_read :]
        self.is_done = True
        if body.is_damaged:
            return []
        is_closed = body.end < len(text)
        try:
            calls = self._parse(text[: body.end], is_closed=is_closed)
        except Exception:  # noqa: BLE001 - they raise what they like on bad text
            return []
        self.n_left_out = max(0, len(calls) - self._max_calls)
        return calls[: self._max_calls]

    def _find_body(self, text: str) -> _CallBody | None:
        """Where the body ends in the text after the start tag; None: not yet."""
        # JSON between Hermes's tags is read here, whatever mlx-lm's parser makes of it.
        is_hermes = self._format.start == HERMES_START
        is_json = is_hermes and _OBJECT_OR_LIST.match(text) is not None
        if self._end_token is None and (is_json or self._foreign.is_json):
            return self._find_json(text)
        position = self._find_end_tag(text)
        if position < 0:
            return None
        end = position + len(self._format.end)
        if not self._foreign.string_mark or self._max_calls == 1:
            return _CallBody(position, end)

        late = _LATE_MARK.compiled.match(text, end, partial=True)
        if late is not None and late.partial and not self._unread.is_complete:
            return None
        is_damaged = late is not None and not late.partial
        return _CallBody(position, end, is_damaged)

    def _find_end_tag(self, text: str) -> int:
        """The position of the end tag, or -1.

        An end tag between the marks of a string is a quotation, if it is no token.
        """
        if self._end_token is not None:  # `text` is the end of the unread text
            n_before = len(self._unread.text) - len(text)
            return self._end_token - n_before
        position = text.find(self._format.end)
        mark = self._foreign.string_mark
        if mark:
            while position >= 0 and text.count(mark, 0, position) % 2:
                position = text.find(self._format.end, position + 1)
        return position

    def _find_json(self, text: str) -> _CallBody | None:
        """The body of JSON ends with its last bracket; then the end tag may follow."""
        end = self._json_span.find_end(text)
        if end is None:
            return None
        lost = LOST_MEMBER.compiled.match(text, end, partial=True)
        if lost is not None and not lost.partial:
            return _CallBody(end, end, is_damaged=True)
        match = None
        if not self._foreign.is_json:
            match = _WHOLE_JSON_END.compiled.match(text, end, partial=True)
        is_undecided = bool(lost) or (match is not None and match.partial)
        if is_undecided and not self._unread.is_complete:
            return None
        return _CallBody(end, match.end() if match else end)

    def _parse(self, body: str, *, is_closed: bool) -> list[WholeCall]:
        """The calls of a body. Raises whatever mlx-lm's parser raises."""
        if self._foreign.string_mark:
            offered = parameters_by_name(self._tools)
            mark = self._foreign.string_mark
            reader = MarkedCalls(body, mark=mark, offered=offered, is_closed=is_closed)
            return reader.read()
        if _OBJECT_OR_LIST.match(body):
            return parse_json_calls(body)
        if self._foreign.is_python:
            return parse_python_calls(body)
        parsed = as_list(self._format.parse(body, list(self._tools)))
        calls = [_parse_json_call(call) for call in parsed]
        return calls if self._has_read_all(body, calls) else []

    def _has_read_all(self, body: str, calls: list[WholeCall]) -> bool:
        """Whether mlx-lm's parser has overlooked nothing."""
        entry = self._foreign
        if entry.body and not regex.fullmatch(entry.body, body):
            return False
        n_arguments = sum(len(json.loads(call.arguments)) for call in calls)
        has_all_calls = len(calls) >= len(regex.findall(entry.call_tag, body))
        n_tags = len(regex.findall(entry.argument_tag, body))
        return has_all_calls and n_arguments >= n_tags


# region TOOL CALLS ============================================================
# Text of calls -> OpenAI tool calls, while they are generated; and the whole reply, put
# together.
#
#     generated                                    emitted
#     <tool_call>\n<function=read>                 id, name "read"; arguments {
#     \n<parameter=path>\ndocs                                         "path": "docs
#     /a.md\n                                                          /a.md
#     </parameter>\n</function>\n</tool_call>                          "}
#
#  1 Deltas     What is emitted, as an OpenAI chat has it.
#  2 Arguments  Values between tags -> JSON. (JSON itself: MENDED JSON.)
#  3 Reader     The text of one call -> its name and its arguments.
#  4 Reply      Pieces of the reply (REASONING PARSER) -> deltas.
#
# How a call begins tells its syntax, whatever the template says: models mix them. What
# calls no tool that was offered is text.
#
# The rule: a call never runs with fewer arguments than were written, and no value has
# more text than its own (L-133). A name that was emitted cannot be taken back. So where
# nobody can tell any more what was meant, the arguments stay open, and the reply ends
# there like one that was cut. An argument after the end of its call would be seen too
# late if the arguments were closed at once. So their last bracket is emitted when the
# next text has come, or the reply is over.
#
# End tags: many tokenizers have a token for </tool_call>, and a model that writes about
# the tag mostly writes it in other tokens. Where tokens are known (some text was fed as
# `literal`), that token ends its call, whatever stands open, but for a string or value
# in which it may be a quotation. The same letters in other tokens are text. Where no
# tokens are known, as of a tag that has several, the text around a tag tells what it
# is; a value in which one stands on a line of its own stays open.
#
# The splitter (REASONING PARSER) finds where a call begins, and a CallReader where it
# ends. ReplyParser carries the text between them, here of "Hi <tool_call>... Bye":
#
#     splitter.feed(text)             content "Hi", tool "<tool_call>...". From then on
#                                     splitter.in_call, and all text is "tool" text.
#     reader.feed(tool text)          "", for this is a call. If it is none, it returns
#     splitter.add_text(that text)    its text, in which no tag is looked for again.
#     splitter.resume(reader.rest,    Once reader.is_done: in_call is over, and tags are
#                     called=True)    looked for in what follows: content "Bye".
#
# Public   ReplyParser
# Uses     API TYPES, REASONING PARSER, CALL TEXT, CALL SYNTAXES, MENDED JSON,
#          FOREIGN CALLS
# Thread   any; pure


# -- 1 deltas --------------------------------------------------------------------------


class ReplyDeltas:
    """The deltas of one reply, as an OpenAI chat has them, in the order of generation.

    A delta has `content`, or `reasoning_content`, or `tool_calls` with one call in it:
    first its id and name alone, since some clients lose arguments that come with them,
    then parts of its arguments.
    """

    def __init__(self, ids: Iterator[str]) -> None:
        self.deltas: list[JsonObject] = []
        self.calls: list[JsonObject] = []  # the last one may still grow
        self._ids = ids  # for the calls

    def emit_text(self, kind: TextKind, text: str) -> None:
        """Add a part of the content or of the reasoning."""
        field_name = "reasoning_content" if kind == "reasoning" else "content"
        self.deltas.append({field_name: text})

    def emit_name(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call. `call_id`: the model's own, None if it wrote none."""
        if call_id is None or any(call["id"] == call_id for call in self.calls):
            call_id = next(self._ids)
        function = {"name": name, "arguments": ""}  # of the call they grow
        call = {"id": call_id, "type": "function", "function": function}
        delta = {"index": len(self.calls), **call, "function": dict(function)}
        self.calls.append(call)
        self.deltas.append({"tool_calls": [delta]})

    def emit_arguments(self, json_text: str) -> None:
        """Add to the arguments of the last call."""
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += json_text
        delta = {"index": index, "function": {"arguments": json_text}}
        self.deltas.append({"tool_calls": [delta]})

    def message(self) -> JsonObject:
        """All deltas joined: what a client has that has read the stream."""
        content = "".join(delta.get("content", "") for delta in self.deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in self.deltas)
        message: JsonObject = {"role": "assistant", "content": content or None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


# -- 2 arguments -----------------------------------------------------------------------

_JSON_START: Final = Pattern(r"\s*\{", example="\n{", near_miss="n{")


class TaggedArguments:
    """Reads arguments between tags: a tag, then its value, if it has one, and so on.

        \n<parameter=path>\n         "path":
        docs/a.md                    "docs/a.md
        \n</parameter>               "
        \n</function>\n</tool_call>  is_done; `closing` is for the caller to emit

    In the place of the tags a model may write all arguments as one JSON object: then
    `is_json`.
    """

    def __init__(
        self,
        unread: UnreadText,
        tags: ParameterTags,
        schema: SchemaPart,
        *,
        end_tag: str,
    ) -> None:
        """`end_tag`: what may come as a token. `schema`: of the tool."""
        self.is_done = False
        self.is_broken = False  # some of what was written cannot be read
        self.is_json = False
        self.closing = "}"
        self._unread = unread
        # Where the end tag is known as a token, `_tags` have \0 in its place. Once that
        # token was quoted, they become `_text_tags`.
        self._reads_end_token = unread.has_tokens and end_tag in tags.key.source
        self._text_tags = tags
        self._tags = tags.with_end_token(end_tag) if self._reads_end_token else tags
        self._schema = schema
        self._used_keys: set[str] = set()
        self._value: TaggedValue | MendedObject | None = None  # None: a tag comes next
        self._has_tag = False  # one of its own has come
        self._has_end_tag = False  # one after which the call may end

    def end_token(self, tag: str) -> str:
        """What to feed where the end tag comes as a token."""
        is_json = isinstance(self._value, MendedObject)
        return "\0" if self._reads_end_token and not is_json else tag

    def quotes_end(self, tag: str) -> bool:
        """Whether the end tag as a token is part of a value: if that is not closed."""
        if not isinstance(self._value, TaggedValue):
            return False
        end = "\0" if self._reads_end_token else tag + "\0"
        return not self._value.closes(end)

    def read_end_as_text(self) -> None:
        """Read the end tag as text from now on: it was quoted as a token."""
        self._reads_end_token = False
        self._tags = self._text_tags
        if isinstance(self._value, TaggedValue):
            self._value.read_end_as_text()

    def read(self) -> str:
        """What more is certain, as JSON text."""
        json_text = ""
        while not self.is_done:
            if self._value is not None:
                json_text += self._value.read()
                if not self._value.is_done:
                    break
                self._end_value(self._value)
                continue
            match = self._unread.match_next(self._tags.key)
            if match is not None and match.partial:
                break
            json_text += self._accept(match) if match else self._accept_other()
        return json_text

    def _end_value(self, value: TaggedValue | MendedObject) -> None:
        """Go on after a value."""
        self.is_done = self.is_broken = value.is_broken
        if isinstance(value, MendedObject):
            self.closing = value.closing
            self.is_json = True
        self._value = None

    def _accept(self, match: Any) -> str:
        """Go on after a tag; returns what it is in JSON."""
        self._has_tag = True
        if match["end"] is not None:
            self.is_done = True
            return ""
        if match["key"] is None:  # a closing tag, but not the last
            self._has_end_tag = True
            return ""
        key = match["key"].strip()
        if self.is_json or key in self._used_keys:  # of two values JSON keeps one
            self.is_done = self.is_broken = True
            return ""
        separator = ", " if self._used_keys else ""
        self._used_keys.add(key)
        self._value = self._open_value(key, match)
        return f"{separator}{to_json(key)}: "

    def _open_value(self, key: str, match: Any) -> TaggedValue:
        """The reader of the value after a tag."""
        tags, text_tags = self._tags, self._text_tags
        if tags.quoted_value_end and match["quoted"] is not None:
            tags = text_tags = ParameterTags(tags.key, tags.quoted_value_end)
        keys = self._schema.keys
        is_in_line = not match[0].endswith("\n")
        return TaggedValue(
            self._unread,
            tags.for_value(keys, is_in_line=is_in_line),
            text_tags.for_value(keys, is_in_line=is_in_line),
            types=self._schema.member(key).types,
            used_keys=self._used_keys,
        )

    def _accept_other(self) -> str:
        """What comes next is no tag of the call. Nothing of it is emitted."""
        if not self._has_tag and self._unread.match_next(_JSON_START) is not None:
            self._has_tag = True
            self._value = MendedObject(self._unread, self._schema.keys)
            return ""
        self.is_done = True
        rest = self._unread.text.strip()
        is_cut_key = self._unread.is_complete and _is_key_tag(rest)
        if is_cut_key or not self._has_tag:
            self.is_broken = True  # </function> <param    <function=read> Done.
        elif not self._has_end_tag:  # </parameter> Done.    But not </func
            is_text = rest[:1] not in {"", "<"}
            self.is_broken = is_text or not self._unread.is_complete
        return ""


class TaggedValue:
    """Reads a value up to the tag that ends it. A string is emitted as it grows.

    A value that was never closed ends before the next key of the tool's, or with the
    call. It is broken if that key came before, if a closing tag is in it, or what looks
    like one at its end; and if the reply ends in it and any tag of the format is in it:
    then nobody can tell where it ends (L-133).
    """

    def __init__(
        self,
        unread: UnreadText,
        tags: ParameterTags,
        text_tags: ParameterTags,
        *,
        types: set[str],
        used_keys: set[str],
    ) -> None:
        """`text_tags` are its tags once the end tag as a token was quoted in it."""
        self.is_done = False
        self.is_broken = False
        self._unread = unread
        self._end = tags.value_end
        self._end_as_text = text_tags.value_end
        self._next_end = self._end  # and `later_tag`, once a closing tag was quoted
        self._later_tag = tags.later_tag
        self._any_tag = regex.compile(tags.any_tag)
        self._tag_at_start = regex.compile(rf"\s*(?:{tags.any_tag})")
        self._tag_at_end = regex.compile(rf"(?:{tags.any_tag})\s*\Z")
        self._elements = OpenElements()
        self._has_quoted_tag = False
        self._has_tag_inside = False  # a tag of the format stands anywhere in it
        self._types = types
        self._used_keys = used_keys
        self._is_string = types == {"string"}
        self._can_be_string = not types or "string" in types
        self._start = ""  # of its text, as long as a tag
        self._text = ""  # as far as it was read; of a string, its end
        self._opening = '"'  # emitted with the next text

    def read(self) -> str:
        """What more is certain, as JSON text."""
        json_text = ""
        while not self.is_done:
            before = self._unread.take_until(self._next_end)
            json_text += self._emit(before.text)
            if before.kind == "missing" and not self._unread.is_complete:
                return json_text
            is_own = self._is_own_closing_tag(before)
            if is_own or before.kind in {"text", "quoted"}:  # the value goes on
                json_text += self._emit(before.tag)
                if before.kind == "quoted" and not is_own:
                    self._has_quoted_tag = True
                    self._update_next_end()
                continue
            self.is_done = True
            self.is_broken = self._is_unreadable(before)
        return json_text if self.is_broken else json_text + self._end_of_value()

    def closes(self, end_of_call: str) -> bool:
        """Whether its closing tag has come, if the call ends now."""
        match = self._end.compiled.search(self._unread.text + end_of_call)
        return TextBefore("", match).kind == "closed"

    def read_end_as_text(self) -> None:
        """Read the end tag as text from now on."""
        self._end = self._end_as_text
        self._update_next_end()

    def _update_next_end(self) -> None:
        """After a quoted closing tag, a `later_tag` makes it unreadable."""
        self._next_end = self._end
        if self._has_quoted_tag:
            source = f"(?P<unreadable>{self._later_tag})|{self._end.source}"
            self._next_end = replace(self._end, source=source)

    def _end_of_value(self) -> str:
        return '"' if self._is_string else value_as_json(self._text, self._types)

    def _is_own_closing_tag(self, before: TextBefore) -> bool:
        """Whether it ends an element that the value has opened: a file may be XML.

        <parameter>5</parameter>
        """
        is_tag = before.kind in {"quoted", "unreadable"} and self._can_be_string
        return is_tag and self._elements.has_open(before.tag)

    def _emit(self, text: str) -> str:
        """Take a part of the value; returns what is certain of it."""
        self._has_tag_inside |= bool(
            self._any_tag.search(self._text[-TAG_LENGTH:] + text)
        )
        self._text += text
        self._elements.read(text)
        self._start = (self._start + text)[:TAG_LENGTH]
        if not self._is_string:
            return ""
        self._text = self._text[-TAG_LENGTH:]
        opening = self._opening
        self._opening = ""
        return opening + escape_json(text)

    def _is_unreadable(self, before: TextBefore) -> bool:
        """Whether nobody can tell where the value ends that has just ended."""
        if self._has_tag_at_edge() or self._is_other_type(before):
            return True
        # A tag, rightly written or not, may be near its end.
        has_tag = "<" in self._text or self._text.rstrip().endswith(">")
        is_doubtful = self._has_quoted_tag or has_tag
        match before.kind:
            case "missing":  # the reply was cut in it, perhaps in the tag of a key
                # After its closing tag came <n>5: meant as an argument, which is none.
                cut_tag = _CLOSING_TAG.sub("", before.cut_tag)
                return is_doubtful or self._has_tag_inside or _is_key_tag(cut_tag)
            case "next_key" | "unclosed":
                is_used = before.tag in self._used_keys
                return is_doubtful or is_used or not self._text.strip()
        return before.kind == "unreadable"

    def _has_tag_at_edge(self) -> bool:
        """Whether it begins or ends with a tag of the format.

        At its end the tag may close an element of its own: <a><parameter>5</parameter>
        """
        if self._tag_at_start.match(self._start):
            return True
        has_last = self._tag_at_end.search(self._text) is not None
        return has_last and not self._elements.has_closed_last

    def _is_other_type(self, before: TextBefore) -> bool:
        """Whether it is of another type than the schema's, and a tag may be why."""
        if self._can_be_string:
            return False
        if not value_as_json(self._text, self._types).startswith('"'):
            return False
        return before.kind != "closed" or _ANY_TAG.search(self._text) is not None


def _is_key_tag(text: str) -> bool:
    """Whether a text begins with a tag that closes nothing, or with half of one."""
    text = text.lstrip()
    return text.startswith("<") and text[1:2] not in {"", "/"}


_CLOSING_TAG: Final = re.compile(r"</[\w:]*>?")


class OpenElements:
    """Which elements are open in a value that is XML, of the names of calls' tags."""

    def __init__(self) -> None:
        self.has_closed_last = False  # its last closing tag has an opening tag before
        self._open: set[str] = set()
        self._rest = ""  # at the end of the text: it may become a tag

    def read(self, text: str) -> None:
        """Read on in the value."""
        text = self._rest + text
        n_read = 0
        for tag in _ELEMENT_TAG.finditer(text):
            n_read = tag.end()
            if tag["slash"]:
                self.has_closed_last = tag["name"] in self._open
                self._open.discard(tag["name"])
            else:
                self._open.add(tag["name"])
        self._rest = text[n_read:][-_ELEMENT_TAG_LENGTH:]

    def has_open(self, tag: str) -> bool:
        """Whether the element is open that a closing tag ends; white space aside."""
        name = _CLOSING_NAME.match(tag)
        return name is not None and name[1] in self._open


_ELEMENT_TAG_LENGTH: Final = 30  # letters, at most
_CLOSING_NAME: Final = re.compile(r"\s*</([\w:]+)>")
_ELEMENT_TAG: Final = re.compile(
    r"""(?x)
    < (?P<slash> / )?
    (?P<name> param(?:eter)? | function | invoke | arg_key | arg_value
      | (?:minimax:)? tool_call )
    (?= [\s>/=] ) (?(slash) > )
    """
)
_ANY_TAG: Final = re.compile(r"</?\w")


# -- 3 reader --------------------------------------------------------------------------
#
#     CallReader              reads the tag and the name, then by one of these
#         TaggedArguments     tags and values in turn
#         JsonArguments       JSON, which is mended as it is read
#         ForeignCalls        whole calls
#
# They share one UnreadText: each takes from its front what is certain.


class CallState(Enum):
    """What a CallReader reads next."""

    NAME = auto()  # with the tag before it
    ARGUMENTS = auto()
    FOREIGN = auto()
    ENDED = auto()  # whether an argument follows
    DONE = auto()


# In the name that was matched, an id as Mistral's templates want it.
_MISTRAL_ID: Final = re.compile(r"\[CALL_ID\]([A-Za-z0-9]{9})(?=\[|\s|\{)")
# An argument after the end of its call: that tag came too early.
_LATE_TAG: Final = Pattern(
    r"""(?x:
        (?: [^<]{0,99}+ </(?:function|tool_call|invoke|minimax:tool_call)> ){0,9}
        [^<]{0,99}+ </? (?: param | parameter | arg_key | arg_value ) [ =>]
    )""",
    example="\n</tool_call>\n<parameter=n>",
    near_miss="\n<tool_call>",
)
_LATE_MEMBER: Final = Pattern(
    r"""(?x:
        \s* [,;:]? \s* ["'] [^"'\n]{0,99} ["'] \s* [,:}\]]
      | \s* [,;:] \s* \w{0,99} ["']? \s* :
    )""",
    example=', "n": 5',
    near_miss=", and done",
)
_LATE_TAG_OR_MEMBER: Final = Pattern(
    f"{_LATE_TAG.source}|{_LATE_MEMBER.source}",
    example="\n<parameter=n>",
    near_miss=", and done",
)


class CallReader:
    """Reads one call, or one block of foreign calls: `feed` it, or `finish` it once.

        NAME --> ARGUMENTS --> ENDED --> DONE    a call; is_call, if it was offered
             --> FOREIGN   ------------> DONE    is_call, if the parser finds calls
             --------------------------> DONE    no call: its tag is text

    The call of a tool that was not offered is read, too, to find out where it ends.
    """

    def __init__(
        self,
        tool_format: ToolCallFormat,
        *,
        tools: Sequence[Tool],
        max_calls: int,
        reply: ReplyDeltas,
    ) -> None:
        """Names and arguments go to `reply`."""
        self.is_call = False
        self.is_broken = False  # a call, of whose arguments some cannot be read
        self._format = tool_format
        self._offered = parameters_by_name(tools)
        self._reply = reply
        self._unread = UnreadText()
        self._opening = "{"  # emitted with the first of the arguments
        # One for each state in which arguments are read; the first needs the name.
        self._arguments: TaggedArguments | JsonArguments | None = None
        self._foreign = ForeignCalls(self._unread, tool_format, tools, max_calls)
        # Mistral's models write both of its syntaxes, whatever their template prints.
        has_name = not tool_format.is_foreign or tool_format.start == MISTRAL_START
        self._state = CallState.NAME if has_name else CallState.FOREIGN
        self._is_last = max_calls == 1  # of all that the client may be given
        self._is_over = False  # the reply is

    @property
    def is_open(self) -> bool:
        """Whether it is a call of which arguments may follow."""
        return self.is_call and self._state is not CallState.ENDED

    @property
    def is_done(self) -> bool:
        """Whether it has read all of the call."""
        return self._state is CallState.DONE

    @property
    def rest(self) -> str:
        """Once it is done: the text after the call."""
        return self._unread.text

    @property
    def has_more(self) -> bool:
        """Once it is done: whether other text or calls follow those that were read."""
        return bool(self.rest.strip()) or self._foreign.n_left_out > 0

    def feed(self, text: str) -> str:
        """Read on in `text`. Returns what it took, if that is text and no call."""
        self._unread.text += text
        unread_text = self._unread.text
        if self._state is CallState.NAME:
            self._read_name()
        if self._state is CallState.ARGUMENTS:
            self._read_arguments()
        if self._state is CallState.FOREIGN:
            self._read_foreign()
        if self._state is CallState.ENDED:
            self._read_late_argument()
        if self.is_call:
            return ""
        n_taken = len(unread_text) - len(self._unread.text)
        return unread_text[:n_taken]

    def finish(self, text: str) -> str:
        """Read on in `text`, after which the reply is over. Then it is done."""
        self._unread.is_complete = True
        self._is_over = True
        return self.feed(text)

    def note_tokens(self) -> None:
        """From now on its end tag would come by `feed_end`, so any other is text."""
        self._unread.has_tokens = True

    def feed_end(self, tag: str) -> str:
        """Read on in the tag that ends the call, which is a token of its own.

        A string in JSON, or a value that has no closing tag, may quote it so: some
        models write it in no other way.
        """
        arguments = self._arguments
        if self._state is CallState.FOREIGN:
            self._foreign.note_end()
        if self._state in {CallState.FOREIGN, CallState.ENDED}:
            return self.feed(tag)
        if arguments is not None and arguments.quotes_end(tag):
            arguments.read_end_as_text()
            return self.feed(tag)

        end = tag
        if isinstance(arguments, TaggedArguments):
            end = arguments.end_token(tag)
        self._unread.is_complete = True  # of this call no more will come
        text = self.feed(end)
        self._unread.is_complete = False
        # What has not become an end is text: of that the tag is a part, not \0.
        self._unread.text = self._unread.text.replace("\0", tag)
        return text.replace("\0", tag)

    def _read_name(self) -> None:
        """Read the tag and the name, and choose who reads the arguments."""
        match = self._unread.match_next(CALL_START)
        if match is None:
            self._read_other_start()
            return
        if match.partial:
            return

        syntax = CALL_SYNTAXES[match.lastgroup]
        name = match[match.lastgroup]
        if name in self._offered:
            self.is_call = True
            call_id = _MISTRAL_ID.search(match[0])
            self._reply.emit_name(name, call_id[1] if call_id else None)
        schema = SchemaPart.of_tool(self._offered.get(name, {}))
        if syntax.tags is None:
            # Of {"name": "ls"} the only bracket is read as that of its arguments.
            is_member = match.lastgroup == "hermes" and match[0].endswith("{")
            self._arguments = JsonArguments(
                self._unread, schema.keys, is_member=is_member
            )
        else:
            self._arguments = TaggedArguments(
                self._unread, syntax.tags, schema, end_tag=self._format.end
            )
        self._state = CallState.ARGUMENTS

    def _read_other_start(self) -> None:
        """After the tag comes what none of the syntaxes has there."""
        match = WHOLE_JSON_START.compiled.match(self._unread.text, partial=True)
        if match is not None and not match.partial:
            self._state = CallState.FOREIGN
            return
        if match is not None and not self._unread.is_complete:
            return
        # The tag is text; or a letter of what only looked like a call without its tag.
        text = self._unread.text.lstrip()
        tag = self._format.start
        self._unread.text = text[len(tag) if text.startswith(tag) else 1 :]
        self._state = CallState.DONE

    def _read_arguments(self) -> None:
        assert self._arguments is not None
        json_text = self._opening + self._arguments.read()
        self._opening = ""
        if json_text and self.is_call:
            self._reply.emit_arguments(json_text)
        if self._arguments.is_done:
            self._state = CallState.ENDED
            if self._unread.is_cut:
                self._unread.text = ""

    def _read_late_argument(self) -> None:
        """Close the arguments, unless another one follows."""
        assert self._arguments is not None
        is_broken = self._arguments.is_broken
        if not (is_broken or self._is_last):
            late = _LATE_TAG
            if isinstance(self._arguments, JsonArguments):
                late = _LATE_MEMBER
            elif self._arguments.is_json:
                late = _LATE_TAG_OR_MEMBER
            match = late.compiled.match(self._unread.text, partial=True)
            if match is not None and match.partial and not self._is_over:
                return
            is_broken = match is not None and not match.partial
        self._state = CallState.DONE
        self.is_broken = self.is_call and is_broken
        if self.is_call and not is_broken:
            self._reply.emit_arguments(self._arguments.closing)

    def _read_foreign(self) -> None:
        calls = self._foreign.read()
        if not self._foreign.is_done:
            return
        self._state = CallState.DONE
        if all(call.name in self._offered for call in calls):
            for call in calls:
                self.is_call = True
                self._reply.emit_name(call.name, call.call_id)
                self._reply.emit_arguments(call.arguments)


# -- 4 reply ---------------------------------------------------------------------------


class ReplyParser:
    """One reply: generated text -> the deltas of an OpenAI chat."""

    def __init__(
        self,
        splitter: ReasoningStreamSplitter,
        tool_format: ToolCallFormat | None,
        *,
        tools: Sequence[Tool],
        ids: Iterator[str],
        max_calls: int = sys.maxsize,
    ) -> None:
        """`ids` are for the calls. Without a format the splitter must find no calls.

        After `max_calls` nothing more is emitted.
        """
        self.n_calls = 0  # complete ones
        self.is_broken = False  # it ends in a call that cannot be read
        self.has_more = False  # after `max_calls`, of the text that was fed
        self._splitter = splitter
        self._format = tool_format
        self._tools = tools
        self._max_calls = max_calls
        self._reply = ReplyDeltas(ids)
        self._reader: CallReader | None = None  # of the open call
        self._has_tokens = False  # some text was literal: then a tag is a token
        self._is_over = False  # no more text will come

    @property
    def is_behind_call(self) -> bool:
        """Whether a call has ended, and what follows is waited for to close it."""
        reader = self._reader
        return reader is not None and reader.is_call and not reader.is_open

    def feed(self, text: str, *, literal: bool = False) -> list[JsonObject]:
        """What is certain now; `literal` as in ReasoningStreamSplitter.feed.

        Nothing once `is_broken`: the reply ends there.
        """
        if self.is_broken or self.n_calls >= self._max_calls:
            return []
        n_before = len(self._reply.deltas)
        self._has_tokens |= literal
        if self._is_end_tag(text, literal=literal):
            pieces = self._read_call(text, is_end=True)
        else:
            pieces = self._splitter.feed(text, literal=literal)
        self._dispatch(pieces)
        return self._reply.deltas[n_before:]

    def _is_end_tag(self, text: str, *, literal: bool) -> bool:
        """Whether it is the token that ends the open call, and known to be one."""
        if self._format is None or self._reader is None:
            return False
        return self._has_tokens and not literal and text == self._format.end

    def finish(self, *, closes: bool = True) -> list[JsonObject]:
        """What was held back, when no more text will come.

        If `closes`, the arguments of a call that is still open are closed. If not, they
        stay cut: why(L-86), Claude Code runs whatever is valid, half a file, too.
        """
        self._is_over = True
        if self.is_broken or self.n_calls >= self._max_calls:
            return []
        n_before = len(self._reply.deltas)
        is_call_open = self._reader is not None and self._reader.is_open
        if self._splitter.in_call and (closes or not is_call_open):
            self._dispatch(self._read_call(""))
        if not self.is_broken:
            self._dispatch(self._splitter.finish())
        return self._reply.deltas[n_before:]

    def message(self) -> JsonObject:
        """The whole reply, as far as it was emitted."""
        return self._reply.message()

    def _dispatch(self, pieces: list[Piece]) -> None:
        """Texts become deltas, a call goes to its reader."""
        while pieces:
            piece = pieces.pop(0)
            if piece.kind == "tool":  # always the last one
                pieces = self._read_call(piece.text)
            else:
                self._reply.emit_text(piece.kind, piece.text)

    def _read_call(self, text: str, *, is_end: bool = False) -> list[Piece]:
        """Read on in the open call; returns what is no call, and what follows it.

        `is_end`: the text is the token that ends it.
        """
        assert self._format is not None
        if self._reader is None:
            self._reader = CallReader(
                self._format,
                tools=self._tools,
                max_calls=self._max_calls - self.n_calls,
                reply=self._reply,
            )
        reader = self._reader
        if self._has_tokens and self._format.end != "\0":
            reader.note_tokens()
        if is_end:
            other_text = reader.feed_end(text)
        elif self._is_over:
            other_text = reader.finish(text)
        else:
            other_text = reader.feed(text)
        pieces = self._splitter.add_text(other_text)
        if reader.is_broken:
            self.is_broken = True
            return []
        if reader.is_done:
            self._reader = None
            self.n_calls = len(self._reply.calls)
            if self.n_calls >= self._max_calls:
                self.has_more = reader.has_more
                return pieces  # what follows is not the client's
            pieces += self._splitter.resume(reader.rest, called=reader.is_call)
        return pieces


# region CALL FORMS ============================================================
# How a call is written whose arguments fit the tool's schema.
#
#     {"path": string, "n": integer}, required: path
#     hermes   <tool_call>{"name": "read", "arguments":   JSON of the schema   }...
#     qwen     <tool_call><function=read>   <parameter=path> any text </parameter>
#                                           (<parameter=n> JSON </parameter>)? ...
#
# A call that is forced, or of a tool that is `strict`, is generated by its form, so its
# arguments always fit. JSON is the grammar compiler's work. Between tags the arguments
# come in the order of the schema, and only those that it names.
#
# Some schemas cannot be written between tags. Then the form has a `fault`: a forced
# call has any arguments, and a request with a strict tool is refused. Of foreign
# formats and of MiniCPM's syntax no more than the opening of a call is known.
#
# Public   call_forms
# Uses     REPLY GRAMMAR, CALL TEXT, CALL SYNTAXES
# Thread   any; pure

# Keywords that say more of the arguments than which there are: not between tags.
_UNTAGGED_KEYWORDS: Final = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const"),
    *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_CONTAINERS: Final = {"array", "object"}
_MAX_DEPTH: Final = 20  # of unions in unions
_MAX_CHOICES: Final = 1_000  # ways to write one value


class _NoForm(Exception):
    """A schema cannot be written between tags."""


def call_forms(
    tool_format: ToolCallFormat,
    tools: Sequence[Tool],
    *,
    name: str | None = None,
    strict_tools: Mapping[str, str],
) -> list[CallForm]:
    """The form of a call of each tool, or of the one called `name`.

    `strict_tools`: the path in the body of their schemas, by name.
    """
    forms = []
    for tool_name, parameters in parameters_by_name(tools).items():
        if name not in (None, tool_name):
            continue
        (opening,) = tool_call_prefixes(tool_format, tools, name=tool_name)
        form = CallForm(opening, schema_path=strict_tools.get(tool_name, ""))
        try:
            if fault := find_excess(parameters):
                raise _NoForm(fault)
            is_lenient = not form.schema_path  # it is no strict tool
            parts = _call_parts(tool_format, parameters, is_lenient=is_lenient)
        except _NoForm as error:
            forms.append(form._replace(fault=str(error)))
            continue
        if parts is not None and tool_format.syntax == "glm":
            # The parts have the tags of all keys, that of the first one, too.
            form = form._replace(opening=opening.removesuffix("<arg_key>"))
        forms.append(form._replace(parts=parts))
    return forms


def _call_parts(
    tool_format: ToolCallFormat, parameters: Schema, *, is_lenient: bool
) -> CallParts | None:
    """What follows the opening; None: nothing is known of this syntax.

    Raises _NoForm.
    """
    syntax = CALL_SYNTAXES.get(tool_format.syntax)
    if syntax is None or (syntax.tags is not None and syntax.spelling is None):
        return None
    if syntax.spelling is not None:
        writer = _TaggedForm(
            syntax.spelling, parameters, gap=tool_format.gap, is_lenient=is_lenient
        )
        return writer.parts()

    schema = {"type": "object", **parameters}
    parts: list[CallPart] = []
    if tool_format.gap == "[CALL_ID]":  # read[CALL_ID]aB3dE6gH9[ARGS]{
        parts.append(TextValue(end="[ARGS]", pattern="^[a-zA-Z0-9]{9}$"))
    parts += [Blanks(), JsonValue(schema, is_lenient)]
    for piece in re.split(r"(\n)", syntax.json_end):
        parts.append(Blanks() if piece == "\n" else piece)
    return tuple(parts)


class _TaggedForm:
    """Makes the parts of a call whose arguments stand between tags."""

    def __init__(
        self,
        spelling: ArgumentSpelling,
        parameters: Schema,
        *,
        gap: str,
        is_lenient: bool,
    ) -> None:
        self._spelling = spelling
        self._parameters = parameters
        self._gap = gap
        self._is_lenient = is_lenient
        # What ends JSON or a constant: the tag that ends a text, after no text.
        self._value_end = TextValue(
            end=spelling.value_end,
            drops_line_break=spelling.has_line_break,
            max_length=0,
        )

    def parts(self) -> CallParts:
        """All arguments, in the order of the schema. Raises _NoForm."""
        parameters = self._parameters
        for keyword in _UNTAGGED_KEYWORDS:
            if keyword in parameters:
                raise _NoForm(f"{keyword!r} cannot be enforced for these arguments")
        properties = parameters.get("properties") or {}
        required = parameters.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _NoForm("'properties' or 'required' is of another type")
        if not properties and parameters.get("additionalProperties", True):
            raise _NoForm("it names no properties")

        parts: list[CallPart] = [self._spelling.first]
        for key in dict.fromkeys([*properties, *map(str, required)]):
            argument = self._argument(key, properties.get(key, {}))
            if key not in required:
                argument = (OneOf((argument, ())),)  # it, or nothing
            parts += argument
        parts.append(self._spelling.end)
        return tuple(parts)

    def _argument(self, key: str, schema: object) -> CallParts:
        if not re.fullmatch(r"[^<>\s\"']{1,200}", key):
            raise _NoForm(f"the name {key!r:.60} cannot be written in a tag")
        tag = self._spelling.key.format(key=key, gap=self._gap)
        choices = self._value_choices(schema)
        if not choices:
            raise _NoForm(f"{key!r:.60} has no values")
        if SchemaPart(schema, self._parameters).types & _CONTAINERS:
            choices = [_without_container(choice) for choice in choices]
        return (tag, OneOf(tuple(choices)))

    def _value_choices(self, schema: object, depth: int = 0) -> list[CallParts]:
        """The ways to write a value, each with the tag that ends it."""
        schema = SchemaPart(schema, self._parameters).resolved
        if schema is True or schema == {}:
            return [self._text({})]
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            raise _NoForm("a schema of a property cannot be read")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._branch_choices(keyword, schema[keyword], depth)
        return self._plain_choices(schema, depth)

    def _branch_choices(
        self, keyword: str, branches: object, depth: int
    ) -> list[CallParts]:
        if not isinstance(branches, list):
            raise _NoForm(f"{keyword!r} is no list")
        choices: list[CallParts] = []
        for branch in branches:
            choices += self._value_choices(branch, depth + 1)
            if len(choices) > _MAX_CHOICES:  # unions of unions double at each level
                raise _NoForm(f"{keyword!r} has too many parts")
        return choices

    def _plain_choices(self, schema: Schema, depth: int) -> list[CallParts]:
        types = SchemaPart(schema, self._parameters).types
        if "const" in schema:
            return [self._constant(schema["const"], types)]
        if isinstance(schema.get("enum"), list):
            return [self._constant(value, types) for value in schema["enum"]]

        match schema.get("type"):
            case list() as names:
                branches = [{**schema, "type": name} for name in names]
                return self._branch_choices("type", branches, depth)
            case "string":
                return [self._text(schema)]
            case str():
                definitions = {
                    name: self._parameters[name]
                    for name in ("$defs", "definitions")
                    if name in self._parameters
                }
                value = JsonValue({**definitions, **schema}, self._is_lenient)
                return [(value, self._value_end)]
        raise _NoForm("a property has no type")

    def _text(self, schema: Schema) -> CallParts:
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and "|" in pattern:
            raise _NoForm("a pattern with alternatives cannot be enforced here")
        value = self._value_end._replace(
            min_length=schema.get("minLength"),
            max_length=schema.get("maxLength"),
            pattern=pattern,
        )
        return (value,)

    def _constant(self, value: object, types: set[str]) -> CallParts:
        text = value if isinstance(value, str) else to_json(value)
        if value_as_json(text, types) != to_json(value):  # "5", if 7 may be there, too
            raise _NoForm(f"{value!r:.60} would be read as another value")
        return (text, self._value_end)


def _without_container(choice: CallParts) -> CallParts:
    """A value that is text, but not what would be read as an array or an object."""
    value = choice[0]
    if isinstance(value, TextValue):
        return (value._replace(is_no_container=True),)
    return choice


# region TENANTS ===============================================================
# What outlives a request: the stores of each tenant, and the state of the server.
#
# A tenant is whoever shares nothing with others: everybody is one, or CACHE_ISOLATION
# parts keys or users. Each tenant has stores of its own, so that nothing crosses, not
# even by time. Who has the key of several users sees all of their stores (`views`).
#
# Public   ServerState, Proxy, ProxyBody, ProxyPhase, Tenants, TenantStores,
#          RecentRequest, LiveRequest, LiveReply, Divergence, note_refusal, MAX_RECENT,
#          MAX_DIVERGENCES, MAX_REFUSALS
# Uses     all
# Owns     _tenants_lock
# Thread   any

MAX_RECENT: Final = 200  # requests on the status page, as are the next two
MAX_DIVERGENCES: Final = 20
MAX_REFUSALS: Final = 50


class RecentRequest(RequestFacts):
    """A request that has ended, on the status page."""

    time: float  # Unix seconds: when it ended
    started_at: float  # the same: when it came
    waited_seconds: float  # as `waited`
    waited_for_request: str | None  # the id of the request whose prefix it waited for
    tokens_per_second: float | None  # of the reply; None if there was none
    client: str  # by its User-Agent
    title: str  # how the conversation begins; "" without ENABLE_REQUEST_LOGGING


class LiveRequest(TypedDict):
    """A request that has not ended, on the status page."""

    id: str
    api: str  # "chat", "completion", "messages"
    session: str
    prompt: int  # tokens, as are the next three
    out: int
    max_tokens: int  # the most that `out` can be
    cached: int
    done: int  # of the prompt: they have KV
    phase: str  # "queued", "prefill", "decode"
    match: str  # what is reused; "-" until it runs
    tokens_per_second: float | None  # of the reply; None before it begins
    seconds: float  # since it came
    first_token_seconds: float | None  # from then to its first token; None before that
    waited_seconds: float
    waiting_for: WaitReason | None  # None: it waits no more
    waiting_for_request: str | None  # the id of the request whose prefix it waits for
    prefill_left_seconds: float | None  # None: it does not prefill, or nobody knows
    client: str  # by its User-Agent
    title: str  # how the conversation begins; "" without ENABLE_REQUEST_LOGGING


class LiveReply(Protocol):
    """A request that has not ended."""

    def describe(self) -> LiveRequest:
        """Where it is by now. For any thread."""


class Divergence(TypedDict):
    """Tokens that a session had sent before, and that were prefilled again."""

    time: float  # Unix seconds
    id: str
    session: str
    again: int  # tokens
    why: str  # quotes the messages only with ENABLE_REQUEST_LOGGING


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStores:
    """What remembers the requests of one tenant.

    Each store has its own lock. The dict and the deques need none: an item is added or
    removed, or all are copied, in one step of the interpreter.
    """

    healing_store: HealingStore  # thinking that clients strip
    ledger: Ledger  # tokens of conversations, to be replayed
    planner: PromptPlanner  # makes prompts from these two
    session_index: SessionIndex  # figures of the last requests
    session_turn_store: SessionTurnStore  # digests of the last messages
    history: RequestHistory  # requests to compare the next one with
    live: dict[str, LiveReply]  # that have not ended, by request id
    recent: deque[RecentRequest]  # that have ended, the oldest first
    divergences: deque[Divergence]  # the oldest first
    refusals: deque[Refusal]  # the oldest first

    @classmethod
    def empty(
        cls, config: Config, metrics: CacheMetrics, saved: TenantRecords
    ) -> TenantStores:
        """Stores without anything in them. What they remember is put into `saved`."""
        healing_store = HealingStore(saved, ttl_seconds=config.ledger_ttl_seconds)
        ledger = Ledger(config, saved)
        return cls(
            healing_store=healing_store,
            ledger=ledger,
            planner=PromptPlanner(config, metrics, ledger, healing_store),
            session_index=SessionIndex(config),
            session_turn_store=SessionTurnStore(),
            history=RequestHistory(config),
            live={},
            recent=deque(maxlen=MAX_RECENT),
            divergences=deque(maxlen=MAX_DIVERGENCES),
            refusals=deque(maxlen=MAX_REFUSALS),
        )

    def load(self) -> None:
        """Remember what an earlier server has saved."""
        self.ledger.load()
        self.healing_store.load()

    def expire(self, now: float) -> None:
        """Drop what was not used for too long; the other stores hold a fixed number."""
        self.ledger.expire(now)
        self.healing_store.expire(now)
        self.session_index.expire(now)
        self.history.expire(now)


class Tenants:
    """The states of tenants that have sent requests, by name. For any thread."""

    MAX_TENANTS: Final = 500  # beyond it, the least recently used user goes

    def __init__(self) -> None:
        self._tenants_lock = threading.Lock()  # guards _states
        self._states: OrderedDict[str, ServerState] = OrderedDict()  # as used

    def get(self, tenant: str) -> ServerState | None:
        """The state of a tenant."""
        with self._tenants_lock:
            return self._states.get(tenant)

    def keep(self, state: ServerState) -> ServerState:
        """Let this be the state of its tenant, unless there is one; that which is.

        Its tenant is now the one that was used last.
        """
        with self._tenants_lock:
            state = self._states.setdefault(state.tenant, state)
            self._states.move_to_end(state.tenant)
        return state

    def states(self) -> list[ServerState]:
        """All of them, the least recently used first."""
        with self._tenants_lock:
            return list(self._states.values())

    def drop_users(self, max_ledger_bytes: int) -> list[str]:
        """Drop the least recently used users, and return their names.

        So many that at most MAX_TENANTS are left, whose ledgers take at most
        `max_ledger_bytes`. Keys stay, and so do users with a request under way.
        """
        users = [state for state in self.states() if "/" in state.tenant]
        ledger_bytes = {state.tenant: state.stores.ledger.nbytes for state in users}
        n_left = len(users)
        bytes_left = sum(ledger_bytes.values())
        dropped: list[str] = []
        with self._tenants_lock:
            for state in users:
                n_bytes = ledger_bytes[state.tenant]
                frees_bytes = n_bytes > 0 and bytes_left > max_ledger_bytes
                if state.stores.live or not (n_left > self.MAX_TENANTS or frees_bytes):
                    continue
                self._states.pop(state.tenant, None)
                dropped.append(state.tenant)
                n_left -= 1
                bytes_left -= n_bytes
        return dropped

    def limit_ledgers(self, max_bytes: int) -> None:
        """Drop what the ledgers of all tenants hold for longest without a use."""
        ledgers = [state.stores.ledger for state in self.states()]
        while sum(ledger.nbytes for ledger in ledgers) > max_bytes:
            min(ledgers, key=lambda ledger: ledger.oldest_use()).drop_oldest()


ProxyPhase = Literal["off", "starting", "up", "port_taken", "given_up"]


class ProxyBody(TypedDict):
    """LiteLLM beside the server, as /health and /v1/status show it."""

    state: ProxyPhase
    url: str | None  # for clients on this machine; None: it is not ours, or not there


class Proxy:
    """The state of LiteLLM beside the server: MAIN sets it, STATUS shows it."""

    def __init__(self, config: Config) -> None:
        self.state: ProxyPhase = "off"
        self.was_reported = threading.Event()  # a state, by the keeper
        self._url = write_url(config.proxy_host, config.proxy_port)

    def body(self) -> ProxyBody:
        """Its state as of now; it has a URL while it is up or will be."""
        state = self.state
        return {
            "state": state,
            "url": self._url if state in ("starting", "up") else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Everything that outlives a request, as one tenant sees it."""

    config: Config
    engine: Engine
    metrics: CacheMetrics
    session_log: SessionLog
    records: RecordFile  # of all tenants
    started: int  # Unix seconds
    stores: TenantStores
    body_memory: BodyMemory
    proxy: Proxy
    tenant: str = ""  # "" is everybody; see CONFIG
    tenants: Tenants = field(default_factory=Tenants)  # that sent requests

    def for_tenant(self, tenant: str) -> ServerState:
        """The same server with the stores of a tenant.

        A tenant without stores gets new ones, which only keep() keeps: so nothing is
        left of a name that somebody has only asked about.
        """
        if not tenant:
            return self.keep()
        state = self.tenants.get(tenant)
        if state is not None:
            return state
        metrics = self.metrics.make_tenant(tenant)
        records = self.records.of_tenant(tenant)
        stores = TenantStores.empty(self.config, metrics, records)
        stores.load()
        return replace(self, tenant=tenant, stores=stores, metrics=metrics)

    def keep(self) -> ServerState:
        """Keep these stores; or return those that their tenant has got meanwhile."""
        state = self.tenants.keep(self)
        state.metrics.keep(state.tenant)
        return state

    def views(self) -> list[ServerState]:
        """Those of all tenants whose requests this one may see, itself the first."""
        others = [
            state
            for state in self.tenants.states()
            if state is not self and is_seen_by(self.tenant, state.tenant)
        ]
        return [self, *others]

    def limit_tenants(self) -> None:
        """Drop the least recently used users, and records, where all take too much."""
        for tenant in self.tenants.drop_users(self.config.ledger_max_bytes):
            self.metrics.drop_tenant(tenant)
        self.tenants.limit_ledgers(self.config.ledger_max_bytes)


def note_refusal(state: ServerState, refusal: Refusal, *, was_submitted: bool) -> None:
    """Log a request that got an error, and keep it for the status page.

    `was_submitted`: the engine had it, so it is counted among those that have ended.
    """
    logger.warning("%s", format_refusal(refusal))
    state.stores.refusals.append(refusal)
    if not was_submitted:
        state.metrics.add_refused()


# region REQUEST HANDLING ======================================================
# One request, from its parsed body to the bodies of its response.
#
#     ChatRequest      as every API means it
#     PlannedRequest   markers in the place of images; the prompt
#     PreparedRequest  checked; what the engine is to do
#     EngineEvent      prompt tokens have been read, a token, the end
#     deltas           ReplyDecoder: token -> text -> reasoning, content, tool calls
#     bodies           ResponseFormatter of the API that was called
#
# Whatever is wrong with a request is found before it is submitted: as a rule nothing of
# the response has been sent, so it can have a status code. (A stream that had to wait
# for memory has got pings. Its error is an event.) A reply is recorded before its last
# events are sent, because the client's next request may follow at once. A failed reply
# is only reported; of one that its client has left, what was shown is recorded (L-121).
#
# The bodies of a response come from an iterator, which gives None whenever nothing is
# new: then the HTTP server looks whether the client is still there.
#
# A field of a request that the model has to obey (a schema, a forced tool) becomes a
# constraint in SAMPLING. One that ends the reply (stop strings, one call only) belongs
# in ReplyDecoder.
#
# From other sections: a PromptPlan is a prompt, and what it takes to record its reply;
# part of it may be a guess until PromptPlanner.verify() was called. A RequestHandle is
# a submitted request: next_event() waits for the model, setting stop_reason ends it.
#
# Public   check_model_id, plan_request, prepare_request, PreparedRequest,
#          ReplyGeneration
# Uses     all
# Thread   connection

MAX_COUNTED_CONTEXTS: Final = 2  # of a prompt; its tokens beyond them are estimated
MIN_REPORTED_TOKENS: Final = 512  # prefilled again: for fewer no reason is given
MAX_TITLE_LENGTH: Final = 60  # characters
CONNECTION_NICENESS: Final = 5  # of the threads that render prompts (Linux)


# -- from a request to the engine ------------------------------------------------------


class PlannedRequest(NamedTuple):
    """A request and its prompt."""

    request: ChatRequest  # with markers in the place of its images
    model: LoadedModel
    images: Mapping[int, ImageTokens]  # by the id of their first marker
    plan: PromptPlan


def plan_request(
    state: ServerState, request: ChatRequest, *, counts_all: bool = False
) -> PlannedRequest:
    """Plan the prompt of a request; it may be too long.

    `counts_all`: all its tokens are made even so; otherwise those over twice the
    context are estimated.

    Raises NotReady; NotServed: another model is wanted, and STRICT_MODEL_NAMES is on;
    BadRequest: images or messages cannot be rendered; ContextTooLong: it is certain
    before all tokens are made; ClientGone: nobody waits any more.
    """
    model = state.engine.model.for_tenant(state.tenant)
    proxy_name = state.config.proxy_model_id or None
    if state.config.strict_model_names and request.model not in (None, proxy_name):
        check_model_id(model, request.model)
    request, images = _replace_images(state, model, request)
    if not counts_all:
        context = model.max_context_tokens
        max_counted = MAX_COUNTED_CONTEXTS * context
        request = replace(request, max_counted_tokens=max_counted)
        n_least = model.template.count_least_tokens(request, max_context_tokens=context)
        n_least = max(n_least, len(request.messages))  # each has a token at least
        if n_least > max_counted:
            raise ContextTooLong(n_least, context)
    plan = _plan_prompt(state, model, request)
    first_markers = {int(image.marker_ids[0]): image for image in images}
    return PlannedRequest(request, model, first_markers, plan)


def check_model_id(model: LoadedModel, model_id: str) -> None:
    """Raise NotServed for any model but the one that is loaded."""
    if model_id != model.model_id:
        sentence = f"the model {model_id[:200]!r} is not loaded, {model.model_id!r} is"
        raise NotServed(404, sentence, code="model_not_found")


def _replace_images(
    state: ServerState, model: LoadedModel, request: ChatRequest
) -> tuple[ChatRequest, list[ImageTokens]]:
    """The request with markers in the place of its images, and the images as tokens."""
    vision = model.vision
    secret = vision.secret if vision else b""
    if not state.config.cache_vlm_image_identity:
        secret = os.urandom(16)  # no image is ever the same as an earlier one
    request, sent_images = extract_images(
        request,
        state.config,
        has_vision=vision is not None,
        salt=state.tenant.encode() + secret,
    )
    if vision is None:
        return request, []

    check_client = request.check_client
    vision.check_headers(sent_images, check_client=check_client)
    images = [
        vision.image_tokens(digest, sent_image, check_client=check_client)
        for digest, sent_image in sent_images.items()
    ]
    texts = {image.digest: (image.text, image.marker_ids) for image in images}
    return replace(request, image_tokens=texts), images


def _plan_prompt(
    state: ServerState, model: LoadedModel, request: ChatRequest
) -> PromptPlan:
    is_chat = request.kind != "completion"
    if not is_chat or not state.config.cache_canonicalize_tool_context:
        return PromptPlan(rendered=model.template.render_prompt(request))
    room = model.max_context_tokens - 1
    return state.stores.planner.plan(request, model.template, room=room)


class PreparedRequest(NamedTuple):
    """A request that can be submitted."""

    request: ChatRequest  # with markers in the place of its images
    model: LoadedModel
    plan: PromptPlan
    tool_format: ToolCallFormat | None  # None: no tools, or none for this model
    engine_request: EngineRequest

    @property
    def session_id(self) -> str:
        """The client's, or a digest of how the conversation begins."""
        return self.engine_request.owner[1]

    def as_sent(self, reply_ids: Sequence[int] = ()) -> SentRequest:
        """What RequestHistory keeps of it once it is answered."""
        prompt_ids = self.engine_request.key.tokens
        conversation = self.plan.conversation
        return SentRequest(
            self.session_id,
            np.concatenate([prompt_ids, np.asarray(reply_ids, np.int32)]),
            conversation.messages,
            conversation.context_key,
            time.monotonic(),
            n_reply_tokens=len(reply_ids),
        )

    def in_client_terms(self, reason: MissReason | None) -> MissReason | None:
        """A reason whose message has the index that it has in the client's request."""
        if reason is None or reason.message_index is None:
            return reason
        index = self._find_sent_message(reason.message_index)
        return reason._replace(
            message_index=index,
            role=self.request.messages[index]["role"],
            sentence=f"message {index}: {reason.sentence}",
        )

    def _find_sent_message(self, canonical_index: int) -> int:
        """The index of the client's message that became a canonical message.

        Notes are messages of the client, too, and are folded into other canonical ones.
        So beginnings of the conversation are canonicalized: the message is the last of
        the shortest beginning that has this canonical message.
        """
        messages = self.request.messages
        canonicalize = self.model.template.canonicalize

        def n_canonical_messages(end: int) -> int:
            return len(canonicalize(messages[:end]))

        ends = range(1, len(messages) + 1)
        first = bisect_left(ends, canonical_index + 1, key=n_canonical_messages)
        digest = self.plan.conversation.messages[canonical_index].digest
        for end in ends[first:]:
            if canonicalize(messages[:end])[canonical_index].digest == digest:
                return end - 1
        raise AssertionError("the whole conversation has this canonical message")


def prepare_request(state: ServerState, request: ChatRequest) -> PreparedRequest:
    """Plan the prompt of a request and check all that can be refused.

    Raises what plan_request() raises, and BadRequest, or ContextTooLong for a prompt
    that leaves no token for the reply.
    """
    planned = plan_request(state, request)
    request = planned.request
    model = planned.model
    rendered = planned.plan.rendered
    max_reply_tokens = model.max_context_tokens - rendered.n_tokens
    if max_reply_tokens < 1:
        raise ContextTooLong(rendered.n_tokens, model.max_context_tokens)
    if any(token_id >= model.vocab_size for token_id in request.sampling.logit_bias):
        raise BadRequest("a token id is outside the vocabulary", field="logit_bias")

    model_format = ToolCallFormat.detect(
        model.template.source, model.family, tokenizer=model.tokenizer
    )
    can_call = request.tool_choice.mode != "none"
    tool_format = model_format if can_call else None
    constraints = make_constraints(
        model,
        request,
        in_reasoning=rendered.starts_in_reasoning,
        call_start=model_format.start if model_format else "",
        call_forms=_find_call_forms(
            request, tool_format, shown_tools=planned.plan.tools
        ),
    )
    engine_request = EngineRequest(
        key=_make_token_key(state, planned),
        images=_place_images(planned),
        owner=RequestOwner(state.tenant, _find_session_id(planned)),
        request_id=_shown_id(request),
        checkpoint_positions=_checkpoint_positions(rendered.positions),
        checkpoint_ids=_call_end_ids(model, request),
        # The first token comes with the last of the prompt, wanted or not.
        max_tokens=max(1, min(request.max_tokens, max_reply_tokens)),
        sampling=request.sampling,
        top_logprobs=request.top_logprobs if request.logprobs else -1,
        constraints=constraints,
    )
    _log_diagnostics(state.config, planned)
    return PreparedRequest(request, model, planned.plan, tool_format, engine_request)


def _shown_id(request: ChatRequest) -> str:
    """The id of a request in log and status."""
    return request.request_id[:8]


def _find_call_forms(
    request: ChatRequest,
    tool_format: ToolCallFormat | None,
    *,
    shown_tools: tuple[JsonObject, ...],
) -> Sequence[CallForm]:
    """How a call may be written that `tool_choice` demands, or if a tool is strict.

    A form fixes the order of the arguments. It is that of `shown_tools`, the same tools
    as the prompt has them: the model has not read the order in which they were sent.
    () if any call will do. Raises BadRequest: the model knows no calls.
    """
    mode, name = request.tool_choice
    must_call = mode in ("required", "named")
    if must_call and tool_format is None:
        raise BadRequest("this model's template knows no calls", field="tool_choice")
    if tool_format is None or not (must_call or request.strict_tools):
        return ()

    tools = (shown_tools or request.tools) + request.deferred_tools
    forms = call_forms(tool_format, tools, name=name, strict_tools=request.strict_tools)
    if must_call:
        return forms
    # The model need not call. If it calls a tool that is not strict, anything will do.
    return [form if form.schema_path else form._replace(parts=None) for form in forms]


def _make_token_key(state: ServerState, planned: PlannedRequest) -> TokenKey:
    """The prompt's tokens with their block hashes, those of the transcript reused."""
    plan = planned.plan
    ids = plan.rendered.ids
    block_size = state.config.prompt_cache_block_size
    first_hashes: Sequence[bytes] = ()
    if plan.transcript is not None:
        first_hashes = plan.transcript.reply.block_hashes
        first_hashes = first_hashes[: plan.n_replayed // block_size]

    salt = sha256(repr((planned.model.revision, state.tenant)).encode()).digest()
    hashes = block_hashes(ids, block_size, root=salt, first_hashes=first_hashes)
    return TokenKey(salt, ids, hashes)


def _place_images(planned: PlannedRequest) -> tuple[tuple[int, ImageTokens], ...]:
    """The images in the order of the prompt, each after its position."""
    ids = planned.plan.rendered.ids
    starts = image_starts(ids)
    return tuple((start, planned.images[int(ids[start])]) for start in starts)


def _find_session_id(planned: PlannedRequest) -> str:
    conversation = planned.plan.conversation
    start_key = b""  # of the messages up to the first one of the user
    for message, key in zip(
        conversation.messages, conversation.prefix_keys[1:], strict=False
    ):
        if message.role not in SYSTEM_ROLES:
            start_key = key
            break
    ids = planned.plan.rendered.ids
    return session_id_for(planned.request.session, ids, start_key=start_key)


def _checkpoint_positions(positions: PromptPositions) -> tuple[int, ...]:
    """Where a later request may leave this one, in tokens, ascending.

    That is at the end of the system prompt and of notes, at the last user message, at
    what a tool loop added after it, and at the end of the messages. Before the end of
    the system prompt nothing is worth a checkpoint (L-108).
    """
    last_user_start = positions.last_user_start or 0
    later_starts = [n for n in positions.message_starts if n >= last_user_start]
    chosen = {
        positions.system_end,
        *positions.note_ends,
        last_user_start,
        *later_starts,
        positions.generation_start,
    }
    return tuple(sorted(n for n in chosen if n >= positions.system_end))


def _call_end_ids(model: LoadedModel, request: ChatRequest) -> frozenset[int]:
    """The token after which the reply may be over, though the model goes on (L-120)."""
    tag = model.tokenizer.tool_call_end
    if request.parallel_tool_calls or not tag:
        return frozenset()
    ids = model.template.encode(tag)
    return frozenset(ids) if len(ids) == 1 else frozenset()


def _log_diagnostics(config: Config, planned: PlannedRequest) -> None:
    messages = planned.plan.conversation.messages
    if config.cache_norm_safety_check and not keeps_most_text(messages):
        logger.warning("the canonical messages lack more than a tenth of the text")
    if config.vlm_cache_debug and planned.images:
        ids = planned.plan.rendered.ids
        logger.info("images at %s, tokens %s", image_starts(ids), ids[:64].tolist())


# -- from tokens to deltas -------------------------------------------------------------


class StopStrings:
    """Cuts the text of a reply before its first stop string, however it is chunked."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.held = ""  # the end of the text, which may begin a stop string
        self.hit = ""  # the stop string that came

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """The text that is certain to come before any stop string.

        After a stop string came, there is none. `is_last`: no text follows, so nothing
        is held back.
        """
        if self.hit:
            return ""
        text = self.held + text
        end = len(text) if is_last else self._find_beginning(text)
        self.held = text[end:]

        for stop in self._stops:
            start = text.find(stop, 0, end + len(stop))
            if start < 0:
                continue
            # The one that comes first counts; of those at one place, the shortest.
            if not self.hit or (start, len(stop)) < (end, len(self.hit)):
                self.hit = stop
                self.held = ""
                end = start
        return text[:end]

    def skip(self, text: str) -> str:
        """What was held back and this text, in which no stop string counts."""
        text = self.held + text
        self.held = ""
        return text

    def _find_beginning(self, text: str) -> int:
        """From where on the text may become a stop string; its end if it cannot."""
        longest = max(map(len, self._stops), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


class ReplyDecoder:
    """Makes the deltas of one reply from its tokens.

    Each token takes four steps: it becomes text, the text ends before a stop string, it
    is parted into reasoning, content and tool calls, and calls are read.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        request = prepared.request
        template = prepared.model.template
        tags = _ReplyTags.of(prepared)

        self.token_ids: list[int] = []
        self.shown_ends: list[ShownEnd] = []  # in the content
        self.n_reasoning_tokens = 0
        self.was_over = False  # before finish(), which may find a stop string, too
        self._n_letters = 0  # of the content, as emitted
        self.stops = StopStrings(request.stop)
        self._detokenizer = _make_detokenizer(prepared)
        self._tag_ids = tags.token_ids(template)
        self._max_calls = sys.maxsize if request.parallel_tool_calls else 1
        self.splitter = ReasoningStreamSplitter(
            tags.patterns(prepared),
            in_reasoning=prepared.plan.rendered.starts_in_reasoning,
        )
        self.parser = ReplyParser(
            self.splitter,
            prepared.tool_format,
            tools=request.tools + request.deferred_tools,
            ids=_make_call_ids(),
            max_calls=self._max_calls,
        )

    @property
    def is_over(self) -> bool:
        """Whether the reply is complete, although the model would go on."""
        return self.is_stopped or self._has_all_calls

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it, or a call that cannot be read."""
        return bool(self.stops.hit) or self.parser.is_broken

    @property
    def ends_with_call(self) -> bool:
        """Whether its tokens end with the last call that the client is given."""
        return self._has_all_calls and not self.parser.has_more

    @property
    def _has_all_calls(self) -> bool:
        return self.parser.n_calls >= self._max_calls

    def feed(self, token_id: int) -> list[JsonObject]:
        """The deltas that are certain with this token; none once the reply is over."""
        if self.is_over:
            return []
        self.token_ids.append(token_id)
        if self.splitter.is_thinking:
            self.n_reasoning_tokens += 1

        text = self._detokenizer.feed(token_id)
        is_literal = self._is_literal(token_id)  # before more text is held back
        text = self._end_at_stop(token_id, text)
        deltas = self.parser.feed(text, literal=is_literal)
        self._note_shown(deltas)
        return deltas

    def _note_shown(self, deltas: list[JsonObject]) -> None:
        """Note an end of the reply if nothing of its text so far is held back.

        A client that leaves here has the text of all these tokens.
        """
        for delta in deltas:
            self._n_letters += len(delta.get("content", ""))
        is_in_content = bool(deltas) and "content" in deltas[-1]
        holds_text = (
            self.splitter.holds_text
            or bool(self.stops.held.strip())
            or self._detokenizer.is_inside_character
        )
        if is_in_content and not holds_text and not self.is_over:
            end = ShownEnd(len(self.token_ids), self._n_letters)
            self.shown_ends.append(end)

    def _is_literal(self, token_id: int) -> bool:
        """Whether a tag in this text is a quotation.

        A tag that the model means is one token. Where tags have several, or text waited
        for a stop string, nobody can tell.
        """
        if not self._tag_ids or self.stops.held:
            return False
        return token_id not in self._tag_ids

    def _end_at_stop(self, token_id: int, text: str) -> str:
        if self._can_stop(token_id, text):
            return self.stops.feed(text)
        return self.stops.skip(text)

    def _can_stop(self, token_id: int, text: str) -> bool:
        """Whether a stop string in this text counts. why(L-80): only in content.

        In thinking, calls, tags, and white space after a tag it does not.
        """
        is_behind_call = self.parser.is_behind_call
        is_in_call = self.splitter.in_call and not is_behind_call
        if self.splitter.is_thinking or is_in_call or token_id in self._tag_ids:
            return False
        is_white_space = (self.stops.held + text).isspace()
        is_after_tag = self.splitter.after_tag or is_behind_call
        return not (is_after_tag and is_white_space)

    def finish(self, *, closes: bool) -> list[JsonObject]:
        """The deltas of what was held back. `closes`: a call that was cut is closed."""
        self.was_over = self.is_over
        if self._has_all_calls:
            return []  # what was held back follows the last call
        text = self.stops.feed(self._detokenizer.finish(), is_last=True)
        return self.parser.feed(text) + self.parser.finish(closes=closes)


class _ReplyTags(NamedTuple):
    """The tags that part a reply; "" for those that it cannot have."""

    think_start: str = ""
    tool_start: str = ""
    think_end: str = ""
    tool_end: str = ""

    @classmethod
    def of(cls, prepared: PreparedRequest) -> _ReplyTags:
        if prepared.request.kind == "completion":
            return cls()
        tokenizer = prepared.model.tokenizer
        tool_format = prepared.tool_format
        return cls(
            think_start=tokenizer.think_start or "",
            tool_start=tool_format.start if tool_format else "",
            think_end=tokenizer.think_end or "",
            tool_end=tool_format.end.strip("\0") if tool_format else "",
        )

    def token_ids(self, template: ChatTemplate) -> set[int]:
        """The token of each tag; empty if one of them has several."""
        encoded = [template.encode(tag) for tag in self if tag]
        if any(len(ids) != 1 for ids in encoded):
            return set()
        return {ids[0] for ids in encoded}

    def patterns(self, prepared: PreparedRequest) -> Tags:
        """Regular expressions that match them."""
        tool_format = prepared.tool_format
        tools = prepared.request.tools + prepared.request.deferred_tools
        untagged_call = None
        # A reply that has to be JSON may look like a call without its tag.
        if tool_format is not None and prepared.request.json_schema is None:
            untagged_call = tool_format.untagged_pattern(tools)
        return Tags(
            think_start=think_tag_pattern(self.think_start) or None,
            tool_start=regex.escape(self.tool_start) or None,
            untagged_call=untagged_call,
            think_end=think_tag_pattern(self.think_end) or None,
        )


def _make_detokenizer(prepared: PreparedRequest) -> Detokenizer:
    """Special tokens are hidden, except for stop strings, which have to be found."""
    model = prepared.model
    shown_ids: set[int] = set()
    for stop in prepared.request.stop:
        ids = model.template.encode(stop)
        if len(ids) == 1:
            shown_ids.add(ids[0])
    hidden_ids = model.hidden_ids - (shown_ids - model.eos_ids)
    return Detokenizer(model.tokenizer.backend_tokenizer, hidden_ids)


def _make_call_ids() -> Iterator[str]:
    """Random. why(L-75): Mistral's template takes nine letters and digits only."""
    while True:
        yield uuid.uuid4().hex[:9]


def format_logprob(tokenizer: Any, token_id: int, logprob: float) -> JsonObject:
    """A token and its log-probability, in OpenAI's shape."""
    text = str(tokenizer.decode([token_id]))
    token_bytes: bytes | None = text.encode()
    if "\ufffd" in text:  # a part of a character
        token_bytes = _raw_bytes(tokenizer.convert_ids_to_tokens(token_id))
    return {
        "token": text,
        "logprob": max(logprob, -9999.0),  # which OpenAI writes for minus infinity
        "bytes": None if token_bytes is None else list(token_bytes),
    }


_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")  # in vocabularies of characters


def _raw_bytes(token: str) -> bytes | None:
    """The bytes of a token as the vocabulary spells it; None if nobody knows them."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    if "\ufffd" in token:
        return token.encode()
    byte_by_letter = _byte_letters()
    if not byte_by_letter.keys() >= set(token):
        return None
    return bytes(byte_by_letter[letter] for letter in token)


@lru_cache(maxsize=1)
def _byte_letters() -> dict[str, int]:
    """By the letter that a vocabulary of bytes (GPT-2's kind) has for it, each byte.

    Bytes that are visible in Latin-1 stand for themselves; letters from U+0100 on for
    the others, in their order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(visible))
    letters = {chr(byte): byte for byte in visible}
    for offset, byte in enumerate(hidden):
        letters[chr(0x100 + offset)] = byte
    return letters


# -- how a reply ends, and what is recorded --------------------------------------------

EndingKind = Literal["finished", "stopped", "cut", "left", "failed"]


class ReplyEnding(NamedTuple):
    """How a reply ended, and what there is of it. It is made once, at the end.

    finished   the model ended it
    stopped    this program did, at a stop string or before one call too many
    cut        a limit did, of tokens or of time
    left       its client has gone
    failed     an error came instead
    """

    kind: EndingKind
    event: FinishedEvent  # what the engine says of it
    finish_reason: FinishReason  # for the client
    message: JsonObject  # the reply, as OpenAI's API shows it
    token_ids: Sequence[int]
    shown_ends: Sequence[ShownEnd]  # where its client may have left it
    has_end_token: bool  # they end with one
    is_thinking: bool  # it ends inside its thinking
    ends_with_call: bool  # it was stopped, and the client has all of its tokens
    first_token_seconds: float | None  # from the request on; None: there was none
    waits: Mapping[WaitCause, float]  # seconds that the request waited


def find_ending_kind(reason: EndReason, *, is_over: bool) -> EndingKind:
    """`is_over`: the reply was complete before the model ended it."""
    if reason == "failed":
        return "failed"
    if reason == "cancelled":
        return "left"
    if is_over:
        return "stopped"
    return "finished" if reason == "stop" else "cut"


class Recording(NamedTuple):
    """Where a reply is recorded."""

    in_sessions: bool = False  # session index and log, the messages of the session
    in_history: bool = False  # to be compared with the next request
    in_ledger: bool = False  # to be replayed
    in_healing_store: bool = False  # its thinking


def decide_recording(ending: ReplyEnding, *, is_chat: bool) -> Recording:
    """Where to record a reply. why(L-45): the ledger needs what the client has.

    `is_chat`: it has messages, and they were canonicalized.
    """
    if ending.kind in ("left", "failed"):
        return Recording()
    if not is_chat:
        return Recording(in_sessions=True)

    return Recording(
        in_sessions=True,
        in_history=True,
        in_ledger=_can_be_replayed(ending),
        in_healing_store=not ending.is_thinking,  # then it is complete
    )


def _can_be_replayed(ending: ReplyEnding) -> bool:
    """Whether the client has the tokens of a reply, as the template prints them."""
    if ending.kind == "stopped":
        # The client has less of it than the model generated, as a rule (L-120).
        return ending.ends_with_call
    if ending.has_end_token:
        return True
    # Cut in its thinking or in a call, the template would print it differently.
    has_calls = "tool_calls" in ending.message
    return bool(ending.message["content"]) and not ending.is_thinking and not has_calls


class SessionTurn(RequestFacts):
    """A request in the session index."""

    parent: str | None  # session id of the agent that started this one
    stable_prefix_msg_count: int  # messages that the conversation had before


class SessionRecord(SessionTurn):
    """A request in the session log; the counters, and what settings add, come after."""

    head: str | None  # stands for template, tools and settings
    n_messages: int
    rules: dict[str, int]  # of CANONICALIZATION: how many fields each has found


class RequestOrigin(NamedTuple):
    """Where a request came from, and when, for people."""

    came_at: float  # Unix seconds
    client: str  # by its User-Agent
    title: str  # how the conversation begins; "" without ENABLE_REQUEST_LOGGING


class ReplyRecorder:
    """Remembers and reports one reply: record() once, as soon as it has ended."""

    def __init__(
        self, state: ServerState, prepared: PreparedRequest, origin: RequestOrigin
    ) -> None:
        self._state = state
        self._prepared = prepared
        self._request = prepared.request
        self._origin = origin
        self._is_chat = prepared.plan.can_be_recorded

    def record(self, ending: ReplyEnding) -> None:
        """Put it wherever it belongs, and tell console, metrics and status page."""
        recording = decide_recording(ending, is_chat=self._is_chat)
        self._record_reply(ending, recording)
        facts = self._report(ending)
        if recording.in_sessions:
            self._record_turn(facts)
        if recording.in_history:
            self._compare_with_history(ending)

    def record_left(self, ending: ReplyEnding) -> None:
        """Record a reply that was not sent whole, as far as its client may have it.

        why(L-121): a user who stops an agent sends what was shown. A reply that failed
        is not recorded: its KV is gone, as a rule.
        """
        if ending.kind == "failed" or not ending.shown_ends or not self._is_chat:
            return
        # A client that got the calls would send them back: this one left before them.
        text_alone = {k: v for k, v in ending.message.items() if k != "tool_calls"}
        generated = self._generated_reply(ending, is_cut=True)._replace(
            shown_text=text_alone["content"], shown_ends=tuple(ending.shown_ends)
        )
        reply = self._canonical_reply(text_alone)
        plan = self._prepared.plan
        self._state.stores.ledger.record(plan, reply=reply, generated=generated)

    def _record_reply(self, ending: ReplyEnding, recording: Recording) -> None:
        """Record the reply in the ledger, and its thinking."""
        if not recording.in_ledger and not recording.in_healing_store:
            return
        stores = self._state.stores
        plan = self._prepared.plan
        reply = self._canonical_reply(ending.message)
        if recording.in_ledger:
            generated = self._generated_reply(ending, is_cut=not ending.has_end_token)
            stores.ledger.record(plan, reply=reply, generated=generated)
        if recording.in_healing_store:
            conversation = plan.conversation
            contexts = reply_contexts(conversation.messages, conversation.session)
            stores.healing_store.remember(
                reply.original, contexts[-1], session_id=self._prepared.session_id
            )

    def _canonical_reply(self, message: JsonObject) -> CanonicalMessage:
        original = {**message, "content": message["content"] or ""}
        template = self._prepared.model.template
        return template.canonicalize(OriginalMessages((original,)))[0]

    def _generated_reply(self, ending: ReplyEnding, *, is_cut: bool) -> GeneratedReply:
        return GeneratedReply(
            ids=np.asarray(ending.token_ids, np.int32),
            is_cut=is_cut,
            block_hashes=self._prepared.engine_request.key.block_hashes,
            session_id=self._prepared.session_id,
            finished_at=time.monotonic(),
        )

    def _record_turn(self, facts: RequestFacts) -> None:
        """Record the request in the session index and the session log."""
        session_id = self._prepared.session_id
        conversation = self._prepared.plan.conversation
        digests = [message.digest for message in conversation.messages]
        stores = self._state.stores
        turn: SessionTurn = {
            **facts,
            "parent": self._request.session.parent_session_id,
            "stable_prefix_msg_count": stores.session_turn_store.advance(
                session_id, digests
            ),
        }
        stores.session_index.note(session_id, turn, now=time.monotonic())

        record: SessionRecord = {
            **turn,
            "head": conversation.context_key.hex()[:12] if self._is_chat else None,
            "n_messages": len(self._request.messages),
            "rules": self._found_rules,
        }
        # The log has messages as they were sent: these are compared, by hashes.
        sent_hashes = [hash(marshal.dumps(m, 2)) for m in self._request.messages]
        n_logged = stores.session_turn_store.exchange_last(session_id, sent_hashes)
        counters = self._state.metrics.snapshot()
        self._state.session_log.write(
            session_id, {**record, **self._logged_content(n_logged), **counters}
        )

    def _logged_content(self, n_logged: int) -> dict[str, object]:
        """What settings add to a record. `n_logged`: messages of the record before."""
        config = self._state.config
        content: dict[str, object] = {}
        if config.enable_request_logging:
            content["messages"] = self._request.messages[n_logged:]
        if config.log_prompt_tokens:
            content["tokens"] = self._prepared.engine_request.key.tokens.tolist()
        return content

    def _compare_with_history(self, ending: ReplyEnding) -> None:
        """Give a reason if much that the session had sent was prefilled again."""
        stores = self._state.stores
        end = ending.event
        request = self._prepared.as_sent(ending.token_ids)
        earlier = stores.history.find_nearest(request, session_only=True)
        stores.history.add(request)
        if earlier is None:
            return
        n_reread = count_reread_tokens(
            earlier, request, cached_tokens=end.reuse.cached_tokens
        )
        if n_reread < MIN_REPORTED_TOKENS:
            return

        reason = explain_miss(
            earlier,
            request,
            cached_tokens=end.reuse.cached_tokens,
            matched_tokens=end.reuse.matched_tokens,
        )
        reason = self._prepared.in_client_terms(reason)
        sentence = (
            reason.sentence if reason else "the same messages are now at other places"
        )
        # Neither page nor console quote a client, unless a setting wants it. Whoever
        # asks /v1/cache/explain has brought the text, and is told both versions.
        quotes = self._state.config.enable_request_logging
        if quotes and reason is not None and reason.change is not None:
            change = reason.change
            sentence += f": {change.earlier!r} is now {change.current!r}"
        stores.divergences.append(
            {
                "time": time.time(),
                "id": _shown_id(self._request),
                "session": request.session_id,
                "again": n_reread,
                "why": sentence,
            }
        )
        logger.warning(
            "id=%s: about %d tokens were prefilled again: %s",
            _shown_id(self._request),
            n_reread,
            sentence,
        )

    def _report(self, ending: ReplyEnding) -> RequestFacts:
        """Tell console, metrics and status page that it has ended."""
        waits = ending.waits
        longest = max(waits, key=lambda cause: waits[cause], default=None)
        facts = self._facts(ending, waited_for=longest)
        self._log_end(facts, n_calls=len(ending.message.get("tool_calls", ())))
        self._count_end(facts, waits)

        decode_seconds = ending.event.seconds.decoding
        decode_speed = facts["out"] / decode_seconds if decode_seconds else 0.0
        self._state.stores.recent.append(
            {
                **facts,
                "time": time.time(),
                "started_at": self._origin.came_at,
                "waited_seconds": facts["waited"],
                "waited_for_request": longest.request_id if longest else None,
                "tokens_per_second": round(decode_speed, 1) or None,
                "client": self._origin.client,
                "title": self._origin.title,
            }
        )
        return facts

    def _facts(
        self, ending: ReplyEnding, *, waited_for: WaitCause | None
    ) -> RequestFacts:
        end = ending.event
        return {
            "id": _shown_id(self._request),
            "api": self._request.kind,
            "session": self._prepared.session_id,
            "prompt": self._prepared.engine_request.n_prompt,
            "out": len(ending.token_ids),
            "cached": end.reuse.cached_tokens,
            "match": end.reuse.hit_kind,
            "finish": end.reason,
            "prefill": round(end.seconds.prefilling, 3),
            "decode": round(end.seconds.decoding, 3),
            "waited": round(end.seconds.waiting, 3),
            "waited_for": waited_for.reason if waited_for else None,
            "ttft_ms": round(1000 * (ending.first_token_seconds or 0.0)),
            "replayed": self._prepared.plan.n_replayed,
            "fallback": self._prepared.plan.refusal or None,
        }

    def _log_end(self, facts: RequestFacts, *, n_calls: int) -> None:
        """A line for people, and at DEBUG one with everything.

        Of a failed request HTTP SERVER logs the error: that is its line.
        """
        counters = self._state.metrics.snapshot()
        found = self._found_rules
        rules = ",".join(f"{rule}:{n_fields}" for rule, n_fields in found.items())
        line = format_request_line(**facts, rules=rules or None, **counters)
        logger.debug("%s", line)
        if facts["finish"] != "failed":
            client = self._origin.client
            logger.info("%s", format_summary(facts, client=client, n_calls=n_calls))

    @cached_property
    def _found_rules(self) -> dict[str, int]:
        return count_rules(self._prepared.plan.conversation.messages)

    def _count_end(self, facts: RequestFacts, waits: Mapping[WaitCause, float]) -> None:
        metrics = self._state.metrics
        speed = self._state.engine.report.get("prefill_tokens_per_second")
        saved_seconds = facts["cached"] / speed if speed else 0.0
        metrics.observe(facts, saved_seconds=saved_seconds)
        for cause, seconds in waits.items():
            metrics.observe_wait(cause.reason, seconds)


# -- a request that runs ---------------------------------------------------------------

# The states of a request, as the status page names them.
_PHASES: Final[Mapping[RequestState, str]] = {
    "waiting": "queued",
    "prefilling": "prefill",
    "decoding": "decode",
}


MAX_PERIOD: Final = 96  # tokens that are looked for as repeated
MIN_REPEATS: Final = 4
MIN_REPEATED_TOKENS: Final = 64  # of all repeats together


def is_repeating(token_ids: Sequence[int]) -> bool:
    """Whether a reply ends with the same tokens, again and again.

    The demo model is stopped there: it is too small to find the end by itself.
    """
    for period in range(1, MAX_PERIOD + 1):
        n_tokens = max(MIN_REPEATED_TOKENS, MIN_REPEATS * period)
        tail = token_ids[-n_tokens:]
        if len(tail) == n_tokens and tail[period:] == tail[:-period]:
            return True
    return False


class ReplyGeneration:
    """One request from its submission to its last event; close() it in any case.

    Read either whole() or chunks(), once, to the end.
    """

    def __init__(
        self, state: ServerState, request: ChatRequest, *, client: str = ""
    ) -> None:
        """Submit a request. Raises what prepare_request() and Engine.submit() raise.

        `client`: who sent it, for the log and the status page.
        """
        self._began_at = time.monotonic()
        title = _find_title(request) if state.config.enable_request_logging else ""
        self._origin = RequestOrigin(time.time(), client, title)
        _lower_thread_priority()
        self._state = state
        self._prepared, self._handle = _submit(state, request)
        self._request = self._prepared.request
        try:
            self._decoder = ReplyDecoder(self._prepared)
            self._formatter = _make_formatter(self._prepared)
        except BaseException:
            self._handle.stop_reason = "cancelled"  # nobody will close it
            raise
        self._recorder = ReplyRecorder(state, self._prepared, self._origin)

        self._n_read: int | None = None  # prompt tokens with KV; None: none was read
        self._first_token_seconds: float | None = None  # after the request came
        self._logprobs: list[JsonObject] = []  # that were not sent yet
        self._ending: ReplyEnding | None = None  # None: it goes on
        self._is_sent = False  # the client has been sent all of it
        self._is_closed = False
        state.stores.live[request.request_id] = self
        state.keep()  # its user may have been dropped since the request came

    def close(self) -> None:
        """Stop the request if it still runs. It is in no list of live requests then.

        The second time it does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._handle.stop_reason = "cancelled"
        self._state.stores.live.pop(self._request.request_id, None)
        try:
            ending = self._ending or self._cut_short("cancelled")
            if self._request.stream and not self._is_sent:
                self._recorder.record_left(ending)
        except Exception:
            logger.exception("the end of a reply could not be recorded")

    def whole(self) -> Iterator[JsonObject | None]:
        """None until the reply has ended, then its body."""
        with self._noting_failures():
            for deltas in self._read_deltas():
                for delta in deltas:
                    self._formatter.delta_events(delta)  # full_body() has them all
                yield None
            message = self._decoder.parser.message()
            yield self._formatter.full_body(message, self._reply_end())

    def chunks(self) -> Iterator[JsonObject | None]:
        """The events of a stream, with pings; None if there is nothing to send."""
        with self._noting_failures():
            yield from self._stream()
        self._is_sent = True

    def _stream(self) -> Iterator[JsonObject | None]:
        has_started = False
        n_shown = -1  # prompt tokens, in the last event of progress
        sent_at = time.monotonic()
        for deltas in self._read_deltas():
            events: list[JsonObject] = []
            if self._n_read is not None and not has_started:
                events += self._formatter.start_events(self._usage())
                has_started = True
            progress = self._progress()
            if has_started and progress.processed > n_shown:
                events += self._formatter.progress_events(progress)
                n_shown = progress.processed
            for delta in deltas:
                events += self._formatter.delta_events(delta, self._take_logprobs())

            silent_seconds = time.monotonic() - sent_at
            if not events and silent_seconds >= self._state.config.keepalive_seconds:
                events.append(self._formatter.ping_event())
            if not events:
                yield None
                continue
            sent_at = time.monotonic()
            yield from events
        yield from self._formatter.end_events(self._reply_end())

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """An exception of our own is a failure; else close() takes it for a leaving."""
        try:
            yield
        except (ClientGone, ServerError):
            raise
        except Exception:
            if self._ending is None:
                self._cut_short("failed")
            raise

    def describe(self) -> LiveRequest:
        """Where it is by now. For any thread."""
        now = time.monotonic()
        times = self._handle.times
        cause = times.cause
        if cause is None and times.state == "waiting":
            cause = WaitCause("queue")  # the scheduler has not looked at it yet
        phase = "queued" if cause else _PHASES[times.state]
        n_out = len(self._decoder.token_ids)
        decode_speed = None
        if phase == "decode":
            decode_speed = round(n_out / max(now - times.since, 1e-3), 1)
        return {
            "id": _shown_id(self._request),
            "api": self._request.kind,
            "session": self._prepared.session_id,
            "prompt": self._prepared.engine_request.n_prompt,
            "out": n_out,
            "max_tokens": self._prepared.engine_request.max_tokens,
            "cached": self._handle.reuse.cached_tokens,
            "done": self._n_read or 0,
            "phase": phase,
            "match": self._handle.reuse.hit_kind,
            "tokens_per_second": decode_speed,
            "seconds": round(now - self._began_at, 1),
            "first_token_seconds": self._first_token_seconds,
            "waited_seconds": round(times.seconds(now).waiting, 3),
            "waiting_for": cause.reason if cause else None,
            "waiting_for_request": cause.request_id if cause else None,
            "prefill_left_seconds": (
                self._prefill_left_seconds(now) if phase == "prefill" else None
            ),
            "client": self._origin.client,
            "title": self._origin.title,
        }

    def _prefill_left_seconds(self, now: float) -> float | None:
        """At the pace of this prompt so far; before that, at that of the last slice.

        The pace counts what others prefill and decode meanwhile.
        """
        n_read = self._n_read or 0
        n_left = self._prepared.engine_request.n_prompt - n_read
        n_new = n_read - self._handle.reuse.cached_tokens
        if n_new > 0:
            pace = n_new / max(now - self._handle.times.since, 1e-3)
            return round(n_left / pace, 1)
        speed = self._state.engine.report.get("prefill_tokens_per_second")
        return round(n_left / speed, 1) if speed else None

    def _read_deltas(self) -> Iterator[list[JsonObject]]:
        """The deltas of each event, often none, until the reply is recorded.

        Raises ServerError: it failed, and ClientGone: it was cancelled.
        """
        with kept_awake(self._state.config):
            while self._ending is None:
                event = self._handle.next_event(CLIENT_LOOK_SECONDS)
                match event:
                    case None:
                        yield []
                    case int():
                        self._note_progress(event)
                        yield []
                    case TokenEvent():
                        yield self._decode(event)
                    case SecondTryEvent():
                        self._n_read = None
                        yield []
                    case FinishedEvent(reason="cancelled"):
                        raise ClientGone
                    case FinishedEvent():
                        yield self._finish(event)
                    case ServerError():
                        self._cut_short("failed")
                        raise event

    def _note_progress(self, n_read: int) -> None:
        self._n_read = n_read
        show_prefill_progress(
            _shown_id(self._request),
            n_read=n_read,
            n_prompt=self._prepared.engine_request.n_prompt,
        )

    def _decode(self, event: TokenEvent) -> list[JsonObject]:
        if self._first_token_seconds is None:
            self._first_token_seconds = round(time.monotonic() - self._began_at, 3)
            self._note_progress(self._prepared.engine_request.n_prompt)
        if self._request.max_tokens == 0:
            return []
        if event.logprob is not None and not self._decoder.is_over:
            tokenizer = self._prepared.model.tokenizer
            logprob, alternatives = event.logprob
            entry = format_logprob(tokenizer, event.token_id, logprob)
            entry["top_logprobs"] = [
                format_logprob(tokenizer, *alternative) for alternative in alternatives
            ]
            self._logprobs.append(entry)

        deltas = self._decoder.feed(event.token_id)
        if self._decoder.is_over:
            self._handle.stop_reason = "stop"
        elif self._prepared.model.is_demo and is_repeating(self._decoder.token_ids):
            self._handle.stop_reason = "repeated"
        return deltas

    def _finish(self, event: FinishedEvent) -> list[JsonObject]:
        """Record and report the reply; the last deltas."""
        can_close = event.reason == "stop" or self._formatter.closes_cut_calls
        deltas = self._decoder.finish(closes=can_close)
        if self._decoder.parser.is_broken:
            logger.warning("a call cannot be read: the reply ends there, as cut")
        self._end_with(event)
        return deltas

    def _cut_short(self, reason: Literal["cancelled", "failed"]) -> ReplyEnding:
        """End a reply that nobody waits for, or that failed, as it is now."""
        return self._end_with(self._handle.finished_event(reason))

    def _end_with(self, event: FinishedEvent) -> ReplyEnding:
        """Make the ending, and record it."""
        decoder = self._decoder
        token_ids = decoder.token_ids
        eos_ids = self._prepared.model.eos_ids
        is_over = decoder.was_over or decoder.is_stopped
        ending = ReplyEnding(
            kind=find_ending_kind(event.reason, is_over=is_over),
            event=event,
            finish_reason=self._finish_reason(event),
            message=decoder.parser.message(),
            token_ids=token_ids,
            shown_ends=decoder.shown_ends,
            has_end_token=bool(token_ids) and token_ids[-1] in eos_ids,
            is_thinking=decoder.splitter.is_thinking,
            ends_with_call=decoder.was_over and decoder.ends_with_call,
            first_token_seconds=self._first_token_seconds,
            waits=self._handle.times.wait_seconds(time.monotonic()),
        )
        self._ending = ending
        try:
            self._recorder.record(ending)
        except Exception:  # the client has its reply, whatever becomes of our notes
            logger.exception("a reply could not be recorded")
        return ending

    def _finish_reason(self, event: FinishedEvent) -> FinishReason:
        is_cut = event.reason != "stop" and not self._decoder.was_over
        is_cut = is_cut or self._request.max_tokens == 0
        if is_cut or self._decoder.parser.is_broken:
            return "length"  # a call in it was cut, and must not be run
        if self._decoder.parser.n_calls and not self._decoder.stops.hit:
            return "tool_calls"
        return "stop"

    # -- what the response says of the reply -------------------------------------------

    def _progress(self) -> PromptProgress:
        _, prefill_seconds, _ = self._handle.times.seconds(time.monotonic())
        return PromptProgress(
            total=self._prepared.engine_request.n_prompt,
            cache=self._handle.reuse.cached_tokens,
            processed=self._n_read or 0,
            time_ms=round(1000 * prefill_seconds),
        )

    def _take_logprobs(self) -> JsonObject | None:
        if not self._request.logprobs:
            return None
        logprobs = self._logprobs
        self._logprobs = []
        return {"content": logprobs}

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prepared.engine_request.n_prompt,
            cached_tokens=self._handle.reuse.cached_tokens,
            completion_tokens=len(self._decoder.token_ids),
            reasoning_tokens=self._decoder.n_reasoning_tokens,
        )

    def _reply_end(self) -> ReplyEnd:
        assert self._ending is not None
        return ReplyEnd(
            self._ending.finish_reason,
            self._usage(),
            self._decoder.stops.hit or None,
            self._take_logprobs(),
        )


def _find_title(request: ChatRequest) -> str:
    """How the first message of the user begins, or the prompt of a completion.

    A part that begins with a tag is no text of the user: agents put reminders there.
    """
    for message in request.messages:
        if message["role"] != "user":
            continue
        content = message["content"]
        if isinstance(content, str):
            return printable(content, max_length=MAX_TITLE_LENGTH)
        texts = [part["text"] for part in content if part["type"] == "text"]
        own_texts = [text for text in texts if not text.lstrip().startswith("<")]
        first_text = next(iter([*own_texts, *texts]), "")
        return printable(first_text, max_length=MAX_TITLE_LENGTH)
    text = request.prompt if isinstance(request.prompt, str) else ""
    return printable(text, max_length=MAX_TITLE_LENGTH)


def _submit(
    state: ServerState, request: ChatRequest
) -> tuple[PreparedRequest, RequestHandle]:
    """Prepare a request and hand it to the engine.

    why(L-63): part of a prompt may be guessed. It is verified while the model reads it
    already; if the guess was wrong, the request is prepared again.
    """
    while True:
        prepared = prepare_request(state, request)
        handle = state.engine.submit(prepared.engine_request)
        is_verified = False
        try:
            state.stores.ledger.remember(
                prepared.plan, session_id=prepared.session_id, now=time.monotonic()
            )
            is_verified = state.stores.planner.verify(prepared.plan)
        finally:
            if not is_verified:
                handle.stop_reason = "cancelled"
        if is_verified:
            return prepared, handle


def _make_formatter(prepared: PreparedRequest) -> ResponseFormatter:
    """The formatter of the API that was called."""
    request = prepared.request
    model_id = prepared.model.model_id
    if request.kind == "messages":
        # why(L-52): on resume Claude Code drops the thinking of a model that it did not
        # ask for.
        return AnthropicFormatter(request.request_id, request.model or model_id)
    return OpenAIFormatter(
        kind=request.kind,
        request_id=request.request_id,
        model=model_id,
        created=int(time.time()),
        include_usage=request.include_usage,
        return_progress=request.return_progress,
    )


def _lower_thread_priority() -> None:
    """Let this thread give way to others. why(L-35): rendering slows down streams.

    Only on Linux do threads have a priority of their own.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            thread_id = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread_id, CONNECTION_NICENESS)


@contextmanager
def kept_awake(config: Config) -> Iterator[None]:
    """With KEEP_AWAKE, macOS does not sleep inside; only macOS has a caffeinate."""
    program = shutil.which("caffeinate") if config.keep_awake else None
    with ExitStack() as stack:
        if program is not None:
            # -w: it ends with this process, however that ends.
            command = [program, "-i", "-w", str(os.getpid())]
            with suppress(OSError):  # without it the reply comes all the same
                process = stack.enter_context(subprocess.Popen(command))
                stack.callback(process.terminate)
        yield


# region STATUS ================================================================
# Bodies that describe the server, or a request without running it.
#
# Nothing here changes what the server does, except drop_cache, and that a wrong guess
# about the prompt is remembered. The model thread publishes its figures a few times a
# second, each second when idle; what needs more is asked of it with Engine.call(),
# between two of its steps.
#
# Public   health_body, models_body, model_body, status_body, detailed_status_body,
#          metrics_text, count_tokens_body, explain_body, drop_cache
# Uses     OPTIONS, CONFIG, ERRORS, LOGGING, API TYPES, PREFIX CACHE, DISK CACHE,
#          SESSIONS, ENGINE, TENANTS, REQUEST HANDLING
# Thread   connection; models_body: also main

MAX_SESSIONS: Final = 20  # in the status
_FORGET_SECONDS: Final = 10.0  # until what is forgotten is gone from the disk


class HealthBody(TypedDict):
    """The body of GET /health."""

    status: Literal["ok", "loading", "error"]
    warm_up: NotRequired[WarmUpBody]
    error: NotRequired[str]
    proxy: ProxyBody


class WarmUpBody(TypedDict):
    """How far the warm-up is; the model is loaded already."""

    done: int
    steps: int


def health_body(state: ServerState) -> tuple[int, HealthBody]:
    """GET /health: its HTTP status and body. "ok" only while the model can be used."""
    proxy = state.proxy.body()
    match state.engine.state:
        case "ready":
            return 200, {"status": "ok", "proxy": proxy}
        case "loading":
            progress = state.engine.warm_up
            if progress is None:
                return 503, {"status": "loading", "proxy": proxy}
            steps: WarmUpBody = {"done": progress.n_done, "steps": progress.n_steps}
            return 503, {"status": "loading", "warm_up": steps, "proxy": proxy}
    sentence = "the model cannot be used; the server's log says why"
    return 503, {"status": "error", "error": sentence, "proxy": proxy}


class ModelBody(TypedDict):
    """A model as GET /v1/models shows it."""

    id: str
    object: Literal["model"]
    created: int  # Unix seconds: when the server started
    owned_by: str
    context_length: int  # tokens of prompt and reply
    max_model_len: int  # the same, as vLLM calls it


class ModelsBody(TypedDict):
    """The body of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


def models_body(state: ServerState) -> ModelsBody:
    """GET /v1/models: the one model that is loaded. Raises NotReady."""
    model = state.engine.model
    entry: ModelBody = {
        "id": model.model_id,
        "object": "model",
        "created": state.started,
        "owned_by": "start-llm",
        "context_length": model.max_context_tokens,
        "max_model_len": model.max_context_tokens,
    }
    return {"object": "list", "data": [entry]}


def model_body(state: ServerState, model_id: str) -> ModelBody:
    """GET /v1/models/ID. Raises NotReady, and NotServed if another model is loaded."""
    check_model_id(state.engine.model, model_id)
    return models_body(state)["data"][0]


class StatusMemory(MemoryReport):
    """Bytes by kind, and what the system counts. One tenant of several sees less."""

    process: NotRequired[int]


class StatusBody(TypedDict):
    """The body of GET /v1/status; web/openapi.json describes all of it."""

    status: Literal["ok", "loading", "error"]
    warm_up: NotRequired[WarmUpBody]
    error: NotRequired[str]
    proxy: ProxyBody
    version: str  # of this program
    started: int  # Unix seconds
    uptime_seconds: int
    model: NotRequired[JsonObject]  # once it is loaded
    engine: JsonObject  # requests by phase, and the size of the cache
    memory: StatusMemory
    requests: list[LiveRequest]  # the oldest first, as in the next three
    recent: list[RecentRequest]
    divergences: list[Divergence]
    refusals: list[Refusal]
    totals: Totals
    cache: list[EntryReport]
    disk: NotRequired[DiskReport]  # if KV is kept there; only who sees all, sees it
    layers: NotRequired[list[str]]  # what each layer keeps, if it was asked for
    sessions: list[SessionRow]
    ledger: dict[str, int]
    counters: dict[str, int]


def detailed_status_body(state: ServerState) -> StatusBody:
    """GET /v1/status?detail=cache: also each entry's checkpoints and the layers' kinds.

    The cache is as of now: the model thread is asked between two of its steps. Without
    a model there is no more to show than status_body() has.
    """
    body = status_body(state)
    with suppress(NotReady):
        layer_kinds, reports = state.engine.call(
            lambda scheduler: (
                scheduler.spec.layer_kinds,
                scheduler.cache.describe(shows_checkpoints=True),
            )
        )
        body["layers"] = list(layer_kinds)
        body["cache"] = _own_entries(state, reports)
    return body


def status_body(state: ServerState) -> StatusBody:
    """GET /v1/status: all that a tenant may see of the server.

    Engine, memory and cache are as the model thread has published them last.
    """
    engine = state.engine
    now = time.monotonic()
    views = [view.stores for view in state.views()]
    _, health = health_body(state)
    body: StatusBody = {
        "status": health["status"],
        "proxy": health["proxy"],
        "version": VERSION,
        "started": state.started,
        "uptime_seconds": int(time.time()) - state.started,
        "engine": {"state": engine.state, **_engine_report(state)},
        "memory": _memory_report(state),
        "requests": _merge(
            [
                [reply.describe() for reply in list(view.live.values())]
                for view in views
            ],
            age=lambda request: request["seconds"],
        ),
        "recent": _merge(
            [list(view.recent) for view in views],
            age=lambda request: -request["time"],
            newest=MAX_RECENT,
        ),
        "divergences": _merge(
            [list(view.divergences) for view in views],
            age=lambda divergence: -divergence["time"],
            newest=MAX_DIVERGENCES,
        ),
        "refusals": _merge(
            [list(view.refusals) for view in views],
            age=lambda refusal: -refusal["at"],
            newest=MAX_REFUSALS,
        ),
        "totals": state.metrics.totals(),
        "cache": _cache_entries(state),
        "sessions": _newest_sessions(views, now),
        "ledger": _ledger_report(views),
        "counters": state.metrics.snapshot(),
    }
    if "error" in health:
        body["error"] = health["error"]
    if "warm_up" in health:
        body["warm_up"] = health["warm_up"]
    if engine.disk is not None and not state.tenant:
        body["disk"] = engine.disk
    with suppress(NotReady):
        model = engine.model
        body["model"] = {
            "id": model.model_id,
            "family": model.family,
            "bytes": model.nbytes,
            "context_length": model.max_context_tokens,
        }
    return body


def _merge[Row](
    lists: list[list[Row]],
    *,
    age: Callable[[Row], float],
    newest: int | None = None,
) -> list[Row]:
    """The rows of several tenants, the oldest first; the newest ones of them only."""
    if len(lists) == 1:
        return lists[0]
    rows = [row for tenant_rows in lists for row in tenant_rows]
    rows.sort(key=age, reverse=True)
    return rows if newest is None else rows[-newest:]


def _cache_entries(state: ServerState) -> list[EntryReport]:
    return _own_entries(state, state.engine.cache_entries)


def _own_entries(
    state: ServerState, reports: list[tuple[str, EntryReport]]
) -> list[EntryReport]:
    """Those of the tenants whose figures may be seen; each comes after its tenant."""
    return [entry for tenant, entry in reports if is_seen_by(state.tenant, tenant)]


def _newest_sessions(views: list[TenantStores], now: float) -> list[SessionRow]:
    rows: list[SessionRow] = []
    for stores in views:
        rows += stores.session_index.snapshot(now, newest=MAX_SESSIONS)
    rows.sort(key=lambda row: row["idle_seconds"])
    return rows[:MAX_SESSIONS]


def _ledger_report(views: list[TenantStores]) -> dict[str, int]:
    report: Counter[str] = Counter()
    for stores in views:
        report.update(stores.ledger.snapshot())
        report["healing"] += len(stores.healing_store)
    return dict(report)


def _engine_report(state: ServerState) -> EngineReport:
    """The engine's report; for one tenant of several with its own counts in it."""
    report = state.engine.report
    if not state.tenant or not report:
        return report
    loads = _own_loads(state)
    phases = Counter(load.phase for load in loads)
    decode_batches = {load.batch for load in loads if load.phase == "decoding"}
    entries = _cache_entries(state)
    own: EngineReport = {
        **report,
        "queued": phases["queued"],
        "prefilling": phases["prefilling"],
        "decoding": phases["decoding"],
        "groups": len(decode_batches),
        "lines": len(entries),
        "cache_bytes": sum(entry["bytes"] for entry in entries),
    }
    own.pop("prefill_tokens_per_second", None)  # of a slice that may be another's
    return own


def _memory_report(state: ServerState) -> StatusMemory:
    """Bytes by kind; of one tenant of several only what is the model's or its own."""
    memory = state.engine.memory
    if not state.tenant:
        return {**memory, "process": psutil.Process().memory_info().rss}
    if not memory:
        return {}
    return {
        "limit": memory["limit"],
        "model": memory["model"],
        "cache": sum(
            entry["bytes"] for entry in _cache_entries(state) if not entry["running"]
        ),
        "running": sum(load.nbytes for load in _own_loads(state)),
    }


def _own_loads(state: ServerState) -> list[RequestLoad]:
    loads = state.engine.loads
    return [load for load in loads if is_seen_by(state.tenant, load.tenant)]


def metrics_text(state: ServerState) -> bytes:
    """GET /metrics: counters, histograms and figures of the status, for Prometheus."""
    status = status_body(state)
    memory: Mapping[str, Any] = status["memory"]
    gauges = {f"memory_{kind}_bytes": size for kind, size in memory.items()}
    for name in ("queued", "prefilling", "decoding", "lines"):
        gauges[name] = status["engine"].get(name, 0)
    if "disk" in status:
        gauges["disk_bytes"] = status["disk"]["bytes"]
        gauges["disk_written_today_bytes"] = status["disk"]["written_today_bytes"]
    return state.metrics.exposition(gauges)


def count_tokens_body(state: ServerState, request: ChatRequest) -> JsonObject:
    """POST /v1/messages/count_tokens: those of the prompt that this request would have.

    Raises what plan_request() raises.
    """
    while True:  # verify() remembers a wrong guess: the second plan has no guess
        plan = plan_request(state, request, counts_all=True).plan
        if state.stores.planner.verify(plan):
            return {"input_tokens": len(plan.rendered.ids)}


def explain_body(state: ServerState, request: ChatRequest) -> JsonObject:
    """POST /v1/cache/explain: what a request would reuse, and why no more.

    Nothing is run. Raises what prepare_request() raises.
    """
    prepared = _prepare_verified(state, request)
    key = prepared.engine_request.key
    match = state.engine.call(lambda scheduler: scheduler.cache.find(key))
    reason = _explain_match(state, prepared, match)
    return {
        "prompt": len(key.tokens),
        "would_reuse": match.cached_tokens,
        "match": match.hit_kind,
        "replayed": prepared.plan.n_replayed,
        "fallback": prepared.plan.refusal or None,
        "why_not_more": reason.body() if reason else None,
    }


def _prepare_verified(state: ServerState, request: ChatRequest) -> PreparedRequest:
    """Prepare a request; once more, as in count_tokens_body(), after a wrong guess."""
    while True:
        prepared = prepare_request(state, request)
        if state.stores.planner.verify(prepared.plan):
            return prepared


def _explain_match(
    state: ServerState, prepared: PreparedRequest, match: PrefixMatch
) -> MissReason | None:
    """Why no more of the nearest earlier request would be reused."""
    if not prepared.plan.can_be_recorded:
        return None
    history = state.stores.history
    request = prepared.as_sent()
    earlier = history.find_nearest(request, session_only=True)
    if earlier is None:
        earlier = history.find_nearest(request, session_only=False)
    if earlier is None:
        return MissReason("no request was answered before this one")
    reason = explain_miss(
        earlier,
        request,
        cached_tokens=match.cached_tokens,
        matched_tokens=match.matched_tokens,
    )
    return prepared.in_client_terms(reason)


def drop_cache(state: ServerState, session: str | None) -> JsonObject:
    """DELETE /v1/cache: drop KV and what was recorded; of one session, or all."""
    _ = state.engine.model  # raises NotReady: then nothing is dropped, and not half
    # The records of who has not come since the start are in the file alone.
    tenants = {view.tenant for view in state.views()}
    tenants.update(state.records.tenants())
    for tenant in tenants:
        if not is_seen_by(state.tenant, tenant):
            continue
        stores = state.for_tenant(tenant).stores
        stores.ledger.forget(session)
        stores.healing_store.forget(session)
        stores.history.forget(session)
        stores.session_turn_store.forget(session)
    n_dropped = state.engine.call(
        lambda scheduler: scheduler.drop_kv(state.tenant, session)
    )
    state.records.flush(_FORGET_SECONDS)
    return {"dropped": n_dropped}


# region HTTP SERVER ===========================================================
# HTTP/1.1: who may send a request, which route answers it, and in which form.
#
# It is the server of the standard library with a thread for each connection. With
# MAX_CONNECTIONS open, a new one waits until another closes. A streamed chat:
#
#     Handler         a connection; the standard library reads the request line and the
#                     headers, `POST /v1/chat/completions`
#     _pass_gate      five checks, before a byte of the body is read -> HttpRequest with
#                     its route (a row of _ROUTES, at the end), its key and its stores
#     HttpRequest     the route reads the body, and holds memory for it meanwhile
#     ResponseWriter  the head, an event for each body of REQUEST HANDLING, the end
#
# Whatever goes wrong on this way is raised, and answered in Handler.error_boundary() in
# the form of the API that was called: with a status of its own as long as nothing was
# sent; as the last event of a stream that has begun. A socket that fails raises
# ClientGone, and nobody is answered.
#
# Public   LLMServer, Handler, advice_by_path
# Uses     OPTIONS, CONFIG, ERRORS, LOGGING, WORK BUDGET, API TYPES, REQUEST BODIES,
#          OPENAI API, ANTHROPIC API, TENANTS, REQUEST HANDLING, STATUS
# Thread   connection

# -- listening -------------------------------------------------------------------------


class LLMServer(ThreadingTCPServer):
    """One address to listen on. Several may share a state and a number of `slots`.

    A slot is an open connection. Raises OSError: the address is not this machine's, or
    it is taken (EADDRINUSE).
    """

    allow_reuse_address = True
    daemon_threads = True
    # Clients that come in one moment wait here for the accept thread; more are reset.
    # The system may keep fewer (macOS: 128, kern.ipc.somaxconn).
    request_queue_size = 1024

    def __init__(
        self,
        address: tuple[str, int],
        state: ServerState,
        *,
        slots: threading.BoundedSemaphore,
    ) -> None:
        self.state = state
        self._slots = slots
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._check_address(address)
        super().__init__(address, Handler)

    def _check_address(self, address: tuple[str, int]) -> None:
        with socket.socket(self.address_family) as probe:
            # At another machine's address somebody else could listen: it is not called.
            probe.bind((address[0], 0))
            # On macOS a second server can bind to an address that is taken.
            if probe.connect_ex(address) == 0:
                raise OSError(errno.EADDRINUSE, "in use")

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Raises OSError while no slot is free."""
        if not self._slots.acquire(timeout=0.5):
            raise BlockingIOError
        try:
            return super().get_request()
        except OSError:
            self._slots.release()
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its slot."""
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, _request: Any, client_address: Any) -> None:
        """Log how a connection was lost; a fault of our own with its traceback."""
        error = sys.exception()
        is_lost = isinstance(error, (ClientGone, OSError))
        logger.log(
            logging.DEBUG if is_lost else logging.ERROR,
            "connection from %s ended badly: %r",
            client_address,
            error,
            exc_info=not is_lost,
        )


# -- the gate --------------------------------------------------------------------------
# Pure functions of the headers; _pass_gate() calls them in this order.


_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def _check_values(headers: HttpHeaders) -> None:
    """Raise BadRequest for a control character in a header (RFC 9110 section 5.5).

    A line break is allowed: the standard library ends a header at LF and CR, and leaves
    one in a value only where the next line continues it.
    """
    for name, value in headers.items():
        if _CONTROL.search(value):
            raise BadRequest(f"the header {name[:60]!r} has a control character in it")


def _header(headers: HttpHeaders, name: str) -> str:
    """A header in lower case, with single blanks; "" if it is not there."""
    return " ".join(headers.get(name, "").lower().split())


def _check_host(headers: HttpHeaders, config: Config) -> None:
    """Raise NotServed if a server on loopback is called by another machine's name.

    A web page can make its own name point to 127.0.0.1; the browser then takes this
    server for the page's own, but still sends that name. Programs may send no Host.
    A server that other machines reach has names that it cannot know.
    """
    if "Host" not in headers or not is_loopback(config.mlx_host):
        return
    names = ["localhost", "127.0.0.1", "[::1]", config.mlx_host.lower()]
    names += split_list(config.allowed_hosts.lower())
    names += [f"{name}:{config.mlx_port}" for name in names]
    host = _header(headers, "Host")
    if host not in names:
        raise NotServed(
            403, f"the Host {host[:200]!r} is not this server's: see ALLOWED_HOSTS"
        )


def _check_origin(headers: HttpHeaders, config: Config) -> dict[str, str]:
    """Raise NotServed for a web page other than ours and those of CORS_ORIGINS.

    Browsers send the Origin of the page that asks; programs send none. Returns the
    headers that allow the page to read the response; for our own it needs none.
    """
    origin = _header(headers, "Origin")
    if "Origin" not in headers or origin == f"http://{_header(headers, 'Host')}":
        return {}
    allowed_origins = split_list(config.cors_origins.lower())
    if origin not in allowed_origins and "*" not in allowed_origins:
        raise NotServed(
            403, f"web pages of {origin[:200]!r} may not ask: see CORS_ORIGINS"
        )
    return {
        "Vary": "Origin",
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Max-Age": "600",
        "Access-Control-Allow-Headers": _header(
            headers, "Access-Control-Request-Headers"
        ),
    }


class _BodyLimit(NamedTuple):
    """How large a body may be."""

    n_bytes: int
    source: str  # of the limit, for people

    @classmethod
    def of(cls, state: ServerState) -> _BodyLimit:
        """That of a setting, or less where little memory is left for bodies."""
        n_bytes = state.config.max_body_bytes
        affordable_bytes = state.body_memory.max_body_bytes
        if affordable_bytes < n_bytes:
            return cls(affordable_bytes, "what MEMORY_LIMIT_BYTES leaves for one")
        return cls(n_bytes, "MAX_BODY_BYTES")

    def check(self, n_bytes: int) -> None:
        """Raise NotServed if that is more."""
        if n_bytes > self.n_bytes:
            sentence = f"the body is larger than {self.source} ({self.n_bytes} bytes)"
            raise NotServed(413, sentence, code="request_too_large")


def _check_length(headers: HttpHeaders, limit: _BodyLimit) -> int | None:
    """The bytes of the body; None if it comes in chunks, and only its end shows them.

    Raises BadRequest if it is not plain where the body ends: what one program takes for
    a body another could take for a second request. Raises NotServed if the body is too
    large or compressed.
    """
    length = ",".join(headers.get_all("Content-Length", ["0"])).strip()
    has_bad_lines = bool(headers.get_payload())  # there the parser puts them
    if has_bad_lines or not re.fullmatch("[0-9]{1,18}", length):
        raise BadRequest(
            "a line among the headers is no header, or Content-Length no number"
        )
    if _header(headers, "Content-Encoding") not in ("", "identity"):
        raise NotServed(415, "compressed bodies are not accepted; send plain JSON")
    if "Transfer-Encoding" in headers:
        _check_coding(headers)
        return None
    limit.check(int(length))
    return int(length)


def _check_coding(headers: HttpHeaders) -> None:
    """Raise BadRequest or NotServed for any Transfer-Encoding but chunked.

    RFC 9112 sections 6.1 and 6.3; the coding `identity` of older ones is none any more.
    """
    codings = split_list(",".join(headers.get_all("Transfer-Encoding", [])).lower())
    if codings == ["chunked"]:
        return
    sentence = "Transfer-Encoding can only be chunked; leave it out for a plain body"
    if codings[-1:] == ["chunked"] and codings.count("chunked") == 1:
        raise NotServed(501, sentence)
    raise BadRequest(sentence)


def _check_key(headers: HttpHeaders, config: Config) -> str:
    """The key that came with a request; "" if the server has no keys.

    Raises NotServed if it is none of them. All are compared, each in constant time, so
    that the time until the response says nothing about a key.
    """
    keys = split_list(config.api_key)
    if not keys:
        return ""
    matches = []
    sent_keys = _sent_keys(headers)
    for sent_key in sent_keys:
        matches += [key for key in keys if hmac.compare_digest(sent_key, key.encode())]
    if matches:
        return matches[0]

    fault = "a key is needed"
    if any(sent_keys):
        fault = (
            "the key that was sent is wrong: it is none of API_KEY. Send one of them"
        )
    raise NotServed(
        401,
        f"{fault}, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _sent_keys(headers: HttpHeaders) -> list[bytes]:
    """The keys of both headers, in UTF-8, which http.server has read as Latin-1."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    texts = [headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        texts.append(token)
    # As bytes: as text, strip() would take off the last byte of a letter such as "à".
    return [text.encode("latin-1").strip() for text in texts]


# -- paths -----------------------------------------------------------------------------

# What to use instead of some paths that are not served, and of all below them.
_ADVICE: Final[Mapping[str, str]] = {
    "/": "people find a page at {server}/; the base URL of OpenAI's clients is "
    "{server}/v1, that of Anthropic's {server}",
    "/v1": "the base URL of OpenAI's clients is {server}/v1. They add a path to it, as "
    "in {server}/v1/chat/completions. People find a page at {server}/",
    "/v1/responses": "LiteLLM serves it, with ENABLE_PROXY, at {proxy}/v1/responses",
    "/v1beta": "LiteLLM serves Google's API, with ENABLE_PROXY; the base URL is "
    "{proxy}",
    "/v1/complete": "Anthropic's clients find the Messages API at {server}/v1/messages",
    "/v1/messages": "the Messages API is {server}/v1/messages and "
    "{server}/v1/messages/count_tokens, one request at a time",
    "/v1/threads /v1/assistants /v1/conversations": "no conversation is stored here: "
    "send all of its messages, each time, to {server}/v1/chat/completions",
    "/v1/embeddings /v1/rerank /api/embed /api/embeddings": "this server writes text "
    "and makes no embeddings: run another server for these. Chats are at "
    "{server}/v1/chat/completions",
    "/v1/audio /v1/images": "this server writes text only, at "
    "{server}/v1/chat/completions",
    "/api": "this is neither Ollama nor LM Studio. Where the client has the choice, "
    "take `OpenAI compatible` with the base URL {server}/v1",
    "/api/v0 /api/v1": "this is not LM Studio. OpenAI's API is here: the base URL is "
    "{server}/v1, chats go to {server}/v1/chat/completions, and {server}/v1/models "
    "names the model",
    "/completion /props /slots /tokenize /infill": "this is not llama.cpp's server, "
    "but takes OpenAI's requests, as that one does: the base URL is {server}/v1",
    "/api/chat /api/generate": "this is not Ollama. OpenAI's API is here: the base URL "
    "is {server}/v1, chats go to {server}/v1/chat/completions",
    "/api/tags /api/show /api/ps": "this is not Ollama. {server}/v1/models names the "
    "model; the base URL of OpenAI's clients is {server}/v1",
    "/api/pull /api/create /api/copy /api/push /api/delete": "this is not Ollama. The "
    "one model is that of MODEL_PATH: to change it, set MODEL_PATH and start the "
    "server again",
    "/docs /redoc /swagger": "{server}/openapi.json describes the API, README.md "
    "explains it; people find a page at {server}/",
}


def _resolve_path(target: str) -> str:
    """The path of a request target, as in _ROUTES where a client could mean one.

    Clients add a path to a base URL that was given with /v1 or without, with a slash at
    its end or without: so /v1/v1/models, /v1//models and /models are /v1/models.
    """
    path = re.sub("/{2,}", "/", target.partition("?")[0]).rstrip("/") or "/"
    while path.startswith("/v1/v1"):
        path = path.removeprefix("/v1")
    if path not in _ROUTE_PATHS and _route_path(f"/v1{path}") in _ROUTE_PATHS:
        return f"/v1{path}"
    return path


def _route_path(path: str) -> str:
    """The path that _ROUTES has for it: a model's name is a star there."""
    return "/v1/models/*" if path.startswith("/v1/models/") else path


def advice_by_path(config: Config, *, server_url: str = "") -> dict[str, str]:
    """What to use instead of a path that is not served; "/" is for any other.

    `server_url`: as the client calls this server; "": as this machine does.
    """
    proxy_url = write_url(config.proxy_host, config.proxy_port)
    if server_url and config.proxy_host in ("0.0.0.0", "::"):  # where the server is
        port = f":{config.proxy_port}"
        proxy_url = re.sub(r"(:\d+)?$", port, server_url, count=1)
    server_url = server_url or write_url(config.mlx_host, config.mlx_port)
    advice_of = {}
    for paths, sentence in _ADVICE.items():
        advice = sentence.format(server=server_url, proxy=proxy_url)
        advice_of.update(dict.fromkeys(paths.split(), advice))
    return advice_of


def _advise(path: str, headers: HttpHeaders, config: Config) -> str:
    """The advice for a path or for the nearest one above it."""
    server_url = f"http://{_header(headers, 'Host')}"
    if not re.fullmatch(r"http://[\w.\[\]:-]{1,200}", server_url):
        server_url = ""
    advice = advice_by_path(config, server_url=server_url)
    while path not in advice:
        path = path.rpartition("/")[0] or "/"
    return advice[path]


# -- reading ---------------------------------------------------------------------------

_PIECE_BYTES: Final = 1 << 17  # of a body, read at once
_MAX_UNHELD_BYTES: Final = 1 << 16  # of a body, before memory is reserved for it
# While others wait for memory, a body has so many seconds, and one more for so many
# bytes that have come. Who is slower gives way.
_GRACE_SECONDS: Final = 2.0
_BYTES_PER_SECOND: Final = 1_000_000
_MAX_LINE_BYTES: Final = 1 << 12  # of a chunk's size, or of a trailer
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;.*)?")
_MALFORMED_CHUNKS: Final = "the chunked body is malformed"


class _TimedInput(socket.SocketIO):
    """The bytes that a client sends. Raises TimeoutError if they come too slowly.

    Without it a client that sends a byte now and then would keep its slot for ever.
    """

    max_gap_seconds = 0.0  # between two bytes
    deadline = 0.0  # of the whole request, on the monotonic clock
    check_pace: Callable[[], None] | None = None  # called often; ends it if it raises

    def readinto(self, buffer: Any) -> int | None:
        """Read what has come, or wait for it. Raises what `check_pace` does."""
        silent_until = min(time.monotonic() + self.max_gap_seconds, self.deadline)
        is_readable = False
        while not is_readable:
            seconds = silent_until - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("the request is late")
            if self.check_pace is not None:
                self.check_pace()
                seconds = min(seconds, CLIENT_LOOK_SECONDS)
            is_readable = _is_readable(self, seconds)
        return super().readinto(buffer)


def _is_readable(connection: socket.socket | socket.SocketIO, seconds: float) -> bool:
    """Whether bytes, or the end, come within some seconds."""
    poll = select.poll()  # select() knows no descriptor above 1,023
    poll.register(connection, select.POLLIN)
    milliseconds = min(math.ceil(seconds * 1_000), 2**31 - 1)  # the most that it takes
    return bool(poll.poll(milliseconds))


def _read_pieces(stream: io.BufferedIOBase, n_bytes: int) -> Iterator[bytes]:
    """So many bytes, as they come. Raises ClientGone: they end before."""
    while n_bytes:
        piece = stream.read1(min(n_bytes, _PIECE_BYTES))
        if not piece:
            raise ClientGone
        n_bytes -= len(piece)
        yield piece


def _read_chunks(stream: io.BufferedIOBase, limit: _BodyLimit) -> Iterator[bytes]:
    """What is in the chunks of a body, as it comes; RFC 9112 section 7.1:

        4       a size in hexadecimal; `;name=value` may follow it
        {"a"    so many bytes
        3
        :1}
        0       the end; trailers may follow it, up to an empty line

    Raises BadRequest: it is no chunked body; NotServed: it is too large; ClientGone: it
    ends before its end.
    """
    n_bytes = 0
    while True:
        match = _CHUNK_SIZE.fullmatch(_read_line(stream))
        if match is None:
            raise BadRequest(_MALFORMED_CHUNKS)
        size = int(match[1], 16)
        if size == 0:
            break
        n_bytes += size
        limit.check(n_bytes)
        yield from _read_pieces(stream, size)
        if _read_line(stream):
            raise BadRequest(_MALFORMED_CHUNKS)
    while _read_line(stream):
        pass  # trailers, up to an empty line


def _read_line(stream: io.BufferedIOBase) -> bytes:
    """A line of a chunked body, without its end, which is CR LF.

    Raises BadRequest for another end: what one program takes for the end of a line, and
    another does not, can hide a second request. Raises ClientGone: there is no end.
    """
    line = stream.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
        raise ClientGone
    if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
        raise BadRequest(_MALFORMED_CHUNKS)
    return line[:-2]


_BODY_MARK: Final = re.compile(  # a string, and what follows a key; a bracket
    rb"""(?xs: "( [^"\\]*+ (?: \\. [^"\\]*+ )*+ )"
        (?: \s*+ : \s*+ (true|false)? )?
    | ([\[{]) | [\]}] )"""
)


def wants_stream(payload: bytes) -> bool:
    """Whether the object in `payload` has the member `"stream": true`.

    Nothing is parsed: that would take the memory which its request waits for.
    """
    if not re.search(rb'"stream"\s*:\s*true', payload):
        return False
    is_stream = False
    depth = 0
    for mark in _BODY_MARK.finditer(payload):
        if mark[1] is None:
            depth += 1 if mark[3] else -1
        elif depth == 1 and mark[1] == b"stream" and mark[2]:
            is_stream = mark[2] == b"true"
    return is_stream


# -- responses -------------------------------------------------------------------------

_COMMON_HEADERS: Final = {  # what the page must not do; elsewhere it does no harm
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@contextmanager
def _noting_loss() -> Iterator[None]:
    """Raise ClientGone where the socket fails, as nothing of our own does inside."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone from error


class ResponseWriter:
    """Sends the response to one request. Raises ClientGone if nobody takes it.

    Its state decides what an error can still become:

    nothing   a response with a status of its own
    whole     only a line in the log: the response is complete
    stream    the last event
    """

    def __init__(self, connection: Handler) -> None:
        self._connection = connection
        self.state: Literal["nothing", "whole", "stream"] = "nothing"
        # For a web page that may read the response; the gate sets them.
        self.cors_headers: Mapping[str, str] = {}

    def send_json(
        self, status: int, body: object, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole response. Half of a surrogate pair is sent as its escape."""
        text = json.dumps(body, ensure_ascii=False)
        payload = text.encode("utf-8", "backslashreplace")
        self.send(status, payload, content_type="application/json", headers=headers)

    def send_file(self, name: str, content_type: str) -> None:
        """Send a file of the folder web, read anew each time. Raises NotServed."""
        try:
            payload = (Path(__file__).resolve().parent / "web" / name).read_bytes()
        except OSError:
            raise NotServed(404, f"web/{name} is missing beside start-llm.py") from None
        self.send(200, payload, content_type=content_type)

    def send(
        self,
        status: int,
        payload: bytes,
        *,
        content_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole response."""
        content_headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(payload)),
        }
        self.send_head(status, {**content_headers, **(headers or {})})
        if self._connection.command != "HEAD":
            self._write(payload)

    def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Send a whole response without a body, or what comes before its body."""
        if self.state == "nothing":
            self.state = "whole"
        connection = self._connection
        connection.send_response(status)
        all_headers = {**_COMMON_HEADERS, **headers, **self.cors_headers}
        for name, value in all_headers.items():
            connection.send_header(name, value)
        will_close = connection.close_connection or connection.is_unread
        if will_close or not connection.is_http_1_1:
            connection.send_header("Connection", "close")  # http.server then closes it
        with _noting_loss():
            connection.end_headers()

    def begin_stream(self) -> None:
        """Send the head of a stream, unless a ping has begun it already."""
        if self.state == "stream":
            return
        self.state = "stream"
        headers = {"Content-Type": "text/event-stream; charset=utf-8"}
        if self._connection.is_http_1_1:
            headers["Transfer-Encoding"] = "chunked"
        self.send_head(200, headers)

    def send_event(self, body: Mapping[str, object]) -> None:
        """Send an event of a stream. Anthropic's have a name, which is their type.

        In ASCII: U+2028 in a text would be the end of a line to some clients.
        """
        name = f"event: {body['type']}\n" if "type" in body else ""
        self.send_chunk(f"{name}data: {json.dumps(body)}\n\n".encode())

    def send_chunk(self, payload: bytes) -> None:
        """Send a part of a stream; an empty one ends it."""
        if self._connection.is_http_1_1:
            payload = b"%x\r\n%s\r\n" % (len(payload), payload)
        self._write(payload)

    def _write(self, payload: bytes) -> None:
        with _noting_loss():
            self._connection.wfile.write(payload)


# -- a connection ----------------------------------------------------------------------

_CLIENT_HEADERS: Final[Mapping[str, str]] = {  # that only one client sends
    "x-codex-": "Codex",
    "x-claude-code-": "Claude Code",
}
_MAX_REQUEST_LINE_BYTES: Final = 65_536  # as the standard library has it
_ABSOLUTE_TARGET: Final = re.compile(r"(?i:https?)://([^/?#]+)(.*)")


class Handler(BaseHTTPRequestHandler):
    """One connection: what the standard library reads of it, one request after another.

    A request is answered in _answer(). `passed` is the request once it has passed the
    gate; who is refused before has the stores of everybody.
    """

    server: LLMServer
    server_version = "start-llm"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # even garbage gets a status line
    disable_nagle_algorithm = True
    raw_requestline: bytes  # of the standard library

    # Of the request that is being answered; the first two as the gate finds them.
    is_unread: bool  # bytes of it may still come; then the response closes
    passed: HttpRequest | None
    response: ResponseWriter

    def setup(self) -> None:
        """Replace the input of the standard library by one that limits the time."""
        super().setup()
        self.connection.settimeout(self.server.state.config.idle_connection_seconds)
        self.input = _TimedInput(self.connection, "rb")
        self.rfile = io.BufferedReader(self.input)

    def handle_one_request(self) -> None:
        """Read a request line and headers, and call _answer()."""
        idle_seconds = self.server.state.config.idle_connection_seconds
        self.input.max_gap_seconds = idle_seconds
        # At most one idle time until it begins, and three until all of it is there.
        self.input.deadline = time.monotonic() + 3 * idle_seconds
        self.input.check_pace = None
        self.is_unread = True
        self.passed = None
        self.response = ResponseWriter(self)
        self.command = ""
        self.path = ""
        self.requestline = ""
        self.request_version = ""
        self.headers = HttpHeaders()
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the request line and the headers; what the standard library does not do.

        An empty line before a request counts for nothing (RFC 9112 section 2.2). The
        host of a target in absolute form takes the place of Host (section 3.2.2).
        """
        if self.raw_requestline in (b"\r\n", b"\n"):
            self.raw_requestline = self.rfile.readline(_MAX_REQUEST_LINE_BYTES + 1)
            if len(self.raw_requestline) > _MAX_REQUEST_LINE_BYTES:
                self.send_error(414)
                return False
        if not super().parse_request():
            return False
        match = _ABSOLUTE_TARGET.fullmatch(self.path)
        if match is not None:
            del self.headers["Host"]
            self.headers["Host"] = match[1]
            self.path = f"/{match[2].removeprefix('/')}"
        return True

    def handle_expect_100(self) -> bool:
        """Invite no body yet: invite_body() does, after the gate and with a route."""
        return True

    def invite_body(self) -> None:
        """Tell a client to send its body that waits to be told."""
        if self.is_http_1_1 and _header(self.headers, "Expect") == "100-continue":
            with _noting_loss():
                super().handle_expect_100()

    def finish(self) -> None:
        """Wait until the client has read the last response, and close.

        Closing while bytes of the client are unread resets the connection, and a reset
        can take a response from a client that has not read it yet.
        """
        self.input.max_gap_seconds = 1.0
        self.input.check_pace = None
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.is_unread and self.rfile.read1(1 << 16):
                pass
        super().finish()

    @property
    def is_http_1_1(self) -> bool:
        """Older clients know no chunks (RFC 9112 section 6.1) and send one request."""
        return self.request_version >= "HTTP/1.1"

    @property
    def client(self) -> str:
        """Who sends this request; "" if it has not said.

        LiteLLM has a User-Agent of its own, but forwards headers that begin with "x-".
        OpenClaw has that of its library, and differs by a header for traces.
        """
        for name in self.headers:
            for beginning, client in _CLIENT_HEADERS.items():
                if name.lower().startswith(beginning):
                    return client
        client = name_client(self.headers.get("User-Agent", ""))
        if client in ("OpenAI", "Anthropic") and "traceparent" in self.headers:
            return "OpenClaw"
        return client

    def check_client(self) -> None:
        """Raise ClientGone if the end is all that there is to read.

        What there is may also be the next request.
        """
        if not _is_readable(self.connection, 0):
            return
        with _noting_loss():
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise ClientGone

    def _answer(self) -> None:
        with self.error_boundary():
            self.passed = _pass_gate(self)
            self.passed.answer()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _answer

    @contextmanager
    def error_boundary(self) -> Iterator[None]:
        """Send what goes wrong inside to the client. Raises ClientGone: it has left."""
        try:
            yield
        except ServerError as error:
            self._send_error_body(error)
        except ClientGone:
            raise
        except Exception:
            logger.exception("unexpected failure in %s", self.requestline)
            self._send_error_body(ServerError("the server failed on this request"))

    def _send_error_body(self, error: ServerError) -> None:
        """An error in the form of the API that was called; it is logged, too."""
        if self.response.state == "whole":
            logger.warning("failed after the response: %s", error.without_quote())
            self.close_connection = True
            return
        self._note_refusal(error)
        path = _resolve_path(self.path)
        body: Mapping[str, object] = error.body()
        if path.startswith("/v1/messages"):
            body = anthropic_error_body(error)
        elif path.startswith("/api/"):
            body = {"error": str(error)}  # as Ollama writes it
        if self.response.state == "nothing":
            self.response.send_json(error.status, body, error.headers)
            return
        self.close_connection = True
        self.response.send_event(body)
        self.response.send_chunk(b"")

    def _note_refusal(self, error: ServerError) -> None:
        """Log an error, and keep it for the status page.

        A request line with another method than ours may be the rest of a body whose
        length was wrong: nothing of it is kept. The standard library quotes such a line
        in its sentence, after " (".
        """
        is_request = hasattr(self, f"do_{self.command}")
        quotes = self.server.state.config.enable_request_logging
        sentence = str(error) if quotes else error.without_quote()
        if not is_request:
            sentence = sentence.partition(" (")[0]
        path = self.path.partition("?")[0]
        refusal: Refusal = {
            "at": time.time(),
            "method": self.command if is_request else "",
            "path": printable(path, max_length=200) if is_request else "",
            "status": error.status,
            "client": self.client,
            "sentence": printable(sentence, max_length=300),
        }
        was_submitted = self.passed is not None and self.passed.was_submitted
        state = self.passed.state if self.passed else self.server.state
        note_refusal(state.keep(), refusal, was_submitted=was_submitted)

    def send_error(
        self, code: int, message: str | None = None, _explain: str | None = None
    ) -> None:
        """What the standard library refuses (a bad request line, too many headers)."""
        sentence = message or "the request could not be understood"
        self._send_error_body(NotServed(code, sentence))

    def log_message(self, pattern: str, *args: Any) -> None:
        """Log at DEBUG; the standard library writes to stderr."""
        logger.debug("%s %s", self.client_address[0], pattern % args)


# -- a request -------------------------------------------------------------------------

_PREFLIGHT: Final = ("OPTIONS", "*")  # a browser asks what a page may send


def _pass_gate(connection: Handler) -> HttpRequest:
    """The request of a connection. Raises NotServed or BadRequest: it is refused.

    The order of the checks matters:

    0 values  a name that is cut at a NUL is another name elsewhere
    1 host    a page that calls us by its own name learns nothing but that
    2 origin  an allowed page can read what follows, such as that its key is wrong
    3 length  from here on a refusal can leave the connection open
    4 key     last, since it needs the route, and decides whose stores are used
    """
    state = connection.server.state
    headers = connection.headers
    _check_values(headers)
    _check_host(headers, state.config)
    cors_headers = _check_origin(headers, state.config)
    connection.response.cors_headers = cors_headers
    body_limit = _BodyLimit.of(state)
    body_length = _check_length(headers, body_limit)
    connection.is_unread = body_length != 0
    if body_length is None and "Content-Length" in headers:
        connection.close_connection = True  # both: RFC 9112 section 6.3

    method = "GET" if connection.command == "HEAD" else connection.command
    path = _resolve_path(connection.path)
    route = _ROUTES.get((method, _route_path(path)))
    if method == "OPTIONS" and cors_headers:
        route = _ROUTES[_PREFLIGHT]
    key = ""
    if route is None or route.needs_key:
        key = _check_key(headers, state.config)
        user = headers.get(USER_HEADER, "").strip()
        state = state.for_tenant(name_tenant(state.config, key=key, user=user))
    return HttpRequest(
        connection,
        path=path,
        route=route,
        key=key,
        state=state,
        body_limit=body_limit,
        body_length=body_length,
    )


@dataclass(eq=False, slots=True)
class HttpRequest:
    """A request that has passed the gate, with the memory that it holds."""

    connection: Handler
    _: KW_ONLY
    path: str  # as in _ROUTES, but for the name of a model
    route: _Route | None  # None: nothing is served there
    key: str  # of API_KEY, that came with it; "" if none is needed
    state: ServerState  # the stores that it may use: all, or those of its tenant
    body_limit: _BodyLimit
    body_length: int | None  # None: it comes in chunks
    was_submitted: bool = False  # to the engine
    _gets_pings: bool = False  # it is parsed, and wants a stream
    _sent_at: float = 0.0  # when its body was read, or the last ping sent
    _held_memory: ExitStack = field(default_factory=ExitStack)  # for its body
    _work_memory: ExitStack = field(default_factory=ExitStack)  # to prepare it

    @property
    def response(self) -> ResponseWriter:
        """What sends the response."""
        return self.connection.response

    def answer(self) -> None:
        """Send the response, and give the memory back. Raises NotServed, ClientGone.

        Raises also what the route raises: Handler.error_boundary() answers it.
        """
        with self._held_memory, self._work_memory:
            if self.route is None:
                raise self._not_found()
            body = self.route.answer(self)
            if body is not None:
                self.response.send_json(200, body)

    def _not_found(self) -> NotServed:
        """What is wrong with a path or a method that no route has."""
        method = self.connection.command
        path = _route_path(self.path)
        advice = _advise(path, self.connection.headers, self.state.config)
        served = ", ".join(name for name, route_path in _ROUTES if route_path == path)
        if not served:
            return NotServed(404, f"there is nothing at {path[:200]}: {advice}")
        sentence = f"{path} takes {served}, not {method}"
        if method in ("GET", "HEAD"):  # a browser
            sentence += f": {advice}"
        allowed = served.replace("GET", "GET, HEAD")
        return NotServed(405, sentence, headers={"Allow": allowed})

    # -- routes ------------------------------------------------------------------------
    # Each returns a body to be sent as JSON, or sends its response itself.

    def allow_page(self) -> None:
        self.response.send_head(204, {})

    def get_root(self) -> None:
        """The page for browsers, /health for programs."""
        if "text/html" in _header(self.connection.headers, "Accept"):
            self.response.send_file("index.html", "text/html; charset=utf-8")
        else:
            self.get_health()

    def get_health(self) -> None:
        status, body = health_body(self.state)
        self.response.send_json(status, body)

    def get_openapi(self) -> None:
        self.response.send_file("openapi.json", "application/json")

    def get_metrics(self) -> None:
        text = metrics_text(self.state)
        self.response.send(200, text, content_type=prometheus.CONTENT_TYPE_LATEST)

    def get_status(self) -> object:
        """`?detail=cache` shows more of the cache; any other query is passed over."""
        if self._parameters().get("detail") == "cache":
            return detailed_status_body(self.state)
        return status_body(self.state)

    def delete_cache(self) -> object:
        """Without a query, of all sessions; `?session=ID` of one; any other of none."""
        has_query = bool(self._query)
        session = self._parameters().get("session", "") if has_query else None
        return drop_cache(self.state, session)

    @property
    def _query(self) -> str:
        return self.connection.path.partition("?")[2]

    def _parameters(self) -> dict[str, str]:
        """Those of the query; of two with one name the last."""
        return dict(parse_qsl(self._query))

    def explain(self) -> object:
        request = self._read_request(parse_any_request)
        return explain_body(self.state, request)

    def get_version(self) -> object:
        return {"version": VERSION}

    def get_models(self) -> object:
        return models_body(self.state)

    def get_model(self) -> object:
        name = self.path.removeprefix("/v1/models/")
        return model_body(self.state, unquote(name))

    def chat(self) -> None:
        self._generate(self._read_request(parse_chat_request, can_stream=True))

    def complete(self) -> None:
        self._generate(self._read_request(parse_completion_request, can_stream=True))

    def reply_to_messages(self) -> None:
        request = self._read_request(parse_anthropic_request, can_stream=True)
        if request.messages[-1]["role"] == "assistant":
            raise BadRequest(
                "the last should be the user's: no reply can be begun here (prefill)",
                field="messages",
            )
        self._generate(request)

    def count_tokens(self) -> object:
        request = self._read_request(parse_anthropic_request)
        return count_tokens_body(self.state, request)

    def _generate(self, request: ChatRequest) -> None:
        """Send the reply to a request, whole or as a stream.

        The request is under way until its last byte has been sent, even if that is an
        error: a server that is told to stop waits for it. So errors are sent inside.
        """
        generation = ReplyGeneration(self.state, request, client=self.connection.client)
        with closing(generation), self.connection.error_boundary():
            self.was_submitted = True
            self._work_memory.close()  # the prompt is made
            if not request.stream:
                for body in self._while_connected(generation.whole()):
                    self.response.send_json(200, body)
                return

            self.response.begin_stream()
            for body in self._while_connected(generation.chunks()):
                self.response.send_event(body)
            if request.kind != "messages":
                self.response.send_chunk(b"data: [DONE]\n\n")
            self.response.send_chunk(b"")

    def _while_connected(
        self, bodies: Iterable[JsonObject | None]
    ) -> Iterator[JsonObject]:
        """All but the Nones, which come while there is nothing to send.

        At each of them it looks for the client. Raises ClientGone: it has closed.
        """
        for body in bodies:
            if body is not None:
                yield body
            else:
                self.connection.check_client()

    # -- its body ----------------------------------------------------------------------

    def _read_request(
        self, parse: Callable[..., ChatRequest], *, can_stream: bool = False
    ) -> ChatRequest:
        """The body, parsed, when its turn comes.

        Its user may be named in it, so only now its tenant is certain. Raises
        BadRequest, NotServed; ClientGone: it ends early, or nobody waits for the
        response. `can_stream`: pings may be sent meanwhile if the body wants a stream.
        """
        payload = self.read_body()
        self._sent_at = time.monotonic()
        unparsed = payload if can_stream else b""
        memory = self.state.body_memory
        work = memory.work.reserve(
            memory.WORK_BYTES * len(payload), partial(self._keep_waiting, unparsed)
        )
        self._work_memory.enter_context(work)

        config = self.state.config
        request = parse(
            parse_json_body(payload),
            config,
            request_id=uuid.uuid4().hex,
            headers=dict(self.connection.headers),
        )
        tenant = name_tenant(config, key=self.key, user=request.user)
        self.state = self.connection.server.state.for_tenant(tenant).keep()
        self._gets_pings = can_stream and request.stream
        return replace(request, check_client=self._keep_waiting)

    def read_body(self) -> bytes:
        """The bytes of the body; what they take is held until the response is sent.

        Who has sent less than _MAX_UNHELD_BYTES holds nothing, whatever length it has
        announced (L-131).
        """
        self.connection.invite_body()
        stream = self.connection.rfile
        if self.body_length is None:
            pieces = _read_chunks(stream, self.body_limit)
            n_bytes = self.body_limit.n_bytes  # it may come to this
        else:
            pieces = _read_pieces(stream, self.body_length)
            n_bytes = self.body_length

        payload = bytearray()
        with _noting_loss():
            for piece in pieces:
                payload += piece
                if len(payload) >= _MAX_UNHELD_BYTES:
                    break  # the rest is read once memory is held for it
            else:
                n_bytes = len(payload)  # the body has ended
        held = self._hold(n_bytes)
        started_at = time.monotonic()
        self.connection.input.check_pace = lambda: self._check_pace(
            held, time.monotonic() - started_at, len(payload)
        )
        with _noting_loss():
            for piece in pieces:
                payload += piece

        self.connection.is_unread = False
        self.connection.input.check_pace = None
        held.shrink(self.state.body_memory.HELD_BYTES * len(payload))
        return bytes(payload)

    def _hold(self, n_bytes: int) -> Reservation:
        """Memory for so many bytes of the body, when its turn comes."""
        memory = self.state.body_memory
        asked_at = time.monotonic()
        reservation = memory.held.reserve(
            memory.HELD_BYTES * n_bytes, self.connection.check_client
        )
        held = self._held_memory.enter_context(reservation)
        # It was not the client that took this time.
        self.connection.input.deadline += time.monotonic() - asked_at
        return held

    def _check_pace(self, held: Reservation, seconds: float, n_bytes: int) -> None:
        """Raise NotServed for a body that comes slowly while others wait for memory."""
        max_seconds = _GRACE_SECONDS + n_bytes / _BYTES_PER_SECOND
        if held.is_awaited and seconds > max_seconds:
            raise NotServed(
                408, "the body comes too slowly: others wait for the memory it holds"
            )

    def _keep_waiting(self, unparsed: bytes = b"") -> None:
        """Look for the client of a request that the model does not have yet.

        A stream gets pings, as comments: no formatter knows yet what it consists of.
        Whether an `unparsed` body wants a stream is looked up when a ping is due.
        Raises ClientGone.
        """
        self.connection.check_client()
        silent_seconds = time.monotonic() - self._sent_at
        if silent_seconds < self.state.config.keepalive_seconds:
            return
        self._sent_at = time.monotonic()
        if self._gets_pings or wants_stream(unparsed):
            self.response.begin_stream()
            self.response.send_chunk(b": the request waits for its turn\n\n")


class _Route(NamedTuple):
    answer: Callable[[HttpRequest], object]  # a body to send as JSON; None: all is sent
    needs_key: bool = True


_ROUTES: Final = {
    _PREFLIGHT: _Route(HttpRequest.allow_page, needs_key=False),
    ("GET", "/"): _Route(HttpRequest.get_root, needs_key=False),
    ("GET", "/health"): _Route(HttpRequest.get_health, needs_key=False),
    ("GET", "/openapi.json"): _Route(HttpRequest.get_openapi, needs_key=False),
    ("GET", "/metrics"): _Route(HttpRequest.get_metrics),
    ("GET", "/v1/status"): _Route(HttpRequest.get_status),
    ("DELETE", "/v1/cache"): _Route(HttpRequest.delete_cache),
    ("POST", "/v1/cache/explain"): _Route(HttpRequest.explain),
    ("GET", "/version"): _Route(HttpRequest.get_version),
    ("GET", "/v1/models"): _Route(HttpRequest.get_models),
    ("GET", "/v1/models/*"): _Route(HttpRequest.get_model),
    ("POST", "/v1/chat/completions"): _Route(HttpRequest.chat),
    ("POST", "/v1/completions"): _Route(HttpRequest.complete),
    ("POST", "/v1/messages"): _Route(HttpRequest.reply_to_messages),
    ("POST", "/v1/messages/count_tokens"): _Route(HttpRequest.count_tokens),
}
_ROUTE_PATHS: Final = frozenset(path for _, path in _ROUTES)


# region MAIN ==================================================================
# Start, serve, stop:
#
#     main      settings -> state -> addresses bound        exit status 2 if that fails
#     _serve    accept connections; load the model          2 if it cannot be loaded
#               LiteLLM runs beside; wait for a signal      1 if the model thread dies
#     _drain    running replies may end                     0
#
# Addresses are bound before the model is loaded, so /health answers while it loads. The
# model is loaded on the model thread: arrays cannot change threads before they are
# computed.
#
# For example Ctrl-C while two replies are generated: the handler sets `stop`; _serve
# calls _drain, which closes the addresses, waits SHUTDOWN_GRACE_SECONDS for the two
# replies and has the engine cut what is left; LiteLLM ends with its `with` block; main
# returns 0. A second Ctrl-C ends the process at once.
#
# Public   build_state, run_proxy, main, end_process
# Uses     OPTIONS, CONFIG, LOGGING, WORK BUDGET, SAVED RECORDS, DISK CACHE,
#          MODEL LOADING, ENGINE, TENANTS, STATUS, HTTP SERVER
# Thread   main

_STOPPED: Final = 0
_MODEL_DIED: Final = 1  # with EXIT_ON_ENGINE_DEATH only
_CANNOT_START: Final = 2

_WANTED_DESCRIPTORS: Final = 4096  # more than MAX_CONNECTIONS can need
_SPARE_DESCRIPTORS: Final = 64  # for all but connections: weights, logs, LiteLLM
_LOOPBACK_HOSTS: Final = ("127.0.0.1", "::1")
_LEDGER_PART: Final = 16  # all ledgers take at most a 16th of memory
_LAST_WORDS_SECONDS: Final = 1.0  # for somebody to read the last lines of the log
_FIRST_REPORT_SECONDS: Final = 2.0  # in which LiteLLM's keeper finds its port taken
_CUT_SECONDS: Final = 5.0  # for cut replies to send their last event
_FLUSH_SECONDS: Final = 5.0  # for records to be written
_KEEPER_SECONDS: Final = 5.0  # for the last lines of LiteLLM's keeper to be logged
_M_ARENA_MAX: Final = -8  # of mallopt(), from malloc.h of glibc


def build_state(config: Config, *, can_be_demo: bool = False) -> ServerState:
    """Everything that outlives a request; nothing runs yet.

    With `can_be_demo`, the demo is loaded if the model of `config` cannot be.
    """
    limit_bytes = memory_limit(config)
    ledger_bytes = min(config.ledger_max_bytes, limit_bytes // _LEDGER_PART)
    config = config.model_copy(update={"ledger_max_bytes": ledger_bytes})
    metrics = CacheMetrics()
    records = RecordFile()
    stores = TenantStores.empty(config, metrics, records.of_tenant(""))

    # The engine calls these two on the model thread.
    def load() -> LoadedModel:
        if can_be_demo:
            return load_or_demo(config)
        return load_model(resolve_model(config), config)

    def use_folder(folder: Path) -> None:
        records.open(folder / "records", ttl_seconds=config.ledger_ttl_seconds)
        stores.load()

    has_disk = wants_disk_cache(config)
    return ServerState(
        config=config,
        engine=Engine(
            config, metrics, load=load, use_folder=use_folder if has_disk else None
        ),
        metrics=metrics,
        session_log=SessionLog(config),
        records=records,
        started=int(time.time()),
        stores=stores,
        body_memory=BodyMemory(limit_bytes),
        proxy=Proxy(config),
    )


def main() -> int:
    """Run the server. Returns the exit status: see the banner."""
    stop = _stop_on_signals()
    options = read_options(sys.argv[1:])
    _limit_arenas()

    try:
        config = _read_config(options)
        _raise_descriptor_limit(config)
        is_named = bool(config.model_path)
        if not is_named:
            name = choose_model(config, stop)
            config = config.model_copy(update={"model_path": name})
        if stop.is_set():
            return _STOPPED
        state = build_state(config, can_be_demo=not is_named)
        state.session_log.check()
        servers = _listen(config, state)
    except (ConfigError, OSError) as error:
        return _fail(error, status=_CANNOT_START)
    return _serve(state, servers, stop=stop)


def _fail(cause: object, *, status: int) -> int:
    sys.stderr.write(f"start-llm: {cause}\n")
    return status


# -- start -----------------------------------------------------------------------------


def _raise_descriptor_limit(config: Config) -> None:
    """Have this process open as many files as MAX_CONNECTIONS needs; macOS allows 256.

    Raises ConfigError if the hard limit leaves too little.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = _WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    n_needed = config.max_connections + _SPARE_DESCRIPTORS
    if limit < n_needed:
        raise ConfigError(
            f"{n_needed} open files are needed, and {limit} are allowed: raise the hard"
            " limit (ulimit -Hn), or lower MAX_CONNECTIONS"
        )


def _limit_arenas() -> None:
    """Have all threads share one arena of glibc's malloc; macOS has no such setting.

    why(L-53): each arena keeps what is freed in it, and each thread has its own.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, 1)


def _stop_on_signals() -> threading.Event:
    """An event that SIGINT or SIGTERM sets. A second signal ends the process."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        if not stop.is_set():
            stop.set()
            return
        for child in psutil.Process().children():  # LiteLLM, or what fetches a model
            child.terminate()
        os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    return stop


def _read_config(options: Mapping[str, str]) -> Config:
    """The settings; options win over the environment, that over .env. Starts the log.

    An empty variable of the environment hides one of .env, so the default holds. Raises
    ConfigError, or OSError if .env cannot be read.
    """
    path = Path(__file__).resolve().parent / ".env"
    env_file = _read_env_file(path)
    environ = {**os.environ, **options}
    name_warnings = check_names(env_file, environ)
    places = {
        **dict.fromkeys(env_file, f"in {path}"),
        **dict.fromkeys(os.environ, "in the environment"),
        **dict.fromkeys(options, "on the command line"),
    }
    config = Config.from_env({**env_file, **environ}, places=places)
    start_logging(config)

    for sentence in name_warnings:
        logger.warning("%s", sentence)
    return config


def _read_env_file(path: Path) -> dict[str, str | None]:
    """The settings in .env; none if there is no such file.

    dotenv_values() passes over a line that it cannot read. Here it raises ConfigError
    with its number. Raises OSError if the file cannot be read.
    """
    if not path.is_file():
        return {}  # Docker makes a folder where a file is missing
    content = path.read_bytes()
    try:
        lines = list(parse_stream(io.StringIO(content.decode())))
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {number}: it is no UTF-8 text") from error
    for line in lines:
        if line.error:
            text = line.original.string  # the empty lines before it are part of it
            n_empty = text[: len(text) - len(text.lstrip())].count("\n")
            number = line.original.line + n_empty
            raise ConfigError(f"{path}, line {number}: it is no NAME=value")
    return dotenv_values(path)


def _listen(config: Config, state: ServerState) -> list[LLMServer]:
    """Bind MLX_HOST: for 127.0.0.1, ::1 or localhost both, as clients try either.

    A machine may lack the one that was not named. Raises ConfigError if another address
    cannot be bound.
    """
    hosts = [config.mlx_host]
    if config.mlx_host.lower() == "localhost":
        hosts = [*_LOOPBACK_HOSTS]
    elif config.mlx_host in _LOOPBACK_HOSTS:
        hosts += [host for host in _LOOPBACK_HOSTS if host != config.mlx_host]
    slots = threading.BoundedSemaphore(config.max_connections)

    servers: list[LLMServer] = []
    for host in hosts:
        try:
            servers.append(LLMServer((host, config.mlx_port), state, slots=slots))
        except OSError as error:
            is_missing = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
            if servers and is_missing:
                continue
            raise ConfigError(_bind_fault(host, config.mlx_port, error)) from error
    return servers


def _bind_fault(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken: start-llm runs already? Or set MLX_PORT"
        )
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


# -- serve -----------------------------------------------------------------------------


def _serve(
    state: ServerState, servers: list[LLMServer], *, stop: threading.Event
) -> int:
    """Load the model and serve until `stop` is set. Returns the exit status."""
    if _find_proxy(state.config) is not None:  # /health says so while the model loads
        state.proxy.state = "starting"
    for server in servers:
        accept = threading.Thread(
            target=server.serve_forever, name="accept", daemon=True
        )
        accept.start()
    _print_line(f"start-llm {VERSION}: loading {state.config.model_path} ...")
    state.engine.start()
    _wait_until_loaded(state, stop)

    is_loaded = state.engine.state == "ready"
    if is_loaded and state.config.kernel_warm_up != "exit":
        # why(L-36): a full collection would visit all that the libraries keep.
        gc.collect()
        gc.freeze()
        with run_proxy(state.config, models_body(state)["data"][0], state.proxy):
            state.proxy.was_reported.wait(_FIRST_REPORT_SECONDS)
            _print_line(_write_banner(state))
            _wait_until_stop(state, stop)
            if stop.is_set():
                _print_line("Stopping ... (a second Ctrl-C does not wait for replies)")
            _drain(state, servers)
    else:
        _drain(state, servers)

    if not state.engine.failure or stop.is_set():
        _print_line("stopped.")
        return _STOPPED
    status = _MODEL_DIED if is_loaded else _CANNOT_START
    return _fail(state.engine.failure, status=status)


def _wait_until_loaded(state: ServerState, stop: threading.Event) -> None:
    """Return when the model can be used, or cannot, or `stop` is set."""
    is_warming_up = False
    while state.engine.state == "loading" and not stop.wait(0.1):
        if state.engine.warm_up is not None and not is_warming_up:
            is_warming_up = True
            _print_line("warming up: kernels are compiled, minutes the first time ...")


def _write_banner(state: ServerState) -> str:
    """What a person reads once the server answers: 10 to 12 lines."""
    model = state.engine.model
    limit_bytes = state.engine.memory.get("limit", 0)  # of weights, KV and buffers
    kv_bytes = state.engine.report.get("cache_max_bytes", 0)
    url = write_url(state.config.mlx_host, state.config.mlx_port)
    launch = "python3.12 install_and_run.py launch claude"
    if url != "http://127.0.0.1:8080":
        launch += f" --url {url}"
    log_root = os.path.expanduser(state.config.log_root)

    rows = {
        "memory": f"{in_bytes(limit_bytes)} at most, KV {in_bytes(kv_bytes)} of it",
        "context": f"{model.max_context_tokens:,} tokens"
        f" (the model: {model.context_length:,})",
        "device": model.device,
        "page, chat": f"{url}/",
        "OpenAI": f"{url}/v1",
        "Anthropic": url,
        "Responses": _describe_proxy(state),
        "an agent": launch,
        "log": str(Path(__file__).resolve().parent / log_root),
        "to stop": "Ctrl-C; another model: --model NAME, or MODEL_PATH in .env",
    }
    if model.is_demo:
        rows["an agent"] = ""  # the demo is too small for an agent's instructions
        rows["demo"] = "it knows sums of two numbers below 100: What is 17 + 25?"
        rows["its garden"] = (
            "in examples/garden, ask scripts/chat.py: Which files are here?"
        )
    lines = [f"  {name:<11}{text}" for name, text in rows.items() if text]
    served = f"{model.model_id}: {in_bytes(model.nbytes)}, {model.path}"
    return "\n".join([f"start-llm {VERSION} serves {served}", *lines])


def _describe_proxy(state: ServerState) -> str:
    """Where the Responses API is, or why it is not; "" if LiteLLM is not to run."""
    proxy = state.proxy.body()
    match proxy["state"]:
        case "starting":
            return f"{proxy['url']}/v1 (LiteLLM, within a minute; a line here follows)"
        case "up":
            return f"{proxy['url']}/v1 (LiteLLM)"
        case "port_taken":
            port = state.config.proxy_port
            return f"none: port {port} is taken; stop what has it, or set PROXY_PORT"
        case "given_up":
            return "none: LiteLLM cannot be started, as said above"
    return ""


def _print_line(text: str) -> None:
    """Write to the console what is no record of the log."""
    with suppress(OSError):  # its terminal is gone
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _wait_until_stop(state: ServerState, stop: threading.Event) -> None:
    """Return when `stop` is set, or with EXIT_ON_ENGINE_DEATH if the model is dead.

    Meanwhile drop, twice a second, what was not used for too long.
    """
    faults = FaultLog()
    while not stop.is_set():
        if state.engine.state != "ready" and state.config.exit_on_engine_death:
            return
        now = time.monotonic()
        for tenant in state.tenants.states():
            faults.guard(partial(tenant.stores.expire, now))
        faults.guard(state.limit_tenants)
        stop.wait(0.5)


def _find_proxy(config: Config) -> tuple[Path, Path] | None:
    """The script that keeps LiteLLM running, and LiteLLM; None: it is not to run."""
    script = Path(__file__).resolve().parent / "scripts/helpers/litellm_beside.py"
    program = Path(sys.executable).with_name("litellm")
    if config.enable_proxy and program.exists() and script.exists():
        return script, program
    return None


@contextmanager
def run_proxy(
    config: Config, model: Mapping[str, object], proxy: Proxy
) -> Iterator[None]:
    """Have LiteLLM run beside us inside the `with` block; it has ended after it.

    `model` is the model's entry in /v1/models; `proxy` is kept up to date. The keeper,
    scripts/helpers/litellm_beside.py, runs LiteLLM. It reads its order on stdin, and
    ends when stdin closes, so also when this process is killed.
    """
    paths = _find_proxy(config)
    if paths is None:
        logger.info("no proxy: ENABLE_PROXY is off, or LiteLLM is not installed")
        proxy.was_reported.set()
        yield
        return

    script, program = paths
    keys = split_list(config.api_key)
    order = {
        **config.model_dump(mode="json"),
        "program": str(program),
        "model_id": model["id"],
        "context_length": model["context_length"],
        "api_key": keys[0] if keys else "",
        "advice": advice_by_path(config),
    }
    keeper = subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is for the server, which then ends its proxy
    )
    assert keeper.stdin and keeper.stderr
    proxy.state = "starting"
    relay = threading.Thread(
        target=_follow_keeper, args=(keeper.stderr, proxy), daemon=True
    )
    relay.start()
    try:
        with suppress(BrokenPipeError):  # it has failed, and printed its traceback
            keeper.stdin.write(json.dumps(order).encode() + b"\n")
        yield
    finally:
        keeper.stdin.close()  # it ends; a second signal ends the wait
        keeper.wait()
        relay.join(_KEEPER_SECONDS)


def _follow_keeper(lines: Iterable[bytes], proxy: Proxy) -> None:
    """Log what the keeper prints, and keep the state of LiteLLM, until the keeper ends.

    INFO LiteLLM is up at ...    a level and a sentence: a line of the log
    STATE up                     the state of LiteLLM
    KeyError: 'program'          anything else is a line of the keeper's traceback
    """
    levels = logging.getLevelNamesMapping()
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        word, _, sentence = text.partition(" ")
        if word == "STATE":
            proxy.state = cast(ProxyPhase, sentence)
            proxy.was_reported.set()
        elif word in levels:
            logger.log(levels[word], "proxy: %s", sentence)
        else:
            logger.warning("proxy: %s", text)
    if proxy.state != "port_taken":
        proxy.state = "given_up"
    proxy.was_reported.set()


# -- stop ------------------------------------------------------------------------------


def _drain(state: ServerState, servers: list[LLMServer]) -> None:
    """Accept nothing new; give running replies time to end, then cut them."""
    state.engine.is_closing = True
    for server in servers:  # their open connections stay open, for these replies
        server.shutdown()
        server.server_close()

    _wait_until_idle(state, state.config.shutdown_grace_seconds)
    state.engine.stop()
    _wait_until_idle(state, _CUT_SECONDS)
    state.records.flush(_FLUSH_SECONDS)


def _wait_until_idle(state: ServerState, seconds: float) -> None:
    """Return when no request of any tenant is running, or after `seconds`.

    A request that is not submitted yet does not count: Engine.submit() refuses it.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(tenant.stores.live for tenant in state.tenants.states()):
            return
        time.sleep(0.02)


def end_process(status: int) -> NoReturn:
    """End with a status, whatever other threads are doing.

    why(L-20): Python's own end stops threads wherever they are, and a thread that is
    inside MLX, or inside a tokenizer, then aborts the process.
    """
    atexit._run_exitfuncs()  # as Python would
    if isinstance(sys.stderr, ConsoleStream):
        sys.stderr.drain(seconds=_LAST_WORDS_SECONDS)
    os._exit(status)


# endregion

if __name__ == "__main__":
    sys.stderr = ConsoleStream(sys.stderr)
    end_process(main())
