"""Sphinx configuration of the docs site. `make docs` runs it from the root of the checkout, and documents that code.

The source folder is the root, not docs/: pages link to the README.md of code folders, which are then pages too.
"""

from __future__ import annotations

from fuseopt import __version__

project = "fuseopt"
project_copyright = "the authors of fuseopt, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "**/README.md"]
exclude_patterns = [".*", "build", "dist", "docs/_static", "docs/_extra", "**/__pycache__", "**/*.egg-info"]

myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]
# Docstrings write code in single backticks.
default_role = "code"
pygments_style = "friendly"
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"fuseopt {__version__}"
html_static_path = ["_static"]
html_extra_path = ["_extra"]  # an index.html at the top that leads to docs/index.html
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
