"""The documentation's pictures as SVG, from boxes and arrows that are placed here.

docs/generate.py writes them to docs/assets/.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, LINE = "#1f2937", "#64748b"
FILLS = {"plain": "#ffffff", "blue": "#dbeafe", "green": "#dcfce7", "amber": "#fef3c7"}
FONT = "font-family='system-ui, sans-serif'"


def text(x: float, y: float, content: str, *, size: int = 14, bold: bool = False) -> str:
    """One line of text, centred at x."""
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x:g}' y='{y:g}' text-anchor='middle' font-size='{size}' fill='{INK}'"
        f"{weight}>{escape(content)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, title: str, lines: Sequence[str], fill: str
) -> str:
    """A box with a title in bold and lines below it."""
    top = y + height / 2 - 9.5 * (len(lines) + bool(title) - 1) + 5
    parts = [
        f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='8' "
        f"fill='{FILLS[fill]}' stroke='{LINE}'/>"
    ]
    if title:
        parts.append(text(x + width / 2, top, title, bold=True))
    parts += [
        text(x + width / 2, top + 19 * (n + bool(title)), line, size=13)
        for n, line in enumerate(lines)
    ]
    return "".join(parts)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A straight arrow."""
    return (
        f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{LINE}' "
        f"stroke-width='1.5' marker-end='url(#tip)'/>"
    )


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """An SVG document on a light ground, so that it is legible in a dark theme too."""
    tip = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
        f"markerHeight='8' orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='{LINE}'/></marker></defs>"
    )
    ground = f"<rect width='{width}' height='{height}' rx='12' fill='#f8fafc'/>"
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' role='img' {FONT}><title>{escape(title)}</title>"
    )
    return "\n".join([head, tip, ground, *parts, "</svg>"]) + "\n"


def ask() -> str:
    """The path of an `ask` through the packages."""
    wide, tall, gap = 250, 104, 45
    steps = [
        ("cli/ask.py", ["checks the arguments", "reads the text"], "plain"),
        ("LongContext (api.py)", ["applies the chat template", "text to token ids"], "plain"),
        ("Engine.prefill", ["segments of the context;", "in each layer: method.attend"], "blue"),
        (
            "Engine.stream: answer",
            ["blocks of decode steps;", "in each layer: method.attend"],
            "blue",
        ),
        (
            "Engine.stream: question",
            ["fork, then its segments;", "in each layer: method.attend"],
            "blue",
        ),
        ("Context", ["KV cache after finish;", "a value: save, load, ask again"], "green"),
    ]
    parts = []
    for n, (title, lines, fill) in enumerate(steps):
        row, column = divmod(n, 3)
        parts.append(
            box(30 + column * (wide + gap), 30 + row * (tall + 60), wide, tall, title, lines, fill)
        )
    first, second = 30 + tall / 2, 30 + tall + 60 + tall / 2
    for column in (0, 1):
        x = 30 + wide + column * (wide + gap)
        parts.append(arrow(x, first, x + gap, first))
        parts.append(arrow(x + gap, second, x, second))
    x = 30 + 2 * (wide + gap) + wide / 2
    parts.append(arrow(x, 30 + tall, x, 30 + tall + 60))
    x = 30 + wide / 2
    parts.append(arrow(x, 30 + tall + 60, x, 30 + tall))
    parts.append(text(x + 52, 30 + tall + 36, "answer as text", size=13))
    return picture(900, 328, "The path of an ask through the packages", parts)


def contract() -> str:
    """When the engine calls each of the five duties, with what, and what comes back."""
    rows = [
        ("once a layer", "shape of the cache", "init_cache", "an empty cache"),
        ("once a prompt", "token ids", "segments", "pieces of fixed shapes"),
        (
            "each segment, each layer",
            "q, k, v before RoPE; cache",
            "attend",
            "output, log-sum-exp, cache",
        ),
        ("at the end of the context", "cache", "finish", "cache, perhaps smaller"),
        ("before each question", "cache", "fork", "cache as after the context"),
    ]
    heads = [(130, "When"), (355, "The engine gives"), (565, "Duty"), (775, "The method returns")]
    parts = [text(x, 36, head, bold=True) for x, head in heads]
    for n, (when, given, duty, back) in enumerate(rows):
        y = 54 + 58 * n
        parts += [
            text(130, y + 27, when, size=13),
            box(250, y, 210, 42, "", [given], "blue"),
            arrow(460, y + 21, 500, y + 21),
            box(500, y, 130, 42, duty, [], "amber"),
            arrow(630, y + 21, 670, y + 21),
            box(670, y, 210, 42, "", [back], "green"),
        ]
    return picture(900, 360, "The five duties of a method", parts)


def mesh() -> str:
    """Eight devices as data=2, seq=2, tensor=2."""
    parts = []
    for data in (0, 1):
        left = 30 + 435 * data
        rows = f"rows {4 * data} to {4 * data + 3} of the batch"
        parts.append(
            f"<rect x='{left}' y='30' width='405' height='238' rx='10' fill='none' "
            f"stroke='{LINE}' stroke-dasharray='6 4'/>"
        )
        parts.append(text(left + 202, 54, f"data {data}: {rows}", bold=True))
        for seq in (0, 1):
            for tensor in (0, 1):
                half = ("first", "second")
                parts.append(
                    box(
                        left + 20 + 190 * tensor,
                        70 + 96 * seq,
                        175,
                        82,
                        f"seq {seq}, tensor {tensor}",
                        [f"{half[seq]} half of the slots", f"{half[tensor]} half of the heads"],
                        ("blue", "green")[tensor],
                    )
                )
    lines = [
        "data: rows are independent. tensor and seq: weights are split; projections end in a sum.",
        "seq: each device attends to its own slots; the partial outputs are merged by log-sum-exp.",
    ]
    parts += [text(450, 296 + 22 * n, line, size=13) for n, line in enumerate(lines)]
    return picture(900, 336, "Eight devices as a mesh of data=2, seq=2, tensor=2", parts)


PICTURES = {"assets/ask.svg": ask, "assets/contract.svg": contract, "assets/mesh.svg": mesh}
