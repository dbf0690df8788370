"""Finds groups for one averager, one search at a time, and answers other peers on behalf of the search under way."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import replace

import msgspec

from swarmcli.averaging.bandwidth import LineGauge, comparable
from swarmcli.averaging.config import AveragerConfig, check_group_bits
from swarmcli.averaging.find.candidates import Memory
from swarmcli.averaging.find.declarations import Declarations, next_bits
from swarmcli.averaging.find.messages import (
    MAX_GONE,
    METHODS,
    SEARCH_BYTES,
    Answer,
    Beat,
    Bucket,
    Candidate,
    Join,
    Offer,
    Pulse,
    method_name,
    search_id,
)
from swarmcli.averaging.find.seek import Search, SearchContext
from swarmcli.averaging.group import NONCE_BYTES, Group, Member
from swarmcli.averaging.round.plan import Layout
from swarmcli.averaging.seats import MAX_SECONDS, Bid, Lines, Seats
from swarmcli.averaging.shares import reducing_shares
from swarmcli.averaging.step_control import StepControl
from swarmcli.averaging.trust import PeerTrust
from swarmcli.averaging.weights import Experience
from swarmcli.dht.node import DHTNode
from swarmcli.errors import CallRefused, DHTError, NetworkError, NoReducerError
from swarmcli.network import wire
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner, keep
from swarmcli.recent import Recent

MAX_BEGUN = 4  # last groups: this peer tells late comers of them, who may be some rounds late
WITHDRAWAL = 2.0  # seconds that an ending averager takes to withdraw its declaration

logger = logging.getLogger(__name__)


class GroupFinder:
    """Finds the groups of one averager. `search` is the search under way, if there is one."""

    def __init__(
        self,
        node: DHTNode,
        config: AveragerConfig,
        layout: Layout,
        own_terms: dict[str, str],
        trust: PeerTrust,
    ) -> None:
        """`layout`: of the averaged tensors; `own_terms` must be equal at all members. The owner of this finder starts
        and stops `trust`."""
        self.group_bits = config.initial_group_bits
        self.gauge = LineGauge(node.endpoint.passed, lambda: node.endpoint.rates.lower)
        self.search: Search | None = None
        self._endpoint = node.endpoint
        self._config, self._layout, self._own_terms = config, layout, own_terms
        self._trust = trust
        self._tasks = TaskOwner()
        self._turn = asyncio.Lock()
        self.experience = Experience(config.allreduce)
        self.lines = Lines(node.peer_id)
        self.memory = Memory()
        self._declarations = Declarations(node, config.prefix)
        self._around = SearchContext(
            node.endpoint, config.prefix, self._declarations, self.memory, self.experience, trust, self.lines
        )
        self._begun: Recent[Bucket, Group] = Recent(MAX_BEGUN)  # the last groups that began with this peer
        self._last_search, self._last_tag, self._stands = bytes(SEARCH_BYTES), b"", False
        self._searched = 0.0  # swarm time of the last search
        self._started = 0.0

    @property
    def company(self) -> list[PeerID]:
        """The leader that this peer follows, or the peers that follow it, in the search under way."""
        if self.search is None:
            return []
        leader = self.search.call.leader if self.search.call.has else None
        return [leader.peer_id] if leader is not None else list(self.search.lobby.followers)

    def start(self) -> None:
        """Begins to answer others, and declares this peer in its bucket. Raises ValueError if this endpoint has an
        averager of the same prefix."""
        self._started = loop_time()
        self._unsubscribe = self._trust.subscribe(self._on_ban)
        self._endpoint.serve(method_name(self._config.prefix, Join), Join, self._on_join)
        self._endpoint.serve(method_name(self._config.prefix, Beat), Beat, self._on_beat)
        self._declarations.say(self._me(looking=False))
        self._declaring = self._tasks.spawn(keep(self._declarations.keep_published, self._endpoint.events))

    async def stop(self) -> None:
        """Answers nobody any more and withdraws the declaration."""
        self._unsubscribe()
        self._endpoint.withdraw(*(method_name(self._config.prefix, message) for message in METHODS))
        await self.withdraw()
        await self._tasks.close()

    async def withdraw(self) -> None:
        """Takes the declaration back, until the next search. Peers that read the bucket then no longer wait for this
        one."""
        try:
            async with asyncio.timeout(WITHDRAWAL):
                await self._declarations.withdraw()
        except (NetworkError, DHTError, TimeoutError) as error:
            logger.debug("the declaration of %s stays until it expires: %s", self._config.prefix, error)

    def set_group_bits(self, bits: str) -> None:
        """Sets the bucket to look in from the next search on. Raises ValueError for anything but zeros and ones."""
        check_group_bits(bits)
        self.memory.mates = frozenset()
        self.group_bits = bits
        self._declare_idle()

    def describe(self, layout: Layout, own_terms: dict[str, str]) -> None:
        """Sets what the next searches are for; see __init__."""
        self._layout, self._own_terms = layout, own_terms

    def suspect(self, peer: PeerID, reason: str, *, work: bool = False, lost: bool = False, led: bool = False) -> None:
        """Suspects a peer, see `PeerTrust.suspect`. The next group does not wait for one that has no seat in it."""
        self._trust.suspect(peer, reason, work=work, lost=lost, led=led)
        if self._trust.has_no_seat(peer):
            self.memory.miss([peer])
            logger.info("%s: %s has no seat in the next group: %s", self._config.prefix, peer.short, reason)

    def give_up_leader(self) -> None:
        """Leaves a leader that has not begun its group though, by the reports of others, it should have: another peer
        is to lead, if one is there."""
        if self.search is not None:
            self.search.give_up_leader()

    def admit_suspects(self, waited: float) -> None:
        """The group that forms has waited `waited` seconds for samples that peers outside it report. A suspect gets its
        seat back once the wait has cost as much as the suspicion is worth, see `PeerTrust.admit`."""
        if self.search is not None and self._trust.admit(waited):
            self.search.admit()

    async def find(self, control: StepControl, gathered: bytes, deadline: float | None) -> Group:
        """Finds a group for this round; waits until an earlier search has ended.

        Raises MatchmakingError, also at `deadline` (loop time), or RoundMissed; NoReducerError when time is up and no
        member can reduce for all; FingerprintError when the others have other terms and were here first.
        """
        async with self._turn:
            while (group := await self._look(control, gathered, deadline)) is None:
                logger.debug("%s: this peer looks anew: its addresses or its line changed", self._config.prefix)
            return group

    async def _look(self, control: StepControl, gathered: bytes, deadline: float | None) -> Group | None:
        """One search; None: it is outdated, and another is to replace it. Raises what `find` raises."""
        search = self.search = self._new_search(control, gathered)
        self._declarations.say(search.me)
        self._begun.pop(search.me.bucket, None)
        try:
            async with asyncio.timeout_at(deadline):
                target, own = control.request.target, search.own
                outdated = lambda: own.is_outdated(self._me(looking=True), self.bid(target))  # noqa: E731
                group = await search.run(lambda: self._draw_up(search), outdated)
            if group is not None:
                self._remember(group, search)
            return group
        except TimeoutError:
            raise search.failure(f"no group came together within {control.request.timeout:g} s") from None
        finally:
            self.search = None
            if search.known.awaits_holders or search.me.bits:
                self._declare_idle()
            await search.jobs.close()

    def _new_search(self, control: StepControl, gathered: bytes) -> Search:
        clock, request, options = self._endpoint.clock, control.request, self._config.matchmaking
        # Ids grow from search to search even if the clock was set back: to others an older one is out of date.
        self._searched = max(clock.now(), self._searched + 1e-5)
        self._last_search = search_id(self._searched, self._endpoint.random.randbytes(8))
        self._last_tag, self._stands = request.tag, self.experience.knows(request.queue)
        if request.lookout is not None:
            options = replace(options, min_matchmaking_time=request.lookout)
        offer = Offer(
            self._config.bandwidth,
            self.gauge.claim,
            self._config.auxiliary,
            gathered,
            self.bid(request.target, request.sends),
        )
        # Counted back from now: when this peer came up, its clock may not have been corrected yet.
        since = clock.now() - (loop_time() - self._started)
        join = Join(self._me(looking=True), offer, {**request.terms, **self._own_terms}, since)
        return Search(join, options, control, self._around, self._out(request.target is not None))

    def bid(self, target: float | None, sends: bool = True) -> Bid:
        """This peer's word about its line for a preformed group, as things stand now; says nothing without a target."""
        if target is None:
            return Bid()
        return Bid(
            sends and not self._config.auxiliary, max(self.seconds_by_limits, self.lines.own, self.lines.receiving)
        )

    @property
    def seconds_by_limits(self) -> float:
        """Seconds that this peer needs at least to send in a round within the limits that its user has set; 0: no
        limit. Bytes between processes of this computer count against no limit."""
        limit = self._endpoint.rates.lower
        others = {*self.memory.holders, *self.memory.mates, *self._endpoint.connected()} - {self._endpoint.peer_id}
        if limit is None or (others and all(map(self._endpoint.is_on_this_computer, others))):
            return 0.0
        return min(self.round_bytes / limit, MAX_SECONDS)

    @property
    def round_bytes(self) -> int:
        """Most bytes that this peer sends in a round with all peers that it knows, and most that it receives."""
        return self._layout.round_bytes(len({self._endpoint.peer_id, *self.memory.holders, *self.memory.mates}))

    def _out(self, preformed: bool) -> dict[PeerID, float]:
        """Suspects that get no seat in the next group → until when (loop time). A group without a target that still
        lacks members then takes them. Nobody is out if no group could form without the suspects."""
        known = (self.memory.holders.keys() | self.memory.mates) - {self._endpoint.peer_id}
        suspects = list(filter(self._trust.has_no_seat, known))
        if 1 + len(known) - len(suspects) < max(2, self._config.matchmaking.min_group_size):
            return {}
        return {peer: math.inf if preformed else loop_time() + self._trust.costs(peer) for peer in suspects}

    def _me(self, *, looking: bool) -> Candidate:
        closed, endpoint = self._config.client_mode, self._endpoint
        return Candidate(
            endpoint.peer_id,
            self._last_search,
            self._last_tag,
            listening=not (closed or endpoint.client_mode),
            addresses=() if closed else endpoint.addresses,
            bits=self.group_bits,
            looking=looking,
            standing=self._stands,
        )

    def _declare_idle(self) -> None:
        """Declares in which bucket this peer is, and that it looks for no group now."""
        if not self._declaring.done():  # otherwise this averager has ended
            self._declarations.say(self._me(looking=False))
            self._tasks.spawn(self._declarations.publish())

    def _draw_up(self, search: Search) -> Group:
        """Makes the group of this peer and its followers. Raises NoReducerError."""
        followers = (waiting.join for waiting in search.lobby.followers.values())
        joins = [search.own, *sorted(followers, key=lambda join: search.known.rank(join.candidate))]
        offers = [join.offer for join in joins]
        speeds = comparable([offer.bandwidth for offer in offers], [offer.measured for offer in offers])
        seats = search.lobby.seats
        claims, ramps = search.lobby.progress, self.experience.ramps(join.candidate.peer_id for join in joins)
        said = [
            join.member(speed, ramps.get(join.candidate.peer_id, math.inf), claims[join.candidate.peer_id])
            for join, speed in zip(joins, speeds, strict=True)
        ]
        members, shares = self._divide(said, seats)
        nonce = self._endpoint.random.randbytes(NONCE_BYTES)
        return Group.form(search.me.tag, members, shares, nonce).signed(self._endpoint.identity)

    def _divide(self, said: list[Member], seats: Seats) -> tuple[list[Member], tuple[float, ...]]:
        """Returns the members and their shares of the reducing. A member gets none if it has failed as a reducer, if
        nobody waits for it, or if it needs longer than an epoch by its own word, unless no other member can reduce.
        Raises NoReducerError.
        """
        least, spared = self._config.min_vector_size, self._trust.has_no_work
        slow = seats.unwaited | {each.peer_id for each in said if 0 < seats.epoch < each.bid.seconds}
        able = (each.peer_id not in slow and not spared(each.peer_id) for each in said)
        members = [
            member if may_reduce else replace(member, bandwidth=0.0)
            for member, may_reduce in zip(said, able, strict=True)
        ]
        back = self._layout.back(sum(not member.auxiliary for member in said))
        with suppress(NoReducerError):
            return members, reducing_shares(members, self._layout.numel, least, back)
        try:
            return said, reducing_shares(said, self._layout.numel, least, back)
        except NoReducerError:
            # If nobody can be dialed any more, the followers are still connected with their leader.
            leader, *followers = said
            if leader.bandwidth > 0 and all(self._endpoint.is_connected(member.peer_id) for member in followers):
                return said, (1.0, *(0.0 for _ in followers))
            raise

    def _remember(self, group: Group, search: Search) -> None:
        memory, size = self.memory, self._config.matchmaking.target_group_size
        for member in group.members:
            search.known.finish(member.peer_id)
            self._endpoint.learn(member.peer_id, member.addresses)
        everyone = size is None or len(memory.holders) <= size
        memory.note_group(group, self._endpoint.clock.now(), await_mates=everyone and not self.group_bits)
        self.group_bits = next_bits(self.group_bits, group, search.me.peer_id, size or len(group))
        self._begun[search.me.bucket] = group

    # Calls of others

    async def _on_join(self, peer: PeerID, join: Join) -> Answer:
        """Answers for the search in the bucket that the message names: by a declaration that is out of date, others may
        name this peer's former one."""
        self._trust.check(peer)
        if join.candidate.peer_id != peer:
            raise CallRefused("identity", "a peer may only speak for itself")
        bucket, search = join.candidate.bucket, self.search
        if (group := self._begun.get(bucket)) is not None:
            mine = group.leader == self._endpoint.peer_id and peer in group
            if mine and group.members[group.index_of(peer)].search == join.candidate.search:
                return Answer("begins", group=msgspec.Raw(wire.encode(group)))  # its call had broken
            return Answer("begun", gone=tuple(member.peer_id for member in group.members)[:MAX_GONE])
        if search is None or search.me.bucket != bucket:
            raise CallRefused("idle", "this peer is not looking for such a group")
        call = search.on_join(join)
        if isinstance(call, Answer):
            return call
        try:
            return await call
        finally:
            if self.search is search:
                search.on_hung_up(peer, call)

    async def _on_beat(self, peer: PeerID, beat: Beat) -> Pulse:
        self._trust.check(peer)
        return self.search.on_beat(peer, beat) if self.search is not None else Pulse()

    def _on_ban(self, peer: PeerID) -> None:
        """A banned peer leads nobody and follows nobody, and nobody waits for it."""
        self.memory.mates -= {peer}
        if self.search is not None:
            self.search.drop(peer)
