import pathlib
import re

import pytest

pytestmark = pytest.mark.slow

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "loops.md"


def test_the_code_of_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert out.startswith("10 ")
