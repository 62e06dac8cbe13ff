// Attention of queries to a head's cache: scores, then softmax, then weighted values. Elements of 8 bits are widened in
// registers. In the same namespace as decode_tiles_body.h.

// e4m3.
struct Fp8 {
  uint8_t bits;
};

// A vector of bytes, sign-extended to 16 bits: GCC converts bytes to wider numbers one by one.
typedef int16_t Extended __attribute__((vector_size(FUSEOPT_VECTOR_BYTES / 2)));
inline Extended extended(const void* data) {
  typedef int8_t Bytes __attribute__((vector_size(FUSEOPT_VECTOR_BYTES / 4)));
  Bytes bytes;
  std::memcpy(&bytes, data, sizeof(bytes));
  return __builtin_convertvector(bytes, Extended);
}

// Reads elements of a cache as vectors of Math. `read` of 8-bit elements must be multiplied by their scale and by kUnit.
template <typename T>
struct CacheElements {
  static constexpr float kUnit = 1;
  static Vector<MathOf<T>> read(const T* data) { return load(data); }
};

template <>
struct CacheElements<int8_t> {
  static constexpr float kUnit = 1;
  static Vector<float> read(const int8_t* data) {
#if defined(__x86_64__) && FUSEOPT_VECTOR_BYTES == 64
    return (Vector<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))));
#else
    return __builtin_convertvector(__builtin_convertvector(extended(data), Vector<int32_t>), Vector<float>);
#endif
  }
};

// Exponent and mantissa are shifted to those of a half, whose exponent bias is greater by 8: kUnit is 2^8.
template <>
struct CacheElements<Fp8> {
  static constexpr float kUnit = 256;
  static Vector<float> read(const Fp8* data) {
    const Extended halves = extended(data) << 7 & static_cast<int16_t>(0xbf80);
    Half elements[kLanes<float>];
    std::memcpy(elements, &halves, sizeof(halves));
    return load(elements);
  }
};

template <typename T>
inline Vector<MathOf<T>> read_elements(const T* data, int64_t count) {
  if (count == kLanes<MathOf<T>>) return CacheElements<T>::read(data);
  T padded[kLanes<MathOf<T>>] = {};
  std::memcpy(padded, data, count * sizeof(T));
  return CacheElements<T>::read(padded);
}

// Attention of kQueries queries from `first_query` on, which widens each key and value once for all of them.
template <typename T, int kQueries>
class Attention {
 public:
  using Math = MathOf<T>;

  Attention(const HeadAttention& a, int64_t first_query)
      : a_(a), places_(std::max<int64_t>(0, a.end - a.begin)), query_(static_cast<const Math*>(a.query) + first_query * a.head_dim),
        bias_(a.bias == nullptr ? nullptr : static_cast<const Math*>(a.bias) + first_query * a.distances),
        scores_(static_cast<Math*>(a.scores) + first_query * places_),
        output_(static_cast<Math*>(a.output) + first_query * a.head_dim) {}

  void run() const {
    if (score()) return add_values();
    std::memset(output_, 0, kQueries * a_.head_dim * sizeof(Math));
  }

 private:
  static constexpr int64_t kStep = kLanes<Math>;
  // Vectors of a query's output that are summed at once: independent sums hide the latency of the additions.
  static constexpr int kColumns = 4;

  bool is_attended(int64_t place) const { return a_.mask == nullptr || a_.mask[place]; }

  // Offset of a place from the start of the cache, in places.
  int64_t index(int64_t place) const {
    const int64_t row = a_.ancestry == nullptr || place + 1 == a_.end ? a_.row : a_.ancestry[place];
    return row * a_.row_places + place;
  }

  static Math scale_of(const float* scales, int64_t index) {
    return scales == nullptr ? Math{1} : static_cast<Math>(scales[index] * CacheElements<T>::kUnit);
  }

  // Computes the softmax of the scores; false if no place is attended to.
  bool score() const {
    constexpr Math kLeast = -std::numeric_limits<Math>::infinity();
    Math highest[kQueries];
    std::fill_n(highest, kQueries, kLeast);
    bool attends = false;
    for (int64_t first = a_.begin; first < a_.end; first += kStep) {
      const int64_t count = std::min(kStep, a_.end - first);
      Math products[kQueries][kStep];
      multiply_keys(first, count, products);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = first + i;
        const bool is_kept = is_attended(place);
        attends |= is_kept;
        const Math scale = is_kept ? scale_of(a_.key_scales, index(place)) : Math{0};
        for (int q = 0; q < kQueries; ++q) {
          Math& score = scores_[q * places_ + place - a_.begin] = kLeast;
          if (!is_kept) continue;
          score = products[q][i] * scale;
          if (a_.softcap > 0) score = static_cast<Math>(a_.softcap) * std::tanh(score / static_cast<Math>(a_.softcap));
          if (bias_ != nullptr) score += bias_[q * a_.distances + std::min(a_.end - 1 - place, a_.distances - 1)];
          highest[q] = score > highest[q] ? score : highest[q];
        }
      }
    }
    if (!attends) return false;
    for (int q = 0; q < kQueries; ++q) {
      Math* const scores = scores_ + q * places_;
      Math total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < places_; ++i) {
        scores[i] = exp(scores[i] - highest[q]);
        total += scores[i];
      }
#pragma omp simd
      for (int64_t i = 0; i < places_; ++i) scores[i] /= total;
    }
    return true;
  }

  // Products of the queries with the keys of `count` places from `first` on.
  void multiply_keys(int64_t first, int64_t count, Math (&products)[kQueries][kStep]) const {
    Vector<Math> sums[kQueries][kStep];
    for (int64_t i = 0; i < kStep; ++i) {
      Vector<Math> of_key[kQueries] = {};
      if (i < count && is_attended(first + i)) {
        const T* key = static_cast<const T*>(a_.keys) + index(first + i) * a_.head_dim;
        for (int64_t d = 0; d < a_.head_dim; d += kStep) {
          const int64_t n = std::min(kStep, a_.head_dim - d);
          const Vector<Math> elements = read_elements(key + d, n);
          for (int q = 0; q < kQueries; ++q) {
            const Math* query = query_ + q * a_.head_dim + d;
            of_key[q] += elements * (n == kStep ? load(query) : load(query, n));
          }
        }
      }
      for (int q = 0; q < kQueries; ++q) sums[q][i] = of_key[q];
    }
    for (int q = 0; q < kQueries; ++q) store<Math>(products[q], sums_of<Math>(sums[q]));
  }

  void add_values() const {
    int64_t d = 0;
    for (; d + kColumns * kStep <= a_.head_dim; d += kColumns * kStep) add_columns<kColumns>(d, kStep);
    for (; d < a_.head_dim; d += kStep) add_columns<1>(d, std::min(kStep, a_.head_dim - d));
  }

  // Sums kCount vectors of the output from element `d` on; `last`: elements of the last vector.
  template <int kCount>
  void add_columns(int64_t d, int64_t last) const {
    Vector<Math> sums[kQueries][kCount] = {};
    for (int64_t i = 0; i < places_; ++i) {
      if (!is_attended(a_.begin + i)) continue;  // a place that was never written may hold NaN
      const int64_t at = index(a_.begin + i);
      const T* value = static_cast<const T*>(a_.values) + at * a_.head_dim + d;
      const Math scale = scale_of(a_.value_scales, at);
      Vector<Math> elements[kCount];
      for (int c = 0; c < kCount; ++c) elements[c] = read_elements(value + c * kStep, c + 1 < kCount ? kStep : last);
      for (int q = 0; q < kQueries; ++q) {
        const Math weight = scores_[q * places_ + i] * scale;
        for (int c = 0; c < kCount; ++c) sums[q][c] += elements[c] * weight;
      }
    }
    for (int q = 0; q < kQueries; ++q) {
      std::memcpy(output_ + q * a_.head_dim + d, sums[q], ((kCount - 1) * kStep + last) * sizeof(Math));
    }
  }

  const HeadAttention& a_;
  const int64_t places_;
  const Math* const query_;
  const Math* const bias_;
  Math* const scores_;
  Math* const output_;
};

template <typename T>
void attend_of(const HeadAttention& attention) {
  constexpr int kMostQueries = FUSEOPT_VECTOR_BYTES == 64 ? 4 : 2;  // the most whose sums stay in registers
  for_each_tile<kMostQueries>(attention.queries, [&](int64_t first, auto queries) {
    Attention<T, queries>(attention, first).run();
  });
}
