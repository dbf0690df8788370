"""Hostile members drawn by lot, on every layer at once: no two honest members ever apply unlike results."""

from __future__ import annotations

import pytest

from swarmcli.testing import virtual_time
from tests.adversary.draws import Draw, play
from tests.adversary.lies.base import LIES, all_lies
from tests.suites import soak

SMALL = [(4, 1, seed) for seed in range(3)] + [(8, 2, 0)]
LARGE = [
    *((4, 1, seed) for seed in range(3, 400)),
    *((8, hostile, seed) for hostile in (2, 3) for seed in range(1, 150)),
    *((16, hostile, seed) for hostile in (5, 7) for seed in range(150)),
]


@pytest.mark.parametrize(("members", "hostile", "seed"), [*SMALL, *soak(LARGE)])
def test_honest_members_never_apply_unlike_results(members: int, hostile: int, seed: int) -> None:
    found: list[Draw] = []

    async def main() -> None:
        found.append(await play(seed, members, hostile))

    virtual_time.run(main(), seed=seed, timeout=7200)
    (told,) = found
    assert told.unlike == 0, told.lies
    if hostile <= (members - 1) // 3:
        assert told.committed[-1] >= members - hostile - 1, told.lies  # one may be catching up


def test_there_are_forty_lies_and_each_says_what_it_may_achieve() -> None:
    assert len(all_lies()) >= 40
    assert all(each.at_most for each in LIES.values())
