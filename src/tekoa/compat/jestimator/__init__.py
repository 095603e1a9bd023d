"""JEstimator under its own name: its model files run unchanged.

    tekoa --compat=jestimator --module_imp=jestimator.models.mnist.mnist ...

`install()` registers modules named `jestimator`, and the part of FlaxFormer that its models use.
Modules that are not listed here, such as models, are imported from a checkout of JEstimator if
there is one on the path. Its tests run with

    python -m tekoa.compat.jestimator linear_regression_test.py
"""

import importlib
import importlib.machinery
import sys
import types

# The modules of the originals, and ours with the same names in them.
MODULES = {
    "jestimator.amos": "tekoa.optim.amos",
    "jestimator.amos_helper": "tekoa.optim.amos_helper",
    "jestimator.checkpoint_utils": "tekoa.compat.jestimator.checkpoint_utils",
    "jestimator.data.pipeline_lm": "tekoa.data.jestimator",
    "jestimator.data.pipeline_rec": "tekoa.data.jestimator",
    "jestimator.data.reader": "tekoa.data.jestimator",
    "jestimator.estimator": "tekoa.compat.jestimator.estimator",
    "jestimator.modeling": "tekoa.estimator.modeling",
    "jestimator.states": "tekoa.estimator",
    "flaxformer.components.dense": "tekoa.estimator.modeling",
    "flaxformer.types": "tekoa.estimator.modeling",
}


def install() -> None:
    """Registers the modules; a second call does nothing."""
    for name, target in MODULES.items():
        if name not in sys.modules:
            package = _package(name.rpartition(".")[0])
            module = importlib.import_module(target)
            sys.modules[name] = module
            setattr(package, name.rpartition(".")[2], module)


def _package(name: str) -> types.ModuleType:
    """Returns a package with our modules, and those of a checkout on the path."""
    if name in sys.modules:
        return sys.modules[name]
    parent_name, _, last = name.rpartition(".")
    parent = _package(parent_name) if parent_name else None
    search = None if parent is None else list(parent.__path__)
    spec = importlib.machinery.PathFinder.find_spec(name, search)
    package = types.ModuleType(name, "Registered by tekoa.compat.jestimator.")
    package.__path__ = [] if spec is None else list(spec.submodule_search_locations or ())
    sys.modules[name] = package
    if parent is not None:
        setattr(parent, last, package)
    return package
