from tekoa.estimator.cli import main
from tekoa.estimator.model_file import names


def test_models_lists_every_bundled_model_with_its_summary(capsys):
    assert main.main(["models"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in rows] == list(names.BUNDLED)
