"""Sphinx's configuration: `make docs` renders the documents and, from the docstrings, the API reference.

The source folder is the root of the repository, so that a link between README, docs/ and a source file means the same
here as in a checkout. Every warning is an error.
"""

from __future__ import annotations

import pydoc
import re
from typing import Any

from docutils.nodes import Node
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock

import cute_ep
from cute_ep.integrations.common import versions

project = "cute_ep"
author = "The cute_ep authors"
version = release = cute_ep.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]

root_doc = "README"
include_patterns = ["*.md", "docs/**", "perf/results/README.md"]
exclude_patterns = [".*", "build", "dist", "cute_ep", "kernels", "layouts", "tests"]  # folders not to walk through
myst_heading_anchors = 3

html_theme = "alabaster"
html_theme_options = {"page_width": "80rem", "sidebar_width": "16rem", "body_max_width": "none"}
html_copy_source = html_show_copyright = html_show_sphinx = smartquotes = False
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# one page for all, whether these are installed or not
autodoc_mock_imports = ["cutlass", "flashinfer", "megatron", "pydantic", "sglang", "torchtitan", "transformers", "vllm"]
versions.require = lambda *library, **rule: None  # what is mocked has no version
versions.has = lambda *library: True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_param = False  # lists, in which "alpha, limit: ..." is one entry, as it is in the docstring
napoleon_custom_sections = [("Attributes", "params_style")]
default_role = "py:obj"  # a name in backticks is a link where the reference has it

nitpicky = True
nitpick_ignore_regex = [
    # types of other projects: the build needs no network
    (r"py:.*", r"(torch|torchtitan|collections|pathlib|cutlass|flashinfer|sglang|vllm)\..*"),
    (r"py:class", r"cute_ep\..*\.(Plan|Origin|Memory|Stamp|Arena|Mail|PlainBatch)"),  # internal, in public annotations
    (r"py:class", r"IntTuple|Tiler"),  # nested tuples of integers; tuples of layouts
    (r"py:class", r"cute_ep\.layouts\.maps\.record\.Int"),  # an integer of Python or of the DSL
    (r"py:exc", r".*, .*"),  # "EPInputError, EPTimeout: as `dispatch`."
]

CONTENTS = """
```{toctree}
:hidden:
:caption: API

docs/api/connecting
docs/api/communicators
docs/api/batches
docs/api/rows
docs/api/ops
docs/api/nn
docs/api/transformers
docs/api/integrations
docs/api/distributed
docs/api/errors
docs/api/hooks
docs/api/formats
docs/api/layouts
docs/api/testing
```

```{toctree}
:hidden:
:caption: Documents

docs/use
docs/ops
docs/layer
docs/adapters
docs/transformers
docs/deep_ep
docs/sglang
docs/vllm
docs/training
docs/flashinfer
docs/nodes
docs/timeouts
docs/reference
docs/numerics
docs/performance
docs/lessons
docs/tour
docs/glossary
docs/protocol
docs/memory_model
docs/seed_map
perf/results/README
CONTRIBUTING
CHANGELOG
```
"""


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Pages for the sidebar. Not in the README itself, where a reader of the file would see the directive."""
    if docname == root_doc:
        source[0] += CONTENTS


def to_restructured_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Prepare a docstring for Napoleon, which takes words before a colon in a result's or a property's first line for
    its type, where ours are text; and turn Markdown tables into literal blocks."""
    first = [0] if what in ("attribute", "data", "property") else []
    for at in first + [at + 1 for at, line in enumerate(lines[:-1]) if line == "Returns:"]:
        lines[at] = re.sub(r"\S", r": \g<0>", lines[at], count=1)
    text, table = [], False
    for line in lines:
        if line.startswith("|") and not table:
            text += ["::", ""]
        table = line.startswith("|")
        text.append(f"    {line}" if table else line)
    lines[:] = text


def name_in_backticks(app: Sphinx, env: object, node: Any, contnode: Node) -> Node | None:
    """Code, where the reference does not have the name; but a name that begins with `cute_ep.` must exist."""
    if node["reftype"] != "obj":
        return None
    with mock(autodoc_mock_imports):
        known = not node["reftarget"].startswith("cute_ep.") or pydoc.locate(node["reftarget"]) is not None
    return contnode if known else None


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", to_restructured_text, priority=100)
    app.connect("missing-reference", name_in_backticks)
