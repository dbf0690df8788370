"""Who meets whom: leaders that die or freeze, and knowledge that has holes."""

from __future__ import annotations

import asyncio
import gc

import pytest

from swarmcli.averaging.find import seek
from swarmcli.averaging.find.messages import Candidate
from swarmcli.errors import CallTimeout
from tests.averaging.searchers import Searcher, Searchers
from tests.simulation import now, within
from tests.suites import soak


async def begin(peers: list[Searcher]) -> tuple[dict[Searcher, asyncio.Task[object]], list[Searcher]]:
    """Their searches, and the peers by rank."""
    searches: dict[Searcher, asyncio.Task[object]] = {peer: asyncio.ensure_future(peer.find()) for peer in peers}
    await asyncio.sleep(0.001)
    return searches, sorted(peers, key=lambda peer: peer.finder.search.rank)  # type: ignore[union-attr]


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (16, 2), *soak([(64, 3), (9, 4)])])
@within(3600)
async def test_peers_that_start_together_form_one_group_led_by_the_first_in_rank(count: int, seed: int) -> None:
    async with Searchers(seed) as swarm:
        peers = [await swarm.add() for _ in range(count)]
        before = sum(peer.node.endpoint.statistics().calls_made for peer in peers)
        searches, [leader, *_] = await begin(peers)
        await asyncio.gather(*searches.values())
        assert {tuple(m.peer_id for m in peer.groups[0].members) for peer in peers} == {
            tuple(member.peer_id for member in leader.groups[0].members)
        }
        assert leader.groups[0].leader == leader.peer_id and len(leader.groups[0]) == count
        assert max(peer.waits[0] for peer in peers) < 0.8
        calls = sum(peer.node.endpoint.statistics().calls_made for peer in peers) - before
        assert calls < 24 * count, "of which most go to the hash table"


MOMENTS = [0.08, 0.12, 0.16, 0.2]  # s: before it is asked, while it is, once it leads, and about to begin
COSTS = {"kill": 2.0, "freeze": 4.5}  # seconds


@pytest.mark.parametrize(("how", "at"), [("kill", at) for at in MOMENTS] + [("freeze", 0.08), ("freeze", 0.16)])
@pytest.mark.parametrize("seed", [0, *soak([1, 2, 3])])
@within(3600)
async def test_the_survivors_of_a_leader_stay_together(how: str, at: float, seed: int) -> None:
    """Those who did not begin with the leader come together in one group."""
    async with Searchers(seed, latency=0.02) as swarm:
        searches, [dead, *left] = await begin([await swarm.add() for _ in range(8)])
        await asyncio.sleep(at)
        swarm.network.kill(dead.peer_id) if how == "kill" else swarm.network.freeze(dead.peer_id)
        await asyncio.wait([searches[peer] for peer in left], timeout=COSTS[how] - at)
        assert all(peer.groups for peer in left)
        alone = [peer.groups[0] for peer in left if peer.groups[0].leader != dead.peer_id]
        assert len({group.group_id for group in alone}) <= 1
        assert not alone or len(alone[0]) == len(alone)
        searches[dead].cancel()
        swarm.network.thaw(dead.peer_id)


@pytest.mark.parametrize(("count", "seed"), [(5, 1), *soak([(2, 2), (3, 3), (8, 5)])])
@within(3600)
async def test_cyclic_knowledge(count: int, seed: int) -> None:
    """Each finds the declaration of one other only, in a circle: they all meet, since they ask and tell each other."""
    async with Searchers(seed) as swarm:
        peers = [await swarm.add() for _ in range(count)]
        for peer, other in zip(peers, peers[1:] + peers[:1], strict=True):
            _see_only(peer, other)
        await asyncio.gather(*(await begin(peers))[0].values())
        assert [len(peer.groups[0]) for peer in peers] == [count] * count
        assert max(peer.waits[0] for peer in peers) < 6.0


def _see_only(peer: Searcher, other: Searcher) -> None:
    declarations, seen = peer.finder._declarations, {peer.peer_id, other.peer_id}
    read = declarations.read

    async def read_some(bits: str) -> list[Candidate]:
        return [candidate for candidate in await read(bits) if candidate.peer_id in seen]

    declarations.read = read_some  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(("members", "least", "most"), [(2, 5.0, 7.5), (1, 19.0, 24.0)])
@within(3600)
async def test_a_leader_that_only_beats_holds_nobody(members: int, least: float, most: float) -> None:
    """A leader that claims to have too few members so far is followed for a few tries, and not for ever."""
    async with Searchers(0) as swarm:
        began = now()
        searches, [leader, follower] = await begin([await swarm.add() for _ in range(2)])
        search = leader.finder.search
        assert search is not None
        search._lead = lambda now: now + 1.0  # type: ignore[method-assign]
        pulse = search.on_beat
        search.on_beat = lambda peer, beat: type(pulse(peer, beat))(members)  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        assert follower.finder.company == [leader.peer_id]
        while follower.finder.company:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.25)
        assert least < now() - began < most
        assert follower.trust.has_no_seat(leader.peer_id) is (members == 2)
        for task in searches.values():
            task.cancel()


@within(60)
async def test_a_search_that_is_cancelled_as_its_leader_is_lost_tells_nobody_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody awaits the call any more, so the event loop would print its error."""
    printed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
    async with Searchers(0) as swarm:
        peers = [await swarm.add() for _ in range(2)]

        async def ask(call: seek.LeaderCall, candidate: Candidate, timeout: float) -> object:
            if timeout != seek.ON_THE_CALL:
                return await asks(call, candidate, timeout)
            for search in searches:
                search.cancel()
            raise CallTimeout("lost")

        asks = seek.LeaderCall.ask
        monkeypatch.setattr(seek.LeaderCall, "ask", ask)
        searches = [asyncio.ensure_future(peer.find()) for peer in peers]
        await asyncio.wait(searches)
        assert all(search.cancelled() for search in searches)
        searches.clear()
    gc.collect()
    assert not printed
