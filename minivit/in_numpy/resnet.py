"""The two ResNets of the paper: the hybrid's stem (v1 order, vit_jax) and BiT (v2 order)."""

import numpy as np

from ..shapes import check_pixels, numbered
from .convolution import max_pool, std_conv
from .half import narrow, wide
from .mlp import dense
from .norms import group_norm


def relu(x):  # [...] -> [...]
    """Negative entries become 0, and pass no gradient."""
    y = np.maximum(x, 0)
    return y, lambda dy: np.where(x > 0, dy, 0)


def bottleneck(p, x, stride=1):  # [B, height, width, C] -> [B, h, w, 4F]
    """1x1, 3x3, 1x1, each normalised after it, added to the input or its projection; then ReLU."""
    shortcut, residual, backs = x, x, []
    if "conv_proj" in p:
        shortcut, back_proj = std_conv(p["conv_proj"], x, stride=stride)
        shortcut, back_gn_proj = group_norm(p["gn_proj"], shortcut)
    for i in (1, 2, 3):
        step = stride if i == 2 else 1
        residual, back_conv = std_conv(p[f"conv{i}"], residual, stride=step)
        residual, back_norm = group_norm(p[f"gn{i}"], residual)
        residual, back_relu = relu(residual) if i < 3 else (residual, None)
        backs.append((i, back_conv, back_norm, back_relu))
    y, back_sum = relu(shortcut + residual)

    def back(dy):
        dp, dx = {}, back_sum(dy)
        dshortcut = dx
        for i, back_conv, back_norm, back_relu in reversed(backs):
            dp[f"gn{i}"], dx = back_norm(back_relu(dx) if back_relu else dx)
            dp[f"conv{i}"], dx = back_conv(dx)
        if "conv_proj" in p:
            dp["gn_proj"], dshortcut = back_gn_proj(dshortcut)
            dp["conv_proj"], dshortcut = back_proj(dshortcut)
        return dp, dx + dshortcut

    return y, back


def stages(p, x, unit, name, out=None):  # [B, height, width, C] -> [B, h, w, C']
    """All units of all stages; the first unit of every stage but the first halves the image."""
    backs = []
    for b in range(1, numbered(p, "block") + 1):
        block = p[f"block{b}"]
        for u in range(1, numbered(block, "unit") + 1):
            stride = 2 if b > 1 and u == 1 else 1
            x, back_unit = unit(block[name.format(u)], x, stride)
            backs.append((f"block{b}", name.format(u), back_unit))
        if out is not None:
            out[f"stem_block{b}"] = x

    def back(dx):
        dp = {}
        for block, unit, back_unit in reversed(backs):
            dp.setdefault(block, {})[unit], dx = back_unit(dx)
        return dp, dx

    return x, back


def stem(p, images, out=None):  # [B, height, width, C] -> [B, h, w, C']
    """The convolutions before a hybrid's patches: a root that shrinks 4 times, then the stages."""
    check_pixels(images)
    x, back_root = std_conv(p["conv_root"], images, stride=2)
    x, back_norm = group_norm(p["gn_root"], x)
    x, back_relu = relu(x)
    x, back_pool = max_pool(x)
    if out is not None:
        out["stem_pool"] = x
    y, back_stages = stages(p, x, bottleneck, "unit{}", out)

    def back(dy):
        dp, dx = back_stages(dy)
        dp["gn_root"], dx = back_norm(back_relu(back_pool(dx)))
        dp["conv_root"], dx = back_root(dx)
        return dp, dx

    return y, back


def named(p):  # BiT's names of a normalisation's parameters -> the others'
    """Scale and bias."""
    return {"scale": p["gamma"], "bias": p["beta"]}


def normalise_relu(p, x):  # [B, height, width, C] -> [B, height, width, C]
    """BiT's normalisation and ReLU, which come before a convolution."""
    x, back_norm = group_norm(named(p), x, 1e-5)
    y, back_relu = relu(x)

    def back(dy):
        dp, dx = back_norm(back_relu(dy))
        return {"gamma": dp["scale"], "beta": dp["bias"]}, dx

    return y, back


def preactivation_unit(p, x, stride=1):  # [B, height, width, C] -> [B, h, w, 4F]
    """BiT's unit: normalise and ReLU, then convolve, three times; nothing after the sum.

    The projection takes the input after the first ReLU.
    """
    options = {"form": "bit", "padding": 0}
    first, back_first = normalise_relu(p["a"]["group_norm"], x)
    shortcut = x
    if "proj" in p["a"]:
        conv = p["a"]["proj"]["standardized_conv2d"]
        shortcut, back_proj = std_conv(conv, first, stride=stride, **options)
    y, back_a = std_conv(p["a"]["standardized_conv2d"], first, **options)
    y, back_norm_b = normalise_relu(p["b"]["group_norm"], y)
    conv = p["b"]["standardized_conv2d"]
    y, back_b = std_conv(conv, y, stride=stride, form="bit", padding=1)
    y, back_norm_c = normalise_relu(p["c"]["group_norm"], y)
    y, back_c = std_conv(p["c"]["standardized_conv2d"], y, **options)

    def back(dy):
        dp = {"a": {}, "b": {}, "c": {}}
        dp["c"]["standardized_conv2d"], d = back_c(dy)
        dp["c"]["group_norm"], d = back_norm_c(d)
        dp["b"]["standardized_conv2d"], d = back_b(d)
        dp["b"]["group_norm"], d = back_norm_b(d)
        dp["a"]["standardized_conv2d"], d = back_a(d)
        dx = dy
        if "proj" in p["a"]:
            dconv, dshortcut = back_proj(dy)
            dp["a"]["proj"], dx = {"standardized_conv2d": dconv}, 0
            d = d + dshortcut
        dp["a"]["group_norm"], d = back_first(d)
        return dp, d + dx

    return shortcut + y, back


def bit(p, images, *, out=None):  # [B, height, width, C] -> [B, classes]
    """The whole BiT ResNet (arXiv 1912.11370), the paper's baseline.

    Without a head the result is the features [B, C']. A dictionary `out` receives root_conv, root,
    stem_block{b}, features, logits.
    """
    check_pixels(images)
    p = p["resnet"]
    root = p["root_block"]["standardized_conv2d"]
    conv, back_root = std_conv(root, images, stride=2, padding=3, form="bit")
    pooled, back_pool = max_pool(conv, padding=1)
    x, back_stages = stages(p, pooled, preactivation_unit, "unit{:02d}", out)
    x, back_norm = normalise_relu(p["group_norm"], x)
    y = features = narrow(wide(x).mean((1, 2)), x.dtype)
    if "head" in p:
        head = p["head"]["conv2d"]
        kernel = head["kernel"].reshape(head["kernel"].shape[2:])
        y, back_head = dense({"kernel": kernel, "bias": head["bias"]}, y)
    if out is not None:
        out |= {"root_conv": conv, "root": pooled, "features": features, "logits": y}

    def back(dy):
        dp, dhead = {}, {}
        if "head" in p:
            dhead, dy = back_head(dy)
            dhead["kernel"] = dhead["kernel"].reshape(head["kernel"].shape)
            dhead = {"head": {"conv2d": dhead}}
        pixels = x.shape[1] * x.shape[2]
        dx = np.broadcast_to((dy / pixels)[:, None, None], x.shape)
        dnorm, dx = back_norm(dx)
        dp, dx = back_stages(dx)
        droot, dimages = back_root(back_pool(dx))
        dp |= dhead | {"group_norm": dnorm, "root_block": {"standardized_conv2d": droot}}
        return {"resnet": dp}, dimages

    return y, back
