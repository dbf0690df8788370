"""HierarchicalModelAverager: parameters are averaged within small groups often and within large ones seldom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from swarmcli.averaging.checks import as_count
from swarmcli.sharding.levels.plan import LevelAverage, chosen, read_plan
from swarmcli.sharding.levels.process_groups import ProcessGroupLevels
from swarmcli.sharding.levels.swarm_groups import SwarmGroups
from swarmcli.sharding.levels.swarm_levels import run_swarm_levels

if TYPE_CHECKING:
    import torch.distributed as dist


class HierarchicalModelAverager(ModelAverager):
    """Hierarchical SGD (arXiv 2007.13819): every member steps its own model, and now and then they are averaged.

        averager = HierarchicalModelAverager({4: 8, 16: 64})
        for batch in data:
            ...
            optimizer.step()
            averager.average_parameters(model.parameters())

    averages groups of 8 at every fourth step, and all 64 at every sixteenth. With the same arguments it gives the same
    parameters as torch's class of this name; unlike that one it changes them in place.

    `step` counts the calls of `average_parameters`, from 0; it may be set, to the epoch of a swarm for example.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int | None] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        swarm: SwarmGroups | None = None,
    ) -> None:
        """`period_group_size_dict`: for each level its period in steps, and the size of its groups.
        At most one level averages at a step: the last whose period divides it. The last group is the whole one.

        Nothing is averaged at the first `warmup_steps` steps. `process_group`: of torch.distributed; None: all
        processes. Every member of it makes the averager, at the same place in its program.

        `swarm`: average with the peers of a swarm instead (see SwarmGroups). Sizes are upper bounds then, None is no
        bound, and groups are filled with the peers that are there.

        Raises ValueError and TypeError, which name the argument and what to give instead, and RuntimeError if there
        is neither a process group nor a running DHT.
        """
        levels = {} if period_group_size_dict is None else period_group_size_dict
        self._plan = read_plan(levels, warmup_steps, swarm=swarm is not None)
        self._step = 0
        if swarm is not None and process_group is not None:
            raise ValueError("process_group and swarm are given; an averager is over one of them: make one for each")
        self._groups = ProcessGroupLevels(self._plan, process_group) if swarm is None else None
        self._swarm = run_swarm_levels(swarm, self._plan) if swarm is not None else None

    @property
    def step(self) -> int:
        """The number of the next call of `average_parameters`."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = as_count(step, "step")

    @property
    def warmup_steps(self) -> int:
        return self._plan.warmup_steps

    @property
    def process_group(self) -> dist.ProcessGroup:  # type: ignore[override]
        """All processes that average. Raises RuntimeError in a swarm, which has none."""
        if self._groups is None:
            raise RuntimeError("process_group is for process groups; a swarm has none")
        return self._groups.process_group

    @property
    def period_process_group_dict(self) -> dict[int, dist.ProcessGroup]:
        """Period → this process's group that averages then. Raises RuntimeError in a swarm, where groups form at each
        average."""
        if self._groups is None:
            raise RuntimeError("period_process_group_dict is for process groups; the groups of a swarm form anew")
        return dict(zip(self._plan.periods, self._groups.groups, strict=True))

    def average_parameters(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
    ) -> LevelAverage | None:
        """Counts one step, and averages if a level is due; returns None if none is.

        `params`: a model's parameters, or the parameter groups of an optimizer. Only parameters with a gradient are
        averaged, in place, all or none; they must be the same ones at all members, by their places in `params`. On a
        process group every rank of the level's group calls this at the same step. In a swarm the call waits for the
        others up to `matchmaking_time`; if there is no average, the result says why, and the parameters are as they
        were. A peer that has counted fewer steps than most others goes on from their step.

        Raises TypeError for anything but parameters, ValueError if the processes of a group average different
        parameters, FingerprintError if the peers of a group do, and torch's RuntimeError if a process is lost. The step
        is not counted then.
        """
        tensors, places = chosen(params, lambda param: param.grad is not None)
        average: LevelAverage | None
        if self._swarm is not None:
            self._step, average = self._swarm.run(lambda levels: levels.take_step(tensors, self._step, places))
        else:
            assert self._groups is not None
            self._step, average = self._groups.take_step(tensors, self._step, places)
        return average

    def load_state_from_peers(
        self, params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], timeout: float | None = None
    ) -> bool:
        """For a newcomer to a swarm: takes the parameters that others have averaged last, and their step.

        `params` as in `average_parameters`; those that are trained are replaced. Returns False, and changes nothing, if
        nobody gave fitting ones within `timeout` seconds. Raises RuntimeError on a process group.
        """
        if self._swarm is None:
            raise RuntimeError("load_state_from_peers needs swarm=...; processes of a group load a checkpoint")
        tensors, places = chosen(params, lambda param: param.requires_grad)
        step: int | None = self._swarm.run(lambda levels: levels.download(tensors, timeout, places))
        if step is None:
            return False
        self._step = step  # the level of this step may still be averaging
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the step, at which `load_state_dict` goes on."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on at the step of `state_dict`. Raises ValueError and TypeError for a dict without a valid step."""
        if "step" not in state_dict:
            raise ValueError(f"state_dict has no step; its keys are {sorted(state_dict)}")
        self.step = state_dict["step"]

    def shutdown(self) -> None:
        """Leaves the groups of the swarm; process groups last as long as torch.distributed does. Idempotent."""
        if self._swarm is not None:
            self._swarm.shutdown()

    def __enter__(self) -> HierarchicalModelAverager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        levels = dict(zip(self._plan.periods, self._plan.group_sizes, strict=True))
        return f"<HierarchicalModelAverager {levels} at step {self._step}>"
