"""`jax-longctx serve` in processes of their own."""

import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai

from tests.jax_longctx.cli import two_processes
from tests.patience import patience


class Process:
    """A server's process; `said` are the lines of its stderr, `url` is known after `wait`."""

    def __init__(self, *arguments, job=(), cache=None, code=two_processes.COMMAND, **told):
        words = (*job, "serve", "--port", 0, *arguments)
        self.child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=two_processes.environment(cache) | told,
        )
        self.said, self.url = [], None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.child.stderr:
            self.said.append(line.rstrip("\n"))

    def wait(self, seconds=120):
        end = time.monotonic() + patience(seconds)
        while time.monotonic() < end:
            found = re.search(r"on (http://\S+)/v1 ", "\n".join(self.said))
            if found:
                self.url = found[1]
                return self
            assert self.child.poll() is None, self.said
            time.sleep(0.05)
        raise AssertionError(self.said)

    def end(self, number=signal.SIGTERM, seconds=60):
        """Sends the signal; returns the exit code and what was written to stderr last."""
        self.child.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds=60):
        """Waits for the end; returns the exit code and the lines of stderr."""
        code = self.child.wait(patience(seconds))
        self._reader.join(patience(10))
        return code, self.said

    def kill(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self._reader.join(patience(10))
        self.child.stderr.close()

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def http(self):
        return httpx.Client(base_url=self.url, timeout=patience(120))
