"""Kernels compiled ahead of time: building cubins, and finding them."""
