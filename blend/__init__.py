"""Fusion of context-free KV into a prompt. Knows tensors and one layer at a time; never storage."""
