"""A scalar model of combine, one token at a time in numpy's float32, and rows and weights for it."""

import ml_dtypes
import numpy as np
import torch

from cute_ep import reference
from cute_ep.api.config import EPConfig
from tests.cases import Case

MODES = ["exact", "partial"]
NUMPY_TYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16, torch.float32: np.float32}
NAN_BITS = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF}


def expert_outputs(batches, hidden: int, seed: int = 0, excess: int = 0) -> list[torch.Tensor]:
    """Random rows of mixed magnitude and sign; padding and the `excess` rows at the end are NaN."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for batch in batches:
        count = batch.num_rows.item()
        rows = torch.randn(count, hidden, generator=generator)
        rows *= torch.randint(-6, 6, (count, 1), generator=generator).exp2()
        rows[batch.src_info[:, 0] < 0] = torch.nan
        results.append(torch.cat([rows, torch.full((excess, hidden), torch.nan)]).bfloat16())
    return results


def signed_weights(ids: list[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(one.shape, generator=generator) for one in ids]


def dispatched(case: Case, weights: bool = True):
    inputs = case.inputs()
    ids = [one.topk_ids for one in inputs]
    given = signed_weights(ids) if weights else None
    if weights and case.skip:
        given = [given[0].clone() for _ in given]
    return reference.dispatch(case.cfg, [one.x for one in inputs], ids, None, given)


def as_torch(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers converted by numpy, with the one NaN."""
    with np.errstate(over="ignore"):
        converted = values.astype(NUMPY_TYPES[dtype])
    bits = torch.from_numpy(converted.view(np.int32 if dtype == torch.float32 else np.int16).copy())
    bits[torch.from_numpy(np.isnan(values))] = NAN_BITS[dtype]
    return bits.view(dtype)


def served_slots(cfg: EPConfig, batches, source: int) -> list[list[tuple[int, int, int]]]:
    """Per token of `source` the (slot, owner, row) that come home."""
    local = cfg.num_experts // cfg.world_size
    found = []
    for token, experts in enumerate(batches[source].topk_ids.tolist()):
        owners = [(slot, expert // local) for slot, expert in enumerate(experts) if expert >= 0]
        if cfg.skip_a2a:
            owners = [(slot, owner) for slot, owner in owners if owner == source]
        place = 0 if cfg.skip_a2a else source
        found.append([(slot, owner, int(batches[owner].row_map[place, token, slot])) for slot, owner in owners])
    return found


def combine_scalar(cfg: EPConfig, rows, batches, weights, mode: str, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """The definition, one token at a time: numpy float32 operations round each product and each sum."""
    arrays = [one.float().numpy() for one in rows]
    results = []
    for source, factors in enumerate(weights):
        info = batches[source].src_info.tolist()
        shared = {token: row for row, (token, slot) in enumerate(info) if slot == cfg.top_k}
        out = np.zeros((batches[source].topk_ids.shape[0], cfg.hidden), dtype=np.float32)
        for token, served in enumerate(served_slots(cfg, batches, source)):
            owners = sorted({owner for _, owner, _ in served})
            groups = [owners] if mode == "exact" else [[owner] for owner in owners]
            partials = [np.zeros(cfg.hidden, dtype=np.float32)]
            for group in groups:
                total = np.zeros(cfg.hidden, dtype=np.float32)
                for slot, owner, row in served:
                    if owner in group:
                        product = np.float32(factors[token, slot].item()) * arrays[owner][row]
                        total = total + product
                partials.append(total if mode == "exact" else total.astype(ml_dtypes.bfloat16).astype(np.float32))
            for partial in partials[1:]:
                out[token] = out[token] + partial
            if token in shared:
                out[token] = out[token] + arrays[source][shared[token]]
        results.append(as_torch(out, dtype))
    return results
