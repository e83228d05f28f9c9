"""The configuration of Sphinx: `nox -s docs` makes docs/_build/html."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from docutils.utils.math import latex2mathml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generate  # noqa: E402

generate.write()

project = "extops"
copyright = "the extops authors"
version = release = generate.version()
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "_generated"]

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_custom_sections = ["Shape", "Source"]
napoleon_use_ivar = True
napoleon_use_rtype = False
python_display_short_literal_types = True

html_theme = "furo"
html_title = f"extops {release}"
html_static_path = ["_static"]
html_css_files = ["extops.css"]
html_show_sphinx = False
# Where the sources are, of which only CI knows.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    address = f"https://github.com/{repository}"
    html_theme_options = {
        "source_repository": address,
        "source_branch": "main",
        "source_directory": "docs/",
    }
    html_theme_options["announcement"] = f'<a href="{address}">{repository} on GitHub</a>'
html_copy_source = False
html_math_renderer = "mathml"


def mathml(latex: str, *, block: bool) -> str:
    """A formula as MathML, which browsers typeset themselves: no script, and no network."""
    return str(latex2mathml.tex2mathml(latex.replace(r"\_", "_"), as_block=block))


def visit_inline(translator: Any, node: Any) -> None:
    """Writes a formula within a line."""
    translator.body.append(mathml(node.astext(), block=False))
    raise SkipNode


def visit_block(translator: Any, node: Any) -> None:
    """Writes a formula on lines of its own."""
    formula = mathml(node.astext(), block=True)
    translator.body.append(f'<div class="formula">{formula}</div>')
    raise SkipNode


def setup(app: Any) -> None:
    """Tells Sphinx of the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
