"""How many of the repository's files `ask` passes through, from the shell to the answer."""

import json
import subprocess
import sys

from tests.jax_longctx.cli.two_processes import ROOT, environment

MOST = 28
# Runs the command line as `python -m jax_longctx` does and writes the files whose functions are
# entered, in any thread. The bodies of modules and classes, and what these call, are left out, and
# so is what dataclasses make, which has no file.
WATCHED = """
import inspect, json, runpy, sys

files, (root, out, *arguments) = set(), sys.argv[1:]
monitoring, packages = sys.monitoring, tuple(
    f"{root}/{name}/"
    for name in ("jax_longctx", "pallas_kernels", "checkpoints_convert", "train_cpt")
)

def entered(code, offset):
    if not code.co_filename.startswith(packages) or not code.co_flags & inspect.CO_OPTIMIZED:
        return monitoring.DISABLE
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is not None and frame.f_globals["__name__"] != "__main__":
        return None
    files.add(code.co_filename[len(root) + 1 :])
    with open(out, "w") as file:
        json.dump(sorted(files), file)
    return monitoring.DISABLE

monitoring.use_tool_id(monitoring.PROFILER_ID, "path")
monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, entered)
monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
sys.argv = ["jax-longctx", *arguments]
runpy.run_module("jax_longctx", run_name="__main__", alter_sys=True)
"""


def test_ask_passes_through_few_files(checkpoint, book, tmp_path):
    out = tmp_path / "files.json"
    ask = ("ask", book, "Who?", "-c", checkpoint, "--max-tokens", "4")
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, ROOT, out, *map(str, ask)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(out.read_text())
    assert len(files) <= MOST, "\n".join(files)
