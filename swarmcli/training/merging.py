"""A checkpoint of an adapter and its base together: to write with, or merged into a whole model."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
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

BASE = "base-model"  # in the home of a peer: the directory with the base of its adapter, if that has files of its own
_AVERAGED = averaged_file(ADAPTER)
_NOT_FOR_USERS = {
    ADAPTER, _AVERAGED, ADAPTER_CONFIG, CONFIG, EVALUATION, MANIFEST, OWNER, STREAM, TRAINING, "README.md",
}  # fmt: skip


def merge(checkpoint: Path, directory: Path, base: Path | None = None, *, last_epoch: bool = False) -> None:
    """Writes a plain model of transformers, in the type that its base has in its files, with all that the checkpoint
    has beside the weights; `last_epoch`: see load_adapted. Raises CheckpointError, and OSError where it cannot be
    written."""
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"{checkpoint} holds a whole model, so there is nothing to merge; copy it as it is")
    if directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory} holds something already; name a new directory by --output")
    tensors = base_of(checkpoint, base)
    model = load_adapted(checkpoint, tensors, torch.float32, last_epoch=last_epoch).merge_and_unload()
    directory.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in _NOT_FOR_USERS:
            shutil.copyfile(file, directory / file.name)
    model.to(_type_of(tensors)).save_pretrained(directory)


def load_adapted(
    checkpoint: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, *, last_epoch: bool = False
) -> Any:
    """peft's model of a checkpoint over a base with these tensors, in `dtype` or theirs; the average over epochs, if
    there is one, unless `last_epoch`. Raises CheckpointError."""
    import transformers
    from peft import PeftModel, set_peft_model_state_dict

    check_files(checkpoint, read_manifest(checkpoint))
    try:
        config = transformers.AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        base = load_quietly(kind, None, config=config, state_dict=dict(tensors), dtype=dtype or _type_of(tensors))
        with warnings.catch_warnings(action="ignore"):  # of what peft calls in transformers
            model: Any = PeftModel.from_pretrained(base, str(checkpoint)).eval()
        if not last_epoch and (checkpoint / _AVERAGED).is_file():
            set_peft_model_state_dict(model, load_file(checkpoint / _AVERAGED))
        return model
    except Exception as error:  # architectures and peft raise whatever they meet
        raise CheckpointError(f"{checkpoint} cannot be put beside its base: {first_words(error)}") from error


def base_of(checkpoint: Path, named: Path | None = None) -> dict[str, Tensor]:
    """The tensors of the base beside which a checkpoint's adapter was trained, by their digest: of the directory
    `named`, or as the peer had them whose checkpoint it is. Raises CheckpointError if they are not there."""
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
    """Has `base_of` find the base for the checkpoints in a peer's home, if that can be written to."""
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
