"""Measurements: `python -m perf.suite` takes them, `perf.report` keeps them in perf/results and puts them into the
README and docs/performance.md. Not part of the package."""
