"""SiteOptimizer: rank 0's inner optimizer if every rank of a site keeps the statistics of its share.

rank 0    step ── settings, a share of the gradients each ──▶ all ranks step their shares
          all parameters ◀── all ranks broadcast theirs ──▶ everywhere
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swarmcli.errors import SiteError
from swarmcli.optim.state.statistics import by_place, groups_of
from swarmcli.sharding.zero.state import apply_settings, describe_settings
from swarmcli.sharding.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from swarmcli.sites.commands import Command, Handlers, LeaderCommands
from swarmcli.sites.links import named, receive_tensors, send_tensors
from swarmcli.sites.site import Site
from swarmcli.sites.statistics import ShareOfStatistics, SiteStatistics
from swarmcli.sites.step_sync import SharedModel


class StepShares(Command, frozen=True):
    """All ranks step their shares; before that, rank 0 sends each of them the gradients that it needs."""

    groups: list[dict[str, Any]]  # the settings of each parameter group
    present: list[int]  # parameters that have a gradient, by their places in the groups
    anew: bool  # rank 0 sends the parameters of the shares first, because its own have been replaced


class SiteOptimizer(torch.optim.Optimizer):
    """At rank 0: an optimizer like any other, whose `step` steps all ranks' shares with this rank's gradients.

    Afterwards all ranks hold the same parameters. Schedulers change the settings here; they go out with every step.
    `state_dict` and `load_state_dict` are those of an unsharded optimizer, but no rank has all statistics in memory;
    `statistics` has them for the swarm. `state` has those of this rank's share, which `zero` names.
    """

    waits = True  # for the other ranks: never call `step` on an event loop

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        commands: LeaderCommands,
        shared: SharedModel,
        **defaults: Any,
    ) -> None:
        """All ranks make theirs at the same time, the others a ShareOfOptimizer with equal arguments. `shared`: the
        site's model, whose parameters these are.

        Raises SiteError if a rank does not come.
        """
        self.zero = _share(commands.site, params, optimizer_class, defaults)
        super().__init__(self.zero.param_groups, self.zero.defaults)
        self._commands, self.shared = commands, shared
        self.statistics = SiteStatistics(commands, ShareOfStatistics(commands.site, self.zero))
        self.param_groups, self.state = self.zero.param_groups, self.zero.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Raises SiteError; the parameters of some shares may then be a step ahead of others'."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = describe_settings(self.param_groups)
        present = [index for index, parameter in enumerate(self.zero.parameters) if parameter.grad is not None]
        anew = self.shared.written  # they were restored or averaged here, and the other ranks do not have them yet
        command = StepShares(groups, present, anew)
        self._commands.run(command, lambda: self._step_all(present, anew))
        self.shared.note_equal()
        return loss

    def _step_all(self, present: Sequence[int], anew: bool) -> None:
        site = self._commands.site
        for rank in site.others:
            own = self.zero.indices_of(rank)
            parameters = [self.zero.parameters[index].detach() for index in own] if anew else []
            gradients = [self._gradient(index) for index in present if self.zero.owner_of(index) == rank]
            send_tensors(site.group, [*parameters, *gradients], rank)
        with named("not every rank of the site has stepped its share"):
            self.zero.step()

    def _gradient(self, index: int) -> torch.Tensor:
        gradient = self.zero.parameters[index].grad
        if gradient is None:
            raise SiteError(f"the gradient of parameter {index} has gone while all ranks were to step with it")
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """A copy of the present state, whose tensors are views of an unnamed file. Raises SiteError, and OSError if the
        disk is full."""
        return {"state": self.statistics.state(), "param_groups": groups_of(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sends all ranks their shares. Raises SiteError; the site has then ended."""
        tensors, numbers = by_place(state_dict["state"])
        with self.statistics.staged(tensors, numbers, state_dict["param_groups"]) as install:
            install()


class ShareOfOptimizer(ShareOfStatistics):
    """At the other ranks: a share of rank 0's SiteOptimizer, stepped by its commands while the main thread waits."""

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        site: Site,
        **defaults: Any,
    ) -> None:
        super().__init__(site, _share(site, params, optimizer_class, defaults))

    @property
    def handlers(self) -> Handlers:
        """For this rank's SiteMember."""
        return {StepShares: self._step, **super().handlers}

    def _step(self, command: StepShares) -> None:
        apply_settings(self.zero.param_groups, command.groups)
        indices = self.zero.indices_of(self._site.rank)
        parameters = [self._room(index) for index in indices if command.anew]
        gradients = {index: self._room(index) for index in indices if index in set(command.present)}
        receive_tensors(self._site.group, [*parameters, *gradients.values()], 0, self._site.timeout)
        for index, parameter in zip(indices, parameters, strict=False):
            self.zero.parameters[index].detach().copy_(parameter)
        lent = _lent({self.zero.parameters[index]: gradients.get(index) for index in indices})
        with lent, named("not every rank of the site has stepped its share"):
            self.zero.step()

    def _room(self, index: int) -> torch.Tensor:
        parameter = self.zero.parameters[index]
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _share(
    site: Site,
    params: Any,
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
) -> ZeroRedundancyOptimizer:
    site.meet()
    return ZeroRedundancyOptimizer(params, optimizer_class, process_group=site.group, **defaults)


@contextmanager
def _lent(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> Iterator[None]:
    """Inside the block these are the parameters' gradients; after it they have those of this rank's own batch again."""
    own = {parameter: parameter.grad for parameter in gradients}
    try:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in own.items():
            parameter.grad = gradient
