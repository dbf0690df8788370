"""How members tell each other what they have signed about the outcome of their round.

    member ── RoundWord: its own new words, and whose it has ──▶ every other member, a few at a time
           ◀──────────────── the same of that one ────────────
    member ── RoundWord: it asks ──▶ one that has words which it lacks, one at a time
           ◀──── these words ───────

Each member tells its own new words to all others that lack them, in the order of the list from its own place on. What
others have signed it sends only to those that ask for it, so that nobody gets it from everybody: with 128 members that
would be a megabyte each. There is no leader here: `RoundOutcome.move` decides by what is signed, and by what this
member sees of the others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence, Set
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from swarmcli.averaging.certificate import Quorum
from swarmcli.averaging.group import Group
from swarmcli.averaging.round.mates import GroupMates
from swarmcli.averaging.round.messages import RoundWord, Standing
from swarmcli.averaging.round.outcome import Action, Next, RoundOutcome, Seen, View, exceeds
from swarmcli.averaging.trust import PeerTrust
from swarmcli.concurrency import Bell, beside
from swarmcli.errors import CallTimeout, NetworkError, UnknownMethod
from swarmcli.network import Endpoint
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.prefix import prefix_of_address

AT_ONCE = 8  # calls at a time …
YOUNG = 0.5  # … where a call that has taken this many seconds no longer counts
LOOK = 1.0  # seconds between two looks at who is in reach
AGAIN = 3.0  # seconds before a member that could not be reached is tried again
PATIENT = 0.5  # seconds without news, after which a member that holds the result asks the others
HOLDING = 3.0  # seconds without news, after which nobody hopes for words of members that only others can reach
SILENT = 5.0  # seconds without a word from a member, after which one that waits asks it again
# Seconds without news, after which nobody waits any more: keepalives end a silent connection in 11. Twice that after T2
# nobody waits whatever comes: all honest words have been signed by then, and liars may bring theirs one by one.
QUIET = 12.0
CLOCKS = 1.0  # seconds by which members may begin apart; T2 is these and two round trips after T1
SHOWING = 5.0  # seconds for which a member that is done goes on showing what it knows
TO_PROBE = 5.0  # seconds for a member to answer at the address by which it votes


class Parts(Protocol):
    """A round's averages at this member, as the agreement needs them."""

    @property
    def ended(self) -> bool:
        """Whether its own exchange has ended, with or without a result."""

    @property
    def digest(self) -> bytes | None:
        """Names the result that this member holds; None: it does not hold all of it, or the result does not count."""

    @property
    def lacks(self) -> tuple[str, tuple[int, ...]]:
        """Why averages are missing here, and the reducers that did not give theirs."""

    @property
    def slow(self) -> Set[int]:
        """Members that kept this one waiting: it waits for nothing more from them."""

    @property
    def lacking(self) -> int:
        """The number of averages that are not here."""

    async def obtain(self, digest: bytes, holder: int, *, last: bool) -> bool:
        """Fetches a result from a member. `last`: no other one may have it. Returns whether all of it is here then."""


class Met:
    """Which members of its group this one has met in this round. In a guarded group only their words count, since a
    leader may list keys that are no peers. Where networks vote, a member is met by a connection from or to its network,
    or by a probe."""

    def __init__(self, group: Group, endpoint: Endpoint, quorum: Quorum) -> None:
        self._group, self._endpoint, self._quorum = group, endpoint, quorum
        self._me = group.index_of(endpoint.peer_id)
        self._met = {self._me}

    def __call__(self, member: int) -> bool:
        if not self._quorum.guarded or member in self._met or member not in self._quorum.voters:
            return True  # who has no vote has no word, and may have no address
        mine, its, networks = self._group.members[self._me], self._group.members[member], self._group.networks
        if not (self._quorum.by_networks or mine.listening or its.listening):
            return True  # neither can dial the other: the listed member's word counts
        network = self._endpoint.prefix(its.peer_id)
        neighbours = not self._quorum.by_networks or networks[member] == networks[self._me]
        if network is not None and (neighbours or network == prefix_of_address(its.addresses[0])):
            self._met.add(member)
        return member in self._met

    async def probe(self, member: int) -> None:
        """Looks whether a member that is connected from another network answers at the address by which it votes."""
        its = self._group.members[member]
        with suppress(NetworkError):
            await self._endpoint.probe(its.addresses[0], its.peer_id, timeout=TO_PROBE)
            self._met.add(member)


class Agreement:
    """One member's side of the talk about one round's outcome. It answers the others as long as this peer
    remembers the round."""

    def __init__(self, mates: GroupMates, outcome: RoundOutcome, trust: PeerTrust) -> None:
        """`trust` gets the proofs."""
        self.mates, self.outcome, self._trust = mates, outcome, trust
        self.begun = False  # this member has begun its part in the round, or has declined it
        self.over = False  # this member takes no part in the round any more
        self.told: dict[int, RoundWord] = {}  # the last word of each member
        self._parts: Parts | None = None
        self._lacked: tuple[str, tuple[int, ...]] = "", ()  # the last `Parts.lacks`, once its part is over
        self._news, self._own = 0, 0  # counts changes of what is known here; the count at the last own word
        self._heard: dict[int, int] = {}  # member → the count when it last heard everything, or did not answer
        self._talking: dict[int, float] = {}  # member → since when
        self._asking: int | None = None  # the member that this one asks for words of others
        self._withholds: dict[int, float] = {}  # member that told of more words than it gave → not asked until then
        self._rests: dict[int, float] = {}  # member that did not answer → not called until then
        self._spoke: dict[int, float] = {}  # member → when this one last heard it
        self._unreachable: set[int] = set()
        self._silent: set[int] = set()  # of these, those that say nothing: they may be frozen, or this member cut off
        self._tried: dict[bytes, set[int]] = {}  # digest → members that were asked for this result
        self._last_news = loop_time()
        self._late_at = math.inf
        self._bell = Bell()

    # Its own part

    async def run(self, parts: Parts, seconds: float) -> Next:
        """Takes part until the outcome is known, or will not become known here. `seconds`: that the exchange may
        take."""
        self._parts = parts
        self.end_at(loop_time() + seconds)
        try:
            async with beside(self._talk_to_all()):
                while True:
                    following = self.outcome.move(self.view)
                    match following.move:
                        case Action.ECHO:
                            self.outcome.echo(following.digest or b"")
                        case Action.VOTE:
                            self.outcome.vote(following.digest or b"")
                        case Action.GIVE_UP:
                            self.outcome.give_up()
                        case Action.FETCH:
                            await self._fetch(following.digest or b"")
                        case Action.WAIT:
                            await self._wait(LOOK)
                            continue
                        case _:
                            return following
                    self.note_own()
        finally:
            self._lacked = parts.lacks
            self._parts = None

    def end_at(self, moment: float) -> None:
        """Sets T1, when first-hand votes end (loop time), and with it T2, a little later, when give-ups begin. Neither
        moves to a later time."""
        self._late_at = min(self._late_at, moment + 2 * self.mates.slowest_round_trip + CLOCKS)

    async def _fetch(self, digest: bytes) -> None:
        """Asks each member that may hold this result for it, once, except those that have just been too slow to bring
        their own part of it."""
        assert self._parts is not None
        tried = self._tried.setdefault(digest, set())
        tried |= self._parts.slow
        await self.obtain(self._parts, digest, tried, self._late_at)

    async def obtain(self, parts: Parts, digest: bytes, tried: set[int], ends_at: float) -> bool:
        """Asks the holders of a result that have not been `tried`, one after the other, until `ends_at` (loop time). A
        holder that has brought less than half of what was lacking in half of the time left is cut off if another one
        may have it: so a member that trickles does not take all of the time. Returns whether all of the result is
        here."""
        while holders := [member for member in self.holders(digest) if member not in tried]:
            tried.add(holders[0])
            left, last, lacked = ends_at - loop_time(), not holders[1:], parts.lacking
            copying = asyncio.ensure_future(parts.obtain(digest, holders[0], last=last))
            try:
                await asyncio.wait({copying}, timeout=max(0.0, left if last else left / 2))
                if 2 * parts.lacking <= lacked:
                    await asyncio.wait({copying}, timeout=max(0.0, ends_at - loop_time()))
                if copying.done() and copying.result():
                    return True
            finally:
                copying.cancel()
                await asyncio.wait({copying})
        return False

    def holders(self, digest: bytes) -> list[int]:
        """Members that may give this result, in the order in which this one asks them: those in reach first, and of
        these the one that is listed after this one. Whoever knows the outcome may hold the result without having signed
        it.
        """
        settled = {member for member, word in self.told.items() if word.settled}
        count, me = len(self.mates), self.mates.me
        return sorted(
            (self.outcome.holders(digest) | settled) - self.mates.group.auxiliaries,
            key=lambda each: (each in self._unreachable or not self.mates.is_connected(each), (each - me) % count),
        )

    def leave(self) -> None:
        """This member takes no further part: unless it has voted, it signs that it never will."""
        self.begun = self.over = True
        if self.outcome.certificate is None:
            self.outcome.give_up()
        self.note_own()
        self._ban_liars()

    def _ban_liars(self) -> None:
        """Bans whom a proof accuses. Called only once the round is over here: a ban in the middle would hold it up."""
        for proof in self.outcome.proofs.values():
            self._trust.ban(proof)

    def note_own(self) -> None:
        """This member has a word that the others should hear."""
        self._news += 1
        self._own = self._news
        self._last_news = loop_time()
        self._bell.ring()

    @property
    def settled(self) -> bool:
        return self.outcome.dead or self.outcome.certificate is not None

    # Its view

    @property
    def view(self) -> View:
        parts, now = self._parts, loop_time()
        strange = {member for member, word in self.told.items() if word.standing == "unknown"}
        reach = set(self.outcome.quorum.voters) - {self.mates.me} - self._unreachable - strange
        slow = set[int]() if parts is None else parts.slow
        unsigned = (reach - slow) & self.outcome.unsigned
        busy = {member for member in unsigned if member in self.told and self.told[member].busy}
        late = now > self._late_at
        # Words of members out of reach come through members in reach. A member that has no result and has signed
        # nothing does not wait for them: to give up costs it no more than this round.
        empty = not self.outcome.closed and not self.mates.auxiliary and (parts is None or parts.digest is None)
        patience = QUIET if self.outcome.closed and self.outcome.unsigned & self._silent else HOLDING
        patient = empty or now - self._last_news > patience
        return View(
            holds=None if parts is None else parts.digest,
            ended=parts is None or parts.ended,
            busy=busy,
            reach=reach,
            asked=patient and all(self._heard.get(member, -1) >= self._news for member in reach),
            unobtainable={digest for digest, tried in self._tried.items() if tried.issuperset(self.holders(digest))},
            late=late,
            over=(now - self._last_news > QUIET and (late or not busy)) or now > self._late_at + 2 * QUIET,
        )

    def word(self, member: int, *, asks: bool = False, asked: bool = False) -> RoundWord:
        """This member's word to another one. `asks`: it asks for words that it lacks. `asked`: it answers one that
        asks, and adds what others have signed."""
        own = None if asked else {self.mates.me}
        known = self.outcome.beyond(self._seen_by(member), own)
        reason, failed = self._lacked if self._parts is None else self._parts.lacks
        busy = not self.over and (not self.begun or self.outcome.is_busy(self.view))
        facts = self.mates.group.group_id, self.standing, busy, self.settled, failed, reason
        return RoundWord(*facts, self.outcome.seen, known, asks)

    def _seen_by(self, member: int) -> Seen:
        """The words about the outcome that a member has, by its last word to this one."""
        return self.told[member].seen or () if member in self.told else ()

    @property
    def standing(self) -> Standing:
        return "over" if self.over else "running" if self.begun else "expected"

    # Words of others

    def answer(self, member: int, word: RoundWord) -> RoundWord:
        """Takes in another member's word. Returns this one's, with what that member does not know yet."""
        if word.seen is None:
            return RoundWord(self.mates.group.group_id, self.standing, settled=self.settled)
        self.hear(member, word)
        answer = self.word(member, asked=word.asks)
        self._heard[member] = self._news
        return answer

    def hear(self, member: int, word: RoundWord) -> None:
        self._unreachable.discard(member)
        self._silent.discard(member)
        self.outcome.met(member)  # while it is connected
        self._rests.pop(member, None)
        self._spoke[member] = loop_time()
        failed = tuple(sorted({*word.failed} & {*range(len(self.mates))}))
        before, self.told[member] = self.told.get(member), replace(word, failed=failed, known=())
        if self.outcome.learn(word.known):
            self._news += 1
            self._last_news = loop_time()
        elif before is None or (before.busy != word.busy and loop_time() <= self._late_at):
            self._last_news = loop_time()  # only until T2: a liar may say now this, now that
        if self.over:
            self._ban_liars()
        self._bell.ring()

    # Talking

    async def show(self) -> None:
        """Goes on showing what is known here, for a while or until all in reach know the outcome."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SHOWING):
                await self._talk_to_all(last=True)

    async def _talk_to_all(self, *, last: bool = False) -> None:
        me, count = self.mates.me, len(self.mates)
        ring = sorted(self.mates.others, key=lambda member: (member - me) % count)  # or all would call one first
        async with asyncio.TaskGroup() as tasks:
            while True:
                view, quiet = self.view, loop_time() - self._last_news > PATIENT
                # It asks even members that have heard everything if it lacks the result, or has heard no news of late.
                asks = not last and view.ended and (view.holds is None or quiet)
                due = [member for member in ring if self._is_due(member, asks)]
                if last and not due and not self._talking:
                    return
                if self._asking is None and not self.settled and (known := self._who_knows_more(ring)) is not None:
                    self._asking = known
                    tasks.create_task(self._ask(known))
                young = sum(loop_time() - since < YOUNG for since in self._talking.values())
                for member in due[: max(0, AT_ONCE - young)]:
                    self._talking[member] = loop_time()
                    tasks.create_task(self._talk(member))
                await self._wait(YOUNG if due or self._talking else LOOK)

    def _who_knows_more(self, ring: Sequence[int]) -> int | None:
        """A member that has words which this one lacks; for a while not one that has not given what it told of."""
        own = self.outcome.seen
        for member in ring:
            rests = self._withholds.get(member, -math.inf) > loop_time()
            if self.mates.is_connected(member) and not rests and exceeds(self._seen_by(member), own):
                return member
        return None

    async def _ask(self, member: int) -> None:
        with suppress(NetworkError):
            self.hear(member, await self.mates.ask(member, "outcome", self.word(member, asks=True), RoundWord))
        if exceeds(self._seen_by(member), self.outcome.seen):
            self._withholds[member] = loop_time() + LOOK
        self._asking = None
        self._bell.ring()

    def _is_due(self, member: int, asks: bool) -> bool:
        if member in self._talking or self._rests.get(member, -math.inf) > loop_time():
            return False
        heard, word = self._heard.get(member, -1), self.told.get(member)
        if self.settled or self._parts is None:  # it shows what it knows to those that are connected
            knows = word is not None and word.settled
            return heard < self._own and not knows and self.mates.is_connected(member)
        gone = not self.mates.is_connected(member) or loop_time() - self._spoke.get(member, 0.0) > SILENT
        return heard < self._own or (heard < self._news and (asks or self._must_relay(member))) or (asks and gone)

    def _must_relay(self, member: int) -> bool:
        """Whether this peer knows words that their authors cannot bring to the member, since neither can dial the
        other."""
        members, word = self.mates.group.members, self.told.get(member)
        if members[member].dialable or word is None or not self.mates.is_connected(member):
            return False
        lacking = {author for sheet in self.outcome.beyond(word.seen or ()) for author in sheet.signatures}
        return any(not members[author].dialable for author in lacking - {member})

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._bell.wait()

    async def _talk(self, member: int) -> None:
        news = self._news
        try:
            self.hear(member, await self.mates.ask(member, "outcome", self.word(member), RoundWord))
        except NetworkError as error:
            self._rests[member] = loop_time() + AGAIN
            if isinstance(error, UnknownMethod) or not self.mates.is_connected(member):
                self._unreachable.add(member)
                if isinstance(error, CallTimeout):
                    self._silent.add(member)
        else:
            met, quorum = self.outcome.met, self.outcome.quorum
            if isinstance(met, Met) and quorum.by_networks and member in quorum.voters and not met(member):
                await met.probe(member)
        finally:
            del self._talking[member]
        self._heard[member] = max(self._heard.get(member, -1), news)
        self._bell.ring()
