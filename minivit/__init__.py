"""minivit: the Vision Transformer, readable in NumPy and fast in JAX.

An Image is Worth 16x16 Words (Dosovitskiy et al., 2020, arXiv 2010.11929), every piece twice:

    in_numpy/     the reference to read: forward, and backward derived by hand
    in_jax/       the same pieces under the same names, to jit and run
    shapes        what must fit together, with errors that say what to do
    variants      model sizes by name, their parameters and operations
    params        fresh parameters; trees of arrays under the official names
    optim         AdamW, schedules, clipping: once for both kinds of array
    checkpoint    save and load
    datasets      images, labels, and the order of training
    engine_numpy  a training step on all cores, by threads
    engine_jax    a training step on all devices, by a mesh
    train         python -m minivit.train --tiny
    evaluate      loss and accuracy
    figures       pictures

Letters: B batch, N tokens, D width, H heads, K head width (D = H K), M MLP width, P patch side,
C channels, L blocks. Images are [B, height, width, C]; uint8 pixels become x / 127.5 - 1.
"""
