"""Kernels as source, compiled at first use, launched on the caller's stream (docs/notes/architecture.md)."""
