"""Trainers with unlike versions of torch are one run: nobody is refused or doubted for the version that it has."""

from __future__ import annotations

import pytest
import torch

from swarmcli.errors import StateDownloadError
from swarmcli.events import DriftMeasured, Event, PeerRefused
from swarmcli.state import download
from swarmcli.testing import virtual_time
from tests.optim.optim_swarm import Swarm, Trainer, adamw, decay, digests, momentum, record, together
from tests.optim.other_torch import OldLambdaLR, old_adamw
from tests.suites import soak


def old_decay(optimizer: torch.optim.Optimizer) -> OldLambdaLR:
    return OldLambdaLR(optimizer, lambda epoch: 1 / (1 + 0.1 * epoch))


def new_adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


OLD = {"make": old_adamw, "scheduler": old_decay}
NEW = {"make": new_adamw, "scheduler": decay}


def only_donor(donor: Trainer, others: list[Trainer], newcomer: Trainer) -> None:
    """The others tell their roots, and have no time for a download until somebody was refused."""
    for other in others:
        other.core.exchange.donor._max_downloads = 0

    def have_time(event: Event) -> None:
        for other in others if isinstance(event, PeerRefused) else ():
            other.core.exchange.donor._max_downloads = 4

    newcomer.node.endpoint.events.subscribe(have_time)


@pytest.mark.parametrize("few", [OLD, *soak([NEW])], ids=["2.6 is rare", "2.13 is rare"])
def test_a_newcomer_takes_the_state_from_the_one_peer_with_another_version(few: dict) -> None:
    many = NEW if few is OLD else OLD

    async def main() -> None:
        async with Swarm() as swarm:
            peers = [await swarm.trainer(seed=1, target=48, **kind) for kind in (few, many, many)]
            await together(*(trainer.train(2) for trainer in peers))
            newcomer = await swarm.trainer(seed=2, target=48, **many)
            only_donor(peers[0], peers[1:], newcomer)
            refused, drift = record(newcomer.node, PeerRefused), record(newcomer.node, DriftMeasured)
            assert await newcomer.core.join()
            await together(*(trainer.train(4) for trainer in [*peers, newcomer]))
            assert len(digests([*peers, newcomer])) == 1
            assert not refused and not any(event.strays for event in drift)

    virtual_time.run(main(), timeout=300)


def test_a_state_that_does_not_fit_says_which_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIBRARY", "torch 2.6.0")

    async def main() -> None:
        async with Swarm() as swarm:
            peers = [await swarm.trainer(seed=1, make=adamw) for _ in range(2)]
            await together(*(trainer.train(2) for trainer in peers))
            newcomer = await swarm.trainer(seed=2, make=momentum, load_state_timeout=5.0)
            there = torch.__version__.partition("+")[0]
            with pytest.raises(StateDownloadError, match=rf"betas.*it has torch {there}, this peer torch 2\.6\.0"):
                await newcomer.core.join()

    virtual_time.run(main(), timeout=300)
