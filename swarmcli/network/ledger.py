"""Ledgers count how much of one budget is taken at this moment, and by which identity and prefix."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

from swarmcli.network.budgets import Budget, Budgets
from swarmcli.network.prefix import Prefix
from swarmcli.network.token_bucket import Meter


class Ledger:
    """Counts one thing by identity, by prefix and in all; what is charged has to be given back exactly once.

    Only identities and prefixes that hold something are in its books, so these are as bounded as what they count.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.taken = 0
        self._identities: Counter[Hashable] = Counter()
        self._prefixes: Counter[Prefix] = Counter()

    def charge(self, identity: Hashable, prefix: Prefix, amount: int) -> bool:
        """Takes `amount`, if identity, prefix and everyone have so much left."""
        if not self.has_room(identity, prefix, amount):
            return False
        self.charge_anyway(identity, prefix, amount)
        return True

    def charge_anyway(self, identity: Hashable, prefix: Prefix, amount: int) -> None:
        """The same without a check: for what is there already, or what this peer itself wants."""
        self.taken += amount
        self._identities[identity] += amount
        self._prefixes[prefix] += amount

    def give_back(self, identity: Hashable, prefix: Prefix, amount: int) -> None:
        self.taken -= amount
        _take_off(self._identities, identity, amount)
        _take_off(self._prefixes, prefix, amount)

    def has_room(self, identity: Hashable, prefix: Prefix, amount: int = 1) -> bool:
        return (
            self._identities[identity] + amount <= self.budget.identity
            and self._prefixes[prefix] + amount <= self._bound(prefix)
            and self.taken + amount <= self.budget.everyone
        )

    def of_identity(self, identity: Hashable) -> int:
        return self._identities[identity]

    def crowded(self, prefix: Prefix, amount: int = 1) -> Prefix | None:
        """The prefix in which somebody has to give way, so that this one can take so much more: this one if it is full,
        or the one that uses the most of its budget if everyone's is used up. None: there is room."""
        if self._prefixes[prefix] + amount > self._bound(prefix):
            return prefix
        return self.fullest() if self.taken + amount > self.budget.everyone else None

    def fullest(self) -> Prefix | None:
        """The prefix that uses the most of its budget."""
        return max(self._prefixes, key=lambda each: self._prefixes[each] / self._bound(each), default=None)

    def _bound(self, prefix: Prefix) -> int:
        return self.budget.shared if prefix.shared else self.budget.prefix


def _take_off(books: Counter[Any], key: Hashable, amount: int) -> None:
    books[key] -= amount
    if not books[key]:
        del books[key]


class Account:
    """One connection's share of a ledger. The ledger is not told of the first `free` units: small messages, which
    are most of them, cost no bookkeeping beyond the connection's own."""

    def __init__(self, ledger: Ledger, identity: Hashable, prefix: Prefix, free: int = 0) -> None:
        self.held = 0
        self.prefix, self._ledger, self._identity, self._free = prefix, ledger, identity, free

    def charge(self, amount: int) -> bool:
        """Takes so much more, if the ledger has it."""
        held = self.held + amount
        if held <= self._free:  # each call passes here, and nearly none goes on
            self.held = held
            return True
        over = self._beyond(self.held + amount) - self._beyond(self.held)
        if over and not self._ledger.charge(self._identity, self.prefix, over):
            return False
        self.held += amount
        return True

    def charge_anyway(self, amount: int) -> None:
        over = self._beyond(self.held + amount) - self._beyond(self.held)
        if over:
            self._ledger.charge_anyway(self._identity, self.prefix, over)
        self.held += amount

    def give_back(self, amount: int) -> None:
        if self.held <= self._free:
            self.held -= amount
            return
        over = self._beyond(self.held) - self._beyond(self.held - amount)
        if over:
            self._ledger.give_back(self._identity, self.prefix, over)
        self.held -= amount

    def close(self) -> None:
        """Gives everything back; what is charged from now on never reaches the ledger. Idempotent."""
        self.give_back(self.held)
        self._free = sys.maxsize

    def _beyond(self, held: int) -> int:
        return max(0, held - self._free)


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The ledgers of one endpoint."""

    payloads: Ledger
    requests: Ledger
    replies: Ledger
    connections: Ledger
    bulk: Ledger

    @classmethod
    def of(cls, budgets: Budgets) -> Ledgers:
        return cls(*(Ledger(getattr(budgets, each.name)) for each in fields(cls)))


class HandshakeRates:
    """How many handshakes per second each network may cause at this peer."""

    def __init__(self, budgets: Budgets) -> None:
        self._meter = Meter(own=budgets.handshake_rate, shared=budgets.shared_handshake_rate)

    def take(self, prefix: Prefix, now: float) -> bool:
        """Whether one more may begin; counts it if so. `now`: the loop's time."""
        return self._meter.take(now, shared=prefix) if prefix.shared else self._meter.take(now, own=prefix)
