"""Offers of states under a key of the hash table: they say which peers donate, and which one a newcomer asks first.

A peer that shares its state serves downloads and repeats its offer; a newcomer reads the offers, prefers the higher
priority, then the higher epoch, and downloads from several donors at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Annotated

import msgspec
import psutil
from msgspec.structs import replace as replace_fields

from swarmcli.dht.node import DHTNode
from swarmcli.dht.records import OwnedSubkey
from swarmcli.errors import DHTError, NetworkError, StateDownloadError
from swarmcli.events import Event, OwnAddressesChanged, StateDonated, StateDownloaded
from swarmcli.network import wire
from swarmcli.network.addresses import bounded
from swarmcli.network.bounds import MAX_TAG_BYTES
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.wire.messages import MOST
from swarmcli.state.assembly import DownloadedState
from swarmcli.state.donor import StateDonor
from swarmcli.state.download import download_state
from swarmcli.state.snapshot import Snapshot

logger = logging.getLogger(__name__)


# Seconds
WITHDRAWAL = 2.0  # at most, to withdraw an offer
LONGEST_DOWNLOAD = 3600.0  # if the caller sets no bound


class StateOffer(msgspec.Struct, frozen=True):
    """A donor's description of its state. Decoding raises ValueError for values that no honest donor sends."""

    priority: float = 0.0  # the higher is asked first
    epoch: Annotated[int, msgspec.Meta(ge=-1, le=2**62)] = -1
    tag: bytes = b""  # lineage
    addresses: tuple[str, ...] = ()  # where the donor can be dialed
    listening: bool = True  # False: it can be reached over relays only

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "addresses", bounded(self.addresses))
        if not -MOST <= self.priority <= MOST:
            raise ValueError(f"state_sharing_priority must be {-MOST:g} to {MOST:g}, got {self.priority}")
        if len(self.tag) > MAX_TAG_BYTES:
            raise ValueError(f"a tag has at most {MAX_TAG_BYTES} bytes, got {len(self.tag)}")


class StateSharing:
    """The state of one averager, as donor and as newcomer."""

    def __init__(
        self,
        node: DHTNode,
        prefix: str,
        provide: Callable[[], Awaitable[Snapshot]],
        *,
        donates: bool | None,
        period: float,
        courtesy: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`provide` gives the present state. `donates`: as in `share`, which may change it. `period`: seconds between
        two repetitions of the offer. `courtesy`: see StateDonor."""
        self.offer = StateOffer()
        self._node = node
        self._prefix, self._key = prefix, f"{prefix}.state"
        self._provide, self._courtesy = provide, courtesy
        self._donates, self._period = donates, period
        self._offered = False  # whether others may find an offer of this peer
        self._changed = asyncio.Event()
        self._tasks = TaskOwner()
        self._donor: StateDonor | None = None  # while others may download

    def start(self) -> None:
        """Serves downloads and makes the offer known, if this peer donates.

        Raises ValueError if the endpoint shares a state of this prefix already.
        """
        self.share(self._donates)
        self._tasks.hear(self._node.endpoint.events, self._on_event)
        self._tasks.keep(self._node.endpoint.events, self._keep_offering)

    async def stop(self) -> None:
        """Takes no more downloads and withdraws the offer."""
        self.share(False)
        await self._tasks.close()
        await self._withdraw()

    def share(self, donates: bool | None) -> None:
        """Sets whether others may download from now on; None: while they can reach this peer, directly or over a
        relay. Downloads under way go on."""
        self._donates = donates
        self._changed.set()
        if donates is not False and self._donor is None:
            endpoint = self._node.endpoint

            def donated(peer: PeerID, snapshot: Snapshot, sent: int) -> None:
                endpoint.events.emit(StateDonated(peer.text, self.offer.epoch, sent))

            donor = StateDonor(endpoint, self._prefix, self._snapshot, donated=donated, courtesy=self._courtesy)
            donor.start()
            self._donor = donor
        elif donates is False and self._donor is not None:
            self._donor.close()
            self._donor = None

    def declare(self, offer: StateOffer) -> None:
        """Changes what newcomers are told about the state that this peer shares, at once."""
        self.offer = offer
        self._changed.set()

    async def donors(self) -> list[tuple[PeerID, StateOffer]]:
        """The other peers that offer a state, the best first. Among equals those that can be dialed directly come
        first, and otherwise the order is random, so that newcomers spread."""
        found = await self._node.get(self._key, latest=True)
        entries = found.value.items() if found is not None and isinstance(found.value, dict) else ()
        offers = [(subkey.owner, offer) for subkey, entry in entries if (offer := _offer(subkey, entry.value))]
        offers = [(peer, offer) for peer, offer in offers if peer != self._node.peer_id]
        self._node.endpoint.random.shuffle(offers)
        for peer, offer in offers:
            self._node.endpoint.learn(peer, offer.addresses)
        return sorted(offers, key=lambda item: (-item[1].priority, -item[1].epoch, not item[1].listening))

    async def download(self, timeout: float | None = None) -> DownloadedState | None:
        """The state of the best donors; nothing here changes. None if nobody offers any.

        Those of the highest priority and epoch are asked together; only if none of them gives it, the next ones are.
        Raises StateDownloadError, whose `attempts` name each donor, also after `timeout` seconds.
        """
        began = loop_time()
        deadline = began + (LONGEST_DOWNLOAD if timeout is None else timeout)
        offers = await self.donors()
        if not offers:
            return None
        attempts: dict[str, str] = {}
        for (_, epoch), equals in groupby(offers, key=lambda item: (item[1].priority, item[1].epoch)):
            peers = dict(equals)
            tag = next(iter(peers.values())).tag
            like = {peer: offer.listening for peer, offer in peers.items() if offer.tag == tag}
            try:
                async with asyncio.timeout_at(deadline):
                    state = await download_state(
                        self._node.endpoint,
                        self._prefix,
                        [peer for peer, listening in like.items() if listening],
                        relayed=[peer for peer, listening in like.items() if not listening],
                        version=_version(tag),  # not simply the newest: a donor may move on meanwhile
                        timeout=max(deadline - loop_time(), 0.0),
                        max_bytes=psutil.virtual_memory().total,
                    )
            except StateDownloadError as error:
                attempts |= error.attempts
                continue
            except TimeoutError:
                attempts |= {peer.text: "it had not given all of it in time" for peer in like}
                break
            lineage = peers[state.donors[0]].tag.hex() if state.donors else ""
            donors = tuple(peer.text for peer in state.donors)
            event = StateDownloaded(epoch, lineage, donors, state.received, loop_time() - began, "asked for")
            self._node.endpoint.events.emit(event)
            return state
        words = "; ".join(f"{peer[:10]}: {reason}" for peer, reason in attempts.items())
        raise StateDownloadError(f"nobody gave a complete state ({words})", attempts)

    async def _keep_offering(self) -> None:
        while True:
            self._changed.clear()
            if bool(self._node.endpoint.addresses) if self._donates is None else self._donates:
                await self._make_offer()
            else:
                await self._withdraw()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self._donates is False else self._period):
                    await self._changed.wait()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, OwnAddressesChanged):
            self._changed.set()

    async def _make_offer(self) -> None:
        expiration = self._node.endpoint.clock.now() + 2 * self._period
        self._offered = True  # even if storing fails: some replicas may have stored it
        try:
            node = self._node
            offer = replace_fields(self.offer, addresses=node.endpoint.addresses, listening=not node.client_mode)
            await node.store(self._key, wire.encode(offer), expiration, subkey=node.own_subkey())
        except (NetworkError, DHTError) as error:
            logger.debug("%s is out of reach: %s", self._key, error)

    async def _withdraw(self) -> None:
        if not self._offered:
            return
        try:
            async with asyncio.timeout(WITHDRAWAL):
                await self._node.withdraw(self._key, self._node.own_subkey())
            self._offered = False
        except (NetworkError, DHTError, TimeoutError) as error:
            logger.debug("the offer of %s stays until it expires: %s", self._key, error)

    async def _snapshot(self, version: bytes) -> Snapshot | None:
        snapshot = await self._provide()
        return replace(snapshot, version=version) if version in (b"", _version(self.offer.tag)) else None


def _version(tag: bytes) -> bytes:
    """The version under which peers ask for the state of a tag; b"" without a tag: any state that a donor has."""
    return hashlib.sha256(b"swarm state" + tag).digest() if tag else b""


def _offer(subkey: object, value: object) -> StateOffer | None:
    if not isinstance(subkey, OwnedSubkey) or not isinstance(value, bytes):
        return None
    try:
        return wire.decode(StateOffer, value)
    except msgspec.DecodeError:
        return None
