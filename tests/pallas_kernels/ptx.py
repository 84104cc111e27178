"""Runs the PTX of a kernel for one block of threads in NumPy, where there is no GPU.

It knows integers, float32, pairs of 16-bit floats, branches that a whole warp takes, what warps
compute together, and barriers of all threads. A warp runs up to its next barrier before another
begins, in an order that is drawn: what depends on the order comes out wrong in some of them. Copies
by TMA and their barriers are passed over: the caller fills shared memory.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests import gpu_plugin

LANES = 32
LANE = np.arange(LANES)
_BITS_32 = np.uint64(0xFFFFFFFF)
# The addresses of parameter i begin at i + 1 of these; those of shared memory at 0.
_REGION = 40
_PASSED_OVER = (".", "fence", "ret", "cp.", "mbarrier", "prefetch")
_PACKED: dict[str, Any] = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {"min": np.minimum, "max": np.maximum}
_BINARY |= {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_BINARY |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {"eq": np.equal, "ne": np.not_equal}
_COMPARED |= {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def compiled(module, folder):
    """The PTX of every kernel that a module of this folder compiles, by the kernels' names."""
    dumped = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}
    gpu_plugin.output(f"tests.pallas_kernels.{module}", **dumped)
    texts = [path.read_text() for path in folder.glob("*.ptx")]
    found = (re.search(r"\.entry (\w+)_mosaic_gpu_kernel", text) for text in texts)
    return {name[1]: text for name, text in zip(found, texts, strict=True) if name is not None}


def shared_address(text):
    """Where the kernel's first copy puts its array in shared memory."""
    found = re.search(r"add\.s32 \s*(%r\d+), %r\d+, (\d+);.*?cp\.async[^;]*\[\1\]", text, re.S)
    assert found is not None, "no copy into shared memory"
    return int(found[2])


@dataclasses.dataclass(frozen=True)
class Statement:
    """One instruction: `@guard operation target, given...;`."""

    operation: str
    guard: str | None
    target: str
    given: tuple[str, ...]

    @property
    def kind(self):
        return self.operation.split(".")[0]

    @property
    def how(self):
        return self.operation.split(".")[1:]


def parse(text):
    """The instructions of the only kernel, and where its labels are."""
    body = re.sub(r"//[^\n]*", "", text[text.index("$L__func_begin") :])
    body = re.sub(r"\.loc\s[^\n]*|\.reg\s[^;]*;|LAB_WAIT:.*?DONE:", "", body, flags=re.S)
    # Vectors of registers in other brackets than blocks.
    body = re.sub(r"\{\s*(%[^{};]*)\}", r"<\1>", body).replace("{", " ").replace("}", ";")
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for piece in body.split(";"):
        line = " ".join(piece.split())
        while label := re.match(r"(\$\w+):\s*", line):
            labels[label[1]] = len(statements)
            line = line[label.end() :]
        guard = re.match(r"@(!?[%\w]+)\s+", line)
        line = line[guard.end() :] if guard else line
        if not line or line.startswith(_PASSED_OVER):
            continue
        operation, _, rest = line.partition(" ")
        names = [x.strip() for x in re.findall(r"<[^>]*>|\[[^\]]*\]|[^,\s][^,]*", rest)]
        target, *given = names or [""]
        statements.append(Statement(operation, guard[1] if guard else None, target, tuple(given)))
    return statements, labels


def run(text, arguments, shared=None, *, block=(0,), draw):
    """Runs one block of 128 threads; stores change `shared` and `arguments`.

    Args:
      arguments: the bytes that the parameters point to.
      block: its place in the grid, x first.
    """
    program = parse(text)
    # What was never stored is no number that tests expect.
    memory = {0: np.full(1 << 16, 0xA5, np.uint8) if shared is None else shared}
    memory |= {number + 1: x for number, x in arguments.items()}
    warps = [_Warp(program, memory, warp, block) for warp in range(4)]
    steps, going = [warp.steps() for warp in warps], list(range(4))
    while going:
        reached = {each: next(steps[each], None) for each in draw.permutation(going).tolist()}
        assert len(set(reached.values())) == 1, f"warps at different barriers: {reached}"
        going = [each for each in going if reached[each] is not None]
    return warps


class _Warp:
    """The state of a warp; every register holds 64 bits of each lane.

    `conflicts` is the most words of one bank that it loaded at once.
    """

    def __init__(self, program, memory, warp, block):
        (self.statements, self.labels), self.memory, self.conflicts = program, memory, 0
        self.registers = {"%tid.x": (warp * LANES + LANE).astype(np.uint64)}
        for axis, index in zip("xyz", block, strict=False):
            self.registers[f"%ctaid.{axis}"] = np.full(LANES, index, np.uint64)

    def steps(self):
        """Runs to the next barrier, whose place is given."""
        at = 0
        while at < len(self.statements):
            each = self.statements[at]
            at += 1
            on = np.ones(LANES, bool)
            if each.guard is not None:
                on = self.value(each.guard.lstrip("!"), "pred") != each.guard.startswith("!")
            if each.kind == "bra":
                assert on.all() or not on.any(), "lanes of a warp part"
                at = self.labels[each.target] if on.all() else at
            elif each.kind == "bar":
                yield at
            elif each.kind == "st":
                self.store(each, on)
            else:
                self.compute(each, on)

    def value(self, name, form):
        """The operand as `form` says: "s32", "u32", "b64", "pred" or alike."""
        if name in self.registers:
            found = self.registers[name]
        elif name.startswith("__dynamic"):
            found = np.zeros(LANES, np.uint64)
        elif parameter := re.search(r"_param_(\d+)$", name):
            found = np.full(LANES, int(parameter[1]) + 1 << _REGION, np.uint64)
        elif name.startswith("0f"):
            found = np.full(LANES, int(name[2:], 16), np.uint64)
        else:
            found = np.full(LANES, int(name, 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if form == "pred":
            return found.astype(bool)
        if form.endswith("64"):
            return found.view(np.int64) if form == "s64" else found
        low = (found & _BITS_32).astype(np.uint32)
        if form == "f32":
            return low.view(np.float32)
        return low.view(np.int32).astype(np.int64) if form == "s32" else low.astype(np.int64)

    def address(self, name):
        base, _, offset = name.strip("[]").partition("+")
        return self.value(base, "b64") + np.int64(offset or 0).view(np.uint64)

    def load(self, at, size):
        array, place = self.place(at)
        each = [array[place + i].astype(np.uint64) << np.uint64(8 * i) for i in range(size)]
        return np.bitwise_or.reduce(each)

    def place(self, at):
        (region,) = {int(x) >> _REGION for x in at}
        return self.memory[region], (at & np.uint64((1 << _REGION) - 1)).astype(np.int64)

    def store(self, each, on):
        size = int(each.how[-1][1:]) // 8
        if not on.any():
            return
        array, place = self.place(self.address(each.target)[on])
        for number, name in enumerate(each.given[0].strip("<>").split(",")):
            x = self.value(name.strip(), "b64")[on]
            for i in range(size):
                array[place + number * size + i] = (x >> np.uint64(8 * i)).astype(np.uint8)

    def compute(self, each, on):
        kind, how, given = each.kind, each.how, each.given
        form = how[-1] if how else "b32"
        targets = [x.strip() for x in each.target.strip("<>").replace("|", ",").split(",")]
        if kind == "ld" and "param" not in each.operation:
            size = int(form[1:]) // 8
            at = self.address(given[0])
            if how[0] == "shared" and len(targets) == 1:
                banks = Counter(word % 32 for word in set((at // 4).tolist()))
                self.conflicts = max(self.conflicts, *banks.values())
            for i, name in enumerate(targets):
                self.registers[name] = self.load(at + np.uint64(i * size), size)
            return
        if kind == "elect":
            self.registers[targets[1]] = LANE == 0
            return
        found = self.found(each, [x.strip("[]") for x in given], form)
        before = self.registers.get(targets[0])
        if found.dtype == np.float32:
            found = found.view(np.uint32)
        if found.dtype != bool:
            wide = form.endswith("64") or "wide" in how
            found = found.astype(np.int64).view(np.uint64)
            found = found if wide else found & _BITS_32
        if not on.all():
            assert before is not None
            found = np.where(on, found, before)
        self.registers[targets[0]] = found

    def found(self, each, given, form):
        """The value of an instruction that stores nothing."""
        kind, how = each.kind, each.how
        if kind == "vote":
            return np.full(LANES, self.value(given[0], "pred").any())
        if form == "pred":
            one, other = (self.value(x, "pred") for x in given)
            return one & other if kind == "and" else one | other
        if kind == "selp":
            return np.where(self.value(given[2], "pred"), *(self.value(x, form) for x in given[:2]))
        if form in _PACKED:
            pairs = (self.value(x, "u32").astype(np.uint32).view(_PACKED[form]) for x in given)
            found = _BINARY[kind](*(x.astype(np.float32) for x in pairs))
            return found.astype(_PACKED[form]).view(np.uint32)
        if kind == "cvt" and "bf16x2" in how:
            high, low = (self.value(x, form).astype(ml_dtypes.bfloat16) for x in given)
            return np.stack([low, high], axis=1).view(np.uint32)[:, 0]
        if kind == "cvt":
            found = self.value(given[0], how[-1])
            return found.astype(np.float32) if "f32" in how else found
        x, *others = (self.value(name, form) for name in given[:3])
        if kind == "setp":
            found = _COMPARED[how[0]](x, others[0])
            if len(how) == 2:
                return found
            further = self.value(given[2], "pred")
            return found & further if how[1] == "and" else found | further
        if kind == "shfl":
            by = others[0]
            source = {"idx": by, "up": LANE - by, "bfly": LANE ^ by}[how[1]]
            return x[np.where(source < 0, LANE, source)]
        if kind == "redux":
            combine = {"add": np.sum, "max": np.max}[how[1]]
            return np.full(LANES, combine(self.value(given[0], "s32")))
        if kind in ("mov", "cvta", "ld"):
            return x
        if kind == "rsqrt":
            return 1 / np.sqrt(x)
        if kind == "lop3":
            rows = [row for row in range(8) if int(given[3], 0) >> row & 1]
            bits = (x, 4), (others[0], 2), (others[1], 1)
            each_row = [[y if row & bit else ~y for y, bit in bits] for row in rows]
            return np.bitwise_or.reduce([np.bitwise_and.reduce(row) for row in each_row])
        if kind == "prmt":
            numbers = [others[1] >> 4 * i & 15 for i in range(4)]
            assert np.all(np.stack(numbers) < 8), "prmt with a sign"
            both = x | others[0] << 32
            return sum((both >> byte * 8 & 255) << 8 * i for i, byte in enumerate(numbers))
        if kind == "mad":
            return x * others[0] + others[1]
        if kind == "shl":
            return np.where(others[0] < 64, x << np.minimum(others[0], 63), 0)
        if kind == "shr":
            return x >> np.minimum(others[0], 31)
        if kind == "bfe":
            return x >> others[0] & (1 << others[1]) - 1
        if kind in ("neg", "not"):
            return -x if kind == "neg" else ~x
        if kind in ("popc", "clz"):
            bits = (x[:, None] >> np.arange(32)) & 1
            if kind == "popc":
                return bits.sum(axis=1)
            return np.where(x > 0, bits[:, ::-1].argmax(axis=1), 32)
        return _BINARY[kind](x, others[0])
