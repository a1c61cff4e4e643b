"""Words put into the model's mouth, while all that it is fed stays real.

A script takes the place of the sampler: behind the model's own logits all mass is put on the next
token that the script has. Which reply it is, is read from the prompt alone: its opening words, the
first that any scene has, choose the scene, and the n-th reply comes after n replies. What the
model would have said is noted first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
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
from server_fixture import Scribe, Served


@dataclass(slots=True)
class Said:
    """One request as the model saw it, and the logits of every token of the reply."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    logits: list[np.ndarray] = field(default_factory=list)


def with_processor(choice: Any, request: s.EngineRequest, processor: Any) -> Any:
    """The choice of tokens of a request, with one more logits processor at the end."""
    prompt_ids = request.key.tokens[:-1]
    context = prompt_ids[prompt_ids >= 0].tolist()
    return choice._replace(processors=[*choice.processors, processor], context=context)


class Script:
    """While it stands, prompts that hold n replies are answered with the n-th of their scene.

    `scenes`: opening words of a conversation -> its replies; "" opens all.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        scribe: Scribe,
        scenes: Mapping[str, Sequence[Sequence[int]]],
    ) -> None:
        self.said: list[Said] = []  # in the order of first words
        self._scribe, self._scenes = scribe, scenes
        self._header = tuple(scribe.ids("<|im_start|>assistant\n"))
        self._token_choice = s._token_choice
        patch.setattr(s, "_token_choice", self._with_script)

    def _with_script(self, request: s.EngineRequest) -> Any:
        prompt = tuple(request.key.tokens.tolist())
        opening = self.opening(prompt)
        said = Said(prompt, tuple(self._scenes[opening][self._n_replies(prompt)]))
        self.said.append(said)

        n_before: list[
            int
        ] = []  # tokens of the prompt; of images processors are told nothing

        def force(tokens: mx.array, logits: mx.array) -> mx.array:
            n_before.append(len(tokens))
            n = len(tokens) - n_before[0]
            if n < len(said.reply):  # one more step is launched before the end is seen
                said.logits.append(np.array(logits[0]))
            word = said.reply[min(n, len(said.reply) - 1)]
            return mx.where(mx.arange(logits.shape[-1]) == word, logits, -mx.inf)

        return with_processor(self._token_choice(request), request, force)

    def opening(self, prompt: Sequence[int]) -> str:
        """Which scene it is. Raises ValueError where no script foresaw this conversation."""
        text = self._scribe.text(
            [token for token in prompt if token >= 0]
        )  # without images
        return min((words for words in self._scenes if words in text), key=text.index)

    def _n_replies(self, prompt: tuple[int, ...]) -> int:
        """How many replies the prompt holds; its end is the header of the next one."""
        first, n = self._header[0], len(self._header)
        starts = (at for at, token in enumerate(prompt) if token == first)
        return sum(prompt[at : at + n] == self._header for at in starts) - 1


@dataclass(frozen=True, slots=True)
class Posted:
    """A request as it came over the wire."""

    body: dict[str, Any]
    began: int  # how long the model's record was


@dataclass(frozen=True, slots=True)
class Told:
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
        self.posted: list[Posted] = []
        self.told: list[Told] = []
        self._recorder = served.recorder
        self._parse, self._ending = s.parse_json_body, s.ReplyGeneration._reply_end
        patch.setattr(s, "parse_json_body", self._note_request)
        note = self._note_answer

        def ending(
            answer: s.ReplyGeneration,
        ) -> s.ReplyEnd:  # a function, to be bound to the answer
            return note(answer)

        patch.setattr(s.ReplyGeneration, "_reply_end", ending)

    def _note_request(self, raw: bytes) -> object:
        body = self._parse(raw)
        if isinstance(body, dict) and "messages" in body:  # and no call's arguments
            self.posted.append(Posted(body, len(self._recorder.fed)))
        return body

    def _note_answer(self, answer: s.ReplyGeneration) -> s.ReplyEnd:
        ending = self._ending(answer)
        prompt = tuple(answer._prepared.engine_request.key.tokens.tolist())
        self.told.append(Told(prompt, tuple(answer._decoder.token_ids), ending.usage))
        return ending

    @property
    def usages(self) -> list[s.Usage]:
        return [one.usage for one in self.told]

    @property
    def fed(self) -> list[list[Fed]]:
        """What the model was given for each request, if they came one after the other."""
        began = [one.began for one in self.posted]
        pairs = zip(began, [*began[1:], None], strict=True)
        return [self._recorder.fed[slice(*pair)] for pair in pairs]


def spelled(scribe: Scribe, script: str) -> list[int]:
    """The tokens of a reply, from inside its thinking on, and its end."""
    return [*scribe.ids(script), scribe.end]


def reply(thought: str, text: str = "", *calls: str) -> str:
    """A reply as the test models' template prints it."""
    gap = "\n\n" if text and calls else ""
    return f"{thought}\n</think>\n\n{text}{gap}{''.join(calls)}"


def call(name: str, **arguments: str) -> str:
    written = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def in_turn(served: Served, patch: pytest.MonkeyPatch) -> list[str]:
    """An empty list: texts put there are the replies, in the order in which they are asked for."""
    replies: list[str] = []
    token_choice = s._token_choice

    def scripted(request: s.EngineRequest) -> Any:
        words = served.scribe.encode(replies.pop(0), add_special_tokens=False)
        n_before: list[int] = []

        def force(tokens: mx.array, logits: mx.array) -> mx.array:
            n_before.append(len(tokens))
            word = words[min(len(tokens) - n_before[0], len(words) - 1)]
            return mx.where(mx.arange(logits.shape[-1]) == word, logits, -mx.inf)

        return with_processor(token_choice(request), request, force)

    patch.setattr(s, "_token_choice", scripted)
    return replies


def heard(patch: pytest.MonkeyPatch) -> list[int]:
    """An empty list that every token of every reply is added to."""
    tokens: list[int] = []
    feed = s.ReplyDecoder.feed
    patch.setattr(
        s.ReplyDecoder,
        "feed",
        lambda self, token: (tokens.append(token), feed(self, token))[1],
    )
    return tokens


@contextmanager
def serving_dressed(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of such a folder; the scribe is a plain tokenizer: the format is another."""
    patch.setattr(server_fixture, "Scribe", load_tokenizer)
    with closing(Served(folder)) as served:
        yield served


def dressed(
    folder: Path, renamed: Mapping[str, str], *, template: str, end: str
) -> Path:
    """A tiny model's folder, its special tokens renamed, with a template and one end token."""
    for file in folder.iterdir():
        text = "" if file.suffix == ".safetensors" else file.read_text("utf-8")
        for old, new in renamed.items():
            text = text.replace(old, new)
        if text:
            file.write_text(text, "utf-8")
    ends = load_tokenizer(folder).convert_tokens_to_ids(end)
    for file in (folder / "config.json", folder / "generation_config.json"):
        facts = json.loads(file.read_bytes())
        assert ends in facts["eos_token_id"]
        file.write_text(json.dumps(facts | {"eos_token_id": [ends]}), "utf-8")
    (folder / "chat_template.jinja").write_text(template.strip(), "utf-8")
    return folder
