"""Groups of 4 to 16 with hostile members that share all they know and order all messages: nobody is told two outcomes.

The hostile ones lead and propose whatever they like, in any ballot. They vote for everything, promise whatever suits
them, and decide which honest member hears what and when. With more than f of them the honest ones hear each other while
they compare; that is the bound on their messages.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest

from swarmcli.averaging.consensus import certificate, strangers
from swarmcli.averaging.consensus.acceptor import RoundVotes
from swarmcli.averaging.consensus.certificate import sign_promise, sign_vote, signed, value_hash
from swarmcli.averaging.consensus.comparing import compare
from swarmcli.averaging.consensus.messages import (
    Aborted,
    Again,
    Certificate,
    Committed,
    Decided,
    Decision,
    Kind,
    Prepared,
    Propose,
    SignedPromise,
)
from swarmcli.averaging.group import Group, Member
from swarmcli.network import PeerID
from tests.suites import soak

RESULTS: tuple[Decision, ...] = (Committed(b"a" * 32), Committed(b"b" * 32))
VALUES: tuple[Decision, ...] = (*RESULTS, Aborted("x"), Again((0,), (0,), b""))


class Key:
    """Signs as an identity does, a hundred times as fast. Nobody here signs for another one."""

    def __init__(self, index: int) -> None:
        self.peer_id = PeerID(index.to_bytes(32, "big"))

    def sign(self, purpose: str, *fields: bytes) -> bytes:
        return hashlib.sha512(b"".join([self.peer_id, purpose.encode(), *fields])).digest()


@pytest.fixture(autouse=True)
def quick_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(peer: PeerID, purpose: str, signature: bytes, *fields: bytes) -> bool:
        return signature == hashlib.sha512(b"".join([peer, purpose.encode(), *fields])).digest()

    monkeypatch.setattr(certificate, "verify", verify)


class World:
    """One round, of which `step` lets one thing happen."""

    def __init__(self, size: int, hostile: int, bounded: bool, random_: random.Random) -> None:
        """`bounded`: honest members hear each other before they confirm; otherwise they may be cut off."""
        self.random, self.bounded = random_, bounded
        self.keys = [Key(index) for index in range(size)]
        members = [Member(key.peer_id) for key in self.keys]
        self.group = Group.form(b"", members, [1.0] * size, bytes(16))
        self.liars = random_.sample(range(size), hostile)
        self.honest = {
            index: RoundVotes(self.group, key)  # type: ignore[arg-type]
            for index, key in enumerate(self.keys)
            if index not in self.liars
        }
        self.quorum = next(iter(self.honest.values())).quorum
        lies = random_.choice([0.0, 0.2, 0.5])  # how many honest members a reducer has given another result
        self.holds = {index: RESULTS[random_.random() < lies] for index in self.honest}
        self.votes: dict[tuple[int, Kind, int], dict[int, bytes]] = {}  # by ballot, kind and value
        self.promises: dict[int, dict[int, tuple[SignedPromise, Prepared | None]]] = {}
        self.comparing: list[tuple[int, Prepared, set[int]]] = []
        self.top = 3 if size == 4 else 2
        self.greedy = random_.random() < 0.3  # liars vote twice, and are found by that where it is shown
        self.targets = [random_.randrange(len(RESULTS)), *random_.choices(range(len(VALUES)), k=self.top)]
        self.decided: dict[int, Decision] = {}

    def step(self) -> None:
        acts = [self.vote, self.prepare, self.propose, self.propose, self.compare, self.hear, self.hear, self.confirm]
        self.random.choice(acts)()
        if self.random.random() < 0.2:
            self.tell(next(iter(self.honest)))

    def end(self) -> None:
        for member in self.honest:
            self.tell(member)

    def member(self) -> int:
        return self.random.choice(list(self.honest))

    def say(self, ballot: int, kind: Kind, value: int, member: int, signature: bytes) -> None:
        """An honest member has signed that, and liars have too: for one value in a ballot, or for all of them."""
        said = self.votes.setdefault((ballot, kind, value), {})
        said[member] = signature
        if not self.greedy and value != self.targets[ballot]:
            return
        for liar in self.liars:
            hashed = value_hash(VALUES[value])
            said[liar] = sign_vote(self.keys[liar], self.group.group_id, ballot, kind, hashed)  # type: ignore[arg-type]

    def some_of(self, ballot: int, kind: Kind, value: int) -> Certificate:
        signatures = self.votes.get((ballot, kind, value), {})
        return signed(signatures, ballot, kind, VALUES[value])

    # What honest members do

    def vote(self) -> None:
        member = self.member()
        value = VALUES.index(self.holds[member])
        signature = self.honest[member].vote_zero(RESULTS[value].digest)  # type: ignore[union-attr]
        if signature is not None:
            self.say(0, "vote", value, member, signature)

    def prepare(self) -> None:
        member, ballot = self.member(), self.random.randint(1, self.top)
        answer = self.honest[member].prepare(ballot)
        if answer.signed is not None:
            self.promises.setdefault(ballot, {})[member] = answer.signed, answer.prepared

    def propose(self) -> None:
        ballot = self.random.randint(1, self.top)
        promises, prepared = self._promises(ballot)
        member, value = self.member(), self.targets[ballot]
        if self.random.random() < 0.2:
            value = self.random.randrange(len(VALUES))
        message = Propose(self.group.group_id, ballot, VALUES[value], promises, prepared)
        signature = self.honest[member].accept(message, held=True).signature
        if signature is not None:
            self.say(ballot, "vote", value, member, signature)

    def _promises(self, ballot: int) -> tuple[dict[int, SignedPromise], Prepared | None]:
        """A quorum's, with as many of liars as there are, who say what leaves most open; and the certificate."""
        made = self.promises.get(ballot, {})
        chosen = dict(self.random.sample(sorted(made.items()), min(len(made), self.quorum.to_decide)))
        promises = {member: promise for member, (promise, _) in chosen.items()}
        for liar in self.random.sample(self.liars, min(len(self.liars), self.quorum.to_decide)):
            zero = self.random.choice([None, b"a" * 32, b"b" * 32])
            promise = SignedPromise(ballot, None, None, zero, bytes(64))
            if len(promises) < self.quorum.to_decide:
                promises[liar] = sign_promise(self.keys[liar], self.group.group_id, promise)  # type: ignore[arg-type]
        shown = [prepared for _, prepared in chosen.values() if prepared is not None]
        return promises, max(shown, key=lambda each: each.votes.ballot, default=None)

    def compare(self) -> None:
        ballot, value = self.random.choice(sorted((ballot, value) for ballot, kind, value in self.votes) or [(0, 0)])
        prepared = Prepared(VALUES[value], self.some_of(ballot, "vote", value))
        member = self.member()
        votes = self.honest[member]
        if (
            votes.decided is None
            and votes.see(prepared)
            and votes.guarded is not None
            and votes.guarded.compare(prepared)
        ):
            self.comparing.append((member, prepared, set(self.honest) - {member}))

    def hear(self) -> None:
        """One of those that are asked answers one that compares."""
        if not self.comparing:
            return
        place = self.random.randrange(len(self.comparing))
        member, prepared, waiting = self.comparing[place]
        if not waiting:
            return
        other, votes = waiting.pop(), self.honest[member]
        answer = compare(self.honest[other], prepared)
        assert votes.guarded is not None
        if answer.decided is not None and votes.electorate.is_decided(answer.decided):
            votes.learn(answer.decided)
            self.note(member)
            votes.guarded.withdraw(prepared)
            self.comparing.pop(place)
            return
        for unlike in answer.unlike:
            votes.note(unlike)
        if answer.standing is not None and answer.standing.votes.value != prepared.votes.value:
            votes.see(answer.standing)
            votes.guarded.withdraw(prepared)
            self.comparing.pop(place)

    def confirm(self) -> None:
        over = [each for each in self.comparing if not each[2] or not self.bounded]
        if not over:
            return
        entry = self.random.choice(over)
        self.comparing.remove(entry)
        member, prepared, _ = entry
        votes = self.honest[member]
        assert votes.guarded is not None
        if votes.decided is None and votes.guarded.confirm(prepared):
            ballot, value = prepared.votes.ballot, VALUES.index(prepared.value)
            self.say(ballot, "confirm", value, member, votes.sign(ballot, "confirm", prepared.value))

    def tell(self, member: int) -> None:
        """Liars tell one honest member a decision, if there is one; the others in the end."""
        for (ballot, kind, value), signatures in list(self.votes.items()):
            if len(signatures) >= self.quorum.to_decide:
                self.honest[member].learn(Decided(VALUES[value], self.some_of(ballot, kind, value)))
                self.note(member)

    def note(self, member: int) -> None:
        decision = self.honest[member].decision
        if decision is not None:
            self.decided[member] = decision
            assert len({value_hash(each) for each in self.decided.values()}) == 1, "two outcomes"


def play(size: int, hostile: int, seed: int, bounded: bool) -> World:
    world = World(size, hostile, bounded, random.Random(f"{size} {hostile} {seed}"))
    for _ in range(60 * size):
        world.step()
    world.end()
    return world


@pytest.mark.parametrize(
    ("size", "hostile", "bounded", "seeds"),
    [
        (4, 1, False, 200),
        (8, 2, False, 30),
        (16, 7, True, 15),
        (4, 2, True, 60),
        *soak(
            [(4, 1, False, 20_000), (8, 2, False, 4000), (16, 5, False, 1500), (16, 7, True, 1500), (8, 3, True, 4000)]
        ),
    ],
)
def test_nobody_is_told_two_outcomes(size: int, hostile: int, bounded: bool, seeds: int) -> None:
    ends: Counter[str] = Counter()
    for seed in range(seeds):
        world = play(size, hostile, seed, bounded)
        ends.update(type(decision).__name__ for decision in set(world.decided.values()) or [None])
    print(dict(ends))
    assert ends["Committed"] > 0


@pytest.mark.parametrize("denied", [None, b"b" * 32], ids=["no vote", "another vote"])
def test_what_all_have_voted_for_binds_although_a_liar_denies_its_vote(denied: bytes | None) -> None:
    keys = [Key(index) for index in range(4)]
    group = Group.form(b"", [Member(key.peer_id) for key in keys], [1.0] * 4, bytes(16))
    first, second, third = (RoundVotes(group, key) for key in keys[:3])  # type: ignore[arg-type]
    assert all(votes.vote_zero(b"a" * 32) for votes in (first, second, third))  # and the liar: that decides
    promises = {index: votes.prepare(1).signed for index, votes in enumerate((first, second))}
    promise = SignedPromise(1, None, None, denied, bytes(64))
    promises[3] = sign_promise(keys[3], group.group_id, promise)  # type: ignore[arg-type]
    for value in (*VALUES[1:], VALUES[0]):
        proposed = Propose(group.group_id, 1, value, promises, None)  # type: ignore[arg-type]
        assert (third.accept(proposed, held=True).signature is not None) == (value == VALUES[0])


def test_that_members_vote_for_whatever_is_proposed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers.GuardedAcceptor, "accept", lambda *proposed: True)
    with pytest.raises(AssertionError, match="two outcomes"):
        for seed in range(1500):
            play(4, 1, seed, bounded=False)
