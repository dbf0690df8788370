from __future__ import annotations

from typing import get_args

from swarmcli.compression import NoCompression
from swarmcli.recipe.schema import Compression
from swarmcli.roles.collaboration import COMPRESSIONS


def test_every_compression_that_a_recipe_may_name_is_a_codec_of_its_own() -> None:
    assert COMPRESSIONS.keys() == set(get_args(Compression))
    assert isinstance(COMPRESSIONS["none"], NoCompression)
    assert len({codec.name for codec in COMPRESSIONS.values()}) == len(COMPRESSIONS)
    for name, codec in COMPRESSIONS.items():
        assert codec.name.startswith(name)
