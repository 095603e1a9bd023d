"""Trains one task with one optimizer, from a seed, and evaluates it at the end."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from . import tasks

# Takes a task's loss(params, *batch), its parameters, a batch and numbers that may be traced.
MakeOptimizer = Callable[..., optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run, on held-out data."""

    loss: float
    accuracy: float | None = None


class Trainer:
    """Runs a task, with any optimizer. Nothing is compiled again for other numbers or seeds."""

    def __init__(self, task: tasks.Task):
        self.task = task
        train, test = task.load()
        self.n_examples, self.n_test = task.n_examples(train), task.n_examples(test)
        self.train = tuple(map(jnp.asarray, train))
        self.test = tuple(map(jnp.asarray, test))

    def batch(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns the first batch of a run."""
        return self.task.take(self.train, self.order(seed)[0])

    def order(self, seed: int) -> np.ndarray:
        """Returns the numbers of the examples of each step: epochs in random order."""
        rng = np.random.default_rng(seed)
        size, n = self.task.batch_size, self.task.n_steps
        n_epochs = -(-size * n // self.n_examples)
        rows = np.concatenate([rng.permutation(self.n_examples) for _ in range(n_epochs)])
        return rows[: size * n].reshape(n, size)

    def init(self, seed: int) -> tuple[Any, Any]:
        """Returns the parameters and the other variables, such as statistics of batch norm."""
        variables = dict(self._init(jax.random.key(seed), *self.batch()[:-1]))
        return variables.pop("params"), variables

    @functools.cached_property
    def _init(self) -> Callable[..., Any]:
        return jax.jit(self.task.model.init)

    def loss(self, params: Any, extra: Any, *batch: Any) -> tuple[Any, Any]:
        """Returns the loss in training and the new other variables."""
        variables, mutable = {"params": params} | extra, list(extra)
        outputs, extra = self.task.model.apply(variables, *batch[:-1], train=True, mutable=mutable)
        return self.task.loss(outputs, batch[-1]), extra

    def loss_fn(self, seed: int = 0) -> Callable[..., Any]:
        """Returns `fn(params, *batch)`, the loss of the parameters alone."""
        extra = self.init(seed)[1]
        return lambda params, *batch: self.loss(params, extra, *batch)[0]

    def run(
        self,
        make: MakeOptimizer,
        seed: int,
        numbers: dict[str, float],
        eval_params: Callable[..., Any] | None = None,
        init_scale: float = 1.0,
    ) -> Outcome:
        """Trains with `make(**numbers)` and evaluates.

        Args:
            make: Returns the optimizer; `numbers` are arguments of the compiled program.
            seed: Of the initial weights and of the order of the data.
            numbers: Such as the learning rate.
            eval_params: Returns from state and parameters those to evaluate.
            init_scale: Multiplies the initial kernels, all arrays with two axes or more.
        """
        params, extra = self.init(seed)
        params = jax.tree.map(lambda p: p * init_scale if p.ndim > 1 else p, params)
        numbers = {name: jnp.float32(number) for name, number in numbers.items()}
        start, update = self._optimizer_programs(make)
        opt_state = start(numbers, params)
        for rows in self.order(seed):
            value, extra, gradients = self._gradients(params, extra, rows, self.train)
            params, opt_state = update(numbers, params, opt_state, gradients, value)
        return self.evaluate(eval_params(opt_state, params) if eval_params else params, extra)

    # Two programs instead of one: that of the gradients is compiled once for all optimizers.
    @functools.cached_property
    def _gradients(self) -> Callable[..., Any]:
        @jax.jit
        def gradients_of(params, extra, rows, arrays):
            batch = self.task.take(arrays, rows)
            value_and_grad = jax.value_and_grad(self.loss, has_aux=True)
            (value, extra), gradients = value_and_grad(params, extra, *batch)
            return value, extra, gradients

        return gradients_of

    @functools.lru_cache(maxsize=32)  # noqa: B019
    def _optimizer_programs(
        self, make: MakeOptimizer
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def update(numbers, params, opt_state, gradients, value):
            tx = optax.with_extra_args_support(make(**numbers))
            updates, opt_state = tx.update(gradients, opt_state, params, value=value)
            return optax.apply_updates(params, updates), opt_state

        start = jax.jit(lambda numbers, params: make(**numbers).init(params))
        return start, jax.jit(update, donate_argnums=(1, 2))

    def evaluate(self, params: Any, extra: Any, n_examples: int = 256) -> Outcome:
        """Returns mean loss and accuracy on the test data in equal batches, without the rest."""
        length = getattr(self.task.take, "length", 1)
        starts = np.arange(0, self.n_test, length)
        n_examples = min(len(starts), max(1, n_examples // length))
        starts = starts[: len(starts) // n_examples * n_examples].reshape(-1, n_examples)
        values = [self._evaluate_batch(params, extra, rows, self.test) for rows in starts]
        loss, accuracy = np.mean(np.array(values, np.float64), axis=0)
        return Outcome(float(loss), float(accuracy) if self.task.accuracy else None)

    @functools.cached_property
    def _evaluate_batch(self) -> Callable[..., Any]:
        @jax.jit
        def evaluate_batch(params, extra, rows, arrays):
            *inputs, targets = self.task.take(arrays, rows)
            outputs = self.task.model.apply({"params": params} | extra, *inputs)
            accuracy = self.task.accuracy(outputs, targets) if self.task.accuracy else 0.0
            return self.task.loss(outputs, targets), accuracy

        return evaluate_batch
