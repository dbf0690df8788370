"""One search of one peer for a group: it follows a leader, on a call that stays open, or leads those that call it
(`lobby.py`).

    ──▶ leading ──complete, full or time up──▶ the group begins
         │   ▲
         │   └── ask another, full, lost, hung up ──┐
         └── a peer ranks before this one ──▶ following ──▶ the group begins

Peers only follow those that rank before them, so they cannot follow each other in a circle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import fsum
from typing import Any

import msgspec

from swarmcli.averaging.config import MAX_TERM_LENGTH, MatchmakingOptions
from swarmcli.averaging.find.candidates import Candidates, Entry, Memory
from swarmcli.averaging.find.declarations import Declarations
from swarmcli.averaging.find.lobby import Lobby, beat_interval
from swarmcli.averaging.find.messages import (
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
from swarmcli.averaging.group import Group
from swarmcli.averaging.seats import Lines
from swarmcli.averaging.step_control import StepControl
from swarmcli.averaging.trust import PeerTrust
from swarmcli.averaging.weights import Experience
from swarmcli.errors import (
    CallRefused,
    CallTimeout,
    MatchmakingError,
    NetworkError,
    NoReducerError,
    ProtocolViolation,
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

FIRST_READ = 0.1  # seconds between the first two reads of the declarations; each pause is twice the last …
LAST_READ = 4.0  # … up to this
BELIEF = 2.0  # seconds for which "my group is full, or has begun" is believed
REST = 0.3  # seconds before a peer that gave no group is asked again
CROWD = 0.5  # least seconds for which a group with its share of a crowd waits for peers that are not looking
BY_ITSELF = 0.5  # seconds for a peer that ranks after this one to come before it is told to; the first is told at once
ACCUSED = 30.0  # seconds for which a leader is out: reports that accuse it may count samples of a peer that is gone
LAST_MOMENT = 1.0  # seconds before time is up, in which a group without a reducer ends the search
TICK = 0.25  # seconds between looks at the clock, and at who is still connected, when nothing happens
ON_THE_CALL = 3600.0  # seconds after which a follower calls its leader anew
BEAT_TRIPS = 10.0  # round trips that the answer to a beat may take, if that is longer than request_timeout
MIN_PUSH = 0.05  # least seconds between two reports of progress …
PUSHES_PER_SECOND = 100.0  # … and most reports of all followers of a leader together
OVERDUE = 0.75  # seconds after time is up, by which a leader that could have begun must have begun
TOO_FEW = 18.0  # seconds for which a peer that may try again follows a leader that had too few members when time was up
MAX_KEYS = 32  # most keys of differing terms that are remembered of one peer: strangers may name many
NEVER_BEGAN = "it gathered a group and did not begin it"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SearchContext:
    """What the searches of one averager share."""

    endpoint: Endpoint
    prefix: str
    declarations: Declarations
    memory: Memory
    experience: Experience
    trust: PeerTrust
    lines: Lines


class LeaderOverdueError(Exception):
    """A leader gathered a group and did not begin it."""


class LeaderCall:
    """One peer's call to its leader.

    leader      None while there is none
    has         members of its group, as it last said; 0: it has not said that this peer is one of them
    unreduced   why it cannot begin, if none of them can reduce for all
    """

    def __init__(
        self,
        own: Join,
        lobby: Lobby,
        options: MatchmakingOptions,
        control: StepControl,
        surroundings: SearchContext,
        jobs: TaskOwner,
    ) -> None:
        self.leader: Candidate | None = None
        self.has, self.unreduced = 0, ""
        self.progress_due = asyncio.Event()  # set when there is progress to tell
        self._own, self._lobby, self._options, self._control = own, lobby, options, control
        self._endpoint, self._prefix, self._jobs = surroundings.endpoint, surroundings.prefix, jobs
        self._call: asyncio.Future[Answer] | None = None
        self._why: Exception | None = None  # the error for which this peer has hung up
        self._scheduled: float | None = None

    async def stay(self, leader: Candidate, outdated: Callable[[], bool]) -> Answer | None:
        """Calls a leader and returns its answer; None if this peer has hung up, as when its search is `outdated`.

        Raises NetworkError if the leader is lost, and LeaderOverdueError.
        """
        self.leader, self.has, self._why = leader, 0, None
        call = self._call = asyncio.ensure_future(self.ask(leader, ON_THE_CALL))
        beats = self._jobs.spawn(self._keep_beating(leader.peer_id, outdated))
        try:
            await asyncio.wait({call})
            if not call.cancelled():
                return call.result()
            if self._why is not None:
                raise self._why
            return None
        finally:
            self.leader = self._call = None
            beats.cancel()
            if not call.done():
                call.cancel()
                await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # marks it as retrieved: if this search was cancelled meanwhile, nobody else reads it

    def hang_up(self, peer: PeerID, why: Exception | None = None) -> None:
        """Ends the call if it is to this peer."""
        if self._call is not None and self.leader is not None and self.leader.peer_id == peer:
            self._why = why
            self._call.cancel()

    async def ask(self, candidate: Candidate, timeout: float) -> Answer:
        """Asks a peer that ranks before this one to lead it, or tells one that ranks after it that it leads. Raises
        NetworkError."""
        self._endpoint.learn(candidate.peer_id, candidate.addresses)
        patience, progress = max(self._lobby.close_at - loop_time(), 0.0), self._lobby.own_progress
        join = msgspec.structs.replace(self._own, patience=patience, progress=progress)
        answer: Answer = await self._send(candidate.peer_id, join, timeout)
        return answer

    def can_ask(self, candidate: Candidate) -> bool:
        return bool(candidate.dialable) or self._endpoint.is_connected(candidate.peer_id)

    def patience(self, peer: PeerID) -> float:
        """Seconds that a beat of this peer, or the answer to one, may take."""
        return max(self._options.request_timeout, BEAT_TRIPS * (self._endpoint.round_trip(peer) or 0.0))

    def take_from_control(self) -> None:
        """Takes up the progress and the scheduled time that the control has now."""
        self._lobby.own_progress = self._control.progress
        scheduled = self._control.scheduled_time
        if scheduled is not None and scheduled != self._scheduled:
            self._scheduled = scheduled
            self._lobby.schedule(loop_time() + scheduled - self._endpoint.clock.now())

    async def _keep_beating(self, leader: PeerID, outdated: Callable[[], bool]) -> None:
        """Tells the leader this peer's progress, and hears that it is there. Hangs up if it gives no answer, is
        overdue, or if this search is outdated."""
        began, pause = loop_time(), beat_interval(0)
        while not outdated():
            await set_within(self.progress_due, pause)
            self.progress_due.clear()
            self.take_from_control()
            beat = Beat(self._own.candidate.search, self._control.progress)
            try:
                pulse: Pulse = await self._send(leader, beat, self.patience(leader))
            except NetworkError as error:
                return self.hang_up(leader, error)
            self.has, self.unreduced = pulse.members, pulse.unreduced
            if self._is_overdue(began, loop_time()):
                able = self.has >= self._options.min_group_size and not self.unreduced
                return self.hang_up(leader, LeaderOverdueError() if able else CallTimeout("it gathers no group"))
            # This pause ends at once when this peer has nothing left to do but wait, see `StepControl.hurry`.
            pushed = max(MIN_PUSH, pulse.members / PUSHES_PER_SECOND)
            await set_within(self._control.urgent, pushed)
            self._control.urgent.clear()
            pause = beat_interval(pulse.members) - pushed
        self.hang_up(leader)

    def _is_overdue(self, began: float, now: float) -> bool:
        """Whether a leader that does not begin has held this peer for too long. `began`: when this peer began to follow
        it."""
        lobby = self._lobby
        too_few = self._control.request.allow_retries and self.has < self._options.min_group_size
        if too_few and lobby.close_at <= now < began + TOO_FEW:
            lobby.renew(now)  # the leader waits on, and so does this peer
        return lobby.target is None and now >= lobby.close_at + OVERDUE

    async def _send(self, peer: PeerID, message: Join | Beat, timeout: float) -> Any:
        """Sends a message to the same averager at another peer and returns the answer."""
        method = method_name(self._prefix, type(message))
        return await self._endpoint.call(peer, method, message, METHODS[type(message)][1], timeout=timeout)


class Search:
    """One peer's search for one group: `call` is to the leader that it follows, `lobby` holds those that follow it. Its
    owner closes `jobs` after it has ended."""

    def __init__(
        self,
        own: Join,
        options: MatchmakingOptions,
        control: StepControl,
        surroundings: SearchContext,
        out: Mapping[PeerID, float],
    ) -> None:
        """`own`: this peer's request to join. `out`: peers that get no seat → until when (loop time)."""
        around = surroundings
        self.own, self.me, self.request, self.options = own, own.candidate, control.request, options
        self.known = Candidates(self.me, around.memory, self.request, options, out)
        self.rank = self.known.rank(self.me)
        self.lobby = Lobby(own, options, self.request.target, loop_time(), around.lines, around.experience)
        self.jobs = TaskOwner()
        self.call = LeaderCall(own, self.lobby, options, control, around, self.jobs)
        self._around, self._endpoint, self._trust, self._control = around, around.endpoint, around.trust, control
        self._began = loop_time()
        # Seconds since the last group began: its round, and what this peer computed after it.
        self._last_round = around.endpoint.clock.now() - around.memory.last_began
        self._wake, self._read_due = asyncio.Event(), asyncio.Event()

    async def run(self, draw_up: Callable[[], Group], outdated: Callable[[], bool]) -> Group | None:
        """Looks until there is a group; None: this search is `outdated`, and another one is to replace it. `draw_up`
        makes the group if this peer leads it.

        Raises MatchmakingError, NoReducerError, FingerprintError, RoundMissed. However it ends, the leader and the
        followers of a group that did not begin hear of it.
        """
        self._control.listener = self._on_control
        try:
            self.jobs.keep(self._endpoint.events, self._keep_declared, self._keep_in_touch)
            group = None
            while group is None and not outdated():
                self._wake.clear()
                self.call.take_from_control()
                now = loop_time()
                if (leader := self._whom_to_follow(now)) is not None:
                    group = await self._follow(leader, outdated)
                elif (wake_at := self._lead(now)) is None:
                    group = self._begin(draw_up)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(wake_at):
                            await self._wake.wait()
            return group
        finally:
            self._control.listener = None
            self._look_for_mates()
            self.lobby.send_all(CallRefused("idle", "this peer does not look for a group any more"))

    # Calls of others

    def on_join(self, join: Join) -> Answer | asyncio.Future[Answer]:
        """A peer asks to follow this one, or says that it leads. Returns the answer, or a future while its call stays
        open."""
        peer, now = join.candidate.peer_id, loop_time()
        self._wake.set()
        if keys := differing_terms(self.own.terms, join.terms):
            self._note_conflict(peer, keys, join.since)
            return Answer("terms", keys=keys, since=self.own.since)
        self.known.learn(join.candidate, now, direct=True)
        if self.known.is_out(peer, now):
            return Answer("full")
        if self.call.leader is not None and self.call.leader.peer_id != peer:
            return Answer("ask", to=self.call.leader)
        if self.call.leader is not None or self.known.rank(join.candidate) < self.rank:
            return Answer("lead")
        # Where no peer can be dialed, connected ones lead each other.
        dialable = self.me.dialable or any(entry.candidate.dialable for entry in self.known.present(now))
        if not self.me.dialable and (dialable or not self._endpoint.is_connected(peer)):
            return Answer("cannot_lead")
        if peer not in self.lobby.followers:
            if (
                full := self.lobby.turns_away(join.candidate, self.known.others(now), len(self._before(now)))
            ) is not None:
                return full
            if not self.lobby.has_seat_for(peer, self._endpoint.prefix):
                return Answer("full")
        return self.lobby.admit(join, now)

    def on_beat(self, peer: PeerID, beat: Beat) -> Pulse:
        """A follower is there, and reports its progress."""
        self._wake.set()
        if not self.lobby.report(peer, beat.progress):
            return Pulse()
        return Pulse(len(self.lobby), self.lobby.blocked[:MAX_REASON])

    def on_hung_up(self, peer: PeerID, call: asyncio.Future[Answer]) -> None:
        """A follower's call has ended."""
        self.lobby.remove(peer, call)
        if not self._endpoint.is_connected(peer):
            self.drop(peer, ended=False)
        self._wake.set()

    # News of others

    def drop(self, peer: PeerID, *, lost: bool = True, ended: bool = True) -> None:
        """The peer is `lost`, or has `ended` its search, or must not be in the group: it is no leader, no follower and
        no candidate any more."""
        self.lobby.remove(peer)
        if lost:
            self.known.lose(peer, loop_time())
        if ended:
            self.known.finish(peer)
        self.call.hang_up(peer)
        self._wake.set()

    def admit(self) -> None:
        """Peers that are out, and have their seats back, may be in the group after all."""
        self.known.out = {peer: until for peer, until in self.known.out.items() if self._trust.has_no_seat(peer)}
        self._wake.set()

    def give_up_leader(self) -> None:
        """Leaves a leader that, by the reports of others, should have begun; not if nobody else is there."""
        present = self.known.present(loop_time())
        if self.call.leader is not None and any(entry.peer_id != self.call.leader.peer_id for entry in present):
            self._give_up(self.call.leader.peer_id, NEVER_BEGAN)

    def _look_for_mates(self) -> None:
        """Drops the mates that are not connected."""
        for lost in sorted(mate for mate in self.known.mates if not self._endpoint.is_connected(mate)):
            self.drop(lost, ended=False)

    def _on_no_answer(self, peer: PeerID, error: NetworkError) -> None:
        logger.debug("%s cannot be met: %s", peer.short, error)
        refused = isinstance(error, CallRefused | UnknownMethod)
        self.drop(peer, lost=not refused, ended=refused)

    def _note_conflict(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        keys = tuple(key[:MAX_TERM_LENGTH] for key in keys[:MAX_KEYS])
        if peer not in self.known.conflicts:
            reason = f"its recipe differs from ours in: {', '.join(keys)}"
            self._endpoint.events.emit(PeerRefused(peer.text, reason, what="group"))
        self.known.conflicts[peer] = tuple(sorted(keys)), since
        self.drop(peer, lost=False)

    def _give_up(self, leader: PeerID, why: str) -> None:
        """A leader leads badly: it is out for a while."""
        logger.info("%s: %s leads badly: %s", self._around.prefix, leader.short, why)
        self.known.out[leader] = loop_time() + ACCUSED
        self._trust.suspect(leader, why, led=True)
        self.drop(leader, ended=False)

    def _heed(self, peer: PeerID, answer: Answer) -> None:
        """Takes in what an answer without a group says of the peer that gave it."""
        now, known = loop_time(), self.known
        if answer.verdict == "terms":
            self._note_conflict(peer, answer.keys, answer.since)
            return
        known.agreed = True
        if (entry := known.entries.get(peer)) is not None:
            entry.rests_until = now + REST
        match answer.verdict:
            case "ask" if answer.to is not None and not self._trust.is_banned(answer.to.peer_id):
                known.learn(answer.to, now)
            case "full":
                known.note_elsewhere(peer, answer.gone, now + BELIEF, begun=False)
            case "begun":
                known.mates.discard(peer)
                known.note_elsewhere(peer, answer.gone, now + BELIEF, begun=True)
            case "cannot_lead":
                known.pass_over([peer], now + BELIEF)

    # Following

    def _whom_to_follow(self, now: float) -> Candidate | None:
        """The leader that this peer should ask; None if it should lead.

        Where several groups form, as many peers lead (at first as many as if all looked), and each other peer draws
        whom it asks first: otherwise those that come back from a round together would be in one group again, and
        averages would not spread.
        """
        before = self._before(now)
        looking = [entry.candidate for entry in self.known.present(now)]
        crowd = self.known.others(now) if now < self._crowd_until(now) else looking
        groups = self.lobby.share(crowd, len(before)).groups
        if not before or (len(before) < groups and self.me.dialable):
            return None
        leaders, others = before[:groups], before[groups:]
        drawn = int.from_bytes(self.me.search[-4:], "big") % len(leaders)
        ask = (each for each in (*leaders[drawn:], *leaders[:drawn], *others) if each.rests_until <= now)
        leader = next(ask, None)
        return leader.candidate if leader is not None else None

    def _crowd_until(self, now: float) -> float:
        """Until when a group that has its share of a crowd waits for peers that are not looking.

        If all that look were in the last round together, the others are in a round of their own. The two groups would
        alternate for ever, and averages would not spread: so this one waits until the others' round is over, if that
        takes no longer than its own did.
        """
        met = {entry.peer_id for entry in self.known.present(now)}
        if not met or not met <= self._around.memory.last_members:
            return self._began + CROWD
        return self._began + max(CROWD, min(self._last_round, self.options.min_matchmaking_time))

    def _has_waited_in_vain(self, now: float) -> bool:
        """Whether this peer has looked for so long that peers that have not come will not."""
        crowd_until = self._crowd_until(now)
        in_a_crowd = now >= crowd_until > self._began + CROWD
        return in_a_crowd or now >= self._began + self.options.min_matchmaking_time / 2

    def _before(self, now: float) -> list[Entry]:
        """Those that may lead this peer, by rank."""
        return [e for e in self.known.present(now) if e.rank < self.rank and self.call.can_ask(e.candidate)]

    async def _follow(self, leader: Candidate, outdated: Callable[[], bool]) -> Group | None:
        """Calls a leader and waits until its group begins; None: this peer goes on looking."""
        peer = leader.peer_id
        self.lobby.send_all(Answer("ask", to=leader))
        try:
            answer = await self.call.stay(leader, outdated)
        except LeaderOverdueError:
            self._give_up(peer, NEVER_BEGAN)
        except NetworkError as error:
            self._on_no_answer(peer, error)
        else:
            return self._begun(peer, answer) if answer is not None else None
        finally:
            self._read_due.set()
        return None

    def _begun(self, peer: PeerID, answer: Answer) -> Group | None:
        """Returns the leader's group, if its answer has one and nothing is wrong with it."""
        if answer.verdict != "begins":
            self._heed(peer, answer)
            return None
        try:
            group: Group = decode_body(Group, answer.group, "join")
        except ProtocolViolation as error:
            self._give_up(peer, f"its list is none: {error}")
            return None
        if why := what_is_wrong(group, peer, self.own, self._control, self._around.experience):
            self._give_up(peer, why)
            return None
        members = [member.peer_id for member in group.members]
        if banned := list(filter(self._trust.is_banned, members)):
            for culprit in banned:  # the leader does not know of the ban, or lies
                self._trust.show(culprit, [peer])
            self.drop(peer, ended=False)
            return None
        now = loop_time()
        if self._has_waited_in_vain(now):  # and so has the leader
            self._around.memory.note_missed(self.known.missing(now).difference(members))
        return group

    # Leading

    def _lead(self, now: float) -> float | None:
        """Leads for a moment: returns when to look again (loop time); None: the group begins now. Raises what ends the
        search."""
        lobby, known = self.lobby, self.known
        self._look_for_mates()
        if self.call.unreduced and now > lobby.close_at - LAST_MOMENT:
            raise NoReducerError(self.call.unreduced)  # no time is left to find another leader
        self._tell_others(now)
        share = lobby.share(known.others(now), len(self._before(now)))
        full, shared = len(lobby) >= share.most, len(lobby) >= share.least and now >= self._crowd_until(now)
        missing = known.missing(now, holders=not shared) - lobby.followers.keys()
        # If all mates of the last round are here, nobody else is expected.
        settled_at = now if known.mates and known.mates <= lobby.followers.keys() else known.settled_at
        due_at = lobby.due_at(now, missing=bool(missing or self.me.bits), full=full, settled_at=settled_at)
        begins = due_at <= now and lobby.has_enough
        if (begins or now >= lobby.close_at) and not full:
            self._around.memory.note_missed(missing)  # later searches do not wait for them
        elif begins and self._has_waited_in_vain(now):
            self._around.memory.note_missed(known.missing(now).difference(lobby.followers))
        if known.outweigh(lobby.followers.keys() | {entry.peer_id for entry in known.present(now)}):
            raise RoundMissed("the round has begun without this peer")
        if begins:
            return None
        if now >= lobby.close_at and not lobby.followers and (conflict := known.conflict(self.own.since, now)):
            raise conflict
        if due_at <= now:
            if not self.request.allow_retries:
                least = self.options.min_group_size
                raise self.failure(f"only {len(lobby)} of at least {least} peers came together in time")
            lobby.renew(now)
        return min(when for when in (now + TICK, due_at, lobby.close_at, known.settled_at) if when > now)

    def _tell_others(self, now: float) -> None:
        """Tells the peers that rank after this one that it leads: the first of them at once, since that one may be
        leading others, the rest when they have had time to come by themselves."""
        first = True
        for entry in self.known.present(now):
            peer = entry.peer_id
            if entry.rank < self.rank or peer in self.lobby.followers or not self.call.can_ask(entry.candidate):
                continue
            if now >= max(entry.told_at + self.options.request_timeout, entry.since + (0.0 if first else BY_ITSELF)):
                entry.told_at = now
                self.jobs.spawn(self._tell(entry.candidate))
            first = False

    async def _tell(self, candidate: Candidate) -> None:
        try:
            self._heed(candidate.peer_id, await self.call.ask(candidate, self.options.request_timeout))
        except NetworkError as error:
            self._on_no_answer(candidate.peer_id, error)
        self._wake.set()

    def _begin(self, draw_up: Callable[[], Group]) -> Group | None:
        """Makes the group of this peer and its followers, and sends it to these. None: nobody can reduce, and there is
        time to wait for one more. Raises NoReducerError."""
        try:
            group = draw_up()
        except NoReducerError as error:
            self.lobby.blocked = str(error)
            if self.lobby.target is not None or loop_time() >= self.lobby.close_at:
                raise
            return None
        self.lobby.send_all(Answer("begins", group=msgspec.Raw(wire.encode(group))))
        return group

    def failure(self, reason: str) -> SwarmError:
        """The error that says why no group came together."""
        if unreduced := self.lobby.blocked or self.call.unreduced:
            return NoReducerError(unreduced)
        dialable = [self.me.dialable, *(entry.candidate.dialable for entry in self.known.present(loop_time()))]
        if any(dialable) or len(dialable) < self.options.min_group_size:
            return MatchmakingError(reason)
        there = f"none of {len(dialable)} peers that look for a group can be dialed, directly or over a relay"
        return NoReducerError(f"{there}, so nobody can reduce for the others")

    # In the background

    def _on_control(self) -> None:
        """The caller has reported progress, or changed the schedule."""
        self.call.progress_due.set()
        self._wake.set()

    async def _keep_declared(self) -> None:
        """Declares this peer, then reads the other declarations: often at first, and not while it follows a leader."""
        declarations, started, pause = self._around.declarations, loop_time(), FIRST_READ
        await declarations.publish()
        while True:
            if self.call.leader is None:
                declared = await declarations.read(self.me.bits)
                welcome = [each for each in declared if not self._trust.is_banned(each.peer_id)]
                self.known.read(welcome, loop_time(), loop_time() - started)
                self._wake.set()
            pause = FIRST_READ if await set_within(self._read_due, pause) else min(2 * pause, LAST_READ)
            self._read_due.clear()

    async def _keep_in_touch(self) -> None:
        """Drops followers that have fallen silent."""
        await asyncio.sleep(beat_interval(len(self.lobby)))
        for peer in self.lobby.look(self.call.patience):
            self.drop(peer, ended=False)


def what_is_wrong(group: Group, leader: PeerID, own: Join, control: StepControl, experience: Experience) -> str:
    """Why this peer takes no part in the group of a leader that it has asked with `own`; "" if it does."""
    me, queue = own.candidate, control.request.queue
    if group.leader != leader or group.tag != me.tag or me.peer_id not in group:
        return "it began another group than that of its followers"
    entry = group.members[group.index_of(me.peer_id)]
    # If a leader could bring this peer into an old group again, after a restart or from another averager, this peer
    # would sign two unlike values under one id, which is evidence against it.
    if entry.search != me.search or not group.has_listed(group.group_id, group.listed):
        return "it began an old group, or did not sign it"
    # Otherwise a leader could list a trainer as an auxiliary, which has no tensors in the average, alter its bid, so
    # that it has no seat, or list it as undialable, so that it meets no other member.
    as_told = entry.claim <= control.progress and (entry.bandwidth == 0 or own.offer.bandwidth != 0)
    if not as_told or entry != own.member(entry.bandwidth, entry.ramp, entry.claim):
        return "it listed this peer otherwise than offered"
    if fsum(group.claims.values()) < (control.request.target or 0.0):
        return "it began a group without enough samples"
    if not _are_in_turn(group, queue):
        return "it listed its members out of turn"
    if not experience.agrees(group, queue):
        return "it listed other bounds on weights than follow from the last round"
    return ""


def _are_in_turn(group: Group, queue: Sequence[PeerID]) -> bool:
    """Whether the leader lists the followers as they rank here, so that they lead in turn. Newcomers come last, in any
    order. A leader that was not in the last round knows no order: it may not lead members of that round that can lead.
    """
    leader, *others = group.members
    ranks = [(not each.dialable, place_in(queue, each.peer_id, each.standing)) for each in others]
    if queue and not leader.standing:
        return not any(each.standing and each.dialable for each in others)
    return not queue or ranks == sorted(ranks)
