"""Mistakes as changes of the sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """One change: `old`, which is in `file` exactly once, becomes `new`."""

    file: str
    old: str
    new: str

    def changed(self, text: str) -> str:
        """The file's text with the change; ValueError when it does not hold `old` exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        """Change the file below `root`; ValueError as of `changed`."""
        path = root / self.file
        path.write_text(self.changed(path.read_text()))
