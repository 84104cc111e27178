"""`jax-longctx serve`: one model behind OpenAI's HTTP interface."""

import contextlib
import dataclasses
import functools
import hashlib
import ipaddress
import logging
import math
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jax_longctx.cli import options, process
from jax_longctx.cli.options import option
from jax_longctx.cli.terminal import Terminal, check_folder
from jax_longctx.errors import InputError
from jax_longctx.files import decoded, file_errors, read_bytes
from jax_longctx.memory import shown_bytes
from jax_longctx.replicas import cluster, devices_of

if TYPE_CHECKING:
    from jax_longctx.api import LongContext
    from jax_longctx.serving.doors import Access
    from jax_longctx.serving.server import LongServer, ServeOptions

# API keys, separated by commas or white space.
KEYS = "JAX_LONGCTX_API_KEYS"
MIB = 2**20
# Options of `Limits` that the server takes as they are.
SAME = ("rows", "queue", "ttl", "max_ttl", "max_contexts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listening:
    """Where the server listens, and who may ask."""

    PANEL = "Access"

    host: str = option(
        "Address to listen on. The default takes connections of this machine alone.",
        default="127.0.0.1",
    )
    port: int = option("Port to listen on; 0 takes a free one.", default=8000)
    name: str | None = option(
        "Name of the model for clients; the checkpoint's folder unless given.",
        metavar="NAME",
    )
    api_key_file: Path | None = option(
        f"File with the API keys, one a line; {KEYS} gives them too. Without keys everyone on this "
        "machine may ask.",
        metavar="FILE",
    )
    no_key: bool = option(
        "Let everyone who reaches --host ask, without a key, and by any name.",
        "--no-key",
        default=False,
    )
    allow_origin: list[str] | None = option(
        "Let pages of this origin ask from a browser, as https://example.org; * for all. May be "
        "repeated.",
        metavar="ORIGIN",
    )
    beside: list[str] | None = option(
        "Another server, as http://127.0.0.1:8001, whose answers the page at / may show beside "
        "this one's: another method over the same text. It needs --allow-origin with this "
        "server's address. May be repeated.",
        metavar="URL",
    )
    files_under: Path | None = option(
        "Let requests name files in this folder as texts. Links that leave the folder are refused. "
        "No file is read without this option.",
        metavar="DIR",
        exists=True,
        file_okay=False,
    )
    max_body: int = option(
        "Largest request in MiB; those that are received at a time may take four times as much.",
        default=64,
    )
    timeout: float = option(
        "Most seconds of a request, its body's arrival included.", default=600.0
    )
    grace: float = option("Seconds that answers have to finish after SIGTERM.", default=30.0)
    sampling_defaults: Literal["model", "openai"] = option(
        "Temperature, top_p, top_k, min_p and repetition_penalty where a request gives none: the "
        "model's own, of its generation_config.json, or OpenAI's (temperature 1).",
        default="model",
    )
    no_request_log: bool = option(
        "Write no line about each request to stderr.", "--no-request-log", default=False
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InputError(f"--port must be from 0 to 65535, got {self.port}")
        if self.max_body < 1:
            raise InputError(f"--max-body must be at least 1 MiB, got {self.max_body}")
        for name in ("timeout", "grace"):
            if not getattr(self, name) > 0:
                raise InputError(f"--{name} must be above 0 seconds, got {getattr(self, name)}")
        for url in self.beside or ():
            # A space or `;` would end its place in the page's policy.
            if not re.fullmatch(r"https?://[\w.:\[\]-]+/?", url, re.ASCII):
                raise InputError(f"--beside {url!r:.200} is no address as http://127.0.0.1:8001")

    @property
    def loopback(self) -> bool:
        """Whether this machine alone can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def digests(self) -> list[bytes]:
        """SHA-256 of each API key.

        Raises:
          InputError: the file cannot be read, or has no key.
        """
        keys = os.environ.get(KEYS, "").replace(",", " ").split()
        if self.api_key_file is not None:
            named = f"--api-key-file {self.api_key_file}"
            with file_errors(f"{named} cannot be read"):
                lines = decoded(read_bytes(self.api_key_file), named).splitlines()
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise InputError(f"{named} has no key; write one a line")
            keys += found
        return [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is answered at a time, and which texts are kept."""

    PANEL = "Rows and contexts"

    rows: int = option("Most answers that are decoded together.", default=8)
    queue: int = option("Most requests that wait beside them; others get 429.", default=64)
    length: int | None = option(
        "Most tokens of text, question and answer together; the length that the model was trained "
        "to unless given.",
        metavar="TOKENS",
    )
    share_from: int = option(
        "Answers about a text of at least TOKENS tokens share it in memory, under methods that "
        "can (full, dynamic-ntk, ring, star, quest, arkvale). Every row has memory for a shorter "
        "one, under other methods for --length.",
        metavar="TOKENS",
        default=8192,
    )
    max_tokens: int | None = option(
        "Longest answer in tokens; also of a chat request that names no number. 1,024 unless "
        "given, or half of --length where that is less.",
        metavar="TOKENS",
    )
    max_question: int | None = option(
        "Longest question about a context, in tokens. 1,024 unless given, or half of --length "
        "where that is less.",
        metavar="TOKENS",
    )
    contexts: Path | None = option(
        "Folder for contexts that are saved. They are found again after a restart. A temporary "
        "one unless given. Several processes need one that all of them see.",
        metavar="DIR",
    )
    context_memory: float | None = option(
        "GiB on each device for texts that stay read; half of what is free unless given. The "
        "least recently used ones are saved to the disk.",
        metavar="GIB",
    )
    ttl: float = option(
        "Seconds that a context lives after its last use, where its request does not say.",
        default=3600.0,
    )
    max_ttl: float = option("Most seconds that a request may say.", default=7 * 86400.0)
    max_contexts: int = option("Most contexts at a time; others get 429.", default=1024)
    ready_for: int | None = option(
        "Compile the programs of texts of up to TOKENS tokens, and of the longest, before "
        "requests are taken; 0 compiles none. The first text of another size compiles its own, and "
        "answers pause. --share-from on GPUs and TPUs, 0 on a CPU and in several processes unless "
        "given.",
        metavar="TOKENS",
        min=0,
    )

    def __post_init__(self) -> None:
        for name in ("rows", "share_from", "max_tokens", "max_question", "max_contexts", "queue"):
            value, least = getattr(self, name), int(name != "queue")
            if value is not None and value < least:
                raise InputError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {value}"
                )
        for name, unit in (("ttl", "seconds"), ("context_memory", "GiB")):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"--{name.replace('_', '-')} must be above 0 {unit}, got {value}")
        if self.ttl > self.max_ttl:
            raise InputError(f"--ttl is {self.ttl:g} s, above --max-ttl, {self.max_ttl:g} s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicas(options.ReplicaChoice):
    """How many servers answer behind one address, with Ray Serve."""

    max_replicas: int | None = option(
        "Start up to N while there are more than --rows requests for each, and end them later.",
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas is not None and self.max_replicas < (self.replicas or math.inf):
            raise InputError(f"--max-replicas {self.max_replicas} needs --replicas of at most that")


@options.command
def serve(
    *,
    model: options.ModelChoice,
    method: options.MethodChoice,
    listening: Listening,
    limits: Limits,
    replicas: Replicas,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients ask it.

    Routes are /v1/chat/completions, /v1/completions and /v1/models; /v1/contexts for texts that
    are read once and asked many times; /health, /ready and /metrics. SIGTERM and Ctrl-C let the
    answers that have begun finish. Needs the extra [bold]serve[/bold]: pip install
    'jax-longctx\\[serve]'.

    [bold]Examples[/bold]

        jax-longctx serve -c smollm2

        jax-longctx serve -c llama3 -m snapkv --rows 16 --length 65536 --port 8080

        jax-longctx serve -c llama3 --replicas 2 --contexts contexts
    """
    terminal = Terminal()
    keys = listening.digests()
    check_folder(limits.contexts, "--contexts")
    with terminal.starting(extra="serve"):
        from jax_longctx.serving import server
    if not (keys or listening.loopback or listening.no_key):
        raise InputError(
            f"everyone who reaches {listening.host} could ask; give --api-key-file, or --no-key to "
            f"allow it"
        )
    asked = _Asked(model, method, listening, limits, keys)
    if replicas.replicas is not None:
        _serve_replicas(terminal, replicas, asked)
        return
    if limits.contexts is None and process.number() is not None:
        raise InputError(
            "a server of several processes needs --contexts DIR, a folder that all of them see"
        )

    def sizes(loaded: "LongContext") -> dict[str, Any]:
        whole = limits.length or loaded.config.trained_length
        return {"context": whole, "batch": limits.rows, "divide": {"data": 1}}

    loaded = model.open(terminal, method, check=asked.options, sizes=sizes)
    temporary = None
    if limits.contexts is None and process.is_leader():
        temporary = Path(tempfile.mkdtemp(prefix="jax-longctx-contexts-"))
    try:
        given = asked.options(loaded, temporary)
        if process.is_leader():
            _lead(terminal, loaded, given, listening, temporary)
        else:
            # The leader hears the signals, and dismisses the others.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            server.make_executor(loaded, given).follow()
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What the command was given; a replica gets it whole."""

    model: options.ModelChoice
    method: options.MethodChoice
    listening: Listening
    limits: Limits
    keys: list[bytes]

    @property
    def name(self) -> str:
        """Of the model, for clients."""
        return self.listening.name or self.model.checkpoint.resolve().name

    def options(
        self, loaded: "LongContext", temporary: Path | None = None, **more: Any
    ) -> "ServeOptions":
        """The server's options; of a folder for contexts that is `temporary`, and `more`."""
        from jax_longctx.serving.prompts import Lengths
        from jax_longctx.serving.schema import Sampled
        from jax_longctx.serving.server import ServeOptions

        limits = self.limits
        memory, ready_for = limits.context_memory, limits.ready_for
        whole = limits.length or loaded.config.trained_length
        most = min(1024, max(1, whole // 2))
        if ready_for is None:
            ready_for = limits.share_from if loaded.compiles_ahead else 0
        elif ready_for and process.number() is not None:
            raise InputError("--ready-for is for a server of one process; leave it out")
        own = self.listening.sampling_defaults == "model"
        return ServeOptions(
            name=self.name,
            contexts=limits.contexts or temporary or Path(os.devnull),
            lengths=Lengths(
                whole=whole,
                question=limits.max_question or most,
                answer=limits.max_tokens or most,
                share_from=limits.share_from,
            ),
            access=self.access,
            sampled=Sampled.of_model(loaded.tokenizer.generation if own else {}),
            context_bytes=None if memory is None else max(1, int(memory * 2**30)),
            grace=self.listening.grace,
            ready_for=ready_for,
            **{name: getattr(limits, name) for name in SAME},
            **more,
        )

    @property
    def access(self) -> "Access":
        """Who may ask, and how much."""
        from jax_longctx.serving.doors import Access

        listening = self.listening
        return Access(
            keys=self.keys,
            hosts=None if listening.no_key else [listening.host.lower()],
            origins=[origin.lower().rstrip("/") for origin in listening.allow_origin or ()],
            beside=[url.rstrip("/") for url in listening.beside or ()],
            files_under=listening.files_under,
            body=listening.max_body * MIB,
            bodies=4 * listening.max_body * MIB,
            seconds=listening.timeout,
        )

    def replica(self) -> "LongServer":
        """The server of a replica, in its process."""
        from jax_longctx.serving.server import LongServer

        loaded = self.model.open(Terminal(), self.method, check=self.options)
        given = self.options(loaded, common=True)
        return LongServer(loaded, given, crashed=functools.partial(_crashed, None))


def _lead(
    terminal: Terminal,
    loaded: "LongContext",
    given: "ServeOptions",
    listening: Listening,
    temporary: Path | None,
) -> None:
    from jax_longctx.serving.server import LongServer, listen

    logged = contextlib.nullcontext() if listening.no_request_log else _request_log()
    # Before the caches are made: an address in use is found at once.
    with listen(listening.host, listening.port) as bound, logged:
        port = bound.getsockname()[1]
        warning = loaded.length_warning(given.lengths.whole)
        if warning is not None:
            terminal.note(f"warning: {warning}")
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        with contextlib.ExitStack() as shown:
            told: dict[str, Any] = {}
            if given.ready_for:
                told["compiling"] = shown.enter_context(terminal.progress("compiling", "programs"))
            crashed = functools.partial(_crashed, temporary)
            served = LongServer(loaded, given, crashed=crashed, **told)

            def ready() -> None:
                shown.close()
                said = given.sampled.model_dump(exclude_defaults=True)
                if said:
                    values = ", ".join(f"{name} {value:g}" for name, value in said.items())
                    terminal.note(f"sampling, of the model's generation_config.json: {values}")
                terminal.note(
                    f"serving {given.name} on http://{host}:{port}/v1, for people on "
                    f"http://{host}:{port} ({given.rows} rows of "
                    f"{given.lengths.whole:,} tokens, {shown_bytes(served.scheduler.budget)} for "
                    f"contexts); Ctrl-C ends it"
                )

            ended = served.run(bound, on_ready=ready)
    if ended == signal.SIGINT:
        raise KeyboardInterrupt


def _serve_replicas(terminal: Terminal, replicas: Replicas, asked: _Asked) -> None:
    """Serves by replicas until SIGTERM or Ctrl-C; answers that have begun finish."""
    model, listening, limits = asked.model, asked.listening, asked.limits
    replicas.check(model)
    if limits.contexts is None:
        raise InputError("--replicas needs --contexts DIR, a folder that all see")
    limits = dataclasses.replace(limits, contexts=limits.contexts.absolute())
    model = dataclasses.replace(model, checkpoint=model.checkpoint.absolute())
    asked = dataclasses.replace(asked, model=model, limits=limits)
    least, everywhere = replicas.replicas or 0, replicas.address is not None
    most = replicas.max_replicas or least
    with contextlib.ExitStack() as held:
        ray = held.enter_context(cluster(replicas.address, most))
        from jax_longctx.serving.replicas import running
        from jax_longctx.serving.server import listen

        host, port = listening.host, listening.port
        if not everywhere:
            # An address in use is found at once.
            with listen(host, port) as bound:
                port = bound.getsockname()[1]
        scaled = {"min_replicas": least, "max_replicas": most}
        engines = {
            "autoscaling_config": {**scaled, "target_ongoing_requests": limits.rows},
            "max_ongoing_requests": limits.rows + limits.queue,
            "max_queued_requests": limits.queue,
            "graceful_shutdown_timeout_s": listening.grace,
            "ray_actor_options": devices_of(ray, model.run.mesh),
        }
        where: dict[str, Any] = {"proxy_location": "EveryNode" if everywhere else "HeadOnly"}
        where["http_options"] = {"host": host, "port": port}
        with terminal.waiting(f"starting {least} replicas"):
            held.enter_context(running(asked.replica, asked.access, engines, **where))
        terminal.note(
            f"serving {asked.name} on http://{host}:{port}/v1, by {least} replicas; Ctrl-C ends it"
        )
        heard = list[int]()
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        # Ctrl-C too lets answers finish.
        with process.catching() as caught, held.pop_all():
            while not heard and caught.pressed is None:
                time.sleep(0.1)
    if caught.pressed is not None:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _request_log() -> Iterator[None]:
    """Within it each request is a line of stderr."""
    from jax_longctx.serving import metrics

    lines = logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    metrics.log.addHandler(lines)
    metrics.log.setLevel(logging.INFO)
    # Libraries give the root a handler, which would write each line again.
    metrics.log.propagate = False
    try:
        yield
    finally:
        metrics.log.removeHandler(lines)
        metrics.log.propagate = True


def _crashed(temporary: Path | None, error: BaseException) -> None:
    """Ends the process: without the thread that owns the engine every request would hang.

    Nothing is unwound, so the temporary folder of contexts is removed here.
    """
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    lost = process.lost_process(error)
    if lost is None:
        traceback.print_exception(error)
    shown: Any = lost or f"the scheduler failed: {type(error).__name__}: {error}"
    process.leave(process.FAULT, f"error: {' '.join(str(shown).split()):.500}")
