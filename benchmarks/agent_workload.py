"""What is asked: conversations of a given length, agent scenarios, and the fewest tokens needed.

`Ledger` is the independent script: it renders with the model's own template and knows nothing of
any server but what was sent and what came back.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from client_workload import PLAIN, as_it_is
from compared_servers import Reply, Server

Body = dict[str, Any]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
CORPUS = (
    Path(__file__).resolve().parents[1]
    / "scripts"
    / "tools"
    / "tiny_model"
    / "corpus.txt"
)
PARAMETERS = {
    "read": ["path"],
    "bash": ["command"],
    "write": ["content", "path"],
    "get_weather": ["city"],
}


def tool(name: str, keys: list[str]) -> Body:
    properties = {key: {"type": "string", "description": f"the {key}"} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": keys}
    function = {
        "name": name,
        "description": f"{name} something",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


TOOLS = [tool(name, keys) for name, keys in PARAMETERS.items()]


class Words:
    """Text of a wanted length in tokens, never the same twice for one seed."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self._words = sorted(set(re.findall(r"[a-z]{3,}", CORPUS.read_text("utf-8"))))
        sample = " ".join(self.random.choices(self._words, k=2000))
        self._per_word = self.count(sample) / 2000

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, n_tokens: int) -> str:
        """Words and paragraphs of about `n_tokens`."""
        words = self.random.choices(
            self._words, k=max(1, round(n_tokens / self._per_word))
        )
        lines = [
            " ".join(words[start : start + 12]) for start in range(0, len(words), 12)
        ]
        return "\n".join(lines)

    def history(self, n_tokens: int, *, tail: int = 32) -> list[Body]:
        """A tool-using conversation of about `n_tokens` that ends in a short question."""
        n_system = min(1000, n_tokens // 4)
        messages = [{"role": "system", "content": self.text(n_system)}]
        messages.append(user(self.text(100)))
        left = n_tokens - n_system - 150 - tail
        while left > 0:
            length = min(left, 500)
            messages += self.step(length)
            left -= length
        return [*messages, user(self.text(tail))]

    def step(self, n_tokens: int) -> list[Body]:
        """A call and its result."""
        call = {"name": "read", "arguments": '{"path": "src/main.py"}'}
        tool_call = {"id": "call_1", "type": "function", "function": call}
        thought = self.text(40)
        message = {"role": "assistant", "content": "", "reasoning_content": thought}
        result = self.text(max(10, n_tokens - 90))
        return [
            {**message, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]


def user(text: str) -> Body:
    return {"role": "user", "content": text}


def chat(messages: list[Body], *, n_out: int, **fields: Any) -> Body:
    """A request body that means the same to both servers."""
    kwargs = {"preserve_thinking": True}
    body = {"messages": messages, "tools": TOOLS, "max_tokens": n_out, **GREEDY}
    return {**body, "chat_template_kwargs": kwargs, **fields}


def endless(tokenizer: Any, n_out: int) -> Body:
    """Fields that keep a reply going to `n_out` tokens: neither an end nor a call."""
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<tool_call>")]
    return {"logit_bias": {str(token): -100.0 for token in ids}, "max_tokens": n_out}


# The fewest tokens ------------------------------------------------------------------------------


@dataclass
class Past:
    """What some earlier request fed and generated, and where a state of it may be kept."""

    tokens: np.ndarray
    boundaries: np.ndarray


class Ledger:
    """Prompt length minus the longest prefix of anything before.

    On models that cannot be rewound: minus the deepest position in that prefix where a state is
    worth keeping: end of the head, the last question and what follows it, ends of prompt and reply.
    """

    def __init__(self, tokenizer: Any, *, rewindable: bool) -> None:
        self._tokenizer = tokenizer
        self._rewindable = rewindable
        self._turn_start = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._result_start = tokenizer.convert_tokens_to_ids("<tool_response>")
        self._user = tokenizer.encode("user", add_special_tokens=False)[0]
        self._pasts: list[Past] = []

    def render(self, messages: list[Body], *, is_prompt: bool) -> np.ndarray:
        ids = self._tokenizer.apply_chat_template(
            parsed_arguments(messages),
            tools=TOOLS,
            add_generation_prompt=is_prompt,
            preserve_thinking=True,
            tokenize=True,
            return_dict=False,
        )
        return np.asarray(ids)

    def fewest(self, prompt: np.ndarray) -> int:
        return len(prompt) - max(
            (self._known(past, prompt) for past in self._pasts), default=0
        )

    def _known(self, past: Past, prompt: np.ndarray) -> int:
        n = min(len(past.tokens), len(prompt) - 1)
        different = np.flatnonzero(past.tokens[:n] != prompt[:n])
        shared = int(different[0]) if len(different) else n
        if self._rewindable:
            return shared
        return int(max(past.boundaries[past.boundaries <= shared], default=0))

    def note(self, messages: list[Body], prompt: np.ndarray, reply: Reply) -> None:
        """Remember a finished request."""
        conversation = self.render([*messages, reply.message], is_prompt=False)
        if not np.array_equal(conversation[: len(prompt)], prompt):
            # The template rewrote earlier messages: only the prompt is sure.
            conversation = prompt
        tokens = conversation[: len(prompt) + reply.n_out]
        starts = np.flatnonzero(prompt == self._turn_start)
        newest_question = max(start for start in starts if self._asks(prompt, start))
        recent = starts[starts >= newest_question]
        ends = [len(prompt) - 1, len(tokens) - 1, len(tokens)]
        boundaries = np.unique([starts[1], *recent, *ends])
        self._pasts.append(Past(tokens, boundaries))

    def _asks(self, prompt: np.ndarray, start: int) -> bool:
        """A user's message, not a tool's result, which is rendered as one."""
        opening = prompt[start + 1 : start + 6]
        return bool(opening[0] == self._user and self._result_start not in opening)


def parsed_arguments(messages: list[Body]) -> list[Body]:
    """Arguments as objects: as text they crash real templates, so both servers parse them too."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@dataclass
class Count:
    """Tokens of one scenario on one server."""

    prompt: int = 0
    prefilled: int = 0
    fewest: int = 0

    @property
    def ratio(self) -> float:
        return self.prefilled / self.fewest


class Client:
    """Asks one server, and counts."""

    costume = PLAIN

    def __init__(
        self, server: Server, tokenizer: Any, *, rewindable: bool, n_out: int
    ) -> None:
        self.server = server
        self._n_asked = 0
        self.tokenizer = tokenizer
        self.count = Count()
        self.odd: list[str] = []
        self._ledger = Ledger(tokenizer, rewindable=rewindable)
        self._n_out = n_out

    def ask(self, messages: list[Body]) -> Reply:
        return self.ask_all([messages])[0]

    def ask_all(self, conversations: list[list[Body]]) -> list[Reply]:
        """All at once. What one of them computes counts as known to the next."""
        self._n_asked += 1
        sent = [self.costume.sent(talk, self._n_asked) for talk in conversations]
        bodies = [chat(messages, n_out=self._n_out) for messages in sent]
        with ThreadPoolExecutor(len(bodies)) as pool:
            replies = list(pool.map(self.server.ask, bodies))
        for messages, reply in zip(conversations, replies, strict=True):
            self._note(messages, reply)
        return replies

    def _note(self, messages: list[Body], reply: Reply) -> None:
        messages = self.costume.equal(messages, self._n_asked)
        prompt = self._ledger.render(messages, is_prompt=True)
        if len(prompt) != reply.n_prompt and self.costume.sent is as_it_is:
            self.odd.append(f"{reply.n_prompt} prompt tokens, not {len(prompt)}")
        self.count.prompt += reply.n_prompt
        self.count.prefilled += reply.prefilled
        self.count.fewest += self._ledger.fewest(prompt)
        self._ledger.note(messages, prompt, reply)


# Scenarios --------------------------------------------------------------------------------------


class Conversation:
    """An agent: answers its own tool calls, or asks the next question."""

    def __init__(self, client: Client, words: Words, *, head: str) -> None:
        self.client = client
        self.words = words
        self.messages = [{"role": "system", "content": head}, self._question()]

    def _question(self) -> Body:
        return user(self.words.text(60))

    def hear(self, reply: Reply) -> None:
        self.messages.append(reply.message)
        calls = reply.message.get("tool_calls", ())
        for call in calls:
            content = self.words.text(150)
            result = {"role": "tool", "tool_call_id": call["id"], "content": content}
            self.messages.append(result)
        if not calls:
            self.messages.append(self._question())

    def turn(self, times: int = 1) -> Conversation:
        for _ in range(times):
            self.hear(self.client.ask(list(self.messages)))
        return self


def append_only(client: Client, words: Words) -> None:
    Conversation(client, words, head=words.text(1500)).turn(12)


def long_head(client: Client, words: Words) -> None:
    """Append-only behind 6,000 tokens of instructions: those of real agents are longer."""
    Conversation(client, words, head=words.text(6000)).turn(12)


def branch_and_return(client: Client, words: Words) -> None:
    """A sub-agent with the same system prompt and tools, twice, in the middle of the work."""
    head = words.text(1500)
    main = Conversation(client, words, head=head).turn(3)
    sub = Conversation(client, words, head=head).turn(3)
    main.turn(2)
    sub.turn(2)
    main.turn(2)


def edited_result(client: Client, words: Words) -> None:
    """One result in the middle of the past changes, twice; all behind it stays as it was."""
    conversation = Conversation(client, words, head=words.text(1500)).turn(8)
    places = [
        i for i, m in enumerate(conversation.messages) if m["role"] in ("tool", "user")
    ]
    for place in (places[len(places) // 2], places[-2]):
        message = conversation.messages[place]
        conversation.messages[place] = {**message, "content": words.text(120)}
        conversation.turn(2)


def five_last_messages(client: Client, words: Words) -> None:
    conversation = Conversation(client, words, head=words.text(1500)).turn(5)
    past = conversation.messages[:-1]
    for _ in range(5):
        client.ask([*past, user(words.text(50))])


def interleaved(client: Client, words: Words) -> None:
    """Three conversations with nothing in common, one after the other."""
    talks = [Conversation(client, words, head=words.text(1200)) for _ in range(3)]
    for _ in range(4):
        for talk in talks:
            talk.turn()


def three_at_once(client: Client, words: Words) -> None:
    talks = [Conversation(client, words, head=words.text(1200)) for _ in range(3)]
    for _ in range(4):
        replies = client.ask_all([list(talk.messages) for talk in talks])
        for talk, reply in zip(talks, replies, strict=True):
            talk.hear(reply)


def eight_on_one_prefix(client: Client, words: Words) -> None:
    head = words.text(8000)
    talks = [Conversation(client, words, head=head) for _ in range(8)]
    client.ask_all([talk.messages for talk in talks])


SCENARIOS: Mapping[str, Callable[[Client, Words], None]] = {
    "append-only, 12 requests": append_only,
    "sub-agent branch and return": branch_and_return,
    "edited tool result": edited_result,
    "five last messages": five_last_messages,
    "three interleaved": interleaved,
    "three at once": three_at_once,
    "eight at once, one 8k prefix": eight_on_one_prefix,
}
