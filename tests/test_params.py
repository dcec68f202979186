"""Trees, names, order, and the official initial distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import params, variants
from minivit.params import flatten, pack, tree_map, unflatten, unpack

NAMES = st.text(st.characters(exclude_characters="/", codec="ascii"), min_size=1, max_size=4)
TREES = st.recursive(
    st.integers(0, 9).map(np.ones),
    lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))
DEEP = variants.Variant("deep", patch=4, width=8, mlp=16, heads=2, blocks=12)


def model(seed=0, **options):
    return params.initialise(DEEP, seed, image_size=8, channels=2, classes=5, **options)


def equal(a, b):
    assert flatten(a).keys() == flatten(b).keys()
    for name, leaf in flatten(a).items():
        np.testing.assert_array_equal(leaf, flatten(b)[name], err_msg=name)
        assert leaf.dtype == flatten(b)[name].dtype


@given(TREES)
def test_flatten_round_trip(tree):
    equal(unflatten(flatten(tree)), tree)


@given(TREES)
def test_pack_round_trip(tree):
    equal(unpack(pack(tree), tree), tree)


def test_pack_divides_by_decay():
    """Kernels in one vector, all others in the other, and unpacked leaves are views."""
    p = model()
    packed = pack(p)
    kernels = sum(leaf.size for name, leaf in flatten(p).items() if name.endswith("kernel"))
    assert {name: vector.size for name, vector in packed.items()} == {
        "kernel": kernels,
        "other": params.count(p) - kernels,
    }
    views = unpack(packed, p)
    packed["kernel"][:] = 3
    assert (views["head"]["kernel"] == 3).all()


def test_blocks_are_ordered_by_number():
    """Text would put block 10 before block 2."""
    names = [n for n in flatten(model()) if n.endswith("LayerNorm_0/bias")]
    assert names == [f"Transformer/encoderblock_{i}/LayerNorm_0/bias" for i in range(12)]
    stacked = params.stack_blocks(model())
    scales = stacked["Transformer"]["encoderblock"]["MlpBlock_3"]["Dense_0"]["kernel"]
    for i in range(12):
        block = model()["Transformer"][f"encoderblock_{i}"]
        np.testing.assert_array_equal(scales[i], block["MlpBlock_3"]["Dense_0"]["kernel"])
    equal(params.unstack_blocks(stacked), model())


def test_no_block_at_all():
    p = params.initialise(variants.Variant("x", 4, 8, 16, 2, 0), 0, image_size=8)
    equal(params.unstack_blocks(params.stack_blocks(p)), p)


def test_no_two_blocks_start_alike():
    kernels = [leaf for name, leaf in flatten(model()).items() if name.endswith("kernel")]
    seen = {leaf.tobytes() for leaf in kernels if leaf.any()}
    assert len(seen) == len([leaf for leaf in kernels if leaf.any()])
    assert len(seen) == 1 + 12 * 6


def test_seed_decides_everything():
    equal(model(3), model(3))
    assert (model(3)["embedding"]["kernel"] != model(4)["embedding"]["kernel"]).any()


def test_official_names():
    names = set(flatten(model(representation=6)))
    assert {"cls", "pre_logits/bias", "Transformer/posembed_input/pos_embedding"} < names
    block = "Transformer/encoderblock_11"
    assert f"{block}/MultiHeadDotProductAttention_1/query/kernel" in names
    assert f"{block}/MlpBlock_3/Dense_1/bias" in names
    assert f"{block}/LayerNorm_2/scale" in names


def test_official_distributions():
    """Bounds and deviations; with 4 sigma of the draws at hand."""
    variant = variants.Variant("x", 16, 192, 768, 3, 2)
    p = params.initialise(variant, 0, representation=64, head_bias=-10)
    flat = flatten(p)
    kernel = flat["embedding/kernel"]
    fan_in = 16 * 16 * 3
    assert kernel.std() * fan_in**0.5 == pytest.approx(1, abs=0.01)
    assert np.abs(kernel).max() * fan_in**0.5 < 2 / 0.8796
    table = flat["Transformer/posembed_input/pos_embedding"]
    assert table.std() == pytest.approx(0.02, rel=0.02)
    for name, leaf in flat.items():
        assert leaf.dtype == np.float32
        if "MultiHead" in name and name.endswith("kernel"):
            limit = (6 / (192 + 192)) ** 0.5
            assert limit * 0.99 < np.abs(leaf).max() < limit
            assert leaf.std() == pytest.approx(limit / 3**0.5, rel=0.02)
        elif "Dense" in name and name.endswith("kernel"):
            limit = (6 / (192 + 768)) ** 0.5
            assert limit * 0.99 < np.abs(leaf).max() < limit
        elif "Dense" in name:
            assert leaf.std() == pytest.approx(1e-6, rel=0.3)
        elif name.endswith("scale"):
            assert (leaf == 1).all()
        elif name == "head/bias":
            assert (leaf == -10).all()
        elif name.endswith("bias") or name in ("cls", "head/kernel"):
            assert not leaf.any()
    assert flat["pre_logits/kernel"].std() * 192**0.5 == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("wrong", [{"channels": 0}, {"classes": 0}])
def test_wrong_sizes(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        params.initialise(DEEP, 0, **({"image_size": 8} | wrong))


def test_tree_map_takes_several_trees():
    total = tree_map(lambda a, b: a + b, {"x": {"y": 1}}, {"x": {"y": 2}})
    assert total == {"x": {"y": 3}}


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_is_a_leaf_or_a_folder(order):
    """Whichever of the two comes first, it is named."""
    flat = dict([("cls", np.ones(1)), ("cls/a/b", np.ones(1))][::order])
    with pytest.raises(ValueError, match=r"cls/a/b goes through the array cls|cls is an array and"):
        unflatten(flat)


def test_empty_and_odd_names():
    """An empty name is a name; a raised two is no number."""
    tree = {"": {"": np.ones(1), "x": np.zeros(1)}, "x": np.ones(2), "²": np.ones(3)}
    equal(unflatten(flatten(tree)), tree)
    assert len(flatten(tree)) == 4
