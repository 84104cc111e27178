"""The notebook runs as its cells say; commands in README, guides and results are commands."""

import io
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from jax_longctx.cli.eval import Choice
from jax_longctx.cli.main import app
from jax_longctx.evaluation.config import read_suite
from jax_longctx.evaluation.runner import check_config
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import make_method

ROOT = Path(__file__).parents[1]
PAPERS = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "docs/one-context-many-questions.ipynb"
COMMANDS = re.findall(r"`jax-longctx ([^`]+)`", PAPERS)
ROWS = re.findall(r"^\| (?!in the paper|---)(.+) \| (.+) \| (.+) \| (.+) \|$", PAPERS, re.MULTILINE)
SECTIONS = PAPERS.split("\n## ")[1:]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md")))
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))


def commands_of(text):
    """The `jax-longctx` commands in a page's code blocks, without what is piped into them."""
    for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\.venv/bin/|[^`]*\| )?jax-longctx (?!ask:)(.+)", line)
            if found:
                yield re.sub(r" +#.*", "", found[1])


WRITTEN = [
    *itertools.chain.from_iterable(commands_of(page.read_text("utf-8")) for page in PAGES),
    *(
        command.removeprefix("jax-longctx ")
        for path in RESULTS
        for command in json.loads(path.read_text("utf-8"))["command"]
        if command.startswith("jax-longctx ")
    ),
]


def parsed(words):
    """The command that these words name, and its options, without running it."""
    command, context, name = typer.main.get_command(app), None, "jax-longctx"
    while True:
        context = command.make_context(name, list(words), parent=context)
        left = [*getattr(context, "_protected_args", ()), *context.args]
        if not left or not hasattr(command, "resolve_command"):
            assert not left
            return context
        name, command, words = command.resolve_command(context, left)


def test_the_pages_commands_are_found():
    assert len(WRITTEN) > 60
    assert any(text.startswith("generate -") for text in WRITTEN)
    assert any("-m reattention:count=1 " in text for text in WRITTEN)


@pytest.mark.parametrize("text", dict.fromkeys([*COMMANDS, *WRITTEN]))
def test_a_written_command_parses(text, tmp_path, monkeypatch):
    # What a command reads must be there: paths are looked at with the other arguments.
    monkeypatch.chdir(tmp_path)
    words = shlex.split(text)
    for option, value in itertools.pairwise(words):
        if option in ("-c", "--checkpoint"):
            (tmp_path / value).mkdir(parents=True, exist_ok=True)
            (tmp_path / value / "manifest.json").touch()
        elif option in ("--config", "--data"):
            (tmp_path / value).touch()
        elif option in ("--load-context", "plot"):
            (tmp_path / value).mkdir(parents=True, exist_ok=True)
    for word in words:
        if re.fullmatch(r"[\w-]+\.(txt|jsonl|gguf)", word):
            (tmp_path / word).touch()
    context = parsed(words)
    options = context.params
    if options.get("suite"):
        read_suite(options["suite"])
    if context.info_name == "run":
        names = ("config", "methods", "tasks", "lengths", "trials")
        check_config(Choice(**{name: options[name] for name in names}).read())
    for method in options.get("methods") or ():
        spec = Spec.parse(method)
        make_method(spec.name, spec.at(8192))


@pytest.mark.parametrize("text", ["eval --suit quick", "eval nothing", "bench decode -m full x"])
def test_what_is_no_command_does_not_parse(text):
    with pytest.raises((typer.TyperException, AssertionError)):
        parsed(shlex.split(text))


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


@pytest.mark.slow
def test_the_pages_python_runs(tmp_path, monkeypatch, capsys):
    from checkpoints_convert import convert
    from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

    config = hf_config("llama", max_position_embeddings=8192)
    write_checkpoint(tmp_path / "hf", config, random_state(config))
    # The tiny model's own template shows no message.
    settings = tmp_path / "hf/tokenizer_config.json"
    shown = {"chat_template": "{% for one in messages %}{{ one['content'] }}{% endfor %}"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | shown))
    convert(tmp_path / "hf", tmp_path / "llama-8b")
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
def test_the_notebooks_cells_run_in_order(tmp_path, monkeypatch):
    import matplotlib

    from checkpoints_convert import convert
    from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

    matplotlib.use("agg")
    from matplotlib import pyplot

    source, folder = tmp_path / "hf", tmp_path / "model"
    config = hf_config("llama", max_position_embeddings=4096)
    write_checkpoint(source, config, random_state(config))
    convert(source, folder)
    first, *rest = ("".join(cell["source"]) for cell in cells("code"))
    names = {}
    exec(first, names)
    assert len(names["METHODS"]) == 4
    names |= {"CHECKPOINT": str(folder), "TOKENS": 2000}
    try:
        for cell in rest:
            exec(cell, names)
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
