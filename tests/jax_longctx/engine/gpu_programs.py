"""Compiles methods' programs for GPUs that need not be there, and prints what they hold.

`python -m tests.jax_longctx.engine.gpu_programs METHOD[:OPTION=VALUE]...`, of the options `kv`,
`weights`, `offload`, `batch`, `rows`, `turn`, `model`, `context`, `mesh` ("seq" x "tensor"), `gpu`
(h200 or a100) and `only`, in a process that finds JAX's CUDA plugin: JAX looks for plugins once,
when it begins. One line of JSON is printed for each program, or for those of the kind that `only`
names; of `batch` rows, or with `rows` for the step of rows that share a context.
"""

import json
import math
import re
import sys
from typing import Any

from jax_longctx.planning.collectives import _COLLECTIVE, _Computation
from jax_longctx.planning.collectives import _computations as computations
from jax_longctx.run_spec import RunSpec

Program = dict[str, _Computation]

# What XLA asks of a GPU, here an H200, with no more memory than the arguments of a program take:
# when it is full, programs must be the same.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  clock_rate_ghz: 1.98
  device_memory_size: 6000000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
# A GPU for which there are no kernels.
A100 = H200
for ours, its in {
    "major: 9 ": "major: 8 ",
    "core_count: 132": "core_count: 108",
    "optin: 232448": "optin: 166912",
    "core: 233472": "core: 167936",
    "H200": "A100-SXM4-80GB",
}.items():
    A100 = A100.replace(ours, its)
GPUS = {"h200": H200, "a100": A100}
# The model's shapes are Llama 3.1 8B's. The loop's body is the same for more layers. No activation
# of a chunk has as many elements as a layer's weights.
CONTEXT, RESERVE, CHUNK = 16_000, 512, 1536
# Layers of a turn of a decode step's loop unless told: each takes time to compile. A GPU has more
# (`layers.LAYERS_A_TURN`). Every loop has two turns.
A_TURN = 2
# Elements of arrays whose copies are looked for.
LEAST = 2**20

# Instructions that launch kernels; of asynchronous ones the start counts.
_KERNELS = ("fusion", "fusion-start", "custom-call", "copy", "copy-start", "sort", "async-start")
# Instructions whose result may be an array of their own.
_MAKING = ("copy", "copy-start", "fusion", "fusion-start", "dynamic-slice", "transpose")
# Instructions of fusions that write into an argument's buffer.
_IN_PLACE = ("dynamic-update-slice", "scatter")


def called(each, name):
    """The computation that an instruction's attribute of this name calls, or an empty text."""
    return each.attribute(rf"\b{name}=%?([\w.\-]+)")


def arrays(each):
    """Types and shapes of the arrays that an instruction makes, but for single numbers."""
    found = re.findall(r"([a-z]+\d+\w*)\[([\d,]+)\]", each.shape)
    return [(kind, tuple(map(int, sizes.split(",")))) for kind, sizes in found]


def layer_loops(program, layers):
    """The bodies of the loops that run as often as there are layers."""
    wanted = f'known_trip_count":{{"n":"{layers}"}}'
    return [
        called(each, "body")
        for computation in program.values()
        for each in computation.instructions.values()
        if each.operation == "while" and wanted in each.attributes
    ]


def kernels(program, name):
    """Kernels that one pass through a computation launches; those of inner loops count once."""
    count = 0
    for each in program[name].instructions.values():
        count += each.operation in _KERNELS
        for attribute in ("body", "to_apply", "true_computation", "false_computation"):
            inner = called(each, attribute)
            if inner and each.operation in ("while", "call", "conditional"):
                count += kernels(program, inner)
        if branches := each.attribute(r"branch_computations={(.*?)}"):
            count += max(kernels(program, one.strip(" %")) for one in branches.split(","))
    return count


def collectives(program, name):
    """XLA's collectives in a computation, and the kernels that exchange numbers."""
    found = []
    for each in program[name].instructions.values():
        kernel = re.search(r"peer_(?:sum|gather)", each.attributes)
        own = each.operation == "custom-call" and kernel
        if own or _COLLECTIVE.fullmatch(each.operation):
            found.append(kernel.group() if own else each.operation.removesuffix("-start"))
    return {kind: found.count(kind) for kind in sorted(set(found))}


def side_by_side(program, name):
    """Kernels of a computation that exchange numbers, and do not wait for the one before."""
    before, last, found = {}, None, []
    for number, each in program[name].instructions.items():
        before[number] = set(each.operands).union(*(before.get(one, ()) for one in each.operands))
        if each.operation == "custom-call" and "peer_" in each.attributes:
            found += [] if last is None or last in before[number] else [number]
            last = number
    return found


def unfused(program):
    """The instructions whose results are in memory: those outside of fusions."""
    inner = {
        called(each, "calls")
        for computation in program.values()
        for each in computation.instructions.values()
        if each.operation in ("fusion", "fusion-start")
    }
    for name, computation in program.items():
        if name not in inner:
            yield from computation.instructions.values()


def copies(program, sizes):
    """Instructions that make an array as large as one of `sizes`, and what that is.

    Neither what writes into an argument's buffer counts nor what hands an address on.
    """
    for each in unfused(program):
        if each.operation not in _MAKING:
            continue
        if each.operation.startswith("fusion") and not _makes(program, each):
            continue
        # The type of a start has those of its operands too.
        started = each.operation == "fusion-start"
        for _, array in arrays(program[called(each, "calls")].root if started else each):
            if math.prod(array) in sizes:
                text = f"{each.shape} {each.operation}({each.written})"[:160]
                # Where in the source it comes from.
                origin = each.attribute(r'op_name="([^"]*)"')
                yield f"{text} ... {origin}" if origin else text, sizes[math.prod(array)]


def gathers(program: Program) -> set[str]:
    """The shapes of large arrays of slices that lie where numbers say, in memory or in a fusion."""
    return {
        "x".join(map(str, sizes))
        for computation in program.values()
        for each in computation.instructions.values()
        if each.operation == "gather"
        for _, sizes in arrays(each)
        if math.prod(sizes) >= LEAST
    }


def _makes(program, fusion):
    """Whether a fusion's result is memory of its own."""
    # XLA's loop fusions of a slice have "dynamic_slice_fusion" in their names too, and copy.
    told = fusion.name + fusion.attributes
    if "kind=kCustom" in told and ("address_computation" in told or "dynamic_slice_fusion" in told):
        return False
    # What has no operand copies nothing: it begins an array that is filled later.
    if not fusion.operands:
        return False
    body = program[called(fusion, "calls")].instructions.values()
    return not any(each.operation in _IN_PLACE for each in body)


def shared_decode(request, setup, rows):
    """The decode step of so many rows that go on from one context, as `used_programs` gives it."""
    import functools

    import jax
    import jax.numpy as jnp

    from jax_longctx.caches.branched import branches, split_of, with_context
    from jax_longctx.engine.capacity import staged_caches
    from jax_longctx.engine.decode import Steps, answer_variants, decode_block
    from jax_longctx.engine.engine import BLOCK
    from jax_longctx.engine.sampling import GREEDY, SamplingStatic
    from jax_longctx.planning import compiled
    from tests.jax_longctx.engine import lowering

    own, layout = request.spec.method.own_tokens, setup.slot_layout
    assert own is not None
    _, context, _ = staged_caches(setup, 1, request.context, request.reserve)
    room = -(-(own + layout.turn + request.reserve) // layout.turn) * layout.turn
    split = split_of(request.context, own, layout)
    branched = functools.partial(branches, rows=rows, room=room, split=split)
    caches = with_context(jax.eval_shape(branched, context), context)
    shape = jax.ShapeDtypeStruct
    variants = answer_variants(request.spec.method, request.reserve)
    args = (
        *(setup, compiled.abstract_params(setup), lowering.placed(setup.mesh, caches)),
        lowering.abstract_state(rows),
        Steps(
            *(shape((rows,), jnp.int32), shape((rows, BLOCK), jnp.int32)),
            *(lowering.abstract_values(rows), variants),
            # Other choices of a token are no part of the loop over layers, and compile for long.
            SamplingStatic((GREEDY,)),
        ),
    )
    return [compiled.UsedProgram("shared decode", "decode", decode_block, args, 0)]


def growing(request, setup):
    """What makes an offloaded context larger."""
    from jax_longctx.engine.capacity import _extended, slots_for, staged_caches
    from jax_longctx.planning.compiled import UsedProgram
    from tests.jax_longctx.engine import lowering

    _, kept, _ = staged_caches(setup, 1, request.context, request.reserve)
    slots = slots_for(request.context, request.reserve)
    args = setup, lowering.placed(setup.mesh, kept), 512, slots
    grows: Any = "grow"
    return [UsedProgram("growing", grows, _extended, args, 0)] if setup.offload else []


def host_shardings():
    """Lets arrays of absent GPUs lie in the host's memory.

    JAX drops the memory kind of a sharding on devices that do not tell which memories they have.
    """
    from jax.sharding import NamedSharding

    from jax_longctx import sharding

    class InHost(NamedSharding):
        @property
        def memory_kind(self):
            return sharding.HOST

        def __hash__(self):
            return super().__hash__() + 1

        def __eq__(self, other):
            return isinstance(other, InHost) and super().__eq__(other)

    def made(mesh, spec, *, memory_kind=None):
        return (NamedSharding if memory_kind is None else InHost)(mesh, spec)

    sharding.NamedSharding = made


def kinds(method):
    """The kinds of programs that are looked at: chunks read weights alike under all methods."""
    if method.startswith("full:turn="):
        return {"context", "finish", "question", "decode"}
    chunk = {"context"} if method.startswith("full:") or ":offload=" in method else set()
    return chunk | {"finish", "decode"} | ({"grow"} if ":offload=" in method else set())


def main(methods):
    import jax
    from jax.experimental import topologies

    host_shardings()

    jax.config.update("jax_enable_compilation_cache", False)
    # The plugin is registered with the first backend.
    jax.devices("cpu")

    from jax_longctx.engine import layers
    from jax_longctx.engine.ahead import lower
    from jax_longctx.engine.capacity import staged_caches
    from jax_longctx.methods import make_method
    from jax_longctx.models.presets import preset
    from jax_longctx.planning.compiled import abstract_params, used_programs
    from jax_longctx.planning.plan import PlanRequest
    from jax_longctx.planning.targets import parse_target
    from jax_longctx.sharding import make_mesh

    for said in methods:
        name, *forms = said.split(":")
        options = dict(form.split("=") for form in forms)
        rows, batch = int(options.pop("rows", 1)), int(options.pop("batch", 1))
        only, model = options.pop("only", None), options.pop("model", "llama-3.1-8b")
        context = int(options.pop("context", CONTEXT))
        seq, tensor = map(int, options.pop("mesh", "1x1").split("x"))
        count, config = seq * tensor, GPUS[options.pop("gpu", "h200")]
        how = dict(platform="cuda", target_config=config)
        gpus = topologies.get_topology_desc(topology=f"1x1x{count}", **how)
        mesh = make_mesh(seq=seq, tensor=tensor, devices=gpus.devices[:count])
        a_turn = layers.LAYERS_A_TURN = int(options.pop("turn", A_TURN))
        count = 2 * a_turn
        request = PlanRequest(
            config=preset(model).cut(count),
            spec=RunSpec(method=make_method(name), chunk=CHUNK, **options),
            target=parse_target("h200"),
            context=context,
            reserve=RESERVE,
        )
        setup = request.setup(mesh)
        caches = staged_caches(setup, batch, context, RESERVE)
        sizes = {}
        for what, tree in (("weights", abstract_params(setup)["layers"]), ("cache", caches)):
            for leaf in jax.tree.leaves(tree):
                if leaf.shape[:1] == (count,) and leaf.size >= LEAST:
                    sizes |= {
                        leaf.size: f"all layers' {what}",
                        leaf.size // count: f"a layer's {what}",
                    }
        used_of: Any = used_programs if rows == 1 else shared_decode
        number = batch if rows == 1 else rows
        for used in [*used_of(request, setup, number), *growing(request, setup)]:
            if used.kind not in (kinds(said) if only is None else (only,)):
                continue
            compiled = lower(used.function, used.args).compile()
            program = computations(compiled.as_text())
            turns = 2 if used.kind == "decode" else count
            found = {
                "method": said,
                "kind": used.kind,
                "name": used.name,
                "kernels": [kernels(program, body) for body in layer_loops(program, turns)],
                "collectives": [collectives(program, body) for body in layer_loops(program, turns)],
                "side by side": [
                    side_by_side(program, body) for body in layer_loops(program, turns)
                ],
                "copies": list(copies(program, sizes)),
                "gathers": sorted(gathers(program)),
                "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
