"""What sections of a recipe are made of.

`shared` fields must agree between all peers of a run and are part of its fingerprint; `own` fields may differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

REQUIRED: Any = ...


def shared(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field that must agree between all peers."""
    return Field(default, description=meaning, json_schema_extra={"agree": True}, **constraints)


def own(default: Any, meaning: str, **constraints: Any) -> Any:
    """A field in which peers of one run may differ."""
    return Field(default, description=meaning, json_schema_extra={"agree": False}, **constraints)


class Section(BaseModel):
    """Keys that are written below one name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Conflict(ValueError):
    """Keys that do not fit together. `key` is the one to point at, relative to the section that was checked."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def beside(directory: Path, text: str) -> Path:
    """An absolute path: `~` is the home directory, and what is relative begins in `directory`."""
    return (directory / Path(text).expanduser()).resolve()
