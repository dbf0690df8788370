from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from swarmcli.cli.contributions import (
    as_json,
    check_order,
    contributions_table,
    in_words,
    only_home,
    ordered,
    ordinal,
    rests_on,
    teams_of,
    thanks,
)
from swarmcli.cli.link import Places
from swarmcli.errors import UsageError
from swarmcli.events import Contribution
from swarmcli.machine.registry import LocalPeer, LocalPeers
from swarmcli.network.identity import Identity, PeerID
from swarmcli.peer.home import LINK
from swarmcli.peer.peer import Summary
from swarmcli.run.asking import Given
from swarmcli.run.bookkeeping import Attested
from swarmcli.run.certificate import ContributionCertificate
from swarmcli.run.contributions import Attestation, Book, BookEntry, Mark, signed

ADA, BOB, MONITOR, OTHER = [Identity.from_seed(seed) for seed in (1, 2, 3, 4)]
GIVEN = [
    Contribution(ADA.peer_id.text, "Ada", "reds", 600, 2.0, 9, 0, 90.0),
    Contribution(BOB.peer_id.text, "", "reds", 300, 3.0, 9, 5_000_000, 7200.0),
    Contribution(OTHER.peer_id.text, "Zoë\x1b[31m", "", 100, 1.0, 3, 0, 60.0),
]


def summary(samples: int = 0) -> Summary:
    return Summary("run", "trainer", "Ada", ADA.peer_id.text, samples=samples)


def standing(*attestations: Attestation) -> Attested:
    return Attested(attestations)


def attestation(samples: float = 12_400.0, rank: int = 3, reduced: int = 0, hours: float = 3.1) -> Attestation:
    entry = BookEntry(samples, hours, 12, reduced)
    return signed(
        MONITOR, Attestation("run", "recipe", MONITOR.peer_id, ADA.peer_id, entry, rank, 7, Mark(90, 98_000), 0, 1.79e9)
    )


def book(identity: Identity, entries: dict[str, BookEntry], *, vouched: int = 0, witnessed: float = 1000.0) -> Book:
    peers, lines = tuple(map(PeerID.parse, entries)), tuple(entries.values())
    made = Book("run", "recipe", identity.peer_id, Mark(10, 1000), witnessed, vouched, peers, lines, 1.0)
    return signed(identity, made)


def test_the_last_line_of_a_trainer_says_what_it_gave_and_how_it_stands() -> None:
    said = thanks(summary(), standing(attestation(), attestation()))
    assert said == "in all your starts: 12,400 of 98,000 samples, 3.1 hours, third of seven; thank you"
    assert "third of seven, by one peer's count; thank you" in thanks(summary(), standing(attestation()))
    assert "20 minutes" in thanks(summary(), standing(attestation(hours=1 / 3)))
    told = ["tenth", "11th", "21st", "22nd", "113th", "1,003rd"]
    assert [ordinal(number) for number in (10, 11, 21, 22, 113, 1003)] == told
    said = thanks(summary(), standing(msgspec.structs.replace(attestation(), peers=1)))
    assert "12,400 of 98,000 samples (who gave the others was not counted), 3.1 hours" in said


def test_without_a_monitor_the_last_line_says_whose_count_it_is_and_an_auxiliary_is_thanked_for_what_it_added() -> None:
    alone = "512 samples by this peer's own count, since nobody else could be asked; thank you"
    assert (thanks(summary(512), None), thanks(summary(0), None)) == (alone, "")
    added = thanks(summary(), standing(attestation(0.0, 0, reduced=3_000_000)))
    assert "3.0 MB added up for others in 12 rounds" in added
    assert thanks(summary(), standing(attestation(0.0, 0))) == ""


def test_the_table_tells_claimed_from_seen_and_shows_no_strangers_control_characters() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(contributions_table(GIVEN, 1000))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "claimed" in text and "seen" in text
    assert "Ada" in text and "60%" in text and "5.0 MB" in text and "2.0 h" in text
    assert BOB.peer_id.text[:10] in text and "\x1b" not in text
    console = Console(file=io.StringIO(), width=60)
    wordy = replace(GIVEN[0], name="n" * 20, team="t" * 16, samples=123_456_789)
    console.print(contributions_table([wordy], 2 * wordy.samples, narrow=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "n" * 20 in text and "123,456,789" in text and "50%" in text and "…" not in text


def test_teams_are_the_sums_of_those_who_name_them_and_lists_are_sorted_by_any_column() -> None:
    (team,) = teams_of(GIVEN)
    assert (team.team, team.peers, team.samples, team.hours, team.reduced_bytes) == ("reds", 2, 900, 5.0, 5_000_000)

    assert [each.samples for each in ordered(GIVEN, "hours")] == [300, 600, 100]
    assert [each.name[:3] for each in ordered(GIVEN, "name")] == ["Ada", "Zoë", ""]
    with pytest.raises(UsageError, match="one of samples, hours"):
        check_order("wealth")


def test_it_is_said_whose_word_the_numbers_are() -> None:
    honest = {ADA.peer_id.text: BookEntry(600.0), BOB.peer_id.text: BookEntry(400.0)}
    alone = Given("run", honest, {MONITOR.peer_id: book(MONITOR, honest, vouched=1, witnessed=250.0)})
    assert "has seen 25% of that itself, and knows the rest by the word of another peer" in rests_on(alone)[0]
    assert rests_on(alone)[-1] == "This is told by one peer only: nobody else can confirm it."
    half = {ADA.peer_id.text: BookEntry(450.0)}  # of 1,000: the others were in groups that this monitor was not in
    found = Given("run", half, {MONITOR.peer_id: book(MONITOR, half)})
    assert "The list has 45% of the run's samples" in rests_on(found)[-1] and as_json(found)["accounted"] == 0.45
    three = {each.peer_id: book(each, honest) for each in (MONITOR, ADA, OTHER)}
    said = rests_on(Given("run", honest, three, {BOB.peer_id: "no answer"}))
    assert any("what most of them tell is shown" in line for line in said)
    assert said[-1] == f"The book of {BOB.peer_id.text[:10]} could not be read: no answer"
    assert as_json(alone)["monitors"] == [
        {"peer": MONITOR.peer_id.text, "epoch": 10, "samples": 1000, "witnessed": 250.0, "vouched": 1}
    ]


def test_a_certificate_in_words_says_what_it_does_not_prove() -> None:
    said = "\n".join(in_words(ContributionCertificate.make([attestation()], ADA, "Ada Lovelace")))
    assert "Ada Lovelace" in said and "12,400 of 98,000 samples" in said
    assert "claimed" in said and "seen" in said and "whether they are to be believed" in said
    assert "has not signed it" in "\n".join(in_words(ContributionCertificate.make([attestation()])))


def test_an_owner_gets_the_certificate_of_the_trainer_beside_his_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [tmp_path / "runs" / name for name in ("monitor-1", "trainer-1", "texts")]
    for home in homes:
        home.mkdir(parents=True)
        (home / LINK).write_text("a link")
    monkeypatch.setattr("swarmcli.cli.link.places_of", lambda what: Places([homes[0]]))
    assert only_home() == homes[1].resolve()
    (tmp_path / "runs" / "trainer-2").mkdir()
    (tmp_path / "runs" / "trainer-2" / LINK).write_text("a link")
    with pytest.raises(UsageError, match="2 peers are known"):
        only_home()
    with LocalPeers().entered(LocalPeer.here("trainer", "run", tmp_path / "runs" / "trainer-2")):
        assert only_home() == (tmp_path / "runs" / "trainer-2").resolve()
    (tmp_path / "runs" / "trainer-2" / LINK).unlink()
    (homes[1] / LINK).unlink()
    assert only_home() == homes[0].resolve()
