"""llama.cpp's decode step, measured in another Python: `llama-cpp-python` is no dependency of muxk.

Speaks JSON, a line each way, with a child that runs this file as a script: it must not import muxk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CONTEXT_TOKENS = 8192


class LlamaPeer:
    """The child, or the reason why there is none."""

    def __init__(self, child: subprocess.Popen[str] | None, reason: str) -> None:
        self._child = child
        self.reason = reason

    @classmethod
    def start(cls, python: str | None, model: str) -> LlamaPeer:
        """`python`: an interpreter that has llama_cpp; `model`: a name that resolves to a GGUF file."""
        if not python:
            return cls(None, "no Python that has llama-cpp-python was named")
        from muxk.models.resolve import GgufSource, resolve_model

        source = resolve_model(model)
        if not isinstance(source, GgufSource):
            return cls(None, f"{model} is no GGUF file")
        command = [python, __file__, str(source.path)]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        peer = cls(child, "")
        if peer._answer() is None:
            peer.reason = f"{Path(python).name} could not load llama_cpp or the model"
        return peer

    def step_ms(self, threads: int, rows: int, context: int, steps: int) -> float | None:
        """The fastest of some steps; None without a peer."""
        if self._child is None or self.reason:
            return None
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([threads, rows, context, steps]) + "\n")
        self._child.stdin.flush()
        answer = self._answer()
        if answer is None:
            self.reason = "llama.cpp's process ended"
        return answer

    def _answer(self) -> float | None:
        assert self._child is not None and self._child.stdout is not None  # noqa: PT018
        line = self._child.stdout.readline()
        return float(line) if line.strip() else None

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.communicate()


def _serve(path: str) -> None:
    """The child: load, say 0, then answer each line of [threads, rows, context, steps]."""
    import llama_cpp as llama  # type: ignore[import-not-found]

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_seq_max = CONTEXT_TOKENS, 512, 8
    if hasattr(parameters, "kv_unified"):
        parameters.kv_unified = False
    context = llama.llama_init_from_model(model, parameters)
    batch = llama.llama_batch_init(512, 0, 1)
    print(0, flush=True)
    for line in sys.stdin:
        threads, rows, tokens, steps = json.loads(line)
        llama.llama_set_n_threads(context, threads, threads)
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        for row in range(rows):
            _decode(llama, context, batch, [(100 + at, at, row, False) for at in range(tokens)])
        times = []
        for step in range(steps):
            started = time.perf_counter()
            _decode(llama, context, batch, [(100 + row, tokens + step, row, True) for row in range(rows)])
            times.append(time.perf_counter() - started)
        print(min(times) * 1e3, flush=True)


def _decode(llama: Any, context: Any, batch: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
    """Run (token, position, sequence, wanted) rows."""
    batch.n_tokens = len(tokens)
    for index, (token, position, sequence, wanted) in enumerate(tokens):
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        batch.logits[index] = wanted
    code = llama.llama_decode(context, batch)
    assert code == 0, code
    llama.llama_synchronize(context)


if __name__ == "__main__":
    _serve(sys.argv[1])
