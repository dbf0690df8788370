"""One search of one peer for a group: it asks a leader and stays on the call, or leads those that call it.

    looking ──Join up the ranks──▶ on a leader's call ──the group begins──▶ done
       │  ▲                              │
       │  └── ask another, full, lost ◀──┘
       └──no peer ranks before─▶ leading (tells those behind it) ──complete, full or time up──▶ done

Peers only follow those that rank before them, so they cannot follow each other in a circle.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.control import StepControl
from swarmcli.averaging.find.candidates import Candidates, Conflicts, Entry, FollowPlan, Memory, Settling, make_plan
from swarmcli.averaging.find.declarations import Declarations
from swarmcli.averaging.find.lobby import Lobby, beat_interval
from swarmcli.averaging.find.messages import (
    MAX_GONE,
    MAX_REASON,
    METHODS,
    Answer,
    Beat,
    Candidate,
    Join,
    Pulse,
    differing_terms,
    method_name,
    place_in,
)
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.seats import Lines
from swarmcli.averaging.trust import PeerTrust
from swarmcli.averaging.weights import Experience
from swarmcli.errors import (
    CallRefused,
    FingerprintError,
    MatchmakingError,
    NetworkError,
    NoReducerError,
    RoundMissed,
    SwarmError,
    UnknownMethod,
)
from swarmcli.events import PeerRefused
from swarmcli.network import wire
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time, set_within
from swarmcli.network.prefix import Prefix
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.wire.codec import decode_body

FIRST_READ = 0.1  # seconds between the first two reads of the declarations at most; each pause is twice the last …
LAST_READ = 4.0  # … up to this
BELIEF = 2.0  # seconds for which "I follow another leader" or "my group is full" is believed
AGAIN = 0.3  # seconds before a peer that still believes in a lost leader is asked again
ON_THE_CALL = 3600.0  # seconds, after which a follower's call is made anew
TOLD_AT_ONCE = 16  # peers behind this one that hear at the same time that it leads
BEAT_TRIPS = 10.0  # round trips that the answer to a beat may take, beside request_timeout
MIN_PUSH = 0.05  # seconds between two reports of progress …
PUSHES_PER_SECOND = 100.0  # … and from all followers of a leader together
OVERDUE = 0.75  # seconds after the end of the time, at which a leader that could have begun must have
ACCUSED = 30.0  # seconds for which a leader is out that reports accuse: they may count samples of a peer that is gone
MAX_RENEWALS = 3  # times that a leader with too few members keeps its followers for another try
LAST_MOMENT = 1.0  # seconds before the end of the time, in which a group without a reducer ends the search
TICK = 1.0  # seconds between looks at the clock when nothing happens

logger = logging.getLogger(__name__)


class OutdatedError(Exception):
    """This peer's addresses or its links have changed: it begins another search."""


class Search:
    """One peer's search for one group. `leader` is the peer on whose call it is; None while it looks or leads."""

    def __init__(
        self,
        own: Join,
        memory: Memory,
        options: MatchmakingOptions,
        control: StepControl,
        endpoint: Endpoint,
        prefix: str,
        declarations: Declarations,
        experience: Experience,
        trust: PeerTrust,
        lines: Lines,
        *,
        out: Mapping[PeerID, float],
        outdated: Callable[[], bool],
    ) -> None:
        """`own`: this peer's request to join. `out`: peers that get no seat, until when. `outdated`: whether another
        search is to replace this one."""
        now = loop_time()
        self.own, self.me, self.request, self.options = own, own.candidate, control.request, options
        queue, only_one, since = self.request.queue, self.request.only_one, self.request.since
        self.known = Candidates(self.me, memory, only_one=only_one, since=since, queue=queue, out=out)
        self.rank = self.known.rank(self.me)
        self.lobby = Lobby(own, memory, options, self.request.target, now, lines, experience.count)
        self.settling = Settling(options, now)
        self.conflicts = Conflicts()
        self.leader: Candidate | None = None
        self.leader_has = 0  # members in the leader's group, as it last said; 0: it has not said that this one is in it
        self.group: Group | None = None  # once it has begun
        self._memory, self._control, self._endpoint, self._prefix = memory, control, endpoint, prefix
        self._declarations, self._outdated = declarations, outdated
        self._experience, self._trust = experience, trust
        self._own_entry = Entry(self.me, self.rank, since=now)
        self._referred: Candidate | None = None  # the leader that another peer has named; asked before all others
        self._call: asyncio.Task[Answer] | None = None  # to the leader
        self._telling: set[PeerID] = set()  # peers behind this one that are being told
        self._renewals = 0  # how often its time was up with too few members
        self._unreduced = ""  # why no member of the leader's group can reduce, as it last said
        self._scheduled: float | None = None
        self._waited_in_vain = False  # for a peer that had not come when the group began
        self._jobs = TaskOwner()
        self._wake, self._read_due, self._progress_due = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._watched: dict[PeerID, asyncio.Future[str]] = {}  # peer → done when its connection ends

    async def run(self, draw_up: Callable[[], Group]) -> Group:
        """Looks until there is a group. `draw_up` makes it if this peer comes to lead.

        Raises MatchmakingError, NoReducerError, FingerprintError, RoundMissed, OutdatedError. However it ends, the
        leader and the followers of a group that did not begin hear of it.
        """
        self._control.listener = self._on_control
        try:
            self._jobs.keep(self._endpoint.events, self._keep_declared, self._keep_followers)
            while self.group is None:
                self._wake.clear()
                if self._outdated():
                    raise OutdatedError
                self._take_from_control()
                if (leader := self._whom_to_follow(loop_time())) is not None:
                    self.group = await self._follow(leader)
                elif (wake_at := self._lead(loop_time())) is None:
                    self.group = self._begin(draw_up)
                else:
                    self._watch()
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(wake_at):
                            await self._wake.wait()
            return self.group
        finally:
            self._control.listener = None
            for lost in self._watched.values():
                lost.cancel()
            self._watched.clear()
            self.lobby.send_all(CallRefused("idle", "this peer does not look for a group any more"))
            await self._jobs.close()

    def wake(self) -> None:
        """Something has changed that the search does not hear of."""
        self._wake.set()

    # Calls of others

    def on_join(self, join: Join) -> Answer | asyncio.Future[Answer]:
        """A peer asks to follow this one, or says that it leads; a future: its call stays open."""
        peer, now = join.candidate.peer_id, loop_time()
        self._wake.set()
        if keys := differing_terms(self.own.terms, join.terms):
            self._note_conflict(peer, keys, join.since)
            return Answer("terms", keys=keys, since=self.own.since)
        self._learn(join.candidate, now, direct=True)
        if self.group is not None:
            return Answer("begun", gone=tuple(member.peer_id for member in self.group.members)[:MAX_GONE])
        if self.known.is_out(peer, now):
            return Answer("full", self.me)
        if self.leader is not None and self.leader.peer_id != peer:
            return Answer("ask", self.me, self.leader)
        if join.leads or self.known.rank(join.candidate) < self.rank:
            return Answer("lead", self.me)
        if not (self.me.dialable or self._may_lead_undialed(peer, now)):
            return Answer("cannot_lead", self.me)
        if peer not in self.lobby.followers:
            if self.lobby.is_full or not self._has_seat_for(peer):
                return Answer("full", self.me)
            if self.options.target_group_size is not None:
                self.settling.news(now)  # peers that other leaders turned away get the time to find this group
        return self.lobby.admit(join, now)

    def on_beat(self, peer: PeerID, beat: Beat) -> Pulse:
        """A follower is there, and has done so much."""
        self._wake.set()
        if not self.lobby.report(peer, beat.progress):
            return Pulse()
        return Pulse(len(self.lobby), self.lobby.blocked[:MAX_REASON])

    def _has_seat_for(self, peer: PeerID) -> bool:
        """Whether the network of this peer has seats left: identities cost nothing, and addresses of unlike networks
        do. Local networks and this machine are not counted."""
        limit, network = self.options.seats_per_network, self._network_of(peer)
        if limit is None or network is None or network.shared:
            return True
        return sum(self._network_of(other) == network for other in self.lobby.followers) < limit

    def _network_of(self, peer: PeerID) -> Prefix | None:
        return self._endpoint.prefix(peer)

    def _may_lead_undialed(self, peer: PeerID, now: float) -> bool:
        """Where no peer can be dialed, connected ones lead each other."""
        connected = self._endpoint.is_connected(peer)
        return connected and not any(entry.candidate.dialable for entry in self.known.present(now))

    # What this peer hears of others

    def drop(self, peer: PeerID) -> None:
        """This peer must not be in the group, as a leader, a follower or a candidate."""
        if self.group is None:
            self._on_lost(peer)
            self._refused(peer)

    def admit(self, peers: Iterable[PeerID]) -> None:
        """These may be in the group after all."""
        for peer in peers:
            self.known.out.pop(peer, None)
        self._wake.set()

    def give_up_leader(self) -> None:
        """By the reports the leader should have begun by now. If nobody else is left, it stays."""
        now = loop_time()
        if self.leader is not None and any(each.peer_id != self.leader.peer_id for each in self.known.present(now)):
            self._give_up(self.leader.peer_id, "it gathered a group and did not begin it", now + ACCUSED)

    def _learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> None:
        if self.known.learn(candidate, now, direct=direct):
            self.settling.news(now)
            self.lobby.seen.add(candidate.peer_id)

    def _on_read(self, declared: list[Candidate], duration: float) -> None:
        """The declarations of this bucket were read; it took `duration` seconds to declare and read."""
        now = loop_time()
        if declared:  # this peer's own at least, unless the table is out of reach
            self.lobby.mates -= self._memory.holders.keys() - {each.peer_id for each in declared}
            self._memory.read(declared)
        for candidate in declared:
            self._learn(candidate, now)
            known = self.known.entries.get(candidate.peer_id)
            if known is not None and not candidate.looking and candidate.search >= known.candidate.search:
                self.known.finish(candidate.peer_id)
        size = self.options.target_group_size
        # At the start not all peers have declared themselves, so a few may not be all.
        crowd = size is not None and (len(declared) > size or not self.lobby.mates)
        self.settling.on_read(now, duration, crowd=crowd)
        self._wake.set()

    def _on_lost(self, peer: PeerID) -> None:
        """The connection to this peer is gone, or the peer could not be reached, or was silent for too long."""
        now = loop_time()
        self.lobby.remove(peer)
        self.lobby.mates.discard(peer)
        self._memory.note_missed([peer])
        self.known.fail(peer, now, 2 * self.options.request_timeout)
        self._hang_up(peer)
        self._wake.set()

    def _refused(self, peer: PeerID) -> None:
        """This peer has other terms, or looks for no group: it is out until it begins anew."""
        self.lobby.remove(peer)
        self.known.finish(peer)
        self._wake.set()

    def _note_conflict(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        if self.conflicts.note(peer, keys, since):
            reason = f"its recipe differs from ours in: {', '.join(keys)}"
            self._endpoint.events.emit(PeerRefused(peer.text, reason, what="group"))
        self._refused(peer)

    def _give_up(self, leader: PeerID, why: str, until: float = math.inf) -> None:
        """This leader leads badly, and is out until then."""
        logger.info("%s: %s leads badly: %s", self._prefix, leader.short, why)
        self.known.out[leader] = until
        self._trust.suspect(leader, why, led=True)
        self._on_lost(leader)

    def _hang_up(self, peer: PeerID) -> None:
        if self._call is not None and self.leader is not None and self.leader.peer_id == peer:
            self._call.cancel()

    def _heed(self, peer: PeerID, answer: Answer) -> None:
        """What an answer without a group says of the peer that gave it."""
        now = loop_time()
        if answer.verdict == "terms":
            self._note_conflict(peer, answer.keys, answer.since)
            return
        self.conflicts.agreed = True
        if answer.candidate is not None and answer.candidate.peer_id == peer:
            self._learn(answer.candidate, now, direct=True)
        entry, to, until = self.known.entries.get(peer), answer.to, now + BELIEF
        match answer.verdict:
            case "ask" if to is not None and to.bucket == self.me.bucket and to.peer_id != self.me.peer_id:
                if self.known.is_out_of_reach(to.peer_id, now):
                    self.known.pass_over([peer], now + AGAIN)  # it will notice soon that its leader is lost
                    return
                if entry is not None:
                    entry.follows, entry.follows_until = to.peer_id, until
                if (leader := self.known.entries.get(to.peer_id)) is not None:
                    leader.follows_until = 0.0  # a peer that others follow leads, in spite of earlier words
                if not self.known.is_out(to.peer_id, now) and not self._trust.is_banned(to.peer_id):
                    self._referred = to
            case "full" if entry is not None:
                entry.full_until = until
            case "begun":
                self.lobby.mates.discard(peer)
                self.lobby.seen.update((peer, *answer.gone))
                self.known.note_begun(peer, answer.gone, until)
            case "ask" | "lead":
                pass
            case _:
                self.known.pass_over([peer], until)

    # Following

    def _whom_to_follow(self, now: float) -> Candidate | None:
        """The leader that this peer should ask; None if it should lead, or can only wait."""
        if now < self.settling.ready_at:
            return None
        plan = self._plan(now)
        leads = self.me.peer_id in plan.leaders
        referred, self._referred = self._referred, None
        if referred is not None and not (plan.crowded and leads):
            if self.known.rank(referred) < self.rank:
                return referred
            self._tell(referred)
        if leads:
            return None
        leaders = [self.known.entries[peer] for peer in plan.nearest(self.me.peer_id)]
        able = (each for each in leaders if each.rank < self.rank and max(each.full_until, each.follows_until) <= now)
        leader = next(able, None)
        return leader.candidate if leader is not None else None

    def _plan(self, now: float) -> FollowPlan:
        ranked = sorted([*self.known.present(now), self._own_entry], key=lambda entry: entry.rank)
        coming = math.inf if self.me.bits else len(self.lobby.awaited())
        coming = coming if self.lobby.awaits_holders else 0
        return make_plan(ranked, self.options, now, self._endpoint.is_connected, coming)

    async def _follow(self, leader: Candidate) -> Group | None:
        """Asks a leader and stays on the call until its group begins; None: this peer has to look on."""
        peer = leader.peer_id
        self.leader, self.leader_has = leader, 0
        self.lobby.send_all(Answer("ask", self.me, leader))
        self._endpoint.learn(peer, leader.addresses)
        self._call = asyncio.ensure_future(self._ask(peer, leads=False, timeout=ON_THE_CALL))
        beats = asyncio.ensure_future(self._keep_beating(peer))
        try:
            await asyncio.wait({self._call, beats}, return_when=asyncio.FIRST_COMPLETED)
            if not self._call.done() or self._call.cancelled():
                return None  # this peer hangs up
            return self._begun(peer, self._call.result())
        except NetworkError as error:
            self._on_no_answer(peer, error)
            return None
        finally:
            self.leader, call, self._call = None, self._call, None
            for task in (call, beats):
                task.cancel()
            await asyncio.wait({call, beats})
            self._read_due.set()

    async def _ask(self, peer: PeerID, *, leads: bool, timeout: float) -> Answer:
        patience = max(self.lobby.close_at - loop_time(), 0.0)
        progress = self.lobby.own_progress
        join = msgspec.structs.replace(self.own, patience=patience, progress=progress, leads=leads)
        answer: Answer = await self._send(peer, join, timeout)
        return answer

    async def _send(self, peer: PeerID, message: Join | Beat, timeout: float) -> Any:
        """Sends a message to the same averager at another peer and returns the answer. Raises NetworkError."""
        kind = type(message)
        return await self._endpoint.call(
            peer, method_name(self._prefix, kind), message, METHODS[kind][1], timeout=timeout
        )

    def _begun(self, peer: PeerID, answer: Answer) -> Group | None:
        """The answer of the leader: its group, if it is as it should be."""
        if answer.verdict != "begins":
            self._heed(peer, answer)
            return None
        group: Group = decode_body(Group, answer.group, "join")
        if why := self._why_not(group, peer):
            self._give_up(peer, why)
            return None
        if banned := [member.peer_id for member in group.members if self._trust.is_banned(member.peer_id)]:
            for culprit in banned:  # the leader does not know of the ban, or lies
                self._trust.show(culprit, [peer])
            self._on_lost(peer)
            return None
        if answer.waited_in_vain:
            self._memory.note_missed(self.lobby.awaited().difference(member.peer_id for member in group.members))
        return group

    def _why_not(self, group: Group, leader: PeerID) -> str:
        """What is wrong with a group; "" if nothing is."""
        own = self.me
        if group.leader != leader or group.tag != own.tag or own.peer_id not in group:
            return "it began another group than that of its followers"
        entry = group.members[group.index_of(own.peer_id)]
        # If a leader could bring this peer into an old group again, after a restart or from another averager, this peer
        # would sign two unlike values under one id, which is evidence against it.
        if entry.search != own.search or not group.has_listed(group.group_id, group.listed):
            return "it began an old group, or did not sign it"
        if not self._is_as_offered(entry):
            return "it listed this peer otherwise than offered"
        if math.fsum(group.claims.values()) < (self.request.target or 0.0):
            return "it began a group without enough samples"
        if not (self._is_in_turn(group) and self._experience.agrees(group, self.request.queue)):
            return "it listed its members out of turn, or with other weights"
        return ""

    def _is_as_offered(self, entry: Member) -> bool:
        """Whether the leader lists this peer as it has offered. Otherwise a trainer listed as an auxiliary would get no
        average, one with an altered bid no seat, and one listed as undialable would meet no other member."""
        own, offer = self.me, self.own.offer
        said = entry.listening, entry.addresses, entry.standing, entry.auxiliary, entry.gathered, entry.bid
        offered = own.listening, own.addresses, own.standing, offer.auxiliary, offer.gathered, offer.bid
        as_told = entry.claim <= self._control.progress and (entry.bandwidth == 0 or offer.bandwidth != 0)
        return said == offered and as_told

    def _is_in_turn(self, group: Group) -> bool:
        """Whether the leader lists the followers as they rank here, so that they lead in turn. Newcomers come last, in
        any order. A leader that is a newcomer knows no order: it may not lead members of that round that can lead."""
        queue, (leader, *others) = self.request.queue, group.members
        ranks = [(not each.dialable, place_in(queue, each.peer_id, each.standing)) for each in others]
        if queue and not leader.standing:
            return not any(each.standing and each.dialable for each in others)
        return not queue or ranks == sorted(ranks)

    async def _keep_beating(self, leader: PeerID) -> None:
        """Tells the leader this peer's progress, and hears that it lives. Returns when this peer is to hang up."""
        pause = beat_interval(0)
        while True:
            await set_within(self._progress_due, pause)
            self._progress_due.clear()
            self._take_from_control()
            beat = Beat(self.me.search, self._control.progress)
            try:
                pulse: Pulse = await self._send(leader, beat, self._patience(leader))
            except NetworkError as error:
                self._on_no_answer(leader, error)
                return
            self.leader_has, self._unreduced = pulse.members, pulse.unreduced
            now = loop_time()
            if self._outdated():
                return
            if now >= self._overdue_at(now):
                if self.leader_has >= self.options.min_group_size and not self._unreduced:
                    self._give_up(leader, "it gathered a group and did not begin it")
                else:
                    self._on_lost(leader)
                return
            # This pause ends at once when this peer stops to wait for its group.
            pushed = max(MIN_PUSH, pulse.members / PUSHES_PER_SECOND)
            await set_within(self._control.urgent, pushed)
            self._control.urgent.clear()
            pause = beat_interval(pulse.members) - pushed

    def _overdue_at(self, now: float) -> float:
        """When a leader that does not begin has held this peer for too long."""
        if self.lobby.target is not None:
            return math.inf
        too_few = self.request.allow_retries and self.leader_has < self.options.min_group_size
        if too_few and now >= self.lobby.close_at and self._renewals < MAX_RENEWALS:
            self.lobby.renew(now)  # the leader looks on, and so does this peer
            self._renewals += 1
        return self.lobby.close_at + OVERDUE

    def _patience(self, peer: PeerID) -> float:
        """Seconds that an answer to a beat, or a beat, may take."""
        return max(self.options.request_timeout, BEAT_TRIPS * (self._endpoint.round_trip(peer) or 0.0))

    def _on_no_answer(self, peer: PeerID, error: NetworkError) -> None:
        logger.debug("%s cannot be met: %s", peer.short, error)
        if isinstance(error, CallRefused | UnknownMethod):
            self._refused(peer)
        else:
            self._on_lost(peer)

    # Leading

    def _lead(self, now: float) -> float | None:
        """Tells the expected peers that this one leads; when to look again. None: the group begins now. Raises what
        ends the search."""
        lobby, settled_at = self.lobby, self.settling.settled_at
        if self._unreduced and now > lobby.close_at - LAST_MOMENT:
            raise NoReducerError(self._unreduced)  # no time is left to find another leader
        # Before things have settled no peer knows into which groups all will divide, so this one expects nobody.
        plan = self._plan(now) if now >= self.settling.ready_at else FollowPlan([], {}, crowded=True)
        expected = lobby.expected(plan, self.known, now)
        hopes = [until for entry in expected if (until := lobby.hoped_for_until(entry)) > now]
        told_at = self._tell_expected(expected, now)
        awaited = {peer for peer in lobby.awaited() if not self.known.is_out(peer, now)}
        due_at = lobby.due_at(
            now,
            missing=bool(hopes or awaited or self.me.bits),
            # The last round's mates do not settle again.
            settled_at=now if lobby.mates and lobby.mates <= lobby.followers.keys() else settled_at,
        )
        begins = due_at <= now and lobby.has_enough
        # Later searches do not wait for peers that are absent when the group begins or its time is up.
        absent = awaited.union(() if plan.crowded else (entry.peer_id for entry in expected))
        self._waited_in_vain = bool(begins and absent and not lobby.is_full)
        if absent and (begins or now >= lobby.close_at) and not lobby.is_full:
            self._memory.note_missed(absent)
        if now >= settled_at and self.known.outweigh(lobby.followers):
            raise RoundMissed("the round has begun without this peer")
        if begins:
            return None
        if (conflict := self._conflict(now)) is not None:
            raise conflict
        if due_at <= now:
            if not self.request.allow_retries:
                least = self.options.min_group_size
                raise self.failure(f"only {len(lobby)} of at least {least} peers came together in time")
            lobby.renew(now)
        times = due_at, lobby.close_at, settled_at, self.settling.ready_at, told_at, self.known.next_change(now), *hopes
        return min([now + TICK, *(when for when in times if when > now)])

    def _tell_expected(self, expected: list[Entry], now: float) -> float:
        """Tells the peers behind this one that it leads: the first at once, since it may lead the others, and these
        when they could have come by themselves. Returns when to tell more."""
        again, next_at = self.options.request_timeout / 2, math.inf
        for place, entry in enumerate(expected):
            due = max(entry.told_at + again, entry.since + (self.settling.quiet if place else 0.0))
            able = entry.candidate.dialable or self._endpoint.is_connected(entry.peer_id)
            if due > now:
                next_at = min(next_at, due)
            elif able and entry.rank > self.rank and len(self._telling) < TOLD_AT_ONCE:
                entry.told_at = now
                self._tell(entry.candidate)
        return next_at

    def _tell(self, candidate: Candidate) -> None:
        """Tells a peer behind this one that it leads, unless it hears that already."""
        if candidate.peer_id not in self._telling:
            self._telling.add(candidate.peer_id)
            self._jobs.spawn(self._tell_one(candidate))

    async def _tell_one(self, candidate: Candidate) -> None:
        peer = candidate.peer_id
        self._endpoint.learn(peer, candidate.addresses)
        try:
            self._heed(peer, await self._ask(peer, leads=True, timeout=self.options.request_timeout))
        except NetworkError as error:
            self._on_no_answer(peer, error)
        finally:
            self._telling.discard(peer)
            self._wake.set()

    def _begin(self, draw_up: Callable[[], Group]) -> Group | None:
        """The group of this peer and its followers, who hear of it; None: nobody can reduce, and there is time to wait
        for one more. Raises NoReducerError."""
        try:
            group = draw_up()
        except NoReducerError as error:
            self.lobby.blocked = str(error)
            if self.lobby.target is not None or loop_time() >= self.lobby.close_at:
                raise
            return None
        encoded = msgspec.Raw(wire.encode(group))
        self.lobby.send_all(Answer("begins", self.me, group=encoded, waited_in_vain=self._waited_in_vain))
        return group

    def joins(self) -> list[Join]:
        """The joins of the members if the group began now, this peer's first, then by rank."""
        followers = (waiting.join for waiting in self.lobby.followers.values())
        return [self.own, *sorted(followers, key=lambda join: self.known.rank(join.candidate))]

    def failure(self, reason: str) -> SwarmError:
        """The error that says why no group came together."""
        if unreduced := self.lobby.blocked or self._unreduced:
            return NoReducerError(unreduced)
        dialable = [self.me.dialable, *(entry.candidate.dialable for entry in self.known.present(loop_time()))]
        if any(dialable) or len(dialable) < self.options.min_group_size:
            return MatchmakingError(reason)
        there = f"none of {len(dialable)} peers that look for a group can be dialed, directly or over a relay"
        return NoReducerError(f"{there}, so nobody can reduce for the others")

    def _conflict(self, now: float) -> FingerprintError | None:
        """The error of a newcomer that is in a run of other terms.

        No peer that it has asked has its terms, and none is left to ask. Two peers that were here before must agree; it
        believes a single one when the time is up. So it takes more than one word to drive a newcomer away.
        """
        if not self._memory.newcomer or self.lobby.followers or now < self.settling.settled_at:
            return None
        if not self.conflicts.cover(self.known.present(now)):
            return None
        in_time = now < self._own_entry.since + self.options.min_matchmaking_time
        return self.conflicts.error(self.own.since, enough=2 if in_time else 1)

    # Beside that

    def _watch(self) -> None:
        """A follower or a mate is lost as soon as its connection ends, or at once if there is none."""
        wanted = self.lobby.mates | self.lobby.followers.keys()
        for peer in self._watched.keys() - wanted:
            self._watched.pop(peer).cancel()
        for peer in sorted(wanted - self._watched.keys()):  # sets differ in order from process to process
            lost = self._watched[peer] = self._endpoint.lost(peer)
            lost.add_done_callback(partial(self._on_connection_lost, peer))

    def _on_connection_lost(self, peer: PeerID, lost: asyncio.Future[str]) -> None:
        if self._watched.get(peer) is lost:  # otherwise this was cancelled, or another one watches the peer
            del self._watched[peer]
            self._on_lost(peer)

    def _take_from_control(self) -> None:
        self.lobby.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            self.lobby.schedule(loop_time() + scheduled - self._endpoint.clock.now())

    def _on_control(self) -> None:
        """The user has reported progress, or changed the schedule."""
        self._progress_due.set()
        self._wake.set()

    async def _keep_declared(self) -> None:
        """Declares this peer, then reads the other declarations: often at first, and not while it is on a call."""
        started, pause = loop_time(), 0.0
        await self._declarations.publish()
        while True:
            if self.leader is None:
                declared = await self._declarations.read(self.me.bits)
                self._on_read(list(declared), loop_time() - started)
            if self._read_due.is_set() or not self.settling.calm:
                pause = 0.0
            self._read_due.clear()
            pause = min(2 * pause, LAST_READ) or min(FIRST_READ, self.settling.trip)
            await set_within(self._read_due, pause)

    async def _keep_followers(self) -> None:
        """Gives up followers of whom nothing is heard any more."""
        await asyncio.sleep(beat_interval(len(self.lobby)))
        for peer in self.lobby.look(self._patience):
            self._on_lost(peer)
