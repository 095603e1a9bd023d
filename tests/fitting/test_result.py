import numpy as np
import optax
import pytest
from flax import nnx

import tekoa

X = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]


@pytest.fixture(scope="module")
def result():
    return tekoa.fit(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        {"x": X, "y": 2 * X},
        loss="mse",
        optimizer=optax.adam(0.1),
        epochs=20,
        batch_size=16,
        show_progress=False,
    )


def test_predictions_need_no_targets(result):
    by_field = result.predict({"x": X})
    np.testing.assert_array_equal(result.predict(X), by_field)
    assert by_field.shape == (40, 1)


def test_other_data_and_metrics_can_be_measured(result):
    scores = result.evaluate({"x": X, "y": 2 * X + 1}, metrics=["mae", "r2"])
    outputs = result.predict(X)
    assert scores["mae"] == pytest.approx(np.abs(outputs - 2 * X - 1).mean(), rel=1e-5)
    with pytest.raises(ValueError, match=r"pass evaluate\(data\)"):
        result.evaluate()


def test_a_saved_result_is_loaded(result, tmp_path):
    result.save(tmp_path / "saved")
    model = tekoa.load(tmp_path / "saved", nnx.Linear(1, 1, rngs=nnx.Rngs(3)))
    np.testing.assert_allclose(model(X), result.predict(X), rtol=1e-6)
    with pytest.raises(ValueError, match="pass directory= to fit"):
        result.page()
    assert repr(result) == "<FitResult step 50>"


def test_a_run_has_a_page(tmp_path):
    result = tekoa.fit(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        (X, X),
        loss="mse",
        optimizer=optax.sgd(0.1),
        steps=4,
        directory=tmp_path / "run",
        show_progress=False,
    )
    page = result.page(tmp_path / "run.html")
    assert "<svg" in page.read_text()


def test_a_table_is_trained_on_and_predicted_with_its_column_of_text(tmp_path):
    pytest.importorskip("pyarrow")
    rows = [f"{i % 2},{(i + 1) % 2},{('no', 'yes')[i % 2]}" for i in range(32)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["a,b,kind", *rows]))
    result = tekoa.fit(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        str(path),
        targets="kind",
        loss="cross_entropy",
        optimizer=optax.adam(0.3),
        batch_size=8,
        epochs=20,
        show_progress=False,
    )
    classes = [result.classes[i] for i in result.predict(str(path)).argmax(axis=1)]
    assert classes == ["no", "yes"] * 16


def test_arrays_and_named_fields_can_replace_each_other(result):
    expected = result.evaluate({"x": X, "y": 2 * X})
    assert result.evaluate((X, 2 * X)) == expected
    with pytest.raises(ValueError, match=r"pass evaluate\(\(x, y\)\)"):
        result.evaluate(X)
    options = {"loss": "mse", "optimizer": optax.adam(0.1), "epochs": 1, "show_progress": False}
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    other = tekoa.fit(model, (X, 2 * X), validation={"x": X, "y": 2 * X}, **options)
    named = tekoa.fit(model, {"x": X, "y": 2 * X}, validation=(X, 2 * X), **options)
    assert other.history["eval/loss"] == named.history["eval/loss"]
    assert other.evaluate((X, 2 * X)) == other.evaluate()


def test_a_frame_can_be_predicted():
    import pandas

    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 0] ** 2})
    result = tekoa.fit(
        nnx.Linear(2, 1, rngs=nnx.Rngs(0)),
        (frame, frame["a"]),
        loss="mse",
        optimizer=optax.adam(0.1),
        epochs=1,
        show_progress=False,
    )
    np.testing.assert_array_equal(result.predict(frame), result.predict(frame.to_numpy()))
