"""What shapes must fit together, for both twins; plain Python, and errors that name a remedy."""


def pair(patch):  # P or (P, Q) -> (P, Q)
    """A patch size as rows and columns."""
    return (patch, patch) if isinstance(patch, int) else tuple(patch)


def patch_grid(height, width, patch):  # -> rows, columns of patches
    """How many patches an image holds; the official model's convolution would drop a remainder."""
    rows, columns = pair(patch)
    if height % rows or width % columns or 0 in (height, width):
        raise ValueError(
            f"image {height}x{width} is not divisible by patch {rows}x{columns}; resize it to "
            f"{max(1, round(height / rows)) * rows}x{max(1, round(width / columns)) * columns}"
        )
    return height // rows, width // columns


def check_images(images, kernel):
    """Images [B, height, width, C] that a patch kernel [P, Q, C, D] can cut and embed."""
    if len(images) != 4:
        raise ValueError(f"images must be [B, height, width, C], got shape {images}")
    if images[3] != kernel[2]:
        raise ValueError(
            f"images have {images[3]} channels, the embedding expects {kernel[2]}; "
            "convert the images or initialise a model for them"
        )
    patch_grid(images[1], images[2], kernel[:2])


def check_positions(table, tokens):
    """A position table [1, N, D] for tokens [B, N, D]."""
    if table[1:] != tokens[1:]:
        raise ValueError(
            f"{tokens[1]} tokens of width {tokens[2]} meet a position table for {table[1]} of "
            f"width {table[2]}; use the image size that the model was made for, or resize the table"
        )


def check_rate(rate):
    """A share of entries to drop."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout rate {rate} must be at least 0 and below 1")


def check_gelu(form):
    """The two forms of GELU in use."""
    if form not in ("tanh", "erf"):
        raise ValueError(f"unknown GELU form {form!r}; choose 'tanh' or 'erf'")


def depth(encoder):  # parameters of an encoder -> L
    """How many blocks an encoder has, by their names."""
    return sum(name.startswith("encoderblock_") for name in encoder)
