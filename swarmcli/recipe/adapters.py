"""LoRA in a recipe: which fields of peft's configuration its keys are, told without peft. Its parameters are plain
tensors, which begin alike at all peers by the recipe's seed, beside a base that is not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def adapter_fields(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe about its adapter, by the names of peft's configuration."""
    fields = {field: getattr(recipe, key) for key, field in KEYS.items()}
    return {field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()}
