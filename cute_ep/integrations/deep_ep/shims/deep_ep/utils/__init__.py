"""`deep_ep.utils`. With DEEPEP_SOURCE, the folder of a DeepEP checkout, modules that are not here come from there: its
tests import `envs` and `math`."""

from __future__ import annotations

import os

from cute_ep.integrations.deep_ep import EventHandle, EventOverlap

if "DEEPEP_SOURCE" in os.environ:
    __path__.append(os.path.join(os.environ["DEEPEP_SOURCE"], "deep_ep", "utils"))

__all__ = ["EventHandle", "EventOverlap"]
