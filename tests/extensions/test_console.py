from tekoa.extensions.console import ConsoleLogger, SummaryLogger


def test_the_report_has_the_documented_format(summary, capsys):
    logger = ConsoleLogger()
    checkpoint = summary(
        7, elapsed_time=15.914, train={"loss": 3.5, "n": 2.0}, eval={"accuracy": 0.25}
    )
    assert logger(checkpoint) is checkpoint
    logger(summary(8))
    assert capsys.readouterr().out.splitlines() == [
        "Loaded in 1.00 seconds, initialised in 2.00 seconds",
        "Number of trainable weights: 4 (0.00 MB)",
        "Step 7: Ran 1 train steps in 15.91 seconds",
        "Step 7: train loss     | 3.50000000",
        "Step 7: train n        | 2.00000000",
        "Step 7: eval  accuracy | 0.25000000",
        "Step 8: Ran 1 train steps in 0.50 seconds",
    ]


def test_lines_can_be_redirected(summary):
    lines = []
    ConsoleLogger(lines.append)(summary(1, train={"loss": float("nan"), "tiny": 1e-9, "zero": 0.0}))
    assert lines[-3:] == [
        "Step 1: train loss | nan",
        "Step 1: train tiny | 1.0000e-09",
        "Step 1: train zero | 0.0",
    ]


def test_the_original_name_is_an_alias():
    assert SummaryLogger is ConsoleLogger
