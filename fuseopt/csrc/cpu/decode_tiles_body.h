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

// The lanes of both vectors whose index lacks the bit kDistance, then the lanes that have it; those of a come first.
template <typename Math, int kDistance, int... kLane>
inline std::pair<Vector<Math>, Vector<Math>> halves(const Vector<Math>& a, const Vector<Math>& b,
                                                    std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  return {shuffled<Math, (kLane & kDistance ? kCount + kLane - kDistance : kLane)...>(a, b),
          shuffled<Math, (kLane & kDistance ? kCount + kLane : kLane + kDistance)...>(a, b)};
}

template <typename Math>
constexpr auto kEveryLane = std::make_integer_sequence<int, kLanes<Math>>();

// A vector whose lane i is the sum of all lanes of vectors[i].
template <typename Math, int kDistance = 1>
inline Vector<Math> sums_of(Vector<Math> (&vectors)[kLanes<Math>]) {
  if constexpr (kDistance == kLanes<Math>) {
    return vectors[0];
  } else {
    for (int i = 0; i < kLanes<Math>; i += 2 * kDistance) {
      const auto [even, odd] = halves<Math, kDistance>(vectors[i], vectors[i + kDistance], kEveryLane<Math>);
      vectors[i] = even + odd;
    }
    return sums_of<Math, 2 * kDistance>(vectors);
  }
}

// Lane j of vectors[i] becomes lane i of vectors[j].
template <typename Math, int kDistance = 1>
inline void transpose(Vector<Math> (&vectors)[kLanes<Math>]) {
  if constexpr (kDistance < kLanes<Math>) {
    for (int i = 0; i < kLanes<Math>; ++i) {
      if (i & kDistance) continue;
      std::tie(vectors[i], vectors[i + kDistance]) =
          halves<Math, kDistance>(vectors[i], vectors[i + kDistance], kEveryLane<Math>);
    }
    transpose<Math, 2 * kDistance>(vectors);
  }
}

// How a vector of a weight's elements is multiplied with one of the input's, in words of one or two neighbouring inputs.
template <typename T, typename X>
struct Multiply {
  using Word = MathOf<T>;
  static constexpr int64_t kInputsPerWord = 1;
  template <typename... Count>
  static Vector<Word> read(const auto* data, Count... count) {
    return load(data, count...);
  }
  static void add(Vector<Word>& sum, const Vector<Word>& weights, const Vector<Word>& x) { sum += weights * x; }
};

// Sums of kTileRows rows by kTileVectors vectors of outputs.
constexpr int kTileRows = FUSEOPT_VECTOR_BYTES == 64 ? 6 : 3;
constexpr int kTileVectors = 4;
template <typename Math>
constexpr int64_t kTileWidth = kTileVectors * kLanes<Math>;
constexpr int64_t kTileDepth = 64;  // lines of a block

// Blocks of a weight as add_tile reads them: a line for each input, of kTileWidth outputs.

// Blocks of a weight stored as [K, N], read in place.
template <typename T>
class LinesInPlace {
 public:
  static constexpr int64_t kInputsPerLine = 1;

  explicit LinesInPlace(const Products& p) : p_(p) {}
  int64_t depth() const { return kTileDepth; }
  int64_t stride() const { return p_.line_stride; }
  int64_t inputs() const { return p_.lines; }
  int64_t outputs() const { return p_.length; }
  const T* block(int64_t output, int64_t input, int64_t) const { return at(output, input); }
  Prefetch prefetch(int64_t output, int64_t input, int64_t count, int64_t steps) const {
    return Prefetch::of(at(output, input), p_.line_stride, count, kTileWidth<MathOf<T>>, steps);
  }

 private:
  const T* at(int64_t output, int64_t input) const {
    return static_cast<const T*>(p_.weight) + input * p_.line_stride + output;
  }
  const Products& p_;
};

// Blocks of a weight stored as [N, K], transposed by words.
template <typename T, typename X>
class TransposedLines {
 public:
  using Word = typename Multiply<T, X>::Word;
  static constexpr int64_t kInputsPerLine = Multiply<T, X>::kInputsPerWord;

  explicit TransposedLines(const Products& p) : p_(p) {}
  int64_t depth() const { return kTileDepth * kInputsPerLine; }
  int64_t stride() const { return kTileWidth<Word>; }
  int64_t inputs() const { return p_.length; }
  int64_t outputs() const { return p_.lines; }
  const Word* block(int64_t output, int64_t input, int64_t count) {
    constexpr int64_t kStep = kLanes<Word> * kInputsPerLine;
    for (int64_t first = 0; first < kTileWidth<Word>; first += kLanes<Word>) {
      for (int64_t i = 0; i < count; i += kStep) {
        Vector<Word> words[kLanes<Word>];
        for (int64_t line = 0; line < kLanes<Word>; ++line) {
          const T* data = at(output + first + line, input + i);
          words[line] = count - i >= kStep ? Multiply<T, X>::read(data) : Multiply<T, X>::read(data, count - i);
        }
        transpose<Word>(words);
        Word* target = lines_ + i / kInputsPerLine * stride() + first;
        for (int64_t line = 0; line < kLanes<Word>; ++line) store<Word>(target + line * stride(), words[line]);
      }
    }
    return lines_;
  }
  Prefetch prefetch(int64_t output, int64_t input, int64_t count, int64_t steps) const {
    return Prefetch::of(at(output, input), p_.line_stride, kTileWidth<Word>, count, steps);
  }

 private:
  const T* at(int64_t output, int64_t input) const {
    return static_cast<const T*>(p_.weight) + output * p_.line_stride + input;
  }
  const Products& p_;
  alignas(kCacheLine) Word lines_[kTileDepth * kTileWidth<Word>];
};

// Not inlined, since the constants of transpose() would occupy its registers.
template <int kRows, typename T, typename Math = MathOf<T>>
__attribute__((noinline)) void add_tile(const T* weight, int64_t line_stride, int64_t lines, const Math* input,
                                        int64_t input_stride, Math* output, int64_t output_stride, Prefetch& outer) {
  Prefetch prefetch = outer;  // in registers
  constexpr int64_t kStep = kLanes<Math>;
  Vector<Math> sums[kRows][kTileVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kTileVectors; ++i) sums[row][i] = load(output + row * output_stride + i * kStep);
  }
  for (int64_t line = 0; line < lines; ++line, weight += line_stride) {
    prefetch.step();
    Vector<Math> weights[kTileVectors];
    for (int i = 0; i < kTileVectors; ++i) weights[i] = load(weight + i * kStep);
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kTileVectors; ++i) sums[row][i] += weights[i] * input[row * input_stride + line];
    }
  }
  outer = prefetch;
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kTileVectors; ++i) store<Math>(output + row * output_stride + i * kStep, sums[row][i]);
  }
}

// Products with the outputs that fill tiles; returns their number. X: type of the input.
template <typename Lines, typename X, typename Math, typename P>
int64_t multiply_tiles(const P& p) {
  constexpr int64_t kWidth = kTileWidth<Math>, kPerLine = Lines::kInputsPerLine;
  Lines lines(p);
  const int64_t inputs = lines.inputs(), whole = lines.outputs() / kWidth * kWidth, depth = lines.depth();
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  for (int64_t row = 0; row < p.rows; ++row) {
    std::memset(static_cast<Math*>(p.output) + row * p.output_stride, 0, whole * sizeof(Math));
  }
  for (int64_t output = 0; output < whole; output += kWidth) {
    for (int64_t input = 0; input < inputs; input += depth) {
      const int64_t count = std::min(depth, inputs - input), in_lines = (count + kPerLine - 1) / kPerLine;
      const auto block = lines.block(output, input, count);
      const bool is_end = input + count == inputs, is_last = is_end && output + kWidth == whole;
      const int64_t next = is_end ? 0 : input + count, next_count = is_last ? 0 : std::min(depth, inputs - next);
      Prefetch prefetch = lines.prefetch(is_end ? output + kWidth : output, next, next_count, tiles * in_lines);
      for_each_tile<kTileRows>(p.rows, [&](int64_t row, auto rows) {
        add_tile<rows>(block, lines.stride(), in_lines, static_cast<const X*>(p.input) + row * p.input_stride + input,
                       p.input_stride, static_cast<Math*>(p.output) + row * p.output_stride + output, p.output_stride,
                       prefetch);
      });
    }
  }
  return whole;
}

template <typename T, typename X = MathOf<T>>
void add_tiles_of(const Products& p) {
  using Math = MathOf<T>;
  const int64_t whole = multiply_tiles<LinesInPlace<T>, X, Math>(p);
  if (whole == p.length) return;
  Products last = p;
  last.weight = static_cast<const T*>(p.weight) + whole;
  last.output = static_cast<Math*>(p.output) + whole;
  last.length = p.length - whole;
  add_lines_of<T, X>(last);
}

// Of a weight that is stored as [N, K]: kDotRows rows by kDotLines lines, whose sums are one vector in the end.
template <typename Math>
constexpr int kDotRows = kLanes<Math> >= 16 ? 4 : 2;
template <typename Math>
constexpr int kDotLines = kLanes<Math> / kDotRows<Math>;
// Elements at once, of which two times kDotLines lines and kDotRows rows fit into the L1 cache.
// TUNED: EPYC 9004, one thread, 8 rows of bfloat16 by [2304, 768]: 1024 elements 230 us, 512 elements 345 us.
template <typename T>
constexpr int64_t kDotDepth = sizeof(T) == 2 ? 1024 : 512;
constexpr int64_t kDotGroups = 2;

template <int kRows, typename T, typename X, typename Math = MathOf<T>>
inline void dot_tile(const T* weight, int64_t line_stride, int64_t length, const X* input, int64_t input_stride,
                     Math* output, int64_t output_stride, Prefetch& prefetch) {
  constexpr int64_t kStep = kLanes<Math> * Multiply<T, X>::kInputsPerWord;
  constexpr int kLines = kDotLines<Math>;
  Vector<Math> sums[kLanes<Math>] = {};
  int64_t i = 0;
  const auto add = [&](auto... count) {
    Vector<typename Multiply<T, X>::Word> weights[kLines];
    for (int line = 0; line < kLines; ++line) {
      weights[line] = Multiply<T, X>::read(weight + line * line_stride + i, count...);
    }
    for (int row = 0; row < kRows; ++row) {
      const auto x = Multiply<T, X>::read(input + row * input_stride + i, count...);
      for (int line = 0; line < kLines; ++line) Multiply<T, X>::add(sums[row * kLines + line], weights[line], x);
    }
  };
  for (; i + kStep <= length; i += kStep) {
    prefetch.step();
    add();
  }
  if (i < length) add(length - i);
  Math results[kLanes<Math>];
  store<Math>(results, sums_of<Math>(sums));
  for (int row = 0; row < kRows; ++row) {
    for (int line = 0; line < kLines; ++line) output[row * output_stride + line] += results[row * kLines + line];
  }
}

// Products with the lines that fill tiles; returns their number.
template <typename T, typename X, typename Math = MathOf<T>>
int64_t multiply_few_rows(const Products& p) {
  constexpr int64_t kLines = kDotLines<Math>, kGroup = kDotGroups * kLines;
  constexpr int64_t kStep = kLanes<Math> * Multiply<T, X>::kInputsPerWord;
  const int64_t whole = p.lines / kLines * kLines, tiles = (p.rows + kDotRows<Math> - 1) / kDotRows<Math>;
  const auto at = [&](int64_t line, int64_t k) { return static_cast<const T*>(p.weight) + line * p.line_stride + k; };
  for (int64_t row = 0; row < p.rows; ++row) {
    std::memset(static_cast<Math*>(p.output) + row * p.output_stride, 0, whole * sizeof(Math));
  }
  for (int64_t first = 0; first < whole; first += kGroup) {
    const int64_t group = std::min(kGroup, whole - first), next_group = std::min(kGroup, whole - first - group);
    for (int64_t begin = 0; begin < p.length; begin += kDotDepth<X>) {
      const int64_t length = std::min(kDotDepth<X>, p.length - begin), rest = p.length - begin - length;
      const T* next = rest > 0 ? at(first, begin + length) : at(first + group, 0);
      Prefetch prefetch = Prefetch::of(next, p.line_stride, rest > 0 ? group : next_group,
                                       std::min(kDotDepth<X>, rest > 0 ? rest : p.length),
                                       tiles * (group / kLines) * std::max<int64_t>(1, length / kStep));
      for_each_tile<kDotRows<Math>>(p.rows, [&](int64_t row, auto rows) {
        for (int64_t line = first; line < first + group; line += kLines) {
          dot_tile<rows>(at(line, begin), p.line_stride, length,
                         static_cast<const X*>(p.input) + row * p.input_stride + begin, p.input_stride,
                         static_cast<Math*>(p.output) + row * p.output_stride + line, p.output_stride, prefetch);
        }
      });
    }
  }
  return whole;
}

// From this many rows on it is faster to transpose the weight.
// TUNED: EPYC 9004, one thread, [2304, 768], dot tiles and transposed: float32 612 and 650 us with 8 rows, 1064 and 849
// with 16; bfloat16 398 and 436 with 12, 515 and 496 with 16.
template <typename X>
constexpr int64_t kTransposedRows = sizeof(X) == 2 ? 13 : 9;

template <typename T, typename X = MathOf<T>>
void dot_tiles_of(const Products& p) {
  using Math = MathOf<T>;
  const int64_t whole = p.rows < kTransposedRows<X> ? multiply_few_rows<T, X>(p)
                                                    : multiply_tiles<TransposedLines<T, X>, X, Math>(p);
  if (whole == p.lines) return;
  Products last = p;
  last.weight = static_cast<const T*>(p.weight) + whole * p.line_stride;
  last.output = static_cast<Math*>(p.output) + whole;
  last.lines = p.lines - whole;
  dot_lines_of<T, X>(last);
}
