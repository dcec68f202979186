"""Draw what a model learned: `python -m minivit.figures --checkpoint FILE --images photo.jpg`.

Its parts, filters and positions, and where it looks in the pictures: the heads of every block, how
far they look, and attention rollout. What a model does not have is left out with a word about it.
"""

import math
from itertools import islice
from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from ..machine import end_at_interrupt

    end_at_interrupt("minivit.figures: interrupted")

import numpy as np

from .. import (
    attention_maps,
    command,
    datasets,
    evaluate,
    figures,
    finetune,
    images,
    machine,
    opening,
    predict,
)
from ..architecture import (
    image_channels,
    is_resnet,
    parameters_by_part,
    token_grid,
    token_pixels,
    variant_of,
)
from ..command import literal
from ..in_numpy import model, resize
from ..machine import check_memory
from ..params import flatten
from ..progress import progress
from ..variants import flops_by_part

MOST, FILTERS = 8, 32  # pictures that are looked at, filters in one figure
PLACES = 7  # along a side, for which the similarity in a larger grid is shown, as in the paper


def parser():
    """All arguments of the command line."""
    p = command.Parser(prog="python -m minivit.figures", description=__doc__)
    predict.add_model_options(p)
    text = f"files or folders, up to {MOST} pictures"
    p.add_argument("--images", nargs="+", default=[], metavar="IMAGE", help=text)
    text = "folder for the figures (default: runs/figures)"
    p.add_argument("--output", default="runs/figures", metavar="DIR", help=text)
    return p


def parts(params, description, size):  # -> Figure
    """Parameters and operations of each part; for a pooling head (MAP), only its parameters."""
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
    panels = {"parameters": sizes, "operations per image": work}
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
    scale = "mid-grey is 0, black or white each one's largest weight"
    if "embedding" in params and "conv_root" not in params:
        kernel = params["embedding"]["kernel"]
        main = attention_maps.main_filters(kernel, min(FILTERS, kernel.shape[-1]))
        title = f"{len(main)} main directions of {kernel.shape[-1]} patch filters\n{scale}"
        return figures.filters(main, title=title)
    root = params["resnet"]["root_block"] if is_resnet(params) else params
    kernel = root["standardized_conv2d" if is_resnet(params) else "conv_root"]["kernel"]
    first = np.moveaxis(kernel, -1, 0)[:FILTERS]
    title = f"{len(first)} of {kernel.shape[-1]} filters of the first convolution\n{scale}"
    return figures.filters(first, title=title)


def some(count):  # -> numbers below it
    """All of a few places, or `PLACES` at about equal distances, both ends included."""
    if count <= PLACES + 1:
        return range(count)
    return np.linspace(0, count - 1, PLACES).round().astype(int)


def positions(params, size):  # -> Figure
    """The similarity of the position embeddings, also resized to a grid twice as fine."""
    table = params["Transformer"]["posembed_input"]["pos_embedding"]
    prefix = params["cls"].shape[1] if "cls" in params else 0
    grid = token_grid(params, size)
    finer = tuple(2 * n for n in grid)
    new, _ = resize(table, finer, old_grid=grid, prefix=prefix)
    likenesses, titles, places = [], [], []
    for rows, cells, how in ((table, grid, "learned"), (new, finer, "resized")):
        shown = [some(n) for n in cells]
        options = {"prefix": prefix, "places": shown}
        likenesses.append(attention_maps.position_similarity(rows, cells, **options))
        title, count = "{}x{} patches, {}".format(*cells, how), tuple(map(len, shown))
        titles.append(title if count == cells else title + "\nmaps of {}x{} of them".format(*count))
        places.append(shown)
    return figures.positions(likenesses, titles, places)


def says_classes(description):
    """Whether there is a class whose gradient can be rolled out."""
    return description["classes"] is not None and not description["zero_head"]


def seen(params, description, image, path):
    # uint8 [height, width, C] -> best class, dictionary
    """Where a model looks; if it knows classes, also for the most likely one."""
    out, settings = {}, finetune.settings(description)
    with np.errstate(all="ignore"):
        scores, back = model(params, datasets.normalise(image[None]), out=out, **settings)
    evaluate.check_scores(scores, path)
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


def of_pictures(params, description, pictures, checkpoint, names):  # -> name and Figure, one by one
    """Where the model looks in each picture, (path, image), and in all together."""
    titles, found = [], []
    hybrid = "conv_root" in params
    if hybrid:
        print("tokens are cut from a feature map, so no picture of patches")
    if not says_classes(description):
        print("no classes (no head, or one of zeros), so no rollout by gradient")
    for number, (path, image) in enumerate(pictures, 1):
        best, what = seen(params, description, image, checkpoint)
        label = None if best is None else names[best]
        stem = Path(path).stem
        titles.append(literal(stem) if label is None else f"{literal(stem)}\n{literal(label)}")
        found.append(what)
        stem = stem[:50]  # file systems limit the length of names
        if not hybrid:
            yield f"patches-{number}-{stem}", figures.patches(image, token_pixels(params))
        yield f"heads-{number}-{stem}", figures.heads(what["heads"], image)
    distance = np.mean([what["distance"] for what in found], axis=0)
    uniform = attention_maps.patch_distances(found[0]["grid"], token_pixels(params)).mean()
    yield "distance", figures.distances(distance, uniform)
    maps = {name: [what["maps"][name] for what in found] for name in found[0]["maps"]}
    yield "rollout", figures.overlays([image for _, image in pictures], maps, titles)


def read_pictures(args, params, description, size):  # -> [(path, image)], status
    """The first `MOST` of them that can be read; status 1 if one before these could not."""
    wanted = list(images.find(args.images))
    if not wanted:
        return [], 0
    if is_resnet(params):
        print("a ResNet has no attention, so the pictures are not looked at")
        return [], 0
    tokens = math.prod(token_grid(params, size)) + description["prefix_tokens"]
    need = 4 * description["blocks"] * description["heads"] * tokens**2
    what = f"attention among {tokens:,} tokens in {description['blocks']} blocks, with gradients,"
    check_memory(3 * need, what, "choose a smaller --image-size")
    bar = iter(progress(wanted, "decoding"))
    channels = description["channels"]
    pictures = list(islice(predict.pictures(args, bar, channels, size, "figures"), MOST))
    rest = sum(1 for _ in bar)
    if rest:
        print(f"the first {MOST} of {len(wanted)} pictures")
    return pictures, int(len(pictures) + rest < len(wanted))


def draw(args):  # -> exit status
    """Write every figure, and say its name; 1 if some picture could not be read."""
    output = command.folder(args.output, "--output")
    params, description, size = predict.read_model(args, head=False)
    known = args.labels or description["classes"] is not None
    names = opening.class_names(description, args.labels) if known else None
    pictures, status = read_pictures(args, params, description, size)
    output.mkdir(parents=True, exist_ok=True)

    def every():
        yield from of_weights(params, description, size)
        if pictures:
            yield from of_pictures(params, description, pictures, args.checkpoint, names)

    for name, figure in every():
        figure.savefig(output / f"{name}.png", dpi=100)
        print(literal(output / f"{name}.png"), flush=True)
    return status


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, draw, argv)


if __name__ == "__main__":
    machine.leave(main())
