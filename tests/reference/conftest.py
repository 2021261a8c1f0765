import torch

# These tests make many small tensors: 7 s with one OpenMP thread, up to 60 s with two on busy cores.
torch.set_num_threads(1)
