// Grouped matmuls for Hopper in bf16 with ping-pong tiles: the weight of a row's expert, and the weight gradients.
//
// A program is three warpgroups. Two multiply: each owns every second tile of 128 x 192 results, so that one may round,
// activate and store its tile while the other keeps the tensor cores busy. The third feeds both through one ring of
// stages of 64 in depth: warp 0 loads with the copy engine, warps 2 and 3 gather rows, warp 1 of the first program of a
// cluster hands out tiles. The programs of a cluster work on neighbouring rows of the same tile of columns: each loads its
// share of the other operand into all of them. Clusters take
// the next tile when they are free.
//
// Grid: any number of clusters. No program waits for one that may not have started, other than those of its cluster.

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "ptx.cuh"

namespace {

constexpr int kRows = 128, kColumns = 192, kDepth = 64;
constexpr int kPart = kColumns / 2;              // columns that leave together, and those of gate or of up in a tile
constexpr int kSlots = 4;                        // tiles handed out ahead
constexpr int kGroup = 8;                        // row tiles that take turns with one tile of columns
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr int kThreads = 384, kGatherers = 64;
#ifndef LOADER
#define LOADER 40
#endif
constexpr int kLoader = LOADER, kMultiplier = (504 - kLoader) / 2;  // registers of a thread
constexpr int kPitch = kPart * 2 + 16;           // bytes of a row of results on their way out: no two rows in one bank
constexpr int kPitchT = kRows * 2 + 16;          // the same, of a column
constexpr int kSlice = 48, kPitchS = kSlice * 2 + 16;  // the same, where three results leave together

// what becomes of a product: stored as it is; h, of columns gate | up, or gate and up in turn; the gradient of the
// activation of an h that was saved, gate | up
enum class Kind { kPlain, kGated, kInterleaved, kPull };
enum class Act { kNone, kSilu, kClamped };

}  // namespace

struct Tiles {
    const int* list;  // rows: [., 3] expert, first row, rows. Weight gradients: experts in order
    int* counters;    // [3]: rows only: row tiles; handed out; clusters gone
    const int* ends;  // weight gradients: [E], the last row + 1 of each expert
    int experts;
};

struct RowsArgs {
    CUtensorMap a, b;      // a: rows [N, depth]; b: [E * columns, depth] or [E * depth, columns]
    Tiles tiles;
    const __nv_bfloat16* x;  // rows to gather from, ``stride`` elements apart
    long long stride;
    const long long* index;  // row r is row index[r] / per_row of x
    unsigned per_row;
    __nv_bfloat16* out;
    __nv_bfloat16* h;           // null: not saved
    const __nv_bfloat16* bias;  // [E, columns] or null
    int depth, columns;
    int gate, up;               // first columns of the two halves
    float alpha, limit;         // of the clamped activation
    // kPull: ``columns`` are those of the product; out is the scaled activation, h the gradient of ``saved``
    const __nv_bfloat16* saved;  // [N, 2 * columns]
    const float* scale;          // the weight of slot index[r], or null for 1
    float* dots;                 // [N, tiles of columns]: the sums of product * activation over the tile's columns
};

struct WgradArgs {
    CUtensorMap b;  // dense rows [N, columns]
    Tiles tiles;
    const __nv_bfloat16* x;  // gathered rows [., rows]
    long long stride;
    const long long* index;
    unsigned per_row;
    __nv_bfloat16* out;  // [E, rows, columns] or [E, columns, rows]
    int rows, columns;
};

// driver.py has the same fields
static_assert(offsetof(RowsArgs, tiles) == 256 && offsetof(RowsArgs, x) == 288 && offsetof(RowsArgs, out) == 320 &&
              offsetof(RowsArgs, depth) == 344 && offsetof(RowsArgs, limit) == 364 &&
              offsetof(RowsArgs, dots) == 384 && sizeof(RowsArgs) <= 512);
static_assert(offsetof(WgradArgs, tiles) == 128 && offsetof(WgradArgs, x) == 160 && offsetof(WgradArgs, out) == 192 &&
              offsetof(WgradArgs, columns) == 204 && sizeof(WgradArgs) <= 512);

namespace {

struct Tile {
    int expert, row, rows, column;
    __device__ explicit Tile(int4 v) : expert(v.x), row(v.y), rows(v.z), column(v.w) {}
};

/// Places in shared memory, from an address that is a multiple of 1024.
template <int STAGES, int RESULTS>
struct Memory {
    uint32_t base;
    static constexpr int kBarriers = STAGES * (kBytesA + kBytesB) + RESULTS;
    static constexpr int kBytes = kBarriers + kSlots * 16 + (2 * STAGES + 2 * kSlots + 2) * 8;
    __device__ uint32_t a(int s) const { return base + s * (kBytesA + kBytesB); }
    __device__ uint32_t b(int s) const { return a(s) + kBytesA; }
    __device__ uint32_t results() const { return base + STAGES * (kBytesA + kBytesB); }
    __device__ uint32_t slot(int i) const { return base + kBarriers + i * 16; }
    __device__ uint32_t full(int s) const { return base + kBarriers + kSlots * 16 + s * 8; }
    __device__ uint32_t empty(int s) const { return full(STAGES + s); }
    __device__ uint32_t told(int i) const { return full(2 * STAGES + i); }
    __device__ uint32_t heard(int i) const { return full(2 * STAGES + kSlots + i); }
    __device__ uint32_t passed(int group) const { return full(2 * STAGES + 2 * kSlots + group); }
};

/// The place in the ring and the parity of its phase.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ void skip(int steps) {
        const int at = stage + steps;
        phase ^= (at / STAGES) & 1;
        stage = at % STAGES;
    }
};

template <int CLUSTER>
__device__ void arrive_everywhere(uint32_t barrier) {
    if constexpr (CLUSTER == 1)
        ptx::arrive(barrier);
    else
        for (uint32_t rank = 0; rank < CLUSTER; ++rank) ptx::arrive_at(barrier, rank);
}

/// The i-th tile of this cluster, for one thread or for a whole warp; ``expert`` is negative after the last.
template <bool WARP, class M>
__device__ Tile hear(const M& m, int i) {
    const int slot = i % kSlots;
    ptx::wait_cluster(m.told(slot), (i / kSlots) & 1);
    const Tile tile(ptx::load16(m.slot(slot)));
    if constexpr (WARP) __syncwarp();
    if (!WARP || threadIdx.x % 32 == 0) ptx::arrive_at(m.heard(slot), 0);
    return tile;
}

/// One thread of the first program: hands out tiles until ``decode`` has no more, then resets the counters for the next
/// launch once all clusters have come so far.
template <int CLUSTER, class M, class Decode>
__device__ void hand_out(const M& m, int* counters, int total, Decode decode) {
    const int clusters = gridDim.x / CLUSTER;
    int t = blockIdx.x / CLUSTER;
    for (int i = 0;; ++i) {
        const int slot = i % kSlots;
        const int4 tile = t < total ? decode(t) : make_int4(-1, 0, 0, 0);
        const bool last = t >= total;
        if (!last) t = clusters + atomicAdd(counters + 1, 1);
        ptx::wait(m.heard(slot), ((i / kSlots) & 1) ^ 1);
        for (uint32_t rank = 0; rank < CLUSTER; ++rank) {
            ptx::store_at(m.slot(slot), rank, tile);
            ptx::release_at(m.told(slot), rank);
        }
        if (last) break;
    }
    if (atomicAdd(counters + 2, 1) == clusters - 1) {
        counters[1] = 0;
        counters[2] = 0;
    }
}

template <int CLUSTER, int STAGES, int GATHERED, class M>
__device__ void set_up(const M& m) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptx::init(m.full(s), 1 + (GATHERED ? kGatherers : 0));
            ptx::init(m.empty(s), 4 * CLUSTER);
        }
        for (int i = 0; i < kSlots; ++i) {
            ptx::init(m.told(i), 1);
            ptx::init(m.heard(i), (1 + 8 + (GATHERED ? 2 : 0)) * CLUSTER);
        }
        for (int group = 0; group < 2; ++group) ptx::init(m.passed(group), 4);
        ptx::fence_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
}

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float sigmoid(float x) {
    return ptx::rcp_approx(1.0f + ptx::exp2_approx(x * -1.44269504f));
}

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

/// The columns of a part from the registers of one warp, 16 rows of 96, to its place in shared memory.
__device__ __forceinline__ void put(uint32_t place, const float* d, int lane) {
    const uint32_t at = place + (lane % 16) * kPitch + (lane / 16) * 16;
#pragma unroll
    for (int j = 0; j < kPart / 16; ++j)
        ptx::store_blocks<false>(at + j * 32, ptx::pack(d[8 * j], d[8 * j + 1]), ptx::pack(d[8 * j + 2], d[8 * j + 3]),
                                 ptx::pack(d[8 * j + 4], d[8 * j + 5]), ptx::pack(d[8 * j + 6], d[8 * j + 7]));
}

/// ``rows`` of 16 rows at ``place``, of ``COLUMNS`` in ``PITCH`` bytes, and the columns below ``limit``, to ``to``, whose
/// first column is ``column``.
template <int COLUMNS, int PITCH>
__device__ __forceinline__ void flush(uint32_t place, __nv_bfloat16* to, long long stride, int rows, int column, int limit,
                                      int lane) {
    __syncwarp();
#pragma unroll 3
    for (int i = 0; i < 16 * COLUMNS / 8 / 32; ++i) {
        const int chunk = lane + 32 * i, row = chunk / (COLUMNS / 8), c = chunk % (COLUMNS / 8) * 8;
        if (row < rows && column + c < limit)
            *reinterpret_cast<int4*>(to + row * stride + column + c) = ptx::load16(place + row * PITCH + c * 2);
    }
    __syncwarp();
}

/// Adds the biases of a part's columns from ``bias`` on, of which ``columns`` count.
__device__ __forceinline__ void add_bias(float* d, const __nv_bfloat16* bias, int columns, int lane) {
#pragma unroll
    for (int i = 0; i < kPart / 8; ++i) {
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
        const int column = tile.column * kPart;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = half ? p.up : p.gate;
            if constexpr (BIAS)
                add_bias(d + 48 * half, p.bias + static_cast<long long>(tile.expert) * p.columns + first + column,
                         narrow - column, lane);
#pragma unroll
            for (int i = 0; i < 48; ++i) d[48 * half + i] = rounded(d[48 * half + i]);
            if (h != nullptr) {
                put(place, d + 48 * half, lane);
                flush<kPart, kPitch>(place, h + first, p.columns, rows, column, narrow, lane);
            }
        }
#pragma unroll
        for (int i = 0; i < 48; ++i) d[i] = activate<ACT>(d[i], d[48 + i], p.alpha, p.limit);
        put(place, d, lane);
        flush<kPart, kPitch>(place, out, narrow, rows, column, narrow, lane);
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = tile.column * kColumns + half * kPart;
            if constexpr (BIAS)
                add_bias(d + 48 * half, p.bias + static_cast<long long>(tile.expert) * p.columns + column,
                         p.columns - column, lane);
            __nv_bfloat16* to = KIND == Kind::kPlain ? out : h;
            if (to != nullptr) {
                put(place, d + 48 * half, lane);
                flush<kPart, kPitch>(place, to, p.columns, rows, column, p.columns, lane);
            }
        }
        if constexpr (KIND == Kind::kInterleaved) {
            const uint32_t at = place + lane / 4 * kPitch + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 24; ++i) {
                const float top = activate<ACT>(rounded(d[4 * i]), rounded(d[4 * i + 1]), p.alpha, p.limit);
                const float low = activate<ACT>(rounded(d[4 * i + 2]), rounded(d[4 * i + 3]), p.alpha, p.limit);
                ptx::store2(at + i * 8, static_cast<uint16_t>(ptx::pack(top, 0.0f)));
                ptx::store2(at + 8 * kPitch + i * 8, static_cast<uint16_t>(ptx::pack(low, 0.0f)));
            }
            flush<kPart, kPitch>(place, out, narrow, rows, tile.column * kPart, narrow, lane);
        }
    }
}

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

/// Starts the k-th step of 16 of a stage.
template <int HALVES, int MN_A, int MN_B>
__device__ __forceinline__ void start(float (&d)[2][96], uint32_t a, uint32_t b, int k, bool accumulate) {
    const uint64_t right = ptx::describe(b + k * (MN_B ? 2048 : 32), MN_B ? kDepth * 128 : 16, 1024);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const uint32_t at = a + half * (64 * kDepth * 2) + k * (MN_A ? 2048 : 32);
        ptx::mma<MN_A, MN_B>(d[half], ptx::describe(at, MN_A ? kDepth * 128 : 16, 1024), right, accumulate);
    }
}

/// Before tile i: until the other warpgroup has seen every stage of tile i - 1. A parity tells a phase from the one before
/// only, so whoever skips those stages would take their first filling for its own.
template <class M>
__device__ __forceinline__ void take_turn(const M& m, int i, int group) {
    if (i > 0) ptx::wait(m.passed(group ^ 1), (i - 1) / 2 & 1);
}

/// The end of that turn, for a warp.
__device__ __forceinline__ void pass(uint32_t passed, int lane) {
    __syncwarp();
    if (lane == 0) ptx::arrive(passed);
}

/// ``steps`` whole stages into d, ``HALVES`` blocks of 64 rows. A stage is given back one later, when nothing reads it.
template <int HALVES, int CLUSTER, int STAGES, int MN_A, int MN_B, bool GATHERED, class M>
__device__ __forceinline__ void multiply(float (&d)[2][96], const M& m, Ring<STAGES>& ring, int steps, int lane,
                                         uint32_t passed) {
    int before = 0;
    for (int s = 0; s < steps; ++s) {
        ptx::wait(m.full(ring.stage), ring.phase);
        if constexpr (GATHERED) ptx::fence_async();
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
            start<HALVES, MN_A, MN_B>(d, m.a(ring.stage), m.b(ring.stage), k, s > 0 || k > 0);
        ptx::mma_commit();
        if (s > 0) {
            ptx::mma_wait<1>();
            if (lane == 0) arrive_everywhere<CLUSTER>(m.empty(before));
        }
        before = ring.stage;
        ring.next();
    }
    if (passed != 0) pass(passed, lane);
    ptx::mma_wait<0>();
    if (steps > 0 && lane == 0) arrive_everywhere<CLUSTER>(m.empty(before));
}

/// The last stage of a weight gradient, of which ``rows`` < 64 count. Beside an expert's last rows lie another's: both
/// operands become zero there, since 0 * NaN is not.
template <int CLUSTER, int STAGES, class M>
__device__ __forceinline__ void multiply_tail(float (&d)[2][96], const M& m, Ring<STAGES>& ring, int rows, bool accumulate,
                                              int lane, uint32_t passed) {
    constexpr int kChunks = (kRows + kColumns) / 8;
    ptx::wait(m.full(ring.stage), ring.phase);
    const uint32_t a = m.a(ring.stage), b = m.b(ring.stage);
    const int blocks = (rows + 15) / 16;
    for (int i = threadIdx.x % 128; i < (blocks * 16 - rows) * kChunks; i += 128) {
        const int row = rows + i / kChunks, c = i % kChunks;
        ptx::store16(a + c / 8 * (kDepth * 128) + row * 128 + c % 8 * 16, make_int4(0, 0, 0, 0));
    }
    ptx::fence_async();
    ptx::sync(1 + threadIdx.x / 128, 128);
    pass(passed, lane);
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
        ptx::mma_fence();
        start<2, 1, 1>(d, a, b, k, accumulate || k > 0);
        ptx::mma_commit();
        ptx::mma_wait<0>();
    }
    if (lane == 0) arrive_everywhere<CLUSTER>(m.empty(ring.stage));
    ring.next();
}

/// This program's share of 192 columns of the second operand, into all programs of the cluster.
template <int CLUSTER, int MN_B>
__device__ __forceinline__ void load_columns(const CUtensorMap* map, uint32_t to, uint32_t barrier, uint32_t rank, int depth,
                                             int first, int second) {
    constexpr uint16_t kAll = (1 << CLUSTER) - 1;
    if constexpr (MN_B) {  // boxes of 64 columns, [64 / CLUSTER rows of depth]
        for (int j = 0; j < kColumns / 64; ++j) {
            const uint32_t at = to + j * kDepth * 128 + rank * (kDepth / CLUSTER) * 128;
            if constexpr (CLUSTER == 1)
                ptx::load(at, map, barrier, first + 64 * j, depth);
            else
                ptx::load_all(at, map, barrier, first + 64 * j, depth + rank * (kDepth / CLUSTER), kAll);
        }
    } else if constexpr (CLUSTER == 1) {  // boxes of 96 columns
        ptx::load(to, map, barrier, depth, first);
        ptx::load(to + kPart * 128, map, barrier, depth, second);
    } else {
        ptx::load_all(to + rank * kPart * 128, map, barrier, depth, rank ? second : first, kAll);
    }
}

/// Rows times their expert's matrix.
template <Kind KIND, Act ACT, bool BIAS, int MN_B, bool GATHERED, int CLUSTER>
__device__ __forceinline__ void rows_body(const RowsArgs& p) {
    constexpr int STAGES = KIND == Kind::kPull ? 4 : 5, kPlace = KIND == Kind::kPull ? 3 * 16 * kPitchS : 16 * kPitch;
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
        if (warp == 0 && lane == 0) {
            ptx::prefetch_map(&p.b);
            for (int i = 0;; ++i) {
                const Tile tile = hear<false>(m, i);
                if (tile.expert < 0) break;
                const bool own = !GATHERED && rows_of(tile) > 0;
                int first = tile.column * kColumns, second = first + kPart;
                if constexpr (KIND == Kind::kGated) first = p.gate + tile.column * kPart, second = p.up + tile.column * kPart;
                if constexpr (!MN_B) first += tile.expert * p.columns, second += tile.expert * p.columns;
                for (int s = 0; s < steps; ++s) {
                    ptx::wait(m.empty(ring.stage), ring.phase ^ 1);
                    ptx::arrive_expect(m.full(ring.stage), kBytesB + (own ? kBytesA : 0));
                    if (own) ptx::load(m.a(ring.stage), &p.a, m.full(ring.stage), s * kDepth, row_of(tile));
                    load_columns<CLUSTER, MN_B>(&p.b, m.b(ring.stage), m.full(ring.stage), rank,
                                                s * kDepth + (MN_B ? tile.expert * p.depth : 0), first, second);
                    ring.next();
                }
            }
        } else if (warp == 1 && lane == 0 && rank == 0) {
            const int width = KIND == Kind::kGated ? kPart : kColumns;
            const int columns = ((KIND == Kind::kGated ? p.columns / 2 : p.columns) + width - 1) / width;
            const int row_tiles = p.tiles.counters[0];
            hand_out<CLUSTER>(m, p.tiles.counters, row_tiles * columns, [&](int t) {
                constexpr int kTall = kGroup / CLUSTER;
                const int first = t / (kTall * columns) * kTall;
                const int size = row_tiles - first < kTall ? row_tiles - first : kTall;
                const int r = t - first * columns, row = first + r % size;
                const int* at = p.tiles.list + 3 * row;
                return make_int4(at[0], at[1], at[2], r / size);
            });
        } else if (GATHERED && warp >= 2) {
            // a warp copies 64 rows, four at a time: 8 lanes for the 64 columns of each; a lane knows where two rows come from
            const int top = (warp - 2) * 64, own = lane / 8;
            for (int i = 0;; ++i) {
                const Tile tile = hear<true>(m, i);
                if (tile.expert < 0) break;
                const int left = rows_of(tile) - top;
                const long long* index = p.index + row_of(tile) + top + lane;
                const unsigned upper = lane < left ? static_cast<unsigned>(*index) / p.per_row : 0;
                const unsigned lower = lane + 32 < left ? static_cast<unsigned>(index[32]) / p.per_row : 0;
                const __nv_bfloat16* x = p.x + lane % 8 * 8;
                for (int s = 0; s < steps; ++s, x += kDepth) {
                    ptx::wait(m.empty(ring.stage), ring.phase ^ 1);
                    const uint32_t to = m.a(ring.stage) + (top + own) * 128;
#pragma unroll 8
                    for (int j = 0; j < 16; ++j) {
                        const unsigned row = __shfl_sync(~0u, j < 8 ? upper : lower, 4 * (j % 8) + own);
                        if (4 * j + own < left)
                            ptx::copy16(to + j * 512 + (((lane % 8) ^ (own + 4 * (j & 1))) << 4), x + row * p.stride);
                    }
                    ptx::arrive_after_copies(m.full(ring.stage));
                    ring.next();
                }
            }
        }
    } else {
        ptx::more_registers<kMultiplier>();
        float d[2][96];
        const uint32_t place = m.results() + (group * 4 + warp) * kPlace;
        // the results of the first ``halves`` blocks of 64 rows
        const auto finish = [&](const Tile& tile, int row, int rows, int halves) {
            if constexpr (KIND == Kind::kPull) {
                pull_rows(d[0], p, tile, row, rows < 16 ? rows : 16, place, true, lane);
                if (halves == 2) pull_rows(d[1], p, tile, row + 64, rows - 64, place, false, lane);
            } else {
                store_rows<KIND, ACT, BIAS>(d[0], p, tile, row, rows, place, lane);
                if (halves == 2) store_rows<KIND, ACT, BIAS>(d[1], p, tile, row + 64, rows - 64, place, lane);
            }
        };
        for (int i = 0;; ++i) {
            const Tile tile = hear<true>(m, i);
            if (tile.expert < 0) break;
            if ((i & 1) != group) {
                ring.skip(steps);
                continue;
            }
            const int rows = rows_of(tile), row = row_of(tile) + warp * 16;
            // what the epilogue reads first comes while the tensor cores work
            if constexpr (KIND == Kind::kPull)
                fetch(place, p, row, rows - warp * 16, tile.column * kColumns, lane);
            take_turn(m, i, group);
            if (rows > 64) {
                multiply<2, CLUSTER, STAGES, 0, MN_B, GATHERED>(d, m, ring, steps, lane, m.passed(group));
                finish(tile, row, rows - warp * 16, 2);
            } else if (rows > 0) {
                multiply<1, CLUSTER, STAGES, 0, MN_B, GATHERED>(d, m, ring, steps, lane, m.passed(group));
                finish(tile, row, rows - warp * 16, 1);
            } else {
                for (int s = 0; s < steps; ++s, ring.next()) {
                    ptx::wait(m.full(ring.stage), ring.phase);
                    __syncwarp();
                    if (lane == 0) arrive_everywhere<CLUSTER>(m.empty(ring.stage));
                }
                pass(m.passed(group), lane);
            }
        }
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        ptx::cluster_sync();  // the others still write here until they are done
    }
}

/// 64 x 192 results of a weight gradient, of which a warp holds 16 rows, in the order of the operands.
__device__ __forceinline__ void store_wgrad(float (&d)[96], __nv_bfloat16* out, int rows, int column, int columns,
                                            uint32_t place, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        put(place, d + 48 * half, lane);
        flush<kPart, kPitch>(place, out, columns, rows, column + half * kPart, columns, lane);
    }
}

/// The sum over an expert's rows of a gathered row times a dense one.
template <bool TRANSPOSED, int CLUSTER>
__device__ __forceinline__ void wgrad_body(const WgradArgs& p) {
    constexpr int STAGES = TRANSPOSED ? 4 : 5;
    using Place = Memory<STAGES, TRANSPOSED ? 2 * kPart * kPitchT : 8 * 16 * kPitch>;
    static_assert(Place::kBytes <= 232448);
    extern __shared__ __align__(1024) uint8_t shared[];
    const Place m{ptx::address(shared)};
    set_up<CLUSTER, STAGES, true>(m);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int lane = threadIdx.x % 32;
    const uint32_t rank = CLUSTER == 1 ? 0 : ptx::cluster_rank();
    const int tall = (p.rows + kRows * CLUSTER - 1) / (kRows * CLUSTER), wide = (p.columns + kColumns - 1) / kColumns;
    const auto first_row = [&](const Tile& tile) { return (tile.column % tall * CLUSTER + static_cast<int>(rank)) * kRows; };
    const auto first_column = [&](const Tile& tile) { return tile.column / tall * kColumns; };
    Ring<STAGES> ring;
    if (group == 2) {
        ptx::fewer_registers<kLoader>();
        if (warp == 0 && lane == 0) {
            ptx::prefetch_map(&p.b);
            for (int i = 0;; ++i) {
                const Tile tile = hear<false>(m, i);
                if (tile.expert < 0) break;
                const int column = first_column(tile);
                for (int done = 0; done < tile.rows; done += kDepth) {
                    ptx::wait(m.empty(ring.stage), ring.phase ^ 1);
                    ptx::arrive_expect(m.full(ring.stage), kBytesB);
                    load_columns<CLUSTER, 1>(&p.b, m.b(ring.stage), m.full(ring.stage), rank, tile.row + done, column, 0);
                    ring.next();
                }
            }
        } else if (warp == 1 && lane == 0 && rank == 0) {
            hand_out<CLUSTER>(m, p.tiles.counters, p.tiles.experts * tall * wide, [&](int t) {
                const int expert = p.tiles.list[t / (tall * wide)];
                const int start = expert > 0 ? p.tiles.ends[expert - 1] : 0;
                return make_int4(expert, start, p.tiles.ends[expert] - start, t % (tall * wide));
            });
        } else if (warp >= 2) {
            // a warp copies 32 rows of depth, two at a time: 16 lanes for the 128 columns of each
            const int top = (warp - 2) * 32, c = lane % 16;
            for (int i = 0;; ++i) {
                const Tile tile = hear<true>(m, i);
                if (tile.expert < 0) break;
                const int column = first_row(tile) + c * 8;
                const bool held = column < p.rows;
                const __nv_bfloat16* x = p.x + column;
                const long long* index = p.index + tile.row + top + lane;
                int left = tile.rows - top;
                long long ahead = lane < left ? *index : 0;
                for (; left > -top; left -= kDepth) {
                    const unsigned source = static_cast<unsigned>(ahead) / p.per_row;
                    index += kDepth;
                    ahead = lane < left - kDepth ? *index : 0;  // a stage early: the copies wait for it
                    ptx::wait(m.empty(ring.stage), ring.phase ^ 1);
                    const uint32_t to = m.a(ring.stage) + c / 8 * (kDepth * 128) + (top + lane / 16) * 128;
#pragma unroll 8
                    for (int j = 0; j < 16; ++j) {
                        const unsigned row = __shfl_sync(~0u, source, 2 * j + lane / 16);
                        if (held && 2 * j + lane / 16 < left)
                            ptx::copy16(to + j * 256 + (((c % 8) ^ ((2 * j + lane / 16) & 7)) << 4), x + row * p.stride);
                    }
                    ptx::arrive_after_copies(m.full(ring.stage));
                    ring.next();
                }
            }
        }
    } else {
        ptx::more_registers<kMultiplier>();
        float d[2][96];
        const uint32_t place = m.results() + (TRANSPOSED ? group * kPart * kPitchT : (group * 4 + warp) * 16 * kPitch);
        for (int i = 0;; ++i) {
            const Tile tile = hear<true>(m, i);
            if (tile.expert < 0) break;
            const int whole = tile.rows / kDepth, rest = tile.rows % kDepth;
            if ((i & 1) != group) {
                ring.skip(whole + (rest > 0));
                continue;
            }
            take_turn(m, i, group);
            multiply<2, CLUSTER, STAGES, 1, 1, true>(d, m, ring, whole, lane, rest > 0 ? 0 : m.passed(group));
            if (rest > 0) {
                multiply_tail<CLUSTER>(d, m, ring, rest, whole > 0, lane, m.passed(group));
            } else if (whole == 0) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int j = 0; j < 96; ++j) d[half][j] = 0.0f;
            }
            const int row = first_row(tile), column = first_column(tile);
            if constexpr (TRANSPOSED) {
                const int thread = threadIdx.x % 128;
#pragma unroll
                for (int part = 0; part < 2; ++part) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t at = place + (lane % 8 + lane / 16 * 8) * kPitchT + half * 128 + warp * 32 +
                                            lane / 8 % 2 * 16;
#pragma unroll
                        for (int j = 0; j < kPart / 16; ++j) {
                            const float* v = d[half] + part * 48 + 8 * j;
                            ptx::store_blocks<true>(at + j * 16 * kPitchT, ptx::pack(v[0], v[1]), ptx::pack(v[2], v[3]),
                                                    ptx::pack(v[4], v[5]), ptx::pack(v[6], v[7]));
                        }
                    }
                    ptx::sync(1 + group, 128);
                    for (int j = thread; j < kPart * kRows / 8; j += 128) {
                        const int n = column + part * kPart + j / (kRows / 8), c = j % (kRows / 8) * 8;
                        if (n < p.columns && row + c < p.rows) {
                            const long long to = (static_cast<long long>(tile.expert) * p.columns + n) * p.rows + row + c;
                            *reinterpret_cast<int4*>(p.out + to) = ptx::load16(place + j / (kRows / 8) * kPitchT + c * 2);
                        }
                    }
                    ptx::sync(1 + group, 128);
                }
            } else {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int from = row + half * 64 + warp * 16;
                    __nv_bfloat16* out = p.out + (static_cast<long long>(tile.expert) * p.rows + from) * p.columns;
                    store_wgrad(d[half], out, p.rows - from, column, p.columns, place, lane);
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

#define ROWS(name, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name##_1(const __grid_constant__ RowsArgs p) {        \
        rows_body<__VA_ARGS__, 1>(p);                                                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2) name##_2(                          \
        const __grid_constant__ RowsArgs p) {                                                                        \
        rows_body<__VA_ARGS__, 2>(p);                                                                                \
    }
#define WGRAD(name, transposed)                                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name##_1(const __grid_constant__ WgradArgs p) {       \
        wgrad_body<transposed, 1>(p);                                                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2) name##_2(                          \
        const __grid_constant__ WgradArgs p) {                                                                       \
        wgrad_body<transposed, 2>(p);                                                                                \
    }

// name: kind, activation, biases, weights [E, in, out], rows gathered
ROWS(up_silu, Kind::kGated, Act::kSilu, false, 0, true)
ROWS(up_clamped_bias, Kind::kInterleaved, Act::kClamped, true, 1, true)
ROWS(rows, Kind::kPlain, Act::kNone, false, 0, false)
ROWS(rows_bias, Kind::kPlain, Act::kNone, true, 0, false)
ROWS(rows_in_out, Kind::kPlain, Act::kNone, false, 1, false)
ROWS(rows_bias_in_out, Kind::kPlain, Act::kNone, true, 1, false)
ROWS(rows_gathered, Kind::kPlain, Act::kNone, false, 0, true)
ROWS(rows_gathered_in_out, Kind::kPlain, Act::kNone, false, 1, true)
ROWS(pull_silu, Kind::kPull, Act::kSilu, false, 0, true)
ROWS(pull_silu_in_out, Kind::kPull, Act::kSilu, false, 1, true)
WGRAD(wgrad, false)
WGRAD(wgrad_transposed, true)
