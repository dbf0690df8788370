"""How much of its data a run reads in a pass that its peers share, and how much of it twice."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest

from swarmcli.errors import DataError
from swarmcli.training import ByteTokenizer
from swarmcli.training.samples import CountedRows, RowByRow, SampleStream, TextRun, stacked
from swarmcli.training.shared_pass import LATEST, HeardPass, PassRecord, SharedPass, SourceRead
from swarmcli.training.sources import WHOLE, Document, FileSource, HuggingFaceSource, PassPart, Permutation, Place

ROWS = 5000


class Numbers:
    """A source of the numbers below ROWS."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.files = self.left_out = ()

    def documents(self, seed: str, place: Place = (), part: PassPart = WHOLE) -> Iterator[Document]:
        permutation, (begin,) = Permutation(self.rows, seed), place or (0,)
        for count, number in enumerate(range(self.rows)[part.slice_of(self.rows)][begin:], begin + 1):
            yield Document({"row": permutation[number], "pass": int(seed.rpartition("/")[2])}, True, (count,))

    def parts(self) -> int:
        return 512

    def identity(self) -> str:
        return str(self.rows)


def stream(shared: SharedPass | None, seed: int, position: Any = None) -> SampleStream:
    def encode(row: Any) -> Iterator[Any]:
        yield {name: np.array(value) for name, value in row.items()}

    maker = RowByRow([CountedRows("numbers", encode, "")], stacked, "numbers")
    return SampleStream(
        [Numbers()], [1.0], maker, seed=seed, batch_size=4, block=1024, position=position, chooser=shared
    )


@dataclass
class Peer:
    speed: int  # batches in a step of the swarm
    shared: SharedPass
    made: SampleStream
    number: int = 0  # of its pass


@dataclass
class Swarm:
    """Peers of unlike speed that hear of each other every few steps, and what they have computed of each pass."""

    seed: int
    delay: int = 1  # steps between what peers hear; a pass takes about eighty
    read: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # pass → row → times
    samples: int = 0
    peers: list[Peer] = field(default_factory=list)
    gone: list[PassRecord] = field(default_factory=list)  # the hash table keeps what the dead have read
    liars: list[HeardPass] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def join(self) -> None:
        number = self.rng.randrange(1 << 30)
        shared = SharedPass("swarm/1", rng=random.Random(number))
        peer = Peer(self.rng.choice([1, 2, 3, 10]), shared, stream(shared, number))
        self.peers.append(peer)
        self.tell()

    def die(self) -> None:
        self.gone.append(self.peers.pop(self.rng.randrange(len(self.peers))).shared.says())

    def tell(self) -> None:
        said = [peer.shared.says() for peer in self.peers]
        for n, peer in enumerate(self.peers):
            others = [HeardPass(each, True) for k, each in enumerate(said) if k != n]
            peer.shared.hear([*others, *(HeardPass(each, False) for each in self.gone), *self.liars])

    def step(self) -> None:
        for peer in self.peers:
            for _ in range(peer.speed):
                batch = next(peer.made)
                peer.number = batch["pass"].max().item()
                for number, row in zip(batch["pass"].tolist(), batch["row"].tolist(), strict=True):
                    self.read[number][row] += 1
                self.samples += len(batch["row"])
        self.steps += 1
        if self.steps % self.delay == 0:
            self.tell()

    def through(self, number: int = 0, *, churn: int = 0) -> Swarm:
        """Goes on until all peers have left a pass; every `churn` steps one dies and one comes."""
        while min(peer.number for peer in self.peers) <= number:
            assert self.samples < 3 * (number + 1) * ROWS
            self.step()
            if churn and self.steps % churn == 0:
                self.die()
                self.join()
        return self

    def shares(self, number: int = 0) -> tuple[float, float]:
        """The rows that were read in a pass, and those that were read twice in it."""
        counts = self.read[number]
        return len(counts) / ROWS, sum(count > 1 for count in counts.values()) / ROWS


def eight(seed: int) -> Swarm:
    swarm = Swarm(seed)
    for _ in range(8):
        swarm.join()
    return swarm


def claims(number: int, parts: range) -> HeardPass:
    bits = sum(1 << part for part in parts).to_bytes(64, "little")
    source = SourceRead(number=number, parts=512, done=bits, hand=bits, before=bits)
    return HeardPass(PassRecord(sources=[source]), True)


@pytest.mark.parametrize("seed", range(2))
def test_eight_unlike_peers_read_all_of_a_pass_and_little_twice(seed: int) -> None:
    swarm = eight(seed).through(1)
    for number, most in ((0, 0.1), (1, 0.2)):  # into the second pass they come one by one
        read, twice = swarm.shares(number)
        assert read >= 0.99 and twice <= most


@pytest.mark.parametrize("seed", range(2))
def test_so_do_peers_that_come_and_go(seed: int) -> None:
    read, twice = eight(seed).through(churn=12).shares()
    assert read >= 0.99 and twice <= 0.1


@pytest.mark.parametrize("ahead", [0, 1, (1 << 32) - 1])
def test_who_claims_everything_has_others_read_on_by_chance(ahead: int) -> None:
    swarm = eight(1)
    while swarm.samples < 2 * ROWS:
        swarm.liars = [claims(min(peer.number + ahead, (1 << 32) - 1), range(512)) for peer in swarm.peers] * 20
        swarm.step()
    read = set().union(*swarm.read.values())
    assert len(read) > 0.75 * ROWS, "no piece comes again and again"
    for peer in swarm.peers:
        assert peer.number < LATEST + 10_000
        PassRecord.model_validate(peer.shared.says().model_dump())


def test_what_one_claims_falsely_is_left_for_the_next_pass() -> None:
    swarm = eight(1)
    swarm.liars = [claims(0, range(256))]
    assert 0.5 <= swarm.through().shares()[0] < 0.6


def test_what_one_that_is_gone_had_in_hand_is_free_again_and_what_it_has_done_is_not() -> None:
    own = SharedPass("swarm/1", rng=random.Random(1))
    begun: tuple[int, ...] = ()
    for _ in range(6):
        begun = (*begun, own.next_part(0, 8, 0, begun)[1])
    own.settle((0,), (begun[:5],))
    for there, free in ((True, set(range(8)) - set(begun)), (False, set(range(8)) - set(begun[:4]))):
        found: tuple[int, ...] = ()
        taker = SharedPass("swarm/1", rng=random.Random(2))
        taker.hear([HeardPass(own.says(), there)])
        for _ in free:
            found = (*found, taker.next_part(0, 8, 0, found)[1])
        assert set(found) == free


def test_a_peer_alone_reads_each_row_once_in_a_pass() -> None:
    swarm = Swarm(1)
    swarm.join()
    assert swarm.through().shares() == (1.0, 0.0)


def test_a_stream_that_goes_on_reads_what_it_would_have_read() -> None:
    def draw(made: SampleStream, count: int) -> list[list[int]]:
        return [next(made)["row"].tolist() for _ in range(count)]

    whole = stream(SharedPass("swarm/1", rng=random.Random(1)), 5)
    draw(whole, 50)
    position = json.loads(json.dumps(whole.position()))
    # Another choice of parts, but for those that the block is made of, whatever others claim by now.
    again, beside = (SharedPass("swarm/1", rng=random.Random(2)) for _ in range(2))
    beside.hear([claims(0, range(512))])
    left = 64 // 4 - 50 % (64 // 4)
    expected, again = draw(whole, left), stream(again, 5, position)
    assert draw(again, left) == expected
    assert draw(stream(beside, 5, position), 8) == expected[:8], "a block is of four parts, some forty rows"
    seen = {row for batch in draw(again, 900) for row in batch}
    assert len(seen) == 900 * 4


@pytest.mark.parametrize(
    "change", [{"done": bytes(65)}, {"hand": bytes(65)}, {"parts": 513}, {"number": -1}, {"parts": "8"}]
)
def test_a_word_out_of_bounds_is_none(change: dict[str, Any]) -> None:
    word = {"number": 0, "parts": 8, "done": b"", "hand": b"", "before": b""}
    PassRecord.model_validate({"sources": [word] * 16})
    for sources in ([word | change], [word] * 17):
        with pytest.raises(pydantic.ValidationError):
            PassRecord.model_validate({"sources": sources})


def test_others_that_divide_the_data_otherwise_say_nothing() -> None:
    shared = SharedPass("swarm/1", rng=random.Random(1))
    shared.hear([claims(3, range(512))] * 5)
    assert shared.next_part(0, 100, 0, ())[0] == 0


def test_samples_longer_than_a_block_of_parts_are_made() -> None:
    class Short:
        files = ()

        def documents(self, seed: str, place: Place = (), part: PassPart = WHOLE) -> Iterator[Document]:
            (begin,) = place or (0,)
            for number in range(12)[part.slice_of(12)][begin:]:
                yield Document(f"text {number} of twenty", True, (number % 1 + 1,))

        def parts(self) -> int:
            return 12

        def identity(self) -> str:
            return "short"

    shared = SharedPass("swarm/1", rng=random.Random(1))
    made = SampleStream([Short()], [1.0], TextRun(ByteTokenizer(), 200), seed=1, batch_size=1, block=64, chooser=shared)
    for _ in range(5):
        assert next(made)["input_ids"].shape == (1, 200)


@pytest.mark.parametrize("kind", ["rows", "files"])
def test_a_source_in_which_nothing_can_be_read_ends_a_shared_stream_with_its_reason(tmp_path: Path, kind: str) -> None:
    source: FileSource | HuggingFaceSource
    if kind == "rows":
        (tmp_path / "a.jsonl").write_text('{"text": 1}\n' * 40)
        source = HuggingFaceSource("json", data_files=[str(tmp_path / "a.jsonl")], streaming=False)
    else:
        for number in range(20):
            (tmp_path / str(number)).write_bytes(b"\0")
        source = FileSource.below(tmp_path)
    shared = SharedPass("swarm/1", rng=random.Random(1))
    made = SampleStream([source], [1.0], TextRun(ByteTokenizer(), 8), seed=1, batch_size=1, block=4, chooser=shared)
    with pytest.raises(DataError, match=r"no text can be read \(the data: of \d+ rows, \d+ left out"):
        next(made)


def test_what_is_said_of_a_source_stands_at_its_number() -> None:
    shared = SharedPass("swarm/1", rng=random.Random(1))
    shared.next_part(1, 64, 0, ())
    assert [each.parts for each in shared.says().sources] == [1, 64]
