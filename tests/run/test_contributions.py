"""What holds of several books, and what a list shows."""

from __future__ import annotations

import msgspec
import pytest

from swarmcli.network import wire
from swarmcli.network.identity import Identity
from swarmcli.run.contributions import (
    Book,
    BookEntry,
    Mark,
    agreed,
    distance,
    greater,
    listed,
    most_samples,
    samples_of,
)

ADA, BOB, EVE = [Identity.from_seed(seed).peer_id for seed in (1, 2, 3)]
MONITOR = Identity.from_seed(9)


def book(ada: float = 0.0, bob: float = 0.0, eve: float = 0.0) -> Book:
    entries = {ADA: BookEntry(ada), BOB: BookEntry(bob), EVE: BookEntry(eve)}
    there = {peer: entry for peer, entry in entries.items() if entry.samples}
    return Book("run", "recipe", MONITOR.peer_id, Mark(9, 900), 0.0, 0, tuple(there), tuple(there.values()), 1.0)


def samples(*books: Book) -> dict[str, float]:
    return {peer: entry.samples for peer, entry in agreed(books).items()}


def test_of_three_books_one_that_lies_moves_nothing_and_of_two_the_fuller_one_is_shown() -> None:
    honest = book(540, 360)
    assert samples(honest, honest, book(bob=360, eve=540)) == {ADA.text: 540, BOB.text: 360}
    assert samples(honest, book(60, 40)) == {ADA.text: 540, BOB.text: 360} and samples() == {}


def test_a_book_that_knows_little_has_no_say_and_one_that_invents_samples_silences_nobody() -> None:
    honest = book(540, 360)
    assert samples(honest, honest, book(60, 40), book(60, 40), book(60, 40))[ADA.text] == 540
    assert samples(honest, honest, book(eve=1e6)) == {ADA.text: 540, BOB.text: 360}


def test_of_each_number_of_two_books_the_greater_one() -> None:
    one = {"A": BookEntry(540.0, rounds=2), "B": BookEntry(40.0)}
    other = {"A": BookEntry(60.0, rounds=9), "C": BookEntry(1.0)}
    both = greater(one, other)
    assert both == {"A": BookEntry(540.0, rounds=9), "B": BookEntry(40.0), "C": BookEntry(1.0)}
    assert most_samples(Mark(9, 900), exact=True) == 904.5 and most_samples(Mark(9, 900), exact=False) == 1800.0
    assert samples_of(both) == 581.0 and distance(one, other) == 480.0 + 40.0 + 1.0


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
