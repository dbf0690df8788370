"""Questions to the annotations of the schema: what is expected at a place of a recipe."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel


def arms(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union, without what Annotated adds; a single one for anything else."""
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
    """What is expected below `annotation` under `key`: a union of all that it may be, Any where nothing is known."""
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
    """What is expected at the end of a path."""
    for key in path:
        annotation = children(annotation, key)
    return annotation


def is_text(annotation: Any) -> bool:
    """Whether a word is to be taken as it is written: text and paths."""
    return any(arm in (str, Path) for arm in arms(annotation))


def is_section(annotation: Any) -> bool:
    """Whether only a mapping with known keys will do."""
    return bool(sections(annotation)) and len(sections(annotation)) == len(list(arms(annotation)))
