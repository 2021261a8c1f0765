"""Waits of the host that end, for libraries whose own do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from cute_ep.api.errors import EPError

START_S = 300.0
"""How long ranks wait for each other in the start of an engine, which all of them have begun."""
LOOK_S = 0.001

Made = TypeVar("Made")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Look until it is true, at most so long; whether it is."""
    until = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return true


def within(seconds: float, call: Callable[[], Made], doing: str) -> Made:
    """call(), in a thread that is left alone when the time is over. EPError then, or the call's own error."""
    outcome: list[Made] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # raised below
            failure.append(error)

    thread = threading.Thread(target=work, name="cute_ep", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise EPError(f"could not {doing} in {seconds:g} s")
    return outcome[0]
