"""Conversations for the demo model, generated from a seed: what it learns from and is measured on.

    write_conversation(random.Random(7))                   one to learn from
    write_conversation(random.Random(7), held_out=True)    one to be measured on

Every invented word (file, folder, tool, argument, key, value) belongs to one of two halves by its
checksum, so the words of a held-out conversation are words of none that was learnt from. A tool's
description says in plain words what it does: that is how a tool with an unknown name is found.

Standard library only; the trainer and the benchmark render these with the model's own template.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

Schema = dict[str, Any]

# Words, ways to say things, and what is said without a tool.
PHRASES: Final = tomllib.loads(
    Path(__file__).with_name("demo_phrases.toml").read_text("utf-8")
)
POOLS: Final[dict[str, list[str]]] = PHRASES["words"]
SMALLTALK: Final[dict[str, list[Any]]] = PHRASES["smalltalk"]
SYSTEMS: Final[list[str]] = SMALLTALK["systems"]


def _english(at_least: int) -> tuple[str, ...]:
    """Words of Python's language reference, which every Python brings along; so often, or more."""
    from pydoc_data.topics import topics

    found = Counter(re.findall(r"\b[a-z]{4,10}\b", " ".join(map(str, topics.values()))))
    return tuple(sorted(word for word, n in found.items() if n >= at_least))


ENGLISH: Final = _english(1)  # some thousand

# What a conversation is -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One call and what came back. `loose` arguments are free text, which no one compares."""

    thought: str
    tool: str
    arguments: dict[str, Any]
    result: str
    loose: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the calls it takes, and an answer that must contain every one of `quotes`."""

    kind: str
    user: str
    steps: tuple[Step, ...]
    thought: str
    answer: str
    quotes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client would send, and what the model should say."""

    system: str
    tools: list[Schema]
    exchanges: tuple[Exchange, ...]

    def messages(self) -> list[dict[str, Any]]:
        """All of it as chat messages, thoughts included."""
        chat_messages: list[dict[str, Any]] = []
        if self.system:
            chat_messages.append({"role": "system", "content": self.system})
        for exchange in self.exchanges:
            chat_messages.append({"role": "user", "content": exchange.user})
            for step in exchange.steps:
                call = {"function": {"name": step.tool, "arguments": step.arguments}}
                message = {**reply("", step.thought), "tool_calls": [call]}
                chat_messages.append(message)
                chat_messages.append({"role": "tool", "content": step.result})
            chat_messages.append(reply(exchange.answer, exchange.thought))
        return chat_messages


def reply(content: str, thought: str) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": content, "reasoning_content": thought}


# Words ------------------------------------------------------------------------------


def is_held_out(word: str) -> bool:
    """Which half a word belongs to, for good."""
    return zlib.crc32(word.lower().encode()) % 5 == 0


# Many are one piece to the model, being frequent, and yet words of nothing that is learnt from.
UNSAID: Final = tuple(filter(is_held_out, _english(10)))


@dataclass(frozen=True, slots=True)
class Words:
    """Draws words of one half, and things made of them."""

    rng: random.Random
    held_out: bool

    def ours(self, draw: Callable[[], str]) -> str:
        """What `draw` gives, as soon as it belongs to this half."""
        for _ in range(400):
            word = draw()
            if is_held_out(word) == self.held_out:
                return word
        return self.invented()

    def of(self, pool: Sequence[str]) -> str:
        """A word of a fixed pool; an invented one if the pool has none of this half."""
        return self.ours(lambda: self.rng.choice(pool))

    def practised(self, share: float) -> bool:
        """Whether to draw what is hard: now and then to learn from, never to be measured on."""
        return not self.held_out and self.rng.random() < share

    def invented(self) -> str:
        """A word that no language has."""
        while True:
            if self.practised(0.5):
                word = self.glued()
            else:
                word = self.syllables() if self.rng.random() < 0.5 else self.spliced()
            if len(word) > 3 and is_held_out(word) == self.held_out:
                return word

    def syllables(self) -> str:
        """One to three of them."""
        rng = self.rng
        pools = [POOLS[name] for name in ("onsets", "vowels", "codas")]
        n = rng.choice((1, 2, 2, 2, 3))
        return "".join(rng.choice(pool) for _ in range(n) for pool in pools)

    def spliced(self) -> str:
        """The beginning of one English word and the end of another.

        No piece is then always followed by the same other one, which would be learnt by heart.
        """
        rng = self.rng
        first_word = rng.choice(ENGLISH)
        second_word = rng.choice(ENGLISH)
        return (
            first_word[: rng.randrange(1, len(first_word))]
            + second_word[rng.randrange(1, len(second_word)) :]
        )

    def glued(self) -> str:
        """A word of any half and another one, or a part of it.

        Common words are one piece to the model: one that occurred in no word that is learnt from
        could not be said at all (L-66). A capital or a sign keeps the tokenizer from joining across
        the seam.
        """
        rng = self.rng
        base_word = rng.choice(
            rng.choice((UNSAID, UNSAID, UNSAID, ENGLISH, POOLS["nouns"]))
        )
        added_word = rng.choice(ENGLISH) if rng.random() < 0.4 else self.syllables()
        left, right = (
            (base_word, added_word) if rng.random() < 0.5 else (added_word, base_word)
        )
        return left + rng.choice(
            (right, right.capitalize(), right.capitalize(), f"_{right}")
        )

    def noun(self) -> str:
        """A common, a less common, or an invented word.

        Of thousands: were they few, guessing one would be learnt, and not looking it up.
        """
        roll = self.rng.random()
        if roll < 0.6 and not self.practised(0.5):
            return self.of(POOLS["nouns"] if roll < 0.2 else ENGLISH)
        return self.invented()

    def distinct(self, n: int, draw: Callable[[], str]) -> list[str]:
        """`n` different draws."""
        found: list[str] = []
        while len(found) < n:
            word = draw()
            if word not in found:
                found.append(word)
        return found

    def number(self) -> str:
        """A whole number of any size that people write."""
        return str(self.rng.randrange(10 ** self.rng.choice((1, 2, 2, 3, 4, 5))))

    def value(self) -> str:
        """What may stand behind a key: a word, a number, a code, a name, a date, an address."""
        rng = self.rng
        noun = self.noun
        if self.practised(0.15):
            return " ".join(noun() for _ in range(rng.choice((2, 2, 3))))
        kinds: tuple[Callable[[], str], ...] = (
            *(noun, noun, noun, noun, noun, self.number, self.number, self.number),
            lambda: f"{noun().upper()[:4]}-{rng.randrange(10000)}",
            lambda: f"{noun()} {noun()}",
            self.date,
            lambda: f"{noun()}@{noun()}.{rng.choice(('com', 'org', 'net'))}",
            lambda: "".join(
                rng.choice(POOLS["letters"]) for _ in range(rng.randrange(4, 13))
            ),
        )
        return kinds[-1]() if self.practised(0.1) else rng.choice(kinds)()

    def date(self) -> str:
        """A day of some year near ours."""
        rng = self.rng
        return f"{rng.randrange(2019, 2031)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"

    def file(self) -> str:
        """A path of a file, relative or absolute."""
        rng = self.rng
        stem = self.noun()
        kind = rng.randrange(8)
        if kind == 0:
            stem = f"{stem}_{self.noun()}"
        elif kind == 1:
            stem = f"{stem}-{rng.randrange(100)}"
        elif kind == 2:
            stem = stem.capitalize()
        elif kind == 3:
            stem = stem.upper()
        name = f"{stem}.{rng.choice(POOLS['endings'])}"
        return name if rng.random() < 0.5 else f"{self.folder()}/{name}"

    def folder(self) -> str:
        """A path of a folder."""
        rng = self.rng
        name = rng.choice(POOLS["folders"]) if rng.random() < 0.4 else self.noun()
        kind = rng.randrange(8)
        if kind == 0:
            return f"/home/{self.noun()}/{name}"
        if kind == 1:
            return f"{rng.choice(POOLS['folders'])}/{name}"
        return (
            f"/{rng.choice(('tmp', 'work', 'srv', 'etc'))}/{name}"
            if kind == 2
            else name
        )

    def key(self) -> str:
        """The name of a setting or a field; two words now and then."""
        rng = self.rng
        roll = rng.random()
        if roll < 0.2:
            return self.of(POOLS["keys"])
        return f"{self.noun()}_{self.noun()}" if roll < 0.35 else self.noun()

    def described(self, pattern: str) -> str:
        """A description: of each {a|b} one, and any word for {*}."""

        def chosen(found: re.Match[str]) -> str:
            return (
                self.noun() if found[1] == "*" else self.rng.choice(found[1].split("|"))
            )

        while True:
            text = pattern
            while "{" in text:  # the innermost first
                text = re.sub(r"\{([^{}]*)\}", chosen, text)
            long_words = re.findall(r"\w{4,}", text.lower())
            if len(set(long_words)) == len(
                long_words
            ):  # nobody says "the text of the text file"
                return text

    def sentence(self) -> str:
        """A line of prose without a meaning, from a few patterns."""
        rng = self.rng
        noun = self.noun
        patterns = (
            f"The {noun()} is near the {noun()}.",
            f"{rng.choice(POOLS['people'])} likes the {noun()} of {noun()}.",
            f"Every {noun()} needs a {noun()} and {rng.randrange(2, 90)} {noun()}s.",
            f"Remember to check the {noun()} before {noun()}.",
            f"{noun().capitalize()} and {noun()} are ready.",
            f"- {noun()}: {self.value()}",
            f"# {noun().capitalize()} {noun()}",
            f"{noun()} {noun()} {noun()}",
        )
        return rng.choice(patterns)


# Tools ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """A tool that many clients have, under many names. Parameters by what they are for."""

    names: str
    descriptions: Sequence[str]  # {a|b} is one of these words, {*} any word
    parameters: dict[str, str]  # part -> the names it goes by


ROLES: Final[dict[str, Role]] = {
    "read": Role(
        "read read_file Read view view_file open_file cat_file fs_read get_file file_read readFile "
        "load_file show_file ReadFile file_view read_text fetch_file fs__read_file mcp__fs__read "
        "file_contents view_source",
        PHRASES["descriptions"]["reads"],
        {
            "path": "path file_path filePath filename file target absolute_path file_name pathname"
        },
    ),
    "list": Role(
        "ls list list_files list_dir LS listDirectory dir list_directory fs_list folder_list "
        "ListDir get_files browse_folder list_folder mcp__fs__list show_folder",
        PHRASES["descriptions"]["lists"],
        {
            "folder": "path directory dir folder dir_path directory_path location target root"
        },
    ),
    "bash": Role(
        "bash exec shell run Bash run_command execute_command terminal run_shell shell_exec sh "
        "exec_command runCommand command_line run_bash mcp__shell__run",
        PHRASES["descriptions"]["runs"],
        {"command": "command cmd script command_line line shell_command input code"},
    ),
    "write": Role(
        "write write_file Write create_file save_file fs_write file_write writeFile put_file "
        "save WriteFile store_file new_file mcp__fs__write make_file",
        PHRASES["descriptions"]["writes"],
        {
            "path": "path file_path filePath filename file target file_name destination",
            "content": "content text contents body data file_text new_content",
        },
    ),
    "grep": Role(
        "grep search Grep search_files find_text search_text grep_files file_search searchFiles "
        "code_search ripgrep find_in_files mcp__fs__grep",
        PHRASES["descriptions"]["searches"],
        {"pattern": "pattern query regex text needle search_term expression"},
    ),
    "edit": Role(
        "edit edit_file Edit str_replace replace_in_file replace file_edit editFile patch_file "
        "change_file update_file mcp__fs__edit",
        PHRASES["descriptions"]["edits"],
        {
            "path": "path file_path filePath filename file target",
            "old": "old_string old_text oldString old find before search",
            "new": "new_string new_text newString new replace_with after replacement",
        },
    ),
}
PART_WORDS: Final = {
    "path": (
        "The path of the file",
        "Path to the file",
        "Which file",
        "The absolute path",
    ),
    "folder": (
        "The folder to list",
        "Path of the directory",
        "Which folder",
        "Directory path",
    ),
    "command": ("The command to run", "Shell command", "Command line to execute"),
    "content": (
        "The text to write",
        "What the file will contain",
        "The content of the file",
    ),
    "pattern": ("What to search for", "The pattern", "The text to find"),
    "old": ("The text to replace", "The old text", "Text to find"),
    "new": ("The text to put there", "The new text", "Replacement text"),
}
# Parameters that clients add: name, type, description. Nobody has to give them.
EXTRAS: Final = (
    ("timeout", "number", "Optional timeout in milliseconds"),
    ("limit", "integer", "How many lines to read"),
    ("offset", "integer", "The line to start from"),
    ("encoding", "string", "utf-8 unless given"),
    ("recursive", "boolean", "Also below"),
    ("workdir", "string", "Where to run"),
    ("background", "boolean", "Do not wait for it"),
    ("ignore", "array", "Patterns to leave out"),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as one conversation offers it."""

    name: str
    schema: Schema
    parts: dict[str, str]  # what a parameter is for -> its name here
    label: str = (
        ""  # a required parameter that wants a short text on what the call does
    )

    @property
    def purpose(self) -> str:
        """The first sentence of its description, as the chat template takes it."""
        described = self.schema["function"]["description"]
        return (
            str(described)
            .strip()
            .split("\n")[0]
            .split(". ")[0]
            .split(" (")[0]
            .rstrip(".")
        )

    @property
    def line(self) -> str:
        """Purpose, name and parameters, as the chat template lists them and thoughts quote them."""
        schema = self.schema["function"]["parameters"]
        names = [
            n if n in schema["required"] else f"{n}?" for n in schema["properties"]
        ]
        return f"{self.purpose}: {self.name}({', '.join(names)})"


@dataclass(slots=True)
class Custom:
    """A tool that no other conversation has: what it is about, and what it wants to know."""

    offer: Offer
    verb: str
    thing: str
    kinds: dict[str, str]  # parameter -> JSON type
    required: list[str]


def write_schema(
    words: Words, name: str, description: str, properties: Schema, required: list[str]
) -> Schema:
    """A tool in OpenAI's form, with what some clients add to it."""
    rng = words.rng
    parameters: Schema = {
        "type": "object",
        "properties": properties,
        "required": required,
    }
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    if rng.random() < 0.15:
        dialect = "http://json-schema.org/draft-07/schema#"
        parameters = {"$schema": dialect, **parameters}
    if rng.random() < 0.2:
        parameters = dict(reversed(parameters.items()))
    function: Schema = {
        "name": name,
        "description": description,
        "parameters": parameters,
    }
    if rng.random() < 0.15:
        function["strict"] = False
    return {"type": "function", "function": function}


def style(words: Words, parts: Sequence[str]) -> str:
    """Words as one name, in one of the styles that programs use."""
    kind = words.rng.randrange(6)
    if kind < 3:
        return "_".join(parts)
    if kind == 3:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return (
        "".join(part.capitalize() for part in parts) if kind == 4 else "-".join(parts)
    )


def offer_role(words: Words, role_name: str) -> Offer:
    """One of the common tools, named as some client might name it."""
    rng = words.rng
    role = ROLES[role_name]
    name = style(words, words.distinct(rng.choice((1, 2)), words.noun))
    if rng.random() < 0.2:  # were they common, they would be guessed and not looked up
        name = words.of(role.names.split())
    description = words.described(rng.choice(role.descriptions))
    if rng.random() < 0.25:
        description += " " + rng.choice(SYSTEMS)
    parts: dict[str, str] = {}
    for part, names in role.parameters.items():
        used_names = list(parts.values())
        pool = [option for option in names.split() if option not in used_names]
        parts[part] = words.of(pool) if rng.random() < 0.3 else words.noun()
        while parts[part] in used_names:
            parts[part] = words.invented()
    properties = {
        parts[part]: {"type": "string", "description": rng.choice(PART_WORDS[part])}
        for part in role.parameters
    }
    required = (
        list(properties) if rng.random() < 0.93 else []
    )  # some clients require nothing
    label = ""
    if role_name == "bash" and rng.random() < 0.1 and "description" not in properties:
        label = "description"
        properties[label] = {
            "type": "string",
            "description": "What the command does, in a few words",
        }
        required.append(label)
    for extra, kind, about in rng.sample(EXTRAS, rng.choice((0, 0, 1, 2))):
        properties.setdefault(extra, {"type": kind, "description": about})
    schema = write_schema(words, name, description, properties, required)
    return Offer(name, schema, parts, label)


ABOUT: Final = ("of a {m}", "for a {m}", "in the {m}", "of one {m}")


def offer_bystander(words: Words) -> Schema:
    """A tool that agents bring along and nobody here asks for."""
    rng = words.rng
    chosen = rng.choice(PHRASES["decoys" if words.practised(0.4) else "bystanders"])
    name = words.of(chosen["names"])
    description = " ".join(
        (chosen["description"], *rng.sample(SYSTEMS, rng.choice((0, 0, 1, 3))))
    )
    kinds = ("string", "string", "integer", "boolean", "array", "object")
    properties = {n: {"type": rng.choice(kinds)} for n in chosen["parameters"]}
    required = chosen["parameters"][: rng.randrange(len(properties) + 1)]
    return write_schema(words, name, description, properties, required)


def offer_custom(words: Words) -> Custom:
    """A tool with a name, a purpose and arguments that were never seen before."""
    rng = words.rng
    verb = words.of(POOLS["verbs"])
    thing = words.noun()
    subject = words.noun() if rng.random() < 0.8 else f"{words.noun()} {words.noun()}"
    thing = thing if rng.random() < 0.7 else f"{thing} {words.noun()}"
    prefix = [words.noun()] if rng.random() < 0.15 else []
    name = style(words, [*prefix, verb, *thing.split()])
    if rng.random() < 0.15:
        name = style(words, words.distinct(rng.choice((1, 2)), words.noun))
    about = rng.choice(ABOUT).format(m=subject)
    description = f"{verb.capitalize()} the {thing} {about}."
    if rng.random() < 0.2:
        description += " " + rng.choice(SYSTEMS)
    n_names = (
        rng.choice((2, 3, 4))
        if words.practised(0.5)
        else rng.choice((1, 1, 1, 2, 2, 3))
    )
    names = words.distinct(n_names, words.key)
    kinds = {
        n: rng.choice(("string", "string", "string", "integer", "boolean"))
        for n in names
    }
    optional = names[1:] if rng.random() < 0.2 or words.practised(0.3) else []
    properties: Schema = {}
    for n, kind in kinds.items():
        properties[n] = {"type": kind}
        if rng.random() < 0.75:
            noun = n.replace("_", " ")
            properties[n]["description"] = rng.choice(
                (f"The {noun}", f"{noun} to use", noun)
            )
    required = [n for n in names if n not in optional]
    schema = write_schema(words, name, description, properties, required)
    return Custom(Offer(name, schema, {}), verb, thing, kinds, required)


# Exchanges --------------------------------------------------------------------------


@dataclass(slots=True)
class Desk:
    """What the exchanges of one conversation share: words and the tools that are offered."""

    words: Words
    roles: dict[str, Offer] = field(default_factory=dict)
    customs: list[Custom] = field(default_factory=list)

    @property
    def rng(self) -> random.Random:
        """Short for the words' generator."""
        return self.words.rng

    def say(self, name: str, **slots: object) -> str:
        """One of the phrases of this name, filled in."""
        return str(self.rng.choice(PHRASES["phrases"][name])).format(**slots)


def call_role(desk: Desk, role: str, reason: str, result: str, **values: str) -> Step:
    """A step with a common tool; `values` by what each parameter is for."""
    offer = desk.roles[role]
    arguments: dict[str, Any] = {
        offer.parts[part]: value for part, value in values.items()
    }
    if offer.label:
        arguments[offer.label] = reason.rstrip(".")
    # The whole line: which tool it takes is then found word by word, and its name is only copied.
    thought = f"{reason} {offer.line}"
    return Step(thought, offer.name, arguments, result, frozenset({offer.label} - {""}))


def obtain(desk: Desk, file: str, content: str) -> Step:
    """Read a file with what is offered: the tool for it, or else the shell."""
    reason = f"I need to read {file}."
    if "read" in desk.roles:
        return call_role(desk, "read", reason, as_read(desk, content), path=file)
    return call_role(
        desk, "bash", reason, as_printed(desk, content), command=f"cat {file}"
    )


def as_read(desk: Desk, content: str) -> str:
    """How read tools give a file back: as it is, or with line numbers."""
    lines = content.split("\n")
    kind = desk.rng.randrange(12)
    if kind == 0:
        return "\n".join(f"{i:6}\t{line}" for i, line in enumerate(lines, 1))
    if kind == 1:
        return "\n".join(f"{i}: {line}" for i, line in enumerate(lines, 1))
    if kind == 2:
        body = "\n".join(f"{i:05}| {line}" for i, line in enumerate(lines, 1))
        return f"<file>\n{body}\n</file>"
    return f"<content>\n{content}\n</content>" if kind == 3 else content


def as_printed(desk: Desk, output: str) -> str:
    """How shells give a command's output back."""
    kind = desk.rng.randrange(10)
    if kind == 0:
        return f"{output}\n\n[exit code 0]"
    if kind == 1:
        return f"stdout:\n{output}"
    return f"{output}\n" if kind == 2 else output


def read_whole(desk: Desk) -> Exchange:
    """What does this file say?"""
    words = desk.words
    rng = desk.rng
    file = words.file()
    lines = [words.sentence() for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    if words.practised(0.2):  # a text that has a word of its own name
        lines[0] = lines[0].replace(
            words.of(re.findall(r"\w+", lines[0])), stem_of(file), 1
        )
    content = "\n".join(lines)
    user = desk.say("read_whole", x=file)
    step = obtain(desk, file, content)
    answer = fenced(f"{file} says:", content)
    thought = f"I have the text of {file}. I can answer."
    return Exchange("read", user, (step,), thought, answer, tuple(lines))


def stem_of(file: str) -> str:
    """The first word of a file's name."""
    return re.split(r"[._-]", file.rsplit("/", 1)[-1])[0]


def settings(desk: Desk, n: int) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Keys with values, the text of a file that says so, and how its lines go on after the key."""
    words = desk.words
    pairs = [(key, words.value()) for key in words.distinct(n, words.key)]
    form = desk.rng.randrange(6)
    start, separator, end = (
        ("", " = ", ""), ("", ": ", ""), ("", "=", ""), ("The ", " is ", "."), ("- ", ": ", ""),
        ('"', '": ', ""),
    )[form]  # fmt: skip
    if form == 3:
        pairs = [(key.replace("_", " "), value) for key, value in pairs]
    ends = [f"{separator}{json.dumps(v) if form == 5 else v}{end}" for _, v in pairs]
    lines = [f"{start}{key}{rest}" for (key, _), rest in zip(pairs, ends, strict=True)]
    if form == 5:
        return pairs, json.dumps(dict(pairs), indent=2), ends
    for _ in range(desk.rng.choice((0, 0, 0, 1, 2))):
        lines.insert(desk.rng.randrange(len(lines) + 1), words.sentence())
    return pairs, "\n".join(lines), ends


def read_key(desk: Desk) -> Exchange:
    """One value of a file with several."""
    words = desk.words
    rng = desk.rng
    file = words.file()
    pairs, content, ends = settings(desk, rng.choice((1, 2, 3, 4, 5, 6)))
    index = rng.randrange(len(pairs))
    key, value = pairs[index]
    user = desk.say("read_key", k=key, f=file)
    thought = f"The result says: {key}{ends[index]}\nI can answer."
    answer = f"The {key} is {value}, says {file}."
    return Exchange(
        "key", user, (obtain(desk, file, content),), thought, answer, (value,)
    )


def read_line(desk: Desk) -> Exchange:
    """The first or the last line of a file."""
    words = desk.words
    rng = desk.rng
    file = words.file()
    last = rng.random() < 0.5
    lines = [words.sentence() for _ in range(rng.choice((2, 3, 4, 5)))]
    line, place = (lines[-1], "last") if last else (lines[0], "first")
    user = desk.say("read_line", p=place, f=file)
    thought = f"The {place} line is: {line}"
    answer = f"The {place} line of {file} is: {line}"
    step = obtain(desk, file, "\n".join(lines))
    return Exchange("line", user, (step,), thought, answer, (line,))


def joined(names: Sequence[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def listing(desk: Desk, names: Sequence[str]) -> str:
    """How tools give a folder back."""
    rng = desk.rng
    kind = rng.randrange(10)
    if kind == 0:
        return json.dumps(list(names))
    if kind == 1:
        return "\n".join(f"- {name}" for name in names)
    if kind == 2:
        return "\n".join(
            f"-rw-r--r-- 1 root {rng.randrange(9000):5} {name}" for name in names
        )
    return "  ".join(names) if kind == 3 else "\n".join(names)


def short_file(desk: Desk) -> str:
    """A name in a folder: a file, or now and then a folder."""
    words = desk.words
    name = words.file().rsplit("/", 1)[-1]
    return f"{words.noun()}/" if desk.rng.random() < 0.15 else name


def look_into(desk: Desk, folder: str, result: str) -> Step:
    """List a folder with what is offered."""
    reason = f"I need to list {'this folder' if folder == '.' else folder}."
    if "list" in desk.roles:
        return call_role(desk, "list", reason, result, folder=folder)
    command = "ls" if folder == "." else f"ls {folder}"
    return call_role(desk, "bash", reason, as_printed(desk, result), command=command)


def list_folder(desk: Desk) -> Exchange:
    """Which files are there?"""
    words = desk.words
    rng = desk.rng
    is_current = rng.random() < 0.25
    folder = "." if is_current else words.folder()
    names = words.distinct(rng.choice((1, 2, 3, 3, 4, 5, 6)), lambda: short_file(desk))
    user = desk.say("list_here") if is_current else desk.say("list_folder", x=folder)
    place = "this folder" if is_current else folder
    list_text = listing(desk, names)
    answer = fenced(f"The files in {place}:", list_text)
    thought = f"I have the list of {place}. I can answer."
    step = look_into(desk, folder, list_text)
    return Exchange("list", user, (step,), thought, answer, tuple(names))


def list_then_read(desk: Desk) -> Exchange:
    """Two calls: the second needs what the first found."""
    words = desk.words
    rng = desk.rng
    folder = words.folder()
    names = words.distinct(
        rng.choice((1, 2, 3, 4)), lambda: words.file().rsplit("/", 1)[-1]
    )
    last = len(names) > 1 and rng.random() < 0.4
    place, name = ("last", names[-1]) if last else ("first", names[0])
    content = words.sentence()
    user = desk.say("list_then_read", d=folder, p=place)
    first = look_into(desk, folder, "\n".join(names))
    second = obtain(desk, f"{folder}/{name}", content)
    second = replace(second, thought=f"The {place} file is {name}. {second.thought}")
    thought = f"I have the text of {name}. I can answer."
    answer = f"The {place} file in {folder} is {name}. It says: {content}"
    return Exchange("chain", user, (first, second), thought, answer, (name, content))


def follow_file(desk: Desk) -> Exchange:
    """A file that names another."""
    words = desk.words
    file, target = words.distinct(2, words.file)
    content = words.sentence()
    pointer = desk.say("pointer", x=target)
    user = desk.say("follow_file", x=file)
    second = obtain(desk, target, content)
    second = replace(second, thought=f"{file} names {target}. {second.thought}")
    thought = f"I have the text of {target}. I can answer."
    answer = f"{file} names {target}. It says: {content}"
    steps = (obtain(desk, file, pointer), second)
    return Exchange("chain", user, steps, thought, answer, (target, content))


def save(desk: Desk, file: str, content: str) -> Step:
    """Write a file with what is offered."""
    reason = f"I need to write {file}."
    result = desk.say("written", f=file, n=len(content))
    if "write" in desk.roles:
        return call_role(desk, "write", reason, result, path=file, content=content)
    command = f"echo '{content}' > {file}"
    return call_role(desk, "bash", reason, as_printed(desk, ""), command=command)


def write_file(desk: Desk) -> Exchange:
    """A file with a given text."""
    words = desk.words
    file = words.file()
    content = desk.rng.choice((words.sentence, words.value))()
    user = desk.say("write_file", f=file, c=content)
    answer = f"Done: {file} now says: {content}"
    thought = "The file is written. I can answer."
    step = save(desk, file, content)
    return Exchange("write", user, (step,), thought, answer, (file,))


def copy_file(desk: Desk) -> Exchange:
    """Read one file, write another."""
    words = desk.words
    file, target = words.distinct(2, words.file)
    content = words.sentence()
    user = desk.say("copy_file", a=file, b=target)
    second = save(desk, target, content)
    steps = (obtain_plain(desk, file, content), second)
    answer = f"Done: {target} now says: {content}"
    return Exchange(
        "chain", user, steps, "The file is written. I can answer.", answer, (target,)
    )


def obtain_plain(desk: Desk, file: str, content: str) -> Step:
    """As `obtain`, with the file's text alone as the result."""
    return replace(obtain(desk, file, content), result=content)


def edit_file(desk: Desk) -> Exchange:
    """One text of a file replaced by another."""
    words = desk.words
    file = words.file()
    (old, new) = words.distinct(2, words.value)
    user = desk.say("edit_file", o=worded(old), n=worded(new), f=file)
    reason = f"I need to edit {file}."
    thought = "The file is changed. I can answer."
    result = desk.say("edited", f=file)
    step = call_role(desk, "edit", reason, result, path=file, old=old, new=new)
    answer = f"Done: I replaced {old} by {new} in {file}."
    return Exchange("edit", user, (step,), thought, answer, (old, new))


def search_files(desk: Desk) -> Exchange:
    """Where is this word?"""
    words = desk.words
    rng = desk.rng
    word = words.noun()
    files = words.distinct(rng.choice((1, 1, 2, 3)), words.file)
    user = desk.say("search_files", x=word)
    reason = f"I need to search for {word}."
    lines = [f"{file}:{rng.randrange(1, 200)}:{word} {words.noun()}" for file in files]
    result = "\n".join(lines if rng.random() < 0.6 else files)
    if "grep" in desk.roles:
        step = call_role(desk, "grep", reason, result, pattern=word)
    else:
        step = call_role(
            desk, "bash", reason, as_printed(desk, result), command=f"grep -rn {word} ."
        )
    answer = fenced(f"{word} is found here:", result)
    thought = "I have the result. I can answer."
    return Exchange("search", user, (step,), thought, answer, tuple(files))


def run_command(desk: Desk) -> Exchange:
    """A command that the user spells out, or means."""
    words = desk.words
    rng = desk.rng
    parts = {
        "n": words.noun(),
        "m": words.noun(),
        "v": words.number(),
        "f": words.file(),
        "d": words.folder(),
    }
    command = desk.say("command", **parts)
    user = desk.say("run_command", x=command)
    output = (
        words.sentence()
        if rng.random() < 0.5
        else f"{words.number()} {words.noun()}, {words.number()} {words.noun()}"
    )
    step = call_role(
        desk,
        "bash",
        f"I need to run {command}.",
        as_printed(desk, output),
        command=command,
    )
    thought = "I have the output. I can answer."
    answer = f"The command printed: {output}"
    return Exchange("bash", user, (step,), thought, answer, (output,))


def count_lines(desk: Desk) -> Exchange:
    """A question that only the shell can answer."""
    words = desk.words
    file = words.file()
    n = str(desk.rng.randrange(1, 900))
    user = desk.say("count_lines", x=file)
    step = call_role(
        desk,
        "bash",
        f"I need to count the lines of {file}.",
        f"{n} {file}",
        command=f"wc -l {file}",
    )
    thought = f"The result says: {n}. I can answer."
    answer = f"{file} has {n} lines."
    return Exchange("bash", user, (step,), thought, answer, (n,))


def meet_error(desk: Desk) -> Exchange:
    """A call that fails, told as it is."""
    words = desk.words
    file = words.file()
    error = desk.say("error", x=file)
    user = desk.say("meet_error", x=file)
    step = obtain_plain(desk, file, error)
    thought = f"That failed. I say so: {error}"
    answer = f"I could not read {file}: {error}"
    return Exchange("error", user, (step,), thought, answer, (error,))


def argument_value(words: Words, kind: str) -> Any:
    """A value of a JSON type."""
    if kind == "integer":
        return int(words.number())
    return words.rng.random() < 0.5 if kind == "boolean" else words.value()


def spoken(value: Any) -> str:
    """A value as a user writes it and as a call spells it."""
    return json.dumps(value) if isinstance(value, (bool, int)) else str(value)


def worded(value: Any) -> str:
    """A value within a sentence: in quotes if nobody could tell where it ends."""
    return f'"{value}"' if " " in str(value) else spoken(value)


def request_custom(desk: Desk, tool: Custom, arguments: dict[str, Any]) -> str:
    """A wish for this very tool: by what it does, with all it needs."""
    rng = desk.rng
    (value, *further_values) = arguments.values()
    if not further_values and not isinstance(value, bool) and rng.random() < 0.4:
        return desk.say(
            "ask_plainly",
            v=tool.verb,
            V=tool.verb.capitalize(),
            t=tool.thing,
            x=worded(value),
        )
    pairs = [
        (name.replace("_", " ") if rng.random() < 0.15 else name, worded(value))
        for name, value in arguments.items()
    ]
    form = rng.choice(("{} {}", "{} {}", "{} = {}", "{}: {}", "{} set to {}"))
    rng.shuffle(pairs)
    argument_list = joined([form.format(name, value) for name, value in pairs])
    return desk.say(
        "ask_with_names",
        v=tool.verb,
        V=tool.verb.capitalize(),
        t=tool.thing,
        s=argument_list,
    )


def call_custom(tool: Custom, values: dict[str, Any], result: str) -> Step:
    """The call; arguments in the schema's order."""
    ordered = {name: values[name] for name in tool.kinds if name in values}
    # From the thing on, since it is spelled alike in the wish, here and in the tool's line.
    thought = f"I need the {tool.offer.line.partition(' the ')[2]}"
    return Step(thought, tool.offer.name, ordered, result)


def outcome(desk: Desk) -> str:
    """What a tool gives back."""
    words = desk.words
    rng = desk.rng
    kind = rng.randrange(5)
    if kind == 0:
        return words.sentence()
    if kind == 1:
        return words.value()
    keys = words.distinct(rng.choice((1, 1, 2, 2, 3, 4)), words.key)
    fields = {
        key: argument_value(words, rng.choice(("string", "integer"))) for key in keys
    }
    if kind == 2:
        return "\n".join(f"{k}: {spoken(v)}" for k, v in fields.items())
    return json.dumps(fields, indent=rng.choice((None, None, 2)))


def fenced(opening: str, text: str) -> str:
    """A text after some words, fenced: the fence stands where the result's own end stands."""
    return f"{opening}\n\n```\n{text}\n```"


def use_custom(desk: Desk) -> Exchange:
    """One call of a tool with an unknown schema."""
    tool = desk.rng.choice(desk.customs)
    arguments = {
        name: argument_value(desk.words, kind)
        for name, kind in tool.kinds.items()
        if name in tool.required or desk.rng.random() < 0.5
    }
    result = outcome(desk)
    step = call_custom(tool, arguments, result)
    user = request_custom(desk, tool, arguments)
    thought = "I have the result. I can answer."
    answer = fenced("The result:", result)
    return Exchange("custom", user, (step,), thought, answer, (result,))


def use_two(desk: Desk) -> Exchange:
    """Two tools, one after the other."""
    first, second = desk.rng.sample(desk.customs, 2)
    steps = []
    requests = []
    for tool in (first, second):
        arguments = {
            n: argument_value(desk.words, tool.kinds[n]) for n in tool.required
        }
        result = desk.rng.choice((desk.words.sentence, desk.words.value))()
        argument_list = joined(
            [f"{name} {worded(value)}" for name, value in arguments.items()]
        )
        requests.append(f"{tool.verb} the {tool.thing} with {argument_list}")
        steps.append(call_custom(tool, arguments, result))
    user = desk.say("use_two", a=requests[0], b=requests[1])
    quotes = tuple(step.result for step in steps)
    answer = f"The results: {quotes[0]} and: {quotes[1]}"
    return Exchange(
        "chain",
        user,
        tuple(steps),
        "I have both results. I can answer.",
        answer,
        quotes,
    )


# Without a tool ----------------------------------------------------------------------


def plain(kind: str, user: str, thought: str, answer: str) -> Exchange:
    """An exchange that takes no call."""
    return Exchange(kind, user, (), thought, answer, (answer,))


def greet(desk: Desk) -> Exchange:
    """Hello, thanks, goodbye."""
    smalltalk = desk.rng.choice(
        SMALLTALK["greetings" if desk.rng.random() < 0.7 else "thanks"]
    )
    user = varied(desk, desk.rng.choice(smalltalk["ask"]))
    return plain("chat", user, "This needs no tool.", smalltalk["answer"])


def varied(desk: Desk, user: str) -> str:
    """The same words as different people type them."""
    roll = desk.rng.random()
    if roll < 0.2:
        user = user.lower()
    if roll > 0.8:
        user = user.rstrip("?.!")
    return user


def state_fact(desk: Desk) -> Exchange:
    """What it knows about the server and itself."""
    fact = desk.rng.choice(SMALLTALK["facts"])
    user = varied(desk, desk.rng.choice(fact["ask"]))
    about = fact["about"]
    thought = f"A question about {about}. This needs no tool."
    return plain("fact", user, thought, fact["answer"])


def admit(desk: Desk) -> Exchange:
    """What it does not know."""
    user = desk.rng.choice(SMALLTALK["general"])
    while "{}" in user:
        user = user.replace("{}", desk.words.noun(), 1)
    answer = "I do not know that. I am only a small demo model; set MODEL_PATH to serve a real one."
    return plain("unknown", varied(desk, user), "I do not know that.", answer)


def calculate(desk: Desk) -> Exchange:
    """Sums, differences and small products, worked out digit by digit."""
    rng = desk.rng
    kind = rng.choice("++--*")
    if kind == "*":
        a = rng.randrange(0, 13)
        b = rng.randrange(0, 13)
        work = f"{a} * {b} = {a * b}."
        value = a * b
    else:
        a = rng.randrange(0, 100)
        b = rng.randrange(0, 100)
        a, b = (max(a, b), min(a, b)) if kind == "-" else (a, b)
        value = a + b if kind == "+" else a - b
        work = tens_and_ones(a, b, kind)
    name = {"+": ("plus", "+"), "-": ("minus", "-"), "*": ("times", "*", "x")}[kind]
    user = desk.say("calculate", a=a, b=b, o=rng.choice(name))
    return plain("sum", user, work, f"{a} {name[1]} {b} = {value}")


def tens_and_ones(a: int, b: int, kind: str) -> str:
    """The work of a sum or a difference of two numbers below 100, ones first."""
    (a10, a1) = divmod(a, 10)
    (b10, b1) = divmod(b, 10)
    if kind == "+":
        units = a1 + b1
        carry = units // 10
        return f"{a1} + {b1} = {units}. {a10} + {b10} + {carry} = {a10 + b10 + carry}. So {a + b}."
    borrow = int(a1 < b1)
    units = a1 + 10 * borrow - b1
    tens = f"{a10} - {b10} - {borrow} = {a10 - b10 - borrow}"
    return f"{a1 + 10 * borrow} - {b1} = {units}. {tens}. So {a - b}."


def say_again(desk: Desk) -> Exchange:
    """Words repeated as they are."""
    words = desk.words
    text = desk.rng.choice((words.sentence, words.value, words.noun, words.file))()
    user = desk.say("say_again", x=text)
    return plain("echo", user, "I repeat it.", text)


def remember(desk: Desk) -> Exchange:
    """Something the same message says."""
    words = desk.words
    pairs = [
        (key, words.value())
        for key in words.distinct(desk.rng.choice((1, 2, 3)), words.key)
    ]
    key, value = desk.rng.choice(pairs)
    statements = " ".join(f"The {k} is {v}." for k, v in pairs)
    user = desk.say("remember", t=statements, k=key)
    return plain("recall", user, "The message says it.", f"The {key} is {value}.")


def decline(desk: Desk) -> Exchange:
    """A wish for which no tool is there."""
    words = desk.words
    user = desk.say("decline", f=words.file(), d=words.folder(), n=words.noun())
    return plain("decline", user, "No tool can do that.", "I have no tool for that.")


def title_of(text: str) -> str:
    """What a chat is called by: the words that it begins with."""
    title = " ".join(text.split()[:6]).rstrip("?.!,:; ")
    return title[:1].upper() + title[1:]


def name_chat(desk: Desk, frame: str = "") -> Exchange:
    """A wish for a title of what somebody said, in a `frame` of words that ask for one."""
    options = {**possible(desk), greet: 1.0, calculate: 1.0, state_fact: 1.0}
    request = desk.rng.choices(list(options), list(options.values()))[0](desk).user
    user = (frame or desk.rng.choice(PHRASES["phrases"]["name_chat"])).format(u=request)
    return plain("title", user, "They want a title.", title_of(request))


Draws = dict[Callable[[Desk], Exchange], float]
NO_TOOL: Final[Draws] = {
    greet: 1.0,
    state_fact: 2.2,
    admit: 0.8,
    calculate: 4.5,
    say_again: 0.7,
    remember: 0.9,
    name_chat: 0.5,
}


# Which tools it takes (any of these sets), and what may then be asked, and how often.
WITH_ROLES: Final[tuple[tuple[tuple[set[str], ...], Draws], ...]] = (
    (
        ({"read"}, {"bash"}),
        {
            read_whole: 2.0,
            read_key: 3.0,
            read_line: 0.8,
            follow_file: 1.0,
            meet_error: 0.6,
        },
    ),
    (({"list"}, {"bash"}), {list_folder: 2.0}),
    (({"read", "list"}, {"bash"}), {list_then_read: 1.2}),
    (({"write"}, {"bash"}), {write_file: 1.6}),
    (({"read", "write"}, {"bash"}), {copy_file: 0.8}),
    (({"edit"},), {edit_file: 0.8}),
    (({"grep"}, {"bash"}), {search_files: 0.8}),
    (({"bash"},), {run_command: 1.4, count_lines: 0.4}),
)


def possible(desk: Desk) -> Draws:
    """What may be asked, given the tools that are there, and how often."""
    options: Draws = {}
    for needs, draws in WITH_ROLES:
        if any(need <= desk.roles.keys() for need in needs):
            options |= draws
    if desk.customs:
        options[use_custom] = 4.0
    if len(desk.customs) > 1:
        options[use_two] = 1.0
    return options


# Around it ---------------------------------------------------------------------------


def write_system(words: Words, n_lines: int) -> str:
    """Instructions as agents send them: rules, lists, sections, none of which matters here."""
    rng = words.rng
    lines: list[str] = []
    while len(lines) < n_lines:
        kind = rng.randrange(12)
        if kind < 6:
            lines.append(rng.choice(SYSTEMS))
        elif kind < 9:
            lines.append(words.sentence())
        elif kind == 9:
            tag = words.noun()
            lines += [
                f"<{tag}>",
                words.sentence(),
                f"{words.key()}: {words.value()}",
                f"</{tag}>",
            ]
        elif kind == 10:
            lines += ["", f"## {words.noun().capitalize()}", ""]
        else:
            lines.append(f"- {words.file()}: {words.sentence()}")
    return "\n".join(lines)


def offer_tools(words: Words, n_customs: int) -> Desk:
    """The tools of a conversation, none with the name of another."""
    rng = words.rng
    desk = Desk(words)
    wanted = rng.choice(
        (
            ("read",),
            ("bash",),
            ("list",),
            ("read", "list"),
            ("read", "write", "bash", "edit"),
            tuple(ROLES),
            ("read", "list", "write"),
            ("bash", "write"),
            ("read", "bash"),
            ("read", "grep", "list"),
        )
    )
    if n_customs and rng.random() < 0.3:
        wanted = ()
    if words.practised(0.2):
        wanted = tuple(ROLES)
    used_names: set[str] = set()
    for role in wanted:
        offer = offer_role(words, role)
        while offer.name in used_names:
            offer = offer_role(words, role)
        desk.roles[role] = offer
        used_names.add(offer.name)
    for _ in range(n_customs):
        tool = offer_custom(words)
        if tool.offer.name not in used_names and all(
            tool.thing != c.thing for c in desk.customs
        ):
            desk.customs.append(tool)
            used_names.add(tool.offer.name)
    return desk


def skills(words: Words) -> list[str]:
    """What agents list in a reminder: it reads like tools, and is none."""
    rng = words.rng
    patterns = [pattern for role in ROLES.values() for pattern in role.descriptions]
    names = words.distinct(rng.choice((2, 4, 8, 16, 32)), words.noun)
    lines = [f"- {name}: {words.described(rng.choice(patterns))}" for name in names]
    return [
        f"{line} {rng.choice(SYSTEMS)}" if rng.random() < 0.4 else line
        for line in lines
    ]


def dress(words: Words, exchange: Exchange) -> Exchange:
    """What clients put around a user's words."""
    rng = words.rng
    if rng.random() > 0.12 and not words.practised(0.15):
        return exchange
    stamp = f"{words.date()} {rng.randrange(24):02}:{rng.randrange(60):02}"
    forms = (
        "<system-reminder>\n{s}\n</system-reminder>\n{u}",
        "[{t} UTC] {u}",
        "{u}\n\n<system-reminder>\n{s}\n</system-reminder>",
        "Current time: {t}\n\n{u}",
        "{u}\n",
        "<context>\n{s}\n</context>\n\n{u}",
    )
    form = rng.choice(forms)
    rules = rng.choice(SYSTEMS)
    if words.practised(0.5):
        rules = "\n".join((rules, *skills(words)))
    user = form.format(s=rules, t=stamp, u=exchange.user)
    return replace(exchange, user=user)


def ask_title(words: Words) -> Conversation:
    """A client that wants a name for a conversation: its system prompt says so."""
    rng = words.rng
    exchange = name_chat(offer_tools(words, 2), "{u}" if rng.random() < 0.5 else "")
    system = rng.choice(PHRASES["titles"])
    if rng.random() < 0.25:
        system = rng.choice(PHRASES["json_titles"])
        answer = json.dumps({"title": exchange.answer}, ensure_ascii=False)
        exchange = replace(exchange, answer=answer, quotes=(answer,))
    return Conversation(system, [], (exchange,))


def wishes(desk: Desk, *, share: float) -> Draws:
    """What may be asked of all that there is; `share`: of what needs no tool."""
    options = possible(desk)
    total = sum(options.values()) or 1.0
    for draw, weight in NO_TOOL.items():
        options[draw] = weight / sum(NO_TOOL.values()) * total * share
    if not desk.roles:
        options[decline] = 0.04 * total
    return options


def in_prose(desk: Desk) -> list[str]:
    """What many agents' instructions tell of the tools, too, and not in the tools' own words."""
    words = desk.words
    rng = desk.rng
    lines: list[str] = []
    for role, offer in desk.roles.items():
        purpose = offer.purpose
        if words.practised(0.6):
            purpose = words.described(rng.choice(ROLES[role].descriptions)).rstrip(".")
        if words.practised(0.4):
            purpose += f" ({', '.join(words.distinct(3, words.noun))}, etc.)"
        lines.append(f"- {offer.name}: {purpose}")
    lines += [
        f"- {custom.offer.name}: {custom.offer.purpose}" for custom in desk.customs
    ]
    return rng.sample(lines, len(lines))


# How much more often than they are measured some are practised: those that are hard and rare.
PRACTICE: Final[Draws] = {
    write_file: 2.5,
    edit_file: 9.0,
    search_files: 4.0,
    read_line: 2.5,
    name_chat: 5.0,
    list_then_read: 2.0,
    copy_file: 2.0,
    use_two: 1.5,
    list_folder: 1.3,
    use_custom: 2.0,
    **dict.fromkeys((say_again, remember, calculate), 0.5),
    **dict.fromkeys((greet, admit, state_fact), 0.35),
}


def write_conversation(
    rng: random.Random,
    *,
    held_out: bool = False,
    filler: str = "",
    n_exchanges: int = 0,
    practice: bool = False,
) -> Conversation:
    """One conversation; `filler` is put in front of it, in the system prompt.

    It has `n_exchanges`, or one to four; where it is for `practice`, hard ones come more often.
    """
    words = Words(rng, held_out)
    if rng.random() < 0.03 or words.practised(0.05):
        return ask_title(words)
    with_tools = rng.random() < 0.82
    n_customs = (
        rng.choice((0, 0, 1, 2, 2, 3)) if rng.random() < 0.9 else rng.randrange(4, 10)
    )
    desk = offer_tools(words, n_customs) if with_tools else Desk(words)
    if with_tools and not desk.roles and not desk.customs:
        desk.customs.append(offer_custom(words))
    options = wishes(desk, share=0.25 if with_tools else 1.0)
    if practice:
        options = {
            draw: weight * PRACTICE.get(draw, 1.0) for draw, weight in options.items()
        }
    n = n_exchanges or rng.choice((1, 1, 2, 2, 3, 4))
    drawn = rng.choices(list(options), list(options.values()), k=n)
    exchanges = tuple(dress(words, draw(desk)) for draw in drawn)
    offers = [*desk.roles.values(), *(custom.offer for custom in desk.customs)]
    schemas = {offer.name: offer.schema for offer in offers}
    if offers and (rng.random() < 0.2 or words.practised(0.15)):
        for _ in range(rng.choice((1, 2, 4, 8))):
            bystander = offer_bystander(words)
            schemas.setdefault(bystander["function"]["name"], bystander)
    tools = rng.sample(list(schemas.values()), len(schemas))
    system = ""
    if rng.random() < 0.8:
        system = write_system(words, rng.choice((1, 1, 2, 3, 5, 8, 14, 24)))
    if system and offers and (words.practised(0.15) or rng.random() < 0.1):
        system = "\n".join((system, "", "Available tools:", *in_prose(desk)))
    return Conversation("\n".join(filter(None, (filler, system))), tools, exchanges)
