"""Graphs for ONNX Runtime's CUDA provider: fp16, and nothing in them that it leaves to the CPU."""
