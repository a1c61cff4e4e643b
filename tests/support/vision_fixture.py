"""The real server in this process on a tiny vision model, and the plain model as its oracle."""

import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import start_llm as s
from minimum_prefill import Request, Turns, fewest
from mlx_lm.utils import load_tokenizer
from mlx_vlm.utils import load_model, load_processor
from PIL import Image
from server_fixture import (
    MAX_WAIT_SECONDS,
    Message,
    RunningServer,
    _with_objects,
    clear_cache,
    forget_pasts,
    free_port,
    join_chunks,
    wait_until,
    wait_until_idle,
)
from tiny_models import TOOLS
from tiny_vision import PHRASE

Picture = bytes  # a file


def picture(
    seed: int, width: int = 288, height: int = 256, kind: str = "PNG"
) -> Picture:
    """Coarse random squares, so that every encoder keeps them apart."""
    numbers = np.random.default_rng(seed).integers(0, 255, (8, 10, 3))
    squares = Image.fromarray(numbers.astype(np.uint8))
    image = squares.resize((width, height), Image.Resampling.NEAREST)

    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: Picture, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def picture_message(*parts: str | Picture) -> Message:
    """A user message of texts and images, in OpenAI's words."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request: what it was, what the model was fed for it, and what came."""

    messages: list[Message]
    answer: Message
    usage: dict[str, Any]
    prompt: tuple[int, ...]  # images as negative numbers of their own
    reply: tuple[int, ...]
    prefilled: int
    logprobs: np.ndarray  # (tokens, vocabulary)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class ImageTurns(Turns):
    """A model that cannot cut back can also go on before and behind each image."""

    def boundaries(self, request: Request) -> set[int]:
        offsets = super().boundaries(request)
        for offset, (token, next_token) in enumerate(pairwise(request.prompt), 1):
            is_edge = (token < 0) != (next_token < 0)
            if is_edge and offset <= len(request.known):
                offsets.add(offset)
        return offsets


def watch_calls(module: Any, note: Callable[..., None]) -> None:
    """Have `note` called with the arguments of each call of this module, before it runs."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return kind.__call__(self, *args, **kwargs)

    module.__class__ = type(f"Watched{kind.__name__}", (kind,), {"__call__": call})


def _split_images(content: list[Message]) -> tuple[list[Message], list[Picture]]:
    """The parts of a message with images left out, and the images in order."""
    parts = []
    images = []
    for part in content:
        if part["type"] == "text":
            parts.append(part)
            continue
        _, _, data = part["image_url"]["url"].partition(",")
        images.append(base64.b64decode(data))
        parts.append({"type": "image"})
    return parts, images


class Seeing:
    """A running server and both SDKs; everything that the model and its tower are called with."""

    def __init__(self, folder: Path, monkeypatch: Any, **settings: Any) -> None:
        self.folder = folder
        self.requests: list[Request] = []
        self.seen: list[SeenRequest] = []
        self.calls: list[tuple[list[int], int]] = []  # (offsets of the rows, tokens)
        self.tower_runs = 0
        self._rows: dict[Any, tuple[list[int], list[np.ndarray]]] = {}  # by job
        self._watch_rows(monkeypatch)

        port = free_port()
        config = s.Config(
            model_path=str(folder), mlx_port=port, enable_proxy=False, **settings
        )
        self._running = RunningServer(config, lambda: self._load(folder, config))
        self.state = self._running.state

        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(
            base_url=self.url + "/v1", api_key="x", max_retries=0
        )
        self._plain()

    def _plain(self) -> None:
        """Upstream's model, processor and template, without a line of the server."""
        self.oracle = load_model(self.folder)
        self.processor = load_processor(self.folder, False)
        self.tokenizer = load_tokenizer(self.folder)
        self._process = lru_cache(8)(self._process)  # each prompt is wanted twice
        self.pad = self.oracle.config.image_token_id

        (self.end,) = self.ids("<|im_end|>")
        self._find_turns()

    def _find_turns(self) -> None:
        (start,) = self.ids("<|im_start|>")
        roles = ("system\n", "user\n", "user\n<tool_response>")
        heads = [self.ids(f"<|im_start|>{role}") for role in roles]
        self.turns = ImageTurns(start, *heads)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _load(self, folder: Path, config: s.Config) -> s.LoadedModel:
        loaded = s.load_model(folder, config)
        self.model = loaded.vision
        vlm_model = loaded.vision.whole
        watch_calls(vlm_model.language_model, self._note_call)
        watch_calls(vlm_model.vision_tower, self._note_tower)
        return loaded

    before_call = staticmethod(lambda: None)

    def _note_call(self, tokens: mx.array, *_: Any, cache: Any, **__: Any) -> None:
        self.before_call()
        n_rows, n_tokens = tokens.shape[:2]
        offset = next(layer.offset for layer in cache if hasattr(layer, "offset"))
        offsets = [offset] * n_rows if isinstance(offset, int) else offset.tolist()
        self.calls.append((offsets, n_tokens))

    def _note_tower(self, *_: Any, **__: Any) -> None:
        self.tower_runs += 1

    def _watch_rows(self, monkeypatch: Any) -> None:
        add_token = s.RunningRequest.add_token

        def note_token(row: Any, token: int, *, logprobs: mx.array) -> None:
            ids, rows = self._rows.setdefault(row.request, ([], []))
            ids.append(token)
            rows.append(np.array(logprobs))
            self._last = row.request
            add_token(row, token, logprobs=logprobs)

        monkeypatch.setattr(s.RunningRequest, "add_token", note_token)

    def ask(
        self, messages: list[Message], *, stream: bool = True, **fields: Any
    ) -> SeenRequest:
        """Greedy; one request at a time."""
        fields = {
            "model": "any",
            "temperature": 0,
            "max_tokens": 300,
            "tools": TOOLS,
            **fields,
        }

        began = len(self.calls)
        create = self.openai.chat.completions.create
        if stream:
            wants = {"stream": True, "stream_options": {"include_usage": True}}
            with create(messages=messages, **wants, **fields) as chunks:
                answer, _, usage = join_chunks(chunks)
        else:
            completion = create(messages=messages, **fields)
            answer = completion.choices[0].message.model_dump(exclude_none=True)
            usage = completion.usage.model_dump()

        return self.note(messages, answer, usage, began=began)

    def at_once(
        self, ask: Callable[[int], Any], n: int, *, is_batched: bool = True
    ) -> list[Any]:
        """`n` answers, asked for together and in part decoded together; then all is forgotten."""
        with ThreadPoolExecutor(n) as pool:
            replies = list(pool.map(ask, range(n), timeout=MAX_WAIT_SECONDS))
        most_rows = max(len(offsets) for offsets, _ in self.calls)
        assert (most_rows > 1) == is_batched, "how many decode together"
        self.forget()
        return replies

    def note(
        self, messages: list[Message], answer: Message, usage: Any, *, began: int
    ) -> SeenRequest:
        """What the request that ended last was fed."""
        ids, rows = self._rows[self._last]
        prompt = self.prompt(messages)
        prefilled = 0
        for offsets, n_tokens in self.calls[began:]:
            for offset in offsets:
                end = min(offset + n_tokens, len(prompt))
                prefilled += max(0, end - offset)

        record = SeenRequest(
            messages=messages,
            answer=answer,
            usage=usage,
            prompt=prompt,
            reply=tuple(ids),
            prefilled=prefilled,
            logprobs=np.array(rows),
        )
        assert len(prompt) == usage["prompt_tokens"]
        self.seen.append(record)
        self.requests.append(Request(prompt, record.reply))
        return record

    def text(self, messages: list[Message]) -> tuple[str, list[Picture]]:
        """The prompt as the template renders it, and the images in order."""
        template_messages = []
        images = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                content, content_images = _split_images(content)
                images += content_images
            template_messages.append(_with_objects({**message, "content": content}))

        text = self.tokenizer.apply_chat_template(
            template_messages,
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=True,
            preserve_thinking=True,
            enable_thinking=True,
        )
        return text, images

    def inputs(self, messages: list[Message]) -> dict[str, mx.array]:
        text, images = self.text(messages)
        assert text.count(PHRASE) == len(images)
        return dict(self._process(text, tuple(images)))

    def _process(self, text: str, images: tuple[Picture, ...]) -> dict[str, mx.array]:
        decoded = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
        arrays = self.processor(text=[text], images=decoded or None)
        return {
            name: value for name, value in arrays.items() if name != "attention_mask"
        }

    def prompt(self, messages: list[Message]) -> tuple[int, ...]:
        """Token ids; of an image, from its first token to its last, numbers of its own."""
        ids = np.array(self.inputs(messages)["input_ids"])[0].tolist()
        images = iter(self.text(messages)[1])
        line_break = self.ids("[IMG_BREAK]")

        marked = []
        n_inside = 0  # tokens of the image so far
        for token in ids:
            if token != self.pad and not (n_inside and (token,) == line_break):
                n_inside = 0
                marked.append(token)
                continue
            if n_inside == 0:
                digest = sha256(next(images)).digest()
                base = int.from_bytes(digest[:5], "big") * 100_000
            n_inside += 1
            marked.append(-(base + n_inside))
        return tuple(marked)

    def fewest(self) -> list[int]:
        """Per request so far, on a server that forgot nothing."""
        return fewest(self.requests, self.turns if self.is_hybrid else None)

    @property
    def is_hybrid(self) -> bool:
        return self.state.engine.report["kv_bytes_per_token"] < 300

    def cold_logits(self, record: SeenRequest) -> mx.array:
        """Of a cold run of the plain model: (tokens of the reply, vocabulary)."""
        arrays = self.inputs(record.messages)
        prompt_ids = arrays["input_ids"]
        reply_ids = mx.array([record.reply[:-1]], mx.int32)
        arrays["input_ids"] = mx.concatenate([prompt_ids, reply_ids], axis=1)
        language_model = self.oracle.language_model
        language_model._rope_deltas = None
        language_model._position_ids = None
        return self.oracle(**arrays).logits[0, prompt_ids.shape[1] - 1 :]

    def largest_difference(self, record: SeenRequest) -> float:
        """Largest difference to a cold run of the plain model over all tokens of the reply."""
        allowed = np.isfinite(record.logprobs)  # without tools a call is forbidden
        assert allowed.mean() > 0.99
        logits = mx.where(mx.array(allowed), self.cold_logits(record), -mx.inf)
        cold = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        assert np.ptp(cold[allowed]) > 1, "even logits do not show a wrong cache"
        return float(np.abs(cold[allowed] - record.logprobs[allowed]).max())

    def forget(self) -> None:
        """An empty server and an empty record; what images look like is still known."""
        wait_until_idle(self.state.engine)
        clear_cache(self.state.engine)
        forget_pasts(self.state)
        wait_until(lambda: self.state.engine.report["lines"] == 0)
        self.requests.clear()
        self.seen.clear()
        self.calls.clear()
        # The model thread, which reads them for its report, does it.
        self.state.engine.call(lambda _: self.model._features.clear())
        self.tower_runs = 0

    def close(self) -> None:
        self.openai.close()
        self._running.close()
