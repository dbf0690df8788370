"""Laying the state of a living job out anew: ranks that leave, ranks that join, other shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swarmcli.errors import CheckpointError, ShardingError
from swarmcli.sharding import ZeroRedundancyOptimizer, lay_out_anew
from swarmcli.sharding.files.moving import move_state
from swarmcli.sharding.zero import transfer
from tests.sharding.files.jobs import differing, parameters, plain, reference, sharded, train, whole
from tests.sharding.processes import Worlds

pytestmark = pytest.mark.processes


def change_ranks(before: list[int], after: list[int], steps: int) -> dict[str, Any]:
    """Trains on some ranks of the world, lays out on others, trains there."""
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in (before, after)}
    rank = dist.get_rank()
    old = sharded(groups[tuple(before)]) if rank in before else None
    if old is not None:
        train(old, steps)
        old.param_groups[0]["lr"] = 0.3
    new = sharded(groups[tuple(after)]) if rank in after else None
    if new is not None and old is not None:
        copy_parameters(old, new)
    lay_out_anew(old, new)
    if new is None:
        return {"state": {}, "rate": 0.3}
    return {"state": plain(new.local_state()), "rate": new.param_groups[0]["lr"]}


def copy_parameters(old: ZeroRedundancyOptimizer, new: ZeroRedundancyOptimizer) -> None:
    for theirs, own in zip(old.parameters, new.parameters, strict=True):
        own.data.copy_(theirs)


def change_shares(steps: int) -> list[Any]:
    old = sharded()
    train(old, steps)
    new = sharded(shares=[1.0, 5.0])
    copy_parameters(old, new)
    lay_out_anew(old, new)
    state = plain(new.local_state())
    train(new, 1, first=steps)
    return [state, list(new.parameters)]


@pytest.mark.parametrize(
    ("before", "after"), [([0, 1], [0, 1, 2, 3]), ([0, 1, 2, 3], [1]), ([0, 1, 2], [2, 3]), ([0, 1], [2, 3])]
)
def test_ranks_come_and_go_and_no_statistic_is_lost(worlds: Worlds, before: list[int], after: list[int]) -> None:
    told = worlds(4).run(change_ranks, before, after, 2)
    assert differing(whole([each["state"] for each in told]), reference(2).state_dict()["state"]) == []
    assert all(each["rate"] == 0.3 for each in told)


def test_a_job_goes_on_with_other_shares_as_if_nothing_had_happened(worlds: Worlds) -> None:
    told = worlds(2).run(change_shares, 2)
    assert differing(whole([state for state, _ in told]), reference(2).state_dict()["state"]) == []
    expected = [parameter for group in reference(3).param_groups for parameter in group["params"]]
    for _, found in told:
        assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def lay_out_others(name: str) -> list[str]:
    """The error where one rank's `new` is of other parameters, or where arguments are missing or wrong."""
    old, new = sharded(), sharded()
    train(old, 1)
    before = plain(old.local_state())
    odd: dict[str, Any] = {
        "fewer": lambda: ZeroRedundancyOptimizer(parameters()[:3], torch.optim.AdamW),
        "other groups": lambda: ZeroRedundancyOptimizer(parameters(), torch.optim.AdamW),
        "other shapes": lambda: _with_first(torch.nn.Parameter(torch.zeros(5, 7))),
        "other dtypes": lambda: _with_first(torch.nn.Parameter(torch.zeros(7, 5).bfloat16())),
        "unsharded": lambda: reference(1),
        "no new": lambda: None,
    }
    given = odd[name]()
    if name != "no new" and dist.get_rank() == 0:
        given = new
    with pytest.raises((ValueError, TypeError, ShardingError)) as caught:
        lay_out_anew(old, given)
    assert differing(plain(old.local_state()), before) == []
    assert not new.local_state()
    return [type(caught.value).__name__, str(caught.value)]


def _with_first(parameter: torch.nn.Parameter) -> ZeroRedundancyOptimizer:
    new = sharded()
    new.parameters[0] = parameter
    return new


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fewer", "rank 1's `new` is of other parameters than rank 0's `old`: groups with [3] parameters, not [3, 4]"),
        ("other groups", "rank 1's `new` is of other parameters than rank 0's `old`: groups with [7] parameters, not "),
        ("other shapes", "rank 0's `old`: parameter 0 is float32 (5, 7), not float32 (7, 5)"),
        ("other dtypes", "rank 0's `old`: parameter 0 is bfloat16 (7, 5), not float32 (7, 5)"),
        ("no new", "every rank gave new=None: there is nothing to lay out"),
    ],
)
def test_optimizers_of_other_parameters_are_refused_at_all_ranks(worlds: Worlds, name: str, problem: str) -> None:
    for kind, text in worlds(2).run(lay_out_others, name):
        assert kind == "ValueError"
        assert problem in text


def test_an_optimizer_without_shares_is_named_at_all_ranks(worlds: Worlds) -> None:
    waiting, wrong = worlds(2).run(lay_out_others, "unsharded")
    assert waiting[0] == "ShardingError" and "rank 1: new is a torch.optim.adamw.AdamW" in waiting[1]
    assert wrong == [
        "TypeError",
        "new is a torch.optim.adamw.AdamW, which does not say what each rank holds: "
        "give a swarmcli.sharding.ZeroRedundancyOptimizer",
    ]


def swap_two_of_one_shape() -> str:
    made = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    old = ZeroRedundancyOptimizer(made, torch.optim.AdamW)
    train(old, 1)
    swapped = made[::-1] if dist.get_rank() == 1 else made
    with pytest.raises(ShardingError) as caught:
        lay_out_anew(old, ZeroRedundancyOptimizer(swapped, torch.optim.AdamW))
    return str(caught.value)


def test_the_same_tensors_in_another_order_are_refused_at_all_ranks(worlds: Worlds) -> None:
    for text in worlds(2).run(swap_two_of_one_shape):
        assert "rank 1: parameter 1 of `old` is parameter 0 of `new`: give them in the same order" in text


def give_wrong_arguments() -> list[str]:
    texts = []
    for arguments in ((None, None), (sharded(), sharded(), "gloo")):
        with pytest.raises((TypeError, ValueError)) as caught:
            lay_out_anew(*arguments)  # type: ignore[arg-type]
        texts.append(str(caught.value))
    return texts


def test_nothing_to_lay_out_and_no_group_are_named(worlds: Worlds) -> None:
    for nothing, group in worlds(2).run(give_wrong_arguments):
        assert "every rank gave old=None" in nothing
        assert group.startswith("group is a str")


def leave_state_to_nobody() -> str:
    with pytest.raises(ValueError, match=r"state of parameters \[3\], which no rank") as caught:
        move_state({3: {"a": 1}} if dist.get_rank() == 0 else {}, [], dist.group.WORLD)
    return str(caught.value)


def test_state_that_nobody_would_own_is_refused_at_all_ranks(worlds: Worlds) -> None:
    assert len(set(worlds(2).run(leave_state_to_nobody))) == 1


def move_wide_integers() -> list[str]:
    """Rank 0's settings hold one, then its state does; afterwards a good layout goes on as ever."""
    texts = []
    old, new = sharded(), sharded(shares=[0.0, 1.0])
    train(old, 1)
    places = [old.param_groups[0], old.optim.state[old.parameters[(old.indices_of(dist.get_rank()) or [0])[0]]]]
    for place in places:
        if dist.get_rank() == 0:
            place["odd"] = 2**70
        with pytest.raises(ShardingError) as caught:
            lay_out_anew(old, new)
        place.pop("odd", None)
        texts.append(str(caught.value))
    lay_out_anew(old, new)
    return texts


def test_integers_beyond_64_bits_are_named_at_all_ranks_and_nobody_loses_step(worlds: Worlds) -> None:
    for setting, statistic in worlds(2).run(move_wide_integers):
        assert "rank 0: param_groups[0]['odd'] cannot be written" in setting
        assert "['odd'] cannot be written" in statistic


def move_tensor_settings() -> list[float]:
    old, new = sharded(), sharded(shares=[1.0, 5.0])
    for optimizer, value in ((old, 0.5), (new, 0.25)):
        optimizer.param_groups[0]["betas"] = (torch.tensor(value), torch.tensor(value))
    lay_out_anew(old, new)
    return [float(beta) for beta in new.param_groups[0]["betas"]]


def test_settings_of_tensors_in_tuples_go_along(worlds: Worlds) -> None:
    assert worlds(2).run(move_tensor_settings) == [[0.5, 0.5]] * 2


def move_what_cannot_be_sent() -> str:
    old, new = sharded(), sharded(shares=[0.0, 1.0])
    train(old, 1)
    before = plain(old.local_state())
    if dist.get_rank() == 0:
        old.optim.state[old.parameters[old.indices_of(0)[0]]]["odd"] = {1, 2}
    with pytest.raises(ShardingError) as caught:
        lay_out_anew(old, new)
    assert not new.local_state()
    assert plain(old.local_state()).keys() == before.keys()
    return str(caught.value)


def test_state_that_cannot_be_sent_is_named_at_all_ranks(worlds: Worlds) -> None:
    for text in worlds(2).run(move_what_cannot_be_sent):
        assert "cannot be laid out anew" in text and "['odd'] is a set" in text


ODD = {
    "tensor": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "number": 3,
    "nothing": None,
    "pair": (1, [torch.ones(2)]),
}


def pass_on(check: str | None) -> dict[str, Any]:
    """Rank 0 has it, rank 1 wants it; with pieces so small that tensors are cut."""
    transfer.PIECE_BYTES, piece = 16, transfer.PIECE_BYTES
    try:
        rank = dist.get_rank()
        held = {4: ODD, 9: {}} if rank == 0 else {}
        refuse: Callable[[Any], str | None] = lambda indices: check if indices else None  # noqa: E731
        return plain(move_state(held, [4, 9] if rank == 1 else [], dist.group.WORLD, check=refuse))
    finally:
        transfer.PIECE_BYTES = piece


def refuse_to_pass_on() -> str:
    with pytest.raises(CheckpointError) as caught:
        pass_on("it is damaged")
    return str(caught.value)


def test_state_of_every_kind_arrives_in_pieces(worlds: Worlds) -> None:
    nothing, received = worlds(2).run(pass_on, None)
    assert nothing == {}
    received[4]["pair"] = tuple(received[4]["pair"])  # the harness makes a list of it
    assert differing(received[4].pop("pair")[1][0], torch.ones(2)) == []
    assert differing(received, {4: {key: value for key, value in ODD.items() if key != "pair"}, 9: {}}) == []


def test_a_problem_of_the_sender_is_raised_at_all_ranks_before_anything_moves(worlds: Worlds) -> None:
    assert worlds(2).run(refuse_to_pass_on) == ["it is damaged", "it is damaged"]
