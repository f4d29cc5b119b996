"""The page `docs/gpu-models.md`: what each constant of the simulated GPUs stands on, and its error."""

from __future__ import annotations

from collections.abc import Iterator

from muxk.profiles.gpu import GpuProfile, Group, HeldOut, known_gpus, load_gpu

MEDIAN_AIM = 0.08
P90_AIM = 0.20
HEAD = """\
# The models of the simulated GPUs

This page is generated: `python -m muxk.profiles.fit_gpu --docs docs/gpu-models.md`. The constants are in
`profiles/gpus/*.yaml`; the formulas, with what each constant means, in `profiles/gpu.py`.

## Error on shapes that were held out

Of each table two thirds of the shapes were fitted; the other third, picked by a hash of the shape, was held
out whole, with every batch size and length it was measured at. The error is that of one operator that runs
alone on the whole card, relative to what was measured. Rows of Vidur's tables under 10 us are not judged,
since those tables are in whole microseconds. The aim is a median under 8 % and a P90 under 20 %; rows over it
are marked.

| card | operator | table | fitted rows | held-out rows | median | P90 | |
|---|---|---|--:|--:|--:|--:|---|
"""
GROUPS = """
## What the constants stand on

`assumed` means that no table of measurements on this card stands behind the group. Everything about running
two phases at the same time is assumed: no published table measures it.

| card | group | assumed | source |
|---|---|---|---|
"""


def gpu_models_page() -> str:
    profiles = [load_gpu(name) for name in known_gpus()]
    lines = [line for profile in profiles for line in _error_lines(profile)]
    groups = [line for profile in profiles for line in _group_lines(profile)]
    return HEAD + "\n".join(lines) + "\n" + GROUPS + "\n".join(groups) + "\n"


def _error_lines(profile: GpuProfile) -> Iterator[str]:
    for row in profile.held_out:
        yield (
            f"| {profile.name} | {row.operator} | {row.table} | {row.fitted_rows:,} | {row.held_out_rows:,} "
            f"| {row.median:.1%} | {row.p90:.1%} | {_mark(row)} |"
        )


def _mark(row: HeldOut) -> str:
    return "" if row.median < MEDIAN_AIM and row.p90 < P90_AIM else "over the aim"


def _group_lines(profile: GpuProfile) -> Iterator[str]:
    for name in profile.__struct_fields__:
        group = getattr(profile, name)
        if isinstance(group, Group):
            yield f"| {profile.name} | {name} | {'**yes**' if group.assumed else 'no'} | {group.source} |"
