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

ROWS, FILTERS = 8, 32  # pictures and filters in one figure


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(prog="python -m minivit.figures", description=__doc__)
    predict.add_model_options(p)
    p.add_argument("--images", nargs="+", default=[], help="files or folders to look at")
    text = "folder for the figures (default: runs/figures)"
    p.add_argument("--output", type=Path, default=Path("runs/figures"), metavar="DIR", help=text)
    return p


def parts(params, description, size):  # -> Figure
    """Parameters and operations of each part."""
    sizes = parameters_by_part(flatten(params))
    options = {"channels": image_channels(params), "classes": description["classes"] or 0}
    work = flops_by_part(variant_of(description), size, **options)
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
    return figures.positions(likenesses, [f"{h}x{w} patches" for h, w in (grid, finer)])


def seen(params, description, image):  # uint8 [height, width, C] -> class or None, dictionary
    """Where a model looks in a picture, and the gradients of its most likely class."""
    out, settings = {}, finetune.settings(description)
    scores, back = model(params, datasets.normalise(image[None]), out=out, **settings)
    best = int(scores[0].argmax())
    back(np.eye(scores.shape[-1], dtype=scores.dtype)[[best]])
    grid, prefix = out["patch_embedding"].shape[1:3], description["prefix_tokens"]
    weights, gradient = (
        attention_maps.of_blocks(out, name) for name in ("attention", "attention_gradient")
    )
    fusions = attention_maps.FUSIONS
    flows = {f"rollout, {fuse}": attention_maps.rollout(weights, fuse) for fuse in fusions}
    if description["classes"] is not None:
        flows["rollout, gradient"] = attention_maps.gradient_rollout(weights, gradient)
    by_head = weights[0].reshape(-1, *weights.shape[3:])
    heads = attention_maps.on_the_grid(by_head, grid, prefix).reshape(*weights.shape[1:3], *grid)
    distance = attention_maps.attention_distance(weights, grid, token_pixels(params), prefix=prefix)
    maps = {name: attention_maps.on_the_grid(flow, grid, prefix)[0] for name, flow in flows.items()}
    return best, {"heads": heads, "distance": distance[0], "maps": maps, "grid": grid}


def of_weights(params, description, size):  # -> name and Figure, one by one
    """What can be drawn without a picture."""
    yield "parts", parts(params, description, size)
    if image_channels(params) in (1, 3):
        yield "filters", filters(params)
    if "posembed_input" in params.get("Transformer", {}):
        yield "positions", positions(params, size)
    else:
        print("no positions, so no picture of them")


def of_pictures(args, params, description, size):  # -> name and Figure, one by one
    """Where the model looks in each picture, and in all together."""
    names, shown, found = description.get("class_names"), [], []
    wanted = list(images.find(args.images))
    for path, image in predict.pictures(args, wanted, description["channels"], size, "figures"):
        best, what = seen(params, description, image)
        label = names[best] if names else f"class {best}"
        title = Path(path).stem + (f"\n{label}" if description["classes"] else "")
        shown.append((image, title))
        found.append(what)
        if "conv_root" not in params:
            yield f"patches-{len(found)}", figures.patches(image, token_pixels(params))
        yield f"heads-{len(found)}", figures.heads(what["heads"])
    args.status = int(len(found) < len(wanted))
    distance = np.mean([what["distance"] for what in found], axis=0)
    uniform = attention_maps.patch_distances(found[0]["grid"], token_pixels(params)).mean()
    yield "distance", figures.distances(distance, uniform)
    pictures, titles = zip(*shown[:ROWS], strict=True)
    maps = {name: [what["maps"][name] for what in found[:ROWS]] for name in found[0]["maps"]}
    yield "rollout", figures.overlays(pictures, maps, titles)


def draw(args):  # -> exit status
    """Write every figure, and say its name; 1 if some picture could not be read."""
    args.status = 0
    params, description, size = predict.read_model(args, head=False)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.images and is_resnet(params):
        print("a ResNet has no attention, so the pictures are not looked at")
    elif args.images:
        list(images.find(args.images))  # a mistake in a name comes before any work

    def every():
        yield from of_weights(params, description, size)
        if args.images and not is_resnet(params):
            yield from of_pictures(args, params, description, size)

    for name, figure in every():
        figure.savefig(args.output / f"{name}.png", dpi=100)
        print(args.output / f"{name}.png")
    return args.status


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    return command.run("figures", lambda: draw(args))


if __name__ == "__main__":
    sys.exit(main())
