"""Model sizes by name, and what a size costs: parameters and operations, by formula."""

import re
from dataclasses import dataclass, replace
from math import prod

from .shapes import feature_grid, hybrid_grid, pair, patch_grid


@dataclass(frozen=True)
class Variant:
    """The sizes of a Vision Transformer (Table 1), or of a hybrid, which has a stem."""

    name: str
    patch: int | tuple[int, int]  # P in pixels, or rows and columns
    width: int  # D
    mlp: int  # M
    heads: int  # H
    blocks: int  # L
    stem: tuple[int, ...] | None = None  # of a hybrid: units of each stage after the root
    stem_width: int = 64  # channels of its root

    def __post_init__(self):
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide width {self.width}; choose a width that is a "
                "multiple of the heads"
            )
        for field, least in {"patch": 1, "width": 1, "mlp": 1, "blocks": 0}.items():
            if min(pair(value := getattr(self, field))) < least:
                raise ValueError(f"{field} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class ResNet:
    """The sizes of a BiT ResNet, the paper's baseline (arXiv 1912.11370)."""

    name: str
    units: tuple[int, ...]  # of each stage
    width: int  # channels of the root; 64 times the factor after the x


# B, L and H are the paper's; Ti and S come from DeiT and "How to train your ViT". `tiny` learns
# Fashion-MNIST in a minute on a laptop. The patch size in the table is the default.
SIZES = {
    "tiny": Variant("tiny", 7, 64, 128, 4, 4),
    "Ti": Variant("Ti", 16, 192, 768, 3, 12),
    "S": Variant("S", 16, 384, 1536, 6, 12),
    "B": Variant("B", 16, 768, 3072, 12, 12),
    "L": Variant("L", 16, 1024, 4096, 16, 24),
    "H": Variant("H", 14, 1280, 5120, 16, 32),
}
NAMES = ("tiny", "Ti/16", "S/16", "S/32", "B/16", "B/32", "B/8", "L/16", "L/32", "H/14")
# Units of each stage of a ResNet by its depth: 26 is Hybrid's, the others He's and BiT's.
UNITS = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
HYBRIDS = ("tiny-hybrid", "R+Ti/16", "R26+S/32", "R26+B/32", "R50+B/16", "R50+B/32", "R50+L/32")
RESNETS = ("tiny-resnet", "R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R200x3")


# About the tiny ViT's cost, for 28 to 32 pixels.
TINY = {
    "tiny-hybrid": Variant("tiny-hybrid", 1, 64, 128, 4, 3, stem=(1, 1), stem_width=16),
    "tiny-resnet": ResNet("tiny-resnet", (2, 3, 2), 16),
}


def hybrid(text):  # "r50+b/16" -> Variant, or None
    """A ResNet's feature map in place of the image (section 3.1), as vit_jax names them.

    /32 is the output of stage 4. /16 has no stage 4: its units are moved into stage 3, so that
    the sequence is four times as long (section 4.1). R+Ti/16 is a root alone with patches of 8,
    which makes it a /32 by its sequence; the name is the official one.
    """
    match = re.fullmatch(r"r(\d*)\+(?:vit[-_]?)?(ti|s|b|l|h)[/_-]?(16|32)", text)
    if not match or (match[1] and match[1] not in UNITS):
        return None
    encoder = next(size for size in SIZES.values() if size.name.lower() == match[2])
    name, patch, stem = f"R{match[1]}+{encoder.name}/{match[3]}", 1, UNITS.get(match[1], ())
    if not stem:
        patch = int(match[3]) // 2
    elif match[3] == "16":
        stem = (*stem[:2], stem[2] + stem[3])
    return replace(encoder, name=name, patch=patch, stem=stem)


def resnet(text):  # "r50x2" -> ResNet, or None
    """BiT's names: depth, and the factor of the width."""
    match = re.fullmatch(r"(?:bit[-_]?)?r(\d+)x([1-4])", text)
    if not match or match[1] not in UNITS:
        return None
    return ResNet(f"R{match[1]}x{match[2]}", UNITS[match[1]], 64 * int(match[2]))


def convolutions(units, width, channels, image_size=224):
    # -> stage, unit, part, kernel side, channels in, out, rows, columns of the result
    """Every convolution of a ResNet in order, both orders having the same ones."""
    size = tuple(-(-n // 2) for n in pair(image_size))
    yield 0, 0, "root", 7, channels, width, *size
    last = width
    for b, count in enumerate(units, 1):
        f = width * 2 ** (b - 1)
        for u in range(1, count + 1):
            before = feature_grid(*pair(image_size), max(b - (u == 1), 1))
            after = feature_grid(*pair(image_size), b)
            if u == 1:
                yield b, u, "proj", 1, last, 4 * f, *after
            yield b, u, 1, 1, last, f, *before
            yield b, u, 2, 3, f, f, *after
            yield b, u, 3, 1, f, 4 * f, *after
            last = 4 * f


def stem_parameters(units, width, channels, order):
    """Kernels and norms; "v1" has a norm behind each convolution, "v2" before those of a unit."""
    total = last = 0
    for *_, part, side, cin, cout, _, _ in convolutions(units, width, channels):
        total += side * side * cin * cout
        if order == "v1":
            total += 2 * cout
        elif part not in ("root", "proj"):
            total += 2 * cin
        last = cout
    return total + (2 * last if order == "v2" else 0)


def stem_flops(units, width, channels, image_size):
    """Of the convolutions, and about 9 operations an entry for norm and ReLU."""
    return sum(
        rows * columns * cout * (2 * side * side * cin + 9)
        for *_, side, cin, cout, rows, columns in convolutions(units, width, channels, image_size)
    )


def feature_channels(variant):
    """Channels of a hybrid's feature map, which its patches are made of."""
    stages = len(variant.stem)
    return 4 * variant.stem_width * 2 ** (stages - 1) if stages else variant.stem_width


def parse(name):  # "B/16" -> Variant
    """The variant of a name: a size, and after a slash the patch side in pixels.

    "ViT-B_16", "vit_b16" and the like are read too; any patch side is allowed.
    """
    text = name.strip().lower()
    if special := TINY.get(text) or hybrid(text) or resnet(text):
        return special
    match = re.fullmatch(r"(?:vit[-_]?)?(tiny|ti|s|b|l|h)(?:[/_-]?(\d+))?", text)
    if not match or match[2] == "0":
        names = ", ".join(NAMES + HYBRIDS + RESNETS)
        raise ValueError(f"unknown variant {name!r}; choose one of {names}")
    size = next(size for size in SIZES.values() if size.name.lower() == match[1])
    patch = int(match[2]) if match[2] else size.patch
    return replace(size, name=f"{size.name}/{patch}" if match[2] else size.name, patch=patch)


def full_name(variant):  # -> "B/16" also where the name was "B"
    """The name with its patch size, as recipes are listed."""
    plain = isinstance(variant, Variant) and variant.stem is None and "/" not in variant.name
    return f"{variant.name}/{variant.patch}" if plain else variant.name


def check_size(variant, image_size):
    """Refuse images that do not divide into patches; a ResNet takes any."""
    if isinstance(variant, Variant):
        tokens(variant, image_size)


def tokens(variant, image_size, *, class_token=True):  # -> N
    """Length of the sequence for a square side or a (height, width)."""
    size = pair(image_size)
    if variant.stem is not None:
        rows, columns = hybrid_grid(size, len(variant.stem), variant.patch)
    else:
        rows, columns = patch_grid(*size, variant.patch)
    return rows * columns + class_token


def parameter_count(
    variant, image_size=224, *, channels=3, classes=1000, class_token=True, representation=None
):
    """Number of trainable parameters; `representation` is the width of `pre_logits`, if any."""
    if isinstance(variant, ResNet):
        root = stem_parameters(variant.units, variant.width, channels, "v2")
        features = 4 * variant.width * 2 ** (len(variant.units) - 1)
        return root + features * classes + classes
    stem = 0
    if variant.stem is not None:
        stem = stem_parameters(variant.stem, variant.stem_width, channels, "v1")
        channels = feature_channels(variant)
    d, m = variant.width, variant.mlp
    embedding = stem + prod(pair(variant.patch)) * channels * d + d
    positions = tokens(variant, image_size, class_token=class_token) * d
    attention = 4 * (d * d + d)
    mlp = (d * m + m) + (m * d + d)
    norms = 2 * 2 * d
    hidden = d * representation + representation if representation else 0
    head = (representation or d) * classes + classes
    blocks = variant.blocks * (attention + mlp + norms)
    return class_token * d + embedding + positions + blocks + 2 * d + hidden + head


def forward_flops(variant, image_size=224, **options):
    """Floating-point operations of one image's forward pass; a multiply-add counts two.

    A training step costs three times as much, since the backward pass has two products for each
    of the forward pass; four times where it computes the forward pass again. `options` and what is
    counted: `flops_by_part`.
    """
    return sum(flops_by_part(variant, image_size, **options).values())


def flops_by_part(
    variant,
    image_size=224,
    *,
    channels=3,
    classes=1000,
    class_token=True,
    representation=None,
    predictions=None,
):  # -> {part: operations}, parts as in `architecture.PARTS`
    """Where the operations of a forward pass are; `predictions` are a masked model's for a patch.

    Matrix products make nearly all of it. The elementwise work is counted as XLA does, an
    operation an entry: about 5 for softmax, 8 for LayerNorm, 8 for GELU.
    """
    if isinstance(variant, ResNet):
        root = stem_flops(variant.units, variant.width, channels, image_size)
        features = 4 * variant.width * 2 ** (len(variant.units) - 1)
        head = 2 * features * classes + classes
        return {"convolutions": root} | ({"head": head} if head else {})
    parts = {}
    if variant.stem is not None:
        parts["convolutions"] = stem_flops(variant.stem, variant.stem_width, channels, image_size)
        channels = feature_channels(variant)
    d, m, h = variant.width, variant.mlp, variant.heads
    n = tokens(variant, image_size, class_token=class_token)
    patches = n - class_token
    parts["embedding"] = 2 * patches * prod(pair(variant.patch)) * channels * d + patches * d
    parts["embedding"] += n * d  # the positions
    projections = 2 * n * d * (4 * d) + n * 5 * d
    products = 2 * (2 * n * n * d)
    parts["attention"] = variant.blocks * (projections + products + 5 * h * n * n)
    parts["MLP"] = variant.blocks * (2 * (2 * n * d * m) + n * (m + d) + 8 * n * m)
    # What is added to the residual stream counts with the norms.
    parts["norms"] = variant.blocks * (2 * 8 * n * d + 2 * n * d) + 8 * n * d
    hidden = 2 * d * representation + 2 * representation if representation else 0
    masked = patches * (2 * d * predictions + predictions) if predictions else 0
    head = hidden + (2 * (representation or d) * classes + classes) + masked
    return parts | ({"head": head} if head else {})
