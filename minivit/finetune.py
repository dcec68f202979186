"""A trained model made ready for other classes, and for images of another size (section 3.2).

`python -m minivit.finetune FILE --image-size 56` trains nothing: it measures how well the features
survive that size, by a linear head that is fitted in closed form on 1,000 training images, once for
every way to resize the positions. To fine-tune, `python -m minivit.train --init FILE`.
"""

import math

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.finetune: interrupted")

import numpy as np

from . import command, datasets, engines, evaluate, in_numpy, machine, opening
from .architecture import is_resnet, token_grid, token_pixels
from .batches import scores
from .interpolation import METHODS, source_grid
from .params import without_head
from .shapes import image_shape


def image_size(params, description, grid=None):  # -> height, width in pixels
    """The size of the images that a model was made for.

    As its file says (`checkpoint.inspect`), else by its position table. `grid` overrides both.
    """
    if not grid and description.get("image_size"):
        return tuple(description["image_size"])
    encoder = params.get("Transformer", {})
    if "posembed_input" not in encoder:
        raise ValueError("the model has no positions and so no image size; say which one")
    prefix = params["cls"].shape[1] if "cls" in params else 0
    rows = encoder["posembed_input"]["pos_embedding"].shape[1]
    grid = source_grid(rows, prefix, grid or description["grid"])
    return tuple(n * p for n, p in zip(grid, token_pixels(params), strict=True))


def resize_positions(params, size, *, old_grid=None, method="corners", antialias=False, seed=0):
    # -> position table
    """The table for images of another size; "random" draws a new one of the same deviation."""
    table = params["Transformer"]["posembed_input"]["pos_embedding"]
    grid = token_grid(params, size)
    prefix = params["cls"].shape[1] if "cls" in params else 0
    options = {"old_grid": old_grid, "prefix": prefix, "antialias": antialias}
    if method != "random":
        return in_numpy.resize(table, grid, method=method, **options)[0]
    new, _ = in_numpy.resize(table, grid, **options)
    draw = np.random.default_rng([seed, datasets.WEIGHTS]).standard_normal(new[:, prefix:].shape)
    draw = (draw * table[:, prefix:].std()).astype(table.dtype)
    return np.concatenate([new[:, :prefix], draw], axis=1)


def at_size(params, size, dialect="official", **options):  # -> parameters
    """The same model for images of another size.

    big_vision's models with fixed positions have no table in their files; it is put in here.
    """
    grid = token_grid(params, size)
    if grid is None:  # a ResNet takes any size
        return params
    encoder = params["Transformer"]
    if "posembed_input" in encoder:
        table = resize_positions(params, size, **options)
    elif dialect == "big_vision":
        table = in_numpy.sincos2d(*grid, encoder["encoder_norm"]["scale"].size)
        if "cls" in params:  # it joins after the positions
            table = np.concatenate([np.zeros_like(params["cls"]), table], axis=1)
    else:
        return params
    return params | {"Transformer": encoder | {"posembed_input": {"pos_embedding": table}}}


def adapt(params, *, image_size, classes, **options):  # -> parameters
    """Parameters for fine-tuning: a new head of zeros, and positions resized to the new images.

    `image_size` is a side or (height, width) in pixels; `old_grid` (rows, columns) of the position
    table is needed where it is not square. `pre_logits` is dropped, as the paper does, and so is
    what a masked objective alone needed. Everything else is the same array.
    Options: those of `at_size` and `resize_positions`.
    """
    new = {name: value for name, value in without_head(params).items() if name != "pre_logits"}
    bias = np.zeros(classes, "float32")
    if is_resnet(params):
        width = params["resnet"]["group_norm"]["gamma"].size
        conv = {"kernel": np.zeros((1, 1, width, classes), "float32"), "bias": bias}
        return {"resnet": new["resnet"] | {"head": {"conv2d": conv}}}
    width = params["Transformer"]["encoder_norm"]["scale"].size
    new["head"] = {"kernel": np.zeros((width, classes), "float32"), "bias": bias}
    return at_size(new, image_size, **options)


def settings(description):  # -> options of `model`
    """What a file's description says that shapes cannot."""
    return {name: description[name] for name in ("gelu_form", "epsilon") if name in description}


def probe(params, description, size, dataset, method, *, examples=1000, l2=10.0, seed=0, what=None):
    # -> accuracy
    """Share of test images that a linear head on the features gets right.

    The head is fitted on standardised features of a few training images, in closed form. `what` is
    the model's name in errors, and begins the bar on the terminal.
    """
    classes = len(dataset.classes)
    options = {"old_grid": description["grid"], "dialect": description["dialect"]}
    body = adapt(params, image_size=size, classes=classes, method=method, seed=seed, **options)
    engine = engines.make("numpy", without_head(body), model=settings(description))
    chosen = np.random.default_rng([seed, datasets.ORDER]).permutation(len(dataset.train_images))
    chosen = chosen[:examples]

    def see(images):
        found = scores(engine, images, size, description["channels"], what)
        evaluate.check_scores(found, what or "the model")
        return found

    train, test = evaluate.whiten(see(dataset.train_images[chosen]), see(dataset.test_images))
    weights, bias = evaluate.ridge(train, dataset.train_labels[chosen], classes, l2)
    return float((in_numpy.guess(test @ weights + bias) == dataset.test_labels).mean())


def add_data_options(p):
    """Which pictures, for commands that read a data set."""
    text = "fashion-mnist (the default), shapes, cifar-10, cifar-100, folder:PATH"
    p.add_argument("--dataset", default="fashion-mnist", help=text)
    text = "stop at a broken picture of a folder"
    p.add_argument("--strict", action="store_true", help=text)


def load_data(args, size, channels, parts=datasets.PARTS):  # -> Dataset
    """The data set of `add_data_options`; a part that is not asked for is not decoded."""
    if args.strict and not args.dataset.startswith("folder:"):
        raise ValueError("--strict needs --dataset folder:PATH")
    options = {"channels": channels, "strict": args.strict}
    return datasets.load_at(args.dataset, size, parts=parts, **options)


def parser():
    """All arguments of the command line."""
    p = command.Parser(prog="python -m minivit.finetune", description=__doc__)
    p.add_argument("checkpoint", metavar="FILE", help=".npz or .safetensors")
    text = "sides, or HEIGHTxWIDTH, to measure at"
    p.add_argument("--image-size", type=image_shape, nargs="+", required=True, help=text)
    opening.add_reading_options(p)
    add_data_options(p)
    return p


def compare(args):
    """A line for every size and every way to get there."""
    params, description = opening.read(args.checkpoint, **opening.chosen(args), head=False)
    for size in args.image_size:  # one that does not fit is found before any work
        engines.check_attention(params, math.prod(token_grid(params, size) or (0,)))
    path, largest = command.literal(args.checkpoint), max(args.image_size, key=math.prod)
    dataset = load_data(args, largest, description["channels"])
    for size in args.image_size:
        for method, name in ways(params, description, size).items():
            accuracy = probe(params, description, size, dataset, method, what=path)
            print(f"{size[0]}x{size[1]}  {name:<14}{accuracy:.1%}", flush=True)


def ways(params, description, size):  # -> {method: what is printed of it}
    """How the positions can be resized; one way for what needs none, or has none."""
    table = "posembed_input" in params.get("Transformer", {})
    if not table or size == image_size(params, description):
        return {"corners": "as it is"}
    return {name: name for name in (*METHODS, "random")}


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, compare, argv)


if __name__ == "__main__":
    machine.leave(main())
