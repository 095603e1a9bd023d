from tekoa.estimator import modeling
from tekoa.estimator.jestimator import modeling as implementation


def test_all_names_can_be_imported_from_the_public_module():
    names = [name for name in vars(modeling) if not name.startswith("_")]
    assert {"DenseGeneral", "Dropout", "global_kwargs", "unstack"} <= set(names)
    for name in names:
        assert getattr(modeling, name) is getattr(implementation, name)
