"""The page `docs/gpu-models.md`: what each constant of the simulated GPUs stands on, and its error."""

from __future__ import annotations

from collections.abc import Iterator

from muxk.profiles.fit_figures import Figure, figures
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
FIGURES = """
## Figures beside the tables

Single operators of the H200, which are rows of the fitted tables; the speed of a GEMM on a part of a Hopper,
measured beside another kernel; and times of 8xA100 that the predictor in the code of MuxWise's authors gives.
Nothing was fitted to the last two. Decode on 8xA100 is too fast: by 3 to 4 ms (70B) and 1 to 2 ms (8B) from
32 SMs up, by more below. What no table has is missing (gaps between kernels, sampling), and the all-reduce is
assumed; a small model on eight cards suffers most from both. A card that throttles is not modelled: the
largest GEMMs of the H200 (8192 x 8192 from 8192 tokens) reach 670 TFLOP/s in the table and 815 here.

A fused MoE kernel on 16, 64 and 112 of 132 SMs of a Hopper, beside another kernel, ran at .17, .64 and .90 of
its speed; grouped products of Qwen3-235B run at .23 to .33, .80 to .93 and .97 to .99 here: the SMs that
saturate the memory of these cards are assumed to be 56, and it may take more.

| figure | measured | ours | ratio |
|---|--:|--:|--:|
"""
FUSED = """
## How a fused step is costed

GEMMs, norms and all-reduces run once over the decode rows and the chunk together, at the efficiency that the
GEMM fit has for that number of tokens: a small chunk pays for half-empty tiles and for the weights. Attention
of the decode rows and of the chunk are two kernels, one after the other; the chunk's pays for every pair of
its queries with the reused context, and reads that context again in each step. A step pays the launch of
every layer. Efficiencies are fitted to the tables above (A100 attention and all-reduce are assumed), launches
are assumed.
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
    rows = [_figure_line(figure) for figure in figures()]
    parts = (HEAD, *_joined(lines), FIGURES, *_joined(rows), FUSED, GROUPS, *_joined(groups))
    return "".join(parts)


def _joined(lines: list[str]) -> Iterator[str]:
    return (f"{line}\n" for line in lines)


def _figure_line(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    return f"| {figure.name} | {figure.measured:,.4g}{unit} | {figure.ours:,.4g}{unit} | {figure.ratio:.2f} |"


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
