"""What only a GPU can settle, in one run: `scripts/gpu_check`."""
