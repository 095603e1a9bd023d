"""Extension of mkdocstrings that shows doctests as code blocks.

Without it, Markdown reads `>>>` as a quotation.
"""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """Returns a docstring with a code fence around each doctest."""
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class FenceDoctests(griffe.Extension):
    """Puts the doctests of every docstring into code fences."""

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
