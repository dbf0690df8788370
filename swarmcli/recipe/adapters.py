"""Which adapters of peft a recipe can name, and which fields of their configurations: checked without peft.

A field is listed if its adapter stays what a run needs: parameters that are plain tensors, which begin alike at all
peers by the recipe's seed, beside a base that is not changed. Texts that peft takes as regular expressions are refused:
a volunteer who joins by a link matches a stranger's, and some would take years.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from swarmcli.recipe.section import Conflict

if TYPE_CHECKING:
    from swarmcli.recipe.schema import Recipe

_WHERE = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")
_SHAPE = ("r", "alpha", "rank_dropout", "module_dropout", "use_effective_conv2d")
FIELDS: Mapping[str, Sequence[str]] = {
    "lora": ("exclude_modules", "layers_to_transform"),
    "loha": (*_WHERE, *_SHAPE),
    "lokr": (*_WHERE, *_SHAPE, "decompose_both", "decompose_factor"),
    "ia3": ("target_modules", "exclude_modules", "feedforward_modules", "modules_to_save"),
}
KEYS = {  # of a recipe: the field of peft's LoraConfig that they are
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
}
_QUANTIZED = ("load_in_8bit", "load_in_4bit", "quantized_by")
_MOST_NAMES, _MOST_CHARACTERS = 256, 200


def adapter_fields(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe about its adapter, by the names of peft's configuration; {}: nothing is left to say."""
    own = {field: getattr(recipe, key) for key, field in KEYS.items()} if recipe.adapter == "lora" else {}
    fields = {**own, **recipe.peft}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def check_adapter(recipe: Recipe) -> None:
    """Refuses what belongs to an adapter where there is none, and what an adapter cannot be beside."""
    written = recipe.model_fields_set
    if recipe.adapter is None:
        for key in (*KEYS, "peft", *_QUANTIZED):
            if key in written and getattr(recipe, key) not in (None, False, {}, ()):
                raise Conflict(
                    key, f"{key} is of an adapter, and the recipe names none; add `adapter: lora`, or remove it"
                )
        return
    for key in KEYS if recipe.adapter != "lora" else ():
        if key in written:
            raise Conflict(
                key, f"{key} is of LoRA, and the adapter is {recipe.adapter}; write fields of it below `peft:`"
            )
    for key, value in recipe.peft.items():
        _check_field(recipe.adapter, key, value)
    for key, names in (("lora_target_modules", recipe.lora_target_modules), *_names_below(recipe.peft)):
        _check_names(key, names)
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


def _check_field(adapter: str, key: str, value: Any) -> None:
    own = {field: name for name, field in KEYS.items()} if adapter == "lora" else {}
    if key in own:
        raise Conflict(f"peft.{key}", f"peft.{key} is a key of its own: write {own[key]}")
    if key not in FIELDS[adapter]:
        near = get_close_matches(key, FIELDS[adapter], n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(FIELDS[adapter])}"
        raise Conflict(f"peft.{key}", f"peft.{key:.60}: no field of {adapter} that a run can have; {hint}")


def _names_below(peft: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return (
        (f"peft.{key}", value) for key, value in peft.items() if key.endswith("_modules") or key == "modules_to_save"
    )


def _check_names(key: str, names: Any) -> None:
    """Modules are named one by one: a text alone is a pattern to peft, but for all-linear."""
    if names is None or (names == "all-linear" and key.endswith("target_modules")):
        return
    plain = isinstance(names, list | tuple) and all(isinstance(each, str) and each for each in names)
    if not plain or len(names) > _MOST_NAMES or any(len(each) > _MOST_CHARACTERS for each in names):
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
