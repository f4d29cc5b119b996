"""`ServerProcess`: a muxk server in a child process, for the demo, the bench, examples and tests.

The child runs `muxk run --supervised`, which writes one JSON object a line to its stdout and stops when its
stdin closes. So it ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import msgspec
from muxk.client.errors import ClientError

STDERR_LINES = 30
"""Lines of a dead server's stderr that are shown."""

Progress = Callable[[str, float], None]
"""(what is being done, share done from 0 to 1)."""


class ServerDied(ClientError):
    """The child process ended; the text is what it said."""


class ServerProcess:
    """Starts at once; `wait_ready` gives the endpoint.

    with ServerProcess("muxwise") as server, Client(server.wait_ready()) as client:
        ...
    """

    def __init__(
        self,
        policy: str = "muxwise",
        *,
        settings: Mapping[str, str] | None = None,
        device: str = "auto",
        model: str | None = None,
        dtype: str = "auto",
        endpoint: str | None = None,
        allow_remote: bool = False,
        keys: Path | None = None,
        kv_tokens: int | None = None,
        max_queue: int | None = None,
    ) -> None:
        """Options are those of `muxk run`. `endpoint` None is one that only this server uses."""
        self._directory = tempfile.TemporaryDirectory(prefix="muxk-")
        options: dict[str, Any] = {
            "--device": device,
            "--model": model,
            "--dtype": dtype,
            "--endpoint": endpoint,
            "--keys": keys,
            "--kv-tokens": kv_tokens,
            "--max-queue": max_queue,
        }
        command = [sys.executable, "-m", "muxk.client.cli", "run", policy, "--supervised"]
        for name, value in options.items():
            command += [] if value is None else [name, str(value)]
        command += ["--allow-remote"] if allow_remote else []
        for key, text in (settings or {}).items():
            command += ["--set", f"{key}={text}"]
        self._stderr = (Path(self._directory.name) / "stderr.log").open("w+b")
        self._process = self._start(command)
        self._endpoint: str | None = None

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """In a session of its own: Ctrl-C in a terminal is for the parent, which then stops the child."""
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "MUXK_RUN_DIR": str(self.run_directory)},
            start_new_session=True,
        )

    @property
    def run_directory(self) -> Path:
        """Where the child has its admin socket, and its client socket unless it listens on tcp."""
        return Path(self._directory.name) / "run"

    @property
    def admin(self) -> str:
        """The admin endpoint, once it is ready."""
        from muxk.actors.rundir import admin_endpoint

        return admin_endpoint(self.wait_ready(), self.run_directory)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, progress: Progress | None = None) -> str:
        """Wait until requests are served; the endpoint. Raises ServerDied with what the server said."""
        if self._endpoint is None:
            self._endpoint = self._read_until_ready(progress or (lambda _label, _share: None))
        return self._endpoint

    def _read_until_ready(self, progress: Progress) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = _parse(line)
            if "progress" in message:
                progress(*message["progress"])
            if "ready" in message:
                return str(message["ready"])
        self._process.wait()
        raise ServerDied(
            f"the server did not start (exit code {self._process.returncode})\n{self.last_words()}"
        )

    def last_words(self) -> str:
        """The end of what the server wrote to stderr."""
        self._stderr.flush()
        text = Path(self._stderr.name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-STDERR_LINES:])

    def wait(self, timeout_s: float) -> int:
        """Wait until it ends by itself, after a drain; the exit code. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server did not end within {timeout_s:g} s") from None

    def stop(self, timeout_s: float = 5.0) -> int:
        """Stop without draining and return the exit code; idempotent. What does not stop is killed."""
        if not self._stderr.closed:
            _close(self._process.stdin)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            _close(self._process.stdout)
            self._stderr.close()
            self._directory.cleanup()
        return int(self._process.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _parse(line: bytes) -> dict[str, Any]:
    """A line of the child; empty for one that is not ours (a library's warning)."""
    try:
        message = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return message if isinstance(message, dict) else {}


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(BrokenPipeError):
            stream.close()
