"""Downloads while donors die, freeze, thaw, drip, lose connections, differ and lie, drawn from seeds."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from swarmcli.events import PeerRefused
from swarmcli.state import snapshot as snapshot_module
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.snapshot import PinnedState, Snapshot
from tests.averaging.states import CHUNK, Swarm, drip, make_state
from tests.simulation import simulated

DONORS, NEWCOMERS = 5, 3
SPEED = 100_000  # bytes per second of every link


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_MIN_CHUNK", CHUNK)


def unlike(chance: random.Random) -> dict[str, torch.Tensor]:
    """The usual state with some bits flipped."""
    state = make_state()
    bits = state["weight"].view(torch.int32).view(-1)
    for _ in range(chance.randint(1, 5)):
        bits[chance.randrange(len(bits))] ^= 1
    return state


async def disturb(swarm: Swarm, chance: random.Random) -> None:
    """Faults at random times, to all donors but the last one, which stays sound."""
    for _ in range(chance.randint(1, 6)):
        await asyncio.sleep(chance.uniform(0, 1.5))
        victim = swarm.endpoints[chance.randrange(DONORS - 1)]
        match chance.choice(["kill", "freeze", "thaw", "pull a cable"]):
            case "kill":
                swarm.network.kill(victim.peer_id)
            case "freeze":
                swarm.network.freeze(victim.peer_id)
            case "thaw":
                swarm.network.thaw(victim.peer_id)
            case _:
                for channel in list(victim._streams.channels()):
                    channel.connection.abort("a cable was pulled")


def is_one_of(got: DownloadedState, states: list[Snapshot]) -> bool:
    return any(all(torch.equal(got.tensors[name], state.tensors[name]) for name in got.tensors) for state in states)


@pytest.mark.parametrize("seed", range(60))
@simulated
async def test_what_comes_out_is_one_donors_state_and_it_comes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    honest = PinnedState.chunk
    liar = chance.randrange(DONORS - 1) if chance.random() < 0.5 else None
    async with Swarm(DONORS, NEWCOMERS, bandwidth=SPEED, max_downloads=2) as swarm:
        for index in range(DONORS):
            if chance.random() < 0.4:
                swarm.states[index] = Snapshot(b"v1", {"epoch": 3}, unlike(chance))

        def lie(self: PinnedState, chunk: int) -> list[memoryview]:
            pieces = honest(self, chunk)
            lies = liar is not None and self.snapshot is swarm.states[liar] and self.known_digest(chunk) is not None
            return [memoryview(bytes(len(piece))) for piece in pieces] if lies and chunk % 3 == 0 else pieces

        if liar is not None:
            state = swarm.states[liar]
            swarm.states[liar] = Snapshot(state.version, state.metadata, state.tensors)  # nobody else's
            monkeypatch.setattr(PinnedState, "chunk", lie)
        if chance.random() < 0.5:
            dripping = chance.sample(swarm.ids[:-1], chance.randint(1, DONORS - 1))
            drip(monkeypatch, dripping, chance.randrange(60_000))
        downloads = [asyncio.create_task(swarm.download(number, timeout=300)) for number in range(NEWCOMERS)]
        await disturb(swarm, chance)
        for got in await asyncio.gather(*downloads):
            assert is_one_of(got, swarm.states)
        refused = {event.peer for event in swarm.events if isinstance(event, PeerRefused) and event.what == "state"}
        assert refused <= ({swarm.ids[liar].text} if liar is not None else set())
        for endpoint in swarm.endpoints:
            swarm.network.thaw(endpoint.peer_id)
