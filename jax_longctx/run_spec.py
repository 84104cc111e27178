"""`RunSpec`: how a model runs: its method, its devices, and the form and place of what it stores.

It is made once, from flags, TOML or Python, checked as it is made, and passed whole. It needs no
JAX until `devices` is called. `engine.capacity.setup_of` makes the static part of programs of it.
"""

import dataclasses
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypedDict

import jax_longctx
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import settings_of
from jax_longctx.settings import (
    AUTO,
    DTYPES,
    Offload,
    Reading,
    StoredForm,
    check_name,
    parse_mesh,
    parse_reading,
    stored_form,
)

if TYPE_CHECKING:
    from jax_longctx.engine import Engine

# Where contexts may lie beside the devices.
PLACES = ("host",)
# Fields of a spec of contexts that are not offloaded.
ON_DEVICES: dict[str, Any] = {"offload": None, "working_set": None}


class RunFields(TypedDict, total=False):
    """Fields of `RunSpec`, as keywords of `load`."""

    method: Any
    mesh: Any
    dtype: str | None
    chunk: int
    kv: str | None
    weights: str | None
    offload: str | None
    working_set: int | None
    reading: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
    """How a model runs.

    Attributes:
      method: a long-context method; None for full attention.
      mesh: devices: their numbers along the axes, as "seq=2,tensor=4", or a mesh (`make_mesh`);
        "auto" where `load` and the commands choose them; None for one device.
      dtype: of weights and caches: "float32", "bfloat16" or "float16"; None for the
        checkpoint's.
      chunk: tokens of a row that one prefill pass takes.
      kv: "int8" for caches that hold keys and values in 8 bits (see `pallas_kernels.quantised`);
        None, or "bfloat16" beside bfloat16 weights, for the weights' dtype.
      weights: "int8" for the layers' matrices in 8 bits; None, or "bfloat16" beside dtype bfloat16,
        for `dtype`, or for the checkpoint's own form.
      offload: "host" for contexts in the host's memory; the device keeps what every step reads,
        and a working set (see `caches.offloaded`). None for the devices' memory.
      working_set: tokens of a row that the working set of each layer holds; None for
        `settings.SHARES` times what a step chooses.
      reading: how a text's earlier keys are read: "dense" for all of them; "xattention", "flex" or
        "vertical-slash" for blocks that it chooses, with settings as "xattention:mass=0.98". None
        for "dense".

    Raises:
      ConfigError: an unknown name, or a working set of contexts that are not offloaded.
      InputError: `chunk` is below 1.
    """

    method: Any = None
    mesh: Any = None
    dtype: str | None = None
    chunk: int = 512
    kv: str | None = None
    weights: str | None = None
    offload: str | None = None
    working_set: int | None = None
    reading: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str) and self.mesh != AUTO:
            parse_mesh(self.mesh)
        if self.dtype is not None:
            check_name(DTYPES, self.dtype, "dtype")
        if self.chunk < 1:
            raise InputError(f"chunk must be at least 1 token, got {self.chunk}")
        stored_form("kv", self.kv, self.dtype or "bfloat16")
        _ = self.form, self.tier, self.reader

    @property
    def tier(self) -> Offload | None:
        """Where contexts lie, if not on the devices; else None."""
        if self.offload is None:
            if self.working_set is not None:
                raise ConfigError("working_set is for offloaded contexts; give offload host too")
            return None
        check_name(PLACES, self.offload, "offload")
        return Offload(self.working_set)

    @property
    def reader(self) -> Reading | None:
        """How earlier keys are read, if not all of them; else None."""
        return parse_reading(self.reading)

    @property
    def form(self) -> StoredForm | None:
        """The 8-bit form of the layers' matrices that `weights` names; None for none."""
        return stored_form("weights", self.weights, self.dtype or "bfloat16")

    def over(self, dtype: str, weights: StoredForm | None = None) -> "RunSpec":
        """The spec for weights of this dtype and 8-bit form; its own fields come first.

        Raises:
          ConfigError: `weights` of the spec is no form that these weights can be brought to.
        """
        dtype = self.dtype or dtype
        return dataclasses.replace(
            self, dtype=dtype, weights=stored_form("weights", self.weights, dtype, weights)
        )

    def chosen(self) -> Any:
        """The method."""
        from jax_longctx.methods.full import Full

        return self.method or Full()

    def devices(self) -> Any:
        """The mesh; JAX's devices start. ConfigError where there are too few.

        A mesh "auto" of several devices is a ConfigError: it is chosen before (`on_best_mesh`).
        """
        if not (self.mesh is None or isinstance(self.mesh, str)):
            return self.mesh
        import jax

        from jax_longctx.memory import allow_pinned
        from jax_longctx.sharding import make_mesh

        if self.offload is not None:
            # Before a mesh starts the devices.
            allow_pinned()
        auto = self.mesh == AUTO
        if auto and jax.device_count() > 1:
            raise ConfigError(
                "mesh auto is chosen for a text, by `load` and the commands that decode; name the "
                "axes here, as tensor=2"
            )
        sizes: dict[str, Any] = dict(parse_mesh("" if auto else self.mesh or ""))
        return make_mesh(**sizes)

    def facts(self) -> dict[str, Any]:
        """What records say of the run, without method and devices."""
        names = ("dtype", "chunk", "kv", "weights", "offload", "working_set", "reading")
        return {name: getattr(self, name) for name in names}


def run_facts(engine: "Engine") -> dict[str, Any]:
    """The part of a JSON record that describes the run: method, settings, device, versions."""
    chosen, setup = settings_of(engine.method), engine.setup
    device = engine.mesh.devices.flat[0]
    return {
        "method": chosen["name"],
        "settings": chosen["settings"],
        "kv": setup.kv,
        "weights": setup.weights,
        "offload": None if setup.offload is None else dataclasses.asdict(setup.offload),
        "reading": None if setup.reading is None else dataclasses.asdict(setup.reading),
        "device": device.device_kind,
        "mesh": dict(engine.mesh.shape),
        "versions": {
            "jax_longctx": jax_longctx.__version__,
            "jax": metadata.version("jax"),
            "python": platform.python_version(),
        },
    }
