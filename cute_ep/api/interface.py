"""What every communicator does, on GPUs and on the CPU: the type that `connect` and `connect_local` return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from types import TracebackType
from typing import NoReturn, Self

import torch

from cute_ep.api.buffers import DispatchBuffers, routed_shape
from cute_ep.api.calls import DispatchInput, SumOptions, row_input
from cute_ep.api.config import EPConfig
from cute_ep.api.config_rules import memory_bytes
from cute_ep.api.dispatched import Dispatched
from cute_ep.api.errors import EPError, EPInputError
from cute_ep.api.finite import FiniteCheck
from cute_ep.api.flags import Flags
from cute_ep.api.host import is_capturing, refuse_capture
from cute_ep.api.provenance import Origin
from cute_ep.api.rounds import PendingCombine, PendingDispatch, Plan, Rounds
from cute_ep.api.types import CombineMode
from cute_ep.api.validate import check_input
from cute_ep.api.validate_combine import check_sent
from cute_ep.layouts.maps.routing import Phase
from cute_ep.layouts.maps.variants import NO_HOOKS, Hooks


class EPCommunicator(ABC):
    """One rank of an expert-parallel group. Made by `connect` or `connect_local`.

    Every rank makes the same calls in the same order. On a GPU a call only enqueues work, on the current stream or on
    `stream`. Tensors are on `device`, and contiguous but for rows that dispatch is given. A call checks its arguments
    first: after an EPInputError from it nothing has been sent and the communicator is usable. Calls compute no
    gradients: an argument that requires one is refused while gradients are enabled, so call under `torch.no_grad()`.
    autocast changes nothing.

    A rank that waits longer than `cfg.timeout_s` gives up: the next call or `synchronize` raises EPTimeout, and the
    communicator is unusable afterwards. What is found wrong with the contents of tensors (EPInputError) is raised by
    `synchronize` only, so that one rank's bad input does not stop the others; on the CPU calls also refuse contents
    that no kernel checks (docs/use.md, "One process per GPU"). After `close` every method but `close` raises EPError;
    so does every call after one that an interrupt (Ctrl-C) ended while it was being launched. As a context manager it
    closes itself.

    A communicator cannot be copied or pickled.

    Attributes:
        cfg: the group's configuration.
        rank: this rank, 0 <= rank < cfg.world_size.
        device: where all tensors are.
        stream: where several ranks share a GPU the stream on which this one's calls run, which waits for the caller's
            but not the other way round. None on the CPU.
        hooks: functions compiled into the kernels.
        group: what the ranks of this process that are connected with each other have in common: the same object.
        origin: by which its batches know it.
    """

    cfg: EPConfig
    rank: int
    device: torch.device
    group: object
    origin: Origin
    stream: torch.cuda.Stream | None = None
    hooks: Hooks = NO_HOOKS
    _closed: bool = False

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether the communicator cannot be used any more: a wait has timed out, a launch came out of order, or a call
        was interrupted."""

    @property
    @abstractmethod
    def shares_device(self) -> bool:
        """Whether other ranks of the group are on the same device in this process. Results of a call are then in place
        after `synchronize`; otherwise work that the caller's stream is given next, or on the CPU the caller, finds
        them."""

    @cached_property
    def ones(self) -> torch.Tensor:
        """Ones, float32, of the shape of `DispatchBuffers.weights`: with them combine adds a token's rows up as they
        are. Nothing may write them, and streams need not wait for them. EPError where the first use is captured."""
        refuse_capture(self.device, "ones")
        with torch.inference_mode(False):
            made = torch.ones(routed_shape(self.cfg), dtype=torch.float32, device=self.device)
        if made.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()
        return made

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def check_finite(self) -> bool:
        """Whether dispatches look for NaN and infinities in what this rank sends; False, and may be set at any time.

        Formats that quantise hide some of them (docs/reference.md, "NaN and infinities"). A call that finds one sends
        as it would without the check, so no rank waits for this one, and the next `synchronize` raises EPInputError
        with the first token of the first such call: "rank 2: token 17 of dispatch call 5 has a NaN". The check reads
        `x` once more with operations of torch on the current stream, and takes about a dozen of their launches a call;
        of rows that come quantised it reads elements and scale factors, and needs memory for as many bytes. CUDA graphs
        that were captured with it look in each replay, also once it is off.

        Raises:
            EPInputError: set to what is neither True nor False.
            EPError: set while a CUDA graph is being captured, or after `close`.
        """
        return self._check_finite

    @check_finite.setter
    def check_finite(self, value: bool) -> None:
        self._check_usable()
        if not isinstance(value, bool):
            raise EPInputError(f"check_finite = {value!r}: must be True or False")
        if is_capturing(self.device):
            raise EPError("check_finite: must be set before a CUDA graph is captured")
        if value and self._finite is None:
            self._finite = FiniteCheck(self.cfg, self.device)  # kept for good: a graph may write to its memory
        self._check_finite = value

    @abstractmethod
    def allocate(self, capacity: int | None = None) -> DispatchBuffers:
        """Uninitialised output memory, to pass as `out`.

        Args:
            capacity: rows; None: as many as any routing can bring, `cfg.max_rows`. Where there are blocks, the rows of
                all, a multiple of the groups.

        Raises:
            EPInputError: `capacity` is no number of rows, or makes no blocks.
            EPTimeout: a wait had timed out.
        """

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | Dispatched | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
        frame: int | None = None,
    ) -> Dispatched:
        """Send this rank's tokens to their experts and receive the tokens for its own experts, in one launch.

        Args:
            x: [T, hidden] bfloat16, 0 <= T <= max_tokens_per_rank (T may differ between ranks); with `scales`, rows
                that are in the dispatch format already (`QuantizedRows.payload`). Rows may lie apart, or all be one
                (`expand`): the last dimension has stride 1, the first row and the distance of two rows are multiples of
                16 bytes.
            topk_ids: [T, top_k] int32 or int64 expert ids; -1 masks an entry. So does an id out of range, which
                `synchronize` reports; one that does not fit 32 bits is reported and counts as its lower half. Read
                again by combine: leave them until then.
            router_weights: [T, top_k] float32 (any type with the `router_weights` hook); travel along, so that combine
                may use them; exact combine reads them again too. Give ones for a plain sum: partial combine of
                expert-major rows, the default, refuses batches without them.
            input_scale: the format's global scale G, a number or float32[1] on the device (with the `input_scale` hook
                a tensor of any type); None: 1.
            out: buffers from `allocate`, or those of a batch that is no longer needed, overwritten; none of them shares
                memory with what the call reads. None allocates new ones.
            scales, row_scales: what belongs to quantised rows (`QuantizedRows`); they travel unchanged.
            frame: over nodes, how many rows each rank sends to every other node, the same on all ranks: at least the
                tokens of any rank. Fewer rows are fewer bytes. None: `cfg.max_tokens_per_rank`. On one node it has no
                effect.

        Returns:
            The rows for this rank's experts; valid once the stream has run, on the CPU once all ranks have made the
            call. Rows and scale blocks behind the last keep what they held. If more rows arrive than `out` holds, all
            rows of this rank are lost: `num_rows` is 0, combine returns NaN for every token that has one of them, and
            `synchronize` raises. Of blocks only the rows that find no room are lost.

        Raises:
            EPInputError: an argument breaks its contract. Nothing was launched.
            EPTimeout: an earlier call's wait had timed out.
        """
        given = DispatchInput(x, topk_ids, router_weights, input_scale, scales, row_scales, frame)
        return self._dispatch(given, out.buffers if isinstance(out, Dispatched) else out)

    def plan_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        out: DispatchBuffers | Dispatched | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
        frame: int | None = None,
    ) -> Plan[Dispatched]:
        """All of `dispatch` but the launch; arguments and errors are the same."""
        given = DispatchInput(x, topk_ids, router_weights, input_scale, scales, row_scales, frame)
        return self._plan_dispatch(given, out.buffers if isinstance(out, Dispatched) else out)

    def dispatch_async(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        router_weights: torch.Tensor | None = None,
        input_scale: float | torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
        frame: int | None = None,
    ) -> PendingDispatch:
        """The sending half of `dispatch`; arguments and errors are the same. At most two may be outstanding before
        their `dispatch_wait`."""
        given = DispatchInput(x, topk_ids, router_weights, input_scale, scales, row_scales, frame)
        again = self._send_dispatch_again(given)
        if again is not None:
            return again
        self._check_usable()
        self._dispatches.check_send()
        check_input(self.origin, given)
        return self._send_dispatch(given)

    def dispatch_wait(
        self, pending: PendingDispatch | None = None, out: DispatchBuffers | Dispatched | None = None
    ) -> Dispatched:
        """The receiving half of `dispatch`, in the order of sending; same bytes as the fused call.

        Args:
            pending: what the oldest `dispatch_async` returned that was not received; None: that one, also where what it
                returned was lost. A round that nobody wants any more is received and dropped.
            out: as of `dispatch`; each batch in flight needs buffers of its own.

        Raises:
            EPInputError: `pending` is not this rank's oldest unreceived dispatch, there is none, or `out` does not fit.
            EPTimeout: as `dispatch`.
        """
        self._check_usable()
        buffers = out.buffers if isinstance(out, Dispatched) else out
        return self._receive_dispatch(self._dispatches.oldest(pending, self.rank), buffers)

    def combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: CombineMode = "partial",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Bring expert outputs home and sum them with the router weights, in one launch.

        Args:
            rows: [N >= num_rows, hidden] bfloat16, row i the expert's output for row i of `dispatched.tokens`. On a GPU
                it is not checked that N is enough, `num_rows` is on the device: rows that are missing come home as NaN.
            dispatched: what this communicator's dispatch returned for these rows; on all ranks of the same round.
            router_weights: [T, top_k] float32 (any type with the `router_weights` hook), in exact mode only; None: the
                weights that this rank gave to dispatch.
            mode: the same on all ranks. "partial" sums on the expert's rank first, weighted and in float32, rounds that
                sum to bfloat16 and sends one row per rank; "exact" sums K rows at the source in float32: more bytes,
                one rounding per rank less, and sums that do not depend on where experts are; "unweighted" returns the
                rows themselves. Rank-major rows come home in "partial" mode only.
            out: [T, hidden], or unweighted [T, top_k, hidden]; overwritten; None allocates it.
            dtype: bfloat16, float16 or float32, the type of the output when `out` is None.
            epilogue_data: what the `epilogue` hook reads, on this device.

        Returns:
            [T, hidden]; zero where a token has only masked entries. Unweighted: [T, top_k, hidden], zero where an entry
            is masked.

        Raises:
            EPInputError, EPTimeout: as `dispatch`. In partial mode also for `router_weights`, and for expert-major rows
                whose dispatch this rank gave none; in exact mode where there are none.
        """
        return self._combine(rows, dispatched, mode, SumOptions(router_weights, out, dtype, epilogue_data))

    def plan_combine(
        self,
        rows: torch.Tensor,
        dispatched: Dispatched,
        router_weights: torch.Tensor | None = None,
        mode: CombineMode = "partial",
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> Plan[torch.Tensor]:
        """All of `combine` but the launch; arguments and errors are the same."""
        return self._plan_combine(rows, dispatched, mode, SumOptions(router_weights, out, dtype, epilogue_data))

    def combine_async(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode = "partial"
    ) -> PendingCombine:
        """The sending half of `combine`; arguments and errors are the same. At most two may be outstanding before
        their `combine_wait`."""
        again = self._send_combine_again(rows, dispatched, mode)
        if again is not None:
            return again
        self._check_usable()
        self._combines.check_send()
        check_sent(self.origin, dispatched, mode)
        return self._send_combine(rows, dispatched, mode)

    def combine_wait(
        self,
        pending: PendingCombine | None = None,
        router_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        epilogue_data: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The receiving half of `combine`, in the order of sending; same bytes as the fused call.

        Args:
            pending: as of `dispatch_wait`, from `combine_async`.
            router_weights, out, dtype, epilogue_data: as of `combine`.

        Raises:
            EPInputError: `pending` is not this rank's oldest unreceived combine, there is none, or an argument breaks
                its contract. The round stays outstanding, for another call.
            EPTimeout: as `dispatch`.
        """
        self._check_usable()
        oldest = self._combines.oldest(pending, self.rank)
        return self._receive_combine(oldest, SumOptions(router_weights, out, dtype, epilogue_data))

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for this rank's work and raise what was found wrong.

        Raises:
            EPTimeout: a peer did not arrive in time; names the peers, the phase, and what was awaited and seen.
            EPError: a fused launch found a round that was sent and not received, as where graphs are replayed in
                another order than captured. Nothing was sent; the communicator is unusable, and its peers time out. Or
                in a combine another rank returned rows of another dispatch round than that of this rank's batch; the
                sums are wrong and the communicator is unusable. On the CPU that is an EPInputError of the combine. Or a
                CUDA graph is being captured; the capture goes on.
            EPInputError: an expert id outside [-1, num_experts), more rows than the output buffers hold, or what
                `check_finite` found; once.
        """

    @abstractmethod
    def take_input_errors(self) -> dict[Phase, tuple[int, int, int]]:
        """What is known by now to be wrong with this rank's input, and then forgotten. Waits for nothing, so what a
        call has sent may be found wrong later. `synchronize` raises the same; this is for callers that never wait, or
        name the arguments otherwise.

        Returns:
            (index, expected, seen) of the latest of each kind out of `cute_ep.layouts.maps.routing.INPUT_ERRORS`, as
            `cute_ep.api.errors.raise_input_error` takes them; empty after `close`.
        """

    @abstractmethod
    def flags(self) -> Flags:
        """What this rank waits for, or will wait for in its next rounds, and has not come yet; for a rank that hangs or
        whose wait has timed out. Waits for nothing, so of a rank that runs it is a snapshot whose words may be of
        different moments. `EPTimeout.flags` is the same. docs/timeouts.md says how to read it.

        Raises:
            EPError: the communicator is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds; may be called again. On GPUs the memory of a group is given back when
        all its ranks have closed and their kernels have ended; ranks in processes of their own close together. On the
        CPU nobody is waited for.

        Raises:
            EPError: with one process per GPU, a rank did not come in twice `timeout_s`, or in 10 s if that is longer,
                or its process has ended. Or a CUDA graph is being captured; the communicator stays open.
        """

    # ---- what a backend fills in

    _dispatches: Rounds
    _combines: Rounds
    _check_finite: bool = False
    _finite: FiniteCheck | None = None

    def _look(self, given: DispatchInput) -> None:
        """Look at what is sent next, where the caller wants that."""
        if self._check_finite and self._finite is not None:
            self._finite.look(given)

    def _looked(self) -> list[str]:
        """What was found since the last time."""
        found = self._finite.take() if self._check_finite and self._finite is not None else None
        return [] if found is None else [found]

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise what keeps the communicator from taking a call."""

    @abstractmethod
    def _dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Dispatched:
        """`dispatch`."""

    def _send_row(self, row: torch.Tensor, topk_ids: torch.Tensor, out: DispatchBuffers) -> None:
        """`dispatch` of `row_input`, for `runtime.counts`, which gives the same ids and buffers each time and takes no
        batch. Of a row behind a first one only the address need be looked at: all are contiguous, aligned and long
        enough."""
        self._dispatch(row_input(row, topk_ids, self.cfg.hidden), out)

    @abstractmethod
    def _plan_dispatch(self, given: DispatchInput, out: DispatchBuffers | None) -> Plan[Dispatched]:
        """`plan_dispatch`."""

    def _send_dispatch_again(self, given: DispatchInput) -> PendingDispatch | None:
        """`dispatch_async`, where it need not be checked since one of the same kind was; None: it must be."""
        return None

    @abstractmethod
    def _send_dispatch(self, given: DispatchInput) -> PendingDispatch:
        """`dispatch_async`, of arguments that were checked."""

    @abstractmethod
    def _receive_dispatch(self, pending: PendingDispatch, out: DispatchBuffers | None) -> Dispatched:
        """`dispatch_wait` for the oldest round."""

    @abstractmethod
    def _combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> torch.Tensor:
        """`combine`."""

    @abstractmethod
    def _plan_combine(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode, options: SumOptions
    ) -> Plan[torch.Tensor]:
        """`plan_combine`."""

    def _send_combine_again(
        self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode
    ) -> PendingCombine | None:
        """`combine_async`, as above."""
        return None

    @abstractmethod
    def _send_combine(self, rows: torch.Tensor, dispatched: Dispatched, mode: CombineMode) -> PendingCombine:
        """`combine_async`, of a batch and a mode that were checked."""

    @abstractmethod
    def _receive_combine(self, pending: PendingCombine, options: SumOptions) -> torch.Tensor:
        """`combine_wait` for the oldest round."""

    # ---- as an object

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Which rank it is, where, of what group, and whether it can be used; asks no device."""
        cfg, name = self.cfg, type(self).__name__
        state = "closed" if self.closed else "failed" if self.failed else "open"
        sizes = f"hidden {cfg.hidden}, {cfg.num_experts} experts, top-{cfg.top_k}"
        place = f"rank {self.rank} of {cfg.world_size} on {self.device}"
        memory = "" if self.device.type == "cpu" else f", {memory_bytes(cfg) / 2**20:.0f} MiB"
        tokens = f"{cfg.max_tokens_per_rank} tokens per rank"
        return f"<{name} {place}: {cfg.dispatch_format}, {sizes}, {tokens}{memory}; {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copy, deepcopy, pickle and torch.save."""
        raise EPError(
            f"{self!r} cannot be copied or pickled: it is one end of memory that other ranks write to. Connect again "
            "where another is needed, and keep it out of what is copied or saved, such as a module's attributes "
            "(pass it to forward, or look it up in a table)"
        )
