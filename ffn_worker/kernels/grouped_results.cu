// Results of grouped.cu: turns a tile's sums into silu(gate) * up in FP8, with a scale per 128 columns.

// The scale of a block from the bits of its largest magnitude; rounds as codecs_triton.fp8_block.
__device__ __forceinline__ float block_scale(u32 most) {
    float scale = __uint_as_float(most) / 448.f;
    if (scale < 1e-30f) scale = 1.f;
    if (most >= 0x7F800000u) scale = __uint_as_float(0x7FC00000u);
    return scale;
}

__device__ __forceinline__ unsigned short codes(float low, float high) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    return two;
}

__device__ __forceinline__ float rounded(float value) {  // to bfloat16
    return __uint_as_float(packed(value, 0.f) << 16);
}

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }

// silu(gate) * up of 8 columns in FP8. The scale is that of 128 columns, which 16 lanes hold together.
__device__ __forceinline__ uint2 gated(uint4 gate, uint4 up, float& scale) {
    const u32 g[4] = {gate.x, gate.y, gate.z, gate.w}, u[4] = {up.x, up.y, up.z, up.w};
    float v[8];
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float a = __uint_as_float(i % 2 ? g[i / 2] & 0xFFFF0000u : g[i / 2] << 16);
        float b = __uint_as_float(i % 2 ? u[i / 2] & 0xFFFF0000u : u[i / 2] << 16);
        v[i] = gated(a, b);
        most = max(most, magnitude(v[i]));
    }
#pragma unroll
    for (int d = 1; d < 16; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
    scale = block_scale(most);
    float inverse = 1.f / scale;
    u32 four[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned short low = codes(v[i * 4] * inverse, v[i * 4 + 1] * inverse);
        unsigned short high = codes(v[i * 4 + 2] * inverse, v[i * 4 + 3] * inverse);
        four[i] = low | static_cast<u32>(high) << 16;
    }
    return make_uint2(four[0], four[1]);
}

struct Results {
    char* codes;    // [room, columns]
    float* scales;  // [columns / 128, room]
    int columns, room;
};

// Stores N rows of results, from row `first` of the tile on, for two times 64 columns of this warpgroup.
// They pass through shared memory in bfloat16, 16 rows at a time. There gate and up of a value come
// together and columns are transposed to rows.
template <int N>
__device__ __forceinline__ void store(const float (&sums)[2][N / 2], int first, const Shared& shared,
                                      const Tile& tile, int half, const Results& results) {
    int thread;  // read here, so that no register holds an address during the loop
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    int warp = thread / 32 % 4, matrix = thread % 32 / 8, row_in = matrix / 2 * 8 + thread % 8;
    u32 to = shared_address(shared.staged) + half * STAGED * STAGED_ROW + row_in * STAGED_ROW;
    int r = thread / 16, piece = thread % 16;  // pieces of 16 bytes are swizzled by row
    const char* from = shared.staged + r * STAGED_ROW + (piece ^ (r & 7)) * 16;
    long long slot = tile.slot + first + r;
    char* codes_at = results.codes + slot * results.columns + tile.column + piece * 8;
    float* scale_at = results.scales + (long long)(tile.column / 128) * results.room + slot;
#pragma unroll
    for (int n = 0; n < N; n += STAGED) {
        if (first + n < tile.rows) {
            named_sync(1, 256);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float* s = &sums[h][n / 2];
                asm volatile(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                        to + ((h * 8 + warp * 2 + matrix % 2) ^ (row_in & 7)) * 16),
                    "r"(packed(s[0], s[1])), "r"(packed(s[2], s[3])), "r"(packed(s[4], s[5])),
                    "r"(packed(s[6], s[7]))
                    : "memory");
            }
            named_sync(1, 256);
            float scale;
            uint2 codes = gated(*reinterpret_cast<const uint4*>(from),
                                *reinterpret_cast<const uint4*>(from + STAGED * STAGED_ROW), scale);
            if (first + n + r < tile.rows) {
                *reinterpret_cast<uint2*>(codes_at) = codes;
                if (piece == 0) *scale_at = scale;
            }
            codes_at += STAGED * results.columns;
            scale_at += STAGED;
        }
    }
}
