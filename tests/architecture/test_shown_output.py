"""What README and docs show of commands and programs is what they print.

Every block that begins with `$ ` is run, one after another in one directory per page. So is every
Python block that is followed by a block without a language: its output. Lines must be equal up to
spaces; accuracies may differ by 0.05, losses and rows of tables by half, as they do between
processors, speeds and sizes by any amount. A line of `...` stands for any number of lines. Blocks
that need the reader's own data (`DIR`) are not run.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from support.processes import python

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What depends on the machine: speeds, sizes, and the loss of a nearly perfect fit.
VARYING = re.compile(
    r"[\d.,]+ (?:steps|examples|tokens)/s|\d+ kB|\d\.\d+e-\d+|Compiled in [\d.]+ s"
)
IS_LOOSE = re.compile(r".*loss.*|[\d. ]+")


def blocks(page):
    texts = re.findall(r"^```\w*\n(\$ .*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for text in texts if "DIR" not in text]


def programs(page):
    """Pairs of a program and the output that is shown below it."""
    pattern = r"^```python\n((?:(?!^```).)*)^```\n\n```\n(?!\$ )(.*?)^```"
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


def calls(block):
    """Yields each command of a block with the lines shown below it."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *lines = part.rstrip("\n").split("\n")
        yield command, lines


def squeeze(line):
    return re.sub(r" +", " ", line).strip()


def assert_shown(shown, printed, command):
    line_patterns = []
    for line in map(squeeze, shown):
        if line == "...":
            line_patterns.append(r"(?:.*\n)*?")
        else:
            words = re.escape(VARYING.sub("VARYING", line)).replace("VARYING", "(?:VARYING)")
            line_patterns.append(re.sub(r"\d+\\\.\d+", lambda _: r"(\d+\.\d+)", words) + "\n")
    printed = "\n".join(map(squeeze, VARYING.sub("VARYING", printed).split("\n")))
    match = re.fullmatch("".join(line_patterns), printed)
    assert match, f"{command} printed:\n{printed}\nshown:\n" + "\n".join(shown)
    numbers = [
        (float(number), 0.5 * float(number) if IS_LOOSE.fullmatch(line) else 0.05)
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


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=lambda p: p.name)
def test_the_output_shown_is_the_output_of_the_program(page, tmp_path):
    for program, shown in programs(page):
        done = python("-c", program, cwd=tmp_path, env={"XLA_FLAGS": ""}, timeout=600)
        assert done.returncode == 0, done.stderr
        assert_shown(shown.rstrip("\n").split("\n"), done.stdout, "the program")
