import json

import numpy as np

import tekoa
from tekoa.estimator.cli import main


def test_training_reaches_the_losses_of_the_docstring(tmp_path, capsys):
    model_dir = f"--model_dir={tmp_path}"
    assert (
        main.main(["train", "linear_regression", model_dir, "--random_seed=1", "--noprogress"]) == 0
    )
    last = tekoa.store.inspect(tmp_path)[-1]
    assert last.step == 200
    assert last.metrics["train/train_loss"] < 0.01
    assert last.metrics["train/valid_loss"] < 0.05
    capsys.readouterr()
    assert main.main(["eval", "linear_regression", model_dir, "--json", "--eval_batch_size=6"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(metrics["mse"], last.metrics["train/valid_loss"], rtol=1e-5)
    assert main.main(["predict", "linear_regression", model_dir, "--pred_batch_size=6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines] == [5] * 20
