"""Ranks of a site that learn by themselves: each steps its own model, and the site averages its models by levels.

every step            each rank steps with the gradients of its own batch
at a level's period   the ranks of each group of that level average their parameters
the swarm's epochs    the parameters of all ranks become their mean at rank 0, before that averages its state in the
                      swarm and before such an average comes in; then all ranks get rank 0's
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from swarmcli.optim import Optimizer
from swarmcli.optim.gradients.accumulator import Weighed, all_finite
from swarmcli.sharding.levels.plan import read_plan
from swarmcli.sharding.levels.process_groups import ProcessGroupLevels
from swarmcli.sharding.zero.consolidation import receive_share, send_share
from swarmcli.sharding.zero.state import apply_settings, describe_settings
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.commands import Command, LeaderCommands
from swarmcli.sites.gradients import LeaderGradients, MemberGradients, sum_over_ranks
from swarmcli.sites.links import named, receive_message, send_message
from swarmcli.sites.sharded_optimizer import SiteOptimizer
from swarmcli.sites.site import Site
from swarmcli.sites.step_sync import StepReport, StepVerdict


class GatherParameters(Command, frozen=True):
    """Rank 0's parameters become the mean over all ranks. The others wait for its verdict, or have ended."""


class Settings(msgspec.Struct, frozen=True):
    """The others' optimizers take over these settings of rank 0's; `statistics`: its statistics follow, in place of
    theirs."""

    groups: list[dict[str, Any]]
    statistics: bool


class SiteLevels:
    """One rank's part in averaging models within the site. All ranks take the same steps with it."""

    def __init__(self, site: Site, parameters: Sequence[torch.Tensor], hierarchy: Mapping[int, int]) -> None:
        """Raises ValueError for a hierarchy that does not fit the site."""
        self._plan = read_plan(hierarchy, 0)
        self._whole = len(self._plan) - 1
        with named("the groups of this site's hierarchy did not come together"):
            self._backend = ProcessGroupLevels(self._plan, site.pace, timeout=site.timeout)
        self._parameters = list(parameters)
        self._step = 0
        self._epoch: int | None = None  # of the last verdict

    def due(self, verdict: StepVerdict) -> int | None:
        """The level that averages when a step is over. Counts it, but for the one with which all ranks begin.

        What the site has learned in an epoch is in all ranks when the epoch is over, and when training is.
        """
        before, self._epoch = self._epoch, verdict.epoch
        if before is None:
            return None
        step, self._step = self._step, self._step + 1
        if verdict.new_parameters:
            return None
        return self._whole if verdict.stop or verdict.epoch != before else self._plan.due(step)

    def is_news(self, verdict: StepVerdict) -> bool:
        """Whether the others hear of rank 0's settings with this verdict; to be asked before `due`."""
        return verdict.new_parameters or verdict.epoch != self._epoch

    def average(self, level: int) -> None:
        """Raises SiteError."""
        with named("the models of this site were not averaged"):
            self._backend.average(level, self._parameters, self._step)


class LeaderLevels(LeaderGradients):
    """Rank 0's side: for its SiteLeader, and Companions of its Optimizer, which makes local updates."""

    def __init__(
        self, commands: LeaderCommands, parameters: Sequence[torch.Tensor], hierarchy: Mapping[int, int]
    ) -> None:
        """`parameters`: those that the optimizer steps, in its order."""
        self._site, self._commands = commands.site, commands
        self._parameters = list(parameters)
        self._hierarchy = hierarchy
        self._led: tuple[Optimizer, SiteLevels] | None = None
        self._gathered = True  # the parameters here are those of all ranks; at first everyone takes rank 0's
        self._replaced = True  # … and the statistics are
        self.at_rest = True

    def lead(self, optimizer: Optimizer) -> None:
        """To be told once of the Optimizer that was made with this as its companions, while the other ranks make their
        MemberLevels. Raises ValueError for one that steps other parameters than the model's, or whose statistics are
        shared out."""
        check_unsharded(optimizer.opt)
        stepped = [parameter for group in optimizer.opt.param_groups for parameter in group["params"]]
        if list(map(id, stepped)) != list(map(id, self._parameters)):
            raise ValueError("hierarchy: the optimizer has to step the parameters of the model, not copies (offload)")
        self._led = optimizer, SiteLevels(self._site, self._parameters, self._hierarchy)

    # Companions

    def gather(self) -> None:
        """The mean of all ranks, once in a step: after that nobody else has learned anything. Raises SiteError."""
        if not self.at_rest:
            raise RuntimeError("the other ranks are computing: what they learn now would be in no mean")
        if not self._gathered:
            site = self._site
            self._commands.run(
                GatherParameters(), lambda: sum_over_ranks(site, site.commands, self._parameters, mean=True)
            )
            self._gathered = True

    def note_replaced(self) -> None:
        self._gathered = self._replaced = True

    # LeaderGradients

    def take(self, own: Weighed, reports: Sequence[StepReport]) -> Weighed:
        self.at_rest = True
        if not own.weight:
            for parameter in self._parameters:
                parameter.grad = None  # others have samples, and this rank would step with gradients that are zero
        return sum((each.weighed for each in reports), own)

    def are_news(self, *, new_epoch: bool, stepped: bool, written: bool) -> bool:
        return self._gathered

    def finish(self, verdict: StepVerdict) -> None:
        assert self._led is not None, "lead() was not called"
        optimizer, levels = self._led
        if levels.is_news(verdict):
            self._tell(optimizer.opt)
        level = levels.due(verdict)
        if level is not None:
            optimizer.call(lambda core: core.replica.alone(lambda: levels.average(level)))
        self._gathered = self._replaced = False
        self.at_rest = verdict.stop

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        news = Settings(describe_settings(optimizer.param_groups), self._replaced)
        for rank in self._site.others:
            send_message(self._site.pace, news, rank)
        if self._replaced:
            statistics = optimizer.state_dict()["state"]
            for rank in self._site.others:
                with named(f"rank {rank} did not take the optimizer's statistics"):
                    send_share(statistics, rank, self._site.pace)


class MemberLevels(MemberGradients):
    """Another rank's side: it steps its own model, by settings that are rank 0's."""

    def __init__(self, site: Site, optimizer: torch.optim.Optimizer, hierarchy: Mapping[int, int]) -> None:
        """`optimizer` has the parameters in the same order as rank 0's. Raises ValueError if its statistics are shared
        out over ranks."""
        check_unsharded(optimizer)
        self._site, self._optimizer = site, optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._levels = SiteLevels(site, self._parameters, hierarchy)
        self._lock = threading.Lock()  # the main thread changes parameters, the Follower reads them

    @property
    def handlers(self) -> Mapping[type[Command], Callable[[Any], None]]:
        return {GatherParameters: self._hand_over}

    def prepare(self, batch: Weighed) -> None:
        gradients = (parameter.grad for parameter in self._parameters if parameter.grad is not None)
        if batch.weight and all_finite(gradients):
            with self._lock:
                self._optimizer.step()

    def finish(self, verdict: StepVerdict) -> None:
        if self._levels.is_news(verdict):
            self._hear()
        level = self._levels.due(verdict)
        if level is not None:
            with self._lock:
                self._levels.average(level)

    def _hear(self) -> None:
        news = receive_message(Settings, self._site.pace, 0)
        apply_settings(self._optimizer.param_groups, news.groups)
        if news.statistics:
            with named("rank 0 did not send the optimizer's statistics"):
                statistics = receive_share(0, self._site.pace, range(len(self._parameters)))
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": statistics})

    def _hand_over(self, command: GatherParameters) -> None:
        with self._lock:
            sum_over_ranks(self._site, self._site.commands, self._parameters, mean=True)


def check_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer whose statistics lie on several ranks."""
    if isinstance(optimizer, SiteOptimizer | ZeroRedundancyOptimizer):
        raise ValueError(
            f"hierarchy: a {type(optimizer).__name__} shares its statistics out over ranks that step as one, but in a "
            "hierarchy each rank steps by itself: give an optimizer of torch, or leave hierarchy out"
        )
