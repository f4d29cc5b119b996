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
since those tables are in whole microseconds. The aim is a median under 8 % and a P90 under 20 % for a class
of operators on a card. Vidur's tables name operators one by one: `gemm, all` and `elementwise, all` are their
classes, in which each row counts alike. A single operator that is over the aim is marked too.

`python -m muxk.profiles.fit_gpu --data FOLDER --judge` gives these errors again, of the constants as they
are. A fit on another processor differs in their last digit.

| card | operator | table | fitted rows | held-out rows | median | P90 | |
|---|---|---|--:|--:|--:|--:|---|
"""
OVER = """
Why `down` of the H100 is over it, when all its GEMMs together are not. Vidur measures `o` on random numbers,
`down` on what its gated MLP gives for weights within 0.001: products too small for fp16, that is zeros, on
which a card that its power limits clocks higher (so we read its code; no table says so). At 4,096 tokens
`down` (8192 x 3584) ran at 813 TFLOP/s, `o` (8192 x 4096) at 680; one set of constants is 11 % too slow for
the one and 7 % too fast for the other. A clock of its own for zeros was tried (fitted: 7 % faster; by the
start of the fit 8.4 to 8.8 % and 20 to 24 % of error) and left out, since serving would not use it; with it,
a clock that falls in long kernels, a split that pays for its bytes and three more tiles did not bring both
under the aim either. The rest is the library's choice of a kernel, which no smooth formula follows: at 576,
640 and 704 tokens `down` (8192 x 7168) took 136, 207 and 134 us. And three of the four shapes of the 70B are
held out: the hash is not asked twice.

The SGLang rows of the H200 are another engine's kernels, shown to tell how far one engine's constants
carry.

Streams have two constants beside a floor and a bandwidth. What the kernels of a layer hand over is found in
the L2 cache while it fits: norms of half a cache ran 1.3 times (A100) and 1.4 times (H100) as fast a byte
as long ones. And a token's row costs its block a start, which narrow rows of rope and of the activation
show (those of a split model). The L2 cache's size is the data sheet's; that its share falls to nothing
between 0.5 and 1.5 times that size is the best of nine such ranges on the fitted rows, to within 3 %.
"""
FIGURES = """
## Figures beside the tables

Single operators of the H200, which are rows of the fitted tables; the speed of a GEMM on a part of a
Hopper, measured beside another kernel; and times of 8xA100 that the predictor in the code of MuxWise's
authors gives. Of the last, one constant comes: with the all-reduce of the DGX H100 decode on 8xA100 was too
fast, from 32 SMs up by 42 to 50 us a layer (70B) and 37 to 58 us (8B), the same for both models, whose layers
differ fourfold in weights: what was missing was a fixed time a layer and no bandwidth. Eight H100 reduce
faster than four of them (floors of 30 and 39 us), since their switches add (NVLink SHARP), which those of an
A100 do not. So the floor of an all-reduce over eight A100 is fitted to the six steps of 70B: 54 us. The six
of 8B were held out (the table above). Gaps of 4 us between some ten kernels of a layer would explain the
same; the figures can not tell which. On 8 and 16 SMs the 8B model is still too fast: part of what is missing
there grows as SMs get fewer, which an all-reduce does on a real card and does not here.

Prefill attention of 512 to 2,048 tokens on the H200 is 14 to 27 % too slow for 32 heads; with fewer heads
this goes on for longer prompts (8 heads: 13 to 30 % from 1,024 to 4,096 tokens). A smoothness of its own
for the memory, a floor that overlaps, and a start for each block were tried; the best of them still leaves
22 % at 1,024 tokens, for a constant more, and none was kept.

A card that throttles is not modelled: the largest GEMMs of the H200 (8192 x 8192 from 8192 tokens) reach
670 TFLOP/s in the table and 815 here.

A fused MoE kernel on 16, 32, 64 and 112 of 132 SMs of a Hopper, beside another kernel, ran at .17, .34, .64
and .90 of its speed; grouped products of Qwen3-235B (64 to 1,024 tokens) run at .29 to .32, .58 to .65, .90
to .94 and .99 here. 56 SMs are assumed to saturate the memory of these cards, and a kernel that draws 0.7
of it needs 39. The curve shows only that kernel's own bend, somewhere from 64 to 95 SMs: its batch and its
bandwidth are not published, the kernel beside it may have drawn on the same memory, and 95 in place of 56
would still give .44 on 32 SMs. So it is not fitted: it says that 56 may be too few. With 95, a decode step
of Qwen3-8B on an H200 (32 rows of 2K) takes 18.4 ms in place of 12.6 on 32 SMs, 9.9 in place of 8.4 on 64
and the same from 96: `--device sim:h200,partition.saturating_units*1.7` tries it.

| figure | measured | ours | ratio |
|---|--:|--:|--:|
"""
FUSED = """
## How a fused step is costed

GEMMs, norms and all-reduces run once over the decode rows and the chunk together, at the efficiency that the
GEMM fit has for that number of tokens: a small chunk pays for half-empty tiles and for the weights. Attention
of the decode rows and of the chunk are two kernels, one after the other; the chunk's pays for every pair of
its queries with the reused context, and reads that context again in each step. A step pays the launch of
every layer. Efficiencies are fitted to the tables above (A100 attention is assumed, and its all-reduce but
for the floor over eight), launches are assumed.
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
    parts = (HEAD, *_joined(lines), OVER, FIGURES, *_joined(rows), FUSED, GROUPS, *_joined(groups))
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
