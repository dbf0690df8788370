"""What a record must be to count, checked when it is written and again when it is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from swarmcli.dht.limits import DHTLimits
from swarmcli.dht.records import TOMBSTONE, Record, decode_subkey, decode_value
from swarmcli.dht.schema import SchemaValidator, SignatureValidator
from swarmcli.errors import ValidationError


class RecordValidator(Protocol):
    """A rule that users add with `add_validators`."""

    name: str  # under which refusals are counted

    def validate(self, record: Record) -> None:
        """Raises ValidationError, whose message says what was expected, if the record may not be stored."""


class RecordChecker:
    """Bounds, the owner's signature, then the users' validators; refusals are counted by rule."""

    def __init__(self, limits: DHTLimits, validators: Iterable[RecordValidator] = ()) -> None:
        self.refused: Counter[str] = Counter()
        self._watched: dict[str, Counter[str]] = {}
        self._limits = limits
        self._validators: list[RecordValidator] = [SignatureValidator()]
        self.add(validators)

    def add(self, validators: Iterable[RecordValidator]) -> None:
        """More rules. What is stored already is judged by them when it is read. Schemas count together, as one."""
        for validator in validators:
            schemas = [each for each in self._validators if isinstance(each, SchemaValidator)]
            if isinstance(validator, SchemaValidator) and schemas:
                place = self._validators.index(schemas[0])
                self._validators[place] = schemas[0].merged(validator)
            else:
                self._validators.append(validator)

    def watch(self, key: str) -> Mapping[str, int]:
        """Rule → how many records under this key were refused since the first call for it; grows by itself."""
        return self._watched.setdefault(key, Counter())

    def check(self, record: Record, now: float) -> None:
        """Raises ValidationError naming the rule; `now` is swarm time."""
        rule = "bounds"
        try:
            check_bounds(record, self._limits, now)
            for validator in self._validators:
                rule = validator.name
                validator.validate(record)
        except ValidationError as error:
            self.refused[rule] += 1
            if record.key in self._watched:
                self._watched[record.key][rule] += 1
            raise ValidationError(f"{rule}: {error}") from error


def check_bounds(record: Record, limits: DHTLimits, now: float) -> None:
    """Sizes, spelling and times. An expired record is no error here: stores refuse it, readers skip it."""
    if len(record.key) > limits.max_key or len(record.key.encode()) > limits.max_key:
        raise ValidationError(f"a key has at most {limits.max_key} bytes")
    if len(record.subkey) > limits.max_subkey:
        raise ValidationError(f"a subkey has at most {limits.max_subkey} bytes, got {len(record.subkey)}")
    if len(record.value) > limits.max_value:
        raise ValidationError(f"a value has at most {limits.max_value} bytes, got {len(record.value)}")
    decode_subkey(record.subkey)
    if record.value != TOMBSTONE:
        decode_value(record.value)
    if not math.isfinite(record.expiration):
        raise ValidationError(f"the expiration is no time: {record.expiration}")
    if record.expiration > now + limits.max_expiration + limits.expiration_slack:
        ahead = record.expiration - now
        raise ValidationError(f"a record lives at most {limits.max_expiration:.0f} s, this one {ahead:.0f} s")
