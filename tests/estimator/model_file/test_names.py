import subprocess
import sys

import pytest

from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.model_file import names


@pytest.mark.parametrize("name", [*names.BUNDLED, __file__, "tekoa.models.mnist", "json.decoder"])
def test_existing_models_are_accepted(name):
    names.check_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", "There is no model 'mnits'. Did you mean 'mnist'?"),
        ("no_such_package.model", "There is no model 'no_such_package.model'."),
        ("no/such/file.py", "There is no model file 'no/such/file.py'."),
        (".relative", "There is no model '.relative'."),
        (None, "No model given."),
    ],
)
def test_missing_models_are_named(name, message):
    with pytest.raises(UsageError) as error:
        names.check_model(name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "command", [["train", "mnits"], ["train", "mnist", "--max_trian_steps=3"], ["eval", "none.py"]]
)
def test_mistyped_names_are_reported_without_importing_jax(command):
    program = (
        "import sys; from tekoa.estimator.cli import main;"
        f"assert main.main({command}) == 2; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
