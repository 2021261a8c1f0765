"""cute_ep: Mixture-of-Experts dispatch and combine between GPUs."""

__version__ = "0.1.0"
