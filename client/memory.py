"""What the system says of a process's memory."""

from __future__ import annotations

from pathlib import Path


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, 0 where the system does not say (no /proc)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
