"""Hashes what must agree between the peers of a run, key by key, so that a refusal can name what differs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import is_section
from swarmcli.recipe.pretrained import CONFIG, PREPROCESSING, Pretrained, saved_model, saved_tokenizer
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.section import is_shared

DIGEST_LENGTH = 32  # characters of base32: 160 bits, so that a link's recipe cannot be exchanged for another
PROTOCOL = 31  # peers of another number compute or speak differently and cannot train together


def fingerprint_of(recipe: Recipe) -> dict[str, str]:
    """Returns dotted key → short hash of its value, for `protocol` and for every key that must agree and does not have
    its default.

    So a later version may add a key whose default means what held before, and peers of both versions still train
    together.

    A saved model or tokenizer counts by its content (the config, the vocabulary), so that it may lie anywhere. Weights
    are not read: a peer that begins with other weights downloads the run's before its first gradient, and frozen
    weights have their digest in `frozen_weights`.

    Raises RecipeError when a saved model or tokenizer cannot be read, or cannot be had from the Hub.
    """
    values = {**dict(_leaves(_telling(recipe))), **contents_of(recipe)}
    hashes = {key: _hash(value) for key, value in values.items()}
    return {"protocol": _hash(PROTOCOL), **dict(sorted(hashes.items()))}


def digest_of(recipe: Recipe, contents: Mapping[str, Any] | None = None) -> str:
    """Returns one hash over the same values, for links: nobody finds another recipe with the same hash.

    It is over the values as they are nested, since dotted keys could be read in two ways. `contents`: in place of what
    `contents_of` finds. Raises RecipeError as `fingerprint_of` does.
    """
    values = {**_telling(recipe), **(contents_of(recipe) if contents is None else contents)}
    digest = hashlib.sha256(b"swarm recipe" + _canonical(values)).digest()
    return base64.b32encode(digest)[:DIGEST_LENGTH].decode().lower()


def differing_keys(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Returns the keys that only one side has or whose hashes differ, sorted."""
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def contents_of(recipe: Recipe) -> dict[str, Any]:
    """Returns the values that count in place of the names of saved models and tokenizers: the config of `base_model`,
    and the SHA-256 of each file of `tokenizer`. Raises RecipeError if they cannot be read."""
    found: dict[str, Any] = {"tokenizer": "bytes"}
    if (model := saved_model(recipe)) is not None:
        found["base_model"] = config_of(model)
    if (tokenizer := saved_tokenizer(recipe)) is not None:
        found["tokenizer"] = {name: sha256_of(path) for name, path in preprocessing_of(tokenizer).items()}
    return found


def agreed_leaves(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields that must agree, by their dotted keys."""
    return dict(_leaves(agreed_values(recipe)))


def agreed_values(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields that must agree, sections within sections."""
    values: dict[str, Any] = values_of(recipe, is_shared)
    return values


def _telling(recipe: Recipe) -> Any:
    """Returns the agreed values that are not the default. A key that says of which kind a section is always counts."""

    def tells(section: BaseModel, name: str) -> bool:
        info = type(section).model_fields[name]
        return getattr(section, name) != info.default or len(get_args(info.annotation)) == 1  # Literal["files"]

    return values_of(recipe, is_shared, tells)


def values_of(value: Any, fits: Callable[[FieldInfo], bool], only: Callable[..., bool] | None = None) -> Any:
    """Returns the fields of a section that fit, sections within sections, tuples as lists. `only`: a further condition,
    asked with a section and the name of a field; then sections of which nothing is left are left out."""
    if not isinstance(value, BaseModel):
        return [values_of(item, fits, only) for item in value] if isinstance(value, tuple) else value
    found: dict[str, Any] = {}
    for name, info in type(value).model_fields.items():
        below = values_of(getattr(value, name), fits, only)
        if is_section(info.annotation):
            found |= {name: below} if below or only is None else {}
        elif fits(info) and (only is None or only(value, name)):
            found[name] = below
    return found


def _leaves(value: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yields the values by their dotted keys; items of a list of sections have their numbers in them."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, *path, name)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, *path, str(index))
    else:
        yield ".".join(map(str, path)), value


def _hash(value: Any) -> str:
    # 64 bits are enough against accidents, and a recipe is no secret.
    return hashlib.sha256(_canonical(value)).hexdigest()[:16]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def config_of(model: Pretrained) -> Any:
    """Returns the config of a saved model, as its file has it. Raises RecipeError if it cannot be read."""
    path = model.directory() / CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no valid JSON"
        raise model.refuse(
            f"{model.text!r} is no directory with a saved model ({path}: {reason})",
            "download one there first, name one of the Hugging Face Hub as owner/name, or write a config with "
            "model_type",
        ) from error


def preprocessing_of(tokenizer: Pretrained) -> dict[str, Path]:
    """Returns the files by their names, sorted. The config counts too where it is the tokenizer's alone, which may need
    it to tell its kind. Raises RecipeError if there are none."""
    directory = tokenizer.directory()
    patterns = (CONFIG, *PREPROCESSING) if tokenizer.key == "tokenizer" else PREPROCESSING
    found = {path.name: path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    if not found.keys() - {CONFIG}:
        raise tokenizer.refuse(
            f"{tokenizer.text!r} is no directory with a saved tokenizer ({directory})",
            "save one there with save_pretrained, or write `tokenizer: bytes`",
            key="tokenizer",
        )
    return dict(sorted(found.items()))


def sha256_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
