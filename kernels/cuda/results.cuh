// Results on their way from registers through shared memory to global memory, each warp for itself.
#pragma once

#include "pipeline.cuh"

namespace {

constexpr int kPitch = kPart * 2 + 16;           // bytes of a row of results on their way out: no two rows in one bank
constexpr int kPitchT = kRows * 2 + 16;          // the same, of a column

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float sigmoid(float x) {
    return ptx::rcp_approx(1.0f + ptx::exp2_approx(x * -1.44269504f));
}

/// 16 rows of ``COLUMNS`` columns from the registers of one warp to ``place``, rows ``kPitch`` bytes apart.
template <int COLUMNS>
__device__ __forceinline__ void put(uint32_t place, const float* d, int lane) {
    const uint32_t at = place + (lane % 16) * kPitch + (lane / 16) * 16;
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j)
        ptx::store_blocks<false>(at + j * 32, ptx::pack(d[8 * j], d[8 * j + 1]), ptx::pack(d[8 * j + 2], d[8 * j + 3]),
                                 ptx::pack(d[8 * j + 4], d[8 * j + 5]), ptx::pack(d[8 * j + 6], d[8 * j + 7]));
}

/// ``rows`` of 16 rows at ``place``, and the columns below ``limit``, to ``to``, whose first column is ``column``.
__device__ __forceinline__ void flush(uint32_t place, __nv_bfloat16* to, long long stride, int rows, int column, int limit,
                                      int lane) {
    __syncwarp();
#pragma unroll 3
    for (int i = 0; i < 16 * kPart / 8 / 32; ++i) {
        const int chunk = lane + 32 * i, row = chunk / (kPart / 8), c = chunk % (kPart / 8) * 8;
        if (row < rows && column + c < limit)
            *reinterpret_cast<int4*>(to + row * stride + column + c) = ptx::load16(place + row * kPitch + c * 2);
    }
    __syncwarp();
}

/// 16 x 192 results from the registers of a warp to ``out``, rows ``stride`` apart: the first ``rows`` of them, and the
/// first ``columns`` of their columns.
__device__ __forceinline__ void store_tile(const float (&d)[96], __nv_bfloat16* out, int stride, int rows, int columns,
                                           uint32_t place, int lane) {
    const int row = lane / 8, c = lane % 8 * 8;
    const uint32_t from = place + row * kPitch + c * 2;
    __nv_bfloat16* to = out + static_cast<long long>(row) * stride + c;
#pragma unroll
    for (int part = 0; part < kColumns; part += 64, to += 64 - 16ll * stride) {
        const int held = part + c < columns ? rows - row : 0;
        put<64>(place, d + part / 2, lane);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 16; j += 4, to += 4ll * stride)
            if (j < held) ptx::write16(to, ptx::load16(from + j * kPitch));
        __syncwarp();
    }
}

}  // namespace
