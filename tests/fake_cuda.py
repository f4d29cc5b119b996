"""A machine with a made-up card: tests/cuda/fake_libcuda.c in a process of its own, under the real bindings.

The bindings load a driver once in a process and keep it, so a test never loads the fake one itself: it runs
a command with `environment(...)`, or talks to a `FakeCuda`, a process that opens partitions when told to.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SOURCE = Path(__file__).parent / "cuda" / "fake_libcuda.c"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
ALIVE = ("primaries", "greens", "streams", "events", "out_of_order", "destroyed_busy", "released_early")
"""What lives now, and what was destroyed before what stands on it, or with work on it."""
COUNTED = ("calls", "made_streams", "made_greens", "splits", "structured")


def is_installed(module: str) -> bool:
    """Without importing it, though what is above it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


INSTALLED = is_installed("cuda.bindings.driver")
"""cuda-bindings are here, so that the fake driver can be used."""


def build(folder: Path) -> Path:
    """Compile libcuda.so.1 into a folder, and return the folder."""
    library = folder / "libcuda.so.1"
    command = ["cc", "-O1", *WARNINGS, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(SOURCE)], check=True)
    return folder


def environment(folder: Path, modules: Path | None = None, **settings: int | str) -> dict[str, str]:
    """For a process that finds the fake driver; SMS=132, DRIVER=13000, MISSING="cuX,cuY" and so on.

    What is in `modules` is found before what is installed.
    """
    own = {f"FAKE_CUDA_{name}": str(value) for name, value in settings.items()}
    if modules is not None:
        own["PYTHONPATH"] = str(modules)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), **own}


def add_torch(folder: Path, cuda: str) -> None:
    """What is seen of a torch that was built for a CUDA, without importing it."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('this torch is not to be imported')\n")
    (folder / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda!r}\n")


class Failed(Exception):
    """What the process raised: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class FakeCuda:
    """A process with a made-up card, and at most one `Partitions` open in it."""

    def __init__(self, folder: Path, modules: Path | None = None, **settings: int | str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment(folder, modules, **settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)

    def ask(self, verb: str, *arguments: object) -> Any:
        """Raises Failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise Failed(*answer["error"])
        return answer["value"]

    def set(self, **settings: int) -> None:
        """Change the card or the driver; what the bindings have loaded already stays."""
        self.ask("set", settings)

    def fail(self, at: int, call: str = "", code: int = 2) -> None:
        """Fail once, at the n-th call from now, of those of this name if there is one; 0 fails none."""
        self.ask("fail", at, call, code)

    def figures(self) -> dict[str, int]:
        """What lives, and what was done wrong."""
        return dict(self.ask("figures"))

    def alive(self) -> dict[str, int]:
        """Only what lives or was done wrong, of that only what is not 0."""
        names = (
            "primaries",
            "greens",
            "streams",
            "events",
            "out_of_order",
            "destroyed_busy",
            "released_early",
        )
        figures = self.figures()
        return {name: figures[name] for name in names if figures[name]}

    def open(self, menu: list[int] | None = None) -> dict[str, Any]:
        """Open partitions, and return their description."""
        return dict(self.ask("open", menu))

    def close(self) -> None:
        self.ask("close")


class _Served:
    """The other side: what the process does when it is asked."""

    def __init__(self) -> None:
        import ctypes

        self._fake = ctypes.CDLL("libcuda.so.1")
        self._fake.fake_get.restype = ctypes.c_long
        self._fake.fake_get.argtypes = [ctypes.c_char_p]
        self._fake.fake_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._fake.fake_fail_call.argtypes = [ctypes.c_char_p]
        self._fake.fake_shared.restype = ctypes.c_long
        self._fake.fake_shared.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._fake.fake_busy.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._partitions: Any = None

    def set(self, settings: dict[str, int]) -> None:
        for name, value in settings.items():
            assert self._fake.fake_set(name.encode(), value) == 0, name

    def fail(self, at: int, call: str, code: int) -> None:
        self._fake.fake_fail_call(call.encode())
        self.set({"FAIL_CODE": code, "FAIL_AT": at})

    def figures(self) -> dict[str, int]:
        names = (
            "calls primaries greens streams events made_streams made_greens splits structured out_of_order"
        )
        names += " destroyed_busy released_early"
        return {name: self._fake.fake_get(name.encode()) for name in names.split()}

    def open(self, menu: list[int] | None) -> object:
        from muxk.kernel.devices.cuda_partition import open_partitions

        self._partitions = open_partitions(0, menu)
        return self._partitions.describe()

    def splits(self) -> list[list[int]]:
        return [[split.decode_units, split.prefill_units] for split in self._partitions.splits()]

    def stream(self, phase: str, units: int) -> int:
        from muxk.kernel.work import Phase

        return int(self._partitions.streams(Phase(phase), units))

    def shared(self, one: int, other: int) -> int:
        return int(self._fake.fake_shared(one, other))

    def busy(self, stream: int, busy: int, failed: int) -> None:
        assert self._fake.fake_busy(stream, busy, failed) == 0

    def priority_and_flags(self, stream: int) -> list[int]:
        from cuda.bindings import driver

        return [driver.cuStreamGetPriority(stream)[1], driver.cuStreamGetFlags(stream)[1]]

    def close(self) -> None:
        self._partitions.close()

    def choose(self, dtype: str) -> list[str]:
        from muxk.actors.cuda_backend import choose_card

        chosen = choose_card(dtype)
        return [chosen.device, chosen.reason]

    def refusal(self, device: str) -> str:
        """What `muxk run --device` says to a device that can not be used."""
        from muxk.actors.backends import StartupError, open_backend

        try:
            open_backend(device, "none", "auto", None, lambda what, share: None)
        except StartupError as error:
            return str(error)
        raise AssertionError("it was opened")

    def doctor(self) -> object:
        import msgspec
        from muxk.client.doctor import examine

        return msgspec.to_builtins(examine())

    def cycles(self, count: int, menu: list[int]) -> int:
        """Open and close so often; returns the growth of this process in KiB over the second half."""
        import resource

        half = 0
        for cycle in range(count):
            self.open(menu)
            self.close()
            if cycle == count // 2:
                half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - half


def _serve() -> None:
    served = _Served()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer = {"value": getattr(served, verb)(*arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
