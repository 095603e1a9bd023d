import json

import numpy as np

import tekoa
from tekoa.estimator import cli


def test_it_learns_what_its_docstring_says(tmp_path, capsys):
    model_dir = f"--model_dir={tmp_path}"
    assert (
        cli.main(["train", "linear_regression", model_dir, "--random_seed=1", "--noprogress"]) == 0
    )
    last = tekoa.store.inspect(tmp_path)[-1]
    assert last.step == 200
    assert last.metrics["train/train_loss"] < 0.01
    assert last.metrics["train/valid_loss"] < 0.05
    capsys.readouterr()
    assert cli.main(["eval", "linear_regression", model_dir, "--json", "--eval_batch_size=6"]) == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["mse"], last.metrics["train/valid_loss"], rtol=1e-5)
    assert cli.main(["predict", "linear_regression", model_dir, "--pred_batch_size=6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines] == [5] * 20
