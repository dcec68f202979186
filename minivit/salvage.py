"""A picture file without what stands beside its pixels, for when that is damaged."""

END_OF_PNG = b"\0\0\0\0IEND\xaeB`\x82"
# Ends of a file that lacks its own: if all give the same pixels, no pixel was lost with it.
TAILS = (b"\xff\xd9", 64 * b"\x5a\xa5" + b"\xff\xd9")


def bare(content):  # bytes of a file -> bytes of the pixels alone, bytes of its EXIF; or None
    """A PNG, JPEG or WebP with nothing that its pixels do not need: no text, profile, preview."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return png(content)
    if content.startswith(b"\xff\xd8"):
        return jpeg(content)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return webp(content)
    return None


def png(content):
    """A chunk is a length, four letters, the data and a checksum of four bytes."""
    kept, exif, at = [content[:8]], b"", 8
    while at + 8 <= len(content):
        kind, end = content[at + 4 : at + 8], at + 12 + int.from_bytes(content[at : at + 4])
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT"):
            kept.append(content[at:end])
        elif kind == b"eXIf":
            exif = content[at + 8 : end - 4]
        at = end
    return b"".join([*kept, END_OF_PNG]), exif


def jpeg(content):
    """A segment is 0xFF, a marker, a length that counts itself, and the data.

    What follows the first start of a scan (0xDA) is kept as it is.
    """
    kept, exif, at = [content[:2]], b"", 2
    while 0 <= (at := content.find(b"\xff", at)) < len(content) - 4:
        marker = content[at + 1]
        if marker in (0, 1, 0xFF) or 0xD0 <= marker <= 0xD8:  # no length: padding, restarts
            at += 1
            continue
        end = at + 2 + int.from_bytes(content[at + 2 : at + 4])
        if marker == 0xDA:
            return b"".join([*kept, content[at:]]), exif
        data = content[at + 4 : end]
        if marker == 0xE1 and data.startswith(b"Exif"):
            exif = data
        # Of what applications add, Adobe's says how colours are meant.
        whole_adobe = marker == 0xEE and len(data) >= 12
        if whole_adobe or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            kept.append(content[at:end])
        at = max(end, at + 2)
    return None


def webp(content):
    """A chunk is four letters, a length (little-endian), and the data, filled to even length."""
    kept, exif, at = [], b"", 12
    while at + 8 <= len(content):
        kind, length = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
        end = at + 8 + length + length % 2
        if kind == b"EXIF":
            exif = content[at + 8 : end]
        elif kind in (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF"):
            kept.append(content[at:end])
        at = end
    body = b"WEBP" + b"".join(kept)
    return b"RIFF" + len(body).to_bytes(4, "little") + body, exif
