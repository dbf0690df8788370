"""Reads a YAML file into values that remember where they were written.

PyYAML composes the nodes. What a plain word means is decided here, because YAML 1.1 reads `1e-4` as text, `no` as
false, `010` as eight and `12:30` as 750. Here the JSON-like rules of YAML 1.2 hold, and where the schema expects text
the word itself is taken. The schema's annotations say what is expected at a place.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from swarmcli.errors import RecipeError


def arms(annotation: Any) -> Iterator[Any]:
    """Yields the alternatives of a union, without what Annotated adds; of anything else, itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from arms(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from arms(arm)
    else:
        yield annotation


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The models among the alternatives."""
    return [arm for arm in arms(annotation) if isinstance(arm, type) and issubclass(arm, BaseModel)]


def children(annotation: Any, key: str | int) -> Any:
    """Returns the types expected below `annotation` under `key`: a union of all that it may be, Any where nothing is
    known."""
    found = []
    for arm in arms(annotation):
        arguments = get_args(arm)
        if isinstance(arm, type) and issubclass(arm, BaseModel):
            if key in arm.model_fields:
                found.append(arm.model_fields[str(key)].annotation)
        elif isinstance(key, int) and get_origin(arm) in (tuple, list) and arguments:
            found.append(arguments[0])
    return reduce(or_, found) if found else Any


def at(annotation: Any, path: Sequence[str | int]) -> Any:
    """The types expected at the end of a path."""
    for key in path:
        annotation = children(annotation, key)
    return annotation


def is_text(annotation: Any) -> bool:
    """Whether a word is to be taken as it is written: text and paths."""
    return any(arm in (str, Path) for arm in arms(annotation))


def is_section(annotation: Any) -> bool:
    """Whether only a mapping with known keys fits here."""
    return bool(sections(annotation)) and len(sections(annotation)) == len(list(arms(annotation)))


MAX_BYTES = 1 << 20
MAX_DEPTH = 32

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_NAMED_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)$")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = ("", "~", "null", "Null", "NULL")

Plain: TypeAlias = Any  # dict, list, str, int, float, bool or None


@dataclass(frozen=True, slots=True)
class Word:
    """A scalar as it was written."""

    text: str
    quoted: bool = False

    def resolve(self) -> str | int | float | bool | None:
        """Returns the value of the word where nothing is known about the place."""
        text = self.text
        if self.quoted or len(text) > 400:  # no number is that long, and Python refuses to read one
            return text
        if text in _NULLS:
            return None
        if text in _BOOLEANS:
            return _BOOLEANS[text]
        if _INTEGER.match(text):
            return int(text.replace("_", ""), 0)
        if _FLOAT.match(text):
            return float(text.replace("_", ""))
        if named := _NAMED_FLOAT.match(text):
            return float(named[1] + named[2].lower())
        return text


@dataclass(slots=True)
class RecipeEntry:
    """A value and where it was written, for example `recipe.yaml:12` or `--set seed=1`."""

    value: dict[str, RecipeEntry] | list[RecipeEntry] | Word
    origin: str

    def child(self, key: str | int) -> RecipeEntry | None:
        """Returns the entry that is written below this one, under a key or at a position."""
        if isinstance(self.value, dict):
            return self.value.get(str(key))
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None


def plain(entry: RecipeEntry, annotation: Any) -> Plain:
    """Returns the values without their places, read as `annotation` expects: text stays text, an empty section is
    {}."""
    value = entry.value
    if isinstance(value, dict):
        return {key: plain(item, children(annotation, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, children(annotation, index)) for index, item in enumerate(value)]
    resolved = value.resolve()
    if resolved is None:
        return {} if is_section(annotation) else None
    return value.text if is_text(annotation) else resolved


def read_text(file: Path, what: str = "recipe") -> str:
    """Returns the text of a file that a person wrote, if it is not too large. Raises RecipeError that begins with its
    name, and OSError."""
    if file.stat().st_size > MAX_BYTES:
        raise RecipeError(f"{file}:1: larger than {MAX_BYTES >> 20} MiB, so this is no {what}; name a YAML file")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}:1: no UTF-8 text; save the {what} as UTF-8") from error


def parse_document(text: str, name: str, what: str = "recipe") -> RecipeEntry:
    """Reads a whole file. Raises RecipeError with `name:line` for what is no YAML, or has duplicate keys or tags."""
    try:
        text = text.strip("\0")  # a power cut leaves zeros
        _refuse_tags(text, name)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(_syntax_problem(error, name)) from error
    except RecursionError:
        raise RecipeError(f"{name}:1: nested too deeply; a {what} needs no more than a few levels") from None
    if node is None:
        raise RecipeError(f"{name}:1: the {what} is empty; restore it; recipes/stdlib-lm.yaml is one to start from")
    root = _Builder(name).build(node)
    if not isinstance(root.value, dict):
        raise RecipeError(f"{root.origin}: a {what} is a list of `key: value` lines; this is something else")
    return root


def parse_value(text: str, origin: str) -> RecipeEntry:
    """Reads the value of one `--set key=value`: a [list], a {mapping}, "quoted text", or else a word as it stands."""
    text = text.strip()
    if not text.startswith(("[", "{", '"', "'")):
        return RecipeEntry(Word(text), origin)
    try:
        _refuse_tags(text, origin)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        problem = getattr(error, "problem", None) or "it is nested too deeply"
        raise RecipeError(f"{origin}: the value cannot be read ({problem}); check its brackets and quotes") from error
    assert node is not None  # a text that begins with a bracket or quote is never empty
    return _Builder(origin, lines=False).build(node)


def entries_of(value: Any, origin: str, most: int) -> RecipeEntry:
    """Returns the entries of a value of JSON, all with the place `origin`. Raises RecipeError for more than `most`
    values, or more levels than a recipe has."""
    left = iter(range(most))

    def build(value: Any, depth: int) -> RecipeEntry:
        if next(left, None) is None:
            raise RecipeError(f"{origin}: more than {most} values, so this is no recipe")
        if depth > MAX_DEPTH:
            raise RecipeError(f"{origin}: nested too deeply, so this is no recipe")
        if isinstance(value, dict):
            return RecipeEntry({key: build(item, depth + 1) for key, item in value.items()}, origin)
        if isinstance(value, list):
            return RecipeEntry([build(item, depth + 1) for item in value], origin)
        text = value if isinstance(value, str) else json.dumps(value)
        return RecipeEntry(Word(text, quoted=isinstance(value, str)), origin)

    return build(value, 1)


def _refuse_tags(text: str, name: str) -> None:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        tag = getattr(event, "tag", None)
        if tag is not None:
            line = event.start_mark.line + 1 if event.start_mark is not None else 1
            raise RecipeError(f"{name}:{line}: the tag {tag!r} is not supported; write the plain value without it")


def _syntax_problem(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "a character it cannot hold"
    if "'\\t'" in problem:
        return f"{name}:{line}: a tab stands where YAML wants spaces; indent with spaces"
    return f"{name}:{line}: this is no valid YAML ({problem}); check the indentation, colons and quotes of this line"


@dataclass
class _Builder:
    """Turns PyYAML's nodes into entries, bounded in number."""

    name: str
    lines: bool = True
    most: int = 20_000  # aliases count each time, so that a page of them cannot fill the memory
    nodes: int = 0
    open: set[int] = field(default_factory=set)  # nodes that are being built: one that contains itself would never end

    def origin(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def build(self, node: yaml.Node) -> RecipeEntry:
        self.nodes += 1
        if self.nodes > self.most:
            raise RecipeError(f"{self.origin(node)}: more than {self.most} values; a recipe is a page")
        if id(node) in self.open:
            raise RecipeError(f"{self.origin(node)}: this value contains itself; write it out without the alias")
        if len(self.open) >= MAX_DEPTH:
            raise RecipeError(f"{self.origin(node)}: nested too deeply; a recipe needs no more than a few levels")
        self.open.add(id(node))
        entry = RecipeEntry(self._value(node), self.origin(node))
        self.open.remove(id(node))
        return entry

    def _value(self, node: yaml.Node) -> dict[str, RecipeEntry] | list[RecipeEntry] | Word:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item) for item in node.value]
        # A plain word has no style; quotes and block scalars have one.
        return Word(node.value, quoted=getattr(node, "style", None) is not None)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, RecipeEntry]:
        entries: dict[str, RecipeEntry] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{self.origin(key_node)}: a key must be a word; quote it if it holds brackets")
            key = key_node.value
            if key in entries:
                first = entries[key].origin
                raise RecipeError(
                    f"{self.origin(key_node)}: the key {key!r} is given twice, first at {first}; remove one of them"
                )
            # The key's line, not the value's: a list or mapping begins on the line below.
            entries[key] = RecipeEntry(self.build(value_node).value, self.origin(key_node))
        return entries
