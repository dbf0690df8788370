from __future__ import annotations

import math

import pytest

from swarmcli.checkpoints.shelf import Keep, best_epochs, kept


def epochs(*numbers: int) -> dict[int, float | None]:
    return dict.fromkeys(numbers)


@pytest.mark.parametrize(
    ("found", "rules", "latest", "expected"),
    [
        (epochs(1, 2, 9, 10), Keep(2), None, {9: ("newest",), 10: ("newest",)}),
        (epochs(8, 9, 3), Keep(2), 3, {3: ("newest",), 9: ("newest",)}),  # the run was set back
        (epochs(8, 9), Keep(2), 5, {8: ("newest",), 9: ("newest",)}),  # it names one that is not there
        (epochs(10, 100, 110, 205, 210, 300), Keep(1, 100), None, {100: 1, 205: 1, 300: 2}),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: None}, Keep(1, 0, 2), None, {2: ("best",), 3: ("best",), 4: ("newest",)}),
        ({1: 3.0, 2: 1.0}, Keep(1, 0, 0), None, {2: ("newest",)}),
        (epochs(), Keep(), None, {}),
    ],
)
def test_what_stays_and_why(
    found: dict[int, float | None], rules: Keep, latest: int | None, expected: dict[int, object]
) -> None:
    staying = kept(found, rules, latest)
    counts = {epoch: len(why) for epoch, why in staying.items()}
    assert staying == expected or counts == expected


def test_of_equal_losses_the_later_is_better_and_what_is_no_number_never_is() -> None:
    assert best_epochs({1: 2.0, 2: 2.0, 3: math.nan, 4: math.inf, 5: None}, 3) == [2, 1]
