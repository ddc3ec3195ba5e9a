"""Budgets, places and predictions: sizes and rates in, a plan out. Pure: no tensors, no devices."""
