// Products of more rows than decode_kernels_body.h is for, in tiles whose sums stay in registers. Weights are read in
// place; the part of a weight that comes next is fetched meanwhile. In the same namespace.

// Cache lines that are fetched to the L2 cache, a few in each step: `lines` pieces, each of `cache_lines`.
struct Prefetch {
  const char* line;
  int64_t line_bytes;  // from one piece to the next
  int64_t cache_lines;
  int64_t left;
  int64_t at_once;
  int64_t within = 0;

  // Of `lines` pieces of `length` elements, in `steps` steps.
  template <typename T>
  static Prefetch of(const T* data, int64_t line_stride, int64_t lines, int64_t length, int64_t steps) {
    const int64_t bytes = sizeof(T), cache_lines = (length * bytes + kCacheLine - 1) / kCacheLine;
    const int64_t all = lines * cache_lines;
    return {reinterpret_cast<const char*>(data), line_stride * bytes, cache_lines, all, (all + steps - 1) / steps};
  }

  void step() {
    for (int64_t i = 0; i < at_once && left > 0; ++i, --left) {
      __builtin_prefetch(line + within * kCacheLine, 0, 2);
      if (++within < cache_lines) continue;
      within = 0;
      line += line_bytes;
    }
  }
};

// Calls body(begin, std::integral_constant<int, rows>) for nearly equal tiles of at most kMost rows.
template <int kMost, typename Body>
inline void for_each_tile(int64_t rows, const Body& body) {
  const int64_t tiles = (rows + kMost - 1) / kMost;
  const auto call = [&]<int... kLess>(int64_t begin, int64_t count, std::integer_sequence<int, kLess...>) {
    ((count == kLess + 1 ? body(begin, std::integral_constant<int, kLess + 1>()) : void()), ...);
  };
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
    call(begin, end - begin, std::make_integer_sequence<int, kMost>());
  }
}

// Of a weight that is stored as [K, N]: sums of kAddRows rows by kAddVectors vectors of outputs.
constexpr int kAddRows = FUSEOPT_VECTOR_BYTES == 64 ? 6 : 3;
constexpr int kAddVectors = 4;
constexpr int64_t kAddDepth = 64;  // lines at once: each is in another page

template <int kRows, typename T, typename Math = MathOf<T>>
inline void add_tile(const T* weight, int64_t line_stride, int64_t lines, const Math* input, int64_t input_stride,
                     Math* output, int64_t output_stride, Prefetch& prefetch) {
  constexpr int64_t kStep = kLanes<Math>;
  Vector<Math> sums[kRows][kAddVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kAddVectors; ++i) sums[row][i] = load(output + row * output_stride + i * kStep);
  }
  for (int64_t line = 0; line < lines; ++line, weight += line_stride) {
    prefetch.step();
    Vector<Math> weights[kAddVectors];
    for (int i = 0; i < kAddVectors; ++i) weights[i] = load(weight + i * kStep);
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kAddVectors; ++i) sums[row][i] += weights[i] * input[row * input_stride + line];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kAddVectors; ++i) store<Math>(output + row * output_stride + i * kStep, sums[row][i]);
  }
}

template <typename T, typename Math = MathOf<T>>
void add_tiles_of(const Products& p) {
  constexpr int64_t kWidth = kAddVectors * kLanes<Math>;
  const int64_t whole = p.length / kWidth * kWidth, tiles = (p.rows + kAddRows - 1) / kAddRows;
  for (int64_t row = 0; row < p.rows; ++row) {
    std::memset(static_cast<Math*>(p.output) + row * p.output_stride, 0, whole * sizeof(Math));
  }
  for (int64_t column = 0; column < whole; column += kWidth) {
    for (int64_t line = 0; line < p.lines; line += kAddDepth) {
      const int64_t lines = std::min(kAddDepth, p.lines - line), rest = p.lines - line - lines;
      const T* weight = static_cast<const T*>(p.weight) + line * p.line_stride + column;
      const bool is_last = rest == 0 && column + kWidth == whole;
      const T* next = rest > 0 ? weight + lines * p.line_stride : static_cast<const T*>(p.weight) + column + kWidth;
      const int64_t next_lines = is_last ? 0 : std::min(kAddDepth, rest > 0 ? rest : p.lines);
      Prefetch prefetch = Prefetch::of(next, p.line_stride, next_lines, kWidth, tiles * lines);
      for_each_tile<kAddRows>(p.rows, [&](int64_t row, auto rows) {
        add_tile<rows>(weight, p.line_stride, lines, static_cast<const Math*>(p.input) + row * p.input_stride + line,
                       p.input_stride, static_cast<Math*>(p.output) + row * p.output_stride + column, p.output_stride,
                       prefetch);
      });
    }
  }
  if (whole == p.length) return;
  Products last = p;
  last.weight = static_cast<const T*>(p.weight) + whole;
  last.output = static_cast<Math*>(p.output) + whole;
  last.length = p.length - whole;
  add_lines_of<T>(last);
}

// Of a weight that is stored as [N, K]: kDotRows rows by kDotLines lines, whose sums are one vector in the end.
template <typename Math>
constexpr int kDotRows = kLanes<Math> >= 16 ? 4 : 2;
template <typename Math>
constexpr int kDotLines = kLanes<Math> / kDotRows<Math>;
// Elements at once, of which two times kDotLines lines and kDotRows rows fit into the L1 cache.
// TUNED: EPYC 9004, one thread, 32 rows of float32 by [3072, 768]: 2.5 ms; 1024 elements of kDotLines lines 3.2 ms.
constexpr int64_t kDotDepth = 512;
constexpr int64_t kDotGroups = 2;

// The lanes kIndex of a, followed by b.
template <typename Math, int... kIndex>
inline Vector<Math> shuffled(const Vector<Math>& a, const Vector<Math>& b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kIndex...);
#else
  using Index = std::conditional_t<sizeof(Math) == sizeof(int64_t), int64_t, int32_t>;
  return __builtin_shuffle(a, b, Vector<Index>{kIndex...});
#endif
}

// a's sums in the lanes whose index lacks the bit kDistance, b's in the others.
template <typename Math, int kDistance, int... kLane>
inline Vector<Math> half_sums(const Vector<Math>& a, const Vector<Math>& b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  return shuffled<Math, (kLane & kDistance ? kCount + kLane - kDistance : kLane)...>(a, b) +
         shuffled<Math, (kLane & kDistance ? kCount + kLane : kLane + kDistance)...>(a, b);
}

// A vector whose lane i is the sum of all lanes of vectors[i].
template <typename Math, int kDistance = 1>
inline Vector<Math> sums_of(Vector<Math> (&vectors)[kLanes<Math>]) {
  constexpr int kCount = kLanes<Math>;
  if constexpr (kDistance == kCount) {
    return vectors[0];
  } else {
    for (int i = 0; i < kCount; i += 2 * kDistance) {
      constexpr auto kEveryLane = std::make_integer_sequence<int, kCount>();
      vectors[i] = half_sums<Math, kDistance>(vectors[i], vectors[i + kDistance], kEveryLane);
    }
    return sums_of<Math, 2 * kDistance>(vectors);
  }
}

template <int kRows, typename T, typename Math = MathOf<T>>
inline void dot_tile(const T* weight, int64_t line_stride, int64_t length, const Math* input, int64_t input_stride,
                     Math* output, int64_t output_stride, Prefetch& prefetch) {
  constexpr int64_t kStep = kLanes<Math>;
  constexpr int kLines = kDotLines<Math>;
  Vector<Math> sums[kLanes<Math>] = {};
  const auto add = [&](auto load_at) {
    Vector<Math> weights[kLines];
    for (int line = 0; line < kLines; ++line) weights[line] = load_at(weight + line * line_stride);
    for (int row = 0; row < kRows; ++row) {
      const Vector<Math> x = load_at(input + row * input_stride);
      for (int line = 0; line < kLines; ++line) sums[row * kLines + line] += weights[line] * x;
    }
  };
  int64_t i = 0;
  for (; i + kStep <= length; i += kStep) {
    prefetch.step();
    add([&](const auto* data) { return load(data + i); });
  }
  if (i < length) add([&](const auto* data) { return load(data + i, length - i); });
  Math results[kLanes<Math>];
  store<Math>(results, sums_of<Math>(sums));
  for (int row = 0; row < kRows; ++row) {
    for (int line = 0; line < kLines; ++line) output[row * output_stride + line] += results[row * kLines + line];
  }
}

template <typename T, typename Math = MathOf<T>>
void dot_tiles_of(const Products& p) {
  constexpr int64_t kLines = kDotLines<Math>, kGroup = kDotGroups * kLines, kStep = kLanes<Math>;
  const int64_t whole = p.lines / kLines * kLines, tiles = (p.rows + kDotRows<Math> - 1) / kDotRows<Math>;
  const auto at = [&](int64_t line, int64_t k) { return static_cast<const T*>(p.weight) + line * p.line_stride + k; };
  for (int64_t row = 0; row < p.rows; ++row) {
    std::memset(static_cast<Math*>(p.output) + row * p.output_stride, 0, whole * sizeof(Math));
  }
  for (int64_t first = 0; first < whole; first += kGroup) {
    const int64_t group = std::min(kGroup, whole - first), next_group = std::min(kGroup, whole - first - group);
    for (int64_t begin = 0; begin < p.length; begin += kDotDepth) {
      const int64_t length = std::min(kDotDepth, p.length - begin), rest = p.length - begin - length;
      const T* next = rest > 0 ? at(first, begin + length) : at(first + group, 0);
      Prefetch prefetch = Prefetch::of(next, p.line_stride, rest > 0 ? group : next_group,
                                       std::min(kDotDepth, rest > 0 ? rest : p.length),
                                       tiles * (group / kLines) * std::max<int64_t>(1, length / kStep));
      for_each_tile<kDotRows<Math>>(p.rows, [&](int64_t row, auto rows) {
        for (int64_t line = first; line < first + group; line += kLines) {
          dot_tile<rows>(at(line, begin), p.line_stride, length,
                         static_cast<const Math*>(p.input) + row * p.input_stride + begin, p.input_stride,
                         static_cast<Math*>(p.output) + row * p.output_stride + line, p.output_stride, prefetch);
        }
      });
    }
  }
  if (whole == p.lines) return;
  Products last = p;
  last.weight = static_cast<const T*>(p.weight) + whole * p.line_stride;
  last.output = static_cast<Math*>(p.output) + whole;
  last.lines = p.lines - whole;
  dot_lines_of<T>(last);
}

// The same for kColumns rows or somewhat fewer, of float and double: lanes are rows of the input, which is transposed
// once, and a weight's elements are factors of all of them.
// TUNED: EPYC 9004, one thread, 32 rows of float32 by [768, 768 to 3072]: 2.0 ms, by dot_tiles_of 2.5. 24 lines at once
// take 5.5 ms if they lie a multiple of 4 KB apart.
constexpr int kColumnLines = 12;
template <typename Math>
constexpr int64_t kColumns = 2 * kLanes<Math>;

template <typename Math>
inline void dot_columns(const Math* weight, int64_t line_stride, int64_t length, const Math* columns, int64_t rows,
                        Math* output, int64_t output_stride, Prefetch& prefetch) {
  constexpr int64_t kStep = kLanes<Math>;
  Vector<Math> left[kColumnLines] = {}, right[kColumnLines] = {};
  for (int64_t i = 0; i < length; ++i, columns += kColumns<Math>) {
    prefetch.step();
    const Vector<Math> first = load(columns), second = load(columns + kStep);
    for (int line = 0; line < kColumnLines; ++line) {
      const Math factor = weight[line * line_stride + i];
      left[line] += first * factor;
      right[line] += second * factor;
    }
  }
  for (int line = 0; line < kColumnLines; ++line) {
    Math results[kColumns<Math>];
    store<Math>(results, left[line]);
    store<Math>(results + kStep, right[line]);
    for (int64_t row = 0; row < rows; ++row) output[row * output_stride + line] = results[row];
  }
}

// Leaves out the last lines; returns how many it took.
template <typename Math>
inline int64_t dot_columns_of(const Products& p) {
  const Math* input = static_cast<const Math*>(p.input);
  const std::unique_ptr<Math[]> columns(new Math[p.length * kColumns<Math>]());
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t i = 0; i < p.length; ++i) columns[i * kColumns<Math> + row] = input[row * p.input_stride + i];
  }
  const int64_t whole = p.lines / kColumnLines * kColumnLines;
  for (int64_t line = 0; line < whole; line += kColumnLines) {
    const Math* weight = static_cast<const Math*>(p.weight) + line * p.line_stride;
    Prefetch prefetch = Prefetch::of(weight + kColumnLines * p.line_stride, p.line_stride,
                                     line + kColumnLines < whole ? kColumnLines : 0, p.length,
                                     std::max<int64_t>(1, p.length));
    dot_columns(weight, p.line_stride, p.length, columns.get(), p.rows, static_cast<Math*>(p.output) + line,
                p.output_stride, prefetch);
  }
  return whole;
}

template <typename T, typename Math = MathOf<T>>
void dot_rows_of(const Products& p) {
  for (int64_t row = 0; row < p.rows; row += kColumns<Math>) {
    Products some = p;
    some.rows = std::min(kColumns<Math>, p.rows - row);
    some.input = static_cast<const Math*>(p.input) + row * p.input_stride;
    some.output = static_cast<Math*>(p.output) + row * p.output_stride;
    if constexpr (std::is_same_v<T, Math> && FUSEOPT_VECTOR_BYTES == 64) {  // 16 registers do not hold such sums
      if (4 * some.rows > 3 * kColumns<Math>) {
        const int64_t whole = dot_columns_of<Math>(some);
        some.weight = static_cast<const T*>(p.weight) + whole * p.line_stride;
        some.output = static_cast<Math*>(some.output) + whole;
        some.lines = p.lines - whole;
      }
    }
    dot_tiles_of<T>(some);
  }
}

#define FUSEOPT_BY_DTYPE(function, dtype, ...)                    \
  switch (dtype) {                                                \
    case kFloat32: return function<float>(__VA_ARGS__);           \
    case kFloat16: return function<Half>(__VA_ARGS__);            \
    case kBFloat16: return function<BFloat16>(__VA_ARGS__);       \
    case kFloat64: return function<double>(__VA_ARGS__);          \
  }

void dot_lines(const Products& products) { FUSEOPT_BY_DTYPE(dot_lines_of, products.dtype, products) }
void dot_tiles(const Products& products) { FUSEOPT_BY_DTYPE(dot_rows_of, products.dtype, products) }
void add_lines(const Products& products) { FUSEOPT_BY_DTYPE(add_lines_of, products.dtype, products) }
void add_tiles(const Products& products) { FUSEOPT_BY_DTYPE(add_tiles_of, products.dtype, products) }
