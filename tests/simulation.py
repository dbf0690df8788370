"""Tests that are coroutines, run under virtual time, or in real time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from swarmcli.testing import virtual_time

P = ParamSpec("P")


def simulated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test as a function that pytest calls: simulated hours pass in seconds, and nothing may be left behind."""
    return within(1e6)(test)


def within(seconds: float) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """The same for a test that fails once it has taken so long in virtual time."""

    def decorate(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            virtual_time.run(test(*args, **kwargs), timeout=seconds)

        return run

    return decorate


def in_real_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The same for a test with sockets."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def faults() -> list[BaseException]:
    """What fails from now on in tasks that survive it, which otherwise would end the test."""
    found: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["exception"]))
    return found


def now() -> float:
    """Seconds since the test began, in virtual time."""
    return asyncio.get_running_loop().time()
