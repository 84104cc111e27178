"""Other people's packages, as the tutorials write them, installed into a folder of their own."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from jax_longctx import methods

__all__ = ["files_of", "install", "offer"]

TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"


def files_of(tutorial: str) -> dict[str, str]:
    """The files that a tutorial shows, by name: the code blocks whose title is a file's name."""
    text = (TUTORIALS / f"{tutorial}.md").read_text(encoding="utf-8")
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE))


def install(tutorial: str, folder: Path) -> list[str]:
    """Installs the tutorial's package into a folder for `sys.path`, as pip does.

    Returns the names of the methods that it offers.
    """
    files = files_of(tutorial)
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    offered: dict[str, str] = project["entry-points"]["jax_longctx.methods"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    entries = [f"{name} = {module}" for name, module in offered.items()]
    files |= {
        f"{info.name}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {project['name']}\nVersion: {project['version']}\n",
        f"{info.name}/entry_points.txt": "\n".join(["[jax_longctx.methods]", *entries, ""]),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(offered)


def offer(tutorial: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`install`, and the methods found anew by this process until the test ends."""
    names = install(tutorial, folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(methods.METHODS, "data", methods._found())
    for name in names:
        monkeypatch.delitem(sys.modules, methods.METHODS.data[name], raising=False)
    return names
