"""Kernels of one rank by itself."""
