from __future__ import annotations

import io
from dataclasses import replace

import msgspec
from rich.console import Console

from swarmcli.cli.contributions import Told, contributions_table, in_words, thanks, told_by
from swarmcli.events import Contribution
from swarmcli.network.identity import Identity
from swarmcli.peer.peer import Summary
from swarmcli.run.asking import AskedTables
from swarmcli.run.certificate import ContributionCertificate
from swarmcli.run.contributions import Attestation, ContributionRow, ContributionTable, Mark

ADA, BOB, MONITOR, OTHER = [Identity.from_seed(seed) for seed in (1, 2, 3, 4)]
GIVEN = [
    Contribution(ADA.peer_id.text, "Ada", "reds", 600, 2.0, 9, 0, 90.0),
    Contribution(BOB.peer_id.text, "", "reds", 300, 3.0, 9, 5_000_000, 7200.0),
    Contribution(OTHER.peer_id.text, "Zoë\x1b[31m", "", 100, 1.0, 3, 0, 60.0),
]


def summary(samples: int = 0) -> Summary:
    return Summary("run", "trainer", "Ada", ADA.peer_id.text, samples=samples)


def attestation(samples: float = 12_400.0, rank: int = 3, reduced: int = 0, hours: float = 3.1) -> Attestation:
    about = "run", "recipe", MONITOR.peer_id, ADA.peer_id
    return Attestation(
        *about, ContributionRow(samples, hours, 12, reduced), rank, 7, Mark(90, 98_000), 0, 1.79e9
    ).signed(MONITOR)


def table(ada: float, bob: float = 0.0, since: int = 0) -> ContributionTable:
    given = {peer.peer_id: ContributionRow(samples) for peer, samples in ((ADA, ada), (BOB, bob)) if samples}
    return ContributionTable("run", Mark(10, 1000), since, ada + bob, tuple(given), tuple(given.values()))


def test_the_last_line_of_a_trainer_says_what_it_gave_and_how_it_stands() -> None:
    said = thanks(summary(), attestation())
    given = "12,400 of 98,000 samples, 3.1 h, place 3 of 7"
    assert said == f"you gave in all: {given}, by the count of {MONITOR.peer_id.short}; thank you"
    fewer = thanks(summary(13_000), attestation())
    assert (
        f"by the count of {MONITOR.peer_id.short}; it has not counted 600 of this start: above a round's cap" in fewer
    )
    assert "20 min" in thanks(summary(), attestation(hours=1 / 3))
    said = thanks(summary(), msgspec.structs.replace(attestation(), since=40))
    assert "12,400 of 98,000 samples (counted since epoch 40), 3.1 h" in said


def test_without_a_monitor_the_last_line_says_whose_count_it_is_and_an_auxiliary_is_thanked_for_what_it_added() -> None:
    alone = "512 samples by this peer's own count, since no monitor answered; thank you"
    assert (thanks(summary(512), None), thanks(summary(0), None)) == (alone, "")
    added = thanks(summary(), attestation(0.0, 0, reduced=3_000_000))
    assert "3.0 MB added up for others in 12 rounds" in added
    assert thanks(summary(), attestation(0.0, 0)) == ""


def test_the_table_tells_claimed_from_seen_and_shows_no_strangers_control_characters() -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(contributions_table(GIVEN))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "claimed" in text and "seen" in text
    assert "Ada" in text and "60%" in text and "5.0 MB" in text and "2.0 h" in text
    assert BOB.peer_id.text[:10] in text and "\x1b" not in text
    console = Console(file=io.StringIO(), width=120)
    console.print(contributions_table([*GIVEN, replace(GIVEN[1], peer="m" * 52), replace(GIVEN[2], samples=0)]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[0] for line in lines[-5:]] == ["1", "2", "4", "2", "–"], "places, as each is told its own"
    console = Console(file=io.StringIO(), width=60)
    wordy = replace(GIVEN[0], name="n" * 20, team="t" * 16, samples=123_456_789)
    console.print(contributions_table([wordy, wordy], narrow=True))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "n" * 20 in text and "123,456,789" in text and "50%" in text and "…" not in text


def test_who_gave_most_comes_first() -> None:
    listed = Told("run", GIVEN[::-1], [], {}).as_json()["contributions"]
    assert [each["samples"] for each in listed] == [600, 300, 100]


def test_it_is_said_whose_count_is_shown_and_who_counts_otherwise() -> None:
    whole, late = table(600.0, 400.0), table(450.0, since=6)
    alone = told_by(AskedTables("run", {OTHER.peer_id: late}, {}))
    part = "45% of the 1,000 samples up to epoch 10, counted since epoch 6"
    (said,) = alone.rests_on
    assert said == f"This is the count of {OTHER.peer_id.short}: {part}; no other peer confirms it."
    assert alone.as_json()["accounted"] == 0.45
    silent = f"{BOB.peer_id.short} gives no answer"
    tables = {OTHER.peer_id: late, MONITOR.peer_id: whole, ADA.peer_id: whole, BOB.peer_id: silent}
    told = told_by(AskedTables("run", tables, {}))
    assert [each.samples for each in told.contributions] == [600, 400], "nothing is merged"
    assert told.rests_on == [
        f"This is the count of {MONITOR.peer_id.short}: 100% of the 1,000 samples up to epoch 10.",
        f"{OTHER.peer_id.short} counts otherwise: {part}.",
        f"{ADA.peer_id.short} counts the same.",
        f"{BOB.peer_id.short} did not tell what it counts (gives no answer).",
    ]
    shown = [(each["since"], each["shown"]) for each in told.as_json()["monitors"]]
    assert shown == [(6, False), (0, True), (0, False)]
    (nobody,) = told_by(AskedTables("run", {}, {})).rests_on
    assert "`swarm monitor` starts one, which counts" in nobody


def test_a_certificate_in_words_says_what_it_does_not_prove() -> None:
    said = "\n".join(in_words(ContributionCertificate.make(attestation(), ADA, "Ada Lovelace")))
    assert "Ada Lovelace" in said and "12,400 of 98,000 samples" in said
    assert "claimed" in said and "seen" in said and "does not prove that they are true" in said
    assert "has not signed it" in "\n".join(in_words(ContributionCertificate.make(attestation())))
