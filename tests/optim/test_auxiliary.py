"""Auxiliaries in runs that average states: they reduce these too, and nobody waits for them in vain."""

from collections.abc import Callable

import psutil
import pytest
import torch

from swarmcli.compression import Float16Compression
from swarmcli.events import RoundFinished
from swarmcli.optim.arguments import averager_config
from swarmcli.optim.auxiliary import AuxiliaryCore
from swarmcli.optim.config import OptimizerConfig, PeerContext, PeerDescription
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.modes.low_rank import PowerEF, PowerSGD
from swarmcli.optim.modes.outer import LocalUpdates
from swarmcli.optim.state.averaging import LONGEST_WAIT
from tests.optim.optim_swarm import TARGET, Swarm, assist, auxiliary, record, together
from tests.simulation import within

EPOCHS = 4


@pytest.mark.parametrize("name", ["states", "parameters of local updates"])
@within(300)
async def test_an_auxiliary_reduces_what_is_averaged_every_second_epoch(name: str) -> None:
    options = StateOptions(average_every=2, statistics=("momentum_buffer",), compression=Float16Compression())
    mode = Mode(state=options) if name == "states" else LocalUpdates(state=options)
    async with Swarm() as swarm:
        trainers = [await swarm.trainer(seed=1, mode=mode, pace=0.3) for _ in range(2)]
        core = await auxiliary(swarm, mode=mode)
        rounds = record(core.node, RoundFinished)
        await together(*(trainer.train(EPOCHS + 2) for trainer in trainers), assist(core, EPOCHS))
        purpose = "run_state" if name == "states" else "run_grads"
        assisted = [r.epoch for r in rounds if r.purpose == purpose and r.outcome == "committed"]
        assert assisted and {epoch % 2 for epoch in assisted} == {0 if name == "states" else 1}
        assert max(event.seconds for trainer in trainers for event in trainer.epochs[1:]) < 3.0


@within(300)
async def test_an_auxiliary_that_leaves_holds_nobody_up() -> None:
    async with Swarm() as swarm:
        mode = Mode(state=StateOptions(average_every=1, delay=False))
        trainers = [await swarm.trainer(seed=1, mode=mode, pace=0.3) for _ in range(2)]
        core = await auxiliary(swarm, mode=mode)

        async def leave() -> None:
            await assist(core, EPOCHS // 2)
            await core.shutdown()

        await together(*(trainer.train(EPOCHS) for trainer in trainers), leave())
        # Once it is waited for, since its node is still connected: no longer than for any mate of a state round.
        longest = max(event.seconds for trainer in trainers for event in trainer.epochs[1:])
        assert longest < LONGEST_WAIT + 2.0


@pytest.mark.parametrize("mode", [Mode, lambda: PowerSGD(averager_rank=8), lambda: PowerEF(averager_rank=8)])
@within(60)
async def test_an_auxiliary_takes_no_memory_for_sums_means_and_residuals(mode: Callable[[], Mode]) -> None:
    async with Swarm() as swarm:
        config = OptimizerConfig("run", TARGET, description=PeerDescription("auxiliary"))
        peer = PeerContext(await swarm.node(), config, averager_config(config, auxiliary=True))
        parameters = [torch.nn.Parameter(torch.empty(4096, 4096, device="meta")) for _ in range(2)]  # 128 MiB
        small = [torch.nn.Parameter(torch.empty(64, 64, device="meta"))]
        mode().assisting_averager(peer.node, peer.averaging, small)  # torch imports what it needs for that
        torch.empty_like(small[0], device="cpu")
        before = psutil.Process().memory_info().rss
        core = AuxiliaryCore(peer, parameters, mode())
        assert psutil.Process().memory_info().rss - before < 32 << 20
        await core.shutdown()
