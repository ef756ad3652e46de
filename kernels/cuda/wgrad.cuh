// Weight gradients: the sum over an expert's rows of a gathered row times a dense one.
#pragma once

#include "results.cuh"

struct WgradArgs {
    CUtensorMap b;  // dense rows [N, columns]
    Tiles tiles;
    const int4* x;  // gathered rows [., rows], 16 * ``stride`` bytes apart
    const long long* index;
    unsigned stride;
    Divide divide;  // by the rows of x that a row stands for
    __nv_bfloat16* out;  // [E, rows, columns] or [E, columns, rows]
    int rows, columns;
};

// driver.py has the same fields
static_assert(offsetof(WgradArgs, tiles) == 128 && offsetof(WgradArgs, x) == 160 && offsetof(WgradArgs, out) == 192 &&
              offsetof(WgradArgs, columns) == 204 && sizeof(WgradArgs) <= 512);

namespace {

/// Where one warpgroup finds its columns of a stage that two share, or all of one that it has to itself, in turn.
template <class M, int SIDES>
struct Side : M {
    static constexpr bool kTurns = SIDES == 1;
    uint32_t columns;
    __device__ uint32_t b(int s) const { return M::b(s) + columns; }
};

/// Onto d, the product of ``rows`` rows of depth, its first ``WIDE`` columns. Beside the last of them in their stage lie
/// another expert's: both operands become zero there, since 0 * NaN is not.
template <int WIDE, int CLUSTER, int STAGES, class M>
__device__ __forceinline__ void multiply_rows(float (&d)[2][96], const M& m, Ring<STAGES>& ring, int rows, int lane,
                                              int group) {
    constexpr int kChunks = (kRows + kColumns) / 8, kChunksA = kRows / 8;
    const int whole = rows / kDepth, rest = rows % kDepth, blocks = (rest + 15) / 16;
    const int last = start<2, WIDE, CLUSTER, STAGES, 1, 1, true>(d, m, ring, whole, lane);
    if (rest > 0) ptx::wait(m.full(ring.stage), ring.phase);
    if constexpr (M::kTurns) end_turn(group);
    if (rest > 0) {
        const uint32_t a = m.a(ring.stage), b = m.b(ring.stage);
        for (int i = threadIdx.x % 128; i < (blocks * 16 - rest) * kChunks; i += 128) {
            const int row = rest + i / kChunks, c = i % kChunks;
            const uint32_t to = c < kChunksA ? a + c / 8 * (kDepth * 128) : b + (c - kChunksA) / 8 * (kDepth * 128);
            ptx::store16(to + row * 128 + c % 8 * 16, make_int4(0, 0, 0, 0));
        }
        ptx::fence_async();
        ptx::sync(1 + threadIdx.x / 128, 128);
#pragma unroll 1
        for (int k = 0; k < blocks; ++k) {
            ptx::mma_fence();
            issue<2, WIDE, 1, 1>(d, a, b, k);
        }
        ptx::mma_commit();
    }
    ptx::mma_wait<0>();
    if (lane == 0) {
        if (whole > 0) give_back<CLUSTER, true>(m, last);
        if (rest > 0) give_back<CLUSTER, true>(m, ring.stage);
    }
    if (rest > 0) ring.next();
}

/// The sum over an expert's rows of a gathered row times a dense one. ``SIDES`` = 2: the two warpgroups share a tile, and
/// with it the gathered rows; 1: each has every second tile, and stores it while the other multiplies.
template <bool TRANSPOSED, int SIDES, int CLUSTER>
__device__ __forceinline__ void wgrad_body(const WgradArgs& p) {
    constexpr int STAGES = SIDES == 2 ? 3 : 5, kWide = SIDES * kColumns;
    constexpr int kSide = SIDES == 2 ? 64 : 48;  // columns of a warpgroup that leave together, transposed
    using Place = Memory<STAGES, TRANSPOSED ? 2 * kSide * kPitchT : 8 * 16 * kPitch, SIDES>;
    static_assert(Place::kBytes <= 232448);
    extern __shared__ __align__(1024) uint8_t shared[];
    const Place m{ptx::address(shared)};
    set_up<CLUSTER, STAGES, true, SIDES>(m);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int lane = threadIdx.x % 32;
    const uint32_t rank = CLUSTER == 1 ? 0 : ptx::cluster_rank();
    const int tall = (p.rows + kRows * CLUSTER - 1) / (kRows * CLUSTER), wide = (p.columns + kWide - 1) / kWide;
    const auto first_row = [&](const Tile& tile) { return ((tile.column & 0xFFFF) * CLUSTER + static_cast<int>(rank)) * kRows; };
    const auto first_column = [&](const Tile& tile) { return (tile.column >> 16) * kWide; };
    Ring<STAGES> ring;
    if (group == 2) {
        ptx::fewer_registers<kLoader>();
        const Place own{__shfl_sync(~0u, m.base, 0)};  // in a register, not computed again at each use
        Dealer<CLUSTER, decltype(m)> dealer(m, p.tiles.counters, p.tiles.experts * tall * wide);
        const auto deal = [&] {
            return dealer.deal([&](int t) {
                const int expert = p.tiles.list[t / (tall * wide)];
                const int start = expert > 0 ? p.tiles.ends[expert - 1] : 0;
                const int u = t % (tall * wide);  // rows fastest
                return make_int4(expert, start, p.tiles.ends[expert] - start, u / tall << 16 | u % tall);
            });
        };
        bool more = warp == 1 && lane == 0 && rank == 0 && deal() && deal();
        // A warp copies 16 rows of depth, four at a time: eight lanes for 64 columns of each, and for the other 64. A lane
        // knows one row of every second stage, four stages ahead: indices take longer than a stage to come.
        constexpr int kPair = 2 * kDepth;
        const int quarter = lane / 8, c = lane % 8, known = c / 4 * kDepth + warp * 16 + c % 4 * 4 + quarter;
        const uint32_t place = (warp * 16 + quarter) * 128 + ((c ^ quarter) << 4);
        const auto source = [&](const Tile& tile, int done) {  // of no row the first: what it brings is not read
            return tile.expert >= 0 && known < tile.rows - done ? static_cast<unsigned>(p.index[tile.row + done + known]) : 0;
        };
        if (threadIdx.x % 128 == 0) ptx::prefetch_map(&p.b);
        Tile next = hear<true, CLUSTER>(own, 0);
        unsigned first = source(next, 0), second = source(next, kPair);
        for (int i = 0; next.expert >= 0; ++i) {
            const Tile tile = next;
            unsigned soon = first, later = second;
            const auto look = [&] {  // while stages are full: what the next tile needs first
                if (more) more = deal();
                __syncwarp();
                next = hear<true, CLUSTER>(own, i + 1);
                first = source(next, 0), second = source(next, kPair);
            };
            if (tile.rows == 0) look();
            const int rows = __shfl_sync(~0u, tile.rows, 0), dense = __shfl_sync(~0u, first_column(tile), 0);
            const int column = first_row(tile) + c * 8, beyond = p.rows - column;
            const int4* x = ptx::kept(p.x + (beyond > 0 ? column / 8 : 0));
#pragma unroll 1
            for (int done = 0; done < rows; done += kPair) {
                const unsigned offset = p.divide(soon) * p.stride;
                soon = later;
                later = source(tile, done + 2 * kPair);
                if (done / kPair == rows / kPair / 2) look();
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (half == 1 && done + kDepth >= rows) break;
                    const int stage = __shfl_sync(~0u, ring.stage, 0);
                    const int4* at[4];  // while there is time, in registers of their own
#pragma unroll
                    for (int j = 0; j < 4; ++j) at[j] = ptx::kept(x + __shfl_sync(~0u, offset, 4 * half + j, 8));
                    wait_empty<CLUSTER>(own, stage, ring.phase, warp == 0);
                    if (warp == 0 && ptx::elect()) {
                        ptx::arrive_expect(own.full(stage), SIDES * kBytesB);
                        load_columns<CLUSTER, 1, kWide>(&p.b, own.b(stage), own.full(stage), rank,
                                                        tile.row + done + half * kDepth, dense, 0);
                    }
                    const uint32_t even = own.a(stage) + place, odd = even ^ 64;
#pragma unroll
                    for (int j = 0; j < 4; ++j) ptx::copy16((j & 1 ? odd : even) + j * 512, at[j]);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (beyond > 64) ptx::copy16((j & 1 ? odd : even) + j * 512 + kDepth * 128, at[j] + 8);
                    ptx::arrive_after_copies(own.full(stage));
                    ring.next();
                }
            }
        }
    } else {
        ptx::more_registers<kMultiplier>();
        const uint32_t place = m.results() + (TRANSPOSED ? group * kSide * kPitchT : (group * 4 + warp) * 16 * kPitch);
        const Side<Place, SIDES> side{m, static_cast<uint32_t>(SIDES == 2 ? group * kBytesB : 0)};
        for (int i = 0;; ++i) {
            const Tile tile = hear<true, CLUSTER>(m, i);
            if (tile.expert < 0) break;
            if (SIDES == 1 && (i & 1) != group) {
                ring.skip((tile.rows + kDepth - 1) / kDepth);
                continue;
            }
            const int row = first_row(tile), column = first_column(tile) + (SIDES == 2 ? group * kColumns : 0);
            float d[2][96];
            clear(d);
            if constexpr (SIDES == 1) wait_turn(i, group);
            if (p.columns - column > 128) {
                multiply_rows<kColumns, CLUSTER>(d, side, ring, tile.rows, lane, group);
            } else if (p.columns - column > 64) {
                multiply_rows<128, CLUSTER>(d, side, ring, tile.rows, lane, group);
            } else if (p.columns > column) {
                multiply_rows<64, CLUSTER>(d, side, ring, tile.rows, lane, group);
            } else {
                for (int done = 0; done < tile.rows; done += kDepth, ring.next()) {
                    ptx::wait(m.full(ring.stage), ring.phase);
                    __syncwarp();
                    if (lane == 0) give_back<CLUSTER, true>(m, ring.stage);
                }
                continue;
            }
            if constexpr (TRANSPOSED) {
                // a thread has eight of the rows of every eighth column
                const int thread = threadIdx.x % 128, c = thread % (kRows / 8) * 8, n = thread / (kRows / 8);
                const int left = row + c < p.rows ? p.columns - column - n : 0;
                __nv_bfloat16* to = p.out + (static_cast<long long>(tile.expert) * p.columns + column + n) * p.rows + row + c;
                const uint32_t at = place + (lane % 8 + lane / 16 * 8) * kPitchT + warp * 32 + lane / 8 % 2 * 16;
#pragma unroll
                for (int part = 0; part < kColumns / kSide; ++part) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
#pragma unroll
                        for (int j = 0; j < kSide / 16; ++j) {
                            const float* v = d[half] + part * (kSide / 2) + 8 * j;
                            ptx::store_blocks<true>(at + half * 128 + j * 16 * kPitchT, ptx::pack(v[0], v[1]),
                                                    ptx::pack(v[2], v[3]), ptx::pack(v[4], v[5]), ptx::pack(v[6], v[7]));
                        }
                    }
                    ptx::sync(1 + group, 128);
#pragma unroll
                    for (int j = 0; j < kSide; j += 8, to += 8ll * p.rows)
                        if (part * kSide + j < left)
                            ptx::write16(to, ptx::load16(place + (n + j) * kPitchT + c * 2));
                    ptx::sync(1 + group, 128);
                }
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int from = row + half * 64 + warp * 16;
                    __nv_bfloat16* out = p.out + (static_cast<long long>(tile.expert) * p.rows + from) * p.columns + column;
                    store_tile(d[half], out, p.columns, p.rows - from, p.columns - column, place, lane);
                }
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        ptx::cluster_sync();
    }
}

}  // namespace
