"""How good a model is: `python -m minivit.evaluate --checkpoint FILE`.

Loss, top-1 and top-5 on the test images and a picture of what is taken for what. `--few-shot 1 5`
asks what the features are worth instead (section 4.1): a linear classifier is fitted in closed form
to a few images of every class, and compared with the same on raw pixels.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from . import checkpoint, command, datasets, engines, finetune
from .architecture import is_resnet
from .batches import scores
from .in_numpy import ridge as numpy_ridge
from .in_numpy import smooth_labels, softmax_cross_entropy
from .params import without_head
from .shapes import image_shape

PENALTIES = 2.0 ** np.arange(-10, 21, 2)
HELD_OUT = 1000  # training images on which the penalty is chosen
CONSTANT = 100.0  # the feature that big_vision adds for the bias


def top_k(logits, labels, k=1):  # [B, classes], [B] -> share of labels among the k best scores
    """Top-k accuracy; where there are k classes or fewer in all, every answer counts as right."""
    k = min(k, logits.shape[-1])
    best = np.argpartition(-logits, k - 1, axis=-1)[:, :k]
    return float((best == labels[:, None]).any(-1).mean())


def summary(logits, labels):  # [B, classes], [B] -> dictionary
    """Mean loss and accuracy over all examples, each counted once, and accuracy by class."""
    correct = logits.argmax(-1) == labels
    losses, _ = softmax_cross_entropy(logits, smooth_labels(labels, logits.shape[-1]))
    by_class = [
        float(correct[labels == label].mean()) if (labels == label).any() else float("nan")
        for label in range(logits.shape[-1])
    ]
    return {"loss": float(losses.mean()), "accuracy": float(correct.mean()), "by_class": by_class}


def confusion(predictions, labels, classes):  # 2 x [B] -> counts [true, predicted]
    """How often each class is taken for each."""
    cells = np.asarray(labels) * classes + np.asarray(predictions)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


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
        guesses = [(x @ w + b).argmax(-1) for x in others]
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
    """For each k, some draws of k images a class; one penalty, the best on held-out images."""
    rows = []
    for k, chosen in draws.items():
        results = [few_shot(features, labels, shots, classes, **options) for shots in chosen]
        results = np.stack(results)  # [draws, penalties, 2]
        best = results[..., 0].mean(0).argmax()
        rows.append((k, results[:, best, 1], PENALTIES[best]))
    return rows


def parser():
    """All arguments of the command line."""
    p = argparse.ArgumentParser(prog="python -m minivit.evaluate", description=__doc__)
    p.add_argument("--checkpoint", required=True, metavar="FILE", help=".npz or .safetensors")
    p.add_argument("--dataset", default="fashion-mnist", help="(default: fashion-mnist)")
    text = "images of each class to fit a linear classifier to; several numbers for several rows"
    p.add_argument("--few-shot", type=int, nargs="+", metavar="K", help=text)
    p.add_argument("--draws", type=int, default=5, help="of these images (default: 5)")
    text = "bias left alone, or as in big_vision: whitened, the bias a feature of 100"
    p.add_argument("--ridge", choices=("free", "big_vision"), default="free", help=text)
    text = "what is a feature: the class token, or the mean of all (a masked model's are better)"
    p.add_argument("--features", choices=("class", "mean"), default="class", help=text)
    text = "side or HEIGHTxWIDTH, positions are resized (default: the model's)"
    p.add_argument("--image-size", type=image_shape, help=text)
    p.add_argument("--old-grid", type=image_shape, help="of the file's positions, if no square")
    p.add_argument("--backend", choices=("jax", "numpy"), default="jax", help="which twin runs")
    p.add_argument("--output", type=Path, metavar="PNG", help="confusion (default: by the file)")
    return p


def scorer(args, params, description, size):  # -> function: uint8 images -> [B, ...]
    """The model at the size asked for; without a head its result is the features."""
    grid = args.old_grid or description["grid"]
    params = finetune.at_size(params, size, description["dialect"], old_grid=grid)
    options = finetune.settings(description) | {"mean": args.features == "mean"}
    engine = engines.make(args.backend, params, model=options)
    return lambda images: scores(engine, images, size, description["channels"])


def load_data(args, params, description):  # -> data set, size of the model's images
    """What the model is asked about."""
    size = args.image_size or finetune.image_size(params, description, args.old_grid)
    parts = ("train", "test") if args.few_shot else ("test",)  # nothing is decoded in vain
    channels = description["channels"]
    return datasets.load_at(args.dataset, size, parts=parts, channels=channels), size


def classify(args):
    """Print loss and accuracies, and draw the confusion."""
    params, description = checkpoint.inspect(args.checkpoint)
    dataset, size = load_data(args, params, description)
    if description["classes"] != len(dataset.classes):
        raise ValueError(
            f"{args.checkpoint} knows {description['classes'] or 'no'} classes, {dataset.name} has "
            f"{len(dataset.classes)}; ask what its features are worth with --few-shot 1 5 10 25"
        )
    output = args.output or Path(args.checkpoint).with_suffix(".confusion.png")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output {output}: there is no folder {output.parent}")
    score, labels = scorer(args, params, description, size), dataset.test_labels
    logits = score(dataset.test_images)
    result = summary(logits, labels)
    print(f"{'top-1':<8}{result['accuracy']:8.2%} of {len(labels)} test images of {dataset.name}")
    if len(dataset.classes) > 5:
        print(f"{'top-5':<8}{top_k(logits, labels, 5):8.2%}")
    print(f"{'loss':<8}{result['loss']:8.4f}")
    from . import figures

    counts = confusion(logits.argmax(-1), labels, len(dataset.classes))
    figures.confusion(counts, dataset.classes).savefig(output, dpi=100)
    print(f"what is taken for what: {output}")


def compare_few_shot(args):
    """Print a table: the features and raw pixels, for each number of images a class."""
    if min(args.few_shot) < 1 or args.draws < 1:
        raise ValueError(f"--few-shot {min(args.few_shot)}, --draws {args.draws}: at least 1 each")
    params, description = checkpoint.inspect(args.checkpoint, head=False)
    if is_resnet(params) and args.features != "class":
        raise ValueError(
            f"--features {args.features}: {args.checkpoint} is a ResNet without tokens"
        )
    dataset, size = load_data(args, params, description)
    dataset, *held = datasets.hold_out(
        dataset, min(0.5, HELD_OUT / len(dataset.train_images)), seed=0
    )
    classes = len(dataset.classes)
    draws = {
        k: [
            datasets.draw_shots(dataset.train_labels, dataset.classes, k, s)
            for s in range(args.draws)
        ]
        for k in args.few_shot
    }
    # Only the features of images that some draw contains are computed.
    used = np.unique(np.concatenate([shots for each in draws.values() for shots in each]))
    draws = {k: [np.searchsorted(used, shots) for shots in each] for k, each in draws.items()}
    score = scorer(args, without_head(params), description, size)
    parts = dataset.train_images[used], held[0], dataset.test_images
    labels = dataset.train_labels[used], held[1], dataset.test_labels
    pixels = [datasets.normalise(part).reshape(len(part), -1) for part in parts]
    options = {"variant": args.ridge, "backend": args.backend}
    print(f"per cent of {len(parts[2])} test images, mean and deviation of {args.draws} draws")
    print(f"{'images a class':<16}" + "".join(f"{k:>16}" for k in args.few_shot))
    for name, features in (("features", [score(part) for part in parts]), ("raw pixels", pixels)):
        table = few_shot_table(features, labels, draws, classes, **options)
        cells = (f"{100 * a.mean():.1f} ± {100 * a.std():.1f}" for _, a, _ in table)
        print(f"{name:<16}" + "".join(f"{cell:>16}" for cell in cells))
        print(f"{'  penalty':<16}" + "".join(f"{l2:>16g}" for *_, l2 in table))


def evaluate(args):
    """One of the two reports; an option of the other is refused."""
    given = {"--ridge": args.ridge != "free", "--features": args.features != "class"}
    for name, wanted in given.items():
        if wanted and not args.few_shot:
            raise ValueError(f"{name} is for --few-shot; say how many images a class")
    if args.few_shot and args.output:
        raise ValueError("--output is for the confusion, which --few-shot does not draw")
    return (compare_few_shot if args.few_shot else classify)(args)


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    args = parser().parse_args(argv)
    return command.run("evaluate", lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
