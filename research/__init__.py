"""What single papers need, beside the packages and not in the wheel.

`suites` and `published.toml` are the papers' evaluations and figures: `jax-longctx eval --suite
paper:NAME` finds them in a checkout. The other files are studies, and methods that compute what a
paper's released code or its ablation computes. `offer` gives these names, as an entry point does
for another package's methods. `python -m research` is the command line with them, and with the
studies' commands.
"""

from jax_longctx.methods import METHODS

STUDIES = ("refreshkv-ablated", "star-anchors", "star-released-mask")


def offer() -> None:
    """Lets the methods of this package be found by name."""
    METHODS.update({name: f"research.{name.replace('-', '_')}" for name in STUDIES})
