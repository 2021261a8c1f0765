"""`deep_ep.utils`. With DEEPEP_SOURCE, folders as PATH has them, each of which holds a package `deep_ep`, modules that
are not here come from there: DeepEP's tests import `envs`, `math` and `testing`."""

import os

from cute_ep.integrations.deep_ep import EventHandle, EventOverlap

for folder in filter(None, os.environ.get("DEEPEP_SOURCE", "").split(os.pathsep)):
    __path__.append(os.path.join(folder, "deep_ep", "utils"))

__all__ = ["EventHandle", "EventOverlap"]
