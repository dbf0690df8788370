"""Rules that a record must keep to count: its bounds, its owner's signature, and schemas of keys as pydantic models.

A record is checked when it is written and again when it is read. A schema of a run's keys:

class RunKeys(pydantic.BaseModel):
    progress: dict[OwnedSubkey, Progress]     # "{prefix}_progress": one record per peer, signed by it
    recipe: str                               # "{prefix}_recipe": a plain value

SchemaValidator(RunKeys, prefix="my-run")
"""

from __future__ import annotations

import copy
import hashlib
import math
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import pydantic

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import NO_SUBKEY, SIGNING_PURPOSE, TOMBSTONE, OwnedSubkey, Record, decode_subkey, decode_value
from swarmcli.errors import ValidationError
from swarmcli.network.identity import SIGNATURE_BYTES, verify
from swarmcli.reach.relay_messages import RELAYS_KEY
from swarmcli.recent import Recent

Check: TypeAlias = Callable[[Any], None]  # raises ValueError with the first thing that does not fit


@dataclass(frozen=True, slots=True)
class _Rule:
    """For one key."""

    key: str
    value: Check
    subkey: Check | None  # None: a plain value, no subkeys

    def validate(self, record: Record) -> None:
        if (record.subkey == NO_SUBKEY) != (self.subkey is None):
            expected = "a plain value" if self.subkey is None else "a record with a subkey"
            raise ValidationError(f"{record.key!r} takes {expected}")
        if self.subkey is not None:
            _check(self.subkey, decode_subkey(record.subkey), f"the subkey of {record.key!r}")
        if record.value != TOMBSTONE:
            _check(self.value, decode_value(record.value), f"the value of {record.key!r}")


class SchemaValidator:
    """Checks keys that it has a rule for and lets all others pass (or refuses them, `allow_extra_keys=False`).

    A field annotated `dict[K, V]` stands for a dictionary: each subkey is checked against K, each value against V.
    Values are checked strictly (a number in a string is no number) as msgpack carries them, a tuple as a list. Models
    may be of pydantic or of pydantic.v1; for these, too, a value must equal what the model makes of it.

    The validators of one DHT count together. A key that several have a rule for has to fit one of them. A key that
    none has a rule for passes if a validator for its prefix allows extra keys. Otherwise it is refused if a validator
    is for its prefix, or if one that allows no extra keys has a rule for it with the prefix added.
    """

    name = "schema"

    def __init__(
        self, schema: type[pydantic.BaseModel], *, prefix: str | None = None, allow_extra_keys: bool = True
    ) -> None:
        """`prefix`: the keys are `{prefix}_{field}`. Raises TypeError for a schema that is no pydantic model."""
        start = "" if prefix is None else f"{prefix}_"
        self.rules = tuple(_Rule(start + key, value, subkey) for key, value, subkey in _fields(schema))
        self.scopes: tuple[tuple[str, bool], ...] = ((start, allow_extra_keys),)

    def merged(self, other: SchemaValidator) -> SchemaValidator:
        """A validator that stands for both."""
        both = copy.copy(self)
        both.merge_with(other)
        return both

    def merge_with(self, other: object) -> bool:
        """This validator stands for both from now on. Returns False, and changes nothing, if `other` is of another
        kind."""
        if not isinstance(other, SchemaValidator):
            return False
        self.rules, self.scopes = self.rules + other.rules, self.scopes + other.scopes
        return True

    def validate(self, record: Record) -> None:
        """Raises ValidationError with the first thing that does not fit."""
        rules = [rule for rule in self.rules if rule.key == record.key]
        if not rules:
            self._check_extra(record.key)
        for number, rule in enumerate(rules, 1):
            try:
                rule.validate(record)
                return
            except ValidationError:
                if number == len(rules):
                    raise

    def _check_extra(self, key: str) -> None:
        allowed = [allow for start, allow in self.scopes if key.startswith(start)]
        named = {rule.key for rule in self.rules}
        if not any(allowed):
            for full in (start + key for start, allow in self.scopes if not allow and start + key in named):
                raise ValidationError(f"the schema has no key {key!r}; with its prefix it is {full!r}")
        if allowed and not any(allowed):
            known = ", ".join(sorted(named))
            raise ValidationError(f"the schema has no key {key!r}; it has {known}")


def _fields(schema: Any) -> Iterator[tuple[str, Check, Check | None]]:
    """Key, check of the value, and check of the subkey for each field of a model."""
    if isinstance(schema, type) and issubclass(schema, pydantic.BaseModel):
        kinds = _kinds(schema)
        checking = _checking
    else:
        kinds = _kinds_v1(schema)
        checking = _checking_v1
    for key, kind in kinds.items():
        origin = typing.get_origin(kind)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            subkey, value = typing.get_args(kind)
            yield key, checking(value), checking(subkey)
        else:
            yield key, checking(kind), None


def _kinds(schema: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Key → type of its value, with what `Field` says of it."""
    hints = typing.get_type_hints(schema, include_extras=True)
    kinds = {}
    for name, field in schema.model_fields.items():
        plain = typing.get_origin(hints[name]) is None and field.metadata
        kinds[field.alias or name] = Annotated[hints[name], *field.metadata] if plain else hints[name]
    return kinds


def _kinds_v1(schema: Any) -> dict[str, Any]:
    """The same for a model of pydantic.v1, which scripts for hivemind bring. Raises TypeError for what is no model."""
    from pydantic import v1  # not before somebody asks: newer versions of Python do not have it

    if not (isinstance(schema, type) and issubclass(schema, v1.BaseModel)):
        raise TypeError(f"a schema is a class derived from pydantic.BaseModel, got {schema!r}")
    return {field.alias: field.outer_type_ for field in schema.__fields__.values()}


def _checking(kind: Any) -> Check:
    adapter = pydantic.TypeAdapter(kind)

    def check(value: Any) -> None:
        try:
            adapter.validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError("".join(f"{part}: " for part in first["loc"]) + first["msg"]) from error

    return check


def _checking_v1(kind: Any) -> Check:
    from pydantic import v1

    model = v1.create_model("Value", value=(kind, ...))

    def check(value: Any) -> None:
        try:
            made = model(value=value).dict(by_alias=True)["value"]
        except v1.ValidationError as error:
            first = error.errors()[0]
            raise ValueError("".join(f"{part}: " for part in first["loc"][1:]) + first["msg"]) from error
        if made != value:
            raise ValueError(f"it is {type(value).__name__} where the model has another type")

    return check


def _check(check: Check, value: Any, what: str) -> None:
    try:
        check(value)
    except ValueError as error:
        raise ValidationError(f"{what} does not fit the schema: {error}") from error
    except RecursionError as error:
        raise ValidationError(f"{what} is nested too deeply") from error


_MAX_SEQUENCE = (1 << 63) - 1


class SignatureValidator:
    """Accepts a record under an owned subkey only with its owner's Ed25519 signature over all its fields.

    Every node has one built in. A verification costs 0.1 ms, so records once found good are remembered by hash.
    """

    name = "signature"

    def __init__(self) -> None:
        self._good: Recent[bytes, None] = Recent(1 << 15)

    def validate(self, record: Record) -> None:
        subkey = decode_subkey(record.subkey)
        if not isinstance(subkey, OwnedSubkey):
            _check_unowned(record)
            return
        if not 0 < record.sequence <= _MAX_SEQUENCE:
            raise ValidationError(f"an owned record is numbered from 1, got {record.sequence}")
        if len(record.signature) != SIGNATURE_BYTES:
            raise ValidationError("a record under an owned subkey carries its owner's signature")
        self._verify(subkey, record)

    def _verify(self, subkey: OwnedSubkey, record: Record) -> None:
        digest = hashlib.sha256(msgspec.msgpack.encode(record)).digest()
        if digest in self._good:
            self._good.move_to_end(digest)
            return
        if not verify(subkey.owner, SIGNING_PURPOSE, record.signature, *record.signed_fields()):
            raise ValidationError(f"the signature is not {subkey.owner.short}'s for this record")
        self._good[digest] = None


def _check_unowned(record: Record) -> None:
    """Refuses what only an owner may do: nobody could tell who numbered, signed or withdrew an unowned record."""
    if record.sequence or record.signature:
        raise ValidationError("only records under owned subkeys are numbered and signed")
    if record.value == TOMBSTONE:
        raise ValidationError("only owned subkeys can be withdrawn")


class RecordValidator(Protocol):
    """A rule that users add with `add_validators`. Refusals are counted under its `name`, or that of its class."""

    def validate(self, record: Record) -> bool | None:
        """Raises ValidationError, whose message says what was expected, or returns False, if the record may not be
        stored."""


class RecordChecker:
    """Bounds, the owner's signature, then the users' validators; refusals under watched keys are counted by rule."""

    def __init__(self, limits: DHTLimits, validators: Iterable[RecordValidator] = ()) -> None:
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
        """Rule → how many records under this key were refused since the first call for it. The mapping is live."""
        return self._watched.setdefault(key, Counter())

    def check(self, record: Record, now: float) -> None:
        """Raises ValidationError naming the rule; `now` is swarm time."""
        rule = "bounds"
        try:
            check_bounds(record, self._limits, now)
            for validator in self._validators:
                rule = getattr(validator, "name", type(validator).__name__)
                if validator.validate(record) is False:
                    raise ValidationError(f"it refuses the record of {record.key!r}")
        except ValidationError as error:
            if record.key in self._watched:
                self._watched[record.key][rule] += 1
            raise ValidationError(f"{rule}: {error}") from error


def check_bounds(record: Record, limits: DHTLimits, now: float) -> None:
    """Sizes, spelling and times. An expired record is no error here: stores refuse it, readers skip it."""
    if len(record.key) > limits.max_key or len(record.key.encode()) > limits.max_key:
        raise ValidationError(f"a key has at most {limits.max_key} bytes")
    if len(record.subkey) > limits.max_subkey:
        raise ValidationError(f"a subkey has at most {limits.max_subkey} bytes, got {len(record.subkey)}")
    most = min(limits.max_value, limits.max_relay) if record.key == RELAYS_KEY else limits.max_value
    if len(record.value) > most:
        raise ValidationError(f"a value has at most {most} bytes, got {len(record.value)}")
    decode_subkey(record.subkey)
    if record.value != TOMBSTONE:
        decode_value(record.value)
    if not math.isfinite(record.expiration):
        raise ValidationError(f"the expiration is no time: {record.expiration}")
    if record.expiration > now + limits.max_expiration + limits.expiration_slack:
        ahead = record.expiration - now
        raise ValidationError(f"a record lives at most {limits.max_expiration:.0f} s, this one {ahead:.0f} s")
