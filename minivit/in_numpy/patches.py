"""Images to patches and back, and the linear embedding of patches (eq. 1)."""

import numpy as np

from ..interpolation import resize_weights
from ..shapes import check_images, grid_of, pair, patch_grid
from .half import wide
from .mlp import dense


def patchify(images, patch):  # [B, height, width, C] -> [B, height/P, width/P, P*P*C]
    """Cut images into non-overlapping P x P patches, flattened row by row, channel last.

    `patch` is P or a pair (rows, columns).
    """
    rows, columns = pair(patch)
    batch, height, width, channels = images.shape
    h, w = patch_grid(height, width, patch)
    patches = images.reshape(batch, h, rows, w, columns, channels).swapaxes(2, 3)
    return patches.reshape(batch, h, w, rows * columns * channels)


def unpatchify(patches, patch):  # [B, h, w, P*P*C] -> [B, h*P, w*P, C]
    """The inverse of `patchify`; being a permutation, also its backward pass.

    Patches in a row, [B, N, P*P*C], are taken for a square grid.
    """
    (rows, columns), (h, w) = pair(patch), grid_of(patches.shape)
    grid = patches.reshape(len(patches), h, w, rows, columns, -1)
    return grid.swapaxes(2, 3).reshape(len(patches), h * rows, w * columns, -1)


def patch_embedding(p, images):  # [B, height, width, C] -> [B, height/P, width/P, D]
    """Project every patch to D numbers: a convolution whose stride is its kernel size."""
    check_images(images, p["kernel"].shape)
    y, back_dense = dense(p, patchify(images, p["kernel"].shape[:2]))

    def back(dy):
        dp, dpatches = back_dense(dy)
        return dp, unpatchify(dpatches, p["kernel"].shape[:2])

    return y, back


def resize_kernel(kernel, patch):  # [P, Q, C, D] -> [P', Q', C, D]
    """A patch kernel for another patch size (FlexiViT, arXiv 2212.08013, eq. 4).

    The embedding of a patch enlarged by half-pixel bilinear resizing stays what it was. That is
    the pseudo-inverse of the resizing, which is separable, so rows and columns go one by one.
    """
    sizes = zip(kernel.shape[:2], pair(patch), strict=True)
    forth = [np.array(resize_weights(old, new, "bilinear")) for old, new in sizes]
    rows, columns = (np.linalg.pinv(matrix.T) for matrix in forth)
    new = np.einsum("ri,cj,ijkd->rckd", rows, columns, wide(kernel), optimize=True)
    return new.astype(kernel.dtype)
