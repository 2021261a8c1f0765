"""Adapters to other libraries, in rooms: `cute_ep.integrations.<library>`. `common` has what several of them use.

A room imports its library when it is imported itself. It imports no other room but `common`, and nothing in the rest of
cute_ep imports a room. Of the core an adapter may use the public names of `cute_ep`, and of these modules the names in
`tests/project/test_imports.py`, none with an underscore:

| what | where |
| --- | --- |
| modes, formats, numbers of configurations, what the host waits for | `api.types`, `.config`, `.rounds`, `.host` |
| the checks of tensors that raise errors | `api.tensors`, `.row_tensors`, `.validate`, ... |
| counts: how many rows a routing brings to each rank; memory for them | `runtime.routes`, `.counts`, `api.carving` |
| which experts the rows of a batch are of | `runtime.labels` |
| the pool, where communicators are found, opened and closed | `runtime.pool`, `.group_pool`, `.local_pool`, `.gpus` |
| torch ops with gradients; all ranks of a process at once | `ops`; `distributed`, `adjoints` |
| what sums and gates compute | `runtime.sums`, `nn.gates` |
| numbers: limits, formats, words of tables | `layouts.maps`, `reference.routes` |
| parts of torch that move | `torch_internals` |
"""
