"""Packed weights in host memory and on disk, and how a device gets them: pinned, mapped, read by workers."""
