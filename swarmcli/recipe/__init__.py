"""The recipe file: what is trained, how, and what each volunteer may choose."""

from swarmcli.recipe.fingerprint import PROTOCOL, differing_keys, fingerprint_of
from swarmcli.recipe.load import load_recipe, parse_recipe
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.settings import (
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
    "AveragingSettings",
    "CheckpointSettings",
    "CompressionSettings",
    "DelaySettings",
    "FilesDataset",
    "GradientAveragingSettings",
    "HuggingFaceDataset",
    "LocalSettings",
    "LocalUpdateSettings",
    "NetworkSettings",
    "OptimizerSettings",
    "Recipe",
    "SchedulerSettings",
    "SiteSettings",
    "StdlibDataset",
    "differing_keys",
    "fingerprint_of",
    "load_recipe",
    "parse_recipe",
]
