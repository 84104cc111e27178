"""Builds what a release has, installs it with the lowest and the newest versions that it allows.

    .venv/bin/python .ci/smoke.py [--jax VERSION ...] [--dist FOLDER]

The source archive is built from the tracked files, the wheel from the source archive, and `--dist`
keeps both. Both must hold every tracked file of the packages and nothing else, and `twine` must
find them fit for an index. CHANGELOG.md must have a section of the version. Two environments
outside the source tree get the wheel: one with the lowest version of each direct dependency and of
each of `convert`, one with the newest that pip finds. With `--jax`, environments with these
versions of JAX replace the two. There the command line converts a tiny random model, generates and
asks; sampled answers must be those of the environment that runs this script. The GPU kernels are
lowered, which needs no GPU. Downloads come from pip's cache where it has them.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_longctx", "pallas_kernels", "checkpoints_convert", "train_cpt")
# Files of the source archive beside the packages.
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
# The text has some 700 tokens; these settings read or keep a part of them.
METHODS = {
    "full": "",
    "reattention": "global_size=4 local_size=128 span=4 count=2 kept=8 chunk=128",
    "quest": "budget=64 page_size=8",
    "snapkv": "budget=64 window=8",
    "citrus-standard": "budget=192 chunk=64",
}
TEXT = " ".join(f"Line {i} says {i * i % 97}." for i in range(40))
QUESTION = "What does line 7 say?"
SAMPLED = ["--json", "--max-tokens", "24", "--temperature", "1", "--seed", "7"]


def run(*command: str | Path, cwd: Path) -> str:
    """The command's stdout. Neither the source tree nor the environment's variables reach it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_", "XLA_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise SystemExit(f"smoke: exit {done.returncode} of {' '.join(map(str, command))}\n{said}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Source archive and wheel; SystemExit where a file is missing in one, or one too many."""
    source, built = folder / "source", folder / "dist"
    listed = run("git", "ls-files", "-z", *PACKAGES, cwd=ROOT)
    files = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    # The tests as well: setuptools would take some of them.
    tests = [path.relative_to(ROOT) for path in (ROOT / "tests").glob("test*.py")]
    for name in [*files, *BESIDE, *tests]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    tools = folder / "tools"
    run(sys.executable, "-m", "venv", tools, cwd=folder)
    run(tools / "bin" / "pip", "install", "--quiet", "build", "twine", cwd=folder)
    run(tools / "bin" / "python", "-m", "build", "--outdir", built, source, cwd=folder)
    shutil.rmtree(source)
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    run(tools / "bin" / "twine", "check", "--strict", sdist, wheel, cwd=folder)
    compare(wheel, zipfile.ZipFile(wheel).namelist(), files, ".dist-info/")
    with tarfile.open(sdist) as archive:
        names = [each.name.partition("/")[2] for each in archive if each.isfile()]
    compare(sdist, names, files | {*BESIDE, "PKG-INFO", "setup.cfg"}, ".egg-info/")
    version = wheel.name.split("-")[1]
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise SystemExit(f"smoke: CHANGELOG.md has no section ## [{version}]")
    return sdist, wheel


def compare(archive: Path, names: list[str], expected: set[str], made: str) -> None:
    """SystemExit unless the archive has these files, beside what `made` them."""
    held = {name for name in names if made not in name}
    if held != expected:
        lacks, beyond = expected - held, held - expected
        raise SystemExit(f"smoke: {archive.name} lacks {lacks}, and has {beyond} beyond")


def write_inputs(folder: Path) -> None:
    """A tiny Hugging Face checkpoint with random weights, and a text."""
    sys.path.insert(0, str(ROOT))
    from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

    config = hf_config("llama", max_position_embeddings=4096)
    write_checkpoint(folder / "hf", config, random_state(config))
    (folder / "text.txt").write_text(TEXT)


def install(folder: Path, wheel: Path, pins: list[str]) -> Path:
    """A new environment's folder of programs, with these versions and else the newest."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
    wanted = [f"jax-longctx[convert] @ {wheel.as_uri()}", *pins]
    run(*pip, "--quiet", "--no-compile", *wanted, cwd=folder.parent)
    return folder / "bin"


def use(programs: Path, inputs: Path, folder: Path) -> dict[str, str]:
    """What the commands print that must not depend on the version of JAX."""
    folder.mkdir()

    def ours(*arguments: str | Path) -> str:
        return run(programs / "jax-longctx", *arguments, cwd=folder)

    methods = [json.loads(line)["name"] for line in ours("methods", "--json").splitlines()]
    found = {"methods": " ".join(methods)}
    ours("convert", inputs / "hf", "model")
    text = inputs / "text.txt"
    found["generate"] = ours("generate", QUESTION, "-c", "model", *SAMPLED)
    for name, settings in METHODS.items():
        how = ["-m", name, *(part for each in settings.split() for part in ("--set", each))]
        found[name] = ours("ask", text, QUESTION, "-c", "model", "--no-chat", *how, *SAMPLED)
    for name in ("generate", *METHODS):
        record = json.loads(found[name])
        found[name] = json.dumps([record["answer"], record["finish"], record["tokens"]])
    return found


def try_versions(
    name: str, pins: list[str], wheel: Path, inputs: Path
) -> tuple[str, dict[str, str], float]:
    """The versions that were installed, what was found with them, and the seconds it took."""
    begun = time.monotonic()
    home = inputs / f"with-{name}"
    programs = install(home, wheel, pins)
    said = run(programs / "jax-longctx", "--version", cwd=inputs)
    version = re.search(r"\(jax ([\w.]+)", said)
    if version is None:
        raise SystemExit(f"smoke: --version does not say which JAX: {said}")
    found = use(programs, inputs, home / "used")
    # A copy, so that the source tree is not on the path.
    kernels = shutil.copy(ROOT / "tests" / "pallas_kernels" / "gpu_programs.py", home)
    run(programs / "python", kernels, cwd=home)
    return f"{name}: JAX {version[1]}", found, time.monotonic() - begun


def lowest_allowed() -> list[str]:
    """The lower bound of every direct dependency and of `convert`'s, as pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = project["dependencies"] + project["optional-dependencies"]["convert"]
    pins = [re.fullmatch(r"([\w-]+)>=([\d.]+)(,.*)?", bound) for bound in bounds]
    if None in pins:
        raise SystemExit(f"smoke: a dependency of {bounds} has no lower bound")
    return [f"{pin[1]}=={pin[2]}" for pin in pins if pin]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jax", nargs="+", help="these versions of JAX instead")
    parser.add_argument("--dist", type=Path, help="keep source archive and wheel in this folder")
    options = parser.parse_args()
    asked = options.jax
    wanted = {version: [f"jax=={version}"] for version in asked or ()}
    wanted = wanted or {"lowest": lowest_allowed(), "newest": []}
    with tempfile.TemporaryDirectory(prefix="smoke-") as place:
        folder = Path(place)
        sdist, wheel = build(folder)
        write_inputs(folder)
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            reference = pool.submit(use, Path(sys.executable).parent, folder, folder / "pinned")
            tried = [pool.submit(try_versions, *each, wheel, folder) for each in wanted.items()]
            concurrent.futures.wait([reference, *tried], return_when="FIRST_EXCEPTION")
            pool.shutdown(wait=False, cancel_futures=True)  # after a failure nothing is begun
            expected, *results = (each.result() for each in (reference, *tried))
        if options.dist is not None:
            options.dist.mkdir(parents=True, exist_ok=True)
            for path in (sdist, wheel):
                shutil.copy(path, options.dist)
    print(f"{wheel.name}, built from {sdist.name}, as with JAX {metadata.version('jax')}:")
    different = False
    for version, found, seconds in results:
        print(f"  {version}: {', '.join(found)}, GPU kernels lowered; {seconds:.0f} s")
        for name in expected:
            if found[name] != expected[name]:
                different = True
                print(f"  {name} DIFFERS: {found[name]}, expected {expected[name]}")
    if different:
        raise SystemExit("smoke: answers differ between versions")


if __name__ == "__main__":
    main()
