"""The tables of docs/recipes.md, made from the schema. `python tests/recipe/reference.py` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from swarmcli.recipe import (
    AggregatorSettings,
    FilesDataset,
    GradientAveragingSettings,
    HuggingFaceDataset,
    Recipe,
    SchedulerSettings,
    SiteSettings,
    StdlibDataset,
    UploadSettings,
)
from swarmcli.recipe.dataset import DatasetSettings
from swarmcli.recipe.document import arms, is_section
from swarmcli.recipe.problems import as_written
from swarmcli.recipe.section import is_shared, selectors_of
from swarmcli.recipe.settings import (
    AveragingSettings,
    CheckpointSettings,
    CompressionSettings,
    DelaySettings,
    EvaluationSettings,
    LocalSettings,
    LocalUpdateSettings,
    NetworkSettings,
    OptimizerSettings,
    OuterSettings,
)

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "top": Recipe,
    "datasets": DatasetSettings,
    "datasets: source: files": FilesDataset,
    "datasets: source: stdlib": StdlibDataset,
    "datasets: source: huggingface": HuggingFaceDataset,
    "optimizer": OptimizerSettings,
    "lr_scheduler": SchedulerSettings,
    "averaging": AveragingSettings,
    "averaging.aggregator": AggregatorSettings,
    "gradient_averaging": GradientAveragingSettings,
    "delay": DelaySettings,
    "local_updates": LocalUpdateSettings,
    "outer": OuterSettings,
    "compression": CompressionSettings,
    "checkpoint": CheckpointSettings,
    "checkpoint.upload": UploadSettings,
    "evaluation": EvaluationSettings,
    "network": NetworkSettings,
    "local": LocalSettings,
    "local.site": SiteSettings,
}
DIFFERS = " (may differ)"


def table(model: type[BaseModel]) -> str:
    """One row for each key of a section; its head says *may differ* if each key may."""
    above = DatasetSettings.model_fields if model.__base__ is DatasetSettings else {}
    # a section has a table of its own, and so have the keys that all datasets have
    keys = {n: i for n, i in model.model_fields.items() if not is_section(i.annotation) and n not in above}
    differ = not any(map(is_shared, keys.values()))
    lines = [f"| key{DIFFERS if differ else ''} | default | meaning |", "| --- | --- | --- |"]
    for name, info in keys.items():
        mark = "" if differ or is_shared(info) else DIFFERS
        lines.append(f"| `{name}`{mark} | {_default(info)} | {_meaning(info)} |")
    return "\n".join(lines)


def _default(info: FieldInfo) -> str:
    return "required" if info.default in (PydanticUndefined, ...) else f"`{as_written(info.default)}`"


def _meaning(info: FieldInfo) -> str:
    belongs = (f" ({selector}: {', '.join(values)})" for selector, values in selectors_of(info).items())
    meaning = (info.description or "") + "".join(belongs)
    choices = [choice for arm in arms(info.annotation) for choice in get_args(arm) if isinstance(choice, str)]
    if len(choices) < 2 or set(choices) <= set(re.findall(r"\w+", meaning)):
        return meaning
    return f"{meaning} ({', '.join(f'`{choice}`' for choice in choices)})"


def with_tables(page: str) -> str:
    """The page with every table, from its mark to the next empty line, replaced by the schema's."""
    for name, model in SECTIONS.items():
        before, mark, rest = page.partition(f"<!-- keys of {name} -->\n")
        page = "".join((before, mark, table(model), *rest.partition("\n\n")[1:]))
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
