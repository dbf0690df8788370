"""Liars about sums among four peers: what they may achieve at most, where every part is looked at."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.auditing import Audits
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.plan import Part
from swarmcli.averaging.trust import SECONDS_PER_GROUP
from swarmcli.compression import CompressionBase, NoCompression, TensorMessage, Uniform8BitQuantization
from swarmcli.errors import ConnectionLost
from swarmcli.events import PeerBanned
from swarmcli.network import Stream
from swarmcli.network.identity import PeerID
from tests.adversary.company import liar_of, round_beside
from tests.adversary.lies import LIES, Liar
from tests.adversary.lies.base import on_each_exchange
from tests.adversary.lies.votes import Saying, alter_words
from tests.averaging.averagers import Averagers, Peer, all_outcomes
from tests.simulation import simulated
from tests.suites import soak

OPTIONS = {"part_size_bytes": 1 << 10, "allreduce_timeout": 60.0, "audit": 1.0}
SHAPES = ((100, 100), (40,))


async def beside_a_liar(
    swarm: Averagers, name: str, *, auxiliary: bool = False, honest: int = 3, **changes: Any
) -> tuple[list[Peer], Peer, Liar]:
    """Honest peers that have averaged with another one, which lies from here on."""
    options = AllreduceOptions(**{**OPTIONS, **changes})
    peers = await swarm.add(honest, allreduce=options, shapes=SHAPES)
    last = await swarm.add_one(allreduce=options, shapes=SHAPES, auxiliary=auxiliary)
    await all_outcomes([peer.begin() for peer in [*peers, last]])
    liar = liar_of(last)
    LIES[name].tell(liar)
    return peers, last, liar


def bans(peer: Peer) -> list[PeerBanned]:
    return [event for event in peer.events if isinstance(event, PeerBanned)]


def banned(peer: Peer) -> list[str]:
    return [event.peer for event in bans(peer)]


@pytest.mark.parametrize(
    ("name", "auxiliary", "honest", "codec"),
    [
        ("false sums", False, 3, NoCompression()),
        ("false sums", True, 2, Uniform8BitQuantization()),
        ("forged inputs", True, 3, NoCompression()),
        *soak([("false sums", True, 3, NoCompression()), ("false sums", True, 4, NoCompression())]),
    ],
    ids=["member", "auxiliary of two, lossy", "forged", "auxiliary", "auxiliary of four"],
)
@simulated
async def test_a_reducer_that_computes_something_else_is_banned_by_all(
    name: str, auxiliary: bool, honest: int, codec: CompressionBase
) -> None:
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, name, auxiliary=auxiliary, honest=honest, compression=codec)
        before = [value for peer in peers for value in peer.values]
        await round_beside(peers, dishonest)
        assert liar.told
        for peer in peers:
            assert banned(peer) == [dishonest.peer_id.text]
            assert all(event.reason.startswith("its average of part") for event in bans(peer))
        after = [value for peer in peers for value in peer.values]
        assert after == pytest.approx(before)  # not a number of it was applied
        assert all(dishonest.peer_id not in result.group for result in await round_beside(peers, dishonest))


@simulated
async def test_who_has_seen_the_proof_of_a_lie_does_not_vote_for_it() -> None:
    """One of three alone has drawn a false part. The others have echoed the result; the liar's echo, without which
    they have no quorum, comes when they have heard the accusation."""
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "false sums")
        for peer in peers[1:]:
            on_each_exchange(liar_of(peer), draw_nothing)

        def wait_for_the_proof(saying: Saying, word: RoundWord) -> RoundWord:
            return word if all(map(banned, peers)) else saying.without_own(word)

        alter_words(liar, wait_for_the_proof)
        before = [value for peer in peers for value in peer.values]
        results = await round_beside(peers, dishonest)
        assert all(banned(peer) == [dishonest.peer_id.text] for peer in peers)
        assert all(dishonest.peer_id not in result.group for result in results)
        assert [value for peer in peers for value in peer.values] == pytest.approx(before)


def draw_nothing(exchange: Any) -> None:
    async def nothing(*_: Any) -> None: ...

    exchange.audits.look_at = nothing


@pytest.mark.parametrize("name", ["withheld list", "withheld inputs", "another list", "another input"])
@simulated
async def test_what_is_withheld_costs_a_seat_and_bans_nobody(name: str) -> None:
    async with Averagers(7) as swarm:
        # Of ten parts a member may draw none, as one in sixty does; of twenty each draws some.
        peers, dishonest, liar = await beside_a_liar(swarm, name, part_size_bytes=1 << 9)
        await round_beside(peers, dishonest)
        assert liar.told and not any(map(banned, peers))
        assert all(peer.core.trust.has_no_seat(dishonest.peer_id) for peer in peers)
        assert all(dishonest.peer_id not in result.group for result in await round_beside(peers, dishonest))


@simulated
async def test_who_calls_a_true_average_false_has_no_seat_and_bans_nobody() -> None:
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "false accuser")
        await round_beside(peers, dishonest)
        assert liar.told and not any(map(banned, peers))
        assert any(peer.core.trust.has_no_seat(dishonest.peer_id) for peer in peers)
        # It accuses all of them, and is heard once in a round: each further suspicion would cost twice as many groups.
        assert max(peer.core.trust.costs(dishonest.peer_id) for peer in peers) == SECONDS_PER_GROUP
        assert all(dishonest.peer_id not in result.group for result in await round_beside(peers, dishonest))


@simulated
async def test_an_accusation_brings_no_input_for_which_its_reducer_has_not_signed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, heard = Audits._receive_input, Counter[Stream]()

    async def counted(audits: Audits, part: Part, stream: Stream) -> TensorMessage:
        heard[stream] += 1
        return await receive(audits, part, stream)

    monkeypatch.setattr(Audits, "_receive_input", counted)
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "inputs without end")
        await round_beside(peers, dishonest)
        assert liar.told and not any(map(banned, peers))
        assert max(heard.values()) == 1, "nothing on the stream of an accusation, but for what auditors draw themselves"
        assert all(peer.core.trust.has_no_seat(dishonest.peer_id) for peer in peers)


@simulated
async def test_who_does_not_sign_its_parts_is_left_out_of_the_average() -> None:
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "unsigned parts")
        results = await round_beside(peers, dishonest)
        assert liar.told
        assert all(dishonest.peer_id not in result.contributors for result in results)


@simulated
async def test_who_chooses_its_parts_gets_no_list_and_of_inputs_those_that_its_secret_names_twice() -> None:
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "choosy auditor")
        await all_outcomes([peer.begin(timeout=600) for peer in [*peers, dishonest]])
        assert Counter(liar.told) == {
            "this member has committed itself to another secret": 3,
            "an input": 2 * 3,
            "this member had the part before": 3,
            "the secret does not name this part, or is not the first one": 2 * 3,
        }
        assert not any(map(banned, peers))


@pytest.mark.parametrize("count", [2, 4, *soak([3])])
@simulated
async def test_honest_peers_that_look_at_everything_find_nothing(count: int) -> None:
    async with Averagers(7) as swarm:
        peers = await swarm.add(count, allreduce=AllreduceOptions(**OPTIONS), shapes=SHAPES)
        for _ in range(2):
            outcomes = await all_outcomes([peer.begin() for peer in peers])
            assert all(isinstance(outcome, RoundResult) and not outcome.remark for outcome in outcomes)
        assert not any(map(banned, peers))
        assert not any(peer.core.trust.has_no_seat(other.peer_id) for peer in peers for other in peers)


@pytest.mark.parametrize("times", [1, 2])
@simulated
async def test_a_broken_stream_is_asked_for_again_and_two_cost_no_seat(times: int) -> None:
    async with Averagers(7) as swarm:
        peers, dishonest, liar = await beside_a_liar(swarm, "false sums")
        broken, lost = [break_the_first_streams(peer, times) for peer in peers], list[bool]()
        for peer in peers:
            suspect = peer.core.finder.suspect

            def noted(other: PeerID, reason: str, suspect: Any = suspect, **how: Any) -> None:
                lost.extend([how["lost"]] if other != dishonest.peer_id else [])
                suspect(other, reason, **how)

            peer.core.finder.suspect = noted
        await round_beside(peers, dishonest)
        assert liar.told and all(broken)
        assert all(banned(peer) == [dishonest.peer_id.text] for peer in peers)
        assert lost == [True] * len(lost) and bool(lost) == (times > 1)  # the first lost connection is forgiven


def break_the_first_streams(peer: Peer, times: int) -> Counter[PeerID]:
    """Of those by which it asks each peer for inputs, so many. Returns whose were broken."""
    endpoint, broken = peer.endpoint, Counter[PeerID]()
    stream = endpoint.stream

    def breaking(other: PeerID, method: str, *args: Any, **options: Any) -> Any:
        if ".input" not in method or broken[other] >= times:
            return stream(other, method, *args, **options)
        broken[other] += 1
        raise ConnectionLost("the cable was pulled")

    endpoint.stream = breaking  # type: ignore[method-assign]
    return broken
