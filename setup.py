"""The native operators of the CPU device, compiled where there is a C compiler; the rest is pyproject.toml.

A plain shared library behind ctypes: it uses neither Python's headers nor torch's.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup

OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

setup(
    ext_modules=[
        Extension(
            "muxk.models._native",
            sources=["models/native_operators.c"],
            depends=["models/native_kernels.h", "models/native_products.h", "models/native_layers.h"],
            extra_compile_args=["-O3", "-fvisibility=hidden", "-Wno-psabi", *OPENMP],
            extra_link_args=OPENMP,
            libraries=["m"],
            # Without a compiler, or with one that does not know these flags, torch's operators do the work.
            optional=True,
        )
    ]
)
