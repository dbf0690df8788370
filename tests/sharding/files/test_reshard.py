"""State from the ranks that hold it to the ranks that will own it: the plan, for any number of ranks, and the moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.errors import CheckpointError
from swarmcli.sharding import transfer
from swarmcli.sharding.files.reshard import Move, plan_moves, reshard
from tests.sharding.files.jobs import differing, plain
from tests.sharding.threads import in_threads, ranks

SIZES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@st.composite
def relayouts(draw: st.DrawFn) -> tuple[list[dict[int, int]], list[list[int]], list[int]]:
    """What each rank sees of files by N ranks, perhaps none and some several times; what each of M ranks will own."""
    sizes = draw(SIZES)
    ranks = draw(st.integers(1, 8))
    holders = draw(st.lists(st.sets(st.integers(0, ranks - 1)), min_size=len(sizes), max_size=len(sizes)))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(sizes), max_size=len(sizes)))
    held = [{i: sizes[i] for i, at in enumerate(holders) if rank in at} for rank in range(ranks)]
    wanted = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
    return held, wanted, sizes


@settings(max_examples=25)
@given(relayouts())
def test_everyone_gets_exactly_what_it_wants_of_what_there_is(
    case: tuple[list[dict[int, int]], list[list[int]], list[int]],
) -> None:
    held, wanted, _ = case
    moves = plan_moves(held, wanted)
    there = set().union(*held)
    for rank, indices in enumerate(wanted):
        assert sorted(move.parameter for move in moves if move.target == rank) == sorted(there & set(indices))
    assert all(move.parameter in held[move.source] for move in moves)


@settings(max_examples=25)
@given(SIZES, st.integers(2, 8))
def test_files_that_all_can_see_are_sent_by_all_alike(sizes: list[int], ranks: int) -> None:
    # One more rank than see the files joins and owns everything: those who see them share the sending.
    everything = dict(enumerate(sizes))
    held = [everything] * ranks + [{}]
    moves = plan_moves(held, [[]] * ranks + [list(everything)])
    sent = [sum(sizes[move.parameter] for move in moves if move.source == rank) for rank in range(ranks)]
    assert sum(sent) == sum(sizes)
    assert max(sent) <= sum(sizes) / ranks + max(sizes)


def test_the_moves_of_a_job_that_grows_from_two_to_three() -> None:
    held = [{0: 8, 3: 1}, {1: 4, 2: 4}, {}]
    assert plan_moves(held, [[0], [1], [2, 3]]) == [Move(0, 0, 0), Move(0, 2, 3), Move(1, 1, 1), Move(1, 2, 2)]


ODD = {
    "tensor": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "number": 3,
    "nothing": None,
    "pair": (1, [torch.ones(2)]),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that tensors are cut. Of the process: each rank would put back what another one had set."""
    monkeypatch.setattr(transfer, "SIZES", replace(transfer.SIZES, piece=48))


def pass_on(check: str | None) -> dict[str, Any]:
    """Rank 0 has it, rank 1 wants it."""
    rank = dist.get_rank()
    held = {4: ODD, 9: {}} if rank == 0 else {}
    refuse: Callable[[Any], str | None] = lambda indices: check if indices else None  # noqa: E731
    return plain(reshard(held, [4, 9] if rank == 1 else [], dist.group.WORLD, check=refuse))


@pytest.mark.usefixtures("small_pieces")
def test_state_of_every_kind_arrives_in_pieces() -> None:
    nothing, received = in_threads(2, pass_on, None)
    assert nothing == {}
    received[4]["pair"] = tuple(received[4]["pair"])  # the harness makes a list of it
    assert differing(received[4].pop("pair")[1][0], torch.ones(2)) == []
    assert differing(received, {4: {key: value for key, value in ODD.items() if key != "pair"}, 9: {}}) == []


@ranks(2)
def test_a_problem_of_the_sender_is_raised_at_all_ranks_before_anything_moves() -> None:
    with pytest.raises(CheckpointError, match="it is damaged"):
        pass_on("it is damaged")


@ranks(2)
def test_state_that_nobody_would_own_is_refused_at_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"there is state of parameters \[4\], which no rank of the new layout owns"):
        reshard({4: ODD} if dist.get_rank() == 0 else {}, [], dist.group.WORLD)
