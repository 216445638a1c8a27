"""Kernels: the operations on keys and values that cost most, in torch, and in Triton for NVIDIA GPUs."""
