"""Say what is in pictures: `python -m minivit.predict IMAGE… --checkpoint FILE`.

Any ViT that `minivit.checkpoint` reads will do. GELU and epsilon are those that its dialect was
trained with; pixels are v / 127.5 - 1 unless `--pixels imagenet` says otherwise.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from . import checkpoint, command, dialects, finetune, images
from .attention_maps import on_the_grid
from .datasets import normalise
from .in_numpy import model, softmax
from .shapes import image_shape

DRAWN = 32  # pictures in one figure of attention


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(prog="python -m minivit.predict", description=__doc__)
    p.add_argument("images", nargs="*", help="files or folders; none: paths on standard input")
    add_model_options(p)
    p.add_argument("--labels", metavar="FILE", help="class names, a line each, UTF-8")
    p.add_argument("--top", type=int, default=5, help="classes to show (default: 5)")
    text = f"draw where the last block looks, for up to {DRAWN} pictures"
    p.add_argument("--attention", metavar="PNG", help=text)
    return p


def add_model_options(p):
    """Which model, and how pictures are made ready for it."""
    p.add_argument("--checkpoint", required=True, metavar="FILE", help=".npz or .safetensors")
    text = "side or HEIGHTxWIDTH, positions are resized (default: the model's)"
    p.add_argument("--image-size", type=image_shape, help=text)
    p.add_argument("--old-grid", type=image_shape, help="of the file's positions, if no square")
    text = "share that the centre crop keeps (default: 0.875, as 256 to 224; 1 for --tiny)"
    p.add_argument("--crop", type=float, default=7 / 8, help=text)
    text = "the model saw v/127.5-1 (vit), or ImageNet's mean and deviation (many of timm's)"
    p.add_argument("--pixels", choices=("vit", "imagenet"), default="vit", help=text)
    p.add_argument("--heads", type=int, help="of a state dict whose width is unusual")
    p.add_argument("--invert", action="store_true", help="swap black and white first")


def read_labels(path, classes, known=None):  # -> list of names
    """One name a line, as many as the model has classes; else those that its file knows."""
    if path is None:
        known = known or ()
        return list(known) if len(known) == classes else [f"class {i}" for i in range(classes)]
    try:
        names = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if len(names) != classes:
        raise ValueError(f"{path} names {len(names)} classes, the checkpoint has {classes}")
    return names


def read_model(args, head=True):  # -> parameters, description, image size
    """The model, ready for the size of image that was asked for; without `head` any will do."""
    if not 0 < args.crop <= 1:
        raise ValueError(f"--crop is {args.crop}; it must be above 0 and at most 1")
    if args.heads is not None and args.heads < 1:
        raise ValueError(f"--heads is {args.heads}; it must be at least 1")
    params, description = checkpoint.inspect(args.checkpoint, heads=args.heads, head=head)
    if args.heads and description.get("heads", args.heads) != args.heads:
        raise ValueError(
            f"--heads {args.heads}: the shapes in {args.checkpoint} say {description['heads']}; "
            "leave it out"
        )
    if description["channels"] not in (1, 3):
        raise ValueError(f"{args.checkpoint} is for images of {description['channels']} channels")
    grid = args.old_grid or description["grid"]
    size = args.image_size or finetune.image_size(params, description, args.old_grid)
    params = finetune.at_size(params, size, description["dialect"], old_grid=grid)
    if args.pixels == "imagenet":
        if description["channels"] != 3:
            raise ValueError(f"--pixels imagenet is for colour, {args.checkpoint} is for grey")
        if "embedding" not in params or "conv_root" in params:
            raise ValueError("--pixels imagenet is for models that begin with patches, not ResNets")
        kernel, bias = params["embedding"]["kernel"], params["embedding"]["bias"]
        kernel, bias = dialects.fold_pixels(kernel, bias)
        params = params | {"embedding": {"kernel": kernel, "bias": bias}}
    return params, description, size


def class_attention(weights, prefix, grid):  # [B, H, N, N] -> [B, rows, columns]
    """Where the output looks: the class token's attention to the patches, mean over heads.

    Without a class token every token is part of the output, so it is the mean over queries.
    """
    return on_the_grid(weights.mean(1), grid, prefix)


def pictures(args, paths, channels, size, command_name):  # -> path and uint8 image, one by one
    """Pictures at the model's size; of one that cannot be read the fault is said."""
    read = 0
    for path in paths:
        try:
            image = images.read_at(path, size, channels, args.crop)
        except images.ImageError as error:
            print(f"minivit.{command_name}: {error}", file=sys.stderr)
            continue
        read += 1
        yield path, 255 - image if args.invert else image
    if not read:
        raise ValueError("none of the pictures could be read")


def look(params, description, image):  # uint8 [height, width, C] -> probabilities, attention
    """Class probabilities, and where the last block looks."""
    out = {}
    logits, _ = model(params, normalise(image[None]), out=out, **finetune.settings(description))
    if "blocks" not in description:  # a ResNet
        return softmax(logits)[0][0], None
    weights = out[f"block{description['blocks'] - 1}_attention"]
    grid = out["patch_embedding"].shape[1:3]
    return softmax(logits)[0][0], class_attention(weights, description["prefix_tokens"], grid)[0]


def predict(args):  # -> exit status
    """Print the classes of every picture as it is read; 1 if some could not be read."""
    if args.top < 1:
        raise ValueError(f"--top is {args.top}; it must be at least 1")
    if args.attention and Path(args.attention).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--attention {args.attention} must end in .png, .pdf or .svg")
    if args.attention and not Path(args.attention).parent.is_dir():
        raise ValueError(
            f"--attention {args.attention}: there is no folder {Path(args.attention).parent}"
        )
    params, description, size = read_model(args)
    if description["classes"] is None:
        raise ValueError(f"{args.checkpoint} has no head, so it knows no classes")
    if args.attention and "blocks" not in description:
        raise ValueError(f"{args.checkpoint} is a ResNet: it has no attention to draw")
    names = read_labels(args.labels, description["classes"], description.get("class_names"))
    given = args.images or [line.strip() for line in sys.stdin if line.strip()]
    wanted, drawn, read = list(images.find(given)), [], 0
    for path, image in pictures(args, wanted, description["channels"], size, "predict"):
        read += 1
        probabilities, attention = look(params, description, image)
        if not np.isfinite(probabilities).all():
            raise ValueError(f"{args.checkpoint} gives scores that are no numbers; it is damaged")
        print(path)
        for i in np.argsort(-probabilities, kind="stable")[: args.top]:
            print(f"  {probabilities[i]:7.2%}  {names[i]}")
        if args.attention and len(drawn) < DRAWN:
            drawn.append((image, attention, Path(path).name))
    if args.attention:
        from . import figures

        shown, maps, titles = zip(*drawn, strict=True)
        figures.attention(np.stack(shown), np.stack(maps), titles).savefig(args.attention)
        print(f"attention of the last block, {len(drawn)} pictures: {args.attention}")
    return 1 if read < len(wanted) else 0


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    return command.run("predict", lambda: predict(args))


if __name__ == "__main__":
    sys.exit(main())
