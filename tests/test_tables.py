"""Pages and pictures are those of the committed results, and results say where they come from."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/tables.py")
assert SPEC and SPEC.loader
tables = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tables
SPEC.loader.exec_module(tables)
RESULTS = tables.read_results()


def sample(**changed):
    """What a result file holds."""
    rows = [{"method": "full", "length": 4096, "score": 98, "interval": [90, 100], "n": 50}]
    made = {
        "title": "Pass keys",
        "about": "Keys found.",
        "kind": "quality",
        "model": "small",
        "hardware": "a CPU",
        "software": "JAX 0.11.2",
        "date": "2026-11-21",
        "revision": "1234567",
        "command": ["jax-longctx eval passkey"],
        "baseline": "full attention",
        "limit": "100",
        "tables": [{"index": "method", "columns": "length"}],
        "rows": rows,
    }
    return made | changed


def test_no_page_and_no_picture_is_stale(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_figure_makes_pages_and_pictures_stale():
    one = RESULTS["passkey-depth"]
    first, *others = one.rows
    changed = dataclasses.replace(one, rows=[first | {"score": 91}, *others])
    assert len(tables.stale_pictures({"passkey-depth": changed})) == 1
    assert tables.stale_pictures({"passkey-depth": one}) == {}
    step = RESULTS["decode-reattention"]
    rows = [row | {"reattention_ms": 1.23} for row in step.rows]
    made = tables.pages(RESULTS | {"decode-reattention": dataclasses.replace(step, rows=rows)})
    stale = {path.name for path, text in made.items() if path.read_text("utf-8") != text}
    assert stale == {"README.md", "benchmarks.md", "papers.md"}


def test_check_names_a_stale_page_and_writes_nothing(monkeypatch, capsys):
    page = tables.DOCS / "papers.md"
    before = page.read_text("utf-8")
    monkeypatch.setattr(tables, "pages", lambda results: {page: before + "more\n"})
    assert tables.main(["--check"]) == 1
    assert "docs/papers.md is stale; run python docs/tables.py" in capsys.readouterr().out
    assert page.read_text("utf-8") == before


@pytest.mark.parametrize(
    "field", ["hardware", "software", "revision", "date", "command", "baseline", "limit", "rows"]
)
def test_a_result_says_where_it_comes_from(field):
    found = sample()
    assert tables.parse_result("one", found).rows == found["rows"]
    with pytest.raises(tables.ResultError, match=f"one.json lacks {field}"):
        tables.parse_result("one", {key: found[key] for key in found if key != field})
    with pytest.raises(tables.ResultError, match=f"one.json has an empty '{field}'"):
        tables.parse_result("one", sample(**{field: type(found[field])()}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hardwear": "x"}, "unknown fields hardwear"),
        ({"kind": "taste"}, "kind 'taste'; expected one of"),
        ({"date": "yesterday"}, "date 'yesterday'; expected YYYY-MM-DD"),
        ({"tables": []}, "neither 'tables' nor 'columns'"),
        ({"rows": [{"method": "full", "score": 98}]}, "a row without 'n'"),
        ({"rows": [{"method": "full", "score": 98, "n": 50}]}, "a row without an interval"),
    ],
)
def test_a_wrong_result_is_refused_in_one_line(changed, message):
    with pytest.raises(tables.ResultError, match=message):
        tables.parse_result("one", sample(**changed))


def test_a_table_has_intervals_samples_and_empty_cells():
    longer = {"method": "h2o", "length": 8192, "score": 0, "interval": [0, 16], "n": 20}
    one = tables.parse_result("one", sample(rows=[*sample()["rows"], longer]))
    assert tables.tables_of(one).splitlines() == [
        "| method | 4,096 | 8,192 |",
        "| --- | --- | --- |",
        "| `full` | 98 [90, 100] | |",
        "| `h2o` | | 0 [0, 16] |",
    ]
    assert tables.samples(one) == "n by length: 50 at 4,096, 20 at 8,192 tokens."


def test_a_lookup_wants_one_row():
    row = tables.lookup(RESULTS)
    assert row("decode-reattention", context=131072, batch=1)["full_ms"] > 0
    with pytest.raises(tables.ResultError, match="has 0 rows with"):
        row("decode-reattention", context=1)
    with pytest.raises(tables.ResultError, match="has 3 rows with"):
        row("decode-reattention", context=131072)
    with pytest.raises(tables.ResultError, match=r"docs/results/none\.json is not there"):
        row("none")


def test_every_result_is_on_the_page_with_its_provenance():
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    blocks = {block.split("\n")[0]: block for block in page.split("\n### ")[1:]}
    # The memory of the methods is computed, and stands on their own page.
    measured = [result for name, result in RESULTS.items() if name != "method-memory"]
    assert len(blocks) == len(measured)
    for result in measured:
        block = blocks[result.title]
        told = (result.hardware, result.revision, result.date, result.baseline, result.limit)
        assert all(text in block for text in (*told, *result.command))
        assert ("**Older prompts.**" in block) is result.older_prompts


def test_scores_of_older_prompts_are_marked_wherever_they_are_shown():
    marked = {name for name, result in RESULTS.items() if result.older_prompts}
    assert {"passkey-budget", "passkey-depth", "passkey-million", "reattention-sizes"} <= marked
    template = (ROOT / "docs/templates/papers.md.j2").read_text("utf-8")
    rows = [
        line for line in template.splitlines() if re.search(r"depth\(|size_of\(|budget\(", line)
    ]
    shown = [line for line in rows if line.startswith("| ")]
    assert len(shown) == 3 and all("older prompts" in line for line in shown)
    # README shows none of them.
    readme = (ROOT / "docs/templates/which-method.md.j2").read_text("utf-8")
    assert not [name for name in marked if f'"{name}"' in readme]


def test_readme_is_one_page_without_revisions():
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 150
    assert not re.search(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", text)


def test_the_memory_of_the_methods_is_what_the_command_prints():
    shown = CliRunner().invoke(app, ["methods", "--context", "131072", "--json"]).stdout
    now = {found["name"]: found["memory"] for found in map(json.loads, shown.splitlines())}
    for row in RESULTS["method-memory"].rows:
        keys = ("peak_bytes", "resident_bytes", "read_bytes")
        assert {key: row[key] for key in keys} == {key: now[row["method"]][key] for key in keys}


def measured(**changed):
    """What `bench decode --out` or `bench throughput --out` holds."""
    row = {"method": "full", "settings": {}, "batch": 1, "context": 32768, "read": 4}
    row |= {"seconds": 5.2e-3, "limit_seconds": 4.7e-3, "share": 0.9, "speedup": 1.0}
    slower = row | {"method": "quest", "settings": {"budget": "500"}, "speedup": 0.8}
    failed = {"method": "dynamic-ntk", "settings": {}, "failed": "needs another rope"}
    rows = [each | changed for each in (row, slower)]
    facts = {"device": "a GPU", "jax": "0.11.2", "copy_bandwidth": 4e12, "model": "llama-3.1-8b"}
    return {**facts, "layers": {"timed": 32, "of": 32}, "rows": [*rows, failed]}


# Of a kind of benchmark: what its rows have beside those above, and the end of a row of the page.
TAKEN = {
    "decode-steps": (
        {"kernels_layer": 12.3, "gap_seconds": 4e-4},
        "1 | 5.20 ms | 4.70 ms | 90% | 12.3 | 0.40 ms | 0.80x |",
    ),
    "throughput": (
        {"tokens_per_second": 8123.4, "limit_tokens_per_second": 14000.0, "batch": 128},
        "128 | 8,123 | 14,000 | 5.20 ms | 4.70 ms | 90% | 0.80x |",
    ),
    "serving": (
        {"alone_seconds": 4e-3, "tokens_per_second": 3076.9, "batch": 16, "gap_p99": 0.15},
        "16 | 4.00 ms | 5.20 ms | 3,077 | 0.8x | 90% | 150.00 ms |",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_benchmark_is_taken_drawn_and_shown(name, tmp_path, monkeypatch):
    """The file becomes a result, its picture and its part of the page."""
    changed, line = TAKEN[name]
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps(measured(**changed)))
    write, results = tables.write_result, tmp_path / "results"
    results.mkdir()
    monkeypatch.setattr(tables, "write_result", lambda result: write(result, results))
    monkeypatch.setattr(tables, "read_results", lambda: RESULTS)
    given = ["--command", "jax-longctx bench", "--revision", "1234567", "--date", "2026-11-23"]
    assert tables.main(["--take", str(raw), *given]) == 0
    (result,) = (
        tables.parse_result(path.stem, json.loads(path.read_text())) for path in results.iterdir()
    )
    assert result.name == name and (result.revision, result.date) == ("1234567", "2026-11-23")
    page = tables.environment(RESULTS | {name: result}).get_template("benchmarks.md.j2").render()
    block = page.partition(f"### {result.title}")[2].partition("\n### ")[0]
    assert f"| `quest:budget=500` | 32,768 | {line}" in block
    assert "`dynamic-ntk` was not timed: needs another rope." in block
    if not result.picture:
        return
    picture = tmp_path / result.picture
    tables.draw(result, picture)
    assert tables.fingerprint(result).encode() in picture.read_bytes()


def test_another_file_is_not_taken(tmp_path, capsys):
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps({"rows": [{"method": "full"}]}))
    assert tables.main(["--take", str(raw)]) == 2
    assert "expected a file of `bench decode`" in capsys.readouterr().err
