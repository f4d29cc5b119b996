"""transformers' models with our loader's weights, under the names that tests use."""

from __future__ import annotations

from typing import Any

import torch
from muxk.models.transformers_model import as_transformers_model as reference_model
from muxk.models.transformers_model import greedy_output as reference_output

__all__ = ["greedy_gap", "reference_model", "reference_output"]


def greedy_gap(model: Any, prompt: list[int], output: list[int]) -> float:
    """How far an output is from the one that transformers' `generate` gives greedily.

    0 when each token has the largest logit given the tokens before it, so that it is that output; else the
    most that a token's logit is short of the largest. One forward pass, where `generate` takes one a token.
    """
    tokens = torch.tensor([prompt + output[:-1]])
    with torch.inference_mode():
        logits = model(tokens, logits_to_keep=len(output)).logits[0]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())
