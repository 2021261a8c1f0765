"""Stands in for torchtitan 0.3, as far as the adapter sees it: names, signatures, and how configurations are built."""

from __future__ import annotations

__version__ = "0.3.0"
