"""Where an ELF image ends, by its own tables."""

from __future__ import annotations

import struct


def image_end(image: bytes) -> int:
    assert image[:4] == b"\x7fELF"
    program_at, section_at = struct.unpack_from("<QQ", image, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", image, 54)
    ends = [program_at + program_size * programs, section_at + section_size * sections]
    for i in range(sections):
        kind, _, _, offset, size = struct.unpack_from(
            "<IQQQQ", image, section_at + i * section_size + 4
        )
        if kind != 8:  # SHT_NOBITS takes no room
            ends.append(offset + size)
    return max(ends)
