"""What holds of several books, and what a list shows."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.network import wire
from swarmcli.network.identity import Identity
from swarmcli.run.contributions import Book, BookEntry, Mark, fullest, listed

ADA, BOB, EVE = [Identity.from_seed(seed).peer_id for seed in (1, 2, 3)]
MONITOR = Identity.from_seed(9)


def book(ada: float = 0.0, bob: float = 0.0, eve: float = 0.0) -> Book:
    entries = {ADA: BookEntry(ada), BOB: BookEntry(bob), EVE: BookEntry(eve)}
    there = {peer: entry for peer, entry in entries.items() if entry.samples}
    return Book("run", "recipe", MONITOR.peer_id, Mark(9, 900), 0.0, 0, tuple(there), tuple(there.values()), 1.0)


def test_the_fullest_book_is_shown_and_one_that_invents_samples_is_no_fuller_than_a_whole_one() -> None:
    whole, part, invented = [msgspec.structs.replace(book(), witnessed=each) for each in (900.0, 100.0, 1e9)]
    assert fullest({ADA: part, BOB: whole}) is whole
    assert fullest({BOB: whole, EVE: invented}) is whole, "who was named first"
    assert invented.in_words == "100% of the run's 900 samples, counted up to epoch 9"


def test_lists_begin_with_who_gave_most_then_with_who_added_up_and_who_stayed() -> None:
    given = [BookEntry(uptime=1.0), BookEntry(reduced_bytes=1), BookEntry(1.4), BookEntry(uptime=2.0)]
    shown = listed(dict(zip("abcd", given, strict=True)))
    assert [each.peer for each in shown] == ["c", "b", "d", "a"] and shown[0].samples == 1
    (each,) = listed({"Eve": BookEntry(1.0, name="Eve\x1b[2J", team="\u202ereds")})
    assert (each.name, each.team) == ("Eve[2J", "reds"), "they steer no terminal"


@pytest.mark.parametrize(
    "changes",
    [
        {"peers": (ADA,) * 1025, "entries": (BookEntry(),) * 1025},
        {"entries": (BookEntry(float("nan")),)},
        {"entries": (BookEntry(-1.0),)},
        {"entries": (BookEntry(name="x" * 65),)},
        {"until": Mark(-1, 0)},
        {"time": 1e300},
    ],
)
def test_what_is_no_book_is_found_where_it_is_decoded(changes: dict[str, object]) -> None:
    hostile = msgspec.structs.replace(book(1.0), **changes)
    with pytest.raises(msgspec.ValidationError):
        wire.decode(Book, wire.encode(hostile))
