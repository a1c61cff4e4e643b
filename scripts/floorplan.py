"""Draw and check the floor plan of start-llm.py.

    python scripts/floorplan.py            check; print what is wrong; exit 1 if anything is
    python scripts/floorplan.py --write    also rewrite .context/MAP.md

WHAT IS CHECKED

    rooms       numbered in order, the same as in the title page; every top-level name stands in
                one; banner complete, at most BANNER_LINES; within budget; the file in FILE_LINES
    doors       exist, have a docstring; a room names only doors, of rooms it says it knows, which
                stand above it; it knows no room that it never names
    what is     a room's stores and locks (Owns) are touched by it alone
    owned
    walls       mlx only where the banner says so; no clock, randomness, files or network in a room
                that says pure; the environment is read in ENVIRONMENT_ROOMS; litellm nowhere,
                mlx_vlm only inside functions
    import      nothing happens: no statement that acts, no mutable name, no `global`
    size        functions FUNCTION_LINES of code (here and in the other programs of the project),
                positional parameters, classes CLASS_LINES, their changeable attributes
    lessons     each lesson that a comment cites, as in why(L-07), is in .context/LESSONS.md

Ruff has the rest: complexity, nesting, number of parameters, branches, statements.
"""

from __future__ import annotations

import ast
import itertools
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "start-llm.py"
MAP = ROOT / ".context" / "MAP.md"
LESSONS = ROOT / ".context" / "LESSONS.md"

FILE_LINES = 5499
FUNCTION_LINES = 40  # of code: docstrings, comments and blank lines are free
CLASS_LINES = 200  # likewise
CLASS_ATTRIBUTES = 12  # those that change; the fields of a frozen record document themselves
POSITIONAL = 2  # parameters before the keyword-only ones, self not counted
BANNER_LINES = 11  # purpose and design

MLX_MODULES = frozenset({"mlx", "mlx_lm", "mlx_vlm"})
IMPURE_MODULES = frozenset(
    {
        "time",
        "datetime",
        "random",
        "secrets",
        "uuid",
        "os",
        "socket",
        "subprocess",
        "shutil",
        "tempfile",
        "urllib",
    }
)
IMPURE_BUILTINS = frozenset({"open", "input", "print"})
ENVIRONMENT_ROOMS = frozenset({"CONFIG", "MAIN"})
MUTABLE_MAKERS = frozenset(
    {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"}
)
THREAD_MAKERS = frozenset(
    {"Lock", "RLock", "Event", "Condition", "Queue", "SimpleQueue", "Thread", "Timer"}
)
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

OPEN = re.compile(r"# region (\d\d) ([A-Z]+) =*$")
# Several may share a line, with a dot between them.
FIELD = re.compile(r"(?:^#| ·) (Doors|Knows|Owns|Thread|Budget)\s+(.*?)(?=$| · )")
REQUIRED_FIELDS = ("Doors", "Knows", "Thread", "Budget")
CONTINUED = re.compile(r"#\s{6,}(\S.*)$")
LISTED = re.compile(r"^\s*(?:[a-z]+\s+)?(\d\d) ([A-Z]+)\s", re.MULTILINE)
CITED = re.compile(r"\bL-\d\d+\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Import = ast.Import | ast.ImportFrom


@dataclass
class Room:
    """One region of the file: its banner, and the top-level names that stand in it."""

    number: int
    name: str
    start: int  # first and last line, both inside
    end: int = 0
    banner: int = 0  # comment lines with text that are no field
    fields: dict[str, str] = field(default_factory=dict)  # "Doors" -> its text, lines joined
    names: dict[str, ast.stmt] = field(default_factory=dict)

    def words(self, name: str) -> list[str]:
        """The comma-separated entries of a field; "-" is none."""
        words = [word.strip() for word in self.fields.get(name, "").split(",")]
        return [word for word in words if word not in ("", "-")]

    @property
    def doors(self) -> list[str]:
        return self.words("Doors")

    @property
    def thread(self) -> str:
        return self.fields.get("Thread", "")

    @property
    def budget(self) -> int:
        text = self.fields.get("Budget", "")
        return int(text) if text.isdecimal() else 0

    @property
    def lines(self) -> int:
        return self.end - self.start + 1

    def free_nodes(self) -> Iterator[ast.AST]:
        """The room's syntax without the names that a definition binds itself."""
        for node in self.names.values():
            local = bound_names(node)
            for n in ast.walk(node):
                if not (isinstance(n, ast.Name) and n.id in local):
                    yield n


@dataclass
class Plan:
    """The whole file: its text, its tree and its rooms in the order they stand."""

    lines: list[str]
    tree: ast.Module
    rooms: list[Room]
    homeless: list[str] = field(default_factory=list)  # problems found while placing names

    def room_at(self, line: int) -> Room | None:
        return next((r for r in self.rooms if r.start <= line <= r.end), None)

    def owner_of(self, name: str) -> Room | None:
        return next((r for r in self.rooms if name in r.names), None)

    def known_to(self, room: Room) -> list[str]:
        """Names of the rooms whose doors this room may use; "all" means all above."""
        if room.words("Knows") == ["all"]:
            return [r.name for r in self.rooms if r.number < room.number]
        return room.words("Knows")

    @cached_property
    def mlx_names(self) -> set[str]:
        """Names by which the file can reach MLX."""
        return imported_from(self.tree, MLX_MODULES)

    @cached_property
    def impure_names(self) -> set[str]:
        """Names by which the file can reach clock, randomness, files, processes and network."""
        return imported_from(self.tree, IMPURE_MODULES) | IMPURE_BUILTINS


# Reading -----------------------------------------------------------------------------------------


def read_plan(source: str) -> Plan:
    """The plan of a source text. Raises SyntaxError."""
    lines = source.splitlines()
    plan = Plan(lines, ast.parse(source), read_rooms(lines))
    for node in plan.tree.body:
        for name in defined_names(node):
            if room := plan.room_at(node.lineno):
                room.names[name] = node
            else:
                plan.homeless.append(f"{name} (line {node.lineno}) stands in no room")
    return plan


def read_rooms(lines: list[str]) -> list[Room]:
    rooms: list[Room] = []
    for number, line in enumerate(lines, 1):
        if match := OPEN.match(line):
            rooms.append(Room(int(match[1]), match[2], number))
            read_banner(rooms[-1], lines[number:])
        elif line == "# endregion" and rooms:
            rooms[-1].end = number
    for room, after in itertools.pairwise(rooms):  # only the last one says where it ends
        room.end = after.start - 1
        while not lines[room.end - 1]:
            room.end -= 1
    return rooms


def read_banner(room: Room, lines: list[str]) -> None:
    """Fill in what the comment block under the `# region` line says."""
    current = ""
    for line in lines:
        if not line.startswith("#") or line.startswith("# ==="):
            return
        if line == "#":
            continue
        found = FIELD.findall(line)
        for current, text in found:
            room.fields[current] = f"{room.fields.get(current, '')}, {text}".lstrip(", ")
        if found:
            continue
        if current and (match := CONTINUED.match(line)):
            room.fields[current] += " " + match[1]
        else:
            room.banner += 1


def defined_names(node: ast.stmt) -> list[str]:
    """Names that a top-level statement gives to something; imports are not counted."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [t.id for t in targets if isinstance(t, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
            return [name]
    return []


def imported_from(tree: ast.Module, modules: frozenset[str]) -> set[str]:
    """Names that the file's top-level imports bind out of these modules."""
    bound = set()
    for node in tree.body:
        if isinstance(node, Import) and roots_of(node) & modules:
            bound |= {a.asname or a.name.partition(".")[0] for a in node.names}
    return bound


def roots_of(node: Import) -> set[str]:
    """Top packages that an import statement names."""
    modules = (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
    )
    return {module.partition(".")[0] for module in modules}


def called_name(node: ast.AST | None) -> str:
    """`Lock` for the call `threading.Lock()`; "" for anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def bound_names(node: ast.AST) -> set[str]:
    """Names that a definition binds inside itself, as parameters or variables."""
    inner = [n for child in ast.iter_child_nodes(node) for n in ast.walk(child)]
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in inner if isinstance(n, ast.arg)}


def definitions(tree: ast.AST) -> Iterator[Definition]:
    return (n for n in ast.walk(tree) if isinstance(n, Definition))


def code_lines(node: Definition, lines: list[str]) -> int:
    """Lines of code in a definition: not its docstrings, comments and blank lines."""
    free: set[int] = set()
    for inner in definitions(node):
        if ast.get_docstring(inner) is not None:
            free |= set(range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1))
    span = range(node.lineno, (node.end_lineno or 0) + 1)
    texts = (lines[i - 1].strip() for i in span if i not in free)
    return sum(1 for text in texts if text and not text.startswith("#"))


# Checking ----------------------------------------------------------------------------------------


def check(plan: Plan, *, lessons: str = "") -> list[str]:
    """Everything that is wrong, one sentence each, sorted."""
    problems = [*plan.homeless, *check_file(plan), *check_import(plan)]
    problems += check_lessons("\n".join(plan.lines), lessons)
    for room in plan.rooms:
        problems += [
            f"{room.name}: {p}" for p in (*check_banner(plan, room), *check_uses(plan, room))
        ]
        for node in room.names.values():
            problems += [f"{room.name}: {p}" for p in check_sizes(node, plan.lines)]
    return sorted(set(problems))


def check_file(plan: Plan) -> Iterator[str]:
    if [r.number for r in plan.rooms] != list(range(1, len(plan.rooms) + 1)):
        yield "rooms are not numbered 1..n in order"
    listed = LISTED.findall(ast.get_docstring(plan.tree) or "")
    if listed != [(f"{r.number:02}", r.name) for r in plan.rooms]:
        yield "the title page lists other rooms than the file has"
    if len(plan.lines) > FILE_LINES:
        yield f"the file has {len(plan.lines)} lines, limit {FILE_LINES}"


def check_import(plan: Plan) -> Iterator[str]:
    """Importing the file must do nothing and leave nothing that changes."""
    for node in plan.tree.body:
        if not is_passive(node):
            yield f"line {node.lineno} does something when the file is imported"
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node):
            yield f"line {node.lineno} makes a mutable module name"
    for inner in ast.walk(plan.tree):
        if isinstance(inner, ast.Global):
            yield f"`global` at line {inner.lineno}"
        if isinstance(inner, Import):
            roots = roots_of(inner)
            if "litellm" in roots:
                yield f"litellm is imported at line {inner.lineno}; it runs as a program of its own"
            if "mlx_vlm" in roots and inner in plan.tree.body:
                yield f"mlx_vlm is imported at line {inner.lineno}, before a vision model is loaded"


def is_passive(node: ast.stmt) -> bool:
    """Whether a top-level statement only names things (or is the call of main at the end)."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return isinstance(node, Definition | Import | ast.Assign | ast.AnnAssign | ast.TypeAlias)


def is_mutable(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a module name is state. A table written out and marked Final is not."""
    made = called_name(node.value)
    if made in THREAD_MAKERS or made in MUTABLE_MAKERS:
        return True
    is_final = isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Final")
    return isinstance(node.value, DISPLAYS) and not is_final


def check_banner(plan: Plan, room: Room) -> Iterator[str]:
    for name in REQUIRED_FIELDS:
        if name not in room.fields:
            yield f"the banner has no {name}"
    if room.banner > BANNER_LINES:
        yield f"the banner has {room.banner} lines of purpose and design, limit {BANNER_LINES}"
    if room.end == 0:
        yield "no `# endregion` behind the last room"
    if room.lines > room.budget:
        yield f"{room.lines} lines, budget {room.budget}"
    for door in room.doors:
        yield from check_door(room, door)
    above = {r.name for r in plan.rooms if r.number < room.number}
    for known in plan.known_to(room):
        if known not in above:
            yield f"knows {known}, which is not above it"


def check_door(room: Room, door: str) -> Iterator[str]:
    node = room.names.get(door)
    if node is None:
        yield f"door {door} does not exist"
    elif isinstance(node, Definition) and not ast.get_docstring(node):
        yield f"door {door} has no docstring"


def check_uses(plan: Plan, room: Room) -> Iterator[str]:
    """What the room's code names: doors, stores of other rooms, and what its walls keep out."""
    unused = set(room.words("Knows")) - {"all"}
    for n in room.free_nodes():
        if isinstance(n, ast.Name) and (owner := plan.owner_of(n.id)):
            unused.discard(owner.name)
            yield from check_name(plan, room, n)
        yield from check_walls(plan, room, n)
    for name in sorted(unused):
        yield f"says it knows {name} but names none of its doors"


def check_name(plan: Plan, room: Room, n: ast.Name) -> Iterator[str]:
    home = plan.owner_of(n.id)
    if home is None or home is room:
        return
    if home.name not in plan.known_to(room):
        yield f"{n.id} at line {n.lineno} belongs to {home.name}, which it does not know"
    elif n.id not in home.doors:
        yield f"{n.id} at line {n.lineno} is not a door of {home.name}"


def check_walls(plan: Plan, room: Room, n: ast.AST) -> Iterator[str]:
    match n:
        case ast.Name(id=name) if "mlx" not in room.thread and name in plan.mlx_names:
            yield f"{name} at line {n.lineno}, but the banner does not say mlx"
        case ast.Name(id=name) if "pure" in room.thread and name in plan.impure_names:
            yield f"{name} at line {n.lineno}, but the banner says pure"
        case ast.Import() | ast.ImportFrom():
            yield from check_inner_import(room, n)
        case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv"):
            if room.name not in ENVIRONMENT_ROOMS:
                yield f"reads the environment at line {n.lineno}"
        case ast.Attribute(attr=name):
            owner = next((r for r in plan.rooms if name in r.words("Owns")), room)
            if owner is not room:
                yield f"reaches for {name} of {owner.name} (line {n.lineno})"


def check_inner_import(room: Room, node: Import) -> Iterator[str]:
    roots = roots_of(node)
    if roots & MLX_MODULES and "mlx" not in room.thread:
        yield f"imports mlx at line {node.lineno}, but the banner does not say mlx"
    if roots & IMPURE_MODULES and "pure" in room.thread:
        yield f"imports {min(roots)} at line {node.lineno}, but the banner says pure"


def check_sizes(tree: ast.AST, lines: list[str]) -> Iterator[str]:
    for node in definitions(tree):
        size = code_lines(node, lines)
        if isinstance(node, ast.ClassDef):
            n_attributes = len(changeable_attributes(node))
            if size > CLASS_LINES:
                yield f"class {node.name} has {size} lines of code, limit {CLASS_LINES}"
            if n_attributes > CLASS_ATTRIBUTES:
                yield f"class {node.name} has {n_attributes} attributes, limit {CLASS_ATTRIBUTES}"
        else:
            if size > FUNCTION_LINES:
                yield f"{node.name} has {size} lines of code, limit {FUNCTION_LINES}"
            if n_positional(node) > POSITIONAL:
                yield f"{node.name} takes more than {POSITIONAL} parameters by position"


def n_positional(node: Function) -> int:
    """Parameters a caller may give by position, without self; 0 where another class sets them."""
    decorators = {ast.unparse(d) for d in node.decorator_list}
    is_special = node.name.startswith("__") and node.name not in ("__init__", "__call__")
    if is_special or "override" in decorators:
        return 0
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def changeable_attributes(node: ast.ClassDef) -> set[str]:
    """Attributes set on self anywhere, and the fields of a dataclass that is not frozen."""
    found = {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
        and n.value.id == "self"
    }
    decorators = [ast.unparse(d) for d in node.decorator_list if "dataclass" in ast.unparse(d)]
    if any("frozen=True" not in text for text in decorators):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        found |= {
            ast.unparse(n.target) for n in fields if "ClassVar" not in ast.unparse(n.annotation)
        }
    return found


def check_lessons(source: str, lessons: str) -> Iterator[str]:
    """Each lesson cited in the source has its heading `## L-07 ...` among the lessons."""
    written = {
        m[0]
        for line in lessons.splitlines()
        if line.startswith("#")
        for m in [CITED.search(line)]
        if m
    }
    for cited in sorted(set(CITED.findall(source)) - written):
        yield f"cites {cited}, which LESSONS.md does not have"


def check_other_programs() -> Iterator[str]:
    """The set-up, scripts and benchmarks: only the length of functions."""
    for path in (
        ROOT / "install_and_run.py",
        *ROOT.glob("scripts/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ):
        source = path.read_text(encoding="utf-8")
        for node in definitions(ast.parse(source)):
            size = code_lines(node, source.splitlines())
            if isinstance(node, Function) and size > FUNCTION_LINES:
                yield f"{path.name}: {node.name} has {size} lines of code, limit {FUNCTION_LINES}"


# Drawing -----------------------------------------------------------------------------------------


def draw(plan: Plan) -> str:
    """The text of .context/MAP.md."""
    sizes = [code_lines(n, plan.lines) for n in definitions(plan.tree) if isinstance(n, Function)]
    budget = sum(room.budget for room in plan.rooms)
    head = [
        "<!-- written by scripts/floorplan.py --write; do not edit -->",
        "# Floor plan of start-llm.py",
        "",
        f"{len(plan.lines)} lines, limit {FILE_LINES}; the rooms' budgets sum to {budget}. "
        f"{len(sizes)} functions, median {statistics.median(sizes or [0]):g} lines of code, "
        f"longest {max(sizes, default=0)}.",
        "",
        "| room | lines | size / budget | knows | thread | doors (line) |",
        "|---|---|---|---|---|---|",
    ]
    index = ["", "## Names", "", *draw_index(plan)]
    return "\n".join([*head, *map(draw_room, plan.rooms), *index]) + "\n"


def draw_room(room: Room) -> str:
    doors = ", ".join(f"`{d}` {room.names[d].lineno}" for d in room.doors if d in room.names)
    return (
        f"| {room.number:02} {room.name} | {room.start}-{room.end} | {room.lines} / {room.budget} "
        f"| {' '.join(room.words('Knows')) or '-'} | {room.thread} | {doors or '-'} |"
    )


def draw_index(plan: Plan) -> list[str]:
    """One paragraph a letter: every top-level name and every public method, with its line."""
    entries: dict[str, list[str]] = {}
    for name, line in sorted(index_entries(plan), key=lambda entry: entry[0].lower().lstrip("_")):
        entries.setdefault(name.lstrip("_")[0].upper(), []).append(f"`{name}` {line}")
    return [f"**{letter}** {' · '.join(names)}\n" for letter, names in entries.items()]


def index_entries(plan: Plan) -> Iterator[tuple[str, int]]:
    for room in plan.rooms:
        for name, node in room.names.items():
            yield name, node.lineno
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = [n for n in inner if isinstance(n, Function) and not n.name.startswith("_")]
            yield from ((f"{name}.{method.name}", method.lineno) for method in methods)


def check_project() -> list[str]:
    """All problems of this repository, the map's age included."""
    plan = read_plan(SOURCE.read_text(encoding="utf-8"))
    lessons = LESSONS.read_text(encoding="utf-8") if LESSONS.exists() else ""
    problems = [*check(plan, lessons=lessons), *check_other_programs()]
    if not MAP.exists() or MAP.read_text(encoding="utf-8") != draw(plan):
        problems.append(".context/MAP.md is stale; run scripts/floorplan.py --write")
    return problems


def main() -> int:
    if "--write" in sys.argv[1:]:
        MAP.write_text(draw(read_plan(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")
    problems = check_project()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
