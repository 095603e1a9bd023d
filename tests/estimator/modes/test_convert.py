import json

import pytest

from tekoa.estimator.cli import main
from tekoa.estimator.cli.exit_codes import ExitCode


def test_convert_writes_a_t5x_checkpoint_that_can_be_evaluated(trained, tmp_path, capsys):
    assert main.main(["convert", str(trained), str(tmp_path), "--to=t5x"]) == 0
    assert (tmp_path / "checkpoint_25" / "checkpoint").is_file()
    command = ["eval", "mnist", f"--model_dir={tmp_path}", "--json"]
    assert main.main([*command, "--eval_pattern=digits://split=test"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step"] == 25


@pytest.mark.parametrize("name", ["native", "tekoa"])
def test_convert_writes_a_native_checkpoint_by_both_of_its_names(trained, tmp_path, name):
    assert main.main(["convert", str(trained), str(tmp_path), f"--to={name}"]) == 0
    assert (tmp_path / "checkpoint_25" / "tekoa.json").is_file()


def test_format_is_required(trained, tmp_path, capsys):
    assert main.main(["convert", str(trained), str(tmp_path)]) == ExitCode.USAGE
    assert "--to=native or --to=t5x" in capsys.readouterr().err
