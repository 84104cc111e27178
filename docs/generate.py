"""Writes the generated files: the documentation's pages and pictures, and choices.json.

    python docs/generate.py            # writes them
    python docs/generate.py --check    # writes nothing; exit code 1 where one is stale

`tables` shows the results, and `choices` makes the table of `--method auto` from them. A method's
card comes from its metadata, its settings and their docstrings, `jax-longctx methods`,
docs/methods.toml (papers, and limits that no metadata states) and a committed result. The text
before the cards is docs/choosing.in.md. The command reference comes from the command line's own
declarations.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
# The imports below (E402) need these paths: docs/ is no package, and the pages are made from this
# checkout even where another one is installed.
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import choices  # noqa: E402
import tables  # noqa: E402
from docstrings import attributes  # noqa: E402
from tables import Result, markdown  # noqa: E402

from jax_longctx.cli.main import app  # noqa: E402
from jax_longctx.errors import ConfigError  # noqa: E402
from jax_longctx.memory import shown_bytes  # noqa: E402
from jax_longctx.methods import METHODS  # noqa: E402
from jax_longctx.models.presets import preset  # noqa: E402

Results = Mapping[str, Result]
NOTES = ROOT / "docs/methods.toml"
LENGTHS = (4096, 16384, 65536)
CONTEXT = 131072
CHOOSING = ROOT / "docs/choosing.in.md"
MEMORY = (
    "The table is for Llama-3.1-8B in bfloat16 and one text of {context:,} tokens, under each "
    "method's defaults. Memory is the KV cache and all that a method keeps beside it. *Read a "
    "step* is what one decode step loads of it; the weights come on top. The figures are computed "
    "from the shapes of the caches, as in `jax-longctx plan`. A method that refuses this model has "
    "a dash. This command prints them:"
)
MADE_BY = "<!-- Written by docs/generate.py; change that, not this page. -->"
# What the metadata of a method says of it: False, and True.
KEEPS = (
    "a budget of tokens; the others leave the cache",
    "every key and value of the context",
)
FAILS = (
    "the answer lies in tokens that have left the cache",
    "the cache of the whole context does not fit into memory",
)
ASKED = (
    "not needed for prefill: one prefill serves many questions",
    "needed before prefill: each question costs a prefill of its own",
)
PHASES = {"none": "nothing", "prefill": "prefill", "decode": "decode", "both": "prefill and decode"}


def notes() -> dict[str, dict[str, str]]:
    """What docs/methods.toml says of each method."""
    return tomllib.loads(NOTES.read_text(encoding="utf-8"))


# -- methods ---------------------------------------------------------------------------------------


def methods_page(results: Results) -> str:
    """The table of all methods, then a card for each."""
    command = ["methods", "--context", str(CONTEXT), "--json"]
    result = CliRunner().invoke(app, command)
    if result.exit_code:
        said = result.output.strip().splitlines()[-1:]
        raise SystemExit(f"jax-longctx {' '.join(command)} failed: {' '.join(said)}")
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    known = [entry for entry in entries if entry["name"] in own_methods()]
    rows = [
        (f"[`{entry['name']}`](#{entry['name']})", entry["summary"], *sizes(entry).values())
        for entry in known
    ]
    headers = ("method", "what it does", "peak of prefill", "while answering", "read a step")
    said, (full,) = notes(), [entry for entry in known if entry["name"] == "full"]

    def cards(entries: Sequence[dict[str, Any]]) -> list[str]:
        read = full["memory"]["read_bytes"]
        suite = results["methods-suite"]
        return [card(entry, said.get(entry["name"], {}), read, suite) for entry in entries]

    command_block = f"```sh\njax-longctx {' '.join(command[:-1])}\n```"
    parts = [
        MADE_BY,
        "# Methods",
        CHOOSING.read_text(encoding="utf-8").strip(),
        MEMORY.format(context=CONTEXT),
        command_block,
        markdown(headers, rows),
        "## Method cards",
        *cards(known),
    ]
    return "\n\n".join(parts) + "\n"


def own_methods() -> list[str]:
    """Names of this repository's methods; another package may have installed more."""
    return [name for name, home in METHODS.data.items() if str(home).startswith("jax_longctx.")]


def card(entry: dict[str, Any], said: dict[str, str], full_read: int, suite: Result) -> str:
    """One method: what it keeps, reads and costs, when it fails, its paper, its settings.

    Args:
      suite: the run of all methods; docs/benchmarks.md shows it whole.
    """
    peak, resident, read = sizes(entry).values()
    share = entry["memory"].get("read_bytes", 0) / full_read
    paper = entry["source"]
    if "title" in said:
        paper += f": [{said['title']}]({said['link']})" if "link" in said else f": {said['title']}"
    rows = [
        ("Paper", paper),
        ("Changes", PHASES[entry["phase"]]),
        ("Keeps", said.get("keeps") or KEEPS[entry["keeps_all"]]),
        ("Reads", said.get("reads") or "see the module's page"),
        ("Question", ASKED[entry["needs_question"]]),
        ("Memory", f"{peak} at the peak of prefill, {resident} while answering"),
        ("A decode step", f"reads {read} of the cache, {share:.1%} of `full`'s"),
        ("Fails when", said.get("fails") or FAILS[entry["keeps_all"]]),
    ]
    if "refused" in entry["memory"]:
        rows = [row for row in rows if row[0] not in ("Memory", "A decode step")]
    home = METHODS.data[entry["name"]]
    kind = METHODS[entry["name"]]
    rows += [("Refuses", what) for what in [refused(kind())] if what]
    rows += [("Measured", what) for what in [measured(entry["name"], suite)] if what]
    module = home if isinstance(home, str) else kind.__module__
    parts = [
        f"### {entry['name']}",
        f"{entry['summary']}.",
        markdown(
            ("Use", f"`--method {entry['name']}`"), [(f"**{what}**", text) for what, text in rows]
        ),
    ]
    if entry["settings"]:
        helps = attributes(kind)
        listed = [
            (f"`{name}`", shown_type(about["type"]), f"`{about['default']}`", helps.get(name, ""))
            for name, about in entry["settings"].items()
        ]
        settings = markdown(("setting", "type", "default", "meaning"), listed)
        parts.append(
            f'<details markdown="1">\n<summary>Settings</summary>\n\n{settings}\n\n</details>'
        )
    parts.append(
        f"[Algorithm, cost and differences from the authors' code](api/methods.md#{module})"
    )
    return "\n\n".join(parts)


def sizes(entry: dict[str, Any]) -> dict[str, str]:
    """Memory at the peak of prefill and while answering, and what a decode step reads."""
    memory = entry["memory"]
    return {
        key: shown_bytes(memory[f"{key}_bytes"]) if f"{key}_bytes" in memory else "-"
        for key in ("peak", "resident", "read")
    }


def refused(method: Any) -> str:
    """Which kinds of models the method does not run on, with its defaults."""
    model = preset("llama-3.1-8b")
    plain = dataclasses.replace(model.rope, kind="default")
    trained = dataclasses.replace(model, rope=plain)
    probes = {
        "checkpoints with a rope scaling of their own": model,
        "models where some layers have sliding windows": dataclasses.replace(
            trained, windows=(4096, *trained.windows[1:])
        ),
    }
    found = []
    for what, config in probes.items():
        try:
            method.check_model(config)
        except ConfigError:
            found.append(what)
    return "; ".join(found)


def measured(name: str, suite: Result) -> str:
    """A method's scores in the run of all methods, where it has some."""
    tasks = {"passkey": "pass keys", "niah_single": "facts in prose"}
    rows = [row for row in suite.rows if row["method"] == name and row["task"] in tasks]
    rows = [row for row in rows if row["length"] in LENGTHS]
    if not rows:
        return ""
    shown = []
    for task, label in tasks.items():
        scores = [f"{r['score']}% at {r['length']:,} tokens" for r in rows if r["task"] == task]
        shown += [f"{label} found: {', '.join(scores)}"] if scores else []
    settings = rows[0].get("settings")
    how = f", with `{settings}`" if settings else ""
    return f"{suite.model}{how}: {'; '.join(shown)} ([Benchmarks](benchmarks.md))"


def shown_type(text: str) -> str:
    """A type as the settings' table shows it: the choices of a `Literal`, one after the other."""
    if text.startswith("Literal["):
        return ", ".join(f"`{choice.strip(chr(39))}`" for choice in text[8:-1].split(", "))
    return f"`{text}`"


# -- commands --------------------------------------------------------------------------------------


def commands_page(_: Results) -> str:
    """Every command with its help, arguments and options."""
    group: Any = typer.main.get_command(app)
    codes = re.sub(r"(\d+) ", r"`\1` ", group.epilog.partition(": ")[2])
    parts = [
        MADE_BY,
        "# Commands",
        "`jax-longctx COMMAND --help` prints the same text.",
        f"Exit codes: {codes}",
        *command_parts(group, "jax-longctx"),
    ]
    return "\n\n".join(parts) + "\n"


def command_parts(command: Any, path: str) -> list[str]:
    """One command and those below it."""
    context = typer.Context(command, info_name=path)
    visible = [each for each in command.params if not getattr(each, "hidden", False)]
    given = [each for each in visible if each.param_type_name == "argument"]
    chosen = [each for each in visible if each.param_type_name == "option"]
    below = getattr(command, "commands", {})
    usage = [path, *(["[OPTIONS]"] if chosen else []), *map(argument_name, given)]
    usage += ["COMMAND ..."] if below else []
    parts = [f"## {path}", f"```text\n{' '.join(usage)}\n```", paragraphs(command.help or "")]
    if given:
        rows = [(f"`{argument_name(each)}`", inline(each.help), default(each)) for each in given]
        parts.append(markdown(("argument", "meaning", "default"), rows))
    panels: dict[str, list[Any]] = {}
    for each in chosen:
        panels.setdefault(each.rich_help_panel or "Options", []).append(each)
    for panel, members in panels.items():
        rows = [(option_name(each, context), inline(each.help), default(each)) for each in members]
        parts.append(markdown((panel.partition(" (")[0], "meaning", "default"), rows))
    for name, child in below.items():
        if not child.hidden:
            parts += command_parts(child, f"{path} {name}")
    return [part for part in parts if part]


def argument_name(argument: Any) -> str:
    """As the usage line shows it."""
    return argument.metavar or argument.name.upper()


def option_name(option: Any, context: Any) -> str:
    """All its spellings, and what follows them."""
    spelled = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    # A range is shown as `<int range>`: the name of a type may have spaces.
    follows = re.sub(r"<(\w+) range>", r"<\1>", option.get_help_record(context)[0]).split()[-1]
    return spelled if follows.startswith("-") else f"{spelled} `{follows}`"


def default(parameter: Any) -> str:
    """The default; "required" where one must be given."""
    if parameter.required:
        return "required"
    value = parameter.default
    empty = value is None or value is False or value == ""
    shown = "" if empty or not parameter.show_default else f"`{value}`"
    if parameter.envvar:
        shown += f"{shown and ', '}variable `{parameter.envvar}`"
    return shown


def inline(text: str | None) -> str:
    """Help of one line: rich's markup as Markdown."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"`\1`", " ".join((text or "").split()))
    # Names of formats and templates would be HTML.
    return text.replace("<", "&lt;").replace("{{", "&#123;&#123;")


def paragraphs(text: str) -> str:
    """Help of several paragraphs: headings in bold, indented lines as shell blocks."""
    parts: list[str] = []
    for block in re.split(r"\n\n", text):
        if not block.strip():
            continue
        if block.startswith("    "):
            lines = "\n".join(line.removeprefix("    ") for line in block.splitlines())
            # The terminal shows a long command in several lines; a shell needs a backslash there.
            lines = re.sub(r"\n *-", r" \\\n  -", lines)
            if parts and parts[-1].startswith("```sh"):
                parts[-1] = f"{parts[-1].removesuffix('```')}{lines}\n```"
            else:
                parts.append(f"```sh\n{lines}\n```")
        else:
            parts.append(re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", " ".join(block.split())))
    return "\n\n".join(parts)


# -- all -------------------------------------------------------------------------------------------

# What makes each file from the results, by path.
PAGES: dict[str, Callable[[Results], str]] = {
    "docs/methods.md": methods_page,
    "docs/commands.md": commands_page,
    "docs/benchmarks.md": functools.partial(tables.page, "benchmarks.md"),
    "docs/leaderboard.md": functools.partial(tables.page, "leaderboard.md"),
    "docs/papers.md": functools.partial(tables.page, "papers.md"),
    "README.md": tables.readme,
    "jax_longctx/choices.json": choices.made,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write what is stale, or only name it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a stale file")
    check = parser.parse_args(argv).check
    stale, results = [], tables.read_results()
    for name, make in PAGES.items():
        path, text = ROOT / name, make(results)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    for path, result in tables.stale_pictures(results).items():
        stale.append(path.name)
        if not check:
            tables.draw(result, path)
    if check and stale:
        raise SystemExit(f"stale: {', '.join(stale)}; run: python docs/generate.py")
    print(f"written: {', '.join(stale)}" if stale else "up to date")


if __name__ == "__main__":
    main()
