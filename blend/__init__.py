"""Fusion: blends the KV of documents into a prompt. Works on tensors, one layer at a time, and never on storage."""
