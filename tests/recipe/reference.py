"""The tables of docs/recipes.md, made from the schema. `python tests/recipe/reference.py` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from swarmcli.recipe import FilesDataset, HuggingFaceDataset, Limits, Recipe
from swarmcli.recipe.dataset import DatasetSettings
from swarmcli.recipe.document import arms, is_section, sections
from swarmcli.recipe.problems import as_written
from swarmcli.recipe.section import is_advised, is_shared, selectors_of
from swarmcli.recipe.task_names import BUILT_IN
from swarmcli.training.tasks import built_in

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
SECTIONS: dict[str, Sequence[str]] = {  # of a recipe, by the table that has their keys
    "optimizer": ("optimizer", "lr_scheduler"),
    "averaging": ("averaging", "gradient_averaging", "delay", "local_updates", "outer", "compression"),
    "checkpoint": ("checkpoint",),
    "evaluation": ("evaluation",),
    "local": ("network", "local"),
}
DATASETS: dict[str, type[BaseModel]] = {
    "every dataset": DatasetSettings,
    "source: files": FilesDataset,
    "source: huggingface": HuggingFaceDataset,
}
DIFFERS, ADVICE = "\\*", "\\*\\*"
MOST_VALUES = 2  # of a selector, that a row names; `swarm validate` names all
KeyRow = tuple[str, FieldInfo, type[BaseModel]]


def tables() -> dict[str, str]:
    """All tables of the page by their marks."""
    made = {"tasks": tasks_table(), "top": keys_table([row for row in _rows(Recipe) if "." not in row[0]])}
    for mark, names in SECTIONS.items():
        made[mark] = keys_table([row for row in _rows(Recipe) if row[0].partition(".")[0] in names])
    for mark, model in DATASETS.items():
        above = () if model is DatasetSettings else DatasetSettings.model_fields
        made[mark] = keys_table([row for row in _rows(model) if row[0] not in (*above, "source")])
    return made


def _rows(model: type[BaseModel], above: str = "") -> Iterator[KeyRow]:
    """Every key with its dotted name, those of a section before those of its sections. Limits have a page."""
    fields = [(f"{above}{name}", info) for name, info in model.model_fields.items()]
    yield from ((name, info, model) for name, info in fields if not is_section(info.annotation))
    for name, info in fields:
        for inner in sections(info.annotation) if is_section(info.annotation) else []:
            if inner is not Limits:
                yield from _rows(inner, f"{name}.")


def keys_table(rows: Sequence[KeyRow]) -> str:
    """One line for each key. Those that may differ between peers have a star, or the head has it if all may. Advice,
    which a link brings, has two."""
    differ = not any(is_shared(info) for _, info, _ in rows)
    lines = [f"key{DIFFERS if differ else ''}, default | meaning", "--- | ---"]
    listed = set[str]()
    for name, info, model in rows:
        mark = ADVICE if is_advised(info) else "" if differ or is_shared(info) else DIFFERS
        lines.append(f"`{name}: {_default(info)}`{mark} | {_meaning(name, info, model, listed)}")
        listed.update(_choices(info))
    return "\n".join(lines)


def _default(info: FieldInfo) -> str:
    return "…" if info.default in (PydanticUndefined, ...) else as_written(info.default)


def _meaning(name: str, info: FieldInfo, model: type[BaseModel], listed: set[str]) -> str:
    """The description, with the choices that neither it nor a row above names, and the values that the key is for."""
    belongs = (
        f" ({', '.join(values)})"
        for selector, values in selectors_of(info).items()
        if len(values) <= MOST_VALUES and not any(value in name for value in values)
        if set(values) != set(_choices(model.model_fields[selector])) or len(values) == 1
    )
    meaning, choices = info.description or "", _choices(info)
    if len(choices) > 1 and not (set(choices) <= listed or set(choices) <= set(re.findall(r"\w+", meaning))):
        meaning += f" ({', '.join(f'`{choice}`' for choice in choices)})"
    return meaning + "".join(belongs)


def _choices(info: FieldInfo) -> list[str]:
    literals = (arm for arm in arms(info.annotation) if get_origin(arm) is Literal)
    return [choice for arm in literals for choice in get_args(arm) if isinstance(choice, str)]


def tasks_table() -> str:
    lines = ["task | the model | columns of a row | measured", "--- | --- | --- | ---"]
    for name, task in BUILT_IN.items():
        kind = built_in(name)
        columns = ", ".join([*kind.columns, *(f"({each})" for each in kind.optional)]) or "a text"
        lines.append(f"`{name}` | {task.words} | {columns} | {', '.join(kind.measures)}")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with every table, from its mark to the next empty line, replaced by the schema's."""
    for name, table in tables().items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        page = "".join((before, mark, table, *rest.partition("\n\n")[1:])) if mark else page
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
