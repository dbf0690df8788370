"""Lineages: when they are equal, and which one is followed where they part."""

from itertools import permutations

import pytest
import torch

from swarmcli.optim.state.lineage import (
    MAX_COUNT,
    Claim,
    LineagePosition,
    best,
    first_lineage,
    is_count,
    lineage_to_follow,
    next_lineage,
    solitary_round_id,
)

A, B, C = (bytes([value]) * 32 for value in (1, 2, 3))


def test_equal_parameters_and_run_give_equal_first_lineages() -> None:
    parameters = [torch.arange(6.0).reshape(2, 3), torch.tensor(1.0)]
    assert first_lineage("run", parameters) == first_lineage("run", [p.clone() for p in parameters])


@pytest.mark.parametrize(
    "others",
    [
        [torch.arange(6.0).reshape(3, 2)],
        [torch.arange(6.0, dtype=torch.float64).reshape(2, 3)],
        [torch.arange(6.0).reshape(2, 3) + 1e-6],
        [],
    ],
)
def test_any_difference_gives_another_first_lineage(others) -> None:
    parameters = [torch.arange(6.0).reshape(2, 3)]
    assert first_lineage("run", parameters) != first_lineage("run", others)
    assert first_lineage("run", parameters) != first_lineage("other run", parameters)


def test_a_chain_depends_on_every_round() -> None:
    assert next_lineage(next_lineage(A, B, 1, 8), C, 2, 16) != next_lineage(next_lineage(A, C, 1, 8), B, 2, 16)
    assert len({next_lineage(A, B, 1, 8), next_lineage(A, B, 2, 8), next_lineage(A, B, 1, 9)}) == 3
    assert solitary_round_id(A, C) != solitary_round_id(B, C)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (LineagePosition(2, 10, C), LineagePosition(1, 99, A)),
        (LineagePosition(1, 99, C), LineagePosition(1, 10, A)),
        (LineagePosition(1, 10, A), LineagePosition(1, 10, B)),
    ],
)
def test_epoch_then_samples_then_smaller_id(winner, loser) -> None:
    assert winner.beats(loser)
    assert not loser.beats(winner)
    assert not winner.beats(winner)


def test_the_best_does_not_depend_on_the_order() -> None:
    positions = [LineagePosition(1, 5, C), LineagePosition(1, 5, A), LineagePosition(0, 9, B)]
    assert {best(order) for order in permutations(positions)} == {LineagePosition(1, 5, A)}
    assert best([]) is None


def test_a_settled_peer_yields_only_to_a_settled_lineage_that_beats_it() -> None:
    own = Claim(LineagePosition(3, 30, B))
    assert (
        lineage_to_follow(own, [Claim(LineagePosition(3, 30, C)), Claim(LineagePosition(9, 90, A), settled=False)])
        == own.position
    )
    assert lineage_to_follow(own, [Claim(LineagePosition(3, 30, A))]) == LineagePosition(3, 30, A)
    assert lineage_to_follow(own, []) == own.position


def test_a_newcomer_takes_up_the_run_unless_it_is_further_itself() -> None:
    begins = Claim(LineagePosition(0, 0, A), settled=False)
    others = [Claim(LineagePosition(0, 0, C)), Claim(LineagePosition(0, 0, B))]
    assert lineage_to_follow(begins, others) == LineagePosition(0, 0, B), "its unlike initial weights lose nothing"
    from_checkpoint = Claim(LineagePosition(50, 500, C), settled=False)
    assert lineage_to_follow(from_checkpoint, others) == from_checkpoint.position
    assert lineage_to_follow(from_checkpoint, [Claim(LineagePosition(51, 510, A))]) == LineagePosition(51, 510, A)
    together = [Claim(LineagePosition(0, 0, each), settled=False) for each in (C, A, B)]
    assert {lineage_to_follow(each, together) for each in together} == {LineagePosition(0, 0, A)}, "all name the same"


def test_no_round_brings_a_run_beyond_what_peers_can_report() -> None:
    position = LineagePosition(3, 10, A)
    for _ in range(3):
        position = position.after(B, 10**18)
    assert (position.epoch, position.samples) == (6, MAX_COUNT)
    assert is_count(position.epoch, position.samples)
    assert not is_count(3, -1) and not is_count(MAX_COUNT + 1, 3)
