"""A monitor's book: what it counts, what it takes over from others, and what a liar among them gets."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from swarmcli.events import EpochCredited
from swarmcli.run.contributions import Book, Entry, Mark, Told, listed, samples_of

ADA, BOB, EVE = "Ada", "Bob", "Eve"
EACH = {ADA: 60.0, BOB: 40.0}  # samples of one epoch
NOW = 1000.0


def credit(epoch: int, samples: Mapping[str, float] = EACH) -> EpochCredited:
    """Epochs have 100 samples, an hour and one reducer each."""
    return EpochCredited(epoch, 100 * epoch, samples, {BOB: 8}, 3600.0)


def watched(first: int, last: int, book: Book | None = None) -> Book:
    """A book that has seen these epochs."""
    book = book or Book()
    for epoch in range(first, last + 1):
        book.credit(credit(epoch), NOW + epoch)
    return book


def samples(book: Book) -> dict[str, int]:
    return {each.peer: each.samples for each in listed(book.entries())}


def lie(epoch: int, entries: dict[str, float]) -> Told:
    return Told(Mark(epoch, 100 * epoch), 0, {peer: Entry(samples=value) for peer, value in entries.items()})


def test_a_book_adds_up_what_rounds_have_counted_and_lists_who_gave_most_first() -> None:
    book = watched(1, 3)
    book.saw(ADA, "Ada L.", "blue", 30.0, NOW + 9)
    first, second = listed(book.entries())
    assert (first.peer, first.samples, first.hours, first.rounds, first.reduced_bytes) == (ADA, 180, 3.0, 3, 0)
    assert (first.name, first.team, first.uptime, first.first, first.last) == ("Ada L.", "blue", 30.0, 1001.0, 1009.0)
    assert (second.peer, second.samples, second.reduced_bytes) == (BOB, 120, 24)
    assert samples_of(book.entries()) == book.witnessed == 300


def test_an_epoch_is_counted_once() -> None:
    book = watched(1, 3)
    assert book.credit(credit(3), NOW) == set()
    assert samples(book) == {ADA: 180, BOB: 120}


def test_a_newcomer_takes_over_what_the_only_other_monitor_says_and_says_that_it_is_vouched_for_by_one() -> None:
    book = watched(8, 9)
    assert book.reconcile({"M": watched(1, 8).told()}) == []  # which is an epoch behind
    assert samples(book) == {ADA: 540, BOB: 360}
    assert (book.vouched, book.since, samples_of(book.entries()), book.witnessed) == (1, 0, 900, 200)


def test_a_newcomer_that_has_seen_no_epoch_yet_takes_over_as_well() -> None:
    book = Book()
    book.begin(Mark(5, 500))
    book.reconcile({"M": watched(1, 5).told()})
    assert samples(watched(6, 6, book)) == {ADA: 360, BOB: 240}


def test_a_monitor_that_comes_back_adds_what_it_missed() -> None:
    book = Book.restore(watched(1, 4).kept([ADA, BOB]))
    watched(8, 8, book)
    book.reconcile({"M": watched(1, 8).told()})
    assert samples(book) == {ADA: 480, BOB: 320}


def test_two_that_were_never_there_together_make_one_book_of_their_two() -> None:
    """The first saw epochs 1 to 4, the second 7 and 8; nobody saw 5 and 6."""
    back = Book.restore(watched(1, 4).kept([ADA, BOB]))
    second = watched(7, 8)
    back.begin(Mark(8, 800))
    back.reconcile({"second": second.told()})
    assert samples(back) == {ADA: 360, BOB: 240}
    second.reconcile({"back": back.told()})
    assert samples(second) == samples(back)
    back.reconcile({"second": second.told()})
    assert samples(second) == samples(back) == {ADA: 360, BOB: 240}


def test_of_three_monitors_the_one_that_lies_moves_nothing_and_is_named() -> None:
    """Eve gives itself what is Ada's."""
    book = watched(9, 9)
    honest = watched(1, 9).told()
    disputes = book.reconcile({"M": honest, "N": honest, "E": lie(9, {EVE: 540.0, BOB: 360.0})})
    assert samples(book) == {ADA: 540, BOB: 360}
    assert book.vouched == 3
    assert {(each.monitor, each.peer) for each in disputes} == {("E", ADA), ("E", EVE)}


def test_the_word_of_one_gives_way_to_that_of_more() -> None:
    book = watched(9, 9)
    false, honest = lie(9, {EVE: 540.0, BOB: 360.0}), watched(1, 9).told()
    book.reconcile({"E": false})
    assert samples(book)[EVE] > 500
    book.reconcile({"E": false, "M": honest, "N": honest})
    assert EVE not in samples(book)
    book.reconcile({"E": false})  # the others have gone: what was vouched for by three stays
    assert samples(book) == {ADA: 540, BOB: 360}


def test_totals_never_shrink_when_the_fuller_book_has_gone() -> None:
    """It knew of epochs 1 to 8 by the word of one; then another book is read that begins with epoch 5."""
    book = watched(9, 9)
    book.reconcile({"M": watched(1, 9).told()})
    assert samples(book) == {ADA: 540, BOB: 360}
    late = watched(6, 9).told()
    for others in ({"N": late}, {"N": late, "O": late}, {"N": late, "O": late, "P": late}):
        book.reconcile(others)
        assert samples(book) == {ADA: 540, BOB: 360}


def test_what_two_parts_of_a_run_have_seen_is_joined_peer_by_peer_and_not_added_twice() -> None:
    """Two books of the same epochs know unlike peers, since their groups were others: of each the greater number."""
    book = watched(9, 9)
    one = Told(Mark(9, 900), 0, {ADA: Entry(samples=540.0), BOB: Entry(samples=40.0)})
    other = Told(Mark(9, 900), 0, {ADA: Entry(samples=60.0), BOB: Entry(samples=360.0)})
    for each in (one, other, one, other):
        book.reconcile({"M": each})
    assert samples(book) == {ADA: 540, BOB: 360}


def test_a_lone_liar_takes_from_nobody_what_was_said_before() -> None:
    book = watched(9, 9)
    book.reconcile({"M": lie(9, {ADA: 400.0, BOB: 300.0})})
    before = samples(book)
    book.reconcile({"E": lie(9, {EVE: 899.0})})
    after = samples(book)
    assert all(after[peer] >= before[peer] for peer in before)
    assert sum(after.values()) <= 905, "not more than the run has"


def test_nobody_talks_a_monitor_out_of_what_it_has_seen_itself() -> None:
    book = watched(1, 9)
    disputes = book.reconcile({"E": lie(9, {EVE: 899.0})})
    assert samples(book) == {ADA: 540, BOB: 360}
    assert {each.peer for each in disputes} == {ADA, BOB, EVE}
    two = {"E": lie(9, {EVE: 899.0}), "F": lie(9, {EVE: 899.0})}
    book.reconcile(two)  # a majority of liars
    assert samples(book) == {ADA: 540, BOB: 360}


def test_what_nobody_here_has_seen_is_all_that_a_lone_liar_can_give_itself() -> None:
    book = Book.restore(watched(1, 6).kept([ADA, BOB]))
    book.begin(Mark(9, 900))
    book.reconcile({"E": lie(9, {EVE: 899.0})})
    assert samples(book)[ADA] == 360 and samples(book)[BOB] == 240
    assert samples(book)[EVE] == pytest.approx(300, abs=5)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (lie(9, {EVE: 1000.0}), "more samples than the run has"),
        (Told(Mark(9, 901), 0, {}), "another lineage"),
        (Told(Mark(12, 1200), 0, {}), "not known here"),
        (Told(Mark(9, 900), 0, {EVE: Entry(rounds=10)}), "more rounds"),
        (Told(Mark(9, 900), 0, {str(n): Entry() for n in range(40)}), "more peers"),
    ],
)
def test_a_book_that_cannot_be_is_refused(told: Told, why: str) -> None:
    book = watched(1, 9, Book(most=32))
    assert book.objection(watched(1, 8).told()) == ""
    assert why in book.objection(told)


def test_a_full_book_keeps_those_who_gave_most() -> None:
    book = Book(most=32)
    book.credit(credit(1), NOW)
    for number in range(200):
        book.saw(f"stranger {number}", "", "", 1.0 + number, NOW)
    assert len(book.entries()) <= 32
    assert {ADA, BOB, "stranger 199"} <= book.entries().keys()


def test_names_in_a_book_steer_no_terminal_and_turn_no_line() -> None:
    (each,) = listed({EVE: Entry(1.0, name="Eve\x1b[2J", team="\u202ereds")})
    assert (each.name, each.team) == ("Eve[2J", "reds")
