"""From the portable graph to TensorRT engines; the same code for `tensorrt` and `tensorrt-rtx`."""
