"""Parameters: nested dictionaries of arrays whose paths are the official checkpoint names."""

import math
import re

import numpy as np

from .shapes import pair
from .variants import ResNet, convolutions, feature_channels, tokens


def natural_order(name):  # sort key: block 2 before block 10
    """Numbers inside a name compare as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def flatten(tree, prefix=None):  # nested dictionaries -> {"a/b/c": leaf}
    """Every leaf under its '/'-joined path, blocks in the order of their numbers."""
    if not isinstance(tree, dict):
        return {prefix or "": tree}
    flat = {}
    for name in sorted(tree, key=natural_order):
        flat |= flatten(tree[name], name if prefix is None else f"{prefix}/{name}")
    return flat


def unflatten(flat):  # {"a/b/c": leaf} -> nested dictionaries
    """The inverse of `flatten`; a name that is a leaf and a folder of others is refused."""
    tree = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        node = tree
        for i, folder in enumerate(folders, 1):
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path} goes through the array {'/'.join(folders[:i])}")
        if name in node:
            raise ValueError(f"{path} is an array and a folder of arrays")
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
    if "Transformer" not in p:
        return p
    rest = dict(p["Transformer"])
    stacked = rest.pop("encoderblock", None)
    if stacked is not None:
        for i in range(len(next(iter(flatten(stacked).values())))):
            rest[f"encoderblock_{i}"] = tree_map(lambda leaf, i=i: leaf[i], stacked)
    return p | {"Transformer": rest}


def is_head(name):
    """The layer of class scores; BiT's lies a folder deeper."""
    return name.startswith(("head/", "resnet/head/"))


def split_frozen(params, freeze):  # -> frozen, trained
    """With `freeze` the head alone is trained, the linear probe of a model's features."""
    if not freeze:
        return {}, params
    head = {name: leaf for name, leaf in flatten(params).items() if is_head(name)}
    return without_head(params), unflatten(head)


def without_head(params):
    """The same arrays but those of the head and of what a masked objective alone needed."""
    kept = flatten(params).items()
    dropped = ("mask", "prediction")
    return unflatten(
        {n: leaf for n, leaf in kept if not is_head(n) and n.split("/")[0] not in dropped}
    )


def merge(first, second):  # two trees without a common leaf -> one
    """Together again what `split_frozen` took apart."""
    both = first | second
    for name in first.keys() & second.keys():
        both[name] = merge(first[name], second[name])
    return both


def select(tree, like):
    """The leaves of a tree that another one has."""
    return tree_map(lambda _, leaf: leaf, like, tree)


def under(folder, named):
    """The same arrays, one folder deeper."""
    return {f"{folder}/{name}": shape for name, shape in named.items()}


def attention_shapes(d, h):  # -> {name: shape}
    """The arrays of multi-head attention."""
    result = {}
    for name in ("query", "key", "value"):
        result[f"{name}/kernel"] = (d, h, d // h)
        result[f"{name}/bias"] = (h, d // h)
    return result | {"out/kernel": (h, d // h, d), "out/bias": (d,)}


def mlp_shapes(d, m):  # -> {name: shape}
    """The arrays of the MLP of a block."""
    result = {}
    for i, (rows, columns) in enumerate([(d, m), (m, d)]):
        result[f"Dense_{i}/kernel"] = (rows, columns)
        result[f"Dense_{i}/bias"] = (columns,)
    return result


def stem_shapes(variant, channels):  # -> {name: shape}
    """The arrays of a hybrid's stem, under the names of vit_jax."""
    result = {}
    for b, u, part, side, cin, cout, *_ in convolutions(variant.stem, variant.stem_width, channels):
        folder = f"block{b}/unit{u}/" if b else ""
        conv, norm = (f"_{part}", f"_{part}") if isinstance(part, str) else (part, part)
        result[f"{folder}conv{conv}/kernel"] = (side, side, cin, cout)
        result |= {f"{folder}gn{norm}/{name}": (cout,) for name in ("scale", "bias")}
    return result


def resnet_shapes(variant, *, channels, classes):  # -> {name: shape}
    """The arrays of a BiT ResNet, under its names."""
    result, last = {}, variant.width
    for b, u, part, side, cin, cout, *_ in convolutions(variant.units, variant.width, channels):
        conv = "standardized_conv2d/kernel"
        if part == "root":
            result[f"root_block/{conv}"] = (side, side, cin, cout)
            continue
        letter = {"proj": "a/proj", 1: "a", 2: "b", 3: "c"}[part]
        folder = f"block{b}/unit{u:02d}/{letter}"
        result[f"{folder}/{conv}"] = (side, side, cin, cout)
        if part != "proj":
            result |= {f"{folder}/group_norm/{name}": (cin,) for name in ("gamma", "beta")}
        last = cout
    result |= {f"group_norm/{name}": (last,) for name in ("gamma", "beta")}
    if classes is not None:
        result |= {"head/conv2d/kernel": (1, 1, last, classes), "head/conv2d/bias": (classes,)}
    return under("resnet", result)


def named_shapes(
    variant, length, *, channels, classes, class_token=True, positions=True, representation=None
):  # -> {name: shape}
    """Official name and shape of every array of a ViT whose sequence has `length` tokens."""
    d, m, h = variant.width, variant.mlp, variant.heads
    block = {f"LayerNorm_{i}/{name}": (d,) for i in (0, 2) for name in ("scale", "bias")}
    block |= under("MultiHeadDotProductAttention_1", attention_shapes(d, h))
    block |= under("MlpBlock_3", mlp_shapes(d, m))
    p, q = pair(variant.patch)
    result = {}
    if variant.stem is not None:
        result, channels = stem_shapes(variant, channels), feature_channels(variant)
    result |= {"embedding/kernel": (p, q, channels, d), "embedding/bias": (d,)}
    if class_token:
        result["cls"] = (1, 1, d)
    if positions:
        result["Transformer/posembed_input/pos_embedding"] = (1, length, d)
    for i in range(variant.blocks):
        result |= under(f"Transformer/encoderblock_{i}", block)
    result |= {f"Transformer/encoder_norm/{name}": (d,) for name in ("scale", "bias")}
    if representation:
        result["pre_logits/kernel"] = (d, representation)
        result["pre_logits/bias"] = (representation,)
    if classes is not None:
        result["head/kernel"] = (representation or d, classes)
        result["head/bias"] = (classes,)
    return result


def lecun_normal(rng, shape):
    """Normal, cut at two deviations, variance 1 / fan-in after the cut."""
    values = rng.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(outside.sum())
    # Cutting at two deviations leaves 0.8796 of the deviation.
    return values / (0.87962566103423978 * math.sqrt(math.prod(shape[:-1])))


def xavier_uniform(rng, shape, rows):
    """Uniform with variance 2 / (rows + columns) of the matrix that the kernel stands for."""
    limit = math.sqrt(6 / (rows + math.prod(shape) / rows))
    return rng.uniform(-limit, limit, shape)


def draw(rng, name, shape):
    """A fresh array with the official distribution (vit_jax), by its name."""
    if is_head(name):
        return np.zeros(shape)
    if re.search(r"(^embedding|^pre_logits|conv(_\w+|\d)|standardized_conv2d)/kernel$", name):
        return lecun_normal(rng, shape)
    if name.endswith("gn3/scale"):
        return np.zeros(shape)  # every unit begins as its shortcut
    if name.endswith("pos_embedding"):
        return 0.02 * rng.standard_normal(shape)
    if "Dense_" in name and name.endswith("bias"):
        return 1e-6 * rng.standard_normal(shape)
    if name.startswith("Transformer") and name.endswith("kernel"):
        rows = math.prod(shape[:-1]) if name.endswith("out/kernel") else shape[0]
        return xavier_uniform(rng, shape, rows)
    return np.ones(shape) if name.endswith(("scale", "gamma")) else np.zeros(shape)


def initialise(variant, rng, *, image_size=224, channels=3, classes=1000, head_bias=0.0, **options):
    """Fresh float32 parameters with the official distributions, drawn from one generator.

    `rng` is a NumPy Generator or a seed; `image_size` a side or (height, width) in pixels;
    `classes` None leaves the head out. Options: `class_token`, `positions` (both True), and
    `representation`, the width of `pre_logits`. The head starts at zero, so every class is equally
    likely and the first loss is log(classes); ImageNet-21k pre-training set `head_bias` to -10.
    """
    if channels < 1 or (classes is not None and classes < 1):
        raise ValueError(f"{channels} channels and {classes} classes: each must be at least 1")
    rng = np.random.default_rng(rng)
    if isinstance(variant, ResNet):
        named, bias = (
            resnet_shapes(variant, channels=channels, classes=classes, **options),
            "resnet/head/conv2d/bias",
        )
    else:
        length = tokens(variant, image_size, class_token=options.get("class_token", True))
        named = named_shapes(variant, length, channels=channels, classes=classes, **options)
        bias = "head/bias"
    p = {name: draw(rng, name, shape).astype("float32") for name, shape in named.items()}
    if classes is not None:
        p[bias] += np.float32(head_bias)
    return unflatten(p)
