"""One translation unit per kernel: the config block, then its ``.cu`` with includes expanded."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Mapping
from pathlib import Path

from .errors import CompileError, InvalidInputError

PACKAGE = Path(__file__).resolve().parent

_DEFINE_NAME = re.compile(r"DC_[A-Z][A-Z0-9_]*")
_DIRECTIVE = re.compile(r"\s*#\s*(include\w*|import|if\w*|endif|pragma\s+once)\b(.*)")
# Comments and raw strings are blanked before directives are looked for; plain strings and
# characters are matched too, so that a quote or a "//" inside them opens nothing.
_TOKEN = re.compile(
    r'''(?P<blank>//(?:\\\n|[^\n])*|/\*.*?\*/|R"(?P<delim>[^()\\\s]{0,16})\(.*?\)(?P=delim)")'''
    r'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])\'''', re.DOTALL)


def cuda_root() -> Path:
    """Folder of the CUDA sources: inside an installed package, beside it in a checkout."""
    for folder in (PACKAGE / "cuda_src", PACKAGE.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise CompileError(f"the CUDA sources are missing: neither {PACKAGE / 'cuda_src'} nor "
                       f"{PACKAGE.parent / 'cuda_src'} exists; install dashcupy again")


def kernel_names(root: Path | None = None) -> list[str]:
    """Every kernel, by the stem of its ``.cu``."""
    return sorted(path.stem for path in (root or cuda_root()).glob("*.cu"))


def expand(kernel: str, defines: Mapping[str, int | str], root: Path | None = None) -> str:
    """Write one kernel as a single string that needs no include path.

    Parameters
    ----------
    kernel
        Stem of a ``.cu`` in ``cuda_src``.
    defines
        The config block: names that start with ``DC_``; integers and booleans become numbers,
        strings become C string literals (give them without quotes).
    root
        Another folder than ``cuda_src``.

    Returns
    -------
    str
        The config block, then the source with every included file once, at its first
        ``#include``. ``#line`` keeps the name (relative to ``root``) and line of every error.

    Raises
    ------
    CompileError
        Unknown kernel, or an include that is missing, outside ``root``, spelled otherwise than
        ``"file"`` or ``DC_NAME``, or inside a conditional.
    InvalidInputError
        A define with a bad name or value.
    """
    root = (root or cuda_root()).resolve()
    path = root / f"{kernel}.cu"
    if not path.is_file():
        raise CompileError(f"there is no kernel {kernel!r} in {root} "
                           f"(known: {', '.join(kernel_names(root)) or 'none'})")
    lines = ['#line 1 "config"', *config_block(defines)]
    _expand_file(path, root, defines, set(), lines)
    return "\n".join(lines) + "\n"


def config_block(defines: Mapping[str, int | str]) -> list[str]:
    """``#define`` lines of a config, sorted by name so that equal configs give equal text."""
    return [f"#define {name} {_literal(name, value)}" for name, value in sorted(defines.items())]


def _literal(name: str, value: int | str) -> str:
    if not _DEFINE_NAME.fullmatch(name):
        raise InvalidInputError(f"define {name!r}: a name is DC_ and capitals, digits or _")
    if isinstance(value, str):
        if re.search(r'["\\\n]', value):
            raise InvalidInputError(f"define {name}={value!r}: give the text alone, without "
                                    f"quotes or backslashes; it becomes a C string literal")
        return f'"{value}"'
    try:
        return str(operator.index(value))
    except TypeError:
        raise InvalidInputError(f"define {name}={value!r} is a {type(value).__name__}: "
                                f"only int, bool and str can be written into a kernel") from None


def _expand_file(path: Path, root: Path, defines: Mapping[str, int | str], seen: set[Path],
                 lines: list[str]) -> None:
    seen.add(path)
    label = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    lines.append(f'#line 1 "{label}"')
    depth = 0
    for number, (line, bare) in enumerate(
            zip(text.split("\n"), _without_comments(text).split("\n"), strict=True), 1):
        directive = _DIRECTIVE.match(bare)
        word = directive[1] if directive else ""
        if word.startswith("if"):
            depth += 1
        elif word == "endif":
            depth -= 1
        if word.startswith("pragma"):
            lines.append("")  # every file is expanded once anyway; keeps the line count
        elif word.startswith(("include", "import")):
            if depth:
                # An expansion that happens once must not depend on which branch is taken.
                raise CompileError(
                    f"{label}({number}): {line.strip()!r} stands inside #if: files are included "
                    f"unconditionally and once; move it out (for a guard use #pragma once)")
            target = _included_file(word, directive[2].strip(), root, defines,
                                    f"{label}({number})")
            if target not in seen:
                _expand_file(target, root, defines, seen, lines)
            lines.append(f'#line {number + 1} "{label}"')
        else:
            lines.append(line)


def _without_comments(text: str) -> str:
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0]) if match["blank"] else match[0]
    return _TOKEN.sub(blank, text)


def _included_file(word: str, argument: str, root: Path, defines: Mapping[str, int | str],
                   where: str) -> Path:
    name = re.fullmatch(r'"([^"]+)"', argument)
    if word == "include" and name:
        name, said = name[1], f"#include {argument}"
    elif word == "include" and _DEFINE_NAME.fullmatch(argument):
        name, said = defines.get(argument), f"#include {argument} ({defines.get(argument)!r})"
        if not isinstance(name, str):
            raise CompileError(f"{where}: #include {argument}: the config must set {argument} to "
                               f"a file name, got {name!r}")
    else:
        raise CompileError(f'{where}: #{word} {argument}: only #include "file", relative to '
                           f"{root.name}/, or #include DC_NAME is possible; no system header "
                           f"is at hand at run time")
    target = (root / name).resolve()
    if not target.is_relative_to(root):
        raise CompileError(f"{where}: {said} leaves {root.name}/")
    if not target.is_file():
        raise CompileError(f"{where}: {said}: no such file in {root} (names are relative to "
                           f"that folder, not to the including file)")
    return target


def source_digest() -> str:
    """SHA-256 (hex) over the code: ``*.cu`` and ``*.cuh`` of ``cuda_src``, ``*.py`` of the package.

    A record of a GPU run names it, so that one can tell whether the code has changed since.
    Prose (``README.md``) does not count, nor do the measurements that a wheel carries.
    """
    root = cuda_root()
    files = {f"dashcupy/{path.relative_to(PACKAGE).as_posix()}": path
             for path in PACKAGE.rglob("*.py") if not path.is_relative_to(PACKAGE / "bench")}
    files |= {f"cuda_src/{path.relative_to(root).as_posix()}": path
              for pattern in ("*.cu", "*.cuh") for path in root.rglob(pattern)}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
