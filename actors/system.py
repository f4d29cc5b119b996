"""The composition root: which actors there are, what each is given, and how a server is run.

A new actor is one line in `build_specs`. Everything else about a run (clock, inboxes, threads) is the
runtime's; the same specs run in real and in virtual time.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from muxk.actors.backends import Backend, StartupError, device_for, open_backend
from muxk.actors.endpoints import check_endpoint, load_server_keys
from muxk.actors.engine import Engine
from muxk.actors.gateway import Gateway
from muxk.actors.gateway_policy import Notice
from muxk.actors.gateway_state import GatewayOptions, PolicyInForce
from muxk.actors.policy_compiler import Compile, versions
from muxk.actors.policy_files import OpenedPolicy, open_with_text
from muxk.actors.policy_watch import PolicyFile, watch
from muxk.actors.profiling import profiled
from muxk.actors.rundir import (
    EndpointClaims,
    RunDirectoryError,
    admin_endpoint,
    default_endpoint,
    run_directory,
)
from muxk.actors.tokenizer import TokenizerActor
from muxk.kernel.actor import ActorSpec
from muxk.kernel.device import DevicePort
from muxk.kernel.ingress import CanNotListen, Ingress
from muxk.kernel.policy import Policy, PolicyBook, PolicyText
from muxk.kernel.realtime import RealtimeRuntime
from muxk.kernel.record_frames import NotARecording
from muxk.kernel.recording import RECORD_BYTES_MAX, Recorder, keep_writing
from muxk.kernel.shadow import ShadowTally
from muxk.kernel.trace import Trace
from muxk.policies.engine import compile_policy
from muxk.policies.problems import PolicyError
from muxk.profiles.profile_file import ProfileError

__all__ = ["ServeOptions", "StartupError", "build_specs", "default_endpoint", "serve"]

DESCRIPTORS = 65_536
"""Files and connections that a server may have open, where the system allows it."""

Progress = Callable[[str, float], None]
"""(what is being done, share done from 0 to 1)."""


@dataclass(frozen=True)
class ServeOptions:
    """What `muxk run` is told."""

    policy: str
    """A path, or the name of a policy that ships or is installed."""
    settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    """`auto`, `cpu`, `cpu:N` for N cores, `cuda` or `cuda:N` for a card, `sim` or `sim:N` for a simulated
    device of N units."""
    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    endpoint: str | None = None
    allow_remote: bool = False
    """The endpoint may be open to other machines; takes `keys`."""
    keys: Path | None = None
    """A folder that `muxk keys` made: clients of a tcp endpoint need a key that it holds."""
    kv_tokens: int | None = None
    max_queue: int | None = None
    """Requests that may wait for prefill, if fewer than the policy's limit."""
    run_directory: Path | None = None
    seed: int = 0
    """What the seeds of requests that bring none are drawn from; `muxk run` takes it from the system."""
    profile: Path | None = None
    """A file of `muxk profile`, in place of the measurement at start."""
    watch: bool = False
    """Read the policy's file again when it changes."""
    shadow: str | None = None
    """A policy that is asked too and never acts: a path, or a name."""
    record: Path | None = None
    """A file to which decisions are appended."""
    record_bytes_max: int = RECORD_BYTES_MAX


def build_specs(
    backend: Backend,
    policy: Policy,
    *,
    seed: int,
    on_ready: Callable[[], None] = lambda: None,
    calibrate: bool = True,
    max_queue: int | None = None,
    compile_swapped: Compile = compile_policy,
    book: PolicyBook | None = None,
    text: PolicyText | None = None,
    notice: Notice = lambda text: None,
) -> list[ActorSpec]:
    """The actors of one server, in the order in which they start.

    Args:
        compile_swapped: compiles the policies that replace the first one.
        book: an empty one, with the journal that is to be used.
        text: what the policy was compiled from; its settings hold for files that are read again.
        notice: is told of policy files that were read again.
    """
    book = book or PolicyBook()
    sha = book.add(policy, text)
    options = GatewayOptions(
        model=backend.model,
        device=backend.name,
        policy=PolicyInForce(policy.name, sha, *versions(policy, text), source=text.filename if text else ""),
        settings=text.settings if text else {},
        vocabulary_size=backend.tokenizer.vocabulary_size,
        context_tokens=backend.group_context_tokens,
        seed=seed,
        devices=1 if backend.cluster is None else len(backend.cluster.devices),
    )
    engine = Engine(backend, book, sha, calibrate, max_queue)
    groups = engine.groups
    first = groups[0]
    gateway = partial(Gateway, first, options, book, compile_swapped, on_ready, notice, groups)
    return [
        ActorSpec("gateway", gateway, Gateway, permanent=True),
        ActorSpec("tokenizer", partial(TokenizerActor, first, backend.tokenizer), TokenizerActor),
        *engine.specs(),
    ]


def start_devices(backend: Backend, port_of: Callable[[str], DevicePort]) -> None:
    """Make lanes and threads; completions go to the arbiter of each device, and to migration."""
    cluster = backend.cluster
    if cluster is None:
        backend.device.start(port_of("arbiter"))
        return
    for group, device in enumerate(cluster.devices):
        device.start(port_of(f"arbiter@{group}"))
    cluster.link.start(port_of("migration"))


def serve(
    options: ServeOptions,
    progress: Progress,
    ready: Callable[[str], None],
    notice: Notice = lambda text: None,
) -> str:
    """Serve until stopped, and return the reason.

    `ready(endpoint)` is called once, when the first tables of the estimator are out. The first SIGINT or
    SIGTERM drains: what is accepted is finished. The second stops. SIGHUP reads the policy's file again.
    `notice` is told of policy files that were read again, and of the device that `auto` chose.

    Raises:
        StartupError: with a message for the user.
    """
    _allow_many_connections()
    book, opened = _open_policies(options)
    device = device_for(options.device, opened.policy.name, opened.policy.devices_min)
    directory = options.run_directory or run_directory()
    endpoint = options.endpoint or default_endpoint(directory)
    check_endpoint(endpoint, allow_remote=options.allow_remote, has_keys=options.keys is not None)
    with ExitStack() as stack:
        try:
            claims = stack.enter_context(EndpointClaims(directory))
            ingress = new_ingress(options, endpoint, directory, claims)
            recorder = _open_recorder(options, book)
        except (RunDirectoryError, NotARecording, OSError) as error:
            raise StartupError(str(error)) from error
        if recorder is not None:
            stack.callback(recorder.close)
        backend = open_backend(device, options.model, options.dtype, options.kv_tokens, progress, notice)
        stack.callback(backend.close)
        if options.profile is not None:
            backend = _with_profile(backend, options.profile)
        serving = Serving(options, opened, book, recorder, progress, ready, notice)
        return anyio.run(serving.run, backend, ingress, directory)


def _with_profile(backend: Backend, path: Path) -> Backend:
    """Raises StartupError: the profile is not of this device and model."""
    try:
        return replace(backend, profile=profiled(backend, path))
    except ProfileError as error:
        raise StartupError(f"--profile: {error}") from error


def new_ingress(options: ServeOptions, endpoint: str, directory: Path, claims: EndpointClaims) -> Ingress:
    """Not open yet. An ipc endpoint is claimed now, before a model is loaded; a port once it is known."""
    if endpoint.startswith("ipc://"):
        claims.claim(endpoint)

    def admin(bound: str) -> str:
        try:
            if not bound.startswith("ipc://"):
                claims.claim(bound)
        except RunDirectoryError as error:
            raise CanNotListen(str(error)) from error
        return admin_endpoint(bound, directory)

    curve = load_server_keys(options.keys) if endpoint.startswith("tcp://") else None
    return Ingress(endpoint, admin=admin, curve=curve)


def _allow_many_connections() -> None:
    """A client is a descriptor: use more than the usual 1,024, as far as the system lets this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if allowed > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _open_policies(options: ServeOptions) -> tuple[PolicyBook, OpenedPolicy]:
    """The policy to begin with, and a book that knows the shadow, if there is one."""
    book = PolicyBook()
    try:
        opened = open_with_text(options.policy, options.settings)
        if options.shadow is not None:
            shadow = open_with_text(options.shadow, {})
            book.shadow = ShadowTally(shadow.policy, shadow.text)
    except PolicyError as error:
        raise StartupError(str(error)) from error
    if options.watch and opened.path is None:
        raise StartupError(f"--watch needs the file of a policy, and {options.policy} is a name")
    return book, opened


def _open_recorder(options: ServeOptions, book: PolicyBook) -> Recorder | None:
    if options.record is None:
        return None
    recorder = Recorder(options.record, book, installed_version(), options.record_bytes_max)
    book.journal.sink = recorder
    return recorder


def installed_version() -> str:
    """Version of muxk, for recordings."""
    try:
        return metadata.version("muxk")
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Serving:
    """A server that is about to run."""

    options: ServeOptions
    opened: OpenedPolicy
    book: PolicyBook
    recorder: Recorder | None
    progress: Progress
    ready: Callable[[str], None]
    notice: Notice

    async def run(self, backend: Backend, ingress: Ingress, directory: Path) -> str:
        """Until somebody stops it; the reason. Raises StartupError."""
        specs = build_specs(
            backend,
            self.opened.policy,
            seed=self.options.seed,
            on_ready=lambda: self.ready(ingress.endpoint),
            max_queue=self.options.max_queue,
            book=self.book,
            text=self.opened.text,
            notice=self.notice,
        )
        runtime = RealtimeRuntime(specs, trace=Trace(), ingress=ingress, report_directory=directory)
        start_devices(backend, runtime.port)
        self.progress("measuring decode steps and prefill layers", 0.0)
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            self._start_beside(tasks, runtime, stop)
            try:
                return await runtime.run()
            except CanNotListen as error:
                refusal = StartupError(str(error))
            finally:
                stop.set()
                tasks.cancel_scope.cancel()
        raise refusal

    def _start_beside(self, tasks: TaskGroup, runtime: RealtimeRuntime, stop: anyio.Event) -> None:
        """What waits for other things than messages: signals, the policy's file, the disk."""
        file = None
        if self.opened.path is not None:
            file = PolicyFile(self.opened.path, self.opened.text.source, runtime.port("gateway").post)
        tasks.start_soon(_watch_signals, runtime, file)
        if file is not None and self.options.watch:
            tasks.start_soon(watch, file, stop)
        if self.recorder is not None:
            tasks.start_soon(keep_writing, self.recorder)


async def _watch_signals(runtime: RealtimeRuntime, file: PolicyFile | None) -> None:
    """The first signal drains, the second stops; SIGHUP reads the policy's file again, where there is one."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        seen = 0
        async for received in signals:
            if received == signal.SIGHUP and file is not None:
                await file.reload()
                continue
            seen += 1
            if seen == 1:
                runtime.request_drain()
            else:
                runtime.request_stop("stopped by a second signal")
