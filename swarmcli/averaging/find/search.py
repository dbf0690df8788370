"""One search of one peer for a group: it asks a leader and stays on the call (`seek.py`), or leads those that call it
(`lobby.py`).

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

import msgspec

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.control import StepControl
from swarmcli.averaging.find.candidates import Candidates, Conflicts, Entry, FollowPlan, Memory, Settling, make_plan
from swarmcli.averaging.find.declarations import Declarations
from swarmcli.averaging.find.lobby import Lobby, beat_interval
from swarmcli.averaging.find.messages import MAX_GONE, MAX_REASON, Answer, Beat, Candidate, Join, Pulse, differing_terms
from swarmcli.averaging.find.seek import LeaderCall, what_is_wrong
from swarmcli.averaging.group import Group
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
from swarmcli.network.task_owner import TaskOwner
from swarmcli.network.wire.codec import decode_body

FIRST_READ = 0.1  # seconds between the first two reads of the declarations at most; each pause is twice the last …
LAST_READ = 4.0  # … up to this
BELIEF = 2.0  # seconds for which "I follow another leader" or "my group is full" is believed
AGAIN = 0.3  # seconds before a peer that still believes in a lost leader is asked again
TOLD_AT_ONCE = 16  # peers behind this one that hear at the same time that it leads
ACCUSED = 30.0  # seconds for which a leader is out that reports accuse: they may count samples of a peer that is gone
LAST_MOMENT = 1.0  # seconds before the end of the time, in which a group without a reducer ends the search
TICK = 0.25  # seconds between looks at the clock, and at who is still connected, when nothing happens

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
        self.call = LeaderCall(own, self.lobby, options, control, endpoint, prefix)
        self.group: Group | None = None  # once it has begun
        self._memory, self._control, self._endpoint, self._prefix = memory, control, endpoint, prefix
        self._declarations, self._outdated = declarations, outdated
        self._experience, self._trust = experience, trust
        self._own_entry = Entry(self.me, self.rank, since=now)
        self._referred: Candidate | None = None  # the leader that another peer has named; asked before all others
        self._telling: set[PeerID] = set()  # peers behind this one that are being told
        self._waited_in_vain = False  # for a peer that had not come when the group began
        self._jobs = TaskOwner()
        self._wake, self._read_due = asyncio.Event(), asyncio.Event()

    async def run(self, draw_up: Callable[[], Group]) -> Group:
        """Looks until there is a group. `draw_up` makes it if this peer comes to lead.

        Raises MatchmakingError, NoReducerError, FingerprintError, RoundMissed, OutdatedError. However it ends, the
        leader and the followers of a group that did not begin hear of it.
        """
        self._control.listener = self._on_control
        try:
            self._jobs.keep(self._endpoint.events, self._keep_declared, self._keep_in_touch)
            while self.group is None:
                self._wake.clear()
                if self._outdated():
                    raise OutdatedError
                self.call.take_from_control()
                if (leader := self._whom_to_follow(loop_time())) is not None:
                    self.group = await self._follow(leader)
                elif (wake_at := self._lead(loop_time())) is None:
                    self.group = self._begin(draw_up)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(wake_at):
                            await self._wake.wait()
            return self.group
        finally:
            self._control.listener = None
            self._look_for_mates()
            self.lobby.send_all(CallRefused("idle", "this peer does not look for a group any more"))
            await self._jobs.close()

    @property
    def leader(self) -> Candidate | None:
        """The peer on whose call this one is; None while it looks or leads."""
        return self.call.leader

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
            if self.lobby.is_full or not self.lobby.has_seat_for(peer, self._endpoint.prefix):
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

    def on_hung_up(self, peer: PeerID, call: asyncio.Future[Answer]) -> None:
        """A follower's call has ended."""
        self.lobby.remove(peer, call)
        if self.group is None and not self._endpoint.is_connected(peer):
            self._on_lost(peer)
        self._wake.set()

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
        self.call.hang_up(peer)
        self._wake.set()

    def _look_for_mates(self) -> None:
        """Mates are lost as soon as their connections end, or at once if there are none."""
        for lost in sorted(mate for mate in self.lobby.mates if not self._endpoint.is_connected(mate)):
            self._on_lost(lost)

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
                if self.known.is_passed_over(to.peer_id, now):
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
        self.lobby.send_all(Answer("ask", self.me, leader))
        try:
            end = await self.call.stay(leader)
        except NetworkError as error:
            self._on_no_answer(peer, error)
            return None
        finally:
            self._read_due.set()
        if end == "overdue":
            self._give_up(peer, "it gathered a group and did not begin it")
        elif end == "lost":
            self._on_lost(peer)
        return self._begun(peer, end) if isinstance(end, Answer) else None

    def _begun(self, peer: PeerID, answer: Answer) -> Group | None:
        """The answer of the leader: its group, if it is as it should be."""
        if answer.verdict != "begins":
            self._heed(peer, answer)
            return None
        group: Group = decode_body(Group, answer.group, "join")
        if why := what_is_wrong(group, peer, self.own, self._control, self._experience):
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
        self._look_for_mates()
        if self.call.unreduced and now > lobby.close_at - LAST_MOMENT:
            raise NoReducerError(self.call.unreduced)  # no time is left to find another leader
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
            self._heed(peer, await self.call.ask(peer, leads=True, timeout=self.options.request_timeout))
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
        if unreduced := self.lobby.blocked or self.call.unreduced:
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

    def _on_control(self) -> None:
        """The user has reported progress, or changed the schedule."""
        self.call.progress_due.set()
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

    async def _keep_in_touch(self) -> None:
        """Gives up followers of whom nothing is heard any more, and a call that another search is to replace."""
        await asyncio.sleep(beat_interval(len(self.lobby)))
        for peer in self.lobby.look(self.call.patience):
            self._on_lost(peer)
        if self.leader is not None and self._outdated():
            self.call.hang_up(self.leader.peer_id)
