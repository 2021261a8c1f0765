"""docs/seed_map.md: every documented name of upstream stands there, with a state that has a meaning, and every file,
symbol and test that a row names exists."""

from __future__ import annotations

import re

import pytest

from cute_ep.layouts.maps.variants import COMBINE_KERNELS, DISPATCH_KERNELS
from tests.processes import ROOT

TEXT = (ROOT / "docs" / "seed_map.md").read_text()
MAP, NOT_TAKEN = TEXT.split("## Not taken")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in MAP.splitlines()
    if line.startswith("| ") and "| --- |" not in line and not line.startswith("| `ep_comm` |")
]
STATES = re.findall(r"\*(\w+)\*:", MAP.split("## Entries")[0])
MISSING = {"missing", "later"}
FOLDERS = ("kernels", "layouts", "cute_ep")
UPSTREAM = """
    EP_DATA_READY_FLAG MAX_GPUS_PER_NODE EPLocalSyncCounters EPRoleSplit EPDispatchKernel EPCombineKernel
    TokenFormat BF16TokenFormat BlockwiseFP8TokenFormat NVBlockScaledTokenFormat NVFP4TokenFormat MXTokenFormat
    MXFP4TokenFormat token_size msg_size src_info_size src_info_offset topk_info_size topk_info_offset quant_size
    scales_offset total_size allocation_size init_smem_resources pad_expert_offsets copy_token_to_send_buf
    copy_msg_to_output_tensor copy_msg_tile_to_output_tensor monitor_and_signal_completion copy_and_send_tokens
    wait_for_arrivals_and_compute_offsets copy_received_tokens_to_output send_tokens_back wait_for_all_arrivals
    reduce_and_copy_to_output pack_shared_expert_inputs copy_shared_expert_outputs block_memcpy block_prefix_sum
    ep_signal_completion dispatch_async_kernel dispatch_wait_kernel dispatch_kernel combine_async_kernel
    combine_wait_kernel combine_kernel fused_silu_kernel fused_silu_fp8_kernel fused_silu_mxfp4_kernel
    fused_silu_mx_kernel fused_silu_nvfp4_kernel fused_silu_nvfp4_interleaved_kernel
    fused_silu_mxfp8_interleaved_kernel fused_silu_mxfp6_kernel DistributedEPDispatch DistributedEPDispatchFP8
    DistributedEPDispatchMXFP4 DistributedEPDispatchNVFP4 DistributedEPDispatchBlockScaledNV DistributedEPCombine
    RT_LAYOUT_2D EPConfig EPBatchManager EPCommInitializer calculate_ep_max_tokens_per_rank estimate_ep_memory_usage
    get_max_recv_tokens max_recv_tokens NUM_GROUPS mega_ffn.ep_fused mega_ffn.ep_fused_init mega_ffn.ep_fused_plan
    mega_ffn.ep_combine_send MODULAR_OVERLAP_SHARED_EXPERT MODULAR_EP_FUSED_MOE eplb_enabled node_id
    dispatch_quant_config gate_up_a_row_scales target context dev_ctxs use_shmem skip_a2a
""".split()
"""Names of the documented interface: structs, methods, functions, graph operations, Python layer, environment."""


def in_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.mark.parametrize("name", UPSTREAM)
def test_documented_names_of_upstream_stand_there(name: str) -> None:
    assert name in in_code(TEXT)


def test_rows_have_a_state_that_the_legend_explains() -> None:
    assert set(STATES) == {"works", "partly", "replaced", "new", "missing", "later"}
    assert len(ROWS) > 60 and all(len(row) == 4 for row in ROWS), [row for row in ROWS if len(row) != 4]
    assert len({name for part in (NOT_TAKEN, *(row[0] for row in ROWS)) for name in in_code(part)}) > 230
    for name, _, _, state in ROWS:
        assert re.match("|".join(STATES), state), name
        if state.startswith("partly") or state.startswith("missing"):
            assert re.match(r"\w+: .", state), f"{name}: says what is not there"


def test_what_is_missing_is_other_vendors() -> None:
    found = {name: state.partition(":")[0] for name, _, _, state in ROWS if state.partition(":")[0] in MISSING}
    assert found == {"`target`": "missing"}


def test_tests_that_rows_name_exist() -> None:
    for name, _, shown_by, state in ROWS:
        tests = in_code(shown_by)
        assert tests or state.startswith("later"), name
        for test in tests:
            path, _, function = test.partition("::")
            assert (ROOT / path).exists() and path.startswith("tests/"), test
            if function:
                assert f"def {function}(" in (ROOT / path).read_text(), test


def test_files_and_symbols_that_rows_name_exist() -> None:
    """Names are somewhere in the code; of a dotted one the last part is in a file that defines the first."""
    code = [path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    words = {*re.findall(r"\w+", "\n".join(code)), *DISPATCH_KERNELS, *COMBINE_KERNELS}
    found = 0
    for row, here, _, _ in ROWS:
        for name in in_code(here):
            found += 1
            if name.endswith((".py", "/")):
                assert (ROOT / name).exists(), (row, name)
                continue
            parts = re.findall(r"[A-Za-z_]\w*[*]?", name)
            assert all(part in words or part[-1] == "*" for part in parts), (row, name)
            if re.fullmatch(r"[A-Z]\w*\.\w+", name):
                owners = [text for text in code if re.search(rf"^class {parts[0]}\b", text, re.MULTILINE)]
                assert any(re.search(rf"\b{parts[1]}\b", text) for text in owners), (row, name)
    assert found > 150
