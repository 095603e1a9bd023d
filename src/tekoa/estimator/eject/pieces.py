"""The plain code of an ejected file: order of the data, optimizer, models, training."""

# A permutation of up to 4096 rows is sorted by keyed hashes (splitmix64).
HASHES = '''
def hashes(n, key):
    """Returns n pseudorandom 64-bit numbers for a key (splitmix64)."""
    step, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(x):
        x = (((x & mask) ^ ((x & mask) >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seed = step
    for word in key:
        seed = mix(mix((seed ^ (word & mask)) + step) ^ ((word >> 64) & mask))
    x = np.uint64(seed) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(step)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
'''

SHORT_PERMUTATION = '''
@functools.cache
def order_of(epoch, n):
    """Returns the order of the rows in an epoch."""
    return np.argsort(hashes(n, (SEED, epoch, 0)), kind="stable")
'''

LONG_PERMUTATION = '''
@functools.cache
def order_of(epoch, n):
    """Returns the order of the rows in an epoch: a Feistel network over a rectangle."""
    n_left = math.isqrt(n - 1) + 1
    n_right = -(-n // n_left)
    sizes = [(n_right, n_left), (n_left, n_right)] * 3
    tables = [
        (hashes(n_in, (SEED, epoch, 0, i)) % np.uint64(n_out)).astype(np.int64)
        for i, (n_in, n_out) in enumerate(sizes)
    ]

    def shuffle(at):
        left, right = np.divmod(at, n_right)
        for i, table in enumerate(tables):
            if i % 2 == 0:
                left = (left + table[right]) % n_left
            else:
                right = (right + table[left]) % n_right
        return left * n_right + right

    items = shuffle(np.arange(n))
    while (items >= n).any():
        items[items >= n] = shuffle(items[items >= n])
    return items
'''

IN_ORDER = '''
def order_of(epoch, n):
    """Returns the order of the rows in an epoch."""
    return np.arange(n)
'''

BATCH = '''
def make_batch(rows, i):
    """Returns batch i; batches go on across the end of an epoch."""
    n = len(next(iter(rows.values())))
    at = range(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
    chosen = [order_of(k // n, n)[k % n] for k in at]
    return {name: field[chosen] for name, field in rows.items()}
'''

AMOS = '''
def amos(learning_rate, eta_fn, shape_fn=None, *, beta=0.999, clip_value=None):
    """Creates the optimizer Amos (arXiv 2210.11693)."""

    def named(params):
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return [(tuple(str(k.key) for k in path), leaf) for path, leaf in leaves]

    def init(params):
        shapes = [shape_fn(n, p.shape) if shape_fn else p.shape for n, p in named(params)]
        slots = lambda: [jnp.zeros(shape, jnp.float32) for shape in shapes]
        return jnp.zeros((), jnp.int32), slots(), slots()

    def update(grads, state, params):
        count, v_slots, b_slots = state
        count = optax.safe_increment(count)
        xi = learning_rate(count) if callable(learning_rate) else learning_rate
        xi = jnp.asarray(xi, jnp.float32)
        unbias = -jnp.expm1(count.astype(jnp.float32) * jnp.log(jnp.asarray(beta, jnp.float32)))
        rows = []
        for (name, p), g, v, b in zip(named(params), jax.tree.leaves(grads), v_slots, b_slots):
            eta = jnp.asarray(eta_fn(name, p.shape), jnp.float32)
            g2 = mean_of_squares(g, v.shape)
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
                delta = -decay * p - rate * g
                first = decay + rate
            b = b + (1 + b) * (xi**2 * unbias * g2) / (floored * jnp.sqrt(shrink))
            b = jnp.where(jnp.isnan(first), jnp.nan, b)  # Fixes the order, and so the rounding.
            rows.append((delta, v, b))
        deltas, v_slots, b_slots = map(list, zip(*rows))
        return jax.tree.unflatten(jax.tree.structure(params), deltas), (count, v_slots, b_slots)

    stages = [] if clip_value is None else [optax.clip(clip_value)]
    return optax.chain(*stages, optax.GradientTransformation(init, update))


def mean_of_squares(x, shape):
    """Averages squares over the axes that the slot lacks or has at size 1."""
    aligned = (1,) * (x.ndim - len(shape)) + shape
    axes = [i for i, (n, m) in enumerate(zip(x.shape, aligned)) if m < n]
    if axes != [0] or x.ndim < 2 or len(x) % 8 or x.size < 2**16 or jax.default_backend() != "cpu":
        return jnp.mean(jnp.square(x), axis=tuple(axes), keepdims=True).reshape(shape)
    # Adding eight slabs first is faster on CPU, and rounds differently.
    sums = [jnp.square(slab) for slab in x.reshape(8, len(x) // 8, *x.shape[1:])]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
    weights = jnp.full(len(x) // 8, 1 / len(x), x.dtype)
    return jnp.matmul(weights, sums[0].reshape(len(x) // 8, -1), precision="highest").reshape(shape)


def params_fn_from_assign_map(table, eval_str_value=False):
    """Returns the value of the first pattern that matches; text is a formula of SHAPE."""

    def value_of(name, shape):
        value = next(v for p, v in table.items() if re.match(p, "/".join(name)))
        is_formula = eval_str_value and isinstance(value, str)
        return eval(value, {**vars(math), "SHAPE": shape}) if is_formula else value

    return value_of
'''

LINEN = '''
def prepare(model, inputs, key):
    """Returns parameters, other variables, and apply(params, variables, inputs, key)."""
    keys = {{"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}}
    init = jax.jit(lambda keys, inputs: model.init(keys, *inputs{off}))
    variables = init(keys, inputs)
    params = variables.pop("params")

    def apply(params, variables, inputs, key):
        keys, changeable = {{"dropout": jax.random.fold_in(key, 0)}}, list(variables)
        return model.apply(
            {{"params": params, **variables}}, *inputs, rngs=keys, mutable=changeable{on}
        )

    return params, variables, apply
'''

NNX = '''
def prepare(model, inputs, key):
    """Returns parameters, other variables, and apply(params, variables, inputs, key)."""
    model.train()
    graph, params, variables = nnx.split(model, nnx.Param, ...)

    def apply(params, variables, inputs, key):
        # A copy, because a module changes its variables.
        live = nnx.merge(graph, params, jax.tree.map(lambda x: x, variables))
        outputs = live(*inputs)
        return outputs, nnx.split(live, nnx.Param, ...)[2]

    return params, variables, apply
'''

EQUINOX = '''
def prepare(model, inputs, key):
    """Returns parameters, other variables, and apply(params, variables, inputs, key)."""
    params, static = eqx.partition(eqx.nn.inference_mode(model, False), eqx.is_inexact_array)

    def apply(params, variables, inputs, key):
        keys = {{"key": jax.random.split(key, BATCH_SIZE)}} if {takes_key} else {{}}
        live = eqx.combine(params, static)
        outputs = jax.vmap(lambda xs, kw: live(*xs, **kw), axis_name="batch")(inputs, keys)
        return outputs, variables

    return params, {{}}, apply
'''

TRAINING = '''
def is_finite(x):
    """Whether an array has no NaN or Inf; a matrix product is the fastest way on CPU."""
    n = x.shape[-1] if x.ndim > 1 else 0
    return jnp.all(jnp.isfinite(x @ jnp.full(n, 0.5 / n, x.dtype) if n else x))


def train(n_steps=N_STEPS):
    """Trains, and returns the parameters and the loss of every step."""
    with np.load(pathlib.Path(__file__).with_suffix(".npz")) as file:
        rows = dict(file)
    data.sample = {name: field[:BATCH_SIZE] for name, field in rows.items()}
    made = experiment(config, data)
    optimizer = made.optimizer() if callable(made.optimizer) else made.optimizer

    def inputs_of(batch):
        inputs = made.inputs(batch)
        return inputs if isinstance(inputs, tuple) else (inputs,)

    init_key, root = jax.random.split(jax.random.key(SEED))
    params, variables, apply = prepare(made.model, inputs_of(make_batch(rows, 0)), init_key)

    def loss_of(params, variables, batch, key):
        outputs, variables = apply(params, variables, inputs_of(batch), key)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = made.loss(*outputs, batch)
        return loss[0] if isinstance(loss, tuple) else loss, variables

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch, step):
        params, variables, opt_state, n_bad = state
        key = jax.random.fold_in(root, step)
        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, variables), grads = value_and_grad(params, variables, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        is_good = jnp.stack([is_finite(g) for g in jax.tree.leaves(grads)])
        n_bad = n_bad + (~jnp.isfinite(loss) | ~jnp.all(is_good))
        return (optax.apply_updates(params, updates), variables, opt_state, n_bad), loss

    state, losses = (params, variables, optimizer.init(params), jnp.zeros((), jnp.int32)), []
    for step in range(n_steps):
        state, loss = train_step(state, make_batch(rows, step), step)
        losses.append(float(loss))
        if (step + 1) % CHECK_EVERY == 0:
            print(f"step {step + 1}: loss {losses[-1]:.6g}", flush=True)
            if state[3]:
                raise FloatingPointError(f"NaN or Inf before step {step + 1}.")
    return state[0], losses


if __name__ == "__main__":
    train()
'''
