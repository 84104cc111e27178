import html
import math
import re
import statistics

import pytest

from jax_longctx.errors import LongctxError
from jax_longctx.evaluation.intervals import mean_interval
from jax_longctx.evaluation.perplexity import perplexity_rows
from jax_longctx.evaluation.plots import best_of, curves
from jax_longctx.evaluation.report import read_about, write_about, write_report
from jax_longctx.evaluation.rows import read_rows
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.summary import summarise, with_short_labels
from jax_longctx.evaluation.tables import TIMES
from jax_longctx.methods import make_method, settings_of

MIB = 2**20


# What all rows here have.
COMMON = {"metric": "found", "seed": 0, "checkpoint": "tiny <model>", "device": "cpu"}
COMMON |= {"mesh": {"data": 1}, "dtype": "float32", "versions": {"jax": "0.0"}, "chat": False}


def row(label, task, index, score, *, length=1024, scale=1, **more):
    made = {"label": label, "task_label": task, "length": length, "index": index, "rows": 2}
    made |= {"method": {"name": label.split()[0], "settings": {"budget": 64}}}
    made |= {"task": {"name": task, "settings": {}}, "prompt_sha256": f"{task}{length}{index}"}
    made |= {"meta": {"depth": index % 2}, "measures": {"score": score}, "compiled": False}
    made |= {"seconds": {"first_token": 2.0 * scale, "token": 0.01 * scale}}
    made |= {"bytes": {"resident": 8 * MIB * scale, "read": 4 * MIB * scale}}
    return COMMON | made | more


def scored(label, task, scores, **more):
    return [row(label, task, i, score, **more) for i, score in enumerate(scores)]


def test_labels_name_files_as_far_as_they_differ():
    rows = [
        row(label, task, 0, 0.0)
        for label, task in [
            ("duo-attention heads=/m/heads.tsv share=0.5", "questions@q file=/a b/c/q.jsonl"),
            ("duo-attention heads=10/01", "questions@q file=/a b/d/q.jsonl answer_tokens=4"),
            ("snapkv budget=L/8 > quest budget=16", "questions@q file=q.jsonl"),
            ("duo-attention heads=/m/heads.tsv > quest", "questions@r file=out/1"),
        ]
    ]
    found = [(each["label"], each["task_label"]) for each in with_short_labels(rows)]
    assert found == [
        ("duo-attention heads=heads.tsv share=0.5", "questions@q file=c/q.jsonl"),
        ("duo-attention heads=10/01", "questions@q file=q.jsonl answer_tokens=4"),
        ("snapkv budget=L/8 > quest budget=16", "questions@q file=q.jsonl"),
        ("duo-attention heads=heads.tsv > quest", "questions@r file=out/1"),
    ]


def refused(label, task, index, why):
    dropped = ("measures", "seconds", "compiled", "rows", "bytes")
    kept = {k: v for k, v in row(label, task, index, 0.0).items() if k not in dropped}
    return kept | {"refused": why}


def of_spec(text, task, score):
    spec = Spec.parse(text)
    made = settings_of(make_method(spec.name, spec.at(1024)))
    return row(spec.label, task, 0, score, method=made)


@pytest.fixture(scope="module")
def rows():
    small = "snapkv budget=64"
    full = scored("full", "passkey", [100.0] * 9 + [0.0])
    theirs = scored(small, "passkey", [100.0] * 4 + [0.0] * 6, scale=0.5)
    # Nothing of the time in which a program was compiled.
    theirs[0] |= {"compiled": True, "seconds": {"first_token": 99.0, "token": 9.0}}
    graded = scored("full", "vt", (50.0, 25.0)) + scored(small, "vt", (75.0, 0.0))
    long = row("full", "passkey", 0, 100.0, length=2048)
    curve = {"perplexity": [[0, 2.0, 4], [512, 1.0, 4]]}
    measured = row("full", "stream", 0, 0.0, curves=curve, measures={"nll": 1.5})
    return [*full, *theirs, *graded, long, refused(small, "vt", 2, "a cache | of <64>"), measured]


class Page:
    """Tables as lists of rows, a cell being its texts; and everything that points anywhere."""

    def __init__(self, text):
        self.addresses = re.findall(r'\s(?:src|href|xlink:href|srcset|data)="([^"]*)"', text)
        self.ids, self.tables, parts = re.findall(r'\sid="([^"]*)"', text), {}, text.split("<h3")
        for part in parts[1:]:
            title, _, rest = part.partition(">")[2].partition("</h3>")
            rows = [re.findall(r"<t[dh]\b(.*?)</t[dh]>", row, re.S) for row in rest.split("<tr")]
            cells = [[re.findall(r">([^<>]+)", cell + "<") for cell in row] for row in rows]
            texts = [[[html.unescape(x) for x in cell] for cell in row] for row in cells if row]
            self.tables.setdefault(html.unescape(re.sub("<.*?>", "", title)), []).extend(texts)
        opened = []
        for closes, tag, empty in re.findall(r"<(/?)(\w+)\b[^>]*?(/?)>", text):
            if closes:
                assert opened.pop() == tag
            elif not empty and tag not in ("meta", "link", "br", "path", "use"):
                opened.append(tag)
        assert opened == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


def reported(folder, rows, about):
    write_report(folder, rows, about)
    text = (folder / "report.html").read_text()
    return text, Page(text)


@pytest.fixture(scope="module")
def page(rows, folder):
    return reported(folder, rows, {"title": "A & B", "about": "Words.", "published": ["citrus"]})


def test_scores_are_those_of_the_rows(page, rows):
    _, parsed = page
    head, full, snapkv = parsed.tables["At 1,024 tokens"][:3]
    assert head[:2] == [["method"], ["mean"]]
    assert head[2:] == [["passkey", "n = 10", "found"], ["vt", "n = 2", "found", "†"]]
    # Wilson's interval of 9 of 10, and of 4 of 10; of the graded ones, a bootstrap.
    low, high = mean_interval([50.0, 25.0])
    assert full == [["full"], ["63.8"], ["90", "[60, 98]"], ["38", f"[{low:.0f}, {high:.0f}]"]]
    assert snapkv[:2] == [["snapkv budget=64"], ["38.8"]]
    # Five of ten pairs go the other way: 4 both, 5 full's alone, 1 neither.
    passkey = snapkv[2]
    assert passkey[:2] == ["40", "[17, 69]"]
    assert passkey[2].startswith("▼ -50 [-") and passkey[2].endswith("]")
    low, high = map(int, re.findall(r"[-+]\d+", passkey[2])[1:])
    assert low < -50 < high < 0
    low, high = mean_interval([25.0, -25.0])
    assert snapkv[3][-2:] == [f"+0 [{low:+.0f}, {high:+.0f}]", "1 refused"]


def test_costs_refused_rows_and_other_figures_have_their_tables(page, rows):
    _, parsed = page
    costs = parsed.tables["At 1,024 tokens"]
    start = next(i for i, line in enumerate(costs) if line[1] == ["cache while answering"])
    full, snapkv = costs[start + 1 : start + 3]
    shown = ("8.0 MiB", "4.0 MiB", "2.00 s", "10.0 ms")
    assert full == [["full"], *([each, f"{TIMES} 1.00"] for each in shown), ["2"]]
    times = [r["seconds"]["first_token"] for r in rows if "snapkv" in r["label"] and "seconds" in r]
    assert statistics.median(sorted(times)[:-1]) == 1.0 and max(times) == 99.0
    assert snapkv[1] == ["4.0 MiB", f"{TIMES} 0.50"] and snapkv[3] == ["1.00 s", f"{TIMES} 0.50"]
    # Refused rows, other measures and the paper's figures have their tables.
    text, parsed = page
    cells = ["snapkv budget=64", "vt", "1,024", "1", "a cache | of <64>"]
    assert parsed.tables["Refused"][1] == [[cell] for cell in cells]
    measured = parsed.tables["nll at 1,024 tokens"]
    assert measured == [[["method"], ["stream"]], [["full"], ["1.5", "n = 1"]]]
    (title,) = (title for title in parsed.tables if title.startswith("CItruS"))
    assert parsed.tables[title][1:] == [
        [["Individual cache, theirs"], ["100"]],
        [["Shared cache, theirs"], ["100"]],
    ]
    assert '<td class="theirs">100</td>' in text


def test_the_page_is_whole_and_alone(page, folder):
    text, parsed = page
    assert "<h1>A &amp; B</h1>" in text and "tiny &lt;model&gt;" in text
    # Both lengths' fronts, the heatmap of each task with depths, the curve.
    assert text.count("<svg") == 2 + 2 + 1
    assert all(a.startswith(("#", "data:")) for a in parsed.addresses)
    assert len(parsed.ids) == len(set(parsed.ids))
    targets = [a[1:] for a in parsed.addresses if a.startswith("#")]
    targets += re.findall(r"url\(#([^)]+)\)", text)
    assert targets and set(targets) <= set(parsed.ids)
    assert "currentColor" in text and "#010203" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert not re.search(r"<script|@import|url\((?!#)", text)
    # Markdown has the same figures and pictures.
    text = (folder / "report.md").read_text()
    assert "| full | 63.8 | 90 [60, 98] |" in text
    assert "a cache \\| of <64>" in text
    pictures = re.findall(r"\]\((plots/[\w-]+\.png)\)", text)
    assert len(pictures) == 5
    for picture in pictures:
        assert (folder / picture).read_bytes()[:4] == b"\x89PNG"


def test_ours_stand_below_theirs_of_the_same_settings(tmp_path):
    task = "niah_multikey_3@topics"
    rows = [of_spec("resa:ratio=0.025", task, 100.0)]
    rows.append(of_spec("resa:selector=arkvale,ratio=0.025", task, 0.0))
    rows.append(of_spec("resa:selector=arkvale,ratio=0.05", task, 50.0))
    # `qc_stride` is 5 in both: settings that are not named count, too.
    rows.append(of_spec("refreshkv:qc_stride=5", "vt", 100.0))
    rows.append(of_spec("refreshkv:schedule=fixed,stride=10", "vt", 100.0))
    text, page = reported(tmp_path, rows, {"published": ["resa", "refreshkv"]})
    table = next(t for name, t in page.tables.items() if "Llama-3.1-8B, 8K, 2.5%" in name)
    names = [line[0][0] for line in table]
    for theirs, ours, score in [
        ("Quest + RESA", "resa ratio=0.025", "100"),
        ("ArkVale + RESA", "resa selector=arkvale ratio=0.025", "0"),
    ]:
        at = names.index(f"{theirs}, theirs")
        assert names[at + 1] == f"{ours}, ours" and table[at + 1][4][0] == score
    assert table[names.index("Quest + RESA, theirs")][4][0] == "40"
    # A run with another ratio is not theirs.
    assert "resa selector=arkvale ratio=0.05, ours" not in names
    assert "refreshkv qc_stride=5, ours" in text
    assert "refreshkv schedule=fixed stride=10, ours" not in text


def test_pairs_are_the_same_prompts_alone():
    other = row("h2o", "passkey", 0, 0.0, prompt_sha256="another text")
    rows = [*scored("full", "passkey", [100.0] * 2), other, row("h2o", "passkey", 1, 0.0)]
    for label, values in (("full", (1.0, 2.0, 3.0)), ("h2o", (1.5, 2.5, 3.5))):
        for i, value in enumerate(values):
            rows.append(row(label, "stream", i, 0.0, measures={"nll": value}))
    (group,) = summarise(rows).groups
    found = group.scores["h2o", "passkey"].score
    assert found.value.count == 2
    assert (found.difference.mean, found.difference.count) == (-100.0, 1)
    assert group.scores["full", "passkey"].score.difference is None
    assert group.scores["h2o", "stream"].score is None
    measure = group.scores["h2o", "stream"].others["nll"]
    assert (measure.value.mean, measure.value.count) == (2.5, 3)
    # Each text is half a nat worse, whatever the texts: resampling pairs, not values, says so.
    assert (measure.difference.mean, measure.difference.low, measure.difference.high) == (0.5,) * 3
    assert group.scores["full", "stream"].others["nll"].difference is None
    rows = [row("full", "a", 0, 100.0), row("full", "b", 0, 50.0), row("h2o", "a", 0, 100.0)]
    (group,) = summarise(rows).groups
    assert group.means == {"full": 75.0}
    points = [(1, 50), (2, 40), (2, 60), (3, 60), (4, 90), (1, 30)]
    assert best_of(points) == [(1, 50), (2, 60), (4, 90)]


def test_runs_of_perplexity_are_rows():
    run = {"method": "h2o", "given": {"budget": "64"}, "settings": {"budget": 64}, "score": 8}
    run |= {"protocol": "P1", "question": "", "length": 1024, "batch": 1}
    run |= {"device": "cpu", "mesh": {}, "versions": {}, "means": [1.0, 3.0]}
    run |= {"windows": [[1016, 1019, [0.5, 2.0]], [1020, 1023, [1.5, 4.0]]]}
    full = run | {"method": "full", "given": {}, "means": [0.5, 2.5]}
    rows = [*perplexity_rows(full), *perplexity_rows(run)]
    assert rows[3]["curves"] == {"perplexity": [[1017.5, 2.0, 4], [1021.5, 4.0, 4]]}
    assert [r["label"] for r in perplexity_rows(run | {"ahead": True})] == ["h2o budget=64*"] * 2
    (group,) = summarise(rows).groups
    found = group.scores["h2o budget=64", "perplexity P1"].others["nats a token"]
    assert (found.value.mean, found.difference.mean) == (2.0, 0.5)
    (plot,) = curves(rows)
    lines = {line.get_label(): line.get_ydata() for line in plot.figure.axes[0].lines}
    # Pooled over texts: the exponential of (0.5 + 2) / 2 and of (1.5 + 4) / 2.
    assert lines["h2o budget=64"] == pytest.approx([math.exp(1.25), math.exp(2.75)])


def test_what_a_report_says_of_its_run_is_kept(tmp_path):
    assert read_about(tmp_path) == {}
    write_about(tmp_path, {"title": "T"})
    assert read_about(tmp_path) == {"title": "T"}
    for name, text, read, message in (
        ("about.json", "{", read_about, "is not a JSON file"),
        ("about.json", "[" * 100_000, read_about, "nested too deeply"),
        ("none.jsonl", "", read_rows, r"rows\.jsonl cannot be read"),
        ("rows.jsonl", '{"format": 1, "given": {}}\n', read_rows, "format 1, expected 2: another"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(LongctxError, match=message):
            read(tmp_path)
