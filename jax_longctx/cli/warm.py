"""`jax-longctx warm`: compile what a command will need, before there are texts or weights."""

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli import options
from jax_longctx.cli.options import argument, option
from jax_longctx.cli.terminal import Terminal, check_checkpoint, shown_time
from jax_longctx.errors import InputError
from jax_longctx.files import expanded
from jax_longctx.memory import shown_bytes
from jax_longctx.models.presets import preset
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Sampling

if TYPE_CHECKING:
    from jax_longctx.engine import Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The questions that later commands ask."""

    question: int = option("Tokens of the question.", default=32, min=1)
    answer: int = option("Longest answer in tokens, as --max-tokens of ask.", default=128, min=1)
    rows: int = option("Rows of the batch.", default=1, min=1)


@options.command
def warm(
    *,
    model: str = argument(
        "Converted checkpoint (only its manifest and tokenizer are read), or a "
        "published model's name.",
        default=...,
        metavar="MODEL",
    ),
    methods: list[str] | None = options.methods(),
    length: list[int] | None = option(
        "Tokens of the text; repeat for several. 16,000 unless given.", min=1
    ),
    asked: Asked,
    answers: options.AnswerChoice = options.only(
        *("temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
    run: RunSpec = options.run(),
    as_json: bool = options.as_json(),
) -> None:
    """Fill the compilation cache for a model, a method and a length, without weights.

    Later commands of that shape read the compiled programs from the cache. Run it where they will
    run, on devices of the same kind, for example when a pod's image is built. The caches of keys
    and values are allocated, the weights are not. Give the temperature and the other options of
    sampling that the commands will have: they take other programs than greedy decoding.

    [bold]Examples[/bold]

        jax-longctx warm llama3 -m reattention --length 100000 --answer 256

        JAX_COMPILATION_CACHE_DIR=/cache jax-longctx warm llama-3.1-8b -m full -m quest
    """
    specs = options.parse_specs(methods)
    if os.path.exists(expanded(model)):
        check_checkpoint(Path(model))
    else:
        preset(model)  # Raises an error that lists the names.
    terminal = Terminal(as_json=as_json)
    sampling = answers.sampling
    with terminal.starting():
        from jax_longctx.engine import Lengths
        from jax_longctx.methods import make_method

        devices = run.devices()
        stopping = _Model(model, dataclasses.replace(run, mesh=devices))
    folder = _cache_folder()
    # What does not fit is refused before the first compiles.
    cases = [
        (spec, tokens, stopping.engine(make_method(spec.name, spec.at(tokens))))
        for spec in specs
        for tokens in length or [16000]
    ]
    found = []
    for spec, tokens, engine in cases:
        lengths = Lengths([tokens] * asked.rows, [(asked.question, asked.answer)])
        compiled = stopping.compile(engine, lengths, sampling, terminal, spec.label)
        about = {"method": spec.name, "settings": spec.at(tokens), "length": tokens}
        found.append({**about, **compiled})
    record = {
        "model": model,
        "mesh": dict(devices.shape),
        **dataclasses.asdict(asked),
        **run.facts(),
        "sampling": dataclasses.asdict(sampling),
        "folder": str(folder),
        "cache_bytes": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        "cases": found,
    }
    terminal.result(record, _shown)


class _Model:
    """The model that is compiled for: its configuration, and the ids that end its answers."""

    def __init__(self, model: str, run: RunSpec):
        self.stop_ids: tuple[int, ...] = ()
        self._stacked = False
        if not os.path.exists(expanded(model)):
            self.config, self.run = preset(model), run.over("bfloat16")
            return
        from jax_longctx.models.storage import read_manifest, tokenizer_folder
        from jax_longctx.text import Tokenizer

        manifest = read_manifest(model)
        self.config, self.run = manifest.config, run.over(manifest.dtype, manifest.weights)
        folder, eos = tokenizer_folder(model, manifest), manifest.extras.get("eos_token_id")
        self.stop_ids = Tokenizer.load(folder, eos=eos).eos_ids

    def engine(self, method: Any) -> Any:
        """An engine without weights."""
        from jax_longctx.engine import Engine
        from jax_longctx.models.params import abstract_params

        run = dataclasses.replace(self.run, method=method)
        return Engine(self.config, abstract_params(self.config, run), run)

    def compile(
        self, engine: Any, lengths: "Lengths", sampling: Sampling, terminal: Terminal, name: str
    ) -> dict[str, Any]:
        """Compiles, with progress, the programs of one question and of several.

        The first time also what stacks the weights' layers, where a device loops over them.

        Returns:
          the programs, how many of them the cache held, and the seconds.
        """
        from jax_longctx.engine import compile_ahead
        from jax_longctx.engine.compiling import CompileClock
        from jax_longctx.models.params import stacking_programs

        begun = time.perf_counter()
        with CompileClock() as clock:
            if not engine.setup.by_layer and not self._stacked:
                with terminal.waiting("compiling for the weights"):
                    for program in stacking_programs(self.config, engine.params):
                        program.compile()
                self._stacked = True
            # A context that is kept for another question is forked.
            for keep in (False, True):
                with terminal.waiting(f"lowering {name}"):
                    compilation = compile_ahead(
                        engine, lengths, sampling=sampling, stop_ids=self.stop_ids, keep=keep
                    )
                with terminal.progress(f"compiling {name}", "programs") as update:
                    compilation.wait(update, check=True)
        seconds = round(time.perf_counter() - begun, 3)
        return {"programs": clock.programs, "found": clock.hits, "seconds": seconds}


def _cache_folder() -> Path:
    """The persistent cache's folder, turned on. InputError where there is none."""
    import jax

    from jax_longctx.engine.program_files import keep_compilations, trusted

    keep_compilations()
    folder = jax.config.jax_compilation_cache_dir
    used = jax.config.jax_enable_compilation_cache
    if folder is None or not used or not ("://" in folder or trusted(Path(folder))):
        raise InputError(
            "there is no compilation cache to fill: it is turned off, or its folder cannot be "
            "written, or others can write to it; name one with JAX_COMPILATION_CACHE_DIR"
        )
    # Also in a folder of the user's choice: a command needs many small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return Path(folder)


def _shown(record: dict[str, Any]) -> list[Any]:
    lines = []
    for case in record["cases"]:
        programs, found = case["programs"], case["found"]
        how = (
            "all found in the cache"
            if found == programs
            else f"{programs - found:,} compiled, {found:,} found in the cache"
        )
        lines.append(
            f"{case['method']}, {case['length']:,} tokens: {programs:,} programs, {how}, "
            f"{shown_time(case['seconds'])}"
        )
    return [*lines, f"{record['folder']} holds {shown_bytes(record['cache_bytes'])}"]
