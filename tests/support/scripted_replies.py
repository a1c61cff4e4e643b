"""Scripted replies of a model whose prefill and decode are real.

A script takes the place of the sampler: after the model's own logits are recorded, all mass is put
on the next token of the script. The prompt alone chooses the reply: its opening words choose the
scene (the first words that any scene has), and the n-th reply comes after n replies.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import server_fixture
import start_llm as s
from minimum_prefill import Fed
from mlx_lm.utils import load_tokenizer
from server_fixture import Exchange, Scribe, Served


@dataclass(slots=True)
class ScriptedReply:
    """One request as the model saw it, and the logits of every token of the reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    logits: list[np.ndarray] = field(default_factory=list)


def with_processor(choice: Any, request: s.EngineRequest, processor: Any) -> Any:
    """The choice of tokens of a request, with one more logits processor at the end."""
    prompt_ids = request.key.tokens[:-1]
    context = prompt_ids[prompt_ids >= 0].tolist()
    processors = [*choice.processors, processor]
    return choice._replace(processors=processors, context=s.TokenBuffer(context))


def force_tokens(
    reply_ids: Sequence[int], note_logits: Callable[[int, mx.array], None] | None = None
) -> Callable[[mx.array, mx.array], mx.array]:
    """A logits processor after which only the next token of the reply is possible.

    `note_logits` gets the number of generated tokens and the model's own logits.
    """
    counts: list[int] = []  # of tokens per step; tokens of images are not among them

    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        counts.append(len(tokens))
        n_generated = len(tokens) - counts[0]
        if note_logits is not None:
            note_logits(n_generated, logits)

        next_id = reply_ids[min(n_generated, len(reply_ids) - 1)]
        is_next = mx.arange(logits.shape[-1]) == next_id
        return mx.where(is_next, logits, -mx.inf)

    return force


# The tokens of a reply, or what makes them of the prompt's text.
type ReplySource = Sequence[int] | Callable[[str], Sequence[int]]


class Script:
    """While it stands, prompts that hold n replies are answered with the n-th of their scene.

    `scenes`: opening words of a conversation -> its replies; "" opens all.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        scribe: Scribe,
        scenes: Mapping[str, Sequence[ReplySource]],
    ) -> None:
        self.said: list[ScriptedReply] = []  # in the order of first words
        self._scribe = scribe
        self._scenes = scenes
        self._header = tuple(scribe.ids("<|im_start|>assistant\n"))
        self._token_choice = s._token_choice
        patch.setattr(s, "_token_choice", self._with_script)

    def _with_script(self, request: s.EngineRequest) -> Any:
        prompt = tuple(request.key.tokens.tolist())
        opening = self.opening(prompt)
        source = self._scenes[opening][self._n_replies(prompt)]
        if callable(source):
            text_ids = [token for token in prompt if token >= 0]
            source = source(self._scribe.text(text_ids))
        reply_ids = tuple(source)
        record = ScriptedReply(prompt, reply_ids)
        self.said.append(record)

        def note_logits(n_generated: int, logits: mx.array) -> None:
            # One more step is launched before the end is seen.
            if n_generated < len(reply_ids):
                record.logits.append(np.array(logits[0]))

        processor = force_tokens(reply_ids, note_logits)
        return with_processor(self._token_choice(request), request, processor)

    def opening(self, prompt: Sequence[int]) -> str:
        """Which scene it is. Raises ValueError where no script foresaw this conversation."""
        text_ids = [token for token in prompt if token >= 0]  # without images
        text = self._scribe.text(text_ids)
        return min((words for words in self._scenes if words in text), key=text.index)

    def _n_replies(self, prompt: tuple[int, ...]) -> int:
        """How many replies the prompt has; it ends with the header of the next one."""
        n_headers = 0
        for start, token in enumerate(prompt):
            if token == self._header[0]:
                end = start + len(self._header)
                n_headers += prompt[start:end] == self._header
        return n_headers - 1


@dataclass(frozen=True, slots=True)
class PostedRequest:
    """A request as it came over the wire."""

    body: dict[str, Any]
    began: int  # how long the model's record was


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A whole answer, as it ended."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    usage: s.Usage

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.prompt + self.reply)


class Wiretap:
    """Notes what clients send to the servers of this process, and the usage they are told."""

    def __init__(self, patch: pytest.MonkeyPatch, served: Served) -> None:
        self.posted: list[PostedRequest] = []
        self.told: list[AnsweredRequest] = []
        self._recorder = served.recorder
        self._parse_json_body = s.parse_json_body
        self._reply_end = s.ReplyGeneration._reply_end
        patch.setattr(s, "parse_json_body", self._note_request)
        note_answer = self._note_answer

        # A function, because it is bound to the generation as a method.
        def reply_end(generation: s.ReplyGeneration) -> s.ReplyEnd:
            return note_answer(generation)

        patch.setattr(s.ReplyGeneration, "_reply_end", reply_end)

    def _note_request(self, raw: bytes) -> object:
        body = self._parse_json_body(raw)
        # Arguments of tool calls are parsed there, too.
        if isinstance(body, dict) and "messages" in body:
            self.posted.append(PostedRequest(body, len(self._recorder.fed)))
        return body

    def _note_answer(self, generation: s.ReplyGeneration) -> s.ReplyEnd:
        reply_end = self._reply_end(generation)
        prompt = generation._prepared.engine_request.key.tokens.tolist()
        reply_ids = generation._decoder.token_ids
        self.told.append(
            AnsweredRequest(tuple(prompt), tuple(reply_ids), reply_end.usage)
        )
        return reply_end

    @property
    def usages(self) -> list[s.Usage]:
        return [answer.usage for answer in self.told]

    @property
    def fed(self) -> list[list[Fed]]:
        """What the model was given for each request, if they came one after the other."""
        starts = [request.began for request in self.posted]
        ends = [*starts[1:], None]
        return [
            self._recorder.fed[start:end]
            for start, end in zip(starts, ends, strict=True)
        ]


def encode_reply(scribe: Scribe, script: str) -> list[int]:
    """The tokens of a reply, from inside its thinking on, and its end."""
    return [*scribe.ids(script), scribe.end]


def reply(thought: str, text: str = "", *calls: str) -> str:
    """A reply as the test models' template prints it."""
    gap = "\n\n" if text and calls else ""
    return f"{thought}\n</think>\n\n{text}{gap}{''.join(calls)}"


def call(name: str, **arguments: str) -> str:
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        lines += [f"<parameter={key}>", value, "</parameter>"]
    lines += ["</function>", "</tool_call>"]
    return "\n".join(lines)


def script_replies(served: Served, patch: pytest.MonkeyPatch) -> list[str]:
    """An empty list: texts put there are the replies, in the order in which they are asked for."""
    replies: list[str] = []
    token_choice = s._token_choice

    def choose_scripted(request: s.EngineRequest) -> Any:
        reply_ids = served.scribe.encode(replies.pop(0), add_special_tokens=False)
        processor = force_tokens(reply_ids)
        return with_processor(token_choice(request), request, processor)

    patch.setattr(s, "_token_choice", choose_scripted)
    return replies


def run_agent_loop(served: Served, messages: list[Any], *, n: int) -> list[Exchange]:
    """n replies, each with all before; every call has the result "hi".

    They are added to the messages.
    """
    replies = []
    for _ in range(n):
        reply = served.ask(messages)
        replies.append(reply)
        messages.append(reply.answer)
        for call in reply.answer.get("tool_calls") or ():
            result = {"role": "tool", "content": "hi", "tool_call_id": call["id"]}
            messages.append(result)
    return replies


def record_reply_tokens(patch: pytest.MonkeyPatch) -> list[int]:
    """An empty list that every token of every reply is added to."""
    tokens: list[int] = []
    feed = s.ReplyDecoder.feed

    def note_and_feed(decoder: s.ReplyDecoder, token: int) -> Any:
        tokens.append(token)
        return feed(decoder, token)

    patch.setattr(s.ReplyDecoder, "feed", note_and_feed)
    return tokens


@contextmanager
def serving_disguised(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of such a folder; the scribe is a plain tokenizer: the format is another."""
    patch.setattr(server_fixture, "Scribe", load_tokenizer)
    with Served(folder) as served:
        yield served


def disguise_model(
    folder: Path, renamed: Mapping[str, str], *, template: str, end: str
) -> Path:
    """A tiny model's folder, its special tokens renamed, with a template and one end token."""
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            continue
        text = file.read_text("utf-8")
        for old_token, new_token in renamed.items():
            text = text.replace(old_token, new_token)
        file.write_text(text, "utf-8")

    end_id = load_tokenizer(folder).convert_tokens_to_ids(end)
    for file in (folder / "config.json", folder / "generation_config.json"):
        config = json.loads(file.read_bytes())
        assert end_id in config["eos_token_id"]
        config["eos_token_id"] = [end_id]
        file.write_text(json.dumps(config), "utf-8")

    (folder / "chat_template.jinja").write_text(template.strip(), "utf-8")
    return folder
