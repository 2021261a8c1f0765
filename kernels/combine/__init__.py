"""Combine: expert rows home to their source rank. `kernel` is the kernel, the others are its roles and parts."""
