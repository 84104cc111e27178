"""Options from dataclasses: the adapter, the groups that commands share, what these mean.

A command's function takes dataclasses whole; `command` makes typer's options of their fields.
"""

import copy
import dataclasses
import functools
import inspect
import platform
import typing
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from jax_longctx.cli.terminal import Terminal, check_argument, check_file, save
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.memory import peak_memory
from jax_longctx.methods import METHODS, check_method, make_method, settings_of
from jax_longctx.models.presets import PRESETS, preset
from jax_longctx.settings import Sampling, parse_mesh, parse_pairs

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext


class Only:
    """Beside a parameter's dataclass: the fields that are options, where not all are."""

    def __init__(self, *names: str):
        self.names = names


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: a parameter that is a dataclass becomes its fields' options.

    A field's annotation carries typer's option or argument, as a plain parameter's does, or its
    help alone. `PANEL` of a dataclass is the heading of its options in the help.
    """
    groups: dict[str, tuple[Any, list[str]]] = {}
    flat: list[inspect.Parameter] = []
    for given in inspect.signature(function, eval_str=True).parameters.values():
        kind, *marks = _parts(given.annotation)
        if not dataclasses.is_dataclass(kind):
            flat.append(_parameter(given.name, given.annotation, given.default))
            continue
        (only,) = [mark.names for mark in marks if isinstance(mark, Only)] or [()]
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = [each for each in dataclasses.fields(kind) if not only or each.name in only]
        groups[given.name] = kind, [each.name for each in fields]
        flat += [
            _parameter(each.name, hints[each.name], each.default, getattr(kind, "PANEL", None))
            for each in fields
        ]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        made = {
            group: kind(**{name: values.pop(name) for name in names})
            for group, (kind, names) in groups.items()
        }
        function(**made, **values)

    described: Any = run
    described.__signature__ = inspect.Signature(flat)
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


def _parts(annotation: Any) -> tuple[Any, ...]:
    """Of `Annotated[kind, *marks]` the kind and the marks."""
    is_marked = typing.get_origin(annotation) is Annotated
    return typing.get_args(annotation) if is_marked else (annotation,)


def _parameter(
    name: str, annotation: Any, default: Any, panel: str | None = None
) -> inspect.Parameter:
    """A keyword whose annotation has an option of typer's."""
    kind, *marks = _parts(annotation)
    if marks:
        (mark,) = marks
        option = typer.Option(help=mark) if isinstance(mark, str) else copy.copy(mark)
        if isinstance(option, OptionInfo):
            option.rich_help_panel = panel
        annotation = Annotated[kind, option]
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    how = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, how, default=default, annotation=annotation)


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


def _checked_preset(name: str) -> str:
    preset(name)
    return name


def _checked_dtype(name: str | None) -> str | None:
    known = ("float32", "bfloat16", "float16")
    if name is not None and name not in known:
        raise ConfigError(f"--dtype {name!r} is not one of {', '.join(known)}")
    return name


def _checked_mesh(sizes: str | None) -> str | None:
    parse_mesh(sizes or "")
    return sizes


def _checked_settings(pairs: list[str] | None) -> list[str] | None:
    parse_pairs(pairs or ())
    return pairs


def dtype_option(help: str) -> Any:
    """`--dtype`, checked."""
    return typer.Option("--dtype", metavar="DTYPE", callback=_checked_dtype, help=help)


def mesh_option(help: str) -> Any:
    """`--mesh`, checked but for the devices that there are."""
    return typer.Option("--mesh", metavar="SIZES", callback=_checked_mesh, help=help)


def methods_option(help: str) -> Any:
    """`--method NAME:KEY=VALUE,...`, whose names are checked."""
    return typer.Option(
        "--method",
        "-m",
        metavar="NAME[:KEY=VALUE,...]",
        callback=checked_methods,
        autocompletion=method_names,
        help=help,
    )


MethodSpecs = Annotated[
    list[str] | None,
    methods_option(
        "A method and its settings; repeat for several. Exact attention unless given.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        callback=_checked_settings,
        help="A setting of the method; may be repeated. "
        "[bold]jax-longctx methods NAME[/bold] lists them.",
    ),
]
Dtype = Annotated[
    str | None,
    dtype_option(
        "float32, bfloat16 or float16, for weights and cache; the checkpoint's unless given. "
        "Two bytes halve the memory; on a CPU float32 is the fastest."
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        callback=_checked_preset,
        autocompletion=lambda incomplete: [n for n in PRESETS if n.startswith(incomplete)],
        help="Shape of a published model.",
    ),
]
MeshSizes = Annotated[
    str | None,
    mesh_option(
        "Devices, e.g. data=1,seq=2,tensor=4: tensor splits weights and heads, seq the "
        "cache of one long text, data the rows of a batch. One device unless given."
    ),
]
Chunk = Annotated[
    int,
    "Tokens read in one pass. Larger is faster on an accelerator, smaller needs less memory; the "
    "answer stays the same.",
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="One JSON object a line on stdout, nothing else.", show_default=False
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """One method by name, and its settings."""

    PANEL = "Model and method"

    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            callback=checked_method,
            autocompletion=method_names,
            help="Long-context method; [bold]jax-longctx methods[/bold] says what each buys. "
            "Exact attention unless given.",
        ),
    ] = None
    settings: Settings = None

    def __post_init__(self) -> None:
        if self.settings and self.method is None:
            raise InputError("--set is for a method's settings; name the method with --method")

    def make(self) -> Any:
        """The method, or None for the library's default. Imports JAX."""
        settings = parse_pairs(self.settings or ())
        return None if self.method is None else make_method(self.method, settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A checkpoint and how it is computed; what needs no JAX is checked."""

    PANEL = "Model and method"

    checkpoint: Annotated[
        Path,
        typer.Option(
            "--checkpoint",
            "-c",
            metavar="DIR",
            help="Converted checkpoint (see [bold]jax-longctx convert[/bold]).",
        ),
    ]
    dtype: Dtype = None
    mesh: MeshSizes = None
    chunk: Chunk = 512
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer",
            help="Compile one layer in place of all: ready sooner and slower from then on, for few "
            "and short texts.",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"--chunk must be at least 1 token, got {self.chunk}")
        checked_checkpoint(self.checkpoint)

    def open(self, terminal: Terminal, method: MethodChoice | Spec | None = None) -> "LongContext":
        """The checkpoint with method and mesh; what costs nothing is checked first."""
        with terminal.starting(f"loading {self.checkpoint}"):
            if isinstance(method, Spec):
                made = make_method(method.name, dict(method.settings))
            else:
                made = None if method is None else method.make()
            import jax_longctx

            sizes: dict[str, Any] = dict(parse_mesh(self.mesh or ""))
            return jax_longctx.load(
                self.checkpoint,
                method=made,
                mesh=None if self.mesh is None else jax_longctx.make_mesh(**sizes),
                dtype=self.dtype,
                chunk=self.chunk,
                by_layer=self.by_layer,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are drawn and where they end."""

    PANEL = "Answer"

    max_tokens: Annotated[int, "Longest answer in tokens."] = 128
    temperature: Annotated[float, "0 takes the likeliest token; higher is more varied."] = 0.0
    top_k: Annotated[int, "Draw from the k likeliest tokens only; 0 is all."] = 0
    top_p: Annotated[
        float, "Draw from the likeliest tokens that together reach probability p; 1 is all."
    ] = 1.0
    repetition_penalty: Annotated[
        float, "Above 1 makes tokens that were used already less likely; 1 is off."
    ] = 1.0
    seed: Annotated[
        int,
        "Of the draws. A prompt draws by this and its place (the line of a batch, the number of a "
        "question), whatever is computed beside it.",
    ] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End the answer before this text; may be repeated."),
    ] = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"--max-tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be at least 0 and below 2**32, got {self.seed}")
        for text in self.stop or ():
            if not check_argument("--stop", text):
                raise InputError("a stop string is empty; give at least one character")
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """As the engine takes it. Raises InputError where it refuses a value."""
        names = (field.name for field in dataclasses.fields(Sampling))
        return Sampling(**{name: getattr(self, name) for name in names})

    def arguments(self) -> dict[str, Any]:
        """As `LongContext.ask` and `generate` take them."""
        stop = tuple(self.stop or ())
        return {"sampling": self.sampling, "max_tokens": self.max_tokens, "stop": stop}

    def record(
        self,
        model: "LongContext",
        answer: "Answer",
        tokens: dict[str, int],
        prefill: float,
        memory: dict[str, int],
    ) -> dict[str, Any]:
        """What JSON records say of an answer; `tokens` and `memory` are of the text, too."""
        return {
            "answer": answer.text,
            "finish": answer.finish,
            "warning": answer.warning,
            "tokens": {**tokens, "answer": len(answer.tokens)},
            "seconds": {
                "prefill": round(prefill, 4),
                "first_token": round(answer.first_token_seconds, 4),
                "decode": round(answer.decode_seconds, 4),
            },
            "memory": {**memory, "peak_bytes": peak_memory()},
            **run_facts(model),
            "sampling": dataclasses.asdict(self.sampling),
            "max_tokens": self.max_tokens,
            "stop": list(self.stop or ()),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where a measurement goes: a file, and a table or JSON on stdout, from one process."""

    out: Annotated[Path | None, "Write everything to this JSON file."] = None
    as_json: AsJson = False

    def __post_init__(self) -> None:
        check_file(self.out)

    def terminal(self) -> Terminal:
        return Terminal(as_json=self.as_json)

    def save(self, result: Any) -> None:
        """Writes the file, whole or not at all."""
        save(result, self.out)

    def hand_over(self, result: Any, shown: Callable[[Any], Iterable[Any]]) -> None:
        """Writes the file, and shows the parts that `shown` makes, or the JSON, on stdout."""
        self.save(result)
        terminal = self.terminal()
        if self.as_json:
            terminal.record(result)
        else:
            terminal.show(*shown(result))


def parse_specs(specs: list[str] | None) -> list[Spec]:
    """What `--method` gives; full attention where it gives none."""
    return [Spec.parse(text) for text in specs or ["full"]]


def run_facts(model: "LongContext") -> dict[str, Any]:
    """What a JSON record says of the run: method, settings, device, versions."""
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
