from tekoa.estimator.cli import run_config


def test_flags_on_the_command_line_override_the_models_defaults():
    config = run_config.RunConfig(train_batch_size=32, set_flags=frozenset(["train_batch_size"]))
    config = config.with_defaults({"train_batch_size": 8, "train_epochs": 3})
    assert (config.train_batch_size, config.train_epochs) == (32, 3)


def test_every_flag_has_a_help_text_and_known_commands():
    models = {"train", "eval", "eval_wait", "predict", "scales", "plan"}
    commands = models | {"new", "page", "convert", "export"}
    for name, field in run_config.FIELDS.items():
        assert field.metadata["help"], name
        assert set(field.metadata["only"]) <= commands, name
