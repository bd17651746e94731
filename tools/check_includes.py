#!/usr/bin/env python3
"""Checks that every #include respects the layering of the code.

Files of the project include each other in one of three forms:
  "fathom/x.h"      a public header, found under include/
  "module/file.h"   a header of a module, found under src/
  "file.h"          a file beside the including one, or relative to its application's folder;
                    in apps, bench, eval, examples and tests only
Everything else (the standard library, ggml, CUDA, ...) is written with angle brackets and is not
judged here, except in public headers, which may use the standard library only.

Exit status: 0 if all is well, 1 after printing the offending lines.
"""

import pathlib
import re
import subprocess
import sys

# Who may include whom, next to itself and "fathom/*.h". A module is a folder of src/ and its
# subfolders, less those subfolders that are modules of their own: "backend" is only what lies
# directly in src/backend. A value that ends in .h allows that one header; a key that is a file
# allows this file alone more than its module.
ALLOWED = {
    "base": [],
    "memory": ["base"],
    "capture": ["base", "memory"],
    "archive": ["base", "memory"],
    "stats": ["base", "memory"],
    "store": ["base", "memory", "stats"],
    "plan": ["base", "stats", "store/layout.h"],
    "backend": ["base", "memory", "store/layout.h"],
    "backend/registry.cc": ["backend/ref", "backend/cpu", "backend/cuda"],  # the list of backends
    "backend/ref": ["base", "memory", "store/layout.h", "backend"],
    "backend/cpu": ["base", "memory", "store/layout.h", "backend"],
    "backend/cuda": ["base", "memory", "store/layout.h", "backend"],
    "method": ["base", "memory", "stats", "store", "plan", "backend"],
    "eval": ["base", "memory", "stats", "store", "plan", "backend", "method", "capture"],
    "model": ["base", "memory", "backend/cuda"],
    "device": ["base", "memory", "stats", "store", "plan", "backend", "backend/cuda", "method", "eval", "model"],
    "engine": ["base", "memory", "archive", "capture", "stats", "store", "plan", "backend", "method", "model",
               "device/session_decode.h"],
}
# Top folders beside src/: programs see include/fathom and their own folder, tests see everything.
PROGRAMS = ["apps", "bench", "eval", "examples"]
TESTS = "tests"

SUFFIXES = {".h", ".hpp", ".inc", ".cc", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Headers of C that a header readable by C needs; those of C++ have no suffix.
C_HEADERS = {"stdbool.h", "stddef.h", "stdint.h"}


def project_files(root):
    """Source files that git knows or would know, as paths relative to the root."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    listing = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    tops = {"include", "src", TESTS, *PROGRAMS}
    paths = (pathlib.PurePosixPath(name) for name in sorted(set(listing.split("\0"))) if name)
    return [p for p in paths
            if p.parts[0] in tops and p.suffix in SUFFIXES and (root / p).is_file()]


def module_of(path_in_src):
    """The module that owns a path relative to src/, or None: the longest matching folder."""
    folder = pathlib.PurePosixPath(path_in_src).parent
    for candidate in [folder, *folder.parents]:
        if str(candidate) in ALLOWED:
            return str(candidate)
    return None


def judge_module(root, path, target):
    """Why a file of src/ may not include the target, or None."""
    me = module_of(path.relative_to("src"))
    if me is None:
        return f"{path.parent} belongs to no module of the table in tools/check_includes.py"
    owner = module_of(target)
    if owner is not None and not (root / "src" / target).is_file():
        return f'there is no "{target}" in src'
    if owner is None:
        return (f'"{target}" is neither "fathom/..." nor "module/file.h"; '
                "headers of other projects go in angle brackets")
    may = ALLOWED[me] + ALLOWED.get(str(path.relative_to("src")), [])
    if owner == me or owner in may or target in may:
        return None
    allowed = ", ".join(may) or "nothing"
    return f"{me} -> {owner} is not allowed ({me} may include: {allowed})"


def judge_program(root, path, target):
    """Why a file of apps/, bench/, eval/ or examples/ may not include the target, or None."""
    own = pathlib.PurePosixPath(*path.parts[:2]) if len(path.parts) > 2 else path.parent
    for base in (path.parent, own, pathlib.PurePosixPath(path.parts[0]), pathlib.PurePosixPath()):
        found = (root / base / target).resolve()
        if found.is_file():
            if found.is_relative_to((root / own).resolve()):
                return None
            return f'"{target}" is outside {own}; programs use include/fathom and their own folder'
    if (root / "src" / target).is_file():
        return f"{own} -> {module_of(target)} is not allowed; programs use include/fathom only"
    return f'"{target}" is not found; headers of other projects go in angle brackets'


def judge(root, path, bracket, target):
    """Why this #include is wrong, or None."""
    first = pathlib.PurePosixPath(target).parts[0]
    if first == "fathom":
        return None if bracket == '"' else f"<{target}> is ours: write it in quotes"
    if path.parts[0] == TESTS:
        return None
    if bracket == "<":
        if (root / "src" / target).is_file():
            return f"<{target}> is ours: write it in quotes"
        if path.parts[0] == "include" and "." in target and target not in C_HEADERS:
            return f"<{target}>: public headers use the standard library only"
        return None
    if path.parts[0] == "include":
        return f'"{target}": public headers include only "fathom/*.h"'
    if path.parts[0] == "src":
        return judge_module(root, path, target)
    return judge_program(root, path, target)


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    n_files = n_edges = n_bad = 0
    for path in project_files(root):
        n_files += 1
        text = (root / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            match = INCLUDE.match(line)
            if not match:
                continue
            n_edges += 1
            if reason := judge(root, path, *match.groups()):
                n_bad += 1
                print(f"{path}:{number}: {reason}")
    print(f"includes: {n_files} files, {n_edges} includes, {n_bad} against the layering")
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main())
