"""Draw what a model learned: `python -m minivit.figures --checkpoint FILE --images photo.jpg`.

Its parts, filters and positions, and where it looks in the pictures: the heads of every block, how
far they look, and attention rollout. What a model does not have is left out, and said.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from .. import attention_maps, command, datasets, figures, finetune, images, predict
from ..architecture import (
    image_channels,
    is_resnet,
    parameters_by_part,
    token_grid,
    token_pixels,
    variant_of,
)
from ..in_numpy import model, resize
from ..params import flatten
from ..variants import flops_by_part

MOST, FILTERS = 8, 32  # pictures that are looked at, filters in one figure


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(prog="python -m minivit.figures", description=__doc__)
    predict.add_model_options(p)
    p.add_argument(
        "--images", nargs="+", default=[], help=f"files or folders, up to {MOST} pictures"
    )
    text = "folder for the figures (default: runs/figures)"
    p.add_argument("--output", type=Path, default=Path("runs/figures"), metavar="DIR", help=text)
    return p


def parts(params, description, size):  # -> Figure
    """Parameters and operations of each part; of a pooling head (MAP) its parameters alone."""
    sizes = parameters_by_part(flatten(params))
    work = flops_by_part(
        variant_of(description),
        size,
        channels=image_channels(params),
        classes=description["classes"] or 0,
        class_token=bool(description["prefix_tokens"]),
        representation=description.get("representation"),
        predictions=description.get("predictions"),
    )
    panels = {"parameters": sizes, "operations an image": work}
    return figures.bars(dict(scaled(values, unit) for unit, values in panels.items()))


def scaled(values, unit):  # {name: number} -> unit with its factor, {name: number}
    """In thousands, millions or billions, so that the largest can be read."""
    factor, word = 1, ""
    for power, name in ((1e3, "thousand "), (1e6, "million "), (1e9, "billion ")):
        if max(values.values()) >= power:
            factor, word = power, name
    return word + unit, {name: number / factor for name, number in values.items()}


def filters(params):  # -> Figure
    """The main directions of the patch embedding, or the first convolution's kernels."""
    if is_resnet(params):
        kernel = params["resnet"]["root_block"]["standardized_conv2d"]["kernel"]
    elif "conv_root" in params:
        kernel = params["conv_root"]["kernel"]
    else:
        kernel = params["embedding"]["kernel"]
        return figures.filters(attention_maps.main_filters(kernel, min(FILTERS, kernel.shape[-1])))
    return figures.filters(np.moveaxis(kernel, -1, 0)[:FILTERS])


def positions(params, size):  # -> Figure
    """How alike they are on the model's grid, and resized to a grid twice as fine."""
    table = params["Transformer"]["posembed_input"]["pos_embedding"]
    prefix = params["cls"].shape[1] if "cls" in params else 0
    grid = token_grid(params, size)
    finer = tuple(2 * n for n in grid)
    new, _ = resize(table, finer, old_grid=grid, prefix=prefix)
    likenesses = [
        attention_maps.position_similarity(rows, cells, prefix=prefix)
        for rows, cells in ((table, grid), (new, finer))
    ]
    titles = ["{}x{} patches, learned".format(*grid), "{}x{}, resized".format(*finer)]
    return figures.positions(likenesses, titles)


def says_classes(description):
    """Whether there is a class for which attention can speak."""
    return description["classes"] is not None and not description["zero_head"]


def seen(params, description, image):  # uint8 [height, width, C] -> best class, dictionary
    """Where a model looks in a picture, also for its most likely class, if it knows classes."""
    out, settings = {}, finetune.settings(description)
    scores, back = model(params, datasets.normalise(image[None]), out=out, **settings)
    weights, best = attention_maps.of_blocks(out), None
    fusions = attention_maps.FUSIONS
    flows = {f"rollout, {fuse}": attention_maps.rollout(weights, fuse) for fuse in fusions}
    if says_classes(description):
        best = int(scores[0].argmax())
        back(np.eye(scores.shape[-1], dtype=scores.dtype)[[best]])
        gradient = attention_maps.of_blocks(out, "attention_gradient")
        flows["rollout, gradient"] = attention_maps.gradient_rollout(weights, gradient)
    grid, prefix = out["patch_embedding"].shape[1:3], description["prefix_tokens"]
    by_head = weights[0].reshape(-1, *weights.shape[3:])
    heads = attention_maps.on_the_grid(by_head, grid, prefix).reshape(*weights.shape[1:3], *grid)
    distance = attention_maps.attention_distance(weights, grid, token_pixels(params), prefix=prefix)
    maps = {name: attention_maps.on_the_grid(flow, grid, prefix)[0] for name, flow in flows.items()}
    return best, {"heads": heads, "distance": distance[0], "maps": maps, "grid": grid}


def of_weights(params, description, size):  # -> name and Figure, one by one
    """What can be drawn without a picture."""
    yield "parts", parts(params, description, size)
    yield "filters", filters(params)
    if "posembed_input" in params.get("Transformer", {}):
        yield "positions", positions(params, size)
    else:
        print("no positions, so no picture of them")


def of_pictures(params, description, pictures):  # -> name and Figure, one by one
    """Where the model looks in each picture, (path, image), and in all together."""
    names, titles, found = description.get("class_names"), [], []
    hybrid = "conv_root" in params
    if hybrid:
        print("tokens are cut from a feature map, so no picture of patches")
    if not says_classes(description):
        print("no classes (no head, or one of zeros), so no rollout by gradient")
    for number, (path, image) in enumerate(pictures, 1):
        best, what = seen(params, description, image)
        label = None if best is None else names[best] if names else f"class {best}"
        stem = Path(path).stem
        titles.append(stem if label is None else f"{stem}\n{label}")
        found.append(what)
        if not hybrid:
            yield f"patches-{number}-{stem}", figures.patches(image, token_pixels(params))
        yield f"heads-{number}-{stem}", figures.heads(what["heads"])
    distance = np.mean([what["distance"] for what in found], axis=0)
    uniform = attention_maps.patch_distances(found[0]["grid"], token_pixels(params)).mean()
    yield "distance", figures.distances(distance, uniform)
    maps = {name: [what["maps"][name] for what in found] for name in found[0]["maps"]}
    yield "rollout", figures.overlays([image for _, image in pictures], maps, titles)


def draw(args):  # -> exit status
    """Write every figure, and say its name; 1 if some picture could not be read."""
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output} is a file; it must be a folder, or a new name")
    params, description, size = predict.read_model(args, head=False)
    wanted, pictures = list(images.find(args.images)), []
    if wanted and is_resnet(params):
        print("a ResNet has no attention, so the pictures are not looked at")
    elif wanted:
        pictures = list(predict.pictures(args, wanted, description["channels"], size, "figures"))
    args.output.mkdir(parents=True, exist_ok=True)
    if len(pictures) > MOST:
        print(f"the first {MOST} of {len(pictures)} pictures")

    def every():
        yield from of_weights(params, description, size)
        if pictures:
            yield from of_pictures(params, description, pictures[:MOST])

    for name, figure in every():
        figure.savefig(args.output / f"{name}.png", dpi=100)
        print(args.output / f"{name}.png")
    return int(len(pictures) < len(wanted) and not is_resnet(params))


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    return command.run("figures", lambda: draw(args))


if __name__ == "__main__":
    sys.exit(main())
