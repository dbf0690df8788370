"""Decides who measures the run's model, and hears what others measured; ends a run that learns no more.

    an epoch for evaluations begins     the evaluator that the recipe names measures; without one, or while it is away,
                                        one of those who were in rounds together: a monitor before a trainer
    it has measured                     its report tells the figures; others note them in their journals, with its name
    so many in a row are no better      the evaluator's report says after which epoch the run ends, and all end there

Nobody but the evaluator ends a run, and it alone judges: others' figures are shown, and decide nothing, and whoever has
slept through some of the evaluator's decides nothing by the rest. What it has said, they keep for their next start.
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
    """One peer's view of its run's evaluations. Belongs to the event loop; `ends_at` and `best` are read from
    anywhere."""

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
        """`reports`: of all peers, this one among them. `mates`: who has been in rounds with this peer. `report_end`
        puts the epoch after which the run ends into this peer's report, if it is the evaluator; `keep_end` keeps it
        for the next start, as `ended`: the evaluator may be gone by then. `earlier`: of this peer's journal, by epoch.
        As much of either counts as lies behind this peer once it has joined."""
        self._settings, self._own = settings, own
        self._reports, self._mates, self._answers = reports, mates, answers
        self._emit, self._report_end, self._keep_end = emit, report_end, keep_end
        self._earlier, self._ended = list(earlier), ended
        self._counted: dict[int, Evaluated] = {}  # by epoch the evaluator's, or where none is named this peer's own
        self._newest: dict[str, int] = {}  # epoch of the last evaluation, by who has told it
        self.ends_at: int | None = None

    @property
    def best(self) -> Evaluated | None:
        """The best of the evaluator, or where none is named of this peer's own."""
        return min(self._counted.values(), key=lambda each: each.loss, default=None)

    def is_appointed(self) -> bool:
        """Whether this peer measures for the run. A liar that takes the place of others keeps them from measuring
        beside their checkpoints, and from nothing else."""
        reports = self._reports()
        able = [peer for peer, its in reports.items() if self._is_able(peer, its)]
        named = [peer for peer in able if self._is_named(peer)]
        mates = {self._own, *self._mates()}
        known = [peer for peer in able if peer in mates]
        first = sorted(known, key=lambda peer: (reports[peer].role != "monitor", bytes(peer)))[:1]
        return self._own in (named or first)

    def note(self, own: Evaluated) -> None:
        """This peer has measured."""
        self._emit(own)
        self._count(own)
        self._end_if_no_better(self._reports()[self._own].epoch)

    def look(self) -> None:
        """Hears what reports tell. To be called whenever some were read."""
        reports = self._reports()
        here = reports[self._own]
        if not self._settings.every_epochs or not is_settled(here.phase):
            return
        while self._earlier and self._earlier[0].epoch <= here.epoch:
            if (before := self._earlier.pop(0)).epoch not in self._counted:  # a run that was set back measures anew
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
                continue  # nobody has measured anything of epochs to come
            name = report.name or peer.short
            heard = Evaluated(told.epoch, told.loss, told.samples, told.metrics, peer.text, name)
            self._emit(heard)
            self._count(heard)

    def _known(self, peer: PeerID) -> int:
        """Up to this epoch nothing that `peer` tells is news: of one epoch the evaluator's figures are kept, or else
        this peer's own, or the first."""
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
        """The run ends after the next epoch for evaluations, so that everybody can have heard of it before they are
        there. `here`: the epoch at which this peer has measured, if it is the evaluator."""
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
