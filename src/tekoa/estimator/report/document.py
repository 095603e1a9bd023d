"""The frame of a page: title, style, script, and the button for light and dark."""

import html
import pathlib
import time
from typing import Any

from tekoa.core import messages

_THEME_BUTTON = (
    '<button type="button" class="theme" aria-label="Light or dark">◐ <span>auto</span></button>'
)


def document(title: str, elements: list[str], *, is_live: bool = False) -> str:
    """Returns a self-contained HTML page.

    Args:
        title: The title, as text.
        elements: The body, as HTML.
        is_live: Whether the page asks its server for changes.
    """
    live = ' data-live="true"' if is_live else ""
    note = '<span class="live" role="status">live</span>' if is_live else ""
    return (
        f'<!doctype html><html lang="en"{live}><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f'<body><div class="tools">{note}{_THEME_BUTTON}</div><main>{"".join(elements)}</main>'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def footer() -> str:
    """Returns the last line of a page: when it was written."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"<footer>Written by tekoa page, {now}. Long curves are reduced to their extremes.</footer>"
    )


def escape(value: Any) -> str:
    """Returns a value as text for HTML, in which control characters are escaped too.

    >>> escape('a<b')
    'a&lt;b'
    """
    return html.escape(messages.printable(value))


def _asset(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text()
