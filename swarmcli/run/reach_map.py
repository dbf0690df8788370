"""Who reaches whom in a run, as far as one peer can tell: by its own connections, and by what others say of theirs.

Others are asked only while somebody looks at the map, a few at a time, and each answer is bounded: it is a claim, and
shown as the claim of who made it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from swarmcli.errors import SwarmError
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PEER_ID_BYTES, PeerID
from swarmcli.run.values import PeerStatus, ReachEdge, ReachMap, ReachNode, RunStatus, Way

if TYPE_CHECKING:
    from swarmcli.dht import DHT, DHTNode

logger = logging.getLogger(__name__)

MOST_TOLD = 256  # connections in one answer
WAYS: tuple[Way, ...] = ("direct", "relayed", "punched")


class WaysRequest(msgspec.Struct, frozen=True):
    """How are you connected with the peers of the run?"""


class WaysReply(msgspec.Struct, frozen=True):
    """Peers, one after the other; and for each the place of its way in WAYS, as a byte."""

    peers: bytes
    ways: bytes


def own_ways(endpoint: Endpoint, peers: Iterable[PeerID]) -> dict[PeerID, tuple[Way, bool]]:
    """Peers with whom this one is connected: how, and whether it dialed."""
    found: dict[PeerID, tuple[Way, bool]] = {}
    for peer in peers:
        seen = endpoint.seen(peer)
        if seen is not None:
            found[peer] = ("relayed" if seen.relayed else "punched" if seen.punched else "direct", seen.dialed)
    return found


def encoded(ways: Mapping[PeerID, tuple[Way, bool]]) -> WaysReply:
    told = list(ways.items())[:MOST_TOLD]
    return WaysReply(b"".join(peer for peer, _ in told), bytes(WAYS.index(way) for _, (way, _) in told))


def decoded(reply: WaysReply) -> dict[PeerID, Way]:
    """Nothing of an answer that is not what it should be."""
    count = len(reply.ways)
    if count > MOST_TOLD or len(reply.peers) != count * PEER_ID_BYTES or any(each >= len(WAYS) for each in reply.ways):
        return {}
    pieces = (reply.peers[at : at + PEER_ID_BYTES] for at in range(0, len(reply.peers), PEER_ID_BYTES))
    return {PeerID(piece): WAYS[way] for piece, way in zip(pieces, reply.ways, strict=True)}


class ReachMaps:
    """A context manager: inside it others are answered. They are asked when a map is wanted, by worker threads."""

    def __init__(
        self, dht: DHT, run_id: str, peers: Callable[[], Iterable[PeerID]], look: Callable[[], RunStatus]
    ) -> None:
        """`peers`: the others of the run."""
        self._dht = dht
        self._method = f"{run_id}.ways"
        self._peers = peers
        self._look = look
        self._lock = threading.Lock()
        self._told: dict[PeerID, dict[PeerID, Way]] = {}
        self._asked_at = float("-inf")

    def __enter__(self) -> ReachMaps:
        async def begin(dht: DHT, node: DHTNode) -> None:
            dht.endpoint.serve(self._method, WaysRequest, self._answer)

        self._dht.run_coroutine(begin)
        return self

    def __exit__(self, *_: object) -> None:
        async def end(dht: DHT, node: DHTNode) -> None:
            dht.endpoint.withdraw(self._method)

        if self._dht.is_alive():
            self._dht.run_coroutine(end)

    async def _answer(self, peer: PeerID, request: WaysRequest) -> WaysReply:
        return encoded(own_ways(self._dht.endpoint, self._peers()))

    def look(self) -> ReachMap:
        """The map at this moment; what others told may be some seconds old."""
        with self._lock:
            if time.monotonic() - self._asked_at >= 10.0:  # every page that is open asks
                self._told = self._ask_all()
                self._asked_at = time.monotonic()
            told = self._told
        own = own_ways(self._dht.endpoint, self._peers())
        return map_of(self._look(), self._dht.peer_id, own, told)

    def _ask_all(self) -> dict[PeerID, dict[PeerID, Way]]:
        connected = list(own_ways(self._dht.endpoint, self._peers()))[:24]

        async def ask(dht: DHT, node: DHTNode) -> list[dict[PeerID, Way]]:
            return await asyncio.gather(*(self._ask(peer) for peer in connected))

        try:
            answers = self._dht.run_coroutine(ask)
        except SwarmError as error:
            logger.debug("nobody could be asked for a map: %s", error)
            return {}
        assert isinstance(answers, list)
        return {peer: answer for peer, answer in zip(connected, answers, strict=True) if answer}

    async def _ask(self, peer: PeerID) -> dict[PeerID, Way]:
        try:
            reply = await self._dht.endpoint.call(peer, self._method, WaysRequest(), WaysReply, timeout=2.0)
        except SwarmError:  # it is gone, or an older one that does not know the question
            return {}
        return decoded(reply)


def map_of(
    status: RunStatus, me: PeerID, own: Mapping[PeerID, tuple[Way, bool]], told: Mapping[PeerID, Mapping[PeerID, Way]]
) -> ReachMap:
    """Of each pair one edge: by this peer's own connection, or else as one of the two says."""
    shown = {peer.peer_id: peer for peer in status.peers}
    edges: dict[frozenset[str], ReachEdge] = {}
    for peer, (way, dialed) in own.items():
        source, target = (me.text, peer.text) if dialed else (peer.text, me.text)
        edges[frozenset((source, target))] = ReachEdge(source=source, target=target, way=way, told_by=me.text)
    for teller, ways in told.items():
        for peer, way in ways.items():
            pair = frozenset((teller.text, peer.text))
            # What somebody says of a connection with this peer, this peer knows; of strangers to the run it is no news.
            if peer != me and peer != teller and peer.text in shown:
                edges.setdefault(pair, ReachEdge(source=teller.text, target=peer.text, way=way, told_by=teller.text))
    return ReachMap(
        nodes=tuple(_node(peer) for peer in status.peers),
        edges=tuple(edge for edge in edges.values() if edge.source in shown and edge.target in shown),
        sentence=status.reach,
    )


def _node(peer: PeerStatus) -> ReachNode:
    known = peer.health not in ("left", "lost")
    return ReachNode(
        peer=peer.peer_id,
        name=peer.name,
        role=peer.role,
        me=peer.me,
        dialable=not peer.client_mode if known else None,
        health=peer.health,
    )
