"""Schemas: what may be stored under keys of one kind, as pydantic models.

class RunKeys(pydantic.BaseModel):
    progress: dict[OwnedSubkey, Progress]     # "{prefix}_progress": one record per peer, signed by it
    recipe: str                               # "{prefix}_recipe": a plain value

SchemaValidator(RunKeys, prefix="my-run")
SchemaValidator.for_keys("my-run.0b", value=Declaration, subkey=OwnedSubkey)     # every key that begins so
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from swarmcli.dht.keys import NO_SUBKEY, decode_subkey
from swarmcli.dht.records import TOMBSTONE, Record, decode_value
from swarmcli.dht.signature import SignatureValidator
from swarmcli.errors import ValidationError

__all__ = ["SchemaValidator", "SignatureValidator"]


@dataclass(frozen=True, slots=True)
class _Rule:
    value: pydantic.TypeAdapter[Any]
    subkey: pydantic.TypeAdapter[Any] | None  # None: a plain value, no subkeys


class SchemaValidator:
    """Checks keys that it has a rule for and lets all others pass (or refuses them, `allow_extra_keys=False`).

    A field annotated `dict[K, V]` stands for a dictionary: each subkey is checked against K, each value against V.
    Values are checked strictly (a number in a string is no number) as msgpack carries them, a tuple as a list.
    """

    name = "schema"

    def __init__(
        self, schema: type[pydantic.BaseModel], *, prefix: str | None = None, allow_extra_keys: bool = True
    ) -> None:
        start = "" if prefix is None else f"{prefix}_"
        hints = typing.get_type_hints(schema, include_extras=True)
        self._exact = {start + (field.alias or name): _rule(hints[name]) for name, field in schema.model_fields.items()}
        self._prefix: tuple[str, _Rule] | None = None
        self._scope = start
        self._allow_extra_keys = allow_extra_keys

    @classmethod
    def for_keys(cls, start: str, *, value: Any, subkey: Any | None = None) -> SchemaValidator:
        """One rule for every key that begins with `start`; with `subkey=None` for plain values."""
        validator = cls.__new__(cls)
        validator._exact = {}
        rule = _Rule(_adapter(value), None if subkey is None else _adapter(subkey))
        validator._prefix = (start, rule)
        validator._scope = start
        validator._allow_extra_keys = True
        return validator

    def validate(self, record: Record) -> None:
        """Raises ValidationError with the first thing that does not fit."""
        rule = self._rule_for(record.key)
        if rule is None:
            return
        if (record.subkey == NO_SUBKEY) != (rule.subkey is None):
            expected = "a plain value" if rule.subkey is None else "a record with a subkey"
            raise ValidationError(f"{record.key!r} takes {expected}")
        if rule.subkey is not None:
            _check(rule.subkey, decode_subkey(record.subkey), f"the subkey of {record.key!r}")
        if record.value != TOMBSTONE:
            _check(rule.value, decode_value(record.value), f"the value of {record.key!r}")

    def _rule_for(self, key: str) -> _Rule | None:
        if key in self._exact:
            return self._exact[key]
        if self._prefix is not None and key.startswith(self._prefix[0]):
            return self._prefix[1]
        if not self._allow_extra_keys and key.startswith(self._scope):
            raise ValidationError(f"the schema has no key {key!r}; it has {', '.join(sorted(self._exact))}")
        return None


def _rule(annotation: Any) -> _Rule:
    origin = typing.get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        subkey, value = typing.get_args(annotation)
        return _Rule(_adapter(value), _adapter(subkey))
    return _Rule(_adapter(annotation), None)


def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _check(adapter: pydantic.TypeAdapter[Any], value: Any, what: str) -> None:
    try:
        adapter.validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ValidationError(f"{what} does not fit the schema: {where}{first['msg']}") from error
    except RecursionError as error:
        raise ValidationError(f"{what} is nested too deeply") from error
