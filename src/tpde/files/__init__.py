"""Packing and unpacking files and model directories."""
