"""Sampling on the device, with the numbers of `sampling.py` and without waiting for the device.

Random numbers are made on the host, where seeds, positions and choices are known, as they are for every
device. Sums over the vocabulary are float64, in the order of token ids, so that a token depends on rounding
only where a random number falls within 1e-7 of the edge between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from muxk.kernel.work import RowExtras, RowLogprobs, StepOutput, int32_array
from muxk.models.cuda_batch import to_host, upload_arrays
from muxk.models.cuda_logprobs import PendingLogprobs, logprobs_on_device
from muxk.models.errors import ModelError
from muxk.models.philox import uniforms
from muxk.models.sampling import GREEDY_BELOW, Sampling
from muxk.models.sampling_extras import LARGEST, SMALLEST
from muxk.models.sampling_logprobs import Asked
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Sampled:
    """One token a row, on the device and on its way to the host."""

    tokens: Tensor
    """int32[rows]."""
    host: Tensor
    """int32[rows + 1]: the tokens, and 1 when all logits were finite."""
    logprobs: PendingLogprobs | None

    def read(self) -> tuple[bytes, tuple[RowLogprobs, ...]]:
        """Once the device is done. ModelError when logits of the model were not finite."""
        words: NDArray[np.int32] = self.host.numpy()
        if not words[-1]:
            raise ModelError("the model's logits are not finite")
        tokens = words[:-1].astype("<i4")
        return tokens.tobytes(), () if self.logprobs is None else self.logprobs.read(tokens)


@dataclass(frozen=True)
class PendingOutput:
    """Implements `kernel.cuda_runner.Pending`."""

    sampled: Sampled | None = None
    prompt: tuple[PendingLogprobs, ...] = ()
    kept: tuple[object, ...] = field(default=(), repr=False)
    """What the device may still read until the item has ended."""

    def read(self) -> StepOutput:
        """After the item has ended on the device."""
        tokens, logprobs = (b"", ()) if self.sampled is None else self.sampled.read()
        return StepOutput(tokens, logprobs, tuple(report for part in self.prompt for report in part.read()))


def sample_on_device(
    logits: Tensor, sampling: Sampling, positions: NDArray[np.int64], fed: Tensor, carried: frozenset[int]
) -> Sampled:
    """One token a row from float32[rows, vocabulary], of which rows with extras are changed.

    Args:
        positions: int64[rows], of the sampled tokens.
        fed: int32[rows], the tokens that the rows fed; counted as generated where the row is carried.
        carried: rows whose fed token the host does not know.
    """
    wanting = [(place, extra) for place, extra in sampling.extras if extra.logprobs is not None]
    reported = np.array([place for place, _ in wanting], dtype=np.int64)
    # A copy: sampling may change these rows.
    raw = _rows_at(logits, reported) if wanting else None
    _change_logits(logits, sampling.extras, fed, carried)
    tokens = logits.argmax(dim=1)
    finite = logits.gather(1, tokens[:, None]).isfinite().all()
    if not sampling.greedy:
        rows = np.flatnonzero(sampling.temperature >= GREEDY_BELOW)
        if len(rows):
            drawn = _draw(logits, sampling.of(rows), positions[rows], rows)
            tokens = _placed(tokens, drawn, rows)
    tokens = tokens.int()
    host = to_host(torch.cat([tokens, finite.int()[None]]))
    if raw is None:
        return Sampled(tokens, host, None)
    asked = [Asked(extra.row, int(positions[place]), 0, extra.logprobs or 0) for place, extra in wanting]
    chosen = _rows_at(tokens, reported)
    return Sampled(tokens, host, logprobs_on_device(raw, chosen, asked, reported))


def _rows_at(tensor: Tensor, rows: NDArray[np.int64]) -> Tensor:
    (places,) = upload_arrays([rows], tensor.device)
    return tensor.index_select(0, places)


def _placed(tokens: Tensor, drawn: Tensor, rows: NDArray[np.int64]) -> Tensor:
    if len(rows) == tokens.shape[0]:
        return drawn
    (places,) = upload_arrays([rows], tokens.device)
    return tokens.index_copy(0, places, drawn)


def _draw(
    logits: Tensor, sampling: Sampling, positions: NDArray[np.int64], rows: NDArray[np.int64]
) -> Tensor:
    """int64[len(rows)]: draw by inverting the cumulative distribution in the order of token ids."""
    points = uniforms(sampling.seed, positions, sampling.choice)
    places, uniform, temperature = upload_arrays([rows, points, sampling.temperature], logits.device)
    chosen = logits if len(rows) == logits.shape[0] else logits.index_select(0, places)
    weights = kept_weights_on_device(chosen, sampling, temperature)
    cumulative = torch.cumsum(weights, dim=1, dtype=torch.float64)
    totals = cumulative[:, -1]
    # Rounding may put a point on the total, where no token lies.
    below = torch.nextafter(totals, torch.zeros_like(totals))
    wanted = torch.minimum(uniform * totals, below)
    return torch.searchsorted(cumulative, wanted[:, None], right=True)[:, 0]


def kept_weights_on_device(logits: Tensor, sampling: Sampling, temperature: Tensor) -> Tensor:
    """`sampling.kept_weights`, for the same rows: float32[rows, vocabulary]."""
    largest = logits.max(dim=1, keepdim=True).values
    scaled = (logits - largest).div_(temperature[:, None])
    weights = scaled.exp()
    if sampling.min_p is not None:
        (least,) = upload_arrays([sampling.min_p], logits.device)
        weights *= weights >= least[:, None]
    if (sampling.top_k > 0).any():
        weights *= scaled >= _top_k_threshold(scaled, sampling.top_k)
    rows = np.flatnonzero(sampling.top_p < 1.0)
    if len(rows) == len(weights):
        weights *= weights >= _top_p_threshold(weights, sampling.top_p)
    elif len(rows):
        (places,) = upload_arrays([rows], logits.device)
        some = weights.index_select(0, places)
        kept = some * (some >= _top_p_threshold(some, sampling.top_p[rows]))
        weights.index_copy_(0, places, kept)
    return weights


def _top_k_threshold(scaled: Tensor, top_k: NDArray[np.int32]) -> Tensor:
    """The k-th largest logit of each row, or -inf where top-k is off: float32[rows, 1]."""
    counts = np.clip(top_k, 0, scaled.shape[1]).astype(np.int64)
    (places,) = upload_arrays([counts[:, None]], scaled.device)
    largest = scaled.topk(int(counts.max()), dim=1).values
    threshold = largest.gather(1, (places - 1).clamp_(min=0))
    return threshold.masked_fill(places == 0, -torch.inf)


def _top_p_threshold(weights: Tensor, top_p: NDArray[np.float32]) -> Tensor:
    """The weight at which the sum of the largest reaches top-p of all: float32[rows, 1]."""
    (share,) = upload_arrays([top_p.astype(np.float64)[:, None]], weights.device)
    largest = weights.sort(dim=1, descending=True).values
    cumulative = torch.cumsum(largest, dim=1, dtype=torch.float64)
    wanted = share * cumulative[:, -1:]
    kept = ((cumulative - largest) < wanted).sum(dim=1, keepdim=True)
    return largest.gather(1, (kept - 1).clamp_(min=0))


def _change_logits(
    logits: Tensor, extras: tuple[tuple[int, RowExtras], ...], fed: Tensor, carried: frozenset[int]
) -> None:
    """What `sampling_extras.change_logits` does to each row that asks for it, all rows at once."""
    changing = [(place, extra) for place, extra in extras if extra.changes_logits]
    if not changing:
        return
    flat, width = logits.view(-1), logits.shape[1]
    _bias(flat, width, changing)
    _penalise(logits, changing, fed, carried)
    banned = [place * width + _known(int32_array(extra.banned), width) for place, extra in changing]
    if any(map(len, banned)):
        (places,) = upload_arrays([np.concatenate(banned)], logits.device)
        flat.index_fill_(0, places, -torch.inf)


def _known(ids: NDArray[np.int32], width: int) -> NDArray[np.int64]:
    """Those that the model has logits for: a tokenizer may know more, which would be the next row's here."""
    return ids[ids < width].astype(np.int64)


def _bias(flat: Tensor, width: int, changing: list[tuple[int, RowExtras]]) -> None:
    biased = [(place, extra) for place, extra in changing if extra.bias_ids]
    if not biased:
        return
    ids, values = [], []
    for place, extra in biased:
        named = int32_array(extra.bias_ids)
        ids.append(place * width + _known(named, width))
        values.append(np.frombuffer(extra.bias_values, dtype="<f4")[named < width])
    places, added = upload_arrays([np.concatenate(ids), np.concatenate(values)], flat.device)
    flat.index_copy_(0, places, flat.index_select(0, places) + added)


def _penalise(
    logits: Tensor, changing: list[tuple[int, RowExtras]], fed: Tensor, carried: frozenset[int]
) -> None:
    """Repetition, then frequency, then presence, over dense counts of the rows that are penalised."""
    rows = [(place, extra) for place, extra in changing if _penalised(extra)]
    if not rows:
        return
    width = logits.shape[1]
    places = np.array([place for place, _ in rows])
    coming = np.array([at for at, (place, _) in enumerate(rows) if place in carried], dtype=np.int64)
    penalties = np.array(
        [[e.repetition_penalty, e.frequency_penalty, e.presence_penalty] for _, e in rows], dtype=np.float32
    )
    penalties[:, 0] = np.clip(penalties[:, 0], SMALLEST, LARGEST)
    prompt = [at * width + int32_array(extra.prompt).astype(np.int64) for at, (_, extra) in enumerate(rows)]
    said = [at * width + int32_array(extra.generated).astype(np.int64) for at, (_, extra) in enumerate(rows)]
    arrays = [
        places,
        coming,
        places[coming],
        penalties.T.copy(),
        np.concatenate(prompt),
        np.concatenate(said),
    ]
    where, late, origins, penalty, seen_at, said_at = upload_arrays(arrays, logits.device)
    counts = torch.zeros(len(rows) * width, device=logits.device)
    counts.index_add_(0, said_at, torch.ones_like(said_at, dtype=torch.float32))
    late_at = late * width + fed.index_select(0, origins)
    counts.index_add_(0, late_at, torch.ones_like(late_at, dtype=torch.float32))
    counts, repetition, frequency, presence = counts.view(len(rows), width), *penalty[:, :, None].unbind(0)
    seen = (counts > 0).view(-1).index_fill_(0, seen_at, True).view_as(counts)
    changed = logits.index_select(0, where)
    factored = torch.where(changed < 0, changed * repetition, changed / repetition)
    changed = torch.where(
        seen & (repetition != 1.0), factored.clamp_(-float(LARGEST), float(LARGEST)), changed
    )
    changed -= counts * frequency
    changed -= (counts > 0) * presence
    logits.index_copy_(0, where, changed)


def _penalised(extra: RowExtras) -> bool:
    return bool(extra.presence_penalty or extra.frequency_penalty or extra.repetition_penalty != 1.0)
