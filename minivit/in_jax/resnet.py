"""The two ResNets of the paper: the hybrid's stem (v1 order, vit_jax) and BiT (v2 order)."""

import jax

from ..shapes import check_pixels, numbered
from .convolution import max_pool, std_conv
from .mlp import dense
from .norms import group_norm


def relu(x):  # [...] -> [...]
    """Negative entries become 0, and pass no gradient."""
    return jax.nn.relu(x)


def bottleneck(p, x, stride=1):  # [B, height, width, C] -> [B, h, w, 4F]
    """1x1, 3x3, 1x1, each normalised after it, added to the input or its projection; then ReLU."""
    shortcut = x
    if "conv_proj" in p:
        shortcut = group_norm(p["gn_proj"], std_conv(p["conv_proj"], x, stride=stride))
    y = relu(group_norm(p["gn1"], std_conv(p["conv1"], x)))
    y = relu(group_norm(p["gn2"], std_conv(p["conv2"], y, stride=stride)))
    return relu(shortcut + group_norm(p["gn3"], std_conv(p["conv3"], y)))


def stages(p, x, unit, name, out=None):  # [B, height, width, C] -> [B, h, w, C']
    """All units of all stages; the first unit of every stage but the first halves the image."""
    for b in range(1, numbered(p, "block") + 1):
        block = p[f"block{b}"]
        for u in range(1, numbered(block, "unit") + 1):
            x = unit(block[name.format(u)], x, 2 if b > 1 and u == 1 else 1)
        if out is not None:
            out[f"stem_block{b}"] = x
    return x


def stem(p, images, out=None):  # [B, height, width, C] -> [B, h, w, C']
    """The convolutions before a hybrid's patches: a root that shrinks 4 times, then the stages."""
    check_pixels(images)
    x = relu(group_norm(p["gn_root"], std_conv(p["conv_root"], images, stride=2)))
    x = max_pool(x)
    if out is not None:
        out["stem_pool"] = x
    return stages(p, x, bottleneck, "unit{}", out)


def normalise_relu(p, x):  # [B, height, width, C] -> [B, height, width, C]
    """BiT's normalisation and ReLU, which come before a convolution."""
    return relu(group_norm({"scale": p["gamma"], "bias": p["beta"]}, x, 1e-5))


def preactivation_unit(p, x, stride=1):  # [B, height, width, C] -> [B, h, w, 4F]
    """BiT's unit: normalise and ReLU, then convolve, three times; nothing after the sum.

    The projection takes the input after the first ReLU.
    """
    options = {"form": "bit", "padding": 0}
    first = normalise_relu(p["a"]["group_norm"], x)
    shortcut = x
    if "proj" in p["a"]:
        conv = p["a"]["proj"]["standardized_conv2d"]
        shortcut = std_conv(conv, first, stride=stride, **options)
    y = std_conv(p["a"]["standardized_conv2d"], first, **options)
    y = normalise_relu(p["b"]["group_norm"], y)
    y = std_conv(p["b"]["standardized_conv2d"], y, stride=stride, form="bit", padding=1)
    y = normalise_relu(p["c"]["group_norm"], y)
    return shortcut + std_conv(p["c"]["standardized_conv2d"], y, **options)


def bit(p, images, *, out=None):  # [B, height, width, C] -> [B, classes]
    """The whole BiT ResNet (arXiv 1912.11370), the paper's baseline; see the NumPy twin."""
    check_pixels(images)
    p = p["resnet"]
    root = p["root_block"]["standardized_conv2d"]
    conv = std_conv(root, images, stride=2, padding=3, form="bit")
    pooled = max_pool(conv, padding=1)
    x = stages(p, pooled, preactivation_unit, "unit{:02d}", out)
    y = features = normalise_relu(p["group_norm"], x).mean((1, 2))
    if "head" in p:
        head = p["head"]["conv2d"]
        kernel = head["kernel"].reshape(head["kernel"].shape[2:])
        y = dense({"kernel": kernel, "bias": head["bias"]}, y)
    if out is not None:
        out |= {"root_conv": conv, "root": pooled, "features": features, "logits": y}
    return y
