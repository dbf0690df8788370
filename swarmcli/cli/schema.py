"""`swarm schema`: the keys of recipes in a form that editors read."""

from __future__ import annotations

import json
from typing import Any

import typer

from swarmcli.recipe import Recipe
from swarmcli.recipe.task_names import BUILT_IN


def schema() -> None:
    """Print the JSON schema of recipes, by which editors complete and check their keys.

    \b
    swarm schema > recipe.schema.json
    # and as the first line of a recipe beside it:
    # yaml-language-server: $schema=recipe.schema.json
    """
    typer.echo(json.dumps(recipe_schema(), indent=1))


def recipe_schema() -> dict[str, Any]:
    """Returns the schema of a recipe file. Of the rules about several keys it has those about keys that mean nothing
    beside a value of another key; `swarm validate` checks the others."""
    found = Recipe.model_json_schema(mode="validation")
    found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    found["title"] = "A recipe of swarm"
    found["properties"]["datasets"]["items"] = {"anyOf": found["properties"]["datasets"]["items"]["oneOf"]}
    # Amounts with units: `2 MB/s`, `50%`.
    with_units = found["$defs"]["Limits"]["properties"], found["$defs"]["LocalSettings"]["properties"]
    for properties, names in zip(with_units, (list(with_units[0]), ["journal_size"]), strict=True):
        properties |= {
            name: {
                "anyOf": [properties[name], {"type": "string"}],
                "description": properties[name].get("description", ""),
            }
            for name in names
        }
    for name in ("FilesDataset", "StdlibDataset", "HuggingFaceDataset"):
        dataset = found["$defs"][name]
        # `source` is inferred from `path`.
        dataset["required"] = [key for key in dataset.get("required", ()) if key != "source"]
    for section in (found, *found["$defs"].values()):
        _forbid_without_meaning(section)
    return found


def _forbid_without_meaning(section: dict[str, Any]) -> None:
    """If a selector has a value beside which a key means nothing, the key may only be switched off."""
    rules = []
    for key, field in section.get("properties", {}).items():
        for selector, values in field.pop("of", {}).items():
            # Another package's task knows itself what it reads.
            others = {"enum": sorted(BUILT_IN.keys() - {*values})} if selector == "task" else {"not": {"enum": values}}
            beside = {"required": [selector], "properties": {selector: others}}
            rules.append({"if": beside, "then": {"properties": {key: {"enum": [None, False, []]}}}})
    if rules:
        section["allOf"] = rules
