"""Every decoder takes whatever comes: the project's named errors come out, or nothing, in bounded memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmcli.errors import CheckpointError, HandshakeError, JournalError

from .mutation import mutated
from .targets import Target, every_struct, targets
from .values import YEAR_10000, altered

SOAK_SECONDS = 30 * 60
GROUPS = ("messages", "files", "others")
MOST_MEMORY = 96 << 20  # bytes that one input of at most 64 KiB may take, as Python counts them


def feed(target: Target, data: bytes) -> None:
    try:
        target.read(data)
    except target.errors:
        pass
    except Exception as error:
        error.add_note(f"{target.name} was given {data!r:.2000}")
        raise


def group(name: str) -> list[Target]:
    def belongs(target: Target) -> bool:
        message = target.name.startswith("message ")
        return {"messages": message, "files": target.slow, "others": not (message or target.slow)}[name]

    return list(filter(belongs, targets()))


def test_valid_inputs_are_read() -> None:
    """What the inputs are made of is right, or nothing but the first checks would be tried."""
    accepted = 0
    for target in targets():
        for seed in target.seeds:
            try:
                target.read(seed)
                accepted += 1
            except target.errors:
                pass
    assert accepted > 0.6 * sum(len(target.seeds) for target in targets())
    assert len(every_struct()) > 60 and min(map(len, map(group, GROUPS))) > 3


FEW = settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", GROUPS)
@FEW
@given(seed=st.integers(0, 2**64 - 1))
def test_decoders_raise_their_named_errors_alone(name: str, seed: int) -> None:
    chance = random.Random(seed)
    for target in group(name):
        if not target.slow or chance.random() < 0.1:
            feed(target, mutated(target.seeds, chance))


@pytest.mark.parametrize("name", GROUPS)
@FEW
@given(seed=st.integers(0, 2**64 - 1))
def test_values_of_other_types_raise_the_named_errors_alone(name: str, seed: int) -> None:
    """Well-formed, and not what any honest peer sends: dates, extensions, numbers and texts at the edges of msgpack."""
    chance = random.Random(seed)
    for target in group(name):
        if not target.slow or chance.random() < 0.1:
            for data in filter(None, (altered(each, chance) for each in target.seeds)):
                feed(target, data)


def test_no_decoder_lets_the_year_10000_out_as_another_error() -> None:
    """Twelve bytes: Python has no such date, and says so by an error of its own."""
    for target in targets():
        feed(target, YEAR_10000)
        feed(target, b"\x81\xa1a" + YEAR_10000)


def test_no_input_takes_memory_beyond_its_bound() -> None:
    chance = random.Random(7)
    for target in group("others"):
        tracemalloc.start()
        try:
            for _ in range(20):
                feed(target, mutated(target.seeds, chance))
            assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY, target.name
        finally:
            tracemalloc.stop()


@pytest.mark.soak
@pytest.mark.timeout(4 * SOAK_SECONDS)  # of wall time: beside other work a process gets a part of the processor
def test_half_an_hour_of_inputs() -> None:
    """By the processor's time, so that it is as many on a busy machine. Tells how many there were."""
    chance, counted, slowest = random.Random(), Counter[str](), (0.0, "")
    began = time.process_time()
    while time.process_time() - began < SOAK_SECONDS:
        for target in targets():
            for _ in range(3 if target.slow else 100):
                known = bool(target.seeds) and chance.random() < 0.5
                data = (altered(chance.choice(target.seeds), chance) if known else None) or mutated(
                    target.seeds, chance
                )
                start = time.process_time()
                feed(target, data)
                slowest = max(slowest, (time.process_time() - start, target.name))
                counted[target.name] += 1
    print(f"{counted.total():,} inputs for {len(counted)} decoders; the slowest took {slowest[0]:.2f} s ({slowest[1]})")
    assert slowest[0] < 10, f"{slowest[1]} took {slowest[0]:.1f} s of the processor for one input"


def test_what_was_found_stays_mended() -> None:
    """A certificate of a version that there is not, a journal with damaged text, statements nested without end."""
    found = {each.name: each for each in targets()}
    certificate = found["certificate"].seeds[0]
    assert certificate.count(b"\xa0\x03\x02\x01\x02") == 1
    with pytest.raises(HandshakeError):
        found["certificate"].read(certificate.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x03"))
    journal = found["journal"].seeds[0]
    for damaged in (journal.replace(b"alice", b"al\xff\xfee"), journal.replace(b"CREATE", b"\xe1REATE")):
        assert damaged != journal
        with pytest.raises(JournalError):
            found["journal"].read(damaged)
    with pytest.raises(CheckpointError):
        found["checkpoint"].read(b"[" * 50_000)
