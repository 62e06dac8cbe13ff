// The functions of DecodeKernels, which choose by dtype. In the same namespace as the other bodies.

#define FUSEOPT_BY_DTYPE(function, dtype, ...)                    \
  switch (dtype) {                                                \
    case kFloat32: return function<float>(__VA_ARGS__);           \
    case kFloat16: return function<Half>(__VA_ARGS__);            \
    case kBFloat16: return function<BFloat16>(__VA_ARGS__);       \
    case kFloat64: return function<double>(__VA_ARGS__);          \
  }

void dot_lines(const Products& products) { FUSEOPT_BY_DTYPE(dot_lines_of, products.dtype, products) }
void dot_tiles(const Products& products) { FUSEOPT_BY_DTYPE(dot_tiles_of, products.dtype, products) }
void add_lines(const Products& products) { FUSEOPT_BY_DTYPE(add_lines_of, products.dtype, products) }
void add_tiles(const Products& products) { FUSEOPT_BY_DTYPE(add_tiles_of, products.dtype, products) }

void attend(const HeadAttention& attention) {
  if (attention.cache_dtype == kInt8) return attend_of<int8_t>(attention);
  if (attention.cache_dtype == kFp8) return attend_of<Fp8>(attention);
  FUSEOPT_BY_DTYPE(attend_of, attention.dtype, attention)
}

void low_bit(const LowBitProducts& products) {
  const int64_t begin = products.rows < kLowBitTileRows ? 0 : low_bit_tiles_of<float>(products);
  const LowBitProducts p = lines_from(products, begin);
  if (p.lines == 0) return;
  if (p.bits == 8) return multiply_low_bit<Int8, false>(p);
  p.zeros == nullptr ? multiply_low_bit<Int4, false>(p) : multiply_low_bit<Int4, true>(p);
}

#undef FUSEOPT_BY_DTYPE
