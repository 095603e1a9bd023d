import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import tekoa
from tekoa.estimator.cli import main

PATH = pathlib.Path(__file__).parent / "planted.py"
_spec = importlib.util.spec_from_file_location("planted", PATH)
planted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(planted)


def line_of(name):
    """Returns the line that is marked with the name of a fault."""
    lines = PATH.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"# HERE: {name}"))


def spoil_slot(state):
    adam, *rest = state.opt_state
    mu = jax.tree.map(jnp.copy, adam.mu)
    mu["last"]["kernel"] = mu["last"]["kernel"].at[2].set(jnp.nan)
    return state.replace(opt_state=(adam._replace(mu=mu), *rest))


LIBRARIES = {"linen": planted.Net, "nnx": planted.NnxNet, "equinox": planted.EqxNet}
QUICK = [("linen", "log_of_zero"), ("nnx", "overflow")]
FAULTS = [
    (library, fault)
    for fault in ("log_of_zero", "division", "overflow", "root_gradient")
    for library in LIBRARIES
] + [("linen", "broken_norm"), ("nnx", "all_masked")]
CASES = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in FAULTS]


@pytest.mark.parametrize(("library", "fault"), CASES)
def test_the_line_of_a_fault_in_the_model_is_named(tmp_path, library, fault):
    model = LIBRARIES[library](getattr(planted, fault))
    make_loop = planted.save_run(tmp_path, model, planted.rows())
    diagnosis = tekoa.why(tmp_path, make_loop)
    assert (diagnosis.origin.file, diagnosis.origin.line) == (str(PATH), line_of(fault))
    assert diagnosis.step == 1
    assert diagnosis.rows == ()
    if library == "linen":
        assert "Net" in diagnosis.origin.layer


@pytest.mark.parametrize(
    "library",
    [
        "nnx",
        pytest.param("linen", marks=pytest.mark.slow),
        pytest.param("equinox", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("field", ["x", pytest.param("y", marks=pytest.mark.slow)])
def test_the_row_with_a_bad_value_is_named(tmp_path, library, field):
    data = planted.rows(**{field: {5: float("nan")}})
    make_loop = planted.save_run(tmp_path, LIBRARIES[library](planted.safe_log), data)
    diagnosis = tekoa.why(tmp_path, make_loop)
    assert diagnosis.input_name == f"the batch, {field}"
    loop = make_loop(lambda model: model)
    for _ in range(diagnosis.step - 1):
        loop.next_step()
    bad = jnp.isnan(loop.peek_batch()[field]).any(1)
    assert diagnosis.rows == tuple(jnp.flatnonzero(bad).tolist())
    assert "Without these rows the step is finite." in diagnosis.findings


@pytest.mark.slow
def test_a_row_that_overflows_is_named(tmp_path):
    data = planted.rows(x={3: 1e30})
    make_loop = planted.save_run(tmp_path, planted.Net(), data)
    diagnosis = tekoa.why(tmp_path, make_loop)
    assert len(diagnosis.rows) == 1
    assert "1e+30" in diagnosis.row_text


def test_a_slot_that_is_not_finite_is_named(tmp_path):
    make_loop = planted.save_run(tmp_path, planted.Net(), planted.rows(), spoil=spoil_slot)
    diagnosis = tekoa.why(tmp_path, make_loop)
    assert diagnosis.step == 5
    assert diagnosis.input_name.startswith("the state, opt_state")
    assert diagnosis.input_name.endswith("mu/last/kernel")


@pytest.mark.slow
def test_a_loss_and_a_precision_and_a_rate_are_told_apart(tmp_path):
    make_loop = planted.save_run(
        tmp_path / "loss", planted.Net(), planted.rows(), loss=planted.log_of_prediction
    )
    diagnosis = tekoa.why(tmp_path / "loss", make_loop)
    assert diagnosis.origin.line == line_of("log_of_prediction")
    make_loop = planted.save_run(
        tmp_path / "bf16", planted.Net(planted.cancelled), planted.rows(), precision="bf16"
    )
    diagnosis = tekoa.why(tmp_path / "bf16", make_loop)
    assert diagnosis.origin.line == line_of("cancelled")
    assert "In float32 the step is finite." in diagnosis.findings
    make_loop = planted.save_run(
        tmp_path / "rate", planted.Net(), planted.rows(), optimizer=optax.sgd(1e20)
    )
    diagnosis = tekoa.why(tmp_path / "rate", make_loop)
    assert diagnosis.step > 1
    assert any("half the learning rate" in line for line in diagnosis.findings)


@pytest.mark.slow
def test_an_overflow_of_float16_is_named_and_one_that_the_scale_undoes_is_not(tmp_path):
    make_loop = planted.save_run(
        tmp_path / "forward", planted.Net(planted.too_large), planted.rows(), precision="fp16"
    )
    diagnosis = tekoa.why(tmp_path / "forward", make_loop)
    assert (diagnosis.step, diagnosis.origin.line) == (1, line_of("too_large"))
    assert "In float32 the step is finite." in diagnosis.findings
    # The gradient overflows at every scale, which is halved 15 times before the run stops.
    make_loop = planted.save_run(
        tmp_path / "gradient",
        planted.Net(planted.too_steep),
        planted.rows(),
        precision="fp16",
        n_steps=20,
    )
    diagnosis = tekoa.why(tmp_path / "gradient", make_loop)
    assert (diagnosis.step, diagnosis.origin.line) == (16, line_of("too_steep"))
    assert diagnosis.gradients == ("first/bias", "first/kernel")
    assert "In float32 the step is finite." in diagnosis.findings
    # At the first scales only: the run goes on, and nothing is wrong.
    make_loop = planted.save_run(
        tmp_path / "scale", planted.Net(planted.steep), planted.rows(), precision="fp16"
    )
    assert str(tekoa.why(tmp_path / "scale", make_loop)) == "All steps are finite."
    asked = tekoa.why(tmp_path / "scale", make_loop, step=1)
    assert asked.origin.line == line_of("steep")
    assert "halved the scale of its loss, as it should" in asked.findings[-1]


@pytest.mark.parametrize(
    ("library", "middle"),
    [
        ("linen", "masked"),
        *(pytest.param(name, "safe_log", marks=pytest.mark.slow) for name in LIBRARIES),
        *(pytest.param(name, "masked", marks=pytest.mark.slow) for name in ("nnx", "equinox")),
    ],
)
def test_good_runs_are_not_accused(tmp_path, library, middle):
    model = LIBRARIES[library](getattr(planted, middle))
    make_loop = planted.save_run(tmp_path, model, planted.rows())
    assert str(tekoa.why(tmp_path, make_loop)) == "All steps are finite."


GOOD_RUNS = {
    "linen, auto": ["library=linen", "optimizer=auto"],
    "linen, amos, bf16": ["library=linen", "optimizer=amos", "--precision=bf16"],
    "linen, fp16": ["library=linen", "--precision=fp16"],
    "linen, accumulated": ["library=linen", "--accumulate=2", "--ema=0.9"],
    "nnx, auto": ["library=nnx", "optimizer=auto", "--on_nan=skip"],
    "nnx, noise": ["library=nnx", "--clip_norm=0.1", "--grad_noise=0.01"],
    "equinox, sgd": ["library=equinox", "--optimizer=sgd", "--learning_rate=0.3"],
    "equinox, small data": ["library=equinox", "optimizer=auto", "--train_epochs=4"],
    "haiku, adamw": ["library=haiku", "--steps_per_dispatch=2"],
    "haiku, muon": ["library=haiku", "--optimizer=muon", "--on_nan=count"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD_RUNS)
def test_ten_good_runs_are_not_accused(name, tmp_path):
    """All with dropout on 41 rows, so that the loss varies from step to step."""
    model = pathlib.Path(__file__).parents[1] / "eject" / "plain_model.py"
    words = [w if w.startswith("--") else f"--module_config.{w}" for w in GOOD_RUNS[name]]
    common = [f"--model_dir={tmp_path}/run", "--noprogress", "--check_every_steps=2"]
    assert main.main(["train", str(model), *common, *words]) == 0
    assert str(tekoa.why(tmp_path / "run")) == "All steps are finite."


# Other models, on other data, than those with which the rules of `spikes` were chosen.
RATE = "--learning_rate=3e-3"
OTHER_GOOD_RUNS = {
    "one row": [
        "kind=mlp",
        "--train_batch_size=1",
        "--check_every_steps=1",
        "--optimizer=sgd",
        RATE,
    ],
    "two rows, auto": ["kind=mlp", "--train_batch_size=2", "--check_every_steps=1"],
    "outliers": ["kind=mlp", "outliers=True", "--train_batch_size=4", "--precision=bf16"],
    "convolutions": ["kind=conv", "--train_batch_size=4", "--optimizer=adamw", RATE],
    "convolutions, auto": ["kind=conv", "--train_batch_size=2", "--check_every_steps=1"],
    "batch norm": ["kind=norm", "--train_batch_size=8", "--optimizer=lion", RATE],
    "attention, auto": ["kind=attention", "--train_batch_size=4"],
    "recurrent": ["kind=recurrent", "--train_batch_size=2", "--optimizer=adam", RATE],
    "autoencoder": ["kind=autoencoder", "--train_batch_size=16", "--optimizer=muon"],
    "autoencoder, fp16": ["kind=autoencoder", "--precision=fp16", "--optimizer=adam", RATE],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_GOOD_RUNS)
def test_ten_other_good_runs_are_not_accused(name, tmp_path):
    words = [w if w.startswith("--") else f"--module_config.{w}" for w in OTHER_GOOD_RUNS[name]]
    model = PATH.with_name("good_model.py")
    assert main.main(["train", str(model), f"--model_dir={tmp_path}/run", *words]) == 0
    assert str(tekoa.why(tmp_path / "run")) == "All steps are finite."


def test_steps_that_were_skipped_are_found(tmp_path):
    data = planted.rows(x={5: float("nan")})
    make_loop = planted.save_run(tmp_path, planted.Net(), data, on_nan="skip")
    diagnosis = tekoa.why(tmp_path, make_loop)
    assert diagnosis.step in (1, 2)  # Both batches of 8 rows are one pass over the 16 rows.
    assert len(diagnosis.rows) == 1


def test_the_command_explains_a_run_that_stopped(train, tmp_path, capsys):
    directory = tmp_path / "run"
    assert train(directory, "--module_config.rate=1e30", "--check_every_steps=5") == 76
    capsys.readouterr()
    assert main.main(["why", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "is not finite: the loss is" in out
    assert "It began in `" in out


def test_the_command_finds_nothing_in_a_good_run(trained, capsys):
    assert main.main(["why", str(trained)]) == 1
    assert capsys.readouterr().out == "All steps are finite.\n"
    assert main.main(["why", str(trained), "--step=7"]) == 1
    assert "Step 7 is finite." in capsys.readouterr().out


def test_a_good_run_of_a_long_model_file_is_not_accused(tmp_path):
    flags = ["--max_train_steps=20", "--noprogress"]
    assert main.main(["train", "linear_regression", f"--model_dir={tmp_path}/run", *flags]) == 0
    assert str(tekoa.why(tmp_path / "run")) == "All steps are finite."
