// The epilogue of dA: the backward of the activation, the scaled activation and the routing gradient.
#pragma once

#include "rows_args.cuh"

namespace {

constexpr int kPitchWide = kColumns * 2 + 16;  // bytes of a row of da on its way: 8 rows of a warp, all its columns

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
    const int quarter = lane / 8, first_column = tile.column * kColumns + lane % 8 * 8;
    const int held = (rows < 16 ? rows : 16) - quarter, left = p.columns - first_column;  // of this lane's rows and columns
    const long long start = static_cast<long long>(row + quarter) * p.columns + first_column, four = 4ll * p.columns;
    const long long start_h = start + static_cast<long long>(row + quarter) * p.columns;
    const __nv_bfloat16 *gates = p.saved + start_h + p.gate, *ups = p.saved + start_h + p.up;
    __nv_bfloat16 *to_gates = p.h + start_h + p.gate, *to_ups = p.h + start_h + p.up, *out = p.out + start;
    int4 gate[kWide], up[kWide];
    const auto load = [&](int k, int i) {
        gate[i] = up[i] = make_int4(0, 0, 0, 0);  // registers that are not set are taken from everything before
        if (k < held && 64 * i < left) {
            gate[i] = *reinterpret_cast<const int4*>(gates + 64 * i);
            up[i] = *reinterpret_cast<const int4*>(ups + 64 * i);
        }
    };
    uint32_t low[kColumns / 8];  // rows 8 to 15, once rows 0 to 7 are done
    const auto put = [&](const uint32_t (&v)[kColumns / 8]) {
        const uint32_t at = place + lane % 8 * kPitchWide + lane / 8 * 16;
#pragma unroll
        for (int j = 0; j < kColumns / 32; ++j)
            ptx::store_blocks<false>(at + j * 64, v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
        __syncwarp();
    };
    {
        uint32_t high[kColumns / 8];
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            high[j] = ptx::pack(d[4 * j], d[4 * j + 1]);
            low[j] = ptx::kept(ptx::pack(d[4 * j + 2], d[4 * j + 3]));  // now, not in the loop
        }
        put(high);
    }
#pragma unroll
    for (int i = 0; i < kWide; ++i) load(0, i);
#pragma unroll 1
    for (int k = 0; k < 16; k += 4) {
        if (k == 8) {
            __syncwarp();
            put(low);
        }
        const float scale = __shfl_sync(~0u, scales, first + k + quarter);
        const uint32_t at = place + (k % 8 + quarter) * kPitchWide + lane % 8 * 16;
        float dot = 0.0f;
        gates += 2 * four, ups += 2 * four;
#pragma unroll
        for (int i = 0; i < kWide; ++i) {
            if (k < held && 64 * i < left) {
                int4 da = ptx::load16(at + i * 128);
                dot += pull_chunk(da, gate[i], up[i], scale);
                ptx::write16(to_gates + 64 * i, gate[i]);
                ptx::write16(to_ups + 64 * i, up[i]);
                ptx::write16(out + 64 * i, da);
            }
            load(k + 4, i);  // under way while the rest of this row is done
        }
        to_gates += 2 * four, to_ups += 2 * four, out += four;
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) dot += __shfl_xor_sync(~0u, dot, lanes);
        const int wide = (p.columns + kColumns - 1) / kColumns;
        if (lane % 8 == 0 && k < held) p.dots[static_cast<long long>(row + k + quarter) * wide + tile.column] = dot;
    }
    __syncwarp();
}

}  // namespace
