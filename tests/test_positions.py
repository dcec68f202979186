"""Position resizing (cases POS-01 to POS-15), and kernels for another patch size."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivit import in_jax, in_numpy
from minivit.interpolation import METHODS, resize_weights

TWINS = pytest.mark.parametrize("twin", ["numpy", "jax"])
SIDE = st.integers(1, 9)
METHOD = st.sampled_from(sorted(METHODS))


def resize(twin, table, grid, **options):
    if twin == "numpy":
        return in_numpy.resize(table, grid, **options)[0]
    return np.asarray(in_jax.resize(table, grid, **options))


def grid_of(function, rows, columns):
    """A table [1, rows*columns, 1] of a function of row and column."""
    r, c = np.mgrid[:rows, :columns].astype(float)
    return (function(r, c) + 0 * r).reshape(1, -1, 1)


def random_table(rows, columns, depth=3):
    return np.random.default_rng(rows * 31 + columns).standard_normal((1, rows * columns, depth))


@TWINS
def test_rows_are_rows(twin):
    """POS-01, on a grid that is not square, where swapped axes show."""
    table = np.concatenate([grid_of(lambda r, c: r, 2, 3), grid_of(lambda r, c: c, 2, 3)], axis=2)
    for method, along in (("corners", [0, 0.5, 1, 1.5, 2]), ("bilinear", [0, 0.4, 1, 1.6, 2])):
        options = {"old_grid": (2, 3), "prefix": 0, "method": method}
        new = resize(twin, table, (3, 5), **options).reshape(3, 5, 2)
        np.testing.assert_allclose(new[..., 0], np.array([[0, 0.5, 1]]).T + np.zeros(5), atol=1e-6)
        np.testing.assert_allclose(new[..., 1], np.zeros((3, 1)) + along, atol=1e-6)


@TWINS
@pytest.mark.parametrize(
    ("new", "method", "antialias", "values"),
    [
        (8, "corners", False, [k * 3 / 7 for k in range(8)]),
        (8, "bilinear", False, [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]),
        (2, "corners", False, [0, 3]),
        (2, "bilinear", True, [0.714286, 2.285714]),
        (2, "bilinear", False, [0.5, 2.5]),
        (1, "corners", False, [0]),
    ],
)
def test_one_row(twin, new, method, antialias, values):
    """POS-02, POS-08, POS-12: which linear rule; the ends are exact."""
    options = {"old_grid": (1, 4), "prefix": 0, "method": method, "antialias": antialias}
    result = resize(twin, np.arange(4.0).reshape(1, 4, 1), (1, new), **options).ravel()
    np.testing.assert_allclose(result, values, atol=1e-6)
    if method == "corners":
        assert result[0] == 0
        assert result[-1] == values[-1]


@TWINS
def test_prefix_is_copied(twin):
    """POS-03: the class token has no place in the grid."""
    table = np.ones((1, 10, 1), "float32")
    table[0, 0] = 1000
    new = resize(twin, table, (5, 5))
    assert new.shape == (1, 26, 1)
    assert new.dtype == np.float32
    assert new[0, 0] == 1000
    assert (new[0, 1:] == 1).all()
    assert (resize(twin, table[:, 1:], (5, 5), prefix=0) == 1).all()
    three = np.concatenate([table[:, :1]] * 3 + [table[:, 1:]], axis=1)
    assert resize(twin, three, (5, 5), prefix=3)[0, :, 0].tolist() == 3 * [1000] + 25 * [1]


@TWINS
def test_rectangular_source(twin):
    """POS-06: told, or an error that names the count; never a truncated root."""
    table = random_table(2, 3)
    new = resize(twin, table, (4, 6), old_grid=(2, 3), prefix=0).reshape(4, 6, 3)
    old = table.reshape(2, 3, 3)
    np.testing.assert_allclose(new[::3, ::5], old[::1, ::2], rtol=1e-6)
    with pytest.raises(ValueError, match=r"6 rows.*6 positions.*say which grid"):
        resize(twin, table, (4, 6), prefix=0)
    with pytest.raises(ValueError, match="grid 2x2 does not hold 6 positions"):
        resize(twin, table, (4, 6), prefix=0, old_grid=(2, 2))
    with pytest.raises(ValueError, match=r"'lanczos'.*corners"):
        resize(twin, table, (4, 6), prefix=0, old_grid=(2, 3), method="lanczos")
    with pytest.raises(ValueError, match="3 points to 0"):
        resize(twin, table, (4, 0), prefix=0, old_grid=(2, 3))


@pytest.mark.parametrize(
    ("old", "new"),
    [(14, n) for n in (61, 115, 122)] + [(37, n) for n in (39, 43, 78, 86, 115, 123)] + [(88, 120)],
)
def test_size_is_the_one_asked_for(old, new):
    """POS-07: floor(old * (new / old)) would be one short."""
    assert len(resize_weights(old, new)) == new


@TWINS
def test_same_grid_same_bits(twin):
    """POS-09: the table itself."""
    table = random_table(3, 3).astype("float32")
    np.testing.assert_array_equal(resize(twin, table, (3, 3), prefix=0), table)


@given(SIDE, SIDE, SIDE, SIDE, METHOD, st.booleans())
def test_constants_stay(h, w, rows, columns, method, antialias):
    """The weights of every method sum to one."""
    options = {"old_grid": (h, w), "prefix": 0, "method": method, "antialias": antialias}
    new = resize("numpy", np.full((1, h * w, 1), 0.7), (rows, columns), **options)
    np.testing.assert_allclose(new, 0.7, rtol=1e-14)


@given(SIDE, SIDE, st.integers(2, 9), st.integers(2, 9))
def test_corners_keeps_ramps_and_corners(h, w, rows, columns):
    """Linear functions are exact, and the four corners stay what they were."""
    table = grid_of(lambda r, c: 2 * r / max(h - 1, 1) - 3 * c / max(w - 1, 1), h, w)
    new = resize("numpy", table, (rows, columns), old_grid=(h, w), prefix=0)
    ramp = grid_of(
        lambda r, c: 2 * (h > 1) * r / (rows - 1) - 3 * (w > 1) * c / (columns - 1), rows, columns
    )
    np.testing.assert_allclose(new, ramp, atol=1e-14)
    old, new = random_table(h, w).reshape(h, w, 3), None
    new = resize("numpy", old.reshape(1, -1, 3), (rows, columns), old_grid=(h, w), prefix=0)
    new = new.reshape(rows, columns, 3)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        np.testing.assert_array_equal(new[corner], old[corner])


@given(SIDE, SIDE, SIDE, SIDE, METHOD, st.booleans())
def test_separable_linear_transposable(h, w, rows, columns, method, antialias):
    """Rows then columns is the same as both; sums and turned grids pass through."""
    options = {"prefix": 0, "method": method, "antialias": antialias}
    a, b = random_table(h, w), random_table(h, w)[:, ::-1]
    whole = resize("numpy", a, (rows, columns), old_grid=(h, w), **options)
    half = resize("numpy", a, (rows, w), old_grid=(h, w), **options)
    steps = resize("numpy", half, (rows, columns), old_grid=(rows, w), **options)
    np.testing.assert_allclose(steps, whole, atol=1e-13)
    both = resize("numpy", 2 * a - b, (rows, columns), old_grid=(h, w), **options)
    other = resize("numpy", b, (rows, columns), old_grid=(h, w), **options)
    np.testing.assert_allclose(both, 2 * whole - other, atol=1e-13)
    turned = a.reshape(h, w, 3).swapaxes(0, 1).reshape(1, -1, 3)
    turned = resize("numpy", turned, (columns, rows), old_grid=(w, h), **options)
    turned = turned.reshape(columns, rows, 3).swapaxes(0, 1).reshape(1, -1, 3)
    np.testing.assert_allclose(turned, whole, atol=1e-13)


@given(SIDE, SIDE, SIDE, SIDE, st.sampled_from(["corners", "bilinear"]), st.booleans())
def test_linear_methods_are_bounded(h, w, rows, columns, method, antialias):
    table = random_table(h, w)
    options = {"old_grid": (h, w), "prefix": 0, "method": method, "antialias": antialias}
    new = resize("numpy", table, (rows, columns), **options)
    assert new.max() <= table.max() + 1e-14
    assert new.min() >= table.min() - 1e-14


@given(st.integers(2, 6), st.integers(1, 4))
def test_there_and_back(m, factor):
    """Identity when (n - 1) is a multiple of (m - 1): every old point is a new one."""
    n = factor * (m - 1) + 1
    table = random_table(m, m)
    new = resize("numpy", table, (n, n), prefix=0)
    np.testing.assert_allclose(resize("numpy", new, (m, m), prefix=0), table, atol=1e-13)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("sizes", [((3, 5), (6, 4)), ((4, 4), (2, 9)), ((1, 3), (4, 1))])
def test_twins_and_gradient(method, antialias, sizes):
    """Both twins in float64, and the gradient is the transposed matrix."""
    old, new = sizes
    table = random_table(*old)
    options = {"old_grid": old, "prefix": 0, "method": method, "antialias": antialias}
    y, back = in_numpy.resize(table, new, **options)
    dy = np.random.default_rng(0).standard_normal(y.shape)
    with jax.enable_x64(True):
        theirs, vjp = jax.vjp(lambda t: in_jax.resize(t, new, **options), table)
        np.testing.assert_allclose(y, theirs, atol=1e-13)
        np.testing.assert_allclose(back(dy), vjp(dy)[0], atol=1e-13)


def cases(f, mode):
    """Every resized table of a mode in a fixture: input, output, old and new grid, prefix."""
    for name in f:
        pattern = rf"(out\w*)/{mode}/(\d+)x(\d+)_to_(\d+)x(\d+)_prefix(\d)"
        if match := re.fullmatch(pattern, name):
            h, w, rows, columns, prefix = map(int, match.groups()[1:])
            table = f[f"in/{h}x{w}_prefix{prefix}"]
            yield name, table, f[name], {"old_grid": (h, w), "prefix": prefix}, (rows, columns)


@TWINS
@pytest.mark.parametrize(
    ("file", "mode", "method", "antialias"),
    [
        ("posembed_vitjax", "align_corners", "corners", False),
        ("posembed_torch", "torch_bilinear_align_corners", "corners", False),
        ("posembed_torch", "torch_bilinear", "bilinear", False),
        ("posembed_torch", "torch_bilinear_antialias", "bilinear", True),
        ("posembed_torch", "torch_bicubic", "bicubic-torch", False),
        ("posembed_torch", "torch_bicubic_antialias", "bicubic-torch", True),
        ("posembed_torch", "timm_bicubic_antialias", "bicubic-torch", True),
        ("posembed_torch", "timm_bicubic", "bicubic-torch", False),
        ("posembed_torch", "timm_bilinear", "bilinear", False),
        ("posembed_jax", "jax_linear", "bilinear", False),
        ("posembed_jax", "jax_linear_antialias", "bilinear", True),
        ("posembed_jax", "jax_cubic", "bicubic", False),
        ("posembed_jax", "jax_cubic_antialias", "bicubic", True),
        ("posembed_jax", "jax_cubic_pytorch", "bicubic-torch", False),
        ("posembed_jax", "jax_cubic_pytorch_antialias", "bicubic-torch", True),
    ],
)
def test_peers(peers, twin, file, mode, method, antialias):
    """1e-5: the peers are float32, measured within 3.4e-6 of float64; out64 within 1e-12."""
    found = list(cases(peers(file), mode))
    assert len(found) >= 5
    for name, table, expected, options, grid in found:
        exact = name.startswith("out64") and twin == "numpy"
        table = table.astype("float64") if exact else table
        new = resize(twin, table, grid, method=method, antialias=antialias, **options)
        tolerance = 1e-12 if exact else 1e-5
        np.testing.assert_allclose(new, expected, rtol=0, atol=tolerance, err_msg=name)


def test_vit_jax_where_scipy_writes_no_zeros(peers):
    """The official function itself, except in the cases of SciPy's zero border."""
    f = peers("posembed_vitjax")
    trapped = 0
    for name, table, expected, options, grid in cases(f, "vit_jax"):
        new = resize("numpy", table, grid, **options)
        if f[name.replace("vit_jax", "zero_border_trap")]:
            trapped += 1
            wrong = np.abs(new - expected) > 1e-5
            assert (expected[wrong] == 0).all()
            assert wrong.any()
        else:
            np.testing.assert_allclose(new, expected, rtol=0, atol=1e-5, err_msg=name)
    assert trapped == 2


@TWINS
def test_patch_kernels_are_flexivit(peers, twin):
    """Against a pseudo-inverse in float64, big_vision and timm (measured 2.2e-6)."""
    f = peers("patch_kernel_flexi")
    run = in_numpy.resize_kernel if twin == "numpy" else in_jax.resize_kernel
    checked = 0
    for name, expected in f.items():
        match = re.fullmatch(r"(out\w*)/(pinv|big_vision|timm_bilinear)/(\w+)_to_(\d+)x(\d+)", name)
        if match:
            new = run(f[f"in/{match[3]}"], (int(match[4]), int(match[5])))
            np.testing.assert_allclose(new, expected, rtol=0, atol=1e-5, err_msg=name)
            checked += 1
    assert checked == 11


def test_larger_patches_embed_the_same():
    """What the resized kernel is for: an enlarged patch keeps its embedding."""
    rng = np.random.default_rng(0)
    kernel, image = rng.standard_normal((4, 4, 1, 6)), rng.standard_normal((4, 4))
    up = np.array(resize_weights(4, 8, "bilinear"))
    larger = in_numpy.resize_kernel(kernel, 8)
    enlarged = up @ image @ up.T
    np.testing.assert_allclose(
        np.einsum("ij,ijcd->d", enlarged, larger),
        np.einsum("ij,ijcd->d", image, kernel),
        rtol=1e-12,
    )


@TWINS
def test_sincos2d_is_big_vision(peers, twin):
    f = peers("bigvision_map_scan")
    run = in_numpy.sincos2d if twin == "numpy" else in_jax.sincos2d
    np.testing.assert_allclose(run(3, 4, 24), f["out/sincos2d_3x4"], atol=1e-6)
    with pytest.raises(ValueError, match="multiple of 4, not 6"):
        run(2, 2, 6)
