"""The documentation: pages are current, links and commands resolve, what is shown runs."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from jax_longctx.choosing import parse_table
from jax_longctx.cli.eval import Choice
from jax_longctx.cli.main import app
from jax_longctx.evaluation.config import read_suite
from jax_longctx.evaluation.runner import check_config
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import make_method
from tests.checkpoints_convert.tiny import random_state, write_checkpoint
from tests.jax_longctx.cli.tiny_model import hf_config, write_tokenizer
from tests.patience import patience

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What `*.in.md` holds is seen in the page that is made of it.
WRITTEN = [path for path in DOCS.rglob("*.md") if not path.name.endswith(".in.md")]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN])
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
NOTEBOOK = DOCS / "one-context-many-questions.ipynb"
PAPERS = (DOCS / "papers.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!in the paper|---)(.+) \| (.+) \| (.+) \| (.+) \|$", PAPERS, re.MULTILINE)
SECTIONS = PAPERS.split("\n## ")[1:]
FIGURE = r"\d[\d,.]*\d|\d"
# What a line of a shell block may begin with beside our own commands, without saying what it needs.
SHELL = {"cat", "cd", "echo", "export", "pytest", "wait"}


def load(name):
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def read(path):
    return path.read_text(encoding="utf-8")


generate, tables = load("generate"), load("tables")
leaderboard, sum_rows = load("leaderboard"), load("sum_rows")
RESULTS = tables.read_results()


@pytest.mark.parametrize("name", generate.PAGES)
@pytest.mark.quick("commands", "benchmarks", "papers", "leaderboard", "README", "choices")
def test_a_generated_file_is_up_to_date(name):
    made = generate.PAGES[name](RESULTS)
    assert read(ROOT / name) == made, f"{name} is stale; run: python docs/generate.py"


def test_check_names_what_is_stale_and_writes_nothing(monkeypatch, capsys):
    page = DOCS / "papers.md"
    before = read(page)
    for more, stale in (("", False), ("more\n", True)):
        pages = {"docs/papers.md": lambda results, more=more: before + more}
        monkeypatch.setattr(generate, "PAGES", pages)
        with pytest.raises(SystemExit) if stale else contextlib.nullcontext() as ended:
            generate.main(["--check"])
        assert stale or capsys.readouterr().out == "up to date\n"
        assert not stale or str(ended.value).startswith("stale: docs/papers.md; run: python docs/g")
    assert read(page) == before


def test_every_method_has_a_card_with_all_settings_explained_and_notes_are_of_methods():
    from jax_longctx.methods import describe

    page = read(DOCS / "methods.md")
    cards = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    names = generate.own_methods()
    assert len(names) > 20 and sorted(cards) == sorted(names)
    for name in names:
        for row in ("Paper", "Changes", "Keeps", "Reads", "Question", "Fails when"):
            assert re.search(rf"^\| \*\*{row}\*\* \| \S", cards[name], re.MULTILINE), (name, row)
        for setting in describe(name)["settings"]:
            found = re.search(rf"^\| `{setting}` \|.*\| (.*) \|$", cards[name], re.MULTILINE)
            assert found and found[1], f"{name}: the class's docstring does not explain {setting}"
    for name, entry in generate.notes().items():
        assert name in names and set(entry) <= {"keeps", "reads", "fails", "title", "link"}


def test_the_command_reference_has_every_command_and_option():
    page, spellings = read(DOCS / "commands.md"), []

    def walk(command, path):
        section = page.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
        assert section, path
        every = [each.opts + each.secondary_opts for each in command.params]
        for spelling in itertools.chain.from_iterable(every):
            if spelling.startswith("-"):
                assert f"`{spelling}`" in section, (path, spelling)
                spellings.append(spelling)
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}")

    walk(main_command(), "jax-longctx")
    assert len(spellings) > 150


def test_an_entry_for_several_names_becomes_one_for_each():
    split = load("docstrings").split
    text = "One.\n\nArgs:\n  k, v: keys and\n    values.\n  x: other.\n\nSee a, b: no entry."
    entries = "  k: keys and\n    values.\n  v: keys and\n    values.\n  x: other."
    assert split(text) == f"One.\n\nArgs:\n{entries}\n\nSee a, b: no entry."


def test_the_page_on_a_decode_step_names_what_its_files_hold():
    page = (ROOT / "docs/design/a-decode-step.md").read_text(encoding="utf-8")
    sections = re.split(r"^## \d+\. (\S+)$", page, flags=re.MULTILINE)[1:]
    assert len(set(sections[::2])) <= 8
    for file, text in itertools.batched(sections, 2):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        held = {name for node in tree.body for name in _names(node)}
        named = re.findall(r"`([\w.]+)\(\)`", text)
        assert named and set(named) <= held, (file, set(named) - held)


def _names(node):
    """What a statement of a module defines, with the functions of a class."""
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.ClassDef):
        yield from (f"{node.name}.{each}" for part in node.body for each in _names(part))


def test_a_build_fails_on_a_missing_name_and_on_what_it_would_load(tmp_path):
    from mkdocs.exceptions import PluginError

    hooks = load("hooks")
    (tmp_path / "api").mkdir()
    page = tmp_path / "api/all.html"
    entries = "".join(f'<h2 id="{name}">' for name in hooks.public_names())
    page.write_text(entries)
    # The theme's own: the navigation is hidden below 1,120 pixels, not 1,220.
    (material,) = importlib.util.find_spec("material").submodule_search_locations
    shutil.copytree(Path(material, "templates/assets"), tmp_path / "assets")
    hooks.on_post_build({"site_dir": tmp_path})
    for name in ("stylesheets/main.*.css", "javascripts/bundle.*.js"):
        (path,) = (tmp_path / "assets").glob(name)
        assert "70em" in path.read_text() and "76.25em" not in path.read_text()
    with pytest.raises(PluginError, match="the theme's width"):
        hooks.on_post_build({"site_dir": tmp_path})
    page.write_text(entries.replace('"jax_longctx.load"', '"jax_longctx.loud"'))
    with pytest.raises(PluginError, match=r"lacks jax_longctx\.load;"):
        hooks.on_post_build({"site_dir": tmp_path})
    page.write_text(f'{entries}<script src="https://cdn.example.org/x.js">')
    with pytest.raises(PluginError, match=r"all\.html loads .*cdn\.example\.org"):
        hooks.on_post_build({"site_dir": tmp_path})


def test_the_site_is_built_strictly():
    # With --quiet mkdocs drops warnings before --strict counts them.
    (command,) = re.findall(r"^\t.*mkdocs build.*$", read(ROOT / "Makefile"), re.MULTILINE)
    assert "--strict" in command and not {"-q", "--quiet"} & set(command.split())
    assert re.search(r"^run docs make docs$", read(ROOT / ".ci/run"), re.MULTILINE)
    rules = yaml.safe_load(read(ROOT / "mkdocs.yml"))["validation"]
    assert {rule for group in rules.values() for rule in group.values()} == {"warn"}


def test_the_notebook_becomes_a_page_with_its_pictures():
    hooks = load("hooks")
    notebook = json.loads(read(DOCS / f"{hooks.NOTEBOOK}.ipynb"))
    page, pictures = hooks.notebook_page(notebook, hooks.NOTEBOOK)
    assert page.startswith("# ") and f"]({hooks.NOTEBOOK}.ipynb)" in page
    assert len(pictures) == 3
    for path, content in pictures.items():
        assert f"]({path})" in page and content.startswith(b"\x89PNG")
    assert all("".join(cell["source"]) in page for cell in cells("code"))


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load(read(ROOT / "mkdocs.yml"))

    def leaves(node):
        if isinstance(node, str):
            yield from [path.relative_to(DOCS).as_posix() for path in DOCS.glob(node)] or [node]
        else:
            for child in node.values() if isinstance(node, dict) else node:
                yield from leaves(child)

    listed = list(leaves(config["nav"]))
    written = {path.relative_to(DOCS).as_posix() for path in WRITTEN}
    made = {"contributing.md", "one-context-many-questions.md", "guides/*.md"}
    assert len(listed) == len(set(listed)) and written | made >= set(listed) >= written


def blocks(path, *languages):
    return [found[3] for found in FENCE.finditer(read(path)) if found[2] in languages]


def lines_of(block):
    """A shell block's commands, each as words; what follows `<<` is left out."""
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line.removeprefix("$ "), comments=True):
            yield words


def ours(words):
    """The `jax-longctx` commands among the words, each without its name."""
    left = iter(words)
    for word in left:
        if word.rpartition("/")[2] == "jax-longctx":
            yield list(itertools.takewhile(lambda w: w not in ("|", "&", "&&", ";", ">"), left))
        elif "jax-longctx " in word:
            yield from ours(shlex.split(word.partition("=")[2] or word))


def unknown(block):
    """Why a block's lines are no commands that are known, without a statement of what they need."""
    makefile = read(ROOT / "Makefile")
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for words in lines_of(block):
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if not words or words[0] in SHELL or list(ours(words)):
            continue
        if words[0] == "make":
            targets = [word for word in words[1:] if "=" not in word]
            for target in targets:
                if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
                    yield f"make has no target {target}"
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                if not set(extra.split(",")) <= set(extras):
                    yield f"pyproject.toml has no extra {extra}"
        elif not block.startswith("# Needs: "):
            yield f"{words[0]}: the block does not begin with '# Needs: '"


def commands_of(path):
    for block in blocks(path, "sh", "console", "bash"):
        yield from itertools.chain.from_iterable(map(ours, lines_of(block)))
    # They begin a line in a block of no language, where output may stand too.
    begins = r"^(?:\.venv/bin/|[^`\n]*\| )?jax-longctx (?:.*\\\n)*.*"
    for block in blocks(path, ""):
        for text in re.findall(begins, block, flags=re.MULTILINE):
            yield from itertools.chain.from_iterable(map(ours, lines_of(text)))
    if path.name == "papers.md":
        yield from map(shlex.split, re.findall(r"`jax-longctx ([^`]+)`", read(path)))


def parsed(words):
    """The command that these words name, and its options, without running it."""
    command, context, name = main_command(), None, "jax-longctx"
    while True:
        context = command.make_context(name, list(words), parent=context)
        left = [*getattr(context, "_protected_args", ()), *context.args]
        if not left or not hasattr(command, "resolve_command"):
            assert not left
            return context
        name, command, words = command.resolve_command(context, left)


@functools.cache
def main_command():
    return typer.main.get_command(app)


def parsed_here(words):
    """The same in an empty folder: what the command reads is made."""
    for option, value in itertools.pairwise(words):
        if option in ("-c", "--checkpoint"):
            Path(value).mkdir(parents=True, exist_ok=True)
            Path(value, "manifest.json").touch()
        elif option == "--config":
            Path(value).touch()
    while True:
        try:
            return parsed(words)
        except typer.BadParameter as error:
            missing = re.fullmatch(r"(\w+) '(.+)' does not exist\.", error.message)
            if missing is None:
                raise
            made = Path(missing[2])
            made.parent.mkdir(parents=True, exist_ok=True)
            made.touch() if missing[1].lower() == "file" else made.mkdir()


def check(words):
    """That the words name a command and its options, and that it would accept their values."""
    # A placeholder of the help, and the methods that tutorials add.
    words = [re.sub(r"^(NAME|every-second|random-pages)\b", "full", word) for word in words]
    try:
        context = parsed_here(words)
    except typer.Exit as ended:
        # --help and --version.
        assert ended.exit_code == 0
        return
    options = context.params
    if options.get("suite"):
        read_suite(options["suite"])
    # A file of the settings is not there.
    if context.info_name == "run" and (options["methods"] or not options["config"]):
        names = ("config", "methods", "tasks", "lengths", "trials")
        given = {name: options[name] for name in names}
        check_config(Choice(**given | {"trials": options["trials"] or 20}).read())
    methods = options.get("methods") or ()
    for method in [methods] if isinstance(methods, str) else methods:
        spec = Spec.parse(method)
        make_method(spec.name, spec.at(8192))


# (where, its commands): pages, and the results that say how they were made.
WRITTEN_COMMANDS = {
    **{name_of(path): list(commands_of(path)) for path in PAGES},
    **{
        path.name: [
            shlex.split(command)[1:]
            for command in json.loads(read(path))["command"]
            if command.startswith("jax-longctx ")
        ]
        for path in sorted((DOCS / "results").glob("*.json"))
    },
}


@pytest.mark.parametrize("where", [where for where, found in WRITTEN_COMMANDS.items() if found])
def test_written_commands_name_commands_and_their_options(where, tmp_path, monkeypatch):
    for number, words in enumerate(WRITTEN_COMMANDS[where]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            check(words)
        except Exception as error:
            error.add_note(shlex.join(words))
            raise


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve_and_other_lines_of_blocks_are_known(path):
    for block in blocks(path, "sh", "console", "bash"):
        assert list(unknown(block)) == [], block
    for target in links(path):
        file, _, anchor = target.partition("#")
        # The site has this page from the notebook or from CONTRIBUTING.md.
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        # Anchors of the API reference are made in the build, which checks them.
        if anchor and there.suffix == ".md" and there.parent.name != "api":
            assert anchor in anchors(there), target


def test_what_is_no_command_does_not_parse_and_commands_and_links_are_found():
    for text in (
        "ask --no-such-option",
        "eval --suit quick",
        "eval nothing",
        "bench decode -m full x",
    ):
        with pytest.raises((typer.TyperException, AssertionError)):
            parsed(shlex.split(text))
    found = list(itertools.chain.from_iterable(WRITTEN_COMMANDS.values()))
    assert len(found) > 250
    assert any(words[0] == "generate" for words in found)
    assert any("reattention:count=1" in words for words in found)
    known = "make demo\nexport A=1\nB=2 jax-longctx ask x\npip install '.[cuda]'"
    assert list(unknown(known)) == []
    assert list(unknown("make dmo\npip install '.[cude]'\nsrun ls")) == [
        "make has no target dmo",
        "pyproject.toml has no extra cude",
        "srun: the block does not begin with '# Needs: '",
    ]
    assert list(unknown("# Needs: Slurm.\nsrun ls")) == []
    nested = shlex.split("""ssh --command="jax-longctx --processes auto ask 'a b'" | x""")
    assert list(ours(nested)) == [["--processes", "auto", "ask", "a b"]]
    assert "docs/architecture.md" in links(ROOT / "CONTRIBUTING.md")
    assert {"the-mesh", "the-contract-of-a-method"} <= anchors(DOCS / "architecture.md")


def test_the_manifests_commands_parse(tmp_path, monkeypatch):
    found = []
    for path in PAGES:
        for block in blocks(path, "yaml"):
            assert block.startswith("# Needs: "), name_of(path)
            for document in yaml.safe_load_all(block):
                if document["kind"] == "Job":
                    (container,) = document["spec"]["template"]["spec"]["containers"]
                    found.append((document["spec"], container))
    assert len(found) == 2
    monkeypatch.chdir(tmp_path)
    for job, container in found:
        program, *words = container["command"]
        words = [word.removeprefix("/data/") for word in words]
        sizes = parsed_here(words).params["mesh"]
        assert program == "jax-longctx"
        # Its devices are those that the pods ask for.
        (each,) = container["resources"]["limits"].values()
        product = math.prod(map(int, re.findall(r"=(\d+)", sizes)))
        assert product == each * job["completions"] and job["completions"] == job["parallelism"]


def test_the_papers_page_says_how_and_what_with_parts_of_suites_and_our_benchmarks():
    assert len(ROWS) == PAPERS.count("\n|") - 2 * len(SECTIONS)
    assert len(SECTIONS) == 5
    known = set(re.findall(FIGURE, read(DOCS / "benchmarks.md")))
    for paper, command, ours, theirs in ROWS:
        assert paper and theirs
        assert re.search(
            r"`jax-longctx |`python -m research |suite, part|the same (part|command)", command
        ), command
        # Said to be missing, with what it needs, or a figure.
        assert re.search(r"not measured[:,] \S+|\d", ours), ours
        said = re.sub(r"not measured.*|`[^`]*`", "", ours)
        assert set(re.findall(FIGURE, said)) <= known, ours
    for section in SECTIONS:
        (suite,) = re.findall(r"^`jax-longctx eval --suite (\S+) ", section, re.MULTILINE)
        named = re.findall(r'suite, part "([^"]+)"', section)
        assert named and set(named) == {part.name for part in read_suite(suite).part}


def links(path):
    """Targets of a page's links and pictures, but for those to other sites."""
    text = FENCE.sub("", read(path))
    text = re.sub(r"`[^`\n]*`", "", text)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in found if not re.match(r"\w+:", target)]


def anchors(path):
    """The anchors of a page's headings, as both mkdocs and code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading).strip() for heading in headings]
    return {heading.lower().replace(" ", "-") for heading in words}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    config = hf_config(vocab_size=300) | {"max_position_embeddings": 8192}
    write_checkpoint(folder / "hf", config, random_state(config))
    write_tokenizer(folder / "hf")
    result = CliRunner().invoke(app, ["convert", str(folder / "hf"), str(folder / "demo-model")])
    assert result.exit_code == 0, result.output
    for name in ("a.txt", "b.txt", "book.txt"):
        (folder / name).write_text("The pass key is 12345. Remember it. " * 8)
    (folder / "llama-8b").symlink_to("demo-model")
    rows = [{"id": n, "prompt": "The pass key is " * (n + 1)} for n in range(4)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_python(*pages):
    """Runs the pages' blocks in turn; how many there are."""
    found = [code for page in pages for code in blocks(page, "python")]
    for code in found:
        # Files are closed when they are read, which the pages leave to Python.
        exec(code, {"open": lambda name: io.StringIO(Path(name).read_text())})
    return len(found)


def assert_all_answered(folder):
    rows = [json.loads(line) for line in read(folder / "out.jsonl").splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2, 3] and all("error" not in row for row in rows)
    (folder / "out.jsonl").unlink()


@pytest.mark.slow
def test_a_job_of_two_processes_runs_as_it_stands(workplace):
    """As the shell runs it, but for the port."""
    by_option, block = blocks(DOCS / "pods.md", "sh")[:2]
    assert "--coordinator localhost:8476" in by_option and "JAX_PROCESS_ID=1" in block
    with socket.socket() as free:
        free.bind(("localhost", 0))
        block = block.replace(":8476", f":{free.getsockname()[1]}")
    program = workplace / "bin/jax-longctx"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jax_longctx "$@"\n')
    program.chmod(0o755)
    told = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "PYTHONPATH": str(ROOT)}
    told["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    how = {"cwd": workplace, "env": os.environ | told, "capture_output": True, "text": True}
    command = ["bash", "-e", "-o", "pipefail", "-c", block]
    done = subprocess.run(command, timeout=patience(200), **how)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert_all_answered(workplace)


@pytest.mark.slow
def test_the_quick_start_runs_as_it_stands(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    page = DOCS / "quickstart.md"
    ran = []
    for block in blocks(page, "sh"):
        if "jax-longctx" in block and not block.startswith("# Needs: "):
            for program, *words in lines_of(block):
                result = CliRunner().invoke(app, words)
                assert (program, result.exit_code) == ("jax-longctx", 0), result.output
                ran.append(words[0])
    assert ran == ["ask"] * 4 + ["batch", "plan"]
    assert_all_answered(workplace)
    run_python(page)
    # The model's weights are random, so its answer is any text.
    assert capsys.readouterr().out != ""


@pytest.mark.slow
def test_the_guides_python_runs(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    # serving/test_openai.py runs the code of the guide to the server, beside one.
    guides = [page for page in sorted((DOCS / "guides").glob("*.md")) if page.name != "serve.md"]
    assert run_python(ROOT / "README.md", *guides) == 2
    assert capsys.readouterr().out.count("\n") >= 3
    assert (workplace / "both.ctx").exists()


def cells(kind):
    found = json.loads(read(NOTEBOOK))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_the_notebook_is_kept_executed_and_small_and_concludes_from_its_outputs():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = [output["output_type"] for output in outputs]
    assert set(kinds) == {"stream", "display_data"} and kinds.count("display_data") == 3
    assert NOTEBOOK.stat().st_size < 500_000
    shown = "".join("".join(output.get("text", "")) for output in outputs)
    figures = re.findall(FIGURE, "".join(cells("markdown")[-1]["source"]))
    assert len(figures) > 4 and set(figures) <= set(re.findall(FIGURE, shown))


@pytest.mark.slow
def test_the_notebooks_cells_run_in_order(workplace):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    first, *rest = ("".join(cell["source"]) for cell in cells("code"))
    names = {}
    exec(first, names)
    assert len(names["METHODS"]) == 4
    names |= {"CHECKPOINT": str(workplace / "demo-model"), "TOKENS": 2000}
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
    held, loaded = (
        {name: result[key] for name, result in results.items()} for key in ("answering", "read")
    )
    assert held["snapkv"] < held["full"] / 2 and loaded["snapkv"] < loaded["full"] / 2
    assert loaded["quest"] < loaded["full"] < held["quest"]


def sample(**changed):
    rows = [{"method": "full", "length": 4096, "score": 98, "interval": [90, 100], "n": 50}]
    about = {"title": "Pass keys", "about": "Keys found.", "kind": "quality", "model": "small"}
    about |= {"hardware": "a CPU", "software": "JAX 0.11.2", "date": "2026-11-21"}
    about |= {"revision": "1234567", "command": ["jax-longctx eval run -t passkey"], "rows": rows}
    about |= {"baseline": "full attention", "limit": "100"}
    return about | {"tables": [{"index": "method", "columns": "length"}]} | changed


def test_a_changed_figure_makes_pages_and_pictures_stale(tmp_path):
    one = RESULTS["passkey-depth"]
    first, *others = one.rows
    changed = dataclasses.replace(one, rows=[first | {"score": 91}, *others])
    assert len(tables.stale_pictures({"passkey-depth": changed})) == 1
    assert tables.stale_pictures({"passkey-depth": one}) == {}
    tables.draw(RESULTS["decode-steps"], tmp_path / "steps.png")
    mark = tables.fingerprint(RESULTS["decode-steps"]).encode()
    assert mark in (tmp_path / "steps.png").read_bytes()
    step = RESULTS["decode-reattention"]
    rows = [row | {"reattention_ms": 1.23} for row in step.rows]
    results = RESULTS | {"decode-reattention": dataclasses.replace(step, rows=rows)}
    board = RESULTS["leaderboard"]
    rows = [row | {"score": row["score"] + 1} for row in board.rows]
    results |= {"leaderboard": dataclasses.replace(board, rows=rows)}
    for name in ("README.md", "docs/benchmarks.md", "docs/papers.md", "docs/leaderboard.md"):
        assert generate.PAGES[name](results) != read(ROOT / name)


PROVENANCE = ("hardware", "software", "revision", "date", "command", "baseline", "limit", "rows")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(
            ({name: type(sample()[name])()}, f"an empty '{name}'; fill it in")
            for name in PROVENANCE
        ),
        *(({name: None}, f"missing .*'{name}'") for name in PROVENANCE),
        ({"hardwear": "x"}, "unexpected .* 'hardwear'"),
        ({"kind": "taste"}, "kind 'taste'; expected one of"),
        ({"date": "yesterday"}, "date 'yesterday'; expected YYYY-MM-DD"),
        ({"tables": []}, "neither 'tables' nor 'columns'"),
        ({"rows": [{"method": "full", "score": 98}]}, "a row without 'n'"),
        ({"rows": [{"method": "full", "score": 98, "n": 50}]}, "a row without an interval"),
    ],
)
def test_a_wrong_result_or_one_without_its_provenance_is_refused_in_one_line(changed, message):
    found = {name: value for name, value in sample(**changed).items() if value is not None}
    with pytest.raises(tables.ResultError, match=rf"one\.json.*{message}"):
        tables.parse_result("one", found)


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
    page = read(DOCS / "benchmarks.md")
    blocks = {block.split("\n")[0]: block for block in page.split("\n### ")[1:]}
    # The memory of the methods is computed, and stands on their own page.
    elsewhere = ("method-memory", "leaderboard")
    measured = [result for name, result in RESULTS.items() if name not in elsewhere]
    blocks |= {
        block.split("\n")[0]: block for block in read(DOCS / "leaderboard.md").split("\n### ")
    }
    assert {result.title for result in measured} <= set(blocks)
    for result in measured:
        block = blocks[result.title]
        told = (result.hardware, result.revision, result.date, result.baseline, result.limit)
        assert all(text in block for text in (*told, *result.command))
        assert ("**Older prompts.**" in block) is result.older_prompts


def test_the_leaderboard_is_summed_from_the_tables_of_ruler():
    """One method of each model; the script makes all."""
    assert leaderboard.cost(Spec.parse("full"), "1.5B", 16384)["read_bytes"] == 484442112
    shown = RESULTS["leaderboard"]
    kept = {name: keeping(RESULTS[name], ("full",)) for name in leaderboard.SOURCES}
    made = leaderboard.rows_of(kept)
    assert made == [row for row in shown.rows if row["method"] == "full"]
    assert (made[0]["method"], made[0]["score"], made[0]["length"]) == ("full", 91.2, 4096)
    told = (shown.hardware, shown.revision, shown.date, shown.baseline, *shown.command)
    assert all(text in read(DOCS / "leaderboard.md") for text in told)
    # The interval of a mean of five is narrower than a task's, and of the same prompts.
    assert leaderboard.mean([{"score": 50, "interval": [40, 60]}] * 4) == (50, [45, 55])


def keeping(result, methods):
    return dataclasses.replace(
        result, rows=[row for row in result.rows if row["method"] in methods]
    )


def test_rows_of_evaluations_are_summed(tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/rows.jsonl").open("w", encoding="utf-8") as file:
        file.write("{}\n")
        pair = "snapkv budget=L/8 > quest budget=8"
        for length, method, task, index in itertools.product(
            (64, 128), ("full", pair), ("tpo", "sci_fi", "gsm100"), range(4)
        ):
            about = {"label": method, "task_label": f"leval@{task} file=a/{task}.jsonl"}
            about |= {"length": length, "index": index, "prompt_sha256": f"{task}{index}"}
            about |= {"task": {"name": "leval", "settings": {"file": f"a/{task}.jsonl"}}}
            score = 0.0 if length == 128 or (method != "full" and index % 2) else 100.0
            more = {"metric": "x", "measures": {"score": score}, "method": {"name": method}}
            file.write(json.dumps(about | more) + "\n")
        file.write(json.dumps(about | {"index": 9, "refused": "too long"}) + "\n")
    rows = sum_rows.summed(sum_rows.read_rows([tmp_path / "out", tmp_path / "out"]))
    full, pair = ("full", ""), ("snapkv > quest", "first.budget=L/8,second.budget=8")
    assert [(row["method"], row["settings"], row["task"], row["n"]) for row in rows] == 2 * [
        *((*full, task, 4) for task in ("tpo", "sci_fi", "gsm100")),
        *((*pair, task, 4) for task in ("tpo", "sci_fi", "gsm100")),
        (*full, "mean", 12),
        (*pair, "mean", 12),
    ]
    # A mean is of one length.
    assert [(row["length"], row["score"]) for row in rows[6::8]] == [(64, 100), (128, 0)]
    assert rows[3]["score"] == 50 and rows[3]["interval"] == [15, 85]
    assert rows[7]["score"] == 50 and rows[7]["difference"] == -50
    low, high = rows[7]["difference_interval"]
    assert -100 <= low < -50 < high <= 0
    sum_rows.write(tmp_path / "made.json", {"title": "x"}, rows)
    assert json.loads((tmp_path / "made.json").read_text())["rows"] == rows
    said = tables.samples(tables.parse_result("made", sample(rows=rows)))
    assert said == "n by task: 4 in `tpo`, 4 in `sci_fi`, 4 in `gsm100`, 12 in `mean`."


def test_scores_of_older_prompts_are_marked_wherever_they_are_shown():
    marked = {name for name, result in RESULTS.items() if result.older_prompts}
    assert {"passkey-budget", "passkey-depth", "passkey-million", "reattention-sizes"} <= marked
    template = read(DOCS / "templates/papers.md.j2")
    shown = re.findall(r"^\| .*(?:depth|size_of|budget)\(.*$", template, re.MULTILINE)
    assert len(shown) == 3 and all("older prompts" in line for line in shown)
    # README shows none of them.
    readme = read(DOCS / "templates/which-method.md.j2")
    assert not [name for name in marked if f'"{name}"' in readme]


def test_readme_is_one_page_without_revisions():
    text = read(ROOT / "README.md")
    assert text.count("\n") <= 150
    assert not re.search(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", text)


def test_the_memory_of_the_methods_is_what_the_command_prints():
    shown = CliRunner().invoke(app, ["methods", "--context", "131072", "--json"]).stdout
    now = {found["name"]: found["memory"] for found in map(json.loads, shown.splitlines())}
    for row in RESULTS["method-memory"].rows:
        keys = ("peak_bytes", "resident_bytes", "read_bytes")
        assert {key: row[key] for key in keys} == {key: now[row["method"]][key] for key in keys}


def test_the_table_of_choices_is_made_from_the_results():
    quality, changed = RESULTS["methods-suite"], ("infllm", 16384, "passkey")
    rows = [
        row | {"score": 5} if (row["method"], row["length"], row["task"]) == changed else row
        for row in quality.rows
    ]
    results = RESULTS | {"methods-suite": dataclasses.replace(quality, rows=rows)}
    made = generate.PAGES["jax_longctx/choices.json"](results)
    table = parse_table(made)
    (infllm,) = (each for each in table if (each.name, each.model.trained) == ("infllm", 8192))
    # One of 20 pass keys, and two of 20 facts in prose.
    assert (infllm.at(2).share, infllm.at(2).n) == (7.5, 40)
    full = table[0]
    assert (full.name, full.model.name) == ("full", "Qwen2.5-Coder-1.5B")
    assert [each.ratio for each in full.found] == [0.125, 0.25, 0.5, 1, 2, 4, 8, 16]
    shown = [row for row in RESULTS["leaderboard"].rows if row["method"] == "full"]
    assert (full.at(0.5).share, full.at(0.5).n) == (shown[2]["score"], shown[2]["n"])
