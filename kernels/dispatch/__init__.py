"""Dispatch: tokens to the ranks that own their experts. `kernel` is the kernel, the others are its roles and parts."""
