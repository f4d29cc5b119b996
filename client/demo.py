"""`muxk run --demo`: chats stream while long prompts arrive, through the real client."""

from __future__ import annotations

from typing import Any

import anyio
import typer
from muxk.client.aio import AsyncClient
from muxk.client.demo_load import DemoFacts, DemoLoad
from muxk.client.demo_view import live_view, plain_line, summary_table
from muxk.client.errors import ClientError, RequestError
from muxk.client.progress import terminal_display
from muxk.client.server_process import ServerDied, ServerProcess
from muxk.client.terminal import plain_console
from rich.console import Console
from rich.live import Live

VIEW_EVERY_S = 0.25
LINE_EVERY_S = 1.0


def run_demo(server: ServerProcess, seconds: float) -> None:
    """Show a server that was started. Raises ClientError when it dies or a request fails."""
    console = plain_console()
    with terminal_display() as display:
        endpoint = server.wait_ready(display.progress)
    try:
        anyio.run(_show, endpoint, seconds, console)
    except ExceptionGroup as group:
        error = _first_client_error(group)
        if error is None:
            raise
        raise _with_last_words(error, server) from None
    except RequestError as error:
        raise _with_last_words(error, server) from None


def _first_client_error(group: ExceptionGroup[Exception]) -> ClientError | None:
    found = group.subgroup(ClientError)
    while found is not None:
        first = found.exceptions[0]
        if isinstance(first, ClientError):
            return first
        found = first
    return None


def _with_last_words(error: ClientError, server: ServerProcess) -> ClientError:
    """A dead server's own words say more than that it is gone."""
    words = "" if server.alive else server.last_words()
    return ServerDied(f"{error}\n{words}") if words else error


async def _show(endpoint: str, seconds: float, console: Console) -> None:
    async with AsyncClient(endpoint) as client:
        facts = DemoFacts()
        where = f"muxk state --endpoint {endpoint}"
        typer.echo(f"{client.server.policy} for {seconds:.0f} s; look from another terminal with:  {where}")
        before = await client.state()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_live if console.is_terminal else _lines, client, facts, seconds, console)
            await DemoLoad(client, facts).run(seconds)
            tasks.cancel_scope.cancel()
        console.print(summary_table(facts, before, await client.state(), client.server))


async def _live(client: AsyncClient, facts: DemoFacts, seconds: float, console: Console) -> None:
    state: dict[str, Any] = {}
    view = live_view(facts, state, client.server, seconds, console.width)
    with Live(view, console=console, auto_refresh=False, transient=True) as live:
        while True:
            state = await client.state()
            view = live_view(facts, state, client.server, seconds, console.width)
            live.update(view, refresh=True)
            await anyio.sleep(VIEW_EVERY_S)


async def _lines(client: AsyncClient, facts: DemoFacts, _seconds: float, _console: Console) -> None:
    while True:
        await anyio.sleep(LINE_EVERY_S)
        typer.echo(plain_line(facts, await client.state()))
