"""The few seconds of measurement at start: which probes are run, and the models fitted to them.

Decode and prefill get the linear forms of MuxWise's estimator (section 3.3) for each number of units. The
full profile of the paper, with its grid and its contention factors, is another command's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from muxk.kernel.estimates import DecodeModel, Estimates, PrefillModel
from muxk.kernel.work import Phase, ProbeWork, Split, attention_pairs

DECODE_SHAPES = ((1, 64), (8, 64), (8, 1024))
"""(rows, context tokens of each row): three points for three coefficients."""
PREFILL_SHAPES = ((16, 0), (128, 0), (512, 0), (128, 1024))
"""(new tokens, reused tokens) of one row: four points for three coefficients."""
REPEATS = 4
"""Of each probe; the first warms up and is not counted."""
PREFILL_LAYERS = 2
"""Layers of a prefill probe: enough to see one, few enough to be quick."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement to make."""

    work: ProbeWork
    layers: int
    counted: bool


def plan_probes(units_total: int, splits: Sequence[Split], layers: int, context_limit: int) -> list[Probe]:
    """All probes of a device, in the order to run them; shapes beyond the context limit are cut to it."""
    decode_units = sorted({split.decode_units for split in splits} | {units_total})
    prefill_units = sorted({split.prefill_units for split in splits} | {units_total})
    shapes = [
        (Phase.DECODE, units, rows, 1, context) for units in decode_units for rows, context in DECODE_SHAPES
    ]
    shapes += [
        (Phase.PREFILL, units, 1, new, reused) for units in prefill_units for new, reused in PREFILL_SHAPES
    ]
    probes: list[Probe] = []
    for phase, units, rows, new, context in shapes:
        fitting_new = min(new, max(1, context_limit // 2))
        fitting_context = min(context, max(0, context_limit // 2 - 1))
        for repeat in range(REPEATS):
            probe = ProbeWork(len(probes) + 1, phase, units, rows, fitting_new, fitting_context)
            probe_layers = layers if phase is Phase.DECODE else min(layers, PREFILL_LAYERS)
            probes.append(Probe(probe, probe_layers, counted=repeat > 0))
    return probes


def fit(probes: Sequence[Probe], elapsed_ns: Mapping[int, int], layers: int) -> Estimates:
    """Tables from the median of each shape's counted repeats; `elapsed_ns` by probe id, 0 if it failed."""
    decode: dict[int, list[tuple[list[float], float]]] = {}
    prefill: dict[int, list[tuple[list[float], float]]] = {}
    for probe, elapsed in _medians(probes, elapsed_ns):
        work = probe.work
        if work.phase is Phase.DECODE:
            features = [1.0, work.rows, work.rows * work.context_tokens]
            decode.setdefault(work.units, []).append((features, elapsed))
        else:
            pairs = attention_pairs((work.new_tokens,), (work.context_tokens,))
            features = [1.0, work.new_tokens, pairs]
            prefill.setdefault(work.units, []).append((features, elapsed / probe.layers))
    return Estimates(
        layers=layers,
        decode=tuple(
            DecodeModel(units, *_coefficients(rows), guard=1.0) for units, rows in sorted(decode.items())
        ),
        prefill=tuple(
            PrefillModel(units, *_coefficients(rows), scale=1.0) for units, rows in sorted(prefill.items())
        ),
    )


def _medians(probes: Sequence[Probe], elapsed_ns: Mapping[int, int]) -> list[tuple[Probe, float]]:
    groups: dict[tuple[Phase, int, int, int, int], list[Probe]] = {}
    for probe in probes:
        work = probe.work
        key = (work.phase, work.units, work.rows, work.new_tokens, work.context_tokens)
        groups.setdefault(key, []).append(probe)
    medians = []
    for group in groups.values():
        counted = [elapsed_ns.get(probe.work.probe_id, 0) for probe in group if probe.counted]
        measured = [elapsed for elapsed in counted if elapsed > 0]
        if measured:
            medians.append((group[0], float(np.median(measured))))
    return medians


def _coefficients(rows: list[tuple[list[float], float]]) -> tuple[float, float, float]:
    """Non-negative least squares on relative errors, by leaving out what came out negative.

    Three features and a handful of rows: fitting the subsets that stay non-negative is exact enough, and a
    time that grows when work is taken away would mislead every policy.
    """
    features = np.array([feature for feature, _ in rows])
    times = np.array([time for _, time in rows])
    weighted = features / times[:, None]
    active = [0, 1, 2]
    while active:
        solution, *_ = np.linalg.lstsq(weighted[:, active], np.ones(len(rows)), rcond=None)
        negative = [index for index, value in zip(active, solution, strict=True) if value < 0]
        if not negative:
            break
        worst = min(negative, key=lambda index: float(solution[active.index(index)]))
        active.remove(worst)
    result = [0.0, 0.0, 0.0]
    for index, value in zip(active, solution, strict=True):
        result[index] = float(value)
    return result[0], result[1], result[2]
