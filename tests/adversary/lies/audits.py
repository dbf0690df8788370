"""Lies about sums: reducers that compute something else, and members that misuse what finds them."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from swarmcli.averaging.audit.signed import Input, SignedAverages, commitment, drawn, inputs_hash, part_hash
from swarmcli.averaging.audit.verdict import FalseAverage, PartClaim
from swarmcli.averaging.group import MAX_MEMBERS
from swarmcli.averaging.round.messages import Accusation, DrawnPart, Exhibit, InputHeader, InputList
from swarmcli.compression import NoCompression, TensorMessage
from swarmcli.errors import CallRefused, NetworkError
from tests.adversary.lies.base import Liar, lie, on_each_exchange


def _falsify(round_: Any, liar: Liar) -> None:
    """Its averages are another thing than the inputs that it signs for."""
    encode = round_._reducer._encode

    def false(part: Any, average: torch.Tensor) -> Any:
        liar.told.append("a false average")
        return encode(part, -3 * average + 1)

    round_._reducer._encode = false


@lie("false sums", "audits", at_most="found with the stated chance; then banned, and its averages count for nothing")
def reduce_falsely(liar: Liar) -> None:
    on_each_exchange(liar, lambda round_: _falsify(round_, liar))


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
            signature, content = audits.sign(part, 1.0, made_up), part_hash(made_up)
            forged = {"weight": 1.0, "content": content, "signature": signature}
            audits._lists[part.index] = tuple(replace(each, **forged) for each in audits._lists[part.index])
            return inputs_hash(audits._lists[part.index])

        round_._reducer._note_inputs = note

    on_each_exchange(liar, alter)


def _busy(*_: Any) -> None:
    raise CallRefused("busy", "no time for that")


async def _refuse(*_: Any) -> None:
    _busy()


@lie("withheld list", "audits", at_most="goes on for this round; no seat in the next group of whoever asked")
def withhold_list(liar: Liar) -> None:
    def alter(round_: Any) -> None:
        _falsify(round_, liar)
        round_.audits.list_inputs = _busy

    on_each_exchange(liar, alter)


@lie("withheld inputs", "audits", at_most="hides an accomplice for this round; no seat in the next group of who asked")
def withhold_inputs(liar: Liar) -> None:
    def alter(round_: Any) -> None:
        _falsify(round_, liar)
        round_.audits.give = _refuse

    on_each_exchange(liar, alter)


@lie("another list", "audits", at_most="as a withheld list")
def give_another_list(liar: Liar) -> None:
    """It leaves one of the inputs out for which it has signed."""

    def alter(round_: Any) -> None:
        _falsify(round_, liar)
        listed = round_.audits.list_inputs
        round_.audits.list_inputs = lambda *asked: InputList(listed(*asked).inputs[:-1])

    on_each_exchange(liar, alter)


@lie("another input", "audits", at_most="as a withheld input")
def give_another_input(liar: Liar) -> None:
    """It shows zeros in place of what it has sent."""

    def alter(round_: Any) -> None:
        _falsify(round_, liar)
        own = round_.audits._own_input

        async def zeros(part: Any) -> TensorMessage | None:
            message = await own(part)
            return message and TensorMessage(message.header, tuple(bytes(len(piece)) for piece in message.payload))

        round_.audits._own_input = zeros

    on_each_exchange(liar, alter)


@lie("false accuser", "audits", at_most="no seat in the next groups; the round goes on without its vote")
def accuse_falsely(liar: Liar) -> None:
    """Whatever it looks at, it says that it is false."""

    def alter(round_: Any) -> None:
        audits = round_.audits
        proof_of = audits._proof

        def accused(*args: Any) -> FalseAverage:
            liar.told.append("an accusation")
            return _Accused(**proof_of(*args).__dict__)

        audits._proof = accused

    on_each_exchange(liar, alter)


class _Accused(FalseAverage):
    """A proof whose finder calls the average false."""

    def verify(self, beyond: float = 0.0) -> bool:
        return True


@lie("unsigned parts", "audits", at_most="its tensors are left out, by name")
def sign_nothing(liar: Liar) -> None:
    def alter(round_: Any) -> None:
        def wrongly(*args: Any) -> bytes:
            liar.told.append("a false signature")
            return bytes(64)

        round_.audits.sign = wrongly

    on_each_exchange(liar, alter)


@lie("choosy auditor", "audits", at_most="one sender's inputs of the parts that one secret names, twice")
def choose_parts(liar: Liar) -> None:
    """It looks for secrets that name what it likes. Of each reducer it asks for one part, and one sender for that part
    three times, then for another one, by another secret and by the same. Whether it gets them is what it has been told.
    """

    def alter(round_: Any) -> None:
        audits, mates = round_.audits, round_.mates

        async def choosily(reducer: int, averages: Any, signed: Any, results: Any) -> None:
            def naming(part: int) -> DrawnPart:
                """By a secret for this part alone, if one is soon found."""
                secrets = [commitment(bytes([part % 256, number])) for number in range(256)]
                fits = (each for each in secrets if drawn(each, signed.signature, [part], audits._chance(reducer)))
                return DrawnPart(audits.where.group_id, next(fits, secrets[0]), signed, part)

            parts = [average.part.index for average in averages]
            own = naming(parts[0])
            named = drawn(own.secret, signed.signature, parts, audits._chance(reducer))
            unnamed = next(each for each in parts if each not in named)
            sender = next((each for each in mates.others if each != reducer), reducer)
            try:
                peer, method = mates.peer(reducer), mates.method("inputs")
                await mates.endpoint.call(peer, method, own, InputList, timeout=10)
                liar.told.append("a list")
            except NetworkError as error:
                liar.told.append(str(error))
            for request in (own, own, own, naming(parts[-1]), replace(own, part=unnamed)):
                try:
                    async with mates.endpoint.stream(
                        mates.peer(sender), mates.method("input"), request, timeout=10
                    ) as stream:
                        await stream.receive(InputHeader, lambda header, size: memoryview(bytearray(size)))
                    liar.told.append("an input")
                except NetworkError as error:
                    liar.told.append(str(error))

        audits.look_at = choosily

    on_each_exchange(liar, alter)


@lie("inputs without end", "audits", at_most="as many inputs as there are members; no seat in the next groups")
def accuse_by_many_inputs(liar: Liar) -> None:
    """It calls an average false, and brings inputs of thousands whom nobody knows."""

    async def accuse(round_: Any, hearer: int) -> None:
        mates, plan = round_.mates, round_.holdings.plan
        part = next(parts[0] for reducer, parts in plan.by_reducer.items() if reducer not in (mates.me, hearer))
        made_up = NoCompression().compress(torch.ones(part.descriptor.numel, dtype=part.descriptor.dtype))
        inputs = tuple(Input(each, 1.0, 1.0, bytes(32), bytes(64)) for each in range(MAX_MEMBERS))
        claim = PartClaim(part.index, (), (), inputs, SignedAverages(bytes(32), bytes(64)))
        header = Accusation(round_.group.group_id, claim)
        try:
            async with mates.endpoint.stream(mates.peer(hearer), mates.method("accuse"), header, timeout=10) as stream:
                await stream.send(Exhibit())
                await stream.send(Exhibit())
                for _ in inputs:
                    await stream.send(InputHeader(made_up.header), made_up.payload)
                    liar.told.append("an input")
        except NetworkError as error:
            liar.told.append(str(error))

    def alter(round_: Any) -> None:
        for hearer in round_.mates.others:
            liar.averager._rounds.spawn(accuse(round_, hearer))  # type: ignore[union-attr]

    on_each_exchange(liar, alter)
