"""Configuration of the documentation: `make docs` builds it into `build/docs`, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # of generated.py

from dure import __version__

project = "dure"
author = "dure authors"
copyright = "dure authors"  # noqa: A001  # the name that Sphinx reads
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design", "generated"]
exclude_patterns = ["package.md"]  # the page of the package index
templates_path = ["_templates"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4  # the anchors that code hosts give headings

autodoc_mock_imports = ["accelerate", "lightning", "ray", "transformers"]  # frameworks of the integrations
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80

smartquotes = False  # of --flags

html_theme = "furo"
html_title = f"dure {release}"
html_static_path = ["_static"]
html_css_files = ["dure.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"
