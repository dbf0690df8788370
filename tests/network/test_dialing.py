"""Dialing a peer at several addresses: the first answer wins, and nothing of the others is left."""

from __future__ import annotations

import asyncio

import pytest

from swarmcli.errors import AddressError, ConnectError
from swarmcli.network import Identity, PeerID, Purpose
from swarmcli.network.dialer import dial_any
from swarmcli.network.limits import NetworkLimits
from tests.simulation import now, simulated

PEER = Identity.from_seed(1).peer_id


class FakeConnection:
    def __init__(self, address: str) -> None:
        self.address = address
        self.aborted = False

    def abort(self, reason: str) -> None:
        self.aborted = True


class FakeTransport:
    """An address is a number of seconds after which it answers; a negative one refuses after as many."""

    def __init__(self) -> None:
        self.made: list[FakeConnection] = []
        self.tried: list[str] = []

    async def dial(self, address: str, expected: PeerID, purpose: Purpose, timeout: float) -> FakeConnection:
        self.tried.append(address)
        if address == "nonsense":
            raise AddressError("no address")
        await asyncio.sleep(abs(float(address)))
        if float(address) < 0:
            raise ConnectError(f"{address} refused", address=address)
        self.made.append(FakeConnection(address))
        return self.made[-1]

    async def dial_any(self, *addresses: str) -> FakeConnection:
        return await dial_any(lambda each: self.dial(each, PEER, Purpose.CONTROL, 10), addresses)  # type: ignore[arg-type,return-value]

    def left_open(self) -> list[str]:
        return [connection.address for connection in self.made if not connection.aborted]


@simulated
async def test_a_silent_address_does_not_hold_up_the_next() -> None:
    transport = FakeTransport()
    assert (await transport.dial_any("100", "200", "0.1")).address == "0.1"
    assert now() == pytest.approx(2 * NetworkLimits().dial_stagger + 0.1) and transport.left_open() == ["0.1"]


@simulated
async def test_of_two_that_answer_together_one_is_kept() -> None:
    transport = FakeTransport()
    winner = await transport.dial_any("0.5", "0.25")
    assert len(transport.made) == 2 and transport.left_open() == [winner.address]
