"""Parameters: nested dictionaries of arrays whose paths are the official checkpoint names."""

import math
import re

import numpy as np

from .variants import tokens


def natural_order(name):  # sort key: block 2 before block 10
    """Numbers inside a name compare as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def flatten(tree, prefix=""):  # nested dictionaries -> {"a/b/c": leaf}
    """Every leaf under its '/'-joined path, blocks in the order of their numbers."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat = {}
    for name in sorted(tree, key=natural_order):
        flat |= flatten(tree[name], f"{prefix}/{name}" if prefix else name)
    return flat


def unflatten(flat):  # {"a/b/c": leaf} -> nested dictionaries
    """The inverse of `flatten`."""
    tree = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def tree_map(function, tree, *others):
    """Apply a function to the leaves of one tree, or to the matching leaves of several."""
    if not isinstance(tree, dict):
        return function(tree, *others)
    return {name: tree_map(function, tree[name], *(o[name] for o in others)) for name in tree}


def pack(tree):  # -> {"kernel": vector, "other": vector}
    """All leaves end to end, those that are decayed apart from the others.

    An optimiser then does a few long operations instead of hundreds of short ones.
    """
    groups = {"kernel": [], "other": []}
    for name, leaf in flatten(tree).items():
        groups["kernel" if is_kernel(name) else "other"].append(leaf.reshape(-1))
    return {
        group: leaves[0].__array_namespace__().concatenate(leaves)
        for group, leaves in groups.items()
        if leaves
    }


def unpack(packed, like):  # -> tree with the shapes of `like`
    """The inverse of `pack`; in NumPy the leaves are views into the vectors."""
    start, leaves = dict.fromkeys(packed, 0), {}
    for name, leaf in flatten(like).items():
        group = "kernel" if is_kernel(name) else "other"
        end = start[group] + math.prod(leaf.shape)
        leaves[name] = packed[group][start[group] : end].reshape(leaf.shape)
        start[group] = end
    return unflatten(leaves)


def is_kernel(name):
    """Weight decay is for kernels: no bias, no norm's scale, not the class token, no positions."""
    return name.split("/")[-1] == "kernel"


def count(tree):
    """Number of entries in all arrays."""
    return sum(leaf.size for leaf in flatten(tree).values())


def stack_blocks(p):  # Transformer/encoderblock_{i}/... -> Transformer/encoderblock/...
    """The blocks as one tree of arrays with a leading axis L: what the JAX twin scans."""
    encoder = p["Transformer"]
    names = sorted((n for n in encoder if n.startswith("encoderblock_")), key=natural_order)
    rest = {name: value for name, value in encoder.items() if name not in names}
    if names:
        first, *others = (encoder[name] for name in names)
        rest["encoderblock"] = tree_map(lambda *leaves: np.stack(leaves), first, *others)
    return p | {"Transformer": rest}


def unstack_blocks(p):  # Transformer/encoderblock/... -> Transformer/encoderblock_{i}/...
    """The inverse of `stack_blocks`."""
    rest = dict(p["Transformer"])
    stacked = rest.pop("encoderblock", None)
    if stacked is not None:
        for i in range(len(next(iter(flatten(stacked).values())))):
            rest[f"encoderblock_{i}"] = tree_map(lambda leaf, i=i: leaf[i], stacked)
    return p | {"Transformer": rest}


# --- The official initial distributions (vit_jax). Each draws from the same NumPy generator. ---


def lecun_normal(rng, shape):
    """Normal, cut at two deviations, variance 1 / fan-in after the cut."""
    fan_in = math.prod(shape[:-1])
    draw = rng.standard_normal(shape)
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(outside.sum())
    # Cutting at two deviations leaves 0.8796 of the deviation.
    return draw / (0.87962566103423978 * math.sqrt(fan_in))


def xavier_uniform(rng, rows, columns, shape):
    """Uniform with variance 2 / (rows + columns) of the matrix that the kernel stands for."""
    limit = math.sqrt(6 / (rows + columns))
    return rng.uniform(-limit, limit, shape)


def initialise_block(rng, variant):
    """One encoder block."""
    d, m, h = variant.width, variant.mlp, variant.heads
    k = d // h

    def norm():
        return {"scale": np.ones(d), "bias": np.zeros(d)}

    def projection():
        return {"kernel": xavier_uniform(rng, d, d, (d, h, k)), "bias": np.zeros((h, k))}

    def dense(rows, columns):
        kernel = xavier_uniform(rng, rows, columns, (rows, columns))
        return {"kernel": kernel, "bias": 1e-6 * rng.standard_normal(columns)}

    attention = {name: projection() for name in ("query", "key", "value")}
    attention["out"] = {"kernel": xavier_uniform(rng, d, d, (h, k, d)), "bias": np.zeros(d)}
    return {
        "LayerNorm_0": norm(),
        "MultiHeadDotProductAttention_1": attention,
        "LayerNorm_2": norm(),
        "MlpBlock_3": {"Dense_0": dense(d, m), "Dense_1": dense(m, d)},
    }


def initialise(
    variant,
    rng,
    *,
    image_size=224,
    channels=3,
    classes=1000,
    class_token=True,
    positions=True,
    representation=None,
    head_bias=0.0,
):
    """Fresh float32 parameters with the official distributions, drawn from one generator.

    `rng` is a NumPy Generator or a seed; `image_size` a side or (height, width) in pixels;
    `representation` the width of `pre_logits`, if wanted; `classes` None leaves the head out.
    The head starts at zero, so every class is equally likely and the first loss is log(classes);
    ImageNet-21k pre-training set `head_bias` to -10 for its sigmoid loss.
    """
    if channels < 1 or (classes is not None and classes < 1):
        raise ValueError(f"{channels} channels and {classes} classes: each must be at least 1")
    rng = np.random.default_rng(rng)
    d = variant.width
    length = tokens(variant, image_size, class_token=class_token)
    kernel = lecun_normal(rng, (variant.patch, variant.patch, channels, d))
    encoder, p = {}, {"embedding": {"kernel": kernel, "bias": np.zeros(d)}}
    if class_token:
        p["cls"] = np.zeros((1, 1, d))
    if positions:
        table = 0.02 * rng.standard_normal((1, length, d))
        encoder["posembed_input"] = {"pos_embedding": table}
    for i in range(variant.blocks):
        encoder[f"encoderblock_{i}"] = initialise_block(rng, variant)
    encoder["encoder_norm"] = {"scale": np.ones(d), "bias": np.zeros(d)}
    p["Transformer"] = encoder
    if representation:
        p["pre_logits"] = {
            "kernel": lecun_normal(rng, (d, representation)),
            "bias": np.zeros(representation),
        }
    if classes is not None:
        p["head"] = {
            "kernel": np.zeros((representation or d, classes)),
            "bias": np.full(classes, head_bias),
        }
    return tree_map(lambda leaf: leaf.astype("float32"), p)
