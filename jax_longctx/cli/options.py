"""Options from dataclasses: the adapter to typer, and the groups of options that commands share.

A command's function takes whole dataclasses; `command` turns their fields into typer's options.
"""

import copy
import dataclasses
import functools
import inspect
import json
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
from typer.models import OptionInfo

from jax_longctx.cli import process
from jax_longctx.cli.terminal import Terminal, check_argument, check_checkpoint, check_file, save
from jax_longctx.errors import InputError
from jax_longctx.evaluation.specs import Spec
from jax_longctx.files import expanded
from jax_longctx.gone import COMMANDS
from jax_longctx.memory import peak_memory
from jax_longctx.methods import METHODS, check_method, make_method
from jax_longctx.models.presets import PRESETS, preset
from jax_longctx.run_spec import ON_DEVICES, RunSpec, run_facts
from jax_longctx.settings import AUTO, Sampling, parse_pairs

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext
    from jax_longctx.replicas import Replicas


def option(help: str, *names: str, default: Any = None, **how: Any) -> Any:
    """An option: a dataclass field or a command's parameter; `how` is passed to `typer.Option`.

    A default of `...` makes the option required.
    """
    return _field(typer.Option(*names, help=help, **how), default)


def argument(help: str, default: Any = None, **how: Any) -> Any:
    """An argument: a dataclass field or a command's parameter."""
    return _field(typer.Argument(help=help, **how), default)


def only(*names: str) -> Any:
    """Expose only these fields of a dataclass parameter as options."""
    return dataclasses.field(metadata={"only": names})


def marked(**marks: Any) -> Any:
    """The default of a parameter, or field, whose dataclass has no marks: the marks of its fields.

    Fields without a mark are left at their defaults.
    """
    return dataclasses.field(metadata={"marks": marks})


def _field(mark: Any, default: Any) -> Any:
    default = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=default, metadata={"mark": mark})


class Command(typer.core.TyperCommand):
    """A command that refuses a second value of an option that takes one: it would lose the first.

    A contradiction of flags (--chat --no-chat) is refused, too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for each in given if not ctx.resilient_parsing else ():
            flag = getattr(each, "is_flag", False) and not each.secondary_opts
            if given.count(each) > 1 and not (flag or getattr(each, "multiple", False)):
                raise InputError(
                    f"{'/'.join([*each.opts, *each.secondary_opts])} is given "
                    f"{given.count(each)} times, and one value counts; give it once"
                )
        return super().parse_args(ctx, args)


class Group(typer.core.TyperGroup):
    """A group of commands that says what to type for one of an earlier version."""

    # Typer's own, which callbacks are annotated with.
    context_class = typer.Context

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click does; InputError for a command of an earlier version."""
        was = f"{ctx.info_name} {args[0]}"
        if args[0] not in self.commands and was in COMMANDS:
            raise InputError(f"{was} is gone; type: {COMMANDS[was]}")
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """A group of commands with these options."""

    def command(self, name: str | None = None, **how: Any) -> Any:
        """As `typer.Typer.command`."""
        return super().command(name, **{"cls": Command, **how})


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer takes it: each dataclass parameter is replaced by options.

    A dataclass's `PANEL` is the heading of its options in the help.
    """
    given = inspect.signature(function, eval_str=True).parameters.values()
    parts = {each.name: _options(each.name, each.annotation, each.default) for each in given}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        function(**{name: make(values) for name, (_, make) in parts.items()})

    flat = [parameter for parameters, _ in parts.values() for parameter in parameters]
    described: Any = run
    described.__signature__ = inspect.Signature(flat)
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


def _options(
    name: str, kind: Any, field: Any, panel: str | None = None, chosen: Any = None
) -> tuple[list[inspect.Parameter], Callable[[dict[str, Any]], Any]]:
    """A parameter's or field's options, and the function from their values to its value."""
    if not dataclasses.is_dataclass(kind):
        return [_parameter(name, kind, field, panel)], lambda values: values[name]
    about = getattr(field, "metadata", {})
    fields = {each.name: each for each in dataclasses.fields(kind) if each.metadata}
    fields, chosen = about.get("marks", fields), about.get("only", chosen)
    make_it: Any = kind
    hints, panel = typing.get_type_hints(kind), getattr(kind, "PANEL", panel)
    parts = {
        key: _options(key, hints[key], each, panel, chosen)
        for key, each in fields.items()
        if chosen is None or key in chosen or "marks" in each.metadata
    }
    return [parameter for parameters, _ in parts.values() for parameter in parameters], (
        lambda values: make_it(**{key: make(values) for key, (_, make) in parts.items()})
    )


def _parameter(name: str, kind: Any, field: Any, panel: str | None) -> inspect.Parameter:
    """A keyword parameter for typer. One that is no `option` or `argument` stays unchanged."""
    if isinstance(field, dataclasses.Field):
        # What Python gives as an object, as a mesh, is text here.
        mark, kind = copy.copy(field.metadata["mark"]), str | None if kind is Any else kind
        if isinstance(mark, OptionInfo):
            mark.rich_help_panel = mark.rich_help_panel or panel
        if {Path, list[Path]} & {kind, *typing.get_args(kind)}:
            mark.callback, mark.exists = _at_home(copy.copy(mark)), False
        kind, field = Annotated[kind, mark], field.default
    default = inspect.Parameter.empty if field is dataclasses.MISSING else field
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _at_home(mark: Any) -> Callable[[Any], Any]:
    """The callback of a path option: expands `~`, then runs typer's and the option's own check."""
    noun = "path" if mark.file_okay and mark.dir_okay else "dir" if mark.dir_okay else "file"

    def callback(value: Any) -> Any:
        many = isinstance(value, list)
        paths = [expanded(each) for each in (value if many else [value]) if each is not None]
        for path in paths:
            if mark.exists and not os.path.exists(path):
                raise typer.BadParameter(f"{noun} {str(path)!r} does not exist.")
        value = paths if many else next(iter(paths), None)
        return value if mark.callback is None else mark.callback(value)

    return callback


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """An option's callback for typer; `check` raises an error for a bad value."""

    def callback(value: Any) -> Any:
        if value is not None:
            check(value)
        return value

    return callback


def template_variables(pairs: Iterable[str]) -> dict[str, Any]:
    """The values of `--template`: JSON, else text. InputError for others."""
    found: dict[str, Any] = {}
    for key, text in parse_pairs(pairs, "--template").items():
        try:
            found[key] = json.loads(text)
        except (ValueError, RecursionError):
            found[key] = text
    return found


def parse_specs(specs: list[str] | None) -> list[Spec]:
    """The values of `--method`, with known names; full attention without any."""
    parsed = [Spec.parse(text) for text in specs or ["full"]]
    for spec in parsed:
        check_method(spec.name)
    return parsed


def _named(table: Iterable[str]) -> Callable[[str], list[str]]:
    """The shell completion of a name in `table`."""
    return lambda incomplete: [name for name in table if name.startswith(incomplete)]


ONE_METHOD = {"callback": checked(check_method), "autocompletion": _named(METHODS)}


def methods(
    help: str = "A method and its settings; repeat for several. Exact attention unless given.",
    default: Any = None,
) -> Any:
    """`--method NAME:KEY=VALUE,...`: `list[str] | None`."""
    how: dict[str, Any] = {"callback": checked(parse_specs), "autocompletion": _named(METHODS)}
    metavar = "NAME[:KEY=VALUE,...]"
    return option(help, "--method", "-m", default=default, metavar=metavar, **how)


def settings() -> Any:
    """`--set KEY=VALUE`: `list[str] | None`."""
    return option(
        "A setting of the method; may be repeated. [bold]jax-longctx methods NAME[/bold] lists "
        "them.",
        "--set",
        metavar="KEY=VALUE",
        callback=checked(parse_pairs),
    )


def dtype(default: str | None = None) -> Any:
    """`--dtype`: `str | None`."""
    help = (
        "float32, bfloat16 or float16, for weights and cache; the checkpoint's unless given. Two "
        "bytes halve the memory; on a CPU float32 is the fastest."
    )
    return option(help, default=default, metavar="DTYPE")


def mesh(
    help: str = "Devices, e.g. data=1,seq=2,tensor=4: tensor splits weights and heads, seq the "
    "cache of one long text, data the rows of a batch; or auto, for the fastest steps by the "
    "arithmetic of [bold]jax-longctx plan[/bold]. One device unless given.",
) -> Any:
    """`--mesh`: `str | None`; the number of devices is checked later."""
    return option(help, metavar="SIZES")


# The options of a `RunSpec`.
RUN = {
    "dtype": dtype(),
    "mesh": mesh(),
    "chunk": option(
        "Tokens of a prefill pass. Larger is faster on an accelerator, smaller needs less memory; "
        "the answer stays the same.",
        default=512,
    ),
    "kv": option(
        "bfloat16 or int8, for the keys and values of caches; the weights' dtype unless given. "
        "int8 nearly halves the caches, under every method.",
        metavar="FORM",
    ),
    "weights": option(
        "bfloat16 or int8, for the matrices of the layers; the checkpoint's form or --dtype unless "
        "given. int8 is made as the weights load, and nearly halves them.",
        metavar="FORM",
    ),
    "offload": option(
        "host: contexts lie in the host's memory, and the device keeps what each step reads and "
        "a working set. For infllm, quest, arkvale, resa and free-pages, and for reattention, "
        "whose keys stay on the device.",
        metavar="PLACE",
    ),
    "working_set": option(
        "Tokens of a row that each layer keeps on the device of an offloaded context, beside the "
        "first and the newest; 4 times what a step chooses unless given.",
        metavar="TOKENS",
    ),
    "reading": option(
        "xattention, flex or vertical-slash: a long text is read faster, by attention to the "
        "blocks of it that together reach an estimated share, 0.95 or as xattention:mass=0.98 "
        "says. For methods that read exactly, on a GPU with a --chunk of 2048 or more. dense "
        "unless given.",
        metavar="NAME",
    ),
}


def run(*names: str, **marks: Any) -> Any:
    """The options of a `RunSpec`, or of the fields `names`; `marks` replaces some."""
    return marked(**{name: {**RUN, **marks}[name] for name in names or RUN})


def shape(default: str = "llama-3.1-8b", names: tuple[str, ...] = ()) -> Any:
    """`--model`, or `names`: `str`."""
    how: dict[str, Any] = {"callback": checked(preset), "autocompletion": _named(PRESETS)}
    return option("Shape of a published model.", *names, default=default, **how)


def as_json() -> Any:
    """`--json`: `bool`."""
    help = "One JSON object a line on stdout, nothing else."
    return option(help, "--json", default=False, show_default=False)


def chat_template() -> Any:
    """`--chat/--no-chat`: `bool | None`."""
    help = (
        "The checkpoint's chat template, or a plain 'Question: ... Answer:'. The template is used "
        "where there is one."
    )
    return option(help, "--chat/--no-chat", show_default=False)


def overwrite(what: str) -> Any:
    """`--overwrite`: `bool`."""
    help = f"Replace {what} that was made from something else; without it that is an error."
    return option(help, "--overwrite", default=False, show_default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """One method by name, and its settings."""

    PANEL = "Model and method"

    method: str | None = option(
        "Long-context method ([bold]jax-longctx methods[/bold] says what each buys), or two, as "
        "'snapkv > quest'. [bold]auto[/bold] chooses by the text's length, memory and questions "
        "(ask, chat, generate and plan). Unless given, ask and chat take auto, other commands "
        "exact attention.",
        "--method",
        "-m",
        metavar="NAME",
        callback=checked(lambda name: name == AUTO or check_method(name)),
        autocompletion=_named([AUTO, *METHODS]),
    )
    settings: list[str] | None = settings()

    def __post_init__(self) -> None:
        if self.settings and self.method is None:
            raise InputError("--set is for a method's settings; name the method with --method")
        if self.settings and self.method == AUTO:
            raise InputError("--method auto chooses the settings too; name a method, or drop --set")

    def make(self) -> Any:
        """The method, or None for the library's default. Imports JAX."""
        if self.method == AUTO:
            raise InputError(
                "--method auto chooses for one text, in ask, chat, generate and plan; name a "
                "method here"
            )
        settings = parse_pairs(self.settings or ())
        return None if self.method is None else make_method(self.method, settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A checkpoint and how it runs; everything is checked that needs no JAX."""

    PANEL = "Model and method"

    checkpoint: Path = option(
        "Converted checkpoint (see [bold]jax-longctx convert[/bold]).",
        "--checkpoint",
        "-c",
        default=...,
        metavar="DIR",
    )
    run: RunSpec = run()
    parse_special: bool = option(
        "Read special tokens that are written in texts, questions and messages as tokens, not as "
        "plain text.",
        "--parse-special",
        default=False,
    )
    template: list[str] | None = option(
        "A variable of the chat template, as enable_thinking=false; may be repeated.",
        metavar="KEY=VALUE",
        callback=checked(template_variables),
    )

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)

    def open(
        self,
        terminal: Terminal,
        method: MethodChoice | Spec | None = None,
        *,
        resident: bool = False,
        sizes: Callable[["LongContext"], Mapping[str, Any]] = lambda loaded: {},
        **how: Any,
    ) -> "LongContext":
        """Loads the checkpoint with method and mesh; cheap checks come first.

        `sizes` and `how` are passed to `api.load`; `choose` among it stands for a method.

        Args:
          resident: the loaded model's own contexts lie on the devices, for a command that makes an
            engine of each method and says there where contexts lie.
        """
        run, own = self.run, ON_DEVICES if resident else {}

        def asked(loaded: "LongContext") -> Mapping[str, Any]:
            given = {"say": terminal.note, **sizes(loaded)}
            # No text of the engines that will be made is divided where they offload it.
            return {**given, "divide": {"seq": 1}} if own and run.offload else given

        with terminal.starting(f"loading {self.checkpoint}"):
            if isinstance(method, Spec):
                made = make_method(method.name, dict(method.settings))
            else:
                made = None if method is None or "choose" in how else method.make()
            from jax_longctx.api import load
            from jax_longctx.memory import allow_pinned

            if own and run.offload is not None:
                # `load` is not told.
                allow_pinned()
            return load(
                self.checkpoint,
                dataclasses.replace(run, method=made, **own),
                sizes=asked,
                parse_special=self.parse_special,
                template=template_variables(self.template or ()),
                **how,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaChoice:
    """Replicas of the model on Ray in place of this process."""

    PANEL = "Replicas"

    replicas: int | None = option(
        "Answer in so many processes, each with the model on a [bold]--mesh[/bold] of its own, on "
        "this machine or [bold]--address[/bold]. Needs the extra 'ray'.",
        metavar="N",
    )
    address: str | None = option(
        "HOST:PORT of a Ray cluster that this machine is a node of, or auto for the one that runs "
        "here. All nodes must see the checkpoint and the input at the same paths.",
    )

    def __post_init__(self) -> None:
        if self.address is not None and self.replicas is None:
            raise InputError("--address is the cluster of --replicas; say how many with --replicas")
        if self.replicas is not None and process.number() is not None:
            raise InputError("--replicas are started by one process, not by each of a job")

    @staticmethod
    def check(model: ModelChoice) -> None:
        """Raises InputError for a mesh of all devices, which no replica has."""
        if model.run.mesh == AUTO:
            raise InputError(
                "--mesh auto takes all devices, and each replica needs its own; name the axes of "
                "one replica's, as --mesh tensor=2"
            )

    def of(
        self, model: ModelChoice, method: "MethodChoice | None" = None, **how: Any
    ) -> "Replicas | None":
        """The replicas, or None where this process answers; `how` is as of `ModelChoice.open`."""
        if self.replicas is None:
            return None
        self.check(model)
        from jax_longctx.replicas import Replicas

        def opened() -> "LongContext":
            """The model, in a process of its own."""
            return model.open(Terminal(), method, **how)

        return Replicas(self.replicas, opened, model.run.mesh, self.address)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerChoice:
    """How answers are sampled and where they end."""

    PANEL = "Answer"

    max_tokens: int = option("Longest answer in tokens.", default=128)
    temperature: float = option("0 takes the likeliest token; higher is more varied.", default=0.0)
    top_k: int = option("Sample from the k likeliest tokens only; 0 is all.", default=0)
    top_p: float = option(
        "Sample from the likeliest tokens that together reach probability p; 1 is all.", default=1.0
    )
    min_p: float = option(
        "Sample from tokens of at least this share of the likeliest one's probability; 0 is all.",
        default=0.0,
    )
    repetition_penalty: float = option(
        "Above 1 makes tokens that were used already less likely; 1 is off.", default=1.0
    )
    presence_penalty: float = option("Above 0 makes tokens of the answer less likely.", default=0.0)
    frequency_penalty: float = option("The same, each time that they are there.", default=0.0)
    seed: int = option(
        "Seed of sampling. A prompt's samples depend on the seed and on its place (line of a "
        "batch, number of a question), not on the other rows of its batch.",
        default=0,
    )
    schema: Path | None = option(
        "The answer is JSON that is valid for this JSON schema. Needs the extra 'forms'.",
        metavar="FILE",
    )
    stop: list[str] | None = option(
        "End the answer before this text; may be repeated.", metavar="TEXT"
    )

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
        """The engine's sampling options. Raises InputError for a value out of range."""
        names = {field.name for field in dataclasses.fields(Sampling)} - {"form"}
        return Sampling(**{name: getattr(self, name) for name in names}, form=self._form)

    @functools.cached_property
    def _form(self) -> str | None:
        if self.schema is None:
            return None
        # Imported late: it imports numpy and tokenizers.
        from jax_longctx.forms import form_of_file

        return form_of_file(self.schema)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `LongContext.ask` and `generate`."""
        stop = tuple(self.stop or ())
        return {"sampling": self.sampling, "max_tokens": self.max_tokens, "stop": stop}

    def record(
        self,
        model: "LongContext",
        answer: "Answer",
        tokens: dict[str, int],
        prefill: float,
        memory: dict[str, int],
        compiled: float,
    ) -> dict[str, Any]:
        """The JSON record of an answer; `tokens` and `memory` give the context's numbers.

        `compiled` are seconds of compilation, which the other times leave out.
        """
        return {
            "answer": answer.text,
            "finish": answer.finish,
            "warning": answer.warning,
            "tokens": {**tokens, "answer": len(answer.tokens)},
            "seconds": {
                "compile": round(compiled, 4),
                "prefill": round(prefill, 4),
                "first_token": round(answer.first_token_seconds, 4),
                "decode": round(answer.decode_seconds, 4),
            },
            "memory": {**memory, "peak_bytes": peak_memory()},
            **({} if answer.fetched is None else {"fetched": answer.fetched.record()}),
            **run_facts(model.engine),
            **self.arguments(),
            "sampling": self.sampling.record(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go: a file, and a table or JSON on stdout."""

    out: Path | None = option("Write everything to this JSON file.", "--out", "-o")
    as_json: bool = as_json()

    def __post_init__(self) -> None:
        check_file(self.out)

    def terminal(self) -> Terminal:
        return Terminal(as_json=self.as_json)

    def save(self, result: Any) -> None:
        """Writes the file atomically."""
        save(result, self.out)

    def hand_over(self, result: Any, shown: Callable[[Any], Iterable[Any]]) -> None:
        """Writes the file, and prints JSON or the tables and lines of `shown` on stdout."""
        self.save(result)
        self.terminal().result(result, shown)
