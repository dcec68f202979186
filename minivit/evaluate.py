"""How good a model is: `python -m minivit.evaluate --checkpoint FILE`.

Loss, top-1 and top-5 on the test images and a picture of what is taken for what. `--few-shot 1 5`
asks what the features are worth instead (section 4.1): a linear classifier is fitted in closed form
to a few images of every class, and compared with the same on raw pixels.
"""

from pathlib import Path

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.evaluate: interrupted")

import numpy as np

from . import command, datasets, engines, finetune, machine, opening
from .architecture import is_resnet
from .batches import scores
from .command import counted, literal
from .in_numpy import guess, smooth_labels, softmax_cross_entropy
from .in_numpy import ridge as numpy_ridge
from .machine import check_memory
from .params import without_head
from .progress import progress
from .shapes import image_shape

PENALTIES = 2.0 ** np.arange(-10, 21, 2)
HELD_OUT = 1000  # training images on which the penalty is chosen
CONSTANT = 100.0  # the feature that big_vision adds for the bias
CELLS, PAIRS = 500, 20  # of the confusion: rows of the picture, and pairs of classes, at most
WORTH = "ask what its features are worth with --few-shot 1 5 10 25"


def check_scores(scores, what):
    """Refuse scores that are not finite; `what` is the model's file or name."""
    broken = int((~np.isfinite(scores)).any(-1).sum())
    if broken:
        raise ValueError(
            f"{what} gives scores that are not finite for {broken} of {len(scores)} images; its "
            "weights are damaged, or its training had diverged"
        )


def top_k(logits, labels, k=1):  # [B, classes], [B] -> share of labels among the k best scores
    """Top-k accuracy; with k classes or fewer, every answer counts as right.

    An answer with a score that is not finite is never right.
    """
    k = min(k, logits.shape[-1])
    best = np.argpartition(-logits, k - 1, axis=-1)[:, :k]
    right = (best == labels[:, None]).any(-1) & np.isfinite(logits).all(-1)
    return float(right.mean())


def summary(logits, labels):  # [B, classes], [B] -> dictionary
    """Mean loss and accuracy over all examples, each counted once, and accuracy by class.

    Scores that are not finite are never right (`guess`), and make the loss infinite or NaN.
    """
    correct = guess(logits) == labels
    with np.errstate(all="ignore"):
        losses, _ = softmax_cross_entropy(logits, smooth_labels(labels, logits.shape[-1]))
    by_class = [
        float(correct[labels == label].mean()) if (labels == label).any() else float("nan")
        for label in range(logits.shape[-1])
    ]
    return {"loss": float(losses.mean()), "accuracy": float(correct.mean()), "by_class": by_class}


def confusion(predictions, labels, classes):  # 2 x [B] -> counts [true, predicted]
    """How often each class is taken for each; a prediction of -1 (`guess`) is counted nowhere."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    cells = (labels * classes + predictions)[predictions >= 0]
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def confused(predictions, labels, most=PAIRS):  # 2 x [B] -> [(true, predicted, count)]
    """Which class is taken for which other, the most frequent first."""
    wrong = (predictions != labels) & (predictions >= 0)
    pairs = np.stack([labels[wrong], predictions[wrong]])
    pairs, counts = np.unique(pairs, axis=1, return_counts=True)
    first = np.argsort(-counts, kind="stable")[:most]
    return [(*pairs[:, i].tolist(), int(counts[i])) for i in first]


def signs(labels, classes):  # [B] -> float64 [B, classes]
    """The targets of the linear classifier: 1 at the label, -1 elsewhere."""
    return 2.0 * (np.arange(classes) == np.asarray(labels)[:, None]) - 1


def whiten(train, *others):
    """Features with mean 0 and deviation 1 on the training images, as big_vision does."""
    mean, deviation = train.mean(0), train.std(0) + 1e-5
    return tuple((x - mean) / deviation for x in (train, *others))


def ridge(features, labels, classes, l2=1.0, *, constant=None):
    # [B, D], [B] -> weights [D, classes], bias
    """The linear classifier of one penalty, in float64."""
    x = np.asarray(features, np.float64)
    weights, bias = numpy_ridge(x, signs(labels, classes), [l2], constant)
    return weights[0], bias[0]


def few_shot(features, labels, shots, classes, *, variant="free", backend="numpy"):
    # three parts of features and of labels, indices of the shots -> accuracies [penalties, 2]
    """Accuracy on the held-out and on the test part after fitting the shots, for each penalty.

    `features` and `labels` are of the training, held-out and test images. "free" centres and
    leaves the bias alone; "big_vision" whitens and penalises the bias as a feature of 100.
    """
    train, *others = (part.astype(np.float64) for part in features)
    train = train[shots]
    constant = None
    if variant == "big_vision":
        train, *others = whiten(train, *others)
        constant = CONSTANT
    weights, bias = fit_ridge(train, signs(labels[0][shots], classes), constant, backend)
    result = []
    for w, b in zip(weights, bias, strict=True):
        guesses = [guess(x @ w + b) for x in others]
        result.append([(g == y).mean() for g, y in zip(guesses, labels[1:], strict=True)])
    return np.array(result)


def fit_ridge(x, y, constant, backend):  # -> weights [G, D, K], bias [G, K]
    """All penalties by either twin, in float64: float32 loses the small ones."""
    if backend == "numpy":
        return numpy_ridge(x, y, PENALTIES, constant)
    import jax

    from .in_jax import ridge as jax_ridge

    with jax.enable_x64(True):
        return tuple(np.asarray(part) for part in jax_ridge(x, y, PENALTIES, constant))


def few_shot_table(features, labels, draws, classes, **options):
    # {k: list of indices of shots} -> [(k, accuracy of each draw, penalty)]
    """For each k, some draws of k images per class; one penalty, the best on held-out images."""
    rows, bar = [], progress(total=sum(map(len, draws.values())), what="fitting", unit="draw")
    for k, chosen in draws.items():
        results = []  # [draws, penalties, 2]
        for shots in chosen:
            results.append(few_shot(features, labels, shots, classes, **options))
            bar.update()
        results = np.stack(results)
        best = results[..., 0].mean(0).argmax()
        rows.append((k, results[:, best, 1], PENALTIES[best]))
    bar.close()
    return rows


def parser():
    """All arguments of the command line."""
    p = command.Parser(prog="python -m minivit.evaluate", description=__doc__)
    p.add_argument("--checkpoint", required=True, metavar="FILE", help=".npz or .safetensors")
    finetune.add_data_options(p)
    text = "images of each class to fit a linear classifier to; several numbers for several rows"
    p.add_argument("--few-shot", type=command.whole(1), nargs="+", metavar="K", help=text)
    text = "of these images (default: 5)"
    p.add_argument("--draws", type=command.whole(1, 1000), default=5, help=text)
    text = "bias left alone, or as in big_vision: whitened, the bias a feature of 100"
    p.add_argument("--ridge", choices=("free", "big_vision"), default="free", help=text)
    text = "what is a feature: the class token, or the mean of all (a masked model's are better)"
    p.add_argument("--features", choices=("class", "mean"), default="class", help=text)
    text = "side or HEIGHTxWIDTH, positions are resized (default: the model's)"
    p.add_argument("--image-size", type=image_shape, help=text)
    opening.add_reading_options(p)
    text = "the checkpoint's class names, a line each, where it has none of its own"
    p.add_argument("--labels", metavar="FILE", help=text)
    p.add_argument("--backend", choices=("jax", "numpy"), default="jax", help="which twin runs")
    text = "confusion, .png, .pdf or .svg (default: beside the checkpoint)"
    p.add_argument("--output", metavar="FILE", help=text)
    return p


def prepare(args, params, description, *parts):
    # -> function: uint8 images -> [B, ...]; data set
    """A function that gives a model's scores, or its features if it has no head, and the data set.

    Only the `parts` of the data set that are named are decoded.
    """
    size = args.image_size or finetune.image_size(params, description)
    grid = description["grid"]
    params = finetune.at_size(params, size, description["dialect"], old_grid=grid)
    options = finetune.settings(description) | {"mean": args.features == "mean"}
    engine = engines.make(args.backend, params, model=options)

    def score(images):
        found = scores(engine, images, size, description["channels"], "scoring")
        check_scores(found, args.checkpoint)
        return found

    return score, finetune.load_data(args, size, description["channels"], parts)


def align(dataset, names, source, known):  # -> Dataset
    """The data set with the checkpoint's labels; one without class names is taken as it is."""
    if names:
        try:
            return datasets.aligned(dataset, names, source)
        except ValueError as error:
            raise ValueError(f"{error}; {WORTH}") from None
    if known != len(dataset.classes):
        ours = counted(len(dataset.classes), "class", "classes")
        raise ValueError(
            f"{source} knows {known or 'no'} classes, {dataset.name} has {ours}; {WORTH}"
        )
    print(
        f"{literal(source)} does not name its classes; they are taken to be those of "
        f"{literal(dataset.name)}, in its order (--labels FILE names them)"
    )
    return dataset


def classify(args):
    """Print loss and accuracies, and draw the confusion."""
    path, names = args.checkpoint, None
    params, description = opening.read(path, **opening.chosen(args))
    output = command.picture(args.output or Path(path).with_suffix(".confusion.png"), "--output")
    if description["classes"] and (args.labels or description.get("class_names")):
        names = opening.class_names(description, args.labels)
    score, dataset = prepare(args, params, description, "test")
    dataset = align(dataset, names, args.labels or path, description["classes"])
    logits, labels = score(dataset.test_images), dataset.test_labels
    result, name = summary(logits, labels), literal(dataset.name)
    print(
        f"{'top-1':<8}{result['accuracy']:8.2%} of {counted(len(labels), 'test image')} of {name}"
    )
    if len(dataset.classes) > 5:
        print(f"{'top-5':<8}{top_k(logits, labels, 5):8.2%}")
    print(f"{'loss':<8}{result['loss']:8.4f}", flush=True)
    draw_confusion(guess(logits), labels, dataset.classes).savefig(output, dpi=100)
    print(f"what is taken for what: {literal(output)}")


def draw_confusion(predictions, labels, classes):  # -> Figure
    """The confusion of any number of classes; above `CELLS`, neighbours share a cell."""
    from . import figures

    count = len(classes)
    cells = min(count, CELLS)
    counts = confusion(predictions * cells // count, labels * cells // count, cells)
    return figures.confusion(counts, classes, confused(predictions, labels))


def compare_few_shot(args):
    """Print a table: the features and raw pixels, for each number of images per class."""
    params, description = opening.read(args.checkpoint, **opening.chosen(args), head=False)
    if is_resnet(params) and args.features != "class":
        raise ValueError(
            f"--features {args.features}: {args.checkpoint} is a ResNet without tokens"
        )
    score, dataset = prepare(args, without_head(params), description, *datasets.PARTS)
    dataset, *held = datasets.hold_out(
        dataset, min(0.5, HELD_OUT / len(dataset.train_images)), seed=0
    )
    check_pixels(dataset)
    names, answers = dataset.classes, dataset.train_labels
    draws = {
        k: [datasets.draw_shots(answers, names, k, seed) for seed in range(args.draws)]
        for k in args.few_shot
    }
    # Only the features of images that some draw contains are computed.
    used = np.unique(np.concatenate([shots for each in draws.values() for shots in each]))
    draws = {k: [np.searchsorted(used, shots) for shots in each] for k, each in draws.items()}
    parts = dataset.train_images[used], held[0], dataset.test_images
    labels = answers[used], held[1], dataset.test_labels
    options = {"variant": args.ridge, "backend": args.backend}
    print(
        f"per cent of {counted(len(parts[2]), 'test image')}, mean and deviation of "
        f"{counted(args.draws, 'draw')}"
    )
    print(f"{'images per class':<16}" + "".join(f"{k:>16}" for k in args.few_shot), flush=True)
    for name, see in (("features", score), ("raw pixels", raw)):
        table = few_shot_table([see(part) for part in parts], labels, draws, len(names), **options)
        cells = (f"{100 * a.mean():.1f} ± {100 * a.std():.1f}" for _, a, _ in table)
        print(f"{name:<16}" + "".join(f"{cell:>16}" for cell in cells))
        print(f"{'  penalty':<16}" + "".join(f"{l2:>16g}" for *_, l2 in table), flush=True)


def check_pixels(dataset):
    """Refuse images whose pixels do not fit into memory as features, in float32 and float64."""
    pixels = dataset.test_images.size
    what = f"raw pixels of {counted(len(dataset.test_images), 'test image')}"
    check_memory(12 * pixels, what, "choose a smaller --image-size")


def raw(images):  # uint8 [B, height, width, C] -> [B, height * width * C]
    """Pixels as features, to compare with."""
    return datasets.normalise(images).reshape(len(images), -1)


def evaluate(args):
    """One of the two reports; an option of the other is refused."""
    given = {"--ridge": args.ridge != "free", "--features": args.features != "class"}
    for name, wanted in given.items():
        if wanted and not args.few_shot:
            raise ValueError(f"{name} is for --few-shot; say how many images per class")
    given = {"--output": "the confusion", "--labels": "the classes of the checkpoint"}
    for name, purpose in given.items():
        if args.few_shot and getattr(args, name[2:]):
            raise ValueError(f"{name} is for {purpose}, which --few-shot does not look at")
    return (compare_few_shot if args.few_shot else classify)(args)


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, evaluate, argv)


if __name__ == "__main__":
    machine.leave(main())
