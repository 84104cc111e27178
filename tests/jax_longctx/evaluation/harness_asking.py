"""How the tests ask the model that is registered with lm-evaluation-harness."""

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import jax_longctx
from jax_longctx.evaluation.lm_harness import LongctxLM

# Of every batch here and of the goldens' too, so that few programs are compiled.
CHUNK, ROWS = 32, 3


def model_of(loaded, **options):
    """Of as many rows as everywhere here, so that few programs are compiled."""
    return LongctxLM(loaded, **{"batch_size": ROWS, **options})


def under(loaded, method, settings, **options):
    """The loaded weights under another method."""
    engine = loaded.engine
    made = jax_longctx.make_method(method, settings)
    other = jax_longctx.Engine(engine.config, engine.params, made, engine.mesh, chunk=CHUNK)
    return model_of(jax_longctx.LongContext(other, loaded.tokenizer), **options)


def requests(kind, *arguments):
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def generations(model, *pairs):
    return model.generate_until(requests("generate_until", *pairs), disable_tqdm=True)


def likelihoods(model, *pairs):
    return model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)


def evaluate(folder, model, tasks, **options):
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **options
    )


def same(found, expected):
    """Log-likelihoods to 1e-4, all else as it is."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, abs=1e-4, rel=0)
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=True)
        return len(found) == len(expected) and all(same(*pair) for pair in pairs)
    return found == expected


class Asked(Exception):
    """Holds what the engine was asked: the first row of what it was given, and the options."""

    def __init__(self, *rows, **options):
        super().__init__(*rows)
        self.options = options


def ask(rows, *more, questions, **options):
    raise Asked(rows[0], questions and questions[0], *more, **options)
