// Fibers, and who runs next.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

Index3 threadIdx, blockIdx, gridDim;

namespace emulate {

Thread* current;
uint64_t now;

namespace {

uint64_t state;
std::string error;
void* home;
const std::function<void()>* body;
std::vector<Warp*> able;
std::vector<Event> events;

extern "C" void emulate_switch(void** from, void* to);
asm(R"(
.text
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

void enable(Thread* t) {
    Warp& w = *t->warp;
    w.runnable |= 1u << t->lane;
    if (w.place < 0) {
        w.place = static_cast<int>(able.size());
        able.push_back(&w);
    }
}

void disable(Thread* t) {
    Warp& w = *t->warp;
    w.runnable &= ~(1u << t->lane);
    if (w.runnable == 0 && w.place >= 0) {
        able[w.place] = able.back();
        able[w.place]->place = w.place;
        able.pop_back();
        w.place = -1;
    }
}

[[noreturn]] void enter() {
    (*body)();
    Thread* t = current;
    if (!t->copies.empty()) fail("left with copies that nothing waits for");
    t->over = true;
    disable(t);
    Program& p = *t->program;
    if (--p.running == 0) {
        if (p.in_flight > 0) fail("program %u left with %d copies or matmuls in flight", p.block, p.in_flight);
        for (auto& [at, b] : p.barriers)
            if (b.bytes != 0) fail("program %u left barrier %u with %lld bytes pending", p.block, at, (long long)b.bytes);
    }
    emulate_switch(&t->stack, home);
    std::abort();
}

void go(Thread* t) {
    current = t;
    threadIdx.x = t->id;
    blockIdx.x = t->program->block;
    emulate_switch(&home, t->stack);
    current = nullptr;
}

void fire(size_t i) {
    Event e = std::move(events[i]);
    events[i] = std::move(events.back());
    events.pop_back();
    ++now;
    --e.program->in_flight;
    e.run();
}

void begin(Cluster& c) {
    c.started = true;
    for (auto& p : c.programs)
        for (Thread& t : p->threads) enable(&t);
}

std::string stuck(const std::vector<std::unique_ptr<Cluster>>& clusters) {
    std::string text = "deadlock";
    for (auto& c : clusters)
        for (auto& p : c->programs)
            for (size_t w = 0; w < p->warps.size(); ++w) {
                std::map<std::string, std::string> reasons;
                for (Thread* t : p->warps[w].lanes)
                    if (!t->over) reasons[t->why] += (reasons[t->why].empty() ? "" : ",") + std::to_string(t->lane);
                for (auto& [why, lanes] : reasons)
                    text += "\nprogram " + std::to_string(p->block) + " warp " + std::to_string(w) + " lanes " + lanes + ": " + why;
            }
    return text;
}

}  // namespace

void fail(const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (error.empty()) {
        error = text;
        if (current != nullptr)
            error += " (program " + std::to_string(current->program->block) + " thread " + std::to_string(current->id) + ")";
    }
    if (current == nullptr) throw 0;  // in an event: caught by run
    emulate_switch(&current->stack, home);
    std::abort();
}

uint64_t random(uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state * 0x2545F4914F6CDD1Dull >> 32) % below;
}

void leave(std::string why) {
    current->why = std::move(why);
    disable(current);
    emulate_switch(&current->stack, home);
}

void wake(std::vector<Thread*>& waiting) {
    for (Thread* t : waiting) enable(t);
    waiting.clear();
}

void later(Program* program, std::function<void()> run) {
    ++program->in_flight;
    events.push_back({program, std::move(run)});
}

void gather(Rendezvous& at, uint32_t threads, const char* what) {
    if (at.arrived > 0 && at.threads != threads) fail("%s: %u threads, others said %u", what, threads, at.threads);
    at.threads = threads;
    if (++at.arrived == threads) {
        at.arrived = 0;
        ++at.round;
        wake(at.waiting);
        return;
    }
    const uint64_t round = at.round;
    while (at.round == round) {
        at.waiting.push_back(current);
        leave(what);
    }
}

std::string run(const std::function<void()>& kernel, int grid, int cluster, uint64_t seed, int lanes) {
    state = seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    for (int i = 0; i < 8; ++i) random(2);
    error.clear();
    able.clear();
    events.clear();
    body = &kernel;
    now = 1;
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    const size_t stacks = static_cast<size_t>(grid) * kThreads * kStack;
    uint8_t* stack = static_cast<uint8_t*>(
        mmap(nullptr, stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stack == MAP_FAILED) return "no memory for stacks";
    std::vector<std::unique_ptr<Cluster>> clusters;
    const double speeds[] = {1, 1, 0.3, 0.03};
    for (int c = 0; c < grid / cluster; ++c) {
        clusters.push_back(std::make_unique<Cluster>());
        for (int r = 0; r < cluster; ++r) {
            auto p = std::make_unique<Program>();
            p->cluster = clusters.back().get();
            p->rank = r;
            p->block = c * cluster + r;
            p->memory = static_cast<uint8_t*>(std::aligned_alloc(1024, kReserved + kShared));
            std::fill_n(p->memory, kReserved + kShared, uint8_t{0xFF});
            p->taken.assign((kReserved + kShared) / 8, 0);
            p->writes.assign((kReserved + kShared) / 16, {});
            p->warps.resize(kThreads / 32);
            p->threads.resize(kThreads);
            for (int i = 0; i < kThreads; ++i) {
                Thread& t = p->threads[i];
                Warp& w = p->warps[i / 32];
                t.program = w.program = p.get();
                t.warp = &w;
                t.id = i;
                t.lane = i % 32;
                w.lanes[i % 32] = &t;
                if (t.lane == 0) w.speed = speeds[random(4)];
                void** top = reinterpret_cast<void**>(stack + (static_cast<size_t>(p->block) * kThreads + i + 1) * kStack);
                *--top = nullptr;  // where enter would return to: 8 below a multiple of 16
                *--top = reinterpret_cast<void*>(&enter);
                top -= 6;
                t.stack = top;
            }
            clusters.back()->programs.push_back(std::move(p));
        }
    }
    const uint64_t rates[] = {2, 20, 60, 95};  // of 100 steps, those that an event may have
    const uint64_t rate = rates[random(4)];
    begin(*clusters[random(clusters.size())]);
    try {
        while (error.empty()) {
            for (auto& c : clusters)
                if (!c->started && random(400) == 0) begin(*c);
            const bool running = !able.empty();
            if (!events.empty() && (!running || random(100) < rate)) {
                fire(random(events.size()));
                continue;
            }
            if (!running) {
                const auto idle = std::find_if(clusters.begin(), clusters.end(), [](auto& c) { return !c->started; });
                if (idle == clusters.end()) break;
                begin(**idle);
                continue;
            }
            Warp& w = *able[random(able.size())];
            if (w.speed < 1 && random(1000) >= w.speed * 1000) continue;
            uint32_t chosen = w.runnable;
            int order[32];
            for (int i = 0; i < 32; ++i) order[i] = 31 - i;
            if (lanes > 0)
                for (int i = 31; i > 0; --i) std::swap(order[i], order[random(i + 1)]);
            for (int i = 0; i < 32 && error.empty(); ++i)
                if (chosen >> order[i] & 1) {
                    ++now;
                    go(w.lanes[order[i]]);
                    if (lanes == 2) break;
                }
        }
    } catch (int) {
    }
    if (error.empty())
        for (auto& c : clusters)
            for (auto& p : c->programs)
                if (p->running > 0 && error.empty()) error = stuck(clusters);
    current = nullptr;
    for (auto& c : clusters)
        for (auto& p : c->programs) std::free(p->memory);
    munmap(stack, stacks);
    return error;
}

}  // namespace emulate
