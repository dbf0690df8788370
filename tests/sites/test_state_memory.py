"""Rank 0 never has the whole state in memory: not while it donates, and not while it downloads."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from swarmcli.network import Endpoint, Identity
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.optim.state.training_state import TrainingState, read_position
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.distant import loaded
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import download_state
from swarmcli.state.snapshot import Snapshot
from tests.sharding.processes import Worlds
from tests.sites.site_state import advance, plain_state, site_state
from tests.sites.test_state_sharing import peers

MIB = 1 << 20
PARAMETERS = 32  # MiB
SHAPES = [(512, 512)] * PARAMETERS
WHOLE = 4 * PARAMETERS  # with the three statistics of AMSGrad
OWN = 3 * PARAMETERS // 4  # MiB of statistics at each of four ranks
CHUNKS = 32  # MiB; those on their way at both ends, encrypted and not, one piece between ranks, and what else grows


@contextmanager
def peak() -> Iterator[list[float]]:
    """MiB by which this process grows inside the block, at most."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what has been freed would be used again, and growth would not be seen
    this, ended, most = psutil.Process(), threading.Event(), [0.0]
    before = this.memory_info().rss

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], (this.memory_info().rss - before) / MIB)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


async def donate(site: TrainingState, spool: Path) -> DownloadedState:
    """The site's state, in a file of a peer in the same process."""
    async with peers(site) as (donor,), plain_endpoint() as endpoint:
        endpoint.learn(donor.endpoint.peer_id, donor.endpoint.addresses)
        ids, version = [donor.endpoint.peer_id], site.position.lineage
        return await download_state(endpoint, "run", ids, version=version, timeout=30, spool=spool)


async def download(site: TrainingState, state: DownloadedState) -> None:
    """Into the site, from a peer in the same process that has the state in a file."""

    async def provide(version: bytes) -> Snapshot:
        return Snapshot(version, state.metadata, state.contents)

    async with peers(site) as (newcomer,), plain_endpoint() as endpoint:
        donor = StateDonor(endpoint, "run", provide)
        donor.start()
        newcomer.endpoint.learn(endpoint.peer_id, endpoint.addresses)
        wanted = read_position(state.metadata)
        await newcomer.exchange.download(wanted, [endpoint.peer_id], timeout=30, reason="for a test")
        donor.close()


async def warm_up() -> None:
    """Has everything imported, and threads started, that a download needs."""
    state = plain_state("amsgrad")
    async with peers(state, plain_state("amsgrad", seed=1)) as (donor, newcomer):
        await newcomer.take_over(donor)


@asynccontextmanager
async def plain_endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.close()


def sharing(directory: str) -> list[float] | None:
    with site_state("amsgrad", shapes=SHAPES, spool=Path(directory)) as site:
        if site is None:
            return None
        asyncio.run(warm_up())
        advance(site, 1)
        with peak() as donating:
            state = asyncio.run(donate(site, Path(directory)))
        advance(site, 1, seed=2)
        with peak() as downloading:
            asyncio.run(download(site, state))
        captured = site.capture()
        assert captured.metadata == state.metadata and list(captured.tensors) == list(state.contents)
        for name, tensor in captured.tensors.items():
            assert torch.equal(loaded(tensor), loaded(state.contents[name]))
        everything = 0.0
        for _ in range(2):  # the system may take back pages of the mapped file meanwhile, which hides growth
            with peak() as growth:
                here = state.tensors
            assert len(here) == len(captured.tensors)
            everything = max(everything, growth[0])
            del here
        return [donating[0], downloading[0], everything]


@pytest.mark.e2e
def test_rank_0_never_has_the_whole_state_in_memory(worlds: Worlds, tmp_path: Path) -> None:
    donating, downloading, everything = worlds(4).run(sharing, str(tmp_path))[0]
    assert everything > 0.9 * WHOLE, "growth is measured"
    assert donating < PARAMETERS + OWN + CHUNKS < 0.7 * WHOLE
    assert downloading < OWN + CHUNKS, "parameters are filled in place"
