"""Long-context inference methods for Llama-family models in JAX (see `jax_longctx.api`).

Names load on first use, so that `jax-longctx --help` does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext, load
    from jax_longctx.conversation import Conversation
    from jax_longctx.engine import Context, Engine, Progress, Sampling
    from jax_longctx.engine.capacity import Footprint
    from jax_longctx.errors import LongctxError, TrainedLengthWarning
    from jax_longctx.methods import METHODS, make_method
    from jax_longctx.models.config import ModelConfig
    from jax_longctx.run_spec import RunSpec
    from jax_longctx.settings import parse_mesh
    from jax_longctx.sharding import make_mesh

__all__ = [
    "METHODS",
    "Answer",
    "Context",
    "Conversation",
    "Engine",
    "Footprint",
    "LongContext",
    "LongctxError",
    "ModelConfig",
    "Progress",
    "RunSpec",
    "Sampling",
    "TrainedLengthWarning",
    "load",
    "make_mesh",
    "make_method",
    "parse_mesh",
]

# The module that defines each name.
_HOMES = {
    "api": ("Answer", "LongContext", "load"),
    "conversation": ("Conversation",),
    "engine": ("Context", "Engine", "Progress", "Sampling"),
    "engine.capacity": ("Footprint",),
    "errors": ("LongctxError", "TrainedLengthWarning"),
    "methods": ("METHODS", "make_method"),
    "models.config": ("ModelConfig",),
    "run_spec": ("RunSpec",),
    "settings": ("parse_mesh",),
    "sharding": ("make_mesh",),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Importing this takes longer than all that `jax-longctx` imports before it handles Ctrl-C.
        from importlib import metadata

        try:
            return metadata.version("jax-longctx")
        except metadata.PackageNotFoundError:
            return "not installed"  # a source tree on the path
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
