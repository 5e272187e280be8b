"""Settings of Sphinx, which builds the site from the pages of this folder.

Invariant: building needs no network and no setting outside this file.
"""

import re
from typing import Any

from opintercept import __version__

project = "opintercept"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
smartquotes_action = "D"  # dashes, but not quotes: headings quote code
myst_heading_anchors = 4  # links to headings, named as GitHub names them

add_module_names = False
autodoc_default_options = {
    # What a hook is called with, and by whom, is on the page of the core.
    "exclude-members": "pre, post, error, backward, enter, exit, end_step, work, learn, noted, reads, levels, fresh",
}
autodoc_member_order = "bysource"
autodoc_type_aliases = {"Hook": "Hook"}
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "opintercept"
html_copy_source = False
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
html_static_path = ["_static"]

# GitHub shows the pages as they are, so the table of contents is here and not in them.
CONTENTS = {
    "index": {
        "": ["start"],
        "Guides": [
            "guides/find-a-nan",
            "guides/float16-overflow",
            "guides/compare-two-runs",
            "guides/eager-and-compiled",
            "guides/flops-and-time",
            "guides/outliers",
            "guides/attention-maps",
            "guides/patching",
            "guides/test-matmuls",
            "guides/several-ranks",
            "guides/trainer-and-engine",
            "guides/explain-a-difference",
            "guides/your-own-hook",
            "guides/your-own-operator",
        ],
        "Tools": ["hooks", "commands", "integrations/index", "checksum", "runs"],
        "Reference": [
            "reference/index",
            "seen",
            "paths",
            "origin",
            "cost",
            "alternatives",
            "overflow",
            "how",
            "research",
            "troubleshooting",
        ],
        "For agents": ["agents"],
        "The project": ["contributing", "threads", "twins", "Benchmarks <benchmarks>", "changes"],
    },
    "integrations/index": {"": ["trainers", "perfetto", "prometheus"]},
    "reference/index": {"": ["core", "hooks", "runs", "testing"]},
}
# Files of the project outside this folder, and the pages that include them.
INCLUDED = {"CONTRIBUTING.md": "contributing.md", "benchmarks/README.md": "benchmarks.md", "CHANGELOG.md": "changes.md"}


def read_as_markdown(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn `name` of a docstring, which is Markdown's, into reStructuredText's ``name``."""
    text = re.sub(r"(?<![`:])`([^`]+)`(?!`)(?=(\w)?)", lambda m: f"``{m[1]}``" + "\\ " * bool(m[2]), "\n".join(lines))
    lines[:] = text.split("\n")


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Add the table of contents to a page, and let its links lead to pages of the site."""
    for caption, pages in CONTENTS.get(name, {}).items():
        options = [":hidden:", *[f":caption: {caption}"] * bool(caption)]
        source[0] += "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])
    for path, page in INCLUDED.items():
        source[0] = source[0].replace(f"../{path}", page) if name != page.removesuffix(".md") else source[0]


def setup(app: Any) -> None:
    """Read docstrings as Markdown before napoleon reads their sections, and pages with their tables of contents."""
    app.connect("autodoc-process-docstring", read_as_markdown, priority=400)
    app.connect("source-read", add_contents)
