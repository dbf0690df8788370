"""What counts of the weights that members name: claims are bounded by those of the others, and honest ones stay."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.group import Group, Member
from swarmcli.averaging.weights import FIRST, GROWTH, LEAST, Experience, limits
from swarmcli.network.identity import Identity
from tests.averaging.averagers import Averagers, all_results
from tests.averaging.rounds import Kind, Swarm
from tests.simulation import simulated

PEERS = [Identity.from_seed(number).peer_id for number in range(6)]


def counted(weights: list[float], max_share: float = 0.5, ramps: dict[int, float] | None = None) -> list[float]:
    most = limits(dict(enumerate(weights)), ramps or {}, max_share)
    return [min(weight, most.get(member, 0.0)) for member, weight in enumerate(weights)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 100], [1, 100]),  # two or three are as they are
        ([1, 1, 100], [1, 1, 100]),
        ([1, 1, 1, 100], [1, 1, 1, 3]),  # half of the weight
        ([1, 2, 1, 4], [1, 2, 1, 4]),
        ([0, 0, 0, 5], [0, 0, 0, 5]),  # one trainer and its followers
        ([1, 1, 1, 1e18, 1e18], [1, 1, 1, 1e18, 1e18]),  # two that agree to lie have all of it: no single one is above
    ],
)
def test_nobody_of_four_has_more_than_its_share(weights: list[float], expected: list[float]) -> None:
    assert counted(weights) == expected


def test_one_without_weight_can_be_the_first_to_say_so() -> None:
    assert limits({0: 0.0}, {}, 0.5, missing=4) == {}


def test_shares_that_are_too_small_for_the_group_make_all_weights_equal() -> None:
    assert counted([1, 2, 3, 4], max_share=0.01) == [1, 1, 1, 1]


def test_what_is_counted_early_is_what_counts_in_the_end() -> None:
    """Reducers hear of weights in unlike orders, and count what is below its limit before they know all."""
    numbers = random.Random(0)
    for _ in range(200):
        weights = {member: 10 ** numbers.uniform(-3, 3) for member in range(numbers.randint(4, 7))}
        ramps = {member: numbers.choice([2.0, 8.0, math.inf]) for member in weights}
        share = numbers.choice([0.2, 0.3, 0.5, 0.9])
        final = limits(weights, ramps, share)
        for known in range(1, len(weights)):
            for some in itertools.islice(itertools.combinations(weights, known), 10):
                early = limits({m: weights[m] for m in some}, ramps, share, missing=len(weights) - known)
                assert all(weights[m] <= final[m] for m in some if weights[m] <= early[m])


def test_a_new_identity_counts_for_little_among_known_peers_and_for_more_with_each_round() -> None:
    experience, others, newcomer = Experience(), PEERS[:3], PEERS[3]
    assert experience.ramps([*others, newcomer]) == {}  # all are new
    experience.note(dict.fromkeys(others, 10.0))
    rounds = []
    for _ in range(3):
        ramp = experience.ramps([*others, newcomer])[newcomer]
        weight = counted([10, 10, 10, 1000], max_share=1.0, ramps={3: ramp})[3]
        experience.note({**dict.fromkeys(others, 10.0), newcomer: weight})
        rounds.append(weight)
    assert rounds == [
        10 * FIRST,
        10 * FIRST * GROWTH,
        10 * FIRST * GROWTH**2,
    ]
    assert experience.ramps(others)[others[0]] == GROWTH


def test_two_or_three_trainers_are_never_ramped() -> None:
    experience = Experience()
    for _ in range(10):
        experience.note(dict.fromkeys(PEERS[:2], 10.0))
    assert len(PEERS[:2]) < LEAST and experience.ramps(PEERS[:3]) == {}


def claimed(claims: dict[int, float]) -> Group:
    members = [Member(PEERS[number], claim=claim) for number, claim in claims.items()]
    return Group.form(b"", members, [1.0] * len(members), bytes(16))


def test_strangers_are_believed_until_claims_are_not_borne_out() -> None:
    experience, (known, stranger, other) = Experience(), PEERS[:3]
    claims = {known: 3.0, stranger: 20.0, other: 1.0}
    assert experience.count(claims) == 24.0
    experience.note({known: 5.0})
    assert experience.count(claims) == 24.0
    experience.note_short()
    for _ in range(2):
        assert experience.count(claims) == 6.0
        experience.note({known: 5.0})
    assert experience.count(claims) == 24.0
    experience.note_short()
    experience.forget(known)
    assert experience.count(claims) == 24.0, "where nobody is known, all count"


@pytest.mark.parametrize(
    ("claims", "weights", "withheld"),
    [
        ({0: 3.0, 1: 20.0, 2: 1.0}, {0: 4.0, 2: 1.0}, {1}),
        ({0: 3.0, 1: 20.0, 2: 1.0}, {0: 1.0, 1: 10.0}, {0, 2}),
        # Of one quick computer beside slow ones no more counts than this.
        ({0: 24.0, 1: 1.0, 2: 1.0, 3: 1.0}, {0: 9.0, 1: 1.0, 2: 1.0, 3: 1.0}, set()),
        ({0: 24.0, 1: 0.0, 2: 0.0, 3: 0.0}, {0: 9.0, 1: 1.0, 2: 1.0, 3: 1.0}, set()),
        # One of these is lost, before it has named its weight or after.
        ({0: 99.0, 1: 9.0, 2: 1.0, 3: 1.0, 4: 1.0}, {0: 9.0, 2: 1.0, 3: 1.0, 4: 1.0}, {1}),
        ({0: 99.0, 1: 9.0, 2: 1.0, 3: 1.0, 4: 1.0}, {0: 36.0, 2: 1.0, 3: 1.0, 4: 1.0}, {1}),
        ({0: 99.0, 1: 9.0, 2: 1.0, 3: 1.0}, {0: 33.0, 2: 1.0, 3: 1.0}, {1}),
    ],
)
def test_who_hands_in_what_counts_of_its_claim_has_withheld_nothing(
    claims: dict[int, float], weights: dict[int, float], withheld: set[int]
) -> None:
    experience = Experience(AllreduceOptions(max_share=0.75))
    given = {PEERS[number]: weight for number, weight in weights.items()}
    assert experience.withheld(claimed(claims), given) == {PEERS[number] for number in withheld}


@pytest.mark.parametrize("delay", [0.0, 5.0])
@simulated
async def test_all_reducers_clip_a_claim_alike(delay: float) -> None:
    """The heavy one waits where the others have not named their weights yet; they agree in the end."""
    kinds = [Kind(delay=delay), Kind(delay=delay), Kind(weight=1e9), Kind(weight=2.0)]
    options = AllreduceOptions(part_size_bytes=1024, sender_timeout=20, max_share=0.75)
    async with Swarm(kinds, options=options) as swarm:
        holders = swarm.check(await swarm.round())
        assert len(holders) == 4
        peers = [peer.peer_id for peer in swarm.peers]
        for result in holders:
            assert dict(result.weights) == {peers[0]: 1.0, peers[1]: 1.0, peers[2]: 12.0, peers[3]: 2.0}
            assert len({average.part.reducer for average in result.parts}) == 4
            assert torch.isfinite(result.averages[0]).all()


@simulated
async def test_a_member_that_one_reducer_never_heard_costs_nobody_else_its_weight() -> None:
    """The heavy one is capped unlike where the dying one is heard and where it is not; it counts all the same."""
    kinds = [Kind(weight=1000.0), Kind(weight=10.0), Kind(weight=12.0), Kind(weight=11.0), Kind(weight=40, bandwidth=0)]
    options = AllreduceOptions(part_size_bytes=1024, sender_timeout=5, max_share=0.75)
    async with Swarm(kinds, options=options) as swarm:
        swarm.network.cut(swarm.peers[1].peer_id, swarm.peers[4].peer_id)
        results = swarm.check((await swarm.round())[:4])
        assert len(results) == 4
        for result in results:
            caps = {average.weights[0] for average in result.parts}
            assert caps == {99.0, 219.0}
            assert list(result.weights.values())[:4] == [219.0, 10.0, 12.0, 11.0]
            assert list(result.left_out) == [swarm.peers[4].peer_id]


@simulated
async def test_leaders_say_in_the_group_what_to_expect_of_whom() -> None:
    async with Averagers(1) as swarm:
        peers = await swarm.add(4)
        await all_results([peer.begin(weight=10.0) for peer in peers])
        newcomer = await swarm.add_one(listening=False)  # so it ranks last: a leader that knows nobody bounds nobody
        counts = []
        for _ in range(8):
            controls = [peer.begin(weight=10.0) for peer in peers] + [newcomer.begin(weight=40.0)]
            results = await all_results(controls)
            assert {result.total_weight for result in results} == {results[0].total_weight}
            assert results[0].group.leader != newcomer.peer_id
            counts.append(results[0].total_weight - 40.0)
        assert counts[0] == 20.0 and counts[-1] == 40.0, counts  # later it has all that it names: half of the weight
