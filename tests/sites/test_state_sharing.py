"""States that go from sites to plain peers, from plain peers to sites, and from a site to one of another size."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from swarmcli.compression import NoCompression
from swarmcli.dht import DHT
from swarmcli.errors import StateDownloadError
from swarmcli.events import Event, Events, PeerRefused, StateDownloaded
from swarmcli.network import Endpoint, Identity, PeerID
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.optim import Optimizer
from swarmcli.optim.modes.base import StateOptions
from swarmcli.optim.modes.gradients import Mode
from swarmcli.optim.peers.exchange import StateExchange
from swarmcli.optim.state.replica import InPlace, Replica
from swarmcli.optim.state.training_state import CapturedState, TrainingState
from swarmcli.sites.links import receive_tensors
from swarmcli.sites.statistics import SendStatistics, ShareOfStatistics
from swarmcli.state.snapshot import PinnedState
from swarmcli.state.unnamed_file import UnnamedFile
from tests.sharding.processes import Worlds
from tests.sharding.threads import in_threads, ranks
from tests.sites.site_state import advance, expect_equal, plain_state, site_state
from tests.sites.site_training import OPTIMIZERS, TIGHT, Plan, in_thread, model, schedule, site_rank, train, weights
from tests.suites import soak

LARGE = [(400, 500), (7,), (500, 300), (), (4000,)]  # a state of some 5 MB, in 80 chunks


class Peer:
    """One peer of a swarm, reduced to its state."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.events: list[Event] = []
        events = Events()
        events.subscribe(self.events.append)
        self.endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"), events=events)
        self.replica = Replica(state, InPlace(state.parameters))
        self.captured = asyncio.Event()
        mode = Mode(state=StateOptions(load_compression=NoCompression()))
        here = {"endpoint": self.endpoint, "run_id": "run", "network_of": bytes, "is_relayed": lambda peer: False}
        directory = SimpleNamespace(**here)
        claims = SimpleNamespace(directory=directory)
        self.exchange = StateExchange(self.replica, mode, claims)  # type: ignore[arg-type]
        self._capture, self.replica.capture = self.replica.capture, self._note_capture  # type: ignore[method-assign]

    async def _note_capture(self) -> CapturedState:
        captured = await self._capture()
        self.captured.set()
        return captured

    async def take_over(self, *donors: Peer) -> tuple[str, ...]:
        """Downloads the state that the donors have now; who gave something of it."""
        for donor in donors:
            self.endpoint.learn(donor.endpoint.peer_id, donor.endpoint.addresses)
        return await self.take_over_from(donors[0].state, [donor.endpoint.peer_id for donor in donors])

    async def take_over_from(self, like: TrainingState, donors: list[PeerID]) -> tuple[str, ...]:
        await self.exchange.download(like.position, donors, timeout=20, reason="for a test")
        return next(event.donors for event in reversed(self.events) if isinstance(event, StateDownloaded))


@asynccontextmanager
async def peers(*states: TrainingState) -> AsyncIterator[list[Peer]]:
    made = [Peer(state) for state in states]
    for peer in made:
        await peer.endpoint.start()
        peer.exchange.donor.start()
    try:
        yield made
    finally:
        for peer in made:
            peer.exchange.donor.close()
            await peer.endpoint.close()


@pytest.mark.parametrize("kind", ["adafactor", *soak(["adamw", "averaged"])])
@ranks(2)
def test_from_a_site_to_a_plain_peer_and_back(kind: str) -> None:
    with site_state(kind) as site:
        if site is None:
            return
        newcomer, returning = plain_state(kind, seed=3), plain_state(kind, seed=4)

        async def main() -> None:
            async with peers(site, newcomer, returning) as (at_site, first, second):
                advance(site, 3)
                await first.take_over(at_site)
                expect_equal(newcomer.capture(), site.capture())
                for state in (site, newcomer):
                    advance(state, 2, seed=5)
                expect_equal(newcomer.capture(), site.capture())
                advance(newcomer, 2, seed=6)
                assert await at_site.take_over(first) == (first.endpoint.peer_id.text,)
                expect_equal(newcomer.capture(), site.capture())
                await second.take_over(at_site)  # which hands on what it has downloaded
                expect_equal(returning.capture(), site.capture())
                for state in (site, newcomer):
                    advance(state, 2, seed=7)
                expect_equal(newcomer.capture(), site.capture())

        asyncio.run(main())


@ranks(2)
def test_a_site_and_a_plain_peer_give_parts_of_one_state() -> None:
    with site_state("adamw") as site:
        if site is None:
            return
        twin, newcomer = plain_state("adamw"), plain_state("adamw", seed=3)
        for state in (site, twin):
            advance(state, 3)

        async def main() -> None:
            async with peers(site, twin, newcomer) as (first, second, third):
                await third.take_over(first, second)
                assert not any(isinstance(event, PeerRefused) for event in third.events)
                one, other = [await peer.exchange._provide(site.position.lineage) for peer in (first, second)]
                assert PinnedState(one).manifest == PinnedState(other).manifest
                expect_equal(twin.capture(), newcomer.capture())

        asyncio.run(main())


def lose_a_rank(silently: bool) -> list[str]:
    """A rank dies while all copy what is donated. Returns what the newcomer is told."""

    def dying(self: ShareOfStatistics, command: SendStatistics) -> None:
        if silently:
            receive_tensors(self._site.group, [torch.empty(1)], 0)  # which rank 0 does not send
        os.kill(os.getpid(), signal.SIGKILL)

    ShareOfStatistics._send = dying  # type: ignore[method-assign]
    with site_state("adamw", shapes=LARGE, timeout=1.0) as site:
        if site is None:
            return []
        advance(site, 2)
        newcomer = plain_state("adamw", seed=3, shapes=LARGE)
        before = newcomer.capture().clone()

        async def main() -> list[str]:
            async with peers(site, newcomer) as (first, second):
                with pytest.raises(StateDownloadError) as failed:
                    await second.take_over(first)
                assert not any(isinstance(event, PeerRefused) for event in second.events)
                return list(failed.value.attempts.values())

        reasons = asyncio.run(main())
    expect_equal(before, newcomer.capture())
    return reasons


@pytest.mark.e2e
@pytest.mark.parametrize("silently", [False, True])
def test_a_rank_that_is_lost_ends_the_download_by_name(worlds: Worlds, silently: bool) -> None:
    survivor, _ = worlds(2, grouped=False).outcomes(lose_a_rank, silently)
    assert survivor.error is None and "cannot be read" in survivor.value[0] and "rank 1" in survivor.value[0]


@ranks(2)
def test_a_full_disk_costs_a_donation_and_nothing_else(tmp_path: Path) -> None:
    with site_state("adamw", spool=tmp_path / "gone") as site:
        if site is None:
            return
        twin, newcomer = plain_state("adamw"), plain_state("adamw", seed=3)
        for state in (site, twin):
            advance(state, 2)

        async def main() -> None:
            async with peers(site, newcomer) as (first, second):
                with pytest.raises(StateDownloadError, match="cannot be read"):
                    await second.take_over(first)

        asyncio.run(main())
        with patch.object(UnnamedFile, "write", side_effect=OSError("no space")):
            site.statistics.spool = tmp_path
            with pytest.raises(OSError, match="no space"):
                site.capture()
        for state in (site, twin):
            advance(state, 1)
        expect_equal(twin.capture(), site.capture())


def join_a_site_late() -> list[Any]:
    """A site has trained by itself when a plain peer comes; then they train together. Weights at both times."""
    plan, own = Plan(kind="adamw", sizes=(6, 6), zero=True, turns=1), dist.get_rank()
    with site_rank(plan) as rank:
        train(rank.steps, rank.net, own, 6, epochs=3, turns=1)
        if own:
            train(rank.steps, rank.net, own, 4, epochs=5, turns=1)
            return [weights(rank.net)]
        net, seen = model(7), [weights(rank.net)]
        with DHT(rank.dht.get_visible_addresses(), start=True, host="127.0.0.1") as dht:
            made, settings = OPTIMIZERS[plan.kind]
            optimizer = made(net.parameters(), **settings)
            peer = Optimizer(dht=dht, run_id="site", target_batch_size=12, optimizer=optimizer, scheduler=schedule)
            coming = in_thread(peer.load_state_from_peers)
            while coming.is_alive():
                rank.steps.step(batch_size=0)  # in which the other rank gives its share
            seen.append(weights(net))
            plain = in_thread(lambda: train(peer, net, 2, 4, epochs=5, turns=1))
            train(rank.steps, rank.net, own, 4, epochs=5, turns=1)
            plain.join()
            peer.shutdown()
    return [weights(rank.net), weights(net), *seen]


def test_a_peer_that_comes_late_has_the_state_of_a_site() -> None:
    leader, member = in_threads(2, join_a_site_late)
    site, plain, before, downloaded = leader
    assert torch.equal(before, downloaded) and not torch.equal(before, site)
    assert torch.equal(member[0], site)
    torch.testing.assert_close(plain, site, **TIGHT)
