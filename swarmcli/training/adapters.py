"""Builds a recipe's adapter (peft) beside a frozen base, and loads the base.

An adapter's initial weights depend on the recipe's seed alone: they are drawn on the CPU, whatever device holds the
base. So an adapter can be built before its base is here. Until `load_base` puts the base in its places, for example
when the run's peers have sent it, stand-ins of the right shapes are there, which take no memory.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmcli.errors import CheckpointError, RecipeError
from swarmcli.files.tensor_file import mapped
from swarmcli.recipe import Recipe
from swarmcli.recipe.pretrained import saved_model
from swarmcli.training.device import choose_compute
from swarmcli.words import first_words

# Threads build one model at a time: meanwhile transformers changes torch's default dtype, and torch's seed is set, both
# for all threads.
BUILDING = threading.RLock()
# peft's task type for each Auto class of transformers; others have none
_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
# Keys of a recipe, each with the field of peft's LoraConfig that it sets.
KEYS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
}


def adapter_fields(recipe: Recipe) -> dict[str, Any]:
    """Returns the recipe's keys about its adapter, by their names in peft's LoraConfig."""
    fields = {field: getattr(recipe, key) for key, field in KEYS.items()}
    return {field: list(value) if isinstance(value, tuple) else value for field, value in fields.items()}


def base_dtype(recipe: Recipe) -> torch.dtype:
    """Returns the type in which this computer holds the weights of the model that it builds."""
    return torch.bfloat16 if recipe.adapter and recipe.local.base_dtype == "bfloat16" else torch.float32


def is_quantized(recipe: Recipe) -> bool:
    return recipe.load_in_8bit or recipe.load_in_4bit


def device_of_base(recipe: Recipe) -> torch.device:
    """Returns the device on which the base is built. A quantized base stays on the device that quantized it."""
    return choose_compute(recipe).device if is_quantized(recipe) else torch.device("cpu")


def base_files(recipe: Recipe, shapes: nn.Module) -> Path | None:
    """Returns the directory with the weights of a base that is a saved model; downloads them from the Hub if need be.
    None: the base is no saved model, or the run's peers have to send its weights. Raises RecipeError."""
    saved = saved_model(recipe)
    return None if saved is None else saved.weights(lambda: most_stored(shapes))


def most_stored(shapes: nn.Module) -> int:
    """Returns an upper bound of the bytes of files that hold a base of these shapes: float32, and some buffers."""
    return 5 * sum(each.numel() for each in shapes.parameters()) + (16 << 20)


def load_quietly(kind: Any, place: str | None, **options: Any) -> Any:
    """Returns what transformers' `kind.from_pretrained` loads, without its progress bar, which would be drawn into the
    live view on the terminal. Raises whatever the architecture raises."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return kind.from_pretrained(place, **options)


def is_adapted(model: nn.Module) -> bool:
    """Whether the model has an adapter of peft, which is then all that is trained."""
    return hasattr(model, "peft_config")


def lacks_base(model: nn.Module) -> bool:
    """Whether stand-ins are in the places of the base."""
    return getattr(model, "base_is_absent", False)


# the adapter


def adapted(recipe: Recipe, base: nn.Module, auto: str, *, outline: bool) -> nn.Module:
    """Returns `base`, made by transformers' Auto class `auto`, with the recipe's adapter; for an outline the adapter is
    on the meta device. The weights of a base that is a saved model are loaded now, if they are here. Raises RecipeError
    or CheckpointError."""
    of_files = isinstance(recipe.base_model, str) and not outline
    if of_files:
        stand_in(base)
    with torch.random.fork_rng(devices=[]), torch.device("meta") if outline else nullcontext():
        torch.manual_seed(recipe.seed)
        model: Any = add_adapter(recipe, base, _TASKS.get(auto))
    model.base_is_absent = of_files
    if of_files and (place := base_files(recipe, model)) and (tensors := stored_tensors(place)):
        load_base(recipe, model, tensors, device_of_base(recipe))
    made: nn.Module = model
    return made


def add_adapter(recipe: Recipe, base: nn.Module, task: str | None) -> nn.Module:
    """Returns peft's model around `base`, which keeps its type and is frozen; what is trained is float32. `task`:
    peft's task type, or None. Draws from torch's generator. Raises RecipeError."""
    # Imported here: peft imports most of transformers, and a run without an adapter need not wait for that.
    from peft import LoraConfig, get_peft_model
    from peft.utils import ModulesToSaveWrapper

    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in base.modules()):
        raise _refuse(
            recipe, "the base has batch norms, whose statistics would move apart at the peers", "take another"
        )
    _check_modules(recipe, base)
    try:
        config: Any = LoraConfig(task_type=task, **adapter_fields(recipe))
        with warnings.catch_warnings(action="ignore"):  # transformers warns about what peft then corrects by itself
            model: Any = get_peft_model(base, config)
        # Without a revision the base is a directory of this computer, whose path is nobody else's business.
        config.base_model_name_or_path = recipe.base_model if recipe.revision else None
        config.revision = recipe.revision
    except Exception as error:  # peft raises whatever its layers meet
        raise _refuse(
            recipe, f"peft cannot put it beside this model: {first_words(error)}", "correct its keys"
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float().contiguous()
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            is_head = name.count(".") == 2  # base_model.model.score: what follows it is the loss
            _in_float32(module.modules_to_save["default"], torch.float32 if is_head else base_dtype(recipe))
    model.config.use_cache = False
    found: nn.Module = model.train()
    return found


def _check_modules(recipe: Recipe, base: nn.Module) -> None:
    """Refuses a name of a module that the base lacks: peft says nothing about a name that it does not find."""
    ends = {name.rpartition(".")[2] for name, _ in base.named_modules() if name}
    whole = [name for name, _ in base.named_modules()]
    for key in ("lora_target_modules", "lora_modules_to_save"):
        names = getattr(recipe, key)
        for index, name in enumerate(names if isinstance(names, tuple) else ()):
            if name not in ends and not any(each == name or each.endswith(f".{name}") for each in whole):
                near = get_close_matches(name, sorted(ends), n=1)
                hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(ends)[:20])}"
                raise RecipeError(f"{recipe.origin(key, index)}: {key}: the base has no module {name!r}; {hint}")


def adapter_text(model: nn.Module) -> str:
    """The adapter_config.json of an adapted model, as peft would save it."""
    config: Any = model.peft_config["default"]  # type: ignore[index]  # peft's
    # peft saves adapters for inference; whoever loads one to train it says so.
    told = {**config.to_dict(), "inference_mode": True}
    return json.dumps(told, indent=2, sort_keys=True, default=lambda value: sorted(value, key=str)) + "\n"


def _in_float32(module: nn.Module, around: torch.dtype) -> None:
    """Has the module compute in float32 among modules that compute in the type `around`."""

    def cast(values: Any, dtype: torch.dtype) -> Any:
        floating = isinstance(values, Tensor) and values.is_floating_point()
        return values.to(dtype) if floating else values

    module.register_forward_pre_hook(lambda _, args: tuple(cast(each, torch.float32) for each in args))
    module.register_forward_hook(lambda _, args, output: cast(output, around))


def _refuse(recipe: Recipe, problem: str, fix: str) -> RecipeError:
    return RecipeError(f"{recipe.origin('adapter')}: adapter: {recipe.adapter}: {problem}; {fix}")


# the base


def stand_in(model: nn.Module) -> nn.Module:
    """Turns a model on the meta device into one on the CPU, whose tensors are zeros that take no memory."""
    made: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return nn.Parameter(zeros, False) if isinstance(tensor, nn.Parameter) else zeros

    for module in model.modules():
        places: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for own in places:
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = made.setdefault(id(tensor), of(tensor))
    return model


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """Returns the weights of a saved model as its files hold them, mapped into memory and not read; {} if there are
    none. Raises CheckpointError for files that are damaged."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    files = [single] if single.is_file() else []
    if not files and index.is_file():
        try:
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [directory / Path(name).name for name in sorted(set(named))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read: {error}; download it again") from error
    return {name: tensor for file in files for name, tensor in mapped(file).items()}


def made_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the frozen tensors of a base that was built from a config, by their names before the adapter was added."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            for added in ("base_model.model.", ".base_layer", ".original_module"):
                name = name.replace(added, "", 1) if added[0] == "." else name.removeprefix(added)
            yield name, parameter


def load_base(recipe: Recipe, model: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts a base with these weights into an adapted model; the adapter stays as it is. Quantizes the base, if the
    recipe says so, with the package that is installed here. Raises RecipeError."""
    bare = model.get_base_model()
    options: dict[str, Any]
    options = {"quantization_config": how, "device_map": {"": device}} if (how := quantization(recipe)) else {}
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        try:
            base, found = load_quietly(
                type(bare),
                None,
                config=bare.config,
                state_dict=dict(tensors),
                dtype=base_dtype(recipe),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # a head for other labels: reported in `found`, and checked below
                attn_implementation=bare.config._attn_implementation,
                **options,
            )
        except Exception as error:  # architectures raise whatever they meet
            raise _refuse(recipe, f"its base cannot be loaded: {first_words(error)}", "take another") from error
        base.loss_type = bare.loss_type  # the task and the recipe set these on the object, not in its config
        if recipe.gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fresh: Any = add_adapter(recipe, base, model.peft_config["default"].task_type)
    kept = [name for name, _ in fresh.named_parameters() if ".modules_to_save." in name]
    for name in sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        if not any(each.replace(".modules_to_save.default", "").endswith(name) for each in kept):
            raise _refuse(
                recipe,
                f"the base's files have no {name} of its shape, which would stay as it was drawn here",
                "name its module in lora_modules_to_save",
            )
    _adopt(model, fresh)
    place_model(recipe, model, device)


def place_model(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Moves a model to a device. If it has an adapter and its base is quantized, or not here yet, only the adapter
    moves."""
    if not (is_adapted(model) and (is_quantized(recipe) or lacks_base(model))):
        model.to(device)
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device)


def _adopt(model: nn.Module, fresh: nn.Module) -> None:
    """Turns `model` into `fresh`, but keeps the trained parameters of `model`, since an optimizer holds them. Those
    that are copies of the base's modules (modules_to_save) take the base's values if nothing else has come into them
    yet."""
    for name, parameter in list(model.named_parameters()):
        if parameter.requires_grad:
            if lacks_base(model) and ".modules_to_save." in name and not parameter.any():
                parameter.data.copy_(fresh.get_parameter(name))
            place, _, leaf = name.rpartition(".")
            setattr(fresh.get_submodule(place), leaf, parameter)
    model.__dict__ = fresh.__dict__


def quantization(recipe: Recipe) -> Any:
    """Returns a quantization config of transformers; None: the base is not quantized. Raises RecipeError unless the
    package that the recipe names is installed here, in the version that it names."""
    if not is_quantized(recipe):
        return None
    key, bits = ("load_in_8bit", 8) if recipe.load_in_8bit else ("load_in_4bit", 4)
    here = [f"{name}=={found}" for name in ("bitsandbytes", "torchao") if (found := _installed(name))]
    if recipe.quantized_by is None:
        fix = f"add for example `quantized_by: {here[0]}`" if here else "install bitsandbytes or torchao, and name it"
        raise RecipeError(f"{recipe.origin(key)}: {key}: all peers must quantize with the same package; {fix}")
    if recipe.quantized_by not in here:
        raise RecipeError(
            f"{recipe.origin('quantized_by')}: quantized_by: {recipe.quantized_by} is not installed here"
            f"{f' ({here[0]} is)' if here else ''}; `pip install {recipe.quantized_by}`"
        )
    import transformers

    if recipe.quantized_by.startswith("bitsandbytes"):
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16} if bits == 4 else {}
        return transformers.BitsAndBytesConfig(**{key: True}, **four)
    from torchao import quantization as torchao  # type: ignore[import-not-found]

    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig() if bits == 8 else torchao.Int4WeightOnlyConfig())


def _installed(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return ""
