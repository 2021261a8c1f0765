"""Whether two kernel libraries hold the same machine code: `python -m tests.aot.compare OLD NEW`.

Instructions are compared in program order, without addresses, with the names of kernels and sections taken out, and
with parameters by name where both libraries name them alike.
For each kernel that differs one line says how: instructions, registers, spilled bytes. Exit code 1 when one differs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from .conftest import disassemble

MEASURED = ("registers", "spill_bytes", "smem_bytes")


def rows(folder: Path) -> dict[str, dict]:
    """The manifest's rows, by architecture and symbol."""
    return {
        f"{row['arch']} {row['symbol']}": row for row in json.loads((folder / "manifest.json").read_text())["variants"]
    }


def code(folder: Path, row: dict) -> list[str]:
    """The instructions of a kernel, without its name."""
    return [line.replace(row["symbol"], "KERNEL") for line in disassemble(folder / row["cubin"])]


def differences(old: Path, new: Path) -> Iterator[str]:
    """One line for each kernel of either library that is not the same in both."""
    before, after = rows(old), rows(new)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only in {old if name in before else new}"
            continue
        one, other = before[name], after[name]
        if one["sha256"] == other["sha256"]:
            continue
        codes = code(old, one), code(new, other)
        numbers = [f"{key} {one[key]} -> {other[key]}" for key in MEASURED if one[key] != other[key]]
        if codes[0] != codes[1]:
            changed = sum(line[:1] in "+-" for line in difflib.unified_diff(*codes, n=0, lineterm="")) - 2
            numbers.append(f"instructions {len(codes[0])} -> {len(codes[1])}, {changed} lines of difference")
        if numbers:
            yield f"{name}: {', '.join(numbers)}"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, help="folder with a manifest.json")
    parser.add_argument("new", type=Path, help="another one")
    args = parser.parse_args()
    found = list(differences(args.old, args.new))
    total = len(rows(args.new))
    sys.stdout.write("".join(f"{line}\n" for line in found) + f"{len(found)} of {total} kernels differ\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
