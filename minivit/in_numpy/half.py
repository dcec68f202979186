"""Half precision: float16 overflows above 65504, and sums in either type lose small terms."""


def wide(x):
    """The same numbers, float16 and bfloat16 as float64: no square and no sum of them overflows."""
    return x.astype("float64") if x.dtype.itemsize == 2 else x


def narrow(y, dtype):
    """A result in the type that its input had."""
    return y.astype(dtype, copy=False)


def total(x, axes, **options):
    """Sum along some axes, in the type of x but added up in `wide`."""
    return narrow(wide(x).sum(axes, **options), x.dtype)
