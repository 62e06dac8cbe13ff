// Attention of one query to a head's cache: scores, softmax and weighted values, in turn. A cache of 8 bits is widened in
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

// Numbers of a cache, as vectors of Math. Those of 8 bits have a scale, of which kUnit is a part.
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

// Exponent and mantissa move to their places in a half, whose exponent's bias is greater by 8.
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

template <typename T>
class Attention {
 public:
  using Math = MathOf<T>;

  explicit Attention(const HeadAttention& a)
      : a_(a), scores_(static_cast<Math*>(a.scores)), output_(static_cast<Math*>(a.output)) {}

  void run() const {
    if (score()) return add_values();
    std::memset(output_, 0, a_.head_dim * sizeof(Math));
  }

 private:
  static constexpr int64_t kStep = kLanes<Math>;
  // Vectors of output at once: sums that do not wait for each other.
  static constexpr int kColumns = 4;

  bool is_attended(int64_t place) const { return a_.mask == nullptr || a_.mask[place]; }

  // Of a place in the rows of a cache, in places.
  int64_t index(int64_t place) const {
    const int64_t row = a_.ancestry == nullptr || place + 1 == a_.end ? a_.row : a_.ancestry[place];
    return row * a_.row_places + place;
  }

  static Math scale_of(const float* scales, int64_t index) {
    return scales == nullptr ? Math{1} : static_cast<Math>(scales[index] * CacheElements<T>::kUnit);
  }

  // The places' weights, before values' scales, which sum up to 1; false if no place is attended to.
  bool score() const {
    constexpr Math kLeast = -std::numeric_limits<Math>::infinity();
    Math highest = kLeast, total = 0;
    bool attends = false;
    for (int64_t first = a_.begin; first < a_.end; first += kStep) {
      const int64_t count = std::min(kStep, a_.end - first);
      Math products[kStep];
      store<Math>(products, products_of(first, count));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = first + i;
        Math& score = scores_[place - a_.begin] = kLeast;
        if (!is_attended(place)) continue;
        attends = true;
        score = products[i] * scale_of(a_.key_scales, index(place));
        if (a_.softcap > 0) score = static_cast<Math>(a_.softcap) * std::tanh(score / static_cast<Math>(a_.softcap));
        if (a_.bias != nullptr) {
          score += static_cast<const Math*>(a_.bias)[std::min(a_.end - 1 - place, a_.distances - 1)];
        }
        highest = score > highest ? score : highest;
      }
    }
    if (!attends) return false;
    const int64_t places = a_.end - a_.begin;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < places; ++i) {
      scores_[i] = exp(scores_[i] - highest);
      total += scores_[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < places; ++i) scores_[i] /= total;
    return true;
  }

  // Of the query with the keys of `count` places.
  Vector<Math> products_of(int64_t first, int64_t count) const {
    Vector<Math> sums[kStep] = {};
    for (int64_t i = 0; i < count; ++i) {
      if (!is_attended(first + i)) continue;
      const T* key = static_cast<const T*>(a_.keys) + index(first + i) * a_.head_dim;
      const Math* query = static_cast<const Math*>(a_.query);
      Vector<Math> sum = {};
      for (int64_t d = 0; d < a_.head_dim; d += kStep) {
        const int64_t n = std::min(kStep, a_.head_dim - d);
        sum += read_elements(key + d, n) * (n == kStep ? load(query + d) : load(query + d, n));
      }
      sums[i] = sum;
    }
    return sums_of<Math>(sums);
  }

  void add_values() const {
    int64_t d = 0;
    for (; d + kColumns * kStep <= a_.head_dim; d += kColumns * kStep) add_columns<kColumns>(d, kStep);
    for (; d < a_.head_dim; d += kStep) add_columns<1>(d, std::min(kStep, a_.head_dim - d));
  }

  // `last`: elements of the last vector.
  template <int kCount>
  void add_columns(int64_t d, int64_t last) const {
    Vector<Math> sums[kCount] = {};
    for (int64_t place = a_.begin; place < a_.end; ++place) {
      if (!is_attended(place)) continue;  // a place that was never written may hold NaN
      const int64_t at = index(place);
      const T* value = static_cast<const T*>(a_.values) + at * a_.head_dim + d;
      const Math weight = scores_[place - a_.begin] * scale_of(a_.value_scales, at);
      for (int i = 0; i < kCount; ++i) sums[i] += read_elements(value + i * kStep, i + 1 < kCount ? kStep : last) * weight;
    }
    std::memcpy(output_ + d, sums, ((kCount - 1) * kStep + last) * sizeof(Math));
  }

  const HeadAttention& a_;
  Math* const scores_;
  Math* const output_;
};

template <typename T>
void attend_of(const HeadAttention& attention) {
  Attention<T>(attention).run();
}

void attend(const HeadAttention& attention) {
  if (attention.cache_dtype == kInt8) return attend_of<int8_t>(attention);
  if (attention.cache_dtype == kFp8) return attend_of<Fp8>(attention);
  FUSEOPT_BY_DTYPE(attend_of, attention.dtype, attention)
}

#undef FUSEOPT_BY_DTYPE
