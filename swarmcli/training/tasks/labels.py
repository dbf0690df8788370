"""The part that tasks share which tell classes."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from swarmcli.training.chat import BadRow
from swarmcli.training.tasks.base import ModelTask


class LabelledTask(ModelTask):
    """A task whose model tells classes, which the recipe's labels name and number from 0."""

    measures = ("accuracy", "f1")

    @property
    def choices(self) -> int:
        return len(self.recipe.labels)

    def decided(self) -> dict[str, Any]:
        names = dict(enumerate(self.recipe.labels))
        numbers = {name: number for number, name in names.items()}
        return {"num_labels": self.choices, "id2label": names, "label2id": numbers}

    def number_of(self, label: Any) -> int:
        """The number of a class in the data, which may be a name or a number. Raises BadRow."""
        names = self.recipe.labels
        if isinstance(label, int) and 0 <= label < len(names):
            return int(label)
        if isinstance(label, str) and label in names:
            return names.index(label)
        near = get_close_matches(label, names, n=1) if isinstance(label, str) else []
        known = ", ".join(names[:20]) + (" …" if len(names) > 20 else f"; numbers are 0 to {len(names) - 1}")
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise BadRow(
            f"the label {label!r:.80} is none of labels: {known}{hint}; add it to labels, or name another column by "
            "`columns`"
        )
