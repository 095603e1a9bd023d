"""The names of JEstimator's `modeling`, and FlaxFormer's `DenseGeneral`."""

from tekoa.estimator.jestimator.modeling import Array as Array
from tekoa.estimator.jestimator.modeling import DenseGeneral as DenseGeneral
from tekoa.estimator.jestimator.modeling import Dropout as Dropout
from tekoa.estimator.jestimator.modeling import DType as DType
from tekoa.estimator.jestimator.modeling import Initializer as Initializer
from tekoa.estimator.jestimator.modeling import PRNGKey as PRNGKey
from tekoa.estimator.jestimator.modeling import Shape as Shape
from tekoa.estimator.jestimator.modeling import global_kwargs as global_kwargs
from tekoa.estimator.jestimator.modeling import normalize_loss_by_size as normalize_loss_by_size
from tekoa.estimator.jestimator.modeling import sparse_xe_with_logits as sparse_xe_with_logits
from tekoa.estimator.jestimator.modeling import (
    truncated_normal_initializer as truncated_normal_initializer,
)
from tekoa.estimator.jestimator.modeling import unstack as unstack
