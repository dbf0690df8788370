"""LoRA in a recipe: which fields of peft's configuration its keys are, and what they may say, checked without peft.

Its parameters are plain tensors, which begin alike at all peers by the recipe's seed, beside a base that is not
changed. Texts that peft takes as regular expressions are refused: a volunteer who joins by a link matches a stranger's,
and some would take years.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmcli.recipe.section import Conflict

if TYPE_CHECKING:
    from swarmcli.recipe.schema import Recipe

KEYS = {  # of a recipe: the field of peft's LoraConfig that they are
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
}
_QUANTIZED = ("load_in_8bit", "load_in_4bit", "quantized_by")
_MOST_NAMES, _MOST_CHARACTERS = 256, 200


def adapter_fields(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe about its adapter, by the names of peft's configuration."""
    fields = {field: getattr(recipe, key) for key, field in KEYS.items()}
    return {field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()}


def check_adapter(recipe: Recipe) -> None:
    """Refuses what belongs to an adapter where there is none, and what an adapter cannot be beside."""
    if recipe.adapter is None:
        for key in (*KEYS, *_QUANTIZED):
            if key in recipe.model_fields_set and getattr(recipe, key) not in (None, False, ()):
                raise Conflict(
                    key, f"{key} is of an adapter, and the recipe names none; add `adapter: lora`, or remove it"
                )
        return
    for key in ("lora_target_modules", "lora_modules_to_save"):
        _check_names(key, getattr(recipe, key))
    if recipe.unfrozen_parameters:
        raise Conflict(
            "unfrozen_parameters",
            "with an adapter nothing of the base is trained; name modules in lora_modules_to_save, or remove it",
        )
    if recipe.local.site.processes > 1:
        raise Conflict(
            "local.site.processes", "a site of several processes trains no adapter; start one peer for each device"
        )
    _check_quantization(recipe)


def _check_names(key: str, names: Any) -> None:
    """Modules are named one by one: a text alone is a pattern to peft, but for all-linear."""
    if names in (None, "all-linear"):
        return
    if len(names) > _MOST_NAMES or any(not each or len(each) > _MOST_CHARACTERS for each in names):
        also = ", or all-linear" if key.endswith("target_modules") else ""
        raise Conflict(key, f"{key}: modules are named one by one; write a list, [q_proj, v_proj] for example{also}")


def _check_quantization(recipe: Recipe) -> None:
    if recipe.load_in_8bit and recipe.load_in_4bit:
        raise Conflict(
            "load_in_4bit", "a base is loaded in 8 bits or in 4; remove one of load_in_8bit and load_in_4bit"
        )
    quantized = recipe.load_in_8bit or recipe.load_in_4bit
    if recipe.quantized_by and not quantized:
        raise Conflict("quantized_by", "nothing is quantized; add load_in_8bit or load_in_4bit, or remove quantized_by")
    if quantized and isinstance(recipe.base_model, Mapping):
        raise Conflict(
            "load_in_8bit" if recipe.load_in_8bit else "load_in_4bit",
            "what is quantized are the weights of a saved model; name its directory as base_model, or load it whole",
        )
