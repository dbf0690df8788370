"""Image classification: sort images, with any such model of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarmcli.recipe.pretrained import saved_model
from swarmcli.training.chat import BadRow
from swarmcli.training.models import ModelKind
from swarmcli.training.samples import Example, stacked
from swarmcli.training.sources import USUAL
from swarmcli.training.task import Batch
from swarmcli.training.tasks.base import RowTask
from swarmcli.training.tasks.labels import LabelledTask
from swarmcli.words import first_words


class ImageClassification(LabelledTask, RowTask):
    """The task `image_classification` of a recipe. A sample is an image in the size that the model reads."""

    kind = ModelKind(
        auto="AutoModelForImageClassification",
        listed="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        called="models that sort images",
        usual=("convnext", "dinov2", "mobilenet_v2", "resnet", "swin", "vit"),
        foreign="",  # transformers takes the part for images out of composite models
    )
    columns = ("image", "label")

    @cached_property
    def processor(self) -> Any:
        """The saved model's image processor, or one that scales images to the size in the config and colours to -1 …
        1."""
        if (saved := saved_model(self.recipe)) is not None:
            return self._saved_processor(saved.directory())
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        config: Any = self._models.build(outline=True).config
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", 224)  # resnet and its like read any size; most were made for this one
        height, width = (size, size) if isinstance(size, int) else size
        return ViTImageProcessorPil(size={"height": height, "width": width})

    def _saved_processor(self, directory: Path) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(
                str(directory),
                backend="pil",
                local_files_only=True,
                trust_remote_code=self.recipe.local.trust_remote_code,
            )
        except Exception as error:  # transformers raises many kinds
            problem = f"no image processor can be read from {directory} ({first_words(error)})"
            raise self._refuse(problem, "save one there with save_pretrained") from error

    @property
    def threads(self) -> int:
        """As many threads as this process has for its arithmetic: that is its share of the processors."""
        _ = self._enough  # loads the processor before several threads ask for it
        return min(torch.get_num_threads(), USUAL.most_decoders)

    @cached_property
    def _enough(self) -> tuple[int, int] | None:
        """The size down to which a JPEG may be decoded: at a half, a quarter or an eighth of its own, while that leaves
        twice the pixels that it is scaled to. The result is nearly the same (Pillow, Image.thumbnail). None: always
        whole."""
        sizes = [getattr(self.processor, name, None) or {} for name in ("size", "crop_size")]
        edge = 2 * max((value for each in sizes for value in dict(each).values()), default=0)
        return (edge, edge) if edge and self.processor.do_resize else None

    def encode(self, row: Mapping[str, Any]) -> Example:
        image = row["image"]
        if not hasattr(image, "convert"):
            raise BadRow(
                f"image is {image!r:.80}, and should be an image; read files with `path: imagefolder`, or "
                "name another column by `columns`"
            )
        try:
            image.draft("RGB", self._enough)
            image = _in_colours(image)
        except Exception as error:  # pillow raises many kinds
            raise BadRow(f"an image cannot be decoded ({first_words(error)})") from error
        # One call does all: a processor that swaps the order of the colours would do so in each call.
        made = self.processor(image, return_tensors="np")
        return {"pixel_values": made["pixel_values"][0], "labels": np.asarray(self.number_of(row["label"]))}

    def collate(self, samples: Sequence[Example]) -> Batch:
        if len({sample["pixel_values"].shape for sample in samples}) > 1:
            raise self._refuse("its processor makes images of unlike sizes", "set crop_size there")
        return stacked(samples)

    def example(self, length: int) -> dict[str, Any]:
        from PIL import Image

        return {"image": Image.new("RGB", (64, 64)), "label": self.recipe.labels[0]}

    def save_preprocessing(self, directory: Path) -> None:
        self.processor.save_pretrained(str(directory))


def _in_colours(image: Any) -> Any:
    """Decodes an image as the library `datasets` does, and makes it RGB as transformers' pipelines do, which leave
    transparency out. Of 16 bits of grey the upper 8 count, as Pillow has it for those of colours. Raises ValueError for
    numbers without a known white."""
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if mode := getattr(image, "mode_of_column", None):
        image = image.convert(mode)
    elif image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"nobody knows which number is white in mode {image.mode}; save it with 8 or 16 bits")
    return image.convert("RGB")
