"""A softmax layer on handwritten digits, three times by the same gradients: NumPy loops, NumPy arrays, the fused loss.

    python examples/softmax_digits.py --picture digits.png

The layer is Z = X W with X (N, D) and W (D, V); S = softmax(Z) by rows; the loss is the mean of -log S_iy. Its
gradients are dW = X^T (S - Y) / N and dX = (S - Y) W^T / N, with Y the one-hot targets, and a step goes against them:
W <- W - lr dW. docs/loss.md derives them. The first two runs are plain gradient descent and give the same numbers; the
third is the form to use, with SELAdam. Needs numpy, scikit-learn and, for the picture, matplotlib.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from seloptim.losses import linear_cross_entropy

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
LossAndGradients = Callable[[Array, Array, Labels], tuple[float, Array, Array]]


def softmax(z: Array) -> Array:
    """Row by row, shifted by the largest logit: exp(789) would overflow, exp(0) cannot."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_loss_loops(w: Array, x: Array, y: Labels) -> tuple[float, Array, Array]:
    """The mean loss, dW and dX, one example and one class at a time."""
    n, classes = x.shape[0], w.shape[1]
    loss, dw, dx = 0.0, np.zeros_like(w), np.zeros_like(x)
    for i in range(n):
        z = [float(x[i] @ w[:, j]) for j in range(classes)]
        top = max(z)
        e = [np.exp(z_j - top) for z_j in z]
        total = sum(e)
        loss += (np.log(total) + top - z[y[i]]) / n
        for j in range(classes):
            dz = (e[j] / total - (j == y[i])) / n
            dw[:, j] += dz * x[i]
            dx[i] += dz * w[:, j]
    return float(loss), dw, dx


def softmax_loss_vectorised(w: Array, x: Array, y: Labels) -> tuple[float, Array, Array]:
    """The same with arrays."""
    n = x.shape[0]
    z = x @ w
    shifted = z - z.max(axis=1, keepdims=True)
    log_s = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    dz = np.exp(log_s)  # S
    dz[np.arange(n), y] -= 1  # S - Y
    dz /= n
    return float(-log_s[np.arange(n), y].mean()), x.T @ dz, dz @ w.T


def digits() -> tuple[Array, Array, Labels, Labels]:
    """1797 images of 8 by 8 pixels in [0, 1] and a constant one, a quarter of them kept for the test."""
    data, labels = load_digits(return_X_y=True)
    x = np.concatenate([data / 16, np.ones((len(data), 1))], axis=1)
    x_train, x_test, y_train, y_test = train_test_split(x, labels, test_size=0.25, random_state=0, stratify=labels)
    return x_train, x_test, y_train, y_test


def batches(n: int, epochs: int, size: int = 128) -> list[Labels]:
    """The same order for every run."""
    rng = np.random.default_rng(0)
    return [part for _ in range(epochs) for part in np.array_split(rng.permutation(n), n // size)]


def train_numpy(loss: LossAndGradients, x: Array, y: Labels, epochs: int, lr: float = 1.0) -> Array:
    w = np.zeros((x.shape[1], 10))
    for part in batches(len(x), epochs):
        _, dw, _ = loss(w, x[part], y[part])
        w -= lr * dw
    return w


def train_fused(x: Array, y: Labels, epochs: int, lr: float = 2e-3) -> Array:
    from seloptim.optimizer import SELAdam

    torch.manual_seed(0)
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy(y)
    layer = torch.nn.Linear(x.shape[1], 10, bias=False)
    optimizer = SELAdam(layer.parameters(), lr=lr)
    for part in batches(len(x), epochs):
        optimizer.zero_grad()
        linear_cross_entropy(inputs[part], layer.weight, targets[part]).backward()
        optimizer.step()
    return layer.weight.detach().double().t().numpy()


def accuracy(w: Array, x: Array, y: Labels) -> float:
    return float(((x @ w).argmax(axis=1) == y).mean())


def draw(weights: dict[str, Array], path: str) -> None:
    """W's ten columns as images, a row for each run: red speaks for a digit, blue against it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(weights), 10, figsize=(10, 1.2 * len(weights)), squeeze=False)
    for i, (row, (name, w)) in enumerate(zip(axes, weights.items(), strict=True)):
        limit = np.quantile(np.abs(w[:64]), 0.98)  # single pixels on the edge would leave the rest pale
        for digit, ax in enumerate(row):
            ax.imshow(w[:64, digit].reshape(8, 8), cmap="RdBu_r", vmin=-limit, vmax=limit)
            ax.set(xticks=[], yticks=[])
            if i == 0:
                ax.set_title(str(digit))
        row[0].set_ylabel(name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--picture", metavar="FILE", help="draw the ten columns of W")
    args = parser.parse_args(argv)

    x_train, x_test, y_train, y_test = digits()
    weights = {
        "loops": train_numpy(softmax_loss_loops, x_train, y_train, args.epochs),
        "arrays": train_numpy(softmax_loss_vectorised, x_train, y_train, args.epochs),
        "fused": train_fused(x_train, y_train, args.epochs),
    }
    result = {name: accuracy(w, x_test, y_test) for name, w in weights.items()}
    for name, w in weights.items():
        loss, _, _ = softmax_loss_vectorised(w, x_train, y_train)
        print(f"{name:7} training loss {loss:.6f}   test accuracy {result[name]:.4f}")
    print(f"largest difference of W between loops and arrays: {np.abs(weights['loops'] - weights['arrays']).max():.1e}")
    if args.picture:
        draw(weights, args.picture)
        print(f"wrote {args.picture}")
    return result


if __name__ == "__main__":
    main()
