"""The tables of docs/recipes.md, made from the schema. `python tests/recipe/reference.py` writes them anew."""

from __future__ import annotations

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
    Limits,
    Recipe,
    SchedulerSettings,
    SiteSettings,
    StdlibDataset,
    UploadSettings,
)
from swarmcli.recipe.document import arms, is_section
from swarmcli.recipe.problems import as_written
from swarmcli.recipe.settings import (
    AveragingSettings,
    CheckpointSettings,
    CompressionSettings,
    DelaySettings,
    EvaluationSettings,
    GroupSettings,
    LocalSettings,
    LocalUpdateSettings,
    NetworkSettings,
    OptimizerSettings,
    OuterSettings,
    PieceSettings,
)

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "top": Recipe,
    "datasets: source: files": FilesDataset,
    "datasets: source: stdlib": StdlibDataset,
    "datasets: source: huggingface": HuggingFaceDataset,
    "optimizer": OptimizerSettings,
    "optimizer.groups": GroupSettings,
    "lr_scheduler": SchedulerSettings,
    "lr_scheduler.pieces": PieceSettings,
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
    "local.limits": Limits,
}


def table(model: type[BaseModel]) -> str:
    """One row for each key of a section."""
    lines = ["| key | default | must agree | meaning |", "| --- | --- | --- | --- |"]
    for name, info in model.model_fields.items():
        if is_section(info.annotation):
            continue  # a section has a table of its own
        agree = isinstance(info.json_schema_extra, dict) and info.json_schema_extra["agree"]
        lines.append(f"| `{name}` | {_default(info)} | {'yes' if agree else 'no'} | {_meaning(info)} |")
    return "\n".join(lines)


def _default(info: FieldInfo) -> str:
    return "required" if info.default in (PydanticUndefined, ...) else f"`{as_written(info.default)}`"


def _meaning(info: FieldInfo) -> str:
    choices = [choice for arm in arms(info.annotation) for choice in get_args(arm) if isinstance(choice, str)]
    listed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if len(choices) > 1 else ""
    return f"{info.description}{listed}"


def with_tables(page: str) -> str:
    """The page with every table between its marks replaced by the schema's."""
    for name, model in SECTIONS.items():
        begin, end = f"<!-- keys of {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table(model)}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
