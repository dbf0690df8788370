"""The recipe file: what is trained, how, and what each volunteer may choose."""

from swarmcli.recipe.fingerprint import PROTOCOL, differing_keys
from swarmcli.recipe.load import load_recipe, parse_recipe
from swarmcli.recipe.modes import (
    AveragingSettings,
    CompressionSettings,
    DelaySettings,
    GradientAveragingSettings,
    LocalUpdateSettings,
)
from swarmcli.recipe.schema import (
    CheckpointSettings,
    FilesDataset,
    HuggingFaceDataset,
    LocalSettings,
    NetworkSettings,
    OptimizerSettings,
    Recipe,
    SchedulerSettings,
    StdlibDataset,
)
from swarmcli.recipe.site import SiteSettings

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
    "load_recipe",
    "parse_recipe",
]
