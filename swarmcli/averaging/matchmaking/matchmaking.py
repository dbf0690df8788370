"""How one peer finds its group: every decision, and no input or output.

A search hears what happened (`on_…`) and says what to do next (`moves`). Whoever drives it declares the peer, reads
the declarations of others, carries messages, and asks again for moves whenever something happened or the time named
by the last moves has come. All times are those of the loop.

    looking ──ask up the ranks──▶ following a leader ──its group begins──▶ done
       │  ▲                              │
       │  └──── leader gone or silent ◀──┘
       └──nobody ranks before──▶ leading (invites down the ranks) ──complete, full or time up──▶ done
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.matchmaking.asking import Asking
from swarmcli.averaging.matchmaking.attendance import Attendance
from swarmcli.averaging.matchmaking.candidates import (
    LIFETIME,
    Candidate,
    Entry,
    Plan,
    Roll,
    leader_of_the_rest,
    make_plan,
    rank_of,
)
from swarmcli.averaging.matchmaking.elsewhere import Elsewhere
from swarmcli.averaging.matchmaking.gathering import Decision, Gathering
from swarmcli.averaging.matchmaking.inviting import expected_followers, hope, invite
from swarmcli.averaging.matchmaking.meeting import MAX_GONE, Answer, Joining, Reply
from swarmcli.averaging.matchmaking.moves import Goal, Moves
from swarmcli.averaging.matchmaking.settling import Settling
from swarmcli.network.identity import PeerID

BELIEF = 2.0  # seconds that "I follow somebody else" or "my group is full" is believed
NOTICE = 0.5  # seconds in which a follower that has given up its leader reaches the next one
OVERDUE = 0.75  # seconds after the end of the time at which a leader that could have begun must have
MAX_RENEWALS = 3  # times that a leader with too few members keeps its followers for another try
UNCONNECTED = 1 / 3  # of request_timeout, for the answer of a peer to which there is no connection
TICK = 1.0  # seconds between looks at the clock when nothing happens


class Search:
    """One peer's search for one group. `leader` is whom it follows; None while it looks or leads."""

    def __init__(
        self,
        me: Candidate,
        roll: Roll,
        attendance: Attendance,
        options: MatchmakingOptions,
        goal: Goal,
        *,
        now: float,
        connected: Callable[[PeerID], bool],
    ) -> None:
        self.me = me
        self.rank = rank_of(me)
        self.roll = roll
        self.options = options
        self.keep_looking = goal.keep_looking
        self.gathering = Gathering(options, now=now, opens_at=goal.opens_at, target=goal.target)
        self.crew = set(goal.crew - {me.peer_id})  # without those who are found lost
        self.waited_in_vain = False  # for somebody who had not come when the group began
        self._attendance = attendance
        # Who is in a standing group works while it waits; whoever is not would be waited for at every end.
        self.awaits_holders = goal.target is None and not goal.only_crew
        self._seen: set[PeerID] = set()  # who has looked for such a group since this search began
        self._only_one = goal.only_one
        self._elsewhere = Elsewhere()
        self.leader: Candidate | None = None
        self.begun = False
        self.asking = Asking()
        self.settling = Settling(options, now)
        self._connected = connected
        self._redirects: list[PeerID] = []
        self._leaves: list[PeerID] = []
        self._mates: tuple[PeerID, ...] = ()  # of the group that has begun, as far as they are known
        self._leader_until = math.inf  # the leader is silent if nothing is heard by then
        self._leader_has = 1  # members in its group, as it last said
        self._renewals = 0  # how often its time was up with too few members

    # What others say

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> None:
        """Somebody looks for a group: said by himself (`direct`), by the declarations or by a third peer."""
        if self.roll.learn(candidate, now, LIFETIME, direct=direct):
            self.settling.news(now)
            self._seen.add(candidate.peer_id)
            self._elsewhere.back(candidate.peer_id)
        elif self._only_one and candidate.tag != self.me.tag and candidate.search > self.me.search:
            self._elsewhere.note(candidate.peer_id)

    def on_read(self, declared: Sequence[Candidate], now: float, duration: float) -> None:
        """The declarations of this bucket were read; it took `duration` seconds to declare and read."""
        if declared:  # this peer's own at least, unless the table is out of reach
            self.crew -= self._attendance.holders.keys() - {each.peer_id for each in declared}  # they have withdrawn
            self._attendance.read(declared)
        for candidate in declared:
            self.learn(candidate, now)
            known = self.roll.entries.get(candidate.peer_id)
            if known is not None and not candidate.looking and candidate.search >= known.candidate.search:
                self.roll.finish(candidate.peer_id)
        size = self.options.target_group_size
        # At their start not everyone has declared himself, so a few are no proof that they are all.
        crowd = size is not None and (len(declared) > size or not self.crew)
        self.settling.on_read(now, duration, crowd=crowd)

    def on_join(self, candidate: Candidate, joining: Joining, now: float) -> Answer:
        """A peer asks to follow this one."""
        self.learn(candidate, now, direct=True)
        peer = candidate.peer_id
        if self.begun:
            return Answer("begun", gone=self._mates[:MAX_GONE])
        if rank_of(candidate) < self.rank and not (joining.stranded and self._takes_in(peer)):
            return Answer("outranked", self.me)
        if self.leader is not None:
            return Answer("follow", self.me, self.leader)
        if not self.me.listening:
            return Answer("cannot_lead", self.me)
        if peer not in self.gathering.followers:
            if self.gathering.is_full:
                return Answer(
                    "full", self.me, leader_of_the_rest(self.roll, self.gathering.followers, self.options, peer, now)
                )
            if self.options.target_group_size is not None:
                self.settling.news(now)  # whoever was turned away elsewhere gets the time to find this group
        self.gathering.add(candidate, joining, now)
        return Answer("accepted", self.me, patience=self.gathering.patience)

    def _takes_in(self, peer: PeerID) -> bool:
        """Whether a stranded peer may come though it ranks before: only to one that leads others, and not to one
        that asks it in turn, so that no two follow each other."""
        return self.leader is None and bool(self.gathering.followers) and peer not in self.asking.since

    def on_invitation(self, sender: Candidate, to: Candidate, now: float) -> Reply:
        """A peer names a leader to ask: itself, or the one that it follows now together with its followers."""
        self.learn(sender, now, direct=True)
        self.learn(to, now, direct=to.peer_id == sender.peer_id)
        if self.begun:
            return Reply("begun")
        lost = self.roll.is_out_of_reach(to.peer_id, now)
        if not lost:
            self.roll.names_leader(sender.peer_id, to.peer_id, now + BELIEF)
        if to.peer_id != sender.peer_id:
            if self.leader is not None and self.leader.peer_id == sender.peer_id:
                self.leader = None
            self.asking.answered(sender.peer_id)  # its answer, if one is under way, is out of date
        if self.leader is not None:
            return Reply("following", self.me, self.leader)
        if rank_of(to) > self.rank:
            return Reply("outranked", self.me)
        if not lost:
            self.asking.named = to.peer_id
        return Reply("coming", self.me)

    def on_progress(self, peer: PeerID, progress: float) -> bool:
        """A follower's cumulative progress. Returns whether it is a follower."""
        return self.gathering.report(peer, progress)

    def on_heartbeat(self, peer: PeerID, search: bytes, patience: float, now: float, *, members: int = 1) -> bool:
        """The leader of so many members lives and will be heard again within `patience` seconds. Returns whether it
        is followed."""
        if self.leader is None and peer in self.asking.since:
            return True  # it has overtaken the answer to the request to join
        if self.leader is None or (self.leader.peer_id, self.leader.search) != (peer, search):
            return False
        self._leader_until = now + patience
        self._leader_has = members
        return True

    def on_begin(
        self, peer: PeerID, search: bytes, mates: Iterable[PeerID] = (), *, waited_in_vain: bool = False
    ) -> bool:
        """A leader says that its group begins, with this peer's `search` in it. Returns whether that is so.

        `waited_in_vain`: it has waited in vain for others, so nobody in its group has to do so again.
        """
        # The message may overtake the answer to the request to join, or come from a slow leader that this peer gave
        # up for another one. That group has begun and counts on this peer, the other one has not: so the first wins.
        if self.begun or peer not in self.asking.ever or search != self.me.search:
            return False
        self._begin(mates)
        if waited_in_vain:
            self._attendance.note_missed(self._awaited().difference(self._mates))
        return True

    def _begin(self, mates: Iterable[PeerID]) -> None:
        self.begun, self._mates = True, tuple(mates)

    def forsaken(self) -> list[PeerID]:
        """Who still counts on this peer and is not in its group: its leader, its followers and those whom it asked."""
        leader = [self.leader.peer_id] if self.leader is not None else []
        everyone = [*leader, *self.gathering.followers, *self._redirects, *self._leaves, *self.asking.since]
        beginner = self._mates[0] if self.begun else None
        leads = beginner == self.me.peer_id
        return [peer for peer in dict.fromkeys(everyone) if peer != beginner and not (leads and peer in self._mates)]

    def reopen(self, why: str, now: float) -> bool:
        """The group that was to begin cannot, for want of a reducer. Returns whether to wait for one to come."""
        self.begun, self.gathering.blocked = False, why
        return self.gathering.target is None and now < self.gathering.close_at

    def on_leave(self, peer: PeerID, search: bytes, now: float) -> None:
        """A follower went, or the leader gave its group up: that search of it no longer counts on this peer."""
        self.roll.heard(peer)
        if peer in self.gathering.followers:
            self.gathering.remove(peer, search)
        else:
            self.asking.answered(peer)  # an acceptance that this has overtaken is out of date
        if self.leader is not None and (self.leader.peer_id, self.leader.search) == (peer, search):
            self.on_parted(peer, now)

    def on_parted(self, peer: PeerID, now: float) -> None:
        """The leader does not know this peer as its follower, or not any more; it may be asked again."""
        if self.leader is not None and self.leader.peer_id == peer:
            self.leader = None
            self.settling.news(now)

    def on_lost(self, peer: PeerID, now: float) -> None:
        """The connection to this peer is gone, it could not be reached, or it was silent for too long."""
        self.asking.answered(peer)
        self.gathering.remove(peer)
        self.crew.discard(peer)
        self._attendance.note_missed([peer])
        self.roll.fail(peer, now, 2 * self.options.request_timeout)
        self.on_parted(peer, now)

    # How own requests ended

    def on_answer(self, peer: PeerID, answer: Answer, now: float) -> None:
        """The asked peer answered."""
        awaited = self.asking.answered(peer)
        self._learn_from(peer, answer.candidate, answer.to, now)
        if answer.verdict != "accepted":
            self.on_parted(peer, now)  # an acceptance that this peer had believed was out of date
        match answer.verdict:
            case "accepted" if answer.candidate is not None:
                if awaited and not self.begun and self.leader is None:
                    self._follow(answer.candidate, now, answer.patience)
                else:
                    self._leaves.append(peer)
            case "follow" if answer.to is not None and answer.to.peer_id != self.me.peer_id:
                if not (self._doubts(answer.to.peer_id, now) and self.asking.again(peer, now)):
                    self.roll.names_leader(peer, answer.to.peer_id, now + BELIEF)
            case "full":
                self.asking.is_full(peer, now + BELIEF)
                self.asking.named = answer.to.peer_id if answer.to is not None else None
            case "begun":
                self._note_begun(peer, answer.gone, now)
                if self.me.peer_id not in answer.gone:
                    self.roll.pass_over(answer.gone, now + BELIEF)
                # Otherwise the leader was lost before it had told everyone, and those who have not heard either are
                # whom to look for now.
            case "outranked":
                if answer.candidate is not None and rank_of(answer.candidate) > self.rank:
                    self.asking.is_full(peer, now + BELIEF)  # it takes in nobody who is stranded
            case _:
                self.roll.pass_over([peer], now + BELIEF)

    def on_refused(self, peer: PeerID) -> None:
        """The asked or invited peer has other terms, or looks for nothing: it is out until it begins anew."""
        self.asking.answered(peer)
        self.gathering.remove(peer)
        self.roll.finish(peer)

    def on_reply(self, peer: PeerID, reply: Reply, now: float) -> None:
        """The invited peer answered."""
        self._learn_from(peer, reply.candidate, reply.to, now)
        if reply.verdict == "begun":
            self.crew.discard(peer)
            self._note_begun(peer, reply.gone, now)
        elif reply.verdict == "coming" and peer in self.roll.entries:
            self.roll.entries[peer].coming_until = now + self.options.request_timeout / 2
        elif reply.verdict == "following" and reply.to is not None:
            if reply.to.peer_id != self.me.peer_id:
                self.roll.names_leader(peer, reply.to.peer_id, now + BELIEF)
                if peer in self.roll.entries:
                    # That leader may be lost. Its follower notices after its patience, and this group is open then.
                    self.roll.entries[peer].coming_until = now + self.options.request_timeout + NOTICE
            elif peer not in self.gathering.followers:
                self._leaves.append(peer)  # it was given up here, and has to ask again

    def _note_begun(self, peer: PeerID, mates: Sequence[PeerID], now: float) -> None:
        if not self._only_one:
            self.roll.finish(peer)
            return
        self.roll.pass_over([peer], now + BELIEF)  # and asked again then: its round may have failed
        if self.me.peer_id not in mates:
            self._elsewhere.note(peer, mates, self.roll.entries)

    def _doubts(self, leader: PeerID, now: float) -> bool:
        """Whether a leader that somebody names is silent or unreachable, as seen from here."""
        return leader in self.asking.since or self.roll.is_out_of_reach(leader, now)

    def _learn_from(self, peer: PeerID, own: Candidate | None, to: Candidate | None, now: float) -> None:
        if own is not None and own.peer_id == peer:
            self.learn(own, now, direct=True)
        if to is not None:
            self.learn(to, now)

    def _follow(self, leader: Candidate, now: float, patience: float) -> None:
        self.leader = leader
        self._leader_until = now + patience
        self._leader_has, self._renewals = 1, 0
        self.asking.forget_loyalty()
        self._redirects += self.gathering.clear()

    # What to do next

    def moves(self, now: float) -> Moves:
        """The next steps. They count as taken: an asked peer is not named again before its answer."""
        moves = Moves(wake_at=now + TICK)
        if self.begun:
            return moves
        self.roll.drop_expired(now)
        moves.wake_at = min(moves.wake_at, self.roll.next_change(now))
        if self.leader is not None:
            self._watch_leader(self.leader.peer_id, now, moves)
        if self.leader is None:
            self._seek(now, moves)
        moves.redirect, self._redirects = self._redirects, []
        moves.leave, self._leaves = self._leaves, []
        return moves

    def _watch_leader(self, leader: PeerID, now: float, moves: Moves) -> None:
        until = min(self._leader_until, self._overdue_at(now))
        moves.wake_at = min(moves.wake_at, until)
        if now >= until:
            self._leaves.append(leader)
            self.on_lost(leader, now)

    def _overdue_at(self, now: float) -> float:
        """When a leader that sends heartbeats and does not begin has held this peer for too long."""
        if self.gathering.target is not None:
            return math.inf
        too_few = self.keep_looking and self._leader_has < self.options.min_group_size
        if too_few and now >= self.gathering.close_at and self._renewals < MAX_RENEWALS:
            self.gathering.renew(now)  # it looks on, and so does this peer
            self._renewals += 1
        return self.gathering.close_at + OVERDUE

    def _seek(self, now: float, moves: Moves) -> None:
        hedged_at = [since + self.settling.hedge for since in self.asking.since.values()]
        waiting = any(at > now for at in hedged_at)
        ready_at = self.settling.ready_at if self.asking.named is None else -math.inf
        plan = self._plan(waiting, now) if now >= ready_at else Plan([], {}, crowded=True)
        expected = expected_followers(plan, self.roll, self.gathering.followers, now)
        patience = self.options.request_timeout
        one_for_all = self.awaits_holders and not plan.crowded
        hopes = [
            hope(e, slack=self._slack(e.peer_id, one_for_all), patience=patience)
            for e in expected
            if self._attendance.waits_for(e.peer_id)
        ]
        if one_for_all:
            hopes += [since + self._slack(peer, one_for_all) for peer, since in self.asking.since.items()]
        hoping = any(until > now for until in hopes)
        if not waiting and now >= ready_at:
            waiting = self._reach_out(plan, expected, hoping, now, moves)
        settled_at = self.settling.settled_at
        absent = self._awaited() if plan.crowded else self._awaited().union(e.peer_id for e in expected)
        decision = self._decide(now, hoping, waiting, absent, settled_at)
        moves.missed = not waiting and now >= settled_at and self._elsewhere.outweighs(self.gathering.followers)
        if decision.begin and not moves.missed:
            self._begin((self.me.peer_id, *self.gathering.followers))
        moves.begin, moves.give_up = self.begun, decision.give_up
        judged_at = settled_at if self._elsewhere.peers else math.inf
        times = (moves.wake_at, decision.wake_at, ready_at, judged_at, *hopes, *hedged_at)
        moves.wake_at = min(time for time in times if time > now)

    def _slack(self, peer: PeerID, one_for_all: bool) -> float:
        """How long the group stays open for an answer of this peer: where there is one group for all, as long as that
        may take, for who is slow would be left to a group of its own. Nobody says that a peer without a connection
        is there at all, so it gets less."""
        if not one_for_all:
            return self.settling.hedge
        timeout = self.options.request_timeout
        return timeout if self._connected(peer) else UNCONNECTED * timeout

    def _decide(self, now: float, hoping: bool, asking: bool, absent: set[PeerID], settled_at: float) -> Decision:
        """Whether to begin. Who is `absent` then is not waited for in later searches."""
        gathering = self.gathering
        missing = hoping or bool(self._awaited()) or bool(self.me.bits)
        if self.crew and self.crew <= gathering.followers.keys():
            settled_at = now  # the last round's crew is back
        up = now >= gathering.close_at
        decision = gathering.decide(
            now, missing=missing, asking=asking, settled_at=settled_at, keep_looking=self.keep_looking
        )
        if absent and (up or decision.begin) and not gathering.is_full:
            self._attendance.note_missed(absent)
            self.waited_in_vain = decision.begin
        return decision

    def _awaited(self) -> set[PeerID]:
        """Who could still come, though it has not looked for a group since this search began: a mate of the last round,
        or, unless only those are expected, whoever holds the bucket."""
        awaited = set(self.crew)
        if self.awaits_holders:
            awaited = (awaited | self._attendance.idle(self.roll.finished)) - self._seen
        return awaited.difference(self.gathering.followers, (self.me.peer_id,))

    def _plan(self, waiting: bool, now: float) -> Plan:
        present = self.roll.present(now)
        if not waiting:
            # Whoever is slow to answer may still do so; meanwhile the next in rank is asked.
            present = [entry for entry in present if entry.candidate.peer_id not in self.asking.since]
        return make_plan(self.me, self.rank, present, self.options, now)

    def _reach_out(self, plan: Plan, expected: list[Entry], hoping: bool, now: float, moves: Moves) -> bool:
        """Asks somebody, or else invites those who are expected. Returns whether this peer may come to follow."""
        peer, at = self._whom_to_ask(plan, hoping, now)
        if peer is None:
            pause = self.options.request_timeout / 2
            chosen = invite(expected, pause=pause, connected=self._connected, now=now)
            moves.invite = [entry.candidate for entry in chosen]
            return False
        if at > now:
            moves.wake_at = min(moves.wake_at, at)
            return True
        candidate = moves.ask = self.roll.entries[peer].candidate
        moves.stranded = rank_of(candidate) > self.rank
        self.asking.ask(peer, now)
        moves.wake_at = min(moves.wake_at, now + self.settling.hedge)
        return True

    def _whom_to_ask(self, plan: Plan, hoping: bool, now: float) -> tuple[PeerID | None, float]:
        """The leader that this peer should follow, and when to ask it; None if it should lead, or can only wait."""
        peer, at = None, now
        order = [peer for peer in plan.nearest(self.me.peer_id) if peer in self.roll.entries]
        stands = plan.crowded and 2 * len(self.gathering) > plan.usual_size
        if self.me.peer_id not in plan.leaders and not stands:
            named = self.asking.named
            directed = [named] if named in self.roll.entries and not self._doubts(named, now) else []
            above = [peer for peer in (*directed, *order) if self.roll.entries[peer].rank < self.rank]
            peer, at = self.asking.first(above, now)
        if peer is None and self.options.target_group_size is not None and not hoping and not stands:
            # Stranded: too few have come and nobody else will. A group with room will do, for a peer that is alone
            # of any rank: nobody follows it who would have to come along.
            alone = len(self.gathering) == 1
            doors = [peer for peer in order if alone or self.roll.entries[peer].rank < self.rank]
            peer, at = self.asking.first(doors, now)
        return peer, at
