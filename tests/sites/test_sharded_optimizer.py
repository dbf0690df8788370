"""Rank 0's optimizer steps as a plain one would, though each rank keeps the statistics of its share alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import SiteError
from swarmcli.sites.site import Site
from tests.sharding.threads import in_threads, ranks
from tests.sites.site_state import differing, shared_out

SHAPES = [(6, 4), (5,), (3, 3), (2,), (7,)]


class Stubborn(torch.optim.SGD):
    """Steps no parameter of three numbers by three."""

    def step(self, closure: Any = None) -> Any:
        if any(parameter.shape == (3, 3) for group in self.param_groups for parameter in group["params"]):
            raise ArithmeticError("not this one")
        return super().step(closure)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9)}),
    "stubborn": (Stubborn, {"lr": 0.1}),
}


def net(seed: int = 0) -> torch.nn.ParameterList:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.ParameterList(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES)


def groups(model: torch.nn.ParameterList) -> list[dict[str, Any]]:
    parameters = list(model)
    return [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.01, "weight_decay": 0.1}]


def give_gradients(model: torch.nn.ParameterList, step: int, absent: int | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(model):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = None if index == absent else gradient


def plain_steps(kind: str, steps: Callable[[Any, torch.nn.ParameterList], Any]) -> Any:
    model = net()
    made, settings = OPTIMIZERS[kind]
    optimizer = made(groups(model), **settings)
    steps(optimizer, model)
    return optimizer, model


@contextmanager
def site_optimizer(kind: str, model: torch.nn.ParameterList) -> Iterator[tuple[Site, Any]]:
    """At rank 0 the optimizer; at the others their share, which follows until rank 0 has left the block."""
    with Site.form(timeout=100.0) as site, shared_out(site, model, groups(model), *OPTIMIZERS[kind]) as optimizer:
        yield site, optimizer


def all_settings_change(optimizer: Any, model: torch.nn.ParameterList) -> None:
    """What schedulers, hooks and models do between steps."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(list(model), 0.5) and None)
    for step in range(4):
        give_gradients(model, step, absent=step if step in (1, 4) else None)
        if step == 2:
            optimizer.param_groups[1]["weight_decay"] = 0.5
        optimizer.step()
        schedule.step()


def step_in_a_site(kind: str) -> list[torch.Tensor]:
    model = net(seed=dist.get_rank())  # rank 0's count
    own = [torch.full_like(parameter, 7.0) for parameter in model]
    for parameter, gradient in zip(model, own, strict=True):
        parameter.grad = gradient
    with site_optimizer(kind, model) as (site, optimizer):
        if site.rank == 0:
            all_settings_change(optimizer, model)
    if site.rank:
        assert all(parameter.grad is gradient for parameter, gradient in zip(model, own, strict=True))
        assert all(bool((gradient == 7.0).all()) for gradient in own)
    return [parameter.detach() for parameter in model]


@pytest.mark.parametrize(("size", "kind"), [(2, "momentum"), (2, "adam"), (4, "adam")])
def test_steps_equal_those_of_a_plain_optimizer(size: int, kind: str) -> None:
    _, expected = plain_steps(kind, all_settings_change)
    for parameters in in_threads(size, step_in_a_site, kind):
        assert all(torch.equal(one, other.detach()) for one, other in zip(parameters, expected, strict=True))


def steps_after_writes() -> list[torch.Tensor]:
    """Between two steps rank 0's parameters are written to, as by a download."""
    model = net()
    with site_optimizer("momentum", model) as (site, optimizer):
        if site.rank == 0:
            write_between_steps(optimizer, model)
    return [parameter.detach() for parameter in model]


def write_between_steps(optimizer: Any, model: torch.nn.ParameterList) -> None:
    for step in range(3):
        with torch.no_grad():
            for parameter in model:
                parameter.mul_(step + 1)
        give_gradients(model, step)
        optimizer.step()


def test_what_rank_0_has_written_to_its_parameters_is_what_all_step_from() -> None:
    _, expected = plain_steps("momentum", write_between_steps)
    for parameters in in_threads(3, steps_after_writes):
        assert all(torch.equal(one, other.detach()) for one, other in zip(parameters, expected, strict=True))


@ranks(2)
def test_the_state_dict_is_that_of_an_optimizer_that_is_not_shared_out() -> None:
    model = net()
    with site_optimizer("adam", model) as (site, optimizer):
        if site.rank:
            return
        give_gradients(model, 0)
        optimizer.step()
        saved = optimizer.state_dict()

        def step(made: Any, trained: Any) -> None:
            give_gradients(trained, len(made.state) and 1)
            made.step()

        plain, twin = plain_steps("adam", step)
        assert differing(saved, plain.state_dict()) == []
        give_gradients(model, 9)
        optimizer.step()
        assert differing(saved, plain.state_dict()) == [], "it is a copy"
        with torch.no_grad():
            for parameter, value in zip(model, twin, strict=True):
                parameter.copy_(value)
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.load_state_dict(plain.state_dict())
        for each, trained in ((optimizer, model), (plain, twin)):
            step(each, trained)
        assert differing(optimizer.state_dict(), plain.state_dict()) == []
        assert all(map(torch.equal, model, twin))


def a_share_that_fails() -> str:
    model = net()
    give_gradients(model, 0)
    try:
        with site_optimizer("stubborn", model) as (site, optimizer):
            owner = optimizer.zero.owner_of(2)
            if site.rank == 0:
                optimizer.step()
    except (SiteError, ArithmeticError) as error:
        return f"{'owner' if dist.get_rank() == owner else 'other'}: {error}"
    return "nothing happened"


def test_a_share_that_cannot_be_stepped_ends_the_site() -> None:
    said = in_threads(3, a_share_that_fails)
    assert "nothing happened" not in said
    assert any(each.startswith("owner: ") and "not this one" in each for each in said)
