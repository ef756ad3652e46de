// Rows times their expert's matrix, with biases, an activation or the backward of one.
#pragma once

#include <type_traits>

#include "pull.cuh"

namespace {

// what becomes of a product: stored as it is; h, of columns gate | up, or gate and up in turn; the gradient of the
// activation of an h that was saved, gate | up
enum class Kind { kPlain, kGated, kInterleaved, kPull };
enum class Act { kNone, kSilu, kClamped };

template <Act ACT>
__device__ __forceinline__ float activate(float gate, float up, float alpha, float limit) {
    if constexpr (ACT == Act::kSilu) {
        return gate * sigmoid(gate) * up;
    } else {
        gate = gate > limit ? limit : gate;  // NaN stays
        up = up > limit ? limit : up < -limit ? -limit : up;
        return (up + 1.0f) * (gate * sigmoid(gate * alpha));
    }
}

/// The activation of eight gates and ups, in the gates' place.
template <Act ACT>
__device__ __forceinline__ void activate_chunk(int4& gate, const int4& up, float alpha, float limit) {
    uint32_t* gates = reinterpret_cast<uint32_t*>(&gate);
    const uint32_t* ups = reinterpret_cast<const uint32_t*>(&up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 g = ptx::unpack(gates[i]), u = ptx::unpack(ups[i]);
        gates[i] = ptx::pack(activate<ACT>(g.x, u.x, alpha, limit), activate<ACT>(g.y, u.y, alpha, limit));
    }
}

/// Adds the biases of ``COLUMNS`` columns from ``bias`` on, of which ``columns`` count.
template <int COLUMNS>
__device__ __forceinline__ void add_bias(float* d, const __nv_bfloat16* bias, int columns, int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        const int c = 8 * i + lane % 4 * 2;
        if (c < columns) {
            const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(bias + c));
            d[4 * i] += b.x, d[4 * i + 1] += b.y, d[4 * i + 2] += b.x, d[4 * i + 3] += b.y;
        }
    }
}

/// Results of 64 rows, of which a warp holds 16 x 192, to memory: rounded, with the activation, h where it is saved.
template <Kind KIND, Act ACT, bool BIAS>
__device__ __forceinline__ void store_rows(float (&d)[96], const RowsArgs& p, const Tile& tile, int row, int rows,
                                           uint32_t place, int lane) {
    const int narrow = KIND == Kind::kPlain ? p.columns : p.columns / 2;
    __nv_bfloat16* out = p.out + static_cast<long long>(row) * narrow;
    __nv_bfloat16* h = KIND == Kind::kPlain || p.h == nullptr ? nullptr : p.h + static_cast<long long>(row) * p.columns;
    if constexpr (KIND == Kind::kGated) {
        constexpr int kSlice = kPart / 2;  // of gate and of up, side by side in shared memory
#pragma unroll
        for (int slice = 0; slice < 2; ++slice) {
            const int column = tile.column * kPart + slice * kSlice;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float* part = d + 48 * half + 24 * slice;
                if constexpr (BIAS)
                    add_bias<kSlice>(part, p.bias + static_cast<long long>(tile.expert) * p.columns + (half ? p.up : p.gate) + column,
                                     narrow - column, lane);
                put<kSlice>(place + half * kSlice * 2, part, lane);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 16 * kSlice / 8 / 32; ++i) {
                const int chunk = lane + 32 * i, r = chunk / (kSlice / 8), c = chunk % (kSlice / 8) * 8;
                if (r < rows && column + c < narrow) {
                    const uint32_t from = place + r * kPitch + c * 2;
                    int4 gate = ptx::load16(from);
                    const int4 up = ptx::load16(from + kSlice * 2);
                    if (h != nullptr) {
                        __nv_bfloat16* to = h + static_cast<long long>(r) * p.columns + column + c;
                        *reinterpret_cast<int4*>(to + p.gate) = gate;
                        *reinterpret_cast<int4*>(to + p.up) = up;
                    }
                    activate_chunk<ACT>(gate, up, p.alpha, p.limit);
                    *reinterpret_cast<int4*>(out + static_cast<long long>(r) * narrow + column + c) = gate;
                }
            }
            __syncwarp();
        }
    } else {
        const int column = tile.column * kColumns;
        if constexpr (BIAS)
            add_bias<kColumns>(d, p.bias + static_cast<long long>(tile.expert) * p.columns + column, p.columns - column, lane);
        __nv_bfloat16* to = KIND == Kind::kPlain ? out : h;
        if (to != nullptr) store_tile(d, to + column, p.columns, rows, p.columns - column, place, lane);
        if constexpr (KIND == Kind::kInterleaved) {
            const uint32_t at = place + lane / 4 * kPitch + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 24; ++i) {
                const float top = activate<ACT>(rounded(d[4 * i]), rounded(d[4 * i + 1]), p.alpha, p.limit);
                const float low = activate<ACT>(rounded(d[4 * i + 2]), rounded(d[4 * i + 3]), p.alpha, p.limit);
                ptx::store2(at + i * 8, static_cast<uint16_t>(ptx::pack(top, 0.0f)));
                ptx::store2(at + 8 * kPitch + i * 8, static_cast<uint16_t>(ptx::pack(low, 0.0f)));
            }
            flush(place, out, narrow, rows, tile.column * kPart, narrow, lane);
        }
    }
}

/// Rows times their expert's matrix.
template <Kind KIND, Act ACT, bool BIAS, int MN_B, bool GATHERED, int CLUSTER>
__device__ __forceinline__ void rows_body(const RowsArgs& p) {
    constexpr int STAGES = 5, kPlace = 16 * kPitch;
    static_assert(8 * kPitchWide <= kPlace);
    using Place = Memory<STAGES, 8 * kPlace>;
    static_assert(Place::kBytes <= 232448);
    extern __shared__ __align__(1024) uint8_t shared[];
    const Place m{ptx::address(shared)};
    set_up<CLUSTER, STAGES, GATHERED>(m);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int lane = threadIdx.x % 32, steps = p.depth / kDepth;
    const uint32_t rank = CLUSTER == 1 ? 0 : ptx::cluster_rank();
    // a tile of the cluster has up to 128 rows for each program; of a short one both take as much as they can in halves of 64
    const auto rows_of = [rank](const Tile& tile) {
        const int each = CLUSTER == 1 ? kRows : tile.rows <= kRows ? kRows / 2 : kRows;
        const int left = tile.rows - static_cast<int>(rank) * each;
        return left < each ? left : each;
    };
    const auto row_of = [rank](const Tile& tile) {
        return tile.row + static_cast<int>(rank) * (tile.rows <= kRows ? kRows / 2 : kRows);
    };
    Ring<STAGES> ring;
    if (group == 2) {
        ptx::fewer_registers<kLoader>();
        const Place own{__shfl_sync(~0u, m.base, 0)};  // in a register, not computed again at each use
        const int width = KIND == Kind::kGated ? kPart : kColumns;
        const int columns = ((KIND == Kind::kGated ? p.columns / 2 : p.columns) + width - 1) / width;
        const bool loads = warp == 0 && ptx::elect(), deals = warp == 1 && lane == 0 && rank == 0;
        const int row_tiles = deals ? p.tiles.counters[0] : 0;
        Dealer<CLUSTER, decltype(m)> dealer(m, p.tiles.counters, row_tiles * columns);
        const auto deal = [&] {
            return dealer.deal([&](int t) {
                constexpr int kTall = kGroup / CLUSTER;
                const int first = t / (kTall * columns) * kTall;
                const int size = row_tiles - first < kTall ? row_tiles - first : kTall;
                const int r = t - first * columns, row = first + r % size;
                const int* at = p.tiles.list + 3 * row;
                return make_int4(at[0], at[1], at[2], r / size);
            });
        };
        bool more = deals && deal() && deal();
        if (!GATHERED && deals)
            while (more) more = deal();
        else if (GATHERED || loads) {
            // a warp copies 32 rows, four at a time: 8 lanes for the 64 columns of each; a lane knows where one row starts,
            // the last that counts for those that do not
            const uint32_t top = (warp * 32 + lane / 8) * 128 + ((lane % 8 ^ lane / 8) << 4);
            const auto source = [&](const Tile& tile) {
                const int held = rows_of(tile), r = warp * 32 + lane < held ? warp * 32 + lane : held - 1;
                return !GATHERED || tile.expert < 0 || held <= 0 ? 0 : p.divide(p.index[row_of(tile) + r]) * p.stride;
            };
            if (loads) ptx::prefetch_map(&p.b);
            Tile next = hear<GATHERED, CLUSTER>(own, 0);
            unsigned from = source(next);
            for (int i = 0; next.expert >= 0; ++i) {
                const int held = rows_of(next), row = row_of(next), depth = MN_B ? next.expert * p.depth : 0;
                int first = next.column * kColumns, second = first + kPart;
                if constexpr (KIND == Kind::kGated) first = p.gate + next.column * kPart, second = p.up + next.column * kPart;
                if constexpr (!MN_B) first += next.expert * p.columns, second += next.expert * p.columns;
                const int4* x = p.x + lane % 8;
                unsigned offset[8];
                if constexpr (GATHERED) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) offset[j] = __shfl_sync(~0u, from, 4 * j + lane / 8);
                }
#pragma unroll 1
                for (int s = 0; s < steps; ++s) {
                    if (s == steps / 2) {  // while stages are full: what the next tile needs first
                        if (more) more = deal();
                        if constexpr (GATHERED) __syncwarp();
                        next = hear<GATHERED, CLUSTER>(own, i + 1);
                        from = source(next);
                    }
                    const int stage = GATHERED ? __shfl_sync(~0u, ring.stage, 0) : ring.stage;  // one of a warp, to the compiler too
                    const int4* at[kEarly];  // while there is time, in registers of their own
#pragma unroll
                    for (int j = 0; j < kEarly; ++j) at[j] = ptx::kept(x + offset[j]);
                    wait_empty<CLUSTER>(own, stage, ring.phase, !GATHERED || warp == 0);
                    if (GATHERED ? warp == 0 && ptx::elect() : loads) {
                        const bool dense = !GATHERED && held > 0;
                        ptx::arrive_expect(own.full(stage), kBytesB + (dense ? kBytesA : 0));
                        if (dense) ptx::load(own.a(stage), &p.a, own.full(stage), s * kDepth, row);
                        load_columns<CLUSTER, MN_B>(&p.b, own.b(stage), own.full(stage), rank, s * kDepth + depth,
                                                    first, second);
                    }
                    if constexpr (GATHERED) {
                        if (warp * 32 < held) {
                            const uint32_t even = own.a(stage) + top, odd = even ^ 64;
#pragma unroll
                            for (int j = 0; j < 8; ++j)
                                ptx::copy16((j & 1 ? odd : even) + j * 512, j < kEarly ? at[j] : x + offset[j]);
                        }
                        ptx::arrive_after_copies(own.full(stage));
                        x = ptx::kept(x + kDepth / 8);
                    }
                    ring.next();
                }
            }
        }
    } else {
        ptx::more_registers<kMultiplier>();
        const uint32_t place = m.results() + (group * 4 + warp) * kPlace;
        // the results of the first ``halves`` blocks of 64 rows
        const auto finish = [&](float (&d)[2][96], const Tile& tile, int row, int rows, int halves, float scales) {
            if constexpr (KIND == Kind::kPull) {
                pull_rows(d[0], p, tile, row, rows, scales, 0, place, lane);
                if (halves == 2) pull_rows(d[1], p, tile, row + 64, rows - 64, scales, 16, place, lane);
            } else {
                store_rows<KIND, ACT, BIAS>(d[0], p, tile, row, rows, place, lane);
                if (halves == 2) store_rows<KIND, ACT, BIAS>(d[1], p, tile, row + 64, rows - 64, place, lane);
            }
        };
        for (int i = 0;; ++i) {
            const Tile tile = hear<true, CLUSTER>(m, i);
            if (tile.expert < 0) break;
            if ((i & 1) != group) {
                ring.skip(steps);
                continue;
            }
            float d[2][96];
            clear(d);
            const int rows = rows_of(tile), row = row_of(tile) + warp * 16;
            // what the epilogue reads first comes while the tensor cores work
            const float scales = KIND == Kind::kPull ? prepare(p, tile, row, rows - warp * 16, lane) : 0.0f;
            // the last columns of a matrix do not cost a whole tile
            const int columns = KIND == Kind::kGated ? kColumns : p.columns - tile.column * kColumns;
            const auto times = [&](auto halves) {
                if (columns > 128)
                    multiply<halves.value, kColumns, CLUSTER, STAGES, 0, MN_B, GATHERED>(d, m, ring, steps, lane, group);
                else if (columns > 64)
                    multiply<halves.value, 128, CLUSTER, STAGES, 0, MN_B, GATHERED>(d, m, ring, steps, lane, group);
                else
                    multiply<halves.value, 64, CLUSTER, STAGES, 0, MN_B, GATHERED>(d, m, ring, steps, lane, group);
            };
            wait_turn(i, group);
            if (rows > 64) {
                times(std::integral_constant<int, 2>());
                finish(d, tile, row, rows - warp * 16, 2, scales);
            } else if (rows > 0) {
                times(std::integral_constant<int, 1>());
                finish(d, tile, row, rows - warp * 16, 1, scales);
            } else {
                for (int s = 0; s < steps; ++s, ring.next()) {
                    ptx::wait(m.full(ring.stage), ring.phase);
                    __syncwarp();
                    if (lane == 0) give_back<CLUSTER, GATHERED>(m, ring.stage);
                }
                end_turn(group);
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        ptx::cluster_sync();  // the others still write here until they are done
    }
}

}  // namespace
