"""Inductor takes the vector instructions that the CPU has: otherwise each process first compiles seven programs to find
out whether the compiler knows them."""

import os

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
