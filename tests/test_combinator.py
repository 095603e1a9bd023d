from tekoa import combinator
from tekoa.extensions import serial


def test_combinator_exports_the_functions_of_extensions():
    assert combinator.serial is serial.serial
    assert combinator.when is serial.when
