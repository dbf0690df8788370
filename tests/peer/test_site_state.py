"""What a site does for its next life."""

from __future__ import annotations

from swarmcli.peer.site_state import rationed


def test_copies_take_at_most_a_tenth_of_the_time() -> None:
    now, copies = 0.0, list[float]()

    def copy() -> None:
        nonlocal now
        copies.append(now)
        now += 4.0 if len(copies) == 1 else 0.5

    step = rationed(copy, 0.1, lambda: now)
    for _ in range(60):
        step()
        now += 1.0
    assert copies[:4] == [0.0, 44.0, 49.5, 55.0]
