#!/usr/bin/env python3
"""Translates CUDA kernels to C++ that is compiled against emulator.h.

usage: translate.py SOURCES OUTPUT FOLDER...

Of every FOLDER in SOURCES, NAME.cu becomes OUTPUT/FOLDER/NAME.cc and NAME.cuh OUTPUT/FOLDER/NAME.cuh, with the
same lines, so that errors and debuggers point into the original. Only what is no C++ changes: launches,
instructions in `asm`, the declaration of dynamic shared memory, and unrolling. An instruction that is not
known here is an error: add it to INSTRUCTIONS, and what it does to emulator.h.

Files that have not changed are left alone.
"""
import argparse
import re
import sys
from pathlib import Path

HERE = "fathom::emulation"


class TranslationError(Exception):
    """Says where and what could not be translated."""


def closing(text, start):
    """Where the parenthesis that opens at `start` closes; parentheses in strings do not count."""
    depth = 0
    in_string = False
    i = start
    while i < len(text):
        c = text[i]
        if in_string:
            if c == "\\":
                i += 1
            elif c == '"':
                in_string = False
        elif c == '"':
            in_string = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise TranslationError("a parenthesis is not closed")


def split_arguments(text):
    """The parts between commas outside parentheses and template arguments."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [*parts, part.strip()]


def same_lines(old, new):
    """The new text, with the line ends that it lacks."""
    return new + "\n" * (old.count("\n") - new.count("\n"))


def call(function, *operands):
    return f"{HERE}::{function}({', '.join(operands)});"


def pack(operands):
    return "{" + ", ".join(operands) + "}"


def addresses(operands):
    return pack([f"&({operand})" for operand in operands])


def load_matrices(transposed):
    return lambda o: call("LoadMatrices", transposed, addresses(o[:4]), o[4])


def mma_bytes(a_signed):
    return lambda o: call("MmaBytes", a_signed, addresses(o[:4]), pack(o[4:8]), pack(o[8:10]), pack(o[10:14]))


# What an instruction is known by, and the statement that replaces it, made of its operands.
INSTRUCTIONS = [
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.u8\.s8\.s32 ", mma_bytes("false")),
    (r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32 ", mma_bytes("true")),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32 ",
     lambda o: call("MmaHalves", addresses(o[:4]), pack(o[4:8]), pack(o[8:10]), pack(o[:4]))),
    (r"ld\.global[.:\w]*\.v4\.u32 ", lambda o: call("LoadVector", addresses(o[:4]), o[4])),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 ", load_matrices("false")),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 ", load_matrices("true")),
    (r"cp\.async\.cg\.shared\.global(\.L2::\d+B)? \[%0\], \[%1\], 16(, %2)?;", lambda o: call("CopyAsync", *o)),
    (r"cp\.async\.(commit_group|wait_group %0);", lambda o: ";"),  # copies are done already
    (r"ex2\.approx\.ftz\.f32 ", lambda o: f"{o[0]} = std::exp2({o[1]});"),
    (r"$", lambda o: ";"),  # hides a value from the optimizer
    (r"max\.NaN\.f32 ", lambda o: f"{o[0]} = {HERE}::MaxOrNan({o[1]}, {o[2]});"),
]


def translate_asm(text):
    """`asm` statements become calls of the emulator."""
    while match := re.search(r"\basm\b(\s+volatile)?\s*\(", text):
        start = match.end() - 1
        end = closing(text, start)
        body = text[start + 1 : end]
        strings = re.match(r'(?:\s*"(?:\\.|[^"\\])*")*', body).group()
        template = "".join(re.findall(r'"((?:\\.|[^"\\])*)"', strings))
        operands = []
        for constraint in re.finditer(r'"[=+]?[a-z]"\s*\(', body):
            at = constraint.end() - 1
            operands.append(" ".join(body[at + 1 : closing(body, at)].split()))
        for pattern, replacement in INSTRUCTIONS:
            if re.match(pattern, template):
                break
        else:
            line = text.count("\n", 0, match.start()) + 1
            raise TranslationError(f"line {line}: no emulation of asm '{template}'; add it to INSTRUCTIONS")
        if not text[end + 1 :].startswith(";"):
            raise TranslationError("an asm statement does not end in ';'")
        text = text[: match.start()] + same_lines(text[match.start() : end + 2], replacement(operands)) + text[end + 2 :]
    return text


def kernel_start(text, end):
    """Where the name of the kernel that ends at `end`, with its template arguments, starts."""
    at = end
    if text[at - 1] == ">":
        depth = 0
        while True:
            at -= 1
            depth += (text[at] == ">") - (text[at] == "<")
            if depth == 0:
                break
    while re.match(r"[\w:]", text[at - 1]):
        at -= 1
    return at


def translate_launches(text):
    """kernel<<<grid, threads, bytes, stream>>>(arguments) becomes a call of Launch."""
    while (at := text.find("<<<")) >= 0:
        start_of_call = text.index(">>>", at) + 3
        configuration = split_arguments(text[at + 3 : start_of_call - 3])
        if len(configuration) != 4 or text[start_of_call] != "(":
            line = text.count("\n", 0, at) + 1
            raise TranslationError(f"line {line}: a launch needs grid, threads, bytes and stream")
        grid, threads, shared, stream = configuration
        end = closing(text, start_of_call) + 1
        name_end = len(text[:at].rstrip())
        name_start = kernel_start(text, name_end)
        name = text[name_start:name_end]
        launch = (f"{HERE}::Launch({HERE}::AddressOf({name}), dim3({grid}), {threads}, {shared}, {stream}, "
                  f"[=] {{ {name}{text[start_of_call:end]}; }})")
        text = text[:name_start] + same_lines(text[name_start:end], launch) + text[end:]
    return text


def translate(path):
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"extern __shared__ (__align__\(\d+\) )?unsigned char (\w+)\[\];",
                  rf"unsigned char* \2 = {HERE}::DynamicShared();", text)
    if "extern __shared__" in text:
        raise TranslationError("dynamic shared memory must be an array of unsigned char")
    text = re.sub(r"#pragma unroll[^\n]*", "", text)
    text = translate_launches(translate_asm(text))
    guard = "#pragma once\n" if path.suffix == ".cuh" else ""
    return f'// Made by translate.py.\n{guard}#include "cuda_emulation/emulator.h"\n#line 1 "{path}"\n{text}'


def write_if_changed(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, metavar="SOURCES")
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    arguments = parser.parse_args()
    sources = arguments.sources.resolve()
    paths = [path for folder in arguments.folders for path in sorted((sources / folder).iterdir())
             if path.suffix in {".cu", ".cuh"}]
    for path in paths:
        try:
            text = translate(path)
        except TranslationError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        name = path.relative_to(sources)
        write_if_changed(arguments.output / (name.with_suffix(".cc") if path.suffix == ".cu" else name), text)
    print(f"translate.py: {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
