"""How a round goes on after a step: trainers know it from the averages, auxiliaries ask them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from swarmcli.averaging.consensus.mates import Mates
from swarmcli.averaging.group import MAX_MEMBERS, Group
from swarmcli.averaging.round.messages import GroupID, Index, Words
from swarmcli.averaging.round.service import AllreduceService
from swarmcli.errors import CallRefused, NetworkError, RoundUndecided
from swarmcli.network.identity import PeerID
from swarmcli.tasks import Bell

MOST_STEPS = 9  # all-reduces of one round, after which it is given up
_REMEMBERED = 16  # rounds that auxiliaries may ask about


class StepQuestion(msgspec.Struct, frozen=True):
    """How does the round of this group go on after so many steps?"""

    group_id: GroupID
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]


class StepAnswer(msgspec.Struct, frozen=True):
    """With a phase; or it has failed; or it is over, and members by index have these weights in what was committed."""

    phase: Annotated[int, msgspec.Meta(ge=0)] | None = None
    failed: Words = ""
    weights: Annotated[dict[Index, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}


@dataclass
class RoundNews:
    """What this member can say about one round."""

    group: Group
    answers: list[StepAnswer] = field(default_factory=list)  # after each step
    over: bool = False  # there will be no more


class StepDesk:
    """Where the rounds of one averager tell how they go on, and ask."""

    def __init__(self, service: AllreduceService) -> None:
        self._service = service
        self._method = service.method("step")
        self._rounds: OrderedDict[bytes, RoundNews] = OrderedDict()
        self._bell = Bell()

    def start(self) -> None:
        """Begins to answer. Raises ValueError if the endpoint has another one of this prefix."""
        self._service.endpoint.serve(self._method, StepQuestion, self._answer)

    def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        self._service.endpoint.withdraw(self._method)
        for news in self._rounds.values():
            news.over = True
        self._rounds.clear()
        self._bell.ring()

    @contextmanager
    def telling(self, group: Group) -> Iterator[RoundNews]:
        """While the block runs, those who ask about this round wait for what is not known yet."""
        news = self._rounds[group.group_id] = RoundNews(group)
        while len(self._rounds) > _REMEMBERED:
            self._rounds.popitem(last=False)
        try:
            yield news
        finally:
            news.over = True
            self._bell.ring()

    def tell(self, news: RoundNews, answer: StepAnswer) -> None:
        """The answer for one step more."""
        news.answers.append(answer)
        self._bell.ring()

    async def ask(self, group: Group, steps: int) -> StepAnswer:
        """From the leader, or the first who knows. Raises RoundUndecided if nobody does."""
        mates, question = Mates(self._service, group), StepQuestion(group.group_id, steps)
        for member in mates.others:
            if member not in mates.auxiliaries:
                try:
                    return await mates.ask(member, "step", question, StepAnswer)
                except NetworkError:
                    continue  # it has left the round, or is out of reach: another one may know
        raise RoundUndecided("nobody in reach knows how the round goes on")

    async def _answer(self, peer: PeerID, question: StepQuestion) -> StepAnswer:
        news = self._rounds.get(question.group_id)
        if news is None or peer not in news.group:
            raise CallRefused("unknown", "this round is not known here")
        while len(news.answers) < question.steps:
            if news.over:
                raise CallRefused("over", "this member has left the round")
            await self._bell.wait()
        return news.answers[question.steps - 1]
