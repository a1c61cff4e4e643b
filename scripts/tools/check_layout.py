"""Check that start-llm.py is built as its title page and its banners say.

Prints a line for each fault; exits with 1 if there is one. read_layout.py shows what a
banner looks like.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from read_layout import Definition, Import, Section, imported_packages, read_sections

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "start-llm.py"
LESSONS = ROOT / "docs" / "lessons"

MLX_PACKAGES = {"mlx", "mlx_lm", "mlx_vlm"}
IMPURE_NAMES = {  # packages, and `open`
    *("datetime", "open", "os", "random", "secrets", "shutil", "socket", "subprocess"),
    *("tempfile", "threading", "time", "urllib", "uuid"),
}
PURE_NAMES = {"unquote"}  # of these packages, but computes only
ENVIRONMENT_SECTIONS = {"CUDA", "CONFIG", "MAIN"}
LESSON = re.compile(r"\bL-\d\d+\b")
# What a top-level statement may be: importing the file does nothing.
PASSIVE_STATEMENTS = Definition | Import | ast.Assign | ast.AnnAssign | ast.TypeAlias


def check_layout(source: str, lessons: str) -> list[str]:
    """All faults of a source text. Raises SyntaxError."""
    tree = ast.parse(source)
    sections = read_sections(source, tree)
    packages = imported_packages(tree)
    owners = find_attribute_owners(sections)
    faults = [
        *check_statements(tree, sections),
        *check_titles(sections, ast.get_docstring(tree) or ""),
        *check_lessons(source, lessons),
    ]
    for section in sections:
        section_faults = [
            *check_banner(section),
            *check_uses(section, sections),
            *check_packages(section, packages),
            *check_attributes(section, owners),
        ]
        faults += [f"{section.name} {fault}" for fault in section_faults]
    return faults


def check_statements(tree: ast.Module, sections: list[Section]) -> Iterator[str]:
    """Before the first section stand imports only; in one, only definitions.

    Imports may follow the first section, as those do that are slow.
    """
    first_line = sections[0].line if sections else sys.maxsize
    is_after_import = True
    for statement in tree.body:
        was_after_import = is_after_import
        is_after_import = isinstance(statement, Import)
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
                continue
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                continue
            case ast.With(body=[ast.Import()]) if was_after_import:
                continue
        if statement.lineno < first_line:
            yield f"line {statement.lineno} stands before the first section"
        elif not isinstance(statement, PASSIVE_STATEMENTS):
            yield f"line {statement.lineno} acts when the file is imported"


def check_titles(sections: list[Section], title_page: str) -> Iterator[str]:
    """The title page lists every section, in the order of the file."""
    position = 0
    for section in sections:
        entry = re.compile(rf"(?m)^ *{re.escape(section.name)}(?=$|,| {{2}})")
        found = entry.search(title_page, position)
        if found is not None:
            position = found.end()
        elif entry.search(title_page):
            yield f"{section.name} is out of order on the title page"
        else:
            yield f"{section.name} is not on the title page"


def check_lessons(source: str, lessons: str) -> Iterator[str]:
    headings = [line for line in lessons.splitlines() if line.startswith("## ")]
    written = LESSON.findall("\n".join(headings))
    for lesson in sorted(set(LESSON.findall(source)) - set(written)):
        yield f"{lesson} is cited and not in docs/lessons"
    numbers = [line.split()[1] for line in headings if LESSON.match(line, 3)]
    for number in sorted({name for name in numbers if numbers.count(name) > 1}):
        yield f"{number} is the number of two lessons"


def check_banner(section: Section) -> Iterator[str]:
    for field_name in ("Uses", "Thread"):
        if field_name not in section.fields:
            yield f"has no line {field_name} in its banner"
    for name in section.public_names():
        statement = section.definitions[name]
        if isinstance(statement, Definition) and not ast.get_docstring(statement):
            yield f"has no docstring for its public name {name}"


def check_uses(section: Section, sections: list[Section]) -> Iterator[str]:
    sections_above = [other.name for other in sections if other.line < section.line]
    uses = section.used_sections()
    unused = set(uses) - {"all"}
    if uses == ["all"]:
        uses = sections_above
    for name in uses:
        if name not in sections_above:
            yield f"lists {name} in Uses, which is no section above it"

    for name, line in section.used_names().items():
        owner = find_owner(name, sections)
        if owner is None or name in section.definitions:
            continue
        unused.discard(owner.name)
        if owner.name not in uses:
            yield f"uses {name} of {owner.name} at line {line}, which is not in Uses"
        elif name not in owner.public_names():
            yield f"uses {name} at line {line}, which {owner.name} does not make public"
    for name in sorted(unused):
        yield f"lists {name} in Uses and uses nothing of it"


def find_owner(name: str, sections: list[Section]) -> Section | None:
    return next((owner for owner in sections if name in owner.definitions), None)


def check_packages(section: Section, packages: dict[str, str]) -> Iterator[str]:
    """MLX only where the Thread line says so; nothing impure where it says pure."""
    is_mlx = section.has_thread_word("mlx")
    is_pure = section.has_thread_word("pure")
    for name, line in section.used_names().items():
        package = packages.get(name, name)
        if package in MLX_PACKAGES and not is_mlx:
            yield f"uses {name} at line {line}, but its Thread line does not say mlx"
        if package in IMPURE_NAMES and is_pure and name not in PURE_NAMES:
            yield f"uses {name} at line {line}, but its Thread line says pure"


def find_attribute_owners(sections: list[Section]) -> dict[str, set[str]]:
    """The sections that may touch an attribute; any may touch those not in it."""
    owners = {name: set(ENVIRONMENT_SECTIONS) for name in ("environ", "getenv")}
    for section in sections:
        for attribute in section.owned_attributes():
            owners.setdefault(attribute, set()).add(section.name)
    return owners


def check_attributes(section: Section, owners: dict[str, set[str]]) -> Iterator[str]:
    used = section.used_attributes()
    for attribute, line in used.items():
        if section.name not in owners.get(attribute, {section.name}):
            names = " and ".join(sorted(owners[attribute]))
            yield f"touches {attribute} at line {line}, which is for {names}"
    for attribute in section.owned_attributes():
        if attribute not in used.keys() | section.definitions.keys():
            yield f"lists {attribute} in Owns and does not touch it"


def main() -> int:
    source = SOURCE.read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in LESSONS.glob("*.md")]
    faults = check_layout(source, "\n".join(pages))
    for fault in faults:
        print(f"{SOURCE.name}: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
