"""Tensors from rank to rank in pieces: every byte once, bounded messages, any type."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmcli.sharding import transfer
from swarmcli.sharding.transfer import message_device, receive_tensors, runs_of, send_tensors
from tests.sharding.threads import in_threads

LENGTHS = st.lists(st.integers(0, 50), max_size=12)


@settings(max_examples=25)
@given(LENGTHS, st.integers(1, 40))
def test_pieces_cover_every_byte_once_and_in_order(lengths: list[int], piece_bytes: int) -> None:
    seen = []
    for runs in runs_of(lengths, piece_bytes):
        in_piece = [(run.tensor, run.start + position) for run in runs for position in range(run.stop - run.start)]
        assert 0 < len(in_piece) <= piece_bytes
        seen += in_piece
    assert seen == [(tensor, byte) for tensor, length in enumerate(lengths) for byte in range(length)]


def everything() -> list[torch.Tensor]:
    values = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) - 5
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.bool, torch.complex128]
    return [
        *(values.to(dtype) for dtype in dtypes),
        torch.tensor(7.5),
        torch.empty(0, 3),
        torch.randn(200, generator=torch.Generator().manual_seed(3)),
    ]


def send_everything() -> bool | None:
    group = dist.group.WORLD
    assert group is not None and message_device(group) == torch.device("cpu")
    if dist.get_rank() == dist.get_world_size() - 1:
        crooked = [tensor.transpose(0, -1) if tensor.dim() > 1 else tensor for tensor in everything()]
        send_tensors([*everything(), *crooked], 0, group)
    elif dist.get_rank() == 0:
        expected = [*everything(), *(t.transpose(0, -1) if t.dim() > 1 else t for t in everything())]
        received = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in expected]
        receive_tensors(received, dist.get_world_size() - 1, group)
        return all(
            torch.equal(one.double(), other.double())
            for one, other in zip(received, expected, strict=True)
            if not one.is_complex()
        ) and torch.equal(received[5], expected[5])
    return None


@pytest.mark.parametrize("piece_bytes", [37, 2**20])
def test_arrives_byte_for_byte(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", piece_bytes)
    assert in_threads(2, send_everything)[0] is True
