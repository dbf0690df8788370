"""Which peers of its run a peer trusts less: after a suspicion, which decays, or a proof, which does not.

    suspicion   the other cost a round, or its time, and nothing proves that it lied: it has no seat in the next group,
                then in 2, 4, … 64; a failed reducer has nothing to reduce in 16 times as many
    word        the other did not stand by what it reported: its reports count for nothing, for 15 s, a minute … an hour
    proof       the other signed two unlike things, or an audit found its average false: it is banned from the run

A suspicion is this peer's own affair: it tells nobody. The suspicion ends by itself, and a suspect gets its seat back
as soon as a group would be too small without it, or lacks the samples that it has (`admit`). Nobody can make a proof
against an honest peer, and anyone can check one without having been there. A peer that gets a proof shows it, once, to
the members of the groups in which it met the culprit, and each of them bans the culprit. In an open run proofs travel
no further, since a new identity costs a stranger nothing. In a closed run each member shows them to all peers with
which it is connected, the owner's monitor among them: the owner may revoke the culprit's membership.
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

MOST_GROUPS = 64  # without a seat after one cause: a liar that comes back each time does a twentieth of its harm
# Seconds that a group waits before it takes a suspect in all the same, for each group in which that is to have no seat.
# The second is for a suspect that has led badly: it would soon lead again.
SECONDS_PER_GROUP = 1.0
SECONDS_PER_LED = 15.0
# Seconds for which a peer's word counts for nothing. An honest peer that failed to answer once is soon heard again.
FIRST_SILENCE, LONGEST_SILENCE, SILENCE_GROWTH = 15.0, 3600.0, 4.0
WORK_GROUPS = 16  # in which a failed reducer has nothing to reduce, times the suspicion's score
GROUPS_KEPT = 4  # the last groups: members of one of them may show this peer proofs against each other
MAX_BANS = 1024  # bans that are remembered. Only a member of a group can be banned, so each costs a liar an identity
TO_TELL = 10.0  # seconds for a member to take a proof

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
    """Grounds for a ban: a `SignedProof`, which fits into a message, or an audit's proof, which each member makes."""

    @property
    def culprit(self) -> PeerID: ...
    def verify(self) -> bool: ...
    def words(self) -> str: ...


class ProofMessage(msgspec.Struct, frozen=True):
    """A member shows another one a proof that a third one lied."""

    proof: SignedProof


class ProofTaken(msgspec.Struct, frozen=True):
    """The answer: the proof was checked."""


@dataclass(slots=True)
class _Suspicion:
    reason: str
    score: int  # groups in which it is to have no seat: 1, 2, 4 …
    seats: int = 0  # how many of them are left
    work: int = 0  # groups that are left in which it has nothing to reduce
    warned: bool = False  # there was a cause beside its work: from now on a broken connection costs it seats
    wait: float = SECONDS_PER_GROUP  # seconds that a group waits instead of each one that is left
    fresh: bool = True  # no round has committed since: the one in which the suspect gave cause may be about to


class PeerTrust:
    """One peer's opinion of the others of one run; all its averagers of that run share it, see `of`.

    Committed rounds end a suspicion; time does not. But where no group comes about without a suspect, since the others
    have nothing to average, it gets its seat back, see `admit`.
    """

    def __init__(self, endpoint: Endpoint, run: str) -> None:
        self.method = f"trust.proof.{run}"
        self._endpoint = endpoint
        self._suspicions: Recent[PeerID, _Suspicion] = Recent(MAX_MEMBERS)
        self._words = Backoff[PeerID](FIRST_SILENCE, LONGEST_SILENCE, SILENCE_GROWTH)
        # Banned peer → the verified proof against it; None for an audit's, which holds the inputs of a whole part.
        self._proofs: Recent[PeerID, SignedProof | None] = Recent(MAX_BANS)
        self._groups = deque[frozenset[PeerID]](maxlen=GROUPS_KEPT)
        self._listeners: dict[Callable[[PeerID], None], None] = {}
        self._users = 0
        self._tasks = TaskOwner()

    @classmethod
    def of(cls, endpoint: Endpoint, run: str) -> PeerTrust:
        """Returns the one object that everything of this run shares at this endpoint."""
        trust = _SHARED.get((id(endpoint), run))
        if trust is None:
            trust = _SHARED[id(endpoint), run] = cls(endpoint, run)
        return trust

    def start(self) -> None:
        """Begins to hear proofs from others. Each user calls it once."""
        self._users += 1
        if self._users == 1:
            self._endpoint.serve(self.method, ProofMessage, self._hear)

    async def stop(self) -> None:
        """Each user calls it once; the last one ends the hearing. What is known stays, for users to come."""
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
        """A peer gives cause for suspicion. `seat`: it has no seat in the next group; `work`: it has nothing to reduce
        in the next 16. Each further cause doubles that.

        `lost`: the connection with it broke meanwhile, as when its address changes. The first time that costs no seat;
        a peer that breaks its connections again and again gains nothing by it. `led`: the cause is how it led. Then the
        group that forms without it now does not count as the next one.
        """
        known = self._suspicions.get(peer)
        if known and known.work and not seat:
            return  # the same cause as in an earlier try of the round
        suspicion = known or _Suspicion(reason, 0)
        suspicion.reason, suspicion.score = reason, min(max(1, 2 * suspicion.score), MOST_GROUPS)
        suspicion.wait = SECONDS_PER_LED if led else SECONDS_PER_GROUP
        if work:
            suspicion.work = WORK_GROUPS * suspicion.score
        if seat and (suspicion.warned or not lost):
            suspicion.seats = suspicion.score + led
        suspicion.warned |= seat
        suspicion.fresh = True
        self._suspicions[peer] = suspicion

    def has_no_seat(self, peer: PeerID) -> bool:
        """Whether this peer is to have no seat in the next group."""
        return peer in self._suspicions and self._suspicions[peer].seats > 0

    def has_no_work(self, peer: PeerID) -> bool:
        """Whether this peer is to have nothing to reduce in the next group."""
        return peer in self._suspicions and self._suspicions[peer].work > 0

    def costs(self, peer: PeerID) -> float:
        """Seconds that a group waits at most before it takes this peer in all the same."""
        suspicion = self._suspicions.get(peer)
        return suspicion.seats * suspicion.wait if suspicion is not None else 0.0

    def reason(self, peer: PeerID) -> str:
        """The reason of the last suspicion; "" for a peer that is not suspect."""
        return self._suspicions[peer].reason if peer in self._suspicions else ""

    def admit(self, waited: float) -> bool:
        """A group has waited `waited` seconds for samples that peers outside it report, or for anybody but suspects to
        come. A suspect for which `costs` is no more than that gets its seat back, and stays suspect. Returns whether
        there is one."""
        admitted = [each for each in self._suspicions.values() if 0 < each.seats * each.wait <= waited]
        for each in admitted:
            each.seats = 0
        return bool(admitted)

    def note_group(self, members: frozenset[PeerID]) -> None:
        """A round of these members has committed. It is one of those that a suspicion costs, also where another leader
        gave the suspect a seat: else two peers that meet in others' groups alone would never follow each other again.
        The round in which the suspect gave cause is none of them. A suspect that was in it, with seat and work, gets
        half its score, and is trusted again when that comes to 0."""
        for peer, each in list(self._suspicions.items()):
            if peer in members and not each.seats and not each.work:
                each.score //= 2
            each.seats -= each.seats > 0 and not (each.fresh and peer in members)
            each.fresh = False
            each.work -= each.work > 0
            if not each.score:
                del self._suspicions[peer]

    def disbelieve(self, peers: Iterable[PeerID]) -> None:
        """These peers did not stand by what they said: for a while, longer each time, their word counts for nothing."""
        for peer in peers:
            self._words.add(peer, loop_time())

    def believes(self, peer: PeerID) -> bool:
        """Whether the word of a peer counts."""
        return not self._words.rests(peer, loop_time())

    # The proof, which does not

    def prove(self, proof: Proof) -> bool:
        """Returns whether the proof holds; if so, bans its culprit and shows the proof to members that met it."""
        proven = proof.verify()
        if proven:
            self.ban(proof)
        return proven

    def ban(self, proof: Proof) -> None:
        """Bans the culprit of a proof that was verified, and shows the proof to members that met it."""
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
        """Shows these peers the proof against a banned one, if it is a signed one. An audit's is too large, and the
        members have had it."""
        proof = self._proofs[culprit]
        for peer in sorted(peers):  # sets differ in order from process to process
            if proof is not None and self._users and peer != self._endpoint.peer_id and not self.is_banned(peer):
                self._tasks.spawn(self._show_one(peer, ProofMessage(proof)))

    def is_banned(self, peer: PeerID) -> bool:
        return peer in self._proofs

    def proof(self, peer: PeerID) -> SignedProof | None:
        """Returns the signed proof against a banned peer; None if an audit found the lie, and for any other peer."""
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
        """A group of these peers, with this one, has begun: they may show it proofs against each other."""
        self._groups.append(frozenset(group))

    @property
    def _closed(self) -> bool:
        return self._endpoint.membership is not None

    async def _show_one(self, peer: PeerID, message: ProofMessage) -> None:
        try:
            await self._endpoint.call(peer, self.method, message, ProofTaken, timeout=TO_TELL)
        except NetworkError as error:  # it may have left the run
            logger.debug("%s did not hear of a proof: %s", peer.short, error)

    async def _hear(self, peer: PeerID, message: ProofMessage) -> ProofTaken:
        """Bans the culprit of a proof. Raises CallRefused for one that proves nothing, and then does not hear its
        sender for a while, longer each time: so few messages make this peer verify something in vain."""
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


# (id of an endpoint, run) → its PeerTrust, while somebody holds that. It holds the endpoint, so the id stays taken.
_SHARED: WeakValueDictionary[tuple[int, str], PeerTrust] = WeakValueDictionary()
