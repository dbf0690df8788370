"""States as they travel: layout, chunks, manifests, and manifests that lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.state.snapshot import PinnedState, Snapshot, read_manifest

pytestmark = pytest.mark.usefixtures("small_chunks")


names = st.text(min_size=1, max_size=5)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
)


@settings(max_examples=30)
@given(st.dictionaries(names, tensors, max_size=6))
def test_chunks_put_together_are_the_state(state: dict[str, torch.Tensor]) -> None:
    pinned = PinnedState(Snapshot(b"", [1, None], state))
    outline = read_manifest(pinned.manifest, 1 << 30)
    layout = outline.layout
    chunks = [bytearray(b"".join(pinned.chunk(chunk))) for chunk in range(layout.chunks)]
    assert all(blake3(chunk).digest() == pinned.digests[index] for index, chunk in enumerate(chunks))
    memory = torch.frombuffer(bytearray(b"".join(chunks)) or bytearray(1), dtype=torch.uint8)[: layout.nbytes]
    restored = layout.tensors(memory)
    assert list(restored) == list(state) and outline.metadata == [1, None]
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())


HOSTILE: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda m: m["tensors"].append(["huge", "none", "float32", [1 << 47], 1 << 49]), "accepted"),
    (lambda m: m["tensors"].append(["odd", "none", "float32", [-4], 16]), "impossible shape"),
    (lambda m: m["tensors"].append(["odd", "none", "complex32", [4], 16]), "unknown dtype"),
    (lambda m: m["tensors"].append(["a", "none", "float32", [0], 0]), "names a tensor twice"),
    (lambda m: m.update(chunk_size=0), "unreadable"),
    (lambda m: m.update(chunk_size=1 << 40), "unreadable"),
    (lambda m: m["tensors"].append(["odd", "none", "float32", [4], 17]), "17 bytes"),
    (lambda m: m["tensors"].append(["odd", "none", "float32", [4], -16]), "unreadable"),
    (lambda m: m["tensors"].append(["odd", "float16", "float32", [4], 1 << 20]), "1048576 bytes"),
    (lambda m: m["tensors"].append(["odd", "zip", "float32", [4], 16]), "unknown codec"),
    (lambda m: (m["tensors"].append(["big", "none", "float32", [1 << 20], 1 << 22]), m.update(chunk_size=1)), "chunks"),
    (lambda m: m.update(metadata=b"\xc1"), "unreadable"),
    (lambda m: m.pop("version"), "unreadable"),
    (lambda m: m.update(digests=b""), "in 1 chunks, with hashes of 0"),
]


@pytest.mark.parametrize(("spoil", "words"), HOSTILE)
def test_hostile_manifests(spoil: Callable[[dict[str, Any]], None], words: str) -> None:
    pinned = PinnedState(Snapshot(b"", None, {"a": torch.zeros(4)}))
    manifest = msgspec.msgpack.decode(pinned.manifest)
    spoil(manifest)
    with pytest.raises(ValueError, match=words):
        read_manifest(msgspec.msgpack.encode(manifest), 1 << 30)


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_garbage_is_no_manifest(data: bytes) -> None:
    with pytest.raises(ValueError, match="manifest"):
        read_manifest(data, 1 << 30)


def test_a_state_that_cannot_travel() -> None:
    with pytest.raises(TypeError, match="float8"):
        PinnedState(Snapshot(b"", None, {"a": torch.zeros(2, dtype=torch.float8_e5m2)}))
    with pytest.raises(ValueError, match="metadata"):
        PinnedState(Snapshot(b"", "x" * (5 << 20), {}))
