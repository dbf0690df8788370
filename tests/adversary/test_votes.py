"""Lies about the outcome of a round: what each may achieve at most."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from swarmcli.averaging import RoundResult
from swarmcli.averaging.certificate import sign_word
from swarmcli.averaging.config import AllreduceOptions
from swarmcli.averaging.round.messages import RoundWord
from swarmcli.averaging.round.outcome import Sheet
from swarmcli.errors import RoundFailed, RoundUndecided
from swarmcli.events import PeerBanned
from swarmcli.testing import virtual_time
from tests.adversary.lies import LIES, Liar, votes
from tests.averaging.rounds import Kind, Outcome, Swarm
from tests.suites import soak

NAMES = [name for name, each in LIES.items() if each.tell.__module__ == votes.__name__]
BANNED = {"words for one half and for the other", "vote and give-up"}
ROUND = 10.0  # seconds of a round of two


def beside(
    name: str, places: list[int], count: int, seed: int = 0, options: AllreduceOptions | None = None
) -> tuple[Swarm, list[Outcome | None], float]:
    """One round in which those at these places lie: outcomes of the others, and how long they took."""

    async def main() -> tuple[Swarm, list[Outcome | None], float]:
        async with Swarm([Kind() for _ in range(count)], seed=seed, options=options) as swarm:
            liars = []
            for place in places:
                peer = swarm.peers[place]
                averager = SimpleNamespace(_service=peer.service)
                liars.append(Liar(random.Random(seed), peer.endpoint, averager=averager))  # type: ignore[arg-type]
                LIES[name].tell(liars[-1])
            ended = [0.0]

            async def honest_end() -> None:
                began = asyncio.get_running_loop().time()
                honest = [task for place, task in enumerate(swarm.tasks) if place not in places]
                await asyncio.wait(honest)
                ended[0] = asyncio.get_running_loop().time() - began
                for place in places:
                    swarm.tasks[place].cancel()

            outcomes = await swarm.round(honest_end)
            assert all(liar.told for liar in liars)
            return swarm, [each for place, each in enumerate(outcomes) if place not in places], ended[0]

    return virtual_time.run(main(), seed=seed, timeout=2000)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_one_of_four_achieves_no_more_than_is_said(name: str, place: int) -> None:
    swarm, outcomes, took = beside(name, [place], 4)
    assert all(isinstance(outcome, RoundResult) for outcome in outcomes), outcomes
    assert len({outcome.digest for outcome in outcomes}) == 1 and took < 5  # type: ignore[union-attr]
    assert all(outcome.certificate.verify() for outcome in outcomes)  # type: ignore[union-attr]
    culprit = swarm.peers[place].peer_id.text
    banned = {event.peer for event in swarm.events if isinstance(event, PeerBanned)}
    assert banned <= {culprit} and (name not in BANNED or banned)


@pytest.mark.parametrize("count", soak([8, 13]))
@pytest.mark.parametrize("name", NAMES)
def test_a_third_of_a_group_together_splits_nobody(name: str, count: int) -> None:
    for seed in range(10):
        places = random.Random(seed).sample(range(count), (count - 1) // 3)
        _, outcomes, took = beside(name, places, count, seed)
        assert len({outcome.digest for outcome in outcomes if isinstance(outcome, RoundResult)}) == 1
        assert not any(isinstance(outcome, RoundFailed) for outcome in outcomes) and took < 20


def test_words_that_crowd_out_others_keep_nobody_from_deciding() -> None:
    _, outcomes, took = beside("results that only it names", [1, 2, 3, 4, 5], 16)
    assert all(isinstance(outcome, RoundResult) for outcome in outcomes) and took < 5, outcomes


def test_one_of_two_that_is_busy_now_and_then_holds_the_other_up_for_a_round() -> None:
    options = AllreduceOptions(part_size_bytes=1024, allreduce_timeout=ROUND)
    _, outcomes, took = beside("work now and then", [1], 2, options=options)
    assert isinstance(outcomes[0], RoundUndecided) and took < ROUND + 15


def test_an_unlike_vote_after_the_round_bans_its_author_everywhere() -> None:
    async def main() -> None:
        async with Swarm([Kind() for _ in range(4)]) as swarm:
            assert all(isinstance(outcome, RoundResult) for outcome in await swarm.round())
            for peer in swarm.peers:
                peer.service.peer_trust.start()
                peer.service.peer_trust.enter(member.peer_id for member in swarm.formed.members)
            liar, other = swarm.peers[3].endpoint, b"another result".ljust(32)
            sheet = Sheet("vote", other, {3: sign_word(liar.identity, swarm.formed.group_id, "vote", other)})
            word = RoundWord(swarm.formed.group_id, "over", seen=(), known=(sheet,))
            await liar.call(swarm.peers[0].peer_id, "allreduce.outcome.test", word, RoundWord, timeout=5)
            await asyncio.sleep(1)
            assert all(peer.service.peer_trust.is_banned(liar.peer_id) for peer in swarm.peers[:3])

    virtual_time.run(main(), timeout=2000)


def test_blame_for_everybody_names_nobody_else() -> None:
    """A member that dies fails the round; the liar, which says that all others did it, is believed in nothing."""

    async def main() -> None:
        async with Swarm([Kind() for _ in range(5)], bandwidth=20_000.0) as swarm:
            averager = SimpleNamespace(_service=swarm.peers[3].service)
            liar = Liar(random.Random(0), swarm.peers[3].endpoint, averager=averager)  # type: ignore[arg-type]
            LIES["blame for everybody"].tell(liar)

            async def kill() -> None:
                await asyncio.sleep(0.3)
                swarm.kill(4)
                await asyncio.wait(swarm.tasks[:3])
                swarm.tasks[3].cancel()

            for outcome in (await swarm.round(kill))[:3]:
                assert isinstance(outcome, RoundFailed) and outcome.suspects == (swarm.peers[4].peer_id,)

    virtual_time.run(main(), timeout=2000)
