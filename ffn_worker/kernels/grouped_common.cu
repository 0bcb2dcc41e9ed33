// Shared by the grouped kernels for NVIDIA Hopper: barriers, copies, operands of wgmma, the ring of
// stages, and the first tile of each expert. The including source defines STAGES.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 words[16]; };

__device__ __forceinline__ u32 shared_address(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 at = shared_address(barrier), done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Needed because asynchronous copies write rows through the generic proxy, and the tensor cores read
// them through the async proxy.
__device__ __forceinline__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Descriptor of an operand in shared memory: K-major, rows of 128 bytes, swizzled by 128 bytes.
__device__ __forceinline__ u64 operand(u32 at) {
    return static_cast<u64>((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

struct Ring {
    int stage;
    u32 phase;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}

// silu(gate) * up.
__device__ __forceinline__ float gated(float gate, float up) {
    return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// One expert: number of its first row tile, its first slot, and its rows.
struct Group {
    int first_tile, begin, rows;
};

// Computes the groups of all experts, with one warp, from the ends of their runs. A run begins at a
// multiple of pad. most: rows of the largest tile. Returns the number of row tiles.
__device__ __forceinline__ int find_groups(const int* ends, int experts, int pad, int most, Group* groups) {
    int lane = threadIdx.x % 32, tiles = 0, last = 0;
    for (int base = 0; base < experts; base += 32) {
        bool real = base + lane < experts;
        int end = real ? ends[base + lane] : 0, before = __shfl_up_sync(~0u, end, 1);
        if (lane == 0) before = last;
        int begin = (before + pad - 1) / pad * pad, rows = real ? end - begin : 0;
        int parts = (rows + most - 1) / most, sum = parts;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += other;
        }
        if (real) groups[base + lane] = {tiles + sum - parts, begin, rows};
        tiles += __shfl_sync(~0u, sum, 31);
        last = __shfl_sync(~0u, end, 31);
    }
    if (lane == 0) groups[experts].first_tile = tiles;
    return tiles;
}
