// The parameters of the products of rows.
#pragma once

#include "results.cuh"

struct RowsArgs {
    CUtensorMap a, b;      // a: rows [N, depth]; b: [E * columns, depth] or [E * depth, columns]
    Tiles tiles;
    const int4* x;           // rows to gather from, 16 * ``stride`` bytes apart
    const long long* index;  // row r is row divide(index[r]) of x
    unsigned stride;
    Divide divide;
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

// driver.py has the same fields
static_assert(offsetof(RowsArgs, tiles) == 256 && offsetof(RowsArgs, x) == 288 && offsetof(RowsArgs, out) == 320 &&
              offsetof(RowsArgs, depth) == 344 && offsetof(RowsArgs, limit) == 364 &&
              offsetof(RowsArgs, dots) == 384 && sizeof(RowsArgs) <= 512);
