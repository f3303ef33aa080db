"""The ONNX Runtime backend: lowering passes from the portable graph to its fused operators."""
