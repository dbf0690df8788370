"""How one peer finds its group: every decision, and no input or output.

A search hears what happened (`on_…`) and names the next steps (`moves`). Its driver declares the peer, reads the
declarations of others, carries messages, and asks again for moves whenever something happened or the time of the last
moves has come. All times are those of the loop.

    looking ──ask up the ranks──▶ following a leader ──its group begins──▶ done
       │  ▲                              │
       │  └──── leader gone or silent ◀──┘
       └──no peer ranks before─▶ leading (invites down the ranks) ──complete, full or time up──▶ done

Requests to join go up the ranks only, so they cannot run in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.control import RoundRequest
from swarmcli.averaging.group import Group
from swarmcli.averaging.matchmaking.candidates import (
    Candidates,
    Conflicts,
    Entry,
    FollowPlan,
    Memory,
    Settling,
    make_plan,
)
from swarmcli.averaging.matchmaking.gathering import Gathering
from swarmcli.averaging.matchmaking.messages import (
    MAX_GONE,
    Answer,
    Candidate,
    GroupInvitation,
    Heartbeat,
    Join,
    differing_terms,
    place_in,
)
from swarmcli.errors import FingerprintError, MatchmakingError, NoReducerError, RoundMissed, SwarmError
from swarmcli.network.identity import PeerID
from swarmcli.network.prefix import Prefix


@dataclass(slots=True)
class Moves:
    """The next steps of a search; at `wake_at` at the latest the moves after these are due."""

    wake_at: float = math.inf
    ask: tuple[PeerID, Join] | None = None
    invite: list[tuple[PeerID, Candidate]] = field(default_factory=list)  # peers, and the leader that each should ask
    leave: list[PeerID] = field(default_factory=list)  # leaders and followers that this peer tells that it has left
    refuse: list[tuple[PeerID, tuple[str, ...]]] = field(default_factory=list)  # peers of other terms, and their keys
    begin: bool = False
    failure: SwarmError | None = None  # the search ends with this


class Search:
    """One peer's search for one group. `leader` is the peer that it follows; None while it looks or leads."""

    def __init__(
        self,
        own: Join,
        memory: Memory,
        options: MatchmakingOptions,
        request: RoundRequest,
        *,
        now: float,
        connected: Callable[[PeerID], bool],
        shunned: frozenset[PeerID] = frozenset(),
        network_of: Callable[[PeerID], Prefix | None] = lambda peer: None,
        count: Callable[[Mapping[PeerID, float]], float] = lambda claims: math.fsum(claims.values()),
    ) -> None:
        """`own`: this peer's request to join. When time is up and too few are here, it looks on with
        `request.allow_retries`, and otherwise gives up. `shunned`: peers that get no seat; `network_of`: the network of
        a peer, by which seats are counted; `count`: see Gathering."""
        self.own, self.me = own, own.candidate
        self.request = request
        self.options = options
        self.known = Candidates(
            self.me,
            memory,
            only_one=request.only_one,
            since=request.since,
            shunned=shunned,
            queue=request.queue,
        )
        self.rank = self.known.rank(self.me)
        self.gathering = Gathering(
            self.me.peer_id,
            memory,
            options,
            request.target,
            connected=connected,
            now=now,
            bid=own.offer.bid,
            shunned=shunned,
            count=count,
        )
        self.settling = Settling(options, now)
        self.conflicts = Conflicts()
        self.leader: Candidate | None = None
        self.leader_has = 1  # members in the leader's group, as it last said
        self.members: tuple[PeerID, ...] = ()  # of the group once it has begun, the leader first
        self.unfaithful: set[PeerID] = set()  # leaders that gathered enough members and did not begin …
        self._idle: set[PeerID] = set()  # … and of these the ones that only reports accuse
        self.waited_in_vain = False  # for a peer that had not come when the group began
        self._memory = memory
        self._network_of = network_of
        self._connected = connected
        self._own_entry = Entry(self.me, self.rank, since=now)
        self._doubts_end_at = now + options.min_matchmaking_time  # see _conflict and deserted
        self._asked: dict[PeerID, float] = {}  # peer whose answer is awaited → since when
        # Only a peer that this one has asked may begin a group with it, also if its answer came too late, or never:
        # that leader may have taken this peer in.
        self._ever_asked: set[PeerID] = set()
        self._named: PeerID | None = None  # the leader of an invitation; this peer asks it before all others
        self._leader_until = math.inf  # the leader is silent if nothing is heard by then …
        self._leader_speaks_until = math.inf  # … and was when half of that time had passed
        self._renewals = 0  # how often its time was up with too few members
        self._unreduced = ""  # why no member of the leader's group can reduce, as it last said
        self._moves = Moves()  # the next ones, as far as they are clear

    # Messages of others

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> None:
        """A peer looks for a group, by its own word (`direct`), by the declarations or by a third peer's word."""
        if self.known.learn(candidate, now, direct=direct):
            self.settling.news(now)
            self.gathering.seen.add(candidate.peer_id)

    def on_read(self, declared: Sequence[Candidate], now: float, duration: float) -> None:
        """The declarations of this bucket were read; it took `duration` seconds to declare and read."""
        if declared:  # this peer's own at least, unless the table is out of reach
            withdrawn = self._memory.holders.keys() - {each.peer_id for each in declared}
            self.gathering.mates -= withdrawn
            self._memory.read(declared)
        for candidate in declared:
            self.learn(candidate, now)
            known = self.known.entries.get(candidate.peer_id)
            if known is not None and not candidate.looking and candidate.search >= known.candidate.search:
                self.known.finish(candidate.peer_id)
        size = self.options.target_group_size
        # At the start not all peers have declared themselves, so a few may not be all.
        crowd = size is not None and (len(declared) > size or not self.gathering.mates)
        self.settling.on_read(now, duration, crowd=crowd)

    def on_join(self, join: Join, now: float) -> Answer:
        """A peer asks to follow this one."""
        peer = join.candidate.peer_id
        if keys := differing_terms(self.own.terms, join.terms):
            self._note_conflict(peer, keys, join.since)
            return Answer("terms", keys=keys, since=self.own.since)
        self.learn(join.candidate, now, direct=True)
        if self.members:
            return Answer("begun", gone=self.members[:MAX_GONE])
        if peer in self.known.shunned:
            return Answer("full", self.me)
        if self.known.rank(join.candidate) < self.rank and not (join.stranded and self._takes_in(peer)):
            return Answer("outranked", self.me)
        if self.leader is not None:
            return Answer("follow", self.me, self.leader)
        if not (self.me.dialable or self._may_lead_undialed(peer, now)):
            return Answer("cannot_lead", self.me)
        if peer not in self.gathering.followers:
            if self.gathering.is_full or not self._has_seat_for(peer):
                return Answer("full", self.me)
            if self.options.target_group_size is not None:
                self.settling.news(now)  # peers that other leaders turned away get the time to find this group
        if not self.gathering.add(join, now):
            return Answer("full", self.me)
        return Answer("accepted", self.me, patience=self.gathering.patience)

    def _has_seat_for(self, peer: PeerID) -> bool:
        """Whether the network of this peer has seats left: identities cost nothing, and addresses of unlike networks
        do. Local networks and this machine are not counted."""
        limit, network = self.options.seats_per_network, self._network_of(peer)
        if limit is None or network is None or network.shared:
            return True
        return sum(self._network_of(other) == network for other in self.gathering.followers) < limit

    def _may_lead_undialed(self, peer: PeerID, now: float) -> bool:
        """Where no peer can be dialed, connected ones lead each other."""
        return self._connected(peer) and not any(entry.candidate.dialable for entry in self.known.present(now))

    def _takes_in(self, peer: PeerID) -> bool:
        """Whether a stranded peer may come though it ranks before this one: only if this one leads others, and is not
        asking that peer in turn, so that no two follow each other."""
        return self.leader is None and bool(self.gathering.followers) and peer not in self._asked

    def on_invitation(self, invitation: GroupInvitation, now: float) -> Answer:
        """The sender invites this peer to ask a leader: itself, or the one that it and its followers follow now."""
        sender, to = invitation.sender, invitation.to
        if sender.peer_id in self.known.shunned:
            return Answer("full", self.me)
        self.learn(sender, now, direct=True)
        self.learn(to, now, direct=to.peer_id == sender.peer_id)
        if self.members:
            return Answer("begun", gone=self.members[:MAX_GONE])
        lost = self.known.is_out_of_reach(to.peer_id, now)
        if not lost:
            self.known.names_leader(sender.peer_id, to.peer_id, now + self.options.search.belief)
        if to.peer_id != sender.peer_id:  # the sender leads no peer any more
            if self.leader is not None and self.leader.peer_id == sender.peer_id:
                self.leader = None
            self._forget_question(sender.peer_id)  # its answer, if one is under way, is out of date
        if self.leader is not None:
            return Answer("follow", self.me, self.leader)
        if to.peer_id in self.known.shunned:
            return Answer("full", self.me)
        if self.known.rank(to) > self.rank:
            return Answer("outranked", self.me)
        if not lost:
            self._named = to.peer_id
        return Answer("coming", self.me)

    def on_heartbeat(self, peer: PeerID, beat: Heartbeat, now: float) -> bool:
        """The leader lives and will speak again. Returns whether this peer follows it."""
        if self.leader is None and peer in self._asked:
            return True  # the heartbeat has overtaken the answer to the request to join
        if self.leader is None or (self.leader.peer_id, self.leader.search) != (peer, beat.search):
            return False
        self._leader_until, self._leader_speaks_until = now + beat.patience, now + beat.patience / 2
        self.leader_has, self._unreduced = beat.members, beat.unreduced
        return True

    def may_begin(self, peer: PeerID, search: bytes) -> bool:
        """Whether this leader may begin a group with this peer: this one has asked it, in this very search."""
        return peer in self._ever_asked and search == self.me.search

    def hear_no_more(self, peer: PeerID) -> None:
        """This peer declined a group of this leader: it reads no further one, unless it asks that leader again."""
        self._ever_asked.discard(peer)

    def on_begin(self, search: bytes, members: Iterable[PeerID], *, waited_in_vain: bool = False) -> bool:
        """The first of these members begins its group, with this peer's `search` in it. Returns whether this peer takes
        part.

        `waited_in_vain`: the leader has waited in vain for others, so no member of its group waits for them again.
        """
        # The message may overtake the answer to the request to join, or come from a slow leader that this peer gave
        # up for another one. That group has begun and counts on this peer, the other one has not: so the first wins.
        members = tuple(members)
        if self.members or not self.may_begin(members[0], search):
            return False
        self.members = members
        if waited_in_vain:
            self._memory.note_missed(self.gathering.awaited().difference(members))
        return True

    def is_in_turn(self, group: Group) -> bool:
        """Whether the leader lists the followers as they rank here, so that they lead in turn. Newcomers come last, in
        any order. A leader that is a newcomer knows no order: it may not lead members of that round that can lead."""
        queue, (leader, *others) = self.request.queue, group.members
        ranks = [(not each.dialable, place_in(queue, each.peer_id, each.standing)) for each in others]
        if queue and not leader.standing:
            return not any(each.standing and each.dialable for each in others)
        return not queue or ranks == sorted(ranks)

    def followers(self) -> list[Join]:
        """The joins of this peer's followers, by rank."""
        return sorted(self.gathering.followers.values(), key=lambda join: self.known.rank(join.candidate))

    def on_leave(self, peer: PeerID, search: bytes, now: float) -> None:
        """A follower went, or the leader gave its group up: with that search it no longer counts on this peer."""
        self.known.heard(peer)
        if peer in self.gathering.followers:
            self.gathering.remove(peer, search)
        else:
            self._forget_question(peer)  # an acceptance that this has overtaken is out of date
        if self.leader is not None and (self.leader.peer_id, self.leader.search) == (peer, search):
            self.drop_leader(peer, now)

    def drop_leader(self, peer: PeerID, now: float) -> None:
        """The leader does not know this peer as its follower, or not any more; this peer may ask it again."""
        if self.leader is not None and self.leader.peer_id == peer:
            self.leader = None
            self.settling.news(now)

    def on_lost(self, peer: PeerID, now: float) -> None:
        """The connection to this peer is gone, or the peer could not be reached, or was silent for too long."""
        self._forget_question(peer)
        self.gathering.remove(peer)
        self.gathering.mates.discard(peer)
        self._memory.note_missed([peer])
        self.known.fail(peer, now, 2 * self.options.request_timeout)
        self.drop_leader(peer, now)

    def give_up_leader(self, now: float) -> None:
        """The leader, if there is one, could have begun and has not: it leads this peer no more."""
        if self.leader is None:
            return
        leader = self.leader.peer_id
        self.unfaithful.add(leader)
        self._moves.leave.append(leader)
        self.on_lost(leader, now)
        self.known.shun(leader)

    def give_up_idle_leader(self, now: float) -> None:
        """By the reports, the leader could have begun. If this peer leads and has not begun either, or would be left
        alone, they count samples that no peer in reach has, and no leader is to blame."""
        leader = self.leader.peer_id if self.leader is not None else None
        if leader is None or all(entry.peer_id == leader for entry in self.known.present(now)):
            self.forgive_leaders(now)
        else:
            self._idle.add(leader)
            self.give_up_leader(now)

    def forgive_leaders(self, now: float) -> None:
        """Leaders that only reports have accused may lead this peer again."""
        if self._idle:
            self.known.shunned -= self._idle
            self.unfaithful -= self._idle
            self._idle.clear()
            self.settling.news(now)

    def deserted(self, now: float) -> float:
        """Seconds since this search began, if it finds too few peers that have a seat, while others without one look
        too: all that do have a seat follow these, or time was up before. Otherwise 0."""
        without = (self._memory.holders[peer] for peer in self.known.shunned & self._memory.holders.keys())
        if self.leader is not None or self.gathering.has_enough or not any(map(self._looks, without)):
            return 0.0
        there = self.known.present(now)
        led = there and all(each.follows in self.known.shunned and each.follows_until > now for each in there)
        return now - self._own_entry.since if led or now >= self._doubts_end_at else 0.0

    def _looks(self, holder: Candidate) -> bool:
        return holder.bucket == self.me.bucket and holder.looking and not self._memory.has_finished(holder)

    # Answers to this peer

    def on_answer(self, peer: PeerID, answer: Answer, now: float) -> None:
        """The asked peer answered."""
        awaited, until = self._forget_question(peer), now + self.options.search.belief
        if answer.verdict == "terms":
            self._note_conflict(peer, answer.keys, answer.since)
            return
        self.conflicts.agreed = True
        self._learn_from(peer, answer, now)
        if answer.verdict != "accepted":
            self.drop_leader(peer, now)  # an acceptance that this peer had believed was out of date
        entry = self.known.entries.get(peer)
        match answer.verdict:
            case "accepted" if answer.candidate is not None and answer.candidate.peer_id == peer:
                if awaited and not self.members and self.leader is None:
                    self._follow(answer.candidate, now, answer.patience)
                else:
                    self._moves.leave.append(peer)
            case "follow" if answer.to is not None and answer.to.peer_id != self.me.peer_id:
                if not (self._doubts(answer.to.peer_id, now) and entry is not None and self._may_ask_again(entry, now)):
                    self.known.names_leader(peer, answer.to.peer_id, until)
            case "full" if entry is not None:
                entry.full_until = until
            case "begun":
                self.gathering.mates.discard(peer)
                self.known.note_begun(peer, answer.gone, until)
            case "outranked" if entry is not None:
                if entry.rank > self.rank:
                    entry.full_until = until  # it takes in no stranded peer
            case _:
                self.known.pass_over([peer], until)

    def on_reply(self, peer: PeerID, answer: Answer, now: float) -> None:
        """The invited peer answered."""
        self._learn_from(peer, answer, now)
        entry, until = self.known.entries.get(peer), now + self.options.search.belief
        if answer.verdict == "begun":
            self.gathering.mates.discard(peer)
            self.known.note_begun(peer, answer.gone, until)
        elif answer.verdict == "coming" and entry is not None:
            entry.coming_until = now + self.options.request_timeout / 2
        elif answer.verdict == "follow" and answer.to is not None:
            if answer.to.peer_id != self.me.peer_id:
                self.known.names_leader(peer, answer.to.peer_id, until)
                if entry is not None:
                    # That leader may be lost. Its follower notices after its patience, and this group is open then.
                    entry.coming_until = now + self.options.request_timeout + self.options.search.notice
            elif peer not in self.gathering.followers:
                self._moves.leave.append(peer)  # this peer has given it up, so it has to ask again

    def on_refused(self, peer: PeerID) -> None:
        """The asked or invited peer has other terms, or looks for no group: it is out until it begins anew."""
        self._forget_question(peer)
        self.gathering.remove(peer)
        self.known.finish(peer)

    def reopen(self, why: str, now: float) -> bool:
        """The group cannot begin, for want of a reducer. Returns whether to wait for one to come."""
        self.members, self.gathering.blocked = (), why
        return self.gathering.target is None and now < self.gathering.close_at

    def forsaken(self) -> list[PeerID]:
        """The peers that still count on this one and are not in its group: its leader, its followers, and those that it
        has asked."""
        leader = [self.leader.peer_id] if self.leader is not None else []
        sent_on = [peer for peer, to in self._moves.invite if to != self.me]
        everyone = [*leader, *self.gathering.followers, *sent_on, *self._moves.leave, *self._asked]
        leads = self.members[:1] == (self.me.peer_id,)
        informed = self.members if leads else self.members[:1]
        return [peer for peer in dict.fromkeys(everyone) if peer not in informed]

    def failure(self, reason: str, now: float) -> SwarmError:
        """The error that says why no group came together."""
        if unreduced := self.gathering.blocked or self._unreduced:
            return NoReducerError(unreduced)
        dialable = [self.me.dialable, *(entry.candidate.dialable for entry in self.known.present(now))]
        if any(dialable) or len(dialable) < self.options.min_group_size:
            return MatchmakingError(reason)
        there = f"none of {len(dialable)} peers that look for a group can be dialed, directly or over a relay"
        return NoReducerError(f"{there}, so nobody can reduce for the others")

    def _forget_question(self, peer: PeerID) -> bool:
        """This one awaits no answer of that peer any more. Returns whether it did."""
        if self._named == peer:
            self._named = None
        return self._asked.pop(peer, None) is not None

    def _note_conflict(self, peer: PeerID, keys: tuple[str, ...], since: float) -> None:
        if self.conflicts.note(peer, keys, since):
            self._moves.refuse.append((peer, keys))
        self.on_refused(peer)

    def _doubts(self, leader: PeerID, now: float) -> bool:
        """Whether a leader that another peer names is silent or unreachable here."""
        return leader in self._asked or self.known.is_out_of_reach(leader, now)

    def _may_ask_again(self, follower: Entry, now: float) -> bool:
        """A peer follows a leader that is lost here: it will notice soon, and this one asks it again then.

        Returns False once that has taken too long.
        """
        follower.loyal_since = min(follower.loyal_since, now)
        follower.ask_at = now + self.options.search.again
        return now < follower.loyal_since + self.options.search.loyalty

    def _learn_from(self, peer: PeerID, answer: Answer, now: float) -> None:
        if answer.candidate is not None and answer.candidate.peer_id == peer:
            self.learn(answer.candidate, now, direct=True)
        if answer.to is not None:
            self.learn(answer.to, now)

    def _follow(self, leader: Candidate, now: float, patience: float) -> None:
        self.leader, self.leader_has, self._renewals = leader, 1, 0
        self._leader_until, self._leader_speaks_until = now + patience, now + patience / 2
        for entry in self.known.entries.values():
            entry.loyal_since, entry.ask_at = math.inf, 0.0  # this peer waits for no lost leader's follower any more
        self._moves.invite += [(follower, leader) for follower in self.gathering.clear()]

    # The next steps

    def moves(self, now: float) -> Moves:
        """The next steps. They count as taken: a peer to ask is not named again before its answer."""
        self._moves.wake_at = now + self.options.search.tick
        if not self.members:
            self.known.drop_expired(now)
            self._wake_by(self.known.next_change(now), now)
            if self.leader is not None:
                self._watch_leader(self.leader.peer_id, now)
            if self.leader is None:
                self._seek(now)
        moves, self._moves = self._moves, Moves()
        return moves

    def _wake_by(self, when: float, now: float) -> None:
        if now < when < self._moves.wake_at:
            self._moves.wake_at = when

    def _watch_leader(self, leader: PeerID, now: float) -> None:
        overdue_at = self._overdue_at(now)
        until = min(self._leader_until, overdue_at)
        self._wake_by(until, now)
        speaks = now < self._leader_speaks_until  # else this peer may be cut off, and the leader have begun
        if now >= overdue_at and self.leader_has >= self.options.min_group_size and speaks:
            self.give_up_leader(now)
        elif now >= until:
            self._moves.leave.append(leader)
            self.on_lost(leader, now)

    def _overdue_at(self, now: float) -> float:
        """When a leader that sends heartbeats and does not begin has held this peer for too long."""
        if self.gathering.target is not None:
            return math.inf
        too_few = self.request.allow_retries and self.leader_has < self.options.min_group_size
        if too_few and now >= self.gathering.close_at and self._renewals < self.options.search.max_renewals:
            self.gathering.renew(now)  # the leader looks on, and so does this peer
            self._renewals += 1
        return self.gathering.close_at + self.options.search.overdue

    def _seek(self, now: float) -> None:
        """Asks for a leader, or else invites peers that should follow this one, and begins once the group is due."""
        if self._unreduced and now > self.gathering.close_at - self.options.search.last_moment:
            self._moves.failure = NoReducerError(self._unreduced)  # no time is left to find another leader
            return
        late_at = [since + self.settling.hedge for since in self._asked.values()]
        waiting = any(at > now for at in late_at)  # a late answer holds up nothing: this peer asks the next in rank too
        ready_at = self.settling.ready_at if self._named is None else -math.inf
        # Before things have settled no peer knows into which groups all will divide, so this one expects nobody.
        plan = self._plan(waiting, now) if now >= ready_at else FollowPlan([], {}, crowded=True)
        expected = self.gathering.expected(plan, self.known, now)
        hopes = self.gathering.open_until(plan, expected, self._asked, self.settling.hedge)
        hoping = any(until > now for until in hopes)
        if not waiting and now >= ready_at:
            waiting = self._reach_out(plan, expected, hoping, now)
        # Later searches do not wait for peers that are absent when the group begins or its time is up.
        absent = self.gathering.awaited().union(() if plan.crowded else (entry.peer_id for entry in expected))
        self._begin_or_wait(absent, hoping, waiting, now)
        for when in (ready_at, *hopes, *late_at):
            self._wake_by(when, now)

    def _plan(self, waiting: bool, now: float) -> FollowPlan:
        present = self.known.present(now)
        if not waiting:
            # A peer that is slow to answer may still do so; meanwhile this one asks the next in rank.
            present = [entry for entry in present if entry.peer_id not in self._asked]
        ranked = sorted([*present, self._own_entry], key=lambda entry: entry.rank)
        coming = math.inf if self.me.bits else len(self.gathering.awaited())
        return make_plan(ranked, self.options, now, self._connected, coming if self.gathering.awaits_holders else 0)

    def _reach_out(self, plan: FollowPlan, expected: list[Entry], hoping: bool, now: float) -> bool:
        """Asks a leader, or else invites the expected peers. Returns whether this peer may come to follow."""
        leader = self._whom_to_ask(plan, hoping, now)
        if leader is None:
            self._moves.invite += [(peer, self.me) for peer in self.gathering.to_invite(expected, now)]
            return False
        if leader.ask_at > now:
            self._wake_by(leader.ask_at, now)
            return True
        join = msgspec.structs.replace(
            self.own,
            patience=max(self.gathering.close_at - now, 0.0),
            progress=self.gathering.own_progress,
            stranded=leader.rank > self.rank,
        )
        self._moves.ask = leader.peer_id, join
        self._asked[leader.peer_id] = now
        self._ever_asked.add(leader.peer_id)
        self._wake_by(now + self.settling.hedge, now)
        return True

    def _whom_to_ask(self, plan: FollowPlan, hoping: bool, now: float) -> Entry | None:
        """The leader that this peer should follow, now or at its `ask_at`; None if it should lead, or can only wait."""
        entries = self.known.entries
        order = [entries[peer] for peer in plan.nearest(self.me.peer_id) if peer in entries]
        with_room = [entry for entry in order if entry.full_until <= now]
        # A leader with more than half a group keeps it, even if another should lead by the latest news. A leader that
        # was left over goes with its followers to a peer that fills a group with them.
        stays = plan.crowded and not plan.rest and 2 * len(self.gathering) > plan.usual_size
        if self.me.peer_id not in plan.leaders and not stays:
            named = entries.get(self._named) if self._named is not None else None
            if named is not None and named.full_until <= now and not self._doubts(named.peer_id, now):
                with_room.insert(0, named)
            if (above := next((entry for entry in with_room if entry.rank < self.rank), None)) is not None:
                return above
        if self.options.target_group_size is None or hoping or stays or plan.rest:
            return None  # a rest that asked would take the seats of peers that have searched longer
        # This peer is stranded: too few have come and no other will. It asks any group with room; a peer that is alone
        # may ask leaders that rank behind it, since it has no followers to bring along.
        alone = len(self.gathering) == 1
        return next((entry for entry in with_room if alone or entry.rank < self.rank), None)

    def _begin_or_wait(self, absent: set[PeerID], hoping: bool, asking: bool, now: float) -> None:
        """Begins the group, ends the search, or waits."""
        gathering, settled_at = self.gathering, self.settling.settled_at
        due_at = gathering.due_at(
            now,
            missing=hoping or bool(gathering.awaited()) or bool(self.me.bits),
            asking=asking,
            # The last round's mates do not settle again.
            settled_at=now if gathering.mates and gathering.mates <= gathering.followers.keys() else settled_at,
        )
        begins = due_at <= now and gathering.has_enough
        if absent and (begins or now >= gathering.close_at) and not gathering.is_full:
            self._memory.note_missed(absent)
            self.waited_in_vain = begins
        if not asking and now >= settled_at and self.known.outweigh(gathering.followers):
            self._moves.failure = RoundMissed("the round has begun without this peer")
        elif begins:
            self._moves.begin, self.members = True, (self.me.peer_id, *gathering.followers)
        elif (conflict := self._conflict(now)) is not None:
            self._moves.failure = conflict
        elif due_at <= now and not self.request.allow_retries:
            too_few = f"only {len(gathering)} of at least {self.options.min_group_size} peers came together in time"
            self._moves.failure = self.failure(too_few, now)
        elif due_at <= now:
            gathering.renew(now)
            due_at = gathering.close_at
        self._wake_by(due_at, now)
        if self.known.elsewhere:
            self._wake_by(settled_at, now)

    def _conflict(self, now: float) -> FingerprintError | None:
        """The error of a newcomer that is in a run of other terms.

        No peer that it has asked has its terms, and none is left to ask. Two peers that were here before must agree; it
        believes a single one when the time is up. So it takes more than one word to drive a newcomer away.
        """
        alone = self.leader is None and not self.gathering.followers
        if not self._memory.newcomer or not alone or now < self.settling.settled_at:
            return None
        if not self.conflicts.cover(self.known.present(now)):
            return None
        return self.conflicts.error(self.own.since, enough=1 if now >= self._doubts_end_at else 2)
