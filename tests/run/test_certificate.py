from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from swarmcli.errors import UsageError
from swarmcli.network.identity import Identity
from swarmcli.run.certificate import ContributionCertificate
from swarmcli.run.contributions import Attestation, ContributionRow, Mark

ADA, MONITOR, OTHER = [Identity.from_seed(seed) for seed in (1, 2, 3)]


def said(monitor: Identity = MONITOR, samples: float = 12_400.0, run: str = "recipe") -> Attestation:
    entry = ContributionRow(samples, 3.1, 12, 5_000, 11_000.0, 1.0, 2.0, "Ada", "reds")
    mark = Mark(90, 98_000)
    return Attestation("run", run, monitor.peer_id, ADA.peer_id, entry, 3, 7, mark, 0, 1_790_000_000.0).signed(monitor)


def test_a_certificate_comes_back_from_its_file_and_holds(tmp_path: Path) -> None:
    made = ContributionCertificate.make(said(), ADA, "Ada Lovelace")
    made.write(tmp_path / "ada.json")
    found = ContributionCertificate.read(tmp_path / "ada.json")
    assert found == made
    assert found.fault == ""
    assert found.format == 1, "which earlier versions read, that know of no `since`"
    since = ContributionCertificate.make(change(since=40).signed(MONITOR), ADA)
    since.write(tmp_path / "ada.json")
    assert ContributionCertificate.read(tmp_path / "ada.json") == since and since.fault == "" and since.format == 2
    assert said().signature.hex().startswith("1c7566a040cfa58360f17cbfc6cbba19"), "as an older swarm signed it"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name")
def test_a_pipe_or_a_device_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDWR)
    ContributionCertificate.make(said(), ADA).write(pipe)
    assert pipe.is_fifo() and b'"swarm": "contribution"' in os.read(reader, 1 << 16)
    os.close(reader)


def of_earlier_version(*each: Attestation) -> ContributionCertificate:
    return ContributionCertificate(1, each)


def test_a_certificate_of_an_earlier_version_with_the_words_of_several_monitors_still_holds() -> None:
    assert of_earlier_version(said(), said(OTHER)).fault == ""


def change(**changes: object) -> Attestation:
    return msgspec.structs.replace(said(), **changes)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (ContributionCertificate.make(change(rank=1), ADA), "has not signed what"),
        (ContributionCertificate.make(change(entry=ContributionRow(99_000.0)), ADA), "has not signed what"),
        (ContributionCertificate.make(change(monitor=OTHER.peer_id), ADA), "has not signed what"),
        (of_earlier_version(said(), said(OTHER, run="another")), "several peers or runs"),
        (of_earlier_version(said(), said()), "one voice twice"),
        (ContributionCertificate.make(said(), OTHER), "has not signed it"),
        (ContributionCertificate.make(change(since=1), ADA), "has not signed what"),
        (msgspec.structs.replace(ContributionCertificate.make(said(), ADA, "Ada"), whom="Eve"), "has not signed it"),
    ],
)
def test_what_nobody_has_signed_is_found(forged: ContributionCertificate, why: str) -> None:
    assert why in forged.fault


def test_a_file_that_is_no_certificate_or_of_a_day_that_no_calendar_has_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for content in ("", "[]", "{}", '{"swarm": "contribution"}', "x" * 100_000, '{"swarm": 1}'):
        file.write_text(content)
        with pytest.raises(UsageError, match="no certificate"):
            ContributionCertificate.read(file)
    for moment in (1e300, -1e20, float("inf"), float("nan")):
        ContributionCertificate.make(change(time=moment).signed(MONITOR), ADA).write(file)
        with pytest.raises(UsageError, match="no certificate"):
            ContributionCertificate.read(file)
