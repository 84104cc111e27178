"""`jax-longctx plan`: will it fit, and how long will it take."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from rich.text import Text

from jax_longctx.cli import options
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import Terminal, shown_time, stored, table
from jax_longctx.errors import ConfigError
from jax_longctx.files import expanded
from jax_longctx.memory import shown_bytes
from jax_longctx.planning.targets import parse_target
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import AUTO, StoredForm, parse_mesh

if TYPE_CHECKING:
    from jax_longctx.planning.plan import Plan, PlanRequest

ARITHMETIC = "arithmetic over shapes"
COMPILED = (
    "temporaries are the most that a compiled program takes; the rest is arithmetic over shapes, "
    "the largest context with the compiled temporaries in proportion"
)
ROOFLINE = "arithmetic over the constants above; not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The texts that are planned for."""

    context: int = option("Tokens of context.", default=131072)
    batch: int = option("Rows of the batch.", default=1)
    reserve: int = option("Tokens of question and answer.", default=256)


@options.command
def plan(
    *,
    target: str = option(
        "v5e:4x4, v5p:4x4x4, v6e:8x8; a100, h100, h200, b200, l40s, rtx4090, rtx5090, mi300x or "
        "cpu, of several with their number: h100x8.",
        default=...,
    ),
    method: options.MethodChoice,
    model: str = option(
        "A published model's name, a Hugging Face config.json or its folder, or a converted "
        "checkpoint.",
        default="llama-3.1-8b",
    ),
    rows: Rows,
    questions: int = option(
        "Questions to each text: [bold]--method auto[/bold] chooses by them.", default=1
    ),
    run: RunSpec = options.run(
        *("dtype", "kv", "weights", "offload", "working_set", "mesh", "chunk"),
        "reading",
        dtype=options.dtype(default="bfloat16"),
    ),
    compiles: bool = option(
        "Compile the programs for the target on this machine, and show their memory.",
        "--compile",
        default=False,
    ),
    as_json: bool = options.as_json(),
) -> None:
    """Plan a model, a method and a context for devices that need not exist.

    Bytes on each device against its memory, the longest context that fits, and times that a
    roofline predicts, with its constants. The mesh with the fastest steps is proposed unless one
    is given.

    [bold]Examples[/bold]

        jax-longctx plan --context 60000 --target rtx4090 --method auto --questions 5

        jax-longctx plan --model llama-3.1-70b --context 1048576 --target v5p:4x4x4

        jax-longctx plan --method snapkv --target v5e:4x4 --mesh seq=2,tensor=8 --compile
    """
    devices, terminal = parse_target(target), Terminal(as_json=as_json)
    # Nothing is computed, so JAX needs no device, and libtpu stays free for the compiler.
    os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
    config, held = read_model(model, terminal)
    with terminal.starting():
        from jax_longctx.choosing import beyond_trained
        from jax_longctx.methods import make_method, settings_of
        from jax_longctx.planning.plan import (
            PlanRequest,
            alternatives,
            candidates,
            choose_method,
            make_plan,
        )

        asked: dict[str, Any] = dataclasses.asdict(rows)
        auto = method.method == options.AUTO
        chosen = (None if auto else method.make()) or make_method("full")
        run = dataclasses.replace(run.over("bfloat16", held), method=chosen)
        request = PlanRequest(config=config, spec=run, target=devices, **asked)
    with terminal.waiting("planning"):
        proposed = candidates(request) if run.mesh in (None, AUTO) else []
        sizes = proposed[0].mesh if proposed else parse_mesh(run.mesh or "")
        made = make_plan(request, sizes)
        others = {} if made.fits else alternatives(request, made.mesh)
        if auto:
            choice = choose_method(request, sizes, questions)
            terminal.note(f"method {choice.reason}")
            chosen = choice.method
            request = dataclasses.replace(request, spec=dataclasses.replace(run, method=chosen))
            made = make_plan(request, sizes)
    compiled = None
    if compiles:
        made, compiled = _compile(request, made, terminal)
    record = {
        "model": model,
        **settings_of(chosen),
        "target": devices.name,
        "devices": devices.count,
        "mesh": made.mesh,
        "mesh_proposed": bool(proposed),
        "meshes": [
            {"axes": each.axes, "fits": each.fits, "token": each.step, "first": each.first_token}
            for each in proposed
        ],
        **asked,
        **run.facts(),
        **_figures(request, made, ARITHMETIC if compiled is None else COMPILED),
        "compiled": compiled,
        "alternatives": {name: each.used for name, each in others.items()},
        "beyond_trained": beyond_trained(config, chosen, request.context + request.reserve),
    }
    record["method"] = record.pop("name")
    terminal.result(record, _shown)


def _compile(
    request: "PlanRequest", made: "Plan", terminal: Terminal
) -> tuple["Plan", dict[str, Any]]:
    """The plan with the compiled programs' temporaries, and the record of these programs."""
    from jax_longctx.planning.compiled import compile_plan, most_temporaries
    from jax_longctx.planning.plan import make_plan

    with terminal.progress("compiling", "programs") as update:
        found = compile_plan(request, made.mesh, update)
    made = make_plan(request, made.mesh, temporaries=most_temporaries(found))
    largest = max(found, key=lambda name: found[name].held)
    return made, {
        "programs": {name: dataclasses.asdict(each) for name, each in found.items()},
        "most_held_by": largest,
        "fits": made.fits and found[largest].held <= made.memory,
        "source": "the target's compiler, of every program that a run uses; `held` adds weights "
        "and caches that a program does not read, by their shapes",
    }


def read_model(model: str, terminal: Terminal) -> tuple[Any, StoredForm | None]:
    """A model by its name or path, and the 8-bit form of its checkpoint's matrices."""
    from jax_longctx.models.presets import preset

    path = expanded(model)
    if not os.path.exists(path):
        try:
            return preset(model), None
        except ConfigError as error:
            said = f"{error}; or give the path of a config.json or of a converted checkpoint"
            raise ConfigError(said) from None
    with terminal.starting():
        from checkpoints_convert import read_config
        from jax_longctx.models.storage import read_manifest

    if (path / "manifest.json").is_file():
        manifest = read_manifest(path)
        return manifest.config, manifest.weights
    return read_config(path / "config.json" if path.is_dir() else path), None


def _figures(request: "PlanRequest", made: "Plan", source: str) -> dict[str, Any]:
    """The plan's part of the record; `source` describes the bytes of memory."""
    from jax_longctx.planning.plan import HOST_LINK

    return {
        "constants": {**dataclasses.asdict(request.target.chip), "host_link": HOST_LINK},
        "memory_bytes": {
            "weights": made.weights,
            "cache": made.cache,
            "host": made.host,
            "temporaries": made.temporaries,
            "available": made.memory,
            "fits": made.fits,
            "largest_context": made.largest,
            "undivided_weights": made.undivided,
            "source": source,
        },
        "prefill": dataclasses.asdict(made.prefill) | {"source": ARITHMETIC},
        "decode_step": dataclasses.asdict(made.decode) | {"source": ARITHMETIC},
        "seconds": {
            "first_token": made.first_token,
            "token": made.step,
            "host": made.moved,
            "source": ROOFLINE,
        },
    }


def _shown(record: dict[str, Any]) -> list[Any]:
    from jax_longctx.planning.plan import shown_steps

    told = shown_steps((each["fits"], each["axes"], each["token"]) for each in record["meshes"])
    mesh = ",".join(f"{axis}={size}" for axis, size in record["mesh"].items())
    proposed = " (proposed)" if record["mesh_proposed"] else ""
    rows = [*_memory_rows(record), *_work_rows(record), *_compiled_rows(record)]
    numbers = table(("", "", ""), rows)
    numbers.show_header, numbers.columns[2].justify = False, "left"
    c = record["constants"]
    source = " (data sheet)" if c["data_sheet"] else ""
    host = f", host link {c['host_link'] / 1e9:.0f} GB/s" if record["offload"] else ""
    idle = f"a layer of a step idle for {c['ramp'] * 1e6:.0f} us, for {c['choice'] * 1e6:.0f} more "
    idle = f"{idle}where it chooses keys; " if c["ramp"] else ""
    constants = (
        f"constants: {c['flops'] / 1e12:.3g} TFLOP/s, {c['bandwidth'] / 1e12:.3g} TB/s{source}; "
        f"assumed: link {c['link'] / 1e9:.0f} GB/s{host}, "
        f"{c['latency'] * 1e6:.0f} us a collective; {idle}"
        f"reached {c['linear_share']:.0%} in projections, {c['attention_share']:.0%} in prefill "
        f"attention, {c['bandwidth_share']:.0%} of the bandwidth in decode"
    )
    fitting = [f"{name} ({shown_bytes(need)})" for name, need in record["alternatives"].items()]
    # Of --method auto they are full attention's.
    auto = "without --method auto " if record["memory_bytes"]["fits"] else ""
    return [
        f"{record['model']}, {record['dtype']}{stored(record)}, {record['method']}, "
        f"{record['batch']} x {record['context']:,} tokens, chunks of {record['chunk']:,}",
        f"{record['target']}, {record['devices']} devices; --mesh {mesh}{proposed}",
        *([f"a token takes by mesh: {told}"] if told else []),
        numbers,
        _bounds(record) + (f"; {auto}this fits: {', '.join(fitting)}" if fitting else ""),
        *filter(None, [record["beyond_trained"]]),
        Text(constants, style="dim"),
    ]


def _memory_rows(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    memory = record["memory_bytes"]
    names = ("weights", "cache", "temporaries")
    source = dict.fromkeys(names, "arithmetic")
    if record["compiled"]:
        source["temporaries"] = "compiled: the most that a program takes"
    if memory["undivided_weights"]:
        axes = ", ".join(memory["undivided_weights"])
        source["weights"] += f"; whole on each shard of seq, as they do not divide: {axes}"
    rows = [(f"{name}, each device", shown_bytes(memory[name]), source[name]) for name in names]
    total = sum(memory[name] for name in names)
    rows.append(("together", shown_bytes(total), f"of {shown_bytes(memory['available'])}"))
    if record["offload"]:
        said = "arithmetic; the host must have it for each of its devices"
        rows.append(("cache in the host's memory", shown_bytes(memory["host"]), said))
    return rows


def _work_rows(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for label, work in (("prefill", record["prefill"]), ("a decode step", record["decode_step"])):
        flops = work["linear"] + work["attention"]
        share = work["attention"] / flops if flops else 0.0
        about = (
            f"{share:.0%} attention; reads {shown_bytes(int(work['read']))}, receives "
            f"{shown_bytes(int(work['received']))} in {work['collectives']:,} collectives"
        )
        rows.append((f"{label}, each device", _flops(flops), about))
    seconds, first, token = record["seconds"], "roofline", "roofline"
    if record["offload"]:
        first += f"; {shown_time(seconds['host'])} of it to the host's memory and from it"
        token += ", without what it fetches from the host's memory"
    return [
        *rows,
        ("time to first token", shown_time(seconds["first_token"]), first),
        ("time a token", shown_time(seconds["token"]), token),
    ]


def _compiled_rows(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    compiled = record["compiled"] or {"programs": {}}
    return [
        (
            f"{name}, compiled",
            shown_bytes(found["held"]),
            f"of which temporaries {shown_bytes(found['temporaries'])}; reads "
            f"{shown_bytes(found['weights_read'])} of weights; {found['collectives']:,} "
            f"collectives of {shown_bytes(found['moved'])}; compiled in {found['seconds']:.0f} s",
        )
        for name, found in compiled["programs"].items()
    ]


def _bounds(record: dict[str, Any]) -> str:
    memory, compiled = record["memory_bytes"], record["compiled"]
    largest, context = memory["largest_context"], record["context"]
    if memory["weights"] >= memory["available"] or largest == 0:
        return (
            "does not fit: no context does; take more devices along tensor or seq, or larger ones"
        )
    bound = (
        "memory does not bound the context"
        if largest is None
        else f"the largest context that fits is about {largest:,} tokens"
    )
    verdict = "fits" if (compiled or memory)["fits"] else f"{context:,} tokens do not fit"
    if compiled is None:
        return f"{verdict}; {bound}"
    name = compiled["most_held_by"]
    held = shown_bytes(compiled["programs"][name]["held"])
    return f"{verdict}: as compiled, {name!r} holds the most, {held}; {bound}"


def _flops(count: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e9:,.1f} GFLOP"
