"""Questions of a command to the monitors of a run. The command takes no part in the run: it joins the network for a
moment, with an identity of its own and without torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import pydantic
from pydantic import ConfigDict, Field

from swarmcli.dht import DHT, DHTNode, OwnedSubkey
from swarmcli.network.bounds import MAX_ADDRESSES
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.membership import Membership
from swarmcli.run.contributions import Attestation, Tables, fetch_attestation, fetch_tables, writers_among

T = TypeVar("T")


class VisitorReport(pydantic.BaseModel):
    """The part of a peer's report that a command reads: to read all of it would import the optimizer, and so torch."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str = Field(max_length=64)
    role: Literal["trainer", "auxiliary", "monitor"]
    epoch: int = Field(ge=0, lt=1 << 48)
    team: str = Field("", max_length=64)
    keeps: bool = False
    addresses: list[str] = Field(max_length=MAX_ADDRESSES)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who looks at a closed run without taking part in it. Whoever made `identity` closes it."""

    identity: Identity
    membership: Membership


async def reports(node: DHTNode, run_id: str) -> dict[PeerID, VisitorReport]:
    """Reads the peers' reports of themselves, of 10,000 peers at most: they are strangers' words."""
    found: dict[PeerID, VisitorReport] = {}
    for subkey, entry in list((await node.follow(f"{run_id}_peers").refresh()).items())[:10_000]:
        with suppress(pydantic.ValidationError):
            if isinstance(subkey, OwnedSubkey):
                found[subkey.owner] = VisitorReport.model_validate(entry.value)
    return found


@dataclass(frozen=True)
class AskedTables:
    """The tables that peers that keep count told a command, and the peers that are there."""

    run_id: str
    tables: Tables
    present: dict[PeerID, VisitorReport]


async def ask_for_tables(node: DHTNode, run_id: str) -> AskedTables:
    present = await reports(node, run_id)
    return AskedTables(run_id, await fetch_tables(node.endpoint, _writers(node, present), run_id), present)


async def ask_for_attestation(node: DHTNode, run_id: str, peer: PeerID) -> Attestation | None:
    """Asks the peers that keep count for a peer's row; a relay may be needed to reach one. None: none of them
    answers."""
    writers = _writers(node, await reports(node, run_id))
    return await fetch_attestation(node.endpoint, writers, run_id, peer, timeout=8.0)


def visit(contacts: Sequence[str], action: Callable[[DHTNode], Awaitable[T]], visitor: Visitor | None = None) -> T:
    """Joins the network for a moment and runs `action`; `visitor`: who looks at a closed run. Raises BootstrapError
    when no contact answers."""
    identity = visitor.identity if visitor is not None else None
    dht = DHT(
        contacts,
        start=False,
        client_mode=True,
        port_mapping=False,
        startup_timeout=15.0,
        identity=identity,
    )
    try:
        dht.membership = visitor.membership if visitor is not None else None
        dht.run_in_background()
        return dht.run_coroutine(lambda _, node: action(node))
    finally:
        dht.shutdown()


def _writers(node: DHTNode, present: dict[PeerID, VisitorReport]) -> list[PeerID]:
    writers = writers_among(present)
    for writer in writers:
        with suppress(ValueError):
            node.endpoint.learn(writer, present[writer].addresses)
    return writers
