"""Peers that lie about where the run is, and about the state that they hand out. They need an Optimizer's core."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from swarmcli.averaging.certificate import RoundCertificate, sign_word
from swarmcli.averaging.group import Group, Member
from swarmcli.network.identity import Identity, PeerID
from swarmcli.optim.peers.board import Board
from swarmcli.optim.peers.proof import LineageProof, Step
from swarmcli.optim.peers.report import PeerReport
from swarmcli.optim.peers.survey import PositionReply, PositionRequest
from swarmcli.optim.state.lineage import MAX_COUNT, LineagePosition
from tests.adversary.lies.base import Liar, lie

if TYPE_CHECKING:
    from swarmcli.optim.core import OptimizerCore
    from swarmcli.optim.state.training_state import CapturedState

FAR = 1 << 40
MOVES_NOBODY = "honest peers go on, each asks at most once in a while, and all end with equal bits"


def _core(liar: Liar) -> OptimizerCore:
    assert liar.optimizer is not None, "this lie is told by an Optimizer"
    return liar.optimizer


def _claim(liar: Liar, position: LineagePosition) -> None:
    """Says from now on, in reports and answers, that it holds this position; it hands out what it has as that."""
    core = _core(liar)
    core.replica.state.position = position
    core.phase = "training"
    core.directory.announce(anew=True)
    liar.told.append(f"epoch {position.epoch}")


def _stop(liar: Liar) -> None:
    """It takes part in no round any more: a member of another lineage could not."""
    core = _core(liar)

    async def idle(*_: Any, **__: Any) -> bool:
        await asyncio.sleep(1.0)
        return False

    core.step = idle  # type: ignore[method-assign]
    core._tasks.spawn(core._group.close())


@lie("an epoch far ahead", "lineages", at_most=MOVES_NOBODY)
def far_ahead(liar: Liar) -> None:
    _stop(liar)
    _claim(liar, LineagePosition(FAR, MAX_COUNT, liar.random.randbytes(32)))


@lie("one of a crowd", "lineages", at_most="with newcomers each network counts once, however many are in it")
def one_of_a_crowd(liar: Liar) -> None:
    """All who tell this claim the same lineage."""
    _stop(liar)
    _claim(liar, LineagePosition(FAR, 1, hashlib.sha256(b"what a crowd agrees on").digest()))


@lie("always one epoch ahead", "lineages", at_most=MOVES_NOBODY)
def one_ahead(liar: Liar) -> None:
    """Takes part in rounds, and says in every answer that it has come one epoch further from there."""
    survey, board = _core(liar).survey, _core(liar).directory._board
    answer, publish = survey._answer, board.publish

    async def ahead(peer: PeerID, request: PositionRequest) -> PositionReply:
        reply = await answer(peer, request)
        liar.told.append(f"epoch {reply.epoch + 1}")
        lineage, trail = _beyond(reply.lineage), (*reply.trail[1:], reply.lineage)
        return msgspec.structs.replace(reply, epoch=reply.epoch + 1, lineage=lineage, phase="training", trail=trail)

    async def report(record: PeerReport) -> bool:
        liar.told.append(f"epoch {record.epoch + 1}")
        lineage = _beyond(bytes.fromhex(record.lineage)).hex()
        return await publish(record.model_copy(update={"epoch": record.epoch + 1, "lineage": lineage}))

    board.publish = report  # type: ignore[method-assign]
    liar.endpoint.withdraw(survey._method)
    liar.endpoint.serve(survey._method, PositionRequest, ahead)


def _beyond(lineage: bytes) -> bytes:
    return hashlib.sha256(b"one ahead" + lineage).digest()


def forged_step(random_bytes: bytes, before: bytes, epoch: int, members: list[Identity]) -> Step:
    """A step with a certificate that verifies, of a round that nobody but these has made."""
    group = Group.form(before, [Member(each.peer_id) for each in members], [1.0] * len(members), random_bytes[:16])
    digest = hashlib.sha256(random_bytes).digest()
    votes = {index: sign_word(each, group.group_id, "vote", digest) for index, each in enumerate(members)}
    certificate = RoundCertificate.of(group, "strangers", digest, votes)
    return Step(before, group.group_id, epoch, 10 * epoch, certificate)


@lie("forged certificates", "lineages", at_most=MOVES_NOBODY)
def forged_certificates(liar: Liar) -> None:
    """Identities made for it have signed the rounds that led to what it claims."""
    core, steps = _core(liar), []
    before = core.position.lineage
    members = [liar.endpoint.identity, *(Identity.from_seed(liar.random.randbytes(32)) for _ in range(4))]
    for epoch in range(FAR, FAR + 3):
        steps.append(forged_step(liar.random.randbytes(32), before, epoch, members))
        before = steps[-1].position.lineage
    _stop(liar)
    _claim(liar, steps[-1].position)
    core.claims.vouching.way.take_over(LineageProof(tuple(steps)))


@lie("an old proof", "lineages", at_most=MOVES_NOBODY)
def old_proof(liar: Liar) -> None:
    """Shows the certificates of rounds that there were, as those of what it claims."""
    core = _core(liar)
    proof = core.claims.vouching.way.proof(core.position.lineage)

    async def replay(*_: Any) -> LineageProof:
        liar.told.append("an old proof")
        return proof

    core.claims.vouching.way.proof = lambda lineage: proof  # type: ignore[method-assign]
    _stop(liar)
    _claim(liar, LineagePosition(core.position.epoch + 1000, MAX_COUNT, liar.random.randbytes(32)))


def _hand_out(liar: Liar, change: Any) -> None:
    """What it donates is changed by `change`, under the lineage that all hold."""
    replica = _core(liar).replica
    capture = replica.capture

    async def false() -> CapturedState:
        captured = await capture()
        for name, tensor in captured.tensors.items():
            change(name, tensor)
        liar.told.append("another state")
        return captured

    replica.capture = false  # type: ignore[method-assign]


@lie("other weights", "lineages", at_most="a newcomer downloads twice, and knows who gave it something else")
def other_weights(liar: Liar) -> None:
    _hand_out(liar, lambda name, tensor: tensor.add_(1.0) if name.startswith("parameter/") else None)


@lie("other statistics", "lineages", at_most="the same")
def other_statistics(liar: Liar) -> None:
    """The parameters are right: only the optimizer's next steps would go astray."""

    def poison(name: str, tensor: Any) -> None:
        if name.startswith("statistic/") and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(-100.0)

    _hand_out(liar, poison)


@lie("a flood of reports", "lineages", at_most="memory for what the hash table keeps of one prefix; " + MOVES_NOBODY)
def report_flood(liar: Liar) -> None:
    """Identities made for it report that they are far ahead; nobody answers for them."""
    core = _core(liar)

    async def flood() -> None:
        for _ in range(64):
            identity = Identity.from_seed(liar.random.randbytes(32))
            board = Board(core.node, f"{core.config.run_id}_peers", PeerReport, 60.0, identity)
            change = {"epoch": FAR, "lineage": liar.random.randbytes(32).hex(), "phase": "training"}
            await board.publish(core.report().model_copy(update=change))
            liar.told.append(identity.peer_id.short)

    core._tasks.spawn(flood())
