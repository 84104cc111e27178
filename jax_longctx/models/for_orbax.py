"""What makes `orbax.checkpoint` load arrays that TensorStore wrote."""

import json
from collections.abc import Iterable
from pathlib import Path

from jax_longctx.files import write_text

# What Orbax reads such a folder with, by its own name.
HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def describe(folder: Path, arrays: str, paths: Iterable[str]) -> None:
    """Describes the arrays of those dot-joined paths, which lie in a folder's folder `arrays`.

    `orbax.checkpoint.v1.load(folder)` then gives a nested dict of NumPy arrays.
    """
    tree = {}
    for keys in (path.split(".") for path in paths):
        named = [{"key": key, "key_type": 2} for key in keys]
        value = {"value_type": "np.ndarray", "skip_deserialize": False}
        tree[str((*keys,))] = {"key_metadata": named, "value_metadata": value}
    layout = {"use_ocdbt": True, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    write_text(folder / arrays / "_METADATA", json.dumps({"tree_metadata": tree, **layout}))
    write_text(folder / "_CHECKPOINT_METADATA", json.dumps({"item_handlers": {arrays: HANDLER}}))
    write_text(folder / "orbax.checkpoint", "")
