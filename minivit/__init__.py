"""minivit: the Vision Transformer, readable in NumPy and fast in JAX.

An Image is Worth 16x16 Words (Dosovitskiy et al., 2020, arXiv 2010.11929), every piece twice:

    in_numpy/     the reference to read: forward, and backward derived by hand
    in_jax/       the same pieces under the same names, to jit and run
    shapes        what must fit together, with errors that say what to do
    interpolation the weights of resizing a grid
    variants      model sizes by name, their parameters and operations
    architecture  what parameters are of, by their names and shapes
    params        fresh parameters; trees of arrays under the official names
    optim         AdamW, SGD, schedules, clipping, averaging: once for both kinds of array
    opening       how every command reads a checkpoint
    checkpoint    save, load, inspect, convert; python -m minivit.checkpoint
    archives      arrays in files, read in two steps, written whole or not at all
    foreign       what a file is that cannot be read, and what to do
    dialects      how timm, Hugging Face and big_vision name the same weights
    datasets      images, labels, and the order of training
    folders       the user's own pictures as a data set
    synthetic     a colour data set that is drawn, not downloaded
    augmentation  flips, crops, shifts, mixup, by (seed, epoch, index)
    masking       what masked patch prediction corrupts and asks for
    batches       from the number of a step to its arrays
    images        picture files to arrays
    salvage       a picture without what is damaged beside its pixels
    progress      a sign of life for what takes longer
    machine       what the machine offers
    engines       which twin computes
    engine_numpy  a training step on all cores, by threads
    engine_jax    a training step on all devices, by a mesh
    layouts       how parameters lie on a mesh: on every device, or divided
    processes     what JAX runs on: all cores, several processes as one program
    recipes       the paper's, as data; python -m minivit.recipes
    options       the command line of train
    command       a user's mistake is one line, in every command
    states        what a run needs to go on after an interruption
    loop          training itself: steps, rows, states, validations, pictures
    train         python -m minivit.train --tiny
    finetune      a trained model made ready for other classes and sizes
    predict       python -m minivit.predict IMAGE --checkpoint FILE
    evaluate      accuracy, few-shot; python -m minivit.evaluate --checkpoint FILE
    figures       pictures; python -m minivit.figures --checkpoint FILE
    attention_maps what attention looks at: rollout, distance, likeness of positions
    checks        the exercises of the course check themselves
    bench         how fast, beside others; python -m minivit.bench
    contestants   what bench times, each in a process of its own
    peers         other implementations for bench, where they are installed

Letters: B batch, N tokens, D width, H heads, K head width (D = H K), M MLP width, P patch side,
C channels, L blocks, R width of pre_logits. Images are [B, height, width, C]; uint8 pixels become
x / 127.5 - 1.
"""
