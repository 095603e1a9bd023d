"""Hook of MkDocs that turns formulas into MathML, which browsers show without any script.

Formulas are written in LaTeX, `$...$` in a line and `$$...$$` on lines of their own.
"""

import html
import re

from latex2mathml import converter

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(text, **_):
    """Replaces the formulas of a page."""
    return _FORMULA.sub(_to_mathml, text)


def _to_mathml(match):
    display = "block" if match[1] == "div" else "inline"
    return converter.convert(html.unescape(match[2]).strip(), display=display)
