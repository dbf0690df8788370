"""Peers on loopback for tests of the synchronous shells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from swarmcli.dht import DHT


@contextmanager
def dhts(count: int) -> Iterator[list[DHT]]:
    """Peers over TCP; the first is everybody's first contact."""
    with ExitStack() as stack:
        made: list[DHT] = []
        for _ in range(count):
            contacts = made[0].get_visible_addresses() if made else []
            made.append(stack.enter_context(DHT(contacts, start=True, host="127.0.0.1")))
        yield made


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """Runs all in threads of their own and returns their results; the first error is raised."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(each) for each in work]]
