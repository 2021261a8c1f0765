"""Adapters to other libraries: each is imported on demand."""
