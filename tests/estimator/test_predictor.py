from tekoa.estimator import Predictor


def doubled(found):
    return [2 * x for x in found]


def test_lines_go_to_a_file_that_appears_whole(tmp_path):
    path = tmp_path / "new" / "out.txt"
    predictor = Predictor(doubled, path, pre_str="begin", post_str="end")
    predictor.consume([1, 2])
    predictor.consume([3])
    assert not path.exists()
    predictor.complete()
    assert path.read_text().splitlines() == ["begin", "2", "4", "6", "end"]
    assert list(path.parent.iterdir()) == [path]


def test_lines_go_to_standard_output(capsys):
    predictor = Predictor(doubled, pre_str="begin")
    predictor.consume([1])
    predictor.complete()
    assert capsys.readouterr().out == "begin\n2\n"


def test_lines_without_results_are_there_too():
    assert list(Predictor(doubled, pre_str="a", post_str="b").last_lines()) == ["a", "b"]
