"""Combine: expert rows home to their source rank.

`kernel` is the kernel. Its roles are `send` and `recv`, or, where a launch has few SMs, those of a `pipeline`
(`produce`, `consume`); `pairs` compares rounds.
"""
