"""The recipe file: what is trained, how, and what each volunteer may choose."""

from swarmcli.recipe.dataset import AnyDataset, FilesDataset, HuggingFaceDataset, StdlibDataset
from swarmcli.recipe.fingerprint import differing_keys, digest_of, fingerprint_of
from swarmcli.recipe.limits import Limits
from swarmcli.recipe.link import Link, is_link, parse_link
from swarmcli.recipe.load import load_recipe, parse_recipe
from swarmcli.recipe.offered import offered, read_offered
from swarmcli.recipe.schema import Recipe
from swarmcli.recipe.settings import (
    AggregatorSettings,
    GradientAveragingSettings,
    SchedulerSettings,
    SiteSettings,
    UploadSettings,
)

__all__ = [
    "AggregatorSettings",
    "AnyDataset",
    "FilesDataset",
    "GradientAveragingSettings",
    "HuggingFaceDataset",
    "Limits",
    "Link",
    "Recipe",
    "SchedulerSettings",
    "SiteSettings",
    "StdlibDataset",
    "UploadSettings",
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
