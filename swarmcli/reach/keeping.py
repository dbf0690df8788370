"""What a keeper does again and again, for as long as its owner lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

_AFTER_A_FAULT = 5.0  # seconds: a step that fails at once, always, must not take the whole processor


async def keep(step: Callable[[], Awaitable[None]]) -> NoReturn:
    """Takes one step after the other. The error of a step goes to the loop's exception handler, which logs it, and
    after a pause the next one is taken: without its keeper, what is kept would stay as it is for ever."""
    while True:
        try:
            await step()
        except Exception as error:
            context = {"message": "a keeper's step failed; another one follows", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            await asyncio.sleep(_AFTER_A_FAULT)
