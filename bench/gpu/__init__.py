"""Checks, measurements and traces for a GPU, and what brings them to a machine without a network; see docs/gpu.md."""
