"""Read the sections of start-llm.py, for check_layout.py. A section begins so:

    # region LEDGER =====================================
    # What it is for.
    # Uses     CONFIG, LOGGING,          sections above; "-" is none, "all" all above
    #          OPENAI API
    # Owns     _ledger_lock, a leaf      attributes that only this section touches
    # Thread   any; pure                 "mlx": may use MLX; "pure": nothing impure

and ends where the next one begins. What has no underscore is public: sections below may use it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

BANNER = re.compile(r"(?m)^# region (.*?) =*\n((?:#.*\n)*)")
FIELD = re.compile(r"(?m)^# (Uses|Owns|Thread)s? {2,}(.*(?:\n# {4}.*)*)")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Import = ast.Import | ast.ImportFrom


@dataclass
class Section:
    """A section: its banner and its top-level statements."""

    name: str
    line: int
    fields: dict[str, str]  # "Uses" ... of the banner: the text after it
    statements: list[ast.stmt] = field(default_factory=list)
    definitions: dict[str, ast.stmt] = field(default_factory=dict)

    def used_sections(self) -> list[str]:
        """The entries of the Uses line, which commas part; none for "-"."""
        text = self.fields.get("Uses", "")
        entries = [entry.strip() for entry in text.split(",")]
        return [entry for entry in entries if entry not in {"", "-"}]

    def public_names(self) -> list[str]:
        return [name for name in self.definitions if not name.startswith("_")]

    def has_thread_word(self, word: str) -> bool:
        return word in re.findall(r"\w+", self.fields.get("Thread", ""))

    def owned_attributes(self) -> list[str]:
        """The words of the Owns line with an underscore; the others explain them."""
        return re.findall(r"\w*_\w*", self.fields.get("Owns", ""))

    def used_names(self) -> dict[str, int]:
        """The global names that its code reads, each with the first line that does."""
        lines: dict[str, int] = {}
        for statement in self.statements:
            for name in find_free_names(statement, frozenset()):
                lines.setdefault(name.id, name.lineno)
        return lines

    def used_attributes(self) -> dict[str, int]:
        """The attributes that its code reads or sets, each with a line that does."""
        lines: dict[str, int] = {}
        for statement in self.statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute):
                    lines.setdefault(node.attr, node.lineno)
        return lines


def read_sections(source: str, tree: ast.Module) -> list[Section]:
    """The sections in their order, with what stands in each."""
    sections = []
    for banner in BANNER.finditer(source):
        line = source.count("\n", 0, banner.start()) + 1
        fields = {
            field_name: " ".join(text.replace("#", "").split())
            for field_name, text in FIELD.findall(banner[2])
        }
        sections.append(Section(banner[1], line, fields))

    for statement in tree.body:
        begun = [section for section in sections if section.line < statement.lineno]
        if not begun:
            continue
        begun[-1].statements.append(statement)
        names = bound_names(statement)
        if isinstance(statement, Definition):
            names = {statement.name}
        for name in names:
            begun[-1].definitions[name] = statement
    return sections


def bound_names(code: ast.AST) -> set[str]:
    """The variables, parameters and patterns in a piece of code."""
    names = set()
    for node in ast.walk(code):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                names.add(name)
    return names


def find_free_names(code: ast.AST, local_names: frozenset[str]) -> Iterator[ast.Name]:
    """The names that code reads and that no function around them binds."""
    if isinstance(code, Function | ast.Lambda):
        local_names |= bound_names(code)
    is_read = isinstance(getattr(code, "ctx", None), ast.Load)
    if isinstance(code, ast.Name) and is_read and code.id not in local_names:
        yield code
    for child in ast.iter_child_nodes(code):
        yield from find_free_names(child, local_names)


def imported_packages(tree: ast.Module) -> dict[str, str]:
    """The package behind each name that an import binds: `mlx` behind `mx`."""
    packages = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    package = alias.name.partition(".")[0]
                    packages[alias.asname or package] = package
            case ast.ImportFrom(module=str(module), names=aliases):
                for alias in aliases:
                    packages[alias.asname or alias.name] = module.partition(".")[0]
    return packages
