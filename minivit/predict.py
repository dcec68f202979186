"""Say what is in pictures: `python -m minivit.predict IMAGE… --checkpoint FILE`.

Any checkpoint that `minivit.checkpoint` reads will do. GELU and epsilon are those that its dialect
was trained with.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from . import checkpoint, images
from .datasets import normalise
from .finetune import image_size
from .in_numpy import softmax, vit
from .shapes import image_shape


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(prog="python -m minivit.predict", description=__doc__)
    p.add_argument("images", nargs="*", help="files or folders; none: paths on standard input")
    p.add_argument("--checkpoint", required=True, metavar="FILE", help=".npz or .safetensors")
    p.add_argument("--labels", metavar="FILE", help="class names, a line each")
    p.add_argument("--top", type=int, default=5, help="classes to show (default: 5)")
    p.add_argument(
        "--image-size", type=image_shape, help="side or HEIGHTxWIDTH (default: the model's)"
    )
    text = "share of the picture that the centre crop keeps (default: 0.875, the official one)"
    p.add_argument("--crop", type=float, default=7 / 8, help=text)
    p.add_argument("--heads", type=int, help="of a state dict whose width is unusual")
    p.add_argument("--attention", metavar="PNG", help="draw where the last block looks")
    p.add_argument("--invert", action="store_true", help="swap black and white first")
    return p


def read_labels(path, classes):  # -> list of names
    """One name a line, as many as the model has classes."""
    if path is None:
        return [f"class {i}" for i in range(classes)]
    names = Path(path).read_text(encoding="utf-8").splitlines()
    if len(names) != classes:
        raise ValueError(f"{path} names {len(names)} classes, the checkpoint has {classes}")
    return names


def prepare(paths, model_size, channels, args):  # -> paths, uint8 [B, height, width, C]
    """Every picture that can be read; the others are named on standard error."""
    good, arrays = [], []
    for path in paths:
        try:
            image = images.resize_and_crop(images.read(path, channels), *model_size, args.crop)
        except images.ImageError as error:
            print(f"minivit.predict: {error}", file=sys.stderr)
            continue
        good.append(path)
        arrays.append(255 - image if args.invert else image)
    if not arrays:
        raise ValueError("none of the pictures could be read")
    return good, np.stack(arrays)


def class_attention(weights, prefix, grid):  # [B, H, N, N] -> [B, rows, columns]
    """Where the output looks: the class token's attention to the patches, mean over heads.

    Without a class token every token is part of the output, so it is the mean over queries.
    """
    mean = weights.mean(1)
    rows = mean[:, 0] if prefix else mean.mean(1)
    return rows[:, prefix:].reshape(-1, *grid)


def predict(args):  # -> exit status
    """Print the classes of every picture, and draw its attention; 1 if some could not be read."""
    if not 0 < args.crop <= 1:
        raise ValueError(f"--crop is {args.crop}; it must be above 0 and at most 1")
    if args.top < 1:
        raise ValueError(f"--top is {args.top}; it must be at least 1")
    params, description = checkpoint.inspect(args.checkpoint, heads=args.heads)
    if description["classes"] is None:
        raise ValueError(f"{args.checkpoint} has no head, so it knows no classes")
    names = read_labels(args.labels, description["classes"])
    target = args.image_size or image_size(params)
    given = args.images or [line.strip() for line in sys.stdin if line.strip()]
    wanted = list(images.find(given))
    paths, arrays = prepare(wanted, target, description["channels"], args)
    options = {name: description[name] for name in ("gelu_form", "epsilon")}
    maps = []
    for path, image in zip(paths, arrays, strict=True):
        out = {}
        logits, _ = vit(params, normalise(image[None]), out=out, **options)
        probabilities = softmax(logits)[0][0]
        print(path)
        for i in np.argsort(-probabilities, kind="stable")[: args.top]:
            print(f"  {probabilities[i]:7.2%}  {names[i]}")
        grid = out["patch_embedding"].shape[1:3]
        weights = out[f"block{description['blocks'] - 1}_attention"]
        maps.append(class_attention(weights, description["prefix_tokens"], grid)[0])
    if args.attention:
        from . import figures

        figure = figures.attention(arrays, np.stack(maps), [Path(path).name for path in paths])
        figure.savefig(args.attention, dpi=100)
        print(f"attention of the last block: {args.attention}")
    return 0 if len(paths) == len(wanted) else 1


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    try:
        with checkpoint.command_line_warnings():
            return predict(args)
    except (ValueError, OSError) as error:
        print(f"minivit.predict: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
