"""What the times of the CPU device depend on beside the model's name."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
from muxk.models.native_library import load_native
from muxk.profiles.profile_file import digest


def cpu_facts(config: Any) -> tuple[dict[str, Any], str]:
    """A model's sizes as plain data; a digest of the processor and of what runs on it."""
    sizes: dict[str, Any] = msgspec.to_builtins(config)
    return sizes, digest((processor_name(), load_native() is not None))


def processor_name() -> str:
    """As exactly as the system tells."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
