"""What a member hands to `gather` may be any bytes: nobody's round fails for it, neither now nor later."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.events import PeerRefused
from tests.averaging.averagers import Averagers, all_results, assert_one_group
from tests.fuzz.values import YEAR_10000
from tests.simulation import within
from tests.suites import soak

HOSTILE = {
    "a date that there is not": YEAR_10000,
    "a date as a key": b"\x81" + YEAR_10000 + b"\xc0",
    "nested without end": b"\x91" * 8000 + b"\xc0",
    "a map that nests in its keys": b"\x81\x91" * 4000 + b"\xc0",
    "text that is none": b"\xa2\xff\xff",
    "a number and something behind it": b"\x01\x01",
    "a map as a key": b"\x81\x80\x01",
    "cut off": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("what", [*list(HOSTILE)[:4], *soak(list(HOSTILE)[4:])])
@within(600)
async def test_a_round_goes_on_with_a_member_that_hands_in_what_nobody_can_read(what: str) -> None:
    async with Averagers(3) as swarm:
        peers = await swarm.add(4)
        honest, liar = peers[:3], peers[3]
        controls = [peer.begin(gather="honest") for peer in honest]
        results = await all_results([*controls, liar.begin(gather=msgspec.Raw(HOSTILE[what]))])
        assert_one_group(results, peers)
        for peer, result in zip(honest, results, strict=False):
            assert sorted(result.values(), key=repr) == ["honest"] * 3 + [None]
            refused = [event for event in peer.events if isinstance(event, PeerRefused)]
            assert [(event.peer, event.what) for event in refused] == [(liar.peer_id.text, "gathered data")]
        await liar.core.shutdown()
        assert_one_group(await all_results([peer.begin() for peer in honest]), honest)
