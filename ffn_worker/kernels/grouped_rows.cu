// Tiles of 97 to 128 + REST rows for grouped.cu. The first 128 rows are the M of wgmma, 64 per warpgroup,
// and the weights its N. The rows above 128 are the N, as in multiply.
//
// These tiles are bound by reads of shared memory, and with rows as M they read fewer bytes. Gate and up
// of a value are in one lane, so no exchange through shared memory is needed; that would make all warps
// wait for each other N / 16 times.

// Stores silu(gate) * up in FP8 for a lane's two rows of `sums`, which are eight apart. Gate and up are
// rounded to bfloat16 first.
__device__ __forceinline__ void store_rows(float (&sums)[2][64], const Tile& tile, int half,
                                           const Results& results) {
    int thread;  // read here, so that no register holds an address during the loop
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int lane = thread % 32, column = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int n = half * 64 + thread / 32 % 4 * 16 + lane / 4 + i * 8;
        u32 most = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int at = j * 4 + i * 2; at < j * 4 + i * 2 + 2; ++at) {
                sums[0][at] = gated(rounded(sums[0][at]), rounded(sums[1][at]));
                most = max(most, magnitude(sums[0][at]));
            }
        }
#pragma unroll
        for (int d = 1; d < 4; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
        float scale = block_scale(most), inverse = 1.f / scale;
        long long slot = tile.slot + n;
        char* to = results.codes + slot * results.columns + tile.column + column % 2 * 8 + column / 2 * 4;
        if (n < tile.rows && column == 0)
            results.scales[(long long)(tile.column / 128) * results.room + slot] = scale;
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            // A lane has two columns in each of two groups of eight. After the exchange, neighbouring lanes
            // have four columns of one group each.
            const float *one = &sums[0][j * 4 + i * 2], *two = one + 4;
            u32 here = codes(one[0] * inverse, one[1] * inverse);
            u32 next = codes(two[0] * inverse, two[1] * inverse);
            u32 got = __shfl_xor_sync(~0u, column % 2 ? here : next, 1);
            u32 four = column % 2 ? got | next << 16 : here | got << 16;
            if (n < tile.rows) *reinterpret_cast<u32*>(to + j * 8) = four;
        }
    }
}

// sums += 64 rows of a warpgroup x columns FIRST to FIRST + WIDTH of the tile's 256 weight columns.
template <int FIRST, int WIDTH>
__device__ __forceinline__ void add_columns(float (&sums)[2][64], u64 rows, u32 weights, const float* scales) {
    float part[WIDTH / 2], scale[2][2];  // [gate, up][row, row + 8]
#pragma unroll
    for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = scales[i / 2 * N_MAX + i % 2 * 2];
    product<WIDTH>(part, rows, operand(weights + FIRST * K_BLOCK));
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) {
        constexpr int BEFORE = FIRST / 2;
        sums[(BEFORE + i) / 64][(BEFORE + i) % 64] += part[i] * scale[(BEFORE + i) / 64][i % 4 / 2];
    }
}

// Multiplies one tile with both warpgroups. Each has 64 rows of gate and up. Of the rows above 128,
// warpgroup 0 has gate and 1 has up.
template <int REST>
__device__ __forceinline__ void multiply_rows(const Shared& shared, const Tile& tile, int half, int k_blocks,
                                              const Results& results, Ring& ring) {
    constexpr int FEW = REST ? REST : 16;
    float sums[2][64], rest[2][FEW / 2];
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll
    for (int i = 0; i < FEW / 2; ++i) rest[0][i] = rest[1][i] = 0.f;
    int lane = threadIdx.x % 32, own = half * 64 + threadIdx.x / 32 % 4 * 16 + lane / 8 * 4 + lane / 4 % 2;

    for (int block = 0; block < k_blocks; ++block) {
        barrier_wait(&shared.full[ring.stage], ring.phase);
        const float* scales = shared.scales + ring.stage * 2 * N_MAX;
        u32 weights = shared_address(shared.weights + ring.stage * WEIGHT_BYTES);
        u32 rows = shared_address(shared.rows + ring.stage * ROW_BYTES);
        u64 a = operand(rows + half * 64 * K_BLOCK);
        if (REST < 32) {
            add_columns<0, 128>(sums, a, weights, scales + own);
            add_columns<128, 128>(sums, a, weights, scales + own);
        } else {  // in smaller parts, because registers also hold the rest
            add_columns<0, 64>(sums, a, weights, scales + own);
            add_columns<64, 64>(sums, a, weights, scales + own);
            add_columns<128, 64>(sums, a, weights, scales + own);
            add_columns<192, 64>(sums, a, weights, scales + own);
        }
        if (REST) {
            const float4* each = reinterpret_cast<const float4*>(scales + half * N_MAX + 128) + lane % 4;
            u64 b = operand(rows + 128 * K_BLOCK);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float part[FEW / 2];
                product<FEW>(part, operand(weights + (half * 128 + h * 64) * K_BLOCK), b);
                add_scaled<FEW, 0>(rest[h], part, nullptr, each);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
        ring.advance();
    }

    store_rows(sums, tile, half, results);
    if (REST) store<FEW>(rest, 128, shared, tile, half, results);
}
