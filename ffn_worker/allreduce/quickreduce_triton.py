"""All-reduce kernels over peer memory, for CUDA and ROCm.

Two-shot: rank r owns segment r of the values.

1. Every rank encodes segment o into the inbox of rank o and raises a flag there.
2. The owner waits for all flags, decodes, adds in rank order, encodes the sum into the inbox of
   every rank and raises the second flag.
3. Every rank decodes.

A *tile* is the same few atoms of every segment. Each tile has its own flags. A program sends all of
its tiles first (1) and then takes each through (2) and (3).

Flags are sequence numbers that grow by one with each launch that touches the tile. They are never
reset, and a replayed launch counts like any other.

Inboxes need no second copy and no barrier after a launch:

- First inbox: a rank that finishes a launch has the second flag of every owner, so every owner has
  read its first inbox. A reduce-scatter, which sends no second shot, raises the second flag only
  for this.
- Second inbox: a rank that sends a second shot has received the first shots of this launch from all
  ranks. A rank sends them only after its previous launch, in which it read its second inbox.
- One-shot (small messages, exact) has no such chain. Its inbox has two halves, used alternately.

A wait gives up after ``spins`` polls of the flags. It stores the late rank, and all later waits
return at once. :meth:`Collective.check` reads the stored rank.
"""

import triton
import triton.language as tl

from ffn_worker.allreduce.formats_triton import (
    atom_nbytes,
    decode_atoms,
    dequantise_atoms,
    encode_atoms,
    pack_atoms,
    quantise_atoms,
    values_of,
    words_of,
)


@triton.jit
def _peer(peers_ptr, rank):
    """Address of a rank's buffer in this process's address space."""
    base = tl.load(peers_ptr + rank).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(base, 16)


@triton.jit
def _flags(base, offset):
    return (base + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def _signal(
    peers_ptr,
    offset,
    sequence,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    AMD: tl.constexpr,
):
    """Raises this rank's flag, ``offset`` bytes into the buffer of every other rank.

    Every rank sees all earlier stores of the program before the flag: the barrier orders the
    threads, and the release orders everything that the flag's thread has seen. On AMD a barrier
    does not wait for stores in flight from other waves, so each wave waits for its own.
    """
    lane = tl.arange(0, LANES)
    if AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)", "=v,v", [lane], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    others = (lane < WORLD) & (lane != rank)
    base = tl.load(peers_ptr + lane, mask=others, other=0)
    flag = (base + offset).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, sequence, mask=others, sem="release", scope="sys")


@triton.jit
def _most_behind(flags_ptr, sequence, others):
    """1 + the highest other rank whose flag is below ``sequence``; 0 if there is none."""
    # Polls exchange 0 for 0, because a plain load has no acquire semantics.
    zero = tl.zeros(flags_ptr.shape, tl.int32)
    seen = tl.atomic_cas(flags_ptr, zero, zero, sem="acquire", scope="sys")
    lane = tl.arange(0, flags_ptr.shape[0])
    return tl.max(tl.where(others & (seen - sequence < 0), lane + 1, 0), axis=0)


@triton.jit
def _await(
    flags_ptr,
    sequence,
    spins,
    late_ptr,
    note_ptr,
    rank,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Waits until the flags of all other ranks have reached ``sequence``.

    Returns the polls allowed for later waits: ``spins``, or 0 once a rank was late.
    """
    lane = tl.arange(0, LANES)
    others = (lane < WORLD) & (lane != rank)
    flags_ptr += tl.minimum(lane, WORLD - 1)
    left = spins
    behind = _most_behind(flags_ptr, sequence, others)
    while (behind > 0) & (left > 0):
        behind = _most_behind(flags_ptr, sequence, others)
        left -= 1
    if (behind > 0) & (spins > 0):  # later ranks may be late only because of the first
        tl.store(late_ptr, behind)
        tl.store(note_ptr, behind)
    tl.debug_barrier()
    return tl.where(behind > 0, 0, spins)


@triton.jit
def _segment(owner, n, unit, base, longer):
    """Index of the first value of a rank's segment, see quickreduce_plan.Segments."""
    return tl.minimum((owner * base + tl.minimum(owner, longer)) * unit, n)


@triton.jit
def _values_left(at, end, ATOMS: tl.constexpr):
    """Number of values from ``at`` to ``end``, at most ATOMS atoms; negative if there are none."""
    return tl.minimum(end - at, 2048 * ATOMS)


@triton.jit
def _atoms(values):
    """Number of atoms of ``values`` values, rounded up; 0 or less if there are none."""
    return (values + 2047) // 2048


@triton.jit
def _load_atoms(x_ptr, left, ATOMS: tl.constexpr, BF16: tl.constexpr, AMD: tl.constexpr):
    i = tl.arange(0, 2048 * ATOMS)
    return words_of(tl.load(x_ptr + i, mask=i < left, other=0.0), BF16, AMD)


@triton.jit
def _store_atoms(out_ptr, left, value, ATOMS: tl.constexpr):
    i = tl.arange(0, 2048 * ATOMS)
    tl.store(out_ptr + i, value.to(out_ptr.dtype.element_ty), mask=i < left)


@triton.jit(do_not_specialize=["base", "longer", "first", "tiles", "my_rank"])
def two_shot_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    sequence_ptr,
    late_ptr,
    note_ptr,
    n,
    unit,
    base,
    longer,
    first,
    tiles,
    spins,
    my_rank,
    max_tiles,
    inbox_offset,
    segment_bytes,
    FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    FP4: tl.constexpr,
    BF16: tl.constexpr,
    TILE: tl.constexpr,
    ATOMS: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    AMD: tl.constexpr,
):
    """Sums x [n] over ranks into out: all of it, [n], with GATHER, else this rank's segment only.

    x, out: float16, bfloat16 or float32; out may be x. n: at most MOST_VALUES.
    peers: addresses of all ranks' buffers. A buffer has flags [2 shots, max_tiles, WORLD] int32
        and, at ``inbox_offset``, two inboxes of WORLD segments of ``segment_bytes``.
    sequence [max_tiles] int32: launches that have touched each tile before this one.
    late, note [1] int32: 1 + a rank that was late; on this device, and in memory of the host.
    unit, base, longer: the segments, see quickreduce_plan.Segments.
    first: atom of each segment at which tile 0 begins.
    TILE, ATOMS: atoms of a tile per segment, and how many are handled at once.
    LANES: WORLD rounded up to a power of two.
    BITS 16 with BF16: sends bfloat16 values as they are; the sum is exact up to one rounding.
    Any grid.
    """
    nbytes: tl.constexpr = atom_nbytes(BITS)
    second = 4 * WORLD * max_tiles  # bytes from the first shot's flags on
    gathered = inbox_offset + WORLD * segment_bytes
    mine = _peer(peers_ptr, my_rank)
    first_value = _segment(my_rank, n, unit, base, longer)
    last_value = _segment(my_rank + 1, n, unit, base, longer)
    spins = tl.where(tl.load(late_ptr) > 0, 0, spins)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        for i in range(1, WORLD):
            owner = (my_rank + i) % WORLD  # ranks start at different owners
            start = _segment(owner, n, unit, base, longer)
            end = _segment(owner + 1, n, unit, base, longer)
            inbox = _peer(peers_ptr, owner) + inbox_offset + my_rank * segment_bytes
            for atom in range(tile * TILE, tile * TILE + TILE, ATOMS):
                at = start + (first + atom) * 2048
                left = _values_left(at, end, ATOMS)
                x = _load_atoms(x_ptr + at, left, ATOMS, BF16, AMD)
                to = inbox + atom * nbytes
                encode_atoms(x, to, _atoms(left), FACTOR, BITS, FP4, AMD)
        flag = 4 * (tile * WORLD + my_rank)
        _signal(peers_ptr, flag, tl.load(sequence_ptr + tile) + 1, my_rank, WORLD, LANES, AMD)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        sequence = tl.load(sequence_ptr + tile) + 1
        flags = _flags(mine, 4 * tile * WORLD)
        spins = _await(flags, sequence, spins, late_ptr, note_ptr, my_rank, WORLD, LANES)
        for atom in range(tile * TILE, tile * TILE + TILE, ATOMS):
            at = first_value + (first + atom) * 2048
            left = _values_left(at, last_value, ATOMS)
            place = atom * nbytes
            x = _load_atoms(x_ptr + at, left, ATOMS, BF16, AMD)
            pairs, scales = quantise_atoms(
                x, FACTOR, BITS, FP4, AMD
            )  # rounded as if it had been sent
            own = values_of(dequantise_atoms(pairs, scales, BITS, FP4, AMD), BF16)
            total = tl.full((2048 * ATOMS,), -0.0, tl.float32)  # -0 + x is x, also for x = -0
            for rank in range(WORLD):
                if rank == my_rank:
                    total += own
                else:
                    sent = mine + inbox_offset + rank * segment_bytes + place
                    total += decode_atoms(sent, _atoms(left), BITS, FP4, BF16, ATOMS, AMD)
            y = words_of(total, BF16, AMD)
            if GATHER:
                pairs, scales = quantise_atoms(y, FACTOR, BITS, FP4, AMD)
                for i in range(1, WORLD):
                    peer = (my_rank + i) % WORLD
                    inbox = _peer(peers_ptr, peer) + gathered + my_rank * segment_bytes
                    pack_atoms(pairs, scales, inbox + place, _atoms(left), BITS, FP4)
                y = dequantise_atoms(pairs, scales, BITS, FP4, AMD)
                _store_atoms(out_ptr + at, left, values_of(y, BF16), ATOMS)
            else:
                _store_atoms(out_ptr + (at - first_value), left, values_of(y, BF16), ATOMS)
        # Without GATHER the flag only tells that the first inbox was read.
        flag = second + 4 * (tile * WORLD + my_rank)
        _signal(peers_ptr, flag, sequence, my_rank, WORLD, LANES, AMD)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        sequence = tl.load(sequence_ptr + tile) + 1
        flags = _flags(mine, second + 4 * tile * WORLD)
        spins = _await(flags, sequence, spins, late_ptr, note_ptr, my_rank, WORLD, LANES)
        if GATHER:
            for i in range(1, WORLD):
                owner = (my_rank + WORLD - i) % WORLD
                start = _segment(owner, n, unit, base, longer)
                end = _segment(owner + 1, n, unit, base, longer)
                inbox = mine + gathered + owner * segment_bytes
                for atom in range(tile * TILE, tile * TILE + TILE, ATOMS):
                    at = start + (first + atom) * 2048
                    left = _values_left(at, end, ATOMS)
                    sent = inbox + atom * nbytes
                    value = decode_atoms(sent, _atoms(left), BITS, FP4, BF16, ATOMS, AMD)
                    _store_atoms(out_ptr + at, left, value, ATOMS)
        tl.store(sequence_ptr + tile, sequence)


@triton.jit
def _slot(inbox, row, max_tiles, tile, BLOCK: tl.constexpr, like_ptr):
    """Pointers to the values of a tile in one row of the one-shot inboxes."""
    place = tl.cast(row * max_tiles + tile, tl.int64) * (4 * BLOCK)
    values = (inbox + place).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return values + tl.arange(0, BLOCK)


@triton.jit(do_not_specialize=["my_rank"])
def one_shot_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    sequence_ptr,
    late_ptr,
    note_ptr,
    n,
    spins,
    my_rank,
    max_tiles,
    flags_offset,
    inbox_offset,
    BLOCK: tl.constexpr,
    WORLD: tl.constexpr,
    LANES: tl.constexpr,
    AMD: tl.constexpr,
):
    """Sums x [n] over ranks into out [n]: added in float32 in rank order, rounded once.

    Every rank sends all values to every rank. Flags [max_tiles, WORLD] int32 at ``flags_offset``;
    inboxes [2 halves, WORLD, max_tiles] of 4 BLOCK bytes at ``inbox_offset``. Other arguments as in
    two_shot_kernel. Grid (ceil(n / BLOCK)), at most max_tiles.
    """
    tile = tl.program_id(0)
    sequence = tl.load(sequence_ptr + tile) + 1
    spins = tl.where(tl.load(late_ptr) > 0, 0, spins)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    half = (sequence & 1) * WORLD
    for i in range(1, WORLD):
        inbox = _peer(peers_ptr, (my_rank + i) % WORLD) + inbox_offset
        tl.store(_slot(inbox, half + my_rank, max_tiles, tile, BLOCK, x_ptr), x)
    _signal(
        peers_ptr, flags_offset + 4 * (tile * WORLD + my_rank), sequence, my_rank, WORLD, LANES, AMD
    )
    mine = _peer(peers_ptr, my_rank)
    flags = _flags(mine, flags_offset + 4 * tile * WORLD)
    _await(flags, sequence, spins, late_ptr, note_ptr, my_rank, WORLD, LANES)
    total = tl.full((BLOCK,), -0.0, tl.float32)
    for rank in range(WORLD):
        if rank == my_rank:
            part = x.to(tl.float32)
        else:
            sent = _slot(mine + inbox_offset, half + rank, max_tiles, tile, BLOCK, x_ptr)
            part = tl.load(sent).to(tl.float32)
        total += part
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)
    tl.store(sequence_ptr + tile, sequence)


@triton.jit
def spin_kernel(flags_ptr, spins, late_ptr, note_ptr):
    """Waits for rank 1 of 2, which never comes. Its time per poll converts a deadline to polls."""
    _await(flags_ptr, 1, spins, late_ptr, note_ptr, 0, 2, 2)
