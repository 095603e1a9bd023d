import pytest

from tekoa.estimator.cli import main
from tekoa.estimator.cli.flags import UsageError
from tekoa.estimator.replay import arguments


def test_arguments_are_parsed_and_directories_must_exist(tmp_path):
    parser = arguments.Arguments("verify", "RUN")
    parser.add_argument("--fraction", type=arguments.fraction)
    parsed = parser.parse([str(tmp_path), "--fraction=0.5"])
    assert (parsed.RUN, parsed.fraction) == (str(tmp_path), 0.5)
    with pytest.raises(UsageError, match="'nowhere' does not exist"):
        parser.parse(["nowhere"])
    for text in ("0", "1.5", "-1", "x"):
        with pytest.raises(UsageError, match="verify: argument --fraction"):
            parser.parse([str(tmp_path), f"--fraction={text}"])


def contents(directory):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [directory, *directory.rglob("*")]
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["replay", "RUN", "--from=15", "--to=18", "--out=OUT"], 0),
        (["verify", "RUN", "--fraction=0.5"], 0),
        (["diff", "RUN", "OTHER"], 1),
        (["why", "RUN"], 1),
        (["why", "RUN", "--memory", "--page=OUT"], 0),
    ],
)
def test_no_command_changes_the_run(trained, other_seed, tmp_path, arguments, code):
    names = {"RUN": str(trained), "OTHER": str(other_seed), "--out=OUT": f"--out={tmp_path}/out"}
    names["--page=OUT"] = f"--page={tmp_path}/page.html"
    before = contents(trained)
    assert main.main([names.get(word, word) for word in arguments]) == code
    assert contents(trained) == before


@pytest.fixture(scope="module")
def other_seed(train, tmp_path_factory):
    directory = tmp_path_factory.mktemp("other") / "run"
    assert train(directory, "--random_seed=8") == 0
    return directory


@pytest.mark.parametrize("command", ["replay", "verify", "diff", "why", "sweep"])
def test_the_help_of_every_command_has_an_example(capsys, command):
    assert main.main([command, "--help"]) == 0
    assert f"Example: tekoa {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["verify", "RUN", "--fration=1"],
            "does not know '--fration=1'. Did you mean '--fraction'?",
        ),
        (["diff", "RUN", "RUN", "RUN"], "tekoa diff does not know"),
        (["sweep", "mnist", "--sedes=2"], "Unknown flag --sedes. Did you mean '--seeds'?"),
    ],
)
def test_a_mistyped_flag_gets_a_suggestion(trained, capsys, arguments, message):
    words = [str(trained) if word == "RUN" else word for word in arguments]
    assert main.main(words) == 2
    assert message in capsys.readouterr().err
