"""What a command asks the monitors of a run, without taking part: nobody but itself for a moment, and without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import pydantic
from pydantic import ConfigDict, Field

from swarmcli.dht import DHT, DHTNode, OwnedSubkey
from swarmcli.errors import NetworkError
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.limits import MAX_ADDRESSES
from swarmcli.network.membership import Membership
from swarmcli.run.contributions import Entries, agreed
from swarmcli.run.statements import BOOK_SECONDS, Attestation, Page, entries_of, fetch_attestation, fetch_book

T = TypeVar("T")


class Report(pydantic.BaseModel):
    """What is shown of a peer's report. Reading all of it would take the optimizer's package, and so torch."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    name: str = Field(max_length=64)
    role: Literal["trainer", "auxiliary", "monitor"]
    epoch: int = Field(ge=0, lt=1 << 48)
    team: str = Field("", max_length=64)
    keeps: bool = False
    addresses: list[str] = Field(max_length=MAX_ADDRESSES)


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks at a closed run without taking part in it. `identity` is whoever uses it that closes it."""

    identity: Identity
    membership: Membership


async def reports(node: DHTNode, run_id: str) -> dict[PeerID, Report]:
    """What the peers of a run say of themselves now: strangers' words, so of 10,000 peers at most."""
    found: dict[PeerID, Report] = {}
    for subkey, entry in list((await node.follow(f"{run_id}_peers").refresh()).items())[:10_000]:
        with suppress(pydantic.ValidationError):
            if isinstance(subkey, OwnedSubkey):
                found[subkey.owner] = Report.model_validate(entry.value)
    return found


@dataclass(frozen=True)
class Given:
    """What the monitors of a run say of what each has given. `failed`: monitors that gave no book, and why."""

    run_id: str
    entries: Entries = field(default_factory=dict)
    books: dict[PeerID, Page] = field(default_factory=dict)
    failed: dict[PeerID, str] = field(default_factory=dict)
    present: dict[PeerID, Report] = field(default_factory=dict)


async def ask_for_books(node: DHTNode, run_id: str) -> Given:
    """Of each number what most monitors hold, where three answer; of two the fuller book."""
    present = await reports(node, run_id)
    books: dict[PeerID, Page] = {}
    failed: dict[PeerID, str] = {}

    async def ask(monitor: PeerID) -> None:
        try:
            async with asyncio.timeout(BOOK_SECONDS):  # of a page for which one may wait there are many
                books[monitor] = await fetch_book(node.endpoint, monitor, run_id)
        except TimeoutError:
            failed[monitor] = f"it took more than {BOOK_SECONDS:.0f} s"
        except (NetworkError, ValueError) as error:
            failed[monitor] = str(error)

    await asyncio.gather(*map(ask, _monitors(node, present)))
    entries = agreed([entries_of(books[monitor]) for monitor in sorted(books)])
    return Given(run_id, entries, books, failed, present)


async def ask_for_attestations(node: DHTNode, run_id: str, peer: PeerID) -> Sequence[Attestation]:
    """What the monitors sign of this peer's part; those that do not answer are left out."""
    found: list[Attestation] = []

    async def ask(monitor: PeerID) -> None:
        with suppress(NetworkError, ValueError):
            # The monitor may have to be dialed through a relay.
            found.append(await fetch_attestation(node.endpoint, monitor, run_id, peer, timeout=8.0))

    await asyncio.gather(*map(ask, _monitors(node, await reports(node, run_id))))
    return sorted(found, key=lambda each: each.monitor)


def visit(contacts: Sequence[str], action: Callable[[DHTNode], Awaitable[T]], visitor: Visitor | None = None) -> T:
    """Does this as somebody who only looks on, for a moment; `visitor`: who looks at a closed run. Raises
    BootstrapError when no contact answers."""
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
        return cast(T, dht.run_coroutine(lambda _, node: action(node)))
    finally:
        dht.shutdown()


def _monitors(node: DHTNode, present: dict[PeerID, Report]) -> list[PeerID]:
    """Those that keep the run's book, eight at most: monitors first, then trainers that write checkpoints."""
    keeping = [peer for peer, its in present.items() if its.role == "monitor" or (its.role == "trainer" and its.keeps)]
    monitors = sorted(keeping, key=lambda peer: present[peer].role != "monitor")[:8]
    for monitor in monitors:
        with suppress(ValueError):
            node.endpoint.learn(monitor, present[monitor].addresses)
    return monitors
