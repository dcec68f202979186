"""The paper's tables, written here a second time from the facts, against the recipes."""

import pytest

from minivit import recipes

# Table 3: model, data, epochs, base rate, decay, weight decay, dropout.
TABLE_3 = """
B/16  jft 7 8e-4 linear 0.1 0
B/32  jft 7 8e-4 linear 0.1 0
L/32  jft 7 6e-4 linear 0.1 0
L/16  jft 14 4e-4 linear 0.1 0
H/14  jft 14 3e-4 linear 0.1 0
R50x1 jft 7 1e-3 linear 0.1 0
R50x2 jft 7 1e-3 linear 0.1 0
R101x1 jft 7 8e-4 linear 0.1 0
R152x1 jft 7 6e-4 linear 0.1 0
R152x2 jft 7 6e-4 linear 0.1 0
R50+B/16 jft 7 8e-4 linear 0.1 0
R50+B/32 jft 7 8e-4 linear 0.1 0
R50+L/32 jft 7 2e-4 linear 0.1 0
R50+L/16 jft 14 4e-4 linear 0.1 0
B/16 imagenet-21k 90 1e-3 linear 0.03 0.1
B/32 imagenet-21k 90 1e-3 linear 0.03 0.1
L/16 imagenet-21k 90 1e-3 linear 0.03 0.1
B/16 imagenet 300 3e-3 cosine 0.3 0.1
L/16 imagenet 300 3e-3 cosine 0.3 0.1
"""
# Table 4: data, steps, rates that were tried, share held out; batches of 512 at 384 pixels.
TABLE_4 = [
    ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 0.01),
    ("cifar", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02),
    ("pets", 500, (0.001, 0.003, 0.01, 0.03), 0.1),
    ("flowers", 500, (0.001, 0.003, 0.01, 0.03), 0.1),
    ("vtab", 2500, (), 0.0),
]


@pytest.mark.parametrize("row", TABLE_3.strip().splitlines())
def test_table_3(row):
    model, name, epochs, rate, decay, weight_decay, dropout = row.split()
    recipe = recipes.find(name, model)
    assert recipe.epochs == int(epochs)
    assert recipe.learning_rate == float(rate)
    assert recipe.decay == decay
    assert recipe.weight_decay == float(weight_decay)
    assert recipe.dropout == float(dropout)
    assert recipe.clip == (1.0 if name == "imagenet" else 0.0)
    assert (recipe.batch_size, recipe.warmup_steps, recipe.image_size) == (4096, 10_000, 224)
    assert recipe.optimizer == "adamw"
    assert recipe.loss == ("sigmoid" if name == "imagenet-21k" else "softmax")
    assert recipe.head_bias == (-10 if name == "imagenet-21k" else 0)
    assert recipe.representation == (name == "imagenet-21k")
    both = {
        ("L/16", "jft"): (7, 14),
        ("R50+L/16", "jft"): (7, 14),
        ("L/16", "imagenet-21k"): (30, 90),
    }
    assert recipe.epochs_tried == both.get((model, name), ())


@pytest.mark.parametrize(("name", "steps", "sweep", "held_out"), TABLE_4)
def test_table_4(name, steps, sweep, held_out):
    recipe = recipes.find(f"finetune-{name}", "B/16")
    assert (recipe.steps, recipe.sweep, recipe.validation) == (steps, sweep, held_out)
    assert recipe.learning_rate in (sweep or (0.01,))
    assert (recipe.batch_size, recipe.image_size, recipe.clip) == (512, 384, 1.0)
    assert (recipe.optimizer, recipe.decay, recipe.weight_decay) == ("sgd", "cosine", 0.0)
    assert recipe.warmup_steps == (100 if steps == 500 else 500)


def test_masked():
    """Section B.1.2."""
    recipe = recipes.find("masked", "B/16")
    assert (recipe.steps, recipe.batch_size, recipe.warmup_steps) == (1_000_000, 4096, 10_000)
    assert (recipe.learning_rate, recipe.decay, recipe.objective) == (2e-4, "cosine", "mean-color")
    assert (recipe.clip, recipe.weight_decay, recipe.dropout) == (0, 0, 0)


def test_errors_name_what_there_is():
    with pytest.raises(ValueError, match="unknown recipe 'jtf'; choose one of laptop"):
        recipes.find("jtf", "B/16")
    with pytest.raises(ValueError, match=r"recipe jft is for B/\*, L/32, .*, not for Ti/16"):
        recipes.find("jft", "Ti/16")


def test_listing(capsys):
    """One line each, and only what differs from the defaults."""
    assert recipes.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipes.RECIPES)
    assert "epochs 14" in next(line for line in lines if "H/14" in line)
    assert "mixup" not in lines[0]


def test_arguments_that_it_has_not(refusal):
    """One line, as everywhere."""
    assert "unrecognized arguments: junk" in refusal(recipes.main, ["junk"])
