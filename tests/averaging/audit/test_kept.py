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
def test_inputs_come_back_as_they_were(in_memory: int, tmp_path: Path) -> None:
    example, kept = Example(), KeptInputs(in_memory, tmp_path)
    sent = {sender: keep(kept, example, sender) for sender in (3, 0, 2)}
    for sender, expected in sent.items():
        found = kept.message(PART, sender)
        assert kept.input(PART, sender).fits(PART, found)
        assert NoCompression().extract(found).equal(NoCompression().extract(expected))
    with pytest.raises(KeyError):
        kept.input(PART, 1)
    kept.close()
    assert not list(tmp_path.iterdir())


def test_where_the_disk_is_full_the_reducer_knows_what_was_signed_and_not_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("swarmcli.state.unnamed_file.UnnamedFile.resize", full)
    example, kept = Example(), KeptInputs(0, tmp_path)
    message = keep(kept, example, 0)
    assert kept.input(PART, 0).fits(PART, message)
    with pytest.raises(OSError, match="could not be kept"):
        kept.message(PART, 0)
    kept.close()
