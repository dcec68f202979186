"""Say what is in pictures: `python -m minivit.predict IMAGE… --checkpoint FILE`.

Any ViT that `minivit.checkpoint` reads will do. GELU and epsilon are those that its dialect was
trained with; pixels are v / 127.5 - 1 unless the file or `--pixels imagenet` says otherwise.
"""

import contextlib
import math
import sys
from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.predict: interrupted")

import numpy as np

from . import command, engines, evaluate, finetune, images, machine, opening
from .architecture import token_grid
from .attention_maps import on_the_grid
from .command import literal
from .datasets import normalise
from .in_numpy import model, softmax
from .progress import progress
from .shapes import image_shape

DRAWN = 32  # pictures in one figure of attention


def parser():
    """All arguments of the command line."""
    p = command.Parser(prog="python -m minivit.predict", description=__doc__)
    p.add_argument("images", nargs="*", help="files or folders; none: paths on standard input")
    add_model_options(p)
    p.add_argument("--top", type=command.whole(1), default=5, help="classes to show (default: 5)")
    text = f"draw where the last block looks, for up to {DRAWN} pictures: .png, .pdf or .svg"
    p.add_argument("--attention", metavar="FILE", help=text)
    return p


def add_model_options(p):
    """Which model, and how pictures are made ready for it."""
    p.add_argument("--checkpoint", required=True, metavar="FILE", help=".npz or .safetensors")
    text = "side or HEIGHTxWIDTH, positions are resized (default: the model's)"
    p.add_argument("--image-size", type=image_shape, help=text)
    text = "share that the centre crop keeps (default: 0.875, as 256 to 224; 1 for --tiny)"
    p.add_argument("--crop", type=command.number(0, 1, open_left=True), default=7 / 8, help=text)
    p.add_argument("--invert", action="store_true", help="swap black and white first")
    opening.add_reading_options(p)
    p.add_argument("--labels", metavar="FILE", help="class names, a line each, UTF-8")


def read_model(args, head=True):  # -> parameters, description, image size
    """The model, ready for the image size that was asked for; it needs a head if `head` is true."""
    params, description = opening.read(args.checkpoint, **opening.chosen(args), head=head)
    if description["channels"] not in (1, 3):
        raise ValueError(f"{args.checkpoint} is for images of {description['channels']} channels")
    size = args.image_size or finetune.image_size(params, description)
    engines.check_attention(params, math.prod(token_grid(params, size) or (0,)))
    grid = description["grid"]
    return (
        finetune.at_size(params, size, description["dialect"], old_grid=grid),
        description,
        size,
    )


class Only(dict):
    """An `out` that keeps only these names, so that all other arrays are freed after use."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def __setitem__(self, name, value):
        if name in self.names:
            super().__setitem__(name, value)

    def __ior__(self, other):
        for name, value in other.items():
            self[name] = value
        return self


def class_attention(weights, prefix, grid):  # [B, H, N, N] -> [B, rows, columns]
    """Where the output looks: the class token's attention to the patches, mean over heads.

    Without a class token every token is part of the output, so it is the mean over queries.
    """
    return on_the_grid(weights.mean(1), grid, prefix)


def pictures(args, paths, channels, size, command_name):  # -> path and uint8 image, one by one
    """Pictures at the model's size; one that cannot be read is reported and passed over."""
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


def look(params, description, image, attention):
    # uint8 [height, width, C], bool -> scores [classes], [rows, columns] or None
    """Class scores, and if `attention` is asked for, where the last block looks."""
    last = f"block{description.get('blocks', 0) - 1}_attention"
    out = Only(last, "patch_embedding") if attention else None
    settings = finetune.settings(description) | {"backward": False}
    with np.errstate(all="ignore"):  # the caller checks what is not finite
        scores, _ = model(params, normalise(image[None]), out=out, **settings)
    if not attention:
        return scores[0], None
    grid = out["patch_embedding"].shape[1:3]
    return scores[0], class_attention(out[last], description["prefix_tokens"], grid)[0]


def from_input():  # -> paths
    """One per line, in any encoding; a terminal is told what the command waits for."""
    if not sys.stdin:
        return []
    if sys.stdin.isatty():
        print("paths of pictures, one per line; Ctrl-D ends", file=sys.stderr)
    with contextlib.suppress(AttributeError):  # whatever stands in for a stream
        sys.stdin.reconfigure(errors="surrogateescape")
    return [line.strip() for line in sys.stdin if line.strip()]


def predict(args):  # -> exit status
    """Print the classes of every picture as it is read; 1 if some could not be read."""
    if args.attention:
        command.picture(args.attention, "--attention")
    params, description, size = read_model(args)
    if description["classes"] is None:
        raise ValueError(f"{args.checkpoint} has no head, so it knows no classes")
    if args.attention and "blocks" not in description:
        raise ValueError(f"{args.checkpoint} is a ResNet: it has no attention to draw")
    names = opening.class_names(description, args.labels)
    wanted, drawn, read = list(images.find(args.images or from_input())), [], 0
    # On a terminal the answers themselves show progress.
    bar = progress(wanted, "predicting", disable=True if sys.stdout.isatty() else None)
    for path, image in pictures(args, bar, description["channels"], size, "predict"):
        read += 1
        draw = bool(args.attention) and len(drawn) < DRAWN
        scores, attention = look(params, description, image, draw)
        evaluate.check_scores(scores[None], args.checkpoint)
        probabilities, _ = softmax(scores)
        print(literal(path))
        for i in np.argsort(-probabilities, kind="stable")[: args.top]:
            print(f"  {probabilities[i]:7.2%}  {literal(names[i])}")
        if draw:
            drawn.append((image, attention, Path(path).name))
    if args.attention:
        from . import figures

        figures.attention(*zip(*drawn, strict=True)).savefig(args.attention)
    return int(read < len(wanted))


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, predict, argv)


if __name__ == "__main__":
    machine.leave(main())
