"""Ctrl-C at a random moment of each of two drawn commands; each goes on afterwards as if nothing.

`python -m tests.jax_longctx.cli.interrupting FOLDER 100 SEED` is longer, over all commands.
"""

import os
import random
import signal
import sys
from importlib.machinery import ExtensionFileLoader

import pytest

from jax_longctx.cli import process
from tests.jax_longctx.cli.interrupting import LIMIT, Campaign, Try, commands

COMMANDS = 2


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_at_random_moments_of_commands(tmp_path, record_property):
    seed = int.from_bytes(os.urandom(4))
    record_property("seed", seed)
    campaign = Campaign(tmp_path, seed)
    drawn = random.Random(seed).sample(list(commands(tmp_path)), COMMANDS)
    for name in drawn:
        for found in campaign.interrupt(name, 1):
            assert found.right, f"seed {seed}, of {drawn}: {found}"


def test_the_campaign_sees_what_is_wrong():
    right = {"name": "ask", "after": 1.0, "seconds": 0.1, "code": 130}
    right["stderr"] = "reading: 10/100 tokens\n6 rows in 5 s, 0 with an error\ninterrupted\n"
    assert Try(**right).right
    wrong = [{"code": 0}, {"code": -signal.SIGINT}, {"seconds": LIMIT}, {"stderr": ""}]
    wrong.append({"stderr": "error: the checkpoint is damaged\n"})
    for said in (
        "Traceback (most recent call last):",
        "ValueError: the row is damaged",
        "error: the row is damaged",
    ):
        wrong.append({"stderr": f"{said}\ninterrupted\n"})
    for changes in wrong:
        assert not Try(**right | changes).right, changes


def test_nothing_is_raised_where_an_extension_begins():
    """Jaxlib aborts the process at an exception in its import; then Ctrl-C ends it at once."""

    class Loader(ExtensionFileLoader):
        def exec_module(self, module):
            return process._begins_an_extension(sys._getframe())

    assert Loader("jaxlib._jax", "_jax.so").exec_module(None)
    assert not process._begins_an_extension(sys._getframe())
