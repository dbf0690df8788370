"""Lies of a leader about who is in its group, and as what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swarmcli.averaging.group import Member
from swarmcli.testing.adversary.base import Liar


def alter_entries(liar: Liar, alter: Callable[[Member], Member]) -> None:
    """Where it leads, its followers are told otherwise of each other than they have offered."""
    assert liar.averager is not None
    finder = liar.averager._finder
    divide = finder._divide

    def altered(said: list[Member], epoch: float) -> tuple[list[Member], tuple[float, ...]]:
        members, shares = divide(said, epoch)
        leader, *followers = members
        liar.told.append("a group")
        return [leader, *map(alter, followers)], shares

    finder._divide = altered  # type: ignore[method-assign]


ALTERED: dict[str, Callable[[Member], Member]] = {
    "an auxiliary": lambda member: replace(member, auxiliary=True),
    "one that gathered something else": lambda member: replace(member, gathered=b"\xa5other"),
    "one that does not send": lambda member: replace(member, bid=replace(member.bid, sends=False)),
    "one that needs long to send": lambda member: replace(member, bid=replace(member.bid, seconds=100.0)),
    "one at another address": lambda member: replace(member, addresses=("memory://elsewhere:1",)),
    "one that cannot be dialed": lambda member: replace(member, listening=False, addresses=()),
}
