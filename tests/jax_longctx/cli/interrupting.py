"""Ctrl-C at a random moment of a command, and the same command again afterwards."""

import dataclasses
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints_convert
from tests.jax_longctx.cli.tiny_model import write_source
from tests.jax_longctx.cli.two_processes import environment
from tests.patience import patience
from tests.train_cpt.tiny_files import CONFIG

# Seconds from the signal to the end of the process, on a fast machine at rest.
LIMIT = 2.0
BOOK = "The pass key is 12345. Remember it. "


def commands(folder):
    """Every command, by name, as it is given in a working folder beside `files`."""
    model = ("-c", folder / "model", "--chunk", 64)
    evaluated = f"eval run -c {folder / 'model'} -m full -t passkey --length 256 --trials 2"
    return {
        "ask": ("ask", folder / "book.txt", "Who?", *model, "--save-context", "read"),
        "generate": ("generate", BOOK, *model, "--max-tokens", 20),
        "batch": ("batch", folder / "in.jsonl", "out.jsonl", *model, "--rows", 2),
        "eval": (*evaluated.split(), "-o", "report"),
        "convert": ("convert", folder / "hf", "converted"),
        "plan": ("plan", "--model", folder / "model", "--target", "v5e:2x2", "--context", 4096),
        "bench": ("bench", "kernels", "--only", "select_large_k", "--shrink", 512, "--repeats", 1),
        "train": ("train", "--config", "run.toml"),
        "methods": ("methods", "-c", folder / "model"),
    }


def write_files(folder):
    """A source, its checkpoint, a book, rows of a batch, and texts to train on."""
    write_source(folder / "hf")
    checkpoints_convert.convert(str(folder / "hf"), folder / "model")
    (folder / "book.txt").write_text(BOOK * 8)
    rows = [{"id": n, "prompt": BOOK * (1 + n % 3)} for n in range(6)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "texts").mkdir()
    for number in range(4):
        (folder / "texts" / f"{number}.txt").write_text(f"text {number} " * 20)


@dataclasses.dataclass(frozen=True)
class Try:
    """What became of a command, `after` seconds from its begin to the signal."""

    after: float
    seconds: float
    code: int
    stderr: str

    @property
    def right(self):
        """Whether it ended in time with one line, which stands alone or after the notes."""
        *before, last = self.stderr.splitlines() or [""]
        # The summary of a batch says how many rows have one.
        said = [line.replace("with an error", "") for line in before]
        noise = any("Traceback" in line or "rror" in line for line in said)
        return self.code == 130 and last == "interrupted" and not noise and self.seconds < LIMIT


def is_leaving(process):
    """Whether the process has ended, or the system takes it down: busy, that lasts for seconds."""
    if process.poll() is not None:
        return True
    flags = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[6]
    return bool(int(flags) & 0x4)  # PF_EXITING


class Campaign:
    def __init__(self, folder, seed):
        self.folder, self.draw = folder.absolute(), random.Random(seed)
        write_files(self.folder)
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled")}
        self.environment = environment() | compiled

    def interrupt(self, name):
        """A try of a command, of which an undisturbed run before and after works."""
        command = commands(self.folder)[name]
        whole = self.work(name, "whole")
        begun = time.monotonic()
        expected = self.finish(command, whole)
        length = time.monotonic() - begun
        for number in itertools.count():
            disturbed = self.work(name, f"disturbed-{number}")
            found = self.once(command, disturbed, self.draw.uniform(0, 1.05 * length))
            again = self.finish(self.made(name, disturbed) or command, disturbed)
            if name in ("ask", "generate"):
                assert again == expected, (name, again, expected)
            if name == "batch":
                assert (disturbed / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()
            assert not list(disturbed.rglob("*.partial")), list(disturbed.rglob("*.partial"))
            # Where it was done before the signal, another begins anew.
            if found is not None:
                return found

    def made(self, name, work):
        """A command that uses what a disturbed one made whole, and would refuse to overwrite."""
        if name == "ask" and (work / "read").exists():
            model = commands(self.folder)["ask"][3:-2]
            return ("ask", "Who?", *model, "--load-context", "read")
        if name == "convert" and (work / "converted").exists():
            return ("generate", BOOK, "-c", "converted", "--max-tokens", 2)
        return None

    def work(self, name, kind):
        """A working folder, with the configuration of a training run."""
        work = self.folder / name / kind
        work.mkdir(parents=True)
        text = CONFIG.format(folder=work).replace("steps = 2", "steps = 8") + "save_every = 2\n"
        for shared in ("model", "texts"):
            text = text.replace(f"{work}/{shared}", f"{self.folder}/{shared}")
        (work / "run.toml").write_text(text)
        return work

    def start(self, command, work):
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "jax_longctx", *map(str, command)]
        return subprocess.Popen(command, cwd=work, env=self.environment, text=True, **pipes)

    def finish(self, command, work):
        process = self.start(command, work)
        stdout, stderr = process.communicate(timeout=patience(600))
        assert process.returncode == 0, (command, process.returncode, stderr)
        return stdout

    def once(self, command, work, after):
        """None where the command was done before the signal."""
        process = self.start(command, work)
        # Until Python has started and called us, Ctrl-C is Python's.
        threads = Path(f"/proc/{process.pid}/task")
        while threads.exists() and len(list(threads.iterdir())) < 2 and process.poll() is None:
            time.sleep(0.002)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        begun, done = time.monotonic(), is_leaving(process)
        _, stderr = process.communicate(timeout=patience(600))
        took = (time.monotonic() - begun) / patience(1)
        if process.returncode == 0 and (done or took < 0.1):
            return None
        return Try(after, took, process.returncode, stderr)
