"""Long runs and faults: `python -m tests.soak rounds` and `python -m tests.soak faults` (`make soak` is both)."""
