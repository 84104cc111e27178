"""`jax-longctx bench`: measured times beside a baseline and a roofline of the same run."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import typer

from jax_longctx.cli import bench_tables, options, process
from jax_longctx.cli.options import only, option
from jax_longctx.cli.terminal import (
    Terminal,
    check_file,
    check_folder,
    check_matplotlib,
    check_plot,
    save,
)
from jax_longctx.errors import InputError
from jax_longctx.files import write_whole
from jax_longctx.settings import offload_of, parse_mesh

bench_app = options.App(no_args_is_help=True, help="Measure on this device, as ratios in one run.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Methods under a model of random weights, and how they run."""

    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. All methods unless given."
    )
    model: str = options.shape(names=("--model", "--preset"))
    layers: int | None = option(
        "Time this many layers, and one, and scale to all; all unless given."
    )
    random_cache: bool = option(
        "Draw the cache at random instead of reading a context (methods that keep all keys).",
        default=False,
    )
    chunk: int = option("Tokens of a prefill pass.", default=8192, min=1)
    kv: str | None = options.kv()
    weights: str | None = options.weights()
    offload: str | None = options.offload()
    working_set: int | None = options.working_set()
    mesh: str | None = options.mesh(
        "Devices, e.g. tensor=4 or seq=2,tensor=2, without data. One device unless given."
    )
    kernels: bool = option(
        "Count the kernels of a step in a profile (on GPUs).",
        "--kernels/--no-kernels",
        default=True,
    )
    picture: Path | None = option(
        "Draw times or throughput beside the limits as a PNG.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        offload_of(self.offload, self.working_set)
        check_plot(self.picture, "--picture")

    def run(self, bench: str, names: tuple[str, ...], terminal: Terminal, **how: Any) -> Any:
        """The result of `jax_longctx.bench.BENCH`, given the fields `names`, and `how`."""
        given = {name: getattr(self, name) for name in names} | how
        with terminal.starting():
            from jax_longctx.memory import allow_pinned

            if self.offload is not None:
                allow_pinned()
            module = importlib.import_module(f"jax_longctx.bench.{bench}")
            from jax_longctx.sharding import make_mesh

        if "methods" in names:
            given["methods"] = _all_or(self.methods)
        if given["mesh"] is not None:
            sizes: Any = parse_mesh(given["mesh"])
            given["mesh"] = make_mesh(**sizes)
        return module.run(**given, say=terminal.note)

    def draw(self, result: dict[str, Any]) -> None:
        """Draws the picture that was asked for."""
        if self.picture is not None and process.is_leader():
            from jax_longctx.bench.drawing import draw

            title = f"{result['device']}, {result['model']} in bfloat16"
            draw(result["rows"], self.picture, title=title)


FORMS = ("kv", "weights")
STEPS = ("methods", "model", "random_cache", "chunk", *FORMS, "mesh", "kernels")
OFFLOADED = ("layers", "offload", "working_set")


def _runs() -> Any:
    return option("Runs; the median counts.", default=3, min=1)


@bench_app.command()
@options.command
def kernels(
    only: str = option("Run the cases whose name holds this, e.g. 'topk_scores'.", default=""),
    shrink: int = option("Take 1/N of the slots, to try it on a small device.", default=1, min=1),
    repeats: int = option("Timed loops; the median counts.", default=20, min=1),
    out: Path | None = option(
        "Write kernels.json, kernels.md and kernels.png to this folder.", "--out", "-o"
    ),
    as_json: bool = options.as_json(),
) -> None:
    """Time every kernel on this device, random bfloat16 inputs.

    The roofline is what a large copy and a large matmul reach in the same run.

    [bold]Example[/bold]

        jax-longctx bench kernels --only decode_attention --out results
    """
    check_folder(out)
    if out is not None:
        check_matplotlib("--out")
    terminal = Terminal(as_json=as_json)
    with terminal.starting():
        from jax_longctx.bench.kernels import markdown, plot, run

    result = run(only=only, shrink=shrink, repeats=repeats, say=terminal.note)
    if out is not None and process.is_leader():
        write_whole(markdown(result), out / "kernels.md")
        plot(result, out / "kernels.png")
        save(result, out / "kernels.json")
    if as_json:
        terminal.record(result)
    else:
        terminal.write(markdown(result))


@bench_app.command()
@options.command
def e2e(
    output: options.Output,
    model: str = options.shape(),
    context: list[int] | None = option("Context length in tokens; repeat for several."),
    chunk: int = option("Tokens a prefill pass takes.", default=8192),
    runs: int = _runs(),
    peer: bool = option("Also run transformers (needs PyTorch with CUDA).", default=True),
    compiled: bool = option(
        "Also transformers' compiled decode over a static cache.", default=False
    ),
) -> None:
    """Time to first token and time a decode step, full attention, random bfloat16 weights.

    The baseline is transformers with sdpa in the same run. The roofline of a decode step is the
    bytes it must read (every weight but the embedding table, and the valid keys and values) over
    the copy bandwidth measured in the same run.

    [bold]Examples[/bold]

        jax-longctx bench e2e --context 32768 --context 131072

        jax-longctx bench e2e --model llama-3.2-1b --context 8192 --no-peer
    """
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.bench.e2e import run

    result = run(
        model=model,
        contexts=context or [32768, 131072],
        chunk=chunk,
        runs=runs,
        with_peer=peer,
        peer_options=("--compile",) if compiled else (),
        say=terminal.note,
    )
    output.hand_over(result, bench_tables.end_to_end)


@bench_app.command()
@options.command
def decode(
    output: options.Output,
    timed: Timed,
    cases: list[str] | None = option(
        "E.g. 3x131072; repeat for several.", "--case", metavar="BATCHxCONTEXT"
    ),
    blocks: int = option("Blocks of 32 steps that are timed.", default=5, min=1),
) -> None:
    """Time a decode step of methods beside full attention's, random bfloat16 weights.

    The limit is the time to read the bytes of a step, weights included, at the bandwidth of a copy
    in the same run. On a GPU a profile counts the kernels of a step. The gaps are its wall time
    less the kernels' times.

    [bold]Examples[/bold]

        jax-longctx bench decode --out decode.json --picture decode.png

        jax-longctx bench decode -m refreshkv:schedule=fixed,stride=10 --case 3x131072
    """
    expected = "BATCHxCONTEXT, as 3x131072"
    sizes = [_case(text, "x", expected) for text in cases or ["1x32768"]]
    how = {"cases": [(batch, context) for batch, context in sizes], "blocks": blocks}
    result = timed.run("decode", (*STEPS, *OFFLOADED), output.terminal(), **how)
    output.hand_over(result, bench_tables.steps)
    timed.draw(result)


@bench_app.command()
@options.command
def throughput(
    output: options.Output,
    timed: Timed = only(*STEPS, "picture"),
    contexts: list[int] | None = option(
        "Tokens of context of each row; repeat for several.", "--context"
    ),
    most: int | None = option("Try no batch of more rows.", "--rows", min=1),
    memory: float | None = option(
        "GiB of each device that caches may use; what is free unless given.", metavar="GIB"
    ),
    blocks: int = option("Blocks of 32 steps that are timed.", default=3, min=1),
) -> None:
    """Decoded tokens a second of methods at the largest batch that fits, random bfloat16 weights.

    The largest batch is found by the engine's own arithmetic and confirmed by a run. All rows have
    one length. They are copies of one row, so that a context is read once for a method. The limit
    is that of [bold]bench decode[/bold].

    [bold]Example[/bold]

        jax-longctx bench throughput -m snapkv -m streaming-llm --context 32768 --context 131072
    """
    for length in contexts or ():
        if length < 1:
            raise InputError(f"--context must be at least 1 token, got {length}")
    if memory is not None and memory <= 0:
        raise InputError(f"--memory must be above 0 GiB, got {memory:g}")
    how: dict[str, Any] = {"contexts": contexts or [32768], "blocks": blocks, "most": most}
    how["memory"] = None if memory is None else int(memory * 2**30)
    result = timed.run("throughput", STEPS, output.terminal(), **how)
    output.hand_over(result, bench_tables.throughput)
    timed.draw(result)


@bench_app.command()
@options.command
def serve(
    output: options.Output,
    timed: Timed = only("model", *FORMS, "mesh"),
    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. full and quest unless given."
    ),
    context: int = option("Tokens of the text that all rows ask about.", default=131072, min=1),
    rows: int = option("Answers that are decoded together.", default=16, min=1),
    question: int = option("Tokens of each question.", default=32, min=1),
    read: int | None = option(
        "Tokens of another text that is read between decode blocks; 0 reads none. As --context "
        "unless given.",
        metavar="TOKENS",
        min=0,
    ),
    blocks: int = option("Blocks of 32 steps that are timed.", default=5, min=1),
    random_cache: bool = option(
        "Draw the context's cache at random instead of reading it (methods that keep all keys).",
        default=True,
    ),
    chunk: int = options.chunk(),
) -> None:
    """Time many answers over one context, and decoding beside reading, random bfloat16 weights.

    Rows share the context where the method can. Beside them stands one row alone in the same run.
    Then another text is read in chunks between decode blocks, at the server's pace: the gaps
    between a row's tokens, and how fast the text is read beside reading alone.

    [bold]Example[/bold]

        jax-longctx bench serve --model llama-3.1-8b --context 131072 --rows 16 --out serve.json
    """
    result = timed.run(
        "serve",
        ("model", *FORMS, "mesh"),
        output.terminal(),
        methods=_named(methods or ["full", "quest"]),
        context=context,
        rows=rows,
        question=question,
        read=context if read is None else read,
        blocks=blocks,
        random_cache=random_cache,
        chunk=chunk,
    )
    output.hand_over(result, bench_tables.served)


def _all_or(methods: list[str] | None) -> list[tuple[str, dict[str, str]]]:
    """The methods that were named, or all but those for studies. Imports JAX."""
    from jax_longctx.methods import METHODS, STUDIES

    return _named(methods) if methods else [(name, {}) for name in METHODS if name not in STUDIES]


def _named(methods: list[str]) -> list[tuple[str, dict[str, str]]]:
    return [(spec.name, dict(spec.settings)) for spec in options.parse_specs(methods)]


def _case(text: str, between: str, expected: str, optional: bool = False) -> list[int]:
    """`"3x131072"` -> `[3, 131072]`; the second number may be left out where it is `optional`."""
    numbers = text.split(between)
    if not (
        all(number.isdigit() and int(number) for number in numbers)
        and (len(numbers) == 2 or (optional and len(numbers) == 1))
    ):
        raise InputError(f"--case {text!r} is not understood; expected {expected}")
    return [int(number) for number in numbers]


@bench_app.command()
@options.command
def prefill(
    output: options.Output,
    timed: Timed = only("layers", *FORMS, "offload", "working_set"),
    methods: list[str] = options.methods(
        "A method and its settings; repeat for several. Speed is relative to the first.",
        default=...,
    ),
    model: str = options.shape(),
    cases: list[str] | None = option(
        "Tokens of context, question and answer, and Star's block; repeat for several.",
        "--case",
        metavar="TOKENS[:BLOCK]",
    ),
    mesh: str | None = options.mesh("Devices, e.g. seq=4; all along seq unless given."),
    runs: int = _runs(),
    blocks: int = option(
        "Blocks of 32 decode steps that are timed; 0 times none.", default=2, min=0
    ),
    chunk: int = option("Tokens of a prefill pass on each shard.", default=8192, min=1),
    question: int = option(
        "Tokens of the question, which some methods read beside each chunk.", default=1, min=1
    ),
) -> None:
    """Time to first token and memory of methods, random bfloat16 weights.

    Beside each time is the time that the method's FLOPs on the busiest device take, at the rates of
    projections and of attention measured in the same run; beside the most that a GPU or TPU held in
    a run of its own, what the engine says of the caches.

    [bold]Example[/bold]

        jax-longctx bench prefill -m ring -m ring:order=zigzag -m star
            -m star:anchor_kv=broadcast --case 131072:32768 --mesh seq=4 --layers 8

        jax-longctx bench prefill -m infllm --case 1048576 --kv int8 --offload host
    """
    expected = "TOKENS or TOKENS:BLOCK, as 131072:32768"
    cases = cases or ["32768:8192", "131072:32768"]
    result = timed.run(
        "prefill",
        (*FORMS, *OFFLOADED),
        output.terminal(),
        model=model,
        methods=_named(methods),
        cases=[_case(text, ":", expected, optional=True) for text in cases],
        mesh=mesh,
        runs=runs,
        blocks=blocks,
        chunk=chunk,
        question=question,
    )
    output.hand_over(result, bench_tables.first_tokens)


@bench_app.command()
@options.command
def cold(
    output: options.Output,
    timed: Timed = only("methods", "model"),
    checkpoint: Path | None = option(
        "Converted checkpoint in place of a shape with random weights.",
        "--checkpoint",
        "-c",
        metavar="DIR",
        callback=options.checked(options.check_checkpoint),
    ),
    length: int = option("Tokens of context.", default=16000, min=1),
    answer: int = option("Tokens of the answer.", default=60, min=2),
    chunk: int = options.chunk(),
    dtype: str | None = options.dtype(default="bfloat16"),
    mesh: str | None = options.mesh(),
    ahead: bool | None = option(
        "Compile the programs side by side before the prefill begins, or each when it is called. "
        "As the other commands do unless given: side by side, but not on a CPU.",
        "--ahead/--no-ahead",
        show_default=False,
    ),
) -> None:
    """Time a process's first answer, with an empty and with a full compilation cache.

    Every method runs in two processes of its own. The first starts with an empty folder for
    compiled programs, the second with the folder that the first has filled. Time starts when the
    weights are on the device. Warm is the same answer again in the same process.

    [bold]Example[/bold]

        jax-longctx bench cold --preset llama-3.1-8b --length 16000 -m full -m reattention
    """
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.bench.cold import run

    result = run(
        model=timed.model,
        checkpoint=checkpoint,
        methods=_all_or(timed.methods),
        length=length,
        answer=answer,
        chunk=chunk,
        dtype=dtype or "bfloat16",
        mesh=parse_mesh(mesh or ""),
        ahead=ahead,
        say=terminal.note,
    )
    output.hand_over(result, bench_tables.cold)


@bench_app.command()
@options.command
def tpu_check(
    out: Path = option(
        "Write everything to this JSON file.", "--out", "-o", default=Path("tpu-check.json")
    ),
    interpret: bool = option(
        "Run the kernels' checks alone, in an interpreter on a CPU.", "--interpret", default=False
    ),
    minutes: float = option("What no time is left for is left out.", default=10.0),
    as_json: bool = options.as_json(),
) -> None:
    """Check every TPU kernel on this TPU, and time kernels and steps beside their limits.

    It takes ten minutes. The file holds all that it found. Exit code 3: a check failed.

    [bold]Example[/bold]

        jax-longctx bench tpu-check
    """
    check_file(out)
    if minutes <= 0:
        raise InputError(f"--minutes must be above 0, got {minutes:g}")
    terminal = Terminal(as_json=as_json)
    with terminal.starting():
        from jax_longctx.bench.tpu_check import passed, run

    result = run(interpret=interpret, minutes=minutes, say=terminal.note)
    save(result, out)
    terminal.result(result, bench_tables.tpu_check)
    terminal.note(f"{out} holds all of it; please attach it to an issue")
    if not passed(result):
        raise typer.Exit(process.PARTLY)
