"""The notebook and the guides' Python run; the papers' page says what was measured, and how."""

import io
import json
import re
from pathlib import Path

import pytest

from checkpoints_convert import convert
from jax_longctx.evaluation.config import read_suite
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

ROOT = Path(__file__).parents[1]
PAPERS = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "docs/one-context-many-questions.ipynb"
ROWS = re.findall(r"^\| (?!in the paper|---)(.+) \| (.+) \| (.+) \| (.+) \|$", PAPERS, re.MULTILINE)
SECTIONS = PAPERS.split("\n## ")[1:]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md")))


def test_every_row_of_the_papers_page_says_how_and_what():
    assert len(ROWS) == PAPERS.count("\n|") - 2 * len(SECTIONS)
    assert len(SECTIONS) == 5
    for paper, command, ours, theirs in ROWS:
        assert paper and theirs
        assert re.search(r"`jax-longctx |suite, part|the same (part|command)", command), command
        # Said to be missing, with what it needs, or a figure.
        assert re.search(r"not measured[:,] \S+|\d", ours), ours


def test_the_parts_that_rows_name_are_those_of_their_papers_suite():
    for section in SECTIONS:
        (suite,) = re.findall(r"^`jax-longctx eval --suite (\S+) ", section, re.MULTILINE)
        named = re.findall(r'suite, part "([^"]+)"', section)
        assert named and set(named) == {part.name for part in read_suite(suite).part}


def test_our_figures_are_those_of_the_benchmarks():
    measured = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\d[\d,.]*\d|\d", measured))
    for _, _, ours, _ in ROWS:
        said = re.sub(r"not measured.*|`[^`]*`", "", ours)
        assert set(re.findall(r"\d[\d,.]*\d|\d", said)) <= known, ours


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny converted checkpoint, whose chat template shows every message."""
    folder = tmp_path_factory.mktemp("docs")
    config = hf_config("llama", max_position_embeddings=8192, num_hidden_layers=1)
    write_checkpoint(folder / "hf", config, random_state(config))
    settings = folder / "hf/tokenizer_config.json"
    shown = {"chat_template": "{% for one in messages %}{{ one['content'] }}{% endfor %}"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | shown))
    convert(folder / "hf", folder / "model")
    return folder / "model"


@pytest.mark.slow
def test_the_pages_python_runs(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "llama-8b").symlink_to(model)
    for name in ("a.txt", "b.txt", "book.txt"):
        (tmp_path / name).write_text("The rain fell on the roof. " * (len(name) * 5))
    monkeypatch.chdir(tmp_path)
    # serving/test_guide.py runs the code of the guide to the server, beside one.
    texts = [page.read_text("utf-8") for page in PAGES if page.name != "serve.md"]
    blocks = [
        code for text in texts for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    assert len(blocks) == 2
    for code in blocks:
        # Paths are closed when their text is read, which the pages leave to Python.
        exec(code, {"open": lambda name: io.StringIO(Path(name).read_text())})
    assert capsys.readouterr().out.count("\n") >= 3
    assert (tmp_path / "both.ctx").exists()


def cells(kind):
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def printed(cell):
    return "".join("".join(one.get("text", "")) for one in cell["outputs"])


def test_the_notebook_is_kept_executed_and_small():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert set(kinds) == {"stream", "display_data"} and kinds.count("display_data") == 3
    assert NOTEBOOK.stat().st_size < 500_000


def test_what_the_notebook_concludes_is_in_its_outputs():
    closing = "".join(cells("markdown")[-1]["source"])
    shown = "".join(map(printed, cells("code")))
    figures = re.findall(r"\d[\d,.]*\d|\d", closing)
    assert len(figures) > 4
    assert set(figures) <= set(re.findall(r"\d[\d,.]*\d|\d", shown))


@pytest.mark.slow
def test_the_notebooks_cells_run_in_order(model):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first, *rest = ("".join(cell["source"]) for cell in cells("code"))
    names = {}
    exec(first, names)
    assert len(names["METHODS"]) == 4
    names |= {"CHECKPOINT": str(model), "TOKENS": 2000}
    try:
        for cell in rest:
            exec(cell, names)
            # Fewer questions than the notebook asks.
            del names.get("FACTS", [])[3:]
        drawn = pyplot.get_fignums()
    finally:
        pyplot.close("all")
    results = names["results"]
    assert list(results) == list(names["METHODS"]) and len(drawn) == 3
    assert all(len(result["answers"]) == len(names["FACTS"]) for result in results.values())
    assert all(1500 < result["tokens"] <= 2001 for result in results.values())
    held, read = (
        {name: result[key] for name, result in results.items()} for key in ("answering", "read")
    )
    assert held["snapkv"] < held["full"] / 2 and read["snapkv"] < read["full"] / 2
    assert read["quest"] < read["full"] < held["quest"]
