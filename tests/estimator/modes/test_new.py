import pytest

from tekoa.estimator.cli import main


def test_the_file_names_itself_and_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["new", "own.py"]) == 0
    assert "tekoa train own.py" in capsys.readouterr().out
    text = (tmp_path / "own.py").read_text()
    assert "tekoa train own.py" in text
    assert "runs/own " in text
    assert "my_model" not in text
    assert main.main(["new", "own.py"]) == 2
    assert "'own.py' exists already" in capsys.readouterr().err
    assert (tmp_path / "own.py").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own"], "'own' must end in .py"),
        (["no/own.py"], "cannot be written: No such file or directory"),
        (["own.py", "--long", "--library=nnx"], "--long is for Linen only"),
        (["own.py", "--library=torch"], "--library must be one of nnx, linen, equinox"),
        ([], "new needs a file. Usage: tekoa new FILE"),
    ],
)
def test_mistakes_are_usage_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["new", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
