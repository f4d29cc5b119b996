"""transformers' models with our loader's weights, under the names that tests use."""

from muxk.models.transformers_model import as_transformers_model as reference_model
from muxk.models.transformers_model import greedy_output as reference_output

__all__ = ["reference_model", "reference_output"]
