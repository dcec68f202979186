"""A colour data set without downloads: one striped shape and some pale dots on a textured ground.

Every picture answers six questions, in the manner of VTAB's structured tasks: which shape, which
colour, how many dots, in which quadrant the shape is, how its stripes run, and how far away the
nearest dot is. Everything is drawn from a seed; lengths are shares of the picture's side.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .interpolation import resize_weights
from .machine import check_memory, cores
from .progress import progress

QUESTIONS = {
    "shape": ("disc", "square", "triangle", "cross", "ring", "star"),
    "color": ("red", "amber", "lime", "green", "cyan", "blue", "violet", "magenta"),
    "count": ("1 dot", "2 dots", "3 dots", "4 dots", "5 dots"),
    "quadrant": ("top left", "top right", "bottom left", "bottom right"),
    "orientation": ("|", "/", "-", "\\"),
    "distance": ("near", "middle", "far", "very far"),
}
DISTANCES = (0.28, 0.38, 0.48, 0.58, 0.72)  # where the nearest dot may be, from centre to centre
CELLS = 6  # dots stand near the centres of a grid of so many cells a side
DOT = 0.05  # radius
DRAWN = 9  # the purpose of this stream of random numbers; datasets.py lists all
CHUNK = 500  # pictures that are drawn together, from a seed of their own


def outline(kind, x, y):  # [B, S, S] in radii -> below 0 inside, about the distance to the edge
    """The shapes, of about the same area, none larger than the unit disc."""
    if kind == "disc":
        return np.hypot(x, y) - 0.85
    if kind == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.7
    if kind == "triangle":
        sides = [np.sin(a) * x + np.cos(a) * y for a in np.pi * np.array([0, 2, 4]) / 3]
        return np.maximum.reduce(sides) - 0.5
    if kind == "cross":
        x, y = np.abs(x), np.abs(y)
        return np.minimum(np.maximum(x - 0.95, y - 0.3), np.maximum(x - 0.3, y - 0.95))
    if kind == "ring":
        return np.abs(np.hypot(x, y) - 0.72) - 0.23
    return np.hypot(x, y) - 0.65 - 0.3 * np.cos(5 * np.arctan2(x, y))  # star


def saturated(hue, saturation, value):  # 3 x [B] -> [B, 3]
    """Colours from hue, saturation and value (HSV), all between 0 and 1."""
    k = (np.array([5, 3, 1]) + 6 * hue[:, None]) % 6
    return value[:, None] * (1 - saturation[:, None] * np.minimum(k, 4 - k).clip(0, 1))


def place_dots(rng, centre, count):  # [B, 2], [B] -> centres [B, cells, 2], which exist [B, cells]
    """The nearest dot in a band of distances drawn at random, all others farther away."""
    batch = len(centre)
    grid = (np.stack(np.mgrid[:CELLS, :CELLS], -1).reshape(-1, 2) + 0.5) / CELLS
    dots = grid + rng.uniform(-0.02, 0.02, (batch, *grid.shape))
    distance = np.linalg.norm(dots - centre[:, None], axis=-1)
    band = rng.integers(0, len(DISTANCES) - 1, batch)
    inside = np.digitize(distance, DISTANCES) - 1 == band[:, None]
    priority = rng.random(distance.shape)
    # In the band if a cell lies there, else the first beyond what the shape may cover.
    near = np.where(distance >= DISTANCES[0], 1 - distance, -1)
    first = np.where(inside.any(1), (priority + inside).argmax(1), near.argmax(1))
    least = distance[np.arange(batch), first]
    # Where too few are beyond the first, the farthest of the others.
    order = np.where(distance > least[:, None], priority, distance - 10)
    order[np.arange(batch), first] = 2
    rank = (-order).argsort(1).argsort(1)
    return dots, rank < count[:, None]


def background(rng, batch, size):  # -> [B, S, S, 3]
    """A dull colour, with blurred spots and fine noise over it."""
    color = saturated(rng.random(batch), rng.uniform(0, 0.5, batch), rng.uniform(0.2, 0.5, batch))
    spread = np.array(resize_weights(5, size, "bilinear"), "float32")
    spots = 0.12 * rng.standard_normal((batch, 3, 5, 5), dtype="float32")
    spots = (spread @ spots @ spread.T).transpose(0, 2, 3, 1)
    noise = 0.03 * rng.standard_normal((batch, size, size, 3), dtype="float32")
    return color[:, None, None].astype("float32") + spots + noise


def paint(picture, color, cover):  # [B, S, S, 3], [B, ..., 3], [B, S, S]
    """Lay a colour over a picture, as far as it covers each pixel."""
    cover = cover[..., None].clip(0, 1)
    picture += cover * (color - picture)


def answers(rng, batch):  # -> {question: [B]}, centre [B, 2]
    """What is in each picture; the distance is known only when the dots are placed."""
    labels = {name: rng.integers(0, len(c), batch) for name, c in QUESTIONS.items()}
    quadrant = np.stack([labels["quadrant"] // 2, labels["quadrant"] % 2], -1)
    offset = rng.uniform(0.2, 0.43, (batch, 2))  # clear of the border and of the middle
    return labels, np.where(quadrant, 1 - offset, offset)


def draw(rng, batch, size):  # -> uint8 [B, S, S, 3], {question: labels [B]}
    """Some pictures and all that can be asked about them."""
    labels, centre = answers(rng, batch)
    dots, exists = place_dots(rng, centre, labels["count"] + 1)
    nearest = np.where(exists, np.linalg.norm(dots - centre[:, None], axis=-1), np.inf).min(1)
    labels["distance"] = np.digitize(nearest, DISTANCES[1:-1])
    picture = background(rng, batch, size)
    pixels = (np.arange(size, dtype="float32") + 0.5) / size
    for i in range(len(QUESTIONS["count"])):
        # The i-th dot of each picture that has so many.
        which = np.flatnonzero(labels["count"] >= i)
        chosen = exists[which].argsort(1, kind="stable")[:, ::-1][:, i]
        row, column = dots[which, chosen].astype("float32").T[..., None, None]
        gap = np.hypot(pixels[:, None] - row, pixels - column) - DOT
        pale = saturated(*rng.uniform((0, 0, 0.85), (1, 0.15, 1), (len(which), 3)).T)
        part = picture[which]
        paint(part, pale[:, None, None].astype("float32"), 0.5 - gap * size)
        picture[which] = part
    draw_shapes(rng, picture, labels, centre.astype("float32"), pixels)
    return np.rint(255 * picture.clip(0, 1)).astype(np.uint8), labels


def draw_shapes(rng, picture, labels, centre, pixels):
    """The striped shape of every picture, turned at random."""
    batch, size = picture.shape[:2]
    radius = rng.uniform(0.13, 0.19, batch).astype("float32")
    turn = rng.uniform(0, 2 * np.pi, batch).astype("float32")
    hue = (labels["color"] + rng.uniform(-0.18, 0.18, batch)) / len(QUESTIONS["color"])
    color = saturated(hue, rng.uniform(0.75, 1, batch), rng.uniform(0.75, 1, batch))
    color = color.astype("float32")
    stripes = np.pi * (labels["orientation"] + rng.uniform(-0.25, 0.25, batch)) / 4
    stripes = stripes.astype("float32")
    for number, kind in enumerate(QUESTIONS["shape"]):
        which = np.flatnonzero(labels["shape"] == number)
        y = pixels[:, None] - centre[which, 0, None, None]
        x = pixels - centre[which, 1, None, None]
        cos, sin = (f(turn[which])[:, None, None] for f in (np.cos, np.sin))
        r = radius[which, None, None]
        edge = outline(kind, (cos * x - sin * y) / r, (sin * x + cos * y) / r) * r
        along = (
            np.cos(stripes[which])[:, None, None] * x + np.sin(stripes[which])[:, None, None] * y
        )
        shade = 0.75 + 0.25 * np.sin(2 * np.pi / 0.12 * along)
        part = picture[which]
        paint(part, color[which, None, None] * shade[..., None], 0.5 - edge * size)
        picture[which] = part


def shapes(*, labels="shape", size=32, train=20_000, test=4_000, seed=0, parts=("train", "test")):
    # -> class names, training images and labels, test images and labels, {part: what it is}
    """Both parts, drawn in chunks on all cores; a chunk depends on the seed and its number only."""
    if labels not in QUESTIONS:
        raise ValueError(f"unknown labels {labels!r}; choose one of {', '.join(QUESTIONS)}")
    if size < 16:
        raise ValueError(f"size is {size}; dots are lost below 16 pixels")
    # A chunk is drawn in some arrays of float32 for each core.
    check_memory((train + test + 20 * CHUNK) * size * size * 3, f"shapes of {size} pixels")
    result, drawn = [QUESTIONS[labels]], {}
    for number, (part, examples) in enumerate({"train": train, "test": test}.items()):
        if examples < 1:
            raise ValueError(f"{part} is {examples}; it must be at least 1")
        wanted = examples if part in parts else 0
        result += draw_part([seed, DRAWN, number], wanted, size, labels)
        # The version changes with the numbers that are drawn, whatever their cause.
        drawn[part] = {"contents": f"shapes 1: {labels}, {size}, {examples}, seed {seed}"}
    return *result, drawn


def draw_part(seed, examples, size, labels):  # -> uint8 [B, S, S, 3], int32 [B]
    """One part of the set."""
    images = np.empty((examples, size, size, 3), np.uint8)
    chosen = np.empty(examples, np.int32)

    def fill(start):
        pictures, answers = draw(np.random.default_rng([*seed, start]), CHUNK, size)
        part = slice(start, min(start + CHUNK, examples))
        images[part] = pictures[: part.stop - start]
        chosen[part] = answers[labels][: part.stop - start]

    starts = range(0, examples, CHUNK)
    with ThreadPoolExecutor(cores()) as pool:
        for _ in progress(pool.map(fill, starts), "drawing", total=len(starts), unit="chunk"):
            pass
    return images, chosen
