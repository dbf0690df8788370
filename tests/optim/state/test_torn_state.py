"""A state that could not be read to its end leaves parameters that nobody trains, donates or saves."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from swarmcli.compression import TensorDescriptor
from swarmcli.errors import OptimizerError, StateDownloadError
from swarmcli.optim.state.lineage import TORN
from swarmcli.optim.state.statistics import OwnStatistics
from swarmcli.state.distant import AnyTensor, DistantTensor
from tests.optim.optim_swarm import Swarm, digests, momentum, together
from tests.optim.state.test_training_state import advance, make_state
from tests.simulation import within


class Unreadable(DistantTensor):
    def read(self, begin: int, end: int) -> memoryview:
        raise OSError(5, "Input/output error")


def test_a_file_that_cannot_be_read_leaves_a_state_that_says_so() -> None:
    donor, newcomer = make_state(1), make_state(2)
    advance(donor, 3, seed=3)
    whole = donor.capture().clone()
    torn = Unreadable(TensorDescriptor.of(donor.parameters[1]))
    before = newcomer.digest()
    with pytest.raises(OSError, match="Input/output"):
        newcomer.restore(type(whole)(whole.metadata, {**whole.tensors, "parameter/1": torn}))
    assert newcomer.digest() != before, "the first parameter is the donor's"
    assert newcomer.position == TORN
    for refused in (newcomer.capture, newcomer.checkpoint):
        with pytest.raises(OptimizerError, match="partly"):
            refused()
    newcomer.restore(whole)
    assert newcomer.digest() == donor.digest() and newcomer.position == donor.position


class OnATornDisk(OwnStatistics):
    """Statistics that fail after the parameters have been filled, as often as `failures` says."""

    failures = 0

    @contextmanager
    def staged(
        self, tensors: Mapping[str, AnyTensor], numbers: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> Iterator[Callable[[], None]]:
        with super().staged(tensors, numbers, groups) as install:

            def fail_at_first() -> None:
                if self.failures:
                    self.failures -= 1
                    raise OSError(5, "Input/output error")
                install()

            yield fail_at_first


def unlucky(params: Any) -> torch.optim.Optimizer:
    optimizer = momentum(params)
    optimizer.statistics = OnATornDisk(optimizer)  # type: ignore[attr-defined]
    return optimizer


@within(500)
async def test_a_peer_whose_download_tears_downloads_again() -> None:
    async with Swarm() as swarm:
        donor = await swarm.trainer(seed=1, batch_size=24)
        other = await swarm.trainer(seed=2, make=unlucky)
        await donor.train(6)
        other.core.replica.state.statistics.failures = 2
        await together(donor.train(9), other.train(9))
        assert other.core.replica.state.statistics.failures == 0
        assert len(digests(swarm.trainers)) == 1


@within(500)
async def test_a_peer_that_cannot_keep_any_state_ends_with_the_reason_and_leads_nobody() -> None:
    async with Swarm() as swarm:
        donor = await swarm.trainer(seed=1, batch_size=24, pace=1.0)
        other = await swarm.trainer(seed=2, make=unlucky, load_state_timeout=8.0)
        await donor.train(6)
        other.core.replica.state.statistics.failures = 1000
        with pytest.raises(StateDownloadError):
            await together_until_error(donor.train(100_000), other.core.join())
        assert other.core.report().phase == "joining" and other.core.position == TORN
        await swarm.kill(donor)
        await asyncio.sleep(10)
        newcomer = await swarm.trainer(seed=3, batch_size=24)
        newcomer.core.catch_up.note_heard(None, begins_anew=True)  # it hears from the other how far the run was
        await newcomer.train(2)
        other.core.replica.state.statistics.failures = 0
        await together(newcomer.train(4), other.train(4))
        assert len(digests([newcomer, other])) == 1


async def together_until_error(*work: Coroutine[Any, Any, Any]) -> None:
    try:
        await together(*work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
