"""The GPUs that are here, and how many SMs of one may be used."""

from __future__ import annotations

import torch

from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.launch import FREE_SMS, RING_BYTES

KEPT_BYTES = 8 << 10
"""Shared memory of a CTA for all but its stages, at most, with what the system takes."""
FEW_FREE_SMS = 24
"""So many free SMs may be 3 in each of Hopper's 8 GPCs, where NCCL's clusters of 4 do not start unless the free SMs are
whole TPCs (docs/lessons.md, "Leave NCCL whole TPCs")."""


def check_gpu(argument: str, index: int) -> None:
    """EPConfigError, which begins with `argument`, where this machine has no GPU of that number."""
    gpus = torch.cuda.device_count()
    if index >= gpus:
        raise EPConfigError(f"{argument}: cuda:{index} is not here, the machine has {gpus} CUDA GPUs")


def sm_budget(device: str | torch.device, sms: int | None) -> int:
    """`sms`, or all that a GPU has; EPConfigError where it does not have so many."""
    have = torch.cuda.get_device_properties(device).multi_processor_count
    if sms is not None and not 1 <= sms <= have:
        raise EPConfigError(f"sms = {sms}: must be in [1, {have}], the SMs of {device}")
    return sms or have


def most_piped_ctas(device: torch.device, ranks: int) -> int:
    """Most CTAs of a rank that may each take all of an SM's shared memory, with so many ranks on the device.

    An SM's split of shared memory and L1 seems to be that of its TPC: beside 48 CTAs of one rank, an SM each, 48 CTAs
    with all of an SM's shared memory did not start (H200, 66 TPCs, 2026-11-27). So all other launches are taken to hold
    a TPC with each CTA: those of as many ranks, or of a second stream.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count // (2 * max(ranks, 2) - 1)


def ring_bytes(device: torch.device, ctas: int, ranks: int) -> int:
    """Shared memory for the stages of piped kernels: RING_BYTES, or as much as the GPU has; 0 where CTAs that take an
    SM each may find no place beside others (`most_piped_ctas`).

    Args:
        ctas: of a launch, at most.
        ranks: on the device.
    """
    if ctas > most_piped_ctas(device, ranks):
        return 0
    properties = torch.cuda.get_device_properties(device)
    return min(RING_BYTES, properties.shared_memory_per_block_optin - KEPT_BYTES)


def sms_over_nodes(device: torch.device, sms: int | None) -> int:
    """`sms`, which leave FREE_SMS to exchanges between nodes, or as many as do; EPConfigError for more."""
    have = sm_budget(device, None)
    if sms is not None and have - FREE_SMS < sms <= have:
        raise EPConfigError(
            f"sms = {sms}: must be at most {have - FREE_SMS} over nodes, which leaves {FREE_SMS} of {have} SMs free"
        )
    return sm_budget(device, max(1, have - FREE_SMS) if sms is None else sms)


def sms_beside_nccl(device: torch.device) -> int | None:
    """`sms` of `connect` where NCCL kernels run on other streams, as FSDP's and DDP's do: all of the GPU but FREE_SMS.
    None on a CPU. A call that waits with CTAs on every SM would keep out a collective that its peer has before its
    own call. NCCL's clusters of 4 start there (FEW_FREE_SMS)."""
    return max(1, sm_budget(device, None) - FREE_SMS) if device.type == "cuda" else None
