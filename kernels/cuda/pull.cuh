// The epilogue of dA: the backward of the activation, the scaled activation and the routing gradient.
#pragma once

#include "rows_args.cuh"

namespace {

/// The routing weights of a tile's rows, of which a warp has 16 in each block of 64, a lane one; and a call for their rows
/// of h, which come into the second level cache while others work.
__device__ __forceinline__ float prepare(const RowsArgs& p, const Tile& tile, int row, int rows, int lane) {
    const int r = lane % 16 + lane / 16 * 64;
    if (r >= rows) return 0.0f;
    const __nv_bfloat16* h = p.saved + static_cast<long long>(row + r) * 2 * p.columns;
#pragma unroll
    for (int i = 0; i < kColumns; i += 64) {
        const int column = tile.column * kColumns + i;
        if (column < p.columns) {
            ptx::prefetch(h + p.gate + column);
            ptx::prefetch(h + p.up + column);
        }
    }
    return p.scale == nullptr ? 1.0f : p.scale[p.index[row + r]];
}

/// Two columns of da, gate and up: both become their gradients, da scale * a; the result is da * a. da is rounded, as a
/// product of its own would be.
__device__ __forceinline__ float pull_pair(uint32_t& da, uint32_t& gate, uint32_t& up, float scale) {
    const float2 g = ptx::unpack(gate), u = ptx::unpack(up);
    float2 d = ptx::unpack(da);
    const float s0 = sigmoid(g.x), s1 = sigmoid(g.y);
    const float b0 = g.x * s0, b1 = g.y * s1, a0 = b0 * u.x, a1 = b1 * u.y;
    const float dot = d.x * a0 + d.y * a1;
    da = ptx::pack(a0 * scale, a1 * scale);
    d.x *= scale, d.y *= scale;
    gate = ptx::pack(d.x * u.x * (s0 + b0 * (1.0f - s0)), d.y * u.y * (s1 + b1 * (1.0f - s1)));
    up = ptx::pack(d.x * b0, d.y * b1);
    return dot;
}

__device__ __forceinline__ float pull_chunk(int4& da, int4& gate, int4& up, float scale) {
    uint32_t* d = reinterpret_cast<uint32_t*>(&da);
    uint32_t *g = reinterpret_cast<uint32_t*>(&gate), *u = reinterpret_cast<uint32_t*>(&up);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) dot += pull_pair(d[i], g[i], u[i], scale);
    return dot;
}

/// The gradients of the rows of which a warp holds 16 x 192 of da: through shared memory, then eight lanes a row. Lane
/// ``first`` + r knows the weight of row r.
__device__ __forceinline__ void pull_rows(const float (&d)[96], const RowsArgs& p, const Tile& tile, int row, int rows,
                                          float scales, int first, uint32_t place, int lane) {
    constexpr int kWide = kColumns / 64;
    const auto held = [&](int r, int i) { return r < rows && tile.column * kColumns + lane % 8 * 8 + 64 * i < p.columns; };
    const auto at = [&](int r, int i) {  // of h and of its gradient
        return static_cast<long long>(row + r) * 2 * p.columns + tile.column * kColumns + lane % 8 * 8 + 64 * i;
    };
    const auto load = [&](int r, int4 (&gate)[kWide], int4 (&up)[kWide]) {
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            gate[i] = up[i] = make_int4(0, 0, 0, 0);  // registers that are not set are taken from everything before
            if (held(r, i)) {
                gate[i] = *reinterpret_cast<const int4*>(p.saved + at(r, i) + p.gate);
                up[i] = *reinterpret_cast<const int4*>(p.saved + at(r, i) + p.up);
            }
        }
    };
    put<kPart>(place, d, lane);
    put<kPart>(place + 16 * kPitch, d + 48, lane);
    __syncwarp();
    int4 gate[kWide], up[kWide];
    load(lane / 8, gate, up);
#pragma unroll 1
    for (int r = lane / 8; r < 16; r += 4) {
        const float scale = __shfl_sync(~0u, scales, first + r);
        float dot = 0.0f;
        int4 later_gate[kWide], later_up[kWide];
        load(r + 4 < 16 ? r + 4 : rows, later_gate, later_up);  // under way while this row is done
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            if (held(r, i)) {
                const int c = lane % 8 * 8 + 64 * i;
                int4 da = ptx::load16(place + c / kPart * (16 * kPitch) + r * kPitch + c % kPart * 2);
                dot += pull_chunk(da, gate[i], up[i], scale);
                *reinterpret_cast<int4*>(p.h + at(r, i) + p.gate) = gate[i];
                *reinterpret_cast<int4*>(p.h + at(r, i) + p.up) = up[i];
                *reinterpret_cast<int4*>(p.out + static_cast<long long>(row + r) * p.columns + tile.column * kColumns + c) = da;
            }
            gate[i] = later_gate[i], up[i] = later_up[i];
        }
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) dot += __shfl_xor_sync(~0u, dot, lanes);
        const int wide = (p.columns + kColumns - 1) / kColumns;
        if (lane % 8 == 0 && r < rows) p.dots[static_cast<long long>(row + r) * wide + tile.column] = dot;
    }
    __syncwarp();
}

}  // namespace
