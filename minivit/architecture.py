"""The architecture that parameters carry, by their names and shapes."""

import math
import re

import numpy as np

from . import dialects, variants
from .foreign import listed
from .params import (
    attention_shapes,
    count,
    mlp_shapes,
    named_shapes,
    resnet_shapes,
    under,
)
from .shapes import hybrid_grid, numbered, pair, patch_grid


def is_resnet(p):
    """BiT's names stand under one folder."""
    return "resnet" in p


def image_channels(p):  # parameters -> C
    """Channels of the images that the first layer sees."""
    if is_resnet(p):
        first = p["resnet"]["root_block"]["standardized_conv2d"]
    else:
        first = p["conv_root" if "conv_root" in p else "embedding"]
    return first["kernel"].shape[2]


def token_grid(p, image_size):  # -> rows, columns of patches, or None: a ResNet has none
    """The grid of an image's tokens, by the real rounding of a hybrid's convolutions."""
    if is_resnet(p):
        return None
    size, patch = pair(image_size), p["embedding"]["kernel"].shape[:2]
    if "conv_root" in p:
        return hybrid_grid(size, numbered(p, "block"), patch)
    return patch_grid(*size, patch)


def token_pixels(p):  # -> rows, columns
    """How many pixels of the image each token stands for."""
    shrink = 1
    if "conv_root" in p:
        shrink = 2 ** (2 + max(numbered(p, "block") - 1, 0))
    return tuple(shrink * n for n in p["embedding"]["kernel"].shape[:2])


# The arrays that tell the sizes of a model, and how many axes they have.
AXES = {"embedding/kernel": 4, "cls": 3, "Transformer/posembed_input/pos_embedding": 3}
AXES |= {"pre_logits/bias": 1, "head/kernel": 2, "conv_root/kernel": 4}


def describe(flat):  # {official name: array} -> dictionary
    """The sizes that the shapes tell."""
    return (
        describe_resnet(flat) if any(n.startswith("resnet/") for n in flat) else describe_vit(flat)
    )


def units_of(names, folder):  # names -> units of each stage, as variants.UNITS has them
    """How many units each stage has, by the highest number."""
    units = {}
    for name in names:
        if m := re.match(rf"{folder}block(\d+)/unit(\d+)/", name):
            units[dialects.numeral(m[1])] = max(units.get(int(m[1]), 0), dialects.numeral(m[2]))
    return tuple(units.get(b, 0) for b in range(1, max(units, default=0) + 1))


def describe_resnet(flat):
    """The sizes of a BiT ResNet."""
    root = flat.get("resnet/root_block/standardized_conv2d/kernel")
    if np.ndim(root) != 4:
        raise ValueError("not a whole ResNet (resnet/root_block/standardized_conv2d/kernel)")
    units, head = units_of(flat, "resnet/"), flat.get("resnet/head/conv2d/kernel")
    if not units:
        raise ValueError("not a whole ResNet (no resnet/block1/unit01)")
    depths = {v: k for k, v in variants.UNITS.items()}
    name = f"ResNet {'-'.join(map(str, units))}, width {root.shape[-1]}"
    if units in depths and root.shape[-1] % 64 == 0:
        name = f"R{depths[units]}x{root.shape[-1] // 64}"
    tiny = variants.TINY["tiny-resnet"]
    return {
        "variant": tiny.name if (units, root.shape[-1]) == (tiny.units, tiny.width) else name,
        "channels": root.shape[2],
        "width": root.shape[-1],
        "units": units,
        "prefix_tokens": 0,
        "positions": None,
        "grid": None,
        "classes": None if head is None else head.shape[-1],
        "zero_head": head is not None and not np.asarray(head).any(),
        "parameters": count(flat),
    }


def describe_vit(flat):
    """The sizes of a ViT or a hybrid."""
    blocks = dialects.numbers(flat, r"Transformer/encoderblock_(\d+)/")
    first = f"Transformer/encoderblock_{min(blocks, default=0)}"
    shape = {name: np.shape(array) for name, array in flat.items()}
    for name, axes in AXES.items():
        if name in shape and len(shape[name]) != axes:
            raise ValueError(f"{name} has shape {list(shape[name])}; it needs {axes} axes")
    try:
        patch, columns, channels, width = shape["embedding/kernel"]
        _, heads, _ = shape[f"{first}/{dialects.ATTENTION}/query/kernel"]
        mlp = shape[f"{first}/MlpBlock_3/Dense_0/kernel"][-1]
    except (KeyError, ValueError) as error:
        raise ValueError(f"not a whole Vision Transformer ({error})") from None
    table = shape.get("Transformer/posembed_input/pos_embedding", (1, None))[1]
    prefix = shape.get("cls", (1, 0))[1]
    head = flat.get("head/kernel")
    stem = units_of(flat, "") if "conv_root/kernel" in flat else None
    stem_width = shape["conv_root/kernel"][-1] if stem is not None else None
    side = table and math.isqrt(max(table - prefix, 0))
    return {
        "variant": name_of(width, mlp, heads, max(blocks) + 1, patch, stem, stem_width),
        "stem": stem,
        "stem_width": stem_width,
        "patch": patch if patch == columns else (patch, columns),
        "channels": channels if stem is None else shape["conv_root/kernel"][2],
        "width": width,
        "mlp": mlp,
        "heads": heads,
        "blocks": max(blocks) + 1,
        "prefix_tokens": prefix,
        "positions": table,
        "grid": [side, side] if side and side * side == table - prefix else None,
        "representation": shape.get("pre_logits/bias", (None,))[0],
        "classes": None if head is None else head.shape[-1],
        "predictions": flat["prediction/bias"].size if "prediction/bias" in flat else None,
        "zero_head": head is not None and not np.asarray(head).any(),
        "parameters": count(flat),
    }


def name_of(width, mlp, heads, blocks, patch, stem=None, stem_width=None):
    """A variant's name by its sizes, or the sizes."""
    if stem is not None:
        for name in variants.HYBRIDS:
            v = variants.parse(name)
            sizes = (v.width, v.mlp, v.heads, v.blocks, v.patch, v.stem, v.stem_width)
            if sizes == (width, mlp, heads, blocks, patch, stem, stem_width):
                return v.name
    for size in variants.SIZES.values():
        if stem is None and (size.width, size.mlp, size.heads, size.blocks) == (
            width,
            mlp,
            heads,
            blocks,
        ):
            return f"{size.name}/{patch}"
    name = f"{blocks} blocks, D {width}, M {mlp}, {heads} heads, P {patch}"
    return name if stem is None else f"stem {'-'.join(map(str, stem))} of {stem_width}, {name}"


PARTS = ("convolutions", "embedding", "attention", "MLP", "norms", "head")


def part_of(name):  # official name -> one of PARTS
    """What an array belongs to; class token, positions and mask go with the embedding."""
    if name.startswith(("head/", "resnet/head/", "pre_logits/", "prediction/", "MAPHead_0/")):
        return "head"
    if name.startswith("resnet/") or re.match(r"(conv_root|gn_root|block\d+)/", name):
        return "convolutions"
    if dialects.ATTENTION in name:
        return "attention"
    if "/MlpBlock_3/" in name:
        return "MLP"
    return "norms" if re.search(r"/(LayerNorm_\d|encoder_norm)/", name) else "embedding"


def parameters_by_part(flat):  # {official name: array or anything with a size} -> {part: number}
    """Where the parameters are; parts that the model lacks are left out."""
    sizes = dict.fromkeys(PARTS, 0)
    for name, array in flat.items():
        sizes[part_of(name)] += array.size
    return {part: size for part, size in sizes.items() if size}


def variant_of(d):  # description -> Variant or ResNet
    """The sizes that a description tells."""
    if "units" in d:
        return variants.ResNet("file", d["units"], d["width"])
    sizes = (d["patch"], d["width"], d["mlp"], d["heads"], d["blocks"])
    return variants.Variant("file", *sizes, stem=d["stem"], stem_width=d["stem_width"] or 64)


def check(flat, extra="error"):  # -> names and shapes that were dropped
    """Every array that belongs to the model is there with its shape, and no other.

    Others are an error, or with `extra` "warn" dropped.
    """
    d = describe(flat)
    expected, found = expected_shapes(d, flat), {n: a.shape for n, a in flat.items()}
    surplus = {name: f"extra {name} {list(s)}" for name, s in found.items() if name not in expected}
    faults = [f"missing {n} {list(s)}" for n, s in expected.items() if n not in found]
    for name, shape in expected.items():
        if (is_shape := found.get(name, shape)) != shape:
            faults.append(f"{name} has shape {list(is_shape)}, not {list(shape)}")
        elif 0 in shape:
            faults.append(f"{name} has shape {list(shape)}, so it is empty")
        elif name in flat and flat[name].dtype.kind not in "fV":
            faults.append(f"{name} is of {flat[name].dtype}, not of floating-point numbers")
    if d["positions"] is not None and d["positions"] <= d["prefix_tokens"]:
        faults.append(f"{d['prefix_tokens']} prefix tokens, but {d['positions']} positions")
    if extra == "error":
        faults += surplus.values()
    if faults:
        raise ValueError(listed(faults, "; "))
    for name in surplus:
        del flat[name]
    return list(surplus.values())


def check_finite(flat):
    """Refuse weights that are not finite: a single one spoils every answer."""
    for name, array in flat.items():
        if not np.isfinite(array).all():
            raise ValueError(
                f"{name} holds values that are not finite; the file is damaged, or its training "
                "had diverged"
            )


def expected_shapes(d, flat):  # description -> {name: shape}
    """The arrays that a model of such sizes has."""
    variant = variant_of(d)
    if "units" in d:
        return resnet_shapes(variant, channels=d["channels"], classes=d["classes"])
    expected = named_shapes(
        variant,
        d["positions"],
        channels=d["channels"],
        classes=d["classes"],
        class_token=bool(d["prefix_tokens"]),
        positions=d["positions"] is not None,
        representation=d["representation"],
    )
    expected |= {"cls": (1, d["prefix_tokens"], d["width"])} if d["prefix_tokens"] else {}
    if d["predictions"]:
        expected |= {"mask": (1, 1, d["width"]), "prediction/bias": (d["predictions"],)}
        expected["prediction/kernel"] = (d["width"], d["predictions"])
    if any(name.startswith("MAPHead_0/") for name in flat):
        expected |= attention_pool_shapes(d["width"], d["heads"], d["mlp"])
    return expected


def attention_pool_shapes(d, h, m):
    """Name and shape of the arrays of big_vision's MAP head."""
    layers = {"probe": (1, 1, d), "LayerNorm_0/scale": (d,), "LayerNorm_0/bias": (d,)}
    layers |= under("MultiHeadDotProductAttention_0", attention_shapes(d, h))
    return under("MAPHead_0", layers | under("MlpBlock_0", mlp_shapes(d, m)))
