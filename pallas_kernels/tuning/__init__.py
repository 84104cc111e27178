"""Measured configurations of the kernels, by device, operation and class of shapes.

    from pallas_kernels import tuning

    tuning.configured("decode_attention", tuning.shape_class(head_dim=128, slots=n), CONFIGS)

Each device has one JSON file, named after it, in this folder or in the one that the environment
variable JAX_LONGCTX_TUNING names; `jax-longctx bench kernels --tune` writes it. What it does not
hold runs with the kernel's own default.
"""

from pallas_kernels.tuning.table import (
    FOLDER_VARIABLE,
    Entry,
    TuningError,
    configured,
    forced,
    path_of,
    read,
    shape_class,
    write,
)

__all__ = [
    "FOLDER_VARIABLE",
    "Entry",
    "TuningError",
    "configured",
    "forced",
    "path_of",
    "read",
    "shape_class",
    "write",
]
