// Tiles of 8-bit and 4-bit weights, which are transposed as words and then widened. In the namespace of the other bodies.

// Blocks as add_tile reads them: floats, or pairs of bfloat16, which represent every 8-bit element exactly.
template <typename Format, bool kHasZeros, bool kIsPaired>
class LowBitLines {
 public:
  using Word = std::conditional_t<kIsPaired, uint32_t, float>;
  // Scales of groups are applied to floats, or to the sums of a block of pairs.
  struct PairBlock {
    const uint32_t* lines;
    const float* scales;  // null: none
  };
  static constexpr int64_t kInputsPerLine = kIsPaired ? 2 : 1;

  explicit LowBitLines(const LowBitProducts& p) : p_(p), groups_(p.length / p.group) {}
  int64_t depth() const { return kIsPaired && kHasGroups ? std::min(kDepth, p_.group) : kDepth; }
  int64_t stride() const { return kTileWidth<float>; }
  int64_t inputs() const { return p_.length; }
  int64_t outputs() const { return p_.lines; }

  auto block(int64_t output, int64_t input, int64_t count) {
    for (int64_t first = 0; first < stride(); first += kLanes<float>) {
      for (int64_t i = 0; i < count; i += kBlock<Format>) {
        Words words[kLanes<float>] = {};
        const int64_t bytes = std::min(kBlock<Format>, count - i) / kPerByte;
        for (int64_t line = 0; line < kLanes<float>; ++line) {
          const char* data = at(output + first + line, input + i);
          if (bytes == sizeof(Words)) {
            std::memcpy(&words[line], data, sizeof(Words));
          } else {
            std::memcpy(&words[line], data, bytes);
          }
        }
        transpose<uint32_t>(words);
        Vector<float> scales = {}, zeros = {};
        for (int64_t word = 0, at = i; word < kLanes<float> && at < count; ++word, at += Format::kElements) {
          if (kHasGroups && (word == 0 || (input + at) % p_.group == 0)) {
            read_group(output + first, (input + at) / p_.group, scales, zeros);
          }
          widen(words[word], lines_ + at / kInputsPerLine * stride() + first, scales, zeros);
        }
        if (kIsPaired && kHasGroups) store<float>(scales_ + first, scales);
      }
    }
    if constexpr (kIsPaired) {
      return PairBlock{lines_, kHasGroups ? scales_ : nullptr};
    } else {
      return static_cast<const Word*>(lines_);
    }
  }

  Prefetch prefetch(int64_t output, int64_t input, int64_t count, int64_t steps) const {
    return Prefetch::of(at(output, input), p_.length / kPerByte, count > 0 ? stride() : 0, count / kPerByte, steps);
  }

 private:
  static constexpr bool kHasGroups = std::is_same_v<Format, Int4>;
  static constexpr int64_t kPerByte = Format::kElements / sizeof(uint32_t);
  static constexpr int64_t kDepth = std::max(kTileDepth * kInputsPerLine, kBlock<Format>);

  const char* at(int64_t output, int64_t input) const {
    return static_cast<const char*>(p_.values) + (output * p_.length + input) / kPerByte;
  }

  void read_group(int64_t output, int64_t group, Vector<float>& scales, Vector<float>& zeros) const {
    with_scales(p_, [&](const auto* data) {
      for (int lane = 0; lane < kLanes<float>; ++lane) {
        scales[lane] = static_cast<float>(data[(output + lane) * groups_ + group]);
      }
    });
    if constexpr (kHasZeros) {
      for (int lane = 0; lane < kLanes<float>; ++lane) zeros[lane] = p_.zeros[(output + lane) * groups_ + group] - 8.0f;
    }
  }

  // Writes the lines of a word's elements.
  void widen(const Words& word, Word* target, const Vector<float>& scales, const Vector<float>& zeros) {
    const auto element = [&](auto i) {
      Vector<float> value = Format::template piece<Format::piece_of(i)>(word);
      if constexpr (kHasZeros) value -= zeros;
      if constexpr (kHasGroups && !kIsPaired) value *= scales;
      return value;
    };
    unrolled<Format::kElements / kInputsPerLine>([&](auto line) {
#if defined(__x86_64__) && FUSEOPT_VECTOR_BYTES == 64
      if constexpr (kIsPaired && kHasGroups && !kHasZeros) {
        // The nibbles of a pair are the low ones of both halves, and the bits beside them choose among equal entries.
        const auto pair = _mm512_permutexvar_epi16((__m512i)(word >> 4 * line), (__m512i)nibbles());
        store<Word>(target + line * stride(), (Words)pair);
        return;
      }
#endif
      if constexpr (kIsPaired) {
        const auto low = (Words)element(std::integral_constant<int, 2 * line>());
        const auto high = (Words)element(std::integral_constant<int, 2 * line + 1>());
        store<Word>(target + line * stride(), low >> 16 | (high & 0xffff0000u));
      } else {
        store<Word>(target + line * stride(), element(line));
      }
    });
  }

  // bfloat16 of each nibble minus 8, twice.
  static Words nibbles() {
    BFloat16 values[sizeof(Words) / sizeof(BFloat16)];
    for (int i = 0; i < static_cast<int>(std::size(values)); ++i) values[i] = static_cast<float>(i % 16 - 8);
    Words all;
    std::memcpy(&all, values, sizeof(all));
    return all;
  }

  const LowBitProducts& p_;
  const int64_t groups_;
  alignas(kCacheLine) Word lines_[kDepth / kInputsPerLine * kTileWidth<float>];
  alignas(kCacheLine) float scales_[kTileWidth<float>];
};

// Products with the lines that fill tiles; returns their number. X: type of the input.
template <typename Format, bool kHasZeros, typename X>
int64_t multiply_low_bit_tiles(const LowBitProducts& p) {
  const int64_t whole = multiply_tiles<LowBitLines<Format, kHasZeros, sizeof(X) == 2>, X, float>(p);
  if constexpr (std::is_same_v<Format, Int8>) {
    const float* scales = static_cast<const float*>(p.scales);
    for (int64_t row = 0; row < p.rows; ++row) {
      float* output = p.output + row * p.output_stride;
#pragma omp simd
      for (int64_t line = 0; line < whole; ++line) output[line] *= scales[line];
    }
  }
  return whole;
}

template <typename X>
int64_t low_bit_tiles_of(const LowBitProducts& p) {
  if (p.bits == 8) return multiply_low_bit_tiles<Int8, false, X>(p);
  return p.zeros == nullptr ? multiply_low_bit_tiles<Int4, false, X>(p) : multiply_low_bit_tiles<Int4, true, X>(p);
}
