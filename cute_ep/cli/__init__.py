"""The sub-commands of `cute-ep`: each module has `add_arguments(parser)` and `run(args, console) -> int`.

Modules import torch inside `run`, so that help texts appear at once.
"""
