"""Sphinx's configuration of the site. Neither the build nor the browser loads external resources."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this package is the extension

from posttrain import __version__

project = "Posttrain"
version = release = __version__
extensions = ["myst_parser", "handbook.weaving"]
myst_enable_extensions = ["colon_fence", "deflist"]
html_theme = "furo"
html_title = f"Posttrain {__version__}"
html_static_path = ["static"]
html_css_files = ["handbook.css"]
html_show_search_summary = False  # it fetches pages, which is not allowed for a page opened from disk
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False
html_domain_indices = html_use_index = False
myst_heading_anchors = 3  # `page.md#heading`, as in the repository
myst_links_external_new_tab = False
