"""Model sizes by name, and what a size costs: parameters and operations, by formula."""

import re
from dataclasses import dataclass, replace
from math import prod

from .shapes import pair, patch_grid


@dataclass(frozen=True)
class Variant:
    """The sizes of a Vision Transformer (Table 1 of the paper)."""

    name: str
    patch: int | tuple[int, int]  # P in pixels, or rows and columns
    width: int  # D
    mlp: int  # M
    heads: int  # H
    blocks: int  # L

    def __post_init__(self):
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide width {self.width}; choose a width that is a "
                "multiple of the heads"
            )
        for field, least in {"patch": 1, "width": 1, "mlp": 1, "blocks": 0}.items():
            if min(pair(value := getattr(self, field))) < least:
                raise ValueError(f"{field} is {value}; it must be at least {least}")


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


def parse(name):  # "B/16" -> Variant
    """The variant of a name: a size, and after a slash the patch side in pixels.

    "ViT-B_16", "vit_b16" and the like are read too; any patch side is allowed.
    """
    match = re.fullmatch(r"(?:vit[-_]?)?(tiny|ti|s|b|l|h)(?:[/_-]?(\d+))?", name.strip().lower())
    if not match or match[2] == "0":
        raise ValueError(f"unknown variant {name!r}; choose one of {', '.join(NAMES)}")
    size = next(size for size in SIZES.values() if size.name.lower() == match[1])
    patch = int(match[2]) if match[2] else size.patch
    return replace(size, name=f"{size.name}/{patch}" if match[2] else size.name, patch=patch)


def tokens(variant, image_size, *, class_token=True):  # -> N
    """Length of the sequence for a square side or a (height, width)."""
    rows, columns = patch_grid(*pair(image_size), variant.patch)
    return rows * columns + class_token


def parameter_count(
    variant, image_size=224, *, channels=3, classes=1000, class_token=True, representation=None
):
    """Number of trainable parameters; `representation` is the width of `pre_logits`, if any."""
    d, m = variant.width, variant.mlp
    embedding = prod(pair(variant.patch)) * channels * d + d
    positions = tokens(variant, image_size, class_token=class_token) * d
    attention = 4 * (d * d + d)
    mlp = (d * m + m) + (m * d + d)
    norms = 2 * 2 * d
    hidden = d * representation + representation if representation else 0
    head = (representation or d) * classes + classes
    blocks = variant.blocks * (attention + mlp + norms)
    return class_token * d + embedding + positions + blocks + 2 * d + hidden + head


def forward_flops(variant, image_size=224, *, channels=3, classes=1000, class_token=True):
    """Floating-point operations of one image's forward pass; a multiply-add counts two.

    Matrix products make nearly all of it. The elementwise work is counted as XLA does, an
    operation an entry: about 5 for softmax, 8 for LayerNorm, 8 for GELU. A training step costs
    three times as much, since the backward pass has two products for each of the forward pass;
    four times where it computes the forward pass again.
    """
    d, m, h = variant.width, variant.mlp, variant.heads
    n = tokens(variant, image_size, class_token=class_token)
    patches = n - class_token
    embedding = 2 * patches * prod(pair(variant.patch)) * channels * d + patches * d
    projections = 2 * n * d * (4 * d) + n * 5 * d
    products = 2 * (2 * n * n * d)
    mlp = 2 * (2 * n * d * m) + n * (m + d)
    elementwise = 5 * h * n * n + 8 * n * m + 2 * 8 * n * d + 2 * n * d
    head = 2 * d * classes + classes
    blocks = variant.blocks * (projections + products + mlp + elementwise)
    return embedding + n * d + blocks + 8 * n * d + head
