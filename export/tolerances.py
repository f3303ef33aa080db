"""How far two computations of the same thing may differ, with the reason for each.

All are |a - b| / |b - mean(b)| in the 2-norm over all logits: 0 is equal, about 1 is unrelated.
Token ids and index arithmetic compare exactly and have no tolerance.
"""

from __future__ import annotations

# The graph in f32 arithmetic against the eager model with the same (rounded) weights: sums in
# another order. A wrong operator, position or mask is far beyond it.
EAGER = 2e-3
# The same graph, k + 1 rows at once against row by row: other kernels for other row counts.
ROWS = 1e-3
# The graph as the engine runs it against itself in f32 arithmetic. An engine that rounds each block
# of activations to int8 adds about 1 % a layer; a kernel that is wrong on this processor adds far
# more. One step for the whole of a layer's input rounds more coarsely than one for each block.
ENGINE = {"fp32": 1e-3, "int8-smoothquant": 0.35, "fp8": 0.35}
ENGINE |= dict.fromkeys(("int8", "int8-kv", "int4", "int4-gptq", "int4-awq"), 0.25)
# fp16 activations and caches against the same graph in f32 arithmetic, on ONNX Runtime's CPU.
HALF = 0.05
ENGINE |= dict.fromkeys(("fp16", "int4-128", "fp8-weight", "fp4"), HALF)
