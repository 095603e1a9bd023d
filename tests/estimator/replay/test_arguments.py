import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay import arguments


def test_arguments_are_parsed_and_directories_must_exist(tmp_path):
    parser = arguments.Arguments("verify", "RUN")
    parser.add_argument("--fraction", type=arguments.fraction)
    parsed = parser.parse([str(tmp_path), "--fraction=0.5"])
    assert (parsed.RUN, parsed.fraction) == (str(tmp_path), 0.5)
    with pytest.raises(UsageError, match="'nowhere' does not exist"):
        parser.parse(["nowhere"])
    for text in ("0", "1.5", "-1", "x"):
        with pytest.raises(UsageError, match="verify: argument --fraction"):
            parser.parse([str(tmp_path), f"--fraction={text}"])
