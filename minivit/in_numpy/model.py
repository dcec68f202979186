"""Whatever parameters are for: a Vision Transformer, a hybrid, or a ResNet, by their names."""

from ..shapes import check_names
from .resnet import bit
from .vit import vit

OPTIONS = ("mean", "gelu_form", "epsilon", "rate", "rng", "backward")  # of `vit`


def model(p, images, *, out=None, **options):  # [B, height, width, C] -> [B, classes]
    """Class scores, or the features where there is no head; options are those of `vit`.

    They do not matter to a ResNet, but for dropout, which it does not know and refuses.
    """
    if "resnet" not in p:
        return vit(p, images, out=out, **options)
    check_names(options, OPTIONS)
    if options.get("rate"):
        raise ValueError(f"a ResNet has no dropout; rate {options['rate']} must be 0")
    return bit(p, images, out=out)
