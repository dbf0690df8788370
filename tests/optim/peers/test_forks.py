"""Whoever has heard that the run is further than its beginning begins none: it waits for those who hold it."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import NoDonorReachable
from swarmcli.events import Noticed
from swarmcli.optim.peers import catch_up
from tests.optim.optim_swarm import Swarm, Trainer, record, together, until
from tests.simulation import now, within
from tests.suites import soak


async def alone_with_what_it_heard(swarm: Swarm, *, members: int = 1, client_mode: bool = False) -> Trainer:
    """A newcomer whose only contacts of the run were killed while it loaded its model."""
    gone = [await swarm.trainer(seed=1) for _ in range(members)]
    await together(*(trainer.train(2) for trainer in gone))
    newcomer = await swarm.trainer(seed=1, load_state_timeout=70.0, client_mode=client_mode)
    await until(lambda: newcomer.core.claims.vouching.heard is not None)
    for trainer in gone:
        await swarm.kill(trainer)
    return newcomer


@pytest.fixture(autouse=True)
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "LOOK_AGAIN", 5.0)  # for the processor's sake


@pytest.mark.parametrize("members", [3, *soak([1])])
@within(500)
async def test_a_newcomer_whose_contacts_die_while_it_loads_begins_no_run_and_says_for_whom_it_waits(
    members: int,
) -> None:
    async with Swarm() as swarm:
        newcomer = await alone_with_what_it_heard(swarm, members=members)
        said, began = record(newcomer.node, Noticed), now()
        with pytest.raises(NoDonorReachable, match=r"showed on .* that this run is at epoch 2"):
            await newcomer.train(1)  # a loop of one's own, which nobody can tell to stop
        assert now() - began >= 70 and newcomer.epochs == []
        assert "instead of training another model" in said[0].text and "--begin-anew" in said[0].text

        stopped = asyncio.Event()
        newcomer.core.catch_up.gives_up = stopped.is_set
        waiting = asyncio.ensure_future(newcomer.train(1))
        await asyncio.sleep(80)
        assert not waiting.done() and newcomer.core.report().phase == "stranded"
        assert "could be reached since" in newcomer.core.catch_up.waits
        late = await swarm.trainer(seed=1)  # who comes to one that waits hears it there
        coming = asyncio.ensure_future(late.train(1))
        await asyncio.sleep(70)
        assert late.epochs == [] and late.core.report().phase == "stranded"
        newcomer.core.catch_up.note_heard(None, begins_anew=True)
        await asyncio.gather(waiting, coming)
        assert newcomer.epochs[0].epoch == 1


@within(500)
async def test_a_report_alone_delays_by_as_long_as_it_is_kept() -> None:
    async with Swarm() as swarm:
        gone = await swarm.trainer(seed=1)
        await gone.train(3)
        await swarm.kill(gone)
        newcomer, began = await swarm.trainer(seed=2), now()
        said = record(newcomer.node, Noticed)
        assert gone.node.peer_id in newcomer.core.directory.others, "its record is still there"
        await newcomer.train(1)
        assert 30 < now() - began < 70
        assert any("goes on without them after 60 s" in each.text for each in said), "the wait says when it ends"
        assert newcomer.epochs[0].samples > 0
