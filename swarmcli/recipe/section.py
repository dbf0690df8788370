"""Sections and fields, of which recipes and the user's configuration are made.

`shared` fields must agree between all peers of a run and are part of its fingerprint. `own` fields may differ; so may
`advised` ones, but a volunteer who joins by a link begins with the run's values.

Keys are flat, by axolotl's names, so each key says itself where it means something: one with `of={"method":
("powersgd", "poweref")}` has a meaning only where the key `method` beside it, its selector, has one of these values. If
a recipe writes it beside another value, an error names the values that it belongs to (`rules.without_meaning`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

REQUIRED: Any = ...


Selectors: TypeAlias = Mapping[str, Sequence[str]]


def shared(default: Any, meaning: str, *, of: Selectors | None = None, **constraints: Any) -> Any:
    """A field that must agree between all peers."""
    extra: dict[str, Any] = {"agree": True} | (
        {"of": {selector: list(values) for selector, values in of.items()}} if of else {}
    )
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


def own(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field in which peers of one run may differ."""
    return Field(default, description=meaning, json_schema_extra={"agree": False}, **constraints)


def advised(default: Any, meaning: str, **constraints: Any) -> Any:
    """The same, where the run's author may know a good value: it travels with a link."""
    return Field(default, description=meaning, json_schema_extra={"agree": False, "advised": True}, **constraints)


def is_shared(info: FieldInfo) -> bool:
    """Whether a field must agree between all peers. Sections are neither shared nor own; their fields are."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra["agree"])


def selectors_of(info: FieldInfo) -> Selectors:
    """Returns for which values of which keys beside it a field has a meaning; {}: for all."""
    extra = info.json_schema_extra
    return dict(extra.get("of", {})) if isinstance(extra, dict) else {}  # type: ignore[arg-type]


def is_advised(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("advised"))


class Section(BaseModel):
    """Keys that are written below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Conflict(ValueError):
    """Keys that do not fit together: each with its path in the section that was checked, and what is said of it."""

    def __init__(self, *found: tuple[str, str]) -> None:
        super().__init__("; ".join(said for _, said in found))
        self.found = found
