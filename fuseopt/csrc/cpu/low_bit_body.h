// Products with weights of 8 and 4 bits, which are widened in registers. In the same namespace as decode_tiles_body.h.

using Words = Vector<uint32_t>;

// An element of 8 or 4 bits is made the low bits of a float's mantissa, `flip` being the other bits of the float, and
// the sign of an int8. No bit of kOffset + element is rounded, so subtracting the offset is exact.
template <int kShift, int kPlace, int kBits>
inline Vector<float> widened(const Words& words) {
  static_assert(kPlace + kBits <= 23);
  constexpr uint32_t kExponent = 127 + 23 - kPlace, kMask = ((1u << kBits) - 1) << kPlace;
  constexpr uint32_t kFlip = kExponent << 23 | (kBits == 8 ? 0x80u << kPlace : 0);
  constexpr float kOffset = static_cast<float>((1 << (23 - kPlace)) + (1 << (kBits - 1)));
  const Words shifted = words >> kShift;
#if defined(__x86_64__) && FUSEOPT_VECTOR_BYTES == 64
  const auto bits = _mm512_ternarylogic_epi32((__m512i)shifted, _mm512_set1_epi32(kMask), _mm512_set1_epi32(kFlip),
                                              0x6a);  // (a & b) ^ c
#else
  const Words bits = (shifted & kMask) ^ kFlip;
#endif
  return (Vector<float>)bits - kOffset;
}

// A word holds kElements neighbouring elements. Piece i of a vector of words is element(i) of each.
struct Int8 {
  static constexpr int kElements = 4;
  static constexpr int element(int i) { return i; }
  static constexpr int piece_of(int element) { return element; }
  template <int i>
  static Vector<float> piece(const Words& words) {
    return widened<i / 2 * 16, i % 2 * 8, 8>(words);
  }
};

// Nibbles, minus 8.
struct Int4 {
  static constexpr int kElements = 8;
  static constexpr int element(int i) { return i < 4 ? 2 * i : 2 * (i - 4) + 1; }
  static constexpr int piece_of(int element) { return element / 2 + element % 2 * 4; }
  template <int i>
  static Vector<float> piece(const Words& words) {
    return widened<i / 2 * 8, i % 2 * 4, 4>(words);
  }
};

// Elements in a vector of words.
template <typename Format>
constexpr int64_t kBlock = kLanes<float> * Format::kElements;

// Rows of the input in the order in which pieces of words meet them, and zeros up to a whole block.
template <typename Format>
class ArrangedInput {
 public:
  explicit ArrangedInput(const LowBitProducts& p)
      : stride_((p.length + kBlock<Format> - 1) / kBlock<Format> * kBlock<Format>), data_(p.rows * stride_) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const float* input = static_cast<const float*>(p.input) + row * p.input_stride;
      for (int64_t begin = 0; begin < stride_; begin += kBlock<Format>, input += kBlock<Format>) {
        float padded[kBlock<Format>] = {};
        std::memcpy(padded, input, std::min(kBlock<Format>, p.length - begin) * sizeof(float));
        float* target = data_.get() + row * stride_ + begin;
        for (int i = 0; i < Format::kElements; ++i, target += kLanes<float>) {
          for (int lane = 0; lane < kLanes<float>; ++lane) {
            target[lane] = padded[lane * Format::kElements + Format::element(i)];
          }
        }
      }
    }
  }

  const float* row(int64_t row) const { return data_.get() + row * stride_; }

 private:
  const int64_t stride_;
  const RowBuffer<float> data_;
};

// Calls body(scales) with the scales' type.
template <typename Body>
inline void with_scales(const LowBitProducts& p, const Body& body) {
  switch (p.scale_type) {
    case kFloat32: return body(static_cast<const float*>(p.scales));
    case kFloat16: return body(static_cast<const Half*>(p.scales));
    case kBFloat16: return body(static_cast<const BFloat16*>(p.scales));
    case kFloat64: return body(static_cast<const double*>(p.scales));
  }
}

// Scales and zero points of the groups of some lines, as float.
class LineGroups {
 public:
  explicit LineGroups(const LowBitProducts& p)
      : p_(p), groups_(p.length / p.group), shift_(__builtin_ctzll(p.group)), stride_(groups_ + kLanes<float>),
        buffer_(2 * kMostLines * stride_) {
    std::fill_n(buffer_.get(), 2 * kMostLines * stride_, 0.0f);
    for (int lane = 0; lane < kLanes<float>; ++lane) group_of_word_[lane] = lane * Int4::kElements / p.group;
  }

  void read(int slot, int64_t line) {
    with_scales(p_, [&](const auto* scales) {
      for (int64_t i = 0; i < groups_; ++i) scales_of(slot)[i] = static_cast<float>(scales[line * groups_ + i]);
    });
    if (p_.zeros == nullptr) return;
    for (int64_t i = 0; i < groups_; ++i) zeros_of(slot)[i] = p_.zeros[line * groups_ + i] - 8.0f;
  }

  // Of each word from element `begin` on.
  Vector<float> scales(int slot, int64_t begin) const { return of_words(scales_of(slot) + (begin >> shift_)); }
  Vector<float> zeros(int slot, int64_t begin) const { return of_words(zeros_of(slot) + (begin >> shift_)); }

  static constexpr int kMostLines = 4;

 private:
  float* scales_of(int slot) const { return buffer_.get() + slot * stride_; }
  float* zeros_of(int slot) const { return scales_of(kMostLines + slot); }

  Vector<float> of_words(const float* groups) const {
    if (p_.group >= kBlock<Int4>) return *groups - Vector<float>{};
#if defined(__x86_64__) && FUSEOPT_VECTOR_BYTES == 64
    return (Vector<float>)_mm512_permutexvar_ps((__m512i)group_of_word_, (__m512)load(groups));
#else
    Vector<float> result;
    for (int lane = 0; lane < kLanes<float>; ++lane) result[lane] = groups[group_of_word_[lane]];
    return result;
#endif
  }

  const LowBitProducts& p_;
  const int64_t groups_;
  const int shift_;
  const int64_t stride_;
  const RowBuffer<float> buffer_;
  Vector<int32_t> group_of_word_;
};

// Calls body(std::integral_constant<int, i>) for each i below kCount. Arrays with such indices are in registers.
template <int kCount, typename Body>
inline __attribute__((always_inline)) void unrolled(const Body& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Sums of kRows rows and kLines lines, before those over lanes. An element's scale is applied if it is a group's.
template <typename Format, bool kHasZeros, int kRows, int kLines>
inline void low_bit_sums(const LowBitProducts& p, const int64_t (&lines)[kLines], const ArrangedInput<Format>& input,
                         int64_t row, LineGroups& groups, Vector<float> (&sums)[kRows][kLanes<float>], int64_t at) {
  constexpr bool kHasGroups = std::is_same_v<Format, Int4>;
  constexpr bool kScalesSums = kHasGroups && kRows <= 2, kScalesWeights = kHasGroups && !kScalesSums;
  constexpr int64_t kPerByte = Format::kElements / sizeof(uint32_t);
  const int64_t line_bytes = p.length / kPerByte;
  const char* data[kLines];
  char padded[kLines][sizeof(Words)];
  const float* x[kRows];
  Vector<float> totals[kRows][kLines];
  for (int line = 0; line < kLines; ++line) {
    data[line] = static_cast<const char*>(p.values) + lines[line] * line_bytes;
    if constexpr (kHasGroups) groups.read(line, lines[line]);
  }
  unrolled<kRows>([&](auto r) {
    x[r] = input.row(row + r);
    unrolled<kLines>([&](auto line) { totals[r][line] = Vector<float>{}; });
  });
  for (int64_t begin = 0; begin < p.length; begin += kBlock<Format>) {
    if (begin + kBlock<Format> > p.length) [[unlikely]] {
      for (int line = 0; line < kLines; ++line) {
        std::memset(padded[line], 0, sizeof(Words));
        std::memcpy(padded[line], data[line], (p.length - begin) / kPerByte);
        data[line] = padded[line];
      }
    }
    Words words[kLines];
    Vector<float> zeros[kLines], scales[kLines], parts[kRows][kLines];
    unrolled<kLines>([&](auto line) {
      std::memcpy(&words[line], data[line], sizeof(Words));
      // TUNED: EPYC 9004, one thread, int8 [2304, 768]: 5.8 to 6.8 GB/s without, 8 to 10 into the L1 cache, 11 to 13
      // one group of lines ahead, 13 to 16 so.
      __builtin_prefetch(data[line] + 2 * kLines * line_bytes, 0, 2);
      data[line] += sizeof(Words);
      if constexpr (kHasZeros) zeros[line] = groups.zeros(line, begin);
      if constexpr (kHasGroups) scales[line] = groups.scales(line, begin);
    });
    unrolled<Format::kElements>([&](auto i) {
      unrolled<kLines>([&](auto line) {
        Vector<float> weights = Format::template piece<i>(words[line]);
        if constexpr (kHasZeros) weights -= zeros[line];
        if constexpr (kScalesWeights) weights *= scales[line];
        unrolled<kRows>([&](auto r) {
          const Vector<float> product = weights * load(x[r] + begin + i * kLanes<float>);
          if constexpr (kScalesSums) {
            parts[r][line] = i == 0 ? product : parts[r][line] + product;
          } else {
            totals[r][line] += product;
          }
        });
      });
    });
    if constexpr (kScalesSums) {
      unrolled<kLines>([&](auto line) {
        unrolled<kRows>([&](auto r) { totals[r][line] += parts[r][line] * scales[line]; });
      });
    }
  }
  unrolled<kRows>([&](auto r) { unrolled<kLines>([&](auto line) { sums[r][at + line] = totals[r][line]; }); });
}

template <typename Format, bool kHasZeros>
void multiply_low_bit(const LowBitProducts& p) {
  constexpr int kLines = LineGroups::kMostLines, kRows = 4;
  const ArrangedInput<Format> input(p);
  LineGroups groups(p);
  const float* scales = static_cast<const float*>(p.scales);  // with int8
  for (int64_t first = 0; first < p.lines; first += kLanes<float>) {
    const int64_t count = std::min(kLanes<float>, p.lines - first);
    for_each_tile<kRows>(p.rows, [&](int64_t row, auto rows) {
      Vector<float> sums[rows][kLanes<float>] = {};
      for (int64_t at = 0; at < count; at += kLines) {
        int64_t lines[kLines];
        for (int line = 0; line < kLines; ++line) lines[line] = first + std::min(at + line, count - 1);
        low_bit_sums<Format, kHasZeros>(p, lines, input, row, groups, sums, at);
      }
      for (int r = 0; r < rows; ++r) {
        Vector<float> result = sums_of<float>(sums[r]);
        if constexpr (std::is_same_v<Format, Int8>) result *= load(scales + first, count);
        std::memcpy(p.output + (row + r) * p.output_stride + first, &result, count * sizeof(float));
      }
    });
  }
}
