import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import dealing, patience
from tests.conftest import compilation_cache, drop_oldest
from tests.small_methods import KINDS

ROOT = Path(__file__).parents[1]


def test_thirds_take_every_test_once_and_are_of_one_size():
    ids = [f"tests/test_{file}.py::test_a[{case}]" for file in range(30) for case in range(30)]
    thirds = [dealing.third_of(each) for each in ids]
    assert set(thirds) == {0, 1, 2}
    assert max(map(thirds.count, range(3))) < 1.2 * len(ids) / 3
    # The same on every machine and in every process.
    assert dealing.third_of("tests/test_a.py::test_b[c]") == 1


@pytest.mark.parametrize(
    ("changed", "files"),
    [
        # The file itself, a file that imports the module, one with its name, a helper of the tests.
        ("tests/test_docs.py", {"tests/test_docs.py"}),
        ("jax_longctx/methods/snapkv.py", {"tests/jax_longctx/methods/test_snapkv.py"}),
        ("jax_longctx/engine/offload.py", {"tests/jax_longctx/engine/test_offload.py"}),
        ("tests/dealing.py", {"tests/test_dealing.py"}),
    ],
)
def test_a_change_touches_the_tests_of_what_changed(changed, files):
    touched = dealing.touched_by([changed])
    assert files <= touched.files
    assert "tests/train_cpt/test_loop.py" not in touched.files


def test_what_a_module_that_no_test_names_a_method_and_the_core_have():
    touched = dealing.touched_by(["checkpoints_convert/no_such_module.py"]).files
    assert "tests/checkpoints_convert/test_gguf.py" in touched
    assert {Path(file).parent.name for file in touched} == {"checkpoints_convert"}
    quest = dealing.touched_by(["jax_longctx/methods/quest.py"])
    other = "tests/jax_longctx/methods/test_every_method.py"
    assert quest.holds(other, ["quest"]) and not quest.holds(other, ["snapkv", 3])
    core = dealing.touched_by(["jax_longctx/contract/segments.py"])
    assert core.methods == set(KINDS)
    assert dealing.touched_by(["README.md", "tests/test_gone.py"]).files == frozenset()


INNER = """
import pytest

@pytest.mark.parametrize("case", range(40))
def test_passes(case):
    pass
"""


# Runs pytest in one process again and again: to import what is under test is what a run takes.
RUNS = """
import contextlib, io, json, sys
import pytest

for options in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(options)
    print(json.dumps([int(status), said.getvalue()]))
"""


def test_thirds_are_the_whole_and_no_test_begins_when_the_time_is_over(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_inner.py").write_text(INNER)
    past, later = (("--until", str(time.time() + seconds)) for seconds in (-1, 600))
    runs = [*(("--third", str(third)) for third in range(3)), past, (*past, "--third", "0"), later]
    common = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", RUNS],
        input=json.dumps([[*common, *options, str(tmp_path)] for options in runs]),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *thirds, over, over_for_a_third, whole = map(json.loads, done.stdout.splitlines())
    assert [status for status, _ in thirds] == [0, 0, 0]
    counts = [int(output.split(" passed")[0].split()[-1]) for _, output in thirds]
    assert sum(counts) == 40 and 0 < min(counts)
    assert over[0] == 1 and "40 tests: test_inner.py (40)" in over[1]
    assert over_for_a_third[0] == 0 and "left for want of time" in over_for_a_third[1]
    assert whole[0] == 0 and "40 passed" in whole[1]


def test_waits_are_longer_where_the_machine_is_slower(monkeypatch):
    for seconds, factor in ((0.05, 1), (0.1, 1), (0.4, 4)):
        monkeypatch.setattr(patience, "_measured", None)
        monkeypatch.setattr(patience, "_piece", lambda seconds=seconds: seconds)
        assert patience.patience(10) == pytest.approx(10 * factor)
    # It is measured again only after a while.
    monkeypatch.setattr(patience, "_piece", lambda: 9.0)
    assert patience.patience(10) == pytest.approx(40)


def test_compiled_programs_lie_with_the_user_and_what_was_written_first_leaves(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compilation_cache().is_relative_to(tmp_path)
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"{number}", (number, number))
    drop_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["2", "3"]
