"""`muxk submit` and `muxk chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from muxk.client import submit_options as options
from muxk.client.options import USAGE, AsJson, Endpoint, die, readable_errors

if TYPE_CHECKING:
    from muxk.client.client import Client, Stream
    from muxk.client.commands import Sampling
    from muxk.client.completion import Choice, Delta, Logprob, TopLogprob

Shown = Callable[["Delta | Choice"], str]
"""How output is printed."""


def submit(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads stdin.")],
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    n: options.Choices = 1,
    stop: options.Stop = None,
    stop_token_ids: options.StopToken = None,
    include_stop_str_in_output: options.IncludeStop = False,
    min_tokens: options.MinTokens = 0,
    ignore_eos: options.IgnoreEos = False,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    logit_bias: options.LogitBias = None,
    logprobs: options.Logprobs = None,
    prompt_logprobs: options.PromptLogprobs = None,
    echo: options.Echo = False,
    truncate_prompt_tokens: options.Truncate = None,
    keep_special_tokens: options.KeepSpecial = False,
    detokenize: options.Detokenize = True,
    priority: options.Priority = 0,
    deadline: options.Deadline = None,
    request_class: options.RequestClass = "",
    as_chat: options.AsChat = False,
    as_token_ids: options.AsTokenIds = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Send one prompt to the running server and stream the answer."""
    from muxk.client.client import Client

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = options.sampling_of(context.params)
    token_ids = options.token_ids_of(text) if as_token_ids else None
    with readable_errors(), Client(endpoint) as client:
        if as_chat:
            stream = client.submit(messages=[{"role": "user", "content": text}], **sampling)
        elif token_ids is not None:
            stream = client.submit(token_ids=token_ids, **sampling)
        else:
            stream = client.submit(text, **sampling)
        if as_json:
            _finish_as_json(stream)
        else:
            _show(stream, _text_of if detokenize else _ids_of, wait=n > 1)


def _finish_as_json(stream: Stream) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(stream.result()).decode())


def _text_of(output: Delta | Choice) -> str:
    return output.text


def _ids_of(output: Delta | Choice) -> str:
    """Token ids, with a space behind each."""
    return "".join(f"{token_id} " for token_id in output.token_ids)


def _show(stream: Stream, shown_of: Shown, wait: bool) -> None:
    """The answer as it comes, or all answers at the end; then what else there is to say."""
    if not wait:
        _print_stream(stream, shown_of)
    result = stream.result()
    if wait:
        shown = "" if result.prompt is None else result.prompt.text
        for choice in result.choices:
            typer.echo(f"--- choice {choice.index} ({choice.finish_reason})\n{shown}{shown_of(choice)}")
    if result.prompt is not None:
        _print_logprobs("prompt", result.prompt.logprobs)
    for choice in result.choices:
        _print_logprobs(f"choice {choice.index}", choice.logprobs)
    for note in result.notes:
        typer.echo(f"muxk: note: {note}", err=True)


def _print_logprobs(title: str, entries: Sequence[Logprob]) -> None:
    """A line for each token: its log-probability, its rank, and the likeliest ones."""
    if entries:
        typer.echo(f"--- log-probabilities, {title}")
    for entry in entries:
        top = "  ".join(f"{_token_of(other)} {other.logprob:.3f}" for other in entry.top)
        typer.echo(f"{_token_of(entry):<16} {entry.logprob:9.3f}  rank {entry.rank:<6} {top}")


def _token_of(entry: Logprob | TopLogprob) -> str:
    """Its text, or its id where that is all there is."""
    return repr(entry.token) if entry.bytes else str(entry.token_id)


def _print_stream(stream: Stream, shown_of: Shown = _text_of) -> None:
    """Output as it comes, with the prompt first; Ctrl-C aborts the request and keeps what was printed."""
    try:
        _print_prompt(stream, next(stream, None), shown_of)
        for delta in stream:
            typer.echo(shown_of(delta), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.abort()
        for delta in stream:
            typer.echo(shown_of(delta), nl=False)
    typer.echo()


def _print_prompt(stream: Stream, first: Delta | None, shown_of: Shown) -> None:
    """The prompt, which is there once the first output is, or the end."""
    if stream.prompt is not None:
        typer.echo(stream.prompt.text, nl=False)
    if first is not None:
        typer.echo(shown_of(first), nl=False)
        sys.stdout.flush()


def chat(
    system: Annotated[
        str | None, typer.Option(help="Instructions that come before the conversation.")
    ] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
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
