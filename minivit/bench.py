"""How fast, beside others on the same machine: `python -m minivit.bench`.

Each contestant lives in a process of its own; they take turns, A B C A B C, so that a machine that
slows down slows all of them. What counts is the ratio to the reference within a round; absolute
figures are of this machine and this minute.
"""

import contextlib
import csv
import json
import math
import os
import statistics
import subprocess
import sys

if __name__ == "__main__":  # before the libraries load
    from .machine import end_at_interrupt

    end_at_interrupt("minivit.bench: interrupted")

from . import command, machine
from .command import literal
from .contestants import CONFIGS, Task, contestants
from .peers import absent
from .progress import progress

LIMIT = "matrix product"
KILLED = "killed by the system, which does so where memory is short; try a smaller --batch"
TITLES = {"train": "training step", "forward": "forward pass"}


def parser():
    """All arguments of the command line."""
    names = list(contestants())
    p = command.Parser(prog="python -m minivit.bench", description=__doc__)
    text = "models (default: tiny tiny/4 Ti/16; B/16 takes minutes)"
    usual = ["tiny", "tiny/4", "Ti/16"]
    p.add_argument("--config", nargs="+", choices=list(CONFIGS), default=usual, help=text)
    both = ["train", "forward"]
    text = "training steps, forward passes (default: both)"
    p.add_argument("--what", nargs="+", choices=both, default=both, help=text)
    text = "images per call (default: the configuration's)"
    p.add_argument("--batch", type=command.whole(1, 100_000), help=text)
    text = "of the computation (default: float32)"
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    text = f"who takes part (default: those of {', '.join(names)} that are installed)"
    p.add_argument("--contestants", nargs="+", choices=names, help=text)
    text = "whom the others are compared with (default: timm, or else minivit JAX)"
    p.add_argument("--reference", choices=[n for n in names if n != LIMIT], help=text)
    text = "turns of each (default: 7)"
    p.add_argument("--rounds", type=command.whole(1, 1000), default=7, help=text)
    text = "how long a turn takes, about, in seconds (default: 1)"
    p.add_argument("--seconds", type=command.number(0, 3600), default=1.0, help=text)
    text = "folder for bench.csv and bench.png (default: runs/bench)"
    p.add_argument("--output", default="runs/bench", metavar="DIR", help=text)
    return p


class Worker:
    """A contestant in its process."""

    def __init__(self, name, task):
        """Start it and wait for its first call; `error` says why it cannot take part."""
        self.name, self.task, self.resident, self.per_second = name, task, 0, []
        spec = json.dumps(vars(task) | {"contestant": name})
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minivit.contestants", spec],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.report = self.answer()
        self.error = self.report.get("error")

    def answer(self):  # -> dictionary
        """The next line that is one; a library may have written others."""
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    return found
        status = self.process.wait()
        return {"error": KILLED if status in (-9, 137) else f"ended with status {status}"}

    def run(self, count):  # -> seconds for one call; None where it has died
        """So many calls; the first error is kept, since those after it do not say the cause."""
        if self.error:
            return None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{count}\n")
            self.process.stdin.flush()
        answer = self.answer()
        self.error = answer.get("error")
        if self.error:
            return None
        self.resident = answer["resident"]
        return answer["seconds"] / count

    def close(self):
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def compete(task, names, rounds, seconds, reference=None):
    # -> workers with their times, those left out
    """All contestants of a task, in turns; nobody competes if a `reference` asked for cannot."""
    workers, title = [], f"{task.config}, {TITLES[task.what]}: "
    try:
        for name in progress(names, title + "starting", unit="contestant"):
            workers.append(Worker(name, task))
        check_reference(reference, workers)
        counts = {}
        for worker in living(workers):
            worker.run(1)  # a second warm-up: the first call compiled
            counts[worker.name] = max(1, round(seconds / (worker.run(1) or math.inf)))
        for _ in progress(range(rounds), title + "taking turns", unit="round"):
            for worker in living(workers):
                once = worker.run(counts[worker.name])
                worker.per_second += [1 / once] if once else []
    finally:
        for worker in workers:
            worker.close()
    check_reference(reference, workers)
    return living(workers), {w.name: w.error for w in workers if w.error}


def check_reference(name, workers):
    """Without whom everybody is compared with, the rest is in vain."""
    for worker in workers:
        if worker.name == name and worker.error:
            raise ValueError(f"--reference {name} did not take part: {worker.error}")


def living(workers):
    """Those that take part."""
    return [worker for worker in workers if not worker.error]


def rows(task, workers, reference):  # -> list of dictionaries, all with the same keys
    """The results of a task, the fastest first; their keys are the columns of bench.csv."""
    times = {worker.name: worker.per_second for worker in workers}
    limit = next((w for w in workers if w.name == LIMIT), None)
    rate = limit and statistics.median(limit.per_second) * limit.report["flops"]
    result = []
    for worker in workers:
        if worker is limit:
            continue
        ratios = [a / b for a, b in zip(worker.per_second, times[reference], strict=True)]
        median = statistics.median(worker.per_second)
        flops = median * worker.report["flops"]
        temporaries = worker.report.get("temporaries")
        row = {"what": task.what, "config": task.config, "batch": task.batch, "dtype": task.dtype}
        row |= {"contestant": worker.name, "ratio": statistics.median(ratios)}
        row |= {"least": min(ratios), "most": max(ratios)}
        row |= {"images_per_second": median * task.batch, "gflops": flops / 1e9}
        row |= {"share_of_limit": flops / rate if rate else None}
        row |= {"first_call_seconds": worker.report["first"]}
        row |= {"temporaries_mb": None if temporaries is None else temporaries / 1e6}
        result.append(row | {"resident_mb": worker.resident / 1e6})
    return sorted(result, key=lambda row: -row["ratio"])


def table(found, reference):  # -> lines of markdown
    """Ratios first."""
    heads = [f"times {reference}", "least to most", "images/s", "GFLOP/s", "of the limit"]
    heads += ["first call", "temporaries", "resident"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for r in found:
        share, temporaries = r["share_of_limit"], r["temporaries_mb"]
        cells = [
            r["contestant"],
            f"{r['ratio']:.2f}",
            f"{r['least']:.2f} to {r['most']:.2f}",
            f"{r['images_per_second']:.4g}",
            f"{r['gflops']:.4g}",
            "" if share is None else f"{share:.0%}",
            f"{r['first_call_seconds']:.1f} s",
            "" if temporaries is None else f"{temporaries:.0f} MB",
            f"{r['resident_mb']:.0f} MB",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def taking_part(args):  # -> names
    """Those asked for; an error if the reference is not one of them, or is not installed."""
    names = args.contestants or list(contestants())
    if args.reference and args.reference not in names:
        raise ValueError(f"--reference {args.reference} is not among --contestants")
    if args.reference and (missing := absent(args.reference)):
        raise ValueError(f"--reference {args.reference} needs pip install {' '.join(missing)}")
    return names


def bench(args):
    """Everything that was asked for, printed as it comes; then a CSV and a picture."""
    names, output = taking_part(args), command.folder(args.output, "--output")
    output.mkdir(parents=True, exist_ok=True)
    everything, told = [], set()
    for config in args.config:
        for what in args.what:
            task = Task(config, what, args.batch or CONFIGS[config][-1], args.dtype)
            workers, left_out = compete(task, names, args.rounds, args.seconds, args.reference)
            for name, why in left_out.items():
                if name not in told:
                    print(f"left out: {name} ({literal(why)})", file=sys.stderr)
                told.add(name)
            present = [w.name for w in workers if w.name != LIMIT]
            if not present:
                continue
            reference = args.reference or ("timm" if "timm" in present else present[0])
            found = rows(task, workers, reference)
            everything += found
            save(everything, output)
            images = command.counted(task.batch, "image")
            print(f"\n{config}, {TITLES[what]}, {images}, {args.dtype}\n")
            print("\n".join(table(found, reference)), flush=True)
    if not everything:
        raise ValueError("no contestant could take part; the reasons are above")
    print(f"\nbench.csv and bench.png are in {literal(output)}")


def save(everything, folder):
    """The rows as CSV, the ratios as a picture."""
    from . import figures

    with open(folder / "bench.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, everything[0])
        writer.writeheader()
        writer.writerows(everything)
    figures.ratios(everything).savefig(folder / "bench.png", dpi=100)


def main(argv=None):  # -> exit status
    """Run, and say in one line what a user can mend."""
    return command.main(parser, bench, argv)


if __name__ == "__main__":
    machine.leave(main())
