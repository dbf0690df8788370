"""Finds groups for one averager, one search at a time, and remembers from each what helps the next."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from swarmcli.averaging.bandwidth import LinkGauge, comparable
from swarmcli.averaging.config import AveragerConfig, check_group_bits
from swarmcli.averaging.control import RoundRequest, StepControl
from swarmcli.averaging.group import NONCE_BYTES, Group, Member
from swarmcli.averaging.matchmaking.attendance import Attendance
from swarmcli.averaging.matchmaking.bits import next_bits
from swarmcli.averaging.matchmaking.candidates import SEARCH_BYTES, Candidate, Roll, search_id
from swarmcli.averaging.matchmaking.declarations import Board
from swarmcli.averaging.matchmaking.matchmaking import Search
from swarmcli.averaging.matchmaking.moves import Goal, Offer
from swarmcli.averaging.matchmaking.post import Post, Unheard
from swarmcli.averaging.matchmaking.rendezvous import Rendezvous
from swarmcli.averaging.matchmaking.seeking import Seeker
from swarmcli.averaging.shares import reducing_shares
from swarmcli.dht.node import DHTNode
from swarmcli.errors import DHTError, NetworkError
from swarmcli.network.identity import PeerID
from swarmcli.network.tasks import TaskOwner

WITHDRAWAL_TIMEOUT = 2.0  # seconds that an ending averager takes to withdraw its declaration

logger = logging.getLogger(__name__)


class GroupFinder:
    """The matchmaking of one averager."""

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        total_size: int,
        own_terms: dict[str, str],
        *,
        unheard: Unheard,
        parted: Callable[[Group], None],
    ) -> None:
        """`total_size` is in elements; `own_terms` must be equal at all members. `unheard` is called when a follower
        could not be told that its group begins, `parted` with a group that begins though this peer takes no part."""
        self.listening = not (node.client_mode if config.client_mode is None else config.client_mode)
        self.group_bits = config.initial_group_bits
        self._node = node
        self._endpoint = node.endpoint
        self._config = config
        self._total_size = total_size
        self._own_terms = own_terms
        self.link = LinkGauge(node.endpoint.passed)
        self._parted = parted
        self._tasks = TaskOwner()
        timeout = config.matchmaking.request_timeout
        self._post = Post(node.endpoint, config.prefix, self._tasks, timeout=timeout, unheard=unheard)
        self._rendezvous = Rendezvous(node.endpoint, config.prefix, parted)
        self._turn = asyncio.Lock()
        self._finished: dict[PeerID, bytes] = {}
        self._attendance = Attendance()
        self._crew: frozenset[PeerID] = frozenset()
        self._expects = False  # the crew was named by `expect`, and nobody else is waited for
        self._newcomer = True
        self._board = Board(node, config.prefix)
        self._last_search = bytes(SEARCH_BYTES)
        self._last_tag = b""
        self._started = 0.0
        self._searched = 0.0  # swarm time of the last search

    def start(self) -> None:
        """Begins to answer others, and declares that this peer holds the prefix. Raises ValueError if this endpoint
        has an averager of the same prefix."""
        self._started = asyncio.get_running_loop().time()
        self._rendezvous.start()
        self._board.say(self._me(looking=False))
        self._declaring = self._tasks.spawn(self._board.keep_published())

    async def stop(self) -> None:
        """Answers nobody any more and withdraws the declaration."""
        self._rendezvous.stop()
        try:
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT):
                await self._board.withdraw()
        except (NetworkError, DHTError, TimeoutError) as error:
            logger.debug("the declaration of %s stays until it expires: %s", self._config.prefix, error)
        await self._tasks.close()

    def set_group_bits(self, bits: str) -> None:
        """The bucket to look in from the next search on. Raises ValueError."""
        check_group_bits(bits)
        self._crew = frozenset()
        self.group_bits = bits
        self._declare_idle()

    def describe(self, total_size: int, own_terms: dict[str, str]) -> None:
        """What is averaged from the next search on; see __init__."""
        self._total_size, self._own_terms = total_size, own_terms

    def doubt(self, peers: Iterable[bytes]) -> None:
        """These spoiled a round: the next group does not wait for them, though they may come."""
        doubtful = [PeerID(peer) for peer in peers]
        self._crew -= frozenset(doubtful)
        self._attendance.note_missed(doubtful)

    def expect(self, peers: Iterable[PeerID]) -> None:
        """The next group waits for these while they can be reached, until its time is up, and for no other holder."""
        self._crew, self._expects = frozenset(peers), True

    async def find(self, control: StepControl, gathered: bytes, deadline: float | None) -> Group:
        """A group for this round; waits until an earlier search has ended.

        Raises MatchmakingError, also at `deadline` (loop time), or RoundMissed; NoReducerError when time is up and
        nobody of those who are there can reduce for all; FingerprintError when the others have other terms and were
        here first.
        """
        async with self._turn:
            search = self._new_search(control)
            offer = self._offer(control.request, gathered)
            self._board.say(search.me)
            seeker = self._rendezvous.open(Seeker(search, self._post, self._board, offer, control))
            try:
                async with asyncio.timeout_at(deadline):
                    group = await seeker.run(lambda ready: self._draw_up(ready, offer))
            except TimeoutError:
                if seeker.group is None:
                    raise seeker.failure(f"no group came together within {control.request.timeout:g} s") from None
                group = seeker.group  # it began in the last moment, and its members know
            except asyncio.CancelledError:
                if seeker.group is not None:
                    self._parted(seeker.group)
                raise
            finally:
                self._rendezvous.close(seeker.group)
                if seeker.group is not None:
                    self._remember(seeker.group, search)
                if search.awaits_holders or search.me.bits:
                    self._declare_idle()
            return group

    def _new_search(self, control: StepControl) -> Search:
        request, clock = control.request, self._endpoint.clock
        loop_time = asyncio.get_running_loop().time()
        self._last_search, self._last_tag = self._search_id(), request.tag
        me = self._me(looking=True)
        opens_at = -math.inf
        if control.scheduled_time is not None:
            opens_at = loop_time + control.scheduled_time - clock.now()
        options = self._config.matchmaking
        if request.lookout is not None:
            options = replace(options, min_matchmaking_time=request.lookout)
        return Search(
            me,
            Roll(me.bucket, me.peer_id, self._finished),
            self._attendance,
            options,
            Goal(opens_at, request.target, request.only_one, self._crew, self._expects, control.allow_retries),
            now=loop_time,
            connected=self._endpoint.is_connected,
        )

    def _search_id(self) -> bytes:
        """Ids grow from search to search even if the clock was set back: to others an older one is out of date."""
        self._searched = max(self._endpoint.clock.now(), self._searched + 1e-5)
        return search_id(self._searched, self._endpoint.random.randbytes(8))

    def _offer(self, request: RoundRequest, gathered: bytes) -> Offer:
        age = asyncio.get_running_loop().time() - self._started
        return Offer(
            terms={**request.terms, **self._own_terms},
            gathered=gathered,
            bandwidth=self._config.bandwidth,
            measured=self.link.claim,
            auxiliary=self._config.auxiliary,
            # Counted back from now, since the clock of a peer that has just come up may not be corrected yet.
            since=self._endpoint.clock.now() - age,
            newcomer=self._newcomer,
        )

    def _me(self, *, looking: bool) -> Candidate:
        addresses = self._endpoint.addresses if self.listening else ()
        last = self._last_search, self._last_tag
        return Candidate(self._endpoint.peer_id, *last, self.listening, addresses, self.group_bits, looking)

    def _declare_idle(self) -> None:
        """Others see in which bucket this peer is, and that it looks for no group now."""
        if not self._declaring.done():  # otherwise this averager has ended
            self._board.say(self._me(looking=False))
            self._tasks.spawn(self._board.publish())

    def _draw_up(self, search: Search, offer: Offer) -> Group:
        """The group of this peer and its followers. Raises NoReducerError."""
        followers = search.gathering.by_rank()
        speeds = comparable(
            [offer.bandwidth, *(follower.joining.bandwidth for follower in followers)],
            [offer.measured, *(follower.joining.measured for follower in followers)],
        )
        me = search.me
        brought = [(me, offer.auxiliary, offer.gathered)]
        brought += [(f.candidate, f.joining.auxiliary, f.joining.gathered) for f in followers]
        members = [
            Member(who.peer_id, who.listening, auxiliary, speed, who.addresses, gathered)
            for (who, auxiliary, gathered), speed in zip(brought, speeds, strict=True)
        ]
        shares = reducing_shares(members, self._total_size, self._config.min_vector_size)
        return Group.form(me.tag, members, shares, self._endpoint.random.randbytes(NONCE_BYTES))

    def _remember(self, group: Group, search: Search) -> None:
        self._newcomer = False
        for member in group.members:
            search.roll.finish(member.peer_id)
            self._endpoint.learn(member.peer_id, member.addresses)
        size = self._config.matchmaking.target_group_size
        everyone = size is None or len(self._attendance.holders) <= size
        peers = frozenset(member.peer_id for member in group.members)
        self._attendance.note_present(peers)
        self._crew, self._expects = peers if everyone and not self.group_bits else frozenset(), False
        self.group_bits = next_bits(self.group_bits, group, search.me.peer_id, size or len(group))
