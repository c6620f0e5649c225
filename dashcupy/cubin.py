"""What a cubin (an ELF file) says of itself: kernels, registers, stack, shared memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_BYTES, _SECTION, _SYMBOL = 56, struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_SHT_NOBITS, _STT_FUNC, _STO_ENTRY = 8, 2, 0x10

# Attributes in .nv.info: (format byte 4 = sized value, attribute number).
_SIZED_VALUE = 4
_REG_COUNT, _FRAME_SIZE, _PARAM_BANK = 0x2f, 0x11, 0x0a
# From sm_90 on the driver keeps this much of every CTA's shared memory for itself, and the
# compiler counts it in; a cubin that does so has a section of that name.
_RESERVED_SMEM_SECTION, _RESERVED_SMEM_BYTES = ".nv.shared.reserved.0", 1024


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Parameters
    ----------
    regs
        Registers per thread.
    stack_bytes
        Stack frame per thread: above 0 the kernel spills or indexes a local array at run time.
    static_smem_bytes
        Shared memory declared with a fixed size, without what the driver keeps for itself.
    param_bytes
        All parameters together.
    """

    regs: int
    stack_bytes: int
    static_smem_bytes: int
    param_bytes: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of every kernel in a cubin, by name.

    Raises
    ------
    ValueError
        The bytes are not a whole cubin (see `is_complete`).
    """
    if not is_complete(cubin):
        raise ValueError(f"not a whole cubin ({len(cubin)} bytes)")
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    regs, stack = {}, {}
    for attribute, value in _sized_values(_content(cubin, sections[".nv.info"])):
        if attribute in (_REG_COUNT, _FRAME_SIZE):
            symbol, number = struct.unpack_from("<II", value)
            (regs if attribute == _REG_COUNT else stack)[symbols[symbol][0]] = number
    reserved = _RESERVED_SMEM_BYTES if _RESERVED_SMEM_SECTION in sections else 0
    found = {}
    for name, is_kernel in symbols:
        if not is_kernel:
            continue
        smem = sections.get(f".nv.shared.{name}")
        params = [struct.unpack_from("<IHH", value)[2] for attribute, value in
                  _sized_values(_content(cubin, sections.get(f".nv.info.{name}")))
                  if attribute == _PARAM_BANK]
        found[name] = Resources(regs[name], stack.get(name, 0),
                                max(0, smem[5] - reserved) if smem else 0, sum(params))
    return found


def is_complete(cubin: bytes) -> bool:
    """Whether the bytes are a CUDA ELF file with every header and section inside.

    Nothing is said of damage within a section: for that the cache keeps a checksum.
    """
    if len(cubin) < _HEADER.size or cubin[:5] != b"\x7fELF\x02":
        return False
    header = _HEADER.unpack_from(cubin)
    machine, program_at, section_at, n_program, n_section = (
        header[2], header[5], header[6], header[10], header[12])
    if (machine != _EM_CUDA or n_section == 0
            or program_at + n_program * _PROGRAM_BYTES > len(cubin)
            or section_at + n_section * _SECTION.size > len(cubin)):
        return False
    return all(section[1] == _SHT_NOBITS or section[4] + section[5] <= len(cubin)
               for section in _raw_sections(cubin))


def _raw_sections(cubin: bytes) -> list[tuple[int, ...]]:
    header = _HEADER.unpack_from(cubin)
    section_at, n_section = header[6], header[12]
    return [_SECTION.unpack_from(cubin, section_at + i * _SECTION.size)
            for i in range(n_section)]


def _sections(cubin: bytes) -> dict[str, tuple[int, ...]]:
    """Section headers by name; fields 4 and 5 of each are its place and size in bytes."""
    raw = _raw_sections(cubin)
    names_at = raw[_HEADER.unpack_from(cubin)[13]][4]
    return {_text(cubin, names_at + section[0]): section for section in raw}


def _symbols(cubin: bytes, sections: dict[str, tuple[int, ...]]) -> list[tuple[str, bool]]:
    """Name of each symbol, and whether it is a kernel."""
    table, names_at = sections[".symtab"], sections[".strtab"][4]
    symbols = []
    for at in range(table[4], table[4] + table[5], _SYMBOL.size):
        name, info, other, *_ = _SYMBOL.unpack_from(cubin, at)
        symbols.append((_text(cubin, names_at + name),
                        info & 15 == _STT_FUNC and bool(other & _STO_ENTRY)))
    return symbols


def _sized_values(info: bytes):
    """Attribute number and bytes of every sized value in a .nv.info section."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:  # the other formats keep their value in the size field
            yield attribute, info[at:at + size]
            at += size


def _content(cubin: bytes, section: tuple[int, ...] | None) -> bytes:
    return cubin[section[4]:section[4] + section[5]] if section else b""


def _text(cubin: bytes, at: int) -> str:
    return cubin[at:cubin.index(0, at)].decode()
