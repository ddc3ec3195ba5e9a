"""Packed weights: where their bytes are, and how they are decoded on the CPU or a GPU."""
