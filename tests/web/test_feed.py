from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from coordinator_web.feed import Feed, FeedOptions
from tests.simulation import in_real_time

from .fake_source import FakeRun, peer_row


async def messages(feed: Feed) -> AsyncIterator[tuple[str, Any]]:
    async for chunk in feed.stream(peers=True):
        lines = dict(line.split(": ", 1) for line in chunk.decode().strip().split("\n"))
        if "event" in lines:
            yield lines["event"], json.loads(lines["data"])


async def until_state(stream: AsyncIterator[tuple[str, Any]]) -> dict[str, Any]:
    """The messages of one round, which ends with the state."""
    heard = {}
    async for name, data in stream:
        heard[name] = data
        if name == "state":
            return heard
    raise AssertionError("the stream ended")


@in_real_time
async def test_a_stream_begins_with_everything() -> None:
    feed = Feed(FakeRun(finished_epochs=7), FeedOptions(interval=0.0))
    heard = await until_state(messages(feed))
    assert next(iter(heard)) == "begin" and list(heard)[-1] == "state"
    assert heard["state"]["run"]["epoch"] == 7
    assert (len(heard["epochs"]), len(heard["rounds"]["rows"]), len(heard["events"])) == (7, 7, 1)
    assert len(heard["peers"]["changed"]) == 6


@in_real_time
async def test_then_only_what_is_new_comes() -> None:
    run = FakeRun(finished_epochs=7, people=[])
    stream = messages(Feed(run, FeedOptions(interval=0.0)))
    await until_state(stream)
    assert (await until_state(stream)).keys() == {"state"}
    run.finished_epochs = 9
    heard = await until_state(stream)
    assert [row["epoch"] for row in heard["epochs"]] == [8, 9]
    assert [row["id"] for row in heard["rounds"]["rows"]] == [8, 9]
    assert heard["state"]["run"]["epoch"] == 9
    assert (await until_state(stream)).keys() == {"state"}


@in_real_time
async def test_an_epoch_that_changed_afterwards_comes_again() -> None:
    """Losses of others arrive after the epoch."""

    class Late(FakeRun):
        loss = 5.0

        def epochs(self, *, after: int = -1, limit: int = 600) -> list[Any]:
            rows = super().epochs(after=after, limit=limit)
            return [replace(row, loss=self.loss) if row.epoch == 6 else row for row in rows]

    run = Late(finished_epochs=7)
    stream = messages(Feed(run, FeedOptions(interval=0.0)))
    await until_state(stream)
    run.loss = 4.0
    heard = await until_state(stream)
    assert [(row["epoch"], row["loss"]) for row in heard["epochs"]] == [(6, 4.0)]


@in_real_time
async def test_of_a_thousand_peers_only_those_that_changed_are_sent() -> None:
    run = FakeRun(people=[peer_row(f"peer-{i}", "auxiliary") for i in range(1000)])
    stream = messages(Feed(run, FeedOptions(interval=0.0)))
    await until_state(stream)
    run.people[3] = replace(run.people[3], trouble="its last round failed")
    gone = run.people.pop()
    heard = await until_state(stream)
    assert [row["trouble"] for row in heard["peers"]["changed"]] == ["its last round failed"]
    assert heard["peers"]["gone"] == [gone.peer_id]


@in_real_time
async def test_closing_ends_the_streams_and_frees_their_places() -> None:
    feed = Feed(FakeRun(), FeedOptions(interval=3600.0))
    streams = [feed.stream() for _ in range(3)]
    for stream in streams:
        while b"event: state" not in await anext(stream):
            pass
    assert feed._viewers == 3
    feed.close()
    for stream in streams:
        assert [chunk async for chunk in stream] == []
    assert feed._viewers == 0
