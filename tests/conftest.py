"""What holds for every test: the platform, eight CPU devices, exact matmuls, signatures.

Everything here is set before JAX starts a backend and before our packages are imported.
`LONGCTX_TEST_PLATFORM=cuda` runs on a GPU; then `-m gpu` picks the tests that need one.
`LONGCTX_TEST_SIGNATURES=1` checks every signature of the packages where it is called.
`LONGCTX_TEST_LOOPS=1` runs the tests of either mode, but for modules that are thorough as a whole,
with the loop over layers that GPUs and TPUs have.
"""

import gc
import hashlib
import os
import signal
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLATFORM = os.environ.get("LONGCTX_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = PLATFORM if PLATFORM == "cpu" else f"{PLATFORM},cpu"
# libtpu compiles for TPUs that are not there: it must not ask a cloud's metadata server for them,
# and two test runs may load it at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# XLA's newer CPU emitters set up a compiler of their own for each fusion: two thirds of the time
# that small programs take to compile. Splitting a small program over threads takes another tenth.
# Processes that tests start go without both too.
QUICK = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
# Imports make objects that stay: looking among them for garbage is time lost (see
# `pytest_collection_finish`).
gc.disable()
# Of a shell's background job Ctrl-C is ignored, and so of the processes that tests would start.
signal.signal(signal.SIGINT, signal.default_int_handler)

import beartype
import jax
import jaxtyping
import pytest

from tests import dealing

LOOPS = os.environ.get("LONGCTX_TEST_LOOPS") == "1"
HERE = Path(__file__).parent / "jax_longctx"
# Tests in which engines may loop over layers on the device or on the host.
MODES = [
    *(HERE / folder for folder in ("contract", "engine", "methods")),
    HERE / "evaluation" / "test_agreement.py",
]
# They compare the modes, or compile the loop's programs whatever tests are told.
MODE_KNOWN = [HERE / "engine" / f"test_{it}_compile.py" for it in ("gpu", "tpu")]
MODE_KNOWN += [HERE / "engine" / "test_modes.py", HERE / "engine" / "test_offload.py"]
# Of compiled programs.
MOST_BYTES = 2 * 10**9
LATE = "the time of this run was over"
CHECKED = ["jax_longctx", "pallas_kernels", "checkpoints_convert"]


def compilation_cache() -> Path:
    """The user's folder of the tests' compiled programs, which clones of the repository share.

    JAX's keys do not hold what the processor can do, and code for another one may crash: the
    folder's name does.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else os.uname().machine
    known = ("vendor_id", "cpu family", "model", "flags", "Features")
    lines = {line for line in text.splitlines() if line.startswith(known)} or {text}
    features = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]
    return home / "jax_longctx_tests" / f"{jax.__version__}-{features}"


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Removes what was written first, until the folder holds at most so many bytes."""
    held = [(file.stat(), file) for file in folder.glob("*") if file.is_file()]
    held.sort(key=lambda entry: -entry[0].st_mtime)
    total = 0
    for about, file in held:
        total += about.st_size
        if total > most_bytes:
            file.unlink(missing_ok=True)


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(compilation_cache()))
# The tests' programs are small and many: what counts is how fast they compile. Tests marked
# `optimized` look at what the compiler makes.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def check_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """The runtime type checker of the import hook: beartype, which takes an int for a float.

    Dataclasses of arrays are left out. They are pytrees, and JAX builds them anew with shapes,
    shardings or markers in place of the arrays; where they are used, signatures are checked.
    """
    kinds = list(_parts(*function.__annotations__.values()))
    if function.__name__ == "__init__" and any(
        issubclass(kind, jaxtyping.AbstractArray) for kind in kinds
    ):
        return function
    for kind in kinds:
        # A protocol is checked by the names that it asks for.
        if getattr(kind, "_is_protocol", False):
            typing.runtime_checkable(kind)
    return _BEARTYPE(function)


_BEARTYPE = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def _parts(*annotations: Any) -> Iterator[type]:
    """The types that annotations are made of: `Float[Array, "B"] | None` gives two."""
    for annotation in annotations:
        if isinstance(annotation, type):
            yield annotation
        yield from _parts(*typing.get_args(annotation))


# Checking takes a sixth of the tests' time.
if os.environ.get("LONGCTX_TEST_SIGNATURES") == "1":
    jaxtyping.install_import_hook(CHECKED, f"{__name__}.check_types")


_looping = False


@pytest.fixture(autouse=True, scope="session")
def _looped() -> None:
    """Engines loop over layers on the device where the test that makes them names no mode."""
    if LOOPS:
        from jax_longctx.engine.engine import Engine

        made = Engine.__init__

        def init(self: Any, *args: Any, by_layer: bool | None = None, **options: Any) -> None:
            mode = False if _looping and by_layer is None else by_layer
            made(self, *args, by_layer=mode, **options)

        Engine.__init__ = init


# Before the fixtures, which make engines too.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _looping
    _looping = LOOPS and _of_either_mode(item)
    until = item.config.option.until
    if until is not None and time.time() > until:
        pytest.skip(LATE)


@pytest.fixture
def unchecked_signatures():
    """Signatures as users run them, unchecked: for the library's own words on bad arguments."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles as users do in tests marked `optimized`."""
    marked = request.node.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not marked)
    yield
    left = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    assert left != marked, "a test left the compiler's optimizations changed for those that follow"


@pytest.fixture(autouse=True)
def _same_folder() -> Iterator[None]:
    """The folder of a test that passed is removed: no process can start in it after that."""
    before = os.getcwd()
    yield
    assert os.getcwd() == before, "a test left another working directory to those that follow"


@pytest.fixture(autouse=True, scope="session")
def _known_methods() -> dict[str, Any]:
    from jax_longctx.methods import METHODS

    return dict(METHODS.data)


@pytest.fixture(autouse=True)
def _own_methods(_known_methods: dict[str, Any]) -> Iterator[None]:
    """A paper's suite gives the methods of `research` names; the next test has none of them."""
    from jax_longctx.methods import METHODS

    yield
    METHODS.data = dict(_known_methods)


@pytest.fixture(autouse=True, scope="module")
def _limited_mappings() -> Iterator[None]:
    """Tests that use no engine compile too."""
    from jax_longctx.engine.compiling import limit_mappings

    yield
    limit_mappings()


def pytest_collection_finish() -> None:
    """What was imported is never garbage; what tests make may be.

    Tracing makes many objects that stay: looking among them as often as Python does by default
    takes a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dealing", "which tests a run takes (tests/dealing.py)")
    group.addoption("--since", metavar="REV", help="the tests that the changes since REV touch")
    group.addoption("--third", type=int, choices=range(3), help="a third of the tests that are not")
    group.addoption("--until", type=float, metavar="SECONDS", help="no test begins after that time")


def pytest_configure(config: pytest.Config) -> None:
    # One process tidies, not each worker.
    if not hasattr(config, "workerinput"):
        drop_oldest(compilation_cache(), MOST_BYTES)


# Before pytest leaves out what -m does not name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What marks mean: `gpu` is skipped, with the reason shown, where the run is not on a GPU.

    Of a test marked `quick` the cases whose id holds one of its words are quick, the others slow.
    `long` tests begin first, so that none is left alone at the end.
    """
    skip = pytest.mark.skip(reason="needs a GPU: LONGCTX_TEST_PLATFORM=cuda")
    for item in items:
        if PLATFORM == "cpu" and "gpu" in item.keywords:
            item.add_marker(skip)
        quick = item.get_closest_marker("quick")
        # The case's id; a test with this mark has several.
        if quick and not any(word in item.name.partition("[")[2] for word in quick.args):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    since, third = config.option.since, config.option.third
    touched = dealing.touched_since(since) if since else None
    dealt: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        dealt[_is_taken(item, touched, third)].append(item)
    items[:] = dealt[True]
    if dealt[False]:
        config.hook.pytest_deselected(items=dealt[False])


def _is_taken(item: pytest.Item, touched: dealing.Touched | None, third: int | None) -> bool:
    if touched is not None:
        call = getattr(item, "callspec", None)
        file = item.path.relative_to(Path(__file__).parents[1]).as_posix()
        if touched.holds(file, call.params.values() if call else ()):
            return third is None
    elif third is None:
        return True
    return third is not None and dealing.third_of(item.nodeid) == third


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Names the tests that did not begin before the time was over, by files."""
    skipped = terminalreporter.stats.get("skipped", [])
    late = [it.nodeid.partition("::")[0] for it in skipped if LATE in str(it.longrepr)]
    if late:
        counts = ", ".join(f"{file} ({count})" for file, count in sorted(Counter(late).items()))
        terminalreporter.write_line(f"left for want of time: {len(late)} tests: {counts}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests left for want of time are a failure, except of a third; no touched test is none."""
    options = session.config.option
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if session.exitstatus == 0 and any(LATE in str(it.longrepr) for it in skipped):
        session.exitstatus = 0 if options.third is not None else 1
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 0 if options.since or options.third is not None else 5


def _of_either_mode(item: pytest.Item) -> bool:
    """Whether a test runs in either mode, and does not name its own.

    Tests of a module share engines, so the modules that run without the loop do so as a whole.
    """
    module = item.getparent(pytest.Module)
    if module is not None and module.get_closest_marker("thorough"):
        return False
    call = getattr(item, "callspec", None)
    if call is not None and isinstance(call.params.get("by_layer"), bool):
        return False
    under = [item.path, *item.path.parents]
    return any(place in under for place in MODES) and item.path not in MODE_KNOWN
