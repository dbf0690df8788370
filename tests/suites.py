"""Which cases of a matrix `make test` leaves to `make soak`; see docs/tests.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def soak(cases: Iterable[Any]) -> list[Any]:
    """For a list of parameters: `[first, *soak(others)]`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]
