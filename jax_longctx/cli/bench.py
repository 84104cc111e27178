"""`jax-longctx bench`: measured times beside a baseline and a roofline of the same run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from jax_longctx.cli import options, process
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import (
    Terminal,
    check_file,
    check_folder,
    check_matplotlib,
    check_plot,
    save,
    shown_time,
    table,
)
from jax_longctx.errors import InputError
from jax_longctx.files import write_whole
from jax_longctx.memory import shown_bytes
from jax_longctx.settings import MESH_AXES, offload_of, parse_mesh

bench_app = options.App(no_args_is_help=True, help="Measure on this device, as ratios in one run.")


def _layers() -> Any:
    return option("Time this many layers, and one, and scale to all; all unless given.")


def _methods() -> Any:
    return options.methods(
        "A method and its settings; repeat for several. All methods unless given."
    )


def _random_cache() -> Any:
    return option(
        "Draw the cache at random instead of reading a context (methods that keep all keys).",
        default=False,
    )


def _chunk() -> Any:
    return option("Tokens of a prefill pass.", default=8192, min=1)


def _mesh() -> Any:
    return options.mesh(
        "Devices, e.g. tensor=4 or seq=2,tensor=2, without data. One device unless given."
    )


def _kernels() -> Any:
    return option(
        "Count the kernels of a step in a profile (on GPUs).",
        "--kernels/--no-kernels",
        default=True,
    )


def _picture() -> Any:
    return option("Draw times or throughput beside the limits as a PNG.", metavar="FILE")


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
    output.hand_over(result, _end_to_end)


def _end_to_end(result: dict[str, Any]) -> Iterable[Any]:
    rows = []
    for row in result["rows"]:
        cells = [row["what"], f"{row['context']:,}", shown_time(row["seconds"])]
        against = ["-", "-", "-"]
        if row["baseline_seconds"] is not None:
            its = shown_time(row["baseline_seconds"])
            against = [row["baseline"], its, f"{row['ratio']:.2f}"]
        rows.append([*cells, *against])
    made = table(("what", "context", "time", "against", "its time", "ours / its"), rows)
    made.columns[3].justify = "left"
    yield made
    yield (
        f"{result['device']}, {result['model']} in bfloat16, batch 1, chunk {result['chunk']:,}, "
        f"jax {result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


@bench_app.command()
@options.command
def decode(
    output: options.Output,
    methods: list[str] | None = _methods(),
    model: str = options.shape(names=("--model", "--preset")),
    cases: list[str] | None = option(
        "E.g. 3x131072; repeat for several.", "--case", metavar="BATCHxCONTEXT"
    ),
    blocks: int = option("Blocks of 32 steps that are timed.", default=5, min=1),
    layers: int | None = _layers(),
    random_cache: bool = _random_cache(),
    chunk: int = _chunk(),
    kv: str | None = options.kv(),
    weights: str | None = options.weights(),
    offload: str | None = options.offload(),
    working_set: int | None = options.working_set(),
    mesh: str | None = _mesh(),
    kernels: bool = _kernels(),
    picture: Path | None = _picture(),
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
    check_plot(picture, "--picture")
    offload_of(offload, working_set)
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.memory import allow_pinned

        if offload is not None:
            allow_pinned()
        from jax_longctx.bench.decode import run
        from jax_longctx.sharding import make_mesh

    result = run(
        model=model,
        methods=_all_or(methods),
        cases=[(batch, context) for batch, context in sizes],
        blocks=blocks,
        random_cache=random_cache,
        layers=layers,
        chunk=chunk,
        kv=kv,
        weights=weights,
        offload=offload,
        working_set=working_set,
        mesh=make_mesh(**_sizes(mesh)),
        kernels=kernels,
        say=terminal.note,
    )
    output.hand_over(result, _steps)
    _draw(result, picture)


@bench_app.command()
@options.command
def throughput(
    output: options.Output,
    methods: list[str] | None = _methods(),
    model: str = options.shape(names=("--model", "--preset")),
    contexts: list[int] | None = option(
        "Tokens of context of each row; repeat for several.", "--context"
    ),
    most: int | None = option("Try no batch of more rows.", "--rows", min=1),
    memory: float | None = option(
        "GiB of each device that caches may use; what is free unless given.", metavar="GIB"
    ),
    blocks: int = option("Blocks of 32 steps that are timed.", default=3, min=1),
    random_cache: bool = _random_cache(),
    chunk: int = _chunk(),
    kv: str | None = options.kv(),
    weights: str | None = options.weights(),
    mesh: str | None = _mesh(),
    kernels: bool = _kernels(),
    picture: Path | None = _picture(),
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
    check_plot(picture, "--picture")
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.bench.throughput import run
        from jax_longctx.sharding import make_mesh

    result = run(
        model=model,
        methods=_all_or(methods),
        contexts=contexts or [32768],
        blocks=blocks,
        most=most,
        memory=None if memory is None else int(memory * 2**30),
        random_cache=random_cache,
        chunk=chunk,
        kv=kv,
        weights=weights,
        mesh=make_mesh(**_sizes(mesh)),
        kernels=kernels,
        say=terminal.note,
    )
    output.hand_over(result, _throughput)
    _draw(result, picture)


@bench_app.command()
@options.command
def serve(
    output: options.Output,
    methods: list[str] | None = options.methods(
        "A method and its settings; repeat for several. full and quest unless given."
    ),
    model: str = options.shape(names=("--model", "--preset")),
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
    kv: str | None = options.kv(),
    weights: str | None = options.weights(),
    mesh: str | None = _mesh(),
) -> None:
    """Time many answers over one context, and decoding beside reading, random bfloat16 weights.

    Rows share the context where the method can. Beside them stands one row alone in the same run.
    Then another text is read in chunks between decode blocks, at the server's pace: the gaps
    between a row's tokens, and how fast the text is read beside reading alone.

    [bold]Example[/bold]

        jax-longctx bench serve --model llama-3.1-8b --context 131072 --rows 16 --out serve.json
    """
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.bench.serve import run
        from jax_longctx.sharding import make_mesh

    result = run(
        model=model,
        methods=_named(methods or ["full", "quest"]),
        context=context,
        rows=rows,
        question=question,
        read=context if read is None else read,
        blocks=blocks,
        random_cache=random_cache,
        chunk=chunk,
        kv=kv,
        weights=weights,
        mesh=make_mesh(**_sizes(mesh)),
        say=terminal.note,
    )
    output.hand_over(result, _served)


def _served(result: dict[str, Any]) -> Iterable[Any]:
    steps, reading = [], []
    for row in result["rows"]:
        name = _name(row)
        if "seconds" in row:
            times = [f"{row[key] * 1e3:.2f} ms" for key in ("alone_seconds", "seconds")]
            speeds = [f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.1f}x"]
            waits = [shown_time(row[key]) for key in ("question_seconds", "first_token")]
            rest = [f"{row['share']:.0%}", *waits]
            steps.append([name, "yes" if row["shared"] else "no", *times, *speeds, *rest])
        if "read_alone" in row:
            gaps = [shown_time(row[key]) for key in ("gap_p50", "gap_p99", "gap_most")]
            rates = [f"{row[key]:,.0f}" for key in ("read_alone", "read_beside")]
            reading.append([name, *gaps, *rates, f"{row['read_share']:.0%}"])
        if "failed" in row:
            steps.append([name, row["failed"]])
    together = f"{result['rows'][0]['batch']} rows"
    yield table(
        (
            *("method", "shared", "alone: step", f"{together}: step", "tokens/s"),
            *("together / alone", "of limit", "question", "first token"),
        ),
        steps,
    )
    if reading:
        yield f"\nwhile a text of {result['read']:,} tokens is read:"
        yield table(
            (
                *("method", "between tokens: median", "p99", "most"),
                *("read alone, tokens/s", "beside", "beside / alone"),
            ),
            reading,
        )
    yield (
        f"{result['device']}, {result['model']} in bfloat16{_stored(result)}, a context of "
        f"{result['rows'][0]['context']:,} tokens; chunk {result['chunk']:,}, jax {result['jax']}; "
        f"copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


def _all_or(methods: list[str] | None) -> list[tuple[str, dict[str, str]]]:
    """The methods that were named, or all but those for studies. Imports JAX."""
    from jax_longctx.methods import METHODS, STUDIES

    return _named(methods) if methods else [(name, {}) for name in METHODS if name not in STUDIES]


def _sizes(mesh: str | None) -> dict[str, Any]:
    return dict(parse_mesh(mesh or ""))


def _draw(result: dict[str, Any], picture: Path | None) -> None:
    if picture is not None and process.is_leader():
        from jax_longctx.bench.drawing import draw

        draw(result["rows"], picture, title=f"{result['device']}, {result['model']} in bfloat16")


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


# Heads of a step's columns, and what stands there.
_STEP_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": lambda row: f"{row['seconds'] * 1e3:.2f} ms",
    "limit": lambda row: f"{row['limit_seconds'] * 1e3:.2f} ms",
    "share": lambda row: f"{row['share']:.0%}",
    "kernels a layer": lambda row: f"{row['kernels_layer']:.1f}",
    "gaps": lambda row: f"{row['gap_seconds'] * 1e3:.2f} ms",
}


def _step_columns(result: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns; without those of kernels where none were counted."""
    counted = any("kernels" in row for row in result["rows"])
    return {
        head: cell
        for head, cell in _STEP_COLUMNS.items()
        if counted or head not in ("kernels a layer", "gaps")
    }


def _steps(result: dict[str, Any]) -> Iterable[Any]:
    columns = _step_columns(result)
    rows = []
    for row in result["rows"]:
        cells = [_name(row), f"{row['batch']} x {row['context']:,}"]
        if "failed" in row:
            rows.append([*cells, row["failed"]])
            continue
        # No ratio where full attention failed.
        speedup = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
        rows.append([*cells, *(cell(row) for cell in columns.values()), speedup])
    yield table(("method", "batch x context", *columns, "full / this"), rows)
    yield (
        f"{result['device']}, {result['model']} in bfloat16{_stored(result)}, "
        f"{_layers_said(result['layers'])}; jax {result['jax']}; copy "
        f"{result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


def _stored(result: dict[str, Any]) -> str:
    """The forms of weights, keys and values, where they are not bfloat16."""
    said = {"weights": "weights", "kv": "keys and values", "offload": "contexts"}
    return "".join(f", {what} in {result[key]}" for key, what in said.items() if result.get(key))


def _throughput(result: dict[str, Any]) -> Iterable[Any]:
    columns = _step_columns(result)
    rows = []
    for row in result["rows"]:
        cells = [_name(row), f"{row['context']:,}"]
        if "failed" in row:
            rows.append([*cells, row["failed"]])
            continue
        cells += [f"{row['batch']:,}", f"{row['tokens_per_second']:,.0f}"]
        rows.append([*cells, *(cell(row) for cell in columns.values())])
    yield table(("method", "context", "rows", "tokens/s a device", *columns), rows)
    yield (
        f"{result['device']} ({result['devices']}), {result['model']} in bfloat16"
        f"{_stored(result)}; {shown_bytes(result['free'])} free for caches; jax {result['jax']}; "
        f"copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


def _layers_said(layers: dict[str, int]) -> str:
    """The layers in a table's last line; `layers` has `timed` and `of`."""
    if layers["timed"] == layers["of"]:
        return f"all {layers['of']} layers"
    return (
        f"{layers['timed']} layers and 1 timed, scaled to {layers['of']}: a layer's time is "
        f"their difference, the rest fixed"
    )


@bench_app.command()
@options.command
def prefill(
    output: options.Output,
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
    layers: int | None = _layers(),
    runs: int = _runs(),
    blocks: int = option(
        "Blocks of 32 decode steps that are timed; 0 times none.", default=2, min=0
    ),
    chunk: int = option("Tokens of a prefill pass on each shard.", default=8192, min=1),
    question: int = option(
        "Tokens of the question, which some methods read beside each chunk.", default=1, min=1
    ),
    kv: str | None = options.kv(),
    weights: str | None = options.weights(),
    offload: str | None = options.offload(),
    working_set: int | None = options.working_set(),
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
    expected, cases = (
        "TOKENS or TOKENS:BLOCK, as 131072:32768",
        cases or ["32768:8192", "131072:32768"],
    )
    sizes = [_case(text, ":", expected, optional=True) for text in cases]
    offload_of(offload, working_set)
    terminal = output.terminal()
    with terminal.starting():
        from jax_longctx.memory import allow_pinned

        if offload is not None:
            allow_pinned()
        import jax

        from jax_longctx.bench.prefill import Case, run
        from jax_longctx.sharding import make_mesh

    along = {"seq": len(jax.devices())} if mesh is None else parse_mesh(mesh)
    data, seq, tensor = (along.get(axis, 1) for axis in MESH_AXES)
    result = run(
        model=model,
        methods=_named(methods),
        cases=[Case(*case) for case in sizes],
        mesh=make_mesh(data, seq, tensor),
        layers=layers,
        runs=runs,
        blocks=blocks,
        chunk=chunk,
        question=question,
        kv=kv,
        weights=weights,
        offload=offload,
        working_set=working_set,
        say=terminal.note,
    )
    output.hand_over(result, _first_tokens)


@bench_app.command()
@options.command
def cold(
    output: options.Output,
    methods: list[str] | None = _methods(),
    model: str = options.shape(names=("--model", "--preset")),
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
        model=model,
        checkpoint=checkpoint,
        methods=_all_or(methods),
        length=length,
        answer=answer,
        chunk=chunk,
        dtype=dtype or "bfloat16",
        mesh=parse_mesh(mesh or ""),
        ahead=ahead,
        say=terminal.note,
    )
    output.hand_over(result, _cold)


def _cold(result: dict[str, Any]) -> Iterable[Any]:
    rows = []
    for row in result["rows"]:
        if "failed" in row:
            rows.append([_name(row), row["failed"]])
            continue
        empty, full = row["empty"], row["full"]
        times = [
            *(empty["first_token"], empty["last_token"], full["first_token"], full["last_token"]),
            *(empty["warm_first_token"], empty["warm_last_token"]),
        ]
        found = f"{full['from_cache']} of {full['programs']}"
        rows.append([_name(row), *map(shown_time, times), found])
    last = f"{result['answer']} tokens"
    headers = ("method", "empty: first token", last, "full: first token", last)
    yield table((*headers, "warm: first token", last, "found in full cache"), rows)
    yield (
        f"{result.get('device', 'no device')}, {result['model']} in {result['dtype']}, "
        f"{result['context']:,} tokens, chunk {result['chunk']:,}, jax {result.get('jax', '-')}"
    )


_MEMORY = ("peak_bytes", "said_bytes")


def _first_tokens(result: dict[str, Any]) -> Iterable[Any]:
    times, work = [], []
    for row in result["rows"]:
        cells = [_name(row), f"{row['tokens']:,}"]
        if "failed" in row:
            times.append([*cells, row["failed"]])
            continue
        step = shown_time(row["step"], 1) if "step" in row else "-"
        merging = f"{row['merge_share']:.1%}" if "merge_share" in row else "-"
        first = shown_time(row["first_token"], 1)
        speedup = f"{row['speedup']:.2f}x" if "speedup" in row else "-"
        times.append([*cells, first, speedup, step, merging])
        flops = [f"{row[kind] / 1e12:,.4g}" for kind in ("linear", "attention")]
        ratio = [shown_time(row["model_seconds"], 1), f"{row['of_model']:.2f}"]
        memory = [shown_bytes(row[key]) if key in row else "-" for key in _MEMORY]
        work.append([*cells, *flops, f"{row['received'] / 1e9:,.3g} GB", *ratio, *memory])
    first = result["rows"][0]["method"]
    yield table(("method", "tokens", "first token", f"{first} / this", "step", "merging"), times)
    yield "\nbusiest device:"
    headers = ("linear TFLOP", "attention TFLOP", "received", "takes", "time / that")
    headers += ("most memory", "caches")
    yield table(("method", "tokens", *headers), work)
    rates, merge = result["rates"], result["rates"]["merge"]
    devices = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    yield (
        f"\n{result['device']} {devices}, {result['model']} in bfloat16{_stored(result)}, "
        f"{_layers_said(result['layers'])}; chunk {result['chunk']:,}, median of "
        f"{result['runs']}, jax {result['jax']}"
    )
    linear, attention = (f"{rates[kind] / 1e12:,.3g} TFLOP/s" for kind in ("linear", "attention"))
    received = rates["received"]
    yield (
        f"rates: linear {linear}, attention {attention} (causal, {rates['square']:,} tokens)"
        + (f"; from a neighbour {received / 1e9:,.1f} GB/s" if received else "")
    )
    if merge:
        yield (
            f"a decode step's merge in a layer: {merge['by_sum'] * 1e6:.1f} us by pmax and psum, "
            f"{merge['by_gather'] * 1e6:.1f} us by one all-gather; {merge['used']} is used"
        )


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["method"], *(f"{key}={value}" for key, value in row["settings"].items())])


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
    terminal.result(result, _tpu_check)
    terminal.note(f"{out} holds all of it; please attach it to an issue")
    if not passed(result):
        raise typer.Exit(process.PARTLY)


def _tpu_check(result: dict[str, Any]) -> Iterable[Any]:
    rows = [
        [row["kernel"], row["case"], "passed" if row["passed"] else "FAILED", _off(row)]
        for row in result["checks"]
    ]
    yield table(("kernel", "reads", "check", "error"), rows)
    if "kernels" in result:
        from jax_longctx.bench.kernels import markdown

        yield markdown(result["kernels"])
    steps = result.get("steps", {})
    if "rows" in steps:
        yield from _steps(steps)
    elif steps:
        yield f"steps: {steps['failed']}"
    yield f"{result['device']}, jax {result['jax']}, {shown_time(result['seconds'])}"


def _off(row: dict[str, Any]) -> str:
    if "failed" in row:
        return row["failed"].splitlines()[0]
    return f"{row['error']:.1e}, at most {row['tolerance']:.1e}"
