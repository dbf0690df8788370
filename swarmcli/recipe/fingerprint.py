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
    """Dotted key → short hash of its value, for `protocol` and every key that must agree and has not its default.

    So a key that a later version adds, with the default that means what was before it, cuts no run in two.

    A saved model or tokenizer counts by its content (the config, the vocabulary), so that it may lie anywhere; weights
    are not read: peers that begin with other weights download the run's before their first gradient, and those that are
    not trained by the digest that `frozen_weights` names.
    Raises RecipeError when it cannot be read, or be had from the Hub.
    """
    values = {**dict(_leaves(_telling(recipe))), **contents_of(recipe)}
    hashes = {key: _hash(value) for key, value in values.items()}
    return {"protocol": _hash(PROTOCOL), **dict(sorted(hashes.items()))}


def digest_of(recipe: Recipe, contents: Mapping[str, Any] | None = None) -> str:
    """One hash over the same values, for links: nobody finds another recipe with the same one.

    It is over the values as they are nested, since dotted keys could be read in two ways. `contents`: in place of what
    `contents_of` finds. Raises RecipeError as `fingerprint_of` does.
    """
    values = {**_telling(recipe), **(contents_of(recipe) if contents is None else contents)}
    digest = hashlib.sha256(b"swarm recipe" + _canonical(values)).digest()
    return base64.b32encode(digest)[:DIGEST_LENGTH].decode().lower()


def differing_keys(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The keys that only one side has or whose hashes differ, sorted."""
    return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def contents_of(recipe: Recipe) -> dict[str, Any]:
    """The values that count in place of the names of saved models and tokenizers: the config of `base_model`, and the
    SHA-256 of each file of `tokenizer`. Raises RecipeError if they cannot be read."""
    found: dict[str, Any] = {"tokenizer": "bytes"}
    if (model := saved_model(recipe)) is not None:
        found["base_model"] = config_of(model)
    if (tokenizer := saved_tokenizer(recipe)) is not None:
        found["tokenizer"] = {name: sha256_of(path) for name, path in preprocessing_of(tokenizer).items()}
    return found


def agreed_leaves(recipe: Recipe) -> dict[str, Any]:
    """The fields that must agree, by their dotted keys."""
    return dict(_leaves(agreed_values(recipe)))


def agreed_values(recipe: Recipe) -> dict[str, Any]:
    """The fields that must agree, sections within sections."""
    values: dict[str, Any] = values_of(recipe, is_shared)
    return values


def _telling(recipe: Recipe) -> Any:
    """Those of them that are not the default. What tells the kinds of a section apart always counts."""

    def tells(section: BaseModel, name: str) -> bool:
        info = type(section).model_fields[name]
        return getattr(section, name) != info.default or len(get_args(info.annotation)) == 1  # Literal["files"]

    return values_of(recipe, is_shared, tells)


def values_of(value: Any, fits: Callable[[FieldInfo], bool], only: Callable[..., bool] | None = None) -> Any:
    """The fields of a section that fit, sections within sections, tuples as lists. `only`: a further condition, asked
    with a section and the name of a field; sections of which nothing is left are left out."""
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


def config_of(model: Pretrained) -> Any:
    """The config of a saved model, as its file says it. Raises RecipeError if it cannot be read."""
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
    """The files by their names, sorted: also the config where it is the tokenizer's alone, which may need it to tell
    its kind. Raises RecipeError if there are none."""
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
