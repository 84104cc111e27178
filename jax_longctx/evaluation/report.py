"""A run as one self-contained HTML page, and as Markdown with PNG plots beside it.

DIR/report.html    everything: no file and no address beside it
DIR/report.md      the same tables, the plots from DIR/plots/
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.evaluation.markdown import document
from jax_longctx.evaluation.page import page
from jax_longctx.evaluation.sections import make_sections
from jax_longctx.evaluation.summary import Row, Summary, summarise

__all__ = ["About", "read_about", "write_about", "write_report"]

ABOUT = "about.json"
PICTURES = "plots"
About = dict[str, Any]


def write_about(folder: Path, about: About) -> None:
    """Keeps what the rows do not say: `title`, `about`, `published`."""
    _write(folder / ABOUT, json.dumps(about, indent=1))


def read_about(folder: Path) -> About:
    """What `write_about` kept; nothing where no run did."""
    try:
        return json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / ABOUT} is damaged: {error}; remove it") from error


def write_report(folder: Path, rows: Sequence[Row], about: About) -> Summary:
    """Writes `report.html`, `report.md` and `plots/` of these rows."""
    summary = summarise(rows)
    sections = make_sections(rows, summary, about.get("published", ()))
    title, words = about.get("title") or "Evaluation", about.get("about", "")
    facts = _facts(rows)
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for plot in (plot for section in sections for plot in section.plots):
        _write(folder / PICTURES / plot.file, plot.png())
    _write(folder / "report.html", page(title, words, facts, sections))
    _write(folder / "report.md", document(title, words, facts, sections, PICTURES))
    return summary


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What all rows, or several groups of them, were made with."""

    def several(value: Any) -> str:
        return ", ".join(dict.fromkeys(value(row) for row in rows if value(row)))

    def versions(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {number}" for name, number in row.get("versions", {}).items())

    def mesh(row: Mapping[str, Any]) -> str:
        return ", ".join(f"{axis} {size}" for axis, size in row.get("mesh", {}).items())

    facts = [
        ("model", several(lambda row: str(row.get("checkpoint", "")))),
        ("dtype", several(lambda row: str(row.get("dtype", "")))),
        ("device", several(lambda row: str(row.get("device", "")))),
        ("mesh", several(mesh)),
        ("prompts", "chat template" if rows[0].get("chat") else "plain completion"),
        ("programs", several(_by_layer)),
        ("seed", several(lambda row: str(row.get("seed", "")))),
        ("versions", several(versions)),
        ("rows", f"{len(rows):,}"),
    ]
    return [(name, value) for name, value in facts if value]


def _by_layer(row: Row) -> str:
    return "one a layer, to compile less, so that times are too long" * bool(row.get("by_layer"))


def _write(path: Path, content: str | bytes) -> None:
    """Under a temporary name first, so that nothing is half there."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror}") from error
