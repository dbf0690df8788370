"""States that travel with a lossy codec: smaller, close enough, and known to be no exact copies."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch

from swarmcli.averaging.config import AllreduceOptions
from swarmcli.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from swarmcli.errors import StateDownloadError
from swarmcli.events import PeerRefused
from swarmcli.network.transports.base import Buffer
from swarmcli.state.snapshot import Snapshot
from tests.averaging.averagers import Averagers
from tests.averaging.states import Swarm, make_state, size_of
from tests.compression.codecs import PLAIN, error_bound
from tests.simulation import simulated


def state_with_masks() -> dict[str, torch.Tensor]:
    return {**make_state(), "mask of scores": torch.tensor([0.0, -math.inf, 1.5])}


@pytest.mark.parametrize("codec", [PLAIN[0], PLAIN[1], PLAIN[7]], ids=lambda codec: codec.description)
@simulated
async def test_a_state_arrives_within_the_bound_of_its_codec(codec: CompressionBase) -> None:
    async with Swarm(2) as swarm:
        exact = state_with_masks()
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, exact, codec)] * 2
        got = await swarm.download()
        assert got.exact is isinstance(codec, NoCompression)
        assert list(got.tensors) == list(exact)
        for name, tensor in exact.items():
            restored = got.tensors[name]
            assert (restored.dtype, restored.shape) == (tensor.dtype, tensor.shape)
            if tensor.is_floating_point() and tensor.isfinite().all():
                assert ((restored.double() - tensor.double()).abs() <= error_bound(codec, tensor)).all()
            else:  # whole numbers, and infinities, which no codec makes something else of
                assert torch.equal(restored, tensor)
        assert size_of(swarm.states[0]) <= size_of(Snapshot(b"v1", None, exact))


class Liar(Uniform8BitQuantization):
    """Encodes what no honest peer does, in messages of the right size."""

    def _encode(self, tensor: torch.Tensor) -> Sequence[Buffer]:
        return [b"\xff" * self._size(CompressionInfo.of(tensor).descriptor)]


@simulated
async def test_a_state_that_cannot_be_decoded_is_refused_by_name() -> None:
    async with Swarm(1) as swarm:
        swarm.states = [Snapshot(b"v1", {"epoch": 3}, make_state(), Liar())]
        with pytest.raises(StateDownloadError, match="impossible levels"):
            await swarm.download()
        (refusal,) = [event for event in swarm.events if isinstance(event, PeerRefused)]
        assert (refusal.peer, refusal.what) == (swarm.ids[0].text, "state")


@simulated
async def test_averagers_share_their_state_with_the_codec_that_they_were_told() -> None:
    async with Averagers(0) as swarm:
        shapes = ((300,), (400,))
        infos = tuple(
            CompressionInfo.of(torch.zeros(shape), key, role)
            for key, (shape, role) in enumerate(zip(shapes, (TensorRole.PARAMETER, TensorRole.OPTIMIZER), strict=True))
        )
        codec = RoleAdaptiveCompression(optimizer=BlockwiseQuantization(16), default=NoCompression())
        options = AllreduceOptions(tensor_infos=infos)
        donor = await swarm.add_one(shapes=shapes, share_state=True, state_compression=codec, allreduce=options)
        values = torch.randn(400, generator=torch.Generator().manual_seed(1))
        async with donor.core.tensors() as (_, tensor):
            tensor.copy_(values)
        newcomer = await swarm.add_one(shapes=shapes, allreduce=options)
        await asyncio.sleep(1)
        state = await newcomer.core.sharing.download(timeout=30)
        assert state is not None and not state.exact
        assert torch.equal(state.tensors["0"], torch.zeros(300))  # a parameter: not compressed
        error = (state.tensors["1"].double() - values.double()).abs()
        assert error.max() > 0 and (error <= error_bound(BlockwiseQuantization(16), values)).all()
