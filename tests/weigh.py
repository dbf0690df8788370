"""How much there is to read: `python tests/weigh.py [FOLDER ...]`, one column for each folder, `swarmcli` without any.

It fails on classes of one name in two places. `lint-imports` shows that nothing is imported upwards, test_house.py that
nothing is in a circle. `python tests/weigh.py --floors` draws the floors for docs/architecture.md.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
LONG = 60  # lines of a function
INVERTED = re.compile(r"(Who|Whom|Whoever|Of|What)\b")  # the first word of a sentence whose actor comes late
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Module:
    """One file, read once."""

    def __init__(self, path: Path) -> None:
        source = path.read_text()
        self.tree = ast.parse(source)
        self.nodes = list(ast.walk(self.tree))
        self._source = source
        self._docstrings = [found for node in self.nodes if (found := _docstring(node)) is not None]
        self.docstrings = [str(node.value).strip() for node in self._docstrings]

    @cached_property
    def _tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self._source).readline))

    @cached_property
    def comments(self) -> list[str]:
        return [token.string.lstrip("# ") for token in self._tokens if token.type == tokenize.COMMENT]

    @cached_property
    def code(self) -> set[int]:
        """The numbers of the lines that are neither blank nor comment nor docstring."""
        code = set[int]()
        for token in self._tokens:
            if token.type not in NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
        for node in self._docstrings:
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return code

    def lines(self, node: ast.stmt) -> int:
        """Of code, without blanks, comments and docstrings."""
        return len(self.code.intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1)))


def _docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    value = first.value if isinstance(first, ast.Expr) else None
    return value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _is_number(node: ast.expr | None) -> bool:
    match node:
        case ast.Constant(value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left, _, right):
            return _is_number(left) and _is_number(right)
    return False


def _is_held(node: ast.expr) -> bool:
    """`self.something`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_forward(function: Function) -> bool:
    """Whether a method does no more than to ask something that it holds, with its own arguments."""
    body = function.body[1:] if _docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    asked, given = body[0].value, list[ast.expr]()
    asked = asked.value if isinstance(asked, ast.Await) else asked
    if isinstance(asked, ast.Call):
        given = [*asked.args, *(keyword.value for keyword in asked.keywords)]
        asked = asked.func
    named = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    own = all(isinstance(each, ast.Name) and each.id in named for each in given)
    return isinstance(asked, ast.Attribute) and _is_held(asked.value) and own


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def _used_once(module: Module) -> Iterator[int]:
    """The lines of each private function that its module, which defines it once, names once."""
    uses = Counter(name for node in module.nodes for name in _names(node))
    functions = [node for node in module.nodes if isinstance(node, Function) and re.match("_[^_]", node.name)]
    defined = Counter(node.name for node in functions)
    yield from (module.lines(node) for node in functions if defined[node.name] == uses[node.name] == 1)


def read(root: Path) -> list[Module]:
    """A package, or a single module."""
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    return [Module(path) for path in files]


def weigh(modules: list[Module]) -> dict[str, str]:
    """Each figure by its name."""
    nodes = [node for module in modules for node in module.nodes]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [
        (module.lines(node), node) for module in modules for node in module.nodes if isinstance(node, Function)
    ]
    once = [lines for module in modules for lines in _used_once(module)]
    lengths = sorted(lines for lines, _ in functions)
    numbers = sum(
        isinstance(node, ast.Assign | ast.AnnAssign) and _is_number(node.value)
        for module in modules
        for node in module.tree.body
    )
    said = [text for module in modules for text in (*module.docstrings, *module.comments)]
    methods = [node for each in classes for node in each.body if isinstance(node, Function)]
    return {
        "lines of code": f"{sum(len(module.code) for module in modules):,}",
        "files": f"{len(modules):,}",
        "classes": f"{len(classes):,}",
        "  without a method": f"{sum(not any(isinstance(n, Function) for n in each.body) for each in classes):,}",
        "  names of several": f"{len(twice(modules)):,}",
        "functions": f"{len(functions):,}",
        "  median lines": f"{statistics.median(lengths or [0]):g}",
        f"  over {LONG} lines": f"{sum(lines > LONG for lines in lengths):,}",
        "  private, used once": f"{len(once):,}",
        "    of six lines or fewer": f"{sum(lines <= 7 for lines in once):,}",  # with its signature
        "  that only forward": f"{sum(map(_is_forward, methods)):,}",
        "module-level numbers": f"{numbers:,}",
        "texts that begin with Who, Of, What": f"{sum(INVERTED.match(text) is not None for text in said):,}",
    }


def twice(modules: list[Module]) -> list[str]:
    """The names that several classes have."""
    found = Counter(node.name for module in modules for node in module.nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in found.items() if count > 1)


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first, by the contract of pyproject.toml. No room imports from a floor above
    it, or from another room of its floor."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [[room.strip(" ()") for room in layer.split("|")] for layer in contracts[0]["layers"]]


def _drawn(room: str) -> str:
    """With its lines of code, in hundreds where it has so many."""
    lines = sum(len(module.code) for module in read(ROOT.joinpath(*room.split("."))))
    return f"{room.removeprefix('swarmcli.')} {round(lines, -2) or lines:,}"


def main(folders: list[str]) -> str | None:
    if folders == ["--floors"]:
        print("\n".join("   ".join(map(_drawn, rooms)) for rooms in floors()))
        return None
    roots = [Path(folder).resolve() for folder in folders] or [ROOT / "swarmcli"]
    houses = list(map(read, roots))
    weighed = list(map(weigh, houses))
    for name in weighed[0]:
        print(f"{name:<38}" + "".join(f"{each[name]:>10}" for each in weighed))
    if found := twice(houses[-1]):
        return f"classes of one name in two places: {', '.join(found)}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
