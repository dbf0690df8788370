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
from collections.abc import Callable

from swarmcli.averaging.candidates import Candidate, Entry, Plan, Roll, make_plan, rank_of
from swarmcli.averaging.config import MatchmakingOptions
from swarmcli.averaging.gathering import Gathering
from swarmcli.averaging.meeting import Answer, Joining, Reply
from swarmcli.averaging.moves import Goal, Moves
from swarmcli.network.identity import PeerID

LIFETIME = 60.0  # seconds that a declaration is believed unless it is heard again
BELIEF = 2.0  # seconds that "I follow somebody else" or "my group is full" is believed
MIN_SETTLE = 0.05  # seconds of quiet after which peers that start together have met …
SETTLE_FACTOR = 3.0  # … and at least so many times as long as it took to declare and read
MAX_INVITATIONS = 3  # to one search of one peer
INVITATIONS_AT_ONCE = 16
HEDGE = 1 / 6  # after this part of request_timeout without an answer the next in rank is asked as well
TICK = 1.0  # seconds between looks at the clock when nothing happens


class Search:
    """One peer's search for one group. `leader` is whom it follows; None while it looks or leads."""

    def __init__(
        self,
        me: Candidate,
        roll: Roll,
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
        self.gathering = Gathering(
            options, now=now, opens_at=goal.opens_at, target=goal.target, crew=goal.crew - {me.peer_id}
        )
        self.leader: Candidate | None = None
        self.begun = False
        self._connected = connected
        self._asking: dict[PeerID, float] = {}  # whose answer is awaited → since when
        self._directed: PeerID | None = None  # a leader that somebody named, and that is asked before all others
        self._full: dict[PeerID, float] = {}  # leader → until when it is believed to be full
        self._redirects: list[PeerID] = []
        self._leaves: list[PeerID] = []
        self._has_read = False
        self._settle = MIN_SETTLE
        self._news_at = now
        self._leader_until = math.inf  # the leader is silent if nothing is heard by then

    # What others say

    def learn(self, candidate: Candidate, now: float, *, direct: bool = False) -> None:
        """Somebody looks for a group: said by himself (`direct`), by the declarations or by a third peer."""
        if self.roll.learn(candidate, now, LIFETIME, direct=direct):
            self._news_at = now

    def on_read(self, now: float, duration: float) -> None:
        """The declarations were read; it took `duration` seconds to declare and read."""
        if not self._has_read:
            self._has_read = True
            self._news_at = now
            # Two that start together learn of each other within the time that the slower takes for this.
            self._settle = max(MIN_SETTLE, SETTLE_FACTOR * duration)

    def on_join(self, candidate: Candidate, joining: Joining, now: float) -> Answer:
        """A peer asks to follow this one."""
        self.learn(candidate, now, direct=True)
        if self.begun:
            return Answer("begun")
        if rank_of(candidate) < self.rank:
            return Answer("outranked", self.me)
        if self.leader is not None:
            return Answer("follow", self.me, self.leader)
        if not self.me.listening:
            return Answer("cannot_lead", self.me)
        if candidate.peer_id not in self.gathering.followers and self.gathering.is_full:
            return Answer("full", self.me, self._leader_of_the_rest(candidate.peer_id, now))
        self.gathering.add(candidate, joining, now)
        self._news_at = now
        return Answer("accepted", self.me)

    def on_invitation(self, sender: Candidate, to: Candidate, now: float) -> Reply:
        """A peer names a leader to ask: itself, or the one that it follows now together with its followers."""
        self.learn(sender, now, direct=True)
        self.learn(to, now, direct=to.peer_id == sender.peer_id)
        if self.begun:
            return Reply("begun")
        self.roll.names_leader(sender.peer_id, to.peer_id, now + BELIEF)
        if to.peer_id != sender.peer_id:
            if self.leader is not None and self.leader.peer_id == sender.peer_id:
                self.leader = None
            self._asked(sender.peer_id)  # its answer, if one is under way, is out of date
        if self.leader is not None:
            return Reply("following", self.me, self.leader)
        if rank_of(to) > self.rank:
            return Reply("outranked", self.me)
        self._directed = to.peer_id
        return Reply("coming", self.me)

    def on_progress(self, peer: PeerID, progress: float) -> bool:
        """A follower's cumulative progress. Returns whether it is a follower."""
        follower = self.gathering.followers.get(peer)
        if follower is not None:
            follower.progress = max(follower.progress, progress)
        return follower is not None

    def on_heartbeat(self, peer: PeerID, search: bytes, patience: float, now: float) -> bool:
        """The leader lives and will be heard again within `patience` seconds. Returns whether it is followed."""
        if self.leader is None or (self.leader.peer_id, self.leader.search) != (peer, search):
            return False
        self._leader_until = now + patience
        return True

    def on_begin(self, peer: PeerID, search: bytes) -> bool:
        """A leader says that its group begins, with this peer's `search` in it. Returns whether that is so."""
        # The message may overtake the answer to the request to join.
        awaited = self._asking if self.leader is None else (self.leader.peer_id,)
        if self.begun or peer not in awaited or search != self.me.search:
            return False
        self.begun = True
        return True

    @property
    def unanswered(self) -> list[PeerID]:
        """Peers that may count this one among their followers before it knows."""
        return list(self._asking)

    def on_leave(self, peer: PeerID, search: bytes, now: float) -> None:
        """A follower went, or the leader gave its group up: that search of it no longer counts on this peer."""
        follower = self.gathering.followers.get(peer)
        if follower is not None and follower.candidate.search == search:
            self.gathering.remove(peer)
        if self.leader is not None and (self.leader.peer_id, self.leader.search) == (peer, search):
            self.on_parted(peer, now)
            self.roll.finish(peer)

    def on_parted(self, peer: PeerID, now: float) -> None:
        """The leader does not know this peer as its follower, or not any more; it may be asked again."""
        if self.leader is not None and self.leader.peer_id == peer:
            self.leader = None
            self._news_at = now

    def on_lost(self, peer: PeerID, now: float) -> None:
        """The connection to this peer is gone, or it does not answer."""
        self.gathering.remove(peer)
        self.gathering.absent.discard(peer)
        self.roll.fail(peer, now, 2 * self.options.request_timeout)
        self.on_parted(peer, now)

    # How own requests ended

    def on_answer(self, peer: PeerID, answer: Answer, now: float) -> None:
        """The asked peer answered."""
        awaited = self._asked(peer)
        self._learn_from(peer, answer.candidate, answer.to, now)
        match answer.verdict:
            case "accepted" if answer.candidate is not None:
                if awaited and not self.begun and self.leader is None:
                    self._follow(answer.candidate, now)
                else:
                    self._leaves.append(peer)
            case "follow" if answer.to is not None and rank_of(answer.to) < self.rank:
                self.roll.names_leader(peer, answer.to.peer_id, now + BELIEF)
            case "full":
                self._full[peer] = now + BELIEF
                self._directed = answer.to.peer_id if answer.to is not None else None
            case "begun":
                self.roll.finish(peer)
            case "outranked":
                pass  # its true rank is known now
            case _:
                self.roll.pass_over(peer, now + BELIEF)

    def on_refused(self, peer: PeerID) -> None:
        """The asked or invited peer has other terms, or looks for nothing: it is out until it begins anew."""
        self._asked(peer)
        self.gathering.remove(peer)
        self.roll.finish(peer)

    def on_no_answer(self, peer: PeerID, now: float) -> None:
        """The asked or invited peer could not be reached or was silent for too long."""
        self._asked(peer)
        self.on_lost(peer, now)

    def on_reply(self, peer: PeerID, reply: Reply, now: float) -> None:
        """The invited peer answered."""
        self._learn_from(peer, reply.candidate, reply.to, now)
        if reply.verdict == "begun":
            self.gathering.absent.discard(peer)
            self.roll.finish(peer)
        elif reply.verdict == "coming" and peer in self.roll.entries:
            self.roll.entries[peer].coming_until = now + self.options.request_timeout
        elif reply.verdict == "following" and reply.to is not None and reply.to.peer_id != self.me.peer_id:
            self.roll.names_leader(peer, reply.to.peer_id, now + BELIEF)

    def _asked(self, peer: PeerID) -> bool:
        """No answer of this peer is awaited any more. Returns whether one was."""
        if self._directed == peer:
            self._directed = None
        return self._asking.pop(peer, None) is not None

    def _learn_from(self, peer: PeerID, own: Candidate | None, to: Candidate | None, now: float) -> None:
        if own is not None and own.peer_id == peer:
            self.learn(own, now, direct=True)
        if to is not None:
            self.learn(to, now)

    def _follow(self, leader: Candidate, now: float) -> None:
        self.leader = leader
        self._leader_until = now + self.options.request_timeout
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
        until = self._leader_until
        if self.gathering.target is None:
            # A leader that sends heartbeats and never begins holds nobody for long.
            until = min(until, self.gathering.close_at + 2 * self.options.request_timeout)
        moves.wake_at = min(moves.wake_at, until)
        if now >= until:
            self._leaves.append(leader)
            self.on_lost(leader, now)

    def _seek(self, now: float, moves: Moves) -> None:
        hedged_at = [since + self._hedge for since in self._asking.values()]
        waiting = any(at > now for at in hedged_at)
        present = self.roll.present(now)
        if not waiting:
            # Whoever is slow to answer may still do so; meanwhile the next in rank is asked.
            present = [entry for entry in present if entry.candidate.peer_id not in self._asking]
        plan = make_plan(self.me, self.rank, present, self.options, now)
        expected = self._expected(plan, now)
        if not waiting:
            moves.ask = self._whom_to_ask(plan, now)
            if moves.ask is not None:
                self._asking[moves.ask.peer_id] = now
                hedged_at.append(now + self._hedge)
            else:
                moves.invite = self._whom_to_invite(expected, now)
        hopes = [self._hope(entry) for entry in expected]
        decision = self.gathering.decide(
            now,
            missing=any(until > now for until in hopes),
            asking=waiting or moves.ask is not None,
            settled_at=self._news_at + self._settle if self._has_read else math.inf,
            keep_looking=self.keep_looking,
        )
        self.begun = moves.begin = decision.begin
        moves.give_up = decision.give_up
        times = (moves.wake_at, decision.wake_at, *hopes, *hedged_at)
        moves.wake_at = min(time for time in times if time > now)

    @property
    def _hedge(self) -> float:
        return HEDGE * self.options.request_timeout

    def _hope(self, entry: Entry) -> float:
        """Until when the group waits for this candidate."""
        if entry.invitations:
            # Whoever follows somebody else is brought along by him, or sent here.
            return max(entry.coming_until, entry.follows_until, entry.invited_at + self._hedge)
        patience = self.options.request_timeout
        return entry.since + (patience if entry.candidate.listening else patience / 2)

    def _whom_to_ask(self, plan: Plan, now: float) -> Candidate | None:
        """The leader that this peer should follow; None if it should lead itself, or can only wait."""
        if self.me.peer_id in plan.leaders or (plan.crowded and self.gathering.followers):
            return None
        first = plan.dealt.get(self.me.peer_id)
        order = [self._directed] if self._directed is not None else []
        if first is not None:
            start = plan.leaders.index(first)
            order += plan.leaders[start:] + plan.leaders[:start]
        for peer in order:
            entry = self.roll.entries.get(peer)
            if entry is not None and entry.rank < self.rank and self._full.get(peer, 0.0) <= now:
                return entry.candidate
        return None

    def _expected(self, plan: Plan, now: float) -> list[Entry]:
        """Those who should come to this peer and are not here yet."""
        here = self.gathering.followers
        expected = [peer for peer, leader in plan.dealt.items() if leader == self.me.peer_id and peer not in here]
        entries = [self.roll.entries[peer] for peer in expected]
        # With several groups whoever follows another leader belongs there; otherwise its leader will bring it along.
        return [entry for entry in entries if not (plan.crowded and entry.follows_until > now)]

    def _whom_to_invite(self, expected: list[Entry], now: float) -> list[Candidate]:
        pause = self.options.request_timeout / 2
        chosen = [
            entry
            for entry in expected
            if entry.invitations < MAX_INVITATIONS
            and now >= entry.invited_at + pause
            and entry.follows_until <= now
            and (entry.candidate.listening or self._connected(entry.candidate.peer_id))
        ][:INVITATIONS_AT_ONCE]
        for entry in chosen:
            entry.invited_at = now
            entry.invitations += 1
        return [entry.candidate for entry in chosen]

    def _leader_of_the_rest(self, asker: PeerID, now: float) -> Candidate | None:
        """Who should lead those for whom there is no room here; None if the asker itself."""
        rest = [entry for entry in self.roll.present(now) if entry.candidate.peer_id not in self.gathering.followers]
        plan = make_plan(None, None, rest, self.options, now)
        leader = plan.dealt.get(asker)
        return self.roll.entries[leader].candidate if leader is not None else None
