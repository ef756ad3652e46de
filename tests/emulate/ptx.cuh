// The functions of kernels/cuda/ptx.cuh for a machine of fibers; instructions.cpp has what they do.
#pragma once

#include <cstring>

#include "cuda_bf16.h"

namespace ptx {

uint32_t address(const void* pointer);
template <class T>
inline const T* kept(const T* pointer) {
    return pointer;
}
inline uint32_t kept(uint32_t value) { return value; }

void init(uint32_t barrier, uint32_t count);
inline void fence_init() {}
void arrive(uint32_t barrier);
void arrive_at(uint32_t barrier, uint32_t rank);
void release_at(uint32_t barrier, uint32_t rank);
void arrive_expect(uint32_t barrier, uint32_t bytes);
void arrive_after_copies(uint32_t barrier);
void wait(uint32_t barrier, uint32_t parity);
void wait_cluster(uint32_t barrier, uint32_t parity);
void sync(uint32_t id, uint32_t threads);
void arrive_named(uint32_t id, uint32_t threads);
void cluster_sync();
inline bool elect() {
    __syncwarp();
    return threadIdx.x % 32 == 0;
}
uint32_t cluster_rank();

void prefetch_map(const void* map);
void load(uint32_t to, const void* map, uint32_t barrier, int x, int y);
void load_all(uint32_t to, const void* map, uint32_t barrier, int x, int y, uint16_t mask);
void copy16(uint32_t to, const void* from);
void write16(void* to, int4 v);
void prefetch(const void* at);
void fence_async();
void store_at(uint32_t to, uint32_t rank, int4 value);
int4 load16(uint32_t from);
void store16(uint32_t to, int4 v);
void store2(uint32_t to, uint16_t v);
void store_matrix(bool transposed, uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
template <bool TRANSPOSED>
inline void store_blocks(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    store_matrix(TRANSPOSED, to, a, b, c, d);
}

inline uint32_t pack(float low, float high) {
    return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
inline float2 unpack(uint32_t both) {
    const uint32_t bits[2] = {both << 16, both & 0xFFFF0000u};
    float2 halves;
    std::memcpy(&halves, bits, 8);
    return halves;
}
float exp2_approx(float x);
inline float rcp_approx(float x) { return 1.0f / x; }

template <int REGISTERS>
inline void more_registers() {}
template <int REGISTERS>
inline void fewer_registers() {}

void mma_fence();
void mma_commit();
void mma_wait_for(int pending);
template <int PENDING>
inline void mma_wait() {
    mma_wait_for(PENDING);
}

inline uint64_t describe(uint32_t at, uint32_t block, uint32_t step) {
    return static_cast<uint64_t>((at & 0x3FFFF) >> 4) | static_cast<uint64_t>(block >> 4) << 16 |
           static_cast<uint64_t>(step >> 4) << 32 | 1ull << 62;
}

void mma_start(int columns, int mn_a, int mn_b, float* d, uint64_t a, uint64_t b);
template <int COLUMNS, int MN_A, int MN_B>
inline void mma(float (&d)[96], uint64_t a, uint64_t b) {
    mma_start(COLUMNS, MN_A, MN_B, d, a, b);
}

}  // namespace ptx
