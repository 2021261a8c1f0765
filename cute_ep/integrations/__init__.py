"""Adapters to other libraries, in rooms: `cute_ep.integrations.<library>`. `common` has what several of them use.

A room imports its library when it is imported itself. It imports no other room but `common`, and nothing in the rest of
cute_ep imports a room. Of the core an adapter may use this, and no name with an underscore:

| what | where |
| --- | --- |
| the interface: configurations, communicators, modes, formats, gates | `api.config`, `.interface`, `.types`, `.gates` |
| the batch: buffers that dispatch fills, and what combine is given | `api.buffers`, `.dispatched` |
| errors, and the checks of tensors that raise them | `api.errors`, `.tensors`, `.row_tensors`, `.validate`, ... |
| counts: how many rows a routing brings to each rank | `runtime.routes`, `.counts` |
| the pool, where communicators are found, opened and closed | `runtime.pool`, `.group_pool`, `.local_pool`, `.gpus` |
| torch ops with gradients; all ranks of a process at once | `ops`; `distributed`, `adjoints` |
| what experts and sums compute | `runtime.local_ops`, `.sums`, `nn.gates` |
| numbers: limits, formats, words of tables | `layouts.maps`, `reference.routes` |
| copies to the host, and parts of torch that move | `api.host`, `torch_internals` |

`tests/project/test_imports.py` has the names.
"""
