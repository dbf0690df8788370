"""The members of a run, as one of its peers knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarmcli.events import Contribution
from swarmcli.network.identity import PeerID
from swarmcli.optim import Optimizer, PeerReport
from swarmcli.run.counting import ContributionReader


class RunMembers:
    """The members of the run, and what each has given: none, until this peer takes part. Any thread may call it."""

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None
        self._accounts: ContributionReader | None = None

    def take_part(self, optimizer: Optimizer, accounts: ContributionReader) -> None:
        self._optimizer, self._accounts = optimizer, accounts

    def others(self) -> Mapping[PeerID, PeerReport]:
        """Returns the report of each other peer."""
        return {} if self._optimizer is None else self._optimizer.peers()

    def contributions(self) -> Sequence[Contribution]:
        """Returns the contributions, most samples first."""
        return () if self._accounts is None else self._accounts.contributions()

    def rests_on(self) -> str:
        """Says whose count the contributions are, in a sentence."""
        return "" if self._accounts is None else self._accounts.rests_on()

    def told_by(self) -> str:
        """Says the same in three or four words, after a number."""
        return "" if self._accounts is None else self._accounts.told_by
