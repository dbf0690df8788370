"""What must agree between the peers of a run, hashed key by key, so that a refusal can name what differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from swarmcli.errors import RecipeError
from swarmcli.recipe.schema import Recipe

PROTOCOL = 1  # peers of another number compute or speak differently and cannot train together
HASH_LENGTH = 16  # hex digits: enough against accidents, and a recipe is no secret

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
    weights are not read: peers that begin with other weights download the run's before their first gradient.
    Raises RecipeError when such a directory cannot be read.
    """
    hashes = {key: _hash(value) for key, value in _values(recipe)}
    if isinstance(recipe.base_model, str):
        hashes["base_model"] = _hash(_config_of(recipe, recipe.base_model))
    if recipe.tokenizer != "bytes":
        hashes["tokenizer"] = _hash(_files_of(recipe, recipe.tokenizer))
    return {"protocol": _hash(PROTOCOL), **dict(sorted(hashes.items()))}


def differing_keys(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The keys that only one side has or whose hashes differ, sorted."""
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def _values(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        extra = info.json_schema_extra
        if isinstance(extra, dict) and not extra["agree"]:
            continue
        yield from _leaves(value, prefix + name)


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
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_LENGTH]


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
        digests = {path.name: _digest(path) for path in sorted(files)}
    except OSError as error:
        raise RecipeError(f"{recipe.origin('tokenizer')}: {directory} cannot be read: {error.strerror}") from error
    if not digests:
        raise RecipeError(
            f"{recipe.origin('tokenizer')}: tokenizer {text!r} is no directory with a saved tokenizer ({directory}); "
            "save one there with save_pretrained, or write `tokenizer: bytes`"
        )
    return digests


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
