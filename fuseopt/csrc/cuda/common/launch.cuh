// Grid sizes for the current device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/row_team.cuh"
#include "cuda/common/tuning.h"

namespace fuseopt {

template <int kValue>
using IntTag = std::integral_constant<int, kValue>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether a grid can have a block for every row. For more rows the "any" kernels walk the rows.
inline bool fits_grid(int64_t rows) { return rows <= INT32_MAX; }

// The number of blocks that have a team for every row, or for a grid-stride loop over the rows.
template <typename Shape>
unsigned row_blocks(int64_t rows, int threads, int64_t most_blocks = INT32_MAX) {
  return static_cast<unsigned>(std::min(ceil_div(rows, Shape::rows_per_block(threads)), most_blocks));
}

// Whether each row can have a multiprocessor to itself. Then the sequential work of a thread counts, so a row gets a
// block and a thread one vector of it.
inline bool are_few_rows(int64_t rows) { return rows <= multiprocessor_count(); }

// Calls `launch(Shape, threads)` with the first of `Shapes` that holds a row of `columns` elements; returns false if
// none does.
template <typename... Shapes, typename Launch>
bool dispatch_shape(int64_t columns, Launch launch) {
  const auto consider = [&](auto shape) {
    if (columns == 0 || columns > shape.kMaxRow) return false;
    launch(shape, shape.threads(columns));
    return true;
  };
  return (consider(Shapes{}) || ...);
}

}  // namespace fuseopt
