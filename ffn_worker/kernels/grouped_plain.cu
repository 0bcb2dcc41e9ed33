// Both products of the experts' rows in bfloat16, for NVIDIA Hopper (sm_90a). gate_up gathers rows from where
// they arrived and writes silu(gate) * up to the slots; down multiplies the slots. grouped_plain.py inserts
// the instructions and defines STAGES, N_MAX (rows of the largest tile) and WARPGROUPS (that multiply, with
// 64 rows of weights each).
//
// Operands are swapped: weights are the M of wgmma and rows its N, any multiple of 8. So an expert's rows
// are split into equal tiles with few empty rows. Sums stay in registers over all of K. Rows of gate and up
// alternate in groups of eight, so that a lane has both values of a column. The stages of a tile are loaded
// while the previous tile is multiplied and written. Warpgroups run independently: one can write while
// another multiplies.

#include "grouped_common.cu"

constexpr int LINE = 128;  // bytes of a row of a stage: 64 columns
constexpr int TILE_GROUPS = WARPGROUPS * 4;  // a group: 16 rows of weights
constexpr int WEIGHT_BYTES = TILE_GROUPS * 16 * LINE, ROW_BYTES = N_MAX * LINE;
constexpr int MATH = WARPGROUPS * 128, LOADERS = 128;  // threads
constexpr int LOADER_REGISTERS = 56, MATH_REGISTERS = 152;
static_assert(LOADER_REGISTERS + WARPGROUPS * MATH_REGISTERS <= 512);
constexpr int CHUNK = 4096;  // bytes of results staged in shared memory at once
constexpr int ROW_BOX = 32;  // rows that the copy engine loads at once
constexpr int LOADER_BARRIER = 15;
constexpr u64 KEPT = 0x1000000000000000, FIRST_TO_GO = 0x12F0000000000000;  // L2 cache policies

// Loads all groups of a tile. A group is 8 rows of gate and 8 of up, or 16 rows.
__device__ __forceinline__ void load_weights(u32 to, const TensorMap* map, u64* barrier, int column, int group,
                                             int expert, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(0), "r"(group), "r"(expert), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void load_rows(u32 to, const TensorMap* map, u64* barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
        : "memory");
}

// Arrives at the barrier, without blocking, once the copies of this thread so far have completed.
__device__ __forceinline__ void arrive_when_copied(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N_MAX / 2], u64 a, u64 b, int add);
WGMMA_FUNCTIONS

// group: the first of its groups of weights. rows: 0 if there are no more tiles.
struct Tile {
    int expert, group, slot, rows;
};

struct Shared {
    char* weights;      // [STAGES][TILE_GROUPS * 16][LINE]
    char* rows;         // [STAGES][N_MAX][LINE]
    char* staged;       // [WARPGROUPS][2][CHUNK]
    u32* sources;       // [16][16]: byte offset of row first + 16 * i at [first][i]
    Tile* tiles;        // [STAGES]: tile of each stage, and in one entry more the next tile
    u64 *full, *empty;  // [STAGES]
    Group* groups;      // [experts + 1]
};

// Finds the tile with a number. Tiles are ordered by expert, column, rows, so that blocks that share weights
// or rows run at the same time. `expert` only grows from call to call.
__device__ __forceinline__ Tile find(const Group* groups, int experts, int across, int number, int& expert) {
    while (expert < experts && number >= groups[expert + 1].first_tile * across) ++expert;
    if (expert == experts) return {0, 0, 0, 0};
    Group g = groups[expert];
    int parts = groups[expert + 1].first_tile - g.first_tile;
    int within = number - g.first_tile * across, part = within % parts;
    int each = ((g.rows + parts - 1) / parts + 7) & ~7;
    return {expert, within / parts * TILE_GROUPS, g.begin + part * each, min(each, g.rows - part * each)};
}

// Signals that this warp has read the stage before the ring's.
__device__ __forceinline__ void release(const Shared& shared, const Ring& ring) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared.empty[ring.stage ? ring.stage - 1 : STAGES - 1]);
}

// Multiplies a tile of up to N rows with one warpgroup. COPIED: rows came by asynchronous copies, through the
// generic proxy, so a proxy fence is needed. The fence is here because the loading threads would have to wait
// for their copies before it and would start the next stage late.
template <int N, bool COPIED>
__device__ __forceinline__ void multiply(float (&sums)[N_MAX / 2], const Shared& shared, int warpgroup, int k_blocks,
                                         Ring& ring) {
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
        barrier_wait(&shared.full[ring.stage], ring.phase);
        if (COPIED) fence_proxy();
        u32 weights = shared_address(shared.weights + ring.stage * WEIGHT_BYTES) + warpgroup * 64 * LINE;
        u32 rows = shared_address(shared.rows + ring.stage * ROW_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < LINE; k += 32) wgmma<N>(sums, operand(weights + k), operand(rows + k), block | k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (block) release(shared, ring);
        ring.advance();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // Keeps reads of the sums after the wait.
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
    release(shared, ring);
}

// Stores the results of a warpgroup's 64 rows of weights: 64 columns, or 32 if GATED. They are transposed to
// rows in shared memory, one chunk at a time.
template <bool GATED>
__device__ __forceinline__ void store(const float (&sums)[N_MAX / 2], const Shared& shared, const Tile& tile,
                                      int warpgroup, char* out, int columns) {
    constexpr int BYTES = GATED ? 64 : 128, PIECES = BYTES / 16;  // of a result row of this warpgroup
    constexpr int ROWS = CHUNK / BYTES, PASS = 128 / PIECES;      // of a chunk; rows stored at once
    int thread;  // read here, so that no register holds an address during the loop
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    thread %= 128;
    int warp = thread / 32, lane = thread % 32;
    named_sync(1 + warpgroup, 128);  // the previous chunk has been read
    // Pieces of 16 bytes are swizzled by row.
    int to_row = GATED ? lane : lane / 16 * 8 + lane % 8, to_piece = GATED ? warp : warp * 2 + lane / 8 % 2;
    u32 staged = shared_address(shared.staged) + warpgroup * 2 * CHUNK;
    u32 to = staged + to_row * BYTES + (to_piece ^ (GATED ? to_row / 2 & 3 : to_row & 7)) * 16;
    int row_in = thread / PIECES, piece = thread % PIECES, row_bytes = columns * 2;
    char* at = out + static_cast<long long>(tile.slot) * row_bytes + (tile.group + warpgroup * 4) * (GATED ? 16 : 32) +
               piece * 16;
#pragma unroll
    for (int c = 0; c < N_MAX / ROWS; ++c) {
        if (c * ROWS < tile.rows) {
            u32 chunk = c % 2 * CHUNK;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* s = &sums[(c * ROWS + half * ROWS / 2) / 2];
                u32 r[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    r[j] = GATED ? packed(gated(s[4 * j], s[4 * j + 2]), gated(s[4 * j + 1], s[4 * j + 3]))
                                 : packed(s[2 * j], s[2 * j + 1]);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                 to + chunk + half * CHUNK / 2),
                             "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                             : "memory");
            }
            named_sync(1 + warpgroup, 128);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Beyond the last row, store the last row again: a divergent branch would cost the math
                // warps their uniform registers.
                int row = min(c * ROWS + half * PASS + row_in, tile.rows - 1), in = row - c * ROWS;
                const char* from = shared.staged + warpgroup * 2 * CHUNK + chunk + in * BYTES +
                                   (piece ^ (GATED ? in / 2 & 3 : in & 7)) * 16;
                *reinterpret_cast<uint4*>(at + static_cast<long long>(row) * row_bytes) =
                    *reinterpret_cast<const uint4*>(from);
            }
        }
    }
}

// Loads weights and rows of all tiles of down, with one thread of the loading warpgroup.
__device__ __forceinline__ void load_placed(const Shared& shared, const TensorMap* weight_map,
                                            const TensorMap* row_map, int* queue, int experts, int across,
                                            int k_blocks, Ring& ring) {
    int expert = 0, number = atomicAdd(queue, 1);
    for (;;) {
        Tile tile = find(shared.groups, experts, across, number, expert);
        if (tile.rows == 0) return;
        number = atomicAdd(queue, 1);
        int boxes = (tile.rows + ROW_BOX - 1) / ROW_BOX;
        for (int block = 0; block < k_blocks; ++block, ring.advance()) {
            barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
            u64* full = &shared.full[ring.stage];
            if (block == 0) shared.tiles[ring.stage] = tile;
            barrier_expect(full, WEIGHT_BYTES + boxes * ROW_BOX * LINE);
            load_weights(shared_address(shared.weights + ring.stage * WEIGHT_BYTES), weight_map, full, block * LINE,
                         tile.group, tile.expert, KEPT);
            u32 to = shared_address(shared.rows + ring.stage * ROW_BYTES);
            for (int i = 0; i < boxes; ++i)
                load_rows(to + i * ROW_BOX * LINE, row_map, full, block * LINE, tile.slot + i * ROW_BOX);
        }
    }
}

// Loads for gate_up. The whole warpgroup copies rows from where they arrived.
__device__ __forceinline__ void load_gathered(const Shared& shared, const TensorMap* weight_map, const char* rows,
                                              const int* sources, int* queue, int experts, int across, int k_blocks,
                                              int top_k, Ring& ring) {
    int thread = threadIdx.x - MATH, first = thread / 8, piece = thread % 8 * 16;
    bool leader = thread == 0;
    // Through a shuffle; otherwise the compiler reloads the parameter for every copy.
    u64 base = __shfl_sync(~0u, reinterpret_cast<u64>(rows + piece), thread % 32);
    int expert = 0, number = 0;
    u32 held[2] = {0, 0};  // pairs of the next tile, two per thread
    Tile* next = &shared.tiles[STAGES];
    auto fetch = [&]() {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (thread + i * LOADERS < next->rows) held[i] = sources[next->slot + thread + i * LOADERS];
    };
    if (leader) {
        *next = find(shared.groups, experts, across, atomicAdd(queue, 1), expert);
        number = atomicAdd(queue, 1);
    }
    named_sync(LOADER_BARRIER, LOADERS);
    fetch();
    for (;;) {
        Tile tile = *next;
        if (tile.rows == 0) return;
        named_sync(LOADER_BARRIER, LOADERS);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int n = thread + i * LOADERS;
            shared.sources[n % 16 * 16 + n / 16] = held[i] / top_k * (k_blocks * LINE);
        }
        if (leader) {
            *next = find(shared.groups, experts, across, number, expert);
            if (next->rows) number = atomicAdd(queue, 1);
        }
        named_sync(LOADER_BARRIER, LOADERS);
        fetch();
        // Weights that only one tile reads are evicted from the L2 cache first.
        bool once = shared.groups[tile.expert + 1].first_tile - shared.groups[tile.expert].first_tile == 1;
        for (int block = 0; block < k_blocks; ++block, ring.advance()) {
            barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
            u64* full = &shared.full[ring.stage];
            if (leader) {
                if (block == 0) shared.tiles[ring.stage] = tile;
                barrier_expect(full, WEIGHT_BYTES);
                load_weights(shared_address(shared.weights + ring.stage * WEIGHT_BYTES), weight_map, full,
                             block * LINE, tile.group, tile.expert, once ? FIRST_TO_GO : KEPT);
            }
            __syncwarp();
            u32 to = shared_address(shared.rows + ring.stage * ROW_BYTES) + first * LINE + (piece ^ (first & 7) * 16);
            const char* from = reinterpret_cast<const char*>(base) + block * LINE;
            const uint4* begins = reinterpret_cast<const uint4*>(shared.sources + first * 16);
#pragma unroll
            for (int i = 0; i < N_MAX; i += 64) {
                if (i < tile.rows) {
                    uint4 at = begins[i / 64];
                    int left = tile.rows - first - i;
                    if (0 < left) copy_16(to + i * LINE, from + at.x);
                    if (16 < left) copy_16(to + (i + 16) * LINE, from + at.y);
                    if (32 < left) copy_16(to + (i + 32) * LINE, from + at.z);
                    if (48 < left) copy_16(to + (i + 48) * LINE, from + at.w);
                }
            }
            arrive_when_copied(full);
        }
    }
}

template <bool GATED>
__device__ __forceinline__ void run(const TensorMap* weight_map, const TensorMap* row_map, const char* rows,
                                    const int* sources, const int* ends, char* out, int* queue, int experts,
                                    int groups, int k_blocks, int top_k, int pad) {
    extern __shared__ __align__(1024) char memory[];
    Shared shared;
    shared.weights = memory;
    shared.rows = shared.weights + STAGES * WEIGHT_BYTES;
    shared.staged = shared.rows + STAGES * ROW_BYTES;
    shared.sources = reinterpret_cast<u32*>(shared.staged + WARPGROUPS * 2 * CHUNK);
    shared.tiles = reinterpret_cast<Tile*>(shared.sources + 256);
    shared.full = reinterpret_cast<u64*>(shared.tiles + STAGES + 1);
    shared.empty = shared.full + STAGES;
    shared.groups = reinterpret_cast<Group*>(shared.empty + STAGES);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        find_groups(ends, experts, pad, N_MAX, shared.groups);
    } else if (warp == 1 && lane == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&shared.full[s], GATED ? 1 + LOADERS : 1);
            barrier_init(&shared.empty[s], WARPGROUPS * 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy();
    }
    __syncthreads();

    Ring ring{0, 0};
    if (warp >= MATH / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        bool leader = threadIdx.x == MATH;
        const int across = (groups + TILE_GROUPS - 1) / TILE_GROUPS;
        if (GATED)
            load_gathered(shared, weight_map, rows, sources, queue, experts, across, k_blocks, top_k, ring);
        else if (leader)
            load_placed(shared, weight_map, row_map, queue, experts, across, k_blocks, ring);
        if (GATED || leader) {
            barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
            if (leader) {
                shared.tiles[ring.stage].rows = 0;
                barrier_arrive(&shared.full[ring.stage]);
            }
            if (GATED) barrier_arrive(&shared.full[ring.stage]);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
        int warpgroup = __shfl_sync(~0u, warp / 4, 0);
        float sums[N_MAX / 2];
        for (;;) {
            barrier_wait(&shared.full[ring.stage], ring.phase);
            Tile tile = shared.tiles[ring.stage];
            // Tells the compiler that all lanes of a warp take the same branch.
            tile.rows = __reduce_max_sync(~0u, tile.rows);
            tile.group = __reduce_max_sync(~0u, tile.group);
            if (tile.rows == 0) break;
            if (tile.group + warpgroup * 4 < groups) {
                MULTIPLY_BY_ROWS
                store<GATED>(sums, shared, tile, warpgroup, out, groups * (GATED ? 8 : 16));
            } else {  // beyond the last column
                for (int block = 0; block < k_blocks; ++block) {
                    barrier_wait(&shared.full[ring.stage], ring.phase);
                    ring.advance();
                    release(shared, ring);
                }
            }
        }
    }
}

// Both products have the same signature. weight_map: weights in groups of 16 rows; for gate_up, 8 of gate and
// 8 of up. row_map (down): the rows in the slots. rows (gate_up): [., k_blocks * 64].
#define ENTRY(name, GATED)                                                                                          \
    extern "C" __global__ void __launch_bounds__(MATH + LOADERS, 1)                                                 \
        name(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap row_map,               \
             const char* __restrict__ rows,                                                                         \
             const int* __restrict__ sources,  /* [room]: the pair in each slot */                                  \
             const int* __restrict__ ends,     /* [experts] */                                                      \
             char* __restrict__ out,           /* bfloat16 [room, .] */                                             \
             int* queue,                       /* [1], 0 at first: tiles taken so far */                            \
             int experts, int groups, int k_blocks, int top_k, int pad) {                                           \
        run<GATED>(&weight_map, &row_map, rows, sources, ends, out, queue, experts, groups, k_blocks, top_k, pad);  \
    }
ENTRY(gate_up, true)
ENTRY(down, false)
