"""What a user can choose: `--additional-config '{"cute_ep": {"mode": "exact"}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cute_ep import EPConfigError
from cute_ep.api.config import is_integer
from cute_ep.api.types import CombineMode
from cute_ep.integrations.common import checks
from cute_ep.integrations.common.checks import require

KEY = "cute_ep"


@dataclass(frozen=True)
class Options:
    """The same on all ranks.

    Attributes:
        mode: of combine, "partial" or "exact".
        static_rows: a call for which no routing can bring more rows to a rank gets memory for all of them, and the host
            does not wait. Otherwise, except while a CUDA graph is captured, the host asks for the number of rows.
        timeout_s: of the communicator.
        sms: SMs that its kernels may take; None: all.
    """

    mode: CombineMode = "partial"
    static_rows: int = 32768
    timeout_s: float = 60.0
    sms: int | None = None

    def __post_init__(self) -> None:
        mode, rows, timeout, sms = (f"additional_config[{KEY!r}][{field.name!r}]" for field in fields(self))
        checks.mode(mode, self.mode)
        checks.integer(rows, self.static_rows, 0, error=EPConfigError)
        checks.seconds(timeout, self.timeout_s)
        good = self.sms is None or (is_integer(self.sms) and self.sms > 0)
        require(good, "{} = {!r}: must be a positive integer or None", sms, self.sms, error=EPConfigError)

    @classmethod
    def of(cls, additional: Any) -> Self:
        """Those in vLLM's `additional_config`. EPConfigError: one is unknown, or breaks its rule."""
        given = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(given, Mapping):
            raise EPConfigError(f"additional_config[{KEY!r}] = {given!r}: must be a mapping of options")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise EPConfigError(f"additional_config[{KEY!r}][{name!r}]: must be one of {', '.join(known)}")
        return cls(**given)
