import json

from tekoa.estimator.cli import output


def test_only_json_is_printed_to_standard_output(capsys):
    with output.only_json(True):
        print("for people")
        output.print_json({"step": 3})
    print("afterwards")
    captured = capsys.readouterr()
    assert captured.err == "for people\n"
    first, second = captured.out.splitlines()
    assert json.loads(first) == {"step": 3}
    assert second == "afterwards"


def test_without_the_flag_nothing_changes(capsys):
    with output.only_json(False):
        print("for people")
        output.print_json({"step": 3})
    assert capsys.readouterr().out == 'for people\n{"step": 3}\n'
