// Grouped matmuls for Hopper in bf16 with ping-pong tiles: the weight of a row's expert, and the weight gradients.
//
// A program is three warpgroups. Two multiply. In products of rows each owns every second tile of 128 x 192 results, so
// that one may round, activate and store its tile while the other keeps the tensor cores busy; in weight gradients the two
// do the same, or have 192 columns each of one tile of 128 x 384 and read the same gathered rows. The third feeds both through one ring of
// stages of 64 in depth: its warps gather rows, warp 0 also loads with the copy engine, warp 1 of the first program of a
// cluster hands out tiles. The programs of a cluster work on neighbouring rows of the same tile of columns: each loads its
// share of the other operand into all of them. Clusters take the next tile when they are free.
//
// Grid: any number of clusters. No program waits for one that may not have started, other than those of its cluster.

#include "rows.cuh"
#include "wgrad.cuh"

#define ROWS(name, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name##_1(const __grid_constant__ RowsArgs p) {        \
        rows_body<__VA_ARGS__, 1>(p);                                                                                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2) name##_2(                          \
        const __grid_constant__ RowsArgs p) {                                                                        \
        rows_body<__VA_ARGS__, 2>(p);                                                                                \
    }
#define WGRAD(name, transposed, sides)                                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) name##_1(const __grid_constant__ WgradArgs p) {       \
        wgrad_body<transposed, sides, 1>(p);                                                                         \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2) name##_2(                          \
        const __grid_constant__ WgradArgs p) {                                                                       \
        wgrad_body<transposed, sides, 2>(p);                                                                         \
    }

// name: kind, activation, biases, weights [E, in, out], rows gathered; name: transposed, warpgroups that share a tile
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
WGRAD(wgrad, false, 2)
WGRAD(wgrad_transposed, true, 2)
WGRAD(wgrad_turns, false, 1)
WGRAD(wgrad_transposed_turns, true, 1)
