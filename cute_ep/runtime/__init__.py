"""The GPU backend: driver, communicator, how ranks connect, and operations on one GPU."""
