"""Schemas over pydantic models."""

from __future__ import annotations

import pydantic
import pytest

from swarmcli.dht.keys import OwnedSubkey, Subkey, encode_subkey
from swarmcli.dht.records import TOMBSTONE, Record, encode_value
from swarmcli.dht.schema import SchemaValidator
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
    with pytest.raises(ValidationError, match="no key 'run_progres'; it has run_progress, run_recipe"):
        strict.validate(record("run_progres", GOOD, OWNED))


def test_without_a_prefix_fields_are_keys() -> None:
    with pytest.raises(ValidationError):
        SchemaValidator(Keys).validate(record("recipe", 5))


def test_one_rule_for_all_keys_that_begin_alike() -> None:
    validator = SchemaValidator.for_keys("run.0b", value=Progress, subkey=OwnedSubkey)
    validator.validate(record("run.0b", GOOD, OWNED))
    validator.validate(record("run.0b0110", GOOD, OWNED))
    validator.validate(record("run.", "anything"))
    with pytest.raises(ValidationError):
        validator.validate(record("run.0b0110", {**GOOD, "epoch": None}, OWNED))
    SchemaValidator.for_keys("plain", value=int).validate(record("plain-1", 5))
