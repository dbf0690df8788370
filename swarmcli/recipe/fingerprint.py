"""Hashes what must agree between the peers of a run, key by key, so that a refusal can name what differs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmcli.errors import RecipeError
from swarmcli.recipe.document import is_section
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.section import is_shared

DIGEST_LENGTH = 32  # characters of base32: 160 bits, so that a link's recipe cannot be exchanged for another
PROTOCOL = 1  # peers of another number compute or speak differently and cannot train together

_TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)


def fingerprint_of(recipe: Recipe) -> dict[str, str]:
    """Dotted key → short hash of its value, for every key that must agree, and `protocol`.

    A model or tokenizer directory counts by its content (the config, the vocabulary), so that it may lie anywhere;
    weights are not read: peers that begin with other weights download the run's before their first gradient, and those
    that are not trained by the digest that `frozen_weights` names.
    Raises RecipeError when such a directory cannot be read.
    """
    hashes = {key: _hash(value) for key, value in {**dict(_leaves(agreed_values(recipe))), **_contents(recipe)}.items()}
    return {"protocol": _hash(PROTOCOL), **dict(sorted(hashes.items()))}


def digest_of(recipe: Recipe) -> str:
    """One hash over all that must agree, for links: nobody finds another recipe with the same one.

    It is over the values as they are nested, since dotted keys could be read in two ways. Raises RecipeError as
    `fingerprint_of` does.
    """
    values = {**agreed_values(recipe), **_contents(recipe)}
    digest = hashlib.sha256(b"swarm recipe" + _canonical(values)).digest()
    return base64.b32encode(digest)[:DIGEST_LENGTH].decode().lower()


def differing_keys(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The keys that only one side has or whose hashes differ, sorted."""
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def _contents(recipe: Recipe) -> dict[str, Any]:
    """The values that count in place of the directories that a recipe names."""
    found: dict[str, Any] = {}
    if isinstance(recipe.base_model, str):
        found["base_model"] = _config_of(recipe, recipe.base_model)
    if recipe.tokenizer != "bytes":
        found["tokenizer"] = _files_of(recipe, recipe.tokenizer)
    return found


def agreed_values(recipe: Recipe) -> dict[str, Any]:
    """The fields that must agree, sections within sections."""
    values: dict[str, Any] = values_of(recipe, is_shared)
    return values


def values_of(value: Any, fits: Callable[[FieldInfo], bool], *, written: bool = False) -> Any:
    """The fields of a section that fit, sections within sections, tuples as lists. `written`: only those that somebody
    wrote: a default that was left out is left out again, since some of the schema's rules ask what was written."""
    if not isinstance(value, BaseModel):
        return [values_of(item, fits, written=written) for item in value] if isinstance(value, tuple) else value
    found: dict[str, Any] = {}
    for name, info in type(value).model_fields.items():
        below = values_of(getattr(value, name), fits, written=written)
        if is_section(info.annotation):
            found |= {name: below} if below or not written else {}
        elif fits(info) and (name in value.model_fields_set or not written):
            found[name] = below
    return found


def _leaves(value: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """The values by their dotted keys; items of a list of sections by their numbers."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, *path, name)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, *path, str(index))
    else:
        yield ".".join(map(str, path)), value


def _hash(value: Any) -> str:
    # So many digits are enough against accidents, and a recipe is no secret.
    return hashlib.sha256(_canonical(value)).hexdigest()[:16]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _config_of(recipe: Recipe, text: str) -> Any:
    path = recipe.locate(text) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no valid JSON"
        raise RecipeError(
            f"{recipe.origin('base_model')}: base_model {text!r} is no directory with a saved model "
            f"({path}: {reason}); download one there first, or write a config with model_type"
        ) from error


def _files_of(recipe: Recipe, text: str) -> dict[str, str]:
    directory = recipe.locate(text)
    try:
        files = {path for pattern in _TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()}
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}
    except OSError as error:
        raise RecipeError(f"{recipe.origin('tokenizer')}: {directory} cannot be read: {error.strerror}") from error
    if not digests:
        raise RecipeError(
            f"{recipe.origin('tokenizer')}: tokenizer {text!r} is no directory with a saved tokenizer ({directory}); "
            "save one there with save_pretrained, or write `tokenizer: bytes`"
        )
    return digests
