from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from coordinator_web.feed import Feed
from tests.simulation import in_real_time

from .fake_source import FakeRun


async def messages(feed: Feed) -> AsyncIterator[tuple[str, Any]]:
    async for chunk in feed.stream():
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
async def test_a_stream_begins_with_everything_and_then_only_what_is_new_comes() -> None:
    run = FakeRun(finished_epochs=7)
    stream = messages(Feed(run, 0.0))
    heard = await until_state(stream)
    assert list(heard) == ["begin", "rounds", "events", "state"] and heard["state"]["run"]["epoch"] == 7
    assert (len(heard["rounds"]["rows"]), len(heard["events"])) == (7, 1)
    assert (await until_state(stream)).keys() == {"state"}
    run.finished_epochs = 9
    heard = await until_state(stream)
    assert [row["id"] for row in heard["rounds"]["rows"]] == [8, 9]
    assert heard["state"]["run"]["epoch"] == 9
    assert (await until_state(stream)).keys() == {"state"}


@in_real_time
async def test_closing_ends_the_streams_and_frees_their_places() -> None:
    feed = Feed(FakeRun(), 3600.0)
    streams = [feed.stream() for _ in range(3)]
    for stream in streams:
        while b"event: state" not in await anext(stream):
            pass
    assert feed._viewers == 3
    feed.close()
    for stream in streams:
        assert [chunk async for chunk in stream] == []
    assert feed._viewers == 0
