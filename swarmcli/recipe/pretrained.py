"""The saved models and tokenizers that a recipe names: directories, or models of the Hugging Face Hub at one commit.

A model of the Hub is a directory as well: usually its snapshot in the cache of the library huggingface_hub, or, in a
run that was joined by a link, a directory with what a peer of the run handed out. Nothing is asked of the Hub before
somebody has agreed to join.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from swarmcli.errors import HubError, HubUnreachable, RecipeError, UnknownCommit
from swarmcli.recipe.patterns import MODEL_ON_HUB, NAME
from swarmcli.recipe.schema import Recipe
from swarmcli.words import first_words

MODELS = "models"  # a directory of saved models and tokenizers, below the directory of a run that was joined by a link
CONFIG = "config.json"
# Files that turn data into tokens or pixels. They count in the fingerprint, and travel to whoever has a link.
PREPROCESSING = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.spm",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "*preprocessor_config.json",
)
# No other format: other formats are pickles, which can run code.
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "generation_config.json")
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model or tokenizer that the recipe names by `key`."""

    recipe: Recipe
    key: str
    text: str  # a directory, or with a revision a name of the Hub
    revision: str | None = None

    @property
    def revision_key(self) -> str:
        return "revision" if self.key == "base_model" else "tokenizer_revision"

    def directory(self) -> Path:
        """Returns where its config and its tokenizer's files lie; those of the Hub are downloaded if need be. Raises
        RecipeError, also for a name of the Hub without a commit, which the error names if the Hub answers."""
        if self.revision is None:
            place = self.recipe.locate(self.text)
            if MODEL_ON_HUB.fullmatch(self.text) and not place.exists():
                raise self._needs_commit("main", f"{self.text!r} is no directory here")
            return place
        if not COMMIT.fullmatch(self.revision):
            raise self._needs_commit(self.revision, f"{self.revision!r:.80} is no commit, so it may change")
        return place if (place := self.brought).is_dir() else self._snapshot((CONFIG, *PREPROCESSING))

    @property
    def brought(self) -> Path:
        """The directory for the files that a peer handed out for a link; it may not exist."""
        if self.revision is None:
            return self.recipe.locate(self.text)
        return self.recipe.directory / MODELS / f"{self.text.replace('/', '--')}--{self.revision[:12]}"

    def weights(self, most: Callable[[], int]) -> Path | None:
        """Returns the directory with its safetensors; those of the Hub are downloaded if need be, at most `most()`
        bytes. None: they are neither here nor to be had, so they have to come from the run's peers. Raises RecipeError
        for a model without safetensors."""
        if self.revision is None:
            place = self.directory()
            return place if [*place.glob("*.safetensors"), *place.glob("*.bin")] else None
        if self.brought.is_dir() and self.recipe.frozen_weights is None:
            return None  # the run's state brings them, whatever the Hub has
        try:
            place = self._snapshot(_WEIGHTS, most)
        except HubUnreachable:
            return None
        if not any(place.glob("*.safetensors")):
            raise self.refuse(
                f"{self.text} has no safetensors at {self.revision}", "take a commit that has: pickles are not loaded"
            )
        return place

    def refuse(self, problem: str, fix: str, *, key: str = "") -> RecipeError:
        key = key or self.key
        return RecipeError(f"{self.recipe.origin(key)}: {key}: {problem}; {fix}")

    def _needs_commit(self, revision: str, problem: str) -> RecipeError:
        """Returns the error that names the commit to add."""
        page, key = f"https://huggingface.co/{self.text}/commits", self.revision_key
        try:
            commit = commit_of(self.text, revision)
        except HubUnreachable as error:
            fix = f"for a model of the Hugging Face Hub write `{key}: ` and a commit of {page}"
            return self.refuse(f"{problem}, and {error}", fix)
        except HubError as error:
            return self.refuse(f"{problem}, and {error}", "correct the name, or save a model there first")
        return self.refuse(problem, f"for the model of the Hugging Face Hub as it is now, write `{key}: {commit}`")

    def _snapshot(self, patterns: tuple[str, ...], most: Callable[[], int] | None = None) -> Path:
        """Returns the directory in the library's cache. A commit does not change, so what is there is not asked for
        again. `most()`: the most bytes, for a download that may take long, so a terminal shows how far it is."""
        wanted = {"revision": self.revision, "allow_patterns": list(patterns)}
        try:
            # Other programs may have fetched a part; only with the list of files does the library know whether it has
            # all.
            with suppress(HubUnreachable):
                _ask(self.text, "get_cached_repo_tree", revision=self.revision)
                return Path(_ask(self.text, "snapshot_download", **wanted, local_files_only=True))
            try:  # fails at once without the Hub, while a download is tried for half a minute
                found = _ask(self.text, "model_info", revision=self.revision, files_metadata=True).siblings
            except HubUnreachable:
                with suppress(HubUnreachable):
                    return Path(_ask(self.text, "snapshot_download", **wanted, local_files_only=True))
                raise
            size = sum(each.size or 0 for each in found if any(fnmatchcase(each.rfilename, p) for p in patterns))
            if most is not None and size > (bound := most()):
                problem = f"{self.text} has weights of {size >> 20} MiB, and its config is of a model of {bound >> 20}"
                raise self.refuse(problem, "take a commit at which they fit together")
            with _progress(most is not None and sys.stderr.isatty()):
                return Path(_ask(self.text, "snapshot_download", **wanted))
        except HubUnreachable as error:
            fix = "connect this computer to the Hub once, or join by a link: then the run's peers give what is needed"
            raise HubUnreachable(str(self.refuse(str(error), fix))) from error
        except HubError as error:
            key = self.revision_key if isinstance(error, UnknownCommit) else self.key
            raise self.refuse(str(error), "correct it, or log in with `hf auth login`", key=key) from error


def is_preprocessing(name: str) -> bool:
    """Whether a file of this name may lie in a tokenizer's directory, and the name hides nothing else."""
    known = any(fnmatchcase(name, pattern) for pattern in (CONFIG, *PREPROCESSING))
    return known and re.fullmatch(NAME, name) is not None


def saved_model(recipe: Recipe) -> Pretrained | None:
    """Returns the saved model that a recipe names; None: it has a config, and the first weights are random."""
    base = recipe.base_model
    return Pretrained(recipe, "base_model", base, recipe.revision) if isinstance(base, str) else None


def saved_tokenizer(recipe: Recipe) -> Pretrained | None:
    """Returns the saved tokenizer that a recipe names, or the base model's where it names none. None: bytes."""
    text = recipe.tokenizer
    if text is None or (text == recipe.base_model and recipe.tokenizer_revision in (None, recipe.revision)):
        return saved_model(recipe)
    return None if text == "bytes" else Pretrained(recipe, "tokenizer", text, recipe.tokenizer_revision)


def commit_of(name: str, revision: str = "main") -> str:
    """Returns the commit that a branch of a model of the Hub leads to now. Raises HubError."""
    return str(_ask(name, "model_info", revision=revision).sha)


def _ask(name: str, method: str, **options: Any) -> Any:
    """Calls a function of huggingface_hub. The user's environment says which Hub that is, and with which account."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise HubUnreachable(
            "models of the Hub need the library huggingface_hub; pip install 'swarmcli[hub]'"
        ) from error
    try:
        return getattr(huggingface_hub, method)(name, **options)
    except RevisionNotFoundError as error:
        raise UnknownCommit(f"{name} has no commit {options['revision']:.80} on the Hub") from error
    except GatedRepoError as error:
        raise HubError(f"{name} asks its users to accept terms, at https://huggingface.co/{name}") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"the Hub has no model {name}, or none that this account may see") from error
    except Exception as error:  # OSError, and errors of its HTTP client, which differs between versions
        raise HubUnreachable(f"{name} cannot be fetched from the Hub ({first_words(error)})") from error


@contextmanager
def _progress(shown: bool) -> Iterator[None]:
    """Has the library draw its bars only if `shown`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
