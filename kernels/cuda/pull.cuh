// The epilogue of dA: the backward of the activation, the scaled activation and the routing gradient.
#pragma once

#include "rows_args.cuh"

namespace {

/// 16 rows of a slice of both halves of h on their way to ``place``, ``rows`` of them.
__device__ __forceinline__ void fetch(uint32_t place, const RowsArgs& p, long long row, int rows, int column, int lane) {
    const __nv_bfloat16* h = p.saved + row * 2 * p.columns + column;
#pragma unroll
    for (int i = 0; i < 16 * kSlice / 8 / 32; ++i) {
        const int chunk = lane + 32 * i, r = chunk / (kSlice / 8), c = chunk % (kSlice / 8) * 8;
        if (r < rows && column + c < p.columns) {
            const __nv_bfloat16* from = h + static_cast<long long>(r) * 2 * p.columns + c;
            ptx::copy16(place + r * kPitchS + c * 2, from + p.gate);
            ptx::copy16(place + 16 * kPitchS + r * kPitchS + c * 2, from + p.up);
        }
    }
}

/// Two columns of da: the gate and the up at ``at`` become their gradients, scale * a follows them, and ``dot`` grows by
/// da * a where ``held``. da is rounded, as a product of its own would be.
__device__ __forceinline__ void pull_pair(float low, float high, float& dot, uint32_t at, float scale, bool held) {
    const float2 g = ptx::unpack(ptx::load4(at)), u = ptx::unpack(ptx::load4(at + 16 * kPitchS));
    low = rounded(low), high = rounded(high);
    const float s0 = sigmoid(g.x), s1 = sigmoid(g.y);
    const float b0 = g.x * s0, b1 = g.y * s1, a0 = b0 * u.x, a1 = b1 * u.y;
    ptx::store4(at + 32 * kPitchS, ptx::pack(a0 * scale, a1 * scale));
    if (held) dot += low * a0 + high * a1;
    low *= scale, high *= scale;
    ptx::store4(at, ptx::pack(low * u.x * (s0 + b0 * (1.0f - s0)), high * u.y * (s1 + b1 * (1.0f - s1))));
    ptx::store4(at + 16 * kPitchS, ptx::pack(low * b0, high * b1));
}

/// The gradients of 64 rows, of which a warp holds 16 x 192 of da. ``fetched``: the first slice of h is under way.
__device__ __forceinline__ void pull_rows(const float (&d)[96], const RowsArgs& p, const Tile& tile, int row, int rows,
                                          uint32_t place, bool fetched, int lane) {
    float scale[2] = {1.0f, 1.0f}, dot[2] = {0.0f, 0.0f};
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const int r = lane / 4 + 8 * low;
        if (p.scale != nullptr && r < rows) scale[low] = p.scale[p.index[row + r]];
    }
    __nv_bfloat16* dh = p.h + static_cast<long long>(row) * 2 * p.columns;
    __nv_bfloat16* scaled = p.out + static_cast<long long>(row) * p.columns;
#pragma unroll
    for (int slice = 0; slice < kColumns / kSlice; ++slice) {
        const int column = tile.column * kColumns + slice * kSlice;
        if (slice || !fetched) fetch(place, p, row, rows, column, lane);
        ptx::wait_copies();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kSlice / 8; ++i) {
            const bool held = column + 8 * i < p.columns;
            const uint32_t at = place + lane / 4 * kPitchS + i * 16 + lane % 4 * 4;
            const float* v = d + slice * (kSlice / 2) + 4 * i;
            pull_pair(v[0], v[1], dot[0], at, scale[0], held);
            pull_pair(v[2], v[3], dot[1], at + 8 * kPitchS, scale[1], held);
        }
        flush<kSlice, kPitchS>(place, dh + p.gate, 2 * p.columns, rows, column, p.columns, lane);
        flush<kSlice, kPitchS>(place + 16 * kPitchS, dh + p.up, 2 * p.columns, rows, column, p.columns, lane);
        flush<kSlice, kPitchS>(place + 32 * kPitchS, scaled, p.columns, rows, column, p.columns, lane);
    }
#pragma unroll
    for (int low = 0; low < 2; ++low) {
        const int r = lane / 4 + 8 * low;
        dot[low] += __shfl_xor_sync(~0u, dot[low], 1);
        dot[low] += __shfl_xor_sync(~0u, dot[low], 2);
        const int wide = (p.columns + kColumns - 1) / kColumns;
        if (p.dots != nullptr && lane % 4 == 0 && r < rows)
            p.dots[static_cast<long long>(row + r) * wide + tile.column] = dot[low];
    }
}

}  // namespace
