"""What tasks that tell classes share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from swarmcli.recipe.fingerprint import config_of
from swarmcli.recipe.pretrained import saved_model
from swarmcli.training.chat import BadRow
from swarmcli.training.sources import ClassName
from swarmcli.training.tasks.base import RowTask
from swarmcli.words import some

_ONE_CLASS = "single_label_classification"  # transformers' name for a loss of one right class


class LabelledTask(RowTask):
    """A task whose model tells classes, which the recipe's labels name."""

    measures = ("accuracy", "f1")

    @property
    def choices(self) -> int:
        return len(self.recipe.labels)

    def decided(self) -> dict[str, Any]:
        numbers = {name: number for number, name in enumerate(self.names)}
        return {"id2label": dict(enumerate(self.names)), "label2id": numbers, "problem_type": _ONE_CLASS}

    @cached_property
    def names(self) -> Sequence[str]:
        """The labels by their numbers: in the recipe's order or, if the head of a saved model has the same labels, in
        the order of the head's rows. Raises RecipeError for a head that has as many other labels, or learns something
        else."""
        labels, base = self.recipe.labels, saved_model(self.recipe)
        config = config_of(base) if base is not None else {}
        told = config.get("id2label")
        saved = [str(told.get(str(number))) for number in range(len(told))] if isinstance(told, dict) else []
        alike = {label.casefold(): label for label in labels}
        key = "id2label" if config.get("problem_type") in (None, _ONE_CLASS) else "problem_type"
        if key == "id2label" and len(alike) == len(labels) and sorted(alike) == sorted(map(str.casefold, saved)):
            return [alike[name.casefold()] for name in saved]
        if key == "problem_type" or (len(saved) == len(labels) and saved != [f"LABEL_{n}" for n in range(len(saved))]):
            raise self._refuse(
                f"its {key} is {config[key]!r:.200}, and each row has one of labels, {some(labels, 20)}",
                f"take its names or another model, or remove {key} from its config.json",
            )
        return labels

    def number_of(self, label: Any) -> int:
        """Returns the number of the class that a value of the data means: see Tasks in docs/recipes.md. Raises
        BadRow."""
        labels, text = self.recipe.labels, "" if label is None else str(label)
        is_name = isinstance(label, ClassName)
        if found := text if text in labels else None if is_name else self._meant.get(_plain(text)):
            return self.names.index(found)
        hint = "".join(f" (did you mean {name}?)" for name in get_close_matches(text, labels, n=1))
        numbers = "" if is_name or len(self._meant) <= len(labels) else f"; numbers are 0 to {len(labels) - 1}"
        raise BadRow(
            f"the label {label!r:.80} is none of labels: {some(labels, 20)}{numbers}{hint}; add "
            f"{'the name that the data give it' if is_name else 'it'} to labels, or name another column by `columns`"
        )

    @cached_property
    def _meant(self) -> dict[str, str]:
        """Values of the data and the labels that they mean: numbers, true and false mean the label that says the same.
        If no label is a number, or says that true is not the second, they mean labels by their places."""
        # true and false in the data mean labels of these names
        labels, answers = self.recipe.labels, {"yes": "true", "no": "false"}
        said = {_plain(answers.get(label.lower(), label)): label for label in labels}
        if any(re.fullmatch(r"-?[0-9]*\.?[0-9]+", name) for name in said) or list(said) == ["true", "false"]:
            return said
        truths = {"false": labels[0], "true": labels[1]} if said.keys().isdisjoint(("true", "false")) else {}
        return {str(place): label for place, label in enumerate(labels)} | truths | said


def _plain(text: str) -> str:
    """Returns one text for a whole number, true or false, however it is written."""
    number = re.fullmatch(r"(-?)0*(0|[1-9][0-9]*)(\.0*)?", text)
    return number[1] + number[2] if number else text.lower() if text.lower() in ("true", "false") else text
