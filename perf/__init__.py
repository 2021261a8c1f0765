"""Measurements: `python -m perf.suite` takes them, `perf.report` puts them into the README. Not part of the package."""
