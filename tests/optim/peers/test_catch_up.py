"""Which claims a peer acts on, and for how long it tries."""

import asyncio

import pytest
import torch

from swarmcli.errors import StateDownloadError
from swarmcli.events import EpochAdvanced, Noticed, PeerRefused
from swarmcli.optim.state.lineage import LineagePosition
from swarmcli.optim.state.training_state import CapturedState
from swarmcli.state import download
from tests.optim.optim_swarm import Swarm, adamw, digests, momentum, record, together
from tests.simulation import within
from tests.suites import soak

BOAST = LineagePosition(1000, 10**6, bytes([9]) * 32)


async def boast(liar) -> None:
    """Claims to be far ahead, at the hash table and when asked."""
    liar.core.replica.state.position = BOAST
    liar.core.phase = "training"
    liar.core.directory.announce()
    await asyncio.sleep(10)


@within(2000)
async def test_one_that_has_made_no_round_trains_no_second_run_while_the_state_comes_slowly() -> None:
    """The late trainer was there first, others went on, and a donor's state is gone before all of it has arrived."""
    async with Swarm() as swarm:
        late = await swarm.trainer(seed=3)
        assert not await late.core.join()
        first, second = [await swarm.trainer(seed=seed, batch_size=24, pace=1.5) for seed in (1, 2)]
        await together(first.train(2), second.train(2))
        loop, exchange = asyncio.get_running_loop(), late.core.exchange
        download, slow_until = exchange.download, loop.time() + 12  # longer than a settled peer knocks in vain

        async def slow(*arguments, **options) -> None:
            if loop.time() < slow_until:
                await asyncio.sleep(3)
                exchange.moved = loop.time()
                raise StateDownloadError("no donor gave a complete state: this peer does not have that state")
            await download(*arguments, **options)

        exchange.download = slow
        warnings, epochs = record(late.node, Noticed), record(late.node, EpochAdvanced)
        await together(first.train(11), second.train(11), late.train(11))
        assert loop.time() > slow_until
        assert epochs, "it trains"
        assert all(epoch.peers != 1 for epoch in epochs), "and nothing of its own"
        assert not [warning for warning in warnings if "stays at" in warning.text]
        assert len(digests([first, second, late])) == 1


def wrong_type(captured: CapturedState) -> None:
    captured.tensors["parameter/0"] = captured.tensors["parameter/0"].float()


def wrong_standing(captured: CapturedState) -> None:
    captured.metadata["epoch"] = 7


def wrong_settings(captured: CapturedState) -> None:
    captured.metadata["groups"] = []


@pytest.mark.parametrize(
    ("change", "was_fetched"), [(wrong_type, False), (wrong_standing, True), *soak([(wrong_settings, False)])]
)
@within(500)
async def test_a_state_that_is_not_what_was_claimed_is_refused_and_changes_nothing(change, was_fetched: bool) -> None:
    async with Swarm() as swarm:
        honest = await swarm.trainer(seed=1, batch_size=24)
        liar = await swarm.trainer(seed=2)
        refused = record(honest.node, PeerRefused)
        await together(honest.train(3), liar.train(3))  # so its word is that of a mate
        await boast(liar)
        capture = liar.core.replica.capture

        async def wrong() -> CapturedState:
            captured = await capture()
            change(captured)
            return captured

        liar.core.replica.capture = wrong
        before = honest.core.replica.state.digest()
        assert not await honest.core.join()
        assert honest.core.replica.state.digest() == before
        assert {event.what for event in refused} == {"state"}
        assert {event.reason.startswith("its state does not fit") for event in refused} == {was_fetched}
        await honest.train(6)


@within(300)
async def test_a_state_that_does_not_fit_says_which_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIBRARY", "torch 2.6.0")
    async with Swarm() as swarm:
        peers = [await swarm.trainer(seed=1, make=adamw) for _ in range(2)]
        await together(*(trainer.train(2) for trainer in peers))
        newcomer = await swarm.trainer(seed=2, make=momentum, load_state_timeout=5.0)
        there = torch.__version__.partition("+")[0]
        with pytest.raises(StateDownloadError, match=rf"betas.*it has torch {there}, this peer torch 2\.6\.0"):
            await newcomer.core.join()
