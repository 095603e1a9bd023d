"""Where the weights of Amos end up: at the scale eta, wherever they started.

    python bench/amos_scale.py --plot docs/amos-scale.png

runs Amos from weights of three sizes, and AdamW with three weight decays, on gradients that are
pure noise. It takes a few seconds.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import tekoa

N, N_STEPS, ETA, RATE = 4096, 4000, 0.1, 0.05


def sizes(optimizer, start):
    """Returns the rms of the weights after every step."""

    def step(carry, key):
        weights, state = carry
        noise = jax.random.normal(key, weights.shape)
        updates, state = optimizer.update(noise, state, weights)
        weights = optax.apply_updates(weights, updates)
        return (weights, state), jnp.sqrt(jnp.mean(weights**2))

    weights = start * jax.random.normal(jax.random.key(0), (N,))
    keys = jax.random.split(jax.random.key(1), N_STEPS)
    return jax.lax.scan(step, (weights, optimizer.init(weights)), keys)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", metavar="FILE", help="save the curves as an image")
    args = parser.parse_args()
    amos = tekoa.amos(RATE, lambda name, shape: ETA, beta=0.99, d_coef=0, c_coef=0)
    curves = {
        f"Amos, eta = {ETA}": {f"start {start:g}": sizes(amos, start) for start in (0.001, 0.1, 1)},
        f"AdamW, rate {RATE * ETA:g}": {
            f"decay {decay:g}": sizes(
                optax.adamw(RATE * ETA, b1=0.0, b2=0.99, weight_decay=decay), ETA
            )
            for decay in (0.1, 1, 10)
        },
    }
    for name, lines in curves.items():
        print(f"{name}:", ", ".join(f"{label} -> {line[-1]:.4f}" for label, line in lines.items()))
    if args.plot:
        draw(curves, args.plot)


def draw(curves, path):
    from matplotlib import figure

    image = figure.Figure(figsize=(8, 3), layout="constrained")
    for axes, (name, lines) in zip(image.subplots(1, 2, sharey=True), curves.items(), strict=True):
        for label, line in lines.items():
            axes.plot(line, label=label)
        axes.axhline(ETA, color="0.6", linestyle="--", zorder=0)
        axes.set(title=name, xlabel="step", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    image.axes[0].set_ylabel("rms of the weights")
    image.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
