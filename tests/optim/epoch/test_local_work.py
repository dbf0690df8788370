"""Local updates: everyone steps by itself, and the states come together as the same computation in one process says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmcli.events import Noticed, RoundFinished, StateDownloaded
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.outer import LocalUpdates
from swarmcli.testing import virtual_time
from tests.optim.local_swarm import Applied, LocalPeer, in_one_process, local_peer
from tests.optim.optim_swarm import Swarm, adamw, make_model, momentum, record, together
from tests.suites import soak

EPOCHS = 4


async def finish(peers: list[LocalPeer]) -> None:
    await together(*(peer.finish() for peer in peers))


def check(peers: list[LocalPeer], every: int = 1, **options: Any) -> None:
    """Beside the plain arithmetic: steps, means weighted by samples, and the delta rule."""
    expected = in_one_process([peer.log for peer in peers], seed=1, **options)
    for peer, weights in zip(peers, expected, strict=True):
        torch.testing.assert_close(peer.weights.detach(), weights, rtol=1e-11, atol=1e-12)
        assert sum(isinstance(entry, Applied) for entry in peer.log) == EPOCHS // every


STATISTICS = {momentum: ("momentum_buffer",), adamw: ("exp_avg", "exp_avg_sq")}
OTHERS = [((2, 6, 3), momentum), ((4, 4), momentum), ((1, 4, 2, 5), adamw)]


@pytest.mark.parametrize(
    ("sizes", "make", "delay"),
    [((2, 6, 3), adamw, True), *soak((*case, delay) for case in OTHERS for delay in (True, False))],
)
def test_with_averaged_statistics_it_is_the_same_computation_in_one_process(
    sizes: tuple[int, ...], make: Any, delay: bool
) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            names = STATISTICS[make]
            options = {"make": make, "statistics": names, "delay": delay}
            peers = [await local_peer(swarm, batch_size=size, seed=1, **options) for size in sizes]
            await together(*(peer.train(EPOCHS) for peer in peers))
            await finish(peers)
            check(peers, make=make, names=names)
            assert len({peer.core.position for peer in peers}) == 1
            if not delay:
                assert len({peer.core.replica.state.digest() for peer in peers}) == 1
                own, *others = (peer.core.replica.state.optimizer.state[peer.weights] for peer in peers)
                assert all(torch.equal(own[name], other[name]) for other in others for name in names)

    virtual_time.run(main(), timeout=300)


def test_parameters_are_averaged_every_so_many_epochs() -> None:
    """The rounds between only count: they average one number."""

    async def main() -> None:
        async with Swarm() as swarm:
            peers = [await local_peer(swarm, seed=1, average_every=2, delay=False) for _ in range(2)]
            assert peers[0].core.work.averager.layout.numel == 1
            await together(*(peer.train(EPOCHS) for peer in peers))
            await finish(peers)
            check(peers, every=2)
            assert len({peer.core.position for peer in peers}) == 1

    virtual_time.run(main(), timeout=300)


def test_training_goes_on_while_a_delayed_round_is_under_way() -> None:
    async def main() -> None:
        async with Swarm(latency=0.5) as swarm:
            peers = [await local_peer(swarm, seed=1, delay=True, batch_size=2, pace=0.25) for _ in range(2)]
            await together(*(peer.train(3) for peer in peers))
            places = [index for index, entry in enumerate(peers[0].log) if isinstance(entry, Applied)]
            over = [index for index, entry in enumerate(peers[0].log) if hasattr(entry, "epoch")]
            assert all(applied - ended > 2 for applied, ended in zip(places, over, strict=False))

    virtual_time.run(main(), timeout=300)


def test_a_newcomer_with_other_weights_and_one_that_was_frozen_are_in_step_soon() -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            peers = [await local_peer(swarm, seed=1, delay=False) for _ in range(2)]
            await together(*(peer.train(2) for peer in peers))
            peers.append(await local_peer(swarm, seed=2, delay=False))
            downloads = record(peers[2].core.node, StateDownloaded)
            await together(*(peer.train(4) for peer in peers))
            assert len(downloads) == 1
            assert len({peer.core.replica.state.digest() for peer in peers}) == 1
            await together(*(peer.train(5) for peer in peers[1:]))
            await peers[0].compute()
            await together(*(peer.train(9) for peer in peers))  # it has come back, and then taken part in an average
            assert len({peer.core.replica.state.digest() for peer in peers}) == 1
            assert len({peer.core.position for peer in peers}) == 1

    virtual_time.run(main(), timeout=300)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_whose_gradient_is_not_finite_reaches_neither_parameters_nor_statistics(value: float) -> None:
    async def main() -> None:
        async with Swarm() as swarm:
            peer = await local_peer(swarm, seed=1, make=adamw)
            notices = record(peer.core.node, Noticed)
            await peer.compute()
            before, samples = peer.weights.detach().clone(), peer.core.work.samples
            statistics = {
                name: tensor.clone() for name, tensor in peer.core.replica.state.statistics.capture()[0].items()
            }
            for _ in range(2):
                peer.weights.grad = torch.full_like(peer.weights, 1.0)
                peer.weights.grad[2] = value  # of a finite loss, as of a square root at 0
                await peer.core.step(4)
            assert torch.equal(peer.weights, before)
            assert all(
                torch.equal(peer.core.replica.state.statistics.capture()[0][n], t) for n, t in statistics.items()
            )
            assert (peer.core.work.samples, peer.core.work.given_up.count) == (samples, 2)
            (notice,) = [each.text for each in notices if "not finite" in each.text]
            assert notice.startswith("4 samples of this peer are given up")
            await peer.compute()
            assert not torch.equal(peer.weights, before)
            assert peer.weights.isfinite().all()

    virtual_time.run(main(), timeout=300)


@pytest.mark.soak  # test_several_groups.py has groups side by side of gradients
def test_groups_side_by_side_come_together_after_each_epoch() -> None:
    """Their anchors are unlike, and all average them; what each has learned since stays on top."""

    async def main() -> None:
        async with Swarm() as swarm:
            mode = LocalUpdates(state=StateOptions(delay=False), target_group_size=2)
            options = {"batch_size": 2, "target": 240, "matchmaking_time": 5.0, "mode": mode}
            peers = [await swarm.trainer(seed=1, averaging={"target_group_size": 2}, **options) for _ in range(4)]
            rounds = record(peers[0].node, RoundFinished)
            await together(*(peer.train(3) for peer in peers))
            assert sum(event.purpose == "run_state" and event.outcome == "committed" for event in rounds) >= 2
            anchors = torch.stack([peer.core.replica.state.trained[0].detach() for peer in peers])
            models = torch.stack([peer.weights.detach() for peer in peers])
            assert float((models - anchors).abs().max()) < 1e-9, "nobody has learned since"
            learned = anchors.mean(0) - make_model(1).detach()
            assert float((anchors - anchors.mean(0)).norm()) < 0.05 * float(learned.norm())

    virtual_time.run(main(), timeout=300)
