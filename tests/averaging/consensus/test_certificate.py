"""What votes prove: sizes of quorums, and certificates that anyone can check later."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from swarmcli.averaging.consensus.certificate import (
    DoubleVote,
    Electorate,
    RoundCertificate,
    sign_vote,
    signed,
    value_hash,
)
from swarmcli.averaging.consensus.messages import Aborted, Certificate, Committed, Decided, Decision, Kind
from swarmcli.averaging.consensus.quorum import Quorum
from swarmcli.averaging.group import Group, Member
from swarmcli.network import Identity, wire

PEERS = [Identity.from_seed(seed) for seed in range(5)]
A, B = Committed(b"a" * 32), Committed(b"b" * 32)


def group(auxiliary: Iterable[int] = (), count: int = 4) -> Group:
    members = [Member(peer.peer_id, auxiliary=place in auxiliary) for place, peer in enumerate(PEERS[:count])]
    return Group.form(b"tag", members, [1.0] * count, bytes(16))


def votes(voters: Iterable[int], kind: Kind, *, value: Decision = A, ballot: int = 0, of: bytes = b"") -> Certificate:
    group_id, hashed = of or group().group_id, value_hash(value)
    return signed(
        {voter: sign_vote(PEERS[voter], group_id, ballot, kind, hashed) for voter in voters}, ballot, kind, value
    )


@pytest.mark.parametrize(
    ("voters", "hostile", "to_decide"), [(4, 1, 3), (5, 1, 4), (7, 2, 5), (8, 2, 6), (10, 3, 7), (16, 5, 11)]
)
def test_quorums_of_a_guarded_group_meet_in_an_honest_voter(voters: int, hostile: int, to_decide: int) -> None:
    quorum = Quorum(voters + 2, frozenset([voters, voters + 1]))
    assert quorum.guarded and quorum.voters == frozenset(range(voters))
    assert (quorum.hostile, quorum.to_decide, quorum.to_abort, quorum.at_once) == (
        hostile,
        to_decide,
        to_decide,
        voters,
    )
    assert 2 * to_decide - voters > hostile


@pytest.mark.parametrize(
    ("networks", "voters", "hostile", "to_decide"),
    [
        ((1, 2, 3, 4), {0, 1, 2, 3}, 1, 3),
        ((1, 2, 3, 4, 0, 0), {0, 1, 2, 3}, 1, 3),  # who does not listen has no vote
        ((1, 1, 1, 1, 2, 3, 4), set(range(7)), 1, 3),  # a network has one
        ((1, 1, 2, 3, 0), {0, 1, 2, 3, 4}, 1, 4),  # too few networks: by heads
        (tuple(range(1, 17)), set(range(16)), 5, 11),
    ],
)
def test_where_members_listen_in_four_networks_each_of_these_has_one_vote(
    networks: tuple[int, ...], voters: set[int], hostile: int, to_decide: int
) -> None:
    quorum = Quorum(len(networks), networks=networks)
    assert (quorum.voters, quorum.hostile, quorum.to_decide) == (voters, hostile, to_decide)


def test_many_keys_of_one_network_decide_nothing() -> None:
    quorum = Quorum(9, networks=(1, 2, 3, 4, 4, 4, 4, 4, 4))
    assert not quorum.decides({0, *range(3, 9)}) and quorum.decides({0, 1, *range(3, 9)}) and quorum.decides({0, 1, 2})
    assert quorum.weight(range(3, 6)) == 0.5


@pytest.mark.parametrize(
    "quorum", [Quorum(3), Quorum(4, trust="members"), Quorum(6, frozenset([3, 4, 5])), Quorum(2)], ids=str
)
def test_other_groups_decide_by_majority_with_their_auxiliaries(quorum: Quorum) -> None:
    assert not quorum.guarded and quorum.voters == frozenset(range(quorum.members))
    assert quorum.to_decide == quorum.at_once == quorum.members // 2 + 1
    assert quorum.to_abort + quorum.to_decide == quorum.members + 1


def certificate(votes: Certificate, of: Group | None = None, **changes: object) -> RoundCertificate:
    made = RoundCertificate.of(of or group(), "strangers", (), A.digest, votes)
    return msgspec.structs.replace(made, **changes)


def test_a_round_is_proved_by_all_votes_or_by_a_quorum_of_confirms() -> None:
    proof = certificate(votes(range(4), "vote"))
    assert proof.verify() and wire.decode(RoundCertificate, wire.encode(proof)).verify()
    assert proof.group_id == group().group_id and proof.peers[0] == PEERS[0].peer_id
    assert certificate(votes((0, 2, 3), "confirm", ballot=6)).verify()


FALSE = {
    "too few votes": certificate(votes(range(3), "vote")),
    "votes of a ballot above zero": certificate(votes(range(4), "vote", ballot=1)),
    "too few confirms": certificate(votes((0, 1), "confirm")),
    "acceptances": certificate(votes(range(4), "accept")),
    "acceptances, as if all were honest": certificate(votes(range(4), "vote"), trust="members"),
    "votes for another result": certificate(votes(range(4), "vote", value=B)),
    "another digest": certificate(votes(range(4), "vote"), digest=B.digest),
    "votes of another round": certificate(votes(range(4), "vote", of=bytes(32))),
    "another tag": certificate(votes(range(4), "vote"), tag=b"other"),
    "other members": certificate(votes(range(4), "vote"), peers=tuple(peer.peer_id for peer in PEERS[1:])),
    "a member twice": certificate(votes(range(4), "vote"), peers=(PEERS[0].peer_id,) * 4),
    "an auxiliary more": certificate(votes(range(4), "vote"), auxiliaries=(0,)),
    "an auxiliary of no group": certificate(votes(range(4), "vote"), auxiliaries=(99,)),
    "another rest": certificate(votes(range(4), "vote"), rest=bytes(32)),
    "votes of a try": certificate(votes(range(4), "vote"), derivations=("try 1",)),
    "a false signature": certificate(
        msgspec.structs.replace(votes(range(4), "vote"), signatures=dict.fromkeys(range(4), bytes(64)))
    ),
}


@pytest.mark.parametrize("proof", FALSE.values(), ids=FALSE.keys())
def test_nothing_else_proves_a_round(proof: RoundCertificate) -> None:
    assert not proof.verify()


def test_tries_and_steps_are_proved_under_the_id_of_the_round() -> None:
    step = group().derived("step 3").derived("try 1")
    proof = certificate(votes(range(4), "vote", of=step.group_id), derivations=("step 3", "try 1"))
    assert proof.verify() and proof.group_id == group().group_id and proof.voted_id == step.group_id


def test_small_groups_prove_theirs_by_a_majority() -> None:
    three = group(count=3)
    assert certificate(votes((0, 2), "accept", of=three.group_id), three).verify()
    assert not certificate(votes((0,), "accept", of=three.group_id), three).verify()
    assert not certificate(votes((0, 1, 2), "vote", of=three.group_id), three).verify()


def test_half_of_a_small_group_may_give_up() -> None:
    two = group(count=2).group_id
    electorate = Electorate(two, [peer.peer_id for peer in PEERS[:2]], Quorum(2))
    given_up = votes((1,), "accept", value=Aborted("why"), of=two)
    assert electorate.is_decided(Decided(Aborted("why"), given_up))
    assert not electorate.is_decided(Decided(Aborted("other words"), given_up))
    assert not electorate.is_decided(Decided(A, votes((1,), "accept", of=two)))


def double(**changes: object) -> DoubleVote:
    group_id = group().group_id
    values = (value_hash(A), value_hash(B))
    signatures = tuple(sign_vote(PEERS[1], group_id, 0, "vote", value) for value in values)
    made = DoubleVote(PEERS[1].peer_id, group_id, 0, "vote", values, signatures)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, **changes)


def test_two_unlike_votes_are_proof_and_nothing_less_is() -> None:
    assert double().verify() and "twice" in double().words()
    assert wire.decode(DoubleVote, wire.encode(double())).verify()
    same = double()
    assert not double(values=same.values[:1] * 2, signatures=same.signatures[:1] * 2).verify()
    assert not double(culprit=PEERS[2].peer_id).verify()
    assert not double(ballot=1).verify()
    assert not double(kind="confirm").verify()
    assert not double(group_id=bytes(32)).verify()
