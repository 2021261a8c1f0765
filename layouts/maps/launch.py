"""What a CTA has and takes at a time: kernels are compiled for it, and the host counts CTAs by it."""

from __future__ import annotations

THREADS = 512
"""Threads of a CTA."""
WARPS = THREADS // 32
CTAS_PER_SM = 2
"""Kernels are compiled to fit this many CTAs on one SM (at most 64 registers a thread)."""
WIDE_THREADS = CTAS_PER_SM * THREADS
"""Threads of a wide CTA, which takes a whole SM. Kernels of dispatch and combine may be launched with it (`maxntid` in
the cubins)."""
WIDE_WARPS = WIDE_THREADS // 32
PIPELINES, PIPELINE_WARPS = 3, 5
"""Of a CTA of the piped kernels of combine, which takes a whole SM: in each pipeline one warp has rows copied into
shared memory, and CONSUMERS take them."""
PIPED_THREADS = 32 * PIPELINES * PIPELINE_WARPS
"""Of such a CTA (at most 128 registers a thread)."""
CONSUMERS, CONSUMER_SEGMENTS = PIPELINE_WARPS - 1, 7
"""How many there are, and segments (512 bytes) of a row that each of them takes."""
LEAST_STAGES, MOST_STAGES = 2, 8
"""Rows that a pipeline has in shared memory at a time; without room for so many, and for one that is put aside, there
are no pipelines."""
RING_BYTES = 212 << 10
"""Shared memory for these, where the GPU has it, beside what a kernel was compiled for."""
FREE_SMS = 8
"""SMs without a CTA of ours where ranks share a GPU, for all that they have to run between their calls."""
TILE_ELEMENTS = 1024
"""Elements of one row that a warp converts at a time (`kernels/local/swiglu.py`)."""
PIECE_BYTES = 32768
"""Bytes that a CTA copies at a time (`kernels/local/copy.py`)."""
