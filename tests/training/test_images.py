"""Images as files hold them: what a model is given of each, beside what `datasets` and transformers' pipelines make."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from swarmcli.errors import RecipeError
from swarmcli.recipe import parse_recipe
from swarmcli.training import build_task
from swarmcli.training.chat import BadRow
from swarmcli.training.sources import HuggingFaceSource
from swarmcli.training.tasks.image_classification import ImageClassification

from .small_tasks import image_rows

RECIPE = """\
run_id: images
task: image_classification
labels: [one, other]
base_model:
  {model_type: vit, image_size: 24, patch_size: 8, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2}
datasets: [{path: rows.parquet}]
target_batch_size: 8
local: {device: cpu}
"""
LEVELS = (np.arange(24 * 16).reshape(24, 16) * 0.66).astype(np.uint8)  # from black at the top to white
GREY = Image.fromarray(LEVELS)
COLOURS = Image.fromarray(np.stack([LEVELS, 255 - LEVELS, LEVELS.T.reshape(24, 16)], -1))
CLEAR = Image.fromarray(LEVELS[::-1].copy())  # an alpha channel
BLACK = Image.new("RGB", (16, 24))
TURNED = Image.Exif()
TURNED[0x0112] = 6  # stands upright when it is turned by 90° clockwise


def stored(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, kind, **options)
    return held.getvalue()


def with_alpha(image: Image.Image) -> Image.Image:
    made = image.copy()
    made.putalpha(CLEAR)
    return made


def deep(kind: str = "<u2") -> Image.Image:
    return Image.fromarray(LEVELS.astype(kind) * 257)


def lab() -> Image.Image:
    of_lab: Any = ImageCms.profileToProfile(
        COLOURS, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    return of_lab


PALETTE = COLOURS.quantize(200)
# Files, each with the picture that has its values in 8 bits, if the libraries have no right one.
FILES: dict[str, tuple[bytes, Image.Image | None]] = {
    "1": (stored(GREY.convert("1")), None),
    "L": (stored(GREY), None),
    "LA": (stored(with_alpha(GREY)), None),
    "RGB": (stored(COLOURS), None),
    "RGBA": (stored(with_alpha(COLOURS)), None),
    "P": (stored(PALETTE), None),
    "P, transparent by bytes": (stored(PALETTE, transparency=bytes(range(200))), None),
    "P, moving": (stored(PALETTE, "GIF", save_all=True, append_images=[BLACK.quantize()] * 2), None),
    "RGB, moving": (stored(COLOURS, "WEBP", lossless=True, save_all=True, append_images=[BLACK]), None),
    "RGB, pages": (stored(COLOURS, "TIFF", save_all=True, append_images=[BLACK]), None),
    "CMYK": (stored(COLOURS.convert("CMYK"), "TIFF"), None),
    "CMYK, inverted as Adobe does": (stored(COLOURS.convert("CMYK"), "JPEG", quality=100), None),
    # Compressed: Pillow before 13 cannot read its own file otherwise.
    "YCbCr": (stored(COLOURS.convert("YCbCr"), "TIFF", compression="tiff_lzw"), None),
    "LAB": (stored(lab(), "TIFF"), None),
    "I;16": (stored(deep()), GREY),
    "I;16, little endian": (stored(deep(), "TIFF"), GREY),
    "I;16B": (stored(deep(">u2"), "TIFF"), GREY),
    "I;16, wavelets": (stored(deep(), "JPEG2000"), GREY),
    "I, of 16 bits": (b"P5 16 24 65535\n" + (LEVELS.astype(">u2") * 257).tobytes(), GREY),
    "RGB, turned": (stored(COLOURS, exif=TURNED), None),
    "RGB, turned, JPEG": (stored(COLOURS, "JPEG", exif=TURNED), None),
    "I;16, turned": (stored(deep(), exif=TURNED), GREY.transpose(Image.Transpose.ROTATE_270)),
    "three high": (stored(COLOURS.crop((0, 0, 16, 3))), None),
    "three by three": (stored(COLOURS.crop((4, 4, 7, 7))), None),
    "one high": (stored(COLOURS.crop((0, 9, 16, 10))), None),
}


@pytest.fixture(scope="module")
def task() -> ImageClassification:
    made = build_task(parse_recipe(RECIPE, name="images.yaml", directory=Path()))
    assert isinstance(made, ImageClassification)
    return made


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the source of a recipe reads of all files."""
    rows = image_rows(tmp_path_factory.mktemp("images") / "rows.parquet", *((FILES[name][0], name) for name in FILES))
    found = HuggingFaceSource("parquet", data_files=[rows], text_column=None, streaming=False).documents("seed")
    return {document.content["label"]: document.content["image"] for document in found}  # type: ignore[index,call-overload]


def pixels(task: ImageClassification, image: Any) -> Any:
    return task.encode({"image": image, "label": 0})["pixel_values"]


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", FILES)
def test_an_image_of_each_mode_has_the_values_of_its_file(
    name: str, task: ImageClassification, read: dict[str, Any]
) -> None:
    from datasets import Image as Column
    from transformers.image_utils import load_image

    data, right = FILES[name]
    image = load_image(right or Column().decode_example({"bytes": data, "path": None}))
    expected = task.processor(image, return_tensors="np")["pixel_values"][0]
    found = pixels(task, read[name])
    assert found.shape == (3, 24, 24)
    assert (found.mean(), found.std()) == (
        pytest.approx(expected.mean(), abs=0.005), pytest.approx(expected.std(), abs=0.005)
    )  # fmt: skip
    assert np.abs(found - expected).max() < 0.02


def test_numbers_without_a_white_are_left_out_by_name(task: ImageClassification) -> None:
    for kind in (np.int32, np.float32):
        file = stored(Image.fromarray(LEVELS.astype(kind)), "TIFF")
        with pytest.raises(BadRow, match=r"nobody knows which number is white in mode [IF]; save it with 8 or 16 bits"):
            pixels(task, Image.open(io.BytesIO(file)))


def test_a_large_jpeg_is_turned_and_has_its_mean_and_deviation_though_it_is_not_decoded_whole(
    task: ImageClassification,
) -> None:
    from transformers.image_utils import load_image

    noise = Image.effect_noise((640, 400), 60).resize((1600, 1000))
    noise.paste(255, (0, 0, 1600, 250))
    file = stored(noise.convert("RGB"), "JPEG", exif=TURNED)
    image = Image.open(io.BytesIO(file))
    found = pixels(task, image)
    assert image.size == (125, 200), "an eighth, upright"
    expected = task.processor(load_image(Image.open(io.BytesIO(file))), return_tensors="np")["pixel_values"][0]
    assert found.mean() == pytest.approx(expected.mean(), abs=0.005)
    assert found.std() == pytest.approx(expected.std(), abs=0.005)


def test_the_mode_of_a_column_counts(tmp_path: Path, task: ImageClassification) -> None:
    import datasets

    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": stored(COLOURS), "path": None}]},
        features=datasets.Features({"image": datasets.Image(mode="L")}),
    )
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    source = HuggingFaceSource("parquet", data_files=[str(tmp_path / "rows.parquet")], text_column=None)
    (document,) = source.documents("seed")
    assert isinstance(document.content, dict)
    assert np.array_equal(pixels(task, document.content["image"]), pixels(task, rows[0]["image"]))


def test_a_processor_that_keeps_the_shape_of_images_is_refused_where_a_batch_has_several() -> None:
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    made: Any = build_task(parse_recipe(RECIPE, name="images.yaml", directory=Path()))
    made.processor = BitImageProcessorPil(size={"shortest_edge": 24}, do_center_crop=False)
    samples = [made.encode({"image": image, "label": 0}) for image in (COLOURS, COLOURS.rotate(90, expand=True))]
    assert made.collate(samples[:1])["pixel_values"].shape == (1, 3, 36, 24)
    with pytest.raises(RecipeError, match="base_model: its processor makes images of unlike sizes; set crop_size"):
        made.collate(samples)
