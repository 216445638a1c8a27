"""Kernels: the most expensive operations on keys and values, in torch, and in Triton for NVIDIA GPUs."""
