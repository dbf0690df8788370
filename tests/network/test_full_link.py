"""Small calls beside links that bulk data keep full: nobody is taken for dead, and no call waits long."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import _namespaces as namespaces


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("mbit", "megabytes"),
    [pytest.param(10, 10, id="some seconds"), pytest.param(10, 344, id="minutes", marks=pytest.mark.soak)],
)
def test_behind_real_links_that_are_full_nobody_is_lost(mbit: int, megabytes: int) -> None:
    if not namespaces.permitted():
        pytest.skip("this system makes no network namespaces with shaped links")
    command = [sys.executable, "-m", "benchmarks.full_link", str(mbit), str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["lost"] and not found["failed"], found
