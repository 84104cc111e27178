"""`jax-longctx lm-eval`: lm-evaluation-harness's own command line, with our model in its table."""

import sys

from jax_longctx.cli import options
from jax_longctx.cli.options import argument
from jax_longctx.cli.terminal import Terminal


@options.command
def lm_eval(
    arguments: list[str] | None = argument("As lm_eval takes them.", metavar="..."),
) -> None:
    """Run lm-evaluation-harness with --model jax-longctx: any of its tasks under any method.

    All arguments are passed to its own command, `lm_eval`; see `jax-longctx lm-eval run --help`.
    Releases of the harness after 0.4.13 should find the model from plain `lm_eval` (not tried yet).
    `--model_args` takes checkpoint=DIR, method=NAME, the method's settings, and dtype, mesh,
    max_length, question_tokens, through and rolling.

    [bold]Examples[/bold]

        jax-longctx lm-eval --model jax-longctx --model_args checkpoint=smollm2 --tasks hellaswag

        jax-longctx lm-eval --model jax-longctx --batch_size 4 --apply_chat_template
        --model_args checkpoint=smollm2,method=citrus,budget=1024,dtype=bfloat16 --tasks gsm8k
    """
    with Terminal().starting(extra="harness"):
        from lm_eval.__main__ import cli_evaluate

        # Importing this registers the model with the harness.
        import jax_longctx.evaluation.lm_harness  # noqa: F401

    before = sys.argv
    sys.argv = ["lm_eval", *(arguments or [])]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
