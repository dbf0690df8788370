"""Hashes what must agree between the peers of a run, key by key, so that a refusal can name what differs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

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
    hashes = {key: _hash(value) for key, value in {**dict(_values(recipe)), **_contents(recipe)}.items()}
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


def agreed_values(value: Any) -> Any:
    """The fields that must agree, sections within sections."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        return {
            name: agreed_values(getattr(value, name))
            for name, info in fields
            if is_shared(info) or is_section(info.annotation)
        }
    return [agreed_values(item) for item in value] if isinstance(value, tuple) else value


def _values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        if is_shared(info) or is_section(info.annotation):
            yield from _leaves(getattr(section, name), prefix + name)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        yield from _values(value, f"{key}.")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{key}.{index}")
    else:
        yield key, value


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
