"""A peer trusts some others of its run less: by a score that decays, and a proof that does not.

    suspicion   it cost a round or its time, and nothing proves that it lied: it is left out of the next group, then of
                2, 4, … 64, and a failed reducer gets nothing to reduce in 16 times as many
    word        it did not stand by what it reported: its reports count for nothing, for 15 s, a minute … an hour
    proof       it signed two unlike things, or an audit found its average false: it is out for the run

A suspicion is this peer's own affair. It tells nobody, the suspicion ends by itself, and a suspect takes part again as
soon as a group would be too small without it, or lacks the samples that it has (`admit`). Nobody can make a proof
against an honest peer, and anyone can check it without having been there: a peer that gets one shows it, once, to the
members of the groups in which it met the culprit, and each of them bans it. In an open run proofs travel no further,
since a new identity costs a stranger nothing. In a closed one each member shows them to all with which it is connected,
the owner's monitor among them: the owner may revoke the culprit's membership.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from swarmcli.averaging.audit.signed import SignedAverages
from swarmcli.averaging.certificate import DoubleWord, GroupID, Signature
from swarmcli.averaging.config import MAX_PREFIX
from swarmcli.averaging.group import MAX_MEMBERS, MAX_SEARCH_BYTES, is_listed
from swarmcli.backoff import Backoff
from swarmcli.errors import CallRefused, NetworkError
from swarmcli.events import PeerBanned, PeerRefused
from swarmcli.network import Endpoint
from swarmcli.network.identity import PeerID
from swarmcli.network.loop_thread import loop_time
from swarmcli.network.task_owner import TaskOwner
from swarmcli.recent import Recent

MOST_GROUPS = 64  # that one suspicion costs: a liar that comes back each time keeps less than a twentieth of its harm
# Seconds for which an epoch waits for the samples of a suspect, for each group that it is left out of; and for one that
# has spoiled the groups that it led, and would soon lead again.
SECONDS_PER_GROUP = 1.0
SECONDS_PER_LED = 15.0
# Seconds for which a word counts for nothing: an honest peer that could not answer once is heard again soon.
FIRST_SILENCE, LONGEST_SILENCE, SILENCE_GROWTH = 15.0, 3600.0, 4.0
WORK_GROUPS = 16  # in which a failed reducer gets nothing to reduce, for each group that a suspicion costs
GROUPS_KEPT = 4  # the last groups, whose members may show proofs against each other
MAX_BANS = 1024  # that are remembered: a group's members alone can be banned, so one liar adds one
TO_TELL = 10.0  # seconds for a member to hear of a proof

logger = logging.getLogger(__name__)


class UnlikeAverages(msgspec.Struct, frozen=True, tag=True):
    """A reducer signed two unlike sets of averages in one try at a round. Honest ones form each average once."""

    culprit: PeerID
    prefix: Annotated[str, msgspec.Meta(max_length=MAX_PREFIX)]
    group_id: GroupID
    first: SignedAverages
    second: SignedAverages

    def verify(self) -> bool:
        """Whether it proves the lie; two signatures are checked."""
        both = self.first, self.second
        unlike = self.first.root != self.second.root
        return unlike and all(each.is_by(self.culprit, self.prefix, self.group_id) for each in both)

    def words(self) -> str:
        return f"it gave members of round {self.group_id.hex()[:8]} unlike averages, and signed both"


class TwoGroups(msgspec.Struct, frozen=True, tag=True):
    """A leader signed two groups in one `search` of its own. Honest ones begin one in each."""

    culprit: PeerID
    search: Annotated[bytes, msgspec.Meta(max_length=MAX_SEARCH_BYTES)]
    groups: tuple[GroupID, GroupID]
    listed: tuple[Signature, Signature]

    def verify(self) -> bool:
        """Whether it proves the lie; two signatures are checked."""
        both = zip(self.groups, self.listed, strict=True)
        return self.groups[0] != self.groups[1] and all(
            is_listed(self.culprit, self.search, group_id, signature) for group_id, signature in both
        )

    def words(self) -> str:
        return f"it began two groups at once, {self.groups[0].hex()[:8]} and {self.groups[1].hex()[:8]}"


SignedProof: TypeAlias = DoubleWord | TwoGroups | UnlikeAverages  # a tagged union: further kinds join it with |


class Proof(Protocol):
    """Grounds for a ban: a `SignedProof`, which fits into a message, or an audit's, which each member makes itself."""

    @property
    def culprit(self) -> PeerID: ...
    def verify(self) -> bool: ...
    def words(self) -> str: ...


class ProofMessage(msgspec.Struct, frozen=True):
    """A member shows another one that a third lied."""

    proof: SignedProof


class ProofTaken(msgspec.Struct, frozen=True):
    """The answer: the proof was checked."""


@dataclass(slots=True)
class _Suspicion:
    reason: str
    score: int  # groups that it costs: 1, 2, 4 …
    seats: int = 0  # of these groups, left without a seat
    work: int = 0  # groups left with nothing to reduce
    warned: bool = False  # it has been suspect for more than its work: the next broken connection costs a seat
    wait: float = SECONDS_PER_GROUP  # seconds that an epoch waits instead of each


class PeerTrust:
    """One peer's opinion of the others of one run; all its averagers of that run share it, see `of`.

    Groups that go well end a suspicion, not time. A suspect gets its seat back without that where no group can go well
    without it: the other peers may have nothing to average.
    """

    def __init__(self, endpoint: Endpoint, run: str) -> None:
        self.method = f"trust.proof.{run}"
        self._endpoint = endpoint
        self._suspicions: Recent[PeerID, _Suspicion] = Recent(MAX_MEMBERS)
        self._words = Backoff[PeerID](FIRST_SILENCE, LONGEST_SILENCE, SILENCE_GROWTH)
        # Proofs of the banned, all of them verified. An audit's has the inputs of a whole part: it is not kept
        self._proofs: Recent[PeerID, SignedProof | None] = Recent(MAX_BANS)
        self._groups = deque[frozenset[PeerID]](maxlen=GROUPS_KEPT)
        self._listeners: dict[Callable[[PeerID], None], None] = {}
        self._users = 0
        self._tasks = TaskOwner()

    @classmethod
    def of(cls, endpoint: Endpoint, run: str) -> PeerTrust:
        """The one that everything of this run shares at this endpoint."""
        trust = _SHARED.get((id(endpoint), run))
        if trust is None:
            trust = _SHARED[id(endpoint), run] = cls(endpoint, run)
        return trust

    def start(self) -> None:
        """Begins to hear proofs of others, for as many users as have called it."""
        self._users += 1
        if self._users == 1:
            self._endpoint.serve(self.method, ProofMessage, self._hear)

    async def stop(self) -> None:
        """One user less; with the last one it ends. What is known stays, for users to come."""
        self._users -= 1
        if self._users == 0:
            self._endpoint.withdraw(self.method)
            await self._tasks.close()

    # The score, which decays

    def suspect(
        self,
        peer: PeerID,
        reason: str,
        *,
        seat: bool = True,
        work: bool = False,
        lost: bool = False,
        led: bool = False,
    ) -> None:
        """A peer gives cause for suspicion: no `seat` in the next group, nothing to reduce (`work`) in the next 16, and
        in twice as many each time.

        `lost`: the connection with it broke meanwhile, as when its address changes. That costs no seat, unless it
        was suspect already: a peer that breaks its connections again and again gains nothing by it. `led`: it is about
        its leading: the group that forms without it now is not yet the next one.
        """
        known = self._suspicions.get(peer)
        if known and known.work and not seat:
            return  # one cause in two tries of a round
        suspicion = known or _Suspicion(reason, 0)
        suspicion.reason, suspicion.score = reason, min(max(1, 2 * suspicion.score), MOST_GROUPS)
        suspicion.wait = SECONDS_PER_LED if led else SECONDS_PER_GROUP
        if work:
            suspicion.work = WORK_GROUPS * suspicion.score
        if seat and (suspicion.warned or not lost):
            suspicion.seats = suspicion.score + led
        suspicion.warned |= seat
        self._suspicions[peer] = suspicion

    def has_no_seat(self, peer: PeerID) -> bool:
        """Whether it is to have no seat in the next group."""
        return peer in self._suspicions and self._suspicions[peer].seats > 0

    def has_no_work(self, peer: PeerID) -> bool:
        """Whether it is to have nothing to reduce."""
        return peer in self._suspicions and self._suspicions[peer].work > 0

    def costs(self, peer: PeerID) -> float:
        """Seconds that a group waits at most before it takes this peer in all the same."""
        suspicion = self._suspicions.get(peer)
        return suspicion.seats * suspicion.wait if suspicion is not None else 0.0

    def reason(self, peer: PeerID) -> str:
        """The reason of the last suspicion; "" for a peer that is not suspect."""
        return self._suspicions[peer].reason if peer in self._suspicions else ""

    def admit(self, waited: float) -> bool:
        """The group has waited so many seconds for samples that, by the reports, peers outside it have, or for anybody
        to come but these. A peer whose suspicion is worth no longer wait gets its seat back, and stays suspect. Returns
        whether there is such a peer."""
        admitted = [each for each in self._suspicions.values() if 0 < each.seats * each.wait <= waited]
        for each in admitted:
            each.seats = 0
        return bool(admitted)

    def note_group(self, members: frozenset[PeerID]) -> None:
        """A round of these members has committed: suspects have stayed away, or had no work, once more; this peer
        trusts those that took part a little more, and in the end wholly."""
        for peer, each in list(self._suspicions.items()):
            if peer in members and not each.seats and not each.work:
                each.score //= 2
            each.seats -= each.seats > 0 and peer not in members
            each.work -= each.work > 0
            if not each.score:
                del self._suspicions[peer]

    def disbelieve(self, peers: Iterable[PeerID]) -> None:
        """They did not stand by what they said: for a while, longer each time, their word counts for nothing."""
        for peer in peers:
            self._words.add(peer, loop_time())

    def believes(self, peer: PeerID) -> bool:
        """Whether the word of a peer counts."""
        return not self._words.rests(peer, loop_time())

    # The proof, which does not

    def prove(self, proof: Proof) -> bool:
        """Returns whether it proves a lie; then its culprit is banned, and members that met it are shown the proof."""
        proven = proof.verify()
        if proven:
            self.ban(proof)
        return proven

    def ban(self, proof: Proof) -> None:
        """The same with a proof that was verified."""
        culprit = proof.culprit
        if culprit in self._proofs:
            return
        self._proofs[culprit] = proof if isinstance(proof, SignedProof) else None
        self._endpoint.events.emit(PeerBanned(culprit.text, proof.words()))
        for listener in list(self._listeners):
            listener(culprit)
        members = {peer for group in self._groups if culprit in group for peer in group}
        self.show(culprit, members | {*self._endpoint.connected()} if self._closed else members)

    def show(self, culprit: PeerID, peers: Iterable[PeerID]) -> None:
        """Shows the proof against a banned peer to these, which have met it as well. An audit's proof is too large: it
        has shown that to the members itself."""
        proof = self._proofs[culprit]
        for peer in sorted(peers):  # sets differ in order from process to process
            if proof is not None and self._users and peer != self._endpoint.peer_id and not self.is_banned(peer):
                self._tasks.spawn(self._show_one(peer, ProofMessage(proof)))

    def is_banned(self, peer: PeerID) -> bool:
        return peer in self._proofs

    def proof(self, peer: PeerID) -> SignedProof | None:
        """Returns what a banned peer has signed itself; None if an audit found it, and for any other peer."""
        return self._proofs.get(peer)

    def check(self, peer: PeerID) -> None:
        """Raises CallRefused for a banned peer."""
        if self.is_banned(peer):
            raise CallRefused("banned", "this peer was banned from the run, since it lied")

    def subscribe(self, listener: Callable[[PeerID], None]) -> Callable[[], object]:
        """`listener` hears of each peer when it is banned; the returned function ends that. Idempotent."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def enter(self, group: Iterable[PeerID]) -> None:
        """A group of these has begun, this peer in it: they may show it proofs against each other."""
        self._groups.append(frozenset(group))

    @property
    def _closed(self) -> bool:
        return self._endpoint.membership is not None

    async def _show_one(self, peer: PeerID, message: ProofMessage) -> None:
        try:
            await self._endpoint.call(peer, self.method, message, ProofTaken, timeout=TO_TELL)
        except NetworkError as error:  # it has no part in the run any more
            logger.debug("%s did not hear of a proof: %s", peer.short, error)

    async def _hear(self, peer: PeerID, message: ProofMessage) -> ProofTaken:
        """Bans by a proof. Raises CallRefused for one that proves nothing; this peer does not hear its teller for a
        while, longer each time: so few messages can make this peer verify something in vain."""
        self.check(peer)
        proof, culprit = message.proof, message.proof.culprit
        together = frozenset[PeerID]().union(*(group for group in self._groups if {peer, culprit} <= group))
        if not (together or self._closed) or not self.believes(peer):
            raise CallRefused("not heard", "its teller told something false before, or is in no group with it")
        if not self.is_banned(culprit) and not self.prove(proof):
            self.disbelieve([peer])
            self._endpoint.events.emit(PeerRefused(peer.text, "it accused a peer without proof", what="evidence"))
            raise CallRefused("false proof", "what it shows proves nothing")
        return ProofTaken()


# By endpoint and run, as long as somebody holds it. It holds its endpoint, so no other one has that id meanwhile.
_SHARED: WeakValueDictionary[tuple[int, str], PeerTrust] = WeakValueDictionary()
