"""Options that several commands share: their help, and what they mean to the library."""

import dataclasses
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jax_longctx.cli.start import starting
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import METHODS, check_method
from jax_longctx.models.presets import PRESETS, preset

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.engine import Sampling

__all__ = [
    "AsJson",
    "Checkpoint",
    "Chunk",
    "Dtype",
    "MaxTokens",
    "MeshSizes",
    "MethodName",
    "MethodSpecs",
    "ModelChoice",
    "Penalty",
    "Preset",
    "Seed",
    "Settings",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "checked_checkpoint",
    "checked_dtype",
    "checked_method",
    "checked_methods",
    "make_sampling",
    "method_names",
    "run_facts",
]

_MODEL = "Model and method"
_ANSWER = "Answer"


def checked_checkpoint(folder: Path | None) -> Path | None:
    """CheckpointError where there is none; what it holds is checked when it is loaded."""
    if folder is not None and not (folder / "manifest.json").is_file():
        raise CheckpointError(
            f"{folder} is not a converted checkpoint (no manifest.json); "
            f"make one: jax-longctx convert SOURCE DESTINATION"
        )
    return folder


def method_names(incomplete: str) -> list[str]:
    """Those that begin so, for the shell's completion."""
    return [name for name in METHODS if name.startswith(incomplete)]


def checked_method(name: str | None) -> str | None:
    """ConfigError where there is no method of that name."""
    if name is not None:
        check_method(name)
    return name


def checked_methods(specs: list[str] | None) -> list[str] | None:
    """ConfigError where one of `NAME:KEY=VALUE,...` names no method."""
    for spec in specs or ():
        check_method(Spec.parse(spec).name)
    return specs


def _preset(name: str) -> str:
    preset(name)
    return name


def checked_dtype(name: str | None) -> str | None:
    """The name of a float type that models run in."""
    known = ("float32", "bfloat16", "float16")
    if name is not None and name not in known:
        raise ConfigError(f"--dtype {name!r} is not one of {', '.join(known)}")
    return name


Checkpoint = Annotated[
    Path,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="DIR",
        help="Converted checkpoint (see [bold]jax-longctx convert[/bold]).",
        rich_help_panel=_MODEL,
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        callback=checked_method,
        autocompletion=method_names,
        help="Long-context method; [bold]jax-longctx methods[/bold] says what each buys. "
        "Exact attention unless given.",
        rich_help_panel=_MODEL,
    ),
]
MethodSpecs = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME[:KEY=VALUE,...]",
        callback=checked_methods,
        autocompletion=method_names,
        help="A method and its settings; repeat for several. Exact attention unless given.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of the method; may be repeated. "
        "[bold]jax-longctx methods NAME[/bold] lists them.",
        rich_help_panel=_MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        callback=checked_dtype,
        help="float32, bfloat16 or float16, for weights and cache; the checkpoint's unless given. "
        "Two bytes halve the memory; on a CPU float32 is the fastest.",
        rich_help_panel=_MODEL,
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        callback=_preset,
        autocompletion=lambda incomplete: [n for n in PRESETS if n.startswith(incomplete)],
        help="Shape of a published model.",
    ),
]
MeshSizes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="SIZES",
        help="Devices, e.g. data=1,seq=2,tensor=4: tensor splits weights and heads, seq the "
        "cache of one long text, data the rows of a batch. One device unless given.",
        rich_help_panel=_MODEL,
    ),
]
Chunk = Annotated[
    int,
    typer.Option(
        help="Tokens read in one pass. Larger is faster on an accelerator, smaller needs less "
        "memory; the answer stays the same.",
        rich_help_panel=_MODEL,
    ),
]
ByLayer = Annotated[
    bool,
    typer.Option(
        "--by-layer",
        help="Compile one layer in place of all: ready sooner and slower from then on, for few and "
        "short texts.",
        rich_help_panel=_MODEL,
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Longest answer in tokens.", rich_help_panel=_ANSWER)]
Temperature = Annotated[
    float,
    typer.Option(
        help="0 takes the likeliest token; higher is more varied.", rich_help_panel=_ANSWER
    ),
]
TopK = Annotated[
    int,
    typer.Option(help="Draw from the k likeliest tokens only; 0 is all.", rich_help_panel=_ANSWER),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Draw from the likeliest tokens that together reach probability p; 1 is all.",
        rich_help_panel=_ANSWER,
    ),
]
Penalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        help="Above 1 makes tokens that were used already less likely; 1 is off.",
        rich_help_panel=_ANSWER,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Of the draws. A prompt draws by this and its place (the line of a batch, the number "
        "of a question), whatever is computed beside it.",
        rich_help_panel=_ANSWER,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End the answer before this text; may be repeated.",
        rich_help_panel=_ANSWER,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="One JSON object a line on stdout, nothing else.", show_default=False
    ),
]


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """The options of one loaded model, as given; what needs no JAX is checked."""

    checkpoint: Path
    method: str | None = None
    settings: list[str] | None = None
    mesh: str | None = None
    dtype: str | None = None
    chunk: int = 512
    by_layer: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"--chunk must be at least 1 token, got {self.chunk}")
        checked_checkpoint(self.checkpoint)
        checked_dtype(self.dtype)

    def make_method(self) -> Any:
        """The method with its settings, or None for the library's default."""
        settings = parse_settings(self.settings or ())
        if self.method is None:
            if settings:
                raise InputError("--set is for a method's settings; name the method with --method")
            return None
        from jax_longctx.methods import make_method

        return make_method(self.method, settings)

    def open(self, terminal: Terminal) -> "LongContext":
        """The checkpoint with method and mesh; what costs nothing is checked first."""
        with starting(terminal, f"loading {self.checkpoint}"):
            method = self.make_method()
            import jax_longctx
            from jax_longctx.sharding import make_mesh, parse_mesh

            mesh = None
            if self.mesh is not None:
                sizes = parse_mesh(self.mesh)
                mesh = make_mesh(sizes.get("data", 1), sizes.get("seq", 1), sizes.get("tensor", 1))
            return jax_longctx.load(
                self.checkpoint,
                method=method,
                mesh=mesh,
                dtype=self.dtype,
                chunk=self.chunk,
                by_layer=self.by_layer,
            )


def parse_settings(pairs: list[str] | tuple[()]) -> dict[str, str]:
    """`["budget=512"]` -> `{"budget": "512"}`; the method gives them their types."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise InputError(f"--set {pair!r} is not understood; expected KEY=VALUE")
        if key in settings:
            raise InputError(f"--set {key} is given twice; give it once")
        settings[key] = value
    return settings


def make_sampling(
    temperature: float, top_k: int, top_p: float, repetition_penalty: float, seed: int
) -> "Sampling":
    """The sampling options as the engine takes them, with seeds that fit its random keys."""
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed must be at least 0 and below 2**32, got {seed}")
    from jax_longctx.engine import Sampling

    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )


def run_facts(model: "LongContext") -> dict[str, Any]:
    """What a JSON record says of the run: method, settings, device, versions."""
    from jax_longctx.methods import settings_of

    chosen = settings_of(model.engine.method)
    device = model.engine.mesh.devices.flat[0]
    return {
        "method": chosen["name"],
        "settings": chosen["settings"],
        "device": device.device_kind,
        "mesh": dict(model.engine.mesh.shape),
        "versions": {
            "jax_longctx": metadata.version("jax-longctx"),
            "jax": metadata.version("jax"),
            "python": platform.python_version(),
        },
    }
