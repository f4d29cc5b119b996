"""`python -m muxk.models.native_build`: compile the native operators in place.

Installing does the same; this is for a checkout that is used without being installed, and for a compiler
that came later. CC names the compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from muxk.models.native_library import BUILT, SOURCE

FLAGS = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi")
OPENMP = "-fopenmp"
COMPILERS = ("cc", "gcc", "clang")


def build(target: Path = BUILT) -> str | None:
    """Compile the library, on several threads if the compiler can; what is wrong, or None if nothing is."""
    named = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    compiler = next((found for name in named if (found := shutil.which(name))), None)
    if compiler is None:
        return f"no C compiler; looked for {', '.join(named)}"
    complaint = None
    for flags in ((*FLAGS, OPENMP), FLAGS):
        made = target.with_name(f"{target.name}.new")
        command = [compiler, *flags, "-o", str(made), str(SOURCE), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            # A process that runs the old library keeps it: the file is replaced, not overwritten.
            made.replace(target)
            return None
        complaint = complaint or result.stderr.strip()
    return complaint


def main() -> None:
    """Build, and say where the library is or what the compiler said."""
    complaint = build()
    if complaint is not None:
        sys.exit(f"the native operators were not built, torch's will be used: {complaint}")
    sys.stdout.write(f"{BUILT.name} is built beside {SOURCE.name}\n")


if __name__ == "__main__":
    main()
