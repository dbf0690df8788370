"""Turns what pydantic found wrong into lines that a person can act on: place, problem, fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic_core import ErrorDetails, PydanticUndefined

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import RecipeEntry, Word, at, is_section, sections
from swarmcli.recipe.elsewhere import HINTS, RENAMED, VALUES
from swarmcli.recipe.limits import FORMER
from swarmcli.recipe.section import Conflict
from swarmcli.words import printable

Key = str | int
CONFLICT = "conflict"  # our name for what pydantic has no name for

_WRITE = re.compile(r"(?<!or )write `(\w+): \{([^`]*)\}`")
MOST_LISTED = 30  # keys of a section in one line
_EXPECTED = {
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "string_unicode": "text in whole characters",
    "path_": "a path",
    "finite_number": "a finite number",
    "tuple_type": "a list like [a, b]",
    "list_type": "a list like [a, b]",
    "model_": "a section: keys indented below it",
    "dict_type": "a section: keys indented below it",
    "mapping_type": "a section: keys indented below it",
    "is_instance_of": "a section: keys indented below it",
}


def recipe_error(error: pydantic.ValidationError, root: RecipeEntry, model: type[pydantic.BaseModel]) -> RecipeError:
    """Returns one RecipeError with a line for everything that is wrong."""
    # pydantic also reports a list without a valid item as too short; only the items are worth reading.
    wrong = [one for one in error.errors(include_url=False) if not (one["type"] == "too_short" and one["input"])]
    found = sorted(_each_of(wrong), key=lambda details: _line(_place(details, root)[1]))
    lines = dict.fromkeys(_describe(details, root, model) for details in found)
    return RecipeError("\n".join(_with_whole_sections(list(lines))))


def _with_whole_sections(lines: list[str]) -> list[str]:
    """If several lines say to write keys of one section, has the first say them all: a section that is written twice is
    a duplicate key."""
    first: dict[str, int] = {}
    wanted: dict[str, dict[str, str]] = {}
    for number, line in enumerate(lines):
        if (found := _WRITE.search(line)) is None:
            continue
        section, text = found.groups()
        key = text.partition(":")[0]
        if section in first and key not in wanted[section]:
            lines[number] = line.replace(found[0], f"write it in the `{section}:` above")
        wanted.setdefault(section, {}).setdefault(key, text)
        first.setdefault(section, number)
    for section, number in first.items():
        whole = f"write `{section}: {{{', '.join(wanted[section].values())}}}`"
        lines[number] = _WRITE.sub(whole.replace("\\", r"\\"), lines[number], count=1)
    return lines


def _each_of(errors: Sequence[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Yields the errors; a Conflict counts as one error at each of its keys."""
    for details in errors:
        cause = details.get("ctx", {}).get("error")
        for key, said in cause.found if isinstance(cause, Conflict) else ():
            keys = [int(each) if each.isdecimal() else each for each in key.split(".")]
            yield {**details, "loc": (*details["loc"], *keys), "type": CONFLICT, "msg": said}
        if not isinstance(cause, Conflict):
            yield details


def _line(entry: RecipeEntry) -> int:
    number = entry.origin.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _describe(details: ErrorDetails, root: RecipeEntry, model: type[pydantic.BaseModel]) -> str:
    path, here = _place(details, root)
    name = ".".join(map(str, path))
    kind = details["type"]
    if kind == "missing":
        info = _field(path, model)
        meaning = f" ({info.description})" if info is not None and info.description else ""
        return f"{here.origin}: {name} is missing; add `{path[-1]}: …`{meaning}"
    if kind == "extra_forbidden":
        return f"{here.origin}: unknown key {name}; {_suggest(path, model, here)}"
    if kind.startswith("union_tag"):
        known = [get_args(section.model_fields["source"].annotation)[0] for section in sections(at(model, path))]
        return f"{here.origin}: {name} needs a source that is known; write `source:` with one of {', '.join(known)}"
    if kind == CONFLICT:
        return f"{here.origin}: {details['msg']}"
    if isinstance(cause := details.get("ctx", {}).get("error"), ValueError):
        return f"{here.origin}: {name}: {cause}"
    word = details["input"] if isinstance(details["input"], str) else ""
    fix = _for_word(path, word, model) or _how_to_fix(path, model)
    return f"{here.origin}: {name} should be {_expected(details)}, not {_shown(details)}; {fix}"


def _for_word(path: Sequence[Key], word: str, model: type[pydantic.BaseModel]) -> str:
    """Returns the line to write for a word that other trainers have there, or that names what a section is about; "":
    none."""
    for section in sections(at(model, path)):
        names = [each for each in get_args(at(section, ["name"])) if isinstance(each, str)]
        near = max((each for each in names if each in word.lower()), key=len, default=None)
        if names:
            return f"write `{path[-1]}: {{name: {near or '…'}}}`" + ("" if near else f" with one of {', '.join(names)}")
    return VALUES.get((str(path[-1]), word), "")


def _place(details: ErrorDetails, root: RecipeEntry) -> tuple[list[Key], RecipeEntry]:
    """Returns the path as the file writes it (pydantic mixes in the names of union arms) and the nearest entry."""
    location = details["loc"]
    path: list[Key] = []
    here = root
    for index, key in enumerate(location):
        below = here.child(key)
        last = index == len(location) - 1
        if below is not None:
            here = below
            path.append(key)
        elif last and details["type"] in ("missing", CONFLICT):
            path.append(key)
    return path, here


def _expected(details: ErrorDetails) -> str:
    context: Mapping[str, Any] = details.get("ctx", {})
    for key, words in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        if key in context:
            return f"{words} {context[key]}"
    kind = details["type"]
    if kind == "literal_error":
        return f"one of {context['expected']}" if " or " in context["expected"] else context["expected"]
    if kind in ("too_short", "string_too_short"):
        return "given, and not empty"
    if kind == "too_long":
        return f"a list of {context.get('max_length')}"
    if kind == "string_too_long":
        return f"at most {context.get('max_length')} characters long"
    if kind == "string_pattern_mismatch":
        return "of another form"
    return next((words for start, words in _EXPECTED.items() if kind.startswith(start)), _as_end(details["msg"]))


def _as_end(sentence: str) -> str:
    """Returns the end of pydantic's own sentence, to follow our "should be"."""
    _, found, end = sentence.partition("should be ")
    return end if found else f"valid ({sentence})"


def _shown(details: ErrorDetails) -> str:
    value = details["input"]
    if isinstance(value, dict | list) and len(repr(value)) > 60:
        return "a section" if isinstance(value, dict) else "a list"
    return "empty" if value is None else repr(value)[:80]


def _field(path: Sequence[Key], model: type[pydantic.BaseModel]) -> pydantic.fields.FieldInfo | None:
    for section in sections(at(model, path[:-1])):
        if str(path[-1]) in section.model_fields:
            return section.model_fields[str(path[-1])]
    return None


def _how_to_fix(path: Sequence[Key], model: type[pydantic.BaseModel]) -> str:
    """Returns the field and, after a colon, what its description says: that may be a sentence or only a few words."""
    info = _field(path, model) if path else None
    while info is None and len(path) > 1:
        path = path[:-1]
        info = _field(path, model)
    if info is None:
        return "see `swarm schema`"
    # Where the default could not be written in a recipe, there is no usual value.
    least = max((bound.ge for bound in info.metadata if hasattr(bound, "ge")), default=None)
    unset = info.default in (PydanticUndefined, None, ...) or (least is not None and info.default < least)
    usual = "" if unset else f" (usually {as_written(info.default)})"
    return f"{path[-1]}: {info.description}{usual}" if info.description else "see `swarm schema`"


def _suggest(path: Sequence[Key], model: type[pydantic.BaseModel], entry: RecipeEntry) -> str:
    """Returns the line to write for another trainer's key, else the nearest key in the same section, else the same or a
    near one anywhere else."""
    key = str(path[-1])
    value = printable(entry.value.text, 80) if isinstance(entry.value, Word) and entry.value.text else "…"
    if path[:-1] == ["local", "limits"] and key in FORMER:
        return f"there is no such limit any more: {FORMER[key]}; remove it"
    if key in HINTS:
        return HINTS[key].format(value)
    here = sorted({name for section in sections(at(model, path[:-1])) for name in section.model_fields})
    everywhere = {name.rsplit(".", 1)[-1]: name for name in reversed(list(all_keys(model)))}
    wanted = RENAMED.get(key, key)
    if wanted not in here and wanted in everywhere:  # the same word elsewhere is a better guess than a similar one here
        here = []
    for names in (here, list(everywhere)):
        near = [wanted] if wanted in names else get_close_matches(wanted, names, n=1, cutoff=0.75)
        if near:
            full = near[0] if names is here else everywhere[near[0]]
            section, _, last = full.rpartition(".")
            said = is_section(at(model, [section])) and last == wanted and value != "…"
            return f"did you mean {full}?" + (f" write `{section}: {{{last}: {value}}}`" if said else "")
    listed = f"remove it, or take one of {', '.join(here)}" if here else "nothing can stand here"
    return listed if len(here) <= MOST_LISTED else "remove it; `swarm schema` lists the keys"


def all_keys(model: type[pydantic.BaseModel], prefix: str = "") -> dict[str, pydantic.fields.FieldInfo]:
    """Returns every dotted key of the schema with its field; items of lists have no number in between."""
    found: dict[str, pydantic.fields.FieldInfo] = {}
    for name, info in model.model_fields.items():
        inner = [*sections(info.annotation), *sections(at(info.annotation, [0]))]
        found |= {} if inner and sections(info.annotation) else {prefix + name: info}
        for section in inner:
            found |= {key: value for key, value in all_keys(section, f"{prefix}{name}.").items() if key not in found}
    return found


def as_written(value: Any) -> str:
    """Returns a default as one would write it in a recipe."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_written(each)}' for key, each in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value) if not isinstance(value, Path) else value.as_posix()
