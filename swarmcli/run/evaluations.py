"""Evaluations that count for a run, and the end of a run that learns no more.

    an epoch for evaluations begins        three volunteers, in an order that its lineage draws, measure that state
    each tells what it measured            in its report, with epoch and lineage
    the three have told, or the next       of the first three in that order that have told the middle counts, by
    such epoch begins and two have         number; whoever hears it notes it in its journal
    so many in a row are no better         this peer says in its report behind which epoch it takes the run to end
    more than half of those who say        the run ends behind the last of these: some have missed an evaluation
    anything say such an epoch, and so     and say a later one, and nobody would ever agree with them
    many that not all of them can lie

Volunteers are mates, see `optim.peers.follow`: keys cost nothing, and neither does a report, but a seat in a round
does. A peer that the recipe names measures and decides alone while it is there.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from swarmcli.events import Evaluated, Event, Noticed
from swarmcli.network.identity import PeerID
from swarmcli.optim.peers.proof import enough
from swarmcli.optim.peers.report import PeerReport, ReportedEvaluation, is_away, is_settled

if TYPE_CHECKING:
    from swarmcli.recipe.settings import EvaluationSettings


class RunEvaluations:
    """One peer's view of its run's evaluations. Belongs to the event loop; `ends_at` and `best` are read from
    anywhere."""

    VOLUNTEERS = 3  # one that lies, or computes wrongly, does not move the middle of three
    KEPT = 4  # epochs of which words are collected: slow volunteers tell of one when others are at the next

    def __init__(
        self,
        settings: EvaluationSettings,
        own: PeerID,
        reports: Callable[[], Mapping[PeerID, PeerReport]],
        mates: Callable[[], Collection[PeerID]],
        answers: Callable[[PeerID], bool],
        emit: Callable[[Event], object],
        earlier: Iterable[Evaluated] = (),
    ) -> None:
        """`reports`: of all peers, this one among them. `earlier`: what counted before this process began; as much of
        it as lies behind this peer once it has joined."""
        self._settings, self._own = settings, own
        self._reports, self._mates, self._answers, self._emit = reports, mates, answers, emit
        self._earlier = [each for each in earlier if each.peers]
        self._seen: Mapping[PeerID, PeerReport] = {}
        self._told: dict[int, dict[PeerID, ReportedEvaluation]] = {}
        self._counted: list[Evaluated] = []
        self.opinion: int | None = None  # the epoch behind which this peer takes the run to end; 0: it goes on
        self.ends_at: int | None = None  # so the run has agreed
        self.best: Evaluated | None = None

    @property
    def last(self) -> Evaluated | None:
        """The last one that counts."""
        return self._counted[-1] if self._counted else None

    def is_appointed(self, lineage: str) -> bool:
        """Whether this peer is one of those that measure the state of a lineage."""
        self._seen = self._reports()
        return self._own in self._appointed(self._order(lineage))

    def look(self) -> None:
        """Counts what reports tell. To be called whenever some were read, and when this peer has measured."""
        self._seen = self._reports()
        every, own = self._settings.every_epochs, self._seen[self._own]
        if not every or not is_settled(own.phase):
            return
        for counted in filter(lambda each: each.epoch <= own.epoch, self._earlier):
            self._count(counted, counted.epoch)
        self._earlier = []
        for peer in self._heard():
            voice = self._seen[peer].evaluation
            # Nobody has measured anything of epochs to come.
            if voice is not None and voice.lineage and voice.epoch % every == 0 and voice.epoch <= own.epoch:
                self._told.setdefault(voice.epoch, {}).setdefault(peer, voice)
        for epoch in sorted(self._told)[: -self.KEPT]:
            del self._told[epoch]
        for epoch in sorted(self._told):
            if (not self._counted or epoch > self._counted[-1].epoch) and (outcome := self._outcome(epoch)):
                self._emit(outcome)
                self._count(outcome, own.epoch)
        self._agree()

    def _heard(self) -> Collection[PeerID]:
        """Those whose word counts, as far as they are there."""
        mates = self._mates()
        return [p for p in self._seen if p == self._own or p in mates or p.text == self._settings.evaluator]

    def _order(self, lineage: str) -> list[PeerID]:
        """Those who can measure, the first ones first. Nobody knows a lineage before it has begun, so nobody finds a
        key that comes first there."""
        able = filter(self._is_able, self._heard())
        return sorted(able, key=lambda peer: hashlib.sha256(f"{lineage}{peer.text}".encode()).digest())

    def _is_able(self, peer: PeerID) -> bool:
        report = self._seen[peer]
        there = report.holds_state and is_settled(report.phase) and not is_away(report.pause)
        return there and (peer == self._own or self._answers(peer))

    def _appointed(self, order: Sequence[PeerID]) -> Sequence[PeerID]:
        evaluator = self._settings.evaluator
        named = [peer for peer in self._seen if peer.text == evaluator and self._is_able(peer)]
        return named or order[: self.VOLUNTEERS]

    def _outcome(self, epoch: int) -> Evaluated | None:
        """The result that counts of an epoch; None: too few have told yet, or ever will."""
        told = self._told[epoch]
        named = [voice for peer, voice in told.items() if peer.text == self._settings.evaluator]
        lineage = Counter(voice.lineage for voice in named or told.values()).most_common(1)[0][0]
        order = self._order(lineage)
        heard = [told[peer] for peer in order if peer in told and told[peer].lineage == lineage]
        waits = any(peer not in told for peer in self._appointed(order)) and max(self._told) == epoch
        if not named and (waits or len(heard) < max(1, min(2, len(order)))):
            return None
        heard = named or heard[: self.VOLUNTEERS]
        names = {name for voice in heard for name in voice.metrics}
        metrics = {name: [voice.metrics[name] for voice in heard if name in voice.metrics] for name in sorted(names)}
        return Evaluated(
            epoch,
            statistics.median(voice.loss for voice in heard),
            statistics.median_low(voice.samples for voice in heard),
            {name: statistics.median(told) for name, told in metrics.items() if 2 * len(told) > len(heard)},
            lineage,
            len(heard),
        )

    def _count(self, voice: Evaluated, here: int) -> None:
        """`here`: the epoch at which this peer hears of it."""
        self._counted.append(voice)
        self.best = min(self._counted, key=lambda each: each.loss)
        patience = self._settings.early_stopping_patience
        if patience and not self.opinion and len(self._counted) > patience:
            self.opinion = self._end(patience, here)

    def _end(self, patience: int, here: int) -> int:
        """The next epoch for evaluations once patience has run out, so that everybody can have heard of it before they
        are there. 0: it has not run out."""
        best, since = math.inf, 0
        for voice in self._counted:
            since = 0 if voice.loss < best - self._settings.early_stopping_threshold else since + 1
            best = min(best, voice.loss)
            if since >= patience:
                return (max(voice.epoch, here) // self._settings.every_epochs + 1) * self._settings.every_epochs
        return 0

    def _agree(self) -> None:
        """A peer without mates has come just now, or is left alone: it goes by all others who are there, as for the
        state. Who says that the run ends behind an epoch says that it has ended behind a later one, too."""
        voters = [*filter(self._is_able, self._heard() if self._mates() else self._seen)]
        votes = {peer: self._seen[peer].ends for peer in voters} | {self._own: self.opinion}
        if not self._mates() and len(votes) > 1 and self.opinion is None:
            del votes[self._own]
        votes = {peer: votes[peer] for peer in votes if peer.text == self._settings.evaluator} or votes
        said = sorted(vote for vote in votes.values() if vote is not None)
        ends = [epoch for epoch in said if epoch]
        needed = max(len(said) // 2 + 1, enough(len(votes)) if len(votes) > 3 else len(votes) // 2 + 1)
        if len(ends) >= needed and self.ends_at is None and self._settings.early_stopping_patience:
            self.ends_at = epoch = ends[needed - 1]
            times = self._settings.early_stopping_patience
            self._emit(Noticed("info", f"the run ends behind epoch {epoch}: it got no better (evaluations: {times})"))
