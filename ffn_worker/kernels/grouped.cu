// Gate and up of the experts' rows in one launch, for NVIDIA Hopper (sm_90a). Gathers rows from where they
// arrived, multiplies in FP8 and writes silu(gate) * up in FP8 to the slots. grouped.py inserts the
// instructions and defines STAGES, N_MAX and N_USUAL: the largest tile has N_USUAL rows, or N_MAX if there
// would otherwise be more tiles than blocks.
//
// An expert of up to N_USUAL rows is one tile, so its weights are loaded once. Tiles of up to 96 rows swap
// the operands: weights are the M of wgmma and rows its N, any multiple of 16. Larger tiles:
// grouped_rows.cu. A tile has 128 columns of gate and 128 of up, one warpgroup each, so results are whole
// blocks of 128 columns with one scale. The third warpgroup loads: one warp weights (bulk tensor copies),
// one warp scales, two warps rows (asynchronous copies of 16 bytes, swizzled for the tensor cores).

#include "grouped_common.cu"

constexpr int K_BLOCK = 128;  // columns of a stage, and of a scale
constexpr int WEIGHT_BYTES = 256 * K_BLOCK, ROW_BYTES = N_MAX * K_BLOCK;
constexpr int STAGED = 16, STAGED_ROW = 256;  // result rows staged in shared memory at once; bytes of a row
constexpr int LOADER_REGISTERS = 40, MATH_REGISTERS = 232;
constexpr int FIRST_LOADER = 256, GATHERERS = 64;  // threads
constexpr int LAG = 2;  // stages of rows in flight before the gathering warps wait for the oldest
static_assert(LAG < STAGES);

// Loads 128 rows of an expert's weights. They are used once, so the L2 cache evicts them first.
__device__ __forceinline__ void load_weights(u32 to, const TensorMap* map, u64* barrier, int column, int row,
                                             int expert) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(expert), "l"(0x12F0000000000000ull)
        : "memory");
}

template <int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 a, u64 b, int add);
WGMMA_FUNCTIONS

struct Tile {
    int expert, column, slot, rows;
};

struct Shared {
    char* weights;  // [STAGES][256][128]: gate, up
    char* rows;     // [STAGES][N_MAX][128]
    char* staged;   // [2][STAGED][STAGED_ROW]
    float* scales;  // [STAGES][2][N_MAX]: row scale times that of gate or up, at place(row)
    u32* sources;   // [N_MAX]: byte offsets of a tile's rows
    u64 *full, *empty;  // [STAGES]
    Group* groups;      // [experts + 1]
};

// Index of a row's scale. A lane has two rows of every eight; the scales of its two rows of the next eight
// follow them.
__device__ __forceinline__ int place(int n) {
    return n / 16 * 16 + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;
}

// Finds the tile with a number; false if there is none. Tiles are ordered by expert, column, rows. `group`
// only grows from call to call. (As a struct with state, this would cost the math warps their uniform
// registers: descriptors would be moved before every instruction.)
__device__ __forceinline__ bool find(const Group* groups, int experts, int columns, int number, int& group,
                                     Tile& tile) {
    int across = columns / 128;
    while (group < experts && number >= groups[group + 1].first_tile * across) ++group;
    if (group == experts) return false;
    Group g = groups[group];
    int parts = groups[group + 1].first_tile - g.first_tile;
    int within = number - g.first_tile * across, part = within % parts;
    int each = ((g.rows + parts - 1) / parts + 7) & ~7;
    tile = {group, within / parts * 128, g.begin + part * each, min(each, g.rows - part * each)};
    return true;
}

#include "grouped_results.cu"

// part = a [64, K_BLOCK] x b [N, K_BLOCK].T, by one warpgroup.
template <int N>
__device__ __forceinline__ void product(float (&part)[N / 2], u64 a, u64 b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < K_BLOCK / 32; ++k) wgmma<N>(part, a + 2 * k, b + 2 * k, k != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // Keeps reads of `part` after the wait.
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(part[i])::"memory");
}

// sum += part * scale of the row. Scales of the first EARLY * 16 rows are in `early`, others in `scales`.
template <int N, int EARLY>
__device__ __forceinline__ void add_scaled(float (&sum)[N / 2], const float (&part)[N / 2], const float4* early,
                                           const float4* scales) {
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
        float4 scale = j < EARLY ? early[j] : scales[j * 4];
        sum[j * 8 + 0] += part[j * 8 + 0] * scale.x;
        sum[j * 8 + 1] += part[j * 8 + 1] * scale.y;
        sum[j * 8 + 2] += part[j * 8 + 2] * scale.x;
        sum[j * 8 + 3] += part[j * 8 + 3] * scale.y;
        sum[j * 8 + 4] += part[j * 8 + 4] * scale.z;
        sum[j * 8 + 5] += part[j * 8 + 5] * scale.w;
        sum[j * 8 + 6] += part[j * 8 + 6] * scale.z;
        sum[j * 8 + 7] += part[j * 8 + 7] * scale.w;
    }
}

// Multiplies one tile of up to N rows. half: this warpgroup, 0 for gate, 1 for up.
template <int N>
__device__ __forceinline__ void multiply(const Shared& shared, const Tile& tile, int half, int k_blocks,
                                         const Results& results, Ring& ring) {
    // As many scales as registers can hold are loaded before the tensor cores begin, once for both h.
    constexpr int EARLY = N <= 96 ? N / 16 : N <= 128 ? 2 : 0;
    float sums[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[0][i] = sums[1][i] = 0.f;
    int lane = threadIdx.x % 32;

    for (int block = 0; block < k_blocks; ++block) {
        barrier_wait(&shared.full[ring.stage], ring.phase);
        const float4* scales =
            reinterpret_cast<const float4*>(shared.scales + (ring.stage * 2 + half) * N_MAX) + lane % 4;
        float4 early[EARLY + 1];
#pragma unroll
        for (int j = 0; j < EARLY; ++j) early[j] = scales[j * 4];
        u32 a = shared_address(shared.weights + ring.stage * WEIGHT_BYTES) + half * 128 * K_BLOCK;
        u64 b = operand(shared_address(shared.rows + ring.stage * ROW_BYTES));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // The tensor cores accumulate FP8 with few bits, so every 128 columns are added in float32.
            float part[N / 2];
            product<N>(part, operand(a + h * 64 * K_BLOCK), b);
            add_scaled<N, EARLY>(sums[h], part, early, scales);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
        ring.advance();
    }

    store<N>(sums, 0, shared, tile, half, results);
}

#include "grouped_rows.cu"

// Waits for the copies of all but the last PENDING stages and signals the stage `behind` the ring's. The fence
// is here because it would stall a multiplying warp.
template <int PENDING>
__device__ __forceinline__ void arrive_copied(const Shared& shared, const Ring& ring, int behind) {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
    fence_proxy();
    barrier_arrive(&shared.full[(ring.stage + STAGES - behind) % STAGES]);
}

extern "C" __global__ void __launch_bounds__(384, 1)
gate_up(const __grid_constant__ TensorMap weight_map,  // of codes [experts, 2 * columns, k_blocks * 128]
        const float* __restrict__ weight_scales,       // [experts, 2 * columns / 128, k_blocks]
        const char* __restrict__ rows,                 // [., k_blocks * 128]
        const float* __restrict__ row_scales,          // [., k_blocks]
        const int* __restrict__ sources,               // [room]: the pair in each slot
        const int* __restrict__ ends,                  // [experts]
        char* __restrict__ out, float* __restrict__ out_scales, int experts, int columns, int k_blocks, int top_k,
        int room, int pad) {
    extern __shared__ __align__(1024) char memory[];
    Shared shared;
    shared.weights = memory;
    shared.rows = shared.weights + STAGES * WEIGHT_BYTES;
    shared.staged = shared.rows + STAGES * ROW_BYTES;
    shared.scales = reinterpret_cast<float*>(shared.staged + 2 * STAGED * STAGED_ROW);
    shared.sources = reinterpret_cast<u32*>(shared.scales + STAGES * 2 * N_MAX);
    shared.full = reinterpret_cast<u64*>(shared.sources + N_MAX);
    shared.empty = shared.full + STAGES;
    shared.groups = reinterpret_cast<Group*>(shared.empty + STAGES);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        int tiles = find_groups(ends, experts, pad, N_USUAL, shared.groups);
        if (tiles * (columns / 128) > gridDim.x) find_groups(ends, experts, pad, N_MAX, shared.groups);
    } else if (warp == 1 && lane == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&shared.full[s], 2 + GATHERERS);
            barrier_init(&shared.empty[s], 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_proxy();
    }
    __syncthreads();

    Ring ring{0, 0};
    Tile tile;
    int group = 0;
    const int first_tile = blockIdx.x, step = gridDim.x;
    if (warp >= FIRST_LOADER / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        if (warp == 8 && lane == 0) {
            for (int t = first_tile; find(shared.groups, experts, columns, t, group, tile); t += step)
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
                    u64* full = &shared.full[ring.stage];
                    barrier_expect(full, WEIGHT_BYTES);
                    u32 to = shared_address(shared.weights + ring.stage * WEIGHT_BYTES);
                    load_weights(to, &weight_map, full, block * K_BLOCK, tile.column, tile.expert);
                    load_weights(to + 128 * K_BLOCK, &weight_map, full, block * K_BLOCK, columns + tile.column,
                                 tile.expert);
                }
        } else if (warp == 9) {
            constexpr int EACH = (N_MAX + 31) / 32;
            for (int t = first_tile; find(shared.groups, experts, columns, t, group, tile); t += step) {
                const float* gate = weight_scales + (long long)(tile.expert * 2 * columns + tile.column) / 128 * k_blocks;
                const float* up = gate + columns / 128 * k_blocks;
                u32 at[EACH];
                float next[EACH], next_gate = gate[0], next_up = up[0];
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    int n = lane + i * 32;
                    at[i] = n < tile.rows ? sources[tile.slot + n] / top_k * k_blocks : 0;
                    next[i] = row_scales[at[i]];
                }
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
                    float* to = shared.scales + ring.stage * 2 * N_MAX + place(lane);
#pragma unroll
                    for (int i = 0; i < EACH; ++i)
                        if (lane + i * 32 < N_MAX) {
                            to[i * 32] = next[i] * next_gate;
                            to[N_MAX + i * 32] = next[i] * next_up;
                        }
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&shared.full[ring.stage]);
                    if (block + 1 < k_blocks) {
#pragma unroll
                        for (int i = 0; i < EACH; ++i) next[i] = row_scales[at[i] + block + 1];
                        next_gate = gate[block + 1];
                        next_up = up[block + 1];
                    }
                }
            }
        } else if (warp >= 10) {
            int thread = threadIdx.x - FIRST_LOADER - 64, first = thread / 8, piece = thread % 8 * 16;
            // Through a shuffle; otherwise the compiler reloads the parameter for every copy.
            u64 base = __shfl_sync(~0u, reinterpret_cast<u64>(rows + piece), lane);
            for (int t = first_tile; find(shared.groups, experts, columns, t, group, tile); t += step) {
                named_sync(2, GATHERERS);
                for (int n = thread; n < tile.rows; n += GATHERERS)
                    shared.sources[n] = sources[tile.slot + n] / top_k * (k_blocks * K_BLOCK);
                named_sync(2, GATHERERS);
                // Read once; otherwise every copy of every stage waits for shared memory.
                u32 held[N_MAX / 8];
#pragma unroll
                for (int i = 0; i < N_MAX / 8; ++i) held[i] = shared.sources[first + i * 8];
                for (int block = 0; block < k_blocks; ++block, ring.advance()) {
                    barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
                    u32 to = shared_address(shared.rows + ring.stage * ROW_BYTES) + first * K_BLOCK + (piece ^ first * 16);
                    const char* from = reinterpret_cast<const char*>(base) + block * K_BLOCK;
#pragma unroll
                    for (int i = 0; i < N_MAX / 8; ++i)
                        if (first + i * 8 < tile.rows) copy_16(to + i * 8 * K_BLOCK, from + held[i]);
                    asm volatile("cp.async.commit_group;" ::: "memory");
                    if (block >= LAG) arrive_copied<LAG>(shared, ring, LAG);
                }
#pragma unroll 1
                for (int behind = min(LAG, k_blocks); behind > 0; --behind) arrive_copied<0>(shared, ring, behind);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
        int half = __shfl_sync(~0u, warp / 4, 0);
        Results results{out, out_scales, columns, room};
        for (int t = first_tile; find(shared.groups, experts, columns, t, group, tile); t += step) {
            int n = tile.rows;
            if (n <= 32)
                multiply<32>(shared, tile, half, k_blocks, results, ring);
            else if (n <= 64)
                multiply<64>(shared, tile, half, k_blocks, results, ring);
            else if (n <= 96)
                multiply<96>(shared, tile, half, k_blocks, results, ring);
            else if (n <= 128)
                multiply_rows<0>(shared, tile, half, k_blocks, results, ring);
            else if (n <= 144)
                multiply_rows<16>(shared, tile, half, k_blocks, results, ring);
            else
                multiply_rows<32>(shared, tile, half, k_blocks, results, ring);
        }
    }
}
