"""A report as one HTML page that needs nothing beside it: no file, no address, no script.

Light and dark as the reader's system has it, always light on paper. Wide tables scroll within
themselves; their first column stays.
"""

import html
from collections.abc import Sequence

from jax_longctx.evaluation.sections import Section
from jax_longctx.evaluation.tables import Cell, Table

__all__ = ["page"]

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fdfdfb; --ink: #1d1f21; --soft: #5d6268; --rule: #d9dad6; --band: #f4f4f0;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #17191b; --ink: #e4e5e3; --soft: #9aa0a6; --rule: #34383c; --band: #1f2225; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 3rem 1.5rem 5rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 Charter, "Bitstream Charter", "Iowan Old Style", Georgia, serif;
}
h1 { font-size: 2rem; font-weight: 600; line-height: 1.2; letter-spacing: -0.01em; margin: 0; }
h2 {
  font-size: 1.3rem; font-weight: 600; margin: 3.5rem 0 0; padding-top: 0.8rem;
  border-top: 1px solid var(--rule);
}
h3 { font-size: 1rem; font-weight: 600; margin: 2rem 0 0.2rem; }
p { max-width: 42rem; margin: 0.5rem 0 0.9rem; }
.note, figcaption { color: var(--soft); font-size: 0.88rem; line-height: 1.45; max-width: 46rem; }
table, dl, nav { font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
nav { font-size: 0.85rem; margin: 1rem 0 0; }
nav a { color: inherit; margin-right: 1.2rem; text-underline-offset: 0.2em; }
dl {
  display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1.2rem;
  font-size: 0.85rem; margin: 1.2rem 0 0;
}
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 0.6rem 0 1.6rem; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.8rem; text-align: right; vertical-align: top; }
td { white-space: nowrap; }
thead th {
  font-weight: 600; vertical-align: bottom; border-bottom: 1.5px solid var(--ink);
  min-width: 4.5rem; max-width: 11rem;
}
tbody tr { border-bottom: 1px solid var(--rule); }
tbody tr:nth-child(even), tbody tr:nth-child(even) th { background: var(--band); }
tr > :first-child { position: sticky; left: 0; background: var(--paper); padding-left: 0.3rem; }
tbody th { font-weight: 500; }
.name { text-align: left; }
td.name { white-space: normal; min-width: 14rem; }
small { display: block; color: var(--soft); font-size: 0.86em; font-weight: 400; }
.weak { color: var(--soft); }
.theirs { font-style: italic; }
figure { margin: 1.4rem 0 2.4rem; }
.plot { overflow-x: auto; }
.plot svg { display: block; height: auto; max-width: 100%; }
@media (max-width: 48rem) { .plot svg { min-width: 34rem; } body { padding: 1.5rem 1rem 3rem; } }
@media print {
  :root {
    color-scheme: light;
    --paper: #fff; --ink: #000; --soft: #444; --rule: #bbb; --band: #f3f3f3;
  }
  @page { size: A4 landscape; margin: 14mm; }
  body { padding: 0; max-width: none; font-size: 9.5pt; }
  nav { display: none; }
  .scroll, .plot { overflow: visible; }
  table { font-size: 7pt; }
  th, td { padding: 0.2rem 0.4rem; }
  tr > :first-child { position: static; }
  tr, figure { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  thead { display: table-header-group; }
}
"""


def page(
    title: str, about: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """The whole page."""
    shown = [section for section in sections if section.tables or section.plots]
    links = "".join(f'<a href="#{_id(s)}">{_text(s.title)}</a>' for s in shown)
    listed = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    words = "".join(f"<p>{_text(part)}</p>" for part in about.split("\n\n") if part.strip())
    body = "".join(map(_section, shown))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{_text(title)}</h1>{words}<dl>{listed}</dl><nav>{links}</nav></header>\n"
        f"<main>{body}</main>\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    tables = "".join(map(_table, section.tables))
    plots = "".join(
        f'<figure><div class="plot">{plot.svg()}</div>'
        f"<figcaption>{_text(plot.caption)}</figcaption></figure>\n"
        for plot in section.plots
    )
    title = f"<h2>{_text(section.title)}</h2>{_note(section.note)}"
    return f'<section id="{_id(section)}">{title}\n{tables}{plots}</section>\n'


def _note(note: str) -> str:
    return f'<p class="note">{_text(note)}</p>' if note else ""


def _id(section: Section) -> str:
    return section.title.lower().replace(" ", "-").replace("'", "")


def _table(table: Table) -> str:
    head = "".join(_cell(cell, 'th scope="col"') for cell in table.head)
    rows = "".join(
        "<tr>"
        + _cell(row[0], 'th scope="row"')
        + "".join(_cell(cell, "td") for cell in row[1:])
        + "</tr>\n"
        for row in table.rows
    )
    return (
        f"<h3>{_text(table.title)}</h3>\n{_note(table.note)}\n"
        # Keys scroll what can be focused.
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cell(cell: Cell, tag: str) -> str:
    kind = f' class="{cell.kind}"' if cell.kind else ""
    notes = "".join(f"<small>{_text(note)}</small>" for note in cell.notes)
    return f"<{tag}{kind}>{_text(cell.text)}{notes}</{tag.split()[0]}>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
