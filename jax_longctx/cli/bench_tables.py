"""What `jax-longctx bench` prints: the tables of its results, and what was timed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax_longctx.cli.terminal import shown_time, stored, table
from jax_longctx.memory import shown_bytes
from jax_longctx.settings import named_text

Row = dict[str, Any]
Cells = Callable[[Row], list[str]]

# Heads of a step's columns, and what stands there.
_STEP: dict[str, Callable[[Row], str]] = {
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "step": lambda row: f"{row['seconds'] * 1e3:.2f} ms",
    "limit": lambda row: f"{row['limit_seconds'] * 1e3:.2f} ms",
    "share": lambda row: f"{row['share']:.0%}",
    "kernels a layer": lambda row: f"{row['kernels_layer']:.1f}",
    "gaps": lambda row: f"{row['gap_seconds'] * 1e3:.2f} ms",
}


def steps(result: Row) -> Iterable[Any]:
    """Of `bench decode`."""
    columns = _step_columns(result)

    def cells(row: Row) -> list[str]:
        # No ratio where full attention failed.
        return [*(cell(row) for cell in columns.values()), _speedup(row)]

    heads = ("method", "batch x context", *columns, "speedup")
    yield _table(
        result, heads, lambda row: [_name(row), f"{row['batch']} x {row['context']:,}"], cells
    )
    devices = f" ({result['devices']})" if result["devices"] > 1 else ""
    yield _timed(result, f", {_layers_said(result['layers'])};", devices)


def served(result: Row) -> Iterable[Any]:
    """Of `bench serve`."""
    first = result["rows"][0]

    def cells(row: Row) -> list[str]:
        times = [f"{row[key] * 1e3:.2f} ms" for key in ("alone_seconds", "seconds")]
        speeds = [f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.1f}x"]
        waits = [shown_time(row[key]) for key in ("question_seconds", "first_token")]
        return ["yes" if row["shared"] else "no", *times, *speeds, f"{row['share']:.0%}", *waits]

    rows, reading = [], []
    for row in result["rows"]:
        if "seconds" in row:
            rows.append([_name(row), *cells(row)])
        if "read_alone" in row:
            gaps = [shown_time(row[key]) for key in ("gap_p50", "gap_p99", "gap_most")]
            rates = [f"{row[key]:,.0f}" for key in ("read_alone", "read_beside")]
            reading.append([_name(row), *gaps, *rates, f"{row['read_share']:.0%}"])
        if "failed" in row:
            rows.append([_name(row), row["failed"]])
    heads = ("method", "shared", "alone: step", f"{first['batch']} rows: step", "tokens/s")
    yield table((*heads, "together / alone", "of limit", "question", "first token"), rows)
    if reading:
        yield f"\nwhile a text of {result['read']:,} tokens is read:"
        heads = ("method", "between tokens: median", "p99", "most")
        yield table((*heads, "read alone, tokens/s", "beside", "beside / alone"), reading)
    context, chunk = f"{first['context']:,} tokens", f"{result['chunk']:,}"
    yield _timed(result, f", a context of {context}; chunk {chunk},")


def first_tokens(result: Row) -> Iterable[Any]:
    """Of `bench prefill`."""

    def name(row: Row) -> list[str]:
        return [_name(row), f"{row['tokens']:,}"]

    def times(row: Row) -> list[str]:
        return [shown_time(row["first_token"], 1), _speedup(row)]

    heads = ("method", "tokens", "first token", f"{result['rows'][0]['method']} / this")
    yield _table(result, heads, name, times)
    yield "\nbusiest device:"
    work = []
    for row in result["rows"]:
        if "failed" not in row:
            flops = [f"{row[kind] / 1e12:,.4g}" for kind in ("linear", "attention")]
            ratio = [shown_time(row["model_seconds"], 1), f"{row['of_model']:.2f}"]
            keys = ("peak_bytes", "said_bytes")
            memory = [shown_bytes(row[key]) if key in row else "-" for key in keys]
            work.append([*name(row), *flops, f"{row['received'] / 1e9:,.3g} GB", *ratio, *memory])
    heads = ("method", "tokens", "linear TFLOP", "attention TFLOP", "received", "takes")
    yield table((*heads, "time / that", "most memory", "caches"), work)
    rates = result["rates"]
    devices = ", ".join(f"{axis}={size}" for axis, size in result["mesh"].items())
    yield (
        f"\n{result['device']} {devices}, {result['model']} in bfloat16{stored(result)}, "
        f"{_layers_said(result['layers'])}; chunk {result['chunk']:,}, median of "
        f"{result['runs']}, jax {result['jax']}"
    )
    linear, attention = (f"{rates[kind] / 1e12:,.3g} TFLOP/s" for kind in ("linear", "attention"))
    yield f"rates: linear {linear}, attention {attention} (causal, {rates['square']:,} tokens)"


def tpu_check(result: Row) -> Iterable[Any]:
    """Of `bench tpu-check`."""
    rows = [
        [row["kernel"], row["case"], "passed" if row["passed"] else "FAILED", _off(row)]
        for row in result["checks"]
    ]
    yield table(("kernel", "reads", "check", "error"), rows)
    if "kernels" in result:
        from jax_longctx.bench.kernels import markdown

        yield markdown(result["kernels"])
    found = result.get("steps", {})
    if "rows" in found:
        yield from steps(found)
    elif found:
        yield f"steps: {found['failed']}"
    yield f"{result['device']}, jax {result['jax']}, {shown_time(result['seconds'])}"


def _off(row: Row) -> str:
    if "failed" in row:
        return row["failed"].splitlines()[0]
    return f"{row['error']:.1e}, at most {row['tolerance']:.1e}"


def _table(result: Row, heads: Sequence[str], name: Cells, cells: Cells) -> Any:
    """A line for each row: its method and case, then its figures or why it failed."""
    rows = [
        [*name(row), *([row["failed"]] if "failed" in row else cells(row))]
        for row in result["rows"]
    ]
    return table(heads, rows)


def _name(row: Row) -> str:
    return named_text(row["method"], row["settings"], " ", " ")


def _speedup(row: Row) -> str:
    return f"{row['speedup']:.2f}x" if "speedup" in row else "-"


def _step_columns(result: Row) -> dict[str, Callable[[Row], str]]:
    """The columns; none about kernels where none were counted."""
    counted = any("kernels" in row for row in result["rows"])
    return {
        head: cell
        for head, cell in _STEP.items()
        if counted or head not in ("kernels a layer", "gaps")
    }


def _timed(result: Row, how: str, devices: str = "") -> str:
    """The line below a table."""
    return (
        f"{result['device']}{devices}, {result['model']} in bfloat16{stored(result)}{how} jax "
        f"{result['jax']}; copy {result['copy_bandwidth'] / 1e12:.2f} TB/s"
    )


def _layers_said(layers: dict[str, int]) -> str:
    """The layers in a table's last line; `layers` has `timed` and `of`."""
    if layers["timed"] == layers["of"]:
        return f"all {layers['of']} layers"
    return (
        f"{layers['timed']} layers and 1 timed, scaled to {layers['of']}: a layer's time is "
        f"their difference, the rest fixed"
    )
