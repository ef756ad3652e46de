// What the kernels use of CUDA's own headers and language, for g++. Threads are fibers: see machine.h.
#pragma once

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

/// Rows of ``columns`` 16-bit values, ``stride`` bytes apart, read in boxes under the 128-byte swizzle.
struct alignas(64) CUtensorMap {
    uint64_t magic;
    const uint8_t* base;
    int64_t columns, rows, stride;
    int64_t box_columns, box_rows;
    uint64_t unused[9];
};
constexpr uint64_t kMapMagic = 0x6d61702d656d756c;

struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

struct Index3 {
    unsigned x, y, z;
};
extern Index3 threadIdx, blockIdx, gridDim;  // of the fiber that runs

namespace emulate {
/// Waits for all lanes of the warp at the same call; ``source``'s value.
uint64_t meet(int kind, uint64_t value, int source);
}  // namespace emulate

void __syncthreads();
inline void __syncwarp() { emulate::meet(1, 0, 0); }

template <class T>
inline T __shfl_sync(unsigned, T value, int source, int width = 32) {
    uint64_t bits = 0;
    static_assert(sizeof(T) <= 8);
    std::memcpy(&bits, &value, sizeof(T));
    const int lane = static_cast<int>(threadIdx.x % 32);
    bits = emulate::meet(2, bits, lane / width * width + source % width);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

inline int __all_sync(unsigned mask, int value) {
    int all = 1;
    for (int lane = 0; lane < 32; ++lane) all &= __shfl_sync(mask, value, lane) != 0;
    return all;
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes);
}

/// Fibers switch only where they wait.
inline int atomicAdd(int* to, int value) {
    const int before = *to;
    *to += value;
    return before;
}
