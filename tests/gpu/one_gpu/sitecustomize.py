"""Every Python process with this folder on PYTHONPATH runs as a rank that shares GPU 0 (`tests.sharing`)."""

from tests.sharing import share_gpu

share_gpu()
