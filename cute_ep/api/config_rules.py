"""What is asked of configurations: their memory, whether ranks' are alike, and in which words they are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

from cute_ep.api.config import EPConfig, is_integer
from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.routing import MAX_EXPERTS, MAX_TOKENS_PER_RANK


def check_config(cfg: object) -> None:
    """EPConfigError unless it is an EPConfig."""
    if not isinstance(cfg, EPConfig):
        raise EPConfigError(f"cfg = {type(cfg).__name__}: must be an EPConfig")


def differing(cfgs: Sequence[EPConfig]) -> dict[str, list]:
    """The fields in which some of the configurations differ, each with the values of all, in their order."""
    values = {field.name: [getattr(cfg, field.name) for cfg in cfgs] for field in fields(EPConfig)}
    return {name: given for name, given in values.items() if any(one != given[0] for one in given)}


def check_alike(cfgs: Sequence[EPConfig]) -> None:
    """EPConfigError unless all ranks, in their order, have the same configuration: names the fields that differ."""
    lines = []
    for name, values in differing(cfgs).items():
        owners: dict[object, list[int]] = {}
        for rank, value in enumerate(values):
            owners.setdefault(value, []).append(rank)
        lines.append(f"{name} = {', '.join(f'{value!r} on rank(s) {ranks}' for value, ranks in owners.items())}")
    if lines:
        raise EPConfigError(f"{'; '.join(lines)}: must be the same on all ranks")


def memory_bytes(cfg: EPConfig) -> int:
    """Bytes of symmetric memory that one rank allocates for `cfg` (device memory, for the communicator's life).

    The regions of `cute_ep.layouts.maps.arena.Arena`, and over nodes those of `cute_ep.layouts.maps.mail.Mail`, each
    rounded up to whole pages of 2 MiB, the granularity of memory that is mapped (a driver with a larger one rounds up
    further); docs/reference.md has the formula. `transport = "nvshmem"` takes 2 MiB more.

    Raises:
        EPConfigError: `cfg` is no EPConfig.
    """
    check_config(cfg)
    return int(cfg.arena.allocation) + (cfg.mail.allocation if cfg.nodes > 1 else 0)


def tokens_per_rank(batch_tokens: int, world_size: int, *, skip_a2a: bool = False) -> int:
    """`max_tokens_per_rank` for a batch whose tokens are shared out evenly to ranks, rounded up.

    4196 tokens over 8 ranks are 525 a rank, 10 over 3 are 4. Some rank has fewer where they do not divide.

    Args:
        batch_tokens: tokens of the largest batch, all ranks together.
        world_size, skip_a2a: as in `EPConfig`; with `skip_a2a` every rank is given all tokens.

    Raises:
        EPConfigError: an argument breaks its rule, or a rank would have more tokens than `EPConfig` takes.
    """
    if not (is_integer(batch_tokens) and batch_tokens >= 1):
        raise EPConfigError(f"batch_tokens = {batch_tokens!r}: must be a positive integer")
    if not (is_integer(world_size) and 1 <= world_size <= MAX_EXPERTS):
        raise EPConfigError(f"world_size = {world_size!r}: must be an integer in [1, {MAX_EXPERTS}]")
    if not isinstance(skip_a2a, bool):
        raise EPConfigError(f"skip_a2a = {skip_a2a!r}: must be True or False")
    ranks = 1 if skip_a2a else int(world_size)
    tokens = -(-int(batch_tokens) // ranks)
    if tokens > MAX_TOKENS_PER_RANK:
        raise EPConfigError(
            f"batch_tokens = {batch_tokens}: must not exceed {ranks * MAX_TOKENS_PER_RANK}, {MAX_TOKENS_PER_RANK} for "
            "each rank; split the batch, on all ranks"
        )
    return tokens


_FIELD = re.compile(rf"\b({'|'.join(field.name for field in fields(EPConfig))})(?= = )")


def in_words(text: str, names: Mapping[str, str]) -> str:
    """A message of EPConfig or of `connect`, with an interface's names of the fields that it gives values of."""
    return _FIELD.sub(lambda found: names.get(found[1], found[1]), text)
