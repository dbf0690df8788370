"""What holds of several tables, and what a list shows."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.network import wire
from swarmcli.network.identity import Identity
from swarmcli.run.contributions import ContributionRow, ContributionTable, Mark, fullest

ADA, BOB, EVE = [Identity.from_seed(seed).peer_id for seed in (1, 2, 3)]


def table(samples: float = 0.0, *rows: ContributionRow) -> ContributionTable:
    return ContributionTable("run", Mark(9, 900), 0, samples, (ADA, BOB, EVE)[: len(rows)], rows)


def test_the_fullest_table_is_shown_and_one_that_invents_samples_is_no_fuller_than_a_whole_one() -> None:
    whole, part, invented = table(900.0), table(100.0), table(1e9)
    assert fullest({ADA: part, BOB: whole, EVE: "no answer"}) == (BOB, whole)
    assert fullest({BOB: whole, EVE: invented}) == (BOB, whole), "who was named first"
    assert fullest({EVE: "no answer"}) is None
    assert invented.in_words == "100% of the 900 samples up to epoch 9"


def test_two_tables_agree_that_tell_of_the_same_samples_whenever_they_have_seen_whom() -> None:
    assert table(9.0, ContributionRow(9.0, uptime=1.0), ContributionRow()).agrees(
        table(9.0, ContributionRow(9.2, uptime=2.0))
    )
    assert not table(9.0, ContributionRow(9.0)).agrees(table(9.0, ContributionRow(8.0), ContributionRow(1.0)))


def test_samples_are_shown_as_whole_ones_and_a_strangers_texts_steer_no_terminal() -> None:
    (each,) = table(1.4, ContributionRow(1.4, name="Eve\x1b[2J", team="\u202ereds")).listed
    assert (each.samples, each.name, each.team) == (1, "Eve[2J", "reds")


@pytest.mark.parametrize(
    "changes",
    [
        {"peers": (ADA,) * 1025, "rows": (ContributionRow(),) * 1025},
        {"rows": (ContributionRow(float("nan")),)},
        {"rows": (ContributionRow(-1.0),)},
        {"rows": (ContributionRow(name="x" * 65),)},
        {"rows": (ContributionRow(last=1e300),)},
        {"until": Mark(-1, 0)},
    ],
)
def test_what_is_no_table_is_found_where_it_is_decoded(changes: dict[str, object]) -> None:
    hostile = msgspec.structs.replace(table(1.0), **changes)
    with pytest.raises(msgspec.ValidationError):
        wire.decode(ContributionTable, wire.encode(hostile))
