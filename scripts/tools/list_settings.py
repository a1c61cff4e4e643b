"""Write the tables of docs/settings.md: all settings, their defaults, and what values are accepted.

    .venv/bin/python scripts/tools/list_settings.py

Names, defaults and ranges are those of Config in start-llm.py; groups and explanations are those
of .env.example, which a test holds to the same list. Change them there. What stands before these
tables, and after them (defaults that another system had), is of the document itself.
"""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENT: Final = ROOT / "docs" / "settings.md"
GROUP: Final = re.compile(r"-- (.+)")
SETTING: Final = re.compile(r"#?([A-Z][A-Z0-9_]*)=(.*)")

# A row of the document's last table: a setting, its default in the system before, and here.
OTHER_DEFAULT: Final = re.compile(r"(?m)^(\| `(\w+)` \| `.*?` \| ).*?(?= \|)")


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


def make_markdown(
    document: str, groups: Groups, schemas: dict[str, dict[str, Any]]
) -> str:
    """The document with a new table for each group, and new defaults in its last one."""
    introduction, _, _ = document.partition("\n## ")
    _, _, other_defaults = document.rpartition("\n## ")
    settings = {row.name: row for rows in groups.values() for row in rows}
    lines = [introduction]
    heads = ("| setting | default | values | what it does |", "|---|---|---|---|")
    for title, rows in groups.items():
        lines += [f"## {title}", "", *heads]
        for row in rows:
            schema = schemas.get(row.name)
            values = describe_values(schema) if schema else "without effect"
            cells = (f"`{row.name}`", row.shown_default, values, row.explanation)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")

    def state_default(row: re.Match[str]) -> str:
        default = settings[row[2]].shown_default
        return row[1] + (default if row[2] in schemas else "without effect")

    lines.append(f"## {OTHER_DEFAULT.sub(state_default, other_defaults)}")
    return "\n".join(lines)


def main() -> int:
    document = DOCUMENT.read_text(encoding="utf-8")
    if not document:
        sys.exit(f"{DOCUMENT} is empty: git restore it, and redirect nothing into it")
    spec = importlib.util.spec_from_file_location("start_llm", ROOT / "start-llm.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic looks the types up by it
    spec.loader.exec_module(module)
    fields = module.Config.model_json_schema()["properties"]
    schemas = {name.upper(): schema for name, schema in fields.items()}

    groups = read_example((ROOT / ".env.example").read_text(encoding="utf-8"))
    text = make_markdown(document, groups, schemas)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
