"""Fits the efficiencies of the simulated GPUs to tables of operator times that others measured.

    python -m muxk.profiles.fit_gpu --data FOLDER [--gpu h200] [--judge] [--docs docs/gpu-models.md]

It rewrites, in `profiles/gpus/<gpu>.yaml`, the groups that a table stands behind, and leaves the others as
they are written there. Two thirds of the shapes are fitted; the third that a hash of the shape picks is held
out, and its error is what is published. The last digit of a constant differs from one processor to another;
`--judge` gives the errors of those in the file.

Needs the `fit` extra (SciPy, pyarrow); running muxk does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
from muxk.profiles import fit_tables as tables
from muxk.profiles import gpu as model
from muxk.profiles.fit_figures import DECODE_MS, SMS, decode_ns
from muxk.profiles.fit_judge import Fit, Judged, Numbers, Trial, pooled
from muxk.profiles.fit_report import gpu_models_page
from muxk.profiles.fit_tables import Row, TableError
from muxk.profiles.gpu import GpuProfile

OF_SEVERAL_WIDTHS = ("rope", "activation")
"""Streams of which the tables of every card have rows of many widths: elsewhere the cost of a row can not be
told from that of its bytes, and is 0."""
VIDUR = "Vidur @7d47513 (MIT)"
AIC = "AIConfigurator @095f58a (Apache-2.0), vLLM 0.24.0"
AUTHORS = "predictor in the code of MuxWise's authors, tp=8: 70B fitted, 8B held out"
INFERSIM = "InferSim @f2293da (Apache-2.0)"


def _with(profile: GpuProfile, group: str, **values: Any) -> GpuProfile:
    changed = msgspec.structs.replace(getattr(profile, group), **values)
    return msgspec.structs.replace(profile, **{group: changed})


GEMM_NAMES = ("floor_ns", "bandwidth_efficiency", "wave_weight", "sharpness", "inner_overhead", "split_ns")


def _gemm_fit(profile: GpuProfile) -> Fit:
    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        shapes = zip(base.gemm.tiles, numbers[len(GEMM_NAMES) :], strict=True)
        tiles = tuple(model.Tile(tile.rows, tile.columns, value) for tile, value in shapes)
        return _with(base, "gemm", **_named(GEMM_NAMES, numbers), tiles=tiles)

    def formula(base: GpuProfile, row: Row) -> float:
        tokens, columns, inner = (int(value) for value in row.arguments)
        return model.gemm_ns(base, tokens, columns, inner, base.card.units)

    count = len(profile.gemm.tiles)
    start = (3000.0, 0.85, 0.3, 2.5, 100.0, 4000.0, *(0.7,) * count)
    low = (0.0, 0.3, 0.0, 1.2, 0.0, 0.0, *(0.2,) * count)
    high = (10_000.0, 1.0, 1.0, 10.0, 2000.0, 30_000.0, *(1.0,) * count)
    return Fit(rebuild, formula, start, low, high)


DECODE_NAMES = ("floor_ns", "bandwidth_efficiency", "sharpness", "row_ns")


def _decode_fit() -> Fit:
    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        return _with(base, "decode_attention", **_named(DECODE_NAMES, numbers))

    def formula(base: GpuProfile, row: Row) -> float:
        rows, context, heads, kv_heads, head_dim = (int(value) for value in row.arguments)
        return model.decode_attention_ns(base, rows, context, heads, kv_heads, head_dim, base.card.units)

    return Fit(
        rebuild, formula, (11_700.0, 0.9, 2.0, 100.0), (0.0, 0.3, 1.0, 0.0), (40_000.0, 1.0, 8.0, 20_000.0)
    )


PREFILL_NAMES = (
    "floor_ns",
    "efficiency",
    "diagonal",
    "split_keys",
    "sharpness",
    "ramp_tokens",
    "bandwidth_efficiency",
)


def _prefill_fit() -> Fit:
    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        return _with(base, "prefill_attention", **_named(PREFILL_NAMES, numbers))

    def formula(base: GpuProfile, row: Row) -> float:
        tokens, pairs, context, heads, kv_heads, head_dim = (float(value) for value in row.arguments)
        widths = (int(heads), int(kv_heads), int(head_dim), base.card.units)
        return model.prefill_attention_ns(base, tokens, pairs, context, *widths)

    start = (11_700.0, 0.7, 0.5, 4096.0, 3.0, 100.0, 0.6)
    low = (0.0, 0.2, 0.0, 64.0, 1.0, 0.0, 0.05)
    high = (40_000.0, 1.0, 8.0, 65_536.0, 8.0, 4000.0, 1.0)
    return Fit(rebuild, formula, start, low, high)


STREAM_NAMES = ("floor_ns", "bandwidth_efficiency", "sharpness", "cached_gain", "row_ns")


def _stream_fit(kernel: str) -> Fit:
    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        constants = dict.fromkeys(STREAM_NAMES, 0.0) | _named(STREAM_NAMES, numbers)
        kernels = {**base.elementwise.kernels, kernel: model.ElementwiseKernel(**constants)}
        return _with(base, "elementwise", kernels=kernels)

    def formula(base: GpuProfile, row: Row) -> float:
        tokens, moved = float(row.arguments[1]), float(row.arguments[2])
        return model.elementwise_ns(base, kernel, tokens, moved, base.card.units)

    free = len(STREAM_NAMES) - (kernel not in OF_SEVERAL_WIDTHS)
    start = (3000.0, 0.6, 2.0, 0.2, 100.0)[:free]
    low = (0.0, 0.02, 1.0, 0.0, 0.0)[:free]
    high = (30_000.0, 1.0, 10.0, 0.9, 10_000.0)[:free]
    return Fit(rebuild, formula, start, low, high)


def _all_reduce_fit(tp: int) -> Fit:
    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        by_tp = {**base.all_reduce.by_tp, tp: model.AllReduceSize(*numbers)}
        return _with(base, "all_reduce", by_tp=by_tp)

    def formula(base: GpuProfile, row: Row) -> float:
        return model.all_reduce_ns(base, tp, float(row.arguments[1]))

    return Fit(rebuild, formula, (30_000.0, 220.0, 2.0), (1000.0, 20.0, 1.0), (100_000.0, 450.0, 10.0))


def _eight_gpus_fit() -> Fit:
    """The floor of an all-reduce over eight GPUs, from decode steps on parts of them."""

    def rebuild(base: GpuProfile, numbers: Numbers) -> GpuProfile:
        size = msgspec.structs.replace(base.all_reduce.by_tp[8], floor_ns=numbers[0])
        return _with(base, "all_reduce", by_tp={**base.all_reduce.by_tp, 8: size})

    def formula(base: GpuProfile, row: Row) -> float:
        name, units = row.arguments
        return decode_ns(base, str(name), int(units))

    return Fit(rebuild, formula, (30_000.0,), (1000.0,), (100_000.0,))


def _named(names: Sequence[str], numbers: Numbers) -> dict[str, float]:
    return dict(zip(names, numbers, strict=False))


def _fit_vidur(
    profile: GpuProfile, names: Sequence[str], trial: Trial, data: Path
) -> tuple[GpuProfile, list[Judged]]:
    """GEMMs and elementwise kernels of all the tables of a card together."""
    gemms: list[Row] = []
    streams: list[Row] = []
    for name in names:
        more_gemms, more_streams = tables.vidur_layers(data / name)
        gemms += more_gemms
        streams += more_streams
    profile, held_out = trial.fitted_and_judged(profile, _gemm_fit(profile), gemms, VIDUR)
    held_out.append(pooled("gemm, all", held_out))
    of_streams: list[Judged] = []
    for kernel in model.ELEMENTWISE:
        rows = [row for row in streams if row.operator == kernel]
        profile, more = trial.fitted_and_judged(profile, _stream_fit(kernel), rows, VIDUR)
        of_streams += more
    held_out += [*of_streams, pooled("elementwise, all", of_streams)]
    profile = _with(profile, "gemm", source=VIDUR, assumed=False)
    return _with(profile, "elementwise", source=VIDUR, assumed=False), held_out


def fit_a100(profile: GpuProfile, trial: Trial, data: Path) -> tuple[GpuProfile, list[Judged]]:
    """Attention and all-reduce have no table: they stay as they are assumed in the file.

    But for one: eight H100 reduce faster than four of them, since their switches add (NVLink SHARP). Those of
    an A100 do not, so that its floor over eight GPUs is fitted to decode steps of 70B on eight of them, and
    judged on those of 8B.
    """
    names = ("vidur_a100_llama3-8b_mlp.csv", "vidur_a100_llama2-7b_mlp.csv")
    profile, held_out = _fit_vidur(profile, names, trial, data)
    large, small = (
        [
            Row("all_reduce", name, (name, float(units)), ms * 1e6)
            for units, ms in zip(SMS, DECODE_MS[name], strict=True)
        ]
        for name in ("llama-3.1-70b", "llama-3.1-8b")
    )
    fit = _eight_gpus_fit()
    profile = trial.run(profile, fit, large)
    return profile, [*held_out, Judged.of(profile, fit, small, AUTHORS, len(large))]


def fit_h100(profile: GpuProfile, trial: Trial, data: Path) -> tuple[GpuProfile, list[Judged]]:
    """Decode attention from an H800, whose SMs and memory are an H100's: assumed to be alike."""
    names = ("vidur_h100_llama2-70b_mlp.csv", "vidur_h100_llama2-7b_mlp.csv")
    profile, held_out = _fit_vidur(profile, names, trial, data)
    messages = tables.vidur_all_reduce(data / "vidur_h100_dgx_all_reduce.csv")
    for tp in sorted(profile.all_reduce.by_tp):
        rows = [row for row in messages if row.arguments[0] == tp]
        profile, more = trial.fitted_and_judged(profile, _all_reduce_fit(tp), rows, f"{VIDUR}, tp={tp}")
        held_out += more
    rows = tables.infersim_decode(data / "infersim" / "h800_mha_decode_32-8-128.csv")
    profile, more = trial.fitted_and_judged(profile, _decode_fit(), rows, f"{INFERSIM}, H800")
    profile = _with(profile, "all_reduce", source=f"{VIDUR}, DGX H100", assumed=False)
    source = f"{INFERSIM}: an H800, which has the SMs and the memory of an H100"
    return _with(profile, "decode_attention", source=source, assumed=True), held_out + more


def fit_h200(profile: GpuProfile, trial: Trial, data: Path) -> tuple[GpuProfile, list[Judged]]:
    folder = data / "aic_h200"
    profile, held_out = trial.fitted_and_judged(
        profile, _gemm_fit(profile), tables.aic_gemms(folder / "gemm_vllm0.24.0.parquet"), AIC
    )
    readers: Mapping[str, tuple[Fit, Callable[[Path], list[Row]]]] = {
        "generation_attention": (_decode_fit(), tables.aic_decode),
        "context_attention": (_prefill_fit(), tables.aic_prefill),
    }
    for name, (fit, read) in readers.items():
        profile, more = trial.fitted_and_judged(
            profile, fit, read(folder / f"{name}_vllm0.24.0.parquet"), AIC
        )
        other = read(folder / f"{name}_sglang0.5.14.parquet")
        held_out += more + trial.judged(profile, fit, other, "AIConfigurator, SGLang 0.5.14, not fitted", 0)
    for group in ("gemm", "decode_attention", "prefill_attention"):
        profile = _with(profile, group, source=AIC, assumed=False)
    return profile, held_out


FITTERS: Mapping[str, Callable[[GpuProfile, Trial, Path], tuple[GpuProfile, list[Judged]]]] = {
    "a100": fit_a100,
    "h100": fit_h100,
    "h200": fit_h200,
}


def write_profile(path: Path, profile: GpuProfile) -> None:
    text = yaml.safe_dump(msgspec.to_builtins(profile), sort_keys=False, width=110)
    path.write_text(
        f"# Written by python -m muxk.profiles.fit_gpu; groups with `assumed: true` by hand.\n{text}", "utf-8"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m muxk.profiles.fit_gpu", description="Fit the simulated GPUs"
    )
    parser.add_argument("--data", type=Path, help="folder of the calibration tables")
    parser.add_argument("--gpu", choices=sorted(FITTERS), help="only this one")
    parser.add_argument(
        "--judge", action="store_true", help="write only the errors of the constants as they are"
    )
    parser.add_argument("--docs", type=Path, help="write the page of errors and constants here")
    chosen = parser.parse_args(arguments)
    if chosen.data is None and (chosen.docs is None or chosen.judge):
        parser.error("--data FOLDER fits, or with --judge judges; --docs FILE writes the page")
    try:
        for name in [chosen.gpu] if chosen.gpu else sorted(FITTERS) if chosen.data else ():
            trial = Trial(fits=not chosen.judge)
            profile, judged = FITTERS[name](model.load_gpu(name), trial, chosen.data)
            held_out = tuple(one.held_out for one in judged)
            if chosen.judge:
                profile = model.load_gpu(name)
            profile = msgspec.structs.replace(profile, held_out=held_out)
            write_profile(model.GPUS_FOLDER / f"{name}.yaml", profile)
            for row in held_out:
                errors = f"median {row.median:6.1%}  P90 {row.p90:6.1%}"
                print(f"{name}  {row.operator:18} {errors}  {row.held_out_rows} rows")
    except (TableError, model.GpuError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if chosen.docs is not None:
        chosen.docs.write_text(gpu_models_page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
