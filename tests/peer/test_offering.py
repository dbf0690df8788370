"""A recipe over real TCP, from a peer of the run to somebody with a link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from swarmcli.errors import BootstrapError, FingerprintError, RecipeError, SwarmError
from swarmcli.events import EpochAdvanced
from swarmcli.network.endpoint import Endpoint
from swarmcli.network.identity import Identity, PeerID
from swarmcli.network.transports.tcp.transport import TCPTransport
from swarmcli.peer.offering import METHOD, RecipeOffered, RecipeService, RecipeWanted, fetch_recipe
from swarmcli.recipe import Link, Recipe, digest_of, offered
from swarmcli.recipe.link import places_of
from swarmcli.recipe.offered import UNKNOWN, RunEstimate
from swarmcli.version import build
from tests.recipe.recipes import small
from tests.simulation import in_real_time

TEXT = offered(small())
Serve = Callable[[Endpoint], object]


@asynccontextmanager
async def contact(serve: Serve) -> AsyncIterator[Link]:
    endpoint = Endpoint(TCPTransport(Identity.generate(), host="127.0.0.1"))
    serve(endpoint)
    await endpoint.start()
    try:
        yield Link(endpoint.peer_id, places_of(endpoint.addresses), "small", digest_of(small()))
    finally:
        await endpoint.close()


def fetching(serve: Serve, change: Callable[[Link], Link] = lambda link: link) -> tuple[Recipe, RecipeOffered]:
    async def fetch() -> tuple[Recipe, RecipeOffered]:
        async with contact(serve) as link:
            return await asyncio.to_thread(fetch_recipe, change(link), Path("mine"))

    return asyncio.run(fetch())


def asking(serve: Serve, change: Callable[[Link], Link] = lambda link: link) -> RecipeOffered:
    return fetching(serve, change)[1]


def answering(answer: object) -> Serve:
    async def handle(peer: PeerID, wanted: RecipeWanted) -> object:
        return answer

    return lambda endpoint: endpoint.serve(METHOD, RecipeWanted, handle)


def test_the_recipe_comes_with_how_the_run_goes() -> None:
    def serve(endpoint: Endpoint) -> None:
        roles = ["trainer"] * 3 + ["monitor", "auxiliary", "auxiliary"]
        service = RecipeService(endpoint, "small", TEXT, lambda: roles)
        for epoch, seconds in ((5, 12.5), (6, 90.0), (7, 11.0)):  # one waited for somebody
            service.note(EpochAdvanced(epoch, "aa", 128, 64, 2, 2.0, seconds, 0.1))
        service.note(EpochAdvanced(8, "aa", 0, 0, 0, None, 0.0, 0.0))  # taken over: nobody knows how long it took

    answer = asking(serve)
    assert answer == RecipeOffered(TEXT, 8, 12.5, 3, 1, 2, version=build()) and answer.going == RunEstimate(
        12.5, 3, 1, 2
    )


def test_an_older_peer_says_nothing_of_who_takes_part_and_nobody_is_believed_everything() -> None:
    class Older(msgspec.Struct):
        recipe: str

    assert asking(answering(Older(TEXT))).going == UNKNOWN
    for pace in (float("inf"), -1.0, 1e12):
        assert asking(answering(RecipeOffered(TEXT, 3, pace))).epoch_seconds == 0.0
    for impossible in ({"trainers": 1 << 40}, {"monitors": -1}):
        with pytest.raises(SwarmError, match="did not come from"):
            asking(answering({"recipe": TEXT, **impossible}))


@pytest.mark.parametrize(
    ("serve", "error", "words"),
    [
        (lambda endpoint: RecipeService(endpoint, "other", TEXT), FingerprintError, "takes part in 'other'"),
        (lambda endpoint: None, FingerprintError, "hands out no recipe"),
        (answering(RecipeOffered("x" * (1 << 19))), SwarmError, "."),
        (answering(RecipeWanted("another type")), SwarmError, "."),
    ],
)
def test_what_goes_wrong_is_said(serve: Serve, error: type[SwarmError], words: str) -> None:
    with pytest.raises(error, match=words):
        asking(serve)


def test_a_contact_that_hangs_up_instead_of_answering_is_told_of_with_what_to_do() -> None:
    leaving: list[asyncio.Task[None]] = []

    def serve(endpoint: Endpoint) -> None:
        async def hang_up(peer: PeerID, wanted: RecipeWanted) -> RecipeOffered:
            leaving.append(asyncio.create_task(endpoint.close()))
            await asyncio.Event().wait()
            raise AssertionError

        endpoint.serve(METHOD, RecipeWanted, hang_up)

    with pytest.raises(SwarmError, match=r"the recipe did not come from \w+: .*; try again"):
        asking(serve)


def test_another_peer_at_the_address_is_not_believed() -> None:
    def of_another(link: Link) -> Link:
        return Link(Identity.generate().peer_id, link.places, link.run_id, link.fingerprint)

    def among_others(link: Link) -> Link:
        return Link(link.peer_id, ("127.0.0.1:1", *link.places, "[::1]:2"), link.run_id, link.fingerprint)

    def serve(endpoint: Endpoint) -> None:
        RecipeService(endpoint, "small", TEXT)

    with pytest.raises(BootstrapError) as caught:
        asking(serve, of_another)
    assert len(caught.value.attempts) == 1
    assert asking(serve, among_others).recipe == TEXT, "by the address that answers"


def test_what_was_fetched_is_checked_and_not_written() -> None:
    recipe, _ = fetching(lambda endpoint: RecipeService(endpoint, "small", TEXT))
    assert digest_of(recipe) == digest_of(small()) and recipe.directory == Path("mine")
    with pytest.raises(RecipeError, match="not the one that the link speaks of"):
        fetching(lambda endpoint: RecipeService(endpoint, "small", offered(small("seed=5"))))
    newer = RecipeOffered(TEXT.replace("{", '{"novelty": 1,', 1), version="99.1")
    with pytest.raises(RecipeError, match=r"unknown key novelty; this run uses swarm 99\.1, you have .*pipx install"):
        fetching(answering(newer))
    assert not Path("mine").exists()


def with_others(link: Link, *others: Link) -> Link:
    return replace(link, others=tuple((each.peer_id, each.places) for each in others))


@in_real_time
async def test_the_recipe_comes_from_any_peer_of_the_link_past_one_that_is_gone_and_one_that_lies(
    tmp_path: Path,
) -> None:
    """The first peer of the link has left, the second hands out another recipe, the third knows of no run."""

    async with (
        contact(answering(RecipeOffered(TEXT.replace('"small"', '"large"')))) as liar,
        contact(lambda endpoint: None) as elsewhere,
        contact(answering(RecipeOffered(TEXT))) as honest,
    ):
        async with contact(answering(RecipeOffered(TEXT))) as gone:
            pass
        link = with_others(gone, liar, elsewhere, honest)
        recipe, _ = await asyncio.to_thread(fetch_recipe, link, tmp_path)
        assert digest_of(recipe) == link.fingerprint
        link = with_others(gone, liar)
        with pytest.raises(RecipeError, match="run_id is 'large'"):
            await asyncio.to_thread(fetch_recipe, link, tmp_path)
    link = with_others(gone, honest)
    with pytest.raises(BootstrapError, match="none of the peers that the link names answers") as caught:
        await asyncio.to_thread(fetch_recipe, link, tmp_path)
    assert set(caught.value.attempts) == set(link.addresses)
