"""Loads a checkpoint's adapter together with its base, to generate text or to merge both into a whole model."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from swarmcli.checkpoints.layout import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    EVALUATION,
    MANIFEST,
    OWNER,
    TRAINING,
    averaged_file,
    check_files,
    read_manifest,
)
from swarmcli.errors import CheckpointError
from swarmcli.files.durable import write_file
from swarmcli.files.tensor_file import mapped
from swarmcli.optim.state.frozen import FILE, FrozenWeights
from swarmcli.recipe import Recipe
from swarmcli.training.adapters import base_files, load_quietly, stored_tensors
from swarmcli.training.stream import STREAM
from swarmcli.words import first_words

# a file in a peer's home that names the directory of its adapter's base, if the base has files of its own
BASE = "base-model"
_AVERAGED = averaged_file(ADAPTER)
_NOT_FOR_USERS = {
    ADAPTER, _AVERAGED, ADAPTER_CONFIG, CONFIG, EVALUATION, MANIFEST, OWNER, STREAM, TRAINING, "README.md",
}  # fmt: skip


def merge(checkpoint: Path, directory: Path, base: Path | None = None, *, last_epoch: bool = False) -> None:
    """Merges a checkpoint's adapter into its base, and writes a plain model of transformers to `directory`, in the type
    of the base's files, with the checkpoint's other files for users. `last_epoch`: see load_adapted. No file is left of
    a model that does not compute what base and adapter compute. Raises CheckpointError, and OSError where the model
    cannot be written."""
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{checkpoint} holds a whole model, so there is nothing to merge; copy it as it is")
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} holds something already; name a new directory by --output")
    tensors = base_of(checkpoint, base)
    model = load_adapted(checkpoint, tensors, last_epoch=last_epoch, to_merge=True)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=directory) as place:
        made = Path(place)
        for file in checkpoint.iterdir():
            if file.is_file() and file.name not in _NOT_FOR_USERS:
                shutil.copyfile(file, made / file.name)
        try:
            _write_merged(model, made, _type_of(tensors))
        except OSError:
            raise
        except Exception as error:  # architectures and peft raise whatever they meet
            raise CheckpointError(
                f"{checkpoint} cannot be merged into its base: {first_words(error)}; use it as an adapter, by peft"
            ) from error
        for file in made.iterdir():
            file.replace(directory / file.name)


@torch.no_grad()
def _write_merged(model: Any, directory: Path, stored: torch.dtype) -> None:
    """Merges the adapter into the model's weights, rounds them to `stored`, and writes the model. Raises ValueError
    unless it computes what it did before, but for the rounding."""
    inputs = _few_inputs(model.get_base_model(), directory)
    beside = model(**inputs).logits
    with warnings.catch_warnings(action="ignore"):  # about tied weights, which load_adapted has untied
        whole = model.merge_and_unload()
    _compare(beside, whole(**inputs).logits)
    if tied := whole.all_tied_weights_keys:
        alike = (torch.equal(whole.get_parameter(one), whole.get_parameter(other)) for one, other in tied.items())
        whole.config.tie_word_embeddings = all(alike)
        whole.tie_weights()
    for each in whole.parameters():
        each.copy_(each.to(stored))
    rounded = whole(**inputs).logits
    whole.to(stored).save_pretrained(directory)
    _compare(rounded, load_quietly(type(whole), str(directory), dtype=torch.float32)(**inputs).logits)


def _few_inputs(model: Any, directory: Path) -> dict[str, Any]:
    """Returns inputs to compare models on: an image as the processor in `directory` gives it, if it has one (so far
    only tasks of images do), or tokens from all over the vocabulary."""
    if (directory / "preprocessor_config.json").is_file():
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(directory), backend="pil", local_files_only=True)
        return dict(processor(torch.arange(3072).view(32, 32, 3).to(torch.uint8).numpy(), return_tensors="pt"))
    text = model.config.get_text_config(decoder=True)
    count = min(16, getattr(text, "max_position_embeddings", None) or 16)
    tokens = torch.linspace(0, text.vocab_size - 1, count).long()[None]
    if isinstance(text.eos_token_id, int):
        tokens[0, -1] = text.eos_token_id  # some classifiers read there
    taken = signature(model.forward).parameters
    return {name: tokens for name in ("input_ids", "decoder_input_ids") if name in taken}


def _compare(expected: Tensor, found: Tensor) -> None:
    """Raises ValueError unless both are logits of one model. In float32 another order of adding changes about a
    millionth."""
    off = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not off < 1e-3:  # NaN is refused too
        raise ValueError(f"the merged model computes something else (its logits differ by {off:.1g} of the largest)")


def load_adapted(
    checkpoint: Path, tensors: Mapping[str, Tensor], *, last_epoch: bool = False, to_merge: bool = False
) -> Any:
    """Returns peft's model of a checkpoint over a base with these tensors, in their type; it takes the adapter's
    average over epochs, if there is one, unless `last_epoch`. `to_merge`: in float32, and each place of a tied weight
    gets its own copy: peft would add what was learned in one of them to all. Raises CheckpointError."""
    import transformers
    from peft import PeftModel, set_peft_model_state_dict

    check_files(checkpoint, read_manifest(checkpoint))
    try:
        config = transformers.AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        dtype = torch.float32 if to_merge else _type_of(tensors)
        base = load_quietly(kind, None, config=config, state_dict=dict(tensors), dtype=dtype)
        for name in base.all_tied_weights_keys if to_merge else ():
            place, _, leaf = name.rpartition(".")
            own = nn.Parameter(base.get_parameter(name).detach().clone(), requires_grad=False)
            setattr(base.get_submodule(place), leaf, own)
        with warnings.catch_warnings(action="ignore"):  # of what peft calls in transformers
            model: Any = PeftModel.from_pretrained(base, str(checkpoint)).eval()
        if not last_epoch and (checkpoint / _AVERAGED).is_file():
            set_peft_model_state_dict(model, load_file(checkpoint / _AVERAGED))
        return model
    except Exception as error:  # architectures and peft raise whatever they meet
        raise CheckpointError(f"{checkpoint} cannot be put beside its base: {first_words(error)}") from error


def base_of(checkpoint: Path, named: Path | None = None) -> dict[str, Tensor]:
    """Finds, by digest, the base beside which a checkpoint's adapter was trained, and returns its tensors. It looks in
    the directory `named`, or where the peer that wrote the checkpoint had the base. Raises CheckpointError if it is not
    there."""
    swarm = read_manifest(checkpoint)["optimizer"].get("swarm") or {}
    for tensors in _candidates(checkpoint.parent.parent, named):
        if tensors and FrozenWeights(tensors).digest == swarm.get("frozen_weights"):
            return tensors
    where = f"{named} is not it" if named else "this computer knows no place that has it"
    raise CheckpointError(
        f"{checkpoint} is an adapter, and needs the base beside which it was trained; {where}: name the directory of "
        "the saved model by --base"
    )


def remember_base(recipe: Recipe, model: nn.Module, frozen: FrozenWeights, home: Path) -> None:
    """Records in a peer's home where its base is, if the home can be written to, so that `base_of` finds it for
    checkpoints there."""
    with suppress(OSError):
        if place := base_files(recipe, model):
            write_file(home / BASE, str(place.absolute()).encode())
        elif frozen.held and not (home / FILE).exists():
            frozen.keep()


def _candidates(home: Path, named: Path | None) -> Iterator[dict[str, Tensor]]:
    if named is not None:
        yield stored_tensors(named)
        return
    with suppress(OSError):
        yield stored_tensors(Path((home / BASE).read_text(encoding="utf-8")))
    if (home / FILE).is_file():
        yield mapped(home / FILE)


def _type_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    return next((each.dtype for each in tensors.values() if each.is_floating_point()), torch.float32)
