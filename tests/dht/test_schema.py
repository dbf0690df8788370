"""Schemas over pydantic models."""

from __future__ import annotations

import pydantic
import pytest
from pydantic import v1

from swarmcli.dht.bounds import DHTLimits
from swarmcli.dht.records import TOMBSTONE, OwnedSubkey, Record, Subkey, encode_subkey, encode_value
from swarmcli.dht.schema import RecordChecker, SchemaValidator
from swarmcli.errors import ValidationError
from swarmcli.network.identity import Identity

OWNED = OwnedSubkey(Identity.from_seed(1).peer_id)


class Progress(pydantic.BaseModel):
    epoch: pydantic.NonNegativeInt
    samples_per_second: pydantic.NonNegativeFloat
    tags: list[str] = []


class Keys(pydantic.BaseModel):
    progress: dict[OwnedSubkey, Progress]
    recipe: str


def record(key: str, value: object, subkey: Subkey = None) -> Record:
    data = value if isinstance(value, bytes) else encode_value(value)
    return Record(key, encode_subkey(subkey), data, 100.0)


GOOD = {"epoch": 3, "samples_per_second": 12.5, "tags": ["a"]}


def test_what_fits_passes() -> None:
    validator = SchemaValidator(Keys, prefix="run")
    validator.validate(record("run_progress", GOOD, OWNED))
    validator.validate(record("run_progress", {"epoch": 0, "samples_per_second": 1}, OWNED))
    validator.validate(record("run_progress", TOMBSTONE, OWNED))
    validator.validate(record("run_recipe", "text"))
    validator.validate(record("progress", 1))


@pytest.mark.parametrize(
    ("key", "value", "subkey", "words"),
    [
        ("run_progress", {**GOOD, "epoch": -1}, OWNED, "epoch: .*greater than or equal"),
        ("run_progress", {**GOOD, "epoch": "3"}, OWNED, "epoch: .*integer"),
        ("run_progress", {**GOOD, "epoch": True}, OWNED, "epoch: .*integer"),
        ("run_progress", {**GOOD, "tags": "a"}, OWNED, "tags: .*list"),
        ("run_progress", {"epoch": 1}, OWNED, "samples_per_second: .*required"),
        ("run_progress", [1, 2], OWNED, "value of 'run_progress'"),
        ("run_progress", GOOD, "a name", "subkey of 'run_progress'"),
        ("run_progress", GOOD, bytes(OWNED.owner), "subkey of 'run_progress'"),
        ("run_progress", GOOD, None, "takes a record with a subkey"),
        ("run_recipe", "text", "a", "takes a plain value"),
        ("run_recipe", 5, None, "value of 'run_recipe'"),
    ],
)
def test_what_does_not_fit_is_named(key: str, value: object, subkey: Subkey, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SchemaValidator(Keys, prefix="run").validate(record(key, value, subkey))


def test_other_keys_of_the_prefix_can_be_refused() -> None:
    strict = SchemaValidator(Keys, prefix="run", allow_extra_keys=False)
    strict.validate(record("another_run", 1))
    with pytest.raises(ValidationError, match="no key 'recipe'; with its prefix it is 'run_recipe'"):
        strict.validate(record("recipe", "text"))
    merged(strict, SchemaValidator(Keys)).check(record("recipe", "text"), now=0.0)
    with pytest.raises(ValidationError, match="no key 'run_progres'; it has run_progress, run_recipe"):
        strict.validate(record("run_progres", GOOD, OWNED))


class OtherKeys(pydantic.BaseModel):
    recipe: int
    size: int = pydantic.Field(ge=1)


def merged(*validators: SchemaValidator) -> RecordChecker:
    return RecordChecker(DHTLimits(), validators)


@pytest.mark.parametrize("prefix", [None, "run"])
def test_validators_that_allow_no_other_keys_allow_those_of_each_other(prefix: str | None) -> None:
    start = "" if prefix is None else "run_"
    first = SchemaValidator(Keys, prefix=prefix, allow_extra_keys=False)
    checker = merged(first, SchemaValidator(OtherKeys, prefix=prefix, allow_extra_keys=False))
    for key, value in [("size", 1), ("recipe", "text"), ("recipe", 5)]:
        checker.check(record(start + key, value), now=0.0)
    for key, value, words in [
        ("size", 0, "greater than or equal"),
        ("recipe", 1.5, "value of"),
        ("other", 1, "no key '(run_)?other'; it has (run_)?progress, (run_)?recipe, (run_)?size"),
    ]:
        with pytest.raises(ValidationError, match=words):
            checker.check(record(start + key, value), now=0.0)
    with pytest.raises(ValidationError, match="no key"):
        first.validate(record(start + "size", 1))  # it is itself as before


class Refusal:
    """As validators for hivemind say it, which have no name either."""

    def validate(self, record: Record) -> bool:
        return record.key != "refused"


def test_a_validator_refuses_by_false_too() -> None:
    checker = RecordChecker(DHTLimits(), [Refusal()])
    checker.check(record("taken", 1), now=0.0)
    with pytest.raises(ValidationError, match=r"Refusal: .*'refused'"):
        checker.check(record("refused", 1), now=0.0)


class OldProgress(v1.BaseModel):
    epoch: v1.StrictInt
    rate: v1.confloat(strict=True, ge=0.0)  # type: ignore[valid-type]


class OldKeys(v1.BaseModel):
    progress: dict[OwnedSubkey, OldProgress]
    size: v1.conint(strict=True, ge=1)  # type: ignore[valid-type]
    name: str


@pytest.mark.parametrize(
    ("key", "value", "subkey", "words"),
    [
        ("progress", {"epoch": 1, "rate": 0.5}, OWNED, ""),
        ("progress", {"epoch": "1", "rate": 0.5}, OWNED, "epoch: value is not a valid integer"),
        ("progress", {"epoch": 1, "rate": -0.5}, OWNED, "rate: ensure this value"),
        ("progress", {"epoch": 1, "rate": 0.5}, "mine", "subkey of 'run_progress' .* expected an owned subkey"),
        ("size", 1, None, ""),
        ("size", 0, None, "greater than or equal to 1"),
        ("name", "text", None, ""),
        ("name", 5, None, "int where the model has another type"),
        ("other", 5, None, "no key 'run_other'"),
    ],
)
def test_models_of_the_former_pydantic(key: str, value: object, subkey: Subkey, words: str) -> None:
    validator = SchemaValidator(OldKeys, prefix="run", allow_extra_keys=False)
    if not words:
        validator.validate(record(f"run_{key}", value, subkey))
        return
    with pytest.raises(ValidationError, match=words):
        validator.validate(record(f"run_{key}", value, subkey))
