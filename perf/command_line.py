"""What command lines of this folder have in common."""

from __future__ import annotations

import argparse
from collections.abc import Collection


def words_of(parser: argparse.ArgumentParser, option: str, given: str, known: Collection[str]) -> list[str]:
    """The words of an option, which commas part. An unknown one ends the program, as other mistakes do."""
    words = given.split(",")
    if unknown := set(words) - set(known):
        parser.error(f"{option} = {', '.join(sorted(unknown))}: must be out of {', '.join(known)}")
    return words
