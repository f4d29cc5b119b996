"""`muxk run`: the server, or with `--demo` a server and a show of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import USAGE, ProfileFile, Settings, die, parse_settings, readable_errors
from muxk.client.progress import Display, JsonDisplay, say, terminal_display

if TYPE_CHECKING:
    from muxk.actors.system import ServeOptions

INTERRUPTED = 130

AllowRemote = Annotated[
    bool, typer.Option("--allow-remote", help="Let --endpoint be open to other machines; takes --keys too.")
]
Keys = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Let in only clients with a key; `muxk keys DIR` makes them."),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto, cpu, cpu:N for N cores, cuda, cuda:N, or sim:N for a simulated one of N units.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(help="auto is fast and faithful; blocks (as a GGUF has them), fp16, float32 (reference)."),
]
KvTokens = Annotated[
    int | None, typer.Option(min=1, help="Size of the KV cache in tokens. Default: fits the device.")
]
MaxQueue = Annotated[
    int | None, typer.Option(min=1, help="Refuse requests when this many wait. Default: the policy's.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Of requests that bring no seed. Default: another each time.")
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Read the policy's file again when it changes; a bad one changes nothing."),
]
Shadow = Annotated[
    str | None,
    typer.Option(metavar="POLICY", help="Ask this policy too, count where it differs, and never act on it."),
]
Record = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append decisions to a file, for `muxk explain --record FILE`."),
]
RecordMax = Annotated[
    str, typer.Option(metavar="SIZE", help="The file of --record grows to this size; then recording stops.")
]


def run(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="A policy file, or the name of a shipped one: muxwise.")
    ],
    demo: Annotated[
        bool, typer.Option("--demo", help="Start a server, show chats and long prompts on it, and end.")
    ] = False,
    device: DeviceName = "auto",
    model: Annotated[
        str, typer.Option(help="A model's name, a folder with safetensors, or a GGUF file.")
    ] = "smollm2-135m-instruct",
    dtype: Dtype = "auto",
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Listen here, e.g. tcp://127.0.0.1:5555. Default: a socket that only you can open.",
        ),
    ] = None,
    allow_remote: AllowRemote = False,
    keys: Keys = None,
    settings: Settings = None,
    kv_tokens: KvTokens = None,
    max_queue: MaxQueue = None,
    profile: ProfileFile = None,
    watch: Watch = False,
    shadow: Shadow = None,
    record: Record = None,
    record_max: RecordMax = "256MiB",
    seed: Seed = None,
    demo_seconds: Annotated[float, typer.Option(min=5.0, help="How long the demo shows requests.")] = 35.0,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Serve a model under a policy until stopped.

    The first Ctrl-C finishes the requests that were accepted, the second stops at once. SIGHUP reads the
    policy's file again.
    """
    values = parse_settings(settings)
    if demo:
        _refuse_with_demo({"--watch": watch, "--shadow": shadow, "--record": record, "--profile": profile})
        _demo(demo_seconds, policy, values, device, model, dtype, endpoint, kv_tokens, max_queue)
        return
    from muxk.actors.system import ServeOptions

    options = ServeOptions(
        policy=policy,
        settings=values,
        device=device,
        model=model,
        dtype=dtype,
        endpoint=endpoint,
        allow_remote=allow_remote,
        keys=keys,
        kv_tokens=kv_tokens,
        max_queue=max_queue,
        profile=profile,
        watch=watch,
        shadow=shadow,
        record=record,
        record_bytes_max=_size(record_max),
        seed=seed if seed is not None else int.from_bytes(os.urandom(8), "little"),
    )
    if supervised:
        _stop_when_stdin_closes()
    _serve(options, supervised)


def _refuse_with_demo(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value:
            die(f"{name} is for a server that stays, not for --demo", USAGE)


def _size(text: str) -> int:
    """`256MiB` in bytes."""
    from muxk.policies.units import Type, UnitError, parse_quantity

    try:
        quantity = parse_quantity(text)
    except UnitError as error:
        die(f"--record-max {text}: {error}", USAGE)
    if quantity.type is not Type.SIZE or quantity.value < 1:
        die(f"--record-max {text}: a size is expected, such as 256MiB", USAGE)
    return round(quantity.value)


def _serve(options: ServeOptions, supervised: bool) -> None:
    from muxk.actors.system import StartupError, serve

    display: Display = JsonDisplay() if supervised else terminal_display()
    shown: list[str] = []

    def ready(endpoint: str) -> None:
        if not shown:
            shown.append(endpoint)
            display.__exit__(None, None, None)
            say(ready=endpoint) if supervised else _greet(options, endpoint)

    try:
        display.__enter__()
        reason = serve(options, display.progress, ready, _notice)
    except StartupError as error:
        _leave(display, shown, str(error), USAGE)
    except KeyboardInterrupt:
        _leave(display, shown, "stopped", INTERRUPTED)
    if not shown:
        display.__exit__(None, None, None)
    if not supervised:
        typer.echo(f"stopped: {reason}", err=True)
    if "crashed" in reason or not shown:
        die(f"the server ended: {reason}")


def _notice(text: str) -> None:
    """What became of a policy file that was read again, or which device `auto` chose."""
    typer.echo(text, err=True)


def _leave(display: Display, shown: list[str], text: str, code: int) -> None:
    if not shown:
        display.__exit__(RuntimeError, None, None)
    die(text, code)


def _greet(options: ServeOptions, endpoint: str) -> None:
    """What a newcomer does next."""
    where = "" if options.endpoint is None else f" --endpoint {endpoint}"
    model = "a simulated model" if options.device.startswith("sim") else options.model
    typer.echo(
        f"serving {model} under {options.policy} on {endpoint}\n"
        f'  muxk submit{where} "Once upon a time"\n'
        f"  muxk chat{where}\n"
        f"  muxk state{where}\n"
        f"  muxk policy swap{where} inflight\n"
        "Ctrl-C finishes the requests that run, and stops; twice stops at once."
    )
    if _single_unit(options.device):
        typer.echo("one unit only: prefill and decode take turns on it, a few layers and a step at a time")


def _single_unit(device: str) -> bool:
    """The device can not be split between the phases."""
    from muxk.kernel.devices.cpu import available_cores

    kind, _, count = device.partition(":")
    if kind == "cuda":
        return False
    return count == "1" or (kind != "sim" and not count and len(available_cores()) == 1)


def _stop_when_stdin_closes() -> None:
    """A child must not outlive its parent: closing the pipe asks it to stop, twice means at once."""

    stdin = sys.stdin.fileno()

    def watch() -> None:
        while os.read(stdin, 4096):  # not sys.stdin: its lock, held here, would abort the interpreter's exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _demo(
    seconds: float,
    policy: str,
    settings: dict[str, str],
    device: str,
    model: str,
    dtype: str,
    endpoint: str | None,
    kv_tokens: int | None,
    max_queue: int | None,
) -> None:
    from muxk.client.demo import run_demo
    from muxk.client.server_process import ServerProcess

    with (
        readable_errors(),
        ServerProcess(
            policy,
            settings=settings,
            device=device,
            model=model,
            dtype=dtype,
            endpoint=endpoint,
            kv_tokens=kv_tokens,
            max_queue=max_queue,
        ) as server,
    ):
        try:
            run_demo(server, seconds)
        except KeyboardInterrupt:
            die("stopped", INTERRUPTED)
