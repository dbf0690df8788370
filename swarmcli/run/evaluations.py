"""Decides which peer evaluates the run's model, hears what others measured, and ends a run that learns no more.

    an epoch for evaluations begins     the evaluator that the recipe names evaluates; without one, or while it is
                                        away, one of the peers that were in rounds together: a monitor before a trainer
    it has evaluated                    its report tells the figures; others note them in their journals, with its name
    so many in a row are no better      the evaluator's report says after which epoch the run ends, and all end there

Only the evaluator ends a run, by its own figures alone: others' are shown, and decide nothing. A peer that slept
through some of the evaluator's figures decides nothing by the rest. Peers keep what the evaluator has said for their
next start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from swarmcli.events import Evaluated, Event, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.report import PeerReport, is_away, is_settled
from swarmcli.words import plural

if TYPE_CHECKING:
    from swarmcli.recipe.settings import EvaluationSettings


class RunEvaluations:
    """One peer's view of its run's evaluations. Belongs to the event loop; any thread may read `ends_at` and `best`."""

    def __init__(
        self,
        settings: EvaluationSettings,
        own: PeerID,
        reports: Callable[[], Mapping[PeerID, PeerReport]],
        mates: Callable[[], Collection[PeerID]],
        answers: Callable[[PeerID], bool],
        emit: Callable[[Event], object],
        report_end: Callable[[int], object],
        keep_end: Callable[[int], object],
        earlier: Iterable[Evaluated] = (),
        ended: int | None = None,
    ) -> None:
        """`reports`: of all peers, this one too. `mates`: peers that were in rounds with this one. `report_end` puts
        the epoch after which the run ends into this peer's report, if it is the evaluator; `keep_end` keeps it for the
        next start, as `ended`: the evaluator may be gone by then. `earlier`: evaluations in this peer's journal, by
        epoch. Of both, what lies before the epoch that this peer has joined at counts."""
        self._settings, self._own = settings, own
        self._reports, self._mates, self._answers = reports, mates, answers
        self._emit, self._report_end, self._keep_end = emit, report_end, keep_end
        self._earlier, self._ended = list(earlier), ended
        self._counted: dict[int, Evaluated] = {}  # epoch → the evaluator's, or this peer's own if none is named
        self._newest: dict[str, int] = {}  # who told it → epoch of its last evaluation
        self.ends_at: int | None = None

    @property
    def kept_end(self) -> int | None:
        """The epoch after which the evaluator has ended the run, as an earlier process of this peer has kept it."""
        return self._ended

    @property
    def best(self) -> Evaluated | None:
        """The best evaluation of the evaluator or, if none is named, of this peer."""
        return min(self._counted.values(), key=lambda each: each.loss, default=None)

    def is_appointed(self) -> bool:
        """Whether this peer evaluates for the run. A liar may claim that it does: it keeps others from measuring their
        checkpoints, and from nothing else."""
        reports = self._reports()
        able = [peer for peer, its in reports.items() if self._is_able(peer, its)]
        named = [peer for peer in able if self._is_named(peer)]
        mates = {self._own, *self._mates()}
        known = [peer for peer in able if peer in mates]
        first = sorted(known, key=lambda peer: (reports[peer].role != "monitor", bytes(peer)))[:1]
        return self._own in (named or first)

    def note(self, own: Evaluated) -> None:
        """Notes that this peer has evaluated."""
        self._emit(own)
        self._count(own)
        self._end_if_no_better(self._reports()[self._own].epoch)

    def look(self) -> None:
        """Takes in what reports tell. To be called whenever some were read."""
        reports = self._reports()
        here = reports[self._own]
        if not self._settings.every_epochs or not is_settled(here.phase):
            return
        while self._earlier and self._earlier[0].epoch <= here.epoch:
            # a run that was set back has evaluated this epoch again
            if (before := self._earlier.pop(0)).epoch not in self._counted:
                self._count(before)
                self._end_if_no_better(0)
        if self._ended is not None and here.epoch >= self._ended - self._settings.every_epochs:
            self._end(self._ended)
        mates = self._mates()
        for peer, report in reports.items():
            if peer == self._own or not (self._is_named(peer) or peer in mates):
                continue
            if self._is_named(peer) and report.ends is not None:
                self._end(report.ends)
            told = report.evaluation
            if told is None or told.epoch > here.epoch or told.epoch <= self._known(peer):
                continue  # nobody can have evaluated an epoch to come
            name = report.name or peer.short
            heard = Evaluated(told.epoch, told.loss, told.samples, told.metrics, peer.text, name)
            self._emit(heard)
            self._count(heard)

    def _known(self, peer: PeerID) -> int:
        """Returns up to which epoch nothing that `peer` tells is news. Each epoch has one evaluation: the evaluator's,
        else this peer's own, else the first that was heard."""
        if self._is_named(peer):
            return self._newest.get(peer.text, -1)
        return max(self._newest.values(), default=-1)

    def _is_named(self, peer: PeerID) -> bool:
        return peer.text == self._settings.evaluator

    def _is_able(self, peer: PeerID, report: PeerReport) -> bool:
        there = report.holds_state and is_settled(report.phase) and not is_away(report.pause)
        return there and (peer == self._own or self._answers(peer))

    def _count(self, told: Evaluated) -> None:
        teller = told.peer or self._own.text
        self._newest[teller] = max(told.epoch, self._newest.get(teller, -1))
        if teller == (self._settings.evaluator or self._own.text) and told.epoch % self._settings.every_epochs == 0:
            self._counted[told.epoch] = told

    def _end_if_no_better(self, here: int) -> None:
        """Ends the run after the next epoch for evaluations, so that everybody can hear of it before that epoch.
        `here`: the epoch at which this peer has evaluated, if it is the evaluator."""
        if not self._is_named(self._own):
            return
        patience, best, since = self._settings.early_stopping_patience, math.inf, 0
        for _, each in sorted(self._counted.items()):
            since = 0 if each.loss < best - self._settings.early_stopping_threshold else since + 1
            best = min(best, each.loss)
        if patience and since >= patience:
            every, last = self._settings.every_epochs, max(here, max(self._counted))
            self._end((last // every + 1) * every)

    def _end(self, epoch: int) -> None:
        if self.ends_at is None and (times := self._settings.early_stopping_patience):
            self.ends_at = epoch
            self._keep_end(epoch)
            if self._is_named(self._own):
                self._report_end(epoch)
            why = f"the last {plural(times, 'evaluation')} found no improvement"
            self._emit(Noticed("info", f"the run ends after epoch {epoch}: {why}"))
