"""Saving, loading, dialects, damage (cases CKP-01 to CKP-10)."""

import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save as safetensors_bytes

from minivit import checkpoint, dialects, in_jax, in_numpy, params, variants
from minivit.params import flatten, tree_map, unflatten

VARIANT = variants.Variant("small", patch=4, width=12, mlp=20, heads=3, blocks=11)
MODELS = ["vit_token", "vit_gap", "vit_rep", "vit_nopos", "vit_square"]


def model(**options):
    """Random parameters, nothing at a trivial value; eleven blocks, so that 10 follows 9."""
    rng = np.random.default_rng(0)
    sizes = {"image_size": 8, "channels": 2, "classes": 5}
    p = params.initialise(VARIANT, 0, **(sizes | options))
    return tree_map(lambda leaf: rng.standard_normal(leaf.shape).astype("float32"), p)


def equal(a, b):
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        assert a[name].dtype == b[name].dtype


@pytest.mark.parametrize("name", ["ck", "ck.npz", "a.b", "with space.npz", "å 猫.npz"])
def test_names_are_used_as_they_are(tmp_path, name):
    """CKP-03: no .npz is added, and no other file is left."""
    path = checkpoint.save(tmp_path / name, model())
    assert path == tmp_path / name
    assert [p.name for p in tmp_path.iterdir()] == [name]
    equal(checkpoint.load(path), model())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dialect", ["official", "timm"])
def test_types_survive(tmp_path, dtype, dialect):
    """bfloat16 too, which NumPy's own format forgets."""
    p = tree_map(lambda leaf: leaf.astype(getattr(ml_dtypes, dtype, dtype)), model())
    path = checkpoint.save(tmp_path / "x", p, dialect)
    equal(checkpoint.load(path, heads=3), p)


def test_saving_again_over_a_loaded_file(tmp_path):
    """CKP-06: everything was read at once, and nothing stays open."""
    path = checkpoint.save(tmp_path / "x.npz", model())
    p = checkpoint.load(path)
    checkpoint.save(path, tree_map(lambda leaf: leaf * 2, p))
    equal(p, model())
    equal(checkpoint.load(path), tree_map(lambda leaf: leaf * 2, p))


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, error):
    """CKP-01: and no temporary one."""
    path = checkpoint.save(tmp_path / "x.npz", model())
    before = path.read_bytes()

    def fail(descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        checkpoint.save(path, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


LOOP = """
import sys
import numpy as np
from minivit import checkpoint
for i in range(10**9):
    checkpoint.save(sys.argv[1], {"embedding": {"kernel": np.full(30_000, i % 251, "float32")}})
    print(i, flush=True)
"""


def test_kills_leave_a_whole_file(tmp_path):
    """CKP-01: 50 SIGKILLs at random moments of a save loop; the file is whole every time."""
    rng = np.random.default_rng(0)
    path = tmp_path / "x.npz"
    for _ in range(50):
        command = [sys.executable, "-c", LOOP, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        (kernel,) = checkpoint.read_arrays(path)[0].values()
        assert kernel.shape == (30_000,)
        assert (kernel == kernel[0]).all()


# --- What is not a checkpoint -----------------------------------------------------------------


class Evil:
    """Unpickling this would make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def archive(tmp_path, **arrays):
    path = tmp_path / "made.npz"
    np.savez(path, **arrays)
    return path.read_bytes()


def zipped(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def damaged(tmp_path):
    """Name of a fault and the bytes of a file that has it."""
    good = checkpoint.save(tmp_path / "good.npz", model()).read_bytes()
    flipped = bytearray(good)
    flipped[500] ^= 1
    evil = Evil(tmp_path / "PWNED")
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    ones = np.ones((1, 1, 12), "float32")
    tensors = safetensors_bytes({"a": np.ones(3, "float32")})
    return {
        "half": good[: len(good) // 2],
        "ten bytes short": good[:-10],
        "one bit flipped": bytes(flipped),
        "empty": b"",
        "a web page": b"<!DOCTYPE html><html>Not found</html>",
        "a pickle": pickle.dumps(evil),
        "a pickled array": archive(tmp_path, x=np.array([evil], object)),
        "one array": buffer.getvalue(),
        "a PyTorch pickle": zipped("archive/data.pkl", pickle.dumps(evil)),
        "bytes instead of numbers": safetensors_bytes({"a": np.ones(3, "uint8")}),
        "integers": archive(tmp_path, **{n: a.astype("i1") for n, a in flatten(model()).items()}),
        "a scalar": archive(tmp_path, **(flatten(model()) | {"cls": np.float32(1)})),
        "half an attention head": archive(
            tmp_path, **flatten(model()), **{"MAPHead_0/probe": ones}
        ),
        "more prefix tokens than rows": archive(
            tmp_path, **(flatten(model()) | {"cls": np.ones((1, 9, 12), "float32")})
        ),
        "text": b"these are not the weights you are looking for",
        "another model": archive(tmp_path, weight=np.ones(3)),
        "safetensors, short": tensors[:-3],
        "safetensors, header": tensors[:20],
        "safetensors of another model": tensors,
        "safetensors, not JSON": (9).to_bytes(8, "little") + b"{nonsense",
    }


def test_damaged_files(tmp_path):
    """CKP-04, CKP-05: one type of error, which names the path; no code runs, no traceback."""
    path = tmp_path / "broken.npz"
    for fault, content in damaged(tmp_path).items():
        path.write_bytes(content)
        with pytest.raises(checkpoint.CheckpointError, match=r"broken\.npz") as error:
            checkpoint.load(path)
        assert "\n" not in str(error.value), fault
        assert checkpoint.main(["show", str(path)]) == 2
        assert not (tmp_path / "PWNED").exists()


def test_every_flipped_byte_is_seen(tmp_path):
    """Damage anywhere in an archive is an error, or harms nothing."""
    tree = {"embedding": {"kernel": np.arange(40, dtype="float32")}}
    good = checkpoint.save(tmp_path / "x.npz", tree).read_bytes()
    path = tmp_path / "y.npz"
    for position in range(len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 0x10
        path.write_bytes(flipped)
        try:
            arrays, _ = checkpoint.read_arrays(path)
        except checkpoint.CheckpointError:
            continue
        for array in arrays.values():
            np.testing.assert_array_equal(array, np.arange(40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f.pop("Transformer/encoderblock_10/MlpBlock_3/Dense_1/kernel"),
            r"missing .*encoderblock_10/MlpBlock_3/Dense_1/kernel \[20, 12\]",
        ),
        (lambda f: f.update({"foo/bar": np.ones(2)}), r"extra foo/bar \[2\]"),
        (
            lambda f: f.update({"head/kernel": f["head/kernel"].T}),
            r"head/bias has shape \[5\], not \[12\]",
        ),
        (
            lambda f: f.update({"Transformer/encoder_norm/scale": np.float32(1)}),
            r"encoder_norm/scale has shape \[\], not \[12\]",
        ),
        (lambda f: f.pop("embedding/kernel"), "no Vision Transformer"),
        (
            lambda f: [f.pop(n) for n in list(f) if "encoderblock_4/" in n],
            r"missing .*encoderblock_4/LayerNorm_0",
        ),
    ],
)
def test_wrong_names_and_shapes(tmp_path, change, message):
    """CKP-10: all of them are listed, with both shapes."""
    flat = flatten(model())
    change(flat)
    path = checkpoint.save(tmp_path / "x.npz", unflatten(flat))
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(path)


def test_extra_names_may_be_ignored(tmp_path):
    path = checkpoint.save(tmp_path / "x.npz", model() | {"foo": {"bar": np.ones(2, "float32")}})
    with pytest.warns(UserWarning, match=r"ignored: extra foo/bar \[2\]"):
        equal(checkpoint.load(path, extra="warn"), model())


def test_zero_head_is_told(tmp_path):
    """CKP-08 (d): the original ImageNet-21k files know no classes."""
    p = model()
    p["head"] = tree_map(np.zeros_like, p["head"])
    path = checkpoint.save(tmp_path / "x.npz", p)
    with pytest.warns(UserWarning, match="head is all zero"):
        loaded = checkpoint.load(path)
    logits, _ = in_numpy.vit(loaded, np.zeros((1, 8, 8, 2), "float32"))
    np.testing.assert_array_equal(in_numpy.softmax(logits)[0], np.float32(1 / 5))


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (4,)])
def test_group_norms_of_old_files(shape):
    """NRM-10: [1, 1, 1, C] is a vector; anything else is left for the shape check to refuse."""
    squeezed = checkpoint.squeeze("block1/unit1/gn1/scale", np.arange(4.0).reshape(shape))
    np.testing.assert_array_equal(squeezed, np.arange(4.0))
    assert checkpoint.squeeze("gn_root/scale", np.ones((1, 1, 4, 1))).shape == (1, 1, 4, 1)


# --- Peers' files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_official_files(tmp_path, peers, weights, name):
    """The peer's logits through `load`, and the same bits when saved again."""
    f = peers(name)
    path = checkpoint.save(tmp_path / "x.npz", weights(f))
    p = checkpoint.load(path)
    logits, _ = in_numpy.vit(p, f["in/images"])
    np.testing.assert_allclose(logits, f["out/logits"], rtol=0, atol=2e-5)
    again = checkpoint.save(tmp_path / "y.npz", p)
    assert again.read_bytes() == path.read_bytes()


def raw(arrays):
    """The weights in a fixture under the names of its dialect."""
    return {n: a for n, a in arrays.items() if n.startswith("params/")}


def test_big_vision_loop(tmp_path, peers):
    f = peers("bigvision_tok")
    path = tmp_path / "x.npz"
    np.savez(path, **raw(f))
    p, description = checkpoint.inspect(path)
    assert description["dialect"] == "big_vision"
    logits, _ = in_numpy.vit(p, f["in/images"])
    np.testing.assert_allclose(logits, f["out/logits"], rtol=0, atol=2e-5)
    equal(checkpoint.read_arrays(checkpoint.save(path, p, "big_vision"))[0], raw(f))


def test_big_vision_scan_with_attention_pooling(tmp_path, peers):
    """Fixed positions are in no file: `sincos2d` makes them."""
    f = peers("bigvision_map_scan")
    path = tmp_path / "x.npz"
    np.savez(path, **raw(f))
    p = checkpoint.load(path)
    saved = checkpoint.save(path, p, "big_vision-scan")
    equal(checkpoint.read_arrays(saved)[0], raw(f))
    p["Transformer"]["posembed_input"] = {"pos_embedding": in_numpy.sincos2d(3, 4, 24)}
    for twin in ("numpy", "jax"):
        out = {}
        if twin == "numpy":
            in_numpy.vit(p, f["in/images"], out=out)
        else:
            in_jax.vit(tree_map(np.asarray, p), f["in/images"], out=out)
        for ours, theirs in (("encoded", "encoded"), ("pre_logits", "head_input")):
            np.testing.assert_allclose(out[ours], f[f"out/{theirs}"], rtol=0, atol=2e-5)
        np.testing.assert_allclose(out["logits"], f["out/logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dialect", dialects.WRITABLE)
@pytest.mark.parametrize("options", [{}, {"class_token": False}, {"representation": 7}])
def test_round_trips(tmp_path, dialect, options):
    """Written, recognised and read again: every bit, and the logits."""
    p = model(**options)
    path = checkpoint.save(tmp_path / "x", p, dialect)
    loaded, description = checkpoint.inspect(path)
    assert description["dialect"] == dialect.split("-")[0]
    assert description["heads"] == 3
    if dialect.startswith("big_vision") and "cls" in p:
        # Class token and its position are one array there: their sum is kept, to the bit.
        p = unflatten(checkpoint.join_class_position(flatten(p)))
    equal(loaded, p)
    again = checkpoint.save(tmp_path / "y", loaded, dialect)
    assert again.read_bytes() == path.read_bytes()
    images = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 2)).astype("float32")
    np.testing.assert_allclose(
        in_numpy.vit(loaded, images)[0], in_numpy.vit(model(**options), images)[0], atol=2e-5
    )


def torch_model(dialect):
    """A state dict as PyTorch would write it, by explicit loops over the official arrays."""
    if dialect == "dinov2":  # read, not written: a Hugging Face ViT with other layer names
        names = dict(layernorm_before="norm1", layernorm_after="norm2")
        names |= {"intermediate.dense": "mlp.fc1", "layer.10.output.dense": "layer.10.mlp.fc2"}
        state = torch_model("huggingface")
        for old, new in names.items():
            state = {n.replace(old, new): a for n, a in state.items()}
        pattern = r"(encoder\.layer\.\d+)\.output\.dense"
        return {re.sub(pattern, r"\1.mlp.fc2", n): a for n, a in state.items()}
    return dialects.from_official(flatten(model()), dialect)


def write_state(tmp_path, state, **metadata):
    path = tmp_path / "state.safetensors"
    path.write_bytes(safetensors_bytes(state, metadata or None))
    return path


def test_torch_layouts():
    """Names, transposes and the joined projection, written out for one array of each kind."""
    p = model()
    block = p["Transformer"]["encoderblock_10"]
    timm, hf = torch_model("timm"), torch_model("huggingface")
    q = block["MultiHeadDotProductAttention_1"]["query"]
    np.testing.assert_array_equal(
        timm["blocks.10.attn.qkv.weight"][:12], q["kernel"].reshape(12, 12).T
    )
    np.testing.assert_array_equal(timm["blocks.10.attn.qkv.bias"][:12], q["bias"].ravel())
    v = block["MultiHeadDotProductAttention_1"]["value"]["kernel"].reshape(12, 12).T
    np.testing.assert_array_equal(timm["blocks.10.attn.qkv.weight"][24:], v)
    out = block["MultiHeadDotProductAttention_1"]["out"]["kernel"].reshape(12, 12).T
    name = "vit.encoder.layer.10.attention.output.dense.weight"
    np.testing.assert_array_equal(hf[name], out)
    np.testing.assert_array_equal(
        hf["vit.encoder.layer.10.intermediate.dense.weight"],
        block["MlpBlock_3"]["Dense_0"]["kernel"].T,
    )
    np.testing.assert_array_equal(
        timm["patch_embed.proj.weight"][3, 1], p["embedding"]["kernel"][:, :, 1, 3]
    )
    np.testing.assert_array_equal(
        hf["vit.layernorm.weight"], p["Transformer"]["encoder_norm"]["scale"]
    )
    np.testing.assert_array_equal(
        timm["pos_embed"], p["Transformer"]["posembed_input"]["pos_embedding"]
    )


@pytest.mark.parametrize("prefix", ["", "vit.", "deit.", "module.", "model.backbone."])
@pytest.mark.parametrize("dialect", ["timm", "huggingface"])
def test_prefixes_of_wrappers(tmp_path, dialect, prefix):
    """Two channels: no ImageNet pixels are folded into the embedding."""
    state = {n.removeprefix("vit."): a for n, a in torch_model(dialect).items()}
    state = {prefix + n if n[:10] != "classifier" else n: a for n, a in state.items()}
    equal(checkpoint.load(write_state(tmp_path, state), heads=3), model())


def test_names_that_hugging_face_expects():
    """ViTForImageClassification, literally; a body alone has no prefix."""
    names = set(torch_model("huggingface"))
    assert {"vit.embeddings.cls_token", "vit.layernorm.weight", "classifier.bias"} < names
    assert "vit.encoder.layer.10.attention.attention.query.weight" in names
    assert "vit.encoder.layer.10.layernorm_before.bias" in names
    body = {n: a for n, a in flatten(model()).items() if not n.startswith("head")}
    assert "embeddings.position_embeddings" in dialects.from_official(body, "huggingface")


def test_pixels_of_dinov2(tmp_path):
    """Its ImageNet mean and deviation are folded into the embedding: the same features."""
    rng = np.random.default_rng(0)
    kernel, bias = rng.standard_normal((4, 4, 3, 12)), rng.standard_normal(12)
    pixels = rng.integers(0, 256, (2, 8, 8, 3), np.uint8)
    scaled = (pixels / 255 - dialects.IMAGENET_MEAN) / dialects.IMAGENET_STD
    theirs, _ = in_numpy.patch_embedding({"kernel": kernel, "bias": bias}, scaled)
    folded = dict(zip(("kernel", "bias"), dialects.fold_pixels(kernel, bias), strict=True))
    ours, _ = in_numpy.patch_embedding(folded, pixels / 127.5 - 1)
    np.testing.assert_allclose(ours, theirs, atol=1e-12)
    p = model(channels=3)
    state = {
        n.removeprefix("vit."): a
        for n, a in dialects.from_official(flatten(p), "huggingface").items()
    }
    state = {"deit." + n if n[:10] != "classifier" else n: a for n, a in state.items()}
    loaded = checkpoint.load(write_state(tmp_path, state), heads=3)
    expected = dialects.fold_pixels(p["embedding"]["kernel"], p["embedding"]["bias"])
    np.testing.assert_array_equal(loaded["embedding"]["kernel"], expected[0])


def test_layer_scale_of_an_unknown_layer(tmp_path):
    """DINOv2's giant has another MLP: refused by name."""
    state = {n: a for n, a in torch_model("dinov2").items() if ".mlp.fc2." not in n}
    state["encoder.layer.0.layer_scale2.lambda1"] = np.ones(12, "float32")
    with pytest.raises(checkpoint.CheckpointError, match="layer_scale2"):
        checkpoint.load(write_state(tmp_path, state), heads=3)


@pytest.mark.parametrize("dialect", ["official", "timm"])
def test_settings_travel_with_the_file(tmp_path, dialect):
    """What shapes cannot tell, where it is not what the dialect expects; else the file is pure."""
    other = {"gelu_form": "erf" if dialect == "official" else "tanh", "epsilon": 1e-12}
    path = checkpoint.save(tmp_path / "x", model(), dialect, other | {"grid": [1, 4]})
    p, description = checkpoint.inspect(path)
    equal(p, model())
    for name, value in (other | {"grid": [1, 4]}).items():
        assert description[name] == value
    usual = dialects.EXPECTS[dialect]
    plain = checkpoint.save(tmp_path / "y", model(), dialect, usual).read_bytes()
    assert plain == checkpoint.save(tmp_path / "z", model(), dialect).read_bytes()
    assert checkpoint.main(["convert", str(path), str(tmp_path / "c"), "--to", "big_vision"]) == 0
    assert checkpoint.inspect(tmp_path / "c")[1]["grid"] == [1, 4]
    assert checkpoint.inspect(tmp_path / "c")[1]["gelu_form"] == other["gelu_form"]


def test_settings_that_are_none(tmp_path):
    """Anything else than names and values under that entry is damage too."""
    path = tmp_path / "x.npz"
    path.write_bytes(
        archive(tmp_path, **flatten(model()), **{checkpoint.SETTINGS: np.array("[1]")})
    )
    with pytest.raises(checkpoint.CheckpointError, match=r"x\.npz"):
        checkpoint.load(path)


@pytest.mark.parametrize("dialect", ["flax", "dinov2"])
def test_dialects_that_are_not_written(tmp_path, dialect):
    with pytest.raises(ValueError, match=f"cannot write '{dialect}'.*big_vision-scan"):
        checkpoint.save(tmp_path / "x", model(), dialect)
    assert not list(tmp_path.iterdir())


def test_hybrids(tmp_path, peers, weights):
    """NRM-10: norms stored as [1, 1, 1, C] load; other shapes are refused by name."""
    p = weights(peers("hybrid_64x48"))
    path = checkpoint.save(tmp_path / "x.npz", p)
    loaded, description = checkpoint.inspect(path)
    assert flatten(loaded)["gn_root/scale"].shape == (32,)
    assert (description["stem"], description["stem_width"]) == ((2, 1), 32)
    with pytest.raises(ValueError, match="timm has no equivalent of block1"):
        checkpoint.save(tmp_path / "y", loaded, "timm")
    flat = flatten(p)
    for wrong in ((1, 1, 32, 1), (16,)):
        broken = flat | {"gn_root/scale": np.zeros(wrong, "float32")}
        checkpoint.save(tmp_path / "z.npz", unflatten(broken))
        with pytest.raises(
            checkpoint.CheckpointError, match=r"gn_root/scale has shape .*, not \[32\]"
        ):
            checkpoint.load(tmp_path / "z.npz")
    del flat["block1/unit2/conv2/kernel"]
    checkpoint.save(tmp_path / "z.npz", unflatten(flat))
    with pytest.raises(checkpoint.CheckpointError, match="missing block1/unit2/conv2/kernel"):
        checkpoint.load(tmp_path / "z.npz")


def test_bit(tmp_path, peers, weights):
    """BiT's own names, numbered layers and norms of four axes included; round trip to the byte."""
    p = weights(peers("bit_64x64"))
    path = checkpoint.save(tmp_path / "x.npz", p)
    loaded, description = checkpoint.inspect(path)
    assert (description["dialect"], description["units"], description["width"]) == (
        "bit",
        (1, 2),
        32,
    )
    assert (description["classes"], description["channels"]) == (7, 3)
    assert checkpoint.save(tmp_path / "y.npz", loaded).read_bytes() == path.read_bytes()
    old = {}
    for i, (name, array) in enumerate(flatten(p).items()):
        name = name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/")
        old[name] = array[None, None, None] if name.endswith(("gamma", "beta")) else array
    checkpoint.save(tmp_path / "z.npz", unflatten(old))
    for name, array in flatten(checkpoint.load(tmp_path / "z.npz")).items():
        np.testing.assert_array_equal(array, flatten(p)[name])
    with pytest.raises(ValueError, match="a ResNet has names of its own, not those of timm"):
        checkpoint.save(tmp_path / "t", loaded, "timm")
    flat = flatten(p)
    del flat["resnet/group_norm/beta"]
    checkpoint.save(tmp_path / "w.npz", unflatten(flat))
    with pytest.raises(checkpoint.CheckpointError, match="missing resnet/group_norm/beta"):
        checkpoint.load(tmp_path / "w.npz")


def test_links_and_permissions(tmp_path):
    """A link stays a link, and a private file stays private."""
    path = checkpoint.save(tmp_path / "x.npz", model())
    path.chmod(0o600)
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    checkpoint.save(link, model())
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError, match="the folder of"):
        checkpoint.save(tmp_path / "absent" / "x.npz", model())


@pytest.mark.parametrize("dialect", ["timm", "dinov2"])
def test_layer_scale_is_folded(tmp_path, dialect):
    """y * gamma is a dense layer with scaled columns: exact up to one rounding."""
    state = {n.removeprefix("vit."): a for n, a in torch_model(dialect).items()}
    rng = np.random.default_rng(1)
    plain, scaled = model(), model()
    for i in range(11):
        for part, layer in enumerate(("out", "Dense_1")):
            gamma = rng.standard_normal(12).astype("float32")
            name = {
                "timm": f"blocks.{i}.ls{part + 1}.gamma",
                "dinov2": f"encoder.layer.{i}.layer_scale{part + 1}.lambda1",
            }[dialect]
            state[name] = gamma
            block = scaled["Transformer"][f"encoderblock_{i}"]
            dense = block[dialects.ATTENTION if layer == "out" else "MlpBlock_3"][layer]
            dense["kernel"] *= gamma
            dense["bias"] *= gamma
    equal(checkpoint.load(write_state(tmp_path, state), heads=3), scaled)
    assert (flatten(scaled)["head/bias"] == flatten(plain)["head/bias"]).all()


@pytest.mark.parametrize("dialect", ["timm", "dinov2"])
def test_registers_become_prefix_tokens(tmp_path, dialect):
    """Four registers after the class token; they have no positions."""
    state = {n.removeprefix("vit."): a for n, a in torch_model(dialect).items()}
    registers = np.random.default_rng(1).standard_normal((1, 4, 12)).astype("float32")
    if dialect == "timm":  # whose models with registers have no position for the class token
        state["reg_token"] = registers
        state["pos_embed"] = state["pos_embed"][:, 1:]
    else:
        state["embeddings.register_tokens"] = registers
    p = checkpoint.load(write_state(tmp_path, state), heads=3)
    table = p["Transformer"]["posembed_input"]["pos_embedding"]
    assert table.shape == (1, 9, 12)
    np.testing.assert_array_equal(p["cls"][:, 1:], registers)
    np.testing.assert_array_equal(table[:, 1:5], 0)
    images = np.zeros((1, 8, 8, 2), "float32")
    out = {}
    in_numpy.vit(p, images, out=out)
    assert out["tokens"].shape == (1, 9, 12)
    old = model()["Transformer"]["posembed_input"]["pos_embedding"]
    lead = 0 if dialect == "timm" else old[:, 0]
    np.testing.assert_array_equal(out["tokens"][:, 0], model()["cls"][:, 0] + lead)
    with pytest.raises(ValueError, match="register tokens"):
        checkpoint.save(tmp_path / "y", p, "timm")


def test_no_position_for_the_class_token(tmp_path):
    """DeiT 3 of timm: the table has the grid's rows alone."""
    state = torch_model("timm")
    state["pos_embed"] = state["pos_embed"][:, 1:]
    p = checkpoint.load(write_state(tmp_path, state), heads=3)
    table = p["Transformer"]["posembed_input"]["pos_embedding"]
    assert table.shape == (1, 5, 12)
    np.testing.assert_array_equal(table[:, 0], 0)
    np.testing.assert_array_equal(table[:, 1:], state["pos_embed"])


def test_heads_of_a_state_dict(tmp_path):
    """By the variant, by the metadata, by the argument; otherwise an error that asks."""
    sizes = {(1280, 32): 16, (64, 4): 4, (1408, 40): 16, (1664, 48): 16, (1152, 27): 16}
    for (width, blocks), heads in sizes.items():
        assert dialects.known_heads(width, blocks) == heads
    with pytest.raises(ValueError, match="2 blocks of width 128: say how many"):
        dialects.known_heads(128, 2)
    path = write_state(tmp_path, torch_model("timm"))
    with pytest.raises(checkpoint.CheckpointError, match="width 12: say how many heads"):
        checkpoint.load(path)
    with pytest.raises(checkpoint.CheckpointError, match="5 heads do not divide width 12"):
        checkpoint.load(path, heads=5)
    equal(checkpoint.load(write_state(tmp_path, torch_model("timm"), heads="3")), model())


@pytest.mark.parametrize(
    "name", ["norm_pre.weight", "fc_norm.weight", "blocks.0.attn.q_norm.weight"]
)
def test_what_an_official_vit_has_not(tmp_path, name):
    """Refused by name, not ignored."""
    state = torch_model("timm") | {name: np.ones(12, "float32")}
    with pytest.raises(checkpoint.CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.load(write_state(tmp_path, state), heads=3)


def test_written_files_load_in_timm(tmp_path):
    """timm's own reader of official files, tanh GELU: equal logits."""
    timm = pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    from timm.models.vision_transformer import VisionTransformer

    assert timm
    variant = variants.Variant("x", 8, 24, 48, 3, 2)
    p = params.initialise(variant, 0, image_size=16, classes=5)
    rng = np.random.default_rng(0)
    p = tree_map(lambda leaf: rng.normal(scale=0.3, size=leaf.shape).astype("float32"), p)
    theirs = VisionTransformer(
        img_size=16,
        patch_size=8,
        num_classes=5,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=2,
        act_layer="gelu_tanh",
    )
    images = rng.uniform(-1, 1, (3, 16, 16, 3)).astype("float32")
    theirs.load_pretrained(str(checkpoint.save(tmp_path / "x.npz", p)))
    with torch.no_grad():
        peer = theirs.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(in_numpy.vit(p, images)[0], peer, rtol=0, atol=1e-4)


# --- Command line -----------------------------------------------------------------------------


def test_show_convert_diff(tmp_path, capsys):
    first = str(checkpoint.save(tmp_path / "a.npz", model()))
    second, third = str(tmp_path / "b.safetensors"), str(tmp_path / "c.npz")
    assert checkpoint.main(["show", first]) == 0
    shown = capsys.readouterr().out
    assert "Transformer/encoderblock_10/LayerNorm_2/scale" in shown
    assert "heads           3" in shown
    assert "gelu_form       tanh" in shown
    assert checkpoint.main(["convert", first, second, "--to", "huggingface"]) == 0
    assert checkpoint.main(["convert", second, third, "--to", "big_vision"]) == 0
    assert checkpoint.main(["diff", first, third]) == 0
    assert "the same weights" in capsys.readouterr().out
    other = model()
    other["head"]["bias"][2] += 1
    assert checkpoint.main(["diff", first, str(checkpoint.save(tmp_path / "d", other))]) == 1
    assert "head/bias: differs by up to 1" in capsys.readouterr().out


def test_command_line_errors(tmp_path, capsys):
    """One line, no traceback; an existing file is not overwritten."""
    good = str(checkpoint.save(tmp_path / "a.npz", model()))
    keep = tmp_path / "keep.npz"
    keep.write_bytes(b"mine")
    for command in (
        ["show", str(tmp_path / "absent.npz")],
        ["show", str(tmp_path)],
        ["convert", good, str(keep), "--to", "timm"],
        ["diff", good, str(keep)],
    ):
        assert checkpoint.main(command) == 2
        captured = capsys.readouterr().err
        assert captured.startswith("minivit.checkpoint: error: ")
        assert captured.count("\n") == 1
    assert keep.read_bytes() == b"mine"


def test_files_are_plain(tmp_path):
    """Anybody can read them: a zip of .npy, and JSON with raw bytes."""
    path = checkpoint.save(tmp_path / "x.npz", model())
    assert "cls.npy" in zipfile.ZipFile(path).namelist()
    content = checkpoint.save(tmp_path / "x.safetensors", model(), "timm").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["cls_token"]["shape"] == [1, 1, 12]
