"""Plain code of an ejected file: sphere, Amos, and the states of long model files."""

from collections.abc import Mapping
from typing import Any


def _table(rows: Mapping[str, tuple[Any, ...]], kind: str = "") -> str:
    return "\n".join(f'    "{name}": {kind}{values!r},' for name, values in rows.items())


def sphere(rows: Mapping[str, tuple[Any, ...]], rule: Any, *, size: str, has_axes: bool) -> str:
    """Returns the code of `sphere`.

    Args:
        rows: The roles by name, in the order of the parameters.
        rule: The constants.
        size: The code of `step_size`.
        has_axes: Whether roles have axes, for parameters that are several copies.
    """
    axes = ", role.axes" * has_axes
    mean, power = "mu", "count"
    if rule.nesterov:
        mean, power = f"({rule.b1} * mu + {1 - rule.b1!r} * g)", "(count + 1)"
    restart = _RESTART if rule.restarts else "\n        count = n + 1"
    return f'''
Role = collections.namedtuple("Role", "scale step is_divided {"axes " * has_axes}radius")
# Of each parameter: its scale, the size of its steps, whether their direction is divided by its
# rms, {"the axes of one copy, " * has_axes}and when it is set to its scale.
ROLES = {{
{_table(rows, "Role")}
}}


{size}


def sphere():
    """Creates the optimizer: steps relative to the scales, on which hidden kernels stay."""

    def rms(x{", axes" * has_axes}):
        return jnp.sqrt(jnp.mean(jnp.square(x){", axis=axes" * has_axes}, keepdims=True))

    def init(params):
        zeros = [jnp.zeros_like(p) for p in jax.tree.leaves(params)]
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(grads, state, params):
        n, mus, nus = state{restart}
        unbias_mu = 1 - jnp.float32({rule.b1}) ** {power}
        unbias_nu = 1 - jnp.float32({rule.b2}) ** count

        def update_one(role, p, g, mu, nu):
            mu = {rule.b1} * mu + {1 - rule.b1!r} * g
            nu = {rule.b2} * nu + {1 - rule.b2!r} * jnp.square(g)
            mean = {mean} / unbias_mu
            u = mean * jax.lax.rsqrt(jnp.maximum(nu / unbias_nu, 2**-125))
            size = role.step
            if role.is_divided:
                size = size / jnp.maximum(rms(u{axes}), {max(rule.min_rms, 2**-125)!r})
            delta = -step_size(n) * (u * size)
            if role.radius is not None:
                length = rms(p + delta{axes})
                factor = jnp.where(length > 0, role.scale / jnp.where(length > 0, length, 1), 1)
                if role.radius == "at first":
                    factor = jnp.where(n == 0, jnp.minimum(factor, 1), 1)
                delta = (p + delta) * factor - p
            return delta, mu, nu

        leaves = [jax.tree.leaves(tree) for tree in (params, grads, mus, nus)]
        deltas, mus, nus = zip(*map(update_one, ROLES.values(), *leaves))
        deltas = jax.tree.unflatten(jax.tree.structure(params), deltas)
        return deltas, (n + 1, list(mus), list(nus))

    return optax.GradientTransformation(init, update)
'''


_RESTART = """
        # The first step rescales the kernels: the moments start again after it.
        mus, nus = jax.tree.map(lambda x: jnp.where(n == 1, 0, x), (mus, nus))
        count = jnp.maximum(n, 1)"""


def step_size(variables: Mapping[str, Any]) -> str:
    """Returns the code of a step's size, from the variables of `sphere.step_size`."""
    n_steps, n_warmup = variables["n_steps"], variables["n_warmup"]
    decay = {"cosine": "0.5 * (1 + jnp.cos(jnp.pi * progress))", "linear": "(1 - progress)"}
    factor = decay.get(variables["tail"])
    return f'''def step_size(n):
    """Returns the relative size of step n: it rises for {n_warmup} steps, then decreases."""
    rise = jnp.minimum(1.0, (n + 1) / {max(n_warmup, 1)})
    progress = jnp.clip((n + 1 - {n_warmup}) / {n_steps + 1 - n_warmup}, 0.0, 1.0)
    return {variables["peak"]!r} * rise{f" * {factor}" if factor else ""}'''.replace(
        "n + -", "n - "
    )


def anytime_step_size(variables: Mapping[str, Any]) -> str:
    """Returns the code of a step's size, from the variables of `sphere.anytime_step_size`."""
    c, n_warmup = variables["c"], variables["n_warmup"]
    return f'''def step_size(n):
    """Returns the relative size of step n: it rises for {n_warmup} steps, then decreases."""
    done = jnp.asarray(n + 1, jnp.float32)
    rise = jnp.minimum(1.0, done / {n_warmup})
    return {0.5 * c!r} * rise / jnp.sqrt(2 * jnp.maximum(done, {n_warmup}))'''


def amos(rows: Mapping[str, tuple[Any, ...]], *, by_slabs: bool, has_momentum: bool) -> str:
    """Returns the code of Amos.

    Args:
        rows: Scale and slot shape of each parameter by name, in their order.
        by_slabs: Whether some means of squares are computed by slabs.
        has_momentum: Whether the updates are averaged.
    """
    momentum = ", momentum=None" * has_momentum
    ema = "\n    if momentum is not None:\n        stages.append(optax.ema(momentum, debias=False))"
    return f'''
# Of each parameter: its scale, and the shape of its slots.
SCALES = {{
{_table(rows)}
}}


def amos(learning_rate, *, beta=0.999, clip_value=None{momentum}):
    """Creates the optimizer Amos (arXiv 2210.11693)."""

    def init(params):
        slots = [jnp.zeros(shape) for _, shape in SCALES.values()]
        return jnp.zeros((), jnp.int32), slots, slots

    def update(grads, state, params):
        count, vs, bs = state
        count = count + 1
        xi = jnp.float32(learning_rate(count) if callable(learning_rate) else learning_rate)
        unbias = -jnp.expm1(count.astype(jnp.float32) * jnp.log(jnp.float32(beta)))

        def update_one(scale, p, g, v, b):
            eta, g2 = scale[0], mean_of_squares(g, v.shape)
            v = beta * v + (1 - beta) * g2
            floored, shrink = jnp.maximum(v, 2**-125), 1 + 0.25 * jnp.sqrt(xi) * b
            gamma = xi**2 * unbias * g2 / floored * jax.lax.rsqrt(shrink)
            one_by_D = 1 + 0.25 * jnp.sqrt(xi * eta) * b
            decay, rate = 0.5 * gamma, xi * eta * jnp.sqrt(unbias) * jax.lax.rsqrt(floored)
            if v.shape == p.shape:
                delta = -(decay * p + rate * g) / one_by_D
                first = p + delta
            else:
                decay, rate = decay / one_by_D, rate / one_by_D
                delta, first = -decay * p - rate * g, decay + rate
            b = b + (1 + b) * (xi**2 * unbias * g2) / (floored * jnp.sqrt(shrink))
            return delta, v, jnp.where(jnp.isnan(first), jnp.nan, b)  # Fixes the order.

        leaves = [jax.tree.leaves(tree) for tree in (params, grads, vs, bs)]
        deltas, vs, bs = zip(*map(update_one, SCALES.values(), *leaves))
        deltas = jax.tree.unflatten(jax.tree.structure(params), deltas)
        return deltas, (count, list(vs), list(bs))

    stages = [] if clip_value is None else [optax.clip(clip_value)]
    stages.append(optax.GradientTransformation(init, update)){ema * has_momentum}
    return optax.chain(*stages)


def mean_of_squares(x, shape):
    """Averages squares over the axes that the slot lacks or has at size 1."""
    aligned = (1,) * (x.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(x.shape, aligned)) if m < n)
    squares = jnp.square(x)
{_SLABS * by_slabs}    means = jnp.mean(squares, axis=axes, keepdims=True) if axes else squares
    return means.reshape(shape)
'''


_SLABS = """    if axes == (0,) and x.ndim > 1 and len(x) % 8 == 0 and x.size >= 2**16:
        # Adding eight slabs first is faster on CPU, and rounds differently.
        sums = [*squares.reshape(8, len(x) // 8, -1)]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        weights = jnp.full(len(x) // 8, 1 / len(x), x.dtype)
        return jnp.matmul(weights, sums[0], precision="highest").reshape(shape)
"""


TRAIN_STATE = '''
class TrainState(struct.PyTreeNode):
    """Parameters, optimizer, other variables and key, passed from step to step."""

    step: jax.Array
    params: dict
    opt_state: tuple
    _vars: dict
    _state_rng: jax.Array
    apply_fn: Callable = struct.field(pytree_node=False)
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    metrics_mod: nn.Module = struct.field(pytree_node=False)

    @classmethod
    def create(cls, metrics_mod, tx, model, rng, *inputs, save_mutable=False, **options):
        init_rng, rng = jax.random.split(rng)
        streams = enumerate(("params", "dropout"))
        keys = {name: jax.random.fold_in(init_rng, i) for i, name in streams}
        variables = jax.jit(lambda keys: nn.meta.unbox(model.init(keys, *inputs, **options)))(keys)
        params = variables.pop("params")
        step = jnp.zeros((), jnp.int32)
        return cls(step, params, tx.init(params), variables, rng, model.apply, tx, metrics_mod)

    def step_rng(self):
        return jax.random.fold_in(jax.random.fold_in(self._state_rng, self.step), 0)

    def value_and_grad_apply_fn(self, has_aux=False):
        def loss_of(params, *args, **kwargs):
            kwargs = {"rngs": {"dropout": self.step_rng()}, **kwargs}
            variables = {**self._vars, "params": params}
            outputs, changed = self.apply_fn(variables, *args, **kwargs, mutable=[*self._vars])
            loss, *aux = outputs if has_aux else (outputs,)
            aux = [*aux, changed] if self._vars else aux
            return loss, aux[0] if len(aux) == 1 else tuple(aux)

        def value_and_grad(*args, **kwargs):
            (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(*args, **kwargs)
            return (loss, aux) if has_aux or self._vars else loss, grads

        return value_and_grad

    def apply_gradients(self, *, grads, **changes):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)
'''

MEAN_METRICS = '''
class MeanMetrics(nn.Module):
    """Totals and counts of metrics, in the collection "metrics"."""

    names: tuple = ()

    @classmethod
    def create(cls, *names):
        return cls(names)

    def setup(self):
        parts = [f"{name}_{part}" for name in self.names for part in ("total", "count")]
        self.sums = {part: self.variable("metrics", part, jnp.zeros, ()) for part in parts}

    def __call__(self):
        total, count = (
            {name: self.sums[f"{name}_{part}"].value for name in self.names}
            for part in ("total", "count")
        )
        return {name: total[name] / jnp.where(count[name] == 0, 1.0, count[name]) for name in total}

    def update(self, name, total, count=1.0):
        for part, value in (("total", total), ("count", count)):
            self.sums[f"{name}_{part}"].value += jnp.asarray(value, jnp.float32)
'''


def long_training(*, changes_optimizer: bool) -> str:
    """Returns the loop of a model file in the long form."""
    replace = "\n    state = state.replace(tx=tx, opt_state=tx.init(state.params))"
    return f'''
def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the first metric of every step."""
    state = get_train_state(jax.random.key(SEED)){replace * changes_optimizer}
    empty = state.metrics_mod.init(jax.random.key(0))
    run_step, losses = jax.jit(train_step), []
    for step in range(n_steps):
        state, metrics = run_step(batch_of(step), state, empty)
        loss = next(iter(state.metrics_mod.apply(metrics).values()))
        losses.append(float(loss))
        if (step + 1) % PRINT_EVERY == 0:
            print(f"step {{step + 1}}: {{losses[-1]:.6g}}", flush=True)
    return state.params, losses


if __name__ == "__main__":
    train()
'''
