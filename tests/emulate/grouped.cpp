// The kernels, and how a test runs one.
#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace {
extern uint8_t shared[];
}
#include "grouped.cu"  // a copy, beside which no ptx.cuh lies
namespace {
alignas(1024) uint8_t shared[1024];  // only its address counts
}

namespace {

template <class Args>
int launch(void (*kernel)(const Args), const void* args, size_t size, int grid, int cluster, uint64_t seed, int lanes,
           char* error, size_t room) {
    if ((size + 63) / 64 * 64 != sizeof(Args)) {
        snprintf(error, room, "arguments have %zu bytes, not %zu", size, sizeof(Args));
        return 1;
    }
    Args copied;
    std::memcpy(&copied, args, size);
    const std::string text = emulate::run([&] { kernel(copied); }, grid, cluster, seed, lanes);
    snprintf(error, room, "%s", text.c_str());
    return !text.empty();
}

}  // namespace

extern "C" int emulate_rows(void (*kernel)(const RowsArgs), const void* args, size_t size, int grid, int cluster,
                            uint64_t seed, int lanes, char* error, size_t room) {
    return launch(kernel, args, size, grid, cluster, seed, lanes, error, room);
}

extern "C" int emulate_wgrad(void (*kernel)(const WgradArgs), const void* args, size_t size, int grid, int cluster,
                             uint64_t seed, int lanes, char* error, size_t room) {
    return launch(kernel, args, size, grid, cluster, seed, lanes, error, room);
}
