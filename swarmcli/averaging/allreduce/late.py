"""A member that learns that its group committed a result which is not all here, and fetches what it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmcli.averaging.agreement.ballot_messages import DIGEST_BYTES, HoldingsAnswer, HoldingsQuestion
from swarmcli.averaging.agreement.mates import AT_ONCE, Mates
from swarmcli.averaging.allreduce.copying import Copier
from swarmcli.averaging.allreduce.holdings import Holdings
from swarmcli.averaging.allreduce.layout import Part
from swarmcli.averaging.allreduce.reducer import Average
from swarmcli.averaging.allreduce.repair import digest_at
from swarmcli.averaging.allreduce.results import digest_of_parts
from swarmcli.averaging.state.archive import RoundArchive
from swarmcli.averaging.state.kept_round import KeptRound
from swarmcli.errors import NetworkError, StateDownloadError

_TRIES, _PAUSE = 5, 1.0  # seconds; a file is written some moments after the commit
_DOWNLOAD = 60.0  # seconds


async def copy_committed(mates: Mates, copier: Copier, holdings: Holdings, digest: bytes) -> bool:
    """Copies what differs from the committed result, from members that still hold it in memory. False: nobody does."""
    for holder, digests in await _ask_for_holdings(mates, holdings.plan.fingerprint):
        if digest_of_parts(digests) != digest or len(digests) != len(holdings.plan.parts) * DIGEST_BYTES:
            continue
        wanted = {part: digest_at(digests, part.index) for part in _differing(holdings, digests)}
        holdings.drop(part.index for part in wanted)
        copied: list[Average] = []
        await copier.fetch(holder, wanted, copied)
        holdings.put(copied)
        if holdings.digest == digest:
            return True
    return False


async def fetch_committed(mates: Mates, archive: RoundArchive, holdings: Holdings, digest: bytes) -> KeptRound | None:
    """The whole result from what others have kept of the round on disk. None: nobody gives it."""
    donors = [mates.peer(index) for index in mates.others if not mates.group.members[index].auxiliary]
    for _ in range(_TRIES):
        try:
            return await archive.fetch(
                donors,
                holdings.plan.layout,
                group_id=mates.group.group_id,
                plan=holdings.plan,
                digest=digest,
                timeout=_DOWNLOAD,
            )
        except StateDownloadError:
            await asyncio.sleep(_PAUSE)
    return None


async def _ask_for_holdings(mates: Mates, plan: bytes) -> Sequence[tuple[int, bytes]]:
    async def ask(member: int) -> tuple[int, bytes]:
        question = HoldingsQuestion(mates.group.group_id, plan)
        try:
            return member, (await mates.ask(member, "holdings", question, HoldingsAnswer, AT_ONCE)).digests
        except NetworkError:
            return member, b""

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(member)) for member in mates.others if member not in mates.auxiliaries]
    return [each.result() for each in asked]


def _differing(holdings: Holdings, digests: bytes) -> list[Part]:
    differing = []
    for part in holdings.plan.parts:
        held = holdings.get(part.index)
        if held is None or held.digest != digest_at(digests, part.index):
            differing.append(part)
    return differing
