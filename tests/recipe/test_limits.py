from __future__ import annotations

from typing import Any

import pytest

from swarmcli.errors import RecipeError
from swarmcli.recipe import Limits
from swarmcli.recipe.config import read_limits
from swarmcli.recipe.limits import amount_of, as_text, merged


@pytest.mark.parametrize(
    ("key", "written", "value", "text"),
    [
        ("upload", "2 MB/s", 2e6, "2 MB/s"),
        ("upload", "10 Mbit/s", 1.25e6, "1.25 MB/s"),
        ("upload", "1 MiB/s", 1048576.0, "1.04858 MB/s"),
        ("upload", "no limit", None, "none"),
        ("processor", "50%", 0.5, "50%"),
        ("memory", "512 MiB", 536870912.0, "536.871 MB"),
        ("disk", "20 %", 0.2, "20%"),
        ("hours", "22:00-08:00,  sat-sun 00:00-24:00", "22:00-08:00, sat-sun 00:00-24:00", None),
        ("time_zone", "Europe/Berlin", "Europe/Berlin", "Europe/Berlin"),
        ("only_when_idle", "yes", 5.0, "5 min"),
        ("only_when_idle", False, None, "none"),
        ("on_battery", "no", False, "no"),
        ("temperature", "80 °C", 80.0, "80 °C"),
    ],
)
def test_what_people_write_becomes_base_units_and_words_again(key: str, written: Any, value: Any, text: str) -> None:
    found = getattr(Limits.model_validate({key: written}), key)
    assert found == value and type(found) is type(value)
    assert as_text(key, found) == (text or written.replace("  ", " "))
    again = getattr(Limits.model_validate({key: as_text(key, found)}), key)
    assert again == (pytest.approx(found, rel=1e-5) if isinstance(found, float) else found)


@pytest.mark.parametrize(
    ("key", "written", "said"),
    [
        ("upload", "2 parsecs", "2 MB/s"),
        ("upload", 2, "too slow"),
        ("processor", 50, "write for example 50%"),
        ("memory", "8 Gb", "8 GB"),
        ("hours", "25:00-03:00", "at most 24:00"),
        ("hours", "someday 1-2", "mon-fri"),
        ("hours", "08:00-08:00", "00:00-24:00"),
        ("time_zone", "Mars/Base", "Europe/Berlin"),
        ("only_when_idle", "soon", "10 min"),
        ("on_battery", "maybe", "true or false"),
        ("upload", {"a": 1}, "no rate"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_to_write(key: str, written: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=f"there: .*{key}") as error:
        read_limits({key: written}, "there")
    assert said in str(error.value)


def test_what_is_written_as_none_takes_a_weaker_limit_away_and_amounts_are_sizes_or_shares() -> None:
    weak, strong = Limits(upload=1e6, threads=2), Limits.model_validate({"upload": "none"})
    assert merged(weak, strong) == Limits(upload=None, threads=2) and merged(weak, Limits()) == weak
    assert (amount_of(0.5, 100.0), amount_of(4e9, 100.0), amount_of(None, 100.0)) == (50.0, 4e9, None)
