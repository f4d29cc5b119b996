"""The KV pool of a simulated GPU: no numbers, but enough to see whether rows were routed to their own
pages.

Each page keeps a hash of all tokens up to the last one written in it, and that token's position. A step
takes the hash from the page that its row's table leads to, mixes its tokens in, and samples from the
result: the next token of a row depends on every token before it, and a page that was shared wrongly,
released too early or filled from another prompt changes the output. Equal contexts give equal tokens
however they were computed (in chunks, from a reused prefix, again after an eviction). Cost is one page a
row of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from muxk.kernel.token_steps import RowSteps, StepsOfFew, StepsOfMany
from muxk.kernel.work import (
    PAGE_SIZE,
    ChunkRow,
    DecodeWork,
    PrefillWork,
    RowLogprobs,
    RowPages,
    SamplingColumns,
    StepOutput,
    chunk_rows,
    int32_array,
    int32_bytes,
    int32_values,
)

HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
LOST = np.uint64(0xD1B54A32D192ED03)
"""Mixed in where a page does not hold what its row expects there."""
LOST_VALUE = int(LOST)
ONE = np.uint64(1)
MIX_ONE, MIX_TWO = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
MIX_FACTORS = (np.uint64(MIX_ONE), np.uint64(MIX_TWO))
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", dtype=np.uint8).astype("<i4")
LETTER_OF: tuple[int, ...] = tuple(LETTERS.tolist())
LETTER_COUNT = np.uint64(len(LETTERS))
HIGH_BITS = np.uint64(16)
POWERS_START = 4096
END_TOKEN = 256
KEPT_STEPS = 1
"""Decode steps before the last whose tokens are kept for those that follow."""
FEW_ROWS = 24
"""Up to so many rows of a decode step are quicker one by one than as arrays."""
WORD = (1 << 64) - 1

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
PageTable = npt.NDArray[np.int32]
"""[rows, pages of a row]."""


class TokenPool:
    """Pages of one device."""

    def __init__(self, pages: int, end_every: int | None) -> None:
        """One sampled token in `end_every` ends its sequence; None: rows run to their own limits."""
        self._sums: Hashes = np.zeros(pages, dtype=np.uint64)
        self._lasts: Indices = np.full(pages, -1, dtype=np.int64)
        self._powers = _powers(POWERS_START)
        # The same memory, for access to single elements.
        self._sum_of, self._last_of = self._sums.data, self._lasts.data
        self._power_of = self._powers.data
        self._steps: dict[int, Sequence[int]] = {}
        """The tokens of the last steps, oldest first."""
        self._table_bytes = b""
        self._table = memoryview(self._table_bytes)
        """The page table of the last step, as its column and by element."""
        self._end_every = end_every

    def beside(self) -> TokenPool:
        """Another device's view of the same pages: it has decode steps of its own."""
        other = TokenPool(1, self._end_every)
        other._sums, other._lasts = self._sums, self._lasts
        other._sum_of, other._last_of = self._sum_of, self._last_of
        return other

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """What a migration moves from page to page."""
        source, target = list(sources), list(targets)
        self._sums[target] = self._sums[source]
        self._lasts[target] = self._lasts[source]

    def forget_steps(self) -> None:
        self._steps.clear()

    def prefill(self, work: PrefillWork, tokens: range) -> StepOutput:
        """Write a chunk's tokens, sample the rows that end in it."""
        table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
        values = int32_array(work.tokens)
        rows, sums, lengths = [], [], []
        for row in chunk_rows(work, tokens):
            total = self._write(table[row.row], row, values[row.first : row.first + row.new_tokens])
            if row.ends:
                rows.append(row.row)
                sums.append(total)
                lengths.append(row.reused_tokens + row.new_tokens)
        return self._sample(work.sampling, rows, np.array(sums, np.uint64), np.array(lengths, np.int64))

    def _write(self, table: npt.NDArray[np.int32], row: ChunkRow, values: npt.NDArray[np.int32]) -> np.uint64:
        """The hash of a row with these values appended; kept in each page that they end in or fill."""
        first, end = row.reused_tokens, row.reused_tokens + row.new_tokens
        self._grow(end)
        base = np.uint64(0)
        if first:
            page = int(table[(first - 1) // PAGE_SIZE])
            base = self._sums[page] if self._lasts[page] == first - 1 else self._sums[page] ^ LOST
        sums = np.cumsum((values.astype(np.uint64) + ONE) * self._powers[first:end]) + base
        places = np.arange(first // PAGE_SIZE, (end - 1) // PAGE_SIZE + 1)
        lasts = np.minimum((places + 1) * PAGE_SIZE, end) - 1
        pages = table[places]
        self._sums[pages] = sums[lasts - first]
        self._lasts[pages] = lasts
        return np.uint64(sums[-1])

    def decode(self, work: DecodeWork) -> StepOutput:
        if len(work.requests) <= FEW_ROWS and work.sampling.greedy:
            return self._decode_few(work)
        output = self._decode_many(work)
        self.keep(work.step_id, int32_values(output.tokens))
        return output

    def keep(self, step_id: int, tokens: Sequence[int]) -> None:
        """For steps that follow, which are numbered upwards."""
        steps = self._steps
        steps[step_id] = tokens
        if len(steps) > 1 + KEPT_STEPS:
            del steps[next(iter(steps))]

    def _decode_few(self, work: DecodeWork) -> StepOutput:
        """As `_decode_many`, of greedy rows."""
        positions, tokens = int32_values(work.positions), self._tokens_of(work)
        sampled = self.decode_rows(self._table_of(work), work.pages_per_row, positions, tokens)
        self.keep(work.step_id, sampled)
        return StepOutput(int32_bytes(sampled))

    def steps_behind(self, work: DecodeWork, pages: RowPages | None, tokens: bytes) -> RowSteps:
        """Of greedy rows whose last step is `work`, which sampled these tokens, int32; their pages, if they
        are others by now."""
        if pages is None:
            pages = RowPages(work.page_table, work.pages_per_row)
        steps = StepsOfFew if work.rows <= FEW_ROWS else StepsOfMany
        return steps(self, pages, work, tokens)

    def decode_rows(
        self, table: memoryview, width: int, positions: Sequence[int], tokens: Sequence[int]
    ) -> list[int]:
        """Write the last tokens of greedy rows, whose pages are in a table of this width; sample the next."""
        longest = max(positions)
        if longest >= len(self._powers):
            self._grow(longest + 1)
        sum_of, last_of, power_of = self._sum_of, self._last_of, self._power_of
        pages, totals, first = [], [], 0
        for token, position in zip(tokens, positions, strict=True):
            page = table[first + (position - 1) // PAGE_SIZE]
            base = sum_of[page] if last_of[page] == position - 1 else sum_of[page] ^ LOST_VALUE
            totals.append(base + (token + 1) * power_of[position] & WORD)
            # The token before lies in the same page, but for the first one of a page.
            pages.append(page if position % PAGE_SIZE else table[first + position // PAGE_SIZE])
            first += width
        for page, position, total in zip(pages, positions, totals, strict=True):
            sum_of[page], last_of[page] = total, position
        return self._sample_few(totals)

    def _table_of(self, work: DecodeWork) -> memoryview:
        """The page table of a step, which is often the very one of the step before."""
        if work.page_table is not self._table_bytes:
            self._table_bytes = work.page_table
            self._table = memoryview(work.page_table).cast("i")
        return self._table

    def _tokens_of(self, work: DecodeWork) -> Sequence[int]:
        """The last token of each row of a step, which the step before may have sampled."""
        rows, sources = work.carried_rows, work.carried_from
        if not rows:
            return int32_values(work.tokens)
        kept = self._steps[work.after_step]
        if rows == sources and len(rows) == len(work.tokens):
            return kept[: len(work.requests)]  # the same rows, as most steps have them
        tokens = list(int32_values(work.tokens))
        for row, source in zip(int32_values(rows), int32_values(sources), strict=True):
            tokens[row] = kept[source]
        return tokens

    def _decode_many(self, work: DecodeWork) -> StepOutput:
        table = int32_array(work.page_table).reshape(work.rows, work.pages_per_row)
        values = int32_array(work.tokens)
        if work.carried_rows:
            values = values.copy()
            kept = self._steps[work.after_step]
            values[int32_array(work.carried_rows)] = [kept[row] for row in int32_values(work.carried_from)]
        positions = int32_array(work.positions).astype(np.int64)
        sums = self._append(table, positions, values)
        return self._sample(work.sampling, list(range(work.rows)), sums, positions + 1)

    def decode_arrays(self, table: PageTable, positions: Indices, values: Tokens) -> Tokens:
        """As `decode_rows`."""
        return self._tokens(_mix(self._append(table, positions, values)))

    def _append(self, table: PageTable, positions: Indices, values: Tokens) -> Hashes:
        """The hashes of rows with a token more each."""
        self._grow(int(positions.max()) + 1)
        rows = np.arange(len(positions))
        earlier = positions - 1
        before = table[rows, earlier // PAGE_SIZE]
        base = self._sums[before]
        lost = self._lasts[before] != earlier
        if lost.any():
            base[lost] ^= LOST
        sums: Hashes = base + (values.astype(np.uint64) + ONE) * self._powers[positions]
        pages = table[rows, positions // PAGE_SIZE]
        self._sums[pages] = sums
        self._lasts[pages] = positions
        return sums

    def _grow(self, positions: int) -> None:
        if positions > len(self._powers):
            self._powers = _powers(max(positions, 2 * len(self._powers)))
            self._power_of = self._powers.data

    def _sample(
        self, sampling: SamplingColumns, rows: list[int], sums: Hashes, lengths: Indices
    ) -> StepOutput:
        """One token for each of `rows`, whose contexts have these hashes and lengths."""
        if not rows:
            return StepOutput()
        mixed = _mix(sums)
        if not sampling.greedy:
            mixed = _with_chance(mixed, sampling, rows, lengths)
        tokens = self._tokens(mixed)
        if not sampling.extras:
            return StepOutput(tokens.tobytes())
        chosen = self._allowed(tokens.tolist(), mixed, sampling, rows)
        return StepOutput(int32_bytes(chosen), _logprobs(sampling, rows, lengths.tolist(), chosen))

    def _sample_few(self, totals: list[int]) -> list[int]:
        """`_tokens` of some hashes, which are mixed as `_mix` does it."""
        tokens, end_every = [], self._end_every
        for total in totals:
            mixed = (total ^ (total >> 30)) * MIX_ONE & WORD
            mixed = (mixed ^ (mixed >> 27)) * MIX_TWO & WORD
            mixed ^= mixed >> 31
            if end_every is not None and mixed % end_every == 0:
                tokens.append(END_TOKEN)
            else:
                tokens.append(LETTER_OF[(mixed >> 16) % len(LETTER_OF)])
        return tokens

    def _tokens(self, mixed: Hashes) -> Tokens:
        """Lower-case letters and spaces, now and then the end token."""
        tokens: Tokens = LETTERS[(mixed >> HIGH_BITS) % LETTER_COUNT]
        if self._end_every is not None:
            tokens[mixed % np.uint64(self._end_every) == 0] = END_TOKEN
        return tokens

    def _allowed(
        self, tokens: list[int], mixed: Hashes, sampling: SamplingColumns, rows: list[int]
    ) -> list[int]:
        """The tokens, drawn again where a row bans its own."""
        banned = {extras.row: int32_array(extras.banned).tolist() for extras in sampling.extras}
        for place, row in enumerate(rows):
            again = mixed[place : place + 1]
            while tokens[place] in banned.get(row, ()):
                again = _mix(again + np.uint64(1))
                tokens[place] = int(self._tokens(again)[0])
        return tokens


def _with_chance(mixed: Hashes, sampling: SamplingColumns, rows: list[int], lengths: Indices) -> Hashes:
    """Rows with a temperature depend on their seed, choice and position as well."""
    picked = np.array(rows)
    seeds = np.frombuffer(sampling.seed, dtype="<u8")[picked]
    choices = np.frombuffer(sampling.choice, dtype="<u4")[picked].astype(np.uint64)
    warm = np.frombuffer(sampling.temperature, dtype="<f4")[picked] > 0
    chance = _mix(seeds ^ _mix(lengths.astype(np.uint64)) ^ _mix(choices << np.uint64(32)))
    return np.where(warm, _mix(mixed ^ chance), mixed)


def _logprobs(
    sampling: SamplingColumns, rows: list[int], lengths: list[int], tokens: Sequence[int]
) -> tuple[RowLogprobs, ...]:
    """A certain token for each row that asks: this device knows no probabilities."""
    asked = {extras.row for extras in sampling.extras if extras.logprobs is not None}
    return tuple(
        RowLogprobs(row, length, token, 0.0, 1, (token,), (0.0,))
        for row, length, token in zip(rows, lengths, tokens, strict=True)
        if row in asked
    )


def _powers(count: int) -> Hashes:
    return np.cumprod(np.full(count, HASH_FACTOR, dtype=np.uint64), dtype=np.uint64)


def _mix(values: Hashes) -> Hashes:
    """A 64-bit finaliser (splitmix64): spreads every input bit over the result."""
    values = (values ^ (values >> SHIFTS[0])) * MIX_FACTORS[0]
    values = (values ^ (values >> SHIFTS[1])) * MIX_FACTORS[1]
    return values ^ (values >> SHIFTS[2])
