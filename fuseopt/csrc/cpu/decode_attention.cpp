// Attention of a decode step over a cache: see fuseopt/ops/decode/attention.py.
#include <torch/headeronly/util/Float8_e4m3fn.h>

#include <cstring>

#include "check.h"
#include "cpu/decode_kernels.h"
#include "cpu/ops.h"
#include "shared_arguments.h"

namespace fuseopt {
namespace {

/// One int32 or int64 for each item, or one for all of them.
class Integers {
 public:
  explicit Integers(const Tensor& tensor)
      : data_(tensor.const_data_ptr()), is_int32_(tensor.scalar_type() == ScalarType::Int),
        stride_(tensor.numel() == 1 ? 0 : tensor.stride(tensor.dim() - 1)) {}
  int64_t operator[](int64_t i) const {
    return is_int32_ ? static_cast<const int32_t*>(data_)[i * stride_] : static_cast<const int64_t*>(data_)[i * stride_];
  }

 private:
  const void* data_;
  bool is_int32_;
  int64_t stride_;
};

/// A call of torch's op takes several microseconds after a weight has been streamed through the caches.
Tensor packed(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
std::optional<Tensor> packed(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional(packed(*tensor)) : std::nullopt;
}

void check_sizes(const char* op, const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  const auto own = tensor.sizes();
  FUSEOPT_CHECK(std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()), "fuseopt::", op, ": ", name,
                " does not have the sizes that query and key_cache give it");
}

/// RMS norm and rotation of each head's vector: see fuseopt/ops/decode/head_rotation.py.
struct HeadRotation {
  std::optional<Tensor> table, positions, q_norm, k_norm;
  bool interleaved;
  double eps, offset;

  void check(const char* op, int64_t rows, int64_t head_dim) const {
    for (const auto& weight : {q_norm, k_norm}) {
      if (weight) check_sizes(op, "q_norm or k_norm", *weight, {head_dim});
    }
    if (!table) return;
    FUSEOPT_CHECK(table->dim() == 2 && table->size(1) % 2 == 0 && table->size(1) <= head_dim && positions, "fuseopt::",
                  op, ": rotary must be [positions, rotated] with an even rotated of at most ", head_dim,
                  ", and needs row_positions");
    check_sizes(op, "row_positions", *positions, {rows});
    const Integers places(*positions);
    for (int64_t row = 0; row < rows; ++row) {
      FUSEOPT_CHECK(places[row] >= 0 && places[row] < table->size(0), "fuseopt::", op, ": row position ", places[row],
                    " is outside the ", table->size(0), " positions of rotary");
    }
  }

  /// The vectors, [rows, heads, head_dim], contiguous; in their dtype if any is changed.
  Tensor apply(const Tensor& vectors, const std::optional<Tensor>& norm) const {
    if (!table && !norm) return packed(vectors);
    return dtype(vectors) == kFloat64 ? apply_in<double>(vectors, norm) : apply_in<float>(vectors, norm);
  }

 private:
  template <typename Math>
  Tensor apply_in(const Tensor& vectors, const std::optional<Tensor>& norm) const {
    const int64_t heads = vectors.size(1), head_dim = vectors.size(2);
    Tensor result = empty(vectors.sizes().data(), 3, vectors.scalar_type());
    const std::vector<Math> weight = norm ? flatten<Math>(*norm, head_dim, "norm") : std::vector<Math>();
    const auto lines = packed(table);
    const auto places = positions ? std::optional<Integers>(*positions) : std::nullopt;
    const int64_t pairs = table ? table->size(1) / 2 : 0, apart = interleaved ? 1 : pairs, stride = interleaved ? 2 : 1;
    const Rows from(vectors);
    const OutputRows to(result, head_dim);
    const RowBuffer<Math> buffer(head_dim), x(head_dim);
    for (int64_t i = 0; i < vectors.size(0) * heads; ++i) {
      const Math* read = from.read(i, buffer.get());
      std::copy(read, read + head_dim, x.get());
      if (norm) {
        Math squares = 0;
        for (int64_t d = 0; d < head_dim; ++d) squares += x.get()[d] * x.get()[d];
        const Math factor = 1 / std::sqrt(squares / head_dim + static_cast<Math>(eps));
        for (int64_t d = 0; d < head_dim; ++d) x.get()[d] *= factor * (weight[d] + static_cast<Math>(offset));
      }
      const float* line = table ? static_cast<const float*>(lines->const_data_ptr()) + (*places)[i / heads] * 2 * pairs : nullptr;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        Math* const at = x.get() + pair * stride;
        const Math first = at[0], second = at[apart], cosine = line[pair], sine = line[pairs + pair];
        at[0] = first * cosine - second * sine;
        at[apart] = second * cosine + first * sine;
      }
      to.store(i, 0, head_dim, x.get());
    }
    return result;
  }
};

/// What only decode_attention_ has.
struct Update {
  Tensor key, value;
  std::optional<Tensor> ancestry;
  HeadRotation rotation;
  int64_t window;
  double softcap;
};

uint8_t rounded_to(CacheDType type, float x) {
  if (type == kInt8) return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(x)));
  return c10::Float8_e4m3fn(x).x;
}

/// `quantize_heads` of fuseopt/ops/decode/quantized_heads.py for one vector; returns its scale.
float quantize(const float* vector, int64_t n, CacheDType type, uint8_t* elements) {
  const float most = type == kInt8 ? 127.0f : 448.0f;
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::abs(vector[i]);
    if (!(magnitude <= largest)) largest = magnitude;  // true for NaN
    if (std::isnan(largest)) break;
  }
  const float scale = largest / most;
  const bool has_elements = scale > 0 && std::isfinite(scale);
  for (int64_t i = 0; i < n; ++i) {
    elements[i] = has_elements ? rounded_to(type, std::clamp(vector[i] / scale, -most, most)) : 0;
  }
  return scale;
}

/// Writes each head's key or value, [rows, heads, head_dim], to its row's place in the cache.
void write_tokens(const Tensor& tokens, const Tensor& cache, const Integers& places, const Tensor* scales,
                  CacheDType type) {
  const int64_t heads = cache.size(1), capacity = cache.size(2), head_dim = cache.size(3);
  char* const target = static_cast<char*>(cache.mutable_data_ptr());
  if (scales == nullptr) {
    const int64_t bytes = head_dim * element_size(dtype(cache));
    const char* source = static_cast<const char*>(tokens.const_data_ptr());
    for (int64_t i = 0; i < cache.size(0) * heads; ++i) {
      std::memcpy(target + (i * capacity + places[i / heads]) * bytes, source + i * bytes, bytes);
    }
    return;
  }
  const Rows vectors(tokens);
  parallel(cache.size(0) * heads, 16 * head_dim, [&](int64_t first, int64_t last) {
    const RowBuffer<float> buffer(head_dim);
    for (int64_t i = first; i < last; ++i) {
      const int64_t to = i * capacity + places[i / heads];
      uint8_t* const elements = reinterpret_cast<uint8_t*>(target) + to * head_dim;
      static_cast<float*>(scales->mutable_data_ptr())[to] =
          quantize(vectors.read(i, buffer.get()), head_dim, type, elements);
    }
  });
}

template <typename Math>
void attend_to(const Tensor& query, const Tensor& keys, const Tensor& values, const Integers& lengths,
               const std::optional<Scales>& scales, const std::optional<Update>& update,
               const std::optional<Integers>& starts, const std::optional<Tensor>& mask,
               const std::optional<Tensor>& bias, double scale, Tensor& output) {
  const int64_t rows = query.size(0), heads = query.size(1), head_dim = query.size(2), added_length = update ? 1 : 0;
  const int64_t items = keys.size(0), kv_heads = keys.size(1), capacity = keys.size(2), queries_per_item = rows / items;
  const auto ancestry = update ? packed(update->ancestry) : std::nullopt;
  const int64_t distances = bias ? bias->size(1) : 0, bytes = scales ? 1 : element_size(dtype(keys));
  const std::vector<Math> biases = bias ? flatten<Math>(*bias, heads * distances, "bias") : std::vector<Math>();
  const Rows query_rows(query);
  const OutputRows output_rows(output, head_dim);
  const bool* kept = mask ? static_cast<const bool*>(mask->const_data_ptr()) : nullptr;
  const int* sources = ancestry ? static_cast<const int*>(ancestry->const_data_ptr()) : nullptr;
  int64_t longest = 0;
  for (int64_t item = 0; item < items; ++item) longest = std::max(longest, lengths[item] + added_length);
  longest = std::min(longest, capacity);

  // Heads that share keys are computed together if that leaves work for all threads.
  const int64_t group = heads / kv_heads, threads = torch::stable::get_num_threads();
  const int64_t queries = rows * kv_heads >= threads ? group : 1;
  parallel(rows * heads / queries, 2 * queries * longest * head_dim, [&](int64_t first, int64_t last) {
    const RowBuffer<Math> scaled(queries * head_dim), result(queries * head_dim), scores(queries * longest);
    for (int64_t i = first; i < last; ++i) {
      const int64_t query = i * queries, row = query / heads, head = query % heads, item = row / queries_per_item;
      for (int64_t q = 0; q < queries; ++q) {
        Math* const target = scaled.get() + q * head_dim;
        const Math* unscaled = query_rows.read(query + q, target);
        for (int64_t c = 0; c < head_dim; ++c) target[c] = unscaled[c] * static_cast<Math>(scale);
      }
      const int64_t to_head = head / group * capacity;
      HeadAttention attention = {};
      attention.query = scaled.get();
      attention.queries = queries;
      attention.keys = static_cast<const char*>(keys.const_data_ptr()) + to_head * head_dim * bytes;
      attention.values = static_cast<const char*>(values.const_data_ptr()) + to_head * head_dim * bytes;
      if (scales) {
        attention.cache_dtype = scales->dtype;
        attention.key_scales = static_cast<const float*>(scales->keys.const_data_ptr()) + to_head;
        attention.value_scales = static_cast<const float*>(scales->values.const_data_ptr()) + to_head;
      } else {
        attention.dtype = dtype(keys);
      }
      attention.head_dim = head_dim;
      attention.row_places = kv_heads * capacity;
      attention.row = item;
      attention.ancestry = sources ? sources + row * capacity : nullptr;
      attention.begin = starts ? std::max<int64_t>((*starts)[item], 0) : 0;
      attention.end = std::min(lengths[item] + added_length, capacity);
      if (update && update->window > 0) attention.begin = std::max(attention.begin, attention.end - update->window);
      attention.softcap = update ? update->softcap : 0;
      attention.mask = kept ? kept + item * capacity : nullptr;
      attention.bias = bias ? biases.data() + head * distances : nullptr;
      attention.distances = distances;
      attention.scores = scores.get();
      attention.output = result.get();
      decode_kernels().attend(attention);
      for (int64_t q = 0; q < queries; ++q) {
        output_rows.store(query + q, 0, head_dim, result.get() + q * head_dim);
      }
    }
  });
}

Tensor attend(const char* op, const Tensor& query, const std::optional<Update>& update, const Tensor& key_cache,
              const Tensor& value_cache, std::optional<Scales> scales, const Tensor& lengths,
              const std::optional<Tensor>& starts, const std::optional<Tensor>& mask, const std::optional<Tensor>& bias,
              double scale) {
  FUSEOPT_CHECK(query.dim() == 3 && key_cache.dim() == 4, "fuseopt::", op,
                ": query must be [rows, heads, head_dim], the caches [batch, kv_heads, capacity, head_dim]");
  const int64_t rows = query.size(0), heads = query.size(1), head_dim = query.size(2);
  const int64_t items = key_cache.size(0), kv_heads = key_cache.size(1), capacity = key_cache.size(2);
  check_sizes(op, "key_cache", key_cache, {items, kv_heads, capacity, head_dim});
  check_sizes(op, "value_cache", value_cache, {items, kv_heads, capacity, head_dim});
  FUSEOPT_CHECK(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), "fuseopt::", op, ": ", heads,
                " heads cannot be divided among ", kv_heads, " heads of the cache");
  FUSEOPT_CHECK(rows == 0 || (items > 0 && rows % items == 0), "fuseopt::", op, ": ", rows,
                " rows cannot be divided among ", items, " rows of the cache");
  FUSEOPT_CHECK(lengths.numel() == 1 || lengths.numel() == items, "fuseopt::", op, ": lengths must be one, or ", items);
  if (starts) check_sizes(op, "starts", *starts, {items});
  if (mask) check_sizes(op, "mask", *mask, {items, capacity});
  FUSEOPT_CHECK(!bias || (bias->dim() == 2 && bias->size(0) == heads && bias->size(1) > 0), "fuseopt::", op,
                ": bias must be [", heads, ", distances]");
  if (update && update->ancestry) check_sizes(op, "ancestry", *update->ancestry, {rows, capacity});
  if (scales) {
    for (const Tensor& part : {scales->keys, scales->values}) {
      FUSEOPT_CHECK(!update || part.is_contiguous(), "fuseopt::", op, ": scales that are written to must be contiguous");
    }
    scales = Scales{packed(scales->keys), packed(scales->values), scales->dtype};
  }
  const int64_t sizes[] = {rows, heads * head_dim};
  Tensor output = empty(sizes, 2, query.scalar_type());
  if (output.numel() == 0) return output;
  const Integers ends(lengths);
  Tensor queries = query;
  if (update) {
    check_sizes(op, "key", update->key, {rows, kv_heads, head_dim});
    check_sizes(op, "value", update->value, {rows, kv_heads, head_dim});
    update->rotation.check(op, rows, head_dim);
    FUSEOPT_CHECK(rows == items && key_cache.is_contiguous() && value_cache.is_contiguous(), "fuseopt::", op,
                  ": the caches are written to, so they must be contiguous and have ", rows, " rows");
    const HeadRotation& rotation = update->rotation;
    const Tensor key = rotation.apply(update->key, rotation.k_norm), value = packed(update->value);
    if (rotation.table || rotation.q_norm) queries = rotation.apply(query, rotation.q_norm);
    for (int64_t row = 0; row < rows; ++row) {
      FUSEOPT_CHECK(ends[row] >= 0 && ends[row] < capacity, "fuseopt::", op, ": position ", ends[row],
                    " is outside the cache of ", capacity, " places");
    }
    const CacheDType type = scales ? scales->dtype : kAsQuery;
    write_tokens(key, key_cache, ends, scales ? &scales->keys : nullptr, type);
    write_tokens(value, value_cache, ends, scales ? &scales->values : nullptr, type);
  }
  const Tensor keys = packed(key_cache), values = packed(value_cache);
  const auto first = starts ? std::optional<Integers>(*starts) : std::nullopt;
  const auto run = dtype(query) == kFloat64 ? attend_to<double> : attend_to<float>;
  run(queries, keys, values, ends, scales, update, first, packed(mask), bias, scale, output);
  return output;
}

}  // namespace

Tensor decode_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
                        const Tensor& lengths, const std::optional<Tensor>& starts, const std::optional<Tensor>& mask,
                        const std::optional<Tensor>& bias, double scale, bool) {
  constexpr const char* op = "decode_attention";
  const auto scales = scales_of(op, query, key_cache, key_scales, value_scales);
  return attend(op, query, std::nullopt, key_cache, value_cache, scales, lengths, starts, mask, bias, scale);
}

Tensor decode_attention_(const Tensor& query, const Tensor& key, const Tensor& value, Tensor key_cache,
                         Tensor value_cache, const std::optional<Tensor>& key_scales,
                         const std::optional<Tensor>& value_scales, const Tensor& positions,
                         const std::optional<Tensor>& starts, const std::optional<Tensor>& mask,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& ancestry, double scale,
                         const std::optional<Tensor>& rotary, const std::optional<Tensor>& row_positions,
                         bool interleaved, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                         double norm_eps, double norm_offset, int64_t window, double softcap, bool) {
  constexpr const char* op = "decode_attention_";
  const HeadRotation rotation{rotary, row_positions, q_norm, k_norm, interleaved, norm_eps, norm_offset};
  const Update update{key, value, ancestry, rotation, window, softcap};
  const auto scales = scales_of(op, query, key_cache, key_scales, value_scales);
  return attend(op, query, update, key_cache, value_cache, scales, positions, starts, mask, bias, scale);
}

}  // namespace fuseopt
