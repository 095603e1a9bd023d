"""Settings become values."""

import types

from tekoa.estimator.eject import edits, fold

CONFIG = types.SimpleNamespace(width=8, model={"n": 2, "rate": 0.1}, name="big")
TEXT = """def build(config, x):
    half = config.width // 2
    kind = "wide" if config.name == "big" else "narrow"
    return Model(half, x, kind, **config.model, f=lambda config: config.width)


y = build(config, 3)"""


def test_settings_are_replaced_by_values_and_their_parameter_goes():
    variables = {"build": {"config": CONFIG, "x": 3, "half": 4, "kind": "wide"}}
    rules = fold.with_values(variables, (CONFIG,)), fold.without_parameters(variables, (CONFIG,))
    text = TEXT.replace("lambda config: config.width", "abs")
    folded = edits.apply(text, *rules)
    assert "return Model(4, x, 'wide', n=2, rate=0.1, f=abs)" in folded
    assert folded.startswith("def build(x):")
    assert folded.endswith("y = build(3)")


def test_names_that_inner_functions_bind_are_left():
    variables = {"build": {"config": CONFIG, "half": 4}}
    folded = edits.apply(TEXT, fold.with_values(variables, (CONFIG,)))
    assert "lambda config: config.width" in folded
    assert "config.width // 2" in folded
