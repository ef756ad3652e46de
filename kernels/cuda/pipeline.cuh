// What every kernel is made of: tiles that are handed out, a ring of stages in shared memory, and the matmuls over it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "ptx.cuh"

struct Tiles {
    const int* list;  // rows: [., 3] expert, first row, rows. Weight gradients: experts in order
    int* counters;    // [3]: rows only: row tiles; handed out; clusters gone
    const int* ends;  // weight gradients: [E], the last row + 1 of each expert
    int experts;
};

/// Division of numbers below 2**31 by one that the host knows, ``driver.divide``.
struct Divide {
    unsigned factor, shift;
    __device__ unsigned operator()(unsigned n) const {
        return static_cast<unsigned>(static_cast<unsigned long long>(n) * factor >> shift);
    }
};

namespace {

constexpr int kRows = 128, kColumns = 192, kDepth = 64;
constexpr int kPart = kColumns / 2;              // columns that leave together, and those of gate or of up in a tile
constexpr int kSlots = 4;                        // tiles handed out ahead
constexpr int kGroup = 8;                        // row tiles that take turns with one tile of columns
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
constexpr int kEarly = 6;                        // of eight copies of a lane, whose addresses are ready before the stage is
constexpr int kThreads = 384, kGatherers = 128;
constexpr int kTurns = 3;                        // named barriers of the two warpgroups; 1 and 2 are theirs alone
constexpr int kLoader = 56, kMultiplier = (504 - kLoader) / 2;  // registers of a thread

struct Tile {
    int expert, row, rows, column;
    __device__ explicit Tile(int4 v) : expert(v.x), row(v.y), rows(v.z), column(v.w) {}
};

/// Places in shared memory, from an address that is a multiple of 1024. ``SIDES``: tiles of columns that share rows.
template <int STAGES, int RESULTS, int SIDES = 1>
struct Memory {
    uint32_t base;
    static constexpr int kStage = kBytesA + SIDES * kBytesB, kBarriers = STAGES * kStage + RESULTS;
    static constexpr int kBytes = kBarriers + kSlots * 16 + (3 * STAGES + 2 * kSlots) * 8;
    __device__ uint32_t a(int s) const { return base + s * kStage; }
    __device__ uint32_t b(int s) const { return a(s) + kBytesA; }
    __device__ uint32_t results() const { return base + STAGES * kStage; }
    __device__ uint32_t slot(int i) const { return base + kBarriers + i * 16; }
    __device__ uint32_t full(int s) const { return base + kBarriers + kSlots * 16 + s * 8; }
    __device__ uint32_t empty(int s) const { return full(STAGES + s); }
    __device__ uint32_t mine(int s) const { return full(2 * STAGES + 2 * kSlots + s); }  // empty here, not in every program
    __device__ uint32_t told(int i) const { return full(2 * STAGES + i); }
    __device__ uint32_t heard(int i) const { return full(2 * STAGES + kSlots + i); }
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

/// One warp of a multiplier is done with a stage. What a program gathers by itself need not wait for the others.
template <int CLUSTER, bool GATHERED, class M>
__device__ void give_back(const M& m, int stage) {
    if constexpr (CLUSTER > 1 && GATHERED) ptx::arrive(m.mine(stage));
    arrive_everywhere<CLUSTER>(m.empty(stage));
}

/// Until a stage may be filled: by this program, or ``everywhere``.
template <int CLUSTER, class M>
__device__ void wait_empty(const M& m, int stage, uint32_t phase, bool everywhere) {
    ptx::wait(CLUSTER == 1 || everywhere ? m.empty(stage) : m.mine(stage), phase ^ 1);
}

/// The i-th tile of this cluster, for one thread or for a whole warp; ``expert`` is negative after the last.
template <bool WARP, int CLUSTER, class M>
__device__ Tile hear(const M& m, int i) {
    const int slot = i % kSlots;
    if constexpr (CLUSTER == 1)
        ptx::wait(m.told(slot), (i / kSlots) & 1);
    else
        ptx::wait_cluster(m.told(slot), (i / kSlots) & 1);
    const Tile tile(ptx::load16(m.slot(slot)));
    if constexpr (WARP) __syncwarp();
    if (!WARP || threadIdx.x % 32 == 0) {
        if constexpr (CLUSTER == 1)
            ptx::arrive(m.heard(slot));
        else
            ptx::arrive_at(m.heard(slot), 0);
    }
    return tile;
}

/// Hands out the tiles of a cluster, for one thread of its first program.
template <int CLUSTER, class M>
struct Dealer {
    M m;
    int* counters;
    int total, tile, dealt = 0;
    __device__ Dealer(const M& memory, int* counts, int tiles)
        : m(memory), counters(counts), total(tiles), tile(blockIdx.x / CLUSTER) {}

    /// The next tile, ``decode`` of its number, to all programs; false after the last. Waits for those that have yet to
    /// hear what lies in its slot. Resets the counters for the next launch once all clusters have come so far.
    template <class Decode>
    __device__ bool deal(Decode decode) {
        const int clusters = gridDim.x / CLUSTER, slot = dealt % kSlots;
        const bool last = tile >= total;
        const int4 what = last ? make_int4(-1, 0, 0, 0) : decode(tile);
        if (!last) tile = clusters + atomicAdd(counters + 1, 1);
        ptx::wait(m.heard(slot), ((dealt / kSlots) & 1) ^ 1);
        if constexpr (CLUSTER == 1) {  // a release to other programs waits for the copies of this thread
            ptx::store16(m.slot(slot), what);
            ptx::arrive(m.told(slot));
        } else {
            for (uint32_t rank = 0; rank < CLUSTER; ++rank) {
                ptx::store_at(m.slot(slot), rank, what);
                ptx::release_at(m.told(slot), rank);
            }
        }
        ++dealt;
        if (last && atomicAdd(counters + 2, 1) == clusters - 1) {
            counters[1] = 0;
            counters[2] = 0;
        }
        return !last;
    }
};

/// ``OWNERS``: warpgroups that multiply each stage.
template <int CLUSTER, int STAGES, int GATHERED, int OWNERS = 1, class M>
__device__ void set_up(const M& m) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            ptx::init(m.full(s), 1 + (GATHERED ? kGatherers : 0));
            ptx::init(m.empty(s), 4 * OWNERS * CLUSTER);
            ptx::init(m.mine(s), 4 * OWNERS);
        }
        for (int i = 0; i < kSlots; ++i) {
            ptx::init(m.told(i), 1);
            ptx::init(m.heard(i), (8 + (GATHERED ? 4 : 1)) * CLUSTER);
        }
        ptx::fence_init();
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) ptx::cluster_sync();
}

/// This program's share of ``COLUMNS`` columns of the second operand, into all programs of the cluster.
template <int CLUSTER, int MN_B, int COLUMNS = kColumns>
__device__ __forceinline__ void load_columns(const CUtensorMap* map, uint32_t to, uint32_t barrier, uint32_t rank, int depth,
                                             int first, int second) {
    constexpr uint16_t kAll = (1 << CLUSTER) - 1;
    if constexpr (MN_B) {  // boxes of 64 columns, [64 / CLUSTER rows of depth]
        for (int j = 0; j < COLUMNS / 64; ++j) {
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

/// Zeros: a sum starts anew. A matmul that overwrites would leave the registers to it, also between two tiles.
__device__ __forceinline__ void clear(float (&d)[2][96]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < 96; ++j) d[half][j] = 0.0f;
}

/// Starts the k-th step of 16 of a stage, for the first ``WIDE`` columns.
template <int HALVES, int WIDE, int MN_A, int MN_B>
__device__ __forceinline__ void issue(float (&d)[2][96], uint32_t a, uint32_t b, int k) {
    const uint64_t right = ptx::describe(b + k * (MN_B ? 2048 : 32), MN_B ? kDepth * 128 : 16, 1024);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
        const uint32_t at = a + half * (64 * kDepth * 2) + k * (MN_A ? 2048 : 32);
        ptx::mma<WIDE, MN_A, MN_B>(d[half], ptx::describe(at, MN_A ? kDepth * 128 : 16, 1024), right);
    }
}

/// Before tile i: until the other warpgroup has seen every stage of tile i - 1. A parity tells a phase from the one before
/// only, so whoever skips those stages would take their first filling for its own. A named barrier: nobody spins.
__device__ __forceinline__ void wait_turn(int i, int group) {
    if (i > 0) ptx::sync(kTurns + group, 256);
}

/// The end of that turn, for a warp of ``group``.
__device__ __forceinline__ void end_turn(int group) { ptx::arrive_named(kTurns + (group ^ 1), 256); }

/// ``steps`` whole stages onto d, ``HALVES`` blocks of 64 rows by ``WIDE`` columns. A stage is given back one later, when nothing reads it;
/// the last, whose number is returned, is not: its matmuls may still run.
template <int HALVES, int WIDE, int CLUSTER, int STAGES, int MN_A, int MN_B, bool GATHERED, class M>
__device__ __forceinline__ int start(float (&d)[2][96], const M& m, Ring<STAGES>& ring, int steps, int lane) {
    int before = 0;
    for (int s = 0; s < steps; ++s) {
        ptx::wait(m.full(ring.stage), ring.phase);
        if constexpr (GATHERED) ptx::fence_async();
        ptx::mma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
            issue<HALVES, WIDE, MN_A, MN_B>(d, m.a(ring.stage), m.b(ring.stage), k);
        ptx::mma_commit();
        if (s > 0) {
            ptx::mma_wait<1>();
            if (lane == 0) give_back<CLUSTER, GATHERED>(m, before);
        }
        before = ring.stage;
        ring.next();
    }
    return before;
}

/// The same for at least one stage to its end, and the turn's.
template <int HALVES, int WIDE, int CLUSTER, int STAGES, int MN_A, int MN_B, bool GATHERED, class M>
__device__ __forceinline__ void multiply(float (&d)[2][96], const M& m, Ring<STAGES>& ring, int steps, int lane,
                                         int group) {
    const int last = start<HALVES, WIDE, CLUSTER, STAGES, MN_A, MN_B, GATHERED>(d, m, ring, steps, lane);
    end_turn(group);
    ptx::mma_wait<0>();
    if (lane == 0) give_back<CLUSTER, GATHERED>(m, last);
}

}  // namespace
