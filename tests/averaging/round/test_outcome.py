"""What follows from a decision for one member."""

from __future__ import annotations

import pytest

from swarmcli.averaging.consensus.messages import Aborted, Committed
from swarmcli.averaging.round.allreduce import conclude
from swarmcli.errors import RoundFailed, RoundUndecided

A, B = b"a" * 32, b"b" * 32


def test_conclusions() -> None:
    conclude(A, Committed(A))
    with pytest.raises(RoundUndecided, match="another result"):
        conclude(A, Committed(B))
    with pytest.raises(RoundUndecided, match="not all here"):
        conclude(None, Committed(B))
    with pytest.raises(RoundUndecided, match="no quorum"):
        conclude(A, None)
    with pytest.raises(RoundFailed, match="why"):
        conclude(A, Aborted("why"))
