"""A reducer has the inputs of its parts until the round is settled, in memory or beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmcli.averaging.audit.kept import KeptInputs
from swarmcli.compression import NoCompression, TensorMessage
from tests.averaging.audit.cases import PART, Example


def keep(kept: KeptInputs, example: Example, sender: int) -> TensorMessage:
    message = example.message(sender)
    memory = kept.memory(message.payload_size)
    if memory is not None:
        memory[:] = message.payload[0]
    kept.keep(
        PART, example.input(sender, message), TensorMessage(message.header, (memory or message.payload[0],)), memory
    )
    return message


@pytest.mark.parametrize("in_memory", [0, 2 * 1200, 1 << 20])
def test_inputs_come_back_as_they_were_in_the_order_of_members(in_memory: int, tmp_path: Path) -> None:
    example, kept = Example(), KeptInputs(in_memory, tmp_path)
    sent = {sender: keep(kept, example, sender) for sender in (3, 0, 2)}
    assert [each.sender for each in kept.inputs(PART)] == [0, 2, 3]
    for each in kept.inputs(PART):
        assert each.fits(PART, kept.message(PART, each.sender))
        assert (
            NoCompression().extract(kept.message(PART, each.sender)).equal(NoCompression().extract(sent[each.sender]))
        )
    assert kept.inputs(PART + 1) == ()
    kept.forget(PART, 2)
    assert [each.sender for each in kept.inputs(PART)] == [0, 3]
    kept.close()
    assert kept.inputs(PART) == () and not list(tmp_path.iterdir())


def test_where_the_disk_is_full_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("swarmcli.state.unnamed_file.UnnamedFile.resize", full)
    kept = KeptInputs(0, tmp_path)
    keep(kept, Example(), 0)
    assert kept.inputs(PART) == ()
    kept.close()
