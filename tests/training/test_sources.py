from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import datasets
import pytest

from swarmcli.errors import DataError
from swarmcli.training import sources
from swarmcli.training.sources import DataOptions, FileSource, HuggingFaceSource, Split

from .small_tasks import image_rows, png, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library `datasets` may write, for this test alone."""
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
    return place


def write(directory: Path, **texts: str) -> None:
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")


def read(source: FileSource | HuggingFaceSource, seed: int = 0) -> list[str]:
    return [document.content for document in source.documents(str(seed))]


def columns(source: HuggingFaceSource) -> list[Any]:
    return [document.content for document in source.documents("0")]


def test_a_directory_gives_each_file_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, **{f"file{n}": f"text {n}" for n in range(20)})
    source = FileSource.below(tmp_path)
    first, second = read(source, 1), read(source, 2)
    assert sorted(first) == sorted(second) == sorted(f"text {n}" for n in range(20))
    assert first != second and first == read(source, 1)


def test_globs_choose_files_and_hidden_ones_stay_out(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    write(tmp_path / "deep" / "er", **{"a.py": "python"})
    write(tmp_path, **{"b.py": "top", "c.md": "prose", ".d.py": "hidden"})
    write(tmp_path / ".git", **{"e.py": "hidden"})
    assert sorted(read(FileSource.below(tmp_path, "**/*.py"))) == ["python", "top"]
    assert sorted(read(FileSource.below(tmp_path, "*.py"))) == ["top"]
    assert sorted(read(FileSource.below(tmp_path))) == ["prose", "python", "top"]


def test_missing_data_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone does not exist; put the text files there, or correct `path`"):
        FileSource.below(tmp_path / "gone")
    with pytest.raises(DataError, match=r"holds no files that fit '\*\*/\*'; put text files there"):
        FileSource.below(tmp_path)
    write(tmp_path, **{"a.md": "text"})
    with pytest.raises(DataError, match=r"holds no files that fit '\*\.py'"):
        FileSource.below(tmp_path, "*.py")
    with pytest.raises(DataError, match="cannot be listed"):
        FileSource.below(tmp_path, "/*.md")


def test_a_large_file_is_read_in_segments_that_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aäöü€𝄞" * 10  # characters of one to four bytes, cut everywhere
    write(tmp_path, large=text)
    source = FileSource.below(tmp_path / "large", options=DataOptions(segment_bytes=11))

    monkeypatch.setattr(random.Random, "shuffle", lambda rng, pieces: None)  # leaves them as they lie in the file
    documents = list(source.documents("0"))
    joined = "".join(document.content for document in documents)
    assert len(documents) > 5 and [document.ends for document in documents] == [False] * (len(documents) - 1) + [True]
    assert [document.begins for document in documents] == [True] + [False] * (len(documents) - 1)
    # A character on a border is given up; nothing else is, and nothing is made up.
    assert set(joined) <= set(text) and len(joined) > 0.7 * len(text)


def test_bytes_that_are_no_text_are_replaced_and_binaries_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    write(tmp_path, end="ends with ä")
    with caplog.at_level(logging.WARNING):
        assert sorted(read(FileSource.below(tmp_path))) == ["caf\ufffd au lait", "ends with ä"]
    assert "binary is passed over: it holds zero bytes" in caplog.text


def test_files_that_vanish_are_passed_over_until_none_is_left(tmp_path: Path) -> None:
    write(tmp_path, a="text", b="gone")
    source = FileSource.below(tmp_path)
    (tmp_path / "b").unlink()
    assert read(source) == ["text"]
    assert read(FileSource.below(tmp_path / "a")) == ["text"]
    write(tmp_path, a="")
    with pytest.raises(DataError, match="none of 2 files can be read as text"):
        read(source)


def test_the_standard_library_is_there_without_installed_packages_or_its_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileSource.stdlib()
    assert len(source) > 300 and next(source.documents("0"))
    assert not [file for file in source.files if "site-packages" in file.parts]
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source files"):
        FileSource.stdlib()


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(30)], "other": list(range(30))})


@pytest.mark.parametrize(("kind", "streaming"), [("json", True), ("parquet", False), ("csv", True)])
def test_local_datasets_are_read_as_the_hub_s(tmp_path: Path, kind: str, streaming: bool) -> None:
    file = tmp_path / f"data.{kind}"
    getattr(rows(), f"to_{kind}")(str(file))
    source = HuggingFaceSource(kind, data_files=[str(file)], streaming=streaming)
    first, second = read(source, 1), read(source, 2)
    assert sorted(first) == sorted(second) == sorted(f"row {n}" for n in range(30))
    assert first != second and first == read(source, 1)


def test_streaming_copies_nothing_into_the_cache(tmp_path: Path, cache: Path) -> None:
    rows().to_json(str(tmp_path / "a.jsonl"))
    stream = HuggingFaceSource("json", data_files=[str(tmp_path / "a.jsonl")]).documents("0")
    assert next(stream).content.startswith("row")
    assert not list(cache.rglob("*.arrow"))


@pytest.mark.parametrize("streaming", [True, False])
def test_broken_datasets_are_named(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "bad.jsonl").write_text("this is no json")
    with pytest.raises(DataError, match="the dataset 'json' cannot be"):
        read(HuggingFaceSource("json", data_files=[str(tmp_path / "bad.jsonl")], streaming=streaming))
    with pytest.raises(DataError, match="the dataset 'json' cannot be opened"):
        read(HuggingFaceSource("json", data_files=[str(tmp_path / "gone.jsonl")], streaming=streaming))


def test_scripts_that_a_dataset_brings_are_not_run(tmp_path: Path) -> None:
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError):
        read(HuggingFaceSource(str(script)))
    assert not (tmp_path / "ran").exists()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'swarmcli\[datasets\]'"):
        read(HuggingFaceSource("json"))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_row_that_names_a_file_of_this_computer_opens_none(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    file = image_rows(tmp_path / "rows.parquet", (None, "named"), (png(), "held"), path=str(tmp_path / "secret.png"))
    rows = columns(HuggingFaceSource("parquet", data_files=[file], text_column=None, streaming=streaming))
    found = {row["label"]: row["image"] for row in rows}
    assert found["named"] is None and found["held"].size == (4, 3)
    texts = HuggingFaceSource("parquet", data_files=[file], text_column="label", streaming=streaming)
    assert set(read(texts)) == {"named", "held"}


def test_a_file_that_is_no_image_and_one_too_large_are_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = image_rows(tmp_path / "rows.parquet", (b"no image", "torn"), (png(9, 9), "large"))
    options = DataOptions(most_pixels=80)
    rows = columns(HuggingFaceSource("parquet", data_files=[file], text_column=None, options=options))
    assert [row["image"] for row in rows] == [None, None]
    assert caplog.text.count("is passed over") == 1


def test_an_image_is_held_out_by_its_bytes_whether_it_can_be_decoded_or_not(tmp_path: Path) -> None:
    """The thread that draws rows decodes none: others do that side by side."""
    images = [(png(4, n)[: -30 if n % 2 else None], str(n)) for n in range(1, 20)]
    file, found = image_rows(tmp_path / "rows.parquet", *images), []
    for evaluates in (True, False):
        source = HuggingFaceSource("parquet", data_files=[file], text_column=None, held_out=Split(0.5, evaluates))
        found.append([row["label"] for row in columns(source)])
    assert all(found) and sorted([*found[0], *found[1]]) == sorted(label for _, label in images)


def test_images_of_a_directory_are_read(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1.png").write_bytes(png())
    source = HuggingFaceSource("imagefolder", data_files=[f"{tmp_path}/**"], text_column=None, streaming=False)
    assert [row["image"].size for row in columns(source)] == [(4, 3)] * 2


@pytest.mark.parametrize("streaming", [True, False])
def test_values_of_several_kinds_in_a_column_are_read(tmp_path: Path, streaming: bool) -> None:
    said = [{"role": "tool", "content": "a", "x": 1}], [{"role": "tool", "content": "b", "x": {"y": [1, "z"]}}]
    file = write_rows(tmp_path / "a.jsonl", *({"messages": each} for each in said))
    source = HuggingFaceSource("json", data_files=[str(file)], text_column=None, streaming=streaming)
    assert sorted(row["messages"][0]["content"] for row in columns(source)) == ["a", "b"]
