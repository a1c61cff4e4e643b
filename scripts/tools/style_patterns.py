"""What style_measure.py counts: golf, bare names, long regular expressions.

Golf is an expression with several thoughts in it; each kind stands in GOLF_KINDS with a
function that recognizes it. A bare name is a pronoun, participle or particle that does
not say what the value is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NamedTuple

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DICT_DISPLAYS = ast.Dict | ast.DictComp
LISTS_AND_TEXTS = ast.List | ast.Tuple | ast.JoinedStr
LOOKUPS = ast.Name | ast.Attribute | ast.Call
TRUTH_VALUES = LOOKUPS | ast.Compare | ast.UnaryOp | ast.BoolOp | ast.NamedExpr

MAX_REGEX_CHARACTERS = 80
REGEX_SIGNS = re.compile(r"\\[sdwbSA]|\(\?")  # no other text contains them

Parents = dict[ast.AST, ast.AST]

PRONOUNS = """
    it its itself this that these those who whom whose what which one ones own another
    each either neither both such other others all any some every none same
"""
PARTICIPLES_AND_VERBS = """
    said told named known heard seen asked meant made done gone given taken kept be is
    are was were been being do does did have has had will would shall should can could
    may might must
"""
AMOUNTS_AND_LINKS = """
    few less least many much more most brief whole better best how why when where
    whether if else and or but not no yes than so
"""
PLACES_AND_TIMES = """
    above below ahead behind before after beside between beyond toward under near nearly
    far further along around apart away back here there in on out off up down now then
    as at by of to with within without through thus though once never ever often only
    over still since yet until unless till while just very well quite rather like
    instead together too
"""
BARE_NAMES = frozenset(
    (PRONOUNS + PARTICIPLES_AND_VERBS + AMOUNTS_AND_LINKS + PLACES_AND_TIMES).split()
)


def is_bare_name(name: str) -> bool:
    return name.strip("_") in BARE_NAMES


def find_long_regexes(tree: ast.Module) -> list[int]:
    """The lines of those that are not verbose."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if len(text) > MAX_REGEX_CHARACTERS:
                if REGEX_SIGNS.search(text) and "(?x" not in text:
                    lines.append(node.lineno)
    return lines


class GolfSpot(NamedTuple):
    """A line with golf, and which kind it is."""

    line: int
    kind: str


def find_golf(tree: ast.Module) -> list[GolfSpot]:
    """All golf in a syntax tree, in the order of its lines."""
    parents: Parents = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            parents[child] = node

    spots = []
    for node in parents:
        for kind, is_golf in GOLF_KINDS.items():
            if is_golf(node, parents):
                spots.append(GolfSpot(getattr(node, "lineno", 0), kind))
    return sorted(spots)


def is_hidden_walrus(node: ast.AST, parents: Parents) -> bool:
    """`f(n := 3)`; but not `if n := f():`, nor as a part of that condition."""
    if not isinstance(node, ast.NamedExpr):
        return False
    parent = parents[node]
    while isinstance(parent, ast.Compare | ast.UnaryOp | ast.BoolOp):
        parent = parents[parent]
    return not isinstance(parent, ast.If | ast.While)


def is_parallel_assignment(node: ast.AST, _: Parents) -> bool:
    """`a, b = 1, 2`; but not the swap `a, b = b, a`."""
    match node:
        case ast.Assign(targets=[ast.Tuple() as targets], value=ast.Tuple() as values):
            target_texts = [ast.unparse(target) for target in targets.elts]
            value_texts = [ast.unparse(value) for value in values.elts]
            return sorted(target_texts) != sorted(value_texts)
    return False


def is_times_condition(node: ast.AST, _: Parents) -> bool:
    """`"s" * (n > 1)`, `[item] * is_wanted`, `size * has_size`."""
    match node:
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            if is_condition(right) and is_switchable(left):
                return True
            return is_condition(left) and is_switchable(right)
    return False


def is_condition(node: ast.expr) -> bool:
    """Whether an expression plainly is true or false."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id=name)):
            return name in {"bool", "isinstance", "any", "all"}
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.startswith(("is_", "has_", "can_"))
    return False


def is_switchable(node: ast.expr) -> bool:
    """Whether a factor may be a text or list that the other factor switches off."""
    match node:
        case ast.Constant(value=str()):
            return True
    return isinstance(node, LISTS_AND_TEXTS | LOOKUPS | ast.BinOp)


def is_dict_merge(node: ast.AST, _: Parents) -> bool:
    """`body | {"a": 1}` and `body |= {"a": 1}`."""
    match node:
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return isinstance(left, DICT_DISPLAYS) or isinstance(right, DICT_DISPLAYS)
        case ast.AugAssign(op=ast.BitOr(), value=value):
            return isinstance(value, DICT_DISPLAYS)
    return False


def is_effect_only(node: ast.AST, _: Parents) -> bool:
    """The statements `is_late and stop()`, `[f(x) for x in y]`, `any(map(f, y))`."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in {"list", "tuple", "any", "all"}
        case ast.Expr(value=value):
            return isinstance(value, ast.BoolOp | ast.IfExp | ast.Tuple | ast.ListComp)
    return False


def is_control_flow(node: ast.AST, parents: Parents) -> bool:
    """`return entries and entries[0]`: an `and` for its value, not for its truth."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            if isinstance(parents[node], ast.Assign | ast.Return | ast.keyword):
                return not all(isinstance(value, TRUTH_VALUES) for value in values)
    return False


def is_nested_comprehension(node: ast.AST, _: Parents) -> bool:
    """One with two `if`, or with three `for` in it and in those inside it."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    n_loops = sum(isinstance(child, ast.comprehension) for child in ast.walk(node))
    n_conditions = sum(len(loop.ifs) for loop in node.generators)
    return n_loops > 2 or n_conditions > 1


GOLF_KINDS: dict[str, Callable[[ast.AST, Parents], bool]] = {
    "walrus outside an if or while": is_hidden_walrus,
    "parallel assignment": is_parallel_assignment,
    "text or list times a condition": is_times_condition,
    "dictionary merge": is_dict_merge,
    "expression for its effect": is_effect_only,
    "and as control flow": is_control_flow,
    "nested comprehension": is_nested_comprehension,
}
