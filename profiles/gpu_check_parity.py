"""Stage 3: what the card computes is what it should: operators against torch's, a small model against
transformers under forced tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from muxk.kernel.devices.cuda_streams import first_line
from muxk.kernel.work import (
    PAGE_SIZE,
    DecodeWork,
    Phase,
    PrefillWork,
    RowExtras,
    SamplingColumns,
    int32_bytes,
)
from muxk.models.config import ModelConfig
from muxk.models.cuda_batch import Batch, decode_tables, tables_of, upload
from muxk.models.cuda_choice import attention_of, kernels_for
from muxk.models.cuda_kernels import AttentionShape, TorchAttentionKind, TorchKernels, empty_kv_layer
from muxk.models.cuda_load import RandomCardWeights, load_cuda_runner
from muxk.models.llama import tensor_names
from muxk.models.ops import Heads
from muxk.profiles.gpu_check_rig import Rig, TimeBox

TOLERANCE = 0.02
"""Of the largest number of the reference: bfloat16 keeps 8 bits, and products are summed in another order."""
LOGPROB_TOLERANCE = 0.25
"""In nats, of single tokens of a model in bfloat16 against float32."""
LOGPROB_MEAN_TOLERANCE = 0.03
SMALL = ModelConfig(  # heads of the size of the 8B's, so that one build of attention serves all stages
    architecture="llama",
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=1024,
    vocabulary=1003,
    rope_theta=10_000.0,
    rms_epsilon=1e-5,
    tied_embeddings=False,
    max_context_tokens=1024,
)
PROMPT_TOKENS = 61
FORCED_STEPS = 8


def check_parity(rig: Rig, box: TimeBox) -> dict[str, Any]:
    found = box.found
    found["tolerance"] = TOLERANCE
    checks: dict[str, Callable[[], dict[str, Any]]] = {**dict(_operators(rig)), "model": lambda: _model(rig)}
    for name, check in checks.items():
        box.check()
        try:
            found[name] = check()
        except Exception as error:
            found[name] = {"failed": first_line(error)}
    found["all_within"] = all(
        value.get("within", False) for value in found.values() if isinstance(value, dict)
    )
    return found


def _compared(got: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    off = float((got.float() - wanted.float()).abs().max())
    scale = float(wanted.float().abs().max())
    return {"largest_error": off, "largest_value": scale, "within": off <= TOLERANCE * max(scale, 1e-6)}


def _made_up(rig: Rig, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(rig.device).to(rig.dtype)


def _operators(rig: Rig) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    kernels, reference = kernels_for(rig.device), TorchKernels()
    rows, hidden = 33, 4096 if not rig.dry else 64

    def norm() -> dict[str, Any]:
        x, weight = _made_up(rig, rows, hidden), _made_up(rig, hidden)
        outs = torch.empty_like(x), torch.empty_like(x)
        for own, out in zip((kernels, reference), outs, strict=True):
            own.rms_norm(x, weight, 1e-5, out)
        return _compared(*outs)

    def add_norm() -> dict[str, Any]:
        x, added, weight = _made_up(rig, rows, hidden), _made_up(rig, rows, hidden), _made_up(rig, hidden)
        outs = torch.empty_like(x), torch.empty_like(x)
        for own, out in zip((kernels, reference), outs, strict=True):
            own.add_rms_norm(x.clone(), added, weight, 1e-5, out)
        return _compared(*outs)

    def silu() -> dict[str, Any]:
        gate_up = _made_up(rig, rows, 2 * hidden)
        outs = [torch.empty(rows, hidden, dtype=rig.dtype, device=rig.device) for _ in range(2)]
        for own, out in zip((kernels, reference), outs, strict=True):
            own.silu_mul(gate_up, out)
        return _compared(*outs)

    yield f"rms_norm ({kernels.name})", norm
    yield "add_rms_norm", add_norm
    yield "silu_mul", silu
    yield "decode_attention", lambda: _attention(rig, _decode_batch(rig))
    yield "prefill_attention", lambda: _attention(rig, _prefill_batch(rig))


def _decode_batch(rig: Rig) -> Batch:
    contexts = np.array([1, 16, 17, 300], dtype=np.int32)
    table = _table(contexts)
    return upload(decode_tables(np.zeros(4, dtype=np.int32), contexts - 1, table, 4), rig.device)


def _prefill_batch(rig: Rig) -> Batch:
    new, reused = (7, 40, 129), (0, 16, 33)
    table = _table(np.array(new) + np.array(reused))
    tokens = np.zeros(sum(new), dtype=np.int32)
    return upload(tables_of(tokens, new, reused, table), rig.device)


def _table(contexts: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Pages of each row in an order that is not that of their numbers."""
    each = -(-int(contexts.max()) // PAGE_SIZE)
    numbers = 1 + np.random.default_rng(0).permutation(len(contexts) * each)
    return numbers.astype(np.int32).reshape(len(contexts), each)


def _attention(rig: Rig, batch: Batch) -> dict[str, Any]:
    heads = Heads(8, 2, 128, 1e-5)
    shape = AttentionShape(heads, (None,), rig.dtype, rig.device, rig.partitions.units)
    pages = int(batch.pages.max()) + 1
    kv = empty_kv_layer(pages, heads.kv, heads.dim, rig.dtype, rig.device)
    kv.keys.copy_(_made_up(rig, *kv.keys.shape))
    kv.values.copy_(_made_up(rig, *kv.values.shape))
    queries = _made_up(rig, len(batch.tokens), heads.queries, heads.dim)
    kind = attention_of(shape)
    outs = torch.zeros_like(queries), torch.zeros_like(queries)
    for own, out in zip((kind, TorchAttentionKind(shape)), outs, strict=True):
        own.planner(rig.partitions.units).plan(batch)(queries, kv, None, out)
    rig.settle()
    return {"kind": kind.name, **_compared(*outs)}


# --- a model ---


def _model(rig: Rig) -> dict[str, Any]:
    """Log-probabilities of given tokens: of a prompt in prefill, then of forced tokens in decode."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, SMALL.vocabulary, PROMPT_TOKENS + FORCED_STEPS).astype(np.int32)
    weights = RandomCardWeights(SMALL, rig.device, rig.dtype, seed=3)
    runner = load_cuda_runner(
        weights,
        rig.torch_device,
        rig.dtype,
        device_units=rig.partitions.units,
        pages=40,
        chunk_tokens_max=128,
        rows_max=4,
    )
    wanted = _reference(weights, tokens)
    stream = rig.lane(Phase.DECODE, rig.partitions.units)
    got: list[float] = []
    expected: list[float] = []
    with stream.current():
        lane = runner.open_lane(Phase.PREFILL, rig.partitions.units)
        runner.capture(lane, 4)
        rig.settle()
        prompt = runner.prefill(lane, _prompt(tokens[:PROMPT_TOKENS]), range(PROMPT_TOKENS), range(4), 1)
        rig.settle()
        for told in prompt.read().prompt_logprobs:
            got.append(told.logprob)
            expected.append(float(wanted[told.position - 1, told.token]))
        for place in range(PROMPT_TOKENS, len(tokens)):
            pending = runner.decode(lane, _step(tokens, place), place)
            rig.settle()
            [told] = pending.read().logprobs
            got.append(told.logprob)
            expected.append(float(wanted[place, told.token]))
    runner.close()
    off = np.abs(np.array(got) - np.array(expected))
    within = off.max() <= LOGPROB_TOLERANCE and off.mean() <= LOGPROB_MEAN_TOLERANCE
    return {
        "tokens": len(got),
        "operators": runner.operators_name,
        "largest_logprob_error": float(off.max()),
        "mean_logprob_error": float(off.mean()),
        "within": bool(within),
    }


def _reference(weights: RandomCardWeights, tokens: np.ndarray[Any, Any]) -> torch.Tensor:
    """transformers' log-probabilities after each token, in float32 on the host."""
    import transformers

    config = weights.config
    own = transformers.LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_epsilon,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_context_tokens,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(own).eval()
    state = {name: weights.tensor(name).float().cpu() for name in tensor_names(config)}
    model.load_state_dict(state)
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def _prompt(tokens: np.ndarray[Any, Any]) -> PrefillWork:
    pages = -(-len(tokens) // PAGE_SIZE) + 1
    table = int32_bytes(range(1, pages + 1))
    sampling = _greedy(RowExtras(0, logprobs=1))
    return PrefillWork(
        1, (1,), int32_bytes(tokens), (len(tokens),), (0,), table, pages, sampling, prompt_logprobs=((0, 1),)
    )


def _step(tokens: np.ndarray[Any, Any], place: int) -> DecodeWork:
    """Feeds the token at a place, whatever was sampled before it."""
    pages = -(-len(tokens) // PAGE_SIZE)
    table, one = int32_bytes(range(1, pages + 1)), int32_bytes([place])
    fed = int32_bytes(tokens[place : place + 1])
    sampling = _greedy(RowExtras(0, logprobs=1))
    return DecodeWork(place, 1, (1,), fed, one, table, pages, place + 1, sampling)


def _greedy(extras: RowExtras) -> SamplingColumns:
    one = np.ones(1, dtype=np.float32).tobytes()
    return SamplingColumns(bytes(4), one, bytes(4), bytes(8), bytes(4), greedy=False, extras=(extras,))
