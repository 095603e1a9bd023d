"""What README and docs show of the command is what it prints.

Every block that begins with `$ ` is run, one after another in one directory per page. Lines must
be equal; accuracies may differ by 0.05 and losses by half, as they do between processors, speeds
and sizes by any amount. A line of `...` stands for any number of lines. Blocks that need the
reader's own data (`DIR`) are not run.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What depends on the machine: speeds, sizes, and the loss of a nearly perfect fit.
VARYING = re.compile(r"[\d.]+ steps/s|\d+ kB|\d\.\d+e-\d+")


def blocks(page):
    texts = re.findall(r"^```\w*\n(\$ .*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for text in texts if "DIR" not in text]


def calls(block):
    """Yields each command of a block with the lines shown below it."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *lines = part.rstrip("\n").split("\n")
        yield command, lines


def assert_shown(shown, printed, command):
    line_patterns = []
    for line in shown:
        if line == "...":
            line_patterns.append(r"(?:.*\n)*?")
        else:
            words = re.escape(VARYING.sub("VARYING", line)).replace("VARYING", "(?:VARYING)")
            line_patterns.append(re.sub(r"\d+\\\.\d+", lambda _: r"(\d+\.\d+)", words) + "\n")
    printed = re.sub(r" +$", "", VARYING.sub("VARYING", printed), flags=re.MULTILINE)
    match = re.fullmatch("".join(line_patterns), printed)
    assert match, f"{command} printed:\n{printed}\nshown:\n" + "\n".join(shown)
    numbers = [
        (float(number), 0.5 * float(number) if "loss" in line else 0.05)
        for line in shown
        for number in re.findall(r"\d+\.\d+", VARYING.sub("VARYING", line))
    ]
    for seen, (number, tolerance) in zip(match.groups(), numbers, strict=True):
        assert abs(float(seen) - number) <= tolerance, f"{command}: {seen} is shown as {number}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.name)
def test_the_output_shown_is_the_output_printed(page, tmp_path):
    folder = pathlib.Path(sys.executable).parent
    environment = {
        **os.environ,
        "XLA_FLAGS": "",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
    }
    for block in blocks(page):
        for command, shown in calls(block):
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}: {done.stdout}"
            assert_shown(shown, done.stdout, command)
