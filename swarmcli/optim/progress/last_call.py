"""When to wait for a round because the reports say that the swarm has enough."""

from __future__ import annotations

MOST_EPOCHS = 64  # that pass at most until reports are believed again


class LastCall:
    """Reports are claims. Each time in a row that no round followed from them, they are believed more seldom.

    So a peer that always reports enough costs the others a wait in one epoch of `MOST_EPOCHS`, and no more.
    """

    def __init__(self) -> None:
        self._in_vain = 0  # waits in a row
        self._next_epoch = 0  # from which on to wait again

    def is_worth_it(self, epoch: int) -> bool:
        """Whether to wait, in this epoch, for a round that should begin."""
        return epoch >= self._next_epoch

    def was_answered(self, epoch: int, begun: bool) -> None:
        """That wait is over; whether the round began. If not, none follows in the same epoch."""
        if begun:
            self._in_vain = 0
            return
        self._next_epoch = epoch + min(2**self._in_vain, MOST_EPOCHS)
        self._in_vain += 1
