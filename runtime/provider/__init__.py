"""Runs a bundle's graphs on ONNX Runtime's CUDA provider: bound to device memory, no fallback."""
