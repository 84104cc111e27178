"""The kernel benchmark as Markdown and as a roofline plot."""

from pathlib import Path
from typing import Any

__all__ = ["markdown", "plot"]


def markdown(result: dict[str, Any]) -> str:
    """A table of all runs: time and spread, rate, share of the floor, and ours over the others."""
    lines = [
        f"{result['device']}, jax {result['jax']}: copy "
        f"{result['copy_bandwidth'] / 1e12:.3g} TB/s, matmul "
        f"{result['matmul_rate'] / 1e12:.3g} TFLOP/s; bfloat16, 32 heads over 8 kv heads of 128.",
        "",
        "| operation | shape | run | ms (least - most) | TFLOP/s | TB/s | of roofline | vs ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ours = {
        (row["operation"], row["shape"]): row["seconds"]
        for row in result["rows"]
        if row["run"] == "ours" and "failed" not in row
    }
    for row in result["rows"]:
        lines.append("| " + " | ".join(_cells(row, ours)) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any], ours: dict[tuple[str, str], float]) -> list[str]:
    cells = [row["operation"], row["shape"], row["run"]]
    if "failed" in row:
        return [*cells, row["failed"].splitlines()[0].replace("|", "/")[:80], "-", "-", "-", "-"]
    seconds = row["seconds"]
    spread = f"{row['least'] * 1e3:.4f} - {row['most'] * 1e3:.4f}"
    base = ours.get((row["operation"], row["shape"]))
    if not seconds:
        return [*cells, f"0 ({spread})", "-", "-", "-", "-"]
    return [
        *cells,
        f"{seconds * 1e3:.4f} ({spread})",
        f"{row['operations'] / seconds / 1e12:.3g}",
        f"{row['moved'] / seconds / 1e12:.3g}",
        f"{row['share']:.0%}",
        f"{seconds / base:.2f}x" if base else "-",
    ]


def plot(result: dict[str, Any], path: Path) -> None:
    """Rates over operations a byte, under the lines of the measured copy and matmul."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    bandwidth, peak = result["copy_bandwidth"], result["matmul_rate"]
    figure, axes = pyplot.subplots(figsize=(9, 6))
    rows = [row for row in result["rows"] if row.get("seconds") and row["operations"]]
    intensities = [row["operations"] / row["moved"] for row in rows] or [1.0]
    ends = min(intensities) / 2, max(*intensities, 2 * peak / bandwidth)
    knee = [ends[0], peak / bandwidth, ends[1]]
    roof = [min(x * bandwidth, peak) / 1e12 for x in knee]
    axes.plot(knee, roof, color="black", label="copy and matmul, measured")
    markers = {name: "osD^vP*X"[i % 8] for i, name in enumerate(dict.fromkeys(_runs(rows)))}
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r["operation"] for r in rows))}
    for row in rows:
        axes.plot(
            row["operations"] / row["moved"],
            row["operations"] / row["seconds"] / 1e12,
            markers[row["run"]],
            color=colours[row["operation"]],
            fillstyle="full" if row["run"] == "ours" else "none",
        )
    for name, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=name)
    for name, marker in markers.items():
        filled = "full" if name == "ours" else "none"
        axes.plot([], [], marker, color="grey", fillstyle=filled, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"{result['device']}, bfloat16")
    axes.legend(fontsize="small")
    axes.grid(True, which="both", alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    return ["ours", *(row["run"] for row in rows)]
