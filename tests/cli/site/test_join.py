from __future__ import annotations

import asyncio
import logging

import pytest

from swarmcli.cli.site.join import is_news
from swarmcli.errors import SiteError


async def fail_in_a_task_of_the_network(error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "a task failed", "exception": error})


@pytest.mark.parametrize(("error", "lines"), [(SiteError("rank 1 is gone"), 0), (ZeroDivisionError("oops"), 1)])
def test_what_a_broken_site_leaves_unfinished_is_not_told_beside_its_end(
    error: Exception, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("asyncio")
    log.addFilter(is_news)
    try:
        asyncio.run(fail_in_a_task_of_the_network(error))
    finally:
        log.removeFilter(is_news)
    assert sum("a task failed" in record.message for record in caplog.records) == lines
