"""An opt-in look for NaN and infinities in what a rank dispatches: formats that quantise hide some of them."""

from __future__ import annotations

import torch

from cute_ep.api.calls import DispatchInput
from cute_ep.api.config import EPConfig
from cute_ep.api.host import host_list
from cute_ep.api.modes import no_modes
from cute_ep.api.row_tensors import payload_columns, payload_dtype, scale_dtype
from cute_ep.layouts.maps.formats import FLOAT32, Element, Format
from cute_ep.layouts.maps.routing import MAX_TOKENS_PER_RANK

NOTHING = 2**63 - 1
"""What has been found while there is nothing."""
CALL, TOKEN = 2 * MAX_TOKENS_PER_RANK, 2
"""A finding is CALL * call + TOKEN * token, + 1 of an infinity: the least one is of the first call, and of its first
token."""


class FiniteCheck:
    """What one rank's dispatches held that is not finite. All of it is on the device: the host waits in `take` only.

    It looks with torch's operations on the current stream, so it may be captured into a CUDA graph, whose replays then
    look again; a call keeps the number that it had when it was captured. The first finding is kept until `take`.
    """

    @torch.inference_mode(False)
    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        self._fmt, self._calls = cfg.format, 0
        with no_modes():
            self._found = torch.full((1,), NOTHING, dtype=torch.int64, device=device)
            self._first = torch.zeros(1, dtype=torch.int64, device=device)
            for tokens in sorted({1, min(64, cfg.max_tokens_per_rank)}):  # loads the kernels, while no rank waits
                for given in _examples(cfg, tokens, device):
                    self.look(given)
        self._calls = 0
        self._wait()  # later calls may be on other streams

    def look(self, given: DispatchInput) -> None:
        """Look at what the next dispatch sends."""
        self._calls += 1
        tokens = given.x.shape[0]
        if not tokens:
            return
        with no_modes():
            largest = _largest(self._fmt, given)
            places = torch.arange(tokens, dtype=torch.int64, device=largest.device) * TOKEN + CALL * self._calls
            found = (places + largest.isinf()).masked_fill_(largest.isfinite(), NOTHING).amin(dim=0, keepdim=True)
            self._found.scatter_reduce_(0, self._first, found, "amin")  # atomic: calls may be on several streams

    def take(self) -> str | None:
        """What was found since the last time, if anything. Waits for the current stream."""
        (found,) = host_list(self._found)
        if found == NOTHING:
            return None
        self._found.fill_(NOTHING)
        self._wait()  # before a call on another stream finds more
        call, rest = divmod(found, CALL)
        token, infinite = divmod(rest, TOKEN)
        what = "an infinity" if infinite else "a NaN"
        return f"token {token} of dispatch call {call} has {what} (calls since check_finite was set, first call 1)"

    def _wait(self) -> None:
        if self._found.is_cuda:
            torch.cuda.current_stream(self._found.device).synchronize()


def _largest(fmt: Format, given: DispatchInput) -> torch.Tensor:
    """[T] magnitudes of each token's elements or scale factors: NaN where one is NaN, else infinity where one is."""
    if given.scales is None:
        return torch.linalg.vector_norm(given.x, ord=torch.inf, dim=1)
    if fmt.scale is FLOAT32:
        largest = torch.linalg.vector_norm(given.scales, ord=torch.inf, dim=1)
    else:
        assert fmt.scale is not None
        largest = _nan_where(_is_nan(given.scales, fmt.scale).any(dim=1))
    if fmt.element.nan is not None:
        largest = torch.maximum(largest, _nan_where(_is_nan(given.x, fmt.element).any(dim=1)))
    if given.row_scales is not None:
        largest = torch.maximum(largest, given.row_scales.float().abs())
    return largest


def _is_nan(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Where one-byte numbers are NaN."""
    return (codes.view(torch.uint8) & element.magnitude) == element.nan


def _nan_where(broken: torch.Tensor) -> torch.Tensor:
    return torch.zeros(broken.shape, dtype=torch.float32, device=broken.device).masked_fill_(broken, torch.nan)


def _examples(cfg: EPConfig, tokens: int, device: torch.device) -> list[DispatchInput]:
    """Finite tokens, as bfloat16 and as they are quantised."""
    fmt, ids = cfg.format, torch.zeros((tokens, cfg.top_k), dtype=torch.int32, device=device)
    plain = DispatchInput(torch.zeros((tokens, cfg.hidden), dtype=torch.bfloat16, device=device), ids)
    if fmt.scale is None:
        return [plain]
    payload = torch.zeros((tokens, payload_columns(fmt, cfg.hidden)), dtype=torch.uint8, device=device)
    scales = torch.zeros((tokens, cfg.hidden // fmt.block), dtype=scale_dtype(fmt), device=device)
    row_scales = torch.zeros(tokens, dtype=torch.bfloat16, device=device) if fmt.row_scale else None
    return [plain, DispatchInput(payload.view(payload_dtype(fmt)), ids, scales=scales, row_scales=row_scales)]
