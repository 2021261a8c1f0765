"""Model shapes: every preset is a deployment that all formats support, but for rows that are no whole blocks."""

from __future__ import annotations

import pytest

from cute_ep.api.errors import EPConfigError
from cute_ep.api.presets import PRESETS, preset_named, presets_named
from cute_ep.cli.common import config
from cute_ep.cli.demo_layer import cpu_preset
from cute_ep.layouts.maps.formats import FORMATS, formats_of


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_deployment(name: str, fmt: str, ranks: int) -> None:
    config(cpu_preset(PRESETS[name]), ranks, 64, fmt)
    if PRESETS[name].hidden % FORMATS[fmt].block:
        assert (name, FORMATS[fmt].block) == ("gpt-oss-120b", 128)
        assert fmt not in formats_of(PRESETS[name].hidden)
        return
    assert fmt in formats_of(PRESETS[name].hidden)
    cfg = config(PRESETS[name], ranks, 4096, fmt)
    assert (cfg.hidden, cfg.num_experts, cfg.top_k) == (
        PRESETS[name].hidden,
        PRESETS[name].num_experts,
        PRESETS[name].top_k,
    )


def test_presets_are_found_by_name_or_all_together() -> None:
    names = "deepseek-v3 kimi-k2 qwen3-235b qwen3-30b gpt-oss-120b mixtral-8x7b glm-4.5"
    assert list(PRESETS) == names.split(), "each has a name of its own"
    assert presets_named("all") == list(PRESETS.values())
    assert [preset.top_k for preset in presets_named("kimi-k2, gpt-oss-120b")] == [8, 4]
    with pytest.raises(EPConfigError, match=r"preset = 'gpt-2': must be one of deepseek-v3, kimi-k2"):
        preset_named("gpt-2")


def test_expert_weights_of_a_deepseek_v3_layer_have_22_5_gb() -> None:
    preset = PRESETS["deepseek-v3"]
    assert preset.num_experts * 3 * preset.hidden * preset.moe_hidden * 2 == 22_548_578_304
