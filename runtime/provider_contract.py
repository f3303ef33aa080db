"""How the decoders for ONNX Runtime's CUDA provider differ from the contract: no size is computed.

What a call's shapes say comes as tensors that the executor fills when the call is bound, so that
no node of the graph reads a shape (engines.onnxruntime_cuda.row_inputs).
"""

from __future__ import annotations

from dataclasses import replace

from .contract import DRAFT_SAMPLING, NUM_LOGITS, RANK_LOGITS, GraphSpec, TensorSpec

PROVIDER_BACKEND = "onnxruntime-cuda"
PROVIDER_VERSION = "1.31"  # of onnxruntime-gpu, whose kernels the build looks at; or newer
QUERY_ROWS = TensorSpec(name="query_rows", dtype="int64", axes=("query_len",))  # 0, 1, 2, …
LOGIT_ROWS = TensorSpec(name="logit_rows", dtype="int64", axes=("num_logits",))  # the last ones
# In the host's memory. A bound of the cache rows that attention looks at: a bucket.
TOTAL_LENGTH = TensorSpec(name="total_length", dtype="int32", axes=(1,))
ROW_INPUTS = (QUERY_ROWS, LOGIT_ROWS, TOTAL_LENGTH)


def is_decoder(spec: GraphSpec) -> bool:
    return any(one.name.startswith("past_key_values.") for one in spec.inputs)


def provider_spec(spec: GraphSpec) -> GraphSpec:
    """The signature of the graph that stands for a decoder of the contract."""
    inputs = tuple(one for one in spec.inputs if one not in (NUM_LOGITS, *DRAFT_SAMPLING))
    return replace(spec, inputs=(*inputs, *ROW_INPUTS))


def draft_decoder(spec: GraphSpec) -> GraphSpec:
    """Of a draft step its decoder alone: the sampling tail behind it is a graph of its own."""
    caches = tuple(one for one in spec.outputs if one.name.startswith("present."))
    return replace(provider_spec(spec), outputs=(RANK_LOGITS, *caches))
