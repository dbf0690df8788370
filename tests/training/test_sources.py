from __future__ import annotations

import bz2
import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from pandas.errors import ParserWarning

from swarmcli.errors import DataError
from swarmcli.network.key_file import create_key_file
from swarmcli.recipe.dataset import format_of
from swarmcli.training import sources
from swarmcli.training.sources import BadRow, DataOptions, FileSource, HuggingFaceSource, Split

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


def test_keys_and_homes_of_peers_are_not_learned(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "a" / "trainer-1"
    (home / "checkpoints").mkdir(parents=True)
    create_key_file(home / "identity.key")
    create_key_file(tmp_path / "a.run-key")
    create_key_file(tmp_path / "my-key.txt")
    write(tmp_path, **{"a.txt": "text", "notes.md": "about keys"})
    write(home, **{"dashboard.token": "token", "checkpoints/card.txt": "card"})
    (beside := tmp_path / "runs" / "a" / "trainer-2").mkdir()  # whose identity lies elsewhere
    write(beside, **{"journal.sqlite": "", "dashboard.token": "token"})
    for pattern in ("**/*", "**/*.*"):
        found = sorted(map(str, read(FileSource.below(tmp_path, pattern))))
        assert found == ["about keys", "it is a private key", "text"]
    with pytest.raises(DataError, match="holds no files but keys and a peer's home"):
        FileSource.below(home)
    for named in (tmp_path / "a.run-key", home / "dashboard.token"):
        with pytest.raises(DataError, match="a model would tell it to everybody"):
            FileSource.below(named)
        with pytest.raises(DataError, match="a model would tell it to everybody"):
            columns(HuggingFaceSource("text", data_files=[str(named)]))


def test_missing_data_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"gone does not exist; put the text files there, correct `path`.*local.data_dir="
    ):
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
    assert joined == text


def test_files_that_are_no_text_are_left_out_and_told_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    write(tmp_path, end="ends with ä")
    found = {document.where: str(document.content) for document in FileSource.below(tmp_path).documents("0")}
    assert found == {
        "latin": "byte 3 is not UTF-8, and texts are read as UTF-8 alone",
        "binary": "it holds zero bytes, so it is no text",
        "end": "ends with ä",
    }


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
    assert len(source.files) > 300 and next(source.documents("0"))
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


@pytest.mark.parametrize("streaming", [True, False])
def test_broken_datasets_are_named(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "bad.jsonl").write_text("this is no json")
    (row,) = HuggingFaceSource("json", data_files=[str(tmp_path / "bad.jsonl")], streaming=streaming).documents("0")
    assert isinstance(row.content, BadRow) and row.where == "bad.jsonl, row 1"
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
    assert isinstance(found["named"], BadRow) and found["held"].size == (4, 3)
    texts = HuggingFaceSource("parquet", data_files=[file], text_column="label", streaming=streaming)
    assert set(read(texts)) == {"named", "held"}


def test_a_file_that_is_no_image_and_one_too_large_are_bad_values(tmp_path: Path) -> None:
    file = image_rows(tmp_path / "rows.parquet", (b"no image", "torn"), (png(9, 9), "large"))
    options = DataOptions(most_pixels=80)
    rows = columns(HuggingFaceSource("parquet", data_files=[file], text_column=None, options=options))
    assert [str(row["image"]) for row in sorted(rows, key=lambda row: row["label"])] == [
        "it is no image (it has 9 × 9 pixels)", "it is no image (cannot identify image file)"
    ]  # fmt: skip


def test_an_image_is_held_out_by_its_bytes_whether_it_can_be_decoded_or_not(tmp_path: Path) -> None:
    """The thread that draws rows decodes none: others do that side by side."""
    images = [(png(4, n)[: -30 if n % 2 else None], str(n)) for n in range(1, 20)]
    file, found = image_rows(tmp_path / "rows.parquet", *images), []
    for evaluates in (True, False):
        source = HuggingFaceSource("parquet", data_files=[file], text_column=None, held_out=Split(0.5, evaluates))
        found.append([row["label"] for row in columns(source)])
    assert all(found) and sorted([*found[0], *found[1]]) == sorted(label for _, label in images)


def test_rows_are_held_out_alike_whether_their_format_writes_nulls_or_leaves_them_out(tmp_path: Path) -> None:
    rows = [{"text": str(n)} if n % 2 else {"text": str(n), "more": "x"} for n in range(20)]
    lines = str(write_rows(tmp_path / "a.jsonl", *rows))
    datasets.Dataset.from_list([{"more": None, **row} for row in rows]).to_parquet(tmp_path / "a.parquet")
    found = []
    for kind, file in (("json", lines), ("parquet", str(tmp_path / "a.parquet"))):
        source = HuggingFaceSource(kind, data_files=[file], text_column=None, held_out=Split(0.5, evaluates=True))
        found.append(sorted(row["text"] for row in columns(source)))
    assert found[0] == found[1] and 0 < len(found[0]) < 20


def test_files_of_a_dataset_of_the_hub_are_sought_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, **arguments: Any) -> datasets.Dataset:
        asked.append((path, arguments["data_files"]))
        return datasets.Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts(HuggingFaceSource("owner/name", data_files=["train.jsonl"], streaming=False)) == ["a"]
    assert asked == [("owner/name", ["train.jsonl"])]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("named", ["../secret.png", "{}/secret.png"])
def test_a_directory_of_images_names_no_file_outside(tmp_path: Path, streaming: bool, named: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "1.png").write_bytes(png())
    (tmp_path / "held" / "metadata.csv").write_text(f"file_name,label\n{named.format(tmp_path)},a\n")
    files = [f"{tmp_path}/held/**"]
    with pytest.raises(DataError, match="cannot be "):
        columns(HuggingFaceSource("imagefolder", data_files=files, text_column=None, streaming=streaming))


@pytest.mark.parametrize("streaming", [True, False])
def test_an_image_of_a_directory_that_is_none_is_told_by_its_file(tmp_path: Path, streaming: bool) -> None:
    for name, data in (("a/1.png", png()), ("b/1.png", b"none")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    source = HuggingFaceSource("imagefolder", data_files=[f"{tmp_path}/**"], text_column=None, streaming=streaming)
    found: dict[str, Any] = {each.where: each.content for each in source.documents("0")}
    assert sorted(found) == ["a/1.png", "b/1.png"] and isinstance(found["b/1.png"]["image"], BadRow)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("lines", [True, False])
def test_values_of_several_kinds_in_a_column_are_read(tmp_path: Path, lines: bool, streaming: bool) -> None:
    rows: list[Any] = [
        {"text": 'a "b"', "messages": [{"content": "a"}]},
        {"text": 1, "messages": [{"content": [{"type": "text", "text": "b"}]}]},
    ]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    source = HuggingFaceSource("json", data_files=[f"{tmp_path}/a.json"], text_column=None, streaming=streaming)
    assert sorted(columns(source), key=str) == sorted(rows, key=str)


def told(source: Any, seed: str = "0") -> dict[str, str]:
    """What is left out: the reason by its place."""
    return {each.where: str(each.content) for each in source.documents(seed) if isinstance(each.content, BadRow)}


def texts(source: Any) -> list[Any]:
    return sorted(each.content for each in source.documents("0") if not isinstance(each.content, BadRow))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_row_that_cannot_be_read_is_told_with_its_place_and_ends_nothing(tmp_path: Path, streaming: bool) -> None:
    lines = [
        '{"text": "a"}',
        '{"text": "b',
        r'{"text": "\ud83d"}',
        '{"text": null}',
        '{"text": 1}',
        '{"t": "c"}',
        "[]",
        "",
    ]
    data = "\n".join(lines).encode() + b'\n{"text": "caf\xe9"}\n{"text": "2024-05-01"}\n'
    (tmp_path / "a.jsonl").write_bytes(data)
    source = HuggingFaceSource("json", data_files=[str(tmp_path / "a.jsonl")], streaming=streaming)
    assert texts(source) == ["2024-05-01", "a"], "what is text in the file is no date"
    left = told(source)
    assert sorted(left) == [f"a.jsonl, row {n}" for n in (2, 3, 4, 5, 6, 7, 9)], "a blank line is no row"
    assert "surrogates not allowed" in left["a.jsonl, row 3"] and "escape" in left["a.jsonl, row 9"]
    assert left["a.jsonl, row 4"] == "text is None, and should be text"
    assert left["a.jsonl, row 6"] == "it has no column 'text'; set field to one of t"


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_and_files_of_json_may_have_unlike_columns_and_types(tmp_path: Path, streaming: bool) -> None:
    write_rows(tmp_path / "a.jsonl", {"text": "a", "id": 1})
    write_rows(tmp_path / "b.jsonl", {"text": "b", "id": "x", "meta": {"of": [1]}}, {"id": [], "text": "c"})
    source = HuggingFaceSource("json", data_files=[f"{tmp_path}/*.jsonl"], streaming=streaming)
    assert texts(source) == ["a", "b", "c"] and told(source) == {}


@pytest.mark.parametrize("streaming", [True, False])
def test_cells_are_the_text_that_a_csv_reader_finds_and_only_an_empty_one_is_missing(
    tmp_path: Path, streaming: bool
) -> None:
    cells = ["null", "NA", "None", "nan", "n/a", "007", "1", "1e5", "true", "2024-05-01", 'a "b", c', "two\nlines", ""]
    for name, delimiter in (("a.csv", ","), ("b.tsv", "\t")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(
                [["text", "id"], *([cell, n] for n, cell in enumerate(cells))]
            )
        with (tmp_path / name).open(encoding="utf-8-sig", newline="") as file:
            expected = sorted(row["text"] for row in csv.DictReader(file, delimiter=delimiter) if row["text"])
        source = HuggingFaceSource("csv", data_files=[str(tmp_path / name)], streaming=streaming)
        assert texts(source) == expected
        assert told(source) == {f"{name}, row 13": "text is None, and should be text"}


def test_a_file_of_csv_with_further_columns_is_read_and_a_line_with_too_many_cells_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "b.csv").write_text("more,text\n1,b\n1,too,many\n2,c\n")
    source = HuggingFaceSource("csv", data_files=[str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])
    with pytest.warns(ParserWarning, match="Skipping line 3"):
        assert texts(source) == ["a", "b", "c"]


@pytest.mark.parametrize("rows", ["a,b,\nc,d,\n", "1,a,b\n2,c,d\n"])
def test_a_csv_whose_rows_have_more_cells_than_its_header_is_refused(tmp_path: Path, rows: str) -> None:
    """A comma behind each row, or numbers of rows without a name: pandas would read the one like the other."""
    (tmp_path / "a.csv").write_text("text,more\n" + rows)
    with pytest.raises(DataError, match=r"a\.csv, row 1: it has more cells than the header; mend one"):
        texts(HuggingFaceSource("csv", data_files=[str(tmp_path / "a.csv")]))


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.jsonl.gz", "a.csv.bz2"])
def test_lists_and_compressed_files_are_read(tmp_path: Path, name: str) -> None:
    text = {"a.json": '[\n{"text": "é"},\n{"text": "b"}\n]', "a.jsonl.gz": '{"text": "é"}\n{"text": "b"}\n'}.get(
        name.lower(), "text\né\nb\n"
    )
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(text.encode()))
    assert texts(HuggingFaceSource(format_of(name) or "", data_files=[str(tmp_path / name)])) == ["b", "é"]


@pytest.mark.parametrize(
    ("kind", "text"), [("json", '{"text": "café €"}\n'), ("csv", "text\ncafé €\n"), ("text", "café €\n")]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_part_of_rows_and_texts(tmp_path: Path, kind: str, text: str, encoding: str) -> None:
    (tmp_path / f"a.{kind}").write_text(text, encoding=encoding)
    assert texts(HuggingFaceSource(kind, data_files=[str(tmp_path / f"a.{kind}")])) == ["café €"]
    assert texts(FileSource.below(tmp_path / f"a.{kind}")) == [text]


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["csv", "text"])
def test_a_row_with_bytes_of_another_encoding_is_left_out_and_told(tmp_path: Path, kind: str, streaming: bool) -> None:
    for name, text in (("a", "text\none\ntwo\n"), ("b", "text\ncafé\nthree\n")):
        (tmp_path / name).write_text(text, encoding="cp1252")
    source = HuggingFaceSource(kind, data_files=[str(tmp_path / "a"), str(tmp_path / "b")], streaming=streaming)
    told = {str(document.content): document.where for document in source.documents("seed")}
    bad = "it has U+FFFD, as of bytes that are not UTF-8, and rows are read as UTF-8 alone"
    assert told.keys() - {"text"} == {"one", "two", "three", bad}
    row = {"csv": 1, "text": 2}[kind]
    (tmp_path / "b").write_text("text\none\n", encoding="utf-16")
    if kind == "csv":
        with pytest.raises(DataError, match="the header of b is not UTF-8"):
            HuggingFaceSource(kind, data_files=[str(tmp_path / "a"), str(tmp_path / "b")]).parts()
    assert told[bad] == (f"b, row {row}" if streaming else f"of all files, row {row + (2 if kind == 'csv' else 3)}")


def test_files_of_rows_are_no_texts_unless_glob_names_them(tmp_path: Path) -> None:
    write(tmp_path, **{"README.md": "read", "a.txt": "me"})
    write_rows(tmp_path / "part.jsonl", {"text": "a"})
    source = FileSource.below(tmp_path)
    assert texts(source) == ["me", "read"]
    assert told(source)["part.jsonl"].startswith("it holds rows; read them by `path: …/**/*.jsonl`")
    assert read(FileSource.below(tmp_path, "*.jsonl")) == ['{"text": "a"}\n']
    (tmp_path / "a.txt").unlink()
    with pytest.raises(
        DataError, match=r"1 of 2 files: part.jsonl: it holds rows; read them by `path: …/\*\*/\*.jsonl`"
    ):
        FileSource.below(tmp_path)
