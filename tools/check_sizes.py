#!/usr/bin/env python3
"""Checks that files and functions stay short enough to be read in one go.

  files      at most 500 lines
  functions  at most 60 lines, from the line of the name and its return type to the closing brace;
             at most 150 in CUDA files and for __global__ and __device__ functions

Tests have the limit of files only. Longer ones need a line in tools/size_exceptions.txt, and a line
there that is no longer needed is an error too.

The parser only follows braces. What it approximates:
  - of an #if with #else only the first branch is read, so that braces balance;
  - a lambda, a local class or a nested block counts for the function around it; a lambda that
    initializes a variable outside functions counts as a function of that variable's name;
  - the name of a function is the identifier before its last parameter-like parentheses; a
    specialization keeps no template arguments, and overloads share one name (and one exception);
  - a macro that hides a brace is not expanded.

Exit status: 0 if all is well, 1 after printing what is too long. `--list N` prints the N longest.
"""

import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
TOPS = {"include", "src", "apps", "bench", "eval", "examples", "tests"}
SUFFIXES = {".h", ".hpp", ".inc", ".cc", ".cpp", ".cu", ".cuh"}
CUDA_SUFFIXES = {".cu", ".cuh"}

LITERAL = re.compile(
    r"""
      //[^\n]*(?:\\\n[^\n]*)*                       # comment to the end of the line
    | /\*.*?\*/                                     # comment
    | (?:u8|[uUL])?R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"   # raw string
    | "(?:\\.|[^"\\\n])*"                           # string
    | (?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:\\.|[^'\\\n])*'   # character, not a digit separator
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclasses.dataclass
class Function:
    """A function body found in a file."""

    path: str
    name: str
    line: int
    n_lines: int
    limit: int

    def key(self):
        return f"{self.path}:{self.name}"


def blank(text):
    """The same text with everything but line ends as spaces."""
    return re.sub(r"[^\n]", " ", text)


def drop_preprocessor(text):
    """Blanks directives, and all branches of an #if but the first."""
    out = []
    skipping = []  # one entry per open #if: are we in a later branch?
    continued = False
    for line in text.splitlines(keepends=True):
        stripped = line.lstrip()
        if continued or stripped.startswith("#"):
            if not continued:
                directive = stripped[1:].lstrip()
                if directive.startswith("if"):
                    skipping.append(False)
                elif directive.startswith(("else", "elif")) and skipping:
                    skipping[-1] = True
                elif directive.startswith("endif") and skipping:
                    skipping.pop()
            continued = line.rstrip("\n").endswith("\\")
            out.append(blank(line))
        else:
            out.append(blank(line) if any(skipping) else line)
    return "".join(out)


def code_only(text):
    """Source text without comments, contents of literals and directives; lines stay in place."""

    def replace(match):
        piece = match.group(0)
        if piece.startswith("/"):
            return blank(piece)
        return '"' + blank(piece[1:-1]) + '"' if len(piece) > 1 else piece

    return drop_preprocessor(LITERAL.sub(replace, text))


DECORATION = re.compile(
    r"\b(?:alignas|decltype|noexcept|explicit|requires|__attribute__|__launch_bounds__|__declspec"
    r"|throw)\s*(?=\()"
)


def strip_balanced(text, start, opening, closing):
    """Removes the balanced group that opens at start."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == opening:
            depth += 1
        elif text[i] == closing:
            depth -= 1
            if depth == 0:
                return text[:start] + " " + text[i + 1 :]
    return text[:start]


def template_end(text):
    """Where the template<...> lists at the start of the text end; 0 if there is none."""
    end = 0
    while match := re.match(r"\s*template\s*<", text[end:]):
        angles, parens = 1, 0
        i = end + match.end()
        while i < len(text) and angles:
            parens += (text[i] == "(") - (text[i] == ")")
            if parens == 0 and text[i - 1 : i + 1] != "->":
                angles += (text[i] == "<") - (text[i] == ">")
            i += 1
        end = i
    return end


def simplify(head):
    """A declaration head without attributes, template lists and access labels."""
    head = re.sub(r"\boperator\s*\(\s*\)", "operator_call", head)
    head = re.sub(r"\boperator\s*(\[\]|[-+*/%^&|~!=<>,]+)", "operator_symbol", head)
    head = re.sub(r"\[\[.*?\]\]", " ", head, flags=re.DOTALL)
    head = re.sub(r"\b(public|private|protected)\s*:(?!:)", " ", head)
    head = head[template_end(head) :]
    while match := DECORATION.search(head):
        head = strip_balanced(head[: match.start()] + head[match.end() :], match.start(), "(", ")")
    while (stripped := re.sub(r"<[^<>;{}]*>", " ", head)) != head:
        head = stripped
    return head.strip()


def depth_zero(text):
    """The text with everything inside parentheses and square brackets blanked."""
    out, depth = [], 0
    for c in text:
        if c in ")]":
            depth -= 1
        out.append(c if depth == 0 else " ")
        if c in "([":
            depth += 1
    return "".join(out)


def function_name(head):
    """The name of the function whose simplified head this is, or None."""
    flat = depth_zero(head)
    flat = re.split(r"(?<!:):(?!:)|->", flat)[0]  # member initializers, trailing return type
    names = re.findall(r"((?:[A-Za-z_]\w*\s*::\s*)*~?[A-Za-z_]\w*)\s*\(", flat)
    plain = [name for name in names if not re.fullmatch(r"[A-Z][A-Z0-9_]+", name)] or names
    return re.sub(r"\s", "", plain[-1]) if plain else None


def classify(head):
    """What an opening brace after this head begins: (kind, name).

    Kinds: "scope" (namespace or class), "function", "other" (initializer, requires expression).
    """
    simple = simplify(head)
    flat = depth_zero(simple)
    if re.search(r"\bnamespace\b", flat) or re.fullmatch(r'extern\s*"\s*"', simple):
        return "scope", None
    if re.search(r"\brequires\s*$", simple) or re.search(r"\bconcept\b", flat):
        return "other", None
    if re.search(r"(?<![=!<>])=(?!=)", flat):
        lambda_head = re.search(r"(\w+)\s*(?:\[[^\]]*\])?\s*=\s*\[[^\]]*\]", simple)
        is_lambda = lambda_head and re.search(r"(\)|\]|mutable|->[^)]*)\s*$", simple)
        return ("function", lambda_head.group(1)) if is_lambda else ("other", None)
    if re.search(r"\b(class|struct|union|enum)\b[^()]*$", flat):
        return "scope", None
    initializers = re.search(r"\)[^:]*(?<!:):(?!:)", flat)
    if initializers and re.search(r"[\w>]\s*$", head.rstrip()) and not re.search(
        r"\b(try|const|noexcept|override|final)\s*$", head
    ):
        return "other", None  # member{...} among the member initializers
    name = function_name(simple)
    return ("function", name) if name not in (None, "catch") else ("other", None)


def functions_in(path, text):
    """All functions of a file."""
    code = code_only(text)
    found = []
    stack = []  # (kind, name, first line, head at that point) of each open brace
    head_start = 0
    line = 1
    parens = 0  # open parentheses of the current head
    inside = 0  # open functions and initializers: there, braces are only counted
    for i, c in enumerate(code):
        if c == "\n":
            line += 1
        elif c == "{":
            kind, name = ("other", None) if inside or parens else classify(code[head_start:i])
            stack.append((kind, name, head_start, parens))
            if kind == "scope":
                head_start = i + 1
            else:
                inside += 1
        elif c == "}" and stack:
            kind, name, start, parens = stack.pop()
            if kind != "scope":
                inside -= 1
            if kind == "function":
                found.append(measure(path, code, name, start, line))
            if kind != "other" and not inside:
                head_start = i + 1
        elif not inside:
            if c == "(":
                parens += 1
            elif c == ")":
                parens = max(0, parens - 1)
            elif c == ";" and parens == 0:
                head_start = i + 1
    return found


def measure(path, code, name, start, last_line):
    """A Function whose head starts at or after the given offset, template lists not counted."""
    lead = re.match(r"(?:\s|\b(?:public|private|protected)\s*:(?!:))*", code[start:]).end()
    lead += template_end(code[start + lead :])
    lead += re.match(r"\s*", code[start + lead :]).end()
    first_line = code.count("\n", 0, start + lead) + 1
    signature = code[start : code.index("{", start + lead)]
    is_kernel = pathlib.PurePosixPath(path).suffix in CUDA_SUFFIXES or re.search(
        r"__(global|device)__", signature
    )
    limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
    return Function(path, name, first_line, last_line - first_line + 1, limit)


def read_exceptions(path):
    """{key: line number} of the exceptions, and complaints about lines without a reason."""
    exceptions, complaints = {}, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split(maxsplit=1)
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) < 2:
            complaints.append(f"{path.name}:{number}: {fields[0]} has no reason")
        exceptions[fields[0]] = number
    return exceptions, complaints


def project_files(root):
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
    listing = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    paths = (pathlib.PurePosixPath(name) for name in sorted(set(listing.split("\0"))) if name)
    return [str(p) for p in paths
            if p.parts[0] in TOPS and p.suffix in SUFFIXES and (root / p).is_file()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", type=int, metavar="N", help="print the N longest functions")
    arguments = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    exceptions, complaints = read_exceptions(root / "tools" / "size_exceptions.txt")
    used = set()

    def check(key, place, n_lines, limit):
        if n_lines <= limit:
            return
        if key in exceptions:
            used.add(key)
        else:
            complaints.append(f"{place}: {n_lines} lines, the limit is {limit}")

    functions = []
    files = project_files(root)
    for path in files:
        text = (root / path).read_text(encoding="utf-8")
        check(path, path, len(text.splitlines()), MAX_FILE_LINES)
        functions += functions_in(path, text)
    for f in functions:
        if not f.path.startswith("tests/"):
            check(f.key(), f"{f.path}:{f.line}: {f.name}", f.n_lines, f.limit)
    for key in sorted(set(exceptions) - used):
        complaints.append(f"size_exceptions.txt:{exceptions[key]}: {key} needs none any more")

    if arguments.list:
        for f in sorted(functions, key=lambda f: -f.n_lines)[: arguments.list]:
            print(f"{f.n_lines:5} {f.path}:{f.line}: {f.name}")
    for complaint in complaints:
        print(complaint)
    print(f"sizes: {len(files)} files, {len(functions)} functions, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
