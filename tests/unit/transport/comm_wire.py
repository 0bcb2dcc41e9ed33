"""Handmade bytes of the tcp protocol, as a hostile or a simulated peer sends them."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from afd_comm import Region, make_flag

FLAG = make_flag(1, 1)
VERSION = 5
HELLO, WELCOME, FRAME = 0x48444641, 0x57444641, 0x46444641


def tcp_address(region: Region) -> str:
    return region.addresses[1]


def token(region: Region) -> bytes:
    return bytes.fromhex(tcp_address(region).split(":")[3])


def hello(
    region: Region,
    first: int = 1,
    count: int = 1,
    version: int = VERSION,
    link: int | None = None,
    number: int = 0,
) -> bytes:
    """Returns a greeting. link: the same for all connections of a link; default: random."""
    link = random.getrandbits(64) if link is None else link
    head = struct.pack("<II16sII", HELLO, version, token(region), first, count)
    return head + struct.pack("<QII", link, number, 0)


def frame(
    slot: int = 1,
    flag: int = FLAG,
    parts: tuple[tuple[int, int], ...] = ((0, 8),),
    nbytes: int | None = None,
    part_count: int | None = None,
    magic: int = FRAME,
    traced: int = 0,
    times: bytes = bytes(64),
    stripes: int = 1,
    sequence: int = 1,
) -> bytes:
    """Returns a frame head: 32 bytes, header (56 bytes), times (64 bytes), 8 parts.

    Header fields: user words (24 bytes), nbytes, count, reserved, traced, took, posted.
    """
    total = sum(n for _, n in parts) if nbytes is None else nbytes
    head = struct.pack("<IIQIIQ", magic, slot, flag, part_count or len(parts), stripes, sequence)
    header = struct.pack("<24sqIIIIq", b"", total, 0, 0, traced & 0xFFFFFFFF, 0, 0) + times
    flat = [value for part in parts for value in part]
    return head + header + struct.pack("<16Q", *flat, *([0] * (16 - len(flat))))


@contextmanager
def raw(region: Region, *data: bytes) -> Iterator[socket.socket]:
    host, port = tcp_address(region).split(":")[1:3]
    with socket.create_connection((host, int(port)), timeout=3) as s:
        for piece in data:
            s.sendall(piece)
        yield s
