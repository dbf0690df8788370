"""Goes on from a checkpoint that a user names: with the checkpoint's weights, statistics and epoch, and the recipe's
settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarmcli.checkpoints.layout import checkpoints_below, find_checkpoint, newest_first, read_manifest
from swarmcli.errors import CheckpointError
from swarmcli.optim.state.lineage import lineage_of_resumed
from swarmcli.optim.state.meaning import fit_settings, settings_of
from swarmcli.optim.state.statistics import to_plain
from swarmcli.recipe import Recipe
from swarmcli.training.checkpoint import Checkpoint
from swarmcli.training.schedule import AVERAGE, optimizer_kind, outer_steps, rate_by_epoch

IN_RECIPE = {"initial_lr": "learning_rate"}  # the recipe's names for settings that the optimizer calls otherwise


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint from which a user wants to begin."""

    # of the checkpoint, or of a directory that holds some; "latest": the newest that any peer of this machine wrote
    path: str
    from_run: str | None = None  # the run that wrote it, as the user says; None: the recipe's own run


def resumed_place(recipe: Recipe, resume: Resume, home: Path) -> Path:
    """Finds the checkpoint that `resume` names; the newest one is looked for below the recipe's output_dir and in
    `home`, which `--home` may have placed elsewhere.

    Raises CheckpointError when there is none, and when another run wrote it than the user says.
    """
    wanted = resume.from_run or recipe.run_id
    if resume.path == "latest":
        places = recipe.output_dir / wanted, home
        found = newest_first(each for place in places for each in checkpoints_below(place, wanted))
        if not found:
            raise CheckpointError(f"--resume latest: neither {places[0]} nor {home} holds a checkpoint of {wanted}")
        place = found[0]
    elif not Path(resume.path).exists():
        raise CheckpointError(f"--resume {resume.path}: {resume.path} does not exist")
    else:
        place = find_checkpoint(Path(resume.path))
    if (of_run := read_manifest(place)["run_id"]) != wanted:
        raise CheckpointError(
            f"{place} is of the run {of_run!r}, not of {wanted!r}; if {recipe.run_id} should begin from it, as a run "
            f"of its own, name that: --resume {resume.path} --from-run {shlex.quote(of_run)}"
        )
    return place


def by_recipe(
    recipe: Recipe, checkpoint: Checkpoint, groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Returns the optimizer's state in a checkpoint with the recipe's settings, and in words which settings differ ("":
    none).

    `groups`: of the optimizer that the recipe has made. If the recipe is of another run, the state gets a lineage of
    that run, the same for all that begin from this checkpoint; what the former run's peers and owner have signed is
    left out. Raises CheckpointError if the checkpoint is of another optimizer, or of other frozen weights.
    """
    kind = optimizer_kind(recipe)[1]
    names = ["initial_lr", *(name for name in kind if name != "lr"), "weight_decay"]
    swarm, outer = checkpoint.optimizer["swarm"], _outer_groups(recipe, checkpoint)
    saved = _inner_groups(groups, swarm) if outer else checkpoint.optimizer["param_groups"]
    frozen, own = swarm.get("frozen_weights") or "none", recipe.frozen_weights or "none"
    if "frozen_weights" in swarm and frozen != own:
        raise CheckpointError(
            f"{checkpoint.path} is of a model with other weights that are not trained than {recipe.run_id} has "
            f"(frozen_weights: {frozen}; the recipe: {own}); name the checkpoint's in the recipe, or take another"
        )
    if len(saved) != len(groups) or any(name not in group for group in saved for name in names):
        raise CheckpointError(
            f"{checkpoint.path} is of another optimizer than {recipe.optimizer.name}, or of other parameters: its "
            "statistics cannot be taken over; resume with the optimizer.name of the recipe that wrote it"
        )
    schedule = swarm["scheduler"]
    factor = rate_by_epoch(recipe.lr_scheduler, recipe.max_epochs)(schedule["last_epoch"])
    pairs = list(zip(groups, saved, strict=True))
    settings = [{**group, "params": before["params"], "lr": group["initial_lr"] * factor} for group, before in pairs]
    schedule = {
        **schedule,
        "base_lrs": [group["initial_lr"] for group in settings],
        "_last_lr": [group["lr"] for group in settings],
    }
    swarm = {**swarm, "scheduler": schedule}
    if outer:
        swarm["inner"] = [settings_of(group) for group in settings]
    if checkpoint.run_id != recipe.run_id:
        swarm["lineage"] = lineage_of_resumed(recipe.run_id, bytes.fromhex(swarm["lineage"])).hex()
        for name in ("standing", "owner"):
            swarm.pop(name, None)
    statistics = checkpoint.optimizer["state"]
    if not recipe.ema_decay:  # no step would move the average any more
        statistics = {
            place: {name: value for name, value in each.items() if name != AVERAGE}
            for place, each in statistics.items()
        }
    state = {**checkpoint.optimizer, "state": statistics, "param_groups": outer or settings, "swarm": swarm}
    return state, _differences(names, settings, saved, checkpoint.epoch)


def _inner_groups(groups: Sequence[Mapping[str, Any]], swarm: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns a checkpoint's groups of the optimizer of inner steps; [] if it was another optimizer. Its statistics are
    in no checkpoint: each peer had its own."""
    try:
        return fit_settings(groups, to_plain(swarm["inner"]))
    except ValueError:
        return []


def _outer_groups(recipe: Recipe, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Returns a checkpoint's groups of the outer optimizer, with the recipe's settings; [] if there is none. Raises
    CheckpointError if only one of the two runs takes outer steps, or if they take other ones."""
    outer, saved = outer_steps(recipe), checkpoint.optimizer["param_groups"]
    group = outer.make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0] if outer is not None else {}
    alike = settings_of(saved[0]).keys() == settings_of(group).keys() if group else True
    if ("inner" in checkpoint.optimizer["swarm"]) != bool(group) or not alike:
        raise CheckpointError(
            f"{checkpoint.path} is of a run with other outer steps than those of {recipe.run_id} (outer.optimizer: "
            f"{recipe.outer.optimizer or 'none'}): the statistics of the one say nothing to the other; resume with the "
            "outer section of the recipe that wrote it"
        )
    return [{**group, "params": before["params"]} for before in saved] if group else []


def _differences(
    names: Sequence[str], settings: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], epoch: int
) -> str:
    found: dict[str, str] = {}
    for now, before in zip(settings, saved, strict=True):
        for name in names:
            if _plain(now[name]) != _plain(before[name]):
                word = IN_RECIPE.get(name, name)
                found.setdefault(word, f"{word} {_plain(now[name])} ({_plain(before[name])} in the checkpoint)")
    rate, before_rate = settings[0]["lr"], saved[0]["lr"]
    if rate != before_rate:
        found["rate"] = f"the rate at epoch {epoch} is {rate:.3g} ({before_rate:.3g} in the checkpoint)"
    return ", ".join(found.values())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # JSON knows no tuples
