"""Whatever parameters are for: a Vision Transformer, a hybrid, or a ResNet, by their names."""

from .resnet import bit
from .vit import vit


def model(p, images, *, out=None, **options):  # [B, height, width, C] -> [B, classes]
    """Class scores, or the features where there is no head; options are those of `vit`.

    A ResNet has no such options; dropout, which it does not know, is refused.
    """
    if "resnet" not in p:
        return vit(p, images, out=out, **options)
    if options.get("rate"):
        raise ValueError(f"a ResNet has no dropout; rate {options['rate']} must be 0")
    return bit(p, images, out=out)
