from __future__ import annotations

import gc

from swarmcli import startup


def test_cycles_are_looked_for_seldom_while_a_command_starts_and_as_ever_then() -> None:
    assert gc.get_threshold() == startup.USUAL
    try:
        startup.begin()
        assert gc.get_threshold()[0] == startup.WHILE_IMPORTING > startup.USUAL[0]
        startup.over()
        assert gc.get_threshold() == startup.USUAL and gc.get_freeze_count()
    finally:
        gc.unfreeze()
