from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from swarmcli.averaging.seats import NoSeat
from swarmcli.events import EpochAdvanced, EpochReported, Evaluated, Event, Events, Noticed
from swarmcli.network.context import Traffic
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.epoch.seat import SeatLost
from swarmcli.run.values import RunStatus, State
from swarmcli.run.views import evaluated
from swarmcli.run.watch import RunWatch, alarm, clock_alarm
from tests.recipe.recipes import small

TRAINER, BOB, CEM = (Identity.from_seed(number).peer_id for number in (1, 2, 3))


class FakeOptimizer:
    """Of a trainer that stands at `epoch`, of which half is done at 64 samples per second."""

    def __init__(self, target: int, epoch: int = 0) -> None:
        self.target, self.rate, self.phase, self.local_epoch = target, 64.0, "training", epoch
        self.role = "trainer"
        self.age, self.report_age = 1.0, 1.0
        self.others: dict[PeerID, SimpleNamespace] = {}
        self.seen: dict[PeerID, SimpleNamespace] = {}
        self.apart: dict[PeerID, SimpleNamespace] = {}
        self.silent: set[PeerID] = set()
        self.core = SimpleNamespace(catch_up=SimpleNamespace(waits=""))
        self.is_averaging = False
        self.pause = ""
        self.seat_lost: SeatLost | None = None
        self.downloading, self.round_bytes, self.seconds_to_send = "", 1_800_000, 0.0
        self.now = 100.0

    @property
    def global_progress(self) -> SimpleNamespace:
        return SimpleNamespace(epoch=self.local_epoch)

    def report(self) -> SimpleNamespace:
        return told("me", self.local_epoch, self.phase, rate=self.rate, pause=self.pause, role=self.role)

    def peers(self) -> dict[PeerID, SimpleNamespace]:
        return self.others

    @property
    def directory(self) -> SimpleNamespace:
        return SimpleNamespace(
            age=lambda peer: self.age,
            report_age=lambda peer: self.report_age,
            is_there=lambda peer: peer not in self.silent,
        )

    @property
    def claims(self) -> SimpleNamespace:
        return SimpleNamespace(apart=lambda: self.apart)

    @property
    def tracker(self) -> SimpleNamespace:
        return SimpleNamespace(expected=lambda: {TRAINER: (self.target / 2, self.rate)})


def told(
    name: str, epoch: int, phase: str = "training", *, rate: float = 10.0, role: str = "trainer", **more: Any
) -> Any:
    usual = {
        "role": role, "name": name, "epoch": epoch, "phase": phase, "samples_per_second": rate, "loss": 2.0,
        "lineage": "aa", "device": "cpu", "client_mode": True, "drift": None, "last_outcome": "committed",
        "version": "0.3.0", "last_reason": "", "time": 0.0, "pause": "", "leaving": False, "evaluation": None,
    }  # fmt: skip
    return SimpleNamespace(**usual | more)


FAR = SimpleNamespace(places=("203.0.113.7:1",))


def watching(optimizer: FakeOptimizer, *epochs: float, max_epochs: int | None = 20) -> RunWatch:
    """Of a run whose epochs took so many seconds so far."""
    recipe = small(f"max_epochs={'null' if max_epochs is None else max_epochs}", "lr_scheduler.name=constant")
    optimizer.target = recipe.target_batch_size
    optimizer.rate = recipe.target_batch_size / 8
    events = Events()
    dht = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: 1.0, uncorrected=0.0), reach=SimpleNamespace(sentence=lambda: "finding out"),
        is_alive=lambda: True,
        endpoint=SimpleNamespace(seen=optimizer.seen.get),
        moved={"allreduce": Traffic(1_770_000, 300_000), "state": Traffic(0, 5_700_000), "": Traffic(400_000, 10_000)},
    )  # fmt: skip
    peer: Any = SimpleNamespace(
        events=events, recipe=recipe, peer_id=TRAINER, role="trainer", saved="", link=lambda: None, no_link="", dht=dht,
        journal=SimpleNamespace(clock=lambda: optimizer.now), description=SimpleNamespace(name="me"),
    )  # fmt: skip
    watch = RunWatch(peer)
    watch.follow(cast(Any, optimizer))
    for seconds in epochs:
        events.emit(EpochAdvanced(1, "aa", 128, 64, 2, 2.0, seconds, 0.1))
    return watch


def hear(watch: RunWatch, *events: Event) -> None:
    for event in events:
        watch._peer.events.emit(event)


def ended(number: int, loss: float | None = None) -> EpochAdvanced:
    return EpochAdvanced(number, "ab" * 32, 4096, 2048, 2, loss, 8.0, 0.25)


def test_it_tells_the_last_evaluation_of_this_peer_and_who_can_dial_it() -> None:
    watch = watching(FakeOptimizer(0, epoch=20))
    status = watch.look()
    assert status.evaluation is None and status.reach == "finding out" and status.link_reach == ""
    more = {"link": lambda: FAR, "recipe": small("datasets=[{source: files, path: texts}]")}
    watch._peer = cast(Any, SimpleNamespace(**vars(watch._peer) | more))
    assert "A link brings no data: whoever trains needs a copy of texts, and" in watch.look().link_reach
    assert watch.look().join_line.endswith('" --set local.data_dir=DIRECTORY'), "no link brings the data"
    hear(watch, Evaluated(10, 2.5, 256), Evaluated(20, 2.5, 256))
    status = watch.look()
    assert status.evaluation is not None and (status.evaluation.epoch, status.evaluation.loss) == (20, 2.5)
    watch._peer.dht.is_alive = lambda: False
    hear(watch, Noticed("warning", "nobody answers"))
    watch.follow(cast(Any, None))
    assert (watch.look().waits, watch.look().reach, status.waits) == ("nobody answers", "not known yet", "")


def test_what_others_have_measured_is_shown_with_their_name_the_best_and_the_end_that_the_evaluator_names() -> None:
    optimizer = FakeOptimizer(0, epoch=20)
    watch = watching(optimizer)
    best = Evaluated(10, 2.0, 256)
    evaluations = SimpleNamespace(ends_at=None, best=best)
    watch.follow(cast(Any, optimizer), cast(Any, evaluations))
    hear(watch, Evaluated(20, 2.5, 256, {"f1": 0.5}, "a" * 52, "Ada"))
    status = watch.look()
    shown = evaluated(cast(Evaluated, status.evaluation), status.best)
    assert shown == "epoch 20: loss 2.5000, f1 0.5000, by Ada; best 2.0000 at epoch 10"
    assert evaluated(best, best) == "epoch 10: loss 2.0000"
    assert watch.last_epoch() == watch._peer.recipe.max_epochs
    evaluations.ends_at = 20
    assert watch.look().max_epochs == 20 and watch.look().state == "finished"


def test_shares_are_what_the_counts_of_samples_grew_by() -> None:
    optimizer = FakeOptimizer(0, epoch=3)
    optimizer.others = {BOB: told("bob", 3)}
    watch = watching(optimizer)
    optimizer.rate = 30.0
    assert [peer.share for peer in watch.look().peers] == [0.75, 0.25], "before anyone reported twice rates decide"
    counts = ((TRAINER, 1, 500), (BOB, 1, 10_000), (TRAINER, 2, 530), (BOB, 3, 10_090))
    hear(watch, ended(3), *(EpochReported(peer.text, epoch, 2.0, count, 1.0) for peer, epoch, count in counts))
    assert [peer.share for peer in watch.look().peers] == [0.25, 0.75]


def test_a_peer_whose_second_report_is_on_its_way_has_a_share() -> None:
    optimizer = FakeOptimizer(0, epoch=2)
    optimizer.others = {BOB: told("bob", 2)}
    watch = watching(optimizer)
    reports = ((TRAINER, 1, 80), (BOB, 1, 240), (TRAINER, 2, 160))
    hear(watch, ended(2), *(EpochReported(peer.text, epoch, 2.0, count, 30.0) for peer, epoch, count in reports))
    assert [peer.share for peer in watch.look().peers] == [0.25, 0.75], "not all of it for the one that is heard first"


def test_a_peer_is_shown_with_how_it_is_connected_how_its_last_round_went_and_when_it_was_heard_of() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    ways = {"direct": (False, False), "punched": (False, True), "relayed": (True, False)}
    others = [Identity.from_seed(number).peer_id for number in range(2, 6)]
    outcomes = ("failed", "committed", "alone", "undecided")
    for peer, outcome in zip(others, outcomes, strict=True):
        optimizer.others[peer] = told("bob", 7, time=1.7e308, last_outcome=outcome, last_reason="x")
    for peer, (relayed, punched) in zip(others, ways.values(), strict=False):
        optimizer.seen[peer] = SimpleNamespace(relayed=relayed, punched=punched)
    status = watching(optimizer).look()
    assert {peer.version for peer in status.peers} == {"0.3.0"}
    assert [peer.way for peer in status.peers] == [None, *ways, None]
    failed, undecided = "its last round failed: x", "its last round is undecided: x"
    assert [peer.trouble for peer in status.peers[1:]] == [failed, "", "", undecided]
    assert all(peer.last_seen <= status.now for peer in status.peers), "whoever signs a report may name any time"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "in step"),
        ({"epoch": 6, "lineage": "zero"}, "in step"),  # its report is on the way
        ({"epoch": 5}, "behind"),
        ({"lineage": "another"}, "behind"),
        ({"lineage": ""}, "in step"),  # an auxiliary holds none
        ({"epoch": 8}, "in step"),
        ({"epoch": 5, "pause": "paused"}, "paused"),  # however far it is behind by now
        ({"pause": "pausing"}, "paused"),
        ({"pause": "pausing", "leaving": True}, "leaving"),
        ({"epoch": 5, "pause": "returning"}, "behind"),
    ],
)
def test_who_is_in_step(changes: dict[str, Any], expected: str) -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    optimizer.others = {Identity.from_seed(2).peer_id: told("bob", **{"epoch": 7, **changes})}
    assert watching(optimizer).look().peers[1].health == expected


def test_an_old_report_of_a_quick_run_does_not_make_a_peer_look_behind_and_where_all_pause_the_run_waits() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    optimizer.others = {BOB: told("bob", 3, time=-9.0)}
    optimizer.age, optimizer.report_age = 0.0, 2.5  # it is connected
    status = watching(optimizer, 1.0).look()
    assert status.peers[1].health == "in step" and status.peers[1].told == 97.5
    assert watching(optimizer, 10.0).look().peers[1].health == "behind"
    optimizer.others, optimizer.pause = {BOB: told("bob", 7, pause="paused")}, "paused"
    status = watching(optimizer).look()
    assert (status.state, [peer.health for peer in status.peers]) == ("waiting", ["paused", "paused"])
    optimizer.pause = ""
    watch = watching(optimizer)
    assert watch.look().state == "training"
    watch._optimizer = None  # it has not got at the run yet
    assert watch.look().state == "synchronizing"


def test_who_does_not_answer_or_trains_another_model_is_named_and_not_counted() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    bob, dora, eve = (Identity.from_seed(number).peer_id for number in (2, 3, 4))
    optimizer.others = {bob: told("bob", 7), dora: told("dora", 7), eve: told("eve", 0, "stranded")}
    optimizer.apart = {dora: optimizer.others[dora], eve: optimizer.others[eve]}
    optimizer.silent = {bob}
    watch = watching(optimizer)
    optimizer.rate = 64.0
    status = watch.look()
    assert [peer.health for peer in status.peers] == ["in step", "not answering", "another model", "waiting"]
    assert status.samples_per_second == 64.0, "its own alone"
    assert status.peers[1].last_seen == 99.0


def test_the_end_of_a_run_is_estimated_from_what_its_latest_epochs_took() -> None:
    status = watching(FakeOptimizer(0, epoch=10), *[500.0] * 5, *[10.0] * 6, 90.0, *[12.0] * 3).look()
    assert status.eta_seconds == pytest.approx(4.0)
    # The median of the last ten, of which one was slow: nine whole epochs remain, and the rest of the present one.
    assert status.run_eta_seconds == pytest.approx(9 * 10.0 + 4.0)


def test_an_epoch_that_was_taken_over_tells_nothing_of_how_long_they_take() -> None:
    watch = watching(FakeOptimizer(0, epoch=10))
    hear(watch, EpochAdvanced(1, "aa", 0, 0, 0, None, 1000.0, 0.0))
    assert watch.look().run_eta_seconds is None and watch.look().last_epoch is None


def test_nothing_is_promised_where_nothing_is_known() -> None:
    assert watching(FakeOptimizer(0, epoch=10)).look().run_eta_seconds is None, "no epoch has ended yet"
    assert watching(FakeOptimizer(0), 5.0, max_epochs=None).look().run_eta_seconds is None, "there is no last one"
    assert watching(FakeOptimizer(0, epoch=20), 5.0).look().run_eta_seconds is None, "it is over"
    idle = FakeOptimizer(0, epoch=10)
    watch = watching(idle, 5.0)
    idle.rate = 0.0
    assert watch.look().run_eta_seconds is None, "nobody computes"
    waits = FakeOptimizer(0, epoch=10)
    waits.phase = "stranded"
    status = watching(waits, 5.0).look()
    assert (status.state, status.peers[0].health) == ("stranded", "waiting")
    assert status.run_eta_seconds is None and status.eta_seconds is None


def test_the_alarm_says_who_holds_which_model_and_what_to_do() -> None:
    optimizer = FakeOptimizer(128, epoch=41)
    other = [Identity.from_seed(number).peer_id for number in range(2, 6)]
    optimizer.others = {other[0]: told("ada", 40), other[1]: told("garage", 38), other[2]: told("fra", 0, "assisting")}
    assert alarm(cast(Any, optimizer)) == ""
    optimizer.apart = {other[1]: optimizer.others[other[1]]}
    optimizer.role, optimizer.others = "monitor", {other[1]: told("garage", 38, "following", role="auxiliary")}
    assert alarm(cast(Any, optimizer)) == "", "nobody trains yet"
    optimizer.role = "trainer"
    optimizer.others = {other[0]: told("ada", 40), other[1]: told("garage", 38), other[2]: told("fra", 0, "assisting")}
    text = alarm(cast(Any, optimizer))
    assert text.startswith("Two models are being trained: one by me and ada (epoch 41), another by garage (epoch 38).")
    assert text.endswith("it hands the state from one to the other.") and "Start `swarm monitor`" in text
    optimizer.apart = {other[1]: told("garage", 38, "stranded")}
    assert "garage waits to join, but cannot reach the model of me and ada (epoch 41)." in alarm(cast(Any, optimizer))
    optimizer.phase = "stranded"
    waits = "This peer waits: ada and garage (epoch 40) hold the state of this run"
    assert alarm(cast(Any, optimizer)).startswith(waits)
    optimizer.core.catch_up.waits = "ada showed that this run is at epoch 40"
    assert alarm(cast(Any, optimizer)) == "This peer waits: ada showed that this run is at epoch 40"
    optimizer.phase = "assisting"  # an auxiliary holds no model
    assert "the model of ada (epoch 40)" in alarm(cast(Any, optimizer))


# ---- in trouble

LOST = SeatLost(NoSeat(180.0, 4.0), 1_800_000, 10e3, follows=True)


def look_for(watch: RunWatch, optimizer: FakeOptimizer, seconds: float) -> Any:
    """The last of the looks that a screen makes in so many seconds."""
    for _ in range(int(2 * seconds)):
        optimizer.now += 0.5
        status = watch.look()
    return status


def test_within_three_usual_epochs_it_says_that_the_run_stands_and_for_whom_it_waits() -> None:
    optimizer = FakeOptimizer(0, epoch=330)
    optimizer.others = {BOB: told("Bob", 330), CEM: told("Cem", 330, rate=0.0)}
    watch = watching(optimizer, *[10.0] * 8, max_epochs=None)
    optimizer.silent = {BOB}
    assert look_for(watch, optimizer, 22).state == "training"
    status = look_for(watch, optimizer, 8)
    assert status.state == "standing" and status.samples_per_second == 0.0
    assert status.eta_seconds is None and status.run_eta_seconds is None
    assert status.waits.startswith("The run stands still: epoch 330 has lasted 30 s, and one usually takes about 10 s.")
    assert "It waits for Bob (does not answer) and Cem (has computed nothing yet)." in status.waits
    assert "start that peer again" in status.waits
    optimizer.local_epoch = 331
    assert watch.look().state == "training" and watch.look().waits == ""
    optimizer.now += 8 * 3600.0  # while the computer slept
    assert watch.look().state == "training"
    few = FakeOptimizer(0, epoch=7)
    watch = watching(few, *[4.0] * 8)
    few.rate = few.target / 40  # most trainers have left: epochs take long
    assert look_for(watch, few, 79).state == "training"
    assert look_for(watch, few, 3).state == "standing"


def test_a_run_that_stands_since_a_round_lasts_or_fails_tells_nobody_to_start_a_peer_again() -> None:
    optimizer = FakeOptimizer(0, epoch=330)
    optimizer.others = {BOB: told("Bob", 330)}
    watch = watching(optimizer, *[1.0] * 8, max_epochs=None)
    optimizer.is_averaging = True
    status = look_for(watch, optimizer, 20)
    assert status.state == "standing"
    assert "A round lasts as long as its slowest line takes; if that line has a limit, raise it." in status.waits
    optimizer.is_averaging = False
    optimizer.others = {BOB: told("Bob", 330, last_outcome="failed", last_reason="it took longer than its 60 s")}
    assert "Bob says: its last round failed: it took longer than its 60 s. The peers try" in watch.look().waits
    optimizer.others = {BOB: told("Bob", 330)}
    assert "All answer and compute. If it stays so, start this peer again" in watch.look().waits


def test_beside_an_epoch_whose_samples_are_all_there_stands_no_time_left() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    watch = watching(optimizer, 4.0)
    assert watch.look().eta_seconds == pytest.approx(4.0)
    optimizer.target *= 2  # what is expected of it is the target
    status = watch.look()
    assert status.samples == status.target and status.eta_seconds is None


def test_while_nobody_computes_the_clock_stands_and_it_says_why_nobody_does() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    optimizer.role, optimizer.phase = "monitor", "following"
    optimizer.others = {BOB: told("Bob", 7, pause="paused"), CEM: told("Cem", 7, "following")}
    watch = watching(optimizer, *[4.0] * 8)
    status = look_for(watch, optimizer, 100)
    assert status.state == "waiting"
    assert status.waits.startswith("Nobody computes: Bob (pauses) and Cem (follows, since its line is too slow).")
    optimizer.others = {}
    assert "epoch 7 has no trainer" in watch.look().waits
    optimizer.local_epoch = 0
    assert watch.look().waits == "", "it has not begun"
    optimizer.others, optimizer.local_epoch = {BOB: told("Bob", 7)}, 7
    assert watch.look().state == "training"


@pytest.mark.parametrize("always", [True, False])
def test_a_stranger_that_says_that_it_computes_does_not_hide_a_run_that_stands_still(always: bool) -> None:
    """Slowly, or for a moment every few minutes: the clock of the epoch goes on whatever anybody says."""
    optimizer = FakeOptimizer(0, epoch=7)
    optimizer.role, optimizer.phase = "monitor", "following"
    optimizer.others = {BOB: told("Bob", 7, rate=0.001)}
    watch = watching(optimizer, *[8.0] * 8, max_epochs=None)
    watch.look()
    for _ in range(13):
        look_for(watch, optimizer, 300 if always else 1)
        optimizer.others = {BOB: told("Bob", 7, rate=0.001, pause="" if always else "paused")}
        status = look_for(watch, optimizer, 1 if always else 299)
        optimizer.others = {BOB: told("Bob", 7, rate=0.001)}
    assert status.overdue > (60 if always else 600) and status.waits, "an alert begins after that"


def test_a_trainer_without_a_seat_follows_and_is_not_counted() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    optimizer.others = {BOB: told("Bob", 7)}
    optimizer.phase, optimizer.seat_lost = "following", LOST
    watch = watching(optimizer, *[4.0] * 8)
    optimizer.rate = 0.0
    status = watch.look()
    assert (status.state, [peer.health for peer in status.peers]) == ("following", ["line too slow", "in step"])
    assert "1.8 MB; your limit of 10 kB/s needs 3 min, epochs take 4 s: your samples cannot count" in status.seat
    assert "a higher limit brings it back" in status.seat
    assert "your limit of 10 kB/s, which your peers here share" in replace(LOST, limit=5e3, divided=2.0).sentence
    assert "the run's owner can make rounds smaller: `swarm validate RECIPE --uplink" in LOST.remedy
    assert status.eta_seconds is None, "not by its own rate"
    optimizer.phase, optimizer.seat_lost, optimizer.rate = "training", None, 4.0
    optimizer.others = {BOB: told("Bob", 7, "following")}
    status = watch.look()
    assert [peer.health for peer in status.peers] == ["in step", "line too slow"], "as others see it"
    assert not status.peers[1].counts


def test_a_limit_for_which_the_run_waits_is_told_in_figures() -> None:
    optimizer = FakeOptimizer(0, epoch=7)
    watch = watching(optimizer, *[0.4] * 8)
    optimizer.seconds_to_send = 58.0
    told = (
        "a round sends 1.8 MB; your limit needs 58 s, epochs took 1 s: the run waits for this computer; a higher limit"
    )
    assert watch.look().seat.startswith(told)
    optimizer.seconds_to_send = 440.0
    given_up = "your limit needs 7 min, epochs took 1 s: a round that sends for more than 7 min is given up;"
    assert given_up in watch.look().seat
    hear(watch, *(EpochAdvanced(1, "aa", 128, 64, 2, 2.0, 450.0, 0.1) for _ in range(8)))
    assert watch.look().seat == "", "so long are its epochs"


def test_a_peer_that_was_started_again_is_catching_up_and_the_others_are_in_step() -> None:
    optimizer = FakeOptimizer(0, epoch=0)
    optimizer.phase = "joining"
    optimizer.others = {BOB: told("Bob", 330, lineage="other"), CEM: told("Cem", 331, "joining")}
    for own in (0, 330, 400):  # at its beginning, or from a checkpoint, perhaps of a run that was lost
        optimizer.local_epoch = own
        status = watching(optimizer, 4.0, max_epochs=None).look()
        assert [peer.health for peer in status.peers] == ["catching up", "in step", "catching up"]
        assert (status.epoch, status.state) == (330, "synchronizing")


def test_a_download_of_the_state_is_told_and_no_end_of_the_epoch() -> None:
    optimizer = FakeOptimizer(0, epoch=0)
    optimizer.phase = "joining"
    optimizer.downloading = "downloading the state: 5.3 MB at 10 kB/s, about 9 min"
    status = watching(optimizer, 4.0).look()
    assert (status.state, status.download) == ("synchronizing", optimizer.downloading)
    assert status.eta_seconds is None and status.run_eta_seconds is None
    optimizer.phase = "training"  # one that had fallen behind
    assert watching(optimizer, 4.0).look().state == "synchronizing"


def test_it_tells_what_the_bytes_of_this_peer_were_for() -> None:
    averaging, copies = "averaging: 1.8 MB sent, 300 kB received", "copies of the model: 0 B sent, 5.7 MB received"
    whole, rest = "in all: 2.2 MB sent, 6.0 MB received", "all else: 400 kB sent, 10 kB received"
    assert watching(FakeOptimizer(512)).look().moved == f"{whole}; {averaging}; {copies}; {rest}"


def test_a_clock_that_is_two_hours_off_is_an_alarm_that_says_what_helps() -> None:
    assert clock_alarm(0.0) == ""
    behind, ahead = clock_alarm(7200.0), clock_alarm(-7200.0)
    assert behind.startswith("The clock of this computer is about 2.0 h behind") and "Set the clock" in behind
    assert "2.0 h ahead of" in ahead
    watch = watching(FakeOptimizer(512))
    watch._peer.dht.clock.uncorrected = 7200.0
    assert watch.look().alarm == clock_alarm(7200.0)


def test_every_state_has_its_words_and_its_tone_and_says_what_is_left_of_the_epoch() -> None:
    usual: dict[str, Any] = {"run_id": "r", "peer_id": "a", "role": "trainer", "epoch": 7, "samples": 1, "target": 9}
    shown = {state: RunStatus(**usual, state=state, eta_seconds=3.0) for state in get_args(State)}
    assert {each.tone for each in shown.values()} <= {"good", "calm", "warn", "bad"}
    assert len({each.state_in_words for each in shown.values()}) == len(shown)
    assert {state for state, each in shown.items() if each.left == "about 3 s left"} == {"training", "following"}
    assert replace(shown["synchronizing"], download="1 of 5 MB").left == "1 of 5 MB"
