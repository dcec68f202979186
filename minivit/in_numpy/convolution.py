"""Convolution, its standardised kernel, and pooling: the pieces of a ResNet."""

import numpy as np

from ..shapes import check_channels, padded
from .half import narrow, wide


def pad(x, pads, value=0):  # [B, height, width, C] -> with a border
    """A border of (before, after) rows and columns."""
    return np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=value) if np.any(pads) else x


def unpad(x, pads, height, width):
    """The inverse of `pad`, and of the gradient that reaches the border: it is dropped."""
    return x[:, pads[0][0] : pads[0][0] + height, pads[1][0] : pads[1][0] + width]


def windows(x, size, stride):  # [B, height, width, C] -> [B, h, w, rows, columns, C], a view
    """What lies under a kernel at each of its places."""
    view = np.lib.stride_tricks.sliding_window_view(x, size, axis=(1, 2))
    return view[:, ::stride, ::stride].transpose(0, 1, 2, 4, 5, 3)


def add_windows(dwindows, shape, stride):  # [B, h, w, rows, columns, C] -> [B, height, width, C]
    """The gradient of `windows`: every pixel collects from all places that saw it."""
    dx = np.zeros(shape, dwindows.dtype)
    h, w, rows, columns = dwindows.shape[1:5]
    for i in range(rows):
        for j in range(columns):
            places = slice(i, i + stride * h, stride), slice(j, j + stride * w, stride)
            dx[:, *places] += dwindows[:, :, :, i, j]
    return dx


def conv2d(p, x, *, stride=1, padding="SAME"):  # [B, height, width, C] -> [B, h, w, F]
    """Slide the kernel [rows, columns, C, F] over the image: one product with all windows.

    "SAME" puts the odd pixel of padding after, as JAX and TensorFlow do; a number pads all sides.
    """
    kernel = p["kernel"]
    check_channels(x.shape, kernel.shape)
    rows, columns, channels, filters = kernel.shape
    pads = padded(x.shape, (rows, columns), stride, padding)
    inside = pad(x, pads)
    seen = windows(inside, (rows, columns), stride)
    flat = seen.reshape(-1, rows * columns * channels)
    matrix = kernel.reshape(-1, filters)
    y = (flat @ matrix).reshape(*seen.shape[:3], filters)

    def back(dy):  # keeps the windows, rows * columns / stride^2 times as large as the image
        dflat = dy.reshape(-1, filters)
        dkernel = (flat.T @ dflat).reshape(kernel.shape)
        dseen = (dflat @ matrix.T).reshape(seen.shape)
        dx = add_windows(dseen, inside.shape, stride)
        return {"kernel": dkernel}, unpad(dx, pads, *x.shape[1:3])

    return y, back


def standardise_kernel(kernel, form="official"):  # [rows, columns, C, F], the same
    """Mean 0 and deviation 1 for each filter (arXiv 1903.10520).

    "official" divides by deviation + 1e-5, as vit_jax's hybrid does, "bit" by
    sqrt(variance + 1e-10).
    """
    dtype, kernel = kernel.dtype, wide(kernel)
    centred = kernel - kernel.mean((0, 1, 2))
    variance = (centred * centred).mean((0, 1, 2))
    deviation = np.sqrt(variance)
    divisor = deviation + 1e-5 if form == "official" else np.sqrt(variance + 1e-10)
    normal = centred / divisor

    def back(dnormal):
        # What the divisor changes with the deviation is 1, or deviation / divisor.
        slope = 1 / np.where(deviation > 0, deviation, 1) if form == "official" else 1 / divisor
        stretch = (dnormal * normal).mean((0, 1, 2)) * slope
        dcentred = dnormal / divisor - stretch * centred / divisor
        return narrow(dcentred - dcentred.mean((0, 1, 2)), dtype)

    return narrow(normal, dtype), back


def std_conv(p, x, *, form="official", **options):  # [B, height, width, C] -> [B, h, w, F]
    """A convolution whose kernel is standardised first."""
    kernel, back_kernel = standardise_kernel(p["kernel"], form)
    y, back_conv = conv2d({"kernel": kernel}, x, **options)

    def back(dy):
        dp, dx = back_conv(dy)
        return {"kernel": back_kernel(dp["kernel"])}, dx

    return y, back


def max_pool(x, *, size=3, stride=2, padding="SAME"):  # [B, height, width, C] -> [B, h, w, C]
    """The largest of each window. "SAME" pads with -inf, which never wins; a number with zeros.

    Of equals the first one wins, and gets the gradient.
    """
    pads = padded(x.shape, (size, size), stride, padding)
    inside = pad(x, pads, -np.inf if padding == "SAME" else 0)
    seen = windows(inside, (size, size), stride)
    flat = seen.reshape(*seen.shape[:3], size * size, -1)
    best = flat.argmax(3)[..., None, :]

    def back(dy):
        dflat = np.zeros_like(flat)
        np.put_along_axis(dflat, best, dy[..., None, :], axis=3)
        dx = add_windows(dflat.reshape(seen.shape), inside.shape, stride)
        return unpad(dx, pads, *x.shape[1:3])

    return np.take_along_axis(flat, best, axis=3)[..., 0, :], back
