"""What attention looks at, as numbers: rollout, distance, likeness of positions, main filters.

Everything is NumPy on arrays that a model's `out` or parameters hold; `figures` draws it.
"""

from itertools import count, takewhile

import numpy as np

FUSIONS = {"mean": np.mean, "max": np.max, "min": np.min}


def of_blocks(out, name="attention"):  # what `in_numpy.vit` put into `out` -> [B, L, H, N, N]
    """The weights of all blocks, or with "attention_gradient" what `back` found about them."""
    names = takewhile(out.__contains__, (f"block{i}_{name}" for i in count()))
    return np.stack([out[name] for name in names], axis=1)


def rollout_layers(attention, fuse="mean"):  # [..., H, N, N] -> [..., N, N]
    """One layer's flow: heads fused, half of it the residual connection, rows that sum to one."""
    if fuse not in FUSIONS:
        raise ValueError(f"unknown fusion {fuse!r}; choose one of {', '.join(FUSIONS)}")
    fused = FUSIONS[fuse](np.asarray(attention, np.float64), axis=-3)
    fused = fused + np.eye(fused.shape[-1])
    return fused / fused.sum(-1, keepdims=True)


def rollout(attention, fuse="mean"):  # [B, L, H, N, N] -> [B, N, N]
    """How much of each input token is in each output token, if attention is all that mixes.

    The product of the layers' flows, later ones on the left (arXiv 2005.00928; Fig. 6). Rows sum to
    one. "max" and "min" keep the strongest or the weakest head instead of the mean.
    """
    return product(rollout_layers(attention, fuse))


def product(layers):  # [B, L, N, N] -> [B, N, N]
    """Through all layers, the first one on the right."""
    result = layers[:, 0]
    for i in range(1, layers.shape[1]):
        result = layers[:, i] @ result
    return result


def gradient_rollout(attention, gradient):  # 2 x [B, L, H, N, N] -> [B, N, N]
    """Rollout of what speaks for one class: each weight counts by its score's gradient.

    Heads are fused as the mean of the positive part of weight times gradient (arXiv 2103.15679), so
    that what speaks against the class counts nothing; then as in `rollout`, rows summing to one,
    where that paper adds up without. `gradient` is what `in_numpy.vit` put into `out` when its
    `back` was given a one for that class.
    """
    helpful = np.maximum(np.asarray(attention, np.float64) * gradient, 0)
    return product(rollout_layers(helpful))


def on_the_grid(weights, grid, prefix):  # [B, N, N] -> [B, rows, columns]
    """Where the output looks: the class token's row, or the mean over rows where there is none."""
    rows = weights[:, 0] if prefix else weights.mean(1)
    return rows[:, prefix:].reshape(-1, *grid)


def patch_distances(grid, patch):  # -> pixels [N, N]
    """Distance between the centres of any two patches."""
    patch = np.broadcast_to(patch, 2)
    places = np.indices(grid).reshape(2, -1).T * patch
    return np.sqrt(((places[:, None] - places) ** 2).sum(-1))


def attention_distance(attention, grid, patch, *, prefix=1, renormalise=True):
    # [B, L, H, N, N] -> pixels [B, L, H]
    """How far heads look: distance weighted by attention, a mean over queries (Fig. 7, right).

    Tokens before the patches have no place and are left out; with `renormalise` each row's rest
    then sums to one again, otherwise what went to them counts as no distance, as does a row that
    looks at no patch at all. The paper does not say which; on its scale 16 pixels are one patch.
    """
    rows, columns = grid
    if attention.shape[-1] != prefix + rows * columns:
        raise ValueError(
            f"{attention.shape[-1]} tokens are not {prefix} and a grid of {rows}x{columns}"
        )
    weights = np.asarray(attention, np.float64)[..., prefix:, prefix:]
    if renormalise:
        total = weights.sum(-1, keepdims=True)
        weights = weights / np.where(total > 0, total, 1)
    return (weights * patch_distances(grid, patch)).sum(-1).mean(-1)


def position_similarity(table, grid, *, prefix=1, places=None):
    # [1, N, D] -> [rows, columns, rows, columns]
    """Cosine between the position embeddings of any two patches (Fig. 7, centre); 0 with a zero.

    `places` are rows and columns of the first of the two, where not all are wanted.
    """
    patches = np.asarray(table, np.float64)[0, prefix:]
    length = np.linalg.norm(patches, axis=-1, keepdims=True)
    patches = (patches / np.where(length > 0, length, 1)).reshape(*grid, -1)
    first = patches if places is None else patches[np.ix_(*places)]
    return np.tensordot(first, patches, (-1, -1))


def main_filters(kernel, count):  # [P, P, C, D] -> [count, P, P, C]
    """The directions along which the D embedding filters vary most (Fig. 7, left).

    Principal components: the filters are centred first. A component's sign says nothing; here its
    largest entry is positive.
    """
    filters = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1]).T  # [D, P*P*C]
    _, _, components = np.linalg.svd(filters - filters.mean(0), full_matrices=False)
    components = components[:count]
    strongest = np.take_along_axis(components, abs(components).argmax(-1)[:, None], -1)
    return (components * np.sign(strongest)).reshape(-1, *kernel.shape[:3])
