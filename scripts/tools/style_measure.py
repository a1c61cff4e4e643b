"""Measure how densely and how plainly a Python program is written.

    python scripts/tools/style_measure.py FILE ...

It prints these figures for each file. check_layout.py --style holds start-llm.py to the
tripwires below.

    tokens      Python tokens a code line; blank lines, comments, docstrings are no code
    bare        per cent of the names bound in functions that are a bare pronoun,
                participle or particle, and so do not say what the value is
    golf        a 100 code lines: see style_patterns.py
    complexity  of the worst function: 1, and 1 more for each branch, and, or, `if` and
                `for` in an expression
    longest     code lines of the longest function
    wide        lines over 88 columns
    regexes     regular expressions over 80 characters that are not verbose
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from style_patterns import GolfSpot, find_golf, find_long_regexes, is_bare_name

MAX_TOKENS_PER_LINE = 9.0
MAX_BARE_PERCENT = 2.0
MAX_GOLF_PER_100 = 0.5
MAX_TOKENS_PER_FUNCTION_LINE = 11.0
MIN_LINES_FOR_TOKENS = 12  # a shorter function is mostly its signature
MAX_FUNCTION_LINES = 60
MAX_COMPLEXITY = 15
MAX_COLUMNS = 88

CODE_TOKENS = {
    *(tokenize.NAME, tokenize.OP, tokenize.NUMBER),
    *(tokenize.STRING, tokenize.FSTRING_START),
}
BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.match_case, ast.ExceptHandler),
    *(ast.Assert, ast.IfExp, ast.comprehension),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
TokensByLine = Counter[int]  # code lines only; a line inside a string has 0


class FunctionFigures(NamedTuple):
    """What was measured of one function, the functions inside it included."""

    name: str
    line: int
    n_code_lines: int
    tokens_per_line: float
    complexity: int


class StyleFigures(NamedTuple):
    """What was measured of one file."""

    tokens_per_line: float
    bare_percent: float
    golf_per_100: float
    golf_spots: list[GolfSpot]
    functions: list[FunctionFigures]
    wide_lines: list[int]
    long_regex_lines: list[int]


def measure(source: str) -> StyleFigures:
    """The figures of a source text. Raises SyntaxError."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    tokens = count_tokens(source, tree)
    golf_spots = find_golf(tree)
    names = [name for function in functions for name in bound_names(function)]
    bare_names = [name for name in names if is_bare_name(name)]
    lines = source.splitlines()

    return StyleFigures(
        tokens_per_line=tokens.total() / max(len(tokens), 1),
        bare_percent=100 * len(bare_names) / max(len(names), 1),
        golf_per_100=100 * len(golf_spots) / max(len(tokens), 1),
        golf_spots=golf_spots,
        functions=[measure_function(function, tokens) for function in functions],
        wide_lines=[n for n, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS],
        long_regex_lines=find_long_regexes(tree),
    )


def measure_function(function: Function, tokens: TokensByLine) -> FunctionFigures:
    last_line = function.end_lineno or function.lineno
    code_lines = [n for n in range(function.lineno, last_line + 1) if n in tokens]
    n_tokens = sum(tokens[n] for n in code_lines)
    return FunctionFigures(
        name=function.name,
        line=function.lineno,
        n_code_lines=len(code_lines),
        tokens_per_line=n_tokens / max(len(code_lines), 1),
        complexity=complexity(function),
    )


def count_tokens(source: str, tree: ast.Module) -> TokensByLine:
    docstrings = docstring_lines(tree)
    counts: TokensByLine = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first_line = token.start[0]
        if token.type not in CODE_TOKENS or first_line in docstrings:
            continue
        counts[first_line] += 1
        for line in range(first_line + 1, token.end[0] + 1):
            counts[line] += 0
    return counts


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef | ast.Module):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def bound_names(function: Function) -> set[str]:
    """The parameters of a function and the variables that are set in it."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = {parameter.arg for parameter in parameters} - {"self", "cls"}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def complexity(function: Function) -> int:
    n_branches = 0
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            n_branches += 1
        if isinstance(node, ast.comprehension):
            n_branches += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            n_branches += len(node.values) - 1
    return 1 + n_branches


def describe(figures: StyleFigures) -> str:
    """The figures on one line, as the module's docstring names them."""
    longest = max((f.n_code_lines for f in figures.functions), default=0)
    most_complex = max((f.complexity for f in figures.functions), default=0)
    return (
        f"tokens={figures.tokens_per_line:.2f} bare={figures.bare_percent:.1f}"
        f" golf={figures.golf_per_100:.2f} complexity={most_complex} longest={longest}"
        f" wide={len(figures.wide_lines)} regexes={len(figures.long_regex_lines)}"
    )


def find_slips(figures: StyleFigures) -> Iterator[str]:
    """What is over a tripwire, one sentence each."""
    if figures.tokens_per_line > MAX_TOKENS_PER_LINE:
        yield f"{figures.tokens_per_line:.2f} tokens a code line"
    if figures.bare_percent > MAX_BARE_PERCENT:
        yield f"{figures.bare_percent:.1f} % of the names are bare"
    if figures.golf_per_100 > MAX_GOLF_PER_100:
        yield f"{figures.golf_per_100:.2f} golf a 100 code lines"
        yield from (f"line {line}: golf, {kind}" for line, kind in figures.golf_spots)
    for function in figures.functions:
        for slip in find_function_slips(function):
            yield f"line {function.line}: {function.name} has {slip}"
    for line in figures.wide_lines:
        yield f"line {line}: over {MAX_COLUMNS} columns"
    for line in figures.long_regex_lines:
        yield f"line {line}: a long regular expression that is not verbose"


def find_function_slips(function: FunctionFigures) -> Iterator[str]:
    is_long_enough = function.n_code_lines >= MIN_LINES_FOR_TOKENS
    if is_long_enough and function.tokens_per_line > MAX_TOKENS_PER_FUNCTION_LINE:
        yield f"{function.tokens_per_line:.1f} tokens a code line"
    if function.n_code_lines > MAX_FUNCTION_LINES:
        yield f"{function.n_code_lines} code lines"
    if function.complexity > MAX_COMPLEXITY:
        yield f"complexity {function.complexity}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        source_text = Path(path).read_text(encoding="utf-8")
        print(f"{path}: {describe(measure(source_text))}")
