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


def ring_bytes(device: torch.device, ctas: int) -> int:
    """Shared memory for the stages of piped kernels: RING_BYTES, or as much as the GPU has. 0 where so many CTAs, those
    of all ranks on the device, leave fewer than FREE_SMS SMs: then partial combine, which is the default, is faster
    without pipelines. Of 4096 tokens it takes 216 us with them and 215 without on 124 SMs, 217 and 205 on 131; exact
    combine 676 and 799, 675 and 712 (2 x H200, 132 SMs, 2026-11-27).
    """
    properties = torch.cuda.get_device_properties(device)
    if ctas > properties.multi_processor_count - FREE_SMS:
        return 0
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
