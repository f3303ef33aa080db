"""Engines on a GPU: device memory, one stream, plans, captured rounds. Needs cuda.bindings."""
