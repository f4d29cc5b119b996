"""`muxk submit` and `muxk chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client.options import USAGE, AsJson, Endpoint, die, readable_errors

if TYPE_CHECKING:
    from muxk.client.client import Client, Stream
    from muxk.client.commands import Sampling

MaxTokens = Annotated[
    int | None, typer.Option(help="Stop after this many tokens. Default: the room left in the context.")
]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; higher is more random.")
]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that add up to this share.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]


def submit(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads stdin.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens, whatever the model says.")
    ] = False,
    priority: Annotated[int, typer.Option(help="Lower is sooner, where the policy looks at it.")] = 0,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, not as raw text.")
    ] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Send one prompt to the running server and stream the answer."""
    from muxk.client.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling: Sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": list(stop) if stop else None,
        "ignore_eos": ignore_eos,
        "priority": priority,
    }
    with readable_errors(), Client(endpoint) as client:
        if as_chat:
            stream = client.submit(messages=[{"role": "user", "content": text}], **sampling)
        else:
            stream = client.submit(text, **sampling)
        _finish_as_json(stream) if as_json else _print_stream(stream)


def _finish_as_json(stream: Stream) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(stream.result()).decode())


def _print_stream(stream: Stream) -> None:
    """Text as it comes; Ctrl-C aborts the request and keeps what was printed."""
    try:
        for delta in stream:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.abort()
        for delta in stream:
            typer.echo(delta.text, nl=False)
    typer.echo()


def chat(
    system: Annotated[
        str | None, typer.Option(help="Instructions that come before the conversation.")
    ] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = None,
    endpoint: Endpoint = None,
) -> None:
    """Talk to the model. Ctrl-C stops an answer; /new starts over; /quit or Ctrl-D leaves."""
    from muxk.client.client import Client

    if max_tokens is not None and max_tokens < 1:
        die("--max-tokens must be at least 1", USAGE)
    sampling: Sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    with readable_errors(), Client(endpoint) as client:
        typer.echo(f"{client.server.model} on {client.server.device}, policy {client.server.policy}")
        typer.echo("/new starts over, /quit leaves, Ctrl-C stops an answer")
        _converse(client, system, sampling)


def _converse(client: Client, system: str | None, sampling: Sampling) -> None:
    start = [{"role": "system", "content": system}] if system else []
    turns = list(start)
    while (line := _read_line()) is not None:
        if line == "/new":
            turns = list(start)
        elif line:
            turns.append({"role": "user", "content": line})
            turns = _answer(client, turns, sampling)


def _read_line() -> str | None:
    """One line without white space around it; None at the end of the conversation."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None
    return None if line in ("/quit", "/exit") else line


def _answer(client: Client, turns: list[dict[str, str]], sampling: Sampling) -> list[dict[str, str]]:
    """Print the answer; the conversation with it, or without the question when it was refused."""
    from muxk.client.errors import RequestError

    stream = client.submit(messages=turns, **sampling)
    try:
        _print_stream(stream)
    except RequestError as error:
        if error.code in ("server_gone", "server_silent", "closed"):
            raise
        typer.echo(f"muxk: {error}", err=True)
        return turns[:-1]
    return [*turns, {"role": "assistant", "content": stream.text}]
