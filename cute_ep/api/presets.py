"""What a command line names: shapes of published Mixture-of-Experts models, formats, numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ep.api.errors import EPConfigError
from cute_ep.layouts.maps.formats import FORMATS


@dataclass(frozen=True)
class Preset:
    """The routed MoE layer of one model.

    Attributes:
        name: key on the command line.
        hidden: elements of a token row.
        moe_hidden: intermediate size of one expert (columns of gate, and of up).
        num_experts: routed experts of one layer; shared experts are not counted.
        top_k: experts a token chooses.
    """

    name: str
    hidden: int
    moe_hidden: int
    num_experts: int
    top_k: int


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("deepseek-v3", 7168, 2048, 256, 8),
        Preset("kimi-k2", 7168, 2048, 384, 8),
        Preset("qwen3-235b", 4096, 1536, 128, 8),
        Preset("qwen3-30b", 2048, 768, 128, 8),
        Preset("gpt-oss-120b", 2880, 2880, 128, 4),
        Preset("mixtral-8x7b", 4096, 14336, 8, 2),
        Preset("glm-4.5", 5120, 1536, 160, 8),
    )
}


def preset_named(name: str) -> Preset:
    """The preset called `name`; EPConfigError lists the known ones."""
    if name not in PRESETS:
        raise EPConfigError(f"preset = {name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def presets_named(names: str) -> list[Preset]:
    """The presets of a comma-separated list, or all of them for "all"; EPConfigError as `preset_named`."""
    if names == "all":
        return list(PRESETS.values())
    return [preset_named(name.strip()) for name in names.split(",")]


def format_names(text: str) -> tuple[str, ...]:
    """Names of a comma-separated list of formats; EPConfigError lists the known ones."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in FORMATS:
            raise EPConfigError(f"format = {name!r}: must be one of {', '.join(FORMATS)}")
    return names


def token_counts(text: str) -> list[int]:
    """Numbers >= 1 of a comma-separated list, else EPConfigError."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(counts) < 1:
        raise EPConfigError(f"tokens = {text!r}: must be positive numbers with commas between them")
    return counts
