"""The collectives of a compiled program, and the weights that it reads, counted in its HLO text.

A collective or a read in the body of a loop counts as often as the loop runs it, in nested loops as
often as their product. XLA notes the trip count of a loop on CPUs and GPUs; on TPUs it is read from
the counter's start, step and bound. A loop that ends by what it computes, such as decoding until
all rows are done, counts as one pass.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator

# `%name (parameters) -> result {`, of a computation.
_HEADER = re.compile(r"^(?:ENTRY )?%(?P<name>[^\s(]+) \(.*\{$")
# `%name = shape operation(operands), attributes`, of an instruction.
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<operation>[\w-]+)\("
    r"(?P<operands>[^)]*)\)(?P<attributes>.*)$"
)
_COLLECTIVE = re.compile(
    r"(?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|"
    r"collective-broadcast|ragged-all-to-all)(?P<start>-start)?"
)
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|true_computation|false_computation|branch_computations|"
    r"called_computations)=(?:\{([^}]*)\}|(%[^\s,]+))"
)
_TRIPS = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_NAME = re.compile(r"%([^\s,(){}]+)")
# Instructions that hand values on, and kernels.
_PASSING = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("copy-done", "async-start", "async-update", "async-done", "opt-barrier", "custom-call"),
}
# Of an instruction that is another one's bytes.
_BYTES = ("bitcast",)
_SLICING = {"slice", "dynamic-slice", "gather"}
# The type, its bits, and the sizes of the axes.
_ARRAY = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    written: str
    attributes: str

    def attribute(self, pattern: str) -> str:
        """What `pattern`'s group finds in the attributes, or an empty text."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class _Computation:
    instructions: dict[str, _Instruction]
    root: _Instruction | None

    def source(self, name: str, same: tuple[str, ...] = ("copy", "bitcast")) -> _Instruction | None:
        """The instruction of that name, or the one whose value it is by the operations `same`."""
        found = self.instructions.get(name)
        while found and found.operation in same and found.operands:
            found = self.instructions.get(found.operands[0])
        return found

    def constant(self, name: str) -> int | None:
        """The integer that the instruction of that name is, if it is a constant."""
        found = self.source(name)
        if found is None or found.operation != "constant":
            return None
        return int(found.written) if re.fullmatch(r"-?\d+", found.written) else None

    def element(self, name: str) -> int | None:
        """The index in the loop's state that the instruction of that name reads, if it does."""
        found = self.source(name)
        if found is None or found.operation != "get-tuple-element":
            return None
        of = self.instructions.get(found.operands[0])
        return int(found.attribute(r"index=(\d+)")) if of and of.operation == "parameter" else None


def count_collectives(text: str) -> tuple[int, int]:
    """The number of collectives that one run of a compiled program does, and their results' bytes.

    Each branch of a conditional counts.
    """

    computations = _computations(text)

    def cost(around: _Computation) -> tuple[int, int]:
        count = moved = 0
        # TPUs cut a collective into fusions with what runs beside it. These share its channel.
        channels: set[str] = set()
        for each in around.instructions.values():
            for one in _within(each, computations):
                collective = _COLLECTIVE.fullmatch(one.operation)
                channel = one.attribute(r"channel_id=(\d+)")
                if collective is None or channel in channels:
                    continue
                if channel and one is not each:
                    channels.add(channel)
                count += 1
                moved += _result_bytes(one.shape, collective["start"] is not None)
        return count, moved

    return _total(computations, cost)


def count_reads(text: str, arrays: Collection[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes that one run of a compiled program reads of the arrays of these types and shapes.

    Where an instruction reads a slice of an array, the slice counts. Kernels do not count. What
    lies in a TPU's fast memory was counted when it was copied there.

    Args:
      arrays: as a device holds them, e.g. `("bf16", (4, 512, 128))`.
    """
    computations = _computations(text)

    def cost(around: _Computation) -> tuple[int, int]:
        read = 0
        for each in around.instructions.values():
            for position, name in enumerate(each.operands):
                source = None if each.operation in _PASSING else around.source(name, _BYTES)
                if source is None or "S(1)" in source.shape:
                    continue
                found = _ARRAY.fullmatch(source.shape.split("{")[0])
                if found and (found[1], _sizes(found[3])) in arrays:
                    read += _read_of(each, position, source, computations)
        return 0, read

    return _total(computations, cost)[1]


def _within(each: _Instruction, others: dict[str, _Computation]) -> Iterator[_Instruction]:
    """The instruction, or those that a fusion holds."""
    if each.operation != "fusion":
        yield each
        return
    for callee in _callees(each):
        if callee in others:
            for one in others[callee].instructions.values():
                yield from _within(one, others)


def _total(
    computations: dict[str, _Computation], cost: Callable[[_Computation], tuple[int, int]]
) -> tuple[int, int]:
    """The sum of the computations' costs, each times how often it runs.

    What is within a computation's fusions is part of its cost.
    """
    called: set[str] = set()

    @functools.cache
    def total(name: str) -> tuple[int, int]:
        first, second = cost(computations[name])
        for each in computations[name].instructions.values():
            for callee in _callees(each):
                if callee not in computations:
                    continue
                called.add(callee)
                if each.operation != "fusion":
                    times = _trips(each, computations[name], computations)
                    inner = total(callee)
                    first, second = first + times * inner[0], second + times * inner[1]
        return first, second

    totals = {name: total(name) for name in computations}
    # The entry, and whatever this does not know to be called.
    roots = [found for name, found in totals.items() if name not in called]
    return sum(count for count, _ in roots), sum(moved for _, moved in roots)


def _read_of(
    each: _Instruction, position: int, source: _Instruction, others: dict[str, _Computation]
) -> int:
    """Bytes that an instruction reads of its operand of that position."""
    if each.operation in _SLICING:
        return _result_bytes(each.shape, False) if position == 0 else 0
    if each.operation == "dynamic-update-slice":
        return 0 if position == 0 else _result_bytes(source.shape, False)
    if each.operation == "fusion":
        (callee,) = _callees(each)
        within = others[callee]
        (parameter,) = (
            one
            for one in within.instructions.values()
            if one.operation == "parameter" and one.written == str(position)
        )
        return sum(
            _read_of(user, at, parameter, others)
            for user in within.instructions.values()
            if user.operation not in _PASSING
            for at, name in enumerate(user.operands)
            if within.source(name, _BYTES) is parameter
        )
    return _result_bytes(source.shape, False)


def _computations(text: str) -> dict[str, _Computation]:
    found: dict[str, _Computation] = {}
    instructions: dict[str, _Instruction] | None = None
    name, root = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name, instructions, root = header["name"], {}, None
        elif line == "}":
            if instructions is not None:
                found[name] = _Computation(instructions, root)
            instructions = None
        elif instructions is not None:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            written = match["operands"]
            each = _Instruction(
                name=match["name"],
                shape=match["shape"],
                operation=match["operation"],
                operands=tuple(_NAME.findall(written)),
                written=written,
                attributes=match["attributes"],
            )
            instructions[each.name] = each
            root = each if match["root"] else root
    return found


def _callees(each: _Instruction) -> list[str]:
    """Computations that an instruction runs; the end of an asynchronous one names them again."""
    if each.operation in ("async-update", "async-done"):
        return []
    return [
        name
        for several, one in _CALLED.findall(each.attributes)
        for name in _NAME.findall(several or one)
    ]


def _trips(each: _Instruction, around: _Computation, others: dict[str, _Computation]) -> int:
    """How often a loop's body runs; 1 for other instructions, and where unknown."""
    if each.operation != "while":
        return 1
    noted = _TRIPS.search(each.attributes)
    if noted:
        return int(noted[1])
    condition = others.get(each.attribute(r"condition=%([^\s,]+)"))
    body = others.get(each.attribute(r"body=%([^\s,]+)"))
    if condition is None or body is None:
        return 1
    test = condition.root
    if test is None or test.operation != "compare" or len(test.operands) != 2:
        return 1
    counter, bound = condition.element(test.operands[0]), condition.constant(test.operands[1])
    direction = test.attribute(r"direction=(\w+)")
    if counter is None or bound is None or direction not in ("LT", "LE"):
        return 1
    state = around.source(each.operands[0])
    if state is None or state.operation != "tuple":
        return 1
    start, step = around.constant(state.operands[counter]), _step(body, counter)
    if start is None or step is None:
        return 1
    return max(0, -(-(bound + (direction == "LE") - start) // step))


def _step(body: _Computation, counter: int) -> int | None:
    """What a loop's body adds to the counter at that index of its state, if it is known."""
    if body.root is None or body.root.operation != "tuple":
        return None
    new = body.source(body.root.operands[counter])
    if new is None or new.operation != "add":
        return None
    steps = [body.constant(name) for name in new.operands]
    sources = [body.element(name) for name in new.operands]
    for step, source in zip(steps, reversed(sources), strict=True):
        if step is not None and step > 0 and source == counter:
            return step
    return None


def _result_bytes(shape: str, start: bool) -> int:
    arrays = [
        int(bits or 8) * math.prod(_sizes(sizes)) // 8 for _, bits, sizes in _ARRAY.findall(shape)
    ]
    # An asynchronous start lists its operands before its results.
    return sum(arrays[len(arrays) // 2 :] if start and len(arrays) > 1 else arrays)


def _sizes(written: str) -> tuple[int, ...]:
    return tuple(int(size) for size in written.split(",") if size)
