"""Compares training with the scales that Tekoa finds with the usual choices.

mnist:        Amos with found and with manual scales, mean test accuracy over seeds.
ptb:          the LSTM language model, Amos with found scales and AdamW over a grid.
shakespeare:  a small transformer on characters, likewise.

    python bench/scale_quality.py --data DIR            all, full size, hours on 2 cores
    python bench/scale_quality.py --data DIR --tasks shakespeare --steps 1000 --out quality

DIR, or the environment variable TEKOA_DATA, contains mnist/ (the four IDX files, gzipped),
ptb/ (ptb.train.txt, ptb.valid.txt) and tiny_shakespeare/input.txt.

Prints a table and writes OUT.json and, if matplotlib is installed, OUT.png with all curves.
Scales, slots and rate of Amos come from `amos_for`. Momentum 0.9 for language models, and
warm-up and beta for MNIST, are copied from the original's recipes. Both optimizers have
warm-up and cosine decay. Amos, and AdamW's best setting, also run at a constant rate after
the warm-up, and Amos in a run planned for 70% of the steps.
"""

import argparse
import functools
import gzip
import itertools
import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tekoa.core import rules
from tekoa.optim.amos import transform
from tekoa.optim.scales import auto

ENV = "TEKOA_DATA"
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
DECAYS = (0.01, 0.1)
FOUND = "Amos, found scales"


# --- models: plain functions of a dict of parameters ---------------------------------------


def dense_init(rng, *shape, fan_in=None):
    return jax.random.normal(rng, shape) / np.sqrt(fan_in or shape[0])


def cnn_init(rng):
    k = jax.random.split(rng, 4)
    return {
        "Conv_0": {"kernel": dense_init(k[0], 3, 3, 1, 32, fan_in=9), "bias": jnp.zeros(32)},
        "Conv_1": {"kernel": dense_init(k[1], 3, 3, 32, 64, fan_in=288), "bias": jnp.zeros(64)},
        "Dense_0": {"kernel": dense_init(k[2], 3136, 256), "bias": jnp.zeros(256)},
        "Dense_1": {"kernel": dense_init(k[3], 256, 10), "bias": jnp.zeros(10)},
    }


def cnn(params, x):
    for name in ("Conv_0", "Conv_1"):
        layer = params[name]
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(x + layer["bias"])
        batch, height, width, features = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, features).mean((2, 4))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    return x @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]


def lstm_init(rng, *, vocab, hidden):
    memory = 2 * hidden
    k = jax.random.split(rng, 3)
    return {
        "embedding": jax.random.normal(k[0], (vocab, hidden)) * hidden**-0.5,
        "shift": jnp.zeros(2 * hidden),
        "core": {"kernel": dense_init(k[1], 2 * hidden, 4, memory), "bias": jnp.zeros((4, memory))},
        "cell_shift": jnp.zeros(memory),
        "out": {"kernel": dense_init(k[2], memory, hidden), "bias": jnp.zeros(hidden)},
        "bias": jnp.zeros(vocab),
    }


def shift_norm(x, shift):
    x = x - shift
    x = x - x.mean(-1, keepdims=True)
    ms = jnp.square(x).mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(ms * np.sqrt(x.shape[-1]), 1.0))


def lstm(params, tokens, forget_bias=1.0):
    """The original's LSTM, without dropout and with a fresh state for every window."""
    hidden, memory = params["out"]["kernel"].shape[::-1]

    def cell(carry, x):
        recurrent, mem = carry
        x = shift_norm(jnp.concatenate([recurrent, x], -1), params["shift"])
        gates = jnp.einsum("bi,igm->gbm", x, params["core"]["kernel"])
        a, b, g, o = gates + params["core"]["bias"][:, None]
        gate = jax.nn.sigmoid(forget_bias - g)
        b = jnp.clip(jnp.tanh(b) / (1 + np.exp(forget_bias)), -gate, gate)
        mem = mem * (1 - gate) + b * 2 * jax.nn.silu(a)
        out = shift_norm(mem, params["cell_shift"]) * 2 * jax.nn.sigmoid(o)
        out = out @ params["out"]["kernel"] + params["out"]["bias"]
        return (out, mem), out

    x = params["embedding"][tokens].swapaxes(0, 1)
    start = jnp.zeros((len(tokens), hidden)), jnp.zeros((len(tokens), memory))
    _, out = jax.lax.scan(cell, start, x)
    return out.swapaxes(0, 1) @ params["embedding"].T + params["bias"]


def transformer_init(rng, *, vocab, length, width, n_layers=2):
    k = iter(jax.random.split(rng, 3 + 6 * n_layers))
    layers = [
        {
            "norm_0": jnp.ones(width),
            "qkv": dense_init(next(k), width, 3, 4, width // 4),
            "out": dense_init(next(k), 4, width // 4, width, fan_in=width),
            "norm_1": jnp.ones(width),
            "wide": dense_init(next(k), width, 4 * width),
            "narrow": dense_init(next(k), 4 * width, width),
        }
        for _ in range(n_layers)
    ]
    embedding = jax.random.normal(next(k), (vocab, width)) * 0.02
    positions = jax.random.normal(next(k), (length, width)) * 0.02
    head = {"norm": jnp.ones(width), "kernel": dense_init(next(k), width, vocab)}
    return {"embedding": embedding, "positions": positions, "layers": layers, "head": head}


def rms_norm(x, gain):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain


def transformer(params, tokens):
    x = params["embedding"][tokens] + params["positions"]
    mask = np.tril(np.ones((tokens.shape[1],) * 2, bool))
    for layer in params["layers"]:
        y = rms_norm(x, layer["norm_0"])
        q, k, v = jnp.einsum("bld,dthe->tblhe", y, layer["qkv"])
        logits = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
        probs = jax.nn.softmax(jnp.where(mask, logits, -1e9))
        x = x + jnp.einsum("bhqk,bkhe,hed->bqd", probs, v, layer["out"])
        y = rms_norm(x, layer["norm_1"])
        x = x + jax.nn.gelu(y @ layer["wide"]) @ layer["narrow"]
    return rms_norm(x, params["head"]["norm"]) @ params["head"]["kernel"]


# --- data ---------------------------------------------------------------------------------


def read_idx(path):
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">i4", raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def mnist(data, split):
    images = read_idx(data / f"mnist/{split}-images-idx3-ubyte.gz")[..., None] / np.float32(255)
    return images, read_idx(data / f"mnist/{split}-labels-idx1-ubyte.gz").astype(np.int32)


def ptb(data):
    def words(split):
        return (data / f"ptb/ptb.{split}.txt").read_text().replace("\n", " <eos> ").split()

    ids = {word: i for i, word in enumerate(sorted(set(words("train"))))}
    return [np.array([ids[word] for word in words(s)], np.int32) for s in ("train", "valid")]


def shakespeare(data):
    text = np.frombuffer((data / "tiny_shakespeare/input.txt").read_bytes(), np.uint8)
    ids = np.unique(text, return_inverse=True)[1].astype(np.int32)
    return [ids[:1003854], ids[1003854:]]


def windows(stream, starts, length):
    cut = stream[np.asarray(starts)[:, None] + np.arange(length + 1)]
    return cut[:, :-1], cut[:, 1:]


# --- training -----------------------------------------------------------------------------


def cross_entropy(model, params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()


def train(model, params, tx, make_batch, n_steps, *, measure, every):
    """Runs `n_steps` steps; returns (step, measure(params)) at intervals and at the end."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        grads = jax.grad(functools.partial(cross_entropy, model))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)
    state, curve = tx.init(params), []
    for i in range(n_steps):
        params, state = step(params, state, *make_batch(i))
        if (i + 1) % every == 0 or i + 1 == n_steps:
            curve.append((i + 1, measure(params)))
    return curve


def hand_set_amos(rate, beta):
    eta = {
        "Conv_0/kernel": "sqrt(8 / 9)",
        "Conv_1/kernel": "sqrt(2 / 288)",
        "Dense_0/kernel": "sqrt(2 / 3136)",
        "Dense_1/kernel": "sqrt(1 / 256)",
        ".*/bias": 0.5,
    }
    slots = {"Conv.*/kernel": "(1, 1, 1, SHAPE[-1])", "Dense.*/kernel": "(1, SHAPE[-1])", ".*": ()}
    make = functools.partial(rules.params_fn_from_assign_map, eval_str_value=True)
    return transform.amos(rate, make(eta), make(slots), beta=beta)


def run_mnist(args):
    (x, y), (test_x, test_y) = (mnist(args.data, split) for split in ("train", "t10k"))
    n_batches = len(x) // 32
    n_steps = args.steps or int(args.epochs * n_batches)
    rate = optax.linear_schedule(0.0, n_batches**-0.5, min(2000, n_steps // 4))
    predict = jax.jit(lambda params, x: cnn(params, x).argmax(-1))

    def accuracy(params):
        hits = [np.asarray(predict(params, test_x[i : i + 1000])) for i in range(0, 10000, 1000)]
        return float(np.mean(np.concatenate(hits) == test_y) * 100)

    curves = {}
    for seed, kind in itertools.product(range(args.seeds), ("manual", "found")):
        params = cnn_init(jax.random.key(seed))
        n_epochs = -(-n_steps // n_batches)
        orders = [np.random.default_rng([seed, e]).permutation(len(x)) for e in range(n_epochs)]
        rows = np.concatenate(orders)[: n_steps * 32].reshape(n_steps, 32)
        make = lambda i, rows=rows: (x[rows[i]], y[rows[i]])  # noqa: E731
        if kind == "manual":
            tx = hand_set_amos(rate, beta=0.98)
        else:
            tx = auto.amos_for(
                cnn, params, x[:128], n_batches=n_batches, learning_rate=rate, beta=0.98
            )
        curves[f"{kind} {seed}"] = train(
            cnn, params, tx, make, n_steps, measure=accuracy, every=n_batches
        )
        print(f"mnist {kind} seed {seed}: {curves[f'{kind} {seed}'][-1]}", flush=True)
    for kind in ("manual", "found"):
        last = [curve[-1][1] for name, curve in curves.items() if name.startswith(kind)]
        print(f"mnist {kind}: mean test accuracy {np.mean(last):.3f} %, {len(last)} seeds")
    return curves


def run_language_model(args, name):
    batch, length = 16, {"ptb": 35, "shakespeare": 64}[name]
    train_ids, valid_ids = {"ptb": ptb, "shakespeare": shakespeare}[name](args.data)
    vocab = int(train_ids.max()) + 1
    n_batches = len(train_ids) // (batch * length)
    n_steps = args.steps or {"ptb": 2000, "shakespeare": 2000}[name]
    rng = jax.random.key(0)
    if name == "ptb":
        model, params = lstm, lstm_init(rng, vocab=vocab, hidden=args.width)
    else:
        model = transformer
        params = transformer_init(rng, vocab=vocab, length=length, width=args.width)
    held_out = windows(valid_ids, np.arange(0, len(valid_ids) - length - 1, length)[:256], length)
    evaluate = jax.jit(functools.partial(cross_entropy, model))

    def loss(params):
        parts = [[a[i : i + 64] for a in held_out] for i in range(0, len(held_out[0]), 64)]
        return float(np.mean([evaluate(params, *part) for part in parts]))

    def make(i):
        starts = np.random.default_rng([1, i]).integers(0, len(train_ids) - length - 1, batch)
        return windows(train_ids, starts, length)

    def schedule(rate, end, n=n_steps):
        return optax.warmup_cosine_decay_schedule(0.0, rate, n // 20, n, end * rate)

    def amos_found(end=0.01, n=n_steps):
        rate, tokens = schedule(n_batches**-0.5, end, n), make(0)[0]
        return auto.amos_for(
            model, params, tokens, n_batches=n_batches, learning_rate=rate, momentum=0.9
        )

    def adamw(rate, decay, end=0.01):
        return optax.adamw(schedule(rate, end), b2=0.98, weight_decay=decay)

    curves = {}

    def run(label, tx, n=n_steps):
        start = time.time()
        every = max(n_steps // 20, 1)
        curves[label] = train(model, params, tx, make, n, measure=loss, every=every)
        last, seconds = curves[label][-1][1], time.time() - start
        print(f"{name} {label}: {last:.4f} ({seconds:.0f} s)", flush=True)
        return last

    run(FOUND, amos_found())
    run(f"{FOUND} constant", amos_found(end=1.0))
    n_short = n_steps * 7 // 10
    run(f"{FOUND}, planned for {n_short} steps", amos_found(n=n_short), n_short)
    grid = itertools.product(args.rates, DECAYS[: args.decays])
    best = min((run(f"AdamW {r:g} decay {d:g}", adamw(r, d)), r, d) for r, d in grid)
    run(f"AdamW {best[1]:g} decay {best[2]:g} constant", adamw(*best[1:], end=1.0))
    summarize(name, curves)
    return curves


def summarize(name, curves):
    best = {
        kind: min(
            (curve[-1][1], label) for label, curve in curves.items() if label.startswith(kind)
        )
        for kind in ("Amos", "AdamW")
    }
    loss, label = best["Amos"]
    target, other = best["AdamW"]
    n_steps = curves[other][-1][0]
    print(f"{name}: {label} {loss:.4f}, {other} {target:.4f}, ratio {loss / target:.4f}")
    for label, curve in curves.items():
        reached = [step for step, value in curve if value <= target]
        if reached and label.startswith("Amos"):
            print(f"  {label} reached AdamW's loss after {reached[0] / n_steps:.0%} of its steps")


def draw(curves, path):
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is not installed; no picture was written.")
        return
    figure, axes = plt.subplots(1, len(curves), figsize=(6 * len(curves), 4.5), squeeze=False)
    for axis, (task, runs) in zip(axes[0], curves.items()):
        for label, curve in runs.items():
            strong = label.startswith(("Amos", "found"))
            axis.plot(*zip(*curve), label=label, lw=2.5 if strong else 1, zorder=2 + strong)
        last = [curve[-1][1] for curve in runs.values()]
        axis.set(title=task, xlabel="step", ylabel="test accuracy" if task == "mnist" else "loss")
        if task == "mnist":
            axis.set_ylim(96, 100)
        else:
            axis.set_ylim(min(last) * 0.97, min(min(last) * 1.35, max(last) * 1.05))
        axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--data",
        type=pathlib.Path,
        default=os.environ.get(ENV),
        help=f"data sets (default: ${ENV})",
    )
    parser.add_argument("--tasks", nargs="*", default=["mnist", "ptb", "shakespeare"])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds for mnist")
    parser.add_argument("--epochs", type=int, default=9, help="epochs for mnist")
    parser.add_argument("--steps", type=int, help="steps of every run (default: by task)")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=RATES, help="learning rates of AdamW"
    )
    parser.add_argument(
        "--decays", type=int, default=len(DECAYS), help="number of AdamW weight decays"
    )
    parser.add_argument(
        "--width", type=int, default=128, help="width of the LSTM and the transformer"
    )
    parser.add_argument("--out", default="scale_quality")
    parser.add_argument("--draw", nargs="*", default=[], help="only draw these .json files")
    args = parser.parse_args()
    curves = {}
    for path in args.draw:
        curves |= json.loads(pathlib.Path(path).read_text())
    if args.draw:
        args.tasks = []
    if args.tasks and args.data is None:
        parser.error(f"set --data or {ENV} to the directory of the data sets")
    for task in args.tasks:
        curves[task] = run_mnist(args) if task == "mnist" else run_language_model(args, task)
        pathlib.Path(f"{args.out}.json").write_text(json.dumps(curves))
    draw(curves, f"{args.out}.png")


if __name__ == "__main__":
    main()
