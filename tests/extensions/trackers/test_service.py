import json

from tekoa.extensions.trackers.service import config_of, numbers


def test_numbers_are_finite_and_without_the_step():
    row = {"step": 3, "seconds": 0.5, "a": None, "b": float("inf"), "c": 2}
    assert numbers(row) == {"seconds": 0.5, "c": 2.0}


def test_the_config_has_settings_set_flags_and_the_system(tmp_path):
    record = {
        "settings": {"rate": 0.1},
        "flags": {"ema": None, "precision": "bf16"},
        "given": ["precision"],
        "command": ["tekoa", "train"],
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    config = config_of(tmp_path, {"note": "mine"})
    assert config["settings"] == {"rate": 0.1}
    assert config["flags"] == {"precision": "bf16"}
    assert config["note"] == "mine"
    assert config["system"]["devices"]["count"] >= 1
    assert "jax" in config["versions"]
