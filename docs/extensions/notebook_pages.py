"""Hook of MkDocs that shows the notebooks of `docs/notebooks` as pages, with their outputs."""

import pathlib
import re

import nbconvert
from mkdocs.structure.files import File

_LINK = re.compile(r"(\]\([^)\s]*)\.ipynb\)")
_COLOR_CODES = re.compile(r"\x1b\[[\d;]*m")


def on_files(files, config):
    """Adds a page, and its pictures, for each notebook; the notebook itself can be downloaded."""
    for path in sorted(pathlib.Path(config.docs_dir, "notebooks").glob("*.ipynb")):
        pages, pictures = convert(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=pages))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(text, page, **_):
    """Makes links to notebooks, which work in the repository, links to their pages."""
    return text if page.file.generated_by else _LINK.sub(r"\1.md)", text)


def convert(path):
    """Returns the Markdown of a notebook, and its pictures by file name."""
    resources = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    text, resources = nbconvert.MarkdownExporter().from_filename(str(path), resources)
    title, _, rest = _COLOR_CODES.sub("", text).strip().partition("\n")
    link = f"[Download this notebook]({path.name})"
    return f"{title}\n\n{link}\n{rest}\n", resources["outputs"]
