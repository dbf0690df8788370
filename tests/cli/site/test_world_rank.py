from __future__ import annotations

import pytest

from swarmcli.cli.site.process import WorldRank, world_rank_of_process
from swarmcli.errors import SiteError


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_a_lone_process_is_no_site(environment: dict[str, str]) -> None:
    assert world_rank_of_process(environment) is None


def test_the_place_is_what_torchrun_says() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert world_rank_of_process(environment) == WorldRank(rank=5, size=8, local_rank=1)


def test_half_a_place_is_named() -> None:
    with pytest.raises(SiteError, match="RANK='first' and WORLD_SIZE='4' in the environment are no numbers"):
        world_rank_of_process({"RANK": "first", "WORLD_SIZE": "4"})
