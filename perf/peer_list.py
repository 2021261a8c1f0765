"""The other libraries that `perf.peers` measures: what each peer does, how long it may take, and what its processes
need. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CHAINED = "pair_chained"
"""`cute_ep.bench.measure.CHAINED`, without torch."""
NORMAL_SMS = 24
"""DeepEP's own default."""
NEW_NCCL = "nvidia-nccl-cu13==2.30.7"
"""What some libraries want instead of torch's NCCL. DeepEP V2's wheel refuses any other version."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
PLAIN_GRAPHS = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0"}
"""Captured NCCL operations are kernel nodes only. By default each adds an external event node, with which
cudaGraphLaunch may block, and the capture asks the other ranks about the buffers. Not allowed with it: an operation
outside a graph while a graph's launch is outstanding."""
ENVIRONMENT = NO_MULTICAST | PLAIN_GRAPHS
ENVIRONMENT |= {"NVSHMEM_REMOTE_TRANSPORT": "none", "OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}
"""Of all processes."""


@dataclass(frozen=True)
class Library:
    """What the processes of a library need.

    Attributes:
        works: the module of perf with a function for each of its peers.
        module: what they import of it; None: torch only.
        wheels: what pip installs for it, beside what comes with torch; dependencies are not followed.
        nvshmem: whether NVSHMEM's host library must be in the process before torch.
        new_nccl: whether NEW_NCCL takes the place of torch's NCCL.
        compiles: whether it needs nvcc at run time.
        environment: variables beside ENVIRONMENT.
    """

    works: str
    module: str | None = None
    wheels: tuple[str, ...] = ()
    nvshmem: bool = False
    new_nccl: bool = False
    compiles: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A way to use a library.

    Attributes:
        library: its name in LIBRARIES.
        does: what it does, for whoever reads its times.
        budget_s: its time, which ends it; compiling at run time is part of it.
        column: the column of tables where the fastest of several ways is shown; "": its own.
        way: how it differs from others of its column.
        sms: how many SMs it takes, where it takes a number of them.
    """

    library: str
    does: str
    budget_s: float
    column: str = ""
    way: str = ""
    sms: int | None = None


_NCCL_EP = ("nccl-extensions==0.1.0", "nccl4py==0.6.0", "cuda-core==1.0.0")
_FLASHINFER = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.11", "nvidia-ml-py")
_WINDOWS = {"NCCL_CUMEM_ENABLE": "1"}
"""Memory that NCCL's device API can map."""
LIBRARIES = {
    "nccl": Library("nccl_works"),
    "nccl_engines": Library("nccl_works", new_nccl=True, environment={"NCCL_CTA_POLICY": "ZERO"}),
    "nccl_new": Library("nccl_works", new_nccl=True),
    "deepep": Library("deepep_works", "deep_ep", ("tokenspeed-deepep==1.2.1.post20251110",), nvshmem=True),
    "deepep_v2": Library(
        "elastic_works",
        "deep_ep",
        ("tokenspeed-deepep==2.1.0.post20260801",),
        nvshmem=True,
        new_nccl=True,
        compiles=True,
        environment={"EP_DISABLE_GIN": "1", "EP_SUPPRESS_NCCL_CHECK": "1"} | _WINDOWS,
    ),
    "nccl_ep": Library("nccl_ep_works", "nccl.ep", _NCCL_EP, new_nccl=True, compiles=True, environment=_WINDOWS),
    "flashinfer": Library("flashinfer_works", "flashinfer", _FLASHINFER, compiles=True),
}
"""By the names of their folders in `perf.peers --packages`. DeepEP V2 does without NCCL's GPU-initiated networking,
and without its check that no other NCCL is in memory: torch's is, but the one that is loaded first serves all."""
_NORMAL = "worst-case row count (no host synchronisation); the caller quantises FP8, untimed; rows in source order; "
_ELASTIC = "DeepEP V2 without host synchronisation, its own number of SMs, copy and reduce epilogues on all; "
PEERS = {
    "nccl_ag_rs": Peer(
        "nccl",
        "NCCL all-gather of all tokens, reduce-scatter of BF16 rows; no multicast, symmetric memory or (unlike NCCL's "
        "default) registration of buffers in graphs; no expert order, no weighted sum on a rank",
        25.0,
        "nccl_ag_rs",
        "plain",
    ),
    "nccl_ag_rs_registered": Peer("nccl", "the same, registered buffers", 30.0, "nccl_ag_rs", "registered"),
    "nccl_ag_rs_windows": Peer("nccl", "the same, symmetric windows", 30.0, "nccl_ag_rs", "windows"),
    "nccl_ag_rs_new": Peer("nccl_new", "the same, windows of a newer NCCL", 30.0, "nccl_ag_rs", "new windows"),
    "nccl_ag_rs_engines": Peer(
        "nccl_engines", "the same, whose all-gather is by copy engines", 40.0, "nccl_ag_rs", "copy engines"
    ),
    "nccl_all_to_all": Peer(
        "nccl",
        "NCCL all_to_all of a BF16 row per (token, expert), known splits; with gather and weighted sum as unfused "
        "torch operations",
        45.0,
    ),
    "deepep_low_latency": Peer(
        "deepep", "DeepEP V1, low-latency kernels; quantises FP8; rows end as [local expert, slots, hidden]", 30.0
    ),
    "deepep_normal": Peer(
        "deepep",
        f"DeepEP V1, normal kernels, {NORMAL_SMS} SMs, default chunk sizes, {_NORMAL}no weighted sum on a rank",
        40.0,
        sms=NORMAL_SMS,
    ),
    "deepep_normal_tuned": Peer(
        "deepep", "the same, the fastest chunk sizes of its tuning loop for each size", 60.0, sms=NORMAL_SMS
    ),
    "deepep_normal_any_sms": Peer("deepep", "the same, also the fastest number of SMs", 90.0),
    "deepep_v2": Peer("deepep_v2", f"{_ELASTIC}rank-major rows", 300.0),
    "deepep_v2_expanded": Peer("deepep_v2", f"{_ELASTIC}expert-major rows, summed on their rank, unweighted", 300.0),
    "nccl_ep_low_latency": Peer(
        "nccl_ep", "NCCL EP, low latency, expert-major blocks, weighted sums; pairs only", 180.0
    ),
    "nccl_ep_high_throughput": Peer(
        "nccl_ep", "NCCL EP, high throughput, flat rows in a window; no weighted sum on a rank; pairs only", 180.0
    ),
    "flashinfer_one_sided": Peer(
        "flashinfer",
        "FlashInfer's one-sided all-to-all, padded rank-major rows, no weighted sum on a rank; pairs only",
        240.0,
    ),
}
FAMILIES = {
    "NCCL": ("nccl", "nccl_new", "nccl_engines"),
    "DeepEP": ("deepep",),
    "DeepEP V2": ("deepep_v2",),
    "NCCL EP": ("nccl_ep",),
    "FlashInfer": ("flashinfer",),
}
"""Libraries that share a column where only the fastest is shown. DeepEP is V1."""


def column_of(peer: str) -> str:
    """The column of tables that a peer belongs to."""
    return PEERS[peer].column or peer


def family_of(peer: str) -> str:
    """The family of libraries that a peer belongs to."""
    return next(name for name, libraries in FAMILIES.items() if PEERS[peer].library in libraries)
