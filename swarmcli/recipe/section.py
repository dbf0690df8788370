"""Sections and fields, of which recipes and the user's configuration are made.

`shared` fields must agree between all peers of a run and are part of its fingerprint; `own` fields may differ, and
`advised` ones as well, but a volunteer who joins by a link begins with the run's."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

REQUIRED: Any = ...


def shared(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field that must agree between all peers."""
    return Field(default, description=meaning, json_schema_extra={"agree": True}, **constraints)


def own(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field in which peers of one run may differ."""
    return Field(default, description=meaning, json_schema_extra={"agree": False}, **constraints)


def advised(default: Any, meaning: str, **constraints: Any) -> Any:
    """The same, where the run's author may know what is good: it travels with a link."""
    return Field(default, description=meaning, json_schema_extra={"agree": False, "advised": True}, **constraints)


def is_shared(info: FieldInfo) -> bool:
    """Whether a field must agree between all peers. Sections are neither shared nor own; their fields are."""
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra["agree"])


def is_advised(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("advised"))


class Section(BaseModel):
    """Keys that are written below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Conflict(ValueError):
    """Keys that do not fit together. `key` is the one to point at, relative to the section that was checked."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
