"""The examples of the guide run as they stand, but for the port."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.jax_longctx.serving.tiny import BOOK
from tests.patience import patience

GUIDE = (Path(__file__).parents[3] / "docs/guides/serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def guided(serve, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    return serve(tiny, name="demo-model")


def test_python_examples_run(guided, capsys):
    first, second = blocks("python")
    exec(first.replace(ADDRESS, guided.url), {})
    assert capsys.readouterr().out
    exec(second.replace(ADDRESS, guided.url), {})
    told = capsys.readouterr().out.split()
    count = guided.served.contexts.listed()[0].record()["tokens"]
    assert told.count(str(count)) == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_shell_example_runs(guided):
    (command,) = blocks("sh")
    done = subprocess.run(
        command.replace(ADDRESS, guided.url),
        shell=True,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    record = json.loads(done.stdout)
    assert record["state"] == "ready" and record["ttl"] == 3600
