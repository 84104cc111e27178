"""Breaks the packages in one place after another and counts what the tests notice.

    python tests/mutating.py OUT.jsonl [--count 100] [--seed 17] [--seconds 60] [--tree FOLDER]

Each mutant changes one operator, comparison, constant, condition or returned value in a function of
the packages. Its tests are those that the change touches (`dealing.py`), as many as run in so many
processor seconds. A mutant is killed where one fails. The tree is a clone of the repository that
nobody else works in. OUT has a line for each mutant; a mutant that has its line is not tried again.
"""

import argparse
import ast
import copy
import json
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dealing import touched_by  # noqa: E402

PACKAGES = ("jax_longctx", "pallas_kernels", "checkpoints_convert", "train_cpt")
SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def places(tree: ast.Module) -> Iterator[ast.AST]:
    """What can be mutated, in functions: module level names are mostly tables of text."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from (node for node in ast.walk(statement) if mutated(node) is not None)


def mutated(node: ast.AST) -> ast.AST | None:
    """The node's mutant, or None where it has none."""
    new = copy.copy(node)
    if isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPPED:
        new.op = SWAPPED[type(new.op)]()
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPPED:
        new.ops = [SWAPPED[type(new.ops[0])](), *new.ops[1:]]
    elif isinstance(new, ast.Constant) and type(new.value) in (int, bool):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(new, ast.If | ast.IfExp):
        new.test = ast.UnaryOp(ast.Not(), new.test)
    elif isinstance(new, ast.Return) and new.value is not None:
        new.value = ast.Constant(None)
    else:
        return None
    return new


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutants(count: int, seed: int) -> Iterator[tuple[str, int, str, str]]:
    """File, line, the changed code and the file's new text, each of another place."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        (path, index)
        for path in files
        for index, _ in enumerate(places(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    for path, index in random.Random(seed).sample(found, count):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        old = list(places(tree))[index]
        new = mutated(old)
        assert new is not None and isinstance(old, ast.expr | ast.stmt)
        said = f"{ast.unparse(old)[:60]} -> {ast.unparse(ast.fix_missing_locations(new))[:60]}"
        text = ast.unparse(ast.fix_missing_locations(_Put(old, new).visit(tree)))
        yield path.relative_to(ROOT).as_posix(), old.lineno, said, text


def killer(tree: Path, file: str, seconds: int) -> str | None:
    """The test that fails in this tree, whose file has one change; None where none does."""
    touched = touched_by([file])
    folders = [f"tests/jax_longctx/{it}" for it in ("contract", "engine", "methods")]
    where = {*touched.files, *(folders if touched.methods else ())}
    places = sorted(it for it in where if (tree / it).exists())
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not gpu", "--since", "HEAD", *places],
        cwd=tree,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds)),
    )
    # Negative: the time was spent.
    if done.returncode <= 0:
        return None
    lines = done.stdout.splitlines()
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return named[0].split(" - ")[0] if named else f"exit {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT)
    for name, default in (("count", 100), ("seed", 17), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    done = given.out.read_text().splitlines() if given.out.exists() else []
    for number, (file, line, said, text) in enumerate(mutants(given.count, given.seed)):
        if number < len(done):
            continue
        path = given.tree / file
        whole = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            found = killer(given.tree, file, given.seconds)
        finally:
            path.write_text(whole, encoding="utf-8")
        row = {"file": file, "line": line, "change": said, "killed": found}
        with given.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(number, row, flush=True)


if __name__ == "__main__":
    main()
