"""The kind of a file that minivit cannot read, and what to do instead."""

import contextlib
import os
import re
import stat
from collections import Counter

OWN = "minivit/"  # so begin the names of minivit's own notes in an archive
MOST_NAMES = 10  # of a list in a message

# First bytes of common files, and what follows "FILE is ".
KINDS = {
    b"\x93NUMPY": "a single .npy array",
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"GGUF": "a GGUF file of a language model",
    b"RIFF": "a picture or a sound",
    b"%PDF": "a PDF",
    b"\x08": "an ONNX file, it seems",
}
PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
KINDS |= dict.fromkeys(PICTURES, "a picture")
PACKERS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
PACKERS |= {b"7z\xbc\xaf": "7-Zip", b"Rar!": "RAR"}
KINDS |= {sign: f"compressed by {name}; unpack it first" for sign, name in PACKERS.items()}
PICKLE = "a pickle, which can run code and is never read; ask PyTorch for .safetensors"
KINDS |= {bytes([0x80, protocol]): PICKLE for protocol in (2, 3, 4, 5)}
READ = "a checkpoint is an .npz or a .safetensors file"
# Parts of names that tell other models.
MODELS = {
    r"relative_position_bias_table|layers\.\d+\.blocks\.\d+": "a Swin Transformer or a relative",
    r"text_model\.|visual_projection|visual\.transformer\.": "CLIP or a relative",
    r"word_embeddings|embed_tokens|wte\.": "a language model",
    r"encoder_layer_\d+\.self_attention": "torchvision's ViT",
    r"(^|\.)layer1\.0\.conv1\.": "a ResNet of PyTorch",
    r"stages\.\d+\.": "a convolutional network with stages",
    r"rope_embed|mlp\.up_proj": "DINOv3 or a relative, which has no table of positions",
    r"decoder_": "an autoencoder",
}


class Foreign(ValueError):
    """What follows a file's name: "is a picture; …"."""


def listed(names, between=", "):  # -> text
    """Some of many names, and how many more there are."""
    names = list(names)
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return between.join([*map(str, names[:MOST_NAMES]), *more])


def check_file(path):
    """Refuse a folder, a device, and one part of several; what `open` cannot find is its error."""
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise Foreign(f"is a folder; {inside(path)}")
        if not stat.S_ISREG(mode):
            raise Foreign(f"is no file on a disk; {READ}")
    part = re.search(r"-(\d+)-of-(\d+)\.\w+$", str(path))
    if part and int(part[2]) > 1:
        raise Foreign(
            f"is part {int(part[1])} of {int(part[2])}; save the model as one file "
            '(in transformers, `save_pretrained(folder, max_shard_size="100GB")`)'
        )


def inside(folder):  # -> text
    """Which file of a folder was meant."""
    files = sorted(os.listdir(folder))
    likely = [n for n in ("checkpoint.npz", "model.safetensors") if n in files]
    likely += [n for n in files if n.endswith((".npz", ".safetensors")) and "state-" not in n]
    if likely:
        return f"do you mean {os.path.join(folder, likely[0])}?"
    if "run.json" in files:
        return f"its run has not ended; `train --resume {folder}` goes on"
    return READ


def kind_of(start):  # first bytes of a file -> what follows its name
    """Which kind of file begins so."""
    if not start:
        return f"is empty; {READ}"
    if start[257:262] == b"ustar":
        return f"is a tar archive; unpack it first; {READ}"
    if is_text(start):
        return f"is {text_kind(start.lstrip().lower())}; {READ}"
    known = next((text for sign, text in KINDS.items() if start.startswith(sign)), None)
    return f"is {known or 'neither an .npz nor a .safetensors file'}; {READ}"


def is_text(start):
    """Letters in UTF-8, as far as these bytes go, and no control characters."""
    text = start.decode("utf-8", "ignore")
    return len(text.encode()) >= len(start) - 3 and not re.search(r"[\0-\x08\x0e-\x1a]", text)


def text_kind(start):
    """Which text it is."""
    if start.startswith(b"<"):
        return "a web page, not the file behind it"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer to the weights; run `git lfs pull`"
    if b"/annex/objects/" in start or start.startswith(b"# xet"):
        return "a pointer to the weights; download the file itself"
    if start.startswith(b"{") and (b"weight_map" in start or b"total_size" in start):
        return "the index of a model in several parts; save it as one file"
    if start.startswith(b"{"):
        return "JSON, perhaps a configuration"
    return "text"


def check_members(names):
    """Refuse a zip that holds anything but arrays, or two of one name."""
    if any(name.endswith("data.pkl") for name in names):
        raise Foreign("is a PyTorch pickle, which can run code and is never read; use .safetensors")
    inner = [name for name in names if name.endswith((".npz", ".safetensors"))]
    if inner:
        raise Foreign(f"is a zip that holds {listed(inner)}; unpack it first")
    if not names or not any(name.endswith(".npy") for name in names):
        raise Foreign(f"is a zip without arrays (in it: {listed(names) or 'nothing'}); {READ}")
    if strange := [name for name in names if not name.endswith(".npy")]:
        raise Foreign(f"holds {listed(strange)}, no arrays; {READ}")
    if twice := [name.removesuffix(".npy") for name, n in Counter(names).items() if n > 1]:
        raise Foreign(f"holds more than one array of the name {listed(twice)}")


def check_numbers(name, kind):
    """Refuse arrays of anything but plain numbers, by name; minivit's own notes are text."""
    what = {"O": "Python objects, which would be unpickled", "U": "text", "S": "bytes"}
    what |= {"c": "complex numbers", "M": "dates", "m": "times"}
    if kind.names or kind.subdtype:
        raise Foreign(f"holds {name}, an array of records, not of numbers")
    if name.startswith(OWN) and kind.kind == "U":
        return
    if kind.kind not in "biuf" and kind.name != "bfloat16":
        raise Foreign(f"holds {name}, an array of {what.get(kind.kind, kind)}, not of numbers")


def model_of(names):  # -> text
    """Whose names these are, of a model that minivit does not read."""
    names = sorted(names)
    text = "\n".join(names)
    known = next((m for sign, m in MODELS.items() if re.search(sign, text, re.M)), None)
    says = f"the names are those of {known}, " if known else "the names are of "
    return f"{says}no Vision Transformer that minivit knows: {listed(names[:3])}, …"
