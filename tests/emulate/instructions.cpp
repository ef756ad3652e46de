// What the instructions do to barriers, shared memory and registers.
#include <algorithm>
#include <cmath>

#include "machine.h"
#include "ptx.cuh"

using namespace emulate;

namespace {

constexpr uint32_t kEnd = kReserved + kShared;

uint32_t swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

Program& self() { return *current->program; }

Program& peer(uint32_t rank) {
    auto& programs = self().cluster->programs;
    if (rank >= programs.size()) fail("rank %u of a cluster of %zu", rank, programs.size());
    if (programs[rank]->running == 0) fail("access to program %u, which has left", programs[rank]->block);
    return *programs[rank];
}

uint8_t* place(Program& p, uint32_t at, uint32_t bytes) {
    if (at % bytes != 0) fail("address %u is no multiple of %u", at, bytes);
    if (at < kReserved || at + bytes > kEnd) fail("address %u is outside shared memory", at);
    return p.memory + at;
}

void write(Program& p, uint32_t at, const void* from, uint32_t bytes, bool async_proxy, Thread* by) {
    uint8_t* to = place(p, at, bytes);
    for (uint32_t i = at / 8; i <= (at + bytes - 1) / 8; ++i)
        if (p.taken[i]) fail("a write to %u runs over a barrier", at);
    std::memcpy(to, from, bytes);
    p.writes[at / 16] = async_proxy ? Write{} : Write{++now, by};
}

Barrier& barrier_of(Program& p, uint32_t at) {
    const auto found = p.barriers.find(at);
    if (found == p.barriers.end()) fail("no barrier at %u in program %u", at, p.block);
    return found->second;
}

void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) {
        b.pending = b.count;
        ++b.phase;
        wake(b.waiting);
    }
}

void arrive_in(Program& p, uint32_t at, uint32_t expected) {
    Barrier& b = barrier_of(p, at);
    if (b.pending == 0) fail("an arrival too many at barrier %u of program %u", at, p.block);
    b.bytes += expected;
    --b.pending;
    settle(b);
}

/// A box to one program of the cluster, zeros outside the map.
void deliver(Program& p, uint32_t to, const CUtensorMap& map, uint32_t barrier, int x, int y) {
    const uint32_t pitch = static_cast<uint32_t>(map.box_columns) * 2;
    for (int64_t r = 0; r < map.box_rows; ++r)
        for (uint32_t c = 0; c < pitch; c += 16) {
            uint16_t values[8] = {};
            for (int i = 0; i < 8; ++i) {
                const int64_t column = x + c / 2 + i, row = y + r;
                if (column >= 0 && column < map.columns && row >= 0 && row < map.rows)
                    std::memcpy(values + i, map.base + row * map.stride + column * 2, 2);
            }
            write(p, swizzled(to + static_cast<uint32_t>(r) * pitch + c), values, 16, true, nullptr);
        }
    Barrier& b = barrier_of(p, barrier);
    b.bytes -= map.box_rows * pitch;
    settle(b);
}

const CUtensorMap& checked(const void* map, uint32_t to) {
    const auto& m = *static_cast<const CUtensorMap*>(map);
    if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || m.magic != kMapMagic) fail("no tensor map");
    if (m.box_columns != 64 || m.box_rows < 1 || m.box_rows > 256) fail("a box of %lld columns", (long long)m.box_columns);
    if (m.stride % 16 != 0 || reinterpret_cast<uintptr_t>(m.base) % 16 != 0) fail("a tensor map that is not aligned");
    if (to % 1024 != 0) fail("a box to %u, off the swizzle's pattern", to);
    return m;
}

/// ``rows`` of an operand, [16][rows], read as the descriptor says.
void read_operand(Program& p, uint64_t descriptor, bool mn, int first, int rows, uint64_t fenced, float* to) {
    const uint32_t start = (descriptor & 0x3FFF) << 4, block = (descriptor >> 16 & 0x3FFF) << 4;
    const uint32_t step = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("a descriptor without the 128-byte swizzle");
    for (int i = 0; i < rows; ++i)
        for (int k = 0; k < 16; ++k) {
            const int r = first + i;
            const uint32_t linear = mn ? start + r / 64 * block + k / 8 * step + k % 8 * 128 + r % 64 * 2
                                       : start + r / 8 * step + r % 8 * 128 + k * 2;
            const uint32_t at = swizzled(linear);
            if (at < kReserved || at + 2 > kEnd) fail("an operand at %u, outside shared memory", at);
            const Write& last = p.writes[at / 16];
            if (last.at > fenced && (last.by == nullptr || last.by->fenced < last.at))
                fail("a matmul reads %u of program %u, written without a proxy fence since", at, p.block);
            uint16_t bits;
            std::memcpy(&bits, p.memory + at, 2);
            to[k * rows + i] = __bfloat162float({bits});
        }
}

void multiply_next(Program& p, int warp) {
    Matmuls& g = p.warps[warp].matmuls;
    const Matmul m = g.queue.front();
    g.queue.pop_front();
    static float a[16 * 16], b[16 * 192], sums[16][192];
    read_operand(p, m.a, m.mn_a, warp % 4 * 16, 16, m.fenced, a);
    read_operand(p, m.b, m.mn_b, 0, m.columns, m.fenced, b);
    for (int r = 0; r < 16; ++r) {
        std::fill_n(sums[r], m.columns, 0.0f);
        for (int k = 0; k < 16; ++k) {
            const float left = a[k * 16 + r];
            for (int c = 0; c < m.columns; ++c) sums[r][c] += left * b[k * m.columns + c];
        }
    }
    for (int t = 0; t < 32; ++t) {
        const int top = t / 4, first = t % 4 * 2;
        for (int i = 0; i < m.columns / 2; ++i) {
            const float sum = sums[top + i / 2 % 2 * 8][i / 4 * 8 + first + i % 2];
            m.d[t][i] += sum;
        }
    }
    ++g.done;
    wake(g.waiting);
}

/// Where a queue of a warp keeps its ``i``-th call, of which ``gone`` have left.
template <class T>
T& at_call(std::deque<T>& queue, uint64_t i, uint64_t gone, const T& fresh) {
    if (i - gone == queue.size()) queue.push_back(fresh);
    return queue[i - gone];
}

std::string number(uint64_t i) { return std::to_string(i); }

}  // namespace

namespace emulate {

uint64_t meet(int kind, uint64_t value, int source) {
    Thread& t = *current;
    Warp& w = *t.warp;
    const uint64_t i = t.meetings++;
    if (i - w.met == w.meetings.size()) w.meetings.emplace_back().kind = kind;
    Meeting& m = w.meetings[i - w.met];
    if (m.kind != kind) fail("lanes of a warp meet at different calls");
    m.values[t.lane] = value;
    if (++m.arrived == 32) {
        wake(w.waiting);
    } else {
        while (w.meetings[i - w.met].arrived < 32) {
            w.waiting.push_back(&t);
            leave(kind == 1 ? "__syncwarp" : "__shfl_sync");
        }
    }
    const uint64_t result = w.meetings[i - w.met].values[source];
    ++w.meetings[i - w.met].left;
    while (!w.meetings.empty() && w.meetings.front().left == 32) {
        w.meetings.pop_front();
        ++w.met;
    }
    return result;
}

}  // namespace emulate

void __syncthreads() { gather(self().named[0], kThreads, "__syncthreads"); }

namespace ptx {

uint32_t address(const void* pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % 1024 != 0) fail("shared memory is not aligned");
    return kReserved;
}

void init(uint32_t barrier, uint32_t count) {
    place(self(), barrier, 8);
    if (self().barriers.count(barrier) || count == 0) fail("barrier %u is made twice, or for nobody", barrier);
    self().taken[barrier / 8] = 1;
    Barrier& b = self().barriers[barrier];
    b.count = b.pending = count;
}

void arrive(uint32_t barrier) { arrive_in(self(), barrier, 0); }
void arrive_at(uint32_t barrier, uint32_t rank) { arrive_in(peer(rank), barrier, 0); }
void release_at(uint32_t barrier, uint32_t rank) {
    current->released = ++now;
    arrive_at(barrier, rank);
}
void arrive_expect(uint32_t barrier, uint32_t bytes) { arrive_in(self(), barrier, bytes); }

void arrive_after_copies(uint32_t barrier) {
    Program& p = self();
    later(&p, [&p, barrier, copies = std::move(current->copies)] {
        for (const Copy& c : copies) write(p, c.to, c.from, 16, false, nullptr);
        arrive_in(p, barrier, 0);
    });
    current->copies.clear();
}

void wait(uint32_t barrier, uint32_t parity) {
    Program& p = self();
    Barrier& b = barrier_of(p, barrier);
    if (parity > 1) fail("parity %u", parity);
    while ((b.phase & 1) == parity) {
        b.waiting.push_back(current);
        const auto nth = std::distance(p.barriers.begin(), p.barriers.find(barrier));
        leave("barrier number " + number(nth) + ", parity " + number(parity) + " in phase " + number(b.phase) + ", pending " +
              number(b.pending) + " of " + number(b.count) + " and " + std::to_string(b.bytes) + " bytes");
    }
}

void wait_cluster(uint32_t barrier, uint32_t parity) {
    wait(barrier, parity);
    current->acquired = ++now;
}

void sync(uint32_t id, uint32_t threads) { gather(self().named[id], threads, "bar.sync"); }

void arrive_named(uint32_t id, uint32_t threads) {
    Rendezvous& at = self().named[id];
    if (at.arrived > 0 && at.threads != threads) fail("bar.arrive: %u threads, others said %u", threads, at.threads);
    at.threads = threads;
    if (++at.arrived < threads) return;
    at.arrived = 0;
    ++at.round;
    wake(at.waiting);
}

void cluster_sync() {
    Cluster& c = *self().cluster;
    gather(c.all, static_cast<uint32_t>(c.programs.size()) * kThreads, "barrier.cluster");
}

uint32_t cluster_rank() { return self().rank; }

void prefetch_map(const void* map) { checked(map, 0); }

void load(uint32_t to, const void* map, uint32_t barrier, int x, int y) {
    Program& p = self();
    const CUtensorMap& m = checked(map, to);
    later(&p, [&p, to, &m, barrier, x, y] { deliver(p, to, m, barrier, x, y); });
}

void load_all(uint32_t to, const void* map, uint32_t barrier, int x, int y, uint16_t mask) {
    const CUtensorMap& m = checked(map, to);
    for (uint32_t rank = 0; mask >> rank != 0; ++rank)
        if (mask >> rank & 1) {
            Program& p = peer(rank);
            later(&p, [&p, to, &m, barrier, x, y] { deliver(p, to, m, barrier, x, y); });
        }
}

void copy16(uint32_t to, const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) fail("cp.async from an address that is not aligned");
    if (random(4) == 0)
        write(self(), to, from, 16, false, nullptr);
    else
        current->copies.push_back({to, from});
}

void write16(void* to, int4 v) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) fail("a write of 16 bytes to an address that is not aligned");
    memcpy(to, &v, 16);
}

void prefetch(const void*) {}

void fence_async() { current->fenced = ++now; }

void store_at(uint32_t to, uint32_t rank, int4 value) { write(peer(rank), to, &value, 16, false, current); }

int4 load16(uint32_t from) {
    int4 v;
    std::memcpy(&v, place(self(), from, 16), 16);
    const Write& last = self().writes[from / 16];
    if (last.by != nullptr && last.by->program != &self() && (last.by->released < last.at || current->acquired < last.at))
        fail("a read of %u, stored by program %u, without release and acquire of the cluster", from, last.by->program->block);
    return v;
}

void store16(uint32_t to, int4 v) { write(self(), to, &v, 16, false, current); }
void store2(uint32_t to, uint16_t v) { write(self(), to, &v, 2, false, current); }

void store_matrix(bool transposed, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    Thread& t = *current;
    Warp& w = *t.warp;
    Matrix& m = at_call(w.matrices, t.matrices++, w.stored, Matrix{transposed});
    if (m.transposed != transposed) fail("lanes of a warp store different matrices");
    m.to[t.lane] = to;
    const uint32_t values[4] = {a, b, c, d};
    for (int q = 0; q < 4; ++q) m.values[q][t.lane] = values[q];
    if (++m.arrived < 32) return;
    for (int l = 0; l < 32; ++l) {
        uint16_t row[8];
        for (int i = 0; i < 8; ++i) {
            const int r = transposed ? i : l % 8, c2 = transposed ? l % 8 : i;  // lane 4 r + c / 2 holds row r, column c
            row[i] = static_cast<uint16_t>(m.values[l / 8][4 * r + c2 / 2] >> (c2 % 2 * 16));
        }
        write(self(), m.to[l], row, 16, false, current);
    }
    w.matrices.pop_front();
    ++w.stored;
}

float exp2_approx(float x) { return std::exp2(x); }

void mma_fence() { current->registers_fenced = true; }

void mma_start(int columns, int mn_a, int mn_b, float* d, uint64_t a, uint64_t b) {
    Thread& t = *current;
    Program& p = self();
    Matmuls& g = t.warp->matmuls;
    if (!t.registers_fenced) fail("a matmul without a fence since the last wait");
    Matmul fresh{columns, mn_a, mn_b, a, b};
    fresh.fenced = ~0ull;
    Matmul& m = at_call(g.queue, t.matmuls++, g.done, fresh);
    if (m.a != a || m.b != b || m.columns != columns || m.mn_a != mn_a || m.mn_b != mn_b)
        fail("lanes of a warp start different matmuls");
    m.d[t.lane] = d;
    m.fenced = std::min(m.fenced, t.fenced);
    if (++m.issued == 32) later(&p, [&p, warp = t.id / 32] { multiply_next(p, warp); });
}

void mma_commit() {
    Thread& t = *current;
    auto& boundaries = t.warp->matmuls.boundaries;
    if (t.groups == boundaries.size()) boundaries.push_back(t.matmuls);
    if (boundaries[t.groups++] != t.matmuls) fail("lanes of a warp commit different matmuls");
}

void mma_wait_for(int pending) {
    Thread& t = *current;
    Matmuls& g = t.warp->matmuls;
    t.registers_fenced = false;
    if (t.groups <= static_cast<uint64_t>(pending)) return;
    const uint64_t last = g.boundaries[t.groups - pending - 1];
    while (g.done < last) {
        g.waiting.push_back(&t);
        leave("matmul " + number(last) + " of the warp, " + number(g.done) + " done");
    }
}

}  // namespace ptx
