"""The recipe file: what is trained, how, and what each volunteer may choose."""

from swarmcli.recipe.fingerprint import PROTOCOL, differing_keys, digest_of, fingerprint_of
from swarmcli.recipe.link import Link, is_link, parse_link
from swarmcli.recipe.load import load_recipe, parse_recipe
from swarmcli.recipe.offered import offered, read_offered
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.settings import (
    AggregatorSettings,
    AveragingSettings,
    CheckpointSettings,
    CompressionSettings,
    DelaySettings,
    FilesDataset,
    GradientAveragingSettings,
    HuggingFaceDataset,
    LocalSettings,
    LocalUpdateSettings,
    NetworkSettings,
    OptimizerSettings,
    SchedulerSettings,
    SiteSettings,
    StdlibDataset,
)

__all__ = [
    "PROTOCOL",
    "AggregatorSettings",
    "AveragingSettings",
    "CheckpointSettings",
    "CompressionSettings",
    "DelaySettings",
    "FilesDataset",
    "GradientAveragingSettings",
    "HuggingFaceDataset",
    "Link",
    "LocalSettings",
    "LocalUpdateSettings",
    "NetworkSettings",
    "OptimizerSettings",
    "Recipe",
    "SchedulerSettings",
    "SiteSettings",
    "StdlibDataset",
    "differing_keys",
    "digest_of",
    "fingerprint_of",
    "is_link",
    "load_recipe",
    "offered",
    "parse_link",
    "parse_recipe",
    "read_offered",
]
