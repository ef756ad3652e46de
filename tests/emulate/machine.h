// A machine that runs kernels for Hopper on the host. Every thread is a fiber, which leaves only where it waits; copies and
// matmuls are events, done at a random later step. A seed fixes the order; another seed gives another.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda.h"

namespace emulate {

constexpr uint32_t kReserved = 1024, kShared = 232448;  // bytes of a program; the first are the system's
constexpr int kThreads = 384, kStack = 64 * 1024;

struct Program;
struct Thread;

/// An mbarrier: a phase ends when no arrival and no byte is pending.
struct Barrier {
    uint32_t count = 0, pending = 0, phase = 0;
    int64_t bytes = 0;
    std::vector<Thread*> waiting;
};

/// Threads that wait for each other: bar.sync, or the barrier of a cluster.
struct Rendezvous {
    uint32_t arrived = 0, threads = 0;
    uint64_t round = 0;
    std::vector<Thread*> waiting;
};

/// One call of all lanes of a warp.
struct Meeting {
    int kind = 0;
    uint32_t arrived = 0, left = 0;
    uint64_t values[32];
};

struct Matrix {
    bool transposed;
    uint32_t arrived = 0, to[32], values[4][32];
};

/// What one warp of a warpgroup does of a matmul: 16 of the 64 rows. Nothing orders the warps.
struct Matmul {
    int columns, mn_a, mn_b;
    uint64_t a, b;
    uint32_t issued = 0;
    uint64_t fenced;  // the earliest of the threads' last proxy fences
    float* d[32];
};

struct Matmuls {
    std::deque<Matmul> queue;
    uint64_t done = 0;                 // matmuls
    std::vector<uint64_t> boundaries;  // matmuls up to the end of each group
    std::vector<Thread*> waiting;
};

struct Warp {
    Program* program;
    Thread* lanes[32];
    uint32_t runnable = 0;
    int place = -1;  // in the list of warps that can run
    double speed = 1;
    std::deque<Meeting> meetings;
    uint64_t met = 0;  // meetings that are over
    std::vector<Thread*> waiting;
    std::deque<Matrix> matrices;
    uint64_t stored = 0;
    Matmuls matmuls;
};

struct Copy {
    uint32_t to;
    const void* from;
};

struct Thread {
    Program* program;
    Warp* warp;
    int id, lane;
    void* stack = nullptr;  // pointer where it left
    bool over = false;
    std::string why;
    uint64_t meetings = 0, matrices = 0, matmuls = 0, groups = 0, fenced = 0, released = 0, acquired = 0;
    bool registers_fenced = false;
    std::vector<Copy> copies;
};

/// When and by whom 16 bytes were last written outside the async proxy.
struct Write {
    uint64_t at = 0;
    Thread* by = nullptr;  // null: by cp.async
};

struct Cluster;

struct Program {
    Cluster* cluster;
    uint32_t rank, block;
    uint8_t* memory;
    std::vector<uint8_t> taken;  // by barriers, one flag for 8 bytes
    std::vector<Write> writes;
    std::map<uint32_t, Barrier> barriers;
    Rendezvous named[16];
    std::vector<Warp> warps;
    std::vector<Thread> threads;
    int running = kThreads, in_flight = 0;
};

struct Cluster {
    std::vector<std::unique_ptr<Program>> programs;
    Rendezvous all;
    bool started = false;
};

struct Event {
    Program* program;
    std::function<void()> run;
};

extern Thread* current;
extern uint64_t now;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
uint64_t random(uint64_t below);
/// Leaves until another wakes this thread; ``why`` is for the report of a deadlock.
void leave(std::string why);
void wake(std::vector<Thread*>& waiting);
void later(Program* program, std::function<void()> run);
void gather(Rendezvous& at, uint32_t threads, const char* what);

/// Runs a grid; the first error, or an empty text. ``lanes``: 0 keeps the lanes of a warp together, lane 0 last; 1 the same
/// in random order; 2 lets them diverge.
std::string run(const std::function<void()>& kernel, int grid, int cluster, uint64_t seed, int lanes);

}  // namespace emulate
