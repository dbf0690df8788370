"""A false average is told from a true one by everyone alike, and neither side can be framed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarmcli.averaging.aggregators import Mean
from swarmcli.averaging.audit.case import Case, FalseAccusation, FalseAverage, Verdict, sign_accusation
from swarmcli.averaging.audit.signed import part_hash
from swarmcli.averaging.audit.verdict import is_within, redo
from swarmcli.compression import CompressionBase, NoCompression, TopK
from tests.averaging.audit.cases import HERE, REDUCER, Example, with_messages
from tests.compression.codecs import PLAIN

codecs = pytest.mark.parametrize("codec", [*PLAIN, TopK()], ids=lambda codec: codec.description)


def accuse(case: Case, accuser: int, example: Example) -> FalseAccusation:
    """What everyone holds once this member has accused the reducer of it."""
    identity = example.identities[accuser]
    signature = sign_accusation(identity, case)
    return FalseAccusation(identity.peer_id, signature, case)


@codecs
@pytest.mark.parametrize("auxiliary", [False, True])
def test_an_honest_average_is_true_and_its_accuser_is_banned(codec: CompressionBase, auxiliary: bool) -> None:
    example = Example(codec=codec, auxiliary=auxiliary)
    case = example.case()
    assert case.verdict() is Verdict.TRUE
    assert not FalseAverage(case).verify()
    accusation = accuse(case, 3, example)
    assert accusation.verify() and accusation.culprit == example.identities[3].peer_id


@codecs
def test_a_false_average_is_evidence_against_its_reducer_alone(codec: CompressionBase) -> None:
    example = Example(codec=codec)
    false = example.true_average()
    false[-40:] *= -1.5
    case = example.case(average=false)
    assert case.deserves_accusation()
    assert FalseAverage(case).verify() and FalseAverage(case).culprit == example.identities[REDUCER].peer_id
    assert not accuse(case, 3, example).verify()


@codecs
def test_an_average_that_was_added_in_another_order_is_true(codec: CompressionBase) -> None:
    """As another processor might: its last digits differ, so codecs round some numbers the other way."""
    example = Example(codec=codec, count=16, numel=4000)
    messages = list(map(example.message, example.senders))
    values = [codec.extract(m) if i != REDUCER else example.values[i] for i, m in enumerate(messages)]
    weights = [1.0 + sender for sender in example.senders]
    total = sum(weights)
    mean = sum(v * (w / total) for v, w in zip(reversed(values), reversed(weights), strict=True))
    assert isinstance(mean, torch.Tensor)
    down = codec.of_averages
    assert example.case(average=down.extract(down.compress(mean))).verdict() is Verdict.TRUE


def test_a_lie_within_the_tolerance_moves_no_element_by_more_than_some_millionths_of_what_was_sent() -> None:
    example = Example(count=16)
    inputs = [example.input(sender, example.message(sender)) for sender in example.senders]
    redone = redo(example.terms, inputs, list(map(example.message, example.senders)))
    assert redone.values is not None and redone.tolerance is not None
    largest = torch.stack([values.abs() for values in example.values]).amax(0)
    # Mean of such numbers: the largest of 16 bounds the average, too.
    assert (redone.tolerance <= 2e-5 * largest).all()
    assert not is_within(example.terms, redone, redone.values + 1e-4 * largest, 4)


def test_between_true_and_accused_there_is_room_for_computers_that_differ() -> None:
    """What an auditor accuses as false no judge finds true, and what a judge finds true no auditor accuses."""
    example = Example()
    inputs = [example.input(sender, example.message(sender)) for sender in example.senders]
    redone = redo(example.terms, inputs, list(map(example.message, example.senders)))
    assert redone.values is not None and redone.tolerance is not None
    verdicts = {off: example.case(average=redone.values + off * redone.tolerance) for off in (0.9, 1.9, 2.9, 5.0)}
    found = {off: (case.verdict(), case.deserves_accusation()) for off, case in verdicts.items()}
    assert found == {
        0.9: (Verdict.TRUE, False),
        1.9: (Verdict.UNCLEAR, False),
        2.9: (Verdict.FALSE, False),
        5.0: (Verdict.FALSE, True),
    }


def test_an_input_that_its_sender_has_not_signed_is_evidence_without_what_it_was() -> None:
    example = Example()
    inputs = [example.input(sender, example.message(sender)) for sender in example.senders]
    inputs[2] = example.input(2, example.message(2), signer=REDUCER)
    case = with_messages(example.case(inputs=inputs))
    assert FalseAverage(case).verify()


def test_naming_somebody_whose_input_is_not_there_is_a_lie() -> None:
    example = Example()
    inputs = [example.input(sender, example.message(sender)) for sender in example.senders]
    case = example.case(inputs=inputs[:-1])
    assert FalseAverage(with_messages(case, *case.messages[:-1])).verify()


def test_other_inputs_than_the_reducer_signed_for_prove_nothing() -> None:
    """A sender may sign two inputs for one part; what counts is which of them the reducer signed for."""
    example = Example()
    case = example.case()
    other = NoCompression().compress(torch.full((example.numel,), 1e3))
    assert with_messages(case, *case.messages[:-1], other).verdict() is Verdict.UNCLEAR
    inputs = (*case.inputs[:-1], example.input(3, other))
    swapped = replace(case, inputs=inputs, messages=(*case.messages[:-1], other))
    assert swapped.verdict() is Verdict.UNCLEAR
    assert not accuse(swapped, 2, example).verify()


def test_another_average_than_the_reducer_signed_proves_nothing() -> None:
    example = Example()
    case = replace(example.case(), average=NoCompression().compress(torch.zeros(example.numel)))
    assert case.verdict() is Verdict.UNCLEAR


def test_what_cannot_be_averaged_would_have_been_refused_by_an_honest_reducer() -> None:
    example = Example(count=3)
    case = example.case()
    for bad in (torch.full((example.numel,), torch.nan), torch.zeros(5)):
        message = NoCompression().compress(bad)
        inputs = (*case.inputs[:-1], example.input(2, message))
        false = replace(example.case(inputs=inputs), messages=(*case.messages[:-1], message))
        assert false.verdict() is Verdict.FALSE


def test_who_was_left_out_by_the_aggregator_is_left_out_again() -> None:
    example = Example(count=7, aggregator=Mean(gate=10.0))
    example.values[5] *= 1e6
    assert example.case().senders == (0, 1, 2, 3, 4, 6)
    assert example.case().verdict() is Verdict.TRUE
    assert example.case(named=range(7)).verdict() is Verdict.FALSE


def test_signatures_of_another_exchange_count_nowhere() -> None:
    example = Example()
    case = replace(example.case(), where=replace_group(b"\1" * 32))
    assert case.verdict() is Verdict.UNCLEAR


def replace_group(group_id: bytes) -> object:
    return type(HERE)(HERE.prefix, group_id)


def test_the_hash_of_a_part_tells_codecs_and_shapes_apart() -> None:
    values = torch.ones(8)
    messages = [NoCompression().compress(values), NoCompression().compress(values.view(2, 4))]
    assert len({part_hash(message) for message in messages}) == 2
