"""Which tests a run takes: what a change touches, or a third of the others; and until when.

A run of pytest takes all that its markers select. Three options narrow it (see `conftest.py`):

- `--since REV`: only the tests that the changes since that revision touch.
- `--third N`: only the tests whose ids fall into that third. With `--since`, those that the changes
  touch are left out: another run takes them.
- `--until SECONDS`: no test begins after that time, in seconds since 1970. The last lines name the
  tests that were left. The run fails then, except with `--third`.
"""

import ast
import dataclasses
import functools
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["Touched", "third_of", "touched_by", "touched_since"]

ROOT = Path(__file__).parents[1]
# A change here reaches every method: one of each kind is tested.
CORE = tuple(f"jax_longctx/{folder}/" for folder in ("caches", "contract", "engine", "parts"))


def third_of(nodeid: str) -> int:
    """0, 1 or 2: on every machine the same."""
    return zlib.crc32(nodeid.encode()) % 3


@dataclasses.dataclass(frozen=True)
class Touched:
    """What a change touches: test files by their paths in the repository, and methods by name."""

    files: frozenset[str]
    methods: frozenset[str]

    def holds(self, file: str, parameters: Iterable[object]) -> bool:
        """Whether it touches a test of this file, a case with these parameters."""
        return file in self.files or any(
            isinstance(value, str) and value in self.methods for value in parameters
        )


def touched_since(revision: str) -> Touched:
    """What the changes since a revision touch; CalledProcessError where git does not know it."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", "--no-renames", revision, "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return touched_by(listed.stdout.split())


def touched_by(changed: Iterable[str]) -> Touched:
    """What changes to these files touch.

    Test files that changed, or that use a changed module of the packages or of the tests; the cases
    of a method whose file changed; one method of each kind, where the core changed.
    """
    from jax_longctx.methods import METHODS
    from tests.small_methods import KINDS

    files, methods = set(), set()
    for name in (name for name in changed if name.endswith(".py")):
        own = {method for method, kind in METHODS.items() if _module(name) == kind.__module__}
        methods |= own
        if name.startswith(CORE):
            methods |= set(KINDS)
        if _is_test(name):
            files |= {name} & _imports().keys()
        elif name != "tests/conftest.py":
            files |= set(_users(name) or ([] if own else _beside(name)))
    return Touched(frozenset(files), frozenset(methods))


def _users(name: str) -> list[str]:
    """Test files that import a module, or that are named as it is in the folder that mirrors it."""
    users = [test for test, imported in _imports().items() if _module(name) in imported]
    stem = f"test_{Path(name).stem}"
    return [*users, *(test for test in _beside(name) if Path(test).stem.startswith(stem))]


def _beside(name: str) -> list[str]:
    """The test files of the folder that mirrors a module's."""
    folder = Path("tests") / Path(name).parent
    return [test for test in _imports() if Path(test).parent == folder]


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and Path(name).name.startswith("test_")


@functools.cache
def _imports() -> dict[str, frozenset[str]]:
    """Test file -> the dotted names that it imports."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return {path.relative_to(ROOT).as_posix(): frozenset(_imported(path)) for path in found}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
