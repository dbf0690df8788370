"""Lies about sums: reducers that compute something else, and members that misuse what finds them."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from swarmcli.averaging.audit.case import Case
from swarmcli.averaging.audit.signed import SignedParts, inputs_hash
from swarmcli.averaging.round.messages import InputsRequest
from swarmcli.compression import NoCompression
from swarmcli.errors import CallRefused, NetworkError
from tests.adversary.lies.base import Liar, lie, on_each_try


def _falsify(round_: Any, liar: Liar) -> None:
    """Its averages are another thing than the inputs that it signs for."""
    encode = round_._reducer._encode

    def false(part: Any, average: torch.Tensor) -> Any:
        liar.told.append("a false average")
        return encode(part, -3 * average + 1)

    round_._reducer._encode = false


@lie("false sums", "audits", at_most="found with the stated chance; then banned, and its averages count for nothing")
def reduce_falsely(liar: Liar) -> None:
    on_each_try(liar, lambda round_: _falsify(round_, liar))


@lie("forged inputs", "audits", at_most="as false sums: an input without its sender's signature is evidence by itself")
def forge_inputs(liar: Liar) -> None:
    """It signs for inputs from which its false average does follow; but their senders have not signed them."""

    def alter(round_: Any) -> None:
        _falsify(round_, liar)
        audits = round_.audits
        note_inputs = audits.note_inputs

        def note(part: Any, senders: Any) -> bytes:
            note_inputs(part, senders)
            made_up = NoCompression().compress(torch.ones(part.descriptor.numel, dtype=part.descriptor.dtype))
            forged = audits.sign(1.0, [part], [made_up])
            given = [replace(each, signed=forged, weight=1.0) for each in audits._inputs_of[part.index]]
            audits._inputs_of[part.index] = tuple(given)
            return inputs_hash(given)

        round_._reducer._note_inputs = note

    on_each_try(liar, alter)


@lie("withheld inputs", "audits", at_most="goes on for this round; no seat in the next group of whoever asked")
def withhold_inputs(liar: Liar) -> None:
    def alter(round_: Any) -> None:
        _falsify(round_, liar)

        async def give(*_: Any) -> None:
            raise CallRefused("busy", "no time for that")

        round_.audits.give = give

    on_each_try(liar, alter)


@lie("false accuser", "audits", at_most="is banned by all others; the round goes on without its vote")
def accuse_falsely(liar: Liar) -> None:
    """Whatever it looks at, it says that it is false."""

    def alter(round_: Any) -> None:
        audits = round_.audits
        case_of = audits._case

        def accused(*args: Any) -> Case:
            liar.told.append("an accusation")
            return _Accused(**case_of(*args).__dict__)

        audits._case = accused

    on_each_try(liar, alter)


class _Accused(Case):
    """A case that its finder calls false."""

    def deserves_accusation(self) -> bool:
        return True


@lie("unsigned parts", "audits", at_most="its tensors are left out, by name")
def sign_nothing(liar: Liar) -> None:
    def alter(round_: Any) -> None:
        sign = round_.audits.sign

        def wrongly(*args: Any) -> SignedParts:
            liar.told.append("a false signature")
            signed = sign(*args)
            return SignedParts(signed.parts, signed.hashes, bytes(64))

        round_.audits.sign = wrongly

    on_each_try(liar, alter)


@lie("greedy auditor", "audits", at_most="one refused call for each try and reducer")
def ask_for_everything(liar: Liar) -> None:
    """It wants the inputs of all parts, drawn or not."""

    def alter(round_: Any) -> None:
        audits = round_.audits
        look_at = audits.look_at

        async def greedily(reducer: int, averages: Any, signed: Any, results: Any) -> Any:
            mates = round_.mates
            wanted = tuple(average.part.index for average in averages)
            request = InputsRequest(audits.where.group_id, audits._secret_for(reducer), wanted)
            try:
                async with mates.endpoint.stream(
                    mates.peer(reducer), mates.method("inputs"), request, timeout=10
                ) as stream:
                    await stream.receive(InputsRequest)
            except NetworkError as error:
                liar.told.append(str(error))
            return await look_at(reducer, averages, signed, results)

        audits.look_at = greedily

    on_each_try(liar, alter)
