"""Write docs/settings.md: all settings with their defaults and the values that are accepted.

    .venv/bin/python scripts/tools/list_settings.py > docs/settings.md

Names, defaults and ranges are those of Config in start-llm.py; groups and explanations are those
of .env.example, which a test holds to the same list. Change them there.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
GROUP: Final = re.compile(r"-- (.+)")
SETTING: Final = re.compile(r"#?([A-Z][A-Z0-9_]*)=(.*)")

HEADING: Final = """\
# Settings

*Made by `python scripts/tools/list_settings.py > docs/settings.md`; change its sources.*

Settings are environment variables, or lines of a file `.env` beside `start-llm.py` (copy
`.env.example`). The environment wins over `.env`, and the options `--model`, `--port`, `--host`,
`--api-key`, `--backend` and `--no-proxy` of `install_and_run.py` and `start-llm.py` win over both.

A value that is not accepted stops the start with a sentence that names the setting and where it
stands; so does a line of `.env` that sets nothing. A name that is no setting logs a line, with the
setting that was probably meant; one that can only mean `MODEL_PATH` (such as `MODEL`) stops the
start, unless `MODEL_PATH` is set. Settings "without effect" are names of the
system before; one of them logs a line.
"""

OTHER_DEFAULTS_HEADING: Final = """\
## Defaults that are not those of the system before

Settings have the names of the system that this one replaces. Where a default differs, this is why.

| setting | there | here | why |
|---|---|---|---|"""
# Of each such setting the default there, and the reason for another one.
OTHER_DEFAULTS: Final = """\
MODEL_PATH | lmstudio-community/GLM-4.7-Flash-MLX-4bit
    | nothing is downloaded that nobody chose: the first start asks
PROXY_MODEL_ID | openai/{MODEL_PATH}
    | LiteLLM takes every name, and each means the model that is loaded
PROXY_STARTUP_WAIT_SECONDS | 2.0
    | nobody waits for LiteLLM: these are the seconds between two lines that say it starts
QUANTIZED_KV_START | 5000 | a token is packed when it is written: else its KV would depend on
    how long the conversation was when it was read (L-21)
PROMPT_CACHE_MAX_ENTRIES_GLOBAL | 24
    | bytes decide what stays; 24 entries were evicted while memory was free (L-119)
PROMPT_CACHE_TTL_SECONDS | 1800
    | who comes back after an hour is read anew only if the memory was needed (L-119)
DEFAULT_TEMPERATURE | 0.1 | the model's makers know what suits it
DEFAULT_TOP_P | 0.9 | the same
DEFAULT_TOP_K | 40 | the same
DEFAULT_MIN_P | 0.05 | the same
DEFAULT_REPETITION_PENALTY | 1.08
    | a penalty forbids what a tool call has to repeat: names, paths, brackets
ENABLE_REQUEST_LOGGING | true
    | what clients say is written to disk only where it was asked for
"""


class Setting(NamedTuple):
    """A row of the table."""

    name: str
    default: str
    explanation: str

    @property
    def shown_default(self) -> str:
        """As a cell of the table."""
        return f"`{self.default}`" if self.default else "(empty)"


Groups = dict[str, list[Setting]]  # a table for each title


def load_schema() -> dict[str, dict[str, Any]]:
    """The JSON schema of each setting of Config, by the name of its variable."""
    spec = importlib.util.spec_from_file_location("start_llm", ROOT / "start-llm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks the types up by it
    spec.loader.exec_module(module)
    fields = module.Config.model_json_schema()["properties"]
    return {name.upper(): schema for name, schema in fields.items()}


def read_example(text: str) -> Groups:
    """The groups of .env.example. Comments before a setting explain it."""
    groups: Groups = {}
    comments: list[str] = []
    for line in text.splitlines():
        comment = line.removeprefix("# ")
        if setting := SETTING.fullmatch(line):
            *_, settings = groups.values()
            settings.append(Setting(setting[1], setting[2], " ".join(comments)))
            comments = []
        elif title := GROUP.fullmatch(comment):
            groups[title[1].capitalize()] = []
            comments = []
        elif line.startswith("# "):
            comments.append(comment)
    return groups


def describe_values(schema: dict[str, Any]) -> str:
    """What is accepted, in words: `true, false`, `1 to 65535`, `text`."""
    if "enum" in schema:
        return ", ".join(filter(None, schema["enum"]))
    schema = schema.get("anyOf", [schema])[0]  # of a setting that may be unset
    if schema["type"] == "boolean":
        return "true, false"
    if schema["type"] == "string":
        return "text"
    if schema["type"] == "array":
        return "names"
    kind = "whole number" if schema["type"] == "integer" else "number"
    bounds = []
    if "exclusiveMinimum" in schema:
        bounds.append(f"above {schema['exclusiveMinimum']:g}")
    if "minimum" in schema:
        bounds.append(f"from {schema['minimum']:,g}")
    if "maximum" in schema:
        bounds.append(f"to {schema['maximum']:,.10g}")
    return " ".join([kind, *bounds])


def make_markdown(groups: Groups, schemas: dict[str, dict[str, Any]]) -> str:
    """The document."""
    settings = {row.name: row for rows in groups.values() for row in rows}
    lines = [HEADING]
    heads = ("| setting | default | values | what it does |", "|---|---|---|---|")
    for title, rows in groups.items():
        lines += [f"## {title}", "", *heads]
        for name, _, explanation in rows:
            schema = schemas.get(name)
            values = describe_values(schema) if schema else "without effect"
            default = settings[name].shown_default
            lines.append(f"| `{name}` | {default} | {values} | {explanation} |")
        lines.append("")
    lines.append(OTHER_DEFAULTS_HEADING)
    for line in OTHER_DEFAULTS.replace("\n    ", " ").splitlines():
        name, default_there, reason = line.split(" | ")
        default = settings[name].shown_default if name in schemas else "without effect"
        lines.append(f"| `{name}` | `{default_there}` | {default} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    sys.stdout.write(make_markdown(read_example(example), load_schema()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
