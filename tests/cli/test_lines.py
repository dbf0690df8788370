from __future__ import annotations

from dataclasses import replace

from swarmcli.cli.console import epoch_line, event_line, format_time, plural, remaining, round_line
from swarmcli.events import EpochAdvanced, RoundFinished
from swarmcli.journal import Line

EPOCH = EpochAdvanced(3, "ab", 4096, 2048, 2, 2.5, 8.0, 0.25)
ROUND = RoundFinished(
    "ab", "grads", "committed", "", 2, "a", ("a", "b"), ("a", "b"), {}, 2_000_000, 999, {"running all-reduce": 0.25}
)


def test_durations_are_as_exact_as_they_are_long() -> None:
    assert [format_time(seconds) for seconds in (0.0, 9.94, 9.96, 99.4, 100, 7200)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "99 s",
        "2 min",
        "2.0 h",
    ]
    assert [remaining(seconds) for seconds in (0.0, 3.4, 200.0)] == ["1 s", "3 s", "3 min"]


def test_plurals() -> None:
    assert [plural(1, "peer"), plural(1200, "peer"), plural(2, "auxiliary", "auxiliaries")] == [
        "1 peer",
        "1,200 peers",
        "2 auxiliaries",
    ]


def test_an_epoch_without_loss_or_samples_says_what_it_knows() -> None:
    line = epoch_line(replace(EPOCH, loss=None, samples=0))
    assert line == "epoch 3  taken over from another peer", "nobody here knows how long it took"


def test_a_round_says_who_was_in_it_and_why_it_failed() -> None:
    assert round_line(ROUND) == "round of epoch 2 committed  2 peers  0.2 s  2.0 MB sent, 999 B received"
    failed = replace(ROUND, outcome="failed", reason="b\x1b died", contributors=("a",), epoch=-1)
    assert round_line(failed) == "round failed: b died  1 contributed, 2 members  0.2 s  2.0 MB sent, 999 B received"


def test_only_what_is_not_usual_is_marked() -> None:
    assert event_line(Line("info", "x", "", "hello")) == "hello"
    assert event_line(Line("error", "x", "", "oh\nno")) == "error: oh no"
