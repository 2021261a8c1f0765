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


def budgets_of(parser: argparse.ArgumentParser, given: str) -> list[int | None]:
    """Budgets of SMs, which commas part; None where the word is "all". Another word ends the program."""
    words = given.split(",")
    if not all(word == "all" or word.isdecimal() for word in words):
        parser.error(f"sms = {given}: must be numbers or all, with commas between them")
    return [None if word == "all" else int(word) for word in words]


def at_least_one(parser: argparse.ArgumentParser, **given: int) -> None:
    """End the program where a number of this name is less than 1."""
    for name, value in given.items():
        if value < 1:
            parser.error(f"{name} = {value}: must be at least 1")
