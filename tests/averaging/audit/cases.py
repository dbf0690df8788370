"""One part of a small group, its inputs signed and its average formed as an honest reducer does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from swarmcli.averaging.aggregators import Aggregator, Mean
from swarmcli.averaging.audit.case import Case, Statement
from swarmcli.averaging.audit.signed import (
    Exchange,
    Input,
    SignedParts,
    averages_root,
    digest_of,
    inputs_hash,
    part_hash,
)
from swarmcli.averaging.audit.verdict import Terms, encoded, redo
from swarmcli.averaging.consensus.messages import AVERAGES, SignedAverages
from swarmcli.compression import CompressionBase, NoCompression, TensorDescriptor, TensorMessage
from swarmcli.network import Identity

HERE = Exchange("test", bytes(32))
PARTS = (6, 7, 8)
PART = 7
REDUCER = 1


@dataclass
class Example:
    """A part of `count` members, the reducer among them. Change what there is, then ask for the `case`."""

    count: int = 4
    numel: int = 300
    dtype: torch.dtype = torch.float32
    codec: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    aggregator: Aggregator = Mean()  # noqa: RUF009  # it has no state
    auxiliary: bool = False  # the reducer sends nothing itself
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scale = torch.logspace(-4, 4, self.numel)  # elements of unlike sizes
        draws = [torch.randn(self.numel, generator=generator) * scale for _ in range(self.count)]
        self.values = self.values or [values.to(self.dtype) for values in draws]
        self.identities = [Identity.from_seed(index) for index in range(self.count)]
        self.terms = Terms(
            PART, REDUCER, self.count, TensorDescriptor((self.numel,), self.dtype), self.codec, self.aggregator
        )

    @property
    def senders(self) -> list[int]:
        return [index for index in range(self.count) if not (self.auxiliary and index == REDUCER)]

    def message(self, sender: int) -> TensorMessage:
        return (NoCompression() if sender == REDUCER else self.codec).compress(self.values[sender])

    def input(self, sender: int, message: TensorMessage, signer: int | None = None) -> Input:
        weight, identity = 1.0 + sender, self.identities[sender if signer is None else signer]
        return Input(sender, weight, weight, SignedParts.of(identity, HERE, weight, {PART: part_hash(message)}))

    def case(
        self,
        average: torch.Tensor | None = None,
        inputs: Sequence[Input] | None = None,
        named: Sequence[int] | None = None,
    ) -> Case:
        """Signed by the reducer, whatever the average is; None: the true one."""
        messages = tuple(map(self.message, self.senders))
        given = tuple(map(self.input, self.senders, messages)) if inputs is None else tuple(inputs)
        redone = redo(self.terms, tuple(map(self.input, self.senders, messages)), messages)
        assert redone.values is not None
        content = NoCompression().compress(encoded(self.terms, redone.values) if average is None else average)
        senders = redone.senders if named is None else tuple(named)
        weights = tuple(1.0 + sender for sender in senders)
        digests = bytes(32) + digest_of(PART, senders, weights, content) + bytes(32)
        return Case(
            HERE,
            tuple(identity.peer_id for identity in self.identities),
            self.terms,
            self.statement(digests, bytes(32) + inputs_hash(given) + bytes(32)),
            senders,
            weights,
            content,
            given,
            messages,
        )

    def statement(self, digests: bytes, inputs: bytes) -> Statement:
        root = averages_root(digests, inputs)
        signature = self.identities[REDUCER].sign(AVERAGES, HERE.prefix.encode(), HERE.group_id, root)
        return Statement(PARTS, digests, inputs, SignedAverages(root, signature))

    def true_average(self) -> torch.Tensor:
        average = self.case().average
        assert average is not None
        return NoCompression().extract(average).clone()


def with_messages(case: Case, *messages: TensorMessage) -> Case:
    return replace(case, messages=messages)
