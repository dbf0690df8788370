"""What parameters of the Optimizer change that no other test looks at, through the public class."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.dht import DHT
from swarmcli.events import Noticed
from swarmcli.optim import Optimizer
from tests.optim.shells import dhts

TARGET = 8


def optimizer(dht: DHT, net: torch.nn.Module, **options: Any) -> Optimizer:
    made = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Optimizer(dht=dht, run_id="parameters", target_batch_size=TARGET, optimizer=made, **options)


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def epochs(opt: Optimizer, net: torch.nn.Module, count: int) -> None:
    """A peer that is alone ends an epoch with each of these batches."""
    for number in range(count):
        opt.zero_grad()
        rows = torch.randn(TARGET, 3, generator=torch.Generator().manual_seed(number))
        (net(rows) ** 2).mean().backward()
        opt.step(batch_size=TARGET)
    assert opt.local_epoch == count


def gradients_of(opt: Optimizer) -> dict[str, torch.Tensor]:
    """The part of the training state that belongs to the mode that averages gradients."""
    found: dict[str, torch.Tensor] = opt.state_dict()["swarm"]["gradients"]
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_use_ext_grad_buffer_gives_a_newcomer_the_last_average(shared: bool) -> None:
    nets = [make_model(seed) for seed in (1, 2)]
    options = {"use_ext_grad_buffer": shared}
    with dhts(2) as (first, second), optimizer(first, nets[0], **options) as donor:
        epochs(donor, nets[0], 3)
        last = [parameter.grad for parameter in nets[0].parameters()]  # this peer is alone: the average is its own
        with optimizer(second, nets[1], **options) as newcomer:
            assert newcomer.load_state_from_peers()
            assert newcomer.state_digest() == donor.state_digest()
            came = gradients_of(newcomer)
            assert sorted(came) == (["average/0", "average/1"] if shared else [])
            for name, average in came.items():
                assert torch.equal(average, gradients_of(donor)[name])
                torch.testing.assert_close(average, last[int(name[-1])])


@pytest.mark.parametrize("lossy", [True, False])
def test_load_state_compression_rounds_what_a_newcomer_gets_and_that_is_told(lossy: bool) -> None:
    nets = [make_model(seed) for seed in (1, 2)]
    compression = {"load_state_compression": Float16Compression()} if lossy else {}
    with dhts(2) as (first, second), optimizer(first, nets[0], **compression) as donor:
        epochs(donor, nets[0], 2)
        told: list[str] = []
        second.events.subscribe(lambda event: told.append(event.text) if isinstance(event, Noticed) else None)
        with optimizer(second, nets[1]) as newcomer:
            assert newcomer.load_state_from_peers()
            assert newcomer.local_epoch == 2
            for own, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
                assert torch.equal(own, theirs.half().float() if lossy else theirs)
                momentum = [opt.opt.state[each]["momentum_buffer"] for opt, each in ((newcomer, own), (donor, theirs))]
                assert torch.equal(momentum[0], momentum[1].half().float() if lossy else momentum[1])
            assert sum("lossy codec (load_state_compression" in text for text in told) == lossy


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose_tells_the_swarms_progress_where_it_is_seen(
    dht: DHT, verbose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "swarmcli.optim.peers.progress")
    with optimizer(dht, make_model(1), verbose=verbose) as opt:
        opt.call(lambda core: core.tracker.refresh())
    told = [record.levelno for record in caplog.records if "samples for epoch 0" in record.getMessage()]
    assert set(told) == {logging.INFO if verbose else logging.DEBUG}


def test_shutdown_timeout_bounds_the_wait_for_an_end_that_does_not_come(
    dht: DHT, caplog: pytest.LogCaptureFixture
) -> None:
    with optimizer(dht, make_model(1), shutdown_timeout=0.05) as opt:
        shutdown = opt._core.shutdown

        async def endless() -> None:
            await shutdown()
            await asyncio.Event().wait()

        opt._core.shutdown = endless  # type: ignore[method-assign]
        opt.shutdown()
        assert "the optimizer did not end within 0.05 s" in caplog.text
        assert not opt.is_alive()
        opt.shutdown()  # once more changes nothing
        assert caplog.text.count("did not end") == 1
