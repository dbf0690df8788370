"""The bounds on waiting: what is not given adapts, and what does not fit together is clamped."""

from __future__ import annotations

import logging

import pytest

from swarmcli.averaging.config import AllreduceOptions


@pytest.mark.parametrize(
    "options",
    [
        AllreduceOptions(),
        AllreduceOptions(allreduce_timeout=3),
        AllreduceOptions(sender_timeout=5),
        AllreduceOptions(reducer_timeout=5),
        AllreduceOptions(sender_timeout=5, reducer_timeout=1),
        AllreduceOptions(sender_timeout=5, reducer_timeout=50, allreduce_timeout=20),
    ],
)
def test_a_reducer_gets_the_time_that_it_gives_its_senders(options: AllreduceOptions) -> None:
    assert options.to_begin < options.for_reducer
    assert options.for_silence(None) <= options.to_begin
    assert options.for_silence(0.5) >= options.for_silence(0.1)


def test_what_does_not_fit_together_is_clamped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options = AllreduceOptions(sender_timeout=5, reducer_timeout=1)
    assert options.reducer_timeout == 10
    assert "reducer_timeout 1 s is taken as 10 s" in caplog.text
