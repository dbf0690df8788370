"""Whose word moves a peer: who claims what, what bears it out, and what happens."""

from __future__ import annotations

import pytest

from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.peers.follow import PeerWord, Standing
from swarmcli.optim.peers.proof import MOST_MATES, MOST_ROUNDS, Mates, Signed
from swarmcli.optim.state.lineage import Claim, LineagePosition

PEERS = [Identity.from_seed(number).peer_id for number in range(40)]


def at(epoch: int, branch: int = 0) -> LineagePosition:
    return LineagePosition(epoch, 10 * epoch, bytes([branch + 1, *epoch.to_bytes(7, "big")]) * 4)


def way(epoch: int, branch: int = 0, back: int = 8) -> tuple[bytes, ...]:
    return tuple(at(each, branch).lineage for each in range(max(0, epoch - back), epoch))


def says(epoch: int, branch: int = 0, *, settled: bool = True, after: int | None = None) -> PeerWord:
    """`after`: the epoch of branch 0 from which it says that its branch began."""
    trail = way(epoch, branch) if after is None else (at(after).lineage,)
    return PeerWord(Claim(at(epoch, branch), settled), trail)


def mates(*rounds: int) -> Mates:
    """The mates of rounds with so many others each."""
    made = Mates()
    for count in rounds:
        made.note(PEERS[:count])
    return made


def decide(known: Mates, words: list[PeerWord], own: Claim | None = None, first: int = 0, **more) -> LineagePosition:
    """`words` are of peers from number `first` on, each in a network of its own unless `network` is given."""
    spoken = dict(zip(PEERS[first:], words, strict=False))
    standing = Standing(known, spoken, **({"network": bytes, "differs": lambda p: p != at(p.epoch)} | more))
    return standing.to_follow(own or Claim(at(5)))


STRANGERS = 20  # from this number on


@pytest.mark.parametrize(
    ("rounds", "words", "expected"),
    [
        pytest.param([1], [says(7)], at(7), id="two that parted: whoever is ahead leads"),
        pytest.param([2], [says(6), says(6)], at(6), id="of three, the two others went on"),
        pytest.param([2], [says(10**6, 1, after=5), says(5)], at(5), id="one of three that boasts"),
        pytest.param([15], [says(6)] * 15, at(6), id="a round was missed"),
        pytest.param([15], [says(6)] * 7 + [says(5)] * 8, at(5), id="less than half, without a certificate"),
        pytest.param([15], [says(10**6, 1, after=5)] * 5 + [says(5)] * 10, at(5), id="five of sixteen boast"),
        pytest.param([15], [says(10**6, 1)] * 7 + [says(5)] * 8, at(5), id="seven of sixteen boast"),
        pytest.param([15], [says(9, 1)] * 7 + [says(8)] * 8, at(8), id="seven parted, and one more did not"),
        pytest.param([15, 1], [says(10**6, 1)] + [says(5)] * 14, at(5), id="a pair that one made with a liar"),
        pytest.param([15], [says(4, 1)] * 11 + [says(5)] * 4, at(4, 1), id="who is in the minority yields"),
        pytest.param([1], [says(4, 1)], at(5), id="of two that parted nobody yields to less"),
        pytest.param([15], [says(6, settled=False)] * 2 + [says(5)] * 13, at(5), id="who has not settled says little"),
    ],
)
def test_who_has_mates_goes_by_them(rounds, words, expected) -> None:
    assert decide(mates(*rounds), words) == expected


@pytest.mark.parametrize(
    ("homes", "keys", "words", "expected"),
    [
        pytest.param(3, 14, [says(5)] * 3 + [says(10**6, 1)] * 14, at(5), id="fourteen keys of one home boast"),
        pytest.param(3, 14, [says(6)] * 3 + [says(5)] * 14, at(6), id="fourteen keys of one home stay behind"),
        pytest.param(7, 8, [says(4, 1)] * 7 + [says(5)] * 8, at(4, 1), id="seven homes parted from eight keys"),
        pytest.param(2, 8, [says(5)] * 2 + [says(6)] * 8, at(6), id="a laboratory and two homes go by heads"),
    ],
)
def test_mates_count_by_network_where_they_come_from_four(homes, keys, words, expected) -> None:
    def network(peer: PeerID) -> bytes:
        return peer if peer in PEERS[:homes] else b"one network"

    assert decide(mates(homes + keys), words, network=network) == expected


def test_strangers_count_for_nothing_beside_mates() -> None:
    spoken = {PEERS[0]: says(5)} | dict.fromkeys(PEERS[STRANGERS:], says(10**6, 1))
    assert Standing(mates(1), spoken, network=bytes).to_follow(Claim(at(5))) == at(5)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(None, at(9), id="they are gone, and one donor shows what they signed"),
        pytest.param(says(5), at(9), id="they have signed, and have not stepped yet"),
        pytest.param(says(8), at(9), id="they say that they are on the way there"),
        pytest.param(says(6, 2), at(6, 2), id="an old certificate: those who signed hold something else now"),
    ],
)
def test_signatures_of_mates_stand_for_those_who_cannot_be_asked(now, expected) -> None:
    signed = {at(9).lineage: Signed(frozenset(PEERS[:6]), frozenset(way(9)))}
    words = {PEERS[STRANGERS]: says(9)} | ({} if now is None else dict.fromkeys(PEERS[:6], now))
    known = mates(15)
    assert Standing(known, words | {PEERS[7]: says(5)}, bytes, signed).to_follow(Claim(at(5))) == expected


def test_signatures_of_fresh_identities_prove_nothing() -> None:
    signed = {at(10**6, 1).lineage: Signed(frozenset(PEERS[STRANGERS:]), frozenset(way(9)))}
    words = {PEERS[0]: says(5), PEERS[STRANGERS]: says(10**6, 1, after=5)}
    assert Standing(mates(15), words, bytes, signed).to_follow(Claim(at(5))) == at(5)


def test_whoever_has_gone_on_from_where_a_peer_stands_is_not_against_it() -> None:
    """All its mates are gone, and it comes back with others under new names."""
    assert decide(mates(2), [says(6), says(6)], first=STRANGERS) == at(6)


NEWCOMER = Claim(at(0), settled=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param([says(7)], at(7), id="a swarm of one"),
        pytest.param([says(7), says(7), says(10**6, 1)], at(7), id="two against one that boasts"),
        pytest.param([says(7), says(7), says(7, settled=False)], at(7), id="another newcomer that is as far"),
        pytest.param([says(6), says(7)], at(6), id="what all of them hold"),
        pytest.param([says(0, settled=False)], at(0), id="everybody begins"),
    ],
)
def test_a_newcomer_takes_what_most_hold(words, expected) -> None:
    assert decide(Mates(), words, NEWCOMER, STRANGERS) == expected


def test_a_crowd_in_one_network_counts_once_to_a_newcomer() -> None:
    words = [says(7), says(7), *[says(10**6, 1)] * 15]
    honest = PEERS[STRANGERS : STRANGERS + 2]

    def network(peer: PeerID) -> object:
        return peer if peer in honest else "one prefix"

    assert decide(Mates(), words, NEWCOMER, STRANGERS, network=network) == at(7)


def test_who_comes_back_goes_by_its_mates_whatever_the_crowd_says() -> None:
    words = {PEERS[0]: says(7)} | dict.fromkeys(PEERS[STRANGERS:], says(10**6, 1))
    assert Standing(mates(1), words, network=bytes).to_follow(Claim(at(3), settled=False)) == at(7)


def test_a_checkpoint_that_is_further_than_the_run_leads() -> None:
    assert decide(mates(1), [says(7)], Claim(at(9), settled=False)) == at(9)


def test_who_has_made_no_round_follows_whoever_went_on_from_there() -> None:
    signed = {at(60).lineage: Signed(way=frozenset(way(60, back=64)))}
    assert decide(Mates(), [says(60), *[says(0)] * 7], Claim(at(0)), signed=signed) == at(60), "longer ago than it says"
    words = [says(1), says(1), *[says(0)] * 7]
    assert decide(Mates(), words, Claim(at(0))) == at(1)
    assert decide(Mates(), [says(3, 1), *[says(0)] * 7], Claim(at(0))) == at(0), "it went on from elsewhere"


def test_what_the_owner_signed_needs_nobody_else() -> None:
    words = {PEERS[STRANGERS]: says(9, 1)} | dict.fromkeys(PEERS[:15], says(5))
    standing = Standing(mates(15), words, network=bytes, owners={at(9, 1).lineage})
    assert standing.to_follow(Claim(at(5))) == at(9, 1)


def test_mates_are_bounded() -> None:
    known = Mates()
    for number in range(3 * MOST_ROUNDS):
        known.note(PeerID((1000 * number + each).to_bytes(32, "big")) for each in range(MOST_MATES + 5))
        known.note(())
    assert len(known.known) <= MOST_ROUNDS * MOST_MATES
    assert known.needed == 1, "it stepped by itself last"
