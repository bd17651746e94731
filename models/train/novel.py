"""The held-out novel from Debian's package r-cran-janeaustenr, read without R."""
import os, re, struct, subprocess, tempfile, zlib
from prepare_corpus import HELD_OUT_NOVEL, normalise, unwrap

PACKAGE = "r-cran-janeaustenr"
RDB = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
STRSXP, CHARSXP = 16, 9             # R's types: vector of strings, string
NA = 0xffffffff                     # the length of a missing string


def objects(rdb):
    """The serialized objects of an R lazy-load data base: each a length and a zlib stream."""
    at = 0
    while at < len(rdb):
        stream = zlib.decompressobj()
        yield stream.decompress(rdb[at + 4:])
        at = len(rdb) - len(stream.unused_data)


def strings(raw):
    """The lines of an object that is one vector of strings, in R's big-endian serialization."""
    if raw[:2] != b"X\n":
        raise ValueError("not an object in R's binary serialization")
    at = 2

    def word():
        nonlocal at
        at += 4
        return struct.unpack(">I", raw[at - 4:at])[0]
    version = word()
    at += 8                         # the versions of R that wrote it and that can read it
    if version >= 3:
        n = word()                  # native encoding
        at += n
    if word() & 255 != STRSXP:
        raise ValueError("not a vector of strings")
    lines = []
    for _ in range(word()):
        if word() & 255 != CHARSXP:
            raise ValueError("not a vector of strings")
        n = word()
        n = 0 if n == NA else n
        lines.append(raw[at:at + n].decode("utf-8", "replace"))
        at += n
    return lines


def held_out(rdb):
    """The novel as chapters of plain text, prepared as prepare_corpus.py does."""
    for raw in objects(rdb):
        lines = strings(raw)
        if lines[0].lower() == HELD_OUT_NOVEL:
            text = unwrap("\n".join(lines))
            parts = [normalise(part) for part in re.split(r"\n\n(?=CHAPTER|Chapter)", text)]
            return [part for part in parts if len(part) >= 400]     # without title pages
    raise ValueError(f"the package has no novel {HELD_OUT_NOVEL}")


def download():
    """Chapters of the held-out novel; the package is fetched with apt-get into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        got = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True)
        if got.returncode:
            raise SystemExit(f"apt-get download {PACKAGE} failed: {got.stderr.strip()}\n"
                             "give a text file with --haystack FILE instead")
        deb = next(f for f in os.listdir(folder) if f.endswith(".deb"))
        subprocess.run(["dpkg-deb", "-x", deb, "."], cwd=folder, check=True)
        with open(os.path.join(folder, RDB), "rb") as f:
            return held_out(f.read())
