"""Data: tokenizers, sources, packing, and the loader whose row order no rank count changes."""
