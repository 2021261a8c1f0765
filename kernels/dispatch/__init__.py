"""Dispatch: tokens to the ranks that own their experts.

`kernel` is the kernel. Its roles are `route` (entries and counts), `send` (rows, by way of `prefetch`) and `recv`. This
one chooses slices (`recv_schedule`), finds their rows (`row_tables`), copies them (`row_copy`) and leaves the rest to
`outputs` and `scale_tiles`.
"""
