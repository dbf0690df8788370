"""A false average is told from a true one by everyone alike, and no reducer can be framed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch

from swarmcli.averaging.aggregators import Aggregator, Mean
from swarmcli.averaging.audit.signed import (
    AVERAGES,
    Exchange,
    Input,
    SignedAverages,
    averages_root,
    digest_of,
    inputs_hash,
    part_hash,
)
from swarmcli.averaging.audit.verdict import ACCUSED_BEYOND, FalseAverage, PartClaim, Redone, Terms, redo
from swarmcli.compression import CompressionBase, NoCompression, TensorDescriptor, TensorMessage, TopK
from swarmcli.network import Identity
from tests.compression.codecs import PLAIN

HERE, PART, REDUCER = Exchange("test", bytes(32)), 7, 1

codecs = pytest.mark.parametrize("codec", [*PLAIN, TopK()], ids=lambda codec: codec.description)


@dataclass
class Example:
    """A part of `count` members, the reducer among them, its inputs signed and its average formed as an honest reducer
    does it. Change what there is, then ask for the `proof`."""

    count: int = 4
    numel: int = 300
    codec: CompressionBase = NoCompression()  # noqa: RUF009  # codecs have no state
    aggregator: Aggregator = Mean()  # noqa: RUF009  # it has no state
    auxiliary: bool = False  # the reducer sends nothing itself
    bound: float = 1.0  # so much of the weight that it has named counts of the last sender
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        scale = torch.logspace(-4, 4, self.numel)  # elements of unlike sizes
        self.values = [torch.randn(self.numel, generator=generator) * scale for _ in range(self.count)]
        self.identities = [Identity.from_seed(index) for index in range(self.count)]
        descriptor = TensorDescriptor((self.numel,), torch.float32)
        self.terms = Terms(PART, 1, REDUCER, self.count, descriptor, self.codec, self.aggregator)

    @property
    def senders(self) -> list[int]:
        return [index for index in range(self.count) if not (self.auxiliary and index == REDUCER)]

    def message(self, sender: int) -> TensorMessage:
        return (NoCompression() if sender == REDUCER else self.codec).compress(self.values[sender])

    def input(self, sender: int, message: TensorMessage | None = None, signer: int | None = None) -> Input:
        weight, identity = 1.0 + sender, self.identities[sender if signer is None else signer]
        content = part_hash(message or self.message(sender))
        counts = weight * self.bound if sender == self.count - 1 else weight
        return Input(sender, weight, counts, content, HERE.sign(identity, PART, weight, content))

    @property
    def inputs(self) -> list[Input]:
        return list(map(self.input, self.senders))

    @property
    def redone(self) -> Redone:
        return redo(self.terms, self.inputs, dict(zip(self.senders, map(self.message, self.senders), strict=True)))

    def sent(self, average: torch.Tensor) -> torch.Tensor:
        """The average as all members hold it: compressed and extracted."""
        down = self.codec.of_averages
        return down.extract(down.compress(average))

    def proof(
        self,
        average: torch.Tensor | None = None,
        inputs: Sequence[Input] | None = None,
        named: Sequence[int] | None = None,
        messages: dict[int, TensorMessage] | None = None,
    ) -> FalseAverage:
        """A proof that the reducer signed, whatever `average` is; None: the true average."""
        given = tuple(self.inputs if inputs is None else inputs)
        redone = self.redone
        content = NoCompression().compress(self.sent(redone.values) if average is None else average)
        senders = tuple(redone.weights if named is None else named)
        weights = tuple(redone.weights.get(sender, 1.0) for sender in senders)
        digests = bytes(32) + digest_of(PART, senders, weights, content) + bytes(32)
        hashes = bytes(32) + inputs_hash(given) + bytes(32)
        root = averages_root(digests, hashes)
        signature = self.identities[REDUCER].sign(AVERAGES, HERE.prefix.encode(), HERE.group_id, root)
        claim = PartClaim(PART, senders, weights, given, SignedAverages(root, signature))
        shown = {sender: self.message(sender) for sender in self.senders} | (messages or {})
        members = tuple(identity.peer_id for identity in self.identities)
        return FalseAverage(HERE, members, self.terms, claim, digests + hashes, content, shown)


def changed(proof: FalseAverage, **claim: Any) -> FalseAverage:
    return replace(proof, claim=msgspec.structs.replace(proof.claim, **claim))


@codecs
@pytest.mark.parametrize("auxiliary", [False, True])
def test_an_honest_average_is_never_called_false(codec: CompressionBase, auxiliary: bool) -> None:
    assert not Example(codec=codec, auxiliary=auxiliary).proof().verify()


@codecs
def test_a_false_average_is_a_proof_against_its_reducer(codec: CompressionBase) -> None:
    example = Example(codec=codec)
    false = example.sent(example.redone.values).clone()
    false[-40:] *= -1.5
    proof = example.proof(average=false)
    assert proof.verify(ACCUSED_BEYOND) and proof.verify()
    assert proof.culprit == example.identities[REDUCER].peer_id


@codecs
def test_an_average_that_was_added_in_another_order_is_true(codec: CompressionBase) -> None:
    """Another processor might add so: the last digits differ, and codecs round some numbers the other way."""
    example = Example(codec=codec, count=16, numel=4000)
    values = [codec.extract(example.message(i)) if i != REDUCER else example.values[i] for i in example.senders]
    weights = [1.0 + sender for sender in example.senders]
    mean = sum(v * (w / sum(weights)) for v, w in zip(reversed(values), reversed(weights), strict=True))
    assert isinstance(mean, torch.Tensor)
    assert not example.proof(average=example.sent(mean)).verify(1.0)


@pytest.mark.parametrize(
    "codec", [each for each in PLAIN if each.of_averages.by_content], ids=lambda each: each.description
)
def test_a_level_more_in_each_element_is_a_lie(codec: CompressionBase) -> None:
    """Other processors may give a few elements the next level, and no more."""
    example = Example(codec=codec)
    sent, exact = example.sent(example.redone.values), example.redone.values
    assert example.proof(average=sent + 2 * (sent - exact).abs().max()).verify()


def test_a_lie_within_the_tolerance_moves_no_element_by_more_than_some_millionths_of_what_was_sent() -> None:
    example = Example(count=16)
    redone = example.redone
    largest = torch.stack([values.abs() for values in example.values]).amax(0)
    # Mean of such numbers: the largest of 16 bounds the average, too.
    assert (redone.tolerance <= 2e-5 * largest).all()
    assert example.proof(average=redone.values + 1e-4 * largest).verify(ACCUSED_BEYOND)


def test_between_true_and_accused_there_is_room_for_computers_that_differ() -> None:
    """No other member finds true what an auditor accuses as false."""
    example = Example()
    redone = example.redone
    proofs = {off: example.proof(average=redone.values + off * redone.tolerance) for off in (0.9, 1.9, 2.9, 5.0)}
    found = {off: (proof.verify(), proof.verify(ACCUSED_BEYOND)) for off, proof in proofs.items()}
    assert found == {0.9: (False, False), 1.9: (False, False), 2.9: (True, False), 5.0: (True, True)}


def test_an_input_that_its_sender_has_not_signed_is_a_proof_without_what_it_was() -> None:
    example = Example()
    inputs = example.inputs
    inputs[2] = example.input(2, signer=REDUCER)
    assert replace(example.proof(inputs=inputs), messages={}).verify()


@pytest.mark.parametrize(("bound", "lies"), [(0.5, False), (1.0, False), (1.5, True), (0.0, True)])
def test_bounds_may_take_some_of_a_weight_away_and_never_add_to_it(bound: float, lies: bool) -> None:
    """The average follows from the weights that the reducer names: a lie is in the weights."""
    assert Example(bound=bound).proof().verify() is lies


def test_naming_somebody_whose_input_is_not_there_is_a_lie() -> None:
    example = Example()
    assert example.proof(inputs=example.inputs[:-1]).verify()


def test_other_inputs_than_the_reducer_signed_for_prove_nothing() -> None:
    """A sender may sign two inputs for one part; what counts is which of them the reducer signed for."""
    example = Example()
    other = NoCompression().compress(torch.full((example.numel,), 1e3))
    assert not example.proof(messages={3: other}).verify()
    swapped = changed(example.proof(messages={3: other}), inputs=(*example.inputs[:-1], example.input(3, other)))
    assert not swapped.verify()


def test_what_the_reducer_has_not_signed_proves_nothing() -> None:
    example = Example()
    zeros = NoCompression().compress(torch.zeros(example.numel))
    assert not replace(example.proof(), average=zeros).verify()
    false = example.proof(average=torch.zeros(example.numel))
    assert false.verify() and not replace(false, where=Exchange("test", b"\1" * 32)).verify()
    assert not replace(false, terms=replace(false.terms, place=0)).verify()


def test_what_cannot_be_averaged_would_have_been_refused_by_an_honest_reducer() -> None:
    example = Example(count=3)
    for bad in (torch.full((example.numel,), torch.nan), torch.zeros(5)):
        message = NoCompression().compress(bad)
        inputs = [*example.inputs[:-1], example.input(2, message)]
        assert example.proof(inputs=inputs, messages={2: message}).verify()


def test_who_was_left_out_by_the_aggregator_is_left_out_again() -> None:
    example = Example(count=7, aggregator=Mean(gate=10.0))
    example.values[5] *= 1e6
    assert example.proof().claim.senders == (0, 1, 2, 3, 4, 6)
    assert not example.proof().verify()
    assert example.proof(named=range(7)).verify()
