"""Tables and their cells as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perf.cases import QUICK_FORMATS


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) + "\n"


def by_tokens(sizes: Sequence[int], rows: Mapping[str, Sequence[str]]) -> str:
    """A Markdown table with a column for each number of tokens a rank, and cells by row; without rows and columns that
    are empty."""
    kept = [place for place in range(len(sizes)) if any(cells[place] for cells in rows.values())]
    head = ("tokens per rank", *(str(sizes[place]) for place in kept))
    return markdown(head, [(name, *(cells[place] for place in kept)) for name, cells in rows.items() if any(cells)])


def time_cell(time: float | None) -> str:
    """Microseconds in a cell, which is empty where nothing was measured."""
    return "" if time is None else f"{time:.1f}"


def partial_name(fmt: str) -> str:
    """Pairs with partial combine as tables and plots name them; the first format says that it is the default mode."""
    return f"{fmt} partial (default)" if fmt == QUICK_FORMATS[0] else f"{fmt} partial"
