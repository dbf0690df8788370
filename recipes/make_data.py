"""Makes the small data sets that the recipes here learn from: rows from the sources of Python's own standard library,
and drawn shapes. Needs no network; the same Python makes the same files.

    python recipes/make_data.py

writes them to recipes/data. A link carries no data: each volunteer makes them below the directory that `swarm join`
names, with `python -m swarmcli.shipped.make_data DIRECTORY/data`; names of files after the directory choose some.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import random
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STATEMENTS = ("assign", "expr", "for", "if", "return", "with")  # the labels of statements.jsonl
KINDS = ("keyword", "name", "operator", "number", "string")  # the tags of tokens.jsonl
SHAPES = ("circle", "square", "triangle")
MOST = 4000  # rows of a file
ROOT = Path(sysconfig.get_path("stdlib"))


def sources() -> Iterator[str]:
    """The text of each module, in a fixed order."""
    for file in sorted(ROOT.glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="replace")


def statements() -> Iterator[dict[str, Any]]:
    """First lines of statements, each labelled with the kind of statement; at most MOST / 6 of each kind."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in STATEMENTS}
    for text in sources():
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            kind = type(node).__name__.lower()
            if kind in found and isinstance(node, ast.stmt):
                found[kind][lines[node.lineno - 1].strip()[:120]] = None
    for kind, texts in found.items():
        chosen = list(texts)
        random.Random(1).shuffle(chosen)
        yield from ({"text": text, "label": kind} for text in chosen[: MOST // len(STATEMENTS)])


def tokens() -> Iterator[dict[str, Any]]:
    """The tokens of a line, each with its kind."""
    kinds = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator", tokenize.NAME: "name"}
    for text in sources():
        row: list[tuple[str, str]] = []
        try:
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.NEWLINE:
                    if 4 <= len(row) <= 24:
                        yield {"tokens": [word for word, _ in row], "tags": [kind for _, kind in row]}
                    row = []
                elif token.type in kinds and len(token.string) <= 24 and "\n" not in token.string:
                    kind = "keyword" if keyword.iskeyword(token.string) else kinds[token.type]
                    row.append((token.string, kind))
        except (tokenize.TokenError, SyntaxError):
            continue


def documented() -> Iterator[tuple[str, str]]:
    """The names of functions and classes, each with the first sentence of its docstring."""
    for text in sources():
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
                sentence = re.split(r"(?<=\.)\s|\n", said.strip())[0]
                if 20 <= len(sentence) <= 110 and not node.name.startswith("_"):
                    yield node.name, sentence


def names() -> Iterator[dict[str, Any]]:
    """Rows of a sentence about a function or class, and its name."""
    for name, sentence in documented():
        yield {"source": sentence, "target": name}


def chats() -> Iterator[dict[str, Any]]:
    """Rows of a question about what a function or class does, and the answer."""
    for name, sentence in documented():
        asked = {"role": "user", "content": f"What does {name} do?"}
        yield {"messages": [asked, {"role": "assistant", "content": sentence}]}


def shapes(directory: Path) -> None:
    """Drawn shapes of 32 pixels, a directory for each kind."""
    from PIL import Image, ImageDraw

    rng = random.Random(1)
    for number in range(1200):
        kind = SHAPES[number % len(SHAPES)]
        image = Image.new("RGB", (32, 32), tuple(rng.randrange(80) for _ in range(3)))
        draw, size = ImageDraw.Draw(image), rng.randrange(10, 22)
        x, y = rng.randrange(32 - size), rng.randrange(32 - size)
        color, box = tuple(rng.randrange(120, 256) for _ in range(3)), (x, y, x + size, y + size)
        if kind == "circle":
            draw.ellipse(box, color)
        elif kind == "square":
            draw.rectangle(box, color)
        else:
            draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], color)
        file = directory / kind / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)


def write(file: Path, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Writes at most MOST rows, drawn from all of them, as lines of JSON."""
    made = list(rows())
    random.Random(1).shuffle(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in made[:MOST]), encoding="utf-8")
    print(f"{file}: {min(MOST, len(made))} rows of {len(made)}", file=sys.stderr)


ROWS = {"statements.jsonl": statements, "tokens.jsonl": tokens, "names.jsonl": names, "chats.jsonl": chats}


def main(directory: Path, chosen: Sequence[str] = (*ROWS, "shapes")) -> None:
    for name in chosen:
        if name in ROWS:
            write(directory / name, ROWS[name])
        elif name == "shapes":
            shapes(directory / name)
            print(f"{directory / name}: 1200 images", file=sys.stderr)
        else:
            sys.exit(f"{name} is none of {', '.join(ROWS)} and shapes")


if __name__ == "__main__":
    here = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data"
    main(here, sys.argv[2:] or (*ROWS, "shapes"))
