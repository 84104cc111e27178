"""The suites: every method and task of theirs is one, and they come with the package."""

import tomllib
from pathlib import Path

import pytest

from jax_longctx.errors import InputError
from jax_longctx.evaluation import suite
from jax_longctx.evaluation.published import PUBLISHED
from jax_longctx.evaluation.runner import check_config

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", suite.suites())
def test_every_method_and_task_of_a_suite_is_made(name):
    config = suite.read_suite(name)
    check_config(config)
    assert config.title and config.about
    assert set(config.published) <= {table.paper for table in PUBLISHED}
    # Paired differences need full attention on every task and length.
    cells = config.cells()
    for task, length in {(cell.task, cell.length) for cell in cells}:
        own = [cell for cell in cells if (cell.task, cell.length) == (task, length)]
        assert "full" in {cell.method.label for cell in own}


def test_suites_are_part_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["jax_longctx.evaluation"]
    found = sorted((ROOT / "jax_longctx" / "evaluation").glob(pattern))
    assert found and len(found) == len(suite.suites())


def test_unknown_suites_are_named():
    with pytest.raises(InputError, match="unknown suite 'smoek'"):
        suite.read_suite("smoek")
