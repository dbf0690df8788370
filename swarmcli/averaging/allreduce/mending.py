"""One member's part in a repair: it fetches what it lacks, and takes part in reducing again what nobody holds."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from swarmcli.averaging.agreement.ballot_messages import DIGEST_BYTES, Repair
from swarmcli.averaging.agreement.mates import Mates
from swarmcli.averaging.allreduce.copying import Copier
from swarmcli.averaging.allreduce.exchange import Exchange, Gathered
from swarmcli.averaging.allreduce.holdings import NOTHING, Holdings
from swarmcli.averaging.allreduce.layout import Part, Plan
from swarmcli.averaging.allreduce.patience import AllreduceOptions
from swarmcli.averaging.allreduce.repair import digest_at, plan_of_deputies
from swarmcli.averaging.allreduce.sending import Contribution
from swarmcli.averaging.allreduce.vector import Results
from swarmcli.averaging.tasks import beside, forgetful
from swarmcli.errors import CallRefused


class Mending:
    """Carries out one proposer's Repair. Made and run once."""

    def __init__(
        self,
        mates: Mates,
        order: Repair,
        holdings: Holdings,
        mine: Contribution | None,
        results: Results | None,
        options: AllreduceOptions,
    ) -> None:
        """`mine`, `results`: None for an auxiliary. Raises CallRefused for an order that makes no sense."""
        plan = holdings.plan
        _check(order, plan, mates)
        self.ballot = order.ballot
        self._mates, self._order, self._holdings, self._results = mates, order, holdings, results
        members = mates.group.members
        senders = frozenset(index for index, member in enumerate(members) if not member.auxiliary)
        self._copier = None if results is None else Copier(mates, plan.fingerprint, results, options)
        sources = dict(zip(order.parts, order.sources, strict=True))
        again = {part: source for part, source in sources.items() if digest_at(order.digests, part) == NOTHING}
        self._copies: defaultdict[int, dict[Part, bytes]] = defaultdict(dict)
        for index, source in sources.items():
            if index not in again and self._copier is not None and self._lacks(index):
                self._copies[source][plan.parts[index]] = digest_at(order.digests, index)
        self._holdings.drop(index for copies in self._copies.values() for index in map(_index, copies))
        self._holdings.drop(again)
        self.exchange: Exchange | None = None
        if again:
            taking_part = senders & set(order.members)
            deputies = plan_of_deputies(plan, order.ballot, again)
            self.exchange = Exchange(mates, deputies, taking_part, mine, results, options.in_repair, order.ballot)

    @forgetful
    async def run(self) -> Gathered:
        """Puts what it gets into the holdings. Returns what failed; the averages are those of this repair."""
        got = Gathered()
        async with asyncio.TaskGroup() as tasks:
            for source, wanted in self._copies.items():
                tasks.create_task(self._copy(source, wanted, got))
            if self.exchange is not None:
                tasks.create_task(self._reduce_again(self.exchange, got))
        self._holdings.put(got.averages)
        return got

    async def _copy(self, source: int, wanted: dict[Part, bytes], got: Gathered) -> None:
        assert self._copier is not None
        if failure := await self._copier.fetch(source, wanted, got.averages):
            got.failures[source] = failure

    async def _reduce_again(self, exchange: Exchange, got: Gathered) -> None:
        try:
            async with beside(exchange.run()) as reducing:
                again = await exchange.gather()
                await reducing
        finally:
            exchange.leave()
        got.averages += again.averages
        got.failures.update(again.failures)

    def _lacks(self, index: int) -> bool:
        held = self._holdings.get(index)
        return held is None or held.digest != digest_at(self._order.digests, index)


def _index(part: Part) -> int:
    return part.index


def _check(order: Repair, plan: Plan, mates: Mates) -> None:
    parts, members = order.parts, set(order.members)
    sound = (
        len(order.digests) == len(plan.parts) * DIGEST_BYTES
        and list(parts) == sorted(set(parts))
        and all(part < len(plan.parts) for part in parts)
        and len(order.sources) == len(parts)
        and members.issuperset(order.sources)
        and mates.me in members
        and max(members) < len(mates)
    )
    if not sound:
        raise CallRefused("repair", "a repair that does not fit the plan of the round")
